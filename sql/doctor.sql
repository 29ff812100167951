--
-- idem_doctor(): rule H1.  Each problem has a fix that can be pasted into psql, and
-- the fix helps.  The test causes most of the problems, runs the fix (:fix) and repeats
-- the check.  (test/t/180_stats.pl covers problems that need their own server.)
--
\a\pset footer off
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CALL anew();
SET DateStyle = ISO;
SET IntervalStyle = postgres;
-- the checks that are not ok, or one check by its name; process ids and times are masked
CREATE FUNCTION doctor(which text DEFAULT NULL, OUT "check" text, OUT status text, OUT detail text) RETURNS SETOF record LANGUAGE sql AS $$
	SELECT d."check", d.status,
		   regexp_replace(regexp_replace(d.detail, '\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.0-9]*\S*', '(time)', 'g'), '(\d+ days? )?\d+:\d\d:\d\d[.0-9]*', '(span)', 'g')
	  FROM idem_doctor() AS d
	 WHERE d."check" = which OR (which IS NULL AND d.status <> 'ok' AND d."check" <> 'last cleanup')
$$;
-- reload, and wait until the launcher has received it and starts a round
CREATE PROCEDURE reload() LANGUAGE plpgsql AS $$
DECLARE
	before bigint;
BEGIN
	CALL wait_for($w$ state = 'sleeping' FROM idem.worker_status $w$);
	SELECT runs INTO before FROM idem.worker_status;
	PERFORM pg_reload_conf();
	CALL wait_for(format('runs > %s FROM idem.worker_status', before));
END $$;

--
-- timeouts: a new server has none; the fix sets them for the database, whose new sessions
-- get them.  Those of another database do not count, those of a role do.
--
SELECT status, detail, replace(fix, quote_ident(current_database()), '(database)') AS fix FROM idem_doctor() WHERE "check" = 'timeouts' \gx
SELECT current_database() AS db \gset
CREATE ROLE idem_timeouts;
ALTER DATABASE template1 SET client_connection_check_interval = '10s';
ALTER ROLE idem_timeouts SET idle_in_transaction_session_timeout = '5min';
ALTER ROLE idem_timeouts SET client_connection_check_interval = 0;
SELECT detail ~ '^client_connection_check_interval: no limit' AS only_the_other FROM idem_doctor() WHERE "check" = 'timeouts';
ALTER DATABASE template1 RESET client_connection_check_interval;
DROP ROLE idem_timeouts;
SELECT fix FROM idem_doctor() WHERE "check" = 'timeouts' \gset
:fix
SELECT * FROM doctor('timeouts');

--
-- everything is ok except that cleanup is off (see test/temp.conf): one row per check, without a fix
--
SELECT pg_reload_conf();
CALL wait_for($$ phase = 'off' FROM idem.cleanup_progress WHERE datname = current_database() $$);
SELECT "check", status FROM idem_doctor();
SELECT count(*) AS fixes FROM idem_doctor() WHERE status = 'ok' AND fix IS NOT NULL;
SELECT count(*) AS without_detail FROM idem_doctor() WHERE detail IS NULL OR detail = '';
SELECT * FROM doctor('preload');
SELECT * FROM doctor('role');
SELECT status, detail ~ '^process \d+, (sleeping|working), \d+ visits$' AS described FROM idem_doctor() WHERE "check" = 'worker';
SELECT status, detail ~ '^\d+ of \d+ in use$' AS described FROM idem_doctor() WHERE "check" = 'worker slots';
-- it does not write
BEGIN READ ONLY;
SELECT count(*) FROM idem_doctor();
COMMIT;
SELECT * FROM doctor();

--
-- expired leases
--
BEGIN;
SET LOCAL idem.clock_offset = '-2 h';
SELECT status FROM idem_lease('a', '90 min');
COMMIT;
-- recently expired: it may be taken over at any time
SELECT * FROM doctor('expired leases');
BEGIN;
SET LOCAL idem.clock_offset = '-2 h';
SELECT status FROM idem_lease('b', '30 min');
SELECT status FROM idem_lease('c', '10 min', max_attempts => 1);
COMMIT;
SELECT status FROM idem_lease('live', '1 h');
SELECT * FROM doctor();
SELECT fix FROM idem_doctor() WHERE "check" = 'expired leases' \gset
\echo :fix
\o /dev/null
:fix
\o
\echo :ROW_COUNT rows
-- one worker was alive after all; the operator forgets the other key
SELECT idem_finish('b', '1', token) FROM idem.lease_status WHERE key = 'b';
SELECT * FROM doctor();
SELECT idem_forget('c');
SELECT * FROM doctor();
-- past its ttl, cleanup removes it
BEGIN;
SET LOCAL idem.clock_offset = '-30 h';
SELECT status FROM idem_lease('d', '1 min');
COMMIT;
SELECT * FROM doctor('expired leases');
SELECT * FROM doctor('backlog');
SELECT idem_cleanup();
SELECT * FROM doctor('backlog');
CALL anew();

--
-- parked keys
--
SELECT status FROM idem_lease('p', '1 us', on_expiry => 'park');
SELECT status FROM idem_lease('later', '1 h', on_expiry => 'park');
BEGIN;
SET LOCAL idem.clock_offset = '-1000 h';
SELECT status FROM idem_lease('q', '1 us', on_expiry => 'park');
COMMIT;
SELECT * FROM doctor();
SELECT fix FROM idem_doctor() WHERE "check" = 'parked keys' \gset
\echo :fix
\o /dev/null
:fix
\o
\echo :ROW_COUNT rows
SELECT idem_finish(key, '1', token) FROM idem.lease_status WHERE key = 'p';
SELECT idem_release(key, token) FROM idem.lease_status WHERE key = 'q';
SELECT * FROM doctor();
CALL anew();

--
-- backlog, expired leases and parked keys count the keys that idem.key_status shows in
-- these states, at any time
--
CREATE FUNCTION compare(clocks text[], OUT clock text, OUT "check" text, OUT doctor bigint, OUT view bigint) RETURNS SETOF record LANGUAGE plpgsql AS $$
BEGIN
	FOREACH clock IN ARRAY clocks LOOP
		PERFORM set_config('idem.clock_offset', clock, true);
		RETURN QUERY
			SELECT clock, d."check", coalesce(substring(d.detail FROM '^\d+'), '0')::bigint, v.keys
			  FROM idem_doctor() AS d
			  JOIN (SELECT x."check", count(s.key)
					  FROM (VALUES ('backlog'), ('expired leases'), ('parked keys')) AS x ("check")
					  LEFT JOIN idem.key_status AS s
						ON x."check" = CASE
						   WHEN s.status = 'parked' THEN 'parked keys'
						   WHEN s.status = 'expired' AND s.time_left <= '0' THEN 'backlog'
						   WHEN s.status IN ('expired', 'exhausted') THEN 'expired leases'
						   END
					 GROUP BY x."check") AS v ("check", keys) USING ("check")
			 ORDER BY 2;
	END LOOP;
END $$;
SELECT status FROM idem_claim('plain', ttl => '1 h');
SELECT idem_finish('finished', token => token) FROM idem_lease('finished', '30 min', ttl => '1 h');
SELECT idem_finish('finished, park', token => token) FROM idem_lease('finished, park', '30 min', ttl => '1 h', on_expiry => 'park');
SELECT status FROM idem_lease('live', '10 h');
SELECT status FROM idem_lease('expired', '30 min', ttl => '1 h');
SELECT status FROM idem_lease('expired, short ttl', '30 min', ttl => '1 s');
SELECT status FROM idem_lease('exhausted', '30 min', ttl => '1 h', max_attempts => 1);
SELECT status FROM idem_lease('parked', '30 min', ttl => '1 h', on_expiry => 'park');
SELECT status FROM idem_lease('parked, exhausted', '30 min', ttl => '1 s', on_expiry => 'park', max_attempts => 1);
SELECT idem_release('released', token) FROM idem_lease('released', '30 min', ttl => '1 h', on_expiry => 'park');
SELECT status FROM idem_lease('claimed after a lease', '1 us', ttl => '1 h');
SELECT status FROM idem_claim('claimed after a lease', ttl => '1 h');
SELECT *, doctor = view AS agree FROM compare('{0, 10 min, 45 min, 2 h, 30 h}');
DROP FUNCTION compare;
CALL anew();

--
-- dead jobs
--
SELECT count(*) FROM idem_enqueue_many('q', '{1,2}');
SELECT outcome FROM idem_enqueue('r');
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('q', 2);
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('r');
SELECT outcome FROM idem_enqueue('s');
SELECT idem_cancel(4);
SELECT * FROM doctor();
SELECT fix FROM idem_doctor() WHERE "check" = 'dead jobs' \gset
\echo :fix
\o /dev/null
:fix
\o
\echo :ROW_COUNT rows
SELECT idem_retry(job_id) FROM idem.job_status WHERE state = 'dead';
SELECT * FROM doctor();
CALL anew();

--
-- job numbers: the sequence is behind a live job, the history, a kept key
--
SELECT idem_queue_set('q', keep => '1 h');
SELECT job_id FROM idem_enqueue('q');
SELECT job_id FROM idem_enqueue('q', '1', 'k', 'until_expired', key_ttl => '1 h');
SELECT count(*) FROM idem_fetch('q', 2) AS f, LATERAL idem_complete(f.job_id, f.token);
SELECT job_id FROM idem_enqueue('q');
SELECT * FROM doctor('job numbers');
SELECT setval('idem.jobs_job_id_seq', 3, false);
SELECT * FROM doctor();
SELECT setval('idem.jobs_job_id_seq', 2);
SELECT * FROM doctor();
SELECT idem_cancel(3);
SELECT * FROM doctor();
SELECT fix FROM idem_doctor() WHERE "check" = 'job numbers' \gset
\echo :fix
:fix
SELECT * FROM doctor();
SELECT job_id FROM idem_enqueue('q');
TRUNCATE idem.jobs, idem.job_log;
SELECT setval('idem.jobs_job_id_seq', 1);
SELECT * FROM doctor();
CALL anew();

--
-- autovacuum: off for a table, off for the server
--
ALTER TABLE idem.keys SET (autovacuum_enabled = off);
ALTER TABLE idem.jobs SET (autovacuum_enabled = false, autovacuum_vacuum_threshold = 5000);
ALTER TABLE idem.job_log SET (autovacuum_enabled = on);
SELECT * FROM doctor();
SELECT fix FROM idem_doctor() WHERE "check" = 'autovacuum' \gset
\echo :fix
:fix
SELECT * FROM doctor();
SELECT reloptions FROM pg_class WHERE oid = 'idem.jobs'::regclass;
ALTER TABLE idem.jobs RESET (autovacuum_vacuum_threshold);
ALTER TABLE idem.job_log RESET (autovacuum_enabled);
ALTER SYSTEM SET autovacuum = off;
CALL reload();
SELECT * FROM doctor();
SELECT fix FROM idem_doctor() WHERE "check" = 'autovacuum' \gset
\echo :fix
:fix
CALL reload();
SELECT * FROM doctor();
ALTER SYSTEM RESET autovacuum;
CALL reload();

--
-- backlog, then table bloat, then index bloat: expired rows are removed, dead rows
-- are vacuumed, the index is rebuilt
--
ALTER TABLE idem.keys SET (autovacuum_enabled = off);
CREATE INDEX keys_key_idx ON idem.keys (key);
INSERT INTO idem.keys (created_at, expires_at, key_hash, owner, nth, key, scope)
SELECT now() - interval '2 h', now() - interval '1 h', i, current_user::regrole, 0, rpad(md5(i::text), 400, md5(i::text)), ''
  FROM generate_series(1, 100000) AS i;
SELECT * FROM doctor('backlog');
SELECT outcome FROM idem_enqueue('k', NULL, 'k', dedup => 'until_expired', key_ttl => '1 h');
SELECT idem_complete(job_id, token) FROM idem_fetch('k');
UPDATE idem.job_keys SET expires_at = now();
SELECT * FROM doctor('backlog');
SELECT fix FROM idem_doctor() WHERE "check" = 'backlog' \gset
\echo :fix
:fix
SELECT * FROM doctor('backlog');
SELECT pg_stat_force_next_flush();
CALL wait_for($$ pg_stat_get_dead_tuples('idem.keys'::regclass) >= 100000 $$);
SELECT * FROM doctor('table bloat');
SELECT fix FROM idem_doctor() WHERE "check" = 'table bloat' \gset
\echo :fix
:fix
SELECT * FROM doctor('table bloat');
SELECT * FROM doctor('index bloat');
SELECT fix FROM idem_doctor() WHERE "check" = 'index bloat' \gset
\echo :fix
:fix
SELECT * FROM doctor('index bloat');
DROP INDEX idem.keys_key_idx;
ALTER TABLE idem.keys RESET (autovacuum_enabled);
SELECT * FROM doctor();

--
-- the clock was set back: some rows have times in the future
--
BEGIN;
SET LOCAL idem.clock_offset = '2 h';
SELECT status FROM idem_claim('from the future');
COMMIT;
SELECT * FROM doctor();
SELECT fix FROM idem_doctor() WHERE "check" = 'clock' \gset
\echo :fix
\o /dev/null
:fix
\o
\echo :ROW_COUNT rows
SELECT idem_forget('from the future');
SELECT * FROM doctor();
-- or the clock of this session is behind
SELECT status FROM idem_claim('now');
SET idem.clock_offset = '-2 h';
SELECT * FROM doctor();
RESET idem.clock_offset;
SELECT * FROM doctor();
CALL anew();
BEGIN;
SET LOCAL idem.clock_offset = '2 h';
SELECT outcome FROM idem_enqueue('from the future');
COMMIT;
SELECT * FROM doctor();
SELECT idem_cancel(1);
SELECT * FROM doctor();
CALL anew();

--
-- library and SQL objects have different versions: the objects are older, or the
-- library is, and then an update would not help
--
BEGIN;
UPDATE pg_extension SET extversion = '0.0.1' WHERE extname = 'idem';
SELECT "check", status, detail ~ '^library \S+, SQL objects 0\.0\.1' AS described, fix FROM idem_doctor() WHERE "check" = 'version';
UPDATE pg_extension SET extversion = '99.0.0' WHERE extname = 'idem';
SELECT "check", status, detail ~ '^library \S+, SQL objects 99\.0\.0' AS described, fix FROM idem_doctor() WHERE "check" = 'version';
-- then no other function is called, because the library may lack it
UPDATE pg_proc SET prosrc = 'idem_of_another_version' WHERE proname IN ('idem_stat_worker', 'idem_stat_cleanup', 'idem_clock');
SELECT "check", status, regexp_replace(detail, '^library [^,]+', 'library (version)') AS detail, fix FROM idem_doctor();
SELECT "check", status FROM idem.health;
SAVEPOINT s;
SELECT count(*) FROM idem.worker_status;
ROLLBACK TO s;
-- a version that is not a number is also different
UPDATE pg_extension SET extversion = 'unpackaged' WHERE extname = 'idem';
SELECT "check", status, regexp_replace(detail, '^library [^,]+', 'library (version)') AS detail, fix FROM idem_doctor();
ROLLBACK;
SELECT * FROM doctor();

--
-- functions that an unqualified call may reach instead of idem's
--
CREATE FUNCTION public.idem_enqueue(queue text, payload text) RETURNS text LANGUAGE sql RETURN 'captured';
CREATE ROLE idem_stranger;
ALTER FUNCTION public.idem_enqueue(text, text) OWNER TO idem_stranger;
SELECT idem_enqueue('q', '1');
SELECT * FROM doctor('functions');
SELECT fix FROM idem_doctor() WHERE "check" = 'functions' \gset
\echo :fix
\o /dev/null
:fix
\o
\echo :ROW_COUNT rows
SELECT outcome FROM pg_catalog.idem_enqueue('q', '1');
DROP FUNCTION public.idem_enqueue;
DROP ROLE idem_stranger;
SELECT * FROM doctor('functions');
CALL anew();

--
-- settings of a role, which have no effect on cleanup; and the clock for tests
--
CREATE ROLE idem_settings;
SELECT current_database() AS db \gset
ALTER ROLE idem_settings SET idem.cleanup = off;
ALTER ROLE idem_settings IN DATABASE :"db" SET idem.cleanup_batch_size = 7;
ALTER DATABASE :"db" SET idem.clock_offset = 1000;
ALTER DATABASE :"db" SET idem.cleanup_batch_size = 500;
ALTER ROLE idem_settings SET idem.scope = 'a';
-- the doctor of the other database reports its settings
ALTER ROLE idem_settings IN DATABASE template1 SET idem.cleanup = off;
SELECT status, replace(detail, :'db', '(database)') AS detail, replace(fix, :'db', '(database)') AS fix FROM idem_doctor() WHERE "check" = 'settings';
SELECT fix FROM idem_doctor() WHERE "check" = 'settings' \gset
:fix
SELECT * FROM doctor('settings');
ALTER DATABASE :"db" RESET idem.cleanup_batch_size;
DROP ROLE idem_settings;

--
-- cleanup: off in this database, then on, then failing
--
SELECT "check", status, detail, replace(fix, current_database(), '(database)') AS fix FROM idem_doctor() WHERE "check" = 'last cleanup';
SELECT status FROM idem_claim('x', ttl => '1 us');
SELECT fix FROM idem_doctor() WHERE "check" = 'last cleanup' \gset
:fix
CALL reload();
CALL wait_for($$ phase = 'idle' AND last_finished_at > now() - interval '1 h' FROM idem.cleanup_progress WHERE datname = current_database() $$);
SELECT * FROM doctor('last cleanup');
SELECT count(*) FROM idem.keys;
CREATE TRIGGER stranger BEFORE DELETE ON idem.keys FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();
SELECT pg_reload_conf();
CALL wait_for($$ phase = 'failing' FROM idem.cleanup_progress WHERE datname = current_database() $$);
SELECT "check", status, detail ~ '^failing, last at \d{4}-\S+ \S+: .' AS described, fix FROM idem_doctor() WHERE "check" = 'last cleanup';
SELECT fix FROM idem_doctor() WHERE "check" = 'last cleanup' \gset
-- the fix shows the cause
\echo :fix
:fix
DROP TRIGGER stranger ON idem.keys;
SELECT pg_reload_conf();
CALL wait_for($$ phase = 'idle' FROM idem.cleanup_progress WHERE datname = current_database() $$);
SELECT * FROM doctor('last cleanup');
-- restore the settings
SELECT format('ALTER DATABASE %I RESET idem.cleanup', current_database()) \gexec
SELECT pg_reload_conf();
CALL wait_for($$ phase = 'off' FROM idem.cleanup_progress WHERE datname = current_database() $$);

ALTER DATABASE :"db" RESET client_connection_check_interval;
ALTER DATABASE :"db" RESET idle_in_transaction_session_timeout;
DROP PROCEDURE reload;
DROP FUNCTION doctor;
CALL anew();
