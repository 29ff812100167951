--
-- Shards: slots that move from one database to another (M8)
--
\a\pset footer off
CALL anew();

-- the slot of a key as ranges, and all other slots
CREATE FUNCTION slot_of(key text) RETURNS int4multirange LANGUAGE sql AS $$
	SELECT int4multirange(int4range(idem_slot(key), idem_slot(key) + 1)) $$;

-- the id of another database
CREATE FUNCTION db(name text) RETURNS uuid LANGUAGE sql AS $$ SELECT md5(name)::uuid $$;

-- arguments; without a map nothing can be given or taken
SELECT (f.f).* FROM (SELECT fails(format('SELECT idem_shard_%s', a)) AS f
	FROM unnest(ARRAY[$$give(NULL, db('o'))$$, $$give('{[0,1025)}', db('o'))$$, $$give('{[5,)}', db('o'))$$, $$give('{[0,5)}', NULL)$$,
					  $$give('{[0,5)}', db('o'))$$,
					  $$take(NULL, 0)$$, $$take('{[0,1025)}', 0)$$, $$take('{[0,5)}', NULL)$$, $$take('{[0,5)}', -1)$$,
					  $$take('{[0,5)}', 9007199254740991)$$, $$take('{[0,5)}', 0)$$]) AS a) AS f;
SELECT count(*) FROM idem.shard;
SELECT idem_shard_set('{[0,512)}', number => 3);
SELECT state, message, detail FROM fails($$ SELECT idem_shard_give('{[500,600)}', db('o')) $$);
SELECT slots, given FROM idem.shard;

-- give: the rows stay, no function finds them; by, number and jobs_from stay
CALL anew();
SELECT idem_shard_set('{[0,1024)}', number => 3);
SELECT status FROM idem_claim('k');
SELECT job_id AS job FROM idem_enqueue('q', key => 'k') \gset
SELECT token AS lease FROM idem_lease('k', '1 min', scope => 'none') \gset
SELECT idem_shard_give(slot_of('k'), db('o')) = :job / 1024 AS last_value;
SELECT slots = '{[0,1024)}' - slot_of('k') AS slots, given = slot_of('k') AS given, number, by FROM idem.shard;
SELECT state FROM fails($$ SELECT idem_claim('k') $$);
SELECT state FROM fails(format('SELECT idem_cancel(%s)', :job));
SELECT count(*) FROM idem.keys WHERE key = 'k' AND scope = '';
-- again, with a slot that the map has; nothing more to give is no error either
SELECT idem_shard_give(slot_of('k') + slot_of('other'), db('o')) = :job / 1024 AS last_value;
SELECT idem_shard_give('{}', db('o')) = :job / 1024 AS last_value;
SELECT given = slot_of('k') + slot_of('other') AS given FROM idem.shard;
-- for one database at a time: another one would take what the first one may have taken
SELECT * FROM fails($$ SELECT idem_shard_give('{[0,1)}', db('other')) $$);
SELECT state FROM fails($$ SELECT idem_shard_give('{}', db('other')) $$);
-- the doctor shows slots that were given
SELECT status, detail = format('1022 of 1024 slots, by key, shard 3; a move is not complete, run idem_move again: given up, with rows: %s', given) AS detail
  FROM idem_doctor(), idem.shard WHERE "check" = 'shard map';
SELECT status FROM idem_doctor() WHERE "check" = 'foreign rows';
-- not taken back by accident: the other database may have taken them
SELECT * FROM fails($$ SELECT idem_shard_take(slot_of('k'), 0) $$);
SELECT state, message FROM fails($$ SELECT idem_shard_take(slot_of('k'), 0, db('other')) $$);
SELECT regexp_replace(detail, '\d+', 'N') AS detail, state, message, hint FROM fails($$ SELECT idem_shard_set('{[0,1024)}') $$);
SELECT state FROM fails($$ SELECT idem_shard_set(slot_of('k')) $$);
SELECT state, message FROM fails($$ SELECT idem_shard_set(NULL) $$);
SELECT state, message FROM fails($$ SELECT idem_shard_set(slots, by => 'scope') FROM idem.shard $$);
SELECT state FROM fails($$ SELECT idem_claim('k') $$);
-- a change of other slots is none of them
SELECT idem_shard_set(slots, number => 5) FROM idem.shard;
SELECT given = slot_of('k') + slot_of('other') AS given, receiver = db('o') AS receiver, number FROM idem.shard;
-- taken back: everything is found again, by the number, too
SELECT idem_shard_take(slot_of('k') + slot_of('other'), 0, db('o'));
SELECT slots, given, receiver FROM idem.shard;
SELECT idem_shard_take(slot_of('k') + slot_of('other'), 0);
SELECT status FROM idem_claim('k');
SELECT idem_cancel(:job);
-- with force, idem_shard_set() takes a slot back that was given; others stay given
SELECT idem_shard_give('{[0,10)}', db('other')) IS NOT NULL;
SELECT idem_shard_give('{[0,10)}', db('other')) IS NOT NULL;
SELECT state FROM fails($$ SELECT idem_shard_give('{[0,10)}', db('others')) $$);
SELECT state FROM fails($$ SELECT idem_shard_set('{[5,1024)}', number => 3) $$);
SELECT idem_shard_set('{[5,1024)}', number => 3, force => true);
SELECT slots, given, receiver = db('other') AS receiver FROM idem.shard;
SELECT idem_shard_take('{[0,5)}', 0, db('other'));
SELECT slots, given, receiver FROM idem.shard;
SELECT idem_shard_give('{[0,10)}', db('third')) IS NOT NULL;
SELECT idem_shard_set(NULL, force => true);
SELECT slots, given, receiver FROM idem.shard;

-- a job with a key from before the map: its slot is not known, so no slot can be given
CALL anew();
SELECT job_id FROM idem_enqueue('q', key => 'k', dedup => 'until_expired', key_ttl => '1 day');
SELECT job_id FROM idem_enqueue('q');
SELECT idem_shard_set('{[0,1024)}');
SELECT * FROM fails($$ SELECT idem_shard_give('{[0,1)}', db('o')) $$);
SELECT idem_complete(job_id, token) FROM idem_fetch('q', lease => '1 min');
SELECT * FROM fails($$ SELECT idem_shard_give('{[0,1)}', db('o')) $$);
SET idem.clock_offset = '2 d';
SELECT idem_shard_give('{[0,1)}', db('o')) AS last_value;
RESET idem.clock_offset;
-- the job without a key stays here
SELECT state FROM idem_job(2);

-- take: numbers go on above those of the database that had the slots
CALL anew();
SELECT idem_shard_set('{}', number => 4);
ALTER SEQUENCE idem.jobs_job_id_seq CACHE 20;
SELECT nextval('idem.jobs_job_id_seq');
SELECT state, message FROM fails($$ SELECT idem_shard_take(slot_of('k'), 5000) $$);
SELECT idem_shard_take(slot_of('k'), 5000, db('o'));
SELECT taken = slot_of('k') AS taken, sender = db('o') AS sender FROM idem.shard;
-- also where this session has cached values
SELECT job_id = 5001 * 1024 + idem_slot('k') AS above FROM idem_enqueue('q', key => 'k');
-- again, and with a smaller value: nothing goes back
SELECT idem_shard_take(slot_of('k'), 17);
SELECT job_id / 1024 > 5001 AS above FROM idem_enqueue('q');
-- the database that had the slot may still have its rows: until that is over, it cannot go on to others
SELECT * FROM fails($$ SELECT idem_shard_give(slot_of('k'), db('third')) $$);
SELECT state, message FROM fails($$ SELECT idem_shard_take(slot_of('other'), 0, db('third')) $$);
SELECT idem_shard_set(slots, by, number) FROM idem.shard;
SELECT taken = slot_of('k') AS taken, sender = db('o') AS sender FROM idem.shard;
-- nor be forgotten
SELECT regexp_replace(detail, '\d+', 'N') AS detail, state, message FROM fails($$ SELECT idem_shard_set('{}') $$);
SELECT state FROM fails($$ SELECT idem_shard_set(NULL) $$);
SELECT state FROM fails($$ SELECT idem_shard_set(slots, by => 'scope') FROM idem.shard $$);
-- a rollback takes the values back, too
BEGIN;
SELECT idem_shard_take(slot_of('other'), 1000000, db('o'));
SELECT job_id / 1024 AS value FROM idem_enqueue('q', key => 'other');
ROLLBACK;
SELECT job_id / 1024 < 6000 AS below FROM idem_enqueue('q');
ALTER SEQUENCE idem.jobs_job_id_seq CACHE 1;
-- M4: the transaction that takes a slot reads its keys at once, also in the same command
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM idem_shard_take(slot_of('other'), 0, db('o')) AS t, LATERAL idem_get('other');
SELECT count(*) FROM idem_get('other');
ROLLBACK;
-- copied jobs have higher numbers than the value that was passed
CALL anew();
SELECT idem_shard_set('{}');
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue) VALUES (7 * 1024 + 5, idem_clock(), idem_clock(), 0, 'q');
SELECT state, message FROM fails($$ SELECT idem_shard_take('{[5,6)}', 6, db('o')) $$);
SELECT slots FROM idem.shard;
SELECT idem_shard_take('{[5,6)}', 7, db('o'));
SELECT job_id / 1024 AS value, job_id % 1024 AS slot FROM idem_fetch('q', lease => '1 min');

-- J14: fetches and enqueues find copied jobs where they have just skipped others
CALL anew();
SELECT idem_shard_set('{[0,1024)}' - slot_of('k'));
SELECT count(*) FROM idem_enqueue_many('q', array_fill('1'::jsonb, ARRAY[300]));
SELECT count(*) FROM idem_fetch('q', batch => 300, lease => '1 h');
SELECT count(*) FROM idem_fetch('q', lease => '1 h');
INSERT INTO idem.jobs (job_id, run_at, enqueued_at, priority, queue)
	SELECT (min(job_id) / 1024 + 100) * 1024 + idem_slot('k'), min(run_at), min(enqueued_at), 0, 'q' FROM idem.jobs;
SELECT idem_shard_take(slot_of('k'), 300, db('o'));
SELECT job_id % 1024 = idem_slot('k') AS copied FROM idem_fetch('q', lease => '1 h');

-- the id of this database
CALL anew();
SELECT * FROM fails($$ SELECT idem_shard_id() $$);
SELECT idem_shard_set('{[0,1024)}');
SELECT idem_shard_id() AS id \gset
SELECT database_id = :'id' AS same, database_oid = (SELECT oid FROM pg_database WHERE datname = current_database()) AS here,
	   system_identifier = (pg_control_system()).system_identifier AS this_server FROM idem.shard;
SELECT substr(:'id', 15, 1) AS version;
-- it stays, whatever the map
SELECT idem_shard_set(NULL);
SELECT idem_shard_id() = :'id' AS same;
SELECT idem_shard_set('{[0,512)}', by => 'scope', number => 5);
SELECT idem_shard_set('{[0,1024)}');
SELECT idem_shard_id() = :'id' AS same;
-- slots do not move to and from the database itself
SELECT (f.f).* FROM (SELECT fails(format('SELECT idem_shard_%s', a)) AS f
	FROM unnest(ARRAY[$$give('{[0,5)}', idem_shard_id())$$, $$take('{[0,5)}', 0, idem_shard_id())$$]) AS a) AS f;
-- every database has its own
TRUNCATE idem.shard;
SELECT idem_shard_set('{[0,1024)}');
SELECT idem_shard_id() = :'id' AS same;
SELECT idem_shard_id() AS id \gset
SELECT (f.f).* FROM (SELECT fails(format('SELECT idem_shard_set(%s)', a)) AS f
	FROM unnest(ARRAY[$$'{}', keep_id => db('o')$$]) AS a) AS f;

-- a copy does not pass for the original: the row was stored on another server
UPDATE idem.shard SET system_identifier = 7;
SELECT state, message, regexp_replace(detail, '\d{3,}', 'N', 'g') AS detail, hint FROM fails($$ SELECT idem_shard_id() $$) AS f;
SELECT state, message FROM fails($$ SELECT idem_shard_give('{}', db('o')) $$);
SELECT state, message FROM fails($$ SELECT idem_shard_take('{}', 0) $$);
-- it can replace the original
SELECT state FROM fails($$ SELECT idem_shard_set('{}', keep_id => db('o')) $$);
SELECT idem_shard_set('{[0,1024)}', keep_id => :'id');
SELECT idem_shard_id() = :'id' AS same;
SELECT idem_shard_set('{[0,1024)}', keep_id => :'id');
-- or get an id of its own
UPDATE idem.shard SET system_identifier = 7;
SELECT idem_shard_set('{[0,1024)}');
SELECT idem_shard_id() = :'id' AS same;
-- on this server the original must not be there
SELECT idem_shard_id() AS id \gset
UPDATE idem.shard SET database_oid = (SELECT oid FROM pg_database WHERE datname = 'template1');
SELECT * FROM fails(format($$ SELECT idem_shard_set('{[0,1024)}', keep_id => %L) $$, :'id'));
UPDATE idem.shard SET database_oid = 7;
SELECT idem_shard_set('{[0,1024)}', keep_id => :'id');
SELECT idem_shard_id() = :'id' AS same;
-- in the middle of a move: the one or the other
SELECT idem_shard_give('{[0,10)}', db('o')) IS NOT NULL AS given;
SELECT idem_shard_take('{[0,3)}', 0, db('o'));
UPDATE idem.shard SET database_oid = 7;
SELECT state FROM fails($$ SELECT idem_shard_take('{[0,10)}', 0, db('o')) $$);
SELECT state, message FROM fails($$ SELECT idem_shard_set(slots) FROM idem.shard $$);
SELECT state, message FROM fails($$ SELECT idem_shard_set('{}') $$);
SELECT idem_shard_set(slots, by, number, keep_id => database_id) FROM idem.shard;
SELECT idem_shard_id() = :'id' AS same, given, receiver = db('o') AS receiver FROM idem.shard;
UPDATE idem.shard SET database_oid = 7;
-- a copy has no part in the move of the original
SELECT idem_shard_set(slots, by, number, force => true) FROM idem.shard;
SELECT idem_shard_id() = :'id' AS same, slots, given, receiver FROM idem.shard;

-- privileges, read-only transactions
CREATE ROLE app;
CREATE ROLE operator;
SELECT idem_grant('app', 'app'), idem_grant('operator', 'admin');
SET ROLE app;
SELECT state FROM fails($$ SELECT idem_shard_give('{}', db('o')) $$);
SELECT state FROM fails($$ SELECT idem_shard_take('{}', 0) $$);
SELECT state FROM fails($$ SELECT idem_shard_id() $$);
SET ROLE operator;
SELECT idem_shard_id() IS NOT NULL AS id;
-- without privileges on the sequence
SELECT idem_shard_take('{[0,1)}', 10000, db('o'));
SELECT current_user, session_user <> current_user AS is_set;
RESET ROLE;
UPDATE idem.shard SET taken = NULL, sender = NULL;
SET ROLE operator;
SELECT idem_shard_give('{[0,1)}', db('o')) AS last_value;
RESET ROLE;
SELECT idem_revoke('app', 'app'), idem_revoke('operator', 'admin');
DROP ROLE app, operator;
BEGIN READ ONLY;
SAVEPOINT a;
SELECT idem_shard_give('{}', db('o'));
ROLLBACK TO a;
SELECT idem_shard_take('{}', 0);
ROLLBACK TO a;
SELECT idem_shard_id() IS NOT NULL AS id;
ROLLBACK;
CALL anew();
DROP FUNCTION slot_of(text), db(text);
