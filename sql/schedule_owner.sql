--
-- T9: a schedule acts for its owner, the role that has declared it last.  Each tick asks whether
-- that role may enqueue into the queue now.
--
\a\pset footer off
\set VERBOSITY terse
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
CALL anew();
CREATE ROLE idem_owner_app;
CREATE ROLE idem_owner_other;
CREATE ROLE idem_owner_admin;
CREATE ROLE idem_owner_team;
SELECT idem_grant('idem_owner_app', 'app'), idem_grant('idem_owner_other', 'app'), idem_grant('idem_owner_admin', 'admin');
CREATE VIEW status AS SELECT name, owner, state, last_tick, missed_ticks AS missed FROM idem.schedule_status ORDER BY name;
CREATE VIEW keys AS SELECT key FROM idem.jobs ORDER BY key;
CREATE VIEW doctor AS SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'owners';
GRANT SELECT ON status, keys TO PUBLIC;
CALL set_clock('2050-01-01 00:00');

--
-- The role that declares a schedule last is its owner
--
SET ROLE idem_owner_app;
SELECT idem_schedule('a', 'q', '@hourly', payload => '1');
-- a role that pauses and resumes it is not, nor one that ticks
SET ROLE idem_owner_other;
SELECT idem_schedule_pause('a'), idem_schedule_resume('a');
SET ROLE idem_owner_admin;
SELECT idem_tick();
TABLE status;
-- a role that declares it is, even if nothing changes
SET ROLE idem_owner_other;
SELECT idem_schedule('a', 'q', '@hourly', payload => '1');
SET ROLE idem_owner_admin;
TABLE status;
BEGIN;
SET LOCAL ROLE idem_owner_app;
SELECT idem_schedule('a', 'q', '@hourly', payload => '1');
SET LOCAL ROLE idem_owner_admin;
TABLE status;
ROLLBACK;
TABLE status;
-- a function that is SECURITY DEFINER: its owner
RESET ROLE;
CREATE FUNCTION idem_test_definer() RETURNS timestamptz LANGUAGE sql SECURITY DEFINER AS $$ SELECT idem_schedule('a', 'q', '@hourly', payload => '1') $$;
ALTER FUNCTION idem_test_definer() OWNER TO idem_owner_app;
SET ROLE idem_owner_other;
SELECT idem_test_definer();
RESET ROLE;
TABLE status;
DROP FUNCTION idem_test_definer;
-- idem.owner is about keys
SET ROLE idem_owner_app;
SET idem.owner = 'idem_owner_app';
SELECT idem_schedule('a', 'q', '@hourly', payload => '1');
RESET idem.owner;
RESET ROLE;
TABLE status;
-- a schedule each tick of which would fail
RESET ROLE;
REVOKE EXECUTE ON FUNCTION idem_enqueue FROM idem_owner_app;
SET ROLE idem_owner_app;
\set VERBOSITY default
SELECT idem_schedule('b', 'q', '@hourly');
\set VERBOSITY terse
RESET ROLE;
GRANT EXECUTE ON FUNCTION idem_enqueue TO idem_owner_app;
TABLE status;

--
-- The queue gets an owner.  A schedule that fails does not advance, and does not hold up another
-- one (T7).
--
SET ROLE idem_owner_other;
SELECT idem_schedule('b', 'q2', '@hourly');
SET ROLE idem_owner_app;
SELECT idem_schedule('skip', 'q', '@hourly', missed => 'skip'), idem_schedule('all', 'q', '@hourly', missed => 'all'),
	   idem_schedule('paused', 'q', '@hourly'), idem_schedule('ended', 'q', '@hourly', ends_at => '2049-01-01'), idem_schedule_pause('paused');
RESET ROLE;
TABLE doctor;
\set VERBOSITY default
SELECT idem_queue_set('q', owner => 'idem_owner_team');
CALL set_clock('2050-01-01 01:30');
SET ROLE idem_owner_admin;
SELECT idem_tick();
\set VERBOSITY terse
RESET ROLE;
TABLE status;
TABLE keys;
SELECT status, detail FROM idem_doctor() WHERE "check" = 'schedules';
TABLE doctor \gx
SELECT fix FROM doctor \gset
:fix
-- the right is back: the ticks are treated as missed ones are
CALL set_clock('2050-01-01 03:30');
SELECT idem_tick();
GRANT idem_owner_team TO idem_owner_app;
TABLE doctor \gx
SELECT idem_tick();
TABLE status;
TABLE keys;
-- a member that does not inherit may not use the queue
ALTER ROLE idem_owner_app NOINHERIT;
DO $$ BEGIN
	IF current_setting('server_version_num')::int >= 160000 THEN
		EXECUTE 'GRANT idem_owner_team TO idem_owner_app WITH INHERIT FALSE';
	END IF;
END $$;
CALL set_clock('2050-01-01 04:30');
TRUNCATE idem.jobs;
SELECT idem_tick();
TABLE status;
-- another role that may use the queue declares it again
RESET ROLE;
SELECT idem_schedule('all', 'q', '@hourly', missed => 'all') IS NOT NULL AS declared, (SELECT owner <> 'idem_owner_app'::regrole FROM status WHERE name = 'all') AS is_mine;
SELECT idem_tick();
TABLE keys;
SELECT idem_queue_set('q', owner => '-');
SELECT idem_tick();

--
-- The role may not execute idem_enqueue any more
--
CALL anew();
ALTER ROLE idem_owner_app INHERIT;
SET ROLE idem_owner_app;
SELECT idem_schedule('a', 'q', every => '1 h', starts_at => '2050-01-01', missed => 'all');
RESET ROLE;
SELECT idem_revoke('idem_owner_app', 'app');
CALL set_clock('2050-01-01 06:00');
SELECT idem_tick();
SELECT name, owner, state FROM status;
-- EXECUTE from another role, and from PUBLIC, which is right as it is for an enqueue
GRANT idem_owner_other TO idem_owner_app;
SELECT idem_tick();
REVOKE idem_owner_other FROM idem_owner_app;
CALL set_clock('2050-01-01 07:00');
SELECT idem_tick();
GRANT EXECUTE ON FUNCTION idem_enqueue TO PUBLIC;
SELECT idem_tick();
REVOKE EXECUTE ON FUNCTION idem_enqueue FROM PUBLIC;

--
-- The role goes
--
SELECT idem_grant('idem_owner_app', 'app');
CALL set_clock('2050-01-01 08:00');
SELECT idem_tick();
-- no object depends on a schedule
REASSIGN OWNED BY idem_owner_app TO idem_owner_other;
SELECT name, owner, state FROM status;
DROP OWNED BY idem_owner_app;
CALL set_clock('2050-01-01 09:00');
SELECT idem_tick();
SELECT name, owner, state FROM status;
DROP ROLE idem_owner_app;
SELECT idem_tick();
-- even if PUBLIC may
GRANT EXECUTE ON FUNCTION idem_enqueue TO PUBLIC;
SELECT idem_tick();
REVOKE EXECUTE ON FUNCTION idem_enqueue FROM PUBLIC;
-- a new role with the name of the old one is another role
CREATE ROLE idem_owner_app;
SELECT idem_grant('idem_owner_app', 'app');
SELECT idem_tick();
SELECT name, owner ~ '^\d+$' AS is_a_number, state FROM (SELECT name, owner::text, state FROM status) AS s;
SELECT status, regexp_replace(detail, 'role \d+', 'role N') AS detail FROM doctor;
BEGIN;
UPDATE idem.schedules SET owner = 4294967295;
\set VERBOSITY default
SELECT idem_tick();
\set VERBOSITY terse
ROLLBACK;
-- which may declare the schedule again, like any other role that may use the queue
SET ROLE idem_owner_app;
SELECT idem_schedule('a', 'q', every => '1 h', missed => 'all');
SET ROLE idem_owner_admin;
SELECT idem_tick();
TABLE status;
TABLE keys;

--
-- Jobs from before the change of an owner
--
RESET ROLE;
CALL anew();
SET ROLE idem_owner_app;
SELECT count(e.job_id) FROM generate_series(0, 2) AS i, LATERAL idem_enqueue('q', delay => i * interval '1 day') AS e;
SELECT idem_enqueue('q2') IS NULL;
RESET ROLE;
TABLE doctor;
SELECT idem_queue_set('q', keep => '1 day');
\set VERBOSITY default
SELECT idem_queue_set('q', owner => 'idem_owner_team');
\set VERBOSITY terse
-- the owner stays, and goes: no warning; it comes back: they were enqueued before that, too
SELECT owned_at FROM idem.queues \gset
SELECT idem_queue_set('q', owner => 'idem_owner_team', keep => '2 days'), idem_queue_set('q', keep => '1 day');
SELECT owned_at = :'owned_at' AS stays FROM idem.queues;
SELECT queue, owned_at - idem_clock() BETWEEN '-1 min' AND '0' AS now FROM idem.queues;
TABLE doctor;
SELECT idem_queue_set('q', owner => '-');
SELECT owned_at FROM idem.queues;
TABLE doctor;
SELECT idem_queue_set('q', owner => 'idem_owner_team');
TABLE doctor \gx
SELECT rtrim(fix, ';') AS fix FROM doctor \gset
SELECT job_id, queue, owner, state FROM (:fix) AS f;
-- H1: the administrator runs the fix; a job of after the change does not count
GRANT idem_owner_team TO idem_owner_admin;
SET ROLE idem_owner_admin;
SELECT idem_enqueue('q') IS NULL;
SELECT idem_cancel(2), idem_cancel(3);
SELECT status, detail FROM idem_doctor() WHERE "check" = 'owners';
SELECT job_id FROM idem_fetch('q', 1);
SELECT idem_pause('q'), idem_resume('q');
SELECT owned_at IS NOT NULL FROM idem.queues;
RESET ROLE;
-- many
TRUNCATE idem.jobs;
SELECT count(e.job_id) FROM generate_series(1, 10000) AS i, LATERAL idem_enqueue('q', to_jsonb(i)) AS e;
SELECT idem_queue_set('q', owner => 'idem_owner_other');
DELETE FROM idem.jobs WHERE job_id = (SELECT max(job_id) FROM idem.jobs);
SELECT idem_queue_set('q', owner => 'idem_owner_team');

--
-- The view and the C code agree about all roles and queues
--
CALL anew();
CREATE ROLE idem_owner_super SUPERUSER;
CREATE ROLE idem_owner_member IN ROLE idem_owner_team;
CREATE ROLE idem_owner_gone;
SELECT idem_grant('idem_owner_team', 'app'), idem_grant('idem_owner_gone', 'app');
SELECT idem_schedule(r.rolname || ' ' || q, q, '@hourly') IS NULL AS ended
  FROM pg_roles AS r, unnest('{open,team,other,gone}'::text[]) AS q WHERE r.rolname ~ '^idem_owner_' GROUP BY 1;
UPDATE idem.schedules SET owner = split_part(name, ' ', 1)::regrole;
SET client_min_messages = error;
SELECT idem_queue_set('team', owner => 'idem_owner_team'), idem_queue_set('other', owner => 'idem_owner_other'), idem_queue_set('gone', owner => 'idem_owner_gone');
DROP OWNED BY idem_owner_gone;
DROP ROLE idem_owner_gone;
CREATE TABLE before AS SELECT name, state = 'refused' AS refused FROM idem.schedule_status;
CALL set_clock('2050-01-01 09:30');
UPDATE idem.schedules SET next_tick = '2050-01-01 09:00';
SELECT idem_tick();
RESET client_min_messages;
SELECT b.name, b.refused FROM before AS b ORDER BY b.name COLLATE "C";
SELECT count(*) AS wrong FROM before AS b JOIN idem.schedules AS s USING (name) WHERE (s.last_tick IS NULL) <> b.refused;
DROP TABLE before;

CALL anew();
DROP VIEW status, keys, doctor;
SELECT idem_revoke(r, 'app') FROM unnest('{idem_owner_app,idem_owner_other,idem_owner_team}'::text[]) AS r;
SELECT idem_revoke('idem_owner_admin', 'admin');
DROP ROLE idem_owner_app, idem_owner_other, idem_owner_admin, idem_owner_member, idem_owner_super, idem_owner_team;
