# A4, A7: more sessions that wait than there are places, a thousand of them, none that can
# be woken because the library is not preloaded; and what has no event.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes;

my $node = new_node(
	'wait_limits', conf => q{
shared_preload_libraries = 'idem'
autovacuum = off
max_connections = 1100
superuser_reserved_connections = 10
idem.cleanup = off
idem.look_after = 1h
idem.waits_max = 16
});
my $call = q{CALL idem_wait('q', '10 min')};

# Waits for so many queues
sub wait_any
{
	my ($n) = @_;

	return sprintf q{CALL idem_wait_any('{%s}', '10 min')}, join ',', map { "r $_" } 1 .. $n;
}

sub asleep
{
	my ($session) = @_;

	wait_until_asleep($node, 1, "pid = $session->{pid}");
	return;
}

sub enqueue
{
	return run(q{SELECT job_id FROM idem_enqueue('q')});
}

sub fetch_ok
{
	my ($session, $job, $name) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is( $session->query(
			q{SELECT job_id FROM idem_fetch('q', lease => '1 h') AS f WHERE idem_complete(f.job_id, f.token)}),
		$job, $name);
	return;
}

#
# No place: the session looks ten times per second, and says so once.
#

{
	# one session takes its own place and all that are not shared out, the others take one each
	my $all = session($node);
	my $none = session($node);
	my @others = map { session($node) } 1 .. 7;

	$all->send(wait_any(9));
	asleep($all);
	foreach my $other (@others)
	{
		$other->send(q{CALL idem_wait('other', '10 min')});
		asleep($other);
	}
	foreach my $time (1 .. 2)
	{
		$none->send($call);
		asleep($none);
		my $job = enqueue();
		is($none->receive, 't', "A7: a session without a place finds the job, $time");
		is($none->{message} =~ /WARNING:  53400: too many sessions wait/ ? 'warned' : 'silent',
			$time == 1 ? 'warned' : 'silent', "A7: it is warned once per session, $time");
		fetch_ok($none, $job, "A7: it fetches the job, $time");
	}

	# a job that becomes due later
	$none->send($call);
	asleep($none);
	run(q{SELECT idem_enqueue('q', delay => '300 ms')});
	is($none->receive, 't', 'A4, A7: a session without a place finds a job that becomes due later');
	run('TRUNCATE idem.jobs');

	$none->send($call);
	asleep($none);
	run("SELECT pg_cancel_backend($none->{pid})");
	$none->receive;
	is($none->{sqlstate}, '57014', 'A7: a session without a place is cancelled');
	is($none->query(q{CALL idem_wait('q', '200 ms')}), 'f', 'A2: and waits until its timeout');

	run(q{SELECT idem_enqueue('r 7')});
	is($all->receive, 't|r 7', 'A2: the session with all places is woken');
	run('TRUNCATE idem.jobs');
	foreach my $other (@others)
	{
		run("SELECT pg_cancel_backend($other->{pid})");
		$other->receive;
		unlike($other->{message}, qr/53400/, 'A7: a session gets a place, whatever another one takes');
	}
	$_->quit foreach $all, $none, @others;
}

# A7: five sessions that wait for a thousand queues leave places for others, also in another database
{
	my @greedy = map { session($node) } 1 .. 5;
	my @modest;

	new_database('victim');
	foreach my $greedy (@greedy)
	{
		$greedy->send(wait_any(1000));
		asleep($greedy);
	}
	foreach my $n (1 .. 3)
	{
		my $session = session($node, db => 'victim');

		$session->send($call);
		asleep($session);
		push @modest, $session;
	}
	# a job for each of them
	run(q{SELECT idem_enqueue('q') FROM generate_series(1, 3)}, db => 'victim');
	foreach my $session (@modest)
	{
		is($session->receive, 't', 'A7: a session in another database is woken');
		unlike($session->{message}, qr/53400/, 'A7: it has a place');
	}
	$_->quit foreach @modest;
	run("SELECT idem_enqueue('r 1000')");
	foreach my $greedy (@greedy)
	{
		is($greedy->receive, 't|r 1000', 'A7: without a place for all queues, a session looks');
		like($greedy->{message}, qr/53400/, 'A7: and is warned');
	}
	run('TRUNCATE idem.jobs');
	$_->quit foreach @greedy;
}

# One place is missing: it is woken for the others, and looks for that one.
foreach my $n (1, 10)
{
	my $session = session($node);

	$session->send(wait_any(10));
	asleep($session);
	run("SELECT idem_enqueue('r $n')");
	is($session->receive, "t|r $n", "A7: 10 queues and 9 places: a job of queue $n");
	like($session->{message}, qr/53400/, 'A7: the session is warned');
	run('TRUNCATE idem.jobs');
	$session->quit;
}

#
# What has no event: rows that are changed by hand, and the clock.  The looker finds it.
#

{
	my $session = session($node);

	$session->query(q{SET idem.look_after = '100 ms'});
	$session->send($call);
	asleep($session);
	run(q{SELECT idem_enqueue('q', delay => '1 h')});
	run(q{UPDATE idem.jobs SET run_at = now()});
	is($session->receive, 't', 'A4: a job that is due earlier than it was, as if the clock was set forward');

	my $due = run(q{UPDATE idem.jobs SET run_at = now() + interval '2 s' RETURNING run_at});
	$session->send($call);
	asleep($session);
	run(q{UPDATE idem.jobs SET run_at = now() + interval '1 h'});
	$node->poll_query_until('postgres', "SELECT clock_timestamp() > '$due'::timestamptz + interval '100 ms'");
	asleep($session);
	pass('A4: a job that is due later than it was, as if the clock was set back');
	run(q{UPDATE idem.jobs SET run_at = now()});
	is($session->receive, 't', 'A4: it is found when it is due');
	run('TRUNCATE idem.jobs');
	$session->quit;
}

#
# A thousand sessions wait in one database, and twenty in each of two others
#

$node->append_conf('postgresql.conf', 'idem.waits_max = 1100');
$node->restart;

sub start_waiters
{
	my ($db, $n) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir() . "/$db.sql";
	my $log = '';

	append_to_file($file, q{CALL idem_wait('crowd', '10 min') \gset
\if :ready
INSERT INTO taken SELECT job_id FROM idem_fetch('crowd', lease => '1 h') AS f WHERE idem_complete(f.job_id, f.token);
\endif
});
	my $run = IPC::Run::start(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--host' => $node->host,
			'--port' => $node->port,
			"--client=$n", '--jobs=2', '--transactions=1',
			'--file' => $file,
			$db
		],
		'>&', \$log,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));

	wait_until_asleep($node, $n, "datname = '$db'");
	return $run;
}

sub commits
{
	my ($db) = @_;

	return run("SELECT xact_commit FROM pg_stat_database WHERE datname = '$db'");
}

my %waiters;
my %sessions = (quiet => 20, often => 20, crowd => 1000);

foreach my $db (keys %sessions)
{
	new_database($db);
	run('CREATE TABLE taken (job_id bigint)', db => $db);
}
run(q{ALTER DATABASE often SET idem.look_after = '100 ms'});
my %commits = map { $_ => commits($_) } keys %sessions;
my $began = Time::HiRes::time();

$waiters{$_} = start_waiters($_, $sessions{$_}) foreach 'quiet', 'often', 'crowd';

# one by one; then many in one transaction, some of which become due at the same time later
run(q{SELECT idem_enqueue('crowd');} x 10, db => 'crowd');
wait_until_asleep($node, 990, q{datname = 'crowd'});
is(run('SELECT count(DISTINCT job_id), count(*) FROM taken', db => 'crowd'),
	'10|10', 'A2: 10 jobs wake 10 of 1000 sessions');
run(q{
	BEGIN;
	SELECT count(*) FROM idem_enqueue_many('crowd', array_fill('1'::jsonb, ARRAY[790]));
	SELECT count(idem_enqueue('crowd', run_at => now() + interval '1 s')) FROM generate_series(1, 200);
	COMMIT},
	db => 'crowd');
foreach my $db ('crowd', 'quiet', 'often')
{
	my $n = $sessions{$db};

	run("SELECT count(*) FROM idem_enqueue_many('crowd', array_fill('1'::jsonb, ARRAY[$n]))", db => $db)
	  if $db ne 'crowd';
	IPC::Run::finish($waiters{$db});
	is(run('SELECT count(DISTINCT job_id), count(*) FROM taken', db => $db),
		"$n|$n", "A2: $db: $n jobs wake $n sessions, and each fetches one");
	$node->poll_query_until('postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = '$db'")
	  or die 'sessions do not end';
	$commits{$db} = commits($db) - $commits{$db};
}
my $seconds = Time::HiRes::time() - $began;

# Each session commits before it sleeps, after it was woken, and after its fetch.
note(join ', ', (map { "$commits{$_} transactions of $sessions{$_} sessions" } sort keys %sessions), "$seconds s");
cmp_ok($commits{quiet}, '<', 20 * 6, 'A1, A4: sessions that sleep do nothing');
cmp_ok($commits{often}, '<', 20 * 6 + $seconds * 10 * 1.5, 'A4: one of 20 sessions looks every 100 ms');
cmp_ok($commits{often}, '>', $seconds * 2, 'A4: and it does');
cmp_ok($commits{crowd}, '<', 1000 * 6, 'A2: not all sessions are woken for each job');

#
# A queue goes on that has more jobs than a look counts.  Each session fetches one job, and does
# not come back after that.
#

{
	my $file = PostgreSQL::Test::Utils::tempdir() . '/many.sql';
	my $log = '';

	append_to_file($file, q{\if :got = 0
CALL idem_wait('many', '10 min') \gset
SELECT count(idem_complete(job_id, token)) AS got FROM idem_fetch('many', lease => '1 h') \gset
\endif
});
	run(q{SELECT idem_pause('many')});
	run(q{SELECT count(*) FROM idem_enqueue_many('many', array_fill('1'::jsonb, ARRAY[150]))});

	my $run = IPC::Run::start(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--host' => $node->host,
			'--port' => $node->port,
			'--client=200', '--jobs=2', '--transactions=1000', '--define=got=0',
			'--file' => $file,
			'postgres'
		],
		'>&', \$log,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));

	wait_until_asleep($node, 200);
	run(q{SELECT idem_resume('many')});
	ok($node->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.jobs'),
		'A2: idem_resume() with 150 jobs: as many sessions are woken');
	wait_until_asleep($node, 50);
	run(q{SELECT count(*) FROM idem_enqueue_many('many', array_fill('1'::jsonb, ARRAY[50]))});
	ok(eval { IPC::Run::finish($run) }, 'A2: and the others by other jobs') or diag($log);
}

#
# Without shared memory
#

$node->append_conf('postgresql.conf', q{shared_preload_libraries = ''});
$node->restart;
run(q{TRUNCATE idem.jobs});

{
	my $session = session($node);
	my $job;

	$session->send($call);
	asleep($session);
	is(run("SELECT count(backend_xmin) FROM pg_stat_activity WHERE pid = $session->{pid} AND xact_start IS NULL"),
		'0', 'A7: not preloaded: no snapshot between two looks');
	$job = enqueue();
	is($session->receive, 't', 'A7: not preloaded: the session finds the job');
	is($session->{message}, '', 'A7: not preloaded: no warning');
	fetch_ok($session, $job, 'A7: not preloaded: it fetches the job');

	$session->send(q{CALL idem_wait_any('{p,q,r}', '10 min')});
	asleep($session);
	run(q{SELECT idem_enqueue('q', delay => '200 ms')});
	is($session->receive, 't|q', 'A7: not preloaded: several queues, and a job that becomes due later');
	$session->query(q{SELECT idem_complete(job_id, token) FROM idem_fetch('q')});

	$job = enqueue();
	$session->send("CALL idem_wait_job($job, '10 min')");
	asleep($session);
	run(q{SELECT idem_complete(job_id, token) FROM idem_fetch('q')});
	is($session->receive, 'gone|', 'A5, A7: not preloaded: the end of a job');

	run(q{SELECT idem_lease('k', '1 h')});
	$session->send(q{CALL idem_wait_key('k', '10 min')});
	asleep($session);
	run(q{SELECT idem_finish('k', '"done"', token => token) FROM idem.keys WHERE key = 'k'});
	is($session->receive, 'finished|"done"', 'A6, A7: not preloaded: the end of leased work');

	is($session->query(q{CALL idem_wait('q', '200 ms')}), 'f', 'A7: not preloaded: the timeout');
	is($session->sqlstate(qq{SET statement_timeout = '200 ms'; $call}),
		'57014', 'A7: not preloaded: statement_timeout');
	$session->query('RESET statement_timeout');

	$session->send($call);
	asleep($session);
	$session->kill;
	wait_until_gone($node, $session);
	pass('A7: not preloaded: the client is gone');
}

$node->stop;
log_ok($node);
done_testing();
