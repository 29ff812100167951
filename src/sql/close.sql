/* src/sql/close.sql: privileges on all members; the last part */

/*
 * Only the owner has privileges on a member.  idem_close_members() revokes the
 * default privileges of PUBLIC and those that ALTER DEFAULT PRIVILEGES granted, so
 * no function needs a REVOKE of its own.  Grants come after it.  idem_grant()
 * grants sets of privileges later.
 */
CREATE FUNCTION pg_catalog.idem_close_members()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_close_members';
COMMENT ON FUNCTION pg_catalog.idem_close_members IS
	'for the scripts of the extension: revoke all privileges of other roles than the owner on members made in this transaction';
SELECT idem_close_members();

/*
 * Members of pg_monitor see numbers and health without idem_grant().  Views read
 * other views with the privileges of their owner, but call functions with those of
 * the caller.
 */
GRANT USAGE ON SCHEMA idem TO pg_monitor;
GRANT SELECT ON
	idem.key_summary,
	idem.queue_status,
	idem.schedule_status,
	idem.stats,
	idem.queue_stats,
	idem.queue_latency,
	idem.queue_latency_buckets,
	idem.cleanup_progress,
	idem.worker_status,
	idem.workers,
	idem.checks,
	idem.checks_citus,
	idem.health,
	idem.report_jobs,
	idem.report_waiting,
	idem.report_dead,
	idem.report_leases,
	idem.report_scopes,
	idem.report_hours
TO pg_monitor;
GRANT EXECUTE ON FUNCTION
	pg_catalog.idem_stat_databases,
	pg_catalog.idem_stat_queues,
	pg_catalog.idem_stat_latency,
	pg_catalog.idem_stat_cleanup,
	pg_catalog.idem_stat_worker,
	pg_catalog.idem_version,
	pg_catalog.idem_checks,
	pg_catalog.idem_checks_local,
	pg_catalog.idem_citus_table,
	pg_catalog.idem_stat_tables,
	pg_catalog.idem_doctor,
	pg_catalog.idem_clock,
	pg_catalog.idem_key_state,
	pg_catalog.idem_visible,
	pg_catalog.idem_visible_literal,
	pg_catalog.idem_visible_name,
	pg_catalog.idem_slot,
	pg_catalog.idem_report,
	pg_catalog.idem_report_html,
	pg_catalog.idem_report_number,
	pg_catalog.idem_report_cells,
	pg_catalog.idem_report_age,
	pg_catalog.idem_report_table,
	pg_catalog.idem_report_chart,
	pg_catalog.idem_report_style,
	pg_catalog.idem_report_overview,
	pg_catalog.idem_report_health,
	pg_catalog.idem_report_trends,
	pg_catalog.idem_report_queues,
	pg_catalog.idem_report_running,
	pg_catalog.idem_report_dead,
	pg_catalog.idem_report_decisions,
	pg_catalog.idem_report_duplicates,
	pg_catalog.idem_report_keys,
	pg_catalog.idem_report_why,
	pg_catalog.idem_report_lease
TO pg_monitor;
