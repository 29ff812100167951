# Failures of the worker outside of its work on a table, and its start and end.
#
#   W3  after every start of the launcher the first visits begin after a second
#       and are spread over five; a normal stop logs no FATAL
#   W5  an extension that was dropped and created again is cleaned up soon
#   W7  every failure is logged once, shown in cleanup_progress and by
#       idem_doctor(), and tried again later and later

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# debug1: the postmaster logs which process it starts
my $node = new_node(
	'failures', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
autovacuum = off
log_min_messages = debug1
restart_after_crash = on
});

# how often it was logged that cleanup fails, that it works again, and errors of processes
sub logged
{
	my ($db, $offset) = @_;

	return join ' ', cleanup_logged($db, $offset), log_count($node, qr/(?:ERROR|FATAL|PANIC):/, $offset);
}

# returns once it has failed so many times more
sub wait_for_failures
{
	my ($db, $n) = @_;

	foreach (1 .. $n)
	{
		my $last = progress($db, 'last_error_at');

		$node->poll_query_until('postgres',
			"SELECT last_error_at > '$last' FROM idem.cleanup_progress WHERE datname = '$db'")
		  or die 'it is not tried again';
	}
	return;
}

foreach my $db (qw(one two three))
{
	run("CREATE DATABASE $db");
	run('CREATE EXTENSION idem', db => $db);
}
cleanup_round($node, qw(postgres one two three));

#
# W7: a catalog is locked
#

my $blocker = session($node, db => 'one');
my $offset = -s $node->logfile;

add_expired($node, 10, db => 'one');
$blocker->query('BEGIN; LOCK TABLE pg_extension IN ACCESS EXCLUSIVE MODE');
run('SELECT pg_reload_conf()');
$node->poll_query_until('postgres',
	q{SELECT phase = 'failing' FROM idem.cleanup_progress WHERE datname = 'one'})
  or die 'it does not fail';
is(progress('one', 'last_error'), 'canceling statement due to lock timeout',
	'W7: pg_extension is locked: cleanup_progress shows it');
wait_for_failures('one', 2);
is(logged('one', $offset), '1 0 0', 'W7: pg_extension is locked: one line for all attempts');
like( slurp_file($node->logfile, $offset),
	qr/idem cleanup failed in database "one": canceling statement due to lock timeout\n/,
	'W7: which says what is wrong');
is( $blocker->query(q{SELECT status, detail LIKE 'failing, last at %: canceling statement due to lock timeout'
		FROM idem_doctor() WHERE "check" = 'last cleanup'}),
	'fail|t', 'H1: idem_doctor() shows it');
$blocker->query('COMMIT');
$blocker->quit;
ok( $node->poll_query_until('one', 'SELECT count(*) = 0 FROM idem.keys'),
	'W7: without the lock cleanup goes on by itself');
$node->wait_for_log(qr/idem cleanup works again in database "one"/, $offset);
is(logged('one', $offset), '1 1 0', 'W7: which is logged once');
is(doctor('last cleanup', db => 'one'), 'ok', 'H1: idem_doctor() says ok');

#
# W7: a file is missing: one that the worker needs before it comes to our
# tables, and then one that it needs to connect
#

my $path = $node->data_dir . '/'
  . run(q{CHECKPOINT; SELECT pg_relation_filepath('pg_extension')}, db => 'two');

sub fails_without
{
	my ($file, $what, $error) = @_;

	# nothing of it is cached
	$node->stop;
	rename $file, "$file.away" or die;
	$offset = -s $node->logfile;
	$node->start;
	$node->poll_query_until('postgres',
		q{SELECT phase = 'failing' FROM idem.cleanup_progress WHERE datname = 'two'})
	  or die 'it does not fail';
	like(progress('two', 'last_error'), $error, "W7: $what: cleanup_progress shows it");
	wait_for_failures('two', 2);
	is(logged('two', $offset), '1 0 0', "W7: $what: one line for all attempts");
	like( slurp_file($node->logfile, $offset), qr/idem cleanup failed in database "two": $error/,
		"W7: $what: it says what is wrong");
	rename "$file.away", $file or die;
	$node->wait_for_log(qr/idem cleanup works again in database "two"/, $offset);
	is(logged('two', $offset), '1 1 0', "W7: $what: it works again by itself");
	is(doctor('last cleanup', db => 'two') . ' ' . progress('two', 'phase'), 'ok idle', "W7: $what: then all is well");
	return;
}

fails_without($path, 'the file of pg_extension is missing',
	qr{could not open file "base/\d+/\d+": No such file or directory});
fails_without($node->data_dir . '/base/' . run('SELECT oid FROM pg_database WHERE datname = current_database()', db => 'two'),
	'the directory of the database is missing',
	qr{database "two" does not exist: The database subdirectory "base/\d+" is missing.|(?:could not open|"base/\d+" is not a valid)});

# another session has locked what it needs to connect: it is ended after ten seconds
my $offset_connect = -s $node->logfile;

$blocker = session($node, db => 'three');
$blocker->query('BEGIN; LOCK TABLE pg_db_role_setting IN ACCESS EXCLUSIVE MODE');
$blocker->query('SELECT pg_reload_conf()');
$blocker->query(q{
	DO $$ BEGIN
		FOR i IN 1 .. 18000 LOOP
			IF (SELECT count(*) = 1 FROM idem_internal.idem_stat_cleanup() WHERE last_error = 'the worker could not connect') THEN
				RETURN;
			END IF;
			PERFORM pg_sleep(0.01);
		END LOOP;
		RAISE 'does not come true';
	END $$});
$blocker->query('COMMIT');
$blocker->quit;
$node->wait_for_log(qr/idem cleanup works again in database/, $offset_connect);
is( log_count($node, qr/idem cleanup failed in database "\w+": the worker could not connect\n/, $offset_connect) . ' '
	  . log_count($node, qr/(?:ERROR|FATAL):/, $offset_connect),
	'1 0', 'W7: a worker that cannot connect: logged once, and shown');
cleanup_round($node, qw(postgres one two three));

#
# W5: DROP and CREATE EXTENSION.  The worker has seen that there is none, and
# comes again as soon as the list of databases is read, once per naptime.
#

my $user = session($node, db => 'three');

run('DROP EXTENSION idem', db => 'three');
cleanup_round($node);
cleanup_round($node);
is(progress('three', 'phase'), 'not installed', 'the extension was dropped');
$user->query('CREATE EXTENSION idem');
is( $user->query(q{SELECT status, fix FROM idem_doctor() WHERE "check" = 'last cleanup'}),
	'warn|SELECT pg_catalog.pg_reload_conf();',
	'H1: created again: idem_doctor() does not say ok before the worker has come');
run(doctor('last cleanup', columns => 'fix', db => 'three'), db => 'three');
ok( $node->poll_query_until('three',
		q{SELECT status = 'ok' FROM idem_doctor() WHERE "check" = 'last cleanup'}),
	'H1: its fix brings the worker');

# Without reloads.  Two visits find nothing, then the next one would be ten minutes later.
sub wait_for_visits
{
	my $runs = run('SELECT runs FROM idem.worker_status');

	$node->poll_query_until('postgres', "SELECT runs > $runs + 15 FROM idem.worker_status") or die;
	return;
}

sub drop_it
{
	$user->query('DROP EXTENSION idem');
	$node->poll_query_until('postgres',
		q{SELECT phase = 'not installed' FROM idem.cleanup_progress WHERE datname = 'three'})
	  or die 'it is not seen';
	wait_for_visits();
	return;
}

run(q{ALTER SYSTEM SET idem.cleanup_naptime = '1 s'});
cleanup_round($node, 'three');
drop_it();
$user->query('CREATE EXTENSION idem');
ok( $node->poll_query_until('postgres',
		q{SELECT phase = 'idle' FROM idem.cleanup_progress WHERE datname = 'three'}),
	'W5: dropped and created again: the worker comes soon');

my %use = (
	'a claim' => q{SELECT idem_claim('expired', ttl => '1 s')},
	'an enqueue' => q{
		SELECT idem_queue_set('q', keep => '1 s');
		SELECT idem_enqueue('q');
		SELECT idem_complete(job_id, token) FROM idem_fetch('q', 1, '1 s')});

foreach my $use (sort keys %use)
{
	drop_it();
	$user->query('BEGIN; CREATE EXTENSION idem');
	wait_for_visits();
	$user->query("COMMIT; SET idem.clock_offset = -100000; $use{$use}; RESET idem.clock_offset");
	ok( $node->poll_query_until('three',
			'SELECT (SELECT count(*) FROM idem.keys) + (SELECT count(*) FROM idem.job_log) = 0'),
		"W5: created in a long transaction, then $use: the worker comes soon");
}
run('ALTER SYSTEM RESET idem.cleanup_naptime');
cleanup_round($node, 'three');
$user->quit;

#
# W3: the start.  Four databases: one visit after a second, then one per second.
#

# seconds of the day of the lines of the log that match
sub seconds_of
{
	my ($pattern, $from) = @_;

	return map { /^\S+ (\d+):(\d+):([\d.]+) .*$pattern/ ? 3600 * $1 + 60 * $2 + $3 : () }
	  split /\n/, slurp_file($node->logfile, $from);
}

my $worker = qr/starting background worker process "idem cleanup"/;

sub starts_slowly
{
	my ($how, $from) = @_;

	$node->wait_for_log(qr/(?:$worker.*){4}/s, $from);

	my ($start) = seconds_of(qr/starting background worker process "idem launcher"/, $from);
	my @visits = map { ($_ - $start) + ($_ < $start ? 24 * 3600 : 0) } seconds_of($worker, $from);
	my @early = grep { $visits[$_] < 1 + $_ } 0 .. 3;

	is("@early", '', "W3: $how: the first visits are spread")
	  or diag "visits after @visits seconds";
	return;
}

$offset = -s $node->logfile;
$node->restart;
starts_slowly('a restart', $offset);

$offset = -s $node->logfile;
my $victim = session($node);

crash_backend($node, $victim->{pid});
$victim->lost;
starts_slowly('a crash', $offset);

$offset = -s $node->logfile;
run('SELECT pg_terminate_backend(launcher_pid) FROM idem.worker_status');
starts_slowly('SIGTERM to the launcher', $offset);

#
# W3: the end: no FATAL, at rest and at work
#

run('ALTER SYSTEM SET idem.cleanup_batch_size = 1');
foreach my $mode ('smart', 'fast')
{
	foreach my $state ('rest', 'work')
	{
		add_expired($node, 3000, db => 'one') if $state eq 'work';
		$node->reload;
		$node->poll_query_until('postgres', $state eq 'work'
			? q{SELECT count(*) > 0 FROM pg_stat_activity WHERE backend_type = 'idem cleanup' AND datname = 'one'}
			: q{SELECT state = 'sleeping' FROM idem.worker_status})
		  or die;
		$offset = -s $node->logfile;
		$node->stop($mode);

		# sessions have a name before that
		is(log_count($node, qr/\] \w{5} (?:FATAL|ERROR):/, $offset), '0',
			"W3: a $mode shutdown at $state logs no error");
		$node->start;
		if ($state eq 'work')
		{
			run('DELETE FROM idem.keys', db => 'one');
		}
	}
}

$node->stop;
log_ok($node, killed => 1);
done_testing();
