--
-- Expired leases: retry, park, exhausted, gone; and tokens when the clock is set
-- back.
--
\a\pset footer off
\set VERBOSITY sqlstate

-- L1, park: no worker gets the key, not even the same one, and nothing is written
SELECT token AS l_token FROM idem_lease('park:1', '30 s', worker => 'w1', on_expiry => 'park') \gset
SELECT status FROM idem_lease('park:1', '30 s', worker => 'w1');
SET idem.clock_offset = '1 min';
SELECT key_version('park:1') AS before \gset
SELECT claimed, status, token, attempt FROM idem_lease('park:1', '30 s', worker => 'w1');
SELECT claimed, status, token, attempt FROM idem_lease('park:1', '30 s', on_expiry => 'retry', wait => '0');
SELECT claimed, status, result FROM idem_claim('park:1');
SELECT ord, claimed, status FROM idem_claim_many(ARRAY['park:1', 'park:0']);
SELECT status, attempt FROM idem_get('park:1');
SELECT key_version('park:1') = :'before' AS untouched;
-- it stays parked beyond its ttl, until an operator decides; cleanup does not remove it
SET idem.clock_offset = '1000 h';
SELECT claimed, status FROM idem_lease('park:1', '30 s');
SELECT idem_cleanup() > 0 AS others_removed;
SELECT status FROM idem_get('park:1');
SELECT key_version('park:1') = :'before' AS untouched;

-- option 1: release and run again; the attempt does not count, and the next token is higher
SELECT idem_release('park:1', token => :l_token);
SELECT status FROM idem_get('park:1');
SELECT * FROM idem_lease('park:1', '30 s', on_expiry => 'park') \gset m_
SELECT :'m_status' AS status, :'m_attempt' AS attempt, :m_token > :l_token AS higher;
SELECT idem_finish('park:1', token => :l_token);
-- option 2: finish, the work was done; the result is kept for the ttl, counted from the finish
SET idem.clock_offset = '2000 h';
SELECT status FROM idem_get('park:1');
SELECT idem_finish('park:1', '"did happen"', token => :m_token);
SELECT claimed, status, result FROM idem_lease('park:1', '30 s');
SELECT expires_at - finished_at = '24 h' AS kept FROM idem_get('park:1');
SET idem.clock_offset = '2025 h';
SELECT count(*) FROM idem_get('park:1');
-- option 3: the worker returns
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('park:2', '30 s', on_expiry => 'park') \gset
SET idem.clock_offset = '1 min';
SELECT status FROM idem_get('park:2');
SELECT idem_renew('park:2', :l_token, '30 s') > idem_clock() AS renewed;
SELECT status FROM idem_get('park:2');
-- release of a parked key gives one more attempt, even after the last one
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('park:3', '30 s', on_expiry => 'park', max_attempts => 1) \gset
SET idem.clock_offset = '1 min';
SELECT status FROM idem_lease('park:3', '30 s', max_attempts => 1);
SELECT idem_release('park:3', token => :l_token);
SELECT status, attempt FROM idem_lease('park:3', '30 s', max_attempts => 1);
-- a live lease can be released, too
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('park:4', '30 s', on_expiry => 'park') \gset
SELECT idem_release('park:4', token => :l_token);
SELECT status, attempt FROM idem_lease('park:4', '30 s', on_expiry => 'park');
-- the next lease sets its own on_expiry
SET idem.clock_offset = '1 min';
SELECT status FROM idem_get('park:4');
RESET idem.clock_offset;
SELECT status FROM idem_lease('park:5', '30 s');
SET idem.clock_offset = '1 min';
SELECT status, attempt FROM idem_lease('park:5', '30 s', on_expiry => 'park');
SET idem.clock_offset = '2 min';
SELECT status, attempt FROM idem_lease('park:5', '30 s');
-- an operator can forget it
SELECT idem_forget('park:5');
SELECT status, attempt FROM idem_lease('park:5', '30 s');
RESET idem.clock_offset;

-- max_attempts: when the lease of the last attempt has expired, the key is exhausted
SELECT status, attempt FROM idem_lease('max:1', '30 s', max_attempts => 2);
SET idem.clock_offset = '1 min';
SELECT status, attempt FROM idem_lease('max:1', '30 s');
SELECT status, attempt FROM idem_lease('max:1', '30 s', max_attempts => 1);
SET idem.clock_offset = '2 min';
SELECT key_version('max:1') AS before \gset
SELECT claimed, status, token, attempt, lease_until < idem_clock() AS over FROM idem_lease('max:1', '30 s');
SELECT claimed, status FROM idem_lease('max:1', '30 s', max_attempts => 2);
SELECT claimed, status FROM idem_claim('max:1');
SELECT status, replayed FROM idem_call('max:1', 'handler');
SELECT status, attempt FROM idem_get('max:1');
SELECT key_version('max:1') = :'before' AS untouched;
-- the higher limit counts, so one call with a higher limit also helps callers with a lower one
SELECT status FROM idem_lease('max:1', '30 s', max_attempts => 1);
-- options: more attempts ...
SELECT * FROM idem_lease('max:1', '30 s', max_attempts => 3) \gset m_
SELECT :'m_status' AS status, :'m_attempt' AS attempt;
-- ... which also apply to callers that give no limit, or a lower one ...
SET idem.clock_offset = '3 min';
SELECT status FROM idem_lease('max:1', '30 s');
SELECT idem_release('max:1', (idem_lease('max:1', '1 s', max_attempts => 5)).token);
SELECT * FROM idem_lease('max:1', '30 s', max_attempts => 2) \gset m_
SELECT :'m_status' AS status, :'m_attempt' AS attempt;
SET idem.clock_offset = '4 min';
SELECT status FROM idem_lease('max:1', '30 s', max_attempts => 2);
-- ... or finish with the token of the last attempt
SELECT idem_finish('max:1', '{"error": "gave up"}', token => :m_token);
SELECT status, result FROM idem_lease('max:1', '30 s');
RESET idem.clock_offset;
-- a released attempt counts
SELECT token AS l_token FROM idem_lease('max:2', '30 s', max_attempts => 1) \gset
SELECT idem_release('max:2', token => :l_token);
SELECT status FROM idem_lease('max:2', '30 s');
-- forget starts from the beginning
SELECT idem_forget('max:2');
SELECT status, attempt FROM idem_lease('max:2', '30 s', max_attempts => 1);

-- L7: an abandoned lease stays for its ttl after it has expired, then it is gone
TRUNCATE idem.keys;
SELECT token AS l_token FROM idem_lease('gone:1', '30 s', ttl => '1 h', worker => 'w1', max_attempts => 1) \gset
SELECT idem_checkpoint('gone:1', :l_token, '1') > idem_clock() AS renewed;
SELECT status FROM idem_lease('gone:2', '30 s', ttl => '1 h');
SET idem.clock_offset = '3620 s';
SELECT idem_cleanup();
SELECT status, attempt FROM idem_get('gone:1');
-- the key starts again: first attempt, no checkpoint, any request; but tokens continue to grow
SET idem.clock_offset = '3660 s';
SELECT count(*) FROM idem_get('gone:1');
SELECT idem_finish('gone:1', token => :l_token);
SELECT idem_renew('gone:1', :l_token, '30 s');
SELECT status, attempt, checkpoint, token > :l_token AS higher FROM idem_lease('gone:1', '30 s', request => '1');
SELECT idem_finish('gone:1', token => :l_token);
-- cleanup removes abandoned leases
SELECT idem_cleanup();
SELECT key FROM idem.keys;
-- without a row the old token is stale, too
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('gone:3', '30 s') \gset
SELECT idem_forget('gone:3');
SELECT idem_finish('gone:3', token => :l_token);
SELECT idem_fence('gone:3', :l_token);
-- a finished lease is kept for its ttl and not longer
SELECT token AS l_token FROM idem_lease('gone:4', '30 s', ttl => '1 h') \gset
SELECT idem_finish('gone:4', '4', token => :l_token);
SET idem.clock_offset = '3620 s';
SELECT idem_cleanup();
SELECT status, result FROM idem_claim('gone:4');
SELECT idem_finish('gone:4', '4', token => :l_token);
SET idem.clock_offset = '3640 s';
SELECT idem_finish('gone:4', '4', token => :l_token);
SELECT idem_cleanup();

-- L2: tokens grow even if the clock is set back
RESET idem.clock_offset;
TRUNCATE idem.keys;
SET idem.clock_offset = '10 h';
SELECT token AS t1 FROM idem_lease('clock:1', '30 s') \gset
SELECT idem_release('clock:1', token => :t1);
SET idem.clock_offset = '-1 h';
-- by the current clock the lease has not expired
SELECT status FROM idem_lease('clock:1', '30 s');
SET idem.clock_offset = '11 h';
SELECT token AS t2 FROM idem_lease('clock:1', '30 s', worker => 'w', ttl => '1 s') \gset
SET idem.clock_offset = '10 h';
SELECT idem_renew('clock:1', :t2, '1 us') < idem_clock() + '1 s' AS short;
SELECT token AS t3 FROM idem_lease('clock:1', '30 s', ttl => '1 s') \gset
SELECT :t2 > :t1 AS second, :t3 = :t2 + 1 AS third;
SELECT idem_renew('clock:1', :t3, '1 us') IS NOT NULL AS renewed;
-- a plain claim that takes over keeps the token, and so does one that finds the lease gone
BEGIN;
SELECT status FROM idem_claim('clock:1', ttl => '1 s');
COMMIT;
SET idem.clock_offset = '36010 s';
SELECT token AS t4 FROM idem_lease('clock:1', '30 s', ttl => '1 s') \gset
SELECT :t4 = :t3 + 1 AS fourth;
SET idem.clock_offset = '36060 s';
SELECT status FROM idem_claim('clock:1', ttl => '1 s');
SET idem.clock_offset = '36070 s';
SELECT token = :t4 + 1 AS fifth FROM idem_lease('clock:1', '30 s');
-- even long before 1970 a token is positive
SET idem.clock_offset = '-2147483648 s';
SELECT token FROM idem_lease('clock:2', '30 s');
RESET idem.clock_offset;

TRUNCATE idem.keys;
