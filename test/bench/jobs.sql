/*
 * test/bench/jobs.sql: what the lines of jobs need, in the database of setup.sql.
 *
 * hand.jobs is the table a careful developer writes instead of idem: a column for
 * the state, a unique index on the key of those that wait, an index in the order of
 * fetching that holds no others, a lease, an attempt to fence with, and the fill
 * factor of idem.jobs.
 *
 * Every enqueue, fetch and completion is a transaction of its own unless the name
 * says otherwise.  Keys are UUIDs, made before the clock starts.
 */
SET ROLE bench;

CREATE TABLE hand.jobs (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	queue text NOT NULL,
	key text,
	payload jsonb,
	state text NOT NULL DEFAULT 'waiting',
	priority int NOT NULL DEFAULT 0,
	run_at timestamptz NOT NULL DEFAULT now(),
	enqueued_at timestamptz NOT NULL DEFAULT now(),
	attempt int NOT NULL DEFAULT 0,
	leased_until timestamptz
) WITH (fillfactor = :jobs_fillfactor);
CREATE UNIQUE INDEX ON hand.jobs (queue, key) WHERE state = 'waiting';
CREATE INDEX ON hand.jobs (queue, priority, run_at, id) WHERE state = 'waiting';

-- the row that might stand for a key beside its job
CREATE TABLE bench.job_keys (
	queue text,
	key text,
	job_id bigint NOT NULL,
	PRIMARY KEY (queue, key)
);

CREATE FUNCTION bench.payload() RETURNS jsonb
LANGUAGE sql IMMUTABLE
RETURN '{"account": 42, "amount": 9900}'::jsonb;

CREATE TYPE bench.mark AS (us float8, lsn pg_lsn);

CREATE FUNCTION bench.mark() RETURNS bench.mark
LANGUAGE sql VOLATILE
RETURN ROW(bench.clock_us(), pg_current_wal_insert_lsn())::bench.mark;

-- lines for the samples: bytes of WAL and microseconds per job since the mark
CREATE FUNCTION bench.cost(step text, since bench.mark, n int) RETURNS text
LANGUAGE sql VOLATILE
RETURN format(E'%s_wal %s\n%1$s_us %3$s\n', step,
	((pg_current_wal_insert_lsn() - (since).lsn) / n)::float8,
	bench.elapsed_us((since).us, n));

-- jobs that wait
CREATE PROCEDURE bench.idem_fill(n int, batch int DEFAULT 1000)
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. n / batch LOOP
		PERFORM count(*) FROM idem_enqueue_many('bench', array_fill(bench.payload(), ARRAY[batch]), bench.fresh(batch));
		COMMIT;
	END LOOP;
END $$;

CREATE PROCEDURE bench.hand_fill(n int, batch int DEFAULT 1000)
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. n / batch LOOP
		INSERT INTO hand.jobs (queue, key, payload)
		SELECT 'bench', k, bench.payload() FROM unnest(bench.fresh(batch)) AS k;
		COMMIT;
	END LOOP;
END $$;

/* jobs_wal: enqueue, fetch with a lease, complete */
CREATE PROCEDURE bench.idem_leased(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	ids bigint[] := array_fill(0, ARRAY[n]);
	tokens bigint[] := ids;
	start bench.mark := bench.mark();
	step bench.mark := start;
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		PERFORM idem_enqueue('bench', bench.payload(), keys[i]);
		COMMIT;
	END LOOP;
	lines := bench.cost('enqueue', step, n);
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		SELECT job_id, token INTO r FROM idem_fetch('bench', lease => '1 h');
		ids[i] := r.job_id;
		tokens[i] := r.token;
		COMMIT;
	END LOOP;
	lines := lines || bench.cost('fetch', step, n);
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		PERFORM idem_complete(ids[i], tokens[i]);
		COMMIT;
	END LOOP;
	lines := lines || bench.cost('complete', step, n) || bench.cost('job', start, n);
END $$;

CREATE PROCEDURE bench.hand_leased(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	ids bigint[] := array_fill(0, ARRAY[n]);
	start bench.mark := bench.mark();
	step bench.mark := start;
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		INSERT INTO hand.jobs (queue, key, payload) VALUES ('bench', keys[i], bench.payload())
			ON CONFLICT (queue, key) WHERE state = 'waiting' DO NOTHING;
		COMMIT;
	END LOOP;
	lines := bench.cost('enqueue', step, n);
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		UPDATE hand.jobs
		   SET state = 'running', attempt = attempt + 1, leased_until = now() + interval '1 hour'
		 WHERE id = (SELECT id FROM hand.jobs
					  WHERE queue = 'bench' AND state = 'waiting' AND run_at <= now()
					  ORDER BY priority, run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED)
		RETURNING id, attempt INTO r;
		ids[i] := r.id;
		COMMIT;
	END LOOP;
	lines := lines || bench.cost('fetch', step, n);
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		DELETE FROM hand.jobs WHERE id = ids[i] AND attempt = 1;
		COMMIT;
	END LOOP;
	lines := lines || bench.cost('complete', step, n) || bench.cost('job', start, n);
END $$;

/* The same, fetch and completion in one transaction. */
CREATE PROCEDURE bench.idem_in_tx(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	start bench.mark := bench.mark();
	step bench.mark;
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		PERFORM idem_enqueue('bench', bench.payload(), keys[i]);
		COMMIT;
	END LOOP;
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		SELECT job_id, token INTO r FROM idem_fetch('bench');
		PERFORM idem_complete(r.job_id, r.token);
		COMMIT;
	END LOOP;
	lines := bench.cost('drain', step, n) || bench.cost('job', start, n);
END $$;

CREATE PROCEDURE bench.hand_in_tx(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	start bench.mark := bench.mark();
	step bench.mark;
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		INSERT INTO hand.jobs (queue, key, payload) VALUES ('bench', keys[i], bench.payload())
			ON CONFLICT (queue, key) WHERE state = 'waiting' DO NOTHING;
		COMMIT;
	END LOOP;
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		SELECT id, payload INTO r FROM hand.jobs
		 WHERE queue = 'bench' AND state = 'waiting' AND run_at <= now()
		 ORDER BY priority, run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED;
		DELETE FROM hand.jobs WHERE id = r.id;
		COMMIT;
	END LOOP;
	lines := bench.cost('drain', step, n) || bench.cost('job', start, n);
END $$;

/* Jobs enqueued and fetched 100 at a time, for the share of HOT and the fill factor. */
CREATE PROCEDURE bench.idem_fetch_100(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	step bench.mark;
BEGIN
	CALL bench.idem_fill(n, 100);
	step := bench.mark();
	FOR i IN 1 .. n / 100 LOOP
		PERFORM count(*) FROM idem_fetch('bench', 100, '1 h');
		COMMIT;
	END LOOP;
	lines := bench.cost('fetch', step, n);
END $$;

CREATE PROCEDURE bench.hand_fetch_100(n int)
LANGUAGE plpgsql AS $$
BEGIN
	CALL bench.hand_fill(n, 100);
	FOR i IN 1 .. n / 100 LOOP
		UPDATE hand.jobs
		   SET state = 'running', attempt = attempt + 1, leased_until = now() + interval '1 hour'
		 WHERE id = ANY (ARRAY(SELECT id FROM hand.jobs
								WHERE queue = 'bench' AND state = 'waiting' AND run_at <= now()
								ORDER BY priority, run_at, id LIMIT 100 FOR UPDATE SKIP LOCKED));
		COMMIT;
	END LOOP;
END $$;

/* A duplicate of a job that waits. */
CREATE PROCEDURE bench.idem_duplicate(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	step bench.mark;
	r record;
BEGIN
	PERFORM count(*) FROM idem_enqueue_many('bench', array_fill(bench.payload(), ARRAY[n]), keys);
	COMMIT;
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		r := idem_enqueue('bench', bench.payload(), keys[i]);
		ASSERT r.outcome = 'absorbed';
		COMMIT;
	END LOOP;
	lines := bench.cost('duplicate', step, n);
END $$;

CREATE PROCEDURE bench.hand_duplicate(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	step bench.mark;
BEGIN
	INSERT INTO hand.jobs (queue, key, payload)
	SELECT 'bench', k, bench.payload() FROM unnest(keys) AS k;
	COMMIT;
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		INSERT INTO hand.jobs (queue, key, payload) VALUES ('bench', keys[i], bench.payload())
			ON CONFLICT (queue, key) WHERE state = 'waiting' DO NOTHING;
		ASSERT NOT FOUND;
		COMMIT;
	END LOOP;
	lines := bench.cost('duplicate', step, n);
END $$;

/*
 * What there might be instead of the index on the hash of the key: a row per key,
 * inserted with its job and deleted with it.  The job comes with its key but
 * without the hash (it is for later), and both are done in C and in SQL as they
 * would be: jobs by idem, the row by a statement.
 */
CREATE PROCEDURE bench.idem_enqueued(n int, key_rows boolean, hashed boolean, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	due timestamptz := CASE WHEN hashed THEN clock_timestamp() ELSE clock_timestamp() + interval '1 hour' END;
	step bench.mark := bench.mark();
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		r := idem_enqueue('bench', bench.payload(), keys[i], run_at => due);
		IF key_rows THEN
			INSERT INTO bench.job_keys VALUES ('bench', keys[i], r.job_id) ON CONFLICT DO NOTHING;
		END IF;
		COMMIT;
	END LOOP;
	lines := bench.cost('enqueue', step, n);
	step := bench.mark();
	FOR i IN 1 .. n LOOP
		IF key_rows THEN
			DELETE FROM bench.job_keys WHERE queue = 'bench' AND key = keys[i];
		ELSE
			PERFORM pg_current_xact_id();
		END IF;
		COMMIT;
	END LOOP;
	lines := lines || bench.cost('delete', step, n);
END $$;

/* jobs_rate: in bulk.  A slice of a large array would cost more than the jobs. */
CREATE TABLE bench.batches (
	id int PRIMARY KEY,
	keys text[]
);
ALTER TABLE bench.batches ALTER COLUMN keys SET STORAGE EXTERNAL;

CREATE PROCEDURE bench.make_batches(n int, batch int)
LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE bench.batches;
	INSERT INTO bench.batches SELECT i, bench.fresh(batch) FROM generate_series(1, n / batch) AS i;
	COMMIT;
END $$;

CREATE PROCEDURE bench.idem_bulk_us(n int, batch int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	payloads jsonb[] := array_fill(bench.payload(), ARRAY[batch]);
	ks text[];
	start float8;
BEGIN
	CALL bench.make_batches(n, batch);
	start := bench.clock_us();
	FOR i IN 1 .. n / batch LOOP
		SELECT keys INTO ks FROM bench.batches WHERE id = i;
		PERFORM count(*) FROM idem_enqueue_many('bench', payloads, ks);
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

CREATE PROCEDURE bench.hand_bulk_us(n int, batch int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	payloads jsonb[] := array_fill(bench.payload(), ARRAY[batch]);
	ks text[];
	start float8;
BEGIN
	CALL bench.make_batches(n, batch);
	start := bench.clock_us();
	FOR i IN 1 .. n / batch LOOP
		SELECT keys INTO ks FROM bench.batches WHERE id = i;
		INSERT INTO hand.jobs (queue, key, payload)
		SELECT 'bench', u.key, u.payload FROM unnest(ks, payloads) AS u (key, payload) ORDER BY u.key
			ON CONFLICT (queue, key) WHERE state = 'waiting' DO NOTHING;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

/* jobs_depth, jobs_xmin: microseconds per job, fetched with a lease and completed one by one */
CREATE PROCEDURE bench.idem_drain_us(n int, queue text DEFAULT 'bench', INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start float8 := bench.clock_us();
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		SELECT job_id, token INTO STRICT r FROM idem_fetch(queue, lease => '1 h');
		COMMIT;
		PERFORM idem_complete(r.job_id, r.token);
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

CREATE PROCEDURE bench.hand_drain_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start float8 := bench.clock_us();
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		UPDATE hand.jobs
		   SET state = 'running', attempt = attempt + 1, leased_until = now() + interval '1 hour'
		 WHERE id = (SELECT id FROM hand.jobs
					  WHERE queue = 'bench' AND state = 'waiting' AND run_at <= now()
					  ORDER BY priority, run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED)
		RETURNING id, attempt INTO STRICT r;
		COMMIT;
		DELETE FROM hand.jobs WHERE id = r.id AND attempt = r.attempt;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

-- the first and the last tenth of them
CREATE PROCEDURE bench.idem_drain_ends(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	us float8;
BEGIN
	FOR tenth IN 1 .. 10 LOOP
		CALL bench.idem_drain_us(n / 10, 'bench', us);
		IF tenth IN (1, 10) THEN
			lines := lines || format(E'%s %s\n', CASE tenth WHEN 1 THEN 'first' ELSE 'last' END, us);
		END IF;
	END LOOP;
END $$;

-- the first job of a session that has worked elsewhere, and later ones; by the time of day
CREATE PROCEDURE bench.idem_drain_session(n int, INOUT lines text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	start float8;
	us float8;
BEGIN
	PERFORM count(*) FROM idem_enqueue_many('elsewhere', array_fill(bench.payload(), ARRAY[50]));
	COMMIT;
	CALL bench.idem_drain_us(50, 'elsewhere', us);
	start := bench.time_us();
	CALL bench.idem_drain_us(1, 'bench', us);
	lines := format(E'opening %s\n', bench.time_us() - start);
	start := bench.time_us();
	CALL bench.idem_drain_us(n, 'bench', us);
	lines := lines || format(E'later %s\n', (bench.time_us() - start) / n);
END $$;

/* counts: enqueues alone, and completions of jobs that were fetched together */
CREATE PROCEDURE bench.idem_enqueue_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	start float8 := bench.clock_us();
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		r := idem_enqueue('bench', bench.payload(), k);
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

CREATE PROCEDURE bench.hand_enqueue_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	start float8 := bench.clock_us();
	k text;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		INSERT INTO hand.jobs (queue, key, payload) VALUES ('bench', k, bench.payload())
			ON CONFLICT (queue, key) WHERE state = 'waiting' DO NOTHING;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

CREATE PROCEDURE bench.idem_complete_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	ids bigint[];
	tokens bigint[];
	start float8;
BEGIN
	SELECT array_agg(job_id), array_agg(token) INTO ids, tokens FROM idem_fetch('bench', n, '1 h');
	COMMIT;
	start := bench.clock_us();
	FOR i IN 1 .. n LOOP
		PERFORM idem_complete(ids[i], tokens[i]);
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

CREATE PROCEDURE bench.hand_complete_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	ids bigint[];
	start float8;
BEGIN
	WITH j AS (
		UPDATE hand.jobs
		   SET state = 'running', attempt = attempt + 1, leased_until = now() + interval '1 hour'
		 WHERE id = ANY (ARRAY(SELECT id FROM hand.jobs
								WHERE queue = 'bench' AND state = 'waiting' AND run_at <= now()
								ORDER BY priority, run_at, id LIMIT n FOR UPDATE SKIP LOCKED))
		RETURNING id)
	SELECT array_agg(id) INTO ids FROM j;
	COMMIT;
	start := bench.clock_us();
	FOR i IN 1 .. n LOOP
		DELETE FROM hand.jobs WHERE id = ids[i] AND attempt = 1;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;
