# M8: half of the slots of a shard move to a new, empty server by logical replication with row
# filters, under load.  A ledger over both servers: nothing is lost, nothing runs twice (K1, K3, L1,
# J2, J11), tokens stay valid, and job numbers do not collide (M6).  The steps are those of the
# manual.

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

my $conf = q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
wal_retrieve_retry_interval = 100ms
max_connections = 40
};
my $source = new_node('source', init => { allows_streaming => 'logical' }, conf => $conf);
my $target = new_node('target', install => $ENV{IDEM_SUBSCRIBER}, conf => $conf);
my $half = '{[512,1024)}';

sub on_source { return run($_[0]) }
sub on_target { return run($_[0], node => $target) }

$_->safe_psql('postgres', 'CREATE ROLE app LOGIN;' . IdemCutover::tables()) foreach $source, $target;

# A job from before the map: its number has no slot, but looks like one of the half.
on_source(q{SELECT setval('idem.jobs_job_id_seq', 599)});
my $old_job = on_source(q{SELECT job_id FROM idem_enqueue('old')});

is($old_job, '600', 'a job from before the map');
on_source(q{SELECT idem_shard_set('{[0,1024)}', number => 0)});
on_target(q{SELECT idem_shard_set('{}', number => 1)});
on_source(q{SELECT idem_queue_set('kept', keep => '1 day')});

# Leases and jobs in flight, and a job that is done, in both halves.
my @names = split /\n/, on_source(
	q{(SELECT i FROM generate_series(1, 100) AS i WHERE idem_slot('flight ' || i) < 512 LIMIT 3)
	UNION ALL (SELECT i FROM generate_series(1, 100) AS i WHERE idem_slot('flight ' || i) >= 512 LIMIT 3)});
my %flight;

foreach my $key (map { "flight $_" } @names)
{
	my $token = on_source("SELECT token FROM idem_lease('$key', '1 hour')");

	on_source("SELECT idem_enqueue('kept', '1', key => '$key', dedup => 'until_expired', key_ttl => '1 day')");
	$flight{$key} = [ $token, split /\|/, on_source(q{SELECT job_id, token FROM idem_fetch('kept', lease => '1 hour')}) ];
}
my ($done_low, $done_high) = map { "flight $_" } @names[ 0, 3 ];

on_source("SELECT idem_complete($flight{$_}[1], $flight{$_}[2], '\"done\"')") foreach $done_low, $done_high;

# A filter by a column that is not in the primary key stops the workers of the source.
on_source(q{CREATE PUBLICATION wrong FOR TABLE idem.jobs WHERE ((key_hash & 1023) >= 512)});
on_source(q{SELECT idem_enqueue('wrong', key => 'k')});
is(sqlstate($source, q{SELECT idem_fetch('wrong')}), '42P10', 'a filter on idem.jobs by key_hash');
is(doctor('publication'), 'fail', 'H1: the doctor reports it');
on_source('DROP PUBLICATION wrong; DELETE FROM idem.jobs WHERE queue = \'wrong\'');

#
# the split
#

my $load = IdemCutover->new(servers => [ $source, $target ], split => 1);

$load->start;

# 1. publish the half, without idem.shard; numbers below jobs_from carry no slot
my $jobs_from = on_source('SELECT jobs_from FROM idem.shard');
my $filter = "(job_id >= $jobs_from AND (job_id & 1023) >= 512)";

cmp_ok(on_target('SELECT jobs_from FROM idem.shard'), '<=', $jobs_from, 'the target takes all numbers with slots');
on_source(
	qq{CREATE PUBLICATION half FOR TABLE
		idem.keys WHERE ((key_hash & 1023) >= 512),
		idem.jobs WHERE $filter, idem.job_keys WHERE $filter, idem.job_log WHERE $filter,
		idem.queues, changes WHERE (slot >= 512)});
is(doctor('publication'), 'ok', 'H1: these filters work');
on_target(sprintf q{CREATE SUBSCRIPTION sub CONNECTION '%s' PUBLICATION half}, $source->connstr . ' dbname=postgres');
$target->wait_for_subscription_sync($source, 'sub');
is(sqlstate($target, qq{SELECT idem_claim('$done_high')}), '25006', 'K13: the target does not write yet');

# 2. the source gives up the half
my ($source_id, $target_id) = (on_source('SELECT idem_shard_id()'), on_target('SELECT idem_shard_id()'));
my $above = on_source("SELECT idem_shard_give('$half', '$target_id')");

is(sqlstate($source, qq{SELECT idem_claim('$done_high')}), 'ID006', 'M8: the source refuses the half');

# 3. the target receives the rest
on_source(q{SELECT pg_logical_emit_message(true, 'split', '')});
my $lsn = on_source('SELECT pg_current_wal_flush_lsn()');
$source->poll_query_until('postgres',
	"SELECT confirmed_flush_lsn >= '$lsn' FROM pg_replication_slots WHERE slot_name = 'sub'")
  or die 'the target does not catch up';

# rows that have not expired
my $rows = qq{
	SELECT 'key', k::text FROM idem.keys AS k WHERE (key_hash & 1023) >= 512 AND expires_at > now()
	UNION ALL SELECT 'job', j::text FROM idem.jobs AS j WHERE $filter
	UNION ALL SELECT 'job key', x::text FROM idem.job_keys AS x WHERE $filter
	UNION ALL SELECT 'log', l::text FROM idem.job_log AS l WHERE $filter
	UNION ALL SELECT 'queue', q::text FROM idem.queues AS q
	UNION ALL SELECT 'change', c::text FROM changes AS c WHERE slot >= 512
	ORDER BY 1, 2};
ok(on_source($rows) eq on_target($rows), 'the target has the rows of the half');
is(on_target(qq{SELECT count(*) FROM idem.jobs WHERE job_id < $jobs_from}), '0', 'M6: and no job without a slot');

# 4. the subscription ends, and the target takes the half
on_target('DROP SUBSCRIPTION sub');
is(sqlstate($target, qq{SELECT idem_claim('$done_high')}), 'ID006', 'M8: nobody has the half now');
on_target("SELECT idem_shard_take('$half', $above, '$source_id')");
$load->finish;
$load->ledger_ok;

# in flight: each token is valid where the slot is
foreach my $key (sort keys %flight)
{
	my ($token, $job, $job_token) = @{ $flight{$key} };
	my ($here, $there) = $job % 1024 < 512 ? ($source, $target) : ($target, $source);

	is(sqlstate($there, "SELECT idem_finish('$key', token => $token)"), 'ID006', "M2: $key: refused by the other shard");
	is(run("SELECT idem_finish('$key', token => $token)", node => $here), 't', "L3: $key is finished where its slot is");
	is( run("SELECT idem_complete($job, $job_token, '\"done\"')", node => $here),
		't', "J11: the job of $key is completed")
	  if $key ne $done_low && $key ne $done_high;
	is( run("SELECT outcome, result FROM idem_enqueue('kept', key => '$key', dedup => 'until_expired', key_ttl => '1 day')",
			node => $here),
		'done|"done"', "J5: the job of $key is known to be done");
}

# 5. the rows that are left behind go; idem_move sees in the maps that the slots have arrived
my $left = qq{
	SELECT (SELECT count(*) FROM idem.keys WHERE (key_hash & 1023) >= 512), (SELECT count(*) FROM idem.jobs WHERE $filter),
		   (SELECT count(*) FROM idem.job_keys WHERE $filter), (SELECT count(*) FROM changes WHERE slot >= 512)};
my $kept = on_target('SELECT count(*) FROM idem.keys WHERE key NOT LIKE \'life %\'');

is(doctor('shard map'), 'warn', 'H1: the doctor sees that rows are left behind');
on_source('DROP PUBLICATION half');
my $printed = '';
IPC::Run::run(
	[
		$source->config_data('--bindir') . '/idem_move',
		'--from' => $source->connstr('postgres'), '--to' => $target->connstr('postgres'),
		'--slots' => $half, '--table' => 'public.changes:slot', '--no-standby-wait'
	],
	'>&', \$printed);
is($? >> 8, 0, 'idem_move purges the source');
note $printed;
is(on_source($left), '0|0|0|0', 'nothing is left behind');
is(on_target('SELECT count(*) FROM idem.keys WHERE key NOT LIKE \'life %\''), $kept, 'the target has all rows');
is(join(' ', map { doctor($_, node => $source), doctor($_, node => $target) } 'shard map', 'foreign rows', 'job numbers'),
	'ok ok ok ok ok ok', 'H1: nothing is wrong with the maps');
is(join(' / ', map { run("SELECT slots, COALESCE(given, '{}') FROM idem.shard", node => $_) } $source, $target),
	'{[0,512)}|{} / {[512,1024)}|{}', 'M8: each shard has its half');
is(on_source(q{SELECT job_id FROM idem_fetch('old')}), $old_job, 'the job from before the map is on the source');

$_->stop foreach $target, $source;
log_ok($_) foreach $source, $target;
done_testing();
