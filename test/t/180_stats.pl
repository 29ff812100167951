# Statistics: the counters match the answers that 16 concurrent clients got (S1), what
# a restart, a crash and a damaged file leave of them (S2), which roles see them and what
# they do not show (S3), the log of duplicates (S4), the histograms (S5); and what idem_doctor() finds on
# servers that are set up wrongly (H1).
#
# Clients record the answers that they got, in a separate transaction, so
# that what was rolled back is there, too: counted are answers.  An answer is
# noted as the names of the counters that it has to move.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = 16;
my $naptime = 3600;    # rounds begin with a reload
my $node = new_node(
	'stats',
	conf => qq{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = $naptime
idem.stats_max = 100
idem.cleanup = off
idem.log_duplicates = off
max_connections = 50
deadlock_timeout = 100ms
restart_after_crash = on
});

# All counters of the database, and of a queue: 'claims=1 replays=2', those that are not 0
sub counters
{
	my (%opt) = @_;
	my $db = $opt{db} // 'postgres';
	my $from =
	  defined $opt{queue}
	  ? "idem.queue_stats AS s WHERE s.queue = '$opt{queue}' AND"
	  : 'idem.stats AS s WHERE';

	return run(
		qq{SELECT string_agg(c.key || '=' || c.value, ' ' ORDER BY c.key COLLATE "C")
			FROM (SELECT to_jsonb(s) - '{datid,datname,queue,stats_reset}'::text[] AS j
					FROM $from s.datname = '$db') AS s,
				 jsonb_each_text(s.j) AS c
		   WHERE c.value <> '0'});
}

# everything in the views, to be compared; what is zero need not be kept
sub all_statistics
{
	my $something = q{WHERE EXISTS (SELECT FROM jsonb_each_text(
		to_jsonb(s) - '{datid,datname,queue,stats_reset}'::text[]) AS c WHERE c.value <> '0')};

	return run("SELECT * FROM idem.stats AS s $something ORDER BY datid")
	  . "\n"
	  . run("SELECT * FROM idem.queue_stats AS s $something ORDER BY datid, queue")
	  . "\n"
	  . run('SELECT * FROM idem.queue_latency WHERE count > 0 ORDER BY datid, queue, kind')
	  . "\n"
	  . run('SELECT * FROM idem.queue_latency_buckets WHERE count > 0 ORDER BY datid, queue, kind, le');
}

# the time since when is counted
sub since
{
	return run(
		q{SELECT stats_reset FROM idem.stats WHERE datname = current_database()});
}

# lines of the log of duplicates from there on: 'claim finished 0123456789abcdef'
sub duplicates
{
	my ($offset) = @_;
	my $log = slurp_file($node->logfile, $offset);

	return $log =~
	  /LOG:  (?:00000: )?idem duplicate: kind=(\w+) outcome=(\w+) key_hash=([0-9a-f]{16})$/mg;
}

#
# S1: sums under load
#

run(
	q{
	CREATE TABLE answers (queue text, answer text);

	CREATE FUNCTION counter_of(status text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
		SELECT CASE status WHEN 'claimed' THEN 'claims' WHEN 'finished' THEN 'replays'
			   WHEN 'ID001' THEN 'mismatches' WHEN 'ID003' THEN 'stale_tokens'
			   WHEN 'ID005' THEN 'refused' ELSE status END $$;

	-- one of two requests: the other one does not fit
	CREATE FUNCTION request() RETURNS jsonb LANGUAGE sql VOLATILE AS $$
		SELECT CASE WHEN random() < 0.9 THEN '1' ELSE '2' END::jsonb $$;
	CREATE FUNCTION handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT payload';
	CREATE FUNCTION some_wait() RETURNS interval LANGUAGE sql VOLATILE AS $$
		SELECT CASE WHEN random() < 0.5 THEN interval '0' END $$;

	CREATE FUNCTION op_claim() RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		k text := 'c ' || trunc(random() * 300);
		a text;
	BEGIN
		a := (SELECT status FROM idem_claim(k, request(), wait => some_wait()));
		IF a = 'claimed' AND random() < 0.8 THEN
			PERFORM idem_finish(k, '1');
		END IF;
		IF a = 'claimed' AND random() < 0.3 THEN
			a := 'claims ' || (SELECT counter_of(status) FROM idem_claim(k));
		END IF;
		RETURN counter_of(a);
	EXCEPTION WHEN SQLSTATE 'ID001' THEN
		RETURN 'mismatches';
	END $$;

	CREATE FUNCTION op_many() RETURNS text LANGUAGE sql AS $$
		SELECT string_agg(counter_of(status), ' ')
		  FROM idem_claim_many(ARRAY(SELECT 'c ' || trunc(random() * 300) FROM generate_series(1, 5)),
							   wait => some_wait()) $$;

	CREATE FUNCTION op_call() RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		RETURN (SELECT CASE WHEN status = 'finished' AND NOT replayed THEN 'claims' ELSE counter_of(status) END
				  FROM idem_call('c ' || trunc(random() * 300), 'handler', request(), wait => some_wait()));
	EXCEPTION WHEN SQLSTATE 'ID001' THEN
		RETURN 'mismatches';
	END $$;

	-- what expires at once
	CREATE FUNCTION op_brief() RETURNS text LANGUAGE sql AS $$
		SELECT counter_of(status)
		  FROM idem_claim('b ' || trunc(random() * 100), ttl => '1 us', wait => some_wait()) $$;

	-- A lease, and what its holder does with it; an old token now and then.  A lease with a
	-- second attempt is a takeover.
	CREATE FUNCTION op_lease() RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		k text := 'l ' || trunc(random() * 60);
		park boolean := random() < 0.05;
		a record;
		answer text;
		t bigint;
	BEGIN
		SELECT status, token, attempt INTO a
		  FROM idem_lease(k, CASE WHEN random() < 0.5 THEN interval '1 us' ELSE '1 h' END, request(),
						  worker => 'w ' || trunc(random() * 3), max_attempts => 5, wait => some_wait(),
						  on_expiry => CASE WHEN park THEN 'park' ELSE 'retry' END);
		answer := counter_of(a.status);
		IF a.status = 'claimed' AND a.attempt > 1 THEN
			answer := answer || ' takeovers';
		END IF;
		IF a.token IS NULL OR a.status NOT IN ('claimed', 'resumed') THEN
			RETURN answer;
		END IF;
		t := a.token - CASE WHEN random() < 0.3 THEN 1 ELSE 0 END;
		BEGIN
			-- the release of a parked key takes back the attempt
			CASE trunc(random() * CASE WHEN park OR a.status = 'resumed' THEN 4 ELSE 6 END)
				WHEN 0 THEN PERFORM idem_finish(k, '1', t);
				WHEN 1 THEN PERFORM idem_renew(k, t, '1 h');
				WHEN 2 THEN PERFORM idem_checkpoint(k, t, '1');
				WHEN 3 THEN PERFORM idem_fence(k, t);
				WHEN 4 THEN PERFORM idem_release(k, t);
				ELSE NULL;
			END CASE;
		EXCEPTION WHEN SQLSTATE 'ID003' THEN
			answer := answer || ' stale_tokens';
		END;
		RETURN answer;
	EXCEPTION WHEN SQLSTATE 'ID001' THEN
		RETURN 'mismatches';
	END $$;

	CREATE FUNCTION op_forget() RETURNS text LANGUAGE sql AS $$
		SELECT left(idem_forget('l ' || trunc(random() * 60))::text, 0) || left(idem_forget('c ' || trunc(random() * 300))::text, 0) $$;

	CREATE FUNCTION op_enqueue(q text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		n int := trunc(random() * 6);
		on_dup text := (ARRAY['skip', 'replace', 'debounce', 'error'])[1 + trunc(random() * 4)::int];
	BEGIN
		RETURN (SELECT outcome
				  FROM idem_enqueue(q, '1', 'k ' || trunc(random() * 30),
						dedup => CASE WHEN n < 2 THEN 'until_executing' WHEN n < 4 THEN 'until_executed' ELSE 'until_expired' END,
						on_duplicate => on_dup, delay => CASE on_dup WHEN 'debounce' THEN interval '1 us' END,
						if_running => CASE WHEN n = 3 THEN 'rerun' END,
						key_ttl => CASE WHEN n = 4 THEN interval '1 ms' WHEN n = 5 THEN '1 h' END));
	EXCEPTION WHEN SQLSTATE 'ID005' THEN
		RETURN 'refused';
	END $$;

	CREATE FUNCTION op_enqueue_many(q text) RETURNS text LANGUAGE sql AS $$
		SELECT string_agg(outcome, ' ')
		  FROM idem_enqueue_many(q, ARRAY['1', '2', '3', '4']::jsonb[],
				ARRAY['k ' || trunc(random() * 30), 'k ' || trunc(random() * 30), 'k ' || trunc(random() * 30), NULL]) $$;

	-- fetch, and by chance complete, fail, give up, snooze, each with an old token now and then
	CREATE FUNCTION op_work(q text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		j record;
		answer text := '';
		got text;
		t bigint;
		ids bigint[] := '{}';
		tokens bigint[] := '{}';
		lease interval := CASE WHEN random() < 0.5 THEN '1 h' END;
	BEGIN
		FOR j IN SELECT job_id, token FROM idem_fetch(q, 3, lease) LOOP
			answer := answer || ' fetched';
			CONTINUE WHEN lease IS NOT NULL AND random() < 0.05;
			t := j.token - CASE WHEN random() < 0.2 THEN 1 ELSE 0 END;
			BEGIN
				CASE trunc(random() * 7)
					WHEN 0 THEN
						PERFORM idem_complete(j.job_id, t, '1');
						answer := answer || ' completed';
					WHEN 1 THEN
						got := idem_fail(j.job_id, t, 'error', retry_in => '0');
						answer := answer || ' failed' || CASE got WHEN 'dead' THEN ' dead' ELSE '' END;
					WHEN 2 THEN
						got := idem_fail(j.job_id, t, dead => true);
						answer := answer || ' failed' || CASE got WHEN 'dead' THEN ' dead' ELSE '' END;
					WHEN 3 THEN
						PERFORM idem_snooze(j.job_id, t, '0');
						answer := answer || ' snoozed';
					WHEN 4 THEN
						answer := answer || (SELECT CASE status WHEN 'stale' THEN ' stale_tokens' ELSE '' END
											   FROM idem_heartbeat(ARRAY[j.job_id], ARRAY[t], '1 h'));
						t := j.token;
						ids := ids || j.job_id;
						tokens := tokens || t;
					ELSE
						ids := ids || j.job_id;
						tokens := tokens || t;
				END CASE;
			EXCEPTION WHEN SQLSTATE 'ID003' THEN
				answer := answer || ' stale_tokens';
				t := NULL;
			END;
			-- complete every job fetched: a job left behind could become dead in a later call, which would not report that
			IF t IS DISTINCT FROM j.token THEN
				ids := ids || j.job_id;
				tokens := tokens || j.token;
			END IF;
		END LOOP;
		RETURN answer || coalesce((SELECT string_agg(CASE status WHEN 'stale' THEN ' stale_tokens' ELSE ' ' || status END, '')
									 FROM idem_complete_many(ids, tokens)), '');
	END $$;

	CREATE FUNCTION op_operate(q text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		n bigint := (SELECT max(job_id) FROM idem.jobs);
		answer text := '';
	BEGIN
		n := (SELECT job_id FROM idem.jobs WHERE queue = q AND lease_until IS NULL ORDER BY random() LIMIT 1);
		IF n IS NOT NULL AND idem_cancel(n) THEN
			answer := ' cancelled';
		END IF;
		n := (SELECT job_id FROM idem.job_log WHERE queue = q ORDER BY random() LIMIT 1);
		IF n IS NOT NULL AND idem_retry(n) THEN
			answer := answer || ' retried';
		END IF;
		RETURN answer;
	END $$;

	-- what is left to chance by the others
	CREATE SEQUENCE n;
	CREATE FUNCTION op_sure() RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		k text := 'n ' || nextval('n');
		answer text := (SELECT counter_of(status) FROM idem_claim(k));
	BEGIN
		answer := answer || ' ' || (SELECT counter_of(status) FROM idem_claim(k));
		answer := answer || ' ' || (SELECT counter_of(status) FROM idem_claim('leased'));
		answer := answer || ' ' || (SELECT counter_of(status) FROM idem_lease('leased', '1 h', worker => 'w'));
		answer := answer || ' ' || (SELECT counter_of(status) FROM idem_lease('leased', '1 h'));
		answer := answer || ' ' || (SELECT counter_of(status) FROM idem_lease('parked', '1 h'));
		RETURN answer || ' ' || (SELECT counter_of(status) FROM idem_lease('spent', '1 h'));
	END $$;
	CREATE FUNCTION op_sure(q text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		k text := 'n ' || nextval('n');
		answer text := (SELECT outcome FROM idem_enqueue(q, key => k));
	BEGIN
		answer := answer || ' ' || (SELECT outcome FROM idem_enqueue(q, key => k));
		answer := answer || ' ' || (SELECT outcome FROM idem_enqueue(q, key => k, on_duplicate => 'replace'));
		answer := answer || ' ' || (SELECT outcome FROM idem_enqueue(q, key => k, on_duplicate => 'debounce', delay => '1 us'));
		answer := answer || ' ' || (SELECT outcome FROM idem_enqueue(q, key => 'leased', dedup => 'until_executed', if_running => 'rerun'));
		PERFORM idem_enqueue(q, key => k, on_duplicate => 'error');
		RETURN answer;
	EXCEPTION WHEN SQLSTATE 'ID005' THEN
		RETURN answer || ' refused';
	END $$;

	CREATE FUNCTION op_clean() RETURNS text LANGUAGE sql AS $$
		SELECT repeat('removed ', idem_cleanup(20)) $$;
	SELECT idem_queue_set('q1', max_attempts => 3, keep_dead => '1 s');
	SELECT idem_queue_set('q2', keep => '1 us');
	SELECT idem_lease('leased', '1 day', worker => 'w');
	SELECT idem_lease('parked', '1 us', on_expiry => 'park');
	SELECT idem_lease('spent', '1 us', max_attempts => 1);
	SELECT outcome, idem_enqueue('q2', key => 'leased') FROM idem_enqueue('q1', key => 'leased');
	SELECT f.job_id, g.job_id FROM idem_fetch('q1', lease => '1 day') AS f, idem_fetch('q2', lease => '1 day') AS g;
});

my %operations = (
	op_claim => 8,
	op_many => 3,
	op_call => 3,
	op_brief => 2,
	op_lease => 8,
	op_forget => 1,
	"op_enqueue('q1')" => 4,
	"op_enqueue('q2')" => 4,
	"op_enqueue_many('q1')" => 2,
	"op_enqueue_many('q2')" => 2,
	"op_work('q1')" => 5,
	"op_work('q2')" => 5,
	"op_operate('q1')" => 1,
	op_sure => 1,
	"op_sure('q1')" => 1,
	"op_sure('q2')" => 1,
	op_clean => 1);

# one transaction, committed, rolled back or rolled back to a savepoint, and then the note
sub operation
{
	my ($call, $weight) = @_;
	my ($queue) = $call =~ /'(\w+)'/;

	$call .= '()' unless $call =~ /\(/;
	$queue = defined $queue ? "'$queue'" : 'NULL';
	return [
		qq{
\\set end random(1, 10)
BEGIN;
SAVEPOINT s;
SELECT $call AS answer \\gset
\\if :end = 1
ROLLBACK TO s;
COMMIT;
\\elif :end = 2
ROLLBACK;
\\elif :end = 3
PREPARE TRANSACTION 'client :client_id';
ROLLBACK PREPARED 'client :client_id';
\\else
COMMIT;
\\endif
INSERT INTO answers VALUES ($queue, ':answer');
}, $weight
	];
}

# The answers that the clients got, by counter, in the form of counters(); stale tokens of jobs
# and what cleanup removed count for the database
sub answers
{
	my ($queue) = @_;
	my $which =
	  defined $queue
	  ? "t.queue = '$queue' AND w NOT IN ('stale_tokens')"
	  : "(t.queue IS NULL OR w = 'stale_tokens')";

	return run(
		qq{SELECT string_agg(w || '=' || n, ' ' ORDER BY w COLLATE "C")
			FROM (SELECT w, count(*) AS n
					FROM answers AS t, regexp_split_to_table(t.answer, '\\s+') AS w
				   WHERE w <> '' AND $which GROUP BY w) AS c});
}

run('ALTER SYSTEM SET idem.log_duplicates = on');
$node->reload;
$node->poll_query_until('postgres', 'SHOW idem.log_duplicates', 'on')
  or die 'no reload';
run('SELECT idem_stats_reset()');
# S1: an answer that is rolled back counts for a queue that has an entry
run(q{INSERT INTO answers SELECT q, outcome FROM unnest('{q1,q2}'::text[]) AS q, LATERAL idem_enqueue(q, key => 'leased')});
my $offset = -s $node->logfile;

ok( pgbench_run(
		$node,
		[
			"--client=$clients", '--jobs=2', '--transactions=250',
			'--max-tries=1'
		],
		[ map { operation($_, $operations{$_}) } sort keys %operations ]),
	"S1: $clients clients do all there is");

# cleanup says how much it has removed, not of what
my $counted = counters();
my $removed = 0;

$counted = join ' ', grep
{
	$removed += $1 if /^expired_\w+=(\d+)$/;
	!/^(expired|abandoned)_/
} split / /, $counted;
my $answers = answers();
my $answered_removed = $answers =~ s/ ?\bremoved=(\d+)// ? $1 : 0;

is($counted, $answers, 'S1: claims, leases, tokens: the counters match the answers that clients got');
foreach my $what (
	qw(busy claims exhausted held mismatches parked replays resumed stale_tokens takeovers))
{
	like($counted, qr/\b$what=/, "S1: there was something to be counted as $what");
}
is($removed, $answered_removed, 'S1: cleanup: counted is what was removed');
cmp_ok($removed, '>', 0, 'S1: which was not nothing');
foreach my $queue (qw(q1 q2))
{
	is(counters(queue => $queue),
		answers($queue), "S1: $queue: the counters match the answers that clients got");
	foreach my $what (
		qw(enqueued absorbed replaced postponed rerun refused fetched completed failed dead snoozed)
	  )
	{
		like(
			counters(queue => $queue),
			qr/\b$what=/,
			"S1: $queue: there was something to be counted as $what");
	}
}

# S5: each fetch and each end of an attempt is in a bucket of its histogram, and in its sum
foreach my $queue (qw(q1 q2))
{
	my $of = "datname = 'postgres' AND queue = '$queue'";

	is( run("SELECT kind, count FROM idem.queue_latency WHERE $of ORDER BY kind"),
		run(qq{SELECT 'run', completed + failed + snoozed FROM idem.queue_stats WHERE $of
				UNION ALL SELECT 'wait', fetched FROM idem.queue_stats WHERE $of}),
		"S5: $queue: every fetch waited, every attempt that ended ran");
	is( run(qq{
			SELECT kind, max(total_seconds) >= sum(n * above) AND max(total_seconds) <= sum(n * le)
			  FROM (SELECT kind, le, total_seconds, count - lag(count, 1, 0::bigint) OVER w AS n,
						   lag(le, 1, 0::float8) OVER w AS above
					  FROM idem.queue_latency_buckets WHERE $of
					WINDOW w AS (PARTITION BY kind ORDER BY le)) AS b
			 WHERE n > 0 GROUP BY kind ORDER BY kind}),
		"run|t\nwait|t",
		"S5: $queue: the sum of the times fits the buckets");
}
like(counters(queue => 'q1'),
	qr/\bcancelled=.*\bretried=/, 'S1: q1: jobs were cancelled and retried');
is(run('SELECT count(*) FROM pg_prepared_xacts'), '0', 'no prepared transaction is left');

# S4: and each of the duplicates has one line
my %lines;
my @found = duplicates($offset);

while (my ($kind, $outcome) = splice @found, 0, 3)
{
	$lines{$kind}{$outcome}++;
}
my $sum = run(
	q{SELECT replays + busy + parked + exhausted FROM idem.stats
	   WHERE datname = current_database()});
my $lines = 0;

$lines += $_ foreach values %{ $lines{claim} }, values %{ $lines{lease} };
is($lines, $sum, 'S4: one line for each duplicate of a claim or a lease');
is( join(' ', sort keys %{ $lines{claim} }),
	'busy finished', 'S4: answers of plain claims');
is( join(' ', sort keys %{ $lines{lease} }),
	'busy exhausted finished parked', 'S4: answers of leases');
is( join(' ', map { "$_=$lines{enqueue}{$_}" } sort keys %{ $lines{enqueue} }),
	run(
		q{SELECT format('absorbed=%s done=%s postponed=%s refused=%s replaced=%s rerun=%s',
						sum(absorbed), sum(done), sum(postponed), sum(refused), sum(replaced), sum(rerun))
			FROM idem.queue_stats WHERE datname = current_database()}),
	'S4: one line for each duplicate of a job');

run('ALTER SYSTEM RESET idem.log_duplicates');
$node->reload;
$node->poll_query_until('postgres', 'SHOW idem.log_duplicates', 'off')
  or die 'no reload';

# all at once on the same counters: none is lost
run(
	q{SELECT idem_stats_reset(); SELECT idem_claim('hot');
	  SELECT idem_queue_set('hot'); SELECT idem_enqueue('hot', key => 'k')});
ok( pgbench_run(
		$node,
		[ "--client=$clients", '--jobs=2', '--transactions=10' ],
		[
			[
				q{
SELECT count(*) FROM idem_claim_many(array_fill('hot'::text, ARRAY[20000]));
SELECT count(*) FROM generate_series(1, 100) AS i, LATERAL idem_enqueue('hot', key => left('k', i));
}, 1
			]
		]),
	"S1: $clients clients count the same");
is(counters(), 'claims=1 replays=' . $clients * 10 * 20_000, 'S1: none is lost of a database');
is( counters(queue => 'hot'),
	'absorbed=' . $clients * 10 * 100 . ' enqueued=1',
	'S1: nor of a queue');

# nor of a bucket: the waits are so long that all are in the same one
run(q{SELECT count(*) FROM idem_enqueue_many('flood', array_fill('1'::jsonb, '{4000}'))});
ok( pgbench_run(
		$node,
		[ "--client=$clients", '--jobs=2', '--transactions=12' ],
		[
			[
				q{
SET idem.clock_offset = '3 h';
BEGIN;
SELECT count(*) FROM idem_fetch('flood', 250, lease => '1 h');
ROLLBACK;
}, 1
			]
		]),
	"S5: $clients clients fetch at once");
is( run(q{
		SELECT s.fetched > 20000, s.fetched - l.count, s.fetched - b.count
		  FROM idem.queue_stats AS s JOIN idem.queue_latency AS l USING (datid, queue)
		  JOIN idem.queue_latency_buckets AS b USING (datid, queue, kind)
		 WHERE queue = 'flood' AND kind = 'wait' AND b.le = 16384}),
	't|0|0',
	'S5: no wait is lost');
run(q{SELECT count(idem_cancel(job_id)) FROM idem.job_status WHERE queue = 'flood'});

#
# S1: what the background worker removes is counted for the database
#

$node->safe_psql('postgres', 'CREATE DATABASE worked');
run('CREATE EXTENSION idem; ALTER DATABASE worked SET idem.cleanup = on', db => 'worked');
add_expired($node, 2500, db => 'worked');
run(
	q{SET idem.clock_offset = -100000;
	  SELECT status FROM idem_lease('abandoned', '1 s', ttl => '1 s');
	  SELECT idem_queue_set('w', keep => '1 s', max_attempts => 1);
	  SELECT outcome FROM idem_enqueue('w', key => 'a', dedup => 'until_expired', key_ttl => '1 h');
	  SELECT idem_complete(job_id, token) FROM idem_fetch('w');
	  SELECT outcome FROM idem_enqueue('w');
	  SELECT job_id FROM idem_fetch('w', lease => '1 s')},
	db => 'worked');
$node->reload;
$node->poll_query_until('worked',
	q{SELECT phase = 'idle' AND last_finished_at IS NOT NULL FROM idem.cleanup_progress
	   WHERE datname = 'worked'})
  or die 'no cleanup';
is( counters(db => 'worked'),
	'abandoned_leases=1 claims=2501 expired_job_history=1 expired_job_keys=1 expired_keys=2501',
	'S1: the worker counts what it removes');
is( counters(db => 'worked', queue => 'w'),
	'completed=1 dead=1 enqueued=2 fetched=2',
	'S1: and the job that it made dead');

# What it has not committed it tries again and again, but does not count.  The queue of the last
# of four jobs to make dead has settings that cannot be read.
run(
	q{SET idem.clock_offset = -100000;
	  SELECT count(*) FROM idem_enqueue_many('f', '{1,2,3}', max_attempts => 1);
	  SELECT count(*) FROM idem_fetch('f', 3, lease => '1 s');
	  SELECT outcome FROM idem_enqueue('broken', max_attempts => 1);
	  SELECT count(*) FROM idem_fetch('broken', lease => '1 s');
	  INSERT INTO idem.queues (queue, dedup) VALUES ('broken', 'no such word')},
	db => 'worked');
my $failed_at = '-infinity';

foreach my $n (1, 2)
{
	$node->reload;
	$node->poll_query_until('worked',
		qq{SELECT phase = 'failing' AND last_error_at > '$failed_at' FROM idem.cleanup_progress
			WHERE datname = 'worked'})
	  or die 'no error';
	$failed_at = run(q{SELECT last_error_at FROM idem.cleanup_progress WHERE datname = 'worked'});
}
is( counters(db => 'worked', queue => 'f'),
	'enqueued=3 fetched=3',
	'S1: the worker does not count what it has not committed');
run(q{DELETE FROM idem.queues WHERE queue = 'broken'}, db => 'worked');
$node->reload;
$node->poll_query_until('worked',
	q{SELECT phase = 'idle' FROM idem.cleanup_progress WHERE datname = 'worked'})
  or die 'no cleanup';
is( counters(db => 'worked', queue => 'f'),
	'dead=3 enqueued=3 fetched=3',
	'S1: and counts it once when it has');

#
# S3: names of queues, as they are; seen from other databases, too
#

my %strange = (
	quotes => q{it's "quoted" \\ {a,b}},
	multibyte => "\xe9\x98\x9f\xe5\x88\x97 \xc3\xa4\xf0\x9f\x90\x98",
	spaces => " \t\n ",
	'255 bytes' => 'q' x 255,
	'255 bytes, multibyte' => ("\xc3\xa4" x 127) . 'a',
	'SQL' => q{'; DROP TABLE idem.jobs; --});

$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('postgres',
	q{CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0});
run('CREATE EXTENSION idem', db => $_) foreach qw(other latin);
foreach my $name (sort keys %strange)
{
	my $quoted = $strange{$name} =~ s/'/''/gr;

	run("SET standard_conforming_strings = on; SELECT outcome FROM idem_enqueue('$quoted', key => 'k') UNION ALL SELECT outcome FROM idem_enqueue('$quoted', key => 'k')"
	);
	is( run(
			"SELECT enqueued, absorbed, queue = '$quoted' FROM idem.queue_stats WHERE queue = '$quoted' AND datname = 'postgres'"
		),
		'1|1|t',
		"S3: a queue with a strange name: $name");
	is( run(
			"SELECT enqueued, absorbed FROM idem.queue_stats WHERE queue = '$quoted' AND datname = 'postgres'",
			db => 'other'),
		'1|1',
		"S3: seen from another database: $name");
}

run(q{SELECT outcome FROM idem_enqueue(convert_from('\x636166e9', 'LATIN1'))}, db => 'latin');
run(q{SELECT outcome FROM idem_enqueue(convert_from('\x636166e8', 'LATIN1'))}, db => 'latin') foreach 1 .. 2;
is( run(q{SELECT queue, enqueued FROM idem.queue_stats WHERE datname = 'latin' ORDER BY queue COLLATE "C"}),
	"caf\xc3\xa8|2\ncaf\xc3\xa9|1", 'S3: names from a database of another encoding');
is( run(
		qq{SELECT queue, enqueued FROM idem.queue_stats WHERE datname = 'postgres' AND queue LIKE '%xe9%'},
		db => 'latin'),
	'\xe9\x98\x9f\xe5\x88\x97 \xc3\xa4\xf0\x9f\x90\x98|1',
	'S3: what has no counterpart is shown by its bytes');

# names whose encoding is unknown
$node->safe_psql('postgres',
	q{CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0});
run('CREATE EXTENSION idem', db => 'ascii');
run(qq{SET client_encoding = 'SQL_ASCII'; SELECT outcome FROM idem_enqueue(E'\\\\caf\\xe$_')}, db => 'ascii')
  foreach 8, 9;
is( run(q{SELECT queue FROM idem.queue_stats WHERE datname = 'ascii' ORDER BY queue COLLATE "C"}),
	"\\\\caf\\xe8\n\\\\caf\\xe9", 'S3: nor do names collapse that cannot be converted');
is( run(
		q{SELECT count(*) > 5 FROM idem.queue_stats WHERE datname = 'postgres' AND length(queue) > 0},
		db => 'latin'),
	't', 'S3: and the other way round');
foreach my $db (qw(postgres latin other))
{
	is( run(
			q{SELECT count(*) > 10, count(*) FILTER (WHERE kinds <> '{run,wait}')
				FROM (SELECT s.queue, array_agg(l.kind ORDER BY l.kind) AS kinds
						FROM idem.queue_stats AS s LEFT JOIN idem.queue_latency AS l USING (datid, queue)
					   GROUP BY s.datid, s.queue) AS q},
			db => $db),
		't|0',
		"S3: the histograms of every queue have the same names, seen from $db");
}

run('CREATE ROLE watcher LOGIN IN ROLE pg_monitor');
run(q{SELECT status FROM idem_claim('secret key', scope => 'secret scope')}, db => 'other');
foreach my $db (qw(other worked))
{
	my $s = session($node, db => $db, user => 'watcher');

	is( $s->query(
			'SELECT string_agg(datname, \' \' ORDER BY datname) FROM idem.stats WHERE claims > 0'
		),
		'other postgres worked',
		"S3: a member of pg_monitor sees all databases from $db");
	is( $s->query(q{SELECT count(DISTINCT datname) FROM idem.queue_stats}),
		'4', "S3: and their queues");
	is( $s->query(q{SELECT count(DISTINCT l.datname), count(DISTINCT b.datname)
					  FROM idem.queue_latency AS l CROSS JOIN idem.queue_latency_buckets AS b}),
		'4|4', "S3: and their histograms");
	is( $s->query(q{SELECT count(*) FROM idem.cleanup_progress WHERE datname = 'worked' AND phase = 'idle'}),
		'1', 'S3: and cleanup there');
	is($s->query('SELECT count(*) > 1 FROM idem_doctor()'), 't', 'S3: and calls idem_doctor()');
	is($s->sqlstate('SELECT idem_stats_reset()'), '42501', 'S3: but does not reset anything');
	$s->quit;
}
is( run(
		q{SELECT count(*) FILTER (WHERE line LIKE '%secret%'), count(*) > 10
			FROM (SELECT s::text AS line FROM idem.stats AS s
				  UNION ALL SELECT s::text FROM idem.queue_stats AS s
				  UNION ALL SELECT s::text FROM idem.queue_latency AS s
				  UNION ALL SELECT s::text FROM idem.queue_latency_buckets AS s
				  UNION ALL SELECT s::text FROM idem.cleanup_progress AS s
				  UNION ALL SELECT s::text FROM idem.worker_status AS s
				  UNION ALL SELECT a::text FROM pg_stat_activity AS a WHERE a.backend_type LIKE 'idem%'
				  UNION ALL SELECT d::text FROM idem_doctor() AS d) AS l}),
	'0|t',
	'S3: none of it shows a key');

#
# S4: which answers are duplicates, and the hash of the key
#

sub hash
{
	my ($name_space, $key) = @_;

	return run(
		"SELECT left(encode(sha256(convert_to('$name_space' || E'\\n' || '$key', 'UTF8')), 'hex'), 16)"
	);
}

my $s = session($node);

run(q{SELECT idem_queue_set('mail')});

# the server logs more than usual, but not the statements of the client
$s->query(
	q{SET idem.log_duplicates = on; SET log_min_messages = debug1;
	  SET log_error_verbosity = verbose; SET client_min_messages = log;
	  SET log_statement = none; SET log_duration = off;
	  CREATE FUNCTION pg_temp.inside() RETURNS text LANGUAGE plpgsql AS $$
	  BEGIN
		RETURN (SELECT status FROM idem_claim('secret 1', scope => 'tenant'));
	  END $$});

my @steps = (
	[ q{idem_claim('secret 1', '1', scope => 'tenant')}, 'claimed' ],
	[ q{idem_claim('secret 1', scope => 'tenant')}, 'finished', 'claim', 'tenant', 'secret 1' ],
	[ q{idem_call('secret 1', 'handler', '1', scope => 'tenant')}, 'finished', 'claim', 'tenant', 'secret 1' ],
	[ q{idem_lease('secret 1', '1 h', scope => 'tenant')}, 'finished', 'lease', 'tenant', 'secret 1' ],
	[ q{idem_lease('secret 2', '1 h', worker => 'secret w')}, 'claimed' ],
	[ q{idem_lease('secret 2', '1 h', worker => 'secret w')}, 'resumed' ],
	[ q{idem_lease('secret 2', '1 h')}, 'busy', 'lease', '', 'secret 2' ],
	[ q{idem_claim('secret 2')}, 'busy', 'claim', '', 'secret 2' ],
	[ q{idem_lease('secret 3', '1 us', on_expiry => 'park')}, 'claimed' ],
	[ q{idem_claim('secret 3')}, 'parked', 'claim', '', 'secret 3' ],
	[ q{idem_lease('secret 4', '1 us', max_attempts => 1)}, 'claimed' ],
	[ q{idem_lease('secret 4', '1 h')}, 'exhausted', 'lease', '', 'secret 4' ],
	[ q{idem_lease('secret 5', '1 us')}, 'claimed' ],
	[ q{idem_lease('secret 5', '1 us')}, 'claimed' ],
	[ q{idem_claim('secret 6', ttl => '1 us')}, 'claimed' ],
	[ q{idem_claim('secret 6', ttl => '1 us')}, 'claimed' ],
	[ "idem_claim('secret \xc3\xa4', scope => '\xc3\xb6')", 'claimed' ],
	[ "idem_claim('secret \xc3\xa4', scope => '\xc3\xb6')", 'finished', 'claim', "\xc3\xb6", "secret \xc3\xa4" ],
	[ q{pg_temp.inside() AS f (status)}, 'finished', 'claim', 'tenant', 'secret 1' ],
	[ q{idem_enqueue('mail', '"secret"', 'secret a')}, 'enqueued' ],
	[ q{idem_enqueue('mail', '"secret"', 'secret a')}, 'absorbed', 'enqueue', 'mail', 'secret a' ],
	[ q{idem_enqueue('mail', '"secret"', 'secret a', on_duplicate => 'replace')}, 'replaced', 'enqueue', 'mail', 'secret a' ],
	[ q{idem_enqueue('mail', '"secret"', 'secret a', on_duplicate => 'debounce', delay => '1 min')}, 'postponed', 'enqueue', 'mail', 'secret a' ],
	[ q{idem_enqueue('mail', '"secret"')}, 'enqueued' ],
	[ q{idem_enqueue('mail', '"secret"', 'secret a', delay => '1 h')}, 'enqueued' ],
	[ q{idem_enqueue('done', '"secret"', 'secret b', dedup => 'until_expired', key_ttl => '1 h')}, 'enqueued' ],
	[ q{(SELECT CASE WHEN idem_complete(job_id, token, '"secret"') THEN 'completed' END FROM idem_fetch('done')) AS f (status)}, 'completed' ],
	[ q{idem_enqueue('done', '"secret"', 'secret b', dedup => 'until_expired', key_ttl => '1 h')}, 'done', 'enqueue', 'done', 'secret b' ],
	[ q{idem_enqueue('runs', '"secret"', 'secret c')}, 'enqueued' ],
	[ q{(SELECT 'fetched' FROM idem_fetch('runs', lease => '1 h')) AS f (status)}, 'fetched' ],
	[ q{idem_enqueue('runs', '"secret"', 'secret c', dedup => 'until_executed', if_running => 'rerun')}, 'rerun', 'enqueue', 'runs', 'secret c' ]);

my $messages = '';

$offset = -s $node->logfile;
foreach my $step (@steps)
{
	my ($call, $answer, $kind, $name_space, $key) = @$step;
	my $before = -s $node->logfile;
	my $column = $call =~ /^idem_enqueue/ ? 'outcome' : 'status';

	is($s->query("SELECT $column FROM $call"), $answer, "S4: $call: $answer");
	is( join(' ', duplicates($before)),
		defined $kind ? join(' ', $kind, $answer, hash($name_space, $key)) : '',
		defined $kind
		? 'S4: a duplicate: one line, with the hash of its key'
		: 'S4: not a duplicate: no line');
	$messages .= $s->{message};
}
is($messages, '', 'S4: none of that is for the client');

# held: not a duplicate of another transaction's work; a batch: a line per duplicate
my $before = -s $node->logfile;

$s->query(
	q{BEGIN; SELECT idem_claim('secret 7'); SELECT idem_claim('secret 7');
	  SELECT idem_claim_many('{secret 8,secret 1,secret 8,secret 2}'); ROLLBACK});
is(join(' ', duplicates($before)),
	'claim busy ' . hash('', 'secret 2'), 'S4: of a batch, and not what is held');

# errors do not show the key either; the statement is logged only if a setting says so
$before = -s $node->logfile;
$s->query('SET log_min_error_statement = panic');
foreach my $call (
	q{idem_claim('secret 1', '2', scope => 'tenant')},
	q{idem_finish('secret 1', '"secret"')},
	q{idem_finish('secret 2', '"secret"', 1)},
	q{idem_claim(rpad('secret', 2000, 'x'))},
	q{idem_enqueue('mail', '"secret"', 'secret a', on_duplicate => 'error')},
	q{idem_call('secret 9', 'no_such_handler', '"secret"')})
{
	isnt($s->sqlstate("SELECT $call"), '00000', "S4: an error: $call");
}
is( join(' ', duplicates($before)),
	'enqueue refused ' . hash('mail', 'secret a'),
	'S4: a job that is refused is a duplicate, other errors are not');
$s->quit;
unlike(slurp_file($node->logfile, $offset), qr/secret|tenant/, 'S4: the log shows no key');
unlike(slurp_file($node->logfile, $offset),
	qr/(STATEMENT|CONTEXT|QUERY):/, 'S4: nor a statement that would');

#
# S2: what survives
#

my $before_restart = all_statistics();

like($before_restart, qr/other/, 'S2: there are statistics');
like($before_restart, qr/\|done\|$_\|1\|/, "S2: there are histograms: $_") foreach qw(wait run);
$node->stop('fast');
ok(-e $node->data_dir . '/pg_stat/idem.stat', 'S2: the statistics are in a file');
$node->start;
is(all_statistics(), $before_restart, 'S2: a clean restart keeps all, and since when');
ok(!-e $node->data_dir . '/pg_stat/idem.stat', 'S2: the file is gone');
run(q{SELECT idem_claim('after')});
$node->restart;
is( run(q{SELECT claims - 1, replays FROM idem.stats WHERE datname = 'postgres'}),
	(split /\n/, join "\n", map { /\|postgres\|(\d+)\|\d+\|\d+\|\d+\|(\d+)\|/ ? "$1|$2" : () } split /\n/, $before_restart)[0],
	'S2: counting goes on from there');

# stopped in a hurry
my $before_stop = all_statistics();

$node->stop('immediate');
$node->start;
is(all_statistics(), $before_stop, 'S2: so does an immediate shutdown');

# a crash
my $reset = since();
my $session = session($node);

crash_backend($node, $session->{pid});
$session->lost;
is(counters(), '', 'S2: kill -9 of a server process: counting starts again');
is(run("SELECT stats_reset > '$reset' FROM idem.stats WHERE datname = 'postgres'"),
	't', 'S2: and says since when');
is( run(q{SELECT (SELECT count(*) FROM idem.queue_stats), (SELECT count(*) FROM idem.queue_latency)}),
	'0|0', 'S2: also for queues and other databases');
run(q{SELECT idem_claim('after the crash')});
$reset = since();
crash_postmaster($node);
$node->start;
is(counters(), '', 'S2: kill -9 of the postmaster: counting starts again');
is(run("SELECT stats_reset > '$reset' FROM idem.stats WHERE datname = 'postgres'"),
	't', 'S2: and says since when');

# The content of a file with another length of the name of its last queue, and a checksum that is
# right anyway.  An entry has 904 bytes: database, length, name, since when, counters, histograms.
sub with_length
{
	my ($content, $length) = @_;
	my $entries = substr($content, 0, -4);
	my $crc = 0xffffffff;

	(length($entries) - 16) % 904 == 0 or die 'the format of the file has changed';
	substr($entries, length($entries) - 904 + 4, 4) = pack 'l', $length;
	foreach my $byte (unpack 'C*', $entries)
	{
		$crc ^= $byte;
		$crc = ($crc >> 1) ^ ($crc & 1 ? 0x82f63b78 : 0) foreach 1 .. 8;
	}
	return $entries . pack 'L', $crc ^ 0xffffffff;
}

# a file that is not ours, or not any more
my $file = $node->data_dir . '/pg_stat/idem.stat';
my %damage = (
	'of another program' => sub { return "this is not ours\n" },
	'empty' => sub { return '' },
	'cut off' => sub { return substr($_[0], 0, length($_[0]) - 10) },
	'cut off after its head' => sub { return substr($_[0], 0, 12) },
	'with another byte' => sub { substr($_[0], length($_[0]) / 2, 1) ^= "\x01"; return $_[0] },
	'with another number of entries' =>
	  sub { substr($_[0], 8, 4) = "\xff\xff\xff\x7f"; return $_[0] },
	'with a negative number of entries' =>
	  sub { substr($_[0], 8, 4) = "\xff\xff\xff\xff"; return $_[0] },
	'with more behind its end' => sub { return "$_[0]x" },
	'with a negative length of a queue' => sub { return with_length($_[0], -2) },
	'with a length of a queue that is too large' => sub { return with_length($_[0], 256) },
	'of another version' => sub { substr($_[0], 0, 1) ^= "\x01"; return $_[0] });

foreach my $how (sort keys %damage)
{
	run(q{SELECT idem_claim('damaged'); SELECT idem_enqueue('damaged')});
	$node->stop;

	my $content = slurp_file($file);
	my $damaged = $damage{$how}->($content);

	open my $fh, '>:raw', $file or die;
	print $fh $damaged;
	close $fh;

	$before = -s $node->logfile;
	$node->start;
	my @said = slurp_file($node->logfile, $before) =~ /LOG:  (ignoring damaged file "[^"]*")/g;

	is( join("\n", @said),
		'ignoring damaged file "pg_stat/idem.stat"',
		"S2: a file $how: one line in the log");
	is( run('SELECT count(*) FROM idem.queue_stats') . counters(),
		'0', "S2: a file $how: counting starts again");
	ok(!-e $file, "S2: a file $how: it is gone");
}

# a file that cannot be opened, or read
run(q{SELECT idem_claim('unreadable')});
$node->stop;
chmod 0, $file or die;
$before = -s $node->logfile;
$node->start;
is(log_count($node, qr/LOG:  could not open file "pg_stat\/idem\.stat": Permission denied/, $before),
	1, 'S2: a file that cannot be opened: the log says so');
is(counters(), '', 'S2: a file that cannot be opened: counting starts again');
run(q{SELECT idem_claim('unreadable')});
$node->stop;
unlink $file;
mkdir $file or die;
$before = -s $node->logfile;
$node->start;
is(log_count($node, qr/LOG:  could not \w+ file "pg_stat\/idem\.stat": /, $before) > 0, 1,
	'S2: a file that cannot be read: the log says so');
is(counters(), '', 'S2: a file that cannot be read: counting starts again');
rmdir $file;

#
# S2: DROP DATABASE
#

run(q{SELECT idem_claim('x'); SELECT idem_enqueue('queue of other')}, db => 'other');
my $oid = run(q{SELECT oid FROM pg_database WHERE datname = 'other'});

is( run(
		"SELECT (SELECT count(*) FROM idem.stats WHERE datid = $oid), (SELECT count(*) FROM idem.queue_stats WHERE datid = $oid)"
	),
	'1|1',
	'S2: a database and a queue of it');
$node->safe_psql('postgres', 'DROP DATABASE other');
is( run("SELECT count(*) FROM idem.stats WHERE datname IS NOT NULL AND datid = $oid"),
	'0', 'S2: dropped: it has no name');
$node->reload;
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM (SELECT datid FROM idem.stats UNION ALL SELECT datid FROM idem.queue_stats) AS s WHERE datid = $oid"
	),
	'S2: and its entries are gone with the next round');
$node->safe_psql('postgres', 'CREATE DATABASE other');
run('CREATE EXTENSION idem', db => 'other');
run(q{SELECT idem_claim('x')}, db => 'other');
is(counters(db => 'other'), 'claims=1', 'S2: a new one with the same name starts from zero');

#
# more queues than there is room for
#

is(doctor('statistics'), 'ok', 'H1: all databases and queues are counted');
is( run(
		q{SELECT count(*) FROM generate_series(1, 200) AS i, LATERAL idem_enqueue('many ' || i, key => 'k')}
	),
	'200',
	'S2: more queues than idem.stats_max: nothing fails');
is( run(
		q{SELECT count(*), sum(enqueued) FROM generate_series(1, 200) AS i, LATERAL idem_enqueue('many ' || i, key => 'k')
		  CROSS JOIN (SELECT 1 AS enqueued) AS e WHERE outcome = 'absorbed'}),
	'200|200',
	'S2: not in another session either');
my $entries = run('SELECT count(*) FROM idem.queue_stats');

# 75 entries are for queues, and four databases need some of them: a database that is alone has no
# more than three times what it leaves free
cmp_ok($entries, '<=', 3 * 71 / 4 + 2, 'S2: queues leave room for databases, and for the queues of others');
cmp_ok($entries, '>', 50, 'S2: and use the rest');
is( run(q{SELECT count(*) FROM idem.queue_stats WHERE queue LIKE 'many %' AND (enqueued, absorbed) NOT IN ((1, 1), (0, 1))}),
	'0', 'S1: those that have an entry are counted right');
is(doctor('statistics'), 'warn', 'H1: idem_doctor() says so');
$node->safe_psql('postgres', 'CREATE DATABASE late');
run('CREATE EXTENSION idem', db => 'late');
run(q{SELECT idem_claim('x'); SELECT idem_claim('x'); SELECT idem_enqueue('late')}, db => 'late');
is(counters(db => 'late'), 'claims=1 replays=1', 'S2: a database still gets its entry');

my $fix = doctor('statistics', columns => 'fix');

is($fix, 'ALTER SYSTEM SET idem.stats_max = 200;', 'H1: the fix');
run($fix);
$node->restart;
is(doctor('statistics'), 'ok', 'H1: the fix helps');
is(counters(db => 'late'), 'claims=1 replays=1', 'S2: with more room nothing is lost');
run(q{SELECT idem_enqueue('late')}, db => 'late');
is(counters(db => 'late', queue => 'late'), 'enqueued=2', 'S2: its queue had room in spite of the others');

# the other way round: databases are loaded first, and room for more of them is kept
run(q{SELECT count(*) FROM generate_series(1, 200) AS i, LATERAL idem_enqueue('more ' || i)});
$node->safe_psql('postgres', 'CREATE DATABASE newest');
run('CREATE EXTENSION idem', db => 'newest');
run(q{SELECT idem_claim('y')}, db => 'newest');
run('ALTER SYSTEM SET idem.stats_max = 100');
$node->restart;
run(q{SELECT idem_claim('y')}, db => 'late');
is(counters(db => 'late'), 'claims=2 replays=1', 'S2: with less room databases keep their counts');
is(counters(db => 'newest'), 'claims=1', 'S2: also those that came after many queues');
cmp_ok(run('SELECT count(*) FROM idem.queue_stats'), '<', 75, 'S2: and queues leave room for databases');
is(doctor('statistics'), 'warn', 'H1: idem_doctor() says that some are not counted');
$node->safe_psql('postgres', 'CREATE DATABASE last');
run('CREATE EXTENSION idem', db => 'last');
run(q{SELECT idem_claim('y')}, db => 'last');
is(counters(db => 'last'), 'claims=1', 'S2: so a new one gets its entry');
$node->stop;
log_ok($node, killed => 1, except => qr/LOG:  ignoring damaged file|DETAIL:  The statistics of idem begin at zero/);

#
# H1: servers that are set up wrongly
#

my $other = new_node('doctor');

sub paste
{
	my ($what) = @_;
	my $command = doctor($what, columns => 'fix', node => $other);

	note $command;
	$other->safe_psql('postgres', $command);
	$other->restart;
	return;
}

is(doctor('preload', node => $other), 'warn', 'H1: not preloaded');
is(doctor('worker', node => $other), 'warn', 'H1: so there is no worker');
is(doctor('statistics', node => $other), 'ok', 'H1: and no statistics');
is( $other->safe_psql('postgres',
		'SELECT (SELECT count(*) FROM idem.stats), (SELECT count(*) FROM idem.queue_stats), (SELECT count(*) FROM idem.queue_latency), (SELECT count(*) FROM idem.queue_latency_buckets), (SELECT count(*) FROM idem.cleanup_progress), preloaded, state FROM idem.worker_status'
	),
	'0|0|0|0|0|f|stopped',
	'W6: the views work without preload');
is(sqlstate($other, 'SELECT idem_stats_reset()'), '55000', 'W6: there is nothing to be reset');
is(claim_status($other, q{'k'}), 'claimed|', 'W6: claims work without preload');
$other->append_conf('postgresql.conf', "idem.cleanup_naptime = 3600\n");
paste('preload');
is(doctor($_, node => $other), 'ok', "H1: the fix helps: $_") foreach qw(preload statistics);
ok( $other->poll_query_until('postgres',
		q{SELECT status = 'ok' FROM idem_doctor() WHERE "check" = 'worker'}),
	'H1: there is a worker');

# the fix keeps the existing setting
$other->append_conf('postgresql.conf', "session_preload_libraries = ''\n");
$other->safe_psql('postgres', q{ALTER SYSTEM SET shared_preload_libraries = auto_explain, 'pg_stat_statements'})
  if $other->safe_psql('postgres',
	q{SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_stat_statements'});
$other->restart;
SKIP:
{
	skip 'pg_stat_statements is not installed', 2
	  if $other->safe_psql('postgres', 'SHOW shared_preload_libraries') !~ /pg_stat/;

	is(doctor('preload', node => $other), 'warn', 'H1: not preloaded any more');
	paste('preload');
	is( $other->safe_psql('postgres',
			q{SELECT string_agg(btrim(x), ' ') FROM regexp_split_to_table(current_setting('shared_preload_libraries'), ',') AS x}),
		'auto_explain pg_stat_statements idem',
		'H1: the fix keeps other libraries');
}

# no slot for the worker
$other->safe_psql('postgres', 'ALTER SYSTEM SET max_worker_processes = 2');
$other->restart;
ok( $other->poll_query_until('postgres',
		q{SELECT status = 'fail' FROM idem_doctor() WHERE "check" = 'worker slots'}),
	'H1: no slot is free');
paste('worker slots');
ok( $other->poll_query_until('postgres',
		q{SELECT runs > 0 FROM idem.worker_status}),
	'H1: the fix helps: databases are visited');
is(doctor('worker slots', node => $other), 'ok', 'H1: the fix helps: worker slots');

# not even one for the launcher
$other->safe_psql('postgres', 'ALTER SYSTEM SET max_worker_processes = 1');
$other->restart;
is(doctor('worker', node => $other), 'fail', 'H1: no slot for the launcher');
paste('worker');
ok( $other->poll_query_until('postgres',
		q{SELECT status = 'ok' FROM idem_doctor() WHERE "check" = 'worker'}),
	'H1: the fix helps: worker');
$other->stop;
log_ok($other);
done_testing();
