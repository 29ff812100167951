--
-- idem_reset: empty the tables of idem in a test database (V8, V9)
--
\a\pset footer off
CALL anew();
CREATE SCHEMA reset;
SET search_path = reset, public;

CREATE FUNCTION fill() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	job record;
BEGIN
	PERFORM idem_claim('plain');
	PERFORM idem_finish('plain', '1');
	PERFORM idem_lease('leased', '1 h');
	PERFORM idem_queue_set('q', keep => '1 d');
	PERFORM idem_enqueue('q', key => 'kept', dedup => 'until_expired', key_ttl => '1 h');
	SELECT * INTO job FROM idem_fetch('q');
	PERFORM idem_complete(job.job_id, job.token, '2');
	PERFORM idem_enqueue_many('q', '{1, 2, 3}');
	PERFORM * FROM idem_fetch('q', 1, '1 h');
END
$$;
CREATE VIEW counts AS
SELECT (SELECT count(*) FROM idem.keys) AS keys, (SELECT count(*) FROM idem.jobs) AS jobs,
	   (SELECT count(*) FROM idem.job_keys) AS job_keys, (SELECT count(*) FROM idem.job_log) AS job_log,
	   (SELECT count(*) FROM idem.queues) AS queues;

-- keys, leases, jobs that wait or run, keys of jobs, history; queues stay declared, and numbers go on
SET client_min_messages = warning;
SELECT fill();
RESET client_min_messages;
SELECT * FROM counts;
SELECT idem_reset();
SELECT * FROM counts;
SELECT idem_reset();
SELECT claimed FROM idem_claim('plain');
SELECT job_id > 4 AS new_number, outcome FROM idem_enqueue('q', '4', key => 'kept', dedup => 'until_expired', key_ttl => '1 h');
SELECT payload FROM idem_fetch('q');
SELECT idem_reset();

-- in a transaction that is rolled back: all is back, for fetches, too (J14)
SELECT count(*) FROM idem_enqueue_many('q', ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 50) AS i));
BEGIN;
SAVEPOINT a;
SELECT idem_reset();
SELECT count(*) FROM idem_fetch('q', 100);
SELECT count(*) FROM idem_fetch('q', 100);
SELECT outcome FROM idem_enqueue('q', '"new"');
SELECT payload FROM idem_fetch('q', 100);
ROLLBACK TO a;
SELECT count(*) FROM idem_fetch('q', 100);
ROLLBACK;
BEGIN;
SELECT idem_reset();
SELECT count(*) FROM idem_fetch('q', 100);
ROLLBACK;
SELECT count(*) FROM idem_fetch('q', 100);
SELECT idem_reset();

-- a key that this transaction has claimed is gone, and need not be finished (K14)
SET idem.require_finish = 'error';
BEGIN;
SELECT claimed FROM idem_claim('mine');
SELECT idem_reset();
SELECT claimed FROM idem_claim('mine');
SELECT idem_reset();
COMMIT;
RESET idem.require_finish;
-- rows that this transaction has locked: a job that it has fetched, one that has absorbed a duplicate
SELECT count(*) FROM idem_enqueue_many('q', '{1, 2}');
BEGIN;
SELECT payload FROM idem_fetch('q');
SELECT outcome FROM idem_enqueue('q', '3', key => 'k');
SELECT outcome FROM idem_enqueue('q', '3', key => 'k');
SAVEPOINT a;
SELECT idem_reset();
ROLLBACK TO a;
SELECT idem_reset();
COMMIT;
SELECT count(*) FROM idem_fetch('q', 100);

-- a token from before is stale
SET client_min_messages = warning;
SELECT token AS lease_token FROM idem_lease('leased', '1 h') \gset
SELECT job_id FROM idem_enqueue('q', '1') \gset
SELECT token AS job_token FROM idem_fetch('q', 1, '1 h') \gset
RESET client_min_messages;
SELECT idem_reset();
\set VERBOSITY sqlstate
SELECT idem_finish('leased', '1', :lease_token);
SELECT idem_complete(:job_id, :job_token);
\set VERBOSITY default

-- V8: a superuser, or the setting and the privilege to execute the function
CREATE ROLE idem_tester;
CREATE ROLE idem_app;
SELECT idem_grant('idem_tester', 'admin'), idem_grant('idem_app', 'app');
GRANT USAGE ON SCHEMA reset TO idem_tester, idem_app;
SELECT claimed FROM idem_claim('k');
SET ROLE idem_tester;
SELECT state, message, detail, regexp_replace(hint, 'DATABASE \S+', 'DATABASE ...') AS hint FROM fails('SELECT idem_reset()') \gx
SELECT state, message FROM fails('SET idem.allow_reset = on');
RESET ROLE;
SET idem.allow_reset = on;
SET ROLE idem_tester;
SELECT idem_reset();
SET ROLE idem_app;
SELECT state, message FROM fails('SELECT idem_reset()');
RESET ROLE;
RESET idem.allow_reset;
-- not in a read-only transaction (K13)
BEGIN READ ONLY;
SELECT state, message FROM fails('SELECT idem_reset()');
ROLLBACK;
-- in SERIALIZABLE
SELECT claimed FROM idem_claim('k');
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_reset();
COMMIT;

-- V9: a prepared transaction holds a key
BEGIN;
SELECT claimed FROM idem_claim('prepared');
PREPARE TRANSACTION 'reset';
SELECT * FROM fails('SELECT idem_reset()') \gx
COMMIT PREPARED 'reset';
SELECT idem_reset();

SELECT idem_revoke('idem_tester', 'admin'), idem_revoke('idem_app', 'app');
SET client_min_messages = warning;
DROP SCHEMA reset CASCADE;
DROP ROLE idem_tester, idem_app;
CALL anew();
