# shellcheck shell=bash disable=SC2154
# test/bench/report.sh: medians, ratios, and the rows of the table of results.
#
# A line writes its figures to $samples, as "NAME value", one per round, and reports pairs of
# names.  The ratio of two names is the median of the ratios of the rounds, so what slows
# down both sides of a round does not count.  Its spread is the distance of the outer
# quartiles, as a share of the median.  Its error is that of a median, in 19 of 20 cases: 1.82
# times the distance of the outer quartiles by the root of the number of rounds.  Whether a
# goal is reached is said only if the error does not reach over it.
#
# $results has one row per comparison, with tabs between the fields of $result_fields.

# shellcheck disable=SC2034	# publish.sh
result_fields='line id what against unit idem other ratio spread error goal reached'
wide_spread=0.1

# calc EXPRESSION: arithmetic; "nan" if a figure in it is missing
calc() {
	case $1 in
	*nan*) printf nan ;;
	*) awk "BEGIN { printf \"%.6g\", $1 }" ;;
	esac
}

# quartiles NAME: first, second and third of the lines "NAME value" in $samples, and how many
# there are; nan for figures that are missing
quartiles() {
	awk -v name="$1" '$1 == name { print $2 }' "$samples" | sort -g | awk '
		function at(x, i) { i = int(x); return i < NR ? v[i] + (x - i) * (v[i + 1] - v[i]) : v[i] }
		$1 !~ /^-?[0-9]+([.][0-9]+)?(e[-+]?[0-9]+)?$/ { bad = 1 }
		{ v[NR] = $1 }
		END {
			if (NR == 0 || bad)
				print "nan nan nan", NR
			else
				print at(1 + (NR - 1) / 4), at(1 + (NR - 1) / 2), at(1 + (NR - 1) * 3 / 4), NR
		}'
}

median() { quartiles "$1" | cut -d ' ' -f 2; }

# largest NAME
largest() { awk -v name="$1" '$1 == name { print $2 }' "$samples" | sort -g | tail -n 1; }

# derive RESULT EXPRESSION NAME [OTHER]: for each round a sample RESULT; in EXPRESSION a is the
# figure of NAME, b that of OTHER
derive() {
	awk -v result="$1" -v name="$3" -v other="${4:-$3}" "
		\$1 == name { x[++n] = \$2 }
		\$1 == other { y[++m] = \$2 }
		END { for (i = 1; i <= n && i <= m; i++) { a = x[i]; b = y[i]; print result, $2 } }" \
		"$samples" >"$samples.derived"
	cat "$samples.derived" >>"$samples"
}

# verdict RATIO GOAL ERROR: an error that is not known is empty
verdict() {
	if [[ -z $3 ]]; then
		printf 'too few rounds'
		return
	fi
	awk "BEGIN {
		low = $1 - $3 $2
		high = $1 + $3 $2
		print (low != high ? \"too noisy\" : low ? \"yes\" : \"NO\")
	}"
}

# report ID WHAT AGAINST UNIT IDEM OTHER RATIO GOAL [SPREAD [ERROR]]: a row of the table; OTHER,
# RATIO and GOAL may be empty; without ERROR the figures are exact, if it is empty it is not known
report() {
	local reached=''
	case "$5$6$7${9:-}${10:-}" in
	*nan* | *inf* | '') idem_die "bench: no usable figures for: $bench_line $1" ;;
	esac
	if [[ -n $8 ]]; then
		reached=$(verdict "$7" "$8" "${10-0}")
	fi
	(
		IFS=$'\t'
		printf '%s\n' "$bench_line"$'\t'"${*:1:8}"$'\t'"${9:-}"$'\t'"${10:-}"
	) | awk -F '\t' -v OFS='\t' -v reached="$reached" '
		{ print $1, $2, $3, $4, $5, $6, $7, $8, $10, $11, $9, reached }' | tee -a "$results" | columns >&2
}

# report_ratio ID WHAT AGAINST UNIT IDEM OTHER RATIO GOAL: the medians of three names in $samples
report_ratio() {
	local q error=
	read -ra q <<<"$(quartiles "$7")"
	if ((q[3] >= 3)); then
		error=$(calc "1.82 * (${q[2]} - ${q[0]}) / sqrt(${q[3]})")
	fi
	report "$1" "$2" "$3" "$4" "$(median "$5")" "$(median "$6")" "${q[1]}" "$8" \
		"$(calc "(${q[2]} - ${q[0]}) / ${q[1]}")" "$error"
}

# compare ID WHAT AGAINST UNIT IDEM OTHER [GOAL]: two names in $samples
compare() {
	derive "$5/$6" 'a / b' "$5" "$6"
	report_ratio "${@:1:6}" "$5/$6" "${7:-}"
}

# compare_rates ID WHAT AGAINST IDEM OTHER [GOAL [COUNT]]: two names that are microseconds, as rates;
# COUNT in each
compare_rates() {
	derive "rate:$4" "${7:-1} * 1e6 / a" "$4"
	[[ $5 == "$4" ]] || derive "rate:$5" "${7:-1} * 1e6 / a" "$5"
	compare "$1" "$2" "$3" /s "rate:$4" "rate:$5" "${6:-}"
	# another comparison may use the same names
	sed -i '/^rate:/d' "$samples"
}

# spread_of NAME: in $samples
spread_of() {
	local q
	read -ra q <<<"$(quartiles "$1")"
	calc "${q[1]} == 0 ? 0 : (${q[2]} - ${q[0]}) / ${q[1]}"
}

# report_one ID WHAT UNIT NAME: one name in $samples, with nothing to compare
report_one() { report "$1" "$2" '' "$3" "$(median "$4")" '' '' '' "$(spread_of "$4")"; }

# columns <ROWS: what people read: rows of $results without the first two fields, with | between
columns() {
	awk -F '\t' -v OFS=' | ' -v wide="$wide_spread" -f "$IDEM_SRC/test/bench/format.awk" \
		-f "$IDEM_SRC/test/bench/columns.awk"
}

# print_results: all rows as an aligned table
print_results() {
	{
		printf 'what; against | idem | other | ratio | spread | goal | reached\n'
		columns <"$results"
	} | column -t -s '|' -o '|' | awk '{ print } NR == 1 { gsub(/[^|]/, "-"); print }'
	printf '!: the spread is over 10 %%; too noisy: the error of the median reaches over the goal\n'
}
