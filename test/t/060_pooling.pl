# A client that pools connections per transaction: idem keeps no session state.
#
# Two backends serve several logical clients; every transaction goes to the next
# backend.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('pooling');
my @backends = map { session($node) } 1 .. 2;
my $turn = 0;

# runs one transaction on the next backend of the pool
sub transaction
{
	my ($sql, $end) = @_;
	my $backend = $backends[ $turn++ % @backends ];
	my $out = $backend->query("BEGIN; $sql; " . ($end // 'COMMIT'));

	$backend->query('DISCARD ALL');
	return $out;
}

my @clients = qw(alpha beta gamma);
my $keys = 20;
my (@claimed, @replayed, @rolled_back);

# An odd number of clients over two backends: each client changes its backend
# with every transaction.  All use the same keys, each in its own scope.
foreach my $n (1 .. $keys)
{
	foreach my $client (@clients)
	{
		push @rolled_back,
		  transaction(
			qq{SET LOCAL idem.scope = '$client';
			   SELECT status FROM idem_claim('key $n')}, 'ROLLBACK');
	}
	foreach my $client (@clients)
	{
		push @claimed,
		  transaction(
			qq{SET LOCAL idem.scope = '$client';
			   SELECT status FROM idem_claim('key $n', request => '$n');
			   DO \$\$ BEGIN
			       PERFORM idem_finish('key $n', to_jsonb('$client $n'::text));
			   END \$\$});
	}
	foreach my $client (@clients)
	{
		push @replayed,
		  transaction(
			qq{SET LOCAL idem.scope = '$client';
			   SELECT status || ' ' || (result #>> '{}')
				 FROM idem_claim('key $n', request => '$n')});
	}
}

is_deeply(
	\@rolled_back,
	[ ('claimed') x ($keys * @clients) ],
	'K1: each client gets each key of its scope, and gives it back');
is_deeply(
	\@claimed,
	[ ('claimed') x ($keys * @clients) ],
	'K1: each client claims each key of its scope again');
is_deeply(
	\@replayed,
	[
		map
		{
			my $n = $_;
			map { "finished $_ $n" } @clients
		} 1 .. $keys
	],
	'K2: each client gets its own results, from either backend');
is(transaction(q{SELECT status FROM idem_claim('key 1')}, 'ROLLBACK'),
	'claimed', 'SET LOCAL idem.scope has left nothing behind on one backend');
is(transaction(q{SELECT status FROM idem_claim('key 1')}, 'ROLLBACK'),
	'claimed', 'nor on the other');

#
# claim here, finish elsewhere
#

foreach my $what ([ 0, 0, 'the same backend' ], [ 0, 1, 'another backend' ])
{
	my ($first, $second, $name) = @$what;
	my $key = "finish later on $name";

	$backends[$first]->query("BEGIN; SELECT idem_claim('$key'); COMMIT");
	is( $backends[$second]
		  ->sqlstate("BEGIN; SELECT idem_finish('$key', '1')"),
		'ID002',
		"K11: a later transaction on $name cannot finish the claim");
	$backends[$second]->query('ROLLBACK');
	is( $backends[$second]->sqlstate("BEGIN; SELECT idem_release('$key')"),
		'ID002', "K11: nor release it on $name");
	$backends[$second]->query('ROLLBACK');
	is(claim_status($node, "'$key'"),
		'finished|', "K2: the claim stays final ($name)");
}

# a claim that is open on one backend, seen from the other backend
$backends[0]->query(q{BEGIN; SELECT idem_claim('open')});
is( $backends[1]->sqlstate(q{BEGIN; SELECT idem_finish('open')}),
	'ID002', 'K11: a claim that is open elsewhere cannot be finished here');
$backends[1]->query('ROLLBACK');
is( $backends[1]->query(q{SELECT status FROM idem_claim('open', wait => '0')}),
	'busy', 'K5: it is busy here');
$backends[0]->query('ROLLBACK');
is( $backends[1]->query(q{SELECT status FROM idem_claim('open', wait => '0')}),
	'claimed', 'K1: and free as soon as it is rolled back there');

# a rolled back claim is not remembered by its backend, neither after DISCARD
# ALL nor without it
foreach my $discard ('', 'DISCARD ALL')
{
	$backends[0]->query(q{BEGIN; SELECT idem_claim('rolled back'); ROLLBACK});
	$backends[0]->query($discard) if $discard;
	is( $backends[0]->sqlstate(q{BEGIN; SELECT idem_finish('rolled back')}),
		'ID002',
		'K11: a rolled back claim is forgotten' . ($discard && ' (discard)'));
	$backends[0]->query('ROLLBACK');
}

# prepared statements keep working through DISCARD PLANS and changes of the
# settings that they depend on
$backends[0]->query(
	q{PREPARE claim AS SELECT status FROM idem_claim($1, scope => $2)});
is( $backends[0]->query(
		q{EXECUTE claim('prepared', 'a');
		  DISCARD PLANS;
		  EXECUTE claim('prepared', 'a');
		  EXECUTE claim('prepared', 'b')}),
	"claimed\nfinished\nclaimed",
	'K3: prepared statements work after DISCARD PLANS');

#
# an open transaction with many claims holds no lock and no memory per key
#

my $holdings = q{
	SELECT count(*), count(*) FILTER (WHERE locktype IN
		('advisory', 'tuple', 'spectoken', 'object', 'userlock'))
	  FROM pg_locks WHERE pid = };
my $memory = 'SELECT sum(total_bytes) FROM pg_backend_memory_contexts';
my $claims = q{
	SELECT count(*) FROM generate_series(%d, %d) AS i, idem_claim('lock ' || i)
	 WHERE claimed};

$backends[0]->query('BEGIN');
$backends[0]->query($memory);
$backends[0]->query(sprintf $claims, 1, 1);
my $few = $backends[1]->query($holdings . $backends[0]{pid});
$backends[0]->query(sprintf $claims, 2, 1000);
my $memory_before = $backends[0]->query($memory);
is($backends[0]->query(sprintf $claims, 1001, 10000),
	'9000', 'K1: 10,000 claims in an open transaction');
is($backends[1]->query($holdings . $backends[0]{pid}),
	$few, 'K1: 10,000 claims hold the same locks as one');
like($few, qr/\|0$/, 'K1: and none of them stands for a key');
cmp_ok($backends[0]->query($memory) - $memory_before,
	'<', 9000 * 16, 'K1: nor do they keep memory per key');
$backends[0]->query('COMMIT');

$_->quit foreach @backends;
$node->stop;
log_ok($node);
done_testing();
