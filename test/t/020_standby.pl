# Hot standby, promotion, and read-only transactions on the primary.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = new_node('primary', init => { allows_streaming => 1 });

$primary->safe_psql(
	'postgres', q{
	CREATE FUNCTION handler(payload jsonb) RETURNS jsonb
	LANGUAGE sql AS 'SELECT payload';
	CREATE ROLE app;
	SELECT idem_claim('finished before the backup', request => '1'),
		   idem_finish('finished before the backup', '"before"');
});

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

$primary->safe_psql(
	'postgres', q{
	BEGIN;
	SELECT idem_claim('finished', request => '1');
	SELECT idem_finish('finished', '"streamed"');
	COMMIT;
	SELECT idem_claim('short', ttl => '1 hour');
	SELECT idem_lease('leased', '1 hour', worker => 'w 1');
	SET idem.clock_offset = -100000;
	SELECT idem_claim('expired', ttl => '1 s');
});

# A claim that stays open, and one that is prepared.  The commit after them
# carries their rows to the standby.
my $open = session($primary);
$open->query(
	q{BEGIN; SELECT idem_claim('open'); SELECT idem_finish('open', '"lost"');
	SELECT idem_claim('expired')});
$primary->safe_psql(
	'postgres', q{
	BEGIN;
	SELECT idem_claim('prepared');
	SELECT idem_finish('prepared', '"prepared"');
	PREPARE TRANSACTION 'prepared';
	SELECT idem_claim('last');
});
$primary->wait_for_catchup($standby);

#
# every function that writes, for existing and for new keys
#

my $token =
  $primary->safe_psql('postgres', q{SELECT token FROM idem_get('leased')});
my @writers = (
	q{idem_claim('new')},
	q{idem_claim('finished')},
	q{idem_claim('finished', wait => '0')},
	q{idem_claim('expired')},
	q{idem_finish('finished', '"streamed"')},
	q{idem_release('finished')},
	q{idem_forget('finished')},
	q{idem_forget('absent')},
	q{idem_cleanup()},
	q{idem_call('new', 'handler', '1')},
	q{idem_verify('handler', '1')},
	q{idem_reset()},
	q{idem_call('finished', 'handler', '1')},
	q{idem_claim_many('{new, finished}')},
	q{idem_finish_many('{finished}')},
	q{idem_lease('new', '1 min')},
	q{idem_lease('finished', '1 min')},
	q{idem_lease('leased', '1 min', worker => 'w 1')},
	qq{idem_finish('leased', token => $token)},
	qq{idem_release('leased', $token)},
	qq{idem_renew('leased', $token, '1 min')},
	qq{idem_checkpoint('leased', $token, '1')},
	qq{idem_fence('leased', $token)},
	q{idem_grant('app', 'app')},
	q{idem_revoke('app', 'app')});

foreach my $call (@writers)
{
	is(sqlstate($standby, "SELECT $call"),
		'25006', "K13: $call gives 25006 on a standby");
	is(sqlstate($primary, "BEGIN READ ONLY; SELECT $call"),
		'25006', "K13: $call gives 25006 in a read-only transaction");
}
is( sqlstate(
		$primary,
		q{SET default_transaction_read_only = on; SELECT idem_claim('new')}),
	'25006',
	'K13: 25006 with default_transaction_read_only');

my $count = 'SELECT count(*) FROM idem.keys';
is($standby->safe_psql('postgres', $count),
	'6', 'K13: none of them has left a row');

#
# reading
#

foreach my $where ([ $standby, '', 'on a standby' ],
	[ $primary, 'BEGIN READ ONLY; ', 'in a read-only transaction' ])
{
	my ($node, $begin, $what) = @$where;

	is( $node->safe_psql(
			'postgres', qq{$begin
			SELECT status, result FROM idem_get('finished');
			SELECT status, result FROM idem_get('finished before the backup');
			SELECT status, result IS NULL FROM idem_get('short');
			SELECT status, worker, attempt, token FROM idem_get('leased')}),
		qq{finished|"streamed"\nfinished|"before"\nfinished|t\nlive|w 1|1|$token},
		"K13: idem_get works $what");
	is( $node->safe_psql(
			'postgres', qq{$begin
			SELECT count(*) FROM idem_get('absent');
			SELECT count(*) FROM idem_get('open');
			SELECT count(*) FROM idem_get('prepared')}),
		"0\n0\n0",
		"K13: absent, open and prepared keys are not there $what");
	is( $node->safe_psql(
			'postgres', "$begin SELECT count(*) FROM idem_get('expired')"),
		'0',
		"K9: an expired key is absent $what");
	is( $node->safe_psql(
			'postgres', qq{
			SET idem.clock_offset = 3601; $begin
			SELECT count(*) FROM idem_get('short');
			SELECT count(*) FROM idem_get('finished');
			SELECT status FROM idem_get('leased');
			SELECT key, state FROM idem.lease_status}),
		"0\n1\nexpired\nleased|expired",
		"K9: a key expires by the clock $what");
	is( $node->safe_psql(
			'postgres', qq{$begin
			SELECT status, count(*) FROM idem.key_status
			 GROUP BY status ORDER BY status;
			SELECT status, keys FROM idem.key_summary ORDER BY status;
			SELECT key, worker, attempt, token, state FROM idem.lease_status}),
		join("\n",
			('expired|1', 'finished|4', 'live|1') x 2,
			"leased|w 1|1|$token|live"),
		"K13: the views work $what");
}
is( $standby->safe_psql(
		'postgres', q{
		BEGIN ISOLATION LEVEL REPEATABLE READ;
		SELECT status FROM idem_get('finished')}),
	'finished',
	'K13: idem_get works on a standby under REPEATABLE READ');

#
# promotion; the old primary dies with its open transaction
#

$primary->stop('immediate');
$open->lost;
$standby->promote;

is( claim_status($standby, q{'finished', request => '1'}),
	'finished|"streamed"', 'K2: a finished key is replayed after promotion');
is( claim_status($standby, q{'finished before the backup'}),
	'finished|"before"', 'K2: also one of the base backup');
is(sqlstate($standby, q{SELECT idem_claim('finished', request => '2')}),
	'ID001', 'K7: its request is known');
is(claim_status($standby, q{'short'}),
	'finished|', 'K2: a key without result is final after promotion');
is(claim_status($standby, q{'open', wait => '0'}),
	'claimed|', 'K1: a claim that was open at promotion is claimable');
is(claim_status($standby, q{'expired', wait => '0'}),
	'claimed|', 'K1: an expired key whose takeover was open is claimable');
is(claim_status($standby, q{'expired'}),
	'finished|', 'K2: and that takeover is final');
is(claim_status($standby, q{'prepared', wait => '0'}),
	'busy|', 'K1: a prepared claim is still held after promotion');
$standby->safe_psql('postgres', q{COMMIT PREPARED 'prepared'});
is( claim_status($standby, q{'prepared'}),
	'finished|"prepared"', 'K2: and ends with COMMIT PREPARED');

is( $standby->safe_psql(
		'postgres', qq{
		SELECT status, token FROM idem_lease('leased', '1 min', worker => 'w 1');
		SELECT status, token FROM idem_lease('leased', '1 min', worker => 'w 2');
		SELECT idem_finish('leased', '"done"', token => $token);
		SELECT status, result FROM idem_lease('leased', '1 min')}),
	qq{resumed|$token\nbusy|\nt\nfinished|"done"},
	'L1, L3: a lease goes on after promotion');

is( $standby->safe_psql(
		'postgres', q{
		BEGIN;
		SELECT status FROM idem_claim('new');
		SELECT idem_finish('new', '"new"');
		COMMIT;
		SELECT status, result FROM idem_claim('new');
		SELECT status, result, replayed FROM idem_call('called', 'handler', '1');
		SELECT idem_forget('new')}),
	qq{claimed\nt\nfinished|"new"\nfinished|1|f\nt},
	'K1: new keys work after promotion');

amcheck_ok($standby, 'after promotion');
$standby->stop;
log_ok($_) foreach $primary, $standby;
done_testing();
