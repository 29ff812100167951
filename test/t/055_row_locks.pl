# Rows of idem.keys that another transaction has locked or is removing.
#
# Only the owner of the table can lock rows by hand, and should not do it.  Such a
# lock must not do more harm than a row lock in any other table.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('row_locks');
my ($locker, $claimer) = map { session($node) } 1 .. 2;

foreach my $strength ('UPDATE', 'NO KEY UPDATE', 'SHARE', 'KEY SHARE')
{
	my ($expired, $live) = ("expired $strength", "live $strength");
	my $claim = "SELECT status FROM idem_claim('$expired'";

	$node->safe_psql(
		'postgres', qq{
		SELECT idem_claim('$live');
		SET idem.clock_offset = -100000;
		SELECT idem_claim('$expired', ttl => '1 s')});
	$locker->query(
		qq{BEGIN;
		SELECT FROM idem.keys WHERE key IN ('$expired', '$live')
		FOR $strength});

	is( $claimer->query("SELECT status FROM idem_claim('$live')"),
		'finished', "K4: FOR $strength: no claim waits for a live row");
	is($claimer->query('SELECT idem_cleanup()'),
		'0', "K9: FOR $strength: cleanup skips a locked row");

	if ($strength eq 'KEY SHARE')
	{
		# a takeover does not change the key, so this lock does not block it
		is($claimer->query("$claim, wait => '0')"),
			'claimed', "K5: FOR $strength: the expired row is taken over");
		$locker->query('COMMIT');
	}
	else
	{
		is($claimer->query("$claim, wait => '0')"),
			'busy', "K5: FOR $strength: a locked expired row is busy at once");
		is($claimer->query("$claim, wait => '10 ms')"),
			'busy', "K5: FOR $strength: or after a while");
		is($claimer->sqlstate("SET lock_timeout = '10 ms'; $claim)"),
			'55P03', "K5: FOR $strength: lock_timeout ends the wait");
		$claimer->query('RESET lock_timeout');
		is( $claimer->query(
				'BEGIN; ' . "$claim, wait => '0'); SELECT 1; COMMIT"),
			"busy\n1",
			"K5: FOR $strength: busy leaves the transaction usable");

		$claimer->send("$claim)");
		wait_until_blocked($node, $claimer);
		$locker->query('COMMIT');
		is($claimer->receive, 'claimed',
			"K4: FOR $strength: the claimer waits and gets the key");
	}

	# the lock of the claiming transaction itself blocks no other transaction
	$node->safe_psql(
		'postgres', qq{
		SET idem.clock_offset = -100000;
		SELECT idem_claim('own $strength', ttl => '1 s')});
	is( $claimer->query(
			qq{BEGIN;
			SELECT key FROM idem.keys WHERE key = 'own $strength' FOR $strength;
			SELECT status FROM idem_claim('own $strength', wait => '0');
			SELECT idem_finish('own $strength', '1');
			COMMIT;
			SELECT status FROM idem_claim('own $strength')}),
		"own $strength\nclaimed\nt\nfinished",
		"K6: FOR $strength: a lock of one's own does not hinder a claim");
}

# two lockers at once
$node->safe_psql(
	'postgres', q{
	SET idem.clock_offset = -100000;
	SELECT idem_claim('shared', ttl => '1 s')});
my @lockers = map { session($node) } 1 .. 2;
$_->query(
	q{BEGIN; SELECT FROM idem.keys WHERE key = 'shared' FOR SHARE})
  foreach @lockers;
is( $claimer->query(q{SELECT status FROM idem_claim('shared', wait => '0')}),
	'busy', 'K5: an expired row with two lockers is busy');
$claimer->send(q{SELECT status FROM idem_claim('shared')});
wait_until_blocked($node, $claimer);
$_->query('ROLLBACK') foreach @lockers;
is($claimer->receive, 'claimed', 'K4: and claimed after the last of them');

# A transaction forgets a live key and claims it again.  Until it commits, the old
# row counts.  The new row comes before it in the index, because it uses the place
# of a row that VACUUM removed.
$node->safe_psql(
	'postgres', q{
	TRUNCATE idem.keys;
	SELECT idem_claim('place');
	SELECT idem_claim('forgotten');
	SELECT idem_forget('place');
	VACUUM idem.keys});
is( $locker->query(
		q{BEGIN;
		SELECT ctid FROM idem.keys WHERE key = 'forgotten';
		SELECT idem_forget('forgotten');
		SELECT status FROM idem_claim('forgotten');
		SELECT ctid FROM idem.keys WHERE key = 'forgotten'}),
	"(0,2)\nt\nclaimed\n(0,1)",
	'a key is forgotten and claimed again, before the old row');
is( $claimer->query(q{SELECT status FROM idem_claim('forgotten', wait => '0')}),
	'finished', 'K2: the committed row counts until it is gone');
$locker->query('ROLLBACK');

# cleanup and the key that its own transaction holds
is( $claimer->query(
		q{BEGIN;
		SELECT status FROM idem_claim('held', ttl => '1 s');
		SET LOCAL idem.clock_offset = 100;
		SELECT idem_cleanup();
		SELECT status FROM idem_claim('held');
		SELECT idem_finish('held', '1');
		SELECT idem_cleanup();
		COMMIT;
		SET idem.clock_offset = 100;
		SELECT count(*) FROM idem.keys WHERE key = 'held';
		SELECT idem_cleanup();
		SELECT count(*) FROM idem.keys WHERE key = 'held';
		RESET idem.clock_offset}),
	"claimed\n0\nheld\nt\n0\n1\n1\n0",
	'K9: cleanup leaves a key that its own transaction holds');

# a claim waits for a lock on the whole table, as any DML does
$locker->query('BEGIN; LOCK TABLE idem.keys IN SHARE MODE');
$claimer->send(q{SELECT status FROM idem_claim('table')});
wait_until_blocked($node, $claimer, 'relation');
is( $node->safe_psql('postgres', q{SELECT status FROM idem_get('forgotten')}),
	'finished', 'K13: idem_get does not wait for it');
$locker->query('COMMIT');
is($claimer->receive, 'claimed', 'K4: a lock on the table is waited for');

$_->quit foreach $locker, $claimer, @lockers;
amcheck_ok($node, 'after the locks');
$node->stop;
log_ok($node);
done_testing();
