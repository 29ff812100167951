--
-- H3: idem_why, idem_holder, idem.workers.  Open transactions of other sessions: why.spec
--
-- a prepared transaction that is left behind must not stop the rest
\a\pset footer off
SET lock_timeout = '10 s';
CALL anew();
-- spans differ from run to run
CREATE FUNCTION why(id bigint, OUT reason text, OUT detail text, OUT known boolean, OUT is_me boolean, OUT fix text)
RETURNS SETOF record LANGUAGE sql AS $$
	SELECT w.reason, regexp_replace(w.detail, '\d+ s\M', 'N s', 'g'), w.since <= idem_clock(), w.pid = pg_backend_pid(), w.fix
	  FROM idem_why(id) AS w
$$;

-- gone
SELECT * FROM why(1);
SELECT * FROM why(-1);
SELECT * FROM fails('SELECT * FROM idem_why(NULL)');
-- a job that the same command has ended: in the history, or gone
SELECT job_id FROM idem_enqueue('why_cmd') \gset
SELECT idem_cancel(:job_id), (SELECT string_agg(reason, ' ') FROM idem_why(:job_id)) AS why;
SELECT job_id FROM idem_enqueue('why_cmd') \gset
SELECT token FROM idem_fetch('why_cmd', lease => '1 h') \gset
SELECT idem_complete(:job_id, :token), (SELECT string_agg(reason, ' ') FROM idem_why(:job_id)) AS why;
CALL anew();

-- ready; before any worker has asked, and after
SELECT job_id FROM idem_enqueue('why_q', '"secret"', 'k');
SELECT * FROM why(1);
BEGIN;
SELECT count(*) FROM idem_fetch('why_q');
ROLLBACK;
-- about when, to a tenth of a second
SELECT * FROM why(1);
SELECT since = run_at AS since_due FROM idem_why(1), idem_job(1);

-- paused, and the command that resumes the queue; H1: a name with quotes, and
-- with a character that would rearrange the command
SELECT idem_pause('why_q');
SELECT * FROM why(1);
SELECT since = paused_at AS since_paused FROM idem_why(1), idem.queues WHERE queue = 'why_q';
SELECT fix FROM idem_why(1) \gexec
SELECT * FROM why(1);
SELECT job_id FROM idem_enqueue(E'it''s \\ "q"\u202E');
SELECT idem_pause(E'it''s \\ "q"\u202E');
SELECT reason, fix FROM why(2);
SELECT fix FROM idem_why(2) \gexec
SELECT reason FROM why(2);

-- later; with it paused
SELECT job_id FROM idem_enqueue('why_q', delay => '1 h');
SELECT * FROM why(3);
SELECT idem_pause('why_q');
SELECT reason FROM why(3);
SELECT idem_resume('why_q');
-- then it is due, and job 1 comes first
SET idem.clock_offset = '2 h';
SELECT * FROM why(3);
-- a more urgent one that is due does, a leased or scheduled one does not
SELECT job_id FROM idem_enqueue('why_q', priority => -1);
SELECT job_id FROM idem_enqueue('why_q', priority => -1, delay => '1 h');
SELECT detail FROM why(3);
SELECT count(*) FROM idem_fetch('why_q', lease => '1 min', worker => 'w');
SELECT detail FROM why(3);
SELECT * FROM why(1);
RESET idem.clock_offset;

-- leased, expired, spent; the command makes a spent job dead
CALL anew();
SELECT job_id FROM idem_enqueue('why_q', max_attempts => 2);
SELECT job_id, token FROM idem_fetch('why_q', lease => '1 min', worker => 'w 1') \gset
SELECT * FROM why(1);
SELECT since = to_timestamp(:token / 1000000.0) AS since_fetched FROM idem_why(1);
SET idem.clock_offset = '2 min';
SELECT * FROM why(1);
SELECT since = lease_until AS since_expired FROM idem_why(1), idem_job(1) WHERE reason = 'expired';
SELECT token FROM idem_fetch('why_q', lease => '1 min') \gset
SELECT * FROM why(1);
SET idem.clock_offset = '4 min';
SELECT * FROM why(1);
SELECT fix FROM idem_why(1) \gexec
-- dead; the command retries it
SELECT * FROM why(1);
SELECT fix FROM idem_why(1) \gexec
SELECT * FROM why(1);
-- a fetch without a lease that was committed, as in autocommit; the same for the last attempt
SELECT job_id FROM idem_enqueue('why_auto', max_attempts => 2);
SELECT count(*) FROM idem_fetch('why_auto');
SELECT * FROM why(2);
SELECT count(*) FROM idem_fetch('why_auto', worker => 'w 1');
SELECT * FROM why(2);
SELECT idem_cancel(2);
-- an expired lease that is not the first: both
SELECT job_id FROM idem_enqueue('why_q', priority => -1);
SELECT token FROM idem_fetch('why_q', 2, lease => '1 min', worker => 'w 2') WHERE job_id = 1 \gset
SET idem.clock_offset = '6 min';
SELECT reason, detail FROM why(1);
RESET idem.clock_offset;

-- retry, with the error; a long one is cut
CALL anew();
SELECT job_id FROM idem_enqueue('why_q', '"secret"', 'secret');
SELECT token FROM idem_fetch('why_q', lease => '1 min') \gset
SELECT idem_fail(1, :token, 'connection refused', retry_in => '1 h');
SELECT * FROM why(1);
SELECT since > enqueued_at AS since_failed FROM idem_why(1), idem_job(1);
SET idem.clock_offset = '2 h';
SELECT reason FROM why(1);
SELECT token FROM idem_fetch('why_q', lease => '1 min') \gset
SELECT idem_fail(1, :token, repeat('ä', 4000), retry_in => '1 h');
SELECT length(detail) < 300 AS cut FROM why(1);
RESET idem.clock_offset;

-- blocked, by the job that the command explains
CALL anew();
SELECT job_id FROM idem_enqueue('chain', '1', 'k', 'until_executed');
SELECT job_id, token FROM idem_fetch('chain', lease => '1 h', worker => 'w') \gset
SELECT job_id, outcome FROM idem_enqueue('chain', '2', 'k', 'until_executed', if_running => 'rerun');
SELECT * FROM why(2);
SELECT rtrim(fix, ';') AS fix FROM idem_why(2) \gset
SELECT reason FROM (:fix) AS w;
SELECT idem_complete(1, :token);
SELECT reason FROM why(2);

-- done, cancelled; the command lets a cancelled job run again
SELECT idem_queue_set('kept', keep => '1 h');
SELECT job_id FROM idem_enqueue('kept', '"secret"');
SELECT job_id, token FROM idem_fetch('kept', lease => '1 h') \gset
SELECT idem_complete(:job_id, :token, '"secret"');
SELECT * FROM why(:job_id);
SELECT since = ended_at AS since_ended FROM idem_why(:job_id), idem_job(:job_id);
SELECT job_id FROM idem_enqueue('kept') \gset
SELECT idem_cancel(:job_id);
SELECT * FROM why(:job_id);
SELECT fix FROM idem_why(:job_id) \gexec
SELECT reason FROM why(:job_id);

-- held by this transaction: it has enqueued, absorbed a duplicate, fetched, ended the job
CALL anew();
BEGIN;
SELECT job_id FROM idem_enqueue('why_q', key => 'k');
SELECT * FROM why(1);
SELECT outcome FROM idem_enqueue('why_q', '1', 'k', on_duplicate => 'replace');
SELECT reason, detail FROM why(1);
SAVEPOINT s;
SELECT job_id, outcome FROM idem_enqueue('why_q', key => 'k');
SELECT reason, detail FROM why(1);
SELECT fix FROM idem_why(1) LIMIT 1 \gexec
SELECT reason FROM why(1);
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_enqueue('why_q', key => 'k');
SELECT reason, detail, is_me FROM why(1);
ROLLBACK TO s;
SELECT reason FROM why(1);
SELECT job_id, token FROM idem_fetch('why_q') \gset
SELECT reason, detail, is_me, fix FROM why(1);
SELECT idem_complete(:job_id, :token);
SELECT reason FROM why(1);
COMMIT;

-- held by a prepared transaction: it has enqueued / absorbed / fetched / ended / retried it.  The command
-- ends it; where that would undo what the job needs, it commits.
BEGIN;
SELECT job_id FROM idem_enqueue('why_q', key => 'k');
PREPARE TRANSACTION 'it''s prepared';
SELECT reason, detail, known, is_me, fix FROM why(2);
SELECT since = prepared AS since_prepared FROM idem_why(2), pg_prepared_xacts;
SELECT fix FROM idem_why(2) \gexec
SELECT reason FROM why(2);
SELECT idem_cancel(2);
SELECT job_id FROM idem_enqueue('why_q', key => 'k');
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_enqueue('why_q', key => 'k');
PREPARE TRANSACTION 'one';
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_enqueue('why_q', key => 'k');
RELEASE s;
PREPARE TRANSACTION 'two';
SELECT reason, detail, fix FROM why(3) ORDER BY detail;
ROLLBACK PREPARED 'one';
SELECT reason, detail FROM why(3);
SELECT fix FROM idem_why(3) \gexec
SELECT reason FROM why(3);
BEGIN;
SAVEPOINT s;
SELECT job_id FROM idem_fetch('why_q');
PREPARE TRANSACTION 'fetched';
SELECT reason, detail FROM why(3);
SELECT fix FROM idem_why(3) \gexec
BEGIN;
SELECT idem_cancel(3);
PREPARE TRANSACTION 'ended';
SELECT reason, detail FROM why(3);
COMMIT PREPARED 'ended';
SELECT reason FROM why(3);
BEGIN;
SELECT idem_retry(3);
PREPARE TRANSACTION 'retried';
SELECT reason, detail, fix FROM why(3);
ROLLBACK PREPARED 'retried';
SELECT reason FROM why(3);
BEGIN;
SELECT idem_retry(3);
SELECT reason, detail, fix FROM why(3);
ROLLBACK;

-- locks on the table, here of this transaction: every fetch of others waits
BEGIN;
SELECT job_id AS locked FROM idem_enqueue('why_lock') \gset
COMMIT;
BEGIN;
LOCK TABLE idem.jobs IN ROW EXCLUSIVE MODE;
SELECT reason FROM why(:locked);
LOCK TABLE idem.jobs IN SHARE MODE;
SELECT reason, detail, is_me, fix FROM why(:locked);
ROLLBACK;
BEGIN;
LOCK TABLE idem.jobs IN SHARE MODE;
PREPARE TRANSACTION 'locked';
SELECT reason, detail, fix FROM why(:locked);
ROLLBACK PREPARED 'locked';
SELECT idem_cancel(:locked);

-- given back: a failed attempt waits for its retry; a snooze or a reschedule came after the old error
BEGIN;
SELECT job_id AS given_back FROM idem_enqueue('why_back', max_attempts => 5) \gset
SELECT idem_fail(job_id, token, 'old error', retry_in => '0') FROM idem_fetch('why_back', lease => '1 h');
SELECT idem_snooze(job_id, token, '1 h') IS NOT NULL AS snoozed FROM idem_fetch('why_back', lease => '1 h');
SELECT reason, detail FROM why(:given_back) WHERE reason <> 'held';
SELECT idem_reschedule_many(ARRAY[:given_back], run_at => idem_clock());
SELECT idem_fail(job_id, token, 'new error', retry_in => '1 h') FROM idem_fetch('why_back', lease => '1 h');
SELECT reason, detail FROM why(:given_back) WHERE reason <> 'held';
SELECT idem_reschedule_many(ARRAY[:given_back], run_at => idem_clock() + '2 h');
SELECT reason, detail FROM why(:given_back) WHERE reason <> 'held';
SELECT idem_reschedule_many(ARRAY[:given_back], run_at => idem_clock());
SELECT idem_fail(job_id, token, NULL, retry_in => '1 h') FROM idem_fetch('why_back', lease => '1 h');
SELECT reason, detail FROM why(:given_back) WHERE reason <> 'held';
ROLLBACK;

-- held by this transaction, which has written the job: a duplicate brings a payload, a link (J16), a more
-- urgent priority (J8); a worker renews the lease, gives the job back
SELECT job_id FROM idem_enqueue('why_own', key => 'k') \gset
BEGIN;
SELECT outcome FROM idem_enqueue('why_own', '1', 'k', on_duplicate => 'replace');
SELECT reason, detail FROM why(:job_id);
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_enqueue('why_own', key => 'k', headers => '{"traceparent": "t"}');
SELECT reason, detail FROM why(:job_id);
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_enqueue('why_own', key => 'k', priority => -1);
SELECT reason, detail FROM why(:job_id);
ROLLBACK;
SELECT token FROM idem_fetch('why_own', lease => '1 h', worker => 'w') \gset
BEGIN;
SELECT status FROM idem_heartbeat(ARRAY[:job_id], ARRAY[:token], '2 h');
SELECT reason, detail FROM why(:job_id);
ROLLBACK;
BEGIN;
SELECT idem_snooze(:job_id, :token, '1 h') IS NOT NULL AS snoozed;
SELECT reason, detail FROM why(:job_id);
COMMIT;
SELECT reason, detail FROM why(:job_id);
SELECT idem_cancel(:job_id);

-- a duplicate that has written the job is absorbed, too: its link (J16), its payload; in a subtransaction; beside another
SELECT job_id FROM idem_enqueue('why_link', key => 'k') \gset
BEGIN;
SELECT outcome FROM idem_enqueue('why_link', key => 'k');
PREPARE TRANSACTION 'plain';
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_enqueue('why_link', key => 'k', headers => '{"traceparent": "t"}');
PREPARE TRANSACTION 'link';
SELECT reason, detail FROM why(:job_id) ORDER BY detail;
ROLLBACK PREPARED 'link';
ROLLBACK PREPARED 'plain';
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_enqueue('why_link', '1', 'k', on_duplicate => 'replace');
PREPARE TRANSACTION 'payload';
SELECT reason, detail FROM why(:job_id);
ROLLBACK PREPARED 'payload';
-- fetched and given back; a user has locked the row
BEGIN;
SELECT job_id, token FROM idem_fetch('why_link') \gset
SELECT idem_fail(:job_id, :token, 'oh', '1 h');
PREPARE TRANSACTION 'given back';
SELECT reason, detail FROM why(:job_id);
ROLLBACK PREPARED 'given back';
BEGIN;
SELECT FROM idem.jobs WHERE job_id = :job_id FOR UPDATE;
PREPARE TRANSACTION 'locked';
SELECT reason, detail FROM why(:job_id);
ROLLBACK PREPARED 'locked';
SELECT reason FROM why(:job_id);

-- many jobs: the count reads a limited number of entries
CALL anew();
SELECT count(*) FROM idem_enqueue_many('why_many', array_fill('1'::jsonb, ARRAY[10001]), delay => '1 h', priority => -1::smallint);
SELECT job_id FROM idem_enqueue('why_many') \gset
SELECT reason, detail FROM why(:job_id);
SET idem.clock_offset = '2 h';
SELECT reason, detail FROM why(:job_id);
SELECT count(*) FROM idem_fetch('why_many', 10000, lease => '1 h');
SELECT count(*) FROM idem_fetch('why_many', 1, lease => '1 h');
SELECT reason FROM why(:job_id);
RESET idem.clock_offset;

-- another shard (M2); a number without a slot is not there
CALL anew();
SELECT idem_shard_set('{[0,512)}', number => 7);
SELECT reason, detail, known, fix FROM why(1024 * 1024 + 511);
SELECT reason, detail, known, fix FROM why(1024 * 1024 + 512);
SELECT * FROM fails(format('SELECT * FROM idem_holder(%L)', (SELECT k FROM generate_series(1, 100) AS i, concat('why:', i) AS k WHERE idem_slot(k) >= 512 LIMIT 1)));
CALL anew();

-- who holds a key: none; an error for bad arguments
SELECT * FROM idem_holder('why:1');
SELECT * FROM fails('SELECT * FROM idem_holder(NULL)');
SELECT * FROM fails('SELECT * FROM idem_holder('''')');
SELECT * FROM fails('SELECT * FROM idem_holder(repeat(''k'', 1025))');
SELECT * FROM fails('SELECT * FROM idem_holder(''k'', repeat(''s'', 256))');
-- this transaction
BEGIN;
SELECT claimed FROM idem_claim('why:1');
SELECT kind, pid = pg_backend_pid() AS is_me, application_name, since = now() AS since_begin, worker, lease_until, detail, fix FROM idem_holder('why:1');
SELECT count(*) FROM idem_holder('why:1', 'another scope');
SELECT idem_finish('why:1');
SELECT kind, detail FROM idem_holder('why:1');
SELECT fix FROM idem_holder('why:1') \gexec
SELECT * FROM idem_holder('why:1');
-- a prepared one
BEGIN;
SELECT claimed FROM idem_claim('why:2');
PREPARE TRANSACTION 'claimed';
SELECT status FROM idem_claim('why:2', wait => '0');
SELECT kind, pid, application_name, since = prepared AS since_prepared, detail, fix FROM idem_holder('why:2'), pg_prepared_xacts;
SELECT fix FROM idem_holder('why:2') \gexec
SELECT * FROM idem_holder('why:2');
SELECT status FROM idem_claim('why:2', wait => '0');
-- a lease; the command lets the next claimer have the key
SELECT token FROM idem_lease('it''s why:3', '1 h', worker => 'w 1', scope => 's') \gset
SELECT kind, pid, since = leased_at AS since_leased, h.worker, h.lease_until = k.lease_until AS until, detail, replace(fix, :'token', 'TOKEN') AS fix
  FROM idem_holder('it''s why:3', 's') AS h, idem.keys AS k WHERE k.key = 'it''s why:3';
-- run the command without showing the token
DO $$ DECLARE f text; BEGIN SELECT fix INTO f FROM idem_holder('it''s why:3', 's'); EXECUTE f; END $$;
SELECT * FROM idem_holder('it''s why:3', 's');
SELECT claimed FROM idem_claim('it''s why:3', wait => '0', scope => 's');
-- a fence, of a transaction that is prepared
SELECT token FROM idem_lease('why:4', '1 h') \gset
BEGIN;
SELECT idem_fence('why:4', :token);
SELECT kind, pid = pg_backend_pid() AS is_me, detail FROM idem_holder('why:4') ORDER BY kind;
PREPARE TRANSACTION 'fenced';
SELECT kind, worker, detail FROM idem_holder('why:4') ORDER BY kind;
SELECT fix FROM idem_holder('why:4') WHERE kind = 'fence' \gexec
SELECT kind FROM idem_holder('why:4');
-- a lease that is being finished, or taken over by a claim
BEGIN;
SELECT idem_finish('why:4', '1', :token);
PREPARE TRANSACTION 'finished';
SELECT kind, detail FROM idem_holder('why:4') ORDER BY kind;
ROLLBACK PREPARED 'finished';
SET idem.clock_offset = '2 h';
SELECT kind FROM idem_holder('why:4');
BEGIN;
SELECT status FROM idem_claim('why:4');
PREPARE TRANSACTION 'taken over';
SELECT kind, detail FROM idem_holder('why:4');
ROLLBACK PREPARED 'taken over';
BEGIN;
SELECT idem_forget('why:4');
PREPARE TRANSACTION 'forgotten';
SELECT kind, detail FROM idem_holder('why:4');
COMMIT PREPARED 'forgotten';
-- in a subtransaction: taken, renewed, finished, fenced; by this transaction, too
SELECT token FROM idem_lease('why:sub', '4 h') \gset
BEGIN;
SAVEPOINT s;
SELECT idem_renew('why:sub', :token, '5 h') IS NOT NULL AS renewed;
SELECT kind, detail FROM idem_holder('why:sub') ORDER BY kind;
PREPARE TRANSACTION 'renewed';
SELECT kind, detail FROM idem_holder('why:sub') ORDER BY kind;
ROLLBACK PREPARED 'renewed';
BEGIN;
SAVEPOINT s;
SELECT idem_fence('why:sub', :token);
PREPARE TRANSACTION 'fenced';
SELECT kind, detail FROM idem_holder('why:sub') ORDER BY kind, detail;
ROLLBACK PREPARED 'fenced';
BEGIN;
SAVEPOINT s;
SELECT idem_finish('why:sub', '1', :token);
SELECT kind, detail FROM idem_holder('why:sub') ORDER BY kind;
PREPARE TRANSACTION 'finished';
SELECT kind, detail FROM idem_holder('why:sub') ORDER BY kind;
COMMIT PREPARED 'finished';
SELECT kind, detail FROM idem_holder('why:sub') ORDER BY kind;
-- parked and exhausted: the commands make the key free
SELECT status FROM idem_lease('why:5', '1 s', on_expiry => 'park');
SELECT status FROM idem_lease('why:6', '1 s', max_attempts => 1);
SET idem.clock_offset = '3 h';
SELECT status FROM idem_claim('why:5');
SELECT kind, detail FROM idem_holder('why:5');
DO $$ DECLARE f text; BEGIN SELECT fix INTO f FROM idem_holder('why:5'); EXECUTE f; END $$;
SELECT * FROM idem_holder('why:5');
SELECT status FROM idem_claim('why:6');
SELECT kind, detail, fix FROM idem_holder('why:6');
SELECT fix FROM idem_holder('why:6') \gexec
SELECT * FROM idem_holder('why:6');
SELECT status FROM idem_claim('why:6');
RESET idem.clock_offset;
CALL anew();

-- workers
SELECT count(*) FROM idem_enqueue_many('why_q', array_fill('1'::jsonb, ARRAY[6]));
SELECT count(*) FROM idem_fetch('why_q', 2, lease => '1 min', worker => 'w 1');
SELECT count(*) FROM idem_fetch('why_q', 1, lease => '1 h', worker => 'w 1');
SELECT count(*) FROM idem_fetch('why_q', 2, lease => '1 h');
SELECT worker, queue, running, expired, oldest BETWEEN last_fetch AND '1 min' AS oldest, last_fetch >= '0' AS last_fetch, next_expiry <= '1 h' AS next_expiry
  FROM idem.workers ORDER BY worker;
SET idem.clock_offset = '2 min';
SELECT worker, running, expired, next_expiry < '0' AS is_late FROM idem.workers ORDER BY worker;
RESET idem.clock_offset;
-- one row per worker and queue, also if the statistics of the table know of no leased job
CALL anew();
SELECT count(*) FROM idem_enqueue_many('why_q', array_fill('1'::jsonb, ARRAY[1000]));
ANALYZE idem.jobs;
SELECT count(*) FROM idem_fetch('why_q', 10, lease => '2 h', worker => 'w 1');
SET idem.clock_offset = '1 h';
SELECT count(*) FROM idem_fetch('why_q', 10, lease => '2 h', worker => 'w 1');
SELECT worker, queue, running, oldest > '59 min' AS oldest, last_fetch < '1 min' AS last_fetch, next_expiry < '61 min' AS next_expiry FROM idem.workers;
RESET idem.clock_offset;

-- privileges: the owner of the queue or the key, and the set admin.  pid, application_name and since
-- of another role's session only with pg_read_all_stats.
CREATE ROLE why_owner;
CREATE ROLE why_other;
CREATE ROLE why_admin;
CREATE ROLE why_monitor;
SELECT idem_grant('why_owner', 'app'), idem_grant('why_other', 'app'), idem_grant('why_admin', 'admin'), idem_grant('why_monitor', 'monitor');
CALL anew();
SELECT idem_queue_set('owned', owner => 'why_owner', keep => '1 h');
SELECT job_id FROM idem_enqueue('owned', '"secret"', 'secret') \gset
SET ROLE why_owner;
SELECT status FROM idem_claim('why:7');
SELECT reason FROM idem_why(:job_id);
SELECT * FROM idem_holder('why:7');
SET ROLE why_other;
\set VERBOSITY sqlstate
SELECT reason FROM idem_why(:job_id);
SELECT * FROM idem_holder('why:7');
SELECT * FROM idem.workers;
SET ROLE why_monitor;
SELECT reason FROM idem_why(:job_id);
SELECT * FROM idem_holder('why:7');
SELECT count(*) FROM idem.workers;
SET ROLE why_admin;
SELECT reason FROM idem_why(:job_id);
SELECT * FROM idem_holder('why:7');
SELECT count(*) FROM idem.workers;
-- the session belongs to a superuser: the owner does not see it
RESET ROLE;
BEGIN;
SELECT outcome FROM idem_enqueue('owned', '"secret"', 'secret');
SET LOCAL ROLE why_owner;
SELECT reason, pid = pg_backend_pid() AS is_me FROM idem_why(:job_id);
ROLLBACK;
-- an open row of another role
SET ROLE why_owner;
BEGIN;
SELECT job_id FROM idem_enqueue('owned') \gset
SELECT status FROM idem_claim('why:8');
RESET ROLE;
PREPARE TRANSACTION 'owned';
SET ROLE why_other;
SELECT reason FROM idem_why(:job_id);
SELECT * FROM idem_holder('why:8');
SET ROLE why_admin;
SELECT reason, detail FROM idem_why(:job_id);
SELECT kind, detail FROM idem_holder('why:8');
RESET ROLE;
COMMIT PREPARED 'owned';
-- a live lease: the admin cannot release it, but forget it
SET ROLE why_owner;
SELECT status FROM idem_lease('why:9', '1 h');
SET ROLE why_admin;
SELECT kind, fix FROM idem_holder('why:9');
SELECT fix FROM idem_holder('why:9') \gexec
SELECT * FROM idem_holder('why:9');
RESET ROLE;
-- the history
SELECT job_id, token FROM idem_fetch('owned', lease => '1 h') \gset
SELECT idem_complete(:job_id, :token);
SET ROLE why_other;
SELECT reason FROM idem_why(:job_id);
SET ROLE why_admin;
SELECT reason FROM idem_why(:job_id);
RESET ROLE;
-- a server where not every role may list prepared transactions: there is a holder
BEGIN;
SET LOCAL ROLE why_owner;
SELECT status FROM idem_claim('why:revoked');
PREPARE TRANSACTION 'revoked';
REVOKE EXECUTE ON FUNCTION pg_prepared_xact() FROM PUBLIC;
SET ROLE why_owner;
SELECT kind, detail, since, fix FROM idem_holder('why:revoked');
RESET ROLE;
GRANT EXECUTE ON FUNCTION pg_prepared_xact() TO PUBLIC;
ROLLBACK PREPARED 'revoked';
-- roles that were dropped
SET ROLE why_owner;
SELECT status FROM idem_lease('why:10', '1 h', worker => 'w');
BEGIN;
SELECT status FROM idem_claim('why:11');
RESET ROLE;
PREPARE TRANSACTION 'dropped';
SELECT job_id FROM idem_enqueue('owned') \gset
SELECT idem_revoke('why_owner', 'app'), idem_revoke('why_other', 'app'), idem_revoke('why_monitor', 'monitor');
DROP ROLE why_owner, why_other, why_monitor;
SET ROLE why_admin;
SELECT reason FROM idem_why(:job_id);
SELECT kind FROM idem_holder('why:10');
SELECT kind, detail FROM idem_holder('why:11');
RESET ROLE;
ROLLBACK PREPARED 'dropped';
SELECT idem_revoke('why_admin', 'admin');
DROP ROLE why_admin;
\set VERBOSITY default

-- an application that has no privileges on the other session still sees that there is a holder: why.spec

-- reading only, under SERIALIZABLE; what is new is seen under an old snapshot, too
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY;
SELECT reason FROM idem_why(:job_id);
SELECT kind FROM idem_holder('why:10');
COMMIT;
CALL anew();
DROP FUNCTION why;
