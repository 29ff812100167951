# J21: idem_work killed at every step.  No job is lost, and none is done twice.
#
# A job is done when the table ledger has a row for it.  Nothing in that table is unique, so a job
# that is done twice has two rows.  The call is stopped at a step by a lock that another session
# holds, and ended by a cancel, by pg_terminate_backend, or by kill -9, which ends every session of
# the server.  Then the job must be as it was before the fetch, unless its commit was over; and
# another call does what is left.  If a cancel ends its run or the commit, the job has failed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'work', conf => q{
shared_preload_libraries = 'idem'
restart_after_crash = on
autovacuum = off
idem.cleanup = off
idem.look_after = 1h
});
my $killed = 0;

run(
	q{
	CREATE TABLE ledger (job int, at timestamptz DEFAULT now());
	CREATE TABLE late (fails boolean);
	CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock(3);
		IF new.fails THEN
			RAISE EXCEPTION 'fails at commit';
		END IF;
		RETURN NULL;
	END $$;
	CREATE CONSTRAINT TRIGGER late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION late();
	-- lock 1: before the work; 2: after it; 3: at commit
	CREATE FUNCTION work(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_advisory_xact_lock(1);
		INSERT INTO ledger VALUES ((payload ->> 'job')::int);
		PERFORM pg_advisory_xact_lock(2);
		IF payload ? 'late' THEN
			INSERT INTO late VALUES ((payload ->> 'late')::boolean);
		END IF;
		IF payload ? 'fails' THEN
			RAISE EXCEPTION 'fails';
		END IF;
		RETURN payload -> 'job';
	END $$;
	SELECT idem_queue_set('q', keep => '1 h');
});

sub states
{
	return run(
		q{SELECT string_agg(payload ->> 'job' || ' ' || state || ' ' || attempt, ', ' ORDER BY payload ->> 'job')
		  FROM (SELECT job_id FROM idem.jobs UNION SELECT job_id FROM idem.job_log) AS i, LATERAL idem_job(i.job_id)}
	);
}

sub ledger
{
	return run(q{SELECT string_agg(job::text, ' ' ORDER BY job) FROM ledger});
}

# End the call; each way leaves the same behind, but for a cancel while a job runs
my %end = (
	cancel => sub {
		my ($worker) = @_;

		run("SELECT pg_cancel_backend($worker->{pid})");
		$worker->receive;
		is($worker->{sqlstate}, '57014', 'the call ends with 57014');
		$worker->quit;
	},
	terminate => sub {
		my ($worker) = @_;

		run("SELECT pg_terminate_backend($worker->{pid})");
		wait_until_gone($node, $worker);
		$worker->lost;
	},
	crash => sub {
		my ($worker, $gate) = @_;

		crash_backend($node, $worker->{pid});
		$killed++;
		$worker->lost;
		$gate->lost;
	});

# The steps: jobs, is_run if a cancel there is a failed attempt, the lock that stops the call there,
# what the call waits for, what is left when it ends there, and what one more call leaves.
my @steps = (
	{
		name => 'after the fetch, before the work',
		jobs => [ '{"job": 1}', '{"job": 2}' ],
		is_run => 1,
		lock => 'SELECT pg_advisory_lock(1)',
		event => 'advisory',
		left => '1 waiting 0, 2 waiting 0',
		done => '',
		then => '1 done 1, 2 done 1'
	},
	{
		name => 'in the handler, after the work',
		jobs => [ '{"job": 1}', '{"job": 2}' ],
		is_run => 1,
		lock => 'SELECT pg_advisory_lock(2)',
		event => 'advisory',
		left => '1 waiting 0, 2 waiting 0',
		done => '',
		then => '1 done 1, 2 done 1'
	},
	{
		name => 'after the handler, in the middle of complete',
		jobs => [ '{"job": 1}', '{"job": 2}' ],
		is_run => 1,
		lock => 'BEGIN; LOCK TABLE idem.job_log IN SHARE MODE',
		event => 'relation',
		left => '1 waiting 0, 2 waiting 0',
		done => '',
		then => '1 done 1, 2 done 1'
	},
	{
		name => 'at commit',
		jobs => [ '{"job": 1, "late": false}', '{"job": 2}' ],
		is_run => 1,
		lock => 'SELECT pg_advisory_lock(3)',
		event => 'advisory',
		left => '1 waiting 0, 2 waiting 0',
		done => '',
		then => '1 done 1, 2 done 1'
	},
	{
		name => 'after an error of the handler, in the middle of fail',
		jobs => [ '{"job": 1, "fails": 1}' ],
		lock => 'BEGIN; LOCK TABLE idem.job_log IN SHARE MODE',
		event => 'relation',
		left => '1 waiting 0',
		done => '',
		then => '1 dead 1'
	},
	{
		name => 'after an error of the commit, in the middle of fail',
		jobs => [ '{"job": 1, "late": true}' ],
		lock => 'BEGIN; LOCK TABLE idem.job_log IN SHARE MODE',
		# complete has the lock, too, so the lock is taken while the commit waits
		first => 'SELECT pg_advisory_lock(3)',
		open => 'SELECT pg_advisory_unlock(3)',
		event => 'relation',
		left => '1 waiting 0',
		done => '',
		then => '1 dead 1'
	},
	{
		name => 'between two jobs',
		jobs => [ '{"job": 1}', '{"job": 2}' ],
		lock => 'BEGIN; LOCK TABLE idem.jobs IN SHARE MODE',
		first => 'SELECT pg_advisory_lock(2)',
		open => 'SELECT pg_advisory_unlock(2)',
		event => 'relation',
		left => '1 done 1, 2 waiting 0',
		done => '1',
		then => '1 done 1, 2 done 1'
	},
	{
		name => 'while it waits',
		jobs => [ '{"job": 1}' ],
		timeout => '10 min',
		left => '1 done 1',
		done => '1',
		then => '1 done 1, 2 done 1'
	});

# A cancel while job 1 runs: it has failed, and does not hold up job 2
sub after_cancelled_run
{
	my ($name) = @_;

	is(states(), '1 scheduled 1, 2 waiting 0', "$name: the job has failed");
	is(ledger(), '', "$name: its work is rolled back");
	is(run(q{SELECT error FROM idem_job(1)}),
		'57014: canceling statement due to user request', "$name: the error of the job");

	is(run(q{CALL idem_work('q', 'work')}), '1|0', "$name: the next call");
	is(states(), '1 scheduled 1, 2 done 1', "$name: the next call runs the next job");
	run(q{SET idem.clock_offset = '1 h'; CALL idem_work('q', 'work')});
	is(states(), '1 done 2, 2 done 1', "$name: the job is run again after its backoff");
	is(ledger(), '1 2', "$name: each job is done once");
}

# Stop the call at this step.  With "first" the call waits there until another session waits for
# the lock, which it gets before the call can.
sub stop_at
{
	my ($step, $worker, $gate) = @_;
	my $other;

	if (!defined $step->{lock})
	{
		wait_until_asleep($node, 1, "pid = $worker->{pid}");
		return;
	}
	if (defined $step->{first})
	{
		wait_until_blocked($node, $worker, 'advisory');
		$other = session($node);
		$other->send($step->{lock});
		wait_until_blocked($node, $other, 'relation');
		$gate->query($step->{open});
		$other->receive;
	}
	wait_until_blocked($node, $worker, $step->{event});
	return $other;
}

foreach my $how ('cancel', 'terminate', 'crash')
{
	foreach my $step (@steps)
	{
		my $name = "J21: $how $step->{name}";
		my $gate = session($node);
		my $worker = session($node);
		my $timeout = $step->{timeout} // '0';

		run('TRUNCATE ledger, idem.jobs, idem.job_log; ALTER SEQUENCE idem.jobs_job_id_seq RESTART');
		# after the last attempt the job goes to the history, which some steps lock
		my $attempts = $step->{is_run} ? 2 : 1;
		run("SELECT idem_enqueue('q', '$_', max_attempts => $attempts)") foreach @{ $step->{jobs} };
		my $lock = $step->{first} // $step->{lock};
		$gate->query($lock) if defined $lock;
		$worker->send("CALL idem_work('q', 'work', '$timeout')");
		my $other = stop_at($step, $worker, $gate);

		is(ledger(), $step->{done}, "$name: what is done at that moment");
		$end{$how}->($worker, $gate);
		if ($how eq 'crash')
		{
			$other->lost if $other;
		}
		else
		{
			$_->quit foreach grep { defined } $gate, $other;
		}
		if ($how eq 'cancel' && $step->{is_run})
		{
			after_cancelled_run($name);
			next;
		}
		is(states(), $step->{left}, "$name: the jobs are as before the fetch, or done");
		is(ledger(), $step->{done}, "$name: the work is there only of jobs that are done");

		run(q{SELECT idem_enqueue('q', '{"job": 2}')}) if !defined $lock;
		run(q{CALL idem_work('q', 'work')});
		is(states(), $step->{then}, "$name: another call does the rest");
		is(ledger(), join(' ', $step->{then} =~ /(\d) done/g), "$name: each job is done once")
		  if $step->{then} =~ /done/;
	}
}

#
# Waking: a call that waits works on what is committed meanwhile, and on what becomes due
#

my $worker = session($node);

run('TRUNCATE ledger');
$worker->send(q{CALL idem_work('q', 'work', '10 min', 3)});
wait_until_asleep($node, 1, "pid = $worker->{pid}");
is(run("SELECT xact_start IS NULL AND backend_xmin IS NULL FROM pg_stat_activity WHERE pid = $worker->{pid}"),
	't', 'A1: no transaction and no snapshot while it waits');
my $before = run('SELECT clock_timestamp()');
run(q{SELECT idem_enqueue('q', '{"job": 1}')});
run(q{SELECT idem_enqueue('q', '{"job": 2}')});
run(q{SELECT idem_enqueue('q', '{"job": 3}', delay => '10 ms')});
is($worker->receive, '3|0', 'J21: the call is woken for each of the jobs, and ends after max_jobs');
is(ledger(), '1 2 3', 'J21: all are done');
is(run("SELECT bool_and(at > '$before') AND count(DISTINCT at) = 3 FROM ledger"),
	't', 'J21: now() is the beginning of each job, not that of the call');

# statement_timeout covers the whole call; the job of that moment has failed
my $gate = session($node);

run('TRUNCATE ledger, idem.job_log');
$gate->query('SELECT pg_advisory_lock(2)');
run(q{SELECT idem_enqueue('q', '{"job": 1}')});
run(q{SELECT idem_enqueue('q', '{"job": 2}')});
$worker->query(q{SET statement_timeout = '500 ms'});
is($worker->sqlstate(q{CALL idem_work('q', 'work', '10 min')}), '57014', 'J21: statement_timeout in the handler');
is(states(), '1 scheduled 1, 2 waiting 0', 'J21: the job has failed');
$gate->query('SELECT pg_advisory_unlock(2)');
is($worker->sqlstate(q{CALL idem_work('q', 'work', '10 min')}), '57014', 'J21: statement_timeout of a call that waits');
is(states(), '1 scheduled 1, 2 done 1', 'J21: the job did not hold up the next one, whose work stays');
$_->quit foreach $gate, $worker;
wait_until_gone($node, $_) foreach $gate, $worker;

# a second cancel, while the job fails after the first one: the job waits
$gate = session($node);
$worker = session($node);
run('TRUNCATE ledger, idem.jobs, idem.job_log');
run(q{SELECT idem_enqueue('q', '{"job": 1}', max_attempts => 1)});
$gate->query('BEGIN; LOCK TABLE idem.job_log IN SHARE MODE; SELECT pg_advisory_lock(2)');
$worker->send(q{CALL idem_work('q', 'work')});
wait_until_blocked($node, $worker, 'advisory');
run("SELECT pg_cancel_backend($worker->{pid})");
wait_until_blocked($node, $worker, 'relation');
run("SELECT pg_cancel_backend($worker->{pid})");
$worker->receive;
is($worker->{sqlstate}, '57014', 'J21: a second cancel ends the call at once');
is(states(), '1 waiting 0', 'J21: the job waits, its attempt is not counted');
$gate->quit;
wait_until_gone($node, $gate);
# the session may end itself afterwards: no job runs
$worker->send('SELECT pg_terminate_backend(pg_backend_pid())');
wait_until_gone($node, $worker);
$worker->lost;
is(states(), '1 waiting 0', 'J21: that is no attempt of the job');
run('TRUNCATE idem.jobs');

# autovacuum learns of dead rows during the call: the statistics are reported between two jobs, about
# once per second; each poll enqueues another job
my $deleted = run(q{SELECT n_tup_del FROM pg_stat_all_tables WHERE relid = 'idem.jobs'::regclass});
$worker = session($node);
$worker->send(q{CALL idem_work('q', 'work', '10 min')});
ok( $node->poll_query_until(
		'postgres', qq{
		SELECT n_tup_del > $deleted FROM pg_stat_all_tables, idem_enqueue('q', '{"job": 4}')
		 WHERE relid = 'idem.jobs'::regclass}),
	'J21: the statistics of tables are reported before the call ends');
run("SELECT pg_terminate_backend($worker->{pid})");
wait_until_gone($node, $worker);
$worker->lost;

#
# A handler that ends its own backend: the attempt counts, else the job would end each later call.
# An operator who ends it: it does not, also for a handler that has run pg_terminate_backend() before.
#

run(
	q{
	TRUNCATE ledger, idem.jobs, idem.job_log;
	SELECT idem_queue_set('q', keep => '1 h', max_attempts => 2, backoff => '1 us', backoff_max => '1 us');
	CREATE FUNCTION ends(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO ledger VALUES ((payload ->> 'job')::int);
		IF payload ? 'ends' THEN
			PERFORM pg_terminate_backend(pg_backend_pid());
		ELSIF payload ? 'late' THEN
			INSERT INTO late_end VALUES (1);
		ELSIF payload ? 'waits' THEN
			PERFORM pg_advisory_xact_lock(1);
		END IF;
		RETURN payload -> 'job';
	END $$;
	CREATE TABLE late_end (n int);
	CREATE FUNCTION late_end() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM pg_terminate_backend(pg_backend_pid());
		RETURN NULL;
	END $$;
	CREATE CONSTRAINT TRIGGER late_end AFTER INSERT ON late_end DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION late_end();
});

# One call that is lost; then the states
sub lose
{
	my ($call) = @_;
	my $worker = session($node);

	$worker->send($call);
	wait_until_gone($node, $worker);
	$worker->lost;
	return states();
}

run(q{SELECT idem_stats_reset()});
run(q{SELECT idem_enqueue('q', '{"job": 1, "ends": 1}', key => 'k', priority => -1)});
run(q{SELECT idem_enqueue('q', '{"job": 2}', key => 'l')});
is(lose(q{CALL idem_work('q', 'ends')}), '1 waiting 1, 2 waiting 0', 'J21: a handler that ends its backend has failed');
is(lose(q{CALL idem_work('q', 'ends')}), '1 dead 2, 2 waiting 0', 'J21: ... until the job is dead');
is( run(q{SELECT error FROM idem_job((SELECT min(job_id) FROM idem.job_log))}),
	'57P01: The handler has called pg_terminate_backend(), and its backend has exited.',
	'J18: the error says so');
is( run(q{SELECT fetched, completed, failed FROM idem.queue_stats WHERE queue = 'q'}),
	'2|0|2', 'S1: each of these attempts counts once');
is(run(q{CALL idem_work('q', 'ends')}) . ' ' . states(), '1|0 1 dead 2, 2 done 1', 'J21: the next job is not held up');
is(ledger(), '2', 'J21: its work was rolled back');

# in a deferred trigger, in a DO block, for a job without attempts left
run(q{SELECT idem_enqueue('q', '{"job": 3, "late": 1}', max_attempts => 1)});
is( lose(q{DO $$ DECLARE c bigint; f bigint; BEGIN CALL idem_work('q', 'ends', '0', NULL, c, f); END $$}),
	'1 dead 2, 2 done 1, 3 dead 1',
	'J21: the same at the commit');

# a job that takes longer than transaction_timeout, and its commit
SKIP:
{
	skip 'transaction_timeout is of PostgreSQL 17', 3 if $node->pg_version < 17;
	my $lock = session($node);

	$lock->query('SELECT pg_advisory_lock(1)');
	run(q{SELECT idem_enqueue('q', '{"job": 7, "waits": 1}', max_attempts => 1)});
	is( lose(q{SET transaction_timeout = '100 ms'; CALL idem_work('q', 'ends')}),
		'1 dead 2, 2 done 1, 3 dead 1, 7 dead 1',
		'J21: a job that takes longer than transaction_timeout has failed');
	is( run(q{SELECT error FROM idem_job((SELECT max(job_id) FROM idem.job_log))}),
		'25P04: The job has taken longer than transaction_timeout, and its backend has exited.',
		'J18: the error says so');
	# the time is over when no job runs
	$lock->quit;
	run(q{DELETE FROM idem.job_log WHERE payload ->> 'job' = '7'});
	is(run(q{SET transaction_timeout = '100 ms'; CALL idem_work('q', 'ends', '200 ms')}), '0|0', 'A1: a wait does not count');
}

# the backend that exits waits for no lock: then the job is as before the fetch
run(q{SELECT idem_enqueue('q', '{"job": 4, "ends": 1}')});
my $locker = session($node);
$locker->query('BEGIN');
$locker->query('LOCK TABLE idem.job_log IN SHARE MODE');
is(lose(q{CALL idem_work('q', 'ends')}), '1 dead 2, 2 done 1, 3 dead 1, 4 waiting 0', 'J21: it does not wait for a lock');
$locker->query('ROLLBACK');

# an earlier job of the session has ended another backend; then an operator ends the call
run(q{SELECT idem_cancel(job_id) FROM idem.jobs});
run(q{CREATE FUNCTION ends_other(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT to_jsonb(pg_terminate_backend((payload ->> 'pid')::int)) $$});
my $other = session($node);
run(qq{SELECT idem_enqueue('q', '{"job": 5, "pid": $other->{pid}}')});
run(q{SELECT idem_enqueue('q', '{"job": 6, "waits": 1}')});
$gate = session($node);
$gate->query('SELECT pg_advisory_lock(1)');
$worker = session($node);
is($worker->query(q{CALL idem_work('q', 'ends_other', max_jobs => 1)}), '1|0', 'another backend was ended');
wait_until_gone($node, $other);
$other->lost;
$worker->send(q{CALL idem_work('q', 'ends')});
wait_until_blocked($node, $worker, 'advisory');
run("SELECT pg_terminate_backend($worker->{pid})");
wait_until_gone($node, $worker);
$worker->lost;
is( run(q{SELECT state, attempt FROM idem.job_status ORDER BY job_id DESC LIMIT 1}),
	'waiting|0', 'J21: a call that an operator ends is no attempt');
$gate->quit;
$locker->quit;

#
# Load: four calls beside enqueuers, and a memory that does not grow
#

run(
	q{
	TRUNCATE ledger, idem.jobs, idem.job_log;
	SELECT idem_queue_set('load', max_attempts => 100, backoff => '1 ms', backoff_max => '10 ms');
	CREATE SEQUENCE numbers;
	-- every seventh run fails, and every eleventh at commit
	CREATE SEQUENCE runs;
	CREATE FUNCTION load(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
	DECLARE
		run bigint := nextval('runs');
	BEGIN
		INSERT INTO ledger VALUES ((payload ->> 'job')::int);
		IF run % 7 = 0 THEN
			RAISE EXCEPTION 'run % fails', run;
		ELSIF run % 11 = 0 THEN
			INSERT INTO late VALUES (true);
		END IF;
		RETURN payload -> 'job';
	END $$;
});

my @workers = map { session($node) } 1 .. 4;

$_->send(q{CALL idem_work('load', 'load', '10 min')}) foreach @workers;
ok( pgbench_run(
		$node,
		[ '--client' => 4, '--transactions' => 500 ],
		[
			[ q{SELECT idem_enqueue('load', jsonb_build_object('job', nextval('numbers')));}, 3 ],
			[
				q{BEGIN;
SELECT idem_enqueue('load', jsonb_build_object('job', nextval('numbers')), delay => '2 ms');
COMMIT;
}, 1
			]
		]),
	'enqueue 2,000 jobs beside four calls');
ok($node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM idem.jobs WHERE queue = 'load'}),
	'J21: all jobs are done');
run("SELECT pg_terminate_backend($_->{pid})") foreach @workers;
foreach my $session (@workers)
{
	wait_until_gone($node, $session);
	$session->lost;
}
is(run(q{SELECT count(*), count(DISTINCT job), min(job), max(job) FROM ledger}),
	'2000|2000|1|2000', 'J21: each job is done exactly once');

# one long call, which waits for each of its jobs, and fails some of them
run(
	q{
	CREATE TABLE memory (job int, bytes bigint);
	CREATE FUNCTION chain(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
	DECLARE
		job int := payload #>> '{}';
	BEGIN
		IF job < 3000 AND job % 3 = 0 THEN
			PERFORM FROM idem_enqueue('chain', to_jsonb(job + 1), delay => '1 ms');
		ELSIF job < 3000 THEN
			PERFORM FROM idem_enqueue('chain', to_jsonb(job + 1));
		END IF;
		IF job % 100 = 0 THEN
			INSERT INTO memory SELECT job, sum(total_bytes) FROM pg_backend_memory_contexts;
		END IF;
		IF job % 5 = 0 THEN
			PERFORM FROM idem_enqueue('chain', '"x"');
		END IF;
		RETURN NULL;
	END $$;
	SELECT idem_queue_set('chain', max_attempts => 1);
	SELECT idem_enqueue('chain', '1');
});
is(run(q{CALL idem_work('chain', 'chain', '10 min', 3600)}), '3000|600', 'J21: 3,600 jobs in one call');
my ($first, $last) = split /\|/,
  run(q{SELECT min(bytes) FILTER (WHERE job > 300), max(bytes) FILTER (WHERE job > 300) FROM memory});
note "memory of the session: $first to $last bytes";
cmp_ok($last - $first, '<', 100_000, 'J21: the memory of a long call does not grow');

amcheck_ok($node, 'at the end', 'idem.jobs', 'idem.job_log');
$node->stop;
log_ok($node, killed => $killed);

done_testing();
