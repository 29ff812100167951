# Jobs and a streaming replica.
#
# J10: fetch returns a position in the WAL.  A replica that has replayed up to
# there has everything that every absorbed enqueue has committed; one that has
# not may lack it.  K13: what writes is refused on a standby, reading works.
#
# Then a failover that loses the last transactions.  Jobs go on; the tokens that
# the new primary hands out are higher than all before, and those of the lost
# primary complete nothing, although the new one gives the same number to another
# job (J11).

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemFailover;
use IdemTest;
use List::Util qw(max min);
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = new_node(
	'primary',
	init => { allows_streaming => 1 },
	conf => "autovacuum = off\n");

$primary->safe_psql(
	'postgres', q{
	CREATE TABLE changes (n bigint GENERATED ALWAYS AS IDENTITY, key text, job_id bigint);

	-- a change of the key, and a job for it
	CREATE FUNCTION change(k text) RETURNS text LANGUAGE sql AS $$
		INSERT INTO changes (key, job_id)
		SELECT k, e.job_id FROM idem_enqueue('q', key => k) AS e
		RETURNING job_id::text $$;

	-- Waits until this server has replayed so much, and then counts the changes
	-- that name the job: a separate statement, so with a newer snapshot.
	CREATE FUNCTION changes_at(job bigint, lsn pg_lsn) RETURNS bigint
	LANGUAGE plpgsql AS $$
	BEGIN
		WHILE pg_last_wal_replay_lsn() < lsn LOOP
			NULL;
		END LOOP;
		RETURN (SELECT count(*) FROM changes AS c WHERE c.job_id = job);
	END $$;
});

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

my $on_primary = session($primary);
my $on_standby = session($standby);
my $onlooker = session($primary);

sub changes_of
{
	my ($node, $key) = @_;

	return $node->safe_psql('postgres',
		"SELECT count(*) FROM changes WHERE key = '$key'");
}

sub reached
{
	my ($lsn) = @_;

	return $standby->safe_psql('postgres',
		"SELECT pg_last_wal_replay_lsn() >= '$lsn'");
}

#
# J10, step by step
#

my $insert_lsn = 'SELECT pg_current_wal_insert_lsn()';
my $alone = 0;    # rounds in which no other session wrote while the replica caught up

foreach my $round (1 .. 10)
{
	my $leased = $round % 2;
	my $key = "round $round";
	my $absorbed = 2 + $round;
	my $what = $leased ? 'leased' : 'in a transaction';

	my $job = $primary->safe_psql('postgres', "SELECT change('$key')");
	$primary->wait_for_catchup($standby);
	$standby->safe_psql('postgres', 'SELECT pg_wal_replay_pause()');
	$standby->poll_query_until('postgres',
		"SELECT pg_get_wal_replay_pause_state() = 'paused'")
	  or die 'replay does not pause';

	my @jobs = split /\n/,
	  $primary->safe_psql(
		'postgres', join ';',
		map {
			# one that does not wait for the disk
			my $off = $_ == $absorbed ? 'SET synchronous_commit = off; ' : '';

			"$off BEGIN; SELECT change('$key'); COMMIT"
		} 1 .. $absorbed);
	my $committed = $onlooker->query($insert_lsn);

	is("@jobs", join(' ', ($job) x $absorbed),
		"J1: $key: $absorbed enqueues are absorbed");

	# others, after that, which wait for the disk
	if ($round % 4 < 2)
	{
		$primary->safe_psql('postgres', "SELECT change('other $_')") foreach 1 .. 3;
	}

	my $lease = $leased ? "'1 min'" : 'NULL';

	$on_primary->query('BEGIN') unless $leased;
	my ($id, $token, $lsn) = split /\|/,
	  $on_primary->query(
		"SELECT job_id, token, lsn FROM idem_fetch('q', 1, $lease)");
	my $after = $onlooker->query($insert_lsn);

	is($id, $job, "J10: $key: the job is fetched $what");
	is( $primary->safe_psql(
			'postgres', "SELECT '$lsn'::pg_lsn BETWEEN '$committed' AND '$after'"
		),
		't',
		"J10: $key: lsn lies after all that was absorbed, and not ahead");
	is(reached($lsn), 'f', "J10: $key: a replica that is behind has not reached lsn");
	is(changes_of($standby, $key), '1', "J10: $key: and lacks what was absorbed");

	$standby->safe_psql('postgres', 'SELECT pg_wal_replay_resume()');
	is( $on_standby->query("SELECT changes_at($job, '$lsn')"),
		$absorbed + 1,
		"J10: $key: at lsn the replica has what was absorbed ($what)");
	$alone++ if !$leased && $onlooker->query($insert_lsn) eq $after;

	$on_primary->query("SELECT idem_complete($id, $token)");
	$on_primary->query('COMMIT') unless $leased;
	$primary->safe_psql(
		'postgres', q{
		SELECT count(idem_cancel(job_id)) FROM idem.jobs WHERE queue = 'q'});
}

# Changes of an open transaction are sent when another transaction commits, or
# if fetch sees to it.
cmp_ok($alone, '>', 0,
	'J10: the replica reaches lsn while no other session writes');

#
# J10, under load: the same with enqueues that go on all the time
#

my $enqueue = q{
\set k random(1, 3)
BEGIN;
SELECT change('load ' || :k);
\if random(1, 4) = 1
ROLLBACK;
\else
COMMIT;
\endif
};
my $producer = fork // die "could not fork: $!";

if ($producer == 0)
{
	my $good = pgbench_run(
		$primary, [ '--client=4', '--jobs=1', '--transactions=2000' ],
		[ [ $enqueue, 1 ] ]);

	POSIX::_exit($good ? 0 : 1);
}

END
{
	my $status = $?;

	kill 'KILL', $producer if $producer;
	$? = $status;
}

my ($rounds, $seen, @wrong) = (0, 0);

until (waitpid($producer, POSIX::WNOHANG()) == $producer)
{
	my $leased = $rounds % 2;
	my $lease = $leased ? "'1 min'" : 'NULL';

	$on_primary->query('BEGIN') unless $leased;
	my ($id, $token, $lsn) = split /\|/,
	  $on_primary->query(
		"SELECT job_id, token, lsn FROM idem_fetch('q', 1, $lease)");

	if (defined $id)
	{
		# no more can be absorbed by a job that is fetched
		my $there = $on_primary->query(
			"SELECT count(*) FROM changes WHERE job_id = $id");
		my $at_lsn = $on_standby->query("SELECT changes_at($id, '$lsn')");

		push @wrong, "job $id: $at_lsn of $there" if $at_lsn ne $there;
		$rounds++;
		$seen += $there;
		$on_primary->query("SELECT idem_complete($id, $token)");
	}
	$on_primary->query('COMMIT') unless $leased;
}
my $producer_status = $?;

$producer = undef;
is($producer_status, 0, 'J10: no producer has seen an error');
note "$rounds jobs fetched beside the load, $seen enqueues";
cmp_ok($rounds, '>', 5, 'J10: jobs were fetched beside the load');
cmp_ok($seen, '>', $rounds, 'J10: which had absorbed enqueues');
is(join(', ', @wrong), '',
	'J10: at lsn the replica had all that the fetched jobs had absorbed');
$primary->safe_psql(
	'postgres', q{
	SELECT count(idem_cancel(job_id)) FROM idem.jobs WHERE queue = 'q'});

#
# jobs of every kind, on a standby
#

$primary->safe_psql(
	'postgres', q{
	SELECT idem_queue_set('kept', keep => '1 day');
	SELECT idem_queue_set('declared', lease => '1 min');
	SELECT idem_pause('paused')});
my %job = map { split /\|/ } split /\n/,
  $primary->safe_psql(
	'postgres', q{
	SELECT 'waiting', job_id FROM idem_enqueue('states', '{"a": 1}', 'waiting');
	SELECT 'scheduled', job_id FROM idem_enqueue('states', delay => '1 hour');
	SELECT 'leased', job_id FROM idem_enqueue('leases', key => 'leased');
	SELECT 'expired', job_id FROM idem_enqueue('leases', key => 'expired');
	SELECT 'done', job_id FROM idem_enqueue('kept', key => 'done',
		dedup => 'until_expired', key_ttl => '1 hour');
	SELECT 'dead', job_id FROM idem_enqueue('dead')});
my %token;

sub take
{
	my ($node, $queue, $lease) = @_;
	my ($id, $token) = split /\|/,
	  $node->safe_psql('postgres',
		"SELECT job_id, token FROM idem_fetch('$queue', 1, '$lease', 'w 1')");

	return ($id // 0, $token // 0);
}

foreach my $fetched (
	[ 'leased', 'leases', '1 hour' ],
	[ 'expired', 'leases', '1 microsecond' ],
	[ 'done', 'kept', '1 hour' ],
	[ 'dead', 'dead', '1 hour' ])
{
	my ($name, $queue, $lease) = @$fetched;
	my $id;

	($id, $token{$name}) = take($primary, $queue, $lease);
	is($id, $job{$name}, "$name: the job is fetched");
}
$primary->safe_psql(
	'postgres', qq{
	SELECT idem_complete($job{done}, $token{done}, '"result"');
	SELECT idem_fail($job{dead}, $token{dead}, 'given up', dead => true)});
$primary->wait_for_catchup($standby);

my @writers = (
	q{idem_enqueue('states')},
	q{idem_enqueue('states', key => 'new')},
	q{idem_enqueue('states', key => 'waiting')},
	q{idem_enqueue('states', key => 'waiting', on_duplicate => 'replace')},
	q{idem_enqueue('leases', key => 'leased', dedup => 'until_executed')},
	q{idem_enqueue('kept', key => 'done', dedup => 'until_expired', key_ttl => '1 h')},
	q{idem_enqueue_many('states', '{1, 2}', '{waiting, new}')},
	q{idem_fetch('states')},
	q{idem_fetch('states', lease => '1 min')},
	q{idem_fetch('empty')},
	q{idem_fetch_any('{empty, states}')},
	q{idem_drain('states', 'jsonb_typeof')},
	qq{idem_complete($job{leased}, $token{leased})},
	qq{idem_complete_many('{$job{leased}}', '{$token{leased}}')},
	qq{idem_fail($job{leased}, $token{leased})},
	qq{idem_heartbeat('{$job{leased}}', '{$token{leased}}', '1 min')},
	qq{idem_progress($job{leased}, $token{leased}, '1', '1 min')},
	qq{idem_snooze($job{leased}, $token{leased}, '1 min')},
	qq{idem_cancel($job{waiting})},
	qq{idem_retry($job{dead})},
	q{idem_queue_set('declared', lease => '2 min')},
	q{idem_queue_drop('declared')},
	q{idem_pause('declared')},
	q{idem_resume('paused')},
	q{idem_cleanup()});
my $everything = q{
	SELECT j::text FROM idem.jobs AS j
	UNION ALL SELECT k::text FROM idem.job_keys AS k
	UNION ALL SELECT l::text FROM idem.job_log AS l
	UNION ALL SELECT q::text FROM idem.queues AS q ORDER BY 1};
my $before = $primary->safe_psql('postgres', $everything);

is($standby->safe_psql('postgres', $everything),
	$before, 'the standby has all jobs, with everything about them');
is(sqlstate($standby, q{CALL idem_work('states', 'jsonb_typeof')}), '25006', 'K13: idem_work gives 25006 on a standby');
foreach my $call (@writers)
{
	is(sqlstate($standby, "SELECT $call"),
		'25006', "K13: $call gives 25006 on a standby");
	is(sqlstate($primary, "BEGIN READ ONLY; SELECT $call"),
		'25006', "K13: $call gives 25006 in a read-only transaction");
}
is($primary->safe_psql('postgres', $everything),
	$before, 'K13: none of them has changed anything');

foreach my $where ([ $standby, '', 'on a standby' ],
	[ $primary, 'BEGIN READ ONLY; ', 'in a read-only transaction' ])
{
	my ($node, $begin, $what) = @$where;

	is( $node->safe_psql(
			'postgres',
			$begin . join ';',
			map { "SELECT queue, state, key, payload, result, attempt, worker, error FROM idem_job($job{$_})" }
			  sort keys %job),
		join("\n",
			'dead|dead||||1|w 1|given up',
			'kept|done|done||"result"|1|w 1|',
			'leases|expired|expired|||1|w 1|',
			'leases|running|leased|||1|w 1|',
			'states|scheduled||||0||',
			'states|waiting|waiting|{"a": 1}||0||'),
		"K13: idem_job works $what");
	is($node->safe_psql('postgres', "$begin SELECT count(*) FROM idem_job(999999999)"),
		'0', "K13: also for a job that is not there $what");
	is( $node->safe_psql(
			'postgres', qq{$begin
			SELECT queue, ready, scheduled, running, expired, dead, paused
			  FROM idem.queue_status WHERE queue <> 'q' ORDER BY queue}),
		join("\n",
			'dead|0|0|0|0|1|f', 'declared|0|0|0|0|0|f',
			'kept|0|0|0|0|0|f', 'leases|0|0|1|1|0|f',
			'paused|0|0|0|0|0|t', 'states|1|1|0|0|0|f'),
		"K13: queue_status works $what");
	is( $node->safe_psql(
			'postgres', qq{$begin
			SELECT queue, state, count(*) FROM idem.job_status
			 WHERE queue <> 'q' GROUP BY 1, 2 ORDER BY 1, 2}),
		join("\n",
			'dead|dead|1', 'kept|done|1', 'leases|expired|1',
			'leases|running|1', 'states|scheduled|1', 'states|waiting|1'),
		"K13: job_status works $what");
	is( $node->safe_psql(
			'postgres', qq{
			SET idem.clock_offset = 7200; $begin
			SELECT state FROM idem_job($job{leased});
			SELECT state FROM idem_job($job{scheduled})}),
		"expired\nwaiting",
		"K13: states follow the clock $what");
}

#
# failover that loses the last transactions
#

# a worker of jobs that the standby has, too
$primary->safe_psql('postgres',
	q{SELECT count(*) FROM generate_series(1, 4) AS i, idem_enqueue('failover', to_jsonb(i))});
my ($held, $held_token) = take($primary, 'failover', '1 hour');
my ($finished, $finished_token) = take($primary, 'failover', '1 hour');

$primary->wait_for_catchup($standby);
stop_receiving($standby);

# lost: the completion of a job, the fetch of one, and many new jobs, some of
# them fetched; the WAL is up to 32 values ahead of a sequence
$primary->safe_psql('postgres',
	"SELECT idem_complete($finished, $finished_token)");
my ($refetched, $refetched_token) = take($primary, 'failover', '1 hour');
my @lost = split /\n/,
  $primary->safe_psql('postgres',
	q{SELECT job_id FROM generate_series(1, 80) AS i, idem_enqueue('lost', to_jsonb(i))});
my %lost_token = map { split /\|/ } split /\n/,
  $primary->safe_psql('postgres',
	q{SELECT job_id, token FROM idem_fetch('lost', 100, '1 hour')});

is("@{[ sort { $a <=> $b } keys %lost_token ]}", "@lost",
	'jobs are fetched that the standby does not have');

$_->quit foreach $on_primary, $on_standby, $onlooker;
$primary->stop;
$standby->promote;

is( $standby->safe_psql(
		'postgres', qq{
		SELECT state, attempt FROM idem_job($held);
		SELECT state, attempt FROM idem_job($finished);
		SELECT state, attempt FROM idem_job($refetched);
		SELECT count(*) FROM idem.jobs WHERE queue = 'lost'}),
	"running|1\nrunning|1\nwaiting|0\n0",
	'the last transactions were lost');

# the next jobs get the numbers of those that were lost
my @new = split /\n/,
  $standby->safe_psql('postgres',
	q{SELECT job_id FROM generate_series(1, 80) AS i, idem_enqueue('new', to_jsonb(i))});
my @same = grep { exists $lost_token{$_} } @new;

cmp_ok(scalar(@same), '>', 10, 'other jobs have the numbers of the lost ones');
cmp_ok(min(@new), '>', max($held, $finished, $refetched),
	'and not those of jobs that are there');

sub answers
{
	my ($id, $token) = @_;

	return join ' ', (
		map { sqlstate($standby, "SELECT $_") } "idem_complete($id, $token)",
		"idem_fail($id, $token)",
		"idem_snooze($id, $token, '1 min')"
	  ),
	  $standby->safe_psql(
		'postgres', qq{
		SELECT string_agg(status, ' ') FROM (
			SELECT status FROM idem_complete_many('{$id}', '{$token}')
			UNION ALL
			SELECT status FROM idem_heartbeat('{$id}', '{$token}', '1 min')) AS a});
}

my $rows_before = $standby->safe_psql('postgres', $everything);

is(answers($same[0], $lost_token{ $same[0] }),
	'ID002 ID002 ID002 not_held not_held',
	'J11: a lost token is not of the new job with that number');
is(answers($refetched, $refetched_token),
	'ID002 ID002 ID002 not_held not_held',
	'J11: nor of a job whose fetch was lost');
is($standby->safe_psql('postgres', $everything),
	$rows_before, 'J11: nothing was changed by that');

my %new_token = map { split /\|/ } split /\n/,
  $standby->safe_psql('postgres',
	q{SELECT job_id, token FROM idem_fetch('new', 100, '1 hour')});
my ($again, $again_token) = take($standby, 'failover', '1 hour');

is(scalar(keys %new_token), scalar(@new), 'new jobs are fetched');
is($again, $refetched, 'J7: so is the job whose fetch was lost');
cmp_ok(
	min($again_token, values %new_token),
	'>',
	max($held_token, $finished_token, $refetched_token, values %lost_token),
	'L2: all new tokens are higher than all before');

$rows_before = $standby->safe_psql('postgres', $everything);
is( join(', ', grep { $_ ne 'ID003 ID003 ID003 stale stale' }
		  map { answers($_, $lost_token{$_}) } @same[ 0, -1 ]),
	'',
	'J11: lost tokens are stale for new jobs with their number that are fetched');
is(answers($refetched, $refetched_token),
	'ID003 ID003 ID003 stale stale',
	'J11: also for the job that was fetched again');
is($standby->safe_psql('postgres', $everything),
	$rows_before, 'J11: nothing was changed by that');

# leases that had reached the standby go on, also the one whose end was lost
is( $standby->safe_psql(
		'postgres', qq{
		SELECT status FROM idem_heartbeat('{$held}', '{$held_token}', '1 min');
		SELECT idem_complete($held, $held_token);
		SELECT idem_complete($finished, $finished_token);
		SELECT idem_complete($again, $again_token);
		SELECT status, count(*)
		  FROM idem_complete_many('{@{[ join ',', sort keys %new_token ]}}',
			  '{@{[ join ',', map { $new_token{$_} } sort keys %new_token ]}}')
		 GROUP BY status}),
	"renewed\nt\nt\nt\ncompleted|80",
	'J11: tokens that the new primary knows complete their jobs');

# dedup and history, as they were
is( $standby->safe_psql(
		'postgres', q{
		SELECT outcome, job_id FROM idem_enqueue('states', key => 'waiting');
		SELECT outcome FROM idem_enqueue('leases', key => 'leased', dedup => 'until_executed');
		SELECT outcome, result FROM idem_enqueue('kept', key => 'done',
			dedup => 'until_expired', key_ttl => '1 h');
		SELECT idem_retry(} . $job{dead} . q{);
		SELECT attempt FROM idem_fetch('dead', lease => '1 min');
		SELECT count(*) FROM idem_fetch('paused');
		SELECT idem_resume('paused')}),
	join("\n", "absorbed|$job{waiting}", 'absorbed', 'done|"result"',
		't', '1', '0', 't'),
	'J1, J4, J5: keys, history and queues are there after promotion');

amcheck_ok($standby, 'after promotion', 'idem.jobs', 'idem.job_keys',
	'idem.job_log');
$standby->stop;
log_ok($_) foreach $primary, $standby;
done_testing();
