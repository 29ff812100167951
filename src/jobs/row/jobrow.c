/*
 * jobrow.c
 *		What a row of idem.jobs means, and what a change of it means to others.
 *
 * lease_until is null in a job that waits.  A fetch sets it; a fetch without a
 * lease sets it to the time of the fetch, and leaves leased_at null.  Both stay until a
 * worker gives the job back or the job ends.  The views derive the state of a job from the same
 * columns, in SQL.
 *
 * Fetches skip parts of the index in which no job can be fetched (fetchstore.c).  A
 * transaction that changes this notes the position of the job, before its commit, but
 * after it has written the job: a fetch that looks at the index at the same time sees
 * either the job or the note.  doc/jobs-protocol.md has the protocol.
 *
 * The note stays if the transaction rolls back.  Then fetches skip less than they could.
 *
 * The end of the transaction also wakes sessions that wait for jobs: src/wake/touched.c.
 */
#include "postgres.h"

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
is_key(TupleTableSlot *row, AttrNumber queue_attno, text *queue, text *key)
{
	return idem_row_varlena_equals(row, queue_attno + 1, key) &&
		idem_row_varlena_equals(row, queue_attno, queue);
}

/*
 * Does the row have the key?  Its hash is the same, but different keys can
 * have the same hash.  An enqueue reads the jobs of all keys that have its hash,
 * so the number of such keys is limited; *others collects them.  NULL: any number of them may
 * have it.  Works for idem.jobs, idem.job_keys and idem.job_log, where the key is the column
 * after the queue.
 */
bool
idem_jobrow_has_key(TupleTableSlot *row, AttrNumber queue_attno, text *queue, text *key,
					IdemSameHash *others)
{
	if (is_key(row, queue_attno, queue, key))
		return true;
	if (others == NULL || idem_row_isnull(row, queue_attno + 1))
		return false;
	for (int i = 0; i < others->n; i++)
	{
		if (is_key(row, queue_attno, others->queues[i], others->keys[i]))
			return false;
	}
	others->queues[others->n] = idem_row_text(row, queue_attno);
	others->keys[others->n] = idem_row_text(row, queue_attno + 1);
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

/* J4: is it a follow-up job, and does the snapshot show the job that it follows? */
static bool
waits_by_snapshot(IdemTable *jobs, const IdemJob *job, Snapshot snapshot)
{
	IdemLookup lookup;
	TupleTableSlot *slot;
	IndexScanDesc scan;
	bool found;

	if (job->after_job == 0)
		return false;
	lookup = idem_jobtable_by_id(jobs, job->after_job);
	slot = table_slot_create(jobs->heap, NULL);
	scan = idem_probe_begin(jobs, &lookup, snapshot);
	found = index_getnext_slot(scan, ForwardScanDirection, slot);
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	return found;
}

/* J4: is it a follow-up job that must wait, because the job that it follows still exists? */
bool
idem_jobrow_waits_for_other(IdemTable *jobs, const IdemJob *job)
{
	Snapshot snapshot;
	bool waits;

	if (job->after_job == 0)
		return false;
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	waits = waits_by_snapshot(jobs, job, snapshot);
	UnregisterSnapshot(snapshot);
	return waits;
}

/*
 * Is the job that this one follows there, and does no open transaction, not even this one, change
 * it?
 */
static bool
is_settled(IdemTable *jobs, int64 job_id)
{
	IdemLookup lookup = idem_jobtable_by_id(jobs, job_id);
	IdemProbeResult probe;
	bool settled;

	/* the job that follows stays in the slot of the table */
	lookup.row = table_slot_create(jobs->heap, NULL);
	idem_probe(jobs, &lookup, &probe);
	settled = probe.found == IDEM_FOUND_ROW && !TransactionIdIsValid(probe.xwait) &&
		!idem_row_is_mine(probe.row);
	ExecDropSingleTupleTableSlot(lookup.row);
	return settled;
}

/*
 * May a fetch take the job?  Row locks of other transactions are asked for apart: a fetch tries to
 * lock the row.  dirty: the snapshot that has shown the row.  The transaction that has fetched a
 * job does not take it again, even if the lease has expired.  M2: a job of another shard was left
 * behind and may run there.  exactly: tell a follow-up job that stays blocked (J4) from one that is
 * blocked for now; without it both are IDEM_FETCHABLE_BLOCKED.
 */
IdemFetchable
idem_jobrow_is_fetchable(IdemTable *jobs, const IdemJob *job, const SnapshotData *dirty,
						 const IdemShard *shard, TimestampTz now, bool exactly)
{
	if (unlikely(!idem_shard_has_job(shard, job->job_id)))
		return IDEM_FETCHABLE_ELSEWHERE;
	if (TransactionIdIsValid(dirty->xmin) || TransactionIdIsValid(dirty->xmax))
		return IDEM_FETCHABLE_OPEN;
	if (job->run_at > now)
		return IDEM_FETCHABLE_LATER;
	if (job->is_leased)
		return job->lease_until > now || idem_job_is_mine(job) ? IDEM_FETCHABLE_LEASED :
																 IDEM_FETCHABLE;
	if (job->after_job == 0)
		return IDEM_FETCHABLE;
	if (exactly && is_settled(jobs, job->after_job))
		return IDEM_FETCHABLE_BLOCKED;
	if (!idem_jobrow_waits_for_other(jobs, job))
		return IDEM_FETCHABLE;
	return exactly ? IDEM_FETCHABLE_UNSETTLED : IDEM_FETCHABLE_BLOCKED;
}

/*
 * The state, as the views show it.  A job that runs in an open transaction has the state that
 * it had before, because its fetch is not visible.  The snapshot tells whether a job that this
 * one follows is still there.
 */
IdemJobState
idem_jobrow_state(IdemTable *jobs, const IdemJob *job, Snapshot snapshot, TimestampTz now)
{
	if (job->is_leased)
		return job->lease_until > now ? IDEM_JOB_RUNNING : IDEM_JOB_EXPIRED;
	if (waits_by_snapshot(jobs, job, snapshot))
		return IDEM_JOB_BLOCKED;
	return job->run_at > now ? IDEM_JOB_SCHEDULED : IDEM_JOB_WAITING;
}

/*
 * Find a live job by its number, whether or not the snapshot of the statement
 * shows it; false if there is none.  Sets queue to the settings of its queue.
 */
bool
idem_jobrow_find(IdemTable *jobs, int64 job_id, IdemJob *job, IdemQueue *queue)
{
	IdemLookup lookup = idem_jobtable_by_number(jobs, job_id);
	IdemProbeResult probe;

	idem_probe_existing(jobs, &lookup, &probe);
	if (probe.found != IDEM_FOUND_ROW)
		return false;
	idem_job_read(job, probe.row);
	idem_queuestore_use_of_row(jobs, probe.row, IDEM_JOBS_QUEUE, queue);
	return true;
}

/* Copy what both a fetch and idem_job() return of a live job; queue: the settings of its queue */
void
idem_jobrow_copy(const IdemJob *job, const IdemQueue *queue, IdemJobInfo *info)
{
	TupleTableSlot *row = idem_job_row(job);

	*info = (IdemJobInfo){
		.job_id = job->job_id,
		.queue = queue->name,
		.key = idem_row_text(row, IDEM_JOBS_KEY),
		.payload = idem_row_jsonb(row, IDEM_JOBS_PAYLOAD),
		.priority = job->priority,
		.attempt = job->attempt,
		.max_attempts = idem_job_max_attempts(job, queue),
		.enqueued_at = job->enqueued_at,
		.headers = idem_row_jsonb(row, IDEM_JOBS_HEADERS),
		.links = idem_row_jsonb(row, IDEM_JOBS_LINKS),
		.progress = idem_row_jsonb(row, IDEM_JOBS_PROGRESS)};
}

/* A key with more entries in the index may have many jobs that have ended: do not read them all */
#define MAX_FOLLOWERS 32

/*
 * J14: this transaction has written a row with a hash at this place, and the entry of the
 * row is in the index on the hash.  The caller holds the lock on the hash.
 */
void
idem_jobrow_note_place(IdemQueueRef *ref, int64 key_hash, ItemPointer place)
{
	if (idem_queueref_pin(ref))
		idem_skips_key_note(ref->entry.skips, key_hash, place);
}

/* Fetches must look at the position again from the time due on */
static void
note_position(IdemQueueRef *ref, const IdemPosition *position, TimestampTz due)
{
	idem_skips_note(idem_queueref_skips(ref), position, due, idem_clock_now());
}

/*
 * J14: this transaction has written a job, whose entries are in the indexes already.  It can be
 * fetched from the time due on: for fetches, and for waiters (A2).  follows: it is a follow-up
 * job (J4).
 */
void
idem_jobrow_note_ready(IdemQueueRef *ref, const IdemPosition *position, TimestampTz due,
					   bool follows)
{
	note_position(ref, position, due);
	idem_touched_job(ref, due, follows);
}

/* K14: this transaction has ended, given back or leased the job, which it was in this version */
void
idem_jobrow_note_unfetched(const IdemJob *job)
{
	if (idem_job_was_fetched_here(job))
		idem_unfinished_add(IDEM_UNFINISHED_JOBS, -1);
}

/*
 * Update the row of the job, which this transaction has locked, and note what that changes (J14).
 *
 * A job that holds its key is updated under the lock on its hash, so that a concurrent enqueue of
 * the key does not miss the job while its row moves.
 */
void
idem_jobrow_store(IdemTable *jobs, const IdemJob *job, TupleTableSlot *new, IdemQueueRef *ref,
				  IdemChange change)
{
	TupleTableSlot *row = idem_job_row(job);
	const Datum *values = new->tts_values - 1;
	IdemPosition position = {
		.priority = DatumGetInt32(values[IDEM_JOBS_PRIORITY]),
		.run_at = DatumGetTimestampTz(values[IDEM_JOBS_RUN_AT]),
		.job_id = job->job_id};
	TimestampTz due = position.run_at;
	bool has_moved;

	if (!new->tts_isnull[IDEM_JOBS_LEASE_UNTIL - 1])
		due = Max(due, DatumGetTimestampTz(values[IDEM_JOBS_LEASE_UNTIL]));
	if (job->holds_key)
	{
		idem_table_update_locked(jobs, row, new, job->key_hash, &has_moved);
		if (has_moved)
			idem_jobrow_note_place(ref, job->key_hash, &new->tts_tid);
		idem_table_unlock_hash(jobs, job->key_hash);
	}
	else if (idem_table_update(jobs, row, new, &has_moved) != TM_Ok)
		elog(ERROR, "another transaction has changed a job that this transaction has locked");

	switch (change)
	{
		case IDEM_CHANGE_LEASED:
			/*
			 * With new entries in indexes, a fetch may have met the old entry too late and the new
			 * one too early, and would take the job for ended.
			 */
			if (has_moved)
				note_position(ref, &position, due);
			break;
		case IDEM_CHANGE_GIVEN_BACK:
			idem_touched_done(ref, false, idem_job_was_fetched_here(job));
			idem_jobrow_note_unfetched(job);
			pg_fallthrough;
		case IDEM_CHANGE_READY:
			idem_jobrow_note_ready(ref, &position, due, job->after_job != 0);
			break;
		case IDEM_CHANGE_ABSORBED:
			/* A4: it is not a new one (A2) */
			note_position(ref, &position, due);
			idem_touched_due(ref, due);
			break;
	}
}

/*
 * M8, J14: this transaction has written the job without the functions of idem (COPY).
 * Its entries are in the indexes already.
 */
void
idem_jobrow_note_copied(const IdemJob *job)
{
	text *queue = idem_row_text(idem_job_row(job), IDEM_JOBS_QUEUE);
	IdemQueueRef *ref = idem_queueref_get(queue);
	IdemPosition position = idem_job_position(job);

	if (job->holds_key)
		idem_jobrow_note_place(ref, job->key_hash, &job->row->tts_tid);
	idem_jobrow_note_ready(ref, &position, Max(job->run_at, job->lease_until), job->after_job != 0);
	pfree(queue);
}

/*
 * J14, A2, A5: this transaction has deleted the job.  If it commits, follow-up jobs (J4), which
 * have the same key, can be fetched: note them for fetches; touched.c wakes waiters.
 */
void
idem_jobrow_note_end(IdemTable *jobs, const IdemJob *job, IdemQueueRef *ref)
{
	Datum value = Int64GetDatum(job->key_hash);
	IdemLeafStart start = {.values = &value, .n = 1, .nequal = 1};
	IdemSkips *skips;
	IdemLeafWalk walk;
	SnapshotData dirty;
	int nentries = 0;

	idem_touched_done(ref, job->holds_key, idem_job_was_fetched_here(job));
	idem_jobrow_note_unfetched(job);
	idem_touched_end(idem_waiters_job(job->job_id));
	if (!job->holds_key)
		return;
	skips = idem_queueref_skips(ref);
	if (!idem_skips_has_blocked(skips))
		return;

	/*
	 * A job that another transaction is moving in the index may be missed: that transaction notes
	 * its new position, and every fetch that looks at it there finds that the job before it has
	 * ended.
	 */
	InitDirtySnapshot(dirty);
	idem_leaf_begin(&walk, jobs, idem_jobtable_index(jobs, IDEM_INDEX_KEY), &dirty, &start);
	while (nentries <= MAX_FOLLOWERS && idem_leaf_next(&walk))
	{
		nentries++;
		do
		{
			IdemJob follower;
			IdemPosition position;

			if (!idem_leaf_fetch(&walk))
				continue;
			idem_job_read(&follower, walk.row);
			if (follower.after_job != job->job_id)
				continue;
			position = idem_job_position(&follower);
			note_position(ref, &position, position.run_at);
		} while (walk.again);
	}
	idem_leaf_end(&walk);
	/* there may be more of them */
	if (nentries > MAX_FOLLOWERS)
		idem_skips_drop_blocked(skips);
}
