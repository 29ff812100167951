--
-- J14: what a fetch has to skip does not cost the next fetch, of any session.
-- The number of pages that a fetch reads shows it.  One fetch in less than a second looks at
-- everything again, so the tests ask repeatedly.  The races are in isolation tests.
--
\a\pset footer off
CALL anew();
SET client_min_messages = warning;

-- the pages of one fetch; what it does is undone
CREATE FUNCTION fetch_pages(queue text, OUT n bigint) LANGUAGE plpgsql AS $$
BEGIN
	n := pages(format($q$ SELECT * FROM idem_fetch(%L, lease => '1 h') $q$, queue));
	RAISE EXCEPTION 'undo';
EXCEPTION WHEN raise_exception THEN
END $$;
-- does a fetch soon read no more than three times the pages of a fetch from an empty queue?
CREATE FUNCTION gets_cheap(queue text, before text DEFAULT 'SELECT') RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	PERFORM fetch_pages('empty');
	FOR i IN 1 .. 100 LOOP
		EXECUTE before;
		IF fetch_pages(queue) <= 3 * fetch_pages('empty') THEN
			RETURN true;
		END IF;
	END LOOP;
	RETURN false;
END $$;
-- the number of the job that a fetch gets; the fetch is undone
CREATE FUNCTION next_job(queue text, OUT id bigint) LANGUAGE plpgsql AS $$
BEGIN
	id := (SELECT job_id FROM idem_fetch(queue, lease => '1 h'));
	RAISE EXCEPTION 'undo';
EXCEPTION WHEN raise_exception THEN
END $$;

-- S2: sessions share what they skip once a transaction that has used the queue has committed
SELECT count(*) AS jobs FROM unnest(ARRAY['ended', 'leased', 'blocked', 'scheduled', 'mixed', 'leases', 'empty']) AS q, LATERAL idem_fetch(q) AS f;

-- a transaction that stays open: VACUUM cannot remove what ends after it has begun
BEGIN;
SELECT pg_current_xact_id() IS NOT NULL AS begun;
PREPARE TRANSACTION 'old';

-- ended, of three priorities
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue)
SELECT i, '2021-01-01 00:00:00+00', '2021-01-01 00:00:00+00', i % 3, 'ended' FROM generate_series(1, 6000) AS i;
DELETE FROM idem.jobs;
-- leased
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, attempt, token, lease_until)
SELECT i, '2021-01-01 00:00:00+00', '2021-01-01 00:00:00+00', 0, 'leased', 1, 1, idem_clock() + interval '1 h' FROM generate_series(10001, 13000) AS i;
-- blocked
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, key_hash, key, after_job)
SELECT i, '2021-01-01 00:00:00+00', '2021-01-01 00:00:00+00', 0, 'blocked', i, i, 10000 + i % 3000 + 1 FROM generate_series(20001, 22000) AS i;
-- scheduled, each with its own priority
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue)
SELECT i, idem_clock() + i * interval '1 h', '2021-01-01 00:00:00+00', i, 'scheduled' FROM generate_series(30001, 32000) AS i;
-- some of each
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, attempt, token, lease_until, after_job)
SELECT i, CASE i % 4 WHEN 0 THEN idem_clock() + interval '1 h' ELSE '2021-01-01 00:00:00+00' END, '2021-01-01 00:00:00+00', i / 50, 'mixed',
	   1, 1, CASE i % 4 WHEN 1 THEN idem_clock() + interval '1 h' END, CASE i % 4 WHEN 2 THEN 10001 END
  FROM generate_series(40001, 43000) AS i;
DELETE FROM idem.jobs WHERE queue = 'mixed' AND job_id % 4 = 3;
SELECT setval('idem.jobs_job_id_seq', 50000);

-- polls that find nothing
SELECT q, fetch_pages(q) > 100 AS dear_at_first, gets_cheap(q) FROM unnest(ARRAY['ended', 'leased', 'blocked', 'scheduled', 'mixed']) AS q;
-- other queues that are polled in between do not matter
SELECT gets_cheap('ended', 'SELECT count(q) FROM generate_series(1, 100) AS i, LATERAL idem_fetch(''other '' || i) AS q');
-- behind all of it there is a job to fetch
SELECT q, job_id - 50000 AS job, gets_cheap(q), next_job(q) = job_id AS gets_it
  FROM unnest(ARRAY['ended', 'leased', 'blocked', 'scheduled', 'mixed']) AS q, LATERAL idem_enqueue(q, priority => 100000);
-- in the middle
SELECT q, job_id - 50000 AS job, gets_cheap(q), next_job(q) = job_id AS gets_it
  FROM (VALUES ('ended', 1), ('scheduled', 31000), ('mixed', 830)) AS v(q, p), LATERAL idem_enqueue(q, priority => p, run_at => '2020-01-01 00:00:00+00');
-- before all of it
SELECT q, job_id - 50000 AS job, gets_cheap(q), next_job(q) = job_id AS gets_it
  FROM unnest(ARRAY['ended', 'leased', 'blocked', 'scheduled', 'mixed']) AS q, LATERAL idem_enqueue(q, priority => -1);

-- the first fetch of a new session is cheap, too; three times, in case the machine is slow for a moment
CREATE TABLE first_fetch (cheap boolean);
SELECT outcome FROM idem_enqueue('clean');
SELECT fetch_pages('leased') IS NOT NULL AS polled;
\c -
SET client_min_messages = warning;
SELECT fetch_pages('empty') IS NOT NULL AS polled;
INSERT INTO first_fetch SELECT fetch_pages('leased') <= 3 * fetch_pages('clean');
SELECT fetch_pages('leased') IS NOT NULL AS polled;
\c -
SET client_min_messages = warning;
SELECT fetch_pages('empty') IS NOT NULL AS polled;
INSERT INTO first_fetch SELECT fetch_pages('leased') <= 3 * fetch_pages('clean');
SELECT fetch_pages('leased') IS NOT NULL AS polled;
\c -
SET client_min_messages = warning;
SELECT fetch_pages('empty') IS NOT NULL AS polled;
INSERT INTO first_fetch SELECT fetch_pages('leased') <= 3 * fetch_pages('clean');
SELECT bool_or(cheap) AS cheap FROM first_fetch;
DROP TABLE first_fetch;

-- a transaction that fetches and ends many jobs: they are not skipped one by one
SELECT count(*) FROM idem_enqueue_many('drain', array_fill('1'::jsonb, ARRAY[1000]));
CREATE FUNCTION drain(n int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	j record;
BEGIN
	FOR i IN 1 .. n LOOP
		SELECT * INTO STRICT j FROM idem_fetch('drain');
		PERFORM idem_complete(j.job_id, j.token);
	END LOOP;
END $$;
BEGIN;
SELECT drain(900);
SELECT min(pages($$ SELECT * FROM idem_fetch('drain') $$)) < 50 AS cheap FROM generate_series(1, 20);
SELECT drain(80);
SELECT min(pages($$ SELECT * FROM idem_fetch('drain') $$)) < 50 AS cheap FROM generate_series(1, 20);
ROLLBACK;
SELECT count(*) FROM idem_fetch('drain', 1000, lease => '1 h');

-- the time of what is skipped together is that of the first lease that expires
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, attempt, token, lease_until)
SELECT 7000000 + i, '2021-01-01 00:00:00+00', '2021-01-01 00:00:00+00', 0, 'leases', 1, 1, idem_clock() + CASE i WHEN 10 THEN interval '10 min' ELSE '2 h' END FROM generate_series(1, 1000) AS i;
SELECT gets_cheap('leases');
SET idem.clock_offset = '15 min';
SELECT next_job('leases');
RESET idem.clock_offset;

-- an enqueue of a key whose jobs have ended
SELECT outcome FROM idem_enqueue('hot', NULL, 'k');
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, key_hash, key)
SELECT 6000000 + i, run_at, enqueued_at, 0, queue, key_hash, key FROM idem.jobs, generate_series(1, 6000) AS i WHERE queue = 'hot';
DELETE FROM idem.jobs WHERE queue = 'hot';
CREATE FUNCTION enqueue_pages(key text, OUT n bigint) LANGUAGE plpgsql AS $$
BEGIN
	n := pages(format($q$ SELECT * FROM idem_enqueue('hot', NULL, %L) $q$, key));
	RAISE EXCEPTION 'undo';
EXCEPTION WHEN raise_exception THEN
END $$;
SELECT enqueue_pages('k') > 100 AS dear_at_first;
SELECT min(enqueue_pages('k')) <= 3 * min(enqueue_pages('clean')) AS cheap FROM generate_series(1, 20);
DROP FUNCTION enqueue_pages;

-- rows that bypass the library are found within about a second, while other fetches jump over them
CREATE PROCEDURE comes(queue text, id bigint) LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '1 min';
BEGIN
	WHILE clock_timestamp() < deadline LOOP
		IF next_job(queue) = id THEN
			RAISE INFO 'it comes';
			RETURN;
		END IF;
		COMMIT;
	END LOOP;
	RAISE INFO 'it does not come';
END $$;
DELETE FROM idem.jobs WHERE queue = 'leased' AND lease_until IS NULL;
SELECT gets_cheap('leased');
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue) VALUES (1, '2021-01-01 00:00:00+00', '2021-01-01 00:00:00+00', 0, 'leased');
CALL comes('leased', 1);
UPDATE idem.jobs SET lease_until = '2022-01-01 00:00:00+00' WHERE job_id = 1;
SELECT job_id FROM idem_fetch('leased', lease => '1 h');
SELECT gets_cheap('leased');
UPDATE idem.jobs SET lease_until = '2022-01-01 00:00:00+00' WHERE job_id = 12000;
CALL comes('leased', 12000);
DELETE FROM idem.jobs WHERE job_id = 10500;
UPDATE idem.jobs SET after_job = NULL WHERE job_id = 21000;
DELETE FROM idem.jobs WHERE queue = 'blocked' AND priority <> 0;
CALL comes('blocked', 21000);

-- entries that no transaction can see any more: fetch marks them, and they still fill pages
COMMIT PREPARED 'old';
SELECT gets_cheap('ended');
SELECT gets_cheap('drain');

DROP PROCEDURE comes;
DROP FUNCTION fetch_pages, gets_cheap, next_job, drain;
RESET client_min_messages;
CALL anew();
