/*
 * test/bench/worker.sql: what the lines of the background worker and the counters need,
 * in the database of setup.sql.
 */
SET ROLE bench;

/*
 * worker_rate: what a careful developer runs from cron, microseconds per removed key.
 * By ctid, because that takes two thirds of the time that key IN (SELECT key ...) takes.
 */
CREATE PROCEDURE bench.hand_cleanup_us(batch int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start float8 := bench.clock_us();
	removed int;
	total int := 0;
BEGIN
	LOOP
		DELETE FROM hand.keys WHERE ctid = ANY (ARRAY(
			SELECT ctid FROM hand.keys WHERE expires_at <= now()
			 ORDER BY expires_at LIMIT batch FOR UPDATE SKIP LOCKED));
		GET DIAGNOSTICS removed = ROW_COUNT;
		COMMIT;
		EXIT WHEN removed = 0;
		total := total + removed;
	END LOOP;
	us := bench.elapsed_us(start, total);
END $$;

-- the same, but each batch continues where the last one ended, so that it does not read the
-- dead entries before the first live one again
CREATE PROCEDURE bench.hand_cleanup_from_us(batch int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start float8 := bench.clock_us();
	place timestamptz := '-infinity';
	removed int;
	total int := 0;
BEGIN
	LOOP
		WITH gone AS (
			DELETE FROM hand.keys WHERE ctid = ANY (ARRAY(
				SELECT ctid FROM hand.keys WHERE expires_at <= now() AND expires_at >= place
				 ORDER BY expires_at LIMIT batch FOR UPDATE SKIP LOCKED))
			RETURNING expires_at)
		SELECT count(*), max(expires_at) INTO removed, place FROM gone;
		COMMIT;
		EXIT WHEN removed = 0;
		total := total + removed;
	END LOOP;
	us := bench.elapsed_us(start, total);
END $$;

/*
 * stats_cost: a job from enqueue to its end, each step in a transaction of its own.  If
 * two sessions do this at once, one may miss a job that comes out of turn; a later fetch gets it.
 */
CREATE PROCEDURE bench.idem_job_us(n int, INOUT us float8 DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	start float8 := bench.clock_us();
	k text;
	r record;
BEGIN
	FOREACH k IN ARRAY keys LOOP
		PERFORM idem_enqueue('bench', bench.payload(), k);
		COMMIT;
		SELECT job_id, token INTO r FROM idem_fetch('bench', lease => '1 h');
		COMMIT;
		IF r.job_id IS NOT NULL THEN
			PERFORM idem_complete(r.job_id, r.token);
			COMMIT;
		END IF;
	END LOOP;
	us := bench.elapsed_us(start, n);
END $$;
