/*
 * xact.c
 *		What idem does when a transaction or a subtransaction ends, in a written order.
 *
 * Several files keep something for the open transaction.  PostgreSQL calls callbacks in the
 * reverse order of their registration, so idem has one callback for each kind of event, which calls
 * these files in a written order.  The callbacks are registered when the library is loaded.  That
 * may be in the middle of a transaction, or of a subtransaction: by its first function.
 *
 *   event              what is called, in this order           may raise an error
 *   PRE_COMMIT         check what is not finished, write links yes: the transaction rolls back
 *   PRE_PREPARE        check what is not finished              yes
 *   COMMIT             end_transaction()                       no: the transaction has committed
 *   PREPARE            end_transaction()                       no
 *   ABORT              end_transaction()                       no: it would be rolled back again
 *   PARALLEL_...       the same as in the leader; a parallel worker writes nothing, so its
 *                      PRE_COMMIT has nothing to do
 *   START_SUB, PRE_COMMIT_SUB                                  nothing
 *   COMMIT_SUB         pass on what belongs to the parent now  no
 *   ABORT_SUB          drop what the subtransaction has done   no
 *   after the locks    wake those who wait                     no
 *
 * The locks are released last: at COMMIT and ABORT the transaction still holds them, and a session
 * that was woken then would meet them (doc/waking-protocol.md).
 *
 * Files that only a few transactions need ask for it with idem_fn_at_end.
 *
 * Functions that may not raise an error allocate no memory and look nothing up.
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/resowner.h"

#include "cleanup/cleanup.h"
#include "fn/fn.h"
#include "jobs/fetch/fetch.h"
#include "jobs/hold/hold.h"
#include "jobs/row/job.h"
#include "schedules/schedules.h"
#include "stats/stats.h"
#include "table/table.h"
#include "wake/wake.h"

/*
 * The transaction or a subtransaction has touched what others may wait for, and its locks go next
 */
static bool may_wake = false;

/* The transaction has ended, but holds its locks */
static void
end_transaction(bool is_commit, bool is_prepare)
{
	bool is_abort = !is_commit && !is_prepare;

	may_wake |= idem_queueref_used != NULL || (idem_fn_at_end & IDEM_AT_END_WAKE);

	/*
	 * an error may have left tables open, and the server releases the pages that they have pinned
	 */
	if (is_abort)
		idem_table_forget_open();
	/* the rows that idem_cleanup() has removed are back, or may come back */
	if (!is_commit)
		idem_sweep_forget_cursors();
	/* while its entry is pinned: the fetch that has failed is the walker of a queue in its entry */
	if (idem_fn_at_end & IDEM_AT_END_WALK)
		idem_fetchstore_forget();
	/*
	 * count what was pending, and unpin the entries: nothing is counted and no entry used after
	 * this
	 */
	idem_counters_end_transaction(!is_abort);
	/* a prepared transaction wakes no session: those that wait look once per second */
	if (may_wake)
		idem_touched_end_transaction(is_commit, is_abort);
	/* other sessions see its ticks: tell the launcher */
	if (idem_fn_at_end & IDEM_AT_END_TICK)
		idem_schedulestore_end_transaction(is_commit);
	/* backend memory: a prepared transaction writes no links */
	idem_unfinished_forget();
	if (idem_fn_at_end & IDEM_AT_END_LINKS)
		idem_headers_forget_links();
	if (idem_fn_at_end & IDEM_AT_END_JOB)
		idem_work_forget_job();
	idem_fn_at_end = 0;
}

static void
at_xact_event(XactEvent event, void *arg)
{
	/* most sessions of a server that preloads the library do not use it */
	if (!idem_fn_is_used)
		return;
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			/* first: the links are locked only for as long as the commit lasts (J16) */
			idem_unfinished_check();
			if (idem_fn_at_end & IDEM_AT_END_LINKS)
				idem_headers_write_links();
			break;
		case XACT_EVENT_PRE_PREPARE:
			idem_unfinished_check();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PARALLEL_COMMIT:
			end_transaction(true, false);
			break;
		case XACT_EVENT_PREPARE:
			end_transaction(false, true);
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PARALLEL_ABORT:
			end_transaction(false, false);
			break;
		case XACT_EVENT_PARALLEL_PRE_COMMIT:
			break;
	}
}

static void
at_subxact_event(SubXactEvent event, SubTransactionId subid, SubTransactionId parent, void *arg)
{
	if (!idem_fn_is_used || (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB))
		return;
	if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		/* as end_transaction() does.  Entries stay pinned: the transaction may use them again. */
		idem_table_forget_open();
		idem_sweep_forget_cursors();
		if (idem_fn_at_end & IDEM_AT_END_WALK)
			idem_fetchstore_forget();
		idem_counters_abort_sub(subid);
		idem_touched_abort_sub(subid);
		may_wake = true;
	}
	idem_unfinished_end_sub(subid, parent, event == SUBXACT_EVENT_COMMIT_SUB);
	if (idem_fn_at_end & IDEM_AT_END_LINKS)
		idem_headers_end_sub(subid, parent, event == SUBXACT_EVENT_COMMIT_SUB);
}

/*
 * The locks of a transaction or subtransaction are released.  A commit has sent its invalidation
 * messages, too: a session that is woken before could take a queue for paused.
 */
static void
at_release(ResourceReleasePhase phase, bool is_commit, bool is_top_level, void *arg)
{
	if (phase != RESOURCE_RELEASE_AFTER_LOCKS || !may_wake)
		return;
	idem_touched_wake(is_commit, is_top_level);
	if (is_top_level)
		may_wake = false;
}

/* The library is loaded */
void
idem_xact_init(void)
{
	RegisterXactCallback(at_xact_event, NULL);
	RegisterSubXactCallback(at_subxact_event, NULL);
	RegisterResourceReleaseCallback(at_release, NULL);
}
