# test/bench/markdown.awk: results.tsv as a page
BEGIN {
	print "# Benchmark results\n"
	print "`make bench` writes this page, [results.tsv](results.tsv) with the same figures for programs, and the pictures."
	print "[measurements.md](../measurements.md) says what the lines measure and why goals were missed.\n"
	print "![idem beside hand-written SQL](hand.svg)\n"
	print "![idem beside other job queues](peers.svg)\n"
	print "\"idem\" and \"other\" are medians; \"other\" is what \"against\" names. The ratio is the median of the ratios of the"
	print "rounds, in which the sides take turns. The spread is the distance of the outer quartiles of these ratios; one"
	print "over 10 % is marked with !. A goal is called reached or missed only if the error of the median (1.82 × distance of"
	print "the quartiles / √rounds) does not reach over it, else the line is too noisy.\n"
}

function row(f,	goal)
{
	goal = f[11]
	sub(/^<=/, "≤", goal)
	sub(/^>=/, "≥", goal)
	sub(/^us$/, "µs", f[5])
	return "| " f[3] " | " f[4] " | " figure(f[6], f[5]) " | " figure(f[7], f[5]) " | " ratio(f[8]) " | " spread(f[9]) \
		" | " goal " | " verdict(f[12]) " |"
}

function verdict(x)
{
	return x == "yes" ? "reached" : x == "NO" ? "**missed**" : x
}

NR == 1 { next }
{
	split($0, f, "\t")
	if (f[11] != "")
		goals = goals row(f) "\n"
	if (!((f[14], f[15], f[16]) in environment))
	{
		environment[f[14], f[15], f[16]] = ++environments
		description = description environments ". " f[14] ". " f[15] ". Settings: " f[16] ".\n"
	}
	if (!(f[1] in section))
	{
		order[++lines] = f[1]
		origin[f[1]] = "`" f[18] "`, commit " f[13] ", environment " environment[f[14], f[15], f[16]] ", load before it " f[17]
	}
	section[f[1]] = section[f[1]] row(f) "\n"
}

END {
	head = "| what | against | idem | other | ratio | spread | goal | |\n|---|---|---|---|---|---|---|---|\n"
	print "## Goals\n"
	print head goals
	for (i = 1; i <= lines; i++)
		print "## " order[i] "\n\n" origin[order[i]] ".\n\n" head section[order[i]]
	print "## Environments\n"
	printf "%s", description
}
