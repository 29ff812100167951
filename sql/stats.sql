--
-- Statistics: rule S1, every answer adds one to one counter; idem_stats_reset();
-- which roles may see them, and that they show no keys (S3).
--
-- After each step moved() shows which counters of this database and its queues
-- have moved since it was last asked, and by how much.
--
\a\pset footer off
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT current_database() AS dbname \gset
CALL anew();

CREATE FUNCTION counters(OUT whose text, OUT counter text, OUT value bigint) RETURNS SETOF record LANGUAGE sql AS $$
	SELECT 'database', c.key, c.value::bigint
	  FROM idem.stats AS s, jsonb_each_text(to_jsonb(s) - '{datid,datname,stats_reset}'::text[]) AS c
	 WHERE s.datname = current_database()
	UNION ALL
	SELECT 'queue ' || s.queue, c.key, c.value::bigint
	  FROM idem.queue_stats AS s, jsonb_each_text(to_jsonb(s) - '{datid,datname,queue,stats_reset}'::text[]) AS c
	 WHERE s.datname = current_database()
$$;
CREATE TABLE seen (whose text, counter text, value bigint);
CREATE FUNCTION moved(OUT whose text, OUT moved text) RETURNS SETOF record LANGUAGE plpgsql AS $$
BEGIN
	RETURN QUERY
	SELECT d.whose, string_agg(format('%s +%s', d.counter, d.by), ', ' ORDER BY d.counter COLLATE "C")
	  FROM (SELECT c.whose, c.counter, c.value - coalesce(s.value, 0) AS by
			  FROM counters() AS c LEFT JOIN seen AS s USING (whose, counter)) AS d
	 WHERE d.by <> 0
	 GROUP BY d.whose ORDER BY d.whose COLLATE "C";
	DELETE FROM seen;
	INSERT INTO seen SELECT * FROM counters();
END $$;

-- the counters
SELECT counter FROM counters() WHERE whose = 'database' ORDER BY counter COLLATE "C";
SELECT idem_queue_set('only declared');
SELECT count(*) AS queues_that_were_only_declared FROM counters() WHERE whose = 'queue only declared';
SELECT idem_queue_drop('only declared');
SELECT stats_reset AS reset_before FROM idem.stats WHERE datname = current_database() \gset
SELECT idem_stats_reset();
SELECT sum(value) FROM counters();
SELECT stats_reset > :'reset_before' AS later, stats_reset <= clock_timestamp() AS not_too_late FROM idem.stats WHERE datname = current_database();
SELECT * FROM moved();
SELECT * FROM moved();

--
-- answers to claims
--
SELECT status FROM idem_claim('a', request => '1');
SELECT * FROM moved();
SELECT status FROM idem_claim('a', request => '1');
SELECT status FROM idem_claim('a');
SELECT * FROM moved();
-- another request
SELECT status FROM idem_claim('a', request => '2');
SELECT * FROM moved();
-- the transaction that has claimed the key
BEGIN;
SELECT status FROM idem_claim('b', request => '1');
SELECT status FROM idem_claim('b', request => '1');
SAVEPOINT s;
SELECT status FROM idem_claim('b', request => '2');
ROLLBACK TO s;
SELECT idem_finish('b', '"result"');
SELECT status FROM idem_claim('b');
COMMIT;
SELECT * FROM moved();
-- a claim that is rolled back was answered, so it counts
BEGIN;
SELECT status FROM idem_claim('c');
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT status FROM idem_claim('c');
ROLLBACK TO s;
SELECT status FROM idem_claim('c');
COMMIT;
SELECT * FROM moved();
-- a claim of an expired key counts only as a claim
BEGIN;
SET LOCAL idem.clock_offset = '25 h';
SELECT status FROM idem_claim('c');
ROLLBACK;
SELECT * FROM moved();
-- calls that answer no claim do not count: get, finish, release, forget, errors
SELECT status FROM idem_get('a');
BEGIN;
SELECT idem_finish('a');
ROLLBACK;
SELECT idem_release('a');
SELECT idem_forget('c');
SELECT idem_forget('c');
SELECT status FROM idem_claim('');
SELECT status FROM idem_claim(NULL);
SELECT status FROM idem_claim('d', ttl => '-1 s');
SELECT * FROM moved();
-- nor does a claim of another role's key
CREATE ROLE idem_stats_app;
SELECT idem_grant('idem_stats_app', 'app');
SET ROLE idem_stats_app;
SELECT status FROM idem_claim('a');
RESET ROLE;
SELECT * FROM moved();

-- in a batch every element counts
BEGIN;
SELECT ord, status FROM idem_claim_many('{a,m1,m2,m1,b}');
SELECT idem_finish_many('{m1,m2}');
COMMIT;
SELECT * FROM moved();
-- a key with another request ends the batch; the keys before it, in byte order, were answered
SELECT ord, status FROM idem_claim_many('{a,0}', requests => '{2,1}');
SELECT * FROM moved();

-- call: claimed, a replay, another request, a handler that fails
CREATE FUNCTION stats_handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(1 / payload::int) $$;
SELECT status, replayed FROM idem_call('call', 'stats_handler', '1');
SELECT * FROM moved();
SELECT status, replayed FROM idem_call('call', 'stats_handler', '1');
SELECT * FROM moved();
SELECT status, replayed FROM idem_call('call', 'stats_handler', '2');
SELECT * FROM moved();
SELECT status, replayed FROM idem_call('call zero', 'stats_handler', '0');
SELECT * FROM moved();

--
-- leases
--
SELECT status, token AS l_token FROM idem_lease('l', '1 min', request => '1', worker => 'w1') \gset
SELECT * FROM moved();
-- live: busy for other callers, by each function; resumed for the same worker
SELECT status FROM idem_lease('l', '1 min', wait => '0');
SELECT status FROM idem_lease('l', '1 min', worker => 'w2', wait => '0');
SELECT status FROM idem_claim('l', wait => '0');
SELECT status FROM idem_claim('l');
SELECT ord, status FROM idem_claim_many('{l}', wait => '0');
SELECT status, replayed FROM idem_call('l', 'stats_handler', '1');
SELECT * FROM moved();
SELECT status FROM idem_lease('l', '1 min', worker => 'w1');
SELECT * FROM moved();
SELECT status FROM idem_lease('l', '1 min', request => '2', worker => 'w1');
SELECT status, replayed FROM idem_call('l', 'stats_handler', '2');
SELECT * FROM moved();
-- calls of the holder
SELECT idem_renew('l', :l_token, '1 min') > now() AS renewed;
SELECT idem_checkpoint('l', :l_token, '1') > now() AS kept;
SELECT idem_fence('l', :l_token);
SELECT * FROM moved();
-- expired: another request, then the next worker takes over
SET idem.clock_offset = '2 min';
SELECT status FROM idem_lease('l', '1 min', request => '2');
SELECT * FROM moved();
SELECT status, token AS m_token FROM idem_lease('l', '1 min', worker => 'w2') \gset
SELECT * FROM moved();
-- each call with the old token
SELECT idem_finish('l', '1', :l_token);
SELECT * FROM moved();
SELECT idem_release('l', :l_token);
SELECT * FROM moved();
SELECT idem_renew('l', :l_token, '1 min');
SELECT * FROM moved();
SELECT idem_checkpoint('l', :l_token, '1');
SELECT * FROM moved();
SELECT idem_fence('l', :l_token);
SELECT * FROM moved();
SELECT idem_finish('no such key', '1', :l_token);
SELECT idem_finish('a', '1', :l_token);
SELECT * FROM moved();
-- finished: the token is right, but it is too late; not counted
SELECT idem_finish('l', '1', :m_token);
SELECT idem_finish('l', '1', :m_token);
SELECT idem_finish('l', '2', :m_token);
SELECT idem_renew('l', :m_token, '1 min');
SELECT * FROM moved();
SELECT status FROM idem_lease('l', '1 min');
SELECT * FROM moved();
RESET idem.clock_offset;
-- a plain claim also takes over a lease that was released or has expired
SELECT idem_release('r', token) FROM idem_lease('r', '1 min');
SELECT status FROM idem_claim('r');
SELECT status FROM idem_lease('r 2', '1 us');
BEGIN;
SELECT status FROM idem_claim('r 2');
ROLLBACK;
SELECT * FROM moved();
-- past its ttl there is nothing to take over
SELECT status FROM idem_lease('r 3', '1 us', ttl => '1 us');
SELECT status FROM idem_lease('r 3', '1 us', ttl => '1 us');
SELECT * FROM moved();
-- a key that this transaction has claimed, or leased
BEGIN;
SELECT status FROM idem_claim('h');
SELECT status FROM idem_lease('h', '1 min');
SELECT status FROM idem_lease('h 2', '1 min');
SELECT status FROM idem_claim('h 2');
ROLLBACK;
SELECT * FROM moved();
-- parked, exhausted: by each function
SELECT status FROM idem_lease('p', '1 us', on_expiry => 'park');
SELECT status FROM idem_lease('x', '1 us', max_attempts => 1);
SELECT * FROM moved();
SELECT status FROM idem_lease('p', '1 min');
SELECT status FROM idem_claim('p');
SELECT ord, status FROM idem_claim_many('{p}');
SELECT status, replayed FROM idem_call('p', 'stats_handler', '1');
SELECT * FROM moved();
SELECT status FROM idem_lease('x', '1 min');
SELECT status FROM idem_claim('x');
SELECT ord, status FROM idem_claim_many('{x}');
SELECT status, replayed FROM idem_call('x', 'stats_handler', '1');
SELECT * FROM moved();

--
-- cleanup: a plain key, a finished lease, an abandoned one; not the parked one
--
CALL anew();
SELECT status FROM idem_claim('plain');
SELECT idem_finish('finished', '1', token) FROM idem_lease('finished', '1 min');
SELECT status FROM idem_lease('abandoned', '1 min');
SELECT idem_release('released', token) FROM idem_lease('released', '1 min');
SELECT status FROM idem_lease('parked', '1 min', on_expiry => 'park');
SELECT status FROM idem_claim('long', ttl => '100 h');
SELECT count(*) FROM moved();
SELECT idem_cleanup();
SELECT * FROM moved();
SET idem.clock_offset = '25 h';
SELECT idem_cleanup(1);
SELECT * FROM moved();
SELECT idem_cleanup();
SELECT * FROM moved();
SELECT idem_cleanup();
SELECT * FROM moved();
RESET idem.clock_offset;
SELECT key FROM idem.keys ORDER BY key;

--
-- outcomes of enqueues
--
CALL anew();
SELECT outcome FROM idem_enqueue('q');
SELECT outcome FROM idem_enqueue('q', '1', 'a');
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('q', '2', 'a');
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('q', '2', 'a', on_duplicate => 'replace');
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('q', '2', 'a', on_duplicate => 'debounce', delay => '1 min');
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('q', '2', 'a', on_duplicate => 'debounce', include_scheduled => true, delay => '1 min');
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('q', '2', 'a', on_duplicate => 'error');
SELECT * FROM moved();
-- each queue has its own counters
SELECT outcome FROM idem_enqueue('Q', '1', 'a');
SELECT outcome FROM idem_enqueue('q ', '1', 'a');
SELECT outcome FROM idem_enqueue('ä "q''\', '1', 'a');
SELECT * FROM moved();
-- scheduled: does not use the key
SELECT outcome FROM idem_enqueue('q', '2', 'a', delay => '1 h');
SELECT * FROM moved();
-- idem_enqueue_many: every element
SELECT ord, outcome FROM idem_enqueue_many('q', '{1,2,3,4}', '{a,b,b,NULL}');
SELECT * FROM moved();
-- rolled back, or refused because of bad arguments
BEGIN;
SELECT outcome FROM idem_enqueue('q', '1', 'rolled back');
ROLLBACK;
SELECT outcome FROM idem_enqueue('q', '1', '');
SELECT outcome FROM idem_enqueue('q', '1', 'a', dedup => 'nonsense');
SELECT outcome FROM idem_enqueue(NULL);
SELECT * FROM moved();
-- while it runs
CALL anew();
SELECT outcome FROM idem_enqueue('run', '1', 'a');
SELECT job_id, token AS r_token FROM idem_fetch('run', lease => '1 h') \gset
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('run', '2', 'a', dedup => 'until_executed');
SELECT outcome FROM idem_enqueue('run', '2', 'a', dedup => 'until_executed', on_duplicate => 'error');
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('run', '2', 'a', dedup => 'until_executed', if_running => 'rerun');
SELECT outcome FROM idem_enqueue('run', '3', 'a', dedup => 'until_executed', if_running => 'rerun');
SELECT * FROM moved();
-- done
SELECT outcome FROM idem_enqueue('done', '1', 'a', dedup => 'until_expired', key_ttl => '1 h');
SELECT idem_complete(job_id, token, '"done"') FROM idem_fetch('done');
SELECT outcome, result FROM idem_enqueue('done', '1', 'a', dedup => 'until_expired', key_ttl => '1 h');
SELECT * FROM moved();
SELECT outcome FROM idem_enqueue('done', '1', 'a', dedup => 'until_expired', key_ttl => '1 h', on_duplicate => 'error');
SELECT * FROM moved();

--
-- the end of jobs
--
CALL anew();
SELECT count(*) FROM idem_enqueue_many('w', '{1,2,3,4,5}', max_attempts => 2);
SELECT * FROM moved();
SELECT count(*) FROM idem_fetch('w');
SELECT * FROM moved();
CREATE TABLE fetched AS SELECT job_id, token FROM idem_fetch('w', 10, lease => '1 h');
SELECT * FROM moved();
SELECT count(*) FROM idem_fetch('w', 10, lease => '1 h');
SELECT * FROM moved();
-- renewed: nothing; completed
SELECT status, count(*) FROM idem_heartbeat(ARRAY(SELECT job_id FROM fetched), ARRAY(SELECT token FROM fetched), '1 h') GROUP BY 1;
SELECT * FROM moved();
SELECT idem_complete(job_id, token) FROM fetched WHERE job_id = 1;
SELECT * FROM moved();
-- the job is gone: the token is stale, for each function
SELECT idem_complete(job_id, token) FROM fetched WHERE job_id = 1;
SELECT * FROM moved();
SELECT idem_fail(job_id, token) FROM fetched WHERE job_id = 1;
SELECT * FROM moved();
SELECT idem_snooze(job_id, token, '1 s') FROM fetched WHERE job_id = 1;
SELECT * FROM moved();
SELECT status FROM fetched, idem_heartbeat(ARRAY[job_id], ARRAY[token], '1 h') WHERE fetched.job_id = 1;
SELECT * FROM moved();
-- several at once
SELECT status, count(*) FROM idem_complete_many(ARRAY(SELECT job_id FROM fetched WHERE job_id <= 2), ARRAY(SELECT token FROM fetched WHERE job_id <= 2)) GROUP BY 1 ORDER BY 1;
SELECT * FROM moved();
SELECT status, count(*) FROM idem_complete_many('{1,2,3,3}', '{1,2,3,3}') GROUP BY 1;
SELECT * FROM moved();
-- never fetched: not held, which is not stale
SELECT job_id AS waiting FROM idem_enqueue('w') \gset
SELECT idem_complete(:waiting, 1);
SELECT status FROM idem_complete_many(ARRAY[:waiting], '{1}');
SELECT idem_cancel(:waiting);
SELECT * FROM moved();
-- failed; dead; snoozed; cancelled, but only if the job exists
SELECT idem_fail(job_id, token, 'error', retry_in => '0') FROM fetched WHERE job_id = 3;
SELECT * FROM moved();
SELECT idem_fail(job_id, token, 'error', retry_in => '0') FROM idem_fetch('w');
SELECT * FROM moved();
SELECT idem_fail(job_id, token, dead => true) FROM fetched WHERE job_id = 4;
SELECT * FROM moved();
SELECT idem_snooze(job_id, token, '0') > now() - interval '1 h' AS later FROM fetched WHERE job_id = 5;
SELECT * FROM moved();
SELECT idem_cancel(5), idem_cancel(5), idem_cancel(3);
SELECT * FROM moved();
-- retried, if there is a job to retry
SELECT idem_retry(4), idem_retry(4), idem_retry(1), idem_retry(12345);
SELECT * FROM moved();
-- rescheduled, if that changes anything
SELECT idem_reschedule_many(ARRAY[job_id], priority => 9), idem_reschedule_many(ARRAY[job_id], priority => 9) FROM idem_enqueue('rescheduled') AS e;
SELECT * FROM moved();
-- dead because the lease of the last attempt has expired: found by a fetch
SELECT count(*) FROM idem_fetch('w', lease => '1 us');
SELECT count(*) FROM idem_fetch('w', lease => '1 us');
SELECT * FROM moved();
SELECT count(*) FROM idem_fetch('w', lease => '1 us');
SELECT * FROM moved();
-- or by cleanup
SELECT count(*) FROM idem_enqueue_many('c', '{1,2,3}', max_attempts => 1);
SELECT count(*) FROM idem_fetch('c', 2, lease => '1 us');
SELECT count(*) FROM moved();
SELECT idem_cleanup();
SELECT * FROM moved();
-- pause, resume, idem_job: not counted
SELECT idem_pause('w'), idem_resume('w');
SELECT count(*) FROM idem_job(4);
SELECT * FROM moved();
-- cleanup of keys and history of jobs
CALL anew();
SELECT idem_queue_set('k', keep => '1 h');
SELECT count(*) FROM idem_enqueue_many('k', '{1,2,3}', '{a,b,c}', dedup => 'until_expired', key_ttl => '1 h');
SELECT count(idem_complete(job_id, token)) FROM idem_fetch('k', 2);
SELECT idem_cancel(3);
SELECT count(*) FROM moved();
SET idem.clock_offset = '2 h';
SELECT idem_cleanup();
SELECT * FROM moved();
SET idem.clock_offset = '1000 h';
SELECT idem_cleanup();
SELECT * FROM moved();
RESET idem.clock_offset;
-- the counters of a queue outlive it
SELECT idem_queue_drop('k');
SELECT enqueued, completed, cancelled FROM idem.queue_stats WHERE datname = current_database() AND queue = 'k';

--
-- S3: what each role may see
--
CREATE ROLE idem_stats_nobody;
CREATE ROLE idem_stats_core IN ROLE pg_monitor;
CREATE ROLE idem_stats_monitor;
CREATE ROLE idem_stats_admin;
SELECT idem_grant('idem_stats_monitor', 'monitor'), idem_grant('idem_stats_admin', 'admin');
CREATE FUNCTION try(what text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE what;
	RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;
CREATE TABLE tries (ord int, what text);
INSERT INTO tries
SELECT n, x
  FROM unnest(ARRAY[
	'SELECT * FROM idem.stats', 'SELECT * FROM idem.queue_stats', 'SELECT * FROM idem.cleanup_progress',
	'SELECT * FROM idem.queue_latency', 'SELECT * FROM idem.queue_latency_buckets', 'SELECT * FROM idem_internal.idem_stat_latency()',
	'SELECT * FROM idem.worker_status', 'SELECT * FROM idem.health', 'SELECT * FROM idem_doctor()',
	'SELECT * FROM idem_internal.idem_stat_databases()', 'SELECT * FROM idem_internal.idem_stat_queues()', 'SELECT * FROM idem_internal.idem_stat_cleanup()',
	'SELECT * FROM idem_internal.idem_stat_worker()',
	'SELECT idem_stats_reset()', 'SELECT idem_cleanup()',
	'SELECT * FROM idem.key_summary', 'SELECT * FROM idem.queue_status',
	'SELECT * FROM idem.key_status', 'SELECT * FROM idem.lease_status', 'SELECT * FROM idem.job_status',
	'SELECT * FROM idem.keys', 'SELECT * FROM idem.jobs', 'SELECT * FROM idem.job_keys', 'SELECT * FROM idem.job_log',
	'UPDATE idem.stats SET claims = 0', 'DELETE FROM idem.queue_stats']) WITH ORDINALITY AS t (x, n);
CREATE TABLE tried (role name, ord int, answer text);
GRANT SELECT ON tries TO PUBLIC;
GRANT INSERT ON tried TO PUBLIC;
SET ROLE idem_stats_nobody;
INSERT INTO tried SELECT current_user, ord, try(what) FROM tries;
SET ROLE idem_stats_app;
INSERT INTO tried SELECT current_user, ord, try(what) FROM tries;
SET ROLE idem_stats_core;
INSERT INTO tried SELECT current_user, ord, try(what) FROM tries;
SET ROLE idem_stats_monitor;
INSERT INTO tried SELECT current_user, ord, try(what) FROM tries;
SET ROLE idem_stats_admin;
INSERT INTO tried SELECT current_user, ord, try(what) FROM tries;
RESET ROLE;
SELECT t.what,
	   max(answer) FILTER (WHERE role = 'idem_stats_nobody') AS nobody,
	   max(answer) FILTER (WHERE role = 'idem_stats_app') AS app,
	   max(answer) FILTER (WHERE role = 'idem_stats_core') AS pg_monitor,
	   max(answer) FILTER (WHERE role = 'idem_stats_monitor') AS monitor,
	   max(answer) FILTER (WHERE role = 'idem_stats_admin') AS admin
  FROM tries AS t JOIN tried USING (ord) GROUP BY t.ord, t.what ORDER BY t.ord;
-- the admin has reset them
SELECT sum(value) FROM counters();
-- they see the counters and the checks
SELECT status FROM idem_claim('monitored');
SET ROLE idem_stats_core;
SELECT claims FROM idem.stats WHERE datname = current_database();
SELECT count(*) > 1 AS checks FROM idem_doctor();
SET ROLE idem_stats_monitor;
SELECT claims FROM idem.stats WHERE datname = current_database();
SELECT count(*) > 1 AS checks FROM idem_doctor();
RESET ROLE;

-- no key, scope, request, result, payload, worker or error is visible
CALL anew();
SELECT status FROM idem_lease('secret key', '1 us', request => '"secret request"', worker => 'secret worker', on_expiry => 'park', scope => 'secret scope');
SELECT status FROM idem_lease('secret key', '1 us', scope => 'secret scope');
SELECT status FROM idem_lease('secret key 2', '1 us');
SELECT replayed FROM idem_call('secret key 3', 'stats_handler', '1');
SELECT outcome FROM idem_enqueue('open', '"secret payload"', 'secret job key');
SELECT outcome FROM idem_enqueue('open', '"secret payload"', 'secret job key');
SELECT idem_fail(job_id, token, 'secret error', dead => true) FROM idem_fetch('open', worker => 'secret worker');
CREATE VIEW shown AS
SELECT to_jsonb(s)::text AS line FROM idem.stats AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem.queue_stats AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem.queue_latency AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem.queue_latency_buckets AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem.cleanup_progress AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem.worker_status AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem_doctor() AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem.queue_status AS s
UNION ALL SELECT to_jsonb(s)::text FROM idem.key_summary AS s;
SELECT count(*) > 20 AS looked, count(*) FILTER (WHERE line ~ 'secret') AS secrets, count(*) FILTER (WHERE line ~ 'open') > 1 AS open FROM shown;

--
-- another database has its own counters, and a reset does not change them
--
CREATE DATABASE idem_stats_other;
\c idem_stats_other
SET client_min_messages = warning;
CREATE EXTENSION idem;
SELECT claims FROM idem.stats WHERE datname = current_database();
SELECT stats_reset IS NOT NULL AS since FROM idem.stats WHERE datname = current_database();
SELECT status FROM idem_claim('x');
SELECT status FROM idem_claim('x');
SELECT outcome FROM idem_enqueue('same name');
SELECT d.datname = current_database() AS here, s.claims, s.replays FROM idem.stats AS s JOIN pg_database AS d ON d.oid = s.datid AND d.datname = s.datname WHERE s.datname IN (current_database(), :'dbname') ORDER BY 1;
\c :dbname
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT outcome FROM idem_enqueue('same name');
SELECT outcome FROM idem_enqueue('same name');
SELECT datname = current_database() AS here, claims > 0 AS claims, replays FROM idem.stats WHERE datname IN ('idem_stats_other', current_database()) ORDER BY 1;
SELECT datname = current_database() AS here, enqueued FROM idem.queue_stats WHERE queue = 'same name' ORDER BY 1;
SELECT stats_reset AS other_before FROM idem.stats WHERE datname = 'idem_stats_other' \gset
SELECT idem_stats_reset();
SELECT sum(value) FROM counters();
SELECT claims, replays, stats_reset = :'other_before' AS not_reset FROM idem.stats WHERE datname = 'idem_stats_other';
SELECT datname = current_database() AS here, enqueued FROM idem.queue_stats WHERE queue = 'same name' ORDER BY 1;
SELECT count(DISTINCT stats_reset) AS resets FROM (SELECT stats_reset FROM idem.stats WHERE datname = current_database() UNION SELECT stats_reset FROM idem.queue_stats WHERE datname = current_database()) AS r;
-- and they continue from there
SELECT outcome FROM idem_enqueue('same name');
SELECT enqueued FROM idem.queue_stats WHERE queue = 'same name' AND datname = current_database();
DROP DATABASE idem_stats_other;

-- a session that uses many queues counts for each of them
SELECT count(*) FROM generate_series(1, 100) AS i CROSS JOIN LATERAL idem_enqueue('many ' || i);
SELECT count(*), min(enqueued), max(enqueued) FROM idem.queue_stats
 WHERE queue LIKE 'many %' AND datname = current_database();

DROP VIEW shown;
DROP FUNCTION try, moved, counters, stats_handler;
DROP TABLE tries, tried, fetched, seen;
SELECT idem_revoke('idem_stats_app', 'app'), idem_revoke('idem_stats_monitor', 'monitor'), idem_revoke('idem_stats_admin', 'admin');
DROP ROLE idem_stats_nobody, idem_stats_app, idem_stats_core, idem_stats_monitor, idem_stats_admin;
CALL anew();
