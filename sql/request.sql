--
-- A key stands for one request: rule K7
--
\a\pset footer off
\set VERBOSITY sqlstate

SELECT claimed FROM idem_claim('request:1', '{"amount": 9900, "currency": "EUR"}');
-- the same request in another notation
SELECT status FROM idem_claim('request:1', '{"currency":"EUR",   "amount":9900}');
-- the SHA-256 of its text form is stored
SELECT request = sha256('{"amount": 9900, "currency": "EUR"}'::jsonb::text::bytea) AS sha256
  FROM idem.keys WHERE key = 'request:1';
-- every length up to the third block of SHA-256 and beyond: numbers of n digits; other bytes; a long one
SELECT count(claimed) FROM generate_series(1, 300) AS n, LATERAL idem_claim('number:' || n, to_jsonb(left(repeat('1234567890', 30), n)::numeric));
SELECT count(claimed) FROM generate_series(1, 60) AS n, LATERAL idem_claim('euro:' || n, to_jsonb(repeat('€', n)));
SELECT claimed FROM idem_claim('text', to_jsonb(repeat('ab', 500000)));
SELECT count(*) FROM generate_series(1, 300) AS n, idem.keys
 WHERE key = 'number:' || n AND request = sha256(left(repeat('1234567890', 30), n)::bytea);
SELECT count(*) FROM generate_series(1, 60) AS n, idem.keys
 WHERE key = 'euro:' || n AND request = sha256(convert_to('"' || repeat('€', n) || '"', 'UTF8'));
SELECT sha256('abc') = '\xba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad' AS fips_180;
SELECT request = sha256(to_jsonb(repeat('ab', 500000))::text::bytea) AS sha256 FROM idem.keys WHERE key = 'text';
-- another request
SELECT * FROM idem_claim('request:1', '{"amount": 9901, "currency": "EUR"}');
SELECT * FROM idem_claim('request:1', 'null');
SELECT * FROM idem_claim('request:1', '{"amount": 9901, "currency": "EUR"}', wait => '0');
SELECT * FROM idem_claim_many(ARRAY['request:1'], ARRAY['{"amount": 1}'::jsonb]);
-- no check if one of the two gave no request
SELECT status FROM idem_claim('request:1');
SELECT claimed FROM idem_claim('request:2');
SELECT status FROM idem_claim('request:2', '{"amount": 1}');
SELECT status FROM idem_claim('request:2', '{"amount": 2}');

-- in the transaction that holds the key, before and after finish
BEGIN;
SELECT claimed FROM idem_claim('request:3', '{"a": 1}');
SELECT status FROM idem_claim('request:3', '{"a": 1}');
SAVEPOINT s;
SELECT * FROM idem_claim('request:3', '{"a": 2}');
ROLLBACK TO s;
SELECT idem_finish('request:3', '3');
SAVEPOINT s;
SELECT * FROM idem_claim('request:3', '{"a": 2}');
ROLLBACK TO s;
SELECT status FROM idem_claim('request:3', '{"a": 1}');
COMMIT;
SELECT * FROM idem_claim('request:3', '{"a": 2}');
SELECT status, result FROM idem_claim('request:3', '{"a": 1}');

-- the same key twice in a batch, for two requests
SELECT ord, claimed, status FROM idem_claim_many(ARRAY['request:4', 'request:4'], ARRAY['1', '2']::jsonb[]);
SELECT ord, claimed, status FROM idem_claim_many(ARRAY['request:4', 'request:4'], ARRAY['1', '1']::jsonb[]);

-- a key that has expired may be used for another request
SELECT claimed FROM idem_claim('request:5', '{"a": 1}', ttl => '1 min');
SET idem.clock_offset = '2 min';
SELECT claimed FROM idem_claim('request:5', '{"a": 2}');
SELECT * FROM idem_claim('request:5', '{"a": 1}');
RESET idem.clock_offset;

-- idem_call: handler and payload are the request
CREATE FUNCTION request_echo(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
CREATE FUNCTION request_other(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"other"'::jsonb $$;
CREATE SCHEMA request_schema;
CREATE FUNCTION request_schema.request_echo(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"schema"'::jsonb $$;
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo', '{"a": 1}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo', '{"a": 1}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo', '{"a": 2}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_other', '{"a": 1}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_other', '{"a": 2}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_schema.request_echo', '{"a": 1}');
-- what is stored: half of the digest of the name, and the digest of the payload
SELECT request = substr(sha256('public\000request_echo'), 1, 16) || sha256('{"a": 1}') AS stored FROM idem.keys WHERE key = 'request:6';
-- a null payload is a request, too, and differs from a JSON null
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo');
SELECT status, result, replayed FROM idem_call('request:7', 'request_echo');
SELECT status, result, replayed FROM idem_call('request:7', 'request_echo');
SELECT status, result, replayed FROM idem_call('request:7', 'request_echo', 'null');
SELECT status, result, replayed FROM idem_call('request:7', 'request_other');
-- the message names the cause
\set VERBOSITY terse
SELECT status, result, replayed FROM idem_call('request:6', 'request_other', '{"a": 1}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo', '{"a": 2}');
\set VERBOSITY sqlstate
-- a claim or a lease has no handler: its request is compared with the payload, in both directions
SELECT status FROM idem_claim('request:6', '{"a": 1}');
SELECT status FROM idem_claim('request:6', '{"a": 2}');
SELECT status FROM idem_lease('request:6', '1 min', request => '{"a": 1}');
SELECT status FROM idem_lease('request:6', '1 min', request => '{"a": 2}');
SELECT status FROM idem_claim('request:6');
SELECT status FROM idem_claim('request:7', '{"a": 1}');
SELECT status FROM idem_claim('request:7');
SELECT status FROM idem_claim('request:8', '{"a": 1}');
SELECT status, replayed FROM idem_call('request:8', 'request_echo', '{"a": 1}');
SELECT status, replayed FROM idem_call('request:8', 'request_other', '{"a": 1}');
SELECT status, replayed FROM idem_call('request:8', 'request_echo', '{"a": 2}');
SELECT status, replayed FROM idem_call('request:8', 'request_echo');
SELECT status FROM idem_claim('request:14');
SELECT status, replayed FROM idem_call('request:14', 'request_echo', '{"a": 1}');
SELECT status, replayed FROM idem_call('request:14', 'request_other');
SELECT status FROM idem_lease('request:9', '1 min', request => '{"a": 1}');
SELECT status, replayed FROM idem_call('request:9', 'request_echo', '{"a": 1}');
SELECT status, replayed FROM idem_call('request:9', 'request_echo', '{"a": 2}');
-- a call that takes over a lease stores its handler
SET idem.clock_offset = '2 min';
SELECT status, replayed FROM idem_call('request:9', 'request_echo', '{"a": 1}');
SELECT status, replayed FROM idem_call('request:9', 'request_other', '{"a": 1}');
RESET idem.clock_offset;
-- in the transaction that holds the key, before and after the finish
CREATE FUNCTION request_inner(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	answers text[];
BEGIN
	answers := ARRAY[
		(SELECT status FROM idem_claim('request:10', payload)),
		(SELECT status FROM idem_call('request:10', 'request_inner', payload))];
	BEGIN
		PERFORM idem_call('request:10', 'request_other', payload);
	EXCEPTION WHEN SQLSTATE 'ID001' THEN
		answers := answers || SQLSTATE;
	END;
	RETURN to_jsonb(answers);
END
$$;
BEGIN;
SELECT status, result, replayed FROM idem_call('request:10', 'request_inner', '1');
SELECT status, result, replayed FROM idem_call('request:10', 'request_other', '1');
ROLLBACK;
-- the name counts, not the OID: a replaced function is the same handler, a renamed one is not
CREATE FUNCTION request_named(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
SELECT status, result, replayed FROM idem_call('request:11', 'request_named', '1');
DROP FUNCTION request_named;
CREATE FUNCTION request_named(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '2'::jsonb $$;
SELECT status, result, replayed FROM idem_call('request:11', 'request_named', '1');
ALTER FUNCTION request_named(jsonb) RENAME TO request_renamed;
SELECT status, result, replayed FROM idem_call('request:11', 'request_renamed', '1');
ALTER FUNCTION request_renamed(jsonb) RENAME TO request_named;
ALTER FUNCTION request_named(jsonb) SET SCHEMA request_schema;
SELECT status, result, replayed FROM idem_call('request:11', 'request_schema.request_named', '1');
-- schema and name are compared separately
CREATE SCHEMA request_s;
CREATE SCHEMA request_sx;
CREATE FUNCTION request_s.xf(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
CREATE FUNCTION request_sx.f(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
SELECT status, replayed FROM idem_call('request:12', 'request_s.xf', '1');
ALTER SCHEMA request_s RENAME TO request_t;
SELECT status, replayed FROM idem_call('request:12', 'request_t.xf', '1');
ALTER SCHEMA request_t RENAME TO request_s;
SELECT status, replayed FROM idem_call('request:12', 'request_sx.f', '1');
-- a temporary function is the same handler in the next session
CREATE FUNCTION pg_temp.request_temp(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
SELECT status, replayed FROM idem_call('request:13', 'pg_temp.request_temp', '1');
SELECT substr(request, 1, 16) = substr(sha256('pg_temp\000request_temp'), 1, 16) AS handler,
	   substr(request, 17) = sha256('1') AS payload, length(request)
  FROM idem.keys WHERE key = 'request:13';
SELECT key, length(request) FROM idem.keys WHERE key IN ('request:7', 'request:8') ORDER BY key;
DROP FUNCTION pg_temp.request_temp(jsonb);
DROP FUNCTION request_echo(jsonb), request_other(jsonb), request_inner(jsonb);
SET client_min_messages = warning;
DROP SCHEMA request_schema, request_s, request_sx CASCADE;
RESET client_min_messages;
