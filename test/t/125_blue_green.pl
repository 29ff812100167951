# Logical replication: an upgrade without downtime, from the publisher to the
# subscriber.
#
#   W1   cleanup, by the worker and by hand, skips what a subscription writes,
#        and goes on when the subscription is dropped: else an expired key that
#        the publisher takes over is missing after the cutover, and runs again
#   K13  the subscriber refuses to write with 25006 until then
#   H1   the doctor says so
#
# First step by step: short rows, TOAST, a takeover, dead jobs on both sides, a
# role that is missing, the sequence.  Then a cutover under load with the program
# idem_cutover, as doc/replication.md says, and a ledger: nothing runs twice,
# nothing is lost.  126_cutover.pl stops the program everywhere.
#
# By hand, to a newer server: IDEM_SUBSCRIBER=/path/of/installation, in which
# idem is installed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemCutover;
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
wal_retrieve_retry_interval = 100ms
max_connections = 40
};
my $publisher = new_node(
	'publisher',
	init => { allows_streaming => 'logical' },
	conf => "$conf\nidem.cleanup = off\n");
my $subscriber = new_node(
	'subscriber',
	install => $ENV{IDEM_SUBSCRIBER},
	conf => $conf);
my $ledger = IdemCutover::tables();

# a role of the same name has another number on the other server
$publisher->safe_psql('postgres', "CREATE ROLE app LOGIN; $ledger");
$subscriber->safe_psql('postgres', "CREATE ROLE another; CREATE ROLE app LOGIN; $ledger");

sub on_publisher
{
	my ($sql) = @_;

	return $publisher->safe_psql('postgres', $sql);
}

sub on_subscriber
{
	my ($sql) = @_;

	return $subscriber->safe_psql('postgres', $sql);
}

sub catch_up
{
	$publisher->wait_for_catchup('sub');
	return;
}

# The worker comes every second: between two visits the phase is that of the last one.
sub phase_ok
{
	my ($phase, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	ok( $subscriber->poll_query_until(
			'postgres', qq{
			SELECT phase = '$phase' FROM idem.cleanup_progress WHERE datname = current_database()}),
		$what);
	return;
}

# All rows of our tables, as a client sees them.  A row that ends before the
# columns of a lease is the same as one with nulls there.
my $everything = q{
	SELECT 'key', k::text FROM idem.keys AS k
	UNION ALL SELECT 'job', j::text FROM idem.jobs AS j
	UNION ALL SELECT 'job key', x::text FROM idem.job_keys AS x
	UNION ALL SELECT 'log', l::text FROM idem.job_log AS l
	UNION ALL SELECT 'queue', q::text FROM idem.queues AS q
	UNION ALL SELECT 'schedule', s::text FROM idem.schedules AS s
	ORDER BY 1, 2};

sub same_ok
{
	my ($what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	catch_up();
	ok(on_subscriber($everything) eq on_publisher($everything),
		"the subscriber has the same rows: $what");
	return;
}

#
# the subscription; a role is missing at first
#

# 20 kB that do not compress
my $large = q{(SELECT to_jsonb(string_agg(md5(i::text), '')) FROM generate_series(1, 625) AS i)};

on_publisher(
	qq{
	CREATE ROLE late;
	SELECT idem_grant('late', 'app');
	SET ROLE app;
	SELECT idem_claim('short');
	BEGIN; SELECT idem_claim('small'); SELECT idem_finish('small', '"small"'); COMMIT;
	BEGIN; SELECT idem_claim('large'); SELECT idem_finish('large', $large); COMMIT;
	SELECT idem_lease('leased', '1 hour', worker => 'w 1');
	SET ROLE late;
	SELECT idem_claim('of late');
	RESET ROLE;
	SELECT idem_queue_set('of app', owner => 'app');
	SELECT idem_enqueue('q', '"copied"');
	CREATE PUBLICATION pub FOR ALL TABLES});

is(doctor('subscription', node => $subscriber), 'ok', 'H1: no subscription, and no problem');

my $offset = -s $subscriber->logfile;

on_subscriber(
	sprintf q{CREATE SUBSCRIPTION sub CONNECTION '%s' PUBLICATION pub},
	$publisher->connstr . ' dbname=postgres');
$subscriber->wait_for_log(qr/role "late" does not exist/, $offset);
is( on_subscriber(q{SELECT count(*) FROM idem.keys}),
	'0', 'role missing: no key is copied');
on_subscriber('CREATE ROLE late');
$subscriber->wait_for_subscription_sync($publisher, 'sub');
same_ok('copied, when the role is there');
is( on_subscriber(q{SELECT key, owner FROM idem.keys WHERE key IN ('of late', 'short') ORDER BY 1}),
	"of late|late\nshort|app",
	'owners are carried by name');

# the same while it streams
$offset = -s $subscriber->logfile;
on_publisher(
	q{CREATE ROLE later; SELECT idem_grant('later', 'app');
	SET ROLE later; SELECT idem_claim('of later')});
$subscriber->wait_for_log(qr/role "later" does not exist/, $offset);
on_subscriber('CREATE ROLE later');
same_ok('streamed, when the role is there');

#
# rows of every kind, streamed; the second of each pair is an update
#

my $token = on_publisher(q{SELECT token FROM idem_get('leased')});
my $lease_token = on_publisher(q{SET ROLE app; SELECT token FROM idem_lease('checkpoint', '1 hour')});

on_publisher(
	qq{
	SET ROLE app;
	SELECT idem_claim('short 2');
	BEGIN; SELECT idem_claim('large 2'); SELECT idem_finish('large 2', $large); COMMIT;
	SELECT idem_checkpoint('checkpoint', $lease_token, $large);
	SELECT idem_renew('checkpoint', $lease_token, '2 hours');
	SELECT idem_renew('leased', $token, '2 hours');
	RESET ROLE;
	SELECT idem_enqueue('large', $large);
	SELECT idem_queue_set('kept', keep => '1 day');
	SELECT idem_enqueue('kept', '1', 'kept', dedup => 'until_expired', key_ttl => '1 day');
	SELECT idem_complete(job_id, token, $large) FROM idem_fetch('kept', lease => '1 hour')});
my ($large_job, $large_token) = split /\|/,
  on_publisher(q{SELECT job_id, token FROM idem_fetch('large', lease => '1 hour')});
same_ok('short, large, leased, checkpoint, jobs, history');
is(on_subscriber(q{SELECT length(result::text) FROM idem_get('large 2')}),
	'20002', 'a result out of line arrives');

#
# W1: cleanup on the subscriber, in the way of the publisher
#

# expired keys that the publisher will take over, history, and a spent job
on_publisher(
	q{
	SET idem.clock_offset = -100000;
	SET ROLE app;
	SELECT idem_claim_many('{taken over, taken over with lease, gone}', ttl => '1 s');
	RESET ROLE;
	SELECT idem_enqueue('kept', '2', 'old', dedup => 'until_expired', key_ttl => '1 s');
	SELECT idem_queue_set('kept', keep => '1 s');
	SELECT idem_complete(job_id, token) FROM idem_fetch('kept', lease => '1 s');
	SELECT idem_enqueue('spent', max_attempts => 1);
	SELECT idem_fetch('spent', lease => '1 s')});
same_ok('what has expired');

my $before = on_subscriber($everything);

is(doctor('subscription', node => $subscriber), 'warn', 'H1: the doctor reports the subscription');
like(
	doctor('subscription', columns => 'detail', node => $subscriber),
	qr/^idem\.job_keys, idem\.job_log, idem\.jobs, idem\.keys, idem\.queues, idem\.schedules, idem\.shard: written by subscription sub,.*roles.*stop writes.*DROP SUBSCRIPTION, reload$/,
	'H1: and says what to do at the cutover');
cleanup_round($subscriber, 'postgres');
phase_ok('subscribed', 'W1: the worker shows that it skips tables');
my ($ret, $out, $err) =
  $subscriber->psql('postgres', 'SELECT idem_cleanup()');
is($out, '0', 'W1: idem_cleanup() skips them, too');
like($err,
	qr/^psql.*NOTICE:  cleanup has skipped tables that a subscription writes\nDETAIL:  Not cleaned up: idem\.keys, idem\.job_keys, idem\.job_log, idem\.jobs\.\nHINT: /,
	'W1: and says so');
on_subscriber('ALTER SUBSCRIPTION sub DISABLE');
cleanup_round($subscriber, 'postgres');
phase_ok('subscribed', 'W1: also while the subscription is disabled');
is(on_subscriber('SELECT idem_cleanup()'), '0', 'W1: idem_cleanup() as well');
on_subscriber('ALTER SUBSCRIPTION sub ENABLE');
is(on_subscriber($everything), $before, 'W1: nothing was removed');

# K13: what would write is refused, and what reads works
foreach my $call (
	q{idem_claim('new')}, q{idem_claim('taken over')},
	q{idem_claim('short')}, q{idem_lease('new', '1 min')},
	qq{idem_finish('leased', token => $token)},
	qq{idem_renew('leased', $token, '1 min')},
	q{idem_forget('short')}, q{idem_enqueue('q')},
	q{idem_enqueue('q', key => 'k')}, q{idem_fetch('q')},
	q{idem_fetch('spent', lease => '1 min')},
	qq{idem_complete($large_job, $large_token)},
	qq{idem_cancel($large_job)}, q{idem_queue_set('q', lease => '1 min')},
	q{idem_pause('q')})
{
	is(sqlstate($subscriber, "SELECT $call"),
		'25006', "K13: $call gives 25006 on the subscriber");
}
is( on_subscriber(
		qq{SELECT status FROM idem_get('short'); SELECT state FROM idem_job($large_job)}),
	"finished\nrunning",
	'K13: reading works there');
is(on_subscriber($everything), $before, 'K13: nothing was changed');

# the takeovers arrive; the publisher's cleanup arrives, with the dead job
on_publisher(
	q{
	SET ROLE app;
	BEGIN;
	SELECT idem_claim('taken over'); SELECT idem_finish('taken over', '"life 2"');
	COMMIT;
	SELECT idem_lease('taken over with lease', '1 hour');
	RESET ROLE;
	SELECT idem_cleanup()});
same_ok('takeovers, a dead job, removals');
is( on_subscriber(
		q{SELECT key FROM idem.keys WHERE key = 'gone';
		SELECT result FROM idem_get('taken over');
		SELECT status FROM idem_get('taken over with lease');
		SELECT queue, state FROM idem.job_log ORDER BY 1}),
	qq{"life 2"\nlive\nkept|done\nspent|dead},
	'takeovers, a dead job, removals are what arrives');
is( on_subscriber(q{SELECT count(*) FROM pg_stat_subscription WHERE subname = 'sub' AND pid IS NOT NULL}),
	'1', 'and the subscription goes on');

#
# the cutover, under load, with the program
#

my $load = IdemCutover->new(servers => [ $publisher, $subscriber ]);
my ($status, $printed);

# begun, and undone: the clients go on where they were
on_subscriber(q{CREATE SEQUENCE behind});
on_publisher(q{CREATE SEQUENCE behind; SELECT setval('behind', 10)});
$load->start;
($status, $printed) = idem_cutover($publisher, $subscriber, '--check');
is($status, 0, 'idem_cutover --check: nothing is missing');
($status) = idem_cutover($publisher, $subscriber, '--until', 1);
is($status, 0, 'idem_cutover: step 1');
is(sqlstate($publisher, q{SELECT idem_claim('short')}),
	'25006', 'K13: the publisher answers 25006');
is(sqlstate($subscriber, q{SELECT idem_claim('short')}),
	'25006', 'K13: the subscriber does not write yet');
my $runs = on_publisher('SELECT count(*) FROM runs');
($status) = idem_cutover($publisher, $subscriber, '--abort');
is($status, 0, 'idem_cutover --abort');
$publisher->poll_query_until('postgres', "SELECT count(*) > $runs FROM runs")
  or die 'the clients do not work';

my $last = on_publisher('SELECT last_value FROM idem.jobs_job_id_seq');

cmp_ok(on_subscriber('SELECT last_value FROM idem.jobs_job_id_seq'),
	'<', $last, 'the sequence is not replicated');
like(
	doctor('subscription', columns => 'fix', node => $subscriber),
	qr/setval/, 'H1: the fix of the doctor sets it');
($status) = idem_cutover($publisher, $subscriber, '--until', 4);
is($status, 0, 'idem_cutover: up to step 4');
ok(on_subscriber($everything) eq on_publisher($everything),
	'the subscriber has the same rows: at the cutover');
$last = on_publisher('SELECT last_value FROM idem.jobs_job_id_seq');
is(on_subscriber('SELECT last_value FROM idem.jobs_job_id_seq'),
	$last + 1_000_000, 'the sequence of the subscriber is ahead');
is(on_subscriber(q{SELECT nextval('behind')}), '11', 'sequences of the user are set');
is(doctor('subscription', node => $subscriber), 'warn', 'the subscription is there until step 5');
($status) = idem_cutover($publisher, $subscriber);
is($status, 0, 'idem_cutover: the rest');
is(doctor('subscription', node => $subscriber), 'ok', 'H1: no subscription any more');
$load->finish;
$load->ledger_ok;
cmp_ok(on_subscriber(q{SELECT job_id FROM idem_enqueue('new')}),
	'>', $last + 1_000_000, 'new jobs have new numbers');
($status) = idem_cutover($publisher, $subscriber, '--abort');
is($status, 4, 'idem_cutover --abort: too late');
is(sqlstate($publisher, q{SELECT idem_claim('short')}),
	'25006', 'and the publisher stays read-only');

#
# after the cutover: what the old server has begun goes on here
#

my $s = session($subscriber, user => 'app');

is( $s->query(
		qq{SELECT status, result FROM idem_claim('taken over');
		SELECT status FROM idem_claim('taken over with lease', wait => '0');
		SELECT status FROM idem_claim('short');
		SELECT status, result FROM idem_claim('small');
		SELECT status, length(result::text) FROM idem_claim('large');
		SELECT status, length(result::text) FROM idem_claim('large 2');
		SELECT idem_finish('leased', '1', token => $token);
		SELECT length(checkpoint::text) FROM idem_get('checkpoint');
		SELECT idem_finish('checkpoint', '1', token => $lease_token);
		SELECT idem_complete($large_job, $large_token);
		SELECT outcome, length(result::text)
		  FROM idem_enqueue('kept', '1', 'kept', dedup => 'until_expired', key_ttl => '1 day')}),
	join("\n", 'finished|"life 2"', 'busy', 'finished', 'finished|"small"',
		'finished|20002', 'finished|20002', 't', '20002', 't', 't', 'done|20002'),
	'K2, K3, L3, J5, J11: keys, leases and jobs of the publisher');
is(sqlstate($subscriber, q{SELECT idem_claim('of late')}, user => 'app'),
	'42501', 'a key belongs to the role of the same name');

# W1: and cleanup goes on by itself
add_expired($subscriber, 3);
ok( $subscriber->poll_query_until(
		'postgres', 'SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now()'),
	'W1: the worker cleans up');
phase_ok('idle', 'W1: and skips nothing');
$s->quit;
amcheck_ok($subscriber, 'after the cutover', 'idem.keys', 'idem.jobs',
	'idem.job_keys', 'idem.job_log');

$_->stop foreach $subscriber, $publisher;
log_ok($_) foreach $publisher, $subscriber;
done_testing();
