# What the background worker cleans, and what it leaves alone.
#
#   W1  what has expired goes, in batches, and nothing else
#   W5  every database is visited; a reload starts a round at once everywhere
#       (there is no other reason for one here: the naptime is a day);
#       idem.cleanup is per database
#   W6  without preload there is no worker, and everything else works
#   W8  only members of the extension are touched, as their owner, restricted,
#       with a safe search_path; no SQL of users runs
#
# Bugs of other projects (doc/peers.md section 4) that this test looks for:
#   CVE-2022-2625                    an object of another role is adopted
#   CVE-2018-1058, CVE-2020-14350    search_path
#   CVE-2023-25149                   a superuser's worker runs SQL of users
#   CVE-2023-22847                   C code bypasses row security

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'worker', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
idem.cleanup_batch_size = 11
autovacuum = off
});

# how many keys of add_expired() are still there
sub expired
{
	my ($db) = @_;

	return run(q{SELECT count(*) FROM idem.keys WHERE key LIKE 'expired %'}, db => $db);
}

sub wait_until_clean
{
	my ($db) = @_;

	return $node->poll_query_until($db,
		q{SELECT count(*) = 0 FROM idem.keys WHERE key LIKE 'expired %'});
}

sub alter_system
{
	my ($what) = @_;

	return run("ALTER SYSTEM $what");
}

#
# W1: three databases.  The name of a row says what happens to it: gone, live, or held
# by a transaction.
#

my $n = 40;
my %batch = (one => 7, two => 5, three => 11);
my @three = sort keys %batch;

# an hour ago, with times of a minute
my $gone = qq{
	SELECT count(*) FROM idem_claim_many(
		ARRAY(SELECT 'gone claim ' || n FROM generate_series(1, $n) AS n), ttl => '1 min');
	SELECT count((idem_lease('gone lease ' || n, '1 min', ttl => '1 min')).token)
	  FROM generate_series(1, $n) AS n;
	SELECT idem_finish('gone finished ' || n, '1',
					   token => (idem_lease('gone finished ' || n, '1 min', ttl => '1 min')).token)
	  FROM generate_series(1, $n) AS n;

	SELECT count(*) FROM idem_enqueue_many('gone keys', array_fill('1'::jsonb, ARRAY[$n]),
		ARRAY(SELECT 'k' || n FROM generate_series(1, $n) AS n),
		dedup => 'until_expired', key_ttl => '1 min');
	SELECT idem_complete(job_id, token) FROM idem_fetch('gone keys', $n, '1 min');

	SELECT idem_queue_set('gone history', keep => '1 min', keep_dead => '1 min');
	SELECT count(*) FROM idem_enqueue_many('gone history', array_fill('1'::jsonb, ARRAY[3 * $n]));
	SELECT idem_complete(job_id, token) FROM idem_fetch('gone history', $n, '1 min');
	SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('gone history', $n, '1 min');
	SELECT idem_cancel(job_id) FROM idem.jobs WHERE queue = 'gone history';

	SELECT count(*) FROM idem_enqueue_many('gone attempts', array_fill('{"a": 1}'::jsonb, ARRAY[$n]),
		max_attempts => 1);
	SELECT count(*) FROM idem_fetch('gone attempts', $n, '1 min', 'w');
	SELECT idem_queue_set('gone declared', max_attempts => 1);
	SELECT count(*) FROM idem_enqueue_many('gone declared', array_fill('{"a": 1}'::jsonb, ARRAY[$n]));
	SELECT count(*) FROM idem_fetch('gone declared', $n, '1 min', 'w');
};
my $live = q{
	SELECT idem_lease('live, its lease ran out', '1 min', ttl => '1 day');
	SELECT idem_lease('live, exhausted', '1 min', ttl => '1 day', max_attempts => 1);
	SELECT idem_lease('live, parked', '1 min', ttl => '1 min', on_expiry => 'park');

	SELECT idem_enqueue('live, waits');
	SELECT idem_enqueue('live, scheduled', delay => '1 day');
	SELECT idem_enqueue('live, attempts left', max_attempts => 2);
	SELECT idem_fetch('live, attempts left', 1, '1 min');
	SELECT idem_queue_set('live, was granted a retry', max_attempts => 2);
	SELECT idem_enqueue('live, was granted a retry');
	SELECT idem_fail(job_id, token, retry_in => '1 min')
	  FROM idem_fetch('live, was granted a retry', 1, '1 min');
	SELECT idem_queue_set('live, was granted a retry', max_attempts => 1);
	SELECT idem_queue_set('live, kept', keep => '1 day');
	SELECT idem_enqueue('live, kept', key => 'k', dedup => 'until_expired', key_ttl => '1 day');
	SELECT idem_complete(job_id, token) FROM idem_fetch('live, kept', 1, '1 min');

	RESET idem.clock_offset;
	SELECT idem_claim('live, claimed');
	SELECT idem_lease('live, leased', '1 day', ttl => '1 s');
	SELECT idem_enqueue('live, last attempt', max_attempts => 1);
	SELECT idem_fetch('live, last attempt', 1, '1 day');
};

# the very versions of the rows
my $rows = q{
	SELECT name, ctid, xmin, row FROM (
		SELECT key AS name, ctid, xmin, k::text AS row FROM idem.keys AS k
		UNION ALL
		SELECT queue, ctid, xmin, j::text FROM idem.jobs AS j
		UNION ALL
		SELECT queue, ctid, xmin, k::text FROM idem.job_keys AS k
		UNION ALL
		SELECT queue, ctid, xmin, l::text FROM idem.job_log AS l) AS r};
my $live_rows = "$rows WHERE name LIKE 'live%' ORDER BY 1, 2";

# Transactions that began before can still see the removed rows, with the
# transaction that did so.
my %witness;
my %before;

foreach my $db (@three)
{
	new_database($db);
	run("ALTER DATABASE $db SET idem.cleanup_batch_size = $batch{$db}")
	  if $db ne 'three';
	run("SET idem.clock_offset = -3600; $gone; $live", db => $db);
	$before{$db} = run($live_rows, db => $db);
	$witness{$db} = session($node, db => $db);
	$witness{$db}
	  ->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem.keys');
}
is(scalar(split /\n/, $before{one}),
	'12', 'there are live rows of twelve kinds');

# what is locked, changed, or just being taken over, in the first database
my @held = ('FOR UPDATE', 'FOR NO KEY UPDATE', 'FOR SHARE', 'FOR KEY SHARE');
my @holders = map { session($node, db => 'one') } 0 .. $#held + 1;

run(
		'SET idem.clock_offset = -3600;'
	  . join(';', map { "SELECT idem_claim('held $_', ttl => '1 min')" } @held, 'taken over')
	  . q{;
	SELECT idem_enqueue('held', key => 'k', dedup => 'until_expired', key_ttl => '1 min');
	SELECT idem_queue_set('held', keep => '1 min');
	SELECT idem_complete(job_id, token) FROM idem_fetch('held', 1, '1 min');
	SELECT idem_queue_set('held', max_attempts => 1);
	SELECT idem_enqueue('held');
	SELECT idem_fetch('held', 1, '1 min')}, db => 'one');
foreach my $i (0 .. $#held)
{
	$holders[$i]->query(
		qq{BEGIN;
		SELECT FROM idem.keys WHERE key = 'held $held[$i]' $held[$i];
		SELECT FROM idem.job_keys WHERE queue = 'held' FOR KEY SHARE;
		SELECT FROM idem.job_log WHERE queue = 'held' FOR KEY SHARE;
		SELECT FROM idem.jobs WHERE queue = 'held' FOR KEY SHARE});
}
is( $holders[-1]->query(q{BEGIN; SELECT status FROM idem_claim('held taken over')}),
	'claimed', 'an expired key is being taken over');

my $held_rows = run("$rows WHERE name LIKE 'held%' ORDER BY 1, 2", db => 'one');

cleanup_round($node, @three);

foreach my $db (@three)
{
	is(run($live_rows, db => $db), $before{$db}, "W1: $db: live rows stay as they were");
	is( run(qq{
			SELECT string_agg(DISTINCT name, ', ' ORDER BY name) FROM ($rows) AS r
			 WHERE name LIKE 'gone%'}, db => $db),
		'gone attempts, gone declared',
		"W1: $db: what has expired is gone");
	is( run(q{
			SELECT queue, state, attempt, worker, errors -> -1 ->> 'error', payload, count(*) FROM idem.job_log
			 WHERE queue LIKE 'gone%' GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1}, db => $db),
		join("\n", map { qq{$_|dead|1|w|The lease of the last attempt ran out.|{"a": 1}|$n} }
			  'gone attempts', 'gone declared'),
		"W1: $db: jobs out of attempts are dead, with all that was known of them");
	is( run(q{
			SELECT idem_retry(min(job_id)) FROM idem.job_log WHERE queue = 'gone attempts';
			SELECT payload FROM idem_fetch('gone attempts')}, db => $db),
		qq{t\n{"a": 1}},
		"W1: $db: and can be brought back");
	is( run(qq{
			SELECT phase, removed, backlog, last_error FROM idem.cleanup_progress WHERE datname = '$db'}),
		sprintf('idle|%d|0|', 9 * $n),
		"W1: $db: cleanup_progress says how many were removed");
	is( run(qq{
			SELECT expired_keys, abandoned_leases, expired_job_keys, expired_job_history
			  FROM idem.stats WHERE datname = '$db';
			SELECT queue, dead FROM idem.queue_stats
			 WHERE datname = '$db' AND queue LIKE 'gone%' AND dead > 0 ORDER BY 1}),
		join("\n", join('|', 3 * $n, $n, $n, 3 * $n),
			map { "gone $_|$n" } qw(attempts declared history)),
		"W1, S1: $db: each was counted once");

	my %removed = (
		'idem.keys' => "key LIKE 'gone%'",
		'idem.job_keys' => "queue LIKE 'gone%'",
		'idem.job_log' => "queue LIKE 'gone%'",
		'idem.jobs' => "queue LIKE 'gone%'");

	foreach my $table (sort keys %removed)
	{
		is( $witness{$db}->query(
				qq{SELECT max(n), count(*) FILTER (WHERE xmax = 0), count(*) >= sum(n) / $batch{$db}
					 FROM (SELECT xmax, count(*) AS n FROM $table WHERE $removed{$table} GROUP BY xmax) AS t}),
			"$batch{$db}|0|t",
			"W1: $db: no transaction has removed more than $batch{$db} rows of $table");
	}
	$witness{$db}->quit;
}

is(run("$rows WHERE name LIKE 'held%' ORDER BY 1, 2", db => 'one'),
	$held_rows, 'W1, W2: locked rows stay, and the worker does not wait for them');
$_->query('COMMIT') foreach @holders;
$_->quit foreach @holders;
cleanup_round($node, 'one');
is( run(q{SELECT key FROM idem.keys WHERE key LIKE 'held%';
	  SELECT state FROM idem.job_status WHERE queue = 'held';
	  SELECT count(*) FROM idem.job_keys WHERE queue = 'held'}, db => 'one'),
	"held taken over\ndead\n0",
	'W1: the next round removes them, but not the key that was taken over');

#
# W5: idem.cleanup is per database
#

my $count = 30;

sub expire_in
{
	add_expired($node, $count, db => $_) foreach @_;
	return;
}

sub all_expired
{
	return join ' ', map { "$_=" . expired($_) } @three;
}

expire_in(@three);
run('ALTER DATABASE two SET idem.cleanup = off');
cleanup_round($node);
is(all_expired(), "one=0 three=0 two=$count", 'W5: cleanup is off in one database only');
is(progress('two', 'phase'), 'off', 'W5: cleanup_progress says that it is off');

my $fix = doctor('last cleanup', columns => 'status, fix', db => 'two');

like($fix, qr/^warn\|ALTER DATABASE two /, 'H1: idem_doctor() says so, too');
$fix =~ s/^warn\|//;
run($fix, db => 'two');
cleanup_round($node, 'two');
is(expired('two'), '0', 'H1: its fix switches cleanup on again, with the next reload');

expire_in(@three);
alter_system('SET idem.cleanup = off');
run('ALTER DATABASE three SET idem.cleanup = on');
cleanup_round($node);
# the fix has left a setting, too
is(all_expired(), "one=$count three=0 two=0",
	'W5: off in the server, on in two databases');
alter_system('RESET idem.cleanup');
run("ALTER DATABASE $_ RESET idem.cleanup") foreach qw(two three);
cleanup_round($node, @three);
is(all_expired(), 'one=0 three=0 two=0', 'W5: on again everywhere');

# A reload while the worker is there: it is stopped in a pause between two
# batches, after which nothing is left to be removed.
my $long = 20000;
my $stopped;

new_database('reload');
run("ALTER DATABASE reload SET idem.cleanup_batch_size = $long");
foreach my $attempt (1 .. 10)
{
	add_expired($node, $long, db => 'reload');
	run('SELECT pg_reload_conf()');
	$stopped = run(q{
		DO $$ BEGIN
			FOR i IN 1 .. 18000 LOOP
				PERFORM pg_stat_clear_snapshot();
				IF EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem cleanup'
							  AND datname = 'reload' AND wait_event_type = 'Extension') THEN
					RETURN;
				END IF;
				PERFORM pg_sleep(0.01);
			END LOOP;
			RAISE 'there is no pause';
		END $$;
		SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem cleanup' AND datname = 'reload'});
	last if $stopped && kill 'STOP', $stopped;
}
run('ALTER DATABASE reload SET idem.cleanup = off');
run('SELECT pg_reload_conf()');
is( run("SELECT datname FROM pg_stat_activity WHERE pid = $stopped"),
	'reload', 'a worker was stopped in its pause');
kill 'CONT', $stopped;
ok( $node->poll_query_until(
		'postgres',
		q{SELECT phase = 'off' FROM idem.cleanup_progress WHERE datname = 'reload'}),
	'W5: a reload counts also for the database where the worker is just then');
run('DROP DATABASE reload');

#
# W5: the extension comes later
#

run('CREATE DATABASE later');
alter_system(q{SET idem.cleanup_naptime = '1 s'});
cleanup_round($node);
run('CREATE EXTENSION idem', db => 'later');
expire_in('later');
ok( wait_until_clean('later'),
	'W5: an extension that was created later is found when its functions are used');

# also: what it does without reloads
expire_in('one');
ok( wait_until_clean('one'),
	'W5: with a naptime of a second there is no need for a reload');
alter_system('RESET idem.cleanup_naptime');
cleanup_round($node, 'one');

#
# W8: what looks like ours and is not (CVE-2022-2625)
#

new_database('alike');
expire_in('alike');
run(q{
	CREATE SCHEMA copy;
	CREATE TABLE copy.keys (LIKE idem.keys INCLUDING ALL);
	CREATE TABLE copy.jobs (LIKE idem.jobs INCLUDING ALL);
	CREATE TABLE copy.job_keys (LIKE idem.job_keys INCLUDING ALL);
	CREATE TABLE copy.job_log (LIKE idem.job_log INCLUDING ALL);
	CREATE TABLE copy.queues (LIKE idem.queues INCLUDING ALL);
	INSERT INTO copy.keys SELECT * FROM idem.keys;
	ALTER SCHEMA idem RENAME TO away;
	ALTER SCHEMA copy RENAME TO idem}, db => 'alike');
cleanup_round($node, 'alike');
is(expired('alike'), $count, 'W8: a schema in the place of ours is not touched');
run('DROP EXTENSION idem CASCADE', db => 'alike');
cleanup_round($node);
is(expired('alike'), $count, 'W8: neither is one without the extension');
is(progress('alike', 'phase'), 'not installed', 'cleanup_progress says that it is not there');

run(q{
	SET idem.clock_offset = -3600;
	SELECT idem_queue_set('q', keep => '1 min', max_attempts => 1);
	SELECT idem_enqueue_many('q', '{1, 2}');
	SELECT idem_complete(job_id, token) FROM idem_fetch('q', 1, '1 min');
	SELECT idem_fetch('q', 1, '1 min');
	ALTER EXTENSION idem DROP TABLE idem.job_log}, db => 'later');
expire_in('later');
my $jobs = q{
	SELECT (SELECT count(*) FROM idem.jobs), (SELECT string_agg(state, ' ') FROM idem.job_log)};
cleanup_round($node, 'later');
is(expired('later') . '|' . run($jobs, db => 'later'),
	'0|1|done', 'W8: a table that is no member any more is left alone, others are cleaned');
run('ALTER EXTENSION idem ADD TABLE idem.job_log', db => 'later');
cleanup_round($node, 'later');
is(run($jobs, db => 'later'), '0|dead', 'W8: until it is one again');

#
# W8: settings of the database and of roles
#

my $me = run('SELECT quote_ident(current_user)');
my @odd = (
	'default_transaction_read_only = on',
	'default_transaction_isolation = serializable',
	'default_transaction_deferrable = on',
	"statement_timeout = '1ms'",
	"lock_timeout = '1ms'",
	"idle_in_transaction_session_timeout = '1ms'",
	'search_path = evil, public, pg_catalog',
	'role = app');

push @odd, "transaction_timeout = '1ms'" if $node->pg_version >= 17;
run('CREATE ROLE app');
new_database('odd');
add_expired($node, 5000, db => 'odd');
run(q{SELECT idem_claim('live')}, db => 'odd');

# which a deferrable transaction would wait for
my $open = session($node, db => 'odd');

$open->query(q{
	CREATE TABLE calls (what text);
	CREATE SCHEMA evil;
	CREATE FUNCTION evil.le(timestamptz, timestamptz) RETURNS boolean LANGUAGE sql AS
		$$INSERT INTO calls VALUES ('operator'); SELECT true$$;
	CREATE OPERATOR evil.<= (FUNCTION = evil.le, LEFTARG = timestamptz, RIGHTARG = timestamptz);
	CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS
		$$INSERT INTO calls VALUES ('function'); SELECT pg_catalog.clock_timestamp()$$;
	CREATE TABLE evil.keys ();
	BEGIN ISOLATION LEVEL SERIALIZABLE; CREATE TABLE t ()});
run(join ';',
	'ALTER DATABASE odd SET idem.cleanup_batch_size = 5000',
	map { ("ALTER DATABASE odd SET $_", "ALTER ROLE $me IN DATABASE odd SET $_") } @odd);
cleanup_round($node, 'odd');
$open->query('COMMIT');
is($open->query('SELECT key FROM idem.keys'),
	'live', 'W8: settings of the database and of the role are not in the way');
is($open->query('SELECT count(*) FROM calls'),
	'0', 'W8: what search_path names is not used (CVE-2018-1058, CVE-2020-14350)');
$open->quit;
run('DROP DATABASE odd');

#
# W8: with the privileges of the owner of the tables, which may be any role, restricted
#

new_database('owned');
run(q{
	CREATE ROLE keeper;
	CREATE ROLE billing;
	ALTER TABLE idem.keys OWNER TO keeper;
	ALTER TABLE idem.jobs OWNER TO keeper;
	ALTER TABLE idem.job_keys OWNER TO keeper;
	ALTER TABLE idem.job_log OWNER TO keeper;
	ALTER TABLE idem.queues OWNER TO keeper;
	SELECT idem_queue_set('invoice', owner => 'billing');

	CREATE SCHEMA spy;
	CREATE FUNCTION spy.cmp(text, text) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
		RAISE LOG 'spy: user "%", path "%"', current_user, current_setting('search_path');
		RETURN bttextcmp($1, $2);
	END $$;
	CREATE OPERATOR CLASS spy.text_ops FOR TYPE text USING btree AS
		OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >,
		FUNCTION 1 spy.cmp(text, text);
	CREATE INDEX spy_idx ON idem.job_log (queue spy.text_ops);
}, db => 'owned');

my $spent = q{
	SET idem.clock_offset = -3600;
	SELECT idem_enqueue_many('invoice', '{1, 2, 3}', max_attempts => 1);
	SELECT idem_fetch('invoice', 3, '1 min')};
my $states = q{SELECT state, count(*) FROM idem.job_status GROUP BY 1 ORDER BY 1};
my $offset = -s $node->logfile;

run($spent, db => 'owned');
expire_in('owned');
cleanup_round($node, 'owned');
is( run($states, db => 'owned') . ' ' . expired('owned'),
	'dead|3 0',
	'W8: the owner of the tables is no superuser, the queue belongs to another role');

my %seen = map { $_ => 1 } slurp_file($node->logfile, $offset) =~ /LOG:  (spy: .*)/g;

is( join("\n", sort keys %seen),
	'spy: user "keeper", path ""',
	'W8: what an operator class runs it runs as the owner of the table, with an empty search_path');

run(q{
	CREATE OR REPLACE FUNCTION spy.cmp(text, text) RETURNS integer LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
		PERFORM set_config('role', 'none', false);
		RETURN bttextcmp($1, $2);
	END $$}, db => 'owned');
run($spent, db => 'owned');
cleanup_round($node, 'owned');
is( progress('owned', 'phase, last_error'),
	'failing|cannot set parameter "role" within security-restricted operation',
	'W8: and restricted (CVE-2023-25149)');
is(run($states, db => 'owned'), "dead|3\nexpired|3", 'W8: then nothing is done of that batch');
run('DROP INDEX idem.spy_idx', db => 'owned');
cleanup_round($node, 'owned');
is(run($states, db => 'owned'), 'dead|6', 'W8: without it cleanup goes on');

# the roles go, too
run(q{
	SELECT idem_queue_set('invoice', owner => '-');
	DROP ROLE billing;
	REASSIGN OWNED BY keeper TO app;
	DROP OWNED BY keeper;
	DROP ROLE keeper}, db => 'owned');
run($spent, db => 'owned');
expire_in('owned');
cleanup_round($node, 'owned');
is(run($states, db => 'owned') . ' ' . expired('owned'),
	'dead|9 0', 'W8: another owner, and the one before is gone');

#
# W8: what direct access would bypass is refused, and logged once
#

run(q{
	CREATE TABLE fired (what text);
	CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN INSERT INTO public.fired VALUES (TG_TABLE_NAME); RETURN NULL; END $$;
	CREATE FUNCTION fire_event() RETURNS event_trigger LANGUAGE plpgsql AS
		$$ BEGIN INSERT INTO public.fired
				 SELECT backend_type FROM pg_stat_activity
				  WHERE pid = pg_backend_pid() AND backend_type LIKE 'idem%'; END $$;
	CREATE EVENT TRIGGER start_fires ON ddl_command_start EXECUTE FUNCTION fire_event();
	CREATE EVENT TRIGGER end_fires ON ddl_command_end EXECUTE FUNCTION fire_event()}, db => 'owned');
run('CREATE EVENT TRIGGER login_fires ON login EXECUTE FUNCTION fire_event();
	ALTER EVENT TRIGGER login_fires ENABLE ALWAYS', db => 'owned')
  if $node->pg_version >= 17;

my @refused = (
	[
		'a trigger',
		'CREATE TRIGGER t AFTER DELETE ON idem.keys FOR EACH ROW EXECUTE FUNCTION fire()',
		'DROP TRIGGER t ON idem.keys'
	],
	[
		'a statement trigger',
		'CREATE TRIGGER t BEFORE DELETE ON idem.keys FOR EACH STATEMENT EXECUTE FUNCTION fire()',
		'DROP TRIGGER t ON idem.keys'
	],
	[
		'row security (CVE-2023-22847)',
		'ALTER TABLE idem.keys ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY',
		'ALTER TABLE idem.keys DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY'
	],
	[
		'a rule',
		'CREATE RULE r AS ON DELETE TO idem.keys DO INSTEAD NOTHING',
		'DROP RULE r ON idem.keys'
	]);

foreach my $case (@refused)
{
	my ($what, $do, $undo) = @$case;

	expire_in('owned');
	$offset = -s $node->logfile;
	run($do, db => 'owned');
	cleanup_round($node, 'owned') foreach 1 .. 3;
	is( progress('owned', 'phase, last_error'),
		'failing|unexpected definition of table "idem.keys"',
		"W8: $what is refused");
	is(expired('owned'), $count, "W8: $what: nothing is removed");
	run($undo, db => 'owned');
	cleanup_round($node, 'owned') foreach 1 .. 2;
	is(expired('owned') . ' ' . progress('owned', 'phase'), '0 idle', "W8: $what: without it cleanup goes on");
	is( join(' ',
			map { log_count($node, qr/idem cleanup $_ in database "owned"/, $offset) }
			  'failed', 'works again'),
		'1 1', "W7: $what: both are logged once");
}
is(run('SELECT count(*) FROM fired', db => 'owned'),
	'0', 'W8: no trigger has fired, of a table or of an event');

$node->stop;
log_ok($node);

#
# W6: without preload
#

my $bare = new_node('bare');

add_expired($bare, 10);
$bare->safe_psql('postgres', q{
	SELECT idem_claim('live');
	SET idem.clock_offset = -3600;
	SELECT idem_enqueue('spent', max_attempts => 1);
	SELECT idem_fetch('spent', 1, '1 min')});
is( $bare->safe_psql('postgres',
		'SELECT idem_cleanup(7); SELECT idem_cleanup(7); SELECT idem_cleanup()'),
	"8\n3\n0", 'W6: without preload idem_cleanup() works');
is( $bare->safe_psql('postgres', q{SELECT key FROM idem.keys; SELECT state FROM idem.job_status}),
	"live\ndead", 'W6: and removes what has expired');
is( $bare->safe_psql('postgres', q{
		SELECT count(*) FROM idem.stats;
		SELECT count(*) FROM idem.queue_stats;
		SELECT count(*) FROM idem.cleanup_progress;
		SELECT preloaded, state, launcher_pid, worker_pid, runs FROM idem.worker_status;
		SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'}),
	"0\n0\n0\nf|stopped|||\n0",
	'W6: there are no statistics and no worker, and the views say so');
is(sqlstate($bare, 'SELECT idem_stats_reset()'), '55000', 'W6: nothing to be reset');
is( $bare->safe_psql('postgres', q{
		SELECT "check", status, fix IS NOT NULL FROM idem_doctor()
		 WHERE "check" IN ('preload', 'worker', 'last cleanup', 'statistics')}),
	"preload|warn|t\nworker|warn|t\nlast cleanup|warn|t\nstatistics|ok|f",
	'W6, H1: idem_doctor() says so, and what to do');

unlike(doctor('preload', columns => 'detail', node => $bare), qr/map/, 'H1: without a map');
$bare->safe_psql('postgres', q{SELECT idem_shard_set('{}', force => true)});
like(doctor('preload', columns => 'detail', node => $bare),
	qr/map of slots.*rows of slots that have moved away stay/, 'H1: a map without preload, and what follows');
is($bare->safe_psql('postgres', q{SET idem.clock_offset = 864000; SELECT idem_cleanup() > 0}),
	't', 'H1: until idem_cleanup() is called');
$bare->safe_psql('postgres', 'SELECT idem_shard_set(NULL)');
$bare->safe_psql('postgres',
	doctor('preload', columns => 'fix', node => $bare));
$bare->restart;
add_expired($bare, 10);
cleanup_round($bare, 'postgres');
is( $bare->safe_psql('postgres', q{
		SELECT count(*) FROM idem.keys WHERE key <> 'live';
		SELECT "check", status FROM idem_doctor()
		 WHERE "check" IN ('preload', 'worker', 'last cleanup', 'statistics')}),
	"0\npreload|ok\nworker|ok\nlast cleanup|ok\nstatistics|ok",
	'H1: after its fix and a restart all is well');

$bare->stop;
log_ok($bare);
done_testing();
