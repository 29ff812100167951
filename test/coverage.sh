# shellcheck shell=bash
# test/coverage.sh: which test runs which lines; for test/run, which has built with gcov
#
# The environment of a server says where it leaves its counts: in $IDEM_TMP/counts/TEST.  Processes
# that are killed leave none.

# lines_of TEST: test, file, line, whether it ran, and its text, for every line of C that can run
lines_of()
{
	local dir=$IDEM_TMP/counts/$1

	# gcov wants its two files side by side
	idem_as_user cp -rsn "$IDEM_BUILD/src/." "$dir/src"
	(cd "$dir" && find src -name '*.gcda' -exec gcov -t {} +) |
		awk -v test="$1" -v root="$IDEM_SRC/" -F : '
			$2 + 0 == 0 && $3 == "Source" {
				file = index($4, root) == 1 && $4 ~ /\.c$/ ? $4 : ""
				sub(/.*\/src\/+src\//, "src/", file)
			}
			file != "" && $2 > 0 && $1 !~ /^ *-$/ {
				text = $0
				sub(/^[^:]*:[^:]*:/, "", text)
				printf "%s\t%s\t%d\t%d\t%s\n", test, file, $2, $1 ~ /[0-9]/, text
			}'
}

# For each C file its covered lines, and the tests that run a line of it that setup.sql, which only
# creates the extension, does not run: those that run most of it come first.
show_coverage()
{
	local dir

	{
		lines_of setup.sql
		for dir in "$IDEM_TMP"/counts/*; do
			[[ $dir == */setup.sql ]] || lines_of "$(basename "$dir")"
		done
	} | awk -F '\t' -v OFS='\t' -v map="$IDEM_TMP/map.tsv" -v never="$IDEM_TMP/never" '
		!(($2, $3) in ran) { lines[$2]++; ran[$2, $3] = 0; text[$2, $3] = $5 }
		$4 && !ran[$2, $3] { ran[$2, $3] = 1; covered[$2]++ }
		$4 && $1 == "setup.sql" { base[$2, $3] = 1 }
		$4 { count[$1, $2]++ }
		$4 && !(($2, $3) in base) { own[$1, $2]++ }
		END {
			for (key in own) {
				split(key, part, SUBSEP)
				printf "%s\t%s\t%d\t%d\n", part[2], part[1], 100 * count[key] / lines[part[2]], own[key] >map
			}
			for (key in ran)
				if (!ran[key]) {
					split(key, part, SUBSEP)
					printf "%s:%d:%s\n", part[1], part[2], text[key] >never
				}
			for (file in lines)
				printf "%s\t\t%d\t%d\n", file, lines[file], covered[file]
		}' >"$IDEM_TMP/files.tsv"
	sort -t : -k 1,1 -k 2,2n -o "$IDEM_TMP/never" "$IDEM_TMP/never"
	sort -t '	' -k 1,1 -k 3,3nr -o "$IDEM_TMP/map.tsv" "$IDEM_TMP/map.tsv"
	printf '\n%6s %8s  %s\n' lines covered 'file, how many tests run it, and those that run most of it'
	sort "$IDEM_TMP/files.tsv" | awk -F '\t' '
		FNR == NR { if (++tests[$1] <= 5) list[$1] = list[$1] "  " $2 " " $3 "%"; next }
		{ printf "%6d %7.1f%%  %s %d%s\n", $3, 100 * $4 / $3, $1, tests[$1], list[$1]; all += $3; ran += $4 }
		END { printf "%6d %7.1f%%  all\n", all, 100 * ran / all }' "$IDEM_TMP/map.tsv" -
	printf '\n%s: file, test, percent of the lines, lines that setup.sql does not run\n' "$IDEM_TMP/map.tsv"
	printf '%s: lines that no test ran\n' "$IDEM_TMP/never"
}
