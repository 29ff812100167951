--
-- Histograms: rule S5, how long jobs wait and run.
--
-- idem.clock_offset moves the clock by hours, and the buckets are hours wide, so it does not
-- matter how long the statements take.  After each step moved() shows which buckets have moved
-- since it was last asked, and by how much; fits: the sum has moved by times of these buckets.
--
\a\pset footer off
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CALL anew();
SELECT idem_stats_reset();

-- 3 hours are in the bucket up to 16384 s, 12 hours in the one up to 65536 s
CREATE VIEW buckets AS
SELECT queue, kind, le, coalesce(lag(le) OVER w, 0) AS above, count - coalesce(lag(count) OVER w, 0) AS n, total_seconds
  FROM idem.queue_latency_buckets
 WHERE datname = current_database()
WINDOW w AS (PARTITION BY queue, kind ORDER BY le);
CREATE TABLE seen AS SELECT * FROM buckets;
CREATE FUNCTION moved(OUT queue text, OUT kind text, OUT moved text, OUT fits boolean) RETURNS SETOF record LANGUAGE plpgsql AS $$
BEGIN
	CREATE TEMP TABLE now ON COMMIT DROP AS SELECT * FROM buckets;
	RETURN QUERY
	SELECT d.queue, d.kind, string_agg(format('%s +%s', d.le, d.by), ', ' ORDER BY d.le),
		   max(d.total) >= sum(d.by * d.above) AND max(d.total) <= sum(d.by * d.le)
	  FROM (SELECT n.queue, n.kind, n.le, n.above, n.n - coalesce(s.n, 0) AS by,
				   n.total_seconds - coalesce(s.total_seconds, 0) AS total
			  FROM now AS n LEFT JOIN seen AS s USING (queue, kind, le)) AS d
	 WHERE d.by <> 0
	 GROUP BY d.queue, d.kind ORDER BY d.queue, d.kind DESC;
	DELETE FROM seen;
	INSERT INTO seen SELECT * FROM now;
	DROP TABLE now;
END $$;

--
-- the views
--
SELECT idem_queue_set('only declared');
SELECT outcome FROM idem_enqueue('q', '1');
SELECT queue, kind, count, total_seconds, p50_seconds, p90_seconds, p99_seconds, stats_reset <= clock_timestamp() AS reset
  FROM idem.queue_latency WHERE datname = current_database() AND queue IN ('q', 'only declared');
SELECT kind, count(*), min(le), max(le) FILTER (WHERE le < 'Infinity') AS last, max(le), bool_and(le IN (2 * above, 'Infinity')) AS doubles, sum(n)
  FROM buckets WHERE queue = 'q' AND above > 0 GROUP BY kind ORDER BY kind;
SELECT kind, le FROM buckets WHERE queue = 'q' AND above = 0 ORDER BY kind;
SELECT * FROM moved();

--
-- wait: from when the job was due; run: to the end of the attempt
--
SET idem.clock_offset = '3 h';
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT * FROM moved();
SET idem.clock_offset = '15 h';
SELECT idem_complete(:job_id, :token);
SELECT * FROM moved();
-- a call with the old token has measured nothing
SELECT idem_complete(:job_id, :token);
SELECT * FROM moved();
RESET idem.clock_offset;
-- scheduled: due at its time; due before it was enqueued: due since then
SELECT outcome FROM idem_enqueue('q', delay => '9 h');
SET idem.clock_offset = '12 h';
SELECT idem_complete(job_id, token) FROM idem_fetch('q', lease => '1 h');
SELECT queue, kind, CASE kind WHEN 'wait' THEN moved END AS moved, fits FROM moved();
RESET idem.clock_offset;
SELECT outcome FROM idem_enqueue('q', run_at => '2000-01-01');
SET idem.clock_offset = '3 h';
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT * FROM moved();
-- renewed and progress: the attempt has not ended
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '1 h');
SELECT idem_progress(:job_id, :token, '1', lease => '1 h') > now() AS renewed;
SELECT * FROM moved();
-- the lease has expired, but the worker still completes the job
SET idem.clock_offset = '15 h';
SELECT idem_complete(:job_id, :token);
SELECT * FROM moved();
RESET idem.clock_offset;
-- several, by one call
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3,4}');
SET idem.clock_offset = '3 h';
CREATE TABLE fetched AS SELECT job_id, token FROM idem_fetch('q', 3, lease => '1 h');
SELECT * FROM moved();
SET idem.clock_offset = '15 h';
SELECT status, count(*) FROM idem_complete_many(ARRAY(SELECT job_id FROM fetched), ARRAY(SELECT token FROM fetched)) GROUP BY 1;
SELECT * FROM moved();
-- without a lease, in one transaction, and of several queues
SELECT outcome FROM idem_enqueue('q 2');
SET idem.clock_offset = '27 h';
BEGIN;
CREATE TABLE fetched_2 AS SELECT job_id, token FROM idem_fetch_any('{q,q 2}', 2);
SET LOCAL idem.clock_offset = '30 h';
SELECT count(idem_complete(job_id, token)) FROM fetched_2;
COMMIT;
SELECT * FROM moved();
RESET idem.clock_offset;

--
-- rolled back: measured all the same; and again
--
SELECT outcome FROM idem_enqueue('q');
SET idem.clock_offset = '3 h';
BEGIN;
SELECT count(*) FROM idem_fetch('q', lease => '1 h');
ROLLBACK;
SELECT * FROM moved();
SET idem.clock_offset = '12 h';
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT * FROM moved();
SET idem.clock_offset = '15 h';
BEGIN;
SELECT idem_complete(:job_id, :token);
ROLLBACK;
SELECT * FROM moved();
BEGIN;
SAVEPOINT s;
SELECT idem_fail(:job_id, :token, retry_in => '9 h');
ROLLBACK TO s;
COMMIT;
SELECT * FROM moved();

--
-- retry: due when the delay has passed
--
SET idem.clock_offset = '24 h';
SELECT idem_fail(:job_id, :token, retry_in => '9 h');
SELECT * FROM moved();
SET idem.clock_offset = '36 h';
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT * FROM moved();
-- snoozed: the worker had it, so that is a run; due when the delay has passed
SET idem.clock_offset = '39 h';
SELECT idem_snooze(:job_id, :token, '12 h') IS NOT NULL AS snoozed;
SELECT * FROM moved();
SET idem.clock_offset = '54 h';
SELECT job_id, token FROM idem_fetch('q', lease => '9 h') \gset
SELECT * FROM moved();
-- expired lease: due since its end; how long the worker ran is not known
SET idem.clock_offset = '66 h';
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT * FROM moved();
-- dead by the worker; put back by an operator
SET idem.clock_offset = '69 h';
SELECT idem_fail(:job_id, :token, dead => true);
SELECT * FROM moved();
SET idem.clock_offset = '100 h';
SELECT idem_retry(:job_id);
SET idem.clock_offset = '103 h';
SELECT count(*) FROM idem_fetch('q', lease => '1 h');
SELECT * FROM moved();
-- cancelled: not the worker has ended it
SELECT idem_cancel(:job_id);
SELECT * FROM moved();
RESET idem.clock_offset;
-- given back or made dead by an operator, whether the lease has expired or not: no run; by a worker: one
SELECT count(*) FROM idem_enqueue_many('operator', '{1,2,3,4,5,6}');
SET idem.clock_offset = '3 h';
SELECT count(*) FROM idem_fetch('operator', 3, lease => '1 h', worker => 'short');
CREATE TABLE fetched_3 AS SELECT job_id, token FROM idem_fetch('operator', 3, lease => '100 h', worker => 'long');
SELECT * FROM moved();
SET idem.clock_offset = '15 h';
SELECT idem_snooze_many(queue => 'operator', worker => 'short', delay => '1000 h', max_jobs => 1);
SELECT idem_fail_many(queue => 'operator', worker => 'short', retry_in => '1000 h', max_jobs => 1);
SELECT idem_fail_many(queue => 'operator', worker => 'short', dead => true);
SELECT idem_fail_many(queue => 'operator', worker => 'long', retry_in => '1000 h', max_jobs => 1);
SELECT * FROM moved();
SELECT idem_snooze_many(array_agg(job_id), array_agg(token), '1000 h') FROM (SELECT * FROM fetched_3 ORDER BY job_id LIMIT 2) AS f;
SELECT idem_fail_many(array_agg(job_id), array_agg(token), 'no', '1000 h') FROM fetched_3;
SELECT * FROM moved();
SELECT snoozed, failed FROM idem.queue_stats WHERE datname = current_database() AND queue = 'operator';
RESET idem.clock_offset;
-- dead because the lease of the last attempt has expired: neither a fetch nor an end
SELECT outcome FROM idem_enqueue('q', max_attempts => 1);
SET idem.clock_offset = '3 h';
SELECT count(*) FROM idem_fetch('q', lease => '1 h');
SELECT * FROM moved();
SET idem.clock_offset = '6 h';
SELECT count(*) FROM idem_fetch('q', lease => '1 h');
SELECT * FROM moved();
RESET idem.clock_offset;
-- a follow-up job: the time that it was blocked counts
SELECT outcome FROM idem_enqueue('q', key => 'k');
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT outcome FROM idem_enqueue('q', key => 'k', dedup => 'until_executed', if_running => 'rerun');
SELECT count(*) FROM moved();
SET idem.clock_offset = '12 h';
SELECT idem_complete(:job_id, :token);
SELECT idem_complete(job_id, token) FROM idem_fetch('q', lease => '1 h');
SELECT kind, CASE kind WHEN 'wait' THEN moved END AS wait, fits FROM moved();
RESET idem.clock_offset;

--
-- the clock was set back: zero
--
SET idem.clock_offset = '3 h';
SELECT now() AS real_now \gset
SELECT outcome FROM idem_enqueue('back', run_at => :'real_now');
RESET idem.clock_offset;
SELECT job_id, token FROM idem_fetch('back', lease => '1 h') \gset
SELECT * FROM moved();
SELECT idem_cancel(:job_id);
SELECT outcome FROM idem_enqueue('back');
SET idem.clock_offset = '3 h';
SELECT job_id, token FROM idem_fetch('back', lease => '1 h') \gset
SELECT * FROM moved();
RESET idem.clock_offset;
SELECT idem_complete(:job_id, :token);
SELECT * FROM moved();

--
-- short times: each is in the bucket whose bounds enclose it
--
CREATE FUNCTION short_times(n int) RETURNS TABLE (kind text, jobs bigint, fitting bigint) LANGUAGE plpgsql AS $$
BEGIN
	CREATE TEMP TABLE moves (kind text, moved text, fits boolean);
	PERFORM moved();
	FOR i IN 1..n LOOP
		PERFORM idem_enqueue('short');
		PERFORM count(*) FROM generate_series(1, (i * i) % 5000);
		CREATE TEMP TABLE got AS SELECT * FROM idem_fetch('short');
		PERFORM count(*) FROM generate_series(1, (i * i * 7) % 5000);
		PERFORM idem_complete(job_id, token) FROM got;
		DROP TABLE got;
		INSERT INTO moves SELECT s.kind, s.moved, s.fits FROM moved() AS s WHERE s.queue = 'short';
	END LOOP;
	RETURN QUERY SELECT s.kind, count(*), count(*) FILTER (WHERE s.moved LIKE '% +1' AND s.fits) FROM moves AS s GROUP BY 1 ORDER BY 1;
END $$;
SELECT outcome, idem_cancel(job_id) FROM idem_enqueue('short');
SELECT * FROM short_times(30);

--
-- long times, and estimates
--
SELECT idem_stats_reset();
SELECT count(*) AS not_reset FROM idem.queue_latency_buckets WHERE datname = current_database() AND (count <> 0 OR total_seconds <> 0);
DELETE FROM seen;
SELECT outcome FROM idem_enqueue('long');
SET idem.clock_offset = '144 h';
SELECT job_id, token FROM idem_fetch('long', lease => '1 h') \gset
SELECT * FROM moved();
SET idem.clock_offset = '312 h';
SELECT idem_complete(:job_id, :token);
SELECT * FROM moved();
RESET idem.clock_offset;
-- the last bucket has no bound: at least so long
SELECT kind, count, round(total_seconds / 3600) AS hours, p50_seconds, p90_seconds, p99_seconds FROM idem.queue_latency
 WHERE datname = current_database() AND queue = 'long' ORDER BY kind;
-- 8 of 3 hours and 2 of 12 hours: the median is 5/8 of the way from 8192 to 16384
SELECT count(*) FROM idem_enqueue_many('part', array_fill('1'::jsonb, '{10}'));
SET idem.clock_offset = '3 h';
SELECT count(*) FROM idem_fetch('part', 8, lease => '100 h');
SET idem.clock_offset = '12 h';
SELECT count(*) FROM idem_fetch('part', 8, lease => '100 h');
RESET idem.clock_offset;
SELECT kind, count, round(total_seconds / 3600) AS hours, p50_seconds, p90_seconds, round(p99_seconds::numeric, 1) AS p99_seconds FROM idem.queue_latency
 WHERE datname = current_database() AND queue = 'part' ORDER BY kind;
SELECT le, count FROM idem.queue_latency_buckets
 WHERE datname = current_database() AND queue = 'part' AND kind = 'wait' AND le BETWEEN 8192 AND 65536 ORDER BY le;

DROP VIEW buckets;
DROP TABLE seen, fetched, fetched_2, fetched_3;
DROP FUNCTION moved, short_times;
CALL anew();
