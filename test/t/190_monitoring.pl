# doc/monitoring: every query runs, for a member of pg_monitor and for a role with
# the set monitor, and gives rows; the files for sql_exporter and
# postgres_exporter give the same metrics; the alerts and the dashboard ask only
# for metrics and labels that are there.  S3: none of them shows a key.
#
# The YAML is kept so simple that CPAN::Meta::YAML, which comes with perl, reads it:
# no lists or maps in one line, no anchors.  What an exporter makes of a file is
# modelled here, by their documentation; neither is run.

use strict;
use warnings FATAL => 'all';

use CPAN::Meta::YAML;
use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use JSON::PP qw(decode_json);
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = 'doc/monitoring';
my @roles = ('member_of_pg_monitor', 'set_monitor');

# Reading the files

sub read_yaml
{
	my ($file) = @_;

	return CPAN::Meta::YAML->read_string(slurp_file("$dir/$file"))->[0];
}

# Queries of a collector of sql_exporter.  With a value_label a metric has a
# sample for each of its columns.
sub read_collector
{
	my ($file) = @_;
	my $collector = read_yaml($file);
	my %queries = map {
		$_->{query_name} => {
			file => $file,
			name => $_->{query_name},
			sql => $_->{query},
			interval => $collector->{min_interval} // '0s',
			metrics => []
		}
	} @{ $collector->{queries} };

	foreach my $metric (@{ $collector->{metrics} })
	{
		my $label = $metric->{value_label};

		push @{ $queries{ $metric->{query_ref} }{metrics} },
		  {
			name => $metric->{metric_name},
			type => $metric->{type},
			help => $metric->{help},
			labels => $metric->{key_labels} // [],
			value_label => $label,
			columns => $metric->{values}
		  };
	}
	return map { $queries{$_} } sort keys %queries;
}

# The metrics of a histogram of postgres_exporter: by their names and the label le it is one for
# Prometheus, too
sub histogram_metrics
{
	my ($name, $column, $help, $labels) = @_;

	return map {
		{
			name => "${name}_${column}_$_",
			type => 'counter',
			help => $help,
			labels => [ @$labels, $_ eq 'bucket' ? 'le' : () ],
			histogram => $column,
			columns => ["${column}_$_"]
		}
	} qw(bucket sum count);
}

# Queries for postgres_exporter: metrics are named after the query and the column
sub read_queries
{
	my ($file) = @_;
	my $yaml = read_yaml($file);
	my @queries;

	foreach my $name (sort keys %$yaml)
	{
		my %columns = map { %$_ } @{ $yaml->{$name}{metrics} };
		my @labels =
		  sort grep { $columns{$_}{usage} eq 'LABEL' } keys %columns;

		push @queries,
		  {
			file => $file,
			name => $name,
			sql => $yaml->{$name}{query},
			interval => ($yaml->{$name}{cache_seconds} // 0) . 's',
			master => $yaml->{$name}{master} // 'false',
			metrics => [
				map {
					my $column = $columns{$_};

					$column->{usage} eq 'HISTOGRAM'
					  ? histogram_metrics($name, $_, $column->{description}, \@labels)
					  : {
						name => "${name}_$_",
						type => lc $column->{usage},
						help => $column->{description},
						labels => \@labels,
						columns => [$_]
					  }
				} grep { $columns{$_}{usage} ne 'LABEL' } sort keys %columns
			]
		  };
	}
	return @queries;
}

my %format = (
	sql_exporter => [
		map { read_collector("idem_$_.collector.yml") }
		  qw(server database)
	],
	postgres_exporter => [ read_queries('postgres_exporter_queries.yaml') ]);
my @queries = map { @{ $format{$_} } } sort keys %format;
my @alerts = map { @{ $_->{rules} } }
  @{ read_yaml('prometheus_rules.yml')->{groups} };
my $dashboard = decode_json(slurp_file("$dir/grafana_dashboard.json"));

# The metrics of both formats

my %metrics;

foreach my $format (sort keys %format)
{
	foreach my $metric (map { @{ $_->{metrics} } } @{ $format{$format} })
	{
		my @labels =
		  sort @{ $metric->{labels} },
		  grep { defined } $metric->{value_label};

		ok(!$metrics{$format}{ $metric->{name} },
			"$format: $metric->{name} is there once");
		$metrics{$format}{ $metric->{name} } = {
			type => $metric->{type},
			help => $metric->{help},
			labels => "@labels"
		};
		like($metric->{type}, qr/^(?:counter|gauge)$/,
			"$format: type of $metric->{name}");
		is($metric->{name} =~ /_(?:total|bucket|sum|count)$/ ? 'counter' : 'gauge',
			$metric->{type}, "$format: $metric->{name} ends as its type wants");
	}
}
is_deeply($metrics{postgres_exporter}, $metrics{sql_exporter},
	'both formats have the same metrics, with the same types, labels and texts');

# A server where there is something to be seen

my $node = new_node(
	'monitored', conf => q{
shared_preload_libraries = 'idem'
idem.cleanup_naptime = 1d
wal_level = replica
max_wal_senders = 4
hot_standby = on
});

my $secret = 'the secret key';

run('CREATE DATABASE off');
run('CREATE DATABASE left_it');
run("CREATE EXTENSION idem; SELECT count(*) FROM idem_claim('$secret')", db => $_)
  foreach qw(off left_it);
run('DROP EXTENSION idem', db => 'left_it');
run('ALTER DATABASE off SET idem.cleanup = off');
run(qq{
	CREATE ROLE $roles[0] LOGIN IN ROLE pg_monitor;
	CREATE ROLE $roles[1] LOGIN;
	SELECT idem_grant('$roles[1]', 'monitor');

	SELECT count(*) FROM idem_claim('$secret', request => '1');
	SELECT count(*) FROM idem_claim('$secret', request => '1');
	SELECT count(*) FROM idem_claim('$secret', request => '1');
	SELECT count(*) FROM idem_claim('$secret expired', ttl => '1 us');
	SELECT count(*) FROM idem_lease('$secret lease', '1 h');
	SELECT count(*) FROM idem_lease('$secret lease', '1 h');
	SELECT count(*) FROM idem_lease('$secret park', '1 us', on_expiry => 'park');
	SELECT count(*) FROM idem_lease('$secret gone', '1 us', max_attempts => 1);

	SELECT count(*) FROM idem_enqueue('mail', '"$secret payload"', key => '$secret');
	SELECT count(*) FROM idem_enqueue('mail', '"$secret payload"', key => '$secret');
	SELECT count(*) FROM idem_enqueue('mail', '"$secret payload"');
	SELECT idem_fail(job_id, token, '$secret error', dead => true)
	  FROM idem_fetch('mail', lease => '1 min');
	SELECT idem_queue_set('paused', max_attempts => 3);
	SELECT idem_pause('paused');
});
is( sqlstate(
		$node, "SELECT count(*) FROM idem_claim('$secret', request => '2')"),
	'ID001',
	'a key is used with another request');
cleanup_round($node, 'postgres');
$node->poll_query_until(
	'postgres', q{
	SELECT count(*) = 2 FROM idem.cleanup_progress
	 WHERE (datname, phase) IN (('off', 'off'), ('left_it', 'not installed'))})
  or die 'the worker has not been everywhere';
run('CHECKPOINT');

# three hours of waiting, and twelve of work
run(q{
	SELECT idem_queue_set('slow', keep => '0');
	SELECT count(*) FROM idem_enqueue('slow');
	SET idem.clock_offset = '3 h';
	CREATE TEMP TABLE fetched AS SELECT * FROM idem_fetch('slow', lease => '1 h');
	SET idem.clock_offset = '15 h';
	SELECT idem_complete(job_id, token) FROM fetched;
});

# The rows of a query, as a role
sub rows
{
	my ($server, $query, $role) = @_;

	return
	  map { decode_json($_) }
	  split /\n/,
	  $server->safe_psql(
		'postgres',
		"SELECT row_to_json(q) FROM ($query->{sql}) AS q",
		extra_params => [ '--username' => $role ]);
}

# The rows as they are after postgres_exporter has spread the arrays of a histogram: one more for each
# bucket, and the last one, which it adds
sub spread
{
	my ($metric, @rows) = @_;
	my $column = $metric->{histogram};

	return @rows unless defined $column && $metric->{columns}[0] eq "${column}_bucket";
	return map {
		my $row = $_;
		my @counts = (@{ $row->{"${column}_bucket"} }, $row->{"${column}_count"});
		my @bounds = (@{ $row->{$column} }, '+Inf');

		@counts == @bounds or die "$metric->{name}: arrays of different lengths";
		map { { %$row, le => "$bounds[$_]", "${column}_bucket" => $counts[$_] } } 0 .. $#bounds;
	} @rows;
}

# What the exporter makes of the rows: samples by metric and labels, as Prometheus
# writes them.  It is an error there if two have the same labels, or a value is
# not a number.
sub samples
{
	my ($query, @rows) = @_;
	my %samples;
	my @bad;

	foreach my $metric (@{ $query->{metrics} })
	{
		foreach my $row (spread($metric, @rows))
		{
			foreach my $column (@{ $metric->{columns} })
			{
				my %labels = map { $_ => $row->{$_} } @{ $metric->{labels} };
				my $value = $row->{$column};

				push @bad, "$metric->{name}: no column $column"
				  unless exists $row->{$column};
				$labels{ $metric->{value_label} } = $column
				  if defined $metric->{value_label};
				push @bad, map { "$metric->{name}: no label $_" }
				  grep { !defined $labels{$_} } keys %labels;

				my $sample = sprintf '%s{%s}', $metric->{name},
				  join ',',
				  map { sprintf '%s="%s"', $_, $labels{$_} // '' }
				  sort keys %labels;

				next unless defined $value;
				push @bad, "$sample: twice" if exists $samples{$sample};
				push @bad, "$sample: not a number but $value"
				  if ref $value || $value !~ /^-?[0-9.]+(?:e[-+]?\d+)?$/i;
				$samples{$sample} = $value;
			}
		}
	}
	return (\%samples, @bad);
}

# What is wrong with histograms: every one has a sum and a count, its buckets do not decrease, and the
# last one is the count
sub histogram_faults
{
	my ($samples) = @_;
	my (%buckets, @faults);

	foreach my $sample (keys %$samples)
	{
		next unless $sample =~ /^(\w+)_bucket\{(.*,|)le="([^"]+)"(?:,|(?=\}))(.*)\}$/;
		$buckets{"$1\t" . ($2 . $4) =~ s/,$//r}{ $3 eq '+Inf' ? 9**9**9 : $3 } = $samples->{$sample};
	}
	foreach my $histogram (sort keys %buckets)
	{
		my ($name, $labels) = split /\t/, $histogram;
		my %counts = %{ $buckets{$histogram} };
		my @le = sort { $a <=> $b } keys %counts;

		push @faults, "$histogram: no last bucket" if $le[-1] != 9**9**9;
		push @faults, "$histogram: le=$le[$_] decreases"
		  foreach grep { $counts{ $le[$_] } < $counts{ $le[ $_ - 1 ] } } 1 .. $#le;
		push @faults, "$histogram: count"
		  if $counts{ $le[-1] } != ($samples->{"${name}_count{$labels}"} // -1);
		push @faults, "$histogram: sum" if ($samples->{"${name}_sum{$labels}"} // -1) < 0;
	}
	push @faults, 'no histograms' unless keys %buckets;
	return @faults;
}

my %seen;

foreach my $format (sort keys %format)
{
	foreach my $query (@{ $format{$format} })
	{
		my $name = "$query->{file}, $query->{name}";

		foreach my $role (@roles)
		{
			my @rows = rows($node, $query, $role);
			my ($samples, @bad) = samples($query, @rows);

			cmp_ok(scalar @rows, '>', 0, "$name: has rows as $role");
			is(join("\n", @bad), '', "$name: labels and numbers as $role");
			unlike(join("\n", %$samples), qr/secret/,
				"$name: S3 no key as $role");
			$seen{$format}{$role}{$_} = $samples->{$_}
			  foreach keys %$samples;
		}
	}
	foreach my $name (sort keys %{ $metrics{$format} })
	{
		ok((grep { /^\Q$name\E\{/ } keys %{ $seen{$format}{ $roles[0] } }),
			"$format: $name has a value");
	}
}

# Everything but times is the same for every role and every way to ask.
sub steady
{
	my ($samples) = @_;

	return {
		map { $_ => /_seconds\{|_bytes\{/ ? 'some' : $samples->{$_} }
		  keys %$samples
	};
}

my $samples = $seen{sql_exporter}{ $roles[0] };

is(join("\n", histogram_faults($seen{$_}{ $roles[0] })), '', "S5: $_: the histograms are whole")
  foreach sort keys %format;

foreach my $format (sort keys %format)
{
	is_deeply(steady($seen{$format}{$_}),
		steady($samples), "$format: the same values as $_")
	  foreach @roles;
}

my %expected = (
	'idem_claims_total{answer="claims",datname="postgres"}' => 5,
	'idem_claims_total{answer="replays",datname="postgres"}' => 2,
	'idem_claims_total{answer="busy",datname="postgres"}' => 1,
	'idem_claims_total{answer="mismatches",datname="postgres"}' => 1,
	'idem_claims_total{answer="claims",datname="off"}' => 1,
	'idem_claims_total{answer="claims",datname="left_it"}' => 1,
	'idem_removed_total{datname="postgres",kind="expired_keys"}' => 1,
	'idem_enqueues_total{datname="postgres",outcome="enqueued",queue="mail"}' =>
	  2,
	'idem_enqueues_total{datname="postgres",outcome="absorbed",queue="mail"}' =>
	  1,
	'idem_jobs_total{datname="postgres",event="dead",queue="mail"}' => 1,
	'idem_job_wait_seconds_bucket{datname="postgres",le="0.0009765625",queue="slow"}' => 0,
	'idem_job_wait_seconds_bucket{datname="postgres",le="8192",queue="slow"}' => 0,
	'idem_job_wait_seconds_bucket{datname="postgres",le="16384",queue="slow"}' => 1,
	'idem_job_wait_seconds_bucket{datname="postgres",le="524288",queue="slow"}' => 1,
	'idem_job_wait_seconds_bucket{datname="postgres",le="+Inf",queue="slow"}' => 1,
	'idem_job_wait_seconds_count{datname="postgres",queue="slow"}' => 1,
	'idem_job_run_seconds_bucket{datname="postgres",le="32768",queue="slow"}' => 0,
	'idem_job_run_seconds_bucket{datname="postgres",le="65536",queue="slow"}' => 1,
	'idem_job_run_seconds_count{datname="postgres",queue="slow"}' => 1,
	'idem_job_run_seconds_count{datname="postgres",queue="mail"}' => 1,
	'idem_stored_keys{datname="postgres",status="finished"}' => 1,
	'idem_stored_keys{datname="postgres",status="live"}' => 1,
	'idem_stored_keys{datname="postgres",status="parked"}' => 1,
	'idem_stored_keys{datname="postgres",status="exhausted"}' => 1,
	'idem_stored_keys{datname="postgres",status="expired"}' => 0,
	'idem_queue_ready{datname="postgres",queue="mail"}' => 1,
	'idem_queue_blocked{datname="postgres",queue="mail"}' => 0,
	'idem_queue_dead{datname="postgres",queue="mail"}' => 1,
	'idem_queue_paused{datname="postgres",queue="mail"}' => 0,
	'idem_queue_paused{datname="postgres",queue="paused"}' => 1,
	'idem_cleanup_switched_off{datname="postgres"}' => 0,
	'idem_cleanup_switched_off{datname="off"}' => 1,
	'idem_cleanup_switched_off{datname="left_it"}' => undef,
	'idem_cleanup_failing{datname="postgres"}' => 0,
	'idem_cleanup_backlog{datname="postgres"}' => 0,
	'idem_worker_up{}' => 1,
	'idem_worker_wanted{}' => 1,
	'idem_worker_state{}' => 1,
	'idem_health_status{check="preload",datname="postgres"}' => 0,
	'idem_health_status{check="parked keys",datname="postgres"}' => 1,
	'idem_health_status{check="dead jobs",datname="postgres"}' => 1,);

is($samples->{$_}, $expected{$_}, $_) foreach sort keys %expected;
is(int($samples->{'idem_job_wait_seconds_sum{datname="postgres",queue="slow"}'} / 3600),
	3, 'S5: the sum of the waits');
is(int($samples->{'idem_job_run_seconds_sum{datname="postgres",queue="slow"}'} / 3600 + 0.5),
	12, 'S5: the sum of the runs');

# What is asked often reads no table of ours; what does is asked every five minutes.
foreach my $query (@queries)
{
	my $reads_tables =
	  run("EXPLAIN (VERBOSE, COSTS OFF) $query->{sql}") =~ / on (idem\.|idem_internal\.idem_checks )/;

	is($query->{interval},
		!$reads_tables ? '0s' : $query->{master} ? '300s' : '5m',
		"$query->{file}, $query->{name}: asked as often as it costs");
	is( $query->{master},
		$reads_tables ? 'false' : 'true',
		"$query->{file}, $query->{name}: once per server if it is about the server"
	) if defined $query->{master};
}

# A failure is seen.
run(q{
	ALTER TABLE idem.job_log ENABLE ROW LEVEL SECURITY;
});
cleanup_round($node, 'postgres');
foreach my $query (grep { $_->{name} eq 'idem_cleanup' } @queries)
{
	my ($after) = samples($query, rows($node, $query, $roles[0]));

	is($after->{'idem_cleanup_failing{datname="postgres"}'},
		1, "$query->{file}: cleanup fails");
}
run('ALTER TABLE idem.job_log DISABLE ROW LEVEL SECURITY');
cleanup_round($node, 'postgres');

# Alerts and dashboard use only existing metrics.

my %labels =
  map { $_ => { map { $_ => 1 } split ' ', $metrics{sql_exporter}{$_}{labels} } }
  keys %{ $metrics{sql_exporter} };

# Prometheus adds it
$labels{$_}{instance} = 1 foreach keys %labels;

sub unknown_label
{
	my ($label, @names) = @_;

	return !grep { $labels{$_}{$label} } @names;
}

# What is wrong with an expression.  Values of labels that are no variables and no
# regular expressions beyond alternatives must be among the samples.
sub faults
{
	my ($expr) = @_;
	my @names = $expr =~ /\b(idem_\w+)/g;
	my @faults = map { "no metric $_" } grep { !$labels{$_} } @names;

	push @faults, 'no metric' unless @names;
	while ($expr =~ /\b(idem_\w+)\{([^{}]*)\}/g)
	{
		my ($name, $selector) = ($1, $2);

		foreach my $matcher (split /,\s*/, $selector)
		{
			my ($label, $values) = $matcher =~ /^(\w+)(?:=~|!=|=)"([^"]*)"$/
			  or push(@faults, "matcher $matcher"), next;

			push @faults, "no label $label in $name"
			  if unknown_label($label, $name);
			push @faults,
			  map { "no $name with $label $_" }
			  grep {
				my $value = $_;
				!grep { /^\Q$name\E\{.*\b\Q$label\E="\Q$value\E"/ }
				  keys %$samples
			  } grep { !/^\$/ } split /\|/, $values;
		}
	}
	while ($expr =~ /\bby \(([^()]*)\)/g)
	{
		push @faults,
		  map { "no label $_" }
		  grep { unknown_label($_, @names) } split /,\s*/, $1;
	}
	foreach my $pair ([ '(', ')' ], [ '{', '}' ], [ '[', ']' ])
	{
		my @count = map { scalar(() = $expr =~ /\Q$_\E/g) } @$pair;

		push @faults, "unbalanced @$pair" if $count[0] != $count[1];
	}
	return join ', ', @faults;
}

my $operations = slurp_file('doc/operations.md');
my ($runbook) = $operations =~ /^## Alerts\n(.*?)(?=^## |\z)/ms;
my %used;

cmp_ok(scalar @alerts, '>', 0, 'there are alerts');
foreach my $alert (@alerts)
{
	my $name = $alert->{alert};
	my @names = $alert->{expr} =~ /\b(idem_\w+)/g;
	my $summary = $alert->{annotations}{summary};

	is(faults($alert->{expr}), '', "alert $name: its expression");
	is( join(' ', grep { unknown_label($_, @names) } $summary =~ /\$labels\.(\w+)/g),
		'',
		"alert $name: labels of its text");
	like($alert->{for} // '0m', qr/^\d+m$/, "alert $name: for how long");
	like($alert->{labels}{severity},
		qr/^(?:page|ticket)$/, "alert $name: severity");
	is($alert->{annotations}{runbook},
		'doc/operations.md#alerts', "alert $name: where to read on");
	like($runbook, qr/^\| `\Q$name\E` \|/m, "alert $name: is in the manual");
	$used{$_} = 1 foreach @names;
}
is_deeply(
	[ sort $runbook =~ /^\| `(Idem\w+)` \|/mg ],
	[ sort map { $_->{alert} } @alerts ],
	'the manual knows of no other alerts');

# Dashboard

my %variables = map { $_->{name} => $_ } @{ $dashboard->{templating}{list} };
my @panels = @{ $dashboard->{panels} };
my (%ids, %taken);

like($dashboard->{schemaVersion}, qr/^\d+$/, 'dashboard: version of its schema');
like($dashboard->{$_}, qr/\w/, "dashboard: $_") foreach qw(title uid);
is($dashboard->{id}, undef, 'dashboard: no id, so that it can be imported');
is($variables{datasource}{type},
	'datasource', 'dashboard: the data source is a variable');
is($variables{datasource}{query},
	'prometheus', 'dashboard: that offers those of Prometheus');
foreach my $variable (grep { $_->{type} eq 'query' } values %variables)
{
	my ($expr, $label) =
	  $variable->{query}{query} =~ /^label_values\((.*), (\w+)\)$/;

	is(faults($expr), '', "dashboard: variable $variable->{name}");
	ok(!unknown_label($label, $expr =~ /\b(idem_\w+)/g),
		"dashboard: label of variable $variable->{name}");
}
ok($variables{$_}, "dashboard: variable $_") foreach qw(instance database queue);

foreach my $panel (@panels)
{
	my $pos = $panel->{gridPos};
	my @cells = map {
		my $x = $_;
		map { "$x/$_" } $pos->{y} .. $pos->{y} + $pos->{h} - 1
	} $pos->{x} .. $pos->{x} + $pos->{w} - 1;
	my @targets = @{ $panel->{targets} // [] };
	my $name = "dashboard, panel $panel->{id}, $panel->{title}";

	ok(!$ids{ $panel->{id} }++, "$name: its number is its own");
	ok( $pos->{x} + $pos->{w} <= 24 && !grep({ $taken{$_}++ } @cells),
		"$name: has its own place");
	next if $panel->{type} eq 'row';
	like($panel->{type}, qr/^(?:timeseries|stat|state-timeline)$/,
		"$name: a type that every Grafana since 8 has");
	cmp_ok(scalar @targets, '>', 0, "$name: shows something");
	foreach my $target (@targets)
	{
		my $expr = $target->{expr};

		is(faults($expr), '', "$name: $target->{refId}");
		is($_->{datasource}{uid}, '${datasource}', "$name: data source")
		  foreach $panel, $target;
		is( join(' ', grep { !$variables{$_} && $_ ne '__rate_interval' } $expr =~ /\$(\w+)/g),
			'',
			"$name: variables of $target->{refId}");
		is( join(' ',
				grep { unknown_label($_, $expr =~ /\b(idem_\w+)/g) }
				  $target->{legendFormat} =~ /\{\{(\w+)\}\}/g),
			'',
			"$name: legend of $target->{refId}");
		$used{$_} = 1 foreach $expr =~ /\b(idem_\w+)/g;
	}
}
is( join(' ', grep { !$used{$_} } sort keys %labels),
	'', 'every metric is of use for an alert or the dashboard');

# The page that explains the files knows all of them.
my $page = slurp_file("$dir/README.md");

like($page, qr/\Q$_\E/, "$dir/README.md explains $_")
  foreach map { s{.*/}{}r } grep { !/README/ } glob "$dir/*";

# W6: a standby has no worker and wants none; all queries run there, too.
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
$node->wait_for_catchup($standby);

# So do they without preload.
$node->append_conf('postgresql.conf', q{shared_preload_libraries = ''});
$node->restart;

foreach my $server ($standby, $node)
{
	my %after;

	foreach my $query (@queries)
	{
		my ($found, @bad) =
		  samples($query, rows($server, $query, $roles[0]));

		is(join("\n", @bad), '',
			sprintf('%s: %s, %s runs', $server->name, $query->{file}, $query->{name})
		);
		%after = (%after, %$found);
	}
	is($after{'idem_worker_up{}'}, 0, $server->name . ': W6 no worker');
	is($after{'idem_worker_wanted{}'}, 0, $server->name . ': W6 none is wanted');
	is( join(' ', grep { /^idem_cleanup_age/ } keys %after),
		'', $server->name . ': nothing is late');
	is( join(' ', grep { /^idem_health_status/ && $after{$_} == 2 } keys %after),
		'', $server->name . ': nothing fails');
}

$standby->stop;
log_ok($standby);
log_ok($node);

done_testing();
