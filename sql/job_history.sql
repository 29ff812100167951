--
-- What idem keeps of ended jobs, and for how long: keep, keep_dead, the keys of
-- until_expired, idem_cleanup.
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

-- by default done jobs are not kept, dead and cancelled jobs for a week
SELECT count(*) FROM idem_enqueue_many('h', '{1,2,3}', '{a,b,c}', priority => 2, max_attempts => 3);
CREATE TABLE fetched AS SELECT job_id, token FROM idem_fetch('h', 3, lease => '1 h', worker => 'w1');
SELECT idem_complete(job_id, token, '"ok"') FROM fetched WHERE job_id = 1;
SELECT idem_fail(job_id, token, 'no', dead => true) FROM fetched WHERE job_id = 2;
SELECT idem_cancel(3);
SELECT job_id, state, queue, key, payload, result, priority, attempt, max_attempts, worker, errors -> -1 ->> 'error' AS error, expires_at - ended_at AS kept FROM idem.job_log ORDER BY job_id;
SELECT bool_and(enqueued_at < ended_at AND ended_at <= idem_clock()) AS in_order FROM idem.job_log;
SELECT idem_cleanup();
SET idem.clock_offset = '167 h';
SELECT idem_cleanup();
SELECT state FROM idem_job(2);
SET idem.clock_offset = '169 h';
SELECT idem_cleanup();
SELECT count(*) FROM idem_job(2);
SELECT idem_retry(2);
SELECT idem_cleanup();
RESET idem.clock_offset;
DROP TABLE fetched;

-- keep: done jobs, with their result
CALL anew();
SELECT idem_queue_set('kept', keep => '1 h');
SELECT job_id FROM idem_enqueue('kept', '{"a": 1}', 'k');
SELECT idem_complete(job_id, token, '{"b": 2}') FROM idem_fetch('kept', worker => 'w1');
SELECT job_id, state, queue, key, payload, result, attempt, max_attempts, worker, errors -> -1 ->> 'error' AS error, expires_at - ended_at AS kept FROM idem.job_log;
SELECT state, result, max_attempts FROM idem_job(1);
-- also with idem_complete_many, and with the error of an earlier attempt
SELECT job_id FROM idem_enqueue('kept', '2');
SELECT idem_fail(job_id, token, 'first', '0') FROM idem_fetch('kept');
SELECT job_id, token FROM idem_fetch('kept', lease => '1 min') \gset
SELECT * FROM idem_complete_many(ARRAY[:job_id], ARRAY[:token]);
SELECT state, attempt, error, result FROM idem_job(2);
SET idem.clock_offset = '59 min';
SELECT idem_cleanup();
SET idem.clock_offset = '61 min';
SELECT idem_cleanup();
SELECT count(*) FROM idem_job(1);
RESET idem.clock_offset;
-- the settings of the queue at the end of the job count
SELECT job_id FROM idem_enqueue('kept', '3');
SELECT idem_complete(job_id, token) FROM idem_fetch('kept');
SELECT idem_queue_set('kept', keep => '0');
SELECT job_id FROM idem_enqueue('kept', '4');
SELECT idem_complete(job_id, token) FROM idem_fetch('kept');
SELECT job_id, expires_at - ended_at AS kept FROM idem.job_log;
-- keep_dead: dead and cancelled jobs, and jobs that a fetch makes dead
SELECT idem_queue_set('dead', keep_dead => '2 h');
SELECT count(*) FROM idem_enqueue_many('dead', '{1,2,3}', max_attempts => 1);
SELECT idem_fail(job_id, token) FROM idem_fetch('dead', 1);
SELECT job_id FROM idem_fetch('dead', 1, lease => '1 us');
SELECT idem_cancel(7);
SELECT job_id FROM idem_fetch('dead', 1);
SELECT job_id, state, expires_at - ended_at AS kept FROM idem.job_log WHERE queue = 'dead' ORDER BY job_id;
-- zero: nothing is kept
SELECT idem_queue_set('dead', keep_dead => '0');
SELECT count(*) FROM idem_enqueue_many('dead', '{4,5,6}', max_attempts => 1);
SELECT idem_fail(job_id, token) FROM idem_fetch('dead', 1);
SELECT job_id FROM idem_fetch('dead', 1, lease => '1 us');
SELECT idem_cancel(10);
SELECT job_id FROM idem_fetch('dead', 1);
SELECT count(*) FROM idem.job_log WHERE job_id > 7;
SELECT count(*) FROM idem.jobs;
SELECT idem_retry(8) AS dead, idem_retry(10) AS cancelled;

-- keys of until_expired: to the end of their ttl, counted from the enqueue
CALL anew();
SELECT count(*) FROM idem_enqueue_many('keys', '{1,2}', '{a,b}', 'until_expired', key_ttl => '1 h');
SELECT job_id FROM idem_enqueue('keys', '3', 'c', 'until_expired', key_ttl => '2 h');
SELECT enqueued_at + interval '1 h' AS expires_at FROM idem_job(1) \gset
SELECT count(idem_complete(job_id, token, payload)) FROM idem_fetch('keys', 3);
SELECT job_id, queue, key, result, expires_at = :'expires_at' AS in_an_hour FROM idem.job_keys ORDER BY job_id;
SET idem.clock_offset = '59 min';
SELECT idem_cleanup();
SET idem.clock_offset = '61 min';
SELECT idem_cleanup();
SELECT key FROM idem.job_keys;
SELECT outcome FROM idem_enqueue('keys', NULL, 'c', 'until_expired', key_ttl => '1 h');
RESET idem.clock_offset;
-- a dead job leaves no key, nor does a job with another strategy
SELECT count(*) FROM idem_enqueue_many('keys', '{4,5}', '{d,e}', 'until_expired', key_ttl => '1 h');
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('keys', 1);
SELECT idem_cancel(5);
SELECT job_id FROM idem_enqueue('keys', '6', 'f', 'until_executed');
SELECT idem_complete(job_id, token) FROM idem_fetch('keys');
SELECT count(*) FROM idem.job_keys WHERE job_id > 3;

-- idem_cleanup: at most one batch of each kind, oldest first; it returns the number of rows
CALL anew();
SELECT count(*) FROM generate_series(1, 6) AS i, LATERAL idem_claim('k' || i, ttl => i * interval '1 min');
SELECT count(*) FROM generate_series(1, 6) AS i, LATERAL idem_enqueue('c', NULL, 'k' || i, 'until_expired', key_ttl => i * interval '1 min');
SELECT count(idem_complete(job_id, token)) FROM idem_fetch('c', 10);
SELECT count(idem_queue_set('c' || i, keep => i * interval '1 min')::text) FROM generate_series(1, 6) AS i;
SELECT count(*) FROM generate_series(1, 6) AS i, LATERAL idem_enqueue('c' || i) AS e, LATERAL idem_fetch('c' || i) AS f, LATERAL idem_complete(f.job_id, f.token);
SELECT idem_cleanup();
SET idem.clock_offset = '270 s';
BEGIN;
SELECT idem_cleanup(1);
SELECT (SELECT string_agg(key, ' ' ORDER BY key) FROM idem.keys) AS keys,
	   (SELECT string_agg(key, ' ' ORDER BY key) FROM idem.job_keys) AS job_keys,
	   (SELECT string_agg(queue, ' ' ORDER BY queue) FROM idem.job_log) AS job_log;
SELECT idem_cleanup(2);
SELECT (SELECT string_agg(key, ' ' ORDER BY key) FROM idem.keys) AS keys,
	   (SELECT string_agg(key, ' ' ORDER BY key) FROM idem.job_keys) AS job_keys,
	   (SELECT string_agg(queue, ' ' ORDER BY queue) FROM idem.job_log) AS job_log;
SELECT idem_cleanup(100);
SELECT idem_cleanup(100);
ROLLBACK;
SELECT idem_cleanup();
SELECT (SELECT string_agg(key, ' ' ORDER BY key) FROM idem.keys) AS keys,
	   (SELECT string_agg(key, ' ' ORDER BY key) FROM idem.job_keys) AS job_keys,
	   (SELECT string_agg(queue, ' ' ORDER BY queue) FROM idem.job_log) AS job_log;
-- oldest first by expires_at, not by the order in which the jobs ended
RESET idem.clock_offset;
CALL anew();
SELECT idem_queue_set('long', keep => '2 h'), idem_queue_set('short', keep => '1 h');
SELECT job_id FROM idem_enqueue('long');
SELECT job_id FROM idem_enqueue('short');
SELECT idem_complete(job_id, token) FROM idem_fetch('long');
SELECT idem_complete(job_id, token) FROM idem_fetch('short');
SET idem.clock_offset = '3 h';
SELECT idem_cleanup(1);
SELECT queue FROM idem.job_log;
-- live jobs and queues stay, however old; but a job whose last lease has expired becomes dead
SELECT job_id FROM idem_enqueue('old', NULL, 'k', run_at => '1990-01-01 00:00:00+00');
SELECT job_id FROM idem_enqueue('old', max_attempts => 1);
SELECT job_id FROM idem_fetch('old', 2, lease => '1 us');
SET idem.clock_offset = '10000 h';
SELECT idem_cleanup();
SELECT job_id FROM idem.jobs ORDER BY job_id;
SELECT job_id, state, errors -> -1 ->> 'error' AS error FROM idem.job_log WHERE queue = 'old';
SELECT count(*) FROM idem.queues;
-- works from a transaction with an old snapshot
SELECT idem_cancel(3);
SET idem.clock_offset = '11000 h';
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM idem.job_log;
SELECT idem_cleanup();
COMMIT;
RESET idem.clock_offset;
CALL anew();
