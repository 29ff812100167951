/* src/sql/keys_views.sql: views of keys and leases */

/*
 * idem.key_status and idem.lease_status show keys and are for administrators;
 * idem.key_summary shows no keys and is for monitors.  The states are those of
 * keyrow.c.
 */
-- set: monitor
CREATE FUNCTION idem_internal.idem_key_state(
	now timestamp with time zone,
	xmin xid,
	finished_at timestamp with time zone,
	expires_at timestamp with time zone,
	lease_until timestamp with time zone,
	park boolean,
	attempt integer,
	max_attempts integer)
RETURNS text
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_key_state';
COMMENT ON FUNCTION idem_internal.idem_key_state IS
	'state of a row of idem.keys at a time: held, finished, live, parked, exhausted or expired';

-- set: admin
CREATE VIEW idem.key_status AS
SELECT k.key,
	   k.scope,
	   k.owner,
	   idem_internal.idem_key_state(c.now, k.xmin, k.finished_at, k.expires_at, k.lease_until, k.park, k.attempt, k.max_attempts) AS status,
	   c.now - k.created_at AS age,
	   k.expires_at - c.now AS time_left,
	   k.worker,
	   k.attempt,
	   k.token,
	   k.lease_until - c.now AS lease_left,
	   k.max_attempts
  FROM idem.keys AS k
 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS c;
COMMENT ON VIEW idem.key_status IS 'every key with its state, age and time left; for administrators';
COMMENT ON COLUMN idem.key_status.key IS 'the key';
COMMENT ON COLUMN idem.key_status.scope IS 'scope of the key';
COMMENT ON COLUMN idem.key_status.owner IS 'role that owns the key';
COMMENT ON COLUMN idem.key_status.status IS 'held (by this transaction), finished or expired; a lease can also be live, parked or exhausted';
COMMENT ON COLUMN idem.key_status.age IS 'time since the key was first claimed';
COMMENT ON COLUMN idem.key_status.time_left IS 'time until the key expires; negative once it has expired';
COMMENT ON COLUMN idem.key_status.worker IS 'name of the worker that holds the lease, as given to idem_lease()';
COMMENT ON COLUMN idem.key_status.attempt IS 'number of leases of this key';
COMMENT ON COLUMN idem.key_status.token IS 'fencing token of the last lease';
COMMENT ON COLUMN idem.key_status.lease_left IS 'time until the lease expires; negative once it has expired; null for a plain claim';
COMMENT ON COLUMN idem.key_status.max_attempts IS 'maximum number of leases; null: no limit';

-- set: monitor
CREATE VIEW idem.key_summary AS
SELECT s.owner,
	   s.status,
	   count(*) AS keys,
	   max(s.age) AS oldest,
	   min(s.time_left) AS next_expiry
  FROM idem.key_status AS s
 GROUP BY s.owner, s.status;
COMMENT ON VIEW idem.key_summary IS 'number of keys by role and state; for monitors: shows no keys';
COMMENT ON COLUMN idem.key_summary.owner IS 'role that owns the keys';
COMMENT ON COLUMN idem.key_summary.status IS 'held (by this transaction), finished or expired; leases can also be live, parked or exhausted';
COMMENT ON COLUMN idem.key_summary.keys IS 'number of keys';
COMMENT ON COLUMN idem.key_summary.oldest IS 'age of the oldest key';
COMMENT ON COLUMN idem.key_summary.next_expiry IS 'time until the first of the keys expires; negative once it has expired';

-- set: admin
CREATE VIEW idem.lease_status AS
SELECT s.key,
	   s.scope,
	   s.owner,
	   s.worker,
	   s.attempt,
	   s.token,
	   s.age,
	   s.lease_left AS time_left,
	   s.status AS state,
	   s.max_attempts
  FROM idem.key_status AS s
 WHERE s.lease_left IS NOT NULL
   AND (s.status = ANY (ARRAY['live', 'parked', 'exhausted'])
		OR (s.status = 'expired'
			AND s.time_left > interval '0'));
COMMENT ON VIEW idem.lease_status IS 'every lease that is not finished, including those that are stuck; for administrators';
COMMENT ON COLUMN idem.lease_status.key IS 'the key';
COMMENT ON COLUMN idem.lease_status.scope IS 'scope of the key';
COMMENT ON COLUMN idem.lease_status.owner IS 'role that owns the key';
COMMENT ON COLUMN idem.lease_status.worker IS 'name of the worker that holds the lease, as given to idem_lease()';
COMMENT ON COLUMN idem.lease_status.attempt IS 'number of leases of this key, including this one';
COMMENT ON COLUMN idem.lease_status.token IS 'fencing token; an operator finishes or releases a parked key with it';
COMMENT ON COLUMN idem.lease_status.age IS 'time since the key was first claimed';
COMMENT ON COLUMN idem.lease_status.time_left IS 'time until the lease expires; negative once it has expired';
COMMENT ON COLUMN idem.lease_status.max_attempts IS 'maximum number of leases; null: no limit';
COMMENT ON COLUMN idem.lease_status.state IS 'live, expired (the next claim gets the key), parked (an operator must decide) or exhausted (no attempts are left)';
