# T10: the schedules of one database do not hold up those of another one.
#
#   A database has thousands of schedules of one second, more than the worker can tick.  Another
#   database has one, and none of its ticks is so late that it merges with the next one.  A third
#   one has schedules that fail, more than fit into a turn.
#
# The schedules are more than idem_schedule() would declare, so the test writes the table.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemSchedules;
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'turns', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
idem.cleanup = off
autovacuum = off
});

#
# T10: more ticks than the worker can do
#

new_database($_) foreach qw(flood victim refused);
# One is declared, for the launcher to come; the others are copies, at other times.  The later a
# tick is, the more jobs it enqueues, and the longer it takes.
run(q{
	BEGIN;
	SELECT idem_schedule('many', 'q', every => '1 s', missed => 'all');
	CREATE TEMPORARY TABLE copies AS
		SELECT s.*, n * interval '50 us' AS shift FROM idem.schedules AS s, generate_series(1, 20000) AS n;
	UPDATE copies SET name = 'many ' || md5(ctid::text), starts_at = starts_at + shift, next_tick = next_tick + shift;
	ALTER TABLE copies DROP COLUMN shift;
	-- one fails: that its next try is due gives the database no precedence
	SELECT idem_schedule('bad', 'q', cron => '* * * * *');
	UPDATE idem.schedules SET time_zone = 'Nowhere', next_tick = now() - interval '5 min' WHERE name = 'bad';
	INSERT INTO idem.schedules SELECT * FROM copies;
	COMMIT}, db => 'flood');
$node->poll_query_until('flood', q{SELECT min(next_tick) < clock_timestamp() - interval '3 s' FROM idem.schedules WHERE name <> 'bad'})
  or die 'the worker keeps up with the ticks';

run(q{SELECT idem_schedule('tick', 'q', every => '1 s')}, db => 'victim');
$node->poll_query_until('victim', 'SELECT last_tick IS NOT NULL FROM idem.schedules') or die 'no tick';

my ($jobs, $missed);
my $first = run('SELECT last_tick FROM idem.schedules', db => 'victim');

$node->poll_query_until('victim', qq{SELECT last_tick >= '$first'::timestamptz + interval '10 s' FROM idem.schedules}) or die 'no ticks';
$missed = run('SELECT missed_ticks FROM idem.schedules', db => 'victim');
note "$missed of 10 ticks were merged with the next one";
cmp_ok($missed, '<=', 2, 'T10: ticks of another database do not merge');
ok(run(q{SELECT min(next_tick) < clock_timestamp() - interval '1 s' FROM idem.schedules WHERE name <> 'bad'}, db => 'flood'),
	'the worker has not caught up with the others');
$jobs = run('SELECT count(*) FROM idem.jobs', db => 'flood');
ok($node->poll_query_until('flood', "SELECT count(*) > $jobs + 1000 FROM idem.jobs"), 'T10: which go on, too');

#
# T7: schedules that fail, more than a turn lists, beside one that does not.  Each is tried once in
# a round.
#

my $offset = -s $node->logfile;

run(q{
	CREATE ROLE loser;
	SELECT idem_grant('loser', 'app')}, db => 'refused');
run(q{TRUNCATE idem.schedules}, db => 'flood');
run(q{SELECT idem_schedule('good', 'good', every => '1 s', missed => 'all')}, db => 'refused');
run(q{
	BEGIN;
	SET LOCAL ROLE loser;
	SELECT idem_schedule('bad', 'q', every => '1 h', starts_at => now() - interval '1 day');
	RESET ROLE;
	CREATE TEMPORARY TABLE copies AS SELECT s.* FROM idem.schedules AS s, generate_series(1, 3000) WHERE name = 'bad';
	UPDATE copies SET name = 'bad ' || md5(ctid::text), next_tick = now() - interval '1 h';
	INSERT INTO idem.schedules SELECT * FROM copies;
	SELECT idem_revoke('loser', 'app');
	SELECT idem_schedule('wake', 'good', every => '1 day', starts_at => clock_timestamp() + interval '0.1 s');
	COMMIT}, db => 'refused');
$node->wait_for_log(qr/idem schedules failed in database "refused"/, $offset);
ok(wait_for_ticks($node, 3, [ 'refused', 'good' ], [ 'victim', 'tick' ]),
	'T7: 3000 schedules fail: another one of this database ticks, and one of another database');
is(run(q{SELECT count(*) FROM idem.jobs WHERE key LIKE 'bad%'}, db => 'refused'), '0', 'T9: those that fail do not');
is(log_count($node, qr/idem schedules failed in database "refused"/, $offset), 1, 'T7: the failure is logged once');
is(log_count($node, qr/idem schedules work again in database "refused"/, $offset), 0, 'T7: it is not over at the end of a turn');
run(q{SELECT idem_grant('loser', 'app')}, db => 'refused');
ok($node->poll_query_until('refused', q{SELECT count(*) = 3000 FROM idem.jobs WHERE key LIKE 'bad%'}),
	'T9: each of them goes on, when the right is back');
$node->wait_for_log(qr/idem schedules work again in database "refused"/, $offset);
series_ok($node, 'refused', 'good', 'beside 3000 schedules that fail');

$node->stop;
never_two_ok($node);
log_ok($node);
done_testing();
