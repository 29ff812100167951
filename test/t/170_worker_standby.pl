# W6: a standby that preloads the library has no launcher and no worker, and
# everything that reads works there; both appear with the promotion.
#
# Bugs of other projects (doc/peers.md section 4) that this test looks for:
#   citus#3144   the daemon writes on the standby and restarts forever

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# debug1: the postmaster logs which process it starts
my $primary = new_node(
	'primary',
	init => { allows_streaming => 1 },
	conf => q{
shared_preload_libraries = 'idem'
log_min_messages = debug1
idem.cleanup_naptime = 1
});
my $standby = PostgreSQL::Test::Cluster->new('standby');

my $started = qr/starting background worker process "idem/;
my $expired = q{SELECT count(*) FROM idem.keys WHERE expires_at < now()};

# In the log of the standby: what is wrong, but for what the test itself brings
# about: the primary ends, the standby is stopped, a claim is refused.
sub bad_lines
{
	my ($offset) = @_;

	return join "\n",
	  grep { / (?:WARNING|ERROR|FATAL|PANIC):  / }
	  grep { !/ to (?:the )?primary|walreceiver|idem_claim/ }
	  split /\n/, slurp_file($standby->logfile, $offset);
}

$primary->safe_psql(
	'postgres', q{
	SELECT idem_claim('live');
	CREATE ROLE monitor LOGIN;
	GRANT pg_monitor TO monitor;
	CREATE DATABASE other});
$primary->safe_psql('other', 'CREATE EXTENSION idem');
$primary->backup('backup');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

# What expires on the primary is removed there, and so on the standby.
add_expired($primary, 1000, db => $_) foreach 'postgres', 'other';
$primary->safe_psql('postgres', 'SELECT pg_reload_conf()');
foreach my $db ('postgres', 'other')
{
	$primary->poll_query_until($db, "SELECT ($expired) = 0")
	  or die "$db is not cleaned up";
}
$primary->wait_for_catchup($standby);
is( join(' ', map { $standby->safe_psql($_, $expired) } 'postgres', 'other'),
	'0 0',
	'what the primary removes is gone on the standby');

#
# no worker: not when it starts, not by a reload, not in a restart
#

# from here on the primary leaves them alone
$primary->safe_psql('postgres', 'ALTER SYSTEM SET idem.cleanup = off');
$primary->safe_psql('postgres', 'SELECT pg_reload_conf()');
$primary->poll_query_until('postgres',
	q{SELECT count(*) = 2 FROM idem.cleanup_progress WHERE phase = 'off' AND datname IN ('postgres', 'other')}
) or die 'cleanup goes on';
add_expired($primary, 1000, db => $_) foreach 'postgres', 'other';

foreach my $round (1 .. 3)
{
	$primary->wait_for_catchup($standby);
	$standby->safe_psql('postgres', 'SELECT pg_reload_conf()') foreach 1 .. 10;
	$standby->restart if $round == 2;
	is( $standby->safe_psql(
			'postgres',
			q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'}),
		'0',
		"W6: no launcher and no worker on a standby, $round");
}

is($standby->safe_psql('postgres', $expired),
	'1000', 'W6: nothing is removed on the standby');

#
# what reads works
#

is( $standby->safe_psql(
		'postgres', q{
		SELECT preloaded, state, launcher_pid, runs, worker_pid FROM idem.worker_status}),
	't|stopped||0|',
	'W6: idem.worker_status on a standby');
is(doctor('role', node => $standby, columns => 'status, detail, fix'),
	'ok|standby: reads only, the background worker starts with the promotion|',
	'H1: idem_doctor() says that this is a standby');
is(doctor('worker', node => $standby, columns => 'status, detail, fix'),
	'ok|none on a standby|', 'H1: and that a worker is not missed there');
is(doctor('last cleanup', node => $standby, columns => 'status, detail, fix'),
	'ok|the primary cleans up|', 'H1: nor its cleanup');
is( $standby->safe_psql(
		'postgres',
		q{SELECT string_agg("check", ', ') FROM idem_doctor() WHERE status = 'fail'}),
	'',
	'H1: nothing is wrong there');

# as a monitoring role, in both databases
foreach my $db ('postgres', 'other')
{
	is( sqlstate(
			$standby, q{
			SELECT * FROM idem.stats;
			SELECT * FROM idem.queue_stats;
			SELECT * FROM idem.cleanup_progress;
			SELECT * FROM idem.worker_status;
			SELECT * FROM idem.health;
			SELECT * FROM idem_doctor()},
			db => $db,
			user => 'monitor'),
		'00000',
		"W6: a member of pg_monitor reads all views on the standby: $db");
}
is( $standby->safe_psql(
		'postgres', q{SELECT count(*) FROM idem.stats WHERE datname = 'postgres'}),
	'1',
	'W6: the database has its row in idem.stats');

# as without the worker
{
	my $refused = sqlstate($standby, q{SELECT idem_claim('live')});
	my $get = $standby->safe_psql('postgres',
		q{SELECT status FROM idem_get('live')});

	is("$refused $get", '25006 finished',
		'W6: reads work, writes are refused as ever');
}

unlike(slurp_file($standby->logfile),
	$started, 'W6, citus#3144: nothing of ours was started on the standby');
is(bad_lines(0), '', 'W6, citus#3144: and nothing went wrong there');

#
# the promotion
#

my $offset = -s $standby->logfile;

$primary->stop;
$standby->promote;
ok( $standby->poll_query_until(
		'postgres',
		q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idem launcher'}
	),
	'W6: the launcher comes with the promotion');
foreach my $db ('postgres', 'other')
{
	$standby->poll_query_until($db, "SELECT ($expired) = 0")
	  or die "$db is not cleaned up";
}
is( $standby->safe_psql('postgres', 'SELECT key FROM idem.keys'),
	'live', 'W6: and cleans up');
like(doctor('role', node => $standby, columns => 'status, detail, fix'), qr/^ok\|primary\|/,
	'H1: idem_doctor() says that this is a primary');
like(
	doctor('worker', node => $standby, columns => 'status, detail, fix'),
	qr/^ok\|process \d+, /,
	'H1: and that the worker is alive');
is(bad_lines($offset), '', 'W6: nothing went wrong in the promotion');

$standby->stop;

my %started = never_two_ok($standby);

is($started{launcher}, 1, 'W6: there was one launcher, after the promotion');
never_two_ok($primary);
log_ok($_) foreach $primary, $standby;
done_testing();
