--
-- idem_enqueue_many: one row per element, by the rules of idem_enqueue
--
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
