
=pod

=head1 NAME

IdemFailover - failover between two servers, for the TAP tests of idem

=head1 DESCRIPTION

Losing the primary with or without its last commits, the way back with pg_rewind, and what the
write-ahead log says about both: which commits a server had, and where a new timeline has left the
old one.

=cut

package IdemFailover;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Time::HiRes qw(usleep);

our @EXPORT = qw(
  commits_of
  follow
  forks_of
  freeze_walsenders
  kill_server
  stop_receiving
  timeline_of
);

=pod

=head1 FUNCTIONS

=over

=item stop_receiving($standby)

Returns once the standby receives no more WAL; it stays a standby.

=cut

sub stop_receiving
{
	my ($standby) = @_;

	$standby->append_conf('postgresql.conf', "primary_conninfo = ''");
	$standby->reload;
	$standby->poll_query_until('postgres', 'SELECT count(*) = 0 FROM pg_stat_wal_receiver')
	  or die 'the standby does not stop to receive';
	return;
}

=pod

=item freeze_walsenders($primary)

SIGSTOP: from now on the primary sends no WAL, and nobody notices.

=cut

sub freeze_walsenders
{
	my ($primary) = @_;
	my @pids = split /\n/, $primary->safe_psql('postgres', 'SELECT pid FROM pg_stat_replication');

	kill 'STOP', @pids;
	foreach my $pid (@pids)
	{
		wait_for_process($pid, sub { $_[0] eq 'T' }, 'does not stop');
	}
	return;
}

=pod

=item kill_server($node)

The end of a machine: kill -9 of the postmaster and all its processes, which are stopped first so
that none of them outlives another and sees it end.  The node can be rewound or started again.

=cut

sub kill_server
{
	my ($node) = @_;
	my $pid_file = $node->data_dir . '/postmaster.pid';
	my ($postmaster) = split /\n/, slurp_file($pid_file);

	kill 'STOP', $postmaster;
	wait_for_process($postmaster, sub { $_[0] eq 'T' }, 'does not stop');

	my @pids = children_of($postmaster);

	kill 'STOP', @pids;
	wait_for_process($_, sub { $_[0] =~ /^[TZ]?$/ }, 'does not stop') foreach @pids;
	$node->kill9;
	kill 'KILL', @pids;
	wait_for_process($_, sub { $_[0] =~ /^Z?$/ }, 'does not end') foreach $postmaster, @pids;
	unlink $pid_file, sprintf('%s/.s.PGSQL.%d.lock', $node->host, $node->port);
	return;
}

# State and parent of a process; empty if there is none.
sub process
{
	my ($pid) = @_;

	open my $stat, '<', "/proc/$pid/stat" or return ('', 0);
	my $line = <$stat> // '';
	close $stat;
	return $line =~ /\) (\w) (\d+) / ? ($1, $2) : ('', 0);
}

sub wait_for_process
{
	my ($pid, $reached, $problem) = @_;
	my $attempts = 100 * $PostgreSQL::Test::Utils::timeout_default;

	until ($reached->((process($pid))[0]))
	{
		die "process $pid $problem" if $attempts-- <= 0;
		usleep(10_000);
	}
	return;
}

sub children_of
{
	my ($parent) = @_;

	return grep { (process($_))[1] == $parent } map { m{/(\d+)$} } glob '/proc/[0-9]*';
}

=pod

=item follow($old, $new)

Makes $old, a primary that is stopped or was killed, a standby of $new, which has diverged from it.

=cut

sub follow
{
	my ($old, $new) = @_;
	my $conf = $old->data_dir . '/postgresql.conf';
	my $settings = slurp_file($conf);

	$new->safe_psql('postgres', 'CHECKPOINT');
	PostgreSQL::Test::Utils::run_log(
		[
			$old->installed_command('pg_rewind'), '--no-sync',
			'--target-pgdata' => $old->data_dir,
			'--source-server' => $new->connstr('postgres')
		]) or die 'could not rewind';

	# that has taken the settings of the other server, too
	unlink $conf;
	append_to_file($conf, $settings);
	$old->enable_streaming($new);
	$old->start;
	return;
}

=pod

=item timeline_of($primary)

Its timeline, as in names of WAL files: C<0000000A>.

=cut

sub timeline_of
{
	my ($primary) = @_;

	return $primary->safe_psql('postgres',
		'SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)');
}

=pod

=item commits_of($node, $timeline, $from)

The commits that a server which is not running has in its WAL on this timeline, from the LSN $from
on: lines of timeline, transaction id and LSN.

=cut

sub commits_of
{
	my ($node, $timeline, $from) = @_;
	my ($out, $err) = ('', '');

	# Its status is an error, because no record follows the last one.
	IPC::Run::run(
		[
			$node->installed_command('pg_waldump'),
			'--rmgr' => 'Transaction',
			'--path' => $node->data_dir . '/pg_wal',
			'--timeline' => hex $timeline,
			'--start' => $from
		],
		'>' => \$out,
		'2>' => \$err);

	return join '', map { /tx: +(\d+), lsn: ([0-9A-F\/]+), .*desc: COMMIT / ? "$timeline $1 $2\n" : () }
	  split /\n/, $out;
}

=pod

=item forks_of($primary)

Where its history has left the earlier timelines: lines of timeline and LSN.

=cut

sub forks_of
{
	my ($primary) = @_;
	my $file = $primary->data_dir . '/pg_wal/' . timeline_of($primary) . '.history';

	return '' unless -e $file;
	return join '', map { /^(\d+)\t(\S+)/ ? sprintf("%08X %s\n", $1, $2) : () }
	  split /\n/, slurp_file($file);
}

=pod

=back

=cut

1;
