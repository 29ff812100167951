/* src/sql/jobs_functions.sql: queues and jobs */

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
	'declare what holds for a queue; what is left out stays as it is';

CREATE FUNCTION pg_catalog.idem_queue_drop(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_queue_drop';
COMMENT ON FUNCTION pg_catalog.idem_queue_drop IS
	'take back what was declared for a queue that has no live jobs and no owner; false if nothing was';

CREATE FUNCTION pg_catalog.idem_pause(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_pause';
COMMENT ON FUNCTION pg_catalog.idem_pause IS
	'let nothing be fetched from a queue; false if it was paused before';

CREATE FUNCTION pg_catalog.idem_resume(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_resume';
COMMENT ON FUNCTION pg_catalog.idem_resume IS
	'end the pause of a queue; false if it was not paused';

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
	'put a job into a queue in this transaction, or say which job has absorbed it';

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
	'put many jobs into a queue, in an order that cannot deadlock; one row per element';

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
	'take jobs that are due, for this transaction or with a lease for longer, and get a fencing token for each';

CREATE FUNCTION pg_catalog.idem_complete(
	job_id bigint,
	token bigint,
	result jsonb DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_complete';
COMMENT ON FUNCTION pg_catalog.idem_complete IS
	'end a job that is done: it is deleted, and its result kept if the queue says so; returns true, or raises an error';

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
	'end many jobs that are done; one row per element: completed, stale or not_held';

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
	'end an attempt that has failed: retry the job later, or give it up if there were enough attempts; returns retry or dead';

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
	'let the leases of jobs run from now on for the time given; one row per element: renewed, stale or not_held';

CREATE FUNCTION pg_catalog.idem_snooze(
	job_id bigint,
	token bigint,
	delay interval)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_snooze';
COMMENT ON FUNCTION pg_catalog.idem_snooze IS
	'give a job back until later, without counting the attempt; returns when it is due';

CREATE FUNCTION pg_catalog.idem_cancel(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cancel';
COMMENT ON FUNCTION pg_catalog.idem_cancel IS
	'end a job that waits or is leased; false if there is no such job';

CREATE FUNCTION pg_catalog.idem_retry(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_retry';
COMMENT ON FUNCTION pg_catalog.idem_retry IS
	'let a dead or cancelled job wait again, with all its attempts; false if there is no such job';

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
	'where a job is and what became of it; no row if it is not known, or not any more';
