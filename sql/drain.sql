--
-- idem_drain: run the jobs of a queue in this transaction (V7)
--
\a\pset footer off
CALL anew();
CREATE SCHEMA drain;
SET search_path = drain, public;
CREATE TABLE sent (id int PRIMARY KEY);

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

-- jobs of the caller's own transaction, in the order of fetch; the job of a job; an error of the handler
BEGIN;
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 1, "next": {"id": 10, "next": {"id": 100}}}', key => 'k');
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 1}', key => 'k');
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 2}', priority => -1);
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 2}', max_attempts => 1);
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": "x"}', key => 'bad');
SELECT job_id, outcome FROM idem_enqueue('mail', '{"id": 3}', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('other', '{"id": 4}');
SELECT * FROM idem_drain('mail', 'send');
-- the effects of the failed jobs are gone, those of the others are there
SELECT * FROM sent ORDER BY id;
-- as after idem_complete() and idem_fail(): done, dead with its error, waiting for a retry, scheduled, in another queue
SELECT job_id, state, attempt, error FROM unnest(ARRAY[1, 2, 3, 4, 5, 6]) AS id,
	   LATERAL idem_job(id) AS j;
SELECT * FROM idem_drain('mail', 'send');
-- what is due later
SET LOCAL idem.clock_offset = '2 h';
SELECT * FROM idem_drain('mail', 'send');
ROLLBACK;
SELECT count(*) FROM sent;
SELECT count(*) FROM idem.jobs;

-- the same counters as a worker
SELECT idem_stats_reset();
SELECT count(*) FROM idem_enqueue_many('count', ARRAY['1', '2', '"x"']::jsonb[]);
CREATE FUNCTION number(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(1 + (payload #>> '{}')::int) $$;
SELECT outcome, result, error FROM idem_drain('count', 'number');
SELECT enqueued, fetched, completed, failed FROM idem.queue_stats WHERE datname = current_database() AND queue = 'count';

-- max_jobs
CALL anew();
SELECT count(*) FROM idem_enqueue_many('many', '{1, 2, 3}');
SELECT job_id, result FROM idem_drain('many', 'number', 2);
SELECT job_id, result FROM idem_drain('many', 'number', 2);
-- without an end
CREATE FUNCTION again(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT NULL::jsonb FROM idem_enqueue('again') $$;
SELECT job_id FROM idem_enqueue('again');
SELECT count(*), count(*) FILTER (WHERE outcome = 'completed' AND result IS NULL) FROM idem_drain('again', 'again');

-- a job with a follow-up job (J4): the follow-up job runs after it
CREATE FUNCTION reruns(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT payload FROM idem_enqueue('rerun', '"second"', key => 'k', dedup => 'until_executed', if_running => 'rerun')
		WHERE payload = '"first"' $$;
SELECT outcome FROM idem_enqueue('rerun', '"first"', key => 'k', dedup => 'until_executed', if_running => 'rerun');
SELECT key, outcome, result FROM idem_drain('rerun', 'reruns');
-- until_expired: the result is kept for duplicates
SELECT outcome FROM idem_enqueue('expired', '1', key => 'k', dedup => 'until_expired', key_ttl => '1 h');
SELECT key, outcome, result FROM idem_drain('expired', 'number');
SELECT outcome, result FROM idem_enqueue('expired', '1', key => 'k', dedup => 'until_expired', key_ttl => '1 h');

-- a retry without backoff runs in the same call, until the job is dead
SELECT idem_queue_set('tries', max_attempts => 3, backoff => '1 us', backoff_max => '1 us');
SELECT outcome FROM idem_enqueue('tries', '"x"');
SELECT outcome, error FROM idem_drain('tries', 'number');

-- a queue that declares a lease, and one that is paused, also by the handler
SELECT idem_queue_set('leased', lease => '1 min');
SELECT outcome FROM idem_enqueue('leased', '1');
SELECT outcome FROM idem_drain('leased', 'number');
CREATE FUNCTION pauses(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(idem_pause('paused')) $$;
SELECT count(*) FROM idem_enqueue_many('paused', '{1, 2}');
SELECT outcome, result FROM idem_drain('paused', 'pauses');
SELECT * FROM idem_drain('paused', 'pauses');

-- a handler that cancels its own job, one that drains, one that cannot take the payload
CREATE FUNCTION cancels(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT to_jsonb(idem_cancel(job_id)) FROM idem.job_status WHERE queue = 'cancels' $$;
SELECT outcome FROM idem_enqueue('cancels');
SELECT outcome, error FROM idem_drain('cancels', 'cancels');
CREATE FUNCTION drains(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT jsonb_agg(d.result) FROM idem_drain('inner', 'number') AS d $$;
SELECT outcome FROM idem_enqueue('outer');
SELECT count(*) FROM idem_enqueue_many('inner', '{1, 2}');
SELECT outcome, result FROM idem_drain('outer', 'drains');
CREATE FUNCTION strict(payload jsonb) RETURNS jsonb STRICT LANGUAGE sql AS $$ SELECT payload $$;
SELECT count(*) FROM idem_enqueue_many('strict', ARRAY[NULL, '1']::jsonb[]);
SELECT outcome, result, error FROM idem_drain('strict', 'strict');

-- V2: a cancel and the like end the call; nothing of it stays
CREATE FUNCTION cancelled(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'raised' USING errcode = payload #>> '{}';
END
$$;
SELECT count(*) FROM idem_enqueue_many('raise', ARRAY['"P0001"', '"53200"']::jsonb[]);
SELECT state, message FROM fails($$ SELECT * FROM idem_drain('raise', 'cancelled') $$);
SELECT state, attempt FROM idem.job_status WHERE queue = 'raise' ORDER BY job_id;
SELECT outcome FROM idem_drain('raise', 'cancelled', 1);
BEGIN;
SAVEPOINT a;
INSERT INTO sent VALUES (1);
SELECT state FROM fails($$ SELECT * FROM idem_drain('raise', 'cancelled') $$);
SELECT * FROM sent;
ROLLBACK TO a;
SELECT * FROM sent;
ROLLBACK;

-- arguments
SELECT state, message FROM fails($$ SELECT * FROM idem_drain(NULL, 'number') $$);
SELECT state, message FROM fails($$ SELECT * FROM idem_drain('q', NULL) $$);
SELECT state, message FROM fails($$ SELECT * FROM idem_drain('q', 'fails') $$);
SELECT state, message, detail, hint FROM fails($$ SELECT * FROM idem_drain('q', 'number', 0) $$) \gx
SELECT state, message FROM fails($$ SELECT * FROM idem_drain('q', 'number', NULL) $$);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT * FROM fails($$ SELECT * FROM idem_drain('q', 'number') $$) \gx
ROLLBACK;
BEGIN READ ONLY;
SELECT state, message FROM fails($$ SELECT * FROM idem_drain('q', 'number') $$);
ROLLBACK;

-- the owner of a queue, and the privilege to execute the handler
CREATE ROLE idem_drainer;
SELECT idem_grant('idem_drainer', 'app');
GRANT USAGE ON SCHEMA drain TO idem_drainer;
SELECT idem_queue_set('owned', owner => current_user::regrole);
REVOKE EXECUTE ON FUNCTION send FROM PUBLIC;
SET ROLE idem_drainer;
SELECT state, message FROM fails($$ SELECT * FROM idem_drain('owned', 'number') $$);
SELECT state, message FROM fails($$ SELECT * FROM idem_drain('q', 'send') $$);
SELECT * FROM idem_drain('q', 'number');
RESET ROLE;
SELECT idem_revoke('idem_drainer', 'app');
SET client_min_messages = warning;
DROP SCHEMA drain CASCADE;
DROP ROLE idem_drainer;
CALL anew();
