# A row keeps its xmin when it is frozen, and that transaction id is used again after a wraparound.
# K2, K6, K11: such a row is not held by the transaction that has this id now.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('frozen');
$node->init;
$node->append_conf('postgresql.conf', 'autovacuum = off');
$node->start;
$node->safe_psql('postgres', 'CREATE EXTENSION idem');

# the epoch is left out of xmin
my $xid = $node->safe_psql('postgres', q{
	BEGIN;
	SELECT FROM idem_claim('k');
	SELECT pg_current_xact_id()::xid;
	COMMIT;});
is($node->safe_psql('postgres', q{SELECT xmin FROM idem.keys WHERE key = 'k'}),
	$xid, 'the row has the xid of its claim');

$node->command_ok([ 'vacuumdb', '--all', '--freeze', '--quiet' ], 'freeze everything');
$node->stop;
command_ok(
	[ 'pg_resetwal', '-e', '5', '-x', $xid, '-D', $node->data_dir ],
	'turn the counter once around, to the same xid');
$node->start;

my ($ret, $stdout, $stderr) = $node->psql('postgres', q{
	\set VERBOSITY sqlstate
	BEGIN;
	SELECT pg_current_xact_id()::xid = xmin FROM idem.keys WHERE key = 'k';
	SELECT claimed, status FROM idem_claim('k');
	SELECT status FROM idem_get('k');
	SELECT idem_finish('k', '"not mine"');});
is($stdout, "t\nf|finished\nfinished", 'K6: a frozen row is not held, though its xmin is that of this transaction');
like($stderr, qr/ID002/, 'K11: and cannot be finished');
is($node->safe_psql('postgres', q{SELECT result IS NULL FROM idem_get('k')}),
	't', 'K2: its result has not changed');

$node->stop;
unlike(slurp_file($node->logfile), qr/PANIC|TRAP|was terminated by signal/, 'nothing crashed');
done_testing();
