--
-- Bulk: idem_cancel_many, idem_retry_many, idem_fail_many, idem_snooze_many,
-- idem_reschedule_many: rule J20 of the contract
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

-- one job of queue q in each state: 1 waiting, 2 scheduled, 3 running, 4 expired, 5 blocked
CREATE PROCEDURE one_of_each() LANGUAGE plpgsql AS $$
BEGIN
	CALL anew();
	PERFORM idem_enqueue('q', '1');
	PERFORM idem_enqueue('q', '2', delay => '1 h');
	PERFORM idem_enqueue('q', '3', 'k', 'until_executed', priority => -2);
	PERFORM idem_enqueue('q', '4', priority => -1);
	PERFORM idem_fetch('q', lease => '1 h', worker => 'w3');
	PERFORM idem_enqueue('q', '5', 'k', 'until_executed', if_running => 'rerun');
	PERFORM set_config('idem.clock_offset', '-2 h', true);
	UPDATE idem.jobs SET run_at = run_at - interval '3 h' WHERE job_id = 4;
	PERFORM idem_fetch('q', lease => '1 h', worker => 'w4');
	PERFORM set_config('idem.clock_offset', '0', true);
	-- jobs of another queue are never touched
	PERFORM idem_enqueue('other', '6');
END $$;
CREATE VIEW jobs AS SELECT job_id, queue, state, attempt FROM idem.job_status;

--
-- idem_cancel_many
--
CALL one_of_each();
SELECT * FROM jobs ORDER BY job_id;
SELECT idem_cancel_many(queue => 'q', state => 'waiting');
SELECT * FROM jobs ORDER BY job_id;
SELECT idem_cancel_many(queue => 'q', state => 'waiting');
SELECT idem_cancel_many(queue => 'q', state => 'scheduled');
SELECT idem_cancel_many(queue => 'q', state => 'blocked');
SELECT idem_cancel_many(queue => 'q', state => 'running');
SELECT idem_cancel_many(queue => 'q', state => 'expired');
SELECT * FROM jobs ORDER BY job_id;
-- all states
CALL one_of_each();
SELECT idem_cancel_many(queue => 'q');
SELECT idem_cancel_many(queue => 'q');
SELECT * FROM jobs ORDER BY job_id;
-- by numbers, whatever their queues and states; numbers that do not exist, or that occur twice, do not count
CALL one_of_each();
SELECT idem_cancel_many('{6,3,99,3,1}');
SELECT idem_cancel_many('{6,3,99,3,1}');
SELECT idem_cancel_many('{}');
SELECT * FROM jobs ORDER BY job_id;
-- batches: in the order of fetch
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3,4,5}');
SELECT idem_cancel_many(queue => 'q', max_jobs => 2);
SELECT job_id FROM idem.jobs ORDER BY job_id;
SELECT idem_cancel_many(queue => 'q', max_jobs => 2);
SELECT idem_cancel_many(queue => 'q', max_jobs => 2);
SELECT idem_cancel_many(queue => 'q', max_jobs => 2);
-- max_jobs does not limit numbers
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3}');
SELECT idem_cancel_many((SELECT array_agg(job_id) FROM idem.jobs), max_jobs => 1);
-- the worker of a cancelled job comes too late; the key is free again
CALL anew();
SELECT job_id FROM idem_enqueue('q', '1', 'k', 'until_executed');
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT idem_cancel_many(queue => 'q', state => 'running');
SELECT idem_complete(:job_id, :token);
SELECT outcome FROM idem_enqueue('q', '1', 'k', 'until_executed');
-- an earlier statement of the transaction has written the jobs
BEGIN;
SELECT job_id FROM idem_enqueue('q', '2');
SELECT job_id FROM idem_fetch('q', 2);
SELECT idem_cancel_many(queue => 'q');
ROLLBACK;
SELECT idem_cancel_many(queue => 'q');
-- a paused queue
SELECT job_id FROM idem_enqueue('q');
SELECT idem_pause('q');
SELECT idem_cancel_many(queue => 'q');

--
-- idem_retry_many
--
CALL anew();
SELECT idem_queue_set('q', keep => '1 d');
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3,4,5,6,7}', '{a,b,c,d,e,f,g}');
SELECT idem_fail(job_id, token, 'broken', dead => true) FROM idem_fetch('q', 3, '1 h');
SELECT idem_complete(job_id, token) FROM idem_fetch('q', 1, '1 h');
SELECT idem_cancel_many('{5,6}');
SELECT job_id, state, retryable FROM idem.job_log ORDER BY job_id;
-- dead ones, the first that died first
SELECT idem_retry_many(queue => 'q', max_jobs => 2);
SELECT * FROM jobs ORDER BY job_id;
SELECT idem_retry_many(queue => 'q', max_jobs => 2);
SELECT idem_retry_many(queue => 'q', max_jobs => 2);
SELECT idem_retry_many(queue => 'q', state => 'cancelled');
SELECT idem_retry_many(queue => 'q', state => 'dead');
SELECT job_id, state, error, key FROM idem_job(1);
SELECT * FROM jobs ORDER BY job_id;
-- it has its key again
SELECT job_id, outcome FROM idem_enqueue('q', '8', 'a');
-- by numbers: dead and cancelled ones; done ones, live ones and others do not count
SELECT idem_cancel_many('{5}');
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('q', 1, '1 h');
SELECT idem_retry_many('{7,5,4,1,99,1}');
SELECT idem_retry_many('{}');
SELECT * FROM jobs ORDER BY job_id;
-- only the state that was asked for
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', '{1,2}');
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('q', 1, '1 h');
SELECT idem_cancel(2);
SELECT idem_retry_many(queue => 'q', state => 'cancelled');
SELECT * FROM jobs ORDER BY job_id;
-- other queues
SELECT idem_retry_many(queue => 'other');
-- J13: a live job has the number of one in the history: it stays there, and the others are retried
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3}', '{k,k2,k3}');
SELECT idem_cancel_many(queue => 'q');
ALTER SEQUENCE idem.jobs_job_id_seq RESTART WITH 2;
SELECT job_id FROM idem_enqueue('q', '"new"', 'k2');
SELECT idem_retry_many(queue => 'q', state => 'cancelled');
SELECT idem_retry_many(queue => 'q', state => 'cancelled');
SELECT idem_retry_many('{2}');
SELECT job_id, payload FROM idem.jobs ORDER BY job_id;
SELECT job_id, payload FROM idem.job_log ORDER BY job_id;
SELECT idem_cancel_many('{2}');
SELECT job_id, payload FROM idem.job_log ORDER BY job_id;

--
-- idem_fail_many: the worker's form
--
CALL anew();
SELECT idem_queue_set('q', max_attempts => 2, backoff => '1 h', backoff_max => '1 h');
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3}');
CREATE TABLE tok AS SELECT job_id, token FROM idem_fetch('q', 3, '1 h', 'w');
SELECT job_id FROM idem_enqueue('q', '4');
-- an old token, a job that waits, one that does not exist
SELECT idem_fail_many('{1,4,99}', '{1,1,1}', 'no');
SELECT idem_fail_many(array_agg(job_id), array_agg(token), 'no', '0') FROM tok;
SELECT job_id, state, attempt, error, worker FROM generate_series(1, 4) AS i, idem_job(i);
-- the tokens are stale now
SELECT idem_fail_many(array_agg(job_id), array_agg(token), 'no', '0') FROM tok;
SELECT idem_complete(job_id, token) FROM tok WHERE job_id = 1;
-- the last attempt: dead; and dead on request
TRUNCATE tok;
INSERT INTO tok SELECT job_id, token FROM idem_fetch('q', 4, '1 h', 'w');
SELECT idem_fail_many(array_agg(job_id), array_agg(token), 'no') FROM tok WHERE job_id < 3;
SELECT idem_fail_many(array_agg(job_id), array_agg(token), dead => true) FROM tok WHERE job_id = 4;
SELECT idem_fail_many('{}', '{}');
SELECT job_id, state, attempt, error FROM generate_series(1, 4) AS i, idem_job(i);
SELECT jsonb_path_query_array(errors, '$[*].attempt') FROM idem_job(1);
-- a token of an expired lease is good until another worker has fetched the job
SET idem.clock_offset = '2 h';
SELECT idem_fail_many(array_agg(job_id), array_agg(token), 'late', '0') FROM tok WHERE job_id = 3;
RESET idem.clock_offset;

--
-- idem_fail_many: the operator's form
--
CALL one_of_each();
TRUNCATE tok;
INSERT INTO tok SELECT job_id, token FROM idem.jobs WHERE job_id = 3;
SELECT idem_fail_many(queue => 'q', state => 'expired', error => 'machine is gone', retry_in => '0');
SELECT job_id, state, attempt, error, worker FROM generate_series(1, 6) AS i, idem_job(i);
SELECT idem_fail_many(queue => 'q', worker => 'w4');
SELECT idem_fail_many(queue => 'q', worker => 'w3', error => 'gone', retry_in => '0');
SELECT idem_fail_many(queue => 'q');
SELECT job_id, state, attempt, error, worker FROM generate_series(1, 6) AS i, idem_job(i);
-- nothing runs twice unnoticed
SELECT idem_complete(job_id, token) FROM tok;
SELECT status FROM tok, idem_heartbeat(ARRAY[tok.job_id], ARRAY[tok.token], '1 h');
-- both states; without retry_in as the queue declares
CALL one_of_each();
SELECT idem_fail_many(queue => 'q', dead => true, max_jobs => 1);
SELECT idem_fail_many(queue => 'q');
SELECT idem_fail_many(queue => 'q');
SELECT * FROM jobs ORDER BY job_id;
-- the lease of the last attempt has expired
CALL anew();
SELECT idem_queue_set('q', max_attempts => 1);
SELECT job_id FROM idem_enqueue('q');
SELECT job_id FROM idem_fetch('q', lease => '1 min');
SET idem.clock_offset = '1 h';
SELECT idem_fail_many(queue => 'q', error => 'spent');
SELECT state, error FROM idem_job(1);
RESET idem.clock_offset;

--
-- idem_snooze_many
--
CALL one_of_each();
TRUNCATE tok;
INSERT INTO tok SELECT job_id, token FROM idem.jobs WHERE job_id IN (3, 4);
SELECT idem_snooze_many(array_agg(job_id), array_agg(token), '1 h') FROM tok WHERE job_id = 3;
SELECT idem_snooze_many(array_agg(job_id), array_agg(token), '1 h') FROM tok WHERE job_id = 3;
SELECT idem_snooze_many(queue => 'q', delay => '0', worker => 'w3');
SELECT idem_snooze_many(queue => 'q', delay => '0', state => 'running');
SELECT idem_snooze_many(queue => 'q', delay => '0', worker => 'w4');
SELECT idem_snooze_many(queue => 'q', delay => '0');
SELECT * FROM jobs ORDER BY job_id;
SELECT idem_complete(job_id, token) FROM tok WHERE job_id = 4;
SELECT job_id, attempt FROM idem_fetch('q', 5, '1 h');

--
-- idem_reschedule_many
--
CALL one_of_each();
-- a job that a worker has does not move
SELECT idem_reschedule_many('{1,2,3,4,5,99}', priority => 7);
SELECT idem_reschedule_many('{1,2,3,4,5,99}', priority => 7);
SELECT job_id, priority, run_at <= now() AS due FROM idem.jobs ORDER BY job_id;
-- run now what is for later: only what is not due
SELECT idem_reschedule_many(queue => 'q', run_at => now());
SELECT idem_reschedule_many(queue => 'q', run_at => now());
SELECT idem_reschedule_many(queue => 'q', run_at => now() - interval '1 d');
SELECT job_id, priority, run_at <= now() AS due FROM idem.jobs ORDER BY job_id;
-- later
SELECT idem_reschedule_many(queue => 'q', run_at => '2100-01-01', state => 'waiting');
SELECT idem_reschedule_many(queue => 'q', run_at => '2100-01-01', state => 'waiting');
SELECT idem_reschedule_many(queue => 'q', run_at => '2100-01-01', state => 'blocked');
SELECT idem_reschedule_many(queue => 'q', run_at => '2100-01-01', priority => 3, state => 'scheduled');
SELECT idem_reschedule_many(queue => 'q', run_at => '2100-01-01', priority => 3);
SELECT job_id, priority, run_at > now() AS later FROM idem.jobs ORDER BY job_id;
SELECT idem_reschedule_many('{}', priority => 1);
SELECT idem_reschedule_many(queue => 'other', priority => 1);
-- J14: fetches have seen the jobs as ones for later; and the order is the new one
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', (SELECT array_agg(to_jsonb(i)) FROM generate_series(1, 100) AS i), delay => '1 h');
SELECT count(*) FROM idem_fetch('q', 100, '1 h');
SELECT count(*) FROM idem_fetch('q', 100, '1 h');
SELECT idem_reschedule_many('{70,30}', run_at => now());
SELECT idem_reschedule_many('{30}', priority => 1);
SELECT job_id FROM idem_fetch('q', 100, '1 h');
-- the job is in a range that fetches skip, together with leased jobs
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', (SELECT array_agg(to_jsonb(i)) FROM generate_series(1, 100) AS i));
SELECT job_id FROM idem_enqueue('q', '"later"', delay => '30 min');
SELECT count(*) FROM idem_fetch('q', 100, '1 h');
SELECT count(*) FROM idem_fetch('q', 100, '1 h');
SELECT count(*) FROM idem_fetch('q', 100, '1 h');
SELECT idem_reschedule_many('{101}', run_at => now());
SELECT job_id FROM idem_fetch('q', 100, '1 h');
-- a job that waits for its retry
CALL anew();
SELECT job_id FROM idem_enqueue('q', '1', 'k');
SELECT idem_fail(job_id, token, 'no', '1 h') FROM idem_fetch('q', lease => '1 h');
SELECT idem_reschedule_many(queue => 'q', run_at => now(), state => 'scheduled');
SELECT outcome FROM idem_enqueue('q', '1', 'k');
SELECT job_id, attempt FROM idem_fetch('q', lease => '1 h');
-- a job with a key holds it, wherever its row goes; one that ignored its key still does (J8)
CALL anew();
SELECT job_id FROM idem_enqueue('q', '1', 'k');
SELECT job_id FROM idem_enqueue('q', '2', 's', delay => '1 h');
SELECT idem_reschedule_many(queue => 'q', run_at => '2100-01-01');
SELECT job_id, outcome FROM idem_enqueue('q', '1', 'k', run_at => '2100-01-01', include_scheduled => true);
SELECT job_id, outcome FROM idem_enqueue('q', '1', 's', run_at => '2100-01-01', include_scheduled => true);
SELECT job_id FROM idem_job_by_key('q', 's');
-- nothing is written for a job that has the values
SELECT key, job_version(job_id) AS version FROM idem.jobs WHERE job_id = 1 \gset before_
SELECT idem_reschedule_many('{1}', run_at => '2100-01-01', priority => 0);
SELECT job_version(1) = :'before_version' AS same;

--
-- Statistics (S1): one job counts once
--
CALL anew();
SELECT idem_stats_reset();
SELECT count(*) FROM idem_enqueue_many('counted', '{1,2,3,4,5,6}');
TRUNCATE tok;
INSERT INTO tok SELECT job_id, token FROM idem_fetch('counted', 5, '1 h');
SELECT idem_cancel_many('{6}'), idem_cancel_many('{6}'), idem_retry_many('{6}');
SELECT idem_fail_many(array_agg(job_id), array_agg(token)) FROM tok WHERE job_id = 1;
SELECT idem_fail_many(array_agg(job_id), array_agg(token), dead => true) FROM tok WHERE job_id = 2;
SELECT idem_snooze_many(array_agg(job_id), array_agg(token), '1 h') FROM tok WHERE job_id IN (3, 4);
SELECT idem_snooze_many(array_agg(job_id), array_agg(token), '1 h') FROM tok WHERE job_id IN (3, 4);
SELECT idem_reschedule_many(queue => 'counted', priority => 1), idem_reschedule_many(queue => 'counted', priority => 1);
SELECT cancelled, retried, failed, dead, snoozed, rescheduled FROM idem.queue_stats WHERE queue = 'counted';
SELECT stale_tokens FROM idem.stats WHERE datname = current_database();

--
-- The whole call, or nothing
--
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', '{1,2}');
CREATE ROLE idem_bulk_app;
CREATE ROLE idem_bulk_team;
SELECT idem_grant('idem_bulk_app', 'app');
SELECT idem_queue_set('team', owner => 'idem_bulk_team');
SELECT count(*) FROM idem_enqueue_many('team', '{3,4}');
SELECT idem_cancel(4);
SET ROLE idem_bulk_app;
SELECT idem_cancel_many('{1,3}');
SELECT idem_cancel_many(queue => 'team');
SELECT idem_retry_many('{4}');
SELECT idem_retry_many(queue => 'team');
SELECT idem_fail_many('{3}', '{1}');
SELECT idem_fail_many(queue => 'team');
SELECT idem_snooze_many('{3}', '{1}', '1 h');
SELECT idem_snooze_many(queue => 'team', delay => '1 h');
SELECT idem_reschedule_many('{1,3}', priority => 1);
SELECT idem_reschedule_many(queue => 'team', priority => 1);
SELECT idem_cancel_many('{1}');
RESET ROLE;
GRANT idem_bulk_team TO idem_bulk_app;
SET ROLE idem_bulk_app;
SELECT idem_reschedule_many('{2,3}', priority => 1);
SELECT idem_cancel_many(queue => 'team');
SELECT idem_retry_many(queue => 'team', state => 'cancelled');
RESET ROLE;
SELECT idem_revoke('idem_bulk_app', 'app');
DROP ROLE idem_bulk_app, idem_bulk_team;
-- read-only
BEGIN READ ONLY;
SAVEPOINT a;
SELECT idem_cancel_many('{1}');
ROLLBACK TO a;
SELECT idem_retry_many('{1}');
ROLLBACK TO a;
SELECT idem_fail_many('{1}', '{1}');
ROLLBACK TO a;
SELECT idem_snooze_many('{1}', '{1}', '1 h');
ROLLBACK TO a;
SELECT idem_reschedule_many('{1}', priority => 1);
ROLLBACK;

-- shards (M2): by numbers an error, by queue they are not ours
CALL anew();
SELECT idem_shard_set('{[0,1024)}');
SELECT outcome FROM idem_enqueue('q', '"dead"', 'k');
SELECT idem_cancel_many(queue => 'q');
SELECT job_id AS gone FROM idem_enqueue('q', '"left"', 'k') \gset
SELECT idem_slot('k') AS slot \gset
SELECT idem_shard_set(format('{[0,%s),[%s,1024)}', :slot, :slot + 1)::int4multirange, force => true);
SELECT outcome FROM idem_enqueue('q', '"ours"');
SELECT idem_cancel_many(ARRAY[:gone]);
SELECT idem_retry_many(ARRAY[:gone]);
SELECT idem_fail_many(ARRAY[:gone], '{1}');
SELECT idem_snooze_many(ARRAY[:gone], '{1}', '1 h');
SELECT idem_reschedule_many(ARRAY[:gone], priority => 1);
SELECT idem_reschedule_many(queue => 'q', priority => 1);
SELECT idem_cancel_many(queue => 'q');
SELECT idem_retry_many(queue => 'q', state => 'cancelled');
SELECT payload, priority FROM idem.jobs ORDER BY payload;
SELECT payload, state FROM idem.job_log;

DROP VIEW jobs;
DROP PROCEDURE one_of_each();
DROP TABLE tok;
CALL anew();
