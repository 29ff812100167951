# shellcheck shell=bash disable=SC2154
# test/bench/jobs.sh: the lines of jobs.  What is written by hand is in jobs.sql.

# job_costs DATABASE PREFIX CALL >>$samples: what the procedure says, each name with PREFIX
job_costs() { measured "$1" -c "CALL bench.$3" | sed -n "s/^./$2_&/p"; }

# jobs_wal_rounds >$samples
jobs_wal_rounds() {
	local round side name
	for ((round = 0; round < BENCH_WAL_ROUNDS; round++)); do
		for side in idem hand; do
			for name in leased in_tx duplicate; do
				empty_jobs
				job_costs bench "${side}_$name" "${side}_$name($BENCH_WAL)"
			done
		done
		for name in hashed:false,true plain:false,false keyed:true,false; do
			empty_jobs
			job_costs bench "${name%:*}" "idem_enqueued($BENCH_WAL, ${name#*:})"
		done
	done
}

# What a job writes to WAL, and what a row per key would add to it.
line_jobs_wal() {
	local name what='WAL of a keyed job'
	setting full_page_writes off
	jobs_wal_rounds >"$samples"
	derive goal 850 idem_leased_job_wal
	compare goal "$what, enqueue + fetch with a lease + complete" 'the goal' B idem_leased_job_wal goal '<= 1'
	compare leased "$what, enqueue + fetch with a lease + complete" 'the same by hand' B idem_leased_job_wal hand_leased_job_wal
	for name in enqueue fetch complete; do
		compare "$name" "$what, $name" 'by hand' B "idem_leased_${name}_wal" "hand_leased_${name}_wal"
	done
	compare in_tx "$what, fetch + complete in one transaction" 'the same by hand' B idem_in_tx_job_wal hand_in_tx_job_wal
	report duplicate 'WAL of a duplicate that is absorbed' 'ON CONFLICT DO NOTHING' B \
		"$(median idem_duplicate_duplicate_wal)" "$(median hand_duplicate_duplicate_wal)" '' '' "$(spread_of idem_duplicate_duplicate_wal)"
	for name in wal:B us:us; do
		derive "hash_${name%:*}" 'a - b' "hashed_enqueue_${name%:*}" "plain_enqueue_${name%:*}"
		derive "row_${name%:*}" 'a - b' "keyed_enqueue_${name%:*}" "plain_enqueue_${name%:*}"
		derive "gone_${name%:*}" 'a - b' "keyed_delete_${name%:*}" "plain_delete_${name%:*}"
		derive "rows_${name%:*}" 'a + b' "row_${name%:*}" "gone_${name%:*}"
		compare "hash_${name%:*}" "what the index on the hash of the key adds to a job" 'a row per key by SQL' "${name#*:}" \
			"hash_${name%:*}" "rows_${name%:*}"
	done
	report_hot hot_one 'one by one' idem_leased hand_leased '>= 1'
	report_hot hot_100 '100 at a time' idem_fetch_100 hand_fetch_100 ''
}

# report_hot ID HOW IDEM HAND GOAL: share of HOT among the updates by fetch
report_hot() {
	local idem hand
	empty_jobs
	idem=$(hot_share bench idem.jobs "CALL bench.$3($BENCH_WAL)")
	hand=$(hot_share bench hand.jobs "CALL bench.$4($BENCH_WAL)")
	report "$1" "HOT fetches, $2" 'by hand' % "$idem" "$hand" "$([[ -z $5 ]] || calc "$idem / 100")" "$5"
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

# rate_enqueue NAME, rate_drain NAME SIDE, rate_bulk NAME SIDE: microseconds of a transaction; of
# the last, by PL/pgSQL, of a job
rate_enqueue() {
	empty_jobs
	pgbench_us "$1" 1 -t "$BENCH_JOB_LOOP"
}

rate_drain() {
	local jobs=$BENCH_JOB_LOOP batch=1 us
	case $1 in
	*_100) jobs=$((4 * BENCH_JOB_LOOP)) batch=100 ;;
	esac
	empty_jobs
	measured bench -c "CALL bench.${2}_fill($jobs, $batch)"
	admin bench -c "VACUUM ANALYZE $2.jobs"
	us=$(pgbench_us "$1" 1 -t $((jobs / batch)))
	[[ $(admin bench -c "SELECT count(*) FROM $2.jobs") == 0 ]] || idem_die "bench: $1 has left jobs"
	printf '%s\n' "$us"
}

rate_bulk() {
	empty_jobs
	measured bench -c "CALL bench.${2}_bulk_us($((4 * BENCH_JOB_LOOP)), ${1##*_})"
}

# job_rates ROUND >>$samples: the sides in turn
job_rates() {
	local pair how name side order=(idem hand)
	(($1 % 2 == 0)) || order=(hand idem)
	for pair in enqueue:enqueue drain:leased drain:in_tx drain:leased_100 drain:in_tx_100 bulk:bulk_100 bulk:bulk_1000; do
		how=${pair%:*}
		for side in "${order[@]}"; do
			name=${side}_${pair#*:}
			sample "$name" "rate_$how" "$name" "$side"
		done
	done
	sample idem_enqueue_from rate_enqueue idem_enqueue_from
}

# Jobs per second of one client.
line_jobs_rate() {
	local round hand='the same by hand'
	pin one
	job_rates 0 >/dev/null
	for ((round = 0; round < BENCH_JOB_ROUNDS; round++)); do
		job_rates "$round"
	done >"$samples"
	compare_rates enqueue 'enqueue one by one over a socket, idem_enqueue in the SELECT list' "$hand" idem_enqueue hand_enqueue '>= 1.1'
	compare_rates enqueue_from 'enqueue one by one over a socket, idem_enqueue in FROM' "$hand" idem_enqueue_from hand_enqueue
	compare_rates leased 'fetch with a lease + complete over a socket' "$hand" idem_leased hand_leased '>= 1.4'
	compare_rates in_tx 'fetch + complete in one transaction over a socket' "$hand" idem_in_tx hand_in_tx
	compare_rates bulk_100 'enqueue 100 at a time from PL/pgSQL' "$hand" idem_bulk_100 hand_bulk_100 '>= 1.4'
	compare_rates bulk_1000 'enqueue 1000 at a time from PL/pgSQL' "$hand" idem_bulk_1000 hand_bulk_1000 '>= 1.4'
	compare_rates leased_100 'fetch with a lease + complete, 100 at a time' "$hand" idem_leased_100 hand_leased_100 '' 100
	compare_rates in_tx_100 'fetch + complete in one transaction, 100 at a time' "$hand" idem_in_tx_100 hand_in_tx_100 '' 100
}

# drain_round DATABASE NAME COUNT >>$samples: what a job costs in a new session, the first
# one of it (NAME_opening), and later
drain_round() {
	admin "$1" -c 'VACUUM idem.jobs'
	job_costs "$1" "$2" 'idem_drain_session(20)'
	sample "$2" measured "$1" -c 'CALL bench.idem_drain_us(20)' -c "CALL bench.idem_drain_us($3)"
}

# refill DATABASE WAITING [LEASED]: this many jobs in a new table, the leased ones first
refill() {
	empty_jobs "$1"
	if ((${3:-0} > 0)); then
		measured "$1" -c "CALL bench.idem_fill($3, 100)" -c "SELECT count(*) FROM idem_fetch('bench', $3, '1 day')" >/dev/null
	fi
	measured "$1" -c "CALL bench.idem_fill($2, 50)"
}

# Fetch with many jobs behind, and with many leased ones before.
line_jobs_depth() {
	local round few=1000 leased=1000 n=$((BENCH_JOB_LOOP * 8 / 10))
	((BENCH_JOBS > few)) || few=$((BENCH_JOBS / 2))
	admin postgres -c 'CREATE DATABASE small TEMPLATE bench' -c 'CREATE DATABASE large TEMPLATE bench'
	refill large "$BENCH_JOBS"
	for ((round = 0; round < BENCH_DEPTH_ROUNDS; round++)); do
		refill small "$few"
		drain_round small few $((few * 7 / 10))
		# as many are left as before
		drain_round large many $((few * 7 / 10))
		measured large -c "CALL bench.idem_fill($few, 100)"
	done >"$samples"
	compare waiting "fetch + complete with $BENCH_JOBS jobs that wait" "with $few" us many few
	compare waiting_first "the first one of a session, with $BENCH_JOBS jobs that wait" "with $few" us many_opening few_opening
	for ((round = 0; round < BENCH_DEPTH_ROUNDS; round++)); do
		refill small "$BENCH_JOB_LOOP"
		drain_round small none "$n"
		refill large "$BENCH_JOB_LOOP" "$leased"
		drain_round large leased "$n"
	done >"$samples"
	compare leased "fetch + complete with $leased leased jobs before" 'with none' us leased none
	compare leased_first "the first one of a session, with $leased leased jobs before" 'with none' us leased_opening none_opening
}

# xmin_round NAME >>$samples: drain, then new sessions, each with jobs left to fetch
xmin_round() {
	local i
	job_costs bench "$1" "idem_drain_ends($BENCH_DRAIN)"
	for ((i = 0; i < 3; i++)); do
		job_costs bench "$1" "idem_drain_session($((BENCH_DRAIN / 100)))"
	done
}

# Fetch while VACUUM cannot remove the entries of finished jobs, because of an old snapshot;
# and without such a snapshot, while no VACUUM runs (autovacuum is off).
line_jobs_xmin() {
	local round jobs=$((BENCH_DRAIN + BENCH_DRAIN / 20 + 100)) name what
	for ((round = 0; round < BENCH_DRAIN_ROUNDS; round++)); do
		refill bench "$jobs"
		hold_snapshot bench
		xmin_round pinned
		release_snapshot
		refill bench "$jobs"
		xmin_round free
	done >"$samples"
	for name in pinned free; do
		what='under an old snapshot'
		[[ $name == pinned ]] || what='without VACUUM'
		compare "${name}_last" "fetch + complete $what, last tenth of $BENCH_DRAIN" 'first tenth' us "${name}_last" "${name}_first"
		compare "${name}_opening" "the first one of a session, $what" 'later ones' us "${name}_opening" "${name}_later"
	done
}

# enqueues of one key, each open for 20 ms, or alone in its transaction
lines members_open 'BEGIN;' "SELECT (idem_enqueue('bench', :payload, 'hot')).outcome;" '\sleep 20 ms' 'COMMIT;'
lines members_alone "SELECT (idem_enqueue('bench', :payload, 'hot')).outcome;"

# members_of SCRIPT CLIENTS: members of multixacts written by an enqueue
members_of() {
	local count='SELECT next_multi_offset FROM pg_control_checkpoint()' before after
	before=$(admin postgres -c CHECKPOINT -c "$count")
	pgbench_log bench "$1" "$2" -t "$BENCH_MEMBERS"
	after=$(admin postgres -c CHECKPOINT -c "$count")
	calc "($after - $before) / ($2 * $BENCH_MEMBERS)"
}

# What enqueues of a key that a job absorbs write to pg_multixact/members.
line_jobs_members() {
	local round
	measured bench -c "SELECT idem_enqueue('bench', NULL, 'hot')" >/dev/null
	for ((round = 0; round < BENCH_WAL_ROUNDS; round++)); do
		sample open members_of members_open 32
		sample alone members_of members_alone 8
	done >"$samples"
	report_one open 'multixact members per enqueue of one key, 32 clients, transactions of 20 ms' '' open
	report_one alone 'multixact members per enqueue of one key, 8 clients, autocommit' '' alone
}
