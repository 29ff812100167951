--
-- Queues: idem_queue_set, idem_queue_drop, idem_pause, idem_resume.
-- The settings of a queue apply where a call gives no argument.
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

-- a queue needs no declaration, and its use does not create one
SELECT job_id FROM idem_enqueue('undeclared');
SELECT job_id FROM idem_fetch('undeclared');
SELECT count(*) FROM idem.queues;
-- settings that are not given stay as they are
SELECT idem_queue_set('q');
SELECT * FROM idem.queues;
SELECT idem_queue_set('q', dedup => 'until_expired', key_ttl => '1 h', max_attempts => 3);
SELECT idem_queue_set('q', on_duplicate => 'replace', if_running => 'rerun', include_scheduled => true);
SELECT idem_queue_set('q', debounce_max => '10 min', lease => '1 min', backoff => '5 s', backoff_max => '1 h');
SELECT idem_queue_set('q', keep => '1 day', keep_dead => '30 days', max_attempts => 4);
\x on
SELECT * FROM idem.queues;
\x off
-- undone by rollback, also by rollback to a savepoint
BEGIN;
SELECT idem_queue_set('q', max_attempts => 5);
SAVEPOINT s;
SELECT idem_queue_set('q', max_attempts => 6);
SELECT job_id FROM idem_enqueue('q');
SELECT max_attempts FROM idem_job(2);
ROLLBACK TO s;
SELECT job_id FROM idem_enqueue('q');
SELECT max_attempts FROM idem_job(3);
ROLLBACK;
SELECT job_id FROM idem_enqueue('q');
SELECT max_attempts FROM idem_job(4);
-- settings apply to one queue only
SELECT job_id FROM idem_enqueue('Q');
SELECT max_attempts FROM idem_job(5);

-- several calls in one statement: each one sees the settings that the one before it has left
CALL anew();
SELECT idem_queue_set('many', max_attempts => 5);
SELECT job_id FROM idem_enqueue('many');
SELECT (SELECT max_attempts FROM idem_job(1)) AS a, idem_queue_set('many', max_attempts => 6), (SELECT max_attempts FROM idem_job(1)) AS b,
	   idem_pause('many'), (SELECT count(*) FROM idem_fetch('many')) AS fetched, idem_resume('many');
-- a session reads settings again only if they have changed or a second has passed
CREATE FUNCTION scans() RETURNS bigint LANGUAGE sql AS
	$$ SELECT pg_stat_get_xact_numscans('idem.queues_pkey'::regclass) $$;
BEGIN;
SELECT scans() AS before \gset
SELECT count(max_attempts) FROM generate_series(1, 100) AS i, LATERAL idem_job(1 + 0 * i);
SELECT count(outcome) FROM generate_series(1, 100) AS i, LATERAL idem_enqueue('undeclared ' || i % 50);
SELECT scans() - :before < 200 AS cached;
ROLLBACK;
-- with more queues than it caches, and with names of all lengths
SELECT count(*) FROM generate_series(1, 255) AS i, LATERAL idem_queue_set(repeat('x', i), max_attempts => i);
SELECT count(outcome) FROM generate_series(1, 255) AS i, LATERAL idem_enqueue(repeat('x', i));
SELECT count(*) FROM idem.jobs AS j, LATERAL idem_job(job_id) AS i WHERE i.max_attempts = length(j.queue);
-- rows that are written without the functions of idem count after a second at the latest
UPDATE idem.queues SET max_attempts = 7 WHERE queue = 'many';
CALL wait_for($$ max_attempts = 7 FROM idem_job(1) $$);
DELETE FROM idem.queues WHERE queue = 'many';
CALL wait_for($$ max_attempts = 25 FROM idem_job(1) $$);
INSERT INTO idem.queues (queue, max_attempts) VALUES ('many', 8);
CALL wait_for($$ max_attempts = 8 FROM idem_job(1) $$);
DROP FUNCTION scans;

-- dedup
CALL anew();
SELECT idem_queue_set('dedup', dedup => 'until_executed');
SELECT job_id FROM idem_enqueue('dedup', '1', 'k');
SELECT job_id FROM idem_fetch('dedup', lease => '1 h');
SELECT job_id, outcome FROM idem_enqueue('dedup', '2', 'k');
SELECT job_id, outcome FROM idem_enqueue('dedup', '2', 'k', if_running => 'rerun');
SELECT idem_cancel(2);
-- an argument of the call overrides the setting
SELECT job_id, outcome FROM idem_enqueue('dedup', '3', 'k', 'until_executing');
SELECT job_id FROM idem_enqueue('dedup', '3', 'k', 'until_executing', if_running => 'rerun');
-- if_running
SELECT idem_cancel(3);
SELECT idem_queue_set('dedup', if_running => 'rerun');
SELECT job_id, outcome FROM idem_enqueue('dedup', '4', 'k');
-- for another strategy the follow-up job is a waiting job
SELECT job_id, outcome FROM idem_enqueue('dedup', '5', 'k', 'until_executing');
SELECT payload FROM idem_job(4);
SELECT idem_cancel(4);
SELECT job_id, outcome FROM idem_enqueue('dedup', '5', 'k', if_running => 'skip');
-- no error where it does not apply, because it comes from the queue and not from the call
SELECT job_id, outcome FROM idem_enqueue('dedup', '6', 'k', 'until_executing');
-- on_duplicate
SELECT idem_queue_set('dup', on_duplicate => 'replace');
SELECT job_id, outcome FROM idem_enqueue('dup', '1', 'k');
SELECT job_id, outcome FROM idem_enqueue('dup', '2', 'k');
SELECT job_id, outcome FROM idem_enqueue('dup', '3', 'k', on_duplicate => 'skip');
SELECT payload FROM idem_job(6);
SELECT idem_queue_set('dup', on_duplicate => 'error');
SELECT job_id FROM idem_enqueue('dup', '4', 'k');
SELECT job_id, outcome FROM idem_enqueue('dup', '5');
-- debounce as the default requires a delay in every call with a key, and only there
SELECT idem_queue_set('dup', on_duplicate => 'debounce');
SELECT job_id FROM idem_enqueue('dup', '6', 'k');
SELECT job_id, outcome FROM idem_enqueue('dup', '7', 'k', delay => '1 min');
SELECT job_id, outcome FROM idem_enqueue('dup', '8');
SELECT job_id, outcome FROM idem_enqueue('dup', '9', delay => '1 min');
SELECT job_id, outcome FROM idem_enqueue('dup', '10', 'k', on_duplicate => 'skip');
-- key_ttl
SELECT idem_queue_set('ttl', dedup => 'until_expired', key_ttl => '10 min');
SELECT job_id FROM idem_enqueue('ttl', '1', 'k');
SELECT job_id FROM idem_enqueue('ttl', '1', 'l', key_ttl => '1 h');
SELECT count(idem_complete(job_id, token, '"ok"')) FROM idem_fetch('ttl', 10);
SELECT job_id, outcome FROM idem_enqueue_many('ttl', '{2,2}', '{k,l}');
SET idem.clock_offset = '11 min';
SELECT outcome FROM idem_enqueue_many('ttl', '{3,3}', '{k,l}');
RESET idem.clock_offset;
-- no ttl is needed without a key, and it is ignored with another dedup
SELECT outcome FROM idem_enqueue('ttl', '4');
SELECT outcome FROM idem_enqueue('ttl', '5', 'm', 'until_executing');
SELECT count(idem_complete(job_id, token)) FROM idem_fetch('ttl', 10);
SELECT outcome FROM idem_enqueue('ttl', '6', 'm');
-- until_expired needs a ttl from the call or the queue
SELECT idem_queue_set('no ttl', dedup => 'until_expired');
SELECT job_id FROM idem_enqueue('no ttl', '1', 'k');
SELECT outcome FROM idem_enqueue('no ttl', '1', 'k', key_ttl => '1 min');
SELECT outcome FROM idem_enqueue('no ttl', '1', 'k', 'until_executed');
SELECT outcome FROM idem_enqueue('no ttl', '1');
SELECT idem_queue_set('ttl only', key_ttl => '1 min');
SELECT outcome FROM idem_enqueue('ttl only', '1', 'k');
SELECT outcome FROM idem_enqueue('ttl only', '1', 'l', 'until_expired');
SELECT key, key_until - enqueued_at AS ttl FROM idem.jobs WHERE queue = 'ttl only' ORDER BY key;
-- include_scheduled
CALL anew();
SELECT idem_queue_set('incl', include_scheduled => true);
SELECT job_id, outcome FROM idem_enqueue('incl', '1', 'k', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('incl', '2', 'k', delay => '2 h');
SELECT job_id, outcome FROM idem_enqueue('incl', '3', 'k', delay => '2 h', include_scheduled => false);
SELECT idem_queue_set('incl', include_scheduled => false);
SELECT job_id, outcome FROM idem_enqueue('incl', '4', 'k', delay => '2 h');
SELECT job_id, outcome FROM idem_enqueue('incl', '5', 'k', delay => '2 h', include_scheduled => true);
-- debounce implies it, whatever the queue sets
SELECT job_id, outcome FROM idem_enqueue('incl', '6', 'k', on_duplicate => 'debounce', delay => '2 h');
-- debounce_max: see job_scheduled; lease and max_attempts: see job_fetch; backoff: see job_end; keep: see job_history
-- the settings of a queue also apply to existing jobs
SELECT job_id FROM idem_enqueue('live', '1');
SELECT max_attempts FROM idem_job(4);
SELECT idem_queue_set('live', max_attempts => 1, keep => '1 h');
SELECT max_attempts FROM idem_job(4);
SELECT idem_fail(job_id, token) FROM idem_fetch('live');
-- lease zero removes the lease of the queue
SELECT idem_queue_set('live', lease => '1 h');
SELECT idem_queue_set('live', lease => '0');
SELECT job_id FROM idem_enqueue('live', '2');
SELECT job_id FROM idem_fetch('live');
SELECT state FROM idem_job(5);

-- pause and resume return whether they changed anything
CALL anew();
SELECT idem_pause('p');
SELECT idem_pause('p');
SELECT paused_at BETWEEN idem_clock() - interval '1 min' AND idem_clock() AS paused FROM idem.queues WHERE queue = 'p';
SELECT job_id FROM idem_enqueue('p', '1', 'k');
SELECT job_id, outcome FROM idem_enqueue('p', '2', 'k');
SELECT job_id FROM idem_fetch('p');
-- idem_queue_set does not end the pause
SELECT idem_queue_set('p', max_attempts => 3);
SELECT job_id FROM idem_fetch('p');
SELECT idem_resume('p');
SELECT idem_resume('p');
SELECT idem_resume('never paused');
SELECT max_attempts, paused_at FROM idem.queues WHERE queue = 'p';
SELECT job_id, token FROM idem_fetch('p', lease => '1 h') \gset
-- running jobs are not stopped
SELECT idem_pause('p');
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
SELECT idem_complete(:job_id, :token);
SELECT max_attempts FROM idem.queues WHERE queue = 'p';
BEGIN;
SELECT idem_resume('p');
SELECT job_id FROM idem_enqueue('p', '3');
SELECT job_id FROM idem_fetch('p');
ROLLBACK;
SELECT job_id FROM idem_enqueue('p', '3');
SELECT job_id FROM idem_fetch('p');

-- pausing a queue that was never used or declared works, with a notice, and declares it
CALL anew();
\set VERBOSITY default
SELECT idem_pause('typo');
\set VERBOSITY terse
SELECT idem_pause('typo');
SELECT idem_resume('typo');
SELECT idem_pause('typo');
SELECT idem_resume('never');
-- declared, live jobs, history: used
SELECT idem_queue_set('declared');
SELECT idem_pause('declared');
SELECT job_id FROM idem_enqueue('live', delay => '1 h');
SELECT idem_pause('live');
SELECT job_id FROM idem_enqueue('past');
SELECT idem_cancel(2);
SELECT idem_pause('past');
SELECT idem_pause('pas');
\set VERBOSITY sqlstate

-- drop: removes the settings, if there are no live jobs
CALL anew();
SELECT idem_queue_drop('never declared');
SELECT idem_queue_set('d', max_attempts => 1, on_duplicate => 'replace');
SELECT job_id FROM idem_enqueue('d', '1', 'k');
SELECT idem_queue_drop('d');
SELECT job_id, token FROM idem_fetch('d', lease => '1 h') \gset
SELECT idem_queue_drop('d');
SELECT idem_complete(:job_id, :token);
SELECT job_id FROM idem_enqueue('d', '2', delay => '1 h');
SELECT idem_queue_drop('d');
SELECT idem_cancel(2);
-- neither jobs of another queue nor the history prevent it
SELECT job_id FROM idem_enqueue('da');
SELECT idem_pause('d');
BEGIN;
SELECT idem_queue_drop('d');
ROLLBACK;
SELECT max_attempts FROM idem.queues WHERE queue = 'd';
SELECT idem_queue_drop('d');
SELECT idem_queue_drop('d');
SELECT count(*) FROM idem.queues;
SELECT job_id FROM idem_enqueue('d', '3', 'k');
SELECT job_id, outcome FROM idem_enqueue('d', '4', 'k');
SELECT max_attempts FROM idem_job(4);
SELECT job_id FROM idem_fetch('d');
SELECT state FROM idem_job(2);

-- bad input
SELECT idem_queue_set(NULL);
SELECT idem_queue_set('');
SELECT idem_queue_set(repeat('x', 256));
SELECT idem_queue_set('bad', dedup => 'until_done');
SELECT idem_queue_set('bad', dedup => '');
SELECT idem_queue_set('bad', dedup => 'UNTIL_EXECUTED');
SELECT idem_queue_set('bad', on_duplicate => 'ignore');
SELECT idem_queue_set('bad', if_running => 'replace');
SELECT idem_queue_set('bad', key_ttl => '0');
SELECT idem_queue_set('bad', key_ttl => '-1 s');
SELECT idem_queue_set('bad', key_ttl => '101 years');
SELECT idem_queue_set('bad', debounce_max => '0');
SELECT idem_queue_set('bad', debounce_max => '-1 s');
SELECT idem_queue_set('bad', lease => '-1 s');
SELECT idem_queue_set('bad', lease => '31 days');
SELECT idem_queue_set('bad', max_attempts => 0);
SELECT idem_queue_set('bad', max_attempts => -1);
SELECT idem_queue_set('bad', backoff => '0');
SELECT idem_queue_set('bad', backoff => '-1 s');
SELECT idem_queue_set('bad', backoff_max => '0');
SELECT idem_queue_set('bad', keep => '-1 s');
SELECT idem_queue_set('bad', keep_dead => '-1 s');
SELECT idem_queue_set('bad', keep_dead => '101 years');
SELECT idem_queue_set('bad', owner => 'idem_no_such_role');
SELECT idem_queue_drop(NULL);
SELECT idem_queue_drop('');
SELECT idem_pause(NULL);
SELECT idem_pause('');
SELECT idem_resume(NULL);
SELECT idem_resume(repeat('x', 256));
SELECT count(*) FROM idem.queues;
BEGIN READ ONLY;
SELECT idem_queue_set('q');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_queue_drop('q');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_pause('q');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_resume('q');
ROLLBACK;
-- the limits themselves are accepted
SELECT idem_queue_set(repeat('x', 255), key_ttl => '100 years', debounce_max => '1 us', lease => '30 days', max_attempts => 2147483647,
	backoff => '1 us', backoff_max => '100 years', keep => '0', keep_dead => '100 years');
CALL anew();
