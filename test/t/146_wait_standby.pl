# A4 to A6 and A8 on a standby: a session can wait there for the end of a job or of leased work, but
# not for jobs, which it could not fetch.
#
# Replay wakes nobody, so these sessions look (A4).  While they sleep they have no snapshot
# and no lock, so they do not hold up replay.  They go on after a promotion, and then commits
# wake them.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = new_node(
	'primary',
	init => { allows_streaming => 1 },
	conf => q{
shared_preload_libraries = 'idem'
autovacuum = off
idem.cleanup = off
});

run(q{SELECT idem_queue_set('kept', keep => '1 day')});
$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->append_conf('postgresql.conf', q{
hot_standby_feedback = on
max_standby_streaming_delay = -1
idem.look_after = 1h
});
$standby->start;

my $token = run(q{SELECT token FROM idem_lease('k', '1 h')});
my $job = run(q{SELECT job_id FROM idem_enqueue('kept')});

$primary->wait_for_catchup($standby);

# A session of the standby that looks so often
sub waiter
{
	my ($sql, $often) = @_;
	my $session = session($standby);

	$session->query("SET idem.look_after = '$often'") if $often;
	$session->send($sql);
	wait_until_asleep($standby, 1, "pid = $session->{pid} AND backend_xmin IS NULL");
	return $session;
}

#
# refused
#

foreach my $call (q{idem_wait('q')}, q{idem_wait_any('{q}')})
{
	is(sqlstate($standby, "CALL $call"), '25006', "A8: $call is refused on a standby");
	is(sqlstate($primary, "SET default_transaction_read_only = on; CALL $call"),
		'25006', "A8: $call is refused in a read-only transaction");
}
foreach my $call (qq{idem_wait_job($job, '0')}, q{idem_wait_key('k', '0')})
{
	is(sqlstate($primary, "SET default_transaction_read_only = on; CALL $call"),
		'00000', "A8: $call only reads");
}

#
# the end of a job and of leased work on the primary
#

my @jobs = map { waiter("CALL idem_wait_job($job, '10 min')", '100 ms') } 1 .. 3;
my @keys = map { waiter(q{CALL idem_wait_key('k', '10 min')}, '100 ms') } 1 .. 3;

is($standby->safe_psql('postgres', "CALL idem_wait_job($job, '0')"), 'waiting|', 'A5: the job waits');
is($standby->safe_psql('postgres', q{CALL idem_wait_key('k', '0')}), 'live|', 'A6: the key is leased');

# Replay removes rows and takes locks on both tables, and does not wait.
run(q{
	SELECT count(idem_enqueue('other')) FROM generate_series(1, 100);
	SELECT count(idem_cancel(job_id)) FROM idem.jobs WHERE queue = 'other';
	VACUUM idem.jobs;
	BEGIN; LOCK TABLE idem.jobs, idem.keys; COMMIT});
$primary->wait_for_catchup($standby);
wait_until_asleep($standby, 6);
pass('A1: sessions that wait do not hold up replay');

run(q{SELECT idem_complete(job_id, token, '"result"') FROM idem_fetch('kept')});
run("SELECT idem_finish('k', '\"done\"', $token)");
foreach my $n (0 .. 2)
{
	is($jobs[$n]->receive, 'done|"result"', "A5: the job is done, session $n");
	is($keys[$n]->receive, 'finished|"done"', "A6: the key is finished, session $n");
}
$_->quit foreach @jobs, @keys;
is($standby->safe_psql('postgres', qq{CALL idem_wait_job($job, '1 h')}), 'done|"result"', 'A5: at once afterwards');
is($standby->safe_psql('postgres', q{CALL idem_wait_job(999999, '1 h')}), 'gone|', 'A5: a job that is not there');
is($standby->safe_psql('postgres', q{CALL idem_wait_key('nobody', '1 h')}), 'absent|', 'A6: a key that is not there');

#
# A5, A6: a wait that is shorter than the time between two looks has one at the start and one at the
# end.  The sessions are stopped until their time is over.
#

$token = run(q{SELECT token FROM idem_lease('short', '1 h')});
$job = run(q{SELECT job_id FROM idem_enqueue('kept')});
$primary->wait_for_catchup($standby);
my @short = map { waiter($_) } (
	"CALL idem_wait_job($job, '3 s')", q{CALL idem_wait_key('short', '3 s')},
	"CALL idem_wait_job($job, '3 s')", q{CALL idem_wait_key('short', '3 s')});

kill 'STOP', $_->{pid} foreach @short;
run(qq{
	SELECT idem_complete(job_id, token) FROM idem_fetch('kept');
	SELECT idem_finish('short', token => $token)});
$primary->wait_for_catchup($standby);
$standby->poll_query_until('postgres',
	sprintf q{SELECT bool_and(clock_timestamp() > query_start + interval '3 s') FROM pg_stat_activity WHERE pid IN (%s)},
	join(', ', map { $_->{pid} } @short))
  or die 'the time does not pass';
kill 'CONT', $_->{pid} foreach @short;
is(join(' ', map { $_->receive } @short), 'done| finished| done| finished|',
	'A5, A6: the look at the end finds what was replayed meanwhile');
$_->quit foreach @short;

#
# promotion
#

$token = run(q{SELECT token FROM idem_lease('k 2', '1 h')});
$job = run(q{SELECT job_id FROM idem_enqueue('kept')});
$primary->wait_for_catchup($standby);
my $waits_for_job = waiter("CALL idem_wait_job($job, '10 min')");
my $waits_for_key = waiter(q{CALL idem_wait_key('k 2', '10 min')});

$primary->stop('immediate');
$standby->promote;
wait_until_asleep($standby, 2);

# The sessions look once per hour, so these commits wake them.
$standby->safe_psql('postgres', q{SELECT idem_complete(job_id, token, '"late"') FROM idem_fetch('kept')});
$standby->safe_psql('postgres', "SELECT idem_finish('k 2', '\"late\"', $token)");
is($waits_for_job->receive, 'done|"late"', 'A5: the standby was promoted: woken by the end of the job');
is($waits_for_key->receive, 'finished|"late"', 'A6: the standby was promoted: woken by the end of the work');

# and so can idem_wait() be
foreach my $session ($waits_for_job, $waits_for_key)
{
	$session->send(q{CALL idem_wait('q', '10 min')});
	wait_until_asleep($standby, 1, "pid = $session->{pid}");
	$standby->safe_psql('postgres', q{SELECT idem_enqueue('q')});
	is($session->receive, 't', 'A2: a session from before the promotion waits for jobs');
	$session->query(q{SELECT idem_complete(job_id, token) FROM idem_fetch('q')});
	$session->quit;
}

$standby->stop;
log_ok($primary);
log_ok($standby);
done_testing();
