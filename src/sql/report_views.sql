/* src/sql/report_views.sql: views for idem_report(), of what no other view tells */

/*
 * H2: the views read the tables as their owner, for monitors, too.  The columns key,
 * scope, payload and error (which may quote the others) are null unless the caller may
 * read the views for administrators; a payload is null also if the caller may not read
 * it with idem_job().  In a view has_table_privilege() and pg_has_role() see the caller,
 * not the owner of the view.
 */
-- set: monitor
CREATE VIEW idem_internal.report_jobs AS
SELECT s.job_id,
	   s.queue,
	   s.state,
	   s.worker,
	   s.attempt,
	   s.max_attempts,
	   /* the token of a fetch is its time, in microseconds */
	   idem_clock() - to_timestamp(j.token / 1000000.0) AS running_for,
	   s.lease_until - idem_clock() AS lease_left,
	   s.ended_at,
	   CASE WHEN m.may_read THEN s.last_error END AS error,
	   CASE WHEN m.may_read THEN s.key END AS key,
	   CASE WHEN m.may_read
				 AND has_function_privilege('idem_job(bigint)'::regprocedure, 'EXECUTE')
				 AND (q.owner IS NULL OR pg_has_role(q.owner, 'USAGE'))
			THEN COALESCE(j.payload, l.payload) END AS payload
  FROM idem.job_status AS s
  LEFT JOIN idem.jobs AS j ON j.job_id = s.job_id
  LEFT JOIN idem.job_log AS l ON l.job_id = s.job_id
  LEFT JOIN idem.queues AS q ON q.queue = s.queue
 CROSS JOIN (SELECT has_table_privilege('idem.job_status'::regclass, 'SELECT') AS may_read) AS m
 WHERE s.state = ANY (ARRAY['running', 'expired', 'dead']);
COMMENT ON VIEW idem_internal.report_jobs IS 'for idem_report(): jobs that are leased or dead';
COMMENT ON COLUMN idem_internal.report_jobs.job_id IS 'number of the job';
COMMENT ON COLUMN idem_internal.report_jobs.queue IS 'name of the queue';
COMMENT ON COLUMN idem_internal.report_jobs.state IS 'running (leased), expired (its lease has expired) or dead';
COMMENT ON COLUMN idem_internal.report_jobs.worker IS 'name of the worker, as given to idem_fetch()';
COMMENT ON COLUMN idem_internal.report_jobs.attempt IS 'number of fetches so far';
COMMENT ON COLUMN idem_internal.report_jobs.max_attempts IS 'maximum number of fetches';
COMMENT ON COLUMN idem_internal.report_jobs.running_for IS 'time since the job was fetched; null if it is dead';
COMMENT ON COLUMN idem_internal.report_jobs.lease_left IS 'time until the lease expires; negative once it has expired; null if the job is dead';
COMMENT ON COLUMN idem_internal.report_jobs.ended_at IS 'when the job was made dead; null if it is not dead';
COMMENT ON COLUMN idem_internal.report_jobs.error IS 'the last error; null for roles that may not read idem.job_status';
COMMENT ON COLUMN idem_internal.report_jobs.key IS 'the key; null for roles that may not read idem.job_status';
COMMENT ON COLUMN idem_internal.report_jobs.payload IS 'data for the worker; null for roles that may not read idem.job_status, or not this job with idem_job()';

-- set: monitor
CREATE VIEW idem_internal.report_waiting AS
SELECT DISTINCT ON (s.queue)
	   s.queue,
	   s.job_id,
	   idem_clock() - s.run_at AS due_for
  FROM idem.job_status AS s
 WHERE s.state = 'waiting'
 ORDER BY s.queue, s.run_at, s.job_id;
COMMENT ON VIEW idem_internal.report_waiting IS 'for idem_report(): of each queue the job that has been due for the longest time';
COMMENT ON COLUMN idem_internal.report_waiting.queue IS 'name of the queue';
COMMENT ON COLUMN idem_internal.report_waiting.job_id IS 'number of the job';
COMMENT ON COLUMN idem_internal.report_waiting.due_for IS 'time since the job became due';

-- set: monitor
CREATE VIEW idem_internal.report_dead AS
SELECT d.queue,
	   d.error,
	   count(*) AS jobs,
	   min(d.ended_at) AS first_at,
	   max(d.ended_at) AS last_at
  FROM (SELECT s.queue,
			   s.ended_at,
			   CASE WHEN has_table_privilege('idem.job_status'::regclass, 'SELECT')
					THEN left(s.last_error, 200) END AS error
		  FROM idem.job_status AS s
		 WHERE s.state = 'dead') AS d
 GROUP BY d.queue, d.error;
COMMENT ON VIEW idem_internal.report_dead IS 'for idem_report(): dead jobs by queue and error';
COMMENT ON COLUMN idem_internal.report_dead.queue IS 'name of the queue';
COMMENT ON COLUMN idem_internal.report_dead.error IS 'the first 200 characters of the error; null for roles that may not read idem.job_status';
COMMENT ON COLUMN idem_internal.report_dead.jobs IS 'number of dead jobs with this error';
COMMENT ON COLUMN idem_internal.report_dead.first_at IS 'when the first of them was made dead';
COMMENT ON COLUMN idem_internal.report_dead.last_at IS 'when the last of them was made dead';

-- set: monitor
CREATE VIEW idem_internal.report_leases AS
SELECT k.state,
	   k.owner,
	   k.worker,
	   k.attempt,
	   k.max_attempts,
	   k.now - k.lease_until AS stuck_for,
	   k.now - k.leased_at AS held_for,
	   k.token,
	   k.key_hash,
	   CASE WHEN m.may_read THEN k.key END AS key,
	   CASE WHEN m.may_read THEN k.scope END AS scope
  FROM (SELECT k.owner,
			   k.worker,
			   k.attempt,
			   k.max_attempts,
			   k.lease_until,
			   k.leased_at,
			   k.token,
			   k.key_hash,
			   k.key,
			   k.scope,
			   c.now,
			   idem_internal.idem_key_state(c.now, k.xmin, k.finished_at, k.expires_at, k.lease_until, k.park, k.attempt, k.max_attempts) AS state
		  FROM idem.keys AS k
		 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS c
		 WHERE k.lease_until IS NOT NULL
		   AND k.finished_at IS NULL) AS k
 CROSS JOIN (SELECT has_table_privilege('idem.lease_status'::regclass, 'SELECT') AS may_read) AS m
 WHERE k.state = ANY (ARRAY['parked', 'exhausted', 'live']);
COMMENT ON VIEW idem_internal.report_leases IS 'for idem_report(): leases that are parked, exhausted or live';
COMMENT ON COLUMN idem_internal.report_leases.state IS 'parked (an operator must decide), exhausted (no attempts are left) or live';
COMMENT ON COLUMN idem_internal.report_leases.owner IS 'role that owns the key';
COMMENT ON COLUMN idem_internal.report_leases.worker IS 'name of the worker that has or had the lease';
COMMENT ON COLUMN idem_internal.report_leases.attempt IS 'number of leases of this key';
COMMENT ON COLUMN idem_internal.report_leases.max_attempts IS 'maximum number of leases; null: no limit';
COMMENT ON COLUMN idem_internal.report_leases.stuck_for IS 'time since the lease expired; negative while it is live';
COMMENT ON COLUMN idem_internal.report_leases.held_for IS 'time since the lease was taken or last renewed';
COMMENT ON COLUMN idem_internal.report_leases.token IS 'fencing token of the lease';
COMMENT ON COLUMN idem_internal.report_leases.key_hash IS 'hash of scope and key; idem_key_hash() computes it';
COMMENT ON COLUMN idem_internal.report_leases.key IS 'the key; null for roles that may not read idem.lease_status';
COMMENT ON COLUMN idem_internal.report_leases.scope IS 'scope of the key; null for roles that may not read idem.lease_status';

-- set: monitor
CREATE VIEW idem_internal.report_scopes AS
SELECT s.scope,
	   count(*) AS keys,
	   count(*) FILTER (WHERE s.status = 'finished') AS finished,
	   count(*) FILTER (WHERE s.status = 'live') AS live,
	   count(*) FILTER (WHERE s.attempt > 1) AS repeated
  FROM (SELECT CASE WHEN has_table_privilege('idem.key_status'::regclass, 'SELECT') THEN k.scope END AS scope,
			   k.status,
			   k.attempt
		  FROM idem.key_status AS k) AS s
 GROUP BY s.scope;
COMMENT ON VIEW idem_internal.report_scopes IS 'for idem_report(): keys by scope';
COMMENT ON COLUMN idem_internal.report_scopes.scope IS 'the scope; null for roles that may not read idem.key_status';
COMMENT ON COLUMN idem_internal.report_scopes.keys IS 'number of keys';
COMMENT ON COLUMN idem_internal.report_scopes.finished IS 'those that are finished';
COMMENT ON COLUMN idem_internal.report_scopes.live IS 'those that a worker holds a lease of';
COMMENT ON COLUMN idem_internal.report_scopes.repeated IS 'those that were leased more than once';

-- set: monitor
CREATE VIEW idem_internal.report_hours AS
WITH t AS MATERIALIZED (
	SELECT date_trunc('hour', idem_clock()) AS now)
SELECT t.now - h.ago * interval '1 hour' AS hour,
	   COALESCE(j.done, 0) AS done,
	   COALESCE(j.dead, 0) AS dead,
	   COALESCE(k.created, 0) AS created
  FROM t
 CROSS JOIN generate_series(0, 23) AS h (ago)
  LEFT JOIN (
		SELECT date_bin(interval '1 hour', s.ended_at, t.now) AS hour,
			   count(*) FILTER (WHERE s.state = 'done') AS done,
			   count(*) FILTER (WHERE s.state = 'dead') AS dead
		  FROM t
		  JOIN idem.job_status AS s ON s.ended_at >= t.now - interval '23 hours'
		 GROUP BY 1) AS j ON j.hour = t.now - h.ago * interval '1 hour'
  LEFT JOIN (
		SELECT date_bin(interval '1 hour', s.created_at, t.now) AS hour,
			   count(*) AS created
		  FROM t
		  JOIN idem.keys AS s ON s.created_at >= t.now - interval '23 hours'
		 GROUP BY 1) AS k ON k.hour = t.now - h.ago * interval '1 hour';
COMMENT ON VIEW idem_internal.report_hours IS 'for idem_report(): the last 24 hours, one row each';
COMMENT ON COLUMN idem_internal.report_hours.hour IS 'when the hour began';
COMMENT ON COLUMN idem_internal.report_hours.done IS 'jobs that were completed in that hour and are still in the history';
COMMENT ON COLUMN idem_internal.report_hours.dead IS 'jobs that were made dead in that hour and are still in the history';
COMMENT ON COLUMN idem_internal.report_hours.created IS 'keys that were first claimed in that hour and are still there';
