# W2: DROP DATABASE, CREATE DATABASE ... TEMPLATE and ALTER DATABASE ... RENAME
# succeed while the worker is busy in that very database, without FORCE, 50 times
# each; and so does the DROP of another database.
#
# Bugs of other projects (doc/peers.md section 4) that this test looks for:
#   citus#1579, pg_cron#352, timescaledb#4048   DROP and CREATE ... TEMPLATE fail
#       while the worker is connected (after five seconds)
#   pg_cron#318, timescaledb#4838, pg_net#78    DROP DATABASE of any database
#       hangs, because the worker absorbs no procsignal barrier
#
# There are more expired keys than a run of the worker can remove one by one, so
# each run lasts for two seconds and the next one follows.  Each command waits
# for that; so that not all of them wait one after the other, several servers
# work side by side.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $origin = new_node(
	'origin', conf => q{
shared_preload_libraries = 'idem'
log_min_messages = debug1
max_connections = 20
max_wal_senders = 0
idem.cleanup_naptime = 1d
idem.cleanup_batch_size = 1
idem.cleanup = off
});

# Returns once a worker is in the database, for this part of its two seconds.
$origin->safe_psql(
	'postgres', q{
	CREATE FUNCTION wait_for_worker(name, part double precision) RETURNS void
	LANGUAGE plpgsql AS $$
	BEGIN
		LOOP
			PERFORM pg_stat_clear_snapshot();
			EXIT WHEN EXISTS (
				SELECT FROM pg_stat_activity
				 WHERE backend_type = 'idem cleanup' AND datname = $1
				   AND backend_start < clock_timestamp() - $2 * interval '2 s');
			IF clock_timestamp() > transaction_timestamp() + interval '3 min' THEN
				RAISE 'no worker comes to %', $1;
			END IF;
			PERFORM pg_sleep(0.01);
		END LOOP;
	END $$;
	CREATE DATABASE a});
$origin->safe_psql('a', 'CREATE EXTENSION idem');
$origin->safe_psql('a', q{SELECT idem_claim('live')});
add_expired($origin, 50000, db => 'a');
$origin->safe_psql('a', 'CHECKPOINT');
$origin->stop;
$origin->backup_fs_cold('cold');

my $dir = PostgreSQL::Test::Utils::tempdir();
my @servers;

# A server, and what psql does there: a list of commands per session
sub serve
{
	my ($name, %opt) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init_from_backup($origin, 'cold');
	$node->append_conf('postgresql.conf', 'idem.cleanup = on');
	$node->start;
	$node->safe_psql('postgres', $opt{before}) if $opt{before};
	push @servers, { node => $node, running => [], what => $opt{what} };

	# with files for input and output, so that psql never waits for this test
	foreach my $commands (@{ $opt{sessions} })
	{
		my $file = "$dir/$name." . @{ $servers[-1]{running} };

		append_to_file("$file.sql", join(";\n", @$commands, ''));
		push @{ $servers[-1]{running} },
		  {
			file => $file,
			run => IPC::Run::start(
				[
					$node->installed_command('psql'), '-XAt',
					'-v' => 'ON_ERROR_STOP=1',
					'-d' => $node->connstr('postgres'),
					'-f' => "$file.sql"
				],
				'<' => \undef,
				'>' => "$file.out",
				'2>' => "$file.err",
				IPC::Run::timeout(
					2 * $PostgreSQL::Test::Utils::timeout_default))
		  };
	}
	return;
}

# at another moment of the run each time
sub wait_for_worker
{
	my ($db, $i) = @_;

	return sprintf "SELECT wait_for_worker('%s', %.1f)", $db, $i % 5 * 0.2;
}

my $reload = 'SELECT pg_reload_conf()';
my $template = 'ALTER DATABASE a IS_TEMPLATE true';

# a is a template here, which is left alone
foreach my $n (1 .. 3)
{
	serve(
		"drop_$n",
		before => $template,
		what => 'DROP DATABASE',
		sessions => [
			[
				map
				{;
					'CREATE DATABASE d TEMPLATE a', $reload,
					  wait_for_worker('d', $_ + $n),
					  'DROP DATABASE d'
				} 1 .. 17
			]
		]);
}

foreach my $n (1 .. 3)
{
	serve(
		"rename_$n",
		what => 'ALTER DATABASE',
		sessions => [
			[
				map {
					my ($from, $to) = $_ % 2 ? ('a', 'b') : ('b', 'a');
					(
						$reload,
						wait_for_worker($from, $_ + $n),
						"ALTER DATABASE $from RENAME TO $to")
				} 1 .. 17
			]
		]);
}

# Several at once.  There is no reload: the copies are not visited before they
# are dropped.
serve(
	'copy',
	what => 'CREATE DATABASE',
	sessions => [
		map {
			my $copy = "copy_$_";
			[
				map {
					(
						wait_for_worker('a', $_),
						"CREATE DATABASE $copy TEMPLATE a",
						"DROP DATABASE $copy")
				} 1 .. 10
			]
		} 1 .. 5
	]);

serve(
	'other',
	what => 'DROP DATABASE',
	sessions => [
		[
			map
			{;
				'CREATE DATABASE other', wait_for_worker('a', $_),
				  'DROP DATABASE other'
			} 1 .. 50
		]
	]);

my %done;

foreach my $server (@servers)
{
	my $node = $server->{node};
	my $name = $node->name;
	my $errors = '';

	foreach my $session (@{ $server->{running} })
	{
		eval { $session->{run}->finish; };
		if ($@)
		{
			$errors .= $@;
			$session->{run}->kill_kill;
		}
		$done{ $name =~ s/_\d//r } += () =
		  slurp_file("$session->{file}.out") =~ /^$server->{what}$/mg;
		$errors .= slurp_file("$session->{file}.err");
	}
	is($errors, '', "W2: $name: no session blocks it");
}

is( join(', ', map { "$_: $done{$_}" } sort keys %done),
	'copy: 50, drop: 51, other: 50, rename: 51',
	'W2: DROP, RENAME, copy of the database that is being cleaned up, DROP of another one: all succeed'
);

# the rest, in less time; on the servers with DROP a was a template
foreach my $server (@servers)
{
	my $node = $server->{node};

	$server->{db} =
	  $node->safe_psql('postgres',
		q{SELECT datname FROM pg_database WHERE datname IN ('a', 'b')});
	$node->safe_psql(
		'postgres', qq{
		ALTER DATABASE $server->{db} IS_TEMPLATE false;
		ALTER SYSTEM SET idem.cleanup_batch_size = 1000;
		SELECT pg_reload_conf()});
}

foreach my $server (@servers)
{
	my ($node, $db) = @$server{ 'node', 'db' };
	my $name = $node->name;
	my $log;

	$node->poll_query_until($db,
		q{SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now()})
	  or die "$name is not cleaned up";
	is($node->safe_psql($db, 'SELECT key FROM idem.keys'),
		'live', "W1: $name: in the end only what is alive is left");
	$node->stop;
	$log = slurp_file($node->logfile);
	is( join("\n", $log =~ /^.*idem cleanup (?:failed|works again).*$/mg),
		'',
		"W7: $name: that is no failure of cleanup");
	cmp_ok({ never_two_ok($node) }->{cleanup},
		'>', 10, "$name: the worker has come again and again");
	log_ok($node);
}

done_testing();
