/* src/sql/close.sql: privileges of members; the last part */

/*
 * Nothing is open to anybody but its owner: neither what PUBLIC has by default
 * nor what ALTER DEFAULT PRIVILEGES has given stays.  Grants come after this;
 * idem_grant() hands out sets of privileges.
 */
CREATE FUNCTION pg_catalog.idem_close_members()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_close_members';
COMMENT ON FUNCTION pg_catalog.idem_close_members IS
	'for the scripts of the extension: revoke what anybody but the owner has on members made in this transaction';
SELECT idem_close_members();

/* Members of pg_monitor see numbers and health without idem_grant(). */
GRANT USAGE ON SCHEMA idem TO pg_monitor;
GRANT SELECT ON
	idem.key_summary,
	idem.queue_status,
	idem.stats,
	idem.queue_stats,
	idem.cleanup_progress,
	idem.worker_status,
	idem.checks,
	idem.health
TO pg_monitor;
GRANT EXECUTE ON FUNCTION
	pg_catalog.idem_stat_databases,
	pg_catalog.idem_stat_queues,
	pg_catalog.idem_stat_cleanup,
	pg_catalog.idem_stat_worker,
	pg_catalog.idem_version,
	pg_catalog.idem_checks,
	pg_catalog.idem_doctor,
	pg_catalog.idem_clock,
	pg_catalog.idem_key_state
TO pg_monitor;
