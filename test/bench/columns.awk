# test/bench/columns.awk: a row of the results, for the terminal
{
	print $3 ($4 == "" ? "" : "; " $4), figure($6, $5), figure($7, $5), ratio($8), spread($9), $11, $12
}
