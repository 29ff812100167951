-- What the clients of the ledger (client.py) need.  Nothing but idem keeps work from being done
-- twice: no table here has a unique constraint.

CREATE TABLE effects (kind text, key text, at text, token bigint);
CREATE TABLE grants (kind text, key text, at text, token bigint);
CREATE TABLE enqueues (queue text, key text, at text);
CREATE TABLE changes (key text, at text, job_id bigint);
CREATE INDEX ON changes (key) WHERE job_id IS NULL;

-- the timeline and the transaction of the caller: finds its commit record in the WAL
CREATE FUNCTION here() RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) || ' ' || pg_current_xact_id() $$;

-- the work: one effect; returns where it was done, which becomes the result of the key
CREATE FUNCTION effect(kind text, key text, token bigint = NULL) RETURNS text LANGUAGE sql AS $$
	INSERT INTO effects SELECT kind, key, here(), token RETURNING at $$;

CREATE FUNCTION handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$
	SELECT to_jsonb(effect('call', payload ->> 'key')) $$;

SELECT idem_queue_set('once', dedup => 'until_expired', key_ttl => '1 day', max_attempts => 1000000);
SELECT idem_queue_set('stream', max_attempts => 1000000);
