# pg_createsubscriber (17 and newer) makes a logical subscriber of a standby, under load; then the
# program idem_cutover makes it the primary.
#
#   K13  the subscriber refuses to write from its first ordinary start on
#   W1   with idem.cleanup = off nothing is removed while it is a primary without a subscription
#   and nothing is lost and nothing runs twice, by the ledger (K1, K3, J2, J11, L1)

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

my ($version, $error) = ('', '');

plan skip_all => 'pg_createsubscriber is not installed (before 17 there is none)'
  unless eval { IPC::Run::run([ 'pg_createsubscriber', '--version' ], '>', \$version, '2>', \$error) };

my $publisher = new_node(
	'publisher',
	init => { allows_streaming => 'logical' },
	conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
wal_retrieve_retry_interval = 100ms
max_connections = 40
});
my $everything = q{
	SELECT 'key', k::text FROM idem.keys AS k
	UNION ALL SELECT 'job', j::text FROM idem.jobs AS j
	UNION ALL SELECT 'job key', x::text FROM idem.job_keys AS x
	UNION ALL SELECT 'log', l::text FROM idem.job_log AS l
	UNION ALL SELECT 'queue', q::text FROM idem.queues AS q
	UNION ALL SELECT 'schedule', s::text FROM idem.schedules AS s
	ORDER BY 1, 2};

run('CREATE ROLE app LOGIN;' . IdemCutover::tables() . q{
	CREATE SEQUENCE numbers;
	SELECT idem_shard_set('{[0,1024)}', number => 3);
	SELECT idem_queue_set('kept', keep => '1 day', owner => 'app');
	SELECT setval('numbers', 10)});
$publisher->backup('backup');

my $standby = PostgreSQL::Test::Cluster->new('standby');

$standby->init_from_backup($publisher, 'backup', has_streaming => 1);
$standby->append_conf('postgresql.conf', "idem.cleanup = off\n");
$standby->start;

# not in a file that the backup has copied; rows for cleanup only after the publisher has none
run('ALTER SYSTEM SET idem.cleanup = off');
run('SELECT pg_reload_conf()');
cleanup_round($publisher);
run(q{SET idem.clock_offset = -100000; SELECT idem_claim_many('{taken over, gone}', ttl => '1 s')});

my $token = run(q{SELECT token FROM idem_lease('leased', '1 hour')});
my ($job, $job_token) = split /\|/, run(
	q{SELECT idem_enqueue('kept', '1', key => 'k', dedup => 'until_expired', key_ttl => '1 day') \g /dev/null
	SELECT job_id, token FROM idem_fetch('kept', lease => '1 hour')});
my $load = IdemCutover->new(servers => [ $publisher, $standby ]);

$load->start;
$publisher->wait_for_catchup($standby);
$standby->stop;
command_ok(
	[
		'pg_createsubscriber', '--verbose',
		'--recovery-timeout' => $PostgreSQL::Test::Utils::timeout_default,
		'--pgdata' => $standby->data_dir,
		'--publisher-server' => $publisher->connstr('postgres'),
		'--socketdir' => $standby->host,
		'--subscriber-port' => $standby->port,
		'--database' => 'postgres',
		'--subscription' => 'sub',
		'--publication' => 'pub',
		'--replication-slot' => 'sub'
	],
	'pg_createsubscriber');

# Its first ordinary start: the subscription is there, and with it all tables.
$standby->start;

my %on = (node => $standby);

is(sqlstate($standby, q{SELECT idem_claim('new')}), '25006', 'K13: the subscriber refuses a claim');
is(sqlstate($standby, q{SELECT idem_enqueue('q')}), '25006', 'K13: and an enqueue');
is( run(q{SELECT count(*) FROM pg_subscription_rel WHERE srsubstate = 'r' AND srrelid::regclass::text LIKE 'idem.%'}, %on),
	'7',
	'K13: pg_subscription_rel has all tables of idem, without a copy');
is(doctor('subscription', %on), 'warn', 'H1: the doctor reports the subscription');
is(run(q{SELECT count(*) FROM idem.keys WHERE key IN ('taken over', 'gone')}, %on),
	'2', 'W1: nothing was removed before there was a subscription');
run(q{SELECT idem_claim('taken over'); SELECT nextval('numbers')});
run('ALTER SYSTEM RESET idem.cleanup');
run('SELECT pg_reload_conf()');

my ($status, $out) = idem_cutover($publisher, $standby, '--check');

is($status, 0, 'idem_cutover --check: nothing is missing');
like($out, qr/^note .*idem\.cleanup is off/m, 'idem_cutover --check: cleanup has to be switched on');
($status) = idem_cutover($publisher, $standby, '--until', 4);
is($status, 0, 'idem_cutover: up to step 4');
ok(run($everything, %on) eq run($everything), 'the subscriber has the same rows');
is(run(q{SELECT key FROM idem.keys WHERE key IN ('taken over', 'gone')}, %on),
	'taken over', 'the takeover and the removals of the publisher have arrived');
($status, $out) = idem_cutover($publisher, $standby);
is($status, 0, 'idem_cutover: the rest');
like($out, qr/^note .*shard map: the map was set in another database/m, 'the map: another system identifier');
is(sqlstate($standby, 'SELECT idem_shard_id()'), '55000', 'M8: a copy until an operator says that it replaces the original');
run('SELECT idem_shard_set(s.slots, s.by, s.number, keep_id => s.database_id) FROM idem.shard AS s', %on);
is(doctor('shard map', %on), 'ok', 'until it is set again');
is(run('SELECT slots, number, idem_shard_id() FROM idem.shard', %on),
	'{[0,1024)}|3|' . run('SELECT idem_shard_id()'), 'the map is that of the publisher');
$load->finish;
$load->ledger_ok;

is( run(qq{SELECT idem_finish('leased', token => $token); SELECT idem_complete($job, $job_token, '"done"');
		SELECT outcome, result FROM idem_enqueue('kept', key => 'k', dedup => 'until_expired', key_ttl => '1 day');
		SELECT nextval('numbers')}, %on),
	qq{t\nt\ndone|"done"\n12}, 'leases, jobs and sequences go on');
is(sqlstate($publisher, q{SELECT idem_claim('new')}), '25006', 'the old server refuses');
$standby->append_conf('postgresql.conf', "idem.cleanup = on\n");
$standby->reload;
add_expired($standby, 3);
ok( $standby->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now()'),
	'W1: the worker cleans up');
amcheck_ok($standby, 'after the cutover', 'idem.keys', 'idem.jobs');

$_->stop foreach $standby, $publisher;
log_ok($_) foreach $publisher, $standby;
done_testing();
