/* src/sql/why.sql: why a job does not run, who holds a key, which workers have jobs */

CREATE TYPE idem.why_result AS (
	reason text,
	detail text,
	since timestamp with time zone,
	pid integer,
	fix text);
COMMENT ON TYPE idem.why_result IS 'a reason why a job does not run, as idem_why() shows it';
COMMENT ON COLUMN idem.why_result.reason IS 'subscribed, paused, later, retry, leased, expired, spent, blocked, held, behind, ready, done, dead, cancelled, gone or other_shard';
COMMENT ON COLUMN idem.why_result.detail IS 'the reason in words';
COMMENT ON COLUMN idem.why_result.since IS 'since when; null: not known, or not shown to this role';
COMMENT ON COLUMN idem.why_result.pid IS 'process in the way; null: none, or not shown to this role';
COMMENT ON COLUMN idem.why_result.fix IS 'command that removes the reason; null: there is none';

-- set: app
CREATE FUNCTION pg_catalog.idem_why(
	job_id bigint)
RETURNS SETOF idem.why_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 2
AS 'MODULE_PATHNAME', 'idem_why';
COMMENT ON FUNCTION pg_catalog.idem_why IS
	'why the job does not run: one row for each reason, with the processes in the way, and a command where one helps';

CREATE TYPE idem.holder_result AS (
	kind text,
	pid integer,
	application_name text,
	since timestamp with time zone,
	worker text,
	lease_until timestamp with time zone,
	detail text,
	fix text);
COMMENT ON TYPE idem.holder_result IS 'who holds a key, as idem_holder() shows it';
COMMENT ON COLUMN idem.holder_result.kind IS 'claim: an open transaction that has claimed the key or changes its row; lease; fence: an open transaction that has locked the key';
COMMENT ON COLUMN idem.holder_result.pid IS 'process that runs the transaction; null: a lease, a prepared transaction, or not shown to this role';
COMMENT ON COLUMN idem.holder_result.application_name IS 'name that the session of the process has set; null as pid, or none';
COMMENT ON COLUMN idem.holder_result.since IS 'when the transaction began, or was prepared; of a lease: when it was taken or last renewed';
COMMENT ON COLUMN idem.holder_result.worker IS 'of a lease: name of the worker, as given to idem_lease()';
COMMENT ON COLUMN idem.holder_result.lease_until IS 'of a lease: when it expires or has expired';
COMMENT ON COLUMN idem.holder_result.detail IS 'what the holder does, in words';
COMMENT ON COLUMN idem.holder_result.fix IS 'command that lets the key go; null: there is none';

-- set: app
CREATE FUNCTION pg_catalog.idem_holder(
	key text,
	scope text DEFAULT NULL)
RETURNS SETOF idem.holder_result
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_holder';
COMMENT ON FUNCTION pg_catalog.idem_holder IS
	'who holds the key: open transactions and leases; no row if the next claim gets the key, or its stored result';

/*
 * H3: the view reads the table as its owner, for monitors, too, and shows no keys.  A fetch
 * without a lease is not there: its transaction is open.
 */
-- set: monitor
CREATE VIEW idem.workers AS
SELECT j.worker,
	   j.queue,
	   count(*) FILTER (WHERE j.lease_until > c.now) AS running,
	   count(*) FILTER (WHERE j.lease_until <= c.now) AS expired,
	   /* the token of a fetch is its time, in microseconds */
	   max(c.now - to_timestamp(j.token / 1000000.0)) AS oldest,
	   min(c.now - to_timestamp(j.token / 1000000.0)) AS last_fetch,
	   min(j.lease_until - c.now) AS next_expiry
  FROM idem.jobs AS j
 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS c
 WHERE j.lease_until IS NOT NULL
 GROUP BY j.worker, j.queue;
COMMENT ON VIEW idem.workers IS 'workers that have leased jobs, by queue; for monitors: shows no keys';
COMMENT ON COLUMN idem.workers.worker IS 'name of the worker, as given to idem_fetch(); null: all that gave none';
COMMENT ON COLUMN idem.workers.queue IS 'name of the queue';
COMMENT ON COLUMN idem.workers.running IS 'jobs that it has leased';
COMMENT ON COLUMN idem.workers.expired IS 'jobs whose lease has expired, and that no other worker has fetched yet';
COMMENT ON COLUMN idem.workers.oldest IS 'time since the oldest of these jobs was fetched';
COMMENT ON COLUMN idem.workers.last_fetch IS 'time since the newest of these jobs was fetched';
COMMENT ON COLUMN idem.workers.next_expiry IS 'time until the first of the leases expires; negative once it has expired';
