-- J17: recovery points of jobs. J18: the last errors. started_at
\a\pset footer off
CALL anew();
SELECT idem_queue_set('q', lease => '1 h', keep => '1 h', backoff => '1 s');

-- the lease is renewed: as passed, or with its last length (L5), whatever the queue declares
SELECT outcome FROM idem_enqueue('q', '1');
SELECT job_id, token FROM idem_fetch('q') \gset
SELECT progress FROM idem.jobs;
SELECT idem_progress(:job_id, :token, '{"line": 1}', '2 h') BETWEEN clock_timestamp() + '119 min' AND clock_timestamp() + '121 min' AS two_hours;
SELECT lease_until > clock_timestamp() + '119 min' AS two_hours, progress FROM idem.jobs;
SET idem.clock_offset = '1 h';
SELECT idem_progress(:job_id, :token, '{"line": 2}') BETWEEN idem_clock() + '119 min' AND idem_clock() + '121 min' AS two_hours;
SELECT lease_until > idem_clock() + '119 min' AS two_hours, progress FROM idem.jobs;
RESET idem.clock_offset;
SELECT idem_progress(:job_id, :token, '{"line": 2}', '1 h') BETWEEN clock_timestamp() + '59 min' AND clock_timestamp() + '61 min' AS one_hour;
SELECT idem_progress(:job_id, :token, '{"line": 2}') BETWEEN clock_timestamp() + '59 min' AND clock_timestamp() + '61 min' AS one_hour;
-- a rollback keeps the last one
BEGIN;
SELECT idem_progress(:job_id, :token, '{"line": 3}') IS NOT NULL AS renewed;
ROLLBACK;
SELECT progress, state FROM idem_job(:job_id);
-- a JSON null is data
SELECT idem_progress(:job_id, :token, 'null') IS NOT NULL AS renewed;
SELECT progress = 'null' AS json_null FROM idem_job(:job_id);
SELECT idem_progress(:job_id, :token, '{"line": 4}') IS NOT NULL AS renewed;

-- the next fetch returns it: after fail, snooze, an expired lease
SELECT idem_fail(:job_id, :token, 'one', retry_in => '0');
SELECT job_id, token, attempt, progress FROM idem_fetch('q') \gset
SELECT :attempt AS attempt, :'progress' AS progress;
SELECT idem_snooze(:job_id, :token, '0') IS NOT NULL AS snoozed;
SELECT token, attempt, progress FROM idem_fetch('q') \gset
SELECT :attempt AS attempt, :'progress' AS progress;
SET idem.clock_offset = '2 h';
SELECT token, attempt, progress FROM idem_fetch('q') \gset
SELECT :attempt AS attempt, :'progress' AS progress;
-- J18: the attempt whose lease has expired has an entry, the snoozed one has none
SELECT e ->> 'attempt' AS attempt, e ->> 'error' AS error,
	   (e ->> 'at')::timestamptz BETWEEN clock_timestamp() - interval '1 min' AND idem_clock() AS at
  FROM idem_job(:job_id), jsonb_array_elements(errors) AS e;
-- the history and a retry keep both
SELECT idem_fail(:job_id, :token, 'three', dead => true);
SELECT state, progress, error, jsonb_array_length(errors) AS errors, started_at IS NOT NULL AS started FROM idem_job(:job_id);
SELECT idem_retry(:job_id);
SELECT state, progress, error, jsonb_array_length(errors) AS errors, started_at FROM idem_job(:job_id);
SELECT attempt, progress FROM idem_fetch('q');
RESET idem.clock_offset;

-- the length of the fetch, in a queue that declares none; heartbeat and progress take turns
CALL anew();
SELECT outcome FROM idem_enqueue('q', '1');
SELECT job_id, token FROM idem_fetch('q', lease => '1 min') \gset
SELECT lease_until - leased_at AS length FROM idem.jobs;
SET idem.clock_offset = '2 min';
SELECT idem_progress(:job_id, :token, '1') BETWEEN idem_clock() + '59 s' AND idem_clock() + '61 s' AS one_minute;
SELECT lease_until BETWEEN idem_clock() + '59 s' AND idem_clock() + '61 s' AS one_minute FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token]);
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '3 min');
SELECT idem_progress(:job_id, :token, '2') BETWEEN idem_clock() + '179 s' AND idem_clock() + '181 s' AS three_minutes;
SELECT lease_until - leased_at AS length FROM idem.jobs;
-- after the lease has expired, a fetch without a lease has nothing to renew
SET idem.clock_offset = '1 h';
BEGIN;
SELECT job_id, token FROM idem_fetch('q') \gset
SELECT leased_at FROM idem.jobs;
SELECT status, lease_until FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token]);
COMMIT;
SELECT job_id, token FROM idem_fetch('q', lease => '1 min') \gset
SELECT idem_fail(:job_id, :token, retry_in => '0');
SELECT leased_at, lease_until FROM idem.jobs;
RESET idem.clock_offset;

-- without a lease: nothing to renew; the recovery point counts from the commit on
CALL anew();
SELECT outcome FROM idem_enqueue('plain', '1');
BEGIN;
SELECT job_id, token FROM idem_fetch('plain') \gset
SELECT idem_progress(:job_id, :token, '{"line": 1}');
SAVEPOINT a;
SELECT idem_progress(:job_id, :token, '{"line": 2}');
ROLLBACK TO a;
COMMIT;
SELECT attempt, progress FROM idem_fetch('plain');
SELECT e ->> 'attempt' AS attempt, e ->> 'error' AS error FROM idem_job(1), jsonb_array_elements(errors) AS e;
-- with a lease that is passed, the job is leased from then on
BEGIN;
SELECT job_id, token FROM idem_fetch('plain') \gset
SELECT idem_progress(:job_id, :token, '{"line": 3}', '1 h') > clock_timestamp() AS leased;
COMMIT;
SELECT state, progress FROM idem_job(1);
-- so it can be renewed, also in another transaction, and in the one that has leased it
SELECT idem_progress(1, :token, '{"line": 3}') > clock_timestamp() + '59 min' AS leased;
SELECT idem_fail(1, :token, retry_in => '0');
BEGIN;
SELECT job_id, token FROM idem_fetch('plain') \gset
SELECT idem_progress(:job_id, :token, '{"line": 3}', '1 h') > clock_timestamp() + '59 min' AS leased;
SELECT idem_progress(:job_id, :token, '{"line": 3}') > clock_timestamp() + '59 min' AS renewed;
SELECT idem_fail(1, :token, retry_in => '0');
COMMIT;
-- J11: after the commit of a fetch without a lease the token still counts, but there is nothing to
-- take the length from: neither the fetch nor an earlier lease of the job
SELECT job_id, token FROM idem_fetch('plain') \gset
SELECT (fails(format('SELECT idem_progress(1, %s, ''1'')', :token))).*;
SELECT (fails(format('SELECT idem_heartbeat(''{1}'', ARRAY[%s])', :token))).*;
SELECT idem_queue_set('plain', lease => '1 h');
SELECT idem_progress(1, :token, '{"line": 3}') > clock_timestamp() + '59 min' AS declared;
SELECT idem_queue_set('plain', lease => '0');

-- bad arguments: nothing changes
SELECT token FROM idem.jobs \gset
CREATE TEMP TABLE bad (n serial, call text);
INSERT INTO bad (call) VALUES
	('idem_progress(NULL, 1, ''1'')'),
	('idem_progress(1, NULL, ''1'')'),
	(format('idem_progress(1, %s, NULL)', :token)),
	(format('idem_progress(1, %s, ''1'', ''-1 s'')', :token)),
	(format('idem_progress(1, %s, ''1'', ''31 days'')', :token)),
	(format('idem_progress(1, %s, ''1'', ''2 months'')', :token)),
	(format('idem_progress(1, %s, to_jsonb(repeat(''x'', 1048577)))', :token)),
	('idem_progress(1, 1, ''1'', ''1 h'')'),
	(format('idem_progress(2, %s, ''1'', ''1 h'')', :token));
SELECT n, f.state, f.message, f.detail, f.hint FROM bad, LATERAL fails('SELECT ' || call) AS f ORDER BY n;
SELECT progress, token = :token AS same_token FROM idem.jobs;
-- a job that no worker has fetched
SELECT job_id AS other FROM idem_enqueue('other') \gset
SELECT (fails(format('SELECT idem_progress(%s, 1, ''1'', ''1 h'')', :other))).*;

-- J18: the last ten errors, each clipped to 8 kB at a character
CALL anew();
SELECT idem_queue_set('q', lease => '1 h', max_attempts => 12);
SELECT outcome FROM idem_enqueue('q', '1');
DO $$
BEGIN
	FOR i IN 1 .. 11 LOOP
		PERFORM idem_fail(job_id, token, 'error ' || i, retry_in => '0') FROM idem_fetch('q');
	END LOOP;
END $$;
SELECT string_agg(e ->> 'attempt', ' ' ORDER BY ord) AS attempts, min(e ->> 'error') AS any FROM idem_job(1), jsonb_array_elements(errors) WITH ORDINALITY AS x(e, ord);
SELECT idem_fail(job_id, token, repeat(U&'\20ac', 3000)) FROM idem_fetch('q');
SELECT state, jsonb_array_length(errors) AS n, errors -> 0 ->> 'attempt' AS first, octet_length(error) AS bytes FROM idem_job(1);
SELECT last_error = error AS same FROM idem.job_status, idem_job(1);
-- no text: null; quotes and backslashes are kept
CALL anew();
SELECT outcome FROM idem_enqueue('q', '1');
SELECT idem_fail(job_id, token, retry_in => '0') FROM idem_fetch('q', lease => '1 h');
SELECT error, errors -> 0 -> 'error' AS entry FROM idem_job(1);
SELECT idem_fail(job_id, token, E'"\\\n', retry_in => '0') FROM idem_fetch('q', lease => '1 h');
SELECT error = E'"\\\n' AS same FROM idem_job(1);
-- the lease of the last attempt: the job is dead, with an entry
CALL anew();
SELECT outcome FROM idem_enqueue('q', '1', max_attempts => 1);
SELECT attempt FROM idem_fetch('q', lease => '1 h');
SET idem.clock_offset = '2 h';
SELECT attempt FROM idem_fetch('q', lease => '1 h');
SELECT state, error, jsonb_array_length(errors) AS n FROM idem_job(1);
RESET idem.clock_offset;

-- percentage and text for people, of what is fit for it; a percentage stays short
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3,4,5}');
SELECT idem_progress(f.job_id, f.token,
		(ARRAY['{"percent": 12.345, "message": "half"}', '{"percent": "12", "message": 1}', '[1]', '{"percent": -1e3, "message": ""}', '{"percent": 1e400}'])[f.job_id]::jsonb, '1 h') IS NOT NULL AS renewed
  FROM idem_fetch('q', 10, '1 h') AS f;
SELECT job_id, percent, message FROM idem.job_status ORDER BY job_id;
SELECT idem_progress(job_id, token, jsonb_build_object('message', repeat('x', 300)), '1 h') IS NOT NULL AS renewed FROM idem.jobs WHERE job_id = 1;
SELECT percent, length(message) FROM idem.job_status WHERE job_id = 1;

-- started_at: of the worker that has the job
CALL anew();
SELECT outcome FROM idem_enqueue('q', '1');
SELECT started_at FROM idem_job(1);
SELECT clock_timestamp() AS before \gset
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT started_at BETWEEN :'before' AND clock_timestamp() AS now FROM idem_job(1);
SELECT s.started_at = j.started_at AS same FROM idem.job_status AS s, idem_job(1) AS j;
SELECT idem_snooze(:job_id, :token, '0') IS NOT NULL AS snoozed;
SELECT started_at FROM idem_job(1);
CALL anew();
