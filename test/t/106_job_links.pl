# J16: links of absorbed duplicates.  A link is written when the transaction of the duplicate
# commits: other enqueues of the key wait for that commit only, and workers get the job after it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# a commit waits for a standby, until it is cancelled; those of the other sessions do not
my $node = new_node(
	'job_links',
	init => { allows_streaming => 1 },
	conf => "max_connections = 50
deadlock_timeout = 10ms
synchronous_commit = local
synchronous_standby_names = 'nobody'
");

$node->safe_psql('postgres', q{SELECT idem_enqueue('q', '1', 'k')});

my ($first, $second) = (session($node), session($node));

$first->query('SET synchronous_commit = on');
$first->query('BEGIN');
is( $first->query(
		q{SELECT outcome FROM idem_enqueue('q', '2', 'k', headers => '{"traceparent": "first"}')}),
	'absorbed', 'a duplicate with a trace');
is(run(q{SELECT outcome FROM idem_enqueue('q', '3', 'k')}),
	'absorbed', 'J16: another duplicate does not wait for it while it is open');
is( run(q{
		SELECT outcome FROM idem_enqueue('q', '3', 'k', headers => '{"traceparent": "other"}')}),
	'absorbed', 'nor does one with a trace');
$first->send('COMMIT');
$node->poll_query_until('postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'})
  or die 'the commit does not wait';
is(run(q{SELECT links FROM idem.jobs}), '["other"]', 'the link of the first one is not visible');

$second->send(q{SELECT outcome FROM idem_enqueue('q', '4', 'k')});
wait_until_blocked($node, $second);
is(run(q{SELECT count(*) FROM idem_fetch('q', lease => '1 h')}),
	'0', 'J2: no worker gets the job while the commit lasts');
run(q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'});
$first->receive;
is($second->receive, 'absorbed', 'J16: a duplicate waits for the commit that writes the link');
is(run(q{SELECT links FROM idem_fetch('q', lease => '1 h')}), '["other", "first"]', 'both links');
$first->quit;
$second->quit;

# A transaction notes 256 links at most, and each only once.

$node->safe_psql('postgres', q{
	TRUNCATE idem.jobs;
	SELECT count(*) FROM generate_series(1, 300) AS i, idem_enqueue('q', '1', 'k' || i)});
$node->safe_psql('postgres', q{
	BEGIN;
	SELECT count(*) FROM generate_series(1, 5) AS n, generate_series(1, 200) AS i,
		   idem_enqueue('q', to_jsonb(n), 'k' || i, headers => '{"traceparent": "same"}');
	SELECT count(*) FROM generate_series(201, 300) AS i,
		   idem_enqueue('q', '2', 'k' || i, headers => '{"traceparent": "same"}');
	COMMIT});
is( run(q{
		SELECT count(*) FILTER (WHERE links = '["same"]'), count(links),
			   count(*) FILTER (WHERE substr(key, 2)::int > 256 AND links IS NOT NULL) FROM idem.jobs}),
	'256|256|0', 'the first 256 links of a transaction');

# Producers, workers and bulk cancels of one key: the job is fetched or cancelled the moment after
# a link was committed.

my $dir = PostgreSQL::Test::Utils::tempdir();

$node->safe_psql('postgres', 'TRUNCATE idem.jobs');
append_to_file("$dir/produce.sql",
	"SELECT idem_enqueue('q', '1', 'hot', headers => jsonb_build_object('traceparent', random()::text));");
append_to_file("$dir/produce_many.sql",
	"SELECT count(idem_enqueue('q', '1', 'hot', headers => jsonb_build_object('traceparent', i || random()::text))) FROM generate_series(1, 15) AS i;");
append_to_file("$dir/work.sql", "SELECT idem_complete(job_id, token) FROM idem_fetch('q');");
append_to_file("$dir/cancel.sql", "SELECT idem_cancel_many(queue => 'q');");

$node->command_ok(
	[
		'pgbench', '--no-vacuum',
		'--client' => 24,
		'--transactions' => 500,
		'--protocol' => 'prepared',
		'--file' => "$dir/produce.sql\@4",
		'--file' => "$dir/produce_many.sql\@2",
		'--file' => "$dir/work.sql\@3",
		'--file' => "$dir/cancel.sql\@1",
		'postgres'
	],
	'producers, workers and cancels of one key get no error');
is(run('SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()'),
	'0', 'nor does the server know of a deadlock');
log_ok($node);

done_testing();
