# The answer to a commit is lost: the client cannot know whether it took place,
# and does what it did once more.
#
# Answers are really lost here.  A proxy between psql and the server cuts the
# connection when the answer has arrived, or when the statement was sent, or
# instead of sending it; and a client is killed while its commit waits for a
# standby that does not exist, so that the server is still committing when the client
# tries again.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IO::Select;
use IO::Socket::UNIX;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;

plan skip_all => 'needs Unix-domain sockets'
  unless $PostgreSQL::Test::Utils::use_unix_sockets;

# A session that sets synchronous_commit to on waits for a standby that does not exist.
my $node = new_node(
	'lost_answer',
	init => { allows_streaming => 1 },
	conf => q{
synchronous_standby_names = 'nobody'
synchronous_commit = local
});

$node->safe_psql(
	'postgres', q{
	CREATE TABLE business (
		id bigint GENERATED ALWAYS AS IDENTITY,
		key text NOT NULL)});

#
# the proxy
#

my $proxy_dir = PostgreSQL::Test::Utils::tempdir_short();
my $proxy;    # process id

# Passes on what comes until the client sends the statement, which it knows by
# a word in it.  Then, by mode:
#   answer   waits until the server is done, and drops its answer
#   sent     sends it and does not wait
#   unsent   does not even send it
# and cuts the connection.
sub serve
{
	my ($client, $server, $word, $mode) = @_;
	my $both = IO::Select->new($client, $server);
	my $cut = 0;
	my $answer = '';

	while (1)
	{
		foreach my $from ($both->can_read)
		{
			my $to = $from == $client ? $server : $client;
			my $read = sysread $from, my $data, 65536;

			return unless $read;
			if ($from == $client && index($data, $word) >= 0)
			{
				return if $mode eq 'unsent';
				$cut = 1;
			}
			if ($from == $server && $cut)
			{
				# until ReadyForQuery
				$answer .= $data;
				return if $answer =~ /Z\x00\x00\x00\x05[IET]\z/s;
				next;
			}
			syswrite $to, $data;
			return if $cut && $mode eq 'sent';
		}
	}
}

sub start_proxy
{
	my ($word, $mode) = @_;
	my $name = '.s.PGSQL.' . $node->port;

	unlink "$proxy_dir/$name";
	my $listener = IO::Socket::UNIX->new(Local => "$proxy_dir/$name", Listen => 1)
	  or die "could not listen: $!";

	$proxy = fork // die "could not fork: $!";
	if ($proxy == 0)
	{
		my $client = $listener->accept;
		my $server = IO::Socket::UNIX->new(Peer => $node->host . "/$name");

		serve($client, $server, $word, $mode) if $client && $server;
		POSIX::_exit(0);
	}
	close $listener;
	return;
}

END
{
	my $status = $?;

	kill 'KILL', $proxy if $proxy;
	$? = $status;
}

# Runs $sql as a client that gets no answer to the statement with that word.
sub lose_answer
{
	my ($sql, $word, $mode) = @_;

	start_proxy($word, $mode);
	my ($ret, $out, $err) = $node->psql(
		'postgres', $sql,
		connstr => "host=$proxy_dir port="
		  . $node->port
		  . ' dbname=postgres application_name=through_proxy',
		timeout => $PostgreSQL::Test::Utils::timeout_default);
	waitpid $proxy, 0;
	$proxy = undef;
	note $err;
	is($ret, 2, "the connection is lost: $word, $mode");
	unlike($out, qr/\d{10}/, "and no token has arrived: $word, $mode");

	# the server goes on alone, to the end
	$node->poll_query_until(
		'postgres', q{
		SELECT count(*) = 0 FROM pg_stat_activity
		 WHERE application_name = 'through_proxy'})
	  or die 'the backend does not end';
	return;
}

sub token_of
{
	my ($key) = @_;

	return $node->safe_psql('postgres', "SELECT token FROM idem_get('$key')");
}

sub business_rows
{
	my ($key) = @_;

	return $node->safe_psql('postgres',
		"SELECT count(*) FROM business WHERE key = '$key'");
}

# Returns once the commit of that session waits for the standby.
sub wait_until_committing
{
	my ($s) = @_;

	$node->poll_query_until('postgres',
		"SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = $s->{pid}"
	) or die 'commit does not wait';
	return;
}

# Lets a commit that waits for the standby finish.
sub end_commit
{
	my ($s) = @_;

	$node->safe_psql('postgres', "SELECT pg_cancel_backend($s->{pid})");
	wait_until_gone($node, $s);
	return;
}

#
# a lease
#

foreach my $mode ('answer', 'sent')
{
	my $key = "lease, $mode";
	my $lease =
	  "SELECT claimed, status, token, attempt FROM idem_lease('$key', '1 min', worker => 'w 1')";

	lose_answer($lease, 'idem_lease', $mode);

	my $row = row_of($key);
	my $token = token_of($key);

	like($token, qr/^\d{16}$/, "L1: $key: the lease was taken");
	is($node->safe_psql('postgres', $lease),
		"t|resumed|$token|1", "L1: $key: the same worker gets the same token again");
	is( $node->safe_psql(
			'postgres', "BEGIN; $lease;
			SELECT pg_current_xact_id_if_assigned() IS NULL; COMMIT"),
		"t|resumed|$token|1\nt",
		"K8: $key: also a third time, which takes no transaction id");
	is( $node->safe_psql(
			'postgres', qq{
			SELECT claimed, status, token, attempt
			  FROM idem_lease('$key', '1 min', worker => 'w 2');
			SELECT claimed, status, token, attempt FROM idem_lease('$key', '1 min')}
		),
		"f|busy||1\nf|busy||1",
		"L1: $key: others get busy, and no token");
	is(row_of($key), $row, "L1: $key: the row is still the first one");
	is( $node->safe_psql(
			'postgres', qq{
			SET idem.clock_offset = 3600;
			SELECT status, attempt, token > $token
			  FROM idem_lease('$key', '1 min', worker => 'w 1')}),
		'claimed|2|t',
		"L1: $key: after the lease has expired the same worker gets a new one, too");
}

lose_answer(
	q{SELECT idem_lease('lease, unsent', '1 min', worker => 'w 1')},
	'idem_lease', 'unsent');
is( $node->safe_psql(
		'postgres',
		q{SELECT status, attempt FROM idem_lease('lease, unsent', '1 min', worker => 'w 1')}
	),
	'claimed|1',
	'L1: a lease that was never taken is claimed');

# killed while the server still commits
my $first = session($node);
my $again = session($node);

$first->query('SET synchronous_commit = on');
$first->send(
	q{SELECT token FROM idem_lease('lease, committing', '1 min', worker => 'w 1')}
);
wait_until_committing($first);
is($first->kill, '', 'the client is killed before it gets an answer');
is( $node->safe_psql(
		'postgres', q{
		SELECT status FROM idem_lease('lease, committing', '1 min', worker => 'w 1', wait => '0');
		SELECT status FROM idem_lease('lease, committing', '1 min', worker => 'w 2', wait => '0')}
	),
	"busy\nbusy",
	'K5: the lease is busy as long as the server commits');
$again->send(
	q{SELECT status, attempt FROM idem_lease('lease, committing', '1 min', worker => 'w 1')}
);
wait_until_blocked($node, $again);
end_commit($first);
is($again->receive, 'resumed|1', 'L1: the waiting call resumes the lease');

#
# a finish by itself
#

foreach my $mode ('answer', 'sent')
{
	my $key = "finish, $mode";
	my $token = $node->safe_psql('postgres',
		"SELECT token FROM idem_lease('$key', '1 min')");
	my $finish = "SELECT idem_finish('$key', '%s', token => $token)";

	lose_answer(sprintf($finish, '{"id": "ch_1", "n": 1}'), 'idem_finish', $mode);

	my $row = row_of($key);

	is( $node->safe_psql('postgres', "SELECT status, result FROM idem_get('$key')"),
		'finished|{"n": 1, "id": "ch_1"}',
		"L3: $key: the finish took place");
	is( sqlstate($node, sprintf($finish, '{"id": "ch_1", "n": 1}')),
		'00000', "L3: $key: it can be repeated");
	is( sqlstate($node, sprintf($finish, '{"n": 1.0, "id": "ch_1"}')),
		'00000', "L3: $key: also with an equal result that is written otherwise");
	is( $node->safe_psql(
			'postgres',
			'SET idem.clock_offset = 3600; '
			  . sprintf($finish, '{"id": "ch_1", "n": 1}')),
		'f',
		"L3: $key: also after the end of the lease");
	is( $node->safe_psql(
			'postgres',
			'BEGIN; '
			  . sprintf($finish, '{"id": "ch_1", "n": 1}')
			  . '; SELECT pg_current_xact_id_if_assigned() IS NULL; COMMIT'),
		"f\nt",
		"L3: $key: which takes no transaction id");
	is( sqlstate($node, sprintf($finish, '{"id": "ch_2"}')),
		'ID004', "L3: $key: another result is refused");
	is(sqlstate($node, "SELECT idem_finish('$key', token => $token)"),
		'ID004', "L3: $key: and so is none");
	is(row_of($key), $row, "L3: $key: the row is still the same");
}

#
# the business transaction: fence, rows, finish
#

sub transaction
{
	my ($key, $token) = @_;

	return qq{BEGIN;
		SELECT idem_fence('$key', $token);
		INSERT INTO business (key) VALUES ('$key');
		SELECT idem_finish('$key', '"done"', token => $token);
		COMMIT};
}

sub lease
{
	my ($key) = @_;

	return $node->safe_psql('postgres',
		"SELECT token FROM idem_lease('$key', '1 min', worker => 'w 1')");
}

foreach my $mode ('answer', 'sent')
{
	my $key = "transaction, $mode";
	my $token = lease($key);

	lose_answer(transaction($key, $token), 'COMMIT', $mode);

	my $row = row_of($key);

	is(business_rows($key), '1', "L4: $key: it took place");
	is( sqlstate($node, transaction($key, $token)),
		'ID004', "L4: $key: the fence refuses it a second time");
	is(business_rows($key), '1', "L4: $key: so the business rows are there once");
	is(row_of($key), $row, "L4: $key: the row is still the same");
}

my $unsent = lease('transaction, unsent');

lose_answer(transaction('transaction, unsent', $unsent), 'COMMIT', 'unsent');
is(business_rows('transaction, unsent'),
	'0', 'K1: a transaction whose commit did not arrive did not take place');
is( sqlstate($node, transaction('transaction, unsent', $unsent)),
	'00000', 'L4: and is done by the second attempt');
is(business_rows('transaction, unsent'), '1', 'L4: once');

# The client tries again while the first server process still has the
# transaction open: before the business rows, after the finish, at the commit.
sub begin_again
{
	my ($key, $token) = @_;

	is( sqlstate(
			$node,
			"SET lock_timeout = 1; BEGIN; SELECT idem_fence('$key', $token)"),
		'55P03',
		"L4: $key: the fence waits for the first attempt");
	is( $node->safe_psql(
			'postgres', qq{
			SET idem.clock_offset = 3600;
			SELECT status FROM idem_lease('$key', '1 min', wait => '0')}),
		'busy',
		"L4: $key: so does a takeover");
	$again->send("BEGIN; SELECT idem_fence('$key', $token)");
	wait_until_blocked($node, $again);
	return;
}

foreach my $open (
	[ 'fenced', sub { "BEGIN; SELECT idem_fence('$_[0]', $_[1])" } ],
	[ 'finished', sub { transaction(@_) =~ s/COMMIT\z//r } ])
{
	my ($what, $sql) = @$open;

	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		my $key = "transaction, $what, " . lc $end;
		my $token = lease($key);

		$first = session($node);
		$first->query($sql->($key, $token));
		begin_again($key, $token);
		$first->query(
			qq{INSERT INTO business (key) VALUES ('$key');
			SELECT idem_finish('$key', '"done"', token => $token)})
		  if $what eq 'fenced';
		$first->query($end);
		$first->quit;
		$again->receive;
		is( $again->{sqlstate},
			$end eq 'COMMIT' ? 'ID004' : '00000',
			"L4: $key: the second attempt learns how the first has ended");
		if ($end eq 'ROLLBACK')
		{
			$again->query(
				qq{INSERT INTO business (key) VALUES ('$key');
				SELECT idem_finish('$key', '"done"', token => $token)});
		}
		$again->query('COMMIT');
		is(business_rows($key), '1', "L4: $key: business rows are there once");
		is( $node->safe_psql(
				'postgres', "SELECT status, result FROM idem_get('$key')"),
			'finished|"done"',
			"L4: $key: it is finished");
	}
}

# a finish alone, against a transaction that has fenced the key
foreach my $end ([ '"done"', '00000' ], [ '"other"', 'ID004' ])
{
	my ($result, $state) = @$end;
	my $key = "finish $result against a fence";
	my $token = lease($key);

	$first = session($node);
	$first->query("BEGIN; SELECT idem_fence('$key', $token)");
	$again->send("SELECT idem_finish('$key', '$result', token => $token)");
	wait_until_blocked($node, $again);
	$first->query(
		qq{INSERT INTO business (key) VALUES ('$key');
		SELECT idem_finish('$key', '"done"', token => $token);
		COMMIT});
	$first->quit;
	$again->receive;
	is($again->{sqlstate}, $state,
		"L3, L4: $key: it waits, and then compares the results");
	is( $node->safe_psql(
			'postgres', "SELECT status, result FROM idem_get('$key')"),
		'finished|"done"',
		"L4: $key: the first result stays");
}

my $key = 'transaction, committing';
my $token = lease($key);

$first = session($node);
$first->query('SET synchronous_commit = on');
$first->send(transaction($key, $token));
wait_until_committing($first);
$first->kill;
begin_again($key, $token);
end_commit($first);
$again->receive;
is($again->{sqlstate}, 'ID004',
	"L4: $key: the second attempt is refused when the first has committed");
$again->query('ROLLBACK');
is(business_rows($key), '1', "L4: $key: business rows are there once");
$again->quit;

amcheck_ok($node, 'after all that');
$node->stop;
log_ok($node);
done_testing();
