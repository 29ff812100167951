# shellcheck shell=bash disable=SC2154
# test/bench/counts.sh: instructions and locks of an operation, counted by callgrind.
#
# A server without a postmaster (postgres --single) runs under valgrind.  callgrind writes a
# file each time the server calls pg_conf_load_time(), which bench.clock_us() does here: one
# with what came before the operations, and one with the operations.  Keys are the same in
# each run, there is no other process, and the tables hold some thousand rows: two runs differ
# by less than one percent, also on a busy machine.  Only a fetch depends on the clock: skip
# ranges and cached settings of queues expire after a second, and callgrind is slow.
#
# BENCH_PROFILE=DIRECTORY keeps the files with the operations there, for callgrind_annotate.

# counted NAME STATEMENT: %d in the statement is the number of operations; first with a few,
# which are not counted, so that caches are filled and plans are made
counted_names=()
counted() {
	# shellcheck disable=SC2059	# the statement is the format
	printf "SELECT setseed(0.%d)\n$2\n$2\n" "$((${#counted_names[@]} + 1))" 20 "$BENCH_COUNT"
	counted_names+=("$1")
}

# Every operation and its name.  Those of jobs are transactions of their own.
counted_statements() {
	local side
	printf '%s\n' "SET bench.clock = 'counts'" 'SET SESSION AUTHORIZATION bench'
	for side in idem hand; do
		counted "${side}_pair" "SELECT bench.${side}_pair_us(%d)"
		[[ $side == hand ]] || counted idem_assign 'SELECT bench.idem_assign_us(%d)'
		counted "${side}_tx" "CALL bench.${side}_tx_us(%d, 30)"
		counted "${side}_replay" "SELECT bench.${side}_replay_us(%d)"
		counted "${side}_lease" "CALL bench.${side}_lease_us(%d)"
		counted "${side}_call" "SELECT bench.${side}_call_us(%d)"
		counted "${side}_enqueue" "CALL bench.${side}_enqueue_us(%d)"
		counted "${side}_bulk" "CALL bench.${side}_bulk_us(10 * %d, 100)"
		counted "${side}_drain" "CALL bench.${side}_drain_us(%d)"
		counted "${side}_complete" "CALL bench.${side}_complete_us(%d)"
	done
}

# counts_of FILE NAME >>$samples: of one operation.  callgrind numbers the calls of a function
# inside itself ('2).  The server has its own locks for buffers from 19 on.  The line after calls=
# has the instructions of these calls: with them _times is what the histograms of jobs cost (S5).
counts_of() {
	awk -v name="$2" -v n="$BENCH_COUNT" '
		/^summary:/ { print name "_ir", $2 / n }
		/^cfn=/ { callee = substr($0, 5); sub(/\x27[0-9]+$/, "", callee) }
		is_call { spent[callee] += $2; is_call = 0 }
		/^calls=/ { calls[callee] += substr($1, 7); is_call = 1 }
		END {
			lw = calls["LWLockAcquire"] + calls["LWLockConditionalAcquire"] + calls["LWLockAcquireOrWait"]
			if (calls["LockBufferInternal"])
				lw += calls["LockBufferInternal"] + calls["ConditionalLockBuffer"]
			print name "_lw", lw / n
			print name "_lock", calls["LockAcquireExtended"] / n
			print name "_times", (spent["add_time"] + spent["idem_jobrow_due_since"] \
				+ spent["idem_jobrow_started_at"]) / n
		}' "$1"
}

# start_counting: a server of its own in $counted_data, filled and stopped
start_counting() {
	local host=$PGHOST
	counted_data=$IDEM_TMP/counts
	idem_server_start "$counted_data" "${settings[@]}" 'shared_buffers = 256MB' 'wal_buffers = 4MB' \
		'full_page_writes = off'
	make_template
	measured bench -c 'SELECT setseed(0.5)' -c "CALL bench.finished($BENCH_COUNT_ROWS)" \
		-c "CALL bench.idem_lease_us($BENCH_COUNT_ROWS)" -c "CALL bench.hand_lease_us($BENCH_COUNT_ROWS)" \
		-c "CALL bench.idem_fill($BENCH_COUNT_ROWS, 100)" -c "CALL bench.hand_fill($BENCH_COUNT_ROWS, 100)" >/dev/null
	admin bench -c 'VACUUM ANALYZE'
	idem_server_stop "$counted_data"
	PGHOST=$host
}

# run_counted >$samples
run_counted() {
	local out=$IDEM_TMP/t/callgrind.out log=$IDEM_TMP/counts.valgrind.log i name
	counted_statements >"$IDEM_TMP/counts.sql"
	idem_run valgrind --tool=callgrind --callgrind-out-file="$out" --dump-before=pg_conf_load_time \
		--compress-strings=no --compress-pos=no postgres --single -D "$counted_data" bench \
		<"$IDEM_TMP/counts.sql" >"$log" 2>&1 || {
		tail -n 50 "$log" >&2
		return 1
	}
	if grep -E 'ERROR:|FATAL:|WARNING:' "$log" >&2; then
		return 1
	fi
	# four files for each: before and during the warm-up, before and during the operations
	for i in "${!counted_names[@]}"; do
		name=${counted_names[i]}
		counts_of "$out.$((4 * i + 4))" "$name"
		if [[ -n ${BENCH_PROFILE:-} ]]; then
			mkdir -p "$BENCH_PROFILE"
			cp "$out.$((4 * i + 4))" "$BENCH_PROFILE/callgrind.out.$name"
		fi
	done
}

# compare_counts ID WHAT IDEM OTHER
compare_counts() {
	compare "$1_instructions" "instructions: $2" 'by hand' '' "$3_ir" "$4_ir"
	compare "$1_lwlocks" "LWLock acquisitions: $2" 'by hand' '' "$3_lw" "$4_lw"
	compare "$1_locks" "heavyweight lock acquisitions: $2" 'by hand' '' "$3_lock" "$4_lock"
}

# What the histograms cost a job: each fetch adds to one, and so does the end of each attempt
compare_histograms() {
	derive job_ir 'a + b' idem_enqueue_ir idem_drain_ir
	derive job_share 'a / b' idem_drain_times job_ir
	report histograms 'instructions: histograms of a job' 'enqueue + fetch + complete' '' \
		"$(median idem_drain_times)" "$(median job_ir)" "$(median job_share)" '<= 0.01'
}

line_counts() {
	local side unit counted_data
	start_counting
	run_counted >"$samples"
	for side in idem hand; do
		for unit in ir lw lock; do
			derive "${side}_fetch_$unit" 'a - b' "${side}_drain_$unit" "${side}_complete_$unit"
		done
	done
	compare_counts perform 'claim + finish, PERFORM idem_finish' idem_pair hand_pair
	compare_counts assign 'claim + finish, ok := idem_finish' idem_assign hand_pair
	compare_counts commit 'claim + finish, PERFORM, + COMMIT' idem_tx hand_tx
	compare_counts replay replay idem_replay hand_replay
	compare_counts lease 'lease + COMMIT + finish + COMMIT' idem_lease hand_lease
	compare_counts call 'idem_call' idem_call hand_call
	compare_counts enqueue 'enqueue + COMMIT' idem_enqueue hand_enqueue
	compare_counts fetch 'fetch with a lease + COMMIT' idem_fetch hand_fetch
	compare_counts complete 'complete + COMMIT' idem_complete hand_complete
	compare_histograms
}
