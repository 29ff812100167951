--
-- idem_job_by_key, idem_cancel_by_key: rule J19 of the contract
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

-- nothing is known about the key
SELECT * FROM idem_job_by_key('mail', 'k');
SELECT idem_cancel_by_key('mail', 'k');

-- it waits; the row is that of idem_job
SELECT job_id FROM idem_enqueue('mail', '"one"', 'k', headers => '{"a": 1}');
SELECT job_id, queue, state, key, payload, priority, attempt, max_attempts, headers, run_at IS NULL AS "no run_at", ended_at FROM idem_job_by_key('mail', 'k');
SELECT (SELECT k FROM idem_job_by_key('mail', 'k') AS k) = (SELECT j FROM idem_job(1) AS j) AS same;
-- other keys, and the same key of other queues, do not matter
SELECT job_id FROM idem_enqueue('mail', NULL, 'K');
SELECT job_id FROM idem_enqueue('post', NULL, 'k');
SELECT job_id FROM idem_enqueue('mail');
SELECT job_id FROM idem_job_by_key('mail', 'k');

-- it runs, a second one waits, and one is scheduled, which ignores its key: newest number first
SELECT job_id, token FROM idem_fetch('mail', lease => '1 h') \gset
SELECT job_id FROM idem_enqueue('mail', '"two"', 'k');
SELECT job_id FROM idem_enqueue('mail', '"three"', 'k', delay => '1 h');
SELECT job_id, state, payload FROM idem_job_by_key('mail', 'k');
-- the history follows, the last end first
SELECT idem_fail(:job_id, :token, 'no', dead => true);
SELECT idem_cancel(6);
SELECT job_id, state, error FROM idem_job_by_key('mail', 'k');
SELECT idem_queue_set('mail', keep => '1 d');
SELECT idem_complete(job_id, token, '"sent"') FROM idem_fetch('mail', 3) WHERE job_id = 5;
SELECT job_id, state, result FROM idem_job_by_key('mail', 'k');
-- at most so many; the first one is what became of the key
SELECT job_id, state FROM idem_job_by_key('mail', 'k', 1);
SELECT job_id, state FROM idem_job_by_key('mail', 'k', max_jobs => 2);
SELECT job_id FROM idem_enqueue_many('mail', '{1,2,3,4,5}', '{k,k,k,k,k}', delay => '2 h');
SELECT job_id FROM idem_job_by_key('mail', 'k', 3);
SELECT job_id, state FROM idem_job_by_key('mail', 'k', 6);
SELECT count(*) FROM idem_job_by_key('mail', 'k', 10000);

-- states as the statement sees them: the open transaction shows its own
BEGIN;
SELECT job_id FROM idem_enqueue('mail', NULL, 'new');
SELECT job_id, state FROM idem_job_by_key('mail', 'new');
SELECT idem_cancel_by_key('mail', 'new');
SELECT job_id, state FROM idem_job_by_key('mail', 'new');
ROLLBACK;
SELECT job_id, state FROM idem_job_by_key('mail', 'new');
-- a read-only transaction may look, and not cancel
BEGIN READ ONLY;
SELECT job_id, state FROM idem_job_by_key('mail', 'K');
SELECT idem_cancel_by_key('mail', 'K');
ROLLBACK;

-- cancel: all that have not ended, also those that ignore their key
SELECT idem_cancel_by_key('mail', 'k');
SELECT idem_cancel_by_key('mail', 'k');
SELECT job_id, state FROM idem_job_by_key('mail', 'k') ORDER BY job_id;
SELECT job_id, queue, key FROM idem.jobs ORDER BY job_id;
-- a leased job, and its follow-up job; the worker comes too late
CALL anew();
SELECT job_id FROM idem_enqueue('mail', '1', 'k', 'until_executed');
SELECT job_id, token FROM idem_fetch('mail', lease => '1 h') \gset
SELECT job_id, outcome FROM idem_enqueue('mail', '2', 'k', 'until_executed', if_running => 'rerun');
SELECT job_id, state FROM idem_job_by_key('mail', 'k');
SELECT idem_cancel_by_key('mail', 'k');
SELECT idem_complete(:job_id, :token);
SELECT job_id, state, worker FROM idem_job_by_key('mail', 'k') ORDER BY job_id;
-- until_expired: an ended key has no job, unless the queue keeps done jobs
SELECT job_id FROM idem_enqueue('once', '1', 'e', 'until_expired', key_ttl => '1 d');
SELECT idem_complete(job_id, token, '"ok"') FROM idem_fetch('once');
SELECT outcome, result FROM idem_enqueue('once', '1', 'e', 'until_expired', key_ttl => '1 d');
SELECT * FROM idem_job_by_key('once', 'e');

-- keys with the same hash are told apart by their text
CALL anew();
SELECT job_id FROM idem_enqueue('mail', '1', 'a');
SELECT job_id FROM idem_enqueue('mail', '1', 'b', delay => '1 h');
SELECT job_id FROM idem_enqueue('mail', '1', 'c');
SELECT idem_cancel(3);
UPDATE idem.jobs SET key_hash = h.key_hash FROM (SELECT key_hash FROM idem.jobs WHERE job_id = 1) AS h WHERE key = 'b';
UPDATE idem.job_log SET key_hash = h.key_hash FROM (SELECT key_hash FROM idem.jobs WHERE job_id = 1) AS h;
SELECT job_id, key FROM idem_job_by_key('mail', 'a');
SELECT idem_cancel_by_key('mail', 'a');
SELECT job_id, key FROM idem.jobs;

-- a hot key: the work does not grow with the number of jobs that have ended
CALL anew();
SELECT idem_queue_set('hot', keep => '1 d');
SELECT count(*) FROM idem_enqueue_many('hot', (SELECT array_agg(to_jsonb(i)) FROM generate_series(1, 3000) AS i), array_fill('k'::text, ARRAY[3000]), delay => '1 h');
SELECT idem_cancel_by_key('hot', 'k');
VACUUM idem.jobs;
SELECT pages($$ SELECT * FROM idem_job_by_key('hot', 'k', 1) $$) > 0 AS "cache is filled";
SELECT pages($$ SELECT * FROM idem_job_by_key('hot', 'k', 1) $$) < 20 AS bounded;
SELECT job_id, state FROM idem_job_by_key('hot', 'k', 1);

-- a queue of another role
CREATE ROLE idem_by_key_app;
SELECT idem_grant('idem_by_key_app', 'app');
CREATE ROLE idem_by_key_team;
SELECT idem_queue_set('team', owner => 'idem_by_key_team');
SELECT job_id FROM idem_enqueue('team', '"secret"', 'k');
SET ROLE idem_by_key_app;
SELECT * FROM idem_job_by_key('team', 'k');
SELECT idem_cancel_by_key('team', 'k');
-- whether a key has jobs is not told, either
SELECT * FROM idem_job_by_key('team', 'none');
SELECT idem_cancel_by_key('team', 'none');
RESET ROLE;
GRANT idem_by_key_team TO idem_by_key_app;
SET ROLE idem_by_key_app;
SELECT job_id, payload FROM idem_job_by_key('team', 'k');
SELECT idem_cancel_by_key('team', 'k');
RESET ROLE;
SELECT idem_revoke('idem_by_key_app', 'app');
DROP ROLE idem_by_key_app, idem_by_key_team;

-- shards (M2): another shard has the slot of the key; what was left behind is not ours
CALL anew();
SELECT idem_shard_set('{[0,1024)}');
SELECT outcome FROM idem_enqueue('mail', '"left"', 'k');
SELECT outcome FROM idem_enqueue('mail', '"ours"', 'k', delay => '1 h', scope => 'other');
SELECT idem_slot('k') AS slot \gset
SELECT idem_shard_set(format('{[0,%s),[%s,1024)}', :slot, :slot + 1)::int4multirange, force => true);
SELECT * FROM idem_job_by_key('mail', 'k');
SELECT idem_cancel_by_key('mail', 'k');
SELECT payload, state FROM idem_job_by_key('mail', 'k', scope => 'other');
SELECT idem_cancel_by_key('mail', 'k', 'other');
SELECT payload, state FROM idem_job_by_key('mail', 'k', scope => 'other');
SELECT payload FROM idem.jobs;
CALL anew();

-- arguments
\set VERBOSITY default
SELECT * FROM fails($$ SELECT * FROM idem_job_by_key(NULL, 'k') $$);
SELECT state, message FROM fails($$ SELECT * FROM idem_job_by_key('', 'k') $$);
SELECT * FROM fails($$ SELECT * FROM idem_job_by_key('mail', NULL) $$);
SELECT state, message FROM fails($$ SELECT * FROM idem_job_by_key('mail', '') $$);
SELECT state, detail FROM fails(format('SELECT * FROM idem_job_by_key(%L, %L)', 'mail', repeat('k', 1025)));
SELECT * FROM fails($$ SELECT * FROM idem_job_by_key('mail', 'k', NULL) $$);
SELECT * FROM fails($$ SELECT * FROM idem_job_by_key('mail', 'k', 0) $$);
SELECT state, detail FROM fails($$ SELECT * FROM idem_job_by_key('mail', 'k', -1) $$);
SELECT state, detail FROM fails($$ SELECT * FROM idem_job_by_key('mail', 'k', 10001) $$);
SELECT state, detail FROM fails(format('SELECT * FROM idem_job_by_key(%L, %L, scope => %L)', 'mail', 'k', repeat('s', 256)));
SELECT state, message FROM fails($$ SELECT idem_cancel_by_key(NULL, 'k') $$);
SELECT state, message FROM fails($$ SELECT idem_cancel_by_key('', 'k') $$);
SELECT state, message FROM fails($$ SELECT idem_cancel_by_key('mail', NULL) $$);
SELECT state, message FROM fails($$ SELECT idem_cancel_by_key('mail', '') $$);
SELECT state, message FROM fails(format('SELECT idem_cancel_by_key(%L, %L, %L)', 'mail', 'k', repeat('s', 256)));
