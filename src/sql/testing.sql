/* src/sql/testing.sql: for tests of applications */

CREATE TYPE idem.verify_result AS (
	"check" text,
	verdict text,
	object text,
	detail text);
COMMENT ON TYPE idem.verify_result IS 'a finding of idem_verify()';
COMMENT ON COLUMN idem.verify_result."check" IS 'first run, result, second run, interrupted or idem_call';
COMMENT ON COLUMN idem.verify_result.verdict IS 'ok, warn or fail';
COMMENT ON COLUMN idem.verify_result.object IS 'the table that the finding is about; null: none';
COMMENT ON COLUMN idem.verify_result.detail IS 'what was found';

-- set: app
CREATE FUNCTION pg_catalog.idem_verify(
	handler regproc,
	payload jsonb DEFAULT NULL,
	max_table_size bigint DEFAULT 268435456)
RETURNS SETOF idem.verify_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 10
AS 'MODULE_PATHNAME', 'idem_verify';
COMMENT ON FUNCTION pg_catalog.idem_verify IS
	'run handler(payload) twice, after an interruption, and through idem_call(), compare the effects, and roll everything back';

CREATE TYPE idem.drain_result AS (
	job_id bigint,
	key text,
	outcome text,
	result jsonb,
	error text);
COMMENT ON TYPE idem.drain_result IS 'a job that idem_drain() has run';
COMMENT ON COLUMN idem.drain_result.job_id IS 'number of the job';
COMMENT ON COLUMN idem.drain_result.key IS 'key of the job; null: no key';
COMMENT ON COLUMN idem.drain_result.outcome IS 'completed, retry or dead';
COMMENT ON COLUMN idem.drain_result.result IS 'result of the handler';
COMMENT ON COLUMN idem.drain_result.error IS 'SQLSTATE and message of the error of the handler; null: none';

-- set: app
CREATE FUNCTION pg_catalog.idem_drain(
	queue text,
	handler regproc,
	max_jobs integer DEFAULT 1000)
RETURNS SETOF idem.drain_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_drain';
COMMENT ON FUNCTION pg_catalog.idem_drain IS
	'fetch the jobs of a queue that are due, one after another, run handler(payload) for each in a subtransaction of this transaction, and complete or fail it; returns one row per run';

-- set: admin
CREATE FUNCTION pg_catalog.idem_reset()
RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_reset';
COMMENT ON FUNCTION pg_catalog.idem_reset IS
	'for test databases: remove all keys, jobs and job history; needs a superuser or idem.allow_reset; returns the number of rows';
