-- in the database of POSTGRES_DB; allow your role to use it with pg_catalog.idem_grant('role', 'app')
CREATE EXTENSION idem;
