--
-- Scheduled jobs: delay and run_at, rule J8, include_scheduled, debounce.
-- Times are shown relative to the enqueue; the test sets idem.clock_offset instead of
-- waiting.
--
\a\pset footer off
\set VERBOSITY sqlstate
-- how long after its enqueue a job runs
CREATE FUNCTION runs_in(id bigint) RETURNS interval LANGUAGE sql AS
	$$ SELECT run_at - enqueued_at FROM idem_job(id) $$;
CALL anew();

-- delay and run_at
SELECT job_id, outcome FROM idem_enqueue('later', '1', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('later', '2', run_at => idem_clock() + interval '2 h');
SELECT job_id, outcome FROM idem_enqueue('later', '3', delay => '0');
SELECT job_id, outcome FROM idem_enqueue('later', '4', run_at => '2020-01-01 00:00:00+00');
SELECT job_id, outcome FROM idem_enqueue('later', '5', delay => '1 month 1 day');
SELECT runs_in(1) AS first, runs_in(3) AS third, runs_in(5) AS fifth;
SELECT run_at = '2020-01-01 00:00:00+00' AS long_ago FROM idem_job(4);
SELECT i, state FROM generate_series(1, 5) AS i, LATERAL idem_job(i) ORDER BY i;
-- they are not fetched before run_at
SELECT job_id FROM idem_fetch('later', 10, lease => '1 day');
SET idem.clock_offset = '59 min';
SELECT job_id FROM idem_fetch('later', 10, lease => '1 day');
SET idem.clock_offset = '61 min';
SELECT state FROM idem_job(1);
SELECT job_id FROM idem_fetch('later', 10, lease => '1 day');
SET idem.clock_offset = '121 min';
SELECT job_id FROM idem_fetch('later', 10, lease => '1 day');
SET idem.clock_offset = '743 h';
SELECT job_id FROM idem_fetch('later', 10, lease => '1 day');
SET idem.clock_offset = '745 h';
SELECT job_id FROM idem_fetch('later', 10, lease => '1 day');
RESET idem.clock_offset;

-- J8: scheduled jobs neither take nor respect the key
CALL anew();
SELECT job_id, outcome FROM idem_enqueue('j8', '1', 'k', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('j8', '2', 'k', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('j8', '3', 'k');
SELECT job_id, outcome FROM idem_enqueue('j8', '4', 'k');
SELECT job_id, outcome FROM idem_enqueue('j8', '5', 'k', run_at => idem_clock() + interval '1 min', on_duplicate => 'error');
SELECT job_id, outcome FROM idem_enqueue('j8', '6', 'k', include_scheduled => false, delay => '1 min', on_duplicate => 'replace');
-- a job that is due at once does, with every way to say so
SELECT job_id, outcome FROM idem_enqueue('j8', '7', 'k', delay => '0');
SELECT job_id, outcome FROM idem_enqueue('j8', '8', 'k', run_at => '2020-01-01 00:00:00+00');
-- when they become due they still do not hold the key
SELECT job_id, token FROM idem_fetch('j8', 10) \gset
SELECT idem_complete(:job_id, :token);
SET idem.clock_offset = '2 h';
SELECT count(*) FROM idem_job(1) AS a, idem_job(2) AS b WHERE a.state = 'waiting' AND b.state = 'waiting';
SELECT job_id, outcome FROM idem_enqueue('j8', '9', 'k');
SELECT job_id, key, payload FROM idem_fetch('j8', 10, lease => '1 h') ORDER BY job_id;
-- and do not conflict with other jobs when they run
SELECT job_id, outcome FROM idem_enqueue('j8', '10', 'k', 'until_executed');
RESET idem.clock_offset;
-- idem_retry does not give them the key that they never had; a job that had its key gets it again
CALL anew();
SELECT job_id, outcome FROM idem_enqueue('j8', '1', 'k', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('j8', '2', 'l');
SELECT job_id, outcome FROM idem_enqueue('j8', '3', 'm', delay => '1 h', include_scheduled => true);
SELECT job_id, outcome FROM idem_enqueue('j8', '4');
SELECT idem_cancel(1), idem_cancel(2), idem_cancel(3), idem_cancel(4);
SELECT job_id, key, took_key FROM idem.job_log ORDER BY job_id;
SELECT idem_retry(1), idem_retry(2), idem_retry(3), idem_retry(4);
SELECT job_id, outcome FROM idem_enqueue('j8', '5', 'k');
SELECT job_id, outcome FROM idem_enqueue('j8', '6', 'l');
SELECT job_id, outcome FROM idem_enqueue('j8', '7', 'm');
SELECT job_id, key, payload FROM idem_fetch('j8', 10, lease => '1 h') ORDER BY job_id;

-- include_scheduled: they take and respect the key
CALL anew();
SELECT job_id, outcome FROM idem_enqueue('incl', '1', 'k', delay => '2 h', include_scheduled => true);
SELECT job_version(1) AS before \gset
SELECT job_id, outcome FROM idem_enqueue('incl', '2', 'k', delay => '3 h', include_scheduled => true);
-- J12: the duplicate is not due earlier, so nothing is written
SELECT job_version(1) = :'before' AS untouched, runs_in(1);
-- an earlier duplicate pulls the job forward, but the job keeps its payload
SELECT job_id, outcome FROM idem_enqueue('incl', '3', 'k', run_at => (SELECT enqueued_at + interval '1 h' FROM idem_job(1)), include_scheduled => true);
SELECT runs_in(1), state, payload FROM idem_job(1);
-- without include_scheduled it is another job
SELECT job_id, outcome FROM idem_enqueue('incl', '4', 'k', delay => '1 min');
SELECT runs_in(1);
-- a duplicate that is due at once does not need include_scheduled
SELECT job_id, outcome FROM idem_enqueue('incl', '5', 'k');
SELECT runs_in(1) < interval '1 min' AS pulled, state, payload FROM idem_job(1);
SELECT job_version(1) AS before \gset
SELECT job_id, outcome FROM idem_enqueue('incl', '6', 'k');
SELECT job_id, outcome FROM idem_enqueue('incl', '7', 'k', delay => '1 h', include_scheduled => true);
-- a job that is due is not pulled
SELECT job_id, outcome FROM idem_enqueue('incl', '7', 'k', run_at => '2020-01-01 00:00:00+00');
SELECT job_version(1) = :'before' AS untouched;
SELECT job_id, payload, attempt FROM idem_fetch('incl', 10, lease => '1 h');
-- now it runs, and the next scheduled job takes the key
SELECT job_id, outcome FROM idem_enqueue('incl', '8', 'k', delay => '2 h', include_scheduled => true);
SELECT job_id, outcome FROM idem_enqueue('incl', '9', 'k', delay => '3 h', include_scheduled => true);
-- replace: the newest payload counts, and the job is not due later than before
SELECT job_id, outcome FROM idem_enqueue('incl', '10', 'k', on_duplicate => 'replace', delay => '3 h', include_scheduled => true);
SELECT runs_in(3), payload FROM idem_job(3);
SELECT job_id, outcome FROM idem_enqueue('incl', '11', 'k', on_duplicate => 'replace',
	run_at => (SELECT enqueued_at + interval '1 h' FROM idem_job(3)), include_scheduled => true);
SELECT runs_in(3), payload FROM idem_job(3);
SELECT job_id, outcome FROM idem_enqueue('incl', '12', 'k', on_duplicate => 'replace');
SELECT runs_in(3) < interval '1 min' AS pulled, state, payload FROM idem_job(3);
-- a retry is not pulled forward: the backoff counts
SELECT job_id, token FROM idem_fetch('incl', lease => '1 h') \gset
SELECT idem_fail(:job_id, :token, retry_in => '2 h');
SELECT run_at FROM idem_job(3) \gset
SELECT job_version(3) AS before \gset
SELECT job_id, outcome FROM idem_enqueue('incl', '13', 'k');
SELECT job_version(3) = :'before' AS untouched;
SELECT job_id, outcome FROM idem_enqueue('incl', '14', 'k', on_duplicate => 'replace');
SELECT run_at = :'run_at' AS not_pulled, payload FROM idem_job(3);
-- the more urgent priority and the earlier time count
CALL anew();
SELECT job_id FROM idem_enqueue('prio', '1', 'k', delay => '1 h', include_scheduled => true, priority => 5);
SELECT job_id FROM idem_enqueue('prio', '2', priority => 1);
SELECT job_id, outcome FROM idem_enqueue('prio', '3', 'k', run_at => '2020-01-01 00:00:00+00', priority => 2);
SELECT run_at = '2020-01-01 00:00:00+00' AS long_ago, priority, payload FROM idem_job(1);
-- J12: a duplicate that is less urgent or equally urgent writes nothing
SELECT job_version(1) AS before \gset
SELECT job_id, outcome FROM idem_enqueue('prio', '4', 'k', priority => 2);
SELECT job_id, outcome FROM idem_enqueue('prio', '4', 'k', priority => 3);
SELECT job_version(1) = :'before' AS untouched;
-- a more urgent duplicate writes, even if the job is due; no priority means 0
SELECT job_id, outcome FROM idem_enqueue('prio', '5', 'k');
SELECT priority, payload FROM idem_job(1);
SELECT job_id, payload FROM idem_fetch('prio', 10);
-- the same with replace, debounce and rerun; error changes nothing
SELECT job_id, outcome FROM idem_enqueue('prio', '1', 'l', priority => 9);
SELECT job_id, outcome FROM idem_enqueue('prio', '2', 'l', on_duplicate => 'replace', priority => 8);
SELECT job_id, outcome FROM idem_enqueue('prio', '3', 'l', on_duplicate => 'debounce', delay => '1 min', priority => 7);
SELECT job_id, outcome FROM idem_enqueue('prio', '4', 'l', on_duplicate => 'replace', priority => 9);
SELECT job_id FROM idem_enqueue('prio', '5', 'l', on_duplicate => 'error', priority => 1);
SELECT priority, payload FROM idem_job(3);
SELECT job_id, outcome FROM idem_enqueue('prio', '1', 'm', 'until_executed', priority => 4);
SELECT job_id FROM idem_fetch('prio', lease => '1 h');
SELECT job_id FROM idem_fetch('prio', lease => '1 h');
SELECT job_id FROM idem_fetch('prio', lease => '1 h');
SELECT job_id, outcome FROM idem_enqueue('prio', '2', 'm', 'until_executed', if_running => 'rerun', priority => 6);
SELECT job_id, outcome FROM idem_enqueue('prio', '3', 'm', 'until_executed', if_running => 'rerun', priority => 5);
SELECT priority, payload FROM idem_job(5);
-- after the first attempt the job keeps its place
CALL anew();
SELECT job_id FROM idem_enqueue('prio', '1', 'k', priority => 5);
SELECT job_id, token FROM idem_fetch('prio', lease => '1 h') \gset
SELECT idem_fail(:job_id, :token, retry_in => '0');
SELECT job_version(1) AS before \gset
SELECT job_id, outcome FROM idem_enqueue('prio', '2', 'k', priority => 1);
SELECT job_version(1) = :'before' AS untouched;
SELECT job_id, outcome FROM idem_enqueue('prio', '3', 'k', on_duplicate => 'replace', priority => 1);
SELECT priority, payload FROM idem_job(1);

-- J8: a run_at at most five seconds ahead (the clock of a client): the job takes and respects the key
CALL anew();
SELECT job_id, outcome FROM idem_enqueue('near', '1', 'k', run_at => idem_clock() + interval '4.9 s');
SELECT runs_in(1) > interval '1 s' AS later;
SELECT job_id, outcome FROM idem_enqueue('near', '2', 'k', run_at => idem_clock() + interval '4.9 s');
SELECT job_id, outcome FROM idem_enqueue('near', '2', 'k', run_at => idem_clock() + interval '4.9 s', on_duplicate => 'error');
SELECT job_id, outcome FROM idem_enqueue_many('near', '{3,4}', '{k,l}', run_at => idem_clock() + interval '4.9 s');
-- it still starts at run_at
SET idem.clock_offset = '-1 min';
SELECT job_id FROM idem_fetch('near', 10);
SET idem.clock_offset = '1 min';
SELECT job_id, payload FROM idem_fetch('near', 10);
RESET idem.clock_offset;
-- a waiting job absorbs it
SELECT job_id, outcome FROM idem_enqueue('near', '1', 'm');
SELECT job_id, outcome FROM idem_enqueue('near', '2', 'm', run_at => idem_clock() + interval '4.9 s');
-- and it absorbs a duplicate that is due at once
SELECT job_id, outcome FROM idem_enqueue('near', '1', 'n', run_at => idem_clock() + interval '4.9 s');
SELECT job_id, outcome FROM idem_enqueue('near', '2', 'n');
-- with more than five seconds, or with a delay, it is a scheduled job
SELECT job_id, outcome FROM idem_enqueue('near', '3', 'm', run_at => idem_clock() + interval '10 s');
SELECT job_id, outcome FROM idem_enqueue('near', '4', 'm', delay => '1 s');
SELECT job_id, outcome FROM idem_enqueue('near', '5', 'm', delay => '1 us');

-- error
CALL anew();
SELECT job_id FROM idem_enqueue('incl', '1', 'k', delay => '1 h', include_scheduled => true);
SELECT job_version(1) AS before \gset
SELECT job_id FROM idem_enqueue('incl', '2', 'k', on_duplicate => 'error');
SELECT job_id FROM idem_enqueue('incl', '2', 'k', delay => '1 min', include_scheduled => true, on_duplicate => 'error');
SELECT job_version(1) = :'before' AS untouched;
-- the pull is part of the transaction
BEGIN;
SELECT outcome FROM idem_enqueue('incl', '2', 'k');
SELECT state FROM idem_job(1);
ROLLBACK;
SELECT state FROM idem_job(1);
-- the transaction may fetch the job itself
BEGIN;
SELECT outcome FROM idem_enqueue('incl', '2', 'k');
SELECT job_id FROM idem_fetch('incl');
ROLLBACK;
-- the same with until_executed and until_expired
SELECT job_id, outcome FROM idem_enqueue('incl', '3', 'k', 'until_executed');
SELECT state FROM idem_job(1);
SELECT job_id, outcome FROM idem_enqueue('incl', '1', 'l', 'until_expired', key_ttl => '1 h', delay => '1 h', include_scheduled => true);
SELECT job_id, outcome FROM idem_enqueue('incl', '2', 'l', 'until_expired', key_ttl => '1 h');
SELECT state FROM idem_job(2);

-- debounce: the job is postponed, and the newest payload counts
CALL anew();
SELECT job_id, outcome FROM idem_enqueue('deb', '1', 'k', on_duplicate => 'debounce', delay => '10 min');
SELECT runs_in(1), state, payload FROM idem_job(1);
SELECT enqueued_at FROM idem_job(1) \gset
SELECT job_id, outcome FROM idem_enqueue('deb', '2', 'k', on_duplicate => 'debounce', run_at => :'enqueued_at'::timestamptz + '20 min');
SELECT runs_in(1), payload FROM idem_job(1);
-- never to an earlier time
SELECT job_id, outcome FROM idem_enqueue('deb', '3', 'k', on_duplicate => 'debounce', run_at => :'enqueued_at'::timestamptz + '15 min');
SELECT runs_in(1), payload FROM idem_job(1);
SELECT job_id, outcome FROM idem_enqueue('deb', '4', 'k', on_duplicate => 'debounce', delay => '0');
SELECT runs_in(1), payload FROM idem_job(1);
-- it slides with the clock
SET idem.clock_offset = '18 min';
SELECT job_id, outcome FROM idem_enqueue('deb', '5', 'k', on_duplicate => 'debounce', delay => '10 min');
SELECT runs_in(1) BETWEEN '28 min' AND '29 min' AS pushed, payload FROM idem_job(1);
-- by default up to one hour after the first enqueue
SET idem.clock_offset = '27 min';
SELECT job_id, outcome FROM idem_enqueue('deb', '6', 'k', on_duplicate => 'debounce', delay => '1 day');
SELECT runs_in(1), payload FROM idem_job(1);
SET idem.clock_offset = '59 min';
SELECT job_id, outcome FROM idem_enqueue('deb', '7', 'k', on_duplicate => 'debounce', delay => '10 min');
SELECT runs_in(1), payload FROM idem_job(1);
SELECT job_id FROM idem_fetch('deb');
-- a job that is due still absorbs, but is not postponed beyond that hour
SET idem.clock_offset = '61 min';
SELECT state FROM idem_job(1);
SELECT job_id, outcome FROM idem_enqueue('deb', '8', 'k', on_duplicate => 'debounce', delay => '10 min');
SELECT runs_in(1), state FROM idem_job(1);
SELECT job_id, payload FROM idem_fetch('deb', lease => '1 h');
-- while it runs, the next enqueue creates a new job
SELECT job_id, outcome FROM idem_enqueue('deb', '9', 'k', on_duplicate => 'debounce', delay => '10 min');
SELECT runs_in(2);
RESET idem.clock_offset;
-- a job that is due is postponed as well
SELECT job_id, outcome FROM idem_enqueue('deb', '1', 'l');
SELECT job_id, outcome FROM idem_enqueue('deb', '2', 'l', on_duplicate => 'debounce', run_at => (SELECT enqueued_at + interval '5 min' FROM idem_job(3)));
SELECT runs_in(3), payload FROM idem_job(3);
-- a job that is due later than the maximum keeps its time
SELECT job_id, outcome FROM idem_enqueue('deb', '1', 'm', delay => '3 h', include_scheduled => true);
SELECT job_id, outcome FROM idem_enqueue('deb', '2', 'm', on_duplicate => 'debounce', delay => '4 h');
SELECT runs_in(4), payload FROM idem_job(4);
-- a scheduled job that did not take its key does not absorb
SELECT job_id, outcome FROM idem_enqueue('deb', '1', 'n', delay => '1 h');
SELECT job_id, outcome FROM idem_enqueue('deb', '2', 'n', on_duplicate => 'debounce', delay => '10 min');
SELECT job_id, outcome FROM idem_enqueue('deb', '3', 'n', on_duplicate => 'debounce', delay => '10 min', include_scheduled => true);
-- without debounce the same job absorbs or is pulled forward as usual
SELECT job_id, outcome FROM idem_enqueue('deb', '4', 'n');
SELECT state, payload FROM idem_job(6);
-- rollback
BEGIN;
SELECT outcome FROM idem_enqueue('deb', '5', 'n', on_duplicate => 'debounce', delay => '10 min');
ROLLBACK;
SELECT state, payload FROM idem_job(6);
-- the queue sets the maximum
CALL anew();
SELECT idem_queue_set('deb', on_duplicate => 'debounce', debounce_max => '30 min');
SELECT job_id, outcome FROM idem_enqueue('deb', '1', 'k', delay => '10 min');
SELECT job_id, outcome FROM idem_enqueue('deb', '2', 'k', delay => '1 h');
SELECT runs_in(1), payload FROM idem_job(1);
SELECT idem_queue_set('deb', debounce_max => '45 min');
SELECT job_id, outcome FROM idem_enqueue('deb', '3', 'k', delay => '1 h');
SELECT runs_in(1), payload FROM idem_job(1);
SELECT idem_queue_set('deb', debounce_max => '20 min');
SELECT job_id, outcome FROM idem_enqueue('deb', '4', 'k', delay => '1 h');
SELECT runs_in(1), payload FROM idem_job(1);

-- snooze: the job keeps its key while it waits, and a duplicate does not pull it forward
CALL anew();
SELECT job_id FROM idem_enqueue('wait', '1', 'k');
SELECT job_id, token FROM idem_fetch('wait', lease => '1 h') \gset
SELECT idem_snooze(:job_id, :token, '1 h') > idem_clock() AS snoozed;
SELECT job_id, outcome FROM idem_enqueue('wait', '2', 'k', delay => '2 h', include_scheduled => true);
SELECT state FROM idem_job(1);
SELECT job_version(1) AS before \gset
SELECT job_id, outcome FROM idem_enqueue('wait', '3', 'k');
SELECT job_version(1) = :'before' AS untouched;
SELECT job_id, outcome FROM idem_enqueue('wait', '4', 'k', on_duplicate => 'replace');
SELECT state, payload, attempt FROM idem_job(1);
CALL anew();
DROP FUNCTION runs_in;
