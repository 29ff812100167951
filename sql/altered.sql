--
-- A table or a result type that was altered can be altered back.  A column that was dropped stays
-- in the catalog, and perhaps in rows, but functions skip it.
--
\a\pset footer off
CALL anew();
CREATE FUNCTION tables() RETURNS SETOF text LANGUAGE sql AS $$
	SELECT relname::text FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind = 'r' ORDER BY relname COLLATE "C"
$$;
CREATE FUNCTION types() RETURNS SETOF text LANGUAGE sql AS $$
	SELECT relname::text FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind = 'c' ORDER BY relname COLLATE "C"
$$;
CREATE VIEW doctor AS SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'definitions';
SELECT string_agg(t, ' ') AS tables FROM tables() AS t;
SELECT string_agg(t, ' ') AS types FROM types() AS t;

-- every function that needs the table is refused, and the hint undoes the change
SELECT claimed FROM idem_claim('before');
SELECT outcome FROM idem_enqueue('q', '"before"', 'before');
TABLE doctor \gx
ALTER TABLE idem.keys ADD COLUMN x integer;
ALTER TABLE idem.jobs ADD COLUMN "An y" text DEFAULT 'fast', ADD COLUMN z jsonb NOT NULL DEFAULT '{}';
SELECT state, message, detail, hint FROM fails($$ SELECT idem_claim('refused') $$) \gx
SELECT state, message, detail, hint FROM fails($$ SELECT idem_enqueue('q') $$) \gx
TABLE doctor \gx
-- rows that another program writes or changes meanwhile; some values are stored out of line
ALTER TABLE idem.jobs ALTER COLUMN z SET STORAGE EXTERNAL;
INSERT INTO idem.keys (created_at, expires_at, key_hash, owner, nth, key, scope, x)
	VALUES ('2020-01-01', '2050-01-01', idem_key_hash('by hand'), current_user::regrole, 0, 'by hand', '', 7);
UPDATE idem.jobs SET z = to_jsonb(repeat('z', 100000));
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, payload, "An y", z)
	VALUES (1000, '2020-01-01', '2020-01-01', 5, 'q', '"by hand"', 'a', to_jsonb(repeat('z', 100000)));
SELECT fix FROM doctor \gset
:fix
TABLE doctor \gx
SELECT fix FROM doctor \gset
:fix
SELECT state FROM fails($$ SELECT idem_enqueue('q') $$);
SELECT fix FROM doctor \gset
:fix
TABLE doctor \gx

-- the rows are as before, and can be changed
SELECT status FROM idem_claim('before');
SELECT status FROM idem_claim('by hand');
SELECT outcome FROM idem_enqueue('q', '"after"', 'before', on_duplicate => 'replace');
SELECT job_id, payload, key FROM idem_fetch('q', 9, '1 min') ORDER BY job_id;
SELECT f.job_id, idem_complete(f.job_id, f.token) FROM (SELECT job_id, token FROM idem.jobs) AS f ORDER BY 1;

-- altered and altered back twice, each table and each type; with rows, of which some have the column
SELECT claimed FROM idem_lease('leased', '1 h');
SELECT idem_queue_set('q', keep => '1 h'), idem_schedule('s', 'q', '@yearly') IS NOT NULL AS declared;
SELECT idem_shard_set('{[0,1024)}');
SELECT job_id % 1024 = idem_slot('job_keys') AS has_slot FROM idem_enqueue('q', key => 'job_keys', dedup => 'until_expired', key_ttl => '1 h');
SELECT count(*) FROM (SELECT idem_complete(f.job_id, f.token) FROM idem_fetch('q', 1, '1 min') AS f) AS c;
SELECT outcome FROM idem_enqueue('q', '"live"', 'live');
DO $$
DECLARE
	t text;
BEGIN
	FOR i IN 1 .. 2 LOOP
		FOR t IN SELECT tables() LOOP
			EXECUTE format('ALTER TABLE idem.%I ADD COLUMN x text NOT NULL DEFAULT ''fast'', ADD COLUMN y bigint GENERATED ALWAYS AS (7) STORED', t);
			EXECUTE format('UPDATE idem.%I SET x = ''slow''', t);
			EXECUTE format('ALTER TABLE idem.%I DROP COLUMN x, DROP COLUMN y', t);
		END LOOP;
		FOR t IN SELECT types() LOOP
			EXECUTE format('ALTER TYPE idem.%I ADD ATTRIBUTE x integer, ADD ATTRIBUTE y text', t);
			EXECUTE format('ALTER TYPE idem.%I DROP ATTRIBUTE x, DROP ATTRIBUTE y', t);
		END LOOP;
	END LOOP;
END $$;
SELECT DISTINCT count(*) FILTER (WHERE attisdropped) AS dropped FROM pg_attribute, tables() AS t
 WHERE attrelid = ('idem.' || t)::regclass GROUP BY attrelid ORDER BY 1;
TABLE doctor \gx

-- each function, in forms that form rows in different ways
SELECT claimed, status, created_at IS NOT NULL AS c, expires_at IS NOT NULL AS e FROM idem_claim('k');
SELECT (idem_claim('k')).status;
SELECT to_jsonb(idem_claim('leased')) - '{created_at,expires_at}'::text[] AS row;
SELECT ord, key, status FROM idem_claim_many('{k, l}');
SELECT key, status FROM idem_get('k') AS g, (VALUES ('k')) AS v (key);
SELECT claimed, status, attempt FROM idem_lease('leased', '1 h');
SELECT * FROM idem_call('called', 'handler');
SELECT (idem_call('called', 'handler')).*;
SELECT count(*) FROM idem_holder('leased');
SELECT outcome, (e.job_id % 1024 = idem_slot('new')) AS has_slot FROM idem_enqueue('q', '1', 'new') AS e;
SELECT ord, outcome FROM idem_enqueue_many('q', '{1, 2, 3}', '{new, newer, newest}');
SELECT (f).payload, (f).key, (f).links FROM (SELECT idem_fetch('q', 2, '1 min') AS f OFFSET 0) AS s;
SELECT ord, h.status FROM idem.jobs AS j, LATERAL idem_heartbeat(ARRAY[j.job_id], ARRAY[j.token], '1 min') AS h WHERE key = 'live';
SELECT i.state, i.key, i.attempt FROM idem.jobs AS j, LATERAL idem_job(j.job_id) AS i WHERE j.key = 'live';
SELECT reason FROM idem.jobs AS j, LATERAL idem_why(j.job_id) WHERE j.key = 'live';
SELECT status FROM idem_complete_many(ARRAY(SELECT job_id FROM idem.jobs WHERE key = 'live'), ARRAY(SELECT token FROM idem.jobs WHERE key = 'live'));
SELECT outcome, error FROM idem_drain('q', 'handler', 2);
SELECT verdict, count(*) FROM idem_verify('handler') WHERE verdict <> 'ok' GROUP BY 1;
SELECT idem_schedule_pause('s'), idem_schedule_resume('s'), idem_tick();
SELECT idem_pause('q'), idem_resume('q');
SELECT outcome, j.state FROM idem_enqueue('q', key => 'job_keys', dedup => 'until_expired', key_ttl => '1 h') AS e, idem_job(e.job_id) AS j;
-- a result that is stored out of line replaces a row that has columns that were dropped
SELECT idem_finish('leased', to_jsonb(repeat('r', 1000000)), token => (SELECT token FROM idem.keys WHERE key = 'leased'));
SELECT status, length(result #>> '{}') FROM idem_get('leased');
SELECT idem_forget('by hand'), idem_forget('none');
SET idem.clock_offset = '20000 d';
SELECT idem_cleanup(1000) > 0 AS removed;
RESET idem.clock_offset;
SELECT count(*) FROM idem.keys;
-- COPY with the columns that a dump lists, and without a list
CREATE TEMPORARY TABLE copies AS SELECT * FROM idem.jobs;
SELECT count(*) > 0 AS copied FROM copies;
DELETE FROM idem.jobs;
INSERT INTO idem.jobs SELECT * FROM copies;
-- indexes have entries for all rows
SET enable_seqscan = off;
SELECT count(*) = (SELECT count(*) FROM copies) AS in_index FROM idem.jobs WHERE job_id > 0;
SELECT count(*) = (SELECT count(*) FROM copies WHERE key_hash IS NOT NULL) AS in_index FROM idem.jobs WHERE key_hash IS NOT NULL AND key_hash > -9223372036854775808;
RESET enable_seqscan;

-- a column of idem that was dropped and added again is not at its place
BEGIN;
ALTER TABLE idem.job_keys DROP COLUMN result, ADD COLUMN result jsonb;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 h') $$) \gx
SELECT detail, fix FROM idem_internal.idem_stat_tables() \gx
ROLLBACK;
-- an attribute is one of the row, wherever it stands behind those before it
BEGIN;
ALTER TYPE idem.call_result DROP ATTRIBUTE replayed, ADD ATTRIBUTE replayed boolean;
ALTER TYPE idem.claim_many_result ADD ATTRIBUTE last timestamptz, DROP ATTRIBUTE expires_at;
SELECT * FROM idem_call('called', 'handler');
SELECT idem_call('called', 'handler');
SELECT ord, key, claimed, status, created_at IS NOT NULL AS created, last IS NOT NULL AS last FROM idem_claim_many('{k, l}');
ROLLBACK;
-- but not in another order
BEGIN;
ALTER TYPE idem.get_result DROP ATTRIBUTE status, ADD ATTRIBUTE status text;
SELECT state, detail FROM fails($$ SELECT idem_get('k') $$);
ROLLBACK;

--
-- H1: the doctor names each table and the command
--
CREATE PROCEDURE repair(change text) LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	EXECUTE change;
	FOR i IN 1 .. 2 LOOP	-- one fix may show the next problem
		FOR r IN SELECT name, detail, fix FROM idem_internal.idem_stat_tables() WHERE i = 1 OR fix !~ '^SELECT' LOOP
			RAISE INFO '%: %', r.name, r.detail USING HINT = r.fix;
			EXECUTE r.fix;
		END LOOP;
	END LOOP;
	IF EXISTS (SELECT FROM idem_internal.idem_stat_tables() AS s WHERE s.fix !~ '^SELECT') THEN
		RAISE INFO 'not repaired';
	END IF;
	ROLLBACK;
END $$;
CREATE SCHEMA "Other";
CREATE TABLE "Other".whole (LIKE idem.keys) PARTITION BY LIST (scope);
CALL repair('ALTER TABLE idem.job_log ADD COLUMN "A b" integer');
CALL repair('ALTER TABLE idem.keys SET UNLOGGED');
CALL repair('ALTER TABLE idem.queues ENABLE ROW LEVEL SECURITY');
CALL repair('CREATE TRIGGER "T r" BEFORE INSERT ON idem.job_keys FOR EACH ROW EXECUTE FUNCTION ignore_row()');
CALL repair('CREATE TABLE "Other"."ref" (q text CONSTRAINT "f k" REFERENCES idem.queues)');
CALL repair('CREATE TABLE "Other"."tar" (q text PRIMARY KEY); ALTER TABLE idem.schedules ADD CONSTRAINT own_fk FOREIGN KEY (queue) REFERENCES "Other"."tar" NOT VALID');
CALL repair('CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON idem.shard FOR EACH ROW EXECUTE FUNCTION ignore_row()');
CALL repair('CREATE RULE "R" AS ON INSERT TO idem.keys DO INSTEAD NOTHING');
CALL repair('ALTER TABLE idem.schedules ADD CONSTRAINT "C" CHECK (queue <> '''')');
CALL repair('ALTER TABLE idem.queues ALTER keep SET NOT NULL');
CALL repair('CREATE INDEX "I" ON idem.keys (lower(key))');
CALL repair('CREATE INDEX ON idem.keys (owner) WHERE owner <> 0');
CALL repair('CREATE UNIQUE INDEX ON idem.queues (owner)');
CALL repair('ALTER TABLE idem.queues ADD CONSTRAINT u UNIQUE (owner)');
CALL repair('ALTER TABLE idem.job_keys DROP CONSTRAINT job_keys_pkey');
CALL repair('ALTER TABLE idem.job_keys DROP CONSTRAINT job_keys_pkey, ADD PRIMARY KEY (key_hash, job_id) DEFERRABLE');
CALL repair('ALTER TABLE idem.job_keys DROP CONSTRAINT job_keys_pkey, ADD PRIMARY KEY (job_id)');
CALL repair('TRUNCATE idem.keys; ALTER TABLE "Other".whole ATTACH PARTITION idem.keys FOR VALUES IN ('''')');
CALL repair('ALTER TABLE idem.schedules RENAME TO elsewhere');
CALL repair('ALTER TABLE idem.job_keys ALTER result TYPE text');
-- what is no problem: more indexes, parents, a comment, options
CALL repair('CREATE INDEX ON idem.keys (owner); CREATE TABLE "Other".parent (); ALTER TABLE idem.keys INHERIT "Other".parent, SET (fillfactor = 80)');
-- two tables
BEGIN;
ALTER TABLE idem.jobs ADD COLUMN x integer;
ALTER TABLE idem.job_log SET UNLOGGED;
TABLE doctor \gx
SELECT name FROM idem_internal.idem_stat_tables() ORDER BY 1;
ROLLBACK;
DROP SCHEMA "Other" CASCADE;
DROP PROCEDURE repair;
DROP VIEW doctor;
DROP FUNCTION tables, types;
-- other tests see no such columns
SET client_min_messages = warning;
DROP EXTENSION idem CASCADE;
CREATE EXTENSION idem;
RESET client_min_messages;
