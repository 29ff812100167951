--
-- Install, members, removal.  The extension itself was created by pg_regress.
--
\a\pset footer off

-- functions for callers in pg_catalog, data and views in idem, the rest in idem_internal
SELECT pg_describe_object(classid, objid, objsubid) AS member
  FROM pg_depend
 WHERE refclassid = 'pg_extension'::regclass
   AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
   AND deptype = 'e'
   AND (classid <> 'pg_type'::regclass	-- types of tables and array types are members from 17 on
		OR objid IN (SELECT reltype FROM pg_class WHERE relkind = 'c'))
 ORDER BY 1;

-- every function can be called unqualified, under any search_path, and no other
-- role can replace it by its own function
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.idem_claim(key text) RETURNS text
LANGUAGE sql AS $$ SELECT 'captured' $$;
SET search_path = hostile;
SELECT claimed, status FROM idem_claim('install:1');
SET search_path = '';
SELECT claimed, status FROM idem_claim('install:1');
RESET search_path;
DROP SCHEMA hostile CASCADE;

-- pg_dump dumps the data
SELECT extconfig::regclass[], extcondition FROM pg_extension WHERE extname = 'idem';

-- keys are never stored out of line
SELECT attrelid::regclass, attname, attstorage FROM pg_attribute
 WHERE attrelid IN ('idem.keys'::regclass, 'idem.jobs'::regclass, 'idem.job_keys'::regclass)
   AND attname IN ('key', 'scope', 'queue')
 ORDER BY attrelid::regclass::text, attname;

-- the extension cannot be moved to another schema
\set VERBOSITY sqlstate
ALTER EXTENSION idem SET SCHEMA public;

-- DROP EXTENSION removes everything
DROP EXTENSION idem;
SELECT count(*) FROM pg_namespace WHERE nspname ~ '^idem';
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem\_%';

-- CREATE EXTENSION does not adopt an existing schema (CVE-2022-2625)
CREATE SCHEMA idem;
CREATE TABLE idem.keys (trap int);
CREATE EXTENSION idem;
DROP SCHEMA idem CASCADE;
CREATE SCHEMA idem_internal;
CREATE FUNCTION idem_internal.idem_report_age(value interval) RETURNS text LANGUAGE sql RETURN 'trap';
CREATE EXTENSION idem;
DROP SCHEMA idem_internal CASCADE;

CREATE EXTENSION idem;
SELECT claimed, status FROM idem_claim('install:1');

-- no function is SECURITY DEFINER or STRICT
SELECT proname FROM pg_proc WHERE proname LIKE 'idem\_%' AND (prosecdef OR proisstrict);
