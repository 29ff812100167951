--
-- L8: plain claims and leases on one key, in every order.
--
\a\pset footer off
\set VERBOSITY sqlstate

-- live lease, then claim: busy; the same for idem_claim_many and idem_call
SELECT token AS l_token FROM idem_lease('plain:1', '30 s', worker => 'w1') \gset
SELECT * FROM idem_claim('plain:1');
SELECT status FROM idem_claim('plain:1', wait => '0');
SELECT ord, claimed, status FROM idem_claim_many(ARRAY['plain:1', 'plain:2', 'plain:1']);
SELECT * FROM idem_call('plain:1', 'handler');
SELECT attempt, status FROM idem_get('plain:1');
-- the token is needed: the transaction that leases a key does not hold it as a plain claim
BEGIN;
SELECT status FROM idem_lease('plain:3', '30 s');
SELECT status FROM idem_claim('plain:3');
SAVEPOINT s;
SELECT idem_finish('plain:3', '1');
ROLLBACK TO s;
SELECT idem_finish_many(ARRAY['plain:3']);
ROLLBACK TO s;
SELECT idem_release('plain:3');
ROLLBACK;

-- expired lease, then claim: takes over
SET idem.clock_offset = '1 min';
BEGIN;
SELECT claimed, status FROM idem_claim('plain:1', ttl => '1 h');
SELECT claimed, status FROM idem_claim('plain:1');
-- the key is a plain claim now: the lease does not matter any more
SELECT claimed, status FROM idem_lease('plain:1', '30 s', worker => 'w1');
SELECT status, worker, attempt, token, checkpoint, lease_until, expires_at - idem_clock() > '23 h' AS not_shorter FROM idem_get('plain:1');
SAVEPOINT s;
SELECT idem_finish('plain:1', '1', token => :l_token);
ROLLBACK TO s;
SELECT idem_renew('plain:1', :l_token, '30 s');
ROLLBACK TO s;
SELECT idem_finish('plain:1', '"plain"');
SELECT claimed, status, result FROM idem_lease('plain:1', '30 s', worker => 'w1');
-- rollback restores the lease
ROLLBACK;
SELECT status, worker, attempt, token = :l_token AS same_token FROM idem_get('plain:1');
SELECT idem_checkpoint('plain:1', :l_token, '1') > idem_clock() AS renewed;
SET idem.clock_offset = '2 min';
-- commit is final (K2), with a result or without
BEGIN;
SELECT claimed, status FROM idem_claim('plain:1');
COMMIT;
SELECT claimed, status, result, token, attempt FROM idem_lease('plain:1', '30 s', worker => 'w1');
SELECT idem_finish('plain:1', '1', token => :l_token);
SELECT idem_release('plain:1', token => :l_token);
SELECT idem_fence('plain:1', :l_token);
-- released plain claim: as if never claimed, so the lease is there again, and has expired
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('plain:4', '30 s', request => '4', max_attempts => 2, worker => 'w1') \gset
SELECT idem_checkpoint('plain:4', :l_token, '4') > idem_clock() AS renewed;
SET idem.clock_offset = '1 min';
BEGIN;
SELECT status FROM idem_claim('plain:4');
SELECT idem_release('plain:4');
SELECT status, worker, attempt, token = :l_token AS same_token, checkpoint FROM idem_get('plain:4');
COMMIT;
SELECT status, attempt, checkpoint, token > :l_token AS higher FROM idem_lease('plain:4', '30 s', request => '4');
SET idem.clock_offset = '2 min';
SELECT status FROM idem_claim('plain:4', request => '5');
SELECT status FROM idem_claim('plain:4', request => '4');
SELECT idem_forget('plain:4');
RESET idem.clock_offset;
-- with its times unchanged
SELECT token AS l_token FROM idem_lease('plain:4', '30 s', ttl => '1 h') \gset
SET idem.clock_offset = '1 min';
BEGIN;
SELECT status FROM idem_claim('plain:4', ttl => '1 s');
SELECT idem_release('plain:4');
COMMIT;
SET idem.clock_offset = '50 min';
SELECT status FROM idem_get('plain:4');
SELECT idem_finish('plain:4', '4', token => :l_token);
SELECT idem_forget('plain:4');
RESET idem.clock_offset;
-- past its ttl the lease is not restored
SELECT status FROM idem_lease('plain:4', '30 s', ttl => '1 s');
SET idem.clock_offset = '1 min';
BEGIN;
SELECT status FROM idem_claim('plain:4');
SELECT idem_release('plain:4');
SELECT count(*) FROM idem_get('plain:4');
COMMIT;
SELECT status, attempt FROM idem_lease('plain:4', '30 s');
-- idem_call takes over, too
SET idem.clock_offset = '2 min';
SELECT * FROM idem_call('plain:4', 'handler');
SELECT * FROM idem_call('plain:4', 'handler');
SELECT status, result FROM idem_lease('plain:4', '30 s');
-- and so does idem_claim_many
RESET idem.clock_offset;
SELECT status FROM idem_lease('plain:5', '30 s');
SET idem.clock_offset = '1 min';
BEGIN;
SELECT ord, claimed, status FROM idem_claim_many(ARRAY['plain:5', 'plain:6']);
SELECT idem_finish_many(ARRAY['plain:5', 'plain:6'], ARRAY['5', '6']::jsonb[]);
COMMIT;
SELECT status, result FROM idem_lease('plain:5', '30 s');
RESET idem.clock_offset;

-- claim, then lease: busy while this transaction holds the claim, finished after commit
BEGIN;
SELECT status FROM idem_claim('plain:7');
SELECT claimed, status, token, attempt, lease_until FROM idem_lease('plain:7', '30 s', worker => 'w1');
SELECT idem_finish('plain:7', '7');
SELECT claimed, status, result FROM idem_lease('plain:7', '30 s');
ROLLBACK;
SELECT claimed, status FROM idem_lease('plain:7', '30 s');
BEGIN;
SELECT status FROM idem_claim('plain:8');
COMMIT;
SELECT claimed, status, result, token, attempt, lease_until FROM idem_lease('plain:8', '30 s');
SELECT idem_finish('plain:8', '1', token => 1);
-- a plain claim past its ttl can be leased; L7: before, it has no deadline and does not count as abandoned
SELECT status FROM idem_claim('plain:9', ttl => '1 h');
SET idem.clock_offset = '50 min';
SELECT status FROM idem_lease('plain:9', '30 s');
SET idem.clock_offset = '70 min';
SELECT status, attempt FROM idem_lease('plain:9', '30 s');
-- the same for a claim that took over a lease
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('plain:10', '30 s', ttl => '10 min') \gset
SET idem.clock_offset = '1 min';
SELECT status FROM idem_claim('plain:10', ttl => '1 h');
SET idem.clock_offset = '50 min';
SELECT status FROM idem_lease('plain:10', '30 s');
SET idem.clock_offset = '70 min';
SELECT status, attempt, token > :l_token AS higher FROM idem_lease('plain:10', '30 s');
SELECT idem_finish('plain:10', '1', token => :l_token);
RESET idem.clock_offset;

-- K1, L3, L5: releasing a claim leaves the lease completely unchanged: its start, its end and
-- its expiry.  So the result of a late finish is kept for the ttl, and a checkpoint renews the
-- lease by its last length.
SELECT token AS f_token FROM idem_lease('undo:finish', '60 s', ttl => '1 day') \gset
SELECT token AS c_token FROM idem_lease('undo:checkpoint', '60 s', ttl => '1 day') \gset
SELECT token AS s_token FROM idem_lease('undo:savepoint', '60 s', ttl => '1 day', request => '1', worker => 'w', max_attempts => 3) \gset
SELECT idem_checkpoint('undo:savepoint', :s_token, '1') IS NOT NULL AS stored;
CREATE TABLE lease_before AS SELECT k.key, k::text AS lease FROM idem.keys AS k WHERE k.key LIKE 'undo:%';
CREATE FUNCTION as_before(name text) RETURNS boolean LANGUAGE sql AS $$
	SELECT k::text = b.lease FROM lease_before AS b LEFT JOIN idem.keys AS k USING (key) WHERE b.key = name
$$;
SET idem.clock_offset = '86300 s';
BEGIN;
SELECT claimed FROM idem_claim('undo:finish', ttl => '1 s');
SELECT as_before('undo:finish');
SELECT idem_release('undo:finish');
SELECT as_before('undo:finish'), status FROM idem_get('undo:finish');
COMMIT;
SELECT as_before('undo:finish');
SELECT idem_finish('undo:finish', '1', token => :f_token);
SET idem.clock_offset = '172600 s';
SELECT status FROM idem_claim('undo:finish');
-- also with a ttl longer than that of the lease, and repeatedly
SET idem.clock_offset = '86300 s';
BEGIN;
SELECT claimed FROM idem_claim('undo:checkpoint', ttl => '100 years');
SELECT idem_release('undo:checkpoint');
SELECT claimed FROM idem_claim('undo:checkpoint', ttl => '1 s');
SELECT status FROM idem_claim('undo:checkpoint');
SELECT idem_release('undo:checkpoint');
SELECT as_before('undo:checkpoint');
COMMIT;
SELECT as_before('undo:checkpoint');
SELECT idem_checkpoint('undo:checkpoint', :c_token, '1') - idem_clock() <= '60 s' AS not_longer;
SELECT lease_until - leased_at AS length, expires_at - lease_until AS ttl FROM idem.keys WHERE key = 'undo:checkpoint';
-- savepoints: around the claim, the release, both
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('undo:savepoint', ttl => '10 days');
ROLLBACK TO s;
SELECT as_before('undo:savepoint');
SELECT claimed FROM idem_claim('undo:savepoint', ttl => '10 days');
SAVEPOINT s2;
SELECT idem_release('undo:savepoint');
SELECT as_before('undo:savepoint');
ROLLBACK TO s2;
SELECT status, as_before('undo:savepoint') FROM idem_claim('undo:savepoint');
SELECT idem_release('undo:savepoint');
SAVEPOINT s3;
SELECT claimed FROM idem_claim('undo:savepoint', ttl => '1 s');
SELECT idem_finish('undo:savepoint', '"undone"');
ROLLBACK TO s3;
COMMIT;
SELECT as_before('undo:savepoint');
-- prepared transactions
BEGIN;
SELECT claimed FROM idem_claim('undo:savepoint', ttl => '10 days');
SELECT idem_release('undo:savepoint');
PREPARE TRANSACTION 'released';
SELECT status FROM idem_claim('undo:savepoint', wait => '0');
COMMIT PREPARED 'released';
SELECT as_before('undo:savepoint');
BEGIN;
SELECT claimed FROM idem_claim('undo:savepoint', ttl => '10 days');
PREPARE TRANSACTION 'claimed';
ROLLBACK PREPARED 'claimed';
SELECT as_before('undo:savepoint');
-- the key expires with the ttl of the lease, as without the claim
SET idem.clock_offset = '86500 s';
SELECT count(*) FROM idem_get('undo:savepoint');
SELECT idem_fence('undo:savepoint', :s_token);
-- the next lease continues from there
SET idem.clock_offset = '86300 s';
SELECT status, attempt, checkpoint, token > :s_token AS higher FROM idem_lease('undo:savepoint', '60 s');
RESET idem.clock_offset;
DROP FUNCTION as_before;
DROP TABLE lease_before;

-- created_at is the first claim since the key was last absent: a takeover of a lease keeps it
SELECT status FROM idem_lease('plain:11', '30 s', ttl => '1 h');
CREATE TABLE life AS SELECT created_at AS began FROM idem_get('plain:11');
SET idem.clock_offset = '1 min';
SELECT status FROM idem_lease('plain:11', '30 s', ttl => '1 h');
SELECT created_at = began AS kept FROM idem_get('plain:11'), life;
SET idem.clock_offset = '2 min';
SELECT status, created_at = began AS kept FROM idem_claim('plain:11', ttl => '1 h'), life;
SELECT status, created_at = began AS kept FROM idem_claim('plain:11'), life;
SET idem.clock_offset = '3 h';
SELECT status, created_at - began > '2 h' AS new FROM idem_claim('plain:11'), life;
RESET idem.clock_offset;
DROP TABLE life;

TRUNCATE idem.keys;
