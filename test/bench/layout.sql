/*
 * test/bench/layout.sql: what layout.sh runs on each layout of idem.keys,
 * beyond setup.sql.
 */
SET ROLE bench;

/*
 * Pairs in transactions of their own, with results of 30 bytes on average.  Every nth key
 * lives for short_ttl, the others for a day.
 */
CREATE PROCEDURE bench.layout_us(n int, nth int, short_ttl interval, INOUT us float8 DEFAULT NULL)
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
		r := idem_claim(k, ttl => CASE WHEN i % nth = 0 THEN short_ttl ELSE interval '24 hours' END);
		IF r.claimed THEN
			PERFORM idem_finish(k, res[1 + i % 8]);
		END IF;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;

RESET ROLE;

/*
 * Cleanup without a btree, as far as SQL can emulate it; superuser only.
 * brin: the index finds the rows in one pass, batches are deleted by ctid.
 */
CREATE PROCEDURE bench.brin_cleanup_us(batch int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start float8 := bench.clock_us();
	horizon timestamptz := idem_clock();
	tids tid[];
	removed int;
	total int := 0;
BEGIN
	SET LOCAL enable_seqscan = off;
	FOR tids IN
		SELECT array_agg(t) FROM (
			SELECT ctid AS t, (row_number() OVER () - 1) / batch AS part
			  FROM idem.keys WHERE expires_at <= horizon) AS s
		 GROUP BY part
	LOOP
		DELETE FROM idem.keys WHERE ctid = ANY (tids) AND expires_at <= horizon;
		GET DIAGNOSTICS removed = ROW_COUNT;
		total := total + removed;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, total);
END $$;

-- none: every block is looked at, so many at a time that a batch is about full
CREATE PROCEDURE bench.none_cleanup_us(batch int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start float8 := bench.clock_us();
	horizon timestamptz := idem_clock();
	blocks int := pg_relation_size('idem.keys') / current_setting('block_size')::int;
	step int := greatest(1, blocks::float8 * batch / (SELECT reltuples FROM pg_class WHERE oid = 'idem.keys'::regclass));
	removed int;
	total int := 0;
BEGIN
	FOR block IN 0 .. blocks BY step LOOP
		DELETE FROM idem.keys
		 WHERE ctid >= format('(%s,0)', block)::tid AND ctid < format('(%s,0)', block + step)::tid
		   AND expires_at <= horizon;
		GET DIAGNOSTICS removed = ROW_COUNT;
		total := total + removed;
		COMMIT;
	END LOOP;
	us := bench.elapsed_us(start, total);
END $$;
