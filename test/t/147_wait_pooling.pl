# A1: sessions that wait behind pgbouncer in transaction mode, where LISTEN fails silently.
#
# A session that waits keeps its server connection for that long.  Afterwards the
# connection serves other clients, and the client may fetch through another one.

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

my ($pgbouncer) = grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';

plan skip_all => 'there is no pgbouncer' unless defined $pgbouncer;
plan skip_all => 'needs Unix-domain sockets' unless $PostgreSQL::Test::Utils::use_unix_sockets;

# Old versions do not know the message by which a server refuses a newer protocol.
local $ENV{PGMAXPROTOCOLVERSION} = '3.0';

my $node = new_node(
	'wait_pooling', conf => q{
shared_preload_libraries = 'idem'
autovacuum = off
idem.cleanup = off
idem.look_after = 1h
});

#
# pgbouncer, with two connections to the server
#

my $dir = PostgreSQL::Test::Utils::tempdir_short();
my $port = PostgreSQL::Test::Cluster::get_free_port();
my $user = run('SELECT current_user');
my ($pool, $pool_log);

sub start_pgbouncer
{
	my $attempts = 10 * $PostgreSQL::Test::Utils::timeout_default;

	append_to_file("$dir/users", qq{"$user" ""\n});
	append_to_file(
		"$dir/pgbouncer.ini", sprintf q{
[databases]
postgres = host=%s port=%d dbname=postgres
[pgbouncer]
listen_addr =
listen_port = %d
unix_socket_dir = %s
auth_type = trust
auth_file = %s/users
pool_mode = transaction
default_pool_size = 2
}, $node->host, $node->port, $port, $dir, $dir);
	$pool = IPC::Run::start([ $pgbouncer, "$dir/pgbouncer.ini" ], '>&' => \$pool_log);
	until (PostgreSQL::Test::Utils::system_log(
			$node->installed_command('pg_isready'),
			'--quiet', '--host' => $dir, '--port' => $port) == 0)
	{
		$pool->pump_nb if $pool->pumpable;
		die "pgbouncer does not start: $pool_log" if $attempts-- <= 0 || !$pool->pumpable;
		usleep(100_000);
	}
	return;
}

sub stop_pgbouncer
{
	return if !defined $pool;
	$pool->signal('TERM');
	$pool->finish;
	$pool = undef;
	return;
}

END
{
	my $status = $?;

	stop_pgbouncer();
	$? = $status;
}

# What session() needs to know of a server
sub IdemTest::Pool::connstr { return "host=$dir port=$port dbname=$_[1]"; }
sub IdemTest::Pool::installed_command { return $node->installed_command($_[1]); }

sub client
{
	return session(bless {}, 'IdemTest::Pool');
}

start_pgbouncer();

my @clients = map { client() } 1 .. 3;

# Two clients wait, and so have both connections; the answer frees them.
foreach my $round (1 .. 3)
{
	$_->send(q{CALL idem_wait('q', '10 min')}) foreach @clients[ 0, 1 ];
	wait_until_asleep($node, 2);
	run(q{SELECT count(*) FROM idem_enqueue_many('q', '{1,2}')});
	is($_->receive, 't', "A2: woken behind pgbouncer, round $round") foreach @clients[ 0, 1 ];
	is($_->query(q{SELECT count(idem_complete(job_id, token)) FROM idem_fetch('q', lease => '1 h')}),
		'1', "A2: the client fetches its job, round $round")
	  foreach @clients[ 0, 1 ];
}

# One client waits, and another one enqueues through the other connection.
$clients[0]->send(q{CALL idem_wait_any('{p,q}', '10 min')});
wait_until_asleep($node, 1);
is($clients[1]->query(q{SELECT outcome FROM idem_enqueue('q')}), 'enqueued', 'others go on meanwhile');
is($clients[0]->receive, 't|q', 'A2: woken by a job of another client');
is($clients[2]->query(q{SELECT count(idem_complete(job_id, token)) FROM idem_fetch('q', lease => '1 h')}),
	'1', 'A2: a third one fetches it');
is($clients[0]->query(q{CALL idem_wait('q', '100 ms')}), 'f', 'A2: the timeout');
is($clients[0]->sqlstate(q{BEGIN; CALL idem_wait('q', '100 ms')}),
	'25001', 'A1: refused in a transaction block');
$clients[0]->query('ROLLBACK');

# The client of a session that waits is gone: pgbouncer closes the connection to the server.
$clients[0]->send(q{CALL idem_wait('q', '10 min')});
wait_until_asleep($node, 1);
my $pid = run(q{SELECT pid FROM pg_stat_activity WHERE query LIKE 'CALL idem_wait(%' AND state = 'active'});
$clients[0]->kill;
wait_until_gone($node, { pid => $pid });
$clients[1]->send(q{CALL idem_wait('q', '10 min')});
wait_until_asleep($node, 1);
run(q{SELECT idem_enqueue('q')});
is($clients[1]->receive, 't', 'A7: after that, others wait and are woken');

$_->quit foreach @clients[ 1, 2 ];
stop_pgbouncer();
$node->stop;
log_ok($node);
done_testing();
