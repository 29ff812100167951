--
-- Functions with several columns return composite types of the schema idem.  A role
-- that has only the set app calls them in every form that a query allows.
--
\a\pset footer off
\set VERBOSITY sqlstate
CALL anew();
CREATE ROLE idem_test_app;
SELECT idem_grant('idem_test_app', 'app');
CREATE SCHEMA app AUTHORIZATION idem_test_app;
SET search_path = app, public;

-- such a role has no privilege on the types and on their schema
SELECT count(*) AS types, bool_or(has_type_privilege('idem_test_app', p.prorettype, 'USAGE')) AS usage
  FROM pg_proc AS p JOIN pg_type AS t ON t.oid = p.prorettype
 WHERE p.proname LIKE 'idem\_%' AND t.typtype = 'c';
SELECT has_schema_privilege('idem_test_app', 'idem', 'USAGE');

SET ROLE idem_test_app;

-- the columns that a client sees
SELECT * FROM idem_claim('k') \gdesc
SELECT * FROM idem_claim_many('{k}') \gdesc
SELECT * FROM idem_get('k') \gdesc
SELECT * FROM idem_lease('k', '1 min') \gdesc
SELECT * FROM idem_call('k', 'handler') \gdesc
SELECT * FROM idem_enqueue('q') \gdesc
SELECT * FROM idem_enqueue_many('q', '{}') \gdesc
SELECT * FROM idem_fetch('q') \gdesc
SELECT * FROM idem_complete_many('{}', '{}') \gdesc
SELECT * FROM idem_heartbeat('{}', '{}') \gdesc
SELECT * FROM idem_job(1) \gdesc
SELECT * FROM idem_current_job() \gdesc
SELECT * FROM idem_why(1) \gdesc
SELECT * FROM idem_holder('k') \gdesc
SELECT * FROM idem_verify('handler') \gdesc
SELECT * FROM idem_drain('q', 'handler') \gdesc
SELECT (idem_claim('k')).status, (idem_fetch('q')).* \gdesc
SELECT idem_claim('k') \gdesc

-- FROM, SELECT list, the whole row
SELECT * FROM idem_call('call', 'handler');
SELECT (idem_call('call', 'handler')).result, (idem_call('call', 'handler')).replayed;
SELECT (idem_call('call', 'handler')).*;
SELECT idem_call('call', 'handler');
SELECT c, c.status, (c).result FROM idem_call('call', 'handler') AS c;
SELECT r.a, r.c FROM idem_call('call', 'handler') AS r (a, b, c);
SELECT (x).replayed FROM (SELECT idem_call('call', 'handler') AS x OFFSET 0) AS s;
SELECT to_jsonb(idem_call('call', 'handler'));
SELECT record_send(idem_call('call', 'handler')) =
	   record_send(ROW('finished'::text, '"ran"'::jsonb, true)) AS same_binary;
SELECT idem_enqueue('q', '1');
SELECT idem_enqueue_many('q', '{2, 3}');
SELECT job_id, payload FROM idem_fetch('q', 2);
SELECT (idem_job(3)).state, (idem_job(3)).payload;

-- LATERAL, several functions, a number for each row, no row
SELECT v.k, c.status, g.status AS get_status
  FROM (VALUES ('a'), ('b')) AS v (k), idem_claim(v.k) AS c LEFT JOIN LATERAL idem_get(v.k) AS g ON true;
SELECT v.k, g.status FROM (VALUES ('a'), ('b'), ('none')) AS v (k) LEFT JOIN LATERAL idem_get(v.k) AS g ON true;
SELECT key, m.status, ordinality, r.replayed
  FROM ROWS FROM (idem_claim_many('{b, a}'), idem_call('call', 'handler'))
	   WITH ORDINALITY AS m (ord, key, claimed, status, result, created_at, expires_at, call_status, call_result, replayed, ordinality),
	   idem_call('call', 'handler') AS r;
WITH c AS MATERIALIZED (SELECT * FROM idem_call('call', 'handler')) SELECT * FROM c;

-- PL/pgSQL
CREATE FUNCTION forms() RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
	r record := idem_call('call', 'handler');
	s text;
	j jsonb;
BEGIN
	RETURN NEXT r::text;
	r := NULL;
	SELECT * INTO r FROM idem_call('call', 'handler');
	RETURN NEXT r.result;
	r := idem_claim('a');	-- a row of another type in the same variable
	RETURN NEXT r.status;
	SELECT status, result INTO s, j FROM idem_call('call', 'handler');
	RETURN NEXT s || j;
	s := (idem_claim('a')).status;
	RETURN NEXT s;
	FOR r IN SELECT * FROM idem_claim_many('{b, a}') LOOP
		RETURN NEXT r.ord || r.key || r.status;
	END LOOP;
	FOR r IN SELECT idem_call('call', 'handler') AS answer LOOP
		RETURN NEXT (r.answer).status;
	END LOOP;
	EXECUTE 'SELECT * FROM idem_call($1, $2)' INTO r USING 'call', 'handler'::regproc;
	RETURN NEXT r::text;
	RETURN QUERY SELECT status FROM idem_claim('a');
END
$$;
SELECT * FROM forms();
CREATE FUNCTION one_row() RETURNS record LANGUAGE plpgsql AS $$ BEGIN RETURN idem_call('call', 'handler'); END $$;
SELECT one_row();
SELECT a, c FROM one_row() AS (a text, b jsonb, c boolean);

-- SQL functions
CREATE FUNCTION by_columns(k text) RETURNS TABLE (status text, result jsonb, replayed boolean) LANGUAGE sql
AS $$ SELECT * FROM idem_call(k, 'handler') $$;
SELECT * FROM by_columns('call');
CREATE FUNCTION by_row(k text) RETURNS record LANGUAGE sql AS $$ SELECT idem_call(k, 'handler') $$;
SELECT by_row('call');
SELECT * FROM by_row('call') AS (status text, result jsonb, replayed boolean);
CREATE FUNCTION atomic(k text) RETURNS text LANGUAGE sql BEGIN ATOMIC SELECT (idem_claim(k)).status; END;
SELECT atomic('a');

-- views and tables
CREATE VIEW answers AS SELECT c.*, (idem_claim('a')).claimed FROM idem_call('call', 'handler') AS c;
SELECT * FROM answers;
CREATE TABLE stored AS SELECT * FROM idem_call('call', 'handler');
INSERT INTO stored SELECT * FROM idem_call('call', 'handler');
SELECT * FROM stored;

-- a prepared statement and a cursor
PREPARE claim AS SELECT status FROM idem_claim($1);
EXECUTE claim('a');
PREPARE fetch_job AS SELECT job_id FROM idem_fetch('q');
EXECUTE fetch_job;
BEGIN;
DECLARE c SCROLL CURSOR FOR SELECT key FROM idem_claim_many('{a, b}');
FETCH ALL FROM c;
FETCH FIRST FROM c;
COMMIT;

-- the role can neither name a type nor store its values, so nothing comes to depend on it
SELECT NULL::idem.claim_result;
CREATE TABLE refused (c idem.claim_result);
CREATE TABLE refused AS SELECT idem_claim('a') AS c;
CREATE VIEW refused AS SELECT idem_claim('a') AS c;

-- the session goes on after DROP and CREATE EXTENSION
RESET ROLE;
DROP VIEW answers;
DROP FUNCTION atomic;
DROP EXTENSION idem;
CREATE EXTENSION idem;
SELECT idem_grant('idem_test_app', 'app');
SET ROLE idem_test_app;
SELECT * FROM forms();
EXECUTE claim('a');
EXECUTE fetch_job;

-- a superuser has changed a type: an error, and no crash
RESET ROLE;
\x on
BEGIN;
ALTER TYPE idem.claim_result ADD ATTRIBUTE more text;
SELECT * FROM fails($$ SELECT status FROM idem_claim('altered') $$);
SELECT state, message FROM fails($$ SELECT (idem_claim('altered')).status $$);
SELECT state, message FROM fails($$ EXECUTE claim('altered') $$);
ROLLBACK;
\x off
EXECUTE claim('altered');

CREATE FUNCTION with_change(change text, call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	BEGIN
		EXECUTE 'ALTER TYPE idem.' || change;
		answer := (public.fails('SELECT * FROM ' || call)).state;
		RAISE EXCEPTION SQLSTATE 'XX999';
	EXCEPTION WHEN SQLSTATE 'XX999' THEN	-- the change is rolled back
		RETURN answer;
	END;
END
$$;
-- the result of each function: a column more, a column less, another type by value or by reference
SELECT t.typname, c.change, with_change(t.typname || ' ' || c.change, f.call),
	   (fails('SELECT * FROM ' || f.call)).message AS undone
  FROM (VALUES ('claim', $$idem_claim('changed')$$),
			   ('claim_many', $$idem_claim_many('{changed}')$$),
			   ('get', $$idem_get('changed')$$),
			   ('lease', $$idem_lease('changed', '1 min')$$),
			   ('call', $$idem_call('changed call', 'public.handler')$$),
			   ('enqueue', $$idem_enqueue('changed')$$),
			   ('enqueue_many', $$idem_enqueue_many('changed', '{1}')$$),
			   ('fetch', $$idem_fetch('changed')$$),
			   ('complete_many', $$idem_complete_many('{99}', '{1}')$$),
			   ('heartbeat', $$idem_heartbeat('{99}', '{1}', '1 min')$$),
			   ('current_job', $$idem_current_job()$$),
			   ('job', $$idem_job(99)$$)) AS f (name, call)
  JOIN pg_type AS t ON t.typname = f.name || '_result' AND t.typnamespace = 'idem'::regnamespace
  CROSS JOIN LATERAL (
	SELECT 'ADD ATTRIBUTE more integer' AS change
	 UNION ALL
	SELECT format('DROP ATTRIBUTE %I', (SELECT attname FROM pg_attribute WHERE attrelid = t.typrelid AND attnum = 1))
	 UNION ALL
	SELECT 'ALTER ATTRIBUTE status TYPE bigint'
	 WHERE EXISTS (SELECT FROM pg_attribute WHERE attrelid = t.typrelid AND attname = 'status')
	 UNION ALL
	SELECT 'ALTER ATTRIBUTE job_id TYPE text'
	 WHERE EXISTS (SELECT FROM pg_attribute WHERE attrelid = t.typrelid AND attname = 'job_id')) AS c
 ORDER BY 1, 2;
-- only names: the function does not depend on them
SELECT with_change('claim_result RENAME ATTRIBUTE status TO state', $$idem_claim('changed')$$);

DROP FUNCTION with_change;
\set VERBOSITY default
SET client_min_messages = warning;
DROP SCHEMA app CASCADE;
RESET client_min_messages;
RESET search_path;
SELECT idem_revoke('idem_test_app', 'app');
DROP ROLE idem_test_app;
DEALLOCATE ALL;
CALL anew();
