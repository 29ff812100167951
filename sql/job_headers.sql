-- J16: headers of jobs, defaults of a session, links of absorbed duplicates
\a\pset footer off
CALL anew();
SELECT idem_queue_set('q', lease => '1 h', keep => '1 h');

-- fetch and the history return them
SELECT outcome FROM idem_enqueue('q', '1', headers => '{"traceparent": "00-a", "tenant": 7}');
SELECT job_id, token, headers FROM idem_fetch('q') \gset
SELECT :'headers' AS headers;
SELECT headers, links FROM idem_job(:job_id);
SELECT idem_complete(:job_id, :token);
SELECT state, headers, links FROM idem_job(:job_id);
-- no headers, empty headers: none
SELECT outcome FROM idem_enqueue('q', '2');
SELECT outcome FROM idem_enqueue('q', '3', headers => '{}');
SELECT payload, headers FROM idem_fetch('q', 10) ORDER BY payload;

-- defaults: the call wins, and one job of an array can add its own
CALL anew();
SET idem.headers = '{"traceparent": "00-d", "tenant": 1}';
SELECT outcome FROM idem_enqueue('q', '1');
SELECT outcome FROM idem_enqueue('q', '2', headers => '{"tenant": 2, "user": "x"}');
SELECT outcome FROM idem_enqueue_many('q', ARRAY['3', '4', '5']::jsonb[], headers => ARRAY['{"tenant": 3}', NULL, '{}']::jsonb[]);
SELECT outcome FROM idem_enqueue_many('q', ARRAY['6']::jsonb[]);
RESET idem.headers;
SELECT outcome FROM idem_enqueue_many('q', ARRAY['7', '8']::jsonb[], headers => ARRAY[NULL, '{"tenant": 8}']::jsonb[]);
SELECT payload, headers FROM idem_fetch('q', 10, '1 h') ORDER BY payload;
-- for one transaction
BEGIN;
SET LOCAL idem.headers = ' {"a": [1, {"b": null}]} ';
SELECT outcome FROM idem_enqueue('q', '1');
COMMIT;
SELECT outcome FROM idem_enqueue('q', '2');
SELECT payload, headers FROM idem_fetch('q', 10, '1 h') ORDER BY payload;

-- the setting takes a JSON object or nothing
SELECT (fails(format('SET idem.headers = %L', v))).* FROM unnest(ARRAY['x', '[]', '1', '{', '{"a"}', '{} {}', '"{}"', ' ', '{"a": "\u0000"}']) AS v;
SET idem.headers = '';
SHOW idem.headers;
-- so does the argument
SELECT (fails(format('SELECT idem_enqueue(''q'', headers => %L)', v))).* FROM unnest(ARRAY['[]', '1', 'null', '"x"']) AS v;
SELECT (fails(format('SELECT idem_enqueue_many(''q'', ''{1,2}'', headers => %s)', v))).*
  FROM unnest(ARRAY[$$'{1}'$$, $$ARRAY['{}', '[]']::jsonb[]$$, $$ARRAY[['{}'], ['{}']]::jsonb[]$$]) AS v;
-- the limit is that of payloads, and the defaults count
SET idem.max_result_size = '1kB';
SELECT (fails($$SELECT idem_enqueue('q', headers => jsonb_build_object('a', repeat('x', 1100)))$$)).*;
SELECT set_config('idem.headers', jsonb_build_object('a', repeat('x', 600))::text, false) IS NOT NULL AS set;
SELECT (fails($$SELECT idem_enqueue('q', headers => jsonb_build_object('b', repeat('x', 600)))$$)).*;
SELECT set_config('idem.headers', jsonb_build_object('a', repeat('x', 1100))::text, false) IS NOT NULL AS set;
SELECT (fails($$SELECT idem_enqueue('q')$$)).*;
RESET idem.headers;
RESET idem.max_result_size;
SELECT count(*) FROM idem.jobs WHERE lease_until IS NULL;

-- J16: the job keeps its headers whatever a duplicate brings; the trace of the duplicate becomes a link
CALL anew();
SELECT outcome FROM idem_enqueue('q', '1', 'k', headers => '{"traceparent": "00-a", "tenant": 1}');
SELECT outcome FROM idem_enqueue('q', '2', 'k', headers => '{"traceparent": "00-b", "tenant": 2}');
SELECT outcome FROM idem_enqueue('q', '3', 'k', on_duplicate => 'replace', headers => '{"traceparent": "00-c"}');
SELECT outcome FROM idem_enqueue('q', '4', 'k', on_duplicate => 'debounce', delay => '0', headers => '{"traceparent": "00-d"}');
SELECT outcome FROM idem_enqueue('q', '5', 'k', dedup => 'until_executed', headers => '{"traceparent": "00-e"}');
SELECT payload, headers, links FROM idem.jobs;
-- no link, and J12: no row is written: the trace of the job itself, a linked one, none, no text, empty, too long
SELECT ctid AS place FROM idem.jobs \gset
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => '{"traceparent": "00-a"}');
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => '{"traceparent": "00-c"}');
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => '{"tenant": 3}');
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => '{"traceparent": 1}');
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => '{"traceparent": {"a": "00-x"}}');
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => '{"traceparent": ""}');
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => jsonb_build_object('traceparent', repeat('x', 257)));
SELECT outcome FROM idem_enqueue('q', '6', 'k');
SELECT links, ctid = :'place' AS same_row FROM idem.jobs;
-- 256 bytes are not too long; a quote and a backslash are kept
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => jsonb_build_object('traceparent', repeat('x', 256)));
SELECT outcome FROM idem_enqueue('q', '6', 'k', headers => '{"traceparent": "\"\\"}');
SELECT length(links ->> 4), links ->> 5 AS special FROM idem.jobs;
-- the first 16 stay
SELECT count(*) FROM generate_series(1, 20) AS n,
	   LATERAL idem_enqueue('q', '7', 'k', headers => jsonb_build_object('traceparent', 'n' || n)) AS e;
SELECT jsonb_array_length(links) AS n, links -> 0 AS first, links -> 15 AS last FROM idem.jobs;
-- the trace of the defaults counts
CALL anew();
SELECT outcome FROM idem_enqueue('q', '1', 'k');
SET idem.headers = '{"traceparent": "00-s"}';
SELECT outcome FROM idem_enqueue('q', '2', 'k');
SELECT outcome FROM idem_enqueue_many('q', '{3,4}', ARRAY['k', 'k'], headers => ARRAY[NULL, '{"traceparent": "00-t"}']::jsonb[]);
RESET idem.headers;
SELECT payload, headers, links FROM idem_fetch('q', lease => '1 h');
-- a running job gets no link; the follow-up job of a rerun does
SELECT outcome FROM idem_enqueue('q', '5', 'k', dedup => 'until_executed', headers => '{"traceparent": "00-u"}');
SELECT outcome FROM idem_enqueue('q', '6', 'k', dedup => 'until_executed', if_running => 'rerun', headers => '{"traceparent": "00-v"}');
SELECT outcome FROM idem_enqueue('q', '7', 'k', dedup => 'until_executed', if_running => 'rerun', headers => '{"traceparent": "00-w"}');
SELECT payload, headers, links FROM idem.jobs ORDER BY job_id;

-- headers and links survive fail, cancel and retry
CALL anew();
SELECT outcome FROM idem_enqueue('q', '1', 'k', headers => '{"traceparent": "00-a"}');
SELECT outcome FROM idem_enqueue('q', '1', 'k', headers => '{"traceparent": "00-b"}');
SELECT idem_fail(job_id, token, 'no', retry_in => '0') FROM idem_fetch('q', lease => '1 h');
SELECT attempt, headers, links FROM idem_fetch('q', lease => '1 h');
SELECT idem_cancel(1);
SELECT state, headers, links FROM idem_job(1);
SELECT idem_retry(1);
SELECT state, headers, links FROM idem_job(1);
-- a job that is kept as done, with until_expired: a duplicate adds nothing
SELECT outcome FROM idem_enqueue('e', '1', 'k', dedup => 'until_expired', key_ttl => '1 h', headers => '{"traceparent": "00-a"}');
SELECT idem_complete(job_id, token) FROM idem_fetch('e', lease => '1 h');
SELECT outcome FROM idem_enqueue('e', '1', 'k', dedup => 'until_expired', key_ttl => '1 h', headers => '{"traceparent": "00-b"}');

-- headers do not stand in the way of large payloads: both are read back
CALL anew();
SELECT outcome FROM idem_enqueue('q', to_jsonb(repeat('p', 5000)), 'k', headers => jsonb_build_object('traceparent', 'h', 'x', (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 200) AS n)));
SELECT outcome FROM idem_enqueue('q', '1', 'k', headers => '{"traceparent": "00-b"}');
SELECT length(payload #>> '{}') AS payload, length(headers ->> 'x') AS headers, links FROM idem_fetch('q', lease => '1 h');
CALL anew();
