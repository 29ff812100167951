# Install and drop of the extension.
#
# The members of an install are compared in every detail; only differences are
# shown.  The comparison itself is tested, too: it must see what was changed.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use Cwd qw(getcwd);
use File::Basename qw(dirname);
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('install', extension => 0);

# One line per fact about a member: name, kind of fact, value.  Row types of
# tables and views and array types are left out: they follow their relation or
# type, and only some versions of PostgreSQL call them members.
my $members = q{
	WITH member AS (
		SELECT d.classid, d.objid,
			   pg_describe_object(d.classid, d.objid, 0) AS name
		  FROM pg_depend AS d
		  JOIN pg_extension AS e ON e.oid = d.refobjid
		 WHERE d.refclassid = 'pg_extension'::regclass
		   AND d.deptype = 'e' AND e.extname = 'idem'
		   AND (d.classid <> 'pg_type'::regclass
				OR d.objid IN (SELECT reltype FROM pg_class WHERE relkind = 'c'))),
	relation AS (
		SELECT m.name, c.*
		  FROM member AS m
		  JOIN pg_class AS c ON m.objid = CASE m.classid WHEN 'pg_class'::regclass THEN c.oid
														 WHEN 'pg_type'::regclass THEN c.reltype END),
	fact (name, kind, value) AS (
		SELECT name, 'member', NULL FROM member
		UNION ALL
		SELECT name, 'comment', obj_description(objid, classid::regclass::name)
		  FROM member
		UNION ALL
		SELECT m.name, 'initial privileges', i.objsubid || ' ' || i.initprivs::text
		  FROM member AS m
		  JOIN pg_init_privs AS i
			ON i.classoid = m.classid AND i.objoid = m.objid
		UNION ALL
		SELECT m.name, 'function', pg_get_functiondef(p.oid)
		  FROM member AS m JOIN pg_proc AS p ON p.oid = m.objid
		 WHERE m.classid = 'pg_proc'::regclass AND p.prokind IN ('f', 'p')
		UNION ALL
		SELECT m.name, 'privileges', p.proowner::regrole || ' ' || p.proacl::text
		  FROM member AS m JOIN pg_proc AS p ON p.oid = m.objid
		 WHERE m.classid = 'pg_proc'::regclass
		UNION ALL
		SELECT m.name, 'privileges', n.nspowner::regrole || ' ' || n.nspacl::text
		  FROM member AS m JOIN pg_namespace AS n ON n.oid = m.objid
		 WHERE m.classid = 'pg_namespace'::regclass
		UNION ALL
		SELECT m.name, 'privileges', t.typowner::regrole || ' ' || t.typacl::text
		  FROM member AS m JOIN pg_type AS t ON t.oid = m.objid
		 WHERE m.classid = 'pg_type'::regclass
		UNION ALL
		SELECT name, 'privileges', relowner::regrole || ' ' || relacl::text
		  FROM relation WHERE relkind <> 'c'
		UNION ALL
		SELECT name, 'relation',
			   concat_ws(' ', relkind, relpersistence, relrowsecurity,
						 relforcerowsecurity, relhastriggers, relreplident,
						 (SELECT amname FROM pg_am WHERE oid = relam), reloptions)
		  FROM relation
		UNION ALL
		SELECT r.name, 'sequence',
			   concat_ws(' ', s.seqtypid::regtype, s.seqstart, s.seqincrement,
						 s.seqmax, s.seqmin, s.seqcache, s.seqcycle)
		  FROM relation AS r JOIN pg_sequence AS s ON s.seqrelid = r.oid
		UNION ALL
		SELECT name, 'view', pg_get_viewdef(oid) FROM relation WHERE relkind = 'v'
		UNION ALL
		SELECT r.name, 'column ' || a.attnum,
			   concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod),
						 a.attcollation::regcollation, a.attnotnull, a.attstorage,
						 a.attcompression, a.attacl,
						 -- the server keeps a version of the column there, new each time
						 (SELECT array_agg(o ORDER BY o) FROM unnest(a.attoptions) AS o
						   WHERE split_part(o, '=', 1) <> 'pg_attver'),
						 a.attidentity, a.attgenerated,
						 (SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef
						   WHERE adrelid = a.attrelid AND adnum = a.attnum),
						 '-- ' || col_description(r.oid, a.attnum))
		  FROM relation AS r
		  JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum > 0
		UNION ALL
		SELECT r.name, 'constraint ' || c.conname,
			   concat_ws(' ', pg_get_constraintdef(c.oid), c.convalidated,
						 '-- ' || obj_description(c.oid, 'pg_constraint'))
		  FROM relation AS r JOIN pg_constraint AS c ON c.conrelid = r.oid
		UNION ALL
		SELECT r.name, 'index',
			   concat_ws(' ', pg_get_indexdef(i.indexrelid), i.indisvalid,
						 i.indisprimary,
						 '-- ' || obj_description(i.indexrelid, 'pg_class'))
		  FROM relation AS r JOIN pg_index AS i ON i.indrelid = r.oid
		UNION ALL
		SELECT r.name, 'trigger', pg_get_triggerdef(t.oid)
		  FROM relation AS r JOIN pg_trigger AS t ON t.tgrelid = r.oid
		UNION ALL
		SELECT r.name, 'rule', pg_get_ruledef(w.oid)
		  FROM relation AS r JOIN pg_rewrite AS w ON w.ev_class = r.oid
		UNION ALL
		SELECT r.name, 'is dumped', 'where ' || c.cond
		  FROM relation AS r
		  JOIN pg_extension AS e ON r.oid = ANY (e.extconfig)
		 CROSS JOIN LATERAL unnest(e.extconfig, e.extcondition) AS c (oid, cond)
		 WHERE e.extname = 'idem' AND c.oid = r.oid)
	SELECT line
	  FROM (SELECT name || ' / ' || kind || ' / '
				   || replace(coalesce(value, 'none'), E'\n', ' ')
			  FROM fact) AS l (line)
	 ORDER BY line COLLATE "C"};

sub members_of
{
	my ($db) = @_;

	return split /\n/, $node->safe_psql($db, $members);
}

# lines that only one side has, marked - and +
sub differences
{
	my ($left, $right) = @_;
	my %left = map { $_ => 1 } @$left;
	my %right = map { $_ => 1 } @$right;

	return join "\n", (map { "- $_" } grep { !$right{$_} } @$left),
	  (map { "+ $_" } grep { !$left{$_} } @$right);
}

#
# a fresh install
#

new_database('fresh');
my @fresh = members_of('fresh');

# sql/install.sql lists the members
cmp_ok(scalar(grep { m{ / member / } } @fresh), '>', 100, 'a fresh install has members');
is( join("\n", grep { m{ / comment / none$} } @fresh),
	'', 'every member has a comment');
is( join("\n",
		grep { m! privileges / .*[{,]=! || m!^(function|type) .* / privileges / none$! }
		  @fresh),
	'',
	'no member is open to PUBLIC');
is( $node->safe_psql(
		'fresh', q{
		SELECT count(*) FROM pg_class AS c
		 WHERE relnamespace IN ('idem'::regnamespace, 'idem_internal'::regnamespace) AND relkind NOT IN ('i', 't')
		   AND NOT EXISTS (SELECT FROM pg_depend
							WHERE objid IN (c.oid, c.reltype) AND deptype = 'e')}),
	'0',
	'everything in the schemas is a member');

#
# the comparison sees changes
#

foreach my $change (
	[
		'GRANT EXECUTE ON FUNCTION idem_clock() TO PUBLIC',
		qr{function idem_clock\(\) / privileges / }
	],
	[
		'ALTER FUNCTION idem_clock() COST 77',
		qr{function idem_clock\(\) / function / }
	],
	[
		'GRANT USAGE ON TYPE idem.claim_result TO PUBLIC',
		qr{type idem\.claim_result / privileges / }
	],
	[
		'ALTER TYPE idem.claim_result ALTER ATTRIBUTE result TYPE text',
		qr{type idem\.claim_result / column 3 / }
	],
	[
		'COMMENT ON COLUMN idem.keys.result IS NULL',
		qr{table idem\.keys / column 10 / }
	],
	[
		'COMMENT ON SCHEMA idem IS NULL',
		qr{schema idem / comment / }
	],
	[
		'ALTER TABLE idem.keys SET (fillfactor = 71)',
		qr{table idem\.keys / relation / }
	],
	[
		'DROP INDEX idem.keys_expires_at_idx',
		qr{table idem\.keys / index / }
	],
	[
		'CREATE OR REPLACE VIEW idem.key_summary AS
		 SELECT s.owner, s.status, 0::bigint AS keys, s.age AS oldest,
				s.time_left AS next_expiry FROM idem.key_status AS s',
		qr{view idem\.key_summary / (view|rule) / }
	],
	[
		'ALTER TABLE idem.keys ALTER request SET STORAGE MAIN',
		qr{table idem\.keys / column 8 / }
	],
	[
		'ALTER SEQUENCE idem.jobs_job_id_seq CACHE 7',
		qr{sequence idem\.jobs_job_id_seq / sequence / }
	],
	[
		'DROP INDEX idem.jobs_key_idx;
		 CREATE INDEX jobs_key_idx ON idem.jobs (key_hash)',
		qr{table idem\.jobs / index / }
	],
	[
		q{UPDATE pg_extension SET extcondition[
			  array_position(extconfig, 'idem.queues'::regclass::oid)] = 'WHERE false'
		   WHERE extname = 'idem'},
		qr{table idem\.queues / is dumped / }
	],
	[
		'ALTER EXTENSION idem DROP FUNCTION idem_clock()',
		qr{function idem_clock\(\) / }
	])
{
	my ($sql, $expected) = @$change;
	my $out =
	  $node->safe_psql('fresh', "BEGIN; $sql;\n$members;\nROLLBACK");
	my $diff = differences(\@fresh, [ split /\n/, $out ]);

	ok($diff ne '' && !grep({ !/^[-+] $expected/ } split /\n/, $diff),
		"the comparison sees: $sql")
	  or diag($diff);
}
is(differences(\@fresh, [ members_of('fresh') ]),
	'', 'and nothing else');

#
# settings of the database in which the script runs
#
# The server parses the script as a whole, before a SET in it could count.  Settings that change what
# a literal or an operator means do not change what is stored.
#

my %meaning = (
	array_nulls => 'off',
	transform_null_equals => 'on',
	quote_all_identifiers => 'on',
	intervalstyle => 'sql_standard',
	datestyle => '"SQL, DMY"',
	timezone => '"Asia/Kolkata"',
	backslash_quote => 'off');
# 19 has no other value
$meaning{standard_conforming_strings} = 'off'
  if $node->psql('postgres', 'SET standard_conforming_strings = off') == 0;
run('CREATE DATABASE meaning');
run("ALTER DATABASE meaning SET $_ = $meaning{$_}") foreach sort keys %meaning;
my $warnings = '';
$node->psql('meaning', 'CREATE EXTENSION idem', stderr => \$warnings, on_error_die => 1);
is($warnings, '', 'settings that change the meaning of literals: no warning');
run("ALTER DATABASE meaning RESET $_") foreach sort keys %meaning;
is(differences(\@fresh, [ members_of('meaning') ]), '', 'and the same members');

#
# default privileges of the role that installs
#
# They grant to PUBLIC and to a role with grant option, for every kind of object.
# No member keeps any of these grants.
#

$node->safe_psql('postgres',
	'CREATE ROLE installer SUPERUSER LOGIN; CREATE ROLE reader LOGIN');
my @default_privileges = map {
	(   "ALTER DEFAULT PRIVILEGES FOR ROLE installer GRANT ALL ON $_ TO PUBLIC",
		"ALTER DEFAULT PRIVILEGES FOR ROLE installer GRANT ALL ON $_ TO reader WITH GRANT OPTION"
	)
} qw(SCHEMAS TABLES SEQUENCES FUNCTIONS TYPES);
push @default_privileges,
  'ALTER DEFAULT PRIVILEGES FOR ROLE installer IN SCHEMA pg_catalog GRANT EXECUTE ON FUNCTIONS TO reader',
  'SET ROLE installer';
new_database('open',
	join ';', @default_privileges, 'CREATE TABLE public.mine (i int)',
	'CREATE EXTENSION idem');

# privileges of other roles than the owner on members: object, role, privilege
my $others = q{
	WITH acl (object, owner, acl) AS (
		SELECT pg_describe_object(d.classid, d.objid, 0), o.owner, o.acl
		  FROM pg_depend AS d
		  JOIN pg_extension AS e ON e.oid = d.refobjid AND e.extname = 'idem'
		 CROSS JOIN LATERAL (
				SELECT relowner, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner))
				  FROM pg_class WHERE oid = d.objid AND d.classid = 'pg_class'::regclass
				UNION ALL
				SELECT c.relowner, a.attacl FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
				 WHERE c.oid = d.objid AND d.classid = 'pg_class'::regclass
				UNION ALL
				SELECT nspowner, coalesce(nspacl, acldefault('n', nspowner))
				  FROM pg_namespace WHERE oid = d.objid AND d.classid = 'pg_namespace'::regclass
				UNION ALL
				SELECT proowner, coalesce(proacl, acldefault('f', proowner))
				  FROM pg_proc WHERE oid = d.objid AND d.classid = 'pg_proc'::regclass
				UNION ALL
				SELECT typowner, coalesce(typacl, acldefault('T', typowner))
				  FROM pg_type WHERE oid = d.objid AND d.classid = 'pg_type'::regclass
				   AND typelem = 0
				   AND coalesce((SELECT relkind FROM pg_class WHERE oid = typrelid), 'c') = 'c') AS o (owner, acl)
		 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e')
	SELECT acl.object, a.grantee::regrole, a.privilege_type
	  FROM acl CROSS JOIN LATERAL aclexplode(acl.acl) AS a
	 WHERE a.grantee <> acl.owner ORDER BY 1, 2, 3};

is( $node->safe_psql(
		'open',
		q{SELECT has_table_privilege('reader', 'public.mine', 'SELECT WITH GRANT OPTION')}),
	't',
	'default privileges open what the role makes otherwise');
isnt($node->safe_psql('fresh', $others), '', 'there are grants on members');
is( $node->safe_psql('open', $others),
	$node->safe_psql('fresh', $others),
	'others have nothing more on members than without default privileges');
is( $node->safe_psql('open', "SELECT DISTINCT grantee FROM ($others) AS o"),
	'pg_monitor', 'that is pg_monitor');
is( $node->safe_psql(
		'open', q{
		SELECT count(*) FROM pg_shdepend
		 WHERE refobjid = 'reader'::regrole AND classid <> 'pg_default_acl'::regclass
		   AND objid <> 'public.mine'::regclass
		   AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())}),
	'0',
	'nor does anything depend on the role');
is(sqlstate($node, $_, db => 'open', user => 'reader'), '42501', "default privileges do not open: $_")
  foreach 'SELECT * FROM idem.keys', 'SELECT * FROM idem.key_status',
  q{SELECT idem_claim('k')}, 'SELECT idem_doctor()', 'SELECT idem_internal.idem_close_members()',
  q{SELECT nextval('idem.jobs_job_id_seq')};

# an update script revokes the default grants on the objects it adds, and only on these
my $added = q{
	CREATE TYPE idem.added_enum AS ENUM ('a');
	CREATE TYPE idem.added_type AS (a int);
	CREATE TABLE idem.added_table (a int);
	CREATE SEQUENCE idem.added_sequence;
	CREATE FUNCTION idem.added_function() RETURNS int LANGUAGE sql RETURN 1;
	CREATE PROCEDURE idem.added_procedure() LANGUAGE sql AS '';
	ALTER EXTENSION idem ADD TYPE idem.added_enum;
	ALTER EXTENSION idem ADD TYPE idem.added_type;
	ALTER EXTENSION idem ADD TABLE idem.added_table;
	ALTER EXTENSION idem ADD SEQUENCE idem.added_sequence;
	ALTER EXTENSION idem ADD FUNCTION idem.added_function();
	ALTER EXTENSION idem ADD PROCEDURE idem.added_procedure()};
my $on_added = "SELECT count(DISTINCT object), count(DISTINCT grantee) FROM ($others) AS o WHERE object ~ 'added'";

$node->safe_psql('open', q{SELECT idem_grant('reader', 'app')});
my $with_app = $node->safe_psql('open', $others);
is( $node->safe_psql('open', "BEGIN; SET LOCAL ROLE installer; $added; $on_added"),
	'6|2', 'what is added is open');
is( $node->safe_psql(
		'open', "BEGIN; SET LOCAL ROLE installer; $added; SELECT idem_internal.idem_close_members(); $others"),
	"\n$with_app",
	'it is closed, and what idem_grant() gave before is left');
is( $node->safe_psql('open', "SELECT idem_internal.idem_close_members(); $others"),
	"\n$with_app", 'outside a script there is nothing to close');

#
# one version
#

is( $node->safe_psql(
		'postgres', q{
		SELECT string_agg(name || ' ' || version, ', ') FROM pg_available_extension_versions
		 WHERE name = 'idem'}),
	'idem ' . $node->safe_psql('postgres',
		q{SELECT default_version FROM pg_available_extensions WHERE name = 'idem'}),
	'there is one install script, and no other version');

#
# drop and install again
#

my $leftovers = q{
	SELECT proname::text FROM pg_proc WHERE proname LIKE 'idem\_%'
	UNION ALL
	SELECT nspname FROM pg_namespace WHERE nspname LIKE 'idem%'
	UNION ALL
	SELECT relname FROM pg_class
	 WHERE relname ~ '^(keys|key_status|key_summary|lease_status|jobs?|queue|cleanup_progress|worker_status|checks|health)(_|s|$)'
	UNION ALL
	SELECT description FROM pg_description WHERE description ~ '\midem'};

$node->safe_psql(
	'fresh', q{
	SELECT idem_claim('lost with the extension');
	CREATE ROLE app;
	SELECT idem_grant('app', 'admin')});

my $s = session($node, db => 'fresh');
is( $s->query(
		q{SELECT status FROM idem_claim('lost with the extension')}),
	'finished',
	'K2: a session has used the extension');

$node->safe_psql('fresh', 'DROP EXTENSION idem');
is($node->safe_psql('fresh', $leftovers),
	'', 'DROP EXTENSION leaves nothing, not even the schema');
is( $s->sqlstate(q{SELECT idem_claim('a')}),
	'42883', 'a session that used it gets a plain error then');

$node->safe_psql('fresh', 'CREATE EXTENSION idem');
is(differences(\@fresh, [ members_of('fresh') ]),
	'', 'installed again it is the same, with nothing granted');
is( $s->query(
		q{SELECT status FROM idem_claim('lost with the extension');
		  SELECT status FROM idem_claim('lost with the extension')}),
	"claimed\nfinished",
	'K3: the session that used the old one works with the new one');

# the extension is dropped while a session is in a transaction
is( $s->query(
		q{BEGIN; SELECT status FROM idem_claim('dropped inside');
		  DROP EXTENSION idem; CREATE EXTENSION idem;
		  SELECT status FROM idem_claim('dropped inside'); ROLLBACK;
		  SELECT count(*) FROM idem_get('dropped inside');
		  SELECT status FROM idem_claim('lost with the extension')}),
	"claimed\nclaimed\n0\nfinished",
	'K1: drop and create inside a transaction, rolled back');
$s->quit;

#
# what must not succeed
#

new_database('refused', 'CREATE ROLE creator LOGIN');
$node->safe_psql('postgres', 'GRANT CREATE ON DATABASE refused TO creator');

sub refused
{
	my ($sql, $state, $name, %opt) = @_;

	is(sqlstate($node, $sql, db => 'refused', %opt), $state, $name);
	return;
}

$node->safe_psql('refused', 'CREATE SCHEMA idem');
refused('CREATE EXTENSION idem', '42P06',
	'an existing schema is not adopted');
refused('CREATE EXTENSION idem SCHEMA public',
	'0A000', 'nor is another schema used');
$node->safe_psql('refused', 'DROP SCHEMA idem');
$node->safe_psql(
	'refused', q{
	CREATE FUNCTION pg_catalog.idem_clock() RETURNS timestamptz
	LANGUAGE sql AS 'SELECT now()'});
refused('CREATE EXTENSION idem', '42723',
	'an existing function is not adopted');
$node->safe_psql('refused', 'DROP FUNCTION pg_catalog.idem_clock()');
is($node->safe_psql('refused', $leftovers),
	'', 'the attempts have left nothing');
refused('CREATE EXTENSION idem', '42501',
	'only a superuser may install', user => 'creator');

$node->safe_psql('refused', 'CREATE EXTENSION idem');
is(differences(\@fresh, [ members_of('refused') ]),
	'', 'after that it can be installed');
refused('ALTER EXTENSION idem SET SCHEMA public',
	'0A000', 'it cannot be moved');
refused('DROP SCHEMA idem CASCADE', '2BP01', 'the schema cannot be dropped');
refused("DROP TABLE idem.$_", '2BP01', "nor the table $_")
  foreach qw(keys jobs job_keys job_log queues);
refused('DROP SEQUENCE idem.jobs_job_id_seq', '2BP01', 'nor the sequence');
refused('DROP FUNCTION idem_claim', '2BP01', 'nor a function');
refused('DROP TYPE idem.claim_result CASCADE', '2BP01', 'nor a type');

#
# the programs: built without the libraries of the server, installed, and removed again
#

delete @ENV{qw(MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES VPATH DESTDIR)};
my $dir = PostgreSQL::Test::Utils::tempdir();
my $bindir = $node->config_data('--bindir');
my @programs = map { "$bindir/$_" } 'idem_cutover', 'idem_move';

sub installed
{
	my ($destdir) = @_;

	return join ' ', grep { -x "$destdir$_" } @programs;
}

# where it was built, which may be outside of the source
my $source = getcwd;
my $build = dirname($PostgreSQL::Test::Utils::tmp_check);
my @built = ('make', '-s', '-C', $build, $build eq $source ? () : ('-f', "$source/Makefile", "VPATH=$source"), "DESTDIR=$dir/out");

command_ok([ @built, 'install' ], 'make install DESTDIR');
is(installed("$dir/out"), "@programs", 'both programs are installed');
command_ok([ @built, 'uninstall' ], 'make uninstall DESTDIR');
is(`find $dir/out -type f`, '', 'no file is left');

# Debian has the libraries that PostgreSQL itself needs in packages that an extension does not need.
mkdir "$dir/source";
mkdir "$dir/build";
system_or_bail('sh', '-c', "cp -r Makefile idem.control src '$dir/source' && find '$dir/source' -name '*.o' -delete && rm -f '$dir'/source/src/bin/*/idem_move '$dir'/source/src/bin/*/idem_cutover");
my @make = ('make', '-s', '-j2', '-C', "$dir/build", '-f', "$dir/source/Makefile", "VPATH=$dir/source", 'LIBS=-lnot_installed', 'with_llvm=no', 'WERROR=1', "DESTDIR=$dir/out");
command_ok([ @make, map { "install-$_" } 'idem_cutover', 'idem_move' ], 'VPATH build without libraries of the server');
is(installed("$dir/out"), "@programs", 'both programs are installed from there');
is(`find '$dir/source' -name '*.o'`, '', 'nothing is built in the source');
foreach my $program (@programs)
{
	command_like([ "$dir/out$program", '--version' ], qr/^idem_\w+ \(idem\) \d+\.\d+\.\d+$/, "$program --version");
}
command_ok([ @make, map { "uninstall-$_" } 'idem_cutover', 'idem_move' ], 'uninstall');
is(installed("$dir/out"), '', 'no program is left');
command_ok([ @make, map { "clean-$_" } 'idem_cutover', 'idem_move' ], 'clean');
is(`find '$dir/build' -type f`, '', 'nothing is left in the folder of the build');

$node->stop;
log_ok($node);
done_testing();
