# 16 workers and 8 producers over 10,000 keyed jobs in each of four modes, with failures,
# rollbacks, and clients and connections that end anywhere: no change is
# overlooked, no job is lost, and what a job does in the database is there
# exactly once.
#
# A producer notes a change of its key and enqueues a job for the key, in one
# transaction; many of these enqueues are duplicates.  A worker looks at the
# changes of the key of its job and notes which it can see, by its snapshot.
# What a worker does counts if the transaction with idem_complete() commits.
# Nothing but idem keeps a job from being run twice or a change from being
# overlooked: the tables have no constraints.
#
# Every client is a separate process that talks to the server in several
# steps, so that transactions of others come in between.  At each step it may
# kill itself or have its connection terminated; another one takes its place.
# Now and then the queue is paused, so that jobs wait and absorb duplicates.  Jobs
# that are due for 50 ms drain.
#
# Leases are of a microsecond, which has expired when the next statement begins,
# of 50 ms, or so long that only the workers at the end see them expire, by their
# clock.
#
# IDEM_LOAD_JOBS: another number of enqueues in each mode.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;

my $jobs = $ENV{IDEM_LOAD_JOBS} // 10_000;
my $producers = 8;
my $workers = 16;

my $node = new_node(
	'job_load',
	conf => q{
max_connections = 60
deadlock_timeout = 100ms
restart_after_crash = on
idem.drain_after = 50ms
});

$node->safe_psql(
	'postgres', q{
	CREATE TABLE changes (
		n bigint, queue text, key text, job_id bigint, outcome text, xid xid8);
	CREATE INDEX ON changes (queue, key);
	CREATE TABLE fetches (
		queue text, key text, job_id bigint, token bigint, n bigint);
	CREATE TABLE looks (
		job_id bigint, token bigint, seen bigint, snapshot pg_snapshot,
		at timestamptz);
	CREATE TABLE runs (
		queue text, key text, job_id bigint, token bigint, ended timestamptz);
	CREATE INDEX ON changes (job_id);
	CREATE INDEX ON fetches (job_id);
	CREATE INDEX ON looks (job_id);
	CREATE INDEX ON runs (job_id);
	CREATE SEQUENCE n;
	CREATE SEQUENCE tick;

	CREATE FUNCTION random_key() RETURNS text LANGUAGE sql VOLATILE AS $$
		SELECT CASE WHEN random() < 0.3
			   THEN 'hot ' || trunc(random() * 5)
			   ELSE 'key ' || trunc(random() * 1000) END $$;

	-- A change of some keys, and a job for each.  dedup and rerun are arguments of
	-- idem_enqueue(); duplicates replace the payload now and then.
	CREATE FUNCTION produce_keys(q text, dedup text, rerun text, ks text[])
	RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		ns bigint[] := ARRAY(SELECT nextval('n') FROM unnest(ks));
		on_dup text := CASE WHEN random() < 0.3 THEN 'replace' END;
	BEGIN
		IF cardinality(ks) = 1 THEN
			INSERT INTO changes
			SELECT ns[1], q, ks[1], e.job_id, e.outcome, pg_current_xact_id()
			  FROM idem_enqueue(q, jsonb_build_object('n', ns[1]), ks[1],
					   dedup => dedup, on_duplicate => on_dup,
					   if_running => rerun) AS e;
		ELSE
			INSERT INTO changes
			SELECT ns[e.ord], q, ks[e.ord], e.job_id, e.outcome,
				   pg_current_xact_id()
			  FROM idem_enqueue_many(q,
					   ARRAY(SELECT jsonb_build_object('n', m.n)
							   FROM unnest(ns) WITH ORDINALITY AS m (n, i)
							  ORDER BY i),
					   ks, dedup => dedup, on_duplicate => on_dup,
					   if_running => rerun) AS e;
		END IF;
	END $$;

	CREATE FUNCTION produce(q text, dedup text, rerun text) RETURNS void
	LANGUAGE plpgsql AS $$
	BEGIN
		IF random() < 0.05 THEN
			BEGIN
				PERFORM produce_keys(q, dedup, rerun, ARRAY[random_key()]);
				RAISE EXCEPTION USING ERRCODE = 'TEST1';
			EXCEPTION WHEN SQLSTATE 'TEST1' THEN
				NULL;
			END;
		END IF;
		IF random() < 0.1 THEN
			PERFORM produce_keys(q, dedup, rerun,
				ARRAY[random_key(), random_key(), random_key()]);
		ELSE
			PERFORM produce_keys(q, dedup, rerun, ARRAY[random_key()]);
		END IF;
	END $$;

	CREATE FUNCTION take(q text, batch int, lease interval,
		OUT n int, OUT ids bigint[], OUT tokens bigint[])
	LANGUAGE sql AS $$
		WITH f AS (
			INSERT INTO fetches
			SELECT q, f.key, f.job_id, f.token, (f.payload ->> 'n')::bigint
			  FROM idem_fetch(q, batch, lease) AS f
			RETURNING job_id, token)
		SELECT count(*)::int, coalesce(array_agg(job_id), '{}'),
			   coalesce(array_agg(token), '{}')
		  FROM f $$;

	-- the work: sees what it can see after the fetch
	CREATE FUNCTION look(ids bigint[], tokens bigint[]) RETURNS void
	LANGUAGE sql AS $$
		INSERT INTO looks
		SELECT f.job_id, f.token,
			   (SELECT count(*) FROM changes AS c
				 WHERE c.queue = f.queue AND c.key = f.key),
			   pg_current_snapshot(), clock_timestamp()
		  FROM unnest(ids, tokens) AS u (job_id, token)
		  JOIN fetches AS f USING (job_id, token) $$;

	-- By fate: completes, fails or puts off the jobs.  Only with leases may a
	-- token be stale.
	CREATE FUNCTION finish(ids bigint[], tokens bigint[], fate int, leased bool)
	RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		now timestamptz := clock_timestamp();
		mine bigint[] := '{}';
		id bigint;
		tok bigint;
	BEGIN
		IF fate <= 5 THEN
			PERFORM FROM idem_heartbeat(ids, tokens, '1 min') AS h
			  WHERE h.status <> 'renewed' AND NOT (leased AND h.status = 'stale')
				 OR (h.status = 'renewed') <> (h.lease_until IS NOT NULL);
			IF FOUND THEN
				RAISE EXCEPTION 'unexpected answer of idem_heartbeat';
			END IF;
		END IF;

		IF fate BETWEEN 30 AND 50 THEN
			SELECT coalesce(array_agg(c.job_id) FILTER (WHERE c.status = 'completed'), '{}')
			  INTO mine FROM idem_complete_many(ids, tokens) AS c;
		ELSE
			FOR id, tok IN SELECT * FROM unnest(ids, tokens) LOOP
				BEGIN
					IF fate > 85 THEN
						IF idem_fail(id, tok, 'failed', retry_in => '0') <> 'retry' THEN
							RAISE EXCEPTION 'unexpected answer of idem_fail';
						END IF;
					ELSIF fate > 80 THEN
						PERFORM idem_snooze(id, tok, '0');
					ELSE
						PERFORM idem_complete(id, tok);
						mine := mine || id;
					END IF;
				EXCEPTION WHEN SQLSTATE 'ID003' THEN
					IF NOT leased THEN
						RAISE;
					END IF;
				END;
			END LOOP;
		END IF;
		IF NOT leased AND fate <= 80 AND cardinality(mine) <> cardinality(ids) THEN
			RAISE EXCEPTION 'not everything was completed';
		END IF;

		INSERT INTO runs
		SELECT f.queue, f.key, f.job_id, f.token, now
		  FROM unnest(ids, tokens) AS u (job_id, token)
		  JOIN fetches AS f USING (job_id, token)
		 WHERE f.job_id = ANY (mine);
	END $$;
});

#
# the clients
#

# Any step may be the last one: by kill -9 of the client, or by losing the
# connection.
sub death
{
	my ($step) = @_;
	my ($kill, $terminate) = (2 * $step + 1, 2 * $step + 2);

	return qq{
\\if :death = $kill
\\shell kill -9 \$PPID
\\elif :death = $terminate
SELECT pg_terminate_backend(pg_backend_pid());
\\endif
};
}

sub end_transaction
{
	my ($rolled_back) = @_;

	return qq{
\\set end random(1, 100)
\\if :end <= $rolled_back
ROLLBACK;
\\else
COMMIT;
\\endif
};
}

my $draw = q{
\set death random(1, DEATH)
\set fate random(1, 100)
\set batch random(1, 3)
};

my %script = (
	producer => $draw . q{
\set pause random(1, 400)
\if :pause = 1
SELECT idem_pause('QUEUE');
\elif :pause <= 5
SELECT idem_resume('QUEUE');
\endif
BEGIN \; SELECT nextval('produced_' || NUMBER) \; SELECT produce('QUEUE', DEDUP);
} . death(0) . end_transaction(10) . death(1),

	'in transaction' => $draw . q{
BEGIN \; SELECT n, ids, tokens FROM take('QUEUE', :batch, NULL) \gset
\if :n = 0
ROLLBACK;
\sleep 20 ms
\else
} . death(0) . q{
SELECT look(':ids', ':tokens') \; SELECT finish(':ids', ':tokens', :fate, false);
} . death(1) . end_transaction(10) . death(2) . '\endif',

	leased => $draw . q{
\set lease random(1, 3)
SELECT n, ids, tokens
  FROM take('QUEUE', :batch,
		('{1 microsecond, 50 ms, LONG}'::interval[])[:lease]) \gset
\if :n = 0
\sleep 20 ms
\else
} . death(0) . q{
SELECT look(':ids', ':tokens');
} . death(1) . q{
BEGIN \; SELECT finish(':ids', ':tokens', :fate, true);
} . death(2) . end_transaction(10) . death(3) . '\endif');

my $dir = PostgreSQL::Test::Utils::tempdir();
my %client;    # by process id

# Runs a script as one client; never waits for it.
sub start_client
{
	my ($role, $number, $transactions, %replace) = @_;
	my $text = $script{$role};

	$replace{NUMBER} = $number;
	$text =~ s/\b$_\b/$replace{$_}/g foreach keys %replace;

	my $file = "$dir/$role $number";
	unlink "$file.sql";
	append_to_file("$file.sql", $text);

	my $pid = fork // die "could not fork: $!";

	if ($pid == 0)
	{
		open STDOUT, '>', "$file.out" or POSIX::_exit(3);
		open STDERR, '>&', \*STDOUT or POSIX::_exit(3);
		$ENV{PGAPPNAME} = 'load';
		$ENV{PGOPTIONS} = $replace{OPTIONS} // '';
		exec { $node->installed_command('pgbench') } 'pgbench', '--no-vacuum',
		  '--host' => $node->host,
		  '--port' => $node->port,
		  '--file' => "$file.sql",
		  "--transactions=$transactions", 'postgres'
		  or POSIX::_exit(3);
	}
	$client{$pid} = { role => $role, number => $number, replace => \%replace };
	return;
}

# no client outlives the test, whatever happens
END
{
	my $status = $?;

	kill 'KILL', keys %client;
	waitpid $_, 0 foreach keys %client;
	$? = $status;
}

# Ends all clients and returns when the server has noticed.
sub stop_clients
{
	kill 'KILL', keys %client;
	waitpid $_, 0 foreach keys %client;
	%client = ();
	$node->poll_query_until(
		'postgres', q{
		SELECT count(*) = 0 FROM pg_stat_activity
		 WHERE application_name = 'load'}) or die 'clients do not end';
	return;
}

# How many transactions of its share a producer has left.
sub left_to_produce
{
	my ($number, $share) = @_;

	return $share
	  - $node->safe_psql('postgres',
		"SELECT last_value * is_called::int FROM produced_$number");
}

# kill -9 of a server process that has fetched, which takes all others with it
my $crashes = 0;

sub crash
{
	my ($queue) = @_;
	my $victim = session($node);

	$victim->query("BEGIN; SELECT take('$queue', 3, NULL)");
	crash_backend($node, $victim->{pid});
	$victim->lost;
	$crashes++;
	return;
}

# Producers and workers until everything is produced, and dead ones replaced.
# Returns how they ended.
sub run_clients
{
	my ($mode, $share, $crash, %replace) = @_;
	my %ends;

	local $SIG{ALRM} = sub { die 'the clients do not come to an end' };
	alarm(2 * $PostgreSQL::Test::Utils::timeout_default);

	foreach my $number (1 .. $producers)
	{
		$node->safe_psql('postgres',
			"DROP SEQUENCE IF EXISTS produced_$number;
			 CREATE SEQUENCE produced_$number");
		start_client('producer', $number, $share, %replace);
	}
	start_client($mode, $_, 1_000_000, %replace) foreach 1 .. $workers;

	while (grep { $_->{role} eq 'producer' } values %client)
	{
		my $pid = waitpid(-1, 0);
		my $end = $?;
		my $ended = delete $client{$pid} // next;
		my $left = 1_000_000;

		$ends{ $end & 127 ? 'killed' : $end >> 8 }++;
		if ($crash && left_to_produce(1, $share) < $share / 2)
		{
			crash($replace{QUEUE});
			$crash = 0;
		}
		$left = left_to_produce($ended->{number}, $share)
		  if $ended->{role} eq 'producer';
		start_client($ended->{role}, $ended->{number}, $left, %replace)
		  if $left > 0 && $end != 0;
	}
	alarm(0);
	return %ends;
}

#
# what must hold in the end
#

sub is_none
{
	my ($sql, $name) = @_;
	my $found = $node->safe_psql('postgres',
		"SELECT count(*), min(found::text) FROM ($sql) AS found");

	is($found, '0|', $name);
	return;
}

sub check_queue
{
	my ($queue, $exclusive) = @_;

	$node->safe_psql('postgres', 'ANALYZE');
	is( $node->safe_psql(
			'postgres',
			"SELECT * FROM idem.job_status WHERE queue = '$queue' LIMIT 5"),
		'',
		"J2: $queue: no job is left, none is dead");

	is_none(
		qq{SELECT c.* FROM changes AS c
			WHERE c.queue = '$queue' AND NOT EXISTS (
				  SELECT FROM runs AS r JOIN looks AS l USING (job_id, token)
				   WHERE r.job_id = c.job_id
					 AND pg_visible_in_snapshot(c.xid, l.snapshot))},
		"J2: $queue: every change was seen by the job that its enqueue returned"
	);
	is_none(
		qq{SELECT key, c.n, r.seen
			 FROM (SELECT key, count(*) AS n FROM changes
					WHERE queue = '$queue' GROUP BY key) AS c
			 FULL JOIN (SELECT key, max(seen) AS seen
						  FROM runs JOIN looks USING (job_id, token)
						 WHERE queue = '$queue' GROUP BY key) AS r USING (key)
			WHERE c.n IS DISTINCT FROM r.seen},
		"J2: $queue: the last run of each key has seen all its changes");
	is_none(
		qq{SELECT job_id, c.n, r.n
			 FROM (SELECT job_id, count(*) AS n FROM changes
					WHERE queue = '$queue' GROUP BY job_id) AS c
			 FULL JOIN (SELECT job_id, count(*) AS n FROM runs
						 WHERE queue = '$queue' GROUP BY job_id) AS r USING (job_id)
			WHERE c.n IS NULL OR r.n IS DISTINCT FROM 1},
		"J7: $queue: every committed job has run exactly once, and no other");
	is_none(
		qq{SELECT r.* FROM runs AS r
			WHERE r.queue = '$queue' AND r.token < (
				  SELECT max(f.token) FROM fetches AS f WHERE f.job_id = r.job_id)},
		"J11: $queue: each was completed with the token of its last fetch");
	is_none(
		qq{SELECT job_id, token FROM fetches WHERE queue = '$queue'
			GROUP BY job_id, token HAVING count(*) > 1},
		"J11: $queue: no token was handed out twice");
	is_none(
		qq{SELECT f.* FROM runs AS r JOIN fetches AS f USING (job_id, token)
			WHERE r.queue = '$queue' AND NOT EXISTS (
				  SELECT FROM changes AS c
				   WHERE c.job_id = f.job_id AND c.key = f.key AND c.n = f.n
					 AND c.outcome IN ('enqueued', 'replaced', 'rerun'))},
		"J6: $queue: every payload is one that was committed for this job");
	is_none(
		qq{SELECT key, at, last FROM (
			   SELECT key, at, max(ended) OVER (PARTITION BY key ORDER BY at
					  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS last
				 FROM runs JOIN looks USING (job_id, token)
				WHERE queue = '$queue') AS r
			WHERE at < last},
		"J4: $queue: no two jobs of a key have run at the same time")
	  if $exclusive;
	return;
}

sub note_numbers
{
	my ($queue, %ends) = @_;

	note "$queue: " . $node->safe_psql(
		'postgres', qq{
		SELECT string_agg(what || ' ' || n, ', ')
		  FROM (SELECT outcome AS what, count(*) AS n
				  FROM changes WHERE queue = '$queue' GROUP BY outcome
				UNION ALL
				SELECT 'fetches', count(*) FROM fetches WHERE queue = '$queue'
				UNION ALL
				SELECT 'runs', count(*) FROM runs WHERE queue = '$queue') AS t});
	note "$queue: clients ended: "
	  . join(', ', map { "$_: $ends{$_}" } sort keys %ends);
	return;
}

sub check_load
{
	my ($mode, $dedup, $number, %opt) = @_;
	my $queue = join ', ', $mode, $dedup =~ /^'(\w+)'/, $opt{name} // ();
	my $share = int($number / $producers) + 1;

	# some dozens of clients die
	my %replace = (
		QUEUE => $queue,
		DEDUP => $dedup,
		DEATH => 10 + int($number / 5),
		LONG => '30 min');

	$node->safe_psql('postgres',
		"SELECT idem_queue_set('$queue', max_attempts => 100000)");
	my %ends = run_clients($mode, $share, $opt{crash}, %replace);

	# What is left, without deaths.  The leases of all others have expired by
	# the clock of these workers.
	stop_clients();
	$node->safe_psql('postgres', "SELECT idem_resume('$queue')");
	start_client(
		$mode, $_, 1_000_000, %replace,
		DEATH => '2000000000',
		LONG => '50 ms',
		OPTIONS => '-c idem.clock_offset=7200') foreach 1 .. $workers;
	ok( $node->poll_query_until(
			'postgres',
			"SELECT count(*) = 0 FROM idem.jobs WHERE queue = '$queue'"),
		"J7: $queue: all jobs come to an end");
	stop_clients();

	note_numbers($queue, %ends);
	check_queue($queue, $dedup =~ /until_executed/);
	return if $opt{crash};
	cmp_ok($ends{killed} // 0, '>', 0, "$queue: some clients were killed");
	cmp_ok($ends{2} // 0, '>', 0, "$queue: some connections were terminated");
	cmp_ok(
		$node->safe_psql(
			'postgres', qq{
			SELECT count(*) FROM changes
			 WHERE queue = '$queue' AND outcome IN ('absorbed', 'replaced')}),
		'>',
		$number / 100,
		"J1: $queue: there were duplicates");
	return;
}

foreach my $mode ('in transaction', 'leased')
{
	check_load($mode, q{'until_executing', NULL}, $jobs);
	check_load($mode, q{'until_executed', 'rerun'}, $jobs);
	check_load(
		$mode, q{'until_executing', NULL}, $jobs / 10,
		name => 'crash',
		crash => 1);
}
is($crashes, 2, 'the server was crashed in each mode');

#
# Without any fetch: one job for each key, unless it drains
#

$node->safe_psql('postgres', "ALTER SYSTEM SET idem.drain_after = '1h'");
$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
ok( $node->poll_query_until(
		'postgres', "SELECT current_setting('idem.drain_after') = '1h'"),
	'no job drains any more');

sub check_one_job
{
	my ($queue) = @_;

	is_none(
		qq{SELECT key, c.ids, j.ids
			 FROM (SELECT key, array_agg(DISTINCT job_id) AS ids FROM changes
					WHERE queue = '$queue' GROUP BY key) AS c
			 FULL JOIN (SELECT key, array_agg(job_id) AS ids FROM idem.jobs
						 WHERE queue = '$queue' GROUP BY key) AS j USING (key)
			WHERE c.ids IS DISTINCT FROM j.ids OR cardinality(j.ids) <> 1},
		"J1: $queue: every key has one job, which all enqueues returned");
	return;
}

# all clients enqueue the same new key at a time
foreach my $dedup ('until_executing', 'until_executed', 'until_expired')
{
	my $queue = "meet, $dedup";

	$node->safe_psql('postgres',
		"SELECT idem_queue_set('$queue', dedup => '$dedup', key_ttl => '1 hour')");
	ok( pgbench_run(
			$node,
			[ "--client=$workers", '--jobs=2', '--transactions=250' ],
			[
				[
					qq{BEGIN; SELECT produce_keys('$queue', NULL, NULL,
						ARRAY['key ' || nextval('tick') / $workers]);}
					  . end_transaction(25),
					1
				]
			]),
		"J6: $queue: many enqueue the same key at once");
	check_one_job($queue);
}

# Jobs that are changed all the time, so that they move in the indexes: a lookup at
# that moment still finds them.
my $push = q{
BEGIN \; INSERT INTO changes
SELECT 0, 'push', :k, e.job_id, e.outcome, pg_current_xact_id()
  FROM idem_enqueue('push', key => :k::text, delay => '10 min', MORE) AS e;
};

ok( pgbench_run(
		$node,
		[ "--client=$workers", '--jobs=2', '--transactions=500' ],
		[
			map {
				[
					"\\set k random(1, 3)\n"
					  . $push =~ s/MORE/$_/r
					  . end_transaction(10), 1
				]
			} q{on_duplicate => 'debounce'},
			q{on_duplicate => 'replace', include_scheduled => true},
			q{include_scheduled => true}
		]),
	'J1: push: jobs are changed all the time');
check_one_job('push');

# Errors that clients have seen: only those that they wanted.
my %errors;
$errors{$_}++
  foreach slurp_file($node->logfile) =~ /\] (\w{5}) [^\n]*?(?:ERROR|FATAL):/g;
delete $errors{$_} foreach '57P01', '57P02', '57P03', '08006', '08P01';
is(join(' ', sort keys %errors), '', 'no client has seen an error');

amcheck_ok($node, 'after the load', 'idem.jobs', 'idem.queues');
$node->stop;
log_ok($node, killed => $crashes);
done_testing();
