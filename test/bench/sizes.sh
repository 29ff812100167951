# shellcheck shell=bash
# test/bench/sizes.sh: how much each line does.
#
# BENCH_SIZE says which column counts: full for figures that are published, quick for a look
# (make bench QUICK=1), tiny to see whether a line works (make test).  A variable that is
# set in the environment keeps its value.

# size VARIABLE FULL QUICK TINY
bench_sizes=()
size() {
	local value
	case ${BENCH_SIZE:=full} in
	full) value=$2 ;;
	quick) value=$3 ;;
	tiny) value=$4 ;;
	*) idem_die "bench: BENCH_SIZE is full, quick or tiny, not $BENCH_SIZE" ;;
	esac
	bench_sizes+=("$1")
	if [[ -n ${!1:-} ]]; then
		chosen_sizes+="$1=${!1} "
	else
		printf -v "$1" %s "$value"
	fi
}
chosen_sizes=

# shellcheck disable=SC2034	# the lines read them
{
	# loops in PL/pgSQL: rounds, operations of a round
	size BENCH_ROUNDS 21 5 1
	size BENCH_LOOP 10000 2000 20
	# pgbench over a socket: rounds, transactions of a round and client
	size BENCH_SOCKET_ROUNDS 25 5 1
	size BENCH_SOCKET 4000 1000 10
	# WAL: rounds, operations of a round
	size BENCH_WAL_ROUNDS 3 3 1
	size BENCH_WAL 20000 2000 100
	# counts: operations of each kind, rows before
	size BENCH_COUNT 500 100 20
	size BENCH_COUNT_ROWS 20000 5000 300
	# growth: live keys of the large and of the small table, rounds
	size BENCH_KEYS 10000000 200000 500
	size BENCH_FEW_KEYS 10000 10000 100
	size BENCH_GROWTH_ROUNDS 11 5 1
	# layout: pairs per layout, in so many rounds
	size BENCH_PAIRS 1000000 10000 200
	size BENCH_LAYOUT_ROUNDS 10 10 2
	# jobs_rate: rounds, jobs of a round; four times as many 100 and 1000 at a time
	size BENCH_JOB_ROUNDS 11 3 1
	size BENCH_JOB_LOOP 5000 1000 250
	# jobs_depth: waiting jobs of the large queue, rounds
	size BENCH_JOBS 1000000 20000 400
	size BENCH_DEPTH_ROUNDS 9 3 1
	# jobs_members: transactions of a client
	size BENCH_MEMBERS 200 50 3
	# jobs_xmin: jobs that are drained, rounds
	size BENCH_DRAIN 100000 10000 200
	size BENCH_DRAIN_ROUNDS 3 2 1
	# ended: ended jobs, blocked follow-ups, scheduled jobs; rounds of calls in one session, calls of
	# a round, new sessions
	size BENCH_ENDED 200000 30000 200
	size BENCH_BLOCKED 10000 3000 50
	size BENCH_SCHEDULED 5000 1500 50
	size BENCH_POLL_ROUNDS 80 15 1
	size BENCH_POLLS 10 10 2
	size BENCH_SESSIONS 40 10 1
	# jobs_peers: rounds, jobs of a round one by one; ten times as many in batches
	size BENCH_PEER_ROUNDS 7 1 1
	size BENCH_PEER_JOBS 3000 300 10
	# worker_load, worker_rate: expired keys, rounds, clients, how long pgbench runs
	size BENCH_EXPIRED 1000000 100000 1000
	size BENCH_LOAD_ROUNDS 10 1 1
	size BENCH_RATE_ROUNDS 9 2 1
	size BENCH_LOAD_CLIENTS '2 4' '2 4' 2
	size BENCH_SLICE '-T 3' '-T 1' '-t 20'
	# stats_cost: rounds, pairs of runs of a round
	size BENCH_STATS_ROUNDS 10 1 1
	size BENCH_STATS_PAIRS 40 10 2
	# wake_latency, wake_commits: rounds, workers
	size BENCH_WAKE_ROUNDS 7 3 1
	size BENCH_WAKE_WORKERS '1 16' '1 16' 3
	# wake_latency: jobs of a round, milliseconds between them, seconds between polls
	size BENCH_WAKE_JOBS 300 100 5
	size BENCH_WAKE_PAUSE 10 10 1
	size BENCH_WAKE_POLL 1 1 0.01
	# wake_commits: enqueuers, how long pgbench runs
	size BENCH_WAKE_CLIENTS '1 16 64' '1 16 64' 4
	size BENCH_WAKE_SLICE '-T 2' '-T 1' '-t 5'
	# wake_cost: rounds, enqueuers, how long pgbench runs, the commit to compare with (empty: none)
	size BENCH_COST_ROUNDS 10 3 1
	size BENCH_COST_CLIENTS '16 64' '16 64' 4
	size BENCH_COST_SLICE '-T 2' '-T 1' '-t 5'
	size BENCH_BEFORE c40db05 '' ''
}
