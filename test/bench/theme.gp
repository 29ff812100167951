# test/bench/theme.gp: colours of the pictures.  publish.sh adds a second set for dark pages, so
# colours are the same here and there.
set datafile separator "\t"
paper = '#ffffff'
ink = '#24292f'
faint = '#d0d7de'
blue = '#2f81c8'
orange = '#d9822b'
grey = '#8c96a0'
