# pg_dump and pg_restore copy live keys with owner, request, result and expiry,
# and the privileges granted by idem_grant().  Calls that were refused before the
# dump are refused after the restore.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('source', extension => 0);
my $other = new_node('other', extension => 0);
my $dir = PostgreSQL::Test::Utils::tempdir();

$node->safe_psql(
	'postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE stranger LOGIN;
	CREATE ROLE team;
	CREATE ROLE "Team Member" LOGIN IN ROLE team;
	CREATE ROLE ops LOGIN;
	CREATE ROLE monitor LOGIN;
	CREATE ROLE nothing LOGIN;
	CREATE DATABASE source;
});
$node->safe_psql(
	'source', q{
	CREATE EXTENSION idem;
	SELECT idem_grant('app', 'app');
	SELECT idem_grant('stranger', 'app');
	SELECT idem_grant('Team Member', 'app');
	SELECT idem_grant('ops', 'admin');
	SELECT idem_grant('monitor', 'monitor');

	CREATE SCHEMA app AUTHORIZATION app;
	SET SESSION AUTHORIZATION app;
	CREATE VIEW app.charge AS
	SELECT c.*, (idem_claim('charge', scope => 'eu')).result AS eu
	  FROM idem_claim('charge') AS c;
	CREATE FUNCTION app.charge() RETURNS text LANGUAGE sql
	BEGIN ATOMIC SELECT g.status FROM idem_get('charge') AS g; END;
	BEGIN;
	SELECT idem_claim('charge', request => '{"amount": 9900}', ttl => '30 days');
	SELECT idem_finish('charge', '{"charge_id": "ch_1", "text": "tab \t, \\\\N"}');
	COMMIT;
	BEGIN;
	SELECT idem_claim('charge', scope => 'eu', ttl => '1 hour');
	SELECT idem_finish('charge', '"eu"', scope => 'eu');
	COMMIT;
	SELECT idem_claim('not finished');
	BEGIN;
	SELECT idem_claim('finished with a json null');
	SELECT idem_finish('finished with a json null', 'null');
	COMMIT;
	SELECT idem_claim(E'\\\\.\ttab\nline \\\\N "quote" \u00e4\u20ac');
	RESET SESSION AUTHORIZATION;

	SET SESSION AUTHORIZATION "Team Member";
	SET idem.owner = 'team';
	SELECT idem_claim('shared');
	RESET SESSION AUTHORIZATION;
	RESET idem.owner;

	SET idem.clock_offset = -100000;
	SELECT idem_claim('expired', ttl => '1 s');
});

# everything about every key; roles by name, because their numbers differ
my $all_keys = q{
	SELECT key, scope, owner, encode(request, 'hex'), result, finished_at,
		   created_at, expires_at
	  FROM idem.keys ORDER BY key, scope};
my $before = $node->safe_psql('source', $all_keys);

is($node->safe_psql('source', 'SELECT count(*) FROM idem.keys'),
	'7', 'there are keys to dump');

# a claim that is open while the dumps are made
my $open = session($node, db => 'source');
$open->query(q{BEGIN; SELECT idem_claim('open')});

#
# the dumps
#

my @dump = ($node->installed_command('pg_dump'),
	'--dbname' => $node->connstr('source'));

$node->command_ok([ @dump, '--file' => "$dir/plain.sql" ], 'plain dump');
$node->command_ok([ @dump, '--format=custom', '--file' => "$dir/custom.dump" ],
	'custom dump');

my $plain = slurp_file("$dir/plain.sql");

like($plain, qr/^CREATE EXTENSION .*\bidem\b/m, 'dump creates the extension');
unlike($plain, qr/CREATE (TABLE|SCHEMA|INDEX|VIEW|FUNCTION|TYPE) (?!app\b)/,
	'dump does not create members of the extension');
unlike($plain, qr/ALTER TABLE[^;]*idem\.keys/,
	'dump does not alter the table');
like($plain, qr/^COPY idem\.keys /m, 'dump carries the keys');

#
# restored: a plain dump into the same cluster, a custom one into another whose
# roles have other OIDs
#

$node->safe_psql('postgres', 'CREATE DATABASE plain');
$node->command_ok(
	[
		$node->installed_command('psql'), '-Xq',
		'-v' => 'ON_ERROR_STOP=1',
		'-d' => $node->connstr('plain'),
		'-f' => "$dir/plain.sql"
	],
	'plain dump can be restored');

$other->safe_psql(
	'postgres', q{
	CREATE ROLE first_come;
	CREATE ROLE nothing LOGIN;
	CREATE ROLE monitor LOGIN;
	CREATE ROLE ops LOGIN;
	CREATE ROLE team;
	CREATE ROLE "Team Member" LOGIN IN ROLE team;
	CREATE ROLE stranger LOGIN;
	CREATE ROLE app LOGIN;
	CREATE DATABASE custom;
});
isnt(
	$node->safe_psql('postgres', "SELECT 'app'::regrole::oid"),
	$other->safe_psql('postgres', "SELECT 'app'::regrole::oid"),
	'the roles have other numbers in the other cluster');
$node->command_ok(
	[
		$node->installed_command('pg_restore'), '--exit-on-error',
		'--dbname' => $other->connstr('custom'),
		"$dir/custom.dump"
	],
	'custom dump can be restored into another cluster');

$open->query('COMMIT');
$open->quit;

foreach my $target ([ $node, 'plain' ], [ $other, 'custom' ])
{
	my ($server, $db) = @$target;
	my @as_app = (db => $db, user => 'app');
	my $app = session($server, db => $db, user => 'app');

	is($server->safe_psql($db, $all_keys),
		$before, "$db: all keys are there with everything about them");

	# what idem_grant() gave
	is( $server->safe_psql(
			$db, q{
			SELECT r.rolname || ' ' || f.name
			  FROM (VALUES ('app'), ('stranger'), ('Team Member'), ('ops'),
						   ('monitor'), ('nothing')) AS r (rolname),
				   (VALUES ('idem_claim'), ('idem_get'), ('idem_cleanup'))
					   AS f (name)
			 WHERE has_function_privilege(r.rolname,
					   ('pg_catalog.' || f.name)::regproc, 'EXECUTE')
			 ORDER BY r.rolname COLLATE "C", f.name}),
		join("\n",
			'Team Member idem_claim',
			'Team Member idem_get',
			'app idem_claim',
			'app idem_get',
			'ops idem_claim',
			'ops idem_cleanup',
			'ops idem_get',
			'stranger idem_claim',
			'stranger idem_get'),
		"$db: the privileges on functions are there, and no others");
	is( sqlstate(
			$server, 'SELECT count(*) FROM idem.key_summary',
			db => $db,
			user => 'monitor'),
		'00000',
		"$db: a monitor may see the summary");
	is( sqlstate(
			$server, 'SELECT count(*) FROM idem.key_status',
			db => $db,
			user => 'monitor'),
		'42501',
		"$db: but no keys");
	is( sqlstate(
			$server, 'SELECT count(*) FROM idem.key_status',
			db => $db,
			user => 'ops'),
		'00000',
		"$db: an administrator may see keys");
	is( sqlstate(
			$server, "SELECT idem_claim('charge')",
			db => $db,
			user => 'nothing'),
		'42501',
		"$db: a role without grants may do nothing");

	# objects of a role that use the functions and their result types
	is( $app->query(q{SELECT status, result ->> 'charge_id', eu, app.charge() FROM app.charge}),
		'finished|ch_1|"eu"|finished',
		"$db: a view and a function of an application work");
	is( $server->safe_psql($db, q{SELECT has_type_privilege('app', 'idem.claim_result', 'USAGE')}),
		'f', "$db: the result types are closed");

	# the keys work as before
	is( $app->query(
			q{SELECT status, result ->> 'charge_id', result ->> 'text'
			    FROM idem_claim('charge', request => '{"amount": 9900}')}),
		"finished|ch_1|tab \t, \\N",
		"K2: $db: a duplicate gets the stored result");
	is( $app->sqlstate(
			q{SELECT idem_claim('charge', request => '{"amount": 1}')}),
		'ID001',
		"K7: $db: another request is refused");
	is( $app->query(
			q{SELECT status, result FROM idem_claim('charge', scope => 'eu')}),
		'finished|"eu"',
		"K2: $db: the same key in its other scope");
	is( $app->query(
			q{SELECT status, result, result IS NULL
			    FROM idem_claim('not finished');
			  SELECT status, result, result IS NULL
			    FROM idem_claim('finished with a json null')}),
		"finished||t\nfinished|null|f",
		"K2: $db: no result and a null result stay apart");
	is( $app->query(
			q{SELECT status FROM
			  idem_claim(E'\\\\.\ttab\nline \\\\N "quote" \u00e4\u20ac')}),
		'finished',
		"K2: $db: a key with special characters");
	is( $app->sqlstate(q{SELECT idem_claim('shared')}),
		'42501',
		"$db: the key of another role is refused");
	is( sqlstate(
			$server, q{SELECT idem_claim('charge')},
			db => $db,
			user => 'stranger'),
		'42501',
		"$db: also the other way round");
	is( $server->safe_psql(
			$db, q{
			SET SESSION AUTHORIZATION "Team Member";
			SELECT status FROM idem_claim('shared')}),
		'finished',
		"$db: a member of the owning role may");
	is( $app->query(q{SELECT status FROM idem_claim('expired')}),
		'claimed', "K9: $db: any role may claim an expired key");
	is( $app->query(q{SELECT status FROM idem_claim('open')}),
		'claimed',
		"K1: $db: a claim that was open at the time is not there");
	is( $app->query(
			q{SELECT status FROM idem_claim('new');
			  SELECT status FROM idem_claim('new')}),
		"claimed\nfinished",
		"K3: $db: new keys work");
	is( $server->safe_psql(
			$db, q{
			SET idem.clock_offset = 3601;
			SELECT count(*) FROM idem_get('charge', 'eu');
			SELECT count(*) FROM idem_get('charge')}),
		"0\n1",
		"K9: $db: each key expires at its own time");
	$app->quit;
}

# a restored database can be dumped again
$node->command_ok(
	[
		$node->installed_command('pg_dump'),
		'--dbname' => $other->connstr('custom'),
		'--file' => "$dir/again.sql"
	],
	'the restored database can be dumped');

my @grants = sort grep { /^(GRANT|REVOKE)/ } split /\n/, $plain;
my @grants_again =
  sort grep { /^(GRANT|REVOKE)/ } split /\n/, slurp_file("$dir/again.sql");
is_deeply(\@grants_again, \@grants, 'its privileges are dumped the same');
cmp_ok(scalar(@grants), '>', 0, 'there are some');

foreach my $server ($node, $other)
{
	$server->stop;
	log_ok($server);
}
done_testing();
