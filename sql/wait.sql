--
-- idem_wait, idem_wait_any, idem_wait_job, idem_wait_key: arguments, where they may be called, and
-- privileges: "Rules of waiting" of the contract.  Nothing here sleeps for longer than a millisecond:
-- test/isolation has the rest.
--
\a\pset footer off
CALL anew();

-- timeout 0: look once, return at once
CALL idem_wait('q', '0');
CALL idem_wait('q', '0', true);
CALL idem_wait_any(ARRAY['q'], '0');
CALL idem_wait_any(ARRAY['q', 'q'], '0', true, 'r');
CALL idem_wait_any(array_fill('q'::text, ARRAY[1000]), '0');
CALL idem_wait_job(1, '0');
CALL idem_wait_job(-1, '0', 'done', '1');
CALL idem_wait_key('k', '0');
CALL idem_wait_key('k', '0', 's', 'finished', '1');
-- and sleep, without an answer
CALL idem_wait('q', '1 ms');
CALL idem_wait_any(ARRAY['q', 'r'], '1 ms');
SELECT job_id FROM idem_enqueue('later', delay => '1 h');
CALL idem_wait_job(1, '1 ms');
SELECT status FROM idem_lease('k', '1 h');
CALL idem_wait_key('k', '1 ms');

-- there is an answer already, whatever the timeout is
SELECT outcome FROM idem_enqueue('q');
CALL idem_wait('q');
CALL idem_wait('q', '100 years');
CALL idem_wait('q', '0');
CALL idem_wait(queue => 'q', timeout => '1 h');
CALL idem_wait_any(ARRAY['r', 'q', 's']);
SELECT outcome FROM idem_enqueue('s');
CALL idem_wait_any(ARRAY['r', 'q', 's']);
CALL idem_wait_any(ARRAY['r', 's', 'q']);
CALL idem_wait_any('[5:6]={r,q}'::text[]);
-- not in a queue that is paused, nor before its time
SELECT idem_pause('q');
CALL idem_wait('q', '0');
CALL idem_wait_any(ARRAY['q', 's'], '0');
SELECT idem_resume('q');
CALL idem_wait('q', '0');
CALL idem_wait('later', '0');
SET idem.clock_offset = '2 h';
CALL idem_wait('later', '0');
RESET idem.clock_offset;

-- states of a job: waiting, scheduled, running, expired, blocked are no end
CALL anew();
SELECT idem_queue_set('kept', keep => '1 h');
SELECT outcome FROM idem_enqueue('q', key => 'k');
SELECT outcome FROM idem_enqueue('q', delay => '1 h');
CALL idem_wait_job(1, '0');
CALL idem_wait_job(2, '0');
CREATE TABLE job AS SELECT job_id, token FROM idem_fetch('q', lease => '1 h');
SELECT job_id, outcome FROM idem_enqueue('q', key => 'k', dedup => 'until_executed', if_running => 'rerun');
CALL idem_wait_job(1, '0');
CALL idem_wait_job(3, '0');
SET idem.clock_offset = '2 h';
CALL idem_wait_job(1, '0');
RESET idem.clock_offset;
-- done and not kept, or removed, or never there: gone
SELECT idem_complete(job_id, token, '"lost"') FROM job;
CALL idem_wait_job(1);
CALL idem_wait_job(99);
-- dead, cancelled, done and kept
SELECT idem_cancel(2);
CALL idem_wait_job(2);
SELECT job_id FROM idem_enqueue('kept');
SELECT job_id FROM idem_enqueue('kept');
SELECT job_id FROM idem_enqueue('kept');
TRUNCATE job;
INSERT INTO job SELECT job_id, token FROM idem_fetch('kept', 3, lease => '1 h');
SELECT idem_complete(job_id, token, '{"sum": 3}') FROM job WHERE job_id = 4;
SELECT idem_complete(job_id, token, 'null') FROM job WHERE job_id = 5;
SELECT idem_fail(job_id, token, 'no', dead => true) FROM job WHERE job_id = 6;
CALL idem_wait_job(4);
CALL idem_wait_job(5);
CALL idem_wait_job(6);

-- states of a key: only a live lease is no end
CALL idem_wait_key('k');
SELECT claimed FROM idem_claim('plain');
CALL idem_wait_key('plain');
CREATE TABLE lease AS SELECT k, token FROM unnest(ARRAY['k', 'r', 'p']) AS k,
	idem_lease(k, '1 h', on_expiry => CASE k WHEN 'p' THEN 'park' ELSE 'retry' END, scope => 's');
CALL idem_wait_key('k', '0');
CALL idem_wait_key('k', '0', 's');
SET idem.scope = 's';
CALL idem_wait_key('k', '0');
SELECT idem_finish('k', '{"id": 7}', token => token) FROM lease WHERE k = 'k';
SELECT idem_release('r', token) FROM lease WHERE k = 'r';
CALL idem_wait_key('k');
CALL idem_wait_key('r');
CALL idem_wait_key('p', '0');
SET idem.clock_offset = '2 h';
CALL idem_wait_key('p');
SET idem.clock_offset = '48 h';
CALL idem_wait_key('k');
RESET idem.clock_offset;
RESET idem.scope;

-- bad arguments
CREATE TABLE bad (n serial, call text);
INSERT INTO bad (call) VALUES
	($$idem_wait(NULL)$$),
	($$idem_wait('')$$),
	($$idem_wait(repeat('x', 256))$$),
	($$idem_wait(repeat(U&'\20ac', 86))$$),
	($$idem_wait('q', NULL)$$),
	($$idem_wait('q', '-1 us')$$),
	($$idem_wait('q', '1 day -25 hours')$$),
	($$idem_wait('q', '101 years')$$),
	($$idem_wait('q', '178000000 years')$$),
	($$idem_wait('q', '-178000000 years')$$),
	-- infinite intervals exist since 17; make one for older versions
	($$idem_wait('q', CASE WHEN current_setting('server_version_num')::int >= 170000
		THEN 'infinity' ELSE '178000000 years' END::text::interval)$$),
	($$idem_wait('q', CASE WHEN current_setting('server_version_num')::int >= 170000
		THEN '-infinity' ELSE '-1 s' END::text::interval)$$),
	($$idem_wait_any(NULL)$$),
	($$idem_wait_any('{}')$$),
	($$idem_wait_any('{{a,b},{c,d}}')$$),
	($$idem_wait_any(array_fill('q'::text, ARRAY[1001]))$$),
	($$idem_wait_any(ARRAY['q', NULL])$$),
	($$idem_wait_any(ARRAY['q', ''])$$),
	($$idem_wait_any(ARRAY['q', repeat('x', 256)])$$),
	($$idem_wait_any(ARRAY['q'], NULL)$$),
	($$idem_wait_any(ARRAY['q'], '-1 s')$$),
	($$idem_wait_job(NULL)$$),
	($$idem_wait_job(1, NULL)$$),
	($$idem_wait_job(1, '-1 s')$$),
	($$idem_wait_key(NULL)$$),
	($$idem_wait_key('')$$),
	($$idem_wait_key(repeat('x', 1025))$$),
	($$idem_wait_key('k', NULL)$$),
	($$idem_wait_key('k', '-1 s')$$),
	($$idem_wait_key('k', '0', repeat('s', 256))$$),
	($$idem_wait_key('k', '0', repeat(U&'\20ac', 86))$$);
\set VERBOSITY sqlstate
SELECT format('CALL %s', call) FROM bad ORDER BY n \gexec
\set VERBOSITY default
SELECT format('CALL %s', call) FROM bad ORDER BY n \gexec

-- not in a transaction block
BEGIN;
CALL idem_wait('q', '0');
ROLLBACK;
BEGIN;
CALL idem_wait_any(ARRAY['q'], '0');
ROLLBACK;
BEGIN;
CALL idem_wait_job(1, '0');
ROLLBACK;
BEGIN;
CALL idem_wait_key('k', '0');
ROLLBACK;
-- nor together with other statements, which are one transaction
SELECT 1 AS one \; CALL idem_wait('q', '0');
-- nor in a function, nor in a block with an EXCEPTION clause
\set VERBOSITY terse
CREATE FUNCTION waits() RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	ready boolean;
BEGIN
	CALL idem_wait('q', '0', ready);
	RETURN ready;
END $$;
SELECT waits();
DO $$
DECLARE
	ready boolean;
BEGIN
	CALL idem_wait('q', '0', ready);
EXCEPTION WHEN division_by_zero THEN
	NULL;
END $$;
-- nor in a procedure that cannot end its transaction: with a SET clause, or for its owner
CREATE PROCEDURE waits_nested(command text, INOUT answer text DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	ready boolean;
	queue text;
	state text;
	result jsonb;
BEGIN
	CASE command
		WHEN 'wait' THEN CALL idem_wait('q', '1 ms', ready);
		WHEN 'any' THEN CALL idem_wait_any(ARRAY['r', 'q'], '1 ms', ready, queue);
		WHEN 'job' THEN CALL idem_wait_job(3, '1 ms', state, result);
		WHEN 'key' THEN CALL idem_wait_key('p', '1 ms', 's', state, result);
	END CASE;
	answer := concat_ws(', ', ready, queue, state, result);
END $$;
ALTER PROCEDURE waits_nested SET work_mem = '1 MB';
CALL waits_nested('wait');
ALTER PROCEDURE waits_nested RESET ALL;
ALTER PROCEDURE waits_nested SECURITY DEFINER;
CALL waits_nested('wait');
ALTER PROCEDURE waits_nested SECURITY INVOKER;
-- a function that somebody has declared
CREATE FUNCTION waits_in_c(queue text, timeout interval, INOUT ready boolean) AS '$libdir/idem', 'idem_wait' LANGUAGE C;
SELECT waits_in_c('q', '0', NULL);
DROP FUNCTION waits_in_c;
\set VERBOSITY default

-- in other procedures and DO blocks: allowed, also several times, also in a loop over a query
CALL anew();
SELECT outcome FROM idem_enqueue('paused');
SELECT idem_pause('paused');
CALL waits_nested('wait');
CALL waits_nested('any');
CALL waits_nested('job');
CALL waits_nested('key');
DO $$
DECLARE
	ready boolean;
	answers boolean[];
	i int;
BEGIN
	CREATE TABLE committed (i int);
	FOR i IN SELECT generate_series(1, 3) LOOP
		INSERT INTO committed VALUES (i);
		CALL idem_wait('q', '1 ms', ready);
		answers := answers || ready;
		IF i = 2 THEN
			PERFORM FROM idem_enqueue('q');
		END IF;
	END LOOP;
	RAISE NOTICE '%', answers;
	ROLLBACK;
END $$;
-- each call has committed what came before it, also the last one, which did not sleep; so q has a job now
SELECT i FROM committed;
DROP TABLE committed;
DO $$
DECLARE
	answer text;
BEGIN
	CALL waits_nested('wait', answer);
	RAISE NOTICE '%', answer;
END $$;

-- in a transaction that only reads, as on a standby: jobs and keys, not queues
SET default_transaction_read_only = on;
CALL idem_wait('q', '0');
CALL idem_wait_any(ARRAY['q'], '0');
CALL idem_wait_job(1, '0');
CALL idem_wait_job(1, '1 ms');
CALL idem_wait_key('p', '0', 's');
CALL idem_wait_key('p', '1 ms', 's');
RESET default_transaction_read_only;
-- in every isolation level
SET default_transaction_isolation = 'serializable';
CALL idem_wait('q', '0');
CALL idem_wait('nothing', '1 ms');
CALL idem_wait_job(1, '1 ms');
SET default_transaction_isolation = 'repeatable read';
CALL idem_wait('q', '0');
CALL idem_wait('nothing', '1 ms');
CALL idem_wait_key('p', '1 ms', 's');
RESET default_transaction_isolation;

-- privileges: without a grant, nothing
CALL anew();
CREATE ROLE idem_wait_nobody;
CREATE ROLE idem_wait_alice;
CREATE ROLE idem_wait_bob;
SELECT idem_grant('idem_wait_alice', 'app'), idem_grant('idem_wait_bob', 'app');
\set VERBOSITY sqlstate
SET ROLE idem_wait_nobody;
CALL idem_wait('q', '0');
CALL idem_wait_any(ARRAY['q'], '0');
CALL idem_wait_job(1, '0');
CALL idem_wait_key('k', '0');
-- a queue with an owner, and its jobs; the key of another role
SET ROLE idem_wait_alice;
SELECT job_id FROM idem_enqueue('open');
SELECT status FROM idem_lease('k', '1 h');
RESET ROLE;
SELECT job_id FROM idem_enqueue('owned');
SELECT idem_queue_set('owned', owner => 'idem_wait_alice');
SELECT idem_cancel(2);
SET ROLE idem_wait_alice;
CALL idem_wait('owned', '0');
CALL idem_wait_job(2);
CALL idem_wait_key('k', '0');
SET ROLE idem_wait_bob;
CALL idem_wait('owned', '0');
CALL idem_wait_any(ARRAY['nothing', 'owned'], '0');
CALL idem_wait_job(2);
CALL idem_wait_key('k', '0');
CALL idem_wait('open', '0');
CALL idem_wait_job(1, '0');
-- an answer for an earlier queue comes first
CALL idem_wait_any(ARRAY['open', 'owned'], '0');
-- with the privileges of the owner
RESET ROLE;
GRANT idem_wait_alice TO idem_wait_bob;
SET ROLE idem_wait_bob;
CALL idem_wait('owned', '0');
CALL idem_wait_job(2);
CALL idem_wait_key('k', '0');
RESET ROLE;

SELECT idem_revoke('idem_wait_alice', 'app'), idem_revoke('idem_wait_bob', 'app');
DROP ROLE idem_wait_nobody, idem_wait_alice, idem_wait_bob;
DROP PROCEDURE waits_nested;
DROP FUNCTION waits;
DROP TABLE bad, job, lease;
CALL anew();
