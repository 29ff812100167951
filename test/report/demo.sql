-- test/report/demo.sql: a day in the life of a shop, for the picture of idem_report()
--
-- Past hours are made with idem.clock_offset.  No number is random.
\set ON_ERROR_STOP 1
SET client_min_messages = warning;
CREATE EXTENSION idem;
CREATE ROLE billing;
CREATE ROLE storefront;
SELECT pg_catalog.idem_grant(r, 'app') FROM unnest('{billing,storefront}'::text[]) AS r;
GRANT billing TO storefront;
SELECT pg_catalog.idem_queue_set(q, keep => '2 days', max_attempts => 5, backoff => '1 min')
  FROM unnest('{mail,invoice,index,webhook}'::text[]) AS q;
SELECT pg_catalog.idem_queue_set('invoice', owner => 'billing');
SELECT pg_catalog.idem_queue_set('thumbnail', if_running => 'rerun', dedup => 'until_executed');

-- how busy the shop is at an hour of the day, 0 to 100
CREATE FUNCTION busy(at timestamptz) RETURNS integer LANGUAGE sql AS $$
	SELECT (ARRAY[12, 8, 5, 4, 4, 7, 15, 28, 45, 60, 72, 80, 88, 84, 78, 76, 82, 90, 100, 96, 80, 58, 36, 22])[extract(hour FROM at)::integer + 1]
$$;

-- an hour, so many hours ago: claims with duplicates, and jobs that end
CREATE PROCEDURE an_hour(ago integer) LANGUAGE plpgsql AS $$
DECLARE
	n integer := busy(clock_timestamp() - ago * interval '1 hour');
	job record;
BEGIN
	PERFORM set_config('idem.clock_offset', format('%s s', - ago * 3600), true);
	FOR i IN 1 .. n LOOP
		PERFORM pg_catalog.idem_call(format('charge:%s-%s', ago, i), 'charge_card', '{}', scope => 'checkout', ttl => '3 days');
		IF i % 4 = 0 THEN
			PERFORM pg_catalog.idem_call(format('charge:%s-%s', ago, i), 'charge_card', '{}', scope => 'checkout', ttl => '3 days');
		END IF;
		IF i % 3 = 0 THEN
			PERFORM pg_catalog.idem_call(format('evt_%s_%s', ago, i), 'charge_card', '{}', scope => 'payment webhooks', ttl => '3 days');
		END IF;
		PERFORM pg_catalog.idem_enqueue(q, jsonb_build_object('order', ago * 1000 + i), format('order:%s', ago * 1000 + i / 2))
		   FROM unnest('{mail,index,webhook}'::text[]) AS q;
	END LOOP;
	FOR job IN SELECT f.* FROM unnest('{mail,index,webhook}'::text[]) AS q, pg_catalog.idem_fetch(q, 100, lease => '1 min', worker => 'worker-a') AS f LOOP
		IF job.queue = 'webhook' AND job.job_id % 17 = 0 THEN
			PERFORM pg_catalog.idem_fail(job.job_id, job.token, 'HTTP 410 Gone: https://example.com/hooks/orders', dead => true);
		ELSIF job.queue = 'mail' AND job.job_id % 41 = 0 THEN
			PERFORM pg_catalog.idem_fail(job.job_id, job.token, E'550 5.1.1 mailbox does not exist\nretrying will not help', dead => true);
		ELSE
			PERFORM pg_catalog.idem_complete(job.job_id, job.token);
		END IF;
	END LOOP;
END
$$;
CREATE FUNCTION charge_card(payload jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '{"ok": true}'::jsonb $$;
DO $$
BEGIN
	FOR ago IN REVERSE 23 .. 0 LOOP
		CALL an_hour(ago);
	END LOOP;
END
$$;

-- what waits, is scheduled, blocked, running
SET idem.clock_offset = '-11 min';
SELECT count(idem_enqueue('index', '{}', 'product:' || i)) FROM generate_series(1, 214) AS i;
SELECT count(idem_enqueue('invoice', jsonb_build_object('invoice', 7000 + i), 'invoice:' || 7000 + i)) FROM generate_series(1, 9) AS i;
SELECT count(idem_enqueue('thumbnail', '{}', 'image:' || i)) FROM generate_series(1, 3) AS i;
SELECT job_id FROM idem_fetch('invoice', 1, lease => '5 min', worker => 'billing-7f4c');
SELECT pg_catalog.idem_pause('index');
SET idem.clock_offset = '-95 s';
SELECT count(idem_enqueue('mail', jsonb_build_object('order', 90000 + i), 'order:' || 90000 + i)) FROM generate_series(1, 38) AS i;
SELECT job_id FROM idem_fetch('thumbnail', 3, lease => '1 h', worker => 'gpu-1');
SET idem.clock_offset = '-8 s';
SELECT count(idem_enqueue('thumbnail', '{}', 'image:' || i)) FROM generate_series(1, 3) AS i;
SELECT count(idem_enqueue('webhook', '{}', delay => '10 min')) FROM generate_series(1, 12) AS i;
SELECT job_id FROM idem_fetch('mail', 2, lease => '5 min', worker => 'mailer-2');
RESET idem.clock_offset;

-- leases: live, parked, exhausted
SET idem.clock_offset = '-3 h';
SET ROLE billing;
SELECT status FROM idem_lease('payout:2211', '30 s', worker => 'payout-1', on_expiry => 'park', scope => 'payouts');
SELECT status FROM idem_lease('payout:2212', '30 s', worker => 'payout-1', max_attempts => 1, scope => 'payouts');
RESET ROLE;
RESET idem.clock_offset;
SET ROLE billing;
SELECT status FROM idem_lease('payout:2213', '10 min', worker => 'payout-2', scope => 'payouts');
RESET ROLE;
