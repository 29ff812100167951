/*
 * enqueuestore.c
 *		The protocol of enqueue: which job absorbs a duplicate, and when.
 *
 * The jobs of a key are found through an index on a hash of queue and key.  The index is
 * not unique.  A short lock on the hash keeps two transactions from inserting a job of the
 * same key: an enqueue scans the jobs of the key (keyscan.c) and inserts a job under this
 * lock.  An update that moves a job in the index holds it, too (idem_jobrow_store()), so
 * the scan misses no job.
 *
 * A waiting job absorbs a duplicate by a row lock: the transaction that enqueues the
 * duplicate locks the job FOR KEY SHARE until it ends.  Fetch locks FOR UPDATE and skips
 * the jobs that it cannot lock.  So the job cannot start before that transaction has ended,
 * and its worker sees everything that the transaction has committed.  If the enqueue
 * cannot lock the job, the job runs in an open transaction.  The enqueue takes FOR KEY
 * SHARE under the lock on the hash, so that no update of the job is in progress:
 * heap_update() may release the page in between and then writes back the row locks that
 * it saw before; a lock taken meanwhile would be lost.
 *
 * A stream of such transactions could keep the job from ever starting.  So a job drains,
 * that is, it absorbs no more duplicates, if another open transaction has locked it this
 * way, and it has been due for longer than idem.drain_after or a session waits to cancel
 * it.  A job that has been due for so long also drains if this backend has locked it this
 * way, in one transaction after another, for idem.drain_after.  The duplicate then goes to
 * another waiting job, or to a new one.
 *
 * A job that a worker has fetched with a lease absorbs nothing by a row lock, not even
 * after the lease has expired, because the worker may still complete it.  If the lease of
 * the last attempt has expired, the job will not run again: an enqueue that would rely on
 * it makes it dead first, under the lock on the hash.
 *
 * An enqueue waits for an open transaction that
 * - has inserted a job of the key, or has changed the waiting job;
 * - is inserting or removing a follow-up job of the job that absorbs a new payload or gets
 *   another follow-up job;
 * - is removing the running job that would absorb the duplicate;
 * - is changing or has locked a job without attempts left, or an older row of its number
 *   in the history;
 * - waits to cancel a draining follow-up job.
 * It never waits for a running job to end.  While it waits, it does not hold the lock on
 * the hash.  The enqueue of a tick raises an error instead (T6).
 *
 * An error rolls back the inserts and updates and releases all these locks, like any
 * error of the transaction.
 */
#include "postgres.h"

#include "access/heaptoast.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/enqueue/enqueue.h"

/* A job with a smaller payload, headers included, needs no TOAST table, whatever its key */
#define LARGE_PAYLOAD 512

StaticAssertDecl(LARGE_PAYLOAD + IDEM_MAX_KEY_LEN + IDEM_MAX_QUEUE_LEN + 128 <
					 TOAST_TUPLE_THRESHOLD,
				 "the row of a job without a large payload is not toasted");

const char *
idem_enqueuestore_outcome_name(IdemOutcome outcome)
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

/*
 * Form the row of a new job.  takes_key: it holds its key, whose hash is key_hash; with
 * until_expired the row has the end of the ttl (J5).  after_job: the job that it follows, or 0.
 */
TupleTableSlot *
idem_enqueuestore_fill_row(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
						   int64 key_hash, bool takes_key, int64 after_job)
{
	bool with_ttl = takes_key && enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED;
	TupleTableSlot *slot = idem_write_new_row(jobs);

	idem_row_set(slot, IDEM_JOBS_JOB_ID, Int64GetDatum(job->job_id));
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(enqueue->run_at));
	idem_row_set(slot, IDEM_JOBS_ENQUEUED_AT, TimestampTzGetDatum(enqueue->now));
	idem_row_set(slot, IDEM_JOBS_PRIORITY, Int32GetDatum(enqueue->priority));
	idem_row_set(slot, IDEM_JOBS_QUEUE, PointerGetDatum(enqueue->queue.name));
	if (takes_key)
		idem_jobrow_set_key(slot, job->key, key_hash, true);
	else if (job->key != NULL)
		idem_jobrow_set_key(slot, job->key, idem_hash_name(enqueue->queue.name, job->key), false);
	if (!job->payload.isnull)
		idem_row_set(slot, IDEM_JOBS_PAYLOAD, job->payload.value);
	if (job->headers != NULL)
		idem_row_set(slot, IDEM_JOBS_HEADERS, JsonbPGetDatum(job->headers));
	if (enqueue->max_attempts != 0)
		idem_row_set(slot, IDEM_JOBS_MAX_ATTEMPTS, Int32GetDatum(enqueue->max_attempts));
	if (with_ttl)
		idem_row_set(slot, IDEM_JOBS_KEY_UNTIL,
					 TimestampTzGetDatum(enqueue->now + enqueue->policy.key_ttl));
	if (after_job != 0)
		idem_row_set(slot, IDEM_JOBS_AFTER_JOB, Int64GetDatum(after_job));
	return slot;
}

/* Insert a new job; the arguments are those of idem_enqueuestore_fill_row() */
static void
insert_job(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, int64 key_hash,
		   bool takes_key, int64 after_job, IdemEnqueued *answer)
{
	IdemNewJob numbered = *job;
	TupleTableSlot *slot;

	if (numbered.job_id == 0)
		numbered.job_id = idem_jobtable_next_id(job->slot);
	slot = idem_enqueuestore_fill_row(jobs, enqueue, &numbered, key_hash, takes_key, after_job);
	if (!idem_write_insert(jobs, slot))
		idem_jobtable_refuse_number();
	if (takes_key)
		idem_jobrow_note_place(enqueue->queue.name, key_hash, &slot->tts_tid);
	answer->job_id = numbered.job_id;
	answer->outcome = after_job != 0 ? IDEM_OUTCOME_RERUN : IDEM_OUTCOME_ENQUEUED;
	idem_jobrow_note_job(slot);
}

/* Raise the error for a duplicate, with on_duplicate => 'error' (J1) */
pg_noreturn static void
refuse_duplicate(const IdemKeyedEnqueue *keyed, int64 job_id, const char *state)
{
	idem_counters_add_queue(idem_queueref_get(keyed->enqueue->queue.name), IDEM_QUEUE_COUNTER_REFUSED);
	idem_counters_log_duplicate("enqueue", "refused", keyed->enqueue->queue.name, keyed->job->key);
	ereport(ERROR,
			errcode(ERRCODE_IDEM_DUPLICATE_JOB),
			errmsg("duplicate job"),
			errdetail("Job " INT64_FORMAT " has this key and %s.", job_id, state),
			errhint("Pass %s to let the job absorb its duplicates.", "on_duplicate => 'skip'"));
}

/*
 * J5, until_expired: is a job of this key done, and has the key not expired?  An uncommitted
 * row of idem.job_keys does not matter: its job is still in idem.jobs, and the scan has
 * seen it.
 */
static bool
find_done(const IdemKeyedEnqueue *keyed, IdemEnqueued *answer)
{
	IdemTable *keys = keyed->keys;
	IdemLookup lookup;
	SnapshotData dirty;
	IdemLeafWalk walk;
	bool found = false;

	if (keys == NULL)
		return false;
	InitDirtySnapshot(dirty);
	lookup = idem_jobtable_by_key(keys, keys->pkey, keyed->key_hash);
	idem_probe_walk(&walk, keys, &lookup, &dirty);
	while (!found && idem_leaf_next_row(&walk))
		found = !TransactionIdIsValid(dirty.xmin) &&
			idem_row_timestamp(keys->found, IDEM_JOB_KEYS_EXPIRES_AT) > keyed->enqueue->now &&
			idem_jobrow_has_key(keys, IDEM_JOB_KEYS_QUEUE, keyed->enqueue->queue.name,
								keyed->job->key, keyed->others);
	if (found)
	{
		answer->job_id = idem_row_int64(keys->found, IDEM_JOB_KEYS_JOB_ID);
		answer->outcome = IDEM_OUTCOME_DONE;
		answer->result = idem_row_jsonb(keys->found, IDEM_JOB_KEYS_RESULT);
	}
	idem_leaf_end(&walk);
	return found;
}

/*
 * Has the key neither a job that matters nor, with until_expired, a done one?  The caller
 * holds the lock on the hash.
 */
bool
idem_enqueuestore_is_absent(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed)
{
	IdemKeyScan scan;
	IdemEnqueued done;

	idem_keyscan(jobs, index, keyed, &scan);
	return scan.found == IDEM_KEY_SCAN_NONE && !find_done(keyed, &done);
}

/*
 * May a new job be inserted?  With until_executing a running job is no obstacle (J3).  With
 * until_executed the new job is a follow-up job: *after_job is the job that it runs after
 * (J4), else 0.
 */
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
	/*
	 * J2: a draining job may start before this transaction commits, so it gets a follow-up
	 * job without rerun, too.
	 */
	if (!policy->rerun && scan->found == IDEM_KEY_SCAN_RUNNING)
		return false;
	*after_job = scan->job_id;
	return true;
}

/*
 * J2: the scan has found a job that will not run again: make it dead.  Returns true if the
 * scan must be repeated.  Returns false if the job could not be made dead: the history is
 * not locked yet, or scan->in_the_way is a transaction that has locked the job or an older
 * row of its number in the history (J13).
 */
static bool
make_spent_dead(IdemTable *jobs, const IdemKeyedEnqueue *keyed, IdemKeyScan *scan)
{
	TM_Result result;

	if (TransactionIdIsValid(scan->in_the_way) || !keyed->log_is_locked)
		return false;
	result = idem_table_lock_row(jobs, scan->tid, LockTupleExclusive, LockWaitSkip, jobs->found);
	if (result == TM_Ok)
	{
		IdemJob found = idem_job_found(jobs);

		idem_touched_held(idem_queueref_get(keyed->enqueue->queue.name), true);
		return idem_history_make_dead_if_spent(jobs, &found, &keyed->enqueue->queue, &scan->in_the_way) !=
			IDEM_DEAD_SKIPPED;
	}
	if (result != TM_WouldBlock)
		return true;
	scan->in_the_way = idem_row_locker(jobs->found);
	return false;
}

/*
 * Scan the jobs of the key, then insert a job if that is allowed, or else lock the waiting
 * job FOR KEY SHARE (J2); all of it under the lock on the hash, which is released at once
 * (J9).  Returns true if the enqueue is answered.
 */
static bool
scan_or_insert(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed, IdemKeyScan *scan,
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
	{
		scan->lock_result = idem_table_lock_row(jobs, scan->tid, LockTupleKeyShare, LockWaitSkip, jobs->found);
		/* a row of this transaction was noted when it was written */
		if (scan->lock_result == TM_Ok && !idem_row_is_mine(jobs->found))
			idem_touched_held(idem_queueref_get(keyed->enqueue->queue.name), true);
	}
	idem_table_unlock_hash(jobs, keyed->key_hash);

	if (answered && answer->outcome == IDEM_OUTCOME_DONE &&
		keyed->enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_ERROR)
		refuse_duplicate(keyed, answer->job_id, "is done");
	return answered;
}

/* J8: the more urgent priority of job and duplicate, as long as no worker has fetched the job */
static int
choose_priority(IdemTable *jobs, const IdemEnqueue *enqueue)
{
	int priority = idem_row_int32(jobs->found, IDEM_JOBS_PRIORITY);

	return idem_row_isnull(jobs->found, IDEM_JOBS_TOKEN) ? Min(priority, enqueue->priority) : priority;
}

/* J1, J4: what becomes of a duplicate that the waiting job found absorbs */
static IdemOutcome
choose_outcome(IdemTable *jobs, const IdemEnqueue *enqueue)
{
	IdemJob found = idem_job_found(jobs);

	if (enqueue->policy.rerun && idem_jobrow_waits_for_other(jobs, &found))
		return IDEM_OUTCOME_RERUN;
	if (enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_REPLACE)
		return IDEM_OUTCOME_REPLACED;
	if (enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_DEBOUNCE)
		return IDEM_OUTCOME_POSTPONED;
	return IDEM_OUTCOME_ABSORBED;
}

/* When the job found is due after it has absorbed the duplicate (J1, J8) */
static TimestampTz
choose_run_at(IdemTable *jobs, const IdemEnqueue *enqueue, IdemOutcome outcome)
{
	TimestampTz run_at = idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT);
	TimestampTz latest =
		idem_row_timestamp(jobs->found, IDEM_JOBS_ENQUEUED_AT) + enqueue->queue.debounce_max;

	if (outcome == IDEM_OUTCOME_POSTPONED)
		return Max(run_at, Min(enqueue->run_at, latest));
	/*
	 * An earlier time counts unless a worker has fetched the job.  Moving a job that is already
	 * due would write a row for nothing.
	 */
	if (!idem_row_isnull(jobs->found, IDEM_JOBS_TOKEN) || run_at <= enqueue->now)
		return run_at;
	return Min(run_at, enqueue->run_at);
}

/*
 * What the duplicate changes in the waiting job that absorbs it (J1, J4, J8): fill the row to
 * write, or return false if nothing changes (J12).
 */
static TupleTableSlot *
change_waiting(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
			   IdemOutcome *outcome)
{
	TimestampTz run_at = idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT);
	TimestampTz new_run_at;
	int priority = choose_priority(jobs, enqueue);
	bool new_payload;
	TupleTableSlot *slot;

	*outcome = choose_outcome(jobs, enqueue);
	new_payload = *outcome != IDEM_OUTCOME_ABSORBED;
	new_run_at = choose_run_at(jobs, enqueue, *outcome);
	if (!new_payload && new_run_at == run_at &&
		priority == idem_row_int32(jobs->found, IDEM_JOBS_PRIORITY))
		return NULL;

	slot = idem_write_copy_row(jobs, jobs->found);
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(new_run_at));
	idem_row_set(slot, IDEM_JOBS_PRIORITY, Int32GetDatum(priority));
	if (new_payload && job->payload.isnull)
		idem_row_clear(slot, IDEM_JOBS_PAYLOAD);
	else if (new_payload)
		idem_row_set(slot, IDEM_JOBS_PAYLOAD, job->payload.value);
	return slot;
}

/* Another transaction is in the way: the enqueue of a tick does not wait for it (T6) */
static void
check_may_wait(const IdemEnqueue *enqueue)
{
	if (enqueue->nowait)
		ereport(ERROR,
				errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				errmsg("an open transaction holds the key of the job"),
				errdetail("It has enqueued, changed or ended a job of this key."),
				errhint("Try again when that transaction has ended."));
}

/*
 * J1: let the waiting job, which this transaction has locked FOR KEY SHARE, absorb the
 * duplicate.  Returns false if another transaction has changed the job meanwhile.
 */
static bool
absorb_waiting(IdemTable *jobs, IdemKeyedEnqueue *keyed, const IdemKeyScan *scan,
			   IdemEnqueued *answer)
{
	TupleTableSlot *slot;
	TM_Result result;

	if (keyed->enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_ERROR)
		refuse_duplicate(keyed, scan->job_id, "waits");
	answer->job_id = scan->job_id;
	if (change_waiting(jobs, keyed->enqueue, keyed->job, &answer->outcome) == NULL)
		return true;
	/* no worker can fetch the job now, but another enqueue may be changing it: wait for that */
	result = idem_table_lock_row(jobs, scan->tid, LockTupleNoKeyExclusive,
								 keyed->enqueue->nowait ? LockWaitSkip : LockWaitBlock, jobs->found);
	if (result == TM_WouldBlock)
		check_may_wait(keyed->enqueue);
	if (result != TM_Ok)
	{
		keyed->unlockable.n = 0;
		return false;
	}
	/* decide again: the answer may have changed during the wait */
	slot = change_waiting(jobs, keyed->enqueue, keyed->job, &answer->outcome);
	if (slot != NULL)
	{
		IdemJob found = idem_job_found(jobs);

		(void) idem_jobrow_store(jobs, &found, slot);
		idem_jobrow_note_absorbed(slot);
	}
	return true;
}

/* Let a job that runs or drains absorb the duplicate, without a lock */
static void
absorb_running(const IdemKeyedEnqueue *keyed, const IdemKeyScan *scan, IdemEnqueued *answer)
{
	if (keyed->enqueue->policy.on_duplicate == IDEM_ON_DUPLICATE_ERROR)
		refuse_duplicate(keyed, scan->job_id,
						 scan->found == IDEM_KEY_SCAN_DRAINING ? "waits" : "runs");
	answer->job_id = scan->job_id;
	answer->outcome = IDEM_OUTCOME_ABSORBED;
}

/*
 * Lock the history, its indexes and its TOAST table until the transaction ends, so that
 * make_spent_dead() does not wait for them while it holds the lock on the hash
 */
static void
lock_log(void)
{
	IdemTable log;

	idem_jobtable_open_log(&log, RowExclusiveLock);
	idem_table_open_indexes(&log);
	idem_table_lock_toast(&log);
	idem_table_close(&log);
}

/*
 * Enqueue a job with a key.  Each pass of the loop scans the key, and then answers, or waits
 * for the transaction in the way (J6), or prepares the next scan.
 */
static void
enqueue_keyed(IdemTable *jobs, IdemKeyedEnqueue *keyed, IdemEnqueued *answer)
{
	Relation index = idem_jobtable_key_index(jobs);

	for (;;)
	{
		IdemKeyScan scan;

		CHECK_FOR_INTERRUPTS();
		if (scan_or_insert(jobs, index, keyed, &scan, answer))
			return;
		if (TransactionIdIsValid(scan.in_the_way))
		{
			check_may_wait(keyed->enqueue);
			idem_probe_wait(jobs, scan.in_the_way);
			keyed->unlockable.n = 0;
		}
		else if (scan.is_being_cancelled)
		{
			check_may_wait(keyed->enqueue);
			idem_jobtable_wait_for_mark(scan.job_id);
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
		else if (scan.found == IDEM_KEY_SCAN_WAITING && scan.lock_result == TM_WouldBlock)
			(void) idem_keyscan_add_id(&keyed->unlockable, scan.job_id);
		else if (scan.found == IDEM_KEY_SCAN_WAITING && scan.lock_result == TM_Ok &&
				 absorb_waiting(jobs, keyed, &scan, answer))
		{
			idem_keyscan_note_absorbed(scan.job_id);
			idem_headers_note_link(scan.job_id, keyed->job->headers);
			return;
		}
	}
}

/* Lock the TOAST table if the row of the job may need it, before the lock on a hash (K5) */
void
idem_enqueuestore_lock_toast(IdemTable *jobs, const IdemNewJob *job)
{
	Size size = 0;

	if (!job->payload.isnull)
		size += VARSIZE_ANY(DatumGetPointer(job->payload.value));
	if (job->headers != NULL)
		size += VARSIZE_ANY(job->headers);
	if (size > LARGE_PAYLOAD)
		idem_table_lock_toast(jobs);
}

/* Does the job hold its key?  A scheduled job ignores it unless include_scheduled is set (J8). */
bool
idem_enqueuestore_takes_key(const IdemEnqueue *enqueue, const text *key)
{
	return key != NULL && (!enqueue->later || enqueue->policy.include_scheduled);
}

static void
enqueue_job(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
			IdemEnqueued *answer)
{
	IdemSameHash others;
	IdemKeyedEnqueue keyed = {.enqueue = enqueue, .job = job, .others = &others};
	IdemTable keys;

	memset(answer, 0, sizeof(*answer));
	if (!idem_enqueuestore_takes_key(enqueue, job->key))
	{
		insert_job(jobs, enqueue, job, 0, false, 0, answer);
		return;
	}
	/* acquire every lock that may block before the lock on the hash */
	idem_jobtable_lock_ids();
	idem_enqueuestore_lock_toast(jobs, job);
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

/*
 * Enqueue a job, or return the number of the job that has absorbed it.  M2: a key of another
 * shard raises an error; that of a job with a number was checked when it got the number.
 */
void
idem_enqueuestore_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
						  IdemEnqueued *answer)
{
	IdemNewJob checked = *job;

	if (checked.job_id == 0)
		checked.slot = idem_shard_choose_slot(enqueue->scope, job->key);
	enqueue_job(jobs, enqueue, &checked, answer);
	idem_counters_add_queue(idem_queueref_get(enqueue->queue.name), (IdemQueueCounter) answer->outcome);
	if (answer->outcome != IDEM_OUTCOME_ENQUEUED)
		idem_counters_log_duplicate("enqueue", idem_enqueuestore_outcome_name(answer->outcome),
									enqueue->queue.name, job->key);
}
