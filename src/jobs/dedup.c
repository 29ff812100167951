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
		case IDEM_OUTCOME_ENQUEUED:
			return "enqueued";
		case IDEM_OUTCOME_ABSORBED:
			return "absorbed";
		case IDEM_OUTCOME_REPLACED:
			return "replaced";
		case IDEM_OUTCOME_POSTPONED:
			return "postponed";
		case IDEM_OUTCOME_RERUN:
			return "rerun";
		case IDEM_OUTCOME_DONE:
			return "done";
	}
	pg_unreachable();
}

/* A number that was used before has come again */
pg_noreturn static void
refuse_number(void)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("number of a job is in use already"),
			errdetail("The sequence idem.jobs_job_id_seq is behind the jobs."),
			errhint("Run what idem_doctor() tells under \"job numbers\"."));
}

static void
insert_job(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, int64 key_hash,
		   bool hashed, int64 after_job, IdemEnqueued *answer)
{
	bool with_ttl = hashed && enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED;
	TupleTableSlot *slot =
		idem_write_new_row(jobs, with_ttl || after_job != 0 || enqueue->max_attempts != 0);

	answer->job_id = job->job_id != 0 ? job->job_id : idem_jobtable_next_id();
	answer->outcome = after_job != 0 ? IDEM_OUTCOME_RERUN : IDEM_OUTCOME_ENQUEUED;
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
		idem_row_set(slot, IDEM_JOBS_KEY_UNTIL,
					 TimestampTzGetDatum(enqueue->now + enqueue->policy.key_ttl));
	if (after_job != 0)
		idem_row_set(slot, IDEM_JOBS_AFTER_JOB, Int64GetDatum(after_job));
	if (!idem_write_insert(jobs))
		refuse_number();
}

pg_noreturn static void
refuse_duplicate(const IdemKeyedEnqueue *keyed, int64 job_id, const char *state)
{
	idem_counters_add_queue(keyed->enqueue->queue.name, IDEM_QUEUE_COUNTER_REFUSED);
	idem_counters_log_duplicate("enqueue", "refused", keyed->enqueue->queue.name, keyed->job->key);
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
find_done(const IdemKeyedEnqueue *keyed, IdemEnqueued *answer)
{
	IdemTable *keys = keyed->keys;
	IdemLookup lookup;
	SnapshotData dirty;
	IndexScanDesc scan;
	bool found = false;

	if (keys == NULL)
		return false;
	InitDirtySnapshot(dirty);
	lookup = idem_jobtable_by_key(keys, keys->pkey, keyed->key_hash);
	scan = idem_probe_begin(keys, &lookup, &dirty);
	while (!found && index_getnext_slot(scan, ForwardScanDirection, keys->found))
		found = !TransactionIdIsValid(dirty.xmin) &&
			idem_row_timestamp(keys, IDEM_JOB_KEYS_EXPIRES_AT) > keyed->enqueue->now &&
			idem_jobrow_has_key(keys, IDEM_JOB_KEYS_QUEUE, keyed->enqueue->queue.name,
								keyed->job->key, keyed->others);
	if (found)
	{
		answer->job_id = idem_row_int64(keys, IDEM_JOB_KEYS_JOB_ID);
		answer->outcome = IDEM_OUTCOME_DONE;
		answer->result = idem_row_jsonb(keys, IDEM_JOB_KEYS_RESULT);
	}
	index_endscan(scan);
	return found;
}

/* May a new job be inserted?  after_job: not before this one has ended. */
static bool
may_insert(const IdemKeyedEnqueue *keyed, const IdemKeyScan *scan, int64 *after_job)
{
	const IdemPolicy *policy = &keyed->enqueue->policy;

	*after_job = 0;
	if (scan->found == IDEM_KEY_SCAN_NONE)
		return true;
	if (scan->found != IDEM_KEY_SCAN_RUNNING && scan->found != IDEM_KEY_SCAN_DRAINING)
		return false;
	if (policy->dedup == IDEM_DEDUP_UNTIL_EXECUTING)
		return scan->found == IDEM_KEY_SCAN_RUNNING ||
			policy->on_duplicate != IDEM_ON_DUPLICATE_ERROR;
	if (policy->dedup == IDEM_DEDUP_UNTIL_EXPIRED || TransactionIdIsValid(scan->in_the_way) ||
		scan->is_being_cancelled)
		return false;
	if (policy->on_duplicate == IDEM_ON_DUPLICATE_ERROR)
		return false;
	/* J2: one that drains may start before the enqueue has committed, so there is one more run in
	 * any case */
	if (!policy->rerun && scan->found == IDEM_KEY_SCAN_RUNNING)
		return false;
	*after_job = scan->job_id;
	return true;
}

/*
 * J2: give up the job that will not run again, which the look has found, so that
 * it is out of the way.  False: not now; a transaction that has locked it, or an
 * older row of its number in the history (J13), is in the way, or the history is
 * not locked yet.
 */
static bool
make_spent_dead(IdemTable *jobs, const IdemKeyedEnqueue *keyed, IdemKeyScan *scan)
{
	TM_Result result;

	if (TransactionIdIsValid(scan->in_the_way) || !keyed->log_is_locked)
		return false;
	result = idem_table_lock_row(jobs, scan->tid, LockTupleExclusive, LockWaitSkip);
	if (result == TM_Ok)
		return idem_dead_make_if_spent(jobs, &keyed->enqueue->queue, &scan->in_the_way) !=
			IDEM_DEAD_SKIPPED;
	if (result != TM_WouldBlock)
		return true;
	scan->in_the_way = idem_row_locker(jobs);
	return false;
}

/*
 * Look at the jobs of the key, and insert one if none is in the way, or lock the
 * one that waits.  True: the answer is there.
 */
static bool
look_or_insert(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed, IdemKeyScan *scan,
			   IdemEnqueued *answer)
{
	int64 after_job;
	bool answered = false;

	idem_table_lock_hash(jobs, keyed->key_hash);
	do
	{
		idem_keyscan(jobs, index, keyed, scan);
	} while (scan->found == IDEM_KEY_SCAN_SPENT && make_spent_dead(jobs, keyed, scan));
	if (may_insert(keyed, scan, &after_job))
	{
		if (scan->found != IDEM_KEY_SCAN_NONE || !find_done(keyed, answer))
			insert_job(jobs, keyed->enqueue, keyed->job, keyed->key_hash, true, after_job, answer);
		answered = true;
	}
	else if (scan->found == IDEM_KEY_SCAN_WAITING && !TransactionIdIsValid(scan->in_the_way))
		scan->lock = idem_table_lock_row(jobs, scan->tid, LockTupleKeyShare, LockWaitSkip);
	idem_table_unlock_hash(jobs, keyed->key_hash);

	if (answered && answer->outcome == IDEM_OUTCOME_DONE &&
		keyed->enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_ERROR)
		refuse_duplicate(keyed, answer->job_id, "is done");
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
change_waiting(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
			   IdemOutcome *outcome)
{
	TimestampTz run_at = idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT);
	TimestampTz new_run_at = run_at;
	int priority = more_urgent(jobs, enqueue);
	bool new_payload = true;
	TupleTableSlot *slot;

	if (enqueue->policy.rerun && idem_jobrow_waits_for_other(jobs))
		*outcome = IDEM_OUTCOME_RERUN;
	else if (enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_REPLACE)
		*outcome = IDEM_OUTCOME_REPLACED;
	else if (enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_DEBOUNCE)
	{
		TimestampTz latest =
			idem_row_timestamp(jobs, IDEM_JOBS_ENQUEUED_AT) + enqueue->queue.debounce_max;

		*outcome = IDEM_OUTCOME_POSTPONED;
		new_run_at = Max(run_at, Min(enqueue->run_at, latest));
	}
	else
	{
		*outcome = IDEM_OUTCOME_ABSORBED;
		new_payload = false;
	}

	/* whoever wants it earlier gets it earlier, unless a worker has put it off */
	if (*outcome != IDEM_OUTCOME_POSTPONED && idem_row_isnull(jobs, IDEM_JOBS_TOKEN))
		new_run_at = Min(run_at, enqueue->run_at);
	/* one that is due is early enough */
	if (run_at <= enqueue->now && new_run_at < run_at)
		new_run_at = run_at;
	if (!new_payload && new_run_at == run_at &&
		priority == idem_row_int32(jobs, IDEM_JOBS_PRIORITY))
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
absorb_waiting(IdemTable *jobs, IdemKeyedEnqueue *keyed, const IdemKeyScan *scan,
			   IdemEnqueued *answer)
{
	if (keyed->enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_ERROR)
		refuse_duplicate(keyed, scan->job_id, "waits");
	answer->job_id = scan->job_id;
	if (change_waiting(jobs, keyed->enqueue, keyed->job, &answer->outcome) == NULL)
		return true;
	/* nobody can fetch it any more, but another duplicate may be changing it */
	if (idem_table_lock_row(jobs, scan->tid, LockTupleNoKeyExclusive, LockWaitBlock) != TM_Ok)
	{
		keyed->unlockable.n = 0;
		return false;
	}
	/* the wait may have changed what there is to change */
	if (change_waiting(jobs, keyed->enqueue, keyed->job, &answer->outcome) != NULL)
		idem_jobrow_store(jobs);
	return true;
}

/* The same by a job that runs, or is about to: nothing is locked */
static void
absorb_running(const IdemKeyedEnqueue *keyed, const IdemKeyScan *scan, IdemEnqueued *answer)
{
	if (keyed->enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_ERROR)
		refuse_duplicate(keyed, scan->job_id, scan->found == IDEM_KEY_SCAN_DRAINING ? "waits" : "runs");
	answer->job_id = scan->job_id;
	answer->outcome = IDEM_OUTCOME_ABSORBED;
}

/* After this nobody can make us wait for a lock on the history, its indexes or its TOAST table */
static void
lock_log(void)
{
	IdemTable log;

	idem_jobtable_open_log(&log, RowExclusiveLock);
	idem_table_open_indexes(&log);
	idem_table_close(&log);
}

/* Each round looks at the key and either answers or removes what is in the way */
static void
enqueue_keyed(IdemTable *jobs, IdemKeyedEnqueue *keyed, IdemEnqueued *answer)
{
	Relation index = idem_jobtable_key_index(jobs);

	for (;;)
	{
		IdemKeyScan scan;

		CHECK_FOR_INTERRUPTS();
		if (look_or_insert(jobs, index, keyed, &scan, answer))
			return;
		if (TransactionIdIsValid(scan.in_the_way))
		{
			idem_probe_wait(jobs, scan.in_the_way);
			keyed->unlockable.n = 0;
		}
		else if (scan.is_being_cancelled)
		{
			idem_jobtable_wait_for_mark(jobs, scan.job_id);
			keyed->unlockable.n = 0;
		}
		else if (scan.found == IDEM_KEY_SCAN_SPENT && !keyed->log_is_locked)
		{
			lock_log();
			keyed->log_is_locked = true;
		}
		else if (scan.found == IDEM_KEY_SCAN_RUNNING || scan.found == IDEM_KEY_SCAN_DRAINING)
		{
			absorb_running(keyed, &scan, answer);
			return;
		}
		else if (scan.found == IDEM_KEY_SCAN_WAITING && scan.lock == TM_WouldBlock)
			(void) idem_keyscan_add_id(&keyed->unlockable, scan.job_id);
		else if (scan.found == IDEM_KEY_SCAN_WAITING && scan.lock == TM_Ok &&
				 absorb_waiting(jobs, keyed, &scan, answer))
		{
			idem_keyscan_note_absorbed(scan.job_id);
			return;
		}
	}
}

static void
enqueue_job(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
			IdemEnqueued *answer)
{
	IdemSameHash others;
	IdemKeyedEnqueue keyed = {.enqueue = enqueue, .job = job, .others = &others};
	IdemTable keys;

	memset(answer, 0, sizeof(*answer));
	if (job->key == NULL || (enqueue->later && !enqueue->policy.include_scheduled))
	{
		insert_job(jobs, enqueue, job, 0, false, 0, answer);
		return;
	}
	/* everything is open before the lock on the hash is taken */
	idem_jobtable_lock_ids();
	keyed.key_hash = idem_hash_name(enqueue->queue.name, job->key);
	if (enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED)
	{
		idem_jobtable_open_keys(&keys, AccessShareLock);
		keyed.keys = &keys;
	}
	enqueue_keyed(jobs, &keyed, answer);
	if (keyed.keys != NULL)
		idem_table_close(&keys);
}

StaticAssertDecl((int) IDEM_QUEUE_COUNTER_ENQUEUED == (int) IDEM_OUTCOME_ENQUEUED &&
					 (int) IDEM_QUEUE_COUNTER_DONE == (int) IDEM_OUTCOME_DONE,
				 "the counter of an outcome has the number of the outcome");

/* Put a job into its queue, or say which job has absorbed it */
void
idem_dedup_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
				   IdemEnqueued *answer)
{
	enqueue_job(jobs, enqueue, job, answer);
	idem_counters_add_queue(enqueue->queue.name, (IdemQueueCounter) answer->outcome);
	if (answer->outcome != IDEM_OUTCOME_ENQUEUED)
		idem_counters_log_duplicate("enqueue", idem_dedup_outcome_name(answer->outcome),
									enqueue->queue.name, job->key);
}
