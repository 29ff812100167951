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

my @pages = grep { -f } 'README.md', glob('doc/*.md'), glob('doc/*/README.md'), glob('examples/*/README.md');
my $node = new_node('manual', conf => "shared_preload_libraries = 'idem'\nwal_level = logical\n");
my $manual = IdemManual->new(
	psql => $node->installed_command('psql'),
	host => $node->host,
	port => $node->port,
	user => $node->safe_psql('postgres', 'SELECT current_user'),
	dir => PostgreSQL::Test::Utils::tempdir());
my @not_run;

foreach my $file (@pages)
{
	my %page = $manual->page($file);

	is(join("\n", @{ $page{problems} }), '', "$file: $page{run} blocks run");
	push @not_run, map { "$file:$_->[0]: $_->[1]" } @{ $page{not_run} };
}
note $_ foreach @not_run;
cmp_ok(scalar @not_run, '<=', $limit, "at most $limit blocks are not run");
log_ok($node);

done_testing();
