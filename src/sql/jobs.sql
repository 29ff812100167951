/* src/sql/jobs.sql: the tables of jobs and queues */

/*
 * idem.jobs holds live jobs only.  A job that ends is removed, and kept in
 * idem.job_log for as long as its queue says.  There is no state column: the state
 * follows from run_at, lease_until, after_job and row locks.  Columns that a fetch
 * does not change come first; the row of a job that was never fetched usually ends
 * with the payload.  Every job leaves dead entries at the head of an index, so
 * autovacuum starts early.  The low fillfactor leaves room for the new row versions
 * of a whole fetched batch on the same page.  VACUUM does not return empty pages at the
 * end of the table to the disk: it would lock out all sessions each time that the queues
 * drain, and the next jobs need the pages again.
 */
CREATE SEQUENCE idem.jobs_job_id_seq AS bigint;
COMMENT ON SEQUENCE idem.jobs_job_id_seq IS 'source of job_id';

-- set: none
CREATE TABLE idem.jobs (
	job_id bigint NOT NULL,
	run_at timestamp with time zone NOT NULL,
	enqueued_at timestamp with time zone NOT NULL,
	key_hash bigint,
	priority integer NOT NULL,
	queue text COLLATE "C" NOT NULL,
	key text COLLATE "C",
	payload jsonb,
	headers jsonb,
	ignores_key boolean,
	max_attempts integer,
	key_until timestamp with time zone,
	after_job bigint,
	attempt integer,
	token bigint,
	leased_at timestamp with time zone,
	lease_until timestamp with time zone,
	worker text COLLATE "C",
	links jsonb,
	errors jsonb,
	progress jsonb,
	CONSTRAINT jobs_pkey PRIMARY KEY (job_id)
) USING heap WITH (fillfactor = 40, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.02,
	vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE idem.jobs ALTER COLUMN queue SET STORAGE MAIN, ALTER COLUMN key SET STORAGE MAIN;
CREATE INDEX jobs_fetch_idx ON idem.jobs USING btree (queue, priority, run_at, job_id);
CREATE INDEX jobs_key_idx ON idem.jobs USING btree (key_hash) WHERE key_hash IS NOT NULL;

COMMENT ON TABLE idem.jobs IS 'jobs that have not ended; read and written by the idem_* functions only';
COMMENT ON COLUMN idem.jobs.job_id IS 'number of the job';
COMMENT ON COLUMN idem.jobs.run_at IS 'time from which the job may be fetched';
COMMENT ON COLUMN idem.jobs.enqueued_at IS 'when the job was enqueued';
COMMENT ON COLUMN idem.jobs.key_hash IS 'hash of queue and key; its complement if enqueues do not look for duplicates of this job; null: no key';
COMMENT ON COLUMN idem.jobs.priority IS 'lower numbers are fetched first';
COMMENT ON COLUMN idem.jobs.queue IS 'name of the queue, 1 to 255 bytes';
COMMENT ON COLUMN idem.jobs.key IS 'key by which duplicates are found, 1 to 1024 bytes; null: no key';
COMMENT ON COLUMN idem.jobs.payload IS 'data for the worker';
COMMENT ON COLUMN idem.jobs.headers IS 'what the enqueue passed beside the payload, such as a trace context';
COMMENT ON COLUMN idem.jobs.ignores_key IS 'true if the job has a key, but enqueues do not look for duplicates of it; otherwise null';
COMMENT ON COLUMN idem.jobs.max_attempts IS 'maximum number of fetches; null: the value of the queue';
COMMENT ON COLUMN idem.jobs.key_until IS 'with until_expired: time until which duplicates are absorbed; otherwise null';
COMMENT ON COLUMN idem.jobs.after_job IS 'for a follow-up job: the job that must end first; otherwise null';
COMMENT ON COLUMN idem.jobs.attempt IS 'number of fetches so far';
COMMENT ON COLUMN idem.jobs.token IS 'fencing token of the last fetch, or a new token that no worker has';
COMMENT ON COLUMN idem.jobs.leased_at IS 'when the lease was taken or last renewed; null if the job was fetched without a lease';
COMMENT ON COLUMN idem.jobs.lease_until IS 'when the lease of the worker expires; null if no worker holds a lease';
COMMENT ON COLUMN idem.jobs.worker IS 'name of the worker, as given to idem_fetch()';
COMMENT ON COLUMN idem.jobs.links IS 'the traceparent of each of the first duplicates that the job has absorbed';
COMMENT ON COLUMN idem.jobs.errors IS 'the last errors, oldest first: attempt, time and text of each';
COMMENT ON COLUMN idem.jobs.progress IS 'recovery point that idem_progress() stored';
COMMENT ON CONSTRAINT jobs_pkey ON idem.jobs IS 'finds a job by its number';
COMMENT ON INDEX idem.jobs_pkey IS 'finds a job by its number';
COMMENT ON INDEX idem.jobs_fetch_idx IS 'gives the order in which jobs are fetched';
COMMENT ON INDEX idem.jobs_key_idx IS 'finds the jobs of a key';

-- set: none
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

COMMENT ON TABLE idem.job_keys IS 'keys of until_expired jobs that are done; a key is kept until it expires';
COMMENT ON COLUMN idem.job_keys.key_hash IS 'hash of queue and key';
COMMENT ON COLUMN idem.job_keys.expires_at IS 'time from which the key counts as absent';
COMMENT ON COLUMN idem.job_keys.job_id IS 'number of the job that is done';
COMMENT ON COLUMN idem.job_keys.queue IS 'name of the queue';
COMMENT ON COLUMN idem.job_keys.key IS 'the key';
COMMENT ON COLUMN idem.job_keys.result IS 'result that idem_complete() stored';
COMMENT ON CONSTRAINT job_keys_pkey ON idem.job_keys IS 'finds a key by its hash';
COMMENT ON INDEX idem.job_keys_pkey IS 'finds a key by its hash';
COMMENT ON INDEX idem.job_keys_expires_at_idx IS 'lets cleanup find expired keys, oldest first';

-- set: none
CREATE TABLE idem.job_log (
	job_id bigint NOT NULL,
	ended_at timestamp with time zone NOT NULL,
	expires_at timestamp with time zone NOT NULL,
	enqueued_at timestamp with time zone NOT NULL,
	started_at timestamp with time zone,
	key_hash bigint,
	priority integer NOT NULL,
	attempt integer NOT NULL,
	max_attempts integer,
	key_until timestamp with time zone,
	took_key boolean,
	retryable boolean,
	state text COLLATE "C" NOT NULL,
	queue text COLLATE "C" NOT NULL,
	key text COLLATE "C",
	worker text COLLATE "C",
	payload jsonb,
	result jsonb,
	headers jsonb,
	links jsonb,
	errors jsonb,
	progress jsonb,
	CONSTRAINT job_log_pkey PRIMARY KEY (job_id)
) USING heap;
CREATE INDEX job_log_key_idx ON idem.job_log USING btree (key_hash, ended_at) WHERE key_hash IS NOT NULL;
CREATE INDEX job_log_retry_idx ON idem.job_log USING btree (retryable, queue, state, ended_at) WHERE retryable IS NOT NULL;
CREATE INDEX job_log_expires_at_idx ON idem.job_log USING btree (expires_at);

COMMENT ON TABLE idem.job_log IS 'history: jobs that have ended, kept for as long as their queue says';
COMMENT ON COLUMN idem.job_log.job_id IS 'number of the job';
COMMENT ON COLUMN idem.job_log.ended_at IS 'when the job ended';
COMMENT ON COLUMN idem.job_log.expires_at IS 'time until which the row is kept';
COMMENT ON COLUMN idem.job_log.enqueued_at IS 'when the job was enqueued';
COMMENT ON COLUMN idem.job_log.started_at IS 'when the attempt began that the end of the job has ended; null if no worker had the job';
COMMENT ON COLUMN idem.job_log.key_hash IS 'hash of queue and key; null: no key';
COMMENT ON COLUMN idem.job_log.priority IS 'priority of the job';
COMMENT ON COLUMN idem.job_log.attempt IS 'number of fetches so far';
COMMENT ON COLUMN idem.job_log.max_attempts IS 'maximum number of fetches; null: the value of the queue';
COMMENT ON COLUMN idem.job_log.key_until IS 'with until_expired: time until which duplicates are absorbed; otherwise null';
COMMENT ON COLUMN idem.job_log.took_key IS 'true if enqueues looked for duplicates of this job, otherwise null; only then idem_retry() gives the job its key back';
COMMENT ON COLUMN idem.job_log.retryable IS 'true if the job is dead or cancelled, otherwise null';
COMMENT ON COLUMN idem.job_log.state IS 'done, dead or cancelled';
COMMENT ON COLUMN idem.job_log.queue IS 'name of the queue';
COMMENT ON COLUMN idem.job_log.key IS 'the key; null: no key';
COMMENT ON COLUMN idem.job_log.worker IS 'name of the last worker, as given to idem_fetch()';
COMMENT ON COLUMN idem.job_log.payload IS 'data for the worker';
COMMENT ON COLUMN idem.job_log.result IS 'result that idem_complete() stored';
COMMENT ON COLUMN idem.job_log.headers IS 'what the enqueue passed beside the payload, such as a trace context';
COMMENT ON COLUMN idem.job_log.links IS 'the traceparent of each of the first duplicates that the job has absorbed';
COMMENT ON COLUMN idem.job_log.errors IS 'the last errors, oldest first: attempt, time and text of each';
COMMENT ON COLUMN idem.job_log.progress IS 'recovery point that idem_progress() stored';
COMMENT ON CONSTRAINT job_log_pkey ON idem.job_log IS 'finds a job by its number';
COMMENT ON INDEX idem.job_log_pkey IS 'finds a job by its number';
COMMENT ON INDEX idem.job_log_key_idx IS 'finds the jobs of a key, in the order in which they ended';
COMMENT ON INDEX idem.job_log_retry_idx IS 'finds the dead and cancelled jobs of a queue, in the order in which they ended';
COMMENT ON INDEX idem.job_log_expires_at_idx IS 'lets cleanup find expired rows, oldest first';

-- set: admin
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
	owned_at timestamp with time zone,
	CONSTRAINT queues_pkey PRIMARY KEY (queue)
) USING heap;

COMMENT ON TABLE idem.queues IS 'settings declared with idem_queue_set(); null: the default';
COMMENT ON COLUMN idem.queues.queue IS 'name of the queue';
COMMENT ON COLUMN idem.queues.owner IS 'role whose privileges are needed to use the queue; null: every role that may call the functions may use it';
COMMENT ON COLUMN idem.queues.paused_at IS 'when the queue was paused; null: it is not paused';
COMMENT ON COLUMN idem.queues.dedup IS 'until_executing, until_executed or until_expired';
COMMENT ON COLUMN idem.queues.on_duplicate IS 'skip, replace, debounce or error';
COMMENT ON COLUMN idem.queues.if_running IS 'skip or rerun';
COMMENT ON COLUMN idem.queues.key_ttl IS 'with until_expired: how long duplicates are absorbed';
COMMENT ON COLUMN idem.queues.include_scheduled IS 'whether jobs that are scheduled for later also take their key';
COMMENT ON COLUMN idem.queues.debounce_max IS 'with debounce: maximum delay of the job after the first enqueue';
COMMENT ON COLUMN idem.queues.lease IS 'how long a fetch leases jobs; zero: until its transaction ends';
COMMENT ON COLUMN idem.queues.max_attempts IS 'maximum number of fetches of a job';
COMMENT ON COLUMN idem.queues.backoff IS 'delay of the first retry; each further retry doubles it';
COMMENT ON COLUMN idem.queues.backoff_max IS 'maximum delay of a retry';
COMMENT ON COLUMN idem.queues.keep IS 'how long done jobs stay in idem.job_log';
COMMENT ON COLUMN idem.queues.keep_dead IS 'how long dead and cancelled jobs stay in idem.job_log';
COMMENT ON COLUMN idem.queues.owned_at IS 'when the queue got its owner; null: it has none';
COMMENT ON CONSTRAINT queues_pkey ON idem.queues IS 'one declaration per queue';
COMMENT ON INDEX idem.queues_pkey IS 'one declaration per queue';

SELECT pg_extension_config_dump('idem.jobs_job_id_seq', '');
SELECT pg_extension_config_dump('idem.jobs', '');
SELECT pg_extension_config_dump('idem.job_keys', '');
SELECT pg_extension_config_dump('idem.job_log', '');
SELECT pg_extension_config_dump('idem.queues', '');
