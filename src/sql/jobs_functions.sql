/* src/sql/jobs_functions.sql: functions of queues and jobs */

CREATE FUNCTION pg_catalog.idem_queue_set(
	queue text,
	dedup text DEFAULT NULL,
	on_duplicate text DEFAULT NULL,
	if_running text DEFAULT NULL,
	key_ttl interval DEFAULT NULL,
	include_scheduled boolean DEFAULT NULL,
	debounce_max interval DEFAULT NULL,
	lease interval DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	backoff interval DEFAULT NULL,
	backoff_max interval DEFAULT NULL,
	keep interval DEFAULT NULL,
	keep_dead interval DEFAULT NULL,
	owner regrole DEFAULT NULL)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_queue_set';
COMMENT ON FUNCTION pg_catalog.idem_queue_set IS
	'declare settings of a queue; settings that are left out keep their values';

CREATE FUNCTION pg_catalog.idem_queue_drop(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_queue_drop';
COMMENT ON FUNCTION pg_catalog.idem_queue_drop IS
	'remove the settings of a queue that has no live jobs and no owner; returns false if there were none';

CREATE FUNCTION pg_catalog.idem_pause(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_pause';
COMMENT ON FUNCTION pg_catalog.idem_pause IS
	'pause a queue: its jobs are not fetched; returns false if it was paused before';

CREATE FUNCTION pg_catalog.idem_resume(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_resume';
COMMENT ON FUNCTION pg_catalog.idem_resume IS
	'end the pause of a queue; returns false if it was not paused';

CREATE FUNCTION pg_catalog.idem_enqueue(
	queue text,
	payload jsonb DEFAULT NULL,
	key text DEFAULT NULL,
	dedup text DEFAULT NULL,
	on_duplicate text DEFAULT NULL,
	if_running text DEFAULT NULL,
	key_ttl interval DEFAULT NULL,
	include_scheduled boolean DEFAULT NULL,
	delay interval DEFAULT NULL,
	run_at timestamp with time zone DEFAULT NULL,
	priority integer DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	OUT job_id bigint,
	OUT outcome text,
	OUT result jsonb)
RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_enqueue';
COMMENT ON FUNCTION pg_catalog.idem_enqueue IS
	'put a job into a queue in this transaction, or return the job that absorbed it';

CREATE FUNCTION pg_catalog.idem_enqueue_many(
	queue text,
	payloads jsonb[],
	keys text[] DEFAULT NULL,
	dedup text DEFAULT NULL,
	on_duplicate text DEFAULT NULL,
	if_running text DEFAULT NULL,
	key_ttl interval DEFAULT NULL,
	include_scheduled boolean DEFAULT NULL,
	delay interval DEFAULT NULL,
	run_at timestamp with time zone DEFAULT NULL,
	priority integer DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	OUT ord integer,
	OUT job_id bigint,
	OUT outcome text,
	OUT result jsonb)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_enqueue_many';
COMMENT ON FUNCTION pg_catalog.idem_enqueue_many IS
	'put many jobs into a queue in an order that prevents deadlocks; returns one row per element';

CREATE FUNCTION pg_catalog.idem_fetch(
	queue text,
	batch integer DEFAULT 1,
	lease interval DEFAULT NULL,
	worker text DEFAULT NULL,
	OUT job_id bigint,
	OUT token bigint,
	OUT attempt integer,
	OUT max_attempts integer,
	OUT queue text,
	OUT payload jsonb,
	OUT key text,
	OUT enqueued_at timestamp with time zone,
	OUT lsn pg_lsn)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_fetch';
COMMENT ON FUNCTION pg_catalog.idem_fetch IS
	'fetch jobs that are due, until this transaction ends or with a lease; returns a fencing token for each';

CREATE FUNCTION pg_catalog.idem_complete(
	job_id bigint,
	token bigint,
	result jsonb DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_complete';
COMMENT ON FUNCTION pg_catalog.idem_complete IS
	'end a job that is done: delete it, and keep its result if the queue says so; returns true or raises an error';

CREATE FUNCTION pg_catalog.idem_complete_many(
	ids bigint[],
	tokens bigint[],
	OUT ord integer,
	OUT job_id bigint,
	OUT status text)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_complete_many';
COMMENT ON FUNCTION pg_catalog.idem_complete_many IS
	'end many jobs that are done; returns one row per element: completed, stale or not_held';

CREATE FUNCTION pg_catalog.idem_fail(
	job_id bigint,
	token bigint,
	error text DEFAULT NULL,
	retry_in interval DEFAULT NULL,
	dead boolean DEFAULT false)
RETURNS text
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_fail';
COMMENT ON FUNCTION pg_catalog.idem_fail IS
	'end an attempt that failed: retry the job later, or make it dead if it has no attempts left; returns retry or dead';

CREATE FUNCTION pg_catalog.idem_heartbeat(
	ids bigint[],
	tokens bigint[],
	lease interval DEFAULT NULL,
	OUT ord integer,
	OUT job_id bigint,
	OUT status text,
	OUT lease_until timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_heartbeat';
COMMENT ON FUNCTION pg_catalog.idem_heartbeat IS
	'extend the leases of jobs to the given time from now; returns one row per element: renewed, stale or not_held';

CREATE FUNCTION pg_catalog.idem_snooze(
	job_id bigint,
	token bigint,
	delay interval)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_snooze';
COMMENT ON FUNCTION pg_catalog.idem_snooze IS
	'give a job back and postpone it, without counting the attempt; returns when it is due';

CREATE FUNCTION pg_catalog.idem_cancel(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cancel';
COMMENT ON FUNCTION pg_catalog.idem_cancel IS
	'cancel a job that waits or is leased; returns false if there is no such job';

CREATE FUNCTION pg_catalog.idem_retry(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_retry';
COMMENT ON FUNCTION pg_catalog.idem_retry IS
	'put a dead or cancelled job back into its queue, with all its attempts; returns false if there is no such job';

CREATE FUNCTION pg_catalog.idem_job(
	job_id bigint,
	OUT queue text,
	OUT state text,
	OUT key text,
	OUT payload jsonb,
	OUT result jsonb,
	OUT priority integer,
	OUT attempt integer,
	OUT max_attempts integer,
	OUT worker text,
	OUT error text,
	OUT enqueued_at timestamp with time zone,
	OUT run_at timestamp with time zone,
	OUT lease_until timestamp with time zone,
	OUT ended_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_job';
COMMENT ON FUNCTION pg_catalog.idem_job IS
	'show the state of a job and its result; returns no row if there is no such job, or if it is no longer kept';
