# test/bench/hand.gp: our lines against hand-written SQL = 1.  The file `data` has the fields place,
# label, value, low and high (by the error of the median), goal; `rows` lines.
load theme
stats data using ($5 > $6 ? $5 : $6) nooutput
most = STATS_max
height = 26 * rows + 100
set terminal svg size 900, height dynamic noenhanced font 'sans-serif,13' background rgb paper
set lmargin at screen 0.40
set rmargin at screen 0.98
set tmargin at screen 1 - 66.0 / height
set bmargin at screen 34.0 / height
set label 1 'idem beside the same work in hand-written SQL' at screen 0.5, screen 1 - 20.0 / height \
	center font ',16' textcolor rgb ink
set label 2 'times as fast as by hand = 1 (WAL: times less)' at screen 0.5, screen 1 - 42.0 / height \
	center textcolor rgb ink
set xrange [0:1.14 * most]
set yrange [rows + 0.5:0.5]
set xtics 0.5 nomirror scale 0 textcolor rgb ink
set ytics nomirror scale 0 textcolor rgb ink
set grid xtics linetype 1 linecolor rgb faint
set border 0
set arrow 1 from 1, 0.4 to 1, rows + 0.6 nohead linewidth 1.5 linecolor rgb ink front
set key at screen 0.98, screen 1 - 42.0 / height right textcolor rgb ink samplen 1.5 maxrows 1
set style fill solid 1 noborder
plot data using (0):1:(0):3:($1 - 0.32):($1 + 0.32):ytic(2) with boxxyerror linecolor rgb blue notitle, \
	data using 4:1:($5 - $4):(0) with vectors nohead linewidth 2 linecolor rgb ink title 'error of the median', \
	data using 6:1 with points pointtype 13 pointsize 0.8 linecolor rgb orange title 'goal', \
	data using (1.14 * most):1:(sprintf('%.2f', $3)) with labels right textcolor rgb ink notitle
