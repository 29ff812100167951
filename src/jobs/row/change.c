/*
 * change.c
 *		Note a change of a queue that lets a fetch find a job.
 *
 * Fetches skip parts of the index in which no job can be fetched (fetchskip.c).  A
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

/* A key with more entries in the index may have many jobs that have ended: do not read them all */
#define MAX_FOLLOWERS 32

/* Fetches must look at the position again from the time due on */
static void
note_position(const text *queue, const IdemPosition *position, TimestampTz due)
{
	idem_skips_note(idem_queueref_skips(idem_queueref_get(queue)), position, due, idem_clock_now());
}

/*
 * A job of the queue can be fetched from the time due on: for fetches, and for waiters (A2).
 * follows: it is a follow-up job (J4).
 */
static void
note_change(const text *queue, const IdemPosition *position, TimestampTz due, bool follows)
{
	note_position(queue, position, due);
	idem_touched_job(idem_queueref_get(queue), due, follows);
}

/* The time from which on the job can be fetched that this transaction has written */
static TimestampTz
get_written(TupleTableSlot *new, IdemPosition *position)
{
	const Datum *values = new->tts_values;

	position->priority = DatumGetInt32(values[IDEM_JOBS_PRIORITY - 1]);
	position->run_at = DatumGetTimestampTz(values[IDEM_JOBS_RUN_AT - 1]);
	position->job_id = DatumGetInt64(values[IDEM_JOBS_JOB_ID - 1]);
	if (!new->tts_isnull[IDEM_JOBS_LEASE_UNTIL - 1])
		return Max(position->run_at,
				   DatumGetTimestampTz(values[IDEM_JOBS_LEASE_UNTIL - 1]));
	return position->run_at;
}

static text *
get_written_queue(TupleTableSlot *new)
{
	return DatumGetTextPP(new->tts_values[IDEM_JOBS_QUEUE - 1]);
}

/*
 * J14: this transaction has written the job in this row: the job waits, or its
 * lease ends earlier than before.  Its entry is in the index already.
 */
void
idem_change_note_job(TupleTableSlot *new)
{
	IdemPosition position;
	TimestampTz due = get_written(new, &position);

	note_change(get_written_queue(new), &position, due,
				!new->tts_isnull[IDEM_JOBS_AFTER_JOB - 1]);
}

/*
 * J14: this transaction has written the job, which is leased now, and it has new entries in
 * indexes: a fetch may have met the old entry too late and the new one too early, and
 * would take the job for ended.
 */
void
idem_change_note_move(TupleTableSlot *new)
{
	IdemPosition position;
	TimestampTz due = get_written(new, &position);

	note_position(get_written_queue(new), &position, due);
}

/* K14: this transaction has ended, given back or leased the job, which it was in this version */
void
idem_change_note_unfetched(const IdemJob *job)
{
	if (idem_job_was_fetched_here(job))
		idem_unfinished_add(IDEM_UNFINISHED_JOBS, -1);
}

/* A2: this transaction has given back the job: it waits again */
void
idem_change_note_given_back(const IdemJob *job, TupleTableSlot *new)
{
	idem_touched_done(idem_queueref_get(get_written_queue(new)), false, idem_job_was_fetched_here(job));
	idem_change_note_unfetched(job);
	idem_change_note_job(new);
}

/*
 * J14, A4: this transaction has written a waiting job, which has absorbed a duplicate.  It is
 * not a new one (A2).
 */
void
idem_change_note_absorbed(TupleTableSlot *new)
{
	IdemPosition position;
	TimestampTz due = get_written(new, &position);

	note_position(get_written_queue(new), &position, due);
	idem_touched_due(idem_queueref_get(get_written_queue(new)), due);
}

/* J14: this transaction has enqueued the job, whose entries are in the indexes already */
void
idem_change_note_new(const IdemEnqueue *enqueue, int64 job_id)
{
	IdemPosition position = {
		.priority = enqueue->priority, .run_at = enqueue->run_at, .job_id = job_id};

	note_change(enqueue->queue.name, &position, position.run_at, false);
}

/*
 * M8, J14: this transaction has written the job without the functions of idem (COPY).
 * Its entries are in the indexes already.
 */
void
idem_change_note_found(const IdemJob *job)
{
	text *queue = idem_row_text(idem_job_row(job), IDEM_JOBS_QUEUE);
	IdemPosition position = idem_job_position(job);

	if (job->holds_key)
		idem_jobrow_note_place(queue, job->key_hash, &job->row->tts_tid);
	note_change(queue, &position, Max(job->run_at, job->lease_until), job->after_job != 0);
	pfree(queue);
}

/*
 * Note, for fetches, the follow-up jobs of a job that has ended; touched.c wakes waiters.  Returns
 * false if there may be more: the key has many entries in the index.  A job that another
 * transaction is moving in the index may be missed: that transaction notes its new position, and
 * every fetch that looks at it there finds that the job before it has ended.
 */
static bool
note_followers(IdemTable *jobs, const text *queue, int64 job_id, int64 key_hash)
{
	Datum value = Int64GetDatum(key_hash);
	IdemLeafWalk walk;
	SnapshotData dirty;
	int n = 0;

	InitDirtySnapshot(dirty);
	idem_leaf_begin(&walk, jobs, idem_jobtable_key_index(jobs), &dirty, &(IdemLeafStart){.values = &value, .n = 1, .nequal = 1});
	while (n <= MAX_FOLLOWERS && idem_leaf_next(&walk))
	{
		n++;
		do
		{
			IdemJob follower;
			IdemPosition position;

			if (!idem_leaf_fetch(&walk))
				continue;
			idem_job_read(&follower, jobs->found);
			if (follower.after_job != job_id)
				continue;
			position = idem_job_position(&follower);
			note_position(queue, &position, position.run_at);
		} while (walk.again);
	}
	idem_leaf_end(&walk);
	return n <= MAX_FOLLOWERS;
}

/*
 * J14, A2, A5: this transaction has deleted the job, so its follow-up jobs (J4), which
 * have the same key, can be fetched if it commits.
 */
void
idem_change_note_end(IdemTable *jobs, const IdemJob *job, const text *queue)
{
	IdemSkips *skips;

	idem_touched_done(idem_queueref_get(queue), job->holds_key, idem_job_was_fetched_here(job));
	idem_change_note_unfetched(job);
	idem_touched_end(idem_waiters_job(job->job_id));
	if (!job->holds_key)
		return;
	skips = idem_queueref_skips(idem_queueref_get(queue));
	if (idem_skips_has_blocked(skips) &&
		!note_followers(jobs, queue, job->job_id, job->key_hash))
		idem_skips_drop_blocked(skips);
}
