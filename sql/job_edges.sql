--
-- Jobs: corner cases
--
\a\pset footer off
CALL anew();

-- A retry that was granted runs, even if max_attempts of the queue was lowered since, and with
-- it the enqueues that the job absorbed (J2); idem_job then shows the error of that attempt
SELECT job_id FROM idem_enqueue('limit', '"job"', 'k', max_attempts => NULL);
SELECT job_id, token FROM idem_fetch('limit', lease => '1 h') \gset
SELECT idem_fail(:job_id, :token, 'first', retry_in => '0');
SELECT job_id, token FROM idem_fetch('limit', lease => '1 h') \gset
SELECT idem_fail(:job_id, :token, 'second', retry_in => '0');
SELECT idem_queue_set('limit', max_attempts => 2);
SELECT job_id, outcome FROM idem_enqueue('limit', '"again"', 'k');
SELECT job_id, token, attempt FROM idem_fetch('limit', lease => '1 h') \gset
\echo attempt :attempt
SELECT idem_fail(:job_id, :token, 'third');
SELECT state, attempt, max_attempts, error FROM idem_job(:job_id);

-- of two waiting jobs, the one that is due first absorbs, wherever its row is
SELECT job_id AS one FROM idem_enqueue('two', '"one"', 'k') \gset
SELECT token FROM idem_fetch('two', lease => '1 h') \gset
SELECT job_id AS two FROM idem_enqueue('two', '"two"', 'k') \gset
SELECT idem_fail(:one, :token, retry_in => '1 day');
SELECT job_id = :two AS two, outcome FROM idem_enqueue('two', '"three"', 'k', on_duplicate => 'replace');
SELECT token FROM idem_fetch('two', lease => '1 h') \gset
SELECT idem_fail(:two, :token, retry_in => '2 days');
SELECT job_id = :one AS one, outcome FROM idem_enqueue('two', '"four"', 'k');

-- the timestamp that means "no time" inside the server
SELECT job_id FROM idem_enqueue('epoch', run_at => '2000-01-01 00:00:00+00') \gset
SELECT run_at = '2000-01-01 00:00:00+00' AS epoch, ended_at, lease_until FROM idem_job(:job_id);
SELECT job_id = :job_id AS fetched FROM idem_fetch('epoch', lease => '1 h');

-- a sequence that was set back: the error says what to do, and nothing is changed
\set VERBOSITY terse
SELECT count(*) AS jobs FROM idem.jobs;
SELECT setval('idem.jobs_job_id_seq', :job_id, false) = :job_id AS set_back;
SELECT * FROM idem_enqueue('epoch', key => 'k');
SELECT count(*) AS jobs FROM idem.jobs;
SELECT setval('idem.jobs_job_id_seq', max(job_id)) IS NOT NULL AS set_right FROM idem.jobs;
SELECT outcome FROM idem_enqueue('epoch', key => 'k');
\set VERBOSITY default

-- one transaction does everything
BEGIN;
SELECT job_id, outcome FROM idem_enqueue('own', '1', 'k') \gset
SELECT outcome FROM idem_enqueue('own', '2', 'k', on_duplicate => 'replace');
SELECT job_id, token, payload FROM idem_fetch('own') \gset
\echo payload :payload
SELECT outcome FROM idem_enqueue('own', '3', 'k');
SELECT idem_complete(:job_id, :token);
SELECT payload FROM idem_fetch('own');
ROLLBACK;
SELECT count(*) FROM idem.jobs WHERE queue = 'own';

-- values stored by TOAST come back unchanged: in the queue, in the history, and after a retry
SELECT idem_queue_set('large', keep => '1 h');
CREATE TEMP TABLE large AS
SELECT jsonb_build_object('text', string_agg(md5(i::text), '')) AS payload FROM generate_series(1, 2000) AS i;
SELECT job_id FROM idem_enqueue('large', (SELECT payload FROM large), 'k') \gset
SELECT outcome FROM idem_enqueue('large', (SELECT payload || '{"n": 2}' FROM large), 'k', on_duplicate => 'replace');
SELECT f.payload = l.payload || '{"n": 2}' AS whole FROM idem_fetch('large', lease => '1 h') AS f, large AS l;
SELECT idem_cancel(:job_id);
SELECT j.state, j.payload = l.payload || '{"n": 2}' AS whole FROM idem_job(:job_id) AS j, large AS l;
SELECT idem_retry(:job_id);
VACUUM idem.job_log;
SELECT f.payload = l.payload || '{"n": 2}' AS whole FROM idem_fetch('large', lease => '1 h') AS f, large AS l;

-- functions that read newer rows than the snapshot cannot run in parallel queries
SELECT proname FROM pg_proc WHERE proname LIKE 'idem\_%' AND proparallel <> 'u' AND proname NOT LIKE 'idem\_report%' ORDER BY 1;

TRUNCATE idem.jobs, idem.job_keys, idem.job_log, idem.queues;

-- J1: a session that enqueues a key in one transaction after another does not prevent its job
-- from starting: after idem.drain_after the duplicate becomes a new job
SET idem.drain_after = '50 ms';
SELECT job_id AS first FROM idem_enqueue('stream', '"first"', 'hot') \gset
CREATE PROCEDURE enqueue_until(wanted text, INOUT answer text) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. 100000 LOOP
		SELECT outcome INTO answer FROM idem_enqueue('stream', '"more"', 'hot');
		COMMIT;
		EXIT WHEN answer = wanted;
	END LOOP;
END $$;
CALL enqueue_until('enqueued', NULL);
-- the new job absorbs the next duplicates; of three jobs at most one is blocked
CALL enqueue_until('absorbed', NULL);
CALL enqueue_until('enqueued', NULL);
DO $$
BEGIN
	FOR i IN 1 .. 1000 LOOP
		PERFORM idem_enqueue('stream', '"more"', 'hot');
		COMMIT;
	END LOOP;
END $$;
SELECT count(*), min(job_id) = :first AS with_first FROM idem.jobs WHERE queue = 'stream';
SELECT job_id = :first AS first, payload FROM idem_fetch('stream');
DROP PROCEDURE enqueue_until;
RESET idem.drain_after;

-- VACUUM does not truncate the table when the queues are empty: it would have to lock it
CALL anew();
SELECT count(*) FROM idem_enqueue_many('drain', (SELECT array_agg(to_jsonb((SELECT string_agg(md5(i::text || j), '') FROM generate_series(1, 100) AS j))) FROM generate_series(1, 100) AS i));
SELECT count(idem_complete(job_id, token)) FROM idem_fetch('drain', 100);
VACUUM idem.jobs;
SELECT pg_relation_size(oid) > 0 AS heap, pg_relation_size(reltoastrelid) > 0 AS toast FROM pg_class WHERE oid = 'idem.jobs'::regclass;
CALL anew();

-- Each retry writes new entries into all indexes.  The index on the hash of the key removes entries of dead versions
-- itself, before VACUUM comes.
CREATE PROCEDURE retry_often(n int) LANGUAGE plpgsql AS $$
DECLARE
	job record;
BEGIN
	FOR i IN 1 .. n LOOP
		SELECT * INTO job FROM idem_fetch('often', lease => '1 h');
		PERFORM idem_fail(job.job_id, job.token, retry_in => '0');
		COMMIT;
	END LOOP;
END $$;
SET client_min_messages = warning;
SELECT outcome FROM idem_enqueue('often', key => 'k', max_attempts => 100000);
CALL retry_often(5000);
RESET client_min_messages;
SELECT pg_relation_size('idem.jobs_key_idx') / current_setting('block_size')::int < 5 AS small;
DROP PROCEDURE retry_often;
CALL anew();

-- A row that was not enqueued by idem may have a longer name of the queue than idem allows: nothing is counted for it
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, key_hash, key, attempt, max_attempts, token, lease_until)
SELECT i, '2021-01-01 00:00:00+00', '2021-01-01 00:00:00+00', 0, repeat('q', 3000 + i), 1, 'k', 1, 1, 1, '2021-01-02 00:00:00+00' FROM generate_series(1, 4) AS i;
SELECT idem_cancel(1), idem_complete(2, 1), idem_fail(3, 1, dead => true), idem_retry(1), idem_snooze(4, 1, '0') > '2021-01-01 00:00:00+00' AS snoozed;
UPDATE idem.jobs SET attempt = 1, lease_until = '2021-01-02 00:00:00+00' WHERE job_id = 4;
SELECT idem_cleanup();
SELECT job_id, length(queue), state FROM (SELECT job_id, queue, state FROM idem.job_log UNION ALL SELECT job_id, queue, 'waiting' FROM idem.jobs) AS j ORDER BY job_id;
CALL anew();
