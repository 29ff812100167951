# A2 to A4: 32 workers that wait, and 10,000 jobs in random bursts.  No job is left while a
# worker sleeps, and each is completed once.
#
# The server looks only once per hour, and a worker waits for ten minutes.  So a wake-up that
# gets lost shows as a burst that does not come to an end.
#
# A burst is a run of pgbench: enqueues of some jobs, of many, with savepoints, with rollbacks,
# with keys, for later.  Some workers wait for one queue, others for three.  They complete
# their jobs in the transaction that has fetched them or in another one, or roll back, give
# jobs back, fail, or snooze.
#
# IDEM_WAIT_JOBS: another number of jobs.  IDEM_WAIT_SEED: the seed of an earlier run.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $jobs = $ENV{IDEM_WAIT_JOBS} // 10_000;
my $seed = $ENV{IDEM_WAIT_SEED} // int(rand(2**31));
my $workers = 32;

# Longer than any job waits on a machine with other work, and shorter than a wait
my $bound = '10 s';

note "IDEM_WAIT_SEED=$seed";
srand($seed);

my $node = new_node(
	'wait_load', conf => q{
shared_preload_libraries = 'idem'
autovacuum = off
track_commit_timestamp = on
idem.cleanup = off
idem.look_after = 1h
});

run(q{
	-- each enqueue that has committed, also of a duplicate
	CREATE TABLE made (job_id bigint, xid xid, outcome text, due timestamptz);
	CREATE TABLE fetched (job_id bigint, token bigint, at timestamptz);
	CREATE TABLE done (job_id bigint);
	CREATE SEQUENCE looks;
	CREATE SEQUENCE takes;
	SELECT idem_queue_set('load ' || n, max_attempts => 1000) FROM generate_series(1, 3) AS n;

	CREATE FUNCTION make(n int, k text DEFAULT NULL, delay interval DEFAULT '0') RETURNS void
	LANGUAGE sql AS $$
		INSERT INTO made
		SELECT e.job_id, pg_current_xact_id()::xid, e.outcome, clock_timestamp() + delay
		  FROM generate_series(1, n) AS i,
			   LATERAL idem_enqueue('load ' || 1 + (i + n) % 3, key => k || i, delay => delay) AS e $$;

	CREATE FUNCTION make_many(n int) RETURNS void LANGUAGE sql AS $$
		INSERT INTO made
		SELECT e.job_id, pg_current_xact_id()::xid, e.outcome, clock_timestamp()
		  FROM idem_enqueue_many('load ' || 1 + n % 3, array_fill('1'::jsonb, ARRAY[n])) AS e $$;

	-- in a block whose subtransaction rolls back
	CREATE FUNCTION make_in_vain(n int) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM make(n, 'in vain');
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
		PERFORM make(1);
	END $$;

	CREATE FUNCTION take(q text, batch int, lease interval, OUT ids bigint[], OUT tokens bigint[])
	LANGUAGE sql AS $$
		SELECT nextval('looks');
		WITH f AS (
			INSERT INTO fetched
			SELECT f.job_id, f.token, clock_timestamp() FROM idem_fetch(q, batch, lease) AS f
			RETURNING job_id, token, nextval('takes'))
		SELECT coalesce(array_agg(job_id), '{}'), coalesce(array_agg(token), '{}') FROM f $$;

	CREATE FUNCTION complete(ids bigint[], tokens bigint[]) RETURNS void LANGUAGE sql AS $$
		INSERT INTO done SELECT job_id FROM idem_complete_many(ids, tokens) AS c
		 WHERE c.status = 'completed' $$;
});

#
# the workers
#

my %work = (
	'in a transaction' => q{
BEGIN;
SELECT ids, tokens FROM take(':queue', :batch, NULL) \gset
SELECT complete(':ids', ':tokens');
END;
},
	'leased' => q{
SELECT ids, tokens FROM take(':queue', :batch, '1 h') \gset
SELECT complete(':ids', ':tokens');
},
	'not completed' => q{
SELECT ids, tokens FROM take(':queue', :batch, NULL) \gset
},
	'rolled back' => q{
BEGIN;
SELECT ids, tokens FROM take(':queue', :batch, NULL) \gset
SELECT complete(':ids', ':tokens');
ROLLBACK;
},
	'rolled back to a savepoint' => q{
BEGIN;
SAVEPOINT a;
SELECT ids, tokens FROM take(':queue', :batch, NULL) \gset
ROLLBACK TO a;
END;
},
	'failed' => q{
SELECT ids, tokens FROM take(':queue', :batch, '1 h') \gset
SELECT idem_fail(i, t, 'failed', retry_in => '5 ms') FROM unnest(':ids'::bigint[], ':tokens'::bigint[]) AS u (i, t);
},
	'snoozed' => q{
SELECT ids, tokens FROM take(':queue', :batch, '1 h') \gset
SELECT idem_snooze(i, t, '5 ms') FROM unnest(':ids'::bigint[], ':tokens'::bigint[]) AS u (i, t);
});
my %weight = ('in a transaction' => 6, leased => 6);

sub write_script
{
	my ($name, $text) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir() . "/$name.sql";

	append_to_file($file, $text);
	return $file;
}

sub pgbench
{
	return (
		$node->installed_command('pgbench'), '--no-vacuum',
		'--host' => $node->host,
		'--port' => $node->port,
		'--jobs=2', '--random-seed=' . int(rand(2**31)),
		@_, 'postgres');
}

# Half of the workers wait for one queue each, the others for all three.
my %wait = (
	one => q{\set number 1 + :client_id % 3
CALL idem_wait('load :number', '10 min') \gset},
	any => q{CALL idem_wait_any('{load 3,load 1,load 2}', '10 min') \gset});

sub start_workers
{
	my ($name) = @_;
	my $number = 0;
	my @scripts;
	my $log = '';

	foreach my $how (sort keys %work)
	{
		my $weight = $weight{$how} // 1;
		my $text = $work{$how};

		$text =~ s/:queue/load :number/g if $name eq 'one';
		push @scripts,
		  '--file' => write_script("$name " . ++$number,
			"\\set batch random(1, 3)\n$wait{$name}\n\\if :ready\n$text\\endif\n") . "\@$weight";
	}
	local $ENV{PGAPPNAME} = 'worker';
	return IPC::Run::start(
		[ pgbench('--client=' . $workers / 2, '--transactions=1000000000', @scripts) ],
		'>&', \$log);
}

my @runs = map { start_workers($_) } 'one', 'any';

#
# the bursts
#

my @producers = (
	'SELECT make(:n);',
	'BEGIN; SELECT make(:n); SAVEPOINT a; SELECT make(:n); ROLLBACK TO a; SELECT make(1); END;',
	'BEGIN; SELECT make(:n); ROLLBACK;',
	'SELECT make_in_vain(:n);',
	"SELECT make(:n, 'key');",
	"BEGIN; SELECT make(:n, 'key'); SELECT make(:n, 'key'); END;",
	"BEGIN; SAVEPOINT a; SELECT make(:n, 'key'); ROLLBACK TO a; END;",
	"SELECT make(:n, delay => :d * interval '1 ms');",
	'SELECT make_many(:n * 5);');
my $number = 0;
my @producer_scripts;

push @producer_scripts,
  '--file' => write_script('producer ' . ++$number, "\\set n random(1, 10)\n\\set d random(1, 100)\n$_\n")
  foreach @producers;
my $bursts = 0;

wait_until_asleep($node, $workers);
while (run('SELECT count(DISTINCT job_id) FROM made') < $jobs)
{
	my $log = '';

	IPC::Run::run([ pgbench('--client=4', '--transactions=' . (1 + int(rand(20))), @producer_scripts) ],
		'>&', \$log);
	if ($? != 0)
	{
		fail('the producers have seen no error');
		diag($log);
	}
	$bursts++;
	$node->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.jobs')
	  or last;
}
is(run('SELECT count(*) FROM idem.jobs'), '0', 'A2: each burst comes to an end; no job is left')
  || diag(
	run(q{SELECT state, count(*) FROM idem.job_status GROUP BY 1}),
	run(q{SELECT wait_event, count(*) FROM pg_stat_activity WHERE application_name = 'worker' GROUP BY 1}));
wait_until_asleep($node, $workers);
pass('A2: all workers are there, and sleep');
eval { $_->kill_kill } foreach @runs;
$node->poll_query_until('postgres',
	q{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'worker'})
  or die 'the workers do not end';

#
# what must hold in the end
#

note "$bursts bursts, " . run(q{
	SELECT string_agg(n || ' ' || outcome, ', ') FROM (
		SELECT outcome, count(*) AS n FROM made GROUP BY outcome) AS m});
note 'fetches, and jobs fetched: ' . run(q{SELECT l.last_value, t.last_value FROM looks AS l, takes AS t});

is( run(q{
		SELECT count(*), min(coalesce(m.job_id, d.job_id)) FROM
			(SELECT DISTINCT job_id FROM made) AS m
			FULL JOIN (SELECT job_id, count(*) AS n FROM done GROUP BY job_id) AS d USING (job_id)
		 WHERE m.job_id IS NULL OR d.n IS DISTINCT FROM 1}),
	'0|', 'each job was completed once, and no other');

# From the last enqueue that the first fetch has waited for to this fetch
run(q{
	CREATE TABLE waited AS
	SELECT job_id, f.at - max(greatest(pg_xact_commit_timestamp(m.xid), m.due)) AS waited
	  FROM (SELECT job_id, min(at) AS at FROM fetched GROUP BY job_id) AS f JOIN made AS m USING (job_id)
	 WHERE pg_xact_commit_timestamp(m.xid) <= f.at
	 GROUP BY job_id, f.at});
note 'time from commit to fetch, in ms: ' . run(q{
	SELECT 'p50 ' || round(1000 * extract(epoch FROM percentile_disc(0.5) WITHIN GROUP (ORDER BY waited)), 2)
		|| ', p99 ' || round(1000 * extract(epoch FROM percentile_disc(0.99) WITHIN GROUP (ORDER BY waited)), 2)
		|| ', max ' || round(1000 * extract(epoch FROM max(waited)), 2) FROM waited});
is(run("SELECT count(*) FROM waited WHERE waited > '$bound'"), '0', "A2: no job has waited for $bound");
cmp_ok(run('SELECT count(*) FROM waited'), '>=', $jobs, 'of all jobs');

$node->stop;
log_ok($node);
done_testing();
