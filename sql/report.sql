--
-- idem_report(): its sections, what each role sees (H2), that everything is escaped (H2),
-- its bounds, and its commands.  test/t/210_report.pl renders it.
--
\a\pset footer off
\set VERBOSITY terse
CREATE ROLE idem_report_admin;
CREATE ROLE idem_report_monitor;
CREATE ROLE idem_report_pg_monitor IN ROLE pg_monitor;
CREATE ROLE idem_report_app;
CREATE ROLE idem_report_team;
SET client_min_messages = warning;

-- H1: characters that rearrange a line, or draw nothing, are escapes, which mean the same in a command
SELECT idem_visible(t) AS text, idem_visible_literal(t) AS literal, idem_visible_name(t) AS name
  FROM unnest(ARRAY['plain', 'a''b\c', E'a\u202E\'b\\"', E'\u001B[2J\t\n', E'\u200B\uFEFF\U000E0041', E'Gr\u00FC\u00DFe', '', NULL]) AS t;
CREATE FUNCTION same(literal text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	EXECUTE 'SELECT ' || literal INTO answer;
	RETURN answer;
END
$$;
SELECT count(*) AS different
  FROM generate_series(1, 300) AS i, LATERAL (SELECT chr(i) || '''\' || chr(8000 + i) || chr(i) AS t) AS t
 WHERE same(idem_visible_literal(t)) <> t
	OR idem_visible(t) ~ '[\x01-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]'
	OR idem_visible_literal(t) ~ '[\x01-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]';
SELECT same(format('%s FROM (SELECT ''found'' AS %1$s) AS s', idem_visible_name(E'a\u202E"\\b'))) AS name;
DROP FUNCTION same;

-- in a database of its own, with a hostile name
SELECT current_database() AS home \gset
CREATE DATABASE "<script>captured=1</script>""'&amp;";
\connect '"dbname=\'<script>captured=1</script>""\\\'&amp;\'"'
SET client_min_messages = warning;
\set VERBOSITY terse
CREATE EXTENSION idem;
SELECT idem_grant('idem_report_admin', 'admin'), idem_grant('idem_report_monitor', 'monitor'), idem_grant('idem_report_app', 'app');

-- one section of the page
CREATE FUNCTION section(page text, id text) RETURNS text LANGUAGE sql AS $$
	SELECT substring(page FROM '<section id="' || id || '">(.*?)</section>')
$$;
-- what a browser shows of it, one line per block
CREATE FUNCTION lines(html text) RETURNS SETOF text LANGUAGE sql AS $$
	SELECT l FROM regexp_split_to_table(
			regexp_replace(regexp_replace(regexp_replace(html, '<svg .*?</svg>', '', 'g'),
				'</(p|pre|div|tr|h2|h3|figcaption|dd)>', E'\x01', 'g'), '<[^>]*>', ' ', 'g'), E'\x01') AS l
	 WHERE l ~ '\S'
$$;
-- the commands of a section, as a browser shows them
CREATE FUNCTION commands(page text, id text) RETURNS SETOF text LANGUAGE sql AS $$
	SELECT replace(replace(replace(replace(replace(m[1], '&lt;', '<'), '&gt;', '>'), '&quot;', '"'), '&#39;', ''''), '&amp;', '&')
	  FROM regexp_matches(section(page, id), '<pre>(.*?)</pre>', 'g') AS m
$$;
CREATE FUNCTION run(command text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	EXECUTE command INTO answer;
	RETURN COALESCE(answer, 'no row');
END
$$;

-- an empty database: every section is there and says that it is empty
SELECT m[1] AS id, m[2] AS title FROM regexp_matches(idem_report(), '<section id="([^"]+)"><h2>([^<]+)</h2>', 'g') AS m;
SELECT trim(regexp_replace(l, '\d{4}-\S+ \S+ \S+', 'TIME')) AS line
  FROM unnest(ARRAY['trends', 'queues', 'running', 'dead', 'decisions', 'duplicates']) WITH ORDINALITY AS s (id, ord),
	   lines(section(idem_report(), id)) AS l
 ORDER BY ord;
-- the whole page is one element, without a script and without an address
SELECT p LIKE E'<!DOCTYPE html>\n<html lang="en">\n%</html>' AS is_page,
	   p ~ '<script|https?://|url\(|@import' AS reaches_out,
	   p LIKE '%<meta charset="utf-8">%' AS says_charset
  FROM idem_report() AS p;
SET client_encoding = 'LATIN1';
SELECT substring(idem_report() FROM '<meta charset="(.*?)">');
SET client_encoding = 'WIN1252';
SELECT substring(idem_report() FROM '<meta charset="(.*?)">');
RESET client_encoding;

-- health: what the doctor finds, what is not ok first, each with its fix
CREATE FUNCTION idem_found_by_the_doctor() RETURNS void LANGUAGE sql AS '';
SELECT (SELECT count(*) FROM regexp_matches(h, '<div class="finding"><span class="badge (?:warn|fail)">', 'g')) = d.bad AS problems,
	   (SELECT count(*) FROM regexp_matches(h, '<tr>.*?<span class="badge ok">', 'g')) = d.ok AS others,
	   h ~ '<div class="finding">.*<details>' AND h !~ '<details>.*<div class="finding">' AS problems_first
  FROM section(idem_report(), 'health') AS h,
	   (SELECT count(*) FILTER (WHERE status = 'ok') AS ok, count(*) FILTER (WHERE status <> 'ok') AS bad FROM idem_doctor()) AS d;
SELECT c AS fix FROM commands(idem_report(), 'health') AS c
EXCEPT SELECT fix FROM idem_doctor() WHERE status <> 'ok';
DROP FUNCTION idem_found_by_the_doctor;

-- numbers and time spans
SELECT idem_internal.idem_report_number(0) AS zero, idem_internal.idem_report_number(1234567) AS million, idem_internal.idem_report_cells(0, NULL, 1000) AS cells;
SELECT t, idem_internal.idem_report_age(t)
  FROM unnest('{0 s,59.9 s,61 s,3600 s,90000 s,40 days,-5 s,NULL}'::interval[]) AS t;

-- a value is escaped, a null is nothing
SELECT idem_internal.idem_report_html('<b title="%s">%s%s</b>', 'a"b', '<&>''"%s' || E'\n', NULL);

--
-- hostile names everywhere
--
-- (the last two characters rearrange the line in which a browser or a terminal shows them)
SELECT E'<script>captured=1</script>"\'&amp;\n%s\xE2\x80\xAE\x1B' AS evil \gset
CREATE ROLE "<script>captured=1</script>""'&amp;%s";
SELECT idem_grant('<script>captured=1</script>"''&amp;%s', 'admin');
SELECT idem_queue_set(:'evil', owner => '<script>captured=1</script>"''&amp;%s');
SELECT outcome FROM idem_enqueue(:'evil', to_jsonb(:'evil'::text), 'running ' || :'evil');
-- (a name with a line break cannot be an application_name)
SELECT count(*) FROM idem_fetch(:'evil', lease => '1 h', worker => '<script>captured=1</script>"''&amp;');
SELECT outcome FROM idem_enqueue(:'evil', to_jsonb(:'evil'::text), 'dead ' || :'evil');
SELECT idem_fail(job_id, token, :'evil', dead => true) FROM idem_fetch(:'evil', lease => '1 h', worker => :'evil');
SET idem.clock_offset = '-1 h';
SET ROLE "<script>captured=1</script>""'&amp;%s";
SELECT status FROM idem_lease('parked ' || :'evil', '1 s', worker => :'evil', on_expiry => 'park', scope => :'evil');
SELECT status FROM idem_lease('exhausted ' || :'evil', '1 s', worker => :'evil', max_attempts => 1, scope => :'evil');
RESET ROLE;
RESET idem.clock_offset;
-- a finding of the doctor with a name in it
ALTER ROLE "<script>captured=1</script>""'&amp;%s" SET idem.cleanup = off;
SET application_name = '<script>captured=1</script>"''&amp;';
SET SESSION AUTHORIZATION "<script>captured=1</script>""'&amp;%s";
SELECT idem_report(keys => true) AS page \gset
RESET SESSION AUTHORIZATION;
RESET application_name;

-- each occurrence is escaped; SQL doubles a quote, JSON puts a backslash before it
SELECT s.id, count(*) AS hostile,
	   count(*) FILTER (WHERE m[1] LIKE '&lt;script&gt;%' AND m[2] ~ '^&lt;/script&gt;\\?(&quot;){1,2}(&#39;){1,2}&amp;amp;') AS escaped
  FROM unnest(ARRAY['health', 'queues', 'running', 'dead', 'decisions', 'duplicates', 'keys', 'head', 'header']) WITH ORDINALITY AS s (id, ord),
	   COALESCE(section(:'page', s.id), substring(:'page' FROM '<' || s.id || '>(.*?)</' || s.id || '>')) AS h,
	   regexp_matches(h, '(.{14})captured=1(.{47})', 'g') AS m
 GROUP BY s.id, s.ord
 ORDER BY s.ord;
SELECT count(*) FILTER (WHERE m[1] = 'captured') AS hostile, count(*) FILTER (WHERE m[1] = '&lt;script&gt;captured') AS escaped
  FROM (SELECT regexp_matches(:'page', '((?:&lt;script&gt;)?captured)', 'g') AS m) AS x;
-- H2: no character that rearranges the page or draws nothing
SELECT :'page' ~ '[\x01-\x08\x0b-\x1f\x7f]' AS has_control, strpos(:'page', E'\xE2\x80\xAE') > 0 AS has_override;
-- no other element than ours, no ampersand that is not an entity
SELECT DISTINCT m[1] COLLATE "C" AS element FROM regexp_matches(:'page', '<([^\s>/][^\s>]*)', 'g') AS m ORDER BY 1;
SELECT m[1] AS bare FROM regexp_matches(regexp_replace(:'page', '<style>.*?</style>', ''), '&(?!(?:amp|lt|gt|quot|#39|ndash);)(.{9})', 'g') AS m;
-- each element that is opened is closed
SELECT t AS element, regexp_count_open - regexp_count_close AS not_closed
  FROM unnest('{html,head,body,main,section,div,table,tr,td,th,pre,p,span,dl,dt,dd,svg,g,figure,details,b}'::text[]) AS t,
	   LATERAL (SELECT (SELECT count(*) FROM regexp_matches(:'page', '<' || t || '[ >]', 'g')) AS regexp_count_open,
					   (SELECT count(*) FROM regexp_matches(:'page', '</' || t || '>', 'g')) AS regexp_count_close) AS c
 WHERE regexp_count_open <> regexp_count_close;
SELECT trim(l) AS line FROM lines(section(:'page', 'queues')) AS l LIMIT 1 OFFSET 2;
SELECT section(:'page', 'running') LIKE format('%%<td class="t">%s</td>%%', pg_backend_pid()) AS process_is_known;

-- the commands work with such names, under a search_path that finds traps first
CREATE SCHEMA traps;
CREATE FUNCTION traps.idem_retry(bigint) RETURNS boolean LANGUAGE sql AS $$ SELECT 1 / 0 = 1 $$;
CREATE FUNCTION traps.idem_release(text, bigint, text) RETURNS boolean LANGUAGE sql AS $$ SELECT 1 / 0 = 1 $$;
CREATE FUNCTION traps.idem_finish(text, text, bigint, text) RETURNS boolean LANGUAGE sql AS $$ SELECT 1 / 0 = 1 $$;
CREATE FUNCTION traps.count("any") RETURNS bigint LANGUAGE internal AS 'int8mul';
CREATE FUNCTION traps.trap(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT 1 / 0 = 1 $$;
CREATE OPERATOR traps.= (LEFTARG = text, RIGHTARG = text, FUNCTION = traps.trap);
SET search_path = traps, pg_catalog, public;
SELECT run(c) AS retried FROM public.commands(:'page', 'dead') AS c;
SELECT run(c) AS decided FROM public.commands(:'page', 'decisions') WITH ORDINALITY AS c (c, n) WHERE n OPERATOR(pg_catalog.=) ANY ('{2,4}');
-- too late for the other decision
SELECT run(c) AS decided FROM public.commands(:'page', 'decisions') WITH ORDINALITY AS c (c, n) WHERE n OPERATOR(pg_catalog.=) ANY ('{1,3}');
RESET search_path;
DROP SCHEMA traps CASCADE;
SELECT queue = :'evil' AS of_queue, state FROM idem.job_status ORDER BY job_id;
-- the exhausted one has three attempts more
SELECT left(key, 9), status, attempt, max_attempts FROM idem.key_status ORDER BY key;
SELECT 'parked and released' AS was, status FROM idem_lease('parked ' || :'evil', '1 s', scope => :'evil');

-- the other decisions, found by token and hash: another key with the same token stays
TRUNCATE idem.keys;
SET idem.clock_offset = '-1 h';
SELECT status FROM idem_lease('a', '1 s', on_expiry => 'park');
SELECT status FROM idem_lease('b', '1 s', max_attempts => 1);
SELECT status FROM idem_lease('c', '1 s', on_expiry => 'park');
RESET idem.clock_offset;
UPDATE idem.keys SET token = (SELECT token FROM idem.keys WHERE key = 'a') WHERE key = 'c';
SELECT c AS command FROM commands(idem_report(), 'decisions') AS c
 WHERE c ~ 'idem_finish' AND c ~ idem_key_hash('a', '')::text \gset
SELECT run(:'command') AS decided;
SELECT run(c) AS decided FROM commands(idem_report(), 'decisions') AS c WHERE c ~ 'idem_finish' AND c ~ idem_key_hash('b', '')::text;
SELECT key, status FROM idem.key_status ORDER BY key;
SELECT status, result FROM idem_lease('a', '1 s');

--
-- H2: what each role sees
--
TRUNCATE idem.keys, idem.jobs, idem.job_log, idem.queues;
SELECT idem_queue_set('owned', owner => 'idem_report_team');
SELECT outcome FROM unnest('{open,owned}'::text[]) AS q, idem_enqueue(q, to_jsonb('secret payload ' || q), 'secret key running ' || q);
SELECT count(*) FROM unnest('{open,owned}'::text[]) AS q, idem_fetch(q, lease => '1 h', worker => 'worker of ' || q);
SELECT outcome FROM unnest('{open,owned}'::text[]) AS q, idem_enqueue(q, to_jsonb('secret payload ' || q), 'secret key dead ' || q);
SELECT idem_fail(job_id, token, 'secret error', dead => true) FROM unnest('{open,owned}'::text[]) AS q, idem_fetch(q);
SET idem.clock_offset = '-1 h';
SELECT status FROM idem_lease('secret key parked', '1 s', worker => 'worker of a lease', on_expiry => 'park', scope => 'secret scope');
RESET idem.clock_offset;

CREATE FUNCTION sees(page text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(DISTINCT m[1], ', ' ORDER BY m[1])
	  FROM regexp_matches(page, '(secret (?:error|scope|key (?:running|dead|parked)(?: open| owned)?|payload (?:open|owned))|worker of \w+|warn</span> No keys|do not pass it on|can quote them|shows no keys, payloads, scopes and errors)', 'g') AS m
$$;
GRANT USAGE ON SCHEMA public TO PUBLIC;
SELECT 'superuser' AS role, sees(idem_report()) AS without, sees(idem_report(true)) AS with, sees(idem_report(NULL)) = sees(idem_report()) AS null_is_false;
SET ROLE idem_report_admin;
SELECT 'admin' AS role, sees(idem_report()) AS without, sees(idem_report(keys => true)) AS with;
SET ROLE idem_report_monitor;
SELECT 'monitor' AS role, sees(idem_report()) AS without, sees(idem_report(keys => true)) AS with;
-- nor do the views, could it name them
RESET ROLE;
GRANT USAGE ON SCHEMA idem_internal TO idem_report_monitor;
SET ROLE idem_report_monitor;
SELECT job_id, queue, state, worker, error, key, payload FROM idem_internal.report_jobs ORDER BY job_id;
SELECT queue, error, jobs FROM idem_internal.report_dead ORDER BY queue;
SELECT state, worker, key, scope FROM idem_internal.report_leases;
SELECT scope, keys FROM idem_internal.report_scopes;
RESET ROLE;
REVOKE USAGE ON SCHEMA idem_internal FROM idem_report_monitor;
SET ROLE idem_report_pg_monitor;
SELECT 'pg_monitor' AS role, sees(idem_report()) AS without, sees(idem_report(keys => true)) AS with;
SET ROLE idem_report_app;
SELECT idem_report();
SELECT idem_report(keys => true);
SET ROLE idem_report_team;
SELECT idem_report();
RESET ROLE;
-- an administrator with the privileges of the owner sees the payloads of the queue
GRANT idem_report_team TO idem_report_admin;
SET ROLE idem_report_admin;
SELECT 'admin' AS role, sees(idem_report(keys => true)) AS with;
RESET ROLE;
-- a monitor that may also work with jobs sees no more on this page
SELECT idem_grant('idem_report_monitor', 'app');
SET ROLE idem_report_monitor;
SELECT 'monitor' AS role, sees(idem_report(keys => true)) AS with;
RESET ROLE;
-- a command for a role that does not see the errors: all dead jobs of the queue
SET ROLE idem_report_monitor;
SELECT c FROM commands(idem_report(), 'dead') AS c;
RESET ROLE;
-- the process of a worker
SET application_name = 'worker of open';
SELECT section(idem_report(), 'running') LIKE format('%%<td class="w">worker of open</td><td class="t">%s</td>%%', pg_backend_pid()) AS process_is_known;
RESET application_name;

--
-- bounds
--
TRUNCATE idem.keys, idem.jobs, idem.job_log, idem.queues;
SELECT count(idem_enqueue('queue ' || i % 60, to_jsonb(repeat('x', 1000)), 'key ' || i)) FROM generate_series(1, 120) AS i;
SELECT count(*) FROM generate_series(0, 59) AS i, idem_fetch('queue ' || i, lease => '1 h');
SELECT count(idem_fail(job_id, token, repeat('long ', 100) || job_id, dead => true)) FROM generate_series(0, 59) AS i, idem_fetch('queue ' || i, lease => '1 h');
SET idem.clock_offset = '-1 h';
SELECT count(idem_lease('key ' || i, '1 s', on_expiry => 'park', scope => 'scope ' || i)) FROM generate_series(1, 60) AS i;
RESET idem.clock_offset;
SELECT idem_report(true) AS page \gset
SELECT s.id, m[1] AS says FROM unnest('{queues,running,dead,decisions,duplicates,keys}'::text[]) WITH ORDINALITY AS s (id, ord),
	   regexp_matches(section(:'page', s.id), '<p class="more">(Only.*?)</p>', 'g') AS m ORDER BY ord;
-- (duplicates counts the queue of the hostile name and those of H2, too)
SELECT id, (SELECT count(*) FROM regexp_matches(section(:'page', id), '<tr>', 'g')) AS rows,
	   (SELECT count(*) FROM regexp_matches(section(:'page', id), '<div class="finding">', 'g')) AS findings
  FROM unnest('{queues,running,dead,decisions,duplicates}'::text[]) AS id;
SELECT length(:'page') < 200000 AS is_small, :'page' ~ 'x{150}' AS has_payloads, :'page' ~ 'x{201}' AS has_long_ones;
-- jobs with an equal beginning of the error are one group
UPDATE idem.job_log SET errors = jsonb_build_array(jsonb_build_object('error', repeat('long ', 100) || job_id));
SELECT count(*), sum(jobs) FROM (SELECT error, sum(jobs) AS jobs FROM idem_internal.report_dead GROUP BY error) AS g;
SELECT run(c) AS retried FROM commands(idem_report(), 'dead') AS c LIMIT 1;
-- without an error
TRUNCATE idem.job_log;
SELECT outcome FROM idem_enqueue('silent');
SELECT idem_fail(job_id, token, dead => true) FROM idem_fetch('silent');
SELECT run(c) AS retried FROM commands(idem_report(), 'dead') AS c WHERE c ~ 'last_error IS NULL';

--
-- the last 24 hours
--
TRUNCATE idem.keys, idem.jobs, idem.job_log, idem.queues;
SELECT idem_queue_set('kept', keep => '10 days');
CREATE FUNCTION work(ago interval) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM set_config('idem.clock_offset', format('%s s', - extract(epoch FROM ago)::integer), true);
	PERFORM idem_claim('key ' || ago, ttl => '10 days');
	PERFORM idem_enqueue('kept'), idem_enqueue('kept');
	PERFORM idem_complete(job_id, token) FROM idem_fetch('kept');
	PERFORM idem_fail(job_id, token, dead => true) FROM idem_fetch('kept');
END
$$;
SELECT work('0 h'), work('2 h'), work('22 h'), work('25 h');
SELECT count(*) AS hours, sum(done) AS done, sum(dead) AS dead, sum(created) AS created, min(hour) = max(hour) - interval '23 h' AS is_a_day FROM idem_internal.report_hours;
SELECT trim(l) AS line FROM lines(section(idem_report(), 'trends')) AS l;
SELECT count(*) AS bars FROM regexp_matches(section(idem_report(), 'trends'), '<rect class="bar"', 'g');

-- pause
SELECT idem_pause('kept');
SELECT section(idem_report(), 'queues') ~ '<td class="w">kept <span class="badge warn">paused</span></td>' AS is_shown;

-- of each queue the job that has been due for the longest time, if that is more than a minute
SELECT job_id FROM idem_enqueue('waits', run_at => idem_clock() - interval '1 h') \gset
SELECT FROM idem_enqueue('waits', run_at => idem_clock() - interval '59 min') AS a, idem_enqueue('soon') AS b;
SELECT queue, job_id = :job_id AS oldest, due_for > '1 h' AS since_due FROM idem_internal.report_waiting WHERE queue = 'waits';
-- a role that may ask idem_why about every job sees the reasons, with their commands
SELECT regexp_replace(trim(l), '\d+ s |\d+ min \d+ s', 'N', 'g') AS line FROM lines(substring(idem_report() FROM 'Due for more.*?</table>')) AS l;
SELECT idem_pause('waits');
SET ROLE idem_report_admin;
SELECT c AS command FROM commands(idem_report(), 'queues') AS c;
-- another one sees the command that asks
SET ROLE idem_report_monitor;
SELECT c = format('SELECT * FROM pg_catalog.idem_why(%s);', :job_id) AS asks FROM commands(idem_report(), 'queues') AS c;
SET ROLE idem_report_pg_monitor;
SELECT c = format('SELECT * FROM pg_catalog.idem_why(%s);', :job_id) AS asks FROM commands(idem_report(), 'queues') AS c;
RESET ROLE;
SELECT run(c) FROM commands(idem_report(), 'queues') AS c;
SELECT paused_at IS NULL AS resumed FROM idem.queues WHERE queue = 'waits';
-- an open transaction in the way, with a hostile name; if it is left behind, it must not stop the rest
SET lock_timeout = '10 s';
SELECT idem_cancel(job_id) FROM idem.jobs WHERE queue = 'waits';
SET idem.clock_offset = '-1 h';
SELECT job_id FROM idem_enqueue('waits', key => 'k') \gset
RESET idem.clock_offset;
BEGIN;
SELECT outcome FROM idem_enqueue('waits', key => 'k');
PREPARE TRANSACTION '<script>captured=1</script>';
SELECT substring(idem_report() FROM '<b>held</b>.*?</div>') ~ '^<b>held</b> for \d+ s: An open transaction has enqueued a duplicate, which the job has absorbed. It is the prepared transaction &lt;script&gt;captured=1&lt;/script&gt;.<pre>ROLLBACK PREPARED &#39;&lt;script&gt;captured=1&lt;/script&gt;&#39;;</pre></div>$' AS is_shown;
SELECT c FROM commands(idem_report(), 'queues') AS c \gexec
SELECT reason FROM idem_why(:job_id);
SELECT bool_and(idem_cancel(job_id)) AS cancelled FROM idem.job_status WHERE queue = 'waits' AND state = 'waiting';
SELECT section(idem_report(), 'queues') ~ 'Due for more' AS is_shown;

-- keys that are leased for more than a minute, with the command that tells who holds them
SET idem.clock_offset = '-2 min';
SELECT token FROM idem_lease('long', '1 h', worker => 'w') \gset
RESET idem.clock_offset;
SELECT status FROM idem_lease('short', '1 h', worker => 'w');
SELECT worker, held_for BETWEEN '2 min' AND '3 min' AS since_leased, stuck_for < '0' AS is_live FROM idem_internal.report_leases WHERE token = :token;
SELECT count(*) FROM commands(idem_report(), 'keys') AS c;
SELECT section(idem_report(), 'keys') ~ 'long' AS shows_key;
SELECT count(*) FROM commands(idem_report(), 'decisions') AS c;
BEGIN;
SELECT idem_fence('long', :token);
SELECT replace(c, 'h.*', 'string_agg(h.kind, '', '' ORDER BY h.kind)') AS ask FROM commands(idem_report(), 'keys') AS c \gset
SELECT run(:'ask');
COMMIT;
SELECT idem_finish('long', '1', :token);
SELECT section(idem_report(), 'keys') ~ 'Leased for more' AS is_shown;

-- every function of the report is in the sets admin and monitor, and needs no privileges of its owner
SELECT p.proname FROM pg_proc AS p
 WHERE p.proname LIKE 'idem\_report%'
   AND (p.prosecdef OR NOT has_function_privilege('idem_report_pg_monitor', p.oid, 'EXECUTE')
		OR NOT has_function_privilege('idem_report_monitor', p.oid, 'EXECUTE')
		OR NOT has_function_privilege('idem_report_admin', p.oid, 'EXECUTE'));

\connect :home
SET client_min_messages = warning;
DROP DATABASE "<script>captured=1</script>""'&amp;";
DROP ROLE idem_report_admin, idem_report_monitor, idem_report_pg_monitor, idem_report_app, idem_report_team, "<script>captured=1</script>""'&amp;%s";
