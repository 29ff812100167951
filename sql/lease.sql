--
-- Leases: every status of idem_lease, and every function that takes a token.
-- Times are compared, never shown; the test sets idem.clock_offset instead of waiting.
--
\a\pset footer off

-- claimed: the token is the time (L2), the ttl starts at the end of the lease (L1)
SELECT idem_clock() AS before \gset
SELECT claimed, status, result, attempt, checkpoint,
	   token BETWEEN micros(:'before') AND micros(idem_clock()) AS token_is_time,
	   token + 30000000 = micros(lease_until) AS lease_from_now,
	   expires_at - lease_until AS kept_after
  FROM idem_lease('lease:1', '30 s', ttl => '1 h', worker => 'w1');
SELECT token, lease_until, expires_at FROM idem_get('lease:1') \gset l_

-- a live lease is never taken over: busy, with the end of the lease, without the token (L1)
SELECT claimed, status, result, token, attempt, checkpoint,
	   lease_until = :'l_lease_until' AS lease_until, expires_at = :'l_expires_at' AS expires_at
  FROM idem_lease('lease:1', '30 s', worker => 'w2');
SELECT claimed, status, token FROM idem_lease('lease:1', '30 s');
SELECT claimed, status, token FROM idem_lease('lease:1', '30 s', wait => '0');

-- the same worker is resumed: same token, and nothing is written
SELECT key_version('lease:1') AS before \gset
SELECT claimed, status, token = :l_token AS same_token, attempt, lease_until = :'l_lease_until' AS same_end
  FROM idem_lease('lease:1', '5 min', ttl => '1 min', worker => 'w1', max_attempts => 1, on_expiry => 'park');
SELECT key_version('lease:1') = :'before' AS untouched;

-- the same key in another scope is another key
SELECT claimed, status, attempt FROM idem_lease('lease:1', '30 s', scope => 'other');

-- L6: renew counts from now, by the given interval, which may be shorter
SELECT idem_renew('lease:1', :l_token, '10 min') AS until \gset
SELECT :'until'::timestamptz - idem_clock() BETWEEN '9 min' AND '10 min' AS ten_minutes,
	   lease_until = :'until' AS stored, expires_at - lease_until AS kept_after, token = :l_token AS same_token, attempt
  FROM idem_get('lease:1');
SELECT idem_renew('lease:1', :l_token, '20 s') - idem_clock() BETWEEN '10 s' AND '20 s' AS twenty_seconds;

-- L5: a checkpoint is stored, and the lease starts again with the same length
SET idem.clock_offset = '15 s';
SELECT idem_checkpoint('lease:1', :l_token, '{"charged": true}') - idem_clock() BETWEEN '10 s' AND '20 s' AS renewed;
SELECT status, checkpoint, token = :l_token AS same_token, attempt, worker, owner = current_user AS mine,
	   expires_at - lease_until AS kept_after
  FROM idem_get('lease:1');
SELECT claimed, status, checkpoint FROM idem_lease('lease:1', '30 s', worker => 'w1');
-- other workers do not see it
SELECT claimed, status, checkpoint FROM idem_lease('lease:1', '30 s', worker => 'w2');

-- L1: an expired lease is taken over, with a higher token, one more attempt and the checkpoint
SET idem.clock_offset = '40 s';
SELECT status FROM idem_get('lease:1');
SELECT * FROM idem_lease('lease:1', '30 s', worker => 'w2') \gset m_
SELECT :'m_claimed' AS claimed, :'m_status' AS status, :'m_attempt' AS attempt, :m_token > :l_token AS higher,
	   :'m_checkpoint' AS checkpoint;
-- after that the worker name alone does not resume the lease
SELECT claimed, status FROM idem_lease('lease:1', '30 s', worker => 'w1');

-- L3: the old token has no effect, the new one finishes
\set VERBOSITY sqlstate
SELECT key_version('lease:1') AS before \gset
SELECT idem_finish('lease:1', '1', token => :l_token);
SELECT idem_release('lease:1', token => :l_token);
SELECT idem_renew('lease:1', :l_token, '1 min');
SELECT idem_checkpoint('lease:1', :l_token, '1');
SELECT idem_fence('lease:1', :l_token);
SELECT key_version('lease:1') = :'before' AS untouched;
SELECT idem_fence('lease:1', :m_token);
SELECT idem_finish('lease:1', '{"id": "ch_1"}', token => :m_token);
SELECT claimed, status, result, token, attempt, checkpoint FROM idem_lease('lease:1', '30 s', worker => 'w2');
SELECT claimed, status, result FROM idem_claim('lease:1');
SELECT status, result, attempt, worker, checkpoint, finished_at IS NOT NULL AS finished FROM idem_get('lease:1');

-- L3: the same finish again is a no-op, another result is ID004, the old token stays ID003
SELECT key_version('lease:1') AS before \gset
SELECT idem_finish('lease:1', '{"id": "ch_1"}', token => :m_token);
SELECT key_version('lease:1') = :'before' AS untouched;
SELECT idem_finish('lease:1', '{"id": "ch_2"}', token => :m_token);
SELECT idem_finish('lease:1', token => :m_token);
SELECT idem_finish('lease:1', '{"id": "ch_1"}', token => :l_token);
-- nothing else can be done with the token of a finished key
SELECT idem_release('lease:1', token => :m_token);
SELECT idem_renew('lease:1', :m_token, '1 min');
SELECT idem_checkpoint('lease:1', :m_token, '1');
SELECT idem_fence('lease:1', :m_token);
SELECT key_version('lease:1') = :'before' AS untouched;

-- L3: finish works after the lease has expired, unless another worker took over
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('lease:2', '30 s') \gset
SET idem.clock_offset = '1 h';
SELECT idem_fence('lease:2', :l_token);
SELECT idem_finish('lease:2', token => :l_token);
SELECT claimed, status, result FROM idem_lease('lease:2', '30 s');
-- and the result is kept for the ttl, counted from the finish
SELECT expires_at - finished_at = '24 h' AS kept FROM idem_get('lease:2');
SET idem.clock_offset = '24 h';
SELECT claimed, status FROM idem_lease('lease:2', '30 s');

-- the same for renew and checkpoint
RESET idem.clock_offset;
SELECT token AS l_token FROM idem_lease('lease:3', '30 s', worker => 'w0') \gset
SET idem.clock_offset = '1 min';
SELECT status FROM idem_get('lease:3');
SELECT idem_renew('lease:3', :l_token, '30 s') > idem_clock() AS renewed;
SELECT status FROM idem_get('lease:3');
SET idem.clock_offset = '2 min';
SELECT idem_checkpoint('lease:3', :l_token, '1') > idem_clock() AS renewed;
SELECT status FROM idem_get('lease:3');

-- release: the next caller gets the key at once; the released token is stale (L3)
SELECT idem_release('lease:3', token => :l_token);
SELECT status, attempt, worker, token > :l_token AS another_token FROM idem_get('lease:3');
SELECT idem_finish('lease:3', token => :l_token);
SELECT idem_release('lease:3', token => :l_token);
SELECT * FROM idem_lease('lease:3', '30 s', worker => 'w3') \gset m_
SELECT :'m_status' AS status, :'m_attempt' AS attempt, :m_token > :l_token AS higher, :'m_checkpoint' AS checkpoint;
RESET idem.clock_offset;

-- request: checked in every case (K7); a request given with a later lease is stored
SELECT token AS l_token FROM idem_lease('lease:4', '30 s', request => '{"cents": 1}', worker => 'w1') \gset
SELECT status FROM idem_lease('lease:4', '30 s', request => '{"cents": 2}');
SELECT status FROM idem_lease('lease:4', '30 s', request => '{"cents": 2}', worker => 'w1');
SELECT status FROM idem_lease('lease:4', '30 s', request => '{"cents": 1}', worker => 'w1');
SELECT status FROM idem_claim('lease:4', request => '{"cents": 2}');
SET idem.clock_offset = '1 min';
SELECT status FROM idem_lease('lease:4', '30 s', request => '{"cents": 2}');
SELECT status FROM idem_claim('lease:4', request => '{"cents": 2}');
SELECT status FROM idem_lease('lease:4', '30 s');
SELECT status FROM idem_lease('lease:4', '30 s', request => '{"cents": 2}');
RESET idem.clock_offset;
SELECT status FROM idem_lease('lease:5', '30 s');
SET idem.clock_offset = '1 min';
SELECT status FROM idem_lease('lease:5', '30 s', request => '{"cents": 1}');
SELECT status FROM idem_lease('lease:5', '30 s', request => '{"cents": 2}');
RESET idem.clock_offset;

-- inside a longer transaction it works, with a notice; rollback removes the lease
\set VERBOSITY default
BEGIN;
SELECT status, attempt FROM idem_lease('lease:6', '30 s', worker => 'w1');
SELECT status, attempt FROM idem_lease('lease:6', '30 s', worker => 'w1');
SELECT status, attempt FROM idem_lease('lease:6', '30 s');
ROLLBACK;
SELECT count(*) FROM idem_get('lease:6');
BEGIN;
SELECT token AS l_token FROM idem_lease('lease:6', '30 s') \gset
SELECT idem_checkpoint('lease:6', :l_token, '1') > idem_clock() AS renewed;
SAVEPOINT s;
SELECT idem_finish('lease:6', '"first"', token => :l_token);
ROLLBACK TO s;
SELECT idem_finish('lease:6', '"second"', token => :l_token);
COMMIT;
SELECT status, result FROM idem_lease('lease:6', '30 s');

-- several functions in one statement see each other's work
SELECT (l).status, idem_finish('lease:7', '7', token => (l).token)
  FROM (SELECT idem_lease('lease:7', '30 s') AS l OFFSET 0) AS s;
SELECT status, result FROM idem_get('lease:7');

-- an index on a column of leases is kept up to date, also by plain claims
CREATE INDEX by_worker ON idem.keys (worker, attempt);
SELECT status FROM idem_claim('lease:indexed');
SELECT token AS l_token FROM idem_lease('lease:9', '30 s', worker => 'wi') \gset
SELECT idem_finish('lease:9', token => :l_token);
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT key FROM idem.keys WHERE worker = 'wi';
SELECT count(*) FROM idem.keys WHERE worker IS NULL AND key = 'lease:indexed';
RESET enable_seqscan;
RESET enable_bitmapscan;
DROP INDEX idem.by_worker;

-- a row that the same statement has removed is not searched for in an endless loop
SELECT token AS l_token FROM idem_lease('lease:10', '30 s') \gset
WITH d AS (DELETE FROM idem.keys WHERE key = 'lease:10' RETURNING key) SELECT idem_forget(key) FROM d;
\set VERBOSITY sqlstate
SELECT token AS l_token FROM idem_lease('lease:10', '30 s') \gset
WITH d AS (DELETE FROM idem.keys WHERE key = 'lease:10' RETURNING key) SELECT idem_fence(key, :l_token) FROM d;

TRUNCATE idem.keys;
