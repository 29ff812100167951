# shellcheck shell=bash disable=SC2154
# test/bench/lines.sh: the lines of keys, one function each.

# Claim and finish in one backend, from PL/pgSQL.
line_pair() {
	alternate bench \
		"idem=SELECT bench.idem_pair_us($BENCH_LOOP)" \
		"hand=SELECT bench.hand_pair_us($BENCH_LOOP)" \
		"assign=SELECT bench.idem_assign_us($BENCH_LOOP)" \
		"idem_tx=CALL bench.idem_tx_us($((BENCH_LOOP / 2)), 30)" \
		"hand_tx=CALL bench.hand_tx_us($((BENCH_LOOP / 2)), 30)" >"$samples"
	compare perform 'claim + finish from PL/pgSQL, PERFORM idem_finish' 'INSERT ... ON CONFLICT + UPDATE' us \
		idem hand '<= 0.55'
	compare assign 'claim + finish from PL/pgSQL, ok := idem_finish' 'INSERT ... ON CONFLICT + UPDATE' us \
		assign hand '<= 0.47'
	compare commit 'claim + finish from PL/pgSQL, PERFORM, a COMMIT after each pair' 'the same by hand' us \
		idem_tx hand_tx '<= 0.75'
}

# The answer for a finished key.
line_replay() {
	measured bench -c "CALL bench.finished($((2 * BENCH_LOOP)))"
	admin bench -c 'VACUUM ANALYZE idem.keys, hand.keys'
	alternate bench \
		'idem=SELECT bench.idem_replay_us()' \
		'hand=SELECT bench.hand_replay_us()' >"$samples"
	compare replay 'replay from PL/pgSQL' 'SELECT ... INTO by primary key' us idem hand '<= 0.40'
}

# What a pair adds to a transaction of four round trips.
line_socket() {
	pin one
	latencies 1 base idem idem_from hand >"$samples"
	compare_tax one '1 client' '<= 0.82' '<= 0.95'
	pin all
	latencies 2 base idem idem_from hand >"$samples"
	compare_tax two '2 clients' '' ''
}

# compare_tax ID HOW GOAL GOAL-IN-FROM
compare_tax() {
	local name
	for name in idem idem_from hand; do
		derive "${name}_tax" 'a - b' "$name" base
	done
	compare "$1_list" "tax of a pair over a socket, $2, idem_claim in the SELECT list" 'tax of the pair by hand' us \
		idem_tax hand_tax "$3"
	compare "$1_from" "tax of a pair over a socket, $2, idem_claim in FROM" 'tax of the pair by hand' us \
		idem_from_tax hand_tax "$4"
	compare "$1_whole" "the whole transaction, $2, idem_claim in FROM" 'two SELECT 1 instead of the pair' us idem_from base
}

# One round trip against several, and four against four, with the same work: one business row.
line_call() {
	local by_hand='BEGIN, INSERT ... ON CONFLICT, work + UPDATE, COMMIT'
	pin one
	latencies 1 call idem_four idem_four_from idem_four_request hand_four hand_five >"$samples"
	compare_rates four 'BEGIN, idem_claim in the SELECT list, work + idem_finish, COMMIT' "$by_hand" idem_four hand_four '>= 1.05'
	compare_rates four_from 'BEGIN, idem_claim in FROM, work + idem_finish, COMMIT' "$by_hand" idem_four_from hand_four '>= 1.05'
	compare_rates four_request 'the same, idem_claim with a request' "$by_hand (which checks no request)" idem_four_request hand_four
	compare_rates one 'idem_call in one round trip, client and server on one CPU' "$by_hand" call hand_four '>= 1.5'
	compare_rates one_five 'idem_call in one round trip, client and server on one CPU' \
		'BEGIN, INSERT ... ON CONFLICT, work, UPDATE, COMMIT' call hand_five
	compare_rates one_idem 'idem_call in one round trip, client and server on one CPU' \
		'BEGIN, idem_claim in FROM, work + idem_finish, COMMIT' call idem_four_from
	(($(nproc) > 1)) || return 0
	pin two
	latencies 1 call hand_four >"$samples"
	compare_rates two 'idem_call in one round trip, client and server on two CPUs' "$by_hand" call hand_four '>= 2.5'
}

# wal_rounds IDEM HAND >$samples: of statements with BENCH_WAL operations, on empty tables
wal_rounds() {
	local round
	for ((round = 0; round < BENCH_WAL_ROUNDS; round++)); do
		empty_tables
		sample idem wal_of bench "$1" "$BENCH_WAL"
		empty_tables
		sample hand wal_of bench "$2" "$BENCH_WAL"
	done
}

# WAL of a pair in a transaction of its own.
line_wal() {
	local fpw
	declare -A goal=([off]='<= 0.88' [on]='')
	for fpw in off on; do
		setting full_page_writes "$fpw"
		wal_rounds "CALL bench.idem_tx_us($BENCH_WAL, 30)" "CALL bench.hand_tx_us($BENCH_WAL, 30)" >"$samples"
		compare "pair_$fpw" "WAL of a pair, 30 byte result, full_page_writes = $fpw" 'the pair by hand' B idem hand "${goal[$fpw]}"
	done
	setting full_page_writes off
	wal_rounds "CALL bench.idem_lease_us($BENCH_WAL)" "CALL bench.hand_lease_us($BENCH_WAL)" >"$samples"
	compare lease 'WAL of lease + finish, 30 byte result, full_page_writes = off' 'the same by hand' B idem hand '<= 0.90'
}

# Lease and finish, each in a transaction of its own.
line_lease() {
	pin one
	latencies 1 idem_lease hand_lease idem_lease_from base_lease >"$samples"
	compare_rates from 'lease + finish over a socket, idem_lease in FROM' 'the same by hand' idem_lease_from hand_lease '>= 1.2'
	compare_rates list 'lease + finish over a socket, idem_lease in the SELECT list' 'the same by hand' idem_lease hand_lease
	compare_rates base 'two SELECT 1' 'lease + finish by hand' base_lease hand_lease
	if (($(nproc) > 1)); then
		pin two
		latencies 1 hand_lease idem_lease_from >"$samples"
		compare_rates two 'lease + finish over a socket, idem_lease in FROM, client and server on two CPUs' 'the same by hand' \
			idem_lease_from hand_lease
	fi
	empty_tables
	alternate bench \
		"idem=CALL bench.idem_lease_us($((BENCH_LOOP / 2)))" \
		"hand=CALL bench.hand_lease_us($((BENCH_LOOP / 2)))" >"$samples"
	compare plpgsql 'lease + finish from PL/pgSQL, a COMMIT after each' 'the same by hand' us idem hand
}

# load_keys DATABASE COUNT: finished keys, by as many sessions as there are cores
load_keys() {
	local i n=$2 parts pids=()
	parts=$(nproc)
	((n >= 100000)) || parts=1
	admin "$1" -c 'TRUNCATE idem.keys'
	for ((i = 0; i < parts; i++)); do
		measured "$1" -c "CALL bench.idem_load($((n / parts)))" &
		pids+=($!)
	done
	for i in "${pids[@]}"; do
		wait "$i"
	done
	admin "$1" -c 'VACUUM ANALYZE idem.keys'
}

# growth_round DATABASE NAME [STATEMENT] >>$samples: what pairs cost in a new session
growth_round() {
	local n=$((BENCH_LOOP / 2))
	sample "$2" measured "$1" -c "${3:-SELECT}" -c "SELECT bench.idem_pair_us($((n / 10)))" -c "SELECT bench.idem_pair_us($n)"
}

# growth_rounds ROUNDS PREPARE [STATEMENT] >$samples: small and large table in turn, the
# small one made anew each time
growth_rounds() {
	local round
	for ((round = 0; round < $1; round++)); do
		load_keys small "$BENCH_FEW_KEYS"
		"$2"
		growth_round small few "${3:-}"
		growth_round large many "${3:-}"
	done >"$samples"
}

checkpoint() { admin postgres -c CHECKPOINT; }

# Pairs on a small and on a large table.  The pages of the large one are in shared
# buffers, have been written to WAL since the last checkpoint, and the session has
# touched the whole index before: what is left is the cost of the larger tree.
# Lines of their own show what a checkpoint and a new session add.
line_growth() {
	local what="claim + finish with $BENCH_KEYS live keys" few="with $BENCH_FEW_KEYS" rounds=$(((BENCH_GROWTH_ROUNDS + 1) / 2)) \
		touch="SELECT bench.touch('idem.keys')"
	admin postgres -c 'CREATE DATABASE small TEMPLATE bench' -c 'CREATE DATABASE large TEMPLATE bench'
	checkpoint
	load_keys large "$BENCH_KEYS"
	growth_rounds "$BENCH_GROWTH_ROUNDS" true "$touch"
	compare warm "$what" "$few" us many few '<= 1.25'
	growth_rounds "$rounds" true
	compare new_session "$what, in a session that has yet to map the pages" "$few" us many few
	growth_rounds "$rounds" checkpoint "$touch"
	compare checkpoint "$what, right after a checkpoint (full page images)" "$few" us many few
}

# Share of finishes that are HOT updates.
line_hot() {
	local bytes shape what side statements
	for bytes in 30 1000; do
		for shape in tx batch; do
			declare -A hot=()
			for side in idem hand; do
				empty_tables
				case $shape in
				tx) what='one pair per transaction' statements=("CALL bench.${side}_tx_us($BENCH_WAL, $bytes)") ;;
				batch)
					what='batches of 1000'
					mapfile -t statements < <(yes "SELECT bench.${side}_batch_us(1000, $bytes)" | head -n $((1 + BENCH_WAL / 1000)))
					;;
				esac
				hot[$side]=$(hot_share bench "$side.keys" "${statements[@]}")
			done
			report "${shape}_$bytes" "HOT finishes, $what, $bytes byte results" 'by hand' % "${hot[idem]}" "${hot[hand]}" '' ''
		done
	done
}
