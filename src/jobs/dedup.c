/*
 * dedup.c
 *		The protocol of enqueue: who absorbs a duplicate, and when.
 *
 * Jobs of a key are found through an index on a hash of queue and key.  It is
 * not unique: what keeps two from inserting a job of the same key is a lock
 * on the hash, held for a moment, under which the jobs of the key are looked
 * at (joblook.c).  Whatever moves a job in the index holds it, too
 * (idem_jobrow_store), so none is overlooked.
 *
 * A job absorbs a duplicate by being locked FOR KEY SHARE, by the transaction
 * that enqueued the duplicate, for as long as that lasts.  Fetch takes FOR
 * UPDATE and skips what it does not get.  So the job cannot start before that
 * transaction has ended, and sees what it has committed.  If the lock is not to
 * be had, the job runs in an open transaction.  The lock is taken under the one
 * on the hash, so that no update of the job is under way: heap_update() may let
 * go of the page in between, and would forget it.
 *
 * A stream of such transactions would keep the job from ever starting.  So a job
 * that is due for longer than idem.drain_after, or that a session waits to cancel,
 * and that another open transaction has locked that way, takes no more of them: it
 * drains.  So does one that this backend has locked that way in one transaction
 * after the other, for as long.  The duplicate goes to another job then, if need be
 * to a new one.
 *
 * A job that somebody has fetched with a lease absorbs nothing that way, not
 * even when the lease has run out, because it may be completed all the same.  If
 * that was its last attempt, it will not run again: an enqueue that would count
 * on it makes it dead first, under the lock on the hash.
 *
 * Who waits for whom: an enqueue waits for another open one that has inserted a
 * job of the same key or changed the one that waits; if it is to be absorbed by
 * a job that runs, for the transaction that is just removing that; and for a
 * transaction that is changing a job without attempts left, or has locked it.  It
 * never waits for a job that runs.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

const char *
idem_dedup_outcome_name(IdemOutcome outcome)
{
	switch (outcome)
	{
		case IDEM_ENQUEUED:
			return "enqueued";
		case IDEM_ABSORBED:
			return "absorbed";
		case IDEM_REPLACED:
			return "replaced";
		case IDEM_POSTPONED:
			return "postponed";
		case IDEM_RERUN:
			return "rerun";
		case IDEM_DONE:
			return "done";
	}
	pg_unreachable();
}

static void
insert_job(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, int64 key_hash, bool hashed,
		   int64 after_job, IdemEnqueued *answer)
{
	bool with_ttl = hashed && enqueue->policy.dedup == IDEM_UNTIL_EXPIRED;
	TupleTableSlot *slot = idem_table_new_row(jobs, with_ttl || after_job != 0 || enqueue->max_attempts != 0);

	answer->job_id = job->job_id != 0 ? job->job_id : idem_jobtable_next_id();
	answer->outcome = after_job != 0 ? IDEM_RERUN : IDEM_ENQUEUED;
	idem_row_set(slot, IDEM_JOBS_JOB_ID, Int64GetDatum(answer->job_id));
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(enqueue->run_at));
	idem_row_set(slot, IDEM_JOBS_ENQUEUED_AT, TimestampTzGetDatum(enqueue->now));
	idem_row_set(slot, IDEM_JOBS_PRIORITY, Int32GetDatum(enqueue->priority));
	idem_row_set(slot, IDEM_JOBS_QUEUE, PointerGetDatum(enqueue->queue.name));
	if (hashed)
		idem_row_set(slot, IDEM_JOBS_KEY_HASH, Int64GetDatum(key_hash));
	if (job->key != NULL)
		idem_row_set(slot, IDEM_JOBS_KEY, PointerGetDatum(job->key));
	if (!job->payload.isnull)
		idem_row_set(slot, IDEM_JOBS_PAYLOAD, job->payload.value);
	if (enqueue->max_attempts != 0)
		idem_row_set(slot, IDEM_JOBS_MAX_ATTEMPTS, Int32GetDatum(enqueue->max_attempts));
	if (with_ttl)
		idem_row_set(slot, IDEM_JOBS_KEY_UNTIL, TimestampTzGetDatum(enqueue->now + enqueue->policy.key_ttl));
	if (after_job != 0)
		idem_row_set(slot, IDEM_JOBS_AFTER_JOB, Int64GetDatum(after_job));
	if (!idem_table_insert(jobs))
		idem_jobtable_refuse_number();
}

pg_noreturn static void
refuse_duplicate(const IdemAttempt *attempt, int64 job_id, const char *state)
{
	idem_stats_count_refused(attempt->enqueue->queue.name, attempt->job->key);
	ereport(ERROR,
			errcode(ERRCODE_IDEM_DUPLICATE_JOB),
			errmsg("duplicate job"),
			errdetail("Job " INT64_FORMAT " has this key and %s.", job_id, state),
			errhint("Pass %s to let the job absorb its duplicates.", "on_duplicate => 'skip'"));
}

/*
 * until_expired: is the job of this key done, and the key not expired?  What is
 * not committed belongs to a job that is still there, so we have seen that.
 */
static bool
find_done(const IdemAttempt *attempt, IdemEnqueued *answer)
{
	IdemTable *keys = attempt->keys;
	IdemLookup lookup;
	SnapshotData dirty;
	IndexScanDesc scan;
	bool found = false;

	if (keys == NULL)
		return false;
	InitDirtySnapshot(dirty);
	lookup = idem_jobtable_by_key(keys, keys->pkey, attempt->key_hash);
	scan = idem_probe_begin(keys, &lookup, &dirty);
	while (!found && index_getnext_slot(scan, ForwardScanDirection, keys->found))
		found = !TransactionIdIsValid(dirty.xmin) &&
			idem_row_timestamp(keys, IDEM_JOB_KEYS_EXPIRES_AT) > attempt->enqueue->now &&
			idem_jobrow_has_key(keys, IDEM_JOB_KEYS_QUEUE, attempt->enqueue->queue.name, attempt->job->key, attempt->others);
	if (found)
	{
		answer->job_id = idem_row_int64(keys, IDEM_JOB_KEYS_JOB_ID);
		answer->outcome = IDEM_DONE;
		answer->result = idem_row_jsonb(keys, IDEM_JOB_KEYS_RESULT);
	}
	index_endscan(scan);
	return found;
}

/* May a new job be inserted?  after_job: not before this one has ended. */
static bool
may_insert(const IdemAttempt *attempt, const IdemLook *look, int64 *after_job)
{
	const IdemPolicy *policy = &attempt->enqueue->policy;

	*after_job = 0;
	if (look->found == IDEM_LOOK_NONE)
		return true;
	if (look->found != IDEM_LOOK_RUNNING && look->found != IDEM_LOOK_DRAINING)
		return false;
	if (policy->dedup == IDEM_UNTIL_EXECUTING)
		return look->found == IDEM_LOOK_RUNNING || policy->on_duplicate != IDEM_REFUSE;
	if (policy->dedup == IDEM_UNTIL_EXPIRED || TransactionIdIsValid(look->in_the_way) || look->is_being_cancelled)
		return false;
	if (policy->on_duplicate == IDEM_REFUSE)
		return false;
	/* J2: one that drains may start before the enqueue has committed, so there is one more run in any case */
	if (!policy->rerun && look->found == IDEM_LOOK_RUNNING)
		return false;
	*after_job = look->job_id;
	return true;
}

/*
 * J2: give up the job that will not run again, which the look has found, so that
 * it is out of the way.  False: not now; a transaction that has locked it, or an
 * older row of its number in the history (J13), is in the way, or the history is
 * not locked yet.
 */
static bool
bury_spent(IdemTable *jobs, const IdemAttempt *attempt, IdemLook *look)
{
	TM_Result result;

	if (TransactionIdIsValid(look->in_the_way) || !attempt->may_bury)
		return false;
	result = idem_table_lock(jobs, look->tid, LockTupleExclusive, LockWaitSkip);
	if (result == TM_Ok)
		return idem_jobstore_bury_spent(jobs, &attempt->enqueue->queue, &look->in_the_way) != IDEM_PASSED_OVER;
	if (result != TM_WouldBlock)
		return true;
	look->in_the_way = idem_row_locker(jobs);
	return false;
}

/*
 * Look at the jobs of the key, and insert one if none is in the way, or lock the
 * one that waits.  True: the answer is there.
 */
static bool
look_or_insert(IdemTable *jobs, Relation index, IdemAttempt *attempt, IdemLook *look, IdemEnqueued *answer)
{
	int64 after_job;
	bool answered = false;

	idem_table_lock_hash(jobs, attempt->key_hash);
	do
	{
		idem_joblook(jobs, index, attempt, look);
	} while (look->found == IDEM_LOOK_SPENT && bury_spent(jobs, attempt, look));
	if (may_insert(attempt, look, &after_job))
	{
		if (look->found != IDEM_LOOK_NONE || !find_done(attempt, answer))
			insert_job(jobs, attempt->enqueue, attempt->job, attempt->key_hash, true, after_job, answer);
		answered = true;
	}
	else if (look->found == IDEM_LOOK_WAITING && !TransactionIdIsValid(look->in_the_way))
		look->lock = idem_table_lock(jobs, look->tid, LockTupleKeyShare, LockWaitSkip);
	idem_table_unlock_hash(jobs, attempt->key_hash);

	if (answered && answer->outcome == IDEM_DONE && attempt->enqueue->policy.on_duplicate == IDEM_REFUSE)
		refuse_duplicate(attempt, answer->job_id, "is done");
	return answered;
}

/* J8: the more urgent of the two priorities counts, unless a worker has had the job */
static int
more_urgent(IdemTable *jobs, const IdemEnqueue *enqueue)
{
	int priority = idem_row_int32(jobs, IDEM_JOBS_PRIORITY);

	return idem_row_isnull(jobs, IDEM_JOBS_TOKEN) ? Min(priority, enqueue->priority) : priority;
}

/*
 * What the duplicate changes in the job that absorbs it: the row to be written,
 * or NULL if nothing (J12).
 */
static TupleTableSlot *
change_waiting(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, IdemOutcome *outcome)
{
	TimestampTz run_at = idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT);
	TimestampTz new_run_at = run_at;
	int priority = more_urgent(jobs, enqueue);
	bool new_payload = true;
	TupleTableSlot *slot;

	if (enqueue->policy.rerun && idem_jobrow_waits_for_other(jobs))
		*outcome = IDEM_RERUN;
	else if (enqueue->policy.on_duplicate == IDEM_REPLACE)
		*outcome = IDEM_REPLACED;
	else if (enqueue->policy.on_duplicate == IDEM_DEBOUNCE)
	{
		TimestampTz latest = idem_row_timestamp(jobs, IDEM_JOBS_ENQUEUED_AT) + enqueue->queue.debounce_max;

		*outcome = IDEM_POSTPONED;
		new_run_at = Max(run_at, Min(enqueue->run_at, latest));
	}
	else
	{
		*outcome = IDEM_ABSORBED;
		new_payload = false;
	}

	/* whoever wants it earlier gets it earlier, unless a worker has put it off */
	if (*outcome != IDEM_POSTPONED && idem_row_isnull(jobs, IDEM_JOBS_TOKEN))
		new_run_at = Min(run_at, enqueue->run_at);
	/* one that is due is early enough */
	if (run_at <= enqueue->now && new_run_at < run_at)
		new_run_at = run_at;
	if (!new_payload && new_run_at == run_at && priority == idem_row_int32(jobs, IDEM_JOBS_PRIORITY))
		return NULL;

	slot = idem_jobrow_copy(jobs, false);
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(new_run_at));
	idem_row_set(slot, IDEM_JOBS_PRIORITY, Int32GetDatum(priority));
	if (new_payload && job->payload.isnull)
		idem_row_clear(slot, IDEM_JOBS_PAYLOAD);
	else if (new_payload)
		idem_row_set(slot, IDEM_JOBS_PAYLOAD, job->payload.value);
	return slot;
}

/*
 * Let a job that waits, which we have locked, absorb the duplicate.  False: it
 * was changed meanwhile.
 */
static bool
absorb_waiting(IdemTable *jobs, IdemAttempt *attempt, const IdemLook *look, IdemEnqueued *answer)
{
	if (attempt->enqueue->policy.on_duplicate == IDEM_REFUSE)
		refuse_duplicate(attempt, look->job_id, "waits");
	answer->job_id = look->job_id;
	if (change_waiting(jobs, attempt->enqueue, attempt->job, &answer->outcome) == NULL)
		return true;
	/* nobody can fetch it any more, but another duplicate may be changing it */
	if (idem_table_lock(jobs, look->tid, LockTupleNoKeyExclusive, LockWaitBlock) != TM_Ok)
	{
		attempt->not_to_be_had.n = 0;
		return false;
	}
	/* the wait may have changed what there is to change */
	if (change_waiting(jobs, attempt->enqueue, attempt->job, &answer->outcome) != NULL)
		idem_jobrow_store(jobs);
	return true;
}

/* The same by a job that runs, or is about to: nothing is locked */
static void
absorb_running(const IdemAttempt *attempt, const IdemLook *look, IdemEnqueued *answer)
{
	if (attempt->enqueue->policy.on_duplicate == IDEM_REFUSE)
		refuse_duplicate(attempt, look->job_id, look->found == IDEM_LOOK_DRAINING ? "waits" : "runs");
	answer->job_id = look->job_id;
	answer->outcome = IDEM_ABSORBED;
}

/* Each round looks at the key and either answers or removes what is in the way */
static void
enqueue_keyed(IdemTable *jobs, IdemAttempt *attempt, IdemEnqueued *answer)
{
	Relation index = idem_jobtable_key_index(jobs);

	for (;;)
	{
		IdemLook look;

		CHECK_FOR_INTERRUPTS();
		if (look_or_insert(jobs, index, attempt, &look, answer))
			return;
		if (TransactionIdIsValid(look.in_the_way))
		{
			idem_probe_wait(jobs, look.in_the_way);
			attempt->not_to_be_had.n = 0;
		}
		else if (look.is_being_cancelled)
		{
			idem_jobtable_wait_for_mark(jobs, look.job_id);
			attempt->not_to_be_had.n = 0;
		}
		else if (look.found == IDEM_LOOK_SPENT && !attempt->may_bury)
		{
			idem_jobtable_lock_log();
			attempt->may_bury = true;
		}
		else if (look.found == IDEM_LOOK_RUNNING || look.found == IDEM_LOOK_DRAINING)
		{
			absorb_running(attempt, &look, answer);
			return;
		}
		else if (look.found == IDEM_LOOK_WAITING && look.lock == TM_WouldBlock)
			(void) idem_joblook_add_id(&attempt->not_to_be_had, look.job_id);
		else if (look.found == IDEM_LOOK_WAITING && look.lock == TM_Ok && absorb_waiting(jobs, attempt, &look, answer))
		{
			idem_joblook_note_absorbed(look.job_id);
			return;
		}
	}
}

static void
enqueue_job(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, IdemEnqueued *answer)
{
	IdemSameHash others;
	IdemAttempt attempt = {.enqueue = enqueue, .job = job, .others = &others};
	IdemTable keys;

	memset(answer, 0, sizeof(*answer));
	if (job->key == NULL || (enqueue->later && !enqueue->policy.include_scheduled))
	{
		insert_job(jobs, enqueue, job, 0, false, 0, answer);
		return;
	}
	/* everything is open before the lock on the hash is taken */
	idem_jobtable_lock_ids();
	attempt.key_hash = idem_hash_name(enqueue->queue.name, job->key);
	if (enqueue->policy.dedup == IDEM_UNTIL_EXPIRED)
	{
		idem_jobtable_open_keys(&keys, AccessShareLock);
		attempt.keys = &keys;
	}
	enqueue_keyed(jobs, &attempt, answer);
	if (attempt.keys != NULL)
		idem_table_close(&keys);
}

/* Put a job into its queue, or say which job has absorbed it */
void
idem_dedup_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, IdemEnqueued *answer)
{
	enqueue_job(jobs, enqueue, job, answer);
	idem_stats_count_enqueue(enqueue->queue.name, job->key, answer->outcome);
}
