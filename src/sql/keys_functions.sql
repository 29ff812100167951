/* src/sql/keys_functions.sql: functions of claims, leases and calls */

CREATE TYPE idem.claim_result AS (
	claimed boolean,
	status text,
	result jsonb,
	created_at timestamp with time zone,
	expires_at timestamp with time zone);
COMMENT ON TYPE idem.claim_result IS 'the answer of idem_claim()';
COMMENT ON COLUMN idem.claim_result.claimed IS 'true if this call has claimed the key';
COMMENT ON COLUMN idem.claim_result.status IS 'claimed, held, finished, busy, parked or exhausted';
COMMENT ON COLUMN idem.claim_result.result IS 'result of a finished key';
COMMENT ON COLUMN idem.claim_result.created_at IS 'when the key was first claimed';
COMMENT ON COLUMN idem.claim_result.expires_at IS 'time from which the key counts as absent';

-- set: app
CREATE FUNCTION pg_catalog.idem_claim(
	key text,
	request jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS idem.claim_result
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_claim';
COMMENT ON FUNCTION pg_catalog.idem_claim IS
	'claim an idempotency key in this transaction, or return the result stored under it';

-- set: app
CREATE FUNCTION pg_catalog.idem_finish(
	key text,
	result jsonb DEFAULT NULL,
	token bigint DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_finish';
COMMENT ON FUNCTION pg_catalog.idem_finish IS
	'store the result of a key that this transaction claimed, or that the caller holds by a lease with this token; returns false if the result was stored before';

-- set: app
CREATE FUNCTION pg_catalog.idem_release(
	key text,
	token bigint DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_release';
COMMENT ON FUNCTION pg_catalog.idem_release IS
	'undo the claim of this transaction, as if the key had never been claimed; with the token of a lease: end the lease, so that the next claim gets the key; returns true or raises an error';

CREATE TYPE idem.get_result AS (
	status text,
	result jsonb,
	owner name,
	worker text,
	attempt integer,
	token bigint,
	checkpoint jsonb,
	created_at timestamp with time zone,
	finished_at timestamp with time zone,
	lease_until timestamp with time zone,
	expires_at timestamp with time zone);
COMMENT ON TYPE idem.get_result IS 'a key, as idem_get() shows it';
COMMENT ON COLUMN idem.get_result.status IS 'held, finished, live, expired, parked or exhausted';
COMMENT ON COLUMN idem.get_result.result IS 'result that idem_finish() stored';
COMMENT ON COLUMN idem.get_result.owner IS 'name of the role that owns the key, or its OID if the role was dropped';
COMMENT ON COLUMN idem.get_result.worker IS 'name of the worker that holds the lease, as given to idem_lease()';
COMMENT ON COLUMN idem.get_result.attempt IS 'number of leases of this key; null for a plain claim';
COMMENT ON COLUMN idem.get_result.token IS 'fencing token of the last lease; null for a plain claim';
COMMENT ON COLUMN idem.get_result.checkpoint IS 'recovery point that idem_checkpoint() stored';
COMMENT ON COLUMN idem.get_result.created_at IS 'when the key was first claimed';
COMMENT ON COLUMN idem.get_result.finished_at IS 'when idem_finish() was called; null if it was not';
COMMENT ON COLUMN idem.get_result.lease_until IS 'when the lease expires; null for a plain claim';
COMMENT ON COLUMN idem.get_result.expires_at IS 'time from which the key counts as absent';

-- set: app
CREATE FUNCTION pg_catalog.idem_get(
	key text,
	scope text DEFAULT NULL)
RETURNS SETOF idem.get_result
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_get';
COMMENT ON FUNCTION pg_catalog.idem_get IS
	'show an idempotency key without claiming it; returns no row if there is no such key';

-- set: admin
CREATE FUNCTION pg_catalog.idem_forget(
	key text,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_forget';
COMMENT ON FUNCTION pg_catalog.idem_forget IS
	'for operators: remove a key of any role, so that it can be claimed again';

CREATE TYPE idem.lease_result AS (
	claimed boolean,
	status text,
	result jsonb,
	token bigint,
	attempt integer,
	checkpoint jsonb,
	lease_until timestamp with time zone,
	expires_at timestamp with time zone);
COMMENT ON TYPE idem.lease_result IS 'the answer of idem_lease()';
COMMENT ON COLUMN idem.lease_result.claimed IS 'true if the caller has the lease';
COMMENT ON COLUMN idem.lease_result.status IS 'claimed, resumed, finished, busy, parked or exhausted';
COMMENT ON COLUMN idem.lease_result.result IS 'result of a finished key';
COMMENT ON COLUMN idem.lease_result.token IS 'fencing token; null if the caller does not have the lease';
COMMENT ON COLUMN idem.lease_result.attempt IS 'number of leases of this key, including this one';
COMMENT ON COLUMN idem.lease_result.checkpoint IS 'recovery point of the last attempt';
COMMENT ON COLUMN idem.lease_result.lease_until IS 'when the lease expires';
COMMENT ON COLUMN idem.lease_result.expires_at IS 'time from which the key counts as absent';

-- set: app
CREATE FUNCTION pg_catalog.idem_lease(
	key text,
	lease interval,
	request jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	worker text DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	on_expiry text DEFAULT 'retry',
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS idem.lease_result
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_lease';
COMMENT ON FUNCTION pg_catalog.idem_lease IS
	'claim an idempotency key for a limited time that outlives this transaction, for work outside the database; returns a fencing token';

-- set: app
CREATE FUNCTION pg_catalog.idem_renew(
	key text,
	token bigint,
	lease interval,
	scope text DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_renew';
COMMENT ON FUNCTION pg_catalog.idem_renew IS
	'extend a lease to the given time from now; returns its new end';

-- set: app
CREATE FUNCTION pg_catalog.idem_checkpoint(
	key text,
	token bigint,
	data jsonb,
	scope text DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_checkpoint';
COMMENT ON FUNCTION pg_catalog.idem_checkpoint IS
	'store a recovery point for the next attempt and renew the lease; returns the new end of the lease';

-- set: app
CREATE FUNCTION pg_catalog.idem_fence(
	key text,
	token bigint,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_fence';
COMMENT ON FUNCTION pg_catalog.idem_fence IS
	'check a fencing token and prevent a takeover until this transaction ends; returns true or raises an error';

CREATE TYPE idem.call_result AS (
	status text,
	result jsonb,
	replayed boolean);
COMMENT ON TYPE idem.call_result IS 'the answer of idem_call()';
COMMENT ON COLUMN idem.call_result.status IS 'finished, busy, held, parked or exhausted';
COMMENT ON COLUMN idem.call_result.result IS 'result of the handler, of this call or of an earlier one';
COMMENT ON COLUMN idem.call_result.replayed IS 'true if the handler ran in an earlier call';

-- set: app
CREATE FUNCTION pg_catalog.idem_call(
	key text,
	handler regproc,
	payload jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS idem.call_result
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_call';
COMMENT ON FUNCTION pg_catalog.idem_call IS
	'claim a key for a handler and a payload, run handler(payload) with the privileges of the caller, and store its result under the key';

CREATE TYPE idem.claim_many_result AS (
	ord integer,
	key text,
	claimed boolean,
	status text,
	result jsonb,
	created_at timestamp with time zone,
	expires_at timestamp with time zone);
COMMENT ON TYPE idem.claim_many_result IS 'the answer of idem_claim_many() for one key';
COMMENT ON COLUMN idem.claim_many_result.ord IS 'position of the key in the array, from 1';
COMMENT ON COLUMN idem.claim_many_result.key IS 'the key';
COMMENT ON COLUMN idem.claim_many_result.claimed IS 'true if this call has claimed the key';
COMMENT ON COLUMN idem.claim_many_result.status IS 'as in idem.claim_result';
COMMENT ON COLUMN idem.claim_many_result.result IS 'result of a finished key';
COMMENT ON COLUMN idem.claim_many_result.created_at IS 'when the key was first claimed';
COMMENT ON COLUMN idem.claim_many_result.expires_at IS 'time from which the key counts as absent';

-- set: app
CREATE FUNCTION pg_catalog.idem_claim_many(
	keys text[],
	requests jsonb[] DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS SETOF idem.claim_many_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_claim_many';
COMMENT ON FUNCTION pg_catalog.idem_claim_many IS
	'claim many keys in an order that prevents deadlocks; returns one row per element';

-- set: app
CREATE FUNCTION pg_catalog.idem_finish_many(
	keys text[],
	results jsonb[] DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_finish_many';
COMMENT ON FUNCTION pg_catalog.idem_finish_many IS
	'store the results of many keys that this transaction claimed, all or none; returns the number of results that were not stored before';

-- set: admin
CREATE FUNCTION pg_catalog.idem_key_hash(
	key text,
	scope text DEFAULT NULL)
RETURNS bigint
LANGUAGE C STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_key_hash';
COMMENT ON FUNCTION pg_catalog.idem_key_hash IS
	'the hash of a key and its scope, by which the key is found in column key_hash of idem.keys';

-- like the procedures that wait for jobs, see jobs_functions.sql
-- set: app
CREATE PROCEDURE pg_catalog.idem_wait_key(
	key text,
	timeout interval DEFAULT '30 s',
	scope text DEFAULT NULL,
	INOUT status text DEFAULT NULL,
	INOUT result jsonb DEFAULT NULL)
LANGUAGE C
AS 'MODULE_PATHNAME', 'idem_wait_key';
COMMENT ON PROCEDURE pg_catalog.idem_wait_key IS
	'wait without a transaction until no live lease holds the key';
