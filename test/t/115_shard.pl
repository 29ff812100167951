# The map of slots on a running server: pooled sessions see a change at once (M4), and the map
# survives a crash, a standby with its promotion, dump and restore.  Two shards never accept
# the same key, and never give out the same job number (M2, M6).

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('shard', init => { allows_streaming => 1 });
my $low = '{[0,512)}';
my $high = '{[512,1024)}';

# A key of a lower and one of a higher slot.
my ($lower, $higher) = split /\|/, run(
	q{SELECT min(i) FILTER (WHERE idem_slot(i::text) < 512), min(i) FILTER (WHERE idem_slot(i::text) >= 512)
		FROM generate_series(1, 100) AS i});

# A pool of sessions, each with the map in its cache, some in a transaction that has read.

my @pool = map { session($node) } 1 .. 6;

$_->query(q{SELECT status FROM idem_claim('warm')}) foreach @pool;
$_->query('BEGIN; SELECT count(*) FROM idem.keys') foreach @pool[ 0 .. 2 ];
run(qq{SELECT idem_forget('warm'); SELECT idem_shard_set('$low', number => 0)});
is( join(' ', map { sqlstate_in($_, "SELECT idem_claim('$higher')") } @pool),
	join(' ', ('ID006') x 6),
	'M4: every session of the pool goes by the new map at its next call');
is( join(' ', map { sqlstate_in($_, "SELECT idem_enqueue('q', key => '$higher')") } @pool),
	join(' ', ('ID006') x 6),
	'M4: for jobs, too');
$_->query('ROLLBACK') foreach @pool[ 0 .. 2 ];
run(qq{SELECT idem_shard_set('{[0,1024)}', number => 0)});
is( join(' ', map { $_->query("BEGIN; SELECT status FROM idem_claim('$higher'); ROLLBACK") } @pool),
	join(' ', ('claimed') x 6),
	'M4: a slot that comes back is accepted by all');
run(qq{SELECT idem_shard_set('$low', number => 0)});

# The SQLSTATE of a statement in an open session, in a subtransaction of its own.
sub sqlstate_in
{
	my ($session, $sql) = @_;

	$session->query(
		qq{DO \$do\$ BEGIN PERFORM * FROM ($sql) AS s; PERFORM set_config('test.state', 'none', false);
		   EXCEPTION WHEN OTHERS THEN PERFORM set_config('test.state', SQLSTATE, false); END \$do\$});
	return $session->query(q{SELECT current_setting('test.state')});
}

# A crash while a change is open: the old map.

my $open = session($node);

$open->query(qq{BEGIN; SELECT idem_shard_set('{}')});
$node->stop('immediate');
$node->start;
is(run('SELECT slots, number FROM idem.shard'), "$low|0", 'a crash undoes a change that was not committed');
is(sqlstate($node, "SELECT idem_claim('$higher')"), 'ID006', 'M2: refused after the crash');

# A standby has the map; idem_get refuses there, too, and a session that is open there sees the change.

$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
my $reader = session($standby);

is(sqlstate_of_read($lower), 'none', 'standby: a key of this shard can be read');
is(sqlstate_of_read($higher), 'ID006', 'M2: standby: a key of another shard is refused');
run(qq{SELECT idem_shard_set('$high', number => 1)});
$node->wait_for_catchup($standby);
is(sqlstate_of_read($lower), 'ID006', 'M4: an open session of the standby goes by the new map');
is(sqlstate_of_read($higher), 'none', 'M4: and reads a key of the new slots');
is($reader->query('SELECT idem_slot(\'1\') BETWEEN 0 AND 1023'), 't', 'idem_slot works on a standby');
run(qq{SELECT idem_shard_set('$low', number => 0)});
$node->wait_for_catchup($standby);
$standby->promote;
is(sqlstate($standby, "SELECT idem_claim('$higher')"), 'ID006', 'M2: refused after the promotion');
is(run("SELECT status FROM idem_claim('$lower')", node => $standby), 'claimed', 'and its own keys are accepted');

sub sqlstate_of_read
{
	my ($key) = @_;

	# a DO block does not write, so it runs on a standby
	return sqlstate_in($reader, "SELECT * FROM idem_get('$key')");
}

# Dump and restore: the map, its number and the numbers of jobs go on.

my $dir = PostgreSQL::Test::Utils::tempdir();
my $other = new_node('other', extension => 0);

run(qq{SELECT idem_enqueue('q', key => '$lower'); SELECT idem_claim('$lower')});
my $map = run('SELECT jobs_from, by, slots, number, system_identifier FROM idem.shard');
my $job = run('SELECT max(job_id) FROM idem.jobs');

$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dir/dump", '-d', $node->connstr('postgres') ], 'dump');
$other->safe_psql('postgres', 'CREATE DATABASE restored');
$other->command_ok([ 'pg_restore', '-d', $other->connstr('restored'), "$dir/dump" ], 'restore');
my %restored = (node => $other, db => 'restored');

is(run('SELECT jobs_from, by, slots, number, system_identifier FROM idem.shard', %restored), $map, 'the map is restored');
is(sqlstate($other, "SELECT idem_claim('$higher')", db => 'restored'), 'ID006', 'M2: refused after the restore');
is(run("SELECT status FROM idem_claim('$lower')", %restored), 'finished', 'and a key of the dump is finished');
cmp_ok(run("SELECT job_id FROM idem_enqueue('q')", %restored), '>', $job, 'M6: numbers go on after those of the dump');
is(run(q{SELECT status FROM idem_doctor() WHERE "check" = 'shard map'}, %restored), 'warn', 'another system: the doctor warns');
is(sqlstate($other, 'SELECT idem_shard_id()', db => 'restored'), '55000', 'M8: a restored database does not pass for the original');
run('SELECT idem_shard_set(s.slots, s.by, s.number) FROM idem.shard AS s', %restored);
isnt(run('SELECT idem_shard_id()', %restored), run('SELECT idem_shard_id()'), 'M8: it gets an id of its own');
is(run(q{SELECT status FROM idem_doctor() WHERE "check" = 'shard map'}, %restored), 'ok', 'until the map is set again');

# Two shards: each key is accepted once, and no number comes twice.

new_database('one', "CREATE EXTENSION idem; SELECT idem_shard_set('$low', number => 0)");
new_database('two', "CREATE EXTENSION idem; SELECT idem_shard_set('$high', number => 1)");
my %accepted;
my @numbers;

foreach my $db ('one', 'two')
{
	$accepted{$_}++ foreach split /\n/, run(
		q{CREATE FUNCTION accepts(k text) RETURNS boolean LANGUAGE plpgsql AS $$
		  BEGIN PERFORM idem_claim(k); RETURN true; EXCEPTION WHEN SQLSTATE 'ID006' THEN RETURN false; END $$;
		  SELECT i FROM generate_series(1, 300) AS i WHERE accepts(i::text)}, db => $db);
	push @numbers, split /\n/, run(q{SELECT job_id FROM idem_enqueue_many('q', array_fill('1'::jsonb, ARRAY[300]))}, db => $db);
}
is(scalar(grep { $_ == 1 } values %accepted), 300, 'M2: every key is accepted by exactly one of two shards');
my %number = map { $_ => 1 } @numbers;
is(scalar(keys %number), 600, 'M6: the numbers of two shards do not collide');
is(sqlstate($node, "SELECT idem_cancel($numbers[0])", db => 'two'), 'ID006', 'M2: a job of the other shard');

# A database that is copied in the middle of a move is not the one that moves; a new name is no copy.

my %id = map { $_ => run('SELECT idem_shard_id()', db => $_) } 'one', 'two';
my $set = 'SELECT idem_shard_set(s.slots, s.by, s.number';

isnt($id{one}, $id{two}, 'M8: each database has an id of its own');
run("SELECT idem_shard_give('{[0,10)}', '$id{two}')", db => 'one');
run('CREATE DATABASE twin TEMPLATE one');
is(sqlstate($node, $_, db => 'twin'), '55000', "M8: refused in a copy: $_")
  foreach 'SELECT idem_shard_id()', "SELECT idem_shard_give('{[10,20)}', '$id{two}')", "SELECT idem_shard_take('{[0,10)}', 0, '$id{two}')",
  "$set) FROM idem.shard AS s", "$set, keep_id => s.database_id) FROM idem.shard AS s";
is(run(q{SELECT status, detail ~ '^a copy of database one,' FROM idem_doctor() WHERE "check" = 'shard map'}, db => 'twin'),
	'warn|t', 'H1: the doctor names the original');
run('ALTER DATABASE one RENAME TO uno');
is(run('SELECT idem_shard_id()', db => 'uno'), $id{one}, 'M8: a new name does no harm');
run("$set, force => true) FROM idem.shard AS s", db => 'twin');
is(run('SELECT given IS NULL, receiver IS NULL FROM idem.shard', db => 'twin'), 't|t', 'M8: with force a copy has no part in the move');
isnt(run('SELECT idem_shard_id()', db => 'twin'), $id{one}, 'M8: but an id of its own');
is(run(q{SELECT status FROM idem_doctor() WHERE "check" = 'shard map'}, db => 'twin'), 'ok', 'H1: and the doctor has no finding');
run("SELECT idem_shard_take('{[0,10)}', 0, '$id{two}')", db => 'uno');
# the original is gone: a copy can take its place
run("SELECT idem_shard_give('{[0,10)}', '$id{two}')", db => 'uno');
run('CREATE DATABASE heir TEMPLATE uno');
run('DROP DATABASE uno');
is(sqlstate($node, 'SELECT idem_shard_id()', db => 'heir'), '55000', 'M8: not by itself');
run("$set, keep_id => s.database_id) FROM idem.shard AS s", db => 'heir');
is(run('SELECT idem_shard_id(), given, receiver FROM idem.shard', db => 'heir'), "$id{one}|{[0,10)}|$id{two}", 'M8: and the move goes on');

log_ok($node);
log_ok($standby);
log_ok($other);

done_testing();
