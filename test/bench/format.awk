# test/bench/format.awk: figures as people read them

function figure(x, unit,	text)
{
	if (x == "")
		return ""
	text = sprintf(x >= 100 || x <= -100 ? "%.0f" : x >= 10 ? "%.1f" : "%.2f", x)
	return unit == "" ? text : text " " unit
}

function ratio(x)
{
	return x == "" ? "" : sprintf(x >= 100 ? "%.0f" : x >= 10 ? "%.1f" : x >= 0.01 || x <= 0 ? "%.3f" : "%.2g", x)
}

# `wide` is the spread from which on it is marked
function spread(x)
{
	return x == "" ? "" : sprintf("%.1f %%%s", 100 * x, x > wide ? " !" : "")
}
