/*
 * retrystore.c
 *		Retry many dead or cancelled jobs in one call (J20).
 *
 * The jobs are given by their numbers, or by queue and state.  A call waits for no transaction:
 * it skips a row of the history that another transaction holds.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "jobs/admin/jobadmin.h"

/* A bulk retry under way */
typedef struct Bulk
{
	IdemTable *jobs;
	IdemTable log;
	const IdemMany *many;
	IdemQueue queue; /* of the current job */
	int nretried;
} Bulk;

/*
 * Retry the job found in the history, unless another transaction holds its row.  The job is
 * inserted first: if a live job has its number, the row stays (J13).  Returns false if the
 * row has been removed since it was found.
 */
static bool
try_found(Bulk *bulk)
{
	IdemTable *log = &bulk->log;
	TM_Result result =
		idem_table_lock_row(log, log->found->tts_tid, LockTupleExclusive, LockWaitSkip, log->found);

	if (result != TM_Ok)
		return result == TM_WouldBlock;
	if (!idem_jobstore_insert_again(bulk->jobs, log))
	{
		idem_history_warn_in_use(idem_row_int64(log->found, IDEM_JOB_LOG_JOB_ID));
		return true;
	}
	if (idem_write_delete(log, log->found, true) != TM_Ok)
		elog(ERROR, "another transaction has removed a row that this transaction has locked");
	idem_counters_add_queue(idem_queueref_get(bulk->queue.name), IDEM_QUEUE_COUNTER_RETRIED);
	bulk->nretried++;
	return true;
}

/* Retry the job with this number, if it is in the history and not done */
static void
try_number(Bulk *bulk, int64 job_id)
{
	IdemTable *log = &bulk->log;
	IdemLookup lookup = idem_jobtable_by_number(log, job_id);
	IdemProbeResult probe;
	bool found;

	do
	{
		idem_probe_existing(log, &lookup, &probe);
		found = probe.found == IDEM_FOUND_ROW;
		if (found)
		{
			idem_queuestore_use_of_row(log, IDEM_JOB_LOG_QUEUE, &bulk->queue);
			found = idem_row_bool(log->found, IDEM_JOB_LOG_RETRYABLE);
		}
	} while (found && !try_found(bulk));
}

static void
retry_by_number(Bulk *bulk, MemoryContext job_context)
{
	for (int i = 0; i < bulk->many->n; i++)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(job_context);

		CHECK_FOR_INTERRUPTS();
		try_number(bulk, DatumGetInt64(bulk->many->ids[i]));
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(job_context);
	}
}

/* Walk over the jobs of the queue that can be retried and have this state, the first end first */
static void
retry_by_state(Bulk *bulk, Snapshot snapshot, const char *state, MemoryContext job_context)
{
	IdemTable *log = &bulk->log;
	const IdemShard *shard = idem_shard_get();
	Datum values[] = {
		BoolGetDatum(true), PointerGetDatum(bulk->many->queue), CStringGetTextDatum(state)};
	IdemLeafWalk walk;

	idem_leaf_begin(&walk, log, idem_jobtable_retry_index(log), snapshot, &(IdemLeafStart){.values = values, .n = lengthof(values), .nequal = lengthof(values)});
	while (bulk->nretried < bulk->many->max_jobs && idem_leaf_next_row(&walk))
	{
		MemoryContext oldcontext;

		CHECK_FOR_INTERRUPTS();
		if (!idem_shard_has_job(shard, idem_row_int64(log->found, IDEM_JOB_LOG_JOB_ID)))
			continue;
		oldcontext = MemoryContextSwitchTo(job_context);
		/* a row of the history never changes: if it has been removed, so be it */
		(void) try_found(bulk);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(job_context);
	}
	idem_leaf_end(&walk);
}

/* J20: retry the jobs that the call addresses; returns how many were retried */
int
idem_retrystore_retry(IdemTable *jobs, const IdemMany *many)
{
	MemoryContext job_context =
		AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	Bulk bulk = {.jobs = jobs, .many = many};

	idem_jobtable_open_log(&bulk.log, RowExclusiveLock);
	if (many->n >= 0)
		retry_by_number(&bulk, job_context);
	else
	{
		Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());

		idem_queuestore_use(many->queue, &bulk.queue);
		retry_by_state(&bulk, snapshot, many->state, job_context);
		UnregisterSnapshot(snapshot);
	}
	idem_table_close(&bulk.log);
	MemoryContextDelete(job_context);
	return bulk.nretried;
}
