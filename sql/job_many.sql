--
-- idem_enqueue_many: one row per element, by the rules of idem_enqueue
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

-- rows, numbers and fetches are in the order of the array, whatever the order of the keys
SELECT * FROM idem_enqueue_many('many', ARRAY['"c"', '"a"', '"d"', '"b"']::jsonb[], ARRAY['c', 'a', 'd', 'b']);
SELECT job_id, key, payload FROM idem.jobs ORDER BY job_id;
SELECT job_id, key FROM idem_fetch('many', 10, lease => '1 min');
-- without keys
SELECT * FROM idem_enqueue_many('many', ARRAY['1', '1', '1']::jsonb[]);
-- with some keys; a null payload is no payload
SELECT * FROM idem_enqueue_many('many', ARRAY['1', NULL, 'null', '4']::jsonb[], ARRAY[NULL, 'e', NULL, 'e']);
SELECT job_id, key, payload, payload IS NULL AS none FROM idem.jobs WHERE job_id >= 8 ORDER BY job_id;
-- nothing to do
SELECT * FROM idem_enqueue_many('many', '{}');
SELECT * FROM idem_enqueue_many('many', '{}', '{}');
-- the lower bounds of the arrays do not matter
CALL anew();
SELECT * FROM idem_enqueue_many('many', '[5:6]={1,2}'::jsonb[], '[0:1]={f,g}'::text[]);
-- duplicates of existing jobs (a duplicate may use up a number)
SELECT ord, CASE WHEN job_id > 2 THEN 'new' ELSE job_id::text END AS job_id, outcome, result
  FROM idem_enqueue_many('many', ARRAY['1', '2', '3']::jsonb[], ARRAY['g', 'h', 'f']);

-- the same key twice: the second is a duplicate of the first
CALL anew();
SELECT * FROM idem_enqueue_many('twice', ARRAY['1', '2', '3', '4', '5']::jsonb[], ARRAY['b', 'a', 'b', 'a', 'b']);
SELECT job_id, key, payload FROM idem.jobs ORDER BY job_id;
-- replace: the last one counts
CALL anew();
SELECT * FROM idem_enqueue_many('replace', ARRAY['1', '2', '3', '4', '5']::jsonb[], ARRAY['b', 'a', 'b', 'a', 'b'], on_duplicate => 'replace');
SELECT job_id, key, payload FROM idem.jobs ORDER BY job_id;
SELECT * FROM idem_enqueue_many('replace', ARRAY['6', '7']::jsonb[], ARRAY['b', 'b'], on_duplicate => 'replace');
SELECT payload FROM idem_job(1);
-- debounce
CALL anew();
SELECT * FROM idem_enqueue_many('debounce', ARRAY['1', '2', '3']::jsonb[], ARRAY[NULL, 'a', 'a'], on_duplicate => 'debounce', delay => '10 min');
SELECT job_id, payload, run_at - enqueued_at AS delay FROM idem.jobs ORDER BY job_id;
-- error: all or none
SELECT * FROM idem_enqueue_many('error', ARRAY['1', '2', '3']::jsonb[], ARRAY['a', 'b', 'a'], on_duplicate => 'error');
SELECT count(*) FROM idem.jobs WHERE queue = 'error';
SELECT outcome FROM idem_enqueue_many('error', ARRAY['1', '2', '3']::jsonb[], ARRAY['a', 'b', NULL], on_duplicate => 'error');
-- rerun: one more run, with the last payload
CALL anew();
SELECT job_id FROM idem_enqueue('rerun', '0', 'a');
SELECT job_id, token FROM idem_fetch('rerun', lease => '1 min') \gset
SELECT * FROM idem_enqueue_many('rerun', ARRAY['1', '2', '3']::jsonb[], ARRAY['a', 'b', 'a'], 'until_executed', if_running => 'rerun');
SELECT job_id, payload FROM idem.jobs ORDER BY job_id;
-- running and done jobs
SELECT * FROM idem_enqueue_many('rerun', ARRAY['4', '5']::jsonb[], ARRAY['a', 'a'], 'until_executed');
SELECT idem_cancel(2);
SELECT * FROM idem_enqueue_many('rerun', ARRAY['4', '5']::jsonb[], ARRAY['a', 'a'], 'until_executed');
CALL anew();
SELECT job_id FROM idem_enqueue('done', '0', 'a', 'until_expired', key_ttl => '1 h');
SELECT idem_complete(job_id, token, '"ok"') FROM idem_fetch('done');
SELECT * FROM idem_enqueue_many('done', ARRAY['1', '2', '3', '4']::jsonb[], ARRAY['b', 'a', 'a', 'b'], 'until_expired', key_ttl => '1 h');

-- the other arguments apply to all elements
CALL anew();
SELECT * FROM idem_enqueue_many('all', ARRAY['1', '2']::jsonb[], ARRAY['a', 'a'], delay => '1 h', priority => 3, max_attempts => 7);
SELECT * FROM idem_enqueue_many('all', ARRAY['3', '4']::jsonb[], ARRAY['a', 'a'], run_at => idem_clock() + interval '2 h', include_scheduled => true, priority => -3);
SELECT i, state, run_at - enqueued_at < interval '61 min' AS in_an_hour, priority, max_attempts FROM generate_series(1, 3) AS i, LATERAL idem_job(i) ORDER BY i;
-- one element pulls the other forward
SELECT ord, job_id, outcome FROM idem_enqueue_many('all', ARRAY['5']::jsonb[], ARRAY['a']);
SELECT state FROM idem_job(3);
-- the settings of the queue
CALL anew();
SELECT idem_queue_set('declared', on_duplicate => 'replace', max_attempts => 2);
SELECT * FROM idem_enqueue_many('declared', ARRAY['1', '2']::jsonb[], ARRAY['a', 'a']);
SELECT payload, max_attempts FROM idem_job(1);

-- J9: many jobs in one transaction
CALL anew();
SELECT outcome, count(*), count(DISTINCT job_id), min(job_id), max(job_id)
  FROM (SELECT array_agg(to_jsonb(i)) AS payloads, array_agg('k' || i % 5000) AS keys FROM generate_series(0, 9999) AS i) AS a,
	   LATERAL idem_enqueue_many('bulk', payloads, keys) GROUP BY outcome ORDER BY outcome;
SELECT bool_and(job_id = (payload #>> '{}')::int + 1 AND key = 'k' || (payload #>> '{}')) AS in_order FROM idem.jobs;
BEGIN;
SELECT count(*), min(job_id), max(job_id), bool_and(token > 0) AS tokens FROM idem_fetch('bulk', 10000);
ROLLBACK;
-- new keys are written in runs and batches: none is left out, all numbers and fetches are in the order of the array
CALL anew();
CREATE FUNCTION enqueue_some(queue text, n int, every int DEFAULT 1, size int DEFAULT 0, OUT outcome text, OUT count bigint, OUT in_order bool)
RETURNS SETOF record LANGUAGE sql AS $$
	SELECT e.outcome, count(*), bool_and(e.ord = o) FROM (
		SELECT array_agg(to_jsonb(i || repeat('x', size)) ORDER BY i) AS payloads, array_agg(CASE WHEN i % every = 0 THEN 'k' || i END ORDER BY i) AS keys FROM generate_series(1, n) AS i) AS a,
		LATERAL idem_enqueue_many(queue, payloads, keys) WITH ORDINALITY AS e (ord, job_id, outcome, result, o) GROUP BY 1 ORDER BY 1
$$;
CREATE FUNCTION fetched(queue text, OUT count bigint, OUT in_order bool) LANGUAGE sql AS $$
	SELECT count(*), bool_and(o::text = trim('x' FROM payload #>> '{}')) FROM idem_fetch(queue, 10000, lease => '1 h') WITH ORDINALITY AS f (id, token, attempt, max, queue, payload, key, at, lsn, progress, headers, links, o)
$$;
SELECT n, e.* FROM unnest('{1,2,31,32,33,63,64,65,1023,1024,1025,3000}'::int[]) AS n, LATERAL enqueue_some('run ' || n, n) AS e ORDER BY n;
SELECT n, e.* FROM unnest('{1,2,31,32,33,63,64,65,1023,1024,1025,3000}'::int[]) AS n, LATERAL enqueue_some('run ' || n, n) AS e ORDER BY n;
SELECT n, f.* FROM unnest('{1,2,31,32,33,63,64,65,1023,1024,1025,3000}'::int[]) AS n, LATERAL fetched('run ' || n) AS f ORDER BY n;
-- with and without keys
SELECT * FROM enqueue_some('mixed', 100, 3);
SELECT count(*), count(key), count(key_hash) FROM idem.jobs WHERE queue = 'mixed';
SELECT * FROM fetched('mixed');
SELECT * FROM enqueue_some('mixed', 100, 3);
-- rows of every size, also toasted ones
SELECT size, e.* FROM unnest('{1000,3000,30000,1000000}'::int[]) AS size, LATERAL enqueue_some('size ' || size, 1000000 / size + 2, 1, size) AS e ORDER BY size;
SELECT size, f.* FROM unnest('{1000,3000,30000,1000000}'::int[]) AS size, LATERAL fetched('size ' || size) AS f ORDER BY size;
SELECT outcome, count(*) FROM (SELECT string_agg(md5(i::text), '') AS s FROM generate_series(1, 31250) AS i) AS x,
  LATERAL idem_enqueue_many('toast', ARRAY[to_jsonb(s), '2', to_jsonb(s || 'x')], ARRAY['a', 'b', 'c']) GROUP BY 1;
SELECT key, length(payload #>> '{}') FROM idem_fetch('toast', 10);
-- every second key is a duplicate
SELECT * FROM enqueue_some('half', 200, 2);
DELETE FROM idem.jobs WHERE queue = 'half' AND key IS NULL;
SELECT * FROM enqueue_some('half', 200, 1);
SELECT count(*), count(DISTINCT key) FROM idem.jobs WHERE queue = 'half';
-- each key twice: the second one replaces the payload, also where the row has to move
SELECT outcome, count(*), count(DISTINCT job_id) FROM (SELECT array_agg(to_jsonb(repeat(i::text, 50)) ORDER BY i) AS payloads, array_agg('k' || i % 500 ORDER BY i) AS keys FROM generate_series(1, 1000) AS i) AS a,
  LATERAL idem_enqueue_many('moved', payloads, keys, on_duplicate => 'replace') GROUP BY 1 ORDER BY 1;
SELECT count(*), count(DISTINCT key), bool_and(left(payload #>> '{}', 3)::int >= 500 OR payload #>> '{}' ~ '^(1000)+$') AS newest FROM idem.jobs WHERE queue = 'moved';
SELECT count(*), count(DISTINCT job_id) FROM idem_fetch('moved', 10000);
-- done keys
SELECT outcome, count(*) FROM (SELECT array_agg(to_jsonb(i)) AS payloads, array_agg('k' || i) AS keys FROM generate_series(1, 100) AS i) AS a,
  LATERAL idem_enqueue_many('elapsed', payloads, keys, 'until_expired', key_ttl => '1 h') GROUP BY 1;
SELECT count(idem_complete(job_id, token, payload)) FROM idem_fetch('elapsed', 50);
SELECT outcome, count(*), bool_and(result::text::int = ord) AS results FROM (SELECT array_agg(to_jsonb(i)) AS payloads, array_agg('k' || i) AS keys FROM generate_series(1, 150) AS i) AS a,
  LATERAL idem_enqueue_many('elapsed', payloads, keys, 'until_expired', key_ttl => '1 h') GROUP BY 1 ORDER BY 1;
-- an additional index gets all entries; a lookup by number finds all jobs
CALL anew();
CREATE INDEX extra ON idem.jobs (payload);
SELECT * FROM enqueue_some('extra', 100, 2);
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT count(*) FROM idem.jobs WHERE payload >= '"1"' AND queue = 'extra';
SELECT count(*) FROM idem.jobs WHERE queue = 'extra';
RESET enable_seqscan;
RESET enable_bitmapscan;
SELECT count(*) FROM idem.jobs AS j, LATERAL idem_job(j.job_id) WHERE j.queue = 'extra';
DROP INDEX idem.extra;
DROP FUNCTION enqueue_some, fetched;
-- the counters count each job once
SELECT queue, enqueued, absorbed, replaced, done FROM idem.queue_stats WHERE queue IN ('half', 'elapsed', 'moved') ORDER BY queue;
-- a number that is in use: nothing is enqueued
CALL anew();
SELECT count(*) FROM idem_enqueue_many('first', array_fill('1'::jsonb, '{3}'));
ALTER SEQUENCE idem.jobs_job_id_seq RESTART 1;
DELETE FROM idem.jobs WHERE job_id IN (1, 2);
SELECT state, message, context FROM fails($$ SELECT idem_enqueue_many('second', array_fill('1'::jsonb, '{5}'), ARRAY['a', 'b', 'c', 'd', 'e']) $$);
SELECT job_id, queue FROM idem.jobs;
CALL anew();
-- undone with the transaction, or the savepoint
BEGIN;
SAVEPOINT s;
SELECT count(*) FROM idem_enqueue_many('undone', ARRAY['1', '2']::jsonb[], ARRAY['a', 'b']);
ROLLBACK TO s;
SELECT outcome FROM idem_enqueue_many('undone', ARRAY['1']::jsonb[], ARRAY['b']);
COMMIT;
SELECT key FROM idem.jobs WHERE queue = 'undone';

-- bad input: nothing is enqueued
CALL anew();
SELECT * FROM idem_enqueue_many(NULL, '{1}');
SELECT * FROM idem_enqueue_many('', '{1}');
SELECT * FROM idem_enqueue_many(repeat('q', 256), '{1}');
SELECT * FROM idem_enqueue_many('bad', NULL);
SELECT * FROM idem_enqueue_many('bad', NULL, '{a}');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a}');
SELECT * FROM idem_enqueue_many('bad', '{1}', '{a,b}');
SELECT * FROM idem_enqueue_many('bad', '{1}', '{}');
SELECT * FROM idem_enqueue_many('bad', '{}', '{a}');
SELECT * FROM idem_enqueue_many('bad', '{{1,2},{3,4}}');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{{a,b}}');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', ARRAY['a', '']);
SELECT * FROM idem_enqueue_many('bad', '{1,2}', ARRAY['a', repeat('x', 1025)]);
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', 'until_done');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', on_duplicate => 'ignore');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', if_running => 'rerun');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', 'until_expired');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', key_ttl => '1 h');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', on_duplicate => 'debounce');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', delay => '1 s', run_at => '2020-01-01');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', delay => '-1 s');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', run_at => 'infinity');
SELECT * FROM idem_enqueue_many('bad', '{1,2}', '{a,b}', max_attempts => 0);
SET idem.max_result_size = 20;
SELECT * FROM idem_enqueue_many('bad', ARRAY['1', to_jsonb(repeat('x', 100))]::jsonb[], '{a,b}');
RESET idem.max_result_size;
SELECT count(*) FROM idem.jobs;
BEGIN READ ONLY;
SELECT * FROM idem_enqueue_many('bad', '{1}');
ROLLBACK;
