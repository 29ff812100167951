
=pod

=head1 NAME

IdemTest - helpers of the TAP tests of idem

=head1 DESCRIPTION

A server with the extension, psql sessions that stay open (IdemTest::Session),
SQLSTATEs of statements, pgbench runs, and the check of the server log that
ends every test.  It needs only what PostgreSQL 15 to 19 have in common.

Nothing here sleeps for a fixed time: everything waits for a state.

=cut

package IdemTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(
  add_expired
  amcheck_ok
  claim_status
  cleanup_logged
  cleanup_round
  crash_backend
  crash_postmaster
  doctor
  log_count
  log_ok
  never_two_ok
  new_database
  new_node
  pgbench_run
  progress
  row_of
  run
  session
  sqlstate
  wait_until_asleep
  wait_until_blocked
  wait_until_gone
);

# Every line of the log carries its SQLSTATE, so that a test can look for one.  No
# job drains because a test takes long.  A test that claims only to have a key gets no
# warning: 061_autocommit.pl and 200_manual.pl have the default.
my $common_conf = q{
log_line_prefix = '%m [%p] %e %q%a '
log_statement = none
max_prepared_transactions = 64
idem.drain_after = 1h
idem.require_finish = off
};

=pod

=head1 FUNCTIONS

=over

=item new_node($name, conf => '', init => {}, extension => 1, install => undef)

A running server, with the extension in the database postgres.  install is the
path of another installation of PostgreSQL.  The first node of a test is the one
that functions with the option C<node> use by default.

=cut

my $first_node;

sub new_node
{
	my ($name, %opt) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name,
		defined $opt{install} ? (install_path => $opt{install}) : ());

	$node->init(
		extra => [ '--no-locale', '--encoding=UTF8' ],
		%{ $opt{init} // {} });
	$node->append_conf('postgresql.conf', $common_conf . ($opt{conf} // ''));
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION idem')
	  if $opt{extension} // 1;
	$first_node //= $node;
	return $node;
}

=pod

=item run($sql, db => 'postgres', node => $first_node)

Runs $sql in a new session and returns its output; dies on an error.

=cut

sub run
{
	my ($sql, %opt) = @_;
	my $node = $opt{node} // $first_node;

	return $node->safe_psql($opt{db} // 'postgres', $sql);
}

=pod

=item new_database($db, $sql)

Creates a database on the first node and runs $sql there, by default CREATE
EXTENSION idem.

=cut

sub new_database
{
	my ($db, $sql) = @_;

	run("CREATE DATABASE $db");
	run($sql // 'CREATE EXTENSION idem', db => $db);
	return;
}

=pod

=item doctor($check, columns => 'status', db => 'postgres', node => $first_node)

The row of this check in idem_doctor().

=cut

sub doctor
{
	my ($check, %opt) = @_;
	my $columns = $opt{columns} // 'status';

	return run(qq{SELECT $columns FROM idem_doctor() WHERE "check" = '$check'}, %opt);
}

=pod

=item row_of($key)

The row of this key in idem.keys on the first node, with its place and the transaction
that wrote it: any change of the row changes it.  Empty if there is no such row.

=cut

sub row_of
{
	my ($key) = @_;

	return run("SELECT ctid, xmin, k FROM idem.keys AS k WHERE key = '$key'");
}

=pod

=item progress($db, $columns)

The row of this database in idem.cleanup_progress, of the first node.

=cut

sub progress
{
	my ($db, $columns) = @_;

	return run("SELECT $columns FROM idem.cleanup_progress WHERE datname = '$db'");
}

=pod

=item sqlstate($node, $sql, db => 'postgres', user => undef)

SQLSTATE of the first error in $sql, which may be several statements in one
new session; '00000' if there is none.

=cut

sub sqlstate
{
	my ($node, $sql, %opt) = @_;
	my $connstr = $node->connstr($opt{db} // 'postgres');

	$connstr .= " user=$opt{user}" if defined $opt{user};

	my ($ret, $out, $err) = $node->psql(
		'postgres', $sql,
		connstr => $connstr,
		timeout => $PostgreSQL::Test::Utils::timeout_default,
		extra_params => [ '-v', 'VERBOSITY=verbose' ]);

	return '00000' if $ret == 0;
	note $err;
	return IdemTest::Session::first_sqlstate($err);
}

=pod

=item claim_status($node, $arguments, db => 'postgres')

The status that a claim in a separate transaction returns, and its result
after a bar: C<finished|{"a": 1}>.  $arguments is SQL text.

=cut

sub claim_status
{
	my ($node, $arguments, %opt) = @_;

	return $node->safe_psql(
		$opt{db} // 'postgres',
		"SELECT status, result FROM idem_claim($arguments)",
		timeout => $PostgreSQL::Test::Utils::timeout_default);
}

=pod

=item session($node, db => 'postgres', user => undef)

A psql session that stays open, see IdemTest::Session.

=cut

sub session
{
	my ($node, %opt) = @_;

	return IdemTest::Session->new($node, %opt);
}

=pod

=item wait_until_blocked($node, $session, $event)

Returns once the session waits for a lock; $event is the wait event,
transactionid unless given.

=cut

sub wait_until_blocked
{
	my ($node, $session, $event) = @_;

	$event //= 'transactionid';
	$node->poll_query_until(
		'postgres', qq{
		SELECT count(*) = 1 FROM pg_stat_activity
		 WHERE pid = $session->{pid}
		   AND wait_event_type = 'Lock' AND wait_event = '$event'
	}) or die 'session does not wait for a lock';
	return;
}

=pod

=item wait_until_asleep($node, $n, $which)

Returns once $n sessions that wait in idem_wait(), idem_work() and the like sleep without a
transaction (A1).  $which is a condition on pg_stat_activity, by default true.

=cut

sub wait_until_asleep
{
	my ($node, $n, $which) = @_;

	$which //= 'true';
	$node->poll_query_until(
		'postgres', qq{
		SELECT count(*) = $n FROM pg_stat_activity
		 WHERE wait_event_type = 'Extension' AND query ~* '^\\s*CALL idem_w(ait|ork)'
		   AND state = 'active' AND xact_start IS NULL AND ($which)
	}) or die "not $n sessions are asleep";
	return;
}

=pod

=item wait_until_gone($node, $session)

Returns once the server process of the session has ended.

=cut

sub wait_until_gone
{
	my ($node, $session) = @_;

	$node->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $session->{pid}")
	  or die 'session does not end';
	return;
}

=pod

=item add_expired($node, $n, db => 'postgres', name => 'expired')

$n keys that expired long ago, for cleanup to remove.

=cut

sub add_expired
{
	my ($node, $n, %opt) = @_;
	my $name = $opt{name} // 'expired';

	$node->safe_psql(
		$opt{db} // 'postgres', qq{
		SET idem.clock_offset = -100000;
		SELECT count(*) FROM idem_claim_many(
			ARRAY(SELECT '$name ' || n FROM generate_series(1, $n) AS n), ttl => '1 s')});
	return;
}

=pod

=item cleanup_round($node, @databases)

Reloads, and returns once the background worker has ended a round, with or without
an error, in each of these databases, and the launcher knows it.  Without databases:
once the worker has visited every database.  The database postgres must have the
extension.

=cut

sub cleanup_round
{
	my ($node, @databases) = @_;
	my $quiet = q{SELECT state = 'sleeping' FROM idem.worker_status};
	my $list = join ', ', map { "'$_'" } @databases;
	my $number = @databases;

	# otherwise this could see the end of the earlier round
	$node->poll_query_until('postgres', $quiet)
	  or die 'the launcher does not come to rest';

	my ($before, $runs) = split /\|/,
	  $node->safe_psql('postgres',
		'SELECT clock_timestamp(), runs FROM idem.worker_status');

	$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
	$node->poll_query_until(
		'postgres',
		@databases
		? qq{SELECT count(*) = $number AND ($quiet) FROM idem.cleanup_progress
			  WHERE datname IN ($list) AND greatest(last_finished_at, last_error_at) > '$before'}
		: qq{SELECT state = 'sleeping' AND runs >= $runs +
				(SELECT count(*) FROM pg_database WHERE datallowconn AND NOT datistemplate)
			   FROM idem.worker_status})
	  or die 'there is no round of cleanup';
	return;
}

=pod

=item log_count($node, $pattern, $offset)

How often the pattern is in the server log, from $offset (or the beginning) on.

=cut

sub log_count
{
	my ($node, $pattern, $offset) = @_;
	my $log = slurp_file($node->logfile, $offset // 0);

	return scalar(() = $log =~ /$pattern/g);
}

=pod

=item cleanup_logged($db, $offset)

How often the first node has logged that cleanup fails in this database, and that
it works again: C<1 0>.

=cut

sub cleanup_logged
{
	my ($db, $offset) = @_;

	return join ' ',
	  map { log_count($first_node, qr/idem cleanup $_ in database "$db"/, $offset) }
	  'failed', 'works again';
}

=pod

=item pgbench_run($node, \@options, \@scripts, failures => 0)

One run of pgbench.  Each script is [text, weight].  True if pgbench
succeeded, no client was aborted and, unless failures are allowed, no
transaction failed; otherwise shows what pgbench printed.

=cut

my $script_number = 0;

sub pgbench_run
{
	my ($node, $options, $scripts, %opt) = @_;
	my @cmd = (
		$node->installed_command('pgbench'),
		'--no-vacuum',
		'--host' => $node->host,
		'--port' => $node->port,
		@$options);
	my $dir = PostgreSQL::Test::Utils::tempdir();
	my ($out, $err) = ('', '');

	foreach my $script (@$scripts)
	{
		my ($text, $weight) = @$script;
		my $file = sprintf('%s/script_%d.sql', $dir, $script_number++);

		append_to_file($file, $text);
		push @cmd, '--file' => "$file\@$weight";
	}

	IPC::Run::run([ @cmd, 'postgres' ], '>', \$out, '2>', \$err);
	my $status = $?;

	return 1
	  if $status == 0
	  && $out =~ /^number of transactions actually processed: (\d+)\/\1$/m
	  && $err !~ /aborted/
	  && ($opt{failures} || $out =~ /^number of failed transactions: 0 /m);

	diag("exit status of pgbench: $status\n$out\n$err");
	return 0;
}

=pod

=item crash_backend($node, $pid)

kill -9 of a server process, which ends all others.  Returns once the server accepts
connections again.

=cut

sub crash_backend
{
	my ($node, $pid) = @_;
	my $offset = -s $node->logfile;

	kill 9, $pid;
	$node->wait_for_log(
		qr/all server processes terminated; reinitializing.*ready to accept connections/s,
		$offset);
	return;
}

=pod

=item crash_postmaster($node)

kill -9 of the postmaster of this node.  Returns once all its processes are
gone, so that the node can be started again.

=cut

sub crash_postmaster
{
	my ($node) = @_;
	my $pid_file = $node->data_dir . '/postmaster.pid';
	my ($postmaster) = split /\n/, slurp_file($pid_file);
	my @pids = split /\n/,
	  $node->safe_psql('postgres',
		'SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()');

	$node->kill9;
	foreach my $pid ($postmaster, @pids)
	{
		my $attempts = 10 * $PostgreSQL::Test::Utils::timeout_default;

		while (process_lives($pid))
		{
			die "process $pid does not end" if $attempts-- <= 0;
			usleep(100_000);
		}
	}

	# A killed postmaster that is still a zombie looks alive to the next one, which
	# would then refuse to start.
	unlink $pid_file, sprintf('%s/.s.PGSQL.%d.lock', $node->host, $node->port);
	return;
}

sub process_lives
{
	my ($pid) = @_;

	return 0 unless kill 0, $pid;

	my $stat_file = "/proc/$pid/stat";
	open my $stat, '<', $stat_file or return !-e '/proc/self/stat';
	my $line = <$stat> // '';
	close $stat;
	return $line !~ /\) [ZX] / && $line ne '';
}

=pod

=item log_ok($node, killed => 0, except => undef)

The server log has no panic, no failed assertion, no internal error, and no
process ended by a signal but the C<killed> ones that the test itself killed.
Lines that match C<except> are expected.

=cut

sub log_ok
{
	my ($node, %opt) = @_;
	my $name = $node->name;
	my $killed = $opt{killed} // 0;
	my $log = slurp_file($node->logfile);
	my @bad = grep { /PANIC|TRAP/ || /\] XX\d\d\d / } split /\n/, $log;

	@bad = grep { $_ !~ $opt{except} } @bad if defined $opt{except};
	# a backend that has closed its socket and then gets the SIGQUIT of a restart after a crash
	@bad = grep { !/could not send data to client: Bad file descriptor/ } @bad if $killed;

	my @ended = $log =~ /was terminated by signal \d+/g;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	is(join("\n", @bad), '', "log of $name: no panic, trap or internal error");
	is( join(' ', @ended),
		join(' ', ('was terminated by signal 9') x $killed),
		"log of $name: $killed processes ended by a signal");
	return;
}

=pod

=item never_two_ok($node)

The log says that the server never had two launchers or two workers of idem at
the same time, from the first process to the last.  It needs
log_min_messages = debug1.  Returns how many were started: a hash with the
keys launcher and cleanup.

=cut

sub never_two_ok
{
	my ($node) = @_;
	my $name = $node->name;
	my %started = (launcher => 0, cleanup => 0);
	my %running = %started;
	my @two;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	foreach my $line (split /\n/, slurp_file($node->logfile))
	{
		if ($line =~ /starting background worker process "idem (\w+)"/)
		{
			$started{$1}++;
			push @two, $line if ++$running{$1} > 1;
		}
		elsif ($line =~ /background worker "idem (\w+)" \(PID \d+\) exited/)
		{
			$running{$1}--;
		}
		elsif ($line =~
			/all server processes terminated; reinitializing|starting PostgreSQL/)
		{
			# the log does not show those that ended with the server
			%running = (launcher => 0, cleanup => 0);
		}
	}
	is(join("\n", @two), '',
		"log of $name: never two launchers and never two workers at once");
	return %started;
}

=pod

=item amcheck_ok($node, $when, @tables)

amcheck finds nothing wrong in the tables and their indexes; idem.keys if none
are given.  Skipped where amcheck is not installed.

=cut

sub amcheck_ok
{
	my ($node, $when, @tables) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	@tables = ('idem.keys') unless @tables;

  SKIP:
	{
		skip 'amcheck is not installed', 2 * @tables
		  unless $node->safe_psql('postgres',
			"SELECT count(*) FROM pg_available_extensions WHERE name = 'amcheck'"
		  );

		$node->safe_psql('postgres', 'CREATE EXTENSION IF NOT EXISTS amcheck');
		foreach my $table (@tables)
		{
			is( $node->safe_psql(
					'postgres', qq{
					SELECT count(bt_index_check(indexrelid, true)::text) > 0
					  FROM pg_index WHERE indrelid = '$table'::regclass}),
				't',
				"amcheck: the indexes of $table agree with it $when");
			is( $node->safe_psql(
					'postgres', qq{SELECT * FROM verify_heapam('$table')}),
				'',
				"amcheck: $table is sound $when");
		}
	}
	return;
}

=pod

=back

=head1 IdemTest::Session

=over

=item $s->query($sql)

Runs $sql and returns its output; dies on an error.

=item $s->sqlstate($sql)

Runs $sql and returns the SQLSTATE of its first error, or '00000'.

=item $s->send($sql), $s->receive

The same in two steps, for statements that block.  receive returns the output;
C<< $s->{sqlstate} >> is set.

=item $s->lost

For a server that is gone: ends psql, whatever it is doing.  Returns its output.

=item $s->kill

kill -9 of psql.  The server notices it later.

=item $s->quit

=back

=cut

package IdemTest::Session;

use strict;
use warnings FATAL => 'all';

use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

sub new
{
	my ($class, $node, %opt) = @_;
	my $connstr = $node->connstr($opt{db} // 'postgres');

	$connstr .= " user=$opt{user}" if defined $opt{user};

	my $self = bless {
		stdin => '',
		stdout => '',
		stderr => '',
		number => 0,
	  },
	  $class;

	$self->{timeout} =
	  IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	$self->{run} = IPC::Run::start(
		[
			$node->installed_command('psql'), '-XAtq',
			'-d' => $connstr,
			'-v' => 'VERBOSITY=verbose',
			'-f' => '-'
		],
		'<' => \$self->{stdin},
		'>' => \$self->{stdout},
		'2>' => \$self->{stderr},
		$self->{timeout});
	# Statistics that are not reported at once set a timer of ten seconds.  It would wake a session
	# that waits in idem_wait() then, and a wake-up that gets lost would not show.
	$self->{pid} = $self->query('SELECT pg_backend_pid() FROM pg_stat_force_next_flush()');
	return $self;
}

sub first_sqlstate
{
	my ($err) = @_;

	return $1
	  if $err =~ /^(?:psql:.*?:\d+: )?(?:ERROR|FATAL|PANIC):\s+(\w{5}):/m;
	return $err =~ /ERROR|FATAL|connection/ ? 'no SQLSTATE' : '00000';
}

sub send
{
	my ($self, $sql) = @_;

	$self->{marker} = 'end of query ' . ++$self->{number};
	$self->{timeout}->start;
	$self->{stdin} .=
	  "$sql\n;\n\\echo '$self->{marker}'\n\\warn '$self->{marker}'\n";
	$self->{run}->pump_nb;
	return;
}

sub receive
{
	my ($self) = @_;
	my $marker = qr/^\Q$self->{marker}\E\n/m;

	until ($self->{stdout} =~ $marker && $self->{stderr} =~ $marker)
	{
		die "psql has ended: $self->{stderr}" unless $self->{run}->pumpable;
		$self->{run}->pump;
	}

	my ($out, $err) = ($self->{stdout}, $self->{stderr});

	$self->{stdout} = $self->{stderr} = '';
	$out =~ s/$marker//;
	$err =~ s/$marker//;
	chomp $out;
	$self->{sqlstate} = first_sqlstate($err);
	$self->{message} = $err;
	note $err if $err ne '';
	return $out;
}

sub query
{
	my ($self, $sql) = @_;

	$self->send($sql);
	my $out = $self->receive;
	die "query failed: $sql\n$self->{message}" if $self->{sqlstate} ne '00000';
	return $out;
}

sub sqlstate
{
	my ($self, $sql) = @_;

	$self->send($sql);
	$self->receive;
	return $self->{sqlstate};
}

sub lost
{
	my ($self) = @_;

	$self->{stdin} = '';
	eval { $self->{run}->finish; };
	return $self->{stdout};
}

sub kill
{
	my ($self) = @_;

	$self->{run}->signal('KILL');
	return $self->lost;
}

sub quit
{
	my ($self) = @_;

	$self->{stdin} .= "\\q\n";
	$self->{run}->finish;
	return;
}

1;
