--
-- Privileges: "Scope and owner" and "idem_grant, idem_revoke" of the contract
--
\a\pset footer off
\set VERBOSITY sqlstate

-- nothing is open to PUBLIC
SELECT p.oid::regprocedure AS open_to_public
  FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
 WHERE p.proname LIKE 'idem\_%' AND a.grantee = 0;
SELECT c.oid::regclass AS open_to_public
  FROM pg_class AS c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS a
 WHERE c.relnamespace IN ('idem'::regnamespace, 'idem_internal'::regnamespace) AND c.relkind IN ('r', 'v', 'm', 'S', 'p') AND a.grantee = 0;
SELECT t.oid::regtype AS open_to_public
  FROM pg_type AS t, aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) AS a
 WHERE t.oid IN (SELECT reltype FROM pg_class WHERE relkind = 'c' AND relnamespace = 'idem'::regnamespace)
   AND a.grantee = 0;
SELECT nspname AS open_to_public
  FROM pg_namespace AS n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) AS a
 WHERE nspname IN ('idem', 'idem_internal') AND a.grantee = 0;
-- the queries above have seen some functions
SELECT count(*) > 10 AS walked FROM pg_proc WHERE proname LIKE 'idem\_%';

CREATE ROLE idem_nobody;
CREATE ROLE idem_alice;
CREATE ROLE idem_bob;
CREATE ROLE idem_admin;
CREATE ROLE idem_monitor;
CREATE ROLE idem_shared;
SELECT idem_grant('idem_alice', 'app'), idem_grant('idem_bob', 'app'),
	   idem_grant('idem_admin', 'admin'), idem_grant('idem_monitor', 'monitor');

-- what each set contains
SELECT r.rolname AS role, p.proname AS function
  FROM pg_proc AS p, aclexplode(p.proacl) AS a, pg_roles AS r
 WHERE p.proname LIKE 'idem\_%' AND r.oid = a.grantee AND r.rolname LIKE 'idem\_%'
   AND r.rolname <> 'idem_bob'
 ORDER BY 1, 2;
SELECT r.rolname AS role, c.relname, a.privilege_type
  FROM pg_class AS c, aclexplode(c.relacl) AS a, pg_roles AS r
 WHERE c.relnamespace IN ('idem'::regnamespace, 'idem_internal'::regnamespace) AND r.oid = a.grantee AND r.rolname LIKE 'idem\_%'
 ORDER BY 1, 2, 3;
-- nobody but the owner may use idem_internal: what is there is called through its OID
SELECT r.rolname AS role, n.nspname, a.privilege_type
  FROM pg_namespace AS n, aclexplode(n.nspacl) AS a, pg_roles AS r
 WHERE n.nspname IN ('idem', 'idem_internal') AND r.oid = a.grantee AND r.rolname LIKE 'idem\_%'
 ORDER BY 1, 2, 3;

-- a role without grants
SET ROLE idem_nobody;
SELECT * FROM idem_claim('privileges:1');
SELECT idem_finish('privileges:1');
SELECT idem_release('privileges:1');
SELECT * FROM idem_get('privileges:1');
SELECT idem_forget('privileges:1');
SELECT * FROM idem_call('privileges:1', 'now');
SELECT * FROM idem_claim_many(ARRAY['privileges:1']);
SELECT idem_finish_many(ARRAY['privileges:1']);
SELECT idem_cleanup();
SELECT idem_grant('idem_nobody', 'app');
SELECT idem_revoke('idem_alice', 'app');
SELECT * FROM idem.keys;
SELECT * FROM idem.key_status;
SELECT * FROM idem.key_summary;

-- an application: its own keys
SET ROLE idem_alice;
BEGIN;
SELECT claimed, status FROM idem_claim('privileges:1', '{"a": 1}');
SELECT idem_finish('privileges:1', '"for alice"');
COMMIT;
SELECT claimed, status, result FROM idem_claim('privileges:1');
SELECT owner, result FROM idem_get('privileges:1');
SELECT idem_forget('privileges:1');
SELECT idem_cleanup();
SELECT idem_grant('idem_nobody', 'app');
SELECT * FROM idem.keys;
SELECT * FROM idem.key_status;
SELECT * FROM idem.key_summary;
SET idem.clock_offset = '1 h';

-- another role gets neither the result nor a second run
SET ROLE idem_bob;
SELECT * FROM idem_claim('privileges:1');
SELECT * FROM idem_claim('privileges:1', '{"a": 2}');
SELECT * FROM idem_claim('privileges:1', wait => '0');
SELECT * FROM idem_claim_many(ARRAY['privileges:1']);
SELECT * FROM idem_get('privileges:1');
SELECT idem_finish('privileges:1');
SELECT idem_release('privileges:1');
CREATE FUNCTION pg_temp.echo(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT payload $$;
SELECT * FROM idem_call('privileges:1', 'pg_temp.echo');
DROP FUNCTION pg_temp.echo;
-- but it may use the same key in its own scope
SELECT claimed FROM idem_claim('privileges:1', scope => 'bob');

-- the same for another role in the transaction that holds the key
RESET ROLE;
BEGIN;
SET LOCAL ROLE idem_alice;
SELECT claimed FROM idem_claim('privileges:2');
SET LOCAL ROLE idem_bob;
SAVEPOINT s;
SELECT idem_finish('privileges:2', '1');
ROLLBACK TO s;
SELECT * FROM idem_claim('privileges:2');
ROLLBACK;

-- an administrator sees keys, but not results, and may forget keys
SET ROLE idem_admin;
SELECT key, scope, owner, status FROM idem.key_status WHERE key = 'privileges:1' ORDER BY scope;
SELECT * FROM idem.keys;
SELECT * FROM idem_get('privileges:1');
SELECT idem_cleanup() >= 0 AS cleaned;
SELECT idem_forget('privileges:1', 'bob');
SELECT idem_forget('privileges:1', 'bob');

-- a monitor: numbers only
SET ROLE idem_monitor;
SELECT owner, status, keys FROM idem.key_summary WHERE owner = 'idem_alice'::regrole;
SELECT * FROM idem.key_status;
SELECT * FROM idem.keys;
SELECT * FROM idem_claim('privileges:3');
RESET ROLE;

-- a superuser may see every key
SELECT owner, result FROM idem_get('privileges:1');

-- idem.owner: roles share keys through a common role
SET ROLE idem_alice;
SET idem.owner = 'idem_shared';
SELECT * FROM idem_claim('privileges:4');
SET idem.owner = 'idem_no_such_role';
SELECT * FROM idem_claim('privileges:4');
RESET idem.owner;
RESET ROLE;
GRANT idem_shared TO idem_alice, idem_bob;
SET ROLE idem_alice;
SET idem.owner = 'idem_shared';
BEGIN;
SELECT claimed FROM idem_claim('privileges:4');
SELECT idem_finish('privileges:4', '"for both"');
COMMIT;
SET ROLE idem_bob;
SELECT claimed, status, result FROM idem_claim('privileges:4');
SELECT owner, result FROM idem_get('privileges:4');
-- a member of the owner needs no setting to see the key
RESET idem.owner;
SELECT owner, result FROM idem_get('privileges:4');
-- keys that bob claims without it belong to bob alone
SELECT claimed FROM idem_claim('privileges:5');
SET ROLE idem_alice;
SET idem.owner = 'idem_shared';
SELECT * FROM idem_claim('privileges:5');
RESET idem.owner;
RESET ROLE;

-- idem_call: the handler runs with the privileges of the caller
CREATE FUNCTION idem_test_whoami(payload jsonb) RETURNS jsonb LANGUAGE sql
AS $$ SELECT to_jsonb(current_user::text) $$;
SET ROLE idem_alice;
SELECT result FROM idem_call('privileges:6', 'idem_test_whoami');
RESET ROLE;
REVOKE EXECUTE ON FUNCTION idem_test_whoami FROM PUBLIC;
SET ROLE idem_alice;
SELECT result FROM idem_call('privileges:7', 'idem_test_whoami');
-- also if a result is stored already
SELECT result FROM idem_call('privileges:6', 'idem_test_whoami');
SELECT count(*) FROM idem_get('privileges:7');
RESET ROLE;
DROP FUNCTION idem_test_whoami;

-- a SECURITY DEFINER function claims keys of its owner
CREATE FUNCTION idem_test_definer() RETURNS text LANGUAGE sql SECURITY DEFINER
AS $$ SELECT (idem_claim('privileges:8')).status $$;
ALTER FUNCTION idem_test_definer() OWNER TO idem_alice;
SET ROLE idem_nobody;
SELECT idem_test_definer();
RESET ROLE;
SELECT owner FROM idem_get('privileges:8');
DROP FUNCTION idem_test_definer;

-- the caller can change settings that the function does not pin
CREATE FUNCTION idem_test_pinned() RETURNS text LANGUAGE sql SECURITY DEFINER
SET idem.scope = 'pinned' SET idem.ttl = '1 h' SET idem.owner = ''
AS $$ SELECT (idem_claim('privileges:10')).status $$;
ALTER FUNCTION idem_test_pinned() OWNER TO idem_alice;
SET ROLE idem_nobody;
SELECT idem_test_pinned();
SET idem.scope = 'elsewhere';
SET idem.ttl = 1;
SET idem.owner = 'idem_bob';
SELECT idem_test_pinned();
RESET idem.scope;
RESET idem.ttl;
RESET idem.owner;
RESET ROLE;
SELECT scope, owner, expires_at - created_at AS ttl FROM idem.keys WHERE key = 'privileges:10';
DROP FUNCTION idem_test_pinned;

-- idem.owner: a membership without INHERIT and SET is not enough (possible since 16)
DO $$
BEGIN
	IF current_setting('server_version_num')::int >= 160000 THEN
		EXECUTE 'GRANT idem_bob TO idem_alice WITH INHERIT FALSE, SET FALSE';
		SET LOCAL ROLE idem_alice;
		SET LOCAL idem.owner = 'idem_bob';
		BEGIN
			PERFORM idem_get('privileges:5');
			RAISE EXCEPTION 'the key of another role was shown';
		EXCEPTION WHEN insufficient_privilege THEN
			NULL;
		END;
	END IF;
END
$$;

-- an expired key has no owner
SET ROLE idem_alice;
SELECT claimed FROM idem_claim('privileges:9', ttl => '1 s');
RESET ROLE;
SET idem.clock_offset = '1 min';
SET ROLE idem_bob;
SELECT claimed FROM idem_claim('privileges:9');
RESET ROLE;
SELECT owner FROM idem_get('privileges:9');
RESET idem.clock_offset;

-- leases: other roles get neither the key nor a takeover, even with the token
SET ROLE idem_alice;
SELECT token FROM idem_lease('privileges:10', '30 s', worker => 'w') \gset
SET ROLE idem_bob;
SELECT status FROM idem_lease('privileges:10', '30 s', worker => 'w');
SELECT status FROM idem_claim('privileges:10');
SELECT status FROM idem_get('privileges:10');
SELECT idem_finish('privileges:10', '1', :token);
SELECT idem_release('privileges:10', :token);
SELECT idem_renew('privileges:10', :token, '30 s');
SELECT idem_checkpoint('privileges:10', :token, '1');
SELECT idem_fence('privileges:10', :token);
RESET ROLE;
SET idem.clock_offset = '1 min';
SET ROLE idem_bob;
SELECT status FROM idem_lease('privileges:10', '30 s');
SELECT status FROM idem_claim('privileges:10');
SET ROLE idem_alice;
SELECT status, attempt FROM idem_lease('privileges:10', '30 s');
RESET ROLE;
-- a role with the privileges of the owner can take over; the owner stays the same
SET idem.clock_offset = '2 min';
SELECT status, attempt FROM idem_lease('privileges:10', '30 s');
SELECT owner FROM idem_get('privileges:10');
-- past its ttl it has no owner
SET idem.clock_offset = '25 h';
SET ROLE idem_bob;
SELECT status, attempt FROM idem_lease('privileges:10', '30 s');
SELECT owner FROM idem_get('privileges:10');
RESET ROLE;
RESET idem.clock_offset;

-- idem_grant and idem_revoke
SELECT idem_revoke('idem_bob', 'app');
SET ROLE idem_bob;
SELECT * FROM idem_claim('privileges:5');
RESET ROLE;
SELECT idem_grant('idem_no_such_role', 'app');
SELECT idem_grant('public', 'app');
SELECT idem_grant('idem_bob', 'everything');
SELECT idem_grant(NULL, 'app');
SELECT idem_grant('idem_bob', NULL);
BEGIN READ ONLY;
SELECT idem_grant('idem_bob', 'app');
ROLLBACK;
-- event triggers see the grants
CREATE FUNCTION idem_test_event() RETURNS event_trigger LANGUAGE plpgsql
AS $$ BEGIN RAISE NOTICE '%', tg_tag; END $$;
CREATE EVENT TRIGGER idem_test_event ON ddl_command_end EXECUTE FUNCTION idem_test_event();
\set VERBOSITY default
SELECT idem_grant('idem_bob', 'app');
SELECT idem_revoke('idem_bob', 'app');
\set VERBOSITY sqlstate
DROP EVENT TRIGGER idem_test_event;
DROP FUNCTION idem_test_event;
-- a role may have any name
CREATE ROLE "idem; DROP TABLE idem.keys --";
SELECT idem_grant('idem; DROP TABLE idem.keys --', 'monitor');
SELECT has_table_privilege('idem; DROP TABLE idem.keys --', 'idem.key_summary', 'SELECT');
SELECT idem_revoke('idem; DROP TABLE idem.keys --', 'monitor');
DROP ROLE "idem; DROP TABLE idem.keys --";

-- roles can be dropped after their grants are revoked; their keys do not prevent it
SELECT idem_revoke('idem_alice', 'app'), idem_revoke('idem_admin', 'admin'), idem_revoke('idem_monitor', 'monitor');
DROP ROLE idem_nobody, idem_alice, idem_bob, idem_admin, idem_monitor, idem_shared;
DELETE FROM idem.keys WHERE key LIKE 'privileges:%';
