--
-- Arguments of the bulk functions (J20): SQLSTATE, detail and hint; nothing is changed
--
\a\pset footer off
CALL anew();
SELECT count(*) FROM idem_enqueue_many('q', '{1,2,3,4}');
SELECT job_id, token FROM idem_fetch('q', lease => '1 h') \gset
SELECT idem_cancel(4);
SELECT string_agg(concat(ctid, xmin, xmax), ' ' ORDER BY job_id) AS rows FROM (SELECT job_id, ctid, xmin, xmax FROM idem.jobs UNION ALL SELECT job_id, ctid, xmin, xmax FROM idem.job_log) AS j \gset before_

-- which jobs: numbers or a queue
SELECT * FROM fails('SELECT idem_cancel_many()');
SELECT * FROM fails($$ SELECT idem_cancel_many('{2}', 'q') $$);
SELECT * FROM fails($$ SELECT idem_cancel_many('{2}', state => 'waiting') $$);
SELECT * FROM fails($$ SELECT idem_cancel_many(state => 'waiting') $$);
SELECT state, detail FROM fails('SELECT idem_retry_many()');
SELECT state, detail FROM fails($$ SELECT idem_retry_many('{4}', 'q') $$);
SELECT state, detail FROM fails($$ SELECT idem_retry_many('{4}', state => 'dead') $$);
SELECT state, detail FROM fails('SELECT idem_fail_many()');
SELECT state, detail FROM fails(format($$ SELECT idem_fail_many('{1}', '{%s}', queue => 'q') $$, :token));
SELECT state, detail FROM fails(format($$ SELECT idem_fail_many('{1}', '{%s}', worker => 'w') $$, :token));
SELECT state, detail FROM fails(format($$ SELECT idem_fail_many('{1}', '{%s}', state => 'running') $$, :token));
SELECT * FROM fails($$ SELECT idem_fail_many(queue => 'q', tokens => '{1}') $$);
SELECT state, detail FROM fails($$ SELECT idem_snooze_many(delay => '1 h') $$);
SELECT state, detail FROM fails(format($$ SELECT idem_snooze_many('{1}', '{%s}', '1 h', queue => 'q') $$, :token));
SELECT state, detail FROM fails(format($$ SELECT idem_snooze_many('{1}', '{%s}', '1 h', state => 'running') $$, :token));
SELECT state, detail FROM fails($$ SELECT idem_snooze_many(queue => 'q', tokens => '{1}', delay => '1 h') $$);
SELECT state, detail FROM fails('SELECT idem_reschedule_many(priority => 1)');
SELECT state, detail FROM fails($$ SELECT idem_reschedule_many('{2}', priority => 1, queue => 'q') $$);
SELECT state, detail FROM fails($$ SELECT idem_reschedule_many('{2}', priority => 1, state => 'waiting') $$);

-- queue
SELECT state, message FROM fails($$ SELECT idem_cancel_many(queue => '') $$);
SELECT state, message FROM fails($$ SELECT idem_retry_many(queue => '') $$);
SELECT state, message FROM fails($$ SELECT idem_fail_many(queue => '') $$);
SELECT state, message FROM fails($$ SELECT idem_snooze_many(queue => '', delay => '1 h') $$);
SELECT state, message FROM fails(format('SELECT idem_reschedule_many(priority => 1, queue => %L)', repeat('q', 256)));

-- state
SELECT * FROM fails($$ SELECT idem_cancel_many(queue => 'q', state => 'done') $$);
SELECT * FROM fails($$ SELECT idem_retry_many(queue => 'q', state => 'done') $$);
SELECT * FROM fails($$ SELECT idem_fail_many(queue => 'q', state => 'waiting') $$);
SELECT state, detail FROM fails($$ SELECT idem_snooze_many(queue => 'q', state => 'waiting', delay => '1 h') $$);
SELECT * FROM fails($$ SELECT idem_reschedule_many(queue => 'q', state => 'running', priority => 1) $$);
SELECT state, detail FROM fails($$ SELECT idem_cancel_many(queue => 'q', state => '') $$);

-- max_jobs, also where it does not matter
SELECT * FROM fails($$ SELECT idem_cancel_many(queue => 'q', max_jobs => 0) $$);
SELECT state, detail FROM fails($$ SELECT idem_cancel_many('{2}', max_jobs => -1) $$);
SELECT state, detail FROM fails($$ SELECT idem_retry_many(queue => 'q', max_jobs => 100001) $$);
SELECT state, detail FROM fails($$ SELECT idem_fail_many(queue => 'q', max_jobs => 0) $$);
SELECT state, detail FROM fails($$ SELECT idem_snooze_many(queue => 'q', delay => '1 h', max_jobs => 0) $$);
SELECT state, detail FROM fails($$ SELECT idem_reschedule_many(queue => 'q', priority => 1, max_jobs => 0) $$);
SELECT * FROM fails($$ SELECT idem_cancel_many(queue => 'q', max_jobs => NULL) $$);

-- numbers and tokens
SELECT * FROM fails($$ SELECT idem_cancel_many('{2,NULL}') $$);
SELECT * FROM fails($$ SELECT idem_cancel_many('{{2,3}}') $$);
SELECT state, message FROM fails($$ SELECT idem_retry_many('{4,NULL}') $$);
SELECT state, message FROM fails($$ SELECT idem_reschedule_many('{2,NULL}', priority => 1) $$);
SELECT * FROM fails($$ SELECT idem_fail_many('{1}') $$);
SELECT * FROM fails(format($$ SELECT idem_fail_many('{1,2}', '{%s}') $$, :token));
SELECT state, message FROM fails($$ SELECT idem_fail_many('{1}', '{NULL}') $$);
SELECT state, message FROM fails(format($$ SELECT idem_fail_many('{NULL}', '{%s}') $$, :token));
SELECT state, message FROM fails(format($$ SELECT idem_fail_many('{1}', '{{%s}}') $$, :token));
SELECT * FROM fails($$ SELECT idem_fail_many('{1}', '{0}') $$);
SELECT state, message FROM fails(format($$ SELECT idem_fail_many('{1,2}', '{%s,-1}') $$, :token));
SELECT state, message FROM fails($$ SELECT idem_snooze_many('{1}', delay => '1 h') $$);
SELECT state, message FROM fails(format($$ SELECT idem_snooze_many('{1,2}', '{%s}', '1 h') $$, :token));
SELECT state, message FROM fails($$ SELECT idem_snooze_many('{1}', '{NULL}', '1 h') $$);

-- worker
SELECT state, message FROM fails($$ SELECT idem_fail_many(queue => 'q', worker => '') $$);
SELECT state, message FROM fails(format('SELECT idem_snooze_many(queue => %L, delay => %L, worker => %L)', 'q', '1 h', repeat('w', 256)));

-- times
SELECT state, message, detail FROM fails(format($$ SELECT idem_fail_many('{1}', '{%s}', retry_in => '-1 s') $$, :token));
SELECT state, message, detail FROM fails($$ SELECT idem_fail_many(queue => 'q', retry_in => '101 years') $$);
SELECT * FROM fails(format($$ SELECT idem_snooze_many('{1}', '{%s}') $$, :token));
SELECT state, message, detail FROM fails(format($$ SELECT idem_snooze_many('{1}', '{%s}', '-1 s') $$, :token));
SELECT state, message FROM fails($$ SELECT idem_snooze_many(queue => 'q') $$);
SELECT * FROM fails($$ SELECT idem_reschedule_many('{2}') $$);
SELECT state, message FROM fails($$ SELECT idem_reschedule_many(queue => 'q') $$);
SELECT * FROM fails($$ SELECT idem_reschedule_many('{2}', 'infinity') $$);
SELECT state, message FROM fails($$ SELECT idem_reschedule_many(queue => 'q', run_at => '-infinity') $$);

-- dead => NULL is false, and a null error is none
SELECT string_agg(concat(ctid, xmin, xmax), ' ' ORDER BY job_id) = :'before_rows' AS unchanged FROM (SELECT job_id, ctid, xmin, xmax FROM idem.jobs UNION ALL SELECT job_id, ctid, xmin, xmax FROM idem.job_log) AS j;
SELECT idem_fail_many('{1}', ARRAY[:token], NULL, NULL, NULL);
SELECT state, error FROM idem_job(1);
CALL anew();
