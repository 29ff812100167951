/* src/sql/admin.sql: cleanup and privileges */

-- set: admin
CREATE FUNCTION pg_catalog.idem_cleanup(
	batch integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cleanup';
COMMENT ON FUNCTION pg_catalog.idem_cleanup IS
	'remove expired keys, expired keys of jobs and expired rows of the job history, oldest first, and make a job dead if the lease of its last attempt has expired; handles at most batch rows of each kind; returns the number of rows';

-- set: none
CREATE FUNCTION pg_catalog.idem_grant(
	role text,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_grant';
COMMENT ON FUNCTION pg_catalog.idem_grant IS
	'grant the privileges of an application, an administrator or a monitor (app, admin, monitor) to a role';

-- set: none
CREATE FUNCTION pg_catalog.idem_revoke(
	role text,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_revoke';
COMMENT ON FUNCTION pg_catalog.idem_revoke IS
	'revoke the privileges that idem_grant() granted';
