/*
 * dead.c
 *		Make a job dead: it leaves idem.jobs and goes to the history.
 *
 * A job is spent if the lease of its last attempt has run out.  Fetch, enqueue
 * and cleanup make such a job dead when they meet it.
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

/*
 * Give up the job found, which this transaction has locked.  False: another
 * transaction is at an older row of this number in the history (see
 * idem_joblog_write()).
 */
bool
idem_dead_make(IdemTable *jobs, const IdemQueue *queue, text *error, TransactionId *in_the_way)
{
	if (!idem_joblog_write(jobs, "dead", queue->keep_dead, NULL, error, in_the_way))
		return false;
	if (idem_write_delete(jobs, true) != TM_Ok)
		elog(ERROR, "a job locked by this transaction was changed by another one");
	idem_counters_add_queue(queue->name, IDEM_QUEUE_COUNTER_DEAD);
	return true;
}

/*
 * If the lease of the job found, which is locked and has run out, was that of the
 * last attempt: give it up.  One that waits for its retry has been granted it,
 * whatever the queue says now.  Waits for nobody: a caller that does not ask who
 * is in the way passes over the job, and a warning says so (J13).
 */
IdemDeadOutcome
idem_dead_make_if_spent(IdemTable *jobs, const IdemQueue *queue, TransactionId *in_the_way)
{
	TransactionId other;

	if (!idem_jobrow_is_leased(jobs) || !idem_jobrow_has_no_attempts_left(jobs, queue))
		return IDEM_DEAD_NOT_SPENT;
	if (idem_dead_make(jobs, queue, cstring_to_text("The lease of the last attempt ran out."), &other))
		return IDEM_DEAD_MADE;
	if (in_the_way != NULL)
		*in_the_way = other;
	else
		idem_joblog_warn_skipped(idem_row_int64(jobs, IDEM_JOBS_JOB_ID));
	return IDEM_DEAD_SKIPPED;
}
