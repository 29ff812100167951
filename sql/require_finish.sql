--
-- Claims that were not finished, and idem.require_finish: rule K14
--
SHOW idem.require_finish;
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
DROP FUNCTION unfinished_trigger, unfinished_block, unfinished_handler, unfinished_finisher, unfinished_claimer;
