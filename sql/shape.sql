--
-- Direct access would bypass triggers and the like that users add to the tables: idem refuses to work then
--
\a\pset footer off
SET client_min_messages = error;
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
CALL anew();
SELECT claimed FROM idem_claim('shape:1');
SELECT claimed FROM idem_lease('leased', '1 h');
SELECT idem_queue_set('kept', keep => '1 h');
SELECT outcome FROM idem_enqueue('ended'), idem_pause('ended');
SELECT idem_cancel(1);
SELECT count(*) FROM idem_enqueue_many('shape', '{1,2}', '{a,b}');
SELECT job_id FROM idem_fetch('shape', lease => '1 h');
SELECT outcome FROM idem_enqueue('expire', '1', 'a', 'until_expired', key_ttl => '1 h');
SELECT idem_schedule('a', 'q', '@hourly', starts_at => '2050-01-01') IS NOT NULL AS a, idem_schedule('b', 'q', every => '1 h') IS NOT NULL AS b;

-- who opens which tables
CREATE TABLE calls (n serial, name text, command text);
INSERT INTO calls (name, command) VALUES
	('claim', $$ SELECT idem_claim('new') $$),
	('replay', $$ SELECT idem_claim('shape:1') $$),
	('get', $$ SELECT idem_get('shape:1') $$),
	('finish', $$ SELECT idem_finish('held') $$),
	('release', $$ SELECT idem_release('held') $$),
	('renew', $$ SELECT idem_renew('leased', (SELECT token FROM idem.keys WHERE key = 'leased'), '1 h') $$),
	('forget', $$ SELECT idem_forget('shape:1') $$),
	('cleanup', $$ SELECT idem_cleanup() $$),
	('enqueue', $$ SELECT idem_enqueue('shape', '1', 'new') $$),
	('enqueue_many', $$ SELECT idem_enqueue_many('shape', '{1}', '{new}') $$),
	('enqueue_expire', $$ SELECT idem_enqueue('expire', '1', 'b', 'until_expired', key_ttl => '1 h') $$),
	('fetch', $$ SELECT idem_fetch('shape', lease => '1 h') $$),
	('complete', $$ SELECT idem_complete(job_id, token) FROM idem.jobs WHERE token IS NOT NULL $$),
	('complete_expire', $$ SELECT idem_complete(job_id, token) FROM idem_fetch('expire') $$),
	('fail', $$ SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('shape') $$),
	('cancel', $$ SELECT idem_cancel(3) $$),
	('retry', $$ SELECT idem_retry(1) $$),
	('queue_set', $$ SELECT idem_queue_set('shape') $$),
	('pause', $$ SELECT idem_pause('shape') $$),
	('schedule', $$ SELECT idem_schedule('new', 'q', '@daily') $$),
	('schedule_change', $$ SELECT idem_schedule('a', 'q', '@daily') $$),
	('unschedule', $$ SELECT idem_unschedule('a') $$),
	('schedule_pause', $$ SELECT idem_schedule_pause('b') $$),
	('schedule_resume', $$ SELECT idem_schedule_resume('b') $$),
	('tick', $$ SELECT idem_tick() $$);
-- make a change, try each call, and undo everything: the errors, with the calls that raise them
CREATE FUNCTION refused(change text, OUT calls text, OUT error text) RETURNS SETOF record LANGUAGE plpgsql AS $$
DECLARE
	call calls;
	answer record;
	names text[];
	errors text[];
BEGIN
	BEGIN
		PERFORM idem_claim('held');
		EXECUTE change;
		FOR call IN TABLE calls ORDER BY n LOOP
			BEGIN
				answer := fails(call.command);
				RAISE division_by_zero;
			EXCEPTION WHEN division_by_zero THEN
				IF answer.state IS NOT NULL THEN
					names := names || call.name;
					error := concat_ws(' ', answer.state, regexp_replace(answer.message, '^unexpected definition of table .*', ''), answer.detail, answer.hint);
					errors := errors || regexp_replace(error, '\d+\.\d+\.\d+', 'N', 'g');
				END IF;
			END;
		END LOOP;
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
	END;
	RETURN QUERY SELECT string_agg(u.name, ' ' ORDER BY u.n), u.error FROM unnest(names, errors) WITH ORDINALITY AS u (name, error, n)
	 GROUP BY u.error ORDER BY min(u.n);
END $$;

-- each change to each table; t is the table, pk its primary key, c one of its columns of type text
CREATE TABLE tables (n serial, t text, pk text, c text, nullable text);
INSERT INTO tables (t, pk, c, nullable) VALUES
	('keys', 'key_hash, nth', 'key', 'token'),
	('jobs', 'job_id', 'queue', 'errors'),
	('job_log', 'job_id', 'queue', 'links'),
	('job_keys', 'key_hash, job_id', 'key', 'result'),
	('queues', 'queue', 'queue', 'keep_dead'),
	('schedules', 'name', 'queue', 'cron');
CREATE TABLE changes (n serial, change text);
INSERT INTO changes (change) VALUES
	('ALTER TABLE idem.{t} SET UNLOGGED'),
	('ALTER TABLE idem.{t} ENABLE ROW LEVEL SECURITY'),
	('CREATE TRIGGER t BEFORE INSERT ON idem.{t} FOR EACH ROW EXECUTE FUNCTION ignore_row()'),
	('CREATE TRIGGER t AFTER DELETE ON idem.{t} FOR EACH STATEMENT EXECUTE FUNCTION ignore_row()'),
	('CREATE TABLE referencing (LIKE idem.{t}, FOREIGN KEY ({pk}) REFERENCES idem.{t})'),
	('CREATE RULE r AS ON INSERT TO idem.{t} DO INSTEAD NOTHING'),
	-- rows outside its bounds would be stored
	('CREATE TABLE whole (LIKE idem.{t}) PARTITION BY RANGE ({c}); ALTER TABLE whole ATTACH PARTITION idem.{t} FOR VALUES FROM (MINVALUE) TO (''zz'')'),
	('ALTER TABLE idem.{t} ADD CHECK ({c} <> ''forbidden'')'),
	('DELETE FROM idem.{t}; ALTER TABLE idem.{t} ALTER {nullable} SET NOT NULL'),
	('ALTER TABLE idem.{t} ADD COLUMN extra text'),
	('ALTER TABLE idem.{t} RENAME TO elsewhere'),
	('ALTER TABLE idem.{t} DROP CONSTRAINT {t}_pkey'),
	('ALTER TABLE idem.{t} DROP CONSTRAINT {t}_pkey; CREATE UNIQUE INDEX ON idem.{t} ({pk})'),
	-- for functions that need an entry there
	('CREATE INDEX ON idem.{t} (lower({c}))'),
	('CREATE INDEX ON idem.{t} ({pk}) WHERE {c} <> ''shape'''),
	('CREATE UNIQUE INDEX ON idem.{t} ({c}, {pk})'),
	('ALTER TABLE idem.{t} ADD EXCLUDE USING btree ({pk} WITH =)'),
	-- allowed: nothing would be bypassed, and a unique index on the primary key refuses nothing else
	('CREATE TABLE parent (LIKE idem.{t}); ALTER TABLE idem.{t} INHERIT parent; CREATE TABLE child () INHERITS (idem.{t})'),
	('CREATE INDEX ON idem.{t} ({c}); CREATE UNIQUE INDEX ON idem.{t} ({pk})');
SELECT t.t, r.calls, r.error, CASE WHEN t.n = 1 THEN c.change END AS change
  FROM changes AS c CROSS JOIN tables AS t
	   LEFT JOIN refused(replace(replace(replace(replace(replace(c.change, '{pk} WITH', split_part(pk, ',', 1) || ' WITH'), '{t}', t), '{pk}', pk), '{c}', t.c), '{nullable}', nullable)) AS r ON true
 ORDER BY c.n, t.n;

-- what one table only has
SELECT c.change, r.* FROM (VALUES
	-- the constraint of the parent reaches the child
	(1, 'CREATE TABLE parent (LIKE idem.keys); ALTER TABLE idem.keys INHERIT parent; ALTER TABLE parent ADD CHECK (key <> ''forbidden'')'),
	(2, 'CREATE UNIQUE INDEX ON idem.keys (key COLLATE "POSIX", scope)'),
	(3, 'ALTER TABLE idem.keys ALTER COLUMN result TYPE text'),
	(4, 'ALTER TABLE idem.jobs ALTER COLUMN key_until TYPE text'),
	(5, 'ALTER TABLE idem.schedules ALTER starts_at TYPE text'),
	-- partial indexes: on other columns than the first, on nulls, with more
	(6, 'CREATE INDEX ON idem.jobs (key_hash) WHERE key IS NOT NULL'),
	(7, 'CREATE INDEX ON idem.jobs (key_hash) WHERE key_hash IS NULL'),
	(8, 'CREATE INDEX ON idem.jobs (key_hash) WHERE key_hash IS NOT NULL AND queue <> ''shape'''),
	-- indexes that find or order rows: none, others, descending, partial, of another collation, and the same with another name
	(10, 'DROP INDEX idem.keys_expires_at_idx'),
	(11, 'DROP INDEX idem.keys_expires_at_idx; CREATE INDEX ON idem.keys (expires_at DESC)'),
	(12, 'DROP INDEX idem.keys_expires_at_idx; CREATE INDEX ON idem.keys (expires_at) WHERE result IS NULL'),
	(13, 'DROP INDEX idem.jobs_fetch_idx'),
	(14, 'DROP INDEX idem.jobs_fetch_idx; CREATE INDEX jobs_fetch_idx ON idem.jobs (queue, priority, run_at DESC, job_id)'),
	(15, 'DROP INDEX idem.jobs_fetch_idx; CREATE INDEX jobs_fetch_idx ON idem.jobs (queue, run_at, priority, job_id)'),
	(16, 'DROP INDEX idem.jobs_fetch_idx; CREATE INDEX jobs_fetch_idx ON idem.jobs (queue COLLATE "POSIX", priority, run_at, job_id)'),
	(17, 'ALTER INDEX idem.jobs_fetch_idx RENAME TO renamed'),
	(18, 'DROP INDEX idem.jobs_key_idx'),
	(19, 'DROP INDEX idem.job_log_expires_at_idx'),
	(20, 'DROP INDEX idem.job_keys_expires_at_idx'),
	(21, 'DROP INDEX idem.schedules_next_tick_idx'),
	(22, 'DROP INDEX idem.schedules_next_tick_idx; CREATE INDEX ON idem.schedules (last_tick, next_tick)'),
	(23, 'DROP INDEX idem.schedules_next_tick_idx; CREATE INDEX ON idem.schedules (next_tick DESC)'),
	(24, 'DROP INDEX idem.schedules_next_tick_idx; CREATE INDEX other_name ON idem.schedules (next_tick)'),
	-- a publication needs a replica identity, as for any UPDATE and DELETE
	(30, 'CREATE PUBLICATION shape FOR TABLE idem.keys, idem.jobs, idem.schedules'),
	(31, 'CREATE PUBLICATION shape FOR TABLE idem.keys; ALTER TABLE idem.keys REPLICA IDENTITY NOTHING'),
	(32, 'CREATE PUBLICATION shape FOR TABLE idem.jobs; ALTER TABLE idem.jobs REPLICA IDENTITY NOTHING'),
	(33, 'CREATE PUBLICATION shape FOR TABLE idem.schedules; ALTER TABLE idem.schedules REPLICA IDENTITY NOTHING'),
	-- after everything was removed, it works as before
	(40, 'SELECT')) AS c (n, change) LEFT JOIN refused(c.change) AS r ON true
 ORDER BY c.n;

-- a copy of the primary key with another equality: a key would be absent in the one index and refused by the other, in an
-- endless loop
BEGIN;
CREATE FUNCTION compare_half(bigint, bigint) RETURNS integer LANGUAGE sql IMMUTABLE
AS $$ SELECT btint8cmp($1 / 2, $2 / 2) $$;
CREATE OPERATOR CLASS half_ops FOR TYPE bigint USING btree AS
	OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 compare_half(bigint, bigint);
CREATE UNIQUE INDEX ON idem.keys (key_hash half_ops, nth);
SET LOCAL statement_timeout = '10 s';
SELECT detail FROM fails($$ SELECT idem_claim('new') $$);
SELECT state FROM fails($$ SELECT idem_claim('SHAPE:1') $$);
ROLLBACK;

-- a take-over needs the replica identity, too
SELECT claimed FROM idem_claim('shape:3', ttl => '1 s');
BEGIN;
CREATE PUBLICATION shape FOR TABLE idem.keys;
ALTER TABLE idem.keys REPLICA IDENTITY NOTHING;
SET LOCAL idem.clock_offset = '1 h';
SELECT state FROM fails($$ SELECT idem_claim('shape:3', wait => '0') $$);
ROLLBACK;

-- the other tables that a tick needs: that is a failure of each schedule
CALL set_clock('2050-01-01 01:00');
SET client_min_messages = notice;
\set VERBOSITY terse
BEGIN;
ALTER TABLE idem.jobs ADD COLUMN extra text;
SELECT idem_tick();
ROLLBACK;
BEGIN;
ALTER TABLE idem.queues ADD COLUMN extra text;
SELECT idem_tick();
ROLLBACK;
RESET client_min_messages;
RESET idem.clock_offset;
DROP FUNCTION refused;
DROP TABLE calls, tables, changes;

-- library and SQL objects of different versions: other functions
\set VERBOSITY sqlstate
CREATE FUNCTION old_claim(text, OUT claimed boolean, OUT status text)
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT old_claim('shape:1');
CREATE FUNCTION new_claim(text, jsonb, interval, interval, text, OUT claimed boolean, OUT status text)
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT new_claim('shape:1', NULL, NULL, NULL, NULL);
CREATE FUNCTION turned_claim(text, jsonb, interval, interval, text,
	OUT a text, OUT b boolean, OUT c jsonb, OUT d timestamptz, OUT e timestamptz)
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT turned_claim('shape:1', NULL, NULL, NULL, NULL);
CREATE FUNCTION untyped_claim(text, jsonb, interval, interval, text) RETURNS record
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT untyped_claim('shape:1', NULL, NULL, NULL, NULL);
CREATE FUNCTION new_get(text, text, OUT status text, OUT result jsonb) RETURNS SETOF record
AS '$libdir/idem', 'idem_get' LANGUAGE C;
SELECT * FROM new_get('shape:1', NULL);
CREATE FUNCTION new_many(text[], jsonb[], interval, interval, text, OUT a int, OUT b text) RETURNS SETOF record
AS '$libdir/idem', 'idem_claim_many' LANGUAGE C;
SELECT * FROM new_many('{a}', NULL, NULL, NULL, NULL);
CREATE FUNCTION old_finish(text, jsonb) RETURNS void
AS '$libdir/idem', 'idem_finish' LANGUAGE C;
SELECT old_finish('shape:1', NULL);
DROP FUNCTION old_claim, new_claim, turned_claim, untyped_claim, new_get, new_many, old_finish;
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
CREATE FUNCTION old_schedule(text, text, text) RETURNS timestamptz AS '$libdir/idem', 'idem_schedule' LANGUAGE C;
SELECT old_schedule('a', 'q', '@daily');
CREATE FUNCTION old_tick() RETURNS bigint AS '$libdir/idem', 'idem_tick' LANGUAGE C;
SELECT old_tick();
DROP FUNCTION old_schedule, old_tick;
\set VERBOSITY default

-- an additional index, even one built concurrently, is kept up to date; so is a partial one on rows with a key
CALL anew();
SELECT count(*) FROM idem_enqueue_many('shape', '{1,2}', '{a,b}');
SELECT job_id FROM idem_fetch('shape', lease => '1 h');
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
-- so is the primary key while it is built anew
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('a', 'q', '@hourly'), idem_schedule('b', 'q', every => '1 h', starts_at => '2050-01-01 01:00');
CALL set_clock('2050-01-01 01:00');
CREATE INDEX CONCURRENTLY extra_1 ON idem.schedules (queue, next_tick);
CREATE INDEX extra_2 ON idem.schedules (last_tick) WHERE last_tick IS NOT NULL;
SELECT idem_tick();
SELECT idem_schedule('c', 'q2', '@daily');
REINDEX TABLE CONCURRENTLY idem.schedules;
SELECT idem_schedule('d', 'q2', '@daily');
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT name FROM idem.schedules WHERE queue = 'q2' AND next_tick > '2050-01-01' ORDER BY name;
SELECT count(*) FROM idem.schedules WHERE last_tick IS NOT NULL AND last_tick > '-infinity';
RESET enable_seqscan;
RESET enable_bitmapscan;
DROP INDEX idem.extra_1, idem.extra_2;
CALL anew();
