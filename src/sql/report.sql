/* src/sql/report.sql: idem_report(), one HTML page about the current database */

/*
 * H2: the page shows no key and no payload unless the caller asks for them, and none
 * that the caller could not read otherwise; every value in it is escaped.
 *
 * idem_report_html() is the only function that puts a value into HTML, and it escapes
 * each of them, also characters that could rearrange what a browser shows.  Everything that is concatenated with || has come out of it, or is a
 * literal of this file.
 *
 * The functions run with the privileges of the caller.
 *
 * The functions are STABLE: all sections read with the snapshot of the statement that
 * calls idem_report().  No section has more than 50 rows; each says how many there are.
 * Commands name their functions and operators with their schema, as H1 demands of the
 * doctor.
 */

/* HTML */

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_html(template text, VARIADIC arguments text[])
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
	SELECT format(template, VARIADIC array_agg(
				replace(replace(replace(replace(replace(idem_visible(a.value),
					'&', '&amp;'), '<', '&lt;'), '>', '&gt;'), '"', '&quot;'), '''', '&#39;')
				ORDER BY a.ord))
	  FROM unnest(arguments) WITH ORDINALITY AS a (value, ord);
END;
COMMENT ON FUNCTION idem_internal.idem_report_html IS
	'for idem_report(): put values into a template for format(), each of them escaped for HTML, its control and bidirectional characters as escapes';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_number(value numeric)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN to_char(value, 'FM999,999,999,999,999,990');
COMMENT ON FUNCTION idem_internal.idem_report_number IS
	'for idem_report(): a number with a comma between thousands';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_cells(VARIADIC numbers numeric[])
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
	SELECT string_agg(CASE
				WHEN n.value IS NULL THEN '<td class="n zero">&ndash;</td>'
				WHEN n.value = 0 THEN '<td class="n zero">0</td>'
				ELSE idem_internal.idem_report_html('<td class="n">%s</td>', idem_internal.idem_report_number(n.value))
				END, '' ORDER BY n.ord)
	  FROM unnest(numbers) WITH ORDINALITY AS n (value, ord);
END;
COMMENT ON FUNCTION idem_internal.idem_report_cells IS
	'for idem_report(): cells of a table with numbers';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_age(value interval)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
	SELECT CASE
		   WHEN s.s < 60 THEN format('%s s', s.s)
		   WHEN s.s < 3600 THEN format('%s min %s s', s.s / 60, s.s % 60)
		   WHEN s.s < 86400 THEN format('%s h %s min', s.s / 3600, s.s % 3600 / 60)
		   ELSE format('%s d %s h', s.s / 86400, s.s % 86400 / 3600)
		   END
	  FROM (SELECT GREATEST(0, trunc(extract(epoch FROM value)))::bigint AS s) AS s
	 WHERE value IS NOT NULL;
END;
COMMENT ON FUNCTION idem_internal.idem_report_age IS
	'for idem_report(): a time span in its two largest units';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_table(heads text[], body text, shown bigint, total bigint, nothing text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
	SELECT CASE
		   WHEN body IS NULL THEN idem_internal.idem_report_html('<p class="nothing">%s</p>', nothing)
		   ELSE COALESCE('<div class="scroll" tabindex="0"><table><thead><tr>'
				|| (SELECT string_agg(CASE
								WHEN h.name LIKE '#%' THEN idem_internal.idem_report_html('<th scope="col" class="n">%s</th>', substr(h.name, 2))
								ELSE idem_internal.idem_report_html('<th scope="col">%s</th>', h.name)
								END, '' ORDER BY h.ord)
					  FROM unnest(heads) WITH ORDINALITY AS h (name, ord)
					 WHERE h.name IS NOT NULL)
				|| '</tr></thead><tbody>' || body || '</tbody></table></div>', body)
				|| CASE WHEN shown < total
						THEN idem_internal.idem_report_html('<p class="more">Only the first %s of %s are shown.</p>', idem_internal.idem_report_number(shown), idem_internal.idem_report_number(total))
						ELSE '' END
		   END;
END;
COMMENT ON FUNCTION idem_internal.idem_report_table IS
	'for idem_report(): a table around rows of HTML; a head that begins with # is that of numbers, a null head is left out; a list if heads is null; without rows, the text in nothing';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_chart(title text, hours timestamp with time zone[], bars bigint[], tops bigint[], units text[])
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
	WITH b AS (
		SELECT h.ord - 1 AS x,
			   to_char(h.hour, 'HH24:MI') AS label,
			   h.bar,
			   COALESCE(h.top, 0) AS top,
			   GREATEST(1, max(h.bar + COALESCE(h.top, 0)) OVER ()) AS highest
		  FROM ROWS FROM (unnest(hours), unnest(bars), unnest(tops)) WITH ORDINALITY AS h (hour, bar, top, ord))
	SELECT idem_internal.idem_report_html('<figure><figcaption><b>%s</b> %s</figcaption>', title,
				idem_internal.idem_report_number(sum(b.bar)) || ' ' || units[1]
				|| CASE WHEN tops IS NOT NULL THEN ', ' || idem_internal.idem_report_number(sum(b.top)) || ' ' || units[2] ELSE '' END)
		   || idem_internal.idem_report_html('<svg viewBox="0 0 480 142" role="img" aria-label="%s"><path class="axis" d="M0 14.5h480M0 122.5h480"/>', title)
		   || idem_internal.idem_report_html('<text x="0" y="10">%s</text>', idem_internal.idem_report_number(max(b.highest)))
		   || string_agg(
				idem_internal.idem_report_html('<g><title>%s: %s %s%s</title><rect class="room" x="%s" y="14" width="20" height="108"/>',
					b.label, idem_internal.idem_report_number(b.bar), units[1],
					CASE WHEN tops IS NOT NULL THEN format(', %s %s', idem_internal.idem_report_number(b.top), units[2]) END,
					(b.x * 20)::text)
				|| idem_internal.idem_report_html('<rect class="bar" x="%s" y="%s" width="14" height="%s"/>',
					(b.x * 20 + 3)::text, round(122 - 108.0 * b.bar / b.highest, 1)::text, round(108.0 * b.bar / b.highest, 1)::text)
				|| CASE WHEN b.top > 0
						THEN idem_internal.idem_report_html('<rect class="top" x="%s" y="%s" width="14" height="%s"/>',
							(b.x * 20 + 3)::text, round(122 - 108.0 * (b.bar + b.top) / b.highest, 1)::text,
							round(108.0 * b.top / b.highest, 1)::text)
						ELSE '' END
				|| CASE WHEN b.x % 6 = 0 THEN idem_internal.idem_report_html('<text x="%s" y="138">%s</text>', (b.x * 20 + 3)::text, b.label) ELSE '' END
				|| '</g>', '' ORDER BY b.x)
		   || '</svg></figure>'
	  FROM b;
END;
COMMENT ON FUNCTION idem_internal.idem_report_chart IS
	'for idem_report(): a chart of 24 hours in SVG, with bars, and on top of them others if tops is not null; units name the two';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_style()
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '
:root { color-scheme: light dark;
  --page: #f7f7f5; --card: #fff; --text: #1d2125; --soft: #5b646d; --line: #e3e5e7; --code: #f3f4f4; --blue: #33658f;
  --ok: #1b6b3e; --ok-bg: #e2f2e8; --warn: #7a5200; --warn-bg: #fbefd2; --fail: #a11d1d; --fail-bg: #fbe3e2; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1b1f23; --text: #e3e7ea; --soft: #9ba5ae; --line: #2d333a; --code: #23282e; --blue: #77abd9;
  --ok: #8ed5a9; --ok-bg: #18321f; --warn: #efc56f; --warn-bg: #392d11; --fail: #ffa09b; --fail-bg: #411d1e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 74rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h1 small { font-size: 1rem; font-weight: 500; color: var(--soft); letter-spacing: 0; margin-right: .6rem; }
h2 { margin: 0 0 .75rem; font-size: 1.1rem; letter-spacing: -.005em; }
h3 { margin: 1.25rem 0 .5rem; font-size: .95rem; }
p { margin: .4rem 0; max-width: 48rem; }
a { color: var(--blue); text-decoration: none; } a:hover { text-decoration: underline; }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1.4rem; margin: .5rem 0 0; padding: 0; list-style: none; color: var(--soft);
  font-size: .9rem; overflow-wrap: anywhere; }
.facts b { color: var(--text); font-weight: 500; }
nav { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: 1.1rem 0 1.25rem; font-size: .9rem; }
section { margin: 0 0 1.1rem; padding: 1.1rem 1.25rem 1.2rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .7rem; margin: 0 0 1.1rem; }
.tiles div { padding: .75rem 1rem .8rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.55rem; line-height: 1.25; font-weight: 600; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.tiles dd + dd { font-size: .8rem; font-weight: 400; letter-spacing: 0; color: var(--soft); }
.scroll { overflow-x: auto; margin: .3rem -1.25rem 0; padding: 0 1.25rem; }
.scroll:focus-visible { outline: 2px solid var(--blue); outline-offset: -2px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { padding: .3rem .9rem .3rem 0; text-align: left; font-weight: 500; font-size: .8rem; color: var(--soft); white-space: nowrap;
  vertical-align: bottom; border-bottom: 1px solid var(--line); }
td { padding: .45rem .9rem .45rem 0; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: break-word; unicode-bidi: isolate; }
tbody tr:last-child > td { border-bottom: 0; }
th:last-child, td:last-child { padding-right: 0; }
td.w { min-width: 9rem; max-width: 24rem; overflow-wrap: anywhere; }
td.k { min-width: 8rem; max-width: 18rem; overflow-wrap: anywhere; white-space: pre-wrap; font: .85em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.t { white-space: nowrap; font-variant-numeric: tabular-nums; }
.zero { color: var(--soft); opacity: .6; }
.soft, .nothing, .more, figcaption, footer { color: var(--soft); }
.more { font-size: .85rem; }
.badge { display: inline-block; padding: 0 .5em; border-radius: 4px; font-size: .8rem; font-weight: 600; white-space: nowrap; }
.badge.ok { color: var(--ok); background: var(--ok-bg); }
.badge.warn { color: var(--warn); background: var(--warn-bg); }
.badge.fail { color: var(--fail); background: var(--fail-bg); }
pre { margin: .35rem 0 0; padding: .45rem .65rem; max-width: 100%; overflow-x: auto; background: var(--code); border-radius: 5px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: .8rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; -webkit-user-select: all; user-select: all; }
pre.error { -webkit-user-select: text; user-select: text; margin: .3rem 0 .4rem; padding: 0 0 0 .65rem; background: none; border-left: 2px solid var(--line); border-radius: 0; font-size: .85rem; }
.finding { padding: .6rem 0; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
.finding:first-of-type { border-top: 0; padding-top: 0; }
.finding > b { margin: 0 .6rem 0 .35rem; } .finding p { margin: .6rem 0 0; } .finding:last-of-type { padding-bottom: 0; }
.pairs { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .4rem 0 0; } .pairs dt { color: var(--soft); }
.pairs dd { margin: 0; white-space: pre-wrap; font: .85em/1.7 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { margin-bottom: .5rem; font-size: .9rem; } figcaption b { color: var(--text); font-weight: 500; margin-right: .3rem; }
svg { display: block; width: 100%; height: auto; font-size: 11px; font-variant-numeric: tabular-nums; }
svg { overflow: visible; } svg text { fill: var(--soft); } .axis { stroke: var(--line); fill: none; } .room { fill: transparent; }
.bar { fill: var(--blue); } .top { fill: var(--fail); } g:hover .bar { opacity: .75; }
footer { margin-top: 1.5rem; font-size: .85rem; }
@media (max-width: 40rem) { body { padding: 1.2rem .8rem 2rem; } section { padding: .9rem .9rem 1rem; } .scroll { margin: .3rem -.9rem 0; padding: 0 .9rem; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: .5rem; } td.w { max-width: 17rem; } svg { font-size: 18px; } }
@media print { body { padding: 0; max-width: none; background: none; font-size: 10pt; } nav { display: none; } section { break-inside: avoid-page; border: 0; padding: 0 0 .8rem; }
  .scroll { overflow: visible; margin: 0; padding: 0; } pre { border: 1px solid var(--line); } }
';
COMMENT ON FUNCTION idem_internal.idem_report_style IS 'for idem_report(): the style sheet';

/* Sections */

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_overview()
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT '<dl class="tiles">' || string_agg(idem_internal.idem_report_html('<div><dt>%s</dt><dd>%s</dd><dd>%s</dd></div>',
				t.name, COALESCE(idem_internal.idem_report_number(t.value), '?'), t.note), '' ORDER BY t.ord) || '</dl>'
	  FROM (SELECT sum(s.ready) AS ready,
				   sum(s.scheduled) AS scheduled,
				   sum(s.blocked) AS blocked,
				   sum(s.running) AS running,
				   sum(s.expired) AS expired,
				   sum(s.dead) AS dead,
				   max(s.oldest_ready) AS oldest
			  FROM idem.queue_status AS s) AS q
	 CROSS JOIN (
			SELECT count(*) FILTER (WHERE l.state = 'parked') AS parked,
				   count(*) FILTER (WHERE l.state = 'exhausted') AS exhausted
			  FROM idem_internal.report_leases AS l) AS l
	 CROSS JOIN (
			SELECT sum(s.claims) AS claims,
				   sum(s.replays + s.busy) AS duplicates
			  FROM idem.stats AS s
			 WHERE s.datname = current_database()) AS c
	 CROSS JOIN (
			SELECT sum(s.absorbed + s.replaced + s.postponed + s.rerun + s.done + s.refused) AS duplicates
			  FROM idem.queue_stats AS s
			 WHERE s.datname = current_database()) AS d
	 CROSS JOIN LATERAL (
			VALUES (1, 'Jobs ready', COALESCE(q.ready, 0), COALESCE('oldest ' || idem_internal.idem_report_age(q.oldest), 'none waits')),
				   (2, 'Jobs for later', COALESCE(q.scheduled + q.blocked, 0), format('%s blocked', idem_internal.idem_report_number(COALESCE(q.blocked, 0)))),
				   (3, 'Jobs running', COALESCE(q.running, 0), format('%s with an expired lease', idem_internal.idem_report_number(COALESCE(q.expired, 0)))),
				   (4, 'Jobs dead', COALESCE(q.dead, 0), 'in the history'),
				   (5, 'Keys to decide', l.parked + l.exhausted, format('%s parked, %s exhausted', idem_internal.idem_report_number(l.parked), idem_internal.idem_report_number(l.exhausted))),
				   (6, 'Duplicates', COALESCE(c.duplicates, 0) + d.duplicates,
					COALESCE('beside ' || idem_internal.idem_report_number(c.claims) || ' claims', 'not counted'))) AS t (ord, name, value, note);
END;
COMMENT ON FUNCTION idem_internal.idem_report_overview IS 'for idem_report(): the numbers at the top';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_health()
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT COALESCE(string_agg(
				idem_internal.idem_report_html('<div class="finding"><span class="badge %s">%s</span> <b>%s</b> %s', h.status, h.status, h."check", h.detail)
				|| CASE WHEN h.fix IS NULL THEN '' ELSE idem_internal.idem_report_html('<pre>%s</pre>', h.fix) END
				|| '</div>', '' ORDER BY h.status, h.ord) FILTER (WHERE h.status <> 'ok'),
			idem_internal.idem_report_html('<p class="nothing"><span class="badge ok">ok</span> All %s checks are ok.</p>', count(*)::text))
		   || COALESCE(idem_internal.idem_report_html('<details><summary>%s checks that are ok</summary>', (count(*) FILTER (WHERE h.status = 'ok'))::text)
				|| idem_internal.idem_report_table(ARRAY['Check', 'Status', 'Found'],
					string_agg(idem_internal.idem_report_html('<tr><td class="t">%s</td><td><span class="badge ok">ok</span></td><td class="w">%s</td></tr>', h."check", h.detail),
							   '' ORDER BY h.ord) FILTER (WHERE h.status = 'ok'),
					0, 0, 'None.')
				|| '</details>', '')
	  FROM (SELECT h."check", h.status, h.detail, h.fix, row_number() OVER () AS ord
			  FROM idem.health AS h) AS h;
END;
COMMENT ON FUNCTION idem_internal.idem_report_health IS 'for idem_report(): what idem_doctor() finds, with the commands';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_trends()
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT '<div class="charts">'
		   || idem_internal.idem_report_chart('Jobs ended per hour', array_agg(h.hour ORDER BY h.hour), array_agg(h.done ORDER BY h.hour),
								array_agg(h.dead ORDER BY h.hour), ARRAY['done', 'dead'])
		   || idem_internal.idem_report_chart('Keys claimed per hour', array_agg(h.hour ORDER BY h.hour), array_agg(h.created ORDER BY h.hour),
								NULL, ARRAY['keys'])
		   || '</div><p class="more">Jobs are counted in the history: done jobs stay there only where the queue is declared with <code>keep</code>. '
		   || 'Keys are counted as long as they are there: those of a short ttl are missing.</p>'
	  FROM idem_internal.report_hours AS h;
END;
COMMENT ON FUNCTION idem_internal.idem_report_trends IS 'for idem_report(): charts of the last 24 hours';

/*
 * idem_why() raises an error if the caller may neither use the queue nor read idem.job_status.
 * The page must not, so such a caller gets the command.
 */
-- set: monitor
CREATE FUNCTION idem_internal.idem_report_why(job_id bigint)
RETURNS text
LANGUAGE sql STABLE PARALLEL UNSAFE
BEGIN ATOMIC
	SELECT string_agg(idem_internal.idem_report_html('<div><b>%s</b>%s %s', w.reason,
								' for ' || idem_internal.idem_report_age(idem_clock() - w.since) || ':', w.detail)
				|| CASE WHEN w.fix IS NULL THEN '' ELSE idem_internal.idem_report_html('<pre>%s</pre>', w.fix) END
				|| '</div>', '' ORDER BY w.ord)
	  FROM idem_why(job_id) WITH ORDINALITY AS w (reason, detail, since, pid, fix, ord);
END;
COMMENT ON FUNCTION idem_internal.idem_report_why IS 'for idem_report(): the reasons of idem_why(), each with its command';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_queues()
RETURNS text
LANGUAGE sql STABLE PARALLEL UNSAFE
BEGIN ATOMIC
	SELECT idem_internal.idem_report_table(ARRAY['Queue', '#Ready', '#Oldest', '#Scheduled', '#Blocked', '#Running', '#Expired', '#Dead', '#Done per hour', '#Failed', 'Owner'],
				string_agg(idem_internal.idem_report_html('<tr><td class="w">%s', q.queue)
					|| CASE WHEN q.paused THEN ' <span class="badge warn">paused</span>' ELSE '' END || '</td>'
					|| idem_internal.idem_report_cells(q.ready)
					|| idem_internal.idem_report_html('<td class="n">%s</td>', idem_internal.idem_report_age(q.oldest_ready))
					|| idem_internal.idem_report_cells(q.scheduled, q.blocked, q.running, q.expired, q.dead,
						round(c.completed * 3600 / GREATEST(3600, extract(epoch FROM clock_timestamp() - c.stats_reset))))
					|| idem_internal.idem_report_html('<td class="n">%s</td><td class="w">%s</td></tr>',
						to_char(100.0 * c.failed / NULLIF(c.fetched, 0), 'FM990.0%'), q.owner::text),
					'' ORDER BY q.ord),
				count(*), max(q.total), 'No queues: no job is there, and none was declared.')
		   || CASE WHEN count(q.queue) = 0 THEN ''
			  ELSE COALESCE(idem_internal.idem_report_html('<p class="more">Rates since %s: completed jobs per hour (within the first hour: so far), and the part of the attempts that failed.</p>',
								to_char(min(c.stats_reset), 'YYYY-MM-DD HH24:MI TZH:TZM')),
							'<p class="more">No rates: nothing was counted, because the library is not preloaded or the queues were not used since the last reset.</p>') END
		   || COALESCE((
				SELECT '<h3>Due for more than a minute</h3>'
					   || idem_internal.idem_report_table(ARRAY['Queue', '#Job', '#Due for', 'Why does it not run?'],
							string_agg(idem_internal.idem_report_html('<tr><td class="w">%s</td><td class="n">%s</td><td class="n">%s</td><td>',
									w.queue, w.job_id::text, idem_internal.idem_report_age(w.due_for))
								|| CASE WHEN w.may_ask THEN idem_internal.idem_report_why(w.job_id)
								   ELSE idem_internal.idem_report_html('<pre>%s</pre>', format('SELECT * FROM pg_catalog.idem_why(%s);', w.job_id)) END
								|| '</td></tr>',
								'' ORDER BY w.due_for DESC, w.queue),
							count(*), max(w.total), '')
				  FROM (SELECT r.*, count(*) OVER () AS total,
							   has_table_privilege('idem.job_status'::regclass, 'SELECT')
							   AND has_function_privilege('idem_why(bigint)'::regprocedure, 'EXECUTE') AS may_ask
						  FROM idem_internal.report_waiting AS r
						 WHERE r.due_for > interval '1 minute'
						 ORDER BY r.due_for DESC, r.queue
						 LIMIT 50) AS w
				HAVING count(*) > 0), '')
	  FROM (SELECT s.*, count(*) OVER () AS total,
				   row_number() OVER (ORDER BY s.ready + s.running + s.expired + s.dead DESC, s.queue) AS ord
			  FROM idem.queue_status AS s
			 ORDER BY ord
			 LIMIT 50) AS q
	  LEFT JOIN idem.queue_stats AS c ON c.queue = q.queue AND c.datname = current_database();
END;
COMMENT ON FUNCTION idem_internal.idem_report_queues IS 'for idem_report(): queues, those with the most jobs first';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_running(keys boolean)
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT idem_internal.idem_report_table(ARRAY['#Job', 'Queue', 'Worker', 'Process', '#Running for', 'Lease', '#Attempt', CASE WHEN keys THEN 'Key' END, CASE WHEN keys THEN 'Payload' END],
				string_agg(idem_internal.idem_report_html('<tr><td class="n">%s</td><td class="w">%s</td><td class="w">%s</td><td class="t">%s</td><td class="n">%s</td>',
						j.job_id::text, j.queue, j.worker, p.pids, idem_internal.idem_report_age(j.running_for))
					|| CASE WHEN j.state = 'expired'
							THEN idem_internal.idem_report_html('<td class="t"><span class="badge warn">expired</span> %s ago</td>', idem_internal.idem_report_age(- j.lease_left))
							ELSE idem_internal.idem_report_html('<td class="t">%s left</td>', idem_internal.idem_report_age(j.lease_left)) END
					|| idem_internal.idem_report_html('<td class="n">%s of %s</td>', j.attempt::text, j.max_attempts::text)
					|| CASE WHEN keys THEN idem_internal.idem_report_html('<td class="k">%s</td><td class="k">%s</td>', j.key, left(j.payload::text, 200)) ELSE '' END
					|| '</tr>',
					'' ORDER BY j.running_for DESC, j.job_id),
				count(*), (SELECT count(*) FROM idem_internal.report_jobs AS r WHERE r.state <> 'dead'), 'No job is leased.')
	  FROM (SELECT *
			  FROM idem_internal.report_jobs AS r
			 WHERE r.state <> 'dead'
			 ORDER BY r.running_for DESC, r.job_id
			 LIMIT 50) AS j
	 CROSS JOIN LATERAL (
			SELECT CASE WHEN count(*) <= 3 THEN string_agg(a.pid::text, ', ' ORDER BY a.pid)
				   ELSE format('%s sessions', count(*)) END AS pids
			  FROM pg_stat_activity AS a
			 WHERE a.datname = current_database()
			   AND a.application_name = j.worker) AS p;
END;
COMMENT ON FUNCTION idem_internal.idem_report_running IS 'for idem_report(): jobs that are leased, the longest first';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_dead(keys boolean)
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT idem_internal.idem_report_table(NULL,
				string_agg(idem_internal.idem_report_html('<div class="finding"><span class="badge fail">%s dead</span> <b>%s</b> <span class="soft">from %s to %s</span><pre class="error">%s</pre>Retry them:<pre>%s</pre></div>',
						idem_internal.idem_report_number(d.jobs), d.queue,
						to_char(d.first_at, 'YYYY-MM-DD HH24:MI'), to_char(d.last_at, 'YYYY-MM-DD HH24:MI'),
						CASE WHEN NOT d.may_read THEN '(errors are not shown to this role)' ELSE COALESCE(d.error, '(no error was given)') END,
						format('SELECT pg_catalog.count(*) FILTER (WHERE pg_catalog.idem_retry(job_id)) AS retried FROM idem.job_status WHERE state OPERATOR(pg_catalog.=) ''dead'' AND queue OPERATOR(pg_catalog.=) %s%s;',
							idem_visible_literal(d.queue),
							CASE
							WHEN NOT d.may_read THEN ''
							WHEN d.error IS NULL THEN ' AND last_error IS NULL'
							ELSE ' AND pg_catalog.left(last_error, 200) OPERATOR(pg_catalog.=) ' || idem_visible_literal(d.error)
							END)),
					'' ORDER BY d.jobs DESC, d.queue, d.error),
				count(*), (SELECT count(*) FROM idem_internal.report_dead), 'No dead jobs.')
		   || CASE WHEN keys AND count(d.queue) > 0 THEN (
				SELECT '<h3>The last dead jobs</h3>'
					   || idem_internal.idem_report_table(ARRAY['#Job', 'Queue', '#Attempt', 'Key', 'Payload', 'Error'],
							string_agg(idem_internal.idem_report_html('<tr><td class="n">%s</td><td class="w">%s</td><td class="n">%s of %s</td><td class="k">%s</td><td class="k">%s</td><td class="k">%s</td></tr>',
									j.job_id::text, j.queue, j.attempt::text, j.max_attempts::text, j.key, left(j.payload::text, 200), left(j.error, 200)),
								'' ORDER BY j.ended_at DESC, j.job_id),
							count(*), (SELECT count(*) FROM idem_internal.report_jobs AS r WHERE r.state = 'dead'), 'No dead jobs.')
				  FROM (SELECT *
						  FROM idem_internal.report_jobs AS r
						 WHERE r.state = 'dead'
						 ORDER BY r.ended_at DESC, r.job_id
						 LIMIT 50) AS j) ELSE '' END
	  FROM (SELECT r.*, has_table_privilege('idem.job_status'::regclass, 'SELECT') AS may_read
			  FROM idem_internal.report_dead AS r
			 ORDER BY r.jobs DESC, r.queue, r.error
			 LIMIT 50) AS d;
END;
COMMENT ON FUNCTION idem_internal.idem_report_dead IS 'for idem_report(): dead jobs by error, with the command that retries them';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_lease(token bigint, key_hash bigint, state text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN format(' WHERE token OPERATOR(pg_catalog.=) %L AND pg_catalog.idem_key_hash(key, scope) OPERATOR(pg_catalog.=) %L AND state OPERATOR(pg_catalog.=) %L;',
	token, key_hash, state);
COMMENT ON FUNCTION idem_internal.idem_report_lease IS 'for idem_report(): the end of a command that finds a lease without naming its key';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_decisions(keys boolean)
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT idem_internal.idem_report_table(NULL,
				string_agg(idem_internal.idem_report_html('<div class="finding"><span class="badge warn">%s</span> <b>for %s</b> attempt %s%s, last worker %s, owner %s',
						l.state, idem_internal.idem_report_age(l.stuck_for), l.attempt::text, ' of ' || l.max_attempts, COALESCE(l.worker, '(no name)'), l.owner::text)
					|| CASE WHEN keys THEN idem_internal.idem_report_html('<dl class="pairs"><dt>Key</dt><dd>%s</dd><dt>Scope</dt><dd>%s</dd></dl>',
								l.key, COALESCE(NULLIF(l.scope, ''), '(none)')) ELSE '' END
					|| idem_internal.idem_report_html('<p>%s</p><pre>%s</pre><p>%s</p><pre>%s</pre></div>',
						CASE WHEN l.state = 'parked' THEN 'The work happened: store its result.' ELSE 'Stop for good: store a result that says so.' END,
						format('SELECT pg_catalog.idem_finish(key, %L, token, scope)%s', '{"decided": "by an operator"}', l.place),
						CASE WHEN l.state = 'parked' THEN 'The work did not happen: run it again.' ELSE 'Allow three more attempts.' END,
						CASE WHEN l.state = 'parked'
							 THEN format('SELECT pg_catalog.idem_release(key, token, scope)%s', l.place)
							 /* the lease of this command is an attempt, too */
							 ELSE format('SELECT pg_catalog.idem_release(key, (pg_catalog.idem_lease(key, ''1 s'', max_attempts => %s, scope => scope)).token, scope)%s',
										 l.attempt + 4, l.place) END),
					'' ORDER BY l.stuck_for DESC, l.token, l.key_hash),
				count(*), (SELECT count(*) FROM idem_internal.report_leases AS r WHERE r.state <> 'live'), 'No key is parked or exhausted.')
		   || CASE WHEN count(l.token) = 0 THEN '' ELSE
				'<p class="more">Ask the other side first whether the work happened. The commands find the key by its token and its hash; they need the privileges of its owner. If a worker or another operator was faster, they change nothing.</p>' END
	  FROM (SELECT r.*,
				   ' FROM idem.lease_status' || idem_internal.idem_report_lease(r.token, r.key_hash, r.state) AS place
			  FROM idem_internal.report_leases AS r
			 WHERE r.state <> 'live'
			 ORDER BY r.stuck_for DESC, r.token, r.key_hash
			 LIMIT 50) AS l;
END;
COMMENT ON FUNCTION idem_internal.idem_report_decisions IS 'for idem_report(): keys that are parked or exhausted, with both decisions as commands';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_duplicates()
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT '<h3>Claims</h3>'
		   || (SELECT idem_internal.idem_report_table(ARRAY['#Claims', '#Replays', '#Busy', '#Held again', '#Resumed', '#Takeovers', '#Other request', '#Stale tokens', 'Counted since'],
						string_agg('<tr>' || idem_internal.idem_report_cells(s.claims, s.replays, s.busy, s.held, s.resumed, s.takeovers, s.mismatches, s.stale_tokens)
							|| idem_internal.idem_report_html('<td class="t">%s</td></tr>', to_char(s.stats_reset, 'YYYY-MM-DD HH24:MI TZH:TZM')), ''),
						1, 1, 'No claim was counted.')
				 FROM idem.stats AS s
				WHERE s.datname = current_database())
		   || '<h3>Jobs, by queue</h3>'
		   || (SELECT idem_internal.idem_report_table(ARRAY['Queue', '#Enqueued', '#Absorbed', '#Replaced', '#Postponed', '#Rerun', '#Already done', '#Refused'],
						string_agg(idem_internal.idem_report_html('<tr><td class="w">%s</td>', s.queue)
							|| idem_internal.idem_report_cells(s.enqueued, s.absorbed, s.replaced, s.postponed, s.rerun, s.done, s.refused) || '</tr>',
							'' ORDER BY s.ord),
						count(*), max(s.total), 'No enqueue was counted.')
				 FROM (SELECT s.*, count(*) OVER () AS total,
							  row_number() OVER (ORDER BY s.absorbed + s.replaced + s.postponed + s.rerun + s.done + s.refused DESC, s.queue) AS ord
						 FROM idem.queue_stats AS s
						WHERE s.datname = current_database()
						ORDER BY ord
						LIMIT 50) AS s)
		   || '<h3>Keys, by scope</h3>'
		   || (SELECT idem_internal.idem_report_table(ARRAY['Scope', '#Keys', '#Finished', '#Leased now', '#Leased more than once'],
						string_agg(idem_internal.idem_report_html('<tr><td class="k">%s</td>',
								CASE WHEN s.scope IS NULL THEN '(not shown to this role)' WHEN s.scope = '' THEN '(none)' ELSE s.scope END)
							|| idem_internal.idem_report_cells(s.keys, s.finished, s.live, s.repeated) || '</tr>',
							'' ORDER BY s.ord),
						count(*), max(s.total), 'No keys.')
				 FROM (SELECT s.*, count(*) OVER () AS total, row_number() OVER (ORDER BY s.repeated DESC, s.keys DESC, s.scope) AS ord
						 FROM idem_internal.report_scopes AS s
						ORDER BY ord
						LIMIT 50) AS s)
		   || '<p class="more">Answers to claims are counted for the whole database, not for each scope.</p>';
END;
COMMENT ON FUNCTION idem_internal.idem_report_duplicates IS 'for idem_report(): duplicates of claims, of jobs by queue, and keys by scope';

-- set: monitor
CREATE FUNCTION idem_internal.idem_report_keys()
RETURNS text
LANGUAGE sql STABLE PARALLEL RESTRICTED
BEGIN ATOMIC
	SELECT (SELECT idem_internal.idem_report_table(ARRAY['Owner', 'State', '#Keys', '#Oldest', '#Next expiry'],
						string_agg(idem_internal.idem_report_html('<tr><td class="w">%s</td><td>%s</td><td class="n">%s</td><td class="n">%s</td><td class="n">%s</td></tr>',
							s.owner::text, s.status, idem_internal.idem_report_number(s.keys), idem_internal.idem_report_age(s.oldest),
							CASE WHEN s.next_expiry < interval '0' THEN idem_internal.idem_report_age(- s.next_expiry) || ' ago' ELSE 'in ' || idem_internal.idem_report_age(s.next_expiry) END),
							'' ORDER BY s.ord),
						count(*), max(s.total), 'No keys.')
			  FROM (SELECT s.*, count(*) OVER () AS total, row_number() OVER (ORDER BY s.keys DESC, s.owner::text, s.status) AS ord
					  FROM idem.key_summary AS s
					 ORDER BY ord
					 LIMIT 50) AS s)
		   || COALESCE((
				SELECT '<h3>Leased for more than a minute</h3>'
					   || idem_internal.idem_report_table(ARRAY['#Leased for', '#Time left', 'Worker', 'Owner', '#Attempt', 'Who holds the key?'],
							string_agg(idem_internal.idem_report_html('<tr><td class="n">%s</td><td class="n">%s</td><td class="w">%s</td><td class="w">%s</td><td class="n">%s</td><td><pre>SELECT h.* FROM idem.lease_status CROSS JOIN LATERAL pg_catalog.idem_holder(key, scope) AS h%s</pre></td></tr>',
									idem_internal.idem_report_age(l.held_for), idem_internal.idem_report_age(- l.stuck_for), l.worker, l.owner::text, l.attempt::text,
									idem_internal.idem_report_lease(l.token, l.key_hash, l.state)),
								'' ORDER BY l.held_for DESC, l.token, l.key_hash),
							count(*), max(l.total), '')
				  FROM (SELECT r.*, count(*) OVER () AS total
						  FROM idem_internal.report_leases AS r
						 WHERE r.state = 'live'
						   AND r.held_for > interval '1 minute'
						 ORDER BY r.held_for DESC, r.token, r.key_hash
						 LIMIT 50) AS l
				HAVING count(*) > 0), '')
		   || '<h3>Cleanup</h3>'
		   || (SELECT idem_internal.idem_report_table(ARRAY['Phase', '#Removed in this round', '#Left, about', 'Last round ended', 'Last error'],
						string_agg(idem_internal.idem_report_html('<tr><td>%s</td>', c.phase) || idem_internal.idem_report_cells(c.removed, c.backlog)
							|| idem_internal.idem_report_html('<td class="t">%s</td><td class="w">%s</td></tr>',
								COALESCE(to_char(c.last_finished_at, 'YYYY-MM-DD HH24:MI:SS'), 'none yet'), COALESCE(c.last_error, 'none')), ''),
						1, 1, 'The background worker has not been here: the library is not preloaded, or was loaded just now.')
				 FROM idem.cleanup_progress AS c
				WHERE c.datname = current_database());
END;
COMMENT ON FUNCTION idem_internal.idem_report_keys IS 'for idem_report(): keys by owner and state, and cleanup';

/* on large tables, JIT would compile the queries for longer than they run */
-- set: monitor
CREATE FUNCTION pg_catalog.idem_report(keys boolean DEFAULT false)
RETURNS text
LANGUAGE sql STABLE PARALLEL UNSAFE
SET jit = off
BEGIN ATOMIC
	SELECT idem_internal.idem_report_html('<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="%s">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>idem: %s</title>
<style>',
				/* psql writes the page in the encoding of the client */
				CASE
				WHEN e.encoding = 'UTF8' THEN 'utf-8'
				WHEN e.encoding ~ '^LATIN[1-4]$' THEN 'iso-8859-' || substr(e.encoding, 6)
				WHEN e.encoding = 'LATIN9' THEN 'iso-8859-15'
				WHEN e.encoding ~ '^WIN' THEN 'windows-' || substr(e.encoding, 4)
				ELSE lower(replace(e.encoding, '_', '-'))
				END,
				current_database()::text)
		   || idem_internal.idem_report_style()
		   || idem_internal.idem_report_html('</style>
</head>
<body>
<header>
<h1><small>idem</small>%s</h1>
<ul class="facts"><li>idem <b>%s</b></li><li>PostgreSQL <b>%s</b>, %s</li><li>seen by role <b>%s</b></li><li><time datetime="%s">%s</time></li></ul>
</header>
<nav>',
				current_database()::text, idem_version(), current_setting('server_version'),
				CASE WHEN pg_is_in_recovery() THEN 'standby' ELSE 'primary' END, current_user::text,
				to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), to_char(now(), 'YYYY-MM-DD HH24:MI:SS TZH:TZM'))
		   || (SELECT string_agg(idem_internal.idem_report_html('<a href="#%s">%s</a>', s.id, s.title), '' ORDER BY s.ord) || '</nav>
<main>
'
					  || CASE WHEN keys AND NOT e.may_read
							  THEN '<p><span class="badge warn">warn</span> No keys and payloads are shown: this role may not read them.</p>' ELSE '' END
					  || idem_internal.idem_report_overview()
					  || string_agg(idem_internal.idem_report_html('
<section id="%s"><h2>%s</h2>', s.id, s.title) || s.body || '</section>', '' ORDER BY s.ord)
				 FROM (VALUES (1, 'health', 'Health', idem_internal.idem_report_health()),
							  (2, 'trends', 'The last 24 hours', idem_internal.idem_report_trends()),
							  (3, 'queues', 'Queues', idem_internal.idem_report_queues()),
							  (4, 'running', 'Running jobs', idem_internal.idem_report_running(COALESCE(keys, false))),
							  (5, 'dead', 'Dead jobs', idem_internal.idem_report_dead(COALESCE(keys, false))),
							  (6, 'decisions', 'Keys that wait for a decision', idem_internal.idem_report_decisions(COALESCE(keys, false))),
							  (7, 'duplicates', 'Duplicates', idem_internal.idem_report_duplicates()),
							  (8, 'keys', 'Keys', idem_internal.idem_report_keys())) AS s (ord, id, title, body))
		   || idem_internal.idem_report_html('
</main>
<footer><p>A picture of one moment, made by idem_report(). %s A job that a transaction has fetched without a lease is not shown as running. The process of a worker is known if its session has the name of the worker as application_name.</p></footer>
</body>
</html>',
				CASE WHEN keys AND e.may_read THEN 'It shows keys and payloads: do not pass it on.'
				WHEN e.shows_text THEN 'It has no columns of keys and payloads, but the errors of jobs and the scopes of keys can quote them: read it before you pass it on.'
				ELSE 'It shows no keys, payloads, scopes and errors of jobs.' END)
	  FROM (SELECT pg_client_encoding()::text AS encoding,
				   has_table_privilege('idem.job_status'::regclass, 'SELECT') AS may_read,
				   EXISTS (SELECT FROM unnest(ARRAY['idem.job_status', 'idem.lease_status', 'idem.key_status']::regclass[]) AS v (name)
							WHERE has_table_privilege(v.name, 'SELECT')) AS shows_text) AS e;
END;
COMMENT ON FUNCTION pg_catalog.idem_report IS
	'an HTML page about this database: health, queues, jobs, keys, duplicates; with keys, it shows keys and payloads to roles that may read them';
