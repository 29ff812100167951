/*
 * test/bench/ended.sql: jobs that must not slow down a fetch, in the database of setup.sql.
 */
SET ROLE bench;

-- jobs that have ended
CREATE PROCEDURE bench.make_ended(queue text, n int)
LANGUAGE plpgsql AS $$
DECLARE
	batch int := least(n, 1000);
	ids bigint[];
	tokens bigint[];
BEGIN
	FOR i IN 1 .. n / batch LOOP
		PERFORM count(*) FROM idem_enqueue_many(queue, array_fill(bench.payload(), ARRAY[batch]), bench.fresh(batch));
		COMMIT;
		SELECT array_agg(job_id), array_agg(token) INTO ids, tokens FROM idem_fetch(queue, batch, '1 h');
		COMMIT;
		PERFORM count(*) FROM idem_complete_many(ids, tokens);
		COMMIT;
	END LOOP;
END $$;

-- n jobs that are leased, and as many follow-ups that wait for them
CREATE PROCEDURE bench.make_blocked(queue text, n int)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.fresh(n);
	payloads jsonb[] := array_fill(bench.payload(), ARRAY[n]);
	got bigint;
BEGIN
	PERFORM count(*) FROM idem_enqueue_many(queue, payloads, keys, dedup => 'until_executed');
	COMMIT;
	SELECT count(*) INTO got FROM idem_fetch(queue, n, '1 day');
	ASSERT got = n;
	COMMIT;
	SELECT count(*) INTO got FROM idem_enqueue_many(queue, payloads, keys, dedup => 'until_executed', if_running => 'rerun')
	 WHERE outcome = 'rerun';
	ASSERT got = n;
END $$;

-- n jobs for tomorrow, each with a priority of its own
CREATE PROCEDURE bench.make_scheduled(queue text, n int)
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. n LOOP
		PERFORM idem_enqueue(queue, bench.payload(), run_at => now() + interval '1 day', priority => i);
	END LOOP;
END $$;

-- jobs that can be fetched, behind all others
CREATE PROCEDURE bench.make_ready(queue text, n int)
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM count(*) FROM idem_enqueue_many(queue, array_fill(bench.payload(), ARRAY[n]), bench.fresh(n), priority => 1000000);
END $$;

/*
 * n fetches of one job, each in a transaction of its own: microseconds of each.  ready: a job
 * is there, and its completion is not measured.
 */
CREATE PROCEDURE bench.fetch_times(queue text, n int, ready boolean, INOUT times text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	start float8;
	stop float8;
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		start := bench.time_us();
		SELECT job_id, token INTO r FROM idem_fetch(queue, lease => '1 h');
		COMMIT;
		stop := bench.time_us();
		times := times || ' ' || (stop - start);
		ASSERT (r.job_id IS NOT NULL) = ready;
		IF ready THEN
			PERFORM idem_complete(r.job_id, r.token);
			COMMIT;
		END IF;
	END LOOP;
END $$;

-- the same of enqueues of one key, whose jobs have ended
CREATE PROCEDURE bench.enqueue_times(queue text, n int, ready boolean, INOUT times text DEFAULT '')
LANGUAGE plpgsql AS $$
DECLARE
	start float8;
	stop float8;
	r record;
BEGIN
	FOR i IN 1 .. n LOOP
		start := bench.time_us();
		r := idem_enqueue(queue, bench.payload(), 'hot');
		COMMIT;
		stop := bench.time_us();
		times := times || ' ' || (stop - start);
		ASSERT r.outcome = 'enqueued';
		SELECT job_id, token INTO STRICT r FROM idem_fetch(queue, lease => '1 h');
		PERFORM idem_complete(r.job_id, r.token);
		COMMIT;
	END LOOP;
END $$;

-- what a session has to read once, whatever queue it uses
CREATE PROCEDURE bench.open_queues()
LANGUAGE plpgsql AS $$
DECLARE
	times text;
BEGIN
	CALL bench.make_ready('elsewhere', 20);
	CALL bench.fetch_times('elsewhere', 20, true, times);
	CALL bench.enqueue_times('elsewhere', 5, true, times);
END $$;

RESET ROLE;

/*
 * Ended jobs of one key.  If they were enqueued one after the other, each enqueue would read
 * the jobs before it, so copies of the first one are inserted and deleted by SQL; superuser only.
 */
CREATE PROCEDURE bench.make_hot(hot text, n int)
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_enqueue(hot, bench.payload(), 'hot');
	INSERT INTO idem.jobs
	SELECT c.* FROM idem.jobs AS j, generate_series(1, n) AS i,
		jsonb_populate_record(j, jsonb_build_object('job_id', j.job_id + 1000000000 + i)) AS c
	 WHERE j.queue = hot;
	DELETE FROM idem.jobs WHERE queue = hot;
END $$;
