# Logical replication: an upgrade without downtime, from the publisher to the
# subscriber.
#
#   W1   cleanup, by the worker and by hand, skips what a subscription writes,
#        and goes on when the subscription is dropped: else an expired key that
#        the publisher takes over is missing after the cutover, and runs again
#   K13  the subscriber refuses to write with 25006 until then
#   H1   the doctor says so
#
# First step by step: short rows, TOAST, a takeover, dead jobs on both sides, a
# role that is missing, the sequence.  Then a cutover under load, with a ledger:
# nothing runs twice, nothing is lost.  The steps are those of
# doc/replication.md.
#
# By hand, to a newer server: IDEM_SUBSCRIBER=/path/of/installation, in which
# idem is installed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $conf = q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
wal_retrieve_retry_interval = 100ms
};
my $publisher = new_node(
	'publisher',
	init => { allows_streaming => 'logical' },
	conf => "$conf\nidem.cleanup = off\n");
my $subscriber = new_node(
	'subscriber',
	install => $ENV{IDEM_SUBSCRIBER},
	conf => $conf);
my $ledger = q{
	-- the work of keys, changes that jobs are for, and the work of jobs
	CREATE TABLE runs (key text, server int, PRIMARY KEY (key, server));
	CREATE TABLE changes (key text, n int, PRIMARY KEY (key, n));
	CREATE TABLE seen (job_id bigint, key text, n int, server int, PRIMARY KEY (job_id, server))};

# a role of the same name has another number on the other server
$publisher->safe_psql('postgres', "CREATE ROLE app LOGIN; $ledger");
$subscriber->safe_psql('postgres', "CREATE ROLE another; CREATE ROLE app LOGIN; $ledger");
foreach my $node ($publisher, $subscriber)
{
	$node->safe_psql(
		'postgres', q{
		SELECT idem_grant('app', 'app');
		GRANT SELECT, INSERT ON runs, changes, seen TO app});
}

sub on_publisher
{
	my ($sql) = @_;

	return $publisher->safe_psql('postgres', $sql);
}

sub on_subscriber
{
	my ($sql) = @_;

	return $subscriber->safe_psql('postgres', $sql);
}

sub catch_up
{
	$publisher->wait_for_catchup('sub');
	return;
}

# The worker comes every second: between two visits the phase is that of the last one.
sub phase_ok
{
	my ($phase, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	ok( $subscriber->poll_query_until(
			'postgres', qq{
			SELECT phase = '$phase' FROM idem.cleanup_progress WHERE datname = current_database()}),
		$what);
	return;
}

# All rows of our tables, as a client sees them.  A row that ends before the
# columns of a lease is the same as one with nulls there.
my $everything = q{
	SELECT 'key', k::text FROM idem.keys AS k
	UNION ALL SELECT 'job', j::text FROM idem.jobs AS j
	UNION ALL SELECT 'job key', x::text FROM idem.job_keys AS x
	UNION ALL SELECT 'log', l::text FROM idem.job_log AS l
	UNION ALL SELECT 'queue', q::text FROM idem.queues AS q
	ORDER BY 1, 2};

sub same_ok
{
	my ($what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	catch_up();
	ok(on_subscriber($everything) eq on_publisher($everything),
		"the subscriber has the same rows: $what");
	return;
}

#
# the subscription; a role is missing at first
#

# 20 kB that do not compress
my $large = q{(SELECT to_jsonb(string_agg(md5(i::text), '')) FROM generate_series(1, 625) AS i)};

on_publisher(
	qq{
	CREATE ROLE late;
	SELECT idem_grant('late', 'app');
	SET ROLE app;
	SELECT idem_claim('short');
	BEGIN; SELECT idem_claim('small'); SELECT idem_finish('small', '"small"'); COMMIT;
	BEGIN; SELECT idem_claim('large'); SELECT idem_finish('large', $large); COMMIT;
	SELECT idem_lease('leased', '1 hour', worker => 'w 1');
	SET ROLE late;
	SELECT idem_claim('of late');
	RESET ROLE;
	SELECT idem_queue_set('of app', owner => 'app');
	SELECT idem_enqueue('q', '"copied"');
	CREATE PUBLICATION pub FOR ALL TABLES});

is(doctor('subscription', node => $subscriber), 'ok', 'H1: no subscription, and no problem');

my $offset = -s $subscriber->logfile;

on_subscriber(
	sprintf q{CREATE SUBSCRIPTION sub CONNECTION '%s' PUBLICATION pub},
	$publisher->connstr . ' dbname=postgres');
$subscriber->wait_for_log(qr/role "late" does not exist/, $offset);
is( on_subscriber(q{SELECT count(*) FROM idem.keys}),
	'0', 'role missing: no key is copied');
on_subscriber('CREATE ROLE late');
$subscriber->wait_for_subscription_sync($publisher, 'sub');
same_ok('copied, when the role is there');
is( on_subscriber(q{SELECT key, owner FROM idem.keys WHERE key IN ('of late', 'short') ORDER BY 1}),
	"of late|late\nshort|app",
	'owners are carried by name');

# the same while it streams
$offset = -s $subscriber->logfile;
on_publisher(
	q{CREATE ROLE later; SELECT idem_grant('later', 'app');
	SET ROLE later; SELECT idem_claim('of later')});
$subscriber->wait_for_log(qr/role "later" does not exist/, $offset);
on_subscriber('CREATE ROLE later');
same_ok('streamed, when the role is there');

#
# rows of every kind, streamed; the second of each pair is an update
#

my $token = on_publisher(q{SELECT token FROM idem_get('leased')});
my $lease_token = on_publisher(q{SET ROLE app; SELECT token FROM idem_lease('checkpoint', '1 hour')});

on_publisher(
	qq{
	SET ROLE app;
	SELECT idem_claim('short 2');
	BEGIN; SELECT idem_claim('large 2'); SELECT idem_finish('large 2', $large); COMMIT;
	SELECT idem_checkpoint('checkpoint', $lease_token, $large);
	SELECT idem_renew('checkpoint', $lease_token, '2 hours');
	SELECT idem_renew('leased', $token, '2 hours');
	RESET ROLE;
	SELECT idem_enqueue('large', $large);
	SELECT idem_queue_set('kept', keep => '1 day');
	SELECT idem_enqueue('kept', '1', 'kept', dedup => 'until_expired', key_ttl => '1 day');
	SELECT idem_complete(job_id, token, $large) FROM idem_fetch('kept', lease => '1 hour')});
my ($large_job, $large_token) = split /\|/,
  on_publisher(q{SELECT job_id, token FROM idem_fetch('large', lease => '1 hour')});
same_ok('short, large, leased, checkpoint, jobs, history');
is(on_subscriber(q{SELECT length(result::text) FROM idem_get('large 2')}),
	'20002', 'a result out of line arrives');

#
# W1: cleanup on the subscriber, in the way of the publisher
#

# expired keys that the publisher will take over, history, and a spent job
on_publisher(
	q{
	SET idem.clock_offset = -100000;
	SET ROLE app;
	SELECT idem_claim_many('{taken over, taken over with lease, gone}', ttl => '1 s');
	RESET ROLE;
	SELECT idem_enqueue('kept', '2', 'old', dedup => 'until_expired', key_ttl => '1 s');
	SELECT idem_queue_set('kept', keep => '1 s');
	SELECT idem_complete(job_id, token) FROM idem_fetch('kept', lease => '1 s');
	SELECT idem_enqueue('spent', max_attempts => 1);
	SELECT idem_fetch('spent', lease => '1 s')});
same_ok('what has expired');

my $before = on_subscriber($everything);

is(doctor('subscription', node => $subscriber), 'warn', 'H1: the doctor reports the subscription');
like(
	doctor('subscription', columns => 'detail', node => $subscriber),
	qr/^idem\.job_keys, idem\.job_log, idem\.jobs, idem\.keys, idem\.queues, idem\.shard: written by subscription sub,.*roles.*stop writes.*DROP SUBSCRIPTION, reload$/,
	'H1: and says what to do at the cutover');
cleanup_round($subscriber, 'postgres');
phase_ok('subscribed', 'W1: the worker shows that it skips tables');
my ($ret, $out, $err) =
  $subscriber->psql('postgres', 'SELECT idem_cleanup()');
is($out, '0', 'W1: idem_cleanup() skips them, too');
like($err,
	qr/^psql.*NOTICE:  cleanup has skipped tables that a subscription writes\nDETAIL:  Not cleaned up: idem\.keys, idem\.job_keys, idem\.job_log, idem\.jobs\.\nHINT: /,
	'W1: and says so');
on_subscriber('ALTER SUBSCRIPTION sub DISABLE');
cleanup_round($subscriber, 'postgres');
phase_ok('subscribed', 'W1: also while the subscription is disabled');
is(on_subscriber('SELECT idem_cleanup()'), '0', 'W1: idem_cleanup() as well');
on_subscriber('ALTER SUBSCRIPTION sub ENABLE');
is(on_subscriber($everything), $before, 'W1: nothing was removed');

# K13: what would write is refused, and what reads works
foreach my $call (
	q{idem_claim('new')}, q{idem_claim('taken over')},
	q{idem_claim('short')}, q{idem_lease('new', '1 min')},
	qq{idem_finish('leased', token => $token)},
	qq{idem_renew('leased', $token, '1 min')},
	q{idem_forget('short')}, q{idem_enqueue('q')},
	q{idem_enqueue('q', key => 'k')}, q{idem_fetch('q')},
	q{idem_fetch('spent', lease => '1 min')},
	qq{idem_complete($large_job, $large_token)},
	qq{idem_cancel($large_job)}, q{idem_queue_set('q', lease => '1 min')},
	q{idem_pause('q')})
{
	is(sqlstate($subscriber, "SELECT $call"),
		'25006', "K13: $call gives 25006 on the subscriber");
}
is( on_subscriber(
		qq{SELECT status FROM idem_get('short'); SELECT state FROM idem_job($large_job)}),
	"finished\nrunning",
	'K13: reading works there');
is(on_subscriber($everything), $before, 'K13: nothing was changed');

# the takeovers arrive; the publisher's cleanup arrives, with the dead job
on_publisher(
	q{
	SET ROLE app;
	BEGIN;
	SELECT idem_claim('taken over'); SELECT idem_finish('taken over', '"life 2"');
	COMMIT;
	SELECT idem_lease('taken over with lease', '1 hour');
	RESET ROLE;
	SELECT idem_cleanup()});
same_ok('takeovers, a dead job, removals');
is( on_subscriber(
		q{SELECT key FROM idem.keys WHERE key = 'gone';
		SELECT result FROM idem_get('taken over');
		SELECT status FROM idem_get('taken over with lease');
		SELECT queue, state FROM idem.job_log ORDER BY 1}),
	qq{"life 2"\nlive\nkept|done\nspent|dead},
	'takeovers, a dead job, removals are what arrives');
is( on_subscriber(q{SELECT count(*) FROM pg_stat_subscription WHERE subname = 'sub' AND pid IS NOT NULL}),
	'1', 'and the subscription goes on');

#
# the cutover, under load
#
# Clients work on the publisher (server 0).  A client that gets 25006, or loses its
# connection, tries the same again on the other server, a moment later, and so
# on: they know nothing of the cutover.  Each of them ends when it has done so much on the
# subscriber.
#

my @servers = ($publisher, $subscriber);
my $enough = 30;
my $dir = PostgreSQL::Test::Utils::tempdir();
my %pid_of;

END
{
	my $status = $?;

	kill 'KILL', $_ foreach values %pid_of;
	$? = $status;
}

# One piece of work, until it has succeeded somewhere; returns where.
sub persist
{
	my ($client, $work) = @_;

	for (;;)
	{
		my $server = $client->{server};

		return $server if eval {
			$client->{session} //= session($servers[$server], user => 'app');
			$work->($client->{session}, $server);
			1;
		};
		die $@ unless $@ =~ /\b(25006|57P01)\b|psql has ended|connection/;
		$client->{session}->lost if $client->{session};
		$client->{session} = undef;
		$client->{server} = 1 - $server;
		usleep(50_000);
	}
	return;
}

# A client in a separate process; its results go to a file.
sub start_client
{
	my ($name, $code) = @_;

	$pid_of{$name} = fork // die "could not fork: $!";
	return if $pid_of{$name} != 0;

	%pid_of = ();
	Test::More->builder->output('/dev/null');
	my @lines = eval { $code->({ server => 0 }) };
	my $error = $@;

	append_to_file("$dir/$name", join("\n", @lines));
	print STDERR "client $name: $error" if $error;
	POSIX::_exit($error ? 1 : 0);
}

sub lines_of
{
	my ($name) = @_;

	return split /\n/, slurp_file("$dir/$name");
}

# The same keys in the same order from two clients: each must run once.
sub claim_keys
{
	my ($client) = @_;
	my @keys;

	for (my $done = 0; $done < $enough;)
	{
		my $key = 'claim ' . (@keys + 1);

		push @keys, $key;
		$done += persist(
			$client,
			sub {
				my ($s, $server) = @_;

				$s->query('BEGIN');
				if ($s->query("SELECT claimed FROM idem_claim('$key')") eq 't')
				{
					$s->query("INSERT INTO runs VALUES ('$key', $server)");
					$s->query("SELECT idem_finish('$key', '\"$key\"')");
				}
				$s->query('COMMIT');
			});
	}
	return @keys;
}

# Keys that expire at once and are taken over, again and again.  The worker of
# the subscriber comes by while they are expired there.
sub take_over
{
	my ($client) = @_;

	for (my ($n, $done) = (1, 0); $done < $enough; $n++)
	{
		my $key = 'life ' . $n % 5;

		$done += persist($client,
			sub { $_[0]->query("SELECT idem_claim('$key', ttl => '1 ms')") });
	}
	return;
}

# Work outside: a lease, which is taken and finished wherever that works.  The
# line is what the outside has seen.
sub lease_keys
{
	my ($client) = @_;
	my @lines;

	for (my ($n, $done) = (1, 0); $done < $enough; $n++)
	{
		my $key = "lease $n";
		my ($status, $lease);

		# the worker gets its lease again if it did not hear of it
		persist(
			$client,
			sub {
				my ($s) = @_;

				($status, $lease) = split /\|/,
				  $s->query("SELECT status, token FROM idem_lease('$key', '1 hour', worker => 'w')");
			});
		push @lines, $key if $status eq 'claimed' || $status eq 'resumed';
		$done += persist($client,
			sub { $_[0]->query("SELECT idem_finish('$key', '$n', token => $lease)") });
	}
	return @lines;
}

# Changes of ten records, and a job for each change, which may be absorbed
sub enqueue_jobs
{
	my ($client) = @_;
	my $n = 0;

	for (my $done = 0; $done < $enough;)
	{
		my $key = 'record ' . ++$n % 10;

		# a repeated change is not another one
		$done += persist(
			$client,
			sub {
				$_[0]->query(
					qq{BEGIN;
					INSERT INTO changes VALUES ('$key', $n) ON CONFLICT DO NOTHING;
					SELECT idem_enqueue('jobs', key => '$key');
					COMMIT});
			});
	}
	return $n;
}

# A worker; in a transaction, or with a lease, which is completed wherever that
# works.  It ends when there is nothing to do on the subscriber and nothing will come.
sub do_jobs
{
	my ($client, $leased) = @_;
	my $lease = $leased ? "'1 hour'" : 'NULL';
	my $work = sub {
		my ($s, $server, $id, $key) = @_;

		$s->query(
			qq{INSERT INTO seen SELECT $id, '$key', max(n), $server FROM changes WHERE key = '$key'});
	};

	for (;;)
	{
		my ($id, $job_token, $key);
		my $is_last = -e "$dir/producer";
		my $server = persist(
			$client,
			sub {
				my ($s, $at) = @_;

				$s->query('BEGIN') unless $leased;
				($id, $job_token, $key) = split /\|/,
				  $s->query("SELECT job_id, token, key FROM idem_fetch('jobs', 1, $lease)");
				return if $leased;
				if (defined $id)
				{
					$work->($s, $at, $id, $key);
					$s->query("SELECT idem_complete($id, $job_token)");
				}
				$s->query('COMMIT');
			});

		return if !defined $id && $is_last && $server == 1;
		persist(
			$client,
			sub {
				my ($s, $at) = @_;

				$s->query('BEGIN');
				# the job may be done: the answer to the commit was lost
				if ($s->query("SELECT count(*) FROM seen WHERE job_id = $id") eq '0')
				{
					$work->($s, $at, $id, $key);
					$s->query("SELECT idem_complete($id, $job_token)");
				}
				$s->query('COMMIT');
			}) if defined $id && $leased;
	}
	return;
}

start_client("claims $_", \&claim_keys) foreach 1, 2;
start_client('takeovers', \&take_over);
start_client('leases', \&lease_keys);
start_client('producer', \&enqueue_jobs);
start_client('worker', sub { do_jobs($_[0], 0) });
start_client('leased worker', sub { do_jobs($_[0], 1) });

foreach my $condition (
	"count(*) > 20 FROM runs",
	"count(*) > 10 FROM seen",
	"count(*) > 10 FROM idem.keys WHERE key LIKE 'lease %'")
{
	$publisher->poll_query_until('postgres', "SELECT $condition")
	  or die 'the clients do not work';
}

# 1. the publisher takes no more writes
on_publisher('ALTER DATABASE postgres SET default_transaction_read_only = on');
my $since = on_publisher('SELECT clock_timestamp()');
$publisher->poll_query_until(
	'postgres', qq{
	SELECT count(pg_terminate_backend(pid)) = 0 FROM pg_stat_activity
	 WHERE datname = current_database() AND backend_type = 'client backend'
	   AND backend_start < '$since' AND pid <> pg_backend_pid()})
  or die 'sessions do not end';
is(on_publisher('SELECT count(*) FROM pg_prepared_xacts'),
	'0', 'cutover: no prepared transaction is left');
is(sqlstate($publisher, q{SELECT idem_claim('short')}),
	'25006', 'K13: the publisher answers 25006');

# 2. all of it is on the subscriber, which refuses as well
my $lsn = on_publisher('SELECT pg_current_wal_lsn()');

$publisher->poll_query_until('postgres',
	"SELECT confirmed_flush_lsn >= '$lsn' FROM pg_replication_slots WHERE slot_name = 'sub'")
  or die 'the subscriber does not catch up';
is(sqlstate($subscriber, q{SELECT idem_claim('short')}),
	'25006', 'K13: the subscriber does not write yet');
ok(on_subscriber($everything) eq on_publisher($everything),
	'the subscriber has the same rows: at the cutover');

# 3. the sequence, before any client can enqueue
my $last = on_publisher('SELECT last_value FROM idem.jobs_job_id_seq');

cmp_ok(on_subscriber('SELECT last_value FROM idem.jobs_job_id_seq'),
	'<', $last, 'the sequence is not replicated');
on_subscriber(doctor('subscription', columns => 'fix', node => $subscriber));
cmp_ok(on_subscriber('SELECT last_value FROM idem.jobs_job_id_seq'),
	'>', $last, 'H1: the fix of the doctor sets it');

# 4. the subscriber is no longer one
on_subscriber('DROP SUBSCRIPTION sub');
is(doctor('subscription', node => $subscriber), 'ok', 'H1: no subscription any more');

foreach my $name (sort keys %pid_of)
{
	waitpid($pid_of{$name}, 0);
	is($?, 0, "client $name has ended well");
	delete $pid_of{$name};
}

# A worker that did not hear of its lease leaves the job to the next, an hour later.
my $s = session($subscriber);
my $is_left = 1;

$s->query('SET idem.clock_offset = 7200');
while ($is_left)
{
	$is_left = $s->query(
		q{BEGIN;
		SELECT job_id, token, key FROM idem_fetch('jobs') \gset
		\if :{?job_id}
		INSERT INTO seen SELECT :job_id, :'key', max(n), 1 FROM changes WHERE key = :'key';
		SELECT idem_complete(:job_id, :token);
		\endif
		\unset job_id
		COMMIT}) eq 't';
}
$s->query('RESET idem.clock_offset; SET ROLE app');

#
# the ledger
#

my %claimed = map { $_ => 1 } map { lines_of($_) } 'claims 1', 'claims 2';
my %ran;

$ran{$_}++ foreach split /\n/, on_subscriber('SELECT key FROM runs');
is(join(', ', grep { $ran{$_} > 1 } sort keys %ran),
	'', 'K3: no key has run twice');
is(join(', ', grep { !$ran{$_} } sort keys %claimed),
	'', 'K1: and none was lost');
cmp_ok(on_subscriber("SELECT count(*) FROM runs WHERE server = $_"),
	'>', 0, "keys have run on server $_")
  foreach 0, 1;
is( on_subscriber(
		q{SELECT DISTINCT c.status, c.result = to_jsonb(c.key)
		  FROM idem_claim_many(ARRAY(SELECT key FROM runs)) AS c}),
	'finished|t',
	'K2: each key has its result, from either server');

my %outside;

$outside{$_}++ foreach lines_of('leases');
is(join(', ', grep { $outside{$_} > 1 } sort keys %outside),
	'', 'L1: nothing was done twice outside');
is( on_subscriber(q{SELECT count(*) FROM idem.keys WHERE key LIKE 'lease %' AND finished_at IS NOT NULL}),
	scalar(keys %outside),
	'L3: each lease was finished, from either server');

like(on_subscriber('SELECT count(*), count(DISTINCT job_id) FROM seen'),
	qr/^(\d+)\|\1$/, 'J11: no job was done twice');
is( on_subscriber(
		q{SELECT c.key FROM changes AS c GROUP BY c.key
		  HAVING max(c.n) > (SELECT max(s.n) FROM seen AS s WHERE s.key = c.key)}),
	'',
	'J2: every change was followed by a job that has seen it');
is(on_subscriber('SELECT count(*) FROM changes'),
	(lines_of('producer'))[0], 'and none was lost');
is( on_subscriber(
		q{SELECT count(*) FROM idem.jobs WHERE queue = 'jobs'}),
	'0',
	'J2: no job is left');
cmp_ok(on_subscriber("SELECT count(*) FROM seen WHERE server = $_"),
	'>', 0, "jobs were done on server $_")
  foreach 0, 1;
cmp_ok(on_subscriber(q{SELECT job_id FROM idem_enqueue('new')}),
	'>', $last, 'new jobs have new numbers');

#
# after the cutover: what the old server has begun goes on here
#

is( $s->query(
		qq{SELECT status, result FROM idem_claim('taken over');
		SELECT status FROM idem_claim('taken over with lease', wait => '0');
		SELECT status FROM idem_claim('short');
		SELECT status, result FROM idem_claim('small');
		SELECT status, length(result::text) FROM idem_claim('large');
		SELECT status, length(result::text) FROM idem_claim('large 2');
		SELECT idem_finish('leased', '1', token => $token);
		SELECT length(checkpoint::text) FROM idem_get('checkpoint');
		SELECT idem_finish('checkpoint', '1', token => $lease_token);
		SELECT idem_complete($large_job, $large_token);
		SELECT outcome, length(result::text)
		  FROM idem_enqueue('kept', '1', 'kept', dedup => 'until_expired', key_ttl => '1 day')}),
	join("\n", 'finished|"life 2"', 'busy', 'finished', 'finished|"small"',
		'finished|20002', 'finished|20002', 't', '20002', 't', 't', 'done|20002'),
	'K2, K3, L3, J5, J11: keys, leases and jobs of the publisher');
is(sqlstate($subscriber, q{SELECT idem_claim('of late')}, user => 'app'),
	'42501', 'a key belongs to the role of the same name');

# W1: and cleanup goes on by itself
add_expired($subscriber, 3);
ok( $subscriber->poll_query_until(
		'postgres', 'SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now()'),
	'W1: the worker cleans up');
phase_ok('idle', 'W1: and skips nothing');
$s->quit;
amcheck_ok($subscriber, 'after the cutover', 'idem.keys', 'idem.jobs',
	'idem.job_keys', 'idem.job_log');

$_->stop foreach $subscriber, $publisher;
log_ok($_) foreach $publisher, $subscriber;
done_testing();
