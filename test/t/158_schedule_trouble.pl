# The background worker enqueues the jobs of schedules, in bad times.
#
#   T1  each tick is one job, whatever is terminated or crashes in the middle
#   T6  the worker waits for no transaction that has locked a schedule, or has enqueued
#       the key of a tick
#   T7  a schedule that fails does not hold up the others; it is tried again later and
#       later, and logged once when it begins and once when it is over
#   T9  a schedule fails while its owner may not enqueue, and goes on afterwards
#   W4  a tick that cannot be enqueued does not keep launcher and worker busy
#
# Cleanup is off and the naptime is a day, so the worker comes for ticks only.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemSchedules;
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

# debug1: the postmaster logs which process it starts
my $node = new_node(
	'tick_trouble', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
idem.cleanup = off
idem.stats_max = 100
autovacuum = off
log_min_messages = debug1
restart_after_crash = on
});

# how often the log says that schedules fail, and that they work again
sub logged
{
	my ($offset) = @_;

	return join ' ',
	  map { log_count($node, qr/idem schedules $_ in database "postgres"/, $offset) } 'failed', 'work again';
}

sub wait_for_sleep
{
	$node->poll_query_until('postgres',
		q{SELECT state = 'sleeping' AND worker_pid IS NULL FROM idem.worker_status})
	  or die 'the launcher does not come to rest';
	return;
}

# Times at which workers have started, in seconds of the day
sub visits
{
	my ($offset) = @_;

	return map { /^\S+ (\d+):(\d+):([\d.]+) .*starting background worker process "idem cleanup"/ ? 3600 * $1 + 60 * $2 + $3 : () }
	  split /\n/, slurp_file($node->logfile, $offset);
}

# The next visits are later and later: at least so many seconds
sub later_and_later
{
	my ($what, $offset, @least) = @_;
	my $n = @least + 1;
	my (@times, @gaps);

	$node->wait_for_log(qr/(?:starting background worker process "idem cleanup".*){$n}/s, $offset);
	@times = visits($offset);
	@gaps = map { my $gap = $times[ $_ + 1 ] - $times[$_]; $gap < 0 ? $gap + 86400 : $gap } 0 .. $#least;
	is(join(' ', grep { $gaps[$_] < $least[$_] } 0 .. $#least), '', "$what: tried again, not at once, and later the next time")
	  or diag "after @gaps s";
	return;
}

# an interval of a second, from now on
sub each_second
{
	my ($name, $queue) = @_;

	$queue //= 'q';
	return qq{SELECT idem_schedule('$name', '$queue', every => '1 s', missed => 'all')};
}

run('SELECT pg_reload_conf()');
$node->poll_query_until('postgres', 'SELECT runs >= 1 FROM idem.worker_status') or die 'no visit';
wait_for_sleep();

#
# W4, W7: a database to which no worker can connect when its tick is due
#

my $offset;

new_database('away');

my $path = $node->data_dir . '/base/' . run('SELECT oid FROM pg_database WHERE datname = $$away$$');

run(q{
	SELECT idem_schedule('tick', 'q', every => '1 day', starts_at => clock_timestamp() + interval '0.5 s');
	CHECKPOINT}, db => 'away');
$offset = -s $node->logfile;
rename $path, "$path.away" or die;
later_and_later('W7: a worker that cannot connect', $offset, 0.9);
rename "$path.away", $path or die;
run('SELECT pg_reload_conf()');
ok( $node->poll_query_until('away', 'SELECT count(*) = 1 FROM idem.jobs'),
	'T6: it ticks as soon as that is possible');
wait_for_sleep();

#
# T7: a schedule that fails, alone
#

$offset = -s $node->logfile;
run(q{
	SELECT idem_schedule('bad', 'q', cron => '* * * * *');
	UPDATE idem.schedules SET time_zone = 'Nowhere', next_tick = date_trunc('minute', now()) - interval '5 min';
	SELECT idem_schedule('first', 'q', every => '1 day', starts_at => clock_timestamp() + interval '0.2 s')});
later_and_later('T7: a schedule that fails', $offset, 0.9, 1.9);
is(logged($offset), '1 0', 'T7: it is logged once');
like( slurp_file($node->logfile, $offset),
	qr/LOG:  idem schedules failed in database "postgres": invalid value of "time_zone" \(schedule "bad"\)\n.*DETAIL:  The launcher tries again after one minute/,
	'T7: with the schedule and the reason');

my ($status, $detail, $fix) = split /\|/, doctor('schedules', columns => 'status, detail, fix');

like("$status $detail", qr/^fail 1 schedules are late, the first, bad, since /, 'H1: idem_doctor() shows it');

my ($ret, $out, $err) = $node->psql('postgres', $fix);

is($out, '0', 'H1: its fix enqueues nothing');
like($err, qr/WARNING:  schedule "bad" failed: invalid value of "time_zone"/, 'H1: but shows why');

#
# T7: another one beside it, for more ticks than there would be tries of the one that fails
#

run(each_second('good'));
ok(wait_for_ticks($node, 3, [ 'postgres', 'good' ]), 'T7: another schedule ticks beside it');
is(logged($offset), '1 0', 'T7: nothing else is logged');
cmp_ok((lags($node, 'postgres', 'good'))[0], '<', 1, 'T7: it ticks in time (median)');
series_ok($node, 'postgres', 'good', 'a schedule beside one that fails');

# The worker in the middle of a tick: it has locked a schedule, and waits for the number of
# the job, because another session changes the sequence.
run(q{
	CREATE FUNCTION worker_in_tick(other integer) RETURNS integer LANGUAGE plpgsql AS $$
	DECLARE
		found integer;
	BEGIN
		LOOP
			PERFORM pg_stat_clear_snapshot();
			SELECT pid INTO found FROM pg_stat_activity
			 WHERE backend_type = 'idem cleanup' AND wait_event = 'relation' AND pid <> other;
			EXIT WHEN found IS NOT NULL;
			IF clock_timestamp() > transaction_timestamp() + interval '3 min' THEN
				RAISE 'no worker waits';
			END IF;
			PERFORM pg_sleep(0.01);
		END LOOP;
		RETURN found;
	END $$;

	-- Waits until another database has so many jobs more.  How often a worker was seen meanwhile
	-- that waits for a lock.
	CREATE FUNCTION worker_waits(ticks bigint) RETURNS integer LANGUAGE plpgsql AS $$
	DECLARE
		waits integer := 0;
		last bigint;
		this bigint;
	BEGIN
		LOOP
			PERFORM pg_stat_clear_snapshot();
			SELECT enqueued INTO this FROM idem.queue_stats WHERE datname = 'other' AND queue = 'q';
			last := coalesce(last, this + ticks);
			EXIT WHEN this >= last;
			waits := waits + (SELECT count(*) FROM pg_stat_activity
							   WHERE backend_type = 'idem cleanup' AND wait_event_type = 'Lock');
			IF clock_timestamp() > transaction_timestamp() + interval '3 min' THEN
				RAISE 'no ticks';
			END IF;
			PERFORM pg_sleep(0.01);
		END LOOP;
		RETURN waits;
	END $$});

my $change_sequence = 'BEGIN; ALTER SEQUENCE idem.jobs_job_id_seq CACHE 1';

#
# T1: the worker is terminated in the middle of a tick, twice.  That is a failure, but no sign
# that the schedules work again.
#

my $changer = session($node);
my $pid = 0;

$changer->query($change_sequence);
foreach (1 .. 2)
{
	$pid = run("SELECT worker_in_tick($pid)");
	kill 'TERM', $pid;
}
$changer->query('ROLLBACK');
ok(wait_for_ticks($node, 1, [ 'postgres', 'good' ]), 'T1: SIGTERM in the middle of a tick: the next worker goes on');
series_ok($node, 'postgres', 'good', 'SIGTERM in the middle of a tick');
is(cleanup_logged('postgres', $offset), '1 1', 'W7: the second SIGTERM in a row is logged');
is(logged($offset), '1 0', 'T7: it does not seem that the schedule that fails works again');

# In one snapshot after the other, as fast as it goes: each of them shows a tick and its job, or
# none of the two.
is( run(q{
		CREATE FUNCTION torn(ticks integer) RETURNS bigint LANGUAGE plpgsql AS $$
		DECLARE
			first timestamptz := (SELECT last_tick FROM idem.schedules WHERE name = 'good');
			last timestamptz;
			agrees boolean;
			n bigint := 0;
		BEGIN
			LOOP
				SELECT s.last_tick, s.last_job = (SELECT max(job_id) FROM idem.jobs WHERE key LIKE 'good@%')
				  INTO last, agrees FROM idem.schedules AS s WHERE s.name = 'good';
				n := n + CASE WHEN agrees THEN 0 ELSE 1 END;
				EXIT WHEN last >= first + ticks * interval '1 s';
				IF clock_timestamp() > transaction_timestamp() + interval '3 min' THEN
					RAISE 'no ticks';
				END IF;
			END LOOP;
			RETURN n;
		END $$;
		SELECT torn(2)}),
	'0', 'T1: no snapshot shows a tick without its job, or a job without its tick');

# the time zone is repaired: one job for the latest of the ticks that are due
run(q{UPDATE idem.schedules SET time_zone = 'UTC' WHERE name = 'bad'});
ok( $node->poll_query_until('postgres', q{
		SELECT last_tick = next_tick - interval '1 min' AND missed_ticks >= 5 AND next_tick > now()
		  FROM idem.schedules WHERE name = 'bad'}),
	'T7, T4: a schedule that does not fail any more goes on');
wait_for_sleep();
is(logged($offset), '1 1', 'T7: which is logged once');
is(doctor('schedules'), 'ok', 'H1: idem_doctor() says ok');
run(q{SELECT idem_unschedule('bad')});

#
# T9: the worker asks whether the owner of a schedule may enqueue
#

$offset = -s $node->logfile;
run(q{
	CREATE ROLE planner;
	SELECT idem_grant('planner', 'app');
	SET ROLE planner;
	} . each_second('planned', 'planned'));
ok(wait_for_ticks($node, 1, [ 'postgres', 'planned' ]), 'T9: the schedule of a role ticks');

# It has no job more, after the worker has logged why, and while another one ticks
sub refused_ok
{
	my ($what, $command, $reason) = @_;
	my $jobs = q{SELECT count(*) FROM idem.jobs WHERE queue = 'planned'};
	my $from = -s $node->logfile;
	my $before;

	run($command);
	$node->wait_for_log(qr/idem schedules failed in database "postgres": \Q$reason\E \(schedule "planned"\)\n/, $from);
	$before = run($jobs);
	ok(wait_for_ticks($node, 2, [ 'postgres', 'good' ]), "T9, T7: $what: another schedule ticks");
	is(run($jobs), $before, "T9: $what: this one does not");
	is((split /\|/, doctor('owners', columns => 'status, detail'))[0], 'fail', "H1: $what: idem_doctor() shows it");
	return;
}

sub allowed_ok
{
	my ($what, $command) = @_;
	my $from = -s $node->logfile;

	run($command);
	ok(wait_for_ticks($node, 1, [ 'postgres', 'planned' ]), "T9: $what: it goes on by itself");
	$node->wait_for_log(qr/idem schedules work again in database "postgres"/, $from);
	return;
}

refused_ok('idem_revoke()', q{SELECT idem_revoke('planner', 'app')}, 'the owner of the schedule may not execute idem_enqueue()');
allowed_ok('idem_grant()', q{SELECT idem_grant('planner', 'app')});
refused_ok('the queue gets an owner', q{CREATE ROLE team; SELECT idem_queue_set('planned', owner => 'team')},
	'the owner of the schedule may not use its queue');
allowed_ok('GRANT', 'GRANT team TO planner');
series_ok($node, 'postgres', 'planned', 'a schedule whose owner lost its privileges for a while');
refused_ok('DROP ROLE', 'DROP OWNED BY planner; DROP ROLE planner', 'the owner of the schedule does not exist');
allowed_ok('another role declares it', each_second('planned', 'planned'));
run(q{SELECT idem_unschedule('planned')});
series_ok($node, 'postgres', 'good', 'beside a schedule that is refused');

#
# T1: a crash in the middle of a tick
#

$changer->query($change_sequence);
crash_backend($node, run('SELECT worker_in_tick(0)'));
$changer->lost;
ok(wait_for_ticks($node, 1, [ 'postgres', 'good' ]), 'T1: kill -9 in the middle of a tick: the next worker goes on');
series_ok($node, 'postgres', 'good', 'kill -9 of the worker in the middle of a tick');

#
# T6: locks of others.  First in a database where the worker has no reason to come again but the
# lock itself.
#

new_database('other');
{
	my $c = session($node, db => 'other');
	my $late = session($node, db => 'other');
	my $soon = q{SELECT idem_schedule('%s', 'soon', every => '1 day', starts_at => clock_timestamp() + interval '0.2 s')};

	# a tick that becomes visible in the middle of a visit, and is earlier than that
	$c->query($change_sequence);
	$late->query('BEGIN; ' . sprintf $soon, 'late');
	run(sprintf($soon, 'early'), db => 'other');
	run('SELECT worker_in_tick(0)');
	$late->query('COMMIT');
	$c->query('ROLLBACK');
	ok( $node->poll_query_until('other', q{SELECT count(*) = 2 FROM idem.jobs WHERE queue = 'soon'}),
		'T6: a schedule that is declared in the middle of a visit ticks');

	# a lock that ends without a change
	run(sprintf($soon =~ s/0\.2/1.5/r, 'locked'), db => 'other');
	$c->query(q{BEGIN; SELECT name FROM idem.schedules WHERE name = 'locked' FOR UPDATE});
	$node->poll_query_until('other', q{SELECT next_tick < now() - interval '0.2 s' FROM idem.schedules WHERE name = 'locked'})
	  or die 'it is not due';
	$c->query('ROLLBACK');
	ok( $node->poll_query_until('other', q{SELECT count(*) = 3 FROM idem.jobs WHERE queue = 'soon'}),
		'T6: a schedule that was locked ticks');
	$_->quit foreach $c, $late;
}
run(each_second('elsewhere'), db => 'other');
run(each_second('beside'));
wait_for_ticks($node, 1, [ 'other', 'elsewhere' ], [ 'postgres', 'beside' ]) or die 'no ticks';
$offset = -s $node->logfile;
{
	my $s = session($node);

	$s->query('BEGIN; LOCK TABLE idem.schedules IN ACCESS EXCLUSIVE MODE');
	is(run('SELECT worker_waits(2)'), '0',
		'T6: idem.schedules is locked: another database ticks, and the worker does not wait');
	$s->query('COMMIT');
	ok(wait_for_ticks($node, 1, [ 'postgres', 'good' ]), 'T6: the worker comes again by itself');

	$s->query('BEGIN; ' . each_second('good'));
	is(run('SELECT worker_waits(2)'), '0', 'T6: an open idem_schedule(): the worker does not wait');
	ok(wait_for_ticks($node, 1, [ 'postgres', 'beside' ]), 'T6: another schedule ticks');
	$s->query('COMMIT');
	ok(wait_for_ticks($node, 1, [ 'postgres', 'good' ]), 'T6: then this one goes on');
	$s->quit;
}
series_ok($node, 'postgres', $_, "locks of others: schedule $_") foreach 'good', 'beside';

# Two other transactions have enqueued the keys of the next ticks.  One commits, so that its
# jobs absorb the ticks, the other one rolls back.
{
	my @blocked = ('kept', 'undone');
	my %s = map { $_ => session($node) } @blocked;
	run(join '; ', map { each_second($_) } @blocked);
	wait_for_ticks($node, 1, map { [ 'postgres', $_ ] } @blocked) or die 'no ticks';
	foreach my $name (@blocked)
	{
		$s{$name}->query(qq{
			BEGIN;
			SELECT e.job_id
			  FROM idem.schedules AS s, generate_series(1, 3) AS n,
				   LATERAL idem_enqueue('q', key => s.name || '\@'
					   || to_char((s.next_tick + n * s.every) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')) AS e
			 WHERE s.name = '$name'});
	}
	# until both are held up
	$node->poll_query_until('postgres', q{
		SELECT count(*) = 2 FROM idem.schedules WHERE name IN ('kept', 'undone') AND next_tick < now() - interval '1 s'})
	  or die 'nothing is held up';
	ok(wait_for_ticks($node, 2, [ 'postgres', 'good' ], [ 'other', 'elsewhere' ]),
		'T6, T7: two schedules wait for transactions that have enqueued their keys: the others tick');
	is(run('SELECT worker_waits(1)'), '0', 'T6: the worker does not wait');
	is(run(q{SELECT count(*) FROM idem.schedules WHERE name IN ('kept', 'undone') AND next_tick < now() - interval '2 s'}),
		'2', 'they are held up still');
	$s{kept}->query('COMMIT');
	$s{undone}->query('ROLLBACK');
	ok(wait_for_ticks($node, 1, map { [ 'postgres', $_ ] } @blocked), 'T6: then these tick, too');
	series_ok($node, 'postgres', 'kept', 'ticks that were enqueued by another transaction are absorbed', absorbed => 1);
	series_ok($node, 'postgres', 'undone', 'ticks whose keys were enqueued by a transaction that rolled back');
	$_->quit foreach values %s;
	run("SELECT idem_unschedule('$_')") foreach @blocked;
}
is(log_count($node, qr/idem (?:schedules|cleanup) failed/, $offset), 0, 'T7: such locks are not logged');
series_ok($node, 'postgres', $_, "transactions of others: schedule $_") foreach 'good', 'beside';
series_ok($node, 'other', 'elsewhere', 'another database');

# sessions that tick, too
ok(pgbench_run($node, [ '--client=4', '--transactions=100' ], [ [ 'SELECT idem_tick();', 1 ] ]),
	'T1: four sessions tick beside the worker');
ok(wait_for_ticks($node, 1, [ 'postgres', 'good' ]), 'T6: and the worker goes on');
series_ok($node, 'postgres', $_, "many processes tick: schedule $_") foreach 'good', 'beside';

#
# W4: databases whose schedules nobody can tick
#

# ticks of the only schedule that is left, visits, and how long the launcher has worked
# (hundredths of a second); between two visits
sub counted
{
	my $counters = q{
		SELECT (SELECT count(*) FROM idem.jobs WHERE key LIKE 'good@%'), w.runs, launcher_pid
		  FROM idem.worker_status AS w WHERE w.state = 'sleeping' AND w.worker_pid IS NULL};
	my ($last, $this) = ('', '');
	my (@counted, $stat);

	while ($this eq '' || $this ne $last)
	{
		$last = $this;
		$this = run($counters);
	}
	@counted = split /\|/, $this;
	$stat = -e '/proc/self/stat' ? slurp_file("/proc/$counted[2]/stat") : '';
	$counted[2] = $stat =~ /\) \S(?: \S+){10} (\d+) (\d+)/ ? $1 + $2 : 0;
	return @counted;
}

# $most: visits beside one for each tick
sub quiet_ok
{
	my ($what, $most, @before) = @_;
	my @after;

	ok(wait_for_ticks($node, 2, [ 'postgres', 'good' ]), "W4: $what: others tick");
	@after = counted();
	my ($ticks, $visits, $cpu) = map { $after[$_] - $before[$_] } 0 .. 2;

	cmp_ok($visits, '<=', $ticks + $most, "W4: $what: no more visits than there are ticks");
	cmp_ok($cpu, '<', 20 * $ticks, "W4: $what: the launcher sleeps between them");
	return;
}

run(q{SELECT idem_unschedule('beside')});
run(q{SELECT idem_unschedule('elsewhere')}, db => 'other');
foreach my $db (qw(dropped closed))
{
	new_database($db);
	run(each_second('tick'), db => $db);
}
wait_for_ticks($node, 1, [ 'dropped', 'tick' ], [ 'closed', 'tick' ]) or die 'no ticks';
my @before = counted();

run('DROP EXTENSION idem', db => 'other');
run('DROP EXTENSION idem', db => 'dropped');
run('DROP DATABASE dropped');
run('ALTER DATABASE closed ALLOW_CONNECTIONS false');
quiet_ok('DROP EXTENSION, DROP DATABASE, no connections', 4, @before);
run('ALTER DATABASE closed ALLOW_CONNECTIONS true');
ok(wait_for_ticks($node, 2, [ 'closed', 'tick' ]), 'T6: connections are allowed again: its schedule ticks');
series_ok($node, 'closed', 'tick', 'a database that did not allow connections');
run(q{SELECT idem_unschedule('tick')}, db => 'closed');
series_ok($node, 'postgres', 'good', 'all of that');

#
# T6: no room for another queue in shared memory
#

run(q{SELECT count(idem_enqueue('queue ' || n)) FROM generate_series(1, 100) AS n});
is(doctor('statistics'), 'warn', 'S2: idem.stats_max is reached');
new_database('crowded');
run(each_second('tick'), db => 'crowded');
ok(wait_for_ticks($node, 1, [ 'crowded', 'tick' ]), 'T6: a new database ticks');
series_ok($node, 'crowded', 'tick', 'no room in shared memory');

$node->stop;
never_two_ok($node);
log_ok($node, killed => 1);
done_testing();
