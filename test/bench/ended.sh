# shellcheck shell=bash disable=SC2154
# test/bench/ended.sh: what jobs that cannot be fetched cost a worker that looks for other jobs.
#
# Two databases differ only in the jobs before the next one: ended jobs that VACUUM cannot
# remove because of an old snapshot, leased jobs with follow-ups, or scheduled jobs.  Calls of the
# two sides take turns in one session each, with a pause after every few of them, and in new
# sessions, which have used another queue before.  The cost is the median of the calls.
# Calls that take more than ten times the median of a clean queue, because they look at every
# entry again, have lines of their own.

slow_factor=10

# times_of NAME <ANSWER >>$samples: figures of a line
times_of() { tr ' ' '\n' | sed -n "s/^[0-9]/$1 &/p"; }

# calls_old PROCEDURE QUEUE READY ROUNDS >>$samples: by sessions that have called before
calls_old() {
	local side round
	for side in clean ended; do
		open_session "$PGHOST" "$side" "$side"
		printf 'CALL bench.open_queues();\n' >&"${session_in[$side]}"
		ask_session "$side" "CALL bench.$1('$2', 2, $3)" >/dev/null
	done
	for ((round = 0; round < $4; round++)); do
		for side in clean ended; do
			ask_session "$side" "CALL bench.$1('$2', $BENCH_POLLS, $3)" | times_of "${side}_old"
		done
		sleep 0.03
	done
	close_sessions clean ended
}

# calls_new PROCEDURE QUEUE READY >>$samples: by new sessions, one call each
calls_new() {
	local i side
	for ((i = 0; i < BENCH_SESSIONS; i++)); do
		for side in clean ended; do
			measured "$side" -c 'CALL bench.open_queues()' -c "CALL bench.$1('$2', 1, $3)" | times_of "${side}_new"
		done
	done
}

# report_slow ID WHAT NAME CLEAN: calls of NAME that take far longer than those of CLEAN
report_slow() {
	local limit
	limit=$(calc "$slow_factor * $(median "$4")")
	awk -v name="$3" -v limit="$limit" '$1 == name && $2 > limit { print "slow", $2 }' "$samples" >"$samples.slow"
	report "$1_share" "$2: calls over $slow_factor times the median of a clean queue" '' % \
		"$(calc "100 * $(wc -l <"$samples.slow") / $(grep -c "^$3 " "$samples")")" '' '' ''
	[[ -s $samples.slow ]] || return 0
	cat "$samples.slow" >>"$samples"
	report "$1_slow" "$2: median of these calls" 'the slowest one' us "$(median slow)" "$(largest slow)" '' ''
	sed -i '/^slow /d' "$samples"
}

# compare_calls ID WHAT BEFORE PROCEDURE QUEUE READY ROUNDS: compare a call of the procedure with
# one in a clean queue; BEFORE names the jobs before the next one
compare_calls() {
	local session what
	{
		calls_old "${@:4:4}"
		calls_new "${@:4:3}"
	} >"$samples"
	for session in old new; do
		what="$2, in a session that has called before, $3"
		[[ $session == old ]] || what="$2, in a new session, $3"
		compare "$1_$session" "$what" 'a clean queue' us "ended_$session" "clean_$session" '<= 3'
		report_slow "$1_$session" "$what" "ended_$session" "clean_$session"
	done
}

# obstruct STATEMENT: two databases, in one of them the jobs that it makes
obstruct() {
	local side
	for side in clean ended; do
		empty_jobs "$side"
		admin "$side" -c 'VACUUM'
	done
	admin ended -c 'SET ROLE bench' -c "$1"
	admin ended -c 'VACUUM ANALYZE'
}

# compare_fetches ID BEFORE: idle polls, then fetches
compare_fetches() {
	local side
	compare_calls "$1_idle" 'idle poll' "$2" fetch_times bench false "$BENCH_POLL_ROUNDS"
	for side in clean ended; do
		measured "$side" -c "CALL bench.make_ready('bench', $((BENCH_POLL_ROUNDS * BENCH_POLLS + BENCH_SESSIONS + 2)))"
	done
	compare_calls "$1_fetch" 'fetch' "$2" fetch_times bench true "$BENCH_POLL_ROUNDS"
}

line_ended() {
	local what="$BENCH_ENDED ended jobs and an old snapshot"
	admin postgres -c 'CREATE DATABASE clean TEMPLATE bench' -c 'CREATE DATABASE ended TEMPLATE bench'
	hold_snapshot ended
	obstruct "CALL bench.make_ended('bench', $BENCH_ENDED)"
	compare_fetches ended "$what"
	release_snapshot
	hold_snapshot ended
	obstruct 'SELECT'
	admin ended -c "CALL bench.make_hot('hot', $BENCH_ENDED)" -c 'VACUUM ANALYZE'
	compare_calls hot 'enqueue of a key' "$what, all of that key" enqueue_times hot true $(((BENCH_POLL_ROUNDS + 3) / 4))
	release_snapshot
	obstruct "CALL bench.make_blocked('bench', $BENCH_BLOCKED)"
	compare_fetches blocked "$BENCH_BLOCKED leased jobs and as many follow-ups"
	obstruct "CALL bench.make_scheduled('bench', $BENCH_SCHEDULED)"
	compare_fetches scheduled "$BENCH_SCHEDULED scheduled jobs, each of its own priority"
}
