# The hash of keys, and of keys of jobs, is SipHash-2-4 of UTF-8, the same on every machine and
# in every encoding: it is stored, and dumps and logical replication carry it.
#
# Here it is computed a second time, in Perl, and compared with what is stored.
# That code is checked against the test vectors of the authors: the key
# 00 01 .. 0f, and as the message the first bytes of 00 01 02 ..

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

sub add
{
	my ($left, $right) = @_;
	use integer;
	my $sum = $left + $right;
	no integer;
	return $sum & ~0;
}

sub rotate
{
	my ($word, $bits) = @_;

	return (($word << $bits) | ($word >> (64 - $bits))) & ~0;
}

sub sip_round
{
	my ($v) = @_;

	$v->[0] = add($v->[0], $v->[1]);
	$v->[1] = rotate($v->[1], 13) ^ $v->[0];
	$v->[0] = rotate($v->[0], 32);
	$v->[2] = add($v->[2], $v->[3]);
	$v->[3] = rotate($v->[3], 16) ^ $v->[2];
	$v->[0] = add($v->[0], $v->[3]);
	$v->[3] = rotate($v->[3], 21) ^ $v->[0];
	$v->[2] = add($v->[2], $v->[1]);
	$v->[1] = rotate($v->[1], 17) ^ $v->[2];
	$v->[2] = rotate($v->[2], 32);
	return;
}

sub siphash
{
	my ($key, $message) = @_;
	my ($k0, $k1) = unpack 'Q<2', $key;
	my @start = unpack 'Q>4', 'somepseudorandomlygeneratedbytes';
	my @v = ($k0 ^ $start[0], $k1 ^ $start[1], $k0 ^ $start[2], $k1 ^ $start[3]);
	my $length = length $message;
	my $padded = $message . "\0" x (7 - $length % 8) . chr($length % 256);

	foreach my $word (unpack 'Q<*', $padded)
	{
		$v[3] ^= $word;
		sip_round(\@v) foreach 1 .. 2;
		$v[0] ^= $word;
	}
	$v[2] ^= 0xff;
	sip_round(\@v) foreach 1 .. 4;
	return $v[0] ^ $v[1] ^ $v[2] ^ $v[3];
}

my @vectors = (
	[ 0, '726fdb47dd0e0e31' ],
	[ 1, '74f839c593dc67fd' ],
	[ 7, 'ab0200f58b01d137' ],
	[ 8, '93f5f5799a932462' ],
	[ 15, 'a129ca6149be45e5' ],
	[ 63, '958a324ceb064572' ]);

foreach my $vector (@vectors)
{
	my ($length, $hash) = @$vector;

	is( sprintf('%016x', siphash(pack('C*', 0 .. 15), pack('C*', 0 .. $length - 1))),
		$hash,
		"SipHash-2-4 of $length bytes in Perl");
}

# name space and name, the first one with its length
sub hash_name
{
	my ($space, $name) = @_;

	return unpack 'q',
	  pack('Q', siphash('idem.key_hash.v1', pack('V', length $space) . $space . $name));
}

my $node = new_node('hash');
my $s = session($node);

# every length of the last word, the longest ones, and bytes beyond ASCII
my @keys = (
	(map { [ 'q' x $_, 'k' ] } 1 .. 9),
	(map { [ 'queue', substr('abcdefghijklmnopq', 0, $_) ] } 1 .. 17),
	[ 'q' x 255, 'k' x 1024 ],
	[ 'q' x 254, 'k' x 255 ],
	[ "\xc3\xbc", "\xe2\x82\xac" ]);

foreach my $key (@keys)
{
	my ($queue, $name) = @$key;
	my $bytes = sub { q{convert_from('\x} . unpack('H*', $_[0]) . q{', 'UTF8')} };

	is( $s->query('SELECT idem_key_hash(' . $bytes->($name) . ', ' . $bytes->($queue) . ')'),
		hash_name($queue, $name),
		sprintf 'hash of a scope of %d bytes and a key of %d',
		length $queue,
		length $name);
	is( $s->query(
			'BEGIN; SELECT outcome FROM idem_enqueue('
			  . $bytes->($queue)
			  . ', key => '
			  . $bytes->($name)
			  . '); SELECT key_hash FROM idem.jobs; ROLLBACK'),
		"enqueued\n" . hash_name($queue, $name),
		sprintf 'hash of a queue of %d bytes and a key of %d',
		length $queue,
		length $name);
}

# what idem_retry() brings back has it as well
is( $s->query(
		q{SELECT idem_cancel(job_id), idem_retry(job_id) FROM idem_enqueue('queue', key => 'key');
		  SELECT key_hash FROM idem.jobs}),
	"t|t\n" . hash_name('queue', 'key'),
	'J8: hash of a job that was brought back');

$s->quit;

# A key beyond ASCII has the same hash in a database with another encoding.  So the key is
# found in a copy of the database with another encoding, and its work does not run again (K3).
my $umlaut = q{convert_from('\xc3bc', 'UTF8')};
$node->safe_psql('postgres', qq{CREATE DATABASE $_ TEMPLATE template0 ENCODING '$_' LOCALE 'C'})
  foreach qw(latin1 utf8 sql_ascii);
$node->safe_psql($_, 'CREATE EXTENSION idem') foreach qw(latin1 sql_ascii);
is( $node->safe_psql('latin1', "SELECT octet_length($umlaut), idem_key_hash($umlaut, $umlaut)"),
	'1|' . hash_name("\xc3\xbc", "\xc3\xbc"),
	'hash in LATIN1');
is( $node->safe_psql('sql_ascii', q{SELECT idem_key_hash(E'\\xfc')}),
	hash_name('', "\xfc"),
	'hash of bytes in SQL_ASCII');
$node->safe_psql('latin1', "SELECT claimed FROM idem_claim($umlaut, scope => $umlaut)");
$node->safe_psql('latin1', "SELECT outcome FROM idem_enqueue($umlaut, key => $umlaut)");
my $dump = $node->basedir . '/latin1.sql';
$node->command_ok([ 'pg_dump', '-f', $dump, $node->connstr('latin1') ], 'dump in LATIN1');
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', $dump, $node->connstr('utf8') ],
	'restore in UTF8');
is( $node->safe_psql('utf8', "SELECT octet_length($umlaut), status FROM idem_claim($umlaut, scope => $umlaut)"),
	'2|finished',
	'K3: the key is found in another encoding');
is( $node->safe_psql('utf8', "SELECT outcome FROM idem_enqueue($umlaut, key => $umlaut)"),
	'absorbed',
	'J1: the job is found in another encoding');

$node->stop;
log_ok($node);
done_testing();
