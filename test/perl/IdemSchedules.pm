
=pod

=head1 NAME

IdemSchedules - schedules and the jobs of their ticks, for the TAP tests of idem

=head1 DESCRIPTION

What the tests compare: the jobs that a schedule has enqueued, and its row.  All functions
work on the node that is passed first.

=cut

package IdemSchedules;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(
  last_tick
  lags
  series_ok
  wait_for_ticks
);

=pod

=head1 FUNCTIONS

=over

=item last_tick($node, $db, $name)

Time of the last tick that has got a job; the epoch if there is none.

=cut

sub last_tick
{
	my ($node, $db, $name) = @_;

	return $node->safe_psql($db,
		"SELECT coalesce(max(last_tick), 'epoch') FROM idem.schedules WHERE name = '$name'");
}

=pod

=item wait_for_ticks($node, $n, [ $db, $name ], ...)

Returns once each of these schedules has $n jobs more.  False if they do not come.

=cut

sub wait_for_ticks
{
	my ($node, $n, @schedules) = @_;
	my @waits;

	foreach my $schedule (@schedules)
	{
		my ($db, $name) = @$schedule;
		my $count = "SELECT count(*) FROM idem.jobs WHERE key LIKE '$name\@%'";
		my $until = $node->safe_psql($db, $count) + $n;

		push @waits, [ $db, "SELECT ($count) >= $until" ];
	}
	foreach my $wait (@waits)
	{
		return 0 unless $node->poll_query_until(@$wait);
	}
	return 1;
}

=pod

=item series_ok($node, $db, $name, $what, absorbed => 0)

Tests, in one snapshot, that the jobs of the schedule, whose ticks are an interval, are one
for each tick from the first one on, with the right keys and times, and that its row goes with
them: last tick, last job, next tick, nothing missed (T1).  None of the jobs may have been removed.
absorbed: there were jobs of these keys before, with times of their own.

=cut

sub series_ok
{
	my ($node, $db, $name, $what, %opt) = @_;
	my $absorbed = $opt{absorbed} // 0;
	my $faults = $node->safe_psql(
		$db, qq{
		SET TimeZone = 'UTC';
		WITH s AS (SELECT *, extract(epoch FROM every) AS step FROM idem.schedules WHERE name = '$name'),
			 k AS (SELECT *, split_part(key, '\@', 2)::timestamptz AS tick FROM idem.jobs WHERE key LIKE '$name\@%'),
			 j AS (SELECT k.*, extract(epoch FROM tick - s.starts_at) / s.step AS n,
						  '$name\@' || to_char(tick, 'YYYY-MM-DD"T"HH24:MI:SS')
						  || CASE WHEN tick <> date_trunc('second', tick) THEN to_char(tick, '.US') ELSE '' END
						  || 'Z' AS right_key
					 FROM s, k)
		SELECT 'tick ' || n || ' has no job'
		  FROM (SELECT generate_series(min(n), max(n)) FROM j EXCEPT SELECT n FROM j) AS t (n)
		 UNION ALL
		SELECT format('tick %s has %s jobs', n, count(*)) FROM j GROUP BY n HAVING count(*) > 1
		 UNION ALL
		SELECT format('key %s at %s', key, run_at) FROM j
		 WHERE key <> right_key OR n <> floor(n) OR (run_at <> tick AND $absorbed = 0)
		 UNION ALL
		SELECT format('%s jobs until %s, last %s; %s', (SELECT count(*) FROM j), max, max_id, s)
		  FROM s, (SELECT max(tick), (array_agg(job_id ORDER BY tick DESC))[1] AS max_id FROM j) AS m
		 WHERE max IS DISTINCT FROM last_tick OR max_id IS DISTINCT FROM last_job
			OR next_tick <> max + every OR missed_ticks <> 0});

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is($faults, '', "T1: $what");
	return;
}

=pod

=item lags($node, $db, $name, since => '-infinity')

How long after their ticks the jobs were enqueued, in seconds: median, third quartile and maximum.

=cut

sub lags
{
	my ($node, $db, $name, %opt) = @_;
	my $since = $opt{since} // '-infinity';

	return split /\|/,
	  $node->safe_psql(
		$db, qq{
		SELECT round((percentile_cont(0.5) WITHIN GROUP (ORDER BY lag))::numeric, 3),
			   round((percentile_cont(0.75) WITHIN GROUP (ORDER BY lag))::numeric, 3), round(max(lag), 3)
		  FROM (SELECT extract(epoch FROM enqueued_at - run_at) AS lag
				  FROM idem.jobs WHERE key LIKE '$name\@%' AND run_at > '$since') AS l});
}

=pod

=back

=cut

1;
