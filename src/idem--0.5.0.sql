/* src/idem--0.5.0.sql: everything that CREATE EXTENSION idem makes */

-- complain if this script is sourced in psql instead of via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

/*
 * Data.  A plain CREATE SCHEMA: it fails if somebody made the schema first,
 * so nothing of theirs can be adopted.
 */
CREATE SCHEMA idem;
COMMENT ON SCHEMA idem IS 'idem: data and views of the idempotency extension';

/*
 * One row per key.  Column order: what never changes stands first, so that
 * the WAL record of a finish holds little more than the result.  The columns
 * of leases stand last: the rows of plain claims end before them.
 */
CREATE TABLE idem.keys (
	created_at timestamp with time zone NOT NULL,
	expires_at timestamp with time zone NOT NULL,
	owner regrole NOT NULL,
	key text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	request bytea,
	finished_at timestamp with time zone,
	result jsonb,
	token bigint,
	leased_at timestamp with time zone,
	lease_until timestamp with time zone,
	attempt integer,
	max_attempts integer,
	park boolean,
	worker text COLLATE "C",
	checkpoint jsonb,
	prior_lease_until timestamp with time zone,
	prior_expires_at timestamp with time zone,
	CONSTRAINT keys_pkey PRIMARY KEY (key, scope)
) USING heap WITH (fillfactor = 70);
/* a key in the TOAST table would look like another one to an update */
ALTER TABLE idem.keys ALTER COLUMN key SET STORAGE MAIN, ALTER COLUMN scope SET STORAGE MAIN;
CREATE INDEX keys_expires_at_idx ON idem.keys USING btree (expires_at);

COMMENT ON TABLE idem.keys IS 'idempotency keys; read and written by the idem_* functions only';
COMMENT ON COLUMN idem.keys.created_at IS 'when this life of the key began; a takeover of a lease keeps it';
COMMENT ON COLUMN idem.keys.expires_at IS 'from when on the key counts as absent';
COMMENT ON COLUMN idem.keys.owner IS 'the role the key belongs to';
COMMENT ON COLUMN idem.keys.key IS 'the key, 1 to 1024 bytes';
COMMENT ON COLUMN idem.keys.scope IS 'name space of the key, 0 to 255 bytes';
COMMENT ON COLUMN idem.keys.request IS 'SHA-256 of the request, or null if none was given; of idem_call() 16 bytes of the SHA-256 of the handler''s name, then the SHA-256 of the payload if there is one';
COMMENT ON COLUMN idem.keys.finished_at IS 'when idem_finish() was called, or null if it was not';
COMMENT ON COLUMN idem.keys.result IS 'what idem_finish() was given';
COMMENT ON COLUMN idem.keys.token IS 'fencing token of the last lease, or null if there was none';
COMMENT ON COLUMN idem.keys.leased_at IS 'when the lease was taken or renewed';
COMMENT ON COLUMN idem.keys.lease_until IS 'when the lease runs out, or null for a plain claim';
COMMENT ON COLUMN idem.keys.attempt IS 'number of leases of this key, this one included';
COMMENT ON COLUMN idem.keys.max_attempts IS 'how many leases there may be, or null for no limit';
COMMENT ON COLUMN idem.keys.park IS 'whether the key is left to an operator when the lease has run out';
COMMENT ON COLUMN idem.keys.worker IS 'name that the holder of the lease has given';
COMMENT ON COLUMN idem.keys.checkpoint IS 'what idem_checkpoint() was given';
COMMENT ON COLUMN idem.keys.prior_lease_until IS 'a plain claim that took over a lease: lease_until of that lease, which idem_release() restores';
COMMENT ON COLUMN idem.keys.prior_expires_at IS 'a plain claim that took over a lease: expires_at of that lease, which idem_release() restores';
COMMENT ON CONSTRAINT keys_pkey ON idem.keys IS 'decides which of several claimers runs';
COMMENT ON INDEX idem.keys_pkey IS 'decides which of several claimers runs';
COMMENT ON INDEX idem.keys_expires_at_idx IS 'lets cleanup find expired keys, oldest first';

SELECT pg_catalog.pg_extension_config_dump('idem.keys', '');

/*
 * Jobs.  Live ones only: what has ended is removed, and kept in job_log as long
 * as its queue wants.  There is no state column: what a job is like follows from
 * run_at, lease_until and row locks.  Column order: what never changes stands
 * first; the rows of jobs that nobody has fetched yet end with the payload.  Every
 * job leaves dead entries at the head of an index, so VACUUM comes early.  The pages
 * have room for the jobs that a batch fetches all at once to stay where they are.
 */
CREATE SEQUENCE idem.jobs_job_id_seq AS bigint;
COMMENT ON SEQUENCE idem.jobs_job_id_seq IS 'numbers of jobs';

CREATE TABLE idem.jobs (
	job_id bigint NOT NULL,
	run_at timestamp with time zone NOT NULL,
	enqueued_at timestamp with time zone NOT NULL,
	key_hash bigint,
	priority integer NOT NULL,
	queue text COLLATE "C" NOT NULL,
	key text COLLATE "C",
	payload jsonb,
	max_attempts integer,
	key_until timestamp with time zone,
	after_job bigint,
	attempt integer,
	token bigint,
	lease_until timestamp with time zone,
	worker text COLLATE "C",
	error text COLLATE "C",
	CONSTRAINT jobs_pkey PRIMARY KEY (job_id)
) USING heap WITH (fillfactor = 40, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE idem.jobs ALTER COLUMN queue SET STORAGE MAIN, ALTER COLUMN key SET STORAGE MAIN;
CREATE INDEX jobs_fetch_idx ON idem.jobs USING btree (queue, priority, run_at, job_id);
CREATE INDEX jobs_key_idx ON idem.jobs USING btree (key_hash) WHERE key_hash IS NOT NULL;

COMMENT ON TABLE idem.jobs IS 'jobs that wait or run; read and written by the idem_* functions only';
COMMENT ON COLUMN idem.jobs.job_id IS 'number of the job';
COMMENT ON COLUMN idem.jobs.run_at IS 'from when on the job may be fetched';
COMMENT ON COLUMN idem.jobs.enqueued_at IS 'when the job was enqueued';
COMMENT ON COLUMN idem.jobs.key_hash IS 'hash of queue and key if duplicates of the job are looked for, else null';
COMMENT ON COLUMN idem.jobs.priority IS 'lower numbers are fetched first';
COMMENT ON COLUMN idem.jobs.queue IS 'name of the queue, 1 to 255 bytes';
COMMENT ON COLUMN idem.jobs.key IS 'what tells duplicates, 1 to 1024 bytes, or null';
COMMENT ON COLUMN idem.jobs.payload IS 'what the worker gets';
COMMENT ON COLUMN idem.jobs.max_attempts IS 'how often the job may be fetched, or null for what its queue says';
COMMENT ON COLUMN idem.jobs.key_until IS 'until_expired: until when duplicates are absorbed, else null';
COMMENT ON COLUMN idem.jobs.after_job IS 'a rerun: the job that has to end before, else null';
COMMENT ON COLUMN idem.jobs.attempt IS 'how often the job was fetched';
COMMENT ON COLUMN idem.jobs.token IS 'fencing token of the last fetch, or one that nobody has';
COMMENT ON COLUMN idem.jobs.lease_until IS 'until when the worker has the job; null if nobody has it';
COMMENT ON COLUMN idem.jobs.worker IS 'name that the worker has given';
COMMENT ON COLUMN idem.jobs.error IS 'what idem_fail() was given last';
COMMENT ON CONSTRAINT jobs_pkey ON idem.jobs IS 'finds a job by its number';
COMMENT ON INDEX idem.jobs_pkey IS 'finds a job by its number';
COMMENT ON INDEX idem.jobs_fetch_idx IS 'the order in which jobs are fetched';
COMMENT ON INDEX idem.jobs_key_idx IS 'finds the jobs of a key';

CREATE TABLE idem.job_keys (
	key_hash bigint NOT NULL,
	expires_at timestamp with time zone NOT NULL,
	job_id bigint NOT NULL,
	queue text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	result jsonb,
	CONSTRAINT job_keys_pkey PRIMARY KEY (key_hash, job_id)
) USING heap;
ALTER TABLE idem.job_keys ALTER COLUMN queue SET STORAGE MAIN, ALTER COLUMN key SET STORAGE MAIN;
CREATE INDEX job_keys_expires_at_idx ON idem.job_keys USING btree (expires_at);

COMMENT ON TABLE idem.job_keys IS 'keys that outlive their job: until_expired, and the job is done';
COMMENT ON COLUMN idem.job_keys.key_hash IS 'hash of queue and key';
COMMENT ON COLUMN idem.job_keys.expires_at IS 'from when on the key counts as absent';
COMMENT ON COLUMN idem.job_keys.job_id IS 'the job that is done';
COMMENT ON COLUMN idem.job_keys.queue IS 'name of the queue';
COMMENT ON COLUMN idem.job_keys.key IS 'the key';
COMMENT ON COLUMN idem.job_keys.result IS 'what idem_complete() was given';
COMMENT ON CONSTRAINT job_keys_pkey ON idem.job_keys IS 'finds a key by its hash';
COMMENT ON INDEX idem.job_keys_pkey IS 'finds a key by its hash';
COMMENT ON INDEX idem.job_keys_expires_at_idx IS 'lets cleanup find expired keys, oldest first';

CREATE TABLE idem.job_log (
	job_id bigint NOT NULL,
	ended_at timestamp with time zone NOT NULL,
	expires_at timestamp with time zone NOT NULL,
	enqueued_at timestamp with time zone NOT NULL,
	priority integer NOT NULL,
	attempt integer NOT NULL,
	max_attempts integer,
	key_until timestamp with time zone,
	took_key boolean,
	state text COLLATE "C" NOT NULL,
	queue text COLLATE "C" NOT NULL,
	key text COLLATE "C",
	worker text COLLATE "C",
	error text COLLATE "C",
	payload jsonb,
	result jsonb,
	CONSTRAINT job_log_pkey PRIMARY KEY (job_id)
) USING heap;
CREATE INDEX job_log_expires_at_idx ON idem.job_log USING btree (expires_at);

COMMENT ON TABLE idem.job_log IS 'jobs that have ended, for as long as their queue keeps them';
COMMENT ON COLUMN idem.job_log.job_id IS 'number of the job';
COMMENT ON COLUMN idem.job_log.ended_at IS 'when the job ended';
COMMENT ON COLUMN idem.job_log.expires_at IS 'until when the row is kept';
COMMENT ON COLUMN idem.job_log.enqueued_at IS 'when the job was enqueued';
COMMENT ON COLUMN idem.job_log.priority IS 'priority of the job';
COMMENT ON COLUMN idem.job_log.attempt IS 'how often the job was fetched';
COMMENT ON COLUMN idem.job_log.max_attempts IS 'how often the job might be fetched, or null for what its queue says';
COMMENT ON COLUMN idem.job_log.key_until IS 'until_expired: until when duplicates are absorbed, else null';
COMMENT ON COLUMN idem.job_log.took_key IS 'true if duplicates of the job were looked for, else null; idem_retry() gives the key back only then';
COMMENT ON COLUMN idem.job_log.state IS 'done, dead or cancelled';
COMMENT ON COLUMN idem.job_log.queue IS 'name of the queue';
COMMENT ON COLUMN idem.job_log.key IS 'the key, or null';
COMMENT ON COLUMN idem.job_log.worker IS 'name that the last worker has given';
COMMENT ON COLUMN idem.job_log.error IS 'what idem_fail() was given last, or why the job is dead';
COMMENT ON COLUMN idem.job_log.payload IS 'what the worker got';
COMMENT ON COLUMN idem.job_log.result IS 'what idem_complete() was given';
COMMENT ON CONSTRAINT job_log_pkey ON idem.job_log IS 'finds a job by its number';
COMMENT ON INDEX idem.job_log_pkey IS 'finds a job by its number';
COMMENT ON INDEX idem.job_log_expires_at_idx IS 'lets cleanup find what is kept no longer, oldest first';

CREATE TABLE idem.queues (
	queue text COLLATE "C" NOT NULL,
	owner regrole,
	paused_at timestamp with time zone,
	dedup text COLLATE "C",
	on_duplicate text COLLATE "C",
	if_running text COLLATE "C",
	key_ttl interval,
	include_scheduled boolean,
	debounce_max interval,
	lease interval,
	max_attempts integer,
	backoff interval,
	backoff_max interval,
	keep interval,
	keep_dead interval,
	CONSTRAINT queues_pkey PRIMARY KEY (queue)
) USING heap;

COMMENT ON TABLE idem.queues IS 'what was declared with idem_queue_set(); null: the default';
COMMENT ON COLUMN idem.queues.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queues.owner IS 'role whose members may use the queue; null: every role that may call the functions';
COMMENT ON COLUMN idem.queues.paused_at IS 'since when nothing is fetched; null: it is not paused';
COMMENT ON COLUMN idem.queues.dedup IS 'until_executing, until_executed or until_expired';
COMMENT ON COLUMN idem.queues.on_duplicate IS 'skip, replace, debounce or error';
COMMENT ON COLUMN idem.queues.if_running IS 'skip or rerun';
COMMENT ON COLUMN idem.queues.key_ttl IS 'until_expired: how long duplicates are absorbed';
COMMENT ON COLUMN idem.queues.include_scheduled IS 'whether jobs for later take their key, too';
COMMENT ON COLUMN idem.queues.debounce_max IS 'debounce: how long after the first enqueue the job runs at the latest';
COMMENT ON COLUMN idem.queues.lease IS 'how long a fetch leases jobs; zero: for its transaction';
COMMENT ON COLUMN idem.queues.max_attempts IS 'how often a job may be fetched';
COMMENT ON COLUMN idem.queues.backoff IS 'time until the first retry; doubles with each one';
COMMENT ON COLUMN idem.queues.backoff_max IS 'time until a retry at most';
COMMENT ON COLUMN idem.queues.keep IS 'how long done jobs stay in idem.job_log';
COMMENT ON COLUMN idem.queues.keep_dead IS 'how long dead and cancelled jobs stay in idem.job_log';
COMMENT ON CONSTRAINT queues_pkey ON idem.queues IS 'one declaration per queue';
COMMENT ON INDEX idem.queues_pkey IS 'one declaration per queue';

SELECT pg_catalog.pg_extension_config_dump('idem.jobs_job_id_seq', '');
SELECT pg_catalog.pg_extension_config_dump('idem.jobs', '');
SELECT pg_catalog.pg_extension_config_dump('idem.job_keys', '');
SELECT pg_catalog.pg_extension_config_dump('idem.job_log', '');
SELECT pg_catalog.pg_extension_config_dump('idem.queues', '');

/*
 * Functions.  They live in pg_catalog, so an unqualified call reaches them
 * under any search_path.  None is STRICT: a null key must be loud.
 */
CREATE FUNCTION pg_catalog.idem_claim(
	key text,
	request jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT claimed boolean,
	OUT status text,
	OUT result jsonb,
	OUT created_at timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_claim';
COMMENT ON FUNCTION pg_catalog.idem_claim(text, jsonb, interval, interval, text) IS
	'claim an idempotency key in this transaction, or get the result stored under it';

CREATE FUNCTION pg_catalog.idem_finish(
	key text,
	result jsonb DEFAULT NULL,
	token bigint DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_finish';
COMMENT ON FUNCTION pg_catalog.idem_finish(text, jsonb, bigint, text) IS
	'store the result of a key that this transaction has claimed, or of a lease with its token; false if it was stored before';

CREATE FUNCTION pg_catalog.idem_release(
	key text,
	token bigint DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_release';
COMMENT ON FUNCTION pg_catalog.idem_release(text, bigint, text) IS
	'give up a key that this transaction has claimed, as if it had never been claimed; with the token of a lease: let the next one have it at once; returns true, or raises an error';

CREATE FUNCTION pg_catalog.idem_get(
	key text,
	scope text DEFAULT NULL,
	OUT status text,
	OUT result jsonb,
	OUT owner name,
	OUT worker text,
	OUT attempt integer,
	OUT token bigint,
	OUT checkpoint jsonb,
	OUT created_at timestamp with time zone,
	OUT finished_at timestamp with time zone,
	OUT lease_until timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C STABLE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_get';
COMMENT ON FUNCTION pg_catalog.idem_get(text, text) IS
	'look at an idempotency key without claiming it; no row if there is none';

CREATE FUNCTION pg_catalog.idem_forget(
	key text,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_forget';
COMMENT ON FUNCTION pg_catalog.idem_forget(text, text) IS
	'for operators: remove a key of any role, so that it may run again';

CREATE FUNCTION pg_catalog.idem_lease(
	key text,
	lease interval,
	request jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	worker text DEFAULT NULL,
	max_attempts integer DEFAULT NULL,
	on_expiry text DEFAULT 'retry',
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT claimed boolean,
	OUT status text,
	OUT result jsonb,
	OUT token bigint,
	OUT attempt integer,
	OUT checkpoint jsonb,
	OUT lease_until timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_lease';
COMMENT ON FUNCTION pg_catalog.idem_lease(text, interval, jsonb, interval, text, integer, text, interval, text) IS
	'claim an idempotency key for a time that outlives this transaction, for work outside the database, and get a fencing token';

CREATE FUNCTION pg_catalog.idem_renew(
	key text,
	token bigint,
	lease interval,
	scope text DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_renew';
COMMENT ON FUNCTION pg_catalog.idem_renew(text, bigint, interval, text) IS
	'let a lease run from now on for the time given; returns its new end';

CREATE FUNCTION pg_catalog.idem_checkpoint(
	key text,
	token bigint,
	data jsonb,
	scope text DEFAULT NULL)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_checkpoint';
COMMENT ON FUNCTION pg_catalog.idem_checkpoint(text, bigint, jsonb, text) IS
	'store a recovery point for the next attempt and renew the lease; returns its new end';

CREATE FUNCTION pg_catalog.idem_fence(
	key text,
	token bigint,
	scope text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_fence';
COMMENT ON FUNCTION pg_catalog.idem_fence(text, bigint, text) IS
	'check a fencing token and keep others from taking over until this transaction ends; returns true, or raises an error';

CREATE FUNCTION pg_catalog.idem_call(
	key text,
	handler regproc,
	payload jsonb DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT status text,
	OUT result jsonb,
	OUT replayed boolean)
RETURNS record
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_call';
COMMENT ON FUNCTION pg_catalog.idem_call(text, regproc, jsonb, interval, interval, text) IS
	'claim a key for a handler and a payload, run handler(payload) with the rights of the caller, and finish the key with what it returns';

CREATE FUNCTION pg_catalog.idem_claim_many(
	keys text[],
	requests jsonb[] DEFAULT NULL,
	ttl interval DEFAULT NULL,
	wait interval DEFAULT NULL,
	scope text DEFAULT NULL,
	OUT ord integer,
	OUT key text,
	OUT claimed boolean,
	OUT status text,
	OUT result jsonb,
	OUT created_at timestamp with time zone,
	OUT expires_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100
AS 'MODULE_PATHNAME', 'idem_claim_many';
COMMENT ON FUNCTION pg_catalog.idem_claim_many(text[], jsonb[], interval, interval, text) IS
	'claim many keys in an order that cannot deadlock; one row per element';

CREATE FUNCTION pg_catalog.idem_finish_many(
	keys text[],
	results jsonb[] DEFAULT NULL,
	scope text DEFAULT NULL)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_finish_many';
COMMENT ON FUNCTION pg_catalog.idem_finish_many(text[], jsonb[], text) IS
	'store the results of many keys that this transaction has claimed, all or none; returns how many were not stored before';

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
COMMENT ON FUNCTION pg_catalog.idem_queue_set(text, text, text, text, interval, boolean, interval, interval, integer, interval, interval, interval, interval, regrole) IS
	'declare what holds for a queue; what is left out stays as it is';

CREATE FUNCTION pg_catalog.idem_queue_drop(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_queue_drop';
COMMENT ON FUNCTION pg_catalog.idem_queue_drop(text) IS
	'take back what was declared for a queue that has no live jobs and no owner; false if nothing was';

CREATE FUNCTION pg_catalog.idem_pause(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_pause';
COMMENT ON FUNCTION pg_catalog.idem_pause(text) IS
	'let nothing be fetched from a queue; false if it was paused before';

CREATE FUNCTION pg_catalog.idem_resume(
	queue text)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_resume';
COMMENT ON FUNCTION pg_catalog.idem_resume(text) IS
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
COMMENT ON FUNCTION pg_catalog.idem_enqueue(text, jsonb, text, text, text, text, interval, boolean, interval, timestamp with time zone, integer, integer) IS
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
COMMENT ON FUNCTION pg_catalog.idem_enqueue_many(text, jsonb[], text[], text, text, text, interval, boolean, interval, timestamp with time zone, integer, integer) IS
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
COMMENT ON FUNCTION pg_catalog.idem_fetch(text, integer, interval, text) IS
	'take jobs that are due, for this transaction or with a lease for longer, and get a fencing token for each';

CREATE FUNCTION pg_catalog.idem_complete(
	job_id bigint,
	token bigint,
	result jsonb DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_complete';
COMMENT ON FUNCTION pg_catalog.idem_complete(bigint, bigint, jsonb) IS
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
COMMENT ON FUNCTION pg_catalog.idem_complete_many(bigint[], bigint[]) IS
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
COMMENT ON FUNCTION pg_catalog.idem_fail(bigint, bigint, text, interval, boolean) IS
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
COMMENT ON FUNCTION pg_catalog.idem_heartbeat(bigint[], bigint[], interval) IS
	'let the leases of jobs run from now on for the time given; one row per element: renewed, stale or not_held';

CREATE FUNCTION pg_catalog.idem_snooze(
	job_id bigint,
	token bigint,
	delay interval)
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_snooze';
COMMENT ON FUNCTION pg_catalog.idem_snooze(bigint, bigint, interval) IS
	'give a job back until later, without counting the attempt; returns when it is due';

CREATE FUNCTION pg_catalog.idem_cancel(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cancel';
COMMENT ON FUNCTION pg_catalog.idem_cancel(bigint) IS
	'end a job that waits or is leased; false if there is no such job';

CREATE FUNCTION pg_catalog.idem_retry(
	job_id bigint)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_retry';
COMMENT ON FUNCTION pg_catalog.idem_retry(bigint) IS
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
COMMENT ON FUNCTION pg_catalog.idem_job(bigint) IS
	'where a job is and what became of it; no row if it is not known, or not any more';

CREATE FUNCTION pg_catalog.idem_cleanup(
	batch integer DEFAULT 1000)
RETURNS integer
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_cleanup';
COMMENT ON FUNCTION pg_catalog.idem_cleanup(integer) IS
	'remove expired keys and the history of jobs that is kept no longer, oldest first, and give up jobs whose last lease has run out, at most batch of each; returns how many';

CREATE FUNCTION pg_catalog.idem_grant(
	role text,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_grant';
COMMENT ON FUNCTION pg_catalog.idem_grant(text, text) IS
	'grant the privileges of an application, an administrator or a monitor (app, admin, monitor) to a role';

CREATE FUNCTION pg_catalog.idem_revoke(
	role text,
	set text)
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_revoke';
COMMENT ON FUNCTION pg_catalog.idem_revoke(text, text) IS
	'take back what idem_grant() has granted';

CREATE FUNCTION pg_catalog.idem_clock()
RETURNS timestamp with time zone
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_clock';
COMMENT ON FUNCTION pg_catalog.idem_clock() IS
	'the clock by which keys expire: wall clock plus idem.clock_offset';

CREATE FUNCTION pg_catalog.idem_key_state(
	xmin xid,
	finished_at timestamp with time zone,
	expires_at timestamp with time zone,
	lease_until timestamp with time zone,
	park boolean,
	attempt integer,
	max_attempts integer)
RETURNS text
LANGUAGE C VOLATILE PARALLEL RESTRICTED
AS 'MODULE_PATHNAME', 'idem_key_state';
COMMENT ON FUNCTION pg_catalog.idem_key_state(xid, timestamp with time zone, timestamp with time zone, timestamp with time zone, boolean, integer, integer) IS
	'state of a row of idem.keys: held, finished or expired';

CREATE FUNCTION pg_catalog.idem_stat_databases(
	OUT datid oid,
	OUT claims bigint,
	OUT resumed bigint,
	OUT busy bigint,
	OUT held bigint,
	OUT replays bigint,
	OUT parked bigint,
	OUT exhausted bigint,
	OUT mismatches bigint,
	OUT takeovers bigint,
	OUT stale_tokens bigint,
	OUT expired_keys bigint,
	OUT abandoned_leases bigint,
	OUT expired_job_keys bigint,
	OUT expired_job_history bigint,
	OUT stats_reset timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 10
AS 'MODULE_PATHNAME', 'idem_stat_databases';
COMMENT ON FUNCTION pg_catalog.idem_stat_databases() IS
	'what idem.stats is made of; no rows if the library is not preloaded';

CREATE FUNCTION pg_catalog.idem_stat_queues(
	OUT datid oid,
	OUT queue text,
	OUT enqueued bigint,
	OUT absorbed bigint,
	OUT replaced bigint,
	OUT postponed bigint,
	OUT rerun bigint,
	OUT done bigint,
	OUT refused bigint,
	OUT fetched bigint,
	OUT completed bigint,
	OUT failed bigint,
	OUT dead bigint,
	OUT snoozed bigint,
	OUT cancelled bigint,
	OUT retried bigint,
	OUT stats_reset timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 100
AS 'MODULE_PATHNAME', 'idem_stat_queues';
COMMENT ON FUNCTION pg_catalog.idem_stat_queues() IS
	'what idem.queue_stats is made of; no rows if the library is not preloaded';

CREATE FUNCTION pg_catalog.idem_stat_cleanup(
	OUT datid oid,
	OUT phase text,
	OUT removed bigint,
	OUT rows_per_second double precision,
	OUT backlog bigint,
	OUT started_at timestamp with time zone,
	OUT last_finished_at timestamp with time zone,
	OUT last_error text,
	OUT last_error_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 10
AS 'MODULE_PATHNAME', 'idem_stat_cleanup';
COMMENT ON FUNCTION pg_catalog.idem_stat_cleanup() IS
	'what idem.cleanup_progress is made of; no rows if the library is not preloaded';

CREATE FUNCTION pg_catalog.idem_stat_worker(
	OUT preloaded boolean,
	OUT library_version text,
	OUT state text,
	OUT launcher_pid integer,
	OUT started_at timestamp with time zone,
	OUT runs bigint,
	OUT last_run_at timestamp with time zone,
	OUT datid oid,
	OUT worker_pid integer,
	OUT used_slots integer,
	OUT no_slot_since timestamp with time zone,
	OUT clock_back_at timestamp with time zone,
	OUT clock_back_seconds double precision,
	OUT memory_bytes bigint,
	OUT stats_full boolean,
	OUT overdue_seconds double precision,
	OUT last_error text,
	OUT last_error_at timestamp with time zone)
RETURNS SETOF record
LANGUAGE C VOLATILE PARALLEL RESTRICTED ROWS 1
AS 'MODULE_PATHNAME', 'idem_stat_worker';
COMMENT ON FUNCTION pg_catalog.idem_stat_worker() IS
	'what idem.worker_status is made of';

CREATE FUNCTION pg_catalog.idem_stats_reset()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_stats_reset';
COMMENT ON FUNCTION pg_catalog.idem_stats_reset() IS
	'let the statistics of this database and its queues begin anew';

/*
 * Views for people.  key_status and lease_status show keys and are for
 * administrators; key_summary holds no keys and is for monitors.  The states
 * are those of idem_keyrow_judge() in keyrow.c.
 */
CREATE VIEW idem.key_status AS
SELECT k.key,
	   k.scope,
	   k.owner,
	   pg_catalog.idem_key_state(k.xmin, k.finished_at, k.expires_at, k.lease_until, k.park, k.attempt, k.max_attempts) AS status,
	   c.now OPERATOR(pg_catalog.-) k.created_at AS age,
	   k.expires_at OPERATOR(pg_catalog.-) c.now AS time_left,
	   k.worker,
	   k.attempt,
	   k.token,
	   k.lease_until OPERATOR(pg_catalog.-) c.now AS lease_left,
	   k.max_attempts
  FROM idem.keys AS k
 CROSS JOIN (SELECT pg_catalog.idem_clock() AS now OFFSET 0) AS c;
COMMENT ON VIEW idem.key_status IS 'every key with its state, age and time left, for administrators';
COMMENT ON COLUMN idem.key_status.key IS 'the key';
COMMENT ON COLUMN idem.key_status.scope IS 'name space of the key';
COMMENT ON COLUMN idem.key_status.owner IS 'the role the key belongs to';
COMMENT ON COLUMN idem.key_status.status IS 'held (by this transaction), finished, expired; of a lease also live, parked, exhausted';
COMMENT ON COLUMN idem.key_status.age IS 'time since this life of the key began';
COMMENT ON COLUMN idem.key_status.time_left IS 'time until the key expires, negative once it has';
COMMENT ON COLUMN idem.key_status.worker IS 'name that the holder of the lease has given';
COMMENT ON COLUMN idem.key_status.attempt IS 'number of leases of this key';
COMMENT ON COLUMN idem.key_status.token IS 'fencing token of the last lease';
COMMENT ON COLUMN idem.key_status.lease_left IS 'time until the lease runs out, negative once it has, null for a plain claim';
COMMENT ON COLUMN idem.key_status.max_attempts IS 'how many leases there may be, or null for no limit';

CREATE VIEW idem.key_summary AS
SELECT s.owner,
	   s.status,
	   pg_catalog.count(*) AS keys,
	   pg_catalog.max(s.age) AS oldest,
	   pg_catalog.min(s.time_left) AS next_expiry
  FROM idem.key_status AS s
 GROUP BY s.owner, s.status;
COMMENT ON VIEW idem.key_summary IS 'number of keys by role and state, for monitors: shows no keys';
COMMENT ON COLUMN idem.key_summary.owner IS 'the role the keys belong to';
COMMENT ON COLUMN idem.key_summary.status IS 'held (by this transaction), finished, expired; of leases also live, parked, exhausted';
COMMENT ON COLUMN idem.key_summary.keys IS 'number of keys';
COMMENT ON COLUMN idem.key_summary.oldest IS 'age of the oldest of them';
COMMENT ON COLUMN idem.key_summary.next_expiry IS 'time left of the one that expires first, negative once it has';

CREATE VIEW idem.lease_status AS
SELECT s.key,
	   s.scope,
	   s.owner,
	   s.worker,
	   s.attempt,
	   s.token,
	   s.age,
	   s.lease_left AS time_left,
	   s.status AS state,
	   s.max_attempts
  FROM idem.key_status AS s
 WHERE s.lease_left IS NOT NULL
   AND (s.status OPERATOR(pg_catalog.=) ANY (ARRAY['live', 'parked', 'exhausted'])
		OR (s.status OPERATOR(pg_catalog.=) 'expired'
			AND s.time_left OPERATOR(pg_catalog.>) interval '0'));
COMMENT ON VIEW idem.lease_status IS 'every lease that is not finished, with what hangs, for administrators';
COMMENT ON COLUMN idem.lease_status.key IS 'the key';
COMMENT ON COLUMN idem.lease_status.scope IS 'name space of the key';
COMMENT ON COLUMN idem.lease_status.owner IS 'the role the key belongs to';
COMMENT ON COLUMN idem.lease_status.worker IS 'name that the holder has given';
COMMENT ON COLUMN idem.lease_status.attempt IS 'number of leases of this key, this one included';
COMMENT ON COLUMN idem.lease_status.token IS 'fencing token, to finish or release a parked key with';
COMMENT ON COLUMN idem.lease_status.age IS 'time since the key was leased first';
COMMENT ON COLUMN idem.lease_status.time_left IS 'time until the lease runs out, negative once it has';
COMMENT ON COLUMN idem.lease_status.max_attempts IS 'how many leases there may be, or null for no limit';
COMMENT ON COLUMN idem.lease_status.state IS 'live, expired (the next claim gets the key), parked (an operator is to decide) or exhausted (no attempts left)';

/*
 * Jobs for people.  job_status shows keys and is for administrators;
 * queue_status is for monitors.  Neither shows a payload.  The states are those
 * of state_name() in jobrow.c; a job that runs in an open transaction
 * looks as if it were waiting.
 */
CREATE VIEW idem.job_status AS
SELECT j.job_id,
	   j.queue,
	   j.key,
	   CASE
	   WHEN j.lease_until OPERATOR(pg_catalog.>) c.now THEN 'running'
	   WHEN j.lease_until IS NOT NULL THEN 'expired'
	   WHEN j.after_job IS NOT NULL
			AND EXISTS (SELECT FROM idem.jobs AS o WHERE o.job_id OPERATOR(pg_catalog.=) j.after_job) THEN 'blocked'
	   WHEN j.run_at OPERATOR(pg_catalog.>) c.now THEN 'scheduled'
	   ELSE 'waiting'
	   END AS state,
	   j.priority,
	   c.now OPERATOR(pg_catalog.-) j.enqueued_at AS age,
	   COALESCE(j.attempt, 0) AS attempt,
	   COALESCE(j.max_attempts, q.max_attempts, 25) AS max_attempts,
	   j.worker,
	   j.error AS last_error,
	   j.run_at,
	   j.lease_until,
	   NULL::timestamp with time zone AS ended_at
  FROM idem.jobs AS j
 CROSS JOIN (SELECT pg_catalog.idem_clock() AS now OFFSET 0) AS c
  LEFT JOIN idem.queues AS q ON q.queue OPERATOR(pg_catalog.=) j.queue
UNION ALL
SELECT l.job_id,
	   l.queue,
	   l.key,
	   l.state,
	   l.priority,
	   c.now OPERATOR(pg_catalog.-) l.enqueued_at,
	   l.attempt,
	   COALESCE(l.max_attempts, q.max_attempts, 25),
	   l.worker,
	   l.error,
	   NULL,
	   NULL,
	   l.ended_at
  FROM idem.job_log AS l
 CROSS JOIN (SELECT pg_catalog.idem_clock() AS now OFFSET 0) AS c
  LEFT JOIN idem.queues AS q ON q.queue OPERATOR(pg_catalog.=) l.queue;
COMMENT ON VIEW idem.job_status IS 'every job, live or in the history, with its state, for administrators';
COMMENT ON COLUMN idem.job_status.job_id IS 'number of the job';
COMMENT ON COLUMN idem.job_status.queue IS 'name of the queue';
COMMENT ON COLUMN idem.job_status.key IS 'the key, or null';
COMMENT ON COLUMN idem.job_status.state IS 'waiting, scheduled (for later), blocked (another job has to end before), running (leased), expired (its lease ran out: the next fetch gets it); done, dead, cancelled';
COMMENT ON COLUMN idem.job_status.priority IS 'lower numbers are fetched first';
COMMENT ON COLUMN idem.job_status.age IS 'time since the job was enqueued';
COMMENT ON COLUMN idem.job_status.attempt IS 'how often the job was fetched';
COMMENT ON COLUMN idem.job_status.max_attempts IS 'how often it may be fetched';
COMMENT ON COLUMN idem.job_status.worker IS 'name that the worker has given; null if nobody has the job';
COMMENT ON COLUMN idem.job_status.last_error IS 'what idem_fail() was given last, or why the job is dead';
COMMENT ON COLUMN idem.job_status.run_at IS 'from when on the job may be fetched; null if it has ended';
COMMENT ON COLUMN idem.job_status.lease_until IS 'until when the worker has the job; null if nobody has it';
COMMENT ON COLUMN idem.job_status.ended_at IS 'when the job ended; null for a live one';

CREATE VIEW idem.queue_status AS
SELECT COALESCE(j.queue, q.queue) AS queue,
	   COALESCE(j.ready, 0) AS ready,
	   COALESCE(j.scheduled, 0) AS scheduled,
	   COALESCE(j.blocked, 0) AS blocked,
	   COALESCE(j.running, 0) AS running,
	   COALESCE(j.expired, 0) AS expired,
	   COALESCE(j.dead, 0) AS dead,
	   j.oldest_ready,
	   q.paused_at IS NOT NULL AS paused,
	   q.owner
  FROM (SELECT s.queue,
			   pg_catalog.count(*) FILTER (WHERE s.state OPERATOR(pg_catalog.=) 'waiting') AS ready,
			   pg_catalog.count(*) FILTER (WHERE s.state OPERATOR(pg_catalog.=) 'scheduled') AS scheduled,
			   pg_catalog.count(*) FILTER (WHERE s.state OPERATOR(pg_catalog.=) 'blocked') AS blocked,
			   pg_catalog.count(*) FILTER (WHERE s.state OPERATOR(pg_catalog.=) 'running') AS running,
			   pg_catalog.count(*) FILTER (WHERE s.state OPERATOR(pg_catalog.=) 'expired') AS expired,
			   pg_catalog.count(*) FILTER (WHERE s.state OPERATOR(pg_catalog.=) 'dead') AS dead,
			   pg_catalog.max(pg_catalog.idem_clock() OPERATOR(pg_catalog.-) s.run_at)
				   FILTER (WHERE s.state OPERATOR(pg_catalog.=) 'waiting') AS oldest_ready
		  FROM idem.job_status AS s
		 GROUP BY s.queue) AS j
  FULL JOIN idem.queues AS q ON q.queue OPERATOR(pg_catalog.=) j.queue;
COMMENT ON VIEW idem.queue_status IS 'number of jobs in each queue by state, for monitors: shows no keys';
COMMENT ON COLUMN idem.queue_status.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queue_status.ready IS 'jobs that wait for a worker';
COMMENT ON COLUMN idem.queue_status.scheduled IS 'jobs for later, retries included';
COMMENT ON COLUMN idem.queue_status.blocked IS 'jobs that wait for the end of another one: reruns';
COMMENT ON COLUMN idem.queue_status.running IS 'jobs that are leased';
COMMENT ON COLUMN idem.queue_status.expired IS 'jobs whose lease ran out: the next fetch gets them';
COMMENT ON COLUMN idem.queue_status.dead IS 'jobs that were given up and are still kept';
COMMENT ON COLUMN idem.queue_status.oldest_ready IS 'for how long the oldest of the ready ones has been due';
COMMENT ON COLUMN idem.queue_status.paused IS 'whether nothing is fetched';
COMMENT ON COLUMN idem.queue_status.owner IS 'role whose members may use the queue, or null';

/*
 * Statistics and health, for monitors: no keys, no payloads.  The numbers live in
 * the shared memory of a server that preloads the library.
 */
CREATE VIEW idem.stats AS
SELECT s.datid,
	   d.datname,
	   s.claims,
	   s.resumed,
	   s.busy,
	   s.held,
	   s.replays,
	   s.parked,
	   s.exhausted,
	   s.mismatches,
	   s.takeovers,
	   s.stale_tokens,
	   s.expired_keys,
	   s.abandoned_leases,
	   s.expired_job_keys,
	   s.expired_job_history,
	   s.stats_reset
  FROM pg_catalog.idem_stat_databases() AS s
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid;
COMMENT ON VIEW idem.stats IS 'what was counted in each database of the server since stats_reset';
COMMENT ON COLUMN idem.stats.datid IS 'the database';
COMMENT ON COLUMN idem.stats.datname IS 'its name';
COMMENT ON COLUMN idem.stats.claims IS 'claims and leases that got the key';
COMMENT ON COLUMN idem.stats.resumed IS 'leases that the same worker has asked for again';
COMMENT ON COLUMN idem.stats.busy IS 'claims that were told that somebody else is at it';
COMMENT ON COLUMN idem.stats.held IS 'claims of a key that the transaction had claimed before';
COMMENT ON COLUMN idem.stats.replays IS 'claims that got the stored result: duplicates';
COMMENT ON COLUMN idem.stats.parked IS 'claims that were told that an operator has to decide';
COMMENT ON COLUMN idem.stats.exhausted IS 'claims that were told that there were enough attempts';
COMMENT ON COLUMN idem.stats.mismatches IS 'claims that were refused because of another request (ID001)';
COMMENT ON COLUMN idem.stats.takeovers IS 'claims that took over from a lease that had run out';
COMMENT ON COLUMN idem.stats.stale_tokens IS 'calls with the token of a lease or a job that is somebody else''s by now (ID003)';
COMMENT ON COLUMN idem.stats.expired_keys IS 'keys that cleanup has removed';
COMMENT ON COLUMN idem.stats.abandoned_leases IS 'of these the leases that nobody had finished';
COMMENT ON COLUMN idem.stats.expired_job_keys IS 'keys of jobs that cleanup has removed';
COMMENT ON COLUMN idem.stats.expired_job_history IS 'jobs that cleanup has removed from the history';
COMMENT ON COLUMN idem.stats.stats_reset IS 'since when is counted';

CREATE VIEW idem.queue_stats AS
SELECT s.datid,
	   d.datname,
	   s.queue,
	   s.enqueued,
	   s.absorbed,
	   s.replaced,
	   s.postponed,
	   s.rerun,
	   s.done,
	   s.refused,
	   s.fetched,
	   s.completed,
	   s.failed,
	   s.dead,
	   s.snoozed,
	   s.cancelled,
	   s.retried,
	   s.stats_reset
  FROM pg_catalog.idem_stat_queues() AS s
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid;
COMMENT ON VIEW idem.queue_stats IS 'what was counted for each queue of the server since stats_reset';
COMMENT ON COLUMN idem.queue_stats.datid IS 'the database';
COMMENT ON COLUMN idem.queue_stats.datname IS 'its name';
COMMENT ON COLUMN idem.queue_stats.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queue_stats.enqueued IS 'jobs that were enqueued';
COMMENT ON COLUMN idem.queue_stats.absorbed IS 'duplicates that a job has absorbed';
COMMENT ON COLUMN idem.queue_stats.replaced IS 'duplicates that have replaced the payload of a job';
COMMENT ON COLUMN idem.queue_stats.postponed IS 'duplicates that have put off a job (debounce)';
COMMENT ON COLUMN idem.queue_stats.rerun IS 'duplicates that let a job run once more';
COMMENT ON COLUMN idem.queue_stats.done IS 'duplicates of jobs that were done already';
COMMENT ON COLUMN idem.queue_stats.refused IS 'duplicates that were refused (ID005)';
COMMENT ON COLUMN idem.queue_stats.fetched IS 'jobs that were fetched, again after each attempt';
COMMENT ON COLUMN idem.queue_stats.completed IS 'jobs that were completed';
COMMENT ON COLUMN idem.queue_stats.failed IS 'attempts that have failed';
COMMENT ON COLUMN idem.queue_stats.dead IS 'jobs that were given up';
COMMENT ON COLUMN idem.queue_stats.snoozed IS 'jobs that were given back until later';
COMMENT ON COLUMN idem.queue_stats.cancelled IS 'jobs that were cancelled';
COMMENT ON COLUMN idem.queue_stats.retried IS 'dead or cancelled jobs that were brought back';
COMMENT ON COLUMN idem.queue_stats.stats_reset IS 'since when is counted';

CREATE VIEW idem.cleanup_progress AS
SELECT c.datid,
	   d.datname,
	   c.phase,
	   c.removed,
	   c.rows_per_second,
	   c.backlog,
	   c.started_at,
	   c.last_finished_at,
	   c.last_error,
	   c.last_error_at
  FROM pg_catalog.idem_stat_cleanup() AS c
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) c.datid;
COMMENT ON VIEW idem.cleanup_progress IS 'what the background worker does and has done in each database that has the extension';
COMMENT ON COLUMN idem.cleanup_progress.datid IS 'the database';
COMMENT ON COLUMN idem.cleanup_progress.datname IS 'its name';
COMMENT ON COLUMN idem.cleanup_progress.phase IS 'keys, job keys, job history, jobs (those without attempts left): at work there; idle, off (idem.cleanup), failing, locked (somebody has locked a table), subscribed (a subscription writes tables, which are skipped), not installed (any more)';
COMMENT ON COLUMN idem.cleanup_progress.removed IS 'rows removed in this round, which ends when there is nothing left';
COMMENT ON COLUMN idem.cleanup_progress.rows_per_second IS 'how fast, without the pauses';
COMMENT ON COLUMN idem.cleanup_progress.backlog IS 'estimate of what is left, as of the end of the last run; null if it is not known';
COMMENT ON COLUMN idem.cleanup_progress.started_at IS 'when the round began';
COMMENT ON COLUMN idem.cleanup_progress.last_finished_at IS 'when a round last came to its end';
COMMENT ON COLUMN idem.cleanup_progress.last_error IS 'the last error; it is over if phase is not failing';
COMMENT ON COLUMN idem.cleanup_progress.last_error_at IS 'when that was';

CREATE VIEW idem.worker_status AS
SELECT w.preloaded,
	   w.state,
	   w.launcher_pid,
	   w.started_at,
	   w.runs,
	   w.last_run_at,
	   d.datname,
	   w.worker_pid,
	   w.used_slots,
	   w.no_slot_since,
	   w.memory_bytes,
	   w.library_version,
	   w.last_error,
	   w.last_error_at
  FROM pg_catalog.idem_stat_worker() AS w
  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) w.datid;
COMMENT ON VIEW idem.worker_status IS 'the background worker of the server, one row';
COMMENT ON COLUMN idem.worker_status.preloaded IS 'whether the library is in shared_preload_libraries; without that there is no worker';
COMMENT ON COLUMN idem.worker_status.state IS 'sleeping, working (in a database), waiting for a free slot, failing, stopped';
COMMENT ON COLUMN idem.worker_status.launcher_pid IS 'process that decides what is cleaned up when; null if there is none';
COMMENT ON COLUMN idem.worker_status.started_at IS 'when that was started';
COMMENT ON COLUMN idem.worker_status.runs IS 'visits to databases since then';
COMMENT ON COLUMN idem.worker_status.last_run_at IS 'when the last of them ended';
COMMENT ON COLUMN idem.worker_status.datname IS 'the database that is being visited';
COMMENT ON COLUMN idem.worker_status.worker_pid IS 'process that does so; null if there is none';
COMMENT ON COLUMN idem.worker_status.used_slots IS 'background workers of all kinds; there may be max_worker_processes';
COMMENT ON COLUMN idem.worker_status.no_slot_since IS 'since when no background worker slot is free; null if one is';
COMMENT ON COLUMN idem.worker_status.memory_bytes IS 'memory of the launcher';
COMMENT ON COLUMN idem.worker_status.library_version IS 'version of the library that this session has loaded';
COMMENT ON COLUMN idem.worker_status.last_error IS 'the last error of the launcher itself, not of a database; it is over if state is not failing';
COMMENT ON COLUMN idem.worker_status.last_error_at IS 'when that was';

/*
 * The executor looks up every C function of a query before it runs the query.
 * So idem.health asks for the version alone, and calls idem_checks(), which is
 * not inlined because it is volatile, only if library and objects agree.  A new
 * check belongs into idem.checks.
 */
CREATE FUNCTION pg_catalog.idem_version()
RETURNS text
LANGUAGE C STABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_version';
COMMENT ON FUNCTION pg_catalog.idem_version() IS
	'version of the library that this session uses';

CREATE VIEW idem.checks AS
WITH w AS (
	SELECT s.*,
		   pg_catalog.pg_is_in_recovery() AS standby,
		   pg_catalog.current_setting('max_worker_processes')::integer AS max_workers
	  FROM pg_catalog.idem_stat_worker() AS s),
c AS (
	SELECT s.*
	  FROM pg_catalog.idem_stat_cleanup() AS s
	  JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid
	 WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
	   AND NOT d.datistemplate),
t AS (
	SELECT pg_catalog.idem_clock() AS now,
		   GREATEST(10 OPERATOR(pg_catalog.*) COALESCE(pg_catalog.current_setting('idem.cleanup_naptime', true), '60s')::interval,
					interval '15 minutes') AS patience
	OFFSET 0),
r AS (
	SELECT k.oid,
		   pg_catalog.format('idem.%I', k.relname) AS name,
		   k.reloptions,
		   pg_catalog.pg_stat_get_live_tuples(k.oid) AS live,
		   /* after a crash the server counts from zero until the next VACUUM or ANALYZE; -1: it knows nothing */
		   GREATEST(pg_catalog.pg_stat_get_live_tuples(k.oid), k.reltuples::bigint) AS n,
		   k.reltuples OPERATOR(pg_catalog.>=) 0 AS is_known,
		   pg_catalog.pg_stat_get_dead_tuples(k.oid) AS dead
	  FROM pg_catalog.pg_class AS k
	 WHERE k.oid OPERATOR(pg_catalog.=) ANY (ARRAY['idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log']::regclass[])),
i AS (
	SELECT pg_catalog.format('idem.%I', k.relname) AS name,
		   pg_catalog.pg_relation_size(k.oid) AS size
	  FROM r
	  JOIN pg_catalog.pg_index AS x ON x.indrelid OPERATOR(pg_catalog.=) r.oid
	  JOIN pg_catalog.pg_class AS k ON k.oid OPERATOR(pg_catalog.=) x.indexrelid
	 CROSS JOIN LATERAL (
			SELECT COALESCE(pg_catalog.sum(s.stawidth), 0) AS width
			  FROM pg_catalog.pg_statistic AS s
			 WHERE s.starelid OPERATOR(pg_catalog.=) r.oid AND s.staattnum OPERATOR(pg_catalog.=) ANY (x.indkey) AND NOT s.stainherit) AS e
	 WHERE r.is_known
	   AND pg_catalog.pg_relation_size(k.oid) OPERATOR(pg_catalog.>) 33554432
	   AND pg_catalog.pg_relation_size(k.oid) OPERATOR(pg_catalog.>) ((r.n OPERATOR(pg_catalog.+) 1) OPERATOR(pg_catalog.*) GREATEST(500, 4 OPERATOR(pg_catalog.*) (e.width OPERATOR(pg_catalog.+) 32)))),
b AS (
	SELECT pg_catalog.count(*) AS expired
	  FROM (SELECT 1
			  FROM (SELECT FROM idem.keys AS k, t
					 WHERE k.expires_at OPERATOR(pg_catalog.<=) t.now
					   AND NOT (k.lease_until IS NOT NULL AND k.finished_at IS NULL AND k.park IS TRUE)
					 LIMIT 100001) AS e1
			UNION ALL
			SELECT 1 FROM (SELECT FROM idem.job_keys AS k, t WHERE k.expires_at OPERATOR(pg_catalog.<=) t.now LIMIT 100001) AS e2
			UNION ALL
			SELECT 1 FROM (SELECT FROM idem.job_log AS l, t WHERE l.expires_at OPERATOR(pg_catalog.<=) t.now LIMIT 100001) AS e3) AS e),
l AS (
	SELECT pg_catalog.count(*) FILTER (WHERE k.park IS NOT TRUE AND k.expires_at OPERATOR(pg_catalog.>) t.now) AS expired,
		   pg_catalog.min(k.lease_until) FILTER (WHERE k.park IS NOT TRUE AND k.expires_at OPERATOR(pg_catalog.>) t.now) AS oldest,
		   pg_catalog.count(*) FILTER (WHERE k.park) AS parked,
		   pg_catalog.min(k.lease_until) FILTER (WHERE k.park) AS oldest_parked
	  FROM idem.keys AS k, t
	 WHERE k.lease_until OPERATOR(pg_catalog.<=) t.now
	   AND k.finished_at IS NULL),
j AS (
	SELECT pg_catalog.count(*) AS dead,
		   pg_catalog.count(DISTINCT g.queue) AS queues
	  FROM idem.job_log AS g
	 WHERE g.state OPERATOR(pg_catalog.=) 'dead'),
f AS (
	SELECT pg_catalog.max(e.made_at) AS made_at
	  FROM (SELECT k.created_at AS made_at FROM (SELECT k.created_at FROM idem.keys AS k ORDER BY k.expires_at DESC LIMIT 100) AS k
			UNION ALL
			SELECT q.enqueued_at FROM (SELECT q.enqueued_at FROM idem.jobs AS q ORDER BY q.job_id DESC LIMIT 100) AS q) AS e),
n AS (
	SELECT m.highest,
		   s.last_value AS at,
		   COALESCE(m.highest OPERATOR(pg_catalog.>) s.last_value
					OR (m.highest OPERATOR(pg_catalog.=) s.last_value AND NOT s.is_called), false) AS behind
	  FROM idem.jobs_job_id_seq AS s
	 CROSS JOIN (SELECT GREATEST((SELECT pg_catalog.max(j.job_id) FROM idem.jobs AS j),
								 (SELECT pg_catalog.max(g.job_id) FROM idem.job_log AS g),
								 (SELECT pg_catalog.max(k.job_id)
									FROM (SELECT k.job_id FROM idem.job_keys AS k ORDER BY k.expires_at DESC LIMIT 100) AS k)) AS highest) AS m),
u AS (
	SELECT pg_catalog.string_agg(DISTINCT pg_catalog.quote_ident(s.subname), ', ') AS names,
		   pg_catalog.string_agg(DISTINCT pg_catalog.format('idem.%I', k.relname), ', ') AS tables,
		   pg_catalog.bool_or(s.subbinary) AS is_binary,
		   pg_catalog.min(pg_catalog.quote_ident(s.subname)) FILTER (WHERE s.subbinary) AS binary_name
	  FROM pg_catalog.pg_subscription_rel AS x
	  JOIN pg_catalog.pg_subscription AS s ON s.oid OPERATOR(pg_catalog.=) x.srsubid
	  JOIN pg_catalog.pg_class AS k ON k.oid OPERATOR(pg_catalog.=) x.srrelid
	 WHERE k.oid OPERATOR(pg_catalog.=) ANY (ARRAY['idem.keys', 'idem.jobs', 'idem.job_keys', 'idem.job_log', 'idem.queues']::regclass[]))
SELECT h."check",
	   h.status,
	   h.detail,
	   /* a standby cannot run what writes */
	   CASE WHEN NOT h.writes OR NOT pg_catalog.pg_is_in_recovery() THEN h.fix END AS fix
  FROM (
SELECT 1 AS ord, false AS writes, 'preload' AS "check",
	   CASE WHEN w.preloaded THEN 'ok' ELSE 'warn' END AS status,
	   CASE WHEN w.preloaded THEN 'the library is in shared_preload_libraries'
	   ELSE 'the library is not in shared_preload_libraries: no background worker, no statistics; a restart is needed after the fix' END AS detail,
	   CASE WHEN NOT w.preloaded
	   THEN COALESCE((SELECT 'ALTER SYSTEM SET shared_preload_libraries = ' OPERATOR(pg_catalog.||)
							 pg_catalog.string_agg(pg_catalog.quote_literal(x.name), ', ' ORDER BY x.ord) OPERATOR(pg_catalog.||) ';'
						FROM pg_catalog.pg_settings AS s
					   CROSS JOIN LATERAL ROWS FROM (pg_catalog.regexp_split_to_table(
							CASE WHEN s.setting OPERATOR(pg_catalog.=) '' THEN 'idem' ELSE s.setting OPERATOR(pg_catalog.||) ', idem' END, '\s*,\s*'))
							WITH ORDINALITY AS x (name, ord)
					   WHERE s.name OPERATOR(pg_catalog.=) 'shared_preload_libraries'),
					 'SHOW shared_preload_libraries;') END AS fix
  FROM w
UNION ALL
SELECT 2, false, 'role',
	   'ok',
	   CASE WHEN w.standby THEN 'standby: reads only, the background worker starts with the promotion' ELSE 'primary' END,
	   NULL
  FROM w
UNION ALL
SELECT 3, false, 'worker',
	   CASE WHEN s.trouble IS NOT NULL THEN 'fail' WHEN s.launcher_pid IS NOT NULL OR s.standby THEN 'ok' WHEN s.preloaded THEN 'fail' ELSE 'warn' END,
	   CASE WHEN s.trouble IS NOT NULL THEN s.trouble
	   WHEN s.launcher_pid IS NOT NULL THEN pg_catalog.format('process %s, %s, %s visits', s.launcher_pid, s.state, s.runs)
	   WHEN s.standby THEN 'none on a standby'
	   WHEN NOT s.preloaded THEN 'none without preload; clean up with pg_cron until then'
	   ELSE 'none is running: just being restarted, or max_worker_processes is too small for it (a restart is needed after the fix, of standbys first)' END,
	   CASE WHEN s.trouble IS NOT NULL
	   THEN pg_catalog.format('SELECT pid, wait_event_type, wait_event, pg_catalog.pg_blocking_pids(pid) FROM pg_catalog.pg_stat_activity WHERE pid OPERATOR(pg_catalog.=) %s;', s.launcher_pid)
	   WHEN s.launcher_pid IS NOT NULL OR s.standby THEN NULL
	   WHEN NOT s.preloaded THEN CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_extension AS e WHERE e.extname OPERATOR(pg_catalog.=) 'pg_cron')
			THEN 'SELECT cron.schedule(''idem-cleanup'', ''* * * * *'', ''SELECT pg_catalog.idem_cleanup(10000)'');'
			ELSE 'SELECT pg_catalog.idem_cleanup(10000);' END
	   ELSE pg_catalog.format('ALTER SYSTEM SET max_worker_processes = %s;', s.max_workers OPERATOR(pg_catalog.+) 8) END
  FROM (SELECT w.*,
			   CASE WHEN w.state OPERATOR(pg_catalog.=) 'failing'
			   THEN pg_catalog.format('process %s fails, last at %s: %s', w.launcher_pid, w.last_error_at, w.last_error)
			   WHEN w.overdue_seconds OPERATOR(pg_catalog.>) 60
			   THEN pg_catalog.format('process %s has not gone on for %s s: it is stuck or stopped', w.launcher_pid, pg_catalog.round(w.overdue_seconds)) END AS trouble
		  FROM w) AS s
UNION ALL
SELECT 4, false, 'worker slots',
	   CASE WHEN w.no_slot_since IS NOT NULL THEN 'fail' WHEN w.used_slots OPERATOR(pg_catalog.>=) w.max_workers THEN 'warn' ELSE 'ok' END,
	   CASE WHEN w.no_slot_since IS NOT NULL
	   THEN pg_catalog.format('none was free for cleanup since %s; a restart is needed after the fix, of standbys first', w.no_slot_since)
	   ELSE pg_catalog.format('%s of %s in use', w.used_slots, w.max_workers) END,
	   CASE WHEN w.no_slot_since IS NOT NULL OR w.used_slots OPERATOR(pg_catalog.>=) w.max_workers
	   THEN pg_catalog.format('ALTER SYSTEM SET max_worker_processes = %s;', w.max_workers OPERATOR(pg_catalog.+) 8) END
  FROM w
UNION ALL
SELECT 5, false, 'last cleanup',
	   CASE s.state WHEN 'standby' THEN 'ok' WHEN 'fine' THEN 'ok' WHEN 'failing' THEN 'fail' ELSE 'warn' END,
	   CASE s.state WHEN 'standby' THEN 'the primary cleans up'
	   WHEN 'not preloaded' THEN 'not known without preload'
	   WHEN 'left out' THEN 'not known: this database is a template, which is left out, or there is no room for its statistics'
	   WHEN 'off' THEN 'switched off in this database by idem.cleanup; the fix counts from the next visit on, or the next reload'
	   WHEN 'failing' THEN pg_catalog.format('failing, last at %s: %s', s.last_error_at, s.last_error)
	   WHEN 'not installed' THEN 'the worker has not seen yet that the extension was created again; it comes within idem.cleanup_naptime, or with the next reload'
	   ELSE CASE WHEN s.last_finished_at IS NULL THEN 'none has finished yet'
			ELSE pg_catalog.format('last finished at %s', s.last_finished_at) END
			OPERATOR(pg_catalog.||) CASE WHEN s.state OPERATOR(pg_catalog.=) 'locked' THEN '; somebody has locked a table' ELSE '' END END,
	   CASE s.state WHEN 'off' THEN pg_catalog.format('ALTER DATABASE %I SET idem.cleanup = on;', pg_catalog.current_database())
	   WHEN 'failing' THEN 'SELECT pg_catalog.idem_cleanup(1);'
	   WHEN 'not preloaded' THEN 'SELECT pg_catalog.idem_cleanup(10000);'
	   WHEN 'left out' THEN 'SELECT pg_catalog.idem_cleanup(10000);'
	   WHEN 'locked' THEN 'SELECT l.pid, l.mode, c.relname FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) l.database JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) l.relation JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace WHERE l.granted AND n.nspname OPERATOR(pg_catalog.=) ''idem'' AND d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database();'
	   WHEN 'not installed' THEN 'SELECT pg_catalog.pg_reload_conf();'
	   WHEN 'late' THEN 'SELECT pg_catalog.pg_reload_conf();' END
  FROM (SELECT c.*,
			   CASE WHEN w.standby THEN 'standby'
			   WHEN NOT w.preloaded THEN 'not preloaded'
			   WHEN c.datid IS NULL THEN 'left out'
			   WHEN c.phase OPERATOR(pg_catalog.=) ANY (ARRAY['off', 'failing', 'not installed']) THEN c.phase
			   WHEN COALESCE(c.last_finished_at, c.started_at, w.started_at) OPERATOR(pg_catalog.>) (pg_catalog.now() OPERATOR(pg_catalog.-) t.patience)
			   OR (c.started_at OPERATOR(pg_catalog.>) c.last_finished_at AND c.removed OPERATOR(pg_catalog.>) 0 AND c.phase OPERATOR(pg_catalog.<>) 'locked') THEN 'fine'
			   WHEN c.phase OPERATOR(pg_catalog.=) 'locked' THEN 'locked'
			   ELSE 'late' END AS state
		  FROM w CROSS JOIN t LEFT JOIN c ON true) AS s
UNION ALL
SELECT 6, true, 'backlog',
	   CASE WHEN b.expired OPERATOR(pg_catalog.>) 100000 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN b.expired OPERATOR(pg_catalog.>) 100000 THEN 'more than 100000' ELSE b.expired::text END OPERATOR(pg_catalog.||) ' rows have expired and are not removed yet',
	   CASE WHEN b.expired OPERATOR(pg_catalog.>) 100000 THEN 'DO $$ BEGIN WHILE pg_catalog.idem_cleanup(1000) OPERATOR(pg_catalog.>) 0 LOOP COMMIT; END LOOP; END $$;' END
  FROM b
UNION ALL
SELECT 7, true, 'table bloat',
	   CASE WHEN d.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE('more dead rows than live ones in ' OPERATOR(pg_catalog.||) d.names, 'no table has more dead rows than live ones'),
	   d.fix
  FROM (SELECT pg_catalog.string_agg(r.name, ', ' ORDER BY r.name) AS names,
			   'VACUUM ' OPERATOR(pg_catalog.||) pg_catalog.string_agg(r.name, ', ' ORDER BY r.name) OPERATOR(pg_catalog.||) ';' AS fix
		  FROM r
		 WHERE r.dead OPERATOR(pg_catalog.>) r.live AND r.dead OPERATOR(pg_catalog.>) 10000) AS d
UNION ALL
SELECT 8, true, 'index bloat',
	   CASE WHEN d.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE('much larger than its rows need: ' OPERATOR(pg_catalog.||) d.names, 'no index is much larger than its rows need'),
	   d.fix
  FROM (SELECT pg_catalog.string_agg(i.name, ', ' ORDER BY i.name) AS names,
			   'REINDEX INDEX CONCURRENTLY ' OPERATOR(pg_catalog.||) (pg_catalog.array_agg(i.name ORDER BY i.size DESC))[1] OPERATOR(pg_catalog.||) ';' AS fix
		  FROM i) AS d
UNION ALL
SELECT 9, false, 'expired leases',
	   CASE WHEN l.oldest OPERATOR(pg_catalog.<) (t.now OPERATOR(pg_catalog.-) interval '1 hour') THEN 'warn' ELSE 'ok' END,
	   CASE WHEN l.expired OPERATOR(pg_catalog.=) 0 THEN 'no lease has run out unfinished'
	   ELSE pg_catalog.format('%s leases have run out unfinished, the oldest %s ago', l.expired, pg_catalog.date_trunc('second', t.now OPERATOR(pg_catalog.-) l.oldest)) END,
	   CASE WHEN l.oldest OPERATOR(pg_catalog.<) (t.now OPERATOR(pg_catalog.-) interval '1 hour')
	   THEN 'SELECT * FROM idem.lease_status WHERE state OPERATOR(pg_catalog.=) ANY (ARRAY[''expired'', ''exhausted'']) ORDER BY time_left LIMIT 20;' END
  FROM l, t
UNION ALL
SELECT 10, false, 'parked keys',
	   CASE WHEN l.parked OPERATOR(pg_catalog.>) 0 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN l.parked OPERATOR(pg_catalog.=) 0 THEN 'no key waits for a decision'
	   ELSE pg_catalog.format('%s keys wait for a decision, the oldest for %s', l.parked, pg_catalog.date_trunc('second', t.now OPERATOR(pg_catalog.-) l.oldest_parked)) END,
	   CASE WHEN l.parked OPERATOR(pg_catalog.>) 0 THEN 'SELECT * FROM idem.lease_status WHERE state OPERATOR(pg_catalog.=) ''parked'' ORDER BY time_left LIMIT 20;' END
  FROM l, t
UNION ALL
SELECT 11, false, 'dead jobs',
	   CASE WHEN j.dead OPERATOR(pg_catalog.>) 0 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN j.dead OPERATOR(pg_catalog.=) 0 THEN 'no job was given up' ELSE pg_catalog.format('%s jobs in %s queues were given up and are still kept', j.dead, j.queues) END,
	   CASE WHEN j.dead OPERATOR(pg_catalog.>) 0
	   THEN 'SELECT job_id, queue, attempt, ended_at, last_error FROM idem.job_status WHERE state OPERATOR(pg_catalog.=) ''dead'' ORDER BY ended_at DESC LIMIT 20;' END
  FROM j
UNION ALL
SELECT 12, true, 'autovacuum',
	   CASE WHEN a.global OPERATOR(pg_catalog.=) 'off' OR a.names IS NOT NULL THEN 'fail' ELSE 'ok' END,
	   CASE WHEN a.global OPERATOR(pg_catalog.=) 'off' THEN 'autovacuum is off; reload after the fix' WHEN a.names IS NOT NULL THEN 'autovacuum is off for ' OPERATOR(pg_catalog.||) a.names ELSE 'on for all tables' END,
	   CASE WHEN a.global OPERATOR(pg_catalog.=) 'off' THEN 'ALTER SYSTEM SET autovacuum = on;' ELSE a.fix END
  FROM (SELECT pg_catalog.current_setting('autovacuum') AS global,
			   pg_catalog.string_agg(r.name, ', ' ORDER BY r.name) AS names,
			   pg_catalog.string_agg('ALTER TABLE ' OPERATOR(pg_catalog.||) r.name OPERATOR(pg_catalog.||) ' RESET (autovacuum_enabled);', ' ' ORDER BY r.name) AS fix
		  FROM r
		 WHERE EXISTS (SELECT FROM pg_catalog.pg_options_to_table(r.reloptions) AS o
						WHERE o.option_name OPERATOR(pg_catalog.=) 'autovacuum_enabled' AND NOT o.option_value::boolean)) AS a
UNION ALL
SELECT 13, false, 'clock',
	   CASE WHEN s.ahead IS NOT NULL THEN 'fail' WHEN s.recent THEN 'warn' ELSE 'ok' END,
	   CASE WHEN s.ahead IS NOT NULL
	   THEN pg_catalog.format('the clock has gone back: there are rows made %s from now; keys and leases last that much longer', s.ahead)
	   WHEN s.recent THEN pg_catalog.format('the clock went back by %s s at %s', pg_catalog.round(s.clock_back_seconds), s.clock_back_at)
	   ELSE 'has not gone back as far as is known' END,
	   CASE WHEN s.ahead IS NOT NULL OR s.recent
	   THEN 'SELECT pg_catalog.clock_timestamp(), pg_catalog.current_setting(''idem.clock_offset'', true) AS clock_offset;' END
  FROM (SELECT CASE WHEN f.made_at OPERATOR(pg_catalog.>) (t.now OPERATOR(pg_catalog.+) interval '1 second') THEN f.made_at OPERATOR(pg_catalog.-) t.now END AS ahead,
			   w.clock_back_at OPERATOR(pg_catalog.>) (pg_catalog.now() OPERATOR(pg_catalog.-) interval '1 day') AS recent,
			   w.clock_back_at,
			   w.clock_back_seconds
		  FROM w, f, t) AS s
UNION ALL
SELECT 14, false, 'statistics',
	   CASE WHEN w.stats_full IS TRUE THEN 'warn' ELSE 'ok' END,
	   CASE WHEN w.stats_full THEN 'more databases and queues than idem.stats_max: some are not counted; a restart is needed after the fix'
	   WHEN NOT w.preloaded THEN 'none without preload' ELSE 'all databases and queues are counted' END,
	   CASE WHEN w.stats_full THEN pg_catalog.format('ALTER SYSTEM SET idem.stats_max = %s;', LEAST(2 OPERATOR(pg_catalog.*) COALESCE(pg_catalog.current_setting('idem.stats_max', true), '1000')::integer, 100000)) END
  FROM w
UNION ALL
SELECT 15, false, 'functions',
	   CASE WHEN p.n OPERATOR(pg_catalog.>) 0 THEN 'warn' ELSE 'ok' END,
	   CASE WHEN p.n OPERATOR(pg_catalog.=) 0 THEN 'no function outside pg_catalog is named idem_*'
	   ELSE pg_catalog.format('%s functions outside pg_catalog are named idem_*: an unqualified call may reach them; the first is %s of role %s', p.n, p.first[1], p.first[2]) END,
	   CASE WHEN p.n OPERATOR(pg_catalog.>) 0
	   THEN 'SELECT p.oid::pg_catalog.regprocedure AS function, p.proowner::pg_catalog.regrole AS owner FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace WHERE p.proname OPERATOR(pg_catalog.~) ''^idem_'' AND n.nspname OPERATOR(pg_catalog.<>) ''pg_catalog'';' END
  FROM (SELECT pg_catalog.count(*) AS n,
			   pg_catalog.min(ARRAY[pg_catalog.format('%I.%I', n.nspname, p.proname), pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(p.proowner))]) AS first
		  FROM pg_catalog.pg_proc AS p
		  JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
		 WHERE p.proname OPERATOR(pg_catalog.~) '^idem_'
		   AND n.nspname OPERATOR(pg_catalog.<>) 'pg_catalog') AS p
UNION ALL
SELECT 16, true, 'job numbers',
	   CASE WHEN n.behind THEN CASE WHEN u.names IS NULL THEN 'fail' ELSE 'warn' END ELSE 'ok' END,
	   CASE WHEN n.behind
	   THEN pg_catalog.format('the sequence is at %s, and there is a job %s: new jobs get numbers that were given out before', n.at, n.highest)
	   ELSE 'the sequence is past all jobs' END,
	   CASE WHEN n.behind THEN pg_catalog.format('SELECT pg_catalog.setval(''idem.jobs_job_id_seq'', %s);', n.highest) END
  FROM n, u
UNION ALL
SELECT 17, true, 'subscription',
	   CASE WHEN u.is_binary THEN 'fail' WHEN u.names IS NOT NULL THEN 'warn' ELSE 'ok' END,
	   CASE WHEN u.names IS NULL THEN 'no subscription writes the tables'
	   WHEN u.is_binary THEN pg_catalog.format('subscription %s is binary: owners arrive as numbers, which are other roles here; copy the tables anew after the fix', u.binary_name)
	   ELSE pg_catalog.format('%s: written by subscription %s, so cleanup skips them, and functions that write them are refused; at the cutover: all roles of the publisher are here, it takes no more writes, all of them have arrived, then the fix, DROP SUBSCRIPTION, reload', u.tables, u.names) END,
	   CASE WHEN u.is_binary THEN pg_catalog.format('ALTER SUBSCRIPTION %s SET (binary = false);', u.binary_name)
	   WHEN u.names IS NOT NULL
	   THEN 'SELECT pg_catalog.setval(''idem.jobs_job_id_seq'', 1000000 OPERATOR(pg_catalog.+) GREATEST((SELECT last_value FROM idem.jobs_job_id_seq), (SELECT pg_catalog.max(job_id) FROM idem.jobs), (SELECT pg_catalog.max(job_id) FROM idem.job_log), (SELECT pg_catalog.max(job_id) FROM idem.job_keys)));' END
  FROM u
UNION ALL
SELECT 18, true, 'settings',
	   CASE WHEN g.names IS NULL THEN 'ok' ELSE 'warn' END,
	   COALESCE(g.names OPERATOR(pg_catalog.||) ': no effect on cleanup, which goes by idem.cleanup and idem.cleanup_batch_size of the database or the server, and by the real clock',
				'every stored setting of idem has an effect'),
	   g.fix
  FROM (SELECT pg_catalog.string_agg(pg_catalog.format('%s of %s', e.name, e.place), ', ' ORDER BY e.name, e.place) AS names,
			   pg_catalog.string_agg(pg_catalog.format('ALTER %s RESET %s;', e.place, e.name), ' ' ORDER BY e.name, e.place) AS fix
		  FROM (SELECT pg_catalog.lower(pg_catalog.split_part(x.setting, '=', 1)) AS name,
					   CASE WHEN s.setrole OPERATOR(pg_catalog.<>) 0::oid OR d.datname IS NULL
					   THEN 'ROLE ' OPERATOR(pg_catalog.||) CASE WHEN s.setrole OPERATOR(pg_catalog.=) 0::oid THEN 'ALL' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(s.setrole)) END
							OPERATOR(pg_catalog.||) COALESCE(' IN DATABASE ' OPERATOR(pg_catalog.||) pg_catalog.quote_ident(d.datname), '')
					   ELSE 'DATABASE ' OPERATOR(pg_catalog.||) pg_catalog.quote_ident(d.datname) END AS place,
					   s.setrole OPERATOR(pg_catalog.<>) 0::oid AS is_of_role
				  FROM pg_catalog.pg_db_role_setting AS s
				 CROSS JOIN LATERAL pg_catalog.unnest(s.setconfig) AS x (setting)
				  LEFT JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.setdatabase
				 WHERE s.setdatabase OPERATOR(pg_catalog.=) 0::oid OR d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()) AS e
		 WHERE e.name OPERATOR(pg_catalog.=) 'idem.clock_offset'
			OR (e.is_of_role AND e.name OPERATOR(pg_catalog.=) ANY (ARRAY['idem.cleanup', 'idem.cleanup_batch_size']))) AS g) AS h
 ORDER BY h.ord;
COMMENT ON VIEW idem.checks IS 'for idem.health: every check but that of the version';
COMMENT ON COLUMN idem.checks."check" IS 'what was looked at';
COMMENT ON COLUMN idem.checks.status IS 'ok, warn (have a look) or fail (something does not work)';
COMMENT ON COLUMN idem.checks.detail IS 'what was found';
COMMENT ON COLUMN idem.checks.fix IS 'a command to be run; null if there is nothing to be done';

CREATE FUNCTION pg_catalog.idem_checks(version text)
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE sql VOLATILE PARALLEL RESTRICTED ROWS 18
BEGIN ATOMIC
	SELECT c."check", c.status, c.detail, c.fix FROM idem.checks AS c;
END;
COMMENT ON FUNCTION pg_catalog.idem_checks(text) IS
	'for idem.health: reads idem.checks when it is called and not before; the argument makes the caller look at the version first';

CREATE VIEW idem.health AS
WITH v AS (
	SELECT pg_catalog.idem_version() AS library,
		   e.extversion AS objects
	  FROM pg_catalog.pg_extension AS e
	 WHERE e.extname OPERATOR(pg_catalog.=) 'idem')
SELECT 'version' AS "check",
	   CASE WHEN v.library OPERATOR(pg_catalog.=) v.objects THEN 'ok' ELSE 'fail' END AS status,
	   pg_catalog.format('library %s, SQL objects %s', v.library, v.objects)
	   OPERATOR(pg_catalog.||) CASE WHEN o.is_old THEN ': the server, or this session, still has the old library; no other check was made'
	   WHEN v.library OPERATOR(pg_catalog.=) v.objects THEN '' ELSE ': no other check was made' END AS detail,
	   CASE WHEN o.is_old THEN CASE WHEN p.is_preloaded THEN 'pg_ctl restart' ELSE '\connect' END
	   /* a standby cannot run what writes */
	   WHEN v.library OPERATOR(pg_catalog.<>) v.objects AND NOT pg_catalog.pg_is_in_recovery() THEN 'ALTER EXTENSION idem UPDATE;' END AS fix
  FROM v
 CROSS JOIN LATERAL (
		SELECT COALESCE(pg_catalog.string_to_array(v.library, '.')::integer[] OPERATOR(pg_catalog.<)
						CASE WHEN v.objects OPERATOR(pg_catalog.~) '^[0-9]+([.][0-9]+)*$' THEN pg_catalog.string_to_array(v.objects, '.')::integer[] END, false) AS is_old) AS o
 CROSS JOIN LATERAL (
		/* not every role sees the setting */
		SELECT pg_catalog.count(*) OPERATOR(pg_catalog.>) 0 AS is_preloaded
		  FROM pg_catalog.pg_settings AS g
		 WHERE g.name OPERATOR(pg_catalog.=) 'shared_preload_libraries'
		   AND g.setting OPERATOR(pg_catalog.~) '\midem\M') AS p
UNION ALL
SELECT c."check", c.status, c.detail, c.fix
  FROM v
 CROSS JOIN LATERAL pg_catalog.idem_checks(v.objects) AS c
 WHERE v.library OPERATOR(pg_catalog.=) v.objects;
COMMENT ON VIEW idem.health IS 'what idem_doctor() returns';
COMMENT ON COLUMN idem.health."check" IS 'what was looked at';
COMMENT ON COLUMN idem.health.status IS 'ok, warn (have a look) or fail (something does not work)';
COMMENT ON COLUMN idem.health.detail IS 'what was found';
COMMENT ON COLUMN idem.health.fix IS 'a command to be run; null if there is nothing to be done';

CREATE FUNCTION pg_catalog.idem_doctor()
RETURNS TABLE ("check" text, status text, detail text, fix text)
LANGUAGE sql VOLATILE PARALLEL RESTRICTED ROWS 19
BEGIN ATOMIC
	SELECT h."check", h.status, h.detail, h.fix FROM idem.health AS h;
END;
COMMENT ON FUNCTION pg_catalog.idem_doctor() IS
	'looks after the health of the extension: what was checked, how that is, and what to do';

/*
 * Nothing is open to anybody but its owner: neither what PUBLIC has by default
 * nor what ALTER DEFAULT PRIVILEGES has given stays.  Grants come after this;
 * idem_grant() hands out sets of privileges.
 */
CREATE FUNCTION pg_catalog.idem_close_members()
RETURNS void
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_close_members';
COMMENT ON FUNCTION pg_catalog.idem_close_members() IS
	'for the scripts of the extension: revoke what anybody but the owner has on members made in this transaction';
SELECT pg_catalog.idem_close_members();

/* Members of pg_monitor see numbers and health without idem_grant(). */
GRANT USAGE ON SCHEMA idem TO pg_monitor;
GRANT SELECT ON
	idem.key_summary,
	idem.queue_status,
	idem.stats,
	idem.queue_stats,
	idem.cleanup_progress,
	idem.worker_status,
	idem.checks,
	idem.health
TO pg_monitor;
GRANT EXECUTE ON FUNCTION
	pg_catalog.idem_stat_databases(),
	pg_catalog.idem_stat_queues(),
	pg_catalog.idem_stat_cleanup(),
	pg_catalog.idem_stat_worker(),
	pg_catalog.idem_version(),
	pg_catalog.idem_checks(text),
	pg_catalog.idem_doctor(),
	pg_catalog.idem_clock(),
	pg_catalog.idem_key_state(xid, timestamp with time zone, timestamp with time zone, timestamp with time zone, boolean, integer, integer)
TO pg_monitor;
