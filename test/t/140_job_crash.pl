# The state after a crash: the table of crashes in doc/jobs-protocol.md, line by line.
#
# Workers with and without leases, enqueuers and operators end at each step, by
# kill -9 of the client, of a server process, and of the postmaster.  A job that was
# fetched in a transaction can be fetched again at once, unchanged.  A leased job can
# be fetched again when its lease has expired, by the clock of the next worker.
# Committed work is done once.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('job_crash', conf => "restart_after_crash = on\n");

$node->safe_psql('postgres', 'CREATE TABLE business (queue text, what text)');

# All about the live jobs of a queue: the very versions of their rows.
sub rows_of
{
	my ($queue) = @_;

	return run(
		"SELECT ctid, xmin, j FROM idem.jobs AS j WHERE queue = '$queue' ORDER BY job_id"
	);
}

sub business_of
{
	my ($queue) = @_;

	return run(
		"SELECT string_agg(what, ', ' ORDER BY what) FROM business WHERE queue = '$queue'");
}

sub enqueue
{
	my ($queue, $more) = @_;

	return run("SELECT job_id FROM idem_enqueue('$queue', '\"first\"', 'k' $more)");
}

# what everything that takes a token says to this one
sub answers
{
	my ($s, $id, $token) = @_;

	return join ' ', (
		map { $s->sqlstate("SELECT $_") } "idem_complete($id, $token)",
		"idem_fail($id, $token)",
		"idem_snooze($id, $token, '1 min')"
	  ),
	  $s->query(
		qq{SELECT string_agg(status, ' ') FROM (
			SELECT status FROM idem_complete_many('{$id}', '{$token}')
			UNION ALL
			SELECT status FROM idem_heartbeat('{$id}', '{$token}', '1 min')) AS a});
}

my $not_held = 'ID002 ID002 ID002 not_held not_held';
my $stale = 'ID003 ID003 ID003 stale stale';

#
# The scenarios.  Each has its own queue and works there with a session
# that dies.  ID and TOKEN stand for those of the job that was fetched, QUEUE
# for the queue.  What it leaves is one of:
#   waiting  the job, as before the fetch
#   leased   the job, with the lease that it had
#   done     no job
#

my $insert = q{INSERT INTO business VALUES ('QUEUE', 'first')};
my @workers = (

	# without a lease
	[ 'fetched in a transaction', 'waiting', 'BEGIN; FETCH' ],
	[ 'worked in a transaction', 'waiting', "BEGIN; FETCH; $insert" ],
	[
		'completes in a transaction', 'waiting',
		"BEGIN; FETCH; $insert; SELECT idem_complete(ID, TOKEN, '1')"
	],
	[
		'fails in a transaction', 'waiting',
		"BEGIN; FETCH; SELECT idem_fail(ID, TOKEN, 'error')"
	],
	[
		'gives up in a transaction', 'waiting',
		"BEGIN; FETCH; SELECT idem_fail(ID, TOKEN, dead => true)"
	],
	[
		'in a savepoint', 'waiting',
		"BEGIN; SAVEPOINT s; FETCH; $insert; RELEASE s; SAVEPOINT t; SELECT idem_complete(ID, TOKEN)"
	],
	[
		'completed in a transaction', 'done',
		"BEGIN; FETCH; $insert; SELECT idem_complete(ID, TOKEN); COMMIT"
	],

	# with a lease
	[ 'before the commit of the lease', 'waiting', 'BEGIN; LEASE' ],
	[ 'leased', 'leased', 'LEASE' ],
	[ 'leased, works', 'leased', "LEASE; BEGIN; $insert" ],
	[
		'leased, renews', 'leased',
		"LEASE; BEGIN; SELECT idem_heartbeat('{ID}', '{TOKEN}', '1 day')"
	],
	[
		'leased, completes', 'leased',
		"LEASE; BEGIN; $insert; SELECT idem_complete(ID, TOKEN, '1')"
	],
	[
		'leased, completes many', 'leased',
		"LEASE; BEGIN; $insert; SELECT idem_complete_many('{ID}', '{TOKEN}')"
	],
	[
		'leased, fails', 'leased',
		"LEASE; BEGIN; SELECT idem_fail(ID, TOKEN, 'error', retry_in => '0')"
	],
	[
		'leased, gives up', 'leased',
		'LEASE; BEGIN; SELECT idem_fail(ID, TOKEN, dead => true)'
	],
	[
		'leased, snoozes', 'leased',
		"LEASE; BEGIN; SELECT idem_snooze(ID, TOKEN, '0')"
	],
	[
		'leased, completed', 'done',
		"LEASE; BEGIN; $insert; SELECT idem_complete(ID, TOKEN); COMMIT"
	]);

# Runs the steps of a worker; returns what the rest has to know of it.
sub start_worker
{
	my ($how, $what, $leaves, $steps) = @_;
	my $queue = "$how: $what";
	my $s = session($node);
	my %worker = (
		name => $queue,
		leaves => $leaves,
		session => $s,
		id => enqueue($queue, ''),
		token => 0);

	$worker{before} = rows_of($queue);
	foreach my $step (split /; /, $steps)
	{
		if ($step eq 'FETCH' || $step eq 'LEASE')
		{
			my $lease = $step eq 'LEASE' ? "'1 hour'" : 'NULL';
			my ($id, $attempt);

			($id, $worker{token}, $attempt) = split /\|/,
			  $s->query(
				"SELECT job_id, token, attempt FROM idem_fetch('$queue', 1, $lease, 'w 1')"
			  );
			is("$id $attempt", "$worker{id} 1", "J7: $queue: a worker has the job");
			$worker{before} = rows_of($queue) if $leaves eq 'leased';
			next;
		}
		$step =~ s/\bID\b/$worker{id}/g;
		$step =~ s/\bTOKEN\b/$worker{token}/g;
		$step =~ s/\bQUEUE\b/$queue/g;
		$s->query($step);
	}
	return \%worker;
}

# the next worker, and the dead one that comes back
sub check_worker
{
	my ($next, $worker) = @_;
	my ($queue, $id, $old) = @{$worker}{qw(name id token)};
	my $zombie = session($node);
	my $fetch =
	  "SELECT job_id, token, attempt, payload FROM idem_fetch('$queue', 10, '1 hour', 'w 2')";

	if ($worker->{leaves} eq 'done')
	{
		is(rows_of($queue), '', "J7: $queue: the job is gone");
		is(business_of($queue), 'first', "J7: $queue: what it did is there, once");
		is($next->query("SET idem.clock_offset = 36000; $fetch; RESET idem.clock_offset"),
			'', "J7: $queue: no worker gets it again");
		is(answers($zombie, $id, $old),
			$stale, "J11: $queue: it cannot be completed a second time");
		$zombie->quit;
		return;
	}

	is(rows_of($queue), $worker->{before}, "J7: $queue: the job is as before");
	is(business_of($queue), '', "J7: $queue: what was not committed is not there");

	my $attempt = 1;

	if ($worker->{leaves} eq 'leased')
	{
		$attempt = 2;
		is( run("SELECT state, attempt, worker FROM idem_job($id)"),
			'running|1|w 1', "J7: $queue: it is leased");
		is($next->query($fetch), '', "J7: $queue: no worker gets it yet");
		is( $next->query(
				qq{SELECT outcome, job_id FROM idem_enqueue('$queue', key => 'k',
					   dedup => 'until_executed')}),
			"absorbed|$id",
			"J4: $queue: it still has its key");
		$next->query('SET idem.clock_offset = 3601');
	}
	else
	{
		is(run("SELECT state, attempt FROM idem_job($id)"),
			'waiting|0', "J7: $queue: it waits, no attempt is counted");
		is(answers($zombie, $id, $old),
			$not_held, "J11: $queue: the token of the dead one is not known");
		is( $next->query(
				"SELECT outcome, job_id FROM idem_enqueue('$queue', key => 'k')"),
			"absorbed|$id",
			"J1: $queue: it absorbs duplicates again");
	}

	my ($got, $token, $number, $payload) = split /\|/, $next->query($fetch);
	$next->query('RESET idem.clock_offset');

	is("$got $number $payload", "$id $attempt \"first\"",
		"J7: $queue: the next worker gets it, attempt $attempt");
	cmp_ok($token, '>', $old, "L2: $queue: with a higher token");
	my $rows = rows_of($queue);

	is(answers($zombie, $id, $old),
		$stale, "J11: $queue: the token of the dead one is stale");
	is(rows_of($queue), $rows, "J11: $queue: and changes nothing");
	$next->query(
		qq{BEGIN; INSERT INTO business VALUES ('$queue', 'second');
		SELECT idem_complete($id, $token); COMMIT});
	is(answers($zombie, $id, $old),
		$stale, "J11: $queue: also when the job is done");
	is(rows_of($queue), '', "J7: $queue: then the job is gone");
	is(business_of($queue), 'second', "J7: $queue: and was done once");
	is(run("SELECT count(*) FROM idem.job_log WHERE queue = '$queue'"),
		'0', "J7: $queue: nothing else is left of it");
	$zombie->quit;
	return;
}

#
# Enqueuers and operators: what is done before, by others; what the one that
# dies has open; and what comes of it afterwards.
#

my @others = (
	[
		'enqueues', '',
		q{SELECT outcome FROM idem_enqueue('QUEUE', '"lost"', 'k')}, 'enqueued',
		q{SELECT count(*) FROM idem_fetch('QUEUE');
		  SELECT outcome FROM idem_enqueue('QUEUE', key => 'k')},
		"0\nenqueued"
	],
	[
		'enqueues many', '',
		q{SELECT outcome, count(*) FROM idem_enqueue_many('QUEUE', '{1, 2, 3}', '{a, b, c}') GROUP BY 1},
		'enqueued|3',
		q{SELECT count(*) FROM idem_fetch('QUEUE', 10);
		  SELECT outcome, count(*) FROM idem_enqueue_many('QUEUE', '{1, 2, 3}', '{c, b, a}') GROUP BY 1},
		"0\nenqueued|3"
	],
	[
		'is absorbed',
		q{SELECT idem_enqueue('QUEUE', '"first"', 'k')},
		q{SELECT outcome FROM idem_enqueue('QUEUE', '"lost"', 'k')}, 'absorbed',
		q{SELECT outcome FROM idem_enqueue('QUEUE', key => 'k');
		  SELECT payload, attempt FROM idem_fetch('QUEUE', 10)},
		qq{absorbed\n"first"|1}
	],
	[
		'replaces',
		q{SELECT idem_enqueue('QUEUE', '"first"', 'k')},
		q{SELECT outcome FROM idem_enqueue('QUEUE', '"lost"', 'k', on_duplicate => 'replace')},
		'replaced',
		q{SELECT payload, attempt FROM idem_fetch('QUEUE', 10)},
		'"first"|1'
	],
	[
		'postpones',
		q{SELECT idem_enqueue('QUEUE', '"first"', 'k')},
		q{SELECT outcome FROM idem_enqueue('QUEUE', '"lost"', 'k', on_duplicate => 'debounce', delay => '1 hour')},
		'postponed',
		q{SELECT payload, attempt FROM idem_fetch('QUEUE', 10)},
		'"first"|1'
	],
	[
		'pulls forward',
		q{SELECT idem_enqueue('QUEUE', '"first"', 'k', include_scheduled => true, delay => '1 hour')},
		q{SELECT outcome FROM idem_enqueue('QUEUE', '"lost"', 'k')}, 'absorbed',
		q{SELECT count(*) FROM idem_fetch('QUEUE', 10);
		  SELECT outcome FROM idem_enqueue('QUEUE', '"next"', 'k');
		  SELECT payload, attempt FROM idem_fetch('QUEUE', 10)},
		qq{0\nabsorbed\n"first"|1}
	],
	[
		'asks for a rerun',
		q{SELECT idem_enqueue('QUEUE', '"first"', 'k');
		  SELECT idem_fetch('QUEUE', 1, '1 hour')},
		q{SELECT outcome FROM idem_enqueue('QUEUE', '"lost"', 'k', dedup => 'until_executed', if_running => 'rerun')},
		'rerun',
		q{SELECT outcome FROM idem_enqueue('QUEUE', '"next"', 'k', dedup => 'until_executed', if_running => 'rerun');
		  SET idem.clock_offset = 3601;
		  SELECT payload, attempt FROM idem_fetch('QUEUE', 10)},
		qq{rerun\n"first"|2}
	],
	[
		'cancels',
		q{SELECT idem_enqueue('QUEUE', '"first"', 'k')},
		q{SELECT idem_cancel(job_id) FROM idem.jobs WHERE queue = 'QUEUE'}, 't',
		q{SELECT count(*) FROM idem.job_log WHERE queue = 'QUEUE';
		  SELECT outcome FROM idem_enqueue('QUEUE', key => 'k', dedup => 'until_executed');
		  SELECT payload, attempt FROM idem_fetch('QUEUE', 10)},
		qq{0\nabsorbed\n"first"|1}
	],
	[
		'retries',
		q{SELECT idem_cancel(job_id) FROM idem_enqueue('QUEUE', '"first"', 'k')},
		q{SELECT idem_retry(job_id) FROM idem.job_log WHERE queue = 'QUEUE'}, 't',
		q{SELECT count(*) FROM idem_fetch('QUEUE', 10);
		  SELECT outcome FROM idem_enqueue('QUEUE', '"new"', key => 'k');
		  SELECT idem_retry(job_id) FROM idem.job_log WHERE queue = 'QUEUE';
		  SELECT payload FROM idem_fetch('QUEUE', 10) ORDER BY job_id},
		qq{0\nenqueued\nt\n"first"\n"new"}
	],
	[
		'pauses',
		q{SELECT idem_enqueue('QUEUE', '"first"')},
		q{SELECT idem_pause('QUEUE')}, 't',
		q{SELECT idem_resume('QUEUE'); SELECT payload FROM idem_fetch('QUEUE')},
		qq{f\n"first"}
	],
	[
		'gives up a job without attempts',
		q{SELECT idem_enqueue('QUEUE', '"first"', 'k', max_attempts => 1);
		  SELECT idem_fetch('QUEUE', 1, '1 microsecond')},
		q{SELECT count(*) FROM idem_fetch('QUEUE')}, '0',
		q{SELECT state, attempt FROM idem.job_status WHERE queue = 'QUEUE';
		  SELECT count(*) FROM idem_fetch('QUEUE');
		  SELECT state, attempt FROM idem.job_status WHERE queue = 'QUEUE'},
		"expired|1\n0\ndead|1"
	]);

sub for_queue
{
	my ($sql, $queue) = @_;

	return $sql =~ s/\bQUEUE\b/$queue/gr;
}

sub start_other
{
	my ($how, $what, $setup, $sql, $answer) = @_;
	my $queue = "$how: $what";
	my $s = session($node);

	run(for_queue($setup, $queue)) if $setup ne '';
	my $before = rows_of($queue);
	is($s->query('BEGIN;' . for_queue($sql, $queue)),
		$answer, "$queue: $answer, not committed");
	return { name => $queue, session => $s, before => $before };
}

sub check_other
{
	my ($other, $sql, $answer) = @_;
	my $queue = $other->{name};

	is(rows_of($queue), $other->{before}, "J6: $queue: everything is as before");
	is(run(for_queue($sql, $queue)), $answer, "J6: $queue: and works as before");
	return;
}

# An enqueue that was committed, and whose answer got lost.
sub check_again
{
	my ($queue, $id) = @_;

	is( run("SELECT outcome, job_id FROM idem_enqueue('$queue', '\"again\"', 'k')"),
		"absorbed|$id",
		"J1: $queue: an enqueue whose answer got lost is there when it is repeated");
	is(run("SELECT payload FROM idem_fetch('$queue', 10)"),
		'"first"', "J1: $queue: once");
	return;
}

sub check_death
{
	my ($how, $die) = @_;
	my @worker = map { start_worker($how, @$_) } @workers;
	my @other = map { start_other($how, @$_) } @others;
	my $committed = session($node);
	my $committed_id = $committed->query(
		qq{SELECT job_id FROM idem_enqueue('$how: enqueued', '"first"', 'k')});
	my @dying = ((map { $_->{session} } @worker, @other), $committed);

	$die->(@dying);

	my $next = session($node);

	check_worker($next, $_) foreach @worker;
	check_other($other[$_], @{ $others[$_] }[ 4, 5 ]) foreach 0 .. $#others;
	check_again("$how: enqueued", $committed_id);
	$next->quit;
	return;
}

#
# kill -9 of clients; sessions that wait for them continue
#

my @waiters = map { session($node) } 1 .. 3;

check_death(
	'client killed',
	sub {
		my @dying = @_;

		# for the enqueuer of a new job, for a worker that has fetched, for one
		# whose completion is open
		my %id = map { split /\|/ } split /\n/,
		  run('SELECT queue, job_id FROM idem.jobs');
		my $completes = $id{'client killed: leased, completes'};

		$waiters[0]->send(
			q{SELECT outcome FROM idem_enqueue('client killed: enqueues', '"waiter"', 'k')});
		$waiters[1]->send(
			qq{BEGIN; SELECT idem_cancel($id{'client killed: fetched in a transaction'})});
		$waiters[2]->send(qq{BEGIN; SELECT idem_cancel($completes)});
		wait_until_blocked($node, $_) foreach @waiters;

		$_->kill foreach @dying;
		wait_until_gone($node, $_) foreach @dying;

		is($waiters[0]->receive, 'enqueued',
			'J6: a duplicate that waited for the dead enqueuer makes its own job');
		is($waiters[1]->receive, 't',
			'J7: the session that waited for the dead worker has cancelled its job');
		is($waiters[2]->receive, 't',
			'J7: also one that waited for its completion');
		$_->query('ROLLBACK') foreach @waiters[ 1, 2 ];
		run(q{SELECT idem_cancel(job_id) FROM idem.jobs
			   WHERE queue = 'client killed: enqueues'});
	});
$_->quit foreach @waiters;

#
# kill -9 of a server process
#

check_death(
	'backend killed',
	sub {
		crash_backend($node, $_[2]{pid});
		$_->lost foreach @_;
	});

#
# kill -9 of the postmaster, with prepared transactions
#

my %prepared =
  map { $_ => enqueue("prepared, $_", '') } qw(fetched completed absorbed);
my %leased_token = map { split /\|/ } split /\n/,
  run(q{SELECT job_id, token FROM idem_fetch('prepared, completed', 1, '1 hour')});

run(qq{
	BEGIN; SELECT idem_fetch('prepared, fetched'); PREPARE TRANSACTION 'fetched';
	BEGIN; SELECT idem_complete($prepared{completed}, $leased_token{$prepared{completed}});
	PREPARE TRANSACTION 'completed';
	BEGIN; SELECT idem_enqueue('prepared, absorbed', '"second"', 'k');
	PREPARE TRANSACTION 'absorbed';
	BEGIN; SELECT idem_enqueue('prepared, enqueued', '"first"', 'k');
	PREPARE TRANSACTION 'enqueued'});

check_death(
	'postmaster killed',
	sub {
		crash_postmaster($node);
		$_->lost foreach @_;
		$node->start;
	});

is( run(q{SELECT count(*) FROM idem_fetch('prepared, fetched');
	  SELECT outcome FROM idem_enqueue('prepared, fetched', '"new"', 'k');
	  SELECT payload FROM idem_fetch('prepared, fetched');
	  ROLLBACK PREPARED 'fetched';
	  SELECT payload, attempt FROM idem_fetch('prepared, fetched')}),
	qq{0\nenqueued\n"new"\n"first"|1},
	'J3: a prepared transaction holds its job, until it is rolled back');
is( run(q{SET idem.clock_offset = 3601;
	  SELECT count(*) FROM idem_fetch('prepared, completed');
	  COMMIT PREPARED 'completed';
	  SELECT count(*) FROM idem_fetch('prepared, completed');
	  SELECT count(*) FROM idem.jobs WHERE queue = 'prepared, completed'}),
	"0\n0\n0",
	'J7: a completion that is prepared is done with COMMIT PREPARED');
is( run(q{SELECT count(*) FROM idem_fetch('prepared, absorbed');
	  SELECT outcome FROM idem_enqueue('prepared, absorbed', '"third"', 'k');
	  SELECT count(*) FROM idem_fetch('prepared, absorbed');
	  COMMIT PREPARED 'absorbed';
	  SELECT payload FROM idem_fetch('prepared, absorbed')}),
	qq{0\nabsorbed\n0\n"first"},
	'J2: a job waits for a prepared transaction that it has absorbed');

my $waiter = session($node);
is(run(q{SELECT count(*) FROM idem_fetch('prepared, enqueued')}),
	'0', 'J6: a job of a prepared transaction is not there yet');
$waiter->send(
	q{SELECT outcome FROM idem_enqueue('prepared, enqueued', '"second"', 'k')});
wait_until_blocked($node, $waiter);
run(q{COMMIT PREPARED 'enqueued'});
is($waiter->receive, 'absorbed',
	'J6: a duplicate waits for COMMIT PREPARED, and is absorbed');
is(run(q{SELECT payload FROM idem_fetch('prepared, enqueued')}),
	'"first"', 'J6: then the job is there');
$waiter->quit;

amcheck_ok($node, 'after the crashes', 'idem.jobs', 'idem.job_log');
$node->stop;
log_ok($node, killed => 1);
done_testing();
