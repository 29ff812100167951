/*
 * joblog.c
 *		What is kept of jobs that have ended: the history, and the keys of
 *		until_expired.
 *
 * A number can come twice: the sequence was set back, or logical replication has
 * carried the rows along and not the sequence.  Nobody looks for that when a job
 * is enqueued.  When it ends, its row counts, and the older one of the same
 * number gives way, so no single row holds up a queue.  The caller is warned.
 *
 * Who waits for whom: complete, fail and cancel wait for a transaction that is
 * removing or has locked the older row (cleanup in an open transaction, say), as long
 * as lock_timeout allows.  Fetch and cleanup wait for nobody: they pass over the job.
 */
#include "postgres.h"

#include "access/stratnum.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

/* One warning of a kind per statement: a batch may meet thousands */
static bool
is_first_in_statement(TimestampTz *last)
{
	TimestampTz statement = GetCurrentStatementStartTimestamp();
	bool first = *last != statement;

	*last = statement;
	return first;
}

static void
warn_gave_way(IdemTable *table, int64 job_id)
{
	static TimestampTz last = 0;

	if (is_first_in_statement(&last))
		ereport(WARNING,
				errmsg("an older row gave way to a job of the same number"),
				errdetail("Job " INT64_FORMAT " has ended, and idem.%s had a row of an earlier job with that number.",
						  job_id, table->def->name),
				errhint("The sequence idem.jobs_job_id_seq is behind the jobs; idem_doctor() tells how to set it right."));
}

/* Fetch or cleanup has met a job without attempts left that it could not bury */
void
idem_joblog_warn_skipped(int64 job_id)
{
	static int64 last_job = 0;

	if (job_id == last_job)
		return;
	last_job = job_id;
	ereport(WARNING,
			errmsg("a job without attempts left was passed over"),
			errdetail("Another transaction is changing the row that idem.job_log has of an earlier job with the number " INT64_FORMAT ".", job_id),
			errhint("It is given up when that transaction has ended; idem_doctor() tells how to set the sequence right."));
}

/*
 * Remove the older row that is in the way of the one written, if it is still there.
 * False: another transaction is at it, and we are not to wait but to tell which.
 */
static bool
make_room(IdemTable *table, IdemLookup *lookup, int64 job_id, TransactionId *in_the_way)
{
	bool wait = in_the_way == NULL;
	IdemProbeResult probe;
	TM_Result result;

	idem_probe_existing(table, lookup, &probe);
	if (probe.found == IDEM_FOUND_NONE)
		return true;
	if (probe.found == IDEM_FOUND_OPEN && wait)
	{
		idem_probe_wait(table, probe.xwait);
		return true;
	}
	if (probe.found == IDEM_FOUND_OPEN)
	{
		*in_the_way = probe.xwait;
		return false;
	}
	/* locked first: a delete that does not wait would not pass a lock of this transaction's own */
	result = idem_table_lock_row(table, table->found->tts_tid, LockTupleExclusive,
								 wait ? LockWaitBlock : LockWaitSkip);
	if (result == TM_Ok && idem_write_delete(table, true) == TM_Ok)
		warn_gave_way(table, job_id);
	if (result != TM_WouldBlock)
		return true;
	*in_the_way = idem_row_locker(table);
	/* it may have ended since */
	return !TransactionIdIsValid(*in_the_way);
}

/* Insert the row written; an older one with the same primary key gives way (J13) */
static bool
insert_over(IdemTable *table, IdemLookup *lookup, int64 job_id, TransactionId *in_the_way)
{
	while (!idem_write_insert(table))
	{
		CHECK_FOR_INTERRUPTS();
		if (!make_room(table, lookup, job_id, in_the_way))
			return false;
	}
	return true;
}

/* The row of the history for the job found */
static void
fill_log(IdemTable *jobs, TupleTableSlot *slot, const char *state, int64 keep)
{
	TimestampTz now = idem_clock_now();

	idem_row_copy_column(jobs, IDEM_JOBS_JOB_ID, slot, IDEM_JOB_LOG_JOB_ID);
	idem_row_set(slot, IDEM_JOB_LOG_ENDED_AT, TimestampTzGetDatum(now));
	idem_row_set(slot, IDEM_JOB_LOG_EXPIRES_AT, TimestampTzGetDatum(now + keep));
	idem_row_copy_column(jobs, IDEM_JOBS_ENQUEUED_AT, slot, IDEM_JOB_LOG_ENQUEUED_AT);
	idem_row_copy_column(jobs, IDEM_JOBS_PRIORITY, slot, IDEM_JOB_LOG_PRIORITY);
	idem_row_set(slot, IDEM_JOB_LOG_ATTEMPT,
				 Int32GetDatum(idem_row_int32(jobs, IDEM_JOBS_ATTEMPT)));
	idem_row_copy_column(jobs, IDEM_JOBS_MAX_ATTEMPTS, slot, IDEM_JOB_LOG_MAX_ATTEMPTS);
	idem_row_copy_column(jobs, IDEM_JOBS_KEY_UNTIL, slot, IDEM_JOB_LOG_KEY_UNTIL);
	if (!idem_row_isnull(jobs, IDEM_JOBS_KEY_HASH))
		idem_row_set(slot, IDEM_JOB_LOG_TOOK_KEY, BoolGetDatum(true));
	idem_row_set(slot, IDEM_JOB_LOG_STATE, CStringGetTextDatum(state));
	idem_row_copy_column(jobs, IDEM_JOBS_QUEUE, slot, IDEM_JOB_LOG_QUEUE);
	idem_row_copy_column(jobs, IDEM_JOBS_KEY, slot, IDEM_JOB_LOG_KEY);
	idem_row_copy_column(jobs, IDEM_JOBS_WORKER, slot, IDEM_JOB_LOG_WORKER);
	idem_row_copy_column(jobs, IDEM_JOBS_ERROR, slot, IDEM_JOB_LOG_ERROR);
	idem_row_copy_column(jobs, IDEM_JOBS_PAYLOAD, slot, IDEM_JOB_LOG_PAYLOAD);
}

/*
 * Note in the history what has become of the job found, if its queue wants that
 * kept.  With in_the_way it waits for nobody.  False then: the transaction there is
 * at an older row of this number, and nothing was written.
 */
bool
idem_joblog_write(IdemTable *jobs, const char *state, int64 keep, Jsonb *result, text *error,
				  TransactionId *in_the_way)
{
	int64 job_id = idem_row_int64(jobs, IDEM_JOBS_JOB_ID);
	IdemTable log;
	IdemLookup lookup;
	TupleTableSlot *slot;
	bool written;

	if (keep == 0)
		return true;
	idem_jobtable_open_log(&log, RowExclusiveLock);
	slot = idem_write_new_row(&log, true);
	fill_log(jobs, slot, state, keep);
	if (error != NULL)
		idem_row_set(slot, IDEM_JOB_LOG_ERROR, PointerGetDatum(error));
	if (result != NULL)
		idem_row_set(slot, IDEM_JOB_LOG_RESULT, JsonbPGetDatum(result));
	lookup = idem_jobtable_by_id(&log, job_id);
	written = insert_over(&log, &lookup, job_id, in_the_way);
	idem_table_close(&log);
	return written;
}

/* until_expired: the key of a job that is done goes on absorbing duplicates */
void
idem_joblog_keep_key(IdemTable *jobs, Jsonb *result)
{
	int64 job_id = idem_row_int64(jobs, IDEM_JOBS_JOB_ID);
	IdemTable keys;
	IdemLookup lookup;
	TupleTableSlot *slot;

	if (idem_row_isnull(jobs, IDEM_JOBS_KEY_UNTIL) ||
		idem_row_timestamp(jobs, IDEM_JOBS_KEY_UNTIL) <= idem_clock_now())
		return;
	idem_jobtable_open_keys(&keys, RowExclusiveLock);
	slot = idem_write_new_row(&keys, true);
	idem_row_copy_column(jobs, IDEM_JOBS_KEY_HASH, slot, IDEM_JOB_KEYS_KEY_HASH);
	idem_row_copy_column(jobs, IDEM_JOBS_KEY_UNTIL, slot, IDEM_JOB_KEYS_EXPIRES_AT);
	idem_row_copy_column(jobs, IDEM_JOBS_JOB_ID, slot, IDEM_JOB_KEYS_JOB_ID);
	idem_row_copy_column(jobs, IDEM_JOBS_QUEUE, slot, IDEM_JOB_KEYS_QUEUE);
	idem_row_copy_column(jobs, IDEM_JOBS_KEY, slot, IDEM_JOB_KEYS_KEY);
	if (result != NULL)
		idem_row_set(slot, IDEM_JOB_KEYS_RESULT, JsonbPGetDatum(result));
	lookup = idem_jobtable_by_key(&keys, keys.pkey, idem_row_int64(jobs, IDEM_JOBS_KEY_HASH));
	ScanKeyInit(&lookup.keys[lookup.nkeys++], 2, BTEqualStrategyNumber, F_INT8EQ,
				Int64GetDatum(job_id));
	(void) insert_over(&keys, &lookup, job_id, NULL);
	idem_table_close(&keys);
}
