# A worker that has a lease dies at any step: the next worker takes over with a
# higher token, the first worker is refused everywhere if it returns, and the work
# is finished exactly once.
#
# Workers lease a key, call the outside, store a checkpoint, and finish in the
# transaction that writes the business rows.  They die at each step of that, by
# kill -9 of the client, of the server process, and of the postmaster; and at
# the end many of them die at random.
#
# The outside system is a file.  It remembers the highest token of each key and
# refuses lower ones, as an outside system does that gets the token.  The test does
# not wait for a lease to expire: the clock of the next worker is ahead.

use strict;
use warnings FATAL => 'all';

use Fcntl qw(:flock);
use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use List::Util qw(max shuffle);
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('lease_crash', conf => "restart_after_crash = on\n");

$node->safe_psql(
	'postgres', q{
	CREATE TABLE business (
		id bigint GENERATED ALWAYS AS IDENTITY,
		key text NOT NULL,
		token bigint NOT NULL);

	-- keys whose lease and business rows do not agree: should be none
	CREATE VIEW disagreement AS
	SELECT coalesce(k.key, b.key) AS key, k.token, b.token AS business
	  FROM (SELECT * FROM idem.keys WHERE finished_at IS NOT NULL) AS k
	  FULL JOIN business AS b USING (key, token)
	 WHERE k.key IS NULL OR b.key IS NULL;
});

#
# the outside
#

my $sink = PostgreSQL::Test::Utils::tempdir() . '/sink';

sub sink_lines
{
	return -e $sink ? map { [ split /\t/ ] } split /\n/, slurp_file($sink) : ();
}

# True if the outside does what it is asked to.  Safe for many processes, and
# for the death of any of them.
sub sink_call
{
	my ($key, $token, $worker) = @_;

	open my $file, '>>', $sink or die "could not open $sink: $!";
	flock $file, LOCK_EX or die "could not lock $sink: $!";

	my $highest = max(
		0,
		map { $_->[1] }
		  grep { $_->[0] eq $key && $_->[3] eq 'accepted' } sink_lines());
	my $verdict = $token >= $highest ? 'accepted' : 'refused';
	my $line = join("\t", $key, $token, $worker, $verdict) . "\n";

	syswrite($file, $line) == length($line) or die "could not write $sink: $!";
	close $file;
	return $verdict eq 'accepted';
}

#
# the steps of a worker, each of which may be its last
#

my @steps = (
	'before the commit of the lease',
	'after the commit of the lease',
	'after the outside call',
	'after the checkpoint',
	'inside the finish transaction',
	'after the commit of the finish');
my ($uncommitted, undef, $called, $checkpointed, $finishing, $finished) =
  0 .. $#steps;

# works on the key up to that step; returns its token
sub work_until
{
	my ($s, $key, $step) = @_;

	$s->query('BEGIN') if $step == $uncommitted;
	my ($status, $token, $attempt) = split /\|/,
	  $s->query(
		"SELECT status, token, attempt FROM idem_lease('$key', '1 min', worker => 'first')"
	  );
	is("$status $attempt", 'claimed 1', "L1: a worker has $key");

	sink_call($key, $token, 'first') || die 'the outside has refused'
	  if $step >= $called;
	$s->query(qq{SELECT idem_checkpoint('$key', $token, '{"called": true}')})
	  if $step >= $checkpointed;
	$s->query(
		qq{BEGIN;
		INSERT INTO business (key, token) VALUES ('$key', $token);
		SELECT idem_finish('$key', '"first"', token => $token)})
	  if $step >= $finishing;
	$s->query('COMMIT') if $step == $finished;
	return $token;
}

# the answers of all functions that take a token to this token
sub states_of_token
{
	my ($s, $key, $token) = @_;

	return join ' ', map { $s->sqlstate("SELECT $_") } (
		qq{idem_finish('$key', '"first"', token => $token)},
		qq{idem_finish('$key', '"zombie"', token => $token)},
		"idem_renew('$key', $token, '1 hour')",
		qq{idem_checkpoint('$key', $token, '"zombie"')},
		"idem_fence('$key', $token)",
		"idem_release('$key', $token)");
}

sub is_refused
{
	my ($zombie, $key, $token, $when) = @_;
	my $before = row_of($key);

	is( states_of_token($zombie, $key, $token),
		'ID003 ID003 ID003 ID003 ID003 ID003',
		"L3: the old token of $key is refused $when");
	is(row_of($key), $before, "L3: and changes nothing of $key $when");
	return;
}

# the next worker on a key whose worker has died
sub take_over
{
	my ($next, $zombie, $key, $step, $old) = @_;
	my $lease = 'SELECT status, attempt, checkpoint, coalesce(token, 0) '
	  . "FROM idem_lease('$key', '1 min', worker => 'second')";

	if ($step == $uncommitted)
	{
		is(row_of($key), '', "L1: $key: a lease that was not committed is gone");
		is_refused($zombie, $key, $old, 'when it is gone');
	}
	else
	{
		is( $next->query($lease),
			'busy|1||0',
			"L1: $key: a committed lease is there and not taken over");
		$next->query('SET idem.clock_offset = 3600');
	}

	my ($status, $attempt, $checkpoint, $token) = split /\|/,
	  $next->query($lease);
	$next->query('RESET idem.clock_offset');
	is( "$status $attempt $checkpoint",
		'claimed '
		  . ($step == $uncommitted ? 1 : 2) . ' '
		  . ($step >= $checkpointed ? '{"called": true}' : ''),
		"L1, L5: $key: the next worker has it, and the last checkpoint");
	is( $next->query("SELECT status, token, checkpoint FROM idem_get('$key')"),
		"live|$token|$checkpoint",
		"L5: $key: which stays for the one after it");
	cmp_ok($token, '>', $old, "L2: $key: the token has grown");

	ok(sink_call($key, $token, 'second'),
		"L2: $key: the outside accepts the next worker");
	ok(!sink_call($key, $old, 'first'),
		"L2: $key: and then refuses the one that was thought dead");
	is_refused($zombie, $key, $old, 'after the takeover');

	is( $node->safe_psql(
			'postgres', "SELECT count(*) FROM business WHERE key = '$key'"),
		'0',
		"K1: $key: no business rows without a committed finish");
	$next->query(
		qq{BEGIN; SELECT idem_fence('$key', $token);
		INSERT INTO business (key, token) VALUES ('$key', $token);
		SELECT idem_finish('$key', '"second"', token => $token); COMMIT});
	is_refused($zombie, $key, $old, 'after the finish');
	ok(!sink_call($key, $old, 'first'),
		"L2: $key: the outside keeps refusing the old token");
	return;
}

# the next worker on a key that was finished before its worker died
sub find_finished
{
	my ($next, $zombie, $key, $token) = @_;
	my $before = row_of($key);

	is( $next->query(
			qq{SET idem.clock_offset = 3600;
			SELECT status, claimed, result, token IS NULL
			  FROM idem_lease('$key', '1 min', worker => 'second');
			RESET idem.clock_offset}),
		'finished|f|"first"|t',
		"L1: $key: the next worker gets the result, and no token");
	is( states_of_token($zombie, $key, $token),
		'00000 ID004 ID004 ID004 ID004 ID004',
		"L3: $key: the finish can be repeated, and nothing else be done");
	is(row_of($key), $before, "L3: $key: which changes nothing");
	return;
}

sub check_death
{
	my ($how, $die) = @_;
	my @key = map { "$how $_" } @steps;
	my @worker = map { session($node) } @steps;
	my @token =
	  map { work_until($worker[$_], $key[$_], $_) } 0 .. $#steps;

	$die->(@worker);

	my ($next, $zombie) = (session($node), session($node));

	take_over($next, $zombie, $key[$_], $_, $token[$_])
	  foreach $uncommitted .. $finishing;
	find_finished($next, $zombie, $key[$finished], $token[$finished]);
	$_->quit foreach $next, $zombie;

	is( $node->safe_psql(
			'postgres', q{
			SELECT string_agg(n::text, ' ')
			  FROM (SELECT count(*) AS n FROM business GROUP BY key) AS b}),
		join(' ', (1) x $node->safe_psql('postgres',
				'SELECT count(*) FROM idem.keys')),
		"L3: every key has its business rows exactly once ($how)");
	is($node->safe_psql('postgres', 'SELECT * FROM disagreement'),
		'', "L3: and those of the one accepted finish ($how)");
	return;
}

check_death(
	'client killed',
	sub {
		$_->kill foreach @_;
		wait_until_gone($node, $_) foreach @_;
	});

check_death(
	'backend killed',
	sub {
		crash_backend($node, $_[$finishing]{pid});
		$_->lost foreach @_;
	});

check_death(
	'postmaster killed',
	sub {
		crash_postmaster($node);
		$_->lost foreach @_;
		$node->start;
	});

# A worker that seemed dead and returns before another worker takes over.
my $late = session($node);
my $late_token = work_until($late, 'late', $called);

is( $late->query(
		qq{SET idem.clock_offset = 3600;
		SELECT status FROM idem_get('late');
		BEGIN;
		SELECT idem_fence('late', $late_token);
		INSERT INTO business (key, token) VALUES ('late', $late_token);
		SELECT idem_finish('late', '"late"', token => $late_token);
		COMMIT;
		SELECT status, result FROM idem_get('late')}),
	qq{expired\nt\nt\nfinished|"late"},
	'L3: the last token finishes after the lease has expired');
$late->quit;

#
# Many workers that die at random.
#
# Each worker is a process with its own psql.  At every step it may kill itself and
# its psql, or lose its connection; and the test kills some workers at any moment.
# Leases are short, so keys are also taken over from workers that are alive.
#

my $seed = 20250314;
my $workers = 8;
my $keys = 40;
my $max_deaths = 60;    # that workers decide on
my $max_kills = 20;     # from outside
my $failures = "$sink.failures";
my $finishes = "$sink.finishes";

# Leases a key and does its work.  $risk is called between the steps.
sub work_on
{
	my ($s, $key, $name, $risk) = @_;
	my ($status, $token) = split /\|/,
	  $s->query(
		"SELECT status, token FROM idem_lease('$key', '100 ms', wait => '0')");

	return $status if $status ne 'claimed';
	$risk->();
	return 'refused outside' unless sink_call($key, $token, $name);
	$risk->();
	foreach my $sql (
		qq{SELECT idem_checkpoint('$key', $token, '"called"')},
		'BEGIN',
		"INSERT INTO business (key, token) VALUES ('$key', $token)",
		qq{SELECT idem_finish('$key', '"$name"', token => $token)})
	{
		my $state = $s->sqlstate($sql);

		if ($state eq 'ID003')
		{
			$s->query('ROLLBACK');
			return 'taken over';
		}
		die "$sql gives $state\n" if $state ne '00000';
		$risk->();
	}
	$s->query('COMMIT');
	append_to_file($finishes, "$key\t$token\n");
	$risk->();
	return 'finished';
}

# The life of a worker; never returns.
sub run_worker
{
	my ($name, $number) = @_;

	setpgrp;
	srand($seed + $number);
	Test::More->builder->output('/dev/null');
	Test::More->builder->failure_output('/dev/null');

	my $end = eval {
		my $s = session($node);
		my $risk = sub {
			return if $number > $max_deaths || rand() >= 0.06;
			kill 'KILL', -getpgrp() if rand() < 0.5;
			$s->query('SELECT pg_terminate_backend(pg_backend_pid())');
		};
		my @open = shuffle(map { "many $_" } 1 .. $keys);

		while (@open)
		{
			@open = grep { work_on($s, $_, $name, $risk) ne 'finished' } @open;
		}
		$s->quit;
		1;
	};

	POSIX::_exit(0) if $end;
	POSIX::_exit(2) if $@ =~ /psql has ended/;
	append_to_file($failures, "worker $name: $@");
	POSIX::_exit(1);
}

my %name_of;    # by process id
my $incarnation = 0;

sub start_worker
{
	my ($name) = @_;
	my $number = ++$incarnation;
	my $pid = fork // die "could not fork: $!";

	run_worker("$name/$number", $number) if $pid == 0;
	setpgrp $pid, $pid;
	$name_of{$pid} = $name;
	return;
}

# no worker outlives the test, whatever happens
END
{
	my $status = $?;

	kill 'KILL', map { -$_ } keys %name_of;
	waitpid $_, 0 foreach keys %name_of;
	$? = $status;
}

my $kills = 0;
my %ends;

# One kill from outside per worker that ends, so that they are spread over the run.
local $SIG{ALRM} = sub { die 'the workers do not come to an end' };
alarm(2 * $PostgreSQL::Test::Utils::timeout_default);

srand($seed);
start_worker($_) foreach 1 .. $workers;
while (%name_of)
{
	if ($kills < $max_kills)
	{
		my @pids = sort keys %name_of;

		if ($kills++ % 2)
		{
			kill 'KILL', -$pids[ rand @pids ];
		}
		else
		{
			$node->safe_psql(
				'postgres', q{
				SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				 WHERE application_name = 'psql' AND pid <> pg_backend_pid()
				 ORDER BY pid LIMIT 1});
		}
	}

	my $pid = waitpid(-1, 0);
	my $end = $?;
	my $name = delete $name_of{$pid};

	next unless defined $name;
	$ends{$end}++;
	kill 'KILL', -$pid;    # its psql, if that is left
	start_worker($name) if $end & 127 || $end >> 8 == 2;
}
alarm(0);
note join ', ', map { "$ends{$_} workers ended with status $_" } sort keys %ends;
note "$incarnation workers, $kills killed from outside";

is(-e $failures ? slurp_file($failures) : '',
	'', 'no worker has met an unexpected error');
cmp_ok($ends{9} // 0, '>', 0, 'some clients were killed');
cmp_ok($ends{ 2 << 8 } // 0, '>', 0, 'some connections were terminated');
cmp_ok($incarnation, '>', $workers, 'dead workers were replaced');

is( $node->safe_psql(
		'postgres', q{
		SELECT status, count(*) FROM idem.key_status
		 WHERE key LIKE 'many %' GROUP BY status}),
	"finished|$keys",
	'L3: every key is finished');
is( $node->safe_psql(
		'postgres', q{
		SELECT count(*), count(DISTINCT key) FROM business
		 WHERE key LIKE 'many %'}),
	"$keys|$keys",
	'L3: every key has its business rows exactly once');
is($node->safe_psql('postgres', 'SELECT * FROM disagreement'),
	'', 'L3: and those of the finish that was accepted');

my %acknowledged;
$acknowledged{ (split /\t/)[0] }++ foreach split /\n/, slurp_file($finishes);
is( join(', ', grep { $acknowledged{$_} > 1 } sort keys %acknowledged),
	'', 'L3: no two workers had a finish of the same key accepted');

#
# what the outside has seen of all that
#

my (%highest, %worker_of, @lower, @shared);

foreach my $line (sink_lines())
{
	my ($key, $token, $worker, $verdict) = @$line;

	push @shared, "$key $token"
	  if ($worker_of{"$key $token"} //= $worker) ne $worker;
	next if $verdict ne 'accepted';
	push @lower, "$key $token" if $token < ($highest{$key} // 0);
	$highest{$key} = $token;
}
is(join(', ', @lower), '', 'L2: the outside has never accepted a lower token');
is(join(', ', @shared), '', 'L2: no two workers had the same token');

my %finishing_token = map { split /\|/ } split /\n/,
  $node->safe_psql('postgres', 'SELECT key, token FROM idem.keys');
is( join(', ', grep { $highest{$_} != $finishing_token{$_} } sort keys %highest),
	'', 'L2: the highest token of each key is the one that has finished it');

amcheck_ok($node, 'after the crashes');
$node->stop;
log_ok($node, killed => 1);
done_testing();
