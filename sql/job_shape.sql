--
-- Direct access would bypass triggers and the like that users add to the job tables:
-- idem refuses to work then, as for idem.keys
--
\a\pset footer off
SET client_min_messages = warning;
CALL anew();
-- only the SQLSTATEs of an enqueue, a fetch and the end of a job
CREATE FUNCTION all_refused(OUT enqueue text, OUT many text, OUT fetched text, OUT complete text, OUT cancel text)
LANGUAGE sql AS $$
	SELECT (fails($c$ SELECT idem_enqueue('shape', '1', 'new') $c$)).state,
		   (fails($c$ SELECT idem_enqueue_many('shape', '{1}', '{new}') $c$)).state,
		   (fails($c$ SELECT idem_fetch('shape', lease => '1 h') $c$)).state,
		   (fails($c$ SELECT idem_complete(j.job_id, j.token) FROM idem.jobs AS j WHERE j.token IS NOT NULL $c$)).state,
		   (fails($c$ SELECT idem_cancel(2) $c$)).state
$$;
SELECT count(*) FROM idem_enqueue_many('shape', '{1,2}', '{a,b}');
SELECT job_id FROM idem_fetch('shape', lease => '1 h');
\x on
-- unlogged
BEGIN;
ALTER TABLE idem.jobs SET UNLOGGED;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_enqueue('shape') $$);
ROLLBACK;
\x off
-- from here on only the SQLSTATEs
BEGIN;
ALTER TABLE idem.jobs SET UNLOGGED;
SELECT * FROM all_refused();
ROLLBACK;
-- row security
BEGIN;
ALTER TABLE idem.jobs ENABLE ROW LEVEL SECURITY;
SELECT * FROM all_refused();
ROLLBACK;
-- triggers
BEGIN;
CREATE TRIGGER t BEFORE INSERT ON idem.jobs FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
CREATE TRIGGER t AFTER DELETE ON idem.jobs FOR EACH STATEMENT EXECUTE FUNCTION ignore_row();
SELECT * FROM all_refused();
ROLLBACK;
-- a foreign key
BEGIN;
CREATE TABLE referencing (job_id bigint REFERENCES idem.jobs);
SELECT * FROM all_refused();
ROLLBACK;
-- a rule
BEGIN;
CREATE RULE r AS ON INSERT TO idem.jobs DO INSTEAD NOTHING;
SELECT * FROM all_refused();
ROLLBACK;
-- a check constraint
BEGIN;
ALTER TABLE idem.jobs ADD CHECK (queue <> 'forbidden');
SELECT * FROM all_refused();
ROLLBACK;
-- a not-null constraint on a column that is null in the row of a waiting job
BEGIN;
DELETE FROM idem.jobs;
ALTER TABLE idem.jobs ALTER COLUMN errors SET NOT NULL;
SELECT enqueue, many, fetched, cancel FROM all_refused();
ROLLBACK;
-- expression, partial and unique indexes, exclusion constraints: for functions that need an entry there
BEGIN;
CREATE INDEX ON idem.jobs (lower(key));
SELECT enqueue, many FROM all_refused();
ROLLBACK;
BEGIN;
CREATE INDEX ON idem.jobs (queue) WHERE queue <> 'shape';
SELECT enqueue, many FROM all_refused();
ROLLBACK;
BEGIN;
CREATE INDEX ON idem.jobs (key_hash) WHERE key IS NOT NULL;
SELECT enqueue, many FROM all_refused();
ROLLBACK;
BEGIN;
CREATE INDEX ON idem.jobs (key_hash) WHERE key_hash IS NULL;
SELECT enqueue, many FROM all_refused();
ROLLBACK;
BEGIN;
CREATE INDEX ON idem.jobs (key_hash) WHERE key_hash IS NOT NULL AND queue <> 'shape';
SELECT enqueue, many FROM all_refused();
ROLLBACK;
BEGIN;
CREATE UNIQUE INDEX ON idem.jobs (queue, key);
SELECT enqueue, many FROM all_refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.jobs ADD EXCLUDE USING btree (job_id WITH =);
SELECT enqueue, many FROM all_refused();
ROLLBACK;
-- without the primary key, or the indexes that find a job
BEGIN;
ALTER TABLE idem.jobs DROP CONSTRAINT jobs_pkey;
SELECT complete, cancel FROM all_refused();
ROLLBACK;
\x on
BEGIN;
DROP INDEX idem.jobs_fetch_idx;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_fetch('shape') $$);
ROLLBACK;
BEGIN;
DROP INDEX idem.jobs_key_idx;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_enqueue('shape', '1', 'a') $$);
ROLLBACK;
\x off
-- another index does not replace them
BEGIN;
DROP INDEX idem.jobs_fetch_idx;
CREATE INDEX jobs_fetch_idx ON idem.jobs (queue, priority, run_at DESC, job_id);
SELECT fetched FROM all_refused();
ROLLBACK;
BEGIN;
DROP INDEX idem.jobs_fetch_idx;
CREATE INDEX jobs_fetch_idx ON idem.jobs (queue, run_at, priority, job_id);
SELECT fetched FROM all_refused();
ROLLBACK;
-- another collation: lookups would search the index in the wrong order
BEGIN;
DROP INDEX idem.jobs_fetch_idx;
CREATE INDEX jobs_fetch_idx ON idem.jobs (queue COLLATE "POSIX", priority, run_at, job_id);
SELECT fetched FROM all_refused();
ROLLBACK;
-- the same index with another name does
BEGIN;
ALTER INDEX idem.jobs_fetch_idx RENAME TO renamed;
SELECT job_id FROM idem_fetch('shape');
ROLLBACK;
-- other columns
BEGIN;
ALTER TABLE idem.jobs ADD COLUMN extra text;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.jobs ALTER COLUMN key_until TYPE text;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.jobs RENAME TO elsewhere;
SELECT enqueue, many, fetched, cancel FROM all_refused();
ROLLBACK;

-- attached as a partition, each of them
CREATE FUNCTION attach(name text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('CREATE TABLE whole (LIKE idem.%I) PARTITION BY LIST (queue)', name);
	EXECUTE format('ALTER TABLE whole ATTACH PARTITION idem.%I FOR VALUES IN (%L, %L)', name, 'shape', 'expire');
END $$;
BEGIN;
SELECT attach('jobs');
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
SELECT attach('queues');
SELECT * FROM all_refused();
SELECT state FROM fails($$ SELECT idem_pause('shape') $$);
ROLLBACK;
BEGIN;
SELECT attach('job_log');
SELECT state FROM fails($$ SELECT idem_cancel(2) $$);
SELECT state FROM fails($$ SELECT idem_retry(2) $$);
ROLLBACK;
BEGIN;
SELECT attach('job_keys');
SELECT state FROM fails($$ SELECT idem_enqueue('expire', '1', 'b', 'until_expired', key_ttl => '1 h') $$);
SELECT state FROM fails($$ SELECT idem_cleanup() $$);
ROLLBACK;
DROP FUNCTION attach;

-- the other tables, for the functions that write them
BEGIN;
CREATE TRIGGER t BEFORE INSERT ON idem.job_log FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT state FROM fails($$ SELECT idem_cancel(2) $$);
SELECT state FROM fails($$ SELECT idem_fail(f.job_id, f.token, dead => true) FROM idem_fetch('shape') AS f $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem.job_log ADD COLUMN extra text;
SELECT state FROM fails($$ SELECT idem_cancel(2) $$);
SELECT state FROM fails($$ SELECT idem_retry(2) $$);
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_enqueue('expire', '1', 'a', 'until_expired', key_ttl => '1 h');
CREATE TRIGGER t BEFORE INSERT ON idem.job_keys FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT state FROM fails($$ SELECT idem_enqueue('expire', '1', 'b', 'until_expired', key_ttl => '1 h') $$);
SELECT state FROM fails($$ SELECT idem_complete(f.job_id, f.token) FROM idem_fetch('expire') AS f $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem.queues ADD COLUMN extra text;
SELECT state FROM fails($$ SELECT idem_queue_set('shape') $$);
SELECT enqueue, fetched FROM all_refused();
ROLLBACK;
BEGIN;
CREATE TRIGGER t BEFORE INSERT ON idem.queues FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT state FROM fails($$ SELECT idem_pause('shape') $$);
ROLLBACK;
-- cleanup needs its indexes
\set VERBOSITY sqlstate
BEGIN;
DROP INDEX idem.job_log_expires_at_idx;
SELECT idem_cleanup();
ROLLBACK;
BEGIN;
DROP INDEX idem.job_keys_expires_at_idx;
SELECT idem_cleanup();
ROLLBACK;

-- library and SQL objects of different versions: other functions
CREATE FUNCTION old_enqueue(text, jsonb, text, OUT job_id bigint, OUT outcome text, OUT result jsonb)
AS '$libdir/idem', 'idem_enqueue' LANGUAGE C;
SELECT old_enqueue('shape', NULL, NULL);
CREATE FUNCTION new_fetch(text, integer, interval, text, OUT job_id bigint, OUT token bigint) RETURNS SETOF record
AS '$libdir/idem', 'idem_fetch' LANGUAGE C;
SELECT * FROM new_fetch('shape', 1, NULL, NULL);
CREATE FUNCTION new_many(bigint[], bigint[], OUT ord integer, OUT status text) RETURNS SETOF record
AS '$libdir/idem', 'idem_complete_many' LANGUAGE C;
SELECT * FROM new_many('{1}', '{1}');
CREATE FUNCTION new_job(bigint, OUT queue text, OUT state text) RETURNS SETOF record
AS '$libdir/idem', 'idem_job' LANGUAGE C;
SELECT * FROM new_job(1);
CREATE FUNCTION old_complete(bigint, bigint) RETURNS void
AS '$libdir/idem', 'idem_complete' LANGUAGE C;
SELECT old_complete(1, 1);
DROP FUNCTION old_enqueue, new_fetch, new_many, new_job, old_complete;

-- an additional index, even one built concurrently, is kept up to date; so is a partial one on rows with a key
CREATE INDEX CONCURRENTLY extra_1 ON idem.jobs (enqueued_at);
CREATE INDEX extra_2 ON idem.jobs (key_hash) WHERE key_hash IS NOT NULL;
CREATE INDEX extra_3 ON idem.jobs (lease_until, job_id) WHERE lease_until IS NOT NULL;
SELECT count(*) FROM idem_enqueue_many('shape', '{3,4,5}', ARRAY['c', NULL, 'd']);
SELECT key FROM idem_fetch('shape', 2, lease => '1 h');
SELECT outcome FROM idem_enqueue('shape', '6', 'd', on_duplicate => 'replace');
REINDEX TABLE CONCURRENTLY idem.jobs;
SELECT outcome FROM idem_enqueue('shape', '7', 'e');
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT count(*) FROM idem.jobs WHERE enqueued_at > '-infinity';
SELECT count(*) FROM idem.jobs WHERE lease_until > '-infinity' AND lease_until IS NOT NULL;
-- only the new one can be used for this
DROP INDEX idem.extra_1;
ALTER INDEX idem.jobs_key_idx RENAME TO old_key_idx;
SELECT count(*), count(DISTINCT key) FROM idem.jobs WHERE key_hash IS NOT NULL;
ALTER INDEX idem.old_key_idx RENAME TO jobs_key_idx;
RESET enable_seqscan;
RESET enable_bitmapscan;
DROP INDEX idem.extra_2;
DROP INDEX idem.extra_3;
-- a publication needs a replica identity, as for any UPDATE and DELETE
BEGIN;
SET LOCAL client_min_messages = error;
CREATE PUBLICATION shape FOR TABLE idem.jobs;
SELECT outcome FROM idem_enqueue('shape', '8', 'f');
SELECT outcome FROM idem_enqueue('shape', '9', 'f', on_duplicate => 'replace');
ALTER TABLE idem.jobs REPLICA IDENTITY NOTHING;
SELECT outcome FROM idem_enqueue('shape', '10', 'g');
SELECT enqueue, fetched, complete, cancel FROM all_refused();
ROLLBACK;
-- after everything was removed, it works as before
SELECT * FROM all_refused();
DROP FUNCTION all_refused;
TRUNCATE idem.jobs, idem.job_keys, idem.job_log, idem.queues;
