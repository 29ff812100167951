# Failover under load, checked row by row: nothing is doubled (K3), nothing is lost beyond what
# replication itself loses (K1, K2, J7), tokens only grow (L2), and the background worker comes
# back (W6).
#
# Eight clients (test/failover/client.py) claim keys, lease keys, enqueue jobs and work on them.
# Each notes what the server has acknowledged, with its timeline and transaction id.  Meanwhile the
# primary is lost again and again: stopped; killed with all its processes after its walsenders were
# held back; or left to itself, so that there are two primaries, with clients on both.  The standby
# is promoted, the old primary is rewound and follows.  First with asynchronous replication, which
# loses commits; then with synchronous replication, which must not.
#
# Before a lost primary is rewound, pg_waldump lists its commits.  So the test knows the LSN of each
# acknowledged commit, and that decides (test/failover/check.py): a commit before the fork of its
# timeline must have its row on the last primary, a commit behind the fork must have none.
#
# At the end: a commit that gave up waiting for its standby is confirmed, and can be lost.
#
# IDEM_FAILOVER_ROUNDS: the rounds of failover, instead of those below: a list such as
# "switchover crash two_primaries synchronous crash".

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemFailover;
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $python = '/usr/bin/python3';

plan skip_all => "$python has no module psycopg2"
  if system("$python -c 'import psycopg2' 2>/dev/null") != 0;
plan skip_all => 'needs /proc' unless -e '/proc/self/stat';

local $ENV{PYTHONDONTWRITEBYTECODE} = 1;

my @rounds = split ' ', $ENV{IDEM_FAILOVER_ROUNDS}
  // 'switchover crash two_primaries crash two_primaries synchronous switchover crash two_primaries';
my @roles = qw(keys keys keys leases leases producer worker leased_worker);
my $programs = "$FindBin::RealBin/../failover";
my $dir = PostgreSQL::Test::Utils::tempdir();

my $primary = new_node(
	'one',
	init => {
		allows_streaming => 1,
		extra => [ '--no-locale', '--encoding=UTF8', '--wal-segsize=1' ]
	},
	conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1
wal_log_hints = on
wal_keep_size = 256MB
min_wal_size = 2MB
synchronous_standby_names = ''
autovacuum = off
});

$primary->safe_psql('postgres', slurp_file("$programs/schema.sql"));
$primary->backup('backup');

my $standby = PostgreSQL::Test::Cluster->new('two');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

my @nodes = ($primary, $standby);

#
# the clients
#

my @clients;    # hashes of role, number, run, log
my @logs;

# A client that tries this server first.
sub start_client
{
	my ($role, $number, $first) = @_;
	my @servers = $first == $primary ? ($primary, $standby) : ($standby, $primary);
	my $connstr = sprintf "host=%s port=%s dbname=postgres target_session_attrs=read-write",
	  join(',', map { $_->host } @servers), join(',', map { $_->port } @servers);
	my $name = "$number-" . @logs;
	my %client = (
		role => $role,
		number => $number,
		first => $first->name,
		log => "$dir/$name.log",
		stop => "$dir/stop " . ($role =~ /worker/ ? 'workers' : 'others'),
		stderr => '',
		mark => 0);

	append_to_file($client{log}, '');
	$client{run} = IPC::Run::start(
		[ $python, "$programs/client.py", $role, $name, $connstr, $client{log}, $client{stop} ],
		'2>' => \$client{stderr});
	push @logs, $client{log};
	return \%client;
}

# Ends clients as a crash of their machine would, and starts others.
sub restart_clients
{
	my ($first) = @_;

	foreach my $client (grep { $_->{first} eq $first->name } @clients)
	{
		$client->{run}->kill_kill(grace => 0);
		$client = start_client($client->{role}, $client->{number}, $first);
	}
	return;
}

sub set_marks
{
	$_->{mark} = -s $_->{log} foreach @clients;
	return;
}

# Returns once each client, or those of these roles, has that many commits acknowledged since the
# last mark, on this timeline if one is given.
sub wait_for_acks
{
	my ($number, %opt) = @_;
	my $timeline = $opt{timeline} // '';
	my @waiting = grep { !defined $opt{first} || $_->{first} eq $opt{first}->name } @clients;
	my $attempts = 20 * $PostgreSQL::Test::Utils::timeout_default;

	@waiting = grep { $_->{role} =~ $opt{roles} } @waiting if defined $opt{roles};
	while (@waiting)
	{
		@waiting = grep {
			my $acks = () = slurp_file($_->{log}, $_->{mark}) =~ /^(?:run|grant|enqueue)\t.*\t$timeline/mg;
			$acks < $number
		} @waiting;
		last if !@waiting;
		foreach my $client (@clients)
		{
			$client->{run}->pump_nb if $client->{run}->pumpable;
			die "$client->{role} has ended: $client->{stderr}" . slurp_file($client->{log}, $client->{mark})
			  unless $client->{run}->pumpable;
		}
		die "no progress: " . join ' ', map { $_->{role} } @waiting if $attempts-- <= 0;
		usleep(50_000);
	}
	return;
}

# Returns once that many commits wait for a standby that does not answer.
sub wait_for_hanging_commits
{
	my ($node, $number) = @_;

	$number //= 2;
	$node->poll_query_until('postgres',
		qq{SELECT count(*) >= $number FROM pg_stat_activity WHERE wait_event = 'SyncRep'})
	  or die 'no commit waits';
	return;
}

#
# the rounds
#

my $is_sync = 0;
my @failovers;    # hashes of timeline, what, is_sync
my $from = $primary->safe_psql('postgres', 'SELECT pg_current_wal_insert_lsn()');
my $commits = '';

my %lose = (
	switchover => sub {
		$primary->stop('fast');
		$standby->promote;
	},
	crash => sub {
		freeze_walsenders($primary);
		set_marks();
		$is_sync ? wait_for_hanging_commits($primary) : wait_for_acks(10, roles => qr/keys|leases|producer/);
		kill_server($primary);
		$standby->promote;
	},
	two_primaries => sub {
		my $old = timeline_of($primary);

		$standby->promote;
		set_marks();
		restart_clients($standby);
		if ($is_sync)
		{
			wait_for_hanging_commits($_) foreach $primary, $standby;
			kill_server($primary);
		}
		else
		{
			wait_for_acks(10, timeline => $old, first => $primary, roles => qr/keys|leases|producer/);
			wait_for_acks(
				10,
				timeline => timeline_of($standby),
				first => $standby,
				roles => qr/keys|leases|producer/);
			$primary->stop('fast');
		}
	});

sub make_synchronous
{
	$is_sync = 1;
	foreach my $node ($standby, $primary)
	{
		$node->append_conf('postgresql.conf', "synchronous_standby_names = '*'");
		$node->restart;
	}
	return;
}

sub check_worker
{
	my ($round) = @_;

	add_expired($primary, 50);
	$primary->safe_psql('postgres', 'SELECT pg_reload_conf()');
	ok( $primary->poll_query_until(
			'postgres', q{SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now()}),
		"W6: $round: the background worker of the new primary cleans up");
	return;
}

@clients = map { start_client($roles[$_], $_, $_ % 2 ? $primary : $standby) } 0 .. $#roles;
foreach my $what (@rounds)
{
	if ($what eq 'synchronous')
	{
		make_synchronous();
		next;
	}

	my $timeline = timeline_of($primary);
	my $round = 'round ' . (@failovers + 1) . ", $what";

	push @failovers, { timeline => $timeline, what => $what, is_sync => $is_sync };
	set_marks();
	wait_for_acks(20);
	$lose{$what}->();
	$commits .= commits_of($primary, $timeline, $from);
	($from) = forks_of($standby) =~ /^$timeline (\S+)$/m;
	follow($primary, $standby);
	($primary, $standby) = ($standby, $primary);
	check_worker($round);
	$primary->wait_for_catchup($standby);
}

#
# the end: no more new work, and the workers do what is left
#

set_marks();
wait_for_acks(20);

sub stop_clients
{
	my ($roles) = @_;

	append_to_file($_, '') foreach map { $_->{stop} } grep { $_->{role} =~ $roles } @clients;
	foreach my $client (grep { $_->{role} =~ $roles } @clients)
	{
		$client->{run}->finish;
		is($client->{stderr}, '', "$client->{role} $client->{number} comes to its end");
	}
	return;
}

stop_clients(qr/keys|leases|producer/);
ok( $primary->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.jobs'),
	'J7: all jobs come to an end');
stop_clients(qr/worker/);

append_to_file("$dir/commits", $commits);
append_to_file("$dir/forks", forks_of($primary));

my ($out, $err) = run_command(
	[
		$python, "$programs/check.py", $primary->connstr('postgres'),
		"$dir/commits", "$dir/forks",
		join(',', map { $_->{timeline} } grep { $_->{is_sync} } @failovers), @logs
	]);

is($err, '', 'the ledger is compared with the last primary');
ok($1 eq 'ok', $2) while $out =~ /^(ok|FAILED) +(.*)$/mg;
note $out;
diag($out) if $out =~ /^FAILED/m;

#
# Was there something to find?
#

my %summary = map { /^timeline (\S+) (\d+) (\d+) (\d+)$/ ? ($1 => [ $2, $3, $4 ]) : () } split /\n/, $out;

foreach my $failover (@failovers)
{
	my ($acknowledged, $lost, $twice) = @{ $summary{ $failover->{timeline} } // [ 0, 0, 0 ] };
	my $name = "timeline $failover->{timeline}, $failover->{what}";

	note "$name: $acknowledged acknowledged, $lost lost, $twice done again";
	cmp_ok($acknowledged, '>', 100, "$name: there was load");
	if ($failover->{is_sync} || $failover->{what} eq 'switchover')
	{
		is($lost, 0, "$name: no commit is lost");
		is($twice, 0, "$name: and no work is acknowledged twice");
	}
	else
	{
		cmp_ok($lost, '>', 0, "$name: commits were lost, as asynchronous replication does");
		cmp_ok($twice, '>', 0, "$name: and work of them was done again");
	}
}
unlike($out, qr/unexpected/, 'no client has seen an error that it did not expect');

amcheck_ok($primary, 'after the last failover', 'idem.keys', 'idem.jobs', 'idem.job_keys');

#
# What synchronous replication does not promise: a commit whose wait was cancelled
#

my $first = session($primary);
my $second = session($primary);

stop_receiving($standby);
$first->send(q{SELECT status FROM idem_claim('cancelled')});
wait_for_hanging_commits($primary, 1);
$second->send(q{SELECT status FROM idem_claim('cancelled')});
wait_until_blocked($primary, $second);
$primary->safe_psql('postgres', "SELECT pg_cancel_backend($first->{pid})");
is($first->receive, 'claimed', 'the server confirms a commit whose wait was cancelled');
like($first->{message}, qr/WARNING: +01000: canceling wait for synchronous replication/, 'with a WARNING');
is($second->receive, 'finished', 'K4: and others see it, without a WARNING');
kill_server($primary);
$_->lost foreach $first, $second;
$standby->promote;
is($standby->safe_psql('postgres', q{SELECT count(*) FROM idem_get('cancelled')}),
	'0', 'a failover loses it all the same');
$standby->stop;
log_ok($_) foreach @nodes;
done_testing();
