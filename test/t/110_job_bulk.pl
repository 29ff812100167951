# J9: 100,000 keyed jobs in one transaction with default settings, fetched in
# order and completed in batches.
#
# An enqueue takes no entry in the lock table that it keeps, so
# max_locks_per_transaction stays at its default; the same number of advisory
# locks would exhaust it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $jobs = 100_000;
my $batch = 1000;

my $node = new_node(
	'job_bulk', conf => q{
checkpoint_timeout = 1h
max_wal_size = 4GB
deadlock_timeout = 100ms
});

is( $node->safe_psql(
		'postgres', q{
		SELECT setting = boot_val FROM pg_settings
		 WHERE name = 'max_locks_per_transaction'}),
	't',
	'max_locks_per_transaction has its default');

$node->safe_psql(
	'postgres', q{
	-- Fetches all jobs in batches and completes them; the payloads are the
	-- numbers from 1.  Returns how many batches there were, how many jobs, and
	-- how many of these came out of turn or were not completed.
	CREATE PROCEDURE consume(q text, batch int, lease interval,
		INOUT batches int, INOUT jobs int, INOUT wrong int)
	LANGUAGE plpgsql AS $$
	DECLARE
		fetched record;
	BEGIN
		LOOP
			SELECT array_agg(f.job_id ORDER BY f.ordinality) AS ids,
				   array_agg(f.token ORDER BY f.ordinality) AS tokens,
				   count(*) AS n,
				   count(*) FILTER (WHERE f.payload <> to_jsonb(jobs + f.ordinality)
										OR f.attempt <> 1) AS wrong
			  INTO fetched
			  FROM ROWS FROM (idem_fetch(q, batch, lease)) WITH ORDINALITY AS f;
			EXIT WHEN fetched.n = 0;
			IF lease IS NOT NULL THEN
				COMMIT;
			END IF;
			batches := batches + 1;
			jobs := jobs + fetched.n;
			wrong := wrong + fetched.wrong + (
				SELECT count(*)
				  FROM idem_complete_many(fetched.ids, fetched.tokens) AS c
				 WHERE c.status <> 'completed'
					OR c.job_id <> fetched.ids[c.ord]);
			COMMIT;
		END LOOP;
	END $$;
});

my $s = session($node);
my $locks = 'SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()';

# rows of a queue, keys and numbers among them
sub stored
{
	my ($queue) = @_;

	return $node->safe_psql(
		'postgres', qq{
		SELECT count(*), count(DISTINCT key), count(DISTINCT job_id)
		  FROM idem.jobs WHERE queue = '$queue'});
}

# every version of every row
sub versions
{
	my ($queue) = @_;

	return $node->safe_psql(
		'postgres', qq{
		SELECT count(*), md5(string_agg(concat_ws(' ', ctid, xmin, job_id), ',' ORDER BY job_id))
		  FROM idem.jobs WHERE queue = '$queue'});
}

sub enqueue_each
{
	my ($queue, $n) = @_;

	return $s->query(
		qq{SELECT e.outcome, count(*), count(DISTINCT e.job_id)
			 FROM generate_series(1, $n) AS i,
				  idem_enqueue('$queue', to_jsonb(i), 'key ' || i) AS e
			GROUP BY 1});
}

# outcomes of all elements, in the order of the array, and whether the numbers
# of the jobs grow with it
sub enqueue_many
{
	my ($queue, $more) = @_;

	return $s->query(
		qq{WITH e AS MATERIALIZED (
			   SELECT *, lag(job_id) OVER (PARTITION BY outcome ORDER BY ord) AS last
				 FROM idem_enqueue_many('$queue',
						  ARRAY(SELECT to_jsonb(i) FROM generate_series(1, $jobs) AS i),
						  ARRAY(SELECT 'key ' || i FROM generate_series(1, $jobs) AS i)$more)
					  WITH ORDINALITY)
		   SELECT outcome, count(*), count(DISTINCT job_id),
				  count(*) FILTER (WHERE last > job_id),
				  count(*) FILTER (WHERE ord <> ordinality)
			 FROM e GROUP BY 1 ORDER BY 1});
}

sub consume
{
	my ($queue, $lease) = @_;

	return $s->query("CALL consume('$queue', $batch, $lease, 0, 0, 0)");
}

my $batches = $jobs / $batch;

#
# one call per job
#

# the first call of a session reads the map of slots, and locks its table
enqueue_each('cold', 1);
$s->query('BEGIN');
enqueue_each('warm', 1);
enqueue_each('warm', 1);
my $locks_of_one = $s->query($locks);
is(enqueue_each('each', $jobs),
	"enqueued|$jobs|$jobs", "J9: $jobs jobs are enqueued in one transaction");
is($s->query($locks), $locks_of_one,
	"J9: $jobs enqueues hold as many locks as one");
$s->query('COMMIT');
is(stored('each'), "$jobs|$jobs|$jobs", 'J9: commit has stored every job once');

my $versions = versions('each');

$s->query('BEGIN');
is(enqueue_each('each', $jobs),
	"absorbed|$jobs|$jobs", 'J1: all are absorbed in a second transaction');
cmp_ok($s->query($locks), '<=', $locks_of_one,
	'J9: which holds as many locks as one');
$s->query('COMMIT');
is(versions('each'), $versions, 'J12: and has written no row');

is(consume('each', 'NULL'),
	"$batches|$jobs|0",
	"J9: they are fetched in order, $batch in a transaction, and completed");
is(stored('each'), '0|0|0', 'J9: none is left');

#
# one call for all, rolled back first
#

$s->query('BEGIN');
is(enqueue_many('many', ''),
	"enqueued|$jobs|$jobs|0|0", "J9: $jobs jobs are enqueued in one call");
is($s->query($locks), $locks_of_one,
	'J9: which holds as many locks as a call for one');
is(enqueue_many('many', ''),
	"absorbed|$jobs|$jobs|0|0",
	'J1: all are absorbed in the same transaction');
$s->query('ROLLBACK');
is(stored('many'), '0|0|0', 'J6: rollback has left nothing');
is($s->query(q{SELECT count(*) FROM idem_fetch('many', 10)}),
	'0', 'J6: and nothing to fetch');

is(enqueue_many('many', ''),
	"enqueued|$jobs|$jobs|0|0", 'J6: the same keys are enqueued again');
$versions = versions('many');
is(enqueue_many('many', ''),
	"absorbed|$jobs|$jobs|0|0", 'J1: all are absorbed by a second call');
is(versions('many'), $versions, 'J12: which has written no row');

$s->query('BEGIN');
is( $s->query(
		qq{SELECT count(*), count(DISTINCT key) FROM idem_fetch('many', 10000)}),
	'10000|10000',
	'J9: 10,000 are fetched by one call');
cmp_ok($s->query($locks), '<=', $locks_of_one + 5,
	'J9: which takes no lock for each');
is(enqueue_many('many', ''),
	join("\n",
		'absorbed|' . ($jobs - 10_000) . '|' . ($jobs - 10_000) . '|0|0',
		'enqueued|10000|10000|0|0'),
	'J3: in the same transaction, those that run make new jobs');
$s->query('ROLLBACK');
is(versions('many'), $versions, 'J9: rollback gives them back as they were');

is( enqueue_many('many', q{, on_duplicate => 'replace'}),
	"replaced|$jobs|$jobs|0|0",
	'J1: all payloads are replaced by a call');
is(consume('many', "'1 hour'"),
	"$batches|$jobs|0",
	"J9: they are leased in order, $batch at a time, and completed");
is(stored('many'), '0|0|0', 'J9: none is left');

#
# many calls at once, of the same keys in any order: no deadlock
#

my $some_keys = q{
	ARRAY(SELECT 'key ' || i FROM generate_series(1, 30) AS i ORDER BY random() LIMIT 20)};
my $enqueue_some = qq{
BEGIN;
SELECT count(*) FROM idem_enqueue_many('orders',
	array_fill('1'::jsonb, '{20}'), $some_keys);
};

ok( pgbench_run(
		$node,
		[ '--client=8', '--jobs=2', '--transactions=100' ],
		[
			[ "$enqueue_some COMMIT;\n", 2 ],
			[ "$enqueue_some ROLLBACK;\n", 1 ],
			[
				q{BEGIN;
				SELECT coalesce(array_agg(job_id), '{}') AS ids,
					   coalesce(array_agg(token), '{}') AS tokens
				  FROM idem_fetch('orders', 15) \gset
				SELECT count(*) FROM idem_complete_many(':ids', ':tokens');
				COMMIT;
				}, 1
			]
		]),
	'J9: bulk calls in opposite orders do not deadlock');
unlike(slurp_file($node->logfile),
	qr/\] (40P01|23505) /, 'J9: no deadlock, no unique violation in the log');

# one after the other, in opposite orders
my ($one, $two) = (session($node), session($node));
my $in_order =
  q{SELECT outcome, count(*) FROM idem_enqueue_many('opposite', array_fill(NULL::jsonb, '{1000}'),
	ARRAY(SELECT 'key ' || i FROM generate_series(1, 1000) AS i ORDER BY i %s)) GROUP BY 1};

foreach my $end ([ 'ROLLBACK', 'enqueued|1000' ], [ 'COMMIT', 'absorbed|1000' ])
{
	$node->safe_psql('postgres',
		q{SELECT count(idem_cancel(job_id)) FROM idem.jobs WHERE queue = 'opposite'});
	$one->query('BEGIN');
	is($one->query(sprintf $in_order, 'ASC'),
		'enqueued|1000', "J9: the first of two bulk calls ($end->[0])");
	$two->send(sprintf $in_order, 'DESC');
	wait_until_blocked($node, $two);
	$one->query($end->[0]);
	is($two->receive, $end->[1],
		"J6: the second waits, and learns of the end ($end->[0])");
}
$_->quit foreach $s, $one, $two;

amcheck_ok($node, 'after the bulk', 'idem.jobs');
$node->stop;
log_ok($node);
done_testing();
