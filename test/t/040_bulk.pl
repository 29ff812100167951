# 200,000 keys in one transaction with default settings, and their replay.
#
# A claim takes no entry in the lock table, so max_locks_per_transaction stays
# at its default; the same number of advisory locks would exhaust it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $keys = 200_000;

# A quiet server: nothing writes WAL but the test.
my $node = new_node('bulk', conf => qq{
autovacuum = off
checkpoint_timeout = 1h
max_wal_size = 4GB
});

is( $node->safe_psql(
		'postgres', q{
		SELECT setting = boot_val FROM pg_settings
		 WHERE name = 'max_locks_per_transaction'}),
	't',
	'max_locks_per_transaction has its default');

my $s = session($node);
my $locks = 'SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()';

# claims or finishes n keys that begin with the prefix, each by a call
sub claim_each
{
	my ($prefix, $n) = @_;

	return $s->query(
		qq{SELECT status, claimed, count(*)
			 FROM generate_series(1, $n) AS i, idem_claim('$prefix' || i)
			GROUP BY 1, 2});
}

sub finish_each
{
	my ($prefix, $n) = @_;

	return $s->query(
		qq{SELECT count(*)
			 FROM (SELECT idem_finish('$prefix' || i, to_jsonb(i))
					 FROM generate_series(1, $n) AS i OFFSET 0) AS f});
}

# rows of the prefix, those with the right result, and keys among them
sub stored
{
	my ($prefix) = @_;

	return $node->safe_psql(
		'postgres', qq{
		SELECT count(*),
			   count(*) FILTER (WHERE key = '$prefix' || (result #>> '{}')
								  AND finished_at IS NOT NULL),
			   count(DISTINCT key)
		  FROM idem.keys WHERE key ~ '^$prefix\[0-9]'});
}

#
# one call per key
#

# the first call of a session also reads the map of slots
claim_each('first ', 1);
$s->query('BEGIN');
claim_each('warm ', 1);
my $locks_of_one = $s->query($locks);
is(claim_each('each ', $keys),
	"claimed|t|$keys", "K3: $keys keys are claimed in one transaction");
is($s->query($locks), $locks_of_one,
	"$keys claims hold as many locks as one");
is(finish_each('each ', $keys), $keys, "K2: and all are finished");
$s->query('COMMIT');
is(stored('each '), "$keys|$keys|$keys",
	'K2: commit has recorded every key once, with its result');

#
# one call for all, rolled back first
#

my $array = "ARRAY(SELECT 'many ' || i FROM generate_series(1, $keys) AS i)";
my $claim_many = qq{
	SELECT count(*), count(*) FILTER (WHERE claimed AND status = 'claimed'),
		   count(*) FILTER (WHERE key = 'many ' || ord), min(ord), max(ord)
	  FROM idem_claim_many($array)};

$s->query('BEGIN');
is( $s->query($claim_many),
	"$keys|$keys|$keys|1|$keys",
	"K3: $keys keys are claimed in one call");
$s->query('ROLLBACK');
is(stored('many '), '0|0|0', 'K1: rollback has released every key');

$s->query('BEGIN');
is( $s->query($claim_many),
	"$keys|$keys|$keys|1|$keys",
	"K1: $keys released keys are claimable");
is($s->query($locks), $locks_of_one,
	"a call for $keys keys holds as many locks as a call for one");
$s->query(
	qq{SELECT idem_finish_many($array,
		ARRAY(SELECT to_jsonb(i) FROM generate_series(1, $keys) AS i))});
$s->query('COMMIT');
is(stored('many '), "$keys|$keys|$keys",
	'K2: idem_finish_many has stored every result under its key');

#
# replay: no transaction id, no WAL, no change of any row
#
# After VACUUM and CHECKPOINT a reader has nothing to write (hint bits, pruned
# pages).  A first replay fills the caches of the session and sets the hint bits
# of the catalogs.
#

my $wal = 'SELECT pg_current_wal_insert_lsn()';
my $replay_each = qq{
	SELECT count(*) FILTER (WHERE NOT claimed AND status = 'finished'
							  AND result = to_jsonb(i))
	  FROM generate_series(1, $keys) AS i, idem_claim('each ' || i)};
my $replay_many = qq{
	SELECT count(*) FILTER (WHERE NOT claimed AND status = 'finished'
							  AND result = to_jsonb(ord))
	  FROM idem_claim_many($array)};
my $rows = q{
	SELECT count(*), count(*) FILTER (WHERE xmax <> '0'),
		   min(xmin::text), max(xmin::text), pg_relation_size('idem.keys'),
		   pg_relation_size('idem.keys_pkey')
	  FROM idem.keys};

$s->query('VACUUM');
$s->query($replay_each);
$s->query($replay_many);
$s->query('CHECKPOINT');

my $rows_before = $s->query($rows);
my $xid_before =
  $s->query('SELECT pg_snapshot_xmax(pg_current_snapshot())');

foreach my $replay ([ 'idem_claim', $replay_each ],
	[ 'idem_claim_many', $replay_many ])
{
	my ($function, $sql) = @$replay;
	my $wal_before = $s->query($wal);

	$s->query('BEGIN');
	is($s->query($sql), $keys, "K2: $function replays $keys keys");
	is($s->query('SELECT pg_current_xact_id_if_assigned() IS NULL'),
		't', "K8: the replay by $function has no transaction id");
	$s->query('COMMIT');
	is( $s->query("SELECT pg_current_wal_insert_lsn() - '$wal_before'"),
		'0', "K8: the replay by $function has written no WAL");
}
is($s->query('SELECT pg_snapshot_xmax(pg_current_snapshot())'),
	$xid_before, 'K8: the replays have used up no transaction id');
is($s->query($rows), $rows_before,
	'K8: the replays have left the table as it was');

$s->quit;
$node->stop;
log_ok($node);
done_testing();
