# J1, J2: producers that keep enqueuing one key, in transactions that overlap, do not keep
# the job of that key from starting, nor a cancel from ending it, whatever the policy is.
#
# The first job of the key has to start while the producers are at work, so the worker
# polls until it has got that one; jobs that come after it are completed on the way.
# Without a drain not one of thousands of polls gets it.  The number of polls is bounded
# generously, the time is not looked at.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $polls = 5_000;
my $node = new_node('job_stream', conf => 'idem.drain_after = 1s');

$node->safe_psql(
	'postgres', q{
	CREATE TABLE changes (queue text, job_id bigint, outcome text, xid xid8);
	CREATE TABLE runs (job_id bigint, snapshot pg_snapshot);

	-- polls until it has fetched that job; -1 if it has not
	CREATE PROCEDURE work(q text, wanted bigint, polls int, INOUT n int) LANGUAGE plpgsql AS $$
	DECLARE
		f record;
	BEGIN
		FOR i IN 1 .. polls LOOP
			FOR f IN SELECT * FROM idem_fetch(q, 10) LOOP
				INSERT INTO runs VALUES (f.job_id, pg_current_snapshot());
				PERFORM idem_complete(f.job_id, f.token);
				IF f.job_id = wanted THEN
					n := i;
				END IF;
			END LOOP;
			COMMIT;
			EXIT WHEN n IS NOT NULL;
			PERFORM pg_sleep(0.002);
		END LOOP;
		n := coalesce(n, -1);
	END $$;
});

# Producers of a queue, until they are stopped
sub start_producers
{
	my ($queue, $options) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir() . '/produce.sql';

	append_to_file(
		$file, qq{
		BEGIN;
		INSERT INTO changes
		SELECT '$queue', job_id, outcome, pg_current_xact_id() FROM idem_enqueue('$queue', '1', 'hot'$options);
		SELECT pg_sleep(0.02);
		COMMIT;
	});
	my $out = '';
	my $producers = IPC::Run::start(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--host' => $node->host,
			'--port' => $node->port,
			'--client' => 12,
			'--file' => $file,
			'--time' => 3600,
			'postgres'
		],
		'<' => \undef,
		'>&' => \$out);

	# so many that they overlap
	ok( $node->poll_query_until(
			'postgres',
			"SELECT count(*) > 20 FROM changes WHERE queue = '$queue'"),
		"$queue: the producers are at work");
	return $producers;
}

sub stop_producers
{
	my ($producers) = @_;

	$producers->signal('TERM');
	$producers->finish;
	$node->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pgbench'");
}

my %policies = (
	skip => '',
	replace => q{, on_duplicate => 'replace'},
	debounce => q{, on_duplicate => 'debounce', delay => '0'},
	executed => q{, dedup => 'until_executed'},
	executed_replace => q{, dedup => 'until_executed', on_duplicate => 'replace'},
	rerun => q{, dedup => 'until_executed', if_running => 'rerun'},
	expired => q{, dedup => 'until_expired', key_ttl => '1 day'});

# Every duplicate puts a debounced job off, up to debounce_max: from then on it is due
$node->safe_psql('postgres', q{SELECT idem_queue_set('debounce', debounce_max => '10 ms')});

foreach my $queue (sort keys %policies)
{
	my $options = $policies{$queue};
	my $first = $node->safe_psql('postgres',
		"SELECT job_id FROM idem_enqueue('$queue', '1', 'hot'$options)");
	my $producers = start_producers($queue, $options);
	my $n = $node->safe_psql('postgres',
		"CALL work('$queue', $first, $polls, NULL)");

	cmp_ok($n, '>', 0, "$queue: the job starts beside the producers");
	ok($producers->pumpable, "$queue: which are at work still");
	stop_producers($producers);

	# what is left runs as well
	$node->safe_psql('postgres', "CALL work('$queue', 0, 20, NULL)");
	is( $node->safe_psql(
			'postgres', "SELECT count(*) FROM idem.jobs WHERE queue = '$queue'"),
		'0', "$queue: no job is left");
	# until_expired promises one run, not that it comes after the enqueue; until_executed promises
	# nothing to what it absorbs into a job that runs (J2), and skip does not show whether it did
	next if $queue eq 'expired';
	is( $node->safe_psql(
			'postgres', qq{
			SELECT count(*) FROM changes c WHERE queue = '$queue'
			   AND NOT (queue LIKE 'executed%' AND outcome = 'absorbed')
			   AND NOT EXISTS (SELECT FROM runs r
							   WHERE r.job_id = c.job_id AND pg_visible_in_snapshot(c.xid, r.snapshot))}),
		'0', "$queue: the job of every enqueue has run, and has seen it");
	note $node->safe_psql('postgres',
		"SELECT outcome, count(*) FROM changes WHERE queue = '$queue' GROUP BY 1 ORDER BY 1");
}

# A job for later: cancel comes to its end beside the producers
foreach my $policy ('skip', 'replace')
{
	my $queue = "later_$policy";
	my $options = ", on_duplicate => '$policy', include_scheduled => true, delay => '1 day'";
	my $first = $node->safe_psql('postgres',
		"SELECT job_id FROM idem_enqueue('$queue', '1', 'hot'$options)");
	my $producers = start_producers($queue, $options);

	is( $node->safe_psql('postgres', "SELECT idem_cancel($first)"),
		't', "$queue: cancelled");
	ok($producers->pumpable, "$queue: the producers are at work still");
	stop_producers($producers);
}

log_ok($node);
$node->stop;
done_testing();
