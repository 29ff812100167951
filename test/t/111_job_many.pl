# J20, J19: bulk calls and calls by key, beside producers and workers, in many sessions: no change
# is overlooked (J2), no job is done twice, and nothing deadlocks.
#
# A producer notes a change of a key and enqueues a job for the key, in one transaction; most of
# these enqueues are duplicates.  A worker marks the changes of the key of its job that it can
# see, in the transaction that completes the job.  Meanwhile others cancel, retry, fail, snooze
# and reschedule the jobs of the queue, in transactions that commit or roll back.  At the end all
# cancelled and dead jobs are retried and done: every change must be marked then.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'job_many',
	conf => q{
shared_preload_libraries = 'idem'
max_connections = 40
deadlock_timeout = 100ms
idem.drain_after = 50ms
});

$node->safe_psql(
	'postgres', q{
	SELECT idem_queue_set('q', keep => '1 day', max_attempts => 3);
	CREATE TABLE changes (key text, seen boolean DEFAULT false);
	CREATE INDEX ON changes (key) WHERE NOT seen;
	CREATE TABLE done (job_id bigint PRIMARY KEY);

	-- fetch jobs with a lease, and do each of them in a transaction of its own
	CREATE PROCEDURE work(batch int) LANGUAGE plpgsql AS $$
	DECLARE
		f record;
	BEGIN
		FOR f IN SELECT * FROM idem_fetch('q', batch, '1 h', 'w' || trunc(random() * 4)) LOOP
			COMMIT;
			BEGIN
				UPDATE changes SET seen = true WHERE key = f.key AND NOT seen;
				PERFORM idem_complete(f.job_id, f.token);
				INSERT INTO done VALUES (f.job_id);
			EXCEPTION WHEN SQLSTATE 'ID003' THEN
				-- an operator has taken the job away
			END;
			COMMIT;
		END LOOP;
	END $$;

	CREATE FUNCTION choose(VARIADIC words text[]) RETURNS text LANGUAGE sql VOLATILE AS $$
		SELECT words[1 + trunc(random() * cardinality(words))] $$;
	CREATE FUNCTION ids() RETURNS bigint[] LANGUAGE sql VOLATILE AS $$
		SELECT array_agg(job_id) FROM (SELECT job_id FROM idem.job_status WHERE state <> 'done' ORDER BY random() LIMIT 4) AS j $$;
	-- one call of an operator
	CREATE FUNCTION operate() RETURNS int LANGUAGE plpgsql AS $$
	BEGIN
		RETURN CASE trunc(random() * 11)
			WHEN 0 THEN idem_cancel_many(queue => 'q', state => choose('waiting', 'scheduled', 'running', 'blocked', NULL), max_jobs => 3)
			WHEN 1 THEN idem_cancel_many(coalesce(ids(), '{}'))
			WHEN 2 THEN idem_retry_many(queue => 'q', state => choose('dead', 'cancelled'), max_jobs => 5)
			WHEN 3 THEN idem_retry_many(coalesce(ids(), '{}'))
			WHEN 4 THEN idem_fail_many(queue => 'q', worker => choose('w0', 'w1', NULL), retry_in => '0', max_jobs => 3)
			WHEN 5 THEN idem_fail_many(queue => 'q', dead => true, max_jobs => 1)
			WHEN 6 THEN idem_snooze_many(queue => 'q', delay => choose('0', '10 ms')::interval, worker => choose('w2', 'w3'), max_jobs => 3)
			WHEN 7 THEN idem_reschedule_many(queue => 'q', priority => trunc(random() * 5)::int, max_jobs => 5)
			WHEN 8 THEN idem_reschedule_many(coalesce(ids(), '{}'), run_at => now() + choose('0', '20 ms', '-1 h')::interval)
			WHEN 9 THEN idem_cancel_by_key('q', 'k' || trunc(random() * 12))
			ELSE (SELECT count(*) FROM idem_job_by_key('q', 'k' || trunc(random() * 12)))
		END;
	END $$;
});

sub enqueue
{
	my ($end, $more) = @_;

	return q{\set key random(0, 11)
		BEGIN;
		INSERT INTO changes VALUES ('k' || :key);
		SELECT idem_enqueue('q', key => 'k' || :key} . $more . qq{);
		$end;
	};
}

# how many kinds of calls have changed jobs
my $kinds = q{SELECT count(*) FROM (VALUES ('cancelled'), ('retried'), ('failed'), ('snoozed'), ('dead')) AS v (n), idem.queue_stats AS s WHERE s.queue = 'q' AND (to_jsonb(s) ->> n)::int > 0};

# on a busy machine one round may meet no job that runs
foreach my $round (1 .. 5)
{
	ok( pgbench_run(
			$node,
			[ '--client=12', '--jobs=2', '--transactions=' . ($ENV{IDEM_MANY} // 250) ],
			[
				[ enqueue('COMMIT', ''), 4 ],
				[ enqueue('COMMIT', q{, dedup => 'until_executed', if_running => 'rerun'}), 2 ],
				[ enqueue('COMMIT', q{, on_duplicate => 'replace', priority => (random() * 9)::int}), 2 ],
				[ enqueue('ROLLBACK', ''), 1 ],
				[ "CALL work(3);\n", 6 ],
				[ "SELECT operate();\n", 6 ],
				[ "BEGIN; SELECT operate(); ROLLBACK;\n", 2 ]
			]),
		'bulk calls beside producers and workers');
	last if $node->safe_psql('postgres', $kinds) == 5;
}
unlike(slurp_file($node->logfile), qr/\] (40P01|23505|XX000) /, 'J20: no deadlock, no unique violation, no internal error');

# J20: repeated calls come to an end
$node->safe_psql(
	'postgres', q{
	DO $$
	BEGIN
		WHILE idem_fail_many(queue => 'q', retry_in => '0', max_jobs => 10) > 0 LOOP
			COMMIT;
		END LOOP;
		LOOP
			WHILE idem_retry_many(queue => 'q', state => 'cancelled', max_jobs => 7) +
				idem_retry_many(queue => 'q', max_jobs => 7) > 0 LOOP
				COMMIT;
			END LOOP;
			WHILE idem_reschedule_many(queue => 'q', run_at => now(), max_jobs => 7) > 0 LOOP
				COMMIT;
			END LOOP;
			EXIT WHEN NOT EXISTS (SELECT FROM idem.jobs);
			CALL work(10000);
		END LOOP;
	END $$});
is($node->safe_psql('postgres', q{SELECT count(*) FROM changes WHERE NOT seen}),
	'0', 'J2: no change was overlooked');
is( $node->safe_psql('postgres', q{SELECT state, count(*) > 50 FROM idem.job_log GROUP BY 1}),
	'done|t', 'every job is done');
is( $node->safe_psql('postgres', q{SELECT count(*) FROM idem.job_log FULL JOIN done USING (job_id) WHERE done.job_id IS NULL OR job_log.job_id IS NULL}),
	'0', 'once, and with what it has done');
is($node->safe_psql('postgres', $kinds), '5', 'each kind of call has changed jobs');
amcheck_ok($node, 'after all', 'idem.jobs', 'idem.job_log');
$node->stop;
log_ok($node);

done_testing();
