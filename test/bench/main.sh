# shellcheck shell=bash disable=SC2034,SC2154
# test/bench/main.sh: run lines on one server; for test/bench/run and test/run, which have built
# and installed idem before (test/lib.sh).
#
# Each line is a function line_NAME in a process of its own, so that one that fails does not
# keep the others from running.  $statuses has "NAME ok", "NAME failed" or "NAME skipped" for
# each, $results what they found.

# an error in $( ) is one of the line
shopt -s inherit_errexit

bench_lines=(counts pair replay socket call wal lease growth hot
	jobs_wal jobs_rate jobs_depth jobs_xmin jobs_members ended jobs_peers
	worker_load worker_rate stats_cost wake_latency wake_commits wake_cost plproxy)
# experiments behind the layout of the tables, only if they are named
layout_lines=(layout jobs_layout)

# the worker is switched on where it is measured
settings=(
	"shared_preload_libraries = 'idem'"
	"idem.cleanup = off"
	"shared_buffers = 4GB"
	"wal_buffers = 64MB"
	"max_wal_size = 40GB"
	"checkpoint_timeout = 1d"
	"synchronous_commit = off"
	"autovacuum = off"
	"jit = off"
	"max_parallel_workers_per_gather = 0"
	"max_parallel_maintenance_workers = 0"
)

# Tiny sizes measure no speed, so the server need not be set up for it.  The clock is the time of
# day, because the kernel does not report the CPU time of so little work.
if [[ ${BENCH_SIZE:-} == tiny ]]; then
	settings+=("fsync = off" "shared_buffers = 128MB" "wal_buffers = 4MB" "max_wal_size = 1GB" "bench.clock = 'time'")
fi

bench_dir=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=test/bench/sizes.sh
. "$bench_dir/sizes.sh"
# shellcheck source=test/bench/common.sh
. "$bench_dir/common.sh"
# shellcheck source=test/bench/report.sh
. "$bench_dir/report.sh"
# shellcheck source=test/bench/publish.sh
. "$bench_dir/publish.sh"
# shellcheck source=test/bench/scripts.sh
. "$bench_dir/scripts.sh"
# shellcheck source=test/bench/lines.sh
. "$bench_dir/lines.sh"
# shellcheck source=test/bench/counts.sh
. "$bench_dir/counts.sh"
# shellcheck source=test/bench/jobs.sh
. "$bench_dir/jobs.sh"
# shellcheck source=test/bench/ended.sh
. "$bench_dir/ended.sh"
# shellcheck source=test/bench/peers.sh
. "$bench_dir/peers.sh"
# shellcheck source=test/bench/worker.sh
. "$bench_dir/worker.sh"
# shellcheck source=test/bench/wake.sh
. "$bench_dir/wake.sh"
# shellcheck source=test/bench/plproxy.sh
. "$bench_dir/plproxy.sh"
# shellcheck source=test/bench/layout.sh
. "$bench_dir/layout.sh"

# check_lines LINE ...: fail if there is no such line
check_lines() {
	local name
	for name in "$@"; do
		declare -F "line_$name" >/dev/null || idem_die "bench: no line named $name"
	done
}

# make_template: one empty database with everything; those of some lines are copies of it
make_template() {
	local file
	admin postgres -c 'CREATE ROLE bench LOGIN' -c 'CREATE DATABASE bench'
	admin bench -c 'CREATE EXTENSION idem'
	for file in setup.sql jobs.sql ended.sql worker.sql layout.sql; do
		admin bench -v keys_fillfactor="$(fillfactor_of idem.keys)" -v jobs_fillfactor="$(fillfactor_of idem.jobs)" \
			-v cpu="$(cpu_clock)" -f "$IDEM_SRC/test/bench/$file" >/dev/null
	done
	admin bench -c 'VACUUM ANALYZE'
}

# fillfactor_of TABLE
fillfactor_of() {
	admin bench -c "
		SELECT coalesce((SELECT option_value FROM pg_options_to_table(reloptions)
						  WHERE option_name = 'fillfactor'), '100')
		  FROM pg_class WHERE oid = '$1'::regclass"
}

# Does the kernel report the CPU time of a process in nanoseconds?
cpu_clock() {
	if [[ $(cat /proc/self/schedstat 2>/dev/null) =~ ^[1-9] ]]; then
		printf true
	else
		printf false
	fi
}

# tidy: as if no line had run before
tidy() {
	local name
	admin postgres -c 'ALTER SYSTEM RESET ALL' -c 'SELECT pg_reload_conf()' >/dev/null
	until [[ $(admin postgres -c "SELECT count(*) FROM pg_settings WHERE sourcefile LIKE '%.auto.conf'") == 0 ]]; do :; done
	admin postgres -c "SELECT datname FROM pg_database WHERE datname NOT IN ('postgres', 'bench') AND NOT datistemplate" |
		while IFS= read -r name; do
			admin postgres -c "DROP DATABASE $name WITH (FORCE)" </dev/null
		done
	empty_tables
	empty_jobs
	pin all
}

# skip REASON: of a line that cannot run here
skip() {
	idem_say "skipped: $*"
	: >"$IDEM_TMP/skipped"
}

# status_of EXIT-STATUS ROWS-BEFORE: of a line
status_of() {
	if (($1 != 0)); then
		printf 'failed'
	elif [[ -e $IDEM_TMP/skipped ]]; then
		printf 'skipped'
	elif (($(wc -l <"$results") <= $2)); then
		idem_say 'the line has no figures'
		printf 'failed'
	else
		printf 'ok'
	fi
}

# run_line NAME: in a background process, because errexit would not hold in a condition
run_line() {
	local status=0 rows pid start=$SECONDS
	bench_line=$1
	idem_say "== $1"
	rows=$(wc -l <"$results")
	rm -f "$IDEM_TMP/skipped"
	printf '%s %s\n' "$1" "$(cut -d ' ' -f 1 /proc/loadavg)" >>"$loads"
	(
		tidy
		"line_$1"
	) </dev/null &
	pid=$!
	wait "$pid" || status=$?
	printf '%s %s\n' "$1" "$(status_of "$status" "$rows")" >>"$statuses"
	((status == 0)) || idem_say "bench: the line $1 has failed"
	idem_say "   ($((SECONDS - start)) s)"
}

# bench_run [LINE ...]: all of them if none is named
bench_run() {
	local names=("$@") name
	((${#names[@]} > 0)) || names=("${bench_lines[@]}")
	results=$IDEM_TMP/results.tsv samples=$IDEM_TMP/samples.txt statuses=$IDEM_TMP/statuses.txt \
		loads=$IDEM_TMP/loads.txt
	: >"$results"
	: >"$loads"
	: >"$statuses"
	idem_server_start "$IDEM_TMP/bench" "${settings[@]}"
	make_template
	describe_run >"$IDEM_TMP/run.tsv"
	for name in "${names[@]}"; do
		run_line "$name"
	done
	idem_server_stop "$IDEM_TMP/bench"
}
