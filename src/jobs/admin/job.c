/*
 * job.c
 *		SQL functions for a job by its number: idem_cancel, idem_retry, idem_job; by its key:
 *		idem_cancel_by_key, idem_job_by_key; and for many jobs (J20): idem_cancel_many,
 *		idem_retry_many, idem_fail_many, idem_snooze_many, idem_reschedule_many.
 *
 * They check their arguments, call the store, and form the row to return.
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "jobs/admin/jobadmin.h"

/* The most jobs of a key that one call shows, and of a queue that one call changes */
#define MAX_JOBS_OF_KEY	  10000
#define MAX_JOBS_OF_QUEUE 100000

IDEM_FUNCTION(idem_cancel);
IDEM_FUNCTION(idem_retry);
IDEM_FUNCTION(idem_job);
IDEM_FUNCTION(idem_cancel_by_key);
IDEM_FUNCTION(idem_job_by_key);
IDEM_FUNCTION(idem_cancel_many);
IDEM_FUNCTION(idem_retry_many);
IDEM_FUNCTION(idem_fail_many);
IDEM_FUNCTION(idem_snooze_many);
IDEM_FUNCTION(idem_reschedule_many);

/* Cancel or retry the job with the number in the first argument */
static bool
change_job(FunctionCallInfo fcinfo, bool (*change)(IdemTable *jobs, int64 job_id))
{
	IdemTable jobs;
	int64 job_id = idem_args_job_id(fcinfo, 0);
	bool changed;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	changed = change(&jobs, job_id);
	idem_table_close(&jobs);
	return changed;
}

Datum
idem_cancel(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_cancel_signature, "idem_cancel()");
	PG_RETURN_BOOL(change_job(fcinfo, idem_jobstore_cancel));
}

Datum
idem_retry(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_retry_signature, "idem_retry()");
	PG_RETURN_BOOL(change_job(fcinfo, idem_jobstore_retry));
}

static void
put_job(const IdemJobInfo *info, void *arg)
{
	IdemAnswer *answer = arg;

	idem_answer_int64(answer, Anum_job_result_job_id, info->job_id);
	idem_answer_text(answer, Anum_job_result_queue, info->queue);
	idem_answer_string(answer, Anum_job_result_state, info->state);
	idem_answer_text(answer, Anum_job_result_key, info->key);
	idem_answer_jsonb(answer, Anum_job_result_payload, info->payload);
	idem_answer_jsonb(answer, Anum_job_result_result, info->result);
	idem_answer_int32(answer, Anum_job_result_priority, info->priority);
	idem_answer_int32(answer, Anum_job_result_attempt, info->attempt);
	idem_answer_int32(answer, Anum_job_result_max_attempts, info->max_attempts);
	idem_answer_text(answer, Anum_job_result_worker, info->worker);
	idem_answer_text(answer, Anum_job_result_error, idem_history_last_error(info->errors));
	idem_answer_time(answer, Anum_job_result_enqueued_at, info->enqueued_at);
	if (info->ended_at == 0)
		idem_answer_time(answer, Anum_job_result_run_at, info->run_at);
	idem_answer_optional_time(answer, Anum_job_result_started_at, info->started_at);
	idem_answer_optional_time(answer, Anum_job_result_lease_until, info->lease_until);
	idem_answer_optional_time(answer, Anum_job_result_ended_at, info->ended_at);
	idem_answer_jsonb(answer, Anum_job_result_headers, info->headers);
	idem_answer_jsonb(answer, Anum_job_result_links, info->links);
	idem_answer_jsonb(answer, Anum_job_result_errors, info->errors);
	idem_answer_jsonb(answer, Anum_job_result_progress, info->progress);
	idem_answer_put(answer);
}

Datum
idem_job(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable jobs;
	IdemJobInfo info;
	int64 job_id;

	idem_fn_begin(fcinfo, &idem_job_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_job_signature);
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, AccessShareLock);
	if (idem_jobstore_get(&jobs, job_id, &info))
		put_job(&info, &answer);
	idem_table_close(&jobs);
	return (Datum) 0;
}

/* The key in the first two arguments, of a queue that the caller may use */
static IdemJobKey
get_job_key(FunctionCallInfo fcinfo, int scopearg)
{
	IdemKey key;
	IdemQueue settings;
	text *queue = idem_args_queue(fcinfo, 0);

	idem_args_key(fcinfo, 1, scopearg, &key);
	idem_queuestore_use(queue, &settings);
	return (IdemJobKey){.queue = queue, .key = key.key, .scope = key.scope};
}

Datum
idem_cancel_by_key(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	IdemJobKey key;
	int cancelled;

	idem_fn_begin(fcinfo, &idem_cancel_by_key_signature, "idem_cancel_by_key()");
	key = get_job_key(fcinfo, 2);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	cancelled = idem_jobstore_cancel_by_key(&jobs, &key);
	idem_table_close(&jobs);
	PG_RETURN_INT32(cancelled);
}

Datum
idem_job_by_key(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable jobs;
	IdemJobKey key;
	int max_jobs;

	idem_fn_begin(fcinfo, &idem_job_by_key_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_job_by_key_signature);
	key = get_job_key(fcinfo, 3);
	max_jobs = idem_args_max_jobs(fcinfo, 2, MAX_JOBS_OF_KEY);

	idem_jobtable_open(&jobs, AccessShareLock);
	idem_jobstore_list_by_key(&jobs, &key, max_jobs, put_job, &answer);
	idem_table_close(&jobs);
	return (Datum) 0;
}

/*
 * The arguments that say which jobs: their numbers, in the first argument, or queue and state.
 * queue: the position of the queue; state follows, then the worker if the numbers have tokens, and
 * max_jobs.
 */
static void
get_many(FunctionCallInfo fcinfo, int queue, IdemMany *many)
{
	bool has_tokens = many->kind == IDEM_MANY_FAIL || many->kind == IDEM_MANY_SNOOZE;
	int state = queue + 1;
	int worker = queue + 2;
	int ntokens;

	many->n = -1;
	many->max_jobs =
		idem_args_max_jobs(fcinfo, has_tokens ? worker + 1 : worker, MAX_JOBS_OF_QUEUE);
	if (PG_ARGISNULL(0))
	{
		if (PG_ARGISNULL(queue))
			idem_args_refuse_combination("ids", "Neither ids nor a queue was passed, or they are null.",
										 "Pass the numbers of the jobs, or the queue whose jobs to change. If there may be no numbers, pass coalesce(array_agg(...), '{}').");
		if (has_tokens && !PG_ARGISNULL(1))
			idem_args_refuse_combination("tokens", "Tokens were passed without ids.",
										 "Pass the numbers of the jobs with their tokens, or a queue without tokens.");
		many->queue = idem_args_queue(fcinfo, queue);
		if (has_tokens)
			many->worker = idem_args_worker(fcinfo, worker);
		return;
	}
	if (!PG_ARGISNULL(queue))
		idem_args_refuse_combination("ids", "Both ids and a queue were passed.",
									 "Pass the numbers of the jobs, or the queue whose jobs to change.");
	if (!PG_ARGISNULL(state) || (has_tokens && !PG_ARGISNULL(worker)))
		idem_args_refuse_combination("ids", "The numbers alone say which jobs.",
									 "Leave out what selects jobs of a queue: \"state\" and \"worker\".");
	idem_args_required_array(fcinfo, 0, "ids", &many->ids, NULL, &many->n);
	if (!has_tokens)
		return;
	idem_args_require(fcinfo, 1, "tokens",
					  "Pass the tokens that idem_fetch() has returned, or a queue instead of ids and tokens.");
	idem_args_required_array(fcinfo, 1, "tokens", &many->tokens, NULL, &ntokens);
	idem_args_check_length("ids", many->n, "tokens", ntokens);
	for (int i = 0; i < ntokens; i++)
		idem_args_check_token(DatumGetInt64(many->tokens[i]));
}

/*
 * The set of states, as bits: of those from first to last the one in the argument, or all of them
 */
static uint32
get_states(FunctionCallInfo fcinfo, int arg, IdemJobState first, IdemJobState last)
{
	const char *words[IDEM_JOB_EXPIRED + 2] = {NULL};
	int n = last - first + 1;

	if (PG_ARGISNULL(arg))
		return ((1 << n) - 1) << first;
	memcpy(words, &idem_jobrow_state_words[first], n * sizeof(words[0]));
	return 1 << (first + idem_args_word(PG_GETARG_TEXT_PP(arg), "state", words, "Leave it out for all of them."));
}

static int
change_many(const IdemMany *many)
{
	IdemTable jobs;
	int n;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	n = idem_manystore_change(&jobs, many);
	idem_table_close(&jobs);
	return n;
}

Datum
idem_cancel_many(PG_FUNCTION_ARGS)
{
	IdemMany many = {.kind = IDEM_MANY_CANCEL};

	idem_fn_begin(fcinfo, &idem_cancel_many_signature, "idem_cancel_many()");
	get_many(fcinfo, 1, &many);
	many.states = get_states(fcinfo, 2, IDEM_JOB_WAITING, IDEM_JOB_EXPIRED);
	PG_RETURN_INT32(change_many(&many));
}

Datum
idem_retry_many(PG_FUNCTION_ARGS)
{
	static const char *const ended_words[] = {"dead", "cancelled", NULL};
	IdemMany many = {.kind = IDEM_MANY_RETRY, .state = ended_words[0]};

	idem_fn_begin(fcinfo, &idem_retry_many_signature, "idem_retry_many()");
	get_many(fcinfo, 1, &many);
	if (!PG_ARGISNULL(2))
		many.state = ended_words[idem_args_word(PG_GETARG_TEXT_PP(2), "state", ended_words,
												"Leave it out for dead jobs.")];
	PG_RETURN_INT32(change_many(&many));
}

Datum
idem_fail_many(PG_FUNCTION_ARGS)
{
	IdemMany many = {.kind = IDEM_MANY_FAIL};

	idem_fn_begin(fcinfo, &idem_fail_many_signature, "idem_fail_many()");
	get_many(fcinfo, 5, &many);
	many.states = get_states(fcinfo, 6, IDEM_JOB_RUNNING, IDEM_JOB_EXPIRED);
	many.fail = idem_hold_get_failure(fcinfo, 2);
	many.fail.nowait = true;
	PG_RETURN_INT32(change_many(&many));
}

Datum
idem_snooze_many(PG_FUNCTION_ARGS)
{
	IdemMany many = {.kind = IDEM_MANY_SNOOZE};

	idem_fn_begin(fcinfo, &idem_snooze_many_signature, "idem_snooze_many()");
	get_many(fcinfo, 3, &many);
	many.states = get_states(fcinfo, 4, IDEM_JOB_RUNNING, IDEM_JOB_EXPIRED);
	idem_args_require(fcinfo, 2, "delay", "Pass the time after which the jobs are due again, such as '90 s'.");
	many.delay = idem_args_span(PG_GETARG_DATUM(2), "delay", IDEM_SPAN_NOT_NEGATIVE);
	PG_RETURN_INT32(change_many(&many));
}

Datum
idem_reschedule_many(PG_FUNCTION_ARGS)
{
	IdemMany many = {.kind = IDEM_MANY_RESCHEDULE};

	idem_fn_begin(fcinfo, &idem_reschedule_many_signature, "idem_reschedule_many()");
	get_many(fcinfo, 3, &many);
	many.states = get_states(fcinfo, 4, IDEM_JOB_WAITING, IDEM_JOB_BLOCKED);
	many.has_run_at = !PG_ARGISNULL(1);
	many.has_priority = !PG_ARGISNULL(2);
	if (!many.has_run_at && !many.has_priority)
		idem_args_refuse_combination("run_at", "Neither run_at nor a priority was passed.",
									 "Pass what to change. run_at => now() lets the jobs run now.");
	if (many.has_run_at)
		many.run_at = idem_args_run_at(fcinfo, 1);
	if (many.has_priority)
		many.priority = PG_GETARG_INT32(2);
	PG_RETURN_INT32(change_many(&many));
}
