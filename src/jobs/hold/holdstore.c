/*
 * holdstore.c
 *		Complete, fail, snooze and heartbeat a job that a worker has fetched.
 *
 * The token of the caller is compared with the token in the row version that is
 * then updated or deleted.  If another transaction has changed the row in
 * between, the row is looked up and compared again (J11).  The time does not
 * matter: a worker with the last token has the job, even after the lease has
 * expired, until another worker fetches the job or it is made dead.
 *
 * All of these wait for a transaction that is changing the job, as long as
 * lock_timeout allows.  An older token is refused without waiting, because it
 * can never become the last one again.
 */
#include "postgres.h"

#include "common/pg_prng.h"
#include "utils/timestamp.h"

#include "jobs/hold/hold.h"

/* J11: was the job fetched with this token, and is that its last one?  NULL: there is no job. */
IdemHold
idem_holdstore_judge(const IdemJob *job, int64 token)
{
	if (job != NULL && job->token == 0)
		return IDEM_HOLD_NONE;
	if (job != NULL && job->is_leased && job->token == token)
		return IDEM_HOLD_OK;
	idem_counters_add(IDEM_DATABASE_COUNTER_STALE_TOKENS);
	return IDEM_HOLD_STALE;
}

static IdemHold
find_held(IdemTable *jobs, int64 job_id, int64 token, IdemJob *job, IdemQueue *queue)
{
	return idem_holdstore_judge(idem_jobrow_find(jobs, job_id, job, queue) ? job : NULL, token);
}

/*
 * Find a job that was fetched with this token, and lock it.  If another
 * transaction has changed the row meanwhile, the token is compared again (J11).
 */
static IdemHold
lock_held(IdemTable *jobs, int64 job_id, int64 token, IdemJob *job, IdemQueue *queue)
{
	IdemHold hold;

	do
	{
		hold = find_held(jobs, job_id, token, job, queue);
	} while (hold == IDEM_HOLD_OK &&
			 idem_table_lock_row(jobs, job->tid, LockTupleNoKeyExclusive, LockWaitBlock,
								 job->row) != TM_Ok);
	if (hold == IDEM_HOLD_OK)
		idem_touched_held(queue->ref, false);
	return hold;
}

/* Raise the error for a job that the caller does not hold: ID003 for an old token (J11) */
void
idem_holdstore_refuse(IdemHold hold, int64 job_id)
{
	if (hold == IDEM_HOLD_NONE)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("job is not held by the caller"),
				errdetail("Job " INT64_FORMAT " waits; no worker has fetched it.", job_id),
				errhint("Fetch the job with idem_fetch(), and pass the token that it has returned."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_STALE_TOKEN),
			errmsg("stale fencing token"),
			errdetail("Job " INT64_FORMAT " was fetched again, was given back, or has ended.", job_id),
			errhint("Stop this work, and roll back what belongs to it. idem_job() shows what became of the job."));
}

/*
 * S1, S5: an attempt has ended.  run_time: the caller counts it; NULL: count it here, as one that
 * the worker has ended.
 */
static void
count_end(IdemQueueRef *ref, IdemQueueCounter counter, TimestampTz from, TimestampTz to,
		  IdemRunTime *run_time)
{
	if (run_time != NULL)
		*run_time = (IdemRunTime){.from = from, .to = to};
	else
		idem_counters_add_queue_time(ref, counter, IDEM_HISTOGRAM_RUN, from, to);
}

/*
 * End the job as done.  queue is a cache for calls with many jobs: the settings
 * of the last queue; at first its name is NULL.  run_time: see count_end().
 */
IdemHold
idem_holdstore_complete(IdemTable *jobs, int64 job_id, int64 token, Jsonb *result, IdemQueue *queue,
						IdemRunTime *run_time)
{
	IdemJob job;
	IdemHold hold;
	IdemEnd end = {.state = "done", .result = result};

	do
	{
		hold = find_held(jobs, job_id, token, &job, queue);
		if (hold != IDEM_HOLD_OK)
			return hold;
		idem_touched_held(queue->ref, false);
	} while (idem_table_delete(jobs, job.row, true) != TM_Ok);
	end.at = idem_clock_now();
	(void) idem_history_write(&job, queue, &end, NULL);
	idem_history_keep_key(&job, &end);
	idem_jobrow_note_end(jobs, &job, queue->ref);
	count_end(queue->ref, IDEM_QUEUE_COUNTER_COMPLETED, idem_job_started_at(&job), end.at,
			  run_time);
	return hold;
}

/*
 * Give back the job, which is locked: it waits until run_at.  The new token
 * ends the token of the worker that had the job (J11).
 */
static void
give_back(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue, TupleTableSlot *new,
		  TimestampTz now, TimestampTz run_at)
{
	idem_row_set(new, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(run_at));
	idem_row_set(new, IDEM_JOBS_TOKEN, Int64GetDatum(idem_clock_next_token(job->token, now)));
	idem_row_clear(new, IDEM_JOBS_LEASED_AT);
	idem_row_clear(new, IDEM_JOBS_LEASE_UNTIL);
	idem_row_clear(new, IDEM_JOBS_WORKER);
	idem_jobrow_store(jobs, job, new, queue->ref, IDEM_CHANGE_GIVEN_BACK);
}

/*
 * Delay before the next attempt.  It doubles with each attempt, up to a maximum.
 * It varies at random by up to a quarter, so that jobs that failed together are
 * not retried together.
 */
static int64
compute_retry_delay(const IdemQueue *queue, int attempt)
{
	int64 delay = queue->backoff;

	for (int i = 1; i < attempt && delay < queue->backoff_max; i++)
		delay *= 2;
	delay = Min(delay, queue->backoff_max);
	return delay * (0.75 + 0.5 * pg_prng_double(&pg_global_prng_state));
}

/*
 * The attempt of the job, which this transaction has locked, has failed: give the job back
 * for a retry, or make it dead.  False: with nowait, another transaction is changing an older row
 * of its number in the history, and the job stays as it is (J13).  run_time: see count_end().
 */
bool
idem_holdstore_fail_found(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue,
						  const IdemFailure *failure, bool *is_dead, IdemRunTime *run_time)
{
	TimestampTz now = idem_clock_now();
	TransactionId in_the_way;

	*is_dead = failure->dead || idem_job_has_no_attempts_left(job, queue);
	if (!*is_dead)
	{
		int64 delay =
			failure->retry_in >= 0 ? failure->retry_in : compute_retry_delay(queue, job->attempt);
		TupleTableSlot *row = idem_job_row(job);
		TupleTableSlot *new = idem_table_copy_row(jobs, row);

		idem_row_set(new, IDEM_JOBS_ERRORS,
					 JsonbPGetDatum(idem_history_add_error(idem_row_jsonb(row, IDEM_JOBS_ERRORS),
														   job->attempt, failure->error)));
		give_back(jobs, job, queue, new, now, now + delay);
	}
	else if (!idem_history_make_dead(jobs, job, queue, failure->error,
									 failure->nowait ? &in_the_way : NULL))
		return false;
	count_end(queue->ref, IDEM_QUEUE_COUNTER_FAILED, idem_job_started_at(job), now, run_time);
	return true;
}

/* Give the job back for a retry, or make it dead; run_time: see count_end() */
IdemHold
idem_holdstore_fail(IdemTable *jobs, int64 job_id, int64 token, const IdemFailure *failure,
					bool *is_dead, IdemRunTime *run_time)
{
	IdemQueue queue = {0};
	IdemJob job;
	IdemHold hold = lock_held(jobs, job_id, token, &job, &queue);

	if (hold == IDEM_HOLD_OK)
		(void) idem_holdstore_fail_found(jobs, &job, &queue, failure, is_dead, run_time);
	return hold;
}

/*
 * Give back the job, which this transaction has locked, until the delay has passed; the
 * attempt does not count.  Returns when the job is due.  run_time: see count_end().
 */
TimestampTz
idem_holdstore_snooze_found(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue,
							int64 delay, IdemRunTime *run_time)
{
	TupleTableSlot *new = idem_table_copy_row(jobs, idem_job_row(job));
	TimestampTz now = idem_clock_now();

	idem_row_set(new, IDEM_JOBS_ATTEMPT, Int32GetDatum(job->attempt - 1));
	give_back(jobs, job, queue, new, now, now + delay);
	count_end(queue->ref, IDEM_QUEUE_COUNTER_SNOOZED, idem_job_started_at(job), now, run_time);
	return now + delay;
}

/* Give the job back until the delay has passed */
IdemHold
idem_holdstore_snooze(IdemTable *jobs, int64 job_id, int64 token, int64 delay, TimestampTz *run_at)
{
	IdemQueue queue = {0};
	IdemJob job;
	IdemHold hold = lock_held(jobs, job_id, token, &job, &queue);

	if (hold == IDEM_HOLD_OK)
		*run_at = idem_holdstore_snooze_found(jobs, &job, &queue, delay, NULL);
	return hold;
}

/*
 * J17: length of the lease of the job, which is renewed.  lease -1: that of its last lease,
 * as with a checkpoint of a key (L5), else as the queue declares.
 */
static int64
choose_lease(const IdemJob *job, const IdemQueue *queue, int64 lease)
{
	if (lease < 0)
		lease = job->leased_at != 0 ? job->lease_until - job->leased_at : 0;
	if (lease <= 0)
		lease = queue->lease;
	if (lease == 0)
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", "lease"),
				errdetail("The job was fetched without a lease, by a transaction that has committed, and the queue does not declare a lease, either."),
				errhint("Pass the longest time that the work can still take, such as '90 s', or fetch with a lease."));
	return lease;
}

/*
 * Write the new row of the job with a lease that begins now; returns its end.  0: this transaction
 * has fetched the job without a lease, and holds it until it ends, so there is nothing to renew,
 * unless a length is passed.
 */
static TimestampTz
renew_lease(IdemTable *jobs, const IdemJob *job, TupleTableSlot *new, const IdemQueue *queue,
			int64 lease)
{
	TimestampTz now = idem_clock_now();
	TimestampTz until;

	if (lease < 0 && idem_job_was_fetched_here(job))
		return 0;
	until = now + choose_lease(job, queue, lease);
	idem_row_set(new, IDEM_JOBS_LEASED_AT, TimestampTzGetDatum(now));
	idem_row_set(new, IDEM_JOBS_LEASE_UNTIL, TimestampTzGetDatum(until));
	idem_jobrow_store(jobs, job, new, queue->ref,
					  until < job->lease_until ? IDEM_CHANGE_READY : IDEM_CHANGE_LEASED);
	idem_touched_fetched(queue->ref, until - now, until);
	idem_jobrow_note_unfetched(job);
	return until;
}

/* Renew the lease of the job.  *lease_until is 0 if there is nothing to renew. */
IdemHold
idem_holdstore_heartbeat(IdemTable *jobs, int64 job_id, int64 token, int64 lease, IdemQueue *queue,
						 TimestampTz *lease_until)
{
	IdemJob job;
	IdemHold hold = lock_held(jobs, job_id, token, &job, queue);

	if (hold == IDEM_HOLD_OK)
		*lease_until = renew_lease(jobs, &job, idem_table_copy_row(jobs, job.row), queue, lease);
	return hold;
}

/* J17: store a recovery point, and renew the lease, if there is one, as heartbeat does */
IdemHold
idem_holdstore_progress(IdemTable *jobs, int64 job_id, int64 token, Jsonb *data, int64 lease,
						TimestampTz *lease_until)
{
	IdemQueue queue = {0};
	IdemJob job;
	IdemHold hold = lock_held(jobs, job_id, token, &job, &queue);
	TupleTableSlot *slot;

	if (hold != IDEM_HOLD_OK)
		return hold;
	slot = idem_table_copy_row(jobs, job.row);
	idem_row_set(slot, IDEM_JOBS_PROGRESS, JsonbPGetDatum(data));
	*lease_until = renew_lease(jobs, &job, slot, &queue, lease);
	if (*lease_until == 0)
		idem_jobrow_store(jobs, &job, slot, queue.ref, IDEM_CHANGE_LEASED);
	return hold;
}
