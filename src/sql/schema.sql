/* src/sql/schema.sql: the schema, and functions that other parts need */

-- complain if this script is sourced in psql instead of via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

/*
 * Names.  The server runs this script with search_path pg_catalog, pg_temp; views
 * and BEGIN ATOMIC functions store the OIDs of the objects that they use.  So the
 * script does not qualify operators, functions, types and catalogs of pg_catalog; a
 * test installs it beside hostile objects.  Only the names of new functions, in
 * CREATE, COMMENT and GRANT, are qualified, and commands in string literals: an
 * administrator runs the fixes of idem_doctor() later, under another search_path.
 */

/*
 * Without IF NOT EXISTS: the command fails if the schema exists, so the extension
 * cannot adopt objects of another role.
 */
CREATE SCHEMA idem;
COMMENT ON SCHEMA idem IS 'idem: data and views of the idempotency extension';

/*
 * What only the views and functions of the extension use.  Roles get no USAGE on this
 * schema, and no query names it at run time: the members of the extension have the OIDs
 * of what they use.  EXECUTE on a function and SELECT on a view are checked as always.
 */
CREATE SCHEMA idem_internal;
COMMENT ON SCHEMA idem_internal IS 'idem: functions and views that only the extension itself uses';

/*
 * All functions for callers are in pg_catalog, so that an unqualified call finds them under any
 * search_path.  None is STRICT: a null key must raise an error.
 *
 * A function of applications that returns several columns has a composite type for
 * its row: for OUT columns the server builds a descriptor several times in each
 * statement.  The server allows no composite type in pg_catalog.  A caller needs no
 * privilege on the type or on its schema.
 */
-- set: monitor
CREATE FUNCTION pg_catalog.idem_clock()
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_clock';
COMMENT ON FUNCTION pg_catalog.idem_clock IS
	'the clock by which keys expire: the wall clock plus idem.clock_offset';

/* H1 to H3: names that any role can choose, in what an operator reads and pastes */
-- set: app, monitor
CREATE FUNCTION pg_catalog.idem_visible(value text)
RETURNS text
LANGUAGE C IMMUTABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_visible';
COMMENT ON FUNCTION pg_catalog.idem_visible IS
	'for the views of operators: the text with its control and bidirectional characters as escapes';

-- set: app, monitor
CREATE FUNCTION pg_catalog.idem_visible_literal(value text)
RETURNS text
LANGUAGE C IMMUTABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_visible_literal';
COMMENT ON FUNCTION pg_catalog.idem_visible_literal IS
	'for the views of operators: a literal for a command, its control and bidirectional characters as escapes';

-- set: monitor
CREATE FUNCTION pg_catalog.idem_visible_name(value text)
RETURNS text
LANGUAGE C IMMUTABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_visible_name';
COMMENT ON FUNCTION pg_catalog.idem_visible_name IS
	'for the views of operators: an identifier for a command, its control and bidirectional characters as escapes';

-- set: monitor
CREATE FUNCTION pg_catalog.idem_version()
RETURNS text
LANGUAGE C STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_version';
COMMENT ON FUNCTION pg_catalog.idem_version IS
	'version of the library that this session uses';
