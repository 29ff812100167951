/* src/idem--0.1.0--0.2.0.sql: leases; what they need in the table, functions, views */

-- complain if this script is sourced in psql instead of via ALTER EXTENSION
\echo Use "ALTER EXTENSION idem UPDATE TO '0.2.0'" to load this file. \quit

/* Rows of plain claims stay as they are: nothing is rewritten. */
ALTER TABLE idem.keys
	ADD COLUMN token bigint,
	ADD COLUMN leased_at timestamp with time zone,
	ADD COLUMN lease_until timestamp with time zone,
	ADD COLUMN attempt integer,
	ADD COLUMN max_attempts integer,
	ADD COLUMN park boolean,
	ADD COLUMN worker text COLLATE "C",
	ADD COLUMN checkpoint jsonb;
COMMENT ON COLUMN idem.keys.token IS 'fencing token of the last lease, or null if there was none';
COMMENT ON COLUMN idem.keys.leased_at IS 'when the lease was taken or renewed';
COMMENT ON COLUMN idem.keys.lease_until IS 'when the lease runs out, or null for a plain claim';
COMMENT ON COLUMN idem.keys.attempt IS 'number of leases of this key, this one included';
COMMENT ON COLUMN idem.keys.max_attempts IS 'how many leases there may be, or null for no limit';
COMMENT ON COLUMN idem.keys.park IS 'whether the key is left to an operator when the lease has run out';
COMMENT ON COLUMN idem.keys.worker IS 'name that the holder of the lease has given';
COMMENT ON COLUMN idem.keys.checkpoint IS 'what idem_checkpoint() was given';

COMMENT ON FUNCTION pg_catalog.idem_finish(text, jsonb, bigint, text) IS
	'store the result of a key that this transaction has claimed, or of a lease with its token';
COMMENT ON FUNCTION pg_catalog.idem_release(text, bigint, text) IS
	'give up a key that this transaction has claimed, as if it had never been claimed; with the token of a lease: let the next one have it at once';

CREATE FUNCTION pg_catalog.idem_lease(
	key text,
	lease interval,
	request jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	worker text DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	on_expiry text DEFAULT 'retry',
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT claimed boolean,
	OUT status text,
	OUT result jsonb,
	OUT token bigint,
	OUT attempt integer,
	OUT checkpoint jsonb,
	OUT lease_until timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_lease';
COMMENT ON FUNCTION pg_catalog.idem_lease(text, interval, jsonb, interval, text, integer, text, interval, text) IS
	'claim an idempotency key for a time that outlives this transaction, for work outside the database, and get a fencing token';

CREATE FUNCTION pg_catalog.idem_renew(
	key text,
	token bigint,
	lease interval,
	scope text DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_renew';
COMMENT ON FUNCTION pg_catalog.idem_renew(text, bigint, interval, text) IS
	'let a lease run from now on for the time given; returns its new end';

CREATE FUNCTION pg_catalog.idem_checkpoint(
	key text,
	token bigint,
	data jsonb,
	scope text DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_checkpoint';
COMMENT ON FUNCTION pg_catalog.idem_checkpoint(text, bigint, jsonb, text) IS
	'store a recovery point for the next attempt and renew the lease; returns its new end';

CREATE FUNCTION pg_catalog.idem_fence(
	key text,
	token bigint,
	scope text DEFAULT NULL)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_fence';
COMMENT ON FUNCTION pg_catalog.idem_fence(text, bigint, text) IS
	'check a fencing token and keep others from taking over until this transaction ends';

/* A member since 0.1.0, so nothing is adopted; replaced, because DROP would take its grants along. */
CREATE OR REPLACE VIEW idem.key_status AS
SELECT k.key,
	   k.scope,
	   k.owner,
	   CASE
	   WHEN k.lease_until IS NULL OR k.finished_at IS NOT NULL
	   THEN pg_catalog.idem_key_state(k.xmin, k.finished_at, k.expires_at)
	   WHEN k.lease_until OPERATOR(pg_catalog.>) c.now THEN 'live'
	   WHEN k.park THEN 'parked'
	   WHEN k.expires_at OPERATOR(pg_catalog.<=) c.now THEN 'expired'
	   WHEN k.attempt OPERATOR(pg_catalog.>=) k.max_attempts THEN 'exhausted'
	   ELSE 'expired'
	   END AS status,
	   c.now OPERATOR(pg_catalog.-) k.created_at AS age,
	   k.expires_at OPERATOR(pg_catalog.-) c.now AS time_left,
	   k.worker,
	   k.attempt,
	   k.token,
	   k.lease_until OPERATOR(pg_catalog.-) c.now AS lease_left,
	   k.max_attempts
  FROM idem.keys AS k
 CROSS JOIN (SELECT pg_catalog.idem_clock() AS now OFFSET 0) AS c;
COMMENT ON COLUMN idem.key_status.status IS 'held (by this transaction), finished, expired; of a lease also live, parked, exhausted';
COMMENT ON COLUMN idem.key_status.worker IS 'name that the holder of the lease has given';
COMMENT ON COLUMN idem.key_status.attempt IS 'number of leases of this key';
COMMENT ON COLUMN idem.key_status.token IS 'fencing token of the last lease';
COMMENT ON COLUMN idem.key_status.lease_left IS 'time until the lease runs out, negative once it has, null for a plain claim';
COMMENT ON COLUMN idem.key_status.max_attempts IS 'how many leases there may be, or null for no limit';
COMMENT ON COLUMN idem.key_summary.status IS 'held (by this transaction), finished, expired; of leases also live, parked, exhausted';

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
   AND (s.status OPERATOR(pg_catalog.=) ANY (ARRAY['live', 'parked', 'exhausted'])
		OR (s.status OPERATOR(pg_catalog.=) 'expired'
			AND s.time_left OPERATOR(pg_catalog.>) interval '0'));
COMMENT ON VIEW idem.lease_status IS 'every lease that is not finished, with what hangs, for administrators';
COMMENT ON COLUMN idem.lease_status.key IS 'the key';
COMMENT ON COLUMN idem.lease_status.scope IS 'name space of the key';
COMMENT ON COLUMN idem.lease_status.owner IS 'the role the key belongs to';
COMMENT ON COLUMN idem.lease_status.worker IS 'name that the holder has given';
COMMENT ON COLUMN idem.lease_status.attempt IS 'number of leases of this key, this one included';
COMMENT ON COLUMN idem.lease_status.token IS 'fencing token, to finish or release a parked key with';
COMMENT ON COLUMN idem.lease_status.age IS 'time since the key was leased first';
COMMENT ON COLUMN idem.lease_status.time_left IS 'time until the lease runs out, negative once it has';
COMMENT ON COLUMN idem.lease_status.max_attempts IS 'how many leases there may be, or null for no limit';
COMMENT ON COLUMN idem.lease_status.state IS 'live, expired (the next claim gets the key), parked (an operator is to decide) or exhausted (no attempts left)';

REVOKE ALL ON FUNCTION
	pg_catalog.idem_lease(text, interval, jsonb, interval, text, integer, text, interval, text),
	pg_catalog.idem_renew(text, bigint, interval, text),
	pg_catalog.idem_checkpoint(text, bigint, jsonb, text),
	pg_catalog.idem_fence(text, bigint, text)
FROM PUBLIC;
