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
#	idem_kept_workdir NAME  the same, but the directory stays, with its servers, for the next
#	                        run; the file .NAME of the checkout has its name
#	idem_stop_kept NAME     end its servers
#	idem_drop_kept NAME     and remove it
#	idem_build              build with -Werror into the private installation; in a directory
#	                        that was kept only what has changed
#	idem_make ARG...        make there
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
#	IDEM_BUILD      where make builds, and the suites leave their results
#	IDEM_BIN        programs of the private installation (psql, pgbench, ...)
#	IDEM_PG_CONFIG  pg_config of the private installation
#	idem_flags      arguments of make for another flavour (set it before idem_build)
#	idem_encoding   of the servers that idem_server_start makes: UTF8
#	IDEM_KEEP       1: keep $IDEM_TMP at exit (set it any time)

IDEM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
IDEM_TMP=
IDEM_SRC=
IDEM_BUILD=
IDEM_BIN=
idem_flags=(WERROR=1)
idem_encoding=UTF8
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
		PATH="$IDEM_BIN${IDEM_BIN:+:}$PATH" "$@" 9<&-
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

# idem_mktemp NAME: a new directory of the unprivileged user
idem_mktemp()
{
	local dir

	dir=$(mktemp -d "$(idem_tmp_base)/idem-$1.XXXXXX")
	if idem_is_root; then
		chown "nobody:$(id -g nobody)" "$dir"
	fi
	printf '%s\n' "$dir"
}

idem_workdir()
{
	IDEM_TMP=$(idem_mktemp "$1")
	cd "$IDEM_TMP" || exit
	idem_as_user mkdir "$IDEM_TMP/t"
}

# One directory for each server and flavour of the build, so that going from one to the other
# builds nothing again.  One run at a time in each: fd 9 has the lock, and servers, which stay,
# must not inherit it.
idem_kept_workdir()
{
	local note=$IDEM_ROOT/.$1 kept=

	[ ! -e "$note" ] || kept=$(<"$note")
	# it may be gone after a reboot
	if [ ! -d "$kept" ]; then
		kept=$(idem_mktemp "$1")
		printf '%s\n' "$kept" >"$note"
	fi
	IDEM_KEEP=1
	IDEM_TMP=$kept/$("$PG_CONFIG" --bindir | cksum | cut -d ' ' -f 1)
	idem_as_user mkdir -p "$IDEM_TMP/t"
	cd "$IDEM_TMP" || exit
	exec 9<"$IDEM_TMP/t"
	flock 9
	idem_stop_leftovers
}

idem_stop_kept()
{
	local note=$IDEM_ROOT/.$1

	if [ -e "$note" ] && [ -d "$(<"$note")" ]; then
		IDEM_TMP=$(<"$note") idem_stop_leftovers
	fi
}

idem_drop_kept()
{
	local note=$IDEM_ROOT/.$1

	idem_stop_kept "$1"
	if [ -e "$note" ]; then
		rm -rf "$(<"$note")"
		rm "$note"
	fi
}

# End every server below $IDEM_TMP, also those that pg_regress or a TAP test
# left behind when it was interrupted.  The pid file alone proves nothing (the
# number may be used again): a postmaster works in its data directory.
idem_stop_leftovers()
{
	local file pid pids=()

	while IFS= read -r file; do
		pid=$(head -n 1 "$file")
		if [ "$(readlink "/proc/$pid/cwd")" = "$(dirname "$file")" ]; then
			kill -QUIT "$pid" || true
			pids+=("--pid=$pid")
		fi
	done < <(find "$IDEM_TMP" -name postmaster.pid -type f)
	for pid in "${pids[@]}"; do
		tail -s 0.02 "$pid" -f /dev/null
	done
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

# What a build or a test leaves in the checkout: anywhere, and at the top.
idem_products=(.git '*.[od]' '*.bc' '*.so' node_modules __pycache__)
idem_products_at_top=('idem--*.sql' results log output_iso 'tmp_check*' 'regression.*'
	.demo .check-fast .coverage src/declared.h src/declared.new)
for idem_dir in "$IDEM_ROOT"/src/bin/*/; do
	idem_products_at_top+=("src/bin/$(basename "$idem_dir" | sed 's,.*,&/&,')")
done
unset idem_dir

# idem_copy_source NAME [OPTION]...: copy this of the checkout to $IDEM_SRC.  Read with our rights,
# written with those of the unprivileged user.
idem_copy_source()
{
	tar -C "$IDEM_ROOT" -cf - "${idem_products[@]/#/--exclude=}" \
		--anchored "${idem_products_at_top[@]/#/--exclude=./}" "./$1" |
		idem_as_user tar -C "$IDEM_SRC" "${@:2}" -xf -
}

# The names that are not the same in the checkout and in $IDEM_SRC.
idem_compare_source()
{
	local at_top

	at_top=$(printf '|%s' "${idem_products_at_top[@]}" | sed -e 's,[.],[.],g' -e 's,[*],.*,g')
	{ LC_ALL=C diff -rq --no-dereference "${idem_products[@]/#/--exclude=}" "$IDEM_ROOT" "$IDEM_SRC" || true; } |
		sed -E -e "s,^Only in ($IDEM_ROOT|$IDEM_SRC)/?(.*): (.*)\$,\2/\3," -e 's,^/,,' \
			-e "s,^(Files|File|Symbolic links) $IDEM_ROOT/(.*) (and|is a .* while file) $IDEM_SRC/.*,\2," |
		{ grep -vxE "${at_top#|}" || true; }
}

# If something was built in $IDEM_SRC, make would find it there before it builds it again.
idem_remove_products()
{
	local expression=(-false) name

	for name in "${idem_products[@]}"; do
		expression+=(-o -name "$name")
	done
	for name in "${idem_products_at_top[@]}"; do
		expression+=(-o -path "$IDEM_SRC/$name")
	done
	idem_as_user find "$IDEM_SRC" \( "${expression[@]}" \) -prune -exec rm -rf {} +
}

# Make $IDEM_SRC the same as the checkout, and add to $IDEM_TMP/changed what had to be copied or
# removed; idem_build empties it.  Contents are compared, not times: a copied file gets the time
# of the copy, so that it is newer than what was made of its predecessor, whatever the editor or
# git did with its own time.
idem_update_source()
{
	local name

	IDEM_SRC=$IDEM_TMP/src
	if [ ! -d "$IDEM_SRC" ]; then
		idem_as_user mkdir "$IDEM_SRC"
		idem_copy_source ''
		return
	fi
	idem_remove_products
	idem_compare_source >>"$IDEM_TMP/changed"
	while IFS= read -r name; do
		idem_as_user rm -rf "${IDEM_SRC:?}/$name"
		[ ! -e "$IDEM_ROOT/$name" ] || idem_copy_source "$name" -m
	done <"$IDEM_TMP/changed"
}

# PostgreSQL finds its files relative to its programs.  So real copies of the
# programs and links to everything else, in the same layout, are an
# installation of their own, and its pg_config prints its own paths.
idem_private_install()
{
	local inst=$IDEM_TMP/inst bindir dir

	bindir=$("$PG_CONFIG" --bindir)
	idem_set_programs
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
}

# Links to an idem that is installed in the server, and what an earlier build has installed.
idem_uninstall()
{
	idem_as_user find "$IDEM_TMP/inst" ! -type d \
		\( -name 'idem--*.sql' -o -name 'idem_*' -o -name idem.control -o -name idem.so \) -delete
}

idem_set_programs()
{
	IDEM_BIN=$IDEM_TMP/inst$("$PG_CONFIG" --bindir)
	IDEM_PG_CONFIG=$IDEM_BIN/pg_config
}

# with_llvm=no: bitcode is for inlining by JIT only and would need clang.
idem_make()
{
	idem_run make -C "$IDEM_BUILD" -f "$IDEM_SRC/Makefile" VPATH="$IDEM_SRC" PG_CONFIG="$IDEM_PG_CONFIG" with_llvm=no "$@"
}

# What else the objects were made from.  If it is not what it was, nothing here is of use.
idem_build_id()
{
	printf '%s\n' "$idem_encoding"
	"$PG_CONFIG"
	stat -c '%n %s %y' "$("$PG_CONFIG" --bindir)/postgres" "$("$PG_CONFIG" --includedir-server)/pg_config.h"
	idem_run make -s -f "$IDEM_SRC/Makefile" PG_CONFIG="$PG_CONFIG" "${idem_flags[@]}" list-COMPILE.c
	gcc --version
}

idem_build()
{
	local log=$IDEM_TMP/build.log id

	idem_update_source
	IDEM_BUILD=$IDEM_TMP/build
	id=$(idem_build_id)
	if [ ! -e "$IDEM_TMP/build.id" ] || [ "$id" != "$(<"$IDEM_TMP/build.id")" ]; then
		idem_say "Building for $("$PG_CONFIG" --version)"
		idem_as_user rm -rf "$IDEM_BUILD" "$IDEM_TMP/inst" "$IDEM_TMP/template"
		idem_as_user mkdir "$IDEM_BUILD"
		idem_private_install
		printf '%s\n' "$id" >"$IDEM_TMP/build.id"
	fi
	idem_set_programs
	# make compares no lists: an object that left OBJS would stay in the library
	if [ -e "$IDEM_TMP/changed" ] && grep -qE '(Makefile|\.mk)$' "$IDEM_TMP/changed"; then
		idem_as_user rm -rf "$IDEM_BUILD"/*.so "$IDEM_BUILD/src/bin"
	fi
	if ! idem_make -j "$(nproc)" "${idem_flags[@]}" all >"$log" 2>&1 || ! idem_uninstall ||
		! idem_make "${idem_flags[@]}" install >>"$log" 2>&1; then
		cat "$log" >&2
		idem_die "The build failed."
	fi
	: >"$IDEM_TMP/changed"
}

# The data directory that all servers start from.  Two suites may ask for it at once.
idem_template()
{
	local new=$IDEM_TMP/template.$BASHPID

	[ ! -d "$IDEM_TMP/template" ] || return 0
	idem_run initdb -D "$new" -U postgres -A trust -E "$idem_encoding" --no-locale --no-sync >"$IDEM_TMP/initdb.log" 2>&1 || {
		cat "$IDEM_TMP/initdb.log" >&2
		return 1
	}
	idem_as_user mv -T "$new" "$IDEM_TMP/template" 2>/dev/null || idem_as_user rm -rf "$new"
}

idem_server_start()
{
	local dir=$1

	shift
	idem_template
	idem_as_user cp -R --sparse=always "$IDEM_TMP/template" "$dir"
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
