--
-- M7: a table that Citus has distributed is refused, and a worker of Citus needs a map.
--
-- Citus is not installed here.  This test creates the tables in which Citus says what it has
-- distributed, as a superuser can, and checks how they are read.  test/t/118_citus.pl
-- checks the same on real nodes of Citus, where they are installed.
--
\a\pset footer off
SET client_min_messages = warning;
SET allow_system_table_mods = on;
CALL anew();
SELECT status FROM idem_claim('before');
SELECT count(*) FROM idem_enqueue('q', key => 'before');

-- Citus says so, and invalidates the table
CREATE PROCEDURE distribute(name text, method "char" DEFAULT 'h', model "char" DEFAULT 's') LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO pg_catalog.pg_dist_partition (logicalrelid, partmethod, repmodel) VALUES (format('idem.%I', name), method, model);
	EXECUTE format('ALTER TABLE idem.%I ALTER %I SET STATISTICS 100', name,
				   (SELECT attname FROM pg_attribute WHERE attrelid = format('idem.%I', name)::regclass AND attnum = 1));
END $$;
CREATE PROCEDURE create_catalog() LANGUAGE sql AS $$
	CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass NOT NULL, partmethod "char" NOT NULL, partkey text,
		colocationid integer NOT NULL DEFAULT 0, repmodel "char" NOT NULL, autoconverted boolean NOT NULL DEFAULT false)
$$;
CREATE FUNCTION outcome_of(command text) RETURNS text LANGUAGE sql AS $$ SELECT concat_ws(' ', state, message) FROM fails(command) $$;

-- Citus without a table of ours
BEGIN;
CALL create_catalog();
INSERT INTO pg_catalog.pg_dist_partition (logicalrelid, partmethod, repmodel) VALUES ('pg_class', 'h', 's');
ALTER TABLE idem.keys ALTER key SET STATISTICS 100;
SELECT status FROM idem_claim('new');
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'citus';
ROLLBACK;

-- writes and reads of the keys are refused, whatever else is wrong with the table
\x on
BEGIN;
CALL create_catalog();
CALL distribute('keys');
SELECT state, message, detail, hint FROM fails($$ SELECT idem_claim('new') $$);
CREATE TRIGGER t BEFORE INSERT ON idem.keys FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT detail FROM fails($$ SELECT idem_claim('new') $$);
\x off
SELECT outcome_of(c) FROM unnest(ARRAY[
	$$ SELECT idem_get('before') $$, $$ SELECT idem_finish('before') $$, $$ SELECT idem_release('before') $$,
	$$ SELECT idem_forget('before') $$, $$ SELECT idem_lease('new', '1 min') $$, $$ SELECT idem_renew('before', 1, '1 min') $$,
	$$ SELECT idem_claim_many('{a,b}') $$, $$ SELECT idem_call('new', 'handler') $$, $$ SELECT idem_cleanup() $$,
	$$ SELECT idem_shard_set('{}') $$]) WITH ORDINALITY AS u (c, n) ORDER BY n;
-- other tables are not concerned
SELECT outcome FROM idem_enqueue('q', key => 'before');
-- a savepoint
SAVEPOINT s;
DELETE FROM pg_catalog.pg_dist_partition;
SELECT outcome_of($$ SELECT idem_claim('new') $$);
DROP TRIGGER t ON idem.keys;
SELECT outcome_of($$ SELECT idem_claim('new') $$);
ROLLBACK TO s;
SELECT outcome_of($$ SELECT idem_claim('new') $$);
ROLLBACK;
SELECT status FROM idem_claim('after the rollback');

-- every table, and what Citus can make of it
BEGIN;
CALL create_catalog();
CALL distribute('jobs', 'n', 't');
SELECT detail FROM fails($$ SELECT idem_enqueue('q') $$);
SELECT outcome_of(c) FROM unnest(ARRAY[
	$$ SELECT idem_fetch('q') $$, $$ SELECT idem_complete(1, 1) $$, $$ SELECT idem_job(1) $$, $$ SELECT idem_cancel(1) $$]) AS c;
ROLLBACK;
BEGIN;
CALL create_catalog();
CALL distribute('queues', 'n', 's');
SELECT detail FROM fails($$ SELECT idem_queue_set('other') $$);
SELECT outcome_of($$ SELECT idem_enqueue('other') $$);
ROLLBACK;
BEGIN;
CALL create_catalog();
CALL distribute('job_keys');
SELECT outcome_of($$ SELECT idem_enqueue('q', key => 'other', dedup => 'until_expired', key_ttl => '1 h') $$);
ROLLBACK;
BEGIN;
CALL create_catalog();
SELECT idem_queue_set('q', keep => '1 h');
CALL distribute('job_log');
SELECT job_id, token FROM idem_fetch('q', lease => '1 min') \gset
SELECT outcome_of(format('SELECT idem_complete(%s, %s)', :'job_id', :'token'));
ROLLBACK;
BEGIN;
CALL create_catalog();
CALL distribute('shard');
SELECT outcome_of(c) FROM unnest(ARRAY[
	$$ SELECT idem_claim('new') $$, $$ SELECT idem_enqueue('q') $$, $$ SELECT idem_slot('k') $$, $$ SELECT idem_shard_set('{}') $$]) AS c;
ROLLBACK;
BEGIN;
CALL create_catalog();
SELECT idem_schedule('s', 'q', '@hourly') IS NOT NULL AS declared;
CALL distribute('schedules', 'n', 't');
SELECT detail FROM fails($$ SELECT idem_schedule('s', 'q', '@hourly') $$);
SELECT outcome_of(c) FROM unnest(ARRAY[
	$$ SELECT idem_schedule('new', 'q', '@hourly') $$, $$ SELECT idem_unschedule('s') $$, $$ SELECT idem_schedule_pause('s') $$,
	$$ SELECT idem_schedule_resume('s') $$, $$ SELECT idem_tick() $$]) AS c;
ROLLBACK;
BEGIN;
CALL create_catalog();
CALL set_clock('2050-01-01 00:00+00');
SELECT idem_schedule('s', 'q', '@hourly') IS NOT NULL AS declared;
CALL distribute('jobs', 'n', 't');
CALL set_clock('2050-01-01 01:00+00');
SELECT idem_tick();
ROLLBACK;

-- the columns are found by name: another order, columns that were dropped, columns that are missing
BEGIN;
CREATE TABLE pg_catalog.pg_dist_partition (gone oid, extra text DEFAULT 'h', repmodel "char", partmethod "char", logicalrelid regclass);
ALTER TABLE pg_catalog.pg_dist_partition DROP COLUMN gone;
INSERT INTO pg_catalog.pg_dist_partition (logicalrelid, partmethod, repmodel) SELECT c.oid, 'h', 's' FROM pg_class AS c WHERE c.relkind = 'i' LIMIT 100;
CALL distribute('keys', 'n', 't');
SELECT detail FROM fails($$ SELECT idem_claim('new') $$);
ALTER TABLE pg_catalog.pg_dist_partition DROP COLUMN repmodel;
SELECT detail FROM fails($$ SELECT idem_claim('new') $$);
ALTER TABLE pg_catalog.pg_dist_partition DROP COLUMN partmethod;
SELECT detail FROM fails($$ SELECT idem_claim('new') $$);
-- what cannot be read could be a second run, so it is an error
ALTER TABLE pg_catalog.pg_dist_partition ALTER logicalrelid TYPE text;
SELECT detail FROM fails($$ SELECT idem_claim('new') $$);
ALTER TABLE pg_catalog.pg_dist_partition DROP COLUMN logicalrelid;
SELECT detail FROM fails($$ SELECT idem_claim('new') $$);
ROLLBACK;

-- tables of that name in other schemas are not of Citus, nor is a view
BEGIN;
CREATE TABLE public.pg_dist_partition (logicalrelid regclass, partmethod "char", repmodel "char");
INSERT INTO public.pg_dist_partition VALUES ('idem.keys', 'h', 's');
CREATE TABLE public.pg_dist_local_group AS SELECT 1 AS groupid;
SET LOCAL search_path = public, pg_catalog;
ALTER TABLE idem.keys ALTER key SET STATISTICS 100;
ALTER TABLE idem.shard ALTER id SET STATISTICS 100;
SELECT status FROM idem_claim('look-alike');
CREATE VIEW pg_catalog.pg_dist_partition AS SELECT * FROM public.pg_dist_partition;
CREATE VIEW pg_catalog.pg_dist_local_group AS SELECT * FROM public.pg_dist_local_group;
ALTER TABLE idem.keys ALTER key SET STATISTICS 101;
ALTER TABLE idem.shard ALTER id SET STATISTICS 101;
SELECT status FROM idem_claim('view');
ROLLBACK;

-- the latest state counts, whatever the snapshot of the transaction
CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass, partmethod "char", repmodel "char");
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM pg_catalog.pg_dist_partition;
\setenv PGDATABASE :DBNAME
\! psql -XqAt -d "$PGDATABASE" -c "CALL distribute('keys')"
SELECT count(*) FROM pg_catalog.pg_dist_partition;
SELECT outcome_of($$ SELECT idem_get('before') $$);
ROLLBACK;
DROP TABLE pg_catalog.pg_dist_partition;
ALTER TABLE idem.keys ALTER created_at SET STATISTICS -1;
SELECT status FROM idem_claim('without Citus again');

-- the doctor: on a worker the fix shows the coordinator, and on the coordinator, where Citus has put a trigger on the
-- table, it takes back what Citus has done.  No other check is made, because the planner of Citus refuses them.
CREATE FUNCTION in_pieces(fix text) RETURNS SETOF text LANGUAGE sql AS $$ SELECT regexp_split_to_table(fix, '(?<=;) ') $$;
BEGIN;
CALL create_catalog();
CALL distribute('keys');
CALL distribute('queues', 'n', 't');
SELECT "check", status, detail FROM idem_doctor();
SELECT in_pieces(fix) FROM idem_doctor() WHERE "check" = 'citus';
CREATE TRIGGER "truncate_trigger_1" AFTER TRUNCATE ON idem.keys EXECUTE FUNCTION ignore_row();
CREATE TRIGGER "truncate_trigger_2" AFTER TRUNCATE ON idem.queues EXECUTE FUNCTION ignore_row();
SELECT in_pieces(fix) FROM idem_doctor() WHERE "check" = 'citus';
SELECT relname, idem_internal.idem_citus_table(oid) FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind = 'r' ORDER BY relname COLLATE "C";
ROLLBACK;
SELECT idem_internal.idem_citus_table('idem.keys'::regclass) IS NULL AND idem_internal.idem_citus_table(NULL) IS NULL AND idem_internal.idem_citus_table(0) IS NULL AS none;

-- a worker of Citus without a map refuses keys and new jobs, until it gets a map
BEGIN;
CREATE TABLE pg_catalog.pg_dist_local_group (gone text, groupid integer);
ALTER TABLE pg_catalog.pg_dist_local_group DROP COLUMN gone;
INSERT INTO pg_catalog.pg_dist_local_group VALUES (0);
ALTER TABLE idem.shard ALTER id SET STATISTICS 100;
SELECT status FROM idem_claim('coordinator');
UPDATE pg_catalog.pg_dist_local_group SET groupid = 1;
ALTER TABLE idem.shard ALTER id SET STATISTICS 101;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_claim('new') $$) \gx
SELECT outcome_of(c) FROM unnest(ARRAY[
	$$ SELECT idem_get('before') $$, $$ SELECT idem_lease('new', '1 min') $$, $$ SELECT idem_finish('before') $$,
	$$ SELECT idem_enqueue('q') $$, $$ SELECT idem_enqueue('q', key => 'new') $$, $$ SELECT idem_enqueue_many('q', '{1}') $$]) AS c;
SELECT idem_slot('new') BETWEEN 0 AND 1023 AS told;
SAVEPOINT s;
SELECT idem_shard_set('{[0,1024)}', by => 'scope');
SELECT status FROM idem_claim('new');
SELECT outcome FROM idem_enqueue('q');
ROLLBACK TO s;
SELECT outcome_of($$ SELECT idem_claim('new') $$);
SELECT idem_shard_set(NULL);
SELECT status FROM idem_claim('new');
ROLLBACK;
BEGIN;
CREATE TABLE pg_catalog.pg_dist_local_group (groupid text);
INSERT INTO pg_catalog.pg_dist_local_group VALUES ('1');
ALTER TABLE idem.shard ALTER id SET STATISTICS 100;
SELECT status FROM idem_claim('no number');
ROLLBACK;
SELECT status FROM idem_claim('at the end');

DROP PROCEDURE distribute, create_catalog;
DROP FUNCTION outcome_of, in_pieces;
