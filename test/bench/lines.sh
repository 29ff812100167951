# shellcheck shell=bash disable=SC2154
# test/bench/lines.sh: the lines of the table, one function each.

# Claim and finish in one backend, from PL/pgSQL.
line_pair() {
	empty_tables
	alternate bench 11 \
		'idem=SELECT bench.idem_pair_us(20000)' \
		'hand=SELECT bench.hand_pair_us(20000)' \
		'idem_tx=CALL bench.idem_tx_us(5000, 30)' \
		'hand_tx=CALL bench.hand_tx_us(5000, 30)' >"$samples"
	compare 'claim + finish from PL/pgSQL; INSERT ... ON CONFLICT + UPDATE' us \
		idem hand '<= 0.6'
	compare 'the same, with a COMMIT after each pair' us \
		idem_tx hand_tx ''
}

# The answer for a finished key.
line_replay() {
	empty_tables
	measured bench -c 'CALL bench.finished(20000)'
	admin bench -c 'VACUUM ANALYZE idem.keys, hand.keys'
	alternate bench 21 \
		'idem=SELECT bench.idem_replay_us()' \
		'hand=SELECT bench.hand_replay_us()' >"$samples"
	compare 'replay from PL/pgSQL; SELECT ... INTO by primary key' us \
		idem hand '<= 0.45'
}

# What a pair adds to a transaction of four round trips.
line_socket() {
	local clients goal='<= 0.65'
	for clients in 1 2; do
		empty_tables
		pin "$( ((clients == 1)) && printf on || printf off)"
		latencies "$clients" 2 11 base idem hand >"$samples"
		minus idem base idem_tax
		minus hand base hand_tax
		compare "tax of a pair over a socket, $clients client(s); hand-written pair" us \
			idem_tax hand_tax "$goal"
		compare '  the whole transaction; the same with two SELECT 1' us idem base ''
		goal=
	done
	pin off
}

# One round trip against several, with the same work: one business row.
line_call() {
	local name what goal='>= 2.5'
	empty_tables
	pin on
	latencies 1 2 9 call idem_four hand_four idem_five hand_five >"$samples"
	for name in idem_four hand_four idem_five hand_five; do
		case $name in
		idem_four) what='BEGIN, idem_claim, work + idem_finish, COMMIT' ;;
		hand_four) what='BEGIN, INSERT ON CONFLICT, work + UPDATE, COMMIT' ;;
		idem_five) what='BEGIN, idem_claim, work, idem_finish, COMMIT' ;;
		hand_five) what='BEGIN, INSERT ON CONFLICT, work, UPDATE, COMMIT' ;;
		esac
		report "idem_call in one round trip; $what" /s \
			"$(calc "1e6 / $(median call)")" "$(calc "1e6 / $(median $name)")" \
			"$(calc "$(median $name) / $(median call)")" "$goal" "$(spread call $name)"
		goal=
	done
	pin off
	latencies 1 2 9 call idem_four >"$samples"
	report '  client and server not on one CPU; BEGIN, idem_claim, work + idem_finish, COMMIT' /s \
		"$(calc "1e6 / $(median call)")" "$(calc "1e6 / $(median idem_four)")" \
		"$(calc "$(median idem_four) / $(median call)")" '' "$(spread call idem_four)"
}

# WAL of a pair in a transaction of its own.
line_wal() {
	local fpw side round pairs=20000 goal='<= 0.9'
	for fpw in off on; do
		setting full_page_writes "$fpw"
		: >"$samples"
		for round in 1 2 3; do
			for side in idem hand; do
				empty_tables
				printf '%s %s\n' "$side" "$(wal_of bench "CALL bench.${side}_tx_us($pairs, 30)")" >>"$samples"
			done
		done
		compare "WAL of a pair, 30 byte result, full_page_writes = $fpw; hand-written pair" B \
			idem hand "$goal" "1 / $pairs"
		goal=
	done
}

# Lease and finish, each in a transaction of its own.
line_lease() {
	local side round count=20000 goal='>= 1.2'
	for side in on off; do
		empty_tables
		pin "$side"
		latencies 1 2 11 idem_lease hand_lease idem_lease_from base_lease >"$samples"
		report "lease + finish over a socket, client and server $([[ $side == on ]] || printf 'not ')on one CPU; hand-written" /s \
			"$(calc "1e6 / $(median idem_lease)")" "$(calc "1e6 / $(median hand_lease)")" \
			"$(calc "$(median hand_lease) / $(median idem_lease)")" "$goal" "$(spread idem_lease hand_lease)"
		report '  with idem_lease() in FROM; hand-written' /s \
			"$(calc "1e6 / $(median idem_lease_from)")" "$(calc "1e6 / $(median hand_lease)")" \
			"$(calc "$(median hand_lease) / $(median idem_lease_from)")" '' "$(spread idem_lease_from hand_lease)"
		report '  two SELECT 1; hand-written' /s \
			"$(calc "1e6 / $(median base_lease)")" "$(calc "1e6 / $(median hand_lease)")" \
			"$(calc "$(median hand_lease) / $(median base_lease)")" '' "$(spread base_lease hand_lease)"
		goal=
	done
	empty_tables
	alternate bench 11 \
		"idem=CALL bench.idem_lease_us(5000)" \
		"hand=CALL bench.hand_lease_us(5000)" >"$samples"
	compare '  the same from PL/pgSQL' us idem hand ''
	setting full_page_writes off
	: >"$samples"
	for round in 1 2 3; do
		for side in idem hand; do
			empty_tables
			printf '%s %s\n' "$side" "$(wal_of bench "CALL bench.${side}_lease_us($count)")" >>"$samples"
		done
	done
	compare 'WAL of lease + finish, 30 byte result; hand-written' B idem hand '<= 1' "1 / $count"
	setting full_page_writes on
}

# load_keys DATABASE COUNT: finished keys, claimed one per millisecond up to now.
# In the order of the key, because that is fast; claims of new keys do not care.
load_keys() {
	admin "$1" -c "SET work_mem = '2GB'" -c 'TRUNCATE idem.keys' -c "
		INSERT INTO idem.keys (created_at, expires_at, owner, key, scope, finished_at, result)
		SELECT t, t + interval '24 hours', 'bench', key, '', t, '{\"charge_id\": \"ch_1234567890\"}'
		  FROM (SELECT key, now() - ($2 - row_number() OVER ()) * interval '1 millisecond' AS t
				  FROM (SELECT gen_random_uuid()::text COLLATE \"C\" AS key
						  FROM generate_series(1, $2) ORDER BY key) AS k) AS s" \
		-c 'VACUUM ANALYZE idem.keys'
}

# growth_round DATABASE NAME [STATEMENT] >>$samples: what pairs cost in a new session
growth_round() {
	printf '%s ' "$2"
	measured "$1" -c 'SET enable_seqscan = off' -c "${3:-SELECT}" \
		-c 'SELECT bench.idem_pair_us(500)' -c 'SELECT bench.idem_pair_us(5000)' | sed -n '$p'
}

# growth_rounds COUNT PREPARE [STATEMENT] >$samples: small and large table in turn, the
# small one made anew each time
growth_rounds() {
	local round
	for ((round = 0; round < $1; round++)); do
		load_keys small 10000
		"$2"
		growth_round small few "${3:-}"
		growth_round large many "${3:-}"
	done >"$samples"
}

checkpoint() { admin postgres -c CHECKPOINT; }

# Pairs on a small and on a large table.  The pages of the large one are in shared
# buffers, have been written to WAL since the last checkpoint, and the session has
# touched the whole index before: what is left is the cost of the larger tree.
# What a checkpoint and a new session add is told apart.
line_growth() {
	local count=${BENCH_KEYS:-10000000} touch="SELECT count(key) FROM idem.keys WHERE key >= ''"
	admin postgres -c 'CREATE DATABASE small TEMPLATE bench' -c 'CREATE DATABASE large TEMPLATE bench'
	checkpoint
	load_keys large "$count"
	growth_rounds 11 true "$touch"
	compare "claim + finish with $count live keys; with 10000" us many few '<= 1.5'
	growth_rounds 5 true
	compare '  the same in a new session (it has yet to map the pages)' us many few ''
	growth_rounds 5 checkpoint "$touch"
	compare '  the same right after a checkpoint (full page images)' us many few ''
	admin postgres -c 'DROP DATABASE small' -c 'DROP DATABASE large'
}

# Share of finishes that are HOT updates.
line_hot() {
	local bytes shape what hot side statements
	for bytes in 30 1000; do
		for shape in tx batch; do
			declare -A hot=()
			for side in idem hand; do
				empty_tables
				case $shape in
				tx) what='one pair per transaction' statements=("CALL bench.${side}_tx_us(20000, $bytes)") ;;
				batch)
					what='batches of 1000'
					mapfile -t statements < <(yes "SELECT bench.${side}_batch_us(1000, $bytes)" | head -n 20)
					;;
				esac
				hot[$side]=$(hot_share bench "$side.keys" "${statements[@]}")
			done
			report "HOT finishes, $what, $bytes byte results; hand-written" % \
				"$(calc "100 * ${hot[idem]}")" "$(calc "100 * ${hot[hand]}")" '' ''
		done
	done
}
