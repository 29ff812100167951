/* src/idem--0.3.0--0.4.0.sql: what version 0.4.0 adds, the background worker and statistics */

-- complain if this script is sourced in psql instead of via ALTER EXTENSION
\echo Use "ALTER EXTENSION idem UPDATE TO '0.4.0'" to load this file. \quit

COMMENT ON FUNCTION pg_catalog.idem_cleanup(integer) IS
	'remove expired keys and the history of jobs that is kept no longer, oldest first, and give up jobs whose last lease has run out, at most batch of each; returns how many';

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
COMMENT ON FUNCTION pg_catalog.idem_stat_databases() IS
	'what idem.stats is made of; no rows if the library is not preloaded';

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
COMMENT ON FUNCTION pg_catalog.idem_stat_queues() IS
	'what idem.queue_stats is made of; no rows if the library is not preloaded';

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
COMMENT ON FUNCTION pg_catalog.idem_stat_cleanup() IS
	'what idem.cleanup_progress is made of; no rows if the library is not preloaded';

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
	OUT stats_full boolean)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_stat_worker';
COMMENT ON FUNCTION pg_catalog.idem_stat_worker() IS
	'what idem.worker_status is made of';

CREATE FUNCTION pg_catalog.idem_stats_reset()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_stats_reset';
COMMENT ON FUNCTION pg_catalog.idem_stats_reset() IS
	'let the statistics of this database and its queues begin anew';

/*
 * Statistics and health, for monitors: no keys, no payloads.  The numbers live in
 * the shared memory of a server that preloads the library.
 */
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
  FROM pg_catalog.idem_stat_databases() AS s
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid;
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
  FROM pg_catalog.idem_stat_queues() AS s
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid;
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
  FROM pg_catalog.idem_stat_cleanup() AS c
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) c.datid;
COMMENT ON VIEW idem.cleanup_progress IS 'what the background worker does and has done in each database that has the extension';
COMMENT ON COLUMN idem.cleanup_progress.datid IS 'the database';
COMMENT ON COLUMN idem.cleanup_progress.datname IS 'its name';
COMMENT ON COLUMN idem.cleanup_progress.phase IS 'keys, job keys, job history, jobs (those without attempts left): at work there; idle, off (idem.cleanup), failing, locked (somebody has locked a table), not installed (any more)';
COMMENT ON COLUMN idem.cleanup_progress.removed IS 'rows removed in this round, which ends when there is nothing left';
COMMENT ON COLUMN idem.cleanup_progress.rows_per_second IS 'how fast, without the pauses';
COMMENT ON COLUMN idem.cleanup_progress.backlog IS 'estimate of what is left, as of the end of the last run; null if it is not known';
COMMENT ON COLUMN idem.cleanup_progress.started_at IS 'when the round began';
COMMENT ON COLUMN idem.cleanup_progress.last_finished_at IS 'when a round last came to its end';
COMMENT ON COLUMN idem.cleanup_progress.last_error IS 'the last error; it is over if phase is not failing';
COMMENT ON COLUMN idem.cleanup_progress.last_error_at IS 'when that was';

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
	   w.library_version
  FROM pg_catalog.idem_stat_worker() AS w
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) w.datid;
COMMENT ON VIEW idem.worker_status IS 'the background worker of the server, one row';
COMMENT ON COLUMN idem.worker_status.preloaded IS 'whether the library is in shared_preload_libraries; without that there is no worker';
COMMENT ON COLUMN idem.worker_status.state IS 'sleeping, working (in a database), waiting for a free slot, stopped';
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

CREATE VIEW idem.health AS
WITH w AS (
	SELECT s.*,
		   pg_catalog.pg_is_in_recovery() AS standby,
		   pg_catalog.current_setting('max_worker_processes')::integer AS max_workers
	  FROM pg_catalog.idem_stat_worker() AS s),
c AS (
	SELECT s.*
	  FROM pg_catalog.idem_stat_cleanup() AS s
	  JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid
	 WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
	   AND NOT d.datistemplate),
t AS (
	SELECT pg_catalog.idem_clock() AS now,
		   GREATEST(10 OPERATOR(pg_catalog.*) COALESCE(pg_catalog.current_setting('idem.cleanup_naptime', true), '60s')::interval,
					interval '15 minutes') AS patience
	OFFSET 0),
r AS (
	SELECT k.oid,
		   pg_catalog.format('idem.%I', k.relname) AS name,
		   k.reloptions,
		   pg_catalog.pg_stat_get_live_tuples(k.oid) AS live,
		   /* after a crash the server counts from zero until the next VACUUM or ANALYZE; -1: it knows nothing */
		   GREATEST(pg_catalog.pg_stat_get_live_tuples(k.oid), k.reltuples::bigint) AS n,
		   k.reltuples OPERATOR(pg_catalog.>=) 0 AS is_known,
		   pg_catalog.pg_stat_get_dead_tuples(k.oid) AS dead
	  FROM pg_catalog.pg_class AS k
	 WHERE k.oid OPERATOR(pg_catalog.=) ANY (ARRAY['idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log']::regclass[])),
i AS (
	SELECT pg_catalog.format('idem.%I', k.relname) AS name,
		   pg_catalog.pg_relation_size(k.oid) AS size
	  FROM r
	  JOIN pg_catalog.pg_index AS x ON x.indrelid OPERATOR(pg_catalog.=) r.oid
	  JOIN pg_catalog.pg_class AS k ON k.oid OPERATOR(pg_catalog.=) x.indexrelid
	 CROSS JOIN LATERAL (
			SELECT COALESCE(pg_catalog.sum(s.stawidth), 0) AS width
			  FROM pg_catalog.pg_statistic AS s
			 WHERE s.starelid OPERATOR(pg_catalog.=) r.oid AND s.staattnum OPERATOR(pg_catalog.=) ANY (x.indkey) AND NOT s.stainherit) AS e
	 WHERE r.is_known
	   AND pg_catalog.pg_relation_size(k.oid) OPERATOR(pg_catalog.>) 33554432
	   AND pg_catalog.pg_relation_size(k.oid) OPERATOR(pg_catalog.>) ((r.n OPERATOR(pg_catalog.+) 1) OPERATOR(pg_catalog.*) GREATEST(500, 4 OPERATOR(pg_catalog.*) (e.width OPERATOR(pg_catalog.+) 32)))),
b AS (
	SELECT pg_catalog.count(*) AS expired
	  FROM (SELECT 1
			  FROM (SELECT FROM idem.keys AS k, t
					 WHERE k.expires_at OPERATOR(pg_catalog.<=) t.now
					   AND NOT (k.lease_until IS NOT NULL AND k.finished_at IS NULL AND k.park IS TRUE)
					 LIMIT 100001) AS e1
			UNION ALL
			SELECT 1 FROM (SELECT FROM idem.job_keys AS k, t WHERE k.expires_at OPERATOR(pg_catalog.<=) t.now LIMIT 100001) AS e2
			UNION ALL
			SELECT 1 FROM (SELECT FROM idem.job_log AS l, t WHERE l.expires_at OPERATOR(pg_catalog.<=) t.now LIMIT 100001) AS e3) AS e),
l AS (
	SELECT pg_catalog.count(*) FILTER (WHERE k.park IS NOT TRUE AND k.expires_at OPERATOR(pg_catalog.>) t.now) AS expired,
		   pg_catalog.min(k.lease_until) FILTER (WHERE k.park IS NOT TRUE AND k.expires_at OPERATOR(pg_catalog.>) t.now) AS oldest,
		   pg_catalog.count(*) FILTER (WHERE k.park) AS parked,
		   pg_catalog.min(k.lease_until) FILTER (WHERE k.park) AS oldest_parked
	  FROM idem.keys AS k, t
	 WHERE k.lease_until OPERATOR(pg_catalog.<=) t.now
	   AND k.finished_at IS NULL),
j AS (
	SELECT pg_catalog.count(*) AS dead,
		   pg_catalog.count(DISTINCT g.queue) AS queues
	  FROM idem.job_log AS g
	 WHERE g.state OPERATOR(pg_catalog.=) 'dead'),
f AS (
	SELECT pg_catalog.max(e.made_at) AS made_at
	  FROM (SELECT k.created_at AS made_at FROM (SELECT k.created_at FROM idem.keys AS k ORDER BY k.expires_at DESC LIMIT 100) AS k
			UNION ALL
			SELECT q.enqueued_at FROM (SELECT q.enqueued_at FROM idem.jobs AS q ORDER BY q.job_id DESC LIMIT 100) AS q) AS e)
SELECT h."check",
	   h.status,
	   h.detail,
	   /* a standby cannot run what writes */
	   CASE WHEN NOT h.writes OR NOT pg_catalog.pg_is_in_recovery() THEN h.fix END AS fix
  FROM (
SELECT 1 AS ord, false AS writes, 'preload' AS "check",
	   CASE WHEN w.preloaded THEN 'ok' ELSE 'warn' END AS status,
	   CASE WHEN w.preloaded THEN 'the library is in shared_preload_libraries'
	   ELSE 'the library is not in shared_preload_libraries: no background worker, no statistics; a restart is needed after the fix' END AS detail,
	   CASE WHEN NOT w.preloaded
	   THEN COALESCE((SELECT 'ALTER SYSTEM SET shared_preload_libraries = ' OPERATOR(pg_catalog.||)
							 pg_catalog.string_agg(pg_catalog.quote_literal(x.name), ', ' ORDER BY x.ord) OPERATOR(pg_catalog.||) ';'
						FROM pg_catalog.pg_settings AS s
					   CROSS JOIN LATERAL ROWS FROM (pg_catalog.regexp_split_to_table(
							CASE WHEN s.setting OPERATOR(pg_catalog.=) '' THEN 'idem' ELSE s.setting OPERATOR(pg_catalog.||) ', idem' END, '\s*,\s*'))
							WITH ORDINALITY AS x (name, ord)
					   WHERE s.name OPERATOR(pg_catalog.=) 'shared_preload_libraries'),
					 'SHOW shared_preload_libraries;') END AS fix
  FROM w
UNION ALL
SELECT 2, false, 'role',
	   'ok',
	   CASE WHEN w.standby THEN 'standby: reads only, the background worker starts with the promotion' ELSE 'primary' END,
	   NULL
  FROM w
UNION ALL
SELECT 3, false, 'worker',
	   CASE WHEN w.launcher_pid IS NOT NULL OR w.standby THEN 'ok' WHEN w.preloaded THEN 'fail' ELSE 'warn' END,
	   CASE WHEN w.launcher_pid IS NOT NULL THEN pg_catalog.format('process %s, %s, %s visits', w.launcher_pid, w.state, w.runs)
	   WHEN w.standby THEN 'none on a standby'
	   WHEN NOT w.preloaded THEN 'none without preload; clean up with pg_cron until then'
	   ELSE 'none is running: just being restarted, or max_worker_processes is too small for it (a restart is needed after the fix, of standbys first)' END,
	   CASE WHEN w.launcher_pid IS NOT NULL OR w.standby THEN NULL
	   WHEN NOT w.preloaded THEN 'SELECT cron.schedule(''idem-cleanup'', ''* * * * *'', ''SELECT idem_cleanup(10000)'');'
	   ELSE pg_catalog.format('ALTER SYSTEM SET max_worker_processes = %s;', w.max_workers OPERATOR(pg_catalog.+) 8) END
  FROM w
UNION ALL
SELECT 4, false, 'worker slots',
	   CASE WHEN w.no_slot_since IS NOT NULL THEN 'fail' WHEN w.used_slots OPERATOR(pg_catalog.>=) w.max_workers THEN 'warn' ELSE 'ok' END,
	   CASE WHEN w.no_slot_since IS NOT NULL
	   THEN pg_catalog.format('none was free for cleanup since %s; a restart is needed after the fix, of standbys first', w.no_slot_since)
	   ELSE pg_catalog.format('%s of %s in use', w.used_slots, w.max_workers) END,
	   CASE WHEN w.no_slot_since IS NOT NULL OR w.used_slots OPERATOR(pg_catalog.>=) w.max_workers
	   THEN pg_catalog.format('ALTER SYSTEM SET max_worker_processes = %s;', w.max_workers OPERATOR(pg_catalog.+) 8) END
  FROM w
UNION ALL
SELECT 5, false, 'last cleanup',
	   CASE s.state WHEN 'standby' THEN 'ok' WHEN 'fine' THEN 'ok' WHEN 'failing' THEN 'fail' ELSE 'warn' END,
	   CASE s.state WHEN 'standby' THEN 'the primary cleans up'
	   WHEN 'not preloaded' THEN 'not known without preload'
	   WHEN 'left out' THEN 'not known: this database is a template, which is left out, or there is no room for its statistics'
	   WHEN 'off' THEN 'switched off in this database by idem.cleanup; the fix counts from the next visit on, or the next reload'
	   WHEN 'failing' THEN pg_catalog.format('failing, last at %s: %s', s.last_error_at, s.last_error)
	   ELSE CASE WHEN s.last_finished_at IS NULL THEN 'none has finished yet'
			ELSE pg_catalog.format('last finished at %s', s.last_finished_at) END
			OPERATOR(pg_catalog.||) CASE WHEN s.state OPERATOR(pg_catalog.=) 'locked' THEN '; somebody has locked a table' ELSE '' END END,
	   CASE s.state WHEN 'off' THEN pg_catalog.format('ALTER DATABASE %I SET idem.cleanup = on;', pg_catalog.current_database())
	   WHEN 'failing' THEN 'SELECT idem_cleanup(1);'
	   WHEN 'not preloaded' THEN 'SELECT idem_cleanup(10000);'
	   WHEN 'left out' THEN 'SELECT idem_cleanup(10000);'
	   WHEN 'locked' THEN 'SELECT pid, mode, relation::regclass FROM pg_locks WHERE granted AND relation IN (SELECT oid FROM pg_class WHERE relnamespace = ''idem''::regnamespace);'
	   WHEN 'late' THEN 'SELECT pg_catalog.pg_reload_conf();' END
  FROM (SELECT c.*,
			   CASE WHEN w.standby THEN 'standby'
			   WHEN NOT w.preloaded THEN 'not preloaded'
			   WHEN c.datid IS NULL THEN 'left out'
			   WHEN c.phase OPERATOR(pg_catalog.=) ANY (ARRAY['off', 'failing']) THEN c.phase
			   WHEN COALESCE(c.last_finished_at, c.started_at, w.started_at) OPERATOR(pg_catalog.>) (pg_catalog.now() OPERATOR(pg_catalog.-) t.patience)
			   OR (c.started_at OPERATOR(pg_catalog.>) c.last_finished_at AND c.removed OPERATOR(pg_catalog.>) 0 AND c.phase OPERATOR(pg_catalog.<>) 'locked') THEN 'fine'
			   WHEN c.phase OPERATOR(pg_catalog.=) 'locked' THEN 'locked'
			   ELSE 'late' END AS state
		  FROM w CROSS JOIN t LEFT JOIN c ON true) AS s
UNION ALL
SELECT 6, true, 'backlog',
	   CASE WHEN b.expired OPERATOR(pg_catalog.>) 100000 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN b.expired OPERATOR(pg_catalog.>) 100000 THEN 'more than 100000' ELSE b.expired::text END OPERATOR(pg_catalog.||) ' rows have expired and are not removed yet',
	   CASE WHEN b.expired OPERATOR(pg_catalog.>) 100000 THEN 'DO $$ BEGIN WHILE idem_cleanup(1000) > 0 LOOP COMMIT; END LOOP; END $$;' END
  FROM b
UNION ALL
SELECT 7, true, 'table bloat',
	   CASE WHEN d.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE('more dead rows than live ones in ' OPERATOR(pg_catalog.||) d.names, 'no table has more dead rows than live ones'),
	   d.fix
  FROM (SELECT pg_catalog.string_agg(r.name, ', ' ORDER BY r.name) AS names,
			   'VACUUM ' OPERATOR(pg_catalog.||) pg_catalog.string_agg(r.name, ', ' ORDER BY r.name) OPERATOR(pg_catalog.||) ';' AS fix
		  FROM r
		 WHERE r.dead OPERATOR(pg_catalog.>) r.live AND r.dead OPERATOR(pg_catalog.>) 10000) AS d
UNION ALL
SELECT 8, true, 'index bloat',
	   CASE WHEN d.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE('much larger than its rows need: ' OPERATOR(pg_catalog.||) d.names, 'no index is much larger than its rows need'),
	   d.fix
  FROM (SELECT pg_catalog.string_agg(i.name, ', ' ORDER BY i.name) AS names,
			   'REINDEX INDEX CONCURRENTLY ' OPERATOR(pg_catalog.||) (pg_catalog.array_agg(i.name ORDER BY i.size DESC))[1] OPERATOR(pg_catalog.||) ';' AS fix
		  FROM i) AS d
UNION ALL
SELECT 9, false, 'expired leases',
	   CASE WHEN l.oldest OPERATOR(pg_catalog.<) (t.now OPERATOR(pg_catalog.-) interval '1 hour') THEN 'warn' ELSE 'ok' END,
	   CASE WHEN l.expired OPERATOR(pg_catalog.=) 0 THEN 'no lease has run out unfinished'
	   ELSE pg_catalog.format('%s leases have run out unfinished, the oldest %s ago', l.expired, pg_catalog.date_trunc('second', t.now OPERATOR(pg_catalog.-) l.oldest)) END,
	   CASE WHEN l.oldest OPERATOR(pg_catalog.<) (t.now OPERATOR(pg_catalog.-) interval '1 hour')
	   THEN 'SELECT * FROM idem.lease_status WHERE state IN (''expired'', ''exhausted'') ORDER BY time_left LIMIT 20;' END
  FROM l, t
UNION ALL
SELECT 10, false, 'parked keys',
	   CASE WHEN l.parked OPERATOR(pg_catalog.>) 0 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN l.parked OPERATOR(pg_catalog.=) 0 THEN 'no key waits for a decision'
	   ELSE pg_catalog.format('%s keys wait for a decision, the oldest for %s', l.parked, pg_catalog.date_trunc('second', t.now OPERATOR(pg_catalog.-) l.oldest_parked)) END,
	   CASE WHEN l.parked OPERATOR(pg_catalog.>) 0 THEN 'SELECT * FROM idem.lease_status WHERE state = ''parked'' ORDER BY time_left LIMIT 20;' END
  FROM l, t
UNION ALL
SELECT 11, false, 'dead jobs',
	   CASE WHEN j.dead OPERATOR(pg_catalog.>) 0 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN j.dead OPERATOR(pg_catalog.=) 0 THEN 'no job was given up' ELSE pg_catalog.format('%s jobs in %s queues were given up and are still kept', j.dead, j.queues) END,
	   CASE WHEN j.dead OPERATOR(pg_catalog.>) 0
	   THEN 'SELECT job_id, queue, attempt, ended_at, last_error FROM idem.job_status WHERE state = ''dead'' ORDER BY ended_at DESC LIMIT 20;' END
  FROM j
UNION ALL
SELECT 12, true, 'autovacuum',
	   CASE WHEN a.global OPERATOR(pg_catalog.=) 'off' OR a.names IS NOT NULL THEN 'fail' ELSE 'ok' END,
	   CASE WHEN a.global OPERATOR(pg_catalog.=) 'off' THEN 'autovacuum is off; reload after the fix' WHEN a.names IS NOT NULL THEN 'autovacuum is off for ' OPERATOR(pg_catalog.||) a.names ELSE 'on for all tables' END,
	   CASE WHEN a.global OPERATOR(pg_catalog.=) 'off' THEN 'ALTER SYSTEM SET autovacuum = on;' ELSE a.fix END
  FROM (SELECT pg_catalog.current_setting('autovacuum') AS global,
			   pg_catalog.string_agg(r.name, ', ' ORDER BY r.name) AS names,
			   pg_catalog.string_agg('ALTER TABLE ' OPERATOR(pg_catalog.||) r.name OPERATOR(pg_catalog.||) ' RESET (autovacuum_enabled);', ' ' ORDER BY r.name) AS fix
		  FROM r
		 WHERE EXISTS (SELECT FROM pg_catalog.pg_options_to_table(r.reloptions) AS o
						WHERE o.option_name OPERATOR(pg_catalog.=) 'autovacuum_enabled' AND NOT o.option_value::boolean)) AS a
UNION ALL
SELECT 13, false, 'clock',
	   CASE WHEN s.ahead IS NOT NULL THEN 'fail' WHEN s.recent THEN 'warn' ELSE 'ok' END,
	   CASE WHEN s.ahead IS NOT NULL
	   THEN pg_catalog.format('the clock has gone back: there are rows made %s from now; keys and leases last that much longer', s.ahead)
	   WHEN s.recent THEN pg_catalog.format('the clock went back by %s s at %s', pg_catalog.round(s.clock_back_seconds), s.clock_back_at)
	   ELSE 'has not gone back as far as is known' END,
	   CASE WHEN s.ahead IS NOT NULL OR s.recent
	   THEN 'SELECT pg_catalog.clock_timestamp(), pg_catalog.current_setting(''idem.clock_offset'', true) AS clock_offset;' END
  FROM (SELECT CASE WHEN f.made_at OPERATOR(pg_catalog.>) (t.now OPERATOR(pg_catalog.+) interval '1 second') THEN f.made_at OPERATOR(pg_catalog.-) t.now END AS ahead,
			   w.clock_back_at OPERATOR(pg_catalog.>) (pg_catalog.now() OPERATOR(pg_catalog.-) interval '1 day') AS recent,
			   w.clock_back_at,
			   w.clock_back_seconds
		  FROM w, f, t) AS s
UNION ALL
SELECT 14, true, 'version',
	   CASE WHEN v.library_version OPERATOR(pg_catalog.=) v.extversion THEN 'ok' ELSE 'fail' END,
	   pg_catalog.format('library %s, SQL objects %s', v.library_version, v.extversion)
	   OPERATOR(pg_catalog.||) CASE WHEN v.library OPERATOR(pg_catalog.<) v.objects THEN ': the server, or this session, still has the old library' ELSE '' END,
	   CASE WHEN v.library OPERATOR(pg_catalog.>) v.objects THEN 'ALTER EXTENSION idem UPDATE;'
	   WHEN v.library OPERATOR(pg_catalog.<) v.objects THEN CASE WHEN v.preloaded THEN 'pg_ctl restart' ELSE '\connect' END END
  FROM (SELECT w.library_version,
			   e.extversion,
			   w.preloaded,
			   pg_catalog.string_to_array(w.library_version, '.')::integer[] AS library,
			   CASE WHEN e.extversion OPERATOR(pg_catalog.~) '^[0-9]+([.][0-9]+)*$'
			   THEN pg_catalog.string_to_array(e.extversion, '.')::integer[] END AS objects
		  FROM w, pg_catalog.pg_extension AS e
		 WHERE e.extname OPERATOR(pg_catalog.=) 'idem') AS v
UNION ALL
SELECT 15, false, 'statistics',
	   CASE WHEN w.stats_full IS TRUE THEN 'warn' ELSE 'ok' END,
	   CASE WHEN w.stats_full THEN 'more databases and queues than idem.stats_max: some are not counted; a restart is needed after the fix'
	   WHEN NOT w.preloaded THEN 'none without preload' ELSE 'all databases and queues are counted' END,
	   CASE WHEN w.stats_full THEN pg_catalog.format('ALTER SYSTEM SET idem.stats_max = %s;', LEAST(2 OPERATOR(pg_catalog.*) COALESCE(pg_catalog.current_setting('idem.stats_max', true), '1000')::integer, 100000)) END
  FROM w) AS h
 ORDER BY h.ord;
COMMENT ON VIEW idem.health IS 'what idem_doctor() returns';
COMMENT ON COLUMN idem.health."check" IS 'what was looked at';
COMMENT ON COLUMN idem.health.status IS 'ok, warn (have a look) or fail (something does not work)';
COMMENT ON COLUMN idem.health.detail IS 'what was found';
COMMENT ON COLUMN idem.health.fix IS 'a command to be run; null if there is nothing to be done';

CREATE FUNCTION pg_catalog.idem_doctor()
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE sql VOLATILE PARALLEL RESTRICTED ROWS 15
BEGIN ATOMIC
	SELECT h."check", h.status, h.detail, h.fix FROM idem.health AS h;
END;
COMMENT ON FUNCTION pg_catalog.idem_doctor() IS
	'looks after the health of the extension: what was checked, how that is, and what to do';

REVOKE ALL ON FUNCTION
	pg_catalog.idem_stat_databases(),
	pg_catalog.idem_stat_queues(),
	pg_catalog.idem_stat_cleanup(),
	pg_catalog.idem_stat_worker(),
	pg_catalog.idem_stats_reset(),
	pg_catalog.idem_doctor()
FROM PUBLIC;

/* Members of pg_monitor see numbers and health without idem_grant(). */
GRANT USAGE ON SCHEMA idem TO pg_monitor;
GRANT SELECT ON
	idem.key_summary,
	idem.queue_status,
	idem.stats,
	idem.queue_stats,
	idem.cleanup_progress,
	idem.worker_status,
	idem.health
TO pg_monitor;
GRANT EXECUTE ON FUNCTION
	pg_catalog.idem_stat_databases(),
	pg_catalog.idem_stat_queues(),
	pg_catalog.idem_stat_cleanup(),
	pg_catalog.idem_stat_worker(),
	pg_catalog.idem_doctor(),
	pg_catalog.idem_clock(),
	pg_catalog.idem_key_state(xid, timestamp with time zone, timestamp with time zone)
TO pg_monitor;
