--
-- A key stands for one request: rule K7
--
\set VERBOSITY sqlstate

SELECT claimed FROM idem_claim('request:1', '{"amount": 9900, "currency": "EUR"}');
-- the same request, written otherwise
SELECT status FROM idem_claim('request:1', '{"currency":"EUR",   "amount":9900}');
-- what is stored is its SHA-256 over the text form
SELECT request = sha256('{"amount": 9900, "currency": "EUR"}'::jsonb::text::bytea) AS sha256
  FROM idem.keys WHERE key = 'request:1';
-- another one
SELECT * FROM idem_claim('request:1', '{"amount": 9901, "currency": "EUR"}');
SELECT * FROM idem_claim('request:1', 'null');
SELECT * FROM idem_claim('request:1', '{"amount": 9901, "currency": "EUR"}', wait => '0');
SELECT * FROM idem_claim_many(ARRAY['request:1'], ARRAY['{"amount": 1}'::jsonb]);
-- no check where one of the two gave none
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

-- idem_call: the payload is the request
CREATE FUNCTION request_echo(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo', '{"a": 1}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo', '{"a": 2}');
SELECT status, result, replayed FROM idem_call('request:6', 'request_echo');
DROP FUNCTION request_echo;
