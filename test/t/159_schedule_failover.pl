# Schedules go with their database: to a standby, over a restart, into a dump, to a subscriber.
#
#   T6  nothing ticks on a standby, nor where a subscription writes the schedules; after
#       the promotion, and after DROP SUBSCRIPTION, the ticks go on there
#   T4  what is due then is treated by "missed"
#   T1  so each tick is one job over all of that
#   K13 idem_tick() writes, so a standby refuses it

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemFailover;
use IdemSchedules;
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
idem.cleanup = off
autovacuum = off
};
my $primary = new_node('primary', init => { allows_streaming => 'logical' }, conf => $conf);
my $other = new_node('other', conf => $conf);
my $standby = PostgreSQL::Test::Cluster->new('standby');

# a state of another server: its clock
sub wait_for_clock
{
	my ($seconds, $since) = @_;

	$other->poll_query_until('postgres', "SELECT clock_timestamp() > '$since'::timestamptz + interval '$seconds s'")
	  or die 'its clock stands still';
	return;
}

# With "once" each tick is a job or was missed, and some were.
sub once_ok
{
	my ($node, $what) = @_;
	my $ticks = q{
		SELECT extract(epoch FROM s.last_tick - s.starts_at)::bigint, count(DISTINCT j.key) + s.missed_ticks,
			   count(*) + s.missed_ticks, s.missed_ticks > 0
		  FROM idem.schedules AS s JOIN idem.jobs AS j ON j.key LIKE 'once@%'
		 WHERE s.name = 'once' GROUP BY s.name};
	my @counts = split /\|/, $node->safe_psql('postgres', $ticks);

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is("@counts[1 .. 3]", "$counts[0] $counts[0] t", "T4: once: $what: each tick is one job, or was missed");
	return;
}

run(q{
	SELECT idem_schedule('all', 'q', every => '1 s', missed => 'all', payload => '{"n": 1}');
	SELECT idem_schedule('once', 'q', every => '1 s', priority => 3);
	SELECT idem_schedule('skip', 'q', cron => '0 0 1 1 *', missed => 'skip', time_zone => 'Europe/Berlin');
	SELECT idem_schedule('paused', 'q', every => '1 s');
	SELECT idem_schedule_pause('paused')});

#
# a standby
#

$primary->backup('backup');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;
ok(wait_for_ticks($standby, 2, map { [ 'postgres', $_ ] } 'all', 'once'), 'the standby sees the ticks of the primary');
is(sqlstate($standby, 'SELECT idem_tick()'), '25006', 'K13: idem_tick() does not work on a standby');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'}),
	'0', 'T6: nothing of ours runs there');
like(doctor('schedules', node => $standby, columns => 'status, detail'),
	qr/^ok\|4 schedules; the primary enqueues their jobs$/, 'H1: idem_doctor() says so');

# no more WAL, and then ticks of the primary that the standby has not got
stop_receiving($standby);
my $lost = last_tick($standby, 'postgres', 'all');

wait_for_ticks($primary, 2, [ 'postgres', 'all' ]) or die 'no ticks';
is(last_tick($standby, 'postgres', 'all'), $lost, 'T6: without the primary nothing ticks on the standby');
$primary->stop('immediate');
$standby->promote;
ok(wait_for_ticks($standby, 2, map { [ 'postgres', $_ ] } 'all', 'once'), 'T6: after the promotion the ticks go on');
series_ok($standby, 'postgres', 'all', 'all: over a failover each tick is one job');
once_ok($standby, 'failover');

#
# a restart
#

$standby->stop;
wait_for_clock(3, $other->safe_psql('postgres', 'SELECT clock_timestamp()'));
$standby->start;
ok(wait_for_ticks($standby, 2, map { [ 'postgres', $_ ] } 'all', 'once'), 'T6: after a restart the ticks go on');
series_ok($standby, 'postgres', 'all', 'all: over a restart each tick is one job');
once_ok($standby, 'restart');

#
# a dump
#

my $rows = 'SELECT s::text FROM idem.schedules AS s ORDER BY name';
my $dump = PostgreSQL::Test::Utils::tempdir() . '/custom.dump';

$standby->command_ok(
	[ $standby->installed_command('pg_dump'), '--format=custom', "--file=$dump", '--dbname' => $standby->connstr('postgres') ],
	'pg_dump');
$other->safe_psql('postgres', 'CREATE DATABASE restored');

# the worker of the other server does not come before it is told to, so nothing ticks
$other->command_ok(
	[ $other->installed_command('pg_restore'), '--exit-on-error', '--dbname' => $other->connstr('restored'), $dump ],
	'pg_restore');

my $before = $other->safe_psql('restored', $rows);
my ($missed) = $other->safe_psql('restored', q{SELECT missed_ticks FROM idem.schedules WHERE name = 'once'});

is( $other->safe_psql('restored', q{
		SELECT name, state, next_tick IS NULL, missed FROM idem.schedule_status ORDER BY name}),
	"all|active|f|all\nonce|active|f|once\npaused|paused|t|once\nskip|active|f|skip",
	'pg_restore: the schedules are there, and one is still paused');
is( $other->safe_psql('restored', q{SELECT count(*) FROM idem.schedules WHERE name IN ('all', 'once') AND next_tick <= last_tick + every}),
	'2', 'pg_restore: with the ticks that are due');
cmp_ok($missed, '>', 0, 'pg_restore: and the number of those that were missed');
is($other->safe_psql('restored', $rows), $before, 'T6: the worker does not know of a restore');
$other->safe_psql('postgres', 'SELECT pg_reload_conf()');
ok(wait_for_ticks($other, 2, map { [ 'restored', $_ ] } 'all', 'once'), 'T6: after a reload the ticks go on');
series_ok($other, 'restored', 'all', 'all: from the first tick of the primary until now each tick is one job');
is($other->safe_psql('restored', q{SELECT count(*) FROM idem.jobs WHERE key LIKE 'paused@%' OR key LIKE 'skip@%'}),
	'0', 'T5: a schedule that is paused does not tick, nor does one before its time');
$other->safe_psql('restored', q{SELECT idem_unschedule(name) FROM idem.schedules});

#
# logical replication
#

my $subscription = sprintf q{CREATE SUBSCRIPTION sub CONNECTION '%s dbname=published' PUBLICATION pub}, $standby->connstr;

$standby->safe_psql('postgres', q{SELECT idem_unschedule(name) FROM idem.schedules});
$standby->safe_psql('postgres', 'CREATE DATABASE published');
$standby->safe_psql('published', q{
	CREATE EXTENSION idem;
	SELECT idem_schedule('all', 'q', every => '1 s', missed => 'all');
	CREATE PUBLICATION pub FOR TABLE idem.schedules, idem.jobs, idem.job_keys, idem.job_log, idem.queues, idem.keys});
$other->safe_psql('postgres', 'CREATE DATABASE subscribed');
$other->safe_psql('subscribed', 'CREATE EXTENSION idem');
$other->safe_psql('subscribed', $subscription);
ok(wait_for_ticks($other, 1, [ 'subscribed', 'all' ]), 'the subscriber gets the ticks of the publisher');

# a visit of the worker, and a session
sub visit
{
	my $runs = $other->safe_psql('postgres', 'SELECT runs FROM idem.worker_status');

	$other->safe_psql('postgres', 'SELECT pg_reload_conf()');
	$other->poll_query_until('postgres', qq{
		SELECT state = 'sleeping' AND runs >= $runs + (SELECT count(*) FROM pg_database WHERE datallowconn AND NOT datistemplate)
		  FROM idem.worker_status})
	  or die 'no visits';
	return;
}

sub does_not_tick
{
	my ($what) = @_;
	my ($ret, $out, $err) = $other->psql('subscribed', 'SELECT idem_tick()');

	is($out, '0', "T6: $what: idem_tick() does not tick on the subscriber");
	like($err, qr/NOTICE:  no schedule ticks, because a subscription writes/, "T6: $what: and says why");
	visit();
	return;
}

# the publisher does not tick for a while, and the subscriber sees that its schedule is due
my $launcher = $standby->safe_psql('postgres', 'SELECT launcher_pid FROM idem.worker_status');

kill 'STOP', $launcher;
$other->poll_query_until('subscribed', q{SELECT next_tick < now() - interval '1 s' FROM idem.schedules})
  or die 'it is not due';
$before = $other->safe_psql('subscribed', "$rows; SELECT count(*) FROM idem.jobs");
does_not_tick('a subscription');
is($other->safe_psql('subscribed', "$rows; SELECT count(*) FROM idem.jobs"), $before, 'T6: nor does the worker');
kill 'CONT', $launcher;
ok(wait_for_ticks($other, 2, [ 'subscribed', 'all' ]), 'the publisher goes on');

# cutover
$standby->stop;
$other->safe_psql('subscribed', 'ALTER SUBSCRIPTION sub DISABLE; ALTER SUBSCRIPTION sub SET (slot_name = NONE)');
$other->poll_query_until('subscribed', q{SELECT next_tick < now() - interval '1 s' FROM idem.schedules})
  or die 'it is not due';
$before = $other->safe_psql('subscribed', "$rows; SELECT count(*) FROM idem.jobs");
does_not_tick('a subscription that is disabled');
is($other->safe_psql('subscribed', "$rows; SELECT count(*) FROM idem.jobs"), $before, 'T6: nor does the worker');
$other->safe_psql('subscribed', 'DROP SUBSCRIPTION sub');
$other->safe_psql('subscribed', doctor('job numbers', columns => 'fix', db => 'subscribed', node => $other));
$other->safe_psql('postgres', 'SELECT pg_reload_conf()');
ok(wait_for_ticks($other, 2, [ 'subscribed', 'all' ]), 'T6: after DROP SUBSCRIPTION and a reload the ticks go on here');
series_ok($other, 'subscribed', 'all', 'over a cutover each tick is one job');

is(log_count($_, qr/idem (?:schedules|cleanup) failed/), 0, 'T7: ' . $_->name . ': nothing has failed') foreach $standby, $other;
$other->stop;
log_ok($_) foreach $primary, $standby, $other;
done_testing();
