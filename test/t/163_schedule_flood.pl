# W5, T6: more ticks than the worker can enqueue do not keep it from cleaning up.
#
# A call of idem_schedule() would not declare so many (T10), so the test writes the table.

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

# visits that only tick come in between, as many as the machine is fast or slow
ok($node->poll_query_until('postgres', 'SELECT NOT EXISTS (SELECT FROM idem.keys)'), 'W5: expired keys are removed');
ok(run(q{SELECT min(next_tick) < clock_timestamp() - interval '1 s' FROM idem.schedules}),
	'the worker has not caught up with the ticks');
my $jobs = run('SELECT count(*) FROM idem.jobs');
ok($node->poll_query_until('postgres', "SELECT count(*) > $jobs FROM idem.jobs"), 'T6: the ticks go on');

# more ticks than a visit can do, and no other reason for a visit than the first of them
$node->append_conf('postgresql.conf', "idem.cleanup_naptime = 1d\nidem.cleanup = off\n");
run('UPDATE idem.schedules SET next_tick = NULL');
run('SELECT pg_reload_conf()');
$node->poll_query_until('postgres', q{
	SELECT state = 'sleeping' AND worker_pid IS NULL AND pg_conf_load_time() < last_run_at FROM idem.worker_status})
  or die 'the launcher does not come to rest';
run(q{
	BEGIN;
	DELETE FROM idem.schedules
	 WHERE name <> 'flood' AND name NOT IN (SELECT name FROM idem.schedules WHERE name <> 'flood' LIMIT 20000);
	TRUNCATE idem.jobs;
	UPDATE idem.schedules SET every = '1 day', starts_at = now() - interval '1 day 1 min', next_tick = now() - interval '1 min';
	SELECT idem_schedule('flood', 'q', every => '1 day', starts_at => clock_timestamp() + interval '0.2 s');
	COMMIT});
ok($node->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.schedules WHERE next_tick < now()'),
	'T6: what a visit leaves is due again at once');
is(run('SELECT count(*) FROM idem.jobs'), '20001', 'T1: each tick is a job');

$node->stop('immediate');
log_ok($node);
done_testing();
