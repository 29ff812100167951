# Many databases and few background worker slots.
#
#   W5  every database with the extension has its turn, none starves; templates
#       and databases that allow no connections are left out
#   W7  no free slot: logged once when it begins and once when it is over, tried
#       again later and later, over by itself
#   H1  idem_doctor() says what to do, and that helps
#
# Bugs of other projects (doc/peers.md section 4) that this test looks for:
#   timescaledb#7774, #1593   retries template0 forever, uses all worker slots
#   timescaledb#8543, #7602   out of slots: logs every second
#   pg_partman#180            no free slot: gone for good

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $no_slot = qr/no background worker slot is free for idem cleanup/;
my $slot = qr/a background worker slot is free again for idem cleanup/;
my $is_clean = q{SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now()};

# Slots are taken by queries that run in a parallel worker.
my $conf = q{
shared_preload_libraries = 'idem'
log_min_messages = debug1
max_connections = 20
max_wal_senders = 0
max_parallel_workers = 8
};

sub new_server
{
	my ($name, $more) = @_;

	return new_node($name, conf => $conf . $more);
}

sub parallel
{
	my ($node) = @_;

	return (
		$node->pg_version < 16 ? 'force_parallel_mode' : 'debug_parallel_query')
	  . ' = on';
}

sub wait_for_clean
{
	my ($node, $db) = @_;

	$node->poll_query_until($db, $is_clean) or die "$db is not cleaned up";
	return;
}

#
# max_worker_processes is too small.  The launcher of logical replication takes
# the first slot, idem the second one; what it starts needs a third one.
#

{
	my $node = new_server('too_small', "idem.cleanup_naptime = 1d\n");

	foreach my $slots (0 .. 2)
	{
		my $offset = -s $node->logfile;
		my $check = $slots < 2 ? 'worker' : 'worker slots';

		$node->safe_psql('postgres',
			"ALTER SYSTEM SET max_worker_processes = $slots");
		$node->restart;
		is(claim_status($node, "'key $slots'"),
			'claimed|', "$slots slots: the server is there, claims work");
		add_expired($node, 10, name => "slots $slots");
		if ($slots == 2)
		{
			$node->wait_for_log($no_slot, $offset);
			$node->poll_query_until(
				'postgres', q{
				SELECT state = 'waiting for a free slot' AND no_slot_since IS NOT NULL
				  FROM idem.worker_status}) or die 'finds a slot';
		}
		else
		{
			is( $node->safe_psql(
					'postgres',
					'SELECT preloaded, state, launcher_pid FROM idem.worker_status'),
				't|stopped|',
				"$slots slots: no launcher");
		}
		is(doctor($check, node => $node),
			'fail', "H1: $slots slots: idem_doctor() says so");
		is($node->safe_psql('postgres', 'SELECT idem_cleanup(5)'),
			'5', "$slots slots: cleanup by hand works");
		$node->safe_psql(
			'postgres',
			doctor($check, columns => 'fix', node => $node));
		$node->restart;
		wait_for_clean($node, 'postgres');
		is(doctor($check, node => $node),
			'ok', "H1: $slots slots: with the fix and a restart it works");
		is(log_count($node, $no_slot, $offset),
			$slots == 2 ? 1 : 0, "W7: $slots slots: that was logged once");
	}
	$node->stop;
	never_two_ok($node);
	log_ok($node);
}

#
# All slots are taken by others for some time: launcher and three more.
#

my $node = new_server('slots', q{
max_logical_replication_workers = 0
max_worker_processes = 4
idem.cleanup_naptime = 1d
});
my @takers = map { session($node) } 1 .. 3;

$_->query('SET ' . parallel($node)) foreach @takers;

sub wait_for_sleep
{
	my ($runs) = @_;

	$node->poll_query_until('postgres',
		"SELECT state = 'sleeping' AND runs >= $runs FROM idem.worker_status")
	  or die 'the launcher does not come to rest';
	return;
}

sub reload
{
	$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
	return;
}

sub take_slots
{
	wait_for_sleep(0);
	$_->send('SELECT pg_sleep(3600)') foreach @takers;
	$node->poll_query_until('postgres',
		q{SELECT count(*) = 3 FROM pg_stat_activity WHERE backend_type = 'parallel worker'}
	) or die 'slots are not taken';
	return;
}

sub give_slots
{
	$node->safe_psql('postgres', "SELECT pg_cancel_backend($_->{pid})")
	  foreach @takers;
	is(join(' ', map { $_->receive; $_->{sqlstate} } @takers),
		'57014 57014 57014', 'the slots are free again');
	return;
}

# Transactions of the launcher as the log shows them, in seconds of the day.  It
# has one for each attempt to start a worker, and one to read the list of
# databases.
sub transactions
{
	my ($launcher, $offset) = @_;

	return map { my ($h, $m, $s) = split /:/; 3600 * $h + 60 * $m + $s }
	  slurp_file($node->logfile, $offset) =~
	  /^\S+ (\S+) \S+ \[$launcher\] \S+ DEBUG:  CommitTransaction\(1\)/mg;
}

sub wait_for_transactions
{
	my ($launcher, $offset, $n) = @_;

	$node->wait_for_log(
		qr/(?:\[$launcher\] \S+ DEBUG:  CommitTransaction\(1\).*?){$n}/s,
		$offset);
	return;
}

{
	my ($launcher, $offset, @times, @gaps);

	take_slots();
	add_expired($node, 10);
	$launcher =
	  $node->safe_psql('postgres',
		'SELECT launcher_pid FROM idem.worker_status');
	$node->safe_psql('postgres', 'ALTER SYSTEM SET log_min_messages = debug5');

	# a reload, and what follows by itself: four attempts
	$offset = -s $node->logfile;
	reload();
	wait_for_transactions($launcher, $offset, 5);
	@times = transactions($launcher, $offset);
	@gaps = map { $times[ $_ + 1 ] - $times[$_] } 1 .. 3;
	$_ += $_ < 0 ? 86400 : 0 foreach @gaps;
	note "attempts after @gaps s";
	ok( $gaps[0] > 0.9 && $gaps[1] > 1.9 && $gaps[2] > 3.9,
		'W7: no free slot: the next attempts are later and later');
	is( $node->safe_psql(
			'postgres', q{
			SELECT state, worker_pid, no_slot_since IS NOT NULL FROM idem.worker_status;
			SELECT status, fix FROM idem_doctor() WHERE "check" = 'worker slots'}),
		"waiting for a free slot||t\nfail|ALTER SYSTEM SET max_worker_processes = 12;",
		'H1: idem_doctor() and idem.worker_status say so');
	is($node->safe_psql('postgres', $is_clean), 'f', 'nothing is removed');
	is(log_count($node, $no_slot), 1, 'W7: no free slot: logged once');

	# the launcher gets no signal
	give_slots();
	wait_for_clean($node, 'postgres');
	wait_for_sleep(0);
	is( doctor('worker slots', node => $node),
		'ok',
		'W7, pg_partman#180: a slot is free: cleanup goes on by itself');
	is(log_count($node, $slot), 1, 'W7: a slot is free: logged once');

	# a round by force, again and again
	take_slots();
	foreach my $round (1 .. 20)
	{
		$offset = -s $node->logfile;
		reload();
		wait_for_transactions($launcher, $offset, 2);
	}
	is( log_count($node, $no_slot) . ', ' . log_count($node, $slot),
		'2, 1',
		'W7, timescaledb#8543: 20 rounds without a slot, and one line in the log');
	add_expired($node, 10);
	give_slots();
	$node->safe_psql('postgres', 'ALTER SYSTEM RESET log_min_messages');
	reload();
	wait_for_clean($node, 'postgres');
	is( log_count($node, $no_slot) . ', ' . log_count($node, $slot),
		'2, 2', 'W7: and one when it is over');
}

#
# Which databases are visited, and how often: the launcher counts.
#

{
	my $round = sub {
		my $before = $node->safe_psql('postgres',
			'SELECT runs FROM idem.worker_status');

		reload();
		wait_for_sleep($before + 1);
		return $node->safe_psql('postgres',
			"SELECT runs - $before FROM idem.worker_status");
	};
	my ($offset, $holder);

	$node->safe_psql('postgres', 'CREATE DATABASE usual');
	$node->safe_psql('usual', 'CREATE EXTENSION idem');
	add_expired($node, 10, db => 'usual');
	$node->safe_psql('postgres', $_)
	  foreach map({ "CREATE DATABASE $_ TEMPLATE usual" }
		'template', 'closed', 'limited', 'dropped'),
	  'ALTER DATABASE template IS_TEMPLATE true',
	  'ALTER DATABASE closed ALLOW_CONNECTIONS false',
	  'ALTER DATABASE limited CONNECTION LIMIT 0',
	  q{UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'dropped'};
	$offset = -s $node->logfile;

	# postgres, usual, limited
	is(join(' ', map { $round->() } 1 .. 20),
		join(' ', (3) x 20),
		'W5, timescaledb#7774: 20 rounds, each with one visit of every database that allows connections');
	is( $node->safe_psql('postgres',
			q{SELECT datname FROM idem.cleanup_progress WHERE last_finished_at IS NOT NULL ORDER BY 1}),
		"limited\npostgres\nusual",
		'W5: that are databases that allow connections');
	is( join(
			"\n",
			grep { !/SIGHUP|parameter "|checkpoint/ }
			  slurp_file($node->logfile, $offset) =~
			  /^.* (?:WARNING|ERROR|FATAL|LOG|PANIC):  .*$/mg),
		'',
		'timescaledb#1593: nothing is logged about the others');

	# now they are as others
	$node->safe_psql('postgres', $_)
	  foreach 'ALTER DATABASE template IS_TEMPLATE false',
	  'ALTER DATABASE closed ALLOW_CONNECTIONS true',
	  q{UPDATE pg_database SET datconnlimit = -1 WHERE datname IN ('dropped', 'limited')};
	is( join(' ',
			map { $node->safe_psql($_, 'SELECT count(*) FROM idem.keys') }
			  'usual', 'limited', 'template', 'closed', 'dropped'),
		'0 0 10 10 10',
		'W5: a connection limit does not keep the worker out');
	is($round->(), 6, 'W5: databases that are opened belong to the next round');
	is( join(' ',
			map { $node->safe_psql($_, 'SELECT count(*) FROM idem.keys') }
			  'template', 'closed', 'dropped'),
		'0 0 0',
		'W5: and are cleaned up');

	# a database that is locked for long: no worker is sent there
	add_expired($node, 10, db => $_) foreach 'usual', 'closed';
	$holder = session($node);
	$holder->query('BEGIN; ALTER DATABASE usual RENAME TO unusual');
	$offset = -s $node->logfile;
	reload();
	wait_for_clean($node, 'closed');
	wait_for_sleep(0);
	is( $node->safe_psql(
			'postgres', q{
			SELECT count(*) FROM pg_locks
			 WHERE classid = 'pg_database'::regclass AND NOT granted}),
		'0',
		'W2: a rename of a database stays open: the worker does not wait, others are visited');
	$holder->query('ROLLBACK');
	$holder->quit;
	wait_for_clean($node, 'usual');
	pass('W2: it is visited when they have gone');
	is(log_count($node, qr/idem cleanup failed|FATAL/, $offset),
		0, 'W7: that was no failure');
}

$_->quit foreach @takers;
$node->stop;
never_two_ok($node);
log_ok($node);

#
# 100 databases.  Launcher and one more slot, which queries of others take
# again and again.  In two of the databases there is more to be removed than can
# be done in this time, and the naptime is shorter than a round: they are due all
# the time.
#

my $few = new_server('few', q{
max_logical_replication_workers = 0
max_worker_processes = 2
idem.cleanup_naptime = 1d
});
my @databases = map { "d$_" } 1 .. 100;
my @busy = ('d1', 'd100');

$few->safe_psql('postgres', 'CREATE DATABASE d0');
$few->safe_psql('d0', 'CREATE EXTENSION idem');
add_expired($few, 10, db => 'd0');
$few->safe_psql('d0', q{SELECT idem_claim('live')});
$few->safe_psql('postgres',
	'ALTER DATABASE d0 IS_TEMPLATE true ALLOW_CONNECTIONS false');
$few->safe_psql('postgres', "CREATE DATABASE $_ TEMPLATE d0")
  foreach @databases;
foreach my $db (@busy)
{
	add_expired($few, 10000, db => $db, name => 'more');
	$few->safe_psql('postgres',
		"ALTER DATABASE $db SET idem.cleanup_batch_size = 1");
}

# at first there is no slot at all
my $taker = session($few);

$taker->query('SET ' . parallel($few));
$few->poll_query_until('postgres',
	q{SELECT state = 'sleeping' FROM idem.worker_status})
  or die 'the launcher does not come to rest';
$taker->send('SELECT pg_sleep(3600)');
$few->poll_query_until('postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'parallel worker'}
) or die 'the slot is not taken';
$few->safe_psql('postgres', 'ALTER SYSTEM SET idem.cleanup_naptime = 1');
$few->safe_psql('postgres', 'SELECT pg_reload_conf()');
$few->wait_for_log($no_slot);

my $bench_file = PostgreSQL::Test::Utils::tempdir() . '/parallel.sql';
my $bench_out = '';

append_to_file($bench_file,
	'SET ' . parallel($few) . ";\nSELECT pg_sleep(0.02);\n");

my $bench = IPC::Run::start(
	[
		$few->installed_command('pgbench'), '--no-vacuum',
		'--host' => $few->host,
		'--port' => $few->port,
		'--file' => $bench_file,
		'--rate' => 20,
		'--time' => 3600,
		'postgres'
	],
	'<' => \undef,
	'>&' => \$bench_out);

$few->safe_psql('postgres', "SELECT pg_cancel_backend($taker->{pid})");
$taker->receive;
$taker->quit;

foreach my $round (1, 2)
{
	my $since = $few->safe_psql('postgres', 'SELECT clock_timestamp()');

	ok( $few->poll_query_until(
			'postgres', qq{
			SELECT count(*) FILTER (WHERE last_finished_at > '$since') = 98
			   AND bool_or(datname = 'd1') AND bool_or(datname = 'd100')
			  FROM idem.cleanup_progress WHERE datname LIKE 'd%'}),
		"W5: 100 databases, two slots, others take one of them: each has its turn, round $round"
	);
}
is( join(' ', map { $few->safe_psql($_, $is_clean) } @busy),
	'f f', 'there was more to be done elsewhere all the time');
$bench->signal('TERM');
$bench->finish;
$few->safe_psql('postgres', "ALTER DATABASE $_ RESET ALL") foreach @busy;
wait_for_clean($few, $_) foreach @busy;
is( join(' ',
		grep { $few->safe_psql($_, 'SELECT key FROM idem.keys') ne 'live' }
		  @databases),
	'',
	'W1: in each database what had expired is gone, what lives is there');
$few->stop;

my %started = never_two_ok($few);

cmp_ok($started{cleanup}, '>=', 200, 'W5: there were enough visits');
cmp_ok(log_count($few, qr/starting background worker process "parallel worker/),
	'>', 1, 'others have used the slot');
is(log_count($few, qr/idem cleanup failed/), 0, 'W7: none has failed');
note 'times without a slot: ' . log_count($few, $no_slot);
log_ok($few);
done_testing();
