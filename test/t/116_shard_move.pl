# M8: idem_move moves slots between two servers.  First each case that it must refuse, and each
# place where it can stop; then moves in both directions under load, with a ledger: nothing runs
# twice, nothing is lost, whatever is killed.  IDEM_SEED is the seed of the load.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemMove qw(move move_command move_program refused_ok);
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = q{
shared_preload_libraries = 'idem'
max_connections = 60
deadlock_timeout = 100ms
};
my $a = new_node('a', conf => $conf, init => { allows_streaming => 1 });
my $b = new_node('b', conf => $conf, init => { allows_streaming => 1 });
my $program = move_program();

sub on_a { return run($_[0]) }
sub on_b { return run($_[0], node => $b) }

sub maps
{
	return join ' / ', map { run("SELECT slots, COALESCE(given, '{}') FROM idem.shard", node => $_) } $a, $b;
}

IPC::Run::run([ $program, '--from', 'x' ], '2>', '/dev/null');
is($? >> 8, 2, 'wrong use');
IPC::Run::run([ $program, '--help' ], '>', \my $help);
like($help, qr/run the same command again/, 'help');

#
# What it refuses, before anything changes
#

refused_ok(qr/source has no map/, 'no map in the source', $a, $b, '{[0,512)}');
on_a(q{SELECT idem_shard_set('{[0,1024)}', number => 0)});
refused_ok(qr/target has no map/, 'no map in the target', $a, $b, '{[0,512)}');
on_b(q{SELECT idem_shard_set('{}', by => 'scope', number => 1)});
refused_ok(qr/source has .* map by key; the target has .* map by scope/, 'another rule', $a, $b, '{[0,512)}');
on_b(q{SELECT idem_shard_set('{[5,6)}', number => 1)});
refused_ok(qr/both databases have the slots \{\[5,6\)\}/, 'a slot twice', $a, $b, '{[0,5)}');
on_b(q{SELECT idem_shard_set('{}', number => 1)});
refused_ok(qr/the same database/, 'the same database', $a, $a, '{[0,512)}');
refused_ok(qr/both databases are shard 0/, 'a number twice', $a, $b, '{[0,512)}')
  if on_b(q{SELECT idem_shard_set('{}', number => 0)}) eq '';
refused_ok(qr/the target has no number: is it a router/, 'a router as target', $a, $b, '{[0,512)}')
  if on_b(q{SELECT idem_shard_set('{}')}) eq '';
on_b(q{SELECT idem_shard_set('{}', number => 1)});
IPC::Run::run([ move_command($a, $b, '0-511') ], '2>', \my $wrong);
like($wrong, qr/--slots takes ranges such as/, 'ranges that are none');
on_a(q{SELECT idem_shard_set('{[512,1024)}', number => 0)});
refused_ok(qr/the source has neither \{\[0,512\)\}/, 'the wrong direction', $b, $a, '{[0,512)}');
on_a(q{SELECT idem_shard_set('{[0,1024)}', number => 0)});

on_a(q{CREATE ROLE owner_of_keys; SELECT idem_grant('owner_of_keys', 'app')});
on_a(q{SET ROLE owner_of_keys; SELECT idem_claim('owned')});
refused_ok(qr/target lacks roles that own keys: owner_of_keys/, 'a role is missing', $a, $b, '{[0,1024)}');
on_b(q{CREATE ROLE owner_of_keys});

on_a(q{SELECT idem_queue_set('q', max_attempts => 3, lease => '1 min', keep => '1 day', keep_dead => '1 day'); SELECT idem_queue_set('paused', owner => 'owner_of_keys'); SELECT idem_pause('paused')});
on_b(q{SELECT idem_queue_set('q', max_attempts => 4)});
refused_ok(qr/other settings in the target: q/, 'a queue is declared otherwise', $a, $b, '{[0,1024)}');
on_b(q{SELECT idem_queue_drop('q')});

on_a(q{CREATE TABLE orders (id int GENERATED ALWAYS AS IDENTITY, order_key text, note text, upper text GENERATED ALWAYS AS (upper(order_key)) STORED);
	CREATE TABLE ran (kind text, name text)});
my @orders = ('--table' => 'public.orders:pg_catalog.idem_slot(order_key)');
refused_ok(qr/"public.orders" does not exist/, 'a table is missing', $a, $b, '{[0,1024)}', @orders);
on_b(q{CREATE TABLE orders (id int GENERATED ALWAYS AS IDENTITY, order_key text, note text, upper text GENERATED ALWAYS AS (upper(order_key)) STORED);
	CREATE TABLE ran (kind text, name text);
	CREATE TABLE triggered ();
	CREATE FUNCTION note_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO triggered DEFAULT VALUES; RETURN NEW; END $$;
	CREATE TRIGGER t AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION note_row()});
is(maps(), '{[0,1024)}|{} / {}|{}', 'nothing has changed');

# a job of a number that numbers of the target do not reach
on_a(q{SELECT idem_enqueue('q', key => 'low')});
on_b(q{TRUNCATE idem.shard; SELECT setval('idem.jobs_job_id_seq', 100000); SELECT idem_shard_set('{}', number => 1)});
refused_ok(qr/numbers of the target carry slots only from/, 'a job number below those of the target', $a, $b, '{[0,1024)}');
on_b(q{TRUNCATE idem.shard; ALTER SEQUENCE idem.jobs_job_id_seq RESTART; SELECT idem_shard_set('{}', number => 1)});
on_a(q{SELECT idem_cancel(job_id) FROM idem.jobs});

my ($status, $out) = move($a, $b, '{[0,1024)}', '--check', @orders);
is($status, 0, 'check');
is(maps(), '{[0,1024)}|{} / {}|{}', 'check changes nothing');

#
# One row of each kind, moved with a stop after each step
#

on_a(q{
	CREATE FUNCTION big_result(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 20000) AS i $$;
	BEGIN; SELECT idem_claim('done'); INSERT INTO orders (order_key, note) VALUES ('done', 'paid'); SELECT idem_finish('done', '{"n": 1}'); COMMIT;
	SELECT idem_lease('live', '10 min', worker => 'w');
	SELECT idem_checkpoint('live', token, '{"step": 2}') FROM idem.keys WHERE key = 'live';
	SELECT idem_lease('parked', '1 microsecond', on_expiry => 'park');
	SELECT idem_call('big', 'big_result');
	SELECT idem_enqueue('q', '{"a": [1]}', key => 'waits');
	SELECT idem_enqueue('q', key => 'expired', dedup => 'until_expired', key_ttl => '1 day', priority => -10);
	SELECT idem_complete(job_id, token, '{"r": 1}') FROM idem_fetch('q');
	SELECT idem_enqueue('q', key => 'dead', priority => -10);
	SELECT idem_fail(job_id, token, 'no', dead => true) FROM idem_fetch('q');
	SELECT idem_enqueue('q', key => 'leased', priority => -10);
	SELECT * FROM idem_fetch('q', worker => 'w');
	SELECT idem_enqueue('q', key => 'later', delay => '1 day');
	SELECT idem_enqueue('q')});
on_a(q{CREATE TABLE late (k text); INSERT INTO late VALUES ('x')});
on_b('CREATE TABLE late (k text)');
my $content = q{SELECT md5(string_agg(x, chr(10) ORDER BY x)) FROM (
	SELECT k::text AS x FROM idem.keys AS k UNION ALL SELECT j::text FROM idem.jobs AS j UNION ALL
	SELECT k::text FROM idem.job_keys AS k UNION ALL SELECT l::text FROM idem.job_log AS l UNION ALL
	SELECT concat(order_key, note, upper) FROM orders) AS s};
my $before = on_a($content);
my ($lease, $job_id, $job_token) = split /\|/,
  on_a(q{SELECT k.token, j.job_id, j.token FROM idem.keys AS k, idem.jobs AS j WHERE k.key = 'live' AND j.key = 'leased'});
my $highest = on_a('SELECT last_value FROM idem.jobs_job_id_seq');
my @all = ($a, $b, '{[0,1024)}', '--batch' => 1024, @orders);

refused_ok(qr/stopped after step "give"/, 'stop after give', @all, '--stop-after' => 'give');
is(maps(), '{}|{[0,1024)} / {}|{}', 'M8: given up, and nobody has the slots');
is(sqlstate($a, q{SELECT idem_claim('new')}), 'ID006', 'M8: the source refuses');
is(sqlstate($b, q{SELECT idem_claim('new')}), 'ID006', 'M8: so does the target');
($status) = move(@all, '--abort');
is($status, 0, 'abort');
is(maps(), '{[0,1024)}|{} / {}|{}', 'abort: the source has the slots again');
is(on_a($content), $before, 'abort: and all rows');
refused_ok(qr/given up none of these slots/, 'nothing to abort', @all, '--abort');

move(@all, '--stop-after' => 'give');
refused_ok(qr/stopped after step "take"/, 'stop after take', @all, '--stop-after' => 'take');
is(maps(), '{}|{[0,1024)} / {[0,1024)}|{}', 'M8: the target has the slots, the source its rows');
is(on_b($content), $before, 'every row has arrived');
is(on_a($content), $before, 'no row has gone');
refused_ok(qr/or the target has them/, 'abort comes too late', @all, '--abort');
new_database('third', q{CREATE EXTENSION idem; SELECT idem_shard_set('{}', number => 2)});
my $third = $a->connstr('third');
refused_ok(qr/given up \{\[0,1024\)\} for another database/, 'M8: a third database cannot take what the second one has', $a, $third, '{[0,1024)}');
refused_ok(qr/for another database .* name that one with --to/, 'abort with a third database', $a, $third, '{[0,1024)}', '--abort');
refused_ok(qr/taken \{\[0,1024\)\} from another database .* finish that move first/, 'M8: nor can the second one give them away before the first one is empty', $b, $third, '{[0,1024)}');
is(sqlstate($b, q{SELECT idem_shard_give('{[0,1024)}', gen_random_uuid())}), '55000', 'M8: also without the program');
is(maps(), '{}|{[0,1024)} / {[0,1024)}|{}', 'nothing has changed');
is(run(q{SELECT slots FROM idem.shard}, db => 'third'), '{}', 'the third database has nothing');
refused_ok(qr/table public.late would lose its rows/, 'a table that is named too late', @all, '--table' => 'public.late:pg_catalog.idem_slot(k)');
refused_ok(qr/stopped after step "switch"/, 'stop after switch', @all, '--stop-after' => 'switch', '--switch' => 'echo moved $IDEM_SLOTS');
refused_ok(qr/command of --switch failed/, 'the router does not answer', @all, '--switch' => 'false');
($status, $out) = move(@all, '--switch' => 'echo moved $IDEM_SLOTS');
is($status, 0, 'the rest');
like($out, qr/^moved \{\[0,1024\)\}$/m, 'switch: the command knows the slots');
is(maps(), '{}|{} / {[0,1024)}|{}', 'nothing is left to do');
is(on_a(q{SELECT (SELECT count(*) FROM idem.keys) + (SELECT count(*) FROM idem.jobs) + (SELECT count(*) FROM idem.job_keys) + (SELECT count(*) FROM idem.job_log) + (SELECT count(*) FROM orders)}),
	0, 'no row is left in the source');
is(on_b($content), $before, 'every row is in the target');
is(on_b('SELECT count(*) FROM triggered'), 0, 'triggers of the target did not fire');
is(on_b(q{SELECT paused_at IS NOT NULL, owner FROM idem.queues WHERE queue = 'paused'}), 't|owner_of_keys', 'queues arrive, also that one is paused');
($status) = move(@all);
is($status, 0, 'once more: nothing happens');

on_a(q{INSERT INTO orders (order_key) VALUES ('left')});
refused_ok(qr/table public.orders still has rows of/, 'a table that was not named when its rows had to move', @all);
on_a('DELETE FROM orders');

# what clients have goes on working
is(on_b(q{SELECT status, result FROM idem_claim('done')}), 'finished|{"n": 1}', 'M8: a finished key answers');
is(on_b(qq{SELECT idem_finish('live', '1', token => $lease)}), 't', 'M8: the token of a lease is valid');
is(on_b(qq{SELECT idem_complete($job_id, $job_token)}), 't', 'M8: so is the token of a job');
is(on_b(q{SELECT outcome, result FROM idem_enqueue('q', key => 'expired', dedup => 'until_expired', key_ttl => '1 day')}), 'done|{"r": 1}', 'M8: a job that is done absorbs');
is(on_b(q{SELECT outcome FROM idem_enqueue('q', key => 'waits')}), 'absorbed', 'M8: so does one that waits');
is(on_b(q{SELECT idem_retry(job_id) FROM idem.job_log WHERE state = 'dead'}), 't', 'M8: history works');
cmp_ok(on_b(q{SELECT job_id / 1024 FROM idem_enqueue('q')}), '>', $highest, 'M6: numbers go on above those of the source');
is(run(q{SELECT string_agg("check", ' ') FROM idem_doctor() WHERE status = 'fail'}, node => $_), '', 'no check of the doctor fails')
  foreach $a, $b;

#
# A slot comes back although the first move has left its rows: they are older
#

on_b(q{SELECT idem_claim('twice')});
my $slot = on_b(q{SELECT int4multirange(int4range(idem_slot('twice'), idem_slot('twice') + 1))});
move($b, $a, $slot, @orders, '--stop-after' => 'take');
on_a(q{SELECT idem_forget('twice')});
($status) = move($a, $b, $slot, @orders);
is($status, 0, 'back to a database that has old rows');
is(on_b(q{SELECT status FROM idem_claim('twice', wait => '0')}), 'claimed', 'the old row has not come back to life');
my ($id_of_a, $id_of_b) = (on_a('SELECT idem_shard_id()'), on_b('SELECT idem_shard_id()'));
my $someone = '00000000-0000-0000-0000-000000000001';
on_b(qq{SELECT idem_shard_give('$slot', '$someone')});
on_a(qq{UPDATE idem.shard SET given = '$slot', receiver = '$id_of_b'});
refused_ok(qr/both databases have given up/, 'both have given up the slot', $a, $b, $slot);
on_a('UPDATE idem.shard SET given = NULL, receiver = NULL');
on_b(qq{SELECT idem_shard_take('$slot', 0, '$someone')});
on_a(qq{INSERT INTO idem.keys (created_at, expires_at, key_hash, owner, nth, key, scope) SELECT now(), now() + '1 day', idem_key_hash('stray'), 10, 0, 'stray', ''});
refused_ok(qr/idem.keys of the target has rows of slots that the target does not have/, 'stray rows in the target', $b, $a, on_a(q{SELECT int4multirange(int4range(idem_slot('stray'), idem_slot('stray') + 1))}));
on_a(q{DELETE FROM idem.keys});

#
# Abort while a transaction that copies is still open in the target, without its program
#

$slot = on_a(q{SELECT slots FROM idem.shard}) eq '{}' ? '{[3,4)}' : die 'the source has slots';
my ($from_b, $to_a) = map { $_->connstr('postgres') } $b, $a;

# what idem_move of b to a does until its last statement, by hand
on_b(qq{SELECT idem_shard_give('$slot', '$id_of_a')});
my $copying = session($a);
$copying->query(qq{BEGIN; LOCK TABLE idem.shard IN SHARE ROW EXCLUSIVE MODE; SELECT idem_shard_take('$slot', 0, '$id_of_b')});
refused_ok(qr/or is taking them, or does not answer/, 'abort while the target is taking the slot', $b, $a, $slot, '--abort', '--lock-timeout' => '100ms');
is(maps(), "{}|{} / {[0,3),[4,1024)}|$slot", 'M8: the source has not taken it back');
$copying->query('ROLLBACK');
my $version = on_a('SELECT xmin FROM idem.shard');
($status) = move($b, $a, $slot, '--abort');
is($status, 0, 'abort after that');
is(maps(), '{}|{} / {[0,1024)}|{}', 'M8: the source has the slot again');
# what a copy that comes too late looks at
isnt(on_a('SELECT xmin FROM idem.shard'), $version, 'M8: the row of the target is another one');
($status) = move($b, $a, $slot, @orders);
is($status, 0, 'a later move of the slot works');
($status) = move($a, $b, $slot, @orders);
is($status, 0, 'and back');

# jobs from before the map of the target, whose numbers look like those of the slots: they stay when
# old rows are deleted there
new_database('fourth', q{CREATE EXTENSION idem; SELECT setval('idem.jobs_job_id_seq', 5200);
	SELECT idem_enqueue_many('plain', array_fill('1'::jsonb, ARRAY[1024])); SELECT idem_shard_set('{[512,1024)}', number => 4)});
new_database('fifth', q{CREATE EXTENSION idem; SELECT idem_shard_set('{[0,512)}', number => 5)});
my ($fourth, $fifth) = map { $a->connstr($_) } 'fourth', 'fifth';
refused_ok(qr/stopped after step "take"/, 'slots leave old rows', $fourth, $fifth, '{[512,600)}', '--batch' => 100, '--stop-after' => 'take');
($status) = move($fifth, $fourth, '{[512,600)}');
is($status, 0, 'and come back');
is(run('SELECT count(*) FROM idem.jobs', db => 'fourth'), 1024, 'jobs without slots are still there');

# a query that fails is no answer: an old server of the connection string does not exist
refused_ok(qr/target: connection to server/, 'no connection to the target', $b, 'host=/nonexistent dbname=postgres', '{[0,1024)}');

#
# Standbys receive each step before the next one
#

$b->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($b, 'backup', has_streaming => 1);
$standby->start;
$b->wait_for_catchup($standby);
$standby->safe_psql('postgres', 'SELECT 1');
my ($receiver) = split /\n/, $standby->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'walreceiver'});
kill 'STOP', $receiver;
my ($waiting_out, $waiting_err) = ('', '');
my $waiting = IPC::Run::start([ move_command($b, $a, '{[0,512)}', @orders, '--batch' => 512) ], '>', \$waiting_out, '2>', \$waiting_err,
	my $timer = IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
$waiting->pump until $waiting_out =~ /waiting until standbys/ || !$waiting->pumpable;
like($waiting_out, qr/waiting until standbys have received this: standby/, 'the move waits for the standby');
is(maps(), '{}|{} / {[512,1024)}|{[0,512)}', 'M8: until then nobody has the slots');
# a standby that disconnects has not received it either
$b->append_conf('postgresql.conf', 'wal_sender_timeout = 100ms');
$b->reload;
eval { $waiting->finish };
like($waiting_err, qr/a standby has disconnected/, 'a standby that disconnects stops the move');
is(maps(), '{}|{} / {[512,1024)}|{[0,512)}', 'M8: nobody has the slots');
$b->append_conf('postgresql.conf', 'wal_sender_timeout = 60s');
$b->reload;
kill 'CONT', $receiver;
$b->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming'}) or die 'no standby';
($status) = move($b, $a, '{[0,512)}', @orders, '--batch' => 512);
is($status, 0, 'and when it is back, the move goes on');
is(maps(), '{[0,512)}|{} / {[512,1024)}|{}', 'to the end');
$standby->stop;

#
# Load, moves in both directions, kills
#

on_a('DELETE FROM orders; TRUNCATE ran');
on_b('DELETE FROM orders; TRUNCATE ran');
my $python = -x '/usr/bin/python3' ? '/usr/bin/python3' : 'python3';
my ($load_in, $load_out, $load_err) = ('', '', '');
my $load;
{
	local $ENV{PYTHONDONTWRITEBYTECODE} = 1;
	$load = IPC::Run::start(
		[ $python, "$FindBin::RealBin/../scale/move_load.py", $ENV{IDEM_SEED} // 7, 8, 3000, $a->connstr('postgres'), $b->connstr('postgres') ],
		'<', \$load_in, '>', \$load_out, '2>', \$load_err,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}

# Waits until so many more lines were acknowledged.
sub let_load_run
{
	my ($lines) = @_;
	my $goal = ($load_out =~ tr/\n//) + $lines;

	$load->pump until ($load_out =~ tr/\n//) >= $goal || !$load->pumpable;
	return;
}

# Starts a move, kills it with signal 9 when it has printed this, and moves the rest.
sub move_with_kill
{
	my ($kill_at, @arguments) = @_;
	my $printed = '';
	my $moving = IPC::Run::start([ move_command(@arguments) ], '>', \$printed, '2>', '/dev/null',
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));

	$moving->pump until $printed =~ $kill_at || !$moving->pumpable;
	like($printed, $kill_at, 'killed in the middle');
	$moving->kill_kill(grace => 0);
	let_load_run(200);
	my ($result, $rest) = move(@arguments);
	is($result, 0, 'the move goes on where it was killed');
	return;
}

let_load_run(500);
move_with_kill(qr/given up/, $a, $b, '{[0,128)}', @orders, '--batch' => 32);
let_load_run(300);
move_with_kill(qr/taken by/, $b, $a, '{[700,900)}', @orders, '--batch' => 64);
let_load_run(300);
# the servers crash in the middle of a move
{
	my $printed = '';
	my $moving = IPC::Run::start([ move_command($b, $a, '{[0,128)}', @orders, '--batch' => 64) ], '>', \$printed, '2>', '/dev/null',
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	$moving->pump until $printed =~ /given up/ || !$moving->pumpable;
	$a->stop('immediate');
	$a->start;
	eval { $moving->finish };
	($status) = move($b, $a, '{[0,128)}', @orders, '--batch' => 64);
	is($status, 0, 'the move goes on after a crash of the target');
}
let_load_run(300);
$b->stop('immediate');
$b->start;
($status) = move($a, $b, '{[0,1024)}', @orders, '--batch' => 512);
is($status, 0, 'everything moves, after a crash of the source');
let_load_run(300);
# a server that was started meanwhile has inherited the pipe, so its end alone tells nothing
$load_in .= "stop\n";
$load->finish;
is($load->full_result(0), 0, 'the load comes to its end');
is($load_err, '', 'without an error of its own');
is(maps(), '{}|{} / {[0,1024)}|{}', 'the target has all slots');

# The ledger

my %ran;
$ran{$_}++ foreach map { split /\n/, run(q{SELECT kind || ' ' || name FROM ran}, node => $_) } $a, $b;
my %acknowledged;
$acknowledged{"$1 $2"}++ while $load_out =~ /^(key|lease|job) (\S+)/mg;
my ($refused) = $load_out =~ /^refused (\d+)/m;
my $count = keys %acknowledged;

note "$count acknowledged, $refused times refused";
cmp_ok($refused, '>', 0, 'M2: clients with an old map were refused');
is(join(' ', grep { $ran{$_} > 1 } sort keys %ran), '', 'nothing has run twice');
is(join(' ', grep { !$ran{$_} } sort keys %acknowledged), '', 'nothing that was acknowledged is lost')
  or note on_b('SELECT * FROM idem.job_status LIMIT 10');
is(join("\n", $load_out =~ /^unexpected .*$/mg), '', 'no other error');
my $keys = grep { /^key / } keys %ran;
is(on_b('SELECT count(*), count(DISTINCT order_key) FROM orders'), "$keys|$keys", 'rows of the user have moved with their keys');
is(on_a('SELECT count(*) FROM orders'), 0, 'and none is left');
cmp_ok(on_b('SELECT count(*) FROM triggered'), '<', $keys, 'triggers fired only for rows that are new there');

log_ok($a);
log_ok($b);
done_testing();
