/*
 * manystore.c
 *		Change many jobs in one call (J20): cancel, fail, snooze and reschedule live jobs, retry
 *		dead or cancelled ones.
 *
 * The jobs are given by their numbers, or by queue and state.  A call waits for no transaction:
 * it skips a job that another transaction holds.  doc/jobs-protocol.md says why it misses no
 * job and comes to an end when it is repeated.
 */
#include "postgres.h"

#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/admin/jobadmin.h"

/* A bulk call under way */
typedef struct Bulk
{
	IdemTable *jobs;
	IdemTable log; /* open for a retry only */
	const IdemMany *many;
	Snapshot snapshot; /* taken when the call began */
	TimestampTz now;
	IdemQueue queue; /* of the current job */
	int nchanged;
} Bulk;

/*
 * The new time and the new priority of a rescheduled job.  To move a job that is due to another
 * time that has passed would change nothing for the workers, and repeated calls would have no end.
 */
static IdemPosition
choose_position(const Bulk *bulk, const IdemJob *job)
{
	const IdemMany *many = bulk->many;
	IdemPosition position = idem_job_position(job);

	if (many->has_run_at && (job->run_at > bulk->now || many->run_at > bulk->now))
		position.run_at = many->run_at;
	if (many->has_priority)
		position.priority = many->priority;
	return position;
}

/*
 * Change a live job, which is locked.  Returns false if it stays as it is, because another
 * transaction is changing an older row of its number in the history (J13).
 *
 * S5: without tokens an operator ends the attempt, and not its worker: it counts, but it is no
 * run, because how long the worker worked is not known.
 */
static bool
change_job(Bulk *bulk, const IdemJob *job)
{
	const IdemMany *many = bulk->many;
	IdemQueueRef *queue = bulk->queue.ref;
	IdemRunTime unknown;
	IdemRunTime *run_time = many->tokens != NULL ? NULL : &unknown;
	IdemEnd end = {.state = "cancelled"};
	TransactionId in_the_way;
	bool is_dead;
	IdemPosition position;
	TupleTableSlot *row;

	switch (many->kind)
	{
		case IDEM_MANY_CANCEL:
			end.at = idem_clock_now();
			if (!idem_history_move(bulk->jobs, job, &bulk->queue, &end, &in_the_way))
				return false;
			idem_counters_add_queue(queue, IDEM_QUEUE_COUNTER_CANCELLED);
			return true;
		case IDEM_MANY_FAIL:
			if (!idem_holdstore_fail_found(bulk->jobs, job, &bulk->queue, &many->fail, &is_dead,
										   run_time))
				return false;
			if (run_time != NULL)
				idem_counters_add_queue(queue, IDEM_QUEUE_COUNTER_FAILED);
			return true;
		case IDEM_MANY_SNOOZE:
			(void) idem_holdstore_snooze_found(bulk->jobs, job, &bulk->queue, many->delay,
											   run_time);
			if (run_time != NULL)
				idem_counters_add_queue(queue, IDEM_QUEUE_COUNTER_SNOOZED);
			return true;
		case IDEM_MANY_RESCHEDULE:
			position = choose_position(bulk, job);
			row = idem_table_copy_row(bulk->jobs, idem_job_row(job));
			idem_row_set(row, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(position.run_at));
			idem_row_set(row, IDEM_JOBS_PRIORITY, Int32GetDatum(position.priority));
			/*
			 * tells idem_why that this came after the last attempt; no worker has a token of the
			 * job
			 */
			if (job->token != 0)
				idem_row_set(row, IDEM_JOBS_TOKEN,
							 Int64GetDatum(idem_clock_next_token(job->token, idem_clock_now())));
			idem_jobrow_store(bulk->jobs, job, row, queue, IDEM_CHANGE_READY);
			idem_counters_add_queue(queue, IDEM_QUEUE_COUNTER_RESCHEDULED);
			return true;
		default:
			elog(ERROR, "unexpected kind %d of a bulk call", many->kind);
	}
}

/*
 * Change the live job in this row, if the call wants it and no other transaction holds it.
 * Returns false if the row has changed since it was read: look the job up again.  token: of the
 * worker's form, else 0.
 */
static bool
try_live(Bulk *bulk, TupleTableSlot *row, int64 token)
{
	const IdemMany *many = bulk->many;
	IdemQueueRef *queue = bulk->queue.ref;
	LockTupleMode mode = LockTupleExclusive;
	IdemJob job;
	TM_Result result;

	idem_job_read(&job, row);
	if (many->tokens != NULL && idem_holdstore_judge(&job, token) != IDEM_HOLD_OK)
		return true;
	if (many->worker != NULL && !idem_row_varlena_equals(row, IDEM_JOBS_WORKER, many->worker))
		return true;
	if (many->kind == IDEM_MANY_RESCHEDULE)
	{
		IdemPosition position = choose_position(bulk, &job);

		if (position.run_at == job.run_at && position.priority == job.priority)
			return true;
		/* J2: all others may delete the row, so an absorbed duplicate must keep them from it */
		mode = LockTupleNoKeyExclusive;
	}
	if ((many->states & (1 << idem_jobrow_state(bulk->jobs, &job, bulk->snapshot, bulk->now))) == 0)
		return true;
	result = idem_table_lock_row(bulk->jobs, job.tid, mode, LockWaitSkip, row);
	if (result != TM_Ok)
		return result == TM_WouldBlock;
	idem_job_read(&job, row);
	idem_touched_held(queue, false);
	if (change_job(bulk, &job))
		bulk->nchanged++;
	else
		idem_touched_held(queue, true);
	return true;
}

/*
 * Retry the job in this row of the history, unless another transaction holds the row.  The job is
 * inserted first: if a live job has its number, the row stays (J13).  Returns false if the row
 * has been removed since it was read.
 */
static bool
try_ended(Bulk *bulk, TupleTableSlot *row)
{
	TM_Result result =
		idem_table_lock_row(&bulk->log, row->tts_tid, LockTupleExclusive, LockWaitSkip, row);

	if (result != TM_Ok)
		return result == TM_WouldBlock;
	if (!idem_history_insert_again(bulk->jobs, row))
	{
		idem_history_warn_in_use(idem_row_int64(row, IDEM_JOB_LOG_JOB_ID));
		return true;
	}
	if (idem_table_delete(&bulk->log, row, true) != TM_Ok)
		elog(ERROR, "another transaction has removed a row that this transaction has locked");
	idem_counters_add_queue(bulk->queue.ref, IDEM_QUEUE_COUNTER_RETRIED);
	bulk->nchanged++;
	return true;
}

/* Change the latest version of the job with this number, if there is one */
static void
try_number(Bulk *bulk, int64 job_id, int64 token)
{
	bool done = false;

	while (!done)
	{
		IdemProbeResult probe;
		IdemJob job;

		if (bulk->many->kind == IDEM_MANY_RETRY)
		{
			IdemLookup lookup = idem_jobtable_by_number(&bulk->log, job_id);

			idem_probe_existing(&bulk->log, &lookup, &probe);
			if (probe.found != IDEM_FOUND_ROW)
				return;
			idem_queuestore_use_of_row(&bulk->log, probe.row, IDEM_JOB_LOG_QUEUE, &bulk->queue);
			/* a job that is done stays */
			done = !idem_row_bool(probe.row, IDEM_JOB_LOG_RETRYABLE) || try_ended(bulk, probe.row);
		}
		else if (idem_jobrow_find(bulk->jobs, job_id, &job, &bulk->queue))
			done = try_live(bulk, job.row, token);
		else
		{
			if (bulk->many->tokens != NULL)
				(void) idem_holdstore_judge(NULL, token);
			return;
		}
	}
}

/*
 * J20: change the jobs that the call addresses; returns how many were changed.  The snapshot
 * shows every job of a queue that was there when the call began in one version, wherever its row
 * moves, and nothing that the call itself writes.
 */
int
idem_manystore_change(IdemTable *jobs, const IdemMany *many)
{
	MemoryContext job_context =
		AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	MemoryContext oldcontext = CurrentMemoryContext;
	Bulk bulk = {.jobs = jobs, .many = many, .now = idem_clock_now()};
	bool retries = many->kind == IDEM_MANY_RETRY;
	IdemTable *table = retries ? &bulk.log : jobs;

	if (retries)
		idem_jobtable_open_log(&bulk.log, RowExclusiveLock);
	bulk.snapshot = RegisterSnapshot(GetLatestSnapshot());
	for (int i = 0; i < many->n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		MemoryContextSwitchTo(job_context);
		try_number(&bulk, DatumGetInt64(many->ids[i]),
				   many->tokens != NULL ? DatumGetInt64(many->tokens[i]) : 0);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(job_context);
	}
	if (many->n < 0)
	{
		/*
		 * the live jobs of the queue, or those that can be retried and have the state, the first
		 * end first
		 */
		const IdemShard *shard = idem_shard_get();
		Datum queue = PointerGetDatum(many->queue);
		Datum ended[] = {BoolGetDatum(true), queue, (Datum) 0};
		IdemLeafStart start = {.values = &queue, .n = 1, .nequal = 1};
		IdemLeafWalk walk;

		idem_queuestore_use(many->queue, &bulk.queue);
		if (retries)
		{
			ended[2] = CStringGetTextDatum(many->state);
			start =
				(IdemLeafStart){.values = ended, .n = lengthof(ended), .nequal = lengthof(ended)};
		}
		idem_leaf_begin(&walk, table,
						retries ? idem_jobtable_index(table, IDEM_INDEX_LOG_RETRY) :
								  idem_jobtable_index(table, IDEM_INDEX_FETCH),
						bulk.snapshot, &start);
		while (bulk.nchanged < many->max_jobs && idem_leaf_next_row(&walk))
		{
			int64 job_id =
				idem_row_int64(walk.row, retries ? IDEM_JOB_LOG_JOB_ID : IDEM_JOBS_JOB_ID);

			CHECK_FOR_INTERRUPTS();
			if (!idem_shard_has_job(shard, job_id))
				continue;
			MemoryContextSwitchTo(job_context);
			/* a row of the history never changes: if it has been removed, so be it */
			if (retries)
				(void) try_ended(&bulk, walk.row);
			else if (!try_live(&bulk, walk.row, 0))
				try_number(&bulk, job_id, 0);
			MemoryContextSwitchTo(oldcontext);
			MemoryContextReset(job_context);
		}
		idem_leaf_end(&walk);
	}
	UnregisterSnapshot(bulk.snapshot);
	if (retries)
		idem_table_close(&bulk.log);
	MemoryContextDelete(job_context);
	return bulk.nchanged;
}
