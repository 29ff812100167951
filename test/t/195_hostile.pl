# A database owner that is not a superuser creates objects to capture calls of a superuser:
# functions that are a better match for literals than ours, operators, tables and
# types of the same name, and a search_path that finds them first.
#
# What the manual tells a superuser to run, and the fixes of idem_doctor() (H1),
# reach none of them.  Each trap raises an error with its own SQLSTATE.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $captured = 'CAPTU';
my $node = new_node('hostile', extension => 0);

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
	'idem_doctor()', 'idem_checks(text)',
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
		q{SELECT 'keys' UNION ALL SELECT unnest('{key_status,key_summary,lease_status,job_status,queue_status,stats,queue_stats,cleanup_progress,worker_status,checks,health}'::text[])});

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
	  q{pg_catalog.idem_doctor()};
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
@fixes = grep { !/cron\.schedule|%s/ } split /\n/,
  $node->safe_psql(
	'shop', q{
	SELECT pg_catalog.replace(m[1], '''''', '''')
	  FROM pg_catalog.pg_get_viewdef('idem.checks'::pg_catalog.regclass) AS d,
		   pg_catalog.regexp_matches(d, $re$'((?:SELECT|DO) (?:[^']|'')*;)'$re$, 'g') AS m});
cmp_ok(scalar @fixes, '>=', 8, 'there are fixes');
is( $node->safe_psql(
		'shop', q{
		SELECT m[1] FROM pg_catalog.pg_get_viewdef('idem.checks'::pg_catalog.regclass) AS d,
			   pg_catalog.regexp_matches(d, $re$'((?:[^']|'')*)'$re$, 'g') AS m
		 WHERE m[1] ~ $re$(^|[^.])\midem_\w+\($re$}),
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
# what the manual says
#

my $administrative = join '|',
  qw(grant revoke queue_set queue_drop pause resume forget cleanup doctor stats_reset);
foreach my $file (glob('README.md doc/*.md doc/monitoring/*'))
{
	my $text = slurp_file($file);
	my @unqualified = $text =~ /\b((?:SELECT|FROM|WHILE)\s+idem_(?:$administrative)\()/g;

	is("@unqualified", '', "$file: calls of administrators are qualified");
}

$node->stop;
log_ok($node);
done_testing();
