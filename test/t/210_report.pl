# The page of idem_report() in a browser (H2): headless Chromium renders it without a message
# on its console, without a script and without a request, in the light and in the dark, and no
# wider than a phone, whatever the names in it are.
#
# Where there is no Chromium, the page is made and not rendered.  make report-picture installs it.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('report', conf => "shared_preload_libraries = 'idem'\n");
my $dir = PostgreSQL::Test::Utils::tempdir;
my $chromium = $ENV{CHROMIUM} // 'chromium';
my $has_chromium = eval { run_command([ $chromium, '--version' ]); 1 };

# a page as a user makes it
sub page
{
	my ($file, $db, $call) = @_;

	$node->command_ok([ 'psql', '-XAtc', "SELECT $call", '-d', $node->connstr($db), '-o', "$dir/$file" ],
		"$file: psql -XAtc 'SELECT $call'");
	return slurp_file("$dir/$file");
}

# what shoot.py says of each view
sub renders
{
	my ($file, $title) = @_;

  SKIP:
	{
		skip "there is no $chromium (Debian: chromium; make report-picture installs it)", 5 if !$has_chromium;
		my @views = qw(1200x900-light 1200x900-dark 390x844-light);
		my ($out, $err) = run_command([ '/usr/bin/python3', 'test/report/shoot.py', "$dir/$file", map { "$_=-" } @views ]);
		my @lines = split /\n/, $out;

		diag($err) if $err ne '';
		is(scalar(@lines), 3, "$file: every view was rendered");
		like($lines[$_], qr/^\Q$views[$_]: idem: $title: Health; \E.*; Keys: background .*: ok$/, "H2: $file, $views[$_]")
		  foreach 0 .. $#views;
		my %background = map { /^\S+-(\w+): .* background (.*): / } @lines;
		isnt($background{light}, $background{dark}, "$file: the dark is another colour");
	}
	return;
}

my $empty = page('empty.html', 'postgres', 'pg_catalog.idem_report()');

like($empty, qr{^<!DOCTYPE html>.*</html>\n$}s, 'one page');
renders('empty.html', 'postgres');

# a day of a shop
$node->safe_psql('postgres', 'CREATE DATABASE shop');
$node->command_ok(
	[ 'psql', '-X', '-q', '-f', 'test/report/demo.sql', '-o', '/dev/null', '-d', $node->connstr('shop') ], 'demo.sql');
unlike(page('shop.html', 'shop', 'pg_catalog.idem_report()'), qr/payout:2211/, 'H2: no key');
like(page('keys.html', 'shop', 'pg_catalog.idem_report(keys => true)'), qr/payout:2211/, 'H2: keys that were asked for');
renders('shop.html', 'shop');
renders('keys.html', 'shop');

# hostile and long names; a script that runs sets window.captured
my $evil = q{</title></style><script>captured=1</script><img src=x onerror="captured=1">'&lt;};
my $long = 'x' x 200;

$node->safe_psql(
	'postgres', qq{
	SELECT idem_enqueue(q, to_jsonb(q), q) FROM unnest(ARRAY[\$\$$evil\$\$, '$long']) AS q;
	SELECT job_id FROM unnest(ARRAY[\$\$$evil\$\$, '$long']) AS q, idem_fetch(q, lease => '1 h', worker => q);
	SELECT idem_enqueue(q, to_jsonb(q), q) FROM unnest(ARRAY[\$\$$evil\$\$, '$long']) AS q;
	SELECT idem_fail(job_id, token, q || q, dead => true) FROM unnest(ARRAY[\$\$$evil\$\$, '$long']) AS q, idem_fetch(q);
	SET idem.clock_offset = '-1 h';
	SELECT idem_lease(q, '1 s', worker => q, on_expiry => 'park', scope => q) FROM unnest(ARRAY[\$\$$evil\$\$, '$long']) AS q});
like(page('hostile.html', 'postgres', 'pg_catalog.idem_report(keys => true)'), qr/captured=1/, 'there are hostile names');
renders('hostile.html', 'postgres');

$node->stop;
log_ok($node);
done_testing();
