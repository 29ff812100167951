# A crash at any point: nothing doubled, nothing lost.
#
# The test kills a backend between claim and commit; then the postmaster, with
# claims, takeovers, cleanups and prepared transactions open; and then the
# postmaster under load, whose clients record the commits that the server
# confirmed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('crash', conf => "restart_after_crash = on\n");

$node->safe_psql(
	'postgres', q{
	CREATE TABLE effects (
		id bigint GENERATED ALWAYS AS IDENTITY,
		key text NOT NULL);

	-- claims the key; if that succeeds leaves one row in effects and finishes
	CREATE FUNCTION run_once(k text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		answer record;
		effect bigint;
	BEGIN
		SELECT * INTO STRICT answer FROM idem_claim(k, request => to_jsonb(k));
		IF answer.claimed THEN
			INSERT INTO effects (key) VALUES (k) RETURNING id INTO effect;
			PERFORM idem_finish(k, jsonb_build_object('effect', effect));
		END IF;
		RETURN answer.status;
	END $$;

	-- keys whose result and effects do not agree: should be none
	CREATE VIEW disagreement AS
	SELECT coalesce(k.key, e.key) AS key, k.result, e.id
	  FROM (SELECT * FROM idem.keys WHERE result ? 'effect') AS k
	  FULL JOIN effects AS e
		ON e.key = k.key AND e.id = (k.result ->> 'effect')::bigint
	 WHERE k.key IS NULL OR e.key IS NULL;
});

sub effects_of
{
	my ($key) = @_;

	return $node->safe_psql('postgres',
		"SELECT count(*) FROM effects WHERE key = '$key'");
}

# What is committed before any crash.  The expired keys were claimed long ago
# by the clock of their session.
$node->safe_psql(
	'postgres', q{
	SELECT run_once('committed');
	SELECT idem_claim('committed, not finished');
	SET idem.clock_offset = -100000;
	SELECT idem_claim('expired, takeover open', ttl => '1 s');
	SELECT idem_claim('expired, cleanup open', ttl => '1 s');
});

#
# kill -9 of a backend
#

# opens transactions of every kind; then the caller crashes the server
sub open_transactions
{
	my ($key) = @_;
	my ($holder, $savepoint, $takeover, $waiter) =
	  map { session($node) } 1 .. 4;

	$holder->query("BEGIN; SELECT run_once('$key')");
	$savepoint->query(
		"BEGIN; SAVEPOINT s; SELECT run_once('$key, in a savepoint'); RELEASE s"
	);
	is( $takeover->query(
			q{BEGIN; SELECT status FROM idem_claim('expired, takeover open')}),
		'claimed',
		"K9: an expired key is taken over before the crash ($key)");
	$waiter->send("SELECT status FROM idem_claim('$key')");
	wait_until_blocked($node, $waiter);
	return ($holder, $savepoint, $takeover, $waiter);
}

sub check_after_crash
{
	my ($key, $what) = @_;

	is( $node->safe_psql(
			'postgres', qq{
			SELECT count(*) FROM idem_get('$key');
			SELECT count(*) FROM idem_get('$key, in a savepoint')}),
		"0\n0",
		"K1: uncommitted claims are gone after $what");
	is(effects_of($key), '0', "K1: so is what was written with them ($what)");

	is($node->safe_psql('postgres', "SELECT run_once('$key')"),
		'claimed', "K1: the uncommitted claim is claimable after $what");
	is( $node->safe_psql(
			'postgres', "SELECT run_once('$key, in a savepoint')"),
		'claimed',
		"K1: so is the one of the savepoint ($what)");
	is($node->safe_psql('postgres', "SELECT run_once('$key')"),
		'finished', "K2: and then it is finished ($what)");
	is(effects_of($key), '1', "K1: with one effect ($what)");

	like(
		claim_status($node, q{'committed', request => '"committed"'}),
		qr/^finished\|\{"effect": \d+\}$/,
		"K2: a committed claim is finished with its result after $what");
	is(effects_of('committed'), '1', "K1: and has one effect ($what)");
	is( claim_status($node, q{'committed, not finished'}),
		'finished|',
		"K2: a claim that was never finished is final, without result ($what)"
	);
	is(sqlstate($node, q{SELECT idem_claim('committed', request => '"b"')}),
		'ID001', "K7: the request is still known after $what");

	is( $node->safe_psql(
			'postgres', q{
			SELECT count(*) FROM idem_get('expired, takeover open');
			SELECT count(*) FROM idem.keys WHERE key = 'expired, takeover open'}
		),
		"0\n1",
		"K9: the crash of a takeover brings the expired row back ($what)");
	is($node->safe_psql('postgres', 'SELECT * FROM disagreement'),
		'', "K1: results and effects agree after $what");
	return;
}

my @sessions = open_transactions('backend killed');

crash_backend($node, $sessions[0]{pid});
$_->lost foreach @sessions;

check_after_crash('backend killed', 'kill -9 of a backend');

#
# kill -9 of the postmaster, with prepared transactions
#

$node->safe_psql(
	'postgres', q{
	BEGIN; SELECT run_once('to be committed'); PREPARE TRANSACTION 'commit';
	BEGIN; SELECT run_once('to be rolled back'); PREPARE TRANSACTION 'rollback';
});

@sessions = open_transactions('postmaster killed');

my $cleaner = session($node);
is( $cleaner->query(
		q{BEGIN; SELECT idem_cleanup();
		SELECT count(*) FROM idem.keys WHERE key = 'expired, cleanup open'}),
	"1\n0",
	'K9: cleanup removes the expired key that no transaction holds');

crash_postmaster($node);
$_->lost foreach @sessions, $cleaner;
$node->start;

check_after_crash('postmaster killed', 'kill -9 of the postmaster');

is( $node->safe_psql('postgres',
		q{SELECT count(*) FROM idem.keys WHERE key = 'expired, cleanup open'}),
	'1',
	'K1: an uncommitted cleanup has removed nothing');

foreach my $key ('to be committed', 'to be rolled back')
{
	is( claim_status($node, "'$key', wait => '0'"),
		'busy|', "K1: the key $key is still held by its prepared transaction");
	is( $node->safe_psql('postgres', "SELECT count(*) FROM idem_get('$key')"),
		'0',
		"K1: the key $key is not committed yet");
}

sub end_prepared
{
	my ($key, $command) = @_;
	my $waiter = session($node);

	$waiter->send("SELECT run_once('$key')");
	wait_until_blocked($node, $waiter);
	$node->safe_psql('postgres', $command);
	my $status = $waiter->receive;
	$waiter->quit;
	return $status;
}

is(end_prepared('to be committed', q{COMMIT PREPARED 'commit'}),
	'finished', 'K4: a claimer waits for COMMIT PREPARED and gets the result');
is(end_prepared('to be rolled back', q{ROLLBACK PREPARED 'rollback'}),
	'claimed', 'K4: a claimer waits for ROLLBACK PREPARED and gets the key');
is(effects_of('to be committed'), '1', 'K1: committed once');
is(effects_of('to be rolled back'),
	'1', 'K1: rolled back once, then run once');

#
# kill -9 of the postmaster under load
#
# Each client runs its own keys and keys of all, and prints a line after every
# confirmed commit.
#

my $clients = 4;
my $keys_per_client = 3000;
my @load;

foreach my $client (1 .. $clients)
{
	my $script = '';

	foreach my $n (1 .. $keys_per_client)
	{
		my $key = $n % 2 ? "load $client/$n" : "load all/$n";

		$script .= "BEGIN; SELECT run_once('$key') AS status \\gset\nCOMMIT;\n"
		  . "\\echo 'acknowledged: $key'\n";
	}
	push @load, session($node);
	$load[-1]->send($script);
}

# crash when every client has some confirmed commits
foreach my $s (@load)
{
	until (($s->{stdout} =~ tr/\n//) >= 100)
	{
		$_->{run}->pump_nb foreach @load;
		$s->{run}->pump;
	}
}
crash_postmaster($node);

my %acknowledged;
foreach my $s (@load)
{
	$acknowledged{$_} = 1 foreach $s->lost =~ /^acknowledged: (.*)$/mg;
}
$node->start;

my $acknowledged = keys %acknowledged;
my $all = $clients * $keys_per_client / 2 + $keys_per_client / 2;
note "$acknowledged of $all keys were acknowledged before the crash";
cmp_ok($acknowledged, '<', $all, 'the crash came in the middle of the load');

is( $node->safe_psql('postgres', 'SELECT * FROM disagreement'),
	'',
	'K1: results and effects agree after a crash under load');
is( $node->safe_psql(
		'postgres',
		'SELECT key, count(*) FROM effects GROUP BY key HAVING count(*) > 1'),
	'',
	'K3: no key has run twice');

my %finished = map { $_ => 1 } split /\n/,
  $node->safe_psql('postgres',
	"SELECT key FROM idem.keys WHERE key LIKE 'load %'");
is( join(', ', grep { !$finished{$_} } sort keys %acknowledged),
	'',
	'K2: every acknowledged commit is there after the crash');

# the clients run again with all their keys
my $again = join '', map
{
	my $client = $_;
	map { "SELECT run_once('load $client/$_');\n" }
	  grep { $_ % 2 } 1 .. $keys_per_client
} 1 .. $clients;
$again .= "SELECT run_once('load all/$_');\n"
  foreach grep { $_ % 2 == 0 } 1 .. $keys_per_client;

my %answers;
$answers{$_}++ foreach split /\n/, $node->safe_psql('postgres', $again);

my $survived = keys %finished;
is_deeply(
	\%answers,
	{ finished => $survived, claimed => $all - $survived },
	'K2: on the second attempt what survived is replayed and the rest runs');
is( $node->safe_psql(
		'postgres', q{
		SELECT count(*), count(DISTINCT key) FROM effects
		 WHERE key LIKE 'load %'}),
	"$all|$all",
	'K3: every key has run exactly once in the end');
is($node->safe_psql('postgres', 'SELECT * FROM disagreement'),
	'', 'K1: results and effects agree in the end');

amcheck_ok($node, 'after the crashes');
$node->stop;
log_ok($node, killed => 1);
done_testing();
