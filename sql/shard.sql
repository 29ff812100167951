--
-- Shards: the map of slots, and what a database refuses
--
\a\pset footer off
CALL anew();

-- all slots but that of this key
CREATE FUNCTION without(key text, scope text DEFAULT NULL) RETURNS int4multirange LANGUAGE sql AS $$
	SELECT '{[0,1024)}'::int4multirange - int4multirange(int4range(idem_slot(key, scope), idem_slot(key, scope) + 1)) $$;
-- a secret in each key that is refused: no message may show it
CREATE FUNCTION refuses(command text) RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN concat(f) ~ 'secret' THEN 'shows the key' ELSE concat_ws(': ', f.state, f.message, f.context) END FROM fails(command) AS f $$;

-- M1: the slot is in the low ten bits of the hash of the key
SELECT count(*) FILTER (WHERE s.slot <> s.hash & 1023) AS wrong, min(s.slot) >= 0 AND max(s.slot) <= 1023 AS in_bounds,
	   count(DISTINCT s.slot) > 900 AS spread, bool_or(s.hash < 0) AS with_negative
  FROM (SELECT idem_slot(i::text) AS slot, idem_key_hash(i::text) AS hash FROM generate_series(1, 4000) AS i) AS s;
SELECT idem_slot('k') = idem_slot('k', ''), idem_slot('k') = idem_slot('k', 'tenant');
SET idem.scope = 'tenant';
SELECT idem_slot('k') = idem_slot('k', 'tenant');
RESET idem.scope;
SELECT refuses('SELECT idem_slot(NULL)'), refuses($$ SELECT idem_slot('') $$);

-- Without a map everything is accepted, and numbers of jobs are those of the sequence
SELECT count(*) FROM idem.shard;
SELECT status FROM idem_claim('secret');
SELECT job_id, outcome FROM idem_enqueue('q', key => 'secret', scope => 'tenant');
SELECT refuses($$ SELECT idem_enqueue('q', key => 'k', scope => repeat('x', 256)) $$);
SELECT job_id FROM idem_enqueue_many('q', ARRAY['1', '2']::jsonb[], ARRAY['a', 'b'], scope => 'tenant');

-- M1: arguments
SELECT (f.f).* FROM (SELECT fails(format('SELECT idem_shard_set(%s)', a)) AS f
	FROM unnest(ARRAY[$$'{[-1,5)}'$$, $$'{[0,1025)}'$$, $$'{[5,)}'$$, $$'{(,5)}'$$, $$'{[1,2), [1024,1024]}'$$,
					  $$'{}', by => 'tenant'$$, $$'{}', by => NULL$$, $$'{}', number => -1$$]) AS a) AS f;
SELECT count(*) FROM idem.shard;

-- M5: rows of the slots that go; the job is from before the map, so that its slot is not known
SELECT * FROM fails($$ SELECT idem_shard_set(without('secret')) $$);
SELECT idem_forget('secret');
SELECT * FROM fails($$ SELECT idem_shard_set(without('secret')) $$);
-- all slots leave nothing behind; taking or keeping slots does not look at rows
SELECT idem_shard_set('{[0,1024)}', number => 7);
SELECT id, jobs_from, by, slots, number, system_identifier = (pg_control_system()).system_identifier AS here FROM idem.shard;

-- M6: numbers carry the slot; with a key that of the key, else one of this database
SELECT job_id >= s.jobs_from AS numbered, job_id % 1024 = idem_slot('x', 'tenant') AS of_key, job_id / 1024 AS value
  FROM idem_enqueue('q', key => 'x', scope => 'tenant'), idem.shard AS s;
SELECT ord, job_id >= s.jobs_from AS numbered, job_id % 1024 = idem_slot((ARRAY['m', 'n', 'o'])[ord], 'tenant') AS of_key, job_id / 1024 AS value
  FROM idem_enqueue_many('q', ARRAY['1', '2', '3']::jsonb[], ARRAY['m', 'n', 'o'], scope => 'tenant'), idem.shard AS s;
SET idem.scope = 'tenant';
SELECT outcome FROM idem_enqueue('q', key => 'x');
SELECT job_id % 1024 = idem_slot('y') AS of_key FROM idem_enqueue('q', key => 'y', delay => '1 day');
RESET idem.scope;
-- the dedup hash is still that of queue and key: another scope of the same shard is a duplicate
SELECT outcome FROM idem_enqueue('q', key => 'x', scope => 'other');
-- jobs from before the map are found, and absorb
SELECT outcome, job_id FROM idem_enqueue('q', key => 'secret');
SELECT state FROM idem_job(1);
SELECT idem_cancel(2), idem_cancel(3), idem_cancel(4);
SELECT status, detail FROM idem_doctor() WHERE "check" = 'job numbers';

-- the last job from before the map: as soon as it is gone, slots can go
SELECT * FROM fails($$ SELECT idem_shard_set(without('secret'), number => 7) $$);
SELECT idem_cancel(1);
SELECT status FROM idem_lease('secret', '1 min');
SELECT state, detail FROM fails($$ SELECT idem_shard_set(without('secret'), number => 7) $$);
SELECT token AS lease FROM idem.keys WHERE key = 'secret' \gset
SELECT job_id AS job FROM idem_enqueue('q', key => 'secret') \gset

-- with force, rows stay behind; M2: every function refuses the key, and none shows it
SELECT idem_shard_set(without('secret'), number => 7, force => true);
SELECT * FROM fails($$ SELECT idem_claim('secret') $$);
SELECT * FROM fails(format('SELECT idem_complete(%s, 1)', :job));
SELECT c.call, refuses(c.call)
  FROM (VALUES (1, $$ SELECT idem_claim('secret') $$),
			   (2, $$ SELECT idem_claim('secret', wait => '0') $$),
			   (3, $$ SELECT idem_claim_many(ARRAY['x', 'secret']) $$),
			   (4, $$ SELECT idem_lease('secret', '1 min') $$),
			   (5, $$ SELECT idem_call('secret', 'handler') $$),
			   (6, $$ SELECT idem_finish('secret') $$),
			   (8, $$ SELECT idem_finish_many(ARRAY['secret']) $$),
			   (9, $$ SELECT idem_release('secret') $$),
			   (14, $$ SELECT * FROM idem_get('secret') $$),
			   (15, $$ SELECT idem_forget('secret') $$),
			   (16, $$ SELECT idem_enqueue('q', key => 'secret') $$),
			   (17, $$ SELECT idem_enqueue('q', key => 'secret', delay => '1 day') $$),
			   (18, $$ SELECT idem_enqueue_many('q', ARRAY['1', '2']::jsonb[], ARRAY['x', 'secret']) $$)) AS c (n, call)
 ORDER BY c.n;
SELECT refuses(format('SELECT idem_%s', c.call)), c.n
  FROM (VALUES (1, format($$finish('secret', token => %s)$$, :lease)),
			   (2, format($$release('secret', %s)$$, :lease)),
			   (3, format($$renew('secret', %s, '1 min')$$, :lease)),
			   (4, format($$checkpoint('secret', %s, '1')$$, :lease)),
			   (5, format($$fence('secret', %s)$$, :lease)),
			   (6, format('complete(%s, 1)', :job)),
			   (7, format('complete_many(ARRAY[%s], ARRAY[1])', :job)),
			   (8, format($$fail(%s, 1, 'e')$$, :job)),
			   (9, format($$snooze(%s, 1, '1 min')$$, :job)),
			   (10, format($$heartbeat(ARRAY[%s], ARRAY[1], '1 min')$$, :job)),
			   (11, format('cancel(%s)', :job)),
			   (12, format('retry(%s)', :job)),
			   (13, format('job(%s)', :job)),
			   (14, format($$progress(%s, 1, '1', '1 min')$$, :job))) AS c (n, call)
 ORDER BY c.n;
-- the same key in another scope has another slot
SELECT status FROM idem_claim('secret', scope => 'tenant');
-- a fetch skips the job that was left behind, and takes the others; views show it
SELECT key FROM idem_fetch('q', batch => 10, lease => '1 min') ORDER BY key;
SELECT count(*) FROM idem.job_status WHERE job_id = :job;
SELECT count(*) FROM idem.key_status WHERE key = 'secret' AND scope = '';
SELECT "check", status, detail FROM idem_doctor() WHERE "check" IN ('shard map', 'foreign rows');
SELECT fix FROM idem_doctor() WHERE "check" = 'foreign rows' \gset
:fix

-- the slot comes back: everything works again, by the functions that look at the hint, too
SELECT idem_shard_set('{[0,1024)}', number => 7);
SELECT status FROM idem_get('secret');
SELECT idem_finish('secret', token => :lease);
SELECT job_id = :job AS left_behind FROM idem_fetch('q', lease => '1 min');
SELECT "check", status FROM idem_doctor() WHERE "check" IN ('shard map', 'foreign rows');

-- the hint of the last claim does not go round the map
SELECT token AS lease FROM idem_lease('secret 2', '1 min') \gset
SELECT idem_shard_set(without('secret 2'), force => true);
SELECT refuses(format($$ SELECT idem_finish('secret 2', token => %s) $$, :lease));
BEGIN;
SELECT idem_shard_set('{[0,1024)}');
SELECT status FROM idem_claim('secret 3');
-- also a row of this transaction stays behind
SELECT state FROM fails($$ SELECT idem_shard_set(without('secret 3')) $$);
SELECT idem_shard_set(without('secret 3'), force => true);
SELECT refuses($$ SELECT idem_finish('secret 3') $$);
ROLLBACK;
-- without a number the detail names the database
SELECT detail FROM fails($$ SELECT idem_claim('secret 2') $$);

-- rows that have expired do not count; a job that is done leaves its key and its history
CALL anew();
SELECT idem_shard_set('{[0,1024)}');
SET idem.clock_offset = '-2 d';
SELECT status FROM idem_claim('secret', ttl => '1 day');
RESET idem.clock_offset;
SELECT idem_shard_set(without('secret'));
SELECT idem_shard_set('{[0,1024)}');
SELECT idem_queue_set('keep', keep => '1 day', lease => '1 min');
SELECT outcome FROM idem_enqueue('keep', key => 'secret', dedup => 'until_expired', key_ttl => '1 day');
SELECT state, detail FROM fails($$ SELECT idem_shard_set(without('secret')) $$);
SELECT idem_complete(job_id, token) FROM idem_fetch('keep');
SELECT state, detail FROM fails($$ SELECT idem_shard_set(without('secret')) $$);
DELETE FROM idem.job_keys;
SELECT state, detail FROM fails($$ SELECT idem_shard_set(without('secret')) $$);
UPDATE idem.job_log SET expires_at = idem_clock();
SELECT idem_shard_set(without('secret'));

-- by scope: all keys of a scope have one slot
CALL anew();
SELECT idem_shard_set('{[0,1024)}', by => 'scope', number => 0);
SELECT idem_slot('a', 'tenant') = idem_slot('b', 'tenant'), count(DISTINCT idem_slot('a', i::text)) > 900 AS spread FROM generate_series(1, 4000) AS i;
SELECT idem_shard_set(without('x', 'tenant'), by => 'scope', number => 0);
SELECT refuses($$ SELECT idem_claim('secret', scope => 'tenant') $$), refuses($$ SELECT idem_enqueue('q', key => 'secret', scope => 'tenant') $$);
SELECT status FROM idem_claim('secret', scope => 'other');
SELECT job_id % 1024 = idem_slot('any', 'other') AS of_scope FROM idem_enqueue('q', key => 'k', scope => 'other');
SELECT "check", status, detail FROM idem_doctor() WHERE "check" IN ('shard map', 'foreign rows');
-- by key again: the slots in the numbers have lost their meaning, and the job has a key
SELECT state, detail FROM fails($$ SELECT idem_shard_set(without('none')) $$);
SELECT idem_shard_set('{[0,1024)}');
SELECT jobs_from > (SELECT max(job_id) FROM idem.jobs) AS anew FROM idem.shard;

-- a router has no slots: it refuses every key, and jobs without a key
CALL anew();
SELECT idem_shard_set('{}');
SELECT refuses($$ SELECT idem_claim('secret') $$), refuses($$ SELECT idem_enqueue('q', key => 'secret') $$);
SELECT * FROM fails($$ SELECT idem_enqueue('q') $$);
SELECT refuses($$ SELECT idem_enqueue_many('q', ARRAY['1', '2']::jsonb[]) $$);
SELECT idem_slot('k') BETWEEN 0 AND 1023;
SELECT detail FROM idem_doctor() WHERE "check" = 'shard map';

-- M6: two slots; jobs without a key take them in turn
SELECT idem_shard_set('{[3,4), [1023,1024)}');
SELECT job_id % 1024 AS slot, count(*) FROM idem_enqueue_many('q', array_fill('1'::jsonb, ARRAY[10])) GROUP BY 1 ORDER BY 1;

-- no map: everything is accepted again; the numbers go on carrying slots, and none comes twice
SELECT idem_shard_set(NULL);
SELECT by, slots, number FROM idem.shard;
SELECT status FROM idem_claim('secret');
SELECT job_id % 1024 = idem_slot('k') AS of_key, job_id > (SELECT max(job_id) FROM idem.jobs) AS higher FROM idem_enqueue('q', key => 'k');
SELECT job_id > (SELECT max(job_id) FROM idem.jobs) AS higher FROM idem_enqueue('q');

-- J13: the sequence was set back.  Values from before the map are not used again.
CALL anew();
SELECT setval('idem.jobs_job_id_seq', 200000);
SELECT idem_shard_set('{[0,1024)}');
SELECT setval('idem.jobs_job_id_seq', 1);
SELECT state, message FROM fails($$ SELECT idem_enqueue('q') $$);
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'job numbers';
SELECT fix FROM idem_doctor() WHERE "check" = 'job numbers' \gset
:fix
SELECT job_id / 1024 AS value FROM idem_enqueue('q');
-- a job number that is too high for the sequence
SELECT setval('idem.jobs_job_id_seq', 200001);
UPDATE idem.jobs SET job_id = job_id + 1024;
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'job numbers';
SELECT fix FROM idem_doctor() WHERE "check" = 'job numbers' \gset
:fix
SELECT job_id / 1024 AS value FROM idem_enqueue('q');
-- M6: no map if the values of the sequence are too high to carry slots
CALL anew();
SELECT setval('idem.jobs_job_id_seq', 18014398509481984);
SELECT state, message FROM fails($$ SELECT idem_shard_set('{[0,1024)}') $$);
SELECT count(*) AS maps FROM idem.shard;
-- M6: the number of the key of a done job counts, too: it would seem to carry a slot
CALL anew();
SELECT setval('idem.jobs_job_id_seq', 5000);
SELECT outcome FROM idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 day');
SELECT idem_complete(job_id, token) FROM idem_fetch('q');
DELETE FROM idem.job_log;
SELECT setval('idem.jobs_job_id_seq', 1);
SELECT state, message FROM fails($$ SELECT idem_shard_set('{[0,1024)}') $$);
-- cached values from before the map are skipped
CALL anew();
ALTER SEQUENCE idem.jobs_job_id_seq CACHE 20;
SELECT job_id FROM idem_enqueue('q');
SELECT idem_shard_set('{[0,1024)}');
SELECT jobs_from / 1024 AS value FROM idem.shard;
SELECT job_id / 1024 AS value FROM idem_enqueue('q');
ALTER SEQUENCE idem.jobs_job_id_seq CACHE 1;
UPDATE idem.shard SET system_identifier = 0;
-- the map was set on another server
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'shard map';
SELECT idem_shard_set(s.slots, s.by, s.number, keep_id => s.database_id) FROM idem.shard AS s;
SELECT status FROM idem_doctor() WHERE "check" = 'shard map';
UPDATE idem.shard SET database_oid = (SELECT oid FROM pg_database WHERE datname = 'template1');
SELECT status, detail FROM idem_doctor() WHERE "check" = 'shard map';
SELECT idem_shard_set(s.slots, s.by, s.number) FROM idem.shard AS s;
SELECT status FROM idem_doctor() WHERE "check" = 'shard map';
-- the sequence is behind the jobs: no map
CALL anew();
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue) VALUES (1000000, now(), now(), 0, 'q');
SELECT state, message FROM fails($$ SELECT idem_shard_set('{[0,1024)}') $$);

-- no number is left
CALL anew();
SELECT idem_shard_set('{[0,1024)}');
SELECT setval('idem.jobs_job_id_seq', 9007199254740990);
SELECT job_id > 0 AS ok FROM idem_enqueue('q');
SELECT * FROM fails($$ SELECT idem_enqueue('q') $$);

-- in a parallel query
CALL anew();
SELECT idem_shard_set(without('secret'));
\c
SELECT set_config(CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'debug_parallel_query' ELSE 'force_parallel_mode' END, 'on', false);
SELECT idem_slot('k') BETWEEN 0 AND 1023 AS slot, (SELECT count(*) FROM idem_get('k')) AS keys;
SELECT refuses($$ SELECT * FROM idem_get('secret') $$);
\c

-- privileges: only operators set the map
CREATE ROLE app;
CREATE ROLE operator;
SELECT idem_grant('app', 'app'), idem_grant('operator', 'admin');
SET ROLE app;
SELECT state FROM fails($$ SELECT idem_shard_set(NULL) $$);
SELECT state FROM fails($$ SELECT * FROM idem.shard $$);
SELECT idem_slot('k') BETWEEN 0 AND 1023;
SELECT refuses($$ SELECT idem_claim('secret') $$);
SELECT status FROM idem_claim('other');
SET ROLE operator;
SELECT idem_shard_set('{[0,1024)}', number => 1);
SELECT number FROM idem.shard;
RESET ROLE;
SELECT idem_revoke('app', 'app'), idem_revoke('operator', 'admin');
DROP ROLE app, operator;

-- read-only transactions
BEGIN READ ONLY;
SELECT idem_slot('k') BETWEEN 0 AND 1023;
SELECT idem_shard_set(NULL);
ROLLBACK;
-- Citus without a map
CALL anew();
BEGIN;
UPDATE pg_extension SET extname = 'citus' WHERE extname = 'plpgsql';
SELECT status, fix FROM idem_doctor() WHERE "check" = 'shard map';
SELECT idem_shard_set('{}');
SELECT status FROM idem_doctor() WHERE "check" = 'shard map';
ROLLBACK;
CALL anew();

-- J14: a fetch remembers no jobs of another shard as jobs to skip, because their slot can come back
SELECT idem_shard_set('{[0,1024)}', by => 'scope');
SELECT count(*) FROM idem_enqueue_many('q', array_fill('1'::jsonb, ARRAY[2000]), ARRAY(SELECT i::text FROM generate_series(1, 2000) AS i), scope => 'tenant');
SELECT idem_shard_set(without('any', 'tenant'), by => 'scope', force => true);
SELECT count(*) FROM idem_fetch('q', lease => '1 min');
SELECT count(*) FROM idem_fetch('q', lease => '1 min');
SELECT idem_shard_set('{[0,1024)}', by => 'scope');
SELECT count(*) FROM idem_fetch('q', batch => 10, lease => '1 min');
CALL anew();

-- T1: the job of a tick has a slot of this database, whatever the slot of its key, as a job without a key
SELECT idem_shard_set('{[3,4), [1023,1024)}');
CALL set_clock('2050-01-01 00:00+00');
SELECT count(idem_schedule('s' || i, 'q', '@hourly')) FROM generate_series(1, 10) AS i;
CALL set_clock('2050-01-01 01:00+00');
SELECT idem_tick();
SELECT j.job_id % 1024 AS slot, count(*), bool_and(j.job_id >= s.jobs_from) AS numbered, bool_and(j.job_id = c.last_job) AS last
  FROM idem.jobs AS j, idem.shard AS s, idem.schedules AS c WHERE c.name = split_part(j.key, '@', 1) GROUP BY 1 ORDER BY 1;
SELECT count(*) FROM idem_fetch('q', 10, lease => '1 min');
SELECT "check", status FROM idem_doctor() WHERE "check" IN ('shard map', 'foreign rows', 'schedules') ORDER BY 1;
SELECT bool_and(status = 'completed') AS completed FROM (SELECT array_agg(job_id) AS ids, array_agg(token) AS tokens FROM idem.jobs) AS j, idem_complete_many(j.ids, j.tokens);
-- by scope, too: idem.scope of the session does not matter
SELECT idem_shard_set('{[3,4)}', by => 'scope');
SET idem.scope = 'tenant';
CALL set_clock('2050-01-01 02:00+00');
SELECT idem_tick();
RESET idem.scope;
SELECT DISTINCT job_id % 1024 AS slot FROM idem.jobs;
-- a router: each schedule fails, stays due, and ticks as soon as there are slots
DELETE FROM idem.schedules WHERE name NOT IN ('s1', 's2');
DELETE FROM idem.jobs;
SELECT idem_shard_set('{}');
CALL set_clock('2050-01-01 03:00+00');
SELECT idem_tick();
SELECT count(*), min(next_tick) = '2050-01-01 03:00+00' AS due FROM idem.schedules;
SELECT idem_shard_set('{[0,1024)}');
SELECT idem_tick();
RESET idem.clock_offset;
CALL anew();

-- the planner expects little work, so that JIT does not set in with each call of the doctor
DO $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (FORMAT JSON) SELECT * FROM idem_internal.checks_shard' INTO plan;
	ASSERT (plan #>> '{0,Plan,Total Cost}')::float < 10000, plan #>> '{0,Plan,Total Cost}';
END $$;
DROP FUNCTION without(text, text), refuses(text);
