--
-- Privileges of jobs: "Job functions" and "idem_queue_set, ..." of the contract.  The
-- test privileges lists what each set contains.
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();
CREATE ROLE idem_job_nobody;
CREATE ROLE idem_job_alice;
CREATE ROLE idem_job_bob;
CREATE ROLE idem_job_admin;
CREATE ROLE idem_job_monitor;
CREATE ROLE idem_job_team;
SELECT idem_grant('idem_job_alice', 'app'), idem_grant('idem_job_bob', 'app'),
	   idem_grant('idem_job_admin', 'admin'), idem_grant('idem_job_monitor', 'monitor');
SELECT job_id FROM idem_enqueue('open', '"secret"', 'k');

-- a role without grants may do nothing
SET ROLE idem_job_nobody;
SELECT * FROM idem_enqueue('open');
SELECT * FROM idem_enqueue_many('open', '{1}');
SELECT * FROM idem_fetch('open');
SELECT idem_complete(1, 1);
SELECT * FROM idem_complete_many('{1}', '{1}');
SELECT idem_fail(1, 1);
SELECT * FROM idem_heartbeat('{1}', '{1}', '1 min');
SELECT idem_snooze(1, 1, '1 min');
SELECT idem_cancel(1);
SELECT idem_retry(1);
SELECT * FROM idem_job(1);
SELECT idem_queue_set('open');
SELECT idem_queue_drop('open');
SELECT idem_pause('open');
SELECT idem_resume('open');
SELECT * FROM idem.jobs;
SELECT * FROM idem.job_keys;
SELECT * FROM idem.job_log;
SELECT * FROM idem.queues;
SELECT * FROM idem.job_status;
SELECT * FROM idem.queue_status;
SELECT nextval('idem.jobs_job_id_seq');
-- an application may use every queue without an owner, but not declare queues
SET ROLE idem_job_alice;
SELECT job_id, outcome FROM idem_enqueue('open', '1', 'k');
SELECT job_id, token, payload FROM idem_fetch('open', lease => '1 h') \gset
SELECT :'payload' AS payload;
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
SELECT idem_fail(:job_id, :token, 'oh', '0');
SELECT state, error FROM idem_job(1);
SELECT idem_cancel(1);
SELECT idem_retry(1);
SELECT idem_snooze(job_id, token, '0') <= now() + interval '1 h' AS snoozed FROM idem_fetch('open');
SELECT idem_complete(job_id, token) FROM idem_fetch('open');
SELECT job_id, outcome FROM idem_enqueue_many('open', '{1,2}', '{a,b}');
SELECT c.status FROM (SELECT array_agg(job_id) AS ids, array_agg(token) AS tokens FROM idem_fetch('open', 1)) AS f, LATERAL idem_complete_many(ids, tokens) AS c;
SELECT idem_queue_set('open', max_attempts => 1);
SELECT idem_queue_drop('open');
SELECT idem_pause('open');
SELECT idem_resume('open');
SELECT idem_cleanup();
SELECT * FROM idem.jobs;
SELECT * FROM idem.job_keys;
SELECT * FROM idem.job_log;
SELECT * FROM idem.queues;
SELECT * FROM idem.job_status;
SELECT * FROM idem.queue_status;
SELECT nextval('idem.jobs_job_id_seq');
SELECT last_value FROM idem.jobs_job_id_seq;
INSERT INTO idem.queues (queue) VALUES ('mine');
DELETE FROM idem.jobs;
-- other applications may use the same queue
SET ROLE idem_job_bob;
SELECT job_id, payload FROM idem_fetch('open', lease => '1 h');
SELECT state FROM idem_job(3);
-- an administrator declares queues, pauses them, and sees keys but no payloads
SET ROLE idem_job_admin;
SELECT idem_queue_set('team', owner => 'idem_job_team', keep => '1 h', lease => '1 h');
SELECT idem_pause('team');
SELECT idem_resume('team');
SELECT idem_queue_set('dropped', owner => 'idem_job_team');
-- dropping a queue with an owner is refused: its history would become readable
SELECT idem_queue_drop('dropped');
SELECT idem_queue_set('dropped', owner => '-');
RESET ROLE;
SELECT idem_queue_set('dropped', owner => '-');
SET ROLE idem_job_admin;
SELECT idem_queue_drop('dropped');
SELECT job_id, queue, key, state FROM idem.job_status;
SELECT queue, running, owner FROM idem.queue_status ORDER BY queue;
SELECT idem_cleanup();
SELECT queue, owner, lease, keep, keep_dead FROM idem.queues;
DELETE FROM idem.queues;
SELECT * FROM idem.jobs;
SELECT * FROM idem.job_log;
SELECT * FROM idem.job_keys;
-- a monitor sees numbers
SET ROLE idem_job_monitor;
SELECT queue, running, owner FROM idem.queue_status ORDER BY queue;
SELECT * FROM idem.job_status;
SELECT * FROM idem.jobs;
SELECT * FROM idem.queues;
SELECT * FROM idem_job(3);
SELECT * FROM idem_enqueue('open');
SELECT * FROM idem_fetch('open');
SELECT idem_pause('open');
RESET ROLE;

-- a queue with an owner: only members of that role may use it
GRANT idem_job_team TO idem_job_alice;
SET ROLE idem_job_alice;
SELECT job_id, outcome FROM idem_enqueue('team', '"for the team"', 'a');
SELECT job_id, outcome FROM idem_enqueue_many('team', '{1,2,3}', '{b,c,d}');
SELECT job_id, token FROM idem_fetch('team') \gset
SELECT :job_id AS job_id;
SELECT idem_cancel(6);
SELECT job_id FROM idem_enqueue('team', '"done"', 'e', 'until_expired', key_ttl => '1 h', priority => -1);
SELECT idem_complete(job_id, token, '"secret"') FROM idem_fetch('team');
-- other roles see neither the jobs nor their results, and change nothing, whatever the token
RESET ROLE;
CREATE VIEW versions AS SELECT job_id, concat(tableoid, ctid, xmin) AS version FROM idem.jobs
	UNION ALL SELECT job_id, concat(tableoid, ctid, xmin) FROM idem.job_log;
CREATE TABLE before AS SELECT * FROM versions;
SET ROLE idem_job_bob;
SELECT * FROM idem_enqueue('team', '1');
SELECT * FROM idem_enqueue('team', '1', 'a');
SELECT * FROM idem_enqueue('team', '1', 'e', 'until_expired', key_ttl => '1 h');
SELECT * FROM idem_enqueue('team', '1', delay => '1 h');
SELECT * FROM idem_enqueue_many('team', '{1}');
SELECT * FROM idem_enqueue_many('team', '{}');
SELECT * FROM idem_fetch('team');
SELECT * FROM idem_fetch('team', lease => '1 h');
SELECT idem_complete(:job_id, :token);
SELECT idem_complete(:job_id, 1);
SELECT idem_complete(5, 1);
SELECT * FROM idem_complete_many(ARRAY[:job_id], ARRAY[:token]);
SELECT * FROM idem_complete_many(ARRAY[99, 5], ARRAY[1, 1]);
SELECT idem_fail(:job_id, :token);
SELECT idem_fail(:job_id, :token, dead => true);
SELECT idem_snooze(:job_id, :token, '1 h');
SELECT idem_progress(:job_id, :token, '1', '1 h');
SELECT * FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
SELECT * FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token]);
SELECT idem_cancel(:job_id) AS running;
SELECT idem_cancel(5) AS waiting;
SELECT idem_retry(6) AS cancelled;
SELECT idem_retry(8) AS done;
SELECT * FROM idem_job(4);
SELECT * FROM idem_job(5);
SELECT * FROM idem_job(6);
SELECT * FROM idem_job(8);
RESET ROLE;
SELECT (SELECT count(*) FROM versions) AS rows, (SELECT count(*) FROM (TABLE versions EXCEPT TABLE before) AS d) AS changed;
DROP TABLE before;
DROP VIEW versions;
-- an administrator that is not a member may pause the queue, but not use its jobs
SET ROLE idem_job_admin;
SELECT idem_pause('team');
SELECT idem_resume('team');
SELECT job_id, key, state FROM idem.job_status WHERE queue = 'team' ORDER BY job_id;
SELECT * FROM idem_job(5);
SELECT idem_cancel(5);
SELECT * FROM idem_fetch('team');
-- members may do everything
SET ROLE idem_job_alice;
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token]);
SELECT idem_complete(:job_id, :token);
SELECT state, result FROM idem_job(8);
SELECT outcome, result FROM idem_enqueue('team', '1', 'e', 'until_expired', key_ttl => '1 h');
SELECT idem_retry(6);
-- so may the owner itself, if it may call the functions, and a superuser
RESET ROLE;
SELECT idem_grant('idem_job_team', 'app');
SET ROLE idem_job_team;
SELECT job_id FROM idem_fetch('team');
RESET ROLE;
SELECT state FROM idem_job(5);
SELECT idem_cancel(5);
-- an administrator can neither become the owner nor change the owner; setting the same owner again is no change
SET ROLE idem_job_admin;
SELECT idem_queue_set('team', owner => 'idem_job_admin');
SELECT idem_queue_set('team', owner => 'idem_job_bob', keep => '2 h');
SELECT idem_queue_set('team', owner => '-');
SELECT idem_queue_set('team', owner => 'idem_job_team');
SELECT owner, keep FROM idem.queues WHERE queue = 'team';
SELECT payload FROM idem_job(6);
SELECT payload FROM idem_fetch('team');
-- with the privileges of the owner, to any role: the new owner gets the existing jobs and the history
RESET ROLE;
GRANT idem_job_team TO idem_job_admin;
SET ROLE idem_job_admin;
SELECT idem_queue_set('team', owner => 'idem_job_bob');
-- the former owner cannot take it back
SELECT idem_queue_set('team', owner => 'idem_job_team');
RESET ROLE;
REVOKE idem_job_team FROM idem_job_admin;
SET ROLE idem_job_alice;
SELECT * FROM idem_job(6);
SET ROLE idem_job_bob;
SELECT state FROM idem_job(6);
SELECT state FROM idem_job(8);
-- settings that are not given stay as they are
SET ROLE idem_job_admin;
SELECT idem_queue_set('team', max_attempts => 9);
SET ROLE idem_job_alice;
SELECT * FROM idem_job(6);
-- and '-' opens the queue again
RESET ROLE;
SELECT idem_queue_set('team', owner => '-');
SELECT owner FROM idem.queue_status WHERE queue = 'team';
SET ROLE idem_job_alice;
SELECT max_attempts FROM idem_job(6);
SELECT idem_cancel(6), idem_cancel(7);
-- a membership without INHERIT and SET is not enough (possible since 16)
RESET ROLE;
SELECT idem_queue_set('team', owner => 'idem_job_team');
DO $$
BEGIN
	IF current_setting('server_version_num')::int >= 160000 THEN
		EXECUTE 'GRANT idem_job_team TO idem_job_bob WITH INHERIT FALSE, SET FALSE';
		SET LOCAL ROLE idem_job_bob;
		BEGIN
			PERFORM idem_job(8);
			RAISE EXCEPTION 'the job of another role was shown';
		EXCEPTION WHEN insufficient_privilege THEN
			NULL;
		END;
	END IF;
END
$$;
-- a SECURITY DEFINER function enqueues with the privileges of its owner
CREATE FUNCTION idem_test_definer() RETURNS text LANGUAGE sql SECURITY DEFINER
AS $$ SELECT (idem_enqueue('team')).outcome $$;
ALTER FUNCTION idem_test_definer() OWNER TO idem_job_alice;
SET ROLE idem_job_nobody;
SELECT idem_test_definer();
RESET ROLE;
DROP FUNCTION idem_test_definer;
-- for the check at the end: a queue whose owner is dropped
SELECT idem_queue_set('orphan', owner => 'idem_job_bob');

-- functions, tables and operators of other schemas are not used instead
CREATE SCHEMA hostile;
GRANT USAGE ON SCHEMA hostile TO PUBLIC;
CREATE FUNCTION hostile.idem_enqueue(queue text, payload jsonb = NULL, key text = NULL) RETURNS text LANGUAGE sql AS $$ SELECT 'captured' $$;
CREATE FUNCTION hostile.trap(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.trap);
CREATE FUNCTION hostile.idem_clock() RETURNS timestamptz LANGUAGE sql AS $$ SELECT 'infinity'::timestamptz $$;
CREATE FUNCTION hostile.count() RETURNS bigint LANGUAGE sql AS $$ SELECT -1::bigint $$;
CREATE TABLE hostile.jobs (LIKE idem.jobs);
CREATE TABLE hostile.queues (LIKE idem.queues);
INSERT INTO hostile.queues (queue, paused_at) VALUES ('open', now());
SET search_path = hostile, pg_catalog, pg_temp;
SET ROLE idem_job_alice;
SELECT outcome FROM pg_catalog.idem_enqueue('path', '1', 'k');
SELECT outcome FROM pg_catalog.idem_enqueue('path', '2', 'k', on_duplicate => 'replace');
SELECT f.payload, c.status FROM idem_fetch('path', lease => '1 min') AS f, LATERAL idem_complete_many(ARRAY[f.job_id], ARRAY[f.token]) AS c;
SET ROLE idem_job_admin;
SELECT idem_queue_set('path', max_attempts => 2);
SELECT idem_pause('path');
SELECT queue, paused FROM idem.queue_status WHERE queue OPERATOR(pg_catalog.=) 'path';
SELECT queue FROM idem.job_status WHERE queue OPERATOR(pg_catalog.=) 'path';
SELECT idem_queue_drop('path');
SELECT idem_cleanup();
RESET ROLE;
SET search_path = '';
SELECT outcome FROM idem_enqueue('path', '3', 'k');
SELECT payload FROM idem_fetch('path', lease => '1 min');
RESET search_path;
SET client_min_messages = warning;
DROP SCHEMA hostile CASCADE;
RESET client_min_messages;
-- revoke
SELECT idem_revoke('idem_job_bob', 'app');
SET ROLE idem_job_bob;
SELECT * FROM idem_enqueue('open');
SELECT * FROM idem_job(3);
RESET ROLE;
-- roles can be dropped after their grants are revoked; queues do not prevent it
SELECT idem_revoke('idem_job_alice', 'app'), idem_revoke('idem_job_team', 'app'), idem_revoke('idem_job_admin', 'admin'), idem_revoke('idem_job_monitor', 'monitor');
DROP ROLE idem_job_nobody, idem_job_alice, idem_job_bob, idem_job_admin, idem_job_monitor, idem_job_team;
-- only superusers can use a queue whose owner was dropped, until it has a new owner
CREATE ROLE idem_job_bob;
SELECT idem_grant('idem_job_bob', 'app');
SET ROLE idem_job_bob;
SELECT * FROM idem_enqueue('orphan');
RESET ROLE;
SELECT idem_grant('idem_job_bob', 'admin');
SET ROLE idem_job_bob;
SELECT idem_queue_set('orphan', owner => 'idem_job_bob');
RESET ROLE;
SELECT idem_revoke('idem_job_bob', 'admin'), idem_grant('idem_job_bob', 'app');
SELECT outcome FROM idem_enqueue('orphan');
SELECT idem_queue_set('orphan', owner => '-');
SET ROLE idem_job_bob;
SELECT outcome FROM idem_enqueue('orphan');
RESET ROLE;
SELECT idem_revoke('idem_job_bob', 'app');
DROP ROLE idem_job_bob;
TRUNCATE idem.jobs, idem.job_keys, idem.job_log, idem.queues;
