--
-- Tables that a subscription writes: cleanup skips every sweep that would write
-- one of them (W1), functions that write one are refused (K13), and idem_doctor()
-- reports it (H1).  The subscription never connects, and the test sets its tables; a
-- real one is in test/t/125_blue_green.pl.
--
\a\pset footer off
\set VERBOSITY sqlstate
SET client_min_messages = error;
CREATE SUBSCRIPTION made_up CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false, slot_name = NONE);
CREATE PROCEDURE subscribe(VARIADIC tables regclass[] DEFAULT '{}') LANGUAGE sql AS $$
	DELETE FROM pg_subscription_rel;
	INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate, srsublsn)
	SELECT s.oid, t, 'r', '0/1' FROM pg_subscription AS s, unnest(tables) AS t WHERE s.subname = 'made_up';
$$;
-- a row of each kind that has expired
CREATE PROCEDURE expire() LANGUAGE sql AS $$
	SELECT set_config('idem.clock_offset', '-100000', false);
	SELECT idem_claim('expired', ttl => '1 s');
	SELECT idem_queue_set('kept', keep => '1 s');
	SELECT idem_enqueue('kept', key => 'k', dedup => 'until_expired', key_ttl => '1 s');
	SELECT idem_complete(job_id, token) FROM idem_fetch('kept', lease => '1 s');
	SELECT idem_enqueue('spent', max_attempts => 1);
	SELECT idem_fetch('spent', lease => '1 s');
	SELECT set_config('idem.clock_offset', '0', false);
$$;
CREATE VIEW counted AS
SELECT (SELECT count(*) FROM idem.keys) AS keys, (SELECT count(*) FROM idem.job_keys) AS job_keys,
	   (SELECT count(*) FROM idem.job_log WHERE queue = 'kept') AS history,
	   (SELECT count(*) FROM idem.jobs) AS jobs, (SELECT count(*) FROM idem.job_log WHERE state = 'dead') AS dead;

--
-- W1: each table alone; sweeps that write other tables still run
--
CALL anew();
CALL expire();
SELECT * FROM counted;
SET client_min_messages = notice;
\set VERBOSITY default
-- all of them
CALL subscribe('idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log', 'idem.queues');
SELECT idem_cleanup();
SELECT * FROM counted;
-- H3: why a job does not run
SELECT reason, detail, fix FROM idem_why((SELECT min(job_id) FROM idem.jobs));
CALL subscribe();
SELECT job_id AS due FROM idem_enqueue('why_due') \gset
SELECT reason FROM idem_why(:due);
CALL subscribe('idem.jobs');
SELECT reason FROM idem_why(:due);
DELETE FROM idem.jobs WHERE job_id = :due;
-- a job that becomes dead is written to the history
CALL subscribe('idem.job_log');
BEGIN;
SELECT idem_cleanup();
SELECT * FROM counted;
ROLLBACK;
CALL subscribe('idem.jobs');
BEGIN;
SELECT idem_cleanup();
SELECT * FROM counted;
ROLLBACK;
CALL subscribe('idem.keys');
BEGIN;
SELECT idem_cleanup();
SELECT * FROM counted;
ROLLBACK;
CALL subscribe('idem.job_keys');
BEGIN;
SELECT idem_cleanup();
SELECT * FROM counted;
ROLLBACK;
-- cleanup only reads queues, and other tables do not matter
CREATE TABLE other (a int);
CALL subscribe('idem.queues', 'other');
BEGIN;
SELECT idem_cleanup();
SELECT * FROM counted;
ROLLBACK;
-- a subscription that is rolled back
BEGIN;
CALL subscribe('idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log');
SELECT idem_cleanup();
ROLLBACK;
CALL subscribe();
SELECT idem_cleanup();
SELECT * FROM counted;

--
-- K13: writing is refused, also in a session that has used the table before
--
SELECT status FROM idem_claim('a');
SELECT outcome FROM idem_enqueue('q', key => 'k');
CALL subscribe('idem.keys');
SELECT status FROM idem_claim('a');
\set VERBOSITY sqlstate
SELECT status FROM idem_claim('new');
SELECT status FROM idem_lease('new', '1 min');
SELECT idem_finish('a');
SELECT idem_release('a');
SELECT idem_forget('a');
SELECT status FROM idem_claim_many('{a, b}');
SELECT idem_finish('a', token => 1);
SELECT idem_fence('a', 1);
-- reading is not refused, nor are other tables
SELECT status FROM idem_get('a');
SELECT count(*) FROM idem_holder('a');
SELECT outcome FROM idem_enqueue('q', key => 'k');
CALL subscribe('idem.jobs');
SELECT status FROM idem_claim('a');
SELECT outcome FROM idem_enqueue('q', key => 'k');
SELECT outcome FROM idem_enqueue_many('q', '{1}');
SELECT job_id FROM idem_fetch('q');
SELECT job_id FROM idem_fetch('empty', lease => '1 min');
CALL idem_work('empty', 'handler');
SELECT idem_complete(1, 1);
SELECT status FROM idem_complete_many('{1}', '{1}');
SELECT idem_fail(1, 1);
SELECT idem_snooze(1, 1, '1 min');
SELECT idem_progress(1, 1, '1', '1 min');
SELECT status FROM idem_heartbeat('{1}', '{1}', '1 min');
SELECT idem_cancel(1);
SELECT idem_retry(1);
SELECT idem_cancel_by_key('q', 'k');
SELECT idem_cancel_many('{1}');
SELECT idem_retry_many(queue => 'q');
SELECT idem_fail_many('{1}', '{1}');
SELECT idem_snooze_many(queue => 'q', delay => '0');
SELECT idem_reschedule_many(queue => 'q', priority => 1);
SELECT count(*) FROM idem_job(1);
SELECT reason FROM idem_why(-1);
SELECT count(*) FROM idem_job_by_key('q', 'k');
CALL subscribe('idem.queues');
SELECT idem_queue_set('q', lease => '1 min');
SELECT idem_pause('q');
SELECT outcome FROM idem_enqueue('q', key => 'k');
-- writing works again when the subscription was dropped, even in the middle of a transaction
CALL subscribe('idem.keys', 'idem.jobs');
BEGIN;
CALL subscribe();
SELECT status FROM idem_claim('b');
ROLLBACK;
SELECT status FROM idem_claim('b');

--
-- T6: schedules.  While a subscription writes the schedules or the jobs, the publisher ticks.
--
CALL subscribe();
CALL set_clock('2050-01-01 00:00+00');
SELECT idem_schedule('a', 'q', '@hourly') IS NOT NULL AS declared;
CALL set_clock('2050-01-01 01:00+00');
SET client_min_messages = notice;
CALL subscribe('idem.schedules');
\set VERBOSITY default
SELECT idem_tick();
SELECT status, substring(detail FROM '^[^:]*: written by subscription \w+') AS detail FROM idem_doctor() WHERE "check" = 'subscription';
\set VERBOSITY sqlstate
SELECT idem_schedule('a', 'q', '@hourly');
SELECT idem_schedule('b', 'q', '@hourly');
SELECT idem_schedule_pause('a');
SELECT idem_schedule_resume('a');
SELECT idem_unschedule('a');
SELECT state FROM idem.schedule_status;
\set VERBOSITY terse
CALL subscribe('idem.jobs');
SELECT idem_tick();
SELECT idem_schedule('b', 'q', '@hourly') IS NOT NULL AS declared;
-- other tables do not matter: a tick does not write them
CALL subscribe('idem.keys', 'idem.queues', 'idem.shard');
BEGIN;
SELECT idem_tick();
ROLLBACK;
-- an old snapshot does not hide the subscription
CALL subscribe();
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM idem.schedules;
CALL subscribe('idem.jobs');
SELECT idem_tick();
CALL subscribe();
SELECT idem_tick();
COMMIT;
SELECT key FROM idem.jobs WHERE key LIKE 'a@%';
SELECT idem_tick();
RESET idem.clock_offset;
SET client_min_messages = error;
CALL subscribe('idem.keys', 'idem.jobs');

--
-- H1: the doctor
--
\set VERBOSITY default
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'subscription' \gx
SELECT fix FROM idem_doctor() WHERE "check" = 'subscription' \gset
-- the fix sets the sequence above all jobs that came from the publisher
INSERT INTO idem.job_keys (key_hash, expires_at, job_id, queue, key) VALUES (1, now() + '1 day', 5000, 'q', 'k');
:fix
-- in a binary subscription owners are OIDs
SET client_min_messages = error;
ALTER SUBSCRIPTION made_up SET (binary = true);
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'subscription' \gx
SELECT fix FROM idem_doctor() WHERE "check" = 'subscription' \gset
:fix
SELECT status FROM idem_doctor() WHERE "check" = 'subscription';
DROP SUBSCRIPTION made_up;
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'subscription';
SELECT status FROM idem_claim('b');
SELECT outcome FROM idem_enqueue('q');

CALL anew();
DROP TABLE other;
DROP VIEW counted;
DROP PROCEDURE subscribe, expire;

--
-- publications: a row filter must not use a column outside of the primary key
--
SET client_min_messages = error;
CREATE PUBLICATION half FOR TABLE
	idem.keys WHERE ((key_hash & 1023) >= 512),
	idem.jobs WHERE ((job_id & 1023) >= 512),
	idem.job_keys WHERE ((job_id & 1023) >= 512),
	idem.job_log WHERE ((job_id & 1023) >= 512),
	idem.queues;
SELECT status, detail FROM idem_doctor() WHERE "check" = 'publication';
SELECT outcome FROM idem_enqueue('q', key => 'k1');
SELECT count(*) FROM idem_fetch('q', lease => '1 min');
-- functions of users are not allowed there
\set VERBOSITY sqlstate
ALTER PUBLICATION half SET TABLE idem.keys WHERE (idem_slot(key, scope) >= 512);
\set VERBOSITY default
-- key_hash of a job is not in its primary key
ALTER PUBLICATION half SET TABLE idem.jobs WHERE ((key_hash & 1023) >= 512);
SELECT outcome FROM idem_enqueue('q', key => 'k2');
SELECT count(*) FROM idem_fetch('q', lease => '1 min');
SELECT count(*) FROM idem_fetch('q');
SELECT status, detail, fix FROM idem_doctor() WHERE "check" = 'publication' \gx
SELECT fix FROM idem_doctor() WHERE "check" = 'publication' \gset
:fix
SELECT status, fix FROM idem_doctor() WHERE "check" = 'publication';
SELECT count(*) FROM idem_fetch('q', lease => '1 min');
-- inserts only: nothing fails
ALTER PUBLICATION half SET (publish = 'insert');
ALTER PUBLICATION half SET TABLE idem.jobs WHERE (queue = 'q');
SELECT status FROM idem_doctor() WHERE "check" = 'publication';
ALTER PUBLICATION half SET (publish = 'insert, update');
SELECT status FROM idem_doctor() WHERE "check" = 'publication';
-- with all columns as replica identity it works, too
ALTER TABLE idem.jobs REPLICA IDENTITY FULL;
SELECT status FROM idem_doctor() WHERE "check" = 'publication';
ALTER TABLE idem.jobs REPLICA IDENTITY DEFAULT;
ALTER PUBLICATION half SET TABLE idem.queues (queue);
SELECT status, detail FROM idem_doctor() WHERE "check" = 'publication';
DROP PUBLICATION half;
SELECT status FROM idem_doctor() WHERE "check" = 'publication';
