--
-- idem_claim: rules K1 to K6, K8
--
\a\pset footer off
\set VERBOSITY sqlstate
CREATE TABLE effects (key text);

-- K1, K2: commit records the key, with the result given to idem_finish
BEGIN;
SELECT claimed, status, result, created_at IS NOT NULL AS created, expires_at - created_at AS ttl
  FROM idem_claim('claim:1');
INSERT INTO effects VALUES ('claim:1');
SELECT idem_finish('claim:1', '{"charge_id": "ch_1"}');
COMMIT;
SELECT claimed, status, result, created_at IS NOT NULL AS created, expires_at - created_at AS ttl
  FROM idem_claim('claim:1');

-- K1: rollback releases the key and undoes the work
BEGIN;
SELECT claimed, status FROM idem_claim('claim:2');
INSERT INTO effects VALUES ('claim:2');
SELECT idem_finish('claim:2', '"lost"');
ROLLBACK;
SELECT * FROM idem_get('claim:2');
SELECT claimed, status, result FROM idem_claim('claim:2');
SELECT key FROM effects;

-- K2: a committed claim is final, even if idem_finish was never called
SELECT claimed, status, result FROM idem_claim('claim:2');

-- K1: rollback to a savepoint releases only the keys claimed after it
BEGIN;
SELECT claimed, status FROM idem_claim('claim:3');
SAVEPOINT s;
SELECT claimed, status FROM idem_claim('claim:4');
SELECT idem_finish('claim:3', '"in savepoint"');
SELECT status, result FROM idem_claim('claim:3');
ROLLBACK TO s;
SELECT claimed, status, result FROM idem_claim('claim:3');
SELECT claimed, status FROM idem_claim('claim:4');
RELEASE s;
SELECT claimed, status FROM idem_claim('claim:4');
SELECT idem_finish('claim:3', '3'), idem_finish('claim:4', '4');
COMMIT;
SELECT status, result FROM idem_get('claim:3');
SELECT status, result FROM idem_get('claim:4');

-- a claim made in a released savepoint is finished in another savepoint
BEGIN;
SAVEPOINT a;
SELECT claimed, status FROM idem_claim('claim:5');
RELEASE a;
SAVEPOINT b;
SELECT idem_finish('claim:5', '5');
RELEASE b;
SELECT status, result FROM idem_claim('claim:5');
COMMIT;

-- K1: an EXCEPTION block of PL/pgSQL does the same
\set VERBOSITY default
DO $$
DECLARE
	r record;
BEGIN
	BEGIN
		r := idem_claim('claim:6');
		RAISE NOTICE 'first: %', r.status;
		RAISE EXCEPTION 'work failed';
	EXCEPTION WHEN raise_exception THEN
		NULL;
	END;
	r := idem_claim('claim:6');
	RAISE NOTICE 'after the exception: %', r.status;
END
$$;
\set VERBOSITY sqlstate

-- K6: held before finish, finished after it
BEGIN;
SELECT claimed, status, result FROM idem_claim('claim:7');
SELECT claimed, status, result FROM idem_claim('claim:7');
SELECT idem_finish('claim:7', '7');
SELECT claimed, status, result FROM idem_claim('claim:7');
COMMIT;

-- K6, also between functions of one statement
SELECT (idem_claim('claim:8')).status AS first, idem_finish('claim:8', '8'),
	   (idem_claim('claim:8')).status AS second;

-- K3: one claim per life of a key
SELECT count(*) FILTER (WHERE c.claimed) AS claimed, count(*) AS calls
  FROM generate_series(1, 100) AS i, LATERAL idem_claim('claim:9:' || i % 10) AS c;

-- the same key in another scope is another key
SELECT claimed FROM idem_claim('claim:1', scope => 'tenant a');
SELECT claimed FROM idem_claim('claim:1', scope => 'tenant a');
SELECT claimed FROM idem_claim('claim:1', scope => 'tenant b');

-- keys are compared by their bytes
SELECT claimed FROM idem_claim('Claim:1');
SELECT claimed FROM idem_claim('claim:1 ');
SELECT claimed FROM idem_claim(U&'caf\00e9');
SELECT claimed FROM idem_claim(U&'cafe\0301');

-- K5: without a conflict, the wait makes no difference
SELECT claimed, status FROM idem_claim('claim:10', wait => '0');
SELECT claimed, status FROM idem_claim('claim:10', wait => '0');
SELECT claimed, status FROM idem_claim('claim:10', wait => '1 h');

-- K8: a replay takes no transaction id
BEGIN;
SELECT status FROM idem_claim('claim:1');
SELECT status FROM idem_claim('claim:10', wait => '0');
SELECT status FROM idem_claim_many(ARRAY['claim:1', 'claim:2']);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
COMMIT;
-- and leaves no dead row: a replay does not move the row
SELECT ctid AS before FROM idem.keys WHERE key = 'claim:1' AND scope = '' \gset
SELECT status FROM idem_claim('claim:1');
SELECT ctid = :'before' AS unmoved, xmax = 0 AS unlocked
  FROM idem.keys WHERE key = 'claim:1' AND scope = '';

-- K10: REPEATABLE READ and SERIALIZABLE, without concurrent transactions
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT claimed, status FROM idem_claim('claim:11');
SELECT claimed, status FROM idem_claim('claim:11');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT claimed, status FROM idem_claim('claim:11');
SELECT claimed, status FROM idem_claim('claim:12');
SELECT claimed, status FROM idem_claim('claim:12');
SELECT idem_release('claim:12');
SELECT claimed, status FROM idem_claim('claim:12');
SELECT idem_finish('claim:12', '12');
SELECT claimed, status FROM idem_claim('claim:12');
COMMIT;

-- K13: not in a read-only transaction
BEGIN READ ONLY;
SELECT * FROM idem_claim('claim:1');
ROLLBACK;

-- an additional index, even one built concurrently, is kept up to date
CREATE INDEX CONCURRENTLY claim_extra ON idem.keys (created_at);
SELECT claimed FROM idem_claim('claim:13');
REINDEX TABLE CONCURRENTLY idem.keys;
SELECT claimed FROM idem_claim('claim:13');
SELECT claimed FROM idem_claim('claim:14');
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT count(*) = (SELECT count(*) FROM idem.keys) AS complete
  FROM idem.keys WHERE created_at > '-infinity';
RESET enable_seqscan;
RESET enable_bitmapscan;
DROP INDEX idem.claim_extra;

DROP TABLE effects;
