# A short run of `make soak`: random actions of several clients, with a fixed seed and
# number, checked from a ledger.  See test/soak/README.md.
#
# IDEM_SOAK_ACTIONS: another number of actions.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $python = '/usr/bin/python3';

plan skip_all => "$python has no module psycopg2"
  if system("$python -c 'import psycopg2' 2>/dev/null") != 0;

my $node = new_node(
	'job_soak',
	conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
idem.drain_after = 20ms
max_connections = 60
deadlock_timeout = 100ms
restart_after_crash = on
});
my $log = PostgreSQL::Test::Utils::tempdir();
my @cmd = (
	$python, "$FindBin::RealBin/../soak/soak.py",
	'--seed' => 11,
	'--actions' => $ENV{IDEM_SOAK_ACTIONS} // 4000,
	'--clients' => 8,
	'--kills' => 5,
	'--crashes' => 1,
	'--log' => $log);
my ($out, $err) = ('', '');

{
	local $ENV{PGHOST} = $node->host;
	local $ENV{PGPORT} = $node->port;
	local $ENV{PGDATABASE} = 'postgres';
	local $ENV{PYTHONDONTWRITEBYTECODE} = 1;
	IPC::Run::run(\@cmd, '>', \$out, '2>', \$err);
}
my $status = $?;

note $out;
# libpq prints what the server says to a client that is just connecting when the server crashes
$err =~ s/^WARNING:  terminating connection because of crash .*\nDETAIL:  .*\nHINT:  .*\n//mg;
is($err, '', 'the load comes to its end');

# one test for each rule
while ($out =~ /^(ok|FAILED)  +(.*)$/mg)
{
	ok($1 eq 'ok', $2);
}
diag($out) if $status != 0;
is($status, 0, 'every rule holds');

my ($killed) = $out =~ /kill backend (\d+)/;

# what a REINDEX CONCURRENTLY left that was ended in the middle
$node->stop;
log_ok(
	$node,
	killed => $killed // 0,
	except => qr/WARNING:  cannot reindex invalid index/);
done_testing();
