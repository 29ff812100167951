/*
 * hold.c
 *		SQL functions for the worker that holds a job: idem_complete, idem_complete_many,
 *		idem_fail, idem_heartbeat, idem_progress, idem_snooze.
 *
 * They check their arguments, call the store, and form the rows to return.
 * idem_complete_many() and idem_heartbeat() return a status for each job.  The
 * others raise an error if the caller does not have the job.
 */
#include "postgres.h"

#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "jobs/hold/hold.h"

IDEM_FUNCTION(idem_complete);
IDEM_FUNCTION(idem_complete_many);
IDEM_FUNCTION(idem_fail);
IDEM_FUNCTION(idem_heartbeat);
IDEM_FUNCTION(idem_progress);
IDEM_FUNCTION(idem_snooze);

Datum
idem_complete(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	IdemQueue queue = {0};
	int64 job_id;
	int64 token;
	Jsonb *result;
	IdemHold hold;

	idem_fn_begin(fcinfo, &idem_complete_signature, "idem_complete()");
	job_id = idem_args_job_id(fcinfo, 0);
	token = idem_args_token(fcinfo, 1);
	result = PG_ARGISNULL(2) ? NULL : idem_args_jsonb(PG_GETARG_DATUM(2), "result");

	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_holdstore_complete(&jobs, job_id, token, result, &queue, NULL);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_holdstore_refuse(hold, job_id);
	PG_RETURN_BOOL(true);
}

/* Three arguments from this one on: error, retry_in, dead */
IdemFailure
idem_hold_get_failure(FunctionCallInfo fcinfo, int arg)
{
	IdemFailure failure = {
		.error = PG_ARGISNULL(arg) ? NULL : PG_GETARG_TEXT_PP(arg),
		.retry_in = PG_ARGISNULL(arg + 1) ?
			-1 :
			idem_args_span(PG_GETARG_DATUM(arg + 1), "retry_in", IDEM_SPAN_NOT_NEGATIVE),
		.dead = !PG_ARGISNULL(arg + 2) && PG_GETARG_BOOL(arg + 2)};

	return failure;
}

Datum
idem_fail(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	int64 job_id;
	int64 token;
	IdemFailure failure;
	IdemHold hold;
	bool dead = false;

	idem_fn_begin(fcinfo, &idem_fail_signature, "idem_fail()");
	job_id = idem_args_job_id(fcinfo, 0);
	token = idem_args_token(fcinfo, 1);
	failure = idem_hold_get_failure(fcinfo, 2);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_holdstore_fail(&jobs, job_id, token, &failure, &dead, NULL);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_holdstore_refuse(hold, job_id);
	PG_RETURN_TEXT_P(cstring_to_text(dead ? "dead" : "retry"));
}

Datum
idem_snooze(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	int64 job_id;
	int64 token;
	int64 delay;
	IdemHold hold;
	TimestampTz run_at = 0;

	idem_fn_begin(fcinfo, &idem_snooze_signature, "idem_snooze()");
	job_id = idem_args_job_id(fcinfo, 0);
	token = idem_args_token(fcinfo, 1);
	idem_args_require(fcinfo, 2, "delay", "Pass the time after which the job is due again, such as '90 s'.");
	delay = idem_args_span(PG_GETARG_DATUM(2), "delay", IDEM_SPAN_NOT_NEGATIVE);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_holdstore_snooze(&jobs, job_id, token, delay, &run_at);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_holdstore_refuse(hold, job_id);
	PG_RETURN_TIMESTAMPTZ(run_at);
}

Datum
idem_progress(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	int64 job_id;
	int64 token;
	Jsonb *data;
	int64 lease;
	IdemHold hold;
	TimestampTz lease_until = 0;

	idem_fn_begin(fcinfo, &idem_progress_signature, "idem_progress()");
	job_id = idem_args_job_id(fcinfo, 0);
	token = idem_args_token(fcinfo, 1);
	idem_args_require(fcinfo, 2, "data", "Pass what the next attempt needs to continue, as jsonb.");
	data = idem_args_jsonb(PG_GETARG_DATUM(2), "data");
	lease = PG_ARGISNULL(3) ? -1 : idem_args_lease(fcinfo, 3);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_holdstore_progress(&jobs, job_id, token, data, lease, &lease_until);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_holdstore_refuse(hold, job_id);
	if (lease_until == 0)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(lease_until);
}

/* The jobs of a call of idem_complete_many() or idem_heartbeat() */
typedef struct Batch
{
	int n;
	Datum *ids;
	Datum *tokens;
	int *order; /* by number, so that two calls do not deadlock */
	IdemHold *holds;
	MemoryContext job_context; /* reset after each job */
} Batch;

static int
compare_ids(const void *a, const void *b, void *arg)
{
	const Datum *ids = arg;
	int64 ia = DatumGetInt64(ids[*(const int *) a]);
	int64 ib = DatumGetInt64(ids[*(const int *) b]);

	return ia < ib ? -1 : ia > ib ? 1 :
									*(const int *) a - *(const int *) b;
}

static void
get_batch_of_jobs(FunctionCallInfo fcinfo, Batch *batch)
{
	int ntokens;

	idem_args_required_array(fcinfo, 0, "ids", &batch->ids, NULL, &batch->n);
	idem_args_required_array(fcinfo, 1, "tokens", &batch->tokens, NULL, &ntokens);
	idem_args_check_length("ids", batch->n, "tokens", ntokens);
	for (int i = 0; i < ntokens; i++)
		idem_args_check_token(DatumGetInt64(batch->tokens[i]));
	batch->order = palloc_array(int, batch->n);
	batch->holds = palloc_array(IdemHold, batch->n);
	for (int i = 0; i < batch->n; i++)
		batch->order[i] = i;
	qsort_arg(batch->order, batch->n, sizeof(int), compare_ids, batch->ids);
	batch->job_context = AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
}

/*
 * Complete the jobs of the batch, or renew their leases if lease_until is not NULL, and return a
 * row for each; "stale" for an old token (J11)
 */
static void
put_batch(IdemAnswer *answer, Batch *batch, int64 lease, TimestampTz *lease_until)
{
	const char *words[] = {
		[IDEM_HOLD_OK] = lease_until != NULL ? "renewed" : "completed",
		[IDEM_HOLD_NONE] = "not_held",
		[IDEM_HOLD_STALE] = "stale"};
	IdemTable jobs;
	IdemQueue queue = {0};

	idem_jobtable_open(&jobs, RowExclusiveLock);
	for (int i = 0; i < batch->n; i++)
	{
		int ord = batch->order[i];
		int64 job_id = DatumGetInt64(batch->ids[ord]);
		int64 token = DatumGetInt64(batch->tokens[ord]);
		MemoryContext oldcontext = MemoryContextSwitchTo(batch->job_context);

		CHECK_FOR_INTERRUPTS();
		batch->holds[ord] = lease_until != NULL ?
			idem_holdstore_heartbeat(&jobs, job_id, token, lease, &queue, &lease_until[ord]) :
			idem_holdstore_complete(&jobs, job_id, token, NULL, &queue, NULL);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(batch->job_context);
	}
	idem_table_close(&jobs);
	for (int i = 0; i < batch->n; i++)
	{
		idem_answer_int32(answer, Anum_heartbeat_result_ord, i + 1);
		idem_answer_set(answer, Anum_heartbeat_result_job_id, INT8OID, batch->ids[i]);
		idem_answer_string(answer, Anum_heartbeat_result_status, words[batch->holds[i]]);
		if (lease_until != NULL && batch->holds[i] == IDEM_HOLD_OK)
			idem_answer_optional_time(answer, Anum_heartbeat_result_lease_until, lease_until[i]);
		idem_answer_put(answer);
	}
}

StaticAssertDecl((int) Anum_complete_many_result_ord == (int) Anum_heartbeat_result_ord &&
					 (int) Anum_complete_many_result_job_id == (int) Anum_heartbeat_result_job_id &&
					 (int) Anum_complete_many_result_status == (int) Anum_heartbeat_result_status,
				 "the rows of both functions begin with the same columns");

Datum
idem_complete_many(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	Batch batch;

	idem_fn_begin(fcinfo, &idem_complete_many_signature, "idem_complete_many()");
	idem_answer_begin(&answer, fcinfo, &idem_complete_many_signature);
	get_batch_of_jobs(fcinfo, &batch);
	put_batch(&answer, &batch, 0, NULL);
	return (Datum) 0;
}

Datum
idem_heartbeat(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	Batch batch;
	int64 lease;

	idem_fn_begin(fcinfo, &idem_heartbeat_signature, "idem_heartbeat()");
	idem_answer_begin(&answer, fcinfo, &idem_heartbeat_signature);
	get_batch_of_jobs(fcinfo, &batch);
	lease = PG_ARGISNULL(2) ? -1 : idem_args_lease(fcinfo, 2);
	put_batch(&answer, &batch, lease, palloc_array(TimestampTz, batch.n));
	return (Datum) 0;
}
