# A year of ticks, by idem_tick() in sessions whose clock goes forward in random steps.
#
# T1: each tick of each schedule is one job, and each job one tick, with processes that are
# killed in the middle, servers that are stopped at once, transactions that roll back, two
# sessions at the same time, and clocks that go back (T6).  The jobs are fetched and completed
# meanwhile, so they absorb nothing later.  What the ticks are (T2, T3, T4) is computed
# by test/schedules/ticks.py, which has nothing in common with the code here.
#
# IDEM_SEED repeats a run.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::Local qw(timegm);
use Time::HiRes qw(usleep);

my $seed = $ENV{IDEM_SEED} // int rand 1_000_000_000;
my $python = -x '/usr/bin/python3' ? '/usr/bin/python3' : 'python3';

srand $seed;

my $year = 2025 + int rand 10;
my ($first, $last) = ("$year-01-01T00:00:00.25", "$year-12-31T23:59:59");
my $start = timegm(0, 0, 0, 1, 0, $year);
my $day = 24 * 3600;

note "seed $seed, year $year";

# name, cron or interval in seconds, time zone; the densest one has 24 ticks per day
my @schedules = (
	[ 'day', 'cron', '30 2 * * *', 'Europe/Berlin' ],
	[ 'quarters', 'cron', '*/15 1-3 * * *', 'Europe/Berlin' ],
	[ 'elapsed', 'cron', '0 * * * *', 'America/New_York' ],
	[ 'workdays', 'cron', '5,35 9-17/2 * * mon-fri', 'America/St_Johns' ],
	[ 'half an hour', 'cron', '*/10 2 * * *', 'Australia/Lord_Howe' ],
	[ 'midnight', 'cron', '0 0 * * *', 'America/Havana' ],
	[ 'before midnight', 'cron', '59 23 * * thu,fri', 'Africa/Cairo' ],
	[ 'first', 'cron', '@monthly', 'America/Santiago' ],
	[ 'either', 'cron', '20 2,3,12 13 * fri', 'Pacific/Chatham' ],
	[ 'last days', 'cron', '0 4 29-31 jan-dec/2 *', 'UTC' ],
	[ 'winter first', 'cron', '0,30 1 * * *', 'Europe/Dublin' ],
	[ 'twice', 'cron', '40 * * * sun', 'Asia/Kathmandu' ],
	[ 'interval', 'every', '4050.5', 'UTC' ],
	[ 'days', 'every', '86400', 'UTC' ]);
my $max_backlog = 40 * $day;    # of that one 960 ticks; from 1000 on the oldest would be missed

my $node = new_node(
	'year', conf => q{
autovacuum = off
fsync = off
restart_after_crash = on
});

$node->safe_psql('postgres', 'CREATE TABLE runs (key text)');

my $s;

# A statement that makes now the time of the session, in seconds since the start of the year
sub set_clock
{
	my ($now) = @_;

	return sprintf 'SET idem.clock_offset = %d', $start + $now - time;
}

sub tick
{
	my ($now) = @_;

	return set_clock($now) . '; SELECT idem_tick()';
}

# All jobs run, once each
sub drain
{
	my ($now) = @_;

	$s->query(set_clock($now) . q{;
		WITH f AS (SELECT job_id, token, key FROM idem_fetch('year', 10000, '1 hour')),
			 r AS (INSERT INTO runs SELECT key FROM f),
			 a AS (SELECT coalesce(array_agg(job_id), '{}') AS ids, coalesce(array_agg(token), '{}') AS tokens FROM f)
		SELECT count(*) FROM a, idem_complete_many(a.ids, a.tokens)});
	return;
}

# What happens at a time; true if all that was due then has been enqueued.
my $middle = 0;
my %event = (
	commit => sub {
		my ($now) = @_;

		$s->query(tick($now));
		return 1;
	},
	rollback => sub {
		my ($now) = @_;

		$s->query('BEGIN; ' . tick($now) . '; ROLLBACK');
		return 0;
	},

	# two sessions; the second one skips what the first one has locked
	two => sub {
		my ($now) = @_;
		my $other = session($node);

		$other->query('BEGIN; ' . tick($now));
		$s->query(tick($now));
		$other->query(rand() < 0.5 ? 'COMMIT' : 'ROLLBACK');
		$other->quit;
		return 0;
	},
	back => sub {
		my ($now) = @_;

		$s->query(tick($now - int rand 30 * $day));
		return 0;
	},
	killed => sub {
		my ($now) = @_;

		$s->send(tick($now));
		usleep(rand 60_000);
		crash_backend($node, $s->{pid});
		$middle++ if $s->lost !~ /^\d+$/m;
		$s = session($node);
		return 0;
	},
	stopped => sub {
		my ($now) = @_;

		$s->send(tick($now));
		usleep(rand 60_000);
		$node->stop('immediate');
		$middle++ if $s->lost !~ /^\d+$/m;
		$node->start;
		$s = session($node);
		return 0;
	});
my $crashes = 12;
my @crashes = map { $_ % 3 ? 'killed' : 'stopped' } 1 .. $crashes;

#
# the year
#

$s = session($node);
$s->query(set_clock(-$day));
foreach my $schedule (@schedules)
{
	my ($name, $kind, $text, $zone) = @$schedule;

	$s->query(qq{SELECT idem_schedule('$name', 'year', $kind => '$text', time_zone => '$zone', missed => 'all',
		starts_at => '$first+00', ends_at => '$last+00')});
}

my ($now, $done, $steps, %count) = (0, 0, 0);

while ($now < 366 * $day)
{
	my $is_crash = @crashes && $now > (1 - @crashes / ($crashes + 1)) * 366 * $day;
	my $step = $is_crash ? 15 + rand 5 : rand() < 0.2 ? rand 18 : rand 2;
	my $what = $is_crash ? shift @crashes : (('commit') x 5, 'rollback', 'two', 'back')[ rand 8 ];

	# what an event leaves undone adds to the next step
	if ($now + 2 * ($step + 20) * $day - $done > $max_backlog)
	{
		$event{commit}->($now);
		$done = $now;
	}
	$now += int $step * $day;
	$done = $now if $event{$what}->($now);
	drain($now) if rand() < 0.5;
	$count{$what}++;
	$steps++;
}
note "$steps steps: " . join ', ', map { "$_ $count{$_}" } sort keys %count;
note "$middle crashes in the middle";
$s->query(tick(368 * $day));
drain(368 * $day) foreach 1 .. 3;

#
# the ticks
#

my ($expected, $err) = ('', '');
my $sharedir = $node->config_data('--sharedir');

# the data of the server, if it has its own
local $ENV{PYTHONTZPATH} = "$sharedir/timezone" if -d "$sharedir/timezone";

IPC::Run::run(
	[ $python, "$FindBin::RealBin/../schedules/ticks.py", $first, $last ],
	'<' => \join('', map { join("\t", @$_) . "\n" } @schedules),
	'>' => \$expected,
	'2>' => \$err) or die $err;

my %ticks = map { $_ => 1 } split /\n/, $expected;
my %runs;

$runs{$_}++ foreach split /\n/, $s->query('SELECT key FROM runs');
foreach my $schedule (@schedules)
{
	my ($name) = @$schedule;
	my @ticks = grep { /^\Q$name\E\@/ } keys %ticks;
	my @runs = grep { /^\Q$name\E\@/ } keys %runs;
	my @missing = sort grep { !$runs{$_} } @ticks;
	my @extra = sort grep { !$ticks{$_} } @runs;
	my @again = sort grep { $runs{$_} > 1 } @runs;

	is("@missing | @extra | @again", ' |  | ', "T1: $name: " . @ticks . ' ticks, each of them one job');
}
is(scalar(grep { my $key = $_; !grep { $key =~ /^\Q$_->[0]\E\@/ } @schedules } keys %runs), 0, 'and no other jobs');
is($s->query('SELECT count(*) FROM idem.jobs'), '0', 'all jobs have run');
is($s->query(q{SELECT count(*), sum(missed_ticks), count(next_tick), min(state), max(state) FROM idem.schedule_status}),
	@schedules . '|0|0|ended|ended', 'T4: no tick was missed, and there are no more');
is($s->query('SELECT idem_tick()'), '0', 'T6: by a clock that has gone back nothing is due');

$s->quit;
amcheck_ok($node, 'after a year', 'idem.schedules', 'idem.jobs');
$node->stop;
log_ok($node, killed => $count{killed});
done_testing();
