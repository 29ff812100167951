/*
 * test/bench/setup.sql: what every measurement needs, in one database.
 *
 * hand.keys is the table a careful developer writes instead of idem: the same
 * times and result, the key as primary key, an index on the expiry, and the
 * fill factor of idem.keys, so that neither side wins by its layout.
 *
 * Functions named *_us return microseconds per key.  Keys are made before the
 * clock starts.  Everything is measured as the role bench, which is no superuser.
 */
CREATE SCHEMA hand AUTHORIZATION bench;
CREATE SCHEMA bench AUTHORIZATION bench;
SELECT idem_grant('bench', 'admin');
GRANT SELECT ON idem.keys TO bench;
GRANT pg_read_server_files TO bench;
GRANT EXECUTE ON FUNCTION pg_read_file(text) TO bench;

SET ROLE bench;

CREATE TABLE hand.keys (
	key text PRIMARY KEY,
	created_at timestamptz NOT NULL DEFAULT now(),
	expires_at timestamptz NOT NULL DEFAULT now() + interval '24 hours',
	finished_at timestamptz,
	result jsonb
) WITH (fillfactor = :keys_fillfactor);
CREATE INDEX ON hand.keys (expires_at);

-- the same for leases: the first session has the key until locked_until; the token identifies
-- the last session that took it
CREATE TABLE hand.leases (
	key text PRIMARY KEY,
	token bigint NOT NULL DEFAULT 1,
	attempt int NOT NULL DEFAULT 1,
	created_at timestamptz NOT NULL DEFAULT now(),
	expires_at timestamptz NOT NULL DEFAULT now() + interval '24 hours',
	locked_until timestamptz NOT NULL,
	finished_at timestamptz,
	result jsonb
) WITH (fillfactor = :keys_fillfactor);
CREATE INDEX ON hand.leases (expires_at);

-- the business rows of the lines that do work
CREATE TABLE bench.charges (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	account bigint NOT NULL,
	amount bigint NOT NULL
);

-- new keys, UUIDs as text; after setseed() always the same
CREATE FUNCTION bench.fresh(n int) RETURNS text[]
LANGUAGE sql VOLATILE
RETURN (SELECT array_agg(md5(random()::text || random()::text || i)::uuid::text)
		  FROM generate_series(1, n) AS i);

-- a jsonb whose text has the given number of bytes (18 or more), different for each call
CREATE FUNCTION bench.result(bytes int) RETURNS jsonb
LANGUAGE sql VOLATILE
RETURN jsonb_build_object('charge_id', (
	SELECT left(string_agg(md5(random()::text), ''), bytes - 17)
	  FROM generate_series(0, bytes / 32)));

-- eight results of that size on average: equal rows would fill pages to the last byte
CREATE FUNCTION bench.results(bytes int) RETURNS jsonb[]
LANGUAGE sql VOLATILE
RETURN (SELECT array_agg(bench.result((bytes * size)::int))
		  FROM unnest(ARRAY[0.6, 0.75, 0.9, 1, 1, 1.1, 1.25, 1.4]) AS size);

-- the time of day
CREATE FUNCTION bench.time_us() RETURNS float8
LANGUAGE sql VOLATILE
RETURN extract(epoch FROM clock_timestamp()) * 1e6;

-- CPU time of this backend if the kernel reports it, so that other programs on the machine
-- disturb less.  Else, or if bench.clock is set to time, the time of day: the kernel does not
-- report less than a tick of CPU time.  If bench.clock is set to counts, a call of
-- pg_conf_load_time(), at which callgrind begins a new file.
CREATE FUNCTION bench.clock_us() RETURNS float8
LANGUAGE sql VOLATILE
RETURN CASE current_setting('bench.clock', true)
	WHEN 'time' THEN bench.time_us()
	WHEN 'counts' THEN extract(epoch FROM pg_conf_load_time())
\if :cpu
	ELSE split_part(pg_read_file('/proc/self/schedstat'), ' ', 1)::float8 / 1000
\else
	ELSE bench.time_us()
\endif
	END;

CREATE FUNCTION bench.elapsed_us(since float8, n int) RETURNS float8
LANGUAGE sql VOLATILE
RETURN (bench.clock_us() - since) / n;

/* Line 1: claim and finish, all keys in one transaction. */
CREATE FUNCTION bench.idem_pair_us(n int, bytes int DEFAULT 30) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	res jsonb := bench.result(bytes);
	start float8 := bench.clock_us();
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		r := idem_claim(k);
		IF r.claimed THEN
			PERFORM idem_finish(k, res);
		END IF;
	END LOOP;
	RETURN bench.elapsed_us(start, n);
END $$;

-- the same, the answer of idem_finish() in a variable
CREATE FUNCTION bench.idem_assign_us(n int, bytes int DEFAULT 30) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	res jsonb := bench.result(bytes);
	start float8 := bench.clock_us();
	k text;
	r record;
	ok boolean;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		r := idem_claim(k);
		IF r.claimed THEN
			ok := idem_finish(k, res);
		END IF;
	END LOOP;
	RETURN bench.elapsed_us(start, n);
END $$;

CREATE FUNCTION bench.hand_pair_us(n int, bytes int DEFAULT 30) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	res jsonb := bench.result(bytes);
	start float8 := bench.clock_us();
	k text;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		INSERT INTO hand.keys (key) VALUES (k) ON CONFLICT (key) DO NOTHING;
		IF FOUND THEN
			UPDATE hand.keys SET result = res, finished_at = now() WHERE key = k;
		END IF;
	END LOOP;
	RETURN bench.elapsed_us(start, n);
END $$;

/* The same, one transaction per key. */
CREATE PROCEDURE bench.idem_tx_us(n int, bytes int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	res jsonb[] := bench.results(bytes);
	start float8 := bench.clock_us();
	i int := 0;
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		i := i + 1;
		r := idem_claim(k);
		IF r.claimed THEN
			PERFORM idem_finish(k, res[1 + i % 8]);
		END IF;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

CREATE PROCEDURE bench.hand_tx_us(n int, bytes int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	res jsonb[] := bench.results(bytes);
	start float8 := bench.clock_us();
	i int := 0;
	k text;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		i := i + 1;
		INSERT INTO hand.keys (key) VALUES (k) ON CONFLICT (key) DO NOTHING;
		IF FOUND THEN
			UPDATE hand.keys SET result = res[1 + i % 8], finished_at = now() WHERE key = k;
		END IF;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

/* Lease and finish, each in a transaction of its own. */
CREATE PROCEDURE bench.idem_lease_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	res jsonb[] := bench.results(30);
	start float8 := bench.clock_us();
	i int := 0;
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		i := i + 1;
		r := idem_lease(k, '30 s');
		COMMIT;
		IF r.claimed THEN
			PERFORM idem_finish(k, res[1 + i % 8], r.token);
		END IF;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

CREATE PROCEDURE bench.hand_lease_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	res jsonb[] := bench.results(30);
	start float8 := bench.clock_us();
	i int := 0;
	k text;
	t bigint;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		i := i + 1;
		INSERT INTO hand.leases AS l (key, locked_until) VALUES (k, clock_timestamp() + interval '30 s')
			ON CONFLICT (key) DO UPDATE
			SET token = l.token + 1, attempt = l.attempt + 1, locked_until = excluded.locked_until
			WHERE l.locked_until < clock_timestamp() AND l.finished_at IS NULL
			RETURNING token INTO t;
		COMMIT;
		IF t IS NOT NULL THEN
			UPDATE hand.leases SET result = res[1 + i % 8], finished_at = now()
			 WHERE key = k AND token = t AND finished_at IS NULL;
		END IF;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

/* The same, the keys of one transaction as one batch. */
CREATE FUNCTION bench.idem_batch_us(n int, bytes int) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	eight jsonb[] := bench.results(bytes);
	res jsonb[] := ARRAY(SELECT eight[1 + i % 8] FROM generate_series(1, n) AS i);
	start float8 := bench.clock_us();
BEGIN
	PERFORM count(*) FROM idem_claim_many(keys) WHERE claimed;
	PERFORM idem_finish_many(keys, res);
	RETURN bench.elapsed_us(start, n);
END $$;

CREATE FUNCTION bench.hand_batch_us(n int, bytes int) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	eight jsonb[] := bench.results(bytes);
	res jsonb[] := ARRAY(SELECT eight[1 + i % 8] FROM generate_series(1, n) AS i);
	start float8 := bench.clock_us();
BEGIN
	INSERT INTO hand.keys (key) SELECT u FROM unnest(keys) AS u ORDER BY u
		ON CONFLICT (key) DO NOTHING;
	UPDATE hand.keys AS h SET result = u.res, finished_at = now()
	  FROM unnest(keys, res) AS u (key, res) WHERE h.key = u.key;
	RETURN bench.elapsed_us(start, n);
END $$;

/* Line 2: answers for keys that are finished.  finished() fills both tables alike. */
CREATE TABLE bench.known (keys text[]);

CREATE PROCEDURE bench.finished(n int)
LANGUAGE plpgsql AS $$
DECLARE
	ks text[] := bench.fresh(n);
	k text;
	res jsonb;
BEGIN
	FOREACH k IN ARRAY ks LOOP
		res := bench.result(30);
		PERFORM idem_claim(k);
		PERFORM idem_finish(k, res);
		INSERT INTO hand.keys (key, finished_at, result) VALUES (k, now(), res);
	END LOOP;
	INSERT INTO bench.known VALUES (ks);
END $$;

CREATE FUNCTION bench.idem_replay_us(n int DEFAULT NULL) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	ks text[] := (SELECT keys[:coalesce(n, cardinality(keys))] FROM bench.known);
	start float8 := bench.clock_us();
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY ks LOOP
		r := idem_claim(k);
	END LOOP;
	ASSERT r.status = 'finished' AND r.result IS NOT NULL;
	RETURN bench.elapsed_us(start, cardinality(ks));
END $$;

CREATE FUNCTION bench.hand_replay_us(n int DEFAULT NULL) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	ks text[] := (SELECT keys[:coalesce(n, cardinality(keys))] FROM bench.known);
	start float8 := bench.clock_us();
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY ks LOOP
		SELECT result, created_at, expires_at INTO r FROM hand.keys
		 WHERE key = k AND expires_at > now();
	END LOOP;
	ASSERT r.result IS NOT NULL;
	RETURN bench.elapsed_us(start, cardinality(ks));
END $$;

/* growth, worker_load, worker_rate: many finished keys, a thousand in a transaction. */
CREATE PROCEDURE bench.idem_load(n int)
LANGUAGE plpgsql AS $$
DECLARE
	res jsonb := bench.result(30);
	k text;
	r record;
	ok boolean;
BEGIN
	FOR i IN 1 .. n LOOP
		k := md5(random()::text || random()::text)::uuid::text;
		r := idem_claim(k);
		ok := idem_finish(k, res);
		IF i % 1000 = 0 THEN
			COMMIT;
		END IF;
	END LOOP;
END $$;

-- so long ago that they expired an hour ago
CREATE PROCEDURE bench.hand_load(n int)
LANGUAGE plpgsql AS $$
DECLARE
	res jsonb := bench.result(30);
	k text;
BEGIN
	FOR i IN 1 .. n LOOP
		k := md5(random()::text || random()::text)::uuid::text;
		INSERT INTO hand.keys (key, created_at, expires_at)
		VALUES (k, clock_timestamp() - interval '25 hours', clock_timestamp() - interval '1 hour');
		UPDATE hand.keys SET result = res, finished_at = clock_timestamp() - interval '25 hours' WHERE key = k;
		IF i % 1000 = 0 THEN
			COMMIT;
		END IF;
	END LOOP;
END $$;

-- read every btree of a table, whatever its columns are, so that this session has mapped the pages
CREATE FUNCTION bench.touch(rel regclass) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
	col name;
	n bigint;
BEGIN
	FOR col IN
		SELECT a.attname FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
		  JOIN pg_am AS m ON m.oid = c.relam
		  JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
		 WHERE i.indrelid = rel AND m.amname = 'btree'
	LOOP
		EXECUTE format('SELECT count(c) FROM (SELECT %I AS c FROM %s ORDER BY %1$I OFFSET 0) AS s', col, rel) INTO n;
	END LOOP;
END $$;

/* Line 4: the work, one business row. */
CREATE FUNCTION bench.charge(payload jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	charge bigint;
BEGIN
	INSERT INTO bench.charges (account, amount)
	VALUES ((payload->'account')::bigint, (payload->'amount')::bigint)
	RETURNING id INTO charge;
	RETURN jsonb_build_object('charge_id', charge);
END $$;

-- all calls in one transaction
CREATE FUNCTION bench.idem_call_us(n int) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	payload jsonb := '{"account": 42, "amount": 9900}';
	start float8 := bench.clock_us();
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		r := idem_call(k, 'bench.charge', payload);
	END LOOP;
	RETURN bench.elapsed_us(start, n);
END $$;

CREATE FUNCTION bench.hand_call_us(n int) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	payload jsonb := '{"account": 42, "amount": 9900}';
	start float8 := bench.clock_us();
	k text;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		INSERT INTO hand.keys (key) VALUES (k) ON CONFLICT (key) DO NOTHING;
		IF FOUND THEN
			UPDATE hand.keys SET result = bench.charge(payload), finished_at = now() WHERE key = k;
		END IF;
	END LOOP;
	RETURN bench.elapsed_us(start, n);
END $$;

/* Cleanup: microseconds per removed key; idem.clock_offset decides what has expired. */
CREATE PROCEDURE bench.idem_cleanup_us(batch int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start float8 := bench.clock_us();
	removed int;
	total int := 0;
BEGIN
	LOOP
		removed := idem_cleanup(batch);
		COMMIT;
		EXIT WHEN removed = 0;
		total := total + removed;
	END LOOP;
	us := bench.elapsed_us(start, total);
END $$;
