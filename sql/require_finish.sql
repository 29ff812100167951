--
-- Claims that were not finished, and idem.require_finish: rule K14
--
\a\pset footer off
SET idem.require_finish = on;
SET idem.require_finish = 'Warning';
SHOW idem.require_finish;

-- off: no message
SET idem.require_finish = off;
SELECT status FROM idem_claim('unfinished:1');

-- warning: a claim in autocommit mode is final, and the caller gets a warning
SET idem.require_finish = warning;
SELECT status FROM idem_claim('unfinished:2');
SELECT status FROM idem_claim('unfinished:2');
SELECT count(*) FROM idem_claim_many(ARRAY['unfinished:2', 'unfinished:3', 'unfinished:4', 'unfinished:4']);

-- error: the transaction fails, and the key is free
SET idem.require_finish = error;
SELECT status FROM idem_claim('unfinished:5');
SELECT count(*) FROM idem_get('unfinished:5');
BEGIN;
SELECT status FROM idem_claim('unfinished:5');
COMMIT;
SELECT count(*) FROM idem_get('unfinished:5');

\set VERBOSITY sqlstate
-- claims with an end: finish, release, forget
BEGIN;
SELECT status FROM idem_claim('unfinished:6');
SELECT idem_finish('unfinished:6', '6');
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:7');
SELECT idem_release('unfinished:7');
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:7');
SELECT idem_forget('unfinished:7');
COMMIT;
BEGIN;
SELECT count(*) FROM idem_claim_many(ARRAY['unfinished:8', 'unfinished:9', 'unfinished:8']);
SELECT idem_finish_many(ARRAY['unfinished:8', 'unfinished:9']);
COMMIT;
CREATE FUNCTION unfinished_handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
SELECT status, replayed FROM idem_call('unfinished:10', 'unfinished_handler', '1');
SELECT status, replayed FROM idem_call('unfinished:10', 'unfinished_handler', '1');
-- nothing claimed, nothing to finish
BEGIN;
SELECT status FROM idem_claim('unfinished:1');
SELECT idem_forget('unfinished:1');
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:11');
ROLLBACK;
SELECT 1 AS one;

-- calls that do not count twice, or not at all
-- a repeated finish
BEGIN;
SELECT status FROM idem_claim('unfinished:12');
SELECT status FROM idem_claim('unfinished:13');
SELECT idem_finish('unfinished:12');
SELECT idem_finish('unfinished:12');
COMMIT;
BEGIN;
SELECT count(*) FROM idem_claim_many(ARRAY['unfinished:12', 'unfinished:13']);
SELECT idem_finish_many(ARRAY['unfinished:12', 'unfinished:12']);
COMMIT;
-- a second claim that returns held or finished
BEGIN;
SELECT status FROM idem_claim('unfinished:14');
SELECT status FROM idem_claim('unfinished:14');
SELECT idem_finish('unfinished:14');
SELECT status FROM idem_claim('unfinished:14');
COMMIT;
-- released and claimed again
BEGIN;
SELECT status FROM idem_claim('unfinished:15');
SELECT idem_release('unfinished:15');
SELECT status FROM idem_claim('unfinished:15');
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:15');
SELECT idem_release('unfinished:15');
SELECT status FROM idem_claim('unfinished:15');
SELECT idem_finish('unfinished:15');
COMMIT;
-- a forgotten key that was finished before, by this or by another transaction
BEGIN;
SELECT status FROM idem_claim('unfinished:16');
SELECT status FROM idem_claim('unfinished:17');
SELECT idem_finish('unfinished:16');
SELECT idem_forget('unfinished:16');
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:17');
SELECT idem_forget('unfinished:15');
COMMIT;
-- a handler that finishes its key itself, and one that claims another key
CREATE FUNCTION unfinished_finisher(payload jsonb) RETURNS jsonb LANGUAGE sql
AS $$ SELECT idem_finish('unfinished:18', payload); SELECT payload $$;
CREATE FUNCTION unfinished_claimer(payload jsonb) RETURNS jsonb LANGUAGE sql
AS $$ SELECT to_jsonb(status) FROM idem_claim('unfinished:20') $$;
SELECT status, result FROM idem_call('unfinished:18', 'unfinished_finisher', '1');
SELECT status, result FROM idem_call('unfinished:19', 'unfinished_claimer', '1');
-- leases, with and without an end
SELECT status, token FROM idem_lease('unfinished:21', '1 min') \gset
SELECT :'status' AS status, idem_renew('unfinished:21', :token, '1 min') IS NOT NULL AS renewed;
BEGIN;
SELECT status FROM idem_claim('unfinished:22');
SELECT idem_finish('unfinished:21', token => :token);
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:22');
SELECT idem_release('unfinished:21', token => :token);
COMMIT;
-- a plain claim that takes over a lease, or a key past its ttl
SET idem.clock_offset = '2 min';
BEGIN;
SELECT status FROM idem_claim('unfinished:21');
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:21');
SELECT idem_release('unfinished:21');
COMMIT;
SET idem.clock_offset = '2 d';
SELECT status FROM idem_claim('unfinished:2');
BEGIN;
SELECT status FROM idem_claim('unfinished:2');
SELECT idem_finish('unfinished:2');
COMMIT;
RESET idem.clock_offset;

-- K1: the count follows the subtransactions
-- the claim was rolled back
BEGIN;
SAVEPOINT a;
SELECT status FROM idem_claim('unfinished:23');
ROLLBACK TO a;
COMMIT;
-- the finish, the release, the forget was rolled back
BEGIN;
SELECT status FROM idem_claim('unfinished:23');
SAVEPOINT a;
SELECT idem_finish('unfinished:23');
ROLLBACK TO a;
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:23');
SAVEPOINT a;
SELECT idem_release('unfinished:23');
ROLLBACK TO a;
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:23');
SAVEPOINT a;
SELECT idem_forget('unfinished:23');
ROLLBACK TO a;
SELECT idem_finish('unfinished:23');
COMMIT;
-- the claim was kept: in a subtransaction, in a nested one, next to one that was rolled back
BEGIN;
SAVEPOINT a;
SELECT status FROM idem_claim('unfinished:24');
RELEASE a;
COMMIT;
BEGIN;
SAVEPOINT a;
SAVEPOINT b;
SELECT status FROM idem_claim('unfinished:24');
RELEASE b;
SAVEPOINT c;
SELECT status FROM idem_claim('unfinished:25');
ROLLBACK TO c;
COMMIT;
-- claimed in one subtransaction, finished in another, in the parent, in a child
BEGIN;
SAVEPOINT a;
SELECT status FROM idem_claim('unfinished:24');
RELEASE a;
SAVEPOINT b;
SELECT idem_finish('unfinished:24');
RELEASE b;
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:25');
SAVEPOINT a;
SELECT status FROM idem_claim('unfinished:26');
SAVEPOINT b;
SELECT idem_finish('unfinished:25');
RELEASE b;
RELEASE a;
SELECT idem_finish('unfinished:26');
COMMIT;
-- everything rolled back
BEGIN;
SAVEPOINT a;
SELECT status FROM idem_claim('unfinished:27');
SAVEPOINT b;
SELECT status FROM idem_claim('unfinished:28');
RELEASE b;
ROLLBACK TO a;
SELECT status FROM idem_claim('unfinished:27');
SELECT idem_finish('unfinished:27');
COMMIT;
-- a claim and a finish whose subtransaction was released and whose parent was rolled back
BEGIN;
SELECT status FROM idem_claim('unfinished:28');
SAVEPOINT a;
SAVEPOINT b;
SELECT status FROM idem_claim('unfinished:m');
RELEASE b;
ROLLBACK TO a;
SELECT idem_finish('unfinished:28');
COMMIT;
BEGIN;
SELECT status FROM idem_claim('unfinished:m');
SAVEPOINT a;
SAVEPOINT b;
SELECT idem_finish('unfinished:m');
RELEASE b;
ROLLBACK TO a;
COMMIT;
-- the count: 10 claims, one finished in a child, three rolled back, two of them released before that: 6
\set VERBOSITY default
BEGIN;
SET LOCAL idem.require_finish = warning;
SELECT count(*) FROM idem_claim_many(ARRAY['unfinished:n1', 'unfinished:n2', 'unfinished:n3']);
SAVEPOINT a;
SELECT status FROM idem_claim('unfinished:n4');
SAVEPOINT b;
SELECT count(*) FROM idem_claim_many(ARRAY['unfinished:n5', 'unfinished:n6']);
SELECT idem_finish('unfinished:n1');
RELEASE b;
SAVEPOINT c;
SELECT count(*) FROM idem_claim_many(ARRAY['unfinished:n7', 'unfinished:n8', 'unfinished:n9']);
SELECT idem_finish('unfinished:n4');
SELECT idem_release('unfinished:n7');
SELECT idem_forget('unfinished:n8');
ROLLBACK TO c;
RELEASE a;
SAVEPOINT d;
SELECT status FROM idem_claim('unfinished:n10');
COMMIT;
\set VERBOSITY sqlstate
-- an EXCEPTION block, with and without an error
CREATE FUNCTION unfinished_block(k text, fail boolean) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim(k);
	IF fail THEN
		RAISE EXCEPTION 'failed';
	END IF;
	RETURN 'claimed';
EXCEPTION WHEN raise_exception THEN
	RETURN SQLERRM;
END
$$;
SELECT unfinished_block('unfinished:29', true);
SELECT unfinished_block('unfinished:29', false);
SELECT count(*) FROM idem_get('unfinished:29');

-- the setting and the count at commit matter
BEGIN;
SET LOCAL idem.require_finish = off;
SELECT status FROM idem_claim('unfinished:30');
COMMIT;
BEGIN;
SET LOCAL idem.require_finish = warning;
SELECT status FROM idem_claim('unfinished:31');
COMMIT;
SET idem.require_finish = off;
BEGIN;
SELECT status FROM idem_claim('unfinished:32');
SET LOCAL idem.require_finish = error;
COMMIT;
SET idem.require_finish = error;
SELECT key FROM idem.keys WHERE key IN ('unfinished:30', 'unfinished:31', 'unfinished:32') ORDER BY key;

-- deferred triggers run before the check: one that finishes, one that claims
CREATE TABLE unfinished (key text, finish boolean);
CREATE FUNCTION unfinished_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF NEW.finish THEN
		PERFORM idem_finish(NEW.key, '"by the trigger"');
	ELSE
		PERFORM idem_claim(NEW.key);
	END IF;
	RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER unfinished AFTER INSERT ON unfinished DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION unfinished_trigger();
BEGIN;
SELECT status FROM idem_claim('unfinished:33');
INSERT INTO unfinished VALUES ('unfinished:33', true);
COMMIT;
SELECT status, result FROM idem_get('unfinished:33');
INSERT INTO unfinished VALUES ('unfinished:34', false);
SELECT count(*) FROM idem_get('unfinished:34');
SELECT count(*) FROM unfinished;
-- and so does a cursor WITH HOLD
BEGIN;
DECLARE c CURSOR WITH HOLD FOR SELECT status FROM idem_claim('unfinished:35');
COMMIT;

-- PREPARE TRANSACTION, and the next transaction
BEGIN;
SELECT status FROM idem_claim('unfinished:36');
PREPARE TRANSACTION 'unfinished';
COMMIT PREPARED 'unfinished';
BEGIN;
SELECT status FROM idem_claim('unfinished:36');
SELECT idem_finish('unfinished:36');
PREPARE TRANSACTION 'unfinished';
COMMIT PREPARED 'unfinished';
BEGIN;
SET LOCAL idem.require_finish = warning;
SELECT status FROM idem_claim('unfinished:37');
PREPARE TRANSACTION 'unfinished';
SELECT 1 AS one;
COMMIT PREPARED 'unfinished';

-- procedures that commit
CREATE PROCEDURE unfinished_procedure(finish boolean) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim('unfinished:38');
	PERFORM idem_finish('unfinished:38');
	COMMIT;
	PERFORM idem_claim('unfinished:39');
	IF finish THEN
		PERFORM idem_finish('unfinished:39');
	END IF;
	COMMIT;
	PERFORM idem_claim('unfinished:40');
	ROLLBACK;
	RAISE NOTICE 'the end is reached';
END
$$;
CALL unfinished_procedure(false);
SELECT key FROM idem.keys WHERE key IN ('unfinished:38', 'unfinished:39', 'unfinished:40') ORDER BY key;
SELECT idem_forget('unfinished:38');
CALL unfinished_procedure(true);
SELECT key FROM idem.keys WHERE key IN ('unfinished:38', 'unfinished:39', 'unfinished:40') ORDER BY key;

-- a failed transaction gives no message
BEGIN;
SELECT status FROM idem_claim('unfinished:41');
SELECT 1 / 0;
COMMIT;
SELECT 1 AS one;

RESET idem.require_finish;
DROP TABLE unfinished;
DROP PROCEDURE unfinished_procedure;
DROP FUNCTION unfinished_trigger, unfinished_block, unfinished_finisher, unfinished_claimer;

--
-- auto, the default: a claim in autocommit. A statement that only claims is a mistake: it is final at once.
--
SELECT boot_val FROM pg_settings WHERE name = 'idem.require_finish';
SET idem.require_finish = auto;
\set VERBOSITY default
SELECT status FROM idem_claim('auto:1');
SELECT count(*) FROM idem_claim_many(ARRAY['auto:2', 'auto:3', 'auto:1']);
\set VERBOSITY sqlstate
-- however it is written
SELECT (idem_claim('auto:4')).status;
SELECT c.status || '!' AS status FROM (VALUES ('auto:5'), ('auto:6')) AS v (k), LATERAL pg_catalog.idem_claim(k) AS c WHERE c.claimed;
WITH c AS (SELECT * FROM idem_claim('auto:7')) SELECT status FROM c WHERE claimed UNION ALL SELECT (SELECT status FROM idem_claim('auto:8'));
SELECT CASE WHEN (idem_claim('auto:9', wait => '0')).claimed THEN 'mine' ELSE 'not mine' END AS answer, now() IS NULL AS later;
CREATE VIEW auto_view AS SELECT status FROM idem_claim('auto:10');
SELECT status FROM auto_view;
SELECT claimed, status FROM idem_claim('auto:11') \gset
-- no claim, no warning: finished, held, released
SELECT status FROM idem_claim('auto:1');
SELECT a.status, b.status, idem_release('auto:12') FROM idem_claim('auto:12') AS a, idem_claim('auto:12') AS b;
SELECT status, idem_finish('auto:12', '1') FROM idem_claim('auto:12');
SELECT status FROM idem_lease('auto:13', '1 min');
SELECT status FROM idem_lease('auto:14', '1 us');
-- a plain claim of an expired lease is a claim
SET idem.clock_offset = '1 h';
SELECT status FROM idem_claim('auto:14');
RESET idem.clock_offset;

-- a transaction block, implicit ones, a savepoint
BEGIN;
SELECT status FROM idem_claim('auto:20');
COMMIT;
BEGIN;
SAVEPOINT a;
SELECT status FROM idem_claim('auto:21');
RELEASE a;
COMMIT AND CHAIN;
SELECT status FROM idem_claim('auto:22');
COMMIT;
SELECT status FROM idem_claim('auto:23') \; SELECT 1 AS one;
SELECT 1 AS one \; SELECT status FROM idem_claim('auto:24');
-- a statement that writes
CREATE TABLE auto (n serial, status text);
INSERT INTO auto (status) SELECT status FROM idem_claim('auto:30') RETURNING status;
WITH w AS (INSERT INTO auto (status) VALUES ('with') RETURNING status) SELECT w.status, c.status FROM w, idem_claim('auto:31') AS c;
WITH c AS (SELECT * FROM idem_claim('auto:32')), w AS (UPDATE auto SET status = c.status FROM c RETURNING 1) SELECT count(*) FROM w;
UPDATE auto SET status = c.status FROM idem_claim('auto:33') AS c;
SELECT status INTO auto_2 FROM idem_claim('auto:34');
CREATE TABLE auto_3 AS SELECT status FROM idem_claim('auto:35');
DELETE FROM auto WHERE (SELECT claimed FROM idem_claim('auto:36'));
SELECT a.status FROM auto_3 AS a, idem_claim('auto:37') AS c FOR UPDATE OF a;
-- a function of the user, and one that the planner inlines; a statement in one
CREATE FUNCTION auto_sql(k text) RETURNS text LANGUAGE sql AS $$ SELECT (idem_claim(k)).status $$;
CREATE FUNCTION auto_set(k text) RETURNS TABLE (status text) LANGUAGE sql AS $$ SELECT status FROM idem_claim(k) $$;
CREATE FUNCTION auto_plpgsql(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	c record;
BEGIN
	FOR c IN SELECT * FROM idem_claim(k) LOOP
		RETURN c.status;
	END LOOP;
END $$;
CREATE FUNCTION auto_cursor(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	auto_portal CURSOR FOR SELECT status FROM idem_claim(k);
	s text;
BEGIN
	OPEN auto_portal;
	FETCH auto_portal INTO s;
	RETURN s;
END $$;
SELECT auto_sql('auto:40');
SELECT * FROM auto_set('auto:41');
SELECT auto_plpgsql('auto:42');
SELECT auto_cursor('auto:43');
DO $$ BEGIN PERFORM idem_claim('auto:44'); END $$;
-- the work in the same statement: a function of the user, a notification, a job
CREATE FUNCTION auto_work(claimed boolean) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN INSERT INTO auto (status) VALUES ('work'); RETURN claimed; END $$;
SELECT auto_work(claimed) FROM idem_claim('auto:45');
SELECT status FROM idem_claim('auto:46') WHERE auto_work(claimed);
SELECT pg_notify('auto', 'k') FROM idem_claim('auto:47') WHERE claimed;
SELECT CASE WHEN (idem_claim('auto:48')).claimed THEN pg_notify('auto', 'k') END;
SELECT status FROM idem_claim('auto:49'), LATERAL pg_notify('auto', 'k') WHERE claimed;
SELECT e.outcome FROM idem_claim('auto:50') AS c, LATERAL idem_enqueue('auto', key => c.status) AS e;
SELECT count(*) FROM idem_claim('auto:51') AS c JOIN (VALUES (nextval('auto_n_seq'))) AS v ON claimed;
SELECT status FROM idem_claim('auto:52') WHERE pg_notify('auto', 'k')::text IS NOT NULL;
CREATE FUNCTION auto_check(k text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN (idem_claim(k)).claimed; END $$;
CREATE DOMAIN auto_domain AS text CHECK (auto_check(VALUE));
SELECT ('auto:53' || left(now()::text, 0))::auto_domain IS NULL AS checked;
-- not sent as a SELECT
PREPARE auto AS SELECT status FROM idem_claim($1);
EXECUTE auto('auto:60');
EXPLAIN (ANALYZE) SELECT status FROM idem_claim('auto:61') \g /dev/null
COPY (SELECT status FROM idem_claim('auto:62')) TO STDOUT;
BEGIN;
DECLARE auto CURSOR WITH HOLD FOR SELECT status FROM idem_claim('auto:63');
COMMIT;
SELECT status FROM idem_call('auto:64', 'unfinished_handler', '1');
-- the value when the statement begins and at the commit: both have to ask for it
SELECT status, set_config('idem.require_finish', 'off', false) FROM idem_claim('auto:65');
SELECT status FROM idem_claim('auto:66');
SET idem.require_finish = auto;
SELECT count(*) FROM idem.keys WHERE key LIKE 'auto:%';

--
-- Jobs that the transaction has fetched without a lease, and that no function of it has ended, given
-- back or leased: a warning in autocommit, in blocks and in functions
--
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 30) AS i), keys => ARRAY(SELECT i::text FROM generate_series(1, 30) AS i));
\set VERBOSITY default
SELECT job_id FROM idem_fetch('q');
SELECT count(*) FROM idem_fetch('q', 2);
\set VERBOSITY sqlstate
SELECT count(*) FROM idem_fetch_any(ARRAY['q', 'p'], 2);
SELECT count(*) FROM idem_fetch('q', lease => '0');
DO $$ BEGIN PERFORM idem_fetch('q'); END $$;
BEGIN;
SELECT count(*) FROM idem_fetch('q', 3);
COMMIT;
-- no job, no warning; a lease; a rollback
SELECT count(*) FROM idem_fetch('p');
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT idem_complete(:job_id, :token);
BEGIN;
SELECT count(*) FROM idem_fetch('q');
ROLLBACK;

-- each function that ends it, gives it back or leases it
CREATE FUNCTION ends(call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	job record;
	answer text;
BEGIN
	SELECT * INTO STRICT job FROM idem_fetch('q');
	EXECUTE format('SELECT count(*) FROM ' || call, job.job_id, job.token, quote_literal(job.key)) INTO answer;
	RETURN answer;
END $$;
SELECT ends('idem_complete(%1$s, %2$s)');
SELECT ends('idem_fail(%1$s, %2$s)');
SELECT ends('idem_fail(%1$s, %2$s, dead => true)');
SELECT ends($$idem_snooze(%1$s, %2$s, '1 s')$$);
SELECT ends('idem_cancel(%1$s)');
SELECT ends($$idem_cancel_by_key('q', %3$s)$$);
SELECT ends('idem_complete_many(ARRAY[%1$s], ARRAY[%2$s])');
SELECT ends('idem_fail_many(ARRAY[%1$s], ARRAY[%2$s])');
SELECT ends($$idem_snooze_many(ARRAY[%1$s], ARRAY[%2$s], '1 s')$$);
SELECT ends('idem_cancel_many(ARRAY[%1$s])');
SELECT ends($$idem_heartbeat(ARRAY[%1$s], ARRAY[%2$s], '1 h')$$);
SELECT ends($$idem_progress(%1$s, %2$s, '1', '1 h')$$);
-- each function that does not
SELECT ends('idem_heartbeat(ARRAY[%1$s], ARRAY[%2$s])');
SELECT ends($$idem_progress(%1$s, %2$s, '1')$$);
SELECT ends('idem_job(%1$s)');
SELECT ends('idem_complete_many(ARRAY[%1$s], ARRAY[1])');
SELECT ends($$idem_reschedule_many(ARRAY[%1$s], run_at => '2020-01-01 00:00:00+00')$$);
-- leased, and renewed, and completed; given back, and fetched again
BEGIN;
SELECT job_id, token FROM idem_fetch('q') \gset
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token]);
SELECT idem_complete(:job_id, :token);
COMMIT;
BEGIN;
SELECT job_id, token FROM idem_fetch('q') \gset
SELECT idem_snooze(:job_id, :token, '0') IS NOT NULL AS snoozed;
SELECT count(*) FROM idem_fetch('q');
COMMIT;

-- the end of a job that an earlier transaction has fetched does not count for this one
SELECT count(*) FROM idem_enqueue_many('r', '{1, 2}');
SELECT job_id, token FROM idem_fetch('r') \gset
BEGIN;
SELECT idem_complete(:job_id, :token);
SELECT count(*) FROM idem_fetch('r');
COMMIT;

-- subtransactions: the fetch was rolled back; what ended it was rolled back
BEGIN;
SAVEPOINT a;
SELECT count(*) FROM idem_fetch('q', 2);
ROLLBACK TO a;
COMMIT;
BEGIN;
SELECT job_id, token FROM idem_fetch('q') \gset
SAVEPOINT a;
SELECT idem_complete(:job_id, :token);
ROLLBACK TO a;
COMMIT;
BEGIN;
SAVEPOINT a;
SELECT job_id, token FROM idem_fetch('q') \gset
RELEASE a;
SAVEPOINT b;
SELECT idem_complete(:job_id, :token);
RELEASE b;
COMMIT;

-- the functions that run jobs; a handler that fetches another one
CREATE FUNCTION handles(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
CREATE FUNCTION fetches(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(count(*)) FROM idem_fetch('q') $$;
SELECT count(*) FROM idem_drain('q', 'handles', 3);
SELECT count(*) FROM idem_enqueue_many('w', '{1, 2}');
CALL idem_work('w', 'handles', max_jobs => 1);
CALL idem_work('w', 'fetches');

-- PREPARE TRANSACTION; idem_reset
SELECT count(*) FROM idem_enqueue_many('q', '{1, 2}');
BEGIN;
SELECT count(*) FROM idem_fetch('q');
PREPARE TRANSACTION 'unfinished';
ROLLBACK PREPARED 'unfinished';
BEGIN;
SELECT count(*) FROM idem_fetch('q');
SELECT idem_reset() > 0 AS reset;
COMMIT;

-- with claims; warning, error, off
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', '{1, 2}');
\set VERBOSITY terse
SET idem.require_finish = warning;
BEGIN;
SELECT status FROM idem_claim('auto:90');
SELECT count(*) FROM idem_fetch('q');
COMMIT;
SET idem.require_finish = error;
SELECT count(*) FROM idem_fetch('q');
SELECT job_id, attempt, state FROM idem.job_status ORDER BY job_id;
BEGIN;
SELECT idem_complete(job_id, token) FROM idem_fetch('q');
COMMIT;
SET idem.require_finish = off;
SELECT count(*) FROM idem_fetch('q');
\set VERBOSITY default

RESET idem.require_finish;
CALL anew();
DROP VIEW auto_view;
DROP DOMAIN auto_domain;
DROP TABLE auto, auto_2, auto_3;
DROP FUNCTION ends, handles, fetches, auto_sql, auto_set, auto_plpgsql, auto_cursor, auto_check, auto_work, unfinished_handler;
