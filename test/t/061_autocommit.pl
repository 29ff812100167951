# K14: which claims the default of idem.require_finish reports, in each protocol that a driver may use.
# sql/require_finish.sql has the kinds of statements; this has the kinds of messages.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('autocommit', conf => 'idem.require_finish = auto');

# the default
is( run(q{SELECT idem_version() IS NOT NULL; SELECT boot_val FROM pg_settings WHERE name = 'idem.require_finish'}),
	"t\nauto", 'K14: the default');
run('CREATE TABLE other (n int)');

# Run a script of pgbench once; returns what it writes to stderr.  KEY is a new key.
my $number = 0;

sub stderr_of
{
	my ($script, $mode) = @_;
	my $file = $node->basedir . '/' . ++$number . '.sql';

	append_to_file($file, $script =~ s/KEY/'key $number'/gr);
	my ($out, $err) = run_command([
		$node->installed_command('pgbench'), '--no-vacuum', '--transactions' => 1, '--protocol' => $mode,
		'--file' => $file, '--host' => $node->host, '--port' => $node->port, 'postgres' ]);
	like($out, qr{processed: 1/1}, 'the script has run') or diag $err;
	return $err;
}

sub warnings_ok
{
	my ($script, $expected, $name, @modes) = @_;

	foreach my $mode (@modes ? @modes : ('simple', 'extended', 'prepared'))
	{
		my $err = stderr_of($script, $mode);
		my $found = () = $err =~ /WARNING:  transaction has not finished all/g;

		is($found, $expected, "K14: $name ($mode)") or diag $err;
	}
	return;
}

my $claim = "SELECT status FROM idem_claim(KEY);\n";
my $write = "INSERT INTO other VALUES (1);\n";

warnings_ok($claim, 1, 'a claim alone');
warnings_ok("$claim$write", 1, 'a claim alone, then another statement');
warnings_ok("$claim${claim}SELECT 1;\n", 1, 'a second claim that gets finished');
warnings_ok("\\set x 1\nSELECT status FROM idem_claim('k' || :x || KEY);\n", 1, 'a claim with a parameter');
warnings_ok("BEGIN;\n$claim${write}COMMIT;\n", 0, 'a claim in a block');
warnings_ok("BEGIN;\n${claim}COMMIT;\n", 0, 'a claim alone in a block');
warnings_ok("$claim${write}" =~ s/;\n(?=INSERT)/ \\; /r, 0, 'a claim and another statement in one string', 'simple');
warnings_ok("INSERT INTO other SELECT 1 FROM idem_claim(KEY) WHERE claimed;\n", 0, 'a statement that writes');

my @pipeline = ('extended', 'prepared');

warnings_ok("\\startpipeline\n$claim$write\\endpipeline\n", 0, 'a claim, then another statement of the pipeline', @pipeline);
warnings_ok("\\startpipeline\n$write$claim\\endpipeline\n", 0, 'the same, in the other order', @pipeline);
warnings_ok("\\startpipeline\n${claim}SELECT 1;\n\\endpipeline\n", 0, 'a claim, then a read', @pipeline);
warnings_ok("\\startpipeline\n$claim\\endpipeline\n", 1, 'a claim alone in a pipeline', @pipeline);
warnings_ok("\\startpipeline\nBEGIN;\n$claim${write}COMMIT;\n\\endpipeline\n", 0, 'a block in a pipeline', @pipeline);

# a job that is not ended, in each protocol
run(q{SELECT idem_enqueue_many('q', '{1, 2, 3}')});
foreach my $mode ('simple', 'extended', 'prepared')
{
	like(
		stderr_of("SELECT job_id FROM idem_fetch('q');\n", $mode),
		qr/WARNING:  transaction has not ended all jobs that it fetched without a lease/,
		"K14: a fetch alone ($mode)");
}

$node->stop;
log_ok($node);

done_testing();
