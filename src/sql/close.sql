/* src/sql/close.sql: privileges on all members; the last part */

/*
 * Only the owner has privileges on a member.  idem_close_members() revokes the
 * default privileges of PUBLIC and those that ALTER DEFAULT PRIVILEGES granted, so
 * no function needs a REVOKE of its own.  Grants come after it.
 */
-- set: none
CREATE FUNCTION idem_internal.idem_close_members()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_close_members';
COMMENT ON FUNCTION idem_internal.idem_close_members IS
	'for the scripts of the extension: revoke all privileges of other roles than the owner on members made in this transaction';
SELECT idem_internal.idem_close_members();

/*
 * Members of pg_monitor see numbers and health without idem_grant().  Views read
 * other views with the privileges of their owner, but call functions with those of
 * the caller.
 */
SELECT idem_grant('pg_monitor', 'monitor');
