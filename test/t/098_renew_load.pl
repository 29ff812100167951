# One lease renewed from many connections at once: no other session takes over, so
# no token is stale (L3, L6).
#
# Each renewal moves the row and its index entries.  A lookup of the key at that
# moment finds neither the old row nor the new one, and has to search again before
# it reports the key as absent.  A session that wants to insert the key must not
# block the others either: they would wait for each other.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('renew', conf => 'deadlock_timeout = 100ms');
my $token = $node->safe_psql('postgres',
	q{SELECT token FROM idem_lease('k', '1 h', worker => 'w')});

my $renew = "SELECT idem_renew('k', $token, '1 h');\n";
my $same_lease = q{SELECT token, attempt, status FROM idem_get('k')};

ok( pgbench_run(
		$node, [ '--client=8', '--jobs=2', '--transactions=4000' ],
		[ [ $renew, 1 ] ]),
	'L3: no token is stale in 32000 renewals by 8 clients');
is($node->safe_psql('postgres', $same_lease),
	"$token|1|live", 'L6: same token, same attempt');

# The same with an old snapshot, which keeps all versions of the row: a lookup of the key
# skips hundreds of dead entries, and the row is very likely to move meanwhile.
my $old = session($node);

$old->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
ok( pgbench_run(
		$node, [ '--client=8', '--jobs=2', '--transactions=150' ],
		[ [ $renew, 1 ] ]),
	'L3: no token is stale in 1200 renewals beside an old snapshot');
is($node->safe_psql('postgres', $same_lease),
	"$token|1|live", 'L6: same token, same attempt');
$old->quit;

# the same while others ask for the key
ok( pgbench_run(
		$node, [ '--client=8', '--jobs=2', '--transactions=2000' ],
		[
			[ $renew, 1 ],
			[
				"SELECT 1 / (status = 'busy')::int FROM idem_lease('k', '1 h', worker => 'x');\n",
				1
			]
		]),
	'L1: no other session gets a lease that is being renewed');
is($node->safe_psql('postgres', $same_lease),
	"$token|1|live", 'L1: it is still the same lease');

# a key that is taken over all the time, by transactions that hold another one
my $other = q{
	\set r random(1, 2000000000)
	BEGIN;
	SELECT status FROM idem_claim(:r::text || ':' || :client_id);
};

foreach my $claim (
	q{idem_lease('hot', '1 microsecond')},
	q{idem_claim('hot', ttl => '1 microsecond')})
{
	ok( pgbench_run(
			$node, [ '--client=8', '--jobs=2', '--transactions=1500' ],
			[ [ "$other SELECT status FROM $claim;\n COMMIT;\n", 1 ] ]),
		"K4: no deadlock over one key: $claim");
}

amcheck_ok($node, 'after the renewals');
$node->stop;
log_ok($node);
done_testing();
