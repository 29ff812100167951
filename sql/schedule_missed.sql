--
-- Ticks that were missed: skip, once, all (T4)
--
\a\pset footer off
\set VERBOSITY terse
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
SET IntervalStyle = 'postgres';
CREATE VIEW status AS SELECT name, state, next_tick, last_tick, missed_ticks AS missed FROM idem.schedule_status ORDER BY name;
CREATE VIEW ticked AS
SELECT split_part(key, '@', 1) AS name, count(*) AS jobs, count(DISTINCT key) AS keys, min(run_at) AS first, max(run_at) AS last,
	   -- jobs are enqueued in the order of their ticks
	   array_agg(run_at ORDER BY job_id) = array_agg(run_at ORDER BY run_at) AS in_order
  FROM idem.jobs GROUP BY 1 ORDER BY 1;
-- three schedules that differ only in what becomes of missed ticks
CREATE PROCEDURE declare(cron text, every interval, starts_at timestamptz DEFAULT NULL, ends_at timestamptz DEFAULT NULL) LANGUAGE sql AS $$
	SELECT idem_schedule(m, 'q', cron, every, missed => m, starts_at => declare.starts_at, ends_at => declare.ends_at)
	  FROM unnest(ARRAY['skip', 'once', 'all']) AS m;
$$;

-- late, but not missed: each has its job
CALL anew();
CALL set_clock('2050-01-01 00:00');
CALL declare('0 * * * *', NULL);
CALL set_clock('2050-01-01 01:04:30');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- after five minutes it is missed: no job with skip
CALL set_clock('2050-01-01 02:05:01');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- two ticks are due: the first one is missed
CALL set_clock('2050-01-01 04:02');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- many are due, and the last one is missed, too
CALL set_clock('2050-01-02 00:30');
SELECT idem_tick();
TABLE ticked;
TABLE status;
SELECT idem_tick();
-- a minute is shorter than five: an older tick is missed although it is not five minutes old
CALL anew();
CALL set_clock('2050-01-01 00:00:30');
CALL declare('* * * * *', NULL);
CALL set_clock('2050-01-01 00:03:15');
SELECT idem_tick();
TABLE ticked;
TABLE status;

-- all: the newest 1000, and the rest counted.  The end makes the number exact: 1000 ticks
CALL anew();
CALL set_clock('2049-12-31 23:50');
CALL declare(NULL, '1 s', '2050-01-01 00:00:01', '2050-01-01 00:16:40');
CALL set_clock('2050-01-01 00:20');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- 1001
CALL anew();
CALL set_clock('2049-12-31 23:50');
CALL declare(NULL, '1 s', '2050-01-01 00:00:01', '2050-01-01 00:16:41');
CALL set_clock('2050-01-01 00:20');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- 999, of a cron expression
CALL anew();
CALL set_clock('2050-01-01 00:00:30');
CALL declare('* * * * *', NULL, ends_at => '2050-01-01 16:39');
CALL set_clock('2050-01-02 00:00');
SELECT idem_tick();
TABLE ticked;
TABLE status;
-- 2345
CALL anew();
CALL set_clock('2050-01-01 00:00:30');
CALL declare('* * * * *', NULL, ends_at => '2050-01-02 15:05');
CALL set_clock('2050-01-03 00:00');
SELECT idem_tick();
TABLE ticked;
TABLE status;

-- an interval of a second, for six thousand years: the ticks in between are counted, not walked over
CALL anew();
CALL set_clock('2050-01-01 00:00');
CALL declare(NULL, '1 s', '4000-01-01 00:00 BC', '2050-01-01 01:00:00');
UPDATE idem.schedules SET next_tick = starts_at;
CALL set_clock('2050-01-01 01:04');
SET statement_timeout = '60 s';
SELECT idem_tick();
RESET statement_timeout;
TABLE ticked;
TABLE status;
SELECT extract(epoch FROM timestamptz '2050-01-01 01:00' - '4000-01-01 BC')::bigint AS but_one;
-- and goes on, from the newest tick
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('odd', 'q', every => '1.000001 s', starts_at => '1950-01-01 00:00:00.5') IS NOT NULL AS declared;
CALL set_clock('2050-02-01 00:00');
SELECT idem_tick();
SELECT (extract(epoch FROM next_tick - starts_at) * 1000000)::bigint % 1000001 AS rest, next_tick - last_tick AS every, next_tick > idem_clock() - interval '1 min' AS is_next FROM idem.schedules;
-- a cron expression: minutes of eleven years
CALL anew();
CALL set_clock('2050-01-01 00:00:30');
CALL declare('* * * * *', NULL, ends_at => '2061-01-01 00:00');
CALL set_clock('2061-01-01 00:10');
SELECT idem_tick();
TABLE ticked;
TABLE status;
SELECT extract(epoch FROM timestamptz '2061-01-01' - '2050-01-01')::bigint / 60 - 1 AS but_one;

-- the numbers add up over several calls; a change from one word to another applies to what is due
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_schedule('a', 'q', '0 * * * *', missed => 'skip');
CALL set_clock('2050-01-01 03:30');
SELECT idem_tick();
CALL set_clock('2050-01-01 06:30');
SELECT idem_schedule('a', 'q', '0 * * * *', missed => 'once');
SELECT idem_tick();
CALL set_clock('2050-01-01 09:30');
SELECT idem_schedule('a', 'q', '0 * * * *', missed => 'all');
SELECT idem_tick();
TABLE status;
SELECT jobs FROM ticked;
-- a tick that is undone is not counted
CALL set_clock('2050-01-01 12:30');
SELECT idem_schedule('a', 'q', '0 * * * *', missed => 'skip');
BEGIN;
SELECT idem_tick();
SELECT missed FROM status;
ROLLBACK;
SELECT missed FROM status;
CALL anew();
DROP PROCEDURE declare;
DROP VIEW status, ticked;
