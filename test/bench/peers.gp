# test/bench/peers.gp: jobs per second beside other queues.  The file `data` has a part for one by
# one and one for batches, with the fields place, label, and jobs per second of idem and
# of those in `names`.
load theme
set terminal svg size 900, 340 dynamic noenhanced font 'sans-serif,13' background rgb paper
array colour[3] = [blue, orange, grey]
array most[2]
do for [part = 1:2] {
	stats data index part - 1 using 3 nooutput
	most[part] = STATS_max
}
set label 1 'Keyed jobs per second, enqueued and drained' at screen 0.5, screen 0.94 center font ',16' textcolor rgb ink
do for [i = 1:3] {
	set object i rectangle from screen 0.24 + 0.19 * (i - 1), screen 0.04 to screen 0.255 + 0.19 * (i - 1), screen 0.08 \
		fillstyle solid 1 noborder fillcolor rgb colour[i]
	set label i + 1 word(names, i) at screen 0.265 + 0.19 * (i - 1), screen 0.06 left textcolor rgb ink
}
set style fill solid 1 noborder
set boxwidth 0.9
set border 0
set xrange [-1:7]
set format y "%'.0f"
set ytics nomirror scale 0 textcolor rgb ink
set xtics nomirror scale 0 textcolor rgb ink
set grid ytics linetype 1 linecolor rgb faint
set tmargin at screen 0.76
set bmargin at screen 0.20
unset key
set multiplot
do for [part = 0:1] {
	set yrange [0:1.12 * most[part + 1]]
	set lmargin at screen (part == 0 ? 0.08 : 0.57)
	set rmargin at screen (part == 0 ? 0.49 : 0.98)
	set label 5 (part == 0 ? 'one by one' : '100 at a time') at graph 0.5, 1.12 center textcolor rgb ink
	plot for [i = 1:3] data index part using (4 * $1 + i - 1):(column(i + 2)) with boxes linecolor rgb colour[i], \
		for [i = 1:3] data index part using (4 * $1 + i - 1):(column(i + 2)):(sprintf("%'.0f", column(i + 2))) \
			with labels offset 0, 0.7 font ',11' textcolor rgb ink, \
		data index part using (4 * $1 + 1):(0):(''):xtic(2) with labels
	# once is enough
	unset label
	unset object
}
unset multiplot
