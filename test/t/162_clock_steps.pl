# A4, A7, T6: the clock of the server is set while sessions wait and schedules tick.
#
# The server runs with a library of this test, whose gettimeofday() adds what a file says.  So
# a write to this file sets the clock of all processes, and nothing else does: how long
# the server sleeps does not change.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir();

append_to_file("$dir/clock.c", q{
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>

int gettimeofday(struct timeval *now, void *zone)
{
	static int (*real)(struct timeval *, void *);
	static volatile long *offset;
	int result;

	if (!real)
	{
		int file = open(getenv("IDEM_TEST_CLOCK"), O_RDONLY);

		offset = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
		real = dlsym(RTLD_NEXT, "gettimeofday");
	}
	result = real(now, zone);
	now->tv_sec += *offset;
	return result;
}
});
plan skip_all => 'the library of the clock cannot be built'
  if $^O ne 'linux' || PostgreSQL::Test::Utils::system_log('cc', '-shared', '-fPIC', '-o', "$dir/clock.so", "$dir/clock.c", '-ldl') != 0;

# Sets the clock so many seconds after the real one
sub set_clock
{
	my ($seconds) = @_;

	open my $file, '+<', "$dir/clock" or die;
	syswrite $file, pack('l!', $seconds);
	close $file;
	return;
}

append_to_file("$dir/clock", pack('l!', 0));

my $node = new_node(
	'clock', extension => 0, conf => q{
shared_preload_libraries = 'idem'
autovacuum = off
idem.cleanup = off
idem.cleanup_naptime = 1d
idem.look_after = 1h
});
my ($hour, $day) = (3600, 24 * 3600);

$node->stop;
{
	local $ENV{LD_PRELOAD} = "$dir/clock.so";
	local $ENV{IDEM_TEST_CLOCK} = "$dir/clock";

	$node->start;
}
set_clock($day);
is(run(q{SELECT clock_timestamp() - to_timestamp(} . time . q{) BETWEEN '23 h' AND '25 h'}), 't', 'the clock is set');
set_clock(0);
run('CREATE EXTENSION idem');

#
# Sessions that wait
#

my $session = session($node);
my $call = q{CALL idem_wait('q', '1 h')};

sub asleep
{
	wait_until_asleep($node, 1, "pid = $session->{pid}");
	return;
}

foreach my $step (400 * $day, -400 * $day)
{
	my $later = run(q{SELECT job_id FROM idem_enqueue('q', delay => '1000 days')});

	$session->send($call);
	asleep();
	set_clock($step);
	# woken for nothing, it looks at the clock
	run("BEGIN; SELECT idem_cancel($later); ROLLBACK");
	asleep();
	run(qq{SELECT idem_cancel($later), idem_enqueue('q')});
	is($session->receive, 't', "A7: the clock was set by $step seconds: neither the timeout is over nor a wake-up lost");
	is($session->query(q{CALL idem_wait('r', '100 ms')}), 'f', 'A7: nor does a timeout last longer');
	set_clock(0);
	run('TRUNCATE idem.jobs');
}

$session->query(q{SET idem.look_after = '100 ms'});
run(q{SELECT idem_enqueue('q', delay => '1 h')});
$session->send($call);
asleep();
set_clock(2 * $hour);
is($session->receive, 't', 'A4: the clock was set forward: a job is due earlier');
run('TRUNCATE idem.jobs');
$session->quit;
set_clock(0);

#
# Schedules: the launcher sleeps for a day, but for ticks
#

sub wait_for_sleep
{
	$node->poll_query_until('postgres',
		q{SELECT state = 'sleeping' AND worker_pid IS NULL AND runs > 0 FROM idem.worker_status})
	  or die 'the launcher does not come to rest';
	return;
}

sub ticked
{
	my ($name) = @_;

	return run("SELECT count(*) FROM idem.jobs WHERE key LIKE '$name\@%'");
}

# A schedule that ticks now, so the worker comes
sub visit
{
	my ($name) = @_;

	run("SELECT idem_schedule('$name', 'q', every => '1000 days', starts_at => clock_timestamp() + interval '0.2 s')");
	$node->poll_query_until('postgres', "SELECT count(*) = 1 FROM idem.jobs WHERE key LIKE '$name\@%'")
	  or die 'the worker does not come';
	wait_for_sleep();
	return;
}

wait_for_sleep();
run(q{SELECT idem_schedule('daily', 'q', every => '1 day', starts_at => clock_timestamp() + interval '2 h')});
visit('before');
is(ticked('daily'), 0, 'T6: a tick is not due yet');
set_clock(3 * $hour);
ok($node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM idem.jobs WHERE key LIKE 'daily@%'}),
	'T6: the clock was set forward: the tick comes');
wait_for_sleep();
set_clock(0);
visit('back');
set_clock(3 * $hour);
visit('forward');
is(ticked('daily'), 1, 'T6: the clock was set back and forward again: no tick comes twice');
set_clock($day + 3 * $hour);
ok($node->poll_query_until('postgres', q{SELECT count(*) = 2 FROM idem.jobs WHERE key LIKE 'daily@%'}),
	'T6: and the next one comes');

$node->stop;
log_ok($node);
done_testing();
