# W4: the launcher does not grow, and nothing is held while there is nothing to do.
#
# 10,000 visits to databases of all kinds, one round after another (pg_cron#26,
# #128: a worker that leaked 4.1 GB a week).  The launcher between rounds, and a
# worker in the pauses of its work, hold no transaction, no snapshot, no lock:
# VACUUM removes what has just died (timescaledb#1087: a transaction that was
# left open for three weeks, so that vacuum removed nothing).  The launcher is
# connected to no database.
#
# To be looked at the worker is stopped in a pause with SIGSTOP, so that it cannot
# go on meanwhile.
#
# IDEM_VISITS: another number of visits.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $visits = $ENV{IDEM_VISITS} // 10_000;
my $node = new_node(
	'memory',
	conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 3600
autovacuum = off
fsync = off
shared_buffers = 16MB
});

sub launcher_pid
{
	return run('SELECT launcher_pid FROM idem.worker_status');
}

# kilobytes of a process, by the kernel
sub kilobytes
{
	my ($pid, $what) = @_;
	my ($number) = slurp_file("/proc/$pid/status") =~ /^$what:\s+(\d+) kB$/m
	  or die "no $what";

	return $number;
}

# how many row versions of a table that have just died VACUUM cannot remove
sub not_removable
{
	my ($s) = @_;

	$s->query('UPDATE versions SET n = n + 1');
	$s->query('VACUUM (VERBOSE, INDEX_CLEANUP ON) versions');
	return join ' ', $s->{message} =~ /(\d+) (?:are dead but|dead row versions cannot be removed|dead row versions are) not yet/g;
}

# what a process of ours holds: database, transaction, xid, snapshot, locks
sub holds
{
	my ($pid) = @_;

	return run(
		qq{SELECT datname, xact_start, backend_xid, backend_xmin,
				  (SELECT count(*) FROM pg_locks AS l WHERE l.pid = a.pid)
			 FROM pg_stat_activity AS a WHERE pid = $pid});
}

#
# databases of all kinds
#

run(
	q{CREATE TABLE versions (n int);
	  INSERT INTO versions VALUES (0);
	  -- the launcher starts rounds until it has made so many visits more
	  CREATE PROCEDURE visit(n bigint) LANGUAGE plpgsql AS $$
	  DECLARE
		until bigint := n + (SELECT runs FROM idem.worker_status);
		status record;
	  BEGIN
		LOOP
			SELECT runs, state INTO status FROM idem.worker_status;
			EXIT WHEN status.runs >= until;
			IF status.state = 'sleeping' THEN
				PERFORM pg_reload_conf();
			END IF;
			COMMIT;
			PERFORM pg_sleep(0.01);
		END LOOP;
	  END $$});
foreach my $db (qw(cleaned switched_off failing without_1 without_2 without_3 without_4 without_5 without_6))
{
	$node->safe_psql('postgres', "CREATE DATABASE $db");
	run('CREATE EXTENSION idem', db => $db) if $db !~ /without/;
}
run('ALTER DATABASE switched_off SET idem.cleanup = off');
run(
	q{CREATE TRIGGER stranger BEFORE DELETE ON idem.keys FOR EACH ROW
	  EXECUTE FUNCTION suppress_redundant_updates_trigger()},
	db => 'failing');

#
# 10,000 visits
#

sub churn
{
	my ($n) = @_;

	$node->safe_psql('postgres', 'CREATE DATABASE passing');
	run("CREATE EXTENSION idem; SELECT idem_enqueue('q')", db => 'passing');
	add_expired($node, 10, db => 'cleaned', name => "round $n");
	run("CALL visit($visits / 20)");
	$node->safe_psql('postgres', 'DROP DATABASE passing');
	return;
}

SKIP:
{
	skip 'no /proc', 6 unless -e '/proc/self/status';

	# fill the caches first
	churn(0);
	run("CALL visit($visits / 20)");

	my $pid = launcher_pid();
	my ($bytes_before, $rss_before, $anon_before) = (
		run('SELECT memory_bytes FROM idem.worker_status'),
		kilobytes($pid, 'VmRSS'),
		kilobytes($pid, 'RssAnon'));
	my $runs_before = run('SELECT runs FROM idem.worker_status');

	churn($_) foreach 1 .. 20;
	my $made = run('SELECT runs FROM idem.worker_status') - $runs_before;
	my $bytes = run('SELECT memory_bytes FROM idem.worker_status') - $bytes_before;
	my $rss = kilobytes($pid, 'VmRSS') - $rss_before;
	my $anon = kilobytes($pid, 'RssAnon') - $anon_before;

	note "$made visits: $bytes bytes, $rss kB resident, $anon kB private, more than $bytes_before bytes, $rss_before kB, $anon_before kB";
	is(launcher_pid(), $pid, 'W4: pg_cron#26, #128: it is the same launcher all the time');
	cmp_ok($made, '>=', $visits, "W4: that has made $visits visits");
	cmp_ok($bytes, '<=', 32 * 1024, 'W4: and has not grown, by its own account');
	cmp_ok($anon, '<=', 1024, 'W4: nor by that of the kernel');
	cmp_ok($rss, '<=', 4096, 'W4: nor with the shared memory that it has touched');
	is( run(q{SELECT string_agg(phase, ' ' ORDER BY datname) FROM idem.cleanup_progress WHERE datname IN ('cleaned', 'failing', 'switched_off')}),
		'idle failing off', 'W4: the visits were of all kinds');
}

#
# idle
#

$node->poll_query_until('postgres',
	q{SELECT state = 'sleeping' AND worker_pid IS NULL FROM idem.worker_status})
  or die 'no rest';
is(holds(launcher_pid()), '||||0', 'W4: timescaledb#1087: an idle launcher holds nothing');
is( run(q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idem cleanup'}),
	'0', 'W4: and there is no worker');

my $s = session($node);

is(not_removable($s), '0', 'W4: VACUUM removes what has just died');

#
# a worker in the pauses of its work
#

my $stopped;

END
{
	kill 'CONT', $stopped if defined $stopped;
}

# Waits until the worker is in a pause, and stops it there.  False if there is none any more.
sub stop_in_pause
{
	my $attempts = 10 * $PostgreSQL::Test::Utils::timeout_default;

	while ($attempts-- > 0)
	{
		my $pid = run(
			q{SELECT pid FROM pg_stat_activity
			   WHERE backend_type = 'idem cleanup' AND datname = 'busy' AND state = 'idle'});

		next if $pid eq '' || !kill 'STOP', $pid;
		$stopped = $pid;
		return $pid
		  if run(
			qq{SELECT count(*) FROM pg_stat_activity WHERE pid = $pid AND state = 'idle'
				  AND wait_event_type = 'Extension'})
		  && slurp_file("/proc/$pid/stat") =~ /\) T /;
		kill 'CONT', $pid;
		undef $stopped;
	}
	die 'no worker has a pause';
}

SKIP:
{
	skip 'no /proc', 12 unless -e '/proc/self/status';

	$node->safe_psql('postgres', 'CREATE DATABASE busy');
	run('CREATE EXTENSION idem; CREATE TABLE versions (n int); INSERT INTO versions VALUES (0)', db => 'busy');
	# so small that it runs long enough to be caught, also on a busy machine
	run('ALTER DATABASE busy SET idem.cleanup_batch_size = 5');
	add_expired($node, 30_000, db => 'busy', name => 'secret key');

	my $busy = session($node, db => 'busy');

	$node->reload;
	foreach my $n (1 .. 3)
	{
		my $pid = stop_in_pause();
		my $left = $busy->query('SELECT count(*) FROM idem.keys');

		cmp_ok($left, '>', 0, "W4: pause $n: there is more to remove");
		is(holds($pid), 'busy||||0', "W4: timescaledb#1087: pause $n: the worker holds nothing");
		is(not_removable($busy), '0', "W4: pause $n: VACUUM removes what has just died");

		# also of what it has removed itself
		$busy->query('VACUUM (VERBOSE, INDEX_CLEANUP ON) idem.keys');
		my ($not_yet) = $busy->{message} =~ /(\d+) (?:are dead but|dead row versions are) not yet/;

		is($not_yet, '0', "W4: pause $n: and what the worker has removed");
		is( run(qq{SELECT count(*) FROM pg_stat_activity WHERE pid = $pid AND query LIKE 'idem cleanup: %' AND query NOT LIKE '%secret%'}),
			'1', "S3: pause $n: its activity shows no keys");
		kill 'CONT', $pid;
		undef $stopped;

		# the next one is another one
		$node->poll_query_until('busy',
			"SELECT count(*) < $left OR count(*) = 0 FROM idem.keys")
		  or die 'cleanup does not go on';
	}
	run('ALTER DATABASE busy SET idem.cleanup_batch_size = 1000');
	$node->poll_query_until('busy', 'SELECT count(*) = 0 FROM idem.keys')
	  or die 'cleanup does not come to an end';
	ok( $node->poll_query_until('postgres',
			q{SELECT state = 'sleeping' AND worker_pid IS NULL FROM idem.worker_status}),
		'W4: there is an end');
	is(holds(launcher_pid()), '||||0', 'W4: after that the launcher holds nothing');
	is(not_removable($busy), '0', 'W4: and VACUUM removes what has just died');
	$busy->quit;
}

$s->quit;
$node->stop;
log_ok($node);
is(scalar(() = slurp_file($node->logfile) =~ /idem cleanup failed in database "failing"/g),
	1, 'W7: a thousand failures are one line in the log');
done_testing();
