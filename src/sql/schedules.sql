/* src/sql/schedules.sql: the table of schedules, and its view */

/*
 * A tick updates next_tick, which is indexed, so each tick leaves dead entries in both
 * indexes.  Autovacuum starts early for that reason.
 */
-- set: admin
CREATE TABLE idem.schedules (
	name text COLLATE "C" NOT NULL,
	queue text COLLATE "C" NOT NULL,
	owner regrole NOT NULL,
	cron text COLLATE "C",
	every interval,
	time_zone text COLLATE "C" NOT NULL,
	missed text COLLATE "C" NOT NULL,
	priority integer NOT NULL,
	missed_ticks bigint NOT NULL,
	next_tick timestamp with time zone,
	last_tick timestamp with time zone,
	last_job bigint,
	starts_at timestamp with time zone,
	ends_at timestamp with time zone,
	paused_at timestamp with time zone,
	payload jsonb,
	CONSTRAINT schedules_pkey PRIMARY KEY (name)
) USING heap WITH (autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX schedules_next_tick_idx ON idem.schedules USING btree (next_tick) WHERE next_tick IS NOT NULL;

COMMENT ON TABLE idem.schedules IS 'schedules declared with idem_schedule(); each tick enqueues one job';
COMMENT ON COLUMN idem.schedules.name IS 'name of the schedule, 1 to 255 bytes';
COMMENT ON COLUMN idem.schedules.queue IS 'queue of its jobs';
COMMENT ON COLUMN idem.schedules.owner IS 'role that has declared the schedule last; a tick fails if this role may not enqueue into the queue';
COMMENT ON COLUMN idem.schedules.cron IS 'cron expression; null: an interval says when the schedule ticks';
COMMENT ON COLUMN idem.schedules.every IS 'interval from tick to tick; null: a cron expression says when the schedule ticks';
COMMENT ON COLUMN idem.schedules.time_zone IS 'time zone of the cron expression';
COMMENT ON COLUMN idem.schedules.missed IS 'skip, once or all: which of the ticks that were missed get a job';
COMMENT ON COLUMN idem.schedules.priority IS 'priority of its jobs; lower numbers are fetched first';
COMMENT ON COLUMN idem.schedules.missed_ticks IS 'number of ticks that got no job, because they were missed';
COMMENT ON COLUMN idem.schedules.next_tick IS 'next tick; null: the schedule is paused or has ended';
COMMENT ON COLUMN idem.schedules.last_tick IS 'last tick that got a job';
COMMENT ON COLUMN idem.schedules.last_job IS 'number of the job of the last tick';
COMMENT ON COLUMN idem.schedules.starts_at IS 'no tick before this time; for an interval the time of the first tick';
COMMENT ON COLUMN idem.schedules.ends_at IS 'no tick after this time';
COMMENT ON COLUMN idem.schedules.paused_at IS 'when the schedule was paused; null: it is not paused';
COMMENT ON COLUMN idem.schedules.payload IS 'payload of its jobs';
COMMENT ON CONSTRAINT schedules_pkey ON idem.schedules IS 'finds a schedule by its name';
COMMENT ON INDEX idem.schedules_pkey IS 'finds a schedule by its name';
COMMENT ON INDEX idem.schedules_next_tick_idx IS 'gives the order of the next ticks';

SELECT pg_extension_config_dump('idem.schedules', '');

/*
 * For monitors: shows no payload.  A tick is late after one minute.  T9: "refused" repeats the
 * rule of idem_queuestore_may_enqueue(); sql/schedule_owner.sql compares them.
 */
-- set: monitor
CREATE VIEW idem.schedule_status AS
SELECT s.name,
	   s.queue,
	   s.owner,
	   COALESCE(s.cron, 'every ' || s.every::text) AS timing,
	   s.time_zone,
	   s.missed,
	   CASE
	   WHEN s.paused_at IS NOT NULL THEN 'paused'
	   WHEN s.next_tick IS NULL THEN 'ended'
	   WHEN NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = s.owner::oid)
			OR NOT has_function_privilege(s.owner, 'pg_catalog.idem_enqueue'::regproc, 'EXECUTE')
			OR NOT pg_has_role(s.owner, q.owner, 'USAGE') THEN 'refused'
	   WHEN s.next_tick < c.now - interval '1 minute' THEN 'late'
	   ELSE 'active'
	   END AS state,
	   s.next_tick,
	   s.last_tick,
	   s.last_job,
	   s.missed_ticks
  FROM idem.schedules AS s
  LEFT JOIN idem.queues AS q ON q.queue = s.queue
 CROSS JOIN (SELECT idem_clock() AS now OFFSET 0) AS c;
COMMENT ON VIEW idem.schedule_status IS 'schedules, with their next and last ticks; for monitors: shows no payloads';
COMMENT ON COLUMN idem.schedule_status.name IS 'name of the schedule';
COMMENT ON COLUMN idem.schedule_status.queue IS 'queue of its jobs';
COMMENT ON COLUMN idem.schedule_status.owner IS 'role that has declared the schedule last; a number: the role was dropped';
COMMENT ON COLUMN idem.schedule_status.timing IS 'cron expression, or the interval';
COMMENT ON COLUMN idem.schedule_status.time_zone IS 'time zone of the cron expression';
COMMENT ON COLUMN idem.schedule_status.missed IS 'skip, once or all: which of the ticks that were missed get a job';
COMMENT ON COLUMN idem.schedule_status.state IS 'active, late (the next tick was due more than a minute ago), refused (its ticks fail: the owner was dropped, may not execute idem_enqueue, or may not use the queue), paused, ended (there is no further tick)';
COMMENT ON COLUMN idem.schedule_status.next_tick IS 'next tick; null: the schedule is paused or has ended';
COMMENT ON COLUMN idem.schedule_status.last_tick IS 'last tick that got a job';
COMMENT ON COLUMN idem.schedule_status.last_job IS 'number of the job of the last tick';
COMMENT ON COLUMN idem.schedule_status.missed_ticks IS 'number of ticks that got no job, because they were missed';
