/* src/sql/keys.sql: the table of keys */

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
	prior_lease_until timestamp with time zone,
	prior_expires_at timestamp with time zone,
	CONSTRAINT keys_pkey PRIMARY KEY (key, scope)
) USING heap WITH (fillfactor = 70);
/* a key in the TOAST table would look like another one to an update */
ALTER TABLE idem.keys ALTER COLUMN key SET STORAGE MAIN, ALTER COLUMN scope SET STORAGE MAIN;
CREATE INDEX keys_expires_at_idx ON idem.keys USING btree (expires_at);

COMMENT ON TABLE idem.keys IS 'idempotency keys; read and written by the idem_* functions only';
COMMENT ON COLUMN idem.keys.created_at IS 'when this life of the key began; a takeover of a lease keeps it';
COMMENT ON COLUMN idem.keys.expires_at IS 'from when on the key counts as absent';
COMMENT ON COLUMN idem.keys.owner IS 'the role the key belongs to';
COMMENT ON COLUMN idem.keys.key IS 'the key, 1 to 1024 bytes';
COMMENT ON COLUMN idem.keys.scope IS 'name space of the key, 0 to 255 bytes';
COMMENT ON COLUMN idem.keys.request IS 'SHA-256 of the request, or null if none was given; of idem_call() 16 bytes of the SHA-256 of the handler''s name, then the SHA-256 of the payload if there is one';
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
COMMENT ON COLUMN idem.keys.prior_lease_until IS 'a plain claim that took over a lease: lease_until of that lease, which idem_release() restores';
COMMENT ON COLUMN idem.keys.prior_expires_at IS 'a plain claim that took over a lease: expires_at of that lease, which idem_release() restores';
COMMENT ON CONSTRAINT keys_pkey ON idem.keys IS 'decides which of several claimers runs';
COMMENT ON INDEX idem.keys_pkey IS 'decides which of several claimers runs';
COMMENT ON INDEX idem.keys_expires_at_idx IS 'lets cleanup find expired keys, oldest first';

SELECT pg_extension_config_dump('idem.keys', '');
