--
-- Every error of the job functions has a SQLSTATE, a detail and a hint, and
-- changes nothing: "Errors" of the contract
--
\a\pset footer off
CALL anew();
CREATE TABLE bad (n serial, call text);

-- the queue
INSERT INTO bad (call) VALUES
	($$idem_enqueue(NULL)$$),
	($$idem_enqueue('')$$),
	($$idem_enqueue(repeat('x', 256))$$),
	($$idem_enqueue(repeat(U&'\20ac', 86))$$),
	($$idem_enqueue_many(NULL, '{1}')$$),
	($$idem_enqueue_many('', '{1}')$$),
	($$idem_fetch(NULL)$$),
	($$idem_fetch('')$$),
	($$idem_fetch(repeat('x', 256))$$),
	($$idem_queue_set(NULL)$$),
	($$idem_queue_set('')$$),
	($$idem_queue_drop(NULL)$$),
	($$idem_queue_drop(repeat('x', 256))$$),
	($$idem_pause(NULL)$$),
	($$idem_pause('')$$),
	($$idem_resume(NULL)$$),
	($$idem_resume('')$$);
-- key and payload
INSERT INTO bad (call) VALUES
	($$idem_enqueue('q', NULL, '')$$),
	($$idem_enqueue('q', NULL, repeat('x', 1025))$$),
	($$idem_enqueue('q', NULL, repeat(U&'\20ac', 342))$$),
	($$idem_enqueue('q', NULL, '', delay => '1 h')$$),
	($$idem_enqueue('q', to_jsonb(repeat('x', 1048577)))$$),
	($$idem_enqueue_many('q', ARRAY['1', to_jsonb(repeat('x', 1048577))])$$);
-- unknown words
INSERT INTO bad (call) VALUES
	($$idem_enqueue('q', NULL, 'k', 'until_done')$$),
	($$idem_enqueue('q', NULL, 'k', 'Until_Executed')$$),
	($$idem_enqueue('q', NULL, 'k', '')$$),
	($$idem_enqueue('q', NULL, 'k', on_duplicate => 'ignore')$$),
	($$idem_enqueue('q', NULL, 'k', on_duplicate => 'skip ')$$),
	($$idem_enqueue('q', NULL, 'k', 'until_executed', if_running => 'replace')$$),
	($$idem_queue_set('q', dedup => 'until_done')$$),
	($$idem_queue_set('q', on_duplicate => 'ignore')$$),
	($$idem_queue_set('q', if_running => 'wait')$$);
-- arguments that exclude each other
INSERT INTO bad (call) VALUES
	($$idem_enqueue('q', NULL, 'k', 'until_expired')$$),
	($$idem_enqueue('q', NULL, 'k', key_ttl => '1 h')$$),
	($$idem_enqueue('q', NULL, 'k', 'until_executing', key_ttl => '1 h')$$),
	($$idem_enqueue('q', NULL, 'k', 'until_executed', key_ttl => '1 h')$$),
	($$idem_enqueue('q', NULL, 'k', if_running => 'rerun')$$),
	($$idem_enqueue('q', NULL, 'k', if_running => 'skip')$$),
	($$idem_enqueue('q', NULL, 'k', 'until_executing', if_running => 'rerun')$$),
	($$idem_enqueue('q', NULL, 'k', 'until_expired', if_running => 'rerun', key_ttl => '1 h')$$),
	($$idem_enqueue('q', NULL, 'k', delay => '1 h', run_at => now())$$),
	($$idem_enqueue('q', NULL, 'k', on_duplicate => 'debounce')$$),
	($$idem_enqueue('q', NULL, 'k', on_duplicate => 'debounce', delay => '1 h', include_scheduled => false)$$),
	($$idem_enqueue('q', NULL, NULL, 'until_executing')$$),
	($$idem_enqueue('q', NULL, NULL, 'until_expired', key_ttl => '1 h')$$),
	($$idem_enqueue('q', NULL, NULL, on_duplicate => 'skip')$$),
	($$idem_enqueue('q', NULL, NULL, if_running => 'skip')$$),
	($$idem_enqueue('q', NULL, NULL, key_ttl => '1 h')$$),
	($$idem_enqueue('q', NULL, NULL, include_scheduled => true)$$),
	($$idem_enqueue('q', NULL, NULL, include_scheduled => false)$$);
-- times and numbers
INSERT INTO bad (call) VALUES
	($$idem_enqueue('q', NULL, 'k', 'until_expired', key_ttl => '0')$$),
	($$idem_enqueue('q', NULL, 'k', 'until_expired', key_ttl => '-1 s')$$),
	($$idem_enqueue('q', NULL, 'k', 'until_expired', key_ttl => '101 years')$$),
	($$idem_enqueue('q', delay => '-1 us')$$),
	($$idem_enqueue('q', delay => '101 years')$$),
	($$idem_enqueue('q', delay => '170000000 years')$$),
	($$idem_enqueue('q', run_at => 'infinity')$$),
	($$idem_enqueue('q', run_at => '-infinity')$$),
	($$idem_enqueue('q', max_attempts => 0)$$),
	($$idem_enqueue('q', max_attempts => -1)$$),
	($$idem_fetch('q', 0)$$),
	($$idem_fetch('q', -1)$$),
	($$idem_fetch('q', 10001)$$),
	($$idem_fetch('q', NULL)$$),
	($$idem_fetch('q', lease => '-1 us')$$),
	($$idem_fetch('q', lease => '30 days 1 us')$$),
	($$idem_fetch('q', worker => '')$$),
	($$idem_fetch('q', worker => repeat('x', 256))$$),
	($$idem_queue_set('q', key_ttl => '0')$$),
	($$idem_queue_set('q', debounce_max => '0')$$),
	($$idem_queue_set('q', lease => '-1 us')$$),
	($$idem_queue_set('q', lease => '31 days')$$),
	($$idem_queue_set('q', max_attempts => 0)$$),
	($$idem_queue_set('q', backoff => '0')$$),
	($$idem_queue_set('q', backoff_max => '0')$$),
	($$idem_queue_set('q', keep => '-1 us')$$),
	($$idem_queue_set('q', keep_dead => '-1 us')$$);
-- jobs and tokens; job 1 waits and was never fetched, job 2 runs, job 3 waits for its retry
INSERT INTO bad (call) VALUES
	($$idem_complete(NULL, 1)$$),
	($$idem_complete(1, NULL)$$),
	($$idem_complete(1, 0)$$),
	($$idem_complete(1, -1)$$),
	($$idem_complete(1, 1, to_jsonb(repeat('x', 1048577)))$$),
	($$idem_complete(1, 1)$$),
	($$idem_complete(2, 1)$$),
	($$idem_complete(3, 1)$$),
	($$idem_complete(99, 1)$$),
	($$idem_fail(NULL, 1)$$),
	($$idem_fail(1, NULL)$$),
	($$idem_fail(1, 0)$$),
	($$idem_fail(1, 1, retry_in => '-1 us')$$),
	($$idem_fail(1, 1, retry_in => '101 years')$$),
	($$idem_fail(1, 1)$$),
	($$idem_fail(2, 1)$$),
	($$idem_fail(3, 1)$$),
	($$idem_fail(99, 1)$$),
	($$idem_snooze(NULL, 1, '1 s')$$),
	($$idem_snooze(1, NULL, '1 s')$$),
	($$idem_snooze(1, 0, '1 s')$$),
	($$idem_snooze(1, 1, NULL)$$),
	($$idem_snooze(1, 1, '-1 us')$$),
	($$idem_snooze(1, 1, '101 years')$$),
	($$idem_snooze(1, 1, '1 s')$$),
	($$idem_snooze(2, 1, '1 s')$$),
	($$idem_snooze(3, 1, '1 s')$$),
	($$idem_snooze(99, 1, '1 s')$$),
	($$idem_cancel(NULL)$$),
	($$idem_retry(NULL)$$),
	($$idem_job(NULL)$$);
-- arrays
INSERT INTO bad (call) VALUES
	($$idem_enqueue_many('q', NULL)$$),
	($$idem_enqueue_many('q', '{1,2}', '{a}')$$),
	($$idem_enqueue_many('q', '{{1,2}}')$$),
	($$idem_enqueue_many('q', '{1,2}', '{{a,b}}')$$),
	($$idem_enqueue_many('q', '{1,2}', ARRAY['a', ''])$$),
	($$idem_enqueue_many('q', '{1,2}', ARRAY['a', repeat('x', 1025)])$$),
	($$idem_complete_many(NULL, '{1}')$$),
	($$idem_complete_many('{1}', NULL)$$),
	($$idem_complete_many('{1,NULL}', '{1,1}')$$),
	($$idem_complete_many('{1,2}', '{1,NULL}')$$),
	($$idem_complete_many('{1,2}', '{1}')$$),
	($$idem_complete_many('{}', '{1}')$$),
	($$idem_complete_many('{1}', '{0}')$$),
	($$idem_complete_many('{99,1,2}', '{1,-1,1}')$$),
	($$idem_heartbeat('{1}', '{0}', '1 min')$$),
	($$idem_complete_many('{{1,2}}', '{{1,2}}')$$),
	($$idem_heartbeat(NULL, '{1}', '1 s')$$),
	($$idem_heartbeat('{1}', NULL, '1 s')$$),
	($$idem_heartbeat('{1,NULL}', '{1,1}', '1 s')$$),
	($$idem_heartbeat('{1,2}', '{1,NULL}', '1 s')$$),
	($$idem_heartbeat('{1,2}', '{1}', '1 s')$$),
	($$idem_heartbeat('{{1,2}}', '{{1,2}}', '1 s')$$),
	($$idem_heartbeat('{1}', '{1}', '0')$$),
	($$idem_heartbeat('{1}', '{1}', '-1 s')$$),
	($$idem_heartbeat('{1}', '{1}', '31 days')$$);
-- duplicates, and queues in use
INSERT INTO bad (call) VALUES
	($$idem_enqueue('jobs', NULL, 'alpha', on_duplicate => 'error')$$),
	($$idem_enqueue('jobs', NULL, 'beta', 'until_executed', 'error')$$),
	($$idem_enqueue('jobs', NULL, 'gamma', 'until_expired', 'error', key_ttl => '1 h')$$),
	($$idem_enqueue('done', NULL, 'delta', 'until_expired', 'error', key_ttl => '1 h')$$),
	($$idem_enqueue_many('q', '{1,2}', '{a,a}', on_duplicate => 'error')$$),
	($$idem_queue_drop('jobs')$$);

SELECT job_id FROM idem_enqueue('jobs', '1', 'alpha', priority => 9);
SELECT job_id FROM idem_enqueue('jobs', '2', 'beta');
SELECT job_id FROM idem_fetch('jobs', lease => '1 h');
SELECT job_id FROM idem_enqueue('jobs', '3', 'gamma');
SELECT idem_fail(job_id, token, 'secret') FROM idem_fetch('jobs');
SELECT job_id FROM idem_enqueue('done', '"secret"', 'delta', 'until_expired', key_ttl => '1 h');
SELECT idem_complete(job_id, token, '"secret"') FROM idem_fetch('done');
CREATE TABLE jobs_before AS SELECT * FROM idem.jobs;
SELECT call, state FROM bad, LATERAL fails('SELECT ' || call) ORDER BY n;
-- detail and hint are sentences, and contain no key, payload or result
SELECT call, message, detail, hint FROM bad, LATERAL fails('SELECT ' || call)
 WHERE detail !~ '^[A-Z"].*\.$' OR hint !~ '^[A-Z"].*\.$' OR message !~ '^[a-z"].*[^.]$' OR concat(message, detail, hint) ~ '\y(secret|alpha|beta|gamma|delta)\y' ORDER BY n;
-- nothing has changed
SELECT (SELECT count(*) FROM idem.queues) AS queues, (SELECT count(*) FROM idem.job_log) AS log, (SELECT count(*) FROM idem.job_keys) AS keys,
	   (SELECT count(*) FROM idem.jobs) AS jobs, (SELECT count(*) FROM (TABLE idem.jobs EXCEPT TABLE jobs_before) AS d) AS changed;

-- some of them in full
\x on
SELECT * FROM fails($$ SELECT idem_enqueue(NULL) $$);
SELECT * FROM fails($$ SELECT idem_enqueue('') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', NULL, 'k', 'until_done') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', NULL, 'k', on_duplicate => 'ignore') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', NULL, 'k', 'until_executed', if_running => 'ignore') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', NULL, 'k', 'until_expired') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', NULL, 'k', key_ttl => '1 h') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', NULL, 'k', if_running => 'rerun') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', NULL, 'k', on_duplicate => 'debounce') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', delay => '1 s', run_at => now()) $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q', on_duplicate => 'replace') $$);
-- ID005: which job has the key
SELECT * FROM fails($$ SELECT idem_enqueue('jobs', NULL, 'alpha', on_duplicate => 'error') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('jobs', NULL, 'beta', 'until_executed', 'error') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('done', NULL, 'delta', 'until_expired', 'error', key_ttl => '1 h') $$);
SELECT * FROM fails($$ SELECT idem_enqueue_many('jobs', '{1,2,3}', '{new,alpha,old}', on_duplicate => 'error') $$);
-- ID002, ID003
SELECT * FROM fails($$ SELECT idem_complete(1, 1) $$);
SELECT * FROM fails($$ SELECT idem_complete(2, 1) $$);
SELECT * FROM fails($$ SELECT idem_fail(3, 1) $$);
SELECT * FROM fails($$ SELECT idem_complete(99, 1) $$);
SELECT * FROM fails($$ SELECT idem_complete(1, 0) $$);
SELECT * FROM fails($$ SELECT idem_complete_many('{1,NULL}', '{1,1}') $$);
SELECT * FROM fails($$ SELECT idem_fetch('q', 0) $$);
SELECT * FROM fails($$ SELECT idem_fetch('q', lease => '-1 s') $$);
SELECT * FROM fails($$ SELECT idem_queue_drop('jobs') $$);
\x off
-- 25000 and 42501
\set VERBOSITY default
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT * FROM idem_fetch('q');
ROLLBACK;
CREATE ROLE idem_job_owner;
CREATE ROLE idem_job_stranger;
SELECT idem_grant('idem_job_stranger', 'app');
SELECT idem_queue_set('jobs', owner => 'idem_job_owner');
SET ROLE idem_job_stranger;
SELECT * FROM idem_enqueue('jobs');
SELECT idem_complete(2, 1);
RESET ROLE;
\set VERBOSITY sqlstate
SELECT idem_revoke('idem_job_stranger', 'app');
DROP ROLE idem_job_owner, idem_job_stranger;
DROP TABLE bad, jobs_before;
TRUNCATE idem.jobs, idem.job_keys, idem.job_log, idem.queues;
