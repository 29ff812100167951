# W3: launcher and worker come back after SIGTERM, SIGINT and kill -9, never two
# of a kind at once, and cleanup goes on where it was; so it does over a smart,
# a fast and an immediate shutdown, none of which it holds up.
#
# Bugs of other projects (doc/peers.md section 4) that this test looks for:
#   pg_cron#99, #188, #302   SIGTERM, exit 0, never restarted
#   pg_partman#245           prevents the server from stopping
#
# There are more expired keys than the worker can remove one by one while the
# signals come, so it is busy all the time.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

# debug1: the postmaster logs which process it starts and which has ended
my $node = new_node(
	'worker_signals', conf => q{
shared_preload_libraries = 'idem'
restart_after_crash = on
log_min_messages = debug1
idem.cleanup_naptime = 1d
idem.cleanup_batch_size = 1
});

# Watches the processes until the condition holds.  What it has seen at most:
# launchers and workers at the same time.
run(q{
	CREATE FUNCTION watch_until(condition text, OUT launchers integer, OUT workers integer, OUT looks integer)
	LANGUAGE plpgsql AS $$
	DECLARE
		l integer;
		w integer;
		holds boolean;
	BEGIN
		launchers := 0;
		workers := 0;
		looks := 0;
		LOOP
			PERFORM pg_stat_clear_snapshot();
			SELECT count(*) FILTER (WHERE backend_type = 'idem launcher'),
				   count(*) FILTER (WHERE backend_type = 'idem cleanup')
			  INTO l, w FROM pg_stat_activity;
			launchers := greatest(launchers, l);
			workers := greatest(workers, w);
			looks := looks + 1;
			EXECUTE 'SELECT ' || condition INTO holds;
			EXIT WHEN holds;
			IF clock_timestamp() > transaction_timestamp() + interval '3 min' THEN
				RAISE 'does not come true: %', condition;
			END IF;
			PERFORM pg_sleep(0.01);
		END LOOP;
	END $$;
});

my ($launchers, $workers, $looks) = (0, 0, 0);

sub watch_until
{
	my ($condition) = @_;
	my ($l, $w, $n) = split /\|/,
	  run("SELECT * FROM watch_until(\$\$$condition\$\$)");

	$launchers = $l if $l > $launchers;
	$workers = $w if $w > $workers;
	$looks += $n;
	return;
}

sub pid_of
{
	my ($what) = @_;

	return run(
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem $what'");
}

sub expired
{
	return run('SELECT count(*) FROM idem.keys WHERE expires_at < now()');
}

# The process that is there now, with the worker at work, and not about to leave.
sub busy
{
	my ($what) = @_;
	my $pid = '';

	while ($pid eq '')
	{
		watch_until(
			q{EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem cleanup'
					AND datname = 'postgres' AND query LIKE 'idem cleanup: keys%'
					AND backend_start > clock_timestamp() - interval '1 s')}
		);
		$pid = pid_of($what);
	}
	return $pid;
}

# A worker that is not the one with this pid removes more.
sub goes_on
{
	my ($pid) = @_;
	my $left = expired();

	watch_until(
		qq{(SELECT count(*) < $left FROM idem.keys WHERE expires_at < now())
			AND EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem cleanup' AND pid <> $pid)}
	);
	return;
}

run(q{
	SELECT count(*) FROM idem_claim_many(ARRAY(SELECT 'live ' || n FROM generate_series(1, 100) AS n));
	SELECT idem_lease('leased', '1 day');
	SELECT idem_enqueue('queue', '1', key => 'job');
});
my $live = q{
	SELECT md5(string_agg(r, ',' ORDER BY r)) FROM (
		SELECT concat(ctid, xmin, k) AS r FROM idem.keys AS k WHERE expires_at > now()
		UNION ALL
		SELECT concat(ctid, xmin, j) FROM idem.jobs AS j
		UNION ALL
		SELECT concat(ctid, xmin, k) FROM idem.job_keys AS k) AS rows};
my $before = run($live);
my $backlog = 30000;

add_expired($node, $backlog);
run('SELECT pg_reload_conf()');

#
# the worker
#

# Since 19, DROP DATABASE and the like end the worker with SIGTERM: that alone is
# no failure.
{
	my $offset = -s $node->logfile;
	my $launcher = pid_of('launcher');
	my $pid = busy('cleanup');

	kill 'TERM', $pid;
	goes_on($pid);
	is(pid_of('launcher'), $launcher,
		'W3: SIGTERM to the worker: the launcher stays');
	is( join(', ',
			log_count($node, qr/"idem cleanup" \(PID $pid\) exited with exit code 1/, $offset),
			log_count($node, qr/idem cleanup failed/, $offset)),
		'1, 0',
		'W3, W7: SIGTERM to the worker: it ends, and the next one goes on');
}

{
	my $offset = -s $node->logfile;
	my $launcher = pid_of('launcher');
	my $pid = busy('cleanup');

	kill 'INT', $pid;
	goes_on($pid);
	is(pid_of('launcher'), $launcher,
		'W3: SIGINT to the worker: the launcher stays');
	$node->wait_for_log(qr/idem cleanup works again in database "postgres"/,
		$offset);
	is( log_count($node, qr/idem cleanup failed in database "postgres"/, $offset),
		1,
		'W3, W7: SIGINT to the worker: the next one goes on, logged once');
}

{
	my $pid = busy('cleanup');
	my $launcher = pid_of('launcher');

	kill 'HUP', $pid;
	goes_on($pid);
	$node->wait_for_log(
		qr/background worker "idem cleanup" \(PID $pid\) exited with exit code 0/);
	is(pid_of('launcher'), $launcher,
		'W3: SIGHUP to the worker does not disturb it');
}

{
	my $pid = busy('cleanup');

	crash_backend($node, $pid);
	goes_on($pid);
	pass('W3: kill -9 of the worker: the server restarts, and cleanup goes on');
}

#
# the launcher
#

# How long is ten seconds?  The launcher of logical replication comes back after
# five, so it can be ended twice in ten; ours must be there before it is back
# for the second time.
{
	my $logical = 'logical replication launcher';
	my $logical_is_there =
	  qq{EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = '$logical')};
	my $pid = busy('launcher');
	my $offset;

	watch_until($logical_is_there);
	$offset = -s $node->logfile;
	kill 'TERM', $pid,
	  run("SELECT pid FROM pg_stat_activity WHERE backend_type = '$logical'");
	$node->wait_for_log(qr/starting background worker process "$logical"/,
		$offset);
	watch_until($logical_is_there);
	kill 'TERM',
	  run("SELECT pid FROM pg_stat_activity WHERE backend_type = '$logical'");
	$node->wait_for_log(
		qr/(?:starting background worker process "$logical".*){2}/s, $offset);
	like(
		slurp_file($node->logfile, $offset),
		qr/starting background worker process "idem launcher".*starting background worker process "$logical"/s,
		'W3: SIGTERM to the launcher: back within ten seconds');
	like(
		slurp_file($node->logfile, $offset),
		qr/background worker "idem launcher" \(PID $pid\) exited with exit code 1/,
		'pg_cron#99: SIGTERM to the launcher: its exit status is 1');
	goes_on(0);
}

{
	my $pid = busy('launcher');
	my $offset = -s $node->logfile;

	kill 'INT', $pid;
	$node->wait_for_log(
		qr/background worker "idem launcher" \(PID $pid\) exited with exit code 1.*starting background worker process "idem launcher"/s,
		$offset);
	goes_on(0);
	isnt(pid_of('launcher'), $pid,
		'W3: SIGINT to the launcher: it comes back');
}

{
	my $pid = busy('launcher');

	crash_backend($node, $pid);
	goes_on(0);
	isnt(pid_of('launcher'), $pid,
		'W3: kill -9 of the launcher: it comes back with the server');
}

# The worker outlasts its launcher: the next launcher waits for it to leave.  It
# is stopped in a pause, where it holds no lock that others need.
{
	my $worker = 0;
	my $launcher;

	until (
		run(qq{SELECT count(*) FROM pg_stat_activity
				WHERE pid = $worker AND state = 'idle' AND wait_event_type = 'Extension'}))
	{
		kill 'CONT', $worker if $worker;
		$worker = busy('cleanup');
		kill 'STOP', $worker;
	}
	$launcher = pid_of('launcher');
	kill 'TERM', $launcher;
	watch_until(
		qq{EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem launcher'
				AND pid <> $launcher AND wait_event_type = 'Extension')});
	is(pid_of('cleanup'), $worker,
		'W3: a new launcher starts no worker beside one that is still there');
	kill 'CONT', $worker;
	goes_on($worker);
}

# by SQL, and both at once
{
	my $launcher = busy('launcher');
	my $offset = -s $node->logfile;
	my $worker = run(q{
		SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type LIKE 'idem %'});

	$node->wait_for_log(qr/starting background worker process "idem launcher"/,
		$offset);
	goes_on(0);
	like($worker, qr/^$launcher\|t$/m,
		'W3: pg_terminate_backend() of both at once: they come back');
}

#
# The server stops, whatever the worker is doing, and cleanup goes on with it.
#

foreach my $mode ('smart', 'fast', 'immediate')
{
	my $left = expired();

	busy('cleanup');
	$node->stop($mode);
	$node->start;
	goes_on(0);

	# an immediate shutdown may have undone some of it
	watch_until(
		"(SELECT count(*) < $left FROM idem.keys WHERE expires_at < now())");
	pass("pg_partman#245: $mode shutdown during cleanup, which goes on after it");
}

#
# SIGHUP to the launcher: a round at once.  The naptime is a day.
#

cmp_ok(expired(), '>', 0, 'the worker was busy all the time');
run('ALTER SYSTEM SET idem.cleanup_batch_size = 1000');
run('SELECT pg_reload_conf()');
watch_until('(SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now())');
watch_until(
	q{(SELECT phase = 'idle' AND last_finished_at > started_at AND backlog = 0
		 FROM idem.cleanup_progress WHERE datname = 'postgres')});

foreach my $round (1 .. 5)
{
	my $launcher = pid_of('launcher');

	add_expired($node, 10);
	kill 'HUP', $launcher;
	watch_until('(SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now())');
	is(pid_of('launcher'), $launcher,
		"W5: SIGHUP to the launcher starts a round at once, $round");
}

#
# what is left
#

is(run($live), $before, 'W1: of what has not expired no row was touched');
is( run(q{SELECT status FROM idem_doctor() WHERE "check" IN ('worker', 'last cleanup')}),
	"ok\nok",
	'H1: idem_doctor() finds nothing wrong');
note "looked at pg_stat_activity $looks times";
cmp_ok($looks, '>', 100, 'pg_stat_activity was looked at many times');
is("$launchers, $workers", '1, 1',
	'W3: there never were two launchers or two workers to be seen');
amcheck_ok($node, 'after all that');
$node->stop;

my %started = never_two_ok($node);

# with new_node, 3 after the shutdowns, 4 after signals, 2 after crashes
is($started{launcher}, 10, 'W3: a launcher was started for each one that ended');
cmp_ok($started{cleanup}, '>', 20, 'workers came and went');
log_ok($node, killed => 2);
done_testing();
