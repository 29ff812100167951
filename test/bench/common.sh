# shellcheck shell=bash disable=SC2154
# test/bench/common.sh: running SQL and pgbench.
#
# Every time is the median of several rounds.  In each round the sides take turns (A B B A
# ...), so that a slow spell of the machine hits all of them.

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

# empty_jobs [DATABASE]
empty_jobs() {
	admin "${1:-bench}" -c 'TRUNCATE idem.jobs, idem.job_keys, hand.jobs, bench.job_keys' -c CHECKPOINT
}

# sample NAME COMMAND ... >>$samples: the last line that the command prints.  A command that fails ends
# the line; as an argument of another one it would not.
sample() {
	local value
	value=$("${@:2}")
	printf '%s %s\n' "$1" "${value##*$'\n'}"
}

# alternate DATABASE NAME=STATEMENT ... >>$samples
# Each statement returns one number.  All run in one session, in turn; round 0
# warms up.
alternate() {
	local db=$1 round side
	shift
	for ((round = 0; round <= BENCH_ROUNDS; round++)); do
		for side in "$@"; do
			printf "\\\\echo -n '%s%s '\n%s;\n" \
				"$( ((round > 0)) || printf 'warmup-')" "${side%%=*}" "${side#*=}"
		done
	done | measured "$db"
}

# pin one|two|all, for sessions that start later.  one: client and server share a CPU, because they
# take turns anyway; two: each has its own CPU; all: the kernel chooses anew in each run, and a
# round trip that wakes an idle CPU takes three times as long.
pin() {
	local cpus server
	cpus=$(taskset -cp $$ | sed 's/.*: //')
	client_cpus=$cpus server=$cpus
	if [[ $1 != all ]]; then
		server=${cpus##*[,-]}
		client_cpus=$server
	fi
	if [[ $1 == two ]]; then
		client_cpus=${cpus%%[,-]*}
	fi
	taskset -cp "$server" "$(head -n 1 "$PGHOST/postmaster.pid")" >/dev/null
}

# pgbench_log DATABASE SCRIPT CLIENTS OPTION ...: what pgbench says, in $IDEM_TMP/pgbench.log,
# and microseconds of each transaction, in $IDEM_TMP/latency.txt, the fastest first
pgbench_log() {
	idem_run taskset -c "$client_cpus" pgbench -n -M prepared -c "$3" -j "$3" "${@:4}" -U bench -f - \
		-l --log-prefix="$IDEM_TMP/t/latency" -D "payload=$payload" -D "result=$result30" "$1" \
		<<<"${script[$2]}" >"$IDEM_TMP/pgbench.log" 2>&1 || {
		cat "$IDEM_TMP/pgbench.log" >&2
		return 1
	}
	cat "$IDEM_TMP"/t/latency.* | cut -d ' ' -f 3 | sort -n >"$IDEM_TMP/latency.txt"
	rm "$IDEM_TMP"/t/latency.*
}

# pgbench_us SCRIPT CLIENTS OPTION ...: microseconds of a transaction
pgbench_us() { pgbench_us_in bench "$@"; }

# pgbench_us_in DATABASE SCRIPT CLIENTS OPTION ...: microseconds of a transaction, the mean of the
# middle half of them: one that had to wait for the CPU measures the rest of the machine.
pgbench_us_in() {
	pgbench_log "$@" || return
	awk '
		{ v[NR] = $1 }
		END {
			for (i = int(NR / 4) + 1; i <= NR - int(NR / 4); i++) { sum += v[i]; n++ }
			print n ? sum / n : "nan"
		}' "$IDEM_TMP/latency.txt"
}

# backwards NAME ...: in the other order
backwards() { printf '%s\n' "$@" | tac; }

# latencies CLIENTS SCRIPT ... >>$samples: microseconds of a transaction
latencies() {
	local clients=$1 round name order
	shift
	for name in "$@"; do
		pgbench_us "$name" "$clients" -t "$BENCH_SOCKET" >/dev/null
	done
	for ((round = 0; round < BENCH_SOCKET_ROUNDS; round++)); do
		order=("$@")
		((round % 2 == 0)) || mapfile -t order < <(backwards "$@")
		for name in "${order[@]}"; do
			sample "$name" pgbench_us "$name" "$clients" -t "$BENCH_SOCKET"
		done
	done
}

# wal_of DATABASE STATEMENT COUNT: bytes of WAL that it writes, by COUNT
wal_of() {
	local before
	before=$(admin "$1" -c 'SELECT pg_current_wal_insert_lsn()')
	measured "$1" -c "$2" >/dev/null
	admin "$1" -c "SELECT ((pg_current_wal_insert_lsn() - '$before') / $3)::float8"
}

# hot_share DATABASE TABLE STATEMENT ...: share of HOT among its updates of the table, in percent
hot_share() {
	local db=$1 rel=$2 statement flags=()
	shift 2
	for statement in "$@" 'SELECT pg_stat_force_next_flush()'; do
		flags+=(-c "$statement")
	done
	admin "$db" -c "SELECT pg_stat_reset_single_table_counters('$rel'::regclass)" >/dev/null
	measured "$db" "${flags[@]}" >/dev/null
	admin "$db" -c "
		SELECT 100.0 * n_tup_hot_upd / nullif(n_tup_upd, 0)
		  FROM pg_stat_user_tables WHERE relid = '$rel'::regclass"
}

# hold_snapshot DATABASE, release_snapshot: a session with an old snapshot
hold_snapshot() {
	local answer
	coproc snapshot { measured "$1"; }
	printf '%s\n' 'BEGIN ISOLATION LEVEL REPEATABLE READ;' 'SELECT 1;' >&"${snapshot[1]}"
	read -r answer <&"${snapshot[0]}"
	[[ $answer == 1 ]] || idem_die 'bench: no old snapshot'
}

release_snapshot() {
	local input=${snapshot[1]} pid=$snapshot_PID
	exec {input}>&-
	wait "$pid"
}

# open_session SERVER DATABASE NAME: a session that answers one statement after the other
declare -A session_in session_out session_pid
open_session() {
	local in out fifo=$IDEM_TMP/t/$3
	mkfifo "$fifo.in" "$fifo.out"
	chmod a+rw "$fifo.in" "$fifo.out"
	PGHOST=$1 measured "$2" <"$fifo.in" >"$fifo.out" &
	session_pid[$3]=$!
	exec {in}>"$fifo.in" {out}<"$fifo.out"
	rm "$fifo.in" "$fifo.out"
	session_in[$3]=$in session_out[$3]=$out
	printf 'SET bench.clock = time;\n' >&"$in"
}

# ask_session NAME STATEMENT: the answer, one line
ask_session() {
	local answer
	printf '%s;\n' "$2" >&"${session_in[$1]}"
	read -r answer <&"${session_out[$1]}" || idem_die "bench: no answer to $2"
	printf '%s\n' "$answer"
}

# close_sessions NAME ...: all of those that are open, as a later one has the pipes of earlier ones
close_sessions() {
	local name in out
	for name in "$@"; do
		in=${session_in[$name]} out=${session_out[$name]}
		exec {in}>&- {out}<&-
	done
	for name in "$@"; do
		wait "${session_pid[$name]}"
	done
}
