# H3: the commands that idem_why and idem_holder print end the transaction in the way; their answers
# while sessions wait, on a standby, after a crash, after a promotion, and without preload.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = q{
shared_preload_libraries = 'idem'
idem.cleanup = off
idem.look_after = 1h
};
my $primary = new_node('primary', init => { allows_streaming => 1 }, conf => $conf);

# who is in the way, as reason|detail without ages|command without numbers
sub why
{
	my ($id, $node) = @_;

	return run(
		qq{SELECT reason, regexp_replace(detail, '\\d+ s\\M', 'N s', 'g'), regexp_replace(fix, '\\d+', 'N')
			 FROM idem_why($id) ORDER BY 1, 2}, node => $node // $primary);
}

sub holder
{
	my ($key, $node) = @_;

	return run(
		qq{SELECT kind, pid IS NOT NULL, since IS NOT NULL, detail FROM idem_holder('$key') ORDER BY 1, 4},
		node => $node // $primary);
}

sub run_fixes
{
	my ($call) = @_;

	run($_) foreach split /\n/, run("SELECT fix FROM $call");
	return;
}

#
# pg_terminate_backend, for each kind of holder
#

run(q{SELECT idem_enqueue('q', key => 'k')});

my $ready = qr/^ready\|The next fetch gets it\. Looked at: [^.]*\./;
my %holders = (
	'absorbed a duplicate' => q{SELECT outcome FROM idem_enqueue('q', key => 'k')},
	'fetched the job' => q{SELECT job_id FROM idem_fetch('q')},
	'cancelled the job' => q{SELECT idem_cancel(1)});

foreach my $what (sort keys %holders)
{
	my $session = session($primary);

	$session->query("BEGIN; $holders{$what}");
	is(run('SELECT pid FROM idem_why(1)'), $session->{pid}, "H3: the process that has $what");
	like(why(1), qr/^held\|An open transaction .*\|SELECT pg_catalog\.pg_terminate_backend\(N\);$/,
		"H3: and how to end it");
	run_fixes('idem_why(1)');
	$primary->poll_query_until('postgres', q{SELECT reason = 'ready' FROM idem_why(1)})
	  or die 'the transaction was not ended';
	like(why(1), $ready, 'H3: the command ends it');
	$session->lost;
}

my $claimer = session($primary);
$claimer->query(q{BEGIN; SELECT idem_claim('claimed')});
is(run(q{SELECT pid FROM idem_holder('claimed')}), $claimer->{pid}, 'H3: the process that has claimed a key');
run_fixes(q{idem_holder('claimed')});
$primary->poll_query_until('postgres', q{SELECT count(*) = 0 FROM idem_holder('claimed')})
  or die 'the transaction was not ended';
$claimer->lost;

#
# a session that waits for the queue; the last fetch
#

like(why(1), qr/The last fetch from the queue was N s ago\.\|$/, 'H3: no session waits');
my $waiter = session($primary);
$waiter->query(q{SELECT idem_queue_set('q')});
run(q{SELECT idem_enqueue('empty', delay => '1 h', key => 'later')});
$waiter->send(q{CALL idem_wait('empty', '10 min')});
wait_until_asleep($primary, 1, "pid = $waiter->{pid}");
like(run(q{SET idem.clock_offset = '2 h'; SELECT detail FROM idem_why(2)}),
	qr/^The next fetch gets it.* A session waits for the queue\.$/, 'H3: a session waits');
run("SELECT pg_cancel_backend($waiter->{pid})");
$waiter->receive;
is($waiter->{sqlstate}, '57014', 'the session no longer waits');
$waiter->quit;

#
# without pg_read_all_stats: a role sees the process of its own sessions, not that of others; with it, all
#

run(q{CREATE ROLE app LOGIN; CREATE ROLE reader LOGIN IN ROLE pg_read_all_stats;
	SELECT idem_grant('app', 'app'), idem_grant('reader', 'app');
	SELECT idem_enqueue('shown', key => 'k')});
my $shown = run(q{SELECT job_id FROM idem.jobs WHERE queue = 'shown'});
my $super = run('SELECT current_user');
my %absorbers = map { $_ => session($primary, user => $_) } 'app', $super;
$_->query(q{BEGIN; SELECT idem_enqueue('shown', key => 'k')}) foreach values %absorbers;
foreach my $user ('app', 'reader', $super)
{
	my @pids = sort { $a <=> $b } map { $absorbers{$_}{pid} } $user eq 'app' ? 'app' : ('app', $super);
	my $pids = join(',', @pids);

	is( $primary->safe_psql('postgres',
			qq{SELECT count(*), string_agg(pid::text, ',' ORDER BY pid), count(since), count(fix) FROM idem_why($shown)},
			extra_params => [ '-U', $user ]),
		join('|', 2, $pids, (scalar @pids) x 2),
		"H3: the processes that $user sees");
}
$_->quit foreach values %absorbers;
run(q{SELECT idem_revoke('app', 'app'), idem_revoke('reader', 'app')});
run("SELECT idem_cancel($shown)");

#
# beside a job that moves between the jobs and the history again and again: it is never gone
#

my $moves = run(q{SELECT job_id FROM idem_enqueue('moves')});
my $mover = session($primary);
$mover->send(qq{SET synchronous_commit = off;
	DO \$\$ BEGIN FOR i IN 1 .. 1000 LOOP
		PERFORM idem_cancel($moves);
		COMMIT;
		PERFORM idem_retry($moves);
		COMMIT;
	END LOOP; END \$\$});
is(run(qq{SELECT count(DISTINCT i), count(*) FILTER (WHERE reason = 'gone')
		FROM generate_series(1, 3000) AS i, LATERAL idem_why(CASE WHEN i > 0 THEN $moves END)}),
	'3000|0', 'H3: a job that is cancelled and retried meanwhile is never gone');
$mover->receive;
$mover->quit;
run("SELECT idem_cancel($moves)");

#
# a standby: the holders run on the primary.  Both versions of a row that is changed are there.
#

$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

my $open = session($primary);
$open->query(q{BEGIN; SAVEPOINT a; SELECT idem_enqueue('q', key => 'k'); SELECT idem_claim('open'); SELECT idem_enqueue('q', key => 'new')});
my $new = run(q{SELECT last_value FROM idem.jobs_job_id_seq});
run(q{BEGIN; SAVEPOINT a; SELECT idem_enqueue('q', key => 'k'); SELECT idem_claim('prepared'); PREPARE TRANSACTION 'p'});
run(q{SELECT idem_lease('leased', '1 h', worker => 'w')});
run(q{SELECT idem_pause('paused'); SELECT idem_enqueue('paused')});
$primary->wait_for_catchup($standby);

my $absorbed = 'held|An open transaction has enqueued a duplicate, which the job has absorbed. ';
my $claimed = 'claim|f|f|An open transaction has claimed the key. ';
is(why(1, $standby), join("\n", ("${absorbed}It runs on the primary.|") x 2), 'H3: absorbers, on a standby');
is(why($new, $standby), 'held|An open transaction has enqueued the job, which can be fetched after the commit. It runs on the primary.|', 'H3: a new job, on a standby');
is(holder('open', $standby), "${claimed}It runs on the primary.", 'H3: an open claim, on a standby');
is(holder('prepared', $standby), "${claimed}It runs on the primary.", 'H3: a prepared claim, on a standby');
is(holder('leased', $standby), 'lease|f|t|A worker has a lease of the key.', 'H3: a lease, on a standby');
like(why($new + 1, $standby), qr/^paused\|/, 'H3: a paused queue, on a standby');
like(why(1000, $standby), qr/^gone\|/, 'H3: no job, on a standby');
is(run(q{SELECT count(*) FROM idem.workers}, node => $standby), '0', 'H3: idem.workers, on a standby');
like(run(q{SET idem.clock_offset = '2 h'; SELECT detail FROM idem_why(2)}, node => $standby),
	qr/^The next fetch gets it\. Looked at: [^.]*\. It is not known when /, 'H3: a ready job, on a standby');

#
# a crash: open transactions are gone, prepared ones stay; as after a promotion
#

my $prepared = "${absorbed}It is the prepared transaction p.|ROLLBACK PREPARED 'p';";

is(scalar(split /\n/, why(1)), 2, 'H3: two absorbers before the crash');
$primary->stop('immediate');
$open->lost;
$primary->start;
$standby->promote;
foreach my $where ([ $primary, 'after a crash' ], [ $standby, 'after a promotion' ])
{
	my ($node, $what) = @$where;

	is(why(1, $node), $prepared, "H3: the prepared absorber $what");
	like(why($new, $node), qr/^gone\|/, "H3: the new job of the open transaction $what");
	is(holder('open', $node), '', "H3: no holder $what");
	is(holder('prepared', $node), 'claim|f|t|An open transaction has claimed the key. It is the prepared transaction p.',
		"H3: a prepared claim $what");
	run(run('SELECT fix FROM idem_why(1)', node => $node), node => $node);
	like(why(1, $node), qr/^ready\|The next fetch gets it\. Looked at: [^.]*\. (?:No fetch from the queue is known since the server was started|It is not known when a worker last fetched from the queue)\.\|$/,
		"H3: and its command $what");
	is(holder('prepared', $node), '', "H3: which lets the key go, too, $what");
}

#
# without preload
#

$primary->append_conf('postgresql.conf', q{shared_preload_libraries = ''});
$primary->restart;
is(why(1), 'ready|The next fetch gets it. Looked at: its row, its queue, the jobs before it, open transactions, locks on the table, subscriptions. It is not known when a worker last fetched from the queue.|',
	'H3: without preload');

log_ok($primary);
log_ok($standby);
done_testing();
