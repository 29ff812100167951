/*
 * idem_plproxy.sql: the schema idem_router, which sends calls of idem to the shard of their key
 *
 * For the router database, which has the extensions idem, with a map without slots, and plproxy:
 *
 *	CREATE EXTENSION idem;
 *	SELECT idem_shard_set('{}');
 *	CREATE EXTENSION plproxy;
 *	CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (modular_mapping '1', p0 '...', p1 '...');
 *	CREATE USER MAPPING ...
 *	\i idem_plproxy.sql
 *	SELECT * FROM idem_router.refresh();
 *
 * doc/scale.md shows it step by step.
 *
 * How a call gets there.  idem_router.slots says which shard has a slot.  A function that is routed, such
 * as idem_router.idem_call(), is written in PL/pgSQL.  It finds the shard of the key and calls a
 * function in PL/Proxy, idem_router.on_idem_call(), which runs idem_call() on partition p<number
 * of the shard> of the server idem_router.  On the shard the call is a transaction of its own, and
 * PL/Proxy returns only after its commit.  On an error raise_error() raises it again: with the
 * SQLSTATE, message, detail and hint of the shard, or, if the shard was not reached, as a
 * connection error.
 *
 * The router may be wrong about a slot: its map may be old, a partition may lead to another
 * database.  That is safe, because each shard refuses the keys that are not its own (ID006).
 *
 * Names.  Every function has its own search_path, and PL/Proxy sends qualified names only, so no
 * object of another role can take the place of one that is meant here.
 *
 * To install another version of this file: DROP SCHEMA idem_router CASCADE, and then as above;
 * refresh() reads the map from the shards.  Grant the privileges anew.
 */
\set ON_ERROR_STOP on

BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;

DO $do$
BEGIN
	IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'plproxy') THEN
		RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'the extension plproxy is not installed in this database',
			HINT = 'Run CREATE EXTENSION plproxy. Debian has it in the package postgresql-15-plproxy.';
	END IF;
	IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'idem') THEN
		RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'the extension idem is not installed in this database',
			HINT = 'Run CREATE EXTENSION idem, then SELECT idem_shard_set(''{}'').';
	END IF;
	/* else a call that was not routed would be accepted here */
	IF (SELECT s.slots FROM idem.shard AS s) IS DISTINCT FROM '{}' THEN
		RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'this database is not a router',
			DETAIL = 'A router has a map without slots, so that it refuses every key itself.',
			HINT = 'Run SELECT idem_shard_set(''{}''), with by => ''scope'' if the shards have that.';
	END IF;
END $do$;

/* Without IF NOT EXISTS: the script does not adopt objects of another role. */
CREATE SCHEMA idem_router;
COMMENT ON SCHEMA idem_router IS 'idem_router: calls of idem that PL/Proxy runs on the shard of the key';

/*
 * The map of the router.
 */

CREATE TABLE idem_router.shards (
	shard integer NOT NULL,
	jobs_from bigint NOT NULL,
	CONSTRAINT shards_pkey PRIMARY KEY (shard));
COMMENT ON TABLE idem_router.shards IS 'the shards that refresh() has seen: partitions of the server idem_router';
COMMENT ON COLUMN idem_router.shards.shard IS 'number of the shard: it is partition p<number>';
COMMENT ON COLUMN idem_router.shards.jobs_from IS 'the first job number of the shard that carries a slot';
COMMENT ON CONSTRAINT shards_pkey ON idem_router.shards IS 'finds a shard';
COMMENT ON INDEX idem_router.shards_pkey IS 'finds a shard';

CREATE TABLE idem_router.slots (
	slot integer NOT NULL,
	shard integer NOT NULL,
	CONSTRAINT slots_pkey PRIMARY KEY (slot),
	CONSTRAINT slots_slot_check CHECK (slot BETWEEN 0 AND 1023),
	CONSTRAINT slots_shard_fkey FOREIGN KEY (shard) REFERENCES idem_router.shards);
COMMENT ON TABLE idem_router.slots IS 'the map of the router: to which shard the calls of a slot go';
COMMENT ON COLUMN idem_router.slots.slot IS 'the slot, 0 to 1023';
COMMENT ON COLUMN idem_router.slots.shard IS 'number of the shard';
COMMENT ON CONSTRAINT slots_pkey ON idem_router.slots IS 'finds the shard of a slot';
COMMENT ON INDEX idem_router.slots_pkey IS 'finds the shard of a slot';
COMMENT ON CONSTRAINT slots_slot_check ON idem_router.slots IS 'there are 1024 slots';
COMMENT ON CONSTRAINT slots_shard_fkey ON idem_router.slots IS 'a slot can only be with a shard that refresh() has seen';

CREATE FUNCTION idem_router.shard_of_slot(slot integer)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	found_shard integer := (SELECT s.shard FROM idem_router.slots AS s WHERE s.slot = shard_of_slot.slot);
BEGIN
	IF found_shard IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID006', MESSAGE = 'the router knows no shard for this slot',
			DETAIL = format('Slot %s is not in idem_router.slots.', slot),
			HINT = 'An operator runs SELECT * FROM idem_router.refresh(), which asks the shards for their slots.';
	END IF;
	RETURN found_shard;
END $$;
COMMENT ON FUNCTION idem_router.shard_of_slot IS 'the shard to which the router sends calls of this slot';

CREATE FUNCTION idem_router.shard_of_key(key text, scope text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN idem_router.shard_of_slot(idem_slot(key, scope));
END $$;
COMMENT ON FUNCTION idem_router.shard_of_key IS
	'the shard to which the router sends calls of this key, for a program that wants to connect to it';

/*
 * For functions without a token.  A number from before the first map of a shard carries no slot.
 * If another shard has such numbers, the one that is meant may be there, and the same number may
 * be another job here.
 */
CREATE FUNCTION idem_router.shard_of_job(job_id bigint)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	found_shard integer := idem_router.shard_of_slot((coalesce(job_id, 0) & 1023)::integer);
	others text;
BEGIN
	SELECT string_agg(s.shard::text, ', ' ORDER BY s.shard) INTO others
	  FROM idem_router.shards AS s
	 WHERE s.shard <> found_shard AND s.jobs_from > shard_of_job.job_id AND s.jobs_from > 1024;
	IF others IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = '0A000', MESSAGE = 'the shard of this job is not known',
			DETAIL = format('The number may be from before the map of another shard, when numbers carried no slot. Such shards: %s.', others),
			HINT = 'Call the function in the database in which the job was enqueued.';
	END IF;
	RETURN found_shard;
END $$;
COMMENT ON FUNCTION idem_router.shard_of_job IS 'the shard to which the router sends calls with this job number';

CREATE FUNCTION idem_router.partitions()
RETURNS integer[]
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
	SELECT coalesce(array_agg(substr(o.option_name, 2)::integer ORDER BY substr(o.option_name, 2)::integer), '{}')
	  FROM pg_foreign_server AS s
	  JOIN pg_foreign_data_wrapper AS w ON w.oid = s.srvfdw AND w.fdwname = 'plproxy'
	 CROSS JOIN LATERAL pg_options_to_table(s.srvoptions) AS o
	 WHERE s.srvname = 'idem_router' AND o.option_name ~ '^p[0-9]+$';
END;
COMMENT ON FUNCTION idem_router.partitions IS 'numbers of the partitions of the server idem_router';

/*
 * Errors.
 */

CREATE FUNCTION idem_router.refuse(what text, why text, instead text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = '0A000', MESSAGE = what || ' cannot be routed', DETAIL = why, HINT = instead;
END $$;
COMMENT ON FUNCTION idem_router.refuse IS 'raises the error of a call that must not be routed';

CREATE TYPE idem_router.failure AS (
	shard integer,
	state text,
	message text,
	detail text,
	hint text);
COMMENT ON TYPE idem_router.failure IS 'an error of a shard';
COMMENT ON COLUMN idem_router.failure.shard IS 'number of the shard';
COMMENT ON COLUMN idem_router.failure.state IS 'SQLSTATE';
COMMENT ON COLUMN idem_router.failure.message IS 'primary message';
COMMENT ON COLUMN idem_router.failure.detail IS 'detail; empty: none';
COMMENT ON COLUMN idem_router.failure.hint IS 'hint; empty: none';

/*
 * What PL/Proxy says:
 *	name(n): [database] REMOTE ERROR: message		an error of the shard; detail and hint have a prefix
 *	name(n): [database] REMOTE FATAL: message		with 57P0x: the session on the shard has ended
 *	PL/Proxy function name(n): [database] PQconnectPoll: message	not connected: nothing was sent
 *	PL/Proxy function name(n): [database] PQconsumeInput: message	lost: the shard may have committed
 *	PL/Proxy function name(n): query timeout		no answer within query_timeout of the server
 */
CREATE FUNCTION idem_router.translate(f idem_router.failure)
RETURNS idem_router.failure
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	lost text[] := regexp_match(f.message, '^PL/Proxy function [^:]*: (?:\[[^]]*\] )?(PQ[A-Za-z]+: |query timeout)(.*)$');
BEGIN
	IF f.state LIKE '57P0_' THEN
		lost := ARRAY['', regexp_replace(f.message, '^.*? REMOTE [^:]+: ', '')];
	END IF;
	IF lost IS NOT NULL THEN
		f.detail := format('Shard %s: %s', f.shard, coalesce(nullif(rtrim(lost[2], E'\n'), ''), 'no answer within query_timeout.'));
		IF lost[1] LIKE 'PQconnect%' THEN
			f.state := '08001';
			f.message := 'could not connect to the shard';
			f.hint := 'The call was not sent to the shard. Repeat it.';
		ELSE
			f.state := '08006';
			f.message := 'the connection to the shard was lost';
			f.hint := 'The shard may have committed the call. Repeat it with the same key: if it was committed, the answer is the stored one.';
		END IF;
		RETURN f;
	END IF;
	f.message := regexp_replace(f.message, '^idem_router\.\w+\(\d+\): \[[^]]*\] REMOTE [^:]+: ', '');
	f.detail := regexp_replace(f.detail, '^Remote detail: ', '');
	f.hint := regexp_replace(f.hint, '^Remote hint: ', '');
	IF f.state = 'ID006' THEN
		f.hint := 'The map of the router is old, or the slot is just moving: repeat the call. If the error stays, an operator runs SELECT * FROM idem_router.refresh().';
	END IF;
	RETURN f;
END $$;
COMMENT ON FUNCTION idem_router.translate IS
	'an error of PL/Proxy, as the shard has raised it, or as a connection error';

CREATE FUNCTION idem_router.raise_error(shard integer, state text, message text, detail text, hint text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	f idem_router.failure := idem_router.translate(ROW (shard, state, message, detail, hint));
BEGIN
	IF f.detail = '' AND f.hint = '' THEN
		RAISE EXCEPTION USING ERRCODE = f.state, MESSAGE = f.message;
	ELSIF f.detail = '' THEN
		RAISE EXCEPTION USING ERRCODE = f.state, MESSAGE = f.message, HINT = f.hint;
	ELSIF f.hint = '' THEN
		RAISE EXCEPTION USING ERRCODE = f.state, MESSAGE = f.message, DETAIL = f.detail;
	END IF;
	RAISE EXCEPTION USING ERRCODE = f.state, MESSAGE = f.message, DETAIL = f.detail, HINT = f.hint;
END $$;
COMMENT ON FUNCTION idem_router.raise_error IS
	'raises an error of a shard as the shard has raised it, and a lost connection as a connection error';

/*
 * The functions that are routed.  They have the names, arguments and results of those of idem, so
 * they are made from them.  These three are dropped at the end of the script.
 */

/* A type as an argument of a routed call: the handler exists on the shard only */
CREATE FUNCTION idem_router.type_of_argument(type oid)
RETURNS text
LANGUAGE sql
RETURN CASE WHEN type = 'regproc'::regtype THEN 'text' ELSE format_type(type, NULL) END;

/*
 * on_NAME(shard, arguments of NAME): NAME on this shard, in PL/Proxy.  A time goes over the wire
 * in ISO format, whatever the setting DateStyle is on either side.
 */
CREATE FUNCTION idem_router.make_remote(name text)
RETURNS void
LANGUAGE plpgsql
AS $do$
DECLARE
	p pg_proc := (SELECT p FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
	iso text := $$(pg_catalog.to_jsonb(%s) OPERATOR(pg_catalog.#>>) '{}') AS %s$$;
	types text;
	arguments text;
	columns text;
BEGIN
	SELECT string_agg(CASE WHEN a.type = 'timestamptz'::regtype THEN 'text' ELSE idem_router.type_of_argument(a.type) END,
					  ', ' ORDER BY a.n),
		   string_agg(format(CASE a.type WHEN 'timestamptz'::regtype THEN '$%s::pg_catalog.timestamptz'
									     WHEN 'regproc'::regtype THEN '$%s::pg_catalog.regproc'
									     ELSE '$%s' END, a.n + 1), ', ' ORDER BY a.n)
	  INTO types, arguments
	  FROM unnest(p.proargtypes) WITH ORDINALITY AS a (type, n);
	SELECT string_agg(CASE a.atttypid WHEN 'timestamptz'::regtype THEN format(iso, 'r.' || a.attname, a.attname)
									  ELSE 'r.' || a.attname END, ', ' ORDER BY a.attnum)
	  INTO columns
	  FROM pg_type AS t
	  JOIN pg_attribute AS a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
	 WHERE t.oid = p.prorettype;
	columns := coalesce(columns, CASE p.prorettype WHEN 'timestamptz'::regtype THEN format(iso, 'r.r', 'r') ELSE 'r.r' END);
	EXECUTE format('CREATE FUNCTION idem_router.%I(integer, %s) RETURNS %s LANGUAGE plproxy VOLATILE PARALLEL UNSAFE AS %L',
				   'on_' || name, types, pg_get_function_result(p.oid), format($$
	CLUSTER 'idem_router';
	RUN ON $1;
	SELECT %s FROM pg_catalog.%s(%s) AS r;
$$, columns, name, arguments));
	EXECUTE format('COMMENT ON FUNCTION idem_router.%I IS %L', 'on_' || name,
				   format('for idem_router.%s(): %s() on the shard with this number', name, name));
END $do$;

/*
 * NAME(arguments of NAME): finds the shard by the expression and calls on_NAME().  The caller's
 * scope is that of the router: the session on the shard has another idem.scope.
 */
CREATE FUNCTION idem_router.make_routed(name text, shard text, first text DEFAULT '')
RETURNS void
LANGUAGE plpgsql
AS $do$
DECLARE
	p pg_proc := (SELECT p FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
	arguments text;
	call text;
BEGIN
	SELECT string_agg(CASE WHEN a.name = 'scope' THEN 'coalesce(scope, current_setting(''idem.scope'', true))'
						   WHEN a.type = 'timestamptz'::regtype THEN format('to_jsonb(%s) #>> ''{}''', a.name)
						   ELSE quote_ident(a.name) END, ', ' ORDER BY a.n)
	  INTO arguments
	  FROM unnest(p.proargnames, p.proargtypes::oid[]) WITH ORDINALITY AS a (name, type, n);
	call := format('idem_router.%I(shard, %s)', 'on_' || name, arguments);
	IF p.proretset THEN
		call := format('QUERY SELECT * FROM %s', call);
	END IF;
	EXECUTE format('CREATE FUNCTION idem_router.%I(%s) RETURNS %s LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE %s
					SET search_path = pg_catalog, pg_temp AS %L',
				   name,
				   regexp_replace(pg_get_function_arguments(p.oid), '\mregproc\M', 'text'),
				   pg_get_function_result(p.oid),
				   CASE WHEN p.proretset THEN 'ROWS 1' ELSE '' END,
				   format($$
#variable_conflict use_variable
DECLARE
	shard integer := %s;
	message text;
	detail text;
	hint text;
BEGIN
%s	RETURN %s;
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	PERFORM idem_router.raise_error(shard, SQLSTATE, message, detail, hint);
END
$$, shard, first, call));
	EXECUTE format('COMMENT ON FUNCTION idem_router.%I IS %L', name, 'routed: ' || obj_description(p.oid, 'pg_proc'));
END $do$;

/* NAME(arguments of NAME): raises an error */
CREATE FUNCTION idem_router.make_refused(name text, why text, instead text)
RETURNS void
LANGUAGE plpgsql
AS $do$
DECLARE
	p oid := (SELECT p.oid FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
BEGIN
	EXECUTE format('CREATE FUNCTION idem_router.%I(%s) RETURNS %s LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
					SET search_path = pg_catalog, pg_temp AS %L',
				   name, pg_get_function_arguments(p), pg_get_function_result(p),
				   format(E'\nBEGIN\n\tPERFORM idem_router.refuse(%L, %L, %L);\nEND\n', name || '()', why, instead));
	EXECUTE format('COMMENT ON FUNCTION idem_router.%I IS %L', name, 'not routed: raises an error that says why');
END $do$;

DO $do$
BEGIN
	PERFORM idem_router.make_remote(name)
	  FROM unnest(ARRAY['idem_call', 'idem_lease', 'idem_renew', 'idem_finish', 'idem_release', 'idem_checkpoint',
						'idem_get', 'idem_forget', 'idem_enqueue', 'idem_fetch', 'idem_complete', 'idem_fail',
						'idem_snooze', 'idem_heartbeat', 'idem_cancel', 'idem_retry', 'idem_job',
						'idem_job_by_key', 'idem_cancel_by_key']) AS name;
	PERFORM idem_router.make_routed(name, 'idem_router.shard_of_key(key, scope)')
	  FROM unnest(ARRAY['idem_call', 'idem_lease', 'idem_renew', 'idem_checkpoint', 'idem_get', 'idem_forget',
						'idem_job_by_key', 'idem_cancel_by_key']) AS name;
	PERFORM idem_router.make_routed(name, 'idem_router.shard_of_key(key, scope)', format($$
		IF token IS NULL THEN
			PERFORM idem_router.refuse('%s() without a token', %L, %L);
		END IF;
	$$, name, 'Without a token it is about a claim of the same transaction, and a claim cannot be routed.',
			'Use idem_router.idem_call(), or pass the token of idem_router.idem_lease().'))
	  FROM unnest(ARRAY['idem_finish', 'idem_release']) AS name;

	/* a job without a key may be in any shard */
	PERFORM idem_router.make_routed('idem_enqueue', 'idem_router.shard_of_slot(
			CASE WHEN key IS NULL THEN floor(random() * 1024)::integer ELSE idem_slot(key, scope) END)');

	/* the token belongs to one job only, so these cannot meet another one of the same number */
	PERFORM idem_router.make_routed(name, 'idem_router.shard_of_slot((coalesce(job_id, 0) & 1023)::integer)')
	  FROM unnest(ARRAY['idem_complete', 'idem_fail', 'idem_snooze']) AS name;
	PERFORM idem_router.make_routed(name, 'idem_router.shard_of_job(job_id)')
	  FROM unnest(ARRAY['idem_cancel', 'idem_retry', 'idem_job']) AS name;
	PERFORM idem_router.make_refused('idem_claim',
		'The shard commits each call by itself: the key would be final before the work is done, and lost if the work fails.',
		'Use idem_router.idem_call(), or idem_router.idem_lease(); or connect to the shard, whose number is idem_router.shard_of_key().');
	PERFORM idem_router.make_refused('idem_fence',
		'A fence lasts until the end of its transaction, and the shard commits each call by itself.',
		'Connect to the shard, whose number is idem_router.shard_of_key(), and fence the token in the transaction of the rows.');
	PERFORM idem_router.make_refused(name,
		'The call is one transaction, all or nothing, and its elements may belong to several shards.',
		format('Call idem_router.%s() for each element; or connect to a shard.', instead))
	  FROM (VALUES ('idem_claim_many', 'idem_call'),
				   ('idem_finish_many', 'idem_finish'),
				   ('idem_enqueue_many', 'idem_enqueue'),
				   ('idem_complete_many', 'idem_complete')) AS v (name, instead);
END $do$;

DROP FUNCTION idem_router.make_remote, idem_router.make_routed, idem_router.make_refused, idem_router.type_of_argument;

CREATE FUNCTION idem_router.idem_slot(key text, scope text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	RETURN pg_catalog.idem_slot(key, scope);
END $$;
COMMENT ON FUNCTION idem_router.idem_slot IS 'the slot of a key and its scope, computed in the router';

/*
 * Functions that ask several shards.  If some of them fail, their errors are warnings as long as
 * other shards have answered: the jobs that those have leased must reach the caller.
 */

CREATE FUNCTION idem_router.report_failures(failures idem_router.failure[], has_rows boolean)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	f idem_router.failure;
BEGIN
	FOREACH f IN ARRAY failures LOOP
		IF NOT has_rows THEN
			PERFORM idem_router.raise_error(f.shard, f.state, f.message, f.detail, f.hint);
		END IF;
		f := idem_router.translate(f);
		RAISE WARNING USING ERRCODE = f.state, MESSAGE = format('shard %s did not answer', f.shard),
			DETAIL = format('%s. %s', f.message, f.detail), HINT = 'The rows of the other shards are returned.';
	END LOOP;
END $$;
COMMENT ON FUNCTION idem_router.report_failures IS
	'raises the first error, or all of them as warnings if other shards have returned rows';

/*
 * The shards are asked one after the other, each for what is missing of the batch, in another
 * order each time.  57014 of the shard (its statement_timeout) is a failure of this shard; 57014
 * of this session ends the call.
 */
CREATE FUNCTION idem_router.idem_fetch(
	queue text,
	batch integer DEFAULT 1,
	lease interval DEFAULT NULL,
	worker text DEFAULT NULL)
RETURNS SETOF idem.fetch_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 1
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	every_shard integer[] := (SELECT array_agg(s.shard ORDER BY random()) FROM idem_router.shards AS s);
	one integer;
	missing integer := batch;
	fetched integer;
	failures idem_router.failure[] := '{}';
	f idem_router.failure;
BEGIN
	IF lease IS NULL OR lease = '0' THEN
		PERFORM idem_router.refuse('idem_fetch() without a lease',
			'The shard commits each call by itself, so the next fetch would get the same jobs.',
			'Pass a lease: idem_router.idem_fetch(queue, lease => ''30 s'').');
	END IF;
	IF every_shard IS NULL THEN
		PERFORM idem_router.shard_of_slot(0);
	END IF;
	FOREACH one IN ARRAY every_shard LOOP
		BEGIN
			RETURN QUERY SELECT * FROM idem_router.on_idem_fetch(one, queue, missing, lease, worker);
			GET DIAGNOSTICS fetched = ROW_COUNT;
			missing := missing - fetched;
		EXCEPTION WHEN OTHERS OR query_canceled THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL, f.hint = PG_EXCEPTION_HINT;
			IF SQLSTATE = '57014' AND strpos(f.message, ' REMOTE ') = 0 THEN
				RAISE;
			END IF;
			f.shard := one;
			f.state := SQLSTATE;
			failures := failures || f;
		END;
		EXIT WHEN missing <= 0;
	END LOOP;
	PERFORM idem_router.report_failures(failures, COALESCE(missing < batch, false));
END $$;
COMMENT ON FUNCTION idem_router.idem_fetch IS
	'routed: fetch jobs that are due, with a lease, from one shard after the other until the batch is full';

CREATE FUNCTION idem_router.idem_heartbeat(
	ids bigint[],
	tokens bigint[],
	lease interval DEFAULT NULL)
RETURNS SETOF idem.heartbeat_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE ROWS 100
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	is_list boolean := array_ndims(ids) = 1 AND array_ndims(tokens) = 1 AND cardinality(ids) = cardinality(tokens);
	shards integer[];
	one integer;
	places integer[];
	answered boolean := false;
	failures idem_router.failure[] := '{}';
	f idem_router.failure;
BEGIN
	IF is_list THEN
		SELECT array_agg(idem_router.shard_of_slot((coalesce(i.id, 0) & 1023)::integer) ORDER BY i.n) INTO shards
		  FROM unnest(ids) WITH ORDINALITY AS i (id, n);
	ELSE
		/* a shard raises the error, or returns no rows for empty arrays */
		shards := ARRAY[idem_router.shard_of_slot(0)];
	END IF;
	FOR one IN SELECT DISTINCT s FROM unnest(shards) AS s LOOP
		BEGIN
			IF is_list THEN
				places := array_positions(shards, one);
				RETURN QUERY
				SELECT places[r.ord], r.job_id, r.status, r.lease_until
				  FROM idem_router.on_idem_heartbeat(one,
						ARRAY(SELECT ids[array_lower(ids, 1) + p - 1] FROM unnest(places) WITH ORDINALITY AS a (p, n) ORDER BY n),
						ARRAY(SELECT tokens[array_lower(tokens, 1) + p - 1] FROM unnest(places) WITH ORDINALITY AS a (p, n) ORDER BY n),
						lease) AS r;
			ELSE
				RETURN QUERY SELECT r.* FROM idem_router.on_idem_heartbeat(one, ids, tokens, lease) AS r;
			END IF;
			answered := true;
		EXCEPTION WHEN OTHERS OR query_canceled THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL, f.hint = PG_EXCEPTION_HINT;
			IF SQLSTATE = '57014' AND strpos(f.message, ' REMOTE ') = 0 THEN
				RAISE;
			END IF;
			f.shard := one;
			f.state := SQLSTATE;
			failures := failures || f;
		END;
	END LOOP;
	PERFORM idem_router.report_failures(failures, answered);
END $$;
COMMENT ON FUNCTION idem_router.idem_heartbeat IS
	'routed: extend the leases of jobs; returns one row per element, but none for those of a shard that did not answer';

/*
 * For operators: the map of the router, and checks.
 */

CREATE TYPE idem_router.shard_info AS (
	encoding text,
	version text,
	slot_by text,
	number integer,
	slots text,
	jobs_from bigint,
	stray_jobs bigint,
	statement_timeout text);
COMMENT ON TYPE idem_router.shard_info IS 'what a shard says about itself';
COMMENT ON COLUMN idem_router.shard_info.encoding IS 'encoding of the database';
COMMENT ON COLUMN idem_router.shard_info.version IS 'version of the library idem';
COMMENT ON COLUMN idem_router.shard_info.slot_by IS 'by of its map';
COMMENT ON COLUMN idem_router.shard_info.number IS 'number of its map';
COMMENT ON COLUMN idem_router.shard_info.slots IS 'slots of its map; null: it has no map';
COMMENT ON COLUMN idem_router.shard_info.jobs_from IS 'first job number that carries a slot';
COMMENT ON COLUMN idem_router.shard_info.stray_jobs IS 'live jobs whose numbers carry no slot and would lead to another shard';
COMMENT ON COLUMN idem_router.shard_info.statement_timeout IS 'statement_timeout of the session of the router';

/* PL/Proxy does not know multiranges. */
CREATE FUNCTION idem_router.on_shard_info(integer)
RETURNS idem_router.shard_info
LANGUAGE plproxy VOLATILE PARALLEL UNSAFE
AS $$
	CLUSTER 'idem_router';
	RUN ON $1;
	SELECT pg_catalog.getdatabaseencoding() AS encoding, pg_catalog.idem_version() AS version,
		   m.by AS slot_by, m.number, m.slots::pg_catalog.text AS slots, m.jobs_from,
		   (SELECT pg_catalog.count(*) FROM idem.job_status AS j
			 WHERE j.ended_at IS NULL AND j.job_id OPERATOR(pg_catalog.<) m.jobs_from
			   AND NOT m.slots OPERATOR(pg_catalog.@>) (j.job_id OPERATOR(pg_catalog.%) 1024)::pg_catalog.int4) AS stray_jobs,
		   pg_catalog.current_setting('statement_timeout') AS statement_timeout
	  FROM (SELECT 1) AS one LEFT JOIN idem.shard AS m ON m.slots IS NOT NULL;
$$;
COMMENT ON FUNCTION idem_router.on_shard_info IS 'for refresh() and check(): what the shard with this number says about itself';

/* What is wrong with a shard, apart from its slots */
CREATE FUNCTION idem_router.findings(shard integer, info idem_router.shard_info)
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	router_by text := (SELECT m.by FROM idem.shard AS m);
BEGIN
	RETURN QUERY
	SELECT 'encoding', CASE WHEN info.encoding = getdatabaseencoding() THEN 'ok' ELSE 'fail' END,
		   format('the shard has the encoding %s, the router %s', info.encoding, getdatabaseencoding()),
		   CASE WHEN info.encoding <> getdatabaseencoding()
		   THEN format('-- load the shard into a database with the encoding %s: createdb -T template0 -E %s', getdatabaseencoding(), getdatabaseencoding()) END
	UNION ALL
	SELECT 'version', CASE WHEN info.version = idem_version() THEN 'ok' ELSE 'warn' END,
		   format('the shard has version %s of idem, the router %s', info.version, idem_version()),
		   CASE WHEN info.version <> idem_version() THEN '-- install the same version of idem on both servers' END
	UNION ALL
	SELECT 'map', CASE WHEN info.slots IS NULL THEN 'fail' ELSE 'ok' END,
		   CASE WHEN info.slots IS NULL THEN 'the shard has no map, so it accepts every key' ELSE format('the shard has the slots %s', info.slots) END,
		   CASE WHEN info.slots IS NULL
		   THEN format('-- on the shard: SELECT pg_catalog.idem_shard_set(''{}'', by => %L, number => %s);', router_by, shard) END
	UNION ALL
	SELECT 'by', CASE WHEN info.slot_by = router_by THEN 'ok' ELSE 'fail' END,
		   format('the map of the shard is by %s, that of the router by %s', info.slot_by, router_by),
		   CASE WHEN info.slot_by IS DISTINCT FROM router_by
		   THEN format('-- if the shards are right: SELECT pg_catalog.idem_shard_set(''{}'', by => %L);', info.slot_by) END
	 WHERE info.slots IS NOT NULL
	UNION ALL
	SELECT 'number', CASE WHEN info.number = shard THEN 'ok' ELSE 'fail' END,
		   format('partition p%s leads to %s', shard, coalesce('shard ' || info.number, 'a database whose map has no number')),
		   CASE WHEN info.number IS NULL
		   THEN format('-- on the shard: SELECT pg_catalog.idem_shard_set(m.slots, m.by, %s) FROM idem.shard AS m;', shard)
		   WHEN info.number <> shard THEN format('ALTER SERVER idem_router OPTIONS (SET p%s ''...'');', shard) END
	 WHERE info.slots IS NOT NULL
	UNION ALL
	SELECT 'job numbers', CASE WHEN info.stray_jobs = 0 THEN 'ok' ELSE 'fail' END,
		   format('%s live jobs have numbers from before the map that would lead to another shard', info.stray_jobs),
		   CASE WHEN info.stray_jobs > 0 THEN format('-- on the shard, let workers that are connected to it do the jobs with a job_id below %s', info.jobs_from) END
	 WHERE info.slots IS NOT NULL
	UNION ALL
	/* PL/Proxy waits for the answer to its own cancel, which may have arrived already */
	SELECT 'statement_timeout', CASE WHEN info.statement_timeout = '0' THEN 'ok' ELSE 'warn' END,
		   format('on the shard statement_timeout is %s', info.statement_timeout)
			|| CASE WHEN info.statement_timeout = '0' THEN '' ELSE ': when it ends a call (57014), PL/Proxy can go on waiting until query_timeout; set statement_timeout in the router' END,
		   CASE WHEN info.statement_timeout <> '0' THEN '-- on the shard: ALTER ROLE ... SET statement_timeout = 0, for the roles of the user mappings' END;
END $$;
COMMENT ON FUNCTION idem_router.findings IS 'for refresh() and check(): judges what a shard says about itself';

CREATE FUNCTION idem_router.refresh()
RETURNS TABLE (shard integer, slots int4multirange)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
	every_shard integer[] := idem_router.partitions();
	one integer;
	info idem_router.shard_info;
	bad record;
	owned int4multirange := '{}';
	asked_all boolean := true;
	f idem_router.failure;
BEGIN
	IF every_shard = '{}' THEN
		RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'there is no server idem_router with partitions',
			HINT = 'Run CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (modular_mapping ''1'', p0 ''host=... dbname=...'', p1 ''...'').';
	END IF;
	LOCK TABLE idem_router.slots IN SHARE ROW EXCLUSIVE MODE;
	FOREACH one IN ARRAY every_shard LOOP
		BEGIN
			info := idem_router.on_shard_info(one);
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL, f.hint = PG_EXCEPTION_HINT;
			IF NOT EXISTS (SELECT FROM idem_router.shards AS k WHERE k.shard = one) THEN
				PERFORM idem_router.raise_error(one, SQLSTATE, f.message, f.detail, f.hint);
			END IF;
			f.shard := one;
			f.state := SQLSTATE;
			f := idem_router.translate(f);
			RAISE WARNING USING ERRCODE = f.state, MESSAGE = format('shard %s keeps the slots that it has in the router', one),
				DETAIL = format('%s. %s', f.message, f.detail), HINT = 'Run refresh() again when the shard can be reached.';
			asked_all := false;
			CONTINUE;
		END;
		SELECT * INTO bad FROM idem_router.findings(one, info) AS b WHERE b.status = 'fail' LIMIT 1;
		IF FOUND THEN
			RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('shard %s does not fit the router', one),
				DETAIL = format('Check "%s": %s.', bad."check", bad.detail), HINT = bad.fix;
		END IF;
		IF owned && info.slots::int4multirange THEN
			RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'two shards have the same slot',
				DETAIL = format('Shard %s and one before it have the slots %s.', one, owned * info.slots::int4multirange),
				HINT = 'If a slot has moved in this moment, run refresh() again. Else both accept its keys: give the slots up in the shard that should not have them.';
		END IF;
		owned := owned + info.slots::int4multirange;
		INSERT INTO idem_router.shards AS k (shard, jobs_from) VALUES (one, info.jobs_from)
			ON CONFLICT ON CONSTRAINT shards_pkey DO UPDATE SET jobs_from = excluded.jobs_from
			WHERE k.jobs_from <> excluded.jobs_from;
		INSERT INTO idem_router.slots AS s (slot, shard)
			SELECT n, one FROM generate_series(0, 1023) AS n WHERE info.slots::int4multirange @> n
			ON CONFLICT ON CONSTRAINT slots_pkey DO UPDATE SET shard = excluded.shard
			WHERE s.shard <> excluded.shard;
	END LOOP;
	DELETE FROM idem_router.shards AS k
	 WHERE k.shard <> ALL (every_shard) AND NOT EXISTS (SELECT FROM idem_router.slots AS s WHERE s.shard = k.shard);
	IF asked_all AND owned <> '{[0,1024)}' THEN
		RAISE WARNING USING ERRCODE = '01000', MESSAGE = 'no shard has some slots',
			DETAIL = format('Slots: %s.', '{[0,1024)}'::int4multirange - owned),
			HINT = 'Their keys are refused (ID006) until a shard has taken the slots and refresh() has run again.';
	END IF;
	RETURN QUERY
	SELECT k.shard, coalesce(range_agg(int4range(s.slot, s.slot + 1)) FILTER (WHERE s.slot IS NOT NULL), '{}')
	  FROM idem_router.shards AS k
	  LEFT JOIN idem_router.slots AS s ON s.shard = k.shard
	 GROUP BY k.shard
	 ORDER BY k.shard;
END $$;
COMMENT ON FUNCTION idem_router.refresh IS
	'for operators: ask every shard for its slots, and route by the answers from the commit on; returns the new map';

CREATE FUNCTION idem_router."check"()
RETURNS TABLE (shard integer, "check" text, status text, detail text, fix text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
	every_shard integer[] := idem_router.partitions();
	again text := 'SELECT * FROM idem_router.refresh();';
	one integer;
	info idem_router.shard_info;
	known int4multirange;
	owned int4multirange := '{}';
	twice int4multirange := '{}';
	asked_all boolean := true;
	f idem_router.failure;
BEGIN
	RETURN QUERY
	SELECT NULL::integer, 'router map', CASE WHEN m.slots = '{}' THEN 'ok' ELSE 'fail' END,
		   CASE WHEN m.slots = '{}' THEN 'the router refuses every key itself' ELSE 'the router accepts keys itself: a call that is not routed stays here' END,
		   CASE WHEN m.slots = '{}' THEN NULL ELSE format('SELECT pg_catalog.idem_shard_set(''{}'', by => %L);', coalesce(m.by, 'key')) END
	  FROM (SELECT) AS r LEFT JOIN idem.shard AS m ON true;
	RETURN QUERY
	SELECT NULL::integer, 'partitions', CASE WHEN every_shard = '{}' OR strays IS NOT NULL THEN 'fail' ELSE 'ok' END,
		   CASE WHEN strays IS NOT NULL THEN format('the router sends slots to shards that are no partitions of the server idem_router: %s', strays)
		   ELSE format('the server idem_router has %s partitions', cardinality(every_shard)) END,
		   CASE WHEN strays IS NOT NULL THEN 'ALTER SERVER idem_router OPTIONS (ADD p... ''...'');'
		   WHEN every_shard = '{}' THEN 'CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (modular_mapping ''1'', p0 ''...'');' END
	  FROM (SELECT string_agg(DISTINCT s.shard::text, ', ') FROM idem_router.slots AS s WHERE s.shard <> ALL (every_shard)) AS a (strays);
	RETURN QUERY
	SELECT NULL::integer, 'passwords', CASE WHEN named IS NULL THEN 'ok' ELSE 'fail' END,
		   CASE WHEN named IS NULL THEN 'the options of the server have no user and no password'
		   ELSE format('%s of the server have a user or a password: every role can read it, and PL/Proxy ignores the user mappings', named) END,
		   CASE WHEN named IS NOT NULL THEN 'CREATE USER MAPPING FOR ... SERVER idem_router OPTIONS (user ''...'', password ''...''); ALTER SERVER idem_router OPTIONS (SET p... ''...'');' END
	  FROM (SELECT string_agg(o.option_name, ', ')
			  FROM pg_foreign_server AS s CROSS JOIN LATERAL pg_options_to_table(s.srvoptions) AS o
			 WHERE s.srvname = 'idem_router' AND o.option_value ~ '(user|password)\s*=') AS a (named);
	FOREACH one IN ARRAY every_shard LOOP
		BEGIN
			info := idem_router.on_shard_info(one);
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL;
			f.shard := one;
			f.state := SQLSTATE;
			f := idem_router.translate(f);
			RETURN QUERY SELECT one, 'connection', 'fail', format('%s. %s', f.message, f.detail),
				'SELECT o.* FROM pg_catalog.pg_foreign_server AS s, pg_catalog.pg_options_to_table(s.srvoptions) AS o WHERE s.srvname OPERATOR(pg_catalog.=) ''idem_router'';';
			asked_all := false;
			CONTINUE;
		END;
		RETURN QUERY SELECT one, 'connection', 'ok', 'the shard answers', NULL;
		RETURN QUERY SELECT one, b.* FROM idem_router.findings(one, info) AS b;
		known := (SELECT coalesce(range_agg(int4range(s.slot, s.slot + 1)), '{}') FROM idem_router.slots AS s WHERE s.shard = one);
		RETURN QUERY SELECT one, 'slots', CASE WHEN known = info.slots::int4multirange THEN 'ok' ELSE 'fail' END,
			CASE WHEN known = info.slots::int4multirange THEN 'the router and the shard agree'
			ELSE format('the router sends %s to the shard, which has %s', known, coalesce(info.slots, 'no map')) END,
			CASE WHEN known = info.slots::int4multirange THEN NULL ELSE again END;
		twice := twice + owned * coalesce(info.slots::int4multirange, '{}');
		owned := owned + coalesce(info.slots::int4multirange, '{}');
	END LOOP;
	RETURN QUERY SELECT NULL::integer, 'one owner', CASE WHEN twice <> '{}' THEN 'fail' WHEN asked_all AND owned = '{[0,1024)}' THEN 'ok' ELSE 'warn' END,
		CASE WHEN twice <> '{}' THEN format('several shards have the slots %s: their keys can run twice', twice)
		WHEN NOT asked_all THEN 'not every shard has answered'
		WHEN owned = '{[0,1024)}' THEN 'every slot is in one shard'
		ELSE format('no shard has the slots %s: their keys are refused', '{[0,1024)}'::int4multirange - owned) END,
		CASE WHEN twice <> '{}' THEN '-- in the shard that should not have them: SELECT pg_catalog.idem_shard_set(...)'
		WHEN asked_all AND owned <> '{[0,1024)}' THEN '-- in one shard: SELECT pg_catalog.idem_shard_set(...), then ' || again END;
END $$;
COMMENT ON FUNCTION idem_router."check" IS
	'for operators: what is wrong between the router and its shards, and how to fix it';

/*
 * Privileges.
 */

CREATE FUNCTION idem_router.grant_app(role text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	f regprocedure;
BEGIN
	EXECUTE format('GRANT USAGE ON SCHEMA idem_router TO %I', role);
	EXECUTE format('GRANT USAGE ON FOREIGN SERVER idem_router TO %I', role);
	EXECUTE format('GRANT SELECT ON idem_router.slots, idem_router.shards TO %I', role);
	EXECUTE format('GRANT EXECUTE ON FUNCTION pg_catalog.idem_slot TO %I', role);
	FOR f IN
		SELECT p.oid FROM pg_proc AS p
		 WHERE p.pronamespace = 'idem_router'::regnamespace
		   AND p.proname NOT IN ('idem_forget', 'on_idem_forget', 'refresh', 'check', 'on_shard_info', 'findings',
								 'grant_app', 'revoke_app')
	LOOP
		EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', f, role);
	END LOOP;
END $$;
COMMENT ON FUNCTION idem_router.grant_app IS 'grant the privileges of an application to a role, which needs a user mapping, too';

CREATE FUNCTION idem_router.revoke_app(role text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem_router FROM %I', role);
	EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA idem_router FROM %I', role);
	EXECUTE format('REVOKE ALL ON FOREIGN SERVER idem_router FROM %I', role);
	EXECUTE format('REVOKE ALL ON SCHEMA idem_router FROM %I', role);
	EXECUTE format('REVOKE EXECUTE ON FUNCTION pg_catalog.idem_slot FROM %I', role);
END $$;
COMMENT ON FUNCTION idem_router.revoke_app IS 'revoke the privileges that grant_app() granted';

/* Default privileges of the installing role may grant more. */
DO $do$
DECLARE
	o record;
BEGIN
	FOR o IN
		SELECT 'FUNCTION' AS kind, p.oid::regprocedure::text AS name, p.proacl AS acl, p.proowner AS owner
		  FROM pg_proc AS p WHERE p.pronamespace = 'idem_router'::regnamespace
		UNION ALL
		SELECT 'TABLE', c.oid::regclass::text, c.relacl, c.relowner
		  FROM pg_class AS c WHERE c.relnamespace = 'idem_router'::regnamespace AND c.relkind = 'r'
		UNION ALL
		SELECT 'TYPE', t.oid::regtype::text, t.typacl, t.typowner
		  FROM pg_type AS t
		  JOIN pg_class AS c ON c.oid = t.typrelid AND c.relkind = 'c'
		 WHERE t.typnamespace = 'idem_router'::regnamespace
		UNION ALL
		SELECT 'SCHEMA', n.oid::regnamespace::text, n.nspacl, n.nspowner
		  FROM pg_namespace AS n WHERE n.nspname = 'idem_router'
	LOOP
		EXECUTE format('REVOKE ALL ON %s %s FROM PUBLIC', o.kind, o.name);
		EXECUTE (SELECT coalesce(string_agg(format('REVOKE ALL ON %s %s FROM %I;', o.kind, o.name, pg_get_userbyid(a.grantee)), ' '), 'SELECT')
				   FROM aclexplode(o.acl) AS a WHERE a.grantee NOT IN (0, o.owner));
	END LOOP;
END $do$;

COMMIT;
