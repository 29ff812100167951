# shellcheck shell=bash disable=SC2154
# test/bench/layout.sh: the experiment behind the layout of idem.keys.
#
# Each layout is a database of its own, so that the layouts take turns.  A pair
# is a transaction; there are ten rounds, after which each table holds
# BENCH_PAIRS keys.  A tenth of them, claimed first, expires after one hour
# ("run": they stand together); another tenth, scattered over the rest, after two
# ("scattered").  full_page_writes is off, so that the WAL does not depend on
# when the last checkpoint was.

layouts=(btree/50 btree/70 btree/80 btree/90 btree/95 btree/100 brin/70 none/70)

# layout_db LAYOUT: name of its database
layout_db() { printf 'layout_%s' "${1/\//_}"; }

# make_layout LAYOUT
make_layout() {
	local db index=${1%/*} fillfactor=${1#*/}
	db=$(layout_db "$1")
	admin postgres -c "CREATE DATABASE $db TEMPLATE bench"
	admin "$db" -f "$IDEM_SRC/test/bench/layout.sql"
	admin "$db" -c "ALTER TABLE idem.keys SET (fillfactor = $fillfactor)" \
		-c 'DROP INDEX idem.keys_expires_at_idx'
	if [[ $index != none ]]; then
		admin "$db" -c "CREATE INDEX keys_expires_at_idx ON idem.keys USING $index (expires_at)"
	fi
}

# layout_round LAYOUT ROUND PAIRS >>$samples: time and WAL
layout_round() {
	local db before call
	db=$(layout_db "$1")
	call="CALL bench.layout_us($3, 1, '1 hour')"
	if (($2 > 1)); then
		call="CALL bench.layout_us($3, 9, '2 hours')"
	fi
	before=$(admin "$db" -c 'SELECT pg_current_wal_insert_lsn()')
	printf '%s %s\n' "time:$1" "$(measured "$db" -c "$call" -c 'SELECT pg_stat_force_next_flush()' | sed -n 1p)"
	printf '%s %s\n' "wal:$1" "$(admin "$db" -c "SELECT (pg_current_wal_insert_lsn() - '$before') / $3")"
}

# layout_finish LAYOUT >>$samples: what to know when all pairs are in, and cleanup
layout_finish() {
	local db
	db=$(layout_db "$1")
	printf '%s %s\n' "sizes:$1" "$(layout_sizes "$db")"
	admin "$db" -c 'VACUUM ANALYZE idem.keys'
	printf '%s %s\n' "run:$1" "$(layout_cleanup "$1" 5400)"
	printf '%s %s\n' "scattered:$1" "$(layout_cleanup "$1" 10800)"
	admin "$db" -c 'TRUNCATE idem.keys'
}

# layout_batch LAYOUT >>$samples: time and WAL of batches of 1000 in one transaction each
layout_batch() {
	local db calls
	db=$(layout_db "$1")
	mapfile -t calls < <(yes 'SELECT bench.idem_batch_us(1000, 30);' | head -n 20)
	printf '%s %s\n' "batchwal:$1" "$(calc "$(wal_of "$db" "${calls[*]}") / 20000")"
	printf '%s %s\n' "batch:$1" "$(measured "$db" -c 'SELECT bench.idem_batch_us(1000, 30)' \
		-c 'SELECT bench.idem_batch_us(5000, 30)' | sed -n 2p)"
}

# layout_one_tx LAYOUT >>$samples: pairs in one transaction
layout_one_tx() {
	printf '%s %s\n' "one:$1" "$(measured "$(layout_db "$1")" -c 'SELECT bench.idem_pair_us(500)' \
		-c 'SELECT bench.idem_pair_us(10000)' | sed -n 2p)"
}

# layout_sizes DATABASE: HOT share, MB of table, primary key and expiry index
layout_sizes() {
	admin "$1" -F ' ' -c "
		SELECT round(100.0 * n_tup_hot_upd / n_tup_upd, 1),
			   pg_table_size(relid) >> 20,
			   pg_relation_size('idem.keys_pkey') >> 20,
			   round(coalesce(pg_relation_size(to_regclass('idem.keys_expires_at_idx')), 0) / 1048576.0, 1)
		  FROM pg_stat_user_tables WHERE relid = 'idem.keys'::regclass"
}

# layout_cleanup LAYOUT OFFSET: microseconds per key
layout_cleanup() {
	local procedure=${1%/*}
	if [[ $procedure == btree ]]; then
		procedure=idem
	fi
	admin "$(layout_db "$1")" -c "SET idem.clock_offset = $2" -c "CALL bench.${procedure}_cleanup_us(1000)"
}

# layout_hot LAYOUT SHAPE BYTES: share of HOT finishes on an empty table, in percent
layout_hot() {
	local db statements=("CALL bench.idem_tx_us(20000, $3)")
	db=$(layout_db "$1")
	if [[ $2 == batch ]]; then
		mapfile -t statements < <(yes "SELECT bench.idem_batch_us(1000, $3)" | head -n 20)
	fi
	admin "$db" -c 'TRUNCATE idem.keys'
	calc "100 * $(hot_share "$db" idem.keys "${statements[@]}")" | xargs printf '%.0f'
}

# layout_line LAYOUT: a line of the table
layout_line() {
	local hot table_mb pkey_mb expiry_mb
	read -r _ hot table_mb pkey_mb expiry_mb < <(grep "^sizes:$1 " "$samples")
	printf '%s|%s|%.1f|%.1f|%.1f|%.0f|%.0f|%s|%s|%s|%s|%s|%s|%s|%.1f|%.1f\n' "${1%/*}" "${1#*/}" \
		"$(median "time:$1")" "$(median "one:$1")" "$(median "batch:$1")" \
		"$(median "wal:$1")" "$(median "batchwal:$1")" "$hot" \
		"$(layout_hot "$1" tx 1000)" "$(layout_hot "$1" batch 30)" "$(layout_hot "$1" batch 1000)" \
		"$table_mb" "$pkey_mb" "$expiry_mb" "$(median "run:$1")" "$(median "scattered:$1")"
}

# layout_turns ROUNDS FUNCTION [ARGUMENT ...] >>$samples: all layouts in turn
layout_turns() {
	local rounds=$1 function=$2 round layout
	shift 2
	for ((round = 1; round <= rounds; round++)); do
		idem_say "$function $round of $rounds"
		for layout in "${layouts[@]}"; do
			"$function" "$layout" "$round" "$@"
		done
	done
}

line_layout() {
	local layout
	setting full_page_writes off
	{
		layout_turns 1 make_layout
		admin postgres -c CHECKPOINT
		layout_turns 10 layout_round $((${BENCH_PAIRS:-1000000} / 10))
		layout_turns 1 layout_finish
		layout_turns 9 layout_one_tx
		layout_turns 5 layout_batch
	} >"$samples"
	{
		printf '%s|' index 'fill' 'us/pair own tx' 'one tx' batch 'WAL B/pair own tx' batch \
			'HOT % own tx 30 B' '1000 B' 'batch 30 B' '1000 B' \
			'MB table' pkey expiry 'cleanup us/key run'
		printf 'scattered\n'
		for layout in "${layouts[@]}"; do
			layout_line "$layout"
		done
	} | columns
	setting full_page_writes on
}
