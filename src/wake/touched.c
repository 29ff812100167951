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
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "fn/fn.h"
#include "wake/wake.h"

/* A transaction that touches more queues, jobs or keys than this wakes all waiters */
#define MAX_QUEUES 256
#define MAX_ENDS   65536

static int nqueues = 0;
static uint64 *ends = NULL; /* jobs and keys that it has ended; in TopTransactionContext */
static int nends = 0;
static int max_ends = 0;
static bool too_many = false;

/* How the transaction has ended that has not released its locks yet */
static enum {
	XACT_OPEN,
	XACT_COMMITTED,
	XACT_PREPARED,
	XACT_ABORTED
} xact_end = XACT_OPEN;

/* A subtransaction that was rolled back and has not released its locks yet; 0: there is none */
static SubTransactionId ended_subid = InvalidSubTransactionId;

/*
 * A2: the transaction, or this subtransaction of it, was rolled back, and other sessions see
 * that.  Subtransactions that began later were part of it.
 */
static void
wake_at_abort(SubTransactionId subid)
{
	pg_memory_barrier();
	for (IdemQueueRef *queue = idem_queueref_used; queue != NULL; queue = queue->next)
	{
		if (!queue->is_touched || queue->touched.holder < subid)
			continue;
		idem_waiters_wake(queue->subject, 1, IDEM_WOKEN_FOR_MORE);
		queue->touched.undone = true;
	}
	if (too_many)
		idem_waiters_wake_all();
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

/* What the transaction has done with the queue */
static IdemTouched *
get_touched(IdemQueueRef *queue)
{
	static bool is_registered = false;
	static IdemTouched beyond;

	if (likely(queue->is_touched))
		return &queue->touched;
	/* without shared memory no session can be woken */
	if (!idem_entries_exist())
		return &beyond;
	if (!is_registered)
	{
		on_shmem_exit(wake_at_exit, (Datum) 0);
		is_registered = true;
	}
	/* a handle without a name stands for several queues */
	if (nqueues == MAX_QUEUES || queue->name == NULL)
	{
		too_many = true;
		return &beyond;
	}
	nqueues++;
	idem_queueref_use(queue);
	queue->is_touched = true;
	memset(&queue->touched, 0, sizeof(queue->touched));
	queue->touched.later = DT_NOEND;
	return &queue->touched;
}

/*
 * A2: if this transaction commits, a job of the queue can be fetched from this time on.  follows:
 * it is a follow-up job, which may be blocked.
 */
void
idem_touched_job(IdemQueueRef *queue, TimestampTz due, bool follows)
{
	IdemTouched *touched = get_touched(queue);

	if (due <= idem_clock_now())
		touched->njobs++;
	else
		touched->later = Min(touched->later, due);
	touched->follows |= follows;
}

/* A4: this transaction has changed a job, which can be fetched from this time on */
void
idem_touched_due(IdemQueueRef *queue, TimestampTz due)
{
	IdemTouched *touched = get_touched(queue);

	touched->later = Min(touched->later, due);
}

/*
 * A2: this transaction has locked a job, or is about to change it; a rollback lets it go.  The
 * caller notes this before it does anything else that may fail.  lets_go: so does the commit,
 * because of an absorbed duplicate, or because the queue goes on.
 */
void
idem_touched_held(IdemQueueRef *queue, bool lets_go)
{
	IdemTouched *touched = get_touched(queue);

	touched->holder = GetCurrentSubTransactionId();
	touched->lets_go |= lets_go;
}

/* A2: this transaction has fetched a job, or renewed its lease; lease 0: it has none */
void
idem_touched_fetched(IdemQueueRef *queue, int64 lease, TimestampTz lease_until)
{
	IdemTouched *touched = get_touched(queue);

	touched->holder = GetCurrentSubTransactionId();
	if (lease == 0)
		touched->nfetched++;
	else
	{
		touched->leases = true;
		touched->later = Min(touched->later, lease_until);
	}
}

/*
 * A2: this transaction has ended or given back a job.  has_key: it has ended, and follow-up
 * jobs may be free now.  was_fetched: this transaction has fetched it without a lease.
 */
void
idem_touched_done(IdemQueueRef *queue, bool has_key, bool was_fetched)
{
	IdemTouched *touched = get_touched(queue);

	touched->holder = GetCurrentSubTransactionId();
	touched->ended_key |= has_key;
	if (was_fetched && !touched->leases)
		touched->nfetched--;
}

/* A5, A6: this transaction has ended a job, or has ended or shortened the lease of a key */
void
idem_touched_end(uint64 subject)
{
	if (!idem_entries_exist())
		return;
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
	idem_fn_at_end |= IDEM_AT_END_WAKE;
}

/* A2: the transaction has committed, and other sessions see that */
static void
wake_at_commit(void)
{
	pg_memory_barrier();
	for (IdemQueueRef *queue = idem_queueref_used; queue != NULL; queue = queue->next)
	{
		const IdemTouched *touched = &queue->touched;
		TimestampTz now;
		bool has_later;

		if (!queue->is_touched || !idem_waiters_exist(queue->subject))
			continue;
		now = idem_clock_now();
		has_later = touched->later > now && touched->later != DT_NOEND;
		/* before it wakes anyone: the job before may have ended already, without a mark */
		if (touched->follows || has_later)
			idem_waiters_tell_looker(queue->subject,
									 has_later ? idem_clock_steady() + (touched->later - now) :
												 PG_INT64_MAX,
									 touched->follows);
		/* New jobs are counted.  If others are let go, too, one session counts all of them. */
		if (touched->lets_go || touched->later <= now || touched->nfetched > 0 || touched->undone)
			idem_waiters_wake(queue->subject, 1, IDEM_WOKEN_FOR_MORE);
		else if (touched->njobs > 0)
			idem_waiters_wake(queue->subject, touched->njobs, IDEM_WOKEN_FOR_ONE);
		if (touched->ended_key)
			idem_waiters_wake_blocked(queue->subject);
	}
	if (nends > 0 && idem_waiters_wait_for_end())
	{
		for (int i = 0; i < nends; i++)
			idem_waiters_wake(ends[i], IDEM_WAKE_ALL, IDEM_WOKEN_FOR_ONE);
	}
	if (too_many)
		idem_waiters_wake_all();
}

/*
 * A2: the locks of the transaction, or of the subtransaction, are released.  The first call after
 * that is the one for a resource owner below that of the transaction, if there is one; the locks
 * of all of them are released by then.  Never throws.
 */
void
idem_touched_wake(bool is_commit, bool is_top_level)
{
	if (xact_end != XACT_OPEN && is_top_level)
	{
		Assert(!MyProc->fpVXIDLock);
		if (!proc_exit_inprogress && xact_end == XACT_COMMITTED)
			wake_at_commit();
		else if (!proc_exit_inprogress && xact_end == XACT_ABORTED)
			wake_at_abort(TopSubTransactionId);
		/* their memory goes with the transaction */
		ends = NULL;
		nends = max_ends = 0;
		xact_end = XACT_OPEN;
		ended_subid = InvalidSubTransactionId;
		/*
		 * A session that exits keeps its queues for wake_at_exit(): what it still commits are only
		 * the temporary tables that it drops, and a job of idem_work() that fails while it exits.
		 */
		if (!proc_exit_inprogress)
		{
			idem_queueref_forget_all();
			nqueues = 0;
			too_many = false;
		}
	}
	else if (ended_subid != InvalidSubTransactionId && !is_commit && !is_top_level)
	{
		if (!proc_exit_inprogress)
			wake_at_abort(ended_subid);
		ended_subid = InvalidSubTransactionId;
	}
}

/* The transaction has ended: its end wakes those who wait when it has released its locks */
void
idem_touched_end_transaction(bool is_commit, bool is_abort)
{
	xact_end = is_commit ? XACT_COMMITTED : is_abort ? XACT_ABORTED :
													   XACT_PREPARED;
}

/*
 * A subtransaction was rolled back; after an error in its rollback it may be part of the next one
 */
void
idem_touched_abort_sub(SubTransactionId subid)
{
	if (ended_subid == InvalidSubTransactionId || subid < ended_subid)
		ended_subid = subid;
}
