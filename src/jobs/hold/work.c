/*
 * work.c
 *		Run jobs with a handler, inside this backend: idem_work(), the loop of a worker, and what
 *		it shares with idem_drain(); SQL function idem_current_job.
 *
 * A job runs in the transaction that fetches it.  idem_work_complete() is called in a
 * subtransaction: after an error it is rolled back, and idem_work_fail() gives the job back in the
 * transaction that has it.
 *
 * In idem_work() each job has a transaction of its own: fetch it, run the handler, complete it,
 * commit (J21).  If the queue is empty and there is time left, the procedure waits as idem_wait()
 * does (A1).  doc/jobs-protocol.md says what is left behind if the backend ends at any of these
 * steps.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "jobs/hold/hold.h"

IDEM_FUNCTION(idem_current_job);
IDEM_FUNCTION(idem_work);

/* J22: the job whose handler runs, the innermost if one runs inside another; NULL: none */
static const IdemJobInfo *current = NULL;

/* Copy what is fetched into the context of the run; NULL stays NULL */
static Jsonb *
copy_jsonb(Jsonb *value)
{
	return value == NULL ? NULL : DatumGetJsonbPCopy(JsonbPGetDatum(value));
}

/* The store calls this in memory of its own */
static void
take_fetched(const IdemJobInfo *fetched, void *arg)
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
idem_work_fetch(IdemRun *run, text *queue)
{
	return fetch_job(run, queue, 0);
}

/*
 * J22: run code that calls a handler for this job.  An error restores the current job, too: the
 * caller may be the handler of another job, and catch it.
 */
void
idem_work_as_current(const IdemJobInfo *job, void (*run)(void *arg), void *arg)
{
	const IdemJobInfo *outer = current;

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
idem_work_complete(void *arg)
{
	IdemRun *run = arg;
	IdemTable jobs;
	IdemQueue queue = {0};
	IdemHold hold;

	idem_work_as_current(&run->fetched, run_handler, run);
	PushActiveSnapshot(GetTransactionSnapshot());
	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_holdstore_complete(&jobs, run->fetched.job_id, run->fetched.token, run->result,
								   &queue, run->counts_later ? &run->time : NULL);
	idem_table_close(&jobs);
	PopActiveSnapshot();
	/* the handler may have cancelled or removed its own job */
	if (hold != IDEM_HOLD_OK)
		idem_holdstore_refuse(hold, run->fetched.job_id);
}

/* V7, J21: give the job back after an error of the handler; true if it is dead */
bool
idem_work_fail(IdemRun *run, const ErrorData *error)
{
	IdemTable jobs;
	IdemFailure failure = {.error = cstring_to_text(idem_subxact_describe(error)),
						   .retry_in = -1,
						   .nowait = run->nowait};
	IdemHold hold;
	bool is_dead = false;

	run->result = NULL;
	PushActiveSnapshot(GetTransactionSnapshot());
	idem_jobtable_open(&jobs, RowExclusiveLock);
	hold = idem_holdstore_fail(&jobs, run->fetched.job_id, run->fetched.token, &failure, &is_dead,
							   run->counts_later ? &run->time : NULL);
	idem_table_close(&jobs);
	PopActiveSnapshot();
	if (hold != IDEM_HOLD_OK)
		idem_holdstore_refuse(hold, run->fetched.job_id);
	return is_dead;
}

/*
 * J21: the same after an error of the commit, in a later transaction: fetch the job again, and fail
 * it.  False if it cannot be fetched now, for example because another worker has it.
 */
bool
idem_work_fail_later(IdemRun *run, text *queue, const ErrorData *error)
{
	TimestampTz started_at = run->time.from;

	if (!fetch_job(run, queue, run->fetched.job_id))
		return false;
	(void) idem_work_fail(run, error);
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

#define COMMAND "idem_work()"

/* A call of idem_work() */
typedef struct Work
{
	bool is_nested;
	text *queue;
	Oid handler;
	int64 timeout; /* zero: until no job can be fetched */
	int64 until;   /* by the steady clock */
	int64 left;	   /* so many jobs may be run */
	int64 completed;
	int64 failed;
} Work;

/*
 * J21: a handler that ends its own backend, by pg_terminate_backend() or because it takes longer
 * than transaction_timeout.  These errors are FATAL, so no code of the call runs after them; but
 * the same payload would come first in every later call, too.  The backend therefore fails the job
 * while it exits.
 */
static struct
{
	bool is_watched;	 /* this backend watches the handlers of this session */
	bool has_terminated; /* the handler that runs has called pg_terminate_backend() */
	bool is_too_late;	 /* the last message was the error of transaction_timeout */
	int64 job_id;		 /* the job whose handler, or whose commit, runs; 0: none */
	TimestampTz started_at;
	char queue[IDEM_MAX_QUEUE_LEN + 1];
} running;

static object_access_hook_type prev_object_access_hook = NULL;

/* The executor calls this for each function before it calls the function */
static void
note_terminate(ObjectAccessType access, Oid class_id, Oid object_id, int sub_id, void *arg)
{
	if (prev_object_access_hook)
		prev_object_access_hook(access, class_id, object_id, sub_id, arg);
	if (access == OAT_FUNCTION_EXECUTE && class_id == ProcedureRelationId &&
		object_id == F_PG_TERMINATE_BACKEND && running.job_id != 0)
		running.has_terminated = true;
}

/* Error context callback: each message of the handler calls it, also a FATAL one */
static void
note_timeout(void *arg)
{
	running.is_too_late = geterrcode() == ERRCODE_TRANSACTION_TIMEOUT;
}

/* The end of its transaction is the end of the job, for this file */
void
idem_work_forget_job(void)
{
	running.job_id = 0;
}

/* A backend that exits cannot be interrupted, so it must not wait for a lock on a table */
static bool
lock_tables_at_exit(void)
{
	static const struct
	{
		const char *name;
		LOCKMODE lockmode;
	} tables[] = {
		{"jobs", RowExclusiveLock}, {"job_log", RowExclusiveLock}, {"queues", AccessShareLock}};
	Oid namespace = get_namespace_oid("idem", true);

	for (size_t i = 0; i < lengthof(tables); i++)
	{
		Oid relid = get_relname_relid(tables[i].name, namespace);

		if (!OidIsValid(relid) || !ConditionalLockRelationOid(relid, tables[i].lockmode))
			return false;
	}
	return true;
}

/*
 * J21: before_shmem_exit callback.  The error of the handler has ended nothing yet: roll its
 * transaction back, and fail the job in another one, as fail_uncommitted() does.  An error here
 * ends this callback and leaves the job as it was.
 */
static void
fail_at_exit(int code, Datum arg)
{
	IdemRun run = {
		.fetched.job_id = running.job_id,
		.nowait = true,
		.counts_later = true,
		.time = {.from = running.started_at}};
	text *queue;
	bool has_failed = false;
	ErrorData error = {
		.sqlerrcode = ERRCODE_ADMIN_SHUTDOWN,
		.message = "The handler has called pg_terminate_backend(), and its backend has exited."};

	if (running.job_id == 0 || !(running.has_terminated || running.is_too_late))
		return;
	if (running.is_too_late)
	{
		error.sqlerrcode = ERRCODE_TRANSACTION_TIMEOUT;
		error.message = "The job has taken longer than transaction_timeout, and its backend has exited.";
	}
	AbortOutOfAnyTransaction();
	/* the queue is needed after the commit, and the process ends */
	MemoryContextSwitchTo(TopMemoryContext);
	queue = cstring_to_text(running.queue);
	/* no client waits for the answer, so do not wait for a standby */
	SetConfigOption("synchronous_commit", "local", PGC_SUSET, PGC_S_OVERRIDE);
	StartTransactionCommand();
	run.context = CurTransactionContext;
	if (lock_tables_at_exit())
		has_failed = idem_work_fail_later(&run, queue, &error);
	CommitTransactionCommand();
	if (!has_failed)
		return;
	/* S1: counts are pending, and entries pinned, until a transaction ends */
	StartTransactionCommand();
	idem_counters_add_queue_time(idem_queueref_get(queue), IDEM_QUEUE_COUNTER_FAILED,
								 IDEM_HISTOGRAM_RUN, run.time.from, run.time.to);
	CommitTransactionCommand();
}

/* The number of jobs to run at most */
static int64
get_max_jobs(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return PG_INT64_MAX;
	if (PG_GETARG_INT32(arg) < 1)
		idem_args_refuse_value("max_jobs", psprintf("The number is %d; it must be at least 1.", PG_GETARG_INT32(arg)),
							   "Leave it out to run as many jobs as there are.");
	return PG_GETARG_INT32(arg);
}

/* J2: a handler may have changed the defaults of the session, with which a transaction begins */
static void
check_transaction(void)
{
	PreventCommandIfReadOnly(COMMAND);
	idem_fetchstore_check_isolation(COMMAND, "SET default_transaction_isolation = 'read committed'.");
}

/* Commit.  An error ends the call, unless it may be returned. */
static ErrorData *
commit_transaction(bool may_fail)
{
	ErrorData *error = idem_procxact_commit();

	if (error != NULL && !may_fail)
		ReThrowError(error);
	return error;
}

/* S1, S5: the end of the attempt has committed */
static void
count_end(const Work *work, const IdemRun *run, IdemQueueCounter counter)
{
	idem_counters_add_queue_time(idem_queueref_get(work->queue), counter, IDEM_HISTOGRAM_RUN,
								 run->time.from, run->time.to);
}

/* J21: the commit has failed, and rolled the work back: the attempt counts nevertheless */
static void
fail_uncommitted(Work *work, IdemRun *run, const ErrorData *error)
{
	bool has_failed;

	check_transaction();
	has_failed = idem_work_fail_later(run, work->queue, error);
	(void) commit_transaction(false);
	if (!has_failed)
		return;
	work->failed++;
	count_end(work, run, IDEM_QUEUE_COUNTER_FAILED);
}

/*
 * J21: run the job that was fetched, and commit.  A cancel is over when its error is raised, so the
 * same cancel does not interrupt the fail of the job; a second one may, and then the job waits.
 */
static void
run_job(Work *work, IdemRun *run)
{
	ErrorData *error;
	ErrorData *commit_error;
	ErrorContextCallback context = {
		.previous = error_context_stack, .callback = note_timeout};

	/* not in the subtransaction: without a handler no job shall fail */
	idem_handler_check(run->handler, false);
	running.has_terminated = running.is_too_late = false;
	running.started_at = idem_clock_token_time(run->fetched.token);
	running.job_id = run->fetched.job_id;
	idem_fn_at_end |= IDEM_AT_END_JOB;
	error_context_stack = &context;
	error = idem_subxact_catch(idem_work_complete, run);
	if (error != NULL)
		(void) idem_work_fail(run, error);
	commit_error = commit_transaction(true);
	error_context_stack = context.previous;
	if (commit_error != NULL)
		fail_uncommitted(work, run, commit_error);
	else if (error != NULL)
	{
		work->failed++;
		count_end(work, run, IDEM_QUEUE_COUNTER_FAILED);
	}
	else
	{
		work->completed++;
		count_end(work, run, IDEM_QUEUE_COUNTER_COMPLETED);
	}
	if (commit_error != NULL)
		error = commit_error;

	/*
	 * Does the error end the call?  The job has failed nevertheless, else it would come first in
	 * every later call and end that one, too: a job that takes longer than statement_timeout, for
	 * example.
	 */
	if (error != NULL && (idem_subxact_is_intervention(error) || idem_subxact_is_of_server(error)))
		ReThrowError(error);
}

/*
 * J21: run jobs, each in a transaction of its own.  With a timeout, the call runs no further job
 * after it has passed; without one it ends when no job can be fetched.
 */
static void
work_in_turns(Work *work)
{
	MemoryContext oldcontext = CurrentMemoryContext;
	MemoryContext context = AllocSetContextCreate(oldcontext, "idem work", ALLOCSET_DEFAULT_SIZES);
	bool goes_on = true;

	while (goes_on)
	{
		IdemRun run = {.handler = work->handler, .context = context, .counts_later = true};

		MemoryContextSwitchTo(context);
		idem_procxact_restart(work->is_nested);
		check_transaction();
		if (idem_work_fetch(&run, work->queue))
		{
			run_job(work, &run);
			goes_on = --work->left > 0 &&
				(work->timeout == 0 || idem_clock_steady() < work->until);
		}
		else
		{
			int64 left;

			/* a job without attempts left may have become dead */
			(void) commit_transaction(false);
			left = work->until - idem_clock_steady();
			goes_on = left > 0 && idem_wait_for_queues(COMMAND, &work->queue, 1, left) >= 0;
		}
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(context);
	}
	MemoryContextDelete(context);
}

Datum
idem_work(PG_FUNCTION_ARGS)
{
	Work work = {0};
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_work_signature, COMMAND);
	idem_sleep_check(fcinfo, COMMAND);
	work.queue = idem_args_queue(fcinfo, 0);
	work.handler = idem_handler_arg(fcinfo, 1);
	idem_args_require(fcinfo, 2, "timeout", "Leave it out to end when no job can be fetched.");
	work.timeout = idem_args_timeout(fcinfo, 2);
	work.left = get_max_jobs(fcinfo, 3);
	idem_handler_check(work.handler, false);
	work.is_nested = SPI_inside_nonatomic_context();
	work.until = idem_clock_steady() + work.timeout;
	text_to_cstring_buffer(work.queue, running.queue, sizeof(running.queue));
	if (!running.is_watched)
	{
		before_shmem_exit(fail_at_exit, (Datum) 0);
		prev_object_access_hook = object_access_hook;
		object_access_hook = note_terminate;
		running.is_watched = true;
	}

	work_in_turns(&work);
	idem_answer_begin(&answer, fcinfo, &idem_work_signature);
	idem_answer_int64(&answer, Anum_idem_work_completed, work.completed);
	idem_answer_int64(&answer, Anum_idem_work_failed, work.failed);
	return idem_answer_row(&answer);
}
