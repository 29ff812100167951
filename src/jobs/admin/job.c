/*
 * job.c
 *		SQL functions for a job by its number: idem_cancel, idem_retry, idem_job; and by its
 *		key: idem_cancel_by_key, idem_job_by_key.
 *
 * They check their arguments, call the store, and form the row to return.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "jobs/admin/jobadmin.h"

/* The most jobs of a key that one call shows */
#define MAX_JOBS 10000

IDEM_FUNCTION(idem_cancel);
IDEM_FUNCTION(idem_retry);
IDEM_FUNCTION(idem_job);
IDEM_FUNCTION(idem_cancel_by_key);
IDEM_FUNCTION(idem_job_by_key);

Datum
idem_cancel(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	int64 job_id;
	bool cancelled;

	idem_fn_begin(fcinfo, &idem_cancel_signature, "idem_cancel()");
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	cancelled = idem_jobstore_cancel(&jobs, job_id);
	idem_table_close(&jobs);
	PG_RETURN_BOOL(cancelled);
}

Datum
idem_retry(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	int64 job_id;
	bool retried;

	idem_fn_begin(fcinfo, &idem_retry_signature, "idem_retry()");
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	retried = idem_jobstore_retry(&jobs, job_id);
	idem_table_close(&jobs);
	PG_RETURN_BOOL(retried);
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
	max_jobs = idem_args_max_jobs(fcinfo, 2, MAX_JOBS);

	idem_jobtable_open(&jobs, AccessShareLock);
	idem_jobstore_list_by_key(&jobs, &key, max_jobs, put_job, &answer);
	idem_table_close(&jobs);
	return (Datum) 0;
}
