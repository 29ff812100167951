# The library meets SQL objects that it was not made for: a clear error, 55000,
# and neither a crash nor a wrong answer.
#
# Declared for another version are functions with another number of arguments
# or result columns; changed is the table in ways that direct access would
# bypass or misread.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('versions');

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
# functions declared for another version
#

my $claim_in = 'key text, request jsonb, ttl interval, wait interval, scope text';
my $claim_out = 'OUT claimed boolean, OUT status text, OUT result jsonb, '
  . 'OUT created_at timestamptz';
my $call_in = 'key text, handler regproc, payload jsonb, ttl interval, '
  . 'wait interval, scope text';
my $many_in =
  'keys text[], requests jsonb[], ttl interval, wait interval, scope text';
my $many_out = 'OUT ord integer, OUT key text, OUT claimed boolean, '
  . 'OUT status text, OUT result jsonb, OUT created_at timestamptz';
my $get_out = 'OUT status text, OUT result jsonb, OUT owner name';

my $lease_in = 'key text, lease interval, request jsonb, ttl interval, '
  . 'worker text, max_attempts integer, on_expiry text, wait interval, scope text';
my $lease_out = 'OUT claimed boolean, OUT status text, OUT result jsonb, '
  . 'OUT token bigint, OUT attempt integer, OUT checkpoint jsonb, '
  . 'OUT lease_until timestamptz';

my $claim_args = q{'a', NULL, NULL, NULL, NULL};
my $lease_args = q{'a', '1 min', NULL, NULL, NULL, NULL, 'retry', NULL, NULL};
my $call_args = q{'a', 'handler', NULL, NULL, NULL, NULL};
my $many_args = q{'{a, b}', NULL, NULL, NULL, NULL};

# function, arguments, result, arguments of the call, what is wrong
my @declarations = (
	[
		'idem_claim', "$claim_in, $claim_out", 'record', $claim_args,
		'a result column less'
	],
	[
		'idem_claim',
		"$claim_in, $claim_out, OUT expires_at timestamptz, OUT more text",
		'record', $claim_args, 'a result column more'
	],
	[ 'idem_claim', $claim_in, 'text', $claim_args, 'a scalar result' ],
	[
		'idem_claim',
		"key text, $claim_out, OUT expires_at timestamptz",
		'record', q{'a'}, 'four arguments less'
	],
	[
		'idem_claim',
		"$claim_in, more text, $claim_out, OUT expires_at timestamptz",
		'record', "$claim_args, NULL", 'an argument more'
	],
	[ 'idem_finish', 'key text', 'boolean', q{'a'}, 'three arguments less' ],
	[
		'idem_finish', 'key text, result jsonb, token bigint, scope text, more text',
		'boolean', q{'a', NULL, NULL, NULL, NULL}, 'an argument more'
	],
	[ 'idem_release', 'key text', 'boolean', q{'a'}, 'two arguments less' ],
	[
		'idem_get', "key text, scope text, $get_out",
		'SETOF record', q{'finished', NULL}, 'eight result columns less'
	],
	[ 'idem_forget', 'key text', 'boolean', q{'a'}, 'an argument less' ],
	[
		'idem_lease', "$lease_in, $lease_out", 'record', $lease_args,
		'a result column less'
	],
	[
		'idem_lease',
		"key text, lease interval, $lease_out, OUT expires_at timestamptz",
		'record', q{'a', '1 min'}, 'seven arguments less'
	],
	[ 'idem_lease', $lease_in, 'bigint', $lease_args, 'a scalar result' ],
	[
		'idem_renew', 'key text, token bigint, lease interval',
		'timestamptz', q{'a', 1, '1 min'}, 'an argument less'
	],
	[
		'idem_checkpoint', 'key text, token bigint, data jsonb',
		'timestamptz', q{'a', 1, '1'}, 'an argument less'
	],
	[
		'idem_fence', 'key text, token bigint', 'boolean',
		q{'a', 1}, 'an argument less'
	],
	[
		'idem_call', "$call_in, OUT status text, OUT result jsonb",
		'record', $call_args, 'a result column less'
	],
	[
		'idem_call',
		"key text, handler regproc, OUT status text, OUT result jsonb, "
		  . 'OUT replayed boolean',
		'record', q{'a', 'handler'}, 'four arguments less'
	],
	[
		'idem_claim_many', "$many_in, $many_out",
		'SETOF record', $many_args, 'a result column less'
	],
	[
		'idem_claim_many',
		"keys text[], $many_out, OUT expires_at timestamptz",
		'SETOF record', q{'{a, b}'}, 'four arguments less'
	],
	[
		'idem_finish_many', 'keys text[]', 'integer',
		q{'{a}'}, 'two arguments less'
	],
	[ 'idem_cleanup', '', 'integer', '', 'no argument' ],
	[ 'idem_grant', 'role text', 'void', q{'app'}, 'an argument less' ],
	[ 'idem_revoke', 'role text', 'void', q{'app'}, 'an argument less' ],
	[
		'idem_key_state', 'xmin xid', 'text', q{'3'}, 'two arguments less'
	]);

my $enqueue_in = 'queue text, %s, dedup text, on_duplicate text, '
  . 'if_running text, key_ttl interval, include_scheduled boolean, '
  . 'delay interval, run_at timestamptz, priority integer, max_attempts integer';
my $enqueue_nulls = join ', ', ('NULL') x 9;
my $fetch_in = 'queue text, batch integer, lease interval, worker text';
my $job_out = 'OUT queue text, OUT state text, OUT key text, OUT payload jsonb';
my $queue_set_in =
  'queue text, dedup text, on_duplicate text, if_running text, key_ttl interval';
my $heartbeat_in = 'ids bigint[], tokens bigint[], lease interval';

# jobs
push @declarations, (
	[
		'idem_enqueue',
		sprintf($enqueue_in, 'payload jsonb, key text') . ', OUT job_id bigint, OUT outcome text',
		'record', "'q', NULL, 'k', $enqueue_nulls", 'a result column less'
	],
	[
		'idem_enqueue', 'queue text, payload jsonb, key text, '
		  . 'OUT job_id bigint, OUT outcome text, OUT result jsonb',
		'record', q{'q', NULL, 'k'}, 'nine arguments less'
	],
	[
		'idem_enqueue', sprintf($enqueue_in, 'payload jsonb, key text'),
		'bigint', "'q', NULL, 'k', $enqueue_nulls", 'a scalar result'
	],
	[
		'idem_enqueue_many',
		sprintf($enqueue_in, 'payloads jsonb[], keys text[]')
		  . ', OUT ord integer, OUT job_id bigint, OUT outcome text',
		'SETOF record', "'q', '{1}', '{k}', $enqueue_nulls",
		'a result column less'
	],
	[
		'idem_enqueue_many', 'queue text, payloads jsonb[], OUT ord integer, '
		  . 'OUT job_id bigint, OUT outcome text, OUT result jsonb',
		'SETOF record', q{'q', '{1}'}, 'ten arguments less'
	],
	[
		'idem_fetch',
		"$fetch_in, OUT job_id bigint, OUT token bigint, OUT attempt integer, "
		  . 'OUT payload jsonb, OUT key text, OUT enqueued_at timestamptz',
		'SETOF record', q{'q', 1, NULL, NULL}, 'a result column less'
	],
	[
		'idem_fetch',
		'queue text, OUT job_id bigint, OUT token bigint, OUT attempt integer, '
		  . 'OUT payload jsonb, OUT key text, OUT enqueued_at timestamptz, OUT lsn pg_lsn',
		'SETOF record', q{'q'}, 'three arguments less'
	],
	[
		'idem_complete', 'job_id bigint, token bigint', 'boolean',
		'1, 1', 'an argument less'
	],
	[
		'idem_complete_many', 'ids bigint[], tokens bigint[], OUT ord integer, OUT job_id bigint',
		'SETOF record', q{'{1}', '{1}'}, 'a result column less'
	],
	[
		'idem_complete_many',
		'ids bigint[], OUT ord integer, OUT job_id bigint, OUT status text',
		'SETOF record', q{'{1}'}, 'an argument less'
	],
	[
		'idem_fail', 'job_id bigint, token bigint, error text, retry_in interval',
		'text', '1, 1, NULL, NULL', 'an argument less'
	],
	[
		'idem_heartbeat', "$heartbeat_in, OUT ord integer, OUT job_id bigint, OUT status text",
		'SETOF record', q{'{1}', '{1}', '1 min'}, 'a result column less'
	],
	[
		'idem_heartbeat', 'ids bigint[], tokens bigint[], OUT ord integer, '
		  . 'OUT job_id bigint, OUT status text, OUT lease_until timestamptz',
		'SETOF record', q{'{1}', '{1}'}, 'an argument less'
	],
	[
		'idem_snooze', 'job_id bigint, token bigint', 'timestamptz',
		'1, 1', 'an argument less'
	],
	[ 'idem_cancel', 'job_id bigint, more text', 'boolean', '1, NULL', 'an argument more' ],
	[ 'idem_retry', 'job_id bigint, more text', 'boolean', '1, NULL', 'an argument more' ],
	[ 'idem_job', "job_id bigint, $job_out", 'SETOF record', '1', 'ten result columns less' ],
	[ 'idem_job', $job_out, 'SETOF record', '', 'no argument' ],
	[
		'idem_queue_set', $queue_set_in, 'void',
		q{'q', NULL, NULL, NULL, NULL}, 'nine arguments less'
	],
	[ 'idem_queue_drop', '', 'boolean', '', 'no argument' ],
	[ 'idem_pause', 'queue text, more text', 'boolean', q{'q', NULL}, 'an argument more' ],
	[ 'idem_resume', '', 'boolean', '', 'no argument' ]);

my $s = session($node);

foreach my $declaration (@declarations)
{
	my ($function, $in, $out, $args, $what) = @$declaration;

	$s->query(
		qq{BEGIN;
		CREATE FUNCTION other.$function($in) RETURNS $out
		LANGUAGE C AS '\$libdir/idem', '$function'});
	is($s->sqlstate("SELECT * FROM other.$function($args)"),
		'55000', "$function declared with $what gives 55000");
	like($s->{message}, qr/^DETAIL: .*^HINT: /ms,
		"$function declared with $what: detail and hint");
	$s->query('ROLLBACK');
}
#
# every function of ours with one type changed, of an argument or of the result
#
# A type that is passed by value stands for one that is passed by reference, and
# the other way round: the library would take a number for an address.
#

my @functions = map { [ split /\|/, $_, -1 ] } split /\n/,
  $node->safe_psql(
	'postgres', q{
	SELECT p.proname, p.proretset, p.prorettype::regtype,
		   array_to_string(ARRAY(SELECT t::regtype FROM unnest(p.proargtypes) WITH ORDINALITY AS u (t, ord) ORDER BY ord), ';'),
		   array_to_string(ARRAY(SELECT t::regtype FROM unnest(p.proallargtypes, p.proargmodes) WITH ORDINALITY AS u (t, mode, ord)
								  WHERE mode = 'o' ORDER BY ord), ';')
	  FROM pg_proc AS p
	  JOIN pg_language AS l ON l.oid = p.prolang
	 WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname LIKE 'idem\_%' AND l.lanname = 'c'
	 ORDER BY 1});
cmp_ok(scalar @functions, '>', 30, 'there are functions to declare anew');

my %by_value = map { $_ => 1 }
  qw(bigint integer boolean regproc regrole xid), 'timestamp with time zone';

sub other_type
{
	my ($type) = @_;

	return $by_value{$type} ? 'text' : 'bigint';
}

sub declaration_state
{
	my ($function, $set, $result, $in, $out) = @_;
	my @arguments = ((map { "IN $_" } @$in), (map { "OUT $_" } @$out));
	my $returns = ($set eq 't' ? 'SETOF ' : '') . $result;
	# no NULL where the type may be the wrong one: it would not be looked at
	my $call = join ', ', map { $_ eq 'bigint' ? '1::bigint' : $_ eq 'text' ? q{'1'::text} : "NULL::$_" } @$in;
	my $state;

	$s->query(
		'BEGIN; CREATE FUNCTION other.'
		  . "$function(@{[ join ', ', @arguments ]}) RETURNS $returns LANGUAGE C AS '\$libdir/idem', '$function'"
	);
	$state = $s->sqlstate("SELECT * FROM other.$function($call)");
	$s->query('ROLLBACK');
	return $state;
}

foreach my $row (@functions)
{
	my ($function, $set, $result, $in, $out) = @$row;
	my @in = split /;/, $in;
	my @out = split /;/, $out;
	my %states;

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
		$states{ declaration_state($function, $set, @out > 1 ? $result : $changed[0], \@in, \@changed) }++;
	}
	$states{ declaration_state($function, $set, $result eq 'void' ? 'text' : other_type($result), \@in, []) }++
	  if !@out;
	is(join(' ', keys %states), '55000', "$function with one type changed gives 55000");
}

is( $node->safe_psql(
		'postgres', q{
		SELECT key FROM idem.keys
		UNION ALL SELECT queue FROM idem.jobs
		UNION ALL SELECT queue FROM idem.queues}),
	'finished',
	'none of them has changed anything');

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
		'ALTER TABLE idem.keys ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope)'
	],
	[
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope, owner)',
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope)'
	],
	[
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope) DEFERRABLE',
		'ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey,
		 ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope)'
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
	q{idem_complete(J, T)},
	q{idem_complete_many('{J}', '{T}')},
	q{idem_fail(J, T)},
	q{idem_heartbeat('{J}', '{T}', '1 min')},
	q{idem_snooze(J, T, '1 min')},
	q{idem_cancel(J)},
	q{idem_retry(L)},
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
		q{idem_job(L)},
		q{idem_cleanup()}
	]);

# those that make no entry in an index of the table
my %no_entry = (
	jobs => qr/idem_(job|fetch|complete\w*|cancel|heartbeat|fail|snooze)\(/,
	job_keys => qr/idem_(enqueue|cleanup)\(/,
	job_log => qr/idem_(job|retry|cleanup)\(/);

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

			# only who makes an entry in it minds an index
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

$s->quit;
amcheck_ok($node, 'after all changes', 'idem.keys', 'idem.jobs', 'idem.job_log');
$node->stop;
log_ok($node);
done_testing();
