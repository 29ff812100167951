# The background worker in bad times.
#
#   W2  it waits for no session, and DDL waits for it for one batch at most
#   W7  what fails is logged once when it begins and once when it is over,
#       is tried again later and later, and recovers by itself
#
# Bugs of other projects (doc/peers.md section 4) that this test looks for:
#   pg_cron#264, #69; timescaledb#3469   ALTER and DROP EXTENSION against the
#                                        worker: deadlock, crash
#   timescaledb#8543, #7602              logs until the disk is full

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# WAL in small files: there will be a limit on the size of files
my $node = new_node(
	'worker_trouble',
	init => { extra => [ '--no-locale', '--encoding=UTF8', '--wal-segsize=1' ] },
	conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
autovacuum = off
wal_level = replica
max_wal_senders = 2
});

#
# H1: a launcher that does not go on; see below
#

my $other = new_node('worker_stopped', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1
});
my $stopped = $other->safe_psql('postgres', 'SELECT launcher_pid FROM idem.worker_status');

kill 'STOP', $stopped;

#
# W7: a lock that stays; see below
#

new_database('stuck');
add_expired($node, 10, db => 'stuck');

my $blocker = session($node, db => 'stuck');

$blocker->query('BEGIN; LOCK TABLE idem.keys IN SHARE MODE');
cleanup_round($node);

#
# W2: another session has locked a table
#

new_database('busy');

# something to be removed from each table
my $expired = q{
	SET idem.clock_offset = -3600;
	SELECT idem_claim('gone', ttl => '1 min');
	SELECT idem_queue_set('gone', keep => '1 min', max_attempts => 1);
	SELECT idem_enqueue('gone', key => 'k', dedup => 'until_expired', key_ttl => '1 min');
	SELECT idem_complete(job_id, token) FROM idem_fetch('gone', 1, '1 min');
	SELECT idem_enqueue('gone');
	SELECT idem_fetch('gone', 1, '1 min');
	RESET idem.clock_offset};
my $left = q{
	SELECT (SELECT count(*) FROM idem.keys),
		   (SELECT count(*) FROM idem.job_keys),
		   (SELECT count(*) FROM idem.job_log WHERE state = 'done'),
		   (SELECT count(*) FROM idem.jobs)};
my $s = session($node, db => 'busy');
my @tables = (
	[ keys => '1|0|0|0' ],
	[ job_keys => '0|1|0|0' ],

	# the history, where dead jobs are written
	[ job_log => '0|0|1|1' ],
	[ jobs => '0|0|0|1' ],
	[ queues => '0|0|0|1' ]);
my $offset = -s $node->logfile;

foreach my $table (@tables)
{
	my ($name, $rest) = @$table;

	run($expired, db => 'busy');
	$s->query("BEGIN; LOCK TABLE idem.$name IN ACCESS EXCLUSIVE MODE");
	cleanup_round($node);
	is($s->query($left), $rest,
		"W2: idem.$name is locked: the worker has come and gone, and has cleaned the others");
	is(progress('busy', 'phase, last_error'), 'locked|', "W2: idem.$name: cleanup_progress says so");
	$s->query('COMMIT');
	if ($name eq 'keys')
	{
		ok( $node->poll_query_until('busy', $left, '0|0|0|0'),
			'W2: it soon comes again by itself');
	}
	cleanup_round($node, 'busy');
	is(run($left, db => 'busy'), '0|0|0|0', "W2: idem.$name: all is removed afterwards");
}

#
# W2: a session that waits for a lock comes first
#

my $ddl = session($node, db => 'busy');

run($expired, db => 'busy');
$s->query('BEGIN; SELECT count(*) FROM idem.keys');
$ddl->send('BEGIN; LOCK TABLE idem.keys IN ACCESS EXCLUSIVE MODE');
wait_until_blocked($node, $ddl, 'relation');
cleanup_round($node);
is($s->query($left), '1|0|0|0',
	'W2: a lock on idem.keys is waited for: the worker does not get in between');
$s->query('COMMIT');
$ddl->receive;
is($ddl->{sqlstate}, '00000', 'W2: the waiting session has the lock');
cleanup_round($node);
is($ddl->query($left), '1|0|0|0', 'W2: the worker waits for no session');
$ddl->query('ROLLBACK');
cleanup_round($node, 'busy');
is(run($left, db => 'busy'), '0|0|0|0', 'W2: all is removed afterwards');
is(progress('busy', 'phase'), 'idle', 'W2: cleanup_progress says so');
is(cleanup_logged('busy', $offset), '0 0', 'W7: an occasional lock is not logged');
$_->quit foreach $s, $ddl;

#
# W2: synchronous replication, and there is no standby
#

run('CREATE TABLE t (i integer)', db => 'busy');
add_expired($node, 10, db => 'busy');
run(q{ALTER SYSTEM SET synchronous_standby_names = 'nowhere'});
$node->reload;

# others wait for it, from some moment after the reload on
my $waits = qq{EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')};
my $inserts = 0;

$s = session($node, db => 'busy');
do
{
	$s->receive if $inserts++;
	$s->send("INSERT INTO t VALUES ($inserts)");
	$node->poll_query_until('busy',
		"SELECT $waits OR EXISTS (SELECT FROM t WHERE i = $inserts)")
	  or die 'the session neither waits nor commits';
} until run("SELECT $waits") eq 't';
cleanup_round($node, 'busy');
is(run('SELECT count(*) FROM idem.keys', db => 'busy'),
	'0', 'W2: the worker does not wait for a standby');
run('ALTER SYSTEM RESET synchronous_standby_names');
$node->reload;
$s->receive;
$s->quit;

#
# W2: DROP, CREATE and ALTER EXTENSION, and other DDL, with the worker at work
# there (pg_cron#264, #69; timescaledb#3469)
#

my $loops = 36;
my $backlog = 3000;

run('CREATE DATABASE churn');
run('ALTER DATABASE churn SET idem.cleanup_batch_size = 1');
run('CREATE ROLE keeper');
run(q{
	CREATE PROCEDURE wait_for_worker() LANGUAGE plpgsql AS $$ BEGIN
		PERFORM pg_reload_conf();
		FOR i IN 1 .. 18000 LOOP
			PERFORM pg_stat_clear_snapshot();
			IF EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem cleanup'
						  AND datname = 'churn' AND query LIKE 'idem cleanup: %') THEN
				RETURN;
			END IF;
			PERFORM pg_sleep(0.01);
		END LOOP;
		RAISE 'the worker does not come';
	END $$}, db => 'churn');

my @others = (
	'BEGIN; DROP EXTENSION idem; ROLLBACK',
	'ALTER TABLE idem.keys OWNER TO keeper',
	'VACUUM FULL idem.keys',
	'REINDEX TABLE idem.keys',
	'BEGIN; TRUNCATE idem.keys; ROLLBACK',
	'REINDEX INDEX CONCURRENTLY idem.keys_expires_at_idx');
my ($errors, $busy) = ('', 0);

$offset = -s $node->logfile;
foreach my $i (0 .. $loops - 1)
{
	my ($ret, $out, $err) = $node->psql(
		'churn', qq{
		CREATE EXTENSION idem;
		SET idem.clock_offset = -100000;
		SELECT count(*) FROM idem_claim_many(
			ARRAY(SELECT 'expired ' || n FROM generate_series(1, $backlog) AS n), ttl => '1 s');
		SELECT idem_queue_set('q', keep => '1 s', max_attempts => 1);
		SELECT count(*) FROM idem_enqueue_many('q', array_fill('1'::jsonb, ARRAY[$backlog]));
		SELECT count(idem_complete(job_id, token)) FROM idem_fetch('q', $backlog / 2, '1 s');
		SELECT count(*) FROM idem_fetch('q', $backlog / 2, '1 s');
		CALL wait_for_worker();
		SET client_min_messages = warning; -- there is nothing to update to
		ALTER EXTENSION idem UPDATE;
		RESET client_min_messages;
		CALL wait_for_worker();
		$others[$i % @others];
		CALL wait_for_worker();
		SELECT 'left', count(*) > 0 FROM idem.keys;
		DROP EXTENSION idem;
	},
		timeout => $PostgreSQL::Test::Utils::timeout_default);

	$errors .= "$i: $err\n" if $ret != 0 || $err ne '';
	$busy++ if $out =~ /^left\|t$/m;
}
is($errors, '',
	"W2: $loops times CREATE, ALTER and DROP EXTENSION, and other DDL, in the middle of cleanup");
is($busy, $loops, 'W2: there was more to be removed each time');
cleanup_round($node);
is(progress('churn', 'phase'), 'not installed', 'then there is nothing to do');
is(log_count($node, qr/idem cleanup failed in database "churn": (?!a table is locked)/, $offset),
	'0', 'W7: and nothing was wrong');
is(log_count($node, qr/deadlock|lock timeout/, $offset), '0', 'W2: no deadlock');
run('DROP DATABASE churn');

#
# W7: an error
#

new_database('broken');
run(q{SELECT idem_claim('live')}, db => 'broken');
$offset = -s $node->logfile;

# tried again by itself, later each time
add_expired($node, 10, db => 'broken');
run('DROP INDEX idem.keys_expires_at_idx', db => 'broken');
cleanup_round($node, 'broken');

my @times = (progress('broken', 'last_error_at'));

foreach (1 .. 2)
{
	$node->poll_query_until('postgres',
		"SELECT last_error_at > '$times[-1]' FROM idem.cleanup_progress WHERE datname = 'broken'")
	  or die 'it is not tried again';
	push @times, progress('broken', 'last_error_at');
}
is( run(qq{
		SELECT '$times[1]'::timestamptz - '$times[0]' >= interval '0.9 s',
			   '$times[2]'::timestamptz - '$times[1]' >= interval '1.9 s'}),
	't|t', 'W7: what fails is tried again, not at once, and later the next time');
run('CREATE INDEX keys_expires_at_idx ON idem.keys (expires_at)', db => 'broken');
ok( $node->poll_query_until('broken', q{SELECT count(*) = 1 FROM idem.keys}),
	'W7: it recovers by itself when the reason is gone');
is(progress('broken', 'phase, last_error IS NULL'),
	'idle|f', 'W7: then it is not failing any more, and the last error can still be seen');
is(cleanup_logged('broken', $offset), '1 1', 'W7: one line in the log when it begins, one when it is over');

# many times
add_expired($node, 10, db => 'broken');
run('DROP INDEX idem.keys_expires_at_idx', db => 'broken');
$offset = -s $node->logfile;
run($expired, db => 'broken');
cleanup_round($node, 'broken') foreach 1 .. 12;
is(run($left, db => 'broken'), '12|0|0|0',
	'W7: a table that cannot be cleaned does not keep the others from it');
is(cleanup_logged('broken', $offset), '1 0', 'W7: one line in twelve rounds (timescaledb#8543, #7602)');
is(log_count($node, qr/(?:LOG|WARNING|ERROR|FATAL): .*idem(?!.*"stuck")/, $offset),
	'1', 'W7: and nothing else');
like( slurp_file($node->logfile, $offset),
	qr/failed in database "broken": unexpected definition of table "idem.keys"\n.*DETAIL:  The launcher tries again/,
	'W7: it says what is wrong');
is( progress('broken', 'phase, last_error, last_error_at > last_finished_at'),
	'failing|unexpected definition of table "idem.keys"|t',
	'W7: cleanup_progress shows the error');

my ($status, $detail, $fix) = split /\|/,
  doctor('last cleanup', columns => 'status, detail, fix', db => 'broken');

is($status, 'fail', 'H1: idem_doctor() reports it');
like($detail, qr/unexpected definition of table "idem.keys"/, 'H1: and shows the error');

# its fix shows the whole error, whose hint has the remedy
my ($ret, $out, $err) = $node->psql('broken', $fix);

like($err, qr/HINT:  Run (CREATE INDEX CONCURRENTLY .*)\./, 'H1: its fix shows what to do');
my ($cure) = $err =~ /HINT:  Run (.*)\./;
run($cure, db => 'broken');
cleanup_round($node, 'broken') foreach 1 .. 3;
is(run('SELECT key FROM idem.keys', db => 'broken'), 'live', 'W7: after that cleanup goes on');
is(cleanup_logged('broken', $offset), '1 1', 'W7: it works again: one line in three rounds');
is( doctor('last cleanup', db => 'broken'),
	'ok', 'H1: idem_doctor() says ok');

# the same again is a new event
run('DROP INDEX idem.job_log_expires_at_idx', db => 'broken');
cleanup_round($node, 'broken');
is(cleanup_logged('broken', $offset), '2 1', 'W7: the next error is logged again');
run('CREATE INDEX ON idem.job_log (expires_at)', db => 'broken');
cleanup_round($node, 'broken');
is(cleanup_logged('broken', $offset), '2 2', 'W7: and its end');

#
# W7: the disk is full.  Dead jobs are written to the history, and the file
# of that cannot grow: processes that are started from now on get a limit, as
# with ulimit -f.
#

SKIP:
{
	my $jobs = 100;
	my ($postmaster) = split /\n/, slurp_file($node->data_dir . '/postmaster.pid');
	my @prlimit = ('prlimit', '--pid', $postmaster);

	skip 'prlimit is not there', 1 unless eval { run_log([ @prlimit, '--fsize' ]) };

	new_database('crowded');
	run(qq{
		CREATE FUNCTION payloads(n integer) RETURNS jsonb[] LANGUAGE sql AS \$\$
			SELECT array_agg((SELECT to_jsonb(string_agg(md5(concat(i, j, random())), ''))
								FROM generate_series(1, 250) AS j WHERE i > 0))
			  FROM generate_series(1, n) AS i \$\$;
		SELECT idem_queue_set('done', keep => '1 day');
		SELECT count(*) FROM idem_enqueue_many('done', payloads(200));
		SELECT count(idem_complete(job_id, token)) FROM idem_fetch('done', 200, '1 day')}, db => 'crowded');
	run('VACUUM FULL idem.jobs', db => 'crowded');
	run(qq{
		SET idem.clock_offset = -3600;
		SELECT count(*) FROM idem_enqueue_many('spent', payloads($jobs), max_attempts => 1);
		SELECT count(*) FROM idem_fetch('spent', $jobs, '1 min');
		CREATE TABLE before AS SELECT job_id, payload FROM idem.jobs;
		CHECKPOINT}, db => 'crowded');
	run('ALTER DATABASE crowded SET idem.cleanup_batch_size = 10');

	my $where = q{
		SELECT count(j.job_id), count(l.job_id),
			   count(*) FILTER (WHERE (j.job_id IS NULL) = (l.job_id IS NULL)),
			   count(*) FILTER (WHERE b.payload <> coalesce(j.payload, l.payload))
		  FROM before AS b
		  LEFT JOIN idem.jobs AS j USING (job_id)
		  LEFT JOIN idem.job_log AS l USING (job_id)};

	is(run($where, db => 'crowded'), "$jobs|0|0|0", 'there are jobs without attempts');

	my $limit = 256 * 1024 + run(q{
		SELECT pg_relation_size(reltoastrelid) FROM pg_class WHERE oid = 'idem.job_log'::regclass}, db => 'crowded');

	cmp_ok($limit, '>', 1024 * 1024, 'WAL is not affected by the limit');
	$offset = -s $node->logfile;
	run_log([ @prlimit, "--fsize=$limit:" ]) or die 'no limit';
	cleanup_round($node, 'crowded') foreach 1 .. 5;

	my ($live, $dead, $odd, $other) = split /\|/, run($where, db => 'crowded');

	cmp_ok($dead, '>', 0, 'W7: disk full: some jobs found room in the history');
	cmp_ok($live, '>', 0, 'W7: disk full: others did not');
	is("$dead $odd $other", ($jobs - $live) . ' 0 0',
		'W7: disk full: each job is in one place, as it was');
	like(progress('crowded', 'phase, last_error'),
		qr/^failing\|could not extend file "[^"]+".*: File too large$/,
		'W7: disk full: cleanup_progress shows it');
	like( doctor('last cleanup', columns => 'status, detail', db => 'crowded'),
		qr/^fail\|failing, last at .*: could not extend file/,
		'W7: disk full: idem_doctor() shows it');
	is(cleanup_logged('crowded', $offset), '1 0', 'W7: disk full: it is logged once');

	add_expired($node, 10, db => 'crowded');
	cleanup_round($node, 'crowded');
	is(run('SELECT count(*) FROM idem.keys', db => 'crowded') . ' ' . progress('crowded', 'phase'),
		'0 failing', 'W7: disk full: what needs no room is still removed');

	run_log([ @prlimit, '--fsize=unlimited:' ]) or die 'the limit stays';
	cleanup_round($node, 'crowded') foreach 1 .. 2;
	is(run($where, db => 'crowded'), "0|$jobs|0|0", 'W7: when there is room again cleanup goes on');
	is(progress('crowded', 'phase'), 'idle', 'W7: it is not failing any more');
	is(cleanup_logged('crowded', $offset), '1 1', 'W7: that is logged once');
	is( run(q{SELECT count(*) FROM idem.job_log WHERE state = 'done' AND payload IS NOT NULL}, db => 'crowded'),
		'200', 'what was there before is there still');
	is( run(q{
			SELECT dead FROM idem.queue_stats WHERE datname = 'crowded' AND queue = 'spent'}),
		$jobs, 'S1: each dead job is counted once, even if that took several attempts');
}

#
# W7: a lock that has been there for the whole test
#

$node->wait_for_log(qr/idem cleanup failed in database "stuck": a table is locked\n/);
cleanup_round($node) foreach 1 .. 5;
is(cleanup_logged('stuck', 0), '1 0', 'W7: a lock that stays for a minute is logged, once');
is(progress('stuck', 'phase'), 'locked', 'W7: cleanup_progress shows it');
$blocker->query('COMMIT');
$blocker->quit;
cleanup_round($node, 'stuck') foreach 1 .. 2;
is(run('SELECT count(*) FROM idem.keys', db => 'stuck'), '0', 'W7: without it cleanup goes on');
is(cleanup_logged('stuck', 0), '1 1', 'W7: and that is logged once');

#
# H1: a launcher that has been stopped for the whole test
#

my $worker_check = q{SELECT status, split_part(detail, ': ', 2) FROM idem_doctor() WHERE "check" = 'worker'};

ok( $other->poll_query_until('postgres', $worker_check, 'fail|it is stuck or stopped'),
	'H1: idem_doctor() does not say ok if the launcher does not go on');
kill 'CONT', $stopped;
ok( $other->poll_query_until('postgres',
		q{SELECT status = 'ok' FROM idem_doctor() WHERE "check" = 'worker'}),
	'H1: but if it does');
$other->stop;
log_ok($other);

#
# Settings
#

my $naptimes = qr/outside the valid range .*\(1( s)? \.\. 86400( s)?\)/;

run('CREATE ROLE app LOGIN');
foreach my $case (
	[ 'ALTER SYSTEM SET idem.cleanup_naptime = 0', '22023', $naptimes ],
	[ 'ALTER SYSTEM SET idem.cleanup_naptime = -1', '22023', $naptimes ],
	[ q{ALTER SYSTEM SET idem.cleanup_naptime = '25 h'}, '22023', $naptimes ],
	[ q{ALTER SYSTEM SET idem.cleanup_naptime = 'soon'}, '22023', qr/invalid value/ ],
	[ 'ALTER DATABASE busy SET idem.cleanup_naptime = 5', '55P02', qr/cannot be changed now/ ],
	[ 'SET idem.cleanup_batch_size = 0', '22023', qr/\(1 \.\. 100000\)/ ],
	[ 'ALTER SYSTEM SET idem.cleanup_batch_size = 100001', '22023', qr/\(1 \.\. 100000\)/ ],
	[ 'ALTER DATABASE busy SET idem.cleanup_batch_size = 0', '22023', qr/\(1 \.\. 100000\)/ ],
	[ 'ALTER DATABASE busy SET idem.cleanup_batch_size = 100001', '22023', qr/\(1 \.\. 100000\)/ ],
	[ q{ALTER DATABASE busy SET idem.cleanup_batch_size = 'many'}, '22023', qr/invalid value/ ],
	[ 'SET idem.cleanup = maybe', '22023', qr/requires a Boolean value/ ],
	[ 'ALTER DATABASE busy SET idem.cleanup = maybe', '22023', qr/requires a Boolean value/ ],
	[ 'ALTER SYSTEM SET idem.cleanup = maybe', '22023', qr/requires a Boolean value/ ],
	[ 'ALTER SYSTEM SET idem.stats_max = 99', '22023', qr/\(100 \.\. \d+\)/ ],
	[ 'ALTER SYSTEM SET idem.stats_max = 100000000', '22023', qr/\(100 \.\. \d+\)/ ],
	[ 'SET idem.stats_max = 200', '55P02', qr/cannot be changed without restarting the server/ ],
	[ 'SET idem.log_duplicates = maybe', '22023', qr/requires a Boolean value/ ])
{
	my ($sql, $state, $text) = @$case;
	my ($ret, $out, $err) = $node->psql('postgres', $sql,
		extra_params => [ '-v', 'VERBOSITY=verbose' ]);

	like($err, qr/ERROR:  $state: .*$text/, "settings: $sql is refused");
}
is(sqlstate($node, "SET $_", user => 'app'), '42501', "settings: SET $_ is for superusers")
  foreach 'idem.cleanup = off', 'idem.cleanup_batch_size = 1', 'idem.log_duplicates = on';

# in the file, too
my $conf = $node->data_dir . '/postgresql.conf';
my $good = slurp_file($conf);

add_expired($node, 10, db => 'busy');
$offset = -s $node->logfile;
$node->append_conf('postgresql.conf', "idem.cleanup_naptime = 0\nidem.cleanup_batch_size = 100001\n");
cleanup_round($node, 'busy');
like( slurp_file($node->logfile, $offset),
	qr/0 .*is outside the valid range for parameter "idem.cleanup_naptime"/,
	'settings: a wrong one in the file is logged');
is( run(q{
		SELECT count(*) FROM idem.keys; SHOW idem.cleanup_naptime; SHOW idem.cleanup_batch_size}, db => 'busy'),
	"0\n1d\n1000", 'settings: the old ones stay, and cleanup goes on');

# a setting of an extension does not keep the server from starting
$offset = -s $node->logfile;
$node->restart;
like(slurp_file($node->logfile, $offset),
	qr/WARNING:  100001 is outside the valid range for parameter "idem.cleanup_batch_size"/,
	'settings: at the start there is a warning');
is(run('SHOW idem.cleanup_naptime; SHOW idem.cleanup_batch_size'),
	"1min\n1000", 'settings: and the defaults count');
unlink $conf;
append_to_file($conf, $good);
$node->restart;

cleanup_round($node, 'busy', 'broken');
$node->stop;
log_ok($node);
done_testing();
