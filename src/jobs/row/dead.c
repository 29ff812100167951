/*
 * dead.c
 *		Make a job dead: move it from idem.jobs to the history.
 *
 * idem_fail() makes a job dead on the last attempt or on request.  A job is spent if the
 * lease of its last attempt has expired.  Fetch, enqueue and cleanup make a spent job dead
 * when they find it.  The caller has locked the job, and an error of its transaction undoes
 * the move.
 */
#include "postgres.h"

#include "utils/builtins.h"

#include "jobs/row/job.h"

/*
 * Make the job dead; this transaction has locked it.  If in_the_way is NULL, wait for
 * a transaction that is changing an older row of its number in the history.  Else do not
 * wait: return false and that transaction in *in_the_way (see idem_joblog_write()).
 */
bool
idem_dead_make(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue, text *error,
			   TransactionId *in_the_way)
{
	Jsonb *errors = idem_errors_add(idem_row_jsonb(idem_job_row(job), IDEM_JOBS_ERRORS), job->attempt, error);

	if (!idem_joblog_move(jobs, job, queue, "dead", errors, in_the_way))
		return false;
	idem_counters_add_queue(idem_queueref_get(queue->name), IDEM_QUEUE_COUNTER_DEAD);
	return true;
}

/*
 * Make the job dead if it is spent (J2).  This transaction has locked it, and its lease,
 * if it has one, has expired.  A job without a lease waits for its retry and keeps it, even
 * if max_attempts was lowered since.
 *
 * J13: never waits for a transaction that is changing an older row of the job's number in the
 * history, but skips the job.  If in_the_way is NULL, a warning is raised; else
 * *in_the_way is that transaction.
 */
IdemDeadOutcome
idem_dead_make_if_spent(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue,
						TransactionId *in_the_way)
{
	TransactionId changer;

	if (!job->is_leased || !idem_job_has_no_attempts_left(job, queue))
		return IDEM_DEAD_NOT_SPENT;
	/* A2: if the job is skipped, the commit lets it go, too */
	idem_touched_held(idem_queueref_get(queue->name), true);
	if (idem_dead_make(jobs, job, queue, cstring_to_text("The lease of the last attempt ran out."),
					   &changer))
		return IDEM_DEAD_MADE;
	if (in_the_way != NULL)
		*in_the_way = changer;
	else
		idem_joblog_warn_skipped(job->job_id);
	return IDEM_DEAD_SKIPPED;
}
