/* src/sql/health.sql: the checks of idem_doctor() */

/*
 * H1: a check that is not ok has a command in the column fix.
 *
 * Each group of checks is a view; the checks of a group share the rows that they
 * read.  idem_internal.checks unites the groups, in the order of the column ord.  Only
 * idem_internal.checks needs grants, because it reads the groups with the privileges of its
 * owner.  Add a new check to a group.
 *
 * The checks "backlog", "expired leases" and "parked keys" repeat the rules of
 * keyrow.c instead of reading idem.key_status: so they can use the index on
 * expires_at, and they do not call a function for every key.  sql/doctor.sql compares
 * them with the view.
 */
-- set: none
CREATE VIEW idem_internal.checks_server AS
WITH w AS (
	SELECT s.*,
		   pg_is_in_recovery() AS standby,
		   current_setting('max_worker_processes')::integer AS max_workers
	  FROM idem_internal.idem_stat_worker() AS s)
SELECT 1 AS ord,
	   false AS writes,
	   'preload' AS "check",
	   CASE WHEN w.preloaded THEN 'ok' ELSE 'warn' END AS status,
	   CASE
	   WHEN w.preloaded THEN 'the library is in shared_preload_libraries'
	   WHEN EXISTS (SELECT FROM idem.shard AS p WHERE p.slots IS NOT NULL)
	   THEN 'this database has a map of slots, but the library is not in shared_preload_libraries: no background worker, so rows of slots that have moved away stay until pg_catalog.idem_cleanup() is called, because no other function finds them; no statistics; a restart is needed after the fix'
	   ELSE 'the library is not in shared_preload_libraries: no background worker, no statistics; a restart is needed after the fix'
	   END AS detail,
	   CASE WHEN NOT w.preloaded THEN
			/* only some roles see this setting */
			COALESCE((SELECT 'ALTER SYSTEM SET shared_preload_libraries = '
							 || string_agg(quote_literal(x.name), ', ' ORDER BY x.ord) || ';'
						FROM pg_settings AS s
					   CROSS JOIN LATERAL ROWS FROM (regexp_split_to_table(
							CASE WHEN s.setting = '' THEN 'idem' ELSE s.setting || ', idem' END, E'\\s*,\\s*'))
							WITH ORDINALITY AS x (name, ord)
					   WHERE s.name = 'shared_preload_libraries'),
					 'SHOW shared_preload_libraries;')
	   END AS fix
  FROM w
UNION ALL
SELECT 2, false, 'role', 'ok',
	   CASE WHEN w.standby THEN 'standby: reads only, the background worker starts with the promotion' ELSE 'primary' END,
	   NULL
  FROM w
UNION ALL
SELECT 3, false, 'worker',
	   CASE
	   WHEN s.trouble IS NOT NULL THEN 'fail'
	   WHEN s.launcher_pid IS NOT NULL OR s.standby THEN 'ok'
	   WHEN s.preloaded THEN 'fail'
	   ELSE 'warn'
	   END,
	   CASE
	   WHEN s.trouble IS NOT NULL THEN s.trouble
	   WHEN s.launcher_pid IS NOT NULL THEN format('process %s, %s, %s visits', s.launcher_pid, s.state, s.runs)
	   WHEN s.standby THEN 'none on a standby'
	   WHEN NOT s.preloaded THEN 'none without preload; clean up with pg_cron until then'
	   ELSE 'none is running: it is being restarted, or max_worker_processes is too small (a restart is needed after the fix, of standbys first)'
	   END,
	   CASE
	   WHEN s.trouble IS NOT NULL
	   THEN format('SELECT pid, wait_event_type, wait_event, pg_catalog.pg_blocking_pids(pid) FROM pg_catalog.pg_stat_activity WHERE pid OPERATOR(pg_catalog.=) %s;', s.launcher_pid)
	   WHEN s.launcher_pid IS NOT NULL OR s.standby THEN NULL
	   WHEN s.preloaded THEN format('ALTER SYSTEM SET max_worker_processes = %s;', s.max_workers + 8)
	   WHEN EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'pg_cron')
	   THEN 'SELECT cron.schedule(''idem-cleanup'', ''* * * * *'', ''SELECT pg_catalog.idem_cleanup(10000)'');'
	   ELSE 'SELECT pg_catalog.idem_cleanup(10000);'
	   END
  FROM (SELECT w.*,
			   CASE
			   WHEN w.state = 'failing'
			   THEN format('process %s fails, last at %s: %s', w.launcher_pid, w.last_error_at, w.last_error)
			   WHEN w.overdue_seconds > 60
			   THEN format('process %s has made no progress for %s s: it is stuck or stopped', w.launcher_pid, round(w.overdue_seconds))
			   END AS trouble
		  FROM w) AS s
UNION ALL
SELECT 4, false, 'worker slots',
	   CASE
	   WHEN w.no_slot_since IS NOT NULL THEN 'fail'
	   WHEN w.used_slots >= w.max_workers THEN 'warn'
	   ELSE 'ok'
	   END,
	   CASE
	   WHEN w.no_slot_since IS NOT NULL
	   THEN format('no slot has been free for cleanup since %s; a restart is needed after the fix, of standbys first', w.no_slot_since)
	   ELSE format('%s of %s in use', w.used_slots, w.max_workers)
	   END,
	   CASE WHEN w.no_slot_since IS NOT NULL OR w.used_slots >= w.max_workers
	   THEN format('ALTER SYSTEM SET max_worker_processes = %s;', w.max_workers + 8) END
  FROM w
UNION ALL
SELECT 13, false, 'clock',
	   CASE WHEN s.ahead IS NOT NULL THEN 'fail' WHEN s.recent THEN 'warn' ELSE 'ok' END,
	   CASE
	   WHEN s.ahead IS NOT NULL
	   THEN format('the clock has gone back: there are rows made %s from now; keys and leases last that much longer', s.ahead)
	   WHEN s.recent THEN format('the clock went back by %s s at %s', round(s.clock_back_seconds), s.clock_back_at)
	   ELSE 'the clock is not known to have gone back'
	   END,
	   CASE WHEN s.ahead IS NOT NULL OR s.recent
	   THEN 'SELECT pg_catalog.clock_timestamp(), pg_catalog.current_setting(''idem.clock_offset'', true) AS clock_offset;' END
  FROM (SELECT CASE WHEN f.made_at > t.now + interval '1 second' THEN f.made_at - t.now END AS ahead,
			   w.clock_back_at > now() - interval '1 day' AS recent,
			   w.clock_back_at,
			   w.clock_back_seconds
		  FROM w
		 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS t
		 CROSS JOIN (
				SELECT max(e.made_at) AS made_at
				  FROM ((SELECT k.created_at AS made_at FROM idem.keys AS k ORDER BY k.expires_at DESC LIMIT 100)
						UNION ALL
						(SELECT q.enqueued_at FROM idem.jobs AS q ORDER BY q.job_id DESC LIMIT 100)) AS e) AS f) AS s
UNION ALL
SELECT 14, false, 'statistics',
	   CASE WHEN w.stats_full IS TRUE THEN 'warn' ELSE 'ok' END,
	   CASE
	   WHEN w.stats_full THEN
			'more databases and queues than idem.stats_max: some are not counted, or have given way to others; '
			|| COALESCE((SELECT format('database %s has %s of the %s queues that are counted; ', m.datname, m.n, m.total)
						   FROM (SELECT d.datname, count(*) AS n, sum(count(*)) OVER () AS total
								   FROM idem_internal.idem_stat_queues() AS q
								   JOIN pg_database AS d ON d.oid = q.datid
								  GROUP BY d.datname
								  ORDER BY count(*) DESC, d.datname
								  LIMIT 1) AS m), '')
			|| 'a restart is needed after the fix'
	   WHEN NOT w.preloaded THEN 'none without preload'
	   ELSE 'all databases and queues are counted'
	   END,
	   CASE WHEN w.stats_full
	   THEN format('ALTER SYSTEM SET idem.stats_max = %s;',
				   LEAST(2 * COALESCE(current_setting('idem.stats_max', true), '1000')::integer, 100000)) END
  FROM w;
COMMENT ON VIEW idem_internal.checks_server IS 'for idem_internal.checks: preload, role, worker, worker slots, clock, statistics';
COMMENT ON COLUMN idem_internal.checks_server.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_server.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_server."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_server.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_server.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_server.fix IS 'command that repairs or shows the problem; null if there is none';

-- set: none
CREATE VIEW idem_internal.checks_cleanup AS
WITH t AS (
	SELECT idem_clock() AS now OFFSET 0)
SELECT 5 AS ord,
	   false AS writes,
	   'last cleanup' AS "check",
	   CASE s.state WHEN 'standby' THEN 'ok' WHEN 'fine' THEN 'ok' WHEN 'failing' THEN 'fail' ELSE 'warn' END AS status,
	   CASE s.state
	   WHEN 'standby' THEN 'the primary cleans up'
	   WHEN 'not preloaded' THEN 'not known without preload'
	   WHEN 'left out' THEN 'not known: this database is a template, which cleanup skips, or there is no room for its statistics'
	   WHEN 'off' THEN 'switched off in this database by idem.cleanup; the fix takes effect at the next visit or reload'
	   WHEN 'failing' THEN format('failing, last at %s: %s', s.last_error_at, s.last_error)
	   WHEN 'not installed' THEN 'the worker has not seen yet that the extension was created again; it visits the database within idem.cleanup_naptime, or after the next reload'
	   ELSE CASE WHEN s.last_finished_at IS NULL THEN 'none has finished yet'
			ELSE format('last finished at %s', s.last_finished_at) END
			|| CASE WHEN s.state = 'locked' THEN '; another session has locked a table' ELSE '' END
	   END AS detail,
	   CASE s.state
	   WHEN 'off' THEN format('ALTER DATABASE %s SET idem.cleanup = on;', idem_visible_name(current_database()))
	   WHEN 'failing' THEN 'SELECT pg_catalog.idem_cleanup(1);'
	   WHEN 'not preloaded' THEN 'SELECT pg_catalog.idem_cleanup(10000);'
	   WHEN 'left out' THEN 'SELECT pg_catalog.idem_cleanup(10000);'
	   WHEN 'locked' THEN 'SELECT l.pid, l.mode, c.relname FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) l.database JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) l.relation JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace WHERE l.granted AND n.nspname OPERATOR(pg_catalog.=) ''idem'' AND d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database();'
	   WHEN 'not installed' THEN 'SELECT pg_catalog.pg_reload_conf();'
	   WHEN 'late' THEN 'SELECT pg_catalog.pg_reload_conf();'
	   END AS fix
  FROM (SELECT c.*,
			   CASE
			   WHEN pg_is_in_recovery() THEN 'standby'
			   WHEN NOT w.preloaded THEN 'not preloaded'
			   WHEN c.datid IS NULL THEN 'left out'
			   WHEN c.phase = ANY (ARRAY['off', 'failing', 'not installed']) THEN c.phase
			   WHEN COALESCE(c.last_finished_at, c.started_at, w.started_at) > now() - p.patience THEN 'fine'
			   WHEN c.started_at > c.last_finished_at AND c.removed > 0 AND c.phase <> 'locked' THEN 'fine'
			   WHEN c.phase = 'locked' THEN 'locked'
			   ELSE 'late'
			   END AS state
		  FROM idem_internal.idem_stat_worker() AS w
		 CROSS JOIN (
				SELECT GREATEST(10 * COALESCE(current_setting('idem.cleanup_naptime', true), '60s')::interval,
								interval '15 minutes') AS patience) AS p
		  LEFT JOIN (
				SELECT s.*
				  FROM idem_internal.idem_stat_cleanup() AS s
				  JOIN pg_database AS d ON d.oid = s.datid
				 WHERE d.datname = current_database() AND NOT d.datistemplate) AS c ON true) AS s
UNION ALL
SELECT 6, true, 'backlog',
	   CASE WHEN b.expired > 100000 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN b.expired > 100000 THEN 'more than 100000' ELSE b.expired::text END
	   || ' rows have expired and are not removed yet',
	   CASE WHEN b.expired > 100000
	   THEN 'DO $$ BEGIN WHILE pg_catalog.idem_cleanup(1000) OPERATOR(pg_catalog.>) 0 LOOP COMMIT; END LOOP; END $$;' END
  FROM (SELECT count(*) AS expired
		  FROM ((SELECT 1
				   FROM idem.keys AS k, t
				  WHERE k.expires_at <= t.now
					AND NOT (k.lease_until IS NOT NULL AND k.finished_at IS NULL AND k.park IS TRUE)
				  LIMIT 100001)
				UNION ALL
				(SELECT 1 FROM idem.job_keys AS k, t WHERE k.expires_at <= t.now LIMIT 100001)
				UNION ALL
				(SELECT 1 FROM idem.job_log AS l, t WHERE l.expires_at <= t.now LIMIT 100001)) AS e) AS b;
COMMENT ON VIEW idem_internal.checks_cleanup IS 'for idem_internal.checks: last cleanup, backlog';
COMMENT ON COLUMN idem_internal.checks_cleanup.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_cleanup.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_cleanup."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_cleanup.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_cleanup.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_cleanup.fix IS 'command that repairs or shows the problem; null if there is none';

-- set: monitor
CREATE FUNCTION idem_internal.idem_stat_tables(
	OUT name text,
	OUT detail text,
	OUT fix text)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_stat_tables';
COMMENT ON FUNCTION idem_internal.idem_stat_tables IS
	'for idem_internal.checks_tables: tables of idem whose definition was changed, so that functions refuse them, with a command that helps';

-- set: none
CREATE VIEW idem_internal.checks_tables AS
WITH r AS (
	SELECT k.oid,
		   format('idem.%I', k.relname) AS name,
		   k.reloptions,
		   pg_stat_get_live_tuples(k.oid) AS live,
		   pg_stat_get_dead_tuples(k.oid) AS dead,
		   /* a crash resets the live tuples to zero until the next VACUUM or ANALYZE; reltuples -1: unknown */
		   GREATEST(pg_stat_get_live_tuples(k.oid), k.reltuples::bigint) AS n,
		   k.reltuples >= 0 AS is_known
	  FROM pg_class AS k
	 WHERE k.oid = ANY (ARRAY['idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log', 'idem.schedules']::regclass[]))
SELECT 7 AS ord,
	   true AS writes,
	   'table bloat' AS "check",
	   CASE WHEN d.names IS NULL THEN 'ok' ELSE 'warn' END AS status,
	   COALESCE('more dead rows than live ones in ' || d.names, 'no table has more dead rows than live ones') AS detail,
	   'VACUUM ' || d.names || ';' AS fix
  FROM (SELECT string_agg(r.name, ', ' ORDER BY r.name) AS names
		  FROM r
		 WHERE r.dead > r.live AND r.dead > 10000) AS d
UNION ALL
SELECT 8, true, 'index bloat',
	   CASE WHEN i.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE('much larger than its rows need: ' || i.names, 'no index is much larger than its rows need'),
	   'REINDEX INDEX CONCURRENTLY ' || i.largest || ';'
  FROM (SELECT string_agg(b.name, ', ' ORDER BY b.name) AS names,
			   (array_agg(b.name ORDER BY b.size DESC))[1] AS largest
		  FROM (SELECT format('idem.%I', k.relname) AS name,
					   pg_relation_size(k.oid) AS size,
					   r.n,
					   (SELECT COALESCE(sum(s.stawidth), 0)
						  FROM pg_statistic AS s
						 WHERE s.starelid = r.oid AND s.staattnum = ANY (x.indkey) AND NOT s.stainherit) AS width
				  FROM r
				  JOIN pg_index AS x ON x.indrelid = r.oid
				  JOIN pg_class AS k ON k.oid = x.indexrelid
				 WHERE r.is_known) AS b
		 WHERE b.size > 33554432
		   AND b.size > (b.n + 1) * GREATEST(500, 4 * (b.width + 32))) AS i
UNION ALL
SELECT 12, true, 'autovacuum',
	   CASE WHEN a.global = 'off' OR a.names IS NOT NULL THEN 'fail' ELSE 'ok' END,
	   CASE
	   WHEN a.global = 'off' THEN 'autovacuum is off; reload after the fix'
	   WHEN a.names IS NOT NULL THEN 'autovacuum is off for ' || a.names
	   ELSE 'on for all tables'
	   END,
	   CASE WHEN a.global = 'off' THEN 'ALTER SYSTEM SET autovacuum = on;' ELSE a.fix END
  FROM (SELECT current_setting('autovacuum') AS global,
			   string_agg(r.name, ', ' ORDER BY r.name) AS names,
			   string_agg('ALTER TABLE ' || r.name || ' RESET (autovacuum_enabled);', ' ' ORDER BY r.name) AS fix
		  FROM r
		 WHERE EXISTS (SELECT FROM pg_options_to_table(r.reloptions) AS o
						WHERE o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean)) AS a
UNION ALL
SELECT 26, true, 'definitions',
	   CASE WHEN d.n > 0 THEN 'fail' ELSE 'ok' END,
	   CASE WHEN d.n > 0
	   THEN format('%s tables are not as the extension has created them, so functions refuse them, the first is idem.%s: %s', d.n, d.first[1], d.first[2])
	   ELSE 'all tables are as the extension has created them'
	   END,
	   d.first[3]
  FROM (SELECT count(*) AS n,
			   min(ARRAY[s.name, s.detail, s.fix]) AS first
		  FROM idem_internal.idem_stat_tables() AS s) AS d;
COMMENT ON VIEW idem_internal.checks_tables IS 'for idem_internal.checks: table bloat, index bloat, autovacuum, definitions';
COMMENT ON COLUMN idem_internal.checks_tables.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_tables.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_tables."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_tables.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_tables.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_tables.fix IS 'command that repairs or shows the problem; null if there is none';

-- set: none
CREATE VIEW idem_internal.checks_work AS
WITH t AS (
	SELECT idem_clock() AS now OFFSET 0),
l AS (
	SELECT count(*) FILTER (WHERE k.park IS NOT TRUE AND k.expires_at > t.now) AS expired,
		   min(k.lease_until) FILTER (WHERE k.park IS NOT TRUE AND k.expires_at > t.now) AS oldest,
		   count(*) FILTER (WHERE k.park) AS parked,
		   min(k.lease_until) FILTER (WHERE k.park) AS oldest_parked
	  FROM idem.keys AS k, t
	 WHERE k.lease_until <= t.now
	   AND k.finished_at IS NULL)
SELECT 9 AS ord,
	   false AS writes,
	   'expired leases' AS "check",
	   CASE WHEN l.oldest < t.now - interval '1 hour' THEN 'warn' ELSE 'ok' END AS status,
	   CASE
	   WHEN l.expired = 0 THEN 'no unfinished lease has expired'
	   ELSE format('%s unfinished leases have expired, the oldest %s ago', l.expired, date_trunc('second', t.now - l.oldest))
	   END AS detail,
	   CASE WHEN l.oldest < t.now - interval '1 hour'
	   THEN 'SELECT * FROM idem.lease_status WHERE state OPERATOR(pg_catalog.=) ANY (ARRAY[''expired'', ''exhausted'']) ORDER BY time_left LIMIT 20;'
	   END AS fix
  FROM l, t
UNION ALL
SELECT 10, false, 'parked keys',
	   CASE WHEN l.parked > 0 THEN 'warn' ELSE 'ok' END,
	   CASE
	   WHEN l.parked = 0 THEN 'no key waits for a decision'
	   ELSE format('%s keys wait for a decision, the oldest for %s', l.parked, date_trunc('second', t.now - l.oldest_parked))
	   END,
	   CASE WHEN l.parked > 0
	   THEN 'SELECT * FROM idem.lease_status WHERE state OPERATOR(pg_catalog.=) ''parked'' ORDER BY time_left LIMIT 20;' END
  FROM l, t
UNION ALL
SELECT 11, false, 'dead jobs',
	   CASE WHEN j.dead > 0 THEN 'warn' ELSE 'ok' END,
	   CASE
	   WHEN j.dead = 0 THEN 'no job is dead'
	   ELSE format('%s dead jobs in %s queues are still kept', j.dead, j.queues)
	   END,
	   CASE WHEN j.dead > 0
	   THEN 'SELECT job_id, queue, attempt, ended_at, last_error FROM idem.job_status WHERE state OPERATOR(pg_catalog.=) ''dead'' ORDER BY ended_at DESC LIMIT 20;' END
  FROM (SELECT count(*) AS dead, count(DISTINCT g.queue) AS queues
		  FROM idem.job_log AS g
		 WHERE g.state = 'dead') AS j
UNION ALL
SELECT 24, true, 'schedules',
	   CASE WHEN d.refused > 0 OR d.late > 0 THEN 'fail' WHEN d.ahead IS NOT NULL THEN 'warn' ELSE 'ok' END,
	   CASE
	   WHEN d.n = 0 THEN 'there are no schedules'
	   WHEN d.refused > 0
	   THEN format('this database has no slots, so it refuses the jobs of its schedules (ID006) at each tick: %s', array_to_string(d.names[1:5], ', '))
			|| CASE WHEN d.refused > 5 THEN format(' and %s more', d.refused - 5) ELSE '' END
			|| '; the fix shows the commands that declare them in a database with slots and remove them here'
	   WHEN d.late > 0
	   THEN format('%s schedules are late, the first, %s, since %s: nothing enqueues their jobs, or that fails; the fix enqueues them and shows why it fails', d.late, d.first_late, d.first_tick)
	   WHEN d.ahead IS NOT NULL
	   THEN format('the clock has gone back: the last tick of %s is in the future, so its next tick is later than it should be', d.ahead)
	   WHEN pg_is_in_recovery() THEN format('%s schedules; the primary enqueues their jobs', d.n)
	   ELSE format('%s schedules, none is late', d.n)
	   END,
	   CASE
	   WHEN d.refused > 0
	   THEN 'SELECT pg_catalog.format(''SELECT pg_catalog.idem_schedule(%s, %s, cron => %L, every => %L, payload => %s, time_zone => %L, missed => %L, priority => %s, starts_at => %L, ends_at => %L);'', pg_catalog.idem_visible_literal(s.name), pg_catalog.idem_visible_literal(s.queue), s.cron, s.every, COALESCE(pg_catalog.idem_visible_literal(s.payload::pg_catalog.text), ''NULL''), s.time_zone, s.missed, s.priority, s.starts_at, s.ends_at) AS elsewhere, pg_catalog.format(''SELECT pg_catalog.idem_unschedule(%s);'', pg_catalog.idem_visible_literal(s.name)) AS here FROM idem.schedules AS s WHERE s.next_tick IS NOT NULL ORDER BY s.name;'
	   WHEN d.late > 0 THEN 'SELECT pg_catalog.idem_tick();'
	   WHEN d.ahead IS NOT NULL THEN format('SELECT pg_catalog.idem_schedule_resume(%s);', idem_visible_literal(d.ahead))
	   END
  FROM (SELECT count(s.name) AS n,
			   count(*) FILTER (WHERE s.next_tick IS NOT NULL AND p.has_none) AS refused,
			   array_agg(s.name ORDER BY s.name) FILTER (WHERE s.next_tick IS NOT NULL) AS names,
			   count(*) FILTER (WHERE s.state = 'late' AND NOT p.is_standby) AS late,
			   (array_agg(s.name ORDER BY s.next_tick) FILTER (WHERE s.state = 'late'))[1] AS first_late,
			   min(s.next_tick) FILTER (WHERE s.state = 'late') AS first_tick,
			   min(s.name) FILTER (WHERE s.last_tick > t.now + interval '1 minute' AND s.next_tick > s.last_tick) AS ahead
		  FROM t
		 CROSS JOIN (SELECT EXISTS (SELECT FROM idem.shard AS m WHERE m.slots = '{}') AS has_none,
							pg_is_in_recovery() AS is_standby) AS p
		  LEFT JOIN idem.schedule_status AS s ON true) AS d
UNION ALL
/* T9.  Jobs from before the change of an owner are among those with the lowest numbers. */
SELECT 25, false, 'owners',
	   CASE WHEN s.refused > 0 THEN 'fail' WHEN j.n > 0 THEN 'warn' ELSE 'ok' END,
	   CASE
	   WHEN s.refused > 0
	   THEN format('%s schedules are refused, the first is %s of role %s: the role was dropped, may not execute idem_enqueue, or may not use the queue; give it its privileges back, or declare or remove the schedule as another role', s.refused, s.first[1], s.first[2])
	   WHEN j.n > 0
	   THEN format('%s of the oldest 10000 jobs were enqueued before their queue got its owner, the first queue is %s: other roles may have enqueued them; cancel those that are wrong', j.n, j.first)
	   ELSE 'no schedule is refused, no old job is from before the change of an owner'
	   END,
	   CASE
	   WHEN s.refused > 0
	   THEN 'SELECT name, queue, owner FROM idem.schedule_status WHERE state OPERATOR(pg_catalog.=) ''refused'' ORDER BY name LIMIT 20;'
	   WHEN j.n > 0
	   THEN 'SELECT j.job_id, j.queue, q.owner, j.state, j.run_at FROM idem.job_status AS j JOIN idem.queues AS q ON q.queue OPERATOR(pg_catalog.=) j.queue WHERE j.ended_at IS NULL AND j.age OPERATOR(pg_catalog.>) (pg_catalog.idem_clock() OPERATOR(pg_catalog.-) q.owned_at) ORDER BY j.job_id LIMIT 20;'
	   END
  FROM (SELECT count(*) AS refused,
			   min(ARRAY[s.name, s.owner::text]) AS first
		  FROM idem.schedule_status AS s
		 WHERE s.state = 'refused') AS s
 CROSS JOIN (
		SELECT count(*) AS n,
			   min(q.queue) AS first
		  FROM (SELECT j.queue, j.enqueued_at FROM idem.jobs AS j ORDER BY j.job_id LIMIT 10000) AS j
		  JOIN idem.queues AS q ON q.queue = j.queue AND j.enqueued_at < q.owned_at) AS j;
COMMENT ON VIEW idem_internal.checks_work IS 'for idem_internal.checks: expired leases, parked keys, dead jobs, schedules, owners';
COMMENT ON COLUMN idem_internal.checks_work.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_work.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_work."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_work.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_work.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_work.fix IS 'command that repairs or shows the problem; null if there is none';

-- set: none
CREATE VIEW idem_internal.checks_replication AS
WITH n AS MATERIALIZED (
	SELECT m.highest,
		   v.used,
		   m.jobs_from IS NOT NULL AS has_slots,
		   s.last_value AS at,
		   COALESCE(v.used > s.last_value OR (v.used = s.last_value AND NOT s.is_called), false) AS behind
	  FROM idem.jobs_job_id_seq AS s
	 CROSS JOIN (
			SELECT (SELECT p.jobs_from FROM idem.shard AS p WHERE p.id = 1) AS jobs_from,
				   GREATEST((SELECT max(j.job_id) FROM idem.jobs AS j),
							(SELECT max(g.job_id) FROM idem.job_log AS g),
							(SELECT max(k.job_id)
							   FROM (SELECT k.job_id FROM idem.job_keys AS k ORDER BY k.expires_at DESC LIMIT 100) AS k)) AS highest) AS m
	 CROSS JOIN LATERAL (
			/* the value of the sequence that the highest number was made from; with a map at least the last one from before it */
			SELECT CASE WHEN m.jobs_from IS NULL THEN m.highest
				   ELSE GREATEST(m.highest / 1024, m.jobs_from / 1024 - 1) END AS used) AS v),
u AS (
	SELECT string_agg(DISTINCT idem_visible_name(s.subname), ', ') AS names,
		   string_agg(DISTINCT format('idem.%I', k.relname), ', ') AS tables,
		   bool_or(s.subbinary) AS is_binary,
		   min(idem_visible_name(s.subname)) FILTER (WHERE s.subbinary) AS binary_name
	  FROM pg_subscription_rel AS x
	  JOIN pg_subscription AS s ON s.oid = x.srsubid
	  JOIN pg_class AS k ON k.oid = x.srrelid
	 WHERE k.oid = ANY (ARRAY['idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log', 'idem.queues', 'idem.schedules', 'idem.shard']::regclass[]))
SELECT 16 AS ord,
	   true AS writes,
	   'job numbers' AS "check",
	   /* while a subscription writes the tables, no function takes a number from the sequence */
	   CASE WHEN NOT n.behind THEN 'ok' WHEN u.names IS NULL THEN 'fail' ELSE 'warn' END AS status,
	   CASE
	   WHEN n.behind
	   THEN CASE WHEN n.has_slots
			THEN format('the sequence is at %s, and value %s was used: new jobs are refused or get numbers that were given out before', n.at, n.used)
			ELSE format('the sequence is at %s, and there is a job %s: new jobs get numbers that were given out before', n.at, n.highest) END
	   ELSE 'the sequence is past all jobs'
	   END AS detail,
	   CASE WHEN n.behind THEN format('SELECT pg_catalog.setval(''idem.jobs_job_id_seq'', %s);', n.used) END AS fix
  FROM n, u
UNION ALL
SELECT 17, true, 'subscription',
	   CASE WHEN u.is_binary THEN 'fail' WHEN u.names IS NOT NULL THEN 'warn' ELSE 'ok' END,
	   CASE
	   WHEN u.names IS NULL THEN 'no subscription writes the tables'
	   WHEN u.is_binary
	   THEN format('subscription %s is binary: owners arrive as numbers, which are other roles here; copy the tables again after the fix', u.binary_name)
	   ELSE format('%s: written by subscription %s, so cleanup skips them, and functions that write them are refused; at the cutover: create all roles of the publisher here, stop writes there, wait until all of them have arrived, then the fix, DROP SUBSCRIPTION, reload', u.tables, u.names)
	   END,
	   CASE
	   WHEN u.is_binary THEN format('ALTER SUBSCRIPTION %s SET (binary = false);', u.binary_name)
	   WHEN u.names IS NOT NULL
	   THEN 'SELECT pg_catalog.setval(''idem.jobs_job_id_seq'', 1000000 OPERATOR(pg_catalog.+) GREATEST((SELECT last_value FROM idem.jobs_job_id_seq), '
			|| CASE WHEN n.has_slots
			   THEN 'GREATEST((SELECT jobs_from FROM idem.shard), (SELECT pg_catalog.max(job_id) FROM idem.jobs), (SELECT pg_catalog.max(job_id) FROM idem.job_log), (SELECT pg_catalog.max(job_id) FROM idem.job_keys)) OPERATOR(pg_catalog./) 1024));'
			   ELSE '(SELECT pg_catalog.max(job_id) FROM idem.jobs), (SELECT pg_catalog.max(job_id) FROM idem.job_log), (SELECT pg_catalog.max(job_id) FROM idem.job_keys)));' END
	   END
  FROM n, u
UNION ALL
/* a row filter may use columns of the replica identity only, or every UPDATE of the table fails, as fetch and complete make them */
SELECT 23, true, 'publication',
	   CASE WHEN p.name IS NULL THEN 'ok' ELSE 'fail' END,
	   COALESCE('publication ' || p.name || ' publishes ' || p.table_name || ' only in part: its ' || p.what,
				'no publication has a row filter or column list that does not work'),
	   'ALTER PUBLICATION ' || p.name || ' DROP TABLE ' || p.table_name || ';'
  FROM (SELECT 1) AS o
  LEFT JOIN (
		SELECT idem_visible_name(b.pubname) AS name,
			   format('idem.%I', k.relname) AS table_name,
			   CASE
			   WHEN r.prattrs IS NOT NULL THEN 'column list leaves out columns that the subscriber needs'
			   ELSE 'row filter uses a column that is not in the replica identity, so functions that change rows fail (42P10)'
			   END AS what
		  FROM pg_publication_rel AS r
		  JOIN pg_publication AS b ON b.oid = r.prpubid
		  JOIN pg_class AS k ON k.oid = r.prrelid
		 WHERE k.oid = ANY (ARRAY['idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log', 'idem.queues', 'idem.schedules', 'idem.shard']::regclass[])
		   AND (r.prattrs IS NOT NULL
				OR (r.prqual IS NOT NULL AND (b.pubupdate OR b.pubdelete) AND k.relreplident <> 'f'
					AND EXISTS (
						SELECT
						  FROM pg_depend AS d
						 WHERE d.classid = 'pg_publication_rel'::regclass
						   AND d.objid = r.oid
						   AND d.refclassid = 'pg_class'::regclass
						   AND d.refobjid = k.oid
						   AND d.refobjsubid > 0
						   AND NOT EXISTS (
								SELECT
								  FROM pg_index AS i
								 WHERE i.indrelid = k.oid
								   AND CASE k.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END
								   AND d.refobjsubid = ANY (i.indkey)))))
		 ORDER BY 1, 2
		 LIMIT 1) AS p ON true;
COMMENT ON VIEW idem_internal.checks_replication IS 'for idem_internal.checks: job numbers, subscription, publication';
COMMENT ON COLUMN idem_internal.checks_replication.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_replication.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_replication."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_replication.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_replication.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_replication.fix IS 'command that repairs or shows the problem; null if there is none';

-- set: none
CREATE VIEW idem_internal.checks_catalog AS
SELECT 15 AS ord,
	   false AS writes,
	   'functions' AS "check",
	   CASE WHEN f.n > 0 THEN 'warn' ELSE 'ok' END AS status,
	   CASE
	   WHEN f.n = 0 THEN 'no function outside pg_catalog and idem_internal is named idem_*'
	   ELSE format('%s functions outside pg_catalog and idem_internal are named idem_*: an unqualified call may reach them; the first is %s of role %s', f.n, f.first[1], f.first[2])
	   END AS detail,
	   CASE WHEN f.n > 0
	   THEN 'SELECT p.oid::pg_catalog.regprocedure AS function, p.proowner::pg_catalog.regrole AS owner FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace WHERE p.proname OPERATOR(pg_catalog.~) ''^idem_'' AND n.nspname OPERATOR(pg_catalog.<>) ''pg_catalog'' AND n.nspname OPERATOR(pg_catalog.<>) ''idem_internal'';'
	   END AS fix
  FROM (SELECT count(*) AS n,
			   min(ARRAY[idem_visible_name(n.nspname) || '.' || idem_visible_name(p.proname), idem_visible_name(pg_get_userbyid(p.proowner))]) AS first
		  FROM pg_proc AS p
		  JOIN pg_namespace AS n ON n.oid = p.pronamespace
		 WHERE p.proname ~ '^idem_' AND n.nspname <> 'pg_catalog' AND n.nspname <> 'idem_internal') AS f
UNION ALL
SELECT 18, true, 'settings',
	   CASE WHEN g.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE(g.names || ': no effect on cleanup, which uses idem.cleanup and idem.cleanup_batch_size of the database or the server, and the real clock',
				'every stored setting of idem has an effect'),
	   g.fix
  FROM (SELECT string_agg(format('%s of %s', e.name, e.place), ', ' ORDER BY e.name, e.place) AS names,
			   string_agg(format('ALTER %s RESET %s;', e.place, e.name), ' ' ORDER BY e.name, e.place) AS fix
		  FROM (SELECT lower(split_part(x.setting, '=', 1)) AS name,
					   CASE
					   WHEN s.setrole = 0::oid AND d.datname IS NOT NULL THEN 'DATABASE ' || idem_visible_name(d.datname)
					   WHEN s.setrole = 0::oid THEN 'ROLE ALL'
					   ELSE 'ROLE ' || idem_visible_name(pg_get_userbyid(s.setrole)) || COALESCE(' IN DATABASE ' || idem_visible_name(d.datname), '')
					   END AS place,
					   s.setrole <> 0::oid AS is_of_role
				  FROM pg_db_role_setting AS s
				 CROSS JOIN LATERAL unnest(s.setconfig) AS x (setting)
				  LEFT JOIN pg_database AS d ON d.oid = s.setdatabase
				 WHERE s.setdatabase = 0::oid OR d.datname = current_database()) AS e
		 WHERE e.name = 'idem.clock_offset'
			OR (e.is_of_role AND e.name = ANY (ARRAY['idem.cleanup', 'idem.cleanup_batch_size']))) AS g
UNION ALL
/* the session that asks is not one of the application, so a setting for any role counts, too */
SELECT 19, true, 'timeouts',
	   CASE WHEN g.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE(g.names || ': no limit, as PostgreSQL''s default is; a client that hangs or is gone can keep its keys and jobs from others; set limits before production',
				'the server ends the transactions of clients that hang or are gone'),
	   g.fix
  FROM (SELECT string_agg(p.name, ' and ' ORDER BY p.name) AS names,
			   string_agg(format('ALTER DATABASE %s SET %I = %s;', idem_visible_name(current_database()), p.name, idem_visible_literal(p.value)), ' ' ORDER BY p.name) AS fix
		  FROM (VALUES ('client_connection_check_interval', '10s'),
					   ('idle_in_transaction_session_timeout', '60s')) AS p (name, value)
		 WHERE current_setting(p.name) = '0'
		   AND NOT EXISTS (
				SELECT
				  FROM pg_db_role_setting AS s
				 CROSS JOIN LATERAL unnest(s.setconfig) AS x (setting)
				  LEFT JOIN pg_database AS d ON d.oid = s.setdatabase
				 WHERE (s.setdatabase = 0::oid OR d.datname = current_database())
				   AND lower(split_part(x.setting, '=', 1)) = p.name
				   AND split_part(x.setting, '=', 2) ~ '[1-9]')) AS g;
COMMENT ON VIEW idem_internal.checks_catalog IS 'for idem_internal.checks: functions, settings, timeouts';
COMMENT ON COLUMN idem_internal.checks_catalog.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_catalog.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_catalog."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_catalog.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_catalog.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_catalog.fix IS 'command that repairs or shows the problem; null if there is none';

/*
 * "foreign rows" looks at the rows at both ends of an index only: rows that were left behind are
 * among the first to expire, or among the last.
 */
-- set: none
CREATE VIEW idem_internal.checks_shard AS
WITH p AS (
	SELECT p.*,
		   (SELECT COALESCE(sum(upper(r) - lower(r)), 0) FROM unnest(p.slots) AS r) AS nslots,
		   p.system_identifier <> c.system_identifier OR p.database_oid <> d.oid AS is_copy,
		   (SELECT o.datname FROM pg_database AS o
			 WHERE o.oid = p.database_oid AND o.oid <> d.oid AND p.system_identifier = c.system_identifier) AS original
	  FROM idem.shard AS p
	 CROSS JOIN pg_control_system() AS c
	 CROSS JOIN (SELECT o.oid FROM pg_database AS o WHERE o.datname = current_database()) AS d
	 /* so that the planner expects one row, and JIT does not set in */
	 WHERE p.id = 1),
f AS (
	SELECT (SELECT count(*)
			  FROM ((SELECT k.key_hash, k.nth, k.scope
					   FROM idem.keys AS k
					  WHERE k.expires_at > (SELECT idem_clock())
					  ORDER BY k.expires_at LIMIT 1000)
					UNION
					(SELECT k.key_hash, k.nth, k.scope
					   FROM idem.keys AS k
					  WHERE k.expires_at > (SELECT idem_clock())
					  ORDER BY k.expires_at DESC LIMIT 1000)) AS k
			 WHERE NOT p.slots + COALESCE(p.given, '{}') @> CASE p.by WHEN 'key' THEN (k.key_hash & 1023)::integer ELSE idem_slot('x', k.scope) END) AS keys,
		   (SELECT count(*)
			  FROM ((SELECT j.job_id FROM idem.jobs AS j WHERE j.job_id >= p.jobs_from ORDER BY j.job_id LIMIT 1000)
					UNION
					(SELECT j.job_id FROM idem.jobs AS j WHERE j.job_id >= p.jobs_from ORDER BY j.job_id DESC LIMIT 1000)) AS j
			 WHERE NOT p.slots + COALESCE(p.given, '{}') @> (j.job_id & 1023)::integer) AS jobs
	  FROM p
	 WHERE p.slots IS NOT NULL)
SELECT 20 AS ord,
	   true AS writes,
	   'shard map' AS "check",
	   CASE
	   WHEN o.has_citus AND p.slots IS NULL THEN 'fail'
	   WHEN p.slots IS NOT NULL AND p.is_copy THEN 'warn'
	   WHEN p.given IS NOT NULL OR p.taken IS NOT NULL THEN 'warn'
	   ELSE 'ok'
	   END AS status,
	   CASE
	   WHEN o.has_citus AND p.slots IS NULL
	   THEN 'Citus is installed, and there is no map: a function that reaches another node accepts the key a second time; a coordinator needs pg_catalog.idem_shard_set(''{}'', by => ''scope''), each worker the slots of its shards; the fix shows whether keys were claimed here'
	   WHEN p.slots IS NULL THEN 'no map: this database accepts every key'
	   WHEN p.original IS NOT NULL
	   THEN format('a copy of database %s, with its map: both accept the same keys; if applications use both, give this one slots of its own with pg_catalog.idem_shard_set(); the fix shows the map', idem_visible_name(p.original))
	   WHEN p.is_copy
	   THEN 'the map was set in another database; if this one replaces it for good (pg_upgrade, a restore, a new primary), and no slots have moved since, run SELECT pg_catalog.idem_shard_set(s.slots, s.by, s.number, keep_id => s.database_id) FROM idem.shard AS s; if it is a copy, both accept the same keys: give it slots of its own with pg_catalog.idem_shard_set(); the fix shows the map'
	   WHEN p.nslots = 0 AND p.given IS NULL THEN 'a map without slots: this database refuses every key'
	   ELSE format('%s of 1024 slots, by %s', p.nslots, p.by) || COALESCE(format(', shard %s', p.number), '')
			|| COALESCE('; a move is not complete, run idem_move again: given up, with rows: ' || p.given::text, '')
			|| COALESCE('; a move is not complete, run idem_move again: taken: ' || p.taken::text, '')
	   END AS detail,
	   CASE
	   WHEN o.has_citus AND p.slots IS NULL THEN 'SELECT (SELECT pg_catalog.count(*) FROM idem.keys) AS keys, (SELECT pg_catalog.count(*) FROM idem.jobs) AS jobs;'
	   WHEN p.slots IS NOT NULL AND p.is_copy
	   THEN 'SELECT s.slots, s.by, s.number, s.database_id, s.database_oid, s.system_identifier, s.given, s.taken FROM idem.shard AS s;'
	   WHEN p.given IS NOT NULL OR p.taken IS NOT NULL
	   THEN 'SELECT given, receiver, taken, sender FROM idem.shard;'
	   END AS fix
  FROM (SELECT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'citus') AS has_citus) AS o
  LEFT JOIN p ON true
UNION ALL
SELECT 21, false, 'foreign rows',
	   CASE WHEN f.keys > 0 OR f.jobs > 0 THEN 'fail' ELSE 'ok' END,
	   CASE
	   WHEN f.keys > 0 OR f.jobs > 0
	   THEN format('rows of slots that this database does not have: %s of at most 2000 keys and %s of at most 2000 jobs that were looked at; no function finds them', f.keys, f.jobs)
	   WHEN f.keys IS NULL THEN 'no map'
	   ELSE 'all rows that were looked at have slots of this database'
	   END,
	   CASE
	   WHEN f.keys > 0
	   THEN 'SELECT pg_catalog.idem_slot(k.key, k.scope) AS slot, pg_catalog.count(*) AS keys FROM idem.key_status AS k, idem.shard AS s WHERE NOT s.slots OPERATOR(pg_catalog.@>) pg_catalog.idem_slot(k.key, k.scope) GROUP BY 1 ORDER BY 1 LIMIT 20;'
	   WHEN f.jobs > 0
	   THEN 'SELECT j.job_id OPERATOR(pg_catalog.%) 1024 AS slot, pg_catalog.count(*) AS jobs FROM idem.job_status AS j, idem.shard AS s WHERE j.job_id OPERATOR(pg_catalog.>=) s.jobs_from AND NOT s.slots OPERATOR(pg_catalog.@>) (j.job_id OPERATOR(pg_catalog.%) 1024)::integer GROUP BY 1 ORDER BY 1 LIMIT 20;'
	   END
  FROM (SELECT 1) AS o
  LEFT JOIN f ON true;
COMMENT ON VIEW idem_internal.checks_shard IS 'for idem_internal.checks: shard map, foreign rows';
COMMENT ON COLUMN idem_internal.checks_shard.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_shard.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_shard."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_shard.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_shard.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_shard.fix IS 'command that repairs or shows the problem; null if there is none';

/*
 * M7.  This view reads only catalogs of the server: where Citus has distributed a table, its
 * planner refuses the other views.  Citus cannot undistribute a table of an extension, so the fix
 * does what Citus does when a table is dropped, and keeps the table.  Only the coordinator has
 * the trigger, and only there the fix writes.
 */
-- set: monitor
CREATE FUNCTION idem_internal.idem_citus_table(relid oid)
RETURNS text
LANGUAGE C STABLE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_citus_table';
COMMENT ON FUNCTION idem_internal.idem_citus_table IS
	'for idem_internal.checks_citus: what Citus has made of a table; null if nothing';

-- set: monitor
CREATE VIEW idem_internal.checks_citus AS
SELECT 22 AS ord,
	   s.has_trigger AS writes,
	   'citus' AS "check",
	   CASE WHEN s.names IS NULL THEN 'ok' ELSE 'fail' END AS status,
	   COALESCE(s.names || ': functions that use such a table are refused, here and on every other node; the fix, on the coordinator, brings its rows back from the shards; no other check was made',
				'no table of idem is distributed by Citus') AS detail,
	   CASE WHEN s.names IS NOT NULL AND NOT s.has_trigger
	   THEN 'SELECT nodename, nodeport FROM pg_catalog.pg_dist_node WHERE groupid OPERATOR(pg_catalog.=) 0;'
	   ELSE s.fix END AS fix
  FROM (SELECT string_agg(format('idem.%I is a %s of Citus', t.relname, t.kind), ', ' ORDER BY t.relname) AS names,
			   bool_or(t.trigger IS NOT NULL) AS has_trigger,
			   string_agg(format('BEGIN; '
								 'CREATE TEMPORARY TABLE idem_rows ON COMMIT DROP AS SELECT * FROM idem.%1$I; '
								 'SELECT pg_catalog.master_remove_distributed_table_metadata_from_workers(''idem.%1$I''::pg_catalog.regclass, ''idem'', %1$L); '
								 'SELECT pg_catalog.citus_drop_all_shards(''idem.%1$I''::pg_catalog.regclass, ''idem'', %1$L); '
								 'SELECT pg_catalog.master_remove_partition_metadata(''idem.%1$I''::pg_catalog.regclass, ''idem'', %1$L); '
								 'DROP TRIGGER %2$s ON idem.%1$I; '
								 'TRUNCATE idem.%1$I; '
								 'INSERT INTO idem.%1$I SELECT * FROM pg_temp.idem_rows; '
								 'COMMIT;', t.relname, t.trigger), ' ' ORDER BY t.relname) AS fix
		  FROM (SELECT c.relname,
					   idem_internal.idem_citus_table(c.oid) AS kind,
					   (SELECT min(idem_visible_name(g.tgname)) FROM pg_trigger AS g WHERE g.tgrelid = c.oid AND g.tgname ~ '^truncate_trigger_') AS trigger
				  FROM pg_class AS c
				  JOIN pg_namespace AS n ON n.oid = c.relnamespace
				 WHERE n.nspname = 'idem' AND c.relkind = 'r') AS t
		 WHERE t.kind IS NOT NULL) AS s;
COMMENT ON VIEW idem_internal.checks_citus IS 'for idem_internal.checks: citus';
COMMENT ON COLUMN idem_internal.checks_citus.ord IS 'place of the check among all checks';
COMMENT ON COLUMN idem_internal.checks_citus.writes IS 'whether the fix writes, so that a standby cannot run it';
COMMENT ON COLUMN idem_internal.checks_citus."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks_citus.status IS 'ok, warn or fail';
COMMENT ON COLUMN idem_internal.checks_citus.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks_citus.fix IS 'command that repairs or shows the problem; null if there is none';

-- set: monitor
CREATE VIEW idem_internal.checks AS
SELECT h."check",
	   h.status,
	   h.detail,
	   CASE WHEN NOT h.writes OR NOT pg_is_in_recovery() THEN h.fix END AS fix
  FROM (SELECT * FROM idem_internal.checks_server
		UNION ALL
		SELECT * FROM idem_internal.checks_cleanup
		UNION ALL
		SELECT * FROM idem_internal.checks_tables
		UNION ALL
		SELECT * FROM idem_internal.checks_work
		UNION ALL
		SELECT * FROM idem_internal.checks_replication
		UNION ALL
		SELECT * FROM idem_internal.checks_catalog
		UNION ALL
		SELECT * FROM idem_internal.checks_shard
		UNION ALL
		SELECT * FROM idem_internal.checks_citus) AS h
 ORDER BY h.ord;
COMMENT ON VIEW idem_internal.checks IS 'for idem.health: all checks except that of the version';
COMMENT ON COLUMN idem_internal.checks."check" IS 'name of the check';
COMMENT ON COLUMN idem_internal.checks.status IS 'ok, warn (an operator should look at it) or fail (something does not work)';
COMMENT ON COLUMN idem_internal.checks.detail IS 'what was found';
COMMENT ON COLUMN idem_internal.checks.fix IS 'command that repairs or shows the problem; null if there is none';

/*
 * The executor looks up every C function of a query before it runs the query, and
 * a library of another version may lack some.  So idem.health itself calls
 * idem_version() only.  It calls idem_checks() if the versions are equal;
 * idem_checks() is volatile, so the planner does not inline it.
 */
-- set: monitor
CREATE FUNCTION idem_internal.idem_checks_local(distributed bigint)
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE sql VOLATILE PARALLEL RESTRICTED ROWS 24
BEGIN ATOMIC
	SELECT c."check", c.status, c.detail, c.fix FROM idem_internal.checks AS c;
END;
COMMENT ON FUNCTION idem_internal.idem_checks_local IS
	'for idem_internal.idem_checks(): reads idem_internal.checks only when it is called; the argument makes the caller count the tables that Citus has distributed first';

-- set: monitor
CREATE FUNCTION idem_internal.idem_checks(version text)
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE sql VOLATILE PARALLEL RESTRICTED ROWS 24
BEGIN ATOMIC
	WITH c AS MATERIALIZED (
		SELECT c.* FROM idem_internal.checks_citus AS c WHERE c.status = 'fail')
	SELECT c."check", c.status, idem_visible(c.detail), CASE WHEN NOT c.writes OR NOT pg_is_in_recovery() THEN idem_visible(c.fix) END
	  FROM c
	UNION ALL
	SELECT l."check", l.status, idem_visible(l.detail), idem_visible(l.fix)
	  FROM (SELECT count(*) AS n FROM c) AS d
	 CROSS JOIN LATERAL idem_internal.idem_checks_local(d.n) AS l
	 WHERE d.n = 0;
END;
COMMENT ON FUNCTION idem_internal.idem_checks IS
	'for idem.health: reads idem_internal.checks only when it is called; the argument makes the caller read the version first';

-- set: monitor
CREATE VIEW idem.health AS
WITH v AS (
	SELECT idem_version() AS library,
		   e.extversion AS objects
	  FROM pg_extension AS e
	 WHERE e.extname = 'idem')
SELECT 'version' AS "check",
	   CASE WHEN v.library = v.objects THEN 'ok' ELSE 'fail' END AS status,
	   format('library %s, SQL objects %s', v.library, v.objects)
	   || CASE WHEN o.is_old THEN ': the server or this session still uses the old library; no other check was made'
	   WHEN v.library = v.objects THEN '' ELSE ': no other check was made' END AS detail,
	   CASE WHEN o.is_old THEN CASE WHEN p.is_preloaded THEN 'pg_ctl restart' ELSE E'\\connect' END
	   /* a standby cannot run a command that writes */
	   WHEN v.library <> v.objects AND NOT pg_is_in_recovery() THEN 'ALTER EXTENSION idem UPDATE;' END AS fix
  FROM v
 CROSS JOIN LATERAL (
		SELECT COALESCE(string_to_array(v.library, '.')::integer[] <
						CASE WHEN v.objects ~ '^[0-9]+([.][0-9]+)*$' THEN string_to_array(v.objects, '.')::integer[] END, false) AS is_old) AS o
 CROSS JOIN LATERAL (
		/* only some roles see this setting */
		SELECT count(*) > 0 AS is_preloaded
		  FROM pg_settings AS g
		 WHERE g.name = 'shared_preload_libraries'
		   AND g.setting ~ E'\\midem\\M') AS p
UNION ALL
SELECT c."check", c.status, c.detail, c.fix
  FROM v
 CROSS JOIN LATERAL idem_internal.idem_checks(v.objects) AS c
 WHERE v.library = v.objects;
COMMENT ON VIEW idem.health IS 'rows of idem_doctor()';
COMMENT ON COLUMN idem.health."check" IS 'name of the check';
COMMENT ON COLUMN idem.health.status IS 'ok, warn (an operator should look at it) or fail (something does not work)';
COMMENT ON COLUMN idem.health.detail IS 'what was found';
COMMENT ON COLUMN idem.health.fix IS 'command that repairs or shows the problem; null if there is none';

-- set: monitor
CREATE FUNCTION pg_catalog.idem_doctor()
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE sql VOLATILE PARALLEL RESTRICTED ROWS 25
BEGIN ATOMIC
	SELECT h."check", h.status, h.detail, h.fix FROM idem.health AS h;
END;
COMMENT ON FUNCTION pg_catalog.idem_doctor IS
	'check the health of the extension: one row per check, with its status and a command that helps';
