--
-- The views of jobs: idem.job_status and idem.queue_status
--
\a\pset footer off
CALL anew();
SELECT * FROM idem.queue_status;
SELECT * FROM idem.job_status;

-- a job in every state
SELECT idem_queue_set('q', keep => '1 h', max_attempts => 9);
SELECT count(*) FROM idem_enqueue_many('q', array_fill('"secret"'::jsonb, ARRAY[8]), ARRAY['1', '2', '3', '4', '5', '6', '7', '8'], priority => 4);
CREATE TABLE fetched AS SELECT job_id, token FROM idem_fetch('q', 6, lease => '1 h', worker => 'w1');
SELECT idem_heartbeat(ARRAY[job_id], ARRAY[token], '10 s') IS NOT NULL AS expires FROM fetched WHERE job_id = 2;
SELECT idem_complete(job_id, token, '"secret"') FROM fetched WHERE job_id = 3;
SELECT idem_fail(job_id, token, 'oh', '1 h') FROM fetched WHERE job_id = 4;
SELECT idem_fail(job_id, token, 'no', dead => true) FROM fetched WHERE job_id = 5;
SELECT idem_cancel(6);
SELECT job_id FROM idem_enqueue('q', '"secret"', delay => '1 h', max_attempts => 2);
SELECT job_id FROM idem_enqueue('other', '"secret"');
SET idem.clock_offset = '1 min';
SELECT job_id, queue, key, state, priority, attempt, max_attempts, worker, last_error FROM idem.job_status ORDER BY job_id;
SELECT job_id, age BETWEEN '1 min' AND '2 min' AS age, run_at > idem_clock() AS to_come, lease_until > idem_clock() AS leased, ended_at IS NOT NULL AS ended
  FROM idem.job_status ORDER BY job_id;
-- it agrees with idem_job
SELECT s.job_id FROM idem.job_status AS s LEFT JOIN LATERAL idem_job(s.job_id) AS j ON true
 WHERE (s.queue, s.key, s.state, s.priority, s.attempt, s.max_attempts, s.worker, s.last_error, s.run_at, s.lease_until, s.ended_at)
	   IS DISTINCT FROM (j.queue, j.key, j.state, j.priority, j.attempt, j.max_attempts, j.worker, j.error, j.run_at, j.lease_until, j.ended_at);
-- numbers
SELECT queue, ready, scheduled, running, expired, dead, oldest_ready BETWEEN '1 min' AND '2 min' AS oldest_ready, paused, owner FROM idem.queue_status ORDER BY queue;
-- they agree with the functions
SELECT job_id FROM idem_fetch('q', 100, lease => '1 h') ORDER BY job_id;
SELECT queue, ready, scheduled, running, expired, dead, oldest_ready IS NULL AS none_ready, paused FROM idem.queue_status ORDER BY queue;
-- the oldest job that is due, since it became due
SELECT job_id FROM idem_enqueue('old', run_at => idem_clock() - interval '3 h');
SELECT job_id FROM idem_enqueue('old', run_at => idem_clock() - interval '2 h');
SELECT job_id FROM idem_enqueue('old', delay => '5 h');
SELECT ready, scheduled, oldest_ready BETWEEN '3 h' AND '3 h 1 min' AS three_hours FROM idem.queue_status WHERE queue = 'old';
SELECT job_id FROM idem_fetch('old', 1, lease => '1 h');
SELECT ready, running, oldest_ready BETWEEN '2 h' AND '2 h 1 min' AS two_hours FROM idem.queue_status WHERE queue = 'old';
SELECT job_id FROM idem_fetch('old', 1, lease => '1 h');
SELECT ready, running, oldest_ready FROM idem.queue_status WHERE queue = 'old';
-- later
SET idem.clock_offset = '6 h';
SELECT queue, ready, scheduled, running, expired, dead FROM idem.queue_status ORDER BY queue;
RESET idem.clock_offset;

-- follow-up jobs that wait for another job are blocked, whenever they are due: neither ready nor scheduled
CALL anew();
SELECT job_id, outcome FROM idem_enqueue('chain', '1', 'k', 'until_executed');
SELECT job_id, token FROM idem_fetch('chain', lease => '1 h') \gset
SELECT job_id, outcome FROM idem_enqueue('chain', '2', 'k', 'until_executed', if_running => 'rerun');
SELECT job_id, outcome FROM idem_enqueue('other', '3', 'k', 'until_executed');
SELECT job_id AS other_id, token AS other_token FROM idem_fetch('other', lease => '1 h') \gset
SELECT job_id, outcome FROM idem_enqueue('other', '4', 'k', 'until_executed', if_running => 'rerun', delay => '1 h', include_scheduled => true);
SELECT job_id, state FROM idem.job_status ORDER BY job_id;
SELECT j.* FROM (VALUES (1), (2), (3), (4)) AS v (id), LATERAL (SELECT id, state FROM idem_job(id)) AS j;
SELECT queue, ready, scheduled, blocked, running, oldest_ready FROM idem.queue_status ORDER BY queue;
-- the job that they wait for fails and waits for its retry: still blocked
SELECT idem_fail(:job_id, :token, retry_in => '1 min');
SELECT queue, ready, scheduled, blocked, running, oldest_ready FROM idem.queue_status WHERE queue = 'chain';
-- it ends: not blocked any more
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT state FROM idem_job(2);
SELECT idem_cancel(1);
SELECT state FROM idem_job(2);
SELECT state FROM idem.job_status WHERE job_id = 2;
ROLLBACK;
SELECT idem_cancel(1);
SELECT idem_complete(:other_id, :other_token);
SELECT job_id, state FROM idem.job_status WHERE state <> 'cancelled' ORDER BY job_id;
SELECT state FROM idem_job(2);
SELECT state FROM idem_job(4);
SELECT queue, ready, scheduled, blocked, running, oldest_ready IS NOT NULL AS has_ready FROM idem.queue_status ORDER BY queue;
SELECT job_id FROM idem_fetch('chain', lease => '1 h');

-- queues without jobs, if they are declared; paused ones; owners
CALL anew();
SELECT idem_queue_set('declared'), idem_queue_set('owned', owner => current_user::regrole);
SELECT idem_pause('paused');
SELECT queue, ready, scheduled, running, expired, dead, oldest_ready, paused, owner = current_user::regrole AS mine FROM idem.queue_status ORDER BY queue;
SELECT job_id FROM idem_enqueue('paused');
SELECT ready, paused FROM idem.queue_status WHERE queue = 'paused';
-- only history, which counts dead jobs
SELECT job_id FROM idem_enqueue('past');
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('past');
SELECT job_id FROM idem_enqueue('past');
SELECT idem_cancel(3);
SELECT queue, ready, scheduled, running, expired, dead FROM idem.queue_status WHERE queue = 'past';
-- a transaction sees its own changes
BEGIN;
SELECT job_id, token FROM idem_enqueue('tx') AS e, LATERAL (SELECT token FROM idem_fetch('tx')) AS f \gset
SELECT state FROM idem.job_status WHERE queue = 'tx';
SELECT idem_complete(:job_id, :token);
SELECT count(*) FROM idem.job_status WHERE queue = 'tx';
ROLLBACK;
-- no view shows a payload or a result
SELECT attrelid::regclass, attname FROM pg_attribute
 WHERE attrelid IN ('idem.job_status'::regclass, 'idem.queue_status'::regclass) AND attnum > 0
   AND (atttypid = 'jsonb'::regtype OR attname IN ('payload', 'result', 'token'));
-- and queue_status shows no key
SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = 'idem.queue_status'::regclass AND attnum > 0;
-- the default of max_attempts is the same in the view and in idem_job(), for live jobs and in the history
CALL anew();
SELECT job_id FROM idem_enqueue('default');
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('default');
SELECT job_id FROM idem_enqueue('default');
SELECT s.state, s.max_attempts, s.max_attempts = j.max_attempts AS agree
  FROM idem.job_status AS s CROSS JOIN LATERAL idem_job(s.job_id) AS j ORDER BY s.job_id;
CALL anew();
DROP TABLE fetched;
