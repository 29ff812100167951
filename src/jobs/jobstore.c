/*
 * jobstore.c
 *		What becomes of a job: complete, fail, snooze, heartbeat, cancel, retry.
 *
 * The token is compared with the one in the row, on the row version that is
 * then changed or removed: if somebody else has changed it meanwhile, it is
 * looked up and compared again.  The time proves nothing: who has the last
 * token has the job, also after the lease ran out, until somebody fetches it
 * again.
 *
 * Who waits for whom: all of these wait for a transaction that is changing the
 * job, as long as lock_timeout allows.  A token that is not the last one is
 * refused at once; it will never be the last one again.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/xact.h"
#include "common/pg_prng.h"
#include "executor/executor.h"
#include "mb/pg_wchar.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

/* Of a longer table cleanup searches this much at a time: 64 MB */
#define MAX_PAGES_TO_SEARCH 8192

/* Settings of the queue that the row names, if they are not at hand already */
static void
use_queue_of(IdemTable *table, AttrNumber attno, IdemQueue *queue)
{
	MemoryContext oldcontext;

	if (queue->name != NULL && idem_row_varlena_equals(table, attno, queue->name))
		return;
	oldcontext = MemoryContextSwitchTo(table->context);
	idem_queuestore_use(idem_row_text(table, attno), queue);
	MemoryContextSwitchTo(oldcontext);
}

/* Find a job by its number; false if there is none */
static bool
find_job(IdemTable *jobs, int64 job_id, IdemQueue *queue)
{
	IdemLookup lookup = idem_jobtable_by_id(jobs, job_id);
	IdemProbe probe;

	idem_probe_existing(jobs, &lookup, &probe);
	if (probe.found != IDEM_FOUND_ROW)
		return false;
	use_queue_of(jobs, IDEM_JOBS_QUEUE, queue);
	return true;
}

/* Find a job that was fetched under this token */
static IdemHold
find_held(IdemTable *jobs, int64 job_id, int64 token, IdemQueue *queue)
{
	bool exists = find_job(jobs, job_id, queue);

	if (exists && idem_row_isnull(jobs, IDEM_JOBS_TOKEN))
		return IDEM_HOLD_NONE;
	if (exists && idem_jobrow_is_leased(jobs) && idem_row_int64(jobs, IDEM_JOBS_TOKEN) == token)
		return IDEM_HOLD_OK;
	idem_stats_count(IDEM_STAT_STALE_TOKENS);
	return IDEM_HOLD_STALE;
}

/* The same, and keep others from changing it */
static IdemHold
lock_held(IdemTable *jobs, int64 job_id, int64 token, IdemQueue *queue)
{
	IdemHold hold;

	do
	{
		hold = find_held(jobs, job_id, token, queue);
	} while (hold == IDEM_HOLD_OK &&
			 idem_table_lock(jobs, jobs->found->tts_tid, LockTupleNoKeyExclusive, LockWaitBlock) != TM_Ok);
	return hold;
}

/* For who raises an error where the job is not the caller's */
void
idem_jobstore_refuse(IdemHold hold, int64 job_id)
{
	if (hold == IDEM_HOLD_NONE)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("job is not held by the caller"),
				errdetail("Job " INT64_FORMAT " waits, and nobody has fetched it.", job_id),
				errhint("Fetch the job with idem_fetch(), and pass the token that it has returned."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_STALE_TOKEN),
			errmsg("stale fencing token"),
			errdetail("Job " INT64_FORMAT " was fetched again, was given back, or has ended.", job_id),
			errhint("Stop this work, and roll back what belongs to it. idem_job() shows what became of the job."));
}

/* queue: settings at hand, or with a NULL name none yet */
IdemHold
idem_jobstore_complete(IdemTable *jobs, int64 job_id, int64 token, Jsonb *result, IdemQueue *queue)
{
	IdemHold hold;

	do
	{
		hold = find_held(jobs, job_id, token, queue);
		if (hold != IDEM_HOLD_OK)
			return hold;
	} while (idem_table_delete(jobs, true) != TM_Ok);
	(void) idem_joblog_write(jobs, "done", queue->keep, result, NULL, NULL);
	idem_joblog_keep_key(jobs, result);
	idem_stats_count_queue(queue->name, IDEM_QUEUE_STAT_COMPLETED);
	return hold;
}

/*
 * Give up the job found, which this transaction has locked.  False: another
 * transaction is at an older row of this number in the history (see
 * idem_joblog_write()).
 */
static bool
bury(IdemTable *jobs, const IdemQueue *queue, text *error, TransactionId *in_the_way)
{
	if (!idem_joblog_write(jobs, "dead", queue->keep_dead, NULL, error, in_the_way))
		return false;
	if (idem_table_delete(jobs, true) != TM_Ok)
		elog(ERROR, "a job locked by this transaction was changed by another one");
	idem_stats_count_queue(queue->name, IDEM_QUEUE_STAT_DEAD);
	return true;
}

/*
 * If the lease of the job found, which is locked and has run out, was that of the
 * last attempt: give it up.  One that waits for its retry has been granted it,
 * whatever the queue says now.  Waits for nobody: a caller that does not ask who
 * is in the way passes over the job, and a warning says so (J13).
 */
IdemBurial
idem_jobstore_bury_spent(IdemTable *jobs, const IdemQueue *queue, TransactionId *in_the_way)
{
	TransactionId other;

	if (!idem_jobrow_is_leased(jobs) || !idem_jobrow_has_no_attempts_left(jobs, queue))
		return IDEM_NOT_SPENT;
	if (bury(jobs, queue, cstring_to_text("The lease of the last attempt ran out."), &other))
		return IDEM_BURIED;
	if (in_the_way != NULL)
		*in_the_way = other;
	else
		idem_joblog_warn_passed_over(idem_row_int64(jobs, IDEM_JOBS_JOB_ID));
	return IDEM_PASSED_OVER;
}

/* Let the job found, which is locked, wait until then; whoever had it has it no more */
static void
give_back(IdemTable *jobs, TimestampTz run_at, int attempt, text *error)
{
	TupleTableSlot *slot = idem_jobrow_copy(jobs, true);

	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(run_at));
	idem_row_set(slot, IDEM_JOBS_ATTEMPT, Int32GetDatum(attempt));
	idem_row_set(slot, IDEM_JOBS_TOKEN,
				 Int64GetDatum(idem_clock_next_token(idem_row_int64(jobs, IDEM_JOBS_TOKEN), idem_clock_now())));
	idem_row_clear(slot, IDEM_JOBS_LEASE_UNTIL);
	idem_row_clear(slot, IDEM_JOBS_WORKER);
	if (error != NULL)
		idem_row_set(slot, IDEM_JOBS_ERROR, PointerGetDatum(error));
	idem_jobrow_store(jobs);
}

/* Doubles with each attempt, up to a maximum; spread, so that what failed together does not come back together */
static int64
backoff(const IdemQueue *queue, int attempt)
{
	int64 delay = queue->backoff;

	for (int i = 1; i < attempt && delay < queue->backoff_max; i++)
		delay *= 2;
	delay = Min(delay, queue->backoff_max);
	return delay * (0.75 + 0.5 * pg_prng_double(&pg_global_prng_state));
}

/* A long error is cut: better a part of it than none */
static text *
clip_error(text *error)
{
	int len;

	if (error == NULL || VARSIZE_ANY_EXHDR(error) <= IDEM_MAX_ERROR_LEN)
		return error;
	len = pg_mbcliplen(VARDATA_ANY(error), VARSIZE_ANY_EXHDR(error), IDEM_MAX_ERROR_LEN);
	return cstring_to_text_with_len(VARDATA_ANY(error), len);
}

/* retry_in: NULL for what the queue says */
IdemHold
idem_jobstore_fail(IdemTable *jobs, int64 job_id, int64 token, text *error, const int64 *retry_in,
				   bool dead, bool *is_dead)
{
	IdemQueue queue = {0};
	IdemHold hold = lock_held(jobs, job_id, token, &queue);
	int attempt;

	if (hold != IDEM_HOLD_OK)
		return hold;
	error = clip_error(error);
	attempt = idem_row_int32(jobs, IDEM_JOBS_ATTEMPT);
	*is_dead = dead || attempt >= idem_jobrow_max_attempts(jobs, &queue);
	if (*is_dead)
		(void) bury(jobs, &queue, error, NULL);
	else
		give_back(jobs, idem_clock_now() + (retry_in ? *retry_in : backoff(&queue, attempt)), attempt, error);
	idem_stats_count_queue(queue.name, IDEM_QUEUE_STAT_FAILED);
	return hold;
}

/* Give the job back for later; the attempt does not count */
IdemHold
idem_jobstore_snooze(IdemTable *jobs, int64 job_id, int64 token, int64 delay, TimestampTz *run_at)
{
	IdemQueue queue = {0};
	IdemHold hold = lock_held(jobs, job_id, token, &queue);

	if (hold != IDEM_HOLD_OK)
		return hold;
	*run_at = idem_clock_now() + delay;
	give_back(jobs, *run_at, idem_row_int32(jobs, IDEM_JOBS_ATTEMPT) - 1, NULL);
	idem_stats_count_queue(queue.name, IDEM_QUEUE_STAT_SNOOZED);
	return hold;
}

/* lease: -1 for what the queue says */
IdemHold
idem_jobstore_heartbeat(IdemTable *jobs, int64 job_id, int64 token, int64 lease, IdemQueue *queue,
						TimestampTz *lease_until)
{
	IdemHold hold = lock_held(jobs, job_id, token, queue);

	if (hold != IDEM_HOLD_OK)
		return hold;
	if (lease < 0 && queue->lease == 0)
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", "lease"),
				errdetail("The queue declares none, either."),
				errhint("Pass the time for which the work goes on at most, such as '90 s', or declare it with idem_queue_set()."));
	*lease_until = idem_clock_now() + (lease < 0 ? queue->lease : lease);
	idem_row_set(idem_jobrow_copy(jobs, true), IDEM_JOBS_LEASE_UNTIL, TimestampTzGetDatum(*lease_until));
	idem_jobrow_store(jobs);
	return hold;
}

/*
 * End a job, whoever has it; one that runs in an open transaction is waited for.
 * So are transactions that had it absorb a duplicate; others do not get in between.
 */
bool
idem_jobstore_cancel(IdemTable *jobs, int64 job_id)
{
	IdemQueue queue = {0};
	bool found;

	idem_jobtable_mark_cancel(jobs, job_id);
	do
	{
		found = find_job(jobs, job_id, &queue);
	} while (found && idem_table_delete(jobs, true) != TM_Ok);
	idem_jobtable_unmark_cancel(jobs, job_id);
	if (!found)
		return false;
	(void) idem_joblog_write(jobs, "cancelled", queue.keep_dead, NULL, NULL, NULL);
	idem_stats_count_queue(queue.name, IDEM_QUEUE_STAT_CANCELLED);
	return true;
}

/*
 * Put a job that has ended, the one found in the history, into its queue again.
 * A job of the same key may be there by now; then both run.
 */
static void
insert_again(IdemTable *jobs, IdemTable *log)
{
	TimestampTz now = idem_clock_now();
	TupleTableSlot *slot = idem_table_new_row(jobs, true);

	idem_row_copy_column(log, IDEM_JOB_LOG_JOB_ID, slot, IDEM_JOBS_JOB_ID);
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(now));
	idem_row_copy_column(log, IDEM_JOB_LOG_ENQUEUED_AT, slot, IDEM_JOBS_ENQUEUED_AT);
	idem_row_copy_column(log, IDEM_JOB_LOG_PRIORITY, slot, IDEM_JOBS_PRIORITY);
	idem_row_copy_column(log, IDEM_JOB_LOG_QUEUE, slot, IDEM_JOBS_QUEUE);
	idem_row_copy_column(log, IDEM_JOB_LOG_KEY, slot, IDEM_JOBS_KEY);
	idem_row_copy_column(log, IDEM_JOB_LOG_PAYLOAD, slot, IDEM_JOBS_PAYLOAD);
	idem_row_copy_column(log, IDEM_JOB_LOG_MAX_ATTEMPTS, slot, IDEM_JOBS_MAX_ATTEMPTS);
	idem_row_copy_column(log, IDEM_JOB_LOG_KEY_UNTIL, slot, IDEM_JOBS_KEY_UNTIL);
	idem_row_copy_column(log, IDEM_JOB_LOG_ERROR, slot, IDEM_JOBS_ERROR);
	/* so that no token of before fits */
	idem_row_set(slot, IDEM_JOBS_TOKEN, Int64GetDatum(idem_clock_next_token(0, now)));
	/* J8: a job for later that never took its key does not take it now */
	if (idem_row_bool(log, IDEM_JOB_LOG_TOOK_KEY))
		idem_row_set(slot, IDEM_JOBS_KEY_HASH,
					 Int64GetDatum(idem_hash_name(idem_row_text(log, IDEM_JOB_LOG_QUEUE), idem_row_text(log, IDEM_JOB_LOG_KEY))));
	if (!idem_table_insert(jobs))
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("number of a job is in use again"),
				errdetail("Another job with the number " INT64_FORMAT " is live; the one in the history is older.",
						  idem_row_int64(log, IDEM_JOB_LOG_JOB_ID)),
				errhint("Enqueue what idem.job_log has of the older one as a new job; idem_doctor() tells how to set the sequence right."));
}

static bool
is_retryable(IdemTable *log)
{
	return strcmp(text_to_cstring(idem_row_text(log, IDEM_JOB_LOG_STATE)), "done") != 0;
}

/* Let a job that is dead or cancelled wait again; false if there is none */
bool
idem_jobstore_retry(IdemTable *jobs, int64 job_id)
{
	IdemTable log;
	IdemLookup lookup;
	IdemQueue queue = {0};
	bool found;
	bool removed = false;

	idem_jobtable_open_log(&log, RowExclusiveLock);
	lookup = idem_jobtable_by_id(&log, job_id);
	do
	{
		IdemProbe probe;

		idem_probe_existing(&log, &lookup, &probe);
		found = probe.found == IDEM_FOUND_ROW;
		if (found)
		{
			use_queue_of(&log, IDEM_JOB_LOG_QUEUE, &queue);
			found = is_retryable(&log);
		}
		removed = found && idem_table_delete(&log, true) == TM_Ok;
	} while (found && !removed);
	if (removed)
	{
		insert_again(jobs, &log);
		idem_stats_count_queue(queue.name, IDEM_QUEUE_STAT_RETRIED);
	}
	idem_table_close(&log);
	return removed;
}

/* Find the row by what the statement's snapshot shows, like a SELECT */
static bool
find_visible(IdemTable *table, int64 job_id, AttrNumber queue_attno, IdemQueue *queue)
{
	IdemLookup lookup = idem_jobtable_by_id(table, job_id);
	IndexScanDesc scan = idem_probe_begin(table, &lookup, GetActiveSnapshot());
	bool found = index_getnext_slot(scan, ForwardScanDirection, table->found);

	index_endscan(scan);
	if (found)
		use_queue_of(table, queue_attno, queue);
	return found;
}

/* What can be said about a job, live or in the history */
bool
idem_jobstore_get(int64 job_id, IdemJobInfo *info)
{
	IdemTable table;
	IdemQueue queue = {0};
	bool found;

	idem_jobtable_open(&table, AccessShareLock);
	found = find_visible(&table, job_id, IDEM_JOBS_QUEUE, &queue);
	if (found)
		idem_jobrow_read(&table, &queue, info);
	idem_table_close(&table);
	if (found)
		return true;

	idem_jobtable_open_log(&table, AccessShareLock);
	found = find_visible(&table, job_id, IDEM_JOB_LOG_QUEUE, &queue);
	if (found)
		idem_jobrow_read_log(&table, &queue, info);
	idem_table_close(&table);
	return found;
}

static bool
lease_has_run_out(IdemTable *jobs, TimestampTz now)
{
	return idem_jobrow_is_leased(jobs) && idem_row_timestamp(jobs, IDEM_JOBS_LEASE_UNTIL) <= now;
}

/* Give up the job found if its last lease has run out, unless another transaction is at it */
static bool
bury_found(IdemTable *jobs, IdemQueue *queue, TimestampTz now)
{
	if (!lease_has_run_out(jobs, now) || idem_row_is_mine(jobs))
		return false;
	if (queue->name == NULL || !idem_row_varlena_equals(jobs, IDEM_JOBS_QUEUE, queue->name))
		idem_queuestore_get(idem_row_text(jobs, IDEM_JOBS_QUEUE), queue);
	if (!idem_jobrow_has_no_attempts_left(jobs, queue))
		return false;
	return idem_table_lock(jobs, jobs->found->tts_tid, LockTupleExclusive, LockWaitSkip) == TM_Ok &&
		idem_jobstore_bury_spent(jobs, queue, NULL) == IDEM_BURIED;
}

/* Look at the jobs on these pages, as long as cleanup may go on */
static void
bury_on_pages(IdemTable *jobs, BlockNumber begin, BlockNumber end, IdemQueue *queue, IdemCleanup *cleanup)
{
	TimestampTz now = idem_clock_now();
	ItemPointerData mintid;
	ItemPointerData maxtid;
	TableScanDesc scan;

	ItemPointerSet(&mintid, begin, 1);
	ItemPointerSet(&maxtid, end - 1, MaxOffsetNumber);
	scan = idem_compat_beginscan_tidrange(jobs->heap, cleanup->snapshot, &mintid, &maxtid);
	while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, jobs->found))
	{
		cleanup->place.page = ItemPointerGetBlockNumber(&jobs->found->tts_tid);
		if (!idem_table_may_go_on(cleanup))
			break;
		if (bury_found(jobs, queue, now))
			cleanup->removed++;
	}
	if (!cleanup->more)
		cleanup->place.page = end;
	table_endscan(scan);
}

/*
 * Give up jobs whose last lease has run out.  Fetch does that with those that
 * it meets; this is for queues from which nobody fetches.  An index to find
 * them by would cost every fetch, so this goes through the table: through all of it
 * if it is not large, else through a part, and the next time through the next one.
 */
void
idem_jobstore_cleanup_jobs(IdemCleanup *cleanup)
{
	IdemTable jobs;
	IdemQueue queue = {0};
	BlockNumber nblocks;
	BlockNumber begin;
	BlockNumber npages;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	nblocks = RelationGetNumberOfBlocks(jobs.heap);
	begin = nblocks > 0 ? cleanup->place.page % nblocks : 0;
	npages = Min(nblocks, MAX_PAGES_TO_SEARCH);
	if (npages > 0)
		bury_on_pages(&jobs, begin, Min(begin + npages, nblocks), &queue, cleanup);
	/* around the end of the table to its beginning */
	if (!cleanup->more && begin + npages > nblocks)
		bury_on_pages(&jobs, 0, begin + npages - nblocks, &queue, cleanup);
	idem_table_close(&jobs);
}
