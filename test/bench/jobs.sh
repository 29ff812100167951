# shellcheck shell=bash disable=SC2154
# test/bench/jobs.sh: the lines of jobs.  What is written by hand is in jobs.sql.

# empty_jobs [DATABASE]
empty_jobs() {
	admin "${1:-bench}" -c 'TRUNCATE idem.jobs, idem.job_keys, hand.jobs, bench.job_keys' -c CHECKPOINT
}

# job_costs DATABASE PREFIX CALL >>$samples: what the procedure says, each name with PREFIX
job_costs() { measured "$1" -c "CALL bench.$3" | sed -n "s/^./$2_&/p"; }

# What a job writes to WAL, and what a row per key would add to it.
line_jobs_wal() {
	local side round name count=10000 base
	setting full_page_writes off
	: >"$samples"
	for round in 1 2 3; do
		for side in idem hand; do
			for name in leased in_tx duplicate; do
				empty_jobs
				job_costs bench "${side}_$name" "${side}_$name($count)" >>"$samples"
			done
		done
	done
	for round in 1 2 3 4 5 6 7; do
		for name in hashed:false,true plain:false,false keyed:true,false; do
			empty_jobs
			job_costs bench "${name%:*}" "idem_enqueued($count, ${name#*:})" >>"$samples"
		done
	done
	base=$(median idem_leased_job_wal)
	report 'WAL of a keyed job, enqueue + fetch with a lease + complete; the goal' B "$base" 850 \
		"$(calc "$base / 850")" '<= 1' "$(spread idem_leased_job_wal)"
	compare '  the same; hand-written' B idem_leased_job_wal hand_leased_job_wal ''
	for name in enqueue fetch complete; do
		compare "  $name; hand-written" B "idem_leased_${name}_wal" "hand_leased_${name}_wal" ''
	done
	compare 'WAL of a keyed job, fetch + complete in one transaction; hand-written' B \
		idem_in_tx_job_wal hand_in_tx_job_wal ''
	compare '  fetch + complete; hand-written' B idem_in_tx_drain_wal hand_in_tx_drain_wal ''
	compare 'WAL of a duplicate that is absorbed; ON CONFLICT DO NOTHING' B \
		idem_duplicate_duplicate_wal hand_duplicate_duplicate_wal ''
	for name in wal:B us:us; do
		report "the index on the hash of the key; a row per key by SQL, in ${name#*:}" "${name#*:}" \
			"$(calc "$(median "hashed_enqueue_${name%:*}") - $(median "plain_enqueue_${name%:*}")")" \
			"$(calc "$(median "keyed_enqueue_${name%:*}") - $(median "plain_enqueue_${name%:*}") \
				+ $(median "keyed_delete_${name%:*}") - $(median "plain_delete_${name%:*}")")" '' '' \
			"$(spread {hashed,plain,keyed}"_enqueue_${name%:*}")"
	done
	report_hot 'one by one' idem_leased hand_leased 10000 '>= 1'
	report_hot '100 at a time' idem_fetch_100 hand_fetch_100 10000 ''
	setting full_page_writes on
}

# report_hot HOW IDEM HAND COUNT GOAL: share of HOT among the updates by fetch
report_hot() {
	local idem hand
	empty_jobs
	idem=$(hot_share bench idem.jobs "CALL bench.$2($4)")
	hand=$(hot_share bench hand.jobs "CALL bench.$3($4)")
	report "HOT fetches, $1; hand-written" % "$(calc "100 * $idem")" "$(calc "100 * $hand")" \
		"$([[ -z $5 ]] || printf '%s' "$idem")" "$5"
}

# The statements of a worker, for pgbench.  What it needs of a job is its number, its
# payload, and what fences the completion.
hand_next="FROM hand.jobs WHERE queue = 'bench' AND state = 'waiting' AND run_at <= now() ORDER BY priority, run_at, id"
hand_lease="UPDATE hand.jobs SET state = 'running', attempt = attempt + 1, leased_until = now() + interval '1 minute'"
idem_complete='SELECT idem_complete(:job_id, :job_token);'
idem_complete_many="SELECT job_id, status FROM idem_complete_many(:job_ids, :job_tokens) WHERE status <> 'completed';"
hand_complete_many='DELETE FROM hand.jobs AS j USING unnest(CAST(:job_ids AS bigint[]), CAST(:job_attempts AS int[])) AS u (id, attempt) WHERE j.id = u.id AND j.attempt = u.attempt;'

# fetch_one LEASE, fetch_many LEASE
fetch_one() { printf '%s' "SELECT job_id AS id, token, payload FROM idem_fetch('bench', 1, $1) \\gset job_"; }
fetch_many() {
	printf '%s' "SELECT array_agg(job_id) AS ids, array_agg(token) AS tokens, array_agg(payload) AS payloads \
		FROM idem_fetch('bench', 100, $1) \\gset job_"
}

lines idem_enqueue "SELECT (idem_enqueue('bench', :payload, :k)).outcome;"
lines idem_enqueue_from "SELECT job_id, outcome FROM idem_enqueue('bench', :payload, :k);"
lines hand_enqueue "INSERT INTO hand.jobs (queue, key, payload) VALUES ('bench', :k, :payload) \
	ON CONFLICT (queue, key) WHERE state = 'waiting' DO NOTHING;"

lines idem_leased "$(fetch_one "'1 min'")" "$idem_complete"
lines hand_leased "$hand_lease WHERE id = (SELECT id $hand_next LIMIT 1 FOR UPDATE SKIP LOCKED) \
	RETURNING id, attempt, payload \\gset job_" \
	'DELETE FROM hand.jobs WHERE id = :job_id AND attempt = :job_attempt;'
lines idem_in_tx 'BEGIN;' "$(fetch_one NULL)" "$idem_complete" 'COMMIT;'
lines hand_in_tx 'BEGIN;' "SELECT id, payload $hand_next LIMIT 1 FOR UPDATE SKIP LOCKED \\gset job_" \
	'DELETE FROM hand.jobs WHERE id = :job_id;' 'COMMIT;'

lines idem_leased_100 "$(fetch_many "'1 min'")" "$idem_complete_many"
lines hand_leased_100 "WITH j AS ($hand_lease WHERE id = ANY (ARRAY(SELECT id $hand_next LIMIT 100 FOR UPDATE SKIP LOCKED)) \
	RETURNING id, attempt, payload) \
	SELECT array_agg(id) AS ids, array_agg(attempt) AS attempts, array_agg(payload) AS payloads FROM j \\gset job_" \
	"$hand_complete_many"
lines idem_in_tx_100 'BEGIN;' "$(fetch_many NULL)" "$idem_complete_many" 'COMMIT;'
lines hand_in_tx_100 'BEGIN;' "WITH j AS (SELECT id, payload $hand_next LIMIT 100 FOR UPDATE SKIP LOCKED) \
	SELECT array_agg(id) AS ids, array_agg(payload) AS payloads FROM j \\gset job_" \
	'DELETE FROM hand.jobs WHERE id = ANY (CAST(:job_ids AS bigint[]));' 'COMMIT;'

# drain_us SIDE NAME COUNT >>$samples: microseconds of a transaction that leaves nothing
drain_us() {
	admin bench -c "VACUUM ANALYZE $1.jobs"
	printf '%s %s\n' "${1}_$2" "$(pgbench_us "${1}_$2" 1 -t "$3")"
	[[ $(admin bench -c "SELECT count(*) FROM $1.jobs") == 0 ]] || idem_die "bench: ${1}_$2 has left jobs"
}

# job_rates SIDE COUNT >>$samples: microseconds of a transaction, or of a job from PL/pgSQL
job_rates() {
	local name
	empty_jobs
	printf '%s %s\n' "${1}_enqueue" "$(pgbench_us "${1}_enqueue" 1 -t "$2")"
	drain_us "$1" leased "$2"
	measured bench -c "CALL bench.${1}_fill($2)"
	drain_us "$1" in_tx "$2"
	for name in leased_100 in_tx_100; do
		measured bench -c "CALL bench.${1}_fill($((4 * $2)), 100)"
		drain_us "$1" "$name" "$((4 * $2 / 100))"
	done
	for name in 100 1000; do
		empty_jobs
		printf '%s %s\n' "${1}_bulk_$name" "$(measured bench -c "CALL bench.${1}_bulk_us($((4 * $2)), $name)")"
	done
}

# compare_rates WHAT NAME [JOBS]: jobs per second, JOBS per transaction
compare_rates() {
	report "$1" /s "$(calc "${3:-1} * 1e6 / $(median "idem_$2")")" "$(calc "${3:-1} * 1e6 / $(median "hand_$2")")" \
		"$(calc "$(median "hand_$2") / $(median "idem_$2")")" '' "$(spread "idem_$2" "hand_$2")"
}

# Jobs per second of one client.
line_jobs_rate() {
	local round count=5000
	pin on
	: >"$samples"
	for round in 0 1 2 3 4 5; do
		{
			job_rates idem "$count"
			printf '%s %s\n' idem_enqueue_from "$(pgbench_us idem_enqueue_from 1 -t "$count")"
			job_rates hand "$count"
		} >"$samples.round"
		((round == 0)) || cat "$samples.round" >>"$samples"
	done
	compare_rates 'enqueue one by one over a socket; hand-written' enqueue
	report '  with idem_enqueue() in FROM; hand-written' /s \
		"$(calc "1e6 / $(median idem_enqueue_from)")" "$(calc "1e6 / $(median hand_enqueue)")" \
		"$(calc "$(median hand_enqueue) / $(median idem_enqueue_from)")" '' "$(spread idem_enqueue_from hand_enqueue)"
	compare_rates 'enqueue 100 at a time from PL/pgSQL; hand-written' bulk_100
	compare_rates 'enqueue 1000 at a time from PL/pgSQL; hand-written' bulk_1000
	compare_rates 'fetch with a lease + complete over a socket; hand-written' leased
	compare_rates 'fetch + complete in one transaction over a socket; hand-written' in_tx
	compare_rates 'fetch with a lease + complete, 100 at a time; hand-written' leased_100 100
	compare_rates 'fetch + complete in one transaction, 100 at a time; hand-written' in_tx_100 100
	pin off
}

# drain_round DATABASE NAME COUNT >>$samples: what a job costs in a new session, the first
# one of it (NAME_opening), and later
drain_round() {
	admin "$1" -c 'VACUUM idem.jobs'
	job_costs "$1" "$2" 'idem_drain_session(50)'
	printf '%s %s\n' "$2" "$(measured "$1" -c 'CALL bench.idem_drain_us(50)' -c "CALL bench.idem_drain_us($3)" | sed -n '$p')"
}

# refill DATABASE WAITING [LEASED]: this many jobs in a new table, the leased ones first
refill() {
	empty_jobs "$1"
	if ((${3:-0} > 0)); then
		measured "$1" -c "CALL bench.idem_fill($3)" -c "SELECT count(*) FROM idem_fetch('bench', $3, '1 day')" >/dev/null
	fi
	measured "$1" -c "CALL bench.idem_fill($2)"
}

# Fetch with many jobs behind, and with many leased ones before.
line_jobs_depth() {
	local count=${BENCH_JOBS:-1000000} round
	admin postgres -c 'CREATE DATABASE small TEMPLATE bench' -c 'CREATE DATABASE large TEMPLATE bench'
	refill large "$count"
	for round in 1 2 3 4 5 6 7 8 9; do
		refill small 1000
		drain_round small few 800
		drain_round large many 800
	done >"$samples"
	compare "fetch + complete with $count jobs that wait; with 1000" us many few ''
	compare '  the first one of a session' us many_opening few_opening ''
	for round in 1 2 3 4 5 6 7; do
		refill small 5000
		drain_round small none 4800
		refill large 5000 1000
		drain_round large leased 4800
	done >"$samples"
	compare 'fetch + complete with 1000 leased jobs before; with none' us leased none ''
	compare '  the first one of a session' us leased_opening none_opening ''
	admin postgres -c 'DROP DATABASE small' -c 'DROP DATABASE large'
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

# xmin_round NAME COUNT >>$samples: drain, then new sessions, each with jobs left to fetch
xmin_round() {
	local i
	job_costs bench "$1" "idem_drain_ends($2)"
	for ((i = 0; i < 3; i++)); do
		job_costs bench "$1" 'idem_drain_session(1000)'
	done
}

# Fetch while VACUUM cannot remove the entries of finished jobs, because of an old snapshot;
# and without such a snapshot, while no VACUUM runs (autovacuum is off).
line_jobs_xmin() {
	local count=${BENCH_DRAIN:-100000} round
	for round in 1 2 3; do
		refill bench "$((count + 5000))"
		hold_snapshot bench
		xmin_round pinned "$count"
		release_snapshot
		refill bench "$((count + 5000))"
		xmin_round free "$count"
	done >"$samples"
	compare "fetch + complete under an old snapshot, last tenth of $count; first tenth" us pinned_last pinned_first ''
	compare '  the first one of a session; later ones' us pinned_opening pinned_later ''
	compare '  without the old snapshot and without VACUUM, last tenth; first tenth' us free_last free_first ''
	compare '  the first one of a session; later ones' us free_opening free_later ''
	empty_jobs
}

# Other job queues with their own libraries: these versions.  They need a later Node.js
# than Debian has, which comes the same way.
peer_packages=(pg@8.23.1 pg-boss@12.35.0 graphile-worker@0.18.0)
peer_node=24.21.0

# install_peers: into $IDEM_TMP/peers; prints the node to use
install_peers() {
	local dir=$IDEM_TMP/peers arch node
	"$IDEM_ROOT/test/setup" peers || return
	node=$(command -v node) || return
	idem_run mkdir -p "$dir"
	idem_run cp "$IDEM_SRC/test/bench/peers.mjs" "$dir"
	if ! "$node" -e 'const v = process.versions.node.split("."); process.exit(v[0] > 22 || (v[0] == 22 && v[1] >= 18) ? 0 : 1)'; then
		case $(uname -m) in
		x86_64) arch=x64 ;;
		aarch64) arch=arm64 ;;
		*) return 1 ;;
		esac
		peer_packages+=("node-linux-$arch@$peer_node")
		node=$dir/node_modules/node-linux-$arch/bin/node
	fi
	idem_run npm install --prefix "$dir" --ignore-scripts --no-save --no-audit --no-fund --no-update-notifier \
		--fetch-retries=1 --fetch-retry-mintimeout=1000 --loglevel=error "${peer_packages[@]}" >"$IDEM_TMP/npm.log" 2>&1 || {
		cat "$IDEM_TMP/npm.log" >&2
		return 1
	}
	printf '%s\n' "$node"
}

# peer NODE SYSTEM CLIENTS BATCH JOBS >>$samples
peer() {
	empty_jobs peers
	admin peers -c 'DROP SCHEMA IF EXISTS pgboss CASCADE' -c 'DROP SCHEMA IF EXISTS graphile_worker CASCADE' 2>/dev/null
	idem_run env PGUSER=bench PGDATABASE=peers NO_LOG_SUCCESS=1 timeout 120 "$1" "$IDEM_TMP/peers/peers.mjs" "${@:2}" |
		sed "s/^/$2_/"
}

# compare_peers CLIENTS BATCH
compare_peers() {
	local system name goal step how='one by one'
	[[ $2 == 1 ]] || how="$2 at a time"
	for system in pgboss:'pg-boss':3 graphile:graphile-worker:1.5; do
		IFS=: read -r system name goal <<<"$system"
		report "jobs/s, keyed, enqueued and drained, $1 client(s), $how; $name" /s \
			"$(calc "1 / (1 / $(median idem_enqueue) + 1 / $(median idem_drain))")" \
			"$(calc "1 / (1 / $(median "${system}_enqueue") + 1 / $(median "${system}_drain"))")" \
			"$(calc "(1 / $(median "${system}_enqueue") + 1 / $(median "${system}_drain")) / (1 / $(median idem_enqueue) + 1 / $(median idem_drain))")" \
			">= $goal" "$(spread idem_enqueue idem_drain "${system}_enqueue" "${system}_drain")"
		for step in enqueue drain; do
			compare "  $step; $name" /s "idem_$step" "${system}_$step" ''
		done
		if grep -q '^idem_cpu ' "$samples"; then
			compare "  CPU of a job, client and server; $name" us idem_cpu "${system}_cpu" ''
		fi
		compare "  WAL of a job; $name" B idem_wal "${system}_wal" ''
	done
}

# peer_rounds NODE CLIENTS BATCH >$samples: all systems in turn
peer_rounds() {
	local round system jobs=$((${BENCH_PEER_JOBS:-3000} * ($3 > 1 ? 10 : 1)))
	for round in 1 2 3; do
		for system in idem pgboss graphile; do
			peer "$1" "$system" "$2" "$3" "$jobs" || return
		done
	done >"$samples"
}

# idem against other queues: the same number of connections from one Node.js process,
# the same batch, an empty handler.
line_jobs_peers() {
	local node clients batch
	if ! node=$(install_peers); then
		idem_say 'skipped: the libraries of the other queues cannot be installed'
		return 0
	fi
	admin postgres -c 'CREATE DATABASE peers TEMPLATE bench OWNER bench'
	setting full_page_writes off
	for clients in 1 4; do
		for batch in 1 100; do
			if peer_rounds "$node" "$clients" "$batch"; then
				compare_peers "$clients" "$batch"
			else
				idem_say "skipped: $clients client(s), batch of $batch"
			fi
		done
	done
	setting full_page_writes on
	admin postgres -c 'DROP DATABASE peers WITH (FORCE)'
}
