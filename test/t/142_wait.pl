# A1 to A8: sessions that wait in idem_wait() and the like, in good and in bad times.
#
# While such a session sleeps, it has no transaction and no snapshot, in any protocol, and
# no lock that a command could wait for.  However its wait ends (an answer, an error, a
# timeout, the end of the client or of the process), its places in shared memory are free
# afterwards, and a wake-up that it has no answer for goes to another session.
#
# The server looks only once per hour, so a wake-up that gets lost is a test that never
# ends.  It has 16 places: sessions that wait for all of them show whether all are free.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'wait', conf => q{
shared_preload_libraries = 'idem'
restart_after_crash = on
autovacuum = off
idem.cleanup = off
idem.look_after = 1h
idem.waits_max = 16
});
my $version = run(q{SELECT current_setting('server_version_num')::integer / 10000});
my $call = q{CALL idem_wait('q', '10 min')};

# A session that sleeps in a CALL
sub waiter
{
	my ($sql, %opt) = @_;
	my $session = session($node, %opt);

	$session->query($opt{first}) if defined $opt{first};
	$session->send($sql // $call);
	wait_until_asleep($node, 1, "pid = $session->{pid}");
	return $session;
}

sub answer
{
	my ($session, $expected, $name) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is($session->receive, $expected, $name);
	return;
}

sub error
{
	my ($session, $sqlstate, $name) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	$session->receive;
	is($session->{sqlstate}, $sqlstate, $name);
	return;
}

# Enqueue one job; the sessions that are woken fetch it
sub enqueue
{
	my ($queue) = @_;

	return run(sprintf q{SELECT job_id FROM idem_enqueue('%s')}, $queue // 'q');
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

# The session ends its wait, and gets the job in the next one
sub works_ok
{
	my ($session, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	$session->send($call);
	wait_until_asleep($node, 1, "pid = $session->{pid}");
	my $job = enqueue();
	answer($session, 't', "A2: $what: the session waits again, and is woken");
	fetch_ok($session, $job, "A2: $what: it fetches the job");
	return;
}

# Are all places free but those that others have?
sub places_ok
{
	my ($what, $taken) = @_;
	# a session gets one place, and the half of the places that is not shared out
	my $all = 9;
	my @fillers = map { session($node) } 1 .. 7 - ($taken // 0);
	my $session = session($node);

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	$_->send(q{CALL idem_wait('filler', '10 min')}) foreach @fillers;
	wait_until_asleep($node, 1, "pid = $_->{pid}") foreach @fillers;
	foreach my $n ($all, $all + 1)
	{
		my $queues = join ', ', map { "'free $_'" } 1 .. $n;

		is($session->query("CALL idem_wait_any(ARRAY[$queues], '0')"),
			'f|', "A7: $n queues, no time to wait");
		if ($n == $all)
		{
			unlike($session->{message}, qr/53400/, "A7: $what: all other places are free");
		}
		else
		{
			like($session->{message}, qr/53400/, 'A7: there are no more than that');
		}
	}
	foreach my $filler (@fillers)
	{
		run("SELECT pg_cancel_backend($filler->{pid})");
		$filler->receive;
	}
	$_->quit foreach $session, @fillers;
	return;
}

places_ok('at first');

#
# A1: no transaction and no snapshot
#

# An old snapshot keeps the removed rows; a table without rows shrinks.
sub size_after_vacuum
{
	run('CREATE TABLE rows AS SELECT n FROM generate_series(1, 100) AS n');
	my $reader = $_[0];
	$reader->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1') if $reader;
	run('DELETE FROM rows');
	run('VACUUM rows');
	$reader->query('COMMIT') if $reader;
	my $size = run(q{SELECT pg_relation_size('rows')});
	run('DROP TABLE rows');
	return $size;
}

run('CREATE TABLE answers (protocol text)');
my %bench;

foreach my $protocol ('simple', 'extended', 'prepared')
{
	my $file = PostgreSQL::Test::Utils::tempdir() . "/$protocol.sql";

	append_to_file($file, qq{CALL idem_wait('q', '10 min') \\gset
\\if :ready
INSERT INTO answers VALUES ('$protocol');
\\endif
});
	$bench{$protocol} = { out => '' };
	$bench{$protocol}{run} = IPC::Run::start(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--host' => $node->host,
			'--port' => $node->port,
			"--protocol=$protocol", '--transactions=1',
			'--file' => $file,
			'postgres'
		],
		'>&', \$bench{$protocol}{out},
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}
wait_until_asleep($node, 3);
is( run(q{SELECT count(*), count(xact_start), count(backend_xmin), count(backend_xid), string_agg(DISTINCT state, ' ')
			FROM pg_stat_activity WHERE query LIKE 'CALL idem_wait%' AND state <> 'idle'}),
	'3|0|0|0|active',
	'A1: no transaction and no snapshot while a session waits, in each protocol');
is( run(q{SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE query LIKE 'CALL idem_wait%'}),
	'0', 'A1: nor a lock');
is(size_after_vacuum(), '0', 'A1: the sessions that wait do not hold back VACUUM');
{
	my $reader = session($node);

	isnt(size_after_vacuum($reader), '0', 'a session with a snapshot does');
	$reader->quit;
}
# a lock on the table holds up the next look
{
	my ($session, $locker) = (session($node), session($node));

	$session->query('SET idem.look_after = 10');
	$session->send(q{CALL idem_wait('looked at', '10 min')});
	wait_until_asleep($node, 1, "pid = $session->{pid}");
	$locker->query('BEGIN; LOCK TABLE idem.jobs');
	wait_until_blocked($node, $session, 'relation');
	is(run("SELECT xact_start > query_start FROM pg_stat_activity WHERE pid = $session->{pid}"),
		't', 'A1: the transaction of a look has begun with the look');
	$locker->quit;
	enqueue('looked at');
	answer($session, 't', 'A1: the session waits on');
	$session->quit;
}
enqueue();
enqueue();
enqueue();
foreach my $protocol (sort keys %bench)
{
	IPC::Run::finish($bench{$protocol}{run});
	is($bench{$protocol}{run}->result(0), 0, "A2: $protocol protocol: woken")
	  or diag($bench{$protocol}{out});
}
is(run('SELECT string_agg(protocol, \' \' ORDER BY protocol) FROM answers'),
	'extended prepared simple', 'A2: the answer is true in each protocol');
run('TRUNCATE idem.jobs, answers');

# In a pipeline the statements are one transaction, which the CALL must not commit.
{
	my ($out, $err) = ('', '');
	my $file = PostgreSQL::Test::Utils::tempdir() . '/pipeline.sql';

	append_to_file($file, qq{\\startpipeline
INSERT INTO answers VALUES ('pipeline');
CALL idem_wait('q', '0');
\\endpipeline
});
	IPC::Run::run(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--host' => $node->host,
			'--port' => $node->port,
			'--protocol=extended', '--transactions=1',
			'--file' => $file,
			'postgres'
		],
		'>', \$out, '2>', \$err);
	like($err, qr/cannot (?:run|be executed) (?:inside a transaction block|within a pipeline)/,
		'A1: refused in a pipeline behind another statement');
	is(run('SELECT count(*) FROM answers'), '0', 'A1: and the other statement is not committed');
}

# A DO block leaves a transaction open, without a snapshot.
{
	my $session = session($node);

	$session->send(q{DO $$ DECLARE r boolean; BEGIN CALL idem_wait('q', '10 min', r); RAISE WARNING 'ready %', r; END $$});
	$node->poll_query_until('postgres',
		"SELECT wait_event_type = 'Extension' AND xact_start IS NOT NULL FROM pg_stat_activity WHERE pid = $session->{pid}")
	  or die 'it does not wait';
	is( run("SELECT backend_xmin, (SELECT count(*) FROM pg_locks AS l WHERE l.pid = a.pid AND locktype <> 'virtualxid')
			   FROM pg_stat_activity AS a WHERE pid = $session->{pid}"),
		'|0', 'A1: in a DO block: no snapshot and no lock');
	is(size_after_vacuum(), '0', 'A1: nor does it hold back VACUUM');
	my $job = enqueue();
	$session->receive;
	like($session->{message}, qr/ready t/, 'A2: woken in a DO block');
	fetch_ok($session, $job, 'A2: and it fetches the job');
	$session->quit;
}

# Isolation levels: each look has its own snapshot
foreach my $level ('repeatable read', 'serializable')
{
	my $session = waiter(undef, first => "SET default_transaction_isolation = '$level'");

	my $job = enqueue();
	answer($session, 't', "A2: woken with default_transaction_isolation = $level");
	$session->query('SET default_transaction_isolation = DEFAULT');
	fetch_ok($session, $job, 'A2: and it fetches the job');
	$session->quit;
}

#
# What the session has to serve while it sleeps
#

{
	my $session = waiter(undef, first => 'LISTEN news');
	my $offset = -s $node->logfile;

	run(q{NOTIFY news, 'first'});
	run("SELECT pg_log_backend_memory_contexts($session->{pid})");
	$node->wait_for_log(qr/\[$session->{pid}\].*Grand total/, $offset);
	pass('A1: a session that sleeps logs its memory contexts');

	# more invalidations than the server can keep for a session
	run(q{DO $$ BEGIN FOR n IN 1 .. 500 LOOP
		EXECUTE 'CREATE TEMP TABLE t' || n || ' (a int PRIMARY KEY)';
		EXECUTE 'DROP TABLE t' || n; COMMIT; END LOOP; END $$});

	# wake-ups for nothing: no memory is left from a look
	my $job = run(q{SELECT job_id FROM idem_enqueue('q', delay => '1 day')});
	my @total;
	foreach my $round (1 .. 3)
	{
		run("BEGIN; SELECT idem_cancel($job); ROLLBACK;" x 300);
		wait_until_asleep($node, 1, "pid = $session->{pid}");
		$offset = -s $node->logfile;
		run("SELECT pg_log_backend_memory_contexts($session->{pid})");
		$node->wait_for_log(qr/\[$session->{pid}\].*Grand total/, $offset);
		push @total, slurp_file($node->logfile, $offset) =~ /\[$session->{pid}\].*Grand total: (\d+) bytes/;
	}
	is($total[2], $total[1], 'A1: looks leave no memory behind');
	run("SELECT idem_cancel($job)");
	$job = enqueue();
	like($session->receive, qr/^t$/m, 'A2: woken after all that');
	fetch_ok($session, $job, 'A2: and it fetches the job');
	$session->quit;
}
# Its client does not read, so the session cannot send it a notification.  A wake-up at that time
# sets the latch, which the write resets.
{
	my $session = waiter(undef, first => 'LISTEN news');

	$session->{run}->signal('STOP');
	run(q{SELECT pg_notify('news', n || repeat('x', 7900)) FROM generate_series(1, 200) AS n});
	$node->poll_query_until('postgres',
		"SELECT wait_event = 'ClientWrite' FROM pg_stat_activity WHERE pid = $session->{pid}")
	  or die 'it can write';
	my $job = enqueue();
	$session->{run}->signal('CONT');
	$node->poll_query_until('postgres',
		"SELECT state = 'idle' OR wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $session->{pid}")
	  or die 'it does not go on';
	is(run("SELECT state FROM pg_stat_activity WHERE pid = $session->{pid}"),
		'idle', 'A2: woken while it sends a notification: it does not sleep after that');
	like($session->receive, qr/^t$/m, 'A2: but has the answer');
	fetch_ok($session, $job, 'A2: and it fetches the job');
	$session->quit;
}
places_ok('after answers');

#
# Timeouts of the server
#

{
	my $session = session($node);

	$session->query(q{SET lock_timeout = '200 ms'});
	$session->query(q{SET idle_in_transaction_session_timeout = '200 ms'});
	$session->query(q{SET idle_session_timeout = '200 ms'}) if $version < 14;
	$session->query(q{SET transaction_timeout = '200 ms'}) if $version >= 17;
	is($session->query(q{CALL idem_wait('q', '1 s')}),
		'f', 'A1: it waits longer than transaction_timeout and the like');
	$session->query(q{RESET transaction_timeout}) if $version >= 17;
	works_ok($session, 'after that');

	is($session->sqlstate(qq{SET statement_timeout = '200 ms'; $call}),
		'57014', 'A7: statement_timeout ends the wait');
	$session->query('RESET statement_timeout');
	works_ok($session, 'after statement_timeout');
	$session->quit;
}
places_ok('after timeouts');

#
# The end of the time of a wait: one more look
#

# COMMIT PREPARED wakes nobody.  The waiters are stopped while they sleep, until their time is over,
# so only a look after that can tell them.

run(q{CREATE FUNCTION answer_work(payload jsonb) RETURNS jsonb LANGUAGE sql RETURN payload;
	SELECT idem_queue_set('kept', keep => '1 day')});

my %last;

foreach my $end ('COMMIT', 'ROLLBACK')
{
	my $job = run(q{SELECT job_id FROM idem_enqueue('kept')});
	my $token = run("SELECT token FROM idem_lease('$end', '1 h')");

	run(qq{
		BEGIN;
		SELECT idem_enqueue('$end'), idem_enqueue('work $end', '1'), idem_finish('$end', '1', token => $token);
		SELECT idem_complete(job_id, token) FROM idem_fetch('kept') WHERE job_id = $job;
		PREPARE TRANSACTION '$end'});
	foreach my $sql (
		"CALL idem_wait('$end', '8 s')",
		"CALL idem_wait_any('{none,$end}', '8 s')",
		"CALL idem_wait_job($job, '8 s')",
		"CALL idem_wait_key('$end', '8 s')",
		"CALL idem_work('work $end', 'answer_work', '8 s')",
		"DO \$\$ DECLARE r boolean; BEGIN CALL idem_wait('$end', '8 s', r); RAISE WARNING 'ready %', r; END \$\$")
	{
		my $session = session($node);

		$session->send($sql);
		push @{ $last{$end} }, $session;
	}
}
my @last = map { @$_ } values %last;
my $pids = join ', ', map { $_->{pid} } @last;

$node->poll_query_until('postgres',
	"SELECT count(*) = 12 FROM pg_stat_activity WHERE pid IN ($pids) AND wait_event_type = 'Extension'")
  or die 'not all sessions are asleep';
kill 'STOP', $_->{pid} foreach @last;
run("$_ PREPARED '$_'") foreach keys %last;
$node->poll_query_until('postgres',
	"SELECT bool_and(clock_timestamp() > query_start + interval '8 s') FROM pg_stat_activity WHERE pid IN ($pids)")
  or die 'the time does not pass';
kill 'CONT', $_->{pid} foreach @last;

sub last_answers
{
	my ($end) = @_;
	my @answers = map { $_->receive } @{ $last{$end} };

	($answers[-1]) = $last{$end}[-1]{message} =~ /ready (.)/;
	return join ' ', @answers;
}

is(last_answers('COMMIT'), 't t|COMMIT done| finished|1 1|0 t',
	'A5, A6, A8: a wait looks once more when its time is over: COMMIT PREPARED');
is(last_answers('ROLLBACK'), 'f f| waiting| live| 0|0 f',
	'A5, A6, A8: and it has the same answer as before after ROLLBACK PREPARED');
$_->quit foreach @last;
run(q{TRUNCATE idem.jobs, idem.keys});

# A look that began before the time was over, and ended after that, is not the last one.
{
	my ($session, $locker) = (session($node), session($node));
	my $job = run(q{SELECT job_id FROM idem_enqueue('kept')});

	$session->query('SET idem.look_after = 10');
	$session->send("CALL idem_wait_job($job, '5 s')");
	$locker->query('BEGIN; LOCK TABLE idem.jobs');
	wait_until_blocked($node, $session, 'relation');
	$locker->query(q{SELECT idem_complete(job_id, token) FROM idem_fetch('kept')});
	$node->poll_query_until('postgres',
		"SELECT clock_timestamp() > query_start + interval '5 s' FROM pg_stat_activity WHERE pid = $session->{pid}")
	  or die 'the time does not pass';
	$locker->query('COMMIT');
	answer($session, 'done|', 'A5: the last look begins when the time is over');
	$_->quit foreach $session, $locker;
}
places_ok('after last looks');

#
# Cancel and terminate, of each procedure
#

run(q{SELECT idem_lease('k', '1 h')});
my $long = run(q{SELECT job_id FROM idem_enqueue('long', delay => '1 day')});

foreach my $sql (
	$call, q{CALL idem_wait_any('{q,r,s}', '10 min')},
	qq{CALL idem_wait_job($long, '10 min')}, q{CALL idem_wait_key('k', '10 min')})
{
	my ($name) = $sql =~ /(idem_\w+)/;
	my $session = waiter($sql);

	run("SELECT pg_cancel_backend($session->{pid})");
	error($session, '57014', "A7: $name: cancelled");
	works_ok($session, $name);
	$session->quit;

	$session = waiter($sql);
	run("SELECT pg_terminate_backend($session->{pid})");
	wait_until_gone($node, $session);
	$session->lost;
	$session = waiter($sql);
	$session->kill;
	wait_until_gone($node, $session);
	places_ok($name);
}
like(
	slurp_file($node->logfile),
	qr/FATAL:  connection to client lost.*STATEMENT:  CALL idem_wait\(/s,
	'A7: a session whose client is gone ends');

# A session that was woken and cannot answer hands the wake-up on.  It is stopped, so that
# it cannot look before it is told to end.
sub hand_on
{
	my ($what, $end, %opt) = @_;
	my $other = waiter();
	my $woken = waiter($opt{call}, %opt);

	kill 'STOP', $woken->{pid};
	my $job = enqueue();
	$end->($woken);
	kill 'CONT', $woken->{pid};
	answer($other, 't', "A2: $what: the wake-up goes to another session");
	fetch_ok($other, $job, "A2: $what: which fetches the job");
	$other->quit;
	return $woken;
}

hand_on('cancelled', sub { run("SELECT pg_cancel_backend($_[0]{pid})") })->quit;
hand_on('terminated', sub { run("SELECT pg_terminate_backend($_[0]{pid})") })->lost;
hand_on(
	'a session with several queues is terminated',
	sub { run("SELECT pg_terminate_backend($_[0]{pid})") },
	call => q{CALL idem_wait_any('{r,s,q}', '10 min')})->lost;
places_ok('after wake-ups that were handed on');

# The first session that waits gets up when the next job is due, for all others.  If it ends,
# another one does so.
foreach my $end ('cancel', 'terminate')
{
	my $first = waiter();
	my $other = waiter();
	my $job = run(qq{
		SELECT job_id FROM idem_enqueue('q', delay => '1 s');
		SELECT FROM pg_${end}_backend($first->{pid})});

	answer($other, 't', "A4: $end: another session gets up when the job is due");
	fetch_ok($other, $job, "A4: $end: and fetches it");
	$other->quit;
	$first->lost;
}

#
# Privileges are checked by each look
#

{
	run(q{CREATE ROLE boss LOGIN; CREATE ROLE stranger LOGIN;
		SELECT idem_grant('boss', 'app'), idem_grant('stranger', 'app')});
	my $boss = waiter(undef, user => 'boss');
	my $stranger = waiter(undef, user => 'stranger');

	run(q{SELECT idem_queue_set('q', owner => 'boss')});
	enqueue();
	error($stranger, '42501', 'A7: the queue has got an owner: 42501 at the next look');
	answer($boss, 't', 'A2: the wake-up goes to a session that may use the queue');
	$stranger->quit;
	$boss->quit;
	run(q{TRUNCATE idem.jobs; SELECT idem_queue_set('q', owner => '-')});
}

#
# Queue, tables, extension and database go away
#

{
	my $session = waiter();

	run(q{SET lock_timeout = '1 min'; TRUNCATE idem.jobs, idem.queues});
	run(q{SELECT idem_queue_set('q', max_attempts => 3)});
	run(q{SELECT idem_queue_drop('q')});
	wait_until_asleep($node, 1, "pid = $session->{pid}");
	my $job = enqueue();
	answer($session, 't', 'A2: the tables were emptied and the queue was dropped: woken');
	fetch_ok($session, $job, 'A2: and it fetches the job');
	$session->quit;
}

# Each of the procedures
sub waiters_of_all
{
	my ($first) = @_;

	$long = run(q{SELECT job_id FROM idem_enqueue('long', delay => '1 day')});
	run(q{SELECT idem_lease('k', '1 h') WHERE NOT EXISTS (SELECT FROM idem.keys WHERE key = 'k')});
	return map { waiter($_, first => $first) } (
		$call, q{CALL idem_wait_any('{q,r}', '10 min')},
		"CALL idem_wait_job($long, '10 min')", q{CALL idem_wait_key('k', '10 min')});
}

{
	my @often = waiters_of_all(q{SET idem.look_after = '100 ms'});

	run(q{SET lock_timeout = '1 min'; DROP EXTENSION idem});
	error($_, '55000', 'A7: the extension was dropped: an error at the next look') foreach @often;
	run('CREATE EXTENSION idem');
	works_ok($_, 'after CREATE EXTENSION') foreach @often;
	$_->quit foreach @often;
}

{
	my @waiters = waiters_of_all();

	run('DROP EXTENSION idem; CREATE EXTENSION idem');
	enqueue();
	enqueue();
	answer($waiters[0], 't', 'A2: the extension was created again: woken');
	answer($waiters[1], 't|q', 'A2: also of several queues');
	run("SELECT pg_cancel_backend($_->{pid})") foreach @waiters[ 2, 3 ];
	error($_, '57014', 'A7: the others can be cancelled') foreach @waiters[ 2, 3 ];
	$_->quit foreach @waiters;
	run('TRUNCATE idem.jobs');
}
places_ok('after DROP EXTENSION');

{
	new_database('going');
	my $session = waiter(undef, db => 'going');

	is(sqlstate($node, 'DROP DATABASE going WITH (FORCE)'), '00000', 'A7: DROP DATABASE ends a session that waits');
	$session->lost;
	new_database('going');
	places_ok('after DROP DATABASE');
}

#
# The server restarts: kill -9 of a session that waits, and each mode of shutdown
#

{
	my @waiters = (waiter(), waiter(q{CALL idem_wait_any('{r,s,t}', '10 min')}));

	crash_backend($node, $waiters[1]{pid});
	$_->lost foreach @waiters;
	places_ok('after kill -9');
}

foreach my $mode ('fast', 'immediate')
{
	my @waiters = (waiter(), waiter(q{CALL idem_wait_any('{r,s,t}', '10 min')}));

	$node->stop($mode);
	$_->lost foreach @waiters;
	$node->start;
	my $session = session($node);
	works_ok($session, "after a $mode shutdown");
	$session->quit;
	places_ok("after a $mode shutdown");
}

$node->stop;
log_ok($node, killed => 1);
done_testing();
