--
-- Jobs are found by a hash of queue and key.  Equal hashes do not prove equal
-- keys: the text is compared, and only few keys may share a hash.  (test/t/045_hash.pl
-- tests the hash itself.)
--
\a\pset footer off
CALL anew();
SET client_min_messages = warning;
\set VERBOSITY default

-- queue and key are hashed separately: no two of these share a hash
SELECT count(*) FROM (VALUES ('a', 'bc'), ('ab', 'c'), ('abc', 'a'), ('bc', 'a')) AS k (queue, key), idem_enqueue(queue, key => key);
SELECT count(DISTINCT key_hash) FROM idem.jobs;
TRUNCATE idem.jobs;

-- the hash of ('q', 'k'), which the test also gives to other keys
SELECT job_id FROM idem_enqueue('q', key => 'k') \gset
SELECT key_hash FROM idem.jobs \gset
SELECT idem_cancel(:job_id);
CREATE FUNCTION same_hash(bigint, queue text, key text) RETURNS bigint LANGUAGE sql AS $$
	INSERT INTO idem.jobs (job_id, run_at, enqueued_at, key_hash, priority, queue, key)
	VALUES (nextval('idem.jobs_job_id_seq'), now(), now(), $1, 0, queue, key) RETURNING job_id
$$;

-- they are not duplicates: neither another key of the queue nor the same key of another queue
SELECT same_hash(:key_hash, 'q', 'other'), same_hash(:key_hash, 'other', 'k');
SELECT outcome FROM idem_enqueue('q', key => 'k');
SELECT outcome FROM idem_enqueue('q', key => 'k');
SELECT outcome FROM idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 h');
-- nor is a job without a key
SELECT same_hash(:key_hash, 'q', NULL), same_hash(:key_hash, 'q', 'later');
SELECT outcome FROM idem_enqueue('q', key => 'k');

-- 31 other keys are not too many, however many jobs each has
TRUNCATE idem.jobs;
SELECT count(same_hash(:key_hash, 'q', 'other ' || i)) FROM generate_series(1, 31) AS i, generate_series(1, 3);
SELECT outcome FROM idem_enqueue('q', key => 'k');
SELECT outcome FROM idem_enqueue('q', key => 'k');
-- one more is too many: a new key is refused
SELECT same_hash(:key_hash, 'other', 'other 1');
DELETE FROM idem.jobs WHERE key = 'k';
SELECT outcome FROM idem_enqueue('q', key => 'k');
SELECT outcome FROM idem_enqueue_many('q', '{1, 2}', '{fine, k}');
-- it leaves nothing behind: keys with other hashes and jobs without a key still work
SELECT outcome FROM idem_enqueue('q', key => 'fine');
SELECT outcome FROM idem_enqueue('q');
SELECT count(*) FROM pg_locks WHERE locktype = 'object' AND classid = 'idem.jobs'::regclass;
-- it works again when one of them has ended
SELECT count(idem_cancel(job_id)) FROM idem.jobs WHERE key = 'other 7';
SELECT outcome FROM idem_enqueue('q', key => 'k');

-- keys of done jobs also count, for strategies that read them
TRUNCATE idem.jobs;
SELECT count(same_hash(:key_hash, 'q', 'other ' || i)) FROM generate_series(1, 20) AS i;
INSERT INTO idem.job_keys (key_hash, expires_at, job_id, queue, key)
SELECT :key_hash, now() + interval '1 h', 1000 + i, 'q', 'other ' || i FROM generate_series(1, 31) AS i;
SELECT outcome FROM idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 h');
SELECT idem_complete(job_id, token, '"done"') FROM idem_fetch('q', 100) WHERE key = 'k';
SELECT outcome, result FROM idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 h');
DELETE FROM idem.job_keys WHERE key = 'k';
INSERT INTO idem.job_keys (key_hash, expires_at, job_id, queue, key) VALUES (:key_hash, now() + interval '1 h', 2000, 'q', 'other 32');
SELECT outcome FROM idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 h');
SELECT outcome FROM idem_enqueue('q', key => 'k');
-- expired ones do not count
UPDATE idem.job_keys SET expires_at = now() WHERE key = 'other 32';
DELETE FROM idem.jobs WHERE key = 'k';
SELECT outcome FROM idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 h');

-- many at once: other keys with the hash of one of them are not duplicates
TRUNCATE idem.jobs, idem.job_keys;
SELECT same_hash(:key_hash, 'q', 'other'), same_hash(:key_hash, 'other', 'k');
SELECT ord, outcome FROM idem_enqueue_many('q', '{1, 2, 3, 4}', '{a, k, b, k}');
SELECT ord, outcome FROM idem_enqueue_many('q', '{1, 2, 3, 4}', '{a, k, b, c}');
-- J9: these two keys have different hashes, but share a lock
SELECT ord, outcome FROM idem_enqueue_many('q', '{1, 2, 3}', '{31837642, x, 4785731}');
SELECT count(DISTINCT key_hash), count(DISTINCT key_hash >> 16) FROM idem.jobs WHERE key IN ('31837642', '4785731');
SELECT ord, outcome FROM idem_enqueue_many('q', '{1, 2, 3}', '{4785731, 31837642, y}');
SELECT count(*) FROM pg_locks WHERE locktype = 'object' AND classid = 'idem.jobs'::regclass;

DROP FUNCTION same_hash;
TRUNCATE idem.jobs, idem.job_keys, idem.job_log, idem.queues;
