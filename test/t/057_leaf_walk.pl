# The walk over the entries of an index (src/table/leaf.c) where one key has entries on several
# pages, merged entries and dead ones, and where changes of the index are not logged.  A key
# that the walk misses would run a second time.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('leaf_walk', conf => "autovacuum = off\nstatement_timeout = 120s\n");

# many versions of a row, none of them HOT; each is committed, so that it is dead for the next one
$node->safe_psql('postgres', q{
	CREATE PROCEDURE update_key(which text, n int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. n LOOP
			UPDATE idem.keys SET expires_at = expires_at + interval '1 us' WHERE key = which;
			COMMIT;
		END LOOP;
	END $$;
	CREATE PROCEDURE update_job(which text, n int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. n LOOP
			UPDATE idem.jobs SET priority = i % 2 WHERE key = which;
			COMMIT;
		END LOOP;
	END $$;
	-- 'other' has the hash of 'k', and comes before it
	SELECT idem_claim('other');
	UPDATE idem.keys SET key_hash = idem_key_hash('k', ''), nth = 0 WHERE key = 'other';
	BEGIN;
	SELECT idem_claim('k');
	SELECT idem_finish('k', '1');
	COMMIT;
	SELECT idem_enqueue('q', '1', 'k');
	SELECT idem_enqueue('q2', '1', 'other')});
is(run(q{SELECT string_agg(key || ' ' || nth, ', ' ORDER BY nth) FROM idem.keys}),
	'other 0, k 1', 'two keys have the same hash');

# claims, a read, an enqueue; each in a session that has seen nothing yet
sub found_ok
{
	my ($when) = @_;

	is(run(q{SELECT status FROM idem_claim('k')}), 'finished', "K3: the key is found $when")
	  foreach 1 .. 2;
	is( run(q{BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT status FROM idem_claim('k'); COMMIT}),
		'finished', "K10: the key is found $when");
	is(run(q{SELECT status FROM idem_get('k')}), 'finished', "idem_get finds the key $when");
	is(run(q{SELECT outcome FROM idem_enqueue('q', '2', 'k')}),
		'absorbed', "J1: the job is found $when") foreach 1 .. 2;
	is(run(q{BEGIN; SELECT count(*) FROM idem_fetch('q', 10); ROLLBACK}),
		'1', "J2: the job is fetched once $when");
	return;
}

# an entry that only this transaction does not see is not dead
run(q{SELECT idem_claim('back')});
is( run(q{BEGIN; SELECT idem_forget('back'); SELECT status FROM idem_claim('back'); ROLLBACK;
		SELECT status FROM idem_claim('back')}),
	"t\nclaimed\nfinished",
	'K1: a key that was removed and claimed again is back after the rollback');
run(q{SELECT idem_forget('back')});

my $old = session($node);
$old->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem.keys');
# The first versions of "other" fill the page.  Then the server merges the entries of "k": that of the last version,
# which counts, with those of the old ones.
run(q{CALL update_key('k', 50); CALL update_key('other', 3000)});
run(q{CALL update_job('k', 50); CALL update_job('other', 3000)});
cmp_ok(run(q{SELECT pg_relation_size('idem.keys_pkey') / current_setting('block_size')::int}),
	'>', 4, 'the entries of one hash fill several pages');
found_ok('behind versions that an old snapshot may see');

# now the old versions are dead, and walks mark their entries
$old->query('COMMIT');
$old->quit;
found_ok('behind dead versions');

run('VACUUM idem.keys; VACUUM idem.jobs');
found_ok('after VACUUM');

# Table and index are new in this transaction and are not logged: the LSN of a page says nothing.
is(run('SHOW wal_level'), 'minimal', 'new tables are not logged');
is( run(q{
		BEGIN;
		TRUNCATE idem.keys, idem.jobs;
		SELECT count(outcome) FROM generate_series(1, 500) AS i, idem_enqueue('q', to_jsonb(i), 'k' || i % 300);
		SELECT count(*), count(DISTINCT job_id) FROM idem_fetch('q', 100);
		SELECT count(*), count(DISTINCT job_id) FROM idem_fetch('q', 1000);
		SELECT count(*) FROM idem_fetch('q', 10);
		SELECT count(*) FILTER (WHERE claimed) FROM generate_series(1, 500) AS i, idem_claim('k' || i % 300);
		COMMIT}),
	"500\n100|100\n200|200\n0\n300",
	'J2, K3: every job and every key once, in the transaction that has truncated the tables');

amcheck_ok($node, 'at the end', 'idem.keys', 'idem.jobs');
$node->stop;
log_ok($node);
done_testing();
