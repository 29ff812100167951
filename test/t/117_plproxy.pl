# A router on PL/Proxy (idem_plproxy.sql) with four shard databases on two servers: what is routed,
# what is refused, and every trap of a set-up by hand.  Then four more shards take slots while
# clients work, checked against a ledger.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my ($libdir) = run_command([ 'pg_config', '--pkglibdir' ]);
my ($sharedir) = run_command([ 'pg_config', '--sharedir' ]);
my $python = '/usr/bin/python3';
my $script = "$sharedir/extension/idem_plproxy.sql";

plan skip_all => 'PL/Proxy is not installed' unless -f "$libdir/plproxy.so";

# Sessions that set synchronous_commit to on wait for a standby that does not exist.
my $conf = q{
max_connections = 60
restart_after_crash = on
};
my $one = new_node('one', conf => $conf, extension => 0);
my $two = new_node('two', conf => $conf . q{
synchronous_standby_names = 'nobody'
synchronous_commit = local
}, extension => 0, init => { allows_streaming => 1 });

my @shards;    # node and name of the database
my @connstrs;

sub add_shard
{
	my ($node, $slots) = @_;
	my $number = @shards;
	my $db = "s$number";

	$node->safe_psql('postgres', "CREATE DATABASE $db");
	push @shards, [ $node, $db ];
	push @connstrs, sprintf('host=%s port=%d dbname=%s', $node->host, $node->port, $db);
	on_shard($number, qq{
		CREATE EXTENSION idem;
		SELECT idem_shard_set('$slots', number => $number);
		CREATE SCHEMA shop;
		CREATE TABLE shop.ledger (key text NOT NULL, shard integer NOT NULL DEFAULT $number);
		CREATE FUNCTION shop.charge(p jsonb) RETURNS jsonb LANGUAGE plpgsql AS \$f\$
		BEGIN
			INSERT INTO shop.ledger (key) VALUES (coalesce(p ->> 'key', gen_random_uuid()::text));
			PERFORM set_config('synchronous_commit', p ->> 'commit', true) WHERE p ? 'commit';
			PERFORM pg_advisory_xact_lock((p ->> 'lock')::bigint) WHERE p ? 'lock';
			RETURN p;
		END \$f\$;
		CREATE FUNCTION error_of(command text) RETURNS text LANGUAGE plpgsql AS \$f\$
		DECLARE m text; d text; h text;
		BEGIN
			EXECUTE command;
			RETURN '00000';
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS m = MESSAGE_TEXT, d = PG_EXCEPTION_DETAIL, h = PG_EXCEPTION_HINT;
			RETURN concat_ws('|', SQLSTATE, m, d, h);
		END \$f\$});
	return $number;
}

sub on_shard
{
	my ($number, $sql) = @_;
	my ($node, $db) = @{ $shards[$number] };

	return run($sql, node => $node, db => $db);
}

sub router { return run(shift, node => $one, db => 'router') }

# The sum of what the query returns on each shard
sub on_all
{
	my ($sql) = @_;
	my $sum = 0;

	$sum += on_shard($_, $sql) foreach 0 .. $#shards;
	return $sum;
}

# SQLSTATE, message, detail and hint of an error
sub error_of { return router('SELECT error_of($q$' . shift() . '$q$)') }
sub state_of { return substr(error_of(shift), 0, 5) }

# The error without the name of the shard that raised it; dies without that name
sub names_shard
{
	my ($number, $error) = @_;
	my ($node, $db) = @{ $shards[$number] };
	my $name = sprintf 'Shard %d (host=%s port=%d dbname=%s) raised this error.', $number, $node->host, $node->port, $db;

	$error =~ s/\n?\Q$name\E// or return "no name: $error";
	return $error;
}

sub refresh { return router('SELECT shard, slots FROM idem_router.refresh()') }
sub findings { return router(q{SELECT shard, "check" FROM idem_router."check"() WHERE status <> 'ok' ORDER BY 1 NULLS FIRST, 2}) }

add_shard($one, '{[0,256)}');
add_shard($one, '{[256,512)}');
add_shard($two, '{[512,768)}');
add_shard($two, '{[768,1024)}');
my ($on_one, $on_two) = (1, 2);

#
# The installation
#

$one->safe_psql('postgres', 'CREATE DATABASE router');

sub install
{
	my ($err);

	$one->psql('router', "\\i $script", stderr => \$err, extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	return $err =~ /ERROR:  (\w+):/ ? $1 : '00000';
}

is(install(), '55000', 'the script wants PL/Proxy');
router('CREATE EXTENSION plproxy');
is(install(), '55000', 'and idem');
router('CREATE EXTENSION idem');
is(install(), '55000', 'and a map without slots, so that the router refuses keys itself');
router(q{SELECT idem_shard_set('{}')});

# Objects of another role, in a schema that comes first for all roles, fail if they are used.
my $hostile = q{
	CREATE SCHEMA hostile;
	GRANT USAGE ON SCHEMA hostile TO PUBLIC;
	CREATE FUNCTION hostile.fail() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
	CREATE FUNCTION hostile.idem_slot(text, text) RETURNS integer LANGUAGE sql AS 'SELECT hostile.fail()::integer';
	CREATE FUNCTION hostile.random() RETURNS float8 LANGUAGE sql AS 'SELECT hostile.fail()::integer';
	CREATE FUNCTION hostile.to_jsonb(timestamptz) RETURNS jsonb LANGUAGE sql AS 'SELECT hostile.fail()::text::jsonb';
	CREATE FUNCTION hostile.format(text, text) RETURNS text LANGUAGE sql AS 'SELECT hostile.fail()::text';
	CREATE FUNCTION hostile.idem_call(text, text, jsonb, interval, interval, text) RETURNS idem.call_result
		LANGUAGE sql AS 'SELECT hostile.fail()::text, NULL::jsonb, true';
	CREATE FUNCTION hostile.same(integer, integer) RETURNS boolean LANGUAGE sql AS 'SELECT hostile.fail()';
	CREATE OPERATOR hostile.= (LEFTARG = integer, RIGHTARG = integer, FUNCTION = hostile.same);
	CREATE OPERATOR hostile.<> (LEFTARG = integer, RIGHTARG = integer, FUNCTION = hostile.same);
	CREATE TABLE hostile.slots (slot integer, shard integer);
	CREATE TABLE hostile.pg_proc (proname text);
	CREATE DOMAIN hostile.text AS pg_catalog.text CHECK (hostile.fail());
	CREATE DOMAIN hostile.int4 AS pg_catalog.int4 CHECK (hostile.fail());
};

router($hostile);
router('ALTER DATABASE router SET search_path = hostile, public, pg_catalog');
is(install(), '00000', 'it does not care about hostile objects');
router('ALTER DATABASE router RESET search_path');
is( router(q{
	SELECT string_agg(pg_describe_object(classid, objid, 0), ', ') FROM (
		SELECT 'pg_proc'::regclass AS classid, oid AS objid FROM pg_proc WHERE pronamespace = 'idem_router'::regnamespace
		UNION ALL SELECT 'pg_class'::regclass, oid FROM pg_class WHERE relnamespace = 'idem_router'::regnamespace AND relkind <> 'c'
		UNION ALL SELECT 'pg_type'::regclass, t.oid FROM pg_type AS t JOIN pg_class AS c ON c.oid = t.typrelid AND c.relkind = 'c'
				   WHERE t.typnamespace = 'idem_router'::regnamespace
		UNION ALL SELECT 'pg_constraint'::regclass, oid FROM pg_constraint WHERE connamespace = 'idem_router'::regnamespace) AS o
	 WHERE obj_description(objid, classid::regclass::name) IS NULL}),
	'', 'every object has a comment');
is( router(q{
	SELECT string_agg(a.attrelid::regclass || '.' || a.attname, ', ')
	  FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid AND c.relkind IN ('r', 'c')
	 WHERE c.relnamespace = 'idem_router'::regnamespace AND attnum > 0 AND col_description(attrelid, attnum) IS NULL}),
	'', 'and every column');
is( router(q{
	SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc AS p
	 WHERE pronamespace = 'idem_router'::regnamespace AND prolang <> (SELECT oid FROM pg_language WHERE lanname = 'plproxy')
	   AND prosqlbody IS NULL AND NOT 'search_path=pg_catalog, pg_temp' = ANY (coalesce(proconfig, '{}'))}),
	'', 'every function in PL/pgSQL has its own search_path');
is( router(q{
	SELECT count(*) FROM pg_proc AS p JOIN pg_proc AS r ON r.proname = p.proname AND r.pronamespace = 'idem_router'::regnamespace
	 WHERE p.pronamespace = 'pg_catalog'::regnamespace
	   AND regexp_replace(pg_get_function_arguments(p.oid), 'regproc', 'text') = pg_get_function_arguments(r.oid)
	   AND p.prorettype = r.prorettype AND p.proretset = r.proretset}),
	router(q{SELECT count(*) FROM pg_proc WHERE pronamespace = 'idem_router'::regnamespace AND proname ~ '^idem_'}),
	'arguments, defaults and results are those of the functions of idem');

# What the manual says that is routed and refused is what there is; 001_meta.pl compares it with all functions of idem.
my ($section) = slurp_file("$FindBin::RealBin/../../doc/scale.md") =~ /^## PL\/Proxy$(.*?)^## /ms;
my %told;
foreach my $row ($section =~ /^\| ((?:`idem_\w+`.*?)) \|/mg) { $told{$_} = 1 foreach $row =~ /`(idem_\w+)`/g }
my ($without) = $section =~ /^\| not in `idem_router` \|.*?\n\|---\|---\|\n((?:\|.*\n)+)/m;
delete @told{ $without =~ /`(idem_\w+)`/g };
is(join(' ', sort keys %told), router(q{SELECT string_agg(DISTINCT proname, ' ' ORDER BY proname) FROM pg_proc WHERE pronamespace = 'idem_router'::regnamespace AND proname ~ '^idem_'}) =~ s/\s+/ /gr,
	'the manual names all functions of the router');

# The file again, and over an older copy: the map and the grants stay, all else is that of the file.

my $all_objects = q{SELECT string_agg(pg_describe_object(classid, objid, 0), ', ' ORDER BY pg_describe_object(classid, objid, 0)) FROM pg_depend
	WHERE refclassid = 'pg_namespace'::regclass AND refobjid = 'idem_router'::regnamespace};
my $objects = router($all_objects);

is(install(), '00000', 'the file can be run again');
is(router($all_objects), $objects, 'with the same result');
router(q{
	CREATE ROLE old_app; CREATE ROLE old_admin; CREATE ROLE old_owner;
	CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (p0 'dbname=x');
	SELECT idem_router.grant_app('old_app');
	GRANT EXECUTE ON FUNCTION idem_router.refresh TO old_admin WITH GRANT OPTION;
	INSERT INTO idem_router.shards VALUES (7, 1024);
	INSERT INTO idem_router.slots VALUES (700, 7);
	DROP FUNCTION idem_router.idem_why, idem_router.on_idem_why;
	CREATE FUNCTION idem_router.older() RETURNS integer LANGUAGE sql RETURN 1;
	CREATE TYPE idem_router.old_type AS (a integer);
	GRANT EXECUTE ON FUNCTION idem_router.older TO old_app});
my $grants = q{SELECT has_function_privilege('old_app', 'idem_router.idem_call(text,text,jsonb,interval,interval,text)', 'EXECUTE'),
	has_function_privilege('old_app', 'idem_router.idem_why(bigint)', 'EXECUTE'), has_function_privilege('old_app', 'idem_router.refresh()', 'EXECUTE'),
	has_function_privilege('old_admin', 'idem_router.refresh()', 'EXECUTE WITH GRANT OPTION'), has_table_privilege('old_app', 'idem_router.slots', 'SELECT')};
is(install(), '00000', 'over an older copy');
is(router($all_objects), $objects, 'which is gone');
is(router('SELECT slot, shard FROM idem_router.slots; SELECT shard, jobs_from FROM idem_router.shards'), "700|7\n7|1024", 'its map stays');
is(router($grants), 't|t|f|t|t', 'its grants, too, and an application gets the new functions');
router('CREATE VIEW needs_router AS SELECT idem_router.idem_slot(\'k\')');
is(install(), '2BP01', 'an object of another role that depends on it is not dropped');
router('DROP VIEW needs_router');
foreach my $foreign ('TABLE idem_router.slots', 'FUNCTION idem_router.refresh()', 'TYPE idem_router.failure', 'SCHEMA idem_router')
{
	router("ALTER $foreign OWNER TO old_owner");
	is(install(), '42P06', "nothing of another role is adopted: $foreign");
	router("ALTER $foreign OWNER TO CURRENT_USER");
}
is(router($all_objects) . router('SELECT slot, shard FROM idem_router.slots'), "${objects}700|7", 'and nothing has changed');
router(q{DROP SERVER idem_router CASCADE; DELETE FROM idem_router.slots; DELETE FROM idem_router.shards; REVOKE ALL ON FUNCTION idem_router.refresh FROM old_admin;
	DROP OWNED BY old_app; DROP ROLE old_app, old_admin, old_owner});

# The server, in which any number of partitions may share the slots

sub server_options
{
	my (@numbers) = @_;

	return join ', ', map { "p$_ '$connstrs[$_]'" } @numbers;
}

router(q{CREATE FUNCTION error_of(command text) RETURNS text LANGUAGE plpgsql AS $f$
	DECLARE m text; d text; h text;
	BEGIN
		EXECUTE command;
		RETURN '00000';
	EXCEPTION WHEN OTHERS THEN
		GET STACKED DIAGNOSTICS m = MESSAGE_TEXT, d = PG_EXCEPTION_DETAIL, h = PG_EXCEPTION_HINT;
		RETURN concat_ws('|', SQLSTATE, m, d, h);
	END $f$});
is(state_of(q{SELECT idem_router.idem_call('k', 'shop.charge')}), 'ID006', 'before refresh() the router knows no shard');
is(state_of(q{SELECT idem_router.idem_cancel_many(queue => 'q')}), 'ID006', 'so that a call for all shards is refused, too');

# Every fix leads to ok, or to the next finding: follow() runs the first one word for word, where it says, until there
# is none.  Returns the checks in that order.  A fix that only people can do ends it.

sub findings_with_fix
{
	return map { [ split /\|/, $_, 3 ] } split /\n/, router(
		q{SELECT coalesce(shard, -1), "check", replace(fix, E'\n', '\n') FROM idem_router."check"() WITH ORDINALITY WHERE status <> 'ok' AND fix IS NOT NULL ORDER BY ordinality});
}

# A command, and others for the case that it is refused because of rows
sub on_shard_or_other
{
	while (my ($number, $command) = splice @_, 0, 2)
	{
		my ($node, $db) = @{ $shards[$number] };
		my $state = sqlstate($node, $command, db => $db);

		return if $state eq '00000';
		die "$command: $state" if $state ne '55000' || !@_;
	}
	return;
}

sub follow
{
	my ($what, @expected) = @_;
	my @seen;

	for (1 .. 20)
	{
		my ($first) = findings_with_fix();

		last if !$first;
		my ($shard, $check, $fix) = @$first;

		push @seen, $check;
		$fix =~ s/\\n/\n/g;
		if (my @commands = $fix =~ /^-- (?:[^:\n]*\b)?on shard (\d+): (.*)$/mg) { on_shard_or_other(@commands) }
		elsif ($fix =~ /^--/) { $seen[-1] .= ' (by people)'; last }
		else { router($fix) }
	}
	is(join(', ', @seen), join(', ', @expected), "the fixes of check() for $what");
	is(findings(), '', 'lead to a router without findings') if $expected[-1] !~ /by people/;
	return;
}

follow('no server', 'partitions', 'connection', 'connection (by people)');
router('DROP USER MAPPING FOR CURRENT_USER SERVER idem_router; DROP SERVER idem_router');
is(state_of('SELECT idem_router.refresh()'), '55000', 'and refresh() wants a server');
router('CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (' . join(', ', q{modular_mapping '1'}, server_options(0 .. 3)) . ')');
router('CREATE USER MAPPING FOR CURRENT_USER SERVER idem_router');
is(refresh(), join("\n", '0|{[0,256)}', '1|{[256,512)}', '2|{[512,768)}', '3|{[768,1024)}'), 'refresh() asks the shards for their slots');
is(findings(), '', 'check() finds nothing');
is(router(q{SELECT count(*) FROM idem_router."check"() WHERE fix IS NOT NULL}), 0, 'and there is nothing to fix');
router("ALTER SERVER idem_router OPTIONS (SET p1 '$connstrs[1] user=postgres')");
is(findings() =~ /^\|passwords$/m, 1, 'check() finds a user in the options of the server');
follow('a user in the options of the server', 'passwords');
router("ALTER SERVER idem_router OPTIONS (SET p1 '$connstrs[1] oauth_client_secret=secret scram_client_key=secret scram_server_key=secret')");
is(router(q{SELECT count(*) FILTER (WHERE value ~ 'secret') || ' of ' || count(*) FILTER (WHERE keyword ~ '^(oauth|scram)_') FROM idem_router.connection(1)}), '0 of 3', 'no part of a connection string shows a secret');
router("ALTER SERVER idem_router OPTIONS (SET p1 '$connstrs[1] password = ''it\\''s dbname=secret'' application_name=x')");
unlike(router(q{SELECT idem_router.name_of_shard(1) || string_agg(fix, '') FROM idem_router."check"()}), qr/secret|it\\/, 'no error and no fix shows a password');
follow('a password in the options of the server', 'passwords');

# Keys of each shard
my @keys;
push @{ $keys[ $_->[1] ] }, $_->[0]
  foreach map { [ split /\|/ ] } split /\n/, router(q{SELECT i, idem_slot(i::text) / 256 FROM generate_series(1, 1000) AS i});

sub call
{
	my ($key, $more) = @_;

	return sprintf q{SELECT status, replayed FROM idem_router.idem_call('%s', 'shop.charge', '{"key": "%s"%s}')},
	  $key, $key, $more // '';
}

#
# What is routed
#

router(join ';', map { call($_) } map { @{$_}[ 0 .. 9 ] } @keys);
is( join(' ', map { on_shard($_, "SELECT count(*) FROM shop.ledger") } 0 .. 3),
	'10 10 10 10', 'a call runs on the shard of its key');
is( router(join ';', map { call($_) } map { @{$_}[ 0 .. 9 ] } @keys),
	join("\n", ('finished|t') x 40), 'called again, each key returns the stored result');
is(on_all('SELECT count(*) FROM shop.ledger'), 40, 'so every call ran once');
is( router("BEGIN; SET LOCAL search_path = hostile, public, pg_catalog; SELECT status, replayed FROM idem_router.idem_call(key => '$keys[2][10]', handler => 'shop.charge', ttl => '1 h'); COMMIT"),
	'finished|f', 'arguments by name; hostile objects capture nothing');
is( router("SET idem.scope = 'tenant 7'; SELECT status FROM idem_router.idem_call('$keys[0][0]', 'shop.charge')"),
	'finished', 'idem.scope of the router is sent to the shard');
my $scoped = router("SELECT idem_router.shard_of_key('$keys[0][0]', 'tenant 7')");
is(on_shard($scoped, "SELECT count(*) FROM idem.keys WHERE scope = 'tenant 7' AND key = '$keys[0][0]'"), 1, 'where the key is in that scope');

# Leases: a token per step, each step a transaction of the shard

is( router(qq{
	SELECT token AS t FROM idem_router.idem_lease('$keys[1][10]', '1 min', worker => 'w') \\gset
	SELECT status FROM idem_router.idem_lease('$keys[1][10]', '1 min', worker => 'w');
	SELECT status FROM idem_router.idem_lease('$keys[1][10]', '1 min');
	SELECT idem_router.idem_renew('$keys[1][10]', :t, '2 min') > clock_timestamp() + interval '1 min';
	SELECT idem_router.idem_checkpoint('$keys[1][10]', :t, '{"step": 1}') > clock_timestamp();
	SELECT status, checkpoint FROM idem_router.idem_get('$keys[1][10]');
	SELECT idem_router.idem_finish('$keys[1][10]', 'null', :t);
	SELECT status, result FROM idem_router.idem_get('$keys[1][10]');
	SELECT count(*) FROM idem_router.idem_get('$keys[1][11]');
	SELECT idem_router.idem_forget('$keys[1][10]');
	SELECT status FROM idem_router.idem_lease('$keys[1][10]', '1 min');
	SELECT token AS t FROM idem_router.idem_get('$keys[1][10]') \\gset
	SELECT idem_router.idem_release('$keys[1][10]', :t);
	SELECT status FROM idem_router.idem_get('$keys[1][10]')}),
	join("\n", 'resumed', 'busy', 't', 't', 'live|{"step": 1}', 't', 'finished|null', '0', 't', 'claimed', 't', 'expired'),
	'lease, renew, checkpoint, finish, get, forget and release');

# Times are the same on both sides, whatever the format in which either side writes them.

on_shard($_, "ALTER DATABASE s$_ SET datestyle = 'SQL, MDY'; ALTER DATABASE s$_ SET timezone = 'Asia/Kolkata'") foreach 0 .. 3;
router(qq{
	SET datestyle = 'SQL, DMY'; SET intervalstyle = 'sql_standard'; SET timezone = 'America/New_York';
	SELECT idem_router.idem_enqueue('later', key => '$keys[3][0]', run_at => '2031-02-03 14:05:06.789+00');
	SELECT idem_router.idem_lease('$keys[3][11]', '1 day 2:03:04', ttl => '3 days 4:05:06')});
is( on_shard(3, q{SET datestyle = ISO; SET timezone = UTC; SELECT run_at FROM idem.jobs WHERE queue = 'later'}),
	'2031-02-03 14:05:06.789+00', 'a time reaches the shard as it is meant');
is( router("SET datestyle = 'SQL, DMY'; SELECT extract(epoch FROM lease_until), extract(epoch FROM expires_at) FROM idem_router.idem_get('$keys[3][11]')"),
	on_shard(3, "SELECT extract(epoch FROM lease_until), extract(epoch FROM expires_at) FROM idem_get('$keys[3][11]')"),
	'and comes back as it is meant');
is( on_shard(3, "SELECT expires_at - lease_until, date_trunc('hour', lease_until - created_at) FROM idem_get('$keys[3][11]')"),
	'3 days 04:05:06|1 day 02:00:00', 'so do intervals');
on_shard($_, "ALTER DATABASE s$_ RESET ALL") foreach 0 .. 3;

# Errors are those of the shard.

on_shard(2, q{CREATE FUNCTION shop.declined(jsonb) RETURNS jsonb LANGUAGE plpgsql AS
	$$ BEGIN RAISE EXCEPTION USING ERRCODE = 'P0042', MESSAGE = 'card: declined', DETAIL = 'Remote detail: none', HINT = 'another card'; END $$});
my $stale = "'$keys[2][12]', 1";
router("SELECT idem_router.idem_lease('$keys[2][12]', '1 min')");
my $waiting = router("SELECT job_id FROM idem_router.idem_enqueue('errors', key => '$keys[2][12]')");

foreach my $case (
	[ 'ID001', "idem_call('$keys[2][0]', 'shop.charge', '1')" ],
	[ 'ID002', "idem_complete($waiting, 1)" ],
	[ 'ID003', "idem_renew($stale, '1 min')" ],
	[ 'ID004', "idem_release('$keys[2][13]', %s)" ],
	[ 'ID005', "idem_enqueue('errors', key => '$keys[2][12]', on_duplicate => 'error')" ],
	[ '22023', "idem_lease('$keys[2][14]', '-1 s')" ],
	[ '22004', "idem_snooze($waiting, NULL, '1 s')" ],
	[ '42883', "idem_call('$keys[2][14]', 'shop.missing')" ],
	[ 'P0042', "idem_call('$keys[2][14]', 'shop.declined')" ])
{
	my ($state, $command) = @$case;

	if ($state eq 'ID004')
	{
		my $token = router("SELECT token FROM idem_router.idem_lease('$keys[2][13]', '1 min')");
		router("SELECT idem_router.idem_finish('$keys[2][13]', token => $token)");
		$command = sprintf $command, $token;
	}
	my $routed = error_of("SELECT idem_router.$command");
	like($routed, qr/^$state\|/, "$state reaches the caller");
	my $direct = on_shard(2, 'SELECT error_of($q$SELECT ' . $command . '$q$)');
	s/\d+ s ago/N s ago/ foreach $routed, $direct;
	is(names_shard(2, $routed), $direct, "$state: message, detail and hint, too; and the detail names the shard");
}

# Roles: the shard checks the privileges of the role of the user mapping.

foreach my $node ($one, $two)
{
	$node->safe_psql('postgres', q{CREATE ROLE app LOGIN; CREATE ROLE shop_app LOGIN PASSWORD 'right'; CREATE ROLE other_app LOGIN});
	$node->append_conf('pg_hba.conf', '');
	my $hba = slurp_file($node->data_dir . '/pg_hba.conf');
	unlink $node->data_dir . '/pg_hba.conf';
	append_to_file($node->data_dir . '/pg_hba.conf', "local all shop_app scram-sha-256\n$hba");
	$node->reload;
}
on_shard($_, q{SELECT idem_grant('shop_app', 'app'); SELECT idem_grant('other_app', 'app')}) foreach 0 .. 3;
my $as_app = "SET ROLE app; ";

is(sqlstate($one, $as_app . call('role'), db => 'router'), '42501', 'PUBLIC has no privileges');
router(q{SELECT idem_router.grant_app('app')});
is(sqlstate($one, $as_app . 'SELECT idem_router.refresh()', db => 'router'), '42501', 'an application may not change the map');
is(sqlstate($one, $as_app . call('role'), db => 'router'), '42704', 'a role needs a user mapping');
router(q{CREATE USER MAPPING FOR app SERVER idem_router OPTIONS (user 'shop_app', password 'wrong')});

my $app = session($one, db => 'router');
$app->query('SET ROLE app');
is($app->sqlstate(call($keys[2][15])), '08001', 'with a wrong password there is no connection');
router(q{ALTER USER MAPPING FOR app SERVER idem_router OPTIONS (SET password 'right')});
is($app->sqlstate(call($keys[2][15])), '42501', 'a new password counts at once; the handler needs its privileges on the shard');
on_shard($_, 'GRANT USAGE ON SCHEMA shop TO shop_app; GRANT INSERT ON shop.ledger TO shop_app') foreach 0 .. 3;
is($app->query(call($keys[2][15])), 'finished|f', 'then it runs');
is(on_shard(2, "SELECT owner FROM idem_get('$keys[2][15]')"), 'shop_app', 'as the role of the user mapping');
is($app->query(q{SELECT idem_router.idem_cancel_many('{}'), idem_router.idem_cancel_many(queue => 'q'), count(*) FROM idem_router.idem_heartbeat('{}', '{}', '1 s')}),
	'0|0|0', 'so do calls for many jobs');
is($app->sqlstate(q{SELECT idem_router.idem_pause('q')}), '42501', 'an application may not pause a queue');
is($app->sqlstate("SELECT idem_router.idem_call('$keys[2][15]', 'shop.charge', '1')"), 'ID001', 'an application gets our errors');
is($app->sqlstate("SELECT idem_router.idem_claim('$keys[2][15]')"), '0A000', 'also those of calls that are not routed');
router(q{ALTER USER MAPPING FOR app SERVER idem_router OPTIONS (SET user 'other_app')});
is($app->sqlstate(call($keys[2][15])), '42501', 'another role does not get the result');
router(q{SELECT idem_router.revoke_app('app')});
is($app->sqlstate(call($keys[2][15])), '42501', 'revoke_app() takes the privileges back');
$app->quit;

#
# What is not routed, and what happened where it was
#

my %refused = (
	'idem_claim' => "'k'", 'idem_finish' => "'k'", 'idem_release' => "'k'", 'idem_fence' => "'k', 1",
	'idem_fetch' => "'q'", 'idem_claim_many' => q{'{k}'}, 'idem_finish_many' => q{'{k}'},
	'idem_enqueue_many' => q{'q', '{1}'});

foreach my $name (sort keys %refused)
{
	like(error_of("SELECT idem_router.$name($refused{$name})"),
		qr/^0A000\|$name\(\).* cannot be routed\|[A-Z][^|]+\.\|[A-Z][^|]+\.$/, "$name($refused{$name}) is refused, with detail and hint");
}
is(state_of(q{SELECT idem_router.idem_fetch('q', lease => '0')}), '0A000', 'a lease of zero is none');
is(state_of("SELECT idem_claim('k')"), 'ID006', 'a call that is not qualified stays in the router, which refuses it');

router(qq{
	CREATE SCHEMA trap;
	CREATE FUNCTION trap.claim(key text) RETURNS text LANGUAGE plproxy AS
		\$\$ CLUSTER 'idem_router'; RUN ON 1; SELECT c.status FROM pg_catalog.idem_claim(key) AS c; \$\$;
	CREATE FUNCTION trap.finish(key text) RETURNS boolean LANGUAGE plproxy AS
		\$\$ CLUSTER 'idem_router'; RUN ON 1; SELECT pg_catalog.idem_finish(key); \$\$;
	CREATE FUNCTION trap.fetch(queue text, batch integer) RETURNS SETOF bigint LANGUAGE plproxy AS
		\$\$ CLUSTER 'idem_router'; RUN ON 1; SELECT f.job_id FROM pg_catalog.idem_fetch(queue, batch) AS f; \$\$;
	CREATE FUNCTION trap.fetch_any(queue text) RETURNS SETOF bigint LANGUAGE plproxy AS
		\$\$ CLUSTER 'idem_router'; RUN ON ANY; SELECT f.job_id FROM pg_catalog.idem_fetch(queue) AS f; \$\$;
	CREATE FUNCTION trap.fetch_all(queue text, batch integer, lease interval) RETURNS SETOF bigint LANGUAGE plproxy AS
		\$\$ CLUSTER 'idem_router'; RUN ON ALL; SELECT f.job_id FROM pg_catalog.idem_fetch(queue, batch, lease) AS f; \$\$});
is( router("SELECT trap.claim('$keys[1][12]')") . ' ' . state_of("SELECT trap.finish('$keys[1][12]')") . ' ' . router("SELECT trap.claim('$keys[1][12]')"),
	'claimed ID002 finished',
	'trap: claim and finish as calls of their own lose the operation: the key is final, and no work was done');
on_shard(1, "SELECT idem_enqueue('trap', key => '$keys[1][13]')");
is( router(q{SELECT string_agg(j::text, ' ') = repeat(min(j) || ' ', 2) || min(j) FROM (SELECT trap.fetch('trap', 1) FROM generate_series(1, 3)) AS f (j)}),
	't', 'trap: a fetch without a lease hands a job out again and again');
is( router(q{SELECT count(*) < 20 FROM (SELECT trap.fetch_any('trap') FROM generate_series(1, 20)) AS f}),
	't', 'trap: RUN ON ANY returns nothing though another shard has a job');
foreach my $shard (0 .. 3)
{
	on_shard($shard, "SELECT idem_enqueue('trap all', key => '$keys[$shard][$_]')") foreach 20, 21;
}
is(router(q{SELECT count(*) FROM trap.fetch_all('trap all', 2, '1 min')}), '8', 'trap: RUN ON ALL returns a batch of each shard');

# The transaction of the router does not matter.

router('BEGIN; ' . call($keys[0][15]) . "; SELECT idem_router.idem_enqueue('rollback', key => '$keys[3][15]'); ROLLBACK");
is(router(call($keys[0][15])), 'finished|t', 'a rollback in the router does not undo a call');
is(on_shard(3, q{SELECT count(*) FROM idem.jobs WHERE queue = 'rollback'}), '1', 'nor an enqueue');

#
# Jobs
#

sub fetch
{
	my ($queue, $batch) = @_;

	return "SELECT job_id, token, payload FROM idem_router.idem_fetch('$queue', $batch, '1 min', 'w')";
}

router("SELECT idem_router.idem_enqueue('all', '$_', '$keys[$_][0]')") foreach 0 .. 3;
is( scalar(() = router(fetch('all', 3)) =~ /^\d+\|\d{16}\|/mg), 3, 'a fetch returns no more than its batch');
is( scalar(() = router(fetch('all', 3)) =~ /^\d+\|\d{16}\|/mg), 1, 'and looks in all shards');
is(router(fetch('all', 3)), '', 'leased jobs are not handed out twice');

my %first;

for (1 .. 100)
{
	router("SELECT idem_router.idem_enqueue('first', '$_', '$keys[$_][0]')") foreach 0 .. 3;
	my ($job, $token, $shard) = split /\|/, router(fetch('first', 1));
	$first{$shard} = 1;
	router("SELECT idem_router.idem_complete($job, $token)");
	last if keys %first == 2;
}
is(scalar keys %first, 2, 'fetches do not always begin with the same shard');

my @plain = split /\n/, router(q{SELECT (idem_router.idem_enqueue('plain')).job_id FROM generate_series(1, 200)});
my %plain = map { int($_ % 1024 / 256) => 1 } @plain;

is(scalar keys %plain, 4, 'jobs without a key are in all shards');

# by number

my @jobs = map { [ split /\|/ ] } split /\n/, router(q{
	SELECT idem_router.idem_enqueue('number', n::text::jsonb, n::text) FROM generate_series(1, 20) AS n \g /dev/null
	SELECT job_id, token, payload FROM idem_router.idem_fetch('number', 20, '1 min')});
my ($ids, $tokens) = map { my $i = $_; 'ARRAY[' . join(', ', map { $_->[$i] } @jobs) . ']::bigint[]' } 0, 1;

is(scalar @jobs, 20, 'twenty jobs');
is( router(qq{SELECT count(*), bool_and(status = 'renewed'), bool_and(lease_until > clock_timestamp() + interval '5 min'),
					 array_agg(job_id ORDER BY ord) = $ids, array_agg(ord ORDER BY ord) = (SELECT array_agg(n::integer) FROM generate_series(1, 20) AS n)
				FROM idem_router.idem_heartbeat($ids, $tokens, '10 min')}),
	'20|t|t|t|t', 'a heartbeat renews the jobs of all shards, and every element has its place');
is( router("SELECT string_agg(status, ' ' ORDER BY ord) FROM idem_router.idem_heartbeat(ARRAY[$jobs[3][0], $jobs[4][0], $jobs[3][0]], ARRAY[$jobs[3][1], 1, $jobs[3][1]], '1 min')"),
	'renewed stale renewed', 'also one that occurs twice, or has an old token');
is( join(' ', map { state_of("SELECT idem_router.idem_heartbeat($_)") } 'NULL, NULL', q{'{1}', '{1,2}'}, q{'{{1}}', '{{1}}', '1 s'}, q{'{NULL}', '{1}', '1 s'}),
	'22004 22023 22023 22004', 'its errors are those of a shard');
is(router(q{SELECT count(*) FROM idem_router.idem_heartbeat('{}', '{}')}), '0', 'and empty arrays return no rows');
is( router(qq{
	SELECT idem_router.idem_complete($jobs[0][0], $jobs[0][1]);
	SELECT idem_router.idem_fail($jobs[1][0], $jobs[1][1], 'no luck', dead => true);
	SELECT idem_router.idem_snooze($jobs[2][0], $jobs[2][1], '1 h') > clock_timestamp();
	SELECT idem_router.idem_cancel($jobs[3][0]);
	SELECT state, error FROM idem_router.idem_job($jobs[1][0]);
	SELECT idem_router.idem_retry($jobs[1][0]);
	SELECT state, payload FROM idem_router.idem_job($jobs[1][0]);
	SELECT state FROM idem_router.idem_job($jobs[2][0])}),
	join("\n", 't', 'dead', 't', 't', 'dead|no luck', 't', "waiting|$jobs[1][2]", 'scheduled'),
	'complete, fail, snooze, cancel, retry and job find the shard by the number');

is( router(q{
	SELECT outcome FROM generate_series(1, 20) AS i, idem_router.idem_enqueue('by key', '1', 'key ' || i);
	SELECT count(*) FROM generate_series(1, 20) AS i, idem_router.idem_job_by_key('by key', 'key ' || i) WHERE state = 'waiting';
	SELECT sum(idem_router.idem_cancel_by_key('by key', 'key ' || i)) FROM generate_series(1, 20) AS i;
	SELECT count(*) FROM generate_series(1, 20) AS i, idem_router.idem_job_by_key('by key', 'key ' || i) WHERE state = 'cancelled'}),
	join("\n", ('enqueued') x 20, 20, 20, 20),
	'job_by_key and cancel_by_key find the shard by the key');

# Many jobs

my $jobs_of = q{SELECT string_agg(state, ' ' ORDER BY n) FROM unnest(%s) WITH ORDINALITY AS i (id, n) LEFT JOIN LATERAL idem_router.idem_job(i.id) ON true};

# Numbers of new jobs, $n in each shard, in turn, as an array
sub new_jobs
{
	my ($queue, $n) = @_;

	return '(ARRAY[' . join(', ', split /\n/, router(join ';', map { my $i = $_; map { "SELECT job_id FROM idem_router.idem_enqueue('$queue', key => '$keys[$_][$i]')" } 0 .. 3 } 1 .. $n)) . ']::bigint[])';
}

sub states { return router(sprintf $jobs_of, shift) }

my $many = new_jobs('many', 2);

is(router("SELECT idem_router.idem_cancel_many($many || 1024000 || $many" . '[1])'), 8, 'cancel_many by numbers: each job once, unknown ones do not count');
is(states($many), join(' ', ('cancelled') x 8), 'in all shards');
is(router("SELECT idem_router.idem_retry_many($many" . '[2:7])'), 6, 'retry_many by numbers');
is(states($many), join(' ', 'cancelled', ('waiting') x 6, 'cancelled'), 'those, and no others');
is(router(q{SELECT idem_router.idem_retry_many(queue => 'many', state => 'cancelled')}), 2, 'retry_many by queue adds up');
is(join(' ', map { router(q{SELECT idem_router.idem_cancel_many(queue => 'many', max_jobs => 3)}) } 1 .. 4), '3 3 2 0', 'max_jobs is for all shards together');
is(router("SELECT idem_router.idem_cancel_many('{}')"), 0, 'an empty array changes nothing');
is(router('SELECT idem_router.idem_cancel_many(ARRAY[-1, 0, 5, 9007199254740992])'), 0, 'nor do numbers that no job has');

$many = new_jobs('moved', 2);
is( router("SET datestyle = 'SQL, DMY'; SELECT idem_router.idem_reschedule_many($many, '03/02/2031 14:05:06.789 UTC', 7)"), 8, 'reschedule_many by numbers');
is( router(qq{SET timezone = UTC; SELECT DISTINCT j.run_at, j.priority FROM unnest($many) AS i (id), idem_router.idem_job(i.id) AS j}),
	'2031-02-03 14:05:06.789+00|7', 'a time reaches every shard as it is meant');
is(router(q{SELECT idem_router.idem_reschedule_many(queue => 'moved', run_at => now() - interval '1 min')}), 8, 'reschedule_many by queue');

# with tokens; rows come with their positions in the arrays of the caller
@jobs = map { [ split /\|/ ] } split /\n/, router(q{SELECT job_id, token FROM idem_router.idem_fetch('moved', 8, '1 min', 'w') ORDER BY job_id % 7, job_id});
($ids, $tokens) = map { my $i = $_; '(ARRAY[' . join(', ', map { $_->[$i] } @jobs) . ']::bigint[])' } 0, 1;
is(router("SELECT idem_router.idem_snooze_many($ids" . "[1:2], $tokens" . q{[1:2], '1 h')}), 2, 'snooze_many with tokens');
is(router("SELECT idem_router.idem_fail_many($ids" . "[2:4], $tokens" . q{[2:4], 'no luck', dead => true)}), 2, 'fail_many with tokens: an old token does not count');
is( router(qq{SELECT string_agg(ord || ' ' || status, ', ' ORDER BY ord), bool_and(job_id = ($ids)[ord])
				FROM idem_router.idem_complete_many($ids || 1024000, $tokens || 1)}),
	'1 stale, 2 stale, 3 stale, 4 stale, 5 completed, 6 completed, 7 completed, 8 completed, 9 stale|t',
	'complete_many: a row for each element');
is(states($ids . '[1:4]'), 'scheduled scheduled dead dead', 'and the jobs are as it says');
is(router(q{SELECT count(*) FROM idem_router.idem_complete_many('{}', '{}')}), 0, 'complete_many of empty arrays');
is(router(q{SELECT idem_router.idem_reschedule_many(queue => 'moved', run_at => now()); SELECT count(*) FROM idem_router.idem_fetch('moved', 9, '1 min', 'w')}),
	"2\n2", 'the others wait');
is(router(q{SELECT idem_router.idem_snooze_many(queue => 'moved', delay => '0', worker => 'w')}), 2, 'snooze_many by queue and worker');
is(router(q{SELECT count(*) FROM idem_router.idem_fetch('moved', 9, '1 min', 'v')}), 2, 'gives them back');
is(router(q{SELECT idem_router.idem_fail_many(queue => 'moved', worker => 'w'), idem_router.idem_fail_many(queue => 'moved', worker => 'v', dead => true)}),
	'0|2', 'fail_many by queue and worker');

# Bad arguments: the error of the plain function, and no shard has changed a job.  (Numbers of shard 0, for the plain
# functions; shard 3, for a change that must not happen.)
$many = new_jobs('bad', 1);
my ($first_job, $last_job) = $many =~ /\[(\d+),.* (\d+)\]/;
foreach my $bad (
	map({ ("idem_${_}_many('{$last_job,NULL,$first_job}')", "idem_${_}_many('{{$first_job}}')", "idem_${_}_many()", "idem_${_}_many('{$first_job}', 'bad')",
			"idem_${_}_many(queue => 'bad', state => 'done')", "idem_${_}_many(queue => 'bad', max_jobs => 0)", "idem_${_}_many(queue => 'bad', max_jobs => NULL)") }
		qw(cancel retry)),
	"idem_fail_many('{$first_job}')", "idem_fail_many('{$last_job,$first_job}', '{1,0}')", "idem_fail_many('{$last_job,$first_job}', '{1}')",
	"idem_fail_many('{$last_job,$first_job}', '{1,NULL}')", "idem_fail_many(tokens => '{1}', queue => 'bad')",
	"idem_snooze_many(queue => 'bad')", "idem_snooze_many('{$first_job}', '{1}', '-1 s')",
	"idem_reschedule_many(queue => 'bad')", "idem_reschedule_many('{$first_job}', 'infinity')",
	"idem_complete_many(NULL, '{1}')", "idem_complete_many('{$last_job,NULL,$first_job}', '{1,1,1}')", "idem_complete_many('{$last_job,$first_job}', '{1}')",
	"idem_complete_many('{{1}}', '{{1}}')", "idem_complete_many('{$last_job,$first_job}', '{1,0}')",
	"idem_heartbeat('{$last_job,NULL,$first_job}', '{1,1,1}', '1 s')", "idem_heartbeat('{$last_job,$first_job}', '{1,0}', '1 s')")
{
	is(names_shard(0, error_of("SELECT idem_router.$bad")), on_shard(0, 'SELECT error_of($q$SELECT ' . $bad . '$q$)'), "the error of $bad");
}
is(states($many), join(' ', ('waiting') x 4), 'and nothing has changed');

# One call, several shards: each commits by itself.  An error says which ones have.
on_shard(2, 'ALTER DATABASE s2 SET default_transaction_read_only = on');
is( error_of("SELECT idem_router.idem_cancel_many($many)") =~ s/ \(host=[^)]*\)//r,
	"25006|cannot execute idem_cancel_many() in a read-only transaction|Shard 2 raised this error.\nThese shards have committed, and this is what they returned: 0 (1), 1 (1), 3 (1).|",
	'if a shard fails, the error says which ones have committed');
is(states($many), 'cancelled cancelled waiting cancelled', 'which they have');
on_shard(2, 'SET default_transaction_read_only = off; ALTER DATABASE s2 RESET default_transaction_read_only');
is(router("SELECT idem_router.idem_cancel_many($many)"), 1, 'repeated, the call does what is left');
on_shard(0, 'ALTER DATABASE s0 SET default_transaction_read_only = on');
unlike(error_of(q{SELECT idem_router.idem_retry_many(queue => 'bad', state => 'cancelled')}), qr/committed/, 'if the first shard refuses');
is(states($many), join(' ', ('cancelled') x 4), 'nothing has changed');
on_shard(0, 'SET default_transaction_read_only = off; ALTER DATABASE s0 RESET default_transaction_read_only');

# Several queues, progress, and questions
my $any = new_jobs('any 1', 1) . ' || ' . new_jobs('any 2', 1);
is( router(q{SELECT count(*), count(DISTINCT queue), count(DISTINCT job_id) FROM idem_router.idem_fetch_any('{any 1,any 2}', 20, '1 min', 'w')}),
	'8|2|8', 'fetch_any looks in all shards');
is(state_of(q{SELECT idem_router.idem_fetch_any('{}', 1, '1 s')}), '22023', 'its errors are those of a shard');
is(router(qq{SELECT count(*) FROM unnest($any) AS i (id), idem_router.idem_why(i.id) AS w WHERE w.reason = 'leased'}), 8, 'why finds the shard by the number');
router(q{SELECT idem_router.idem_fail_many(queue => 'any 1', dead => true)});
like( router(qq{SELECT string_agg(w.fix, ' ') FROM unnest($any) AS i (id), idem_router.idem_why(i.id) AS w WHERE w.reason = 'dead'}),
	qr/^-- on shard 0: SELECT pg_catalog.idem_retry\(\d+\); -- on shard 1: .* -- on shard 2: .* -- on shard 3: /,
	'a fix says on which shard, and is a comment in the router');
is( router(qq{SELECT idem_router.idem_progress(f.job_id, f.token, '{"percent": 50}', '1 h') > clock_timestamp() + interval '59 min'
				FROM (SELECT (idem_router.idem_retry_many(queue => 'any 1'))) AS r, LATERAL idem_router.idem_fetch('any 1', 1, '1 min') AS f}),
	't', 'progress finds the shard by the number');
router("SELECT idem_router.idem_lease('$keys[1][30]', '1 min', worker => 'w1')");
is(router("SELECT kind, worker, fix FROM idem_router.idem_holder('$keys[1][30]')") =~ s/\(.*//r, 'lease|w1|-- on shard 1: SELECT pg_catalog.idem_release', 'holder finds the shard by the key');
is(router(q{SELECT idem_router.idem_pause('any 1'), idem_router.idem_pause('any 1')}), 't|f', 'pause is for the queue in every shard');
is(on_all(q{SELECT count(*) FROM idem.queues WHERE queue = 'any 1' AND paused_at IS NOT NULL}), 4, 'in all of them');
is(router(q{SELECT idem_router.idem_resume('any 1'), idem_router.idem_resume('any 1')}), 't|f', 'so is resume');

# A number from before the map of one shard must not reach another one.

router('UPDATE idem_router.shards SET jobs_from = 10 * 1024 WHERE shard = 0');
is(state_of('SELECT idem_router.idem_cancel(5)'), '00000', 'a number from before the map may be in its shard');
is( error_of('SELECT idem_router.idem_cancel(300)'),
	'0A000|the shard of this job is not known|The number may be from before the map of another shard, when numbers carried no slot. Such shards: 0.|Call the function in the database in which the job was enqueued.',
	'but not if it leads to another one');
is(state_of("SELECT idem_router.idem_cancel_many(ARRAY[$jobs[0][0], 300])"), '0A000', 'also as one of many');
refresh();
is(router('SELECT jobs_from FROM idem_router.shards WHERE shard = 0'), '1024', 'refresh() reads the first number again');

#
# Trouble
#

# A shard that does not answer must not make the jobs of others disappear.

my $open = session($one, db => 'router');
sub enqueue_all { router("SELECT idem_router.idem_enqueue('$_[0]', '$_', '$keys[$_][1]')") foreach 0 .. 3 }

$open->query(call($keys[2][0]));
enqueue_all('down');
$two->stop;
$open->send(fetch('down', 10));
is(scalar(() = $open->receive =~ /\|[01]$/mg), 2, 'a shard is down: a fetch returns the jobs of the others');
is(scalar(() = $open->{message} =~ /WARNING:  0800[16]: shard [23] did not answer/g), 2, 'with a warning for each shard');
is($open->sqlstate(fetch('down', 10)), '08001', 'if the others have none, it is an error');
is($open->sqlstate(call($keys[2][0])), '08001', 'a call of the shard is an error, too');
is($open->sqlstate(q{SELECT idem_router.idem_retry_many(queue => 'any 1')}), '08001', 'a count without them would look like one of all: it is an error');
like($open->{message}, qr/DETAIL:  Shard 2 \(host=.* dbname=s2\): .*\nFailed, too: shard 3\.\nThese shards have committed, and this is what they returned: 0 \(0\), 1 \(0\)\./s,
	'which names all shards');
$open->send(sprintf q{SELECT ord, status FROM idem_router.idem_complete_many(ARRAY[%s], '{1,1,1,1}')}, join ', ', map { 1024000 + 256 * $_ } 3, 1, 2, 0);
is(join(' ', $open->receive =~ /^(\d+\|\w+)$/mg), '4|stale 2|stale', 'complete_many: elements of such shards have no row, and the others their places');
is(scalar(() = $open->{message} =~ /WARNING:  0800[16]: shard [23] did not answer/g), 2, 'with a warning for each shard');
is($open->query(call($keys[0][0])), 'finished|t', 'and calls of others work');
is(router(q{SELECT string_agg(shard || ' ' || status, ', ' ORDER BY shard) FROM idem_router."check"() WHERE "check" = 'connection'}),
	'0 ok, 1 ok, 2 fail, 3 fail', 'check() names the shards');
is(router('SELECT count(*) FROM idem_router.refresh()'), '4', 'refresh() leaves them their slots');
$two->start;
is(scalar(() = $open->query(fetch('down', 10)) =~ /\|[23]$/mg), 2, 'after its start the same session reaches it again');

# 57014 of a shard is a failure of this shard, 57014 of the caller ends the call.  PL/Proxy 2.10 may then
# wait for an answer that it has read already, until query_timeout.

my $locker = session($two, db => 's2');

enqueue_all('slow');
on_shard(2, q{ALTER DATABASE s2 SET statement_timeout = '100ms'});
router(q{ALTER SERVER idem_router OPTIONS (ADD query_timeout '1')});
is(findings(), '2|statement_timeout', 'check() warns of statement_timeout on a shard');
follow('statement_timeout on a shard', 'statement_timeout');
on_shard(2, 'ALTER ROLE CURRENT_USER IN DATABASE s2 RESET statement_timeout');
$locker->query('BEGIN; LOCK TABLE idem.jobs');
$open->send(fetch('slow', 10));
is(scalar(() = $open->receive =~ /\|[013]$/mg), 3, 'trap: statement_timeout of one shard does not lose the jobs of the others');
like($open->{message}, qr/WARNING:  (57014|08006): shard 2 did not answer/, 'but there is a warning');
$locker->query('ROLLBACK; ALTER DATABASE s2 RESET statement_timeout');
router(q{ALTER SERVER idem_router OPTIONS (DROP query_timeout)});
$open->quit;
$open = session($one, db => 'router');

sub wait_for_lock
{
	my ($node, $db, $what) = @_;

	$node->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = '$db' AND wait_event_type = 'Lock' AND query ~ '$what'")
	  or die 'the shard does not wait';
	return;
}

sub cancel_ok
{
	my ($sql, $what) = @_;

	$open->send($sql);
	wait_for_lock($two, 's2', $what);
	$one->safe_psql('postgres', "SELECT pg_cancel_backend($open->{pid})");
	$open->receive;
	is($open->{sqlstate}, '57014', "a cancel ends a waiting $what");
	is($two->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE datname = 's2' AND wait_event_type = 'Lock'}),
		'0', 'also on the shard');
	return;
}

$locker->query('BEGIN; LOCK TABLE idem.jobs');
cancel_ok(fetch('slow', 10), 'idem_fetch');
$locker->query('ROLLBACK; SELECT pg_advisory_lock(1)');
cancel_ok(call($keys[2][16], ', "lock": 1'), 'idem_call');
$locker->query('SELECT pg_advisory_unlock(1)');
is($open->query(call($keys[2][16], ', "lock": 1')), 'finished|f', 'and leaves nothing behind');

# The connection is lost after the shard has committed, and before.

sub crash
{
	my ($key, $more, $event) = @_;

	$open->send(call($key, $more));
	$two->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = 's2' AND wait_event = '$event'") or die 'no wait';
	crash_backend($two, $two->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE datname = 's2' AND wait_event = '$event'"));
	$open->receive;
	is($open->{sqlstate}, '08006', "kill -9 of the shard while it waits ($event): the connection is lost");
	return;
}

$locker->quit;
crash($keys[2][17], ', "commit": "on"', 'SyncRep');
is(on_shard(2, "SELECT count(*) FROM shop.ledger WHERE key = '$keys[2][17]'"), '1', 'the shard has committed');
is($open->query(call($keys[2][17], ', "commit": "on"')), 'finished|t', 'the same call again gets the stored result');
is(on_shard(2, "SELECT count(*) FROM shop.ledger WHERE key = '$keys[2][17]'"), '1', 'and runs nothing');
$locker = session($two, db => 's2');
$locker->query('SELECT pg_advisory_lock(2)');
crash($keys[2][18], ', "lock": 2', 'advisory');
$locker->lost;
is(on_shard(2, "SELECT count(*) FROM shop.ledger WHERE key = '$keys[2][18]'"), '0', 'the shard has not committed');
is($open->query(call($keys[2][18], ', "lock": 2')), 'finished|f', 'the same call again runs');

#
# Wrong set-ups
#

sub wrong
{
	my ($what, $detail, $break, $repair, $fixes) = @_;

	$break->();
	like(error_of('SELECT idem_router.refresh()'), qr/^55000\|[^|]*\|.*$detail/s, "refresh() refuses $what");
	is(scalar(() = findings() =~ /\|/g) > 0, 1, "check() finds $what");
	$fixes ? follow($what, @$fixes) : $repair->();
	$repair->();
	is(findings(), '', "and no more afterwards");
	return;
}

my @option = map { my $n = $_; sub { my ($to) = @_; router("ALTER SERVER idem_router OPTIONS (SET p$n '$connstrs[$to]')") } } 0 .. 3;

sub instead_of_s3
{
	my ($db) = @_;

	router(sprintf q{ALTER SERVER idem_router OPTIONS (SET p3 '%s')}, $connstrs[3] =~ s/s3$/$db/r);
	return;
}

$two->safe_psql('postgres', q{CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0});
$two->safe_psql('postgres', 'CREATE DATABASE scoped');
$two->safe_psql('latin', q{CREATE EXTENSION idem; SELECT idem_shard_set('{[768,1024)}', number => 3)});
$two->safe_psql('scoped', q{CREATE EXTENSION idem; SELECT idem_shard_set('{[768,1024)}', by => 'scope', number => 3)});
wrong('a shard with another encoding', 'encoding LATIN1, the router UTF8', sub { instead_of_s3('latin') }, sub { $option[3]->(3) },
	['encoding (by people)']);
{
	local $shards[3] = [ $two, 'scoped' ];
	wrong('a shard by scope', 'by scope', sub { instead_of_s3('scoped') }, sub { $option[3]->(3) }, ['by']);
}
wrong('partitions that are swapped', 'partition p0 leads to shard 1',
	sub { $option[0]->(1); $option[1]->(0) }, sub { $option[0]->(0); $option[1]->(1) }, ['number']);
wrong('partitions that lead in a circle', 'partition p0 leads to shard 1',
	sub { $option[0]->(1); $option[1]->(2); $option[2]->(0) }, sub { $option[$_]->($_) foreach 0 .. 2 }, ['number']);
wrong('two partitions that lead to one shard', 'partition p3 leads to shard 2',
	sub { $option[3]->(2) }, sub { $option[3]->(3) }, ['number (by people)']);
wrong('a shard without a number', 'a database whose map has no number',
	sub { on_shard(3, q{SELECT idem_shard_set('{[768,1024)}')}) }, sub { }, ['number']);
wrong('a router with another rule', 'by key, that of the router by scope',
	sub { router(q{SELECT idem_shard_set('{}', by => 'scope')}) }, sub { }, ['by']);
$option[0]->(1);
$option[1]->(0);
is(state_of(call($keys[0][0])), 'ID006', 'with swapped partitions the shards refuse the keys');
$option[0]->(0);
$option[1]->(1);
wrong('a shard without a map', 'no map', sub { on_shard(3, 'SELECT idem_shard_set(NULL)') },
	sub { }, ['map']);
wrong('two shards with the same slot', 'Shard 3 and one before it have the slots .\[767,768.',
	sub { on_shard(3, q{SELECT idem_shard_set('{[767,1024)}', number => 3)}) },
	sub { }, ['one owner']);
router(q{SELECT idem_shard_set(NULL)});
is(findings(), '|router map', 'check() finds a router that would accept keys');
follow('a router that would accept keys', 'router map');
router('UPDATE idem_router.slots SET shard = 1 WHERE slot BETWEEN 0 AND 9');
is(findings(), "0|slots\n1|slots", 'check() finds a map of the router that is wrong');
follow('a wrong map of the router', 'slots');

sub detail_of { return router(qq{SELECT string_agg(detail, '; ') FROM idem_router."check"() WHERE "check" = '$_[0]' AND status <> 'ok'}) }

# A shard without a map accepts every key: nobody says that its slots are refused.
on_shard(3, 'SELECT idem_shard_set(NULL)');
is( detail_of('one owner'), 'these shards accept every key, because they have no map, so keys can run twice: 3',
	'check() says that a shard without a map accepts every key');
follow('a shard without a map', 'map');

# Slots that no shard has
on_shard(3, q{SELECT idem_shard_set('{[768,1000)}', number => 3, force => true)});
is(detail_of('one owner'), 'no shard has the slots {[1000,1024)}: their keys are refused', 'check() finds slots that no shard has');
is(state_of('SELECT idem_router.refresh()'), '00000', 'refresh() leaves them with their shard');
follow('slots that no shard has', 'one owner');

# A database that is not ready yet, instead of shard 3
sub unready
{
	my ($what, $sql, $then) = @_;
	local $shards[3] = [ $two, 'unready' ];

	$two->safe_psql('postgres', 'CREATE DATABASE unready');
	$two->safe_psql('unready', $sql) if $sql;
	instead_of_s3('unready');
	$then->($what);
	is($two->safe_psql('unready', 'SELECT slots, number FROM idem.shard'), '{[768,1024)}|3', "$what: it has the slots of its shard");
	$option[3]->(3);
	$two->safe_psql('postgres', 'DROP DATABASE unready WITH (FORCE)');
	return;
}

unready('a database without idem', '', sub { follow(shift, 'connection', 'map') });
unready('a database without a map that has keys', "CREATE EXTENSION idem; SELECT idem_lease('$keys[3][0]', '1 h')", sub { follow(shift, 'map') });
unready('jobs from before the map',
	q{CREATE EXTENSION idem; SELECT idem_enqueue('before') FROM generate_series(1, 3); SELECT idem_shard_set('{[768,1024)}', number => 3)},
	sub {
		my ($what) = @_;
		my ($first) = findings_with_fix();

		is("@$first[0, 1]", '3 job numbers', "check() finds $what");
		is(scalar(() = on_shard(3, $first->[2] =~ s/^-- on shard 3: //r) =~ /^\d+\|before\|waiting$/mg), 3, 'its fix lists them');
		on_shard(3, q{SELECT idem_cancel_many(queue => 'before')});
		is(findings(), '', 'when workers have done them, there is nothing more');
	});

# A new shard without a map gets one without slots; a database that the router knows no more
$one->safe_psql('postgres', 'CREATE DATABASE fresh');
$one->safe_psql('fresh', 'CREATE EXTENSION idem');
router(sprintf q{ALTER SERVER idem_router OPTIONS (ADD p4 'host=%s port=%d dbname=fresh')}, $one->host, $one->port);
{
	local $shards[4] = [ $one, 'fresh' ];
	follow('a new shard', 'map');
	is(on_shard(4, 'SELECT slots, number FROM idem.shard'), '{}|4', 'it has a map without slots');
}
router('ALTER SERVER idem_router OPTIONS (DROP p4)');
$one->safe_psql('postgres', 'DROP DATABASE fresh WITH (FORCE)');
router('ALTER SERVER idem_router OPTIONS (DROP p3)');
is(detail_of('one owner'), 'not every shard has answered', 'the slots of a partition that is gone are not offered to another shard');
follow('a partition that is gone, and its slots are not', 'partition', 'connection (by people)');
$option[3]->(3);
is(findings(), '', 'with the right connection string all is well');
router('ALTER SERVER idem_router OPTIONS (DROP p3)');
on_shard(2, q{SELECT idem_shard_set('{[512,1024)}', number => 2)});
follow('a partition that is gone, whose slots another shard has', 'partition');
router("ALTER SERVER idem_router OPTIONS (ADD p3 '$connstrs[3]')");
follow('a partition that comes back, and whose slots another shard has', 'one owner', 'slots');
is(on_shard(3, 'SELECT slots FROM idem.shard'), '{[768,1024)}', 'the shard with the rows keeps them');

# A role that lacks its privileges on the shards
router(q{ALTER USER MAPPING FOR CURRENT_USER SERVER idem_router OPTIONS (ADD user 'other_app')});
foreach my $n (0 .. 3)
{
	my ($first) = findings_with_fix();

	is("@$first", "$n connection -- on shard $n: SELECT pg_catalog.idem_grant('other_app', 'admin');", "check() finds what the role lacks on shard $n");
	like(detail_of('connection'), qr/permission denied for .*\. Shard $n \(host=.* port=.* dbname=s$n\) raised this error/, 'and names the shard');
	on_shard($n, $first->[2] =~ s/^-- .*?: //r);
}
is(findings(), '', 'with the grants all is well');
router(q{ALTER USER MAPPING FOR CURRENT_USER SERVER idem_router OPTIONS (DROP user)});
on_shard($_, q{SELECT idem_revoke('other_app', 'admin'); SELECT idem_grant('other_app', 'app')}) foreach 0 .. 3;

# A router with an old map

$open->query(call($keys[0][0]));
$open->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem_router.slots');
my $slot = router("SELECT idem_slot('$keys[0][19]')");
my %id = map { $_ => on_shard($_, 'SELECT idem_shard_id()') } 0, 3;
my $above = on_shard(0, "SELECT idem_shard_give('{[$slot,$slot]}', '$id{3}')");
is(detail_of('one owner'), "the slots {[$slot,@{[ $slot + 1 ]})} are moving: a shard has given them up, and none has taken them yet",
	'check() finds a move that is not complete');
is(findings(), '|one owner', 'and nothing else');
follow('a move that is not complete', 'one owner (by people)');
on_shard(3, "SELECT idem_shard_take('{[$slot,$slot]}', $above, '$id{0}')");
on_shard(0, 'UPDATE idem.shard SET given = NULL, receiver = NULL');
on_shard(3, 'UPDATE idem.shard SET taken = NULL, sender = NULL');
is( names_shard(0, error_of(call($keys[0][19]))),
	"ID006|idempotency key belongs to another shard|Its slot is $slot, which shard 0 does not have.|The map of the router is old, or the slot is just moving: repeat the call. If the error stays, an operator runs SELECT * FROM idem_router.refresh().",
	'a router with an old map is refused, and says so');
is(findings(), "0|slots\n3|slots", 'check() finds the old map');
refresh();
is($open->sqlstate(call($keys[0][19])), 'ID006', 'a transaction that goes by the old map is refused');
$open->query('ROLLBACK');
is($open->query(call($keys[0][19])), 'finished|f', 'the next transaction of every open session goes by the new one');
is(findings(), '', 'and check() finds nothing');
# back, as the moves below expect it; the key stays where it is
$above = on_shard(3, "SELECT idem_shard_give('{[$slot,$slot]}', '$id{0}')");
on_shard(0, "SELECT idem_shard_take('{[$slot,$slot]}', $above, '$id{3}')");
on_shard(3, 'UPDATE idem.shard SET given = NULL, receiver = NULL');
on_shard(0, 'UPDATE idem.shard SET taken = NULL, sender = NULL');
refresh();

#
# From four shards to eight
#

$two->safe_psql('postgres', q{ALTER SYSTEM SET synchronous_standby_names = ''; SELECT pg_reload_conf()});
$two->poll_query_until('postgres', q{SELECT current_setting('synchronous_standby_names') = ''});
add_shard($_ < 6 ? $one : $two, '{}') foreach 4 .. 7;
router('ALTER SERVER idem_router OPTIONS (' . join(', ', map { "ADD p$_ '$connstrs[$_]'" } 4 .. 7) . ')');
is(scalar(() = refresh() =~ /^\d+\|/mg), 8, 'shards without slots take part');
on_shard($_, 'GRANT USAGE ON SCHEMA shop TO shop_app') foreach 4 .. 7;

SKIP:
{
	skip "$python has no module psycopg2", 16 if system("$python -c 'import psycopg2' 2>/dev/null") != 0;
	move_under_load();
}

# Four shards give half of their slots to four new ones, while clients work.  Server two crashes once.
sub move_under_load
{
	my $router = sprintf 'host=%s port=%d dbname=router', $one->host, $one->port;
	my $file = PostgreSQL::Test::Utils::tempdir() . '/acknowledged';
	my $err = '';
	my $load;

	{
		local $ENV{PYTHONDONTWRITEBYTECODE} = 1;
		$load = IPC::Run::start([ $python, "$FindBin::RealBin/../scale/router_load.py", 5, 6, 400, $router ],
			'<', '/dev/null', '>', $file, '2>', \$err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	}
	# Returns once the load has acknowledged more of this kind.
	my $let_run = sub {
		my ($kind, $more) = @_;
		my $count = sub { scalar(() = slurp_file($file) =~ /^$kind/mg) };
		my $goal = $count->() + $more;

		while ($count->() < $goal && $load->pumpable)
		{
			$load->pump_nb;
			usleep(10_000);
		}
	};
	my $psql = $one->installed_command('psql');

	foreach my $from (0 .. 3)
	{
		my $slots = sprintf '{[%d,%d)}', 256 * $from + 128, 256 * $from + 256;
		my @command = (
			$one->config_data('--bindir') . '/idem_move', '--slots' => $slots,
			'--from' => $connstrs[$from], '--to' => $connstrs[ $from + 4 ],
			'--switch' => "$psql -Xq -d '$router' -c 'SELECT idem_router.refresh()'");
		my ($said, $moved) = ('', 0);

		$let_run->('', 100);
		if ($from == 2)
		{
			my $moving = IPC::Run::start(\@command, '>&', \$said, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));

			$moving->pump until $said =~ /given up/ || !$moving->pumpable;
			$two->stop('immediate');
			$let_run->('lost', 1);
			$two->start;
			eval { $moving->finish };
		}
		$moved = IPC::Run::run(\@command, '>&', \$said);
		note $said;
		ok($moved, "slots $slots move from shard $from to " . ($from + 4));
	}
	is(refresh(), join("\n", map { my $n = 256 * ($_ % 4) + ($_ < 4 ? 0 : 128); sprintf '%d|{[%d,%d)}', $_, $n, $n + 128 } 0 .. 7),
		'eight shards, each with its part');
	$let_run->('', 100);
	# not by the end of its input: a server that was started meanwhile may have the other end, too
	$load->signal('TERM');
	$load->finish;
	is($load->full_result(0), 0, 'the load comes to its end');
	my $out = slurp_file($file);
	# libpq prints what the server says to a client that is just connecting when the server crashes
	$err =~ s/^WARNING:  terminating connection because of crash .*\nDETAIL:  .*\nHINT:  .*\n//mg;
	is($err, '', 'without an error of its own');
	is(join("\n", $out =~ /^unexpected .*$/mg), '', 'and no call has raised another error');

	# what a lost answer has left leased
	on_shard($_, "ALTER DATABASE s$_ SET idem.clock_offset = 3600") foreach 0 .. 7;
	my $left = q{SELECT count((idem_router.idem_call('done ' || f.job_id, 'shop.charge', jsonb_build_object('key', 'done ' || f.job_id))).status)
			 + count(idem_router.idem_complete(f.job_id, f.token)) FROM idem_router.idem_fetch('load', 1000, '1 min') AS f};
	while (router($left) ne '0') { }
	on_shard($_, "ALTER DATABASE s$_ RESET idem.clock_offset") foreach 0 .. 7;

	my (%ran, %tokens);

	$ran{$_}++ foreach map { split /\n/, on_shard($_, 'SELECT key FROM shop.ledger') } 0 .. 7;
	my %call = map { $_ => 1 } $out =~ /^call (call \d+)$/mg;
	my %job = map { ("done $_" => 1) } $out =~ /^job (\d+)$/mg;
	$tokens{$1}{$2} = 1 while $out =~ /^lease (lease \d+) (\d+)$/mg;
	my ($refused) = $out =~ /^refused (\d+)$/m;
	my $lost = () = $out =~ /^lost$/mg;
	my %stored = map { split /\|/ } split /\n/, router(
		'SELECT k.key, g.result FROM unnest(ARRAY[' . join(', ', map { "'$_'" } keys %tokens) . ']) AS k (key) CROSS JOIN LATERAL idem_router.idem_get(k.key) AS g');

	note sprintf '%d calls, %d jobs and %d leases acknowledged; %d times refused, %d connections lost',
	  scalar keys %call, scalar keys %job, scalar keys %tokens, $refused, $lost;
	cmp_ok(scalar keys %call, '>', 100, 'there were calls');
	cmp_ok($refused, '>', 0, 'calls were refused while their slot moved');
	cmp_ok($lost, '>', 0, 'and connections were lost');
	is(join(' ', grep { $ran{$_} > 1 } sort keys %ran), '', 'nothing has run twice');
	is(join(' ', grep { !$ran{$_} } sort keys %call), '', 'no call that was acknowledged is lost');
	is(join(' ', grep { !$ran{$_} } sort keys %job), '', 'nor a job');
	is(on_all(q{SELECT count(*) FROM idem.jobs WHERE queue = 'load'}), 0, 'and no job is left');
	is(join(' ', grep { join(' ', keys %{ $tokens{$_} }) ne ($stored{$_} // '') } sort keys %tokens), '',
		'each lease was finished once, and its shard has the result');
	return;
}

# Without moving keys, as if the number of partitions was the map: the slot modulo the partitions.

sub modulo { router("UPDATE idem_router.slots SET shard = slot % $_[0]") }
sub call_many
{
	my ($what, $n) = @_;

	return map { substr $_, 0, 5 } split /\n/, router(
		qq{SELECT error_of(format(\$q\$SELECT idem_router.idem_call(%L, 'shop.charge', %L)\$q\$, '$what' || n, jsonb_build_object('key', '$what' || n)))
			 FROM generate_series(1, $n) AS n});
}

sub runs_twice { return on_all("SELECT count(*) FROM shop.ledger WHERE key LIKE '$_[0]%'") - $_[1] }

on_shard($_, "SELECT idem_shard_set('{}', number => $_, force => true)") foreach 4 .. 7;
on_shard($_, "SELECT idem_shard_set((SELECT range_agg(int4range(n, n + 1)) FROM generate_series($_, 1023, 4) AS n), number => $_, force => true)") foreach 0 .. 3;
modulo(4);
my @before = call_many('guarded', 200);
modulo(8);
my @after = call_many('guarded', 200);
my $refused = grep { $_ eq 'ID006' } @after;

is(scalar(grep { $_ eq '00000' } @before), 200, '200 calls with four partitions');
cmp_ok($refused, '>', 50, "four to eight partitions without moving keys: $refused of 200 calls are refused");
is($refused + (grep { $_ eq '00000' } @after), 200, 'and the others work');
is(runs_twice('guarded', 200), 0, 'with the guard nothing runs twice');
on_shard($_, 'SELECT idem_shard_set(NULL)') foreach 0 .. 7;
modulo(4);
call_many('unguarded', 200);
modulo(8);
call_many('unguarded', 200);
cmp_ok(runs_twice('unguarded', 200), '>', 50, 'without the guard many run twice, which is why there is one: ' . runs_twice('unguarded', 200) . ' of 200');

$one->stop;
$two->stop;
log_ok($one);
log_ok($two, killed => 2);
done_testing();
