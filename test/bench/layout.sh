# shellcheck shell=bash disable=SC2154
# test/bench/layout.sh: the experiments behind the layout of idem.keys and of idem.jobs.
#
# layout, for idem.keys:
#
# Each layout is a database of its own, so that the layouts take turns.  A pair
# is a transaction; there are BENCH_LAYOUT_ROUNDS rounds, after which each table holds
# BENCH_PAIRS keys.  Those of the first round expire after one hour ("run": they
# stand together); a ninth of the others, scattered, after two ("scattered").  full_page_writes is
# off, so that the WAL does not depend on when the last checkpoint was.  Each layout is compared with the one that idem has.

layouts=(btree/70 btree/50 btree/80 btree/90 btree/100 brin/70 none/70)

# layout_db LAYOUT: name of its database
layout_db() { printf 'layout_%s' "${1/\//_}"; }

# index_of DATABASE COLUMN: the index of idem.keys that begins with it
index_of() {
	admin "$1" -c "
		SELECT i.indexrelid::regclass FROM pg_index AS i
		  JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
		 WHERE i.indrelid = 'idem.keys'::regclass AND a.attname = '$2'"
}

# make_layout LAYOUT
make_layout() {
	local db index=${1%/*} fillfactor=${1#*/}
	db=$(layout_db "$1")
	admin postgres -c "CREATE DATABASE $db TEMPLATE bench"
	admin "$db" -c "ALTER TABLE idem.keys SET (fillfactor = $fillfactor)" \
		-c "DROP INDEX $(index_of "$db" expires_at)"
	if [[ $index != none ]]; then
		admin "$db" -c "CREATE INDEX keys_expires_at_idx ON idem.keys USING $index (expires_at)"
	fi
}

# layout_round LAYOUT ROUND >>$samples: time and WAL
layout_round() {
	local db before call n=$((BENCH_PAIRS / BENCH_LAYOUT_ROUNDS))
	db=$(layout_db "$1")
	call="CALL bench.layout_us($n, 1, '1 hour')"
	if (($2 > 1)); then
		call="CALL bench.layout_us($n, 9, '2 hours')"
	fi
	before=$(admin "$db" -c 'SELECT pg_current_wal_insert_lsn()')
	sample "time:$1" measured "$db" -c 'SELECT pg_stat_force_next_flush()' -c "$call"
	sample "wal:$1" admin "$db" -c "SELECT (pg_current_wal_insert_lsn() - '$before') / $n"
}

# layout_finish LAYOUT >>$samples: what to know when all pairs are in, and cleanup
layout_finish() {
	local db
	db=$(layout_db "$1")
	layout_sizes "$db" | sed "s|^[a-z]*|&:$1|"
	admin "$db" -c 'VACUUM ANALYZE idem.keys'
	sample "run:$1" layout_cleanup "$1" 5400
	sample "scattered:$1" layout_cleanup "$1" 10800
	admin "$db" -c 'TRUNCATE idem.keys'
}

# layout_one_tx LAYOUT >>$samples: pairs in one transaction
layout_one_tx() {
	sample "one:$1" measured "$(layout_db "$1")" -c "SELECT bench.idem_pair_us($((BENCH_LOOP / 20)))" \
		-c "SELECT bench.idem_pair_us($BENCH_LOOP)"
}

# layout_sizes DATABASE: share of HOT, and MB of the table and of its indexes
layout_sizes() {
	admin "$1" -F ' ' -c "
		SELECT v.* FROM pg_stat_user_tables,
			LATERAL (VALUES ('hot', 100.0 * n_tup_hot_upd / n_tup_upd),
							('table', pg_table_size(relid) / 1048576.0),
							('indexes', pg_indexes_size(relid) / 1048576.0)) AS v
		 WHERE relid = 'idem.keys'::regclass"
}

# layout_cleanup LAYOUT OFFSET: microseconds per key
layout_cleanup() {
	local procedure=${1%/*}
	if [[ $procedure == btree ]]; then
		procedure=idem
	fi
	admin "$(layout_db "$1")" -c 'SET bench.clock = time' -c "SET idem.clock_offset = $2" -c "CALL bench.${procedure}_cleanup_us(1000)"
}

# layout_hot LAYOUT >>$samples: share of HOT finishes on an empty table, in percent, with large
# results and in batches
layout_hot() {
	local db statements
	db=$(layout_db "$1")
	admin "$db" -c 'TRUNCATE idem.keys'
	sample "hot1000:$1" hot_share "$db" idem.keys "CALL bench.idem_tx_us($BENCH_WAL, 1000)"
	admin "$db" -c 'TRUNCATE idem.keys'
	mapfile -t statements < <(yes 'SELECT bench.idem_batch_us(1000, 30)' | head -n $((1 + BENCH_WAL / 1000)))
	sample "hotbatch:$1" hot_share "$db" idem.keys "${statements[@]}"
}

# layout_turns ROUNDS FUNCTION >>$samples: all layouts in turn
layout_turns() {
	local round layout
	for ((round = 1; round <= $1; round++)); do
		idem_say "$2 $round of $1"
		for layout in "${layouts[@]}"; do
			"$2" "$layout" "$round"
		done
	done
}

# compare_layout LAYOUT: with the first one
compare_layout() {
	local id=${1/\//_} what="index on the expiry: ${1%/*}, fill factor ${1#*/}" ours=${layouts[0]} other
	other="${ours%/*}, ${ours#*/}"
	report "${id}_hot" "$what: HOT finishes, results of 30 bytes" 'of 1000 bytes' % "$(median "hot:$1")" "$(median "hot1000:$1")" '' ''
	report "${id}_batch" "$what: HOT finishes in batches of 1000" '' % "$(median "hotbatch:$1")" '' '' ''
	[[ $1 != "$ours" ]] || return 0
	compare "${id}_time" "$what: claim + finish + COMMIT" "$other" us "time:$1" "time:$ours"
	compare "${id}_one" "$what: claim + finish in one transaction" "$other" us "one:$1" "one:$ours"
	compare "${id}_wal" "$what: WAL of a pair" "$other" B "wal:$1" "wal:$ours"
	compare "${id}_table" "$what: table with $BENCH_PAIRS keys" "$other" MB "table:$1" "table:$ours"
	compare "${id}_indexes" "$what: its indexes" "$other" MB "indexes:$1" "indexes:$ours"
	compare "${id}_run" "$what: cleanup of the oldest keys" "$other" us "run:$1" "run:$ours"
	compare "${id}_scattered" "$what: cleanup of every tenth key" "$other" us "scattered:$1" "scattered:$ours"
}

line_layout() {
	local layout
	setting full_page_writes off
	{
		layout_turns 1 make_layout
		admin postgres -c CHECKPOINT
		layout_turns "$BENCH_LAYOUT_ROUNDS" layout_round
		layout_turns 1 layout_finish
		layout_turns "$(((BENCH_ROUNDS + 1) / 2))" layout_one_tx
		layout_turns 1 layout_hot
	} >"$samples"
	for layout in "${layouts[@]}"; do
		compare_layout "$layout"
	done
}

# jobs_layout: the fill factor of idem.jobs, 100 jobs at a time.
job_layouts=(40 30 50 70)

# job_layout_round FILLFACTOR >>$samples: enqueue, then fetch
job_layout_round() {
	local db=jobs_$1
	admin postgres -c "CREATE DATABASE $db TEMPLATE bench"
	admin "$db" -c "ALTER TABLE idem.jobs SET (fillfactor = $1)"
	job_costs "$db" "$1" "idem_fetch_100($BENCH_WAL)"
	sample "$1_table" admin "$db" -c "SELECT pg_relation_size('idem.jobs') / 1048576.0"
	admin postgres -c "DROP DATABASE $db"
}

line_jobs_layout() {
	local round fillfactor ours=${job_layouts[0]} what
	setting full_page_writes off
	for ((round = 0; round < BENCH_DRAIN_ROUNDS; round++)); do
		for fillfactor in "${job_layouts[@]}"; do
			job_layout_round "$fillfactor"
		done
	done >"$samples"
	for fillfactor in "${job_layouts[@]:1}"; do
		what="fill factor $fillfactor, 100 jobs at a time"
		compare "${fillfactor}_time" "$what: fetch of a job" "fill factor $ours" us "${fillfactor}_fetch_us" "${ours}_fetch_us"
		compare "${fillfactor}_wal" "$what: WAL of a fetch" "fill factor $ours" B "${fillfactor}_fetch_wal" "${ours}_fetch_wal"
		compare "${fillfactor}_table" "$what: table with $BENCH_WAL jobs" "fill factor $ours" MB "${fillfactor}_table" "${ours}_table"
	done
}
