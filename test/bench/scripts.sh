# shellcheck shell=bash disable=SC2034
# test/bench/scripts.sh: the pgbench scripts.  Each statement is one round trip;
# parameters travel as a client sends them (-M prepared).
#
# A function can be called in the SELECT list, of one column only, because (f()).* calls it
# once for each, or in FROM.

payload='{"account": 42, "amount": 9900}'
result30='{"charge_id": "ch_1234567890"}'

new_key='\set k random(1, 1000000000000000000)'
idem_claim='SELECT (idem_claim(:k)).claimed;'
idem_claim_from='SELECT claimed, result FROM idem_claim(:k);'
idem_finish='SELECT idem_finish(:k, :result);'
idem_work='SELECT idem_finish(:k, bench.charge(:payload));'
hand_claim='INSERT INTO hand.keys (key) VALUES (:k) ON CONFLICT (key) DO NOTHING;'
hand_finish='UPDATE hand.keys SET result = :result, finished_at = now() WHERE key = :k;'
hand_work='UPDATE hand.keys SET result = bench.charge(:payload), finished_at = now() WHERE key = :k;'
work='INSERT INTO bench.charges (account, amount) VALUES (42, 9900) RETURNING id;'

# lines NAME LINE ...: define a script
declare -A script
lines() { printf -v "script[$1]" '%s\n' "$new_key" "${@:2}"; }

# the tax of a pair over a socket
lines base 'BEGIN;' 'SELECT 1;' 'SELECT 1;' 'COMMIT;'
lines idem 'BEGIN;' "$idem_claim" "$idem_finish" 'COMMIT;'
lines idem_from 'BEGIN;' "$idem_claim_from" "$idem_finish" 'COMMIT;'
lines hand 'BEGIN;' "$hand_claim" "$hand_finish" 'COMMIT;'

# the same work in one, four and five round trips
lines call "SELECT status, result FROM idem_call(:k, 'bench.charge', :payload);"
lines routed_call "SELECT status, result FROM idem_router.idem_call(:k, 'bench.charge', :payload);"
lines idem_four 'BEGIN;' "$idem_claim" "$idem_work" 'COMMIT;'
lines idem_four_from 'BEGIN;' "$idem_claim_from" "$idem_work" 'COMMIT;'
lines idem_four_request 'BEGIN;' 'SELECT claimed, result FROM idem_claim(:k, :payload);' "$idem_work" 'COMMIT;'
lines hand_four 'BEGIN;' "$hand_claim" "$hand_work" 'COMMIT;'
lines hand_five 'BEGIN;' "$hand_claim" "$work" "$hand_finish" 'COMMIT;'

# lease and finish, each in a transaction of its own; the token is what both sides need
lines idem_lease "SELECT (idem_lease(:k, '30 s')).token \\gset" \
	'SELECT idem_finish(:k, :result, :token);'
lines idem_lease_from "SELECT token FROM idem_lease(:k, '30 s') \\gset" \
	'SELECT idem_finish(:k, :result, :token);'
lines hand_lease "INSERT INTO hand.leases AS l (key, locked_until) VALUES (:k, clock_timestamp() + interval '30 s') \
	ON CONFLICT (key) DO UPDATE \
	SET token = l.token + 1, attempt = l.attempt + 1, locked_until = excluded.locked_until \
	WHERE l.locked_until < clock_timestamp() AND l.finished_at IS NULL RETURNING token \\gset" \
	'UPDATE hand.leases SET result = :result, finished_at = now() WHERE key = :k AND token = :token AND finished_at IS NULL;'
lines base_lease 'SELECT 1 AS token \gset' 'SELECT 1;'
