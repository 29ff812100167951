# W5, T6: more ticks than the worker can enqueue do not keep it from cleaning up.
#
# Any role that may call idem_schedule() can declare so many schedules.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use Test::More;

my $node = new_node(
	'flood', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1s
autovacuum = off
});

my $visits = q{SELECT runs FROM idem.worker_status};

# one is declared, for the launcher to come; the others are copies
run(q{
	SELECT idem_schedule('flood', 'q', every => '1 s');
	CREATE TEMPORARY TABLE copies AS SELECT s.* FROM idem.schedules AS s, generate_series(1, 100000);
	UPDATE copies SET name = 'flood ' || md5(ctid::text);
	INSERT INTO idem.schedules SELECT * FROM copies});
$node->poll_query_until('postgres',
	q{SELECT min(next_tick) < clock_timestamp() - interval '3 s' FROM idem.schedules})
  or die 'the worker keeps up with the ticks';
add_expired($node, 100);

my $before = run($visits);

$node->poll_query_until('postgres', "SELECT ($visits) > $before + 8 OR NOT EXISTS (SELECT FROM idem.keys)")
  or die 'there are no visits';
is(run('SELECT count(*) FROM idem.keys'), '0', 'W5: expired keys are removed');
ok(run(q{SELECT min(next_tick) < clock_timestamp() - interval '1 s' FROM idem.schedules}),
	'the worker has not caught up with the ticks');
my $jobs = run('SELECT count(*) FROM idem.jobs');
ok($node->poll_query_until('postgres', "SELECT count(*) > $jobs FROM idem.jobs"), 'T6: the ticks go on');

$node->stop('immediate');
log_ok($node);
done_testing();
