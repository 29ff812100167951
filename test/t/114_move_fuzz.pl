# M8: a load on two databases, while slots move back and forth.  idem_move is killed at random
# moments, run twice at the same time, called with wrong arguments and aborted.  A ledger: nothing
# runs twice, nothing is lost.  IDEM_SEED is the seed, IDEM_MOVE_ROUNDS the number of rounds.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemMove qw(start_move);
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $seed = $ENV{IDEM_SEED} // int(rand(1000000));
my $rounds = $ENV{IDEM_MOVE_ROUNDS} // 12;

note "IDEM_SEED=$seed IDEM_MOVE_ROUNDS=$rounds";
srand($seed);

my $conf = q{
shared_preload_libraries = 'idem'
max_connections = 60
deadlock_timeout = 100ms
};
my @nodes = map { new_node($_, conf => $conf) } 'a', 'b';

foreach my $i (0, 1)
{
	run(q{CREATE TABLE orders (order_key text, note text); CREATE TABLE ran (kind text, name text)}, node => $nodes[$i]);
	run(sprintf(q{SELECT idem_shard_set('%s', number => %d)}, $i == 0 ? '{[0,1024)}' : '{}', $i), node => $nodes[$i]);
}

my @connstr = map { $_->connstr('postgres') } @nodes;
my ($load_in, $load_out, $load_err) = ('', '', '');
my $load;
{
	local $ENV{PYTHONDONTWRITEBYTECODE} = 1;
	$load = IPC::Run::start(
		[ -x '/usr/bin/python3' ? '/usr/bin/python3' : 'python3', "$FindBin::RealBin/../scale/move_load.py", $seed, 4, 3000 * $rounds, @connstr ],
		'<', \$load_in, '>', \$load_out, '2>', \$load_err,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default * (1 + $rounds / 10)));
}

# Starts idem_move; the harness has its number, and what it has printed so far.
sub start
{
	my ($from, $slots, @options) = @_;
	my $printed = '';

	return { printed => \$printed,
		harness => start_move(\$printed, $nodes[$from], $nodes[ 1 - $from ], $slots,
			'--table' => 'public.orders:pg_catalog.idem_slot(order_key)', '--batch' => 512, @options) };
}

# Its exit status; what a program says that ends in the middle is expected.
sub finish
{
	my ($run) = @_;

	$run->{harness}->finish;
	return $run->{harness}->full_result(0) >> 8;
}

my ($kills, $stops, $twice, $aborts) = (0, 0, 0, 0);
my @bad;
my @steps = (
	# kill -9 after a random time; a move of a batch takes a few tenths of a second
	sub {
		my $run = start(@_);

		usleep(rand(700_000));
		$run->{harness}->pump_nb;
		$kills++ if $run->{harness}->pumpable;
		$run->{harness}->kill_kill(grace => 0);
	},
	# SIGINT or SIGTERM
	sub {
		my $run = start(@_);

		usleep(rand(700_000));
		$run->{harness}->signal(rand() < 0.5 ? 'INT' : 'TERM');
		my $status = finish($run);
		$stops++ if $status == 1;
		push @bad, ${ $run->{printed} } if $status > 1 || ($status == 1 && ${ $run->{printed} } !~ /stopped by signal/);
	},
	# two at once: neither is a false alarm
	sub {
		my @runs = map { start(@_) } 1, 2;
		my @status = map { finish($_) } @runs;

		$twice++ if "@status" =~ /1/;
		foreach my $i (0, 1)
		{
			push @bad, ${ $runs[$i]{printed} } if $status[$i] && ${ $runs[$i]{printed} } !~ /another idem_move is at work/;
		}
	},
	# stop at a step, and take back what has not arrived
	sub {
		my $run = start(@_, '--stop-after' => (qw(give take switch))[ rand 3 ]);

		finish($run);
		finish(start(@_, '--abort'));
		$aborts++;
	},
	# the wrong way round, wrong slots, a check
	sub {
		my ($from, @rest) = @_;

		finish(start(1 - $from, @rest, '--check'));
		finish(start($from, '{[0,5000)}', '--check', '--schedules'));
	},
	# a move that is not disturbed
	sub {
		my $run = start(@_);

		push @bad, ${ $run->{printed} } if finish($run) != 0;
	});

foreach my $round (1 .. $rounds)
{
	my $from = $round % 2 ? 0 : 1;
	my $low = int rand 900;
	my $slots = sprintf '{[%d,%d)}', $low, $low + 1 + int rand(1024 - $low);

	foreach (1 .. 1 + int rand 3)
	{
		my $step = $steps[ rand @steps ];

		# the direction of a move that has stopped is not changed: first it is finished
		$step->($from, $slots);
	}
	# slots that the source does not have are refused, so all that it has move back and forth
	my $held = run(qq{SELECT (slots + COALESCE(given, '{}')) * '$slots' FROM idem.shard}, node => $nodes[$from]);
	my $run = start($from, $held eq '{}' ? $slots : $held);
	my $status = finish($run);

	push @bad, "round $round, $slots: ${ $run->{printed} }" if $status != 0;
	is(join('|', map { run(q{SELECT given IS NULL AND taken IS NULL FROM idem.shard}, node => $_) } @nodes), 't|t', "round $round: $slots have moved from $from")
	  or diag(${ $run->{printed} });
	$load->pump_nb;
}
is(join("\n", @bad), '', 'no run has failed for another reason than it should');
note "$kills killed, $stops stopped by a signal, $twice times two at once, $aborts aborted";

$load_in .= "stop\n";
$load->finish;
is($load->full_result(0), 0, 'the load comes to its end');
is($load_err, '', 'without an error of its own');
is( run(q{SELECT slots FROM idem.shard}, node => $nodes[0]) eq run(q{SELECT '{[0,1024)}'::int4multirange - slots FROM idem.shard}, node => $nodes[1]),
	1, 'M8: each slot is in one of the two');

# The ledger

my %ran;
$ran{$_}++ foreach map { split /\n/, run(q{SELECT kind || ' ' || name FROM ran}, node => $_) } @nodes;
my %acknowledged;
$acknowledged{"$1 $2"}++ while $load_out =~ /^(key|lease|job) (\S+)/mg;

note scalar(keys %acknowledged) . ' acknowledged';
cmp_ok(scalar(keys %acknowledged), '>', 100, 'the load has done something');
is(join(' ', grep { $ran{$_} > 1 } sort keys %ran), '', 'nothing has run twice');
is(join(' ', grep { !$ran{$_} } sort keys %acknowledged), '', 'nothing that was acknowledged is lost');
is(join("\n", $load_out =~ /^unexpected .*$/mg), '', 'no other error');
my $keys = grep { /^key / } keys %ran;
my ($orders, $different) = (0, 0);
foreach my $node (@nodes)
{
	my ($rows, $distinct, $strange) = split /\|/, run(q{SELECT count(*), count(DISTINCT order_key), count(*) FILTER (WHERE NOT s.slots @> idem_slot(order_key)) FROM orders, idem.shard AS s}, node => $node);

	$orders += $rows;
	$different += $rows - $distinct + $strange;
}
is("$orders $different", "$keys 0", 'rows of the user are where their keys are');

log_ok($_) foreach @nodes;
done_testing();
