# A2 to A4: what a session that waits can see when it is woken, and commits during its look.
#
# The server looks only once per hour, so a wake-up that gets lost is a test that never
# ends.  Many sessions and rounds, because nothing but chance lets the two meet.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $sessions = 50;
my $node = new_node(
	'wait_race', conf => q{
shared_preload_libraries = 'idem'
autovacuum = off
idem.cleanup = off
idem.look_after = 1h
});

# Each session waits for a queue of its own.
my $worker = q{
CALL idem_wait('q :client_id', '10 min') \gset
\if :ready
SELECT idem_complete(job_id, token) FROM idem_fetch('q :client_id', lease => '1 h');
\endif
};
my $queues = sprintf q{(SELECT 'q ' || n AS q FROM generate_series(0, %d) AS n) AS queues}, $sessions - 1;

# Workers that wait so often
sub start_workers
{
	my ($script, @options) = @_;
	my $file = PostgreSQL::Test::Utils::tempdir() . '/worker.sql';
	my $out = '';

	append_to_file($file, $script);
	return IPC::Run::start(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--host' => $node->host,
			'--port' => $node->port,
			"--client=$sessions", '--jobs=2', @options,
			'--file' => $file,
			'postgres'
		],
		'>&', \$out);
}

sub stop_workers
{
	my ($run) = @_;

	$run->kill_kill;
	$node->poll_query_until('postgres',
		q{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pgbench'})
	  or die 'workers do not end';
	return;
}

sub drained_ok
{
	my ($name) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	return ok($node->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.jobs'), $name)
	  || diag(run('SELECT count(*) FROM idem.jobs'), ' jobs are left');
}

#
# One transaction resumes all queues and wakes all sessions.  Each of them knows that its
# queue is paused, and learns in time that it is not.
#

{
	my $workers = start_workers($worker, '--transactions=100000');

	foreach my $round (1 .. 5)
	{
		wait_until_asleep($node, $sessions);
		run("SELECT idem_queue_set(q), idem_pause(q) FROM $queues");
		run("SELECT idem_enqueue(q) FROM $queues");
		wait_until_asleep($node, $sessions);
		run("SELECT idem_resume(q) FROM $queues");
		drained_ok("A2: all queues go on, round $round") or last;
	}
	stop_workers($workers);
}

$node->stop;
log_ok($node);
done_testing();
