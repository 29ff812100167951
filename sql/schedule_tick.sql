--
-- idem_tick(): duplicates of a tick (T1), transactions, schedules that fail (T7)
--
\a\pset footer off
\set VERBOSITY terse
SET TimeZone = 'UTC';
SET DateStyle = 'ISO';
SET IntervalStyle = 'postgres';
CALL anew();
CREATE VIEW ticked AS SELECT job_id, queue, key, run_at, priority, payload FROM idem.jobs ORDER BY job_id;
CREATE VIEW status AS SELECT name, state, next_tick, last_tick, last_job, missed_ticks AS missed FROM idem.schedule_status ORDER BY name;

--
-- T1: a job has the key of the tick already.  Each queue declares that a duplicate is an
-- error; a tick is absorbed nevertheless, and adds no follow-up job.
--
CREATE PROCEDURE make_duplicate(q text, state text) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_enqueue(q, '"old"', q || '@2050-01-01T01:00:00Z', priority => 5);
	IF state <> 'waits' THEN
		CREATE TEMP TABLE fetched ON COMMIT DROP AS SELECT job_id, token FROM idem_fetch(q, lease => '1 day');
	END IF;
	IF state = 'done' THEN
		PERFORM idem_complete(job_id, token) FROM fetched;
	END IF;
	PERFORM idem_schedule(q, q, '0 * * * *', payload => '"new"', priority => 3);
	COMMIT;
END $$;
CALL set_clock('2050-01-01 00:00');
SELECT idem_queue_set('executing ' || s, dedup => 'until_executing', on_duplicate => 'error'),
	   idem_queue_set('executed ' || s, dedup => 'until_executed', on_duplicate => 'error'),
	   idem_queue_set('rerun ' || s, dedup => 'until_executed', on_duplicate => 'error', if_running => 'rerun'),
	   idem_queue_set('expired ' || s, dedup => 'until_expired', on_duplicate => 'error', key_ttl => '1 day')
  FROM unnest(ARRAY['waits', 'runs', 'done']) AS s;
DO $$
DECLARE
	q text;
BEGIN
	FOR q IN SELECT queue FROM idem.queues ORDER BY queue LOOP
		CALL make_duplicate(q, split_part(q, ' ', 2));
	END LOOP;
END $$;
SELECT max(job_id) AS last_old FROM idem_enqueue('q') \gset
CALL set_clock('2050-01-01 01:00');
SELECT idem_tick();
SELECT s.name, CASE WHEN s.last_job > :last_old THEN 'new' ELSE 'old' END AS last_job, s.last_tick, count(j) AS jobs,
	   array_agg(j.payload ORDER BY j.job_id) FILTER (WHERE j.job_id IS NOT NULL) AS payloads,
	   array_agg(j.priority ORDER BY j.job_id) FILTER (WHERE j.job_id IS NOT NULL) AS priorities
  FROM idem.schedules AS s LEFT JOIN idem.jobs AS j ON j.queue = s.queue
 GROUP BY s.name, s.last_job, s.last_tick ORDER BY s.name;
-- the next tick has another key
CALL set_clock('2050-01-01 02:00');
SELECT idem_tick();
-- replace and debounce: neither the payload nor the time changes
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_queue_set('replace', on_duplicate => 'replace'), idem_queue_set('debounce', on_duplicate => 'debounce', debounce_max => '2 h'), idem_queue_set('ttl', dedup => 'until_expired');
CALL make_duplicate('replace', 'waits');
SELECT count(*) FROM idem_enqueue('debounce', '"old"', 'debounce@2050-01-01T01:00:00Z', delay => '1 h');
SELECT idem_schedule('debounce', 'debounce', '0 * * * *', payload => '"new"');
-- until_expired without a time that a caller could pass
SELECT idem_schedule('ttl', 'ttl', '0 * * * *');
CALL set_clock('2050-01-01 01:00:30');
SELECT idem_tick();
SELECT job_id, key, run_at >= '2050-01-01 01:01' AS postponed, payload FROM ticked;
-- what the queue declares otherwise applies to the jobs: attempts, and how long they are kept
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_queue_set('q', dedup => 'until_expired', key_ttl => '1 h', max_attempts => 2, keep => '1 h', lease => '1 min');
SELECT idem_schedule('a', 'q', '0 * * * *');
CALL set_clock('2050-01-01 01:00');
SELECT idem_tick();
SELECT job_id, attempt, max_attempts FROM idem_fetch('q');
SELECT idem_complete(job_id, token, '"done"') FROM idem.jobs;
SELECT state, key, result FROM idem_job(1);
SELECT outcome, job_id, result FROM idem_enqueue('q', key => 'a@2050-01-01T01:00:00Z');

-- a queue that is paused gets the jobs, and gives none out
CALL anew();
CALL set_clock('2050-01-01 00:00');
SELECT idem_queue_set('q');
SELECT idem_pause('q'), idem_schedule('a', 'q', '0 * * * *');
CALL set_clock('2050-01-01 01:00');
SELECT idem_tick();
SELECT count(*) FROM idem_fetch('q', 10, lease => '1 min');
SELECT idem_resume('q');
SELECT key FROM idem_fetch('q', 10, lease => '1 min');

--
-- The tick is part of the caller's transaction
--
CREATE PROCEDURE three() LANGUAGE plpgsql AS $$
BEGIN
	CALL anew();
	CALL set_clock('2050-01-01 00:00');
	PERFORM idem_schedule('a', 'q', '0 * * * *'), idem_schedule('b', 'q', every => '1 h', starts_at => '2050-01-01 01:00'), idem_schedule('c', 'q', '@yearly');
	CALL set_clock('2050-01-01 01:00');
END $$;
CALL three();
BEGIN;
SELECT idem_tick();
SELECT count(*) FROM ticked;
ROLLBACK;
SELECT count(*) FROM ticked;
TABLE status;
BEGIN;
SELECT outcome FROM idem_enqueue('q', key => 'other');
SAVEPOINT s;
SELECT idem_tick();
SELECT idem_tick();
ROLLBACK TO s;
SELECT idem_schedule_pause('b');
SELECT idem_tick();
COMMIT;
SELECT key FROM ticked;
TABLE status;
-- several ticks in one transaction, also of a schedule that it has declared
CALL three();
BEGIN;
SELECT idem_tick();
SELECT idem_schedule('d', 'q', '30 * * * *');
CALL set_clock('2050-01-01 02:00');
SELECT idem_tick();
SELECT idem_unschedule('b');
CALL set_clock('2050-01-01 03:00');
SELECT idem_tick();
COMMIT;
SELECT key FROM ticked ORDER BY key;
-- with older snapshots: the latest row counts
CALL three();
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM idem.jobs;
SELECT idem_tick();
SELECT idem_tick();
SELECT key FROM ticked;
SELECT idem_schedule('a', 'q', '0 * * * *', payload => '1'), idem_schedule_pause('b'), idem_unschedule('c');
COMMIT;
TABLE status;
CALL three();
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) FROM idem.jobs;
SELECT idem_tick();
SELECT idem_tick();
SELECT key FROM ticked;
SELECT idem_schedule('a', 'q', '0 * * * *', payload => '1'), idem_schedule_pause('b'), idem_unschedule('c'), idem_unschedule('d');
COMMIT;
TABLE status;
-- in a function that catches an error
CALL three();
DO $$
BEGIN
	PERFORM idem_tick();
	PERFORM 1 / 0;
EXCEPTION WHEN division_by_zero THEN
	NULL;
END $$;
SELECT count(*) FROM ticked;
SELECT idem_tick();
-- in a transaction that only reads
BEGIN READ ONLY;
SELECT idem_tick();
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_schedule('a', 'q', '@daily');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_unschedule('a');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_schedule_pause('a');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_schedule_resume('a');
ROLLBACK;
BEGIN READ ONLY;
SELECT count(*) FROM idem.schedule_status;
ROLLBACK;

--
-- T7: a schedule that fails does not hold up the others.  A superuser can break a schedule; so
-- can another version of the time zones, and a row from a restore.
--
CALL anew();
CALL set_clock('2050-01-01 00:00');
CREATE TABLE damage (name text, change text, is_cron boolean);
INSERT INTO damage VALUES
	('zone', $$ time_zone = 'Mars/Olympus' $$, true),
	('cron', $$ cron = '0 * * *' $$, true),
	('neither', $$ cron = NULL $$, true),
	('both', $$ every = '1 h' $$, true),
	('queue', $$ queue = '' $$, true),
	('long queue', $$ queue = repeat('x', 256) $$, false),
	('missed', $$ missed = 'never' $$, true),
	('next', $$ next_tick = '-infinity' $$, true),
	('next every', $$ next_tick = '-infinity' $$, false),
	('zero', $$ every = '0' $$, false),
	('short', $$ every = '999999 us' $$, false),
	('negative', $$ every = '-1 h' $$, false),
	('long', $$ every = '1000 years' $$, false),
	('none', $$ every = NULL $$, false),
	('no start', $$ starts_at = NULL $$, false),
	('early start', $$ starts_at = '-infinity' $$, false),
	('late start', $$ starts_at = 'infinity' $$, false);
SELECT count(CASE WHEN is_cron THEN idem_schedule(name, 'q', '0 * * * *', missed => 'all') ELSE idem_schedule(name, 'q', every => '1 h', starts_at => '2050-01-01 00:00', missed => 'all') END) FROM damage;
SELECT idem_schedule('a first', 'q', '30 * * * *'), idem_schedule('z last', 'q', '0 * * * *');
DO $$
DECLARE
	d damage;
BEGIN
	FOR d IN TABLE damage LOOP
		EXECUTE format('UPDATE idem.schedules SET %s WHERE name = %L', d.change, d.name);
	END LOOP;
END $$;
CREATE TABLE before AS TABLE idem.schedules;
CALL set_clock('2050-01-01 01:00:30');
SELECT idem_tick();
SELECT key FROM ticked;
-- the schedules that failed are as they were
SELECT b.name FROM before AS b LEFT JOIN idem.schedules AS s ON s = b WHERE s IS NULL ORDER BY 1;
-- in full
\set VERBOSITY default
BEGIN ISOLATION LEVEL SERIALIZABLE;
DELETE FROM idem.schedules WHERE name NOT IN ('zone', 'z last');
UPDATE idem.schedules SET next_tick = '2050-01-01 01:00' WHERE name = 'z last';
SELECT idem_tick();
COMMIT;
\set VERBOSITY terse
-- the doctor finds them
CALL set_clock('2050-01-01 01:02');
SELECT status, detail FROM idem_doctor() WHERE "check" = 'schedules';
INSERT INTO idem.schedules SELECT * FROM before AS b WHERE b.name NOT IN (SELECT name FROM idem.schedules);
-- they can be paused, and declared again, which repairs them
SELECT name, idem_schedule_pause(name) AS paused FROM damage ORDER BY name;
SELECT count(CASE WHEN is_cron THEN idem_schedule(name, 'q', '0 * * * *') ELSE idem_schedule(name, 'q', every => '1 h') END) FROM damage;
SELECT name, idem_schedule_resume(name) AS resumed FROM damage ORDER BY name;
CALL set_clock('2050-01-01 03:00:30');
SELECT idem_tick();
SELECT name, state FROM status WHERE state <> 'active' OR last_tick IS NULL;
-- also without the pause
DO $$
DECLARE
	d damage;
BEGIN
	FOR d IN TABLE damage LOOP
		EXECUTE format('UPDATE idem.schedules SET %s WHERE name = %L', d.change, d.name);
		IF d.is_cron THEN
			PERFORM idem_schedule(d.name, 'q', '0 * * * *');
		ELSE
			PERFORM idem_schedule(d.name, 'q', every => '1 h');
		END IF;
	END LOOP;
END $$;
CALL set_clock('2050-01-01 05:00:30');
SELECT idem_tick();
SELECT name, state FROM status WHERE state <> 'active' OR last_tick < '2050-01-01 04:00';
-- and removed
UPDATE idem.schedules SET cron = 'x', every = '0', time_zone = 'x', missed = 'x';
SELECT bool_and(idem_unschedule(name)) FROM damage;

DROP TABLE damage, before;
DROP PROCEDURE make_duplicate, three;
DROP VIEW ticked, status;
CALL anew();
