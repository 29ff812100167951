# W6: neither launcher nor worker during pg_upgrade, with the library preloaded
# in both clusters; the data arrives, and then the new server cleans up.
#
# A map of slots survives, too, and job numbers go on (M6).  So do schedules: a tick that is
# due then becomes a job on the new server, although cleanup is off there at first (T6).
#
# From a version to the same version: what matters here is how pg_upgrade starts
# the servers.  By hand, to a newer server: IDEM_SUBSCRIBER=/path/of/installation.
#
# Bugs of other projects (doc/peers.md section 4) that this test looks for:
#   pg_cron 1.1.3, pgsentinel#48   the worker runs during pg_upgrade

use strict;
use warnings FATAL => 'all';

use File::Find;
use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($version, $error) = ('', '');

plan skip_all => 'pg_upgrade is not installed'
  unless eval {
	IPC::Run::run([ 'pg_upgrade', '--version' ], '>', \$version, '2>', \$error);
  };

# debug1: the postmaster logs which process it starts, in pg_upgrade, too
my $conf = q{
shared_preload_libraries = 'idem'
log_min_messages = debug1
idem.cleanup_naptime = 1d
};
# --data-checksums: the default changed in 18, and both have to have the same
my @initdb = ('--no-locale', '--encoding=UTF8', '--data-checksums');
my $old = new_node('old', init => { extra => \@initdb }, conf => $conf);
my $new = PostgreSQL::Test::Cluster->new('new', defined $ENV{IDEM_SUBSCRIBER} ? (install_path => $ENV{IDEM_SUBSCRIBER}) : ());

$new->init(extra => \@initdb);
$new->append_conf('postgresql.conf', "$conf\nidem.cleanup = off\n");

# Every row of ours
my $rows = q{
	SELECT 'key', k::text FROM idem.keys AS k
	UNION ALL SELECT 'job', j::text FROM idem.jobs AS j
	UNION ALL SELECT 'key of a job', k::text FROM idem.job_keys AS k
	UNION ALL SELECT 'history', l::text FROM idem.job_log AS l
	UNION ALL SELECT 'queue', q::text FROM idem.queues AS q
	UNION ALL SELECT 'map', s::text FROM idem.shard AS s
	ORDER BY 1, 2};
my $expired = q{SELECT count(*) FROM idem.keys WHERE expires_at < now()};
my $stats =
  q{SELECT claims, replays, stats_reset FROM idem.stats WHERE datname = 'postgres'};
my $started = qr/starting background worker process "idem launcher"/;

sub upgrade
{
	my ($name, @more) = @_;

	chdir PostgreSQL::Test::Utils::tempdir();
	command_ok(
		[
			$new->installed_command('pg_upgrade'), '--no-sync', '--retain',
			'--old-datadir' => $old->data_dir,
			'--new-datadir' => $new->data_dir,
			'--old-bindir' => $old->config_data('--bindir'),
			'--new-bindir' => $new->config_data('--bindir'),
			'--socketdir' => $new->host,
			'--old-port' => $old->port,
			'--new-port' => $new->port,
			@more
		],
		$name);
	return;
}

# What the servers that pg_upgrade has started have logged
sub upgrade_log
{
	my $log = '';

	find(
		sub { $log .= slurp_file($_) if /server\.log$/ },
		$new->data_dir . '/pg_upgrade_output.d');
	return $log;
}

# A round before there is something to be removed.  The next one is a day later.
$old->safe_psql(
	'postgres', q{
	SELECT idem_claim('live', request => '1'), idem_finish('live', '"result"');
	SELECT pg_reload_conf()});
$old->poll_query_until('postgres',
	q{SELECT last_finished_at IS NOT NULL FROM idem.cleanup_progress WHERE datname = 'postgres'}
) or die 'there is no round';
$old->poll_query_until('postgres',
	q{SELECT state = 'sleeping' FROM idem.worker_status})
  or die 'the launcher does not come to rest';

my $token = $old->safe_psql('postgres',
	q{SELECT token FROM idem_lease('leased', '1 day')});

add_expired($old, 1000);

# not all slots, so that the new server has some to refuse
$old->safe_psql(
	'postgres', q{
	SELECT idem_enqueue('before the map');
	SELECT idem_shard_set(int4multirange(int4range(0, 1024)) - int4multirange(int4range(idem_slot('not ours'), idem_slot('not ours') + 1)),
						  number => 5);
	SELECT status FROM idem_claim('live', request => '1');
	SELECT idem_enqueue('mail', '1', key => 'job')});

# due since yesterday, without a word to the launcher
$old->safe_psql(
	'postgres', q{
	CREATE ROLE planner;
	SELECT idem_grant('planner', 'app');
	SET ROLE planner;
	SELECT idem_schedule('tick', 'ticks', cron => '@yearly', time_zone => 'Europe/Berlin', payload => '{"a": 1}');
	RESET ROLE;
	UPDATE idem.schedules SET next_tick = now() - interval '1 day', missed_ticks = 7});
my $schedule = 'SELECT queue, owner, cron, time_zone, missed, payload, missed_ticks FROM idem.schedules';
my $schedule_before = $old->safe_psql('postgres', $schedule);
my $number = $old->safe_psql('postgres', 'SELECT max(job_id) FROM idem.jobs');

# a move of slots has begun
my $id = $old->safe_psql('postgres', 'SELECT idem_shard_id()');
my $receiver = '11111111-1111-4111-8111-111111111111';
my $given = "int4multirange(int4range(idem_slot('given'), idem_slot('given') + 1))";

$old->safe_psql('postgres', "SELECT idem_shard_give($given, '$receiver')");

# pg_upgrade carries columns that were dropped
$old->safe_psql(
	'postgres', q{
	ALTER TABLE idem.keys ADD COLUMN x integer NOT NULL DEFAULT 7, ADD COLUMN y text;
	UPDATE idem.keys SET x = 8, y = 'y' WHERE key = 'leased';
	ALTER TABLE idem.keys DROP COLUMN x, DROP COLUMN y;
	ALTER TABLE idem.jobs ADD COLUMN x jsonb;
	ALTER TABLE idem.jobs DROP COLUMN x;
	ALTER TYPE idem.claim_result ADD ATTRIBUTE x integer;
	ALTER TYPE idem.claim_result DROP ATTRIBUTE x;
	ALTER TYPE idem.fetch_result ADD ATTRIBUTE x integer;
	ALTER TYPE idem.fetch_result DROP ATTRIBUTE x});
my $dropped = q{
	SELECT attrelid::regclass, count(*) FROM pg_attribute
	 WHERE attrelid = ANY ('{idem.keys, idem.jobs, idem.claim_result, idem.fetch_result}'::regclass[]) AND attisdropped
	 GROUP BY 1 ORDER BY attrelid::regclass::text COLLATE "C"};
my $dropped_before = $old->safe_psql('postgres', $dropped);

is($dropped_before, "idem.claim_result|1\nidem.fetch_result|1\nidem.jobs|1\nidem.keys|2", 'columns were dropped');

my $before = $old->safe_psql('postgres', $rows);
my $map = $old->safe_psql('postgres', 'SELECT database_id, jobs_from, by, slots, number, given, receiver FROM idem.shard');
my $stats_before = $old->safe_psql('postgres', $stats);

like(slurp_file($old->logfile),
	$started, 'an ordinary start of the server starts the launcher');

#
# pg_upgrade
#

upgrade('pg_upgrade --check, the old server is running', '--check');
is($old->safe_psql('postgres', $rows),
	$before, 'W6: all rows are there, with those that have expired');
$old->stop;
upgrade('pg_upgrade --check, the old server is stopped', '--check');
upgrade('pg_upgrade');

my $log = upgrade_log();

cmp_ok(
	scalar(() = $log =~ /ready to accept connections/g),
	'>=', 3,
	'the log has the servers that pg_upgrade has started');
like($log, qr/DEBUG:  /, 'and has messages of level debug');
is( join("\n", $log =~ /^.*background worker(?: process)? "idem.*$/mg),
	'',
	'W6, pg_cron 1.1.3, pgsentinel#48: nothing of ours runs during pg_upgrade');
is( join("\n", $log =~ /^.*(?:PANIC|TRAP|was terminated by signal).*$/mg),
	'', 'nothing went wrong there');

#
# the new server, without cleanup at first
#

$new->start;
is($new->safe_psql('postgres', $rows),
	$before, 'W6: every row has arrived, and nothing was removed on the way');
is($new->safe_psql('postgres', $dropped), $dropped_before, 'with columns that were dropped');
is( join(' ',
		claim_status($new, q{'live', request => '1'}),
		$new->safe_psql(
			'postgres', qq{SELECT idem_finish('leased', token => $token)}),
		$new->safe_psql(
			'postgres', q{SELECT outcome FROM idem_enqueue('mail', '2', key => 'job')})),
	'finished|"result" t absorbed',
	'keys, leases and jobs go on');
is($new->safe_psql('postgres', $schedule), $schedule_before, 'T6: a schedule arrives, with the number of ticks that were missed');
ok( $new->poll_query_until('postgres', q{
		SELECT count(*) = 1 FROM idem.jobs AS j, idem.schedules AS s
		 WHERE j.queue = 'ticks' AND j.job_id = s.last_job AND j.run_at = s.last_tick AND s.next_tick > now()}),
	'T6: and its tick becomes a job');
is(sqlstate($new, q{SELECT idem_claim('not ours')}), 'ID006', 'M2: the new server refuses what the old one refused');
cmp_ok($new->safe_psql('postgres', q{SELECT job_id FROM idem_enqueue('mail')}),
	'>', $number + 1024 - $number % 1024 - 1, 'M6: job numbers go on after those of the old server');
is($new->safe_psql('postgres', q{SELECT job_id < 1024 FROM idem_fetch('before the map')}), 't', 'M6: a job from before the map');
is(doctor('shard map', node => $new), 'warn', 'H1: another system identifier');
like(doctor('shard map', columns => 'detail', node => $new), qr/keep_id => s.database_id/, 'H1: the doctor names the way on');
my $set = 'SELECT idem_shard_set(s.slots, s.by, s.number';

is(sqlstate($new, $_), '55000', "M8: after pg_upgrade the move does not go on by itself: $_")
  foreach 'SELECT idem_shard_id()', "SELECT idem_shard_give($given, '$receiver')", "SELECT idem_shard_take($given, 0, '$receiver')",
  "$set) FROM idem.shard AS s";
$new->safe_psql('postgres', "$set, keep_id => s.database_id) FROM idem.shard AS s");
is($new->safe_psql('postgres', 'SELECT idem_shard_id()'), $id, 'M8: the id is kept for the one that says so');
is($new->safe_psql('postgres', 'SELECT database_id, jobs_from, by, slots, number, given, receiver FROM idem.shard'), $map, 'M6: the map and the move, too');
$new->safe_psql('postgres', "SELECT idem_shard_take($given, 0, '$receiver')");
is(doctor('shard map', node => $new), 'ok', 'H1: then nothing is missing');
$new->safe_psql('postgres', 'ALTER SYSTEM SET idem.cleanup = on');
$new->safe_psql('postgres', 'SELECT pg_reload_conf()');
$new->poll_query_until('postgres', "SELECT ($expired) = 0")
  or die 'is not cleaned up';
is($new->safe_psql('postgres', 'SELECT key FROM idem.keys ORDER BY 1'),
	"leased\nlive", 'W6: the new server cleans up');
is( $new->safe_psql(
		'postgres',
		q{SELECT string_agg("check", ', ') FROM idem_doctor() WHERE status = 'fail'}),
	'',
	'H1: idem_doctor() finds nothing wrong');

#
# the old one, should we go back
#

$old->start;
is($old->safe_psql('postgres', $stats),
	$stats_before, 'S2: pg_upgrade does not lose the statistics of the old server');
$old->poll_query_until('postgres', "SELECT ($expired) = 0")
  or die 'is not cleaned up';
pass('W6: the old server cleans up as before');

foreach my $node ($old, $new)
{
	amcheck_ok($node, 'on the ' . $node->name . ' server');
	$node->stop;
	never_two_ok($node);
	log_ok($node);
}
done_testing();
