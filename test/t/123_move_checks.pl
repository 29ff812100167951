# M8: what can make a move fail half way, and what happens while a move is under way: code and
# maps that change, rows that are changed, schedules, new names, copies, two at once, signals.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemMove;
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = move_node();

my $plain_table = 'CREATE TABLE bob.t (k text, note text)';
my @slot = ('--table' => 'bob.t:pg_catalog.idem_slot(k)');

# code that is added after the first look: the transaction that copies looks again, under its locks
sub fresh_table
{
	my ($rows) = @_;

	anew();
	run("SET ROLE bob; $plain_table", db => $_) foreach 'source', 'target';
	on_source(qq{INSERT INTO bob.t SELECT 'k' || i, 'note' FROM generate_series(1, $rows) AS i});
	return;
}

my $add_check = 'ALTER TABLE bob.t ADD CHECK (bob.evil(note) = note)';
my $psql = "psql -XAtq -d '" . $node->connstr('target') . "'";

fresh_table(100);
my $logged = evil_runs();
refused_ok(qr/target: table bob\.t could run code.*check constraint/, 'code that is added in the middle',
	'source', 'target', '{[0,1024)}', '--batch' => 512, @slot,
	# while the first batch is complete, the second one is not
	'--switch' => "$psql -c '$add_check'");
is(evil_runs(), $logged, 'it has not run');

# Runs a move that was stopped before this step, and these commands while the transaction of the step
# waits for its first lock, in this database.
sub in_between
{
	my ($step, $db, @commands) = @_;
	my $out = '';

	fresh_table(100);
	move('source', 'target', '{[0,1024)}', '--batch' => 1024, @slot, '--stop-after' => $step eq 'copy' ? 'give' : 'take');
	my $blocker = session($node, db => $db);
	$blocker->query('BEGIN; LOCK TABLE idem.shard IN ROW EXCLUSIVE MODE');
	my $moving = start_move(\$out, 'source', 'target', '{[0,1024)}', '--batch' => 1024, '--lock-timeout' => '1min', @slot);
	$node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = 'idem_move' AND wait_event_type = 'Lock'})
	  or die 'the move does not wait';
	foreach (@commands)
	{
		my ($where, $sql) = @$_;

		$where eq 'blocker' ? $blocker->query($sql) : run($sql, db => $where);
	}
	$blocker->query('COMMIT');
	$blocker->quit;
	$moving->finish;
	note $out;
	return ($moving->full_result(0) >> 8, $out);
}

foreach my $step ('copy', 'purge')
{
	my $db = $step eq 'copy' ? 'target' : 'source';
	my ($status, $out) = in_between($step, $db, [ $db, 'SET ROLE bob; ' . ($step eq 'copy' ? $add_check :
			'CREATE TRIGGER g BEFORE DELETE ON bob.t FOR EACH ROW EXECUTE FUNCTION bob.evil_trigger(); ALTER TABLE bob.t ENABLE ALWAYS TRIGGER g') ]);

	is($status, 1, "code that is added just before the $step: refused");
	like($out, qr/$db: table bob\.t could run code/, "code that is added just before the $step: says why");
	is(evil_runs(), $logged, "code that is added just before the $step: has not run");
	is(on_source('SELECT count(*) FROM bob.t'), 100, "code that is added just before the $step: the source has its rows");
}

# a column that is not copied would get its default
{
	my ($status, $out) = in_between('copy', 'target', [ 'target', q{SET ROLE bob; ALTER TABLE bob.t ADD more text; ALTER TABLE bob.t ALTER more SET DEFAULT bob.evil('')} ]);

	is($status, 1, 'a column that is added just before the copy: refused');
	like($out, qr/target: the columns of table bob\.t have changed meanwhile/, 'a column that is added just before the copy: says why');
	is(evil_runs(), $logged, 'a column that is added just before the copy: no default has run');
}

# an abort in between, or what it does to the map of the target
{
	my ($status, $out) = in_between('copy', 'target', [ 'blocker', 'UPDATE idem.shard SET id = id' ]);

	is($status, 1, 'M8: the map of the target changes before the copy: refused');
	like($out, qr/map of the target has changed meanwhile/, 'M8: the map of the target changes before the copy: says why');
	is(maps(), '{}|{[0,1024)} / {}|{}', 'M8: nothing was taken');
}

# the target has lost the slots: what the source has left is all that there is
{
	my ($status, $out) = in_between('purge', 'source', [ 'target', q{SELECT idem_shard_set('{}', number => 1, force => true)} ]);

	is($status, 1, 'M8: the target does not have the slots: nothing is deleted');
	like($out, qr/or that one does not have them: nothing is deleted/, 'M8: the target does not have the slots: says why');
	is(on_source('SELECT count(*) FROM bob.t'), 100, 'M8: the rows are there');
}
{
	my ($status, $out) = in_between('purge', 'source', [ 'blocker', q{UPDATE idem.shard SET receiver = '00000000-0000-0000-0000-000000000001'} ]);

	is($status, 1, 'M8: the slots were given up for another database: nothing is deleted');
	is(on_source('SELECT count(*) FROM bob.t'), 100, 'M8: the rows are there');
}

#
# the target's rows are compared before it commits
#

fresh_table(50);
on_target(q{CREATE FUNCTION bob.change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM bob.evil(''); NEW.note := 'changed'; RETURN NEW; END $$;
	CREATE TRIGGER g BEFORE INSERT ON bob.t FOR EACH ROW EXECUTE FUNCTION bob.change(); ALTER TABLE bob.t ENABLE ALWAYS TRIGGER g});
refused_ok(qr/table bob\.t: the target has other rows than the source has sent \(50 and 50 rows\)/, 'a trigger that changes rows',
	'source', 'target', '{[0,1024)}', '--batch' => 1024, '--trust-owners', @slot);
is(maps(), '{}|{[0,1024)} / {}|{}', 'M8: the target has taken nothing');
cmp_ok(evil_runs(), '>', 0, 'the log would have shown functions of bob');
is(on_source('SELECT count(*) FROM bob.t'), 50, 'the source has all rows');
on_target(q{CREATE OR REPLACE FUNCTION bob.change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN CASE WHEN NEW.k <> 'k7' THEN NEW END; END $$});
refused_ok(qr/\(49 and 50 rows\)/, 'a trigger that drops a row', 'source', 'target', '{[0,1024)}', '--batch' => 1024, '--trust-owners', @slot);
on_target('ALTER TABLE bob.t DISABLE TRIGGER g');
moved_ok('without it everything moves', 'source', 'target', '{[0,1024)}', '--batch' => 1024, @slot);
is(on_target(q{SELECT count(*), count(*) FILTER (WHERE note = 'note') FROM bob.t}), '50|50', 'with the rows');

#
# what --check sees
#

sub check_ok
{
	my ($pattern, $name, @options) = @_;

	refused_ok($pattern, $name, 'source', 'target', '{[0,1024)}', '--check', @options);
	return;
}

fresh_table(3);
on_target(q{INSERT INTO bob.t VALUES ('k1', 'here')});
check_ok(qr/table bob\.t of the target has rows of the slots that are to move/, 'a row in the way', @slot);
on_target('TRUNCATE bob.t');
on_source(q{UPDATE bob.t SET note = 'same' WHERE k = 'k1'});
on_target(q{CREATE UNIQUE INDEX u ON bob.t (note); INSERT INTO bob.t VALUES (NULL, 'same')});
my @nullable = ('--table' => 'bob.t:CASE WHEN k IS NOT NULL THEN pg_catalog.idem_slot(k) END');
check_ok(qr/rows with the same "note" as rows that are to move \(index bob\.u\)/, 'a row of another slot in the way', @nullable);
on_target(q{UPDATE bob.t SET note = 'other'});
moved_ok('another value is not', 'source', 'target', '{[0,1024)}', '--check', @nullable);
on_target('DROP INDEX bob.u; TRUNCATE bob.t');
on_target(q{INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue) VALUES (7000 * 1024 + 5, now(), now(), 0, 'q')});
check_ok(qr/idem\.jobs of the target has rows of slots/, 'a job in the way', @slot);
refused_ok(qr/a job has number 7168005, which the sequences of job numbers have not reached/, 'a job number that is too high', 'source', 'target', '{[9,12)}', '--check', @slot);
on_target('DELETE FROM idem.jobs');
on_target('ALTER TABLE bob.t ALTER note TYPE varchar(3)');
check_ok(qr/\(k text, note text\) in the source, and \(k text, note character varying\(3\)\) in the target/, 'another type', @slot);
on_target('ALTER TABLE bob.t ALTER note TYPE text; ALTER TABLE bob.t ADD more text');
check_ok(qr/table bob\.t has the columns/, 'another column', @slot);
on_target('ALTER TABLE bob.t DROP more');
check_ok(qr/SQLSTATE 42703/, 'a slot that is no expression', '--table' => 'bob.t:nothing');
check_ok(qr/SQLSTATE 22012/, 'a slot that raises an error for a row', '--table' => 'bob.t:1 / (length(k) - 2)');
check_ok(qr/name the schema and the table/, 'a table without a schema', '--table' => 't:idem_slot(k)');
on_source('CREATE PUBLICATION p FOR TABLE bob.t');
check_ok(qr/SQLSTATE 55000/, 'a published table without replica identity', @slot);
on_source('DROP PUBLICATION p');
my $out = moved_ok('rows of other slots', 'source', 'target', '{[0,9)}', '--check', '--table' => 'bob.t:length(k) * 1000');
like($out, qr/table bob\.t has 3 rows whose slot is not between 0 and 1023/, 'are told');

on_target('ALTER DATABASE target SET idem.scope = \'s\'');
check_ok(qr/source has idem\.scope ; the target has s/, 'another default scope', @slot);
on_target('ALTER DATABASE target RESET idem.scope');

# a role without privileges
run('CREATE ROLE low LOGIN');
refused_ok(qr/superusers; that of the source is not/, 'no superuser', 'source', 'target', '{[0,9)}', '--from' => $node->connstr('source') . ' user=low');

#
# bytes that are no text
#

run(qq{CREATE DATABASE $_ TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'}) foreach 'bytes', 'others';
run(q{CREATE EXTENSION idem; CREATE TABLE public.t (k text)}, db => $_) foreach 'bytes', 'others';
run(q{SELECT idem_shard_set('{[0,1024)}', number => 0); SELECT idem_claim(convert_from('\x636166e9', 'SQL_ASCII')); INSERT INTO t VALUES (convert_from('\xe9', 'SQL_ASCII'))}, db => 'bytes');
run(q{SELECT idem_shard_set('{}', number => 1)}, db => 'others');
{
	local $ENV{PGCLIENTENCODING} = 'UTF8';
	moved_ok('bytes of SQL_ASCII move', 'bytes', 'others', '{[0,1024)}', '--batch' => 1024, '--table' => 'public.t:7');
}
is(run(q{SELECT encode(key::bytea, 'hex') || encode(k::bytea, 'hex') FROM idem.keys, t}, db => 'others'), '636166e9e9', 'as they are');
refused_ok(qr/source has encoding SQL_ASCII; the target has UTF8/, 'another encoding', 'others', 'target', '{[0,9)}');

#
# schedules
#

anew();
on_source(q{SELECT idem_schedule('nightly', 'q', '0 3 * * *'), idem_schedule('often', 'q', every => '1 min'); SELECT idem_schedule_pause('often')});
my $schedules = 'SELECT string_agg(s::text, chr(10) ORDER BY name) FROM idem.schedules AS s';
my $their = on_source($schedules);
check_ok(qr/schedules and no slots, so they would stop: nightly, often; move them with --schedules/, 'the last slots leave schedules');
refused_ok(qr/they would stop/, 'so does the move', 'source', 'target', '{[0,1024)}');
is(maps(), '{[0,1024)}|{} / {}|{}', 'nothing has changed');
moved_ok('some of the slots can move', 'source', 'target', '{[0,1000)}', '--batch' => 1000);
is(on_source($schedules), $their, 'schedules stay with the last slots');
on_target(q{SELECT idem_schedule('nightly', 'other', '0 4 * * *')});
refused_ok(qr/schedules with the same name: nightly/, 'a schedule twice', 'source', 'target', '{[0,1024)}', '--schedules');
on_target(q{SELECT idem_unschedule('nightly'); SELECT idem_schedule('mine', 'q', '0 5 * * *')});
refused_ok(qr/stopped after step "take"/, 'schedules, stopped', 'source', 'target', '{[0,1024)}', '--schedules', '--stop-after' => 'take');
is(on_target(q{SELECT string_agg(name, ' ' ORDER BY name) FROM idem.schedules}), 'mine nightly often', 'the target has them with the slots');
# with a slot, those that are left in the source would tick as well
refused_ok(qr/the target has given up its last slots, and still has schedules; finish that move first: run it again for \{\[1000,1024\)\}/,
	'schedules in both', 'target', 'source', '{[0,9)}');
is(on_source('SELECT slots FROM idem.shard'), '{}', 'M8: a database with copies of schedules gets no slots');
refused_ok(qr/schedules that have moved are deleted in the target: nightly, often.*stopped after/s, 'some of the last slots go back',
	'target', 'source', '{[1000,1005)}', '--stop-after' => 'give');
is(on_source('SELECT count(*) FROM idem.schedules'), 0, 'M8: first the copies are deleted');
moved_ok('they come back', 'target', 'source', '{[1000,1005)}', '--abort');
moved_ok('the rest, also without --schedules', 'source', 'target', '{[0,1024)}');
is(on_source('SELECT count(*) FROM idem.schedules'), 0, 'the source has none');
on_target(q{SELECT idem_unschedule('mine')});
is(on_target($schedules), $their, 'they have arrived as they were');
is(run(q{SELECT string_agg("check", ' ') FROM idem_doctor() WHERE status = 'fail'}, db => $_), '', 'no check of the doctor fails')
  foreach 'source', 'target';

#
# new names, and copies
#

anew();
on_source(q{SELECT idem_claim('k')});
refused_ok(qr/stopped after/, 'stops after take', 'source', 'target', '{[0,1024)}', '--batch' => 1024, '--stop-after' => 'take');
run('ALTER DATABASE target RENAME TO renamed');
moved_ok('the target has a new name', 'source', 'renamed', '{[0,1024)}');
run('ALTER DATABASE renamed RENAME TO target');
is(maps(), '{}|{} / {[0,1024)}|{}', 'everything has moved');
refused_ok(qr/stopped after/, 'stops after give', 'target', 'source', '{[0,1024)}', '--batch' => 1024, '--stop-after' => 'give');
run('ALTER DATABASE source RENAME TO renamed');
moved_ok('abort with a new name', 'target', 'renamed', '{[0,1024)}', '--abort');
run('ALTER DATABASE renamed RENAME TO source');
is(maps(), '{}|{} / {[0,1024)}|{}', 'M8: the slots are back');
refused_ok(qr/stopped after/, 'stops after give', 'target', 'source', '{[0,1024)}', '--batch' => 1024, '--stop-after' => 'give');
run('CREATE DATABASE copied TEMPLATE source');
refused_ok(qr/stored in another database/, 'M8: a copy of the target does not get the slots', 'target', 'copied', '{[0,1024)}');
run('DROP DATABASE copied');
run('CREATE DATABASE copied TEMPLATE target');
refused_ok(qr/stored in another database/, 'M8: nor does a copy of the source give them', 'copied', 'source', '{[0,1024)}');
# the copy has a map of its own now, and another id
run(q{SELECT idem_shard_set('{}', number => 7, force => true)}, db => 'copied');
refused_ok(qr/given up \{\[0,1024\)\} for another database/, 'M8: nor with an id of its own', 'target', 'copied', '{[0,1024)}');
moved_ok('the original gets them', 'target', 'source', '{[0,1024)}', '--batch' => 1024);

#
# two at once; signals; locks
#

anew();
my $blocker = session($node, db => 'source');
$blocker->query(q{BEGIN; SELECT idem_claim('open')});
my $printed = '';
my @blocked = ('source', 'target', '{[0,1024)}', '--batch' => 1024, '--lock-timeout' => '1min');
my $moving = start_move(\$printed, @blocked);
my $is_waiting = q{SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'idem_move' AND wait_event_type = 'Lock'};
$node->poll_query_until('postgres', $is_waiting) or die 'the move does not wait';
refused_ok(qr/another idem_move is at work in the source \(server process \d+\)/, 'two at once', 'source', 'target', '{[0,9)}');
refused_ok(qr/another idem_move is at work in the source/, 'also a check', 'source', 'target', '{[0,9)}', '--check');
# ^C
$moving->signal('INT');
$moving->finish;
note $printed;
is($moving->full_result(0) >> 8, 1, 'SIGINT: ends');
like($printed, qr/stopped by signal 2/, 'SIGINT: says so');
like($printed, qr/run the same command again/, 'SIGINT: and how to go on');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'idem_move'}) or die 'a session stays';
is(maps(), '{[0,1024)}|{} / {}|{}', 'SIGINT: nothing has changed');
# kill -9 while the server works for it: the lock goes with the session
$printed = '';
$moving = start_move(\$printed, @blocked);
$node->poll_query_until('postgres', $is_waiting) or die 'the move does not wait';
$moving->kill_kill(grace => 0);
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'idem_move'})
  or die 'the server does not notice that the program is gone';
# a lock that is not granted in time: tries again, in every language
$printed = '';
$moving = start_move(\$printed, 'source', 'target', '{[0,1024)}', '--batch' => 1024, '--lock-timeout' => '10ms');
$moving->pump until $printed =~ /trying again \(2 of 9\)/ || !$moving->pumpable;
$blocker->query('COMMIT');
$blocker->quit;
$moving->finish;
note $printed;
like($printed, qr/SQLSTATE 55P03/, 'locks: says what happened');
is($moving->full_result(0), 0, 'locks: tries again') or diag($printed);
is(maps(), '{}|{} / {[0,1024)}|{}', 'locks: and moves');

$node->stop;
log_ok($node);
done_testing();
