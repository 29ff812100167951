--
-- Schedules: declare, change, pause, resume, remove; one job per tick (T1, T2, T5, T7).
-- The test sets the clock to a time long after today, so that the background worker finds
-- no schedule due.  sql/schedule_missed.sql is about ticks that were missed.
--
\a\pset footer off
\set VERBOSITY terse
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
SET IntervalStyle = 'postgres';
CALL anew();
CREATE ROLE idem_schedule_owner SUPERUSER;
SET ROLE idem_schedule_owner;
CREATE VIEW ticked AS SELECT job_id, queue, key, run_at, priority, payload FROM idem.jobs ORDER BY job_id;
CREATE VIEW status AS SELECT name, state, next_tick, last_tick, last_job, missed_ticks AS missed FROM idem.schedule_status ORDER BY name;

--
-- Declare.  1 January 2050 is a Saturday.
--
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('cron', 'q', '0 4 * * *');
SELECT idem_schedule('weekday', 'q', '30 9 * * mon-fri', payload => '{"a": 1}', time_zone => 'Europe/Berlin', missed => 'all', priority => -3,
					 starts_at => '2050-01-04', ends_at => '2050-02-01');
-- null is the default of every argument that has one
SELECT idem_schedule('nulls', 'q', '@hourly', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
\x on
SELECT * FROM idem.schedules ORDER BY name;
SELECT * FROM idem.schedule_status ORDER BY name;
\x off
-- T2: without a start an interval starts now, at a whole second, and its first tick is one interval later
SELECT idem_schedule('every', 'q', every => '10 min') IS NOT NULL AS declared;
SELECT next_tick = starts_at + interval '10 min' AS first_tick, extract(microseconds FROM starts_at)::bigint % 1000000 AS fraction,
	   starts_at BETWEEN idem_clock() - interval '1 min' AND idem_clock() AS now, cron, every, time_zone
  FROM idem.schedules WHERE name = 'every';
SELECT timing, time_zone FROM idem.schedule_status WHERE name = 'every';
-- the longest name, which is one of bytes; names are compared by their bytes
SELECT idem_schedule(repeat(U&'\20ac', 85), 'q', '@daily'), idem_schedule('Cron', 'q', '@yearly'), idem_schedule('cron ', 'q', '@monthly');
SELECT count(*) FROM idem.schedules;

--
-- T1: a tick is a job
--
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('a', 'mail', '0 * * * *', payload => '{"to": "all"}', priority => 5);
SELECT idem_schedule('b', 'report', '0 0-23/2 * * *', time_zone => 'Asia/Kolkata');
-- no schedule is due
SELECT idem_tick();
TABLE ticked;
CALL set_clock('2050-01-01 00:59:30');
SELECT idem_tick();
CALL set_clock('2050-01-01 01:00');
SELECT idem_tick();
-- once
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- the key is the UTC instant, whatever the time zone of the schedule
CALL set_clock('2050-01-01 02:35');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- they are jobs like others
SELECT job_id, payload, attempt FROM idem_fetch('mail', 10, lease => '1 h') ORDER BY job_id;
SELECT job_id, key, payload IS NULL AS without FROM idem_fetch('report', 10, lease => '1 h');
-- a schedule that nobody ticks is late after a minute
CALL set_clock('2050-01-01 03:00:30');
SELECT name, state FROM status;
CALL set_clock('2050-01-01 03:01');
SELECT name, state FROM status;

-- more jobs than one; the number is that of all jobs
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT count(idem_schedule(format('s%s', i), 'q', '@hourly', payload => to_jsonb(i))) FROM generate_series(1, 50) AS i;
CALL set_clock('2050-01-01 01:00');
SELECT idem_tick();
SELECT count(*), count(DISTINCT key), min(run_at), max(run_at), bool_and(key = format('s%s@2050-01-01T01:00:00Z', payload)) AS own FROM idem.jobs;
SELECT count(*) AS wrong FROM idem.schedules AS s LEFT JOIN idem.jobs AS j ON j.job_id = s.last_job WHERE j.payload IS DISTINCT FROM s.payload;

--
-- T2: ticks of an interval are starts_at + n * every
--
CALL anew();
CALL set_clock('2050-01-01 00:00');
-- a start to come is the first tick
SELECT idem_schedule('to come', 'q', every => '7 h', starts_at => '2050-01-03 05:30');
-- a start long ago: the first tick from now on
SELECT idem_schedule('long ago', 'q', every => '7 h', starts_at => '1999-12-31 23:00');
SELECT extract(epoch FROM timestamptz '2050-01-01 00:00' - '1999-12-31 23:00')::bigint / 3600 % 7 AS hours_since_last;
SELECT idem_schedule('fraction', 'q', every => '1 h 0.25 s', starts_at => '2049-12-31 23:30:00.123456');
SELECT idem_schedule('days', 'q', every => '1 week', starts_at => '2049-12-31 23:30:00.5');
-- a tick that comes late does not postpone the others
CALL set_clock('2050-01-01 00:31:10');
SELECT idem_tick();
CALL set_clock('2050-01-01 01:32:20');
SELECT idem_tick();
CALL set_clock('2050-01-01 02:33:30');
SELECT idem_tick();
SELECT key, run_at FROM ticked WHERE key LIKE 'fraction%';
SELECT name, next_tick FROM status WHERE name <> 'fraction' ORDER BY name;
SELECT next_tick FROM status WHERE name = 'fraction';
CALL set_clock('2050-01-08 00:00');
SELECT idem_tick();
SELECT key, run_at FROM ticked WHERE key NOT LIKE 'fraction%' ORDER BY key;

-- starts_at and ends_at of a cron expression, both inclusive
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('at', 'q', '0 * * * *', starts_at => '2050-01-02 03:00', ends_at => '2050-01-02 05:00');
SELECT idem_schedule('after', 'q', '0 * * * *', starts_at => '2050-01-02 03:00:00.000001', ends_at => '2050-01-02 05:00:00.000001');
SELECT idem_schedule('before', 'q', '0 * * * *', starts_at => '2050-01-02 02:59:59.999999', ends_at => '2050-01-02 04:59:59.999999');
SELECT idem_schedule('past', 'q', '0 * * * *', starts_at => '2000-01-01');
-- of an interval; with one tick only
SELECT idem_schedule('interval', 'q', every => '30 min', starts_at => '2050-01-02 03:00', ends_at => '2050-01-02 03:30');
SELECT idem_schedule('single', 'q', every => '1 day', starts_at => '2050-01-02 03:00', ends_at => '2050-01-02 03:00');
CALL set_clock('2050-01-02 03:00');
SELECT idem_tick();
CALL set_clock('2050-01-02 03:30');
SELECT idem_tick();
CALL set_clock('2050-01-02 04:00');
SELECT idem_tick();
CALL set_clock('2050-01-02 05:00');
SELECT idem_tick();
CALL set_clock('2050-01-02 06:00');
SELECT idem_tick();
SELECT split_part(key, '@', 1) AS name, array_agg(split_part(key, 'T', 2) ORDER BY run_at) AS ticks FROM idem.jobs GROUP BY 1 ORDER BY 1;
TABLE status;

--
-- T5: declare again.  Three ticks are due, so that it shows whether they stay.
--
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('c', 'q', '0 * * * *', payload => '1', starts_at => '2049-01-01');
SELECT idem_schedule('e', 'q', every => '1 h', payload => '1', starts_at => '2049-12-31 23:30');
SELECT idem_schedule('n', 'q', every => '1 day') IS NOT NULL AS declared;
SELECT next_tick AS n_next, starts_at AS n_start FROM idem.schedules WHERE name = 'n' \gset
CALL set_clock('2050-01-01 03:45');
-- as it is
SELECT idem_schedule('c', 'q', '0 * * * *', payload => '1', starts_at => '2049-01-01');
SELECT idem_schedule('e', 'q', every => '1 h', payload => '1', starts_at => '2049-12-31 23:30');
-- without a start, an interval keeps the start that it has
SELECT idem_schedule('e', 'q', every => '60 min');
SELECT idem_schedule('n', 'q', every => '24 h') = :'n_next' AS stays;
SELECT starts_at = :'n_start' AS stays, every FROM idem.schedules WHERE name = 'n';
-- other arguments change, the ticks stay
SELECT idem_schedule('c', 'q2', '0 * * * *', payload => '2', missed => 'all', priority => 7, starts_at => '2049-01-01', ends_at => '2051-01-01');
SELECT idem_schedule('e', 'q2', every => '1 h', payload => '2', missed => 'all', priority => 7, ends_at => '2051-01-01');
SELECT * FROM idem.schedules WHERE name IN ('c', 'e') ORDER BY name \gx
-- an argument that is left out has its default again
SELECT idem_schedule('c', 'q', '0 * * * *', starts_at => '2049-01-01');
SELECT payload, missed, priority, ends_at FROM idem.schedules WHERE name = 'c';
-- the ticks begin anew with the first one from now on: each of these changes alone
BEGIN;
SELECT idem_schedule('c', 'q', '0-59/60 * * * *', starts_at => '2049-01-01');
ROLLBACK;
BEGIN;
SELECT idem_schedule('c', 'q', '*/10 * * * *', starts_at => '2049-01-01');
ROLLBACK;
BEGIN;
SELECT idem_schedule('c', 'q', '0 * * * *', starts_at => '2049-01-01', time_zone => 'Asia/Kolkata');
ROLLBACK;
BEGIN;
SELECT idem_schedule('c', 'q', '0 * * * *', starts_at => '2049-01-02');
ROLLBACK;
BEGIN;
SELECT idem_schedule('c', 'q', '0 * * * *');
ROLLBACK;
BEGIN;
SELECT idem_schedule('c', 'q', '0 * * * *', starts_at => '2050-01-02 00:30');
ROLLBACK;
BEGIN;
SELECT idem_schedule('c', 'q', every => '1 h', starts_at => '2049-01-01');
ROLLBACK;
BEGIN;
SELECT idem_schedule('e', 'q', every => '2 h', starts_at => '2049-12-31 23:30');
ROLLBACK;
BEGIN;
SELECT idem_schedule('e', 'q', every => '1 h', starts_at => '2049-12-31 23:40');
ROLLBACK;
BEGIN;
SELECT idem_schedule('e', 'q', '0 * * * *');
ROLLBACK;
-- a new interval without a start starts now
BEGIN;
SELECT idem_schedule('e', 'q', every => '2 h') IS NOT NULL AS declared;
SELECT next_tick = starts_at + interval '2 h' AS first_tick, starts_at >= '2050-01-01 03:45' AS now FROM idem.schedules WHERE name = 'e';
ROLLBACK;
-- the history of a schedule that changes stays
SELECT idem_tick();
SELECT idem_schedule('c', 'q', '30 * * * *');
TABLE status;

-- an end before the next tick, and later again: the ticks go on from now on
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('c', 'q', '0 * * * *', ends_at => '2050-01-01 02:30');
CALL set_clock('2050-01-01 05:00');
-- what was due before the end still is
SELECT idem_schedule('c', 'q', '0 * * * *', ends_at => '2050-01-01 02:30', missed => 'all');
SELECT idem_tick();
TABLE status;
-- declared again as it is, it stays ended
SELECT idem_schedule('c', 'q', '0 * * * *', ends_at => '2050-01-01 02:30');
SELECT idem_tick();
SELECT idem_schedule('c', 'q', '0 * * * *', ends_at => '2050-01-01 08:00');
TABLE status;
SELECT idem_schedule('c', 'q', '0 * * * *', ends_at => '2050-01-01 05:59');
SELECT state FROM status;
SELECT idem_schedule('c', 'q', '0 * * * *');
TABLE ticked;

--
-- Pause, resume, remove
--
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('c', 'q', '0 * * * *', missed => 'all');
SELECT idem_schedule('e', 'q', every => '1 h', starts_at => '2050-01-01 00:30', missed => 'all');
SELECT idem_schedule_pause('c'), idem_schedule_pause('e');
SELECT idem_schedule_pause('c');
TABLE status;
SELECT paused_at - idem_clock() BETWEEN '-1 min' AND '0' AS now FROM idem.schedules WHERE name = 'c';
CALL set_clock('2050-01-01 05:45');
SELECT idem_tick();
-- declared again, it stays paused; even if its ticks begin anew
SELECT idem_schedule('c', 'q', '0 * * * *', missed => 'all') IS NULL AS paused;
SELECT idem_schedule('c', 'q', '15 * * * *', missed => 'all') IS NULL AS paused;
TABLE status;
SELECT idem_schedule_resume('c'), idem_schedule_resume('e');
SELECT idem_schedule_resume('c');
-- the ticks of the pause are neither jobs nor missed
TABLE status;
SELECT idem_tick();
CALL set_clock('2050-01-01 06:30');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- a tick that is due when the schedule is paused is not there afterwards
CALL set_clock('2050-01-01 07:35');
SELECT name, next_tick < idem_clock() AS due FROM status;
SELECT idem_schedule_pause('c'), idem_schedule_resume('c');
SELECT idem_tick();
SELECT key FROM ticked WHERE run_at > '2050-01-01 06:59';
TABLE status;
-- resume of a schedule that ticks changes nothing, and the tick that is due stays
CALL set_clock('2050-01-01 08:45');
SELECT idem_schedule_resume('c'), idem_schedule_resume('e');
TABLE status;
-- a schedule that has ended
SELECT idem_schedule('c', 'q', '15 * * * *', ends_at => '2050-01-01 08:00');
SELECT idem_schedule_resume('c'), idem_schedule_pause('c');
SELECT state FROM status WHERE name = 'c';
SELECT idem_schedule_resume('c');
SELECT state FROM status WHERE name = 'c';
-- remove: its jobs stay
SELECT idem_unschedule('c'), idem_unschedule('e');
SELECT idem_unschedule('c');
TABLE status;
SELECT count(*) FROM ticked;
SELECT idem_schedule_pause('c');
SELECT idem_schedule_resume('c');
-- declared once more it is new
SELECT idem_schedule('c', 'q', '0 * * * *');
TABLE status;
-- several functions in one transaction
BEGIN;
SELECT idem_schedule('d', 'q', '@hourly'), idem_schedule_pause('d'), idem_schedule_resume('d'), idem_schedule('d', 'q', '@daily'), idem_unschedule('d'), idem_schedule('d', 'q', '@weekly');
COMMIT;
SELECT name, next_tick FROM status;

--
-- T6: the clock goes back
--
CALL anew();
CALL set_clock('2050-03-01 00:00');
SELECT idem_schedule('c', 'q', '0 * * * *');
SELECT idem_schedule('e', 'q', every => '1 h', starts_at => '2050-01-01 00:30');
SELECT idem_schedule('none', 'q', '0 * * * *');
SELECT idem_schedule_pause('none');
CALL set_clock('2050-03-01 01:30');
SELECT idem_tick();
CALL set_clock('2050-02-01 00:00');
-- no tick comes twice
SELECT idem_tick();
SELECT idem_schedule('c', 'q', '0 * * * *');
TABLE status;
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'schedules' \gx
SELECT fix FROM idem_doctor() WHERE "check" = 'schedules' \gset
:fix
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'schedules' \gx
SELECT fix FROM idem_doctor() WHERE "check" = 'schedules' \gset
:fix
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'schedules' \gx
SELECT idem_schedule_resume('c');
TABLE status;
-- a tick comes a second time: its job waits, and absorbs it.  That is no new job.
CALL set_clock('2050-03-01 01:00');
SELECT key FROM ticked ORDER BY key;
SELECT idem_tick();
SELECT key FROM ticked ORDER BY key;
TABLE status;
-- H1: schedules that are late
CALL set_clock('2050-03-02 01:00');
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'schedules' \gx
SELECT fix FROM idem_doctor() WHERE "check" = 'schedules' \gset
:fix
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'schedules' \gx
CALL anew();
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'schedules' \gx

-- H1: a database without slots refuses the jobs of its schedules, and the doctor says so at once
CALL set_clock('2050-03-02 01:00');
SELECT idem_shard_set('{[0,1024)}');
SELECT idem_schedule('nightly', 'q', '0 3 * * *', payload => '{"a": "b''c"}', time_zone => 'Europe/Berlin', missed => 'all', ends_at => '2051-01-01');
SELECT idem_schedule('it''s \ due', 'q', every => '10 min', priority => 5, starts_at => '2050-01-01');
SELECT idem_schedule('s ' || n, 'q', every => '1 h') IS NOT NULL AS ok FROM generate_series(1, 5) AS n;
SELECT idem_schedule_pause('s 5');
SELECT idem_schedule('ended', 'q', every => '1 h', ends_at => '2050-01-01');
SELECT status, detail FROM idem_doctor() WHERE "check" = 'schedules';
SELECT idem_shard_give('{[0,1024)}', '11111111-1111-4111-8111-111111111111') IS NOT NULL AS given;
CALL set_clock('2050-03-02 01:10:30');
SELECT state, message FROM fails('SELECT idem_tick()');
CREATE TABLE declared AS TABLE idem.schedules;
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'schedules' \gx
SELECT fix FROM idem_doctor() WHERE "check" = 'schedules' \gset
:fix
-- it does not matter whether they are late
CALL set_clock('2050-04-01 01:00');
SELECT status, left(detail, 30) AS detail FROM idem_doctor() WHERE "check" = 'schedules';
CALL set_clock('2050-03-02 01:00');
-- the commands declare the same schedules
CREATE TABLE commands (elsewhere text, here text);
SELECT format('INSERT INTO commands %s', :'fix') AS command \gset
:command
SELECT here FROM commands \gexec
SELECT status, detail FROM idem_doctor() WHERE "check" = 'schedules';
SELECT elsewhere FROM commands \gexec
SELECT count(*) AS same FROM idem.schedules AS s JOIN declared AS d
	ON (s.name, s.queue, s.cron, s.every, s.payload, s.time_zone, s.missed, s.priority, s.ends_at, s.next_tick)
	   IS NOT DISTINCT FROM (d.name, d.queue, d.cron, d.every, d.payload, d.time_zone, d.missed, d.priority, d.ends_at, d.next_tick);
DROP TABLE declared, commands;
CALL anew();
DROP VIEW ticked, status;
RESET ROLE;
DROP ROLE idem_schedule_owner;
