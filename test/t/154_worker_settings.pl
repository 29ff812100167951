# What launcher and worker go by, whatever settings there are.
#
#   W8  they run as the bootstrap superuser, but settings of that role have no
#       effect: they go by the real clock, and by idem.cleanup and
#       idem.cleanup_batch_size of the database, else of the server
#   W4  transaction defaults and timeouts of the server are not in their way:
#       no snapshot is held, and no worker is killed
#   H1  idem_doctor() shows a setting of a role, and does not say ok if the
#       launcher cannot work

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'settings', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
autovacuum = off
});
my @databases = qw(postgres one two);
my $count = 20;

# rows that are gone, and the largest number of them that one transaction has removed; a witness
# still sees them
sub removed
{
	my ($witness) = @_;

	return $witness->query(q{
		SELECT coalesce(sum(n), 0), coalesce(max(n), 0) FROM (
			SELECT count(*) AS n FROM idem.keys WHERE key LIKE 'expired %' AND xmax <> 0 GROUP BY xmax) AS t});
}

# what a round removes in each database: 'postgres 20 7, one 0 0, ...'
sub round_removes
{
	my %witness;
	my @removed;

	foreach my $db (@databases)
	{
		run(q{DELETE FROM idem.keys WHERE key LIKE 'expired %'}, db => $db);
		add_expired($node, $count, db => $db);
		$witness{$db} = session($node, db => $db);
		$witness{$db}->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM idem.keys');
	}
	cleanup_round($node);
	foreach my $db (@databases)
	{
		push @removed, join ' ', $db, split /\|/, removed($witness{$db});
		$witness{$db}->quit;
	}
	return join ', ', @removed;
}

foreach my $db (qw(one two))
{
	new_database($db);
}

my $me = run('SELECT rolname FROM pg_roles WHERE oid = 10');

#
# W8: the clock.  A year on every live key would have expired.
#

my $year = 365 * 24 * 3600;
my $live = q{SELECT string_agg(key, ' ' ORDER BY key) FROM idem.keys WHERE key LIKE 'live%'};

foreach my $db (@databases)
{
	run(q{SELECT idem_claim('live'); SELECT idem_lease('live lease', '1 min', ttl => '1 min')}, db => $db);
}
is(doctor('settings'), 'ok', 'H1: no setting is without effect');
foreach my $place ("ROLE $me", "ROLE $me IN DATABASE one", 'DATABASE one', 'ROLE ALL', 'SYSTEM')
{
	run("ALTER $place SET idem.clock_offset = $year");
	cleanup_round($node);
	is( join(', ', map { run($live, db => $_) } @databases),
		join(', ', ('live live lease') x 3),
		"W8: ALTER $place SET idem.clock_offset: nothing live is removed");
	run("ALTER $place RESET idem.clock_offset");
}

#
# W8: whether to clean up, and how much at a time
#

# The role says no; each batch of three, of two in a database
run("ALTER ROLE $me SET idem.cleanup = off");
run("ALTER ROLE $me SET idem.cleanup_batch_size = 3");
run("ALTER ROLE $me IN DATABASE two SET idem.cleanup_batch_size = 2");
is(round_removes(), "postgres $count $count, one $count $count, two $count $count",
	'W8: settings of the role have no effect, here or in a database');
is(doctor('settings'), 'warn', 'H1: idem_doctor() shows them');

run('ALTER SYSTEM SET idem.cleanup_batch_size = 10');
is(round_removes(), "postgres $count 10, one $count 10, two $count 10",
	'W8: those of the server have one');
run('ALTER ROLE ALL SET idem.cleanup_batch_size = 9');
is(round_removes(), "postgres $count 9, one $count 9, two $count 9",
	'W8: those of ALTER ROLE ALL come before them');
run('ALTER DATABASE one SET idem.cleanup_batch_size = 8');
run('ALTER DATABASE two SET idem.cleanup = off');
is(round_removes(), "postgres $count 9, one $count 8, two 0 0",
	'W8: those of the database come first');
run('ALTER SYSTEM SET idem.cleanup = off');
run('ALTER DATABASE one SET idem.cleanup = on');
run("ALTER ROLE $me SET idem.cleanup = on");
is(round_removes(), "postgres 0 0, one $count 8, two 0 0",
	'W8: off in the server, on in a database; the role does not count');

# the fix takes away what is without effect, and nothing else
run(doctor('settings', columns => 'fix'));
is(doctor('settings'), 'ok', 'H1: the fix of idem_doctor() helps');
is( run(q{
		SELECT coalesce(datname, '-'), setrole = 0, setconfig
		  FROM pg_db_role_setting LEFT JOIN pg_database AS d ON d.oid = setdatabase ORDER BY datname COLLATE "C" NULLS FIRST, 2}),
	join("\n",
		'-|t|{idem.cleanup_batch_size=9}', 'one|t|{idem.cleanup_batch_size=8,idem.cleanup=on}',
		'two|f|{idem.cleanup_batch_size=2}', 'two|t|{idem.cleanup=off}'),
	'H1: it changes nothing else, and nothing of another database');

run('ALTER SYSTEM RESET ALL');
run("ALTER DATABASE $_ RESET ALL") foreach qw(one two);
run('ALTER ROLE ALL RESET ALL');
run("ALTER ROLE $me IN DATABASE two RESET ALL");

#
# W4: transaction defaults and timeouts of the whole server
#

my @odd = (
	'default_transaction_isolation = serializable',
	'default_transaction_read_only = on',
	'default_transaction_deferrable = on',
	'statement_timeout = 1ms',
	'lock_timeout = 1ms',
	'idle_in_transaction_session_timeout = 1ms');

# The transaction that a deferrable one would wait for; sessions of this test have what they need.
$ENV{PGOPTIONS} = join ' ',
  map { "-c $_" } 'default_transaction_read_only=off', 'default_transaction_isolation=read\ committed',
  'default_transaction_deferrable=off', 'statement_timeout=0', 'lock_timeout=0',
  'idle_in_transaction_session_timeout=0';

my $open = session($node);

$open->query(q{CREATE TABLE t (); BEGIN ISOLATION LEVEL SERIALIZABLE; INSERT INTO t DEFAULT VALUES});
$node->append_conf('postgresql.conf', join("\n", map { s/= (\S+)$/= '$1'/r } @odd) . "\n");
$node->reload;

my $offset = -s $node->logfile;

is(round_removes(), "postgres $count $count, one $count $count, two $count $count",
	'W4: transaction defaults and timeouts of the server are not in the way');
is( run(q{
		SELECT count(*) FROM pg_stat_activity
		 WHERE backend_type LIKE 'idem%' AND (wait_event = 'SafeSnapshot' OR backend_xmin IS NOT NULL)}),
	'0', 'W4: no process of ours waits for a snapshot or holds one');
is(log_count($node, qr/idem cleanup failed|due to .*timeout/, $offset), '0', 'W4: no worker was killed');
$open->quit;
$node->restart;
is(round_removes(), "postgres $count $count, one $count $count, two $count $count",
	'W4: nor at the start of the launcher');
is(doctor('worker') . ' ' . doctor('last cleanup'), 'ok ok', 'H1: idem_doctor() says so');

# transaction_timeout ends new sessions before they can say what they need
if ($node->pg_version >= 17)
{
	my $old = session($node, db => 'one');

	add_expired($node, $count, db => 'one');
	$offset = -s $node->logfile;
	$old->query(q{
		SET transaction_timeout = 0;
		ALTER SYSTEM SET transaction_timeout = '1ms';
		SELECT pg_reload_conf()});
	$old->query(q{
		DO $$ BEGIN
			FOR i IN 1 .. 6000 LOOP
				IF (SELECT count(*) = 0 FROM idem.keys WHERE key LIKE 'expired %') THEN
					RETURN;
				END IF;
				PERFORM pg_sleep(0.01);
			END LOOP;
			RAISE 'nothing is removed';
		END $$});
	$old->query('ALTER SYSTEM RESET transaction_timeout; SELECT pg_reload_conf()');
	$old->quit;
	is(log_count($node, qr/idem cleanup failed|due to transaction timeout/, $offset),
		'0', 'W4: transaction_timeout does not kill the worker');
	$node->poll_query_until('postgres', 'SELECT true') or die;
}

#
# W7, H1: the launcher cannot work: pg_database is locked.  It has a transaction
# open only while it waits, for a second, and that has begun just now.
#

my $lock = session($node);

$lock->query('BEGIN; LOCK TABLE pg_database IN ACCESS EXCLUSIVE MODE');
$offset = -s $node->logfile;
my $now = $lock->query('SELECT clock_timestamp()');

sub wait_in_lock
{
	my ($condition) = @_;

	return $lock->query(qq{
		DO \$\$ BEGIN
			FOR i IN 1 .. 6000 LOOP
				PERFORM pg_stat_clear_snapshot();
				IF (SELECT $condition) THEN
					RETURN;
				END IF;
				PERFORM pg_sleep(0.01);
			END LOOP;
			RAISE 'does not come true';
		END \$\$});
}

$lock->query('SELECT pg_reload_conf()');
my $activity = 'count(*) = 1 FROM pg_stat_get_activity(NULL) AS a, idem_internal.idem_stat_worker() AS w WHERE a.pid = w.launcher_pid';

wait_in_lock("$activity AND a.wait_event_type = 'Lock' AND a.xact_start > '$now'");
pass('W4: xact_start of the launcher is the start of its transaction, not its own');
wait_in_lock("$activity AND w.state = 'failing' AND a.xact_start IS NULL AND a.backend_xmin IS NULL");
pass('W7, W4: it waits for a second, then it fails, and holds nothing in its pause');
is( $lock->query(q{
		SELECT status, detail LIKE 'process % fails, last at %: canceling statement due to lock timeout', fix IS NOT NULL
		  FROM idem_doctor() WHERE "check" = 'worker'}),
	'fail|t|t', 'H1: idem_doctor() shows it');
foreach (1 .. 2)
{
	my $last = $lock->query('SELECT last_error_at FROM idem_internal.idem_stat_worker()');

	wait_in_lock("last_error_at > '$last' FROM idem_internal.idem_stat_worker()");
}
$lock->query('COMMIT');
$node->wait_for_log(qr/idem launcher works again/, $offset);
is( log_count($node, qr/idem launcher failed: canceling statement due to lock timeout/, $offset) . ' '
	  . log_count($node, qr/(?:ERROR|FATAL):/, $offset),
	'1 0', 'W7: it was logged once');
is(doctor('worker'), 'ok', 'H1: without the lock all is well again');
cleanup_round($node, 'one');
$lock->quit;

$node->stop;
log_ok($node);
done_testing();
