/* src/sql/jobs_views.sql: views of jobs and queues */

/*
 * idem.job_status shows keys and is for administrators; idem.queue_status is for
 * monitors.  Neither shows a payload.  The states are the same as in jobrow.c.  A
 * job that an open transaction has fetched is shown in the state that it had before.
 */
-- set: admin
CREATE VIEW idem.job_status AS
SELECT s.job_id,
	   s.queue,
	   s.key,
	   s.state,
	   s.priority,
	   s.age,
	   s.attempt,
	   /* IDEM_DEFAULT_MAX_ATTEMPTS of jobs.h */
	   COALESCE(s.max_attempts, q.max_attempts, 25) AS max_attempts,
	   s.worker,
	   s.errors -> -1 ->> 'error' AS last_error,
	   s.run_at,
	   s.started_at,
	   s.lease_until,
	   s.ended_at,
	   CASE WHEN jsonb_typeof(s.progress -> 'percent') = 'number'
			THEN round(LEAST(GREATEST((s.progress -> 'percent')::numeric, 0), 100), 1) END AS percent,
	   CASE WHEN jsonb_typeof(s.progress -> 'message') = 'string'
			THEN left(s.progress ->> 'message', 200) END AS message
  FROM (SELECT j.job_id,
			   j.queue,
			   j.key,
			   CASE
			   WHEN j.lease_until > c.now THEN 'running'
			   WHEN j.lease_until IS NOT NULL THEN 'expired'
			   WHEN j.after_job IS NOT NULL
					AND EXISTS (SELECT FROM idem.jobs AS o WHERE o.job_id = j.after_job) THEN 'blocked'
			   WHEN j.run_at > c.now THEN 'scheduled'
			   ELSE 'waiting'
			   END AS state,
			   j.priority,
			   c.now - j.enqueued_at AS age,
			   COALESCE(j.attempt, 0) AS attempt,
			   j.max_attempts,
			   j.worker,
			   j.errors,
			   j.run_at,
			   CASE WHEN j.lease_until IS NOT NULL
					THEN to_timestamp(j.token / 1000000.0) END AS started_at,
			   j.lease_until,
			   NULL::timestamp with time zone AS ended_at,
			   j.progress
		  FROM idem.jobs AS j
		 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS c
		UNION ALL
		SELECT l.job_id,
			   l.queue,
			   l.key,
			   l.state,
			   l.priority,
			   c.now - l.enqueued_at,
			   l.attempt,
			   l.max_attempts,
			   l.worker,
			   l.errors,
			   NULL,
			   l.started_at,
			   NULL,
			   l.ended_at,
			   l.progress
		  FROM idem.job_log AS l
		 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS c) AS s
  LEFT JOIN idem.queues AS q ON q.queue = s.queue;
COMMENT ON VIEW idem.job_status IS 'every job, live or in the history, with its state; for administrators';
COMMENT ON COLUMN idem.job_status.job_id IS 'number of the job';
COMMENT ON COLUMN idem.job_status.queue IS 'name of the queue';
COMMENT ON COLUMN idem.job_status.key IS 'the key; null: no key';
COMMENT ON COLUMN idem.job_status.state IS 'waiting, scheduled (for later), blocked (another job must end first), running (leased), expired (its lease has expired: the next fetch gets it); in the history: done, dead, cancelled';
COMMENT ON COLUMN idem.job_status.priority IS 'lower numbers are fetched first';
COMMENT ON COLUMN idem.job_status.age IS 'time since the job was enqueued';
COMMENT ON COLUMN idem.job_status.attempt IS 'number of fetches so far';
COMMENT ON COLUMN idem.job_status.max_attempts IS 'maximum number of fetches';
COMMENT ON COLUMN idem.job_status.worker IS 'name of the worker, as given to idem_fetch(); null if no worker holds the job';
COMMENT ON COLUMN idem.job_status.last_error IS 'text of the last error, or the reason why the job is dead';
COMMENT ON COLUMN idem.job_status.run_at IS 'time from which the job may be fetched; null if the job has ended';
COMMENT ON COLUMN idem.job_status.started_at IS 'when the worker fetched the job that has it, or that had it when the job ended; otherwise null';
COMMENT ON COLUMN idem.job_status.lease_until IS 'when the lease of the worker expires; null if no worker holds a lease';
COMMENT ON COLUMN idem.job_status.ended_at IS 'when the job ended; null if it has not ended';
COMMENT ON COLUMN idem.job_status.percent IS 'member percent of what idem_progress() stored, if it is a number: 0 to 100, others are shown as the nearest of these';
COMMENT ON COLUMN idem.job_status.message IS 'member message of what idem_progress() stored, if it is a string; the first 200 characters';

-- set: monitor
CREATE VIEW idem.queue_status AS
SELECT COALESCE(j.queue, q.queue) AS queue,
	   COALESCE(j.ready, 0) AS ready,
	   COALESCE(j.scheduled, 0) AS scheduled,
	   COALESCE(j.blocked, 0) AS blocked,
	   COALESCE(j.running, 0) AS running,
	   COALESCE(j.expired, 0) AS expired,
	   COALESCE(j.dead, 0) AS dead,
	   j.oldest_ready,
	   q.paused_at IS NOT NULL AS paused,
	   q.owner
  FROM (SELECT s.queue,
			   count(*) FILTER (WHERE s.state = 'waiting') AS ready,
			   count(*) FILTER (WHERE s.state = 'scheduled') AS scheduled,
			   count(*) FILTER (WHERE s.state = 'blocked') AS blocked,
			   count(*) FILTER (WHERE s.state = 'running') AS running,
			   count(*) FILTER (WHERE s.state = 'expired') AS expired,
			   count(*) FILTER (WHERE s.state = 'dead') AS dead,
			   max(idem_clock() - s.run_at)
				   FILTER (WHERE s.state = 'waiting') AS oldest_ready
		  FROM idem.job_status AS s
		 GROUP BY s.queue) AS j
  FULL JOIN idem.queues AS q ON q.queue = j.queue;
COMMENT ON VIEW idem.queue_status IS 'number of jobs in each queue by state; for monitors: shows no keys';
COMMENT ON COLUMN idem.queue_status.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queue_status.ready IS 'jobs that wait for a worker';
COMMENT ON COLUMN idem.queue_status.scheduled IS 'jobs scheduled for later, including retries';
COMMENT ON COLUMN idem.queue_status.blocked IS 'follow-up jobs that wait until another job ends';
COMMENT ON COLUMN idem.queue_status.running IS 'jobs that are leased';
COMMENT ON COLUMN idem.queue_status.expired IS 'jobs whose lease has expired: the next fetch gets them';
COMMENT ON COLUMN idem.queue_status.dead IS 'dead jobs that are still in the history';
COMMENT ON COLUMN idem.queue_status.oldest_ready IS 'time since the oldest ready job became due';
COMMENT ON COLUMN idem.queue_status.paused IS 'whether the queue is paused';
COMMENT ON COLUMN idem.queue_status.owner IS 'role whose privileges are needed to use the queue; null: every role that may call the functions may use it';
