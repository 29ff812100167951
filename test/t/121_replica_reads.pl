# Reading on a replica.
#
# All views, and every function that only reads, work there, with a map of slots, too, and all
# others give 25006.  "No row" on a replica does not mean "not done".  J10 as the manual says it: a
# client waits until the replica has replayed the position that fetch has returned, by polling, and
# from PostgreSQL 19 on with WAIT FOR LSN.  And libpq with several hosts.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $primary = new_node(
	'primary',
	init => { allows_streaming => 1 },
	conf => q{
shared_preload_libraries = 'idem'
idem.cleanup = off
autovacuum = off
max_standby_streaming_delay = -1
});
my $has_wait = run(q{SELECT current_setting('server_version_num')::int >= 190000}) eq 't';

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

sub on_standby
{
	my ($sql) = @_;

	return run($sql, node => $standby);
}

#
# everything that reads
#

# A key and a job of a slot below 512 each, and one of each above it.
my ($lower, $higher) = split /\|/, run(
	q{SELECT min(i) FILTER (WHERE idem_slot(i::text) < 512), min(i) FILTER (WHERE idem_slot(i::text) >= 512)
		FROM generate_series(1, 100) AS i});

run(q{SELECT idem_shard_set('{[0,1024)}', number => 0)});

my %job = map { $_ => run("SELECT job_id FROM idem_enqueue('q', key => '$_')") } $lower, $higher;

run(qq{
	SELECT idem_claim('$lower'), idem_finish('$lower', '"result"');
	SELECT idem_claim('$higher'), idem_finish('$higher', '"other"');
	SELECT idem_lease('leased', '1 hour', worker => 'w 1');
	SELECT idem_queue_set('q', owner => current_user::regrole)});
$primary->wait_for_catchup($standby);

# Statistics and the state of the worker are those of each server.
my @own = qw(checks checks_server checks_cleanup checks_replication health stats queue_stats queue_latency
  queue_latency_buckets worker_status);
my @views = split /\n/, run(q{SELECT format('%I.%I', schemaname, viewname) FROM pg_views WHERE schemaname IN ('idem', 'idem_internal') ORDER BY 1});

foreach my $name (@views)
{
	my $read = "SELECT v::text FROM $name AS v ORDER BY 1";
	my ($view) = $name =~ /(\w+)$/;

	is(sqlstate($standby, $read), '00000', "K13: $name can be read on a replica");
	next if $view =~ /^(?:cleanup_progress|report_hours)$/ || grep { $_ eq $view } @own;
	is(without_clock(on_standby($read)), without_clock(run($read)), "K13: $name: and shows what the primary shows");
}

# Ages differ from call to call.
sub without_clock
{
	my ($text) = @_;

	return $text =~ s/\d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d)?/time/gr =~ s/\d+(?:\.\d+)? (?:ms|s)\b/time/gr;
}

# Poolers go by the volatility of a function (122_pgpool.pl): only those that read are not volatile.
is( run(q{
		SELECT string_agg(proname, ' ' ORDER BY proname) FROM pg_proc
		 WHERE proname ~ '^idem_' AND proname !~ '^idem_report' AND provolatile <> 'v'}),
	'idem_citus_table idem_current_job idem_get idem_holder_fix idem_holder_words idem_job idem_job_by_key idem_key_hash idem_slot idem_version'
	  . ' idem_visible idem_visible_literal idem_visible_name',
	'no function that writes is stable or immutable');

is( on_standby(
		qq{SELECT status, result FROM idem_get('$lower');
		   SELECT status, worker FROM idem_get('leased');
		   SELECT state, key FROM idem_job($job{$lower});
		   SELECT idem_slot('$lower') < 512, idem_slot('$higher') < 512;
		   SELECT idem_key_hash('$lower') IS NOT NULL, idem_version() IS NOT NULL;
		   SELECT slots, number FROM idem.shard;
		   SELECT queue, owner FROM idem.queues}),
	join("\n",
		'finished|"result"', 'live|w 1', "waiting|$lower", 't|f', 't|t', '{[0,1024)}|0',
		run('SELECT queue, owner FROM idem.queues')),
	'K13: idem_get, idem_job, idem_slot and others work on a replica');
is(doctor('shard map', node => $standby), 'ok', 'H1: the doctor of a replica knows the map');
is(doctor('foreign rows', node => $standby), 'ok', 'H1: and looks at the rows');
# what differs: 170_worker_standby.pl
my $verdicts = q{SELECT "check", status FROM idem_doctor() WHERE "check" NOT IN ('role', 'worker', 'last cleanup')};

is(on_standby($verdicts), run($verdicts), 'H1: the doctor of a replica finds what that of the primary finds');

is(sqlstate($standby, "SELECT $_"), '25006', "K13: $_ gives 25006 on a replica")
  foreach q{idem_shard_set('{}')}, q{idem_shard_set(NULL)}, q{idem_shard_give('{}', gen_random_uuid())}, q{idem_shard_take('{}', 0)};

# The map and foreign rows, seen by a replica.
run(q{SELECT idem_shard_set('{[0,512)}', number => 3, force => true)});
$primary->wait_for_catchup($standby);
is(sqlstate($standby, "SELECT * FROM $_"), 'ID006', "M2: $_ of another shard is refused on a replica")
  foreach "idem_get('$higher')", "idem_job($job{$higher})";
is(on_standby("SELECT status FROM idem_get('$lower'); SELECT state FROM idem_job($job{$lower})"),
	"finished\nwaiting", 'M2: its own keys and jobs can be read');
is(on_standby("SELECT idem_slot('$higher') = " . run("SELECT idem_slot('$higher')")),
	't', 'M1: idem_slot works for any key');
is(on_standby("SELECT count(*) FROM idem.key_status WHERE key = '$higher'"),
	'1', 'M2: views show all rows');
is(doctor('foreign rows', node => $standby), doctor('foreign rows'), 'H1: the doctor of a replica finds foreign rows');
isnt(doctor('foreign rows', node => $standby), 'ok', 'H1: which are there');
run(q{SELECT idem_shard_set(NULL)});
$primary->wait_for_catchup($standby);
is(on_standby("SELECT status FROM idem_get('$higher')"), 'finished', 'M4: without the map it reads all keys');

#
# no row on a replica does not mean "not done"
#

sub pause_replay
{
	$primary->wait_for_catchup($standby);
	on_standby('SELECT pg_wal_replay_pause()');
	$standby->poll_query_until('postgres', "SELECT pg_get_wal_replay_pause_state() = 'paused'")
	  or die 'replay does not pause';
	return;
}

pause_replay();
run(q{SELECT idem_claim('behind'), idem_finish('behind', '1')});
run("SELECT idem_forget('$lower')");
is( on_standby("SELECT count(*) FROM idem_get('behind'); SELECT status FROM idem_get('$lower')"),
	"0\nfinished",
	'a replica that is behind shows neither what was done nor what was forgotten');
is(claim_status($primary, q{'behind'}), 'finished|1', 'K2: the primary knows');
on_standby('SELECT pg_wal_replay_resume()');

#
# J10: how a client waits
#

run(q{
	CREATE TABLE changes (key text, n int);
	CREATE FUNCTION change(k text, n int) RETURNS text LANGUAGE sql AS $$
		INSERT INTO changes VALUES (k, n);
		SELECT outcome FROM idem_enqueue('stream', key => k) $$;
	CREATE TABLE old_rows AS SELECT i FROM generate_series(1, 1000) AS i;
	CREATE FUNCTION wait_in_a_function(lsn pg_lsn) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		WHILE pg_last_wal_replay_lsn() < lsn LOOP
			PERFORM pg_sleep(0.01);
		END LOOP;
	END $$});

my $worker = session($standby);

# The ways of the manual; each returns once the replica has replayed the position.
my %wait = (
	'polling' => sub {
		my ($lsn) = @_;

		usleep(10_000)
		  until $worker->query("SELECT pg_last_wal_replay_lsn() >= '$lsn'") eq 't';
		return 'success';
	},
	'WAIT FOR LSN' => sub {
		my ($lsn) = @_;

		return $worker->query("WAIT FOR LSN '$lsn' WITH (TIMEOUT '180s', NO_THROW)");
	});

foreach my $how (sort keys %wait)
{
  SKIP:
	{
		skip 'WAIT FOR is of PostgreSQL 19', 3 if $how ne 'polling' && !$has_wait;

		pause_replay();
		is(join(' ', map { run("SELECT change('$how', $_)") } 1 .. 3),
			'enqueued absorbed absorbed', "J1: $how: one job for three changes");

		my ($lsn) = run(q{SELECT lsn FROM idem_fetch('stream', 1, '1 min')});

		is($worker->query("SELECT count(*) FROM changes WHERE key = '$how'"),
			'0', "J10: $how: a replica that is behind has none of them");

		on_standby('SELECT pg_wal_replay_resume()');
		my $status = $wait{$how}->($lsn);

		is("$status " . $worker->query("SELECT count(*) FROM changes WHERE key = '$how'"),
			'success 3', "J10: $how: then it has all of them");
	}
}

# A replica that does not catch up in time.
SKIP:
{
	skip 'WAIT FOR is of PostgreSQL 19', 4 if !$has_wait;

	pause_replay();
	run(q{SELECT change('late', 1)});
	my $lsn = run(q{SELECT lsn FROM idem_fetch('stream', 1, '1 min')});

	is($worker->query("WAIT FOR LSN '$lsn' WITH (TIMEOUT '1ms', NO_THROW)"),
		'timeout', 'J10: WAIT FOR tells that it has not waited long enough');
	is($worker->sqlstate("WAIT FOR LSN '$lsn' WITH (TIMEOUT '1ms')"), '57014', 'J10: or raises an error');
	is($worker->sqlstate("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1; WAIT FOR LSN '$lsn'"),
		'55000', 'J10: it refuses to wait while there is a snapshot');
	$worker->query('ROLLBACK');
	is(run("WAIT FOR LSN '$lsn' WITH (NO_THROW)"), 'not in recovery', 'J10: nor on the primary');
	on_standby('SELECT pg_wal_replay_resume()');
}

# Why the manual does not wait in a function: its snapshot keeps the replica from replaying
# the removal of rows that the snapshot can see, and so from reaching the position.
pause_replay();
run('DELETE FROM old_rows');
run('VACUUM old_rows');
my $lsn = run(q{SELECT pg_current_wal_insert_lsn()});
my $startup = q{SELECT wait_event LIKE 'RecoveryConflict%' FROM pg_stat_activity WHERE backend_type = 'startup'};

$worker->send("SELECT wait_in_a_function('$lsn')");
$standby->poll_query_until('postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE 'SELECT wait_in_a_function%' AND backend_xmin IS NOT NULL})
  or die 'the function does not wait';
on_standby('SELECT pg_wal_replay_resume()');
ok($standby->poll_query_until('postgres', $startup), 'J10: a function that waits on the replica holds up the replay');
on_standby("SELECT pg_cancel_backend($worker->{pid})");
$worker->receive;
is($worker->{sqlstate}, '57014', 'J10: until it is cancelled');
is($wait{polling}->($lsn), 'success', 'J10: polling reaches the position');
$worker->quit;

#
# libpq with several hosts
#

# What the statement gives, through a connection to both servers, the first one first.
sub through_libpq
{
	my ($attrs, $sql, @nodes) = @_;
	my $connstr = sprintf 'host=%s port=%s dbname=postgres target_session_attrs=%s',
	  join(',', map { $_->host } @nodes), join(',', map { $_->port } @nodes), $attrs;
	my ($ret, $out, $err) = $primary->psql('postgres', $sql,
		connstr => $connstr, extra_params => [ '-v', 'VERBOSITY=verbose' ]);

	return $out if $ret == 0;
	return IdemTest::Session::first_sqlstate($err);
}

$primary->wait_for_catchup($standby);
is(through_libpq('any', q{SELECT status FROM idem_claim('libpq')}, $standby, $primary),
	'25006', 'K13: with target_session_attrs=any a claim reaches the replica');
is(run(q{SELECT count(*) FROM idem_get('libpq')}), '0', 'K13: and does nothing');
is(through_libpq('read-write', q{SELECT status FROM idem_claim('libpq')}, $standby, $primary),
	'claimed', 'K13: read-write finds the primary');
is( through_libpq(
		'prefer-standby', q{SELECT pg_is_in_recovery(), status FROM idem_get('leased')},
		$primary, $standby),
	't|live', 'K13: prefer-standby reads on the replica');
is(through_libpq('prefer-standby', q{SELECT idem_claim('libpq 2')}, $primary, $standby),
	'25006', 'K13: where claims are refused');
$standby->stop;
is( through_libpq(
		'prefer-standby', q{SELECT pg_is_in_recovery(), status FROM idem_get('leased')},
		$primary, $standby),
	'f|live', 'K13: and on the primary, if there is no replica');
$standby->start;
$primary->stop;
$standby->promote;
is(through_libpq('read-write', q{SELECT status FROM idem_claim('libpq')}, $primary, $standby),
	'finished', 'K2: read-write finds the new primary, where the key is finished');

$standby->stop;
log_ok($_) foreach $primary, $standby;
done_testing();
