/*
 * jobrow.c
 *		Interpret a row of idem.jobs, and write a changed one.
 *
 * lease_until is null in a job that waits.  A fetch sets it; a fetch without a
 * lease sets it to the time of the fetch, and leaves leased_at null.  Both stay until a
 * worker gives the job back or the job ends.  The views derive the state of a job from the same
 * columns, in SQL.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/tableam.h"
#include "utils/snapmgr.h"

#include "jobs/row/job.h"

const char *const idem_jobrow_state_words[] = {
	[IDEM_JOB_WAITING] = "waiting",
	[IDEM_JOB_SCHEDULED] = "scheduled",
	[IDEM_JOB_BLOCKED] = "blocked",
	[IDEM_JOB_RUNNING] = "running",
	[IDEM_JOB_EXPIRED] = "expired",
	NULL};

static bool
is_key(IdemTable *table, AttrNumber queue_attno, text *queue, text *key)
{
	return idem_row_varlena_equals(table->found, queue_attno + 1, key) &&
		idem_row_varlena_equals(table->found, queue_attno, queue);
}

/*
 * Does the row found have the key?  Its hash is the same, but different keys can
 * have the same hash.  An enqueue reads the jobs of all keys that have its hash,
 * so the number of such keys is limited; *others collects them.  NULL: any number of them may
 * have it.  Works for idem.jobs, idem.job_keys and idem.job_log, where the key is the column
 * after the queue.
 */
bool
idem_jobrow_has_key(IdemTable *table, AttrNumber queue_attno, text *queue, text *key,
					IdemSameHash *others)
{
	if (is_key(table, queue_attno, queue, key))
		return true;
	if (others == NULL || idem_row_isnull(table->found, queue_attno + 1))
		return false;
	for (int i = 0; i < others->n; i++)
	{
		if (is_key(table, queue_attno, others->queues[i], others->keys[i]))
			return false;
	}
	others->queues[others->n] = idem_row_text(table->found, queue_attno);
	others->keys[others->n] = idem_row_text(table->found, queue_attno + 1);
	if (++others->n == IDEM_MAX_SAME_HASH)
		ereport(ERROR,
				errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				errmsg("too many keys of jobs have the same hash"),
				errdetail("%d other keys have the same hash as this key; at most %d keys can have the same hash.",
						  others->n, IDEM_MAX_SAME_HASH),
				errhint("Use another key, or wait until jobs with the same %s have ended.", "key_hash"));
	return false;
}

/*
 * J8: what key_hash is in a job that ignores its key: the complement of the hash.  So one index
 * finds all jobs of a key, and an enqueue does not read those that ignore it.
 */
int64
idem_jobrow_ignored_hash(int64 key_hash)
{
	return ~key_hash;
}

/* Give the row of a job its key, which has this hash */
void
idem_jobrow_set_key(TupleTableSlot *slot, text *key, int64 key_hash, bool holds_key)
{
	if (!holds_key)
		key_hash = idem_jobrow_ignored_hash(key_hash);
	idem_row_set(slot, IDEM_JOBS_KEY_HASH, Int64GetDatum(key_hash));
	idem_row_set(slot, IDEM_JOBS_KEY, PointerGetDatum(key));
	if (!holds_key)
		idem_row_set(slot, IDEM_JOBS_IGNORES_KEY, BoolGetDatum(true));
}

/* J8: does the job found hold its key? */
bool
idem_jobrow_holds_key(IdemTable *jobs)
{
	return !idem_row_isnull(jobs->found, IDEM_JOBS_KEY_HASH) &&
		idem_row_isnull(jobs->found, IDEM_JOBS_IGNORES_KEY);
}

/* The hash of queue and key of the job found, whether it holds its key or not */
int64
idem_jobrow_key_hash(IdemTable *jobs)
{
	int64 key_hash = idem_row_int64(jobs->found, IDEM_JOBS_KEY_HASH);

	return idem_jobrow_holds_key(jobs) ? key_hash : idem_jobrow_ignored_hash(key_hash);
}

/*
 * Does a worker have the job?  The worker may complete the job even after the lease
 * has expired, until another worker fetches the job or it is made dead (J11).
 */
bool
idem_jobrow_is_leased(IdemTable *jobs)
{
	return !idem_row_isnull(jobs->found, IDEM_JOBS_LEASE_UNTIL);
}

/*
 * When the worker that has the job found fetched it (S5); 0: no worker has it.  The fetch has made
 * the token from the clock, so the row needs no column for this.  The time is wrong, and may be in
 * the future, if the clock was set back before the fetch.
 */
TimestampTz
idem_jobrow_started_at(IdemTable *jobs)
{
	if (!idem_jobrow_is_leased(jobs))
		return 0;
	return idem_clock_token_time(idem_row_int64(jobs->found, IDEM_JOBS_TOKEN));
}

/*
 * Since when the job found, which can be fetched, has been due (S5).  A follow-up job was
 * blocked for a part of this time; when the job that it follows ended is not known here.
 */
TimestampTz
idem_jobrow_due_since(IdemTable *jobs)
{
	if (idem_jobrow_is_leased(jobs))
		return idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL);
	return Max(idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT),
			   idem_row_timestamp(jobs->found, IDEM_JOBS_ENQUEUED_AT));
}

/* Length of the last lease or renewal of the job found; 0: it was fetched without a lease */
int64
idem_jobrow_lease(IdemTable *jobs)
{
	if (idem_row_isnull(jobs->found, IDEM_JOBS_LEASED_AT))
		return 0;
	return idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL) -
		idem_row_timestamp(jobs->found, IDEM_JOBS_LEASED_AT);
}

/* Has this transaction fetched the job found without a lease, and not leased it since? */
bool
idem_jobrow_was_fetched_here(IdemTable *jobs)
{
	return idem_row_is_mine(jobs->found) && idem_jobrow_is_leased(jobs) &&
		idem_row_isnull(jobs->found, IDEM_JOBS_LEASED_AT);
}

int
idem_jobrow_max_attempts(IdemTable *jobs, const IdemQueue *queue)
{
	int max_attempts = idem_row_int32(jobs->found, IDEM_JOBS_MAX_ATTEMPTS);

	return max_attempts != 0 ? max_attempts : queue->max_attempts;
}

/* Was the last fetch of the job for its last attempt? */
bool
idem_jobrow_has_no_attempts_left(IdemTable *jobs, const IdemQueue *queue)
{
	return idem_row_int32(jobs->found, IDEM_JOBS_ATTEMPT) >= idem_jobrow_max_attempts(jobs, queue);
}

/* Is it a follow-up job, and does the snapshot show the job that it follows? (J4) */
static bool
waits_by_snapshot(IdemTable *jobs, Snapshot snapshot)
{
	IdemLookup lookup;
	TupleTableSlot *slot;
	IndexScanDesc scan;
	bool found;

	if (idem_row_isnull(jobs->found, IDEM_JOBS_AFTER_JOB))
		return false;
	lookup = idem_jobtable_by_id(jobs, idem_row_int64(jobs->found, IDEM_JOBS_AFTER_JOB));
	slot = table_slot_create(jobs->heap, NULL);
	scan = idem_probe_begin(jobs, &lookup, snapshot);
	found = index_getnext_slot(scan, ForwardScanDirection, slot);
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	return found;
}

/* Is it a follow-up job that must wait, because the job that it follows still exists? (J4) */
bool
idem_jobrow_waits_for_other(IdemTable *jobs)
{
	Snapshot snapshot;
	bool waits;

	if (idem_row_isnull(jobs->found, IDEM_JOBS_AFTER_JOB))
		return false;
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	waits = waits_by_snapshot(jobs, snapshot);
	UnregisterSnapshot(snapshot);
	return waits;
}

/*
 * Like idem_jobrow_waits_for_other(), but also report whether an open transaction, this one
 * included, is changing or removing the job that the job found follows.
 */
IdemBlocked
idem_jobrow_is_blocked(IdemTable *jobs)
{
	TupleTableSlot *found = jobs->found;
	IdemLookup lookup;
	IdemProbeResult probe;
	bool is_settled;

	if (idem_row_isnull(jobs->found, IDEM_JOBS_AFTER_JOB))
		return IDEM_BLOCKED_NOT;
	lookup = idem_jobtable_by_id(jobs, idem_row_int64(jobs->found, IDEM_JOBS_AFTER_JOB));
	/* the job found stays in its slot */
	jobs->found = table_slot_create(jobs->heap, NULL);
	idem_probe(jobs, &lookup, &probe);
	is_settled = probe.found == IDEM_FOUND_ROW && !TransactionIdIsValid(probe.xwait) &&
		!idem_row_is_mine(jobs->found);
	ExecDropSingleTupleTableSlot(jobs->found);
	jobs->found = found;
	if (is_settled)
		return IDEM_BLOCKED;
	return idem_jobrow_waits_for_other(jobs) ? IDEM_BLOCKED_FOR_NOW : IDEM_BLOCKED_NOT;
}

/*
 * J14: this transaction has written a row with a hash at this place, and the entry of the
 * row is in the index on the hash.  The caller holds the lock on the hash.
 */
void
idem_jobrow_note_place(const text *queue, int64 key_hash, ItemPointer place)
{
	IdemQueueRef *ref = idem_queueref_get(queue);

	if (idem_queueref_pin(ref))
		idem_keyskips_note(ref->entry.skips, key_hash, place);
}

/*
 * Update the row of a job that this transaction has locked; returns whether its new version has
 * entries of its own in indexes.  A job that holds its key is
 * updated under the lock on its hash, so that a concurrent enqueue of the key
 * does not miss the job while its row moves.
 */
bool
idem_jobrow_store(IdemTable *jobs, TupleTableSlot *new)
{
	bool has_moved;

	if (idem_jobrow_holds_key(jobs))
	{
		int64 key_hash = idem_row_int64(jobs->found, IDEM_JOBS_KEY_HASH);

		idem_write_update_locked(jobs, jobs->found, new, key_hash, &has_moved);
		if (has_moved)
			idem_jobrow_note_place(
				DatumGetTextPP(new->tts_values[IDEM_JOBS_QUEUE - 1]), key_hash,
				&new->tts_tid);
		idem_table_unlock_hash(jobs, key_hash);
	}
	else if (idem_write_update(jobs, jobs->found, new, &has_moved) != TM_Ok)
		elog(ERROR, "another transaction has changed a job that this transaction has locked");
	return has_moved;
}

/*
 * The state, as the views show it.  A job that runs in an open transaction has the state that
 * it had before, because its fetch is not visible.  The snapshot tells whether a job that this
 * one follows is still there.
 */
IdemJobState
idem_jobrow_state(IdemTable *jobs, Snapshot snapshot, TimestampTz now)
{
	if (idem_jobrow_is_leased(jobs))
		return idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL) > now ? IDEM_JOB_RUNNING :
																			  IDEM_JOB_EXPIRED;
	if (waits_by_snapshot(jobs, snapshot))
		return IDEM_JOB_BLOCKED;
	return idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT) > now ? IDEM_JOB_SCHEDULED : IDEM_JOB_WAITING;
}

/* Name of the state, by the snapshot of the statement */
const char *
idem_jobrow_state_name(IdemTable *jobs)
{
	return idem_jobrow_state_words[idem_jobrow_state(jobs, GetActiveSnapshot(), idem_clock_now())];
}
