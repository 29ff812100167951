/*
 * manystore.c
 *		Change many live jobs in one call (J20): cancel, fail, snooze, reschedule.
 *
 * The jobs are given by their numbers, or by queue and state.  A call waits for no transaction:
 * it skips a job that another transaction holds.  doc/jobs-protocol.md says why it misses no
 * job and comes to an end when it is repeated.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/admin/jobadmin.h"

/* A bulk call under way */
typedef struct Bulk
{
	IdemTable *jobs;
	const IdemMany *many;
	Snapshot snapshot; /* taken when the call began */
	TimestampTz now;
	IdemQueue queue; /* of the current job */
	int nchanged;
} Bulk;

static bool
is_state_wanted(Bulk *bulk)
{
	IdemJob job = idem_job_found(bulk->jobs);

	return (bulk->many->states &
			(1 << idem_jobrow_state(bulk->jobs, &job, bulk->snapshot, bulk->now))) != 0;
}

/*
 * When the rescheduled job is due.  To move a job that is due to another time that has passed
 * would change nothing for the workers, and repeated calls would have no end.
 */
static TimestampTz
choose_run_at(Bulk *bulk)
{
	TimestampTz run_at = idem_row_timestamp(bulk->jobs->found, IDEM_JOBS_RUN_AT);

	if (!bulk->many->has_run_at || (run_at <= bulk->now && bulk->many->run_at <= bulk->now))
		return run_at;
	return bulk->many->run_at;
}

static int
choose_priority(Bulk *bulk)
{
	return bulk->many->has_priority ? bulk->many->priority :
									  idem_row_int32(bulk->jobs->found, IDEM_JOBS_PRIORITY);
}

/* Is the job found one that the call changes?  token: of the worker's form, else 0 */
static bool
is_wanted(Bulk *bulk, int64 token)
{
	IdemTable *jobs = bulk->jobs;
	const IdemMany *many = bulk->many;

	IdemJob job = idem_job_found(jobs);

	if (many->tokens != NULL && idem_holdstore_judge(&job, token) != IDEM_HOLD_OK)
		return false;
	if (many->worker != NULL && !idem_row_varlena_equals(jobs->found, IDEM_JOBS_WORKER, many->worker))
		return false;
	if (many->kind == IDEM_MANY_RESCHEDULE &&
		choose_run_at(bulk) == idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT) &&
		choose_priority(bulk) == idem_row_int32(jobs->found, IDEM_JOBS_PRIORITY))
		return false;
	return is_state_wanted(bulk);
}

/* J2: cancel and fail may delete the row, so an absorbed duplicate must keep them from it */
static LockTupleMode
choose_lock(const IdemMany *many)
{
	return many->kind == IDEM_MANY_RESCHEDULE ? LockTupleNoKeyExclusive : LockTupleExclusive;
}

/* J13: false if another transaction is changing an older row of the number in the history */
static bool
cancel_found(Bulk *bulk)
{
	IdemJob job = idem_job_found(bulk->jobs);
	TransactionId in_the_way;

	if (!idem_history_move(bulk->jobs, &job, &bulk->queue, "cancelled", NULL, &in_the_way))
		return false;
	idem_counters_add_queue(idem_queueref_get(bulk->queue.name), IDEM_QUEUE_COUNTER_CANCELLED);
	return true;
}

static void
reschedule_found(Bulk *bulk)
{
	IdemJob job = idem_job_found(bulk->jobs);
	TupleTableSlot *slot = idem_write_copy_row(bulk->jobs, bulk->jobs->found);

	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(choose_run_at(bulk)));
	idem_row_set(slot, IDEM_JOBS_PRIORITY, Int32GetDatum(choose_priority(bulk)));
	/* tells idem_why that this came after the last attempt; no worker has a token of the job */
	if (!idem_row_isnull(bulk->jobs->found, IDEM_JOBS_TOKEN))
		idem_row_set(slot, IDEM_JOBS_TOKEN,
					 Int64GetDatum(idem_clock_next_token(
						 idem_row_int64(bulk->jobs->found, IDEM_JOBS_TOKEN), idem_clock_now())));
	(void) idem_jobrow_store(bulk->jobs, &job, slot);
	idem_jobrow_note_job(slot);
	idem_counters_add_queue(idem_queueref_get(bulk->queue.name), IDEM_QUEUE_COUNTER_RESCHEDULED);
}

/*
 * S5: without tokens an operator ends the attempt, and not its worker: it counts, but it is no run,
 * because how long the worker worked is not known.
 */
static bool
end_attempt_found(Bulk *bulk)
{
	const IdemMany *many = bulk->many;
	bool fails = many->kind == IDEM_MANY_FAIL;
	IdemQueueCounter counter = fails ? IDEM_QUEUE_COUNTER_FAILED : IDEM_QUEUE_COUNTER_SNOOZED;
	IdemJob job = idem_job_found(bulk->jobs);
	IdemRunTime unknown;
	IdemRunTime *run_time = many->tokens != NULL ? NULL : &unknown;
	TransactionId in_the_way;
	bool is_dead;

	if (!fails)
		(void) idem_holdstore_snooze_found(bulk->jobs, &job, &bulk->queue, many->delay, run_time);
	else if (!idem_holdstore_fail_found(bulk->jobs, &job, &bulk->queue, &many->fail, &in_the_way,
										&is_dead, run_time))
		return false;
	if (run_time != NULL)
		idem_counters_add_queue(idem_queueref_get(bulk->queue.name), counter);
	return true;
}

/* Change the job found, which is locked; false: it stays as it is */
static bool
change_found(Bulk *bulk)
{
	const IdemMany *many = bulk->many;

	switch (many->kind)
	{
		case IDEM_MANY_CANCEL:
			return cancel_found(bulk);
		case IDEM_MANY_FAIL:
		case IDEM_MANY_SNOOZE:
			return end_attempt_found(bulk);
		case IDEM_MANY_RESCHEDULE:
			reschedule_found(bulk);
			return true;
		default:
			elog(ERROR, "unexpected kind %d of a bulk call", many->kind);
	}
}

/*
 * Change the job found, if the call wants it and no other transaction holds it.  Returns false
 * if the row has changed since it was found: look the job up again.
 */
static bool
try_found(Bulk *bulk, int64 token)
{
	IdemTable *jobs = bulk->jobs;
	TM_Result result;

	if (!is_wanted(bulk, token))
		return true;
	result = idem_table_lock_row(jobs, jobs->found->tts_tid, choose_lock(bulk->many), LockWaitSkip, jobs->found);
	if (result != TM_Ok)
		return result == TM_WouldBlock;
	idem_touched_held(idem_queueref_get(bulk->queue.name), false);
	if (change_found(bulk))
		bulk->nchanged++;
	else
		idem_touched_held(idem_queueref_get(bulk->queue.name), true);
	return true;
}

/* Change the latest version of the job with this number, if there is one */
static void
try_number(Bulk *bulk, int64 job_id, int64 token)
{
	bool found;

	do
	{
		IdemJob job;

		found = idem_jobrow_find(bulk->jobs, job_id, &job, &bulk->queue);
		if (!found && bulk->many->tokens != NULL)
			(void) idem_holdstore_judge(NULL, token);
	} while (found && !try_found(bulk, token));
}

static void
change_by_number(Bulk *bulk, MemoryContext job_context)
{
	const IdemMany *many = bulk->many;

	for (int i = 0; i < many->n; i++)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(job_context);

		CHECK_FOR_INTERRUPTS();
		try_number(bulk, DatumGetInt64(many->ids[i]),
				   many->tokens != NULL ? DatumGetInt64(many->tokens[i]) : 0);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(job_context);
	}
}

/*
 * Walk over the queue.  The snapshot shows every job that was there when the call began in one
 * version, wherever its row moves, and nothing that the call itself writes.
 */
static void
change_by_queue(Bulk *bulk, MemoryContext job_context)
{
	IdemTable *jobs = bulk->jobs;
	const IdemShard *shard = idem_shard_get();
	Datum queue = PointerGetDatum(bulk->many->queue);
	IdemLeafWalk walk;

	idem_queuestore_use(bulk->many->queue, &bulk->queue);
	idem_leaf_begin(&walk, jobs, idem_jobtable_fetch_index(jobs), bulk->snapshot, &(IdemLeafStart){.values = &queue, .n = 1, .nequal = 1});
	while (bulk->nchanged < bulk->many->max_jobs && idem_leaf_next_row(&walk))
	{
		int64 job_id = idem_row_int64(jobs->found, IDEM_JOBS_JOB_ID);
		MemoryContext oldcontext;

		CHECK_FOR_INTERRUPTS();
		if (!idem_shard_has_job(shard, job_id))
			continue;
		oldcontext = MemoryContextSwitchTo(job_context);
		if (!try_found(bulk, 0))
			try_number(bulk, job_id, 0);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(job_context);
	}
	idem_leaf_end(&walk);
}

/* J20: change the jobs that the call addresses; returns how many were changed */
int
idem_manystore_change(IdemTable *jobs, const IdemMany *many)
{
	MemoryContext job_context =
		AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	Bulk bulk = {.jobs = jobs, .many = many, .now = idem_clock_now()};

	bulk.snapshot = RegisterSnapshot(GetLatestSnapshot());
	if (many->n >= 0)
		change_by_number(&bulk, job_context);
	else
		change_by_queue(&bulk, job_context);
	UnregisterSnapshot(bulk.snapshot);
	MemoryContextDelete(job_context);
	return bulk.nchanged;
}
