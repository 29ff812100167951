
=pod

=head1 NAME

IdemManual - runs the code blocks of a page of the manual and compares what they print

=head1 DESCRIPTION

A page is run from top to bottom in one database, which is made for it.  Rules for
authors:

=over

=item *

An C<sql> block is typed into C<psql -X -q>.  One session lasts for the whole page,
so variables of C<\gset>, settings and open transactions carry on.

=item *

A block without a language that directly follows shows what psql printed.  A result of one row
and one column (C<t> of idem_finish) and a NOTICE may be left out, nothing else; so
may the CONTEXT of an error.  If no such block follows, anything may be printed but an
error.

=item *

C<-- session B> as the first line of an C<sql> block runs it in another session.  If
its last line ends with C<-- waits>, the page goes on while the session waits: for a lock, or
in idem_wait() and the like.  An output block that begins with C<-- session B> shows what
that session printed after it.

=item *

An C<sh> block is run with C<bash -e> in an empty directory, with the server and the
database of the page in PGHOST and so on.  It must succeed.

=item *

Every line of a C<conf> block sets a parameter that the server has.

=item *

A comment C<< <!-- setup: SQL --> >> is run where it stands.  Errors are failures.

=item *

A comment C<< <!-- not run: reason --> >> before a block exempts that block.

=item *

Blocks with the language C<text> (pseudo-code, drawings, lines of a log) are not run, nor
are programs and data in other languages: C<make examples> runs the programs.  Any other language is
a mistake (C<bash> for C<sh>).

=item *

If no block of the page says C<CREATE EXTENSION idem;>, the database has the extension.

=back

These parts of an output may differ from run to run, so any value of the same kind
will do: a time stamp, a token (16 digits), a WAL position, a time span below a minute
(C<00:00:07>), C<7 s ago>, and in lines of the doctor the process, its state, the number of
its visits and the number of worker slots in use.  Then the width of columns does
not count either.

=cut

package IdemManual;

use strict;
use warnings FATAL => 'all';

use IPC::Run;
use PostgreSQL::Test::Utils;

my %runnable = map { $_ => 1 } qw(sql sh conf);
my %illustration = map { $_ => 1 } qw(text js ts python go ruby java json yaml http);

# blocks($file): the blocks and comments of a page that matter here, in order:
# {line, kind, text, reason}.  kind is the language; '' is an output, 'setup' a comment.
sub blocks
{
	my ($file) = @_;
	my ($block, $comment, $reason, @blocks);
	my $number = 0;
	my $last = 0;    # line at which the last block ended

	foreach my $line (split /\n/, slurp_file($file))
	{
		$number++;
		if (defined $block)
		{
			if ($line =~ /^\s*```\s*$/)
			{
				$last = $number;
				push @blocks, $block;
				undef $block;
				next;
			}
			$line =~ s/^\Q$block->{indent}\E//;
			$block->{text} .= "$line\n";
		}
		elsif (defined $comment)
		{
			$comment .= "\n$line";
		}
		elsif ($line =~ /^(\s*)```(\w*)/)
		{
			$block = {
				line => $number, kind => $2, text => '', indent => $1, reason => $reason,
				follows => $last && $number - $last <= 2
			};
			undef $reason;
			next;
		}
		elsif ($line =~ /^\s*<!--/)
		{
			$comment = $line;
		}
		elsif ($line =~ /\S/)
		{
			undef $reason;
			$last = 0;
		}

		next if !defined $comment || $comment !~ /-->\s*$/;
		$reason = $1 if $comment =~ /<!--\s*not run:\s*(.*?)\s*-->/s;
		push @blocks, { line => $number, kind => 'setup', text => $1 }
		  if $comment =~ /<!--\s*setup:\s*(.*?)\s*-->/s;
		undef $comment;
	}
	return @blocks;
}

# chunks($text): the results and messages in the output of psql; blank lines do not count
sub chunks
{
	my ($text) = @_;
	my @chunks;
	my $open = '';    # table or message

	foreach my $line (split /\n/, $text)
	{
		$line =~ s/\s+$//;
		if ($line =~ /^(?:psql:\S+ )?(?:ERROR|FATAL|PANIC|WARNING|NOTICE|INFO|LOG|DEBUG\d?):  /)
		{
			push @chunks, [$line];
			$open = 'message';
		}
		elsif ($open eq 'message' && $line =~ /^(?:DETAIL|HINT):  /)
		{
			push @{ $chunks[-1] }, $line;
		}
		elsif ($open eq 'message'
			&& $line =~ /^CONTEXT:  |^LINE \d+: |^ +\^$|^(?:PL\/pgSQL|SQL) (?:function|statement) |^QUERY:  /)
		{
			next;
		}
		elsif ($line eq '')
		{
			$open = '' if $open ne 'table';
		}
		elsif ($open eq 'table')
		{
			push @{ $chunks[-1] }, $line;
			$open = '' if $line =~ /^\(\d+ rows?\)$/;
		}
		elsif ($line =~ /^-[-+]*$/ && @chunks && @{ $chunks[-1] } == 1 && $open eq 'text')
		{
			push @{ $chunks[-1] }, $line;
			$open = 'table';
		}
		else
		{
			push @chunks, [$line];
			$open = 'text';
		}
	}
	return @chunks;
}

sub is_error { return $_[0][0] =~ /^(?:psql:\S+ )?(?:ERROR|FATAL|PANIC):|no rows returned for|^invalid |^\\/ }

sub may_be_left_out
{
	my ($chunk) = @_;

	return $chunk->[0] =~ /^(?:psql:\S+ )?NOTICE:/
	  || (@$chunk == 4 && $chunk->[1] =~ /^-+$/ && $chunk->[3] eq '(1 row)')
	  || (@$chunk == 3 && $chunk->[1] =~ /^-+$/ && $chunk->[2] eq '(1 row)');
}

# A line without the parts that differ from run to run.
sub normal
{
	my ($line) = @_;

	$line =~ s/\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?:[+-]\d\d(?::\d\d)?)?/TIME/g;
	$line =~ s/\b\d{16}\b/TOKEN/g;
	$line =~ s/\b[0-9A-F]{1,8}\/[0-9A-F]{1,8}\b/LSN/g;
	$line =~ s/\b\d+ s ago\b/N s ago/g;
	$line =~ s/\b00:00:\d\d(?:\.\d+)?\b/SPAN/g;
	$line =~ s/process \d+, \w+, \d+ visits/process N/g;
	$line =~ s/\b\d+ of \d+ in use/N in use/g;
	$line =~ s/ {2,}/ /g;
	$line =~ s/-{2,}/-/g;
	$line =~ s/ +$//;
	return $line;
}

sub equal
{
	my ($got, $expected) = @_;

	return 0 if @$got != @$expected;
	foreach my $i (0 .. $#$got)
	{
		return 0
		  if $got->[$i] ne $expected->[$i] && normal($got->[$i]) ne normal($expected->[$i]);
	}
	return 1;
}

# complaint($got, $expected, $exact): undef, or what is wrong; $expected may be undef
sub complaint
{
	my ($got, $expected, $exact) = @_;
	my @got = chunks($got);

	if (!defined $expected)
	{
		my ($error) = grep { is_error($_) } @got;

		return defined $error && !$exact ? "an error that the page does not show: @$error" : undef;
	}

	my @expected = chunks($expected);

	foreach my $chunk (@got)
	{
		if (@expected && equal($chunk, $expected[0]))
		{
			shift @expected;
		}
		elsif ($exact || !may_be_left_out($chunk))
		{
			return "the page differs from what was printed:\n" . join("\n", @$chunk);
		}
	}
	return @expected ? "the page shows what was not printed:\n" . join("\n", @{ $expected[0] }) : undef;
}

=pod

=head1 METHODS

=over

=item new(psql => $path, host => $host, port => $port, dir => $dir, show => 0)

Runs pages on this server, in a database shop that it creates for each page, and drops
with all roles that the page has left.  show prints everything that was printed.

=item page($file)

Runs a page.  Returns a hash: problems (a list of lines), run, not_run (a
list of [line, reason]).

=back

=cut

sub new
{
	my ($class, %opt) = @_;

	return bless { sessions => {}, %opt }, $class;
}

# The server and the database in the environment, as the sh blocks have them.
sub environment
{
	my ($self, $db) = @_;

	return (
		PGHOST => $self->{host}, PGPORT => $self->{port}, PGDATABASE => $db,
		PGUSER => $self->{user}, PSQLRC => '/dev/null', PGOPTIONS => '', PGAPPNAME => 'manual');
}

# SQL in a connection of its own, errors are fatal
sub direct
{
	my ($self, $db, $sql) = @_;
	my ($out, $err) = ('', '');

	local %ENV = (%ENV, $self->environment($db));
	IPC::Run::run([ $self->{psql}, '-XAtq', '-v', 'ON_ERROR_STOP=1' ], '<', \$sql, '>', \$out, '2>', \$err)
	  or die "$sql\n$err";
	chomp $out;
	return $out;
}

sub session
{
	my ($self, $name) = @_;

	return $self->{sessions}{$name} if $self->{sessions}{$name};

	my $s = { in => '', out => '', number => 0 };

	local %ENV = (%ENV, $self->environment('shop'));
	$s->{run} = IPC::Run::start([ $self->{psql}, '-X', '-q' ], '<', \$s->{in}, '>&', \$s->{out},
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	$self->{sessions}{$name} = $s;
	$self->type($s, 'SELECT pg_backend_pid();');
	($s->{pid}) = $self->printed($s) =~ /^\s*(\d+)\s*$/m;
	return $s;
}

sub type
{
	my ($self, $s, $sql) = @_;

	$s->{marker} = 'end of block ' . ++$s->{number};
	$s->{in} .= "$sql\n\\echo '$s->{marker}'\n";
	$s->{run}->pump_nb;
	return;
}

sub printed
{
	my ($self, $s) = @_;

	$s->{run}->pump until $s->{out} =~ /^\Q$s->{marker}\E\n/m || !$s->{run}->pumpable;
	$s->{out} =~ s/^(.*?)^\Q$s->{marker}\E\n//ms or die "psql ended: $s->{out}";
	return $1;
}

sub wait_until_blocked
{
	my ($self, $s) = @_;

	for (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		$s->{run}->pump_nb;
		return 1
		  if $self->direct('postgres',
			"SELECT wait_event_type IN ('Lock', 'Extension') FROM pg_stat_activity WHERE pid = $s->{pid}") eq 't';
		return 0 if $s->{out} =~ /^\Q$s->{marker}\E\n/m;
	}
	return 0;
}

# ($got, $problem) of a block that is run
sub run_sql
{
	my ($self, $text) = @_;
	my $name = $text =~ s/^-- session (\w+)\n// ? $1 : 'A';
	my $s = $self->session($name);

	$self->type($s, $text);
	return ($self->printed($s), undef) if $text !~ /-- waits\s*\z/;
	return ('', $self->wait_until_blocked($s) ? undef : 'the session does not wait');
}

sub run_sh
{
	my ($self, $text) = @_;
	my $out = '';

	local %ENV = (%ENV, $self->environment('shop'));
	my $ok = IPC::Run::run([ 'bash', '-e', '-c', "cd '$self->{dir}' && $text" ], '>&', \$out);
	return ($out, $ok ? undef : "exit status " . ($? >> 8) . "\n$out");
}

sub run_conf
{
	my ($self, $text) = @_;
	my @unknown = grep {
		$self->direct('postgres', "SELECT count(*) FROM pg_settings WHERE name = '$_'") ne '1'
	} $text =~ /^\s*([\w.]+)\s*=/mg;

	return ('', @unknown ? "unknown parameters: @unknown" : undef);
}

sub run_setup
{
	my ($self, $text) = @_;

	return ($self->direct('shop', $text), undef);
}

sub one_block
{
	my ($self, $block, $next) = @_;
	my $method = "run_$block->{kind}";
	my ($got, $problem) = eval { $self->$method($block->{text}) };

	return $@ if $@ ne '';
	print STDERR "--- line $block->{line}\n$got" if $self->{show};
	return $problem if defined $problem;
	return undef if $block->{kind} eq 'setup' || $block->{kind} eq 'conf';

	my $expected = $next ? $next->{text} : undef;

	if (defined $expected && $expected =~ s/^-- session (\w+)\n//)
	{
		my $other = $self->printed($self->session($1));

		print STDERR "--- session $1\n$other" if $self->{show};
		return complaint($got, undef, 0) // complaint($other, $expected, 0);
	}
	return complaint($got, $expected, $block->{kind} eq 'sh');
}

sub begin
{
	my ($self, @blocks) = @_;

	$self->direct('postgres', 'CREATE DATABASE shop');
	$self->direct('shop', 'CREATE EXTENSION idem')
	  unless grep { $_->{kind} eq 'sql' && !$_->{reason} && $_->{text} =~ /^CREATE EXTENSION idem;/m } @blocks;
	return;
}

sub end
{
	my ($self) = @_;

	foreach my $s (values %{ $self->{sessions} })
	{
		$s->{in} .= "\\q\n";
		eval { $s->{run}->finish; 1 } or $s->{run}->kill_kill;
	}
	$self->{sessions} = {};
	$self->direct('postgres', 'ALTER SYSTEM RESET ALL');
	$self->direct('template1', 'SET client_min_messages = warning; DROP EXTENSION IF EXISTS idem');
	foreach my $db (split /\n/, $self->direct('postgres',
			q{SELECT quote_ident(datname) FROM pg_database WHERE datname NOT IN ('postgres', 'template0', 'template1')}))
	{
		$self->direct('postgres', "DROP DATABASE $db WITH (FORCE)");
	}
	$self->direct('postgres', "DROP OWNED BY $_; DROP ROLE $_")
	  foreach split /\n/, $self->direct('postgres',
		q{SELECT quote_ident(rolname) FROM pg_roles WHERE rolname !~ '^pg_' AND rolname <> current_user});
	return;
}

sub page
{
	my ($self, $file) = @_;
	my @blocks = blocks($file);
	my %r = (problems => [], run => 0, not_run => []);

	return %r unless @blocks;
	$self->begin(@blocks);
	foreach my $i (0 .. $#blocks)
	{
		my ($block, $next) = @blocks[ $i, $i + 1 ];
		my $kind = $block->{kind};
		my $problem;

		if ($kind eq '')
		{
			$problem = 'an output must follow an sql or sh block directly; if it is none, give it a language (text, conf)'
			  if !$block->{follows} || $i == 0 || $blocks[ $i - 1 ]{kind} !~ /^(?:sql|sh)$/;
		}
		elsif ($block->{reason})
		{
			push @{ $r{not_run} }, [ $block->{line}, $block->{reason} ];
		}
		elsif ($kind eq 'setup' || $runnable{$kind})
		{
			undef $next if !$next || $next->{kind} ne '' || !$next->{follows};
			$r{run}++ if $kind ne 'setup';
			$problem = $self->one_block($block, $next);
		}
		elsif (!$illustration{$kind})
		{
			$problem = "unknown kind of block ($kind), and no comment says why it is not run";
		}
		push @{ $r{problems} }, "$file:$block->{line}: $problem" if defined $problem;
	}
	$self->end;
	return %r;
}

1;
