# pgpool-II with load balancing, between a client and two servers.
#
# It sends reads to the replica and writes to the primary, and takes a SELECT with a volatile function
# for a write.  So by default calls of idem go where they have to.  That ends as soon as one of its
# lists of functions is set, and idem is not in it: then a claim reaches the replica.  It gets 25006,
# nothing happens, and the transaction is aborted on both servers.  Such a list, that of nextval and
# the like, was the default until 4.1.  doc/replicas.md says what to set.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my ($pgpool) = grep { -x } map { "$_/pgpool" } split(/:/, $ENV{PATH}), '/usr/sbin';

plan skip_all => 'there is no pgpool' unless defined $pgpool;
plan skip_all => 'needs Unix-domain sockets' unless $PostgreSQL::Test::Utils::use_unix_sockets;

# pgpool-II 4.3 does not know the message by which a server refuses a newer protocol.
local $ENV{PGMAXPROTOCOLVERSION} = '3.0';

my $primary = new_node('primary', init => { allows_streaming => 1 });

run(q{
	CREATE TABLE business (key text);
	CREATE FUNCTION handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT payload';
	CREATE FUNCTION said_to_be_stable(k text) RETURNS text LANGUAGE sql STABLE
	AS 'SELECT (idem_claim(k)).status'});
$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

my %name = ($primary->port => 'primary', $standby->port => 'replica');
my $where = q{current_setting('port')};

#
# pgpool
#

my $dir = PostgreSQL::Test::Utils::tempdir_short();
my $port = PostgreSQL::Test::Cluster::get_free_port();
my $connstr = "host=$dir port=$port dbname=postgres";
my $user = run('SELECT current_user');
my ($pool, $pool_log);

# All reads that may go to the replica go there: the primary has no weight.
sub start_pgpool
{
	my (%settings) = @_;
	my $number = 0;

	foreach my $node ($primary, $standby)
	{
		%settings = (
			"backend_hostname$number" => $node->host,
			"backend_port$number" => $node->port,
			"backend_data_directory$number" => $node->data_dir,
			"backend_weight$number" => $number,
			"backend_flag$number" => 'DISALLOW_TO_FAILOVER',
			%settings);
		$number++;
	}
	%settings = (
		backend_clustering_mode => 'streaming_replication',
		load_balance_mode => 'on',
		sr_check_period => 0,
		sr_check_user => $user,
		health_check_period => 0,
		num_init_children => 4,
		listen_addresses => '',
		port => $port,
		socket_dir => $dir,
		pcp_listen_addresses => '',
		pcp_socket_dir => $dir,
		wd_ipc_socket_dir => $dir,
		pid_file_name => "$dir/pgpool.pid",
		logdir => $dir,
		pool_passwd => '',
		%settings);
	unlink "$dir/pgpool.conf";
	append_to_file("$dir/pgpool.conf", join '', map { "$_ = '$settings{$_}'\n" } sort keys %settings);
	append_to_file("$dir/$_", '') foreach 'pcp.conf', 'pool_hba.conf';
	$pool_log = '';
	$pool = IPC::Run::start(
		[
			$pgpool, '-n',
			'-f' => "$dir/pgpool.conf",
			'-F' => "$dir/pcp.conf",
			'-a' => "$dir/pool_hba.conf"
		],
		'>&' => \$pool_log);

	my $attempts = 10 * $PostgreSQL::Test::Utils::timeout_default;

	until (PostgreSQL::Test::Utils::system_log(
			$primary->installed_command('pg_isready'),
			'--quiet', '--host' => $dir, '--port' => $port) == 0)
	{
		$pool->pump_nb if $pool->pumpable;
		die "pgpool does not start: $pool_log" if $attempts-- <= 0 || !$pool->pumpable;
		usleep(100_000);
	}
	return;
}

# Ends it with the fast shutdown.
sub stop_pgpool
{
	return if !defined $pool;
	$pool->signal('INT');
	$pool->finish;
	$pool = undef;
	return;
}

END
{
	my $status = $?;

	stop_pgpool();
	$? = $status;
}

# The output, or the SQLSTATE of the first error.  psql goes on after an error, as some clients do.
sub through_pgpool
{
	my ($sql) = @_;
	my ($ret, $out, $err) = $primary->psql('postgres', $sql,
		connstr => $connstr,
		on_error_stop => 0,
		extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	my $state = IdemTest::Session::first_sqlstate($err);

	note $err if $err ne '';
	$out =~ s/\b(\d+)(?=\||$)/$name{$1} \/\/ $1/gme;
	return $state eq '00000' ? $out : $state;
}

my $rows = q{
	SELECT (SELECT count(*) FROM idem.keys), (SELECT count(*) FROM idem.jobs), (SELECT count(*) FROM business)};

# What an application calls, each alone in its statement.  Placeholder: a new key.
my @calls = (
	[ "SELECT $where, status FROM idem_claim('KEY')", 'claimed' ],
	[ "SELECT $where, (idem_claim('KEY')).status", 'claimed' ],
	[ "SELECT $where, status FROM pg_catalog.idem_claim('KEY')", 'claimed' ],
	[ "WITH c AS (SELECT * FROM idem_claim('KEY')) SELECT $where, status FROM c", 'claimed' ],
	[ "SELECT $where, status FROM idem_call('KEY', 'handler', '1')", 'finished' ],
	[ "SELECT $where, status FROM idem_lease('KEY', '1 min')", 'claimed' ],
	[ "SELECT $where, outcome FROM idem_enqueue('q', key => 'KEY')", 'enqueued' ],
	[ "SELECT $where, attempt FROM idem_fetch('q', 1, '1 min')", '1' ]);

# The answers to all calls, each with a key of its own.
sub answers
{
	my ($round) = @_;
	my $n = 0;

	return map { through_pgpool($_->[0] =~ s/KEY/"$round " . ++$n/er) } @calls;
}

sub check_calls
{
	my ($round) = @_;

	is_deeply(
		[ answers($round) ],
		[ map { "primary|$_->[1]" } @calls ],
		"$round: every call reaches the primary");

	# a replica refuses it (A8)
	is(through_pgpool("CALL idem_wait('no jobs', '0')"), 'f', "$round: so does CALL");

	is( through_pgpool(
			qq{BEGIN;
			   SELECT status FROM idem_claim('$round, transaction');
			   INSERT INTO business VALUES ('$round');
			   SELECT idem_finish('$round, transaction', '1');
			   COMMIT;}),
		"claimed\nt",
		"$round: so does a transaction");
	is( run(qq{SELECT status, result FROM idem_get('$round, transaction');
		SELECT count(*) FROM business WHERE key = '$round'}),
		"finished|1\n1",
		"K1: $round: which commits there");
	return;
}

#
# by default
#

start_pgpool();
is(through_pgpool("SELECT $where"), 'replica', 'reads go to the replica');
check_calls('default');

# Other ways to send the statement: with parameters, and prepared.
foreach my $mode ('extended', 'prepared')
{
	my $script = "$dir/claim.sql";

	unlink $script;
	append_to_file($script,
		"\\set n random(1, 1000000000)\nSELECT status FROM idem_claim('$mode ' || :n::text);\n");
	$primary->command_ok(
		[
			'pgbench', '--no-vacuum', '--protocol' => $mode, '--transactions' => 5,
			'--file' => $script, '--host' => $dir, '--port' => $port, 'postgres'
		],
		"default: the $mode protocol");
	is(run("SELECT count(*) FROM idem.keys WHERE key LIKE '$mode %'"), '5', "default: the primary has the keys: $mode");
}

$primary->wait_for_catchup($standby);
is(through_pgpool("SELECT $where, status FROM idem_get('default 1')"),
	'replica|finished', 'K13: idem_get is stable, and reads on the replica');
is( through_pgpool(
		qq{BEGIN; SELECT status FROM idem_claim('own');
		   SELECT $where, status FROM idem_get('own'); COMMIT;} =~ s/; /;\n/gr),
	"claimed\nprimary|held",
	'but on the primary, in a transaction that has written');

# which may be behind
$standby->safe_psql('postgres', 'SELECT pg_wal_replay_pause()');
$standby->poll_query_until('postgres', "SELECT pg_get_wal_replay_pause_state() = 'paused'")
  or die 'replay does not pause';
is(through_pgpool("SELECT $where, status FROM idem_claim('behind')"), 'primary|claimed', 'a claim of the primary');
is(through_pgpool("SELECT count(*) = 0 FROM idem_get('behind')"), 't', 'is not there on a replica that is behind');
is( through_pgpool("/*NO LOAD BALANCE*/ SELECT $where, status FROM idem_get('behind')"),
	'primary|finished', 'a comment in front sends the read to the primary');
$standby->safe_psql('postgres', 'SELECT pg_wal_replay_resume()');

is(through_pgpool(q{SELECT said_to_be_stable('stable')}),
	'25006', 'K13: a function that claims and is declared stable reaches the replica');
is(run(q{SELECT count(*) FROM idem_get('stable')}), '0', 'K13: and nothing happens');
stop_pgpool();

#
# with a list in which idem is missing
#

start_pgpool(write_function_list => 'currval,lastval,nextval,setval');
my $before = run($rows);

is_deeply([ answers('a list') ], [ ('25006') x @calls ], 'K13: without idem in write_function_list every call gives 25006');
is( through_pgpool(
		q{BEGIN;
		  SELECT status FROM idem_claim('a list');
		  INSERT INTO business VALUES ('a list');
		  COMMIT;}),
	'25006',
	'K13: also in a transaction');
is(run($rows), $before, 'K13: nothing has happened, even if the client went on after the error');
stop_pgpool();

#
# with what the manual says
#

# A pattern is anchored, and calls may be qualified.
start_pgpool(write_function_list => 'currval,lastval,nextval,setval,idem_.*');
is(through_pgpool("SELECT $where, status FROM idem_claim('anchored')"),
	'primary|claimed', 'write_function_list: idem_.* matches a plain call');
is(through_pgpool(q{SELECT status FROM pg_catalog.idem_claim('qualified')}),
	'25006', 'write_function_list: but not a qualified one');
stop_pgpool();

start_pgpool(write_function_list => 'currval,lastval,nextval,setval,.*idem_.*');
check_calls('write_function_list');
$primary->wait_for_catchup($standby);
is(through_pgpool("SELECT $where, status FROM idem_get('default 1')"),
	'primary|finished', 'write_function_list: idem_get reads on the primary, too');
stop_pgpool();

start_pgpool(
	write_function_list => 'currval,lastval,nextval,setval',
	primary_routing_query_pattern_list => '.*idem_.*');
check_calls('primary_routing_query_pattern_list');
stop_pgpool();

start_pgpool(read_only_function_list => 'current_setting,count,idem_get,idem_job,idem_job_by_key,idem_slot');
check_calls('read_only_function_list');
$primary->wait_for_catchup($standby);
is(through_pgpool("SELECT $where, status FROM idem_get('default 1')"),
	'replica|finished', 'read_only_function_list: idem_get reads on the replica');
stop_pgpool();

$_->stop foreach $standby, $primary;
log_ok($_) foreach $primary, $standby;
done_testing();
