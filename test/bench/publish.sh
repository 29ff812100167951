# shellcheck shell=bash disable=SC2154
# test/bench/publish.sh: the results of a run as files in a directory.
#
# results.tsv has a row per comparison: the fields of $results and those of the run.  README.md and
# the two pictures are made of it.  Lines that this run did not measure stay as they are.

run_fields='commit server machine settings load command'

# describe_run: what the lines of a run have in common: commit, server, machine, settings
describe_run() {
	local commit model
	commit=$(git -C "$IDEM_ROOT" rev-parse --short HEAD 2>/dev/null || printf 'not known')
	if [[ -n $(git -C "$IDEM_ROOT" status --porcelain -- . ':!doc/bench' 2>/dev/null) ]]; then
		commit+=' with changes'
	fi
	model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
	printf '%s\t%s\t%s\t%s\n' "$commit" \
		"$(admin postgres -c "SELECT format('PostgreSQL %s, assertions %s', current_setting('server_version'), current_setting('debug_assertions'))")" \
		"$(nproc) cores (${model:-$(uname -m)}), $(awk '/^MemTotal/ { printf "%.0f", $2 / 1048576 }' /proc/meminfo) GB, Linux $(uname -r)" \
		"$(admin postgres -c "
			SELECT string_agg(name || ' = ' || current_setting(name), ', ' ORDER BY name) FROM pg_settings
			 WHERE name IN ('fsync', 'full_page_writes', 'data_checksums'$(printf ", '%s'" "${settings[@]%% *}"))")"
}

# command_of LINE: what makes it
command_of() {
	local quick=''
	case $BENCH_SIZE in
	quick) quick=' QUICK=1' ;;
	tiny) quick=' BENCH_SIZE=tiny' ;;
	esac
	printf 'make bench BENCH=%s%s' "$1" "$quick${chosen_sizes:+ ${chosen_sizes% }}"
}

# rows_of LINE: those of this run, with the fields of the run
rows_of() {
	awk -F '\t' -v OFS='\t' -v line="$1" -v run="$(cat "$IDEM_TMP/run.tsv")" \
		-v load="$(awk -v line="$1" '$1 == line { print $2 }' "$loads")" -v command="$(command_of "$1")" '
		$1 == line { print $0, run, load, command }' "$results"
}

# merge OLD: all rows in the order of the lines; those of OLD where this run has none
merge() {
	local name
	printf '%s\n' "$result_fields $run_fields" | tr ' ' '\t'
	for name in "${bench_lines[@]}" "${layout_lines[@]}"; do
		if grep -qx "$name ok" "$statuses"; then
			rows_of "$name"
		elif [[ -f $1 ]]; then
			awk -F '\t' -v line="$name" 'NR > 1 && $1 == line' "$1"
		fi
	done
}

# The bars of the first picture: LINE.ID and what is said about it.
hand_bars=(
	'pair.perform:claim + finish, PERFORM idem_finish'
	'pair.assign:claim + finish, ok := idem_finish'
	'pair.commit:claim + finish + COMMIT'
	'replay.replay:replay'
	'socket.one_list:pair over a socket, in the SELECT list'
	'socket.one_from:pair over a socket, in FROM'
	'call.four_from:BEGIN, claim, work + finish, COMMIT'
	'call.one:idem_call, one CPU'
	'call.two:idem_call, two CPUs'
	'lease.from:lease + finish over a socket'
	'jobs_rate.enqueue:enqueue over a socket'
	'jobs_rate.leased:fetch + complete over a socket'
	'jobs_rate.bulk_100:enqueue, 100 at a time'
	'jobs_rate.bulk_1000:enqueue, 1000 at a time'
	'worker_rate.cleanup:idem_cleanup(1000) in a loop'
	'wal.pair_off:WAL of a pair'
	'wal.lease:WAL of lease + finish'
)

# hand_data RESULTS: for hand.gp.  Rates grow with speed; times and bytes shrink.  An error that is
# larger than the figure would leave no room for the others.
hand_data() {
	printf '%s\n' "${hand_bars[@]}" | awk -F '\t' -v OFS='\t' '
		FNR == NR { row[$1 "." $2] = $0; next }
		{
			name = substr($0, 1, index($0, ":") - 1)
			if (!(name in row))
				next
			split(row[name], f, "\t")
			goal = f[11]
			sub(/^[<>=]+ */, "", goal)
			rate = f[5] == "/s"
			low = f[8] - (f[10] < f[8] / 2 ? f[10] : f[8] / 2)
			high = f[8] + (f[10] < f[8] / 2 ? f[10] : f[8] / 2)
			print ++n, substr($0, index($0, ":") + 1), rate ? f[8] : 1 / f[8], rate ? low : 1 / high,
				rate ? high : 1 / low, goal == "" ? "NaN" : rate ? goal : 1 / goal
		}' "$1" -
}

# peers_data RESULTS: for peers.gp
peers_data() {
	local batch clients place
	for batch in 1 100; do
		place=0
		for clients in 1 4; do
			awk -F '\t' -v OFS='\t' -v id="_${clients}_$batch" -v place="$place" -v clients="$clients" '
				$1 == "jobs_peers" && $2 == "pgboss" id { idem = $6; pgboss = $7 }
				$1 == "jobs_peers" && $2 == "graphile" id { graphile = $7 }
				END { if (idem) print place, clients (clients == 1 ? " client" : " clients"), idem, pgboss, graphile }' "$1"
			place=$((place + 1))
		done
		printf '\n\n'
	done
}

# dark <SVG: with a second set of colours for dark pages; those of theme.gp first
dark() {
	local pair rule='' from to
	for pair in '255,255,255:#0d1117' '36,41,47:#e6edf3' '208,215,222:#30363d' '47,129,200:#4f9fe6' '217,130,43:#e3994a' '140,150,160:#8b949e'; do
		from=${pair%:*} to=${pair#*:}
		# gnuplot writes a colour in several ways
		for from in "rgb($from)" "$(awk -F , -v c="$from" 'BEGIN { split(c, v); printf "rgb(%3d, %3d, %3d)", v[1], v[2], v[3] }')" \
			"$(awk -v c="$from" 'BEGIN { split(c, v, ","); printf "#%02x%02x%02x", v[1], v[2], v[3] }')"; do
			rule+="[fill=\"$from\"]{fill:$to}[stroke=\"$from\"]{stroke:$to}[color=\"$from\"]{color:$to}"
		done
	done
	sed "s|<title>Gnuplot</title>|<style>@media (prefers-color-scheme:dark){$rule}</style>|; /^<desc>/d"
}

# draw NAME DATA TITLE OPTION: $IDEM_TMP/NAME.svg
draw() {
	gnuplot -e "theme = '$IDEM_SRC/test/bench/theme.gp'; data = '$2'; $4; set output '$IDEM_TMP/$1.raw'" \
		"$IDEM_SRC/test/bench/$1.gp"
	dark <"$IDEM_TMP/$1.raw" | sed "s|<svg |<svg role=\"img\" aria-label=\"$3\" |" >"$IDEM_TMP/$1.svg"
}

# draw_pictures RESULTS DIRECTORY: where there is something to draw
draw_pictures() {
	local rows
	hand_data "$1" >"$IDEM_TMP/hand.dat"
	rows=$(wc -l <"$IDEM_TMP/hand.dat")
	if ((rows > 0)); then
		draw hand "$IDEM_TMP/hand.dat" 'idem beside the same work in hand-written SQL' "rows = $rows"
		cp "$IDEM_TMP/hand.svg" "$2"
	fi
	peers_data "$1" >"$IDEM_TMP/peers.dat"
	if [[ $(grep -c . "$IDEM_TMP/peers.dat") == 4 ]]; then
		draw peers "$IDEM_TMP/peers.dat" 'keyed jobs per second, idem beside other queues' \
			"names = 'idem \"${peer_names[pgboss]}\" \"${peer_names[graphile]}\"'"
		cp "$IDEM_TMP/peers.svg" "$2"
	fi
}

# publish DIRECTORY: its old results are replaced
publish() {
	mkdir -p "$1"
	merge "$1/results.tsv" >"$IDEM_TMP/merged.tsv"
	cp "$IDEM_TMP/merged.tsv" "$1/results.tsv"
	draw_pictures "$1/results.tsv" "$1"
	awk -F '\t' -v wide="$wide_spread" -f "$IDEM_SRC/test/bench/format.awk" -f "$IDEM_SRC/test/bench/markdown.awk" \
		"$1/results.tsv" >"$1/README.md"
	idem_say "Table and pictures are in $1"
}
