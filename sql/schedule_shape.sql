--
-- Direct access would bypass triggers and the like that users add to idem.schedules: idem
-- refuses to work then, as for its other tables
--
\a\pset footer off
SET client_min_messages = warning;
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('a', 'q', '@hourly'), idem_schedule('b', 'q', every => '1 h', starts_at => '2050-01-01 01:00');
CALL set_clock('2050-01-01 01:00');
-- only the SQLSTATEs
CREATE FUNCTION all_refused(OUT new text, OUT old text, OUT unschedule text, OUT pause text, OUT resume text, OUT tick text)
LANGUAGE sql AS $$
	SELECT (fails($c$ SELECT idem_schedule('new', 'q', '@daily') $c$)).state,
		   (fails($c$ SELECT idem_schedule('a', 'q', '@daily') $c$)).state,
		   (fails($c$ SELECT idem_unschedule('a') $c$)).state,
		   (fails($c$ SELECT idem_schedule_pause('b') $c$)).state,
		   (fails($c$ SELECT idem_schedule_resume('b') $c$)).state,
		   (fails($c$ SELECT idem_tick() $c$)).state
$$;
\x on
BEGIN;
CREATE TRIGGER t BEFORE INSERT ON idem.schedules FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT state, message, detail, hint FROM fails($$ SELECT idem_schedule('new', 'q', '@daily') $$);
ROLLBACK;
BEGIN;
DROP INDEX idem.schedules_next_tick_idx;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_tick() $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem.schedules DROP CONSTRAINT schedules_pkey;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_schedule_pause('a') $$);
ROLLBACK;
\x off
-- from here on only the SQLSTATEs
BEGIN;
ALTER TABLE idem.schedules SET UNLOGGED;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.schedules ENABLE ROW LEVEL SECURITY;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
CREATE TRIGGER t AFTER UPDATE ON idem.schedules FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
CREATE RULE r AS ON UPDATE TO idem.schedules DO INSTEAD NOTHING;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
CREATE TABLE referencing (name text REFERENCES idem.schedules);
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.schedules ADD CHECK (queue <> 'forbidden');
SELECT * FROM all_refused();
ROLLBACK;
-- a not-null constraint on a column that is null in some rows
BEGIN;
DELETE FROM idem.schedules WHERE cron IS NULL;
ALTER TABLE idem.schedules ALTER cron SET NOT NULL;
SELECT new, old, unschedule, tick FROM all_refused();
ROLLBACK;
-- other columns
BEGIN;
ALTER TABLE idem.schedules ADD COLUMN extra text;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.schedules ALTER starts_at TYPE text;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.schedules RENAME TO elsewhere;
SELECT * FROM all_refused();
ROLLBACK;
-- a partition
BEGIN;
CREATE TABLE whole (LIKE idem.schedules) PARTITION BY LIST (queue);
ALTER TABLE whole ATTACH PARTITION idem.schedules FOR VALUES IN ('q');
SELECT * FROM all_refused();
ROLLBACK;
-- without the primary key, also if another index is unique
BEGIN;
ALTER TABLE idem.schedules DROP CONSTRAINT schedules_pkey;
SELECT * FROM all_refused();
CREATE UNIQUE INDEX ON idem.schedules (name);
SELECT * FROM all_refused();
ROLLBACK;
-- indexes that need a new entry: unique, partial, of an expression
BEGIN;
CREATE UNIQUE INDEX ON idem.schedules (name, queue);
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
CREATE INDEX ON idem.schedules (name) WHERE cron IS NOT NULL;
SELECT * FROM all_refused();
ROLLBACK;
BEGIN;
CREATE INDEX ON idem.schedules (lower(name));
SELECT * FROM all_refused();
ROLLBACK;
-- without the index that gives the order of ticks; a similar one does not replace it
BEGIN;
DROP INDEX idem.schedules_next_tick_idx;
SELECT tick FROM all_refused();
CREATE INDEX ON idem.schedules (last_tick, next_tick);
SELECT tick FROM all_refused();
CREATE INDEX ON idem.schedules (next_tick DESC);
SELECT tick FROM all_refused();
ROLLBACK;
-- one without a predicate and with another name does
BEGIN;
DROP INDEX idem.schedules_next_tick_idx;
CREATE INDEX other_name ON idem.schedules (next_tick);
SELECT idem_tick();
ROLLBACK;
-- the other tables that a tick needs: that is a failure of each schedule
SET client_min_messages = notice;
\set VERBOSITY terse
BEGIN;
ALTER TABLE idem.jobs ADD COLUMN extra text;
SELECT idem_tick();
ROLLBACK;
BEGIN;
ALTER TABLE idem.queues ADD COLUMN extra text;
SELECT state FROM fails($$ SELECT idem_schedule('a', 'q', '@daily') $$);
SELECT idem_tick();
ROLLBACK;
-- an additional index is kept up to date, also one built concurrently; so is the primary key while it is built anew
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
-- a publication needs a replica identity
BEGIN;
SET LOCAL client_min_messages = error;
CREATE PUBLICATION shape FOR TABLE idem.schedules;
SELECT idem_schedule('e', 'q', '@daily');
ALTER TABLE idem.schedules REPLICA IDENTITY NOTHING;
SELECT * FROM all_refused();
ROLLBACK;
-- library and SQL objects of different versions: other functions
CREATE FUNCTION old_schedule(text, text, text) RETURNS timestamptz AS '$libdir/idem', 'idem_schedule' LANGUAGE C;
SELECT old_schedule('a', 'q', '@daily');
CREATE FUNCTION old_tick() RETURNS bigint AS '$libdir/idem', 'idem_tick' LANGUAGE C;
SELECT old_tick();
DROP FUNCTION old_schedule, old_tick;
-- after everything was removed, it works as before
SELECT * FROM all_refused();
DROP FUNCTION all_refused;
CALL anew();
