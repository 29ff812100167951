/* src/sql/jobs_functions.sql: functions of queues and jobs */

-- set: admin
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

-- set: admin
CREATE FUNCTION pg_catalog.idem_queue_drop(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_queue_drop';
COMMENT ON FUNCTION pg_catalog.idem_queue_drop IS
	'remove the settings of a queue that has no live jobs and no owner; returns false if there were none';

-- set: admin
CREATE FUNCTION pg_catalog.idem_pause(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_pause';
COMMENT ON FUNCTION pg_catalog.idem_pause IS
	'pause a queue: its jobs are not fetched; returns false if it was paused before';

-- set: admin
CREATE FUNCTION pg_catalog.idem_resume(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_resume';
COMMENT ON FUNCTION pg_catalog.idem_resume IS
	'end the pause of a queue; returns false if it was not paused';

CREATE TYPE idem.enqueue_result AS (
	job_id bigint,
	outcome text,
	result jsonb);
COMMENT ON TYPE idem.enqueue_result IS 'the answer of idem_enqueue()';
COMMENT ON COLUMN idem.enqueue_result.job_id IS 'number of the new job, or of the job that absorbed it';
COMMENT ON COLUMN idem.enqueue_result.outcome IS 'enqueued, absorbed, replaced, postponed, rerun or done';
COMMENT ON COLUMN idem.enqueue_result.result IS 'result of a job that is done';

-- set: app
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
	scope text DEFAULT NULL,
	headers jsonb DEFAULT NULL)
RETURNS idem.enqueue_result
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_enqueue';
COMMENT ON FUNCTION pg_catalog.idem_enqueue IS
	'put a job into a queue in this transaction, or return the job that absorbed it';

CREATE TYPE idem.enqueue_many_result AS (
	ord integer,
	job_id bigint,
	outcome text,
	result jsonb);
COMMENT ON TYPE idem.enqueue_many_result IS 'the answer of idem_enqueue_many() for one job';
COMMENT ON COLUMN idem.enqueue_many_result.ord IS 'position of the payload in the array, from 1';
COMMENT ON COLUMN idem.enqueue_many_result.job_id IS 'number of the new job, or of the job that absorbed it';
COMMENT ON COLUMN idem.enqueue_many_result.outcome IS 'as in idem.enqueue_result';
COMMENT ON COLUMN idem.enqueue_many_result.result IS 'result of a job that is done';

-- set: app
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
	scope text DEFAULT NULL,
	headers jsonb[] DEFAULT NULL)
RETURNS SETOF idem.enqueue_many_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_enqueue_many';
COMMENT ON FUNCTION pg_catalog.idem_enqueue_many IS
	'put many jobs into a queue in an order that prevents deadlocks; returns one row per element';

CREATE TYPE idem.fetch_result AS (
	job_id bigint,
	token bigint,
	attempt integer,
	max_attempts integer,
	queue text,
	payload jsonb,
	key text,
	enqueued_at timestamp with time zone,
	lsn pg_lsn,
	progress jsonb,
	headers jsonb,
	links jsonb);
COMMENT ON TYPE idem.fetch_result IS 'a job that idem_fetch() has fetched';
COMMENT ON COLUMN idem.fetch_result.job_id IS 'number of the job';
COMMENT ON COLUMN idem.fetch_result.token IS 'fencing token, for idem_complete() and the like';
COMMENT ON COLUMN idem.fetch_result.attempt IS 'number of fetches, including this one';
COMMENT ON COLUMN idem.fetch_result.max_attempts IS 'maximum number of fetches';
COMMENT ON COLUMN idem.fetch_result.queue IS 'name of the queue';
COMMENT ON COLUMN idem.fetch_result.payload IS 'data for the worker';
COMMENT ON COLUMN idem.fetch_result.key IS 'the key; null: no key';
COMMENT ON COLUMN idem.fetch_result.enqueued_at IS 'when the job was enqueued';
COMMENT ON COLUMN idem.fetch_result.lsn IS 'WAL position; a replica that has replayed it shows everything that the job must see';
COMMENT ON COLUMN idem.fetch_result.progress IS 'recovery point that an earlier attempt stored with idem_progress(); null: none';
COMMENT ON COLUMN idem.fetch_result.headers IS 'what the enqueue passed beside the payload, such as a trace context; null: none';
COMMENT ON COLUMN idem.fetch_result.links IS 'the traceparent of each of the first duplicates that the job has absorbed; null: none';

-- set: app
CREATE FUNCTION pg_catalog.idem_fetch(
	queue text,
	batch integer DEFAULT 1,
	lease interval DEFAULT NULL,
	worker text DEFAULT NULL)
RETURNS SETOF idem.fetch_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_fetch';
COMMENT ON FUNCTION pg_catalog.idem_fetch IS
	'fetch jobs that are due, until this transaction ends or with a lease; returns a fencing token for each';

-- set: app
CREATE FUNCTION pg_catalog.idem_fetch_any(
	queues text[],
	batch integer DEFAULT 1,
	lease interval DEFAULT NULL,
	worker text DEFAULT NULL)
RETURNS SETOF idem.fetch_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_fetch_any';
COMMENT ON FUNCTION pg_catalog.idem_fetch_any IS
	'fetch jobs that are due from several queues, a fair share from each; otherwise like idem_fetch()';

-- set: app
CREATE FUNCTION pg_catalog.idem_complete(
	job_id bigint,
	token bigint,
	result jsonb DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_complete';
COMMENT ON FUNCTION pg_catalog.idem_complete IS
	'end a job that is done: delete it, and keep its result if the queue says so; returns true or raises an error';

CREATE TYPE idem.complete_many_result AS (
	ord integer,
	job_id bigint,
	status text);
COMMENT ON TYPE idem.complete_many_result IS 'the answer of idem_complete_many() for one job';
COMMENT ON COLUMN idem.complete_many_result.ord IS 'position of the job in the array, from 1';
COMMENT ON COLUMN idem.complete_many_result.job_id IS 'number of the job';
COMMENT ON COLUMN idem.complete_many_result.status IS 'completed, stale or not_held';

-- set: app
CREATE FUNCTION pg_catalog.idem_complete_many(
	ids bigint[],
	tokens bigint[])
RETURNS SETOF idem.complete_many_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_complete_many';
COMMENT ON FUNCTION pg_catalog.idem_complete_many IS
	'end many jobs that are done; returns one row per element: completed, stale or not_held';

-- set: app
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

CREATE TYPE idem.heartbeat_result AS (
	ord integer,
	job_id bigint,
	status text,
	lease_until timestamp with time zone);
COMMENT ON TYPE idem.heartbeat_result IS 'the answer of idem_heartbeat() for one job';
COMMENT ON COLUMN idem.heartbeat_result.ord IS 'position of the job in the array, from 1';
COMMENT ON COLUMN idem.heartbeat_result.job_id IS 'number of the job';
COMMENT ON COLUMN idem.heartbeat_result.status IS 'renewed, stale or not_held';
COMMENT ON COLUMN idem.heartbeat_result.lease_until IS 'when the lease expires; null if it was not renewed';

-- set: app
CREATE FUNCTION pg_catalog.idem_heartbeat(
	ids bigint[],
	tokens bigint[],
	lease interval DEFAULT NULL)
RETURNS SETOF idem.heartbeat_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_heartbeat';
COMMENT ON FUNCTION pg_catalog.idem_heartbeat IS
	'extend the leases of jobs to the given time from now; returns one row per element: renewed, stale or not_held';

-- set: app
CREATE FUNCTION pg_catalog.idem_progress(
	job_id bigint,
	token bigint,
	data jsonb,
	lease interval DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_progress';
COMMENT ON FUNCTION pg_catalog.idem_progress IS
	'store a recovery point of a job, which the next fetch returns, and renew its lease; returns when the lease expires';

-- set: app
CREATE FUNCTION pg_catalog.idem_snooze(
	job_id bigint,
	token bigint,
	delay interval)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_snooze';
COMMENT ON FUNCTION pg_catalog.idem_snooze IS
	'give a job back and postpone it, without counting the attempt; returns when it is due';

CREATE TYPE idem.current_job_result AS (
	job_id bigint,
	queue text,
	key text,
	attempt integer,
	max_attempts integer,
	headers jsonb,
	progress jsonb);
COMMENT ON TYPE idem.current_job_result IS 'the job whose handler runs, as idem_current_job() shows it';
COMMENT ON COLUMN idem.current_job_result.job_id IS 'number of the job; 0 in idem_verify()';
COMMENT ON COLUMN idem.current_job_result.queue IS 'name of the queue';
COMMENT ON COLUMN idem.current_job_result.key IS 'the key; null: no key';
COMMENT ON COLUMN idem.current_job_result.attempt IS 'number of fetches so far, including this one';
COMMENT ON COLUMN idem.current_job_result.max_attempts IS 'maximum number of fetches';
COMMENT ON COLUMN idem.current_job_result.headers IS 'what the enqueue passed beside the payload, such as a trace context';
COMMENT ON COLUMN idem.current_job_result.progress IS 'recovery point that idem_progress() stored';

-- set: app
CREATE FUNCTION pg_catalog.idem_current_job()
RETURNS SETOF idem.current_job_result
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_current_job';
COMMENT ON FUNCTION pg_catalog.idem_current_job IS
	'in a handler: the job for which idem_work(), idem_drain() or idem_verify() runs it; returns no row elsewhere';

-- set: app
CREATE FUNCTION pg_catalog.idem_cancel(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cancel';
COMMENT ON FUNCTION pg_catalog.idem_cancel IS
	'cancel a job that waits or is leased; returns false if there is no such job';

-- set: app
CREATE FUNCTION pg_catalog.idem_retry(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_retry';
COMMENT ON FUNCTION pg_catalog.idem_retry IS
	'put a dead or cancelled job back into its queue, with all its attempts; returns false if there is no such job';

CREATE TYPE idem.job_result AS (
	job_id bigint,
	queue text,
	state text,
	key text,
	payload jsonb,
	result jsonb,
	priority integer,
	attempt integer,
	max_attempts integer,
	worker text,
	error text,
	enqueued_at timestamp with time zone,
	run_at timestamp with time zone,
	started_at timestamp with time zone,
	lease_until timestamp with time zone,
	ended_at timestamp with time zone,
	headers jsonb,
	links jsonb,
	errors jsonb,
	progress jsonb);
COMMENT ON TYPE idem.job_result IS 'a job, as idem_job() shows it';
COMMENT ON COLUMN idem.job_result.job_id IS 'number of the job';
COMMENT ON COLUMN idem.job_result.queue IS 'name of the queue';
COMMENT ON COLUMN idem.job_result.state IS 'waiting, scheduled, blocked, running, expired, done, dead or cancelled, as in idem.job_status';
COMMENT ON COLUMN idem.job_result.key IS 'the key; null: no key';
COMMENT ON COLUMN idem.job_result.payload IS 'data for the worker';
COMMENT ON COLUMN idem.job_result.result IS 'result that idem_complete() stored';
COMMENT ON COLUMN idem.job_result.priority IS 'lower numbers are fetched first';
COMMENT ON COLUMN idem.job_result.attempt IS 'number of fetches so far';
COMMENT ON COLUMN idem.job_result.max_attempts IS 'maximum number of fetches';
COMMENT ON COLUMN idem.job_result.worker IS 'name of the worker, as given to idem_fetch()';
COMMENT ON COLUMN idem.job_result.error IS 'text of the last error, or the reason why the job is dead';
COMMENT ON COLUMN idem.job_result.enqueued_at IS 'when the job was enqueued';
COMMENT ON COLUMN idem.job_result.run_at IS 'time from which the job may be fetched; null if the job has ended';
COMMENT ON COLUMN idem.job_result.started_at IS 'when the worker fetched the job that has it, or that had it when the job ended; otherwise null';
COMMENT ON COLUMN idem.job_result.lease_until IS 'when the lease of the worker expires; null if no worker holds a lease';
COMMENT ON COLUMN idem.job_result.ended_at IS 'when the job ended; null if it has not ended';
COMMENT ON COLUMN idem.job_result.headers IS 'what the enqueue passed beside the payload, such as a trace context';
COMMENT ON COLUMN idem.job_result.links IS 'the traceparent of each of the first duplicates that the job has absorbed';
COMMENT ON COLUMN idem.job_result.errors IS 'the last errors, oldest first: attempt, time and text of each';
COMMENT ON COLUMN idem.job_result.progress IS 'recovery point that idem_progress() stored';

-- set: app
CREATE FUNCTION pg_catalog.idem_job(
	job_id bigint)
RETURNS SETOF idem.job_result
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_job';
COMMENT ON FUNCTION pg_catalog.idem_job IS
	'show the state of a job and its result; returns no row if there is no such job, or if it is no longer kept';

-- set: app
CREATE FUNCTION pg_catalog.idem_job_by_key(
	queue text,
	key text,
	max_jobs integer DEFAULT 100,
	scope text DEFAULT NULL)
RETURNS SETOF idem.job_result
LANGUAGE C STABLE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_job_by_key';
COMMENT ON FUNCTION pg_catalog.idem_job_by_key IS
	'show the jobs of a key: first those that have not ended, newest first, then those that have, the last end first';

-- set: app
CREATE FUNCTION pg_catalog.idem_cancel_by_key(
	queue text,
	key text,
	scope text DEFAULT NULL)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cancel_by_key';
COMMENT ON FUNCTION pg_catalog.idem_cancel_by_key IS
	'cancel the jobs of a key that have not ended, each as idem_cancel() does; returns how many';

-- set: app
CREATE FUNCTION pg_catalog.idem_cancel_many(
	ids bigint[] DEFAULT NULL,
	queue text DEFAULT NULL,
	state text DEFAULT NULL,
	max_jobs integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cancel_many';
COMMENT ON FUNCTION pg_catalog.idem_cancel_many IS
	'cancel many jobs, by their numbers or by queue and state; skips those that another transaction holds; returns how many';

-- set: app
CREATE FUNCTION pg_catalog.idem_retry_many(
	ids bigint[] DEFAULT NULL,
	queue text DEFAULT NULL,
	state text DEFAULT NULL,
	max_jobs integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_retry_many';
COMMENT ON FUNCTION pg_catalog.idem_retry_many IS
	'put many dead or cancelled jobs back into their queues, by their numbers or by queue and state; returns how many';

-- set: app
CREATE FUNCTION pg_catalog.idem_fail_many(
	ids bigint[] DEFAULT NULL,
	tokens bigint[] DEFAULT NULL,
	error text DEFAULT NULL,
	retry_in interval DEFAULT NULL,
	dead boolean DEFAULT false,
	queue text DEFAULT NULL,
	state text DEFAULT NULL,
	worker text DEFAULT NULL,
	max_jobs integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_fail_many';
COMMENT ON FUNCTION pg_catalog.idem_fail_many IS
	'end the attempts of many jobs as failed, by their numbers and tokens, or by queue, state and worker; returns how many';

-- set: app
CREATE FUNCTION pg_catalog.idem_snooze_many(
	ids bigint[] DEFAULT NULL,
	tokens bigint[] DEFAULT NULL,
	delay interval DEFAULT NULL,
	queue text DEFAULT NULL,
	state text DEFAULT NULL,
	worker text DEFAULT NULL,
	max_jobs integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_snooze_many';
COMMENT ON FUNCTION pg_catalog.idem_snooze_many IS
	'give many jobs back and postpone them, by their numbers and tokens, or by queue, state and worker; returns how many';

-- set: app
CREATE FUNCTION pg_catalog.idem_reschedule_many(
	ids bigint[] DEFAULT NULL,
	run_at timestamp with time zone DEFAULT NULL,
	priority integer DEFAULT NULL,
	queue text DEFAULT NULL,
	state text DEFAULT NULL,
	max_jobs integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_reschedule_many';
COMMENT ON FUNCTION pg_catalog.idem_reschedule_many IS
	'change when many jobs run, or their priority, as long as no worker has them, by their numbers or by queue and state; returns how many';

/*
 * Procedures that wait: they end their transaction, so they are not functions.  A SET
 * clause or SECURITY DEFINER would keep them from that.
 */
-- set: app
CREATE PROCEDURE pg_catalog.idem_wait(
	queue text,
	timeout interval DEFAULT '30 s',
	INOUT ready boolean DEFAULT NULL)
LANGUAGE C
AS 'MODULE_PATHNAME', 'idem_wait';
COMMENT ON PROCEDURE pg_catalog.idem_wait IS
	'wait without a transaction until a job of the queue can be fetched; ready is false after the timeout';

-- set: app
CREATE PROCEDURE pg_catalog.idem_wait_any(
	queues text[],
	timeout interval DEFAULT '30 s',
	INOUT ready boolean DEFAULT NULL,
	INOUT queue text DEFAULT NULL)
LANGUAGE C
AS 'MODULE_PATHNAME', 'idem_wait_any';
COMMENT ON PROCEDURE pg_catalog.idem_wait_any IS
	'wait without a transaction until a job of one of the queues can be fetched, and name that queue';

-- set: app
CREATE PROCEDURE pg_catalog.idem_wait_job(
	job_id bigint,
	timeout interval DEFAULT '30 s',
	INOUT state text DEFAULT NULL,
	INOUT result jsonb DEFAULT NULL)
LANGUAGE C
AS 'MODULE_PATHNAME', 'idem_wait_job';
COMMENT ON PROCEDURE pg_catalog.idem_wait_job IS
	'wait without a transaction until a job has ended; state is gone if the job is not kept';

-- set: app
CREATE PROCEDURE pg_catalog.idem_work(
	queue text,
	handler regproc,
	timeout interval DEFAULT '0',
	max_jobs integer DEFAULT NULL,
	INOUT completed bigint DEFAULT NULL,
	INOUT failed bigint DEFAULT NULL)
LANGUAGE C
AS 'MODULE_PATHNAME', 'idem_work';
COMMENT ON PROCEDURE pg_catalog.idem_work IS
	'work on the jobs of a queue, each in a transaction of its own: fetch it, run handler(payload), complete or fail it; returns how many were completed and how many attempts failed';
