/* src/sql/keys_functions.sql: functions of claims, leases and calls */

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
COMMENT ON FUNCTION pg_catalog.idem_claim IS
	'claim an idempotency key in this transaction, or return the result stored under it';

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

CREATE FUNCTION pg_catalog.idem_release(
	key text,
	token bigint DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_release';
COMMENT ON FUNCTION pg_catalog.idem_release IS
	'undo the claim of this transaction, as if the key had never been claimed; with the token of a lease: end the lease, so that the next claim gets the key; returns true or raises an error';

CREATE FUNCTION pg_catalog.idem_get(
	key text,
	scope text DEFAULT NULL,
	OUT status text,
	OUT result jsonb,
	OUT owner name,
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
COMMENT ON FUNCTION pg_catalog.idem_get IS
	'show an idempotency key without claiming it; returns no row if there is no such key';

CREATE FUNCTION pg_catalog.idem_forget(
	key text,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_forget';
COMMENT ON FUNCTION pg_catalog.idem_forget IS
	'for operators: remove a key of any role, so that it can be claimed again';

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
COMMENT ON FUNCTION pg_catalog.idem_lease IS
	'claim an idempotency key for a limited time that outlives this transaction, for work outside the database; returns a fencing token';

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

CREATE FUNCTION pg_catalog.idem_fence(
	key text,
	token bigint,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_fence';
COMMENT ON FUNCTION pg_catalog.idem_fence IS
	'check a fencing token and prevent a takeover until this transaction ends; returns true or raises an error';

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
COMMENT ON FUNCTION pg_catalog.idem_call IS
	'claim a key for a handler and a payload, run handler(payload) with the privileges of the caller, and store its result under the key';

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
COMMENT ON FUNCTION pg_catalog.idem_claim_many IS
	'claim many keys in an order that prevents deadlocks; returns one row per element';

CREATE FUNCTION pg_catalog.idem_finish_many(
	keys text[],
	results jsonb[] DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_finish_many';
COMMENT ON FUNCTION pg_catalog.idem_finish_many IS
	'store the results of many keys that this transaction claimed, all or none; returns the number of results that were not stored before';
