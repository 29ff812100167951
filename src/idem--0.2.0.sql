/* src/idem--0.2.0.sql: everything that CREATE EXTENSION idem makes */

-- complain if this script is sourced in psql instead of via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

/*
 * Data.  A plain CREATE SCHEMA: it fails if somebody made the schema first,
 * so nothing of theirs can be adopted.
 */
CREATE SCHEMA idem;
COMMENT ON SCHEMA idem IS 'idem: data and views of the idempotency extension';

/*
 * One row per key.  Column order: what never changes stands first, so that
 * the WAL record of a finish holds little more than the result.  The columns
 * of leases stand last: the rows of plain claims end before them.
 */
CREATE TABLE idem.keys (
	created_at timestamp with time zone NOT NULL,
	expires_at timestamp with time zone NOT NULL,
	owner regrole NOT NULL,
	key text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	request bytea,
	finished_at timestamp with time zone,
	result jsonb,
	token bigint,
	leased_at timestamp with time zone,
	lease_until timestamp with time zone,
	attempt integer,
	max_attempts integer,
	park boolean,
	worker text COLLATE "C",
	checkpoint jsonb,
	CONSTRAINT keys_pkey PRIMARY KEY (key, scope)
) USING heap WITH (fillfactor = 70);
/* a key in the TOAST table would look like another one to an update */
ALTER TABLE idem.keys ALTER COLUMN key SET STORAGE MAIN, ALTER COLUMN scope SET STORAGE MAIN;
CREATE INDEX keys_expires_at_idx ON idem.keys USING btree (expires_at);

COMMENT ON TABLE idem.keys IS 'idempotency keys; read and written by the idem_* functions only';
COMMENT ON COLUMN idem.keys.created_at IS 'when the key was claimed';
COMMENT ON COLUMN idem.keys.expires_at IS 'from when on the key counts as absent';
COMMENT ON COLUMN idem.keys.owner IS 'the role the key belongs to';
COMMENT ON COLUMN idem.keys.key IS 'the key, 1 to 1024 bytes';
COMMENT ON COLUMN idem.keys.scope IS 'name space of the key, 0 to 255 bytes';
COMMENT ON COLUMN idem.keys.request IS 'SHA-256 of the request, or null if none was given';
COMMENT ON COLUMN idem.keys.finished_at IS 'when idem_finish() was called, or null if it was not';
COMMENT ON COLUMN idem.keys.result IS 'what idem_finish() was given';
COMMENT ON COLUMN idem.keys.token IS 'fencing token of the last lease, or null if there was none';
COMMENT ON COLUMN idem.keys.leased_at IS 'when the lease was taken or renewed';
COMMENT ON COLUMN idem.keys.lease_until IS 'when the lease runs out, or null for a plain claim';
COMMENT ON COLUMN idem.keys.attempt IS 'number of leases of this key, this one included';
COMMENT ON COLUMN idem.keys.max_attempts IS 'how many leases there may be, or null for no limit';
COMMENT ON COLUMN idem.keys.park IS 'whether the key is left to an operator when the lease has run out';
COMMENT ON COLUMN idem.keys.worker IS 'name that the holder of the lease has given';
COMMENT ON COLUMN idem.keys.checkpoint IS 'what idem_checkpoint() was given';
COMMENT ON CONSTRAINT keys_pkey ON idem.keys IS 'decides which of several claimers runs';
COMMENT ON INDEX idem.keys_pkey IS 'decides which of several claimers runs';
COMMENT ON INDEX idem.keys_expires_at_idx IS 'lets cleanup find expired keys, oldest first';

SELECT pg_catalog.pg_extension_config_dump('idem.keys', '');

/*
 * Functions.  They live in pg_catalog, so an unqualified call reaches them
 * under any search_path.  None is STRICT: a null key must be loud.
 */
CREATE FUNCTION pg_catalog.idem_claim(
	key text,
	request jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT claimed boolean,
	OUT status text,
	OUT result jsonb,
	OUT created_at timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_claim';
COMMENT ON FUNCTION pg_catalog.idem_claim(text, jsonb, interval, interval, text) IS
	'claim an idempotency key in this transaction, or get the result stored under it';

CREATE FUNCTION pg_catalog.idem_finish(
	key text,
	result jsonb DEFAULT NULL,
	token bigint DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_finish';
COMMENT ON FUNCTION pg_catalog.idem_finish(text, jsonb, bigint, text) IS
	'store the result of a key that this transaction has claimed, or of a lease with its token';

CREATE FUNCTION pg_catalog.idem_release(
	key text,
	token bigint DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_release';
COMMENT ON FUNCTION pg_catalog.idem_release(text, bigint, text) IS
	'give up a key that this transaction has claimed, as if it had never been claimed; with the token of a lease: let the next one have it at once';

CREATE FUNCTION pg_catalog.idem_get(
	key text,
	scope text DEFAULT NULL,
	OUT status text,
	OUT result jsonb,
	OUT owner regrole,
	OUT worker text,
	OUT attempt integer,
	OUT token bigint,
	OUT checkpoint jsonb,
	OUT created_at timestamp with time zone,
	OUT finished_at timestamp with time zone,
	OUT lease_until timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_get';
COMMENT ON FUNCTION pg_catalog.idem_get(text, text) IS
	'look at an idempotency key without claiming it; no row if there is none';

CREATE FUNCTION pg_catalog.idem_forget(
	key text,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_forget';
COMMENT ON FUNCTION pg_catalog.idem_forget(text, text) IS
	'for operators: remove a key of any role, so that it may run again';

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

CREATE FUNCTION pg_catalog.idem_call(
	key text,
	handler regproc,
	payload jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT status text,
	OUT result jsonb,
	OUT replayed boolean)
RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_call';
COMMENT ON FUNCTION pg_catalog.idem_call(text, regproc, jsonb, interval, interval, text) IS
	'claim a key, run handler(payload) with the rights of the caller, and finish the key with what it returns';

CREATE FUNCTION pg_catalog.idem_claim_many(
	keys text[],
	requests jsonb[] DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT ord integer,
	OUT key text,
	OUT claimed boolean,
	OUT status text,
	OUT result jsonb,
	OUT created_at timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_claim_many';
COMMENT ON FUNCTION pg_catalog.idem_claim_many(text[], jsonb[], interval, interval, text) IS
	'claim many keys in an order that cannot deadlock; one row per element';

CREATE FUNCTION pg_catalog.idem_finish_many(
	keys text[],
	results jsonb[] DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_finish_many';
COMMENT ON FUNCTION pg_catalog.idem_finish_many(text[], jsonb[], text) IS
	'store the results of many keys that this transaction has claimed, all or none';

CREATE FUNCTION pg_catalog.idem_cleanup(
	batch integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cleanup';
COMMENT ON FUNCTION pg_catalog.idem_cleanup(integer) IS
	'remove expired keys, oldest first, at most batch of them; returns how many';

CREATE FUNCTION pg_catalog.idem_grant(
	role name,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_grant';
COMMENT ON FUNCTION pg_catalog.idem_grant(name, text) IS
	'grant the privileges of an application, an administrator or a monitor (app, admin, monitor) to a role';

CREATE FUNCTION pg_catalog.idem_revoke(
	role name,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_revoke';
COMMENT ON FUNCTION pg_catalog.idem_revoke(name, text) IS
	'take back what idem_grant() has granted';

CREATE FUNCTION pg_catalog.idem_clock()
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_clock';
COMMENT ON FUNCTION pg_catalog.idem_clock() IS
	'the clock by which keys expire: wall clock plus idem.clock_offset';

CREATE FUNCTION pg_catalog.idem_key_state(
	xmin xid,
	finished_at timestamp with time zone,
	expires_at timestamp with time zone)
RETURNS text
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_key_state';
COMMENT ON FUNCTION pg_catalog.idem_key_state(xid, timestamp with time zone, timestamp with time zone) IS
	'state of a row of idem.keys: held, finished or expired';

/*
 * Views for people.  key_status and lease_status show keys and are for
 * administrators; key_summary holds no keys and is for monitors.  The states
 * are those of idem_keyrow_judge() in keyrow.c.
 */
CREATE VIEW idem.key_status AS
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
COMMENT ON VIEW idem.key_status IS 'every key with its state, age and time left, for administrators';
COMMENT ON COLUMN idem.key_status.key IS 'the key';
COMMENT ON COLUMN idem.key_status.scope IS 'name space of the key';
COMMENT ON COLUMN idem.key_status.owner IS 'the role the key belongs to';
COMMENT ON COLUMN idem.key_status.status IS 'held (by this transaction), finished, expired; of a lease also live, parked, exhausted';
COMMENT ON COLUMN idem.key_status.age IS 'time since the key was claimed';
COMMENT ON COLUMN idem.key_status.time_left IS 'time until the key expires, negative once it has';
COMMENT ON COLUMN idem.key_status.worker IS 'name that the holder of the lease has given';
COMMENT ON COLUMN idem.key_status.attempt IS 'number of leases of this key';
COMMENT ON COLUMN idem.key_status.token IS 'fencing token of the last lease';
COMMENT ON COLUMN idem.key_status.lease_left IS 'time until the lease runs out, negative once it has, null for a plain claim';
COMMENT ON COLUMN idem.key_status.max_attempts IS 'how many leases there may be, or null for no limit';

CREATE VIEW idem.key_summary AS
SELECT s.owner,
	   s.status,
	   pg_catalog.count(*) AS keys,
	   pg_catalog.max(s.age) AS oldest,
	   pg_catalog.min(s.time_left) AS next_expiry
  FROM idem.key_status AS s
 GROUP BY s.owner, s.status;
COMMENT ON VIEW idem.key_summary IS 'number of keys by role and state, for monitors: shows no keys';
COMMENT ON COLUMN idem.key_summary.owner IS 'the role the keys belong to';
COMMENT ON COLUMN idem.key_summary.status IS 'held (by this transaction), finished, expired; of leases also live, parked, exhausted';
COMMENT ON COLUMN idem.key_summary.keys IS 'number of keys';
COMMENT ON COLUMN idem.key_summary.oldest IS 'age of the oldest of them';
COMMENT ON COLUMN idem.key_summary.next_expiry IS 'time left of the one that expires first, negative once it has';

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

/* Nothing is open to PUBLIC; idem_grant() hands out sets of privileges. */
REVOKE ALL ON FUNCTION
	pg_catalog.idem_claim(text, jsonb, interval, interval, text),
	pg_catalog.idem_finish(text, jsonb, bigint, text),
	pg_catalog.idem_release(text, bigint, text),
	pg_catalog.idem_get(text, text),
	pg_catalog.idem_forget(text, text),
	pg_catalog.idem_lease(text, interval, jsonb, interval, text, integer, text, interval, text),
	pg_catalog.idem_renew(text, bigint, interval, text),
	pg_catalog.idem_checkpoint(text, bigint, jsonb, text),
	pg_catalog.idem_fence(text, bigint, text),
	pg_catalog.idem_call(text, regproc, jsonb, interval, interval, text),
	pg_catalog.idem_claim_many(text[], jsonb[], interval, interval, text),
	pg_catalog.idem_finish_many(text[], jsonb[], text),
	pg_catalog.idem_cleanup(integer),
	pg_catalog.idem_grant(name, text),
	pg_catalog.idem_revoke(name, text),
	pg_catalog.idem_clock(),
	pg_catalog.idem_key_state(xid, timestamp with time zone, timestamp with time zone)
FROM PUBLIC;
