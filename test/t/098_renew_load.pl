# One lease renewed from many connections at once: nobody takes over, so no
# token is stale (L3, L6).
#
# Each renewal moves the row and its index entries.  A look at the key that
# comes at that very moment finds neither the old row nor the new one, and has
# to look again before it says that there is none.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('renew');
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
	'L1: nobody gets a lease that is being renewed');
is($node->safe_psql('postgres', $same_lease),
	"$token|1|live", 'L1: it is still the same lease');

amcheck_ok($node, 'after the renewals');
$node->stop;
log_ok($node);
done_testing();
