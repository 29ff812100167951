--
-- idem_verify: what happens if a handler runs twice (V1, V2, V3, V4, V5, V6)
--
\a\pset footer off
CALL anew();
CREATE SCHEMA verify;
SET search_path = verify, public;

CREATE TABLE events (ref text, amount int);
CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, note text);
CREATE TABLE stamped (id int PRIMARY KEY, name text, updated_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE invoices (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, ref text UNIQUE);
CREATE TABLE tickets (id serial PRIMARY KEY, ref text UNIQUE);
CREATE TABLE vouchers (ref text PRIMARY KEY, code uuid DEFAULT gen_random_uuid());
INSERT INTO accounts VALUES (1, 100, 'one'), (2, 200, 'two');

-- V1: nothing is left: no row, no key, no job, no lock, no setting
CREATE FUNCTION everything() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	t regclass;
	content text;
	digest text := '';
BEGIN
	FOR t IN SELECT oid FROM pg_class
			  WHERE relkind IN ('r', 'm') AND relnamespace IN ('verify'::regnamespace, 'idem'::regnamespace) ORDER BY oid LOOP
		EXECUTE format('SELECT string_agg(concat(ctid, xmin, x), '','' ORDER BY ctid) FROM %s AS x', t) INTO content;
		digest := digest || t || md5(coalesce(content, ''));
	END LOOP;
	RETURN md5(digest) || current_setting('idem.scope') || current_setting('track_counts');
END
$$;
CREATE FUNCTION locks() RETURNS bigint LANGUAGE sql AS
	$$ SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' $$;
-- the findings, and whether anything was left
CREATE FUNCTION verify(handler regproc, payload jsonb DEFAULT '{}', max_table_size bigint DEFAULT 268435456)
RETURNS TABLE ("check" text, verdict text, object text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	before text := everything();
BEGIN
	RETURN QUERY SELECT * FROM idem_verify(handler, payload, max_table_size);
	IF everything() <> before OR locks() <> 0 THEN
		RAISE WARNING 'idem_verify() has left something';
	END IF;
END
$$;
\pset tuples_only on

--
-- Twelve handlers
--

-- 1. append: the second run adds another row
CREATE FUNCTION append(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO events VALUES (payload ->> 'ref', 1) RETURNING '"done"'::jsonb $$;
SELECT * FROM verify('append', '{"ref": "a"}');

-- 2. upsert: the second run writes the same values
CREATE FUNCTION upsert(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO accounts VALUES ((payload ->> 'id')::int, 7, 'new')
	   ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, note = excluded.note RETURNING to_jsonb(accounts) $$;
SELECT * FROM verify('upsert', '{"id": 1}');
SELECT * FROM verify('upsert', '{"id": 3}');

-- 3. counter: the second run counts again, and returns another result
CREATE FUNCTION counter(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ UPDATE accounts SET balance = balance + 10 WHERE id = 1 RETURNING to_jsonb(balance) $$;
SELECT * FROM verify('counter');

-- 4. random default: the row of the first run stays, but after an interruption the code is another one
CREATE FUNCTION voucher(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO vouchers (ref) VALUES ('v') ON CONFLICT DO NOTHING; SELECT '1'::jsonb $$;
SELECT * FROM verify('voucher');
-- and if the second run draws a new code, it fails
CREATE FUNCTION voucher_anew(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO vouchers (ref) VALUES ('v') ON CONFLICT (ref) DO UPDATE SET code = excluded.code; SELECT '1'::jsonb $$;
SELECT * FROM verify('voucher_anew');

-- 5. now() column: both runs have the same now() (V4)
CREATE FUNCTION stamp(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO stamped VALUES (1, 'x', now()) ON CONFLICT (id) DO UPDATE SET updated_at = excluded.updated_at;
	   SELECT '1'::jsonb $$;
SELECT * FROM verify('stamp');

-- 6. sequence: idempotent, but the number after an interruption is another one; so is the result
CREATE FUNCTION invoice(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO invoices (ref) VALUES ('i') ON CONFLICT DO NOTHING; SELECT to_jsonb(id) FROM invoices WHERE ref = 'i' $$;
SELECT * FROM verify('invoice');

CREATE FUNCTION ticket(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO tickets (ref) VALUES ('t') ON CONFLICT DO NOTHING; SELECT '1'::jsonb $$;
SELECT * FROM verify('ticket');

-- 7. trigger: the table itself does not change, its audit does
CREATE TABLE audited (id int PRIMARY KEY, name text);
CREATE TABLE audit (id int, name text);
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO audit VALUES (new.id, new.name); RETURN NULL; END $$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON audited FOR EACH ROW EXECUTE FUNCTION audit();
CREATE FUNCTION audited(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO audited VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET name = excluded.name; SELECT '1'::jsonb $$;
SELECT * FROM verify('audited');

-- 8. partitioned table: every partition is a table
CREATE TABLE parted (id int, region text, n int, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE parted_eu PARTITION OF parted FOR VALUES IN ('eu');
CREATE TABLE parted_us PARTITION OF parted FOR VALUES IN ('us');
CREATE FUNCTION parted(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO parted VALUES (1, 'eu', 1) ON CONFLICT (region, id) DO UPDATE SET n = 1;
	   INSERT INTO parted VALUES (1, 'us', 1) ON CONFLICT (region, id) DO UPDATE SET n = parted.n + 1;
	   SELECT '1'::jsonb $$;
SELECT * FROM verify('parted');

-- 9. delete: there is nothing left to delete
CREATE FUNCTION remove(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM accounts WHERE id = 2; SELECT '1'::jsonb $$;
SELECT * FROM verify('remove');

-- 10. no-op
CREATE FUNCTION noop(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT NULL::jsonb $$;
SELECT * FROM verify('noop', NULL);

-- 11. error: in the first run, in the second run, and after an interruption
CREATE FUNCTION error(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO accounts VALUES ((payload ->> 'id')::int, 1); SELECT '1'::jsonb $$;
SELECT * FROM verify('error', '{"id": 1}');
SELECT * FROM verify('error', '{"id": 5}');
CREATE SEQUENCE tries;
CREATE FUNCTION error_later(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(1 / (2 - nextval('tries'))) $$;
SELECT * FROM verify('error_later');

-- 12. looks idempotent and is not: it looks for the row in another spelling than it inserts
CREATE FUNCTION looks_good(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO events SELECT lower(payload ->> 'ref'), 1
		WHERE NOT EXISTS (SELECT FROM events WHERE ref = payload ->> 'ref');
	   SELECT '1'::jsonb $$;
SELECT * FROM verify('looks_good', '{"ref": "A"}');
SELECT * FROM verify('looks_good', '{"ref": "a"}');
-- and one that keeps the number of rows, and each column's values, but not the rows
CREATE FUNCTION swap(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ UPDATE accounts SET balance = 300 - balance WHERE id IN (1, 2); SELECT '1'::jsonb $$;
SELECT * FROM verify('swap');

--
-- What is compared (V3)
--

-- large values, compressed and out of line
CREATE TABLE large (id int PRIMARY KEY, plain text, packed text);
ALTER TABLE large ALTER plain SET STORAGE EXTERNAL;
CREATE FUNCTION large(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO large VALUES (1, repeat('x', 100000), repeat('y', 1000000))
	   ON CONFLICT (id) DO UPDATE SET plain = excluded.plain || coalesce(payload ->> 'more', ''), packed = excluded.packed;
	   SELECT '1'::jsonb $$;
SELECT * FROM verify('large');
SELECT * FROM verify('large', '{"more": "z"}');

-- a stored generated column, a dropped column, a column added later
CREATE TABLE generated (id int PRIMARY KEY, gone int, n int, twice int GENERATED ALWAYS AS (n * 2) STORED);
INSERT INTO generated VALUES (1, 1, 1), (2, 2, 2);
ALTER TABLE generated DROP COLUMN gone;
ALTER TABLE generated ADD COLUMN later int DEFAULT 5;
CREATE FUNCTION generated(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ UPDATE generated SET n = n + (payload ->> 'plus')::int; SELECT '1'::jsonb $$;
SELECT * FROM verify('generated', '{"plus": 0}');
SELECT * FROM verify('generated', '{"plus": 1}');

-- null and empty differ; rows that are replaced in another order do not
CREATE FUNCTION to_null(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ UPDATE accounts SET note = CASE WHEN note = '' THEN NULL ELSE '' END WHERE id = 1; SELECT '1'::jsonb $$;
SELECT * FROM verify('to_null');
CREATE FUNCTION replace_all(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM accounts; INSERT INTO accounts VALUES (2, 2, 'b'), (1, 1, 'a'); SELECT '1'::jsonb $$;
SELECT * FROM verify('replace_all');

-- many updates of one row in one run, and what the caller's transaction has written before
BEGIN;
UPDATE accounts SET balance = balance + 1;
CREATE FUNCTION often(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. 10 LOOP
		UPDATE accounts SET balance = i WHERE id = 1;
	END LOOP;
	RETURN '1';
END
$$;
SELECT * FROM verify('often');
SELECT id, balance FROM accounts ORDER BY id;
ROLLBACK;

-- a handler that catches its own errors
CREATE FUNCTION catches(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	UPDATE accounts SET balance = 50 WHERE id = 1;
	BEGIN
		INSERT INTO events VALUES ('caught', 1);
		UPDATE accounts SET balance = balance + 1 WHERE id = 1;
		INSERT INTO accounts VALUES (1, 1);
	EXCEPTION WHEN unique_violation THEN
		RETURN '1';
	END;
END
$$;
SELECT * FROM verify('catches');

-- TRUNCATE: the content after both runs is compared, if both have truncated the table
CREATE TABLE summary (n bigint, at text);
INSERT INTO summary VALUES (0, 'old');
CREATE FUNCTION refresh(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ TRUNCATE summary; INSERT INTO summary SELECT count(*), payload ->> 'at' FROM accounts; SELECT '1'::jsonb $$;
SELECT * FROM verify('refresh', '{"at": "x"}');
CREATE FUNCTION refresh_more(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ TRUNCATE summary; INSERT INTO accounts SELECT max(id) + 1, 0 FROM accounts;
	   INSERT INTO summary SELECT count(*) FROM accounts; SELECT '1'::jsonb $$;
SELECT * FROM verify('refresh_more');
CREATE FUNCTION truncate_later(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	IF EXISTS (SELECT FROM events WHERE ref = 't') THEN
		TRUNCATE summary;
	ELSE
		INSERT INTO events VALUES ('t');
	END IF;
	RETURN '1';
END
$$;
SELECT * FROM verify('truncate_later');
CREATE MATERIALIZED VIEW totals AS SELECT sum(balance) AS total FROM accounts;
CREATE FUNCTION refresh_view(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ REFRESH MATERIALIZED VIEW totals; SELECT '1'::jsonb $$;
SELECT "check", verdict, object, regexp_replace(detail, 'pg_catalog.*', '...') FROM verify('refresh_view');

-- DDL is not compared
CREATE FUNCTION ddl(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('CREATE TABLE made_%s (id int)', (SELECT count(*) FROM pg_class WHERE relname LIKE 'made\_%'));
	RETURN '1';
END
$$;
SELECT "check", verdict, object, regexp_replace(detail, 'pg_catalog.*', '...') FROM verify('ddl');
CREATE FUNCTION ddl_once(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ CREATE TABLE IF NOT EXISTS made (id int); SELECT '1'::jsonb $$;
SET client_min_messages = warning;
SELECT * FROM verify('ddl_once');
RESET client_min_messages;
-- the handler alters a table that it writes: after the interruption it adds two columns
CREATE TABLE grows (n int);
SELECT setval('tries', 1, false);
CREATE FUNCTION grow(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('ALTER TABLE grows ADD COLUMN c%s int DEFAULT 1', nextval('tries'));
	IF nextval('tries') % 4 = 0 THEN
		EXECUTE format('ALTER TABLE grows ADD COLUMN c%s int DEFAULT 1', nextval('tries'));
	END IF;
	INSERT INTO grows VALUES (1);
	RETURN '1';
END
$$;
SELECT "check", verdict, object, regexp_replace(detail, 'pg_catalog.*', '...') FROM verify('grow');
-- a temporary table of the handler
CREATE FUNCTION temporary(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	CREATE TEMP TABLE IF NOT EXISTS scratch (n float);
	TRUNCATE scratch;
	INSERT INTO scratch SELECT CASE WHEN payload ? 'other' THEN random() ELSE 1 END;
	RETURN '1';
END
$$;
SET client_min_messages = warning;
SELECT * FROM verify('temporary');
SELECT * FROM verify('temporary', '{"other": true}');
RESET client_min_messages;

-- rows of a temporary table do not last: a difference there is a warning at most
CREATE TEMP TABLE emptied (n int) ON COMMIT DELETE ROWS;
CREATE FUNCTION fill(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO emptied VALUES (1); SELECT '1'::jsonb $$;
SELECT * FROM verify('fill') WHERE "check" = 'second run';

-- a job that is moved: the second run cancels that of the first one, which goes to the history; a job
-- that is enqueued again without a key is another effect all the same
CREATE FUNCTION remind(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT idem_cancel_by_key('verify_q', 'reminder');
	   SELECT idem_enqueue('verify_q', payload, key => 'reminder', delay => '1 h');
	   SELECT '1'::jsonb FROM idem_enqueue('verify_q', key => CASE WHEN payload ? 'keyed' THEN 'other' END) $$;
SELECT * FROM verify('remind', '{"keyed": true}');
SELECT * FROM verify('remind') WHERE verdict = 'fail';

-- a claim that the first run leaves open: "held" is an answer that no real second run gets
CREATE FUNCTION claims_inside(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	answer record;
BEGIN
	answer := idem_claim('inside');
	IF answer.status = 'held' THEN
		INSERT INTO events VALUES ('held', 1);
		IF payload ? 'raise' THEN
			RAISE EXCEPTION 'held';
		END IF;
	END IF;
	IF payload ? 'finish' THEN
		PERFORM idem_finish('inside', '1') WHERE answer.claimed;
	END IF;
	RETURN to_jsonb(answer.status);
END
$$;
SELECT * FROM verify('claims_inside') WHERE "check" <> 'idem_call';
SELECT * FROM verify('claims_inside', '{"raise": true}') WHERE "check" <> 'idem_call';
SELECT * FROM verify('claims_inside', '{"finish": true}') WHERE "check" <> 'idem_call';

-- a second run does not see what SET and SET LOCAL have set in the first one
CREATE FUNCTION marks_session(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT to_jsonb(s.before) FROM (SELECT coalesce(current_setting('verify.mark', true), '') AS before) AS s,
			LATERAL (SELECT set_config('verify.mark', s.before || 'x', NOT payload ? 'session')) AS c $$;
SELECT * FROM verify('marks_session') WHERE "check" = 'result';
SELECT * FROM verify('marks_session', '{"session": true}') WHERE "check" = 'result';

-- V4: the same now() and the same transaction id, in columns of other types and in the result
CREATE TABLE moments (id int PRIMARY KEY, seconds bigint, millis bigint, micros bigint, exact numeric, said text, doc jsonb,
	xid bigint, xid8 xid8, plain bigint, words text);
CREATE FUNCTION moments(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO moments
	   SELECT 1, extract(epoch FROM t), extract(epoch FROM t + interval '1 h') * 1000, extract(epoch FROM t) * 1000000, extract(epoch FROM t),
			  'at ' || t, jsonb_build_object('at', ARRAY[t]), txid_current(), pg_current_xact_id(), 1700000000, 'at 12:00:07.5'
		 FROM (SELECT now() AS t) AS n
	   ON CONFLICT (id) DO UPDATE SET (seconds, millis, micros, exact, said, doc, xid, xid8) =
			(SELECT excluded.seconds, excluded.millis, excluded.micros, excluded.exact, excluded.said, excluded.doc, excluded.xid, excluded.xid8)
	   RETURNING payload $$;
SELECT * FROM verify('moments') WHERE "check" IN ('second run', 'result');
CREATE FUNCTION says_now(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT CASE payload ->> 'as'
		WHEN 'text' THEN to_jsonb('at ' || now()) WHEN 'json' THEN jsonb_build_object('at', now() + '1 h')
		WHEN 'epoch' THEN to_jsonb(extract(epoch FROM now())) WHEN 'millis' THEN to_jsonb(floor(extract(epoch FROM now()) * 1000))
		WHEN 'statement' THEN jsonb_build_array(1, statement_timestamp()) WHEN 'xid' THEN to_jsonb(txid_current())
		ELSE '["2026-11-19T12:00:07.5Z", 1700000000, 7]'::jsonb END $$;
SELECT kind, verdict, detail FROM unnest('{text,json,epoch,millis,statement,xid,none}'::text[]) AS kind,
	   verify('says_now', jsonb_build_object('as', kind)) WHERE "check" = 'result';

-- constraints that are deferred until the commit
CREATE TABLE parents (id int PRIMARY KEY);
CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION orphan(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO children VALUES (1); SELECT '1'::jsonb $$;
SELECT * FROM verify('orphan');
CREATE TABLE once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION twice_at_end(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO once VALUES (1); SELECT '1'::jsonb $$;
SELECT * FROM verify('twice_at_end');
CREATE FUNCTION circular(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM children; INSERT INTO children VALUES (1);
	   INSERT INTO parents VALUES (1) ON CONFLICT DO NOTHING; SELECT '1'::jsonb $$;
SELECT * FROM verify('circular');
-- what triggers write that are deferred until the commit is not compared: the second run defers one more, or none
CREATE TABLE later (id int PRIMARY KEY, name text);
CREATE CONSTRAINT TRIGGER audit AFTER INSERT OR UPDATE ON later DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION audit();
CREATE FUNCTION later(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO later VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET name = excluded.name; SELECT '1'::jsonb $$;
SELECT * FROM verify('later');
CREATE FUNCTION later_once(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO later VALUES (1, 'x') ON CONFLICT DO NOTHING; SELECT '1'::jsonb $$;
SELECT * FROM verify('later_once');

-- times: an interval later, without time zone, in another time zone, a date; a time of the payload is none
CREATE TABLE times (id int PRIMARY KEY, a timestamptz, b timestamp, c time, d timetz, e date, f timestamptz, g text);
CREATE FUNCTION times(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM times;
	   INSERT INTO times VALUES (1, now() + interval '1 day', now() AT TIME ZONE 'Asia/Kathmandu', localtime, current_time,
								 current_date, (payload ->> 'at')::timestamptz, 'now');
	   SELECT '1'::jsonb $$;
SELECT * FROM verify('times', '{"at": "2020-02-02 20:20:20.202020+00"}');
CREATE FUNCTION statement_time(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM times; INSERT INTO times (id, a) VALUES (1, statement_timestamp()); SELECT '1'::jsonb $$;
SELECT * FROM verify('statement_time');
CREATE FUNCTION payload_time(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM times; INSERT INTO times (id, f) VALUES (1, (payload ->> 'at')::timestamptz); SELECT '1'::jsonb $$;
SELECT * FROM verify('payload_time', '{"at": "2020-02-02 20:20:20.202020+00"}');
-- rounded times, domains
CREATE DOMAIN instant AS timestamptz(3);
CREATE TABLE rounded (a timestamptz(3), b timestamp(0), c time(0), d timetz(2), e instant, f timestamptz(3), g timestamp(0));
CREATE FUNCTION rounded(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM rounded;
	   INSERT INTO rounded VALUES (now() + interval '24 h', now(), localtime, current_time, now(),
								   (payload ->> 'at')::timestamptz, (payload ->> 'at')::timestamp);
	   SELECT '1'::jsonb $$;
SELECT * FROM verify('rounded', '{"at": "2020-02-02 20:20:20.202020+00"}');
-- clock_timestamp() moves
CREATE FUNCTION clock_time(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ DELETE FROM times; INSERT INTO times (id, a) VALUES (1, clock_timestamp()); SELECT '1'::jsonb $$;
SELECT * FROM verify('clock_time');

-- other columns that differ after an interruption: computed by the handler
CREATE FUNCTION computed(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO accounts VALUES (9, nextval('tries')) ON CONFLICT DO NOTHING; SELECT '1'::jsonb $$;
SELECT * FROM verify('computed');
-- an effect that survives the rollback, and changes what the next run does
SELECT setval('tries', 1, false);
CREATE FUNCTION survives(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO accounts SELECT 10 + g, 0 FROM generate_series(1, nextval('tries')) AS g ON CONFLICT DO NOTHING;
	   SELECT '1'::jsonb $$;
SELECT * FROM verify('survives');

--
-- What the caller may not see
--
CREATE ROLE idem_verifier;
SELECT idem_grant('idem_verifier', 'app');
GRANT USAGE ON SCHEMA verify TO idem_verifier;
CREATE SCHEMA closed;
CREATE TABLE closed.t (id int PRIMARY KEY, n int);
GRANT SELECT ON closed.t TO idem_verifier;
ALTER FUNCTION counter(jsonb) SECURITY DEFINER SET search_path = verify;
CREATE FUNCTION close(payload jsonb) RETURNS jsonb LANGUAGE sql SECURITY DEFINER AS
	$$ INSERT INTO closed.t VALUES (1, 1) ON CONFLICT (id) DO UPDATE SET n = closed.t.n + 1; SELECT '1'::jsonb $$;
SET ROLE idem_verifier;
SELECT * FROM idem_verify('counter');
SELECT * FROM idem_verify('close');
RESET ROLE;
GRANT SELECT (id, balance) ON accounts TO idem_verifier;
SET ROLE idem_verifier;
SELECT * FROM idem_verify('counter');
RESET ROLE;
GRANT SELECT (note) ON accounts TO idem_verifier;
SET ROLE idem_verifier;
SELECT * FROM idem_verify('counter');
RESET ROLE;
-- row security
ALTER TABLE accounts ENABLE ROW LEVEL SECURITY;
CREATE POLICY open ON accounts USING (true);
SET ROLE idem_verifier;
SELECT * FROM idem_verify('counter');
RESET ROLE;
ALTER TABLE accounts DISABLE ROW LEVEL SECURITY;
-- a function that the caller may not execute
REVOKE EXECUTE ON FUNCTION append FROM PUBLIC;
SET ROLE idem_verifier;
SELECT (fails($$ SELECT * FROM idem_verify('verify.append') $$)).state;
RESET ROLE;
-- another access method
CREATE ACCESS METHOD heap_of_others TYPE TABLE HANDLER heap_tableam_handler;
CREATE TABLE elsewhere (n int) USING heap_of_others;
CREATE FUNCTION elsewhere(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ INSERT INTO elsewhere VALUES (1); SELECT '1'::jsonb $$;
SELECT * FROM verify('elsewhere');
SET client_min_messages = warning;
DROP ACCESS METHOD heap_of_others CASCADE;
RESET client_min_messages;
-- a table over the limit
SELECT * FROM verify('counter', max_table_size => 8191);
SELECT * FROM verify('counter', max_table_size => 8192);

--
-- Jobs and keys of idem
--
CREATE FUNCTION enqueues(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT to_jsonb(outcome) FROM idem_enqueue('verify', payload, key => payload ->> 'key') $$;
SELECT * FROM verify('enqueues', '{}');
-- with a key the second enqueue is absorbed, and says so
SELECT * FROM verify('enqueues', '{"key": "k"}');
CREATE FUNCTION debounces(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT '1'::jsonb FROM idem_enqueue('verify', payload, key => 'k', delay => '1 min', on_duplicate => 'debounce') $$;
SELECT * FROM verify('debounces', '{}');
CREATE FUNCTION replaces(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT '1'::jsonb FROM (SELECT nextval('tries') AS n OFFSET 0) AS s,
		 idem_enqueue('verify', to_jsonb(n), key => 'k', on_duplicate => 'replace') $$;
SELECT * FROM verify('replaces', '{}');
CREATE FUNCTION claims(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	IF (idem_claim('verify')).claimed THEN
		INSERT INTO events VALUES ('claimed', 1);
		PERFORM idem_finish('verify', '1');
	END IF;
	RETURN '1';
END
$$;
SELECT * FROM verify('claims', '{}');
SET idem.require_finish = 'error';
SELECT * FROM verify('claims', '{}');
RESET idem.require_finish;

--
-- Side effects (V1)
--
CREATE FUNCTION locks_and_settings(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT pg_advisory_xact_lock(1); SELECT set_config('idem.scope', 'x', true); SELECT set_config('idem.scope', 'y', false);
	   SELECT pg_notify('verify', 'x'); SELECT '1'::jsonb $$;
LISTEN verify;
SELECT * FROM verify('locks_and_settings');
UNLISTEN verify;
-- counting is switched on for the call
SET track_counts = off;
SELECT * FROM verify('append', '{"ref": "a"}');
SET ROLE idem_verifier;
SELECT verdict, object FROM idem_verify('counter');
RESET ROLE;
RESET track_counts;
-- in REPEATABLE READ and SERIALIZABLE, too
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT verdict, detail FROM verify('counter');
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT verdict, detail FROM verify('upsert', '{"id": 1}');
COMMIT;
-- idem_verify in a handler
CREATE FUNCTION nested(payload jsonb) RETURNS jsonb LANGUAGE sql AS
	$$ SELECT jsonb_agg(verdict) FROM idem_verify('append', payload) $$;
SELECT * FROM verify('nested', '{"ref": "a"}');

-- V2: a cancel and the like are no findings; the transaction and its savepoints go on
CREATE FUNCTION raises(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO events VALUES ('raises', 1);
	RAISE EXCEPTION 'raised' USING errcode = payload ->> 'state';
END
$$;
SELECT (fails(format('SELECT * FROM idem_verify(''raises'', ''{"state": "%s"}'')', state))).*
  FROM unnest('{57P01, 53100, 40001, 40P01, 58030, XX001, XX002}'::text[]) AS state;
CREATE FUNCTION cancelled() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM * FROM idem_verify('raises', '{"state": "57014"}');
EXCEPTION WHEN query_canceled THEN
	RETURN sqlerrm;
END
$$;
SELECT state, v.* FROM unnest('{P0001, 55P03, XX000, ID003}'::text[]) AS state,
	   verify('raises', jsonb_build_object('state', state)) AS v;
BEGIN;
SAVEPOINT a;
INSERT INTO events VALUES ('kept', 1);
SELECT cancelled();
SELECT * FROM events;
ROLLBACK TO a;
SELECT * FROM events;
COMMIT;
BEGIN;
SET LOCAL statement_timeout = '50ms';
CREATE FUNCTION endless(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN LOOP END LOOP; END $$;
\set VERBOSITY sqlstate
SELECT * FROM idem_verify('endless');
ROLLBACK;

-- J22: in each run the handler has a job, which is none
CREATE FUNCTION wants_job(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	job record;
BEGIN
	SELECT * INTO STRICT job FROM idem_current_job();
	RETURN to_jsonb(job) || payload;
END $$;
SELECT DISTINCT "check", verdict FROM idem_verify('wants_job', '{}') ORDER BY 1;
CREATE FUNCTION shows_job(payload jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION '%', (SELECT to_jsonb(j) FROM idem_current_job() AS j);
END $$;
\set VERBOSITY default
SELECT detail FROM idem_verify('shows_job');
SELECT count(*) FROM idem_current_job();

--
-- Arguments
--
\set VERBOSITY default
\pset tuples_only off
SELECT * FROM fails($$ SELECT * FROM idem_verify(NULL) $$) \gx
SELECT state, message FROM fails($$ SELECT * FROM idem_verify('locks') $$);
SELECT * FROM fails($$ SELECT * FROM idem_verify('noop', max_table_size => -1) $$) \gx
SELECT state, message FROM fails($$ SELECT * FROM idem_verify('noop', max_table_size => NULL) $$);
CREATE FUNCTION strict(payload jsonb) RETURNS jsonb STRICT LANGUAGE sql AS $$ SELECT payload $$;
SELECT state, message FROM fails($$ SELECT * FROM idem_verify('strict') $$);
SELECT verdict FROM idem_verify('strict', '1');
BEGIN READ ONLY;
SELECT state, message FROM fails($$ SELECT * FROM idem_verify('noop') $$);
ROLLBACK;

SET client_min_messages = warning;
DROP SCHEMA verify, closed CASCADE;
SELECT idem_revoke('idem_verifier', 'app');
DROP ROLE idem_verifier;
