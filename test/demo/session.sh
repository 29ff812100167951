# shellcheck shell=bash
# test/demo/session.sh: psql sessions that stay open, and how they are shown
#
#	open_session NAME, close_session NAME
#	say_sql NAME SQL        show a statement, run it, show its output
#	start_sql NAME SQL      the same without waiting for the output
#	finish_sql NAME         ... which this waits for and shows
#	show_waiting NAME       wait until the session waits for a lock, show that
#	wait_for QUERY          ask the server until it answers t
#	tell TEXT...            lines of the narrator

declare -A session_in session_out session_pid
end_of_output='--end of output--'

# A and B differ by label, indentation and, on a terminal, colour.
declare -A session_colour=([A]='' [B]='')
told_colour=''
no_colour=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
	session_colour=([A]=$'\e[36m' [B]=$'\e[33m')
	told_colour=$'\e[1m'
	no_colour=$'\e[0m'
fi

tell()
{
	local line

	echo
	for line in "$@"; do
		printf '%s%s%s\n' "$told_colour" "$line" "$no_colour"
	done
}

# Lines of a session; those of B stand further to the right.
show_lines()
{
	local indent=''

	[ "$1" = A ] || indent='        '
	sed -u "s/^/$indent${session_colour[$1]}$1 |$no_colour /"
}

open_session()
{
	local name=$1 to=$IDEM_TMP/t/$1.in from=$IDEM_TMP/t/$1.out in out

	idem_as_user mkfifo "$to" "$from"
	idem_run env PGAPPNAME="$name" psql -X -q -P footer=off -d demo <"$to" >"$from" 2>&1 &
	session_pid[$name]=$!
	exec {in}>"$to" {out}<"$from"
	session_in[$name]=$in
	session_out[$name]=$out
}

close_session()
{
	printf '\\q\n' >&"${session_in[$1]}"
	wait "${session_pid[$1]}"
}

start_sql()
{
	printf '%s\n' "$2" | show_lines "$1"
	printf '%s\n\\echo %s\n' "$2" "'$end_of_output'" >&"${session_in[$1]}"
}

# Up to the mark; a session that ends before it has failed.
session_output()
{
	local line

	while IFS= read -r line; do
		[ "$line" != "$end_of_output" ] || return 0
		[ -z "$line" ] || printf '%s\n' "$line"
	done <&"${session_out[$1]}"
	return 1
}

finish_sql()
{
	session_output "$1" | show_lines "$1"
}

say_sql()
{
	start_sql "$1" "$2"
	finish_sql "$1"
}

# Each question is a new connection, so this is not a busy loop.
wait_for()
{
	local tries

	for ((tries = 0; tries < 1000; tries++)); do
		if [ "$(idem_run psql -XAt -d demo -c "$1")" = t ]; then
			return
		fi
	done
	idem_die "The server does not come to answer t: $1"
}

# Ask the server until it says that the session waits.
show_waiting()
{
	local answer tries

	for ((tries = 0; tries < 1000; tries++)); do
		answer=$(idem_run psql -XAt -d demo -c "
			SELECT format('(pg_stat_activity: %s is %s, wait event %s %s)',
						  application_name, state, wait_event_type, wait_event)
			  FROM pg_stat_activity
			 WHERE application_name = '$1' AND wait_event_type = 'Lock'")
		if [ -n "$answer" ]; then
			printf '%s\n' "$answer" | show_lines "$1"
			return
		fi
	done
	idem_die "Session $1 does not wait."
}
