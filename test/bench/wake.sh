# shellcheck shell=bash disable=SC2034,SC2154
# test/bench/wake.sh: how soon a worker has a job, and what it costs an enqueue to wake it.  wake.py has the workers.
#
# On both sides the jobs are those of idem, so the sides differ only in how a worker learns of a job: by
# idem_wait, by pg_notify in the enqueuing statement and LISTEN, or by a poll.

# wake_py ARGUMENT ...
wake_py() {
	idem_run env PGUSER=bench PGDATABASE=bench LIBPQ="$("$PG_CONFIG" --libdir)/libpq.so.5" \
		timeout 300 /usr/bin/python3 -B "$IDEM_SRC/test/bench/wake.py" "$@"
}

# start_load, stop_load: sessions that only compute, one per CPU
start_load() {
	idem_run env PGAPPNAME=load pgbench -n -c "$(nproc)" -j "$(nproc)" -T 100000 -f - postgres \
		<<<'SELECT count(*) FROM generate_series(1, 20000);' >/dev/null 2>&1 &
	load=$!
	ask "SELECT count(*) = $(nproc) FROM pg_stat_activity WHERE application_name = 'load' AND state = 'active'"
}

stop_load() {
	admin postgres -c "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'load'" >/dev/null
	wait "$load" || true
}

# latency_of NAME WAY WORKERS >>$samples
latency_of() {
	empty_jobs
	wake_py latency "$2" "$3" "$BENCH_WAKE_JOBS" "$BENCH_WAKE_PAUSE" | sed "s/^/$1_/"
}

# latency_rounds WORKERS >$samples: the ways in turn
latency_rounds() {
	local round way ways
	for ((round = 0; round < BENCH_WAKE_ROUNDS; round++)); do
		ways=(wait listen "poll=$BENCH_WAKE_POLL")
		((round % 2 == 0)) || mapfile -t ways < <(backwards "${ways[@]}")
		for way in "${ways[@]}"; do
			latency_of "${way%=*}" "$way" "$1"
		done
	done
}

# compare_latencies ID HOW GOAL
compare_latencies() {
	local p what
	for p in p50 p99; do
		what="from commit to fetched job, ${p/p50/median}, $2"
		compare "$1_${p}_listen" "$what" 'LISTEN and pg_notify' us "wait_$p" "listen_$p"
		compare "$1_${p}_poll" "$what" "a poll every $BENCH_WAKE_POLL s" us "wait_$p" "poll_$p"
	done
	[[ -n $3 ]] || return 0
	derive goal 1000 wait_p99
	compare "$1_goal" "$what" 'the goal' us wait_p99 goal "$3"
}

# From the commit of an enqueue to the worker that has the job.
line_wake_latency() {
	local how workers what load
	for how in idle loaded; do
		[[ $how == idle ]] || start_load
		for workers in $BENCH_WAKE_WORKERS; do
			latency_rounds "$workers" >"$samples"
			what="$workers workers, $how machine"
			[[ $workers != 1 ]] || what=${what/workers/worker}
			compare_latencies "${how}_$workers" "$what" "$([[ $how == loaded ]] || printf '< 1')"
		done
	done
	stop_load
}

lines wake_enqueue "SELECT (idem_enqueue('wake', :payload)).outcome;"
lines wake_notify "SELECT (idem_enqueue('wake', :payload)).outcome, pg_notify('wake', '');"

# start_workers WAY COUNT
start_workers() {
	local answer
	coproc woken { wake_py work "$1" "$2"; }
	read -r answer <&"${woken[0]}"
	[[ $answer == ready ]] || idem_die 'bench: the workers have not begun'
}

# stop_workers: when no job is left.  $taken: how many they have completed; $told: how often they were told
# of one
stop_workers() {
	local input=${woken[1]} output=${woken[0]} pid=$woken_PID
	until [[ $(admin bench -c 'SELECT count(*) FROM idem.jobs') == 0 ]]; do
		kill -0 "$pid" 2>/dev/null || idem_die 'bench: a worker has ended'
	done
	exec {input}>&-
	read -r taken told <&"$output"
	wait "$pid"
}

# tps: of pgbench_log
tps() { sed -n 's/^tps = \([0-9.]*\).*/\1/p' "$IDEM_TMP/pgbench.log"; }

# commits_of NAME SCRIPT CLIENTS [WAY] >>$samples: commits per second of so many enqueuers; with workers
# how often one of them was told of a job, per commit
commits_of() {
	local how taken told count
	read -ra how <<<"$BENCH_WAKE_SLICE"
	empty_jobs
	[[ -z ${4:-} ]] || start_workers "$4" "${BENCH_WAKE_WORKERS##* }"
	pgbench_log bench "$2" "$3" "${how[@]}"
	printf '%s %s\n' "$1" "$(tps)"
	[[ -n ${4:-} ]] || return 0
	count=$(wc -l <"$IDEM_TMP/latency.txt")
	stop_workers
	((taken == count)) || idem_die "bench: $taken of $count jobs were completed"
	printf '%s_told %s\n' "$1" "$(calc "$told / $count")"
}

# commits_rounds CLIENTS >$samples: all of these in turn
commits_rounds() {
	local round side sides fields
	for ((round = 0; round < BENCH_WAKE_ROUNDS; round++)); do
		sides=(quiet:wake_enqueue: notify:wake_notify: waited:wake_enqueue:wait listened:wake_notify:listen)
		((round % 2 == 0)) || mapfile -t sides < <(backwards "${sides[@]}")
		for side in "${sides[@]}"; do
			IFS=: read -ra fields <<<"$side"
			commits_of "${fields[0]}" "${fields[1]}" "$1" "${fields[2]:-}"
		done
	done
}

# compare_commits CLIENTS ID HOW: how says what is special, and ID has it
compare_commits() {
	local workers="${BENCH_WAKE_WORKERS##* } workers" what="$1 enqueuers" goal
	[[ $1 != 1 ]] || what=${what/enqueuers/enqueuer}
	goal=$([[ $1 != 16 ]] || printf '>= 3')
	commits_rounds "$1" >"$samples"
	compare "notify_$1$2" "commits of $what, nobody waits$3" 'with pg_notify, nobody listens' /s quiet notify "$goal"
	compare "listen_$1$2" "commits of $what, $workers wait$3" "with pg_notify, $workers listen" /s waited listened "$goal"
	compare "waited_$1$2" "commits of $what, $workers wait$3" 'nobody waits' /s waited quiet
	compare "told_$1$2" "wake-ups per commit of $what, $workers wait$3" "with pg_notify, $workers listen" '' \
		waited_told listened_told
}

# Commits of enqueuers, while workers wait and while nobody does.  The workers fetch and complete,
# so they take from the enqueuers the CPU time that this needs, on both sides.
line_wake_commits() {
	local clients
	setting full_page_writes off
	for clients in $BENCH_WAKE_CLIENTS; do
		compare_commits "$clients" '' ''
	done
	setting synchronous_commit on
	compare_commits 16 _sync ', synchronous_commit = on'
}

# build_before: the commit $BENCH_BEFORE, installed below $IDEM_TMP/before; $bin_before: its programs
build_before() {
	local git=$IDEM_ROOT dir=$IDEM_TMP/before
	local IDEM_ROOT=$dir/checkout IDEM_TMP=$dir IDEM_SRC IDEM_BUILD IDEM_BIN='' IDEM_PG_CONFIG
	idem_as_user mkdir "$dir" "$dir/checkout" "$dir/t"
	git -C "$git" archive "$BENCH_BEFORE" | idem_as_user tar -C "$IDEM_ROOT" -xf -
	idem_build
	bin_before=$IDEM_BIN
}

# start_beside NAME BIN: one more server with these programs
start_beside() {
	local PGHOST IDEM_BIN=$2
	server_dir[$1]=$IDEM_TMP/server_$1 server_bin[$1]=$2
	idem_server_start "${server_dir[$1]}" "${settings[@]}" 'full_page_writes = off'
	make_template
}

# renew_server NAME: as renew, with the programs of that server
renew_server() {
	local IDEM_BIN=${server_bin[$1]}
	renew "${server_dir[$1]}" idem
}

# cost_round OTHER >>$samples: enqueues of this build and of the other one in turn, in one session each, and
# by several sessions
cost_round() {
	local clients side sides
	renew_server now
	renew_server "$1"
	PGHOST=${server_dir[now]} pin one
	PGHOST=${server_dir[$1]} pin one
	open_session "${server_dir[now]}" bench on1
	open_session "${server_dir[$1]}" bench off1
	both_sides "$1" 'CALL bench.idem_enqueue_us(200)' 1
	close_sessions on1 off1
	PGHOST=${server_dir[now]} pin all
	PGHOST=${server_dir[$1]} pin all
	for clients in $BENCH_COST_CLIENTS; do
		sides=(now "$1")
		((round % 2 == 0)) || sides=("$1" now)
		for side in "${sides[@]}"; do
			commits_on "$side" "$clients" "$1"
		done
	done
}

# commits_on SERVER CLIENTS OTHER >>$samples
commits_on() {
	local PGHOST=${server_dir[$1]} how name=on
	[[ $1 == now ]] || name=off
	read -ra how <<<"$BENCH_COST_SLICE"
	empty_jobs
	pgbench_log bench wake_enqueue "$2" "${how[@]}"
	printf '%s\n' "$3_$2_$name $(tps)"
}

# compare_cost OTHER AGAINST GOAL-TIME GOAL-RATE
compare_cost() {
	local clients
	report_ratio "$1_1" 'enqueue + COMMIT from PL/pgSQL, nobody waits' "$2" us "$1_on" "$1_off" "$1_ratio" "$3"
	for clients in $BENCH_COST_CLIENTS; do
		compare "$1_$clients" "commits of $clients enqueuers, nobody waits" "$2" /s \
			"$1_${clients}_on" "$1_${clients}_off" "$4"
	done
}

# What waking costs an enqueue while nobody waits: this build beside a server of a commit before waking, and
# beside one of the same build, which shows the precision of the method.
line_wake_cost() {
	local round other others=(same)
	declare -A server_dir=([now]=$PGHOST) server_bin=([now]=$IDEM_BIN)
	setting full_page_writes off
	start_beside same "$IDEM_BIN"
	if [[ -n $BENCH_BEFORE ]] && git -C "$IDEM_ROOT" cat-file -e "$BENCH_BEFORE^{commit}"; then
		build_before
		start_beside before "$bin_before"
		others+=(before)
	else
		idem_say 'there is no commit to compare with'
	fi
	for ((round = 0; round < BENCH_COST_ROUNDS; round++)); do
		for other in "${others[@]}"; do
			cost_round "$other"
		done
	done >"$samples"
	compare_cost same 'another server of the same build' '' ''
	[[ ${others[-1]} != before ]] || compare_cost before "commit $BENCH_BEFORE, before waking" '< 1.03' '> 0.97'
	for other in "${others[@]}"; do
		idem_server_stop "${server_dir[$other]}"
	done
}
