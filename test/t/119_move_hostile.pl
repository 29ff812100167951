# M8: idem_move is run by a superuser, and reads what others have written: names, settings, tables
# with code.  Nothing of it runs with his privileges, and nothing changes the values that move.
# Then what can make a move fail half way, and what ends it.  Two databases of one server.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

# messages that are not English, where the server has them
$ENV{LANGUAGE} = 'de';
my ($locales) = run_command([ 'locale', '-a' ]);
my ($utf8) = $locales =~ /^(C\.utf-?8)$/mi;
my $node = new_node('move', conf => defined $utf8 ? "lc_messages = '$utf8'" : '');
my $dir = PostgreSQL::Test::Utils::tempdir();
my $program = $node->config_data('--bindir') . '/idem_move';

sub on_source { return run($_[0], db => 'source') }
sub on_target { return run($_[0], db => 'target') }

sub command
{
	my ($from, $to, $slots, @options) = @_;

	return ($program, '--from' => $node->connstr($from), '--to' => $node->connstr($to), '--slots' => $slots, @options);
}

# Runs idem_move; returns its exit status and what it printed.
sub move
{
	my $out = '';

	IPC::Run::run([ command(@_) ], '>&', \$out);
	my $status = $? >> 8;
	note $out;
	return ($status, $out);
}

sub moved_ok
{
	my ($name, @arguments) = @_;
	my ($status, $out) = move(@arguments);

	is($status, 0, $name) or diag($out);
	return $out;
}

sub refused_ok
{
	my ($pattern, $name, @arguments) = @_;
	my ($status, $out) = move(@arguments);

	is($status, 1, "$name: stops");
	like($out, $pattern, "$name: says why");
	return;
}

sub maps
{
	return join ' / ', map { run(q{SELECT slots, COALESCE(given, '{}') FROM idem.shard}, db => $_) } 'source', 'target';
}

# Two databases with maps, the first one with all slots
sub anew
{
	foreach my $db ('source', 'target')
	{
		run("DROP DATABASE IF EXISTS $db WITH (FORCE)");
		new_database($db);
		run('CREATE SCHEMA IF NOT EXISTS bob AUTHORIZATION bob', db => $db);
	}
	on_source(q{SELECT idem_shard_set('{[0,1024)}', number => 0)});
	on_target(q{SELECT idem_shard_set('{}', number => 1)});
	return;
}

run('CREATE ROLE bob LOGIN; CREATE ROLE boss SUPERUSER');
anew();

#
# arguments
#

sub wrong_use
{
	my ($pattern, $name, @arguments) = @_;
	my $out = '';

	IPC::Run::run([ $program, @arguments ], '>&', \$out);
	is($? >> 8, 2, "wrong use: $name");
	like($out, $pattern, "wrong use: $name: says why");
	unlike($out, qr/secret/, "wrong use: $name: shows no password");
	return;
}

my @databases = ('--from' => $node->connstr('source'), '--to' => $node->connstr('target'));
my @both = (@databases, '--slots' => '{[0,9)}');

wrong_use(qr/--from is missing/, 'nothing');
wrong_use(qr/--to is missing/, 'no target', '--from' => 'x');
wrong_use(qr/--slots is missing/, 'no slots', @databases);
wrong_use(qr/--slots takes ranges/, "slots $_", @databases, '--slots' => $_)
  foreach '', '0-5', '{', '{[0,5)', '{[0;5)}', '{[0,5)} x', '{[0,5)(6,7)}', q{{[0,5)}'}, '{[a,b)}', '{[-1,5)}';
wrong_use(qr/no such slots/, "slots $_", @databases, '--slots' => $_) foreach '{}', '{[1024,2000)}', '{[5,5)}';
wrong_use(qr/--batch takes/, "batch $_", @both, '--batch' => $_) foreach '0', '-1', '1025', 'x', '1x', '99999999999999999999';
wrong_use(qr/--stop-after takes/, 'step', @both, '--stop-after' => 'x');
wrong_use(qr/--table takes/, "table $_", @both, '--table' => $_) foreach 'x', ':x', 'x:';
wrong_use(qr/exclude one another/, 'check and abort', @both, '--check', '--abort');
wrong_use(qr/unknown argument x/, 'an argument too many', @both, 'x');
wrong_use(qr/--directory/, 'an option that is gone', @both, '--directory' => '/tmp');
wrong_use(qr/--lock-timeout takes a time/, 'lock timeout', @both, '--lock-timeout' => q{5s'; DROP TABLE x; --});
wrong_use(qr/\.pgpass/, "password in $_", '--from' => $_, '--to' => $node->connstr('target'), '--slots' => '{[0,9)}')
  foreach 'host=/tmp password=secret', 'postgresql://u:secret@localhost/source', 'postgres:///source?password=secret',
  q{dbname=source sslpassword = 'secret'};
wrong_use(qr/\.pgpass/, 'password of the target', '--from' => $node->connstr('source'), '--to' => 'password=secret', '--slots' => '{[0,9)}');
wrong_use(qr/connection string of the source is not valid/, 'connection string', '--from' => 'secret =', '--to' => 'x', '--slots' => '{[0,9)}');
like((run_command([ $program, '--version' ]))[0], qr/^idem_move \(idem\) \d+\.\d+\.\d+$/, 'version');
is(maps(), '{[0,1024)}|{} / {}|{}', 'nothing has changed');

# a service file
append_to_file("$dir/services", '[shop]' . "\n" . join("\n", split(/ /, $node->connstr('source') =~ tr/'//dr)) . "\n");
{
	local $ENV{PGSERVICEFILE} = "$dir/services";
	my $out = '';

	IPC::Run::run([ $program, '--from' => 'service=shop', '--to' => $node->connstr('target'), '--slots' => '{[0,9)}', '--check' ], '>&', \$out);
	is($?, 0, 'a service works') or diag($out);
}

#
# names and settings
#

my $evil_name = q{x|9999||version 0.5.0, encoding UTF8, map by key|0 OR bob.evil('')};
my $evil_table = qq{t'"\\! touch $dir/ran\n\e[31m};

# Everything of bob's that runs in idem_move says so in the log.
my $evil = q{
	CREATE OR REPLACE FUNCTION bob.evil(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
	BEGIN
		IF current_setting('application_name') = 'idem_move' THEN
			RAISE LOG 'EVIL runs as %', current_user;
		END IF;
		RETURN $1;
	END $$;
	CREATE OR REPLACE FUNCTION bob.evil_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN PERFORM bob.evil(''); RETURN COALESCE(NEW, OLD); END $$;
	ALTER FUNCTION bob.evil OWNER TO bob;
	ALTER FUNCTION bob.evil_trigger OWNER TO bob};

run($evil, db => $_) foreach 'source', 'target';
foreach my $db ('source', 'target')
{
	# what is looked up by name, in a search_path of the owner of the database
	run(q{CREATE FUNCTION bob.evil_in(int4, int4multirange) RETURNS bool LANGUAGE sql AS 'SELECT bob.evil('''') = ''''';
		CREATE OPERATOR bob.<@ (FUNCTION = bob.evil_in, LEFTARG = int4, RIGHTARG = int4multirange);
		CREATE FUNCTION bob.pg_is_in_recovery() RETURNS bool LANGUAGE sql AS 'SELECT bob.evil('''') IS NULL';
		CREATE FUNCTION bob.set_config(text, text, bool) RETURNS text LANGUAGE sql AS 'SELECT bob.evil('''')';
		CREATE FUNCTION bob.isempty(int4multirange) RETURNS bool LANGUAGE sql AS 'SELECT bob.evil('''') = ''''';
		CREATE VIEW bob.pg_roles AS SELECT bob.evil('') AS rolname, 10::oid AS oid, true AS rolsuper}, db => $db);
	run(qq{ALTER DATABASE $db OWNER TO bob; ALTER DATABASE $db SET search_path = bob, pg_catalog, public;
		ALTER DATABASE $db SET statement_timeout = '1ms'; ALTER DATABASE $db SET default_transaction_read_only = on;
		ALTER DATABASE $db SET default_transaction_isolation = serializable; ALTER DATABASE $db SET quote_all_identifiers = on;
		ALTER DATABASE $db SET extra_float_digits = 0; ALTER DATABASE $db SET array_nulls = off; ALTER DATABASE $db SET role = bob;
		ALTER DATABASE $db SET datestyle = 'SQL, DMY'; ALTER DATABASE $db SET intervalstyle = 'sql_standard';
		ALTER DATABASE $db SET bytea_output = 'escape'; ALTER DATABASE $db SET timezone = 'Asia/Kathmandu';
		ALTER DATABASE $db SET standard_conforming_strings = off; ALTER DATABASE $db SET client_min_messages = debug1;
		ALTER DATABASE $db SET lock_timeout = '1ms'; ALTER DATABASE $db SET client_encoding = 'LATIN1';
		ALTER DATABASE $db SET xmlbinary = hex; ALTER DATABASE $db SET transform_null_equals = on});
}

# a session without these settings
sub plain
{
	my ($db, $sql) = @_;

	local $ENV{PGOPTIONS} = '-c statement_timeout=0 -c lock_timeout=0 -c default_transaction_read_only=off -c search_path=public -c role=none -c client_encoding=UTF8'
	  . ' -c extra_float_digits=3 -c array_nulls=on -c standard_conforming_strings=on -c client_min_messages=warning -c default_transaction_isolation=read\ committed';
	return $node->safe_psql($db, $sql);
}

my $quoted_table = '"' . $evil_table =~ s/"/""/gr . '"';
my $table_sql = qq{CREATE TABLE public.$quoted_table (k text, f float8, "a""b" text[], t timestamptz, i interval, b bytea, d date, r int4range)};

plain($_, $table_sql) foreach 'source', 'target';
plain('source', qq{INSERT INTO public.$quoted_table VALUES
	('a', 0.1::float8 + 0.2, ARRAY['x', NULL, 'NULL'], '2026-03-04 05:06:07.123456+00', '1 mon -2 days 03:00:00', '\\x00ff41', '2026-03-04', '[1,5)'),
	('b', 1e300 / 3, '{}', 'infinity', '-1 year', '', '-infinity', 'empty'), ('c', 'NaN', NULL, NULL, NULL, NULL, NULL, NULL),
	(NULL, 1, NULL, NULL, NULL, NULL, NULL, NULL), (E'\\\\.', 2, ARRAY[E'\\\\N', E'a\\tb\\nc'], NULL, NULL, NULL, NULL, NULL)});
plain('source', q{SELECT idem_claim(E'k\\\\.\n|''$x$; DROP TABLE x', scope => '\\! id')});
plain('source', q{SELECT idem_queue_set('q|\\! touch ran', owner => 'bob'); SELECT idem_enqueue('q2', jsonb_build_object('f', 0.30000000000000004))});
my $bits = qq{SELECT string_agg(concat_ws(';', k, float8send(f), array_send("a""b"), timestamptz_send(t), interval_send(i), b, date_send(d), range_send(r)), chr(10) ORDER BY k)
	FROM public.$quoted_table WHERE k IS NOT NULL};
my $before = plain('source', $bits);
my $jobs_before = plain('source', q{SELECT string_agg(j::text, '') FROM idem.jobs AS j});

# the renamed database is what a script took for SQL; the argument is no connection string of bob's
plain('postgres', qq{ALTER DATABASE target RENAME TO "$evil_name"});
sub evil_connstr { return "host=" . $node->host . " port=" . $node->port . " dbname='" . $evil_name =~ s/(['\\])/\\$1/gr . "'" }
{
	my $out = '';

	IPC::Run::run([ command('source', 'postgres', '{[0,1024)}', '--batch' => 1024, '--to' => evil_connstr(), '--table' => qq{public.$quoted_table:CASE WHEN k IS NOT NULL THEN pg_catalog.idem_slot(k) END}) ], '>&', \$out);
	is($? >> 8, 0, 'hostile names and settings') or diag($out);
	like($out, qr/has 1 rows whose slot is null: they stay in the source/, 'rows without a slot are told');
	like($out, qr/t'"\\! touch .*\\x0a\\x1b\[31m/, 'names do nothing to a terminal');
	unlike($out, qr/\e/, 'no control character is printed');
}
is(plain($evil_name, $bits), $before, 'values are the same, to the last bit');
is(plain($evil_name, q{SELECT string_agg(j::text, '') FROM idem.jobs AS j}), $jobs_before, 'jobs as well');
is(plain('source', "SELECT count(*) FROM public.$quoted_table"), 1, 'the row without a slot has stayed');
is(plain($evil_name, q{SELECT key || scope FROM idem.keys}), qq{k\\.\n|'\$x\$; DROP TABLE x\\! id}, 'so are keys');
is(plain($evil_name, q{SELECT queue, rolname FROM idem.queues AS q JOIN pg_roles AS r ON r.oid = q.owner::oid}), q{q|\\! touch ran|bob}, 'and queues');
ok(!-e "$dir/ran", 'no command of a name has run');
is(log_count($node, qr/EVIL/), 0, 'no function of bob has run');
plain('postgres', qq{ALTER DATABASE "$evil_name" RENAME TO target; ALTER DATABASE target RESET ALL; ALTER DATABASE source RESET ALL});

# text that is no id is refused where it would be stored
is(sqlstate($node, q{SELECT idem_shard_give('{[5,6)}', $x$x|{}' \! id $x$)}, db => 'target'), '22P02', 'the receiver is an id');

#
# tables that could run code
#

anew();
run($evil, db => $_) foreach 'source', 'target';
run(q{CREATE SCHEMA boss AUTHORIZATION boss; CREATE SCHEMA other; GRANT USAGE ON SCHEMA bob TO PUBLIC}, db => $_) foreach 'source', 'target';

my $plain_table = 'CREATE TABLE bob.t (k text, note text)';
my @slot = ('--table' => 'bob.t:pg_catalog.idem_slot(k)');
my @hostile = (
	# what, SQL of bob, what the message says, whether --trust-owners accepts it
	[ 'a plain table', $plain_table, undef, 1 ],
	[ 'a rule', "$plain_table; CREATE RULE r AS ON INSERT TO bob.t DO ALSO SELECT bob.evil('')", qr/rule r/, 1 ],
	[ 'a trigger that is always enabled', "$plain_table; CREATE TRIGGER g BEFORE INSERT OR DELETE ON bob.t FOR EACH ROW EXECUTE FUNCTION bob.evil_trigger(); ALTER TABLE bob.t ENABLE ALWAYS TRIGGER g", qr/trigger g/, 1 ],
	[ 'a trigger for replicas', "$plain_table; CREATE TRIGGER g BEFORE INSERT OR DELETE ON bob.t FOR EACH STATEMENT EXECUTE FUNCTION bob.evil_trigger(); ALTER TABLE bob.t ENABLE REPLICA TRIGGER g", qr/trigger g/, 1 ],
	[ 'a deferred trigger', "$plain_table; CREATE CONSTRAINT TRIGGER g AFTER INSERT OR DELETE ON bob.t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION bob.evil_trigger(); ALTER TABLE bob.t ENABLE ALWAYS TRIGGER g", qr/trigger g/, 1 ],
	[ 'a trigger that does not fire', "$plain_table; CREATE TRIGGER g BEFORE INSERT OR DELETE ON bob.t FOR EACH ROW EXECUTE FUNCTION bob.evil_trigger()", undef, 1 ],
	[ 'a default', "CREATE TABLE bob.t (k text DEFAULT bob.evil(''), note text DEFAULT bob.evil(''))", undef, 1 ],
	[ 'a check constraint', "CREATE TABLE bob.t (k text, note text CHECK (bob.evil(note) = note))", qr/check constraint t_note_check/, 1 ],
	[ 'a check constraint with a built-in function', "CREATE TABLE bob.t (k text, note text CHECK (pg_read_file(note) IS NULL))", qr/check constraint t_note_check/, 1 ],
	[ 'a domain', "CREATE DOMAIN bob.d AS text CHECK (bob.evil(VALUE) = VALUE); CREATE TABLE bob.t (k text, note bob.d)", qr/type bob\.d/, 1 ],
	[ 'a domain that could get a check', "CREATE DOMAIN bob.d AS text; CREATE TABLE bob.t (k text, note bob.d)", qr/type bob\.d/, 1 ],
	[ 'an array of a domain', "CREATE DOMAIN bob.d AS text; CREATE TABLE bob.t (k text, note bob.d[])", qr/type bob\.d/, 1 ],
	[ 'a composite type', "CREATE DOMAIN bob.d AS text; CREATE TYPE bob.c AS (a bob.d); CREATE TABLE bob.t (k text, note bob.c)", qr/type bob\.c/, 1 ],
	[ 'an enumerated type, which can get a cast', "CREATE TYPE bob.e AS ENUM ('a'); CREATE TABLE bob.t (k text, note bob.e)", qr/type bob\.e/, 1 ],
	[ 'a range type', "CREATE TYPE bob.r AS RANGE (subtype = int4); CREATE TABLE bob.t (k text, note bob.r)", qr/type bob\.r/, 1 ],
	[ 'a generated column', "CREATE TABLE bob.t (k text, note text GENERATED ALWAYS AS (bob.evil(k)) STORED)", qr/generated column note/, 1 ],
	[ 'an index on an expression', "$plain_table; CREATE INDEX i ON bob.t (bob.evil(note))", qr/expression or predicate of index bob\.i/, 1 ],
	[ 'an index with a predicate', "$plain_table; CREATE INDEX i ON bob.t (note) WHERE bob.evil(note) = 'a'", qr/expression or predicate of index bob\.i/, 1 ],
	[ 'statistics on an expression', "$plain_table; CREATE STATISTICS bob.s ON (bob.evil('x')) FROM bob.t", qr/expression of statistics s/, 1 ],
	[ 'row security', "$plain_table; ALTER TABLE bob.t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON bob.t USING (bob.evil(note) = note)", qr/row security/, 1 ],
	[ 'a partition', "CREATE TABLE bob.t (k text, note text) PARTITION BY LIST (note); CREATE TABLE bob.p PARTITION OF bob.t (CHECK (bob.evil(note) = note)) DEFAULT", qr/check constraint p_note_check/, 1 ],
	[ 'an expression as partition key', "CREATE TABLE bob.t (k text, note text) PARTITION BY LIST (bob.evil(note)); CREATE TABLE bob.p PARTITION OF bob.t DEFAULT", qr/expression of the partition key/, 1 ],
	[ 'a view', "CREATE TABLE bob.r (k text, note text); CREATE VIEW bob.t AS SELECT k, bob.evil(note) AS note FROM bob.r", qr/bob\.t is not a table/, 0 ],
	[ 'a materialized view', "CREATE MATERIALIZED VIEW bob.t AS SELECT 'a'::text AS k, bob.evil('x') AS note", qr/SQLSTATE 42809/, 0 ],
	[ 'tables that inherit', "$plain_table; CREATE TABLE bob.child () INHERITS (bob.t)", qr/bob\.t has tables that inherit/, 0 ],
	[ 'a foreign table', "RESET ROLE; CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w; GRANT USAGE ON FOREIGN SERVER s TO bob; SET ROLE bob; CREATE FOREIGN TABLE bob.t (k text, note text) SERVER s", qr/SQLSTATE 42809/, 0 ],
	[ 'a foreign table as partition', "CREATE TABLE bob.t (k text, note text) PARTITION BY LIST (note); CREATE FOREIGN TABLE bob.p PARTITION OF bob.t DEFAULT SERVER s", qr/bob\.t has a partition that is not a table/, 0 ],
	# the table of a superuser
	[ 'a check constraint of a superuser', "RESET ROLE; CREATE TABLE bob.t (k text, note text CHECK (lower(note) = note), up text GENERATED ALWAYS AS (upper(k)) STORED)", undef, 1 ],
	[ 'a check constraint of a superuser with a function of another role', "RESET ROLE; CREATE TABLE bob.t (k text, note text CHECK (bob.evil(note) = note))", qr/check constraint t_note_check/, 1 ],
	[ 'the same with an operator', "CREATE FUNCTION bob.evil_op(text, text) RETURNS bool IMMUTABLE LANGUAGE sql AS 'SELECT bob.evil(\$1) = \$2'; GRANT CREATE ON SCHEMA bob TO boss; RESET ROLE;
		CREATE OPERATOR bob.=== (FUNCTION = bob.evil_op, LEFTARG = text, RIGHTARG = text); CREATE TABLE bob.t (k text, note text CHECK (note OPERATOR(bob.===) 'a'))", qr/check constraint t_note_check/, 1 ],
	[ 'the trigger of a superuser with a function of another role', "RESET ROLE; $plain_table; CREATE TRIGGER g BEFORE INSERT ON bob.t FOR EACH ROW EXECUTE FUNCTION bob.evil_trigger(); ALTER TABLE bob.t ENABLE ALWAYS TRIGGER g", qr/trigger g/, 1 ],
	[ 'an operator class with a function of another role', "CREATE FUNCTION bob.evil_cmp(text, text) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT bttextcmp(bob.evil(\$1), \$2)'; RESET ROLE;
		CREATE OPERATOR CLASS bob.oc FOR TYPE text USING btree AS OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 bob.evil_cmp(text, text);
		$plain_table; CREATE INDEX i ON bob.t (note bob.oc)", qr/operator class oc/, 1 ],
	[ 'the domain of a superuser with a function of another role', "RESET ROLE; CREATE DOMAIN bob.d AS text CHECK (bob.evil(VALUE) = VALUE); CREATE TABLE bob.t (k text, note bob.d)", qr/type bob\.d/, 1 ]);

my $drop = q{DROP VIEW IF EXISTS bob.v; DROP SCHEMA bob CASCADE; CREATE SCHEMA bob AUTHORIZATION bob};

foreach my $case (@hostile)
{
	my ($what, $sql, $pattern, $is_trusted) = @$case;

	foreach my $side (defined $pattern ? ('source', 'target') : ('target'))
	{
		foreach my $db ('source', 'target')
		{
			run("SET client_min_messages = error; $drop; $evil", db => $db);
			run($db eq $side || !defined $pattern || $what =~ /foreign/ ? "SET ROLE bob; $sql" : "SET ROLE bob; $plain_table", db => $db)
			  if $what !~ /foreign/ || $db eq $side;
			run("SET ROLE bob; $plain_table", db => $db) if $what =~ /foreign/ && $db ne $side;
		}
		# the columns must be equal, so types are in both
		if ($what =~ /domain|type|generated/ && defined $pattern)
		{
			my $other = $side eq 'source' ? 'target' : 'source';

			run("SET client_min_messages = error; $drop; $evil; SET ROLE bob; $sql", db => $other);
		}
		my $logged = log_count($node, qr/EVIL/);
		my ($status, $out) = move('source', 'target', '{[0,1024)}', '--check', @slot);

		is(log_count($node, qr/EVIL/), $logged, "$what in the $side: no function of bob has run");
		is($status, defined $pattern ? 1 : 0, "$what in the $side: " . (defined $pattern ? 'refused' : 'accepted'));
		like($out, $pattern, "$what in the $side: says why") if defined $pattern;
		next if $side eq 'source' || !defined $pattern;
		($status) = move('source', 'target', '{[0,1024)}', '--check', '--trust-owners', @slot);
		is($status, $is_trusted ? 0 : 1, "$what: --trust-owners " . ($is_trusted ? 'accepts it' : 'does not help'));
	}
}

# code that is added after the first look: the transaction that copies looks again, under its locks
sub fresh_table
{
	my ($rows) = @_;

	anew();
	run("$evil; SET ROLE bob; $plain_table", db => $_) foreach 'source', 'target';
	on_source(qq{INSERT INTO bob.t SELECT 'k' || i, 'note' FROM generate_series(1, $rows) AS i});
	return;
}

my $add_check = 'ALTER TABLE bob.t ADD CHECK (bob.evil(note) = note)';
my $psql = "psql -XAtq -d '" . $node->connstr('target') . "'";

fresh_table(100);
my $logged = log_count($node, qr/EVIL/);
refused_ok(qr/target: table bob\.t could run code.*check constraint/, 'code that is added in the middle',
	'source', 'target', '{[0,1024)}', '--batch' => 512, @slot,
	# while the first batch is complete, the second one is not
	'--switch' => "$psql -c '$add_check'");
is(log_count($node, qr/EVIL/), $logged, 'it has not run');

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
	my $moving = IPC::Run::start([ command('source', 'target', '{[0,1024)}', '--batch' => 1024, '--lock-timeout' => '1min', @slot) ], '>&', \$out,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
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
	my ($status, $out) = in_between($step, $db, [ $db, "SET ROLE bob; $add_check" ]);

	is($status, 1, "code that is added just before the $step: refused");
	like($out, qr/$db: table bob\.t could run code/, "code that is added just before the $step: says why");
	is(log_count($node, qr/EVIL/), $logged, "code that is added just before the $step: has not run");
	is(run('SELECT count(*) FROM bob.t', db => $step eq 'copy' ? 'source' : 'target'), 100, 'no row is lost');
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
cmp_ok(log_count($node, qr/EVIL runs as (?!bob)/), '>', 0, 'the log would have shown functions of bob');
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
on_target('TRUNCATE bob.t; ALTER TABLE bob.t ALTER note TYPE varchar(3)');
check_ok(qr/\(k text, note text\) in the source, and \(k text, note character varying\(3\)\) in the target/, 'another type', @slot);
on_target('ALTER TABLE bob.t ALTER note TYPE text; ALTER TABLE bob.t ADD more text');
check_ok(qr/table bob\.t has the columns/, 'another column', @slot);
on_target('ALTER TABLE bob.t DROP more');
check_ok(qr/column "nothing" does not exist/, 'a slot that is no expression', '--table' => 'bob.t:nothing')
  if !defined $utf8 || $node->safe_psql('postgres', q{SELECT current_setting('lc_messages')}) eq 'C';
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
my @blocked = command('source', 'target', '{[0,1024)}', '--batch' => 1024, '--lock-timeout' => '1min');
my $moving = IPC::Run::start(\@blocked, '>&', \$printed, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
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
$moving = IPC::Run::start(\@blocked, '>&', \$printed, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
$node->poll_query_until('postgres', $is_waiting) or die 'the move does not wait';
$moving->kill_kill(grace => 0);
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'idem_move'})
  or die 'the server does not notice that the program is gone';
# a lock that is not granted in time: tries again, in every language
$printed = '';
$moving = IPC::Run::start([ command('source', 'target', '{[0,1024)}', '--batch' => 1024, '--lock-timeout' => '10ms') ], '>&', \$printed,
	IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
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
