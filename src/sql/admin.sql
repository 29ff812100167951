/* src/sql/admin.sql: cleanup and privileges */

CREATE FUNCTION pg_catalog.idem_cleanup(
	batch integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cleanup';
COMMENT ON FUNCTION pg_catalog.idem_cleanup IS
	'remove expired keys and the history of jobs that is kept no longer, oldest first, and give up jobs whose last lease has run out, at most batch of each; returns how many';

CREATE FUNCTION pg_catalog.idem_grant(
	role text,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_grant';
COMMENT ON FUNCTION pg_catalog.idem_grant IS
	'grant the privileges of an application, an administrator or a monitor (app, admin, monitor) to a role';

CREATE FUNCTION pg_catalog.idem_revoke(
	role text,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_revoke';
COMMENT ON FUNCTION pg_catalog.idem_revoke IS
	'take back what idem_grant() has granted';
