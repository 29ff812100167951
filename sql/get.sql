--
-- idem_get and idem_forget, and the views
--
\a\pset footer off
\set VERBOSITY sqlstate

SELECT * FROM idem_get('get:none');

BEGIN;
SELECT claimed FROM idem_claim('get:1');
SELECT status, result, worker, attempt, token, checkpoint, finished_at, lease_until,
	   owner = current_user AS mine, created_at < expires_at AS ordered
  FROM idem_get('get:1');
SELECT key, scope, status FROM idem.key_status WHERE key = 'get:1';
-- also from inside a savepoint
SAVEPOINT s;
SELECT claimed FROM idem_claim('get:2');
SELECT status FROM idem_get('get:2');
SELECT status FROM idem.key_status WHERE key = 'get:2';
ROLLBACK TO s;
SELECT idem_finish('get:1', '{"ok": true}');
SELECT status, result, finished_at >= created_at AS finished FROM idem_get('get:1');
COMMIT;
SELECT status, result, finished_at >= created_at AS finished FROM idem_get('get:1');

-- K2: finished, although idem_finish was not called
SELECT claimed FROM idem_claim('get:3', scope => 's');
SELECT status, finished_at FROM idem_get('get:3', 's');
SELECT count(*) FROM idem_get('get:3');

-- K13: read-only
BEGIN READ ONLY;
SELECT status, result FROM idem_get('get:1');
SELECT idem_forget('get:1');
ROLLBACK;

-- idem_get writes nothing
BEGIN;
SELECT status FROM idem_get('get:1');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
COMMIT;

-- idem_get sees what the snapshot of its statement sees, like a SELECT
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT status FROM idem_get('get:1');
SELECT count(*) FROM idem_get('get:none');
COMMIT;

-- the view idem.key_status
SELECT key, scope, owner = current_user::regrole AS mine, status,
	   age >= '0' AND age < '1 h' AS age, time_left > '23 h' AND time_left <= '24 h' AS time_left
  FROM idem.key_status WHERE key IN ('get:1', 'get:3') ORDER BY key;
SET idem.clock_offset = '25 h';
SELECT key, status, age > '25 h' AS age, time_left < '0' AS time_left
  FROM idem.key_status WHERE key IN ('get:1', 'get:3') ORDER BY key;
SELECT status, keys > 0 AS keys, oldest > '25 h' AS oldest, next_expiry < '0' AS next_expiry
  FROM idem.key_summary WHERE owner = current_user::regrole AND status <> 'finished';
RESET idem.clock_offset;

-- idem_forget: the key may run again
SELECT idem_forget('get:none');
SELECT idem_forget('get:1');
SELECT idem_forget('get:1');
SELECT claimed, status, result FROM idem_claim('get:1');
-- undone by rollback
BEGIN;
SELECT idem_forget('get:1');
SELECT claimed FROM idem_claim('get:1');
SELECT idem_finish('get:1', '"second life"');
ROLLBACK;
SELECT status, result FROM idem_get('get:1');
-- a key of this transaction
BEGIN;
SELECT claimed FROM idem_claim('get:4');
SELECT idem_forget('get:4');
SELECT idem_forget('get:4');
COMMIT;
-- an expired key counts as absent
SELECT claimed FROM idem_claim('get:5', ttl => '1 s');
SET idem.clock_offset = '2 s';
SELECT idem_forget('get:5');
RESET idem.clock_offset;
-- forget and claim again under SERIALIZABLE
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_forget('get:1');
SELECT claimed FROM idem_claim('get:1');
COMMIT;

-- the owner is shown by name; the owner that was dropped, by OID
CREATE ROLE "Idem owner";
SELECT oid AS owner FROM pg_roles WHERE rolname = 'Idem owner' \gset
BEGIN;
SET LOCAL idem.owner = 'Idem owner';
SELECT status FROM idem_claim('get:6');
COMMIT;
SELECT pg_typeof(owner), owner FROM idem_get('get:6');
DROP ROLE "Idem owner";
SELECT status, owner = :'owner' AS its_oid FROM idem_get('get:6');
