# Room for statistics: what gets an entry in shared memory, and which entries give way (S1, S2).
# One role in one database cannot keep the queues of other databases from being counted and
# from sharing what fetches skip (J14).

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'stats_room',
	conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 3600
idem.stats_max = 200
max_connections = 50
restart_after_crash = on
});

foreach my $db (qw(flood victim))
{
	$node->safe_psql('postgres', "CREATE DATABASE $db");
	run('CREATE EXTENSION idem', db => $db);
}
run(q{CREATE ROLE flooder LOGIN; SELECT idem_grant('flooder', 'app')}, db => 'flood');

# the number of queues of a database that have an entry
sub entries
{
	my ($db, $like) = @_;

	$like //= '%';
	return run("SELECT count(*) FROM idem.queue_stats WHERE datname = '$db' AND queue LIKE '$like'");
}

# jobs enqueued to the queue, as counted; '' if it has no entry
sub enqueued
{
	my ($db, $queue) = @_;

	return run("SELECT enqueued FROM idem.queue_stats WHERE datname = '$db' AND queue = '$queue'");
}

# enqueue to queues with new names, each in a transaction
my $nfloods = 0;

sub flood
{
	my ($n, $db) = @_;

	$nfloods++;
	run(qq{DO \$\$ BEGIN FOR i IN 1 .. $n LOOP
			PERFORM idem_enqueue('flood $nfloods ' || i, key => 'k'); COMMIT; END LOOP; END \$\$},
		db => $db // 'flood');
	return;
}

# 150 of the 200 entries are for queues and databases.  A database may have three times as many
# queues as there are free entries.
my $room = 150;
my $limit = $room * 3 / 4;

#
# S2: what is rolled back gets no entry
#

my $app = session($node, db => 'flood', user => 'flooder');

$app->query(
	q{DO $$ BEGIN FOR i IN 1 .. 1200 LOOP
		PERFORM idem_enqueue('back ' || i); PERFORM idem_fetch('back ' || i); ROLLBACK; END LOOP; END $$});
is(entries('flood'), '0', 'S2: 1200 transactions that are rolled back: no entry');
$app->query(
	q{BEGIN; SELECT count(idem_enqueue('back ' || i)) FROM generate_series(1, 1200) AS i; ROLLBACK});
is(entries('flood'), '0', 'S2: nor one that uses 1200 queues');
$app->query(
	q{DO $$ BEGIN FOR i IN 1 .. 1200 LOOP
		BEGIN
			PERFORM idem_enqueue('back ' || i);
			RAISE 'undo';
		EXCEPTION WHEN raise_exception THEN
		END;
	  END LOOP; END $$});
is(entries('flood'), '0', 'S2: nor 1200 subtransactions of one that commits');
$app->sqlstate(q{SELECT idem_enqueue('back'), 1 / (SELECT count(*) FROM idem_fetch('no such queue'))});
is(entries('flood'), '0', 'S2: nor an error');
is(doctor('statistics'), 'ok', 'S2: and nothing is full');

# which counts of a queue without an entry count
$app->query(
	q{BEGIN;
	  SELECT idem_enqueue('outer');
	  SAVEPOINT a; SELECT idem_enqueue('outer'), idem_enqueue('inner'); ROLLBACK TO a;
	  SAVEPOINT b; SELECT idem_enqueue('kept');
	  SAVEPOINT c; SELECT idem_enqueue('kept'), idem_enqueue('inner'); ROLLBACK TO c;
	  RELEASE b;
	  COMMIT});
is(enqueued('flood', 'outer'), '2', 'S1: a queue that was used before the savepoint counts all');
is(enqueued('flood', 'kept'), '2', 'S1: also one that was used in another subtransaction');
is(enqueued('flood', 'inner'), '', 'S1: a queue that was used behind it only has no entry');
$app->query(
	q{BEGIN;
	  SAVEPOINT a; SELECT idem_enqueue('inner'); ROLLBACK TO a;
	  SELECT idem_enqueue('inner');
	  COMMIT});
is(enqueued('flood', 'inner'), '1', 'S1: used again after that: from there on');
$app->query(q{BEGIN; SELECT idem_enqueue('inner'); ROLLBACK});
is(enqueued('flood', 'inner'), '2', 'S1: what is rolled back counts for a queue with an entry');
$app->query(q{BEGIN; SELECT idem_enqueue('two phases'); PREPARE TRANSACTION 'p'});
is(enqueued('flood', 'two phases'), '1', 'S1: a prepared transaction counts when it is prepared');
$app->query(q{ROLLBACK PREPARED 'p'});
is(enqueued('flood', 'two phases'), '1', 'S1: and not again');
is( run(q{SELECT count FROM idem.queue_latency WHERE queue = 'inner' AND kind = 'wait'}),
	'0', 'S5: no wait yet');
$app->query(q{DO $$ BEGIN PERFORM idem_enqueue('waited', '1', 'k'); PERFORM idem_fetch('waited', lease => '1 h'); END $$});
is( run(q{SELECT count, fetched FROM idem.queue_latency AS l JOIN idem.queue_stats USING (datid, queue)
		   WHERE queue = 'waited' AND kind = 'wait'}),
	'1|1', 'S5: the first transaction adds to the histogram, too');

# a queue that gets its entry from another session meanwhile
$app->query(q{BEGIN; SELECT idem_enqueue('meanwhile')});
run(q{SELECT idem_enqueue('meanwhile')}, db => 'flood');
$app->query(q{SELECT idem_enqueue('meanwhile')});
is(enqueued('flood', 'meanwhile'), '3', 'S1: from then on the queue has an entry');
$app->query('COMMIT');
is(enqueued('flood', 'meanwhile'), '3', 'S1: nothing is counted twice');

# H3: a poll that commits gives its queue an entry, which knows of the poll
run(q{SELECT idem_enqueue('polled', delay => '1 h'); SELECT idem_stats_reset()}, db => 'victim');
is(entries('victim'), '0', 'S2: a reset frees the entries that nobody uses');
run(q{SELECT idem_fetch('polled')}, db => 'victim');
like(
	run(q{SET idem.clock_offset = '2 h';
		  SELECT string_agg(detail, ' ') FROM idem_why((SELECT job_id FROM idem.job_status))}, db => 'victim'),
	qr/The last fetch from the queue was/,
	'H3: a poll is known');
is(entries('victim'), '1', 'S2: a poll that commits makes an entry');

#
# S2: what commits gets one, but not all of them
#

run(q{SELECT idem_stats_reset()}, db => $_) foreach qw(flood victim);
is(entries('flood') + entries('victim'), '0', 'S2: all is free again');
flood(1200);
cmp_ok(entries('flood'), '>', $limit - 10, 'S2: a database that is alone may use most of the room');
cmp_ok(entries('flood'), '<=', $limit, 'S2: but leaves some to others');
is(enqueued('flood', "flood $nfloods 1200"), '1', 'S2: idle queues give way to new ones');
is(enqueued('flood', "flood $nfloods 1"), '', 'S2: the first ones first');
is(doctor('statistics'), 'warn', 'H1: idem_doctor() says so');
like(doctor('statistics', columns => 'detail'),
	qr/database flood has \d+ of the \d+ queues that are counted/, 'H1: and who has most');
run(q{SELECT count(idem_enqueue('mine ' || i)) FROM generate_series(1, 10) AS i}, db => 'victim') foreach 1, 2;
flood(1200);
is( run(q{SELECT count(*), min(enqueued), max(enqueued) FROM idem.queue_stats WHERE datname = 'victim' AND queue LIKE 'mine %'}),
	'10|2|2', 'S2: the queues of another database get their entries and keep them');

# the other database takes from the one that has most, until it has as many
flood(300, 'victim');
cmp_ok(abs(entries('victim') - entries('flood')), '<=', 3 + abs($room - 4 - entries('victim') - entries('flood')),
	'S2: both have about the same');
cmp_ok(entries('victim'), '>', $room / 3, 'S2: which is a fair share');
flood(1200);
cmp_ok(entries('victim'), '>', $room / 3, 'S2: and it stays so');

# a queue that is used now and then does not give way to those that are not
my $warm = session($node, db => 'flood');

foreach (1 .. 6)
{
	$warm->query(q{SELECT idem_enqueue('warm')});
	flood(30);
}
is(enqueued('flood', 'warm'), '6', 'S2: what was used lately stays');
$warm->quit;

# polls for which there is no job take nothing away
my $before = run(q{SELECT string_agg(queue, ',' ORDER BY queue) FROM idem.queue_stats WHERE datname = 'flood'});

run(q{SELECT count(*) FROM generate_series(1, 300) AS i, LATERAL idem_fetch('nothing ' || i)}, db => 'flood');
is( run(q{SELECT string_agg(queue, ',' ORDER BY queue) FROM idem.queue_stats WHERE datname = 'flood' AND queue NOT LIKE 'nothing%'}),
	$before, 'S2: nothing gives way to a queue that was only polled');

#
# S2: a restart
#

my $all = q{SELECT datname, queue, enqueued FROM idem.queue_stats WHERE enqueued > 0 ORDER BY datname, queue};

run(q{SELECT idem_stats_reset()}, db => 'victim');
run(q{SELECT count(idem_enqueue('mine ' || i)) FROM generate_series(1, 10) AS i}, db => 'victim');
$before = run($all);
$node->restart;
is(run($all), $before, 'S2: a restart with as much room brings all back');
run(q{SELECT count(idem_enqueue('more ' || i)) FROM generate_series(1, 10) AS i}, db => 'victim');
is(entries('victim'), '20', 'S2: and there is room for queues of another database');
run('ALTER SYSTEM SET idem.stats_max = 100');
$node->restart;
is(entries('victim'), '20', 'S2: with less room the database that has most gives way');
cmp_ok(entries('flood'), '>', 40, 'S2: and has the rest');
is(doctor('statistics'), 'warn', 'H1: idem_doctor() says so');
run('ALTER SYSTEM RESET idem.stats_max');
$node->restart;

#
# S2: idem_stats_reset()
#

$app = session($node, db => 'flood', user => 'flooder');
flood(50);
$app->query(qq{BEGIN; SELECT idem_enqueue('flood $nfloods 7')});
is(enqueued('flood', "flood $nfloods 7"), '2', 'S1: an open transaction counts');
run(q{SELECT idem_stats_reset()}, db => 'flood');
is( run(q{SELECT string_agg(queue || '=' || enqueued, ' ') FROM idem.queue_stats WHERE datname = 'flood'}),
	"flood $nfloods 7=0", 'S2: a reset frees all but the queue of an open transaction');
is(entries('victim'), '20', 'S2: nothing of other databases');
is(doctor('statistics'), 'ok', 'S2: there is room');
$app->query(qq{SELECT idem_enqueue('flood $nfloods 7'); COMMIT});
is(enqueued('flood', "flood $nfloods 7"), '1', 'S1: which goes on from zero');

#
# S2: an entry that a transaction uses does not give way
#

sub fill { flood(200); return; }

$app->query(q{SELECT idem_enqueue('held')});
$app->query(q{BEGIN; SELECT idem_enqueue('held')});
fill();
is(enqueued('flood', 'held'), '2', 'S2: the queue of an open transaction stays');
$app->query(q{SELECT idem_enqueue('held'); ROLLBACK});
is(enqueued('flood', 'held'), '3', 'S2: and counts');
fill();
is(enqueued('flood', 'held'), '', 'S2: after its end it gives way');

# a session that remembers where the entry was does not use the next one there
$app->query(q{SELECT idem_enqueue('held')});
is(enqueued('flood', 'held'), '1', 'S2: it begins at zero');
fill();
is( run(q{SELECT count(*) FROM idem.queue_stats WHERE datname = 'flood' AND queue <> 'held' AND enqueued <> 1}),
	'0', 'S2: no other queue has its counts');

# one transaction holds all of its database
my $queues = run(q{SELECT string_agg(quote_literal(queue), ',') FROM idem.queue_stats WHERE datname = 'flood'});

$app->query("BEGIN; SELECT count(idem_enqueue(q)) FROM unnest(ARRAY[$queues]) AS q");
flood(30);
is(entries('flood', "flood $nfloods %"), '0', 'S2: if all are in use, a new queue gets no entry');
is(doctor('statistics'), 'warn', 'H1: idem_doctor() says so');

# J21: a backend that exits counts the failed attempt after the transaction of the job
run(q{CREATE FUNCTION ends_backend(jsonb) RETURNS jsonb LANGUAGE plpgsql AS
		'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); END';
	SELECT idem_enqueue('ends backend')}, db => 'flood');
$node->psql('flood', q{CALL idem_work('ends backend', 'ends_backend')});
ok( $node->poll_query_until('flood', q{SELECT attempt = 1 FROM idem.job_status WHERE queue = 'ends backend'}),
	'J21: the attempt of a handler that ends its backend counts without an entry');
is($app->query('SELECT 1'), '1', 'J21: the server goes on');

run(q{SELECT count(idem_enqueue('in spite ' || i)) FROM generate_series(1, 20) AS i}, db => 'victim');
is(entries('victim', 'in spite %'), '20', 'S2: queues of another database do');

# who has most cannot give way now
cmp_ok(entries('victim'), '<', entries('flood'), 'S2: another database has more');
flood(300, 'victim');
is(enqueued('victim', "flood $nfloods 300"), '1', 'S2: if all of that is in use, a database reuses its own');
cmp_ok(entries('flood'), '>', $room / 3, 'S2: while those in use stay');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($app->{pid})");
$app->lost;
wait_until_gone($node, $app);
flood(30);
is(entries('flood', "flood $nfloods %"), '30', 'S2: a session that is terminated lets go');

#
# J14: skip ranges
#

# jobs that are fetched, in this order
sub fetched
{
	my ($s, $queue) = @_;

	return $s->query("SELECT string_agg(payload::text, ' ') FROM idem_fetch('$queue', 10, lease => '1 h')");
}

my $writer = session($node, db => 'flood');
my $worker = session($node, db => 'flood');

# leased jobs on both sides of the place where the writer adds its jobs
$writer->query(
	q{SELECT count(*) FROM idem_enqueue_many('skipped', array_fill('0'::jsonb, '{1000}'), priority => 1);
	  SELECT count(*) FROM idem_enqueue_many('skipped', array_fill('0'::jsonb, '{1000}'), priority => 9);
	  SELECT count(*) FROM idem_fetch('skipped', 1000, lease => '1 h');
	  SELECT count(*) FROM idem_fetch('skipped', 1000, lease => '1 h')});
is(fetched($worker, 'skipped'), '', 'J14: the walker publishes ranges');
$writer->query(q{SELECT idem_enqueue('skipped', '1', priority => 5)});
is(fetched($worker, 'skipped'), '1', 'J14: a writer notes its job in them');

# the entry that the writer knows gives way, and the queue gets another one
fill();
is(enqueued('flood', 'skipped'), '', 'S2: the queue has given way');
is(fetched($worker, 'skipped'), '', 'J14: there is nothing to fetch');
is(enqueued('flood', 'skipped'), '', 'S2: a poll does not make room');
run(q{SELECT idem_enqueue('skipped', '2', priority => 4)}, db => 'flood');
is(fetched($worker, 'skipped'), '2', 'S2: the queue gets an entry again');
is(fetched($worker, 'skipped'), '', 'J14: the walker publishes ranges in it');
$writer->query(q{SELECT idem_enqueue('skipped', '3', priority => 5)});
is(fetched($worker, 'skipped'), '3', 'J14: the writer does not note its job in the old place');

# the queue gets its entry while the transaction of the writer is open
run(q{SELECT idem_stats_reset()}, db => 'flood');
$writer->query(q{BEGIN; SELECT idem_enqueue('skipped', '4', priority => 6)});
is(entries('flood', 'skipped'), '0', 'S2: the queue has no entry');
is(fetched($worker, 'skipped'), '', 'J14: the first fetch has no entry');
is(fetched($worker, 'skipped'), '', 'J14: its commit has made one, in which the walker publishes ranges');
$writer->query(q{SELECT idem_enqueue('skipped', '5', priority => 5); COMMIT});
is(fetched($worker, 'skipped'), '5 4', 'J14: no job of the writer is lost');

# another database shares ranges in spite of the flood
fill();
my @sessions = map { session($node, db => 'victim') } 1, 2;

# buffers that an empty fetch reads
sub buffers
{
	my ($s, $queue) = @_;
	my ($n) = $s->query("EXPLAIN (ANALYZE, BUFFERS, TIMING off, SUMMARY off, COSTS off) SELECT * FROM idem_fetch('$queue')") =~
	  /Buffers: shared hit=(\d+)/;

	return $n // 0;
}
$sessions[0]->query(
	q{SELECT count(*) FROM idem_enqueue_many('long', array_fill('0'::jsonb, '{2000}'));
	  SELECT count(*) FROM idem_fetch('long', 1000, lease => '1 h');
	  SELECT count(*) FROM idem_fetch('long', 1000, lease => '1 h')});
$sessions[1]->query(q{SELECT count(*) FROM idem_fetch('long')}) foreach 1, 2;
my $dear = buffers($sessions[1], 'without an entry') * 3 + 30;
my $cheap;

# one fetch in a while looks at everything
foreach (1 .. 100)
{
	fetched($sessions[0], 'long');
	$cheap = buffers($sessions[1], 'long');
	last if $cheap <= $dear;
}
cmp_ok($cheap, '<=', $dear, 'J14: a queue of another database shares its ranges');

#
# S1: exact totals while other queues come and go
#

run(q{SELECT idem_stats_reset()}, db => $_) foreach qw(flood postgres);
run(q{CREATE SEQUENCE n; CREATE TABLE answers (queue text)}, db => 'postgres');
ok( pgbench_run(
		$node,
		[ '--client=16', '--jobs=2', '--transactions=1' ],
		[ [ q{SELECT count(idem_enqueue('together')) FROM generate_series(1, 10);}, 1 ] ]),
	'S1: 16 sessions make an entry at once');
is(enqueued('postgres', 'together'), '160', 'S1: and all of it counts');

my $holder = session($node, db => 'postgres');

$holder->query(q{SELECT count(idem_enqueue('stays ' || i)) FROM generate_series(1, 3) AS i;
	BEGIN; SELECT count(idem_enqueue('stays ' || i)) FROM generate_series(1, 3) AS i});
ok( pgbench_run(
		$node,
		[ '--client=12', '--jobs=2', '--transactions=200', '--max-tries=1' ],
		[
			[ q{
\set i random(1, 3)
\set end random(1, 3)
BEGIN;
SELECT idem_enqueue('stays ' || :i);
\if :end = 1
ROLLBACK;
\else
COMMIT;
\endif
INSERT INTO answers VALUES ('stays ' || :i);
}, 2 ],
			[ q{
SELECT idem_enqueue('once ' || nextval('n'));
}, 3 ],
			[ q{
\set i random(1, 400)
BEGIN;
SELECT idem_enqueue('twice ' || :i);
SELECT idem_enqueue('twice ' || :i);
\if :i < 100
ROLLBACK;
\else
COMMIT;
\endif
}, 3 ]
		]),
	'S1: 12 sessions use more queues than there is room for');
is( run(q{SELECT string_agg(queue || '=' || enqueued, ' ' ORDER BY queue) FROM idem.queue_stats
		   WHERE datname = 'postgres' AND queue LIKE 'stays %'}),
	run(q{SELECT string_agg(queue || '=' || n + 2, ' ' ORDER BY queue) FROM (SELECT queue, count(*) AS n FROM answers GROUP BY queue) AS a},
		db => 'postgres'),
	'S1: the totals of the queues that stay are exact');
is( run(q{SELECT count(*) FROM idem.queue_stats WHERE queue LIKE 'once %' AND (enqueued, absorbed, fetched) <> (1, 0, 0)}),
	'0', 'S1: no queue has the counts of another one');
is( run(q{SELECT count(*) FROM idem.queue_stats WHERE queue LIKE 'twice %' AND enqueued % 2 <> 0}),
	'0', 'S1: nor a part of its own');
cmp_ok(entries('postgres'), '>', $room / 3, 'S2: the room is used');
$holder->query('ROLLBACK');
flood(200, 'postgres');
is(entries('postgres', 'stays %') + entries('postgres', 'once %') + entries('postgres', 'twice %'),
	'0', 'S2: nobody holds on to an entry after that');

# more queues in one transaction than a session remembers
run(q{SELECT count(idem_enqueue('wide ' || i)) FROM generate_series(1, 3000) AS i}, db => 'flood');
run(q{SELECT count(idem_enqueue('wide ' || i)) FROM generate_series(1, 3000) AS i}, db => 'flood');
is( run(q{SELECT count(*) FROM idem.queue_stats WHERE queue LIKE 'wide %' AND enqueued > 2}),
	'0', 'S1: nothing is counted for another queue');

#
# S2: a crash
#

my $dead = session($node, db => 'flood');

$queues = run(q{SELECT string_agg(quote_literal(queue), ',') FROM idem.queue_stats WHERE datname = 'flood'});
$dead->query("BEGIN; SELECT count(idem_enqueue(q)) FROM unnest(ARRAY[$queues]) AS q");
$_->quit foreach @sessions, $writer, $worker, $holder;
crash_backend($node, $dead->{pid});
$dead->lost;
is(entries('flood') + entries('victim'), '0', 'S2: after a crash all entries are free');
flood(300);
flood(300);
is(enqueued('flood', "flood $nfloods 300"), '1', 'S2: and nobody holds on to one');
run(q{SELECT idem_enqueue('new')}, db => 'victim');
is(enqueued('victim', 'new'), '1', 'S2: there is room for another database');

$node->stop;
log_ok($node, killed => 1);
done_testing();
