/* src/sql/shard.sql: the map of slots */

/*
 * One row at most: which keys and jobs belong to this database.  The row stays when the map is
 * removed, because job numbers carry slots from the first map on.
 */
-- set: admin
CREATE TABLE idem.shard (
	id smallint NOT NULL,
	jobs_from bigint NOT NULL,
	system_identifier bigint NOT NULL,
	database_oid oid NOT NULL,
	database_id uuid NOT NULL,
	by text COLLATE "C" NOT NULL,
	slots int4multirange,
	number integer,
	given int4multirange,
	receiver uuid,
	taken int4multirange,
	sender uuid,
	CONSTRAINT shard_pkey PRIMARY KEY (id)
) USING heap;

COMMENT ON TABLE idem.shard IS 'the map of slots, as idem_shard_set() stored it; no row: there was never a map';
COMMENT ON COLUMN idem.shard.id IS '1: there is one row at most';
COMMENT ON COLUMN idem.shard.jobs_from IS 'the first job number that carries a slot, in its low ten bits';
COMMENT ON COLUMN idem.shard.system_identifier IS 'system identifier of the server on which idem_shard_set() was called';
COMMENT ON COLUMN idem.shard.database_oid IS 'OID of the database in which idem_shard_set() was called; if it or system_identifier is not that of this database, the row came with a copy, a restore or pg_upgrade';
COMMENT ON COLUMN idem.shard.database_id IS 'random id of this database, by which a move knows it whatever its name';
COMMENT ON COLUMN idem.shard.by IS 'what the slot of a key is computed from: key (scope and key) or scope';
COMMENT ON COLUMN idem.shard.slots IS 'slots of this database, 0 to 1023; empty: none, the database is a router; null: no map, it accepts every key';
COMMENT ON COLUMN idem.shard.number IS 'number of the shard, for error messages; null: none';
COMMENT ON COLUMN idem.shard.given IS 'slots that idem_shard_give() has given up: their rows may still be here, for another database to copy; null: none';
COMMENT ON COLUMN idem.shard.receiver IS 'database_id of the database for which they were given up; null: there are none';
COMMENT ON COLUMN idem.shard.taken IS 'slots that idem_shard_take() has taken from another database, which may still have their rows; null: none';
COMMENT ON COLUMN idem.shard.sender IS 'database_id of the database that had them; null: there are none';
COMMENT ON CONSTRAINT shard_pkey ON idem.shard IS 'finds the row';
COMMENT ON INDEX idem.shard_pkey IS 'finds the row';

SELECT pg_extension_config_dump('idem.shard', '');

-- set: admin
CREATE FUNCTION pg_catalog.idem_shard_set(
	slots int4multirange,
	by text DEFAULT 'key',
	number integer DEFAULT NULL,
	force boolean DEFAULT false,
	keep_id uuid DEFAULT NULL)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_shard_set';
COMMENT ON FUNCTION pg_catalog.idem_shard_set IS
	'for operators: set the slots of this database, which then refuses keys and jobs of other slots; waits for all transactions that hold keys or jobs';

-- set: admin
CREATE FUNCTION pg_catalog.idem_shard_give(
	slots int4multirange,
	receiver uuid)
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_shard_give';
COMMENT ON FUNCTION pg_catalog.idem_shard_give IS
	'for operators: give up slots whose rows will be copied to another database; returns the last value of the sequence of job numbers';

-- set: admin
CREATE FUNCTION pg_catalog.idem_shard_take(
	slots int4multirange,
	above bigint,
	sender uuid DEFAULT NULL)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_shard_take';
COMMENT ON FUNCTION pg_catalog.idem_shard_take IS
	'for operators: add slots to the map, after their rows were copied; new job numbers are made from values above the given one';

-- set: admin
CREATE FUNCTION pg_catalog.idem_shard_id()
RETURNS uuid
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_shard_id';
COMMENT ON FUNCTION pg_catalog.idem_shard_id() IS
	'for operators: the id of this database, for idem_shard_give() and idem_shard_take(); an error in a copy of a database with a map';

-- set: app, monitor
CREATE FUNCTION pg_catalog.idem_slot(
	key text,
	scope text DEFAULT NULL)
RETURNS integer
LANGUAGE C STABLE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_slot';
COMMENT ON FUNCTION pg_catalog.idem_slot IS
	'the slot of a key and its scope, 0 to 1023, by which a router finds the database of the key';
