--
-- idem_release: as if the key had never been claimed
--
\a\pset footer off
\set VERBOSITY sqlstate

BEGIN;
SELECT claimed FROM idem_claim('release:1', '{"a": 1}');
SELECT idem_release('release:1');
SELECT count(*) FROM idem_get('release:1');
-- so another request may use it
SELECT claimed FROM idem_claim('release:1', '{"a": 2}');
SELECT idem_release('release:1');
COMMIT;
SELECT claimed FROM idem_claim('release:1');

-- K11: only in the transaction that claimed
SELECT idem_release('release:never');
SELECT idem_release('release:1');
SELECT status FROM idem_get('release:1');

-- not after finish
BEGIN;
SELECT claimed FROM idem_claim('release:2');
SELECT idem_finish('release:2', '2');
SAVEPOINT s;
SELECT idem_release('release:2');
ROLLBACK TO s;
COMMIT;
SELECT status, result FROM idem_get('release:2');

-- K1: a release is undone with its savepoint
BEGIN;
SELECT claimed FROM idem_claim('release:3');
SAVEPOINT s;
SELECT idem_release('release:3');
ROLLBACK TO s;
SELECT status FROM idem_claim('release:3');
COMMIT;

-- a claim that has taken over an expired key
SELECT claimed FROM idem_claim('release:4', ttl => '1 s');
SET idem.clock_offset = '1 h';
BEGIN;
SELECT claimed FROM idem_claim('release:4');
SELECT idem_release('release:4');
SELECT count(*) FROM idem_get('release:4');
COMMIT;
SELECT claimed FROM idem_claim('release:4');
RESET idem.clock_offset;

-- a token belongs to a lease
BEGIN;
SELECT claimed FROM idem_claim('release:5');
SAVEPOINT s;
SELECT idem_release('release:5', token => 1);
ROLLBACK TO s;
SELECT idem_release('release:5', token => -1);
ROLLBACK TO s;
SELECT status FROM idem_get('release:5');
COMMIT;

-- K13
BEGIN READ ONLY;
SELECT idem_release('release:1');
ROLLBACK;
