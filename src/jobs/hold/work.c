/*
 * work.c
 *		SQL functions for workers: idem_fetch, idem_fetch_any, idem_complete,
 *		idem_complete_many, idem_fail, idem_heartbeat, idem_progress, idem_snooze.
 *
 * They check their arguments, call the store, and form the rows to return.
 * idem_complete_many() and idem_heartbeat() return a status for each job.  The
 * others raise an error if the caller does not have the job.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/pg_lsn.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "jobs/hold/hold.h"

IDEM_FUNCTION(idem_fetch);
IDEM_FUNCTION(idem_fetch_any);
IDEM_FUNCTION(idem_complete);
IDEM_FUNCTION(idem_complete_many);
IDEM_FUNCTION(idem_fail);
IDEM_FUNCTION(idem_heartbeat);
IDEM_FUNCTION(idem_progress);
IDEM_FUNCTION(idem_snooze);

static int
get_batch_size(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "batch", "Leave it out to fetch one job.");
	if (PG_GETARG_INT32(arg) < 1 || PG_GETARG_INT32(arg) > IDEM_MAX_FETCH_BATCH)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid batch"),
				errdetail("The batch is %d; it must be between 1 and %d.", PG_GETARG_INT32(arg), IDEM_MAX_FETCH_BATCH),
				errhint("Call idem_fetch() again for more."));
	return PG_GETARG_INT32(arg);
}

static void
put_fetched(const IdemFetched *job, void *arg)
{
	IdemAnswer *answer = arg;

	idem_answer_int64(answer, Anum_fetch_result_job_id, job->job_id);
	idem_answer_int64(answer, Anum_fetch_result_token, job->token);
	idem_answer_int32(answer, Anum_fetch_result_attempt, job->attempt);
	idem_answer_int32(answer, Anum_fetch_result_max_attempts, job->max_attempts);
	idem_answer_text(answer, Anum_fetch_result_queue, job->queue);
	idem_answer_jsonb(answer, Anum_fetch_result_payload, job->payload);
	idem_answer_text(answer, Anum_fetch_result_key, job->key);
	idem_answer_time(answer, Anum_fetch_result_enqueued_at, job->enqueued_at);
	idem_answer_set(answer, Anum_fetch_result_lsn, PG_LSNOID, LSNGetDatum(job->lsn));
	idem_answer_jsonb(answer, Anum_fetch_result_progress, job->progress);
	idem_answer_jsonb(answer, Anum_fetch_result_headers, job->headers);
	idem_answer_jsonb(answer, Anum_fetch_result_links, job->links);
	idem_answer_put(answer);
}

/* Check the arguments about a queue */
static void
get_fetch(FunctionCallInfo fcinfo, text *queue, IdemFetch *fetch)
{
	idem_queuestore_use(queue, &fetch->queue);
	fetch->batch = get_batch_size(fcinfo, 1);
	fetch->lease = PG_ARGISNULL(2) ?
		fetch->queue.lease :
		idem_args_span(PG_GETARG_DATUM(2), "lease", IDEM_SPAN_LEASE_OR_NONE);
	fetch->worker = idem_args_worker(fcinfo, 3);
	if (fetch->lease == 0)
		idem_fetchstore_check_isolation("idem_fetch() without a lease",
										"BEGIN ISOLATION LEVEL READ COMMITTED, or pass a lease and do the work in a later transaction.");
}

/* Jobs were fetched with a lease, and the transaction is not about to commit */
static void
note_open_leases(void)
{
	if (IsTransactionBlock())
		ereport(NOTICE,
				errmsg("other sessions cannot see these leases before the transaction commits"),
				errdetail("If the transaction rolls back, the leases are lost, even if work was done under them."),
				errhint("Commit before you do the work, or fetch without a lease to do it in this transaction."));
}

Datum
idem_fetch(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable jobs;
	IdemFetch fetch;

	idem_fn_begin(fcinfo, &idem_fetch_signature, "idem_fetch()");
	idem_answer_begin(&answer, fcinfo, &idem_fetch_signature);
	get_fetch(fcinfo, idem_args_queue(fcinfo, 0), &fetch);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	(void) idem_fetchstore_fetch(&jobs, &fetch, put_fetched, &answer);
	idem_table_close(&jobs);

	if (fetch.lease > 0 && answer.nrows > 0)
		note_open_leases();
	return (Datum) 0;
}

/* The queues of a call of idem_fetch_any() */
typedef struct FetchAny
{
	IdemAnswer answer;
	IdemFetch *fetches;
	bool *is_empty; /* the queue had fewer jobs than it was asked for */
	int n;
	int first; /* the queue that is asked first */
	int left;  /* so many jobs are still wanted */
	bool has_got;
	bool has_leased;
	bool was_long; /* while it looked at a queue in vain, jobs may have come to another one */
} FetchAny;

/* Ask a queue for at most so many jobs */
static void
fetch_share(FetchAny *any, IdemTable *jobs, int i, int share)
{
	IdemFetch *fetch = &any->fetches[i];
	int64 before = any->answer.nrows;
	int got;

	fetch->batch = share;
	any->was_long |= idem_fetchstore_fetch(jobs, fetch, put_fetched, &any->answer);
	got = any->answer.nrows - before;
	any->left -= got;
	any->is_empty[i] = got < share;
	any->has_got |= got > 0;
	any->has_leased |= got > 0 && fetch->lease > 0;
}

/*
 * J15: ask all queues for an equal share.  What some of them do not have is divided in the same way
 * among the others, in further rounds.
 */
static void
fetch_from_all(FetchAny *any, IdemTable *jobs)
{
	int nqueues = any->n;

	while (any->left > 0 && nqueues > 0)
	{
		int share = Max(any->left / nqueues, 1);

		for (int i = 0; i < any->n && any->left > 0; i++)
		{
			int queue = (any->first + i) % any->n;

			CHECK_FOR_INTERRUPTS();
			if (any->is_empty[queue])
				continue;
			fetch_share(any, jobs, queue, share);
			nqueues -= any->is_empty[queue];
		}
	}
}

/* J15: each call of a session begins with another queue, so that none starves */
static int
choose_first(int n)
{
	static uint32 turn = 0;

	if (turn == 0)
		turn = pg_prng_uint32(&pg_global_prng_state);
	return turn++ % n;
}

Datum
idem_fetch_any(PG_FUNCTION_ARGS)
{
	FetchAny any = {0};
	text **queues;
	IdemTable jobs;

	idem_fn_begin(fcinfo, &idem_fetch_any_signature, "idem_fetch_any()");
	idem_answer_begin(&any.answer, fcinfo, &idem_fetch_any_signature);
	queues = idem_args_queues(fcinfo, 0, &any.n);
	any.left = get_batch_size(fcinfo, 1);
	any.fetches = palloc_array(IdemFetch, any.n);
	any.is_empty = palloc0_array(bool, any.n);
	for (int i = 0; i < any.n; i++)
		get_fetch(fcinfo, queues[i], &any.fetches[i]);
	any.first = choose_first(any.n);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	fetch_from_all(&any, &jobs);
	/* J14: as a fetch from one queue does */
	if (any.was_long && !any.has_got)
	{
		memset(any.is_empty, 0, any.n * sizeof(bool));
		fetch_from_all(&any, &jobs);
	}
	idem_table_close(&jobs);
	if (any.has_leased)
		note_open_leases();
	return (Datum) 0;
}

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
	hold = idem_workstore_complete(&jobs, job_id, token, result, &queue, NULL);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_workstore_refuse(hold, job_id);
	PG_RETURN_BOOL(true);
}

/* Three arguments from this one on: error, retry_in, dead */
IdemFailure
idem_work_get_failure(FunctionCallInfo fcinfo, int arg)
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
	failure = idem_work_get_failure(fcinfo, 2);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_workstore_fail(&jobs, job_id, token, &failure, NULL, &dead, NULL);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_workstore_refuse(hold, job_id);
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
	hold = idem_workstore_snooze(&jobs, job_id, token, delay, &run_at);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_workstore_refuse(hold, job_id);
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
	hold = idem_workstore_progress(&jobs, job_id, token, data, lease, &lease_until);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_workstore_refuse(hold, job_id);
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

/* The status of a job of the batch; "stale" for an old token (J11) */
static const char *
get_status(IdemHold hold, const char *done)
{
	return hold == IDEM_HOLD_OK ? done : hold == IDEM_HOLD_NONE ? "not_held" :
																  "stale";
}

Datum
idem_complete_many(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable jobs;
	IdemQueue queue = {0};
	Batch batch;

	idem_fn_begin(fcinfo, &idem_complete_many_signature, "idem_complete_many()");
	idem_answer_begin(&answer, fcinfo, &idem_complete_many_signature);
	get_batch_of_jobs(fcinfo, &batch);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	for (int i = 0; i < batch.n; i++)
	{
		int ord = batch.order[i];
		MemoryContext oldcontext = MemoryContextSwitchTo(batch.job_context);

		CHECK_FOR_INTERRUPTS();
		batch.holds[ord] = idem_workstore_complete(&jobs, DatumGetInt64(batch.ids[ord]),
												   DatumGetInt64(batch.tokens[ord]), NULL, &queue,
												   NULL);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(batch.job_context);
	}
	idem_table_close(&jobs);
	for (int i = 0; i < batch.n; i++)
	{
		idem_answer_int32(&answer, Anum_complete_many_result_ord, i + 1);
		idem_answer_set(&answer, Anum_complete_many_result_job_id, INT8OID, batch.ids[i]);
		idem_answer_string(&answer, Anum_complete_many_result_status,
						   get_status(batch.holds[i], "completed"));
		idem_answer_put(&answer);
	}
	return (Datum) 0;
}

Datum
idem_heartbeat(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable jobs;
	IdemQueue queue = {0};
	Batch batch;
	int64 lease;
	TimestampTz *lease_until;

	idem_fn_begin(fcinfo, &idem_heartbeat_signature, "idem_heartbeat()");
	idem_answer_begin(&answer, fcinfo, &idem_heartbeat_signature);
	get_batch_of_jobs(fcinfo, &batch);
	lease = PG_ARGISNULL(2) ? -1 : idem_args_lease(fcinfo, 2);
	lease_until = palloc_array(TimestampTz, batch.n);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	for (int i = 0; i < batch.n; i++)
	{
		int ord = batch.order[i];
		MemoryContext oldcontext = MemoryContextSwitchTo(batch.job_context);

		CHECK_FOR_INTERRUPTS();
		batch.holds[ord] =
			idem_workstore_heartbeat(&jobs, DatumGetInt64(batch.ids[ord]),
									 DatumGetInt64(batch.tokens[ord]), lease, &queue,
									 &lease_until[ord]);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(batch.job_context);
	}
	idem_table_close(&jobs);
	for (int i = 0; i < batch.n; i++)
	{
		idem_answer_int32(&answer, Anum_heartbeat_result_ord, i + 1);
		idem_answer_set(&answer, Anum_heartbeat_result_job_id, INT8OID, batch.ids[i]);
		idem_answer_string(&answer, Anum_heartbeat_result_status,
						   get_status(batch.holds[i], "renewed"));
		if (batch.holds[i] == IDEM_HOLD_OK)
			idem_answer_optional_time(&answer, Anum_heartbeat_result_lease_until, lease_until[i]);
		idem_answer_put(&answer);
	}
	return (Datum) 0;
}
