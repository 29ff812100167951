/* src/sql/schedules_functions.sql: functions for schedules */

-- set: app
CREATE FUNCTION pg_catalog.idem_schedule(
	name text,
	queue text,
	cron text DEFAULT NULL,
	every interval DEFAULT NULL,
	payload jsonb DEFAULT NULL,
	time_zone text DEFAULT 'UTC',
	missed text DEFAULT 'once',
	priority integer DEFAULT NULL,
	starts_at timestamp with time zone DEFAULT NULL,
	ends_at timestamp with time zone DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_schedule';
COMMENT ON FUNCTION pg_catalog.idem_schedule IS
	'declare a schedule, or change it: each tick enqueues one job; returns the next tick';

-- set: app
CREATE FUNCTION pg_catalog.idem_unschedule(
	name text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_unschedule';
COMMENT ON FUNCTION pg_catalog.idem_unschedule IS
	'remove a schedule; its jobs stay; returns false if there is none';

-- set: app
CREATE FUNCTION pg_catalog.idem_schedule_pause(
	name text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_schedule_pause';
COMMENT ON FUNCTION pg_catalog.idem_schedule_pause IS
	'let a schedule have no ticks until idem_schedule_resume(); returns false if it was paused before';

-- set: app
CREATE FUNCTION pg_catalog.idem_schedule_resume(
	name text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_schedule_resume';
COMMENT ON FUNCTION pg_catalog.idem_schedule_resume IS
	'let a schedule go on with the first tick from now on; returns false if that changes nothing';

-- set: admin
CREATE FUNCTION pg_catalog.idem_tick()
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_tick';
COMMENT ON FUNCTION pg_catalog.idem_tick IS
	'enqueue the jobs of all schedules that are due; returns their number';
