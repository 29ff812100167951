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

# A link is no reason for an error of the commit: whatever the transaction has done to the table since.

foreach my $ddl (
	'DROP EXTENSION idem CASCADE',
	'DROP EXTENSION idem CASCADE; CREATE EXTENSION idem',
	'TRUNCATE idem.jobs',
	'DELETE FROM idem.jobs',
	'UPDATE idem.jobs SET priority = 7',
	'SET TRANSACTION READ ONLY',
	'ALTER TABLE idem.jobs ADD COLUMN more int',
	'ALTER TABLE idem.jobs DROP COLUMN links CASCADE',
	'UPDATE idem.jobs SET links = $$[]$$; ALTER TABLE idem.jobs ALTER COLUMN links SET NOT NULL',
	'ALTER TABLE idem.jobs ADD CHECK (links IS NULL)',
	'ALTER TABLE idem.jobs RENAME TO other',
	'ALTER TABLE idem.jobs SET SCHEMA public',
	'ALTER TABLE idem.jobs SET UNLOGGED',
	'ALTER TABLE idem.jobs ENABLE ROW LEVEL SECURITY',
	'ALTER TABLE idem.jobs DROP CONSTRAINT jobs_pkey CASCADE',
	'DROP INDEX idem.jobs_key_idx',
	'CREATE INDEX ON idem.jobs ((links IS NULL))',
	'CREATE INDEX ON idem.jobs (queue) WHERE links IS NULL',
	'CREATE UNIQUE INDEX ON idem.jobs (links)',
	'CREATE RULE nothing AS ON UPDATE TO idem.jobs DO INSTEAD NOTHING',
	'CREATE TRIGGER off BEFORE UPDATE ON idem.jobs FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()',
	'CREATE PUBLICATION filtered FOR TABLE idem.jobs WHERE (queue = $$q$$)',
	'ALTER TABLE idem.jobs REPLICA IDENTITY NOTHING; CREATE PUBLICATION nameless FOR TABLE idem.jobs')
{
	my $absorb = q{SELECT outcome FROM idem_enqueue('q', '2', 'k', headers => '{"traceparent": "link"}')};
	my @ways = "BEGIN; $absorb; $ddl; COMMIT";

	# no command follows the last statement of a query string
	push @ways, "$absorb\\; $ddl" if $ddl =~ /^(?:DROP EXTENSION|UPDATE|TRUNCATE|ALTER .* more)[^;]*$/;
	foreach my $sql (@ways)
	{
		$node->safe_psql('postgres', q{
			DROP EXTENSION IF EXISTS idem CASCADE; DROP TABLE IF EXISTS jobs; CREATE EXTENSION idem;
			DROP PUBLICATION IF EXISTS filtered, nameless; SELECT idem_enqueue('q', '1', 'k')});
		is(sqlstate($node, $sql), '00000', "J16: no error of the commit: $ddl");
		is(run('SELECT count(links) FROM idem.jobs'), '0', 'and no link') if $ddl =~ /READ ONLY/;
	}
}
$node->safe_psql('postgres', 'DROP EXTENSION idem CASCADE; CREATE EXTENSION idem; DROP PUBLICATION nameless');

# The same for what was there before, and does not hinder a duplicate that changes nothing.
foreach my $ddl (
	'CREATE PUBLICATION filtered FOR TABLE idem.jobs WHERE (queue = $$q$$)',
	'CREATE INDEX long ON idem.jobs (links)')
{
	$node->safe_psql('postgres', "SELECT idem_enqueue('q', '1', 'k'); $ddl");
	is( sqlstate($node, q{
			BEGIN;
			SELECT count(idem_enqueue('q', '2', 'k', headers => jsonb_build_object('traceparent',
				(SELECT string_agg(md5(i || ' ' || n), '') FROM generate_series(1, 8) AS i))))
			  FROM generate_series(1, 16) AS n;
			COMMIT}), '00000', "J16: no error of the commit after $ddl");
	is(run('SELECT count(*), count(links) FROM idem.jobs'), '1|0', 'and no link');
	$node->safe_psql('postgres',
		'DROP PUBLICATION IF EXISTS filtered; DROP INDEX IF EXISTS idem.long; TRUNCATE idem.jobs');
}

# A subscription that another session makes meanwhile writes the table.  (It is made up.)

{
	my $session = session($node);

	$node->safe_psql('postgres', q{SELECT idem_enqueue('q', '1', 'k')});
	$session->query('BEGIN');
	$session->query(q{SELECT outcome FROM idem_enqueue('q', '2', 'k', headers => '{"traceparent": "link"}')});
	$node->safe_psql('postgres', q{
		SET client_min_messages = error;
		SET allow_system_table_mods = on;
		CREATE SUBSCRIPTION made_up CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false, slot_name = NONE);
		INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate)
			SELECT oid, 'idem.jobs'::regclass, 'r' FROM pg_subscription});
	is($session->sqlstate('COMMIT'), '00000', 'J16: no error of the commit after CREATE SUBSCRIPTION');
	is(run('SELECT count(links) FROM idem.jobs'), '0', 'and no link');
	$session->quit;
	$node->safe_psql('postgres', q{
		SET client_min_messages = error; SET allow_system_table_mods = on;
		DELETE FROM pg_subscription_rel; DROP SUBSCRIPTION made_up; TRUNCATE idem.jobs});
}

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
