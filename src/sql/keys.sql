/* src/sql/keys.sql: the table of keys */

/*
 * One row per key.  Columns that a finish does not change come first, so that the
 * WAL record of a finish contains little more than the result.  A row ends after its
 * last column that is not null: the row of a plain claim after the request, that of a
 * finished one after the result.  Neither contains a null, so neither has a null bitmap.
 * The columns from the token on belong to leases.
 */
-- set: none
CREATE TABLE idem.keys (
	created_at timestamp with time zone NOT NULL,
	expires_at timestamp with time zone NOT NULL,
	key_hash bigint NOT NULL,
	owner regrole NOT NULL,
	nth smallint NOT NULL,
	key text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	request bytea NOT NULL DEFAULT '',
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
	prior_lease_until timestamp with time zone,
	prior_expires_at timestamp with time zone,
	CONSTRAINT keys_pkey PRIMARY KEY (key_hash, nth)
) USING heap WITH (fillfactor = 70);
/* if a key were stored in the TOAST table, an update would treat it as changed */
ALTER TABLE idem.keys ALTER COLUMN key SET STORAGE MAIN, ALTER COLUMN scope SET STORAGE MAIN;
CREATE INDEX keys_expires_at_idx ON idem.keys USING btree (expires_at);

COMMENT ON TABLE idem.keys IS 'idempotency keys; read and written by the idem_* functions only';
COMMENT ON COLUMN idem.keys.created_at IS 'when the key was first claimed; a claim of an expired key sets it anew, a takeover of a lease keeps it';
COMMENT ON COLUMN idem.keys.expires_at IS 'time from which the key counts as absent';
COMMENT ON COLUMN idem.keys.key_hash IS 'hash of scope and key, by which the key is found; idem_key_hash() computes it';
COMMENT ON COLUMN idem.keys.owner IS 'role that owns the key';
COMMENT ON COLUMN idem.keys.nth IS '0; different if another key with the same hash was there first';
COMMENT ON COLUMN idem.keys.key IS 'the key, 1 to 1024 bytes';
COMMENT ON COLUMN idem.keys.scope IS 'scope of the key, 0 to 255 bytes; the same key in another scope is another key';
COMMENT ON COLUMN idem.keys.request IS 'SHA-256 of the request; empty if the claim had none; with idem_call(): 16 bytes of the SHA-256 of the handler''s name, then the SHA-256 of the payload if there is one';
COMMENT ON COLUMN idem.keys.finished_at IS 'when idem_finish() was called; null if it was not';
COMMENT ON COLUMN idem.keys.result IS 'result that idem_finish() stored';
COMMENT ON COLUMN idem.keys.token IS 'fencing token of the last lease; null if there was none';
COMMENT ON COLUMN idem.keys.leased_at IS 'when the lease was taken or last renewed';
COMMENT ON COLUMN idem.keys.lease_until IS 'when the lease expires; null for a plain claim';
COMMENT ON COLUMN idem.keys.attempt IS 'number of leases of this key, including this one';
COMMENT ON COLUMN idem.keys.max_attempts IS 'maximum number of leases; null: no limit';
COMMENT ON COLUMN idem.keys.park IS 'whether the key is parked for an operator when the lease expires';
COMMENT ON COLUMN idem.keys.worker IS 'name of the worker that holds the lease, as given to idem_lease()';
COMMENT ON COLUMN idem.keys.checkpoint IS 'recovery point that idem_checkpoint() stored';
COMMENT ON COLUMN idem.keys.prior_lease_until IS 'for a plain claim that took over a lease: lease_until of that lease; idem_release() restores it';
COMMENT ON COLUMN idem.keys.prior_expires_at IS 'for a plain claim that took over a lease: expires_at of that lease; idem_release() restores it';
COMMENT ON CONSTRAINT keys_pkey ON idem.keys IS 'finds a key by its hash; lets exactly one of several concurrent claims succeed';
COMMENT ON INDEX idem.keys_pkey IS 'finds a key by its hash; lets exactly one of several concurrent claims succeed';
COMMENT ON INDEX idem.keys_expires_at_idx IS 'lets cleanup find expired keys, oldest first';

SELECT pg_extension_config_dump('idem.keys', '');
