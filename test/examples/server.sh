# shellcheck shell=bash disable=SC2034
# test/examples/server.sh: a private server with the tables of the examples, and pgbouncer in front of it
#
# For test/examples/run and test/drivers/run, after test/lib.sh:
#	start_server       after idem_build; sets direct_url, exports PGHOST, PGPORT, PGDATABASE, EXAMPLES_PGDATA
#	start_pgbouncer    in transaction mode; sets pooled_url
#	stop_pgbouncer     call it in idem_at_exit, too

free_port()
{
	/usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# The programs connect over TCP, because not every driver knows sockets in a directory.  So they need a password:
# the machine may have other users.
start_server()
{
	local dir=$IDEM_TMP/pg

	server_port=$(free_port)
	password=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
	idem_server_start "$dir" \
		"listen_addresses = '127.0.0.1'" \
		"port = $server_port" \
		"shared_preload_libraries = 'idem'" \
		"client_connection_check_interval = 100ms" \
		"max_connections = 100" \
		"fsync = off"
	direct_url=postgres://shop:$password@127.0.0.1:$server_port/shop
	export PGPORT=$server_port PGDATABASE=shop EXAMPLES_PGDATA=$dir
	printf '%s\n' 'local all all trust' 'host all all 127.0.0.1/32 scram-sha-256' |
		idem_run tee "$dir/pg_hba.conf" >/dev/null
	idem_run createdb shop
	idem_run psql -Xq -v ON_ERROR_STOP=1 -o /dev/null -f "$IDEM_SRC/examples/schema.sql"
	# retries soon, so that the suite need not wait for them
	idem_run psql -Xq -v ON_ERROR_STOP=1 -o /dev/null -v password="$password" <<-'SQL'
		ALTER ROLE shop PASSWORD :'password';
		SELECT pg_catalog.idem_queue_set('mail', backoff => '50 ms');
		SELECT pg_catalog.idem_queue_set('index', backoff => '50 ms');
		SELECT pg_reload_conf();
	SQL
}

# Debian's pgbouncer may be older than 1.21, which is the first one that knows prepared statements.
start_pgbouncer()
{
	local dir=$IDEM_TMP/pgbouncer try

	pooled_port=$(free_port)
	pooled_url=postgres://shop:$password@127.0.0.1:$pooled_port/shop
	idem_run mkdir "$dir"
	printf '"shop" "%s"\n' "$password" | idem_run tee "$dir/users" >/dev/null
	idem_run tee "$dir/pgbouncer.ini" >/dev/null <<-INI
		[databases]
		shop = host=127.0.0.1 port=$server_port dbname=shop
		[pgbouncer]
		listen_addr = 127.0.0.1
		listen_port = $pooled_port
		unix_socket_dir =
		pidfile = $dir/pid
		logfile = $dir/log
		auth_type = scram-sha-256
		auth_file = $dir/users
		pool_mode = transaction
		default_pool_size = 20
		max_client_conn = 500
		server_login_retry = 0.2
		ignore_startup_parameters = extra_float_digits
	INI
	idem_run pgbouncer -q -d "$dir/pgbouncer.ini" >"$dir/start.log" 2>&1
	for ((try = 0; try < 100; try++)); do
		if idem_run /usr/bin/python3 -c 'import sys, psycopg2; psycopg2.connect(sys.argv[1])' "$pooled_url" 2>/dev/null; then
			return
		fi
		sleep 0.1
	done
	cat "$dir/start.log" "$dir/log" >&2
	idem_die "pgbouncer did not start."
}

stop_pgbouncer()
{
	local file=$IDEM_TMP/pgbouncer/pid pid

	if [ -n "$IDEM_TMP" ] && [ -f "$file" ]; then
		pid=$(cat "$file")
		if kill "$pid" 2>/dev/null; then
			tail --pid="$pid" -f /dev/null
		fi
	fi
}
