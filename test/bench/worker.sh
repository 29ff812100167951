# shellcheck shell=bash disable=SC2154
# test/bench/worker.sh: the lines of the background worker and of the counters.
#
# The server of all lines preloads idem, with idem.cleanup = off; the worker works only in
# the databases of this file where that is switched on.

# ask STATEMENT: every tenth of a second until it is true
ask() {
	until [[ $(admin bench -c 'SELECT pg_sleep(0.1)' -c "$1" | sed -n '$p') == t ]]; do :; done
}

# make_expired idem|hand: the database expired_idem or expired_hand to be copied, where that side has
# keys that expired an hour ago, and no others
make_expired() {
	[[ -z $(admin postgres -c "SELECT 1 FROM pg_database WHERE datname = 'expired_$1'") ]] || return 0
	admin postgres -c "CREATE DATABASE expired_$1 TEMPLATE bench"
	admin "expired_$1" -c 'TRUNCATE idem.keys, hand.keys' -c 'SET idem.clock_offset = -90000' \
		-c 'SET ROLE bench' -c "CALL bench.$1_load($BENCH_EXPIRED)"
	admin "expired_$1" -c "VACUUM ANALYZE $1.keys"
}

# copy_expired idem|hand DATABASE: a copy of that, in shared buffers
copy_expired() {
	make_expired "$1"
	admin postgres -c "CREATE DATABASE $2 TEMPLATE expired_$1 STRATEGY file_copy"
	admin "$2" -c "SELECT count(*) FROM $1.keys" -c "SELECT bench.touch('$1.keys')" >/dev/null
}

# switch_on DATABASE: the worker begins there
switch_on() {
	admin postgres -c "ALTER DATABASE $1 SET idem.cleanup = on" -c 'SELECT pg_reload_conf()' >/dev/null
}

# progress COLUMNS DATABASE
progress() { admin bench -F ' ' -c "SELECT $1 FROM idem.cleanup_progress WHERE datname = '$2'"; }

# removal NAME DATABASE-SIDE PROCEDURE >>$samples: microseconds of a key
removal() {
	copy_expired "$2" rate
	sample "$1" admin rate -c 'SET bench.clock = time' -c "CALL bench.$3(1000)"
	admin postgres -c 'DROP DATABASE rate'
}

# worker_removal COUNT >>$samples: the same of the worker while it works, and seconds with pauses
worker_removal() {
	copy_expired idem rate
	switch_on rate
	ask "SELECT coalesce((SELECT last_finished_at >= started_at FROM idem.cleanup_progress WHERE datname = 'rate'), false)"
	[[ $(progress removed rate) == "$1" ]] || idem_die "bench: the worker has not removed $1 keys"
	progress "'worker', 1e6 / rows_per_second" rate
	progress "'took', extract(epoch FROM last_finished_at - started_at)" rate
	admin postgres -c 'DROP DATABASE rate'
}

# The rate of the worker, of idem_cleanup() in a loop, and of DELETE.  The clock is the time of
# day, because the worker reports no other one.  Without full page images, which are the same for all.
line_worker_rate() {
	local round
	setting full_page_writes off
	for ((round = 0; round < BENCH_RATE_ROUNDS; round++)); do
		removal hand hand hand_cleanup_us
		removal idem idem idem_cleanup_us
		removal hand_from hand hand_cleanup_from_us
		worker_removal "$BENCH_EXPIRED"
	done >"$samples"
	compare_rates cleanup "removal of $BENCH_EXPIRED expired keys by idem_cleanup(1000) in a loop" 'batched DELETE' idem hand '>= 3'
	compare_rates cleanup_from 'by idem_cleanup(1000) in a loop' 'DELETE that continues where it was' idem hand_from
	compare_rates worker 'by the worker, while it works' 'batched DELETE' worker hand '>= 1'
	compare_rates worker_from 'by the worker, while it works' 'DELETE that continues where it was' worker hand_from
	report_one took 'by the worker, with its pauses, from the first key to the last one' s took
}

# load_slice NAME DATABASE CLIENTS >>$samples: transactions per second, and microseconds of the
# slowest of a thousand.  All transactions count, as the worker disturbs some and not others.
load_slice() {
	local how
	read -ra how <<<"$BENCH_SLICE"
	pgbench_log "$2" idem "$3" "${how[@]}"
	printf '%s %s\n' "$1" "$(sed -n 's/^tps = \([0-9.]*\).*/\1/p' "$IDEM_TMP/pgbench.log")"
	awk -v name="$1" '{ v[NR] = $1 } END { print name "_slowest", v[int(NR * 0.999) + (NR < 1000)] }' "$IDEM_TMP/latency.txt"
}

# worker_slice CLIENTS >>$samples: the same beside the worker, and how many keys that removes in a
# second, while it works and with pauses
worker_slice() {
	local before after
	switch_on load
	ask "SELECT coalesce((SELECT removed > 0 FROM idem.cleanup_progress WHERE datname = 'load'), false)"
	read -ra before <<<"$(progress 'extract(epoch FROM clock_timestamp()), removed' load)"
	load_slice worker load "$1"
	read -ra after <<<"$(progress 'extract(epoch FROM clock_timestamp()), removed, last_finished_at IS NOT NULL, rows_per_second' load)"
	[[ ${after[2]} == f || $BENCH_SIZE != full ]] || idem_die 'bench: the backlog was gone too soon, take a larger BENCH_EXPIRED'
	printf 'removed %s\nworking %s\n' \
		"$(calc "(${after[1]} - ${before[1]}) / (${after[0]} - ${before[0]})")" "${after[3]}"
}

# load_round ROUND CLIENTS >>$samples: with a backlog while the worker is stopped, then beside the worker,
# and without a backlog, before that or after it in turn.  The worker has still more to do when
# its database is dropped.
load_round() {
	copy_expired idem load
	admin postgres -c 'CREATE DATABASE none TEMPLATE bench'
	(($1 % 2 == 1)) || load_slice none none "$2"
	load_slice stopped load "$2"
	worker_slice "$2"
	admin postgres -c 'DROP DATABASE load'
	(($1 % 2 == 0)) || load_slice none none "$2"
	admin postgres -c 'DROP DATABASE none'
}

# Claims beside the worker, with a backlog of expired keys.  Without full page images: after
# the copy of the database each page would have one, more of them in the larger table.
line_worker_load() {
	local clients round what
	setting full_page_writes off
	for clients in $BENCH_LOAD_CLIENTS; do
		for ((round = 0; round < BENCH_LOAD_ROUNDS; round++)); do
			load_round "$round" "$clients"
		done >"$samples"
		what="claim + finish over a socket, $clients clients, beside the worker with $BENCH_EXPIRED expired keys"
		compare "none_$clients" "$what" 'without a backlog' /s worker none '> 0.9'
		compare "stopped_$clients" "$what" 'with the backlog, the worker stopped' /s worker stopped
		compare "slowest_$clients" "the slowest of a thousand, $clients clients, beside the worker" 'without a backlog' us \
			worker_slowest none_slowest
		report "removed_$clients" "what the worker removes beside $clients clients while it works" 'with pauses' /s \
			"$(median working)" "$(median removed)" '' '' "$(spread_of removed)"
	done
}

# restart_with LIBRARIES: the server at $PGHOST preloads these
restart_with() {
	printf "shared_preload_libraries = '%s'\n" "$1" | idem_run tee -a "$PGHOST/postgresql.conf" >/dev/null
	idem_run pg_ctl -D "$PGHOST" -w -s -m fast -l "$PGHOST.log" restart
}

# start_plain: a second server in $plain, the same but without the library
start_plain() {
	local host=$PGHOST
	plain=$IDEM_TMP/plain
	idem_server_start "$plain" "${settings[@]}" "shared_preload_libraries = ''"
	make_template
	PGHOST=$host
}

# answers STATEMENT NAME ...: all these sessions at once; the mean of their answers
answers() {
	local name answer sum=
	for name in "${@:2}"; do
		printf '%s;\n' "$1" >&"${session_in[$name]}"
	done
	for name in "${@:2}"; do
		read -r answer <&"${session_out[$name]}" || idem_die "bench: no answer to $1"
		sum+="+ $answer"
	done
	calc "(0 $sum) / ($# - 1)"
}

# both_sides NAME STATEMENT CLIENT ... >>$samples: the statement, which returns a number, by these
# clients on both servers in turn, and the median of the ratio of the two.  Each takes a hundredth
# of a second, so a disturbance mostly hits both of a pair, or a few pairs of many.
both_sides() {
	local i name=$1 statement=$2 on off samples=$IDEM_TMP/both.txt
	shift 2
	for ((i = -BENCH_STATS_PAIRS / 8; i < BENCH_STATS_PAIRS; i++)); do
		# the sides take turns to be first
		if ((i % 2)); then
			on=$(answers "$statement" "${@/#/on}")
			off=$(answers "$statement" "${@/#/off}")
		else
			off=$(answers "$statement" "${@/#/off}")
			on=$(answers "$statement" "${@/#/on}")
		fi
		((i < 0)) || printf '%s\n' "on $on" "off $off" "ratio $(calc "$on / $off")"
	done >"$samples"
	printf '%s\n' "${name}_on $(median on)" "${name}_off $(median off)" "${name}_ratio $(median ratio)"
}

# stats_round PIN NAME CLIENT ... >>$samples: $counting against $other, by these clients
stats_round() {
	local pin=$1 name=$2 client
	shift 2
	PGHOST=$counting pin "$pin"
	PGHOST=$other pin "$pin"
	for client in "$@"; do
		open_session "$counting" bench "on$client"
		open_session "$other" bench "off$client"
	done
	both_sides "${name}pair" 'SELECT bench.idem_pair_us(1000)' "$@"
	both_sides "${name}replay" 'SELECT bench.idem_replay_us()' "$@"
	both_sides "${name}job" 'CALL bench.idem_job_us(200)' "$@"
	close_sessions "${@/#/on}" "${@/#/off}"
}

# renew SERVER LIBRARIES: with new tables, started anew: the same code runs some percent faster or
# slower depending on where it happens to lie in memory
renew() {
	local PGHOST=$1
	empty_tables
	empty_jobs
	measured bench -c 'CALL bench.finished(4000)'
	admin bench -c 'VACUUM ANALYZE'
	restart_with "$2"
}

# compare_stats NAME HOW AGAINST GOAL
compare_stats() {
	report_ratio "$1pair" "claim + finish from PL/pgSQL, $2" "$3" us "$1pair_on" "$1pair_off" "$1pair_ratio" "$4"
	report_ratio "$1replay" "replay, $2" "$3" us "$1replay_on" "$1replay_off" "$1replay_ratio" "$4"
	report_ratio "$1job" "enqueue + fetch + complete, $2" "$3" us "$1job_on" "$1job_off" "$1job_ratio" "$4"
}

# What counting costs: a server that preloads the library, which counts, beside one that
# does not; each of the two servers is the one or the other in turn.  Then neither of them
# counts: this shows the precision of the method.
line_stats_cost() {
	local round servers counting other
	start_plain
	servers=("$PGHOST" "$plain")
	for ((round = 0; round < BENCH_STATS_ROUNDS; round++)); do
		counting=${servers[round % 2]} other=${servers[1 - round % 2]}
		renew "$counting" idem
		renew "$other" ''
		stats_round one one_ 1
		stats_round all two_ 1 2
		renew "$counting" ''
		renew "$other" ''
		stats_round one none_ 1
	done >"$samples"
	compare_stats one_ 'counting' 'not counting' '< 1.03'
	compare_stats two_ 'two clients at once, counting' 'not counting' '< 1.03'
	compare_stats none_ 'neither side counting' 'the other server' ''
	idem_server_stop "$plain"
	restart_with idem
}
