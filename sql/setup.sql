--
-- Helpers of the other tests, created once in the schema public
--

-- empty all tables of idem; the next job is number 1
CREATE PROCEDURE anew() LANGUAGE sql AS $$
	TRUNCATE idem.keys, idem.jobs, idem.job_keys, idem.job_log, idem.queues, idem.schedules, idem.shard;
	ALTER SEQUENCE idem.jobs_job_id_seq RESTART;
$$;

-- run a command and return its error, with seconds as N and of the context only what idem adds to it
CREATE FUNCTION fails(command text,
	OUT state text, OUT message text, OUT detail text, OUT hint text, OUT context text)
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE command;
	message := 'no error';
EXCEPTION WHEN others THEN
	GET STACKED DIAGNOSTICS
		state = RETURNED_SQLSTATE,
		message = MESSAGE_TEXT,
		detail = PG_EXCEPTION_DETAIL,
		hint = PG_EXCEPTION_HINT,
		context = PG_EXCEPTION_CONTEXT;
	detail := regexp_replace(detail, '\d+ s\M', 'N s', 'g');
	context := substring(context FROM 'element \d+ of array "\w+"');
END
$$;

-- wait until the condition is true; it may go on with FROM and WHERE
CREATE PROCEDURE wait_for(condition text) LANGUAGE plpgsql AS $$
DECLARE
	done boolean;
BEGIN
	FOR i IN 1 .. 6000 LOOP
		EXECUTE 'SELECT ' || condition INTO done;
		IF done THEN
			RETURN;
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.01);
	END LOOP;
	RAISE EXCEPTION 'waited too long';
END
$$;

-- from now on the clock of idem shows this time, or up to a second more
CREATE PROCEDURE set_clock(t timestamptz) LANGUAGE sql AS $$
	SELECT set_config('idem.clock_offset', ceil(extract(epoch FROM t - clock_timestamp()))::text, false);
$$;

-- the number of pages that a query reads
CREATE FUNCTION pages(query text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ' || query INTO plan;
	RETURN (plan #>> '{0,Plan,Shared Hit Blocks}')::bigint + (plan #>> '{0,Plan,Shared Read Blocks}')::bigint;
END $$;

-- identifies the version of a row: it changes with every update
CREATE FUNCTION key_version(k text) RETURNS text LANGUAGE sql AS
	$$ SELECT concat(ctid, xmin) FROM idem.keys WHERE key = k $$;
CREATE FUNCTION job_version(id bigint) RETURNS text LANGUAGE sql AS
	$$ SELECT concat(ctid, xmin) FROM idem.jobs WHERE job_id = id $$;

-- a time as a token: microseconds since 1970
CREATE FUNCTION micros(t timestamptz) RETURNS bigint LANGUAGE sql AS
	$$ SELECT (extract(epoch FROM t) * 1000000)::bigint $$;

-- a handler for idem_call
CREATE FUNCTION handler(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"ran"'::jsonb $$;

-- a trigger function
CREATE FUNCTION ignore_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
