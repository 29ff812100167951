# idem_cutover, run by superusers, beside hostile roles: on both servers one of them owns the
# database.
#
# Names of databases, schemas, tables, sequences, roles, the publication and the subscription are
# hostile.  The databases have settings that change values, or put other functions and operators
# before those of pg_catalog.  The owner puts a view in the place of a sequence while idem_cutover
# waits to read it.  None of their code runs in its sessions, none of their text is taken for a
# command, and no control character gets to the terminal.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemCutover;
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $evil = qq{"; \\! x \n\e[2J\$(x)' OR s() |};
# 19 refuses line breaks in names of databases and roles
my $evil_line = $evil =~ s/\n//r;
my ($publisher, $subscriber) = cutover_nodes();
my @nodes = ($publisher, $subscriber);

# As an identifier and as a literal
my $name = '"' . $evil =~ s/"/""/gr . '"';
my $name_line = $name =~ s/\n//r;
my $literal = q{ E'} . $evil =~ s/([\\'])/\\$1/gr . q{'};

# As the superuser, whatever the database has set
sub on
{
	my ($server, $sql) = @_;

	return $nodes[$server]->safe_psql($evil_line,
		"SET search_path = pg_catalog; SET role = none; SET default_transaction_read_only = off; $sql");
}

sub command
{
	return cutover_command(
		@nodes,
		'--publisher' => $publisher->connstr($evil_line),
		'--subscriber' => $subscriber->connstr($evil_line),
		'--subscription' => $evil, @_);
}

# What the program has printed is fit for a terminal, and it has run no code of the owner.
sub harmless
{
	my ($what, $text) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 2;
	note $text;
	unlike($text, qr/[^\n -~]/, "$what: no control characters");
	is(join(' ', map { $_->safe_psql('postgres', q{SELECT rolsuper FROM pg_roles WHERE rolname = 'hostile'}) } @nodes),
		'f f', "$what: no code of the owners has run");
	return;
}

sub prints_ok
{
	my ($status, $pattern, $what, @arguments) = @_;
	my ($out, $err) = ('', '');

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	IPC::Run::run([ command(@arguments) ], '>', \$out, '2>', \$err);
	is($? >> 8, $status, "$what: exit status");
	like("$out$err", $pattern, "$what: says so");
	harmless($what, "$out$err");
	return;
}

#
# the databases of a hostile owner; his code makes him a superuser if a superuser runs it
#

my $trap = q{
	CREATE SCHEMA trap;
	GRANT USAGE ON SCHEMA trap TO PUBLIC;
	CREATE FUNCTION trap.spring() RETURNS bool LANGUAGE plpgsql AS
		$$BEGIN ALTER ROLE hostile SUPERUSER; RETURN true; EXCEPTION WHEN OTHERS THEN RETURN true; END$$;
	CREATE FUNCTION trap.current_database() RETURNS name LANGUAGE sql AS $$SELECT trap.spring(); SELECT 'postgres'::name$$;
	CREATE FUNCTION trap.pg_try_advisory_lock(int, int) RETURNS bool LANGUAGE sql AS $$SELECT trap.spring()$$;
	CREATE FUNCTION trap.setval(regclass, bigint, boolean) RETURNS bigint LANGUAGE sql AS $$SELECT trap.spring(); SELECT 1::bigint$$;
	CREATE FUNCTION trap.equal(name, text) RETURNS bool LANGUAGE sql AS $$SELECT trap.spring()$$;
	CREATE FUNCTION trap.equal(name, name) RETURNS bool LANGUAGE sql AS $$SELECT trap.spring()$$;
	CREATE FUNCTION trap.equal(oid, oid) RETURNS bool LANGUAGE sql AS $$SELECT trap.spring()$$;
	CREATE OPERATOR trap.= (LEFTARG = name, RIGHTARG = text, FUNCTION = trap.equal);
	CREATE OPERATOR trap.= (LEFTARG = name, RIGHTARG = name, FUNCTION = trap.equal);
	CREATE OPERATOR trap.= (LEFTARG = oid, RIGHTARG = oid, FUNCTION = trap.equal);
	CREATE SCHEMA idem_cutover;
	CREATE VIEW idem_cutover.dropped AS SELECT trap.spring()::text AS subscription, ''::text AS subscriber;
	COMMENT ON SCHEMA idem_cutover IS 'idem_cutover of subscription x in database 1/1: slot ''; SELECT trap.spring(); --'};
my @settings = (
	'search_path = trap, pg_catalog, public',
	q{default_transaction_isolation = 'serializable'},
	'default_transaction_deferrable = on',
	'array_nulls = off',
	'quote_all_identifiers = on',
	q{bytea_output = 'escape'},
	q{datestyle = 'SQL, DMY'},
	q{timezone = 'Asia/Kolkata'});

# 19 has no other
push @settings, 'standard_conforming_strings = off' if $publisher->pg_version->major < 19;

foreach my $node (@nodes)
{
	$node->safe_psql('postgres', qq{CREATE ROLE hostile LOGIN; CREATE ROLE $name_line; CREATE DATABASE $name_line OWNER hostile});
	$node->safe_psql(
		$evil_line, qq{
		CREATE EXTENSION idem;
		GRANT CREATE ON SCHEMA public TO hostile;
		SET ROLE hostile;
		CREATE SCHEMA $name;
		CREATE TABLE $name.$name (id bigint GENERATED ALWAYS AS IDENTITY, a text, PRIMARY KEY (id));
		CREATE SEQUENCE public.z;
		$trap});
}
$publisher->safe_psql($evil_line, "CREATE PUBLICATION $name FOR ALL TABLES");
$subscriber->safe_psql($evil_line,
	"CREATE SUBSCRIPTION $name CONNECTION E'"
	  . $publisher->connstr($evil_line) =~ s/([\\'])/\\$1/gr
	  . "' PUBLICATION $name WITH (slot_name = 'the_slot')");
$subscriber->poll_query_until($evil_line, q{SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM pg_subscription_rel})
  or die 'the subscription does not work';
foreach my $node (@nodes)
{
	$node->safe_psql('postgres', "ALTER DATABASE $name_line SET $_") foreach @settings;
}
# the apply worker of the subscriber would have this role, too
$publisher->safe_psql('postgres', "ALTER DATABASE $name_line SET role = 'hostile'");
on(0, "SELECT setval('public.z', 41); INSERT INTO $name.$name (a) VALUES ($literal), ('2')");
is($publisher->safe_psql($evil_line, 'SELECT trap.spring(); SELECT rolsuper FROM pg_roles LIMIT 0'), 't', 'the trap works');
harmless('the owner alone', '');

#
# names
#

on(0, 'ALTER SCHEMA idem_cutover OWNER TO CURRENT_USER');
prints_ok(0, qr/Nothing is missing/, '--check', '--check');
on(0, "CREATE SEQUENCE $name.missing; ALTER ROLE $name_line SET default_transaction_read_only = off");
prints_ok(1, qr/MISSING .*read_only: "; \\! x \\x1b\[2J.*\nMISSING .*all sequences of the publisher: """; \\! x \\x0a.*\.missing\n/s,
	'names of roles, schemas and sequences', '--check');
on(0, "DROP SEQUENCE $name.missing; ALTER ROLE $name_line RESET ALL; ALTER SCHEMA idem_cutover OWNER TO $name_line");
prints_ok(1, qr/MISSING .*no other role has made the schema idem_cutover: it belongs to "; /, 'a mark that another role can make', '--check');

# The owner of the database has made the schema, and writes marks as if a run had been killed in step 5.
on(0, 'ALTER SCHEMA idem_cutover OWNER TO hostile');
prints_ok(1, qr/MISSING .*no other role has made the schema idem_cutover: it belongs to hostile/, 'a mark that the owner can make', '--check');
{
	my $database = on(1, q{SELECT system_identifier || '/' || d.oid FROM pg_control_system(), pg_database AS d WHERE datname = current_database()});
	my $progress = q{SELECT COALESCE(pg_replication_origin_progress('pg_' || oid, true), '0/0') < 'FFFFFFFF/0' FROM pg_subscription};

	on(0, "SET ROLE hostile; ALTER DATABASE $name_line SET default_transaction_read_only = on");
	on(1, "ALTER SUBSCRIPTION $name DISABLE; ALTER SUBSCRIPTION $name SET (slot_name = NONE)");
	$publisher->poll_query_until('postgres', 'SELECT NOT active FROM pg_replication_slots') or die 'the slot is in use';
	on(0, "SET ROLE hostile; COMMENT ON SCHEMA idem_cutover IS E'idem_cutover of subscription "
		  . $evil =~ s/([\\'])/\\$1/gr . " in database $database: slot the_slot, received up to FFFFFFFF/FFFFFFFF'");
	foreach my $arguments ([], ['--abort'])
	{
		prints_ok(3, qr/belongs to role hostile/, "a false position @$arguments", @$arguments);
		is(on(1, $progress), 't', "a false position @$arguments: no changes are skipped");
	}
	on(0, qq{SET ROLE hostile; COMMENT ON SCHEMA idem_cutover IS E'idem_cutover of subscription gone in database $database: slot the_slot, received up to 0/1'});
	prints_ok(3, qr/belongs to role hostile/, 'a mark of a subscription that was never there', '--subscription', 'gone');
	is(on(0, 'SELECT slot_name FROM pg_replication_slots'), 'the_slot', 'no slot was dropped');
	on(0, "ALTER DATABASE $name_line RESET default_transaction_read_only; DROP SCHEMA idem_cutover CASCADE");
	on(1, "ALTER SUBSCRIPTION $name SET (slot_name = 'the_slot'); ALTER SUBSCRIPTION $name ENABLE");
	$publisher->poll_query_until('postgres', 'SELECT active FROM pg_replication_slots') or die 'the subscription does not work';
}
prints_ok(1, qr/no subscription \\x1b\\xc2\\x9b/, 'another subscription', '--check', '--subscription', "\e\xc2\x9b");
prints_ok(2, qr/every user of this machine/, 'a password in a connection string', '--publisher', 'password=secret');

#
# A view in the place of a sequence.  First the program waits to change the settings of the database.
# Then the subscriber is behind, so that it waits in step 3.
#

{
	my ($out, $err) = ('', '');
	my $before_1 = session($publisher);
	my $in_3 = session($subscriber, db => $evil_line);

	$before_1->query('BEGIN; LOCK TABLE pg_db_role_setting IN SHARE MODE');
	my $program = IPC::Run::start([ command('--until', 4) ], '>', \$out, '2>', \$err,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));

	$publisher->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted AND relation = 'pg_db_role_setting'::regclass})
	  or die 'the program does not wait in step 1';
	$in_3->query("SET search_path = pg_catalog; BEGIN; LOCK TABLE $name.$name IN EXCLUSIVE MODE");
	on(0, "INSERT INTO $name.$name (a) VALUES ('3')");
	$before_1->query('COMMIT');
	$program->pump until $out =~ /^step 2 /m || !$program->pumpable;

	my $owner = session($publisher, db => $evil_line, user => 'hostile');

	$owner->query(
		q{SET search_path = pg_catalog;
		BEGIN READ WRITE;
		ALTER SEQUENCE public.z RENAME TO y;
		CREATE VIEW public.z AS SELECT 1::bigint AS last_value, trap.spring() AS is_called});
	$in_3->query('COMMIT');
	$publisher->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted AND mode = 'AccessShareLock' AND locktype = 'relation'})
	  or die 'the program does not wait in step 4';
	$owner->query('COMMIT');
	$program->finish;
	harmless('a view in the place of a sequence', "$out$err");
	# from 18 on a sequence is not read by name
	like("$out$err", qr/^step 3 .*(?:^step 4 |lacks sequence public\.y|access to non-system view "z" is restricted)/ms, 'the program got to the sequences');
	$owner->query('BEGIN READ WRITE; DROP VIEW public.z; ALTER SEQUENCE public.y RENAME TO z; COMMIT');
	$_->quit foreach $owner, $in_3, $before_1;
}

#
# the cutover
#

prints_ok(0, qr/step 4 .*step 5   subscription "; \\! x .*step 6 .*The subscriber is the primary now/s, 'the cutover');
is(on(1, "SELECT nextval('public.z'); SELECT a = $literal FROM $name.$name WHERE id = 1; INSERT INTO $name.$name (a) VALUES ('4') RETURNING id"),
	"42\nt\n4", 'values and sequences have arrived');
is(on(1, 'SELECT count(*) FROM pg_subscription') . on(0, 'SELECT count(*) FROM pg_replication_slots'), '00', 'subscription and slot are gone');
prints_ok(4, qr/no subscription "; /, '--abort', '--abort');
prints_ok(0, qr/dropped by an earlier run/, 'again');

$_->stop foreach $subscriber, $publisher;
log_ok($_) foreach @nodes;
done_testing();
