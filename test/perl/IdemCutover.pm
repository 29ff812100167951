
=pod

=head1 NAME

IdemCutover - clients that move from one server to another, with a ledger

=head1 DESCRIPTION

For the tests of replication.md: two servers, of which the second takes over some or all of
the work of the first.  The clients know nothing of that.  A client that gets 25006 or ID006, or
loses its connection, tries the same again on the other server, a moment later, and so on.  Each
client ends when it has done enough on the second server.

=over

=item cutover_nodes()

Two servers, a publisher and a subscriber; IDEM_SUBSCRIBER is the installation of the second one.

=item idem_cutover($publisher, $subscriber, @arguments)

Runs the program for subscription sub; returns its exit status and what it printed.

=cut

package IdemCutover;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use POSIX ();
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(cutover_command cutover_nodes idem_cutover);

sub cutover_nodes
{
	my $conf = q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
wal_retrieve_retry_interval = 100ms
max_connections = 40
};

	return (
		new_node('publisher', init => { allows_streaming => 'logical' }, conf => $conf),
		new_node('subscriber', install => $ENV{IDEM_SUBSCRIBER}, conf => $conf));
}

sub cutover_command
{
	my ($publisher, $subscriber, @arguments) = @_;

	return (
		$subscriber->config_data('--bindir') . '/idem_cutover',
		'--publisher' => $publisher->connstr('postgres'),
		'--subscriber' => $subscriber->connstr('postgres'),
		'--subscription' => 'sub',
		@arguments);
}

sub idem_cutover
{
	my ($out, $err) = ('', '');

	IPC::Run::run([ cutover_command(@_) ], '>', \$out, '2>', \$err);
	my $status = $? >> 8;

	note "exit status $status\n$out$err";
	return ($status, $out, $err);
}

=pod

=item new(servers => [$old, $new], enough => 30, split => 0)

With split, the new server takes some of the keys, and both work at the end.

=cut

sub new
{
	my ($class, %opt) = @_;

	return bless { enough => 30, split => 0, dir => PostgreSQL::Test::Utils::tempdir(), pid_of => {}, %opt }, $class;
}

=pod

=item tables()

SQL for the tables of the ledger: the work of keys, changes that jobs are for, and the
work of jobs; and the role app, which uses them.  slot is that of the key of the change.

=cut

sub tables
{
	return q{
	CREATE TABLE runs (key text, server int, PRIMARY KEY (key, server));
	CREATE TABLE changes (slot int, key text, n int, PRIMARY KEY (slot, key, n));
	CREATE TABLE seen (job_id bigint, key text, n int, server int, PRIMARY KEY (job_id, server));
	SELECT idem_grant('app', 'app');
	GRANT SELECT, INSERT ON runs, changes, seen TO app;};
}

# One piece of work, until it has succeeded somewhere; returns where.
sub persist
{
	my ($self, $client, $work) = @_;

	# leave some of the machine to the servers and the program
	usleep(5_000);
	for (;;)
	{
		my $server = $client->{server};

		return $server if eval {
			$client->{session} //= session($self->{servers}[$server], user => 'app');
			$work->($client->{session}, $server);
			1;
		};
		die $@ unless $@ =~ /\b(25006|57P01|ID006)\b|psql has ended|connection/;
		$client->{session}->lost if $client->{session};
		$client->{session} = undef;
		$client->{server} = 1 - $server;
		usleep(100_000) if !$self->{split};
	}
	return;
}

# A client in a separate process; its results go to a file.
sub start_client
{
	my ($self, $name, $code) = @_;
	my $pid = fork // die "could not fork: $!";

	if ($pid != 0)
	{
		$self->{pid_of}{$name} = $pid;
		return;
	}

	$self->{pid_of} = {};
	Test::More->builder->output('/dev/null');
	my @lines = eval { $code->({ server => 0 }) };
	my $error = $@;

	append_to_file("$self->{dir}/$name", join("\n", @lines));
	print STDERR "client $name: $error" if $error;
	POSIX::_exit($error ? 1 : 0);
}

sub DESTROY
{
	my ($self) = @_;
	local $?;

	kill 'KILL', $_ foreach values %{ $self->{pid_of} };
	return;
}

sub lines_of
{
	my ($self, $name) = @_;

	return split /\n/, slurp_file("$self->{dir}/$name");
}

# The same keys in the same order from two clients: each must run once.
sub claim_keys
{
	my ($self, $client) = @_;
	my @keys;

	for (my $done = 0; $done < $self->{enough};)
	{
		my $key = 'claim ' . (@keys + 1);

		push @keys, $key;
		$done += $self->persist(
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
	my ($self, $client) = @_;

	for (my ($n, $done) = (1, 0); $done < $self->{enough}; $n++)
	{
		my $key = 'life ' . $n % 5;

		$done += $self->persist($client,
			sub { $_[0]->query("SELECT idem_claim('$key', ttl => '1 ms')") });
	}
	return;
}

# Work outside: a lease, which is taken and finished wherever that works.  The
# line is what the outside has seen.
sub lease_keys
{
	my ($self, $client) = @_;
	my @lines;

	for (my ($n, $done) = (1, 0); $done < $self->{enough}; $n++)
	{
		my $key = "lease $n";
		my ($status, $lease);

		# the worker gets its lease again if it did not hear of it
		$self->persist(
			$client,
			sub {
				my ($s) = @_;

				($status, $lease) = split /\|/,
				  $s->query("SELECT status, token FROM idem_lease('$key', '1 hour', worker => 'w')");
			});
		push @lines, $key if $status eq 'claimed' || $status eq 'resumed';
		$done += $self->persist($client,
			sub { $_[0]->query("SELECT idem_finish('$key', '$n', token => $lease)") });
	}
	return @lines;
}

# Changes of ten records, and a job for each change, which may be absorbed
sub enqueue_jobs
{
	my ($self, $client) = @_;
	my $n = 0;

	for (my $done = 0; $done < $self->{enough};)
	{
		my $key = 'record ' . ++$n % 10;

		# a repeated change is not another one
		$done += $self->persist(
			$client,
			sub {
				$_[0]->query(
					qq{BEGIN;
					INSERT INTO changes VALUES (idem_slot('$key'), '$key', $n) ON CONFLICT DO NOTHING;
					SELECT idem_enqueue('jobs', key => '$key');
					COMMIT});
			});
	}
	return $n;
}

# A worker; in a transaction, or with a lease, which is completed wherever that
# works.  It ends when there is nothing to do where the work is at the end, and nothing will come.
sub do_jobs
{
	my ($self, $client, $leased) = @_;
	my $lease = $leased ? "'1 hour'" : 'NULL';
	my %empty;
	my $work = sub {
		my ($s, $server, $id, $key) = @_;

		$s->query(
			qq{INSERT INTO seen SELECT $id, '$key', max(n), $server FROM changes WHERE key = '$key'});
	};

	for (;;)
	{
		my ($id, $job_token, $key);
		my $is_last = -e "$self->{dir}/producer";
		my $server = $self->persist(
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

		%empty = defined $id || !$is_last ? () : (%empty, $server => 1);
		return if $empty{1} && ($empty{0} || !$self->{split});
		if (!defined $id && $self->{split})
		{
			# the other server may have some
			$client->{session}->quit;
			$client->{session} = undef;
			$client->{server} = 1 - $server;
		}
		$self->persist(
			$client,
			sub {
				my ($s, $at) = @_;

				$s->query('BEGIN');
				# the job may be done: the answer to the commit was lost
				if ($s->query("SELECT count(*) FROM seen WHERE job_id = $id") eq '0')
				{
					# the job is locked, so it is not moved from here
					$s->query("SELECT idem_complete($id, $job_token)");
					$work->($s, $at, $id, $key);
				}
				$s->query('COMMIT');
			}) if defined $id && $leased;
	}
	return;
}

=pod

=item start(), finish()

Start the clients, and return once they work; wait for their end.

=cut

sub start
{
	my ($self) = @_;

	$self->start_client("claims $_", sub { $self->claim_keys(@_) }) foreach 1, 2;
	$self->start_client('takeovers', sub { $self->take_over(@_) });
	$self->start_client('leases', sub { $self->lease_keys(@_) });
	$self->start_client('producer', sub { $self->enqueue_jobs(@_) });
	$self->start_client('worker', sub { $self->do_jobs($_[0], 0) });
	$self->start_client('leased worker', sub { $self->do_jobs($_[0], 1) });
	$self->works_on(0);
	return;
}

# Returns once the clients have done something on this server.
sub works_on
{
	my ($self, $server) = @_;

	foreach my $condition (
		"count(*) > 20 FROM runs WHERE server = $server",
		"count(*) > 10 FROM seen WHERE server = $server",
		"count(*) > 10 FROM idem.keys WHERE key LIKE 'lease %'")
	{
		$self->{servers}[$server]->poll_query_until('postgres', "SELECT $condition")
		  or die 'the clients do not work';
	}
	return;
}

sub finish
{
	my ($self) = @_;

	foreach my $name (sort keys %{ $self->{pid_of} })
	{
		waitpid($self->{pid_of}{$name}, 0);
		is($?, 0, "client $name has ended well");
		delete $self->{pid_of}{$name};
	}

	# A worker that did not hear of its lease leaves the job to the next, an hour later.
	foreach my $server ($self->{split} ? (0, 1) : 1)
	{
		my $s = session($self->{servers}[$server]);
		my $is_left = 1;

		$s->query('SET idem.clock_offset = 7200');
		while ($is_left)
		{
			$is_left = $s->query(
				qq{BEGIN;
				SELECT job_id, token, key FROM idem_fetch('jobs') \\gset
				\\if :{?job_id}
				INSERT INTO seen SELECT :job_id, :'key', max(n), $server FROM changes WHERE key = :'key';
				SELECT idem_complete(:job_id, :token);
				\\endif
				\\unset job_id
				COMMIT}) eq 't';
		}
		$s->quit;
	}
	return;
}

# Rows of both servers, if both work
sub rows
{
	my ($self, $sql) = @_;

	return map { split /\n/, $_->safe_psql('postgres', $sql) } $self->{split} ? @{ $self->{servers} } : $self->{servers}[1];
}

=pod

=item ledger_ok()

No key and no job ran twice, none was lost, and every change was followed by a job that has
seen it.

=cut

sub ledger_ok
{
	my ($self) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	my %claimed = map { $_ => 1 } map { $self->lines_of($_) } 'claims 1', 'claims 2';
	my (%ran, %by_server);

	foreach my $row ($self->rows('SELECT key, server FROM runs'))
	{
		my ($key, $server) = split /\|/, $row;

		$ran{$key}++;
		$by_server{keys}[$server]++;
	}
	is(join(', ', grep { $ran{$_} > 1 } sort keys %ran),
		'', 'K3: no key has run twice');
	is(join(', ', grep { !$ran{$_} } sort keys %claimed),
		'', 'K1: and none was lost');
	is( scalar(grep { $_ ne 't' } $self->rows(
			q{SELECT c.status = 'finished' AND c.result = to_jsonb(c.key)
			  FROM idem_claim_many(ARRAY(SELECT key FROM runs
				WHERE idem_slot(key) <@ COALESCE((SELECT slots FROM idem.shard), '{[0,1024)}'))) AS c})),
		0,
		'K2: each key has its result, from either server');

	my %outside;

	$outside{$_}++ foreach $self->lines_of('leases');
	is(join(', ', grep { $outside{$_} > 1 } sort keys %outside),
		'', 'L1: nothing was done twice outside');
	my %finished = map { $_ => 1 }
	  $self->rows(q{SELECT key FROM idem.keys WHERE key LIKE 'lease %' AND finished_at IS NOT NULL});
	is(join(', ', sort grep { !$finished{$_} } keys %outside),
		'', 'L3: each lease was finished, from either server');

	my (%done, %last_seen, %last_change, %changes);

	foreach my $row ($self->rows('SELECT job_id, key, n, server FROM seen'))
	{
		my ($id, $key, $n, $server) = split /\|/, $row;

		$done{$id}++;
		$by_server{jobs}[$server]++;
		$last_seen{$key} = $n if $n > ($last_seen{$key} // 0);
	}
	is(join(', ', grep { $done{$_} > 1 } sort keys %done), '', 'J11: no job was done twice');
	foreach my $row ($self->rows('SELECT key, n FROM changes'))
	{
		my ($key, $n) = split /\|/, $row;

		$changes{$row} = 1;
		$last_change{$key} = $n if $n > ($last_change{$key} // 0);
	}
	is( join(', ', grep { ($last_seen{$_} // 0) < $last_change{$_} } sort keys %last_change),
		'',
		'J2: every change was followed by a job that has seen it');
	is(scalar(keys %changes), ($self->lines_of('producer'))[0], 'and none was lost');
	is( join(' ', $self->rows(
			q{SELECT job_id FROM idem.jobs WHERE queue = 'jobs'
			  AND (job_id & 1023)::integer <@ COALESCE((SELECT slots FROM idem.shard), '{[0,1024)}')})),
		'', 'J2: no job is left');
	foreach my $what ('keys', 'jobs')
	{
		cmp_ok($by_server{$what}[$_] // 0, '>', 0, "$what have run on server $_") foreach 0, 1;
	}
	note sprintf 'keys: %s, leases: %s, jobs: %s', map { scalar keys %$_ } \%ran, \%outside, \%done;
	return;
}

=pod

=back

=cut

1;
