--
-- idem_work: run the jobs of a queue, each in a transaction of its own (J21).  Nothing here sleeps
-- for longer than a few milliseconds: test/isolation/specs/work.spec and test/t/149_work.pl have
-- the rest.
--
\a\pset footer off
CALL anew();
CREATE SCHEMA work;
SET search_path = work, public;
CREATE TABLE sent (id int PRIMARY KEY, xid xid8 DEFAULT pg_current_xact_id(), at timestamptz DEFAULT now());

CREATE FUNCTION send(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO sent VALUES ((payload ->> 'id')::int);
	-- a job may enqueue others
	IF payload ? 'next' THEN
		PERFORM idem_enqueue('mail', payload -> 'next');
	END IF;
	RETURN payload -> 'id';
END
$$;

-- an empty queue, with and without time to wait
CALL idem_work('mail', 'send');
CALL idem_work('mail', 'send', '1 ms');
CALL idem_work('mail', 'send', '1 ms', 1, 7, 7);
CALL idem_work(queue => 'mail', handler => 'send', max_jobs => 1);

-- in the order of fetch; a job of a job; errors of the handler
SELECT idem_queue_set('mail', keep => '1 h');
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 1, "next": {"id": 10, "next": {"id": 100}}}', key => 'k');
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 2}', priority => -1);
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 2}', max_attempts => 1);
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": "x"}', key => 'bad');
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 3}', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('other', '{"id": 4}');
CALL idem_work('mail', 'send');
-- the failed jobs have left nothing, and each job had a transaction and a now() of its own
SELECT id FROM sent ORDER BY at, id;
SELECT count(DISTINCT xid) AS transactions, count(DISTINCT at) AS times FROM sent;
-- as after idem_complete() and idem_fail(): done with its result, dead, waiting for a retry, scheduled, in another queue
SELECT job_id, state, attempt, result, error FROM unnest(ARRAY[1, 2, 3, 4, 5, 6, 7, 8]) AS id,
	   LATERAL idem_job(id) AS j;
CALL idem_work('mail', 'send');
-- the scheduled job, and the failed one once more
SET idem.clock_offset = '2 h';
CALL idem_work('mail', 'send');
RESET idem.clock_offset;
SELECT attempt, error FROM idem_job(4);

-- the same counters as a worker
CREATE FUNCTION number(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(1 + (payload #>> '{}')::int) $$;
SELECT idem_stats_reset();
SELECT count(*) FROM idem_enqueue_many('count', ARRAY['1', '2', '"x"']::jsonb[]);
CALL idem_work('count', 'number');
SELECT enqueued, fetched, completed, failed FROM idem.queue_stats WHERE datname = current_database() AND queue = 'count';

-- max_jobs counts failed attempts, too, and ends the call with time left
CALL anew();
SELECT count(*) FROM idem_enqueue_many('many', ARRAY['1', '"x"', '3', '4']::jsonb[]);
CALL idem_work('many', 'number', max_jobs => 2);
CALL idem_work('many', 'number', '1 h', 1);
CALL idem_work('many', 'number', max_jobs => 2147483647);
-- a timeout also ends a call that always has work; at least one job is tried
CREATE FUNCTION again(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT NULL::jsonb FROM idem_enqueue('again') $$;
SELECT job_id FROM idem_enqueue('again');
CALL idem_work('again', 'again', max_jobs => 3);
CALL idem_work('again', 'again', '1 us', 1000);
-- the timeout counts from the beginning of the call, not from the last job
CREATE FUNCTION later(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT NULL::jsonb FROM idem_enqueue('later', delay => '1 ms') $$;
SELECT job_id FROM idem_enqueue('later');
CALL idem_work('later', 'later', '20 ms', 1000) \gset
SELECT :completed < 1000 AS ended, :failed AS failed;
-- what becomes due while it waits: the looker wakes for it
SELECT outcome FROM idem_enqueue('soon', '1', delay => '20 ms');
CALL idem_work('soon', 'number', '1 h', 1);

-- a job with a follow-up job (J4); until_expired: the result is kept for duplicates (J5)
CREATE FUNCTION reruns(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT payload FROM idem_enqueue('rerun', '"second"', key => 'k', dedup => 'until_executed', if_running => 'rerun')
		WHERE payload = '"first"' $$;
SELECT idem_queue_set('rerun', keep => '1 h');
SELECT outcome FROM idem_enqueue('rerun', '"first"', key => 'k', dedup => 'until_executed', if_running => 'rerun');
CALL idem_work('rerun', 'reruns');
SELECT state, payload, result FROM idem.job_log WHERE queue = 'rerun' ORDER BY job_id;
SELECT outcome FROM idem_enqueue('expired', '1', key => 'k', dedup => 'until_expired', key_ttl => '1 h');
CALL idem_work('expired', 'number');
SELECT outcome, result FROM idem_enqueue('expired', '1', key => 'k', dedup => 'until_expired', key_ttl => '1 h');

-- a retry without backoff runs in the same call, until the job is dead
SELECT idem_queue_set('tries', max_attempts => 3, backoff => '1 us', backoff_max => '1 us');
SELECT outcome FROM idem_enqueue('tries', '"x"');
CALL idem_work('tries', 'number');
SELECT state, attempt, error FROM idem.job_log JOIN LATERAL idem_job(job_id) USING (job_id, state, attempt) WHERE job_log.queue = 'tries';

-- a queue that declares a lease, and one that is paused, also by the handler
SELECT idem_queue_set('leased', lease => '1 min');
SELECT outcome FROM idem_enqueue('leased', '1');
CALL idem_work('leased', 'number');
CREATE FUNCTION pauses(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(idem_pause('paused')) $$;
SELECT count(*) FROM idem_enqueue_many('paused', '{1, 2}');
CALL idem_work('paused', 'pauses');
CALL idem_work('paused', 'pauses', '1 ms');
SELECT idem_resume('paused');
CALL idem_work('paused', 'number');

-- a handler that cancels its own job, one that cannot take the payload, one that waits or commits
CREATE FUNCTION cancels(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT to_jsonb(idem_cancel(job_id)) FROM idem.job_status WHERE queue = 'cancels' $$;
SELECT job_id FROM idem_enqueue('cancels') \gset
CALL idem_work('cancels', 'cancels');
SELECT state, error FROM idem_job(:job_id);
CREATE FUNCTION strict(payload jsonb) RETURNS jsonb STRICT LANGUAGE sql AS $$ SELECT payload $$;
SELECT job_id FROM idem_enqueue('strict') \gset
CALL idem_work('strict', 'strict');
SELECT state, error FROM idem_job(:job_id);
CREATE FUNCTION works(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	completed bigint;
	failed bigint;
BEGIN
	CALL idem_work('mail', 'send', '0', NULL, completed, failed);
	RETURN NULL;
END $$;
SELECT job_id FROM idem_enqueue('nested') \gset
CALL idem_work('nested', 'works');
SELECT state, error FROM idem_job(:job_id);
CREATE FUNCTION commits(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN COMMIT; RETURN NULL; END $$;
SELECT job_id FROM idem_enqueue('commits') \gset
CALL idem_work('commits', 'commits');
SELECT state, error FROM idem_job(:job_id);

--
-- J22: a handler sees its job; the innermost one, if one runs inside another
--
CALL anew();
SELECT count(*) FROM idem_current_job();
CREATE TABLE seen (n serial, place text, job_id bigint, queue text, key text, attempt int, max_attempts int, headers jsonb, progress jsonb);
CREATE FUNCTION see(place text) RETURNS void LANGUAGE sql AS
	$$ INSERT INTO seen (place, job_id, queue, key, attempt, max_attempts, headers, progress) SELECT see.place, j.* FROM (SELECT 1) AS x LEFT JOIN idem_current_job() AS j ON true $$;
CREATE FUNCTION sees(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	PERFORM see(payload #>> '{}');
	RETURN NULL;
END $$;
CREATE FUNCTION sees_more(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	PERFORM see('before');
	-- its own subtransaction, with and without an error
	BEGIN
		PERFORM see('subtransaction');
		PERFORM 1 / 0;
	EXCEPTION WHEN division_by_zero THEN
		PERFORM see('after an error');
	END;
	-- other handlers: of a job, of one that fails, of one whose error ends the drain, of a key
	PERFORM FROM idem_drain('inner', 'sees');
	PERFORM see('after the inner job');
	PERFORM FROM idem_drain('inner error', 'fails_inside');
	PERFORM see('after an inner error');
	BEGIN
		PERFORM FROM idem_drain('inner deadlock', 'fails_inside');
	EXCEPTION WHEN deadlock_detected THEN
		PERFORM see('after a deadlock');
	END;
	PERFORM FROM idem_call('seen', 'sees', '"in idem_call"');
	PERFORM FROM idem_verify('sees', '"in idem_verify"');
	PERFORM see('at the end');
	IF (SELECT attempt FROM idem_current_job()) = 1 THEN
		RAISE EXCEPTION 'once more';
	END IF;
	RETURN (SELECT to_jsonb(j) FROM idem_current_job() AS j);
END $$;
CREATE FUNCTION fails_inside(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'job %', (SELECT job_id FROM idem_current_job()) USING errcode = payload #>> '{}';
END $$;
SELECT idem_queue_set('outer', max_attempts => 3, backoff => '1 us', backoff_max => '1 us', keep => '1 h');
SELECT job_id FROM idem_enqueue('outer', NULL, key => 'k', headers => '{"traceparent": "t"}') \gset
-- with a recovery point of an earlier worker, which did not count
SELECT idem_progress(job_id, token, '{"line": 7}', '1 h') > idem_clock() AS leased, idem_snooze(job_id, token, '0') <= idem_clock() AS back FROM idem_fetch('outer', lease => '1 h');
SELECT outcome FROM idem_enqueue('inner', '"inner"');
SELECT outcome FROM idem_enqueue('inner error', '"P0001"', max_attempts => 1);
SELECT outcome FROM idem_enqueue('inner deadlock', '"40P01"', max_attempts => 1);
CALL idem_work('outer', 'sees_more');
SELECT place, job_id = :job_id AS outer, queue, key, attempt, max_attempts, headers, progress FROM seen ORDER BY n;
SELECT error FROM idem_job(:job_id);
SELECT result - 'job_id' AS result FROM idem_job(:job_id);
SELECT count(*) FROM idem_current_job();
-- after an error that has ended the call, and in a trigger that runs at the commit
SELECT outcome FROM idem_enqueue('cancelled', '"57014"');
CALL idem_work('cancelled', 'fails_inside');
SELECT count(*) FROM idem_current_job();
CREATE FUNCTION see_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE NOTICE '% jobs', (SELECT count(*) FROM idem_current_job());
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER see_late AFTER INSERT ON seen DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION see_late();
SELECT outcome FROM idem_enqueue('late', '"late"');
CALL idem_work('late', 'sees');

--
-- Errors of the commit: the work is rolled back, and the job has failed
--
CALL anew();
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION bear(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO child VALUES ((payload #>> '{}')::int) RETURNING payload $$;
INSERT INTO parent VALUES (1), (3);
SELECT count(*) FROM idem_enqueue_many('bear', '{1, 2, 3}');
CALL idem_work('bear', 'bear', max_jobs => 10);
SELECT * FROM child ORDER BY id;
SELECT job_id, state, attempt, error FROM idem_job(2);
-- the last attempt
SELECT job_id FROM idem_enqueue('bear', '4', max_attempts => 1) \gset
CALL idem_work('bear', 'bear');
SELECT state, attempt, error FROM idem_job(:job_id);
-- each of these four attempts counts one fetch, one end and one run (S1, S5)
SELECT fetched, completed, failed, dead FROM idem.queue_stats WHERE datname = current_database() AND queue = 'bear';
SELECT kind, count FROM idem.queue_latency WHERE datname = current_database() AND queue = 'bear' ORDER BY kind;
-- K14: claimed but not finished
CREATE FUNCTION claims(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(status) FROM idem_claim('k') $$;
SET idem.require_finish = error;
SELECT job_id FROM idem_enqueue('claims') \gset
CALL idem_work('claims', 'claims');
RESET idem.require_finish;
SELECT state, attempt, error FROM idem_job(:job_id);
SELECT status FROM idem_get('k');
-- whose error it is (V2)
CREATE TABLE trouble (sqlstate text);
CREATE FUNCTION make_trouble() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'raised' USING errcode = new.sqlstate;
END $$;
CREATE CONSTRAINT TRIGGER trouble AFTER INSERT ON trouble DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION make_trouble();
CREATE FUNCTION trouble(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO trouble VALUES (payload #>> '{}') RETURNING payload $$;
SELECT count(*) FROM idem_enqueue_many('trouble', ARRAY['"P0001"', '"40P01"', '"53100"', '"57014"', '"57P01"']::jsonb[]);
-- a deadlock is an error of the job, too
CALL idem_work('trouble', 'trouble', max_jobs => 2);
-- after an error of the server or an operator intervention (57) the job has failed, and the call ends
CALL idem_work('trouble', 'trouble');
CALL idem_work('trouble', 'trouble');
CALL idem_work('trouble', 'trouble');
SELECT payload, state, attempt, error
  FROM idem.job_status JOIN LATERAL (SELECT payload, error FROM idem_job(job_id)) AS j ON true WHERE queue = 'trouble' ORDER BY job_id;
SELECT count(*) FROM trouble;

-- the same for errors of the handler (V2)
CREATE FUNCTION raises(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'raised' USING errcode = payload #>> '{}';
END
$$;
SELECT count(*) FROM idem_enqueue_many('raise', ARRAY['"P0001"', '"40001"', '"40P01"', '"53200"', '"58030"', '"XX001"', '"XX002"', '"57014"', '"57P01"', '"57P02"', '"57P03"', '"P0001"']::jsonb[]);
CALL idem_work('raise', 'raises');
SELECT count(*) FROM idem.job_status WHERE queue = 'raise' AND attempt = 1;
CALL idem_work('raise', 'raises');
SELECT count(*) FROM idem.job_status WHERE queue = 'raise' AND attempt = 1;
CALL idem_work('raise', 'raises');
CALL idem_work('raise', 'raises');
CALL idem_work('raise', 'raises');
CALL idem_work('raise', 'raises');
CALL idem_work('raise', 'raises');
CALL idem_work('raise', 'raises');
-- none of them holds up the last one
CALL idem_work('raise', 'raises');
SELECT payload, state, attempt, error
  FROM idem.job_status JOIN LATERAL (SELECT payload, error FROM idem_job(job_id)) AS j ON true WHERE queue = 'raise' ORDER BY job_id;

-- a job that takes longer than statement_timeout does not hold up those behind it, also in a DO block
CREATE TABLE ran (payload jsonb);
CREATE FUNCTION slow(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO ran VALUES (payload);
	IF payload = '"endless"' THEN
		LOOP
		END LOOP;
	END IF;
	RETURN NULL;
END
$$;
SELECT count(*) FROM idem_enqueue_many('slow', ARRAY['"endless"', '"endless"', '"short"']::jsonb[]);
SET statement_timeout = '500 ms';
\set VERBOSITY terse
CALL idem_work('slow', 'slow', max_jobs => 1);
DO $$
DECLARE
	completed bigint;
	failed bigint;
BEGIN
	CALL idem_work('slow', 'slow', '0', 1, completed, failed);
END $$;
\set VERBOSITY default
RESET statement_timeout;
CALL idem_work('slow', 'slow');
SELECT j.payload, j.state, j.attempt, j.error
  FROM idem.job_status AS s, LATERAL idem_job(s.job_id) AS j WHERE s.queue = 'slow' ORDER BY s.job_id;
SELECT payload FROM ran;

-- the handler goes away while the call runs: an error, and the jobs wait
CREATE FUNCTION vanish(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE payload #>> '{}';
	RETURN NULL;
END
$$;
SELECT count(*) FROM idem_enqueue_many('vanish', ARRAY['"DROP FUNCTION vanish"', '"SELECT 1"']::jsonb[]);
\set VERBOSITY sqlstate
CALL idem_work('vanish', 'vanish');
\set VERBOSITY default
SELECT state, attempt FROM idem.job_status WHERE queue = 'vanish' ORDER BY job_id;
CREATE FUNCTION vanish(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE payload #>> '{}';
	RETURN NULL;
END
$$;
CALL idem_work('vanish', 'vanish');
-- or changes the defaults of the session: no job runs with them
SELECT count(*) FROM idem_enqueue_many('vanish', ARRAY['"SET default_transaction_isolation = serializable"', '"SELECT 1"']::jsonb[]);
CALL idem_work('vanish', 'vanish');
RESET default_transaction_isolation;
SELECT count(*) FROM idem_enqueue_many('vanish', ARRAY['"SET default_transaction_read_only = on"', '"SELECT 2"']::jsonb[], priority => -1);
CALL idem_work('vanish', 'vanish');
RESET default_transaction_read_only;
SELECT state, attempt FROM idem.job_status WHERE queue = 'vanish' ORDER BY job_id;
CALL idem_work('vanish', 'vanish');

-- bad arguments
CREATE TABLE bad (n serial, call text);
INSERT INTO bad (call) VALUES
	($$idem_work(NULL, 'number')$$),
	($$idem_work('', 'number')$$),
	($$idem_work(repeat('x', 256), 'number')$$),
	($$idem_work('q', NULL)$$),
	($$idem_work('q', 'nothing')$$),
	($$idem_work('q', 0)$$),
	($$idem_work('q', 'fails')$$),
	($$idem_work('q', 'anew')$$),
	($$idem_work('q', 'jsonb_array_elements')$$),
	($$idem_work('q', 'number', NULL)$$),
	($$idem_work('q', 'number', '-1 us')$$),
	($$idem_work('q', 'number', '1 day -25 hours')$$),
	($$idem_work('q', 'number', '101 years')$$),
	-- infinite intervals exist since 17; make one for older versions
	($$idem_work('q', 'number', CASE WHEN current_setting('server_version_num')::int >= 170000
		THEN 'infinity' ELSE '178000000 years' END::text::interval)$$),
	($$idem_work('q', 'number', CASE WHEN current_setting('server_version_num')::int >= 170000
		THEN '-infinity' ELSE '-1 s' END::text::interval)$$),
	($$idem_work('q', 'number', '0', 0)$$),
	($$idem_work('q', 'number', '0', -2147483648)$$);
\set VERBOSITY sqlstate
SELECT format('CALL %s', call) FROM bad ORDER BY n \gexec
\set VERBOSITY default
SELECT format('CALL %s', call) FROM bad ORDER BY n \gexec

-- not in a transaction block, a function, a block with an EXCEPTION clause, or with another statement (A1)
SELECT outcome FROM idem_enqueue('q', '1');
BEGIN;
CALL idem_work('q', 'number');
ROLLBACK;
SELECT 1 AS one \; CALL idem_work('q', 'number');
\set VERBOSITY terse
SELECT works(NULL);
DO $$
DECLARE
	completed bigint;
	failed bigint;
BEGIN
	CALL idem_work('q', 'number', '0', NULL, completed, failed);
EXCEPTION WHEN division_by_zero THEN
	NULL;
END $$;
\set VERBOSITY default
SELECT state, attempt FROM idem.job_status WHERE queue = 'q';

-- in other procedures and DO blocks: allowed; they commit what came before, also in a loop over a query
CREATE PROCEDURE work_nested(queue text, timeout interval, INOUT counts bigint[] DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	completed bigint;
	failed bigint;
BEGIN
	CALL idem_work(queue, 'bear', timeout, NULL, completed, failed);
	counts := ARRAY[completed, failed];
END $$;
DO $$
DECLARE
	counts bigint[];
	i int;
BEGIN
	CREATE TABLE committed (i int);
	FOR i IN SELECT generate_series(1, 3) LOOP
		INSERT INTO committed VALUES (i);
		-- 2 has no parent: an error of the commit, in the middle of the loop
		PERFORM FROM idem_enqueue_many('nested work', ARRAY[1, i]::text[]::jsonb[]);
		CALL work_nested('nested work', '0', counts);
		RAISE NOTICE '%', counts;
	END LOOP;
	ROLLBACK;
END $$;
SELECT i FROM committed;
DROP TABLE committed;

-- isolation levels and read-only transactions: refused, nothing is done (J2)
SET default_transaction_isolation = 'repeatable read';
CALL idem_work('q', 'number');
SET default_transaction_isolation = 'serializable';
CALL idem_work('q', 'number');
RESET default_transaction_isolation;
SET default_transaction_read_only = on;
CALL idem_work('q', 'number');
RESET default_transaction_read_only;
SELECT state, attempt FROM idem.job_status WHERE queue = 'q';

-- the owner of a queue, EXECUTE on the procedure and on the handler; the handler runs as the caller
CREATE ROLE idem_worker_nobody;
CREATE ROLE idem_worker_alice;
SELECT idem_grant('idem_worker_alice', 'app');
GRANT USAGE ON SCHEMA work TO idem_worker_alice, idem_worker_nobody;
GRANT SELECT, INSERT ON sent TO idem_worker_alice;
CREATE FUNCTION says(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(current_user) $$;
SELECT idem_queue_set('owned', owner => current_user::regrole);
SELECT idem_queue_set('open', keep => '1 h');
REVOKE EXECUTE ON FUNCTION send FROM PUBLIC;
SELECT job_id FROM idem_enqueue('open', '{"id": 7}') \gset
SET ROLE idem_worker_nobody;
CALL idem_work('open', 'says');
SET ROLE idem_worker_alice;
CALL idem_work('owned', 'says');
CALL idem_work('open', 'send');
CALL idem_work('open', 'says');
RESET ROLE;
SELECT state, result FROM idem_job(:job_id);
-- EXECUTE is lost while the call runs: an error, and the job waits
CREATE FUNCTION shuts(payload jsonb) RETURNS jsonb SECURITY DEFINER LANGUAGE plpgsql AS $$
BEGIN
	REVOKE EXECUTE ON FUNCTION work.shuts FROM PUBLIC;
	RETURN NULL;
END $$;
SELECT count(*) FROM idem_enqueue_many('open', '{1, 2}');
SET ROLE idem_worker_alice;
CALL idem_work('open', 'shuts');
RESET ROLE;
SELECT state, attempt FROM idem.job_status WHERE queue = 'open';

SELECT idem_revoke('idem_worker_alice', 'app');
SET client_min_messages = warning;
DROP SCHEMA work CASCADE;
DROP ROLE idem_worker_nobody, idem_worker_alice;
CALL anew();
