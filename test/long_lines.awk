# test/long_lines.awk: refuse lines of C that are longer than 100 columns
#
# A string literal counts for nothing: messages stay in one piece, so that they
# can be searched for.  Tabs end at every fourth column.  This is not left to
# ColumnLimit of clang-format, which would also join the short lines of every
# ereport() again.  What clang-format leaves alone may be a table, whose columns are lined up.

/clang-format off/ { is_table = 1 }
/clang-format on/ { is_table = 0 }

!is_table {
	out = ""
	for (i = 1; i <= length($0); i++) {
		c = substr($0, i, 1)
		out = out (c == "\t" ? substr("    ", 1, 4 - length(out) % 4) : c)
	}
	gsub(/"([^"\\]|\\.)*"/, "\"\"", out)
	if (length(out) > 100) {
		print FILENAME ":" FNR ": " length(out) " columns"
		bad = 1
	}
}

END {
	exit bad
}
