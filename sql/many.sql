--
-- idem_claim_many and idem_finish_many
--
\a\pset footer off
\set VERBOSITY sqlstate

-- one row per element, in the order of the array
BEGIN;
SELECT ord, key, claimed, status, result FROM idem_claim_many(ARRAY['many:b', 'many:a', 'many:c']);
-- keys are claimed in byte order, whatever the order of the array
SELECT key FROM idem.keys WHERE key LIKE 'many:%' ORDER BY ctid;
SELECT idem_finish_many(ARRAY['many:b', 'many:a', 'many:c'], ARRAY['{"n": "b"}', NULL, '{"n": "c"}']::jsonb[]);
SELECT ord, key, claimed, status, result FROM idem_claim_many(ARRAY['many:b', 'many:a', 'many:c']);
COMMIT;

-- an inbox: new keys are claimed, known keys are not
SELECT key FROM idem_claim_many(ARRAY['many:c', 'many:d', 'many:a', 'many:e']) WHERE claimed;
SELECT ord, key, status, result FROM idem_claim_many(ARRAY['many:c', 'many:d', 'many:a', 'many:e']);

-- a key twice in one batch is claimed once, then held
SELECT ord, key, claimed, status FROM idem_claim_many(ARRAY['many:f', 'many:g', 'many:f', 'many:f']);
SELECT ord, key, claimed, status FROM idem_claim_many(ARRAY['many:f', 'many:f']);

-- a key that is a prefix of another key
SELECT ord, key, claimed FROM idem_claim_many(ARRAY['many:h2', 'many:h', 'many:h10', 'many:h']);

-- ttl, scope, requests
SELECT ord, key, claimed, expires_at - created_at AS ttl
  FROM idem_claim_many(ARRAY['many:i', 'many:j'], ARRAY['{"a": 1}', NULL]::jsonb[], '1 h', '0', 'scope');
SELECT key, scope, request = '' AS no_request FROM idem.keys WHERE scope = 'scope' ORDER BY key;
BEGIN;
SELECT count(*) FROM idem_claim_many(ARRAY['many:k', 'many:l'], scope => 'scope');
SELECT idem_finish_many(ARRAY['many:k', 'many:l'], scope => 'scope');
COMMIT;
SELECT status, result, finished_at IS NOT NULL AS finished FROM idem_get('many:k', 'scope');

-- nothing to do
SELECT * FROM idem_claim_many('{}');
SELECT idem_finish_many('{}');
SELECT idem_finish_many('{}', '{}');

-- finish: all or none
BEGIN;
SELECT count(*) FROM idem_claim_many(ARRAY['many:m', 'many:n']);
SAVEPOINT s;
SELECT idem_finish_many(ARRAY['many:m', 'many:never', 'many:n'], ARRAY['1', '2', '3']::jsonb[]);
ROLLBACK TO s;
SELECT status FROM idem_get('many:m');
-- the same key twice: allowed with equal results, refused with different results
SELECT idem_finish_many(ARRAY['many:m', 'many:m'], ARRAY['1', '1']::jsonb[]);
SAVEPOINT s;
SELECT idem_finish_many(ARRAY['many:n', 'many:n'], ARRAY['1', '2']::jsonb[]);
ROLLBACK TO s;
SELECT status FROM idem_get('many:n');
COMMIT;

-- bad input
SELECT * FROM idem_claim_many(NULL);
SELECT * FROM idem_claim_many(ARRAY['many:x', NULL]);
SELECT * FROM idem_claim_many(ARRAY['many:x', '']);
SELECT * FROM idem_claim_many(ARRAY['many:x', repeat('x', 1025)]);
SELECT * FROM idem_claim_many(ARRAY[['many:x', 'many:y'], ['many:z', 'many:x']]);
SELECT * FROM idem_claim_many(ARRAY['many:x'], ARRAY['1', '2']::jsonb[]);
SELECT * FROM idem_claim_many(ARRAY['many:x'], '{}');
SELECT * FROM idem_claim_many(ARRAY['many:x'], ttl => '0');
SELECT * FROM idem_claim_many(ARRAY['many:x'], wait => '-1 s');
SELECT * FROM idem_claim_many(ARRAY['many:x'], scope => repeat('x', 256));
SELECT idem_finish_many(NULL);
SELECT idem_finish_many(ARRAY[NULL]);
SELECT idem_finish_many(ARRAY['many:x'], ARRAY['1', '2']::jsonb[]);
SELECT idem_finish_many(ARRAY['many:x'], ARRAY[['1', '2']]::jsonb[]);
SELECT count(*) FROM idem.keys WHERE key LIKE 'many:x%';
BEGIN READ ONLY;
SELECT * FROM idem_claim_many(ARRAY['many:a']);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_finish_many(ARRAY['many:a']);
ROLLBACK;
