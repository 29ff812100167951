--
-- idem_enqueue: every outcome, by strategy, by policy, and by the state of the job
-- that has the key.  Rules J1, J3, J4, J5, J12.
-- The test sets idem.clock_offset instead of waiting.
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();

-- J1: a waiting job absorbs a duplicate, and the caller gets its number
SELECT * FROM idem_enqueue('mail', '{"to": 1}', 'user:1');
SELECT * FROM idem_enqueue('mail', '{"to": 1, "again": true}', 'user:1');
SELECT * FROM idem_enqueue('mail', '{"to": 2}', 'user:2');
SELECT * FROM idem_enqueue('mail', '{"to": 1}', 'user:1', 'until_executing', 'skip');
SELECT job_id, queue, key, payload FROM idem.jobs ORDER BY job_id;
-- the same key in another queue is another key
SELECT * FROM idem_enqueue('sms', '{"to": 1}', 'user:1');
SELECT * FROM idem_enqueue('sms', '{"to": 1}', 'user:1');
-- also if queue and key joined are the same text
SELECT * FROM idem_enqueue('mailu', NULL, 'ser:1');
SELECT * FROM idem_enqueue('mai', NULL, 'luser:1');
-- keys and queues are compared by their bytes
SELECT * FROM idem_enqueue('mail', NULL, 'User:1');
SELECT * FROM idem_enqueue('mail', NULL, 'user:1 ');
SELECT * FROM idem_enqueue('Mail', NULL, 'user:1');
SELECT * FROM idem_enqueue('mail', NULL, U&'caf\00e9');
SELECT * FROM idem_enqueue('mail', NULL, U&'cafe\0301');
-- the longest allowed names
SELECT * FROM idem_enqueue(repeat('q', 255), NULL, repeat('k', 1024));
SELECT * FROM idem_enqueue(repeat('q', 255), NULL, repeat('k', 1024));
-- without a key there are no duplicates
SELECT * FROM idem_enqueue('mail');
SELECT * FROM idem_enqueue('mail');
SELECT * FROM idem_enqueue('mail', '{"to": 1}');
-- the columns of a new job
SELECT queue, state, key, payload, result, priority, attempt, worker, error,
	   enqueued_at = run_at AS due, enqueued_at BETWEEN idem_clock() - interval '1 min' AND idem_clock() AS now, lease_until, ended_at
  FROM idem_job(1);
-- any payload is accepted, also none: an SQL null is not a JSON null
SELECT job_id FROM generate_series(1, 3) AS i,
	LATERAL idem_enqueue('any', CASE i WHEN 1 THEN NULL WHEN 2 THEN 'null'::jsonb ELSE '[1, "a"]' END);
SELECT i, payload, payload IS NULL AS none FROM generate_series(15, 17) AS i, LATERAL idem_job(i) ORDER BY i;

-- a job whose enqueue is rolled back neither runs nor holds its key
CALL anew();
BEGIN;
SELECT * FROM idem_enqueue('tx', '1', 'k');
SELECT * FROM idem_enqueue('tx', '2', 'k');
SELECT * FROM idem_enqueue('tx', '3', 'k', on_duplicate => 'replace');
ROLLBACK;
SELECT count(*) FROM idem.jobs;
SELECT * FROM idem_enqueue('tx', '4', 'k');
-- the same for a savepoint
BEGIN;
SAVEPOINT s;
SELECT * FROM idem_enqueue('tx', '5', 'l');
SELECT * FROM idem_enqueue('tx', '6', 'k', on_duplicate => 'replace');
ROLLBACK TO s;
SELECT * FROM idem_enqueue('tx', '7', 'l');
SELECT * FROM idem_enqueue('tx', '8', 'k');
COMMIT;
SELECT job_id, key, payload FROM idem.jobs ORDER BY job_id;
-- and for an EXCEPTION block
DO $$
BEGIN
	BEGIN
		PERFORM idem_enqueue('tx', '9', 'm');
		PERFORM 1 / 0;
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	PERFORM idem_enqueue('tx', '10', 'm');
END
$$;
SELECT payload FROM idem.jobs WHERE key = 'm';
-- functions of one statement see each other's jobs
SELECT (idem_enqueue('tx', '11', 'n')).outcome AS first, (idem_enqueue('tx', '12', 'n', on_duplicate => 'replace')).outcome AS second;
SELECT count(*), min(payload::text) FROM idem.jobs WHERE key = 'n';
-- at every isolation level
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT outcome FROM idem_enqueue('tx', '13', 'o');
SELECT outcome FROM idem_enqueue('tx', '14', 'o');
SELECT outcome FROM idem_enqueue('tx', '15', 'n', on_duplicate => 'replace');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outcome FROM idem_enqueue('tx', '16', 'p');
SELECT outcome FROM idem_enqueue('tx', '17', 'o');
COMMIT;
-- not in a read-only transaction
BEGIN READ ONLY;
SELECT outcome FROM idem_enqueue('tx', '1', 'k');
ROLLBACK;

-- J12: a duplicate with skip writes no row
CALL anew();
SELECT outcome FROM idem_enqueue('j12', '0', 'k');
SELECT ctid AS ctid, xmin AS xmin FROM idem.jobs \gset
SELECT outcome, count(*) FROM generate_series(1, 100) AS i, LATERAL idem_enqueue('j12', to_jsonb(i), 'k') GROUP BY outcome;
SELECT outcome, count(*) FROM generate_series(1, 100) AS i, LATERAL idem_enqueue('j12', to_jsonb(i), 'k', 'until_executed') GROUP BY outcome;
SELECT ctid = :'ctid' AS unmoved, xmin = :'xmin' AS unchanged, payload FROM idem.jobs;
-- nor while the job runs
SELECT job_id, token FROM idem_fetch('j12', lease => '1 h') \gset
SELECT ctid AS ctid, xmin AS xmin FROM idem.jobs \gset
SELECT outcome, count(*) FROM generate_series(1, 100) AS i, LATERAL idem_enqueue('j12', to_jsonb(i), 'k', 'until_executed') GROUP BY outcome;
SELECT ctid = :'ctid' AS unmoved, xmin = :'xmin' AS unchanged, payload FROM idem.jobs;
-- nor when the job is done
SELECT idem_complete(:job_id, :token);
SELECT job_id FROM idem_enqueue('j12', '0', 'k', 'until_expired', key_ttl => '1 h');
SELECT job_id, token FROM idem_fetch('j12', lease => '1 h') \gset
SELECT idem_complete(:job_id, :token, '"ok"');
SELECT ctid AS ctid, xmin AS xmin FROM idem.job_keys \gset
SELECT outcome, result, count(*) FROM generate_series(1, 100) AS i, LATERAL idem_enqueue('j12', to_jsonb(i), 'k', 'until_expired', key_ttl => '1 h') GROUP BY 1, 2;
SELECT ctid = :'ctid' AS unmoved, xmin = :'xmin' AS unchanged FROM idem.job_keys;
SELECT count(*) FROM idem.jobs;

--
-- All combinations, with one queue for each state of a job.  First a job with the
-- payload "old" and the key k is brought into that state, with the arguments given
-- first.  Then time passes, and another job is enqueued with the payload "new", the
-- same key and the arguments given second.
--
CREATE TABLE met (n serial, moment text, outcome text, job text, state text, payload jsonb, live bigint);
CREATE FUNCTION bring(moment text, args text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	id bigint;
	t bigint;
BEGIN
	IF moment = 'for later' THEN
		args := args || ', delay => ''1 day''';
	ELSIF moment = 'scheduled' THEN
		args := args || ', delay => ''1 day'', include_scheduled => true';
	END IF;
	EXECUTE format('SELECT job_id FROM idem_enqueue(%L, ''"old"'', ''k'' %s)', moment, args) INTO id;
	IF moment IN ('waiting', 'for later', 'scheduled') THEN
		RETURN id;
	END IF;
	t := (SELECT token FROM idem_fetch(moment, lease => CASE WHEN moment = 'expired' THEN interval '10 s' ELSE '1 day' END));
	CASE moment
	WHEN 'running', 'expired' THEN
		NULL;
	WHEN 'retry wait' THEN
		PERFORM idem_fail(id, t, retry_in => '1 day');
	WHEN 'retry due' THEN
		PERFORM idem_fail(id, t, retry_in => '0');
	WHEN 'done' THEN
		PERFORM idem_complete(id, t, '"result"');
	WHEN 'dead' THEN
		PERFORM idem_fail(id, t, dead => true);
	WHEN 'cancelled' THEN
		PERFORM idem_cancel(id);
	END CASE;
	RETURN id;
END
$$;
CREATE FUNCTION meet(moment text, id bigint, args text, OUT outcome text, OUT job text, OUT state text, OUT payload jsonb, OUT live bigint)
LANGUAGE plpgsql AS $$
DECLARE
	new_id bigint;
BEGIN
	BEGIN
		EXECUTE format('SELECT job_id, outcome FROM idem_enqueue(%L, ''"new"'', ''k'' %s)', moment, args) INTO new_id, outcome;
	EXCEPTION WHEN OTHERS THEN
		outcome := SQLSTATE;
	END;
	job := CASE WHEN new_id = id THEN 'same' WHEN new_id > id THEN 'new' END;
	SELECT j.state, j.payload INTO state, payload FROM idem_job(coalesce(new_id, id)) AS j;
	live := (SELECT count(*) FROM idem.jobs WHERE queue = moment);
END
$$;
CREATE PROCEDURE meets(first text, second text, pass int = 60) LANGUAGE plpgsql AS $$
BEGIN
	CALL anew();
	TRUNCATE met RESTART IDENTITY;
	INSERT INTO met (moment, live)
	SELECT m, bring(m, first) FROM unnest(ARRAY['waiting', 'for later', 'scheduled', 'running', 'expired',
		'retry wait', 'retry due', 'done', 'dead', 'cancelled']) AS m;
	COMMIT;
	PERFORM set_config('idem.clock_offset', pass::text, false);
	UPDATE met SET (outcome, job, state, payload, live) = (SELECT m.* FROM meet(moment, live, second) AS m);
	COMMIT;
	PERFORM set_config('idem.clock_offset', '0', false);
END
$$;
CREATE VIEW what AS SELECT moment, outcome, job, state, payload, live FROM met ORDER BY n;

-- until_executing: only a job that starts later absorbs (J1, J3); a failed job that waits for its retry does,
-- a job whose lease has expired does not
CALL meets('', '');
TABLE what;
-- replace: the newest payload counts
CALL meets('', $$, on_duplicate => 'replace'$$);
TABLE what;
-- debounce: the newest payload counts, and the job runs later
CALL meets('', $$, on_duplicate => 'debounce', delay => '10 min'$$);
TABLE what;
-- error: instead of being absorbed
CALL meets('', $$, on_duplicate => 'error'$$);
TABLE what;
-- J8: a scheduled enqueue neither takes nor respects the key ...
CALL meets('', $$, delay => '10 min'$$);
TABLE what;
-- ... whatever its strategy ...
CALL meets('', $$, 'until_executed', 'replace', 'rerun', delay => '10 min'$$);
SELECT DISTINCT outcome, job FROM what;
-- ... unless it sets include_scheduled
CALL meets('', $$, delay => '10 min', include_scheduled => true$$);
TABLE what;

-- until_executed: a running job also absorbs, and so does one whose lease has expired (J4)
CALL meets('', $$, 'until_executed'$$);
TABLE what;
-- the strategy of the duplicate counts, not that of the job
CALL meets($$, 'until_executed'$$, $$, 'until_executed'$$);
SELECT moment, outcome, job FROM what WHERE moment IN ('waiting', 'running', 'expired', 'done');
CALL meets($$, 'until_executed', if_running => 'rerun'$$, '');
SELECT moment, outcome, job FROM what WHERE moment IN ('waiting', 'running', 'expired', 'done');
-- replace: a running job has its payload already
CALL meets('', $$, 'until_executed', 'replace'$$);
TABLE what;
-- debounce
CALL meets('', $$, 'until_executed', 'debounce', delay => '10 min'$$);
TABLE what;
-- error
CALL meets('', $$, 'until_executed', 'error'$$);
TABLE what;
-- rerun: one more run after the current one
CALL meets('', $$, 'until_executed', 'skip', 'rerun'$$);
TABLE what;
CALL meets('', $$, 'until_executed', 'replace', 'rerun'$$);
SELECT * FROM what WHERE moment IN ('waiting', 'running', 'expired', 'retry wait', 'done');
CALL meets('', $$, 'until_executed', 'error', 'rerun'$$);
SELECT * FROM what WHERE moment IN ('waiting', 'running', 'expired', 'retry wait', 'done');
CALL meets('', $$, 'until_executed', 'debounce', 'rerun', delay => '10 min'$$);
SELECT * FROM what WHERE moment IN ('waiting', 'running', 'expired', 'retry wait', 'done');

-- until_expired: waiting and running jobs absorb; when the job is done, the outcome is done (J5);
-- dead and cancelled jobs do not count
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', key_ttl => '1 h'$$);
TABLE what;
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', 'replace', key_ttl => '1 h'$$);
TABLE what;
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', 'debounce', key_ttl => '1 h', delay => '10 min'$$);
TABLE what;
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', 'error', key_ttl => '1 h'$$);
TABLE what;
-- after the ttl, counted from the enqueue, it is a new job, even if the first one still waits or runs
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', key_ttl => '1 h'$$, 3660);
TABLE what;
-- for other strategies the first job is an ordinary job
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_executed'$$, 3660);
SELECT moment, outcome, job FROM what WHERE moment IN ('waiting', 'running', 'expired', 'done');
-- just before the end of the ttl
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', key_ttl => '1 h'$$, 3540);
SELECT moment, outcome, job FROM what WHERE moment IN ('running', 'expired', 'done');
-- the ttl of the job counts, not the ttl of the duplicate
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', key_ttl => '1 s'$$);
SELECT moment, outcome, job FROM what WHERE moment IN ('running', 'expired', 'done');
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_expired', key_ttl => '1 day'$$, 3660);
SELECT moment, outcome, job FROM what WHERE moment IN ('running', 'expired', 'done');
-- other strategies do not check whether the job was done
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, '');
SELECT moment, outcome, job FROM what WHERE moment IN ('waiting', 'running', 'expired', 'done');
CALL meets($$, 'until_expired', key_ttl => '1 h'$$, $$, 'until_executed'$$);
SELECT moment, outcome, job FROM what WHERE moment IN ('waiting', 'running', 'expired', 'done');
-- the key of a job with another strategy is not remembered once the job has started
CALL meets('', $$, 'until_expired', key_ttl => '1 h'$$);
SELECT moment, outcome, job FROM what WHERE moment IN ('waiting', 'running', 'expired', 'done');
DROP VIEW what;
DROP TABLE met;
DROP PROCEDURE meets;
DROP FUNCTION bring, meet;

--
-- J3: a running job that enqueues its own key creates a new job
--
CALL anew();
SELECT job_id FROM idem_enqueue('self', '1', 'k');
BEGIN;
SELECT job_id, token FROM idem_fetch('self') \gset
SELECT * FROM idem_enqueue('self', '2', 'k');
SELECT * FROM idem_enqueue('self', '3', 'k', on_duplicate => 'replace');
SELECT * FROM idem_enqueue('self', '4', 'k', on_duplicate => 'error');
ROLLBACK;
-- the rollback returns the job to the queue and leaves nothing else
SELECT job_id, payload, attempt FROM idem.jobs;
BEGIN;
SELECT job_id, token FROM idem_fetch('self') \gset
SELECT * FROM idem_enqueue('self', '2', 'k', on_duplicate => 'error');
SELECT idem_complete(:job_id, :token);
-- the key becomes free only when the waiting job starts
SELECT * FROM idem_enqueue('self', '3', 'k');
COMMIT;
BEGIN;
SELECT job_id, payload, attempt FROM idem_fetch('self', 10);
-- with a savepoint in between
SAVEPOINT s;
SELECT * FROM idem_enqueue('self', '4', 'k');
ROLLBACK TO s;
SELECT * FROM idem_enqueue('self', '5', 'k');
ROLLBACK;
-- with a lease
SELECT job_id, token FROM idem_fetch('self', lease => '1 h') \gset
SELECT * FROM idem_enqueue('self', '6', 'k');
SELECT idem_complete(:job_id, :token);
SELECT job_id, payload FROM idem.jobs;
-- for the other strategies the running job is the duplicate
CALL anew();
SELECT job_id FROM idem_enqueue('self', '1', 'k');
BEGIN;
SELECT job_id, token FROM idem_fetch('self') \gset
SELECT * FROM idem_enqueue('self', '2', 'k', 'until_executed');
SELECT * FROM idem_enqueue('self', '3', 'k', 'until_executed', if_running => 'rerun');
SELECT idem_complete(:job_id, :token);
SELECT * FROM idem_enqueue('self', '4', 'k', 'until_executed');
COMMIT;
SELECT job_id, token, payload, attempt FROM idem_fetch('self', 10, lease => '1 h') \gset
SELECT :job_id AS job_id, :'payload' AS payload, :attempt AS attempt;
-- completed in this transaction: the job is gone, and done
BEGIN;
SELECT idem_complete(:job_id, :token);
SELECT * FROM idem_enqueue('self', '5', 'k', 'until_executed');
ROLLBACK;
BEGIN;
SELECT idem_cancel(:job_id);
SELECT * FROM idem_enqueue('self', '5', 'k', 'until_executed');
ROLLBACK;
SELECT idem_complete(:job_id, :token);
SELECT job_id FROM idem_enqueue('self', '6', 'k', 'until_expired', key_ttl => '1 h');
BEGIN;
SELECT job_id, token FROM idem_fetch('self') \gset
SELECT * FROM idem_enqueue('self', '7', 'k', 'until_expired', key_ttl => '1 h');
SELECT idem_complete(:job_id, :token, '{"n": 5}');
SELECT * FROM idem_enqueue('self', '8', 'k', 'until_expired', key_ttl => '1 h');
COMMIT;
SELECT * FROM idem_enqueue('self', '8', 'k', 'until_expired', key_ttl => '1 h');

--
-- J4: exactly one more run after the current one, with the newest payload
--
CALL anew();
SELECT * FROM idem_enqueue('again', '1', 'k', 'until_executed', if_running => 'rerun');
SELECT job_id, token FROM idem_fetch('again', lease => '1 h') \gset a_
SELECT * FROM idem_enqueue('again', '2', 'k', 'until_executed', if_running => 'rerun');
SELECT * FROM idem_enqueue('again', '3', 'k', 'until_executed', if_running => 'rerun');
SELECT job_id, outcome, count(*) FROM generate_series(4, 20) AS i,
	LATERAL idem_enqueue('again', to_jsonb(i), 'k', 'until_executed', if_running => 'rerun') GROUP BY 1, 2;
SELECT job_id, payload FROM idem.jobs ORDER BY job_id;
-- for other strategies it is a waiting job
SELECT * FROM idem_enqueue('again', '21', 'k');
SELECT * FROM idem_enqueue('again', '22', 'k', 'until_executed');
SELECT * FROM idem_enqueue('again', '23', 'k', 'until_executed', 'error');
SELECT state, payload FROM idem_job(2);
-- the follow-up job is not fetched before the first job has ended
SELECT job_id FROM idem_fetch('again', 10);
-- a retry of the first job runs before it
SELECT idem_fail(:a_job_id, :a_token, retry_in => '0');
SELECT job_id, token, attempt FROM idem_fetch('again', 10, lease => '1 min') \gset a_
SELECT :a_job_id AS job_id, :a_attempt AS attempt;
SELECT job_id FROM idem_fetch('again', 10);
-- so does another attempt after its lease has expired
SET idem.clock_offset = '2 min';
SELECT job_id FROM idem_fetch('again', 10, lease => '1 min');
RESET idem.clock_offset;
SELECT token AS a_token FROM idem.jobs WHERE job_id = 1 \gset
-- while the first job waits for its retry, the follow-up job still absorbs: the newest payload is not lost
SELECT idem_fail(1, :a_token, retry_in => '1 h');
SELECT job_id, outcome FROM idem_enqueue('again', '24', 'k', 'until_executed', if_running => 'rerun');
SELECT job_id, payload FROM idem.jobs ORDER BY job_id;
SELECT job_id FROM idem_fetch('again', 10);
SET idem.clock_offset = '2 h';
SELECT job_id, token FROM idem_fetch('again', 10, lease => '1 h') \gset a_
SELECT :a_job_id AS job_id;
-- complete: now the follow-up job runs, as an ordinary job
SELECT idem_complete(:a_job_id, :a_token);
SELECT job_id, token, attempt FROM idem_fetch('again', 10, lease => '1 h') \gset b_
SELECT :b_job_id AS job_id, :b_attempt AS attempt;
-- while it runs there may be another follow-up job
SELECT * FROM idem_enqueue('again', '30', 'k', 'until_executed', if_running => 'rerun');
SELECT * FROM idem_enqueue('again', '31', 'k', 'until_executed', if_running => 'rerun');
SELECT job_id FROM idem_fetch('again', 10);
-- dead
SELECT idem_fail(:b_job_id, :b_token, dead => true);
SELECT job_id, token, payload FROM idem_fetch('again', 10, lease => '1 h') \gset c_
SELECT :c_job_id AS job_id, :'c_payload' AS payload;
-- cancelled
SELECT * FROM idem_enqueue('again', '40', 'k', 'until_executed', if_running => 'rerun');
SELECT idem_cancel(:c_job_id);
SELECT job_id, token, payload FROM idem_fetch('again', 10, lease => '1 min') \gset d_
SELECT :d_job_id AS job_id, :'d_payload' AS payload;
-- made dead by a fetch, because no attempts are left
SELECT idem_complete(:d_job_id, :d_token);
SELECT job_id FROM idem_enqueue('again', '50', 'k', max_attempts => 1);
SELECT job_id FROM idem_fetch('again', 10, lease => '1 min');
SELECT * FROM idem_enqueue('again', '60', 'k', 'until_executed', if_running => 'rerun');
SET idem.clock_offset = '3 h';
SELECT job_id, attempt FROM idem_fetch('again', 10, lease => '1 h')
UNION ALL
SELECT job_id, attempt FROM idem_fetch('again', 10, lease => '1 h');
RESET idem.clock_offset;
-- the follow-up job can be cancelled, then there is no further run
CALL anew();
SELECT job_id FROM idem_enqueue('again', '1', 'k');
SELECT job_id, token FROM idem_fetch('again', lease => '1 h') \gset
SELECT job_id, outcome FROM idem_enqueue('again', '2', 'k', 'until_executed', if_running => 'rerun');
SELECT idem_cancel(2);
SELECT job_id, outcome FROM idem_enqueue('again', '3', 'k', 'until_executed');
SELECT job_id, outcome FROM idem_enqueue('again', '4', 'k', 'until_executed', if_running => 'rerun');
-- without the first job it is an ordinary job
SELECT idem_complete(:job_id, :token);
SELECT job_id, outcome FROM idem_enqueue('again', '5', 'k', 'until_executed', if_running => 'rerun');

--
-- J5: done, until the ttl since the enqueue has passed
--
CALL anew();
SELECT * FROM idem_enqueue('report', '"2024"', 'k', 'until_expired', key_ttl => '1 h');
SET idem.clock_offset = '30 min';
SELECT job_id, token FROM idem_fetch('report', lease => '1 min') \gset
SELECT idem_complete(:job_id, :token, '{"pages": 7}');
SELECT * FROM idem_enqueue('report', '"2024"', 'k', 'until_expired', key_ttl => '1 h');
-- not for the same key in another queue, nor for another key
SELECT * FROM idem_enqueue('other', '"2024"', 'k', 'until_expired', key_ttl => '1 h');
SELECT * FROM idem_enqueue('report', '"2025"', 'l', 'until_expired', key_ttl => '1 h');
-- a waiting job counts more than a done one: an enqueue with another strategy has created it
SELECT * FROM idem_enqueue('report', '"2024"', 'k');
SELECT * FROM idem_enqueue('report', '"2024"', 'k', 'until_expired', key_ttl => '1 h');
SELECT idem_cancel(4);
SET idem.clock_offset = '59 min';
SELECT * FROM idem_enqueue('report', '"2024"', 'k', 'until_expired', key_ttl => '1 h');
-- the ttl does not start again
SET idem.clock_offset = '61 min';
SELECT * FROM idem_enqueue('report', '"2024, revised"', 'k', 'until_expired', key_ttl => '1 h');
-- a new job may have another result, or none
SELECT idem_cancel(3);
SELECT job_id, token FROM idem_fetch('report', lease => '1 min') \gset
SELECT idem_complete(:job_id, :token);
SELECT job_id, outcome, result, result IS NULL AS none FROM idem_enqueue('report', NULL, 'k', 'until_expired', key_ttl => '1 h');
-- done after the ttl: the key is not remembered
SELECT job_id FROM idem_enqueue('report', NULL, 'm', 'until_expired', key_ttl => '1 min');
SET idem.clock_offset = '71 min';
SELECT job_id, token FROM idem_fetch('report', lease => '1 min') \gset
SELECT :job_id AS job_id;
SELECT idem_complete(:job_id, :token, '"late"');
SELECT outcome FROM idem_enqueue('report', NULL, 'm', 'until_expired', key_ttl => '1 min');
-- a completion that is rolled back has no effect
BEGIN;
SELECT job_id, token FROM idem_fetch('report') \gset
SELECT idem_complete(:job_id, :token, '"undone"');
SELECT outcome, result FROM idem_enqueue('report', NULL, 'm', 'until_expired', key_ttl => '1 min');
ROLLBACK;
SELECT outcome, result FROM idem_enqueue('report', NULL, 'm', 'until_expired', key_ttl => '1 min');
RESET idem.clock_offset;
-- a dead job that is retried keeps its ttl
CALL anew();
SELECT job_id FROM idem_enqueue('report', '1', 'n', 'until_expired', key_ttl => '1 h');
SET idem.clock_offset = '30 min';
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('report');
SELECT idem_retry(1);
SELECT outcome FROM idem_enqueue('report', '2', 'n', 'until_expired', key_ttl => '1 h');
SELECT idem_complete(job_id, token, '"at last"') FROM idem_fetch('report');
SET idem.clock_offset = '59 min';
SELECT * FROM idem_enqueue('report', '3', 'n', 'until_expired', key_ttl => '1 h');
SET idem.clock_offset = '61 min';
SELECT outcome FROM idem_enqueue('report', '4', 'n', 'until_expired', key_ttl => '1 h');
RESET idem.clock_offset;
-- the same with idem_enqueue_many
CALL anew();
SELECT job_id FROM idem_enqueue('report', '1', 'a', 'until_expired', key_ttl => '1 h');
SELECT job_id, token FROM idem_fetch('report', lease => '1 min') \gset
SELECT * FROM idem_complete_many(ARRAY[:job_id], ARRAY[:token]);
SELECT * FROM idem_enqueue_many('report', ARRAY['1', '2', '3']::jsonb[], ARRAY['b', 'a', 'b'], 'until_expired', key_ttl => '1 h');

-- two keys that have the same hash are two keys
CALL anew();
SELECT job_id FROM idem_enqueue('hash', '1', 'a');
SELECT job_id FROM idem_enqueue('hash', '2', 'b');
SELECT job_id FROM idem_enqueue('other', '3', 'a');
UPDATE idem.jobs SET key_hash = (SELECT key_hash FROM idem.jobs WHERE job_id = 1);
SELECT job_id, outcome FROM idem_enqueue('hash', '4', 'a');
SELECT idem_cancel(1);
SELECT job_id, outcome FROM idem_enqueue('hash', '5', 'a');
-- also when they are done
CALL anew();
SELECT job_id FROM idem_enqueue('hash', '1', 'a', 'until_expired', key_ttl => '1 h');
SELECT job_id FROM idem_enqueue('hash', '2', 'b', 'until_expired', key_ttl => '1 h');
SELECT job_id FROM idem_enqueue('other', '3', 'a', 'until_expired', key_ttl => '1 h');
SELECT count(idem_complete(job_id, token, payload)) FROM idem_fetch('hash', 2);
SELECT count(idem_complete(job_id, token, payload)) FROM idem_fetch('other');
UPDATE idem.job_keys SET key_hash = (SELECT key_hash FROM idem.job_keys WHERE job_id = 1);
SELECT * FROM idem_enqueue('hash', '4', 'a', 'until_expired', key_ttl => '1 h');
DELETE FROM idem.job_keys WHERE job_id = 1;
SELECT job_id, outcome FROM idem_enqueue('hash', '5', 'a', 'until_expired', key_ttl => '1 h');

-- a replaced job keeps its number, its place and its attempts
CALL anew();
SELECT job_id FROM idem_enqueue('place', '1', 'k', priority => 5, max_attempts => 3);
SELECT enqueued_at, run_at FROM idem_job(1) \gset
SELECT * FROM idem_enqueue('place', '2', 'k', on_duplicate => 'replace', priority => 9);
SELECT payload, priority, max_attempts, enqueued_at = :'enqueued_at' AS same_time, run_at = :'run_at' AS same_place FROM idem_job(1);
-- also with null
SELECT * FROM idem_enqueue('place', NULL, 'k', on_duplicate => 'replace');
SELECT payload IS NULL AS none FROM idem_job(1);
-- and with a payload larger than a page
SELECT * FROM idem_enqueue('place', (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 3000) AS i), 'k', on_duplicate => 'replace');
SELECT jsonb_array_length(payload), payload ->> 2999 = md5('3000') AS last FROM idem_fetch('place', lease => '1 h');
CALL anew();
