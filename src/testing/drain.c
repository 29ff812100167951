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

#include "utils/memutils.h"

#include "jobs/hold/hold.h"

IDEM_FUNCTION(idem_drain);

/*
 * V7: fetch one job after the other and run it, until none is due.  The memory of a job is freed
 * before the next one.
 */
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
	idem_args_require(fcinfo, 2, "max_jobs", "Leave it out for the default.");
	max_jobs = PG_GETARG_INT32(2);
	if (max_jobs < 1)
		idem_args_refuse_value("max_jobs", psprintf("The number is %d; it must be at least 1.", max_jobs),
							   "Leave it out for the default.");
	idem_handler_check(handler, false);
	idem_fetchstore_check_isolation("idem_drain()", "BEGIN ISOLATION LEVEL READ COMMITTED.");

	context = AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	for (int i = 0; i < max_jobs && found; i++)
	{
		IdemRun run = {.handler = handler, .context = context};
		MemoryContext oldcontext = MemoryContextSwitchTo(context);

		CHECK_FOR_INTERRUPTS();
		found = idem_work_fetch(&run, queue);
		if (found)
		{
			const char *outcome = "completed";
			ErrorData *error;

			/* not in the subtransaction: without a handler no job shall fail */
			idem_handler_check(handler, false);
			error = idem_subxact_try(idem_work_complete, &run, true);
			if (error != NULL)
				outcome = idem_work_fail(&run, error) ? "dead" : "retry";
			idem_answer_compare(&answer);
			idem_answer_int64(&answer, Anum_drain_result_job_id, run.fetched.job_id);
			idem_answer_text(&answer, Anum_drain_result_key, run.fetched.key);
			idem_answer_string(&answer, Anum_drain_result_outcome, outcome);
			idem_answer_jsonb(&answer, Anum_drain_result_result, run.result);
			idem_answer_string(&answer, Anum_drain_result_error,
							   error != NULL ? idem_subxact_describe(error) : NULL);
			idem_answer_put(&answer);
		}
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(context);
	}
	MemoryContextDelete(context);
	return (Datum) 0;
}
