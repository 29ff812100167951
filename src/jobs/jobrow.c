/*
 * jobrow.c
 *		A row of idem.jobs: what it means.
 *
 * A job that nobody has carries no deadline.  From its fetch on it has one,
 * which a fetch without a lease sets to the moment itself, until it is given
 * back, ends or is fetched again.  Only the views for people say the same once
 * more, in SQL.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/tableam.h"
#include "executor/executor.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

static bool
is_key(IdemTable *table, AttrNumber queue_attno, text *queue, text *key)
{
	return idem_row_varlena_equals(table, queue_attno + 1, key) &&
		idem_row_varlena_equals(table, queue_attno, queue);
}

/*
 * Does the row found, which has the hash of the key, have the key itself?  An
 * enqueue looks at the jobs of every key with its hash, so there may be few of
 * them.  For idem.jobs and idem.job_keys, where the key stands after the queue.
 */
bool
idem_jobrow_has_key(IdemTable *table, AttrNumber queue_attno, text *queue, text *key,
					IdemSameHash *others)
{
	if (is_key(table, queue_attno, queue, key))
		return true;
	if (idem_row_isnull(table, queue_attno + 1))
		return false;
	for (int i = 0; i < others->n; i++)
	{
		if (is_key(table, queue_attno, others->queues[i], others->keys[i]))
			return false;
	}
	others->queues[others->n] = idem_row_text(table, queue_attno);
	others->keys[others->n] = idem_row_text(table, queue_attno + 1);
	if (++others->n == IDEM_MAX_SAME_HASH)
		ereport(ERROR,
				errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				errmsg("too many keys of jobs have the same hash"),
				errdetail("%d other keys have the hash of this one; with it there may be %d.",
						  others->n, IDEM_MAX_SAME_HASH),
				errhint("Use another key, or wait until jobs with the same %s have ended.", "key_hash"));
	return false;
}

/* Has somebody fetched it, and may still complete it?  Also when the lease has run out. */
bool
idem_jobrow_is_leased(IdemTable *jobs)
{
	return !idem_row_isnull(jobs, IDEM_JOBS_LEASE_UNTIL);
}

int
idem_jobrow_max_attempts(IdemTable *jobs, const IdemQueue *queue)
{
	int max_attempts = idem_row_int32(jobs, IDEM_JOBS_MAX_ATTEMPTS);

	return max_attempts != 0 ? max_attempts : queue->max_attempts;
}

/* Was the attempt that it was fetched for the last one? */
bool
idem_jobrow_has_no_attempts_left(IdemTable *jobs, const IdemQueue *queue)
{
	return idem_row_int32(jobs, IDEM_JOBS_ATTEMPT) >= idem_jobrow_max_attempts(jobs, queue);
}

/* Is it a rerun, and the job that it comes after is still there, by this snapshot? */
static bool
waits_for_other(IdemTable *jobs, Snapshot snapshot)
{
	IdemLookup lookup;
	TupleTableSlot *slot;
	IndexScanDesc scan;
	bool found;

	if (idem_row_isnull(jobs, IDEM_JOBS_AFTER_JOB))
		return false;
	lookup = idem_jobtable_by_id(jobs, idem_row_int64(jobs, IDEM_JOBS_AFTER_JOB));
	slot = table_slot_create(jobs->heap, NULL);
	scan = idem_probe_begin(jobs, &lookup, snapshot);
	found = index_getnext_slot(scan, ForwardScanDirection, slot);
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	return found;
}

/* The same as of now */
bool
idem_jobrow_waits_for_other(IdemTable *jobs)
{
	Snapshot snapshot;
	bool waits;

	if (idem_row_isnull(jobs, IDEM_JOBS_AFTER_JOB))
		return false;
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	waits = waits_for_other(jobs, snapshot);
	UnregisterSnapshot(snapshot);
	return waits;
}

/* The row to be written: what was found, with all columns if the change needs them */
TupleTableSlot *
idem_jobrow_copy(IdemTable *jobs, bool full)
{
	for (AttrNumber attno = IDEM_JOBS_SHORT_NATTS + 1; attno <= IDEM_JOBS_NATTS && !full; attno++)
		full = !idem_row_isnull(jobs, attno);
	return idem_write_copy_row(jobs, full);
}

/*
 * Put the row written in the place of the one found, which this transaction
 * has locked.  If it has a key, nobody looks for jobs of that key meanwhile.
 */
void
idem_jobrow_store(IdemTable *jobs)
{
	if (!idem_row_isnull(jobs, IDEM_JOBS_KEY_HASH))
		idem_write_update_hashed(jobs, idem_row_int64(jobs, IDEM_JOBS_KEY_HASH));
	else if (idem_write_update(jobs) != TM_Ok)
		elog(ERROR, "a job locked by this transaction was changed by another one");
}

/* For people; a job that runs in an open transaction looks as it was before */
const char *
idem_jobrow_state_name(IdemTable *jobs)
{
	TimestampTz now = idem_clock_now();

	if (idem_jobrow_is_leased(jobs))
		return idem_row_timestamp(jobs, IDEM_JOBS_LEASE_UNTIL) > now ? "running" : "expired";
	if (waits_for_other(jobs, GetActiveSnapshot()))
		return "blocked";
	return idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT) > now ? "scheduled" : "waiting";
}
