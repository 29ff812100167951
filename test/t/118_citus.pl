# M7: idem on Citus, a coordinator and two workers.  What doc/scale.md promises: the delegated
# set-up runs nothing twice, also while a shard moves; each mistake gives the error of the table
# there, and those of which it says "no error" have the consequence that it says.
#
# It needs an installation that has Citus.  Debian has none, so CI skips it; sql/citus.sql checks
# there how the tables of Citus are read.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($sharedir) = run_command([ 'pg_config', '--sharedir' ]);

plan skip_all => 'Citus is not installed' if !-f "$sharedir/extension/citus.control";

my $conf = q{
shared_preload_libraries = 'citus,idem'
citus.node_conninfo = 'sslmode=prefer'
citus.shard_count = 8
citus.max_background_task_executors = 1
client_min_messages = warning
max_worker_processes = 16
max_connections = 60
idem.cleanup = off
};
my ($coordinator, $w1, $w2) =
  map { new_node($_, conf => $conf, extension => 0, init => { allows_streaming => 1 }) }
  qw(coordinator w1 w2);
my @workers = ($w1, $w2);
my @nodes = ($coordinator, @workers);

# Blocks of the manual, by a word in them.
my $page = join '', map { slurp_file($_) } 'doc/scale.md';

sub manual
{
	my ($word) = @_;
	my ($block) = grep { /\Q$word\E/ } $page =~ /^```sql\n(.*?)^```/msg;

	return $block // die "no block with $word";
}

sub on
{
	my ($on, $sql) = @_;

	return run($sql, node => $on);
}

sub place_of
{
	my ($of) = @_;

	return sprintf "'%s', %d", $of->host, $of->port;
}

# Citus uses TCP/IP for connections of a node to itself, unless told otherwise.
on($_, sprintf q{ALTER SYSTEM SET citus.local_hostname = '%s'}, $_->host) foreach @nodes;
on($_, 'SELECT pg_reload_conf()') foreach @nodes;
on($_, 'CREATE EXTENSION citus') foreach @nodes;
on($coordinator, sprintf 'SELECT citus_set_coordinator_host(%s)', place_of($coordinator));
on($coordinator, sprintf 'SELECT citus_add_node(%s)', place_of($_)) foreach @workers;

my @version = (on($coordinator, 'SHOW server_version'), on($coordinator, 'SELECT citus_version()'));

note "PostgreSQL $version[0], $version[1]";

#
# The set-up of the manual
#

on($coordinator, manual('create_distributed_function') =~ s/SELECT create_distributed_function.*//sr);
is(on($_, q{SELECT extname FROM pg_extension WHERE extname = 'idem'}), 'idem', 'Citus creates the extension on a worker')
  foreach @workers;

# Keys of tenants; the slot of the first is on the first worker, that of the second on the second.
my $holder = q{SELECT p.groupid FROM pg_dist_placement AS p
				WHERE p.shardid = get_shard_id_for_distribution_column('payments', %s)};
my @group = map { on($_, 'SELECT groupid FROM pg_dist_local_group') } @workers;

sub tenants_of
{
	my ($group, $n) = @_;
	my $slot = q{idem_slot('any', scope => 't' || i)};

	return split /\n/, on($coordinator,
		sprintf "SELECT 't' || i FROM generate_series(1, 2000) AS i WHERE ($holder) = $group ORDER BY i LIMIT $n", $slot);
}

sub slot_of
{
	my ($tenant) = @_;

	return on($coordinator, "SELECT idem_slot('any', scope => '$tenant')");
}

sub shard_of
{
	my ($slot) = @_;

	return on($coordinator, "SELECT get_shard_id_for_distribution_column('payments', $slot)");
}

sub call_of
{
	my ($tenant, $id, %opt) = @_;

	return sprintf "SELECT %s(%d, '%s', '%s', 1)", $opt{function} // 'pay', $opt{slot} // slot_of($tenant), $tenant, $id;
}

sub pay
{
	my ($tenant, $id, %opt) = @_;

	return on($opt{node} // $coordinator, call_of($tenant, $id, %opt));
}

sub state_of
{
	my ($tenant, $id, %opt) = @_;

	return sqlstate($opt{node} // $coordinator, call_of($tenant, $id, %opt));
}

sub rows
{
	my ($id) = @_;

	return on($coordinator, "SELECT count(*) FROM payments WHERE id = '$id'");
}

my @near = tenants_of($group[0], 6);
my @far = tenants_of($group[1], 6);

# A worker without a map, as Citus leaves a new one.

is(sqlstate($w1, q{SELECT idem_claim('k')}), 'ID006', 'M7: a worker without a map refuses a key');
is(sqlstate($w1, q{SELECT idem_enqueue('q')}), 'ID006', 'M7: and a job');
is(doctor('shard map', node => $w1), 'fail', 'and the doctor says so');
is(doctor('shard map', node => $coordinator), 'ok', 'the doctor: the coordinator has a map');
on($coordinator, 'SELECT idem_shard_set(NULL)');
is(doctor('shard map', node => $coordinator), 'fail', 'the doctor fails: Citus without a map on the coordinator');
is(pay($near[0], 'at coordinator'), 'claimed', 'no map on the coordinator: it claims keys itself, without an error');
is(on($coordinator, 'SELECT count(*) FROM idem.keys'), '1', 'as its table shows');
on($coordinator, q{SELECT idem_forget('pay:at coordinator', '} . $near[0] . q{'); DELETE FROM payments});
on($coordinator, q{SELECT idem_shard_set('{}', by => 'scope')});
on($_, manual('pg_dist_placement')) foreach @workers;
is( on($w1, 'SELECT (SELECT sum(upper(r) - lower(r)) FROM unnest(slots) AS r) > 0 FROM idem.shard')
	  . on($coordinator, 'SELECT count(*) FROM generate_series(0, 1023) AS s WHERE ' . "($holder)" =~ s/%s/s/r . ' IN (1, 2)'),
	't1024', 'the maps share the slots');
is(on($w1, q{SELECT slots FROM idem.shard}) eq on($w2, q{SELECT slots FROM idem.shard}), '', 'with different slots');
is(doctor('shard map', node => $_), 'ok', 'the doctor: the worker has a map') foreach @workers;

# A function that is not delegated.

is(state_of($near[0], 'not delegated'), 'ID006', 'a function that is not distributed: ID006 on the coordinator');
on($coordinator, manual('create_distributed_function') =~ s/.*(?=SELECT create_distributed_function)//sr);
is(state_of($near[0], 'x', slot => slot_of($near[0])), '00000', 'the distributed function works');
foreach my $sql (
	"DO \$\$ BEGIN PERFORM pay(" . slot_of($near[0]) . ", '$near[0]', 'y', 1); END \$\$",
	"SELECT pay(" . slot_of($near[0]) . ", '$near[0]', i::text, 1) FROM generate_series(1, 2) AS i",
	"SELECT pay(idem_slot('any', scope => '$near[0]'), '$near[0]', 'y', 1)",
	"INSERT INTO payments SELECT 1, 'a', pay(" . slot_of($near[0]) . ", '$near[0]', 'y', 1)")
{
	is(sqlstate($coordinator, $sql), 'ID006', "not delegated: $sql");
}
is(sqlstate($coordinator, qq{SELECT idem_claim('k', scope => '$near[0]')}), 'ID006', 'a claim on the coordinator');
is(on($coordinator, 'SELECT count(*) FROM idem_fetch(\'q\')'), '0', 'a fetch on the coordinator: no rows');

# Delegated.

foreach my $i (0, 1)
{
	my ($tenant, $worker) = ($i == 0 ? $near[1] : $far[1], $workers[$i]);

	is(pay($tenant, "order $i"), 'claimed', 'a delegated call claims');
	is(pay($tenant, "order $i"), 'finished', 'and the second answers');
	is(rows("order $i"), '1', 'one row');
	is(on($worker, "SELECT count(*) FROM idem.keys WHERE key = 'pay:order $i'"), '1', 'the key is on the worker of the row');
	is(pay($tenant, "order $i", node => $_), 'finished', 'the call works on a worker, too') foreach @workers;
}
is(on($coordinator, manual('SELECT pay(:slot') =~ s/.*\\gset\n//r =~ s/:slot/slot_of('tenant 7')/er), 'claimed', 'the call of the manual');
is( on($coordinator, "BEGIN; " . call_of($near[1], 'both') . '; ' . call_of($far[1], 'both') . '; ROLLBACK'),
	"claimed\nclaimed", 'two delegated calls in a transaction');
is(pay($near[1], 'both') . pay($far[1], 'both'), 'claimedclaimed', 'which has rolled back');
is(on($coordinator, 'SELECT count(*) FROM idem.keys'), '0', 'the coordinator has no key');
is(state_of($near[1], 'order 3', slot => slot_of($far[1])), 'ID006', 'the slot of another worker: ID006');
on($coordinator, q{
	CREATE FUNCTION stray(slot integer, tenant text, id text, other integer) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM idem_claim(id, scope => tenant);
		INSERT INTO payments VALUES (other, tenant, id, 1);
		RETURN 'done';
	END $$;
	SELECT create_distributed_function('stray(integer, text, text, integer)', 'slot',
		colocate_with => 'payments', force_delegation => true)});
is( sqlstate($coordinator, sprintf "SELECT stray(%d, '%s', 'stray', %d)", slot_of($near[1]), $near[1], slot_of($far[1])),
	'0A000', 'force_delegation: a row of another shard is refused');
is(rows('stray'), '0', 'and there is none');

# Jobs: enqueued by a delegated function, fetched on the worker.

on($coordinator, q{
	CREATE FUNCTION later(slot integer, tenant text, id text) RETURNS bigint LANGUAGE sql AS $$
		SELECT job_id FROM idem_enqueue('q', key => 'mail:' || id, scope => tenant)
	$$;
	SELECT create_distributed_function('later(integer, text, text)', 'slot', colocate_with => 'payments', force_delegation => true)});
my $enqueue = sprintf "SELECT later(%d, '%s', 'a')", slot_of($far[1]), $far[1];
my $job = on($coordinator, $enqueue);

is($job % 1024, slot_of($far[1]), 'the number of the job has the slot of the tenant');
is(on($coordinator, $enqueue), $job, 'a duplicate is absorbed');
is(on($w2, q{SELECT job_id FROM idem_fetch('q', lease => '1 min')}), $job, 'it is fetched on the worker');
is(sqlstate($_, "SELECT idem_complete($job, 1)"), 'ID006', 'and refused elsewhere') foreach $coordinator, $w1;

#
# A shard moves while duplicates are sent: no second run.  Each operation is called by two sessions
# at once, and called again until both have an answer that is final.
#

my @sessions = map { session($coordinator) } 1, 2;
my (%refused, %claimed, %calls);
my @tenants = (@near, @far);
my %slot = map { $_ => slot_of($_) } @tenants;
my ($moving) = grep { shard_of($slot{$_}) != shard_of($slot{ $near[0] }) } @near;
my $shard = shard_of($slot{$moving});

# Returns the operations that have no final answer.
sub send_all
{
	my @open;

	foreach my $operation (@_)
	{
		my ($tenant, $id) = @$operation;
		my $final = 1;

		$_->send(call_of($tenant, $id, slot => $slot{$tenant})) foreach @sessions;
		foreach my $session (@sessions)
		{
			my $answer = $session->receive;

			$calls{$id}++;
			$claimed{$id} += $answer eq 'claimed' ? 1 : 0;
			next if $session->{sqlstate} eq '00000';
			$refused{ $session->{sqlstate} }++;
			$final = 0;
		}
		push @open, $operation unless $final;
	}
	return @open;
}

sub operations
{
	my ($prefix) = @_;

	return map { [ $_, "$prefix $_" ] } @tenants;
}

# Moves the keys and jobs of a shard, as the manual says.
sub move_keys
{
	my ($from, $to, $moved) = @_;
	my $slots = on($from, "SELECT range_agg(int4range(s, s + 1)) FROM generate_series(0, 1023) AS s
							WHERE get_shard_id_for_distribution_column('payments', s) = $moved");

	local $ENV{PATH} = $from->config_data('--bindir') . ":$ENV{PATH}";
	$from->command_ok(
		[
			'idem_move',
			'--from' => $from->connstr('postgres'),
			'--to' => $to->connstr('postgres'),
			'--slots' => $slots
		],
		'idem_move moves the keys of a shard');
	return;
}

sub move_shard
{
	my ($moved, $from, $to) = @_;

	on($coordinator, sprintf "SELECT citus_move_shard_placement(%d, %s, %s, 'block_writes')", $moved, place_of($from), place_of($to));
	return;
}

my @open = send_all(operations('first'));
is(scalar @open, 0, 'every operation has an answer');
move_shard($shard, $w1, $w2);
is(state_of($moving, "first $moving"), 'ID006', 'the shard has moved, its keys have not: ID006 for a key that was used');
is(state_of($moving, 'unseen'), 'ID006', 'and for a new one');
@open = send_all(operations('first'), operations('second'));
cmp_ok(scalar @open, '>', 0, 'operations are refused while the keys are not there: ' . scalar @open);
move_keys($w1, $w2, $shard);
@open = send_all(@open, operations('third'));
is(scalar @open, 0, 'with the keys every operation has an answer');
@open = send_all(operations('first'), operations('second'), operations('third'));
is(scalar @open, 0, 'also when it is sent again');
is(join(' ', keys %refused), 'ID006', "refused with ID006 only: $refused{ID006} of " . eval { my $n = 0; $n += $_ foreach values %calls; $n });
is(scalar(grep { $claimed{$_} != 1 } keys %claimed), 0, 'M7: each of ' . scalar(keys %claimed) . ' operations was claimed once');
is( on($coordinator, q{SELECT count(*), count(DISTINCT id) FROM payments WHERE id ~ '^(first|second|third) '}),
	join('|', (scalar keys %claimed) x 2), 'M7: and has run once');
is(doctor('foreign rows', node => $_), 'ok', 'no row was left behind') foreach @workers;
$_->quit foreach @sessions;

# What the guard does not see: a map that is changed without the keys.

on($w1, "SELECT idem_shard_set(s.slots + '{[$slot{$moving},$slot{$moving}]}', s.by, s.number) FROM idem.shard AS s");
move_shard($shard, $w2, $w1);
is(pay($moving, "first $moving"), 'claimed', 'the map without the keys: no error');
is(rows("first $moving"), '2', 'and a second run, as the manual says');
on($w1, "SELECT idem_shard_set(s.slots - '{[$slot{$moving},$slot{$moving}]}', s.by, s.number, true) FROM idem.shard AS s;
		 DELETE FROM idem.keys WHERE scope = '$moving'");
move_shard($shard, $w1, $w2);
is(pay($moving, "first $moving"), 'finished', 'back where the keys are');

#
# A commit on two nodes that is not one: a transaction on the first worker claims a key there and writes
# a row of the other one.  The commit of the other worker waits for a standby that does not exist, and
# the first worker crashes: the gap between the two commits.
#

sub crash_in_commit
{
	my ($id, $on, $sql) = @_;
	my $session = session($on);

	on($w2, q{ALTER SYSTEM SET synchronous_standby_names = 'nobody'; SELECT pg_reload_conf()});
	$session->send($sql);
	$w2->poll_query_until('postgres', q{SELECT count(*) > 0 FROM pg_stat_activity
										  WHERE wait_event = 'SyncRep' AND query ~ '^(COMMIT|PREPARE)'})
	  or die 'the other node does not commit';
	$w1->stop('immediate');
	$session->lost;
	on($w2, q{ALTER SYSTEM RESET synchronous_standby_names; SELECT pg_reload_conf()});
	$w2->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'})
	  or die 'the other node still waits';
	$w1->start;
	on($w1, 'SELECT recover_prepared_transactions()');
	return rows($id) . ' ' . on($w1, "BEGIN; SELECT status FROM idem_claim('$id', scope => '$near[0]'); ROLLBACK");
}

# A transaction on the worker, with a row of each of these slots.
sub own_transaction
{
	my ($id, @slots) = @_;

	return "BEGIN; SELECT idem_claim('$id', scope => '$near[0]'); INSERT INTO payments VALUES "
	  . join(', ', map { "($_, '$near[0]', '$id', 1)" } @slots)
	  . "; SELECT idem_finish('$id', scope => '$near[0]'); COMMIT";
}

is( crash_in_commit('other', $w1, own_transaction('other', slot_of($far[0]))),
	'1 claimed',
	'a row of another worker only: the row is there, the key is not, as the manual says');
is( crash_in_commit('both nodes', $w1, own_transaction('both nodes', slot_of($near[0]), slot_of($far[0]))),
	'0 claimed',
	'rows of both: two-phase commit, and nothing is there');
on($coordinator, q{
	CREATE FUNCTION unforced(slot integer, tenant text, id text, other integer) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM idem_claim(id, scope => tenant);
		INSERT INTO payments VALUES (other, tenant, id, 1);
		RETURN idem_finish(id, scope => tenant);
	END $$;
	SELECT create_distributed_function('unforced(integer, text, text, integer)', 'slot', colocate_with => 'payments')});
is( crash_in_commit('unforced', $coordinator,
		sprintf "SELECT unforced(%d, '%s', 'unforced', %d)", slot_of($near[0]), $near[0], slot_of($far[0])),
	'1 claimed',
	'without force_delegation: the row is there, the key is not, as the manual says');

# A shard is split: the slots, and so the keys, stay where they are.

is(pay($near[0], 'before the split'), 'claimed', 'before a split');
my $whole = shard_of(slot_of($near[0]));
on($coordinator, sprintf q{SELECT isolate_tenant_to_new_shard('payments', %d, shard_transfer_mode => 'block_writes')}, slot_of($near[0]));
isnt(shard_of(slot_of($near[0])), $whole, 'the slot has a shard of its own');
is(pay($near[0], 'before the split'), 'finished', 'the key is found');
is(pay($near[0], 'after the split'), 'claimed', 'a new one is accepted');

#
# A table of idem is distributed: refused on all nodes, in open sessions and on a standby.
#

$w1->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($w1, 'backup', has_streaming => 1);
$standby->start;

my %key = map { $_->name => $_ } @nodes, $standby;
my $read = q{SELECT count(*) FROM idem_get('k', 'nobody')};
# the coordinator refuses every key, so its map goes while this lasts
on($_, 'SELECT idem_shard_set(NULL, force => true)') foreach @nodes;

foreach my $way (
	[ 'distributed table', q{SELECT create_distributed_table('idem.keys', 'key_hash')} ],
	[ 'reference table', q{SELECT create_reference_table('idem.keys')} ],
	[ 'local or single-shard table', q{SELECT create_distributed_table('idem.keys', NULL, colocate_with => 'none')} ])
{
	my ($kind, $sql) = @$way;
	my %session = map { $_ => session($key{$_}) } keys %key;

	on($coordinator, qq{SELECT idem_claim('$kind', scope => 'coordinator')});
	$w1->wait_for_catchup($standby);
	is($session{$_}->query($read), '0', "$kind: an open session of $_ has used the table") foreach sort keys %session;
	is($session{$_}->sqlstate(q{BEGIN; SELECT idem_claim('warm'); ROLLBACK}), '00000', "$kind: and has written on $_")
	  foreach map { $_->name } @nodes;
	on($coordinator, "BEGIN; $sql; ROLLBACK");
	is($session{coordinator}->sqlstate(q{BEGIN; SELECT idem_claim('warm'); ROLLBACK}), '00000',
		"$kind: nothing is refused if that is rolled back");
	on($coordinator, $sql);
	$w1->wait_for_catchup($standby);
	foreach my $name (sort keys %session)
	{
		is($session{$name}->sqlstate($read), '55000', "M7: $kind: the open session of $name is refused");
		like($session{$name}->{message}, qr/Citus has made it a $kind.*Leave its triggers alone/s, 'with the reason');
		is(sqlstate($key{$name}, $read), '55000', 'a new session, too');
		is(doctor('citus', node => $key{$name}), 'fail', 'the doctor says so');
	}
	is(sqlstate($_, q{SELECT idem_claim('new')}), '55000', "M7: $kind: no claim") foreach @nodes;
	isnt(sqlstate($coordinator, q{SELECT undistribute_table('idem.keys')}), '00000', "$kind: Citus cannot undistribute it");
	like(on($w1, doctor('citus', columns => 'fix', node => $w1)), qr/^\Q@{[ $coordinator->host ]}\E\|/, 'on a worker the fix shows the coordinator');
	on($coordinator, doctor('citus', columns => 'fix', node => $coordinator));
	$w1->wait_for_catchup($standby);
	is(doctor('citus', node => $_), 'ok', "$kind: the fix helps on " . $_->name) foreach @nodes, $standby;
	is($session{$_}->sqlstate($read), '00000', "$kind: the open session of $_ goes on") foreach sort keys %session;
	is(on($coordinator, qq{SELECT status FROM idem_claim('$kind', scope => 'coordinator')}), 'finished', "$kind: the keys are back");
	$_->quit foreach values %session;
}

#
# Tables that are distributed by tenant: a scope per shard of Citus, and the tenant in the key.
#

on($coordinator, q{
	CREATE TABLE orders (tenant text, id text);
	SELECT create_distributed_table('orders', 'tenant');
	CREATE FUNCTION place(tenant text, id text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		shard text := 'shard ' || get_shard_id_for_distribution_column('orders', tenant);
		c idem.claim_result;
	BEGIN
		SELECT * INTO c FROM idem_claim(tenant || ':' || id, scope => shard);
		IF c.claimed THEN
			INSERT INTO orders VALUES (tenant, id);
			PERFORM idem_finish(tenant || ':' || id, scope => shard);
		END IF;
		RETURN c.status;
	END $$;
	SELECT create_distributed_function('place(text, text)', 'tenant', colocate_with => 'orders', force_delegation => true)});
on($coordinator, q{SELECT idem_shard_set('{}', by => 'scope', force => true)});

my $names = q{SELECT idem_slot('any', scope => 'shard ' || p.shardid) AS slot, p.groupid
				FROM pg_dist_placement AS p JOIN pg_dist_shard AS s USING (shardid) WHERE s.logicalrelid = 'orders'::regclass};

# by scope, so that idem_slot() knows the rule
on($_, "SELECT idem_shard_set('{}', by => 'scope', force => true);
		SELECT idem_shard_set((SELECT range_agg(int4range(slot, slot + 1)) FROM ($names) AS n
			WHERE n.groupid = (SELECT groupid FROM pg_dist_local_group)), by => 'scope')") foreach @workers;
is(on($coordinator, "SELECT count(DISTINCT slot) FROM ($names) AS n"), '8', 'the scopes of 8 shards have different slots');
is( on($coordinator, join '; ', map { ("SELECT place('t$_', 'a')") x 2 } 1 .. 20),
	join("\n", ("claimed\nfinished") x 20), 'a scope per shard: every tenant is accepted once');
is(on($coordinator, 'SELECT count(*) FROM orders'), '20', 'and runs once');
is(join(' ', map { on($_, q{SELECT count(*) > 0 FROM idem.keys WHERE scope ~ '^shard'}) } @workers), 't t', 'on both workers');
my ($of_t1, $at) = split /\|/, on($coordinator, q{SELECT p.shardid, p.groupid FROM pg_dist_placement AS p
	WHERE p.shardid = get_shard_id_for_distribution_column('orders', 't1')});
move_shard($of_t1, $at == $group[0] ? ($w1, $w2) : ($w2, $w1));
is(sqlstate($coordinator, q{SELECT place('t1', 'a')}), 'ID006', 'the shard has moved without its keys: ID006');

# DROP EXTENSION on the coordinator reaches the workers, unless Citus is told not to pass it on.

my $count = q{SELECT count(*) FROM idem.keys};

cmp_ok(on($w1, $count), '>', 0, 'a worker has keys');
on($coordinator, 'DROP EXTENSION idem; CREATE EXTENSION idem');
is(on($w1, $count), '0', 'DROP EXTENSION on the coordinator drops them, without an error');
on($w1, q{SELECT idem_shard_set(NULL); SELECT idem_claim('k')});
on($coordinator, q{SET citus.enable_ddl_propagation = off; DROP EXTENSION idem; CREATE EXTENSION idem});
is(on($w1, $count), '1', 'without propagation they stay');

# Citus reports its errors with XX000, and its daemon warns while a worker is down.
log_ok($_, except => qr/ XX000 (?:118_citus\.pl )?(?:WARNING|CONTEXT|DETAIL):|undistribute_table|an extension depends on it/)
  foreach @nodes, $standby;

done_testing();
