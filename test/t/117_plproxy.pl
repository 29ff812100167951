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
is(install(), '42P06', 'nor does it adopt a schema');
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
is(state_of('SELECT idem_router.refresh()'), '55000', 'and refresh() wants a server');
router('CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (' . join(', ', q{modular_mapping '1'}, server_options(0 .. 3)) . ')');
router('CREATE USER MAPPING FOR CURRENT_USER SERVER idem_router');
is(refresh(), join("\n", '0|{[0,256)}', '1|{[256,512)}', '2|{[512,768)}', '3|{[768,1024)}'), 'refresh() asks the shards for their slots');
is(findings(), '', 'check() finds nothing');
router("ALTER SERVER idem_router OPTIONS (SET p1 '$connstrs[1] user=postgres')");
is(findings() =~ /^\|passwords$/m, 1, 'check() finds a user in the options of the server');
router("ALTER SERVER idem_router OPTIONS (SET p1 '$connstrs[1]')");

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
	is($routed, $direct, "$state: message, detail and hint, too");
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
	'idem_enqueue_many' => q{'q', '{1}'}, 'idem_complete_many' => q{'{1}', '{1}'});

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

# A number from before the map of one shard must not reach another one.

router('UPDATE idem_router.shards SET jobs_from = 10 * 1024 WHERE shard = 0');
is(state_of('SELECT idem_router.idem_cancel(5)'), '00000', 'a number from before the map may be in its shard');
is( error_of('SELECT idem_router.idem_cancel(300)'),
	'0A000|the shard of this job is not known|The number may be from before the map of another shard, when numbers carried no slot. Such shards: 0.|Call the function in the database in which the job was enqueued.',
	'but not if it leads to another one');
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
	my ($what, $detail, $break, $repair) = @_;

	$break->();
	like(error_of('SELECT idem_router.refresh()'), qr/^55000\|[^|]*\|.*$detail/s, "refresh() refuses $what");
	is(scalar(() = findings() =~ /\|/g) > 0, 1, "check() finds $what");
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
wrong('a shard with another encoding', 'encoding LATIN1, the router UTF8', sub { instead_of_s3('latin') }, sub { $option[3]->(3) });
wrong('a shard by scope', 'by scope', sub { instead_of_s3('scoped') }, sub { $option[3]->(3) });
wrong('partitions that are swapped', 'partition p0 leads to shard 1',
	sub { $option[0]->(1); $option[1]->(0) }, sub { $option[0]->(0); $option[1]->(1) });
$option[0]->(1);
$option[1]->(0);
is(state_of(call($keys[0][0])), 'ID006', 'with swapped partitions the shards refuse the keys');
$option[0]->(0);
$option[1]->(1);
wrong('a shard without a map', 'no map', sub { on_shard(3, 'SELECT idem_shard_set(NULL)') },
	sub { on_shard(3, q{SELECT idem_shard_set('{[768,1024)}', number => 3)}) });
wrong('two shards with the same slot', 'Shard 3 and one before it have the slots .\[767,768.',
	sub { on_shard(3, q{SELECT idem_shard_set('{[767,1024)}', number => 3)}) },
	sub { on_shard(3, q{SELECT idem_shard_set('{[768,1024)}', number => 3, force => true)}) });
router(q{SELECT idem_shard_set(NULL)});
is(findings(), '|router map', 'check() finds a router that would accept keys');
router(q{SELECT idem_shard_set('{}')});

# A router with an old map

$open->query(call($keys[0][0]));
$open->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem_router.slots');
my $slot = router("SELECT idem_slot('$keys[0][19]')");
my %id = map { $_ => on_shard($_, 'SELECT idem_shard_id()') } 0, 3;
my $above = on_shard(0, "SELECT idem_shard_give('{[$slot,$slot]}', '$id{3}')");
on_shard(3, "SELECT idem_shard_take('{[$slot,$slot]}', $above, '$id{0}')");
on_shard(0, 'UPDATE idem.shard SET given = NULL, receiver = NULL');
on_shard(3, 'UPDATE idem.shard SET taken = NULL, sender = NULL');
is( error_of(call($keys[0][19])),
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
