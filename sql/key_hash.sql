--
-- Keys are found by a hash of scope and key.  Equal hashes do not prove equal keys: the
-- text is compared, and nth distinguishes keys with the same hash.  (test/t/045_hash.pl tests
-- the hash itself.)
--
\a\pset footer off
CALL anew();
SET client_min_messages = warning;
\set VERBOSITY default

-- scope and key are hashed separately, and the function knows idem.scope
SELECT count(DISTINCT idem_key_hash(key, scope)) FROM (VALUES ('bc', 'a'), ('c', 'ab'), ('a', 'abc'), ('a', 'bc')) AS k (key, scope);
SET idem.scope = 'a';
SELECT idem_key_hash('bc') = idem_key_hash('bc', 'a') AS same;
RESET idem.scope;
SELECT idem_key_hash(NULL);
SELECT idem_key_hash('');
SELECT claimed FROM idem_claim('hash:own');
SELECT key_hash = idem_key_hash(key, scope) AS same, nth FROM idem.keys WHERE key = 'hash:own';

-- keys that have the hash of 'k' by force
CREATE PROCEDURE force_hash(forced text, nth integer) LANGUAGE sql AS $$
	UPDATE idem.keys SET key_hash = idem_key_hash('k', ''), nth = force_hash.nth WHERE key = forced
$$;
CREATE VIEW same_hash AS SELECT key, nth, result FROM idem.keys WHERE key_hash = idem_key_hash('k', '') ORDER BY nth;

-- another key of the same hash: no replay of its result, no error about its request or owner
BEGIN;
SELECT claimed FROM idem_claim('other', '1');
SELECT idem_finish('other', '"of another key"');
COMMIT;
CALL force_hash('other', 0);
SELECT status FROM idem_get('k');
SELECT idem_finish('k');
SELECT idem_forget('k');
BEGIN;
SELECT status, result FROM idem_claim('k', '2');
SELECT status FROM idem_claim('k', '2');
SELECT idem_finish('k', '"of k"');
COMMIT;
SELECT status, result FROM idem_claim('k', '2');
SELECT status, result FROM idem_get('k');
TABLE same_hash;

-- the key is found when the other one is gone, and is not claimed a second time under nth 0
DELETE FROM idem.keys WHERE key = 'other';
SELECT status, result FROM idem_claim('k', '2');
TABLE same_hash;
-- an expired key keeps its nth, and its row
SET idem.clock_offset = '2d';
BEGIN;
SELECT status FROM idem_claim('k');
SELECT idem_finish('k', '"second life"');
COMMIT;
RESET idem.clock_offset;
TABLE same_hash;
-- leases, too
SET idem.clock_offset = '4d';
SELECT token AS l_token FROM idem_lease('k', '30 s') \gset
SELECT idem_renew('k', :l_token, '1 min') IS NOT NULL AS renewed;
SELECT idem_finish('k', '"leased"', :l_token);
TABLE same_hash;
RESET idem.clock_offset;

-- the least free nth is taken, a rolled back claim leaves it free
SELECT idem_forget('k');
INSERT INTO idem.keys (created_at, expires_at, key_hash, owner, nth, key, scope)
SELECT now(), now() + interval '1 day', idem_key_hash('k', ''), current_user::regrole, i, 'other ' || i, '' FROM generate_series(0, 31) AS i WHERE i <> 5;
BEGIN;
SELECT status FROM idem_claim('k');
SELECT nth FROM same_hash WHERE key = 'k';
ROLLBACK;
SELECT status FROM idem_claim('k');
SELECT nth FROM same_hash WHERE key = 'k';
-- 32 other keys are too many; it works again when one of them is gone
SELECT idem_forget('k');
INSERT INTO idem.keys (created_at, expires_at, key_hash, owner, nth, key, scope)
VALUES (now(), now() + interval '1 day', idem_key_hash('k', ''), current_user::regrole, 5, 'other 5', '');
SELECT status FROM idem_claim('k');
SELECT status FROM idem_claim('fine');
SELECT count(*) FROM pg_locks WHERE locktype = 'object' AND classid = 'idem.keys'::regclass;
DELETE FROM idem.keys WHERE key = 'other 7';
SELECT status FROM idem_claim('k');
SELECT nth FROM same_hash WHERE key = 'k';

-- claims of many keys with one hash in one call
DELETE FROM idem.keys;
SELECT ord, key, status FROM idem_claim_many(ARRAY['k', 'l', 'k']);
DROP VIEW same_hash;
DROP PROCEDURE force_hash;
CALL anew();
