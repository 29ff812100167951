--
-- How a fetch ends: complete, fail, snooze, heartbeat; also cancel, retry and
-- idem_job.  Rules J7 and J11.
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

--
-- complete
--
SELECT job_id FROM idem_enqueue('c', '1', 'k');
-- never fetched: it cannot be completed, whatever the token
SELECT job_version(1) AS before \gset
SELECT idem_complete(1, 1);
SELECT idem_complete(1, 9223372036854775807);
SELECT idem_fail(1, 1);
SELECT idem_snooze(1, 1, '1 h');
SELECT * FROM idem_heartbeat(ARRAY[1], ARRAY[1], '1 min');
SELECT * FROM idem_complete_many(ARRAY[1], ARRAY[1]);
SELECT job_version(1) = :'before' AS untouched;
-- nor can a scheduled job
SELECT job_id FROM idem_enqueue('c', '2', delay => '1 h');
SELECT idem_complete(2, 1);
-- a job that does not exist, or not any more
SELECT idem_complete(99, 1);
SELECT idem_complete(0, 1);
SELECT idem_complete(-1, 1);
SELECT idem_fail(99, 1);
SELECT idem_snooze(99, 1, '1 h');
SELECT * FROM idem_heartbeat(ARRAY[99], ARRAY[1], '1 min');
-- fetched: only the token of the fetch is accepted
SELECT job_id, token FROM idem_fetch('c', lease => '1 min') \gset
SELECT job_version(1) AS before \gset
SELECT idem_complete(:job_id, :token - 1);
SELECT idem_complete(:job_id, :token + 1);
SELECT idem_complete(2, :token);
SELECT job_version(1) = :'before' AS untouched;
SELECT idem_complete(:job_id, :token, '"ok"');
-- the job is gone, and leaves nothing unless the queue keeps it
SELECT count(*) FROM idem_job(:job_id);
SELECT (SELECT count(*) FROM idem.jobs WHERE job_id = :job_id) AS jobs, (SELECT count(*) FROM idem.job_log) AS log,
	   (SELECT count(*) FROM idem.job_keys) AS keys;
-- twice
SELECT idem_complete(:job_id, :token, '"ok"');
SELECT idem_fail(:job_id, :token);
-- in the transaction of the fetch, and undone with it
SELECT job_id FROM idem_enqueue('c', '3');
BEGIN;
SELECT job_id, token FROM idem_fetch('c') \gset
SELECT idem_complete(:job_id, :token);
SAVEPOINT s;
SELECT idem_complete(:job_id, :token);
ROLLBACK TO s;
SELECT count(*) FROM idem_job(:job_id);
ROLLBACK;
SELECT state, attempt FROM idem_job(3);
-- the token of a fetch that was rolled back is not valid
SELECT idem_complete(:job_id, :token);
-- a completion that is rolled back leaves the job to its worker
SELECT job_id, token FROM idem_fetch('c', lease => '1 min') \gset
BEGIN;
SELECT idem_complete(:job_id, :token);
ROLLBACK;
SELECT state FROM idem_job(3);
-- late: the lease has expired, but no other worker has fetched the job
SET idem.clock_offset = '10 min';
SELECT state FROM idem_job(3);
SELECT idem_complete(:job_id, :token);
-- too late: another worker has fetched it (J11)
SELECT job_id FROM idem_enqueue('c', '4');
SELECT job_id, token FROM idem_fetch('c', lease => '1 min') \gset a_
SET idem.clock_offset = '20 min';
SELECT job_id, token FROM idem_fetch('c', lease => '1 min') \gset b_
SELECT :a_job_id = :b_job_id AS same_job, :b_token > :a_token AS higher;
SELECT job_version(4) AS before \gset
SELECT idem_complete(:a_job_id, :a_token);
SELECT idem_fail(:a_job_id, :a_token, 'late', dead => true);
SELECT idem_snooze(:a_job_id, :a_token, '1 h');
SELECT * FROM idem_heartbeat(ARRAY[:a_job_id], ARRAY[:a_token], '1 h');
SELECT * FROM idem_complete_many(ARRAY[:a_job_id], ARRAY[:a_token]);
SELECT job_version(4) = :'before' AS untouched;
-- also when the lease of the second worker has expired
SET idem.clock_offset = '30 min';
SELECT idem_complete(:a_job_id, :a_token);
SELECT idem_complete(:b_job_id, :b_token);
RESET idem.clock_offset;
-- tokens grow even if the clock is set back (L2)
SELECT job_id FROM idem_enqueue('clock', '5', run_at => '1990-01-01 00:00:00+00');
SET idem.clock_offset = '10 h';
SELECT token AS t1 FROM idem_fetch('clock', lease => '1 us') \gset
SET idem.clock_offset = '11 h';
SELECT token AS t2 FROM idem_fetch('clock', lease => '1 us') \gset
SET idem.clock_offset = '10 h';
SELECT idem_fail(5, :t2, retry_in => '0');
SET idem.clock_offset = '9 h';
SELECT count(*) FROM idem_fetch('clock');
SET idem.clock_offset = '36001 s';
SELECT token AS t3, attempt FROM idem_fetch('clock', lease => '1 h') \gset
SELECT :t1 < :t2 AS second, :t2 < :t3 AS third, :t3 <= :t2 + 2 AS no_more_than_needed, :attempt AS attempt;
SELECT idem_complete(5, :t2);
SELECT idem_complete(5, :t3);
RESET idem.clock_offset;

-- complete_many: one row per element, in the order of the array, and no error
CALL anew();
SELECT count(*) FROM idem_enqueue_many('m', array_fill('1'::jsonb, ARRAY[5]));
CREATE TABLE fetched AS SELECT job_id, token FROM idem_fetch('m', 4, lease => '1 min');
SELECT idem_cancel(2);
SELECT * FROM idem_complete_many(
	ARRAY[4, 1, 5, 2, 1, 99, 3],
	ARRAY[(SELECT token FROM fetched WHERE job_id = 4), (SELECT token FROM fetched WHERE job_id = 1), 1,
		  (SELECT token FROM fetched WHERE job_id = 2), (SELECT token FROM fetched WHERE job_id = 1), 1,
		  (SELECT token + 1 FROM fetched WHERE job_id = 3)]);
SELECT job_id FROM idem.jobs ORDER BY job_id;
SELECT * FROM idem_complete_many('{}', '{}');
-- all jobs of a fetch
BEGIN;
WITH f AS MATERIALIZED (SELECT array_agg(job_id) AS ids, array_agg(token) AS tokens FROM idem_fetch('m', 10))
SELECT c.* FROM f, LATERAL idem_complete_many(f.ids, f.tokens) AS c;
COMMIT;
DROP TABLE fetched;

--
-- fail: the backoff is 10 s, doubles with each attempt up to one day, and is spread by a quarter to both sides
--
CALL anew();
SELECT job_id FROM idem_enqueue('f', '1', 'k');
SELECT job_id, token FROM idem_fetch('f', lease => '1 min', worker => 'w1') \gset
SELECT idem_clock() AS before \gset
SELECT idem_fail(:job_id, :token, 'no route to host');
SELECT state, key, payload, attempt, worker, error, lease_until, ended_at, run_at - :'before' BETWEEN '7.5 s' AND '70 s' AS backoff
  FROM idem_job(1);
-- its token is stale now, and no worker has the new one
SELECT token > :token AS another FROM idem.jobs WHERE job_id = 1;
SELECT job_version(1) AS before \gset
SELECT idem_fail(:job_id, :token);
SELECT idem_complete(:job_id, :token);
SELECT idem_snooze(:job_id, :token, '1 h');
SELECT * FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
SELECT * FROM idem_complete_many(ARRAY[:job_id], ARRAY[:token]);
SELECT job_version(1) = :'before' AS untouched;
-- not fetched before run_at
SELECT job_id FROM idem_fetch('f');
SET idem.clock_offset = '14 s';
SELECT state FROM idem_job(1);
SELECT job_id, attempt FROM idem_fetch('f', lease => '1 min');
RESET idem.clock_offset;
-- a new job of the queue fails this number of times; is the last backoff within the bounds?
CREATE PROCEDURE backoff_of(queue text, attempts int, at_least interval, at_most interval, INOUT in_bounds boolean = NULL) LANGUAGE plpgsql AS $$
DECLARE
	id bigint;
	t bigint;
	a int;
	before timestamptz;
BEGIN
	PERFORM idem_enqueue(queue, max_attempts => 1000);
	COMMIT;
	LOOP
		SELECT f.job_id, f.token, f.attempt INTO id, t, a FROM idem_fetch(queue) AS f;
		EXIT WHEN a = attempts;
		PERFORM idem_fail(id, t, retry_in => '0');
		COMMIT;
	END LOOP;
	before := idem_clock();
	PERFORM idem_fail(id, t);
	in_bounds := (SELECT run_at - before >= at_least AND run_at - idem_clock() <= at_most FROM idem_job(id));
END
$$;
CALL backoff_of('f2', 1, '7.5 s', '12.5 s');
CALL backoff_of('f2', 2, '15 s', '25 s');
CALL backoff_of('f2', 3, '30 s', '50 s');
CALL backoff_of('f2', 5, '120 s', '200 s');
CALL backoff_of('f2', 10, '3840 s', '6400 s');
CALL backoff_of('f2', 14, '61440 s', '102400 s');
CALL backoff_of('f2', 15, '64800 s', '108000 s');
CALL backoff_of('f2', 24, '64800 s', '108000 s');
CALL backoff_of('f2', 80, '64800 s', '108000 s');
-- the settings of the queue
SELECT idem_queue_set('slow', backoff => '1 min', backoff_max => '5 min');
CALL backoff_of('slow', 1, '45 s', '75 s');
CALL backoff_of('slow', 3, '180 s', '300 s');
CALL backoff_of('slow', 4, '225 s', '375 s');
CALL backoff_of('slow', 40, '225 s', '375 s');
SELECT idem_queue_set('steady', backoff => '10 min', backoff_max => '1 min');
CALL backoff_of('steady', 1, '45 s', '75 s');
SELECT idem_queue_set('eager', backoff => '1 us');
CALL backoff_of('eager', 1, '0', '2 us');
SELECT idem_queue_set('patient', backoff => '100 years', backoff_max => '100 years');
CALL backoff_of('patient', 1, '27000 days', '45000 days');
CALL backoff_of('patient', 20, '27000 days', '45000 days');
DROP PROCEDURE backoff_of;
-- many jobs that fail together do not return together; the spread is to both sides, also at the maximum
CALL anew();
SELECT idem_queue_set('spread', backoff => '1000 s', backoff_max => '1000 s');
SELECT count(*) FROM idem_enqueue_many('spread', array_fill('1'::jsonb, ARRAY[300]));
SELECT idem_clock() AS before \gset
SELECT idem_fail(job_id, token), count(*) FROM idem_fetch('spread', 300) GROUP BY 1;
SELECT min(s) BETWEEN 750 AND 800 AS least, max(s) BETWEEN 1200 AND 1310 AS most, count(DISTINCT round(s)) > 100 AS spread,
	   count(*) FILTER (WHERE s < 1000) BETWEEN 80 AND 220 AS about_half
  FROM (SELECT extract(epoch FROM run_at - :'before') AS s FROM idem.jobs) AS b;
-- retry_in: exactly this time
CALL anew();
SELECT job_id FROM idem_enqueue('f', '1', 'k');
SELECT job_id, token FROM idem_fetch('f', lease => '1 min') \gset
SELECT idem_clock() AS before \gset
SELECT idem_fail(:job_id, :token, 'busy', '2 h');
SELECT run_at - :'before' BETWEEN '2 h' AND '2 h 1 min' AS two_hours, error FROM idem_job(1);
SET idem.clock_offset = '3 h';
SELECT job_id, token FROM idem_fetch('f', lease => '1 min') \gset
SELECT idem_fail(:job_id, :token, retry_in => '0');
SELECT state, attempt FROM idem_job(1);
-- late, but no other worker has the job
SELECT job_id, token FROM idem_fetch('f', lease => '1 min') \gset
SET idem.clock_offset = '4 h';
SELECT idem_fail(:job_id, :token, 'late', '0');
SELECT state, attempt, error FROM idem_job(1);
-- rollback
SELECT job_id, token FROM idem_fetch('f', lease => '1 min') \gset
BEGIN;
SELECT idem_fail(:job_id, :token, 'undone', dead => true);
SELECT state, error FROM idem_job(1);
ROLLBACK;
SELECT state, error FROM idem_job(1);
-- dead at once
SELECT idem_fail(:job_id, :token, 'no such address', dead => true);
SELECT state, key, payload, result, attempt, worker, error, run_at, lease_until, ended_at BETWEEN idem_clock() - interval '1 min' AND idem_clock() AS ended
  FROM idem_job(1);
SELECT count(*) FROM idem.jobs;
SELECT idem_fail(:job_id, :token, dead => true);
SELECT idem_complete(:job_id, :token);
SELECT * FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
RESET idem.clock_offset;
-- dead after the last attempt, even if retry_in is given
SELECT job_id FROM idem_enqueue('f', '2', max_attempts => 2);
SELECT job_id, token FROM idem_fetch('f', lease => '1 min') \gset
SELECT idem_fail(:job_id, :token, 'first', '0');
SELECT job_id, token, attempt FROM idem_fetch('f', lease => '1 min') \gset
SELECT idem_fail(:job_id, :token, 'second', '0') AS fail, :attempt AS attempt;
SELECT state, attempt, max_attempts, error FROM idem_job(2);
-- the limit of the queue, and 25 by default
SELECT idem_queue_set('f3', max_attempts => 1);
SELECT job_id FROM idem_enqueue('f3');
SELECT idem_fail(job_id, token) FROM idem_fetch('f3');
SELECT job_id FROM idem_enqueue('f3', max_attempts => 2);
SELECT idem_fail(job_id, token, retry_in => '0') FROM idem_fetch('f3');
SELECT idem_fail(job_id, token, retry_in => '0') FROM idem_fetch('f3');
SELECT job_id FROM idem_enqueue('f4');
CREATE PROCEDURE fail_until_dead(queue text, INOUT times int = 0) LANGUAGE plpgsql AS $$
DECLARE
	outcome text;
BEGIN
	LOOP
		times := times + 1;
		SELECT idem_fail(f.job_id, f.token, retry_in => '0') INTO outcome FROM idem_fetch(queue) AS f;
		COMMIT;
		EXIT WHEN outcome = 'dead' OR outcome IS NULL OR times > 100;
	END LOOP;
END
$$;
CALL fail_until_dead('f4');
SELECT state, attempt, max_attempts FROM idem_job(5);
DROP PROCEDURE fail_until_dead;
-- long errors are truncated to 8 kB, at the end of a character
CALL anew();
SELECT count(*) FROM idem_enqueue_many('clip', array_fill('1'::jsonb, ARRAY[5]));
SELECT job_id, idem_fail(job_id, token, CASE job_id WHEN 1 THEN repeat('x', 8192) WHEN 2 THEN repeat('x', 100000) WHEN 3 THEN repeat(U&'\20ac', 100000)
	WHEN 4 THEN '' ELSE repeat('x', 100000) END, dead => job_id = 5)
  FROM idem_fetch('clip', 5);
SELECT i, octet_length(error), left(error, 1) = right(error, 1) AS whole FROM generate_series(1, 5) AS i, LATERAL idem_job(i) ORDER BY i;

--
-- snooze: later, and the attempt does not count
--
CALL anew();
SELECT job_id FROM idem_enqueue('s', '1', 'k', max_attempts => 1);
SELECT job_id, token FROM idem_fetch('s', lease => '1 min') \gset
SELECT idem_clock() AS before \gset
SELECT idem_snooze(:job_id, :token, '1 h') AS run_at \gset
SELECT state, run_at = :'run_at' AS returned, run_at - :'before' BETWEEN '1 h' AND '1 h 1 min' AS an_hour, attempt, lease_until FROM idem_job(1);
SELECT idem_snooze(:job_id, :token, '1 h');
SELECT idem_complete(:job_id, :token);
SELECT idem_fail(:job_id, :token);
SELECT * FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
SELECT job_id FROM idem_fetch('s');
SET idem.clock_offset = '2 h';
SELECT job_id, token, attempt FROM idem_fetch('s', lease => '1 min') \gset b_
SELECT :b_attempt AS attempt, :b_token > :token AS higher;
-- zero: at once
SELECT idem_snooze(:b_job_id, :b_token, '0') <= idem_clock() AS due;
SELECT job_id, token, attempt FROM idem_fetch('s', lease => '1 min') \gset
SELECT :attempt AS attempt;
-- late; and without a lease
SET idem.clock_offset = '3 h';
SELECT idem_snooze(:job_id, :token, '0') <= idem_clock() AS due;
SELECT idem_snooze(job_id, token, '1 h') > idem_clock() AS later FROM idem_fetch('s');
SELECT state, attempt FROM idem_job(1);
RESET idem.clock_offset;
-- other attempts count
SELECT job_id FROM idem_enqueue('s2', '2');
SELECT idem_fail(job_id, token, 'first', '0') FROM idem_fetch('s2');
SELECT idem_snooze(job_id, token, '0') <= idem_clock() AS due FROM idem_fetch('s2');
SELECT state, attempt, error FROM idem_job(2);
SELECT attempt FROM idem_fetch('s2', lease => '1 min');

--
-- heartbeat: the lease starts again from now
--
CALL anew();
SELECT count(*) FROM idem_enqueue_many('h', array_fill('1'::jsonb, ARRAY[4]));
SELECT job_id, token FROM idem_fetch('h', lease => '1 min') \gset a_
SELECT job_id, token FROM idem_fetch('h', lease => '1 min') \gset b_
SELECT job_id, token FROM idem_fetch('h', lease => '1 min') \gset c_
SELECT idem_complete(:c_job_id, :c_token);
SET idem.clock_offset = '50 s';
SELECT idem_clock() AS before \gset
SELECT ord, job_id, status, lease_until - :'before' BETWEEN '5 min' AND '6 min' AS five_minutes
  FROM idem_heartbeat(ARRAY[:c_job_id, :b_job_id, 4, :a_job_id, :b_job_id], ARRAY[:c_token, :b_token, 1, :a_token, :b_token + 1], '5 min');
SELECT lease_until - :'before' BETWEEN '5 min' AND '6 min' AS stored, attempt FROM idem_job(:a_job_id);
SET idem.clock_offset = '5 min';
SELECT job_id FROM idem_fetch('h', 10, lease => '1 h');
-- it may also become shorter
SELECT status FROM idem_heartbeat(ARRAY[:a_job_id], ARRAY[:a_token], '1 us');
SELECT state FROM idem_job(:a_job_id);
-- late, but no other worker has the job
SELECT status FROM idem_heartbeat(ARRAY[:a_job_id], ARRAY[:a_token], '1 min');
SELECT state FROM idem_job(:a_job_id);
SELECT job_id FROM idem_fetch('h', 10);
SELECT idem_complete(:a_job_id, :a_token);
-- a job that was fetched without a lease gets one
SELECT job_id FROM idem_enqueue('h2');
BEGIN;
SELECT job_id, token FROM idem_fetch('h2') \gset d_
SELECT status FROM idem_heartbeat(ARRAY[:d_job_id], ARRAY[:d_token], '1 min');
SELECT state FROM idem_job(:d_job_id);
COMMIT;
SELECT job_id FROM idem_fetch('h2');
SELECT idem_complete(:d_job_id, :d_token);
-- with its last length: of the fetch, or of the last heartbeat, which may have been long ago; also
-- if the queue declares another one
SELECT idem_clock() AS before \gset
SELECT ord, job_id, status, lease_until - :'before' BETWEEN '5 min' AND '6 min' AS five_minutes FROM idem_heartbeat(ARRAY[:b_job_id], ARRAY[:b_token]);
SELECT status FROM idem_heartbeat(ARRAY[:b_job_id], ARRAY[:b_token], '3 min');
SELECT idem_queue_set('h', lease => '7 min');
SET idem.clock_offset = '2 h';
SELECT idem_clock() AS before \gset
SELECT ord, job_id, status, lease_until - :'before' BETWEEN '3 min' AND '4 min' AS three_minutes FROM idem_heartbeat(ARRAY[:b_job_id], ARRAY[:b_token]);
-- a job that this transaction has fetched without a lease has nothing to renew, also if the queue
-- declares a lease; if a length is passed, it is leased from then on
SELECT job_id FROM idem_enqueue('h') \gset e_
BEGIN;
SELECT job_id, token FROM idem_fetch('h', lease => '0') \gset e_
SELECT ord, status, lease_until FROM idem_heartbeat(ARRAY[:e_job_id], ARRAY[:e_token]);
SELECT status FROM idem_heartbeat(ARRAY[:e_job_id], ARRAY[:e_token], '10 min');
SELECT idem_clock() AS before \gset
SELECT ord, status, lease_until - :'before' BETWEEN '10 min' AND '11 min' AS ten_minutes FROM idem_heartbeat(ARRAY[:e_job_id], ARRAY[:e_token]);
COMMIT;
SELECT state FROM idem_job(:e_job_id);
SELECT idem_complete(:e_job_id, :e_token);
RESET idem.clock_offset;
SELECT * FROM idem_heartbeat('{}', '{}', '1 min');

--
-- cancel
--
CALL anew();
CREATE TABLE tokens (job_id bigint, token bigint);
SELECT count(*) FROM idem_enqueue_many('x', array_fill('1'::jsonb, ARRAY[5]), ARRAY['waiting', 'running', 'expired', 'retry', 'done']);
SELECT idem_cancel(1) AS waiting;
INSERT INTO tokens SELECT job_id, token FROM idem_fetch('x', 1, lease => '1 h', worker => 'w1');
INSERT INTO tokens SELECT job_id, token FROM idem_fetch('x', 1, lease => '1 us');
SELECT idem_cancel(2) AS running, idem_cancel(3) AS expired;
SELECT idem_fail(job_id, token, 'failed') FROM idem_fetch('x', 1, lease => '1 h');
SELECT idem_cancel(4) AS retry;
SELECT idem_complete(job_id, token) FROM idem_fetch('x', 1);
SELECT idem_cancel(5) AS done;
SELECT job_id FROM idem_enqueue('x', NULL, 'later', delay => '1 h', include_scheduled => true);
SELECT idem_cancel(6) AS scheduled;
SELECT idem_cancel(1) AS twice, idem_cancel(99) AS unknown, idem_cancel(0) AS none;
SELECT i, state, key, attempt, worker, error, ended_at IS NOT NULL AS ended FROM generate_series(1, 6) AS i, LATERAL idem_job(i) ORDER BY i;
SELECT count(*) FROM idem.jobs;
-- the worker that fetched a cancelled job gets an error
SELECT idem_complete(job_id, token) FROM tokens WHERE job_id = 2;
SELECT idem_fail(job_id, token) FROM tokens WHERE job_id = 2;
SELECT h.job_id, h.status FROM (SELECT array_agg(job_id ORDER BY job_id) AS ids, array_agg(token ORDER BY job_id) AS tokens FROM tokens) AS t, LATERAL idem_heartbeat(ids, tokens, '1 min') AS h;
-- the keys are free
SELECT outcome, count(*) FROM idem_enqueue_many('x', array_fill('1'::jsonb, ARRAY[3]), ARRAY['waiting', 'running', 'later'], 'until_executed') GROUP BY 1;
-- a job that this transaction has fetched
BEGIN;
SELECT job_id, token FROM idem_fetch('x') \gset
SELECT idem_cancel(:job_id);
SAVEPOINT s;
SELECT idem_complete(:job_id, :token);
ROLLBACK TO s;
SELECT state FROM idem_job(:job_id);
ROLLBACK;
SELECT state FROM idem_job(:job_id);
DROP TABLE tokens;

--
-- retry: a dead or cancelled job waits again, with its number and with all its attempts
--
CALL anew();
SELECT job_id FROM idem_enqueue('r', '{"a": 1}', 'k', priority => 7, max_attempts => 2);
SELECT enqueued_at FROM idem_job(1) \gset
SELECT idem_retry(1) AS waiting;
SELECT job_id, token FROM idem_fetch('r', lease => '1 min', worker => 'w1') \gset
SELECT idem_retry(1) AS running;
SELECT idem_fail(:job_id, :token, 'gave up', dead => true);
SELECT idem_retry(1) AS dead;
SELECT idem_retry(1) AS twice, idem_retry(99) AS unknown, idem_retry(0) AS none;
SELECT queue, state, key, payload, priority, attempt, max_attempts, enqueued_at = :'enqueued_at' AS enqueued_at,
	   run_at BETWEEN :'enqueued_at' AND idem_clock() AS due, lease_until, ended_at
  FROM idem_job(1);
SELECT count(*) FROM idem.job_log;
-- its earlier token is not valid
SELECT idem_complete(:job_id, :token);
-- it has its key again
SELECT job_id, outcome FROM idem_enqueue('r', '2', 'k');
SELECT job_id, token AS b_token, attempt FROM idem_fetch('r', lease => '1 min') \gset
SELECT :job_id AS job_id, :attempt AS attempt, :b_token > :token AS higher;
SELECT idem_complete(:job_id, :token);
SELECT idem_cancel(1);
SELECT idem_retry(1) AS cancelled;
SELECT job_id, attempt FROM idem_fetch('r', lease => '1 min');
-- J7: another job has got the key meanwhile: both run
SELECT idem_cancel(1);
SELECT job_id, outcome FROM idem_enqueue('r', '3', 'k');
SELECT idem_retry(1);
SELECT job_id FROM idem_fetch('r', 10, lease => '1 min') ORDER BY job_id;
-- J7: a job that fails while another one waits for the same key waits again
SELECT idem_cancel(1), idem_cancel(2);
SELECT job_id FROM idem_enqueue('r', '4', 'l');
SELECT job_id, token FROM idem_fetch('r', lease => '1 min') \gset
SELECT job_id, outcome FROM idem_enqueue('r', '5', 'l');
SELECT idem_fail(:job_id, :token, retry_in => '0');
SELECT outcome FROM idem_enqueue('r', '6', 'l');
SELECT job_id FROM idem_fetch('r', 10, lease => '1 min') ORDER BY job_id;
-- a done job cannot be retried, even if it is kept
SELECT idem_queue_set('kept', keep => '1 h');
SELECT job_id FROM idem_enqueue('kept', '1', 'k');
SELECT idem_complete(job_id, token, '"ok"') FROM idem_fetch('kept');
SELECT idem_retry(5) AS done;
SELECT state FROM idem_job(5);
-- rollback
SELECT job_id FROM idem_enqueue('r', '7');
SELECT idem_cancel(6);
BEGIN;
SELECT idem_retry(6);
SELECT state FROM idem_job(6);
ROLLBACK;
SELECT state FROM idem_job(6);
-- dead after the last attempt: it has all attempts again
SELECT job_id FROM idem_enqueue('once', '8', max_attempts => 1);
SELECT job_id FROM idem_fetch('once', lease => '1 us');
SELECT job_id FROM idem_fetch('once');
SELECT idem_retry(7);
SELECT job_id, attempt FROM idem_fetch('once', lease => '1 us');
SELECT job_id FROM idem_fetch('once');
SELECT state, attempt FROM idem_job(7);

--
-- idem_job in every state; it works in a read-only transaction, too
--
CALL anew();
SELECT idem_queue_set('j', keep => '1 h');
SELECT count(*) FROM idem_enqueue_many('j', array_fill('{"a": 1}'::jsonb, ARRAY[7]), ARRAY['1', '2', '3', '4', '5', '6', '7'], priority => 3, max_attempts => 4);
SELECT job_id FROM idem_fetch('j', 1, lease => '1 h', worker => 'w1');
SELECT job_id FROM idem_fetch('j', 1, lease => '1 us', worker => 'w2');
CREATE TABLE tokens AS SELECT job_id, token FROM idem_fetch('j', 5, lease => '1 h', worker => 'w3');
SELECT job_id FROM tokens ORDER BY job_id;
SELECT idem_complete(3, (SELECT token FROM tokens WHERE job_id = 3), '{"b": 2}');
SELECT idem_fail(4, (SELECT token FROM tokens WHERE job_id = 4), 'oh', retry_in => '1 h'), idem_fail(5, (SELECT token FROM tokens WHERE job_id = 5), 'no', dead => true);
SELECT idem_cancel(6);
SELECT job_id FROM idem_enqueue('j', '8', delay => '1 h');
SELECT status FROM idem_heartbeat(ARRAY[2], ARRAY[(SELECT token FROM tokens WHERE job_id = 2)], '1 us');
BEGIN READ ONLY;
SELECT i, queue, state, key, payload, result, priority, attempt, max_attempts, worker, error FROM generate_series(1, 9) AS i, LATERAL idem_job(i) ORDER BY i;
SELECT i, enqueued_at IS NOT NULL AS enqueued_at, run_at IS NOT NULL AS run_at, lease_until IS NOT NULL AS lease_until, ended_at IS NOT NULL AS ended_at
  FROM generate_series(1, 9) AS i, LATERAL idem_job(i) ORDER BY i;
COMMIT;
DROP TABLE tokens;
-- the other functions do not
BEGIN READ ONLY;
SELECT idem_complete(1, 1);
ROLLBACK;
BEGIN READ ONLY;
SELECT * FROM idem_complete_many('{1}', '{1}');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_fail(1, 1);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_snooze(1, 1, '1 min');
ROLLBACK;
BEGIN READ ONLY;
SELECT * FROM idem_heartbeat('{1}', '{1}', '1 min');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_cancel(1);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_retry(1);
ROLLBACK;
-- at every isolation level
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_cancel(7);
SELECT idem_retry(7);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_cancel(7);
SELECT state FROM idem_job(7);
SELECT idem_retry(7);
SELECT state FROM idem_job(7);
COMMIT;
CALL anew();
