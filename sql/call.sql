--
-- idem_call: claim, run, finish in one round trip
--
\a\pset footer off
\set VERBOSITY sqlstate
CREATE TABLE charges (id int GENERATED ALWAYS AS IDENTITY, amount int);
CREATE FUNCTION charge_card(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	charge_id int;
BEGIN
	INSERT INTO charges (amount) VALUES ((payload ->> 'amount')::int) RETURNING id INTO charge_id;
	RETURN jsonb_build_object('charge_id', charge_id);
END
$$;

SELECT * FROM idem_call('call:1', 'charge_card', '{"amount": 9900}');
SELECT * FROM idem_call('call:1', 'charge_card', '{"amount": 9900}');
SELECT * FROM charges;
-- idem_call uses ordinary keys
SELECT claimed, status, result FROM idem_claim('call:1');
SELECT * FROM idem_call('call:1', 'charge_card', '{"amount": 9900}', scope => 'other');
SELECT count(*) FROM charges;

-- an error of the handler is passed on, and the claim is rolled back
SELECT * FROM idem_call('call:2', 'charge_card', '{"amount": "much"}');
SELECT count(*) FROM idem_get('call:2');
SELECT count(*) FROM charges;
SELECT * FROM idem_call('call:2', 'charge_card', '{"amount": 1}');

-- ttl
SELECT status FROM idem_call('call:3', 'charge_card', '{"amount": 3}', ttl => '1 s');
SET idem.clock_offset = '2 s';
SELECT status, replayed FROM idem_call('call:3', 'charge_card', '{"amount": 3}', ttl => '1 s');
RESET idem.clock_offset;

-- a null result, a null payload
CREATE FUNCTION nothing(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT NULL::jsonb $$;
SELECT * FROM idem_call('call:4', 'nothing', '1');
SELECT * FROM idem_call('call:4', 'nothing', '1');
SELECT * FROM idem_call('call:5', 'nothing');
CREATE FUNCTION strict(payload jsonb) RETURNS jsonb STRICT LANGUAGE sql AS $$ SELECT payload $$;
SELECT * FROM idem_call('call:6', 'strict', '6');
SELECT * FROM idem_call('call:7', 'strict');
SELECT count(*) FROM idem_get('call:7');

-- the handler calls idem_call again with the same key
CREATE FUNCTION again(payload jsonb) RETURNS jsonb LANGUAGE sql
AS $$ SELECT to_jsonb(c) FROM idem_call('call:8', 'again', payload) AS c $$;
SELECT * FROM idem_call('call:8', 'again', '{}');

-- a handler that finishes its key itself
CREATE FUNCTION finisher(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_finish('call:9', '{"by": "handler"}');
	RETURN payload;
END
$$;
SELECT * FROM idem_call('call:9', 'finisher', '{"by": "handler"}');
SELECT idem_forget('call:9');
SELECT * FROM idem_call('call:9', 'finisher', '{"by": "caller"}');
SELECT count(*) FROM idem_get('call:9');

-- a STABLE handler sees what this transaction wrote
CREATE FUNCTION looks(payload jsonb) RETURNS jsonb STABLE LANGUAGE sql
AS $$ SELECT to_jsonb(g.status) FROM idem_get('call:10') AS g $$;
SELECT * FROM idem_call('call:10', 'looks', '{}');

-- a result over the limit
SET idem.max_result_size = '100 B';
CREATE FUNCTION big(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(repeat('x', 200)) $$;
SELECT * FROM idem_call('call:11', 'big');
SELECT count(*) FROM idem_get('call:11');
RESET idem.max_result_size;

-- invalid handlers
CREATE FUNCTION two(a jsonb, b jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT a $$;
CREATE FUNCTION of_text(a text) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(a) $$;
CREATE FUNCTION to_text(a jsonb) RETURNS text LANGUAGE sql AS $$ SELECT a::text $$;
CREATE FUNCTION set_of(a jsonb) RETURNS SETOF jsonb LANGUAGE sql AS $$ SELECT a $$;
CREATE PROCEDURE proc(a jsonb) LANGUAGE sql AS $$ SELECT a $$;
CREATE AGGREGATE agg(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
SELECT * FROM idem_call('call:12', 'two');
SELECT * FROM idem_call('call:12', 'of_text');
SELECT * FROM idem_call('call:12', 'to_text');
SELECT * FROM idem_call('call:12', 'set_of');
SELECT * FROM idem_call('call:12', 'proc');
SELECT * FROM idem_call('call:12', 'agg');
SELECT * FROM idem_call('call:12', NULL);
SELECT * FROM idem_call('call:12', 'no_such_function');
SELECT * FROM idem_call('call:12', 0);
SELECT * FROM idem_call(NULL, 'charge_card');
SELECT count(*) FROM idem_get('call:12');

-- K13
BEGIN READ ONLY;
SELECT * FROM idem_call('call:1', 'charge_card', '{"amount": 9900}');
ROLLBACK;

DROP AGGREGATE agg(jsonb);
DROP PROCEDURE proc(jsonb);
DROP FUNCTION charge_card, nothing, strict, again, finisher, looks, big, two, of_text, to_text, set_of;
DROP TABLE charges;

-- the same C function under two names, one called inside the other
CREATE FUNCTION other_call(text, regproc, jsonb, interval, interval, text,
	OUT status text, OUT result jsonb, OUT replayed boolean)
AS '$libdir/idem', 'idem_call' LANGUAGE C;
CREATE FUNCTION inner_handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"inner"'::jsonb $$;
CREATE FUNCTION outer_handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT result FROM other_call('call:inner', 'inner_handler', NULL, NULL, NULL, NULL) $$;
SELECT * FROM idem_call('call:outer', 'outer_handler');
SELECT idem_forget('call:inner'), idem_forget('call:outer');
DROP FUNCTION other_call, inner_handler, outer_handler;
