# idem_cutover around its point of no return: clients that say READ WRITE and commit exactly there,
# kill -9, ^C and crashes, and what the next run or --abort makes of it.
#
# The test holds the program without sleeps, by triggers of the subscriber: before the last look,
# when the program locks the subscription that it has disabled, an event trigger waits for advisory
# lock 1; after the last look, the COMMIT of DROP SUBSCRIPTION waits in a deferred trigger for lock 2.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemCutover;
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($publisher, $subscriber) = cutover_nodes();
my @nodes = ($publisher, $subscriber);
my $id = 0;

sub on
{
	my ($server, $sql) = @_;

	return $nodes[$server]->safe_psql('postgres', $sql);
}

$_->safe_psql('postgres', 'CREATE TABLE orders (id int PRIMARY KEY)') foreach @nodes;
on(1, q{
	CREATE TABLE held (a int);
	CREATE FUNCTION hold_commit() RETURNS trigger LANGUAGE plpgsql AS
		'BEGIN PERFORM pg_advisory_xact_lock(2); RETURN NULL; END';
	CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON held DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION hold_commit();
	CREATE FUNCTION hold_look() RETURNS event_trigger LANGUAGE plpgsql AS
		$$BEGIN
			IF current_query() LIKE '%DISABLE' AND EXISTS (SELECT FROM pg_subscription WHERE subslotname IS NULL) THEN
				PERFORM pg_advisory_xact_lock(1);
			END IF;
		END$$;
	CREATE EVENT TRIGGER hold_look ON ddl_command_start WHEN TAG IN ('ALTER SUBSCRIPTION') EXECUTE FUNCTION hold_look();
	CREATE FUNCTION hold_drop() RETURNS event_trigger LANGUAGE plpgsql AS
		'BEGIN INSERT INTO public.held VALUES (1); END';
	CREATE EVENT TRIGGER hold_drop ON ddl_command_start WHEN TAG IN ('DROP SUBSCRIPTION') EXECUTE FUNCTION hold_drop()});
on(0, 'CREATE PUBLICATION pub FOR ALL TABLES');
on(1, sprintf q{CREATE SUBSCRIPTION sub CONNECTION '%s' PUBLICATION pub WITH (slot_name = 'the_slot')},
	$publisher->connstr . ' dbname=postgres');
$subscriber->wait_for_subscription_sync($publisher, 'sub');

# A client of the publisher that does not keep to the default
sub write_order
{
	on(0, 'BEGIN READ WRITE; INSERT INTO orders VALUES (' . ++$id . '); COMMIT');
	return;
}

sub arrives_ok
{
	my ($what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($subscriber->poll_query_until('postgres', "SELECT count(*) = 1 FROM orders WHERE id = $id"), $what);
	return;
}

# The subscription: enabled, slot
sub state_of
{
	return on(1, 'SELECT subenabled, subslotname FROM pg_subscription');
}

sub is_read_only
{
	return on(0, q{SELECT count(*) FROM pg_db_role_setting WHERE setrole = 0 AND setconfig::text LIKE '%read_only=on%'});
}

sub slots
{
	return on(0, q{SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'the_slot'});
}

# A session that keeps an advisory lock of the subscriber
sub hold
{
	my ($number) = @_;
	my $s = session($subscriber);

	$s->query("SELECT pg_advisory_lock($number)");
	return $s;
}

sub begin_program
{
	my (@arguments) = @_;
	my $program = { out => '', err => '' };

	$program->{run} = IPC::Run::start([ cutover_command(@nodes, @arguments) ], '>', \$program->{out}, '2>', \$program->{err},
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	return $program;
}

# Once so many sessions wait for the advisory lock
sub wait_held
{
	my ($number, $n) = @_;

	$n //= 1;
	$subscriber->poll_query_until('postgres',
		"SELECT count(*) = $n FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = $number AND objsubid = 1")
	  or die "the program does not wait for lock $number";
	return;
}

sub ended_ok
{
	my ($program, $status, $pattern, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	eval { $program->{run}->finish };
	is($program->{run}->full_result >> 8, $status, "$what: exit status");
	like("$program->{out}$program->{err}", $pattern, "$what: says so");
	note "$program->{out}$program->{err}";
	return;
}

sub kill_program
{
	my ($program) = @_;

	$program->{run}->signal('KILL');
	eval { $program->{run}->finish };
	return;
}

sub run_ok
{
	my ($status, $pattern, $what, @arguments) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ended_ok(begin_program(@arguments), $status, $pattern, $what);
	return;
}

#
# a client that commits in every round
#

{
	my $holder = hold(1);
	my $program = begin_program();

	foreach my $round (1 .. 5)
	{
		wait_held(1);
		is(state_of(), 'f|', "round $round: the subscription is disabled and has no slot before the last look") if $round == 1;
		is(sqlstate($publisher, 'BEGIN READ WRITE; LOCK TABLE idem.keys IN ROW EXCLUSIVE MODE NOWAIT'),
			'55P03', "round $round: no key can be claimed on the publisher");
		write_order();

		# the next holder waits behind the program
		my $next = session($subscriber);

		if ($round < 5)
		{
			$next->send('SELECT pg_advisory_lock(1)');
			wait_held(1, 2);
		}
		$holder->quit;
		$next->receive if $round < 5;
		$holder = $next;
	}
	$holder->quit;
	ended_ok($program, 3, qr/(?:a client has written on the publisher.*){5}Keep them out.*was put back.*nothing is lost/s,
		'a client commits in every round');
	is(state_of(), 't|the_slot', 'the subscription was put back');
	arrives_ok('what the client has committed arrives');
	is(on(1, 'SELECT count(*) FROM orders'), '5', 'all of it');
	run_ok(0, qr/Clients can write on the publisher again/, '--abort', '--abort');
	is(on(0, q{SELECT count(*) FROM pg_namespace WHERE nspname = 'idem_cutover'}), '0', 'no mark is left');
}

#
# killed, interrupted, crashed before the last look
#

sub stop_at_look
{
	my ($stop) = @_;
	my $holder = hold(1);
	my $program = begin_program();

	wait_held(1);
	$stop->($program);
	eval { $holder->quit };
	return $program;
}

stop_at_look(\&kill_program);
is(state_of(), 'f|', 'killed before the last look: the subscription is disabled and has no slot');
is(slots(), '1', 'the slot is there');
run_ok(1, qr/note .*stopped in step 5.*MISSING .*it is disabled/s, '--check after that', '--check');
is(state_of(), 'f|', '--check changes nothing');
run_ok(0, qr/was put back.*Clients can write on the publisher again/s, '--abort after that', '--abort');
is(state_of(), 't|the_slot', 'the subscription was put back');
is(is_read_only(), '0', 'clients can write');
write_order();
arrives_ok('and replication goes on');

my $program = stop_at_look(sub { $_[0]{run}->signal('INT') });
ended_ok($program, 3, qr/stopped by signal 2.*disabled and without its slot: nothing is lost\.\nRun idem_cutover again.*--abort/s, '^C');
is(state_of(), 'f|', '^C: nothing is hurried');

# mark, but another subscription: not ours
run_ok(1, qr/there is no subscription other/, 'another subscription', '--subscription', 'other');

$program = stop_at_look(sub { $subscriber->stop('immediate') });
ended_ok($program, 3, qr/subscriber: .*nothing is lost/s, 'crash of the subscriber');
$subscriber->start;
is(state_of(), 'f|', 'the subscription is disabled and has no slot');

$program = stop_at_look(sub { $publisher->stop('immediate') });
ended_ok($program, 3, qr/publisher: .*nothing is lost/s, 'crash of the publisher');
is(state_of(), 'f|', 'the subscription is disabled and has no slot');
$publisher->start;
run_ok(0, qr/was put back.*stopped after step 4/s, 'the next run puts it back', '--until', 4);
is(state_of(), 't|the_slot', 'the subscription is as before');

#
# killed while the COMMIT after DROP SUBSCRIPTION waits: its session would commit later
#

{
	my $holder = hold(2);

	write_order();
	arrives_ok('a change since the last checkpoint');
	$program = begin_program();
	wait_held(2);
	kill_program($program);
	wait_held(2);
	is(state_of(), 'f|', 'killed at COMMIT: the subscription is there');
	run_ok(0, qr/was put back.*Clients can write on the publisher again/s, '--abort ends the session', '--abort');
	$holder->quit;
	is(state_of(), 't|the_slot', 'the subscription was put back, and is not dropped later');

	# The slot goes back to its last checkpoint; that DROP SUBSCRIPTION was undone must not make
	# the subscriber apply twice what it has.
	my $offset = -s $subscriber->logfile;

	$publisher->stop('immediate');
	$publisher->start;
	write_order();
	arrives_ok('and replication goes on');
	is(log_count($subscriber, qr/ 23505 /, $offset), '0', 'the subscriber applies nothing twice');
}

#
# to the end
#

{
	my $before_commit = hold(2);
	my $first = begin_program();

	wait_held(2);

	# the first run has the lock
	my $before_drop = session($subscriber);

	$before_drop->send('SELECT pg_advisory_lock(1)');
	wait_held(1);

	my $second = begin_program();

	ended_ok($first, 4, qr/Clients must not write/, 'of two runs the first one ends');
	$before_drop->receive;
	wait_held(1);
	write_order();
	$before_drop->quit;
	wait_held(2);
	arrives_ok('what a client has committed before the last look has arrived');
	is(sqlstate($publisher, 'BEGIN READ WRITE; LOCK TABLE idem.jobs IN ROW EXCLUSIVE MODE NOWAIT'),
		'55P03', 'no job can be enqueued on the publisher after the last look');
	write_order();
	$before_commit->quit;
	ended_ok($second, 4,
		qr/a client has written.*put back, once more.*slot the_slot stays on the publisher.*step 5 .*step 6 .*written after the last look.*the_slot/s,
		'the second one goes on, and finds what a client has committed after the last look');
}
is(on(1, 'SELECT count(*) FROM pg_subscription'), '0', 'the subscription is gone');
is(on(1, "SELECT count(*) FROM orders WHERE id = $id"), '0', 'the subscriber lacks what came after the last look');
is(slots(), '1', 'the slot is there');
is( on(0, q{SELECT count(*) > 0 FROM pg_logical_slot_peek_binary_changes('the_slot', NULL, NULL, 'proto_version', '1', 'publication_names', 'pub')}),
	't', 'and has it');
run_ok(4, qr/there is no subscription sub/, '--abort is too late', '--abort');
run_ok(4, qr/dropped by an earlier run.*written after the last look/s, 'the next run says so again');
on(0, q{SELECT pg_drop_replication_slot('the_slot')});
run_ok(0, qr/dropped by an earlier run.*The subscriber is the primary now/s, 'until the slot was dropped by hand');
on(0, q{SELECT pg_create_logical_replication_slot('the_slot', 'pgoutput')});
run_ok(0, qr/The subscriber is the primary now/, 'a slot that an earlier run has left');
is(slots(), '0', 'is dropped');
$publisher->safe_psql('template1', 'CREATE DATABASE other');
$publisher->safe_psql('other', q{SELECT pg_create_logical_replication_slot('the_slot', 'pgoutput')});
run_ok(0, qr/The subscriber is the primary now/, 'a slot of another database');
is(slots(), '1', 'is not dropped');
$publisher->safe_psql('template1', 'ALTER DATABASE postgres RESET default_transaction_read_only');
run_ok(4, qr/not read-only any more/, 'the publisher must stay read-only');
is(on(1, q{SELECT claimed FROM idem_claim('new')}), 't', 'the subscriber is the primary');

$publisher->stop;
run_ok(1, qr/only the slot on the publisher is left/, 'the publisher is lost');

$subscriber->stop;
log_ok($_) foreach @nodes;
done_testing();
