# pg_dump and pg_restore carry jobs: those that wait or run, keys that outlive
# their job, the history, what was declared for queues, and the numbers.  What
# was a duplicate before is one after, and tokens from before the dump are still valid.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('source', extension => 0);
my $other = new_node('other', extension => 0);
my $dir = PostgreSQL::Test::Utils::tempdir();

$node->safe_psql(
	'postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE stranger LOGIN;
	CREATE DATABASE source;
});
$node->safe_psql(
	'source', q{
	CREATE EXTENSION idem;
	SELECT idem_grant('app', 'app');
	SELECT idem_grant('stranger', 'app');
	SELECT idem_queue_set('mail', lease => '1 hour', max_attempts => 3,
		backoff => '1 min', keep => '30 days', keep_dead => '60 days');
	SELECT idem_queue_set('app only', owner => 'app', dedup => 'until_executed',
		on_duplicate => 'replace');
	SELECT idem_pause('paused');

	-- the sequence is ahead of the existing jobs
	SELECT count(*) FROM generate_series(1, 50) AS i, idem_enqueue('gone', to_jsonb(i));
	SELECT count(*) FROM idem_fetch('gone', 50, '1 min') AS f,
		   LATERAL (SELECT idem_complete(f.job_id, f.token)) AS c;
});

# columns that were added and dropped do not disturb, and are not in the dump
$node->safe_psql(
	'source', q{
	ALTER TABLE idem.jobs ADD COLUMN x integer NOT NULL DEFAULT 7;
	ALTER TABLE idem.jobs DROP COLUMN x;
	ALTER TABLE idem.queues ADD COLUMN x text;
	UPDATE idem.queues SET x = 'x';
	ALTER TABLE idem.queues DROP COLUMN x;
});
my $dropped = q{SELECT count(*) FROM pg_attribute WHERE attrelid = ANY ('{idem.jobs, idem.queues}'::regclass[]) AND attisdropped};
is($node->safe_psql('source', $dropped), '2', 'columns were dropped');

# T9: the schedule of a role, and of one that was dropped
$node->safe_psql(
	'source', q{
	CREATE ROLE leaver;
	SELECT idem_grant('leaver', 'app');
	SET ROLE leaver;
	SELECT idem_schedule('orphan', 'mail', '@yearly');
	SET ROLE app;
	SELECT idem_schedule('planned', 'mail', '@yearly');
	RESET ROLE;
	DROP OWNED BY leaver;
	DROP ROLE leaver;
});

my $schedules = q{
	SELECT name, regexp_replace(owner::text, '^\d+$', 'dropped'), state FROM idem.schedule_status ORDER BY name};
my $schedules_before = "orphan|dropped|refused\nplanned|app|active";

is($node->safe_psql('source', $schedules), $schedules_before, 'T9: a schedule whose owner was dropped is refused');

my %job;      # numbers by name
my %token;    # of those that were fetched

sub enqueue
{
	my ($name, $arguments, %opt) = @_;

	($job{$name}) = split /\|/,
	  $node->safe_psql('source',
		($opt{set} // '') . "SELECT job_id FROM idem_enqueue($arguments)");
	return;
}

# fetches from a queue whose next job is that one
sub take
{
	my ($name, $queue, $lease) = @_;
	my ($id, $token) = split /\|/,
	  $node->safe_psql('source',
		"SELECT job_id, token FROM idem_fetch('$queue', 1, $lease, 'w 1')");

	die "$name is not the next job" unless $id == $job{$name};
	$token{$name} = $token;
	return;
}

enqueue('leased', q{'mail', '{"to": "a"}', 'leased', dedup => 'until_executed'});
take('leased', 'mail', 'NULL');
enqueue('follow-up',
	q{'mail', '{"to": "b"}', 'leased', dedup => 'until_executed', if_running => 'rerun'}
);
enqueue('leased with ttl',
	q{'mail', key => 'with ttl', dedup => 'until_expired', key_ttl => '2 hours'});
take('leased with ttl', 'mail', 'NULL');
enqueue('expired', q{'mail', key => 'expired'});
take('expired', 'mail', q{'1 microsecond'});
enqueue('done', q{'results', key => 'done', dedup => 'until_expired', key_ttl => '2 hours'});
take('done', 'results', q{'1 min'});
run(qq{SELECT idem_complete($job{done}, $token{done}, '{"id": "\\u00e4 \\\\ tab"}')}, db => 'source');
enqueue('logged', q{'logged', '{"a": 1}', priority => 7});
run(q{SELECT idem_queue_set('logged', keep => '1 day')}, db => 'source');
take('logged', 'logged', q{'1 min'});
run("SELECT idem_complete($job{logged}, $token{logged}, '1')", db => 'source');
enqueue('dead', q{'dead', '{"b": 1}', 'dead', max_attempts => 2, priority => -3});
take('dead', 'dead', q{'1 min'});
run("SELECT idem_fail($job{dead}, $token{dead}, E'given\\tup\\n', dead => true)", db => 'source');
enqueue('cancelled', q{'cancelled', key => 'cancelled'});
run("SELECT idem_cancel($job{cancelled})", db => 'source');
enqueue('retry', q{'retry', key => 'retry', max_attempts => 5});
take('retry', 'retry', q{'1 min'});
run("SELECT idem_fail($job{retry}, $token{retry}, 'first error', retry_in => '1 hour')", db => 'source');
enqueue('waiting',
	q{'later', '{"text": "tab \\t, \\\\N"}', E'\\\\.\ttab\nline \\\\N "quote" \u00e4\u20ac'});
enqueue('scheduled', q{'later', '"s"', 'scheduled', delay => '1 hour'});
enqueue('scheduled with key',
	q{'later', '"k"', 'scheduled with key', delay => '1 hour', include_scheduled => true});
enqueue('urgent', q{'later', '"u"', priority => -10});
enqueue('paused', q{'paused'});
enqueue('owned', q{'app only', '"o"', 'owned'},
	set => 'SET SESSION AUTHORIZATION app; ');

my $everything = q{
	SELECT 'job ' || j::text FROM idem.jobs AS j
	UNION ALL SELECT 'key ' || k::text FROM idem.job_keys AS k
	UNION ALL SELECT 'log ' || l::text FROM idem.job_log AS l
	UNION ALL SELECT 'queue ' || q::text FROM idem.queues AS q
	ORDER BY 1};
my $before = run($everything, db => 'source');
my $states = q{
	SELECT job_id, queue, key, state, attempt, max_attempts, worker, last_error
	  FROM idem.job_status ORDER BY job_id};
my $states_before = run($states, db => 'source');

is( run('SELECT state, count(*) FROM idem.job_status GROUP BY 1 ORDER BY 1', db => 'source'),
	join("\n",
		'blocked|1', 'cancelled|1', 'dead|1', 'done|1', 'expired|1',
		'running|2', 'scheduled|3', 'waiting|4'),
	'there are jobs in every state');

# open while the dumps are made: an enqueue, and a job that runs
my $open = session($node, db => 'source');
$open->query(
	q{BEGIN; SELECT idem_enqueue('open', key => 'open');
	SELECT count(*) FROM idem_fetch('later', 1)});

#
# the dumps
#

my @dump = ($node->installed_command('pg_dump'),
	'--dbname' => $node->connstr('source'));

$node->command_ok([ @dump, '--file' => "$dir/plain.sql" ], 'plain dump');
$node->command_ok([ @dump, '--format=custom', '--file' => "$dir/custom.dump" ],
	'custom dump');

my $plain = slurp_file("$dir/plain.sql");

unlike($plain, qr/CREATE (TABLE|SCHEMA|INDEX|VIEW|FUNCTION|SEQUENCE)/,
	'dump does not create members of the extension');
like($plain, qr/^COPY idem\.$_ /m, "dump carries $_")
  foreach qw(jobs job_keys job_log queues schedules);
like($plain, qr/setval\('idem\.jobs_job_id_seq', \d+, true\)/,
	'dump carries the numbers');

$open->query('COMMIT');
$open->quit;

#
# restored: a plain dump into the same cluster, a custom one into another whose
# roles have other numbers
#

$node->safe_psql('postgres', 'CREATE DATABASE plain');
$node->command_ok(
	[
		$node->installed_command('psql'), '-Xq',
		'-v' => 'ON_ERROR_STOP=1',
		'-d' => $node->connstr('plain'),
		'-f' => "$dir/plain.sql"
	],
	'plain dump can be restored');

$other->safe_psql(
	'postgres', q{
	CREATE ROLE first_come;
	CREATE ROLE stranger LOGIN;
	CREATE ROLE app LOGIN;
	CREATE DATABASE custom;
});
isnt(
	$node->safe_psql('postgres', "SELECT 'app'::regrole::oid"),
	$other->safe_psql('postgres', "SELECT 'app'::regrole::oid"),
	'the roles have other numbers in the other cluster');
$node->command_ok(
	[
		$node->installed_command('pg_restore'), '--exit-on-error',
		'--dbname' => $other->connstr('custom'),
		"$dir/custom.dump"
	],
	'custom dump can be restored into another cluster');

# T9: a role is missing: no schedule is restored, and psql says why
{
	my $stderr;

	$node->safe_psql('postgres', 'CREATE DATABASE roleless');
	$node->safe_psql('postgres', 'ALTER ROLE app RENAME TO renamed');
	$node->psql('roleless', slurp_file("$dir/plain.sql"), on_error_stop => 0, stderr => \$stderr);
	like($stderr, qr/role "app" does not exist\n.*COPY schedules, line \d, column owner: "app"/, 'T9: COPY names the role and the column');
	is($node->safe_psql('roleless', 'SELECT count(*) FROM idem.schedules'), '0', 'T9: without the role there are no schedules');
	$node->safe_psql('postgres', 'ALTER ROLE renamed RENAME TO app');
}

foreach my $target ([ $node, 'plain' ], [ $other, 'custom' ])
{
	my ($server, $db) = @$target;
	my $s = session($server, db => $db);

	is($s->query($everything),
		$before, "$db: everything is there as it was committed");
	is($s->query($states), $states_before, "$db: in the same state");
	is($s->query($dropped), '0', "$db: no column was dropped");
	is($s->query($schedules), $schedules_before, "T9: $db: schedules have the owners that they had");

	# numbers
	my ($new) =
	  split /\|/, $s->query(q{SELECT job_id FROM idem_enqueue('new', key => 'new')});
	my ($highest) = sort { $b <=> $a } values %job;
	cmp_ok($new, '>', $highest, "$db: the next job has a higher number");

	# duplicates are absorbed by the restored jobs
	is( $s->query(
			q{SELECT outcome, job_id FROM idem_enqueue('new', key => 'new');
			  SELECT outcome, job_id FROM idem_enqueue('later',
				  key => E'\\\\.\ttab\nline \\\\N "quote" \u00e4\u20ac');
			  SELECT outcome, job_id FROM idem_enqueue('retry', key => 'retry')}),
		"absorbed|$new\nabsorbed|$job{waiting}\nabsorbed|$job{retry}",
		"J1: $db: duplicates are absorbed by jobs that wait");
	is( $s->query(
			q{SELECT outcome, job_id FROM idem_enqueue('later', '"new"',
				  key => 'scheduled with key', on_duplicate => 'replace');
			  SELECT outcome, job_id <> } . $job{scheduled} . q{
				FROM idem_enqueue('later', key => 'scheduled')}),
		"replaced|$job{'scheduled with key'}\nenqueued|t",
		"J8: $db: jobs for later have a key only if they took it");
	is( $s->query(
			q{SELECT outcome, job_id FROM idem_enqueue('mail', '{"to": "c"}',
				  'leased', dedup => 'until_executed', if_running => 'rerun');
			  SELECT outcome, job_id FROM idem_enqueue('mail', key => 'with ttl',
				  dedup => 'until_expired', key_ttl => '1 min')}),
		"rerun|$job{'follow-up'}\nabsorbed|$job{'leased with ttl'}",
		"J4, J5: $db: also by those that run, and by the one that follows");
	is( $s->query(
			q{SELECT outcome, job_id, result FROM idem_enqueue('results',
				  key => 'done', dedup => 'until_expired', key_ttl => '1 min');
			  SET idem.clock_offset = 7300;
			  SELECT outcome, job_id > } . $new . q{ FROM idem_enqueue('results',
				  key => 'done', dedup => 'until_expired', key_ttl => '1 min');
			  RESET idem.clock_offset}),
		qq[done|$job{done}|{"id": "\xc3\xa4 \\\\ tab"}\nenqueued|t],
		"J5: $db: a key that outlives its job is done, until it expires");

	# order, priorities, what is paused or not yet due
	is( $s->query(
			q{BEGIN; SELECT payload, attempt FROM idem_fetch('later', 10); ROLLBACK;
			  SELECT count(*) FROM idem_fetch('paused');
			  SELECT count(*) FROM idem_fetch('retry');
			  SET idem.clock_offset = 3601;
			  BEGIN; SELECT payload, attempt FROM idem_fetch('retry'); ROLLBACK;
			  RESET idem.clock_offset}),
		join("\n",
			'"u"|1', '{"text": "tab \\t, \\\\N"}|1', '"new"|1', '|1',
			'0', '0', '|2'),
		"$db: order, pause and time are as before");

	# tokens from before the dump
	is( $s->query(
			qq{SELECT status FROM idem_heartbeat('{$job{leased}}', '{$token{leased}}');
			   BEGIN;
			   SELECT job_id FROM idem_fetch('mail', 10);
			   ROLLBACK;
			   SELECT idem_complete($job{leased}, $token{leased}, '"r"');
			   SELECT state, result, worker FROM idem_job($job{leased});
			   SELECT idem_complete($job{'leased with ttl'}, $token{'leased with ttl'}, '"ttl"');
			   SELECT outcome, result FROM idem_enqueue('mail', key => 'with ttl',
				   dedup => 'until_expired', key_ttl => '1 min')}),
		join("\n",
			'renewed', $job{expired}, 't', 'done|"r"|w 1', 't', 'done|"ttl"'),
		"J11: $db: the token of a leased job renews and completes it");
	is( $s->sqlstate("SELECT idem_complete($job{leased}, $token{leased})"),
		'ID003', "J11: $db: once");
	is( $s->query(q{SELECT job_id, payload FROM idem_fetch('mail')}),
		qq[$job{'follow-up'}|{"to": "c"}],
		"J4: $db: the follow-up runs when the job before it is done");
	my ($id, $token, $attempt) = split /\|/,
	  $s->query(q{SELECT job_id, token, attempt FROM idem_fetch('mail')});
	is("$id $attempt", "$job{expired} 2",
		"J7: $db: an expired lease is taken over");
	cmp_ok($token, '>', $token{expired}, "L2: $db: with a higher token");
	is( $s->sqlstate("SELECT idem_complete($job{expired}, $token{expired})"),
		'ID003', "J11: $db: the old one is stale");
	is( $s->sqlstate("SELECT idem_complete($job{retry}, $token{retry})"),
		'ID003', "J11: $db: the token of a failed job is stale");

	# history
	is( $s->query(
			qq{SELECT state, error, payload FROM idem_job($job{dead});
			   SELECT idem_retry($job{dead}), idem_retry($job{cancelled}), idem_retry($job{logged});
			   SELECT job_id, payload, attempt FROM idem_fetch('dead');
			   SELECT outcome, job_id FROM idem_enqueue('cancelled', key => 'cancelled')}),
		join("\n",
			"dead|given\tup", qq[|{"b": 1}], 't|t|f',
			qq[$job{dead}|{"b": 1}|1], "absorbed|$job{cancelled}"),
		"J7: $db: dead and cancelled jobs can be retried");

	# what was declared
	is( sqlstate(
			$server, q{SELECT idem_enqueue('app only')},
			db => $db,
			user => 'stranger'),
		'42501',
		"$db: the queue of another role is refused");
	is( $server->safe_psql(
			$db, q{
			SET SESSION AUTHORIZATION app;
			SELECT outcome, job_id FROM idem_enqueue('app only', '"n"', 'owned');
			SELECT payload FROM idem_fetch('app only')}),
		qq{replaced|$job{owned}\n"n"},
		"$db: its owner may, with what was declared");
	is( $s->query(
			q{SELECT idem_pause('paused'), idem_resume('paused');
			  SELECT job_id FROM idem_fetch('paused')}),
		"f|t\n$job{paused}",
		"$db: a paused queue is paused, and can be resumed");
	$s->quit;
}

# a restored database can be dumped again
$node->command_ok(
	[
		$node->installed_command('pg_dump'),
		'--dbname' => $other->connstr('custom'),
		'--file' => "$dir/again.sql"
	],
	'the restored database can be dumped');

foreach my $server ($node, $other)
{
	$server->stop;
	log_ok($server);
}
done_testing();
