/*
 * run.c
 *		Run one job with a handler, in the transaction that fetches it; SQL function
 *		idem_current_job.
 *
 * idem_drain() and idem_work() share this.  They call idem_run_complete() in a subtransaction:
 * after an error it is rolled back, and idem_run_fail() gives the job back in the transaction that
 * has it.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/tuplestore.h"

#include "jobs/hold/hold.h"

IDEM_FUNCTION(idem_current_job);

/* J22: the job whose handler runs, the innermost if one runs inside another; NULL: none */
static const IdemFetched *current = NULL;

/* Copy what is fetched into the context of the run; NULL stays NULL */
static Jsonb *
copy_jsonb(Jsonb *value)
{
	return value == NULL ? NULL : DatumGetJsonbPCopy(JsonbPGetDatum(value));
}

/* The store calls this in memory of its own */
static void
take_fetched(const IdemFetched *fetched, void *arg)
{
	IdemRun *run = arg;
	MemoryContext oldcontext = MemoryContextSwitchTo(run->context);

	run->fetched = *fetched;
	run->fetched.payload = copy_jsonb(fetched->payload);
	run->fetched.headers = copy_jsonb(fetched->headers);
	run->fetched.progress = copy_jsonb(fetched->progress);
	run->fetched.queue = DatumGetTextPCopy(PointerGetDatum(fetched->queue));
	run->fetched.links = NULL;
	if (fetched->key != NULL)
		run->fetched.key = DatumGetTextPCopy(PointerGetDatum(fetched->key));
	run->is_fetched = true;
	MemoryContextSwitchTo(oldcontext);
}

/* Fetch one job for this transaction; 0: the next one of the queue */
static bool
fetch_job(IdemRun *run, text *queue, int64 job_id)
{
	IdemTable jobs;
	IdemFetch fetch = {.batch = 1};

	run->is_fetched = false;
	/* a procedure has no snapshot at the beginning of a transaction */
	PushActiveSnapshot(GetTransactionSnapshot());
	/* a handler may have changed the settings of the queue */
	idem_queuestore_use(queue, &fetch.queue);
	idem_jobtable_open(&jobs, RowExclusiveLock);
	if (job_id == 0)
		(void) idem_fetchstore_fetch(&jobs, &fetch, take_fetched, run);
	else
		idem_fetchstore_fetch_one(&jobs, &fetch, job_id, take_fetched, run);
	idem_table_close(&jobs);
	PopActiveSnapshot();
	return run->is_fetched;
}

/* V7, J21: fetch the next job for this transaction; false if none is due */
bool
idem_run_fetch(IdemRun *run, text *queue)
{
	return fetch_job(run, queue, 0);
}

/* Raise the error of a job that this transaction does not hold any more */
static void
check_hold(const IdemRun *run, IdemHold hold)
{
	if (hold != IDEM_HOLD_OK)
		idem_workstore_refuse(hold, run->fetched.job_id);
}

/*
 * J22: run code that calls a handler for this job.  An error restores the current job, too: the
 * caller may be the handler of another job, and catch it.
 */
void
idem_run_as_current(const IdemFetched *job, void (*run)(void *arg), void *arg)
{
	const IdemFetched *outer = current;

	current = job;
	PG_TRY();
	{
		run(arg);
	}
	PG_FINALLY();
	{
		current = outer;
	}
	PG_END_TRY();
}

static void
run_handler(void *arg)
{
	IdemRun *run = arg;
	NullableDatum payload = {
		.value = PointerGetDatum(run->fetched.payload), .isnull = run->fetched.payload == NULL};

	idem_handler_check(run->handler, payload.isnull);
	run->result = idem_handler_run(run->handler, payload);
}

/* V7, J21: run the handler and complete the job */
void
idem_run_complete(void *arg)
{
	IdemRun *run = arg;
	IdemTable jobs;
	IdemQueue queue = {0};
	IdemHold hold;

	idem_run_as_current(&run->fetched, run_handler, run);
	PushActiveSnapshot(GetTransactionSnapshot());
	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_workstore_complete(&jobs, run->fetched.job_id, run->fetched.token, run->result,
								   &queue, run->counts_later ? &run->time : NULL);
	idem_table_close(&jobs);
	PopActiveSnapshot();
	/* the handler may have cancelled or removed its own job */
	check_hold(run, hold);
}

/* V7, J21: give the job back after an error of the handler; true if it is dead */
bool
idem_run_fail(IdemRun *run, const ErrorData *error)
{
	IdemTable jobs;
	IdemFailure failure = {
		.error = cstring_to_text(idem_subxact_describe(error)), .retry_in = -1};
	IdemHold hold;
	TransactionId in_the_way;
	bool is_dead = false;

	run->result = NULL;
	PushActiveSnapshot(GetTransactionSnapshot());
	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_workstore_fail(&jobs, run->fetched.job_id, run->fetched.token, &failure,
							   run->nowait ? &in_the_way : NULL, &is_dead,
							   run->counts_later ? &run->time : NULL);
	idem_table_close(&jobs);
	PopActiveSnapshot();
	check_hold(run, hold);
	return is_dead;
}

/*
 * J21: the same after an error of the commit, in a later transaction: fetch the job again, and fail
 * it.  False if it cannot be fetched now, for example because another worker has it.
 */
bool
idem_run_fail_later(IdemRun *run, text *queue, const ErrorData *error)
{
	TimestampTz started_at = run->time.from;

	if (!fetch_job(run, queue, run->fetched.job_id))
		return false;
	(void) idem_run_fail(run, error);
	run->time.from = started_at;
	return true;
}

/* J22: one row in a handler, none outside */
Datum
idem_current_job(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_current_job_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_current_job_signature);
	if (current == NULL)
		return (Datum) 0;
	idem_answer_int64(&answer, Anum_current_job_result_job_id, current->job_id);
	idem_answer_text(&answer, Anum_current_job_result_queue, current->queue);
	idem_answer_text(&answer, Anum_current_job_result_key, current->key);
	idem_answer_int32(&answer, Anum_current_job_result_attempt, current->attempt);
	idem_answer_int32(&answer, Anum_current_job_result_max_attempts, current->max_attempts);
	idem_answer_jsonb(&answer, Anum_current_job_result_headers, current->headers);
	idem_answer_jsonb(&answer, Anum_current_job_result_progress, current->progress);
	idem_answer_put(&answer);
	return (Datum) 0;
}
