# A2, A3, A4: what a session that waits can see when it is woken, and commits during its look.
#
# The server looks only once per hour, so a wake-up that gets lost is a test that never
# ends.  Many sessions and rounds, because nothing but chance lets the two meet.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $sessions = 50;
my $node = new_node(
	'wait_race', conf => q{
shared_preload_libraries = 'idem'
autovacuum = off
idem.cleanup = off
idem.look_after = 1h
max_locks_per_transaction = 1000
});

# Each session waits for a queue of its own.
my $worker = q{
CALL idem_wait('q :client_id', '10 min') \gset
\if :ready
SELECT idem_complete(job_id, token) FROM idem_fetch('q :client_id', lease => '1 h');
\endif
};
my $queues = sprintf q{(SELECT 'q ' || n AS q FROM generate_series(0, %d) AS n) AS queues}, $sessions - 1;

# Runs the script so often, in as many sessions as there are queues
sub start
{
	my ($name, $script, $transactions, $clients) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir() . "/$name.sql";
	my $out = '';

	append_to_file($file, $script);
	local $ENV{PGAPPNAME} = $name;
	return IPC::Run::start(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--host' => $node->host,
			'--port' => $node->port,
			"--client=$clients", '--jobs=2',
			"--transactions=$transactions",
			'--file' => $file,
			'postgres'
		],
		'>&', \$out,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}

sub stop
{
	my ($name, $run) = @_;

	eval { $run->kill_kill };
	$node->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = '$name'")
	  or die "$name does not end";
	return;
}

sub drained_ok
{
	my ($name) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return ok($node->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.jobs'), $name)
	  || diag(run('SELECT count(*) FROM idem.jobs'), ' jobs are left');
}

my $workers = start('worker', $worker, 1_000_000, $sessions);

#
# One transaction resumes all queues and wakes all sessions.  Each of them knows that its
# queue is paused, and learns in time that it is not.
#

foreach my $round (1 .. 5)
{
	wait_until_asleep($node, $sessions);
	run("SELECT idem_queue_set(q), idem_pause(q) FROM $queues");
	run("SELECT idem_enqueue(q) FROM $queues");
	wait_until_asleep($node, $sessions);
	run("SELECT idem_resume(q) FROM $queues");
	drained_ok("A2: all queues go on, round $round") or last;
}

#
# A commit makes a job due soon while the worker looks.  The worker looks because of the
# rollback just before: it passes a job that an open transaction is changing, and then
# many that another open transaction has enqueued, so that its look takes time.
#

run(q{
	CREATE FUNCTION await_sleep() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		seen int := 0;
	BEGIN
		WHILE seen < 3 LOOP
			PERFORM pg_stat_clear_snapshot();
			seen := CASE WHEN EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Extension'
				AND query LIKE 'CALL idem_wait(''q 0''%') THEN seen + 1 ELSE 0 END;
		END LOOP;
	END $$;
	CREATE PROCEDURE shorten(q text, INOUT job bigint DEFAULT NULL) LANGUAGE plpgsql AS $$
	DECLARE
		t bigint;
	BEGIN
		job := (SELECT job_id FROM idem_enqueue(q));
		t := (SELECT token FROM idem_fetch(q, lease => '1 h'));
		COMMIT;
		-- that has woken the worker, too
		PERFORM await_sleep();
		PERFORM idem_heartbeat(ARRAY[job], ARRAY[t], '1 h');
		ROLLBACK;
		PERFORM idem_heartbeat(ARRAY[job], ARRAY[t], '3 ms');
		PERFORM count(*) FROM generate_series(1, (random() * 1000)::int);
		COMMIT;
	END $$});

my $open = session($node);

$open->query(q{BEGIN; SELECT count(idem_enqueue('q 0', priority => 9)) FROM generate_series(1, 10000)});

my $producers = start('producer', q{
CALL shorten('q 0') \gset
CALL idem_wait_job(:job, '10 min');
}, 100, 1);

ok(eval { $producers->finish }, 'A4: all jobs that became due later were done')
  or diag($@);
$open->query('ROLLBACK');
drained_ok('A2: no job is left');
$open->quit;

stop('producer', $producers);
stop('worker', $workers);

#
# A2: a session is woken when the locks of the transaction are gone, also advisory locks of its
# handler.  There are so many that their release takes much longer than to wake a session, which tries
# all of them at once.
#

run(q{
	CREATE PROCEDURE watch(INOUT late bigint DEFAULT NULL) LANGUAGE plpgsql AS $$
	DECLARE
		ready boolean;
	BEGIN
		CALL idem_wait('locks', '10 min', ready);
		late := (SELECT count(*) FROM generate_series(1, 20000) AS n WHERE NOT pg_try_advisory_xact_lock(n));
	END $$;
	-- n: how many
	CREATE FUNCTION hold_locks(n int) RETURNS bigint LANGUAGE sql AS $$
		SELECT count(pg_advisory_xact_lock(i)) FROM generate_series(1, n) AS i $$;
	CREATE FUNCTION caught(n int) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM hold_locks(n) FROM idem_fetch('locks');
		PERFORM pg_advisory_xact_lock(0);
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END $$;
	SELECT idem_enqueue('locks')});

my $fetch = q{SELECT hold_locks(20000) FROM idem_fetch('locks')};
my %ends = (
	'a commit' => [ "BEGIN; $fetch", 'COMMIT' ],
	'a rollback' => [ "BEGIN; $fetch", 'ROLLBACK' ],
	'an error at the commit' => [ "BEGIN; $fetch; SELECT idem_claim('k'); SET LOCAL idem.require_finish = error", 'COMMIT' ],
	'a rollback to a savepoint' => [ "BEGIN; SAVEPOINT a; SAVEPOINT b; $fetch; RELEASE b", 'ROLLBACK TO a' ],
	'an EXCEPTION block' => [ 'BEGIN' ],
	# at the end of a session its own locks go last
	'the end of the session' =>
	  [ "BEGIN; SELECT FROM idem_fetch('locks'); SELECT count(pg_advisory_lock(n)) FROM generate_series(1, 20000) AS n" ],
	'the end of a session with a temporary table' =>
	  [ "CREATE TEMP TABLE t (a int); BEGIN; SELECT FROM idem_fetch('locks'); SELECT count(pg_advisory_lock(n)) FROM generate_series(1, 20000) AS n" ],
	'the end of the session in a subtransaction' =>
	  [ "BEGIN; SELECT hold_locks(20000); SAVEPOINT a; SELECT FROM idem_fetch('locks')" ]);

foreach my $what (sort keys %ends)
{
	my ($begin, $end) = @{ $ends{$what} };
	my $late = 0;

	foreach my $round (1 .. 5)
	{
		my ($holder, $watcher) = (session($node), session($node));

		$watcher->query('BEGIN; SELECT hold_locks(20000); COMMIT') if $round == 1;
		my $gate = $what =~ /EXCEPTION/ ? session($node) : undef;

		$holder->query($begin);
		if ($gate)
		{
			$gate->query('SELECT pg_advisory_lock(0)');
			$holder->send('SELECT caught(20000)');
			wait_until_blocked($node, $holder, 'advisory');
		}
		$watcher->send('CALL watch()');
		$node->poll_query_until('postgres',
			"SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $watcher->{pid}")
		  or die 'it does not wait';
		if ($gate)
		{
			$gate->quit;
			$holder->receive;
		}
		elsif (defined $end)
		{
			$holder->sqlstate($end);
		}
		else
		{
			run("SELECT pg_terminate_backend($holder->{pid})");
		}
		$late += $watcher->receive > 0;
		defined $end || $gate ? $holder->quit : $holder->lost;
		$watcher->quit;
	}
	is($late, 0, "A2: $what wakes after its locks are gone");
}
run('TRUNCATE idem.jobs');

#
# A7: a transaction that touches more queues, jobs or keys than it can note wakes all who wait.
#

{
	my @waiters = map { session($node) } 1 .. 3;
	my $n = 1;

	foreach my $session (@waiters)
	{
		$session->send("CALL idem_wait('many $n', '10 min')");
		$n += 150;
	}
	wait_until_asleep($node, 3);
	run(q{SELECT count(idem_enqueue('many ' || n)) FROM generate_series(1, 301) AS n});
	is($_->receive, 't', 'A7: 301 queues in one transaction') foreach @waiters;
	run('TRUNCATE idem.jobs');

	is( run(q{SELECT count(*) FROM generate_series(1, 7) AS n,
			LATERAL idem_enqueue_many('many', array_fill(to_jsonb(n), ARRAY[10000]))}),
		70_000, 'many jobs');
	foreach my $session (@waiters)
	{
		my $job = run(q{SELECT max(job_id) FROM idem.jobs});

		$session->send("CALL idem_wait_job($job, '10 min')");
	}
	wait_until_asleep($node, 3);
	run(q{SELECT count(idem_cancel(job_id)) FROM (SELECT job_id FROM idem.jobs ORDER BY job_id) AS j});
	is($_->receive, 'cancelled|', 'A7: the end of 70,000 jobs in one transaction') foreach @waiters;
	$_->quit foreach @waiters;
}
$node->stop;
log_ok($node);
done_testing();
