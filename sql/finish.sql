--
-- idem_finish: rules K2, K11, K12
--
\a\pset footer off
\set VERBOSITY sqlstate

-- without a result
BEGIN;
SELECT claimed FROM idem_claim('finish:1');
SELECT idem_finish('finish:1');
SELECT status, result, finished_at IS NOT NULL AS finished FROM idem_get('finish:1');
COMMIT;
SELECT status, result IS NULL AS null FROM idem_claim('finish:1');

-- a JSON null is a result
BEGIN;
SELECT claimed FROM idem_claim('finish:2');
SELECT idem_finish('finish:2', 'null');
COMMIT;
SELECT status, result, result IS NULL AS null FROM idem_claim('finish:2');

-- K11: an equal result is a no-op
BEGIN;
SELECT claimed FROM idem_claim('finish:3');
SELECT idem_finish('finish:3', '{"a": 1, "b": [1, 2]}');
SELECT idem_finish('finish:3', '{"b": [1, 2.0], "a": 1.0}');
SELECT result FROM idem_get('finish:3');
-- K11: a different result is an error
SAVEPOINT s;
SELECT idem_finish('finish:3', '{"a": 2}');
ROLLBACK TO s;
SELECT idem_finish('finish:3', NULL);
ROLLBACK TO s;
COMMIT;
SELECT result FROM idem_get('finish:3');

BEGIN;
SELECT claimed FROM idem_claim('finish:4');
SELECT idem_finish('finish:4', NULL);
SELECT idem_finish('finish:4', NULL);
SELECT idem_finish('finish:4', '1');
ROLLBACK;

-- K11: only in the transaction that claimed
SELECT idem_finish('finish:never');
SELECT claimed FROM idem_claim('finish:5');
SELECT idem_finish('finish:5', '5');
SELECT status, result FROM idem_get('finish:5');
-- not under another scope
BEGIN;
SELECT claimed FROM idem_claim('finish:6', scope => 'a');
SAVEPOINT s;
SELECT idem_finish('finish:6', '6');
ROLLBACK TO s;
SELECT idem_finish('finish:6', '6', scope => 'b');
ROLLBACK TO s;
SELECT idem_finish('finish:6', '6', scope => 'a');
COMMIT;
SELECT result FROM idem_get('finish:6', 'a');
-- not after the claim was rolled back
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('finish:7');
ROLLBACK TO s;
SELECT idem_finish('finish:7', '7');
ROLLBACK;

-- a token belongs to a lease
BEGIN;
SELECT claimed FROM idem_claim('finish:8');
SAVEPOINT s;
SELECT idem_finish('finish:8', '8', token => 1);
ROLLBACK TO s;
SELECT idem_finish('finish:8', '8', token => 0);
ROLLBACK TO s;
SELECT idem_finish('finish:8', '8', token => -1);
ROLLBACK TO s;
SELECT status FROM idem_get('finish:8');
COMMIT;

-- a large result, stored out of line, comes back whole
BEGIN;
SELECT claimed FROM idem_claim('finish:9');
SELECT idem_finish('finish:9', (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 10000) AS i));
COMMIT;
SELECT jsonb_array_length(result), result = (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 10000) AS i) AS whole
  FROM idem_claim('finish:9');
-- also as a second finish
BEGIN;
SELECT claimed FROM idem_claim('finish:10');
SELECT idem_finish('finish:10', result) FROM idem_get('finish:9');
SELECT idem_finish('finish:10', result) FROM idem_get('finish:9');
COMMIT;

-- K12: but not above the limit
SET idem.max_result_size = '1 kB';
BEGIN;
SELECT claimed FROM idem_claim('finish:11');
SAVEPOINT s;
SELECT idem_finish('finish:11', to_jsonb(repeat('x', 1025)));
ROLLBACK TO s;
SELECT idem_finish('finish:11', to_jsonb(repeat('x', 1000)));
COMMIT;
RESET idem.max_result_size;

-- finish is a HOT update: it changes no indexed column, and the page has room
BEGIN;
SELECT count(claimed) FROM generate_series(1, 20) AS i, LATERAL idem_claim('hot:' || i);
SELECT pg_stat_get_xact_tuples_updated('idem.keys'::regclass) AS updated \gset before_
SELECT pg_stat_get_xact_tuples_hot_updated('idem.keys'::regclass) AS hot \gset before_
SELECT count(*) FROM (SELECT idem_finish('hot:' || i, '{"id": 1}') FROM generate_series(1, 20) AS i OFFSET 0) AS f;
SELECT pg_stat_get_xact_tuples_updated('idem.keys'::regclass) - :before_updated AS updated,
	   pg_stat_get_xact_tuples_hot_updated('idem.keys'::regclass) - :before_hot AS hot;
COMMIT;

-- the remembered place of the last claim is only a hint: keys finished in another order,
-- a key claimed again after rollback, a truncated table
BEGIN;
SELECT count(*) FROM idem_claim_many(ARRAY['finish:12', 'finish:13', 'finish:14']);
SELECT idem_finish('finish:12', '12'), idem_finish('finish:14', '14'), idem_finish('finish:13', '13');
SELECT key, result FROM idem_claim_many(ARRAY['finish:12', 'finish:13', 'finish:14']);
COMMIT;
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('finish:15');
ROLLBACK TO s;
SELECT claimed FROM idem_claim('finish:15', scope => 'other');
SAVEPOINT s;
SELECT idem_finish('finish:15', '15');
ROLLBACK TO s;
SELECT idem_finish('finish:15', '15', scope => 'other');
COMMIT;
BEGIN;
SELECT claimed FROM idem_claim('finish:16');
TRUNCATE idem.keys;
SELECT idem_finish('finish:16', '16');
ROLLBACK;

-- K13
BEGIN READ ONLY;
SELECT idem_finish('finish:1');
ROLLBACK;
