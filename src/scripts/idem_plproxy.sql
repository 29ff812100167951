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
 * Run the file again to replace an older copy, or the same one.  The map of the router and the grants
 * stay.  It is one transaction, which waits for transactions that have called a routed function.
 */
\set ON_ERROR_STOP on

BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL standard_conforming_strings = on;

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

/*
 * An older copy: keep its map and its grants, and drop the rest.  Without CASCADE: an object outside of the
 * schema that depends on the copy is an error.  If another role owns a part of it, the script neither
 * adopts nor reads it: that could run code of that role.
 */
CREATE TEMPORARY TABLE idem_router_old_shards (shard integer, jobs_from bigint) ON COMMIT DROP;
CREATE TEMPORARY TABLE idem_router_old_slots (slot integer, shard integer) ON COMMIT DROP;
CREATE TEMPORARY TABLE idem_router_old_grants (kind text, name text, role text, privilege text, grantable boolean)
	ON COMMIT DROP;

DO $do$
DECLARE
	old oid := (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = 'idem_router');
	me oid := (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user);
	command text;
BEGIN
	IF old IS NULL THEN
		RETURN;
	END IF;
	IF EXISTS (SELECT FROM pg_namespace AS n WHERE n.oid = old AND n.nspowner <> me)
		OR EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = old AND p.proowner <> me)
		OR EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = old AND c.relowner <> me) THEN
		RAISE EXCEPTION USING ERRCODE = '42P06', MESSAGE = 'the schema idem_router exists, and not all of it belongs to the current user',
			HINT = 'Run the file as the role that has installed the older copy, or run DROP SCHEMA idem_router CASCADE first.';
	END IF;
	LOCK TABLE idem_router.shards, idem_router.slots IN ACCESS EXCLUSIVE MODE;
	INSERT INTO pg_temp.idem_router_old_shards SELECT k.shard, k.jobs_from FROM idem_router.shards AS k;
	INSERT INTO pg_temp.idem_router_old_slots SELECT s.slot, s.shard FROM idem_router.slots AS s;
	INSERT INTO pg_temp.idem_router_old_grants
	SELECT o.kind, o.name, pg_get_userbyid(a.grantee), a.privilege_type, a.is_grantable
	  FROM (SELECT 'FUNCTION', p.oid::regprocedure::text, p.proacl FROM pg_proc AS p WHERE p.pronamespace = old
			UNION ALL
			SELECT 'TABLE', c.oid::regclass::text, c.relacl FROM pg_class AS c WHERE c.relnamespace = old AND c.relkind = 'r'
			UNION ALL
			SELECT 'SCHEMA', n.oid::regnamespace::text, n.nspacl FROM pg_namespace AS n WHERE n.oid = old) AS o (kind, name, acl)
	 CROSS JOIN LATERAL aclexplode(o.acl) AS a
	 WHERE a.grantee NOT IN (0, me);
	FOR command IN
		SELECT 'DROP ROUTINE ' || string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc AS p WHERE p.pronamespace = old
		UNION ALL
		SELECT 'DROP TABLE ' || string_agg(c.oid::regclass::text, ', ') FROM pg_class AS c WHERE c.relnamespace = old AND c.relkind = 'r'
		UNION ALL
		SELECT 'DROP TYPE ' || string_agg(c.reltype::regtype::text, ', ') FROM pg_class AS c WHERE c.relnamespace = old AND c.relkind = 'c'
		UNION ALL
		SELECT 'DROP SCHEMA idem_router'
	LOOP
		IF command IS NOT NULL THEN
			EXECUTE command;
		END IF;
	END LOOP;
END $do$;

/* Without IF NOT EXISTS, see above */
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

INSERT INTO idem_router.shards (shard, jobs_from) SELECT o.shard, o.jobs_from FROM pg_temp.idem_router_old_shards AS o;
INSERT INTO idem_router.slots (slot, shard) SELECT o.slot, o.shard FROM pg_temp.idem_router_old_slots AS o;

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
 * The connection string of a partition in parts; the values of user and secrets are null.  No row: libpq could not
 * parse the string.
 */
CREATE FUNCTION idem_router.connection(shard integer)
RETURNS TABLE (keyword text, value text)
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
	WITH c (string) AS (
		SELECT o.option_value
		  FROM pg_foreign_server AS s CROSS JOIN LATERAL pg_options_to_table(s.srvoptions) AS o
		 WHERE s.srvname = 'idem_router' AND o.option_name = 'p' || connection.shard)
	SELECT m.part[1], CASE WHEN m.part[1] NOT IN ('user', 'password', 'sslpassword', 'oauth_client_secret', 'scram_client_key', 'scram_server_key') THEN m.part[2] END
	  FROM c
	 CROSS JOIN LATERAL regexp_matches(c.string, '(\w+)\s*=\s*(''(?:[^''\\]|\\.)*''|(?:[^\s''\\]|\\.)(?:[^\s\\]|\\.)*|)', 'g')
					 WITH ORDINALITY AS m (part, n)
	 WHERE c.string ~ '^(?:\s*\w+\s*=\s*(?:''(?:[^''\\]|\\.)*''(?=\s|$)|(?:[^\s''\\]|\\.)(?:[^\s\\]|\\.)*(?=\s|$)|(?=\s|$)))*\s*$'
	 ORDER BY m.n;
END;
COMMENT ON FUNCTION idem_router.connection IS 'parts of the connection string of a partition, without the values of user and password';

CREATE FUNCTION idem_router.name_of_shard(shard integer)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
	SELECT format('Shard %s', shard)
		|| coalesce(format(' (%s)', (SELECT string_agg(format('%s=%s', c.keyword, c.value), ' ')
									   FROM idem_router.connection(name_of_shard.shard) AS c
									  WHERE c.keyword IN ('host', 'hostaddr', 'port', 'dbname', 'service'))), '');
END;
COMMENT ON FUNCTION idem_router.name_of_shard IS 'a shard as errors name it: its number, and where its partition leads';

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
	hint text,
	is_remote boolean);
COMMENT ON TYPE idem_router.failure IS 'an error of a shard, or of the router on the way to it';
COMMENT ON COLUMN idem_router.failure.shard IS 'number of the shard';
COMMENT ON COLUMN idem_router.failure.state IS 'SQLSTATE';
COMMENT ON COLUMN idem_router.failure.message IS 'primary message';
COMMENT ON COLUMN idem_router.failure.detail IS 'detail; empty: none';
COMMENT ON COLUMN idem_router.failure.hint IS 'hint; empty: none';
COMMENT ON COLUMN idem_router.failure.is_remote IS 'true: the shard has raised it, which has committed nothing';

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
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $$
DECLARE
	remote text := '^idem_router\.\w+\(\d+\): \[[^]]*\] REMOTE [^:]+: ';
	lost text[] := regexp_match(f.message, '^PL/Proxy function [^:]*: (?:\[[^]]*\] )?(PQ[A-Za-z]+: |query timeout)(.*)$');
	name text := idem_router.name_of_shard(f.shard);
BEGIN
	f.is_remote := f.message ~ remote AND f.state NOT LIKE '57P0_';
	IF f.state LIKE '57P0_' AND f.message ~ remote THEN
		lost := ARRAY['', regexp_replace(f.message, remote, '')];
	END IF;
	IF lost IS NOT NULL THEN
		f.detail := format('%s: %s', name, coalesce(nullif(rtrim(lost[2], E'\n'), ''), 'no answer within query_timeout.'));
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
	f.message := regexp_replace(f.message, remote, '');
	f.detail := regexp_replace(f.detail, '^Remote detail: ', '');
	f.hint := regexp_replace(f.hint, '^Remote hint: ', '');
	IF f.state = 'ID006' THEN
		f.hint := 'The map of the router is old, or the slot is just moving: repeat the call. If the error stays, an operator runs SELECT * FROM idem_router.refresh().';
	END IF;
	f.detail := concat_ws(E'\n', nullif(f.detail, ''),
						  format(CASE WHEN f.is_remote THEN '%s raised this error.'
								 ELSE '%s was to run the call; the router raised this error.' END, name));
	RETURN f;
END $$;
COMMENT ON FUNCTION idem_router.translate IS
	'an error of PL/Proxy, as the shard has raised it, or as a connection error; its detail names the shard';

CREATE FUNCTION idem_router.raise_failure(f idem_router.failure)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF f.hint = '' THEN
		RAISE EXCEPTION USING ERRCODE = f.state, MESSAGE = f.message, DETAIL = f.detail;
	END IF;
	RAISE EXCEPTION USING ERRCODE = f.state, MESSAGE = f.message, DETAIL = f.detail, HINT = f.hint;
END $$;
COMMENT ON FUNCTION idem_router.raise_failure IS 'raises an error that translate() has returned';

CREATE FUNCTION idem_router.raise_error(shard integer, state text, message text, detail text, hint text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idem_router.raise_failure(idem_router.translate(ROW (shard, state, message, detail, hint, NULL)));
END $$;
COMMENT ON FUNCTION idem_router.raise_error IS
	'raises an error of a shard as the shard has raised it, and a lost connection as a connection error';

/* 57014 of a shard (its statement_timeout) is an error of this shard; 57014 of this session ends the call. */
CREATE FUNCTION idem_router.is_own_cancel(state text, message text)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN state = '57014' AND strpos(message, ' REMOTE ') = 0;
COMMENT ON FUNCTION idem_router.is_own_cancel IS 'was this session cancelled, and not the one on the shard?';

/*
 * The functions that are routed.  They have the names, arguments and results of those of idem, so
 * they are made from them.  The functions that make them are dropped below.
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

/* on_NAME(shard, arguments of NAME): the call, as text; some arguments may be other expressions */
CREATE FUNCTION idem_router.call_of(name text, shard text, others jsonb DEFAULT '{}')
RETURNS text
LANGUAGE plpgsql
AS $do$
DECLARE
	p pg_proc := (SELECT p FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
BEGIN
	RETURN (
		SELECT format('idem_router.%I(%s, %s)', 'on_' || p.proname, shard,
					  string_agg(CASE WHEN others ? a.name THEN others ->> a.name
								 WHEN a.name = 'scope' THEN 'coalesce(scope, current_setting(''idem.scope'', true))'
								 WHEN a.type = 'timestamptz'::regtype THEN format('to_jsonb(%I) #>> ''{}''', a.name)
								 ELSE quote_ident(a.name) END, ', ' ORDER BY a.n))
		  FROM unnest(p.proargnames, p.proargtypes::oid[]) WITH ORDINALITY AS a (name, type, n));
END $do$;

/* NAME(arguments of NAME), with this body */
CREATE FUNCTION idem_router.make_function(name text, body text)
RETURNS void
LANGUAGE plpgsql
AS $do$
DECLARE
	p pg_proc := (SELECT p FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
BEGIN
	EXECUTE format('CREATE FUNCTION idem_router.%I(%s) RETURNS %s LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE %s
					SET search_path = pg_catalog, pg_temp AS %L',
				   name,
				   regexp_replace(pg_get_function_arguments(p.oid), '\mregproc\M', 'text'),
				   pg_get_function_result(p.oid),
				   CASE WHEN p.proretset THEN 'ROWS ' || p.prorows ELSE '' END,
				   E'\n#variable_conflict use_variable\n' || body);
	EXECUTE format('COMMENT ON FUNCTION idem_router.%I IS %L', name, 'routed: ' || obj_description(p.oid, 'pg_proc'));
END $do$;

/*
 * NAME(arguments of NAME): finds the shard by the expression and calls on_NAME().  The caller's
 * scope is that of the router: the session on the shard has another idem.scope.  A fix is a command for
 * the shard, so it is returned as a comment, which does nothing if it is pasted into the router.
 */
CREATE FUNCTION idem_router.make_routed(name text, shard text, first text DEFAULT '')
RETURNS void
LANGUAGE plpgsql
AS $do$
DECLARE
	p pg_proc := (SELECT p FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
	columns text := (SELECT string_agg(CASE WHEN a.attname = 'fix' THEN $$'-- on shard ' || shard || ': ' || replace(r.fix, E'\n', ' ')$$
											ELSE 'r.' || quote_ident(a.attname) END, ', ' ORDER BY a.attnum)
					   FROM pg_type AS t
					   JOIN pg_attribute AS a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
					  WHERE t.oid = p.prorettype);
	call text := idem_router.call_of(name, 'shard');
BEGIN
	IF p.proretset THEN
		call := format('QUERY SELECT %s FROM %s AS r', columns, call);
	END IF;
	PERFORM idem_router.make_function(name, format($$
DECLARE
	shard integer := %s;
	message text;
	detail text;
	hint text;
BEGIN
%s	RETURN %s;
EXCEPTION WHEN OTHERS OR query_canceled THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	IF idem_router.is_own_cancel(SQLSTATE, message) THEN
		RAISE;
	END IF;
	PERFORM idem_router.raise_error(shard, SQLSTATE, message, detail, hint);
END
$$, shard, first, call));
END $do$;

/*
 * Functions that ask several shards.  split() says which, and with which part of the numbers.
 *
 * A count (or, of booleans, whether one of them is true), by numbers, or by queue until max_jobs is reached: if a
 * shard fails, the others are asked all the same, and then the error is raised, because the count of some
 * shards looks like that of all.
 */
CREATE FUNCTION idem_router.make_counted(name text)
RETURNS void
LANGUAGE plpgsql
AS $do$
DECLARE
	p pg_proc := (SELECT p FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
	ids text := CASE WHEN 'ids' = ANY (p.proargnames) THEN 'ids' ELSE 'NULL' END;
	tokens text := CASE WHEN 'tokens' = ANY (p.proargnames) THEN 'tokens' ELSE 'NULL' END;
	max_jobs text := CASE WHEN 'max_jobs' = ANY (p.proargnames) THEN 'max_jobs' ELSE 'NULL' END;
BEGIN
	PERFORM idem_router.make_function(name, format($$
DECLARE
	part record;
	missing integer := %s;
	one integer;
	total integer := 0;
	answers text[] := '{}';
	failures idem_router.failure[] := '{}';
	f idem_router.failure;
BEGIN
	FOR part IN SELECT * FROM idem_router.split(%s, %s, by_queue => true, fenced => %L) LOOP
		BEGIN
			one := %s::integer;
			total := total + one;
			answers := answers || format('%%s (%%s)', part.shard, one);
			IF part.ids IS NULL THEN
				missing := missing - one;
			END IF;
		EXCEPTION WHEN OTHERS OR query_canceled THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL, f.hint = PG_EXCEPTION_HINT;
			IF idem_router.is_own_cancel(SQLSTATE, f.message) THEN
				RAISE;
			END IF;
			f := idem_router.translate(ROW (part.shard, SQLSTATE, f.message, f.detail, f.hint, NULL));
			/* nothing has changed anywhere; of a bad argument, for example, each shard would say the same */
			IF f.is_remote AND answers = '{}' AND failures = '{}' THEN
				PERFORM idem_router.raise_failure(f);
			END IF;
			failures := failures || f;
		END;
		EXIT WHEN missing <= 0;
	END LOOP;
	PERFORM idem_router.raise_failures(failures, answers);
	RETURN total%s;
END
$$, max_jobs, ids, tokens, tokens = 'tokens',
		idem_router.call_of(name, 'part.shard', '{"ids": "part.ids", "tokens": "part.tokens", "max_jobs": "missing"}'),
		CASE WHEN p.prorettype = 'boolean'::regtype THEN ' > 0' ELSE '' END));
END $do$;

/*
 * One row per element, with its position in the array of the caller.  If a shard fails, its elements have no row,
 * and there is a warning: the answers of the others must reach the caller.
 */
CREATE FUNCTION idem_router.make_listed(name text)
RETURNS void
LANGUAGE plpgsql
AS $do$
DECLARE
	columns text := (SELECT string_agg(CASE WHEN a.attname = 'ord' THEN 'coalesce(part.places[r.ord], r.ord)'
											ELSE 'r.' || quote_ident(a.attname) END, ', ' ORDER BY a.attnum)
					   FROM pg_proc AS p
					   JOIN pg_type AS t ON t.oid = p.prorettype
					   JOIN pg_attribute AS a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
					  WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace);
BEGIN
	PERFORM idem_router.make_function(name, format($$
DECLARE
	part record;
	answered boolean := false;
	failures idem_router.failure[] := '{}';
	f idem_router.failure;
BEGIN
	FOR part IN SELECT * FROM idem_router.split(ids, tokens, by_queue => false, fenced => true) LOOP
		BEGIN
			RETURN QUERY SELECT %s FROM %s AS r;
			answered := true;
		EXCEPTION WHEN OTHERS OR query_canceled THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL, f.hint = PG_EXCEPTION_HINT;
			IF idem_router.is_own_cancel(SQLSTATE, f.message) THEN
				RAISE;
			END IF;
			failures := failures || idem_router.translate(ROW (part.shard, SQLSTATE, f.message, f.detail, f.hint, NULL));
		END;
	END LOOP;
	PERFORM idem_router.report_failures(failures, answered);
END
$$, columns, idem_router.call_of(name, 'part.shard', '{"ids": "part.ids", "tokens": "part.tokens"}')));
END $do$;

/*
 * A fetch: the shards are asked one after the other, each for what is missing of the batch, in another order each
 * time.  If some of them fail, that is a warning as long as there are jobs: a shard has leased them.
 */
CREATE FUNCTION idem_router.make_fetch(name text, example text)
RETURNS void
LANGUAGE plpgsql
AS $do$
BEGIN
	PERFORM idem_router.make_function(name, format($$
DECLARE
	every_shard integer[] := (SELECT array_agg(s.shard ORDER BY random()) FROM idem_router.shards AS s);
	one integer;
	missing integer := batch;
	fetched integer;
	failures idem_router.failure[] := '{}';
	f idem_router.failure;
BEGIN
	IF lease IS NULL OR lease = '0' THEN
		PERFORM idem_router.refuse('%s() without a lease',
			'The shard commits each call by itself, so the next fetch would get the same jobs.',
			'Pass a lease: idem_router.%s(%s, lease => ''30 s'').');
	END IF;
	IF every_shard IS NULL THEN
		PERFORM idem_router.shard_of_slot(0);
	END IF;
	FOREACH one IN ARRAY every_shard LOOP
		BEGIN
			RETURN QUERY SELECT * FROM %s;
			GET DIAGNOSTICS fetched = ROW_COUNT;
			missing := missing - fetched;
		EXCEPTION WHEN OTHERS OR query_canceled THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL, f.hint = PG_EXCEPTION_HINT;
			IF idem_router.is_own_cancel(SQLSTATE, f.message) THEN
				RAISE;
			END IF;
			failures := failures || idem_router.translate(ROW (one, SQLSTATE, f.message, f.detail, f.hint, NULL));
		END;
		EXIT WHEN missing <= 0;
	END LOOP;
	PERFORM idem_router.report_failures(failures, coalesce(missing < batch, false));
END
$$, name, name, example, idem_router.call_of(name, 'one', '{"batch": "missing"}')));
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
						'idem_snooze', 'idem_progress', 'idem_heartbeat', 'idem_complete_many', 'idem_cancel', 'idem_retry',
						'idem_job', 'idem_why', 'idem_holder', 'idem_job_by_key', 'idem_cancel_by_key', 'idem_fetch_any',
						'idem_cancel_many', 'idem_retry_many', 'idem_fail_many', 'idem_snooze_many',
						'idem_reschedule_many', 'idem_pause', 'idem_resume']) AS name;
	PERFORM idem_router.make_routed(name, 'idem_router.shard_of_key(key, scope)')
	  FROM unnest(ARRAY['idem_call', 'idem_lease', 'idem_renew', 'idem_checkpoint', 'idem_get', 'idem_forget',
						'idem_holder', 'idem_job_by_key', 'idem_cancel_by_key']) AS name;
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
	  FROM unnest(ARRAY['idem_complete', 'idem_fail', 'idem_snooze', 'idem_progress']) AS name;
	PERFORM idem_router.make_routed(name, 'idem_router.shard_of_job(job_id)')
	  FROM unnest(ARRAY['idem_cancel', 'idem_retry', 'idem_job', 'idem_why']) AS name;
	PERFORM idem_router.make_counted(name)
	  FROM unnest(ARRAY['idem_cancel_many', 'idem_retry_many', 'idem_fail_many', 'idem_snooze_many',
						'idem_reschedule_many', 'idem_pause', 'idem_resume']) AS name;
	PERFORM idem_router.make_listed(name)
	  FROM unnest(ARRAY['idem_heartbeat', 'idem_complete_many']) AS name;
	PERFORM idem_router.make_fetch('idem_fetch', 'queue'), idem_router.make_fetch('idem_fetch_any', 'queues');
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
				   ('idem_enqueue_many', 'idem_enqueue')) AS v (name, instead);
END $do$;

DROP FUNCTION idem_router.make_remote, idem_router.make_routed, idem_router.make_counted, idem_router.make_listed,
	idem_router.make_fetch, idem_router.make_refused, idem_router.make_function, idem_router.call_of,
	idem_router.type_of_argument;

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
 * What the functions that ask several shards share.
 *
 * The parts of a call by job numbers: for each shard the numbers (and tokens) that it gets, and their places in the
 * arrays of the caller.  Arrays that the plain function refuses, and empty ones, go to one shard as they are: it
 * raises the error before any other shard has changed a job.  by_queue: without numbers every shard is asked.
 * fenced: there are tokens, see shard_of_job().
 */
CREATE FUNCTION idem_router.split(all_ids bigint[], all_tokens bigint[], by_queue boolean, fenced boolean)
RETURNS TABLE (shard integer, ids bigint[], tokens bigint[], places integer[])
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
	any_shard integer := (SELECT min(k.shard) FROM idem_router.shards AS k);
	is_list boolean := coalesce(array_ndims(all_ids) = 1 AND array_position(all_ids, NULL) IS NULL
		AND (NOT fenced OR (array_ndims(all_tokens) = 1 AND cardinality(all_tokens) = cardinality(all_ids)
							AND array_position(all_tokens, NULL) IS NULL AND 0 < ALL (all_tokens))), false);
BEGIN
	IF any_shard IS NULL THEN
		PERFORM idem_router.shard_of_slot(0);
	END IF;
	IF NOT is_list THEN
		RETURN QUERY
		SELECT k.shard, all_ids, all_tokens, NULL::integer[]
		  FROM idem_router.shards AS k
		 WHERE k.shard = any_shard OR (by_queue AND all_ids IS NULL)
		 ORDER BY k.shard;
		RETURN;
	END IF;
	/* raise an error if a number leads to no shard, or may be of another one */
	PERFORM idem_router.shard_of_slot((i.id & 1023)::integer)
	  FROM unnest(all_ids) AS i (id)
	 WHERE NOT EXISTS (SELECT FROM idem_router.slots AS s WHERE s.slot = (i.id & 1023)::integer);
	IF NOT fenced THEN
		PERFORM idem_router.shard_of_job(i.id)
		  FROM unnest(all_ids) AS i (id)
		 WHERE i.id < (SELECT max(k.jobs_from) FROM idem_router.shards AS k WHERE k.jobs_from > 1024);
	END IF;
	RETURN QUERY
	SELECT s.shard, array_agg(i.id ORDER BY i.n), array_agg(i.token ORDER BY i.n), array_agg(i.n::integer ORDER BY i.n)
	  FROM unnest(all_ids, all_tokens) WITH ORDINALITY AS i (id, token, n)
	  JOIN idem_router.slots AS s ON s.slot = (i.id & 1023)::integer
	 GROUP BY s.shard
	 ORDER BY s.shard;
END $$;
COMMENT ON FUNCTION idem_router.split IS 'the shards that a call for many jobs asks, each with its part of the numbers';

CREATE FUNCTION idem_router.raise_failures(failures idem_router.failure[], answers text[])
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	f idem_router.failure := failures[1];
	others text := (SELECT string_agg(o.shard::text, ', ') FROM unnest(failures) WITH ORDINALITY AS o WHERE o.ordinality > 1);
BEGIN
	IF failures = '{}' THEN
		RETURN;
	END IF;
	f.detail := concat_ws(E'\n', f.detail, 'Failed, too: shard ' || others || '.',
		CASE WHEN answers = '{}' THEN 'No shard has answered.'
		ELSE format('These shards have committed, and this is what they returned: %s.', array_to_string(answers, ', ')) END);
	IF NOT f.is_remote THEN
		f.hint := 'Repeat the call when the shard answers. If the connection was lost, the shard may have committed its part.';
	END IF;
	PERFORM idem_router.raise_failure(f);
END $$;
COMMENT ON FUNCTION idem_router.raise_failures IS
	'raises the first error, and names the shards that have committed';

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
			PERFORM idem_router.raise_failure(f);
		END IF;
		RAISE WARNING USING ERRCODE = f.state, MESSAGE = format('shard %s did not answer', f.shard),
			DETAIL = format('%s. %s', f.message, f.detail), HINT = 'The rows of the other shards are returned.';
	END LOOP;
END $$;
COMMENT ON FUNCTION idem_router.report_failures IS
	'raises the first error, or all of them as warnings if other shards have returned rows';

/*
 * For operators: the map of the router, and checks.
 */

CREATE TYPE idem_router.shard_info AS (
	shard integer,
	role text,
	database text,
	encoding text,
	version text,
	slot_by text,
	number integer,
	slots text,
	given text,
	jobs_from bigint,
	stray_jobs bigint,
	has_rows boolean,
	statement_timeout text);
COMMENT ON TYPE idem_router.shard_info IS 'what a shard says about itself';
COMMENT ON COLUMN idem_router.shard_info.shard IS 'number of the partition';
COMMENT ON COLUMN idem_router.shard_info.role IS 'role of the user mapping';
COMMENT ON COLUMN idem_router.shard_info.database IS 'name of the database';
COMMENT ON COLUMN idem_router.shard_info.encoding IS 'encoding of the database';
COMMENT ON COLUMN idem_router.shard_info.version IS 'version of the library idem';
COMMENT ON COLUMN idem_router.shard_info.slot_by IS 'by of its map';
COMMENT ON COLUMN idem_router.shard_info.number IS 'number of its map';
COMMENT ON COLUMN idem_router.shard_info.slots IS 'slots of its map; null: it has no map';
COMMENT ON COLUMN idem_router.shard_info.given IS 'slots that it has given up, and that are moving to another database';
COMMENT ON COLUMN idem_router.shard_info.jobs_from IS 'first job number that carries a slot';
COMMENT ON COLUMN idem_router.shard_info.stray_jobs IS 'live jobs whose numbers carry no slot and would lead to another shard';
COMMENT ON COLUMN idem_router.shard_info.has_rows IS 'it has keys or jobs';
COMMENT ON COLUMN idem_router.shard_info.statement_timeout IS 'statement_timeout of the session of the router';

/* PL/Proxy does not know multiranges. */
CREATE FUNCTION idem_router.on_shard_info(integer)
RETURNS idem_router.shard_info
LANGUAGE plproxy VOLATILE PARALLEL UNSAFE
AS $$
	CLUSTER 'idem_router';
	RUN ON $1;
	SELECT $1 AS shard, session_user::pg_catalog.text AS role, pg_catalog.current_database()::pg_catalog.text AS database,
		   pg_catalog.getdatabaseencoding()::pg_catalog.text AS encoding, pg_catalog.idem_version() AS version,
		   m.by AS slot_by, m.number, m.slots::pg_catalog.text AS slots, m.given::pg_catalog.text AS given, m.jobs_from,
		   (SELECT pg_catalog.count(*) FROM idem.job_status AS j
			 WHERE j.ended_at IS NULL AND j.job_id OPERATOR(pg_catalog.<) m.jobs_from
			   AND NOT m.slots OPERATOR(pg_catalog.@>) (j.job_id OPERATOR(pg_catalog.%) 1024)::pg_catalog.int4) AS stray_jobs,
		   EXISTS (SELECT FROM idem.key_status AS k) OR EXISTS (SELECT FROM idem.job_status AS j) AS has_rows,
		   pg_catalog.current_setting('statement_timeout') AS statement_timeout
	  FROM (SELECT 1) AS one LEFT JOIN idem.shard AS m ON m.slots IS NOT NULL;
$$;
COMMENT ON FUNCTION idem_router.on_shard_info IS 'for refresh() and check(): what the shard with this number says about itself';

CREATE FUNCTION idem_router.ask()
RETURNS TABLE (shard integer, info idem_router.shard_info, failure idem_router.failure)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
	f idem_router.failure;
BEGIN
	FOREACH shard IN ARRAY idem_router.partitions() LOOP
		info := NULL;
		failure := NULL;
		BEGIN
			info := idem_router.on_shard_info(shard);
		EXCEPTION WHEN OTHERS OR query_canceled THEN
			GET STACKED DIAGNOSTICS f.message = MESSAGE_TEXT, f.detail = PG_EXCEPTION_DETAIL, f.hint = PG_EXCEPTION_HINT;
			IF idem_router.is_own_cancel(SQLSTATE, f.message) THEN
				RAISE;
			END IF;
			failure := idem_router.translate(ROW (shard, SQLSTATE, f.message, f.detail, f.hint, NULL));
		END;
		RETURN NEXT;
	END LOOP;
END $$;
COMMENT ON FUNCTION idem_router.ask IS 'for refresh() and check(): what every partition says about itself, or its error';

CREATE FUNCTION idem_router.slots_of(shard integer)
RETURNS int4multirange
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (SELECT coalesce(range_agg(int4range(s.slot, s.slot + 1)), '{}') FROM idem_router.slots AS s WHERE s.shard = slots_of.shard);
COMMENT ON FUNCTION idem_router.slots_of IS 'the slots that the router sends to the shard';

/*
 * Fixes.  "-- on shard N: COMMAND" is a command for the database of shard N: pasted into the router it does
 * nothing.  Another comment tells what only people can decide.  All else is a command for the router.
 */
CREATE FUNCTION idem_router.fix_map(i idem_router.shard_info, slots int4multirange, by text, condition text DEFAULT '')
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN format('-- %son shard %s: SELECT pg_catalog.idem_shard_set(%L, by => %L, number => %s);', condition, i.shard, slots, by, i.shard);
COMMENT ON FUNCTION idem_router.fix_map IS 'for check(): the command that sets the map of a shard';

/* To the right connection strings, without passwords */
CREATE FUNCTION idem_router.fix_partitions(targets integer[], sources integer[])
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
	SELECT format('ALTER SERVER idem_router OPTIONS (%s);', string_agg(format('SET p%s %L', t.target,
				  coalesce((SELECT string_agg(c.keyword || '=' || c.value, ' ') FROM idem_router.connection(t.source) AS c),
						   'host=... dbname=...')), ', ' ORDER BY t.target))
	  FROM unnest(targets, sources) AS t (target, source);
END;
COMMENT ON FUNCTION idem_router.fix_partitions IS
	'for check(): the command that gives partitions the connection strings of others, without user and password';

CREATE FUNCTION idem_router.fix_connection(f idem_router.failure)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE
	WHEN f.is_remote AND f.state IN ('42P01', '3F000') THEN format('-- on shard %s: CREATE EXTENSION idem;', f.shard)
	WHEN f.is_remote AND f.state = '42501' THEN
		format('-- on shard %s: SELECT pg_catalog.idem_grant(%L, ''admin'');', f.shard,
			   coalesce((SELECT o.option_value
						   FROM pg_user_mappings AS m CROSS JOIN LATERAL pg_options_to_table(m.umoptions) AS o
						  WHERE m.srvname = 'idem_router' AND m.usename IN (current_user, 'public') AND o.option_name = 'user'
						  ORDER BY m.usename = 'public' LIMIT 1), current_user))
	WHEN NOT f.is_remote AND f.message LIKE '%user mapping%' THEN 'CREATE USER MAPPING FOR CURRENT_USER SERVER idem_router;'
	ELSE format('-- start the server of the shard; or correct the user mapping of this role, or the partition: %s',
				idem_router.fix_partitions(ARRAY[f.shard], ARRAY[f.shard]))
	END;
COMMENT ON FUNCTION idem_router.fix_connection IS 'for check(): what to do about a shard that does not answer';

/*
 * What is wrong with a shard that has answered, apart from the slots of the router.  others: what the other ones
 * have said; is_complete: all of them have answered.
 */
CREATE FUNCTION idem_router.findings(i idem_router.shard_info, others idem_router.shard_info[], is_complete boolean)
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	router_by text := (SELECT m.by FROM idem.shard AS m);
	/* slots of other shards, and those that are moving */
	taken int4multirange := (SELECT coalesce(range_agg(coalesce(o.slots, '{}')::int4multirange + coalesce(o.given, '{}')::int4multirange), '{}')
							   FROM unnest(others) AS o);
	mine int4multirange := idem_router.slots_of(i.shard) - taken;
	/* partitions that lead to the database of another one */
	targets integer[];
	sources integer[];
BEGIN
	IF mine = '{}' AND i.has_rows THEN
		mine := '{[0,1024)}'::int4multirange - taken;
	END IF;
	SELECT array_agg(t.shard ORDER BY t.shard), array_agg(o.shard ORDER BY t.shard) INTO targets, sources
	  FROM unnest(others || i) AS t
	  JOIN unnest(others || i) AS o ON o.number = t.shard
	 WHERE t.number <> t.shard;
	RETURN QUERY
	SELECT 'encoding', CASE WHEN i.encoding = getdatabaseencoding() THEN 'ok' ELSE 'fail' END,
		   format('the shard has the encoding %s, the router %s', i.encoding, getdatabaseencoding()),
		   CASE WHEN i.encoding <> getdatabaseencoding()
		   THEN format('-- load the shard into a database with the encoding %s: createdb -T template0 -E %s', getdatabaseencoding(), getdatabaseencoding()) END
	UNION ALL
	SELECT 'version', CASE WHEN i.version = idem_version() THEN 'ok' ELSE 'warn' END,
		   format('the shard has version %s of idem, the router %s', i.version, idem_version()),
		   CASE WHEN i.version <> idem_version() THEN '-- install the same version of idem on both servers' END
	UNION ALL
	SELECT 'map', CASE WHEN i.slots IS NULL THEN 'fail' ELSE 'ok' END,
		   CASE WHEN i.slots IS NULL THEN 'the shard has no map, so it accepts every key' ELSE format('the shard has the slots %s', i.slots) END,
		   CASE WHEN i.slots IS NOT NULL THEN NULL
		   WHEN NOT is_complete THEN '-- first let every shard answer: another one may have its slots'
		   ELSE idem_router.fix_map(i, mine, coalesce(router_by, 'key')) END
	UNION ALL
	SELECT 'by', CASE WHEN i.slot_by = router_by THEN 'ok' ELSE 'fail' END,
		   format('the map of the shard is by %s, that of the router by %s', i.slot_by, coalesce(router_by, 'nothing')),
		   CASE WHEN i.slot_by IS NOT DISTINCT FROM router_by THEN NULL
		   WHEN router_by IS NOT NULL AND EXISTS (SELECT FROM unnest(others) AS o WHERE o.slot_by = router_by)
		   THEN idem_router.fix_map(i, i.slots::int4multirange, router_by)
		   ELSE format('SELECT pg_catalog.idem_shard_set(''{}'', by => %L);', i.slot_by) END
	 WHERE i.slots IS NOT NULL
	UNION ALL
	SELECT 'number', CASE WHEN i.number = i.shard THEN 'ok' ELSE 'fail' END,
		   format('partition p%s leads to %s', i.shard, coalesce('shard ' || i.number, 'a database whose map has no number')),
		   CASE WHEN i.number IS NULL THEN idem_router.fix_map(i, i.slots::int4multirange, i.slot_by)
		   WHEN i.number = i.shard THEN NULL
		   WHEN i.shard = ANY (targets) THEN idem_router.fix_partitions(targets, sources)
		   ELSE format('-- let the partition lead to the database whose map has the number %s: %s', i.shard,
					   idem_router.fix_partitions(ARRAY[i.shard], ARRAY[i.shard])) END
	 WHERE i.slots IS NOT NULL
	UNION ALL
	SELECT 'job numbers', CASE WHEN i.stray_jobs = 0 THEN 'ok' ELSE 'fail' END,
		   CASE WHEN i.stray_jobs = 0 THEN 'every live job is found by its number'
		   ELSE format('%s live jobs have numbers from before the map that would lead to another shard: workers that are connected to this shard must do them first', i.stray_jobs) END,
		   CASE WHEN i.stray_jobs > 0
		   THEN format('-- on shard %s: SELECT j.job_id, j.queue, j.state FROM idem.job_status AS j WHERE j.ended_at IS NULL AND j.job_id OPERATOR(pg_catalog.<) %s;', i.shard, i.jobs_from) END
	 WHERE i.slots IS NOT NULL
	UNION ALL
	/* PL/Proxy waits for the answer to its own cancel, which may have arrived already */
	SELECT 'statement_timeout', CASE WHEN i.statement_timeout = '0' THEN 'ok' ELSE 'warn' END,
		   format('on the shard statement_timeout is %s', i.statement_timeout)
			|| CASE WHEN i.statement_timeout = '0' THEN '' ELSE ': when it ends a call (57014), PL/Proxy can go on waiting until query_timeout; set statement_timeout in the router. Sessions that are open keep it' END,
		   CASE WHEN i.statement_timeout <> '0'
		   THEN format('-- on shard %s: ALTER ROLE %I IN DATABASE %I SET statement_timeout = 0;', i.shard, i.role, i.database) END;
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
	a record;
	bad record;
	owned int4multirange := '{}';
	asked_all boolean := true;
BEGIN
	IF every_shard = '{}' THEN
		RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'there is no server idem_router with partitions',
			HINT = 'Run CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (modular_mapping ''1'', p0 ''host=... dbname=...'', p1 ''...'').';
	END IF;
	LOCK TABLE idem_router.slots IN SHARE ROW EXCLUSIVE MODE;
	FOR a IN SELECT q.shard, q.info, q.failure, (q.info).slots::int4multirange AS slots, (q.info).jobs_from FROM idem_router.ask() AS q LOOP
		IF (a.failure).state IS NOT NULL THEN
			IF NOT EXISTS (SELECT FROM idem_router.shards AS k WHERE k.shard = a.shard) THEN
				PERFORM idem_router.raise_failure(a.failure);
			END IF;
			RAISE WARNING USING ERRCODE = (a.failure).state, MESSAGE = format('shard %s keeps the slots that it has in the router', a.shard),
				DETAIL = format('%s. %s', (a.failure).message, (a.failure).detail), HINT = 'Run refresh() again when the shard can be reached.';
			asked_all := false;
			CONTINUE;
		END IF;
		SELECT * INTO bad FROM idem_router.findings(a.info, '{}', false) AS b WHERE b.status = 'fail' LIMIT 1;
		IF FOUND THEN
			RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('shard %s does not fit the router', a.shard),
				DETAIL = format('Check "%s": %s.', bad."check", bad.detail),
				HINT = 'Run SELECT * FROM idem_router."check"(), which shows how to fix it.';
		END IF;
		IF owned && a.slots THEN
			RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = 'two shards have the same slot',
				DETAIL = format('Shard %s and one before it have the slots %s.', a.shard, owned * a.slots),
				HINT = 'If a slot has moved in this moment, run refresh() again. Else both accept its keys: SELECT * FROM idem_router."check"() shows how to fix it.';
		END IF;
		owned := owned + a.slots;
		INSERT INTO idem_router.shards AS k (shard, jobs_from) VALUES (a.shard, a.jobs_from)
			ON CONFLICT ON CONSTRAINT shards_pkey DO UPDATE SET jobs_from = excluded.jobs_from
			WHERE k.jobs_from <> excluded.jobs_from;
		INSERT INTO idem_router.slots AS s (slot, shard)
			SELECT n, a.shard FROM generate_series(0, 1023) AS n WHERE a.slots @> n
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
	RETURN QUERY SELECT k.shard, idem_router.slots_of(k.shard) FROM idem_router.shards AS k ORDER BY k.shard;
END $$;
COMMENT ON FUNCTION idem_router.refresh IS
	'for operators: ask every shard for its slots, and route by the answers from the commit on; returns the new map';

/* Slots of which not exactly one shard is known, by what the shards have said */
CREATE FUNCTION idem_router.owners(infos idem_router.shard_info[], is_complete boolean)
RETURNS TABLE (status text, detail text, fix text)
LANGUAGE plpgsql STABLE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	mapless text := (SELECT string_agg(i.shard::text, ', ' ORDER BY i.shard) FROM unnest(infos) AS i WHERE i.slots IS NULL);
	owned int4multirange := (SELECT coalesce(range_agg(i.slots::int4multirange), '{}') FROM unnest(infos) AS i);
	moving int4multirange := (SELECT coalesce(range_agg(i.given::int4multirange), '{}') FROM unnest(infos) AS i) - owned;
	nobody int4multirange := '{[0,1024)}'::int4multirange - owned - moving;
	i idem_router.shard_info;
	extra int4multirange;
BEGIN
	/*
	 * Of two shards that have a slot, the one to which the router does not send it gives it up; if it has rows of it,
	 * idem_shard_set() refuses that (M5).
	 */
	FOREACH i IN ARRAY infos LOOP
		extra := i.slots::int4multirange
			* (SELECT coalesce(range_agg(o.slots::int4multirange), '{}') FROM unnest(infos) AS o WHERE o.shard <> i.shard)
			- idem_router.slots_of(i.shard);
		IF extra <> '{}' THEN
			RETURN QUERY SELECT 'fail', format('another shard has the slots %s of shard %s, too: their keys can run twice', extra, i.shard),
				concat_ws(E'\n', idem_router.fix_map(i, i.slots::int4multirange - extra, i.slot_by),
					(SELECT string_agg(idem_router.fix_map(o, o.slots::int4multirange - extra, o.slot_by,
														   'or, if that is refused because of rows, '), E'\n' ORDER BY o.shard)
					   FROM unnest(infos) AS o WHERE o.shard <> i.shard AND o.slots::int4multirange && extra));
			RETURN;
		END IF;
	END LOOP;
	IF NOT is_complete THEN
		RETURN QUERY SELECT 'warn', 'not every shard has answered', NULL;
	ELSIF mapless IS NOT NULL THEN
		RETURN QUERY SELECT 'fail', format('these shards accept every key, because they have no map, so keys can run twice: %s', mapless), NULL;
	ELSIF moving <> '{}' THEN
		RETURN QUERY SELECT 'warn', format('the slots %s are moving: a shard has given them up, and none has taken them yet', moving),
			'-- finish the move: run idem_move with the same databases until it says "moved", or with --abort';
	ELSIF nobody <> '{}' THEN
		/* the shard to which the router sends them, or else the first one */
		SELECT k.* INTO i FROM unnest(infos) AS k ORDER BY NOT idem_router.slots_of(k.shard) && nobody, k.shard LIMIT 1;
		extra := nobody * idem_router.slots_of(i.shard);
		IF extra = '{}' THEN
			extra := nobody;
		END IF;
		RETURN QUERY SELECT 'warn', format('no shard has the slots %s: their keys are refused', nobody),
			idem_router.fix_map(i, i.slots::int4multirange + extra, i.slot_by, 'if no database has them, also none that is not a partition yet, ');
	ELSE
		RETURN QUERY SELECT 'ok', 'every slot is in one shard', NULL;
	END IF;
END $$;
COMMENT ON FUNCTION idem_router.owners IS 'for check(): slots that two shards have, or none';

/* The findings come in the order in which they are to be fixed: each fix works if what is above it is ok. */
CREATE FUNCTION idem_router."check"()
RETURNS TABLE (shard integer, "check" text, status text, detail text, fix text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
	every_shard integer[] := idem_router.partitions();
	infos idem_router.shard_info[] := '{}';
	is_complete boolean;
	named integer[];
	i idem_router.shard_info;
	owned int4multirange;
	wrong int4multirange;
	a record;
BEGIN
	RETURN QUERY
	SELECT NULL::integer, 'router map', CASE WHEN m.slots = '{}' THEN 'ok' ELSE 'fail' END,
		   CASE WHEN m.slots = '{}' THEN 'the router refuses every key itself' ELSE 'the router accepts keys itself: a call that is not routed stays here' END,
		   CASE WHEN m.slots = '{}' THEN NULL ELSE format('SELECT pg_catalog.idem_shard_set(''{}'', by => %L);', coalesce(m.by, 'key')) END
	  FROM (SELECT) AS r LEFT JOIN idem.shard AS m ON true;
	RETURN QUERY
	SELECT NULL::integer, 'partitions', CASE WHEN every_shard = '{}' THEN 'fail' ELSE 'ok' END,
		   CASE WHEN every_shard = '{}' THEN 'there is no server idem_router with partitions'
		   ELSE format('the server idem_router has %s partitions', cardinality(every_shard)) END,
		   CASE WHEN every_shard = '{}'
		   THEN 'CREATE SERVER idem_router FOREIGN DATA WRAPPER plproxy OPTIONS (modular_mapping ''1'', p0 ''host=... dbname=...'');' END;
	SELECT array_agg(p.n ORDER BY p.n) INTO named
	  FROM unnest(every_shard) AS p (n)
	 WHERE EXISTS (SELECT FROM idem_router.connection(p.n) AS c WHERE c.value IS NULL);
	RETURN QUERY
	SELECT NULL::integer, 'passwords', CASE WHEN named IS NULL THEN 'ok' ELSE 'fail' END,
		   CASE WHEN named IS NULL THEN 'the options of the server have no user and no password'
		   ELSE format('these partitions have a user or a password, which every role can read, and PL/Proxy ignores the user mappings for them: %s', array_to_string(named, ', ')) END,
		   CASE WHEN named IS NOT NULL THEN idem_router.fix_partitions(named, named) END;
	FOR a IN SELECT q.shard, q.info, q.failure FROM idem_router.ask() AS q LOOP
		IF (a.failure).state IS NULL THEN
			infos := infos || a.info;
			RETURN QUERY SELECT a.shard, 'connection', 'ok', 'the shard answers', NULL;
		ELSE
			RETURN QUERY SELECT a.shard, 'connection', 'fail', format('%s. %s', (a.failure).message, (a.failure).detail),
				idem_router.fix_connection(a.failure);
		END IF;
	END LOOP;
	owned := (SELECT coalesce(range_agg(o.slots::int4multirange), '{}') FROM unnest(infos) AS o);
	is_complete := cardinality(infos) = cardinality(every_shard);
	FOR a IN
		SELECT k.shard, known
		  FROM idem_router.shards AS k CROSS JOIN LATERAL idem_router.slots_of(k.shard) AS known
		 WHERE k.shard <> ALL (every_shard) AND known <> '{}'
		 ORDER BY k.shard
	LOOP
		is_complete := false;
		RETURN QUERY SELECT a.shard, 'partition', 'fail', format('the router sends %s to the shard, which is no partition of the server idem_router', a.known),
			CASE WHEN a.known <@ owned THEN 'SELECT * FROM idem_router.refresh();'
			ELSE format('ALTER SERVER idem_router OPTIONS (ADD p%s ''host=... dbname=...'');', a.shard) END;
	END LOOP;
	FOREACH i IN ARRAY infos LOOP
		RETURN QUERY
		SELECT i.shard, b.*
		  FROM idem_router.findings(i, ARRAY(SELECT o FROM unnest(infos) AS o WHERE o.shard <> i.shard), is_complete) AS b;
	END LOOP;
	RETURN QUERY SELECT NULL::integer, 'one owner', b.* FROM idem_router.owners(infos, is_complete) AS b;
	/* A slot that no shard has stays where it is in the router: refresh() changes nothing there. */
	FOREACH i IN ARRAY infos LOOP
		wrong := i.slots::int4multirange - idem_router.slots_of(i.shard)
			+ idem_router.slots_of(i.shard) * (owned - i.slots::int4multirange);
		RETURN QUERY
		SELECT i.shard, 'slots', CASE WHEN wrong = '{}' THEN 'ok' ELSE 'fail' END,
			   CASE WHEN wrong = '{}' THEN 'the router and the shard agree'
			   ELSE format('the router sends %s to the shard, which has %s', idem_router.slots_of(i.shard), i.slots) END,
			   CASE WHEN wrong <> '{}' THEN 'SELECT * FROM idem_router.refresh();' END
		 WHERE i.slots IS NOT NULL;
	END LOOP;
END $$;
COMMENT ON FUNCTION idem_router."check" IS
	'for operators: what is wrong between the router and its shards, and how to fix it, in the order in which to do that';

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
		   AND p.proname NOT IN ('idem_forget', 'on_idem_forget', 'idem_pause', 'on_idem_pause', 'idem_resume', 'on_idem_resume',
								 'refresh', 'check', 'on_shard_info', 'ask', 'findings', 'owners', 'fix_map', 'fix_partitions',
								 'fix_connection', 'grant_app', 'revoke_app')
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

/*
 * The grants of the older copy, on what is still there.  A role that had the privileges of an application
 * gets them for new functions, too.
 */
DO $do$
DECLARE
	g record;
BEGIN
	FOR g IN SELECT DISTINCT o.role FROM pg_temp.idem_router_old_grants AS o WHERE o.name LIKE 'idem_router.idem_call(%' LOOP
		PERFORM idem_router.grant_app(g.role);
	END LOOP;
	FOR g IN SELECT * FROM pg_temp.idem_router_old_grants LOOP
		CONTINUE WHEN g.kind = 'FUNCTION' AND to_regprocedure(g.name) IS NULL;
		CONTINUE WHEN g.kind = 'TABLE' AND to_regclass(g.name) IS NULL;
		EXECUTE format('GRANT %s ON %s %s TO %I%s', g.privilege, g.kind, g.name, g.role,
					   CASE WHEN g.grantable THEN ' WITH GRANT OPTION' ELSE '' END);
	END LOOP;
END $do$;

COMMIT;
