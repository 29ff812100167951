--
-- idem_fetch: order, batches, with and without a lease, attempts.
-- The isolation tests have several sessions.
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

-- by priority, then run_at, then number
SELECT job_id FROM idem_enqueue('order', '"plain"');
SELECT job_id FROM idem_enqueue('order', '"low"', priority => 10);
SELECT job_id FROM idem_enqueue('order', '"high"', priority => -5);
SELECT job_id FROM idem_enqueue('order', '"plain"');
SELECT job_id FROM idem_enqueue('order', '"longer ago"', run_at => '2020-01-02 00:00:00+00');
SELECT job_id FROM idem_enqueue('order', '"longest ago"', run_at => '2020-01-01 00:00:00+00');
SELECT job_id FROM idem_enqueue('order', '"longer ago"', run_at => '2020-01-02 00:00:00+00');
SELECT job_id FROM idem_enqueue('order', '"lowest"', priority => 2147483647, run_at => '2020-01-01 00:00:00+00');
SELECT job_id FROM idem_enqueue('order', '"highest, later"', priority => -2147483648, delay => '1 h');
SELECT job_id FROM idem_enqueue('order', '"highest"', priority => -2147483648);
SELECT job_id FROM idem_enqueue('other', '"other queue"', priority => -2147483648, run_at => '2020-01-01 00:00:00+00');
SELECT job_id FROM idem_enqueue('order', '"highest, later"', priority => -2147483648, delay => '1 h');
BEGIN;
SELECT job_id, payload FROM idem_fetch('order', 100);
ROLLBACK;
-- one by one, and in batches, the order is the same
SELECT job_id FROM idem_fetch('order', lease => '1 min');
SELECT job_id FROM idem_fetch('order', 3, lease => '1 min');
SELECT job_id FROM idem_fetch('order', 1, lease => '1 min');
SELECT job_id FROM idem_fetch('order', 10000, lease => '1 min');
SELECT job_id FROM idem_fetch('order', lease => '1 min');
-- a queue that was never used
SELECT job_id FROM idem_fetch('no such queue', 100);
-- a queue name that is a prefix of another one
SELECT job_id FROM idem_fetch('orde', 100);
SELECT job_id FROM idem_fetch('order ', 100);
SELECT job_id FROM idem_fetch('other', 100);

-- the row that idem_fetch returns
CALL anew();
SELECT job_id FROM idem_enqueue('row', '{"a": 1}', 'k');
SELECT job_id FROM idem_enqueue('row');
SELECT idem_clock() AS before \gset
SELECT job_id, attempt, payload, key, enqueued_at BETWEEN :'before'::timestamptz - interval '1 min' AND :'before' AS enqueued_at,
	   token BETWEEN micros(:'before') AND micros(idem_clock()) + 1 AS token_is_time,
	   lsn IS NOT NULL AND lsn <= pg_current_wal_insert_lsn() AS lsn
  FROM idem_fetch('row', 2, lease => '1 min', worker => 'w1');
SELECT state, attempt, worker, lease_until - idem_clock() BETWEEN '50 s' AND '60 s' AS lease FROM idem_job(1);
-- worker names may have up to 255 bytes, and may be left out
SELECT job_id FROM idem_enqueue('row');
SELECT job_id FROM idem_fetch('row', lease => '1 min', worker => repeat('w', 255));
SELECT length(worker) FROM idem_job(3);
-- it returns the queue, and max_attempts: of the job, else of the queue, else 25
CALL anew();
SELECT job_id FROM idem_enqueue('default');
SELECT idem_queue_set('declared', max_attempts => 7);
SELECT job_id FROM idem_enqueue('declared', max_attempts => 1);
SELECT job_id FROM idem_enqueue('declared');
SELECT job_id, attempt, max_attempts, queue FROM idem_fetch('default', lease => '1 min');
SELECT job_id, attempt, max_attempts, queue FROM idem_fetch('declared', 2, lease => '1 min');
SELECT f.* IS NULL AS no_row FROM (VALUES (1)) AS v LEFT JOIN idem_fetch(queue => 'declared') AS f ON true;

-- without a lease, in the transaction of the caller: rollback returns the job at once, unchanged
CALL anew();
SELECT job_id FROM idem_enqueue('tx', '1', 'k');
BEGIN;
SELECT job_id, attempt FROM idem_fetch('tx', worker => 'w1');
ROLLBACK;
SELECT state, attempt, worker, lease_until FROM idem_job(1);
-- a transaction does not get the same job twice
BEGIN;
SELECT job_id, attempt FROM idem_fetch('tx');
SELECT job_id, attempt FROM idem_fetch('tx');
SELECT job_id FROM idem_enqueue('tx', '2');
SELECT job_id, attempt FROM idem_fetch('tx', 10);
SELECT job_id, attempt FROM idem_fetch('tx', 10);
SAVEPOINT s;
SELECT job_id, attempt FROM idem_fetch('tx', 10);
ROLLBACK;
-- nor does a statement
SELECT job_id FROM idem_enqueue('tx', '3');
BEGIN;
SELECT 'first' AS fetch, job_id FROM idem_fetch('tx', 1)
UNION ALL
SELECT 'second', job_id FROM idem_fetch('tx', 10)
UNION ALL
SELECT 'third', job_id FROM idem_fetch('tx', 10);
ROLLBACK;
-- rollback to a savepoint returns the jobs fetched after it
BEGIN;
SELECT job_id FROM idem_fetch('tx');
SAVEPOINT s;
SELECT job_id, attempt FROM idem_fetch('tx');
ROLLBACK TO s;
SELECT job_id, attempt FROM idem_fetch('tx', 10);
RELEASE s;
SELECT job_id, attempt FROM idem_fetch('tx', 10);
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT job_id FROM idem_fetch('tx');
RELEASE s;
SELECT job_id FROM idem_fetch('tx', 10);
SAVEPOINT s;
SELECT job_id FROM idem_fetch('tx', 10);
ROLLBACK;
-- a job that this transaction has enqueued
BEGIN;
SELECT job_id FROM idem_enqueue('tx', '4', priority => -1);
SELECT job_id, payload, attempt FROM idem_fetch('tx');
ROLLBACK;
-- a job that this transaction has returned
BEGIN;
SELECT job_id, token FROM idem_fetch('tx') \gset a_
SELECT idem_fail(:a_job_id, :a_token, retry_in => '0');
SELECT job_id, token, attempt FROM idem_fetch('tx', 10) WHERE job_id = :a_job_id \gset b_
SELECT :b_attempt AS attempt, :b_token > :a_token AS higher;
ROLLBACK;
-- commit ends it exactly once
BEGIN;
SELECT job_id, token FROM idem_fetch('tx') \gset
SELECT idem_complete(:job_id, :token);
COMMIT;
SELECT job_id FROM idem.jobs;
-- committed, but not completed: the attempt counts, and the next fetch gets the job at once
SELECT job_id, token, attempt FROM idem_fetch('tx', worker => 'w1') \gset a_
SELECT state, attempt, worker, lease_until <= idem_clock() AS over FROM idem_job(3);
SELECT job_id, token, attempt FROM idem_fetch('tx') \gset b_
SELECT :b_job_id AS job_id, :b_attempt AS attempt, :b_token > :a_token AS higher;
SELECT idem_complete(:a_job_id, :a_token);
-- until then its token is valid
SELECT idem_complete(:b_job_id, :b_token);
SELECT count(*) FROM idem.jobs;

-- with a lease: no other fetch gets the job until the lease has expired
CALL anew();
SELECT job_id FROM idem_enqueue('lease', '1', 'k');
SELECT job_id, token, enqueued_at FROM idem_fetch('lease', lease => '1 min', worker => 'w1') \gset a_
SELECT state, attempt FROM idem_job(1);
SELECT job_id FROM idem_fetch('lease');
SET idem.clock_offset = '40 s';
SELECT job_id FROM idem_fetch('lease', lease => '1 min', worker => 'w1');
-- then the next fetch gets it, with a higher token and one more attempt
SET idem.clock_offset = '61 s';
SELECT state, attempt, worker FROM idem_job(1);
SELECT job_id, token, attempt, payload, key, enqueued_at FROM idem_fetch('lease', lease => '1 min', worker => 'w2') \gset b_
SELECT :b_job_id AS job_id, :b_token > :a_token AS higher, :b_attempt AS attempt, :'b_payload' AS payload, :'b_key' AS key,
	   :'b_enqueued_at' = :'a_enqueued_at' AS enqueued_at;
SELECT state, attempt, worker FROM idem_job(1);
SELECT job_id FROM idem_fetch('lease');
-- it comes before newer jobs
SELECT job_id FROM idem_enqueue('lease', '2');
SET idem.clock_offset = '3 min';
SELECT job_id, attempt FROM idem_fetch('lease', 10, lease => '1 min');
SELECT worker FROM idem_job(1);
RESET idem.clock_offset;
-- the longest and the shortest lease
CALL anew();
SELECT job_id FROM idem_enqueue('long');
SELECT job_id FROM idem_fetch('long', lease => '30 days');
SET idem.clock_offset = '719 h';
SELECT state FROM idem_job(1);
SET idem.clock_offset = '721 h';
SELECT state FROM idem_job(1);
RESET idem.clock_offset;
SELECT job_id FROM idem_enqueue('short');
SELECT job_id FROM idem_fetch('short', lease => '1 us');
SELECT job_id, attempt FROM idem_fetch('short', lease => '1 us');
-- the lease that the queue declares
SELECT idem_queue_set('declared', lease => '5 min');
SELECT job_id FROM idem_enqueue('declared');
SELECT job_id FROM idem_fetch('declared');
SELECT state, lease_until - idem_clock() BETWEEN '4 min' AND '5 min' AS lease FROM idem_job(3);
-- an argument overrides it
SELECT job_id FROM idem_enqueue('declared');
SELECT job_id FROM idem_fetch('declared', lease => '1 h');
SELECT state, lease_until - idem_clock() BETWEEN '59 min' AND '60 min' AS lease FROM idem_job(4);
-- zero: in the transaction of the caller, despite the queue
SELECT job_id FROM idem_enqueue('declared');
BEGIN;
SELECT job_id FROM idem_fetch('declared', lease => '0');
ROLLBACK;
SELECT job_id FROM idem_fetch('declared', lease => '0');
SELECT state FROM idem_job(5);
-- a lease inside a longer transaction works, with a notice; rollback removes it
SELECT job_id FROM idem_enqueue('lease');
\set VERBOSITY default
BEGIN;
SELECT job_id FROM idem_fetch('lease', lease => '1 min');
SELECT state FROM idem_job(6);
-- no notice if there is no job
SELECT job_id FROM idem_fetch('lease', lease => '1 min');
ROLLBACK;
\set VERBOSITY sqlstate
SELECT state, attempt FROM idem_job(6);

-- isolation: without a lease the work would not see what the transaction of an absorbed enqueue committed
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT job_id FROM idem_fetch('lease');
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT job_id FROM idem_fetch('lease');
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT job_id FROM idem_fetch('declared', lease => '0');
ROLLBACK;
-- also where there is nothing to fetch
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT job_id FROM idem_fetch('no such queue');
ROLLBACK;
-- with a lease the work starts in a later transaction
SET client_min_messages = warning;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT job_id, attempt FROM idem_fetch('lease', lease => '1 min');
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT job_id, attempt FROM idem_fetch('lease', lease => '1 min');
SELECT job_id, attempt FROM idem_fetch('declared', 10);
ROLLBACK;
RESET client_min_messages;
BEGIN READ ONLY;
SELECT job_id FROM idem_fetch('lease', lease => '1 min');
ROLLBACK;

-- attempts: when the lease of the last attempt has expired, the fetch that finds the job makes it dead
CALL anew();
SELECT job_id FROM idem_enqueue('tries', '"doomed"', 'k', max_attempts => 2);
SELECT job_id, attempt FROM idem_fetch('tries', lease => '1 min');
SET idem.clock_offset = '2 min';
SELECT job_id, token, attempt FROM idem_fetch('tries', lease => '1 min', worker => 'w2') \gset
SELECT :attempt AS attempt;
SET idem.clock_offset = '4 min';
SELECT job_id FROM idem_enqueue('tries', '"next"');
-- only a fetch does (and cleanup)
SELECT state FROM idem_job(1);
BEGIN;
-- the dead job does not count in the batch
SELECT job_id, payload FROM idem_fetch('tries', 1);
SELECT state FROM idem_job(1);
ROLLBACK;
SELECT state FROM idem_job(1);
SELECT job_id, payload FROM idem_fetch('tries', 1, lease => '1 h');
SELECT state, key, payload, attempt, max_attempts, worker, error IS NOT NULL AS says_why, lease_until, ended_at BETWEEN idem_clock() - interval '1 min' AND idem_clock() AS ended
  FROM idem_job(1);
SELECT idem_complete(:job_id, :token);
SELECT outcome FROM idem_enqueue('tries', NULL, 'k', 'until_executed');
RESET idem.clock_offset;
-- the same without a lease
SELECT job_id FROM idem_enqueue('once', max_attempts => 1);
SELECT job_id FROM idem_fetch('once');
SELECT job_id FROM idem_fetch('once');
SELECT state, attempt FROM idem_job(4);
-- a rollback does not count as an attempt
SELECT job_id FROM idem_enqueue('once', max_attempts => 1);
BEGIN;
SELECT job_id, attempt FROM idem_fetch('once');
ROLLBACK;
SELECT job_id, attempt FROM idem_fetch('once');
-- the limit: that of the job, else that of the queue, else 25
SELECT idem_queue_set('limit', max_attempts => 3);
SELECT job_id FROM idem_enqueue('limit', '"queue"');
SELECT job_id FROM idem_enqueue('limit', '"job"', max_attempts => 2);
SELECT job_id FROM idem_enqueue('no limit', '"default"');
CREATE PROCEDURE fetches(queue text, times int) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. times LOOP
		PERFORM idem_fetch(queue, 10);
		COMMIT;
	END LOOP;
END
$$;
CALL fetches('limit', 2);
SELECT i, state, attempt, max_attempts FROM generate_series(6, 7) AS i, LATERAL idem_job(i) ORDER BY i;
CALL fetches('limit', 1);
SELECT i, state, attempt, max_attempts FROM generate_series(6, 7) AS i, LATERAL idem_job(i) ORDER BY i;
CALL fetches('limit', 1);
SELECT i, state, attempt, max_attempts FROM generate_series(6, 7) AS i, LATERAL idem_job(i) ORDER BY i;
CALL fetches('no limit', 25);
SELECT state, attempt, max_attempts FROM idem_job(8);
CALL fetches('no limit', 1);
SELECT state, attempt, max_attempts FROM idem_job(8);
DROP PROCEDURE fetches;

-- behind many jobs that have ended: no job is lost, and the priority counts first
CALL anew();
SELECT count(*) FROM idem_enqueue_many('head', array_fill('1'::jsonb, ARRAY[300]));
SELECT count(*) FILTER (WHERE c.status = 'completed') AS completed
  FROM (SELECT array_agg(job_id) AS ids, array_agg(token) AS tokens FROM idem_fetch('head', 200)) AS f, LATERAL idem_complete_many(ids, tokens) AS c;
SELECT job_id FROM idem_fetch('head', lease => '1 h');
SELECT job_id FROM idem_enqueue('head', priority => -1);
SELECT job_id FROM idem_enqueue('head', run_at => '2020-01-01 00:00:00+00');
SELECT job_id FROM idem_enqueue('head', priority => 1);
SELECT job_id FROM idem_fetch('head', lease => '1 h');
SELECT count(*), min(job_id), max(job_id), count(*) FILTER (WHERE job_id IN (302, 303)) AS new FROM idem_fetch('head', 1000, lease => '1 h');
SELECT job_id FROM idem_fetch('head', lease => '1 h');

-- no job of a paused queue is fetched, with a lease or without
CALL anew();
SELECT job_id FROM idem_enqueue('paused');
SELECT idem_pause('paused');
SELECT job_id FROM idem_fetch('paused', 10);
SELECT job_id FROM idem_fetch('paused', 10, lease => '1 min');
SELECT job_id FROM idem_enqueue('paused');
SELECT idem_resume('paused');
SELECT job_id, attempt FROM idem_fetch('paused', 10, lease => '1 min');
CALL anew();
