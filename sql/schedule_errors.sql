--
-- Every error of the functions about schedules has a SQLSTATE, a detail and a hint, and
-- changes nothing (T8).  Errors in cron expressions are in sql/cron.sql.
--
\a\pset footer off
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
CALL anew();
CALL set_clock('2050-01-01 00:00');
CREATE TABLE bad (n serial, call text);

-- the name
INSERT INTO bad (call) VALUES
	($$idem_schedule(NULL, 'q', '@daily')$$),
	($$idem_schedule('', 'q', '@daily')$$),
	($$idem_schedule(repeat('x', 256), 'q', '@daily')$$),
	($$idem_schedule(repeat(U&'\20ac', 86), 'q', '@daily')$$),
	($$idem_unschedule(NULL)$$),
	($$idem_unschedule('')$$),
	($$idem_unschedule(repeat('x', 256))$$),
	($$idem_schedule_pause(NULL)$$),
	($$idem_schedule_pause('')$$),
	($$idem_schedule_pause(repeat('x', 256))$$),
	($$idem_schedule_pause('unknown')$$),
	($$idem_schedule_resume(NULL)$$),
	($$idem_schedule_resume('')$$),
	($$idem_schedule_resume(repeat('x', 256))$$),
	($$idem_schedule_resume('unknown')$$);
-- the queue
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', NULL, '@daily')$$),
	($$idem_schedule('alpha', '', '@daily')$$),
	($$idem_schedule('alpha', repeat('x', 256), '@daily')$$);
-- neither or both
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', 'q')$$),
	($$idem_schedule('alpha', 'q', NULL, NULL, '1')$$),
	($$idem_schedule('alpha', 'q', '@daily', '1 h')$$),
	($$idem_schedule('alpha', 'q', 'nonsense', '1 h')$$);
-- the interval
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', 'q', every => '0')$$),
	($$idem_schedule('alpha', 'q', every => '-1 h')$$),
	($$idem_schedule('alpha', 'q', every => '999999 us')$$),
	($$idem_schedule('alpha', 'q', every => '1 us')$$),
	($$idem_schedule('alpha', 'q', every => '1 month')$$),
	($$idem_schedule('alpha', 'q', every => '1 year')$$),
	($$idem_schedule('alpha', 'q', every => '1 month -30 days 1 h')$$),
	($$idem_schedule('alpha', 'q', every => '36001 days')$$),
	($$idem_schedule('alpha', 'q', every => '2147483647 days')$$),
	($$idem_schedule('alpha', 'q', every => '1 day -24 h')$$);
-- the time zone
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', 'q', '@daily', time_zone => '')$$),
	($$idem_schedule('alpha', 'q', '@daily', time_zone => 'Mars/Olympus')$$),
	($$idem_schedule('alpha', 'q', '@daily', time_zone => 'UTC ')$$),
	($$idem_schedule('alpha', 'q', '@daily', time_zone => '../Europe/Berlin')$$),
	($$idem_schedule('alpha', 'q', '@daily', time_zone => repeat('x', 100000))$$),
	($$idem_schedule('alpha', 'q', every => '1 h', time_zone => 'Europe/Berlin')$$),
	($$idem_schedule('alpha', 'q', every => '1 h', time_zone => 'Etc/UTC')$$),
	($$idem_schedule('alpha', 'q', every => '1 h', time_zone => 'Mars/Olympus')$$);
-- what becomes of missed ticks
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', 'q', '@daily', missed => '')$$),
	($$idem_schedule('alpha', 'q', '@daily', missed => 'latest')$$),
	($$idem_schedule('alpha', 'q', '@daily', missed => 'Once')$$),
	($$idem_schedule('alpha', 'q', '@daily', missed => 'skip ')$$);
-- start and end
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', 'q', '@daily', starts_at => 'infinity')$$),
	($$idem_schedule('alpha', 'q', '@daily', starts_at => '-infinity')$$),
	($$idem_schedule('alpha', 'q', '@daily', ends_at => 'infinity')$$),
	($$idem_schedule('alpha', 'q', '@daily', ends_at => '-infinity')$$),
	($$idem_schedule('alpha', 'q', every => '1 h', starts_at => 'infinity')$$),
	($$idem_schedule('alpha', 'q', every => '1 h', ends_at => 'infinity')$$),
	($$idem_schedule('alpha', 'q', '@daily', starts_at => '2050-01-02', ends_at => '2050-01-01 23:59:59.999999')$$),
	($$idem_schedule('alpha', 'q', every => '1 h', starts_at => '2050-01-02', ends_at => '2050-01-01')$$);
-- the payload
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', 'q', '@daily', payload => to_jsonb(repeat('x', 1048577)))$$);
-- without any tick
INSERT INTO bad (call) VALUES
	($$idem_schedule('alpha', 'q', '0 0 31 2 *')$$),
	($$idem_schedule('alpha', 'q', '0 0 30 feb *', time_zone => 'Europe/Berlin')$$),
	($$idem_schedule('alpha', 'q', '0 4 * * *', starts_at => '2050-01-01 05:00', ends_at => '2050-01-02 03:00')$$),
	($$idem_schedule('alpha', 'q', '0 4 * * *', starts_at => '2040-01-01 05:00', ends_at => '2040-01-02 03:00')$$);

SELECT idem_schedule('alpha', 'beta', '0 4 * * *', payload => '"secret"', starts_at => '2049-01-01');
SELECT idem_schedule('every', 'beta', every => '1 h', payload => '"secret"', starts_at => '2049-01-01');
CREATE TABLE schedules_before AS SELECT *, ctid AS place FROM idem.schedules;
SELECT call, state FROM bad, LATERAL fails('SELECT ' || call) ORDER BY n;
-- detail and hint are sentences, and contain no payload
SELECT call, message, detail, hint FROM bad, LATERAL fails('SELECT ' || call)
 WHERE detail IS NULL OR hint IS NULL OR detail !~ '^[A-Z"].*\.$' OR hint !~ '^[A-Z"].*\.$' OR message !~ '^[a-z"].*[^.]$' OR concat(message, detail, hint) ~ '\y(secret|alpha|beta)\y' ORDER BY n;
-- nothing has changed
SELECT (SELECT count(*) FROM idem.schedules) AS schedules, (SELECT count(*) FROM idem.jobs) AS jobs,
	   (SELECT count(*) FROM (SELECT *, ctid FROM idem.schedules EXCEPT TABLE schedules_before) AS d) AS changed;

-- in full
\x on
SELECT * FROM fails($$ SELECT idem_schedule(NULL, 'q', '@daily') $$);
SELECT * FROM fails($$ SELECT idem_schedule('', 'q', '@daily') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', '1 h') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', every => '0') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', every => '999 ms') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', every => '1 month') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', time_zone => 'Mars/Olympus') $$);
SELECT message, detail FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', time_zone => repeat('x', 100000)) $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', every => '1 h', time_zone => 'Europe/Berlin') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', missed => 'latest') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', starts_at => 'infinity') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', ends_at => '-infinity') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', starts_at => '2050-01-02', ends_at => '2050-01-01') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', payload => to_jsonb(repeat('x', 1048577))) $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '0 0 31 2 *') $$);
SELECT * FROM fails($$ SELECT idem_schedule('a', 'q', '0 4 * * *', starts_at => '2050-01-01 05:00', ends_at => '2050-01-02 03:00') $$);
SELECT * FROM fails($$ SELECT idem_schedule_pause('unknown') $$);
\x off
-- idem.max_result_size limits the payload
SET idem.max_result_size = 10;
SELECT state FROM fails($$ SELECT idem_schedule('a', 'q', '@daily', payload => '"too long"') $$);
RESET idem.max_result_size;
-- an infinite interval, possible since 17
SELECT CASE WHEN current_setting('server_version_num')::int < 170000 THEN '22023' ELSE (fails($$ SELECT idem_schedule('a', 'q', every => 'infinity') $$)).state END AS infinite;
-- the longest interval, the shortest, a payload of null, and a start and an end at the same time are right
SELECT idem_schedule('a', 'q', every => '36000 days', starts_at => '2050-01-02'), idem_schedule('b', 'q', every => '1 s', starts_at => '2050-01-02'),
	   idem_schedule('c', 'q', every => '1 h', payload => NULL, starts_at => '2050-01-02', ends_at => '2050-01-02');
-- the last times that a timestamp can have
SELECT idem_schedule('d', 'q', every => '36000 days', starts_at => '294276-12-31 23:59:59', ends_at => '294276-12-31 23:59:59.999999');
SELECT idem_schedule('e', 'q', '* * * * *', starts_at => '294276-12-31 23:58:30');
UPDATE idem.schedules SET next_tick = '2050-01-01' WHERE name IN ('d', 'e');
SELECT idem_tick();
SELECT name, next_tick FROM idem.schedules WHERE name IN ('d', 'e') ORDER BY name;
-- an end in the past is no error: a program can declare its schedule at each start
SELECT idem_schedule('f', 'q', '0 4 * * *', ends_at => '2049-01-01'), idem_schedule('g', 'q', every => '1 h', starts_at => '2049-01-01', ends_at => '2049-01-01 00:30');
SELECT name, state FROM idem.schedule_status WHERE name IN ('f', 'g') ORDER BY name;
DROP TABLE bad, schedules_before;
CALL anew();

--
-- T10: too many schedules
--
CALL anew();
INSERT INTO idem.schedules (name, queue, owner, cron, time_zone, missed, priority, missed_ticks)
	SELECT 'schedule ' || i, 'q', 'pg_monitor', '@daily', 'UTC', 'once', 0, 0 FROM generate_series(1, 9999) AS i;
SELECT idem_schedule('the last', 'q', '@daily') IS NOT NULL AS declared;
SELECT state, message, detail, hint FROM fails($$ SELECT idem_schedule('one more', 'q', '@daily') $$) \gx
-- a change is none
SELECT idem_schedule('the last', 'q2', '@hourly') IS NOT NULL AS declared, idem_schedule_pause('schedule 7');
SELECT idem_unschedule('schedule 1'), idem_schedule('one more', 'q', '@daily') IS NOT NULL AS declared;
SELECT (fails($$ SELECT idem_schedule('schedule 1', 'q', '@daily') $$)).state;
SELECT count(*) FROM idem.schedules;
CALL anew();
