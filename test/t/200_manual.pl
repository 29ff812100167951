# Every code block of the manual is run, and what it prints is what the page shows.
#
# test/perl/IdemManual.pm has the rules for authors.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemManual;
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

# Blocks that are not run, each with its reason in the page.  Raise the limit only if no
# server of this test could run the block.
my $limit = 20;

my @pages = grep { -f } 'README.md', glob('doc/*.md'), glob('doc/*/README.md'),
  'examples/README.md', glob('examples/*/README.md');
my $node = new_node('manual', conf => "shared_preload_libraries = 'idem'\nwal_level = logical\nidem.require_finish = auto\n");
my $manual = IdemManual->new(
	psql => $node->installed_command('psql'),
	host => $node->host,
	port => $node->port,
	user => $node->safe_psql('postgres', 'SELECT current_user'),
	dir => PostgreSQL::Test::Utils::tempdir());
my @not_run;

# A page that is wrong in every way: one problem per block, but for the last two.

my $wrong = PostgreSQL::Test::Utils::tempdir() . '/wrong.md';

append_to_file($wrong, <<'PAGE' =~ s/^~~~/```/mgr);
~~~sql
SELECT 1 AS a, 2 AS b;
~~~
~~~
 a | b
---+---
 1 | 3
(1 row)
~~~

~~~sql
SELECT 1 AS a;
~~~
~~~
 a
---
 1
(1 row)

 a
---
 2
(1 row)
~~~

~~~sql
SELECT 1 / 0;
~~~

Text between them.

~~~
neither output nor text
~~~

~~~bash
true
~~~

~~~sh
false
~~~

~~~conf
idem.no_such_setting = 1
~~~

~~~sql
-- session B
SELECT 1;       -- waits
~~~

<!-- setup: SELECT no_such_column -->

<!-- not run: there is a reason -->
~~~sql
SELECT no_such_column;
~~~

~~~sql
SELECT idem_finish('k') FROM idem_claim('k');
SELECT now(), 1 AS n;
~~~
~~~
             now              | n
------------------------------+---
 2026-11-18 12:00:00.12345+00 | 1
(1 row)
~~~
PAGE

my %wrong = $manual->page($wrong);

is( join(' ', map { /wrong\.md:(\d+):/ } @{ $wrong{problems} }),
	'1 11 26 32 36 40 44 48 53',
	'the test finds what is wrong');
is("@{ $wrong{not_run}[0] }", '56 there is a reason', 'and what is not run');

# The pages.

foreach my $file (@pages)
{
	my %page = $manual->page($file);

	is(join("\n", @{ $page{problems} }), '', "$file: $page{run} blocks run");
	push @not_run, map { "$file:$_->[0]: $_->[1]" } @{ $page{not_run} };
}

# The tables of doc/reference.md agree with the server: arguments of functions, settings.

my $reference = slurp_file('doc/reference.md');
my %arguments = map { split /\|/, $_, 2 } split /\n/, $node->safe_psql(
	'postgres', q{
	SELECT proname, array_to_string(proargnames[1:pronargs], ', ')
	  FROM pg_proc WHERE proname ~ '^idem_' AND pronamespace = 'pg_catalog'::regnamespace});
my (%shown, @differ);

foreach my $line (grep { /^\| `idem_/ } split /\n/, $reference)
{
	while ($line =~ /`(idem_\w+)\(([^)`]*)\)/g)
	{
		my ($name, $arguments) = ($1, $2);

		$arguments =~ s/ = (?:\w+|'[^']*')//g;
		my $is_part = $arguments =~ s/,? …$//;

		$shown{$name} = 1;
		push @differ, "$name($arguments)"
		  if ($arguments{$name} // 'none') !~ ($is_part ? qr/^\Q$arguments\E/ : qr/^\Q$arguments\E$/);
	}
}
is("@differ", '', 'doc/reference.md: functions and their arguments');
is( $node->safe_psql(
		'postgres', q{
		CREATE ROLE all_sets;
		SELECT idem_grant('all_sets', 'admin');
		SELECT string_agg(proname, ' ' ORDER BY proname) FROM pg_proc
		 WHERE proname ~ '^idem_' AND pronamespace = 'pg_catalog'::regnamespace
		   AND has_function_privilege('all_sets', oid, 'EXECUTE')
		   AND proname !~ '^idem_(checks|checks_local|citus_table|clock|key_state|visible.*|stat_.*|report_.*)$'
		   AND proname <> ALL (string_to_array('} . join(' ', sort keys %shown) . q{', ' '));
		SELECT idem_revoke('all_sets', 'admin');
		DROP ROLE all_sets}) =~ s/\s//gr,
	'', 'doc/reference.md: every function that a set grants');
is( join(' ', sort $reference =~ /^\| `(idem\.\w+)` \|/mg),
	$node->safe_psql('postgres', q{SELECT string_agg(name, ' ' ORDER BY name) FROM pg_settings WHERE name ~ '^idem[.]'}),
	'doc/reference.md: settings');
note $_ foreach @not_run;
cmp_ok(scalar @not_run, '<=', $limit, "at most $limit blocks are not run");
log_ok($node);

done_testing();
