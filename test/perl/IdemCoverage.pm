
=pod

=head1 NAME

IdemCoverage - where the servers of a test leave the counts of gcov

=head1 DESCRIPTION

make coverage loads it into every Perl program; one is prove.

=cut

package IdemCoverage;

use strict;
use warnings FATAL => 'all';

$ENV{GCOV_PREFIX} = "$ENV{IDEM_COUNTS}/$1" if $0 =~ m{^test/t/(\w+\.pl)$};

1;
