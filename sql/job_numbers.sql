--
-- J13: duplicate job numbers, because the sequence was set back or logical replication
-- did not copy it: no single row blocks a queue.  The row of the job that ends now
-- counts; the older row with the same number is replaced.
--
\a\pset footer off
\set VERBOSITY terse
CALL anew();
SELECT idem_queue_set('n', keep => '1 day');

-- done: the later job is in the history
SELECT job_id FROM idem_enqueue('n', '"old"');
SELECT count(idem_complete(job_id, token, '"old result"')::text) FROM idem_fetch('n');
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT job_id FROM idem_enqueue('n', '"new"');
SELECT state, payload FROM idem_job(1);
SELECT job_id, state FROM idem.job_status ORDER BY state;
SELECT count(idem_complete(job_id, token, '"new result"')::text) FROM idem_fetch('n');
SELECT state, payload, result FROM idem_job(1);
SELECT job_id, state FROM idem.job_status;

-- dead, cancelled, and done by idem_complete_many: one warning for the whole call
CALL anew();
SELECT idem_queue_set('n', keep => '1 day');
SELECT count(*) FROM idem_enqueue_many('n', '{1,2,3,4,5}');
SELECT c.status, count(*) FROM (SELECT array_agg(job_id) AS ids, array_agg(token) AS tokens FROM idem_fetch('n', 5)) AS f, LATERAL idem_complete_many(ids, tokens) AS c GROUP BY 1;
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT count(*) FROM idem_enqueue_many('n', '{1,2,3,4,5}');
SELECT idem_fail(job_id, token, 'no', dead => true) FROM idem_fetch('n');
SELECT idem_cancel(2);
SELECT c.status, count(*) FROM (SELECT array_agg(job_id) AS ids, array_agg(token) AS tokens FROM idem_fetch('n', 5)) AS f, LATERAL idem_complete_many(ids, tokens) AS c GROUP BY 1;
SELECT job_id, state FROM idem.job_log ORDER BY job_id;
SELECT count(*) FROM idem.jobs;

-- the lease of the last attempt has expired: the fetch that finds the job makes it dead, and goes on to the next jobs
CALL anew();
SELECT count(*) FROM idem_enqueue_many('n', '{1,2}');
SELECT idem_cancel(1), idem_cancel(2);
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT count(*) FROM idem_enqueue_many('n', '{3,4,5}', max_attempts => 1);
SELECT job_id, payload FROM idem_fetch('n', lease => '1 us');
SELECT job_id, payload FROM idem_fetch('n', lease => '1 us');
SELECT job_id, state, payload FROM idem.job_log ORDER BY job_id;
-- and so does cleanup
SELECT idem_cleanup();
SELECT job_id, state, payload FROM idem.job_log ORDER BY job_id;
SELECT job_id, payload FROM idem_fetch('n');

-- the transaction itself has locked the older row: it neither waits for the row nor skips it
CALL anew();
SELECT count(*) FROM idem_enqueue_many('n', '{1,2}');
SELECT idem_cancel(1), idem_cancel(2);
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT count(*) FROM idem_enqueue_many('n', '{3,4}', max_attempts => 1);
SELECT count(*) FROM idem_fetch('n', 2, lease => '1 us');
SET statement_timeout = '1 min';
BEGIN;
SELECT job_id FROM idem.job_log ORDER BY job_id FOR KEY SHARE;
SELECT idem_cleanup(1);
SELECT job_id FROM idem_fetch('n');
SELECT job_id, state, payload FROM idem.job_log ORDER BY job_id;
COMMIT;
RESET statement_timeout;

-- several times in one transaction, and undone with it
CALL anew();
SELECT job_id FROM idem_enqueue('n', '"first"');
SELECT idem_cancel(1);
BEGIN;
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT job_id FROM idem_enqueue('n', '"second"');
SELECT idem_cancel(1);
SAVEPOINT s;
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT job_id FROM idem_enqueue('n', '"third"');
SELECT idem_cancel(1);
SELECT payload FROM idem.job_log;
ROLLBACK TO s;
SELECT payload FROM idem.job_log;
ROLLBACK;
SELECT payload FROM idem.job_log;
SELECT idem_retry(1);
SELECT payload FROM idem_job(1);

-- keys that outlive their job: only a row with the same number and the same key conflicts
CALL anew();
SELECT job_id FROM idem_enqueue('n', '1', 'k', 'until_expired', key_ttl => '1 min');
SELECT count(idem_complete(job_id, token, '"old"')::text) FROM idem_fetch('n');
SET idem.clock_offset = '2 min';
SELECT job_id FROM idem_enqueue('n', '2', 'k', 'until_expired', key_ttl => '1 min');
SELECT count(idem_complete(job_id, token, '"old"')::text) FROM idem_fetch('n');
SELECT setval('idem.jobs_job_id_seq', 2, false);
SET idem.clock_offset = '4 min';
SELECT job_id, outcome FROM idem_enqueue('n', '1', 'k', 'until_expired', key_ttl => '1 h');
SELECT count(idem_complete(job_id, token, '"new"')::text) FROM idem_fetch('n');
SELECT job_id, outcome, result FROM idem_enqueue('n', '1', 'k', 'until_expired', key_ttl => '1 h');
SELECT job_id, result FROM idem.job_keys ORDER BY job_id;
RESET idem.clock_offset;

-- idem_retry of a job whose number a live job has: refused, and nothing is lost
\set VERBOSITY default
CALL anew();
SELECT job_id FROM idem_enqueue('n', '"old"');
SELECT idem_cancel(1);
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT job_id FROM idem_enqueue('n', '"new"');
SELECT idem_retry(1);
SELECT payload FROM idem.job_log;
SELECT payload FROM idem.jobs;
-- the messages in full
SELECT idem_cancel(1);

-- an enqueue that gets the number of a live job is refused; the next enqueue gets the next number
SELECT idem_retry(1);
SELECT setval('idem.jobs_job_id_seq', 1, false);
SELECT job_id FROM idem_enqueue('n');
SELECT job_id FROM idem_enqueue('n');
CALL anew();
