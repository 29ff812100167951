--
-- Expiry by the clock: rule K9, and idem_cleanup
--
\a\pset footer off
\set VERBOSITY sqlstate
DELETE FROM idem.keys;

SELECT claimed, expires_at - created_at AS ttl FROM idem_claim('expiry:1', ttl => '90 s');
SELECT claimed, expires_at - created_at AS ttl FROM idem_claim('expiry:2', ttl => '1 month 1 day');
SET idem.ttl = '2 h';
SELECT claimed, expires_at - created_at AS ttl FROM idem_claim('expiry:3');
RESET idem.ttl;

-- not yet
SET idem.clock_offset = '60 s';
SELECT claimed, status FROM idem_claim('expiry:1');
SELECT count(*) FROM idem_get('expiry:1');
-- an expired row counts as absent for every function
SET idem.clock_offset = '100 s';
SELECT count(*) FROM idem_get('expiry:1');
SELECT idem_forget('expiry:1');
SELECT idem_finish('expiry:1', '1');
SELECT idem_release('expiry:1');
-- after rollback of a takeover the key is still expired
BEGIN;
SELECT claimed, status, result FROM idem_claim('expiry:1', ttl => '90 s');
SELECT idem_finish('expiry:1', '"second life"');
ROLLBACK;
SELECT count(*) FROM idem_get('expiry:1');
-- a claim takes it over
BEGIN;
SELECT claimed, status, result, expires_at - created_at AS ttl FROM idem_claim('expiry:1', ttl => '90 s');
SELECT claimed, status FROM idem_claim('expiry:1');
SELECT idem_finish('expiry:1', '"second life"');
COMMIT;
SELECT claimed, status, result FROM idem_claim('expiry:1');
SELECT count(*) FROM idem.keys WHERE key = 'expiry:1';
-- and it expires again
SET idem.clock_offset = '200 s';
SELECT claimed, status, result FROM idem_claim('expiry:1');
RESET idem.clock_offset;

-- the current time counts, not the start of the transaction
BEGIN;
SELECT now() IS NOT NULL AS started;
SET LOCAL idem.clock_offset = '3 h';
SELECT claimed, status FROM idem_claim('expiry:3', wait => '0');
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM idem_get('expiry:3');
SET LOCAL idem.clock_offset = '3 h';
SELECT count(*) FROM idem_get('expiry:3');
SELECT claimed, status FROM idem_claim('expiry:3');
ROLLBACK;

-- a claim does not expire for the transaction that holds it
BEGIN;
SELECT claimed FROM idem_claim('expiry:4', ttl => '1 s');
SET LOCAL idem.clock_offset = '1 h';
SELECT claimed, status FROM idem_claim('expiry:4');
SELECT status FROM idem_get('expiry:4');
SELECT status FROM idem.key_status WHERE key = 'expiry:4';
SELECT idem_cleanup() >= 0 AS cleaned;
SELECT idem_finish('expiry:4', '4');
SELECT claimed, status, result FROM idem_claim('expiry:4');
COMMIT;
SELECT status FROM idem_get('expiry:4');

-- idem_cleanup: expired keys only, oldest first, at most a batch
DELETE FROM idem.keys;
SELECT count(claimed) FROM generate_series(1, 10) AS i, LATERAL idem_claim('clean:' || i, ttl => i * interval '1 min');
SELECT idem_cleanup();
SET idem.clock_offset = '450 s';
SELECT idem_cleanup(3);
SELECT key FROM idem.keys ORDER BY expires_at;
SELECT idem_cleanup(100);
SELECT idem_cleanup(100);
SELECT key FROM idem.keys ORDER BY expires_at;
-- undone by rollback
SET idem.clock_offset = '1 h';
BEGIN;
SELECT idem_cleanup();
SELECT claimed FROM idem_claim('clean:10');
ROLLBACK;
SELECT count(*) FROM idem.keys;
-- works from a transaction with an old snapshot
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM idem.keys;
SELECT idem_cleanup(1);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_cleanup(1);
COMMIT;
SELECT key FROM idem.keys;
RESET idem.clock_offset;

-- each call continues where the last one stopped, also in one transaction; after a rollback the oldest come first again
CREATE FUNCTION left_keys() RETURNS text LANGUAGE sql AS
	$$ SELECT string_agg(key, ' ' ORDER BY expires_at) FROM idem.keys $$;
CREATE PROCEDURE ten_keys() LANGUAGE sql AS $$
	TRUNCATE idem.keys;
	SELECT count(claimed) FROM generate_series(1, 10) AS i, LATERAL idem_claim(i::text, ttl => i * interval '1 min');
$$;
CALL ten_keys();
SET idem.clock_offset = '1 h';
BEGIN;
SELECT idem_cleanup(3), idem_cleanup(2);
ROLLBACK;
SELECT idem_cleanup(1), left_keys();
BEGIN;
SELECT idem_cleanup(2);
SAVEPOINT s;
SELECT idem_cleanup(2);
ROLLBACK TO s;
SELECT idem_cleanup(1), left_keys();
SAVEPOINT s;
SELECT idem_cleanup(1), left_keys();
RELEASE s;
SELECT idem_cleanup(1), left_keys();
COMMIT;
SELECT idem_cleanup(1), left_keys();
-- prepared, and rolled back
BEGIN;
SELECT idem_cleanup(2);
PREPARE TRANSACTION 'cleanup';
ROLLBACK PREPARED 'cleanup';
SELECT idem_cleanup(1), left_keys();
RESET idem.clock_offset;
-- when there is nothing more to remove from that place on, the call begins again with the oldest
CALL ten_keys();
BEGIN;
ROLLBACK;
SET idem.clock_offset = '1 h';
SELECT idem_cleanup(8), left_keys();
SET idem.clock_offset = '-24 h';
SELECT count(claimed) FROM generate_series(1, 4) AS i, LATERAL idem_claim('old ' || i, ttl => i * interval '1 min');
SET idem.clock_offset = '1 h';
SELECT idem_cleanup(1), left_keys();
SELECT idem_cleanup(3), left_keys();
-- this one goes on from there
SELECT idem_cleanup(1), left_keys();
SELECT idem_cleanup(3), left_keys();
RESET idem.clock_offset;
-- the clock may go back
CALL ten_keys();
BEGIN;
ROLLBACK;
SET idem.clock_offset = '1 h';
SELECT idem_cleanup(5), left_keys();
SET idem.clock_offset = '-24 h';
SELECT claimed FROM idem_claim('old', ttl => '1 min');
RESET idem.clock_offset;
SELECT idem_cleanup(5), left_keys();
-- after a call that leaves nothing the next one begins with the oldest, too
CALL ten_keys();
BEGIN;
ROLLBACK;
SET idem.clock_offset = '1 h';
SELECT idem_cleanup(100), left_keys();
RESET idem.clock_offset;
CALL ten_keys();
SET idem.clock_offset = '1 h';
SELECT idem_cleanup(1), left_keys();
RESET idem.clock_offset;
-- so the entries of keys that were removed are not read again.  The number of pages shows it: each of the keys is on
-- another page than the key that expires before it.
CALL anew();
SELECT count(claimed) FROM generate_series(0, 4999) AS i, LATERAL idem_claim(i::text, ttl => (3 * i % 5000 + 1) * interval '1 s');
SET idem.clock_offset = '24 h';
BEGIN;
ROLLBACK;
BEGIN;
SELECT idem_cleanup(3000);
SELECT pages('SELECT idem_cleanup(10)') < 1000 AS few;
SAVEPOINT s;
SELECT idem_cleanup(10);
ROLLBACK TO s;
SELECT pages('SELECT idem_cleanup(10)') > 2000 AS many;
SELECT pages('SELECT idem_cleanup(10)') < 1000 AS few;
COMMIT;
SELECT pages('SELECT idem_cleanup(10)') < 1000 AS few;
SELECT idem_cleanup(5000), idem_cleanup(5000);
RESET idem.clock_offset;
DROP FUNCTION left_keys;
DROP PROCEDURE ten_keys;

-- bad input
SELECT idem_cleanup(0);
SELECT idem_cleanup(-1);
SELECT idem_cleanup(1000001);
SELECT idem_cleanup(NULL);
BEGIN READ ONLY;
SELECT idem_cleanup();
ROLLBACK;
