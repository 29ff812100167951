# shellcheck shell=bash disable=SC2154
# test/bench/plproxy.sh: a call through a router with PL/Proxy.

# make_router: the database shard, a copy of bench with all slots, and the database router in front of it
make_router() {
	local script
	script=$("$IDEM_PG_CONFIG" --sharedir)/extension/idem_plproxy.sql
	admin postgres -c 'CREATE DATABASE shard TEMPLATE bench' -c 'CREATE DATABASE router'
	admin shard -c "SELECT idem_shard_set('{[0,1024)}', number => 0)" >/dev/null
	admin router -c 'CREATE EXTENSION idem' -c "SELECT idem_shard_set('{}')" -c 'CREATE EXTENSION plproxy' \
		-c "CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (p0 'host=$PGHOST dbname=shard')" \
		-c "CREATE USER MAPPING FOR PUBLIC SERVER idem_router" -f "$script" \
		-c 'SELECT idem_router.refresh()' -c "SELECT idem_router.grant_app('bench')" >/dev/null
}

# idem_call in the shard and through the router, the same shard on the same server.
line_plproxy() {
	local round
	[[ -f $("$IDEM_PG_CONFIG" --pkglibdir)/plproxy.so ]] || {
		skip 'PL/Proxy is not installed'
		return
	}
	make_router
	pin one
	pgbench_us_in shard call 1 -t "$BENCH_SOCKET" >/dev/null
	pgbench_us_in router routed_call 1 -t "$BENCH_SOCKET" >/dev/null
	for ((round = 0; round < BENCH_SOCKET_ROUNDS; round++)); do
		if ((round % 2 == 0)); then
			sample direct pgbench_us_in shard call 1 -t "$BENCH_SOCKET"
			sample routed pgbench_us_in router routed_call 1 -t "$BENCH_SOCKET"
		else
			sample routed pgbench_us_in router routed_call 1 -t "$BENCH_SOCKET"
			sample direct pgbench_us_in shard call 1 -t "$BENCH_SOCKET"
		fi
	done >"$samples"
	compare_rates one 'idem_router.idem_call through PL/Proxy, 1 client, router and shard on one CPU' 'idem_call in the shard' \
		routed direct
}
