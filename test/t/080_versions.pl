# The library is used with SQL objects of another version: a clear error, 55000,
# and neither a crash nor a wrong answer.
#
# Functions declared with other arguments or results; the tables changed in ways
# that direct access would bypass or misread; and a database whose objects are of
# a made-up version.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node(
	'versions', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
});

$node->safe_psql(
	'postgres', q{
	CREATE SCHEMA other;
	CREATE FUNCTION public.handler(payload jsonb) RETURNS jsonb
	LANGUAGE sql AS 'SELECT payload';
	CREATE FUNCTION public.trigger_function() RETURNS trigger
	LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
	SELECT idem_claim('finished');
});

#
# every function of ours, declared for another version: one argument or result
# column more or less, or of another type
#
# A type that is passed by value stands for one that is passed by reference, and
# the other way round: the library would take a number for an address.
#

my $s = session($node);

my @functions = map { [ split /\|/, $_, -1 ] } split /\n/,
  $node->safe_psql(
	'postgres', q{
	SELECT p.proname, p.proretset, p.prorettype::regtype,
		   array_to_string(ARRAY(SELECT t::regtype FROM unnest(p.proargtypes) WITH ORDINALITY AS u (t, ord) ORDER BY ord), ';'),
		   array_to_string(ARRAY(SELECT t::regtype FROM unnest(p.proallargtypes, p.proargmodes) WITH ORDINALITY AS u (t, mode, ord)
								  WHERE mode = 'o' ORDER BY ord)
						   || ARRAY(SELECT a.atttypid::regtype FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
									 WHERE c.reltype = p.prorettype AND a.attnum > 0 ORDER BY a.attnum), ';')
	  FROM pg_proc AS p
	  JOIN pg_language AS l ON l.oid = p.prolang
	 WHERE p.pronamespace IN ('pg_catalog'::regnamespace, 'idem_internal'::regnamespace) AND p.proname LIKE 'idem\_%' AND l.lanname = 'c'
	   AND p.prokind = 'f'
	 ORDER BY 1});
cmp_ok(scalar @functions, '>', 30, 'there are functions to declare again');

my %by_value = map { $_ => 1 }
  qw(bigint integer boolean regproc regrole xid), 'timestamp with time zone';

sub other_type
{
	my ($type) = @_;

	return $by_value{$type} ? 'text' : 'bigint';
}

# columns of a result are declared as OUT columns, or as a type if the result is other.result
sub declaration_state
{
	my ($function, $set, $result, $in, $out) = @_;
	my $n = 0;
	my $type = $result eq 'other.result'
	  ? "CREATE TYPE other.result AS (@{[ join ', ', map { 'c' . ++$n . qq{ $_} } @$out ]});"
	  : '';
	my @arguments = ((map { "IN $_" } @$in), $type ? () : (map { "OUT $_" } @$out));
	my $returns = ($set eq 't' ? 'SETOF ' : '') . $result;
	# no NULL where the type may be wrong: the value would not be read
	my $call = join ', ', map { $_ eq 'bigint' ? '1::bigint' : $_ eq 'text' ? q{'1'::text} : "NULL::$_" } @$in;
	# without a map there is no id, which is 55000, too
	my $map = $function eq 'idem_shard_id' ? q{SELECT idem_shard_set('{[0,1024)}');} : '';
	my $state;

	$s->query(
		"BEGIN; $map $type CREATE FUNCTION other."
		  . "$function(@{[ join ', ', @arguments ]}) RETURNS $returns LANGUAGE C AS '\$libdir/idem', '$function'"
	);
	$state = $s->sqlstate("SELECT * FROM other.$function($call)");
	$state .= ' without detail and hint' if $s->{message} !~ /^DETAIL: .*^HINT: /ms;
	$s->query('ROLLBACK');
	return $state;
}

foreach my $row (@functions)
{
	my ($function, $set, $result, $in, $out) = @$row;
	my @in = split /;/, $in;
	my @out = split /;/, $out;
	my @results = @out ? ('record', 'other.result') : ($result);
	my %states;

	unlike(declaration_state($function, $set, $_, \@in, \@out), qr/^55000/, "$function returns $_")
	  foreach @results;
	$result = $results[0];

	foreach my $i (0 .. $#in)
	{
		my @changed = @in;

		$changed[$i] = other_type($in[$i]);
		$states{ declaration_state($function, $set, $result, \@changed, \@out) }++;
	}
	foreach my $i (0 .. $#out)
	{
		my @changed = @out;

		$changed[$i] = other_type($out[$i]);
		$states{ declaration_state($function, $set, $_, \@in, \@changed) }++ foreach @results;
	}
	$states{ declaration_state($function, $set, $result eq 'void' ? 'text' : other_type($result), \@in, []) }++
	  if !@out;
	is(join(', ', sort keys %states), '55000', "$function with one type changed gives 55000");

	%states = ();
	$states{ declaration_state($function, $set, $result, [ @in, 'text' ], \@out) }++;
	$states{ declaration_state($function, $set, $result, [ @in[ 0 .. $#in - 1 ] ], \@out) }++
	  if @in;
	foreach my $row (@out ? @results : ())
	{
		$states{ declaration_state($function, $set, $row, \@in, [ @out, 'text' ]) }++;
		$states{ declaration_state($function, $set, $row, \@in, [ @out[ 0 .. $#out - 1 ] ]) }++;
	}
	$states{ declaration_state($function, $set, 'bigint', \@in, []) }++
	  if @out;
	is(join(', ', sort keys %states), '55000',
		"$function with another number of arguments or result columns gives 55000");
}

# the same for procedures: the last arguments are INOUT, and are the columns of the result

sub procedure_state
{
	my ($procedure, $ninout, @types) = @_;
	my @arguments = map { ($_ < @types - $ninout ? 'IN' : 'INOUT') . " $types[$_]" } 0 .. $#types;
	my $call = join ', ', map { $_ eq 'bigint' ? '1::bigint' : $_ eq 'text' ? q{'1'::text} : "NULL::$_" } @types;
	my $state;

	$s->query("CREATE PROCEDURE other.$procedure(@{[ join ', ', @arguments ]}) LANGUAGE C AS '\$libdir/idem', '$procedure'");
	$state = $s->sqlstate("CALL other.$procedure($call)");
	$state .= ' without detail and hint' if $s->{message} !~ /^DETAIL: .*^HINT: /ms;
	$s->query("DROP PROCEDURE other.$procedure");
	return $state;
}

my @procedures = map { [ split /\|/, $_, -1 ] } split /\n/,
  $node->safe_psql(
	'postgres', q{
	SELECT p.proname, (SELECT count(*) FROM unnest(p.proargmodes) AS m WHERE m = 'b'),
		   array_to_string(ARRAY(SELECT t::regtype FROM unnest(p.proargtypes) WITH ORDINALITY AS u (t, ord) ORDER BY ord), ';')
	  FROM pg_proc AS p
	 WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname LIKE 'idem\_%' AND p.prokind = 'p'
	 ORDER BY 1});
cmp_ok(scalar @procedures, '>=', 4, 'there are procedures to declare again');

foreach my $row (@procedures)
{
	my ($procedure, $ninout, $types) = @$row;
	my @types = split /;/, $types;
	my %states;

	unlike(procedure_state($procedure, $ninout, @types), qr/^55000/, "$procedure as it is");
	foreach my $i (0 .. $#types)
	{
		my @changed = @types;

		$changed[$i] = other_type($types[$i]);
		$states{ procedure_state($procedure, $ninout, @changed) }++;
	}
	is(join(', ', sort keys %states), '55000', "$procedure with one type changed gives 55000");

	%states = ();
	$states{ procedure_state($procedure, $ninout, 'text', @types) }++;
	$states{ procedure_state($procedure, $ninout + 1, @types, 'text') }++;
	$states{ procedure_state($procedure, $ninout, @types[ 1 .. $#types ]) }++;
	$states{ procedure_state($procedure, $ninout - 1, @types) }++;
	is(join(', ', sort keys %states), '55000', "$procedure with another number of arguments gives 55000");
}

is( $node->safe_psql(
		'postgres', q{
		SELECT key FROM idem.keys
		UNION ALL SELECT queue FROM idem.jobs
		UNION ALL SELECT queue FROM idem.queues}),
	'finished',
	'none of them has changed anything');

# a domain over the right type, and a function that does not return a set
is( $s->sqlstate(
		q{BEGIN; CREATE DOMAIN other.domain AS idem.claim_result;
		  CREATE FUNCTION other.claim(text, jsonb, interval, interval, text)
		  RETURNS other.domain LANGUAGE C AS '$libdir/idem', 'idem_claim';
		  SELECT other.claim('a', NULL, NULL, NULL, NULL)}),
	'55000',
	'a domain is another result');
$s->query('ROLLBACK');
is( $s->sqlstate(
		q{BEGIN;
		  CREATE FUNCTION other.get(text, text)
		  RETURNS idem.get_result LANGUAGE C AS '$libdir/idem', 'idem_get';
		  SELECT other.get('a', NULL)}),
	'55000',
	'a function that is declared without SETOF');
$s->query('ROLLBACK');

#
# the type of a result changed while functions wait, which know the old one
#

my %waiting = (
	'in FROM' => q{SELECT * FROM idem_claim('type')},
	'in the SELECT list' => q{SELECT (idem_claim('type')).status},
	'idem_lease' => q{SELECT * FROM idem_lease('type', '1 min')},
	'idem_enqueue' => q{SELECT * FROM idem_enqueue('type', key => 'type')},
	'idem_call' => q{SELECT * FROM idem_call('type', 'handler')},
	'idem_claim_many' => q{SELECT * FROM idem_claim_many('{type}')});
my $holder = session($node);

foreach my $name (sort keys %waiting)
{
	my ($function) = $waiting{$name} =~ /idem_(\w+)\(/;
	my $column = $function eq 'enqueue' ? 'outcome' : 'status';
	my $call = "BEGIN; $waiting{$name}; ROLLBACK";

	$s->query($call);
	$holder->query($function eq 'enqueue' ? "BEGIN; $waiting{$name}" : q{BEGIN; SELECT idem_claim('type')});
	$s->send($call);
	wait_until_blocked($node, $s);
	$node->safe_psql('postgres', "ALTER TYPE idem.${function}_result ALTER ATTRIBUTE $column TYPE bigint");
	$holder->query('ROLLBACK');
	$s->receive;
	# the rows of a set have the descriptor with which the statement began
	is($s->{sqlstate}, $function eq 'claim_many' ? '00000' : '55000', "the type changed while a function waited: $name");
	is($s->sqlstate($call), '55000', "and it is refused from then on: $name");
	$node->safe_psql('postgres', "ALTER TYPE idem.${function}_result ALTER ATTRIBUTE $column TYPE text");
	is($s->sqlstate($call), '00000', "until that is undone: $name");
}
$holder->quit;
is($node->safe_psql('postgres', q{SELECT key FROM idem.keys UNION ALL SELECT queue FROM idem.jobs}),
	'finished', 'none of them has written anything');

#
# the table changed
#
# Each change is tried in two ways: by another session that commits, so that a
# session which has used the table learns of it from the invalidation alone,
# and inside a transaction that is rolled back.
#

# SQL that changes the table, SQL that changes it back
my @changes = (
	[
		'ALTER TABLE idem.keys ADD COLUMN more text',
		'ALTER TABLE idem.keys DROP COLUMN more'
	],
	[
		q{ALTER TABLE idem.keys ADD CONSTRAINT more CHECK (key <> 'a')},
		'ALTER TABLE idem.keys DROP CONSTRAINT more'
	],
	[
		'ALTER TABLE idem.keys ENABLE ROW LEVEL SECURITY',
		'ALTER TABLE idem.keys DISABLE ROW LEVEL SECURITY'
	],
	[
		'CREATE TRIGGER more BEFORE INSERT ON idem.keys
		 FOR EACH ROW EXECUTE FUNCTION trigger_function()',
		'DROP TRIGGER more ON idem.keys'
	],
	[
		'CREATE RULE more AS ON INSERT TO idem.keys DO ALSO NOTHING',
		'DROP RULE more ON idem.keys'
	],
	[
		'CREATE INDEX more ON idem.keys (lower(key))',
		'DROP INDEX idem.more'
	],
	[
		q{CREATE INDEX more ON idem.keys (key) WHERE scope = 'a'},
		'DROP INDEX idem.more'
	],
	[
		'CREATE UNIQUE INDEX more ON idem.keys (key, owner)',
		'DROP INDEX idem.more'
	],
	[
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey',
		'ALTER TABLE idem.keys ADD CONSTRAINT keys_pkey PRIMARY KEY (key_hash, nth)'
	],
	[
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key_hash, nth, owner)',
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key_hash, nth)'
	],
	[
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key_hash, nth) DEFERRABLE',
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key_hash, nth)'
	]);

# every function that touches the table; an additional index matters only to
# those that make an entry in it
my @inserts = (
	q{idem_claim('new')},
	q{idem_lease('new', '1 min')},
	q{idem_call('new', 'handler', '1')},
	q{idem_claim_many('{new}')});
my @others = (
	q{idem_claim('finished')},
	q{idem_lease('finished', '1 min')},
	q{idem_get('finished')},
	q{idem_forget('absent')},
	q{idem_cleanup()});

foreach my $change (@changes)
{
	my ($there, $back) = @$change;
	(my $what = $there) =~ s/\s+/ /g;

	my $is_index = $there =~ /INDEX/;

	is($s->query(q{SELECT status FROM idem_claim('finished')}),
		'finished', "K2: a session uses the table ($what)");
	$node->safe_psql('postgres', $there);
	foreach my $call (($is_index ? () : @others), @inserts)
	{
		is($s->sqlstate("SELECT $call"), '55000', "$call after $what");
	}
	like($s->{message}, qr/^DETAIL: .*^HINT: /ms, "detail and hint after $what");
	foreach my $call ($is_index ? @others : ())
	{
		like($s->sqlstate("SELECT $call"),
			qr/^(00000|55000)$/, "$call after $what");
	}
	$node->safe_psql('postgres', $back);

	# a dropped column stays in the table
	if ($there !~ /ADD COLUMN/)
	{
		is( $s->query(
				q{SELECT status FROM idem_claim('finished');
				  SELECT status FROM idem_claim('new');
				  SELECT idem_forget('new')}),
			"finished\nclaimed\nt",
			"K2: it works again after $back");
	}
	else
	{
		like($s->sqlstate(q{SELECT idem_claim('finished')}),
			qr/^(00000|55000)$/, "no crash after $back");
		$node->safe_psql('postgres',
			'DROP EXTENSION idem; CREATE EXTENSION idem;
			 SELECT idem_claim(\'finished\')');
	}

	next if $is_index;

	# in the middle of a transaction that holds a key
	$s->query("BEGIN; SELECT idem_claim('held')");
	$s->query($there);
	foreach my $call (q{idem_finish('held')}, q{idem_release('held')},
		q{idem_finish_many('{held}')})
	{
		$s->query('SAVEPOINT s');
		is($s->sqlstate("SELECT $call"),
			'55000', "$call after $what in its transaction");
		$s->query('ROLLBACK TO s');
	}
	$s->query('ROLLBACK');
	is( $s->query(
			q{SELECT status FROM idem_claim('finished');
			  SELECT count(*) FROM idem_get('held')}),
		"finished\n0",
		"K1: it works again after the rollback ($what)");
}

# an additional plain index is kept up to date, or refused: nothing in between
$node->safe_psql('postgres', 'CREATE INDEX more ON idem.keys (owner)');
my $state = $s->sqlstate(q{SELECT idem_claim('indexed')});
like($state, qr/^(00000|55000)$/, 'an additional plain index is no surprise');
$node->safe_psql('postgres', 'DROP INDEX idem.more');

# the table out of reach
$node->safe_psql('postgres', 'ALTER SCHEMA idem RENAME TO moved');
like($s->sqlstate(q{SELECT idem_claim('finished')}),
	qr/^(55000|3F000|42P01)$/, 'a renamed schema gives an error');
$node->safe_psql('postgres', 'ALTER SCHEMA moved RENAME TO idem');
is($s->query(q{SELECT status FROM idem_claim('finished')}),
	'finished', 'K2: and works again under its name');

#
# the tables of jobs changed
#
# The same, with functions that touch them.  J stands for a job that is leased,
# T for its token, L for one in the history.
#

$node->safe_psql(
	'postgres', q{
	SELECT idem_queue_set('q', keep => '1 day');
	SELECT idem_enqueue('q', '1', 'leased', dedup => 'until_expired', key_ttl => '1 h');
	SELECT idem_cancel(job_id) FROM idem_enqueue('q', '2', 'logged')});
my ($job, $token) = split /\|/,
  $s->query(q{SELECT job_id, token FROM idem_fetch('q', 1, '1 h')});
my $logged = $s->query('SELECT job_id FROM idem.job_log');

my @for_jobs = (
	q{idem_enqueue('q', key => 'new')},
	q{idem_enqueue('q')},
	q{idem_enqueue_many('q', '{1, 2}', '{new, newer}')},
	q{idem_fetch('q')},
	q{idem_fetch_any('{q}')},
	q{idem_complete(J, T)},
	q{idem_complete_many('{J}', '{T}')},
	q{idem_fail(J, T)},
	q{idem_heartbeat('{J}', '{T}', '1 min')},
	q{idem_progress(J, T, '1', '1 min')},
	q{idem_snooze(J, T, '1 min')},
	q{idem_cancel(J)},
	q{idem_retry(L)},
	q{idem_cancel_by_key('q', 'leased')},
	q{idem_cancel_many('{J}')},
	q{idem_retry_many('{L}')},
	q{idem_fail_many('{J}', '{T}')},
	q{idem_snooze_many('{J}', '{T}', '1 min')},
	q{idem_reschedule_many('{J}', priority => 1)},
	q{idem_job_by_key('q', 'leased')},
	q{idem_job(J)});
my %calls = (
	jobs => \@for_jobs,
	job_keys => [
		q{idem_complete(J, T)},
		q{idem_enqueue('q', key => 'new', dedup => 'until_expired', key_ttl => '1 h')},
		q{idem_cleanup()}
	],
	job_log => [
		q{idem_complete(J, T)},
		q{idem_fail(J, T, dead => true)},
		q{idem_cancel(J)},
		q{idem_retry(L)},
		q{idem_cancel_many('{J}')},
		q{idem_retry_many('{L}')},
		q{idem_job_by_key('q', 'logged')},
		q{idem_job(L)},
		q{idem_cleanup()}
	]);

# those that make no entry in an index of the table
my %no_entry = (
	jobs => qr/idem_(job|fetch|complete\w*|cancel|heartbeat|progress|fail|snooze|(?:cancel|fail|snooze|reschedule)_many)\(/,
	job_keys => qr/idem_(enqueue|cleanup)\(/,
	job_log => qr/idem_(job|retry|retry_many|cleanup)\(/);

sub call_of_jobs
{
	my ($call) = @_;

	$call =~ s/\bJ\b/$job/g;
	$call =~ s/\bT\b/$token/g;
	$call =~ s/\bL\b/$logged/g;
	return "SELECT * FROM $call";
}

# live jobs, keys and history
my $all_jobs = q{
	SELECT j::text FROM idem.jobs AS j
	UNION ALL SELECT k::text FROM idem.job_keys AS k
	UNION ALL SELECT l::text FROM idem.job_log AS l ORDER BY 1};
my $jobs_before = $s->query($all_jobs);

foreach my $table (sort keys %calls)
{
	my ($column) = $table eq 'job_keys' ? 'key_hash, job_id' : 'job_id';

	foreach my $change (
		[
			"ALTER TABLE idem.$table ADD CONSTRAINT more CHECK (queue <> 'a')",
			"ALTER TABLE idem.$table DROP CONSTRAINT more"
		],
		[
			"ALTER TABLE idem.$table ENABLE ROW LEVEL SECURITY",
			"ALTER TABLE idem.$table DISABLE ROW LEVEL SECURITY"
		],
		[
			"CREATE TRIGGER more BEFORE INSERT ON idem.$table
			 FOR EACH ROW EXECUTE FUNCTION trigger_function()",
			"DROP TRIGGER more ON idem.$table"
		],
		[
			"CREATE RULE more AS ON INSERT TO idem.$table DO ALSO NOTHING",
			"DROP RULE more ON idem.$table"
		],
		[
			"ALTER TABLE idem.$table SET UNLOGGED",
			"ALTER TABLE idem.$table SET LOGGED"
		],
		[
			"ALTER TABLE idem.$table DROP CONSTRAINT ${table}_pkey",
			"ALTER TABLE idem.$table ADD CONSTRAINT ${table}_pkey PRIMARY KEY ($column)"
		],
		[
			"CREATE INDEX more ON idem.$table (lower(queue))",
			'DROP INDEX idem.more'
		],
		[
			"CREATE INDEX more ON idem.$table (queue) WHERE queue = 'a'",
			'DROP INDEX idem.more'
		],
		[
			"CREATE UNIQUE INDEX more ON idem.$table (key)",
			'DROP INDEX idem.more'
		])
	{
		my ($there, $back) = @$change;
		(my $what = $there) =~ s/\s+/ /g;

		$node->safe_psql('postgres', $there);
		foreach my $call (@{ $calls{$table} })
		{
			$s->query('BEGIN');
			my $state = $s->sqlstate(call_of_jobs($call));

			# an index matters only to functions that insert into it
			if ($there =~ /INDEX/ && "$call" =~ $no_entry{$table})
			{
				like($state, qr/^(00000|55000)$/, "$call after $what");
			}
			else
			{
				is($state, '55000', "$call after $what");
				like($s->{message}, qr/^DETAIL: .*^HINT: /ms,
					"$call after $what: detail and hint");
			}
			$s->query('ROLLBACK');
		}
		$node->safe_psql('postgres', $back);
	}
	is($s->query($all_jobs), $jobs_before, "$table: nothing was changed");
}

# the indexes by which jobs are found
foreach my $change (
	[
		'DROP INDEX idem.jobs_key_idx',
		'CREATE INDEX jobs_key_idx ON idem.jobs (key_hash) WHERE key_hash IS NOT NULL',
		q{idem_enqueue('q', key => 'new')}
	],
	[
		'DROP INDEX idem.jobs_fetch_idx',
		'CREATE INDEX jobs_fetch_idx ON idem.jobs (queue, priority, run_at, job_id)',
		q{idem_fetch('q')}
	],
	[
		'DROP INDEX idem.jobs_key_idx',
		'CREATE INDEX jobs_key_idx ON idem.jobs (key_hash) WHERE key_hash IS NOT NULL',
		q{idem_cancel_by_key('q', 'new')}
	],
	[
		'DROP INDEX idem.job_log_key_idx',
		'CREATE INDEX job_log_key_idx ON idem.job_log (key_hash, ended_at) WHERE key_hash IS NOT NULL',
		q{idem_job_by_key('q', 'new')}
	],
	[
		'DROP INDEX idem.job_log_retry_idx',
		'CREATE INDEX job_log_retry_idx ON idem.job_log (retryable, queue, state, ended_at) WHERE retryable IS NOT NULL',
		q{idem_retry_many(queue => 'q')}
	])
{
	my ($there, $back, $call) = @$change;

	$node->safe_psql('postgres', $there);
	is($s->sqlstate("SELECT $call"), '55000', "$call after $there");
	like($s->{message}, qr/^DETAIL: .*^HINT: /ms, "detail and hint after $there");
	$node->safe_psql('postgres', $back);
}

# and all of it works as before
is( $s->query(
		qq{SELECT outcome FROM idem_enqueue('q', key => 'leased',
			   dedup => 'until_expired', key_ttl => '1 h');
		   SELECT idem_complete($job, $token, '"done"');
		   SELECT outcome, result FROM idem_enqueue('q', key => 'leased',
			   dedup => 'until_expired', key_ttl => '1 h');
		   SELECT idem_retry($logged);
		   SELECT payload FROM idem_fetch('q', 10)}),
	qq{absorbed\nt\ndone|"done"\nt\n2},
	'J1: everything works again');

# a renamed or dropped member
foreach my $change (
	[
		'ALTER TABLE idem.queues RENAME TO moved',
		'ALTER TABLE idem.moved RENAME TO queues'
	],
	[
		'ALTER TABLE idem.jobs RENAME TO moved',
		'ALTER TABLE idem.moved RENAME TO jobs'
	],
	[
		'ALTER SEQUENCE idem.jobs_job_id_seq RENAME TO moved',
		'ALTER SEQUENCE idem.moved RENAME TO jobs_job_id_seq'
	])
{
	my ($there, $back) = @$change;

	$node->safe_psql('postgres', $there);
	like($s->sqlstate(q{SELECT idem_enqueue('q', key => 'new')}),
		qr/^(55000|42P01)$/, "an error after $there");
	$node->safe_psql('postgres', $back);
	is( $s->query(
			q{BEGIN; SELECT outcome FROM idem_enqueue('q', key => 'new'); ROLLBACK}),
		'enqueued',
		"J1: it works again after $back");
}

#
# objects of a made-up version, older or newer than the library: tables that
# have other columns or are not there
#

$node->safe_psql('postgres', 'CREATE DATABASE made_up');
$node->safe_psql(
	'made_up', q{
	CREATE EXTENSION idem;
	CREATE FUNCTION public.handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT payload';
	CREATE ROLE made_up;
	SELECT idem_claim('a');
	-- fewer columns, one more, one of another type, none at all
	CREATE TABLE few AS SELECT key, scope, created_at, expires_at FROM idem.keys;
	CREATE TABLE more AS SELECT *, 0 AS more FROM idem.job_log;
	CREATE TABLE other AS SELECT queue::varchar FROM idem.queues;
	ALTER EXTENSION idem DROP TABLE idem.keys;
	ALTER EXTENSION idem DROP TABLE idem.job_log;
	ALTER EXTENSION idem DROP TABLE idem.queues;
	ALTER EXTENSION idem DROP TABLE idem.jobs;
	DO $$ DECLARE member text; BEGIN
		FOR member IN SELECT format('ALTER EXTENSION idem DROP %s', d.identity)
			FROM (SELECT o.type || ' ' || o.identity FROM pg_depend AS p,
					 pg_identify_object(p.classid, p.objid, 0) AS o
				   WHERE p.deptype = 'e' AND (o.type = 'view' OR o.identity ~ 'idem_(doctor|checks|report)')) AS d (identity)
		LOOP EXECUTE member; END LOOP; END $$;
	DROP TABLE idem.keys, idem.job_log, idem.queues, idem.jobs CASCADE;
	ALTER TABLE few SET SCHEMA idem; ALTER TABLE idem.few RENAME TO keys;
	ALTER TABLE more SET SCHEMA idem; ALTER TABLE idem.more RENAME TO job_log;
	ALTER TABLE other SET SCHEMA idem; ALTER TABLE idem.other RENAME TO queues;
	ALTER EXTENSION idem ADD TABLE idem.keys;
	ALTER EXTENSION idem ADD TABLE idem.job_log;
	ALTER EXTENSION idem ADD TABLE idem.queues});

my $made_up = session($node, db => 'made_up');

foreach my $version ('0.0.1', '99.0.0')
{
	$node->safe_psql('made_up', "UPDATE pg_extension SET extversion = '$version' WHERE extname = 'idem'");
	foreach my $call (
		@inserts, @others,
		q{idem_finish('a')}, q{idem_release('a')}, q{idem_finish_many('{a}')},
		q{idem_finish('a', token => 1)}, q{idem_release('a', 1)},
		q{idem_renew('a', 1, '1 min')}, q{idem_checkpoint('a', 1, '1')},
		q{idem_fence('a', 1)},
		q{idem_queue_set('q', lease => '1 min')}, q{idem_queue_drop('q')},
		q{idem_pause('q')}, q{idem_resume('q')},
		map { s/\b[JTL]\b/1/gr } @for_jobs)
	{
		is($made_up->sqlstate("SELECT * FROM $call"),
			'55000', "$version: $call gives 55000");
		like($made_up->{message},
			qr/^DETAIL: .* the SQL objects have version \Q$version\E.*^HINT: .*ALTER EXTENSION idem UPDATE/ms,
			"$version: $call shows the versions and what to do");
	}
}
is($made_up->query('SELECT idem_version()'),
	$node->safe_psql('postgres', 'SELECT extversion FROM pg_extension WHERE extname = \'idem\''),
	'the library reports its version');

# The worker visits this database, fails, and continues in others.  (It may have seen a table
# that was changed above, so there may be an earlier error.)
add_expired($node, 2);
cleanup_round($node, 'postgres', 'made_up');
is( $node->safe_psql(
		'postgres', q{
		SELECT datname, phase, CASE phase WHEN 'failing' THEN last_error END
		  FROM idem.cleanup_progress WHERE datname IN ('postgres', 'made_up') ORDER BY 1}),
	"made_up|failing|library and SQL objects of idem do not match\npostgres|idle|",
	'W7: cleanup fails where the version is another one, and only there');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idem.keys WHERE key LIKE 'expired %'}),
	'0', 'W7: the other database is cleaned up');
$made_up->quit;

$s->quit;
amcheck_ok($node, 'after all changes', 'idem.keys', 'idem.jobs', 'idem.job_log');
$node->stop;
log_ok($node);
done_testing();
