# shellcheck shell=bash
# test/lib.sh: functions for test/run, test/demo/run, test/bench/run, test/soak/run,
# test/ha/run and test/report/run
#
# Everything happens in a new temporary directory: a copy of the source tree,
# a private copy of the PostgreSQL installation, and servers that listen on
# sockets in that directory only.  Nothing that is already on the machine is
# written to, except for missing packages (test/setup).
#
# PostgreSQL refuses to run as root.  If we are root, everything below the
# temporary directory belongs to `nobody` and is run as `nobody`.
#
# Use, from a bash script with `set -euo pipefail`:
#
#	. "$(dirname "$0")/../lib.sh"
#	idem_setup bench                 # build: for less, test: with the TAP modules
#	idem_workdir bench               # makes $IDEM_TMP, cd there, cleans up at exit
#	idem_build                       # source, private installation, build, install
#	idem_server_start "$IDEM_TMP/pg" "shared_buffers = 256MB" "jit = off"
#	idem_run psql -X -c 'CREATE EXTENSION idem'
#	idem_run pgbench -n -f "$IDEM_SRC/test/bench/claim.sql"
#	idem_server_stop "$IDEM_TMP/pg"
#
# Functions:
#	idem_setup build|test|bench|soak|report
#	                        install what is missing; sets PG_CONFIG
#	                        (PG_CONFIG in the environment chooses the server)
#	idem_workdir NAME       make and enter $IDEM_TMP; at exit servers below it
#	                        are stopped and it is removed, unless IDEM_KEEP=1
#	idem_build              build with -Werror into the private installation
#	idem_run CMD ARG...     run a command as the unprivileged user, with the
#	                        private installation first in PATH
#	idem_server_start DIR [CONF-LINE]...
#	                        initdb in DIR, start; waits until it is ready and
#	                        exports PGHOST, PGPORT, PGUSER, PGDATABASE for it
#	idem_server_stop DIR    stop it (fast) and wait for its end
#	idem_at_exit STATUS     define it after sourcing this file to be called at exit
#	idem_say TEXT...        a line of progress on stderr
#	idem_die TEXT...        the same, then exit 1
#
# Variables, set by the functions above:
#	IDEM_ROOT       the checkout; the unprivileged user may be unable to read it
#	IDEM_TMP        the temporary directory, writable for idem_run
#	IDEM_SRC        the copy of the source tree: read test files from there
#	IDEM_BIN        programs of the private installation (psql, pgbench, ...)
#	IDEM_PG_CONFIG  pg_config of the private installation
#	IDEM_KEEP       1: keep $IDEM_TMP at exit (set it any time)

IDEM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
IDEM_TMP=
IDEM_SRC=
IDEM_BIN=
IDEM_PG_CONFIG=
IDEM_KEEP=${IDEM_KEEP:-0}

# Flags and variables of an outer make would reach the inner ones.
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES

# PGHOST and similar variables must not select another server.
while IFS= read -r idem_var; do
	unset "$idem_var"
done < <(compgen -e | grep -E '^PG[A-Z]+$' || true)
unset idem_var

idem_say()
{
	printf '%s\n' "$*" >&2
}

idem_die()
{
	idem_say "$@"
	exit 1
}

idem_setup()
{
	PG_CONFIG=$("$IDEM_ROOT/test/setup" "$1")
	export PG_CONFIG
}

idem_is_root()
{
	[ "$(id -u)" -eq 0 ]
}

# Switch to the unprivileged user if we are root; no PAM session, no shell.
idem_as_user()
{
	if idem_is_root; then
		setpriv --reuid=nobody --regid="$(id -g nobody)" --clear-groups "$@"
	else
		"$@"
	fi
}

idem_run()
{
	idem_as_user env HOME="$IDEM_TMP" TMPDIR="$IDEM_TMP/t" PSQLRC=/dev/null \
		PATH="$IDEM_BIN${IDEM_BIN:+:}$PATH" "$@"
}

# A socket path has at most 107 bytes, and the unprivileged user must be able
# to enter; where $TMPDIR does not fit, /tmp does.
idem_tmp_base()
{
	local base=${TMPDIR:-/tmp}

	if [ "${#base}" -gt 40 ] || ! idem_as_user test -x "$base"; then
		base=/tmp
	fi
	printf '%s\n' "$base"
}

idem_workdir()
{
	IDEM_TMP=$(mktemp -d "$(idem_tmp_base)/idem-$1.XXXXXX")
	if idem_is_root; then
		chown "nobody:$(id -g nobody)" "$IDEM_TMP"
	fi
	cd "$IDEM_TMP" || exit
	idem_as_user mkdir "$IDEM_TMP/t"
}

# End every server below $IDEM_TMP, also those that pg_regress or a TAP test
# left behind when it was interrupted.  The pid file alone proves nothing (the
# number may be used again): a postmaster works in its data directory.
idem_stop_leftovers()
{
	local file pid

	while IFS= read -r file; do
		pid=$(head -n 1 "$file")
		if [ "$(readlink "/proc/$pid/cwd")" = "$(dirname "$file")" ]; then
			kill -QUIT "$pid" || true
			tail --pid="$pid" -f /dev/null
		fi
	done < <(find "$IDEM_TMP" -name postmaster.pid -type f)
}

idem_teardown()
{
	local status=$?

	trap - EXIT
	cd / || exit
	idem_at_exit "$status" || status=1
	if [ -n "$IDEM_TMP" ] && [ "$IDEM_KEEP" != 1 ]; then
		idem_stop_leftovers
		rm -rf "$IDEM_TMP"
	fi
	exit "$status"
}
trap idem_teardown EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# For scripts to replace; gets the exit status.
idem_at_exit()
{
	:
}

# Copy the checkout without what a build or a test leaves there.  Read with our
# rights, written with those of the unprivileged user.
idem_copy_source()
{
	IDEM_SRC=$IDEM_TMP/src
	idem_as_user mkdir "$IDEM_SRC"
	tar -C "$IDEM_ROOT" -cf - --exclude-vcs \
		--exclude='*.o' --exclude='*.bc' --exclude='*.so' --exclude=node_modules --exclude=__pycache__ \
		--anchored --exclude='./idem--*.sql' \
		--exclude=./results --exclude=./log --exclude=./output_iso \
		--exclude='./tmp_check*' --exclude='./regression.*' --exclude=./.demo . |
		idem_as_user tar -C "$IDEM_SRC" -xf -
}

# PostgreSQL finds its files relative to its programs.  So real copies of the
# programs and links to everything else, in the same layout, are an
# installation of their own, and its pg_config prints its own paths.
idem_private_install()
{
	local inst=$IDEM_TMP/inst bindir dir

	bindir=$("$PG_CONFIG" --bindir)
	IDEM_BIN=$inst$bindir
	IDEM_PG_CONFIG=$IDEM_BIN/pg_config
	idem_as_user mkdir -p "$IDEM_BIN"
	idem_as_user cp -L "$bindir"/{postgres,initdb,psql,createdb,dropdb,createuser,dropuser,vacuumdb} \
		"$bindir"/pg* "$IDEM_BIN"
	for dir in sharedir pkglibdir pkgincludedir includedir-server; do
		dir=$("$PG_CONFIG" "--$dir")
		idem_as_user mkdir -p "$inst$dir"
		idem_as_user cp -rsf "$dir/." "$inst$dir"
	done
	# what programs need of libpq; the folders can be those of the whole system
	dir=$("$PG_CONFIG" --includedir)
	idem_as_user mkdir -p "$inst$dir"
	idem_as_user cp -sf "$dir"/libpq-*.h "$dir"/p*_ext.h "$inst$dir"
	dir=$("$PG_CONFIG" --libdir)
	idem_as_user mkdir -p "$inst$dir"
	idem_as_user cp -sf "$dir"/libpq.* "$inst$dir"
	# links to an idem that is installed already
	find "$inst" \( -name 'idem--*.sql' -o -name 'idem_*.sql' -o -name idem.control -o -name idem.so \) \
		-type l -delete
}

# with_llvm=no: bitcode is for inlining by JIT only and would need clang.
idem_build()
{
	local log=$IDEM_TMP/build.log

	idem_say "Building for $("$PG_CONFIG" --version)"
	idem_copy_source
	idem_private_install
	if ! idem_run make -C "$IDEM_SRC" -j "$(nproc)" PG_CONFIG="$IDEM_PG_CONFIG" \
		WERROR=1 with_llvm=no all >"$log" 2>&1 ||
		! idem_run make -C "$IDEM_SRC" PG_CONFIG="$IDEM_PG_CONFIG" \
			WERROR=1 with_llvm=no install >>"$log" 2>&1; then
		cat "$log" >&2
		idem_die "The build failed."
	fi
}

idem_server_start()
{
	local dir=$1

	shift
	idem_run initdb -D "$dir" -U postgres -A trust -E UTF8 --no-locale \
		--no-sync >"$dir.initdb.log" 2>&1 || {
		cat "$dir.initdb.log" >&2
		return 1
	}
	{
		printf '%s\n' "listen_addresses = ''" "unix_socket_directories = '$dir'" \
			"port = 5432"
		printf '%s\n' "$@"
	} | idem_run tee -a "$dir/postgresql.conf" >/dev/null
	idem_run pg_ctl -D "$dir" -w -s -l "$dir.log" start || {
		cat "$dir.log" >&2
		return 1
	}
	export PGHOST=$dir PGPORT=5432 PGUSER=postgres PGDATABASE=postgres
}

idem_server_stop()
{
	idem_run pg_ctl -D "$1" -w -s -m fast stop
}
