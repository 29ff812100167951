/*
 * touched.c
 *		What the open transaction has touched, and whom its end wakes.
 *
 * The functions of jobs and keys note here which queues, jobs and keys they have changed.
 * The notes are in the memory of the backend.  When the transaction or a subtransaction
 * has ended, other sessions see that, and its locks are released, a callback wakes those who wait
 * (waiters.c).  It must not raise an error, because the transaction has committed: it allocates
 * nothing.
 *
 * PostgreSQL calls the callbacks for the end of a transaction, also of one that is rolled back,
 * before it releases the locks.  A session that was woken then could not get an advisory lock that
 * the last handler of the job has taken.  So those callbacks only note what has ended, and the
 * callback of the resource owners wakes, in the phase after the locks.  A session that exits keeps
 * its own advisory locks until after the rollback; there the callback for its exit wakes.
 *
 * A note stays if its subtransaction rolls back.  Then a session may be woken for nothing.
 * A prepared transaction forgets its notes: sessions that wait look once per second.
 */
#include "postgres.h"

#include "access/xact.h"
#include "storage/ipc.h"
#include "storage/proc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "wake/wake.h"

/* A transaction that touches more queues, jobs or keys than this wakes all waiters */
#define MAX_QUEUES 256
#define MAX_ENDS   65536

/* A queue that this transaction has touched */
typedef struct Touched
{
	uint64 subject;
	int njobs;				 /* new ones that are ready if the transaction commits */
	TimestampTz later;		 /* when the next one becomes ready; or DT_NOEND */
	int nfetched;			 /* fetched without a lease by this transaction, and not ended yet */
	bool leases;			 /* it has leased jobs, too: nfetched may be too high then */
	SubTransactionId holder; /* the last one that has locked or changed jobs; or 0 */
	bool undone;			 /* it was rolled back: nfetched may be too low */
	bool lets_go;			 /* its commit lets go jobs that it has locked */
	bool follows;			 /* it has enqueued a follow-up job (J4) */
	bool ended_key;			 /* it has ended a job with a key, so follow-up jobs may be free */
} Touched;

static Touched queues[MAX_QUEUES];
static int nqueues = 0;
static uint64 *ends = NULL; /* jobs and keys that it has ended; in TopTransactionContext */
static int nends = 0;
static int max_ends = 0;
static bool too_many = false;

/* How the transaction has ended that has not released its locks yet */
static enum {
	XACT_OPEN,
	XACT_COMMITTED,
	XACT_ABORTED
} xact_end = XACT_OPEN;

/* A subtransaction that was rolled back and has not released its locks yet; 0: there is none */
static SubTransactionId ended_subid = InvalidSubTransactionId;

static void wake_at_exit(int code, Datum arg);

static Touched *
add_queue(uint64 subject)
{
	static bool is_registered = false;
	Touched *queue;

	if (!is_registered)
	{
		on_shmem_exit(wake_at_exit, (Datum) 0);
		is_registered = true;
	}
	if (nqueues == MAX_QUEUES)
	{
		too_many = true;
		nqueues--;
	}
	queue = &queues[nqueues++];
	memset(queue, 0, sizeof(*queue));
	queue->subject = subject;
	queue->later = DT_NOEND;
	return queue;
}

static Touched *
get_queue(const text *name)
{
	uint64 subject = idem_waiters_queue(name);

	for (int i = nqueues - 1; i >= 0; i--)
	{
		if (queues[i].subject == subject)
			return &queues[i];
	}
	return add_queue(subject);
}

static void
add_end(uint64 subject)
{
	if (nends == max_ends)
	{
		int size = Max(2 * max_ends, 16);

		if (size > MAX_ENDS)
		{
			too_many = true;
			return;
		}
		ends = max_ends == 0 ?
			MemoryContextAlloc(TopTransactionContext, size * sizeof(uint64)) :
			repalloc(ends, size * sizeof(uint64));
		max_ends = size;
	}
	ends[nends++] = subject;
}

/*
 * A2: if this transaction commits, a job of the queue can be fetched from this time on.  follows:
 * it is a follow-up job, which may be blocked.
 */
void
idem_touched_job(const text *name, TimestampTz due, bool follows)
{
	Touched *queue;

	if (!idem_waiters_are_shared())
		return;
	queue = get_queue(name);
	if (due <= idem_clock_now())
		queue->njobs++;
	else
		queue->later = Min(queue->later, due);
	queue->follows |= follows;
}

/* A4: this transaction has changed a job, which can be fetched from this time on */
void
idem_touched_due(const text *name, TimestampTz due)
{
	Touched *queue;

	if (!idem_waiters_are_shared())
		return;
	queue = get_queue(name);
	queue->later = Min(queue->later, due);
}

/*
 * A2: this transaction has locked a job, or is about to change it; a rollback lets it go.  The
 * caller notes this before it does anything else that may fail.  lets_go: so does the commit,
 * because of an absorbed duplicate, or because the queue goes on.
 */
void
idem_touched_held(const text *name, bool lets_go)
{
	Touched *queue;

	if (!idem_waiters_are_shared())
		return;
	queue = get_queue(name);
	queue->holder = GetCurrentSubTransactionId();
	queue->lets_go |= lets_go;
}

/* A2: this transaction has fetched a job, or renewed its lease; lease 0: it has none */
void
idem_touched_fetched(const text *name, int64 lease, TimestampTz lease_until)
{
	Touched *queue;

	if (!idem_waiters_are_shared())
		return;
	queue = get_queue(name);
	queue->holder = GetCurrentSubTransactionId();
	if (lease == 0)
		queue->nfetched++;
	else
	{
		queue->leases = true;
		queue->later = Min(queue->later, lease_until);
	}
}

/*
 * A2: this transaction has ended or given back a job.  has_key: it has ended, and follow-up
 * jobs may be free now.  was_fetched: this transaction has fetched it without a lease.
 */
void
idem_touched_done(const text *name, bool has_key, bool was_fetched)
{
	Touched *queue;

	if (!idem_waiters_are_shared())
		return;
	queue = get_queue(name);
	queue->holder = GetCurrentSubTransactionId();
	queue->ended_key |= has_key;
	if (was_fetched && !queue->leases)
		queue->nfetched--;
}

/* A5, A6: this transaction has ended a job, or has ended or shortened the lease of a key */
void
idem_touched_end(uint64 subject)
{
	if (idem_waiters_are_shared())
		add_end(subject);
}

/*
 * The commit lets jobs of the queue go.  New jobs are counted.  If it lets others go, too, it
 * wakes only one session, which counts all of them.
 */
static void
wake_for_commit(const Touched *queue)
{
	TimestampTz now;

	if (!idem_waiters_exist(queue->subject))
		return;
	now = idem_clock_now();
	/* before it wakes anyone: the job before may have ended already, without a mark */
	if (queue->follows)
		idem_waiters_note_blocked(queue->subject);
	if (queue->lets_go || queue->later <= now || queue->nfetched > 0 || queue->undone)
		idem_waiters_wake(queue->subject, 1, IDEM_WOKEN_FOR_MORE);
	else if (queue->njobs > 0)
		idem_waiters_wake(queue->subject, queue->njobs, IDEM_WOKEN_FOR_ONE);
	if (queue->later > now && queue->later != DT_NOEND)
		idem_waiters_lower_next_look(queue->subject, idem_clock_steady() + (queue->later - now));
	if (queue->ended_key)
		idem_waiters_wake_blocked(queue->subject);
}

/* A2: the transaction has committed, and other sessions see that */
static void
wake_at_commit(void)
{
	pg_memory_barrier();
	for (int i = 0; i < nqueues; i++)
		wake_for_commit(&queues[i]);
	if (nends > 0 && idem_waiters_wait_for_end())
	{
		for (int i = 0; i < nends; i++)
			idem_waiters_wake(ends[i], IDEM_WAKE_ALL, IDEM_WOKEN_FOR_ONE);
	}
	if (too_many)
		idem_waiters_wake_all();
}

/*
 * A2: the transaction, or this subtransaction of it, was rolled back, and other sessions see
 * that.  Subtransactions that began later were part of it.
 */
static void
wake_at_abort(SubTransactionId subid)
{
	pg_memory_barrier();
	for (int i = 0; i < nqueues; i++)
	{
		if (queues[i].holder < subid)
			continue;
		idem_waiters_wake(queues[i].subject, 1, IDEM_WOKEN_FOR_MORE);
		queues[i].undone = true;
	}
	if (too_many)
		idem_waiters_wake_all();
}

/*
 * The memory of ends goes with the transaction.  A session that exits keeps its queues for
 * wake_at_exit(): what it still commits are only the temporary tables that it drops, and a job of
 * idem_work() that fails while it exits.
 */
static void
forget_all(void)
{
	ends = NULL;
	nends = max_ends = 0;
	xact_end = XACT_OPEN;
	ended_subid = InvalidSubTransactionId;
	if (!proc_exit_inprogress)
	{
		nqueues = 0;
		too_many = false;
	}
}

/*
 * A2: the locks of the transaction, or of the subtransaction, are released.  A commit has sent its
 * invalidation messages, too: a session that is woken before could take a queue for paused.  The
 * first call in this phase is the one for an owner below that of the transaction, if there is one;
 * the phase before is over for all of them.
 */
static void
at_release(ResourceReleasePhase phase, bool is_commit, bool is_top_level, void *arg)
{
	if (phase != RESOURCE_RELEASE_AFTER_LOCKS)
		return;
	if (xact_end != XACT_OPEN && is_top_level)
	{
		Assert(!MyProc->fpVXIDLock);
		if (!proc_exit_inprogress)
		{
			if (xact_end == XACT_COMMITTED)
				wake_at_commit();
			else
				wake_at_abort(TopSubTransactionId);
		}
		forget_all();
	}
	else if (ended_subid != InvalidSubTransactionId && !is_commit && !is_top_level)
	{
		if (!proc_exit_inprogress)
			wake_at_abort(ended_subid);
		ended_subid = InvalidSubTransactionId;
	}
}

/*
 * A2: the session exits.  If a transaction was open, it was rolled back, and all locks are
 * released, also the advisory locks that the session held beyond its transactions.
 */
static void
wake_at_exit(int code, Datum arg)
{
	wake_at_abort(TopSubTransactionId);
}

static void
at_xact_event(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			xact_end = XACT_COMMITTED;
			break;
		case XACT_EVENT_ABORT:
			xact_end = XACT_ABORTED;
			break;
		case XACT_EVENT_PREPARE:
			forget_all();
			break;
		default:
			break;
	}
}

static void
at_subxact_event(SubXactEvent event, SubTransactionId subid, SubTransactionId parent_subid,
				 void *arg)
{
	/* after an error in its rollback it may be part of the next one */
	if (event == SUBXACT_EVENT_ABORT_SUB &&
		(ended_subid == InvalidSubTransactionId || subid < ended_subid))
		ended_subid = subid;
}

void
idem_touched_init(void)
{
	RegisterXactCallback(at_xact_event, NULL);
	RegisterResourceReleaseCallback(at_release, NULL);
	RegisterSubXactCallback(at_subxact_event, NULL);
}
