# The repository agrees with itself: one version in control file, install script,
# library, META.json and CHANGELOG.md; exported symbols; lists of tests; links.

use strict;
use warnings FATAL => 'all';

use JSON::PP qw(decode_json);
use PostgreSQL::Test::Utils;
use Test::More;

my ($version) = slurp_file('idem.control') =~ /^default_version = '(.+)'$/m;
my $meta = decode_json(slurp_file('META.json'));
my $makefile = slurp_file('Makefile');
my $provided = $meta->{provides}{idem};

like($version, qr/^\d+\.\d+\.\d+$/, 'the control file has a semantic version');
is($meta->{version}, $version, 'version of META.json');
is($provided->{version}, $version, 'version of the extension in META.json');
# the install script is built, so it is not in the archive
is($provided->{file}, 'idem.control', 'META.json names the control file');
ok(-f $provided->{$_}, "META.json: $provided->{$_} is there")
  foreach qw(file docfile);
like(
	$makefile,
	qr/^DATA_built = idem--\Q$version\E\.sql$/m,
	'the Makefile builds the install script');
like(
	slurp_file('src/idem.h'),
	qr/^#define IDEM_VERSION\s+"\Q$version\E"$/m,
	'version of the library');
like(
	slurp_file('CHANGELOG.md'),
	qr/^## \Q$version\E\b/m,
	'CHANGELOG.md has a heading for the version');

# What the PGXN Meta Spec 1.0.0 requires.
ok(defined $meta->{$_}, "META.json has $_")
  foreach qw(name version abstract maintainer license provides meta-spec);
is($meta->{license}, 'postgresql', 'licence in META.json');

# The lists in the Makefile give the order.

sub listed
{
	my ($list) = @_;
	my ($names) = $makefile =~ /^$list = ((?:.*\\\n)*.*)$/m;

	return grep { $_ ne '\\' } split ' ', $names;
}

# The install script is made of the parts in src/sql.

my ($sharedir) = run_command([ 'pg_config', '--sharedir' ]);
my @parts = listed('SQL_PARTS');
my $script = join '', map { slurp_file($_) } @parts;

is("@{[ sort @parts ]}", "@{[ sort glob 'src/sql/*.sql' ]}",
	'SQL_PARTS lists src/sql/*.sql');
ok(slurp_file("$sharedir/extension/idem--$version.sql") eq $script,
	'the install script that is installed is made of its parts');

# The library exports what the server looks up by name, and nothing else.

SKIP:
{
	my ($dir) = run_command([ 'pg_config', '--pkglibdir' ]);
	my ($has_nm) = eval { run_command([ 'nm', '--version' ]) };

	skip 'there is no nm', 1 if !$has_nm;

	my ($out) = run_command([ 'nm', '-D', '--defined-only', "$dir/idem.so" ]);
	my @exported = sort map { (split ' ')[2] } split /\n/, $out;
	my @functions = $script =~ /^AS 'MODULE_PATHNAME', '(\w+)';$/mg;
	my @expected = sort qw(Pg_magic_func _PG_init idem_worker_main idem_launcher_main),
	  map { ($_, "pg_finfo_$_") } @functions;

	is("@exported", "@expected", 'exported symbols');
}

# The router on PL/Proxy: each function is routed, refused or not there, and the manual says which, and why.  (117_plproxy.pl
# compares its first two tables with the schema idem_router.)

{
	my ($section) = slurp_file('doc/scale.md') =~ /^## PL\/Proxy$(.*?)^## /ms;
	my (%told, @families);
	my @public = $script =~ /^CREATE (?:FUNCTION|PROCEDURE) pg_catalog\.(idem_\w+)/mg;

	foreach my $row ($section =~ /^\| (`idem_\w+.*?) \| \S/mg)
	{
		push @families, $row =~ /`(idem_\w+)…`/g;
		$told{$_}++ foreach $row =~ /`(idem_\w+)`/g;
	}
	my @unknown = grep { my $name = $_; !$told{$name} && !grep { index($name, $_) == 0 } @families } @public;

	cmp_ok(scalar @public, '>', 60, 'there are functions');
	is("@unknown", '', 'doc/scale.md tells whether the router has each function');
	is(join(' ', grep { my $name = $_; !grep { $_ eq $name } @public } sort keys %told), '', 'and no others');
}

# No test is left out.

sub is_listed
{
	my ($lists, $pattern) = @_;
	my @listed = map { listed($_) } split ' ', $lists;
	my @files = map { m{([^/]+)\.\w+$} } glob $pattern;

	is("@{[ sort @listed ]}", "@{[ sort @files ]}", "each of $pattern is once in $lists");
	return;
}

is_listed('REGRESS', 'sql/*.sql');
is_listed('ISOLATION ISOLATION_POINTS', 'test/isolation/specs/*.spec');
is_listed('TAP TAP_LONG', 'test/t/*.pl');

# Points, at which a test stops a backend, are not in the library that is installed.  The specs that
# need them are those that hold one.

{
	my ($dir) = run_command([ 'pg_config', '--pkglibdir' ]);
	my $library = slurp_file("$dir/idem.so");
	my $source = join '', map { slurp_file($_) } glob('src/*.c src/*/*.c src/*/*/*.c');
	my %points = map { $_ => 1 } $source =~ /\bIDEM_POINT\("([^"]+)"\)/g;
	my (@holding, %held);

	foreach my $spec (glob 'test/isolation/specs/*.spec')
	{
		my @names = slurp_file($spec) =~ /advisory_lock\(hashtext\('([^']+)'\)/g;

		push @holding, $spec =~ m{([^/]+)\.spec$} if @names;
		$held{$_}++ foreach @names;
	}
	is("@holding", "@{[ sort(listed('ISOLATION_POINTS')) ]}", 'ISOLATION_POINTS lists the specs that hold a point');
	is("@{[ sort keys %held ]}", "@{[ sort keys %points ]}", 'each point is held by a spec, and in the source');
	is("@{[ grep { index($library, $_) >= 0 } sort keys %points ]}", '', 'the library has no points');
}

# A TAP file is named by its number.

{
	my %files;

	push @{ $files{ (m{^test/t/(\d{3})_})[0] // 'none' } }, $_ foreach glob 'test/t/*.pl';
	is(join(' ', map { @$_ > 1 ? @$_ : () } values %files), '', 'the numbers of the TAP files are unique');
	ok(!$files{none}, 'each of them has one');
}

# What a change has to pass is every suite: those that test/run runs unless it is told otherwise, and the rest.

{
	my ($all) = slurp_file('test/run') =~ /^\t\tall\) printf '(.*)\\n' ;;$/m;
	my ($usual) = slurp_file('test/run') =~ /^\t\t\*\) printf '(.*)\\n' ;;$/m;

	is(join(' ', sort split ' ', $all), join(' ', sort 'long', split ' ', $usual), 'the suites of test/run');
	like(slurp_file('.ci/run'), qr/^make test SUITES=all /m, '.ci/run runs all of them');
}

# Every relative link in the documentation leads to a file, and to a heading of it.

sub markdown
{
	my $text = slurp_file(shift);

	$text =~ s/^```.*?^```$//msg;
	return $text;
}

# GitHub's rule; equal headings are numbered.
sub anchors
{
	my %seen;

	return map
	{
		my $name = lc $_;

		$name =~ s/\[([^]]*)\]\([^)]*\)/$1/g;
		$name =~ s/[^\w\- ]//g;
		$name =~ s/ /-/g;
		$seen{$name}++ ? ("$name-" . ($seen{$name} - 1) => 1) : ($name => 1)
	} markdown(shift) =~ /^#+ +(.*?) *$/mg;
}

foreach my $file (grep { -f } 'README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'SECURITY.md', 'src/README.md', glob('doc/*.md'),
	glob('doc/*/*.md'), glob('examples/*.md'), glob('examples/*/README.md'), glob('test/*/README.md'))
{
	my ($dir) = $file =~ m{^(.*/)?};
	my $text = markdown($file);
	my @broken;

	$text =~ s/`[^`\n]*`//g;
	foreach my $link ($text =~ /\]\(([^)\s]+)\)/g, $text =~ /^\[[^]]+\]: (\S+)/mg)
	{
		next if $link =~ /^\w+:/;
		my ($path, $anchor) = split /#/, $link, 2;
		my $target = $path eq '' ? $file : ($dir // '') . $path;

		push @broken, $link if !-e $target || (defined $anchor && !{ anchors($target) }->{$anchor});
	}
	is("@broken", '', "links of $file");
}

done_testing();
