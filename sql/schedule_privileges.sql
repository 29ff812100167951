--
-- Privileges: who may use a queue may schedule for it (T8).  Ticks are the work of operators.
--
\a\pset footer off
\set VERBOSITY terse
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
CALL anew();
CREATE ROLE idem_sched_app;
CREATE ROLE idem_sched_other;
CREATE ROLE idem_sched_admin;
CREATE ROLE idem_sched_monitor;
CREATE ROLE idem_sched_nobody;
CREATE ROLE idem_sched_team;
SELECT idem_grant('idem_sched_app', 'app'), idem_grant('idem_sched_other', 'app'), idem_grant('idem_sched_admin', 'admin'), idem_grant('idem_sched_monitor', 'monitor');
CALL set_clock('2050-01-01 00:00');

-- without a grant there is nothing
SET ROLE idem_sched_nobody;
SELECT idem_schedule('a', 'open', '@hourly');
SELECT idem_unschedule('a');
SELECT idem_schedule_pause('a');
SELECT idem_schedule_resume('a');
SELECT idem_tick();
SELECT * FROM idem.schedules;
SELECT * FROM idem.schedule_status;

-- an application: its own and those of others for a queue that is open to all
SET ROLE idem_sched_app;
SELECT idem_schedule('a', 'open', '@hourly', payload => '"secret"');
SET ROLE idem_sched_other;
SELECT idem_schedule('a', 'open', '@daily', payload => '"secret"');
SELECT idem_schedule_pause('a'), idem_schedule_resume('a'), idem_unschedule('a');
SELECT idem_schedule('a', 'open', '@hourly', payload => '"secret"');
-- it neither ticks nor reads the tables, nor writes them
SELECT idem_tick();
SELECT * FROM idem.schedules;
SELECT * FROM idem.schedule_status;
INSERT INTO idem.schedules (name) VALUES ('b');
UPDATE idem.schedules SET next_tick = NULL;
DELETE FROM idem.schedules;
TRUNCATE idem.schedules;
-- a monitor sees schedules, without payloads
SET ROLE idem_sched_monitor;
SELECT name, queue, state FROM idem.schedule_status;
SELECT name FROM idem.schedules;
SELECT idem_tick();
SELECT idem_schedule('b', 'open', '@hourly');
SELECT idem_schedule_pause('a');
SELECT status, detail FROM idem_doctor() WHERE "check" = 'schedules';
-- pg_monitor, too
RESET ROLE;
SELECT has_table_privilege('pg_monitor', 'idem.schedule_status', 'SELECT') AS status, has_table_privilege('pg_monitor', 'idem.schedules', 'SELECT') AS schedules;
-- an administrator reads everything and writes by the functions
SET ROLE idem_sched_admin;
SELECT name, payload FROM idem.schedules;
SELECT name, state FROM idem.schedule_status;
UPDATE idem.schedules SET next_tick = NULL;
SELECT idem_schedule('b', 'open', '30 * * * *');

-- a queue with an owner
RESET ROLE;
GRANT idem_sched_team TO idem_sched_app;
SELECT idem_queue_set('team', owner => 'idem_sched_team');
SET ROLE idem_sched_app;
SELECT idem_schedule('t', 'team', '@hourly', payload => '"for the team"');
RESET ROLE;
CREATE TABLE before AS SELECT *, xmin AS version FROM idem.schedules;
SET ROLE idem_sched_other;
SELECT idem_schedule('new', 'team', '@hourly');
SELECT idem_schedule('t', 'team', '@hourly');
-- a schedule moves: both queues
SELECT idem_schedule('t', 'open', '@hourly');
SELECT idem_schedule('a', 'team', '@hourly');
SELECT idem_schedule_pause('t');
SELECT idem_schedule_resume('t');
SELECT idem_unschedule('t');
-- what is wrong is reported only to those who may use the queue
SELECT idem_schedule('new', 'team', 'nonsense');
-- an administrator that is not a member
SET ROLE idem_sched_admin;
SELECT idem_schedule_pause('t');
SELECT idem_unschedule('t');
RESET ROLE;
SELECT count(*) AS changed FROM (SELECT *, xmin FROM idem.schedules EXCEPT TABLE before) AS d;
DROP TABLE before;
-- a member may do all this
SET ROLE idem_sched_app;
SELECT idem_schedule('t', 'open', '@hourly', payload => '"for the team"'), idem_schedule('t', 'team', '@hourly', payload => '"for the team"');
SELECT idem_schedule_pause('t'), idem_schedule_resume('t');

-- a tick does not ask: the administrator ticks the schedules of all queues, and gets to see no job
RESET ROLE;
CALL set_clock('2050-01-01 01:00');
SET ROLE idem_sched_admin;
SELECT idem_tick();
SELECT key FROM idem.job_status ORDER BY key;
SELECT payload FROM idem_fetch('team');
SET ROLE idem_sched_app;
SELECT payload FROM idem_fetch('team');
-- the queue gets another owner, or one for the first time: the roles of the new one may change the schedules
RESET ROLE;
SELECT idem_queue_set('team', owner => 'idem_sched_other'), idem_queue_set('open', owner => 'idem_sched_team');
SET ROLE idem_sched_app;
SELECT idem_schedule_pause('t');
SELECT idem_schedule('t', 'open', '@hourly');
SELECT idem_schedule_pause('a');
SET ROLE idem_sched_other;
SELECT idem_schedule_pause('t');
SELECT idem_schedule_pause('a');
SELECT idem_schedule('t', 'open', '@hourly');
-- a SECURITY DEFINER function schedules with the privileges of its owner
RESET ROLE;
CREATE FUNCTION idem_test_definer() RETURNS boolean LANGUAGE sql SECURITY DEFINER AS $$ SELECT idem_schedule_resume('t') $$;
ALTER FUNCTION idem_test_definer() OWNER TO idem_sched_other;
SET ROLE idem_sched_nobody;
SELECT idem_test_definer();
RESET ROLE;
DROP FUNCTION idem_test_definer;

-- the owner of the queue was dropped: only superusers change the schedule
SELECT idem_revoke('idem_sched_other', 'app');
DROP ROLE idem_sched_other;
SET ROLE idem_sched_app;
SELECT idem_schedule_pause('t');
RESET ROLE;
CALL set_clock('2050-01-01 02:00');
SET ROLE idem_sched_admin;
SELECT idem_tick();
RESET ROLE;
SELECT idem_unschedule('t');
-- functions and operators of other schemas are not used instead, nor those in a session's own schema
CREATE SCHEMA hostile;
GRANT USAGE ON SCHEMA hostile TO PUBLIC;
CREATE FUNCTION hostile.trap(timestamptz, timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE OPERATOR hostile.<= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = hostile.trap);
CREATE OPERATOR hostile.< (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = hostile.trap);
CREATE TABLE hostile.schedules (LIKE idem.schedules);
CREATE FUNCTION hostile.idem_clock() RETURNS timestamptz LANGUAGE sql AS $$ SELECT 'infinity'::timestamptz $$;
CALL set_clock('2050-01-01 03:00');
SET search_path = hostile, pg_catalog, pg_temp;
SELECT name, state FROM idem.schedule_status;
SET ROLE idem_sched_admin;
SELECT idem_tick();
RESET ROLE;
RESET search_path;
SET client_min_messages = warning;
DROP SCHEMA hostile CASCADE;
RESET client_min_messages;
SELECT idem_revoke('idem_sched_app', 'app'), idem_revoke('idem_sched_admin', 'admin'), idem_revoke('idem_sched_monitor', 'monitor');
SET ROLE idem_sched_app;
SELECT idem_schedule('a', 'open', '@hourly');
RESET ROLE;
DROP ROLE idem_sched_app, idem_sched_admin, idem_sched_monitor, idem_sched_nobody, idem_sched_team;
CALL anew();
