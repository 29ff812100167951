# The background worker enqueues the jobs of schedules, in real time.
#
#   T6  within a second on an idle server, whatever idem.cleanup and
#       idem.cleanup_naptime say: here cleanup is off and the naptime is a day, so the
#       launcher has no other reason to wake up
#   T1  each tick is one job, in several databases
#   T2  ticks do not drift
#   W4  between two ticks nothing runs, and the launcher does not grow
#   W5  cleanup elsewhere goes on beside one-second ticks, and these go on beside it

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemSchedules;
use IdemTest;
use List::Util qw(min);
use PostgreSQL::Test::Utils;
use Test::More;

# debug1: the postmaster logs which process it starts
my $node = new_node(
	'ticks', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
idem.cleanup = off
autovacuum = off
log_min_messages = debug1
});

# the launcher has nothing to do for a long time
sub wait_for_sleep
{
	$node->poll_query_until('postgres',
		q{SELECT state = 'sleeping' AND worker_pid IS NULL FROM idem.worker_status})
	  or die 'the launcher does not come to rest';
	return;
}

# A schedule with a tick that is due soon, and none on the next day
sub soon
{
	my ($name) = @_;

	return qq{SELECT idem_schedule('$name', 'soon', every => '1 day', starts_at => clock_timestamp() + interval '0.2 s')};
}

sub has_ticked
{
	my ($db, $name) = @_;

	return $node->poll_query_until($db,
		qq{SELECT count(*) = 1 FROM idem.jobs WHERE queue = 'soon' AND key LIKE '$name\@%'});
}

#
# T6: the launcher sleeps, and a commit wakes it.  The first visits after the start come
# first.
#

run('CREATE DATABASE later');
run('SELECT pg_reload_conf()');
$node->poll_query_until('postgres', 'SELECT runs >= 2 FROM idem.worker_status') or die 'no visits';
wait_for_sleep();

run('CREATE DATABASE born');
run('BEGIN; CREATE EXTENSION idem; ' . soon('new') . '; COMMIT', db => 'born');
ok(has_ticked('born', 'new'),
	'T6: a database that is new: CREATE EXTENSION and a schedule in one transaction');
wait_for_sleep();

run('BEGIN; CREATE EXTENSION idem; ' . soon('late') . '; COMMIT', db => 'later');
ok(has_ticked('later', 'late'),
	'T6: a database that the worker has visited before: CREATE EXTENSION and a schedule there');
wait_for_sleep();

run(soon('earlier'));
ok(has_ticked('postgres', 'earlier'),
	'T6: all other ticks are later: another database');
wait_for_sleep();
run('BEGIN; SAVEPOINT s; ' . soon('undone') . '; ROLLBACK TO s; ' . soon('redone') . '; COMMIT');
ok(has_ticked('postgres', 'redone'), 'T6: the same database, and a savepoint');
is(run(q{SELECT count(*) FROM idem.schedules WHERE name = 'undone'}), '0', 'what was rolled back is not there');
wait_for_sleep();

run(soon('resumed'));
is(run(q{SELECT idem_schedule_pause('resumed')}), 't', 'a schedule is paused');
run(soon('beside'));
has_ticked('postgres', 'beside') or die 'no tick';
wait_for_sleep();
is(run(q{SELECT count(*) FROM idem.jobs WHERE key LIKE 'resumed%'}), '0', 'T5: a schedule that is paused does not tick');
run(q{SELECT idem_schedule('resumed', 'soon', every => '1 day', starts_at => clock_timestamp() + interval '0.2 s')});
is(run(q{SELECT idem_schedule_resume('resumed')}), 't', 'it goes on');
ok(has_ticked('postgres', 'resumed'), 'T5, T6: the launcher hears of that, too');
wait_for_sleep();

# COMMIT PREPARED tells nobody: the next visit of the database finds the schedule
{
	my $s = session($node);

	$s->query('BEGIN; ' . soon('prepared') . q{; PREPARE TRANSACTION 'p'});
	$s->query(q{COMMIT PREPARED 'p'});
	$s->query(soon('next'));
	has_ticked('postgres', 'next') or die 'no tick';
	is($s->query(q{SELECT count(*) FROM idem.jobs WHERE key LIKE 'prepared@%'}),
		'1', 'T6: a schedule that was declared by COMMIT PREPARED ticks with the next visit');
	$s->quit;
	wait_for_sleep();
}

#
# A session that waits for a job is woken by the commit of the worker.  It would look for
# itself one second after it has begun to wait, and so half a second after each tick.
#

{
	my $s = session($node);
	my @latencies;

	$s->query(q{SELECT idem_schedule('waking', 'wait', every => '1.02 s', missed => 'all',
					  starts_at => clock_timestamp() + interval '0.5 s')});
	foreach my $tick (1 .. 3)
	{
		is($s->query(q{CALL idem_wait('wait', '1 min')}), 't', "idem_wait() returns with tick $tick");
		push @latencies,
		  $s->query(q{
			WITH f AS (SELECT * FROM idem_fetch('wait', lease => '1 min'))
			SELECT extract(epoch FROM clock_timestamp() - j.enqueued_at)
			  FROM f, idem.jobs AS j, idem_complete(f.job_id, f.token) WHERE j.job_id = f.job_id});
	}
	note "woken after @latencies s";
	cmp_ok(min(@latencies), '<', 0.3, 'the tick has woken the session');
	is($s->query(q{SELECT idem_unschedule('waking')}), 't', 'idem_unschedule');
	$s->quit;
}

#
# W4: an idle server: one visit per tick, and nothing between them
#

# how many ticks, visits, transaction ids and transactions there were until now; between
# two visits
sub counted
{
	my $counters = q{
		SELECT s.enqueued, w.runs, pg_snapshot_xmax(pg_current_snapshot()), d.xact_commit + d.xact_rollback,
			   w.memory_bytes
		  FROM idem.worker_status AS w, idem.queue_stats AS s, pg_stat_database AS d
		 WHERE s.datname = 'quiet' AND s.queue = 'quiet' AND d.datname = 'quiet'
		   AND w.state = 'sleeping' AND w.worker_pid IS NULL};
	my ($last, $this) = ('', '');

	while ($this eq '' || $this ne $last)
	{
		$last = $this;
		$this = run($counters);
	}
	return split /\|/, $this;
}

new_database('quiet');
run(q{SELECT idem_schedule('quiet', 'quiet', every => '1 s', missed => 'all')}, db => 'quiet');
$node->poll_query_until('postgres',
	q{SELECT enqueued >= 2 FROM idem.queue_stats WHERE datname = 'quiet' AND queue = 'quiet'})
  or die 'no ticks';
{
	my @before = counted();
	my ($ticks, $visits, $xids, $xacts, $memory);

	$node->poll_query_until('postgres',
		qq{SELECT enqueued >= $before[0] + 4 FROM idem.queue_stats WHERE datname = 'quiet' AND queue = 'quiet'})
	  or die 'no ticks';
	my @after = counted();

	($ticks, $visits, $xids, $xacts, $memory) = map { $after[$_] - $before[$_] } 0 .. 4;
	is($visits, $ticks, 'W4: one visit per tick, and no other');
	is($xids, $ticks, 'W4: one transaction id per tick');
	note "$xacts transactions for $ticks ticks";
	is($xacts % $ticks, 0, 'W4: the same number of transactions for each tick');
	cmp_ok($xacts, '<=', 8 * $ticks, 'W4: which is small');
	is($memory, 0, 'W4: the launcher does not grow');
}

#
# T1, T2, T6: one-second ticks in several databases, and cleanup beside them
#

my @series = map { my $db = $_; map { [ $db, $_ ] } 'a', 'b' } qw(born later postgres);

foreach my $series (@series)
{
	my ($db, $name) = @$series;

	run(qq{SELECT idem_schedule('$name', 'q', every => '1 s', payload => '"$name"', missed => 'all',
								starts_at => date_trunc('second', clock_timestamp()))}, db => $db);
}

my $expired = 20_000;

new_database('swept');
add_expired($node, $expired, db => 'swept');
run('ALTER DATABASE swept SET idem.cleanup = on');
run('ALTER DATABASE swept SET idem.cleanup_batch_size = 1');
ok(wait_for_ticks($node, 1, @series), 'T6: six schedules in three databases tick each second');

my $since = run('SELECT clock_timestamp(), pg_reload_conf()') =~ s/\|t$//r;

wait_for_ticks($node, 4, @series) or die 'no ticks';

my $left = run('SELECT count(*) FROM idem.keys', db => 'swept');

ok($left > 0 && $left < $expired, 'W5: cleanup of another database goes on beside the ticks') or diag "$left left";
foreach my $series (@series)
{
	my ($db, $name) = @$series;
	my ($median, $most, $max) = lags($node, $db, $name, since => $since);

	note "$db, schedule $name, beside cleanup: enqueued $median s after the tick (median), $most s, at most $max s";
	cmp_ok($most, '<', 0.8, "T6: $db: schedule $name: within a second beside cleanup (third quartile)");
}

run('ALTER DATABASE swept SET idem.cleanup_batch_size = 1000');
run('SELECT pg_reload_conf()');
ok($node->poll_query_until('swept', 'SELECT count(*) = 0 FROM idem.keys'), 'W5: and comes to its end');

# after this no tick of it, while others go on
my $gone = run(q{SELECT idem_unschedule('b'), clock_timestamp()}, db => 'born') =~ s/^t\|//r;

ok(wait_for_ticks($node, 2, grep { "@$_" ne 'born b' } @series), 'T6: they go on after that');
is(run(qq{SELECT count(*) FROM idem.jobs WHERE key LIKE 'b\@%' AND run_at > '$gone'}, db => 'born'),
	'0', 'no tick after idem_unschedule()');

foreach my $series ([ 'quiet', 'quiet' ], @series)
{
	my ($db, $name) = @$series;
	my ($median, undef, $max) = lags($node, $db, $name);

	note "$db, schedule $name: enqueued $median s after the tick (median), at most $max s";
	cmp_ok($median, '<', 1, "T6: $db: schedule $name: within a second (median)");
	series_ok($node, $db, $name, "$db: schedule $name: one job for each tick")
	  if "$db $name" ne 'born b';
}
is(run('SELECT count(*) FROM idem.jobs AS j JOIN idem.schedules AS s ON key LIKE name || $$@%$$
		 WHERE j.queue <> s.queue OR j.priority <> s.priority OR j.payload IS DISTINCT FROM s.payload'),
	'0', 'T1: queue, priority and payload are those of the schedule');
is(doctor('schedules', columns => 'status, detail', db => 'born'), 'ok|2 schedules, none is late',
	'H1: idem_doctor() finds nothing wrong');
is(log_count($node, qr/idem (?:cleanup|schedules) failed/), 0, 'W7: nothing has failed');

$node->stop;
never_two_ok($node);
log_ok($node);
done_testing();
