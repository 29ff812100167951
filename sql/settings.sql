--
-- Settings
--
\a\pset footer off
\set VERBOSITY sqlstate
LOAD 'idem';
SELECT name, setting, unit, context, vartype, min_val, max_val
  FROM pg_settings WHERE name LIKE 'idem.%' ORDER BY name;
-- the tests set a longer one
SELECT boot_val FROM pg_settings WHERE name = 'idem.drain_after';

-- idem.ttl
SET idem.ttl = '7 d';
SELECT expires_at - created_at AS ttl FROM idem_claim('settings:1');
SELECT expires_at - created_at AS ttl FROM idem_claim('settings:2', ttl => '1 h');
SET idem.ttl = 0;
SET idem.ttl = -1;
SET idem.ttl = 'for ever';
RESET idem.ttl;

-- idem.scope
SET idem.scope = 'tenant 1';
SELECT claimed FROM idem_claim('settings:3');
SELECT status FROM idem_get('settings:3');
SELECT count(*) FROM idem_get('settings:3', '');
SET idem.scope = 'tenant 2';
SELECT claimed FROM idem_claim('settings:3');
SELECT status FROM idem_claim('settings:3', scope => 'tenant 1');
SELECT idem_forget('settings:3');
SELECT count(*) FROM idem_claim_many(ARRAY['settings:4']) WHERE claimed;
RESET idem.scope;
SELECT scope FROM idem.keys WHERE key IN ('settings:3', 'settings:4') ORDER BY key;
SELECT set_config('idem.scope', repeat('x', 256), false);
SELECT set_config('idem.scope', repeat('x', 255), false) IS NOT NULL AS set;
RESET idem.scope;

-- idem.max_result_size
SET idem.max_result_size = '2 MB';
SHOW idem.max_result_size;
SET idem.max_result_size = -1;
RESET idem.max_result_size;

-- idem.clock_offset is for superusers
SET idem.clock_offset = '-1 h';
SELECT idem_clock() < clock_timestamp() - interval '59 min' AS behind;
SET idem.clock_offset = '1 h';
SELECT idem_clock() > clock_timestamp() + interval '59 min' AS ahead;
RESET idem.clock_offset;
CREATE ROLE idem_user;
SET ROLE idem_user;
SET idem.clock_offset = 1;
SET idem.ttl = '2 d';
RESET ROLE;
RESET idem.ttl;
DROP ROLE idem_user;

-- the prefix is reserved
SET idem.no_such_setting = 1;

-- per role and per function
CREATE FUNCTION claim_in_scope(key text) RETURNS text LANGUAGE sql SET idem.scope = 'function'
AS $$ SELECT (idem_claim(key)).status $$;
SELECT claim_in_scope('settings:5');
SELECT scope FROM idem.keys WHERE key = 'settings:5';
DROP FUNCTION claim_in_scope;
