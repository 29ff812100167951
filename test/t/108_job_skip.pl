# J14: what fetches skip, under load, without shared memory, and if the shared memory is full.
#
# Under load every enqueue, fetch and return of a job is recorded with the time before and
# after it.  Afterwards the test looks for a fetch that passed a job which was there, due and
# free before the fetch began, and which no fetch took before it ended.  There must be none.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes;

my $node = new_node(
	'job_skip', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
idem.stats_max = 100
fsync = off
});

# 30 leased jobs, due in the 30 seconds from 2020 on, and a function that shows what a
# fetch gets
my $helpers = q{
	CREATE FUNCTION t(s float) RETURNS timestamptz LANGUAGE sql IMMUTABLE AS
		$$ SELECT '2020-01-01 00:00:00+00'::timestamptz + s * interval '1 s' $$;
	CREATE PROCEDURE lease_jobs(q text, n int) LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM idem_enqueue(q, run_at => t(i)) FROM generate_series(1, n) AS i;
		COMMIT;
		PERFORM idem_fetch(q, n, lease => '1 h');
	END $$;
	CREATE FUNCTION got(q text) RETURNS text LANGUAGE sql AS
		$$ SELECT coalesce(min(payload #>> '{}'), 'nothing') FROM idem_fetch(q, lease => '1 h') $$;
};
run($helpers);

#
# Under load
#

run(q{
	CREATE SEQUENCE fetch_id;
	CREATE TABLE free (job_id bigint, priority int, run_at timestamptz, since timestamptz);
	CREATE TABLE fetches (id bigint, t0 timestamptz, t1 timestamptz, wanted int, got int);
	CREATE TABLE taken (id bigint, job_id bigint, priority int, run_at timestamptz);
	CREATE TABLE held (job_id bigint, t0 timestamptz, t1 timestamptz);

	-- enqueue somewhere: now, some time ago, or for a moment later
	CREATE PROCEDURE produce() LANGUAGE plpgsql AS $$
	DECLARE
		p int := random() * 3;
		at timestamptz := clock_timestamp() + CASE (random() * 3)::int
			WHEN 0 THEN interval '0' WHEN 1 THEN interval '0.2 s' ELSE -random() * interval '20 s' END;
		id bigint;
	BEGIN
		id := (SELECT job_id FROM idem_enqueue('load', run_at => at, priority => p));
		IF random() < 0.1 THEN
			ROLLBACK;
			RETURN;
		END IF;
		COMMIT;
		INSERT INTO free VALUES (id, p, at, clock_timestamp());
		COMMIT;
	END $$;

	-- fetch with a lease, and then end the jobs, give them back, or keep them
	CREATE PROCEDURE consume() LANGUAGE plpgsql AS $$
	DECLARE
		f fetches := (nextval('fetch_id'), clock_timestamp(), NULL, 1 + (random() * 2)::int, NULL);
		ids bigint[];
		tokens bigint[];
		at timestamptz;
	BEGIN
		SELECT array_agg(job_id), array_agg(token) INTO ids, tokens FROM idem_fetch('load', f.wanted, lease => '1 h');
		f.got := coalesce(cardinality(ids), 0);
		COMMIT;
		f.t1 := clock_timestamp();
		INSERT INTO fetches SELECT (f).*;
		INSERT INTO taken SELECT f.id, job_id, priority, run_at FROM idem.jobs WHERE job_id = ANY (ids);
		COMMIT;
		FOR i IN 1 .. f.got LOOP
			CASE (random() * 3)::int
				WHEN 0 THEN
					at := idem_snooze(ids[i], tokens[i], '0');
					COMMIT;
					INSERT INTO free SELECT job_id, priority, at, clock_timestamp() FROM taken WHERE id = f.id AND job_id = ids[i];
				WHEN 1, 2 THEN
					PERFORM idem_complete(ids[i], tokens[i]);
				ELSE NULL;
			END CASE;
			COMMIT;
		END LOOP;
	END $$;

	-- fetch without a lease, and roll back
	CREATE PROCEDURE try() LANGUAGE plpgsql AS $$
	DECLARE
		t0 timestamptz := clock_timestamp();
		ids bigint[];
	BEGIN
		ids := (SELECT array_agg(job_id) FROM idem_fetch('load', 2));
		PERFORM pg_sleep(random() * 0.01);
		ROLLBACK;
		INSERT INTO held SELECT unnest(ids), t0, clock_timestamp();
		COMMIT;
	END $$;
});

# so that VACUUM cannot remove what ends
my $old = session($node);
$old->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT');
run("CALL lease_jobs('load', 500)");
ok( pgbench_run(
		$node,
		[ '--client' => 8, '--jobs' => 2, '--transactions' => 250 ],
		[ [ 'CALL produce();', 10 ], [ 'CALL consume();', 8 ], [ 'CALL try();', 1 ] ]),
	'load');

is( run(q{
	SELECT count(*)
	  FROM fetches AS f
	  LEFT JOIN LATERAL (SELECT * FROM taken WHERE taken.id = f.id ORDER BY priority DESC, run_at DESC, job_id DESC LIMIT 1) AS last ON true
	  JOIN free AS x ON greatest(x.since, x.run_at) < f.t0
	   AND (f.got < f.wanted OR (x.priority, x.run_at, x.job_id) < (last.priority, last.run_at, last.job_id))
	  LEFT JOIN taken AS t ON t.job_id = x.job_id AND t.run_at = x.run_at
	  LEFT JOIN fetches AS by ON by.id = t.id
	 WHERE (by.id IS NULL OR by.t0 > f.t1)
	   AND NOT EXISTS (SELECT FROM held AS h WHERE h.job_id = x.job_id AND h.t0 < f.t1 AND h.t1 > f.t0)
}),
	0,
	'no fetch passed a job that was free before it began');
cmp_ok(run('SELECT count(*) FROM taken'), '>', 500, 'many jobs were fetched');
is( run(q{SELECT count(*) FROM free AS x WHERE NOT EXISTS (SELECT FROM taken AS t WHERE t.job_id = x.job_id AND t.run_at = x.run_at)
		AND NOT EXISTS (SELECT FROM idem.jobs AS j WHERE j.job_id = x.job_id AND j.run_at = x.run_at)}),
	0,
	'and none was lost');
$old->quit;

#
# A walk that takes long
#
# A fetch makes a spent job dead, and for this waits for a lock on the history.  The walk has begun
# before, so it lasts as long as that lock.  Cleanup would make the job dead, too, but it skips a
# table that is locked; so the lock comes first.

run(q{
	-- jobs due in the seconds from 2020 on, leased, whose payload is their number, and two for later
	CREATE PROCEDURE lease_numbered(q text, n int, spent int) LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM idem_enqueue(q, to_jsonb(i), run_at => t(i), max_attempts => CASE i WHEN spent THEN 1 END) FROM generate_series(1, n) AS i;
		PERFORM idem_enqueue(q, '"later"', run_at => idem_clock() + '5 h');
		PERFORM idem_enqueue(q, '"last"', run_at => idem_clock() + '6 h');
		COMMIT;
		PERFORM idem_fetch(q, n, lease => '1 h');
	END $$;
	CREATE PROCEDURE spend(q text, spent int) LANGUAGE sql AS $$
		SELECT idem_heartbeat(ARRAY[job_id], ARRAY[token], '1 us') FROM idem.jobs WHERE queue = q AND run_at = t(spent);
	$$;
	CREATE FUNCTION pages(q text) RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		plan json;
	BEGIN
		EXECUTE format($q$ EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM idem_fetch(%L, lease => '1 h') $q$, q) INTO plan;
		RETURN (plan #>> '{0,Plan,Shared Hit Blocks}')::bigint + (plan #>> '{0,Plan,Shared Read Blocks}')::bigint;
	END $$;
});

# What a range promises depends on the time since the walk: waits until that has passed on the clock of
# the server.
sub wait_for_clock
{
	my ($since, $span) = @_;

	$node->poll_query_until('postgres', "SELECT clock_timestamp() > timestamptz '$since' + interval '$span'")
	  or die 'the time does not pass';
	return;
}

my $locker = session($node);
my $walker = session($node);
my $poller = session($node);

run(q{CALL lease_numbered('long', 60, 50); SELECT idem_cancel(job_id) FROM idem.jobs WHERE queue = 'long' AND payload = '4'});
my $cancelled = run('SELECT max(job_id) FROM idem.job_log');
$locker->query('BEGIN; LOCK TABLE idem.job_log IN SHARE MODE');
run("CALL spend('long', 50)");
$walker->send(q{SELECT got('long')});
wait_until_blocked($node, $walker, 'relation');
# by then the walk has lasted for more than 0.6 seconds, so its ranges live for at least 15
wait_for_clock(run("SELECT query_start FROM pg_stat_activity WHERE pid = $walker->{pid}"), '600 ms');
$locker->query('COMMIT');
is($walker->receive, 'nothing', 'a walk that lasts long');
my $walked = Time::HiRes::time();
my $walked_at = run('SELECT clock_timestamp()');
run(q{INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, payload) VALUES (1000000, t(10.5), now(), 0, 'long', '"by hand"')});

# every change by a function is noticed at once
my $of = q{FROM idem.jobs WHERE queue = 'long' AND payload =};
foreach (
	[ 'idem_enqueue', q{idem_enqueue('long', '"new"', run_at => t(15.5))}, 'new' ],
	[ 'idem_enqueue_many', q{count(*) FROM idem_enqueue_many('long', ARRAY['"many"']::jsonb[], run_at => t(16.5))}, 'many' ],
	[ 'idem_fail', "idem_fail(job_id, token, retry_in => '0') $of '5'", '5' ],
	[ 'idem_fail_many', "idem_fail_many(ARRAY[job_id], ARRAY[token], retry_in => '0') $of '6'", '6' ],
	[ 'idem_snooze', "idem_snooze(job_id, token, '0') $of '7'", '7' ],
	[ 'idem_snooze_many', "idem_snooze_many(ARRAY[job_id], ARRAY[token], '0') $of '8'", '8' ],
	[ 'idem_heartbeat', "idem_heartbeat(ARRAY[job_id], ARRAY[token], '1 us') $of '9'", '9' ],
	[ 'idem_progress', "idem_progress(job_id, token, '1', '1 us') $of '20'", '20' ],
	[ 'idem_retry_many', "idem_retry_many(ARRAY[$cancelled])", '4' ],
	[ 'idem_reschedule_many', "idem_reschedule_many(ARRAY[job_id], run_at => t(30.5)) $of '\"later\"'", 'later' ])
{
	my ($name, $call, $payload) = @$_;

	is($poller->query(q{SELECT got('long')}), 'nothing', "before $name");
	run("SELECT $call");
	is($poller->query(q{SELECT got('long')}), $payload, "$name is noticed");
}

# A row that bypasses the functions is not noticed, but it comes
wait_for_clock($walked_at, '1200 ms');
my @got = $poller->query(q{SELECT got('long')});
SKIP:
{
	skip 'this machine is too slow', 1 if Time::HiRes::time() > $walked + 10;
	is("@got", 'nothing', 'fetches use a range for longer than a second if it was dear');
}
ok( grep({ $_ eq 'by hand' } @got) ||
	  $node->poll_query_until('postgres', q{SELECT got('long')}, 'by hand'),
	'but not without end');

# A fetch that fails in the middle does not keep others from collecting
foreach (
	[ 'the transaction', '', 'SELECT' ],
	[ 'a subtransaction', 'BEGIN; SAVEPOINT a', 'ROLLBACK TO a' ])
{
	my ($what, $begin, $end) = @$_;
	my $queue = "failed in $what";

	run("CALL lease_numbered('$queue', 3000, 12)");
	$locker->query('BEGIN; LOCK TABLE idem.job_log IN SHARE MODE');
	run("CALL spend('$queue', 12)");
	$walker->query("$begin; SET lock_timeout = '10ms'");
	is($walker->sqlstate("SELECT got('$queue')"), '55P03', "a walk fails in $what");
	$walker->query("$end; RESET lock_timeout");
	$locker->query('COMMIT');
	my $first = $poller->query("SELECT pages('$queue')");
	cmp_ok($first, '>', 100, 'the next fetch looks at everything');
	cmp_ok($poller->query("SELECT pages('$queue')") * 3, '<', $first, 'and collects');
	$walker->query('ROLLBACK') if $begin ne '';
}

# Enqueues of a key whose jobs have ended: what a dear look has seen is used for longer than a second
run(q{
	CREATE FUNCTION enqueue_pages(key text, OUT pages bigint, OUT secs float) LANGUAGE plpgsql AS $$
	DECLARE
		began timestamptz := clock_timestamp();
		plan json;
	BEGIN
		EXECUTE format($q$ EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM idem_enqueue('hot', NULL, %L) $q$, key) INTO plan;
		pages := (plan #>> '{0,Plan,Shared Hit Blocks}')::bigint + (plan #>> '{0,Plan,Shared Read Blocks}')::bigint;
		secs := extract(epoch FROM clock_timestamp() - began);
		RAISE EXCEPTION 'undo';
	EXCEPTION WHEN raise_exception THEN
	END $$;
});
$walker->query(q{BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT});
run(q{
	SELECT idem_enqueue('hot', NULL, 'k');
	INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue, key_hash, key)
	SELECT 2000000 + i, run_at, enqueued_at, 0, queue, key_hash, key FROM idem.jobs, generate_series(1, 200000) AS i WHERE queue = 'hot';
	DELETE FROM idem.jobs WHERE queue = 'hot';
});
$walked = Time::HiRes::time();
my ($pages, $secs) = split /\|/, $poller->query(q{SELECT * FROM enqueue_pages('k')});
cmp_ok($pages, '>', 1000, 'an enqueue looks at many ended jobs of its key');
wait_for_clock(run('SELECT clock_timestamp()'), '1200 ms');
my ($late) = split /\|/, $poller->query(q{SELECT * FROM enqueue_pages('k')});
SKIP:
{
	skip 'this machine is too fast or too slow', 1 if Time::HiRes::time() > $walked + 20 * $secs;
	cmp_ok($late * 10, '<', $pages, 'a later one, after a second, does not');
}
$_->quit foreach $locker, $walker, $poller;

#
# Without room for the queue, and with room again
#

# S2: the transaction uses all the queues that the database may have
my $holder = session($node);
run("SELECT count(idem_enqueue('q' || i)) FROM generate_series(1, 74) AS i");
$holder->query('BEGIN; SELECT count(idem_enqueue(queue)) FROM idem.queue_stats');
run("CALL lease_jobs('late', 30)");
my $producer = session($node);
$producer->query(q{SELECT idem_enqueue('late', '"one"', run_at => t(15.5))});
is(run("SELECT count(*) FROM idem.queue_stats WHERE queue = 'late'"), 0, 'no room for the queue');
my $worker = session($node);
is($worker->query(q{SELECT got('late')}), 'one', 'without room: a job');
is($worker->query(q{SELECT got('late')}), 'nothing', 'then nothing');
$producer->query(q{SELECT idem_enqueue('late', '"two"', run_at => t(15.5))});
is($worker->query(q{SELECT got('late')}), 'two', 'another session has enqueued it: found at once');
$holder->query('ROLLBACK');
ok( $node->poll_query_until(
		'postgres',
		q{SELECT EXISTS (SELECT FROM idem.queue_stats WHERE queue = 'late') FROM idem_enqueue('late', '"three"', run_at => t(15.5))}),
	'there is room again');
my $worker2 = session($node);
1 while $worker2->query(q{SELECT got('late')}) ne 'nothing';
$producer->query(q{SELECT idem_enqueue('late', '"four"', run_at => t(15.5))});
is($worker2->query(q{SELECT got('late')}), 'four', 'the first session has noticed that there is room');
$_->quit foreach $producer, $worker, $worker2;

#
# Without shared memory
#

my $alone = new_node('not_preloaded');

run($helpers, node => $alone);
run("CALL lease_jobs('q', 2000)", node => $alone);
run(q{
	CREATE FUNCTION pages() RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		plan json;
	BEGIN
		EXECUTE $q$ EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM idem_fetch('q', lease => '1 h') $q$ INTO plan;
		RETURN (plan #>> '{0,Plan,Shared Hit Blocks}')::bigint + (plan #>> '{0,Plan,Shared Read Blocks}')::bigint;
	END $$;
}, node => $alone);
$worker = session($alone);
is($worker->query(q{SELECT got('q')}), 'nothing', 'without shared memory: nothing');
run(q{SELECT idem_enqueue('q', '"one"', run_at => t(15.5))}, node => $alone);
is($worker->query(q{SELECT got('q')}), 'one', 'another session has enqueued it: found at once');
run(q{SELECT count(*) FROM idem_enqueue_many('q', array_fill('1'::jsonb, ARRAY[100]))}, node => $alone);
is($worker->query('SELECT min(pages()) < 60 FROM generate_series(1, 20)'),
	't', 'fetches behind many leased jobs are cheap');
$worker->quit;

log_ok($_) foreach $node, $alone;
done_testing();
