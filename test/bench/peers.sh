# shellcheck shell=bash disable=SC2154
# test/bench/peers.sh: idem against other job queues with their own libraries, see peers.mjs.

# These versions.  They need a later Node.js than Debian has, which comes the same way.
peer_packages=(pg@8.23.1 pg-boss@12.35.0 graphile-worker@0.18.0)
peer_node=24.21.0
declare -A peer_names=([pgboss]='pg-boss 12' [graphile]='graphile-worker 0.18')

# npm_install DIRECTORY PACKAGE ...: fails soon if the registry does not answer
npm_install() {
	idem_run npm install --prefix "$1" --ignore-scripts --no-save --no-audit --no-fund --no-update-notifier \
		--fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-timeout=20000 --loglevel=error "${@:2}" \
		>"$IDEM_TMP/npm.log" 2>&1 || {
		cat "$IDEM_TMP/npm.log" >&2
		return 1
	}
}

# install_peers: into $IDEM_TMP/peers; prints the node to use
install_peers() {
	local dir=$IDEM_TMP/peers arch node
	"$IDEM_ROOT/test/setup" peers || return
	node=$(command -v node) || return
	idem_run mkdir -p "$dir"
	if ! "$node" -e 'const v = process.versions.node.split("."); process.exit(v[0] > 22 || (v[0] == 22 && v[1] >= 18) ? 0 : 1)'; then
		case $(uname -m) in
		x86_64) arch=x64 ;;
		aarch64) arch=arm64 ;;
		*) return 1 ;;
		esac
		peer_packages+=("node-linux-$arch@$peer_node")
		node=$dir/node_modules/node-linux-$arch/bin/node
	fi
	npm_install "$dir" "${peer_packages[@]}" || return
	printf '%s\n' "$node"
}

# peer NODE SYSTEM CLIENTS BATCH JOBS >>$samples: what peers.mjs says, and microseconds of a job from
# enqueue to its end
peer() {
	empty_jobs peers
	admin peers -c 'DROP SCHEMA IF EXISTS pgboss CASCADE' -c 'DROP SCHEMA IF EXISTS graphile_worker CASCADE' 2>/dev/null
	idem_run env PGUSER=bench PGDATABASE=peers NO_LOG_SUCCESS=1 timeout 120 "$1" "$IDEM_TMP/peers/peers.mjs" "${@:2}" |
		awk -v name="$2" '
			{ print name "_" $1, $2; v[$1] = $2 }
			END { print name "_us", 1e6 / v["enqueue"] + 1e6 / v["drain"] }'
}

# peer_rounds NODE CLIENTS BATCH >$samples: all systems in turn
peer_rounds() {
	local round system systems jobs=$((BENCH_PEER_JOBS * ($3 > 1 ? 10 : 1)))
	for ((round = 0; round < BENCH_PEER_ROUNDS; round++)); do
		systems=(idem pgboss graphile)
		((round % 2 == 0)) || mapfile -t systems < <(backwards "${systems[@]}")
		for system in "${systems[@]}"; do
			peer "$1" "$system" "$2" "$3" "$jobs"
		done
	done
}

# compare_peers CLIENTS BATCH GOAL-PGBOSS GOAL-GRAPHILE
compare_peers() {
	local system id name goal=$3 step how="$1 clients, one by one"
	[[ $2 == 1 ]] || how="$1 clients, $2 at a time"
	[[ $1 != 1 ]] || how=${how/clients/client}
	for system in pgboss graphile; do
		id=${system}_$1_$2 name=${peer_names[$system]}
		compare_rates "$id" "keyed jobs, enqueued and drained, $how" "$name" idem_us "${system}_us" "$goal"
		for step in enqueue drain; do
			compare "${id}_$step" "$step, $how" "$name" /s "idem_$step" "${system}_$step"
		done
		if grep -q '^idem_cpu ' "$samples"; then
			compare "${id}_cpu" "CPU of a job, client and server, $how" "$name" us idem_cpu "${system}_cpu"
		fi
		compare "${id}_wal" "WAL of a job, $how" "$name" B idem_wal "${system}_wal"
		goal=$4
	done
}

# The same number of connections from one Node.js process, the same batch, an empty handler.
line_jobs_peers() {
	local node clients batch goal
	if ! node=$(install_peers); then
		skip 'the libraries of the other queues cannot be installed'
		return
	fi
	idem_run cp "$IDEM_SRC/test/bench/peers.mjs" "$IDEM_TMP/peers"
	admin postgres -c 'CREATE DATABASE peers TEMPLATE bench OWNER bench'
	setting full_page_writes off
	for clients in 1 4; do
		for batch in 1 100; do
			goal='>= 3'
			[[ $clients:$batch != 4:100 ]] || goal='>= 2.8'
			peer_rounds "$node" "$clients" "$batch" >"$samples"
			compare_peers "$clients" "$batch" "$goal" '>= 1.5'
		done
	done
}
