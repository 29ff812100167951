--
-- The views of leases: idem.lease_status, key_status, key_summary.
--
\a\pset footer off
TRUNCATE idem.keys;
SELECT status FROM idem_claim('status:plain', ttl => '1 h');
SELECT token FROM idem_lease('status:finished', '30 s') \gset
SELECT idem_finish('status:finished', token => :token);
SELECT status FROM idem_lease('status:expired', '30 s', worker => 'w1', scope => 's');
SELECT status FROM idem_lease('status:parked', '30 s', on_expiry => 'park', worker => 'w2');
SELECT status FROM idem_lease('status:exhausted', '30 s', max_attempts => 1);
SELECT status FROM idem_lease('status:gone', '30 s', ttl => '1 s');
SELECT token FROM idem_lease('status:released', '30 s', on_expiry => 'park') \gset
SELECT idem_release('status:released', :token);
SELECT status FROM idem_lease('status:live', '10 min', worker => 'w3');

SELECT key, scope, owner = current_user::regrole AS mine, worker, attempt, time_left > '0' AS left, state
  FROM idem.lease_status ORDER BY key;
SET idem.clock_offset = '1 min';
SELECT key, scope, worker, attempt, age BETWEEN '1 min' AND '2 min' AS age,
	   time_left BETWEEN '-1 min' AND '10 min' AS time_left, time_left > '0' AS left, state, max_attempts
  FROM idem.lease_status ORDER BY key;
-- the token can be used
SELECT count(*) FROM idem.lease_status AS l, LATERAL idem_get(l.key, l.scope) AS g
 WHERE l.token = g.token AND l.state = g.status;
-- the views agree with the functions
SELECT key, state, CASE WHEN state = 'expired' THEN g.status END AS got
  FROM idem.lease_status AS l, LATERAL idem_lease(l.key, '30 s', scope => l.scope, wait => '0') AS g
 WHERE (state, g.status) NOT IN (('live', 'busy'), ('expired', 'claimed'), ('parked', 'parked'), ('exhausted', 'exhausted'));
SELECT key, worker, attempt, state FROM idem.lease_status ORDER BY key;

-- past the ttl: only parked keys are left
SET idem.clock_offset = '25 h';
SELECT key, time_left < '-24 h' AS long_ago, state FROM idem.lease_status ORDER BY key;
SELECT key, status, lease_left IS NULL AS plain, time_left > '0' AS left FROM idem.key_status ORDER BY key;
SELECT idem_cleanup();
SELECT key, status FROM idem.key_status ORDER BY key;
RESET idem.clock_offset;

-- numbers only
SET idem.clock_offset = '25 h';
SELECT status, keys FROM idem.key_summary ORDER BY status;
RESET idem.clock_offset;

-- a transaction sees its own lease, which is gone after rollback
TRUNCATE idem.keys;
SET client_min_messages = warning;
BEGIN;
SELECT status FROM idem_lease('status:open', '30 s');
SELECT key, state FROM idem.lease_status;
ROLLBACK;
SELECT count(*) FROM idem.lease_status;
RESET client_min_messages;

-- administrators see the view, monitors and applications do not: it shows keys
CREATE ROLE idem_lease_admin;
CREATE ROLE idem_lease_monitor;
SELECT idem_grant('idem_lease_admin', 'admin'), idem_grant('idem_lease_monitor', 'monitor');
SELECT status FROM idem_lease('status:10', '30 s');
SET ROLE idem_lease_admin;
SELECT key, state FROM idem.lease_status;
SET ROLE idem_lease_monitor;
\set VERBOSITY sqlstate
SELECT key, state FROM idem.lease_status;
SELECT status, keys FROM idem.key_summary;
RESET ROLE;
SELECT idem_revoke('idem_lease_admin', 'admin'), idem_revoke('idem_lease_monitor', 'monitor');
DROP ROLE idem_lease_admin, idem_lease_monitor;
TRUNCATE idem.keys;

-- every state of the view is the one that idem_get() returns
SET client_min_messages = warning;
SELECT status FROM idem_claim('agree:finished');
SELECT idem_finish('agree:leased', token => token) FROM idem_lease('agree:leased', '30 s');
SELECT status FROM idem_lease('agree:expired', '30 s');
SELECT status FROM idem_lease('agree:parked', '30 s', on_expiry => 'park');
SELECT status FROM idem_lease('agree:exhausted', '30 s', max_attempts => 1);
SET idem.clock_offset = '1 min';
BEGIN;
SELECT status FROM idem_claim('agree:held');
SELECT status FROM idem_lease('agree:live', '30 s');
SELECT s.key, s.status, s.status = g.status AS agree
  FROM idem.key_status AS s CROSS JOIN LATERAL idem_get(s.key) AS g ORDER BY s.key;
ROLLBACK;
-- past the ttl the view still shows the row, and idem_get() does not
SET idem.clock_offset = '25 h';
SELECT s.key, s.status, g.status AS got
  FROM idem.key_status AS s LEFT JOIN LATERAL idem_get(s.key) AS g ON true ORDER BY s.key;
RESET idem.clock_offset;
RESET client_min_messages;
TRUNCATE idem.keys;
-- status and lease_left of a row belong to the same moment, also if the clock moves during the query
SET client_min_messages = warning;
SELECT status FROM idem_lease('agree:1', '30 s');
SELECT status FROM idem_lease('agree:2', '30 s');
SELECT key, (status = 'live') = (lease_left > '0') AS agree, set_config('idem.clock_offset', '60', false) IS NOT NULL AS moved
  FROM idem.key_status;
RESET idem.clock_offset;
-- a lease that this transaction has finished expires as any other
BEGIN;
SELECT idem_finish('agree:1', token => token) FROM idem_get('agree:1');
SET LOCAL idem.clock_offset = '25 h';
SELECT status FROM idem.key_status WHERE key = 'agree:1';
SELECT count(*) FROM idem_get('agree:1');
ROLLBACK;
RESET client_min_messages;
TRUNCATE idem.keys;
