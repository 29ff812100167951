# shellcheck shell=bash
# test/bench/common.sh: running SQL and pgbench, medians, and the table of results.
#
# Every time is the median of several rounds.  In each round the sides take
# turns (A B A B ...), so that a slow spell of the machine hits all of them.

results=$IDEM_TMP/results.txt
samples=$IDEM_TMP/samples.txt

# admin DATABASE [psql option ...]: psql as superuser, values only
admin() { idem_run psql -XqAt -v ON_ERROR_STOP=1 -U postgres -d "$@"; }

# measured DATABASE [psql option ...]: psql as the role that is measured
measured() { idem_run psql -XqAt -v ON_ERROR_STOP=1 -U bench -d "$@"; }

# setting NAME VALUE: for all sessions that start later
setting() {
	admin postgres -c "ALTER SYSTEM SET $1 = '$2'" -c 'SELECT pg_reload_conf()' >/dev/null
	until [[ $(admin postgres -c "SHOW $1") == "$2" ]]; do :; done
}

# empty_tables: those of the database bench
empty_tables() {
	admin bench -c 'TRUNCATE idem.keys, hand.keys, hand.leases, bench.charges, bench.known' -c 'CHECKPOINT'
}

# quartiles NAME: first, second and third of the lines "NAME value" in $samples; nan for
# figures that are missing
quartiles() {
	awk -v name="$1" '$1 == name { print $2 }' "$samples" | sort -g | awk '
		function at(x, i) { i = int(x); return i < NR ? v[i] + (x - i) * (v[i + 1] - v[i]) : v[i] }
		$1 !~ /^-?[0-9]+([.][0-9]+)?(e[-+]?[0-9]+)?$/ { bad = 1 }
		{ v[NR] = $1 }
		END {
			if (NR == 0 || bad)
				print "nan nan nan"
			else
				print at(1 + (NR - 1) / 4), at(1 + (NR - 1) / 2), at(1 + (NR - 1) * 3 / 4)
		}'
}

median() { quartiles "$1" | cut -d ' ' -f 2; }

# calc EXPRESSION: arithmetic; "nan" if a figure in it is missing
calc() {
	case $1 in
	*nan*) printf nan ;;
	*) awk "BEGIN { printf \"%.6g\", $1 }" ;;
	esac
}

# alternate DATABASE ROUNDS NAME=STATEMENT ... >>$samples
# Each statement returns one number.  All run in one session, in turn; round 0
# warms up.
alternate() {
	local db=$1 rounds=$2 round side
	shift 2
	for ((round = 0; round <= rounds; round++)); do
		for side in "$@"; do
			printf "\\\\echo -n '%s%s '\n%s;\n" \
				"$( ((round > 0)) || printf 'warmup-')" "${side%%=*}" "${side#*=}"
		done
	done | measured "$db"
}

# pin on|off: client and server share one CPU, as they take turns anyway, or use all.
# Without it the kernel decides anew in each run, and a round trip takes three times
# as long when it wakes an idle CPU.  Holds for sessions that start later.
pin() {
	local cpus
	cpus=$(taskset -cp $$ | sed 's/.*: //')
	if [[ $1 == on ]]; then
		cpus=${cpus##*[,-]}
	fi
	taskset -cp "$cpus" "$(head -n 1 "$PGHOST/postmaster.pid")" >/dev/null
	client_cpus=$cpus
}

# pgbench_log DATABASE SCRIPT CLIENTS OPTION ...: what pgbench says, in $IDEM_TMP/pgbench.log,
# and microseconds of each transaction, in $IDEM_TMP/latency.txt, the fastest first
pgbench_log() {
	# shellcheck disable=SC2154	# scripts.sh
	idem_run taskset -c "$client_cpus" pgbench -n -M prepared -c "$3" -j "$3" "${@:4}" -U bench -f - \
		-l --log-prefix="$IDEM_TMP/t/latency" -D "payload=$payload" -D "result=$result30" "$1" \
		<<<"${script[$2]}" >"$IDEM_TMP/pgbench.log" 2>&1 || {
		cat "$IDEM_TMP/pgbench.log" >&2
		return 1
	}
	cat "$IDEM_TMP"/t/latency.* | cut -d ' ' -f 3 | sort -n >"$IDEM_TMP/latency.txt"
	rm "$IDEM_TMP"/t/latency.*
}

# pgbench_us SCRIPT CLIENTS OPTION ...: microseconds of a transaction, the mean of the
# middle half of them: one that had to wait for the CPU tells about the rest of the machine.
pgbench_us() {
	pgbench_log bench "$@" || return
	awk '
		{ v[NR] = $1 }
		END {
			for (i = int(NR / 4) + 1; i <= NR - int(NR / 4); i++) { sum += v[i]; n++ }
			print n ? sum / n : "nan"
		}' "$IDEM_TMP/latency.txt"
}

# latency SCRIPT CLIENTS SECONDS: microseconds of a transaction
latency() { pgbench_us "$1" "$2" -T "$3"; }

# latencies CLIENTS SECONDS ROUNDS SCRIPT ... >>$samples
latencies() {
	local clients=$1 seconds=$2 rounds=$3 round name
	shift 3
	for name in "$@"; do
		latency "$name" "$clients" 1 >/dev/null
	done
	for ((round = 0; round < rounds; round++)); do
		for name in "$@"; do
			printf '%s %s\n' "$name" "$(latency "$name" "$clients" "$seconds")"
		done
	done
}

# minus NAME OTHER RESULT >>$samples: NAME minus OTHER, round by round
minus() {
	awk -v name="$1" -v other="$2" -v result="$3" '
		$1 == name { a[++n] = $2 }
		$1 == other { b[++m] = $2 }
		END { for (i = 1; i <= n; i++) print result, a[i] - b[i] }' "$samples" >"$samples.minus"
	cat "$samples.minus" >>"$samples"
}

# wal_of DATABASE STATEMENT: bytes of WAL that it writes
wal_of() {
	local before
	before=$(admin "$1" -c 'SELECT pg_current_wal_insert_lsn()')
	measured "$1" -c "$2" >/dev/null
	admin "$1" -c "SELECT pg_current_wal_insert_lsn() - '$before'"
}

# hot_share DATABASE TABLE STATEMENT ...: share of HOT among its updates of the table
hot_share() {
	local db=$1 rel=$2 statement flags=()
	shift 2
	for statement in "$@" 'SELECT pg_stat_force_next_flush()'; do
		flags+=(-c "$statement")
	done
	admin "$db" -c "SELECT pg_stat_reset_single_table_counters('$rel'::regclass)" >/dev/null
	measured "$db" "${flags[@]}" >/dev/null
	admin "$db" -c "
		SELECT n_tup_hot_upd::float8 / nullif(n_tup_upd, 0)
		  FROM pg_stat_user_tables WHERE relid = '$rel'::regclass"
}

# verdict RATIO GOAL SPREAD [ERROR]
verdict() {
	if [[ -n ${4:-} ]]; then
		awk "BEGIN {
			low = $1 - $4 $2
			high = $1 + $4 $2
			print (low != high ? \"too noisy\" : low ? \"yes\" : \"NO\")
		}"
	else
		awk -v spread="${3:-0}" "BEGIN { print (spread > 0.25 ? \"too noisy\" : $1 $2 ? \"yes\" : \"NO\") }"
	fi
}

# report WHAT UNIT IDEM OTHER RATIO GOAL [SPREAD [ERROR]]: a line of the table; no GOAL: for
# information; SPREAD: of the figures, as a share of them; ERROR: of the ratio, if it is
# known so well that it decides whether the goal is reached
report() {
	local verdict=
	case "$3$4$5${8:-}" in
	*nan* | *inf*) idem_die "bench: no usable figures for: $1" ;;
	esac
	if [[ -n $6 ]]; then
		verdict=$(verdict "$5" "$6" "${7:-}" "${8:-}")
	fi
	awk -v OFS='|' -v what="$1" -v unit="$2" -v a="$3" -v b="$4" -v ratio="$5" -v goal="$6" \
		-v ok="$verdict" -v spread="${7:-}" -v error="${8:-}" '
		function fmt(x) { return x == "" ? "" : sprintf(x >= 100 ? "%.0f" : x >= 10 ? "%.1f" : "%.2f", x) " " unit }
		BEGIN {
			print what, fmt(a), fmt(b),
				(ratio == "" ? "" : error == "" ? sprintf("%.2f", ratio) : sprintf("%.3f", ratio)),
				(spread == "" ? "" : sprintf(error == "" ? "%.0f %%" : "%.1f %%", 100 * spread)), goal, ok
		}' | tee -a "$results" >&2
}

# spread NAME ...: distance of the outer quartiles as a share of the median, the largest
spread() {
	local name
	for name in "$@"; do
		quartiles "$name"
	done | awk '{ x = $2 > 0 ? ($3 - $1) / $2 : 9; if (x > most) most = x } END { print most + 0 }'
}

# compare WHAT UNIT IDEM OTHER GOAL [FACTOR]: report the medians of two names in $samples, times
# FACTOR, and their ratio
compare() {
	local idem other
	idem=$(calc "$(median "$3") * ${6:-1}")
	other=$(calc "$(median "$4") * ${6:-1}")
	report "$1" "$2" "$idem" "$other" "$(calc "$idem / $other")" "$5" "$(spread "$3" "$4")"
}

# pairs NAME OTHER >>$samples: NAME/OTHER, round by round
pairs() {
	awk -v name="$1" -v other="$2" '
		$1 == name { a[++n] = $2 }
		$1 == other { b[++m] = $2 }
		END { for (i = 1; i <= n && i <= m; i++) print name "/" other, a[i] / b[i] }' "$samples" >"$samples.pairs"
	cat "$samples.pairs" >>"$samples"
}

# report_ratios WHAT UNIT IDEM OTHER RATIO GOAL: report the medians of three names in $samples, the
# third of them the ratio of the others in each round, and the spread of that.  What slows
# down both sides of a round does not count.  The error is that of a median, in 19 of 20
# cases: 1.82 times the distance of the outer quartiles by the root of the number of rounds.
report_ratios() {
	local q rounds
	read -ra q <<<"$(quartiles "$5")"
	rounds=$(awk -v name="$5" '$1 == name { n++ } END { print n + 0 }' "$samples")
	report "$1" "$2" "$(median "$3")" "$(median "$4")" "${q[1]}" "$6" \
		"$(calc "(${q[2]} - ${q[0]}) / ${q[1]}")" "$(calc "1.82 * (${q[2]} - ${q[0]}) / sqrt($rounds)")"
}

# compare_pairs WHAT UNIT IDEM OTHER GOAL
compare_pairs() {
	pairs "$3" "$4"
	report_ratios "$1" "$2" "$3" "$4" "$3/$4" "$5"
}

# columns: lines with | between the fields as an aligned table; the first is its head
columns() {
	column -t -s '|' -o ' | ' | awk '{ print } NR == 1 { gsub(/[^|]/, "-"); print }'
}

print_results() {
	[[ -s $results ]] || return 0
	{
		printf 'what|idem|other|ratio|spread|goal|reached\n'
		cat "$results"
	} | columns
}

machine() {
	admin postgres -c "
		SELECT format('PostgreSQL %s, assertions %s; ', current_setting('server_version'),
					  current_setting('debug_assertions'))
			|| '$(nproc) cores, load $(cut -d ' ' -f 1 /proc/loadavg); '
			|| string_agg(name || ' = ' || current_setting(name), ', ' ORDER BY name)
		  FROM pg_settings
		 WHERE name IN ('shared_buffers', 'synchronous_commit', 'full_page_writes',
						'fsync', 'jit', 'autovacuum', 'data_checksums')"
}
