# The program idem_cutover: it refuses what would lose rows before it changes anything, it can be
# killed at every step and started again, and clients lose nothing meanwhile (K1, K3, J2, J11,
# L1 with a ledger).

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemCutover;
use IdemTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($publisher, $subscriber) = cutover_nodes();
my @nodes = ($publisher, $subscriber);

foreach my $node (@nodes)
{
	$node->safe_psql(
		'postgres', 'CREATE ROLE app LOGIN; CREATE ROLE reader LOGIN;' . IdemCutover::tables() . q{
		CREATE SEQUENCE up;
		CREATE SEQUENCE down INCREMENT -1;
		CREATE SEQUENCE around MAXVALUE 5 CYCLE;
		CREATE SEQUENCE not_called;
		CREATE SEQUENCE "It's; :up %s";
		CREATE TABLE with_identity (id bigint GENERATED ALWAYS AS IDENTITY, PRIMARY KEY (id))});
}

my @ours = map { "idem.$_" } qw(keys jobs job_keys job_log queues schedules shard);
my @theirs = qw(runs changes seen with_identity);
my $set_tables = 'ALTER PUBLICATION pub SET TABLE ' . join ', ', @ours, @theirs;

on(0, 'CREATE PUBLICATION pub FOR TABLE ' . join ', ', @ours, @theirs);
on(1, sprintf q{CREATE SUBSCRIPTION sub CONNECTION '%s' PUBLICATION pub}, $publisher->connstr . ' dbname=postgres');
$subscriber->wait_for_subscription_sync($publisher, 'sub');
$_->safe_psql('postgres', 'CREATE DATABASE other') foreach @nodes;
$_->safe_psql('other', 'CREATE EXTENSION idem') foreach @nodes;

sub on
{
	my ($server, $sql) = @_;

	return $nodes[$server]->safe_psql('postgres', $sql);
}

sub is_read_only
{
	return on(0, q{SELECT count(*) FROM pg_db_role_setting WHERE setrole = 0 AND setconfig::text LIKE '%read_only=on%'});
}

# The program stops with this exit status and says why.
sub refused_ok
{
	my ($status, $pattern, $what, @arguments) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;

	my ($got, $out, $err) = idem_cutover(@nodes, @arguments);

	is($got, $status, "$what: exit status");
	like("$out$err", $pattern, "$what: says so");
	return;
}

#
# what --check finds, and the cutover refuses before it changes anything
#

refused_ok(0, qr/Nothing is missing/, 'nothing is missing', '--check');

# [what, server, how it comes about, how it goes away, what the program says, does --partial accept it]
my $publication = $set_tables =~ s/, idem\.job_log//r =~ s/idem\.keys/idem.keys WHERE (nth = 0)/r =~ s/runs/runs (key, server)/r;
my @cases = (
	[ 'a table is not replicated', 0, 'CREATE TABLE more (a int PRIMARY KEY)', 'DROP TABLE more', qr/all other tables are replicated: .*public\.more/, 1 ],
	[ 'an unlogged table', 0, 'CREATE UNLOGGED TABLE unlogged (a int)', 'DROP TABLE unlogged', qr/tables are replicated: .*public\.unlogged/, 1 ],
	[ 'filters and column lists', 0, "$publication WHERE (id > 0)", $set_tables, qr/no row filters and no column lists on tables of idem: idem\.keys$/m ],
	[ 'a table of idem is left out', 0, '', '', qr/all tables of idem are replicated: idem\.job_log$/m ],
	[ 'the same for other tables', 0, '', '', qr/column lists on other tables: public\.runs, public\.with_identity$/m, 1 ],
	[ 'not all operations', 0, q{ALTER PUBLICATION pub SET (publish = 'insert, update')}, q{ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')}, qr/contain all operations: pub$/m ],
	[ 'a role that can write', 0, 'ALTER ROLE reader SET default_transaction_read_only = off', 'ALTER ROLE reader RESET ALL', qr/own default_transaction_read_only: reader$/m ],
	[ 'a prepared transaction', 0, q{BEGIN; SELECT idem_claim('prepared'); PREPARE TRANSACTION 'p'}, q{ROLLBACK PREPARED 'p'}, qr/no prepared transactions: p$/m ],
	[ 'a setting', 0, q{ALTER ROLE app SET idem.scope = 'tenant'}, 'ALTER ROLE app RESET ALL', qr/idem\.scope of the publisher: app idem\.scope=tenant$/m ],
	[ 'a large object', 0, 'SELECT lo_create(42)', 'SELECT lo_unlink(42)', qr/no large objects.*: 1 large objects$/m, 1 ],
	[ 'a sequence is missing', 1, 'DROP SEQUENCE up', 'CREATE SEQUENCE up', qr/all sequences of the publisher: public\.up$/m ],
	[ 'a table that a crash would empty', 1, 'ALTER TABLE with_identity SET UNLOGGED', 'ALTER TABLE with_identity SET LOGGED', qr/is unlogged.*: public\.with_identity$/m, 1 ],
	[ 'the subscription is disabled', 1, 'ALTER SUBSCRIPTION sub DISABLE', 'ALTER SUBSCRIPTION sub ENABLE', qr/not binary: it is disabled$/m ],
	[ 'and so its slot is not in use', 0, '', '', qr/there is no active slot sub of this database/ ],
	[ 'a failure that the doctor reports', 1, 'ALTER TABLE idem.keys SET (autovacuum_enabled = off)', 'ALTER TABLE idem.keys RESET (autovacuum_enabled)', qr/idem_doctor\(\) reports no failure: autovacuum/ ],
	[ 'another subscription', 1, q{SET client_min_messages = error; CREATE SUBSCRIPTION sub2 CONNECTION '' PUBLICATION p WITH (connect = false, slot_name = NONE)}, 'DROP SUBSCRIPTION sub2', qr/no other subscription: sub2$/m, 1 ]);

on($_->[1], $_->[2]) foreach @cases;
$publisher->poll_query_until('postgres', q{SELECT NOT active FROM pg_replication_slots WHERE slot_name = 'sub'})
  or die 'the slot is in use';
my ($got, $missing) = idem_cutover(@nodes, '--check');
my (undef, $not_partial) = idem_cutover(@nodes, '--check', '--partial');
is($got, 1, '--check: exit status');
foreach my $case (@cases)
{
	my ($line) = grep { $_ =~ $case->[4] } split /\n/, $missing;

	like($line, qr/^MISSING  /, "--check: $case->[0]");
	like($not_partial, $case->[5] ? qr/^note .*accepted: \Q@{[ $line =~ m{.*: (.*)} ]}\E$/m : qr/^\Q$line\E$/m,
		"--check --partial: $case->[0]");
}
# the two tables are in one line
is(scalar(() = $missing =~ /^MISSING/mg), @cases - 1, '--check: nothing else');
refused_ok(1, qr/15 things are missing/, 'the cutover');
is(is_read_only(), '0', 'the publisher is as before');
on($_->[1], $_->[3]) foreach reverse grep { $_->[3] } @cases;

foreach my $case (
	[ 'a table was added to the publication', 0, 'CREATE TABLE more (a int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE more', 'DROP TABLE more', qr/every table of the publication is subscribed.*: public\.more$/m ],
	[ 'the subscription is binary', 1, 'ALTER SUBSCRIPTION sub SET (binary = true)', 'ALTER SUBSCRIPTION sub SET (binary = false)', qr/not binary: it is binary/ ],
	[ 'another version', 1, q{UPDATE pg_extension SET extversion = '0.0.1' WHERE extname = 'idem'}, q{UPDATE pg_extension SET extversion = idem_version() WHERE extname = 'idem'}, qr/have one version: .*objects 0\.0\.1/ ])
{
	my ($what, $server, $there, $back, $pattern) = @$case;

	on($server, $there);
	refused_ok(1, $pattern, $what);
	is(is_read_only(), '0', "$what: the publisher is as before");
	on($server, $back);
}
refused_ok(1, qr/there is no subscription typo/, 'another name', '--subscription', 'typo');
refused_ok(1, qr/there is no subscription sub/, 'another database', '--subscriber', $subscriber->connstr('other'));
refused_ok(1, qr/there is no active slot/, 'another publisher', '--publisher', $publisher->connstr('other'), '--check', '--partial');
refused_ok(1, qr/privileges: membership in pg_signal_backend, REPLICATION, owner of the database, UPDATE on idem.*, membership in pg_monitor, USAGE on schema idem, SELECT on idem.*, SELECT on all sequences/,
	'a role without privileges', '--publisher', $publisher->connstr('postgres') . ' user=reader');
refused_ok(2, qr/unknown argument/, 'wrong arguments', '--no-such');

# a subscriber that is behind, before and after step 1
my $locker = session($subscriber);

# not a table of idem, which the program compares
$locker->query('BEGIN; LOCK TABLE with_identity IN EXCLUSIVE MODE');
on(0, q{INSERT INTO with_identity DEFAULT VALUES});
refused_ok(1, qr/does not keep up/, 'the subscriber is behind', '--timeout', 1);
is(is_read_only(), '0', 'the publisher is as before');
$locker->query('ROLLBACK');

# a client that writes nevertheless is ended; what was committed arrives
refused_ok(0, qr/stopped after step 1/, 'step 1', '--until', 1);
my $writer = session($publisher);
$writer->query(q{BEGIN READ WRITE; SELECT idem_claim('open'); COMMIT; BEGIN READ WRITE; SELECT idem_claim('not committed')});
refused_ok(0, qr/stopped after step 3/, 'a client has said READ WRITE', '--until', 3);
ok(!eval { $writer->query('SELECT 1') }, 'its session has ended');
like($@, qr/57P01/, 'by idem_cutover');
$writer->lost;
is(on(1, q{SELECT key FROM idem.keys WHERE key LIKE '%o%e%n%'}), 'open', 'what it has committed is on the subscriber');

# rows that only the subscriber has
on(1, q{INSERT INTO idem.keys SELECT * FROM jsonb_populate_record((SELECT k FROM idem.keys AS k WHERE key = 'open'), '{"key_hash": 1}')});
refused_ok(3, qr/the tables of idem differ.*publisher: .*keys 1.*subscriber: .*keys 2/s, 'rows differ', '--timeout', 1);
is(on(1, 'SELECT count(*) FROM pg_subscription'), '1', 'the subscription is there');
on(1, 'DELETE FROM idem.keys WHERE key_hash = 1');

on(0, q{BEGIN READ WRITE; SELECT idem_claim('prepared'); PREPARE TRANSACTION 'p'});
refused_ok(3, qr/no prepared transactions: p$/m, 'a prepared transaction after step 1');
on(0, q{ROLLBACK PREPARED 'p'});
refused_ok(0, qr/Clients can write on the publisher again/, '--abort', '--abort');
is(is_read_only(), '0', 'the publisher is as before');
refused_ok(0, qr/nothing to do/, '--abort again', '--abort');

#
# sequences
#

on(0, q{
	SELECT setval('up', 100), setval('down', -100), setval('around', 3), setval('not_called', 7, false), setval('"It''s; :up %s"', 5);
	INSERT INTO with_identity SELECT FROM generate_series(2, 3)});
on(1, q{SELECT setval('around', 5)});

#
# killed at each step, under load
#

my $load = IdemCutover->new(servers => \@nodes);

$load->start;
on(0, q{SELECT idem_enqueue('kept', key => 'k')});
foreach my $step (1 .. 5)
{
	my ($out, $err) = ('', '');
	my $program = IPC::Run::start([ cutover_command(@nodes) ], '>', \$out, '2>', \$err,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));

	$program->pump until $out =~ /^step $step /m || !$program->pumpable;
	$program->signal('KILL');
	$program->finish;
	like($out, qr/^step $step /m, "killed after step $step");
	note "$out$err";
	is(is_read_only(), '1', "killed after step $step: the publisher is read-only");
	next if $step == 5;
	is(on(1, q{SELECT count(*) FROM pg_subscription WHERE subname = 'sub'}),
		'1', "killed after step $step: the subscription is there")
	  if $step < 4;
}
is(on(1, 'SELECT count(*) FROM pg_subscription'), '0', 'killed after step 5: the subscription is gone');
refused_ok(4, qr/there is no subscription sub.*Clients must not write/s, '--abort after step 5', '--abort');
refused_ok(1, qr/there is no subscription sub/, 'the rest, but to another database', '--subscriber', $subscriber->connstr('other'));
refused_ok(0, qr/dropped by an earlier run.*step 6.*The subscriber is the primary now/s, 'the rest');
is(is_read_only(), '1', 'the publisher stays read-only');
$load->finish;
$load->ledger_ok;

is(on(1, q{SELECT nextval('up'), nextval('down'), nextval('around'), nextval('not_called'), nextval('"It''s; :up %s"')}),
	'101|-101|4|7|6', 'sequences go on');
is(on(1, 'INSERT INTO with_identity DEFAULT VALUES RETURNING id'), '4', 'that of an identity column, too');
cmp_ok(on(1, 'SELECT last_value FROM idem.jobs_job_id_seq'),
	'>=', on(0, 'SELECT last_value FROM idem.jobs_job_id_seq') + 1_000_000, 'job numbers have the margin');
add_expired($subscriber, 3);
ok( $subscriber->poll_query_until('postgres', 'SELECT count(*) = 0 FROM idem.keys WHERE expires_at < now()'),
	'W1: the worker cleans up');
amcheck_ok($subscriber, 'after the cutover', 'idem.keys', 'idem.jobs');

$locker->quit;
$_->stop foreach $subscriber, $publisher;
log_ok($_) foreach @nodes;
done_testing();
