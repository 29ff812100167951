/* src/sql/schema.sql: the schema, and functions that other parts need */

-- complain if this script is sourced in psql instead of via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

/*
 * Names.  The server runs this script with search_path pg_catalog, pg_temp, and
 * views and functions with BEGIN ATOMIC store the OIDs of what they use.  So
 * operators, functions, types and catalogs stand without their schema; a test
 * installs beside hostile ones.  Objects of the schema idem, and functions where
 * they are made, stand with it.  Commands in the column fix of idem_doctor() stand with it, too:
 * they run later, under the search_path of another session.
 */

/*
 * Data.  A plain CREATE SCHEMA: it fails if somebody made the schema first,
 * so nothing of theirs can be adopted.
 */
CREATE SCHEMA idem;
COMMENT ON SCHEMA idem IS 'idem: data and views of the idempotency extension';

/*
 * Functions.  They live in pg_catalog, so an unqualified call reaches them
 * under any search_path.  None is STRICT: a null key must be loud.
 */
CREATE FUNCTION pg_catalog.idem_clock()
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_clock';
COMMENT ON FUNCTION pg_catalog.idem_clock IS
	'the clock by which keys expire: wall clock plus idem.clock_offset';

CREATE FUNCTION pg_catalog.idem_version()
RETURNS text
LANGUAGE C STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_version';
COMMENT ON FUNCTION pg_catalog.idem_version IS
	'version of the library that this session uses';
