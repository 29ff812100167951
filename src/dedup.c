/*
 * dedup.c
 *		The protocol of enqueue: who absorbs a duplicate, and when.
 *
 * Jobs of a key are found through an index on a hash of queue and key.  It is
 * not unique: what keeps two from inserting a job of the same key is a lock
 * on the hash, held for a moment, under which the jobs of the key are looked
 * at with a dirty snapshot.  Whatever moves a job in the index holds it, too
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
 * A job that somebody has fetched with a lease absorbs nothing that way, not
 * even when the lease has run out, because it may be completed all the same.
 *
 * Who waits for whom: an enqueue waits for another open one that has inserted a
 * job of the same key or changed the one that waits; and, if it is to be absorbed
 * by a job that runs, for whoever is just removing that.  It never waits for a
 * job that runs.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs.h"

/* A few numbers of jobs */
typedef struct IdSet
{
	int n;
	int64 *ids;
} IdSet;

/* What is known about the jobs of a key after a look at them; of several that run the last one */
typedef struct Look
{
	ItemPointerData waiting; /* a job that nobody has fetched, invalid: none */
	int64 waiting_id;
	bool waiting_is_rerun;
	TimestampTz waiting_run_at;
	TransactionId changing;	 /* who is changing that one, if somebody is */
	TM_Result lock;			 /* what became of the attempt to lock it, if nobody is */
	int64 running;			 /* a job that somebody has fetched, 0: none */
	TransactionId removing;	 /* who is about to remove that one, if somebody is */
	TransactionId inserting; /* who has inserted one and is open, if somebody has */
} Look;

/* One enqueue of a job with a key */
typedef struct Attempt
{
	const IdemEnqueue *enqueue;
	const IdemNewJob *job;
	int64 key_hash;
	IdemTable *keys;	 /* idem.job_keys for until_expired, else NULL */
	IdSet not_to_be_had; /* jobs that wait, by their rows, but were held by somebody since the last wait */
} Attempt;

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

static bool
has_id(const IdSet *set, int64 id)
{
	for (int i = 0; i < set->n; i++)
	{
		if (set->ids[i] == id)
			return true;
	}
	return false;
}

/* False: it was there already */
static bool
add_id(IdSet *set, int64 id)
{
	if (has_id(set, id))
		return false;
	set->ids = set->ids == NULL ? palloc(sizeof(int64)) :
								  repalloc_array(set->ids, int64, set->n + 1);
	set->ids[set->n++] = id;
	return true;
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
refuse_duplicate(const Attempt *attempt, int64 job_id, const char *state)
{
	idem_stats_count_refused(attempt->enqueue->queue.name, attempt->job->key);
	ereport(ERROR,
			errcode(ERRCODE_IDEM_DUPLICATE_JOB),
			errmsg("duplicate job"),
			errdetail("Job " INT64_FORMAT " has this key and %s.", job_id, state),
			errhint("Pass %s to let the job absorb its duplicates.", "on_duplicate => 'skip'"));
}

/* Does a job of the key count for this enqueue? */
static bool
counts(IdemTable *jobs, const Attempt *attempt, bool runs)
{
	const IdemEnqueue *enqueue = attempt->enqueue;

	if (!idem_row_varlena_equals(jobs, IDEM_JOBS_KEY, attempt->job->key) ||
		!idem_row_varlena_equals(jobs, IDEM_JOBS_QUEUE, enqueue->queue.name))
		return false;
	if (enqueue->policy.dedup != IDEM_UNTIL_EXPIRED)
		return true;
	if (idem_row_isnull(jobs, IDEM_JOBS_KEY_UNTIL))
		return !runs;
	return idem_row_timestamp(jobs, IDEM_JOBS_KEY_UNTIL) > enqueue->now;
}

/*
 * Of several jobs that wait, which one is to absorb the duplicate?  A rerun was
 * made for such; else the one that is due first.
 */
static bool
is_better(IdemTable *jobs, const Look *look)
{
	bool is_rerun = !idem_row_isnull(jobs, IDEM_JOBS_AFTER_JOB);

	if (!ItemPointerIsValid(&look->waiting) || is_rerun != look->waiting_is_rerun)
		return !ItemPointerIsValid(&look->waiting) || is_rerun;
	return idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT) < look->waiting_run_at;
}

/* Take down what a job that is committed, or this transaction's, means for us */
static void
note_job(IdemTable *jobs, TransactionId xmax, const Attempt *attempt, Look *look)
{
	int64 job_id = idem_row_int64(jobs, IDEM_JOBS_JOB_ID);
	bool leased = idem_jobrow_is_leased(jobs);
	/* in this order: whoever has ended may have left the row to somebody who only locks it */
	bool removed = TransactionIdIsValid(xmax) && idem_row_is_last_version(jobs) && TransactionIdIsInProgress(xmax);
	bool runs = leased || removed || has_id(&attempt->not_to_be_had, job_id);

	if (!counts(jobs, attempt, runs))
		return;
	if (runs)
	{
		look->running = job_id;
		/* with a live lease it does not matter who is removing it */
		if (removed && !(leased && idem_row_timestamp(jobs, IDEM_JOBS_LEASE_UNTIL) > attempt->enqueue->now))
			look->removing = xmax;
	}
	else if (is_better(jobs, look))
	{
		look->waiting = jobs->found->tts_tid;
		look->waiting_id = job_id;
		look->waiting_is_rerun = !idem_row_isnull(jobs, IDEM_JOBS_AFTER_JOB);
		look->waiting_run_at = idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT);
		look->changing = xmax;
	}
}

/*
 * Look at all jobs of the key.  False, look again: a job was seen only as it
 * will be if the change of an open transaction is committed, because when we
 * came to its present version it just was; or that change turned out to be a
 * fetch.
 */
static bool
look_at_jobs(IdemTable *jobs, Relation index, Attempt *attempt, Look *look)
{
	IdemLookup lookup = idem_jobtable_by_key(jobs, index, attempt->key_hash);
	IdSet seen = {0};
	IdSet changing = {0};
	bool settled = true;
	SnapshotData dirty;
	IndexScanDesc scan;

	memset(look, 0, sizeof(*look));
	ItemPointerSetInvalid(&look->waiting);
	InitDirtySnapshot(dirty);
	scan = idem_probe_begin(jobs, &lookup, &dirty);
	while (index_getnext_slot(scan, ForwardScanDirection, jobs->found))
	{
		int64 job_id = idem_row_int64(jobs, IDEM_JOBS_JOB_ID);

		CHECK_FOR_INTERRUPTS();
		/* versions that an open transaction has made or is replacing come in pairs */
		if (!TransactionIdIsValid(dirty.xmin))
		{
			if (TransactionIdIsValid(dirty.xmax))
				add_id(&seen, job_id);
			note_job(jobs, dirty.xmax, attempt, look);
		}
		else if (!idem_row_is_later_version(jobs))
		{
			add_id(&seen, job_id);
			if (counts(jobs, attempt, false))
				look->inserting = dirty.xmin;
		}
		else
		{
			add_id(&changing, job_id);
			if (idem_jobrow_is_leased(jobs) && add_id(&attempt->not_to_be_had, job_id))
				settled = false;
		}
	}
	index_endscan(scan);
	ExecClearTuple(jobs->found);

	for (int i = 0; i < changing.n; i++)
		settled = settled && has_id(&seen, changing.ids[i]);
	return settled;
}

/*
 * until_expired: is the job of this key done, and the key not expired?  What is
 * not committed belongs to a job that is still there, so we have seen that.
 */
static bool
find_done(const Attempt *attempt, IdemEnqueued *answer)
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
			idem_row_varlena_equals(keys, IDEM_JOB_KEYS_KEY, attempt->job->key) &&
			idem_row_varlena_equals(keys, IDEM_JOB_KEYS_QUEUE, attempt->enqueue->queue.name);
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
may_insert(const Attempt *attempt, const Look *look, int64 *after_job)
{
	const IdemPolicy *policy = &attempt->enqueue->policy;

	*after_job = 0;
	if (ItemPointerIsValid(&look->waiting) || TransactionIdIsValid(look->inserting))
		return false;
	if (look->running == 0 || policy->dedup == IDEM_UNTIL_EXECUTING)
		return true;
	if (policy->dedup == IDEM_UNTIL_EXPIRED || !policy->rerun || TransactionIdIsValid(look->removing))
		return false;
	if (policy->on_duplicate == IDEM_REFUSE)
		return false;
	*after_job = look->running;
	return true;
}

/*
 * Look at the jobs of the key, and insert one if none is in the way, or lock the
 * one that waits.  True: the answer is there.
 */
static bool
look_or_insert(IdemTable *jobs, Relation index, Attempt *attempt, Look *look, IdemEnqueued *answer)
{
	int64 after_job;
	bool answered = false;

	idem_table_lock_hash(jobs, (uint32) attempt->key_hash);
	while (!look_at_jobs(jobs, index, attempt, look))
		CHECK_FOR_INTERRUPTS();
	if (may_insert(attempt, look, &after_job))
	{
		if (look->running != 0 || !find_done(attempt, answer))
			insert_job(jobs, attempt->enqueue, attempt->job, attempt->key_hash, true, after_job, answer);
		answered = true;
	}
	else if (ItemPointerIsValid(&look->waiting) && !TransactionIdIsValid(look->changing))
		look->lock = idem_table_lock(jobs, look->waiting, LockTupleKeyShare, LockWaitSkip);
	idem_table_unlock_hash(jobs, (uint32) attempt->key_hash);

	if (answered && answer->outcome == IDEM_DONE && attempt->enqueue->policy.on_duplicate == IDEM_REFUSE)
		refuse_duplicate(attempt, answer->job_id, "is done");
	return answered;
}

/*
 * What the duplicate changes in the job that absorbs it: the row to be written,
 * or NULL if nothing.
 */
static TupleTableSlot *
change_waiting(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, IdemOutcome *outcome)
{
	TimestampTz run_at = idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT);
	TimestampTz new_run_at = run_at;
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
	if (!new_payload && new_run_at == run_at)
		return NULL;

	slot = idem_jobrow_copy(jobs, false);
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(new_run_at));
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
absorb_waiting(IdemTable *jobs, Attempt *attempt, const Look *look, IdemEnqueued *answer)
{
	if (attempt->enqueue->policy.on_duplicate == IDEM_REFUSE)
		refuse_duplicate(attempt, look->waiting_id, "waits");
	answer->job_id = look->waiting_id;
	if (change_waiting(jobs, attempt->enqueue, attempt->job, &answer->outcome) == NULL)
		return true;
	/* nobody can fetch it any more, but another duplicate may be changing it */
	if (idem_table_lock(jobs, look->waiting, LockTupleNoKeyExclusive, LockWaitBlock) != TM_Ok)
	{
		attempt->not_to_be_had.n = 0;
		return false;
	}
	/* the wait may have changed what there is to change */
	if (change_waiting(jobs, attempt->enqueue, attempt->job, &answer->outcome) != NULL)
		idem_jobrow_store(jobs);
	return true;
}

static void
absorb_running(const Attempt *attempt, const Look *look, IdemEnqueued *answer)
{
	if (attempt->enqueue->policy.on_duplicate == IDEM_REFUSE)
		refuse_duplicate(attempt, look->running, "runs");
	answer->job_id = look->running;
	answer->outcome = IDEM_ABSORBED;
}

/* Who has to end before more is known, if somebody has */
static TransactionId
in_the_way(const Look *look)
{
	if (ItemPointerIsValid(&look->waiting))
		return look->changing;
	return TransactionIdIsValid(look->inserting) ? look->inserting : look->removing;
}

/* Each round looks at the key and either answers or waits for who is in the way */
static void
enqueue_keyed(IdemTable *jobs, Attempt *attempt, IdemEnqueued *answer)
{
	Relation index = idem_jobtable_key_index(jobs);

	for (;;)
	{
		Look look;
		TransactionId other;

		CHECK_FOR_INTERRUPTS();
		if (look_or_insert(jobs, index, attempt, &look, answer))
			return;
		other = in_the_way(&look);
		if (TransactionIdIsValid(other))
		{
			idem_probe_wait(jobs, other);
			attempt->not_to_be_had.n = 0;
		}
		else if (!ItemPointerIsValid(&look.waiting))
		{
			absorb_running(attempt, &look, answer);
			return;
		}
		else if (look.lock == TM_WouldBlock)
			(void) add_id(&attempt->not_to_be_had, look.waiting_id);
		else if (look.lock == TM_Ok && absorb_waiting(jobs, attempt, &look, answer))
			return;
	}
}

static void
enqueue_job(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job, IdemEnqueued *answer)
{
	Attempt attempt = {.enqueue = enqueue, .job = job};
	IdemTable keys;

	memset(answer, 0, sizeof(*answer));
	if (job->key == NULL || (enqueue->later && !enqueue->policy.include_scheduled))
	{
		insert_job(jobs, enqueue, job, 0, false, 0, answer);
		return;
	}
	/* everything is open before the lock on the hash is taken */
	idem_jobtable_lock_ids();
	attempt.key_hash = idem_jobtable_key_hash(enqueue->queue.name, job->key);
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
