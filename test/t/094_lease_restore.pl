# Leases and tokens across restore.
#
# A base backup that is restored twice does not issue a token twice: the tokens of the
# second server are higher than those of the first, and these are higher than those
# that the original server issued after the backup, for keys in the backup and for
# others.  A sequence does repeat values, which proves that the test would notice.
#
# pg_dump and pg_restore copy leases unchanged: live, expired, parked,
# exhausted, finished, with token, checkpoint, worker and request.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use List::Util qw(max min);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $original = new_node('original', init => { allows_streaming => 1 });
my $dir = PostgreSQL::Test::Utils::tempdir();

# Leases these keys, which must be claimable; returns the tokens in that order
sub lease_keys
{
	my ($node, $lease, @keys) = @_;
	my @lines = split /\n/,
	  $node->safe_psql(
		'postgres',
		join ";\n",
		map { "SELECT status, token FROM idem_lease('$_', '$lease')" } @keys);

	return map { /^claimed\|(\d+)$/ ? $1 : die "not claimed: $_" } @lines;
}

sub draw
{
	my ($node) = @_;

	return join ' ', split /\n/,
	  $node->safe_psql('postgres',
		"SELECT nextval('tokens') FROM generate_series(1, 8)");
}

#
# a base backup, restored twice
#

# A lease of a microsecond has expired when the next statement begins.
my $short = '1 microsecond';
my @in_backup = map { "in the backup $_" } 1 .. 4;
my @not_in_backup = map { "not in the backup $_" } 1 .. 4;
my @all = (@in_backup, @not_in_backup);

$original->safe_psql('postgres', 'CREATE SEQUENCE tokens');
my @tokens_in_backup = lease_keys($original, $short, @in_backup);
my ($live) = lease_keys($original, '1 hour', 'live');
$original->backup('backup');

my @handed_out = lease_keys($original, $short, @all);
my $drawn = draw($original);

cmp_ok(min(@handed_out), '>', max(@tokens_in_backup, $live),
	'L2: the original hands out higher tokens after the backup');
$original->safe_psql('postgres',
	qq{SELECT idem_finish('live', '"lost"', token => $live)});
$original->stop;

my @restored;

foreach my $name ('first', 'second')
{
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init_from_backup($original, 'backup');
	$node->start;
	push @restored, $node;

	is( $node->safe_psql(
			'postgres', 'SELECT key, token FROM idem.keys ORDER BY key'),
		join("\n",
			(map { "$in_backup[$_]|$tokens_in_backup[$_]" } 0 .. $#in_backup),
			"live|$live"),
		"the $name restored server has the tokens of the backup");

	my @tokens = lease_keys($node, $short, @all);

	cmp_ok(min(@tokens), '>', max(@handed_out),
		"L2: the $name restored server hands out higher tokens than all before"
	);
	is(draw($node), $drawn,
		"a sequence of the $name restored server hands out its values again");
	push @handed_out, @tokens;

	is( $node->safe_psql(
			'postgres', qq{
			SELECT status FROM idem_lease('live', '1 min');
			SELECT idem_finish('live', '"$name"', token => $live);
			SELECT status, result FROM idem_get('live')}),
		qq{busy\nt\nfinished|"$name"},
		"L1, L3: a live lease goes on in the $name restored server");
	is( join(' ', map
			{
				sqlstate($node, "SELECT idem_finish('$all[$_]', token => $handed_out[$_])")
			} 0 .. $#all),
		join(' ', ('ID003') x @all),
		"L3: tokens of the original are stale in the $name restored server");
}

# both servers alternately
my @turns = map { lease_keys($restored[ $_ % 2 ], $short, 'turns') } 1 .. 20;

is( join(', ', map { "$turns[$_ - 1] $turns[$_]" }
		  grep { $turns[$_] <= $turns[ $_ - 1 ] } 1 .. $#turns),
	'',
	'L2: two servers that hand out tokens in turns do not fall behind');
cmp_ok($turns[0], '>', max(@handed_out), 'L2: nor behind what was before');

# A restored server whose clock is behind: only the row has the last token.
my @behind = split /\n/,
  $restored[0]->safe_psql(
	'postgres', qq{
	SET idem.clock_offset = 7200;
	SELECT token FROM idem_lease('ahead', '$short') \\gset
	SELECT :token;
	RESET idem.clock_offset;
	SELECT status FROM idem_lease('ahead', '1 min');
	SELECT idem_release('ahead', :token);
	SELECT token FROM idem_lease('ahead', '$short');
	SELECT token FROM idem_lease('ahead', '$short')});

is($behind[1], 'busy', 'L1: a lease taken by a clock that is ahead is live');
cmp_ok($behind[3], '>', $behind[0] + 1,
	'L2: tokens grow when the clock goes back, by two after a release');
cmp_ok($behind[4], '>', $behind[3], 'L2: and with each takeover');

foreach my $node (@restored)
{
	amcheck_ok($node, 'after restore in ' . $node->name);
	$node->stop;
}

#
# pg_dump and pg_restore
#

$original->start;
$original->safe_psql('postgres', 'CREATE DATABASE source');
$original->safe_psql(
	'source', q{
	CREATE EXTENSION idem;

	-- the expired ones were leased long ago, by the clock of the session
	SELECT idem_lease('live', '1 hour', request => '{"a": 1}', worker => 'w 1');
	SELECT token AS live FROM idem_get('live') \gset
	SELECT idem_checkpoint('live', :live, '{"step": 3}');
	SELECT idem_lease('bare', '1 hour');
	SELECT idem_lease('will be parked', '1 hour', on_expiry => 'park');
	SELECT idem_lease('done', '1 hour', worker => 'w 2');
	SELECT token AS done FROM idem_get('done') \gset
	SELECT idem_finish('done', '{"id": "ch_1"}', token => :done);
	SELECT idem_lease('released', '1 hour', worker => 'w 3');
	SELECT token AS released FROM idem_get('released') \gset
	SELECT idem_checkpoint('released', :released, '{"step": 1}');
	SELECT idem_release('released', :released);
	SELECT idem_claim('plain');

	SET idem.clock_offset = -3600;
	SELECT idem_lease('expired', '1 min', worker => 'w 4', max_attempts => 3);
	SELECT token AS expired FROM idem_get('expired') \gset
	SELECT idem_checkpoint('expired', :expired, '{"step": 2}');
	SELECT idem_lease('parked', '1 min', worker => 'w 5', on_expiry => 'park');
	SELECT idem_lease('parked, it did happen', '1 min', on_expiry => 'park');
	SELECT idem_lease('exhausted', '1 min', max_attempts => 1);
	SELECT idem_lease('claimed after a lease', '1 min', ttl => '1 h');
	SELECT idem_lease('gone', '1 min', ttl => '1 min');
	SET idem.clock_offset = -100;
	SELECT idem_claim('claimed after a lease', ttl => '200 s');
});

my $rows = 'SELECT k FROM idem.keys AS k ORDER BY key';
my $states = q{
	SELECT key, status, attempt, token, worker FROM idem.key_status ORDER BY key};
my $before = $original->safe_psql('source', $rows);
my $states_before = $original->safe_psql('source', $states);

# by the rules, not only the same as before
is( $original->safe_psql(
		'source', 'SELECT key, status FROM idem.key_status ORDER BY key'),
	join("\n",
		'bare|live',
		'claimed after a lease|finished',
		'done|finished',
		'exhausted|exhausted',
		'expired|expired',
		'gone|expired',
		'live|live',
		'parked|parked',
		'parked, it did happen|parked',
		'plain|finished',
		'released|expired',
		'will be parked|live'),
	'the source has leases in every state');

my %token = map { split /\|/ } split /\n/,
  $original->safe_psql('source',
	'SELECT key, token FROM idem.keys WHERE token IS NOT NULL');

$original->command_ok(
	[
		$original->installed_command('pg_dump'), '--format=custom',
		'--dbname' => $original->connstr('source'),
		'--file' => "$dir/source.dump"
	],
	'leases can be dumped');

my $target = new_node('target', extension => 0);

$target->safe_psql('postgres', 'CREATE DATABASE copy');
$target->command_ok(
	[
		$original->installed_command('pg_restore'), '--exit-on-error',
		'--dbname' => $target->connstr('copy'),
		"$dir/source.dump"
	],
	'and be restored');
is($target->safe_psql('copy', $rows),
	$before, 'all leases are there with everything about them');
is($target->safe_psql('copy', $states), $states_before, 'in the same state');

my $s = session($target, db => 'copy');

# a live lease
is( $s->query(
		q{SELECT claimed, status, token, attempt, checkpoint
		    FROM idem_lease('live', '1 min', request => '{"a": 1}', worker => 'w 2');
		  SELECT claimed, status, token, attempt, checkpoint
		    FROM idem_lease('live', '1 min', request => '{"a": 1}', worker => 'w 1')}
	),
	qq[f|busy||1|\nt|resumed|$token{live}|1|{"step": 3}],
	'L1: a live lease is live for others, and resumed by its worker');
is( $s->sqlstate(
		q{SELECT idem_lease('live', '1 min', request => '{"a": 2}', worker => 'w 1')}
	),
	'ID001',
	'K7: its request is known');
is( $s->query(q{SELECT status FROM idem_claim('live', wait => '0')}),
	'busy', 'L8: a plain claim of it gets busy');
is( $s->query(
		qq{SELECT idem_finish('live', '"done"', token => $token{live});
		   SELECT status, result FROM idem_lease('live', '1 min')}),
	qq{t\nfinished|"done"},
	'L3: the token from before the restore finishes it');

# taken over
my ($status, $attempt, $checkpoint, $token) = split /\|/,
  $s->query(
	q{SELECT status, attempt, checkpoint, token FROM idem_lease('expired', '1 min')}
  );
is( "$status $attempt $checkpoint", 'claimed 2 {"step": 2}',
	'L1, L5: an expired lease is taken over, with its checkpoint');
cmp_ok($token, '>', $token{expired}, 'L2: with a higher token');
is( $s->sqlstate(qq{SELECT idem_finish('expired', token => $token{expired})}),
	'ID003', 'L3: the earlier token is stale then');

($status, $attempt, $checkpoint, $token) = split /\|/,
  $s->query(
	q{SET idem.clock_offset = 7200;
	  SELECT status, attempt, coalesce(checkpoint, 'null'), token
	    FROM idem_lease('bare', '1 min');
	  SELECT status FROM idem_lease('will be parked', '1 min');
	  RESET idem.clock_offset});
is("$status $attempt $checkpoint",
	'claimed 2 null', 'L1: a live lease is taken over when it has expired');
like($token, qr/^\d+\nparked$/, 'L1: or parked, with on_expiry => park');
cmp_ok($1, '>', $token{bare}, 'L2: with a higher token') if $token =~ /^(\d+)/;

($status, $attempt, $checkpoint, $token) = split /\|/,
  $s->query(
	q{SELECT status, attempt, checkpoint, token FROM idem_lease('released', '1 min')}
  );
is( "$status $attempt $checkpoint", 'claimed 2 {"step": 1}',
	'L1: a released lease is claimable at once');
cmp_ok($token, '>', $token{released}, 'L2: with a higher token');

# parked, exhausted, finished
is( $s->query(
		q{SELECT status, claimed FROM idem_lease('parked', '1 min');
		  SELECT status, claimed FROM idem_claim('parked');
		  SELECT status, claimed FROM idem_lease('exhausted', '1 min');
		  SELECT status, result FROM idem_lease('done', '1 min')}),
	qq[parked|f\nparked|f\nexhausted|f\nfinished|{"id": "ch_1"}],
	'L1, L8: parked, exhausted and finished ones stay so');
is( $s->query(
		qq[SELECT idem_finish('done', '{"id": "ch_1"}', token => $token{done})]),
	'f',
	'L3: a finish can be repeated after the restore');
is( $s->query(
		qq{SELECT idem_finish('parked, it did happen', '"yes"',
							  token => $token{'parked, it did happen'});
		   SELECT status, result FROM idem_lease('parked, it did happen', '1 min');
		   SELECT idem_release('parked', $token{parked});
		   SELECT status, token > $token{parked}
		     FROM idem_lease('parked', '1 min')}),
	qq{t\nfinished|"yes"\nt\nclaimed|t},
	'L1: an operator can finish a parked one, or let it run again');
is( $s->sqlstate(qq{SELECT idem_finish('parked', token => $token{parked})}),
	'ID003', 'L3: its old token is stale then');

# rows that are no leases, but know a token
is( $s->query(
		q{SELECT status FROM idem_lease('claimed after a lease', '1 min')}),
	'finished',
	'L8: a plain claim that took over is final');
is( $s->query(
		qq{SET idem.clock_offset = 7200;
		   SELECT token AS first FROM idem_lease('claimed after a lease', '$short') \\gset
		   RESET idem.clock_offset;
		   SELECT :first > $token{'claimed after a lease'};
		   SELECT token > $token{gone}, attempt FROM idem_lease('gone', '1 min')}
	),
	"t\nt|1",
	'L2: the next lease has a higher token than the one before the claim');
$s->quit;

foreach my $node ($original, $target)
{
	$node->stop;
}
log_ok($_) foreach $original, $target, @restored;
done_testing();
