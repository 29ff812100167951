--
-- Direct access would bypass triggers and the like that users add to idem.keys:
-- idem refuses to work then
--
\a\pset footer off
CREATE FUNCTION refused(name text DEFAULT 'shape:new', OUT state text, OUT message text, OUT detail text, OUT hint text)
LANGUAGE sql AS $$
	SELECT state, message, detail, hint FROM fails(format('SELECT idem_claim(%L)', name))
$$;
SELECT claimed FROM idem_claim('shape:1');
\x on

-- unlogged
BEGIN;
ALTER TABLE idem.keys SET UNLOGGED;
SELECT * FROM refused();
ROLLBACK;

-- row security
BEGIN;
ALTER TABLE idem.keys ENABLE ROW LEVEL SECURITY;
SELECT * FROM refused();
ROLLBACK;

-- a trigger
BEGIN;
CREATE TRIGGER t BEFORE INSERT ON idem.keys FOR EACH ROW EXECUTE FUNCTION ignore_row();
SELECT * FROM refused();
ROLLBACK;

-- a foreign key
BEGIN;
CREATE TABLE referencing (key_hash bigint, nth smallint, FOREIGN KEY (key_hash, nth) REFERENCES idem.keys);
SELECT * FROM refused();
ROLLBACK;

-- a rule
BEGIN;
CREATE RULE r AS ON INSERT TO idem.keys DO INSTEAD NOTHING;
SELECT * FROM refused();
ROLLBACK;

-- attached as a partition: rows outside its bounds would be stored
CREATE TABLE whole (LIKE idem.keys) PARTITION BY LIST (scope);
BEGIN;
ALTER TABLE whole ATTACH PARTITION idem.keys FOR VALUES IN ('elsewhere', '');
SELECT * FROM refused();
SAVEPOINT s;
SELECT idem_finish('shape:1');
ROLLBACK TO s;
SELECT idem_cleanup();
ROLLBACK TO s;
SELECT count(*) FROM idem_get('shape:1');
ROLLBACK;
DROP TABLE whole;

-- inheritance is allowed: nothing would be bypassed
BEGIN;
CREATE TABLE parent (LIKE idem.keys);
ALTER TABLE idem.keys INHERIT parent;
CREATE TABLE child () INHERITS (idem.keys);
SELECT * FROM refused();
ALTER TABLE parent ADD CHECK (key <> 'forbidden');
SELECT * FROM refused();
ROLLBACK;

-- a check constraint
BEGIN;
ALTER TABLE idem.keys ADD CHECK (key <> 'forbidden');
SELECT * FROM refused();
ROLLBACK;

-- a not-null constraint on a column that is null in the row of a plain claim
BEGIN;
DELETE FROM idem.keys;
ALTER TABLE idem.keys ALTER COLUMN token SET NOT NULL;
SELECT * FROM refused();
ROLLBACK;

-- expression, partial and unique indexes, exclusion constraints
BEGIN;
CREATE INDEX ON idem.keys (lower(key));
SELECT * FROM refused();
ROLLBACK;
BEGIN;
CREATE INDEX ON idem.keys (owner) WHERE owner <> 0;
SELECT * FROM refused();
ROLLBACK;
BEGIN;
CREATE UNIQUE INDEX ON idem.keys (created_at);
SELECT * FROM refused();
ROLLBACK;
-- a copy of the primary key is allowed, but not one with another equality: a key would be absent
-- in the one index and refused by the other, in an endless loop
BEGIN;
CREATE UNIQUE INDEX ON idem.keys (key_hash, nth);
SELECT * FROM refused();
ROLLBACK;
BEGIN;
CREATE FUNCTION compare_half(bigint, bigint) RETURNS integer LANGUAGE sql IMMUTABLE
AS $$ SELECT btint8cmp($1 / 2, $2 / 2) $$;
CREATE OPERATOR CLASS half_ops FOR TYPE bigint USING btree AS
	OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 compare_half(bigint, bigint);
CREATE UNIQUE INDEX ON idem.keys (key_hash half_ops, nth);
SET LOCAL statement_timeout = '10 s';
SELECT * FROM refused();
SELECT state FROM refused('SHAPE:1');
ROLLBACK;
BEGIN;
CREATE UNIQUE INDEX ON idem.keys (key COLLATE "POSIX", scope);
SELECT * FROM refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.keys ADD EXCLUDE USING btree (created_at WITH =);
SELECT * FROM refused();
ROLLBACK;

-- without primary key
BEGIN;
ALTER TABLE idem.keys DROP CONSTRAINT keys_pkey;
SELECT * FROM refused();
ROLLBACK;

-- library and SQL objects of different versions: another table ...
BEGIN;
ALTER TABLE idem.keys ADD COLUMN extra text;
SELECT * FROM refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.keys ALTER COLUMN result TYPE text;
SELECT * FROM refused();
ROLLBACK;
BEGIN;
ALTER TABLE idem.keys RENAME TO elsewhere;
SELECT * FROM refused();
ROLLBACK;
\x off

-- ... or other functions
\set VERBOSITY sqlstate
CREATE FUNCTION old_claim(text, OUT claimed boolean, OUT status text)
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT old_claim('shape:1');
CREATE FUNCTION new_claim(text, jsonb, interval, interval, text, OUT claimed boolean, OUT status text)
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT new_claim('shape:1', NULL, NULL, NULL, NULL);
CREATE FUNCTION turned_claim(text, jsonb, interval, interval, text,
	OUT a text, OUT b boolean, OUT c jsonb, OUT d timestamptz, OUT e timestamptz)
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT turned_claim('shape:1', NULL, NULL, NULL, NULL);
CREATE FUNCTION untyped_claim(text, jsonb, interval, interval, text) RETURNS record
AS '$libdir/idem', 'idem_claim' LANGUAGE C;
SELECT untyped_claim('shape:1', NULL, NULL, NULL, NULL);
CREATE FUNCTION new_get(text, text, OUT status text, OUT result jsonb) RETURNS SETOF record
AS '$libdir/idem', 'idem_get' LANGUAGE C;
SELECT * FROM new_get('shape:1', NULL);
CREATE FUNCTION new_many(text[], jsonb[], interval, interval, text, OUT a int, OUT b text) RETURNS SETOF record
AS '$libdir/idem', 'idem_claim_many' LANGUAGE C;
SELECT * FROM new_many('{a}', NULL, NULL, NULL, NULL);
CREATE FUNCTION old_finish(text, jsonb) RETURNS void
AS '$libdir/idem', 'idem_finish' LANGUAGE C;
SELECT old_finish('shape:1', NULL);
DROP FUNCTION old_claim, new_claim, turned_claim, untyped_claim, new_get, new_many, old_finish;

-- a publication needs a replica identity, as for any UPDATE
SELECT claimed FROM idem_claim('shape:3', ttl => '1 s');
BEGIN;
SET LOCAL client_min_messages = error;
CREATE PUBLICATION shape FOR TABLE idem.keys;
SELECT claimed FROM idem_claim('shape:2');
SELECT idem_finish('shape:2');
ALTER TABLE idem.keys REPLICA IDENTITY NOTHING;
SELECT claimed FROM idem_claim('shape:4');
SAVEPOINT s;
SELECT idem_finish('shape:4');
ROLLBACK TO s;
SELECT idem_release('shape:4');
ROLLBACK TO s;
SET LOCAL idem.clock_offset = '1 h';
SELECT claimed FROM idem_claim('shape:3', wait => '0');
ROLLBACK;

-- cleanup needs its index
BEGIN;
DROP INDEX idem.keys_expires_at_idx;
SELECT claimed FROM idem_claim('shape:2');
SELECT idem_cleanup();
ROLLBACK;

BEGIN;
DROP INDEX idem.keys_expires_at_idx;
CREATE INDEX ON idem.keys (expires_at DESC);
SELECT idem_cleanup();
ROLLBACK;
BEGIN;
DROP INDEX idem.keys_expires_at_idx;
CREATE INDEX ON idem.keys (expires_at) WHERE result IS NULL;
SELECT idem_cleanup();
ROLLBACK;

-- after everything was removed, it works as before
SELECT status FROM idem_claim('shape:1');
SELECT * FROM refused();
DROP FUNCTION refused;
