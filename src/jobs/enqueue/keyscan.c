/*
 * keyscan.c
 *		Scan the jobs of a key for an enqueue: which waiting job may absorb the
 *		duplicate, which job runs, which transaction must end first.  What the enqueue
 *		does with the result: enqueuestore.c.
 *
 * The caller holds the lock on the hash of the key, so no job of the key moves in the
 * index during the scan.  The scan uses a dirty snapshot, which also shows uncommitted
 * rows.  It waits for no transaction and writes nothing.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/snapmgr.h"

#include "jobs/enqueue/enqueue.h"

/* What a job of the key means for this enqueue */
typedef enum Kind
{
	KIND_OPEN,	  /* another open transaction has inserted it */
	KIND_WAITING, /* no worker has it */
	KIND_RUNNING, /* a worker has fetched it, or an open transaction is removing it */
	KIND_SPENT	  /* the lease of its last attempt has expired: it will not run again */
} Kind;

typedef struct KeyJob
{
	Kind kind;
	int64 job_id;
	int64 after_job; /* 0: none */
	ItemPointerData tid;
	TimestampTz run_at;
	TimestampTz due_since;	  /* in the future if the job is scheduled */
	TransactionId changed_by; /* open transaction that inserts, changes or removes it; or invalid */
	bool is_mine;			  /* this transaction keeps it from starting */
	bool is_held_back;		  /* other transactions do, because it absorbed their duplicates */
} KeyJob;

/* How well a waiting job suits the duplicate, best first */
typedef enum Rank
{
	RANK_SUITABLE, /* starts no later than the duplicate, or this transaction holds it back */
	RANK_OVERDUE,  /* due for longer than idem.drain_after: better left to the workers */
	RANK_LATE,	   /* starts later than the duplicate */
	RANK_DRAINING, /* must start before it absorbs again */
	RANK_N
} Rank;

/*
 * The job that absorbed the last duplicates of this backend, in one transaction after
 * another; times by the steady clock.  It is a hint: it only decides whether a duplicate
 * goes to that job or to another one.
 */
typedef struct AbsorbStream
{
	int64 job_id; /* 0: none */
	int64 began;
	int64 last;
} AbsorbStream;

static AbsorbStream absorb_stream;

/* The jobs of the key that matter for this enqueue */
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

/* Returns false if the set already has the number */
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

/*
 * Does the job found matter for this enqueue?  With until_expired a job matters until its
 * key_until has passed (J5).  A job without key_until, enqueued with another strategy,
 * matters only while it waits.
 */
static bool
counts_for_enqueue(IdemTable *jobs, const IdemKeyedEnqueue *keyed, bool waits)
{
	const IdemEnqueue *enqueue = keyed->enqueue;

	if (!idem_jobrow_has_key(jobs, IDEM_JOBS_QUEUE, enqueue->queue.name, keyed->job->key,
							 keyed->others))
		return false;
	if (enqueue->policy.dedup != IDEM_DEDUP_UNTIL_EXPIRED)
		return true;
	if (idem_row_isnull(jobs->found, IDEM_JOBS_KEY_UNTIL))
		return waits;
	return idem_row_timestamp(jobs->found, IDEM_JOBS_KEY_UNTIL) > enqueue->now;
}

/* Has the lease of the job found expired, by the clock of the enqueue? */
static bool
lease_has_expired(IdemTable *jobs, const IdemKeyedEnqueue *keyed)
{
	return idem_jobrow_is_leased(jobs) &&
		idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL) <= keyed->enqueue->now;
}

/*
 * J2: is the job found one that will not run again, because the lease of its last attempt
 * has expired?  until_executing does not ask: there every fetched job counts as running.
 */
static bool
is_spent(IdemTable *jobs, const IdemKeyedEnqueue *keyed)
{
	return keyed->enqueue->policy.dedup != IDEM_DEDUP_UNTIL_EXECUTING &&
		lease_has_expired(jobs, keyed) && !idem_row_is_mine(jobs->found) &&
		idem_jobrow_has_no_attempts_left(jobs, &keyed->enqueue->queue);
}

/*
 * Record whether this transaction, and whether other ones, keep the job found from starting.
 * A transaction that has locked the job FOR UPDATE does not: it starts or removes the job.
 */
static void
note_lockers(IdemTable *jobs, KeyJob *job)
{
	IdemLockers lockers;

	idem_row_lockers(jobs->found, &lockers);
	job->is_mine = lockers.mine || idem_row_is_mine(jobs->found);
	job->is_held_back = TransactionIdIsValid(lockers.shared);
}

/* Add the job found to the list, if it matters for this enqueue */
static void
note_job(KeyJobs *list, IdemTable *jobs, Kind kind, TransactionId changed_by,
		 const IdemKeyedEnqueue *keyed)
{
	KeyJob *job;

	if (!counts_for_enqueue(jobs, keyed, kind == KIND_OPEN || kind == KIND_WAITING))
		return;
	list->jobs = list->jobs == NULL ? palloc(sizeof(KeyJob)) :
									  repalloc_array(list->jobs, KeyJob, list->n + 1);
	job = &list->jobs[list->n++];
	memset(job, 0, sizeof(*job));
	job->kind = kind;
	job->job_id = idem_row_int64(jobs->found, IDEM_JOBS_JOB_ID);
	job->after_job = idem_row_int64(jobs->found, IDEM_JOBS_AFTER_JOB);
	job->tid = jobs->found->tts_tid;
	job->run_at = idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT);
	job->due_since = Max(job->run_at, idem_row_timestamp(jobs->found, IDEM_JOBS_ENQUEUED_AT));
	job->changed_by = changed_by;
	if (kind == KIND_WAITING)
		note_lockers(jobs, job);
}

/*
 * Record what the job found, committed or written by this transaction, means for the
 * enqueue.  A job with a lease counts as running, also after the lease has expired (J3).
 * So does a job that an open transaction is removing, and one that looked waiting but
 * could not be locked.
 */
static void
note_committed(KeyJobs *list, IdemTable *jobs, TransactionId xmax, const IdemKeyedEnqueue *keyed)
{
	bool leased = idem_jobrow_is_leased(jobs);
	/*
	 * Check t_ctid before the proc array: after xmax has ended, another transaction may
	 * merely lock the row.
	 */
	bool removed = TransactionIdIsValid(xmax) && idem_row_is_last_version(jobs->found) &&
		TransactionIdIsInProgress(xmax);

	if (is_spent(jobs, keyed))
		note_job(list, jobs, KIND_SPENT, xmax, keyed);
	else if (leased || removed ||
			 has_id(&keyed->unlockable, idem_row_int64(jobs->found, IDEM_JOBS_JOB_ID)))
	{
		/* with a live lease the job counts as running until it is gone: do not wait */
		if (!removed || (leased && !lease_has_expired(jobs, keyed)))
			xmax = InvalidTransactionId;
		note_job(list, jobs, KIND_RUNNING, xmax, keyed);
	}
	else
		note_job(list, jobs, KIND_WAITING, xmax, keyed);
}

/*
 * List the jobs of the key.  Returns false if the scan must be repeated, in two cases.  The
 * scan saw only the new version of a job, which an open transaction has written, and missed
 * the committed version.  Or the new version shows that the open transaction has fetched
 * the job: the next scan counts the job as running.
 */
static bool
list_jobs(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed, KeyJobs *list)
{
	IdemIdSet seen = {0};
	IdemIdSet changing = {0};
	bool settled = true;
	SnapshotData dirty;
	IdemKeyWalk walk;

	list->n = 0;
	keyed->others->n = 0;
	idem_keywalk_begin(&walk, jobs, index, keyed, &dirty);
	while (idem_keywalk_next(&walk))
	{
		int64 job_id = idem_row_int64(jobs->found, IDEM_JOBS_JOB_ID);

		CHECK_FOR_INTERRUPTS();
		/* a job that an open transaction has updated has two versions: expect both */
		if (!TransactionIdIsValid(dirty.xmin))
		{
			if (TransactionIdIsValid(dirty.xmax))
				idem_keyscan_add_id(&seen, job_id);
			note_committed(list, jobs, dirty.xmax, keyed);
		}
		else if (!idem_row_is_later_version(jobs->found))
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
	idem_keywalk_end(&walk);
	ExecClearTuple(jobs->found);

	for (int i = 0; i < changing.n; i++)
		settled = settled && has_id(&seen, changing.ids[i]);
	return settled;
}

/* The last job of this kind in the order of the index, or NULL */
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

/* A follow-up job of this kind, which runs after the given job; or NULL */
static const KeyJob *
find_follower(const KeyJobs *list, Kind kind, const KeyJob *job)
{
	for (int i = 0; i < list->n; i++)
	{
		if (list->jobs[i].kind == kind && list->jobs[i].after_job == job->job_id)
			return &list->jobs[i];
	}
	return NULL;
}

static bool
has_job(const KeyJobs *list, int64 job_id)
{
	for (int i = 0; i < list->n; i++)
	{
		if (list->jobs[i].job_id == job_id)
			return true;
	}
	return false;
}

/* Is it a follow-up job, and is the job before it still there? */
static bool
is_blocked(const KeyJobs *list, const KeyJob *job)
{
	return job->after_job != 0 && has_job(list, job->after_job);
}

/* How long duplicates may keep a due job from starting, in microseconds */
static int64
get_drain_after(void)
{
	return idem_guc_drain_after * INT64CONST(1000);
}

/*
 * J1: could a worker have started the job for longer than idem.drain_after?  No worker could
 * if the queue is paused or the job before it is still there.
 */
static bool
is_overdue(const KeyJobs *list, const KeyJob *job, const IdemEnqueue *enqueue)
{
	return !enqueue->queue.paused &&
		idem_clock_now() - job->due_since >= get_drain_after() &&
		!is_blocked(list, job);
}

/* Remember that a waiting job has absorbed a duplicate of this backend */
void
idem_keyscan_note_absorbed(int64 job_id)
{
	int64 now = idem_clock_steady();

	if (absorb_stream.job_id != job_id || now - absorb_stream.last >= get_drain_after())
		absorb_stream.began = now;
	absorb_stream.job_id = job_id;
	absorb_stream.last = now;
}

/*
 * J1: have earlier transactions of this backend, one after another, kept the job from
 * starting for too long?  A worker that polls rarely hits the moment between two of them.
 */
static bool
is_kept_by_stream(const KeyJob *job)
{
	return absorb_stream.job_id == job->job_id &&
		idem_clock_steady() - absorb_stream.last < get_drain_after() &&
		absorb_stream.last - absorb_stream.began >= get_drain_after();
}

/* J1: how well a waiting job suits the duplicate, or RANK_DRAINING if the job drains */
static Rank
rank_job(IdemTable *jobs, const KeyJobs *list, const KeyJob *job, const IdemEnqueue *enqueue)
{
	bool overdue;

	if (job->is_mine)
		return RANK_SUITABLE;
	overdue = is_overdue(list, job, enqueue);
	if (job->is_held_back && (overdue || idem_jobtable_is_marked(job->job_id)))
		return RANK_DRAINING;
	if (overdue)
		return is_kept_by_stream(job) ? RANK_DRAINING : RANK_OVERDUE;
	return job->run_at <= Max(enqueue->now, enqueue->run_at) ? RANK_SUITABLE : RANK_LATE;
}

/*
 * J4: the running job after which a follow-up job has to run, or NULL.  A job that an open
 * transaction is removing goes first: the enqueue waits for that transaction, and if it
 * rolls back, the job waits and absorbs the duplicate.  Else it is the last running job of
 * a chain of follow-up jobs.
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
		if (TransactionIdIsValid(job->changed_by))
			return job;
		if (find_follower(list, KIND_RUNNING, job) == NULL)
			found = job;
	}
	return found;
}

/*
 * Should this job absorb the duplicate rather than the best one of its rank so far?  A
 * follow-up job goes first: it was inserted for later duplicates.  Else the job that is due
 * first; but of overdue or draining jobs the one that is due last, because workers fetch
 * the first one first.
 */
static bool
is_better_job(const KeyJob *job, const KeyJob *best, Rank rank)
{
	if (best == NULL || (job->after_job != 0) != (best->after_job != 0))
		return best == NULL || job->after_job != 0;
	if (rank == RANK_OVERDUE || rank == RANK_DRAINING)
		return job->run_at > best->run_at;
	return job->run_at < best->run_at;
}

/*
 * J1: the waiting job that absorbs the duplicate, or NULL.  *draining: a job that drains,
 * or NULL.
 *
 * If a job drains, workers are expected to fetch soon, so the last overdue job is left to
 * them.  The number of waiting jobs of the key that draining causes is at most the number of
 * transactions that enqueue the key at the same time, plus two.
 *
 * J4: of a chain of follow-up jobs only the last one absorbs, so that the last run gets the
 * newest payload.
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
		Rank rank;

		if (job->kind != KIND_WAITING || find_follower(list, KIND_WAITING, job) != NULL)
			continue;
		rank = rank_job(jobs, list, job, enqueue);
		n[rank]++;
		if (is_better_job(job, best[rank], rank))
			best[rank] = job;
	}
	*draining = best[RANK_DRAINING];
	if (n[RANK_SUITABLE] > 0)
		return best[RANK_SUITABLE];
	if (n[RANK_OVERDUE] > (n[RANK_DRAINING] > 0 ? 1 : 0))
		return best[RANK_OVERDUE];
	return n[RANK_DRAINING] > 0 ? NULL : best[RANK_LATE];
}

/*
 * J4: the transaction that must end before we know whether the waiting job has a follow-up
 * job, or invalid
 */
static TransactionId
find_follower_changer(const KeyJobs *list, const KeyJob *waiting)
{
	const KeyJob *follower = find_follower(list, KIND_OPEN, waiting);

	if (follower == NULL)
		follower = find_follower(list, KIND_RUNNING, waiting);
	return follower != NULL ? follower->changed_by : InvalidTransactionId;
}

/* Does a duplicate replace the payload of the job that absorbs it? */
static bool
brings_payload(const IdemPolicy *policy)
{
	return policy->rerun || policy->on_duplicate == IDEM_ON_DUPLICATE_REPLACE ||
		policy->on_duplicate == IDEM_ON_DUPLICATE_DEBOUNCE;
}

/* Does a duplicate get a new job if the waiting job drains (J1)?  If not, that job answers it. */
static bool
needs_new_job(const IdemPolicy *policy)
{
	return policy->dedup != IDEM_DEDUP_UNTIL_EXPIRED &&
		policy->on_duplicate != IDEM_ON_DUPLICATE_ERROR;
}

/*
 * J4: what keeps the enqueue from inserting a follow-up job of the draining job?  First, an
 * open transaction that is inserting or removing another follow-up job of it.  Second, a
 * cancel of the draining job, if the job before that one is still there: a blocked job is
 * not overdue, so it drains only because a session waits to cancel it.  That cancel would
 * free the new job, which would then run beside the first job of the chain.
 */
static void
check_chain(const KeyJobs *list, const KeyJob *draining, IdemKeyScan *scan)
{
	scan->in_the_way = find_follower_changer(list, draining);
	scan->is_being_cancelled = is_blocked(list, draining);
}

/*
 * What all jobs of the key together mean for the enqueue.  If no job may absorb the
 * duplicate, and an open transaction has inserted one, the enqueue waits for that
 * transaction (J6), unless a draining job already answers the enqueue.
 */
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
		scan->in_the_way = waiting->changed_by;
		if (!TransactionIdIsValid(scan->in_the_way) && brings_payload(policy))
			scan->in_the_way = find_follower_changer(list, waiting);
	}
	else if (open != NULL && (draining == NULL || needs_new_job(policy)))
	{
		scan->found = IDEM_KEY_SCAN_OPEN;
		scan->in_the_way = open->changed_by;
	}
	else if (draining != NULL)
	{
		scan->found = IDEM_KEY_SCAN_DRAINING;
		scan->job_id = draining->job_id;
		if (policy->dedup == IDEM_DEDUP_UNTIL_EXECUTED && needs_new_job(policy))
			check_chain(list, draining, scan);
	}
	else if (spent != NULL)
	{
		scan->found = IDEM_KEY_SCAN_SPENT;
		scan->job_id = spent->job_id;
		scan->tid = spent->tid;
		scan->in_the_way = spent->changed_by;
	}
	else if (running != NULL)
	{
		scan->found = IDEM_KEY_SCAN_RUNNING;
		scan->job_id = running->job_id;
		scan->in_the_way = running->changed_by;
	}
}

/* Scan all jobs of the key; the caller holds the lock on its hash (J2) */
void
idem_keyscan(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed, IdemKeyScan *scan)
{
	KeyJobs list = {0};

	while (!list_jobs(jobs, index, keyed, &list))
		CHECK_FOR_INTERRUPTS();
	sum_up(jobs, &list, keyed->enqueue, scan);
}
