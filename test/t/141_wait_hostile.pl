# A3: a role that waits for queues of its own takes no wake-ups from those of others.
#
# idem_wait() knows a queue by a hash of its name.  The role thief may use any queue without
# an owner, and chooses a name.

use strict;
use warnings FATAL => 'all';

use FindBin;
use lib "$FindBin::RealBin/../perl";
use IdemTest;
use Test::More;

my $node = new_node('wait_hostile', conf => "shared_preload_libraries = 'idem'");

run(q{
	CREATE ROLE boss LOGIN;
	CREATE ROLE thief LOGIN;
	SELECT idem_grant('boss', 'app'), idem_grant('thief', 'app'), idem_queue_set('mail', owner => 'boss')});

# Without a secret in the hash, this name and "mail" had the same one in the database postgres,
# which has OID 5 everywhere.  It was found in seconds.
my $name = 'oL6detKI9I2yW.X=q#m,(f|/';

sub waiter
{
	my ($user, $queue, $timeout) = @_;
	my $session = session($node, user => $user);

	$session->send("CALL idem_wait('$queue', '$timeout')");
	wait_until_asleep($node, 1, "pid = $session->{pid}");
	return $session;
}

is(run(q{SELECT oid FROM pg_database WHERE datname = 'postgres'}), 5, 'the OID of the database');
is(session($node, user => 'thief')->sqlstate(q{CALL idem_wait('mail', '0')}),
	'42501', 'A7: thief may not wait for the queue of boss');

# the first to come would be the looker, the last to come would be woken
my $first = waiter('thief', $name, '10 min');
my $boss = waiter('boss', 'mail', '20 s');
my $last = waiter('thief', $name, '10 min');

run(q{SELECT idem_enqueue('mail', '1')});
is($boss->receive, 't', 'A3: the role that may use the queue is woken');
isnt(run(q{SELECT count(*) FROM idem_fetch('mail')}), 0, 'and there is a job');

$_->kill foreach $first, $last;
$node->stop('immediate');
log_ok($node);
done_testing();
