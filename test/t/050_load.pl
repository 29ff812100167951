# 32 concurrent clients on 1,000 keys, with random rollbacks: the number of
# effects equals the number of keys.
#
# A client claims a key, and if that succeeds it inserts a row into effects and
# finishes the key.  Nothing but idem keeps a key from having two effects: the
# table has no unique constraint.  Each phase runs until every key is finished.
#
# Every transaction claims one key, or several by one call of idem_claim_many, so
# there must be no deadlock.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = 32;
my $node = new_node('load', conf => qq{
max_connections = 50
deadlock_timeout = 100ms
});

$node->safe_psql(
	'postgres', q{
	CREATE TABLE effects (
		id bigint GENERATED ALWAYS AS IDENTITY,
		key text NOT NULL);
	CREATE INDEX ON effects (id);
	CREATE TABLE todo (n int PRIMARY KEY, key text NOT NULL);
	CREATE SEQUENCE tick;

	CREATE FUNCTION request(k text) RETURNS jsonb LANGUAGE sql IMMUTABLE AS
	$$ SELECT jsonb_build_object('key', k) $$;

	-- the work: one effect
	CREATE FUNCTION work(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
	DECLARE
		effect bigint;
	BEGIN
		INSERT INTO effects (key) VALUES (request ->> 'key')
			RETURNING id INTO effect;
		RETURN jsonb_build_object('effect', effect);
	END $$;

	-- A client that gets the result can see the effect: they were committed
	-- together.  Only REPEATABLE READ may get a result that is newer than its
	-- snapshot.
	CREATE FUNCTION check_replay(k text, result jsonb) RETURNS void
	LANGUAGE plpgsql AS $$
	BEGIN
		IF result IS NULL OR
		   (current_setting('transaction_isolation') <> 'repeatable read'
			AND NOT EXISTS (SELECT FROM effects AS e
							 WHERE e.id = (result ->> 'effect')::bigint
							   AND e.key = k)) THEN
			RAISE EXCEPTION 'key % has the result % without its effect', k, result;
		END IF;
	END $$;

	CREATE FUNCTION run_once(k text, w interval) RETURNS text
	LANGUAGE plpgsql AS $$
	DECLARE
		answer record;
	BEGIN
		SELECT * INTO STRICT answer
		  FROM idem_claim(k, request => request(k), wait => w);
		IF answer.claimed AND answer.status = 'claimed' THEN
			PERFORM idem_finish(k, work(request(k)));
		ELSIF answer.claimed THEN
			RAISE EXCEPTION 'claimed, but %', answer.status;
		ELSIF answer.status = 'finished' THEN
			PERFORM check_replay(k, answer.result);
		ELSIF answer.status <> 'busy' OR w IS NULL THEN
			RAISE EXCEPTION 'unexpected answer %', answer.status;
		END IF;
		RETURN answer.status;
	END $$;

	CREATE FUNCTION call_once(k text, w interval) RETURNS text
	LANGUAGE plpgsql AS $$
	DECLARE
		answer record;
	BEGIN
		SELECT * INTO STRICT answer
		  FROM idem_call(k, 'work', request(k), wait => w);
		IF answer.status = 'finished' THEN
			PERFORM check_replay(k, answer.result);
		ELSIF answer.status <> 'busy' OR w IS NULL THEN
			RAISE EXCEPTION 'unexpected answer %', answer.status;
		END IF;
		RETURN answer.status;
	END $$;

	-- a run that fails inside and is caught
	CREATE FUNCTION run_and_fail(k text, w interval) RETURNS void
	LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM run_once(k, w);
		RAISE EXCEPTION USING ERRCODE = 'TEST1', MESSAGE = 'failed';
	EXCEPTION WHEN SQLSTATE 'TEST1' THEN
		NULL;
	END $$;

	CREATE FUNCTION claim_and_release(k text, w interval) RETURNS void
	LANGUAGE plpgsql AS $$
	BEGIN
		IF (idem_claim(k, request => request(k), wait => w)).claimed THEN
			PERFORM idem_release(k);
		END IF;
	END $$;

	-- some keys in one call, in any order, perhaps one of them twice
	CREATE FUNCTION run_many(ks text[], w interval) RETURNS void
	LANGUAGE plpgsql AS $$
	DECLARE
		answer record;
		mine text[] := '{}';
		results jsonb[] := '{}';
	BEGIN
		FOR answer IN
			SELECT * FROM idem_claim_many(ks,
				ARRAY(SELECT request(k)
						FROM unnest(ks) WITH ORDINALITY AS u (k, n) ORDER BY n),
				wait => w)
		LOOP
			IF answer.key IS DISTINCT FROM ks[answer.ord] THEN
				RAISE EXCEPTION 'element % is not %', answer.ord, answer.key;
			ELSIF answer.claimed THEN
				mine := mine || answer.key;
				results := results || work(request(answer.key));
			ELSIF answer.status = 'finished' THEN
				PERFORM check_replay(answer.key, answer.result);
			ELSIF answer.status = 'held' AND answer.key = ANY (mine) THEN
				NULL;
			ELSIF answer.status <> 'busy' OR w IS NULL THEN
				RAISE EXCEPTION 'unexpected answer %', answer.status;
			END IF;
		END LOOP;
		PERFORM idem_finish_many(mine, results);
	END $$;

	CREATE FUNCTION todo_key(i int) RETURNS text LANGUAGE sql AS
	$$ SELECT t.key FROM todo AS t WHERE t.n = i $$;
});

# Scripts for pgbench.  :k is drawn from the keys that are left, WAIT stands
# for the argument; two of three transactions commit.
my $draw = q{
\set k random(1, :keys)
\set fate random(1, 3)
};
my $end = q{
\if :fate = 1
ROLLBACK;
\else
COMMIT;
\endif
};
my %script = (
	once => $draw . 'BEGIN; SELECT run_once(todo_key(:k), WAIT);' . $end,
	call => $draw . 'BEGIN; SELECT call_once(todo_key(:k), WAIT);' . $end,
	repeatable_read => $draw
	  . 'BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM todo; '
	  . 'SELECT run_once(todo_key(:k), WAIT);'
	  . $end,
	savepoint => $draw
	  . 'BEGIN; SAVEPOINT s; SELECT run_once(todo_key(:k), WAIT); '
	  . 'ROLLBACK TO s; SELECT run_once(todo_key(:k), WAIT); RELEASE s;'
	  . $end,
	exception => $draw . 'BEGIN; SELECT run_and_fail(todo_key(:k), WAIT);' . $end,
	release => $draw
	  . 'BEGIN; SELECT claim_and_release(todo_key(:k), WAIT);'
	  . $end,
	many => $draw
	  . '\set l random(1, :keys)' . "\n"
	  . '\set m random(1, :keys)' . "\n"
	  . 'BEGIN; SELECT run_many(ARRAY[todo_key(:k), todo_key(:l),'
	  . ' todo_key(:m), todo_key(:k)], WAIT);'
	  . $end,
	prepared => $draw . q{
BEGIN;
SELECT run_once(todo_key(:k), WAIT);
PREPARE TRANSACTION 'client :client_id';
\if :fate = 1
ROLLBACK PREPARED 'client :client_id';
\else
COMMIT PREPARED 'client :client_id';
\endif
},
	serializable => $draw
	  . 'BEGIN ISOLATION LEVEL SERIALIZABLE; '
	  . 'SELECT run_once(todo_key(:k), WAIT);'
	  . $end,
	cleanup => q{
\set n random(1, 50)
SELECT idem_cleanup(:n);
},

	# all clients claim the same key, which is new
	hot => q{
\set fate random(1, 4)
BEGIN;
SELECT run_once('PREFIX' || nextval('tick') / 32, WAIT);
} . $end);

my @everything = qw(once call repeatable_read savepoint exception release many
  prepared);

sub script
{
	my ($name, $weight, %replace) = @_;
	my $text = $script{$name};

	$text =~ s/\b$_\b/$replace{$_}/g foreach keys %replace;
	return [ $text, $weight ];
}

# Keys 'PREFIXn' that are expired already; they have no effects.
sub preload_expired
{
	my ($prefix, $from, $to) = @_;

	$node->safe_psql(
		'postgres', qq{
		SET idem.clock_offset = -100000;
		SELECT count(*)
		  FROM generate_series($from, $to) AS i,
			   idem_claim('$prefix' || i, ttl => '1 s',
						  request => to_jsonb('before'::text))});
	return;
}

# the keys that are not finished yet, numbered for the scripts; how many
sub fill_todo
{
	my ($prefix, $from, $to) = @_;

	return $node->safe_psql(
		'postgres', qq{
		TRUNCATE todo;
		INSERT INTO todo
		SELECT row_number() OVER (ORDER BY i), '$prefix' || i
		  FROM generate_series($from, $to) AS i
		 WHERE NOT EXISTS (SELECT FROM idem_get('$prefix' || i));
		ANALYZE todo;
		SELECT count(*) FROM todo});
}

# every key from..to has one effect, and its result names that effect
sub check_effects
{
	my ($prefix, $from, $to, $phase) = @_;
	my $keys = $to - $from + 1;

	is( $node->safe_psql(
			'postgres', qq{
			SELECT count(*), count(DISTINCT key) FROM effects
			 WHERE key ~ '^$prefix\[0-9]'}),
		"$keys|$keys",
		"K3: $phase: as many effects as keys, none twice");
	is( $node->safe_psql(
			'postgres', qq{
			SELECT count(*) FROM generate_series($from, $to) AS i,
				   idem_claim('$prefix' || i, request => request('$prefix' || i))
				   AS c
			  JOIN effects AS e ON e.id = (c.result ->> 'effect')::bigint
			 WHERE c.status = 'finished' AND e.key = '$prefix' || i}),
		$keys,
		"K2: $phase: every result names the effect of its key");
	return;
}

# rounds of load until every key from..to is finished
sub run_phase
{
	my ($phase, $prefix, $from, $to, $scripts, %opt) = @_;
	my $left = fill_todo($prefix, $from, $to);
	my $rounds = 0;
	my $good = 1;

	while ($left > 0 && $good && $rounds++ < 20)
	{
		note "round $rounds, $left keys left";
		$good = pgbench_run(
			$node,
			[
				"--client=$clients", '--jobs=2',
				'--transactions=' . ($opt{transactions} // 60),
				"--define=keys=$left", @{ $opt{options} // [] }
			],
			$scripts,
			failures => $opt{failures});
		$left = fill_todo($prefix, $from, $to);
	}
	ok($good, "K3: $phase: no client has seen an error or a wrong answer");
	is($left, '0', "K4: $phase: every key is finished in the end");
	check_effects($prefix, $from, $to, $phase);
	return;
}

run_phase('waiting', 'wait ', 1, 1000,
	[ map { script($_, 1, WAIT => 'NULL') } @everything ]);

run_phase('not waiting', 'busy ', 1, 1000,
	[ map { script($_, 1, WAIT => "'0'") } @everything ]);

preload_expired('expired ', 1, 1000);
run_phase('expired keys', 'expired ', 1, 1000,
	[ map { script($_, 1, WAIT => 'NULL') } @everything ]);

preload_expired('cleanup ', 1, 1000);
run_phase(
	'expired keys beside cleanup',
	'cleanup ', 1, 1000,
	[
		(map { script($_, 1, WAIT => 'NULL') } @everything),
		(map { script($_, 1, WAIT => "'5 ms'") } @everything),
		script('cleanup', 4)
	]);

# K10: serialization failures are reported and retried, and change nothing
# about the count
preload_expired('serializable ', 1, 50);
run_phase(
	'serializable', 'serializable ', 1, 100,
	[
		script('once', 1, WAIT => 'NULL'),
		script('serializable', 2, WAIT => 'NULL')
	],
	transactions => 20,
	options => ['--max-tries=1000'],
	failures => 1);

#
# hot keys: all clients meet on one key at a time, absent or expired before,
# so that several find it free at once
#

my $turns = 250;

foreach my $what ('absent', 'expired', 'cleaned up')
{
	my $prefix = "hot $what ";
	my $first =
	  $node->safe_psql('postgres', q{SELECT nextval('tick') / 32 + 1});
	my $last = $first + $turns - 1;
	my @scripts = script('hot', 20, PREFIX => $prefix, WAIT => 'NULL');

	push @scripts, script('cleanup', 1) if $what eq 'cleaned up';
	preload_expired($prefix, $first, $last + 1) if $what ne 'absent';

	# nextval in the query above has begun a turn that no other client takes part
	# in; the first of this phase is full
	$node->safe_psql('postgres', "SELECT setval('tick', $first * 32 - 1)");
	ok( pgbench_run(
			$node,
			[ "--client=$clients", '--jobs=2', "--transactions=$turns" ],
			\@scripts),
		"K3: all clients meet on keys that are $what");
	is( $node->safe_psql(
			'postgres', qq{
			SELECT key, count(*) FROM effects
			 WHERE key LIKE '$prefix%' GROUP BY key HAVING count(*) > 1}),
		'',
		"K3: hot keys that were $what: none has run twice");

	# those whose clients have all rolled back
	run_phase("hot keys that were $what",
		$prefix, $first, $last,
		[ map { script($_, 1, WAIT => 'NULL') } qw(once savepoint many) ],
		transactions => 20);
}

my $log = slurp_file($node->logfile);

foreach my $state ('23505', '40P01', 'TEST1')
{
	unlike($log, qr/\] $state /, "K3: no $state in the server log");
}
is( $node->safe_psql('postgres', 'SELECT count(*) FROM pg_prepared_xacts'),
	'0', 'no prepared transaction is left');

amcheck_ok($node, 'after the load');
$node->stop;
log_ok($node);
done_testing();
