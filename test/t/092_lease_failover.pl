# Fencing tokens across failover: a standby that has missed the last leases is
# promoted.  Every token that it issues is higher than every token issued before,
# for keys whose rows were lost and for keys that it has.
#
# Twenty times, back and forth between two servers: the old primary is rewound and
# follows the new one.  For comparison the test also uses a sequence: it returns the
# same values again, which proves that rows are lost and that the test would notice.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemFailover;
use IdemTest;
use List::Util qw(max);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $rounds = 20;
my $drawn = 8;    # values of the sequence per round

my $primary = new_node(
	'one',
	init => {
		allows_streaming => 1,
		extra => [ '--no-locale', '--encoding=UTF8', '--wal-segsize=1' ]
	},
	conf => q{
wal_log_hints = on
wal_keep_size = 64MB
min_wal_size = 2MB
synchronous_standby_names = ''
autovacuum = off
});

$primary->safe_psql('postgres', 'CREATE SEQUENCE tokens');
$primary->backup('backup');

my $standby = PostgreSQL::Test::Cluster->new('two');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

# Leases these keys one after the other; returns the tokens by key.  A lease of
# a microsecond has expired when the next statement begins.
sub lease_keys
{
	my ($node, $lease, @keys) = @_;
	my $sql = join ";\n", map
	{
		"SELECT '$_', status, coalesce(token, 0) FROM idem_lease('$_', '$lease')"
	} @keys;
	my %tokens;

	foreach my $line (split /\n/, $node->safe_psql('postgres', $sql))
	{
		my ($key, $status, $token) = split /\|/, $line;

		die "$key is $status" unless $status eq 'claimed';
		$tokens{$key} = $token;
	}
	return %tokens;
}

sub draw
{
	my ($node, $number) = @_;

	return split /\n/,
	  $node->safe_psql('postgres',
		"SELECT nextval('tokens') FROM generate_series(1, $number)");
}

my @keys = map { "key $_" } 1 .. 4;
my $short = '1 microsecond';
my $highest = 0;     # of all tokens handed out by any server
my %drawn_before;    # values of the sequence, by any server
my $reissued = 0;

my (@not_higher, @not_growing);    # should be none

# tokens that were handed out after all those that are known so far
sub add_tokens
{
	my ($round, %tokens) = @_;

	push @not_higher, map { "round $round, $_: $tokens{$_}" }
	  grep { $tokens{$_} <= $highest } sort keys %tokens;
	$highest = max($highest, values %tokens);
	return;
}

foreach my $round (1 .. $rounds)
{
	#
	# before the cut: rows that the standby has
	#

	my %streamed =
	  lease_keys($primary, $short, @keys, map { "round $round, $_" } @keys);
	my %live =
	  lease_keys($primary, '1 hour', "round $round, live", "round $round, done");

	add_tokens($round, %streamed, %live);
	$primary->wait_for_catchup($standby);

	#
	# the cut: rows that the standby has not
	#

	stop_receiving($standby);

	my %newer = lease_keys($primary, $short, @keys,
		map { "round $round, $_" } @keys);
	my %lost = lease_keys($primary, $short, map { "round $round, lost $_" } @keys);
	my $done = $live{"round $round, done"};

	# WAL is up to 32 values ahead of a sequence
	my @before = draw($primary, $drawn + 32);

	add_tokens($round, %newer, %lost);
	push @not_growing, map { "round $round, $_" }
	  grep { $newer{$_} <= $streamed{$_} } sort keys %streamed;

	# a finish that is lost, too
	$primary->safe_psql('postgres',
		qq{SELECT idem_finish('round $round, done', '"lost"', token => $done)});

	#
	# failover
	#

	$primary->stop;
	if ($round == 1)
	{
		my @token_calls = (
			q{idem_lease('new', '1 min')},
			q{idem_lease('key 1', '1 min')},
			q{idem_lease('round 1, live', '1 min')},
			qq{idem_finish('round 1, done', token => $done)},
			qq{idem_release('round 1, done', $done)},
			qq{idem_renew('round 1, done', $done, '1 min')},
			qq{idem_checkpoint('round 1, done', $done, '1')},
			qq{idem_fence('round 1, done', $done)});

		is(sqlstate($standby, "SELECT $_"),
			'25006', "K13: $_ gives 25006 on a standby")
		  foreach @token_calls;
		is( $standby->safe_psql(
				'postgres', q{
				SELECT key, state, attempt, token FROM idem.lease_status
				 WHERE key LIKE 'round 1, %e' OR key = 'key 1' ORDER BY key}),
			join("\n",
				'key 1|expired|1|' . $streamed{'key 1'},
				"round 1, done|live|1|$done",
				'round 1, live|live|1|' . $live{'round 1, live'}),
			'K13: lease_status works on a standby');
		is( $standby->safe_psql(
				'postgres', q{
				SELECT status, token FROM idem_get('round 1, live');
				SELECT status, token FROM idem_get('key 1');
				SELECT count(*) FROM idem_get('round 1, lost key 1')}),
			join("\n",
				'live|' . $live{'round 1, live'},
				'expired|' . $streamed{'key 1'}, '0'),
			'K13: idem_get shows leases on a standby');
	}

	$standby->promote;

	is( $standby->safe_psql(
			'postgres',
			"SELECT count(*) FROM idem.keys WHERE key LIKE 'round $round, lost %'"
		),
		'0',
		"round $round: the last rows were lost");
	is( $standby->safe_psql(
			'postgres',
			"SELECT key, token FROM idem.keys WHERE key LIKE 'round $round, key%' ORDER BY key"
		),
		join("\n", map { "$_|$streamed{$_}" } map { "round $round, $_" } @keys),
		"round $round: the other rows are as before the cut");

	my %after = lease_keys(
		$standby, $short, @keys,
		(map { "round $round, $_" } @keys),
		(map { "round $round, lost $_" } @keys),
		"round $round, new");

	is( join(', ', map { "$_: $after{$_}" }
			  grep { $after{$_} <= $highest } sort keys %after),
		'',
		"L2: round $round: every new token is higher than all before");
	add_tokens($round, %after);

	# tokens that the lost primary has handed out
	is( join(' ', map
			{
				sqlstate($standby, "SELECT idem_finish('$_', token => $newer{$_})")
			} sort keys %newer),
		join(' ', ('ID003') x keys %newer),
		"L3: round $round: tokens of the lost primary are stale")
	  if $round == 1;

	# a lease that had reached the standby goes on there
	is( $standby->safe_psql(
			'postgres', qq{
			SELECT status FROM idem_lease('round $round, live', '1 min');
			SELECT status FROM idem_lease('round $round, done', '1 min');
			SELECT idem_finish('round $round, done', '"again"', token => $done);
			SELECT status, result FROM idem_get('round $round, done')}),
		qq{busy\nbusy\nt\nfinished|"again"},
		"L1, L3: round $round: a lease goes on, and its token finishes it");

	# the comparison
	my @again = draw($standby, $drawn);

	$drawn_before{$_} = 1 foreach @before;
	$reissued += grep { $drawn_before{$_} } @again;
	$drawn_before{$_} = 1 foreach @again;

	follow($primary, $standby) if $round < $rounds;
	($primary, $standby) = ($standby, $primary);
}

is(join(', ', @not_higher),
	'', 'L2: every new token is higher than all earlier ones');
is(join(', ', @not_growing), '', 'L2: also on every takeover');
is( $reissued, $rounds * $drawn,
	"a sequence hands out $drawn of $drawn values again in each round");

amcheck_ok($primary, 'after the last failover');
$primary->stop;
log_ok($_) foreach $primary, $standby;
done_testing();
