# M8: idem_move is run by a superuser, and reads what others have written: names, settings, tables
# with code.  Nothing of it runs with his privileges, and nothing changes the values that move.

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
my $dir = PostgreSQL::Test::Utils::tempdir();
my $program = move_program();

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
		ALTER DATABASE $db SET client_min_messages = debug1;
		ALTER DATABASE $db SET lock_timeout = '1ms'; ALTER DATABASE $db SET client_encoding = 'LATIN1';
		ALTER DATABASE $db SET xmlbinary = hex; ALTER DATABASE $db SET transform_null_equals = on});
	# 19 knows only on
	run("ALTER DATABASE $db SET standard_conforming_strings = off") if run('SHOW server_version_num') < 190000;
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

	IPC::Run::run([ move_command('source', 'postgres', '{[0,1024)}', '--batch' => 1024, '--to' => evil_connstr(), '--table' => qq{public.$quoted_table:CASE WHEN k IS NOT NULL THEN pg_catalog.idem_slot(k) END}) ], '>&', \$out);
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
is(evil_runs(), 0, 'no function of bob has run');
plain('postgres', qq{ALTER DATABASE "$evil_name" RENAME TO target; ALTER DATABASE target RESET ALL; ALTER DATABASE source RESET ALL});

# text that is no id is refused where it would be stored
is(sqlstate($node, q{SELECT idem_shard_give('{[5,6)}', $x$x|{}' \! id $x$)}, db => 'target'), '22P02', 'the receiver is an id');

#
# tables that could run code
#

anew();

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
	[ 'a foreign table', "RESET ROLE; DROP FOREIGN DATA WRAPPER IF EXISTS w CASCADE; CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w; GRANT USAGE ON FOREIGN SERVER s TO bob; SET ROLE bob; CREATE FOREIGN TABLE bob.t (k text, note text) SERVER s", qr/SQLSTATE 42809/, 0 ],
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

my $again = 'SET client_min_messages = error; DROP SCHEMA bob CASCADE; CREATE SCHEMA bob AUTHORIZATION bob; GRANT USAGE ON SCHEMA bob TO PUBLIC;' . IdemMove::evil();

foreach my $case (@hostile)
{
	my ($what, $sql, $pattern, $is_trusted) = @$case;

	foreach my $side (defined $pattern ? ('source', 'target') : ('target'))
	{
		# the columns must be equal, so types are in both
		my $is_in_both = !defined $pattern || ($what =~ /domain|type|generated/);

		run("$again; SET ROLE bob; " . ($is_in_both || $_ eq $side ? $sql : $plain_table), db => $_) foreach 'source', 'target';
		my $logged = evil_runs();
		my ($status, $out) = move('source', 'target', '{[0,1024)}', '--check', @slot);

		is(evil_runs(), $logged, "$what in the $side: no function of bob has run");
		is($status, defined $pattern ? 1 : 0, "$what in the $side: " . (defined $pattern ? 'refused' : 'accepted'));
		like($out, $pattern, "$what in the $side: says why") if defined $pattern;
		next if $side eq 'source' || !defined $pattern;
		($status) = move('source', 'target', '{[0,1024)}', '--check', '--trust-owners', @slot);
		is($status, $is_trusted ? 0 : 1, "$what: --trust-owners " . ($is_trusted ? 'accepts it' : 'does not help'));
	}
}

#
# tables of idem, on which a superuser has granted TRIGGER
#

foreach my $case (
	[ 'jobs', 'INSERT', 'bob.evil_trigger' ],
	[ 'schedules', 'INSERT', 'bob.evil_trigger' ],
	[ 'keys', 'UPDATE', 'pg_catalog.suppress_redundant_updates_trigger' ])
{
	my ($table, $event, $function) = @$case;

	anew();
	on_source(q{SELECT idem_claim('k'); SELECT idem_queue_set('q'); SELECT idem_enqueue('q'); SELECT idem_schedule('s', 'q', '0 0 * * *')});
	on_target(qq{GRANT USAGE ON SCHEMA idem TO bob; GRANT TRIGGER ON idem.$table TO bob; SET ROLE bob;
		CREATE TRIGGER g BEFORE $event ON idem.$table FOR EACH ROW EXECUTE FUNCTION $function()});
	my $logged = evil_runs();

	refused_ok(qr/trigger g on idem\.$table/, "a trigger on idem.$table", 'source', 'target', '{[0,1024)}', '--schedules');
	is(maps(), '{[0,1024)}|{} / {}|{}', "a trigger on idem.$table: nothing was given up");
	move('source', 'target', '{[0,1024)}', '--schedules', '--trust-owners');
	is(evil_runs(), $logged, "a trigger on idem.$table has not fired");
}

#
# tables of the target whose rows a crash would lose
#

foreach my $case (
	[ 'a table', 'CREATE UNLOGGED TABLE public.t (k text)' ],
	[ 'a partition', 'CREATE TABLE public.t (k text) PARTITION BY LIST (k); CREATE UNLOGGED TABLE public.p PARTITION OF public.t DEFAULT' ])
{
	my ($what, $sql) = @$case;

	anew();
	on_source(q{CREATE TABLE public.t (k text); INSERT INTO public.t VALUES ('a')});
	on_target($sql);
	refused_ok(qr/public\.t is unlogged/, "$what that is not logged in the target", 'source', 'target', '{[0,1024)}', '--table' => 'public.t:pg_catalog.idem_slot(k)');
	is(maps(), '{[0,1024)}|{} / {}|{}', "$what that is not logged in the target: nothing was given up");
}
anew();
on_source(q{CREATE UNLOGGED TABLE public.t (k text); INSERT INTO public.t VALUES ('a')});
on_target('CREATE TABLE public.t (k text)');
moved_ok('a table that is not logged in the source', 'source', 'target', '{[0,1024)}', '--table' => 'public.t:pg_catalog.idem_slot(k)');

#
# a type of the same name, whose text means other values
#

foreach my $type ('public.c', 'public.c[]', 'public.outside')
{
	anew();
	run(qq{CREATE TYPE public.c AS ($_->[1]); CREATE TYPE public.outside AS (c public.c); CREATE TABLE public.t (k text, v $type)}, db => $_->[0])
	  foreach [ 'source', 'a int, b int' ], [ 'target', 'b int, a int' ];
	refused_ok(qr/composite types \(.*public\.c \(a integer, b integer\).*public\.c \(b integer, a integer\)/, "columns of $type in another order",
		'source', 'target', '{[0,1024)}', '--table' => 'public.t:pg_catalog.idem_slot(k)');
}

$node->stop;
log_ok($node);
done_testing();
