/* src/sql/stats.sql: statistics, each function with its view */

/*
 * Statistics and health, for monitors: no keys, no payloads.  The numbers live in
 * the shared memory of a server that preloads the library.
 */

CREATE FUNCTION pg_catalog.idem_stat_databases(
	OUT datid oid,
	OUT claims bigint,
	OUT resumed bigint,
	OUT busy bigint,
	OUT held bigint,
	OUT replays bigint,
	OUT parked bigint,
	OUT exhausted bigint,
	OUT mismatches bigint,
	OUT takeovers bigint,
	OUT stale_tokens bigint,
	OUT expired_keys bigint,
	OUT abandoned_leases bigint,
	OUT expired_job_keys bigint,
	OUT expired_job_history bigint,
	OUT stats_reset timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 10
AS 'MODULE_PATHNAME', 'idem_stat_databases';
COMMENT ON FUNCTION pg_catalog.idem_stat_databases IS
	'what idem.stats is made of; no rows if the library is not preloaded';

CREATE VIEW idem.stats AS
SELECT s.datid,
	   d.datname,
	   s.claims,
	   s.resumed,
	   s.busy,
	   s.held,
	   s.replays,
	   s.parked,
	   s.exhausted,
	   s.mismatches,
	   s.takeovers,
	   s.stale_tokens,
	   s.expired_keys,
	   s.abandoned_leases,
	   s.expired_job_keys,
	   s.expired_job_history,
	   s.stats_reset
  FROM idem_stat_databases() AS s
  LEFT JOIN pg_database AS d ON d.oid = s.datid;
COMMENT ON VIEW idem.stats IS 'what was counted in each database of the server since stats_reset';
COMMENT ON COLUMN idem.stats.datid IS 'the database';
COMMENT ON COLUMN idem.stats.datname IS 'its name';
COMMENT ON COLUMN idem.stats.claims IS 'claims and leases that got the key';
COMMENT ON COLUMN idem.stats.resumed IS 'leases that the same worker has asked for again';
COMMENT ON COLUMN idem.stats.busy IS 'claims that were told that somebody else is at it';
COMMENT ON COLUMN idem.stats.held IS 'claims of a key that the transaction had claimed before';
COMMENT ON COLUMN idem.stats.replays IS 'claims that got the stored result: duplicates';
COMMENT ON COLUMN idem.stats.parked IS 'claims that were told that an operator has to decide';
COMMENT ON COLUMN idem.stats.exhausted IS 'claims that were told that there were enough attempts';
COMMENT ON COLUMN idem.stats.mismatches IS 'claims that were refused because of another request (ID001)';
COMMENT ON COLUMN idem.stats.takeovers IS 'claims that took over from a lease that had run out';
COMMENT ON COLUMN idem.stats.stale_tokens IS 'calls with the token of a lease or a job that is somebody else''s by now (ID003)';
COMMENT ON COLUMN idem.stats.expired_keys IS 'keys that cleanup has removed';
COMMENT ON COLUMN idem.stats.abandoned_leases IS 'of these the leases that nobody had finished';
COMMENT ON COLUMN idem.stats.expired_job_keys IS 'keys of jobs that cleanup has removed';
COMMENT ON COLUMN idem.stats.expired_job_history IS 'jobs that cleanup has removed from the history';
COMMENT ON COLUMN idem.stats.stats_reset IS 'since when is counted';

CREATE FUNCTION pg_catalog.idem_stat_queues(
	OUT datid oid,
	OUT queue text,
	OUT enqueued bigint,
	OUT absorbed bigint,
	OUT replaced bigint,
	OUT postponed bigint,
	OUT rerun bigint,
	OUT done bigint,
	OUT refused bigint,
	OUT fetched bigint,
	OUT completed bigint,
	OUT failed bigint,
	OUT dead bigint,
	OUT snoozed bigint,
	OUT cancelled bigint,
	OUT retried bigint,
	OUT stats_reset timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 100
AS 'MODULE_PATHNAME', 'idem_stat_queues';
COMMENT ON FUNCTION pg_catalog.idem_stat_queues IS
	'what idem.queue_stats is made of; no rows if the library is not preloaded';

CREATE VIEW idem.queue_stats AS
SELECT s.datid,
	   d.datname,
	   s.queue,
	   s.enqueued,
	   s.absorbed,
	   s.replaced,
	   s.postponed,
	   s.rerun,
	   s.done,
	   s.refused,
	   s.fetched,
	   s.completed,
	   s.failed,
	   s.dead,
	   s.snoozed,
	   s.cancelled,
	   s.retried,
	   s.stats_reset
  FROM idem_stat_queues() AS s
  LEFT JOIN pg_database AS d ON d.oid = s.datid;
COMMENT ON VIEW idem.queue_stats IS 'what was counted for each queue of the server since stats_reset';
COMMENT ON COLUMN idem.queue_stats.datid IS 'the database';
COMMENT ON COLUMN idem.queue_stats.datname IS 'its name';
COMMENT ON COLUMN idem.queue_stats.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queue_stats.enqueued IS 'jobs that were enqueued';
COMMENT ON COLUMN idem.queue_stats.absorbed IS 'duplicates that a job has absorbed';
COMMENT ON COLUMN idem.queue_stats.replaced IS 'duplicates that have replaced the payload of a job';
COMMENT ON COLUMN idem.queue_stats.postponed IS 'duplicates that have put off a job (debounce)';
COMMENT ON COLUMN idem.queue_stats.rerun IS 'duplicates that let a job run once more';
COMMENT ON COLUMN idem.queue_stats.done IS 'duplicates of jobs that were done already';
COMMENT ON COLUMN idem.queue_stats.refused IS 'duplicates that were refused (ID005)';
COMMENT ON COLUMN idem.queue_stats.fetched IS 'jobs that were fetched, again after each attempt';
COMMENT ON COLUMN idem.queue_stats.completed IS 'jobs that were completed';
COMMENT ON COLUMN idem.queue_stats.failed IS 'attempts that have failed';
COMMENT ON COLUMN idem.queue_stats.dead IS 'jobs that were given up';
COMMENT ON COLUMN idem.queue_stats.snoozed IS 'jobs that were given back until later';
COMMENT ON COLUMN idem.queue_stats.cancelled IS 'jobs that were cancelled';
COMMENT ON COLUMN idem.queue_stats.retried IS 'dead or cancelled jobs that were brought back';
COMMENT ON COLUMN idem.queue_stats.stats_reset IS 'since when is counted';

CREATE FUNCTION pg_catalog.idem_stat_cleanup(
	OUT datid oid,
	OUT phase text,
	OUT removed bigint,
	OUT rows_per_second double precision,
	OUT backlog bigint,
	OUT started_at timestamp with time zone,
	OUT last_finished_at timestamp with time zone,
	OUT last_error text,
	OUT last_error_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 10
AS 'MODULE_PATHNAME', 'idem_stat_cleanup';
COMMENT ON FUNCTION pg_catalog.idem_stat_cleanup IS
	'what idem.cleanup_progress is made of; no rows if the library is not preloaded';

CREATE VIEW idem.cleanup_progress AS
SELECT c.datid,
	   d.datname,
	   c.phase,
	   c.removed,
	   c.rows_per_second,
	   c.backlog,
	   c.started_at,
	   c.last_finished_at,
	   c.last_error,
	   c.last_error_at
  FROM idem_stat_cleanup() AS c
  LEFT JOIN pg_database AS d ON d.oid = c.datid;
COMMENT ON VIEW idem.cleanup_progress IS 'what the background worker does and has done in each database that has the extension';
COMMENT ON COLUMN idem.cleanup_progress.datid IS 'the database';
COMMENT ON COLUMN idem.cleanup_progress.datname IS 'its name';
COMMENT ON COLUMN idem.cleanup_progress.phase IS 'keys, job keys, job history, jobs (those without attempts left): at work there; idle, off (idem.cleanup), failing, locked (somebody has locked a table), subscribed (a subscription writes tables, which are skipped), not installed (any more)';
COMMENT ON COLUMN idem.cleanup_progress.removed IS 'rows removed in this round, which ends when there is nothing left';
COMMENT ON COLUMN idem.cleanup_progress.rows_per_second IS 'how fast, without the pauses';
COMMENT ON COLUMN idem.cleanup_progress.backlog IS 'estimate of what is left, as of the end of the last run; null if it is not known';
COMMENT ON COLUMN idem.cleanup_progress.started_at IS 'when the round began';
COMMENT ON COLUMN idem.cleanup_progress.last_finished_at IS 'when a round last came to its end';
COMMENT ON COLUMN idem.cleanup_progress.last_error IS 'the last error; it is over if phase is not failing';
COMMENT ON COLUMN idem.cleanup_progress.last_error_at IS 'when that was';

CREATE FUNCTION pg_catalog.idem_stat_worker(
	OUT preloaded boolean,
	OUT library_version text,
	OUT state text,
	OUT launcher_pid integer,
	OUT started_at timestamp with time zone,
	OUT runs bigint,
	OUT last_run_at timestamp with time zone,
	OUT datid oid,
	OUT worker_pid integer,
	OUT used_slots integer,
	OUT no_slot_since timestamp with time zone,
	OUT clock_back_at timestamp with time zone,
	OUT clock_back_seconds double precision,
	OUT memory_bytes bigint,
	OUT stats_full boolean,
	OUT overdue_seconds double precision,
	OUT last_error text,
	OUT last_error_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_stat_worker';
COMMENT ON FUNCTION pg_catalog.idem_stat_worker IS
	'what idem.worker_status is made of';

CREATE VIEW idem.worker_status AS
SELECT w.preloaded,
	   w.state,
	   w.launcher_pid,
	   w.started_at,
	   w.runs,
	   w.last_run_at,
	   d.datname,
	   w.worker_pid,
	   w.used_slots,
	   w.no_slot_since,
	   w.memory_bytes,
	   w.library_version,
	   w.last_error,
	   w.last_error_at
  FROM idem_stat_worker() AS w
  LEFT JOIN pg_database AS d ON d.oid = w.datid;
COMMENT ON VIEW idem.worker_status IS 'the background worker of the server, one row';
COMMENT ON COLUMN idem.worker_status.preloaded IS 'whether the library is in shared_preload_libraries; without that there is no worker';
COMMENT ON COLUMN idem.worker_status.state IS 'sleeping, working (in a database), waiting for a free slot, failing, stopped';
COMMENT ON COLUMN idem.worker_status.launcher_pid IS 'process that decides what is cleaned up when; null if there is none';
COMMENT ON COLUMN idem.worker_status.started_at IS 'when that was started';
COMMENT ON COLUMN idem.worker_status.runs IS 'visits to databases since then';
COMMENT ON COLUMN idem.worker_status.last_run_at IS 'when the last of them ended';
COMMENT ON COLUMN idem.worker_status.datname IS 'the database that is being visited';
COMMENT ON COLUMN idem.worker_status.worker_pid IS 'process that does so; null if there is none';
COMMENT ON COLUMN idem.worker_status.used_slots IS 'background workers of all kinds; there may be max_worker_processes';
COMMENT ON COLUMN idem.worker_status.no_slot_since IS 'since when no background worker slot is free; null if one is';
COMMENT ON COLUMN idem.worker_status.memory_bytes IS 'memory of the launcher';
COMMENT ON COLUMN idem.worker_status.library_version IS 'version of the library that this session has loaded';
COMMENT ON COLUMN idem.worker_status.last_error IS 'the last error of the launcher itself, not of a database; it is over if state is not failing';
COMMENT ON COLUMN idem.worker_status.last_error_at IS 'when that was';

CREATE FUNCTION pg_catalog.idem_stats_reset()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_stats_reset';
COMMENT ON FUNCTION pg_catalog.idem_stats_reset IS
	'let the statistics of this database and its queues begin anew';
