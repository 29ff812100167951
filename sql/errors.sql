--
-- Every error has a SQLSTATE, a detail and a hint, and changes nothing:
-- "Errors" of the contract, rules K7, K11, K12
--
\a\pset footer off
SELECT claimed FROM idem_claim('errors:1', '{"card": "4242"}');
SELECT status FROM idem_lease('errors:5', '30 s', worker => 'w1');
SELECT token FROM idem_lease('errors:6', '30 s') \gset
SELECT idem_finish('errors:6', '"secret"', :token);
CREATE FUNCTION errors_one(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION errors_other(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
SELECT status FROM idem_call('errors:call', 'errors_one', '{"card": "4242"}');
CREATE TABLE before AS SELECT * FROM idem.keys;
\x on

-- ID001
SELECT * FROM fails($$ SELECT idem_claim('errors:1', '{"card": "1881"}') $$);
SELECT * FROM fails($$ SELECT idem_call('errors:call', 'errors_one', '{"card": "1881"}') $$);
SELECT * FROM fails($$ SELECT idem_call('errors:call', 'errors_other', '{"card": "4242"}') $$);
-- ID002
SELECT * FROM fails($$ SELECT idem_finish('errors:1') $$);
SELECT * FROM fails($$ SELECT idem_finish('errors:none') $$);
SELECT * FROM fails($$ SELECT idem_claim('errors:scope', scope => 'a'), idem_finish('errors:scope', scope => 'b') $$);
SELECT * FROM fails($$ SELECT idem_release('errors:1') $$);
-- ID003
SELECT * FROM fails($$ SELECT idem_finish('errors:1', token => 7) $$);
SELECT * FROM fails($$ SELECT idem_release('errors:1', token => 7) $$);
SELECT * FROM fails($$ SELECT idem_finish('errors:1', token => -7) $$);
-- ID004
SELECT * FROM fails($$ SELECT idem_claim('errors:2'), idem_finish('errors:2', '1'), idem_finish('errors:2', '2') $$);
SELECT * FROM fails($$ SELECT idem_claim('errors:2'), idem_finish('errors:2', '1'), idem_release('errors:2') $$);

-- K12: keys and scopes
SELECT * FROM fails($$ SELECT idem_claim(NULL) $$);
SELECT * FROM fails($$ SELECT idem_claim('') $$);
SELECT * FROM fails($$ SELECT idem_claim(repeat('x', 1025)) $$);
SELECT * FROM fails($$ SELECT idem_claim('k', scope => repeat('x', 256)) $$);
-- counted in bytes
SELECT * FROM fails($$ SELECT idem_claim(repeat(U&'\20ac', 342)) $$);

-- intervals
SELECT * FROM fails($$ SELECT idem_claim('k', ttl => '0') $$);
SELECT * FROM fails($$ SELECT idem_claim('k', wait => '-1 ms') $$);

-- too large
SELECT * FROM fails($$ SELECT set_config('idem.max_result_size', '4', true), idem_finish('errors:1', '"too long"') $$);

-- invalid handlers
SELECT * FROM fails($$ SELECT idem_call('k', 'lower(text)'::regprocedure) $$);
SELECT * FROM fails($$ SELECT idem_call('k', NULL) $$);
CREATE FUNCTION strict_handler(payload jsonb) RETURNS jsonb STRICT LANGUAGE sql AS $$ SELECT payload $$;
SELECT * FROM fails($$ SELECT idem_call('k', 'strict_handler') $$);
SELECT * FROM fails($$ SELECT idem_call('k', 0) $$);
DROP FUNCTION strict_handler;

-- arrays
SELECT * FROM fails($$ SELECT idem_claim_many(NULL) $$);
SELECT * FROM fails($$ SELECT idem_claim_many(ARRAY['k', NULL]) $$);
SELECT * FROM fails($$ SELECT idem_claim_many(ARRAY[['k', 'l']]) $$);
SELECT * FROM fails($$ SELECT idem_finish_many(ARRAY['k'], '{}') $$);

-- the context names the element of the batch, but not the key
SELECT * FROM fails($$ SELECT idem_claim_many(ARRAY['k', 'errors:1', 'l'], ARRAY['1', '2', '3']::jsonb[]) $$);
SELECT * FROM fails($$ SELECT idem_claim('k'), idem_finish_many(ARRAY['k', 'errors:1']) $$);
-- a role that does not exist
SELECT * FROM fails($$ SELECT set_config('idem.owner', 'nobody in particular', true), idem_claim('k') $$);

-- cleanup, privileges
SELECT * FROM fails($$ SELECT idem_cleanup(0) $$);
SELECT * FROM fails($$ SELECT idem_cleanup(NULL) $$);
SELECT * FROM fails($$ SELECT idem_grant('nobody in particular', 'everything') $$);
SELECT * FROM fails($$ SELECT idem_grant(NULL, 'app') $$);

-- leases: bad arguments
SELECT * FROM fails($$ SELECT idem_lease(NULL, '30 s') $$);
SELECT * FROM fails($$ SELECT idem_lease('k', NULL) $$);
SELECT * FROM fails($$ SELECT idem_lease('k', '0') $$);
SELECT * FROM fails($$ SELECT idem_lease('k', '30 days 1 microsecond') $$);
SELECT * FROM fails($$ SELECT idem_lease('k', '30 s', on_expiry => 'explode') $$);
SELECT * FROM fails($$ SELECT idem_lease('k', '30 s', on_expiry => NULL) $$);
SELECT * FROM fails($$ SELECT idem_lease('k', '30 s', max_attempts => 0) $$);
SELECT * FROM fails($$ SELECT idem_lease('k', '30 s', worker => '') $$);
SELECT * FROM fails($$ SELECT idem_renew('errors:5', NULL, '30 s') $$);
SELECT * FROM fails($$ SELECT idem_fence('errors:5', 0) $$);
SELECT * FROM fails($$ SELECT idem_checkpoint('errors:5', 1, NULL) $$);
SELECT * FROM fails($$ SELECT idem_checkpoint('errors:5', 1, to_jsonb(repeat('x', 1048576))) $$);

-- leases: finish without the token, with that of another key, of a key never leased
SELECT * FROM fails($$ SELECT idem_finish('errors:5', '1') $$);
SELECT * FROM fails($$ SELECT idem_release('errors:5') $$);
SELECT * FROM fails($$ SELECT idem_finish('errors:5', '1', (SELECT token FROM idem_get('errors:6'))) $$);
SELECT * FROM fails($$ SELECT idem_finish('errors:7', '1', (SELECT token FROM idem_get('errors:6'))) $$);
-- after the finish
SELECT * FROM fails($$ SELECT idem_checkpoint('errors:6', (SELECT token FROM idem_get('errors:6')), '1') $$);
SELECT * FROM fails($$ SELECT idem_finish('errors:6', '"other"', (SELECT token FROM idem_get('errors:6'))) $$);

-- K13
SELECT * FROM fails($$ SELECT set_config('transaction_read_only', 'on', true), idem_claim('k') $$);
\x off

-- the longest key and scope that are allowed, and the shortest
SELECT claimed FROM idem_claim(repeat('x', 1024), scope => repeat('y', 255));
SELECT status FROM idem_claim(repeat('x', 1024), scope => repeat('y', 255));
SELECT claimed FROM idem_claim('x', scope => '');
SELECT idem_forget(repeat('x', 1024), repeat('y', 255)), idem_forget('x');

-- more invalid intervals
\set VERBOSITY sqlstate
SELECT idem_claim('k', ttl => '-1 s');
SELECT idem_claim('k', ttl => '1 day -24 hours');
SELECT idem_claim('k', ttl => '101 years');
SELECT idem_claim('k', ttl => '178000000 years');
SELECT idem_claim('k', wait => '-178000000 years');
SELECT idem_claim('k', wait => '101 years');
-- infinite intervals exist since 17; make one for older versions
SELECT idem_claim('k', ttl => CASE WHEN current_setting('server_version_num')::int >= 170000
								   THEN 'infinity' ELSE '178000000 years' END::text::interval);
SELECT idem_claim('k', wait => CASE WHEN current_setting('server_version_num')::int >= 170000
									THEN '-infinity' ELSE '-1 s' END::text::interval);
SELECT claimed, expires_at - created_at AS ttl FROM idem_claim('errors:3', ttl => '1 microsecond');
SELECT claimed, expires_at - created_at AS ttl FROM idem_claim('errors:4', ttl => '100 years');
SELECT idem_forget('errors:3'), idem_forget('errors:4');
SELECT count(*) FROM idem.keys WHERE key IN ('errors:3', 'errors:4');
DELETE FROM idem.keys WHERE key = 'errors:3';

SELECT idem_lease('k', '-1 s');
SELECT idem_lease('k', '31 days');
SELECT idem_lease('k', '1 month 1 day');
SELECT idem_lease('k', '-178000000 years');
SELECT idem_lease('k', '30 s', ttl => '0');
SELECT idem_lease('k', '30 s', wait => '-1 s');
SELECT idem_lease('k', '30 s', max_attempts => -1);
SELECT idem_lease('k', '30 s', worker => repeat('w', 256));
SELECT idem_lease('k', '30 s', on_expiry => 'Retry');
SELECT idem_lease('', '30 s');
SELECT idem_lease('k', '30 s', scope => repeat('s', 256));
SELECT idem_renew('errors:5', :token, '30 s');
SELECT idem_renew('errors:5', -1, '30 s');
SELECT idem_renew('errors:5', 1, NULL);
SELECT idem_renew('errors:5', 1, '31 days');
SELECT idem_checkpoint('errors:5', NULL, '1');
SELECT idem_checkpoint('errors:5', -1, '1');
SELECT idem_fence('errors:5', NULL);
SELECT idem_finish('errors:5', '1', token => 0);
SELECT idem_finish('errors:5', '1', token => -1);
SELECT idem_release('errors:5', token => -1);
SELECT idem_renew(NULL, 1, '30 s');
SELECT idem_checkpoint(NULL, 1, '1');
SELECT idem_fence(NULL, 1);
-- the same with the token of another scope
SELECT token AS right FROM idem_get('errors:5') \gset
SELECT idem_fence('errors:5', :right, scope => 'other');
SELECT idem_renew('errors:5', :right, '30 s', scope => 'other');
SELECT idem_checkpoint('errors:5', :right, '1', scope => 'other');
SELECT idem_release('errors:5', :right, scope => 'other');
SELECT idem_finish('errors:5', NULL, :right, scope => 'other');
-- the longest lease and name of a worker
SELECT status FROM idem_lease('errors:8', '30 days', worker => repeat('w', 255));
SELECT idem_forget('errors:8');

-- nothing was changed
SELECT count(*) FROM (TABLE before EXCEPT TABLE idem.keys) AS gone;
SELECT count(*) FROM (TABLE idem.keys EXCEPT TABLE before) AS new;

DELETE FROM idem.keys WHERE key IN ('errors:5', 'errors:6');
DROP TABLE before;
DROP FUNCTION errors_one, errors_other;
