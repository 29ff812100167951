/* src/sql/stats.sql: statistics; each view after its function */

/*
 * For monitors: these views show no keys and no payloads.  The counters are in
 * shared memory, so they need a server that preloads the library.
 */

-- set: monitor
CREATE FUNCTION idem_internal.idem_stat_databases(
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
COMMENT ON FUNCTION idem_internal.idem_stat_databases IS
	'rows of idem.stats; returns none if the library is not preloaded';

-- set: monitor
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
  FROM idem_internal.idem_stat_databases() AS s
  LEFT JOIN pg_database AS d ON d.oid = s.datid;
COMMENT ON VIEW idem.stats IS 'counters of each database of the server since stats_reset';
COMMENT ON COLUMN idem.stats.datid IS 'OID of the database';
COMMENT ON COLUMN idem.stats.datname IS 'name of the database';
COMMENT ON COLUMN idem.stats.claims IS 'claims and leases that got their key';
COMMENT ON COLUMN idem.stats.resumed IS 'leases that the same worker requested again';
COMMENT ON COLUMN idem.stats.busy IS 'claims that were answered busy: another caller holds the key';
COMMENT ON COLUMN idem.stats.held IS 'claims that were answered held: the same transaction had claimed the key before';
COMMENT ON COLUMN idem.stats.replays IS 'claims that got the stored result: duplicates';
COMMENT ON COLUMN idem.stats.parked IS 'claims that were answered parked: an operator must decide';
COMMENT ON COLUMN idem.stats.exhausted IS 'claims that were answered exhausted: no attempts are left';
COMMENT ON COLUMN idem.stats.mismatches IS 'claims that were refused because the request differed (ID001)';
COMMENT ON COLUMN idem.stats.takeovers IS 'claims that took over an expired lease';
COMMENT ON COLUMN idem.stats.stale_tokens IS 'calls with the token of a lease or a job that the caller no longer holds (ID003, or stale)';
COMMENT ON COLUMN idem.stats.expired_keys IS 'keys that cleanup removed';
COMMENT ON COLUMN idem.stats.abandoned_leases IS 'those of expired_keys that were unfinished leases';
COMMENT ON COLUMN idem.stats.expired_job_keys IS 'keys of jobs that cleanup removed';
COMMENT ON COLUMN idem.stats.expired_job_history IS 'jobs that cleanup removed from the history';
COMMENT ON COLUMN idem.stats.stats_reset IS 'when the counters were last reset';

-- set: monitor
CREATE FUNCTION idem_internal.idem_stat_queues(
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
	OUT rescheduled bigint,
	OUT stats_reset timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 100
AS 'MODULE_PATHNAME', 'idem_stat_queues';
COMMENT ON FUNCTION idem_internal.idem_stat_queues IS
	'rows of idem.queue_stats; returns none if the library is not preloaded';

-- set: monitor
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
	   s.rescheduled,
	   s.stats_reset
  FROM idem_internal.idem_stat_queues() AS s
  LEFT JOIN pg_database AS d ON d.oid = s.datid;
COMMENT ON VIEW idem.queue_stats IS 'counters of each queue of the server since stats_reset';
COMMENT ON COLUMN idem.queue_stats.datid IS 'OID of the database';
COMMENT ON COLUMN idem.queue_stats.datname IS 'name of the database';
COMMENT ON COLUMN idem.queue_stats.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queue_stats.enqueued IS 'jobs that were enqueued';
COMMENT ON COLUMN idem.queue_stats.absorbed IS 'duplicates that a job absorbed';
COMMENT ON COLUMN idem.queue_stats.replaced IS 'duplicates that replaced the payload of a job';
COMMENT ON COLUMN idem.queue_stats.postponed IS 'duplicates that postponed a job (debounce)';
COMMENT ON COLUMN idem.queue_stats.rerun IS 'duplicates that made a follow-up job (rerun)';
COMMENT ON COLUMN idem.queue_stats.done IS 'duplicates of jobs that were already done';
COMMENT ON COLUMN idem.queue_stats.refused IS 'duplicates that were refused (ID005)';
COMMENT ON COLUMN idem.queue_stats.fetched IS 'fetches of jobs; each attempt counts';
COMMENT ON COLUMN idem.queue_stats.completed IS 'jobs that were completed';
COMMENT ON COLUMN idem.queue_stats.failed IS 'attempts that failed';
COMMENT ON COLUMN idem.queue_stats.dead IS 'jobs that were made dead';
COMMENT ON COLUMN idem.queue_stats.snoozed IS 'jobs that were given back and postponed';
COMMENT ON COLUMN idem.queue_stats.cancelled IS 'jobs that were cancelled';
COMMENT ON COLUMN idem.queue_stats.retried IS 'dead or cancelled jobs that idem_retry() put back';
COMMENT ON COLUMN idem.queue_stats.rescheduled IS 'jobs that idem_reschedule_many() changed';
COMMENT ON COLUMN idem.queue_stats.stats_reset IS 'when the counters were last reset';

-- set: monitor
CREATE FUNCTION idem_internal.idem_stat_latency(
	OUT datid oid,
	OUT queue text,
	OUT kind text,
	OUT count bigint,
	OUT total_seconds double precision,
	OUT p50_seconds double precision,
	OUT p90_seconds double precision,
	OUT p99_seconds double precision,
	OUT bounds double precision[],
	OUT counts bigint[],
	OUT stats_reset timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 200
AS 'MODULE_PATHNAME', 'idem_stat_latency';
COMMENT ON FUNCTION idem_internal.idem_stat_latency IS
	'rows of idem.queue_latency and idem.queue_latency_buckets; returns none if the library is not preloaded';

-- set: monitor
CREATE VIEW idem.queue_latency AS
SELECT s.datid,
	   d.datname,
	   s.queue,
	   s.kind,
	   s.count,
	   s.total_seconds,
	   s.p50_seconds,
	   s.p90_seconds,
	   s.p99_seconds,
	   s.stats_reset
  FROM idem_internal.idem_stat_latency() AS s
  LEFT JOIN pg_database AS d ON d.oid = s.datid;
COMMENT ON VIEW idem.queue_latency IS 'how long the jobs of each queue of the server waited and ran since stats_reset';
COMMENT ON COLUMN idem.queue_latency.datid IS 'OID of the database';
COMMENT ON COLUMN idem.queue_latency.datname IS 'name of the database';
COMMENT ON COLUMN idem.queue_latency.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queue_latency.kind IS 'wait: from when a job was due to its fetch; run: from the fetch until the worker completed, failed or snoozed the job';
COMMENT ON COLUMN idem.queue_latency.count IS 'number of times measured: each fetch, or each end of an attempt';
COMMENT ON COLUMN idem.queue_latency.total_seconds IS 'their sum';
COMMENT ON COLUMN idem.queue_latency.p50_seconds IS 'estimate of the median; null if there are none';
COMMENT ON COLUMN idem.queue_latency.p90_seconds IS 'estimate: 90 % of the times are not longer';
COMMENT ON COLUMN idem.queue_latency.p99_seconds IS 'estimate: 99 % of the times are not longer';
COMMENT ON COLUMN idem.queue_latency.stats_reset IS 'when the histograms were last reset';

-- set: monitor
CREATE VIEW idem.queue_latency_buckets AS
SELECT s.datid,
	   d.datname,
	   s.queue,
	   s.kind,
	   b.le,
	   b.count,
	   s.total_seconds
  FROM idem_internal.idem_stat_latency() AS s
 CROSS JOIN LATERAL unnest(s.bounds, s.counts) AS b (le, count)
  LEFT JOIN pg_database AS d ON d.oid = s.datid;
COMMENT ON VIEW idem.queue_latency_buckets IS 'the histograms behind idem.queue_latency, as Prometheus counts: a row per bucket';
COMMENT ON COLUMN idem.queue_latency_buckets.datid IS 'OID of the database';
COMMENT ON COLUMN idem.queue_latency_buckets.datname IS 'name of the database';
COMMENT ON COLUMN idem.queue_latency_buckets.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queue_latency_buckets.kind IS 'wait or run, as in idem.queue_latency';
COMMENT ON COLUMN idem.queue_latency_buckets.le IS 'bound of the bucket in seconds, a power of two; Infinity in the last row';
COMMENT ON COLUMN idem.queue_latency_buckets.count IS 'number of times that are less than or equal to le';
COMMENT ON COLUMN idem.queue_latency_buckets.total_seconds IS 'sum of all times; the same in each row of a queue and kind';

-- set: monitor
CREATE FUNCTION idem_internal.idem_stat_cleanup(
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
COMMENT ON FUNCTION idem_internal.idem_stat_cleanup IS
	'rows of idem.cleanup_progress; returns none if the library is not preloaded';

-- set: monitor
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
  FROM idem_internal.idem_stat_cleanup() AS c
  LEFT JOIN pg_database AS d ON d.oid = c.datid;
COMMENT ON VIEW idem.cleanup_progress IS 'cleanup by the background worker in each database that has the extension';
COMMENT ON COLUMN idem.cleanup_progress.datid IS 'OID of the database';
COMMENT ON COLUMN idem.cleanup_progress.datname IS 'name of the database';
COMMENT ON COLUMN idem.cleanup_progress.phase IS 'keys, job keys, job history or jobs (those without attempts left): the worker removes these now; idle; off (by idem.cleanup); failing; locked (another session has locked a table); subscribed (a subscription writes tables, which cleanup skips); not installed (any more)';
COMMENT ON COLUMN idem.cleanup_progress.removed IS 'rows removed in this round; a round ends when nothing is left to remove';
COMMENT ON COLUMN idem.cleanup_progress.rows_per_second IS 'rows removed per second, without the pauses';
COMMENT ON COLUMN idem.cleanup_progress.backlog IS 'estimated number of rows left at the end of the last visit; null if it is not known';
COMMENT ON COLUMN idem.cleanup_progress.started_at IS 'when the round began';
COMMENT ON COLUMN idem.cleanup_progress.last_finished_at IS 'when the last round ended';
COMMENT ON COLUMN idem.cleanup_progress.last_error IS 'the last error; cleanup has recovered from it if phase is not failing';
COMMENT ON COLUMN idem.cleanup_progress.last_error_at IS 'when the last error was raised';

-- set: monitor
CREATE FUNCTION idem_internal.idem_stat_worker(
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
COMMENT ON FUNCTION idem_internal.idem_stat_worker IS
	'the row of idem.worker_status';

-- set: monitor
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
  FROM idem_internal.idem_stat_worker() AS w
  LEFT JOIN pg_database AS d ON d.oid = w.datid;
COMMENT ON VIEW idem.worker_status IS 'the background worker of the server; one row';
COMMENT ON COLUMN idem.worker_status.preloaded IS 'whether the library is in shared_preload_libraries; if not, there is no worker';
COMMENT ON COLUMN idem.worker_status.state IS 'sleeping, working (in a database), waiting for a free slot, failing or stopped';
COMMENT ON COLUMN idem.worker_status.launcher_pid IS 'process id of the launcher, which decides when the worker visits which database; null if there is none';
COMMENT ON COLUMN idem.worker_status.started_at IS 'when the launcher was started';
COMMENT ON COLUMN idem.worker_status.runs IS 'visits to databases since the launcher was started';
COMMENT ON COLUMN idem.worker_status.last_run_at IS 'when the last visit ended';
COMMENT ON COLUMN idem.worker_status.datname IS 'name of the database that the worker visits now';
COMMENT ON COLUMN idem.worker_status.worker_pid IS 'process id of the worker; null if there is none';
COMMENT ON COLUMN idem.worker_status.used_slots IS 'background workers of all kinds that run now; the limit is max_worker_processes';
COMMENT ON COLUMN idem.worker_status.no_slot_since IS 'since when the launcher has found no free background worker slot; null if one is free';
COMMENT ON COLUMN idem.worker_status.memory_bytes IS 'memory of the launcher';
COMMENT ON COLUMN idem.worker_status.library_version IS 'version of the library that this session has loaded';
COMMENT ON COLUMN idem.worker_status.last_error IS 'the last error of the launcher itself, not of a database; the launcher has recovered from it if state is not failing';
COMMENT ON COLUMN idem.worker_status.last_error_at IS 'when the last error was raised';

-- set: admin
CREATE FUNCTION pg_catalog.idem_stats_reset()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_stats_reset';
COMMENT ON FUNCTION pg_catalog.idem_stats_reset IS
	'reset the statistics of this database and of its queues';
