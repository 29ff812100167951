/*
 * joblook.c
 *		Look at the jobs of a key: which one may absorb a duplicate, which run,
 *		who is in the way.  What the enqueue does about it: dedup.c.
 *
 * The caller holds the lock on the hash of the key, so no job of the key moves in
 * the index meanwhile.  The jobs are looked at with a dirty snapshot, which also
 * shows what is not committed.  Nothing is waited for here and nothing is written.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

/* What a job of the key is to this enqueue */
typedef enum Kind
{
	KIND_OPEN,	  /* another transaction has inserted it, and is open */
	KIND_WAITING, /* nobody has fetched it */
	KIND_RUNNING, /* somebody has, or an open transaction is removing it */
	KIND_SPENT	  /* its last lease has run out: it will not run again */
} Kind;

typedef struct KeyJob
{
	Kind kind;
	int64 job_id;
	int64 after_job; /* 0: none */
	ItemPointerData tid;
	TimestampTz run_at;
	TimestampTz due_since; /* or to come */
	TransactionId by;	   /* who is inserting, changing or removing it, if somebody is */
	bool is_mine;		   /* this transaction keeps it from starting */
	bool is_held_back;	   /* others do, because it has absorbed a duplicate of theirs */
} KeyJob;

/* How well a job that waits suits the duplicate, best first */
typedef enum Rank
{
	RANK_SUITABLE, /* due not long ago or as early as the duplicate, or this transaction keeps it
					  from starting already */
	RANK_OVERDUE,  /* due for long: rather leave it to the workers */
	RANK_LATE,	   /* to start later than the duplicate */
	RANK_DRAINING, /* has to start first */
	RANK_N
} Rank;

/*
 * The job that this backend has kept from starting again and again, in one
 * transaction after the other; times by the steady clock.  A hint: it only decides
 * whether a duplicate goes to that job or to a new one.
 */
typedef struct Stream
{
	int64 job_id; /* 0: none */
	int64 began;
	int64 last;
} Stream;

static Stream stream;

/* The jobs of the key that count */
typedef struct KeyJobs
{
	int n;
	KeyJob *jobs;
} KeyJobs;

static bool
has_id(const IdemIdSet *set, int64 id)
{
	for (int i = 0; i < set->n; i++)
	{
		if (set->ids[i] == id)
			return true;
	}
	return false;
}

/* False: it was there already */
bool
idem_keyscan_add_id(IdemIdSet *set, int64 id)
{
	if (has_id(set, id))
		return false;
	set->ids = set->ids == NULL ? palloc(sizeof(int64)) :
								  repalloc_array(set->ids, int64, set->n + 1);
	set->ids[set->n++] = id;
	return true;
}

/* Does the job found count for this enqueue? */
static bool
counts_for_enqueue(IdemTable *jobs, const IdemKeyedEnqueue *keyed, bool waits)
{
	const IdemEnqueue *enqueue = keyed->enqueue;

	if (!idem_jobrow_has_key(jobs, IDEM_JOBS_QUEUE, enqueue->queue.name, keyed->job->key,
							 keyed->others))
		return false;
	if (enqueue->policy.dedup != IDEM_DEDUP_UNTIL_EXPIRED)
		return true;
	if (idem_row_isnull(jobs, IDEM_JOBS_KEY_UNTIL))
		return waits;
	return idem_row_timestamp(jobs, IDEM_JOBS_KEY_UNTIL) > enqueue->now;
}

/* Has the lease of the job found run out, by the clock of the enqueue? */
static bool
lease_has_run_out(IdemTable *jobs, const IdemKeyedEnqueue *keyed)
{
	return idem_jobrow_is_leased(jobs) &&
		idem_row_timestamp(jobs, IDEM_JOBS_LEASE_UNTIL) <= keyed->enqueue->now;
}

/*
 * J2: will the job found not run again, because the lease of its last attempt has
 * run out?  until_executing has no need to know: it takes no job that was fetched.
 */
static bool
is_spent(IdemTable *jobs, const IdemKeyedEnqueue *keyed)
{
	return keyed->enqueue->policy.dedup != IDEM_DEDUP_UNTIL_EXECUTING &&
		lease_has_run_out(jobs, keyed) && !idem_row_is_mine(jobs) &&
		idem_jobrow_has_no_attempts_left(jobs, &keyed->enqueue->queue);
}

/* Does this transaction, or do others, keep the job found from starting?  Who has it FOR UPDATE
 * starts it. */
static void
note_lockers(IdemTable *jobs, KeyJob *job)
{
	IdemLockers lockers;

	idem_row_lockers(jobs, &lockers);
	job->is_mine = lockers.mine || idem_row_is_mine(jobs);
	job->is_held_back = TransactionIdIsValid(lockers.shared);
}

/* Take down the job found; by: who is inserting, changing or removing it, if somebody is */
static void
note_job(KeyJobs *list, IdemTable *jobs, Kind kind, TransactionId by, const IdemKeyedEnqueue *keyed)
{
	KeyJob *job;

	if (!counts_for_enqueue(jobs, keyed, kind == KIND_OPEN || kind == KIND_WAITING))
		return;
	list->jobs = list->jobs == NULL ? palloc(sizeof(KeyJob)) :
									  repalloc_array(list->jobs, KeyJob, list->n + 1);
	job = &list->jobs[list->n++];
	memset(job, 0, sizeof(*job));
	job->kind = kind;
	job->job_id = idem_row_int64(jobs, IDEM_JOBS_JOB_ID);
	job->after_job = idem_row_int64(jobs, IDEM_JOBS_AFTER_JOB);
	job->tid = jobs->found->tts_tid;
	job->run_at = idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT);
	job->due_since = Max(job->run_at, idem_row_timestamp(jobs, IDEM_JOBS_ENQUEUED_AT));
	job->by = by;
	if (kind == KIND_WAITING)
		note_lockers(jobs, job);
}

/* Take down a job that is committed, or this transaction's */
static void
note_committed(KeyJobs *list, IdemTable *jobs, TransactionId xmax, const IdemKeyedEnqueue *keyed)
{
	bool leased = idem_jobrow_is_leased(jobs);
	/* in this order: whoever has ended may have left the row to somebody who only locks it */
	bool removed = TransactionIdIsValid(xmax) && idem_row_is_last_version(jobs) &&
		TransactionIdIsInProgress(xmax);

	if (is_spent(jobs, keyed))
		note_job(list, jobs, KIND_SPENT, xmax, keyed);
	else if (leased || removed ||
			 has_id(&keyed->unlockable, idem_row_int64(jobs, IDEM_JOBS_JOB_ID)))
	{
		/* with a live lease it does not matter who is removing it */
		if (!removed || (leased && !lease_has_run_out(jobs, keyed)))
			xmax = InvalidTransactionId;
		note_job(list, jobs, KIND_RUNNING, xmax, keyed);
	}
	else
		note_job(list, jobs, KIND_WAITING, xmax, keyed);
}

/*
 * Go through the jobs of the key.  False, do it again: a job was seen only as it
 * will be if the change of an open transaction is committed, because when we
 * came to its present version it just was; or that change turned out to be a
 * fetch.
 */
static bool
list_jobs(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed, KeyJobs *list)
{
	IdemLookup lookup = idem_jobtable_by_key(jobs, index, keyed->key_hash);
	IdemIdSet seen = {0};
	IdemIdSet changing = {0};
	bool settled = true;
	SnapshotData dirty;
	IndexScanDesc scan;

	list->n = 0;
	keyed->others->n = 0;
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
				idem_keyscan_add_id(&seen, job_id);
			note_committed(list, jobs, dirty.xmax, keyed);
		}
		else if (!idem_row_is_later_version(jobs))
		{
			idem_keyscan_add_id(&seen, job_id);
			note_job(list, jobs, KIND_OPEN, dirty.xmin, keyed);
		}
		else
		{
			idem_keyscan_add_id(&changing, job_id);
			if (idem_jobrow_is_leased(jobs) && idem_keyscan_add_id(&keyed->unlockable, job_id))
				settled = false;
		}
	}
	index_endscan(scan);
	ExecClearTuple(jobs->found);

	for (int i = 0; i < changing.n; i++)
		settled = settled && has_id(&seen, changing.ids[i]);
	return settled;
}

/* The last one of a kind, in the order of the index, or NULL */
static const KeyJob *
find_kind(const KeyJobs *list, Kind kind)
{
	const KeyJob *found = NULL;

	for (int i = 0; i < list->n; i++)
	{
		if (list->jobs[i].kind == kind)
			found = &list->jobs[i];
	}
	return found;
}

/* A job of this kind that comes after that one, or NULL */
static const KeyJob *
find_follower(const KeyJobs *list, Kind kind, const KeyJob *of)
{
	for (int i = 0; i < list->n; i++)
	{
		if (list->jobs[i].kind == kind && list->jobs[i].after_job == of->job_id)
			return &list->jobs[i];
	}
	return NULL;
}

/* Is a job with this number there? */
static bool
is_there(const KeyJobs *list, int64 job_id)
{
	for (int i = 0; i < list->n; i++)
	{
		if (list->jobs[i].job_id == job_id)
			return true;
	}
	return false;
}

/* Does it come after a job that is there? */
static bool
is_blocked(const KeyJobs *list, const KeyJob *job)
{
	return job->after_job != 0 && is_there(list, job->after_job);
}

/* How long duplicates may keep a job that is due from starting, in microseconds */
static int64
drain_after(void)
{
	return idem_guc_drain_after * INT64CONST(1000);
}

/* Could the job have been started for longer than duplicates may keep it from that?  Not in a queue
 * that is paused. */
static bool
is_overdue(const KeyJobs *list, const KeyJob *job, const IdemEnqueue *enqueue)
{
	return !enqueue->queue.paused &&
		idem_clock_now() - job->due_since >= drain_after() &&
		!is_blocked(list, job);
}

/* A job that waits has absorbed a duplicate of this backend */
void
idem_keyscan_note_absorbed(int64 job_id)
{
	int64 now = idem_clock_steady();

	if (stream.job_id != job_id || now - stream.last >= drain_after())
		stream.began = now;
	stream.job_id = job_id;
	stream.last = now;
}

/*
 * J1: has this backend kept the job from starting for too long, though not in this
 * transaction?  A worker that polls hardly meets the moment between two of them.
 */
static bool
is_kept_by_stream(const KeyJob *job)
{
	return stream.job_id == job->job_id &&
		idem_clock_steady() - stream.last < drain_after() &&
		stream.last - stream.began >= drain_after();
}

static Rank
rank_job(IdemTable *jobs, const KeyJobs *list, const KeyJob *job, const IdemEnqueue *enqueue)
{
	bool overdue;

	if (job->is_mine)
		return RANK_SUITABLE;
	overdue = is_overdue(list, job, enqueue);
	if (job->is_held_back && (overdue || idem_jobtable_is_marked(jobs, job->job_id)))
		return RANK_DRAINING;
	if (overdue)
		return is_kept_by_stream(job) ? RANK_DRAINING : RANK_OVERDUE;
	return job->run_at <= Max(enqueue->now, enqueue->run_at) ? RANK_SUITABLE : RANK_LATE;
}

/*
 * J4: the job that runs and that a follow-up has to come after.  One that an open
 * transaction is removing goes first, because the enqueue waits for its end: if it
 * rolls back, that job waits and takes the duplicate.  Else the last of a chain.
 */
static const KeyJob *
choose_running(const KeyJobs *list)
{
	const KeyJob *found = NULL;

	for (int i = 0; i < list->n; i++)
	{
		const KeyJob *job = &list->jobs[i];

		if (job->kind != KIND_RUNNING)
			continue;
		if (TransactionIdIsValid(job->by))
			return job;
		if (find_follower(list, KIND_RUNNING, job) == NULL)
			found = job;
	}
	return found;
}

/*
 * Of two jobs of a rank, which one is to absorb the duplicate?  A rerun was made
 * for such; else the one that is due first, but of those that are overdue the other
 * one, because the first is fetched first.
 */
static bool
is_better(const KeyJob *job, const KeyJob *than, Rank rank)
{
	if (than == NULL || (job->after_job != 0) != (than->after_job != 0))
		return than == NULL || job->after_job != 0;
	if (rank == RANK_OVERDUE || rank == RANK_DRAINING)
		return job->run_at > than->run_at;
	return job->run_at < than->run_at;
}

/*
 * J1, J2: which job that waits is to absorb the duplicate, if one is?  If not because
 * one drains: that one.
 *
 * Where one drains, workers want it, so one that is overdue is left to them, and
 * there are at most so many jobs of the key as there are transactions that enqueue
 * it at a time, and one.  J4: of a chain of reruns only the last one takes duplicates,
 * so that it has the newest payload.
 */
static const KeyJob *
choose_waiting(IdemTable *jobs, const KeyJobs *list, const IdemEnqueue *enqueue,
			   const KeyJob **draining)
{
	const KeyJob *best[RANK_N] = {NULL};
	int n[RANK_N] = {0};

	for (int i = 0; i < list->n; i++)
	{
		const KeyJob *job = &list->jobs[i];
		Rank r;

		if (job->kind != KIND_WAITING || find_follower(list, KIND_WAITING, job) != NULL)
			continue;
		r = rank_job(jobs, list, job, enqueue);
		n[r]++;
		if (is_better(job, best[r], r))
			best[r] = job;
	}
	*draining = best[RANK_DRAINING];
	if (n[RANK_SUITABLE] > 0)
		return best[RANK_SUITABLE];
	if (n[RANK_OVERDUE] > (n[RANK_DRAINING] > 0 ? 1 : 0))
		return best[RANK_OVERDUE];
	return n[RANK_DRAINING] > 0 ? NULL : best[RANK_LATE];
}

/* J4: who has to end before it is known whether another job comes after the one that waits? */
static TransactionId
deciding_about_follower(const KeyJobs *list, const KeyJob *waiting)
{
	const KeyJob *follower = find_follower(list, KIND_OPEN, waiting);

	if (follower == NULL)
		follower = find_follower(list, KIND_RUNNING, waiting);
	return follower != NULL ? follower->by : InvalidTransactionId;
}

/* Does a duplicate have a payload for the job that absorbs it? */
static bool
brings_payload(const IdemPolicy *policy)
{
	return policy->rerun || policy->on_duplicate == IDEM_ON_DUPLICATE_REPLACE ||
		policy->on_duplicate == IDEM_ON_DUPLICATE_DEBOUNCE;
}

/* Does a duplicate of a job that drains go to another one? */
static bool
needs_new_job(const IdemPolicy *policy)
{
	return policy->dedup != IDEM_DEDUP_UNTIL_EXPIRED &&
		policy->on_duplicate != IDEM_ON_DUPLICATE_ERROR;
}

/*
 * J4: may a job come after the one that drains?  Not beside another one, and not if
 * that one is to be cancelled and comes after a job itself: the new job would be free
 * with the cancel, and run beside the first one.
 */
static void
look_at_chain(const KeyJobs *list, const KeyJob *draining, IdemKeyScan *scan)
{
	scan->in_the_way = deciding_about_follower(list, draining);
	scan->is_being_cancelled = is_blocked(list, draining);
}

/* What the jobs of the key mean for the enqueue */
static void
sum_up(IdemTable *jobs, const KeyJobs *list, const IdemEnqueue *enqueue, IdemKeyScan *scan)
{
	const IdemPolicy *policy = &enqueue->policy;
	const KeyJob *draining;
	const KeyJob *waiting = choose_waiting(jobs, list, enqueue, &draining);
	const KeyJob *open = find_kind(list, KIND_OPEN);
	const KeyJob *spent = find_kind(list, KIND_SPENT);
	const KeyJob *running = choose_running(list);

	memset(scan, 0, sizeof(*scan));
	ItemPointerSetInvalid(&scan->tid);
	if (waiting != NULL)
	{
		scan->found = IDEM_KEY_SCAN_WAITING;
		scan->job_id = waiting->job_id;
		scan->tid = waiting->tid;
		scan->in_the_way = waiting->by;
		if (!TransactionIdIsValid(scan->in_the_way) && brings_payload(policy))
			scan->in_the_way = deciding_about_follower(list, waiting);
	}
	else if (open != NULL && (draining == NULL || needs_new_job(policy)))
	{
		scan->found = IDEM_KEY_SCAN_OPEN;
		scan->in_the_way = open->by;
	}
	else if (draining != NULL)
	{
		scan->found = IDEM_KEY_SCAN_DRAINING;
		scan->job_id = draining->job_id;
		if (policy->dedup == IDEM_DEDUP_UNTIL_EXECUTED && needs_new_job(policy))
			look_at_chain(list, draining, scan);
	}
	else if (spent != NULL)
	{
		scan->found = IDEM_KEY_SCAN_SPENT;
		scan->job_id = spent->job_id;
		scan->tid = spent->tid;
		scan->in_the_way = spent->by;
	}
	else if (running != NULL)
	{
		scan->found = IDEM_KEY_SCAN_RUNNING;
		scan->job_id = running->job_id;
		scan->in_the_way = running->by;
	}
}

/* Look at all jobs of the key */
void
idem_keyscan(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed, IdemKeyScan *scan)
{
	KeyJobs list = {0};

	while (!list_jobs(jobs, index, keyed, &list))
		CHECK_FOR_INTERRUPTS();
	sum_up(jobs, &list, keyed->enqueue, scan);
}
