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

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"

#include "jobs/fetch/fetch.h"
#include "jobs/hold/hold.h"
#include "testing/testing.h"

IDEM_FUNCTION(idem_drain);

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

/* A run, and what has become of it */
typedef struct Drained
{
	IdemRun run;
	const char *outcome;
	char *error; /* NULL: none */
} Drained;

static void
put_job(IdemAnswer *answer, const Drained *job)
{
	idem_answer_int64(answer, Anum_drain_result_job_id, job->run.fetched.job_id);
	idem_answer_text(answer, Anum_drain_result_key, job->run.fetched.key);
	idem_answer_string(answer, Anum_drain_result_outcome, job->outcome);
	idem_answer_jsonb(answer, Anum_drain_result_result, job->run.result);
	idem_answer_string(answer, Anum_drain_result_error, job->error);
	idem_answer_put(answer);
}

/* V7: fetch and run one job; false if none is due */
static bool
do_job(text *queue, Drained *job)
{
	ErrorData *error;

	CHECK_FOR_INTERRUPTS();
	if (!idem_run_fetch(&job->run, queue))
		return false;
	/* not in the subtransaction: without a handler no job shall fail */
	idem_handler_check(job->run.handler, false);
	job->outcome = "completed";
	error = idem_subxact_try(idem_run_complete, &job->run, true);
	if (error != NULL)
	{
		job->error = idem_subxact_describe(error);
		job->outcome = idem_run_fail(&job->run, error) ? "dead" : "retry";
	}
	return true;
}

Datum
idem_drain(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	text *queue;
	Oid handler;
	int max_jobs;
	MemoryContext context;
	bool found = true;

	idem_fn_begin(fcinfo, &idem_drain_signature, "idem_drain()");
	idem_answer_begin(&answer, fcinfo, &idem_drain_signature);
	queue = idem_args_queue(fcinfo, 0);
	handler = idem_handler_arg(fcinfo, 1);
	max_jobs = get_max_jobs(fcinfo, 2);
	idem_handler_check(handler, false);
	idem_fetchstore_check_isolation("idem_drain()", "BEGIN ISOLATION LEVEL READ COMMITTED.");

	context = AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	for (int i = 0; i < max_jobs && found; i++)
	{
		Drained job = {.run = {.handler = handler, .context = context}};
		MemoryContext oldcontext = MemoryContextSwitchTo(context);

		found = do_job(queue, &job);
		if (found)
			put_job(&answer, &job);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(context);
	}
	MemoryContextDelete(context);
	return (Datum) 0;
}
