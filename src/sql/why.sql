/* src/sql/why.sql: why a job does not run, who holds a key, which workers have jobs */

CREATE TYPE idem.why_result AS (
	reason text,
	detail text,
	since timestamp with time zone,
	pid integer,
	fix text);
COMMENT ON TYPE idem.why_result IS 'a reason why a job does not run, as idem_why() shows it';
COMMENT ON COLUMN idem.why_result.reason IS 'subscribed, paused, later, retry, leased, expired, spent, blocked, held, behind, ready, done, dead, cancelled, gone or other_shard';
COMMENT ON COLUMN idem.why_result.detail IS 'the reason in words';
COMMENT ON COLUMN idem.why_result.since IS 'since when; null: not known, or not shown to this role';
COMMENT ON COLUMN idem.why_result.pid IS 'process in the way; null: none, or not shown to this role';
COMMENT ON COLUMN idem.why_result.fix IS 'command that removes the reason; null: there is none';

/*
 * The facts that idem_why() puts into words, read at one moment.  A fact is
 *	subscribed	a subscription writes the table
 *	paused		since when the queue "name" is paused
 *	job			the row, with the columns from "state" on, and what is known about its queue
 *	held		the transaction in the way ("holder", its "name" and "pid"), and what it does
 *	new			the same for a job that is not committed
 *	free		nothing is in the way: how many jobs come first
 *	ended		the row in the history: its "state", since when, "attempt" and "error"
 *	gone, other_shard
 */
-- set: app
CREATE FUNCTION idem_internal.idem_job_facts(
	job_id bigint,
	OUT fact text,
	OUT does text,
	OUT since timestamp with time zone,
	OUT pid integer,
	OUT holder text,
	OUT name text,
	OUT state text,
	OUT is_mine boolean,
	OUT attempt integer,
	OUT max_attempts integer,
	OUT worker text,
	OUT enqueued_at timestamp with time zone,
	OUT token_at timestamp with time zone,
	OUT run_at timestamp with time zone,
	OUT lease_until timestamp with time zone,
	OUT now timestamp with time zone,
	OUT after_job bigint,
	OUT has_failed boolean,
	OUT error text,
	OUT last_fetch timestamp with time zone,
	OUT has_waiter boolean,
	OUT ahead integer,
	OUT is_least boolean,
	OUT slot integer,
	OUT shard integer)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 2
AS 'MODULE_PATHNAME', 'idem_job_facts';
COMMENT ON FUNCTION idem_internal.idem_job_facts IS 'for idem_why(): what keeps the job from running, with the privileges of the caller';

-- set: app
CREATE FUNCTION idem_internal.idem_holder_words(
	holder text,
	name text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE holder
	WHEN 'mine' THEN 'It is this transaction.'
	WHEN 'process' THEN coalesce('Its application_name is ' || name || '.', 'Its session has no application_name.')
	WHEN 'prepared' THEN 'It is the prepared transaction ' || name || '.'
	WHEN 'primary' THEN 'It runs on the primary.'
	WHEN 'hidden' THEN 'Members of pg_read_all_stats can see its session.'
END;
COMMENT ON FUNCTION idem_internal.idem_holder_words IS 'for idem_why() and idem_holder(): who it is, after a sentence about what it does';

-- set: app
CREATE FUNCTION idem_internal.idem_holder_fix(
	holder text,
	pid integer,
	name text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE holder
	WHEN 'mine' THEN 'COMMIT;'
	WHEN 'process' THEN format('SELECT pg_catalog.pg_terminate_backend(%s);', pid)
	WHEN 'prepared' THEN format('ROLLBACK PREPARED %s;', idem_visible_literal(name))
END;
COMMENT ON FUNCTION idem_internal.idem_holder_fix IS 'for idem_why() and idem_holder(): a command that ends the transaction; null: the caller cannot end it from here';

-- set: app
CREATE FUNCTION pg_catalog.idem_why(
	job_id bigint)
RETURNS SETOF idem.why_result
LANGUAGE sql VOLATILE PARALLEL UNSAFE ROWS 2
BEGIN ATOMIC
WITH facts AS MATERIALIZED (
	SELECT f.*,
		   coalesce('Error: ' || f.error, 'It gave no error.') AS error_words,
		   CASE WHEN f.last_fetch IS NULL THEN 'It is not known when a worker last fetched from the queue.'
				WHEN f.last_fetch = '-infinity' THEN 'No fetch from the queue is known since the server was started.'
				ELSE format('The last fetch from the queue was %s s ago.', ceil(extract(epoch FROM greatest(f.now - f.last_fetch, '0')))) END
			|| CASE WHEN f.has_waiter THEN ' A session waits for the queue.' ELSE '' END AS fetch_words
	  FROM idem_internal.idem_job_facts(job_id) AS f
), job AS (
	SELECT f.*,
		   coalesce(f.token_at, f.enqueued_at) AS touched_at,
		   ceil(extract(epoch FROM f.run_at - f.now)) AS due_in,
		   coalesce('Worker ' || f.worker, 'A worker without a name')
			|| CASE WHEN f.lease_until > f.now
					THEN format(' has it, at attempt %s of %s. The lease expires in %s s, unless it is renewed.', f.attempt, f.max_attempts, ceil(extract(epoch FROM f.lease_until - f.now)))
					/* a fetch without a lease sets both to the same time */
					WHEN f.lease_until = f.token_at
					THEN ' fetched the job without a lease, and its transaction has committed without idem_complete() or idem_fail(), perhaps in autocommit.'
					ELSE ' had the job, and its lease has expired.' END AS worker_words
	  FROM facts AS f
	 WHERE f.fact = 'job'
)
SELECT w.reason, idem_visible(w.detail), w.since, w.pid, w.fix
  FROM (SELECT f.fact AS reason, 'A subscription of this database writes the table idem.jobs, so a fetch raises an error.' AS detail, f.since, f.pid,
			   'SELECT h.detail, h.fix FROM pg_catalog.idem_doctor() AS h WHERE h.status OPERATOR(pg_catalog.<>) ''ok'';' AS fix
		  FROM facts AS f WHERE f.fact = 'subscribed'
		 UNION ALL
		SELECT f.fact, 'The queue is paused.', f.since, NULL, format('SELECT pg_catalog.idem_resume(%s);', idem_visible_literal(f.name))
		  FROM facts AS f WHERE f.fact = 'paused'
		 UNION ALL
		SELECT 'leased', j.worker_words, j.touched_at, NULL, NULL
		  FROM job AS j WHERE j.state = 'running'
		 UNION ALL
		SELECT 'spent', j.worker_words || ' It was the last attempt. The next fetch or cleanup makes the job dead.', j.lease_until, NULL, 'SELECT pg_catalog.idem_cleanup();'
		  FROM job AS j WHERE j.state = 'expired' AND NOT j.is_mine AND j.attempt >= j.max_attempts
		 UNION ALL
		SELECT 'expired', format('%s The next fetch gets the job. %s', j.worker_words, j.fetch_words), j.lease_until, NULL, NULL
		  FROM job AS j WHERE j.state = 'expired' AND NOT j.is_mine AND j.attempt < j.max_attempts
		 UNION ALL
		SELECT 'blocked', format('Job %s must end first.', j.after_job), j.enqueued_at, NULL, format('SELECT * FROM pg_catalog.idem_why(%s);', j.after_job)
		  FROM job AS j WHERE j.state = 'blocked'
		 UNION ALL
		/* a snooze or a reschedule came after the attempt that has failed; both give a new token */
		SELECT 'later', CASE WHEN j.token_at IS NULL THEN format('It is due in %s s.', j.due_in)
							 ELSE format('It is due in %s s: it was snoozed or rescheduled, after %s of %s attempts.', j.due_in, j.attempt, j.max_attempts) END, j.touched_at, NULL, NULL
		  FROM job AS j WHERE j.lease_until IS NULL AND j.run_at > j.now AND NOT j.has_failed
		 UNION ALL
		SELECT 'retry', format('It is due again in %s s, after attempt %s of %s. %s', j.due_in, j.attempt, j.max_attempts, j.error_words), j.touched_at, NULL, NULL
		  FROM job AS j WHERE j.lease_until IS NULL AND j.run_at > j.now AND j.has_failed
		 UNION ALL
		SELECT 'held',
			   CASE f.does
					WHEN 'added' THEN 'An open transaction has enqueued a duplicate, which the job has absorbed.'
					WHEN 'enqueued' THEN 'An open transaction has enqueued the job, which can be fetched after the commit.'
					WHEN 'retried' THEN 'An open transaction retries the job, which has ended and can be fetched after the commit.'
					WHEN 'fetched' THEN 'An open transaction has fetched the job.'
					WHEN 'renewed' THEN 'An open transaction has renewed the lease of the job.'
					WHEN 'gave back' THEN 'An open transaction has given the job back, so that it runs again.'
					WHEN 'moved' THEN 'An open transaction has changed the time or the priority of the job.'
					WHEN 'ends' THEN 'An open transaction is ending the job.'
					WHEN 'changed or ended' THEN 'An open transaction has changed or ended the job.'
					WHEN 'locked' THEN 'An open transaction has locked the job.'
					WHEN 'cancels' THEN 'A session waits to cancel the job.'
					WHEN 'locked table' THEN 'An open transaction has locked the table idem.jobs or an index of it, and every fetch waits for it.'
					WHEN 'waits for table' THEN 'A session waits to lock the table idem.jobs or an index of it, and every fetch waits behind it.'
			   END || ' ' || idem_internal.idem_holder_words(f.holder, f.name), f.since, f.pid,
			   CASE WHEN f.does IN ('cancels', 'waits for table') THEN 'SELECT pg_catalog.pg_cancel_backend(' || f.pid || ');'
					WHEN f.fact = 'held' THEN idem_internal.idem_holder_fix(f.holder, f.pid, f.name)
					/* to end it would undo what it has done for the job, so only its commit helps */
					WHEN f.holder = 'prepared' THEN format('COMMIT PREPARED %s;', idem_visible_literal(f.name)) END
		  FROM facts AS f WHERE f.fact IN ('held', 'new')
		 UNION ALL
		SELECT 'behind', format('Jobs of the queue that can be fetched before it: %s%s. %s', CASE WHEN f.is_least THEN 'at least ' END, f.ahead, f.fetch_words), f.since, NULL, NULL
		  FROM facts AS f WHERE f.fact = 'free' AND f.ahead > 0
		 UNION ALL
		SELECT 'ready',
			   CASE WHEN f.is_least THEN 'Many jobs come before it, but none was found that can be fetched.' ELSE 'The next fetch gets it.' END
				|| ' Looked at: its row, its queue, the jobs before it, open transactions, locks on the table, subscriptions. ' || f.fetch_words, f.since, NULL, NULL
		  FROM facts AS f, job AS j WHERE f.fact = 'free' AND f.ahead = 0 AND j.state = 'waiting'
		 UNION ALL
		SELECT f.state, format('It has ended. Attempts: %s.', f.attempt) || CASE f.state WHEN 'dead' THEN ' ' || f.error_words ELSE '' END, f.since, NULL,
			   CASE WHEN f.state <> 'done' THEN format('SELECT pg_catalog.idem_retry(%s);', job_id) END
		  FROM facts AS f WHERE f.fact = 'ended'
		 UNION ALL
		SELECT f.fact, 'There is no such job: it is done and was not kept, was removed from the history, or was never enqueued.', NULL, NULL, NULL
		  FROM facts AS f WHERE f.fact = 'gone'
		 UNION ALL
		SELECT f.fact, format('Its slot is %s, which %s does not have.', f.slot, coalesce('shard ' || f.shard, 'this database')), NULL, NULL, NULL
		  FROM facts AS f WHERE f.fact = 'other_shard') AS w;
END;
COMMENT ON FUNCTION pg_catalog.idem_why IS
	'why the job does not run: one row for each reason, with the processes in the way, and a command where one helps';

CREATE TYPE idem.holder_result AS (
	kind text,
	pid integer,
	application_name text,
	since timestamp with time zone,
	worker text,
	lease_until timestamp with time zone,
	detail text,
	fix text);
COMMENT ON TYPE idem.holder_result IS 'who holds a key, as idem_holder() shows it';
COMMENT ON COLUMN idem.holder_result.kind IS 'claim: an open transaction that has claimed the key or changes its row; lease; fence: an open transaction that has locked the key';
COMMENT ON COLUMN idem.holder_result.pid IS 'process that runs the transaction; null: a lease, a prepared transaction, or not shown to this role';
COMMENT ON COLUMN idem.holder_result.application_name IS 'name that the session of the process has set; null as pid, or none';
COMMENT ON COLUMN idem.holder_result.since IS 'when the transaction began, or was prepared; of a lease: when it was taken or last renewed';
COMMENT ON COLUMN idem.holder_result.worker IS 'of a lease: name of the worker, as given to idem_lease()';
COMMENT ON COLUMN idem.holder_result.lease_until IS 'of a lease: when it expires or has expired';
COMMENT ON COLUMN idem.holder_result.detail IS 'what the holder does, in words';
COMMENT ON COLUMN idem.holder_result.fix IS 'command that lets the key go; null: there is none';

/*
 * The facts that idem_holder() puts into words, read at one moment.  A fact is a claim or a fence,
 * with its holder, or a lease, with the columns from "worker" on; what it "does" is its state.
 */
-- set: app
CREATE FUNCTION idem_internal.idem_key_facts(
	key text,
	scope text,
	OUT fact text,
	OUT does text,
	OUT since timestamp with time zone,
	OUT pid integer,
	OUT holder text,
	OUT name text,
	OUT worker text,
	OUT lease_until timestamp with time zone,
	OUT in_scope text,
	OUT token bigint,
	OUT attempt integer,
	OUT is_owner boolean)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_key_facts';
COMMENT ON FUNCTION idem_internal.idem_key_facts IS 'for idem_holder(): who holds the key, with the privileges of the caller';

-- set: app
CREATE FUNCTION pg_catalog.idem_holder(
	key text,
	scope text DEFAULT NULL)
RETURNS SETOF idem.holder_result
LANGUAGE sql VOLATILE PARALLEL UNSAFE ROWS 1
BEGIN ATOMIC
SELECT f.fact, f.pid, CASE WHEN f.holder <> 'prepared' THEN f.name END, f.since, f.worker, f.lease_until,
	   idem_visible(CASE f.does
						WHEN 'claimed' THEN 'An open transaction has claimed the key.'
						WHEN 'leased' THEN 'An open transaction has leased the key.'
						WHEN 'changed lease' THEN 'An open transaction has taken, renewed or finished the lease.'
						WHEN 'removes' THEN 'An open transaction is removing the key.'
						WHEN 'locked' THEN 'An open transaction has locked the key, as a fence does.'
						WHEN 'live' THEN 'A worker has a lease of the key.'
						WHEN 'parked' THEN 'The lease has expired, and the key is parked: an operator must decide whether the work happened.'
						WHEN 'exhausted' THEN 'The lease of the last attempt has expired.'
					END || coalesce(' ' || idem_internal.idem_holder_words(f.holder, f.name), '')),
	   CASE WHEN f.fact <> 'lease' THEN idem_internal.idem_holder_fix(f.holder, f.pid, f.name)
			WHEN NOT f.is_owner THEN format('SELECT pg_catalog.idem_forget(%s, scope => %s);', l.key, l.scope)
			/* the lease of this command is an attempt, too */
			WHEN f.does = 'exhausted' THEN format('SELECT pg_catalog.idem_release(%1$s, (pg_catalog.idem_lease(%1$s, ''1 s'', max_attempts => %2$s, scope => %3$s)).token, scope => %3$s);', l.key, f.attempt + 4, l.scope)
			ELSE format('SELECT pg_catalog.idem_release(%s, %s, scope => %s);', l.key, f.token, l.scope)
	   END
  FROM idem_internal.idem_key_facts(key, scope) AS f
 CROSS JOIN LATERAL (SELECT idem_visible_literal(idem_holder.key) AS key, idem_visible_literal(f.in_scope) AS scope) AS l;
END;
COMMENT ON FUNCTION pg_catalog.idem_holder IS
	'who holds the key: open transactions and leases; no row if the next claim gets the key, or its stored result';

/*
 * H3: the view reads the table as its owner, for monitors, too, and shows no keys.  A fetch
 * without a lease is not there: its transaction is open.
 */
-- set: monitor
CREATE VIEW idem.workers AS
SELECT j.worker,
	   j.queue,
	   count(*) FILTER (WHERE j.lease_until > c.now) AS running,
	   count(*) FILTER (WHERE j.lease_until <= c.now) AS expired,
	   /* the token of a fetch is its time, in microseconds */
	   max(c.now - to_timestamp(j.token / 1000000.0)) AS oldest,
	   min(c.now - to_timestamp(j.token / 1000000.0)) AS last_fetch,
	   min(j.lease_until - c.now) AS next_expiry
  FROM idem.jobs AS j
 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS c
 WHERE j.lease_until IS NOT NULL
 GROUP BY j.worker, j.queue;
COMMENT ON VIEW idem.workers IS 'workers that have leased jobs, by queue; for monitors: shows no keys';
COMMENT ON COLUMN idem.workers.worker IS 'name of the worker, as given to idem_fetch(); null: all that gave none';
COMMENT ON COLUMN idem.workers.queue IS 'name of the queue';
COMMENT ON COLUMN idem.workers.running IS 'jobs that it has leased';
COMMENT ON COLUMN idem.workers.expired IS 'jobs whose lease has expired, and that no other worker has fetched yet';
COMMENT ON COLUMN idem.workers.oldest IS 'time since the oldest of these jobs was fetched';
COMMENT ON COLUMN idem.workers.last_fetch IS 'time since the newest of these jobs was fetched';
COMMENT ON COLUMN idem.workers.next_expiry IS 'time until the first of the leases expires; negative once it has expired';
