--
-- Results and checkpoints large enough to be stored out of line, in the TOAST table
--
\a\pset footer off
\set VERBOSITY sqlstate
-- some kB that do not compress, different for each seed
CREATE FUNCTION large(seed integer, chunks integer DEFAULT 150) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
	SELECT jsonb_build_object('seed', seed, 'data',
		(SELECT string_agg(sha512((seed || ':' || n)::bytea)::text, '') FROM generate_series(1, chunks) AS n))
$$;
-- how many values are out of line: their chunks are numbered from 0
SELECT reltoastrelid::regclass AS toast FROM pg_class WHERE oid = 'idem.keys'::regclass \gset
TRUNCATE idem.keys;
SELECT pg_column_size(large(1)) > 15000 AS large, large(1) = large(1) AS same, large(1) = large(2) AS other;

-- K2, K6: finished, in the same transaction and in later ones
BEGIN;
SELECT claimed FROM idem_claim('toast:1');
SELECT idem_finish('toast:1', large(1));
SELECT status, result = large(1) AS same FROM idem_claim('toast:1');
-- K11: again with an equal result, and with a different one of the same size
SELECT idem_finish('toast:1', large(1));
SAVEPOINT s;
SELECT idem_finish('toast:1', large(2));
ROLLBACK TO s;
SELECT idem_finish('toast:1', large(1, 149));
ROLLBACK TO s;
COMMIT;
SELECT count(*) FROM :toast WHERE chunk_seq = 0;
SELECT status, result = large(1) AS same FROM idem_claim('toast:1');
SELECT status, result = large(1) AS same FROM idem_get('toast:1');
SELECT key, status, result = large(1) AS same FROM idem_claim_many(ARRAY['toast:1', 'toast:1']);
-- a value that was read stays valid when its row is removed
BEGIN;
SELECT idem_forget('toast:1'), result = large(1) AS same, idem_cleanup() FROM idem_claim('toast:1');
ROLLBACK;
-- K1: a savepoint
BEGIN;
SELECT claimed FROM idem_claim('toast:2');
SAVEPOINT s;
SELECT idem_finish('toast:2', large(2));
ROLLBACK TO s;
SELECT status FROM idem_claim('toast:2');
SELECT idem_finish('toast:2', large(3));
COMMIT;
SELECT status, result = large(3) AS same FROM idem_get('toast:2');

-- idem_claim_many, idem_finish_many and idem_call
BEGIN;
SELECT count(*) FROM idem_claim_many(ARRAY['toast:3', 'toast:4']);
SELECT idem_finish_many(ARRAY['toast:3', 'toast:4'], ARRAY[large(3), large(4)]);
COMMIT;
SELECT key, result = large(3) AS three, result = large(4) AS four FROM idem_claim_many(ARRAY['toast:3', 'toast:4']);
CREATE FUNCTION large_handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT large(5) $$;
SELECT status, result = large(5) AS same, replayed FROM idem_call('toast:5', 'large_handler');
SELECT status, result = large(5) AS same, replayed FROM idem_call('toast:5', 'large_handler');
DROP FUNCTION large_handler;

-- L5: a checkpoint survives renewals, the next attempt, and a plain claim that is released
SELECT token AS t1 FROM idem_lease('toast:6', '30 s') \gset
SELECT idem_checkpoint('toast:6', :t1, large(6)) > idem_clock() AS live;
SELECT status, checkpoint = large(6) AS same FROM idem_get('toast:6');
SELECT idem_renew('toast:6', :t1, '30 s') > idem_clock() AS live;
SELECT idem_fence('toast:6', :t1);
SELECT status, checkpoint = large(6) AS same FROM idem_get('toast:6');
SET idem.clock_offset = '1 min';
BEGIN;
SELECT claimed FROM idem_claim('toast:6');
SELECT idem_release('toast:6');
COMMIT;
SELECT status, token AS t2, attempt, checkpoint = large(6) AS same FROM idem_lease('toast:6', '30 s') \gset
SELECT :'status' AS status, :attempt AS attempt, :'same' AS same;
-- another checkpoint replaces it; later the row has both a checkpoint and a result
SELECT idem_checkpoint('toast:6', :t2, large(7)) > idem_clock() AS live;
SELECT idem_finish('toast:6', large(8), :t2);
SELECT status, checkpoint = large(7) AS checkpoint, result = large(8) AS result FROM idem_get('toast:6');
-- L3: a repeated finish, with an equal and with a different result
SELECT idem_finish('toast:6', large(8), :t2);
SELECT idem_finish('toast:6', large(9), :t2);
-- a late one
SELECT token AS t3 FROM idem_lease('toast:7', '30 s') \gset
SELECT idem_checkpoint('toast:7', :t3, large(7)) > idem_clock() AS live;
SET idem.clock_offset = '5 min';
SELECT idem_finish('toast:7', large(9), :t3);
SELECT status, checkpoint = large(7) AS checkpoint, result = large(9) AS result FROM idem_claim('toast:7'),
	LATERAL (SELECT checkpoint FROM idem_get('toast:7')) AS g;
RESET idem.clock_offset;

-- K12: the limit applies to the value in memory, however well it would compress
SET idem.max_result_size = '8kB';
BEGIN;
SELECT claimed FROM idem_claim('toast:8');
SAVEPOINT s;
SELECT idem_finish('toast:8', to_jsonb(repeat('x', 9000)));
ROLLBACK TO s;
SELECT idem_finish('toast:8', to_jsonb(repeat('x', 8000)));
COMMIT;
RESET idem.max_result_size;
SELECT length(result #>> '{}') FROM idem_claim('toast:8');

-- a key that starts again has nothing of its earlier row; no value stays behind
SELECT count(*) FROM :toast WHERE chunk_seq = 0;
SET idem.clock_offset = '3 d';
SELECT status, attempt, checkpoint IS NULL AS none FROM idem_lease('toast:6', '30 s');
SELECT status, result IS NULL AS none FROM idem_claim('toast:7');
SELECT idem_cleanup();
SELECT count(*) FROM :toast WHERE chunk_seq = 0;
RESET idem.clock_offset;
TRUNCATE idem.keys;
DROP FUNCTION large(integer, integer);
