/*
 * drain.c
 *		SQL function idem_drain: run the jobs of a queue in the caller's transaction.
 *
 * It is the loop of a worker in one call, for tests that roll back at their end: fetch a job for
 * the transaction, run the handler, complete the job (V7).  Handler and complete have a
 * subtransaction of their own.  After an error of the handler it is rolled back, and the job
 * fails as with idem_fail().
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"

#include "jobs/jobs.h"
#include "keys/keys.h"
#include "testing/testing.h"

#define DRAIN_NATTS 5

static const Oid drain_types[DRAIN_NATTS] = {INT8OID, TEXTOID, TEXTOID, JSONBOID, TEXTOID};

IDEM_FUNCTION(idem_drain, RECORDOID, TEXTOID, REGPROCOID, INT4OID);

/* A job that is being run */
typedef struct Job
{
	Oid handler;
	MemoryContext context; /* of what the members below point to */
	IdemFetched fetched;
	bool is_fetched;
	Jsonb *result;
	const char *outcome;
	char *error; /* NULL: none */
} Job;

/*
 * The fetch has no lease, so it needs READ COMMITTED, as idem_fetch() does (J2).
 */
static void
check_isolation(void)
{
	if (IsolationUsesXactSnapshot())
		ereport(ERROR,
				errcode(ERRCODE_INVALID_TRANSACTION_STATE),
				errmsg("idem_drain() needs isolation level READ COMMITTED"),
				errdetail("The snapshot of this transaction may be older than the changes that its jobs must see."),
				errhint("BEGIN ISOLATION LEVEL READ COMMITTED."));
}

static int
get_max_jobs(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "max_jobs", "Leave it out for the default.");
	if (PG_GETARG_INT32(arg) < 1)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "max_jobs"),
				errdetail("The number is %d; it must be at least 1.", PG_GETARG_INT32(arg)),
				errhint("Leave it out for the default."));
	return PG_GETARG_INT32(arg);
}

/* The store calls this in memory of its own */
static void
take_fetched(const IdemFetched *fetched, void *arg)
{
	Job *job = arg;
	MemoryContext oldcontext = MemoryContextSwitchTo(job->context);

	job->fetched = *fetched;
	if (fetched->payload != NULL)
		job->fetched.payload = DatumGetJsonbPCopy(PointerGetDatum(fetched->payload));
	if (fetched->key != NULL)
		job->fetched.key = DatumGetTextPCopy(PointerGetDatum(fetched->key));
	job->is_fetched = true;
	MemoryContextSwitchTo(oldcontext);
}

/* Fetch one job for this transaction; false if none is due */
static bool
fetch_job(text *queue, Job *job)
{
	IdemTable jobs;
	IdemFetch fetch = {.batch = 1};

	/* a handler may have changed the settings of the queue */
	idem_queuestore_use(queue, &fetch.queue);
	idem_jobtable_open(&jobs, RowExclusiveLock);
	idem_fetchstore_fetch(&jobs, &fetch, take_fetched, job);
	idem_table_close(&jobs);
	return job->is_fetched;
}

/* Run the handler and complete the job, as a worker does (V7) */
static void
run_job(void *arg)
{
	Job *job = arg;
	NullableDatum payload = {
		.value = PointerGetDatum(job->fetched.payload), .isnull = job->fetched.payload == NULL};
	IdemTable jobs;
	IdemQueue queue = {0};
	IdemHold hold;

	idem_call_check_handler(job->handler, payload.isnull);
	job->result = idem_call_run_handler(job->handler, payload);
	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_workstore_complete(&jobs, job->fetched.job_id, job->fetched.token, job->result,
								   &queue);
	idem_table_close(&jobs);
	/* the handler has cancelled or removed its own job */
	if (hold != IDEM_HOLD_OK)
		idem_workstore_refuse(hold, job->fetched.job_id);
}

/* Give the job back after an error of the handler, or make it dead (V7) */
static void
fail_job(Job *job, const ErrorData *error)
{
	IdemTable jobs;
	IdemFailure failure = {.retry_in = -1};
	IdemHold hold;
	bool is_dead = false;

	job->result = NULL;
	job->error = idem_subxact_describe(error);
	failure.error = cstring_to_text(job->error);
	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_workstore_fail(&jobs, job->fetched.job_id, job->fetched.token, &failure, &is_dead);
	idem_table_close(&jobs);
	if (hold != IDEM_HOLD_OK)
		idem_workstore_refuse(hold, job->fetched.job_id);
	job->outcome = is_dead ? "dead" : "retry";
}

static void
put_job(ReturnSetInfo *rsinfo, const Job *job)
{
	Datum values[DRAIN_NATTS];
	bool nulls[DRAIN_NATTS] = {false};

	values[0] = Int64GetDatum(job->fetched.job_id);
	values[1] = PointerGetDatum(job->fetched.key);
	values[2] = CStringGetTextDatum(job->outcome);
	values[3] = PointerGetDatum(job->result);
	values[4] = job->error != NULL ? CStringGetTextDatum(job->error) : (Datum) 0;
	nulls[1] = job->fetched.key == NULL;
	nulls[3] = job->result == NULL;
	nulls[4] = job->error == NULL;
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/* V7: fetch and run one job; false if none is due */
static bool
do_job(text *queue, Job *job)
{
	ErrorData *error;

	CHECK_FOR_INTERRUPTS();
	if (!fetch_job(queue, job))
		return false;
	job->outcome = "completed";
	error = idem_subxact_try(run_job, job, true);
	if (error != NULL)
		fail_job(job, error);
	return true;
}

Datum
idem_drain(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	ReturnSetInfo *rsinfo;
	text *queue;
	Oid handler;
	int max_jobs;
	MemoryContext context;
	bool found = true;

	idem_fn_begin(fcinfo, &idem_drain_signature, "idem_drain()");
	rsinfo = idem_fn_row_set(fcinfo, drain_types, DRAIN_NATTS, &row_desc);
	queue = idem_args_queue(fcinfo, 0);
	handler = idem_call_handler_arg(fcinfo, 1);
	max_jobs = get_max_jobs(fcinfo, 2);
	idem_call_check_handler(handler, false);
	check_isolation();

	context = AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	for (int i = 0; i < max_jobs && found; i++)
	{
		Job job = {.handler = handler, .context = context};
		MemoryContext oldcontext = MemoryContextSwitchTo(context);

		found = do_job(queue, &job);
		if (found)
		{
			/* the handler may have called this function, too */
			rsinfo->setDesc = idem_fn_row_desc(fcinfo, drain_types, DRAIN_NATTS, &row_desc);
			put_job(rsinfo, &job);
		}
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(context);
	}
	MemoryContextDelete(context);
	return (Datum) 0;
}
