/*
 * enqueuestore.c
 *		The protocol of enqueue: what the jobs of the key mean, and what becomes of the duplicate.
 *
 * The jobs of a key are found through an index on a hash of queue and key, which is not
 * unique.  A short lock on the hash keeps two transactions from inserting a job of the same
 * key: an enqueue scans the jobs of the key and inserts a job under this lock.  An update that
 * moves a job in the index holds it, too (idem_jobrow_store()), so the scan misses no job.
 *
 * A waiting job absorbs a duplicate by a row lock: the transaction of the duplicate holds the
 * job FOR KEY SHARE until it ends, and fetch skips the jobs that it cannot lock FOR UPDATE.  The
 * lock is taken under the one on the hash, so that no update of the job is in progress:
 * heap_update() may release the page in between and then writes back the row locks that it
 * saw before; a lock taken meanwhile would be lost.
 *
 * An enqueue waits for open transactions, but never for a running job to end, and without the
 * lock on the hash.  The enqueue of a tick raises an error instead (T6).
 * doc/jobs-protocol.md says for which transactions it waits, when a job drains, that is, absorbs
 * no more duplicates, and what becomes of a job that will not run again.
 *
 * An error rolls back the inserts and updates and releases all these locks, like any
 * error of the transaction.
 */
#include "postgres.h"

#include "access/heaptoast.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/enqueue/enqueue.h"

/* A job with a smaller payload, headers included, needs no TOAST table, whatever its key */
#define LARGE_PAYLOAD 512

StaticAssertDecl(LARGE_PAYLOAD + IDEM_MAX_KEY_LEN + IDEM_MAX_QUEUE_LEN + 128 <
					 TOAST_TUPLE_THRESHOLD,
				 "the row of a job without a large payload is not toasted");

/* Publish the places of so many ended jobs of a key, and only if so many are new (J14) */
#define MANY_ENDED 32

/* How long duplicates may keep a due job from starting, in microseconds */
#define DRAIN_AFTER (idem_guc_drain_after * INT64CONST(1000))

/*
 * What a job of the key means for this enqueue.  If the key has jobs of several kinds, the
 * first of these kinds in this order decides (for one exception see scan_key()).
 */
typedef enum Kind
{
	KIND_NONE,	   /* there is no job */
	KIND_DONE,	   /* until_expired: one is done, and its ttl has not passed (J5) */
	KIND_WAITING,  /* no worker has it */
	KIND_OPEN,	   /* another open transaction has inserted it */
	KIND_DRAINING, /* it waits, and must start before it absorbs again */
	KIND_SPENT,	   /* the lease of its last attempt has expired: it will not run again */
	KIND_RUNNING,  /* a worker has fetched it, or an open transaction is removing it */
	KIND_N
} Kind;

/* What an enqueue does */
typedef enum Action
{
	DO_INSERT, /* insert a new job */
	DO_FOLLOW, /* insert a job that follows the one that decides (J4) */
	DO_ABSORB, /* let the waiting job, which is locked FOR KEY SHARE, absorb the duplicate */
	DO_ANSWER, /* let the job absorb the duplicate without a lock */
	DO_DONE,   /* answer with the result of the job that is done */
	DO_REFUSE, /* raise the error of a duplicate */
	DO_BURY,   /* make the job dead, and look again (J2) */
	DO_WAIT	   /* wait for another transaction, and look again (J6) */
} Action;

/* if_running => 'rerun', as a further strategy beside those of IdemDedup */
#define UNTIL_EXECUTED_RERUN (IDEM_DEDUP_UNTIL_EXPIRED + 1)

/*
 * The decision: what an enqueue does, by on_duplicate => 'error' or not, by strategy, and by
 * the kind that decides.  If a transaction is in the way, everything but the insertion of a
 * new job first waits for it (J6).
 *
 * J1: a waiting job absorbs; what becomes of it then, absorbed_outcomes says.  For a draining
 * job there is a new one, with until_executed as its follow-up; until_expired promises one run
 * per ttl, so the draining job answers.
 * J2: a spent job would absorb nothing.  until_executing counts it as running.
 * J3: until_executing enqueues a new job beside one that runs, also with error.
 * J4: until_executed relies on the job that runs, or with rerun on one more run after it.
 * J5: until_expired relies on any job until its ttl has passed.
 */
/* clang-format off */
static const Action decisions[2][UNTIL_EXECUTED_RERUN + 1][KIND_N] = {
	/* on_duplicate => 'skip', 'replace' or 'debounce' */
	{
		/*                              none       done       waiting    open     draining   spent      running */
		[IDEM_DEDUP_UNTIL_EXECUTING] = {DO_INSERT, DO_INSERT, DO_ABSORB, DO_WAIT, DO_INSERT, DO_INSERT, DO_INSERT},
		[IDEM_DEDUP_UNTIL_EXECUTED]  = {DO_INSERT, DO_INSERT, DO_ABSORB, DO_WAIT, DO_FOLLOW, DO_BURY,   DO_ANSWER},
		[UNTIL_EXECUTED_RERUN]       = {DO_INSERT, DO_INSERT, DO_ABSORB, DO_WAIT, DO_FOLLOW, DO_BURY,   DO_FOLLOW},
		[IDEM_DEDUP_UNTIL_EXPIRED]   = {DO_INSERT, DO_DONE,   DO_ABSORB, DO_WAIT, DO_ANSWER, DO_BURY,   DO_ANSWER},
	},
	/* on_duplicate => 'error' */
	{
		[IDEM_DEDUP_UNTIL_EXECUTING] = {DO_INSERT, DO_INSERT, DO_REFUSE, DO_WAIT, DO_REFUSE, DO_INSERT, DO_INSERT},
		[IDEM_DEDUP_UNTIL_EXECUTED]  = {DO_INSERT, DO_INSERT, DO_REFUSE, DO_WAIT, DO_REFUSE, DO_BURY,   DO_REFUSE},
		[UNTIL_EXECUTED_RERUN]       = {DO_INSERT, DO_INSERT, DO_REFUSE, DO_WAIT, DO_REFUSE, DO_BURY,   DO_REFUSE},
		[IDEM_DEDUP_UNTIL_EXPIRED]   = {DO_INSERT, DO_REFUSE, DO_REFUSE, DO_WAIT, DO_REFUSE, DO_BURY,   DO_REFUSE},
	}};
/* clang-format on */

/*
 * J1: what becomes of the duplicate that a waiting job absorbs.  The job gets the payload of a
 * duplicate that is not merely absorbed.
 */
static const IdemOutcome absorbed_outcomes[] = {
	[IDEM_ON_DUPLICATE_SKIP] = IDEM_OUTCOME_ABSORBED,
	[IDEM_ON_DUPLICATE_REPLACE] = IDEM_OUTCOME_REPLACED,
	[IDEM_ON_DUPLICATE_DEBOUNCE] = IDEM_OUTCOME_POSTPONED,
	[IDEM_ON_DUPLICATE_ERROR] = IDEM_OUTCOME_ABSORBED};

/* A small set of job numbers */
typedef struct IdSet
{
	int n;
	int64 *ids;
} IdSet;

/* The enqueue of one job with a key */
typedef struct KeyedEnqueue
{
	IdemTable *jobs;
	Relation index;	 /* on the hash */
	IdemTable *keys; /* idem.job_keys for until_expired, else NULL */
	const IdemEnqueue *enqueue;
	IdemNewJob *job;
	const Action *actions; /* by the kind that decides: a line of decisions */
	IdemSameHash *others;  /* keys with the same hash, seen by the last scan */
	/* jobs that looked waiting, but another transaction held them; cleared after each wait */
	IdSet unlockable;
	bool log_is_locked; /* idem.job_log is locked, so this enqueue can make a job dead */
} KeyedEnqueue;

/* A job of the key */
typedef struct KeyJob
{
	Kind kind; /* waiting, open, spent or running */
	IdemJob job;
	TransactionId changed_by;				/* open transaction that does, or invalid */
	bool is_mine;							/* this transaction keeps it from starting */
	bool is_held_back;						/* others do: it absorbed their duplicates */
	bool is_blocked;						/* its predecessor is still there */
	const struct KeyJob *followers[KIND_N]; /* its first follow-up job of each kind, or NULL */
} KeyJob;

/* The jobs of the key that matter for this enqueue */
typedef struct KeyJobs
{
	int n;
	KeyJob *jobs;
} KeyJobs;

/* Result of scanning all jobs of a key */
typedef struct KeyScan
{
	Kind found;				  /* the kind that decides */
	IdemJob job;			  /* that decides; of one that is done, only the number */
	Jsonb *done_result;		  /* of a job that is done; may be NULL */
	TransactionId in_the_way; /* transaction that must end before we can decide, or invalid */
	bool is_being_cancelled;  /* a session waits to cancel the draining job: wait for the cancel */
} KeyScan;

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
static struct
{
	int64 job_id; /* 0: none */
	int64 began;
	int64 last;
} absorb_stream;

/*
 * A walk over the jobs of the key, past those that have ended.  Index entries of jobs that have
 * ended stay until VACUUM, and longer while a transaction holds an old snapshot.  A walk that
 * has passed many of them publishes their places, and later walks jump over these (J14): skips.c.
 */
typedef struct KeyWalk
{
	IdemLeafWalk *leaf;
	IdemSkips *skips;  /* NULL: the places are not shared, so none are used */
	int64 began;	   /* by the steady clock */
	IdemKeySkip known; /* what earlier enqueues have passed; may be empty */
	IdemKeySkip run;   /* since the last row that has not ended */
	IdemKeySkip most;
} KeyWalk;

/* The walk has passed entries of ended jobs: those of a skip */
static void
add_ended(KeyWalk *walk, const IdemKeySkip *ended)
{
	IdemKeySkip *run = &walk->run;

	if (run->n == 0)
	{
		run->first = ended->first;
		run->looked_at = ended->looked_at;
	}
	run->last = ended->last;
	run->n += Min(ended->n, PG_INT32_MAX - run->n);
	run->looked_at = Min(run->looked_at, ended->looked_at);
	if (run->n > walk->most.n)
		walk->most = *run;
}

/* Go to the next row version that is not ended; false: there is none */
static bool
next_row(KeyWalk *walk)
{
	IdemLeafWalk *leaf = walk->leaf;
	ItemPointer place = &leaf->entry.tuple.t_tid;

	while (leaf->again || idem_leaf_next(leaf))
	{
		bool is_first = !leaf->again; /* of the row versions that the entry points to */

		if (is_first && walk->known.n > 0 && idem_skips_key_contains(&walk->known, place))
		{
			add_ended(walk, &walk->known);
			idem_leaf_skip(leaf, &walk->known.last);
		}
		else if (idem_leaf_fetch(leaf))
		{
			walk->run.n = 0;
			return true;
		}
		/* a rollback may bring back what this transaction has ended */
		else if (walk->skips == NULL || (is_first && idem_row_is_changed_by_me(leaf->table, place)))
			walk->run.n = 0;
		else if (is_first)
			add_ended(walk,
					  &(IdemKeySkip){.first = *place,
									 .last = *place,
									 .n = 1,
									 .looked_at = walk->began});
	}
	return false;
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

/* Returns false if the set already has the number */
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

/*
 * Add a job to the list, if it matters for this enqueue.  With until_expired a job matters until
 * its key_until has passed (J5).  A job without key_until, enqueued with another strategy,
 * matters only while it waits.
 */
static void
note_job(KeyJobs *list, const KeyedEnqueue *keyed, const IdemJob *job, Kind kind,
		 TransactionId changed_by)
{
	const IdemEnqueue *enqueue = keyed->enqueue;
	KeyJob *noted;

	if (!idem_jobrow_has_key(idem_job_row(job), IDEM_JOBS_QUEUE, enqueue->queue.name,
							 keyed->job->key, keyed->others))
		return;
	if (enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED)
	{
		TimestampTz key_until = idem_row_timestamp(idem_job_row(job), IDEM_JOBS_KEY_UNTIL);

		if (key_until == 0 ? kind != KIND_OPEN && kind != KIND_WAITING : key_until <= enqueue->now)
			return;
	}
	list->jobs = list->jobs == NULL ? palloc(sizeof(KeyJob)) :
									  repalloc_array(list->jobs, KeyJob, list->n + 1);
	noted = &list->jobs[list->n++];
	*noted = (KeyJob){.kind = kind, .job = *job, .changed_by = changed_by};
	if (kind == KIND_WAITING)
	{
		IdemLockers lockers;

		/* one that has locked the job FOR UPDATE does not hold it back: it starts or removes it */
		idem_row_lockers(idem_job_row(job), &lockers);
		noted->is_mine = lockers.mine || idem_job_is_mine(job);
		noted->is_held_back = TransactionIdIsValid(lockers.shared);
	}
}

/*
 * Record what a job, committed or written by this transaction, means for the enqueue.  A job
 * with a lease counts as running, also after the lease has expired (J3).  So does a job that an
 * open transaction is removing, and one that looked waiting but could not be locked.  A job
 * whose last lease has expired is spent, if the enqueue asks (J2).
 */
static void
note_committed(KeyJobs *list, const KeyedEnqueue *keyed, const IdemJob *job, TransactionId xmax)
{
	bool expired = job->is_leased && job->lease_until <= keyed->enqueue->now;
	/*
	 * Check t_ctid before the proc array: after xmax has ended, another transaction may
	 * merely lock the row.
	 */
	bool removed = TransactionIdIsValid(xmax) && idem_row_is_last_version(idem_job_row(job)) &&
		TransactionIdIsInProgress(xmax);
	Kind kind = KIND_WAITING;

	if (expired && keyed->actions[KIND_SPENT] == DO_BURY && !idem_job_is_mine(job) &&
		idem_job_has_no_attempts_left(job, &keyed->enqueue->queue))
		kind = KIND_SPENT;
	else if (job->is_leased || removed || has_id(&keyed->unlockable, job->job_id))
	{
		kind = KIND_RUNNING;
		/* with a live lease the job counts as running until it is gone: do not wait */
		if (!removed || (job->is_leased && !expired))
			xmax = InvalidTransactionId;
	}
	note_job(list, keyed, job, kind, xmax);
}

/*
 * List the jobs of the key.  Returns false if the walk must be repeated, in two cases.  It
 * saw only the new version of a job, which an open transaction has written, and missed
 * the committed version.  Or the new version shows that the open transaction has fetched
 * the job: the next walk counts the job as running.
 */
static bool
list_jobs(KeyedEnqueue *keyed, KeyJobs *list)
{
	IdemTable *jobs = keyed->jobs;
	IdemQueueRef *queue = keyed->enqueue->queue.ref;
	IdemLookup lookup = idem_jobtable_by_key(jobs, keyed->index, keyed->job->key_hash);
	IdemKeySkip none = {.key_hash = keyed->job->key_hash,
						.storage = jobs->heap->rd_rel->relfilenode};
	IdemLeafWalk leaf;
	KeyWalk walk = {.leaf = &leaf, .began = idem_clock_steady(), .run = none, .most = none};
	IdemKeySkip *known = &walk.known;
	IdSet seen = {0};
	IdSet changing = {0};
	bool settled = true;
	SnapshotData dirty;

	list->n = 0;
	keyed->others->n = 0;
	if (idem_queueref_pin(queue))
	{
		walk.skips = queue->entry.skips;
		(void) idem_skips_key_get(walk.skips, none.key_hash, none.storage, walk.began, known);
	}
	InitDirtySnapshot(dirty);
	idem_probe_walk(&leaf, jobs, &lookup, &dirty);
	while (next_row(&walk))
	{
		IdemJob job;

		CHECK_FOR_INTERRUPTS();
		idem_job_read(&job, leaf.row);
		/* a job that an open transaction has updated has two versions: expect both */
		if (!TransactionIdIsValid(dirty.xmin))
		{
			if (TransactionIdIsValid(dirty.xmax))
				add_id(&seen, job.job_id);
			note_committed(list, keyed, &job, dirty.xmax);
		}
		else if (!idem_row_is_later_version(job.row))
		{
			add_id(&seen, job.job_id);
			note_job(list, keyed, &job, KIND_OPEN, dirty.xmin);
		}
		else
		{
			add_id(&changing, job.job_id);
			if (job.is_leased && add_id(&keyed->unlockable, job.job_id))
				settled = false;
		}
	}
	idem_leaf_end(&leaf);
	ExecClearTuple(idem_table_row(jobs));

	/* J14: publish the places of many ended jobs */
	if (walk.most.n >= known->n + MANY_ENDED)
	{
		int64 cost = known->cost + Max(idem_clock_steady() - walk.began, 0);

		walk.most.cost = Min(cost, PG_INT32_MAX);
		idem_skips_key_publish(walk.skips, &walk.most, walk.began);
	}
	for (int i = 0; i < changing.n; i++)
		settled = settled && has_id(&seen, changing.ids[i]);
	return settled;
}

/*
 * J4: the transaction that must end before we know whether the job has a follow-up job, or
 * invalid
 */
static TransactionId
get_follower_changer(const KeyJob *job)
{
	const KeyJob *open = job->followers[KIND_OPEN];
	const KeyJob *follower = open != NULL ? open : job->followers[KIND_RUNNING];

	return follower != NULL ? follower->changed_by : InvalidTransactionId;
}

/* J1: how well a waiting job suits the duplicate, or RANK_DRAINING if the job drains */
static Rank
rank_job(const KeyJob *job, const IdemEnqueue *enqueue)
{
	bool overdue;

	if (job->is_mine)
		return RANK_SUITABLE;
	/*
	 * Could a worker have started the job for longer than idem.drain_after?  No worker could
	 * if the queue is paused or the job before it is still there.
	 */
	overdue = !enqueue->queue.paused &&
		idem_clock_now() - idem_job_due_since(&job->job) >= DRAIN_AFTER && !job->is_blocked;
	if (job->is_held_back && (overdue || idem_jobtable_is_marked(job->job.job_id)))
		return RANK_DRAINING;
	if (!overdue)
		return job->job.run_at <= Max(enqueue->now, enqueue->run_at) ? RANK_SUITABLE : RANK_LATE;
	/*
	 * Have earlier transactions of this backend, one after another, kept the job from starting
	 * for too long?  A worker that polls rarely hits the moment between two of them.
	 */
	if (absorb_stream.job_id == job->job.job_id &&
		idem_clock_steady() - absorb_stream.last < DRAIN_AFTER &&
		absorb_stream.last - absorb_stream.began >= DRAIN_AFTER)
		return RANK_DRAINING;
	return RANK_OVERDUE;
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
choose_waiting(const KeyJobs *list, const IdemEnqueue *enqueue, const KeyJob **draining)
{
	const KeyJob *best[RANK_N] = {NULL};
	int n[RANK_N] = {0};

	for (int i = 0; i < list->n; i++)
	{
		const KeyJob *job = &list->jobs[i];
		Rank rank;

		if (job->kind != KIND_WAITING || job->followers[KIND_WAITING] != NULL)
			continue;
		rank = rank_job(job, enqueue);
		n[rank]++;
		/*
		 * Of one rank a follow-up job goes first: it was inserted for later duplicates.  Else the
		 * job that is due first; but of overdue or draining jobs the one that is due last, because
		 * workers fetch the first one first.
		 */
		if (best[rank] == NULL)
			best[rank] = job;
		else if ((job->job.after_job != 0) != (best[rank]->job.after_job != 0))
			best[rank] = job->job.after_job != 0 ? job : best[rank];
		else if (rank == RANK_OVERDUE || rank == RANK_DRAINING ?
					 job->job.run_at > best[rank]->job.run_at :
					 job->job.run_at < best[rank]->job.run_at)
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
 * J5, until_expired: is a job of this key done, and has the key not expired?  An uncommitted
 * row of idem.job_keys does not matter: its job is still in idem.jobs, and the scan has
 * seen it.
 */
static bool
find_done(const KeyedEnqueue *keyed, KeyScan *scan)
{
	IdemTable *keys = keyed->keys;
	IdemLookup lookup;
	SnapshotData dirty;
	IdemLeafWalk walk;
	bool found = false;

	if (keys == NULL)
		return false;
	InitDirtySnapshot(dirty);
	lookup = idem_jobtable_by_key(keys, keys->pkey, keyed->job->key_hash);
	idem_probe_walk(&walk, keys, &lookup, &dirty);
	while (!found && idem_leaf_next_row(&walk))
		found = !TransactionIdIsValid(dirty.xmin) &&
			idem_row_timestamp(walk.row, IDEM_JOB_KEYS_EXPIRES_AT) > keyed->enqueue->now &&
			idem_jobrow_has_key(walk.row, IDEM_JOB_KEYS_QUEUE, keyed->enqueue->queue.name,
								keyed->job->key, keyed->others);
	if (found)
	{
		scan->job.job_id = idem_row_int64(walk.row, IDEM_JOB_KEYS_JOB_ID);
		scan->done_result = idem_row_jsonb(walk.row, IDEM_JOB_KEYS_RESULT);
	}
	idem_leaf_end(&walk);
	return found;
}

/* The scan has found this job, which decides */
static void
set_found(KeyScan *scan, Kind kind, const KeyJob *job)
{
	scan->found = kind;
	scan->job = job->job;
	scan->in_the_way = job->changed_by;
}

/*
 * What all jobs of the key together mean for the enqueue (J1, J4, J6).  The caller holds the lock
 * on the hash of the key.  The scan waits for no transaction and writes nothing.
 */
static void
scan_key(KeyedEnqueue *keyed, KeyScan *scan)
{
	const IdemEnqueue *enqueue = keyed->enqueue;
	KeyJobs list = {0};
	const KeyJob *waiting;
	const KeyJob *draining;
	const KeyJob *open = NULL;
	const KeyJob *spent = NULL;
	const KeyJob *running = NULL;

	memset(scan, 0, sizeof(*scan));
	while (!list_jobs(keyed, &list))
		CHECK_FOR_INTERRUPTS();
	for (int i = 0; i < list.n; i++)
	{
		KeyJob *follower = &list.jobs[i];

		for (int j = 0; j < list.n && follower->job.after_job != 0; j++)
		{
			KeyJob *job = &list.jobs[j];

			if (job->job.job_id != follower->job.after_job)
				continue;
			follower->is_blocked = true;
			if (job->followers[follower->kind] == NULL)
				job->followers[follower->kind] = follower;
		}
	}
	waiting = choose_waiting(&list, enqueue, &draining);
	for (int i = 0; i < list.n; i++)
	{
		const KeyJob *job = &list.jobs[i];

		if (job->kind == KIND_OPEN)
			open = job;
		else if (job->kind == KIND_SPENT)
			spent = job;
		/*
		 * J4: of the running jobs, one that an open transaction is removing goes first: the
		 * enqueue waits for that transaction, and if it rolls back, the job waits and absorbs
		 * the duplicate.  Else a follow-up job has to run after the last job of a chain.
		 */
		else if (job->kind == KIND_RUNNING &&
				 (running == NULL || !TransactionIdIsValid(running->changed_by)) &&
				 (TransactionIdIsValid(job->changed_by) ||
				  job->followers[KIND_RUNNING] == NULL))
			running = job;
	}

	if (waiting != NULL)
	{
		set_found(scan, KIND_WAITING, waiting);
		/* J4: the last run gets the newest payload, so it must be clear which one is the last */
		if (!TransactionIdIsValid(scan->in_the_way) &&
			(enqueue->policy.rerun ||
			 absorbed_outcomes[enqueue->policy.on_duplicate] != IDEM_OUTCOME_ABSORBED))
			scan->in_the_way = get_follower_changer(waiting);
	}
	/* J6; but a draining job that gets no new job beside it answers at once */
	else if (open != NULL &&
			 (draining == NULL || keyed->actions[KIND_DRAINING] == DO_INSERT ||
			  keyed->actions[KIND_DRAINING] == DO_FOLLOW))
		set_found(scan, KIND_OPEN, open);
	else if (draining != NULL)
	{
		set_found(scan, KIND_DRAINING, draining);
		scan->in_the_way = InvalidTransactionId;
		/*
		 * J4: two things keep the enqueue from inserting a follow-up job.  First, an open
		 * transaction that is inserting or removing another one.  Second, a cancel of the
		 * draining job, if the job before that one is still there: a blocked job is not overdue,
		 * so it drains only because a session waits to cancel it.  That cancel would free the
		 * new job, which would then run beside the first job of the chain.
		 */
		if (keyed->actions[KIND_DRAINING] == DO_FOLLOW)
		{
			scan->in_the_way = get_follower_changer(draining);
			scan->is_being_cancelled = draining->is_blocked;
		}
	}
	else if (spent != NULL)
		set_found(scan, KIND_SPENT, spent);
	else if (running != NULL)
		set_found(scan, KIND_RUNNING, running);
	else if (find_done(keyed, scan))
		scan->found = KIND_DONE;
}

/*
 * The action, by the table of decisions and by what is in the way.  J3: a new job beside one
 * that runs does not depend on what others do to that job.
 */
static Action
choose_action(const KeyedEnqueue *keyed, const KeyScan *scan)
{
	Action action = keyed->actions[scan->found];

	if (action != DO_INSERT &&
		(TransactionIdIsValid(scan->in_the_way) || scan->is_being_cancelled))
		return DO_WAIT;
	return action;
}

/*
 * Does the job hold its key, and what is its hash?  A scheduled job ignores its key unless
 * include_scheduled is set (J8).
 */
void
idem_enqueuestore_set_key(const IdemEnqueue *enqueue, IdemNewJob *job)
{
	if (job->key == NULL)
		return;
	job->holds_key = !enqueue->later || enqueue->policy.include_scheduled;
	job->key_hash = idem_hash_name(enqueue->queue.name, job->key);
}

/*
 * Form the row of a new job.  A job that holds its key has with until_expired the end of the
 * ttl (J5).  after_job: the job that it follows, or 0.
 */
TupleTableSlot *
idem_enqueuestore_form_row(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
						   int64 after_job)
{
	TupleTableSlot *slot = idem_table_new_row(jobs);

	idem_row_set(slot, IDEM_JOBS_JOB_ID, Int64GetDatum(job->job_id));
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(enqueue->run_at));
	idem_row_set(slot, IDEM_JOBS_ENQUEUED_AT, TimestampTzGetDatum(enqueue->now));
	idem_row_set(slot, IDEM_JOBS_PRIORITY, Int32GetDatum(enqueue->priority));
	idem_row_set(slot, IDEM_JOBS_QUEUE, PointerGetDatum(enqueue->queue.name));
	if (job->key != NULL)
		idem_jobrow_set_key(slot, job->key, job->key_hash, job->holds_key);
	if (!job->payload.isnull)
		idem_row_set(slot, IDEM_JOBS_PAYLOAD, job->payload.value);
	if (job->headers != NULL)
		idem_row_set(slot, IDEM_JOBS_HEADERS, JsonbPGetDatum(job->headers));
	if (enqueue->max_attempts != 0)
		idem_row_set(slot, IDEM_JOBS_MAX_ATTEMPTS, Int32GetDatum(enqueue->max_attempts));
	if (job->holds_key && enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED)
		idem_row_set(slot, IDEM_JOBS_KEY_UNTIL,
					 TimestampTzGetDatum(enqueue->now + enqueue->policy.key_ttl));
	if (after_job != 0)
		idem_row_set(slot, IDEM_JOBS_AFTER_JOB, Int64GetDatum(after_job));
	return slot;
}

/* Insert a new job.  after_job: the job that it follows, or 0. */
static void
insert_job(IdemTable *jobs, const IdemEnqueue *enqueue, IdemNewJob *job, int64 after_job)
{
	TupleTableSlot *row;

	if (job->job_id == 0)
		job->job_id = idem_jobtable_next_id(job->slot);
	row = idem_enqueuestore_form_row(jobs, enqueue, job, after_job);
	if (!idem_table_insert(jobs, row))
		idem_jobtable_refuse_number();
	if (job->holds_key)
		idem_jobrow_note_place(enqueue->queue.ref, job->key_hash, &row->tts_tid);
	job->answer.job_id = job->job_id;
	job->answer.outcome = after_job != 0 ? IDEM_OUTCOME_RERUN : IDEM_OUTCOME_ENQUEUED;
	idem_jobrow_note_ready(enqueue->queue.ref,
						   &(IdemPosition){.priority = enqueue->priority,
										   .run_at = enqueue->run_at,
										   .job_id = job->job_id},
						   enqueue->run_at, after_job != 0);
}

/*
 * The part of an enqueue that needs the lock on the hash of the key, which is released at once
 * (J9): scan the jobs of the key, lock the waiting one or make the spent one dead (J2), and insert
 * a job if the decision is to do so.  The steps are those of doc/jobs-protocol.md.  Returns the
 * decision; the caller does what is left to do.
 */
static Action
scan_or_insert(KeyedEnqueue *keyed, KeyScan *scan)
{
	IdemTable *jobs = keyed->jobs;
	const IdemQueue *queue = &keyed->enqueue->queue;
	IdemNewJob *job = keyed->job;
	TupleTableSlot *row = idem_table_row(jobs);
	TM_Result result;
	Action action;
	bool settled;

	idem_table_lock_hash(jobs, job->key_hash);
	do
	{
		CHECK_FOR_INTERRUPTS();
		settled = true;
		/* step 1: all jobs of the key; none comes or moves while this transaction has the lock */
		scan_key(keyed, scan);
		action = choose_action(keyed, scan);
		/*
		 * Step 2: lock the waiting job, so that no worker can fetch it before this transaction
		 * ends.  Only the lock shows whether it really waits: if another transaction holds it, the
		 * job runs there, or is being removed.  If it was changed meanwhile, scan again.
		 */
		if (scan->found == KIND_WAITING && action != DO_WAIT)
		{
			result = idem_table_lock_row(jobs, scan->job.tid, LockTupleKeyShare, LockWaitSkip, row);
			settled = result == TM_Ok;
			if (result == TM_WouldBlock)
				(void) add_id(&keyed->unlockable, scan->job.job_id);
			if (settled)
			{
				idem_job_read(&scan->job, row);
				/* a row of this transaction was noted when it was written */
				if (!idem_job_is_mine(&scan->job))
					idem_touched_held(queue->ref, true);
			}
		}
		/*
		 * Step 5: make the job dead, and scan again as if it were gone.  If another transaction has
		 * locked the job, or an older row of its number in the history (J13), that one is in the
		 * way, unless it has just ended.
		 */
		else if (action == DO_BURY && keyed->log_is_locked)
		{
			result =
				idem_table_lock_row(jobs, scan->job.tid, LockTupleExclusive, LockWaitSkip, row);
			settled = result == TM_WouldBlock;
			if (result == TM_WouldBlock)
				scan->in_the_way = idem_row_locker(row);
			else if (result == TM_Ok)
			{
				idem_job_read(&scan->job, row);
				idem_touched_held(queue->ref, true);
				settled = idem_history_make_dead_if_spent(jobs, &scan->job, queue,
														  &scan->in_the_way) == IDEM_DEAD_SKIPPED;
			}
			action = choose_action(keyed, scan);
		}
	} while (!settled);
	/* steps 4, 6 and 7: no job absorbs the duplicate, so a new one is needed */
	if (action == DO_INSERT || action == DO_FOLLOW)
		insert_job(jobs, keyed->enqueue, job, action == DO_FOLLOW ? scan->job.job_id : 0);
	idem_table_unlock_hash(jobs, job->key_hash);
	return action;
}

/*
 * What the duplicate changes in the waiting job that absorbs it (J1, J4, J8): form the new
 * version of its row, or return NULL if nothing changes (J12).
 */
static TupleTableSlot *
change_waiting(const KeyedEnqueue *keyed, const IdemJob *job, IdemOutcome *outcome)
{
	const IdemEnqueue *enqueue = keyed->enqueue;
	const NullableDatum *payload = &keyed->job->payload;
	TimestampTz run_at = job->run_at;
	int priority = job->priority;
	TupleTableSlot *row;

	*outcome = absorbed_outcomes[enqueue->policy.on_duplicate];
	if (enqueue->policy.rerun && idem_jobrow_waits_for_other(keyed->jobs, job))
		*outcome = IDEM_OUTCOME_RERUN;
	if (*outcome == IDEM_OUTCOME_POSTPONED)
	{
		TimestampTz latest = job->enqueued_at + enqueue->queue.debounce_max;

		run_at = Max(run_at, Min(enqueue->run_at, latest));
	}
	/*
	 * An earlier time and a more urgent priority count, as long as no worker has fetched the job.
	 * Moving a job that is already due would write a row for nothing.
	 */
	else if (job->token == 0 && run_at > enqueue->now)
		run_at = Min(run_at, enqueue->run_at);
	if (job->token == 0)
		priority = Min(priority, enqueue->priority);
	if (*outcome == IDEM_OUTCOME_ABSORBED && run_at == job->run_at && priority == job->priority)
		return NULL;

	row = idem_table_copy_row(keyed->jobs, idem_job_row(job));
	idem_row_set(row, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(run_at));
	idem_row_set(row, IDEM_JOBS_PRIORITY, Int32GetDatum(priority));
	if (*outcome != IDEM_OUTCOME_ABSORBED)
	{
		row->tts_values[IDEM_JOBS_PAYLOAD - 1] = payload->value;
		row->tts_isnull[IDEM_JOBS_PAYLOAD - 1] = payload->isnull;
	}
	return row;
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
absorb_waiting(const KeyedEnqueue *keyed, IdemJob *job)
{
	IdemTable *jobs = keyed->jobs;
	IdemEnqueued *answer = &keyed->job->answer;
	int64 now;

	answer->job_id = job->job_id;
	if (change_waiting(keyed, job, &answer->outcome) != NULL)
	{
		/* no worker can fetch the job now, but another enqueue may be changing it: wait for that */
		TupleTableSlot *row = idem_table_row(jobs);
		TM_Result result =
			idem_table_lock_row(jobs, job->tid, LockTupleNoKeyExclusive,
								keyed->enqueue->nowait ? LockWaitSkip : LockWaitBlock, row);

		if (result == TM_WouldBlock)
			check_may_wait(keyed->enqueue);
		if (result != TM_Ok)
			return false;
		/* decide again: the answer may have changed during the wait */
		idem_job_read(job, row);
		row = change_waiting(keyed, job, &answer->outcome);
		if (row != NULL)
			idem_jobrow_store(jobs, job, row, keyed->enqueue->queue.ref, IDEM_CHANGE_ABSORBED);
	}
	/* remember that the job has absorbed duplicates of this backend */
	now = idem_clock_steady();
	if (absorb_stream.job_id != job->job_id || now - absorb_stream.last >= DRAIN_AFTER)
		absorb_stream.began = now;
	absorb_stream.job_id = job->job_id;
	absorb_stream.last = now;
	idem_headers_note_link(job->job_id, keyed->job->headers);
	return true;
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

/* The line of the table of decisions for this policy */
static const Action *
get_actions(const IdemPolicy *policy)
{
	bool refuses = policy->on_duplicate == IDEM_ON_DUPLICATE_ERROR;

	if (policy->dedup == IDEM_DEDUP_UNTIL_EXECUTED && policy->rerun)
		return decisions[refuses][UNTIL_EXECUTED_RERUN];
	return decisions[refuses][policy->dedup];
}

/*
 * Enqueue a job that holds its key.  Each pass of the loop scans the key, and then answers,
 * raises the error for a duplicate (J1), waits for the transaction in the way (J6), or prepares
 * the next scan.
 */
static void
enqueue_keyed(IdemTable *jobs, const IdemEnqueue *enqueue, IdemNewJob *job)
{
	KeyedEnqueue keyed;
	IdemEnqueued *answer = &job->answer;
	IdemSameHash others;
	IdemTable keys;
	IdemTable log;
	KeyScan scan;
	bool answered = false;
	bool until_expired = enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED;

	/* acquire every lock that may block before the lock on the hash */
	idem_jobtable_lock_ids();
	idem_enqueuestore_lock_toast(jobs, job);
	if (until_expired)
		idem_jobtable_open_keys(&keys, AccessShareLock);
	keyed = (KeyedEnqueue){
		.jobs = jobs,
		.index = idem_jobtable_index(jobs, IDEM_INDEX_KEY),
		.keys = until_expired ? &keys : NULL,
		.enqueue = enqueue,
		.job = job,
		.actions = get_actions(&enqueue->policy),
		.others = &others};
	while (!answered)
	{
		CHECK_FOR_INTERRUPTS();
		switch (scan_or_insert(&keyed, &scan))
		{
			case DO_INSERT:
			case DO_FOLLOW:
				answered = true;
				break;
			case DO_ABSORB:
				answered = absorb_waiting(&keyed, &scan.job);
				keyed.unlockable.n = 0;
				break;
			case DO_ANSWER:
				*answer = (IdemEnqueued){scan.job.job_id, IDEM_OUTCOME_ABSORBED, NULL};
				answered = true;
				break;
			case DO_DONE:
				*answer = (IdemEnqueued){scan.job.job_id, IDEM_OUTCOME_DONE, scan.done_result};
				answered = true;
				break;
			case DO_REFUSE:
				idem_counters_add_queue(enqueue->queue.ref, IDEM_QUEUE_COUNTER_REFUSED);
				idem_counters_log_duplicate("enqueue", "refused", enqueue->queue.name, job->key);
				ereport(ERROR, errcode(ERRCODE_IDEM_DUPLICATE_JOB), errmsg("duplicate job"),
						errdetail("Job " INT64_FORMAT " has this key and %s.", scan.job.job_id,
								  scan.found == KIND_DONE		 ? "is done" :
									  scan.found == KIND_RUNNING ? "runs" :
																   "waits"),
						errhint("Pass %s to let the job absorb its duplicates.",
								"on_duplicate => 'skip'"));
				break;
			case DO_BURY:
				if (keyed.log_is_locked)
					break;
				/*
				 * Lock the history, its indexes and its TOAST table until the transaction ends, so
				 * that no enqueue waits for them while it holds the lock on the hash.
				 */
				idem_jobtable_open_log(&log, RowExclusiveLock);
				idem_table_open_indexes(&log);
				idem_table_lock_toast(&log);
				idem_table_close(&log);
				keyed.log_is_locked = true;
				break;
			case DO_WAIT:
				check_may_wait(enqueue);
				if (TransactionIdIsValid(scan.in_the_way))
					idem_probe_wait(jobs, scan.in_the_way);
				else
					idem_jobtable_wait_for_mark(scan.job.job_id);
				keyed.unlockable.n = 0;
				break;
		}
	}
	if (until_expired)
		idem_table_close(&keys);
}

/*
 * Has the key neither a job that matters nor, with until_expired, a done one?  The caller
 * holds the lock on the hash.  index: the one on the hash; keys: idem.job_keys for
 * until_expired, else NULL.
 */
bool
idem_enqueuestore_is_absent(IdemTable *jobs, Relation index, IdemTable *keys,
							const IdemEnqueue *enqueue, IdemNewJob *job)
{
	IdemSameHash others;
	KeyedEnqueue keyed = {
		.jobs = jobs,
		.index = index,
		.keys = keys,
		.enqueue = enqueue,
		.job = job,
		.actions = get_actions(&enqueue->policy),
		.others = &others};
	KeyScan scan;

	scan_key(&keyed, &scan);
	return scan.found == KIND_NONE;
}

const char *const idem_enqueuestore_outcome_names[] = {
	[IDEM_OUTCOME_ENQUEUED] = "enqueued",
	[IDEM_OUTCOME_ABSORBED] = "absorbed",
	[IDEM_OUTCOME_REPLACED] = "replaced",
	[IDEM_OUTCOME_POSTPONED] = "postponed",
	[IDEM_OUTCOME_RERUN] = "rerun",
	[IDEM_OUTCOME_DONE] = "done"};

StaticAssertDecl((int) IDEM_QUEUE_COUNTER_ENQUEUED == (int) IDEM_OUTCOME_ENQUEUED &&
					 (int) IDEM_QUEUE_COUNTER_DONE == (int) IDEM_OUTCOME_DONE,
				 "the counter of an outcome has the number of the outcome");

/*
 * Enqueue a job, or let the job that absorbs it answer; the answer is in job->answer.  M2: a
 * key of another shard raises an error; that of a job with a number was checked when it got
 * the number.
 */
void
idem_enqueuestore_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, IdemNewJob *job)
{
	const text *queue = enqueue->queue.name;

	if (job->job_id == 0)
		job->slot = idem_shard_choose_slot(enqueue->scope, job->key);
	idem_enqueuestore_set_key(enqueue, job);
	if (job->holds_key)
		enqueue_keyed(jobs, enqueue, job);
	else
		insert_job(jobs, enqueue, job, 0);
	idem_counters_add_queue(enqueue->queue.ref, (IdemQueueCounter) job->answer.outcome);
	if (job->answer.outcome != IDEM_OUTCOME_ENQUEUED)
		idem_counters_log_duplicate("enqueue", idem_enqueuestore_outcome_names[job->answer.outcome],
									queue, job->key);
}
