
=pod

=head1 NAME

IdemMove - helpers of the tests of idem_move

=head1 DESCRIPTION

Two databases of one server, source and target, between which slots move.  Role bob is an ordinary
role that owns the schema bob in both; his functions tell in the server log when they run in
idem_move.

=cut

package IdemMove;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(
  anew
  evil_runs
  maps
  move
  move_command
  move_node
  move_program
  moved_ok
  on_source
  on_target
  refused_ok
  start_move
);

my $node;

=pod

=head1 FUNCTIONS

=over

=item move_node()

The server with the two databases.  Its messages are not English, if it has others.

=item move_program()

The path of idem_move.

=cut

sub move_node
{
	my ($locales) = run_command([ 'locale', '-a' ]);
	my ($utf8) = $locales =~ /^(C\.utf-?8)$/mi;

	$ENV{LANGUAGE} = 'de';
	$node = new_node('move', conf => defined $utf8 ? "lc_messages = '$utf8'" : '');
	run('CREATE ROLE bob LOGIN; CREATE ROLE boss SUPERUSER');
	anew();
	return $node;
}

sub move_program
{
	my ($bindir) = run_command([ 'pg_config', '--bindir' ]);

	return "$bindir/idem_move";
}

=pod

=item on_source($sql), on_target($sql)

Runs SQL in one of the two databases.

=cut

sub on_source { return run($_[0], db => 'source') }
sub on_target { return run($_[0], db => 'target') }

=pod

=item anew()

Makes the two databases, with maps: the source has all slots.

=cut

sub anew
{
	foreach my $db ('source', 'target')
	{
		run("DROP DATABASE IF EXISTS $db WITH (FORCE)");
		new_database($db);
		run(q{CREATE SCHEMA bob AUTHORIZATION bob; GRANT USAGE ON SCHEMA bob TO PUBLIC;} . evil(), db => $db);
	}
	on_source(q{SELECT idem_shard_set('{[0,1024)}', number => 0)});
	on_target(q{SELECT idem_shard_set('{}', number => 1)});
	return;
}

=pod

=item evil()

SQL that makes functions of bob, bob.evil(text) and the trigger function bob.evil_trigger().

=item evil_runs()

How often they have run in idem_move.

=cut

sub evil
{
	return q{
		CREATE FUNCTION bob.evil(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
		BEGIN
			IF current_setting('application_name') = 'idem_move' THEN
				RAISE LOG 'EVIL runs as %', current_user;
			END IF;
			RETURN $1;
		END $$;
		CREATE FUNCTION bob.evil_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM bob.evil(''); RETURN COALESCE(NEW, OLD); END $$;
		ALTER FUNCTION bob.evil OWNER TO bob;
		ALTER FUNCTION bob.evil_trigger OWNER TO bob};
}

sub evil_runs
{
	return log_count($node, qr/EVIL runs as/);
}

=pod

=item move_command($from, $to, $slots, @options)

The command that moves slots between two databases.  Each is the name of a database of the server, a
server (its database postgres) or a connection string.

=item move(...), moved_ok($name, ...), refused_ok($pattern, $name, ...)

Run it.  move() returns the exit status and what was printed.

=item start_move(\$printed, ...)

Start it; the harness of IPC::Run.

=cut

sub move_command
{
	my ($from, $to, $slots, @options) = @_;

	($from, $to) = map { ref $_ ? $_->connstr('postgres') : /=/ ? $_ : $node->connstr($_) } $from, $to;
	return (move_program(), '--from' => $from, '--to' => $to, '--slots' => $slots, @options);
}

sub start_move
{
	my ($printed, @arguments) = @_;

	return IPC::Run::start([ move_command(@arguments) ], '>&', $printed, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}

sub move
{
	my $out = '';

	IPC::Run::run([ move_command(@_) ], '>&', \$out);
	my $status = $? >> 8;
	note $out;
	return ($status, $out);
}

sub moved_ok
{
	my ($name, @arguments) = @_;
	my ($status, $out) = move(@arguments);

	is($status, 0, $name) or diag($out);
	return $out;
}

sub refused_ok
{
	my ($pattern, $name, @arguments) = @_;
	my ($status, $out) = move(@arguments);

	is($status, 1, "$name: stops");
	like($out, $pattern, "$name: says why");
	return;
}

=pod

=item maps()

The slots, and those given up, of both databases.

=cut

sub maps
{
	return join ' / ', map { run(q{SELECT slots, COALESCE(given, '{}') FROM idem.shard}, db => $_) } 'source', 'target';
}

=pod

=back

=cut

1;
