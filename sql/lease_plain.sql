--
-- L8: plain claims and leases on one key, in every order.
--
\set VERBOSITY sqlstate
CREATE FUNCTION handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"ran"'::jsonb $$;

-- live lease, then claim: busy; as batch and as call, too
SELECT token AS l_token FROM idem_lease('plain:1', '30 s', worker => 'w1') \gset
SELECT * FROM idem_claim('plain:1');
SELECT status FROM idem_claim('plain:1', wait => '0');
SELECT ord, claimed, status FROM idem_claim_many(ARRAY['plain:1', 'plain:2', 'plain:1']);
SELECT * FROM idem_call('plain:1', 'handler');
SELECT attempt, status FROM idem_get('plain:1');
-- the token is needed, and the transaction that leases does not hold it as a plain claim
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
-- which is a plain claim now: the lease has nothing to say any more
SELECT claimed, status FROM idem_lease('plain:1', '30 s', worker => 'w1');
SELECT status, worker, attempt, token, checkpoint, lease_until, expires_at - idem_clock() > '23 h' AS not_shorter FROM idem_get('plain:1');
SAVEPOINT s;
SELECT idem_finish('plain:1', '1', token => :l_token);
ROLLBACK TO s;
SELECT idem_renew('plain:1', :l_token, '30 s');
ROLLBACK TO s;
SELECT idem_finish('plain:1', '"plain"');
SELECT claimed, status, result FROM idem_lease('plain:1', '30 s', worker => 'w1');
-- rollback gives the lease back
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
-- released plain claim: as if never claimed, so the lease is there again, and has run out
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
-- and has lost nothing of its time
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
-- past its ttl there is nothing to go back to
SELECT status FROM idem_lease('plain:4', '30 s', ttl => '1 s');
SET idem.clock_offset = '1 min';
BEGIN;
SELECT status FROM idem_claim('plain:4');
SELECT idem_release('plain:4');
SELECT count(*) FROM idem_get('plain:4');
COMMIT;
SELECT status, attempt FROM idem_lease('plain:4', '30 s');
-- idem_call takes over as well
SET idem.clock_offset = '2 min';
SELECT * FROM idem_call('plain:4', 'handler');
SELECT * FROM idem_call('plain:4', 'handler');
SELECT status, result FROM idem_lease('plain:4', '30 s');
-- and so does a batch
RESET idem.clock_offset;
SELECT status FROM idem_lease('plain:5', '30 s');
SET idem.clock_offset = '1 min';
BEGIN;
SELECT ord, claimed, status FROM idem_claim_many(ARRAY['plain:5', 'plain:6']);
SELECT idem_finish_many(ARRAY['plain:5', 'plain:6'], ARRAY['5', '6']::jsonb[]);
COMMIT;
SELECT status, result FROM idem_lease('plain:5', '30 s');
RESET idem.clock_offset;

-- claim, then lease: held by this transaction is busy, committed is finished
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
-- a plain claim past its ttl can be leased; L7: it has no deadline and is not taken for an orphan before
SELECT status FROM idem_claim('plain:9', ttl => '1 h');
SET idem.clock_offset = '50 min';
SELECT status FROM idem_lease('plain:9', '30 s');
SET idem.clock_offset = '70 min';
SELECT status, attempt FROM idem_lease('plain:9', '30 s');
-- the same for one that came after a lease
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

TRUNCATE idem.keys;
DROP FUNCTION handler;
