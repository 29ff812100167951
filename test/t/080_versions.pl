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
my $get_out = 'OUT status text, OUT result jsonb, OUT owner regrole';

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
	[ 'idem_finish', 'key text', 'void', q{'a'}, 'three arguments less' ],
	[
		'idem_finish', 'key text, result jsonb, token bigint, scope text, more text',
		'void', q{'a', NULL, NULL, NULL, NULL}, 'an argument more'
	],
	[ 'idem_release', 'key text', 'void', q{'a'}, 'two arguments less' ],
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
		'idem_fence', 'key text, token bigint', 'void',
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
		'idem_finish_many', 'keys text[]', 'void',
		q{'{a}'}, 'two arguments less'
	],
	[ 'idem_cleanup', '', 'integer', '', 'no argument' ],
	[ 'idem_grant', 'role name', 'void', q{'app'}, 'an argument less' ],
	[ 'idem_revoke', 'role name', 'void', q{'app'}, 'an argument less' ],
	[
		'idem_key_state', 'xmin xid', 'text', q{'3'}, 'two arguments less'
	]);

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
is($node->safe_psql('postgres', 'SELECT key FROM idem.keys'),
	'finished', 'none of them has changed anything');

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

$s->quit;
amcheck_ok($node, 'after all changes');
$node->stop;
log_ok($node);
done_testing();
