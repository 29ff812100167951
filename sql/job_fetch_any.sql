-- J15: jobs of several queues, a fair share from each
\a\pset footer off

-- a flood in one queue
CALL anew();
SELECT count(*) FROM idem_enqueue_many('flood', array_fill('1'::jsonb, ARRAY[100]));
SELECT count(*) FROM idem_enqueue_many('drops', array_fill('2'::jsonb, ARRAY[20]));
CREATE TABLE fetched (queue text, call int);
DO $$
BEGIN
	FOR i IN 1 .. 9 LOOP
		INSERT INTO fetched SELECT f.queue, i FROM idem_fetch_any(ARRAY['flood', 'drops', 'empty'], lease => '1 h') AS f;
	END LOOP;
END $$;
-- each of the three is first three times; after the empty one comes the flood
SELECT queue, count(*) FROM fetched GROUP BY queue ORDER BY queue;
TRUNCATE fetched;
DO $$
BEGIN
	FOR i IN 1 .. 10 LOOP
		INSERT INTO fetched SELECT f.queue, i FROM idem_fetch_any(ARRAY['flood', 'drops'], lease => '1 h') AS f;
	END LOOP;
END $$;
SELECT queue, count(*) FROM fetched GROUP BY queue ORDER BY queue;

-- a batch is divided; what a queue does not have goes to the others
SELECT queue, count(*) FROM idem_fetch_any(ARRAY['flood', 'drops'], 8, '1 h') GROUP BY queue ORDER BY queue;
SELECT queue, count(*) FROM idem_fetch_any(ARRAY['empty', 'flood', 'drops'], 8, '1 h') GROUP BY queue ORDER BY queue;
SELECT queue, count(*) FROM idem_fetch_any(ARRAY['drops', 'flood'], 1000, '1 h') GROUP BY queue ORDER BY queue;
SELECT count(*) FROM idem_fetch_any(ARRAY['drops', 'flood', 'empty'], 1000, '1 h');
-- a queue that is named twice has two shares
CALL anew();
SELECT count(*) FROM idem_enqueue_many('flood', array_fill('1'::jsonb, ARRAY[10]));
SELECT count(*) FROM idem_enqueue_many('drops', array_fill('2'::jsonb, ARRAY[10]));
SELECT queue, count(*) FROM idem_fetch_any(ARRAY['flood', 'drops', 'flood'], 6, '1 h') GROUP BY queue ORDER BY queue;

-- within a queue the order is that of idem_fetch()
CALL anew();
SELECT outcome FROM idem_enqueue('a', priority => 5);
SELECT outcome FROM idem_enqueue('a', priority => 1);
SELECT f.priority FROM idem_fetch_any(ARRAY['a'], 2, '1 h') AS g CROSS JOIN LATERAL idem_job(g.job_id) AS f;

-- the lease is that of each queue, unless it is passed
CALL anew();
SELECT idem_queue_set('leased', lease => '1 h');
SELECT outcome FROM idem_enqueue('leased');
SELECT outcome FROM idem_enqueue('plain');
BEGIN;
SELECT queue, attempt, max_attempts, token > 0 AS has_token FROM idem_fetch_any(ARRAY['leased', 'plain'], 2) ORDER BY queue;
SELECT queue, lease_until > now() AS leased FROM idem.jobs ORDER BY queue;
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT queue FROM idem_fetch_any(ARRAY['leased', 'plain'], 2);
ROLLBACK;
-- a paused queue is passed over
SELECT idem_pause('plain');
SELECT queue FROM idem_fetch_any(ARRAY['plain', 'leased'], 2);

-- bad arguments change nothing
CALL anew();
SELECT outcome FROM idem_enqueue('q');
SELECT * FROM idem_fetch_any(NULL);
SELECT * FROM idem_fetch_any('{}');
SELECT * FROM idem_fetch_any(ARRAY['q', NULL]);
SELECT * FROM idem_fetch_any(ARRAY['q', '']);
SELECT * FROM idem_fetch_any(ARRAY['q', repeat('x', 256)]);
SELECT * FROM idem_fetch_any(ARRAY[ARRAY['q'], ARRAY['q']]);
SELECT * FROM idem_fetch_any(array_fill('q'::text, ARRAY[1001]));
SELECT * FROM idem_fetch_any(ARRAY['q'], NULL);
SELECT * FROM idem_fetch_any(ARRAY['q'], 0);
SELECT * FROM idem_fetch_any(ARRAY['q'], 10001);
SELECT * FROM idem_fetch_any(ARRAY['q'], 1, '-1 s');
SELECT * FROM idem_fetch_any(ARRAY['q'], 1, '31 days');
SELECT * FROM idem_fetch_any(ARRAY['q'], 1, '1 s', '');
-- one queue of another role is enough
CREATE ROLE idem_fetch_any_owner;
CREATE ROLE idem_fetch_any_app;
SELECT idem_grant('idem_fetch_any_app', 'app');
SELECT idem_queue_set('theirs', owner => 'idem_fetch_any_owner');
SET ROLE idem_fetch_any_app;
SELECT * FROM idem_fetch_any(ARRAY['q', 'theirs'], 2);
SELECT queue FROM idem_fetch_any(ARRAY['q'], 2);
RESET ROLE;
SELECT idem_revoke('idem_fetch_any_app', 'app');
SELECT idem_queue_set('theirs', owner => '-');
DROP ROLE idem_fetch_any_owner, idem_fetch_any_app;
DROP TABLE fetched;
