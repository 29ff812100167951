# A database owner that is not a superuser creates objects to capture calls of a superuser:
# functions that are a better match for literals than ours, operators, tables and
# types of the same name, and a search_path that finds them first.
#
# What the manual tells a superuser to run, and the fixes of idem_doctor() (H1),
# reach none of them.  Each trap raises an error with its own SQLSTATE.
#
# Nor does the install script, which names operators and functions without their
# schema.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $captured = 'CAPTU';
my $node = new_node('hostile');

$node->safe_psql('postgres', 'CREATE ROLE evil LOGIN; CREATE ROLE app LOGIN');
$node->safe_psql('postgres', 'CREATE DATABASE shop OWNER evil');

# Run as the database owner.
sub evil
{
	my ($sql) = @_;

	$node->safe_psql(
		'shop', $sql,
		extra_params => [ '-U', 'evil' ]);
	return;
}

my $trap = qq{LANGUAGE plpgsql AS \$\$ BEGIN RAISE EXCEPTION 'captured' USING ERRCODE = '$captured'; END \$\$};
my @functions = (
	'idem_grant(text, text)', 'idem_grant(name, text)',
	'idem_revoke(text, text)', 'idem_revoke(name, text)',
	'idem_enqueue(text, text)', 'idem_call(text, text, text)',
	'idem_queue_set(queue text, owner text)', 'idem_cleanup(integer)',
	'idem_cleanup(bigint)', 'idem_forget(text, text)',
	'idem_doctor()', 'idem_checks(text)', 'idem_checks_local(bigint)', 'idem_citus_table(oid)', 'idem_report()', 'idem_report_html(text, text)',
	'idem_version()', 'idem_pause(text)',
	'clock_timestamp()', 'current_database()',
	'current_setting(text, boolean)', 'pg_reload_conf()',
	'format(text, text)', 'count()');
my @operands = (
	[ 'text', 'text' ], [ 'name', 'name' ], [ 'name', 'text' ],
	[ 'oid', 'oid' ], [ 'oid', 'regnamespace' ], [ 'oid', 'regclass' ],
	[ 'integer', 'integer' ], [ 'bigint', 'integer' ],
	[ 'timestamptz', 'timestamptz' ], [ 'boolean', 'boolean' ]);

evil(join ';', map { "CREATE FUNCTION public.$_ RETURNS text $trap" } @functions);
foreach my $operands (@operands)
{
	my ($left, $right) = @$operands;

	evil("CREATE FUNCTION public.trap($left, $right) RETURNS boolean $trap;"
		  . join ';',
		map { "CREATE OPERATOR public.$_ (LEFTARG = $left, RIGHTARG = $right, FUNCTION = public.trap)" }
		  qw(= <> < > <= >= ~ ||));
}
evil("CREATE FUNCTION public.trap() RETURNS integer $trap");
evil("CREATE VIEW public.$_ AS SELECT public.trap() AS oid")
  foreach qw(pg_class pg_locks pg_proc pg_namespace pg_database pg_extension);
evil("CREATE DOMAIN public.$_ AS oid CHECK (public.trap() IS NULL)")
  foreach qw(regclass regprocedure regrole regnamespace);

# SQLSTATE of what a superuser runs in that database
sub state_of
{
	my ($sql) = @_;

	return sqlstate($node, $sql, db => 'shop');
}

# every view of ours, and what the manual tells a superuser to run
sub nothing_is_captured
{
	my ($path) = @_;
	my @views = split /\n/,
	  $node->safe_psql('postgres',
		q{SELECT relname FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'v') ORDER BY 1});

	is(state_of("SELECT * FROM idem.$_"), '00000', "$path: idem.$_") foreach @views;
	is(state_of("SELECT $_"), '00000', "$path: $_")
	  foreach q{pg_catalog.idem_grant('app', 'app')},
	  q{pg_catalog.idem_revoke('app', 'app')},
	  q{pg_catalog.idem_queue_set('mail', owner => 'app')},
	  q{pg_catalog.idem_enqueue('mail', '{}')},
	  q{pg_catalog.idem_call('k ' || random(), 'safe.handler', '{}')},
	  q{pg_catalog.idem_forget('absent', '')},
	  q{pg_catalog.idem_pause('mail')},
	  q{pg_catalog.idem_resume('mail')},
	  q{pg_catalog.idem_cleanup(10)},
	  q{pg_catalog.idem_doctor()},
	  q{pg_catalog.idem_report()};
	return;
}

my @fixes;

sub fixes_are_not_captured
{
	my ($path) = @_;
	is(state_of($_), '00000', "$path: H1: $_") foreach @fixes;
	return;
}

$node->safe_psql(
	'shop', q{
	CREATE EXTENSION idem;
	CREATE SCHEMA safe;
	CREATE FUNCTION safe.handler(payload jsonb) RETURNS jsonb LANGUAGE sql RETURN payload});

# an operator is called only where there is a row
$node->safe_psql(
	'shop', q{
	SELECT pg_catalog.idem_lease('parked', '1 us', on_expiry => 'park');
	SELECT pg_catalog.idem_lease('expired', '1 us');
	SELECT pg_catalog.idem_claim('claimed', ttl => '1 us');
	SELECT pg_catalog.idem_enqueue('dead');
	SELECT pg_catalog.idem_fail(job_id, token, dead => true) FROM pg_catalog.idem_fetch('dead');
	SELECT pg_catalog.idem_enqueue('waiting')});

# the fixes of the doctor that are whole statements, whether there is anything to fix or not
my $texts = q{
	  FROM pg_catalog.pg_class AS c,
		   pg_catalog.pg_get_viewdef(c.oid) AS d,
		   pg_catalog.regexp_matches(d, %s, 'g') AS m
	 WHERE c.relnamespace OPERATOR(pg_catalog.=) 'idem_internal'::pg_catalog.regnamespace
	   AND c.relname OPERATOR(pg_catalog.~) '^checks'};
# some need pg_cron or Citus
@fixes = grep { !/cron\.schedule|pg_dist_node|%[sL]/ } split /\n/,
  $node->safe_psql(
	'shop',
	q{SELECT pg_catalog.replace(m[1], '''''', '''')}
	  . sprintf($texts, q{$re$'((?:SELECT|DO) (?:[^']|'')*;)'$re$}));
cmp_ok(scalar @fixes, '>=', 8, 'there are fixes');
is( $node->safe_psql(
		'shop',
		'SELECT m[1]'
		  . sprintf($texts, q{$re$'((?:[^']|'')*)'$re$})
		  . q{ AND m[1] OPERATOR(pg_catalog.~) $re$(^|[^.])\midem_\w+\($re$}),
	'', 'H1: no text of the doctor calls a function of idem without its schema');

#
# the usual search_path
#

is(state_of(q{SELECT idem_grant('app', 'app')}), '00000', 'idem_grant() of two literals is ours');
is(state_of(q{SELECT idem_revoke('app', 'app')}), '00000', 'and so is idem_revoke()');
is(state_of($_), $captured, "literals match another function better: $_")
  foreach q{SELECT idem_enqueue('mail', '{}')},
  q{SELECT idem_call('k', 'safe.handler', '{}')},
  q{SELECT idem_queue_set('mail', owner => 'app')};
is(state_of(q{SELECT idem_enqueue('mail', '{}'::jsonb)}), '00000', 'not with a cast to the type of ours');
is( state_of(q{SELECT count(*) FROM pg_class WHERE relnamespace = 'idem'::regnamespace}),
	$captured,
	'an operator is captured, too');
nothing_is_captured('usual search_path');
fixes_are_not_captured('usual search_path');
is( $node->safe_psql(
		'shop', q{SELECT status, detail ~ ' are named idem_' FROM pg_catalog.idem_doctor() WHERE "check" = 'functions'}),
	'warn|t',
	'the doctor warns of the functions');

#
# the search_path of the database finds the traps before pg_catalog
#

evil('ALTER DATABASE shop SET search_path = public, pg_catalog');
is(state_of(q{SELECT idem_grant('app', 'app')}), $captured, 'an unqualified call is captured');
is(state_of(q{SELECT 1 WHERE 'a'::text = 'b'}), $captured, 'and so is an operator');
nothing_is_captured('hostile search_path');
fixes_are_not_captured('hostile search_path');
is(state_of('DROP EXTENSION idem'), '00000', 'hostile search_path: DROP EXTENSION');
is(state_of('CREATE EXTENSION idem'), '00000', 'hostile search_path: CREATE EXTENSION');
nothing_is_captured('hostile search_path, installed there');

#
# the install script
#
# In another database every operator, function, relation and type of pg_catalog has
# a twin in public, as far as a superuser can make one.  Whatever the search_path of
# the session that installs, no member comes to depend on a twin.
#

$node->safe_psql('postgres', 'CREATE DATABASE twins');
$node->safe_psql(
	'twins', q{
	CREATE FUNCTION pg_temp.make(VARIADIC commands text[]) RETURNS integer LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. cardinality(commands) LOOP
			EXECUTE commands[i];
		END LOOP;
		RETURN 1;
	EXCEPTION WHEN OTHERS THEN
		RETURN 0;
	END $$;
	CREATE TABLE public.made AS
	SELECT 'operators' AS kind,
		   pg_temp.make(format('CREATE OR REPLACE FUNCTION public.twin(%s, %s) RETURNS boolean LANGUAGE %s', l, r,
							   CASE WHEN 'unknown' IN (l, r) THEN $$internal AS 'texteq'$$ ELSE 'sql RETURN true' END),
						format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.twin)', oprname, l, r)) AS made
	  FROM (SELECT oprname, oprleft::regtype::text AS l, oprright::regtype::text AS r
			  FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprleft <> 0
			UNION
			SELECT DISTINCT oprname, oprleft::regtype::text, 'unknown'
			  FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprleft <> 0) AS o;
	INSERT INTO public.made
	SELECT 'functions',
		   pg_temp.make(format('CREATE FUNCTION public.%I(%s) RETURNS %s%s LANGUAGE plpgsql AS $$BEGIN RAISE ''captured''; END$$', p.proname,
							   pg_get_function_identity_arguments(p.oid),
							   CASE WHEN p.proretset THEN 'SETOF ' ELSE '' END,
							   CASE WHEN p.proargmodes && '{o,t,b}' THEN 'record' ELSE format_type(p.prorettype, NULL) END))
	  FROM pg_proc AS p
	 WHERE p.pronamespace = 'pg_catalog'::regnamespace;
	INSERT INTO public.made
	SELECT 'relations', pg_temp.make(format('CREATE VIEW public.%I AS SELECT 1 AS trap', relname))
	  FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v');
	INSERT INTO public.made
	SELECT 'types', pg_temp.make(format('CREATE DOMAIN public.%I AS pg_catalog.int4', typname))
	  FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b' AND typname !~ '^_'});
foreach my $kind ([ operators => 1000 ], [ functions => 1500 ], [ relations => 100 ], [ types => 50 ])
{
	cmp_ok(
		$node->safe_psql(
			'twins',
			"SET search_path = pg_catalog, pg_temp; SELECT sum(made) FROM public.made WHERE kind = '$kind->[0]'"),
		'>', $kind->[1],
		"there are twins: $kind->[0]");
}

# What the members were made of, and on what outside of pg_catalog, idem and
# idem_internal they depend.  With this search_path the server names the schema of all that is not in
# pg_catalog, and pg_temp comes last.
my $definitions = q{
	SET search_path = pg_catalog, pg_temp;
	WITH member AS (
		SELECT d.classid, d.objid
		  FROM pg_depend AS d
		 WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
		   AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')),
	part AS (
		SELECT classid, objid FROM member
		UNION ALL
		SELECT 'pg_rewrite'::regclass, r.oid FROM member AS m JOIN pg_rewrite AS r ON r.ev_class = m.objid
		 WHERE m.classid = 'pg_class'::regclass
		UNION ALL
		SELECT 'pg_class'::regclass, i.indexrelid FROM member AS m JOIN pg_index AS i ON i.indrelid = m.objid
		 WHERE m.classid = 'pg_class'::regclass)
	SELECT pg_get_ruledef(objid) AS line FROM part WHERE classid = 'pg_rewrite'::regclass
	UNION ALL
	SELECT pg_get_functiondef(objid) FROM part WHERE classid = 'pg_proc'::regclass
	UNION ALL
	SELECT a.attrelid::regclass || ' ' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
	  FROM part AS p JOIN pg_attribute AS a ON a.attrelid = p.objid AND a.attnum > 0
	 WHERE p.classid = 'pg_class'::regclass
	UNION ALL
	SELECT pg_describe_object(p.classid, p.objid, 0) || ' depends on ' || r.type || ' ' || r.identity
	  FROM part AS p
	  JOIN pg_depend AS d ON d.classid = p.classid AND d.objid = p.objid
	 CROSS JOIN LATERAL pg_identify_object(d.refclassid, d.refobjid, 0) AS r
	 WHERE r.schema NOT IN ('pg_catalog', 'idem', 'idem_internal')
	 ORDER BY 1;
};
my $clean = $node->safe_psql('postgres', $definitions);

like($clean, qr/CREATE RULE "_RETURN" AS\s+ON SELECT TO idem_internal\.checks /, 'the views are compared');
like($clean, qr/FUNCTION pg_catalog\.idem_doctor\(\)/, 'and so are the functions');
unlike($clean, qr{ depends on |OPERATOR\((?!pg_catalog\.)|\bpublic\.}, 'nothing outside of pg_catalog and the schemas of the extension is in use');

my $here = 'public, pg_catalog';
foreach my $case (
	[ 'by default', '', '' ],
	[ 'of the session', '', "SET search_path = $here" ],
	[ 'of the database', "ALTER DATABASE twins SET search_path = $here", '' ],
	[ 'of the role', "ALTER ROLE CURRENT_USER SET search_path = $here", '' ],
	[
		'with pg_temp first', '',
		"SET search_path = pg_temp, $here;
		 CREATE TEMP VIEW pg_class AS SELECT 1 AS trap; CREATE TEMP VIEW pg_settings AS SELECT 1 AS trap;
		 CREATE DOMAIN pg_temp.regclass AS pg_catalog.int4; CREATE DOMAIN pg_temp.text AS pg_catalog.int4"
	])
{
	my ($what, $set, $session) = @$case;

	$node->safe_psql('postgres', $set);
	if ($what ne 'by default')
	{
		like(
			$node->safe_psql(
				'twins', qq{
				$session;
				CREATE VIEW public.control AS SELECT oid::pg_catalog.int8 = 1::pg_catalog.int8 AS equal FROM pg_catalog.pg_class;
				SET search_path = pg_catalog, pg_temp;
				SELECT pg_get_viewdef('public.control'::regclass)}),
			qr/OPERATOR\(public\.=\)/,
			"search_path $what: another view depends on a twin");
		$node->safe_psql('twins', 'DROP VIEW public.control');
	}
	is($node->safe_psql('twins', "$session; CREATE EXTENSION idem; $definitions"),
		$clean, "search_path $what: no member depends on a twin");
	$node->safe_psql('twins', 'DROP EXTENSION idem');
	$node->safe_psql('postgres',
		'ALTER DATABASE twins RESET search_path; ALTER ROLE CURRENT_USER RESET search_path');
}

#
# what the manual says
#

my $administrative = join '|',
  qw(grant revoke queue_set queue_drop pause resume forget cleanup doctor report stats_reset);
foreach my $file (glob('README.md doc/*.md doc/monitoring/*'))
{
	my $text = slurp_file($file);
	my @unqualified = $text =~ /\b((?:SELECT|FROM|WHILE)\s+idem_(?:$administrative)\()/g;

	is("@unqualified", '', "$file: calls of administrators are qualified");
}

$node->stop;
log_ok($node);
done_testing();
