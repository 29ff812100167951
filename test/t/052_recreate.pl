# DROP EXTENSION and CREATE EXTENSION beside sessions that use the functions.
#
# A session keeps what it knows about the tables of idem.  When the tables are dropped and
# created again it must notice: a call gets an error or works on the new tables, and no session
# crashes or goes on with a table that is gone.  The sessions catch the errors in
# subtransactions, so that their aborts are exercised, too.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('recreate');
my $rounds = 10;

$node->safe_psql('postgres', q{
	CREATE TABLE progress (worker int PRIMARY KEY, calls bigint, errors bigint);
	CREATE TABLE stop (stop boolean);
	CREATE PROCEDURE use_idem(id int) LANGUAGE plpgsql AS $$
	DECLARE
		n bigint := 0;
		nerrors bigint := 0;
	BEGIN
		INSERT INTO progress VALUES (id, 0, 0);
		WHILE NOT EXISTS (SELECT FROM stop) LOOP
			n := n + 1;
			BEGIN
				EXECUTE 'SELECT idem_claim($1)' USING 'k' || n;
				EXECUTE 'SELECT idem_finish($1, $2)' USING 'k' || n, to_jsonb(n);
				EXECUTE 'SELECT idem_enqueue($1, $2, $3)' USING 'q', to_jsonb(n), 'k' || n % 10;
				EXECUTE 'SELECT idem_complete(job_id, token) FROM idem_fetch($1, 10)' USING 'q';
			EXCEPTION WHEN OTHERS THEN
				nerrors := nerrors + 1;
			END;
			UPDATE progress SET calls = n, errors = nerrors WHERE worker = id;
			COMMIT;
		END LOOP;
	END $$});

my @workers = map { session($node) } 1 .. 3;
$workers[$_]->send("CALL use_idem($_)") foreach 0 .. 2;

for my $round (1 .. $rounds)
{
	my $before = $node->safe_psql('postgres', 'SELECT coalesce(sum(calls), 0) FROM progress');

	$node->safe_psql('postgres', 'DROP EXTENSION idem CASCADE; CREATE EXTENSION idem');
	# every worker has used the new tables, or met their absence
	$node->poll_query_until('postgres',
		"SELECT count(*) = 3 AND coalesce(sum(calls), 0) > $before + 30 FROM progress")
	  or die "the sessions stand still in round $round";
}
$node->safe_psql('postgres', 'INSERT INTO stop VALUES (true)');
$_->receive foreach @workers;

is($node->safe_psql('postgres', 'SELECT count(*), min(calls) > 0 FROM progress'),
	'3|t', 'all sessions went on to the end');
foreach my $s (@workers)
{
	is( $s->query(
			q{BEGIN; SELECT status FROM idem_claim('after'); SELECT idem_finish('after', '1'); ROLLBACK}),
		"claimed\nt",
		'K1: an old session works on the new tables');
	is($s->query(q{BEGIN; SELECT outcome FROM idem_enqueue('after', key => 'k'); ROLLBACK}),
		'enqueued', 'J1: an old session works on the new tables');
	$s->quit;
}

$node->stop;
# of the server itself, if a function or a table is dropped while a statement looks it up
log_ok($node, except => qr{cache lookup failed|could not open relation|tuple concurrently});
done_testing();
