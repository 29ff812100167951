# The source keeps to its layers, and names the rules of the contract that it
# keeps.  src/README.md agrees with it.

use strict;
use warnings FATAL => 'all';

use File::Basename qw(dirname);
use File::Find qw(find);
use PostgreSQL::Test::Utils;
use Test::More;

# Includes go down only, and never to a folder beside.

# The programs of src/bin know nothing of the server's code, and the other way round.
my @extension = grep { !m{^src/bin/} } glob('src/*.[ch] src/*/*.[ch] src/*/*/*.[ch]');
my @programs = glob('src/bin/*.[ch] src/bin/*/*.[ch]');

my %layer = ('.' => 0, shmem => 1, table => 1, fn => 1, stats => 2, wake => 2, keys => 3, jobs => 3, schedules => 4, testing => 5, cleanup => 5, admin => 6);
# the rooms of a folder, the lowest first
my %rooms = (jobs => [qw(row enqueue fetch hold admin)]);
my %height = map { my $folder = $_; map { ("$folder/$rooms{$folder}[$_]" => $_) } 0 .. $#{ $rooms{$folder} } } keys %rooms;
my @up;
my @relative;

sub folder_of
{
	my ($file) = @_;

	return $file =~ m{^([^/]+)/} ? $1 : '.';
}

sub room_of
{
	my ($file) = @_;

	return $file =~ m{^(.+)/} ? $1 : '.';
}

# May a file of the one room include a header of the other?
sub is_below
{
	my ($room, $other) = @_;
	my ($folder, $other_folder) = (folder_of("$room/"), folder_of("$other/"));

	return $folder eq $other_folder ? $height{$other} < $height{$room} : $layer{$other_folder} < $layer{$folder};
}

foreach my $path (@extension)
{
	my $file = substr $path, length 'src/';
	my $room = room_of($file);

	ok(defined $layer{ folder_of($file) } && ($rooms{ folder_of($file) } ? defined $height{$room} : $room !~ m{/}),
		"$file is in a folder with a layer") or next;
	foreach my $header (slurp_file($path) =~ /^\s*#\s*include\s*"([^"]+)"/mg)
	{
		# its path does not show its folder
		push @relative, "$file includes $header" if $header =~ m{(?:^|/)\.\.?/};
		next if !-f "src/$header" || room_of($header) eq $room || $file =~ m{^(?:idem|xact)\.c$};
		push @up, "$file includes $header" if !is_below($room, room_of($header));
	}
}
is("@up", '', 'includes go down only');
is("@relative", '', 'paths of includes begin at src/');

# Each object uses symbols only of objects that stand before it in OBJS.

my ($objs) = slurp_file('Makefile') =~ /^OBJS = ((?:.*\\\n)*.*)$/m;
my @objects = grep { $_ ne '\\' } split ' ', $objs;
my @sources = map { s/\.c$/.o/r } grep { /\.c$/ } @extension;

is("@{[ sort @objects ]}", "@{[ sort @sources ]}", 'OBJS lists every C file');

# No two files have one name: an error message or a profile names a file without its folder.
{
	my %files;

	push @{ $files{ s{.*/}{}r } }, $_ foreach @extension;
	is(join(' ', map { @$_ > 1 ? @$_ : () } values %files), '', 'names of files are unique');
}

SKIP:
{
	my ($has_nm) = eval { run_command([ 'nm', '--version' ]) };
	# which may be outside of the source
	my $build = dirname($PostgreSQL::Test::Utils::tmp_check);
	my %defined_in;
	my @calls;

	skip 'there is no nm, or nothing was built here', 1 if !$has_nm || grep { !-f "$build/$_" } @objects;
	foreach my $i (0 .. $#objects)
	{
		my ($symbols) = run_command([ 'nm', "$build/$objects[$i]" ]);

		$defined_in{$_} = $i foreach $symbols =~ /^\S+ [BDRT] (idem_\w+)$/mg;
		push @calls, map { [ $i, $_ ] } $symbols =~ /^ +U (idem_\w+)$/mg;
	}
	is( join("\n",
			map { "$objects[$_->[0]] uses $_->[1]" }
			grep { ($defined_in{ $_->[1] } // -1) > $_->[0] } @calls),
		'', 'calls go down only');
	cmp_ok(scalar(@calls), '>', 300, 'there are calls to look at');
}

# A program is built with libpq and the C library alone.

is(join(' ', grep { slurp_file($_) =~ /#\s*include\s*"(?!libpq-fe\.h|common\.h|idem_move\.h|idem_cutover\.h)/ } @programs),
	'', 'programs include no header of the server');

# Files have at most 1,200 lines, functions at most 120.  The name of a function that other
# files call begins with that of its file, and a static function has a name of two words or
# more, so that it can be searched for.

my (@long, @names);

foreach my $path (@extension, @programs)
{
	my $text = slurp_file($path);
	my ($file) = $path =~ m{([^/]+)\.\w$};

	push @long, $path if ($text =~ tr/\n//) > 1200;
	while ($text =~ /^([^\n#;=]*)\n(\w+)(\([^;{}]*?\)\n\{\n.*?^\}\n)/msg)
	{
		my ($type, $name, $lines) = ($1, $2, $3 =~ tr/\n//);
		my $is_sql = $text =~ /^IDEM_FUNCTION\(\Q$name\E\b/m;

		push @long, "$name in $path" if $lines > 120;
		next if $path =~ /\.h$/ || $is_sql || $name eq '_PG_init';
		my $prefix = $path =~ m{^src/bin/} ? $file : "idem_$file";

		next if $path =~ m{^src/bin/} && $name eq 'main';
		push @names, "$name in $path" if $name !~ ($type =~ /\bstatic\b/ ? qr/_/ : qr/^\Q$prefix\E/);
	}
}
is("@long", '', 'no file and no function is too long');
is("@names", '', 'names of functions');

# Only compat.h tests the version of the server.

is(join(' ', grep { !m{/compat\.h$} && slurp_file($_) =~ /PG_VERSION_NUM/ } @extension, @programs),
	'', 'PG_VERSION_NUM stands in compat.h only');

# Comments and manual name the actor.

my $vague = qr/\b(?:whoever|somebody|nobody|to be had|for ever|what has been|as it were)\b/i;

is(join(' ', grep { slurp_file($_) =~ $vague } @extension, @programs, glob('src/sql/*.sql *.md src/*.md doc/*.md')),
	'', 'no vague actors');

# With standard_conforming_strings = off a backslash in a plain literal has another meaning, and the
# server parses an install or update script before a SET in it counts.  E'' and $$ keep theirs.

my @backslashes;
foreach my $path (glob('src/sql/*.sql idem--*--*.sql'))
{
	# psql, not the server, reads the first lines
	my $text = slurp_file($path) =~ s/^\\echo .*$//mr;

	# comments, names, dollar quotes and E'' are skipped whole; what is left is a plain literal
	while ($text =~ m{--[^\n]*|/\*.*?\*/|"[^"]*"|(\$\w*\$).*?\1|\bE'(?:[^'\\]|\\.|'')*'|('(?:[^']|'')*')}sgi)
	{
		my $literal = $2 // '';

		push @backslashes, "$path: $literal" if index($literal, '\\') >= 0;
	}
}
is(join("\n", @backslashes), '', 'no plain literal of a script has a backslash');

# The queries for exporters know every state of the launcher, in its order.

my ($states) = slurp_file('src/stats/views.c') =~ /^static const char \*const state_names\[\] = \{\s*(.*?)\};/ms;

$states =~ tr/"/'/;
foreach my $file ('doc/monitoring/idem_server.collector.yml', 'doc/monitoring/postgres_exporter_queries.yaml')
{
	like(slurp_file($file), qr/\QARRAY[$states], state\E/, "states of the launcher in $file");
}

# The contract lists the functions and relations of each set of privileges, but for those
# of idem_internal.

my $sql = join '', map { slurp_file($_) } glob('src/sql/*.sql');
my %set_of;

while ($sql =~ /^-- set: (.*)\nCREATE \w+ (\w+)\.(\w+)/mg)
{
	my ($sets, $schema, $name) = ($1, $2, $3);

	$name =~ s/^idem_//;
	push @{ $set_of{$_} }, $name foreach $schema eq 'idem_internal' ? () : split /, /, $sets;
}
foreach my $set ('app', 'monitor', 'admin')
{
	my ($row) = slurp_file('doc/contract.md') =~ /^\| `$set` \| (.*) \|$/m;
	my @names = map { s/^idem[._]//r } ($row // '') =~ s/^as `app` and `monitor`, and //r =~ s/as `monitor`, and //r =~ /\b([a-z_.]{3,})\b/g;

	is("@{[ sort @names ]}", "@{[ sort @{ $set_of{$set} } ]}", "the contract lists the set $set");
}

# doc/reference.md has every function, with its arguments and the columns of its row.  An
# ellipsis stands for the other arguments.

my %columns_of;

sub names_of
{
	my ($list) = @_;

	return map { /^\s*(?:INOUT |OUT )?"?(\w+)/ ? $1 : () } split /,/, $list;
}

$columns_of{$1} = join ', ', names_of($2) while $sql =~ /^CREATE TYPE (idem\.\w+) AS \((.*?)\);$/msg;

my $reference = slurp_file('doc/reference.md');
my %told;

while ($reference =~ /`(idem_\w+)\(([^`)]*)\)`(?: → `([\w, ]+)`)?/g)
{
	push @{ $told{$1} }, [ $2, $3 ];
}
while ($sql =~ /^CREATE (FUNCTION|PROCEDURE) pg_catalog\.(\w+)\((.*?)\)\n(?:RETURNS (?:SETOF )?([^\n]*)|LANGUAGE)/msg)
{
	my ($kind, $name, $list, $result) = ($1, $2, $3, $4 // '');
	my $columns = $columns_of{$result}
	  // join ', ', names_of($result =~ /^TABLE \((.*)\)$/ ? $1 : join ',', grep { /OUT / } split /,/, $list);

	# commands of the doctor and of the report call these
	next if $name =~ /^idem_(?:clock|visible.*)$/;
	ok($told{$name}, "doc/reference.md has $name()") or next;
	foreach my $row (@{ $told{$name} })
	{
		my ($shown, $shown_columns) = @$row;
		my @shown = map { s/ = .*//r } split /, /, $shown;
		my @declared = names_of($list);

		if (@shown && $shown[-1] eq '…')
		{
			pop @shown;
			$#declared = $#shown;
		}
		is("@shown", "@declared", "doc/reference.md: arguments of $name()");
		is($shown_columns // $columns, $columns, "doc/reference.md: columns of $name()") if $columns ne '';
	}
}

# On the pages for developers every name in backticks exists: a file or folder as the end of a
# path, any other word in the code, and not in a comment only.  For src/README.md, the code is
# that of src.

my %exception = (
	(map { $_ => 'a run makes it' } 'build/', 'src/declared.h', 'regression.diffs', 'output_iso/regression.diffs',
		'tmp_check/log/', 'pg_stat/idem.stat', 'contrib_regression'),
	(map { $_ => 'of PostgreSQL or another program' } '--without-icu', '--enable-tap-tests', 'src/test/isolation', '/tmp',
		'callgrind_annotate', 'git', 'grep', 'df'),
	(map { $_ => 'stands for other names' } 'idem--OLD--NEW.sql', 'line_NAME', 'idem_<file>_<verb>'),
	(map { $_ => 'the end of names' } '.spec', '.pl', '*store.c', '*.sql'));
my (%path_end, %word, %word_of_src, @dead);

find({ no_chdir => 1,
	preprocess => sub { grep { !/^(?:\.git|node_modules|tmp_check.*|\.cache|results)$/ } @_ },
	wanted => sub {
		my $path = s{^\./}{}r;

		for (my $end = $path;; )
		{
			$path_end{$end} = $path_end{"$end/"} = 1;
			$end =~ s{^[^/]+/}{} or last;
		}
		return if !-f || $path !~ m{^(?:(?:src|sql|test)/.*\.(?:c|h|def|sql|awk|p[lm]|sh|spec)|Makefile)$} || $path =~ /002_source/;
		my $text = slurp_file($path);

		$text =~ s{/\*.*?\*/}{}sg if $path =~ /\.[ch]$/;
		$text =~ s{(?:^|\s)(?:--|#) [^\n]*}{}sg if $path !~ /\.[ch]$/;
		foreach my $name ($text =~ /\w+/g)
		{
			$word{$name} = 1;
			$word_of_src{$name} = 1 if $path =~ m{^src/|^Makefile};
		}
	} }, '.');

foreach my $page ('src/README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'SECURITY.md',
	glob('doc/protocol.md doc/*-protocol.md doc/decisions/*.md'))
{
	my $text = slurp_file($page) =~ s/^```.*?^```//msgr;
	my $words = $page eq 'src/README.md' ? \%word_of_src : \%word;

	foreach my $span ($text =~ /`([^`]+)`/g)
	{
		next if $exception{$span};
		if ($span =~ m{^[\w./-]+$} && $span =~ m{/|\.(?:c|h|sql|p[lm]|sh|spec|md|awk)$})
		{
			push @dead, "$page: $span" if !$path_end{$span};
		}
		else
		{
			push @dead, map { "$page: $_" } grep { !$words->{$_} && !$exception{$_} && !/^[A-Z]\d+$/ } $span =~ /[A-Za-z_]\w*/g;
		}
	}
}
is(join("\n", @dead), '', 'the pages for developers name what exists');

# The table of files in src/README.md has every C file, and each flow begins in the file that it says.

my $readme = slurp_file('src/README.md');
my (@listed, @wrong, $folder);

while ($readme =~ /^\| (?:`([\w.\/]+)` )?\| ((?:`[\w.]+`(?:, )?)+) \|/mg)
{
	my $files = $2;

	$folder = $1 if defined $1;
	push @listed, map { "$folder/$_" =~ s{^\./}{}r } grep { /\.c$/ } $files =~ /`([^`]+)`/g;
}
my %times = map { s{^src/}{}r => 1 } grep { /\.c$/ } @extension, @programs;

$times{$_}-- foreach @listed;
is(join(' ', grep { $times{$_} } sort keys %times), '', 'the table of files lists every C file once, and no other');
while ($readme =~ /`(\w+)\(\)` in `([\w\/]+\.c)`/g)
{
	push @wrong, "$1 in $2" if !-f "src/$2" || slurp_file("src/$2") !~ /^(?:IDEM_FUNCTION\()?$1\b/m;
}
is("@wrong", '', 'each flow begins where src/README.md says');

# Every rule of the contract stands in the source, in a test, and in the table
# of src/README.md.  The functions that the table names have the rule in the
# comment above them.

my @rules = slurp_file('doc/contract.md') =~ /^\*\*([AKLJMTWSHV]\d+) /mg;
my $source = join '', map { slurp_file($_) } @extension, @programs, glob('src/sql/*.sql');
my $tests = join '', map { slurp_file($_) } glob('sql/*.sql test/isolation/specs/*.spec test/t/*.pl');
my %row = slurp_file('src/README.md') =~ /^\| ([AKLJMTWSHV]\d+) (\|.*\|)$/mg;

cmp_ok(scalar(@rules), '>=', 54, 'the contract has rules');
is(join(' ', grep { $source !~ /\b$_\b/ } @rules), '', 'every rule stands in src/');
is(join(' ', grep { $tests !~ /\b$_\b/ } @rules), '', 'every rule stands in a test');
is("@{[ sort keys %row ]}", "@{[ sort @rules ]}", 'src/README.md has a row for every rule');

# Does the comment above the function name the rule?  A view has no such comment.
my $all_c = join "\n", map { slurp_file($_) } @extension, @programs;

sub names_rule
{
	my ($function, $rule) = @_;

	my @comments = $all_c =~ m{/\*((?:(?!\*/).)*)\*/\n[^\n{};]*\n\Q$function\E\(}sg;

	return scalar grep { /\b$rule\b/ } @comments;
}

foreach my $rule (@rules)
{
	my (undef, $functions, $names) = split /\|/, $row{$rule} // '||';
	my ($file, @missing);

	foreach my $name (($functions // '') =~ /`([^`]+)`/g)
	{
		if ($name =~ /\.sql$/)
		{
			$file = "src/$name";
			push @missing, $name if !-f $file;
		}
		elsif (defined $file && -f $file ? slurp_file($file) !~ /\b\Q$name\E\b/ : !names_rule($name, $rule))
		{
			push @missing, $name;
		}
	}
	foreach my $name (($names // '') =~ /`([^`]+)`/g)
	{
		my ($path) = grep { -f } $name, "test/isolation/specs/$name", "test/t/$name";

		push @missing, $name if !defined $path || slurp_file($path) !~ /\b$rule\b/;
	}
	is("@missing", '', "src/README.md: functions and tests of $rule");
}

done_testing();
