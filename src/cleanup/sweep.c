/*
 * sweep.c
 *		What cleanup removes, in which order, and how far: for the background worker and
 *		for the SQL function idem_cleanup().
 *
 * A sweep removes one kind of rows (W1), a batch at a time.  It waits for no transaction
 * and skips a row that another transaction has locked, updated or deleted (W2).  The
 * caller keeps the cursor, which says where the next batch continues.  An error of a
 * sweep is an error of the caller's transaction.
 *
 * The batches of idem_cleanup() are part of its caller's transaction.  The backend remembers
 * where each sweep has stopped, and the next call continues there, because the index entries
 * of the rows removed before are still there and would be read again.  The cursor is only a
 * hint.  A call that finds nothing more from there on begins again with the oldest rows.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_statistic.h"
#include "common/pg_prng.h"
#include "lib/stringinfo.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"
#include "jobs/row/job.h"
#include "keys/keys.h"

IDEM_FUNCTION(idem_cleanup);

/* How many pages of idem.jobs one batch searches at most: 64 MB */
#define MAX_PAGES_TO_SEARCH 8192

/* May the batch look at another row (W2)?  If not, there may be more to remove. */
static bool
may_continue(IdemSweepBatch *batch)
{
	CHECK_FOR_INTERRUPTS();
	batch->more = batch->removed >= batch->max ||
		(batch->deadline != 0 && idem_clock_steady() >= batch->deadline);
	return !batch->more;
}

/*
 * Estimate how many live rows the table has, and how many rows from the cursor on have expired.
 * Both come from the statistics of the table, so they cost no scan.  The number of expired rows
 * is shown in idem.cleanup_progress.  From the number of live rows the launcher sees whether
 * cleanup keeps up.
 */
static void
estimate_backlog(IdemTable *table, AttrNumber expires_at, IdemSweepBatch *batch)
{
	Datum relid = ObjectIdGetDatum(RelationGetRelid(table->heap));
	int64 rows = DatumGetInt64(DirectFunctionCall1(pg_stat_get_live_tuples, relid));
	HeapTuple stats = SearchSysCache3(STATRELATTINH, relid, Int16GetDatum(expires_at),
									  BoolGetDatum(false));
	TimestampTz now = idem_clock_now();
	AttStatsSlot histogram;
	int n = 0;
	int expired = 0;

	/* the histogram of expires_at says which share of the rows has expired */
	if (HeapTupleIsValid(stats))
	{
		if (get_attstatsslot(&histogram, stats, STATISTIC_KIND_HISTOGRAM, InvalidOid,
							 ATTSTATSSLOT_VALUES))
		{
			for (int i = 0; i < histogram.nvalues; i++)
			{
				TimestampTz bound = DatumGetTimestampTz(histogram.values[i]);

				n += bound >= batch->cursor.from;
				expired += bound >= batch->cursor.from && bound <= now;
			}
			free_attstatsslot(&histogram);
		}
		ReleaseSysCache(stats);
	}
	batch->rows = rows > 0 ? rows : (int64) Max(table->heap->rd_rel->reltuples, 0);
	batch->left = (int64) (batch->rows * (n > 0 ? (double) expired / n : 1));
}

/*
 * Delete the row if it has expired and no other transaction holds it (W1, W2).  A key that is
 * parked (L7), or that this transaction holds, stays.
 */
static bool
remove_row(const IdemSweep *sweep, IdemTable *table, TupleTableSlot *row)
{
	bool abandoned = false;

	if (sweep->open == idem_keyrow_open)
	{
		IdemKeyRow key;

		idem_keyrow_read(row, 0, &key);
		if (key.status != IDEM_KEY_GONE)
			return false;
		abandoned = key.lease_until != 0 && key.finished_at == 0;
	}
	if (idem_table_delete(table, row, false) != TM_Ok)
		return false;
	idem_counters_add(sweep->counter);
	if (abandoned)
		idem_counters_add(IDEM_DATABASE_COUNTER_ABANDONED_LEASES);
	return true;
}

/* Remove rows whose expires_at has passed, oldest first (W1) */
static void
sweep_expired(const IdemSweep *sweep, IdemSweepBatch *batch)
{
	IdemTable table;
	TupleTableSlot *row;
	Relation index;
	IndexScanDesc scan;
	ScanKeyData keys[2];

	sweep->open(&table, RowExclusiveLock);
	row = idem_table_row(&table);
	index = idem_table_find_index(&table, &sweep->expires_at, 1,
								  "There is no index that orders the rows by expires_at.",
								  psprintf("Run CREATE INDEX CONCURRENTLY ON idem.%s (expires_at).",
										   table.def->name));
	scan = index_beginscan(table.heap, index, batch->snapshot, NULL, 2, 0, SO_NONE);
	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(batch->cursor.from));
	ScanKeyInit(&keys[1], 1, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE,
				TimestampTzGetDatum(idem_clock_now()));
	index_rescan(scan, keys, 2, NULL, 0);
	while (may_continue(batch) && index_getnext_slot(scan, ForwardScanDirection, row))
	{
		batch->cursor.from = idem_row_timestamp(row, sweep->expires_at);
		if (remove_row(sweep, &table, row))
			batch->removed++;
	}
	index_endscan(scan);
	if (batch->more)
		estimate_backlog(&table, sweep->expires_at, batch);
	idem_table_close(&table);
}

/* Make the job dead if the lease of its last attempt has expired (W1); never waits (W2) */
static bool
make_dead_if_expired(IdemTable *jobs, TupleTableSlot *row, IdemQueue *queue, TimestampTz now)
{
	IdemJob job;

	idem_job_read(&job, row);
	if (!job.is_leased || job.lease_until > now || idem_job_is_mine(&job))
		return false;
	if (queue->name == NULL || !idem_row_varlena_equals(row, IDEM_JOBS_QUEUE, queue->name))
		idem_queuestore_get(idem_row_text(row, IDEM_JOBS_QUEUE), queue);
	return idem_job_has_no_attempts_left(&job, queue) &&
		idem_table_lock_row(jobs, job.tid, LockTupleExclusive, LockWaitSkip, row) == TM_Ok &&
		idem_history_make_dead_if_spent(jobs, &job, queue, NULL) == IDEM_DEAD_MADE;
}

/*
 * Spent jobs: the lease of their last attempt has expired.  They become dead.  Fetch makes spent
 * jobs dead, too; this sweep is for queues from which no worker fetches.  An index on these jobs
 * would make every fetch slower, so the sweep searches the table.  A batch searches at most
 * MAX_PAGES_TO_SEARCH pages, and the next one continues behind them, or at the beginning of the
 * table.
 */
static void
sweep_spent_jobs(IdemSweepBatch *batch)
{
	IdemTable jobs;
	TupleTableSlot *job;
	IdemQueue queue = {0};
	TimestampTz now = idem_clock_now();
	BlockNumber nblocks;
	BlockNumber left;
	BlockNumber begin;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	job = idem_table_row(&jobs);
	nblocks = RelationGetNumberOfBlocks(jobs.heap);
	left = Min(nblocks, MAX_PAGES_TO_SEARCH);
	begin = nblocks > 0 ? batch->cursor.page % nblocks : 0;
	while (left > 0 && !batch->more)
	{
		BlockNumber end = Min(begin + left, nblocks);
		ItemPointerData mintid;
		ItemPointerData maxtid;
		TableScanDesc scan;

		ItemPointerSet(&mintid, begin, 1);
		ItemPointerSet(&maxtid, end - 1, MaxOffsetNumber);
		scan = table_beginscan_tidrange(jobs.heap, batch->snapshot, &mintid, &maxtid, SO_NONE);
		while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, job))
		{
			batch->cursor.page = ItemPointerGetBlockNumber(&job->tts_tid);
			if (!may_continue(batch))
				break;
			if (make_dead_if_expired(&jobs, job, &queue, now))
				batch->removed++;
		}
		table_endscan(scan);
		if (!batch->more)
			batch->cursor.page = end;
		left -= end - begin;
		begin = 0;
	}
	idem_table_close(&jobs);
}

/* What is removed, in this order (W1) */
const IdemSweep idem_sweeps[IDEM_LAST_SWEEP + 1] = {
	[IDEM_PHASE_KEYS] = {"idem cleanup: keys",
						 {{"keys"}, NULL},
						 idem_keyrow_open,
						 IDEM_KEYS_EXPIRES_AT,
						 IDEM_DATABASE_COUNTER_EXPIRED_KEYS},
	[IDEM_PHASE_JOB_KEYS] = {"idem cleanup: keys of jobs",
							 {{"job_keys"}, NULL},
							 idem_jobtable_open_keys,
							 IDEM_JOB_KEYS_EXPIRES_AT,
							 IDEM_DATABASE_COUNTER_EXPIRED_JOB_KEYS},
	[IDEM_PHASE_JOB_HISTORY] = {"idem cleanup: history of jobs",
								{{"job_log"}, NULL},
								idem_jobtable_open_log,
								IDEM_JOB_LOG_EXPIRES_AT,
								IDEM_DATABASE_COUNTER_EXPIRED_JOB_HISTORY},
	/* these have no order of expiry: sweep_spent_jobs() */
	[IDEM_PHASE_JOBS] = {"idem cleanup: jobs without attempts", {{"jobs", "job_log"}, "queues"}},
};

/*
 * Run one batch of a sweep, or none if a subscription writes one of its tables (W1).  The
 * snapshot is taken before the check for subscriptions.  So if the check finds none, the
 * snapshot shows no row that a subscription has written, even if a session creates a
 * subscription while the batch runs.
 */
void
idem_sweep_run(IdemPhase phase, IdemSweepBatch *batch)
{
	const IdemSweep *sweep = &idem_sweeps[phase];

	batch->snapshot = RegisterSnapshot(GetLatestSnapshot());
	batch->is_subscribed = idem_check_any_subscribed(sweep->tables.written);
	if (!batch->is_subscribed && phase == IDEM_PHASE_JOBS)
		sweep_spent_jobs(batch);
	else if (!batch->is_subscribed)
		sweep_expired(sweep, batch);
	UnregisterSnapshot(batch->snapshot);
	batch->snapshot = NULL;
}

/* Where the next call of idem_cleanup() continues */
static IdemCleanupCursor cursors[IDEM_LAST_SWEEP + 1];

/* The next call begins with the oldest rows: what was removed is back, or may come back */
void
idem_sweep_forget_cursors(void)
{
	for (int i = IDEM_FIRST_SWEEP; i <= IDEM_LAST_SWEEP; i++)
		cursors[i].from = DT_NOBEGIN;
}

/*
 * Remove up to so many rows of each kind, in the caller's transaction; returns how many were
 * removed
 */
Datum
idem_cleanup(PG_FUNCTION_ARGS)
{
	static bool has_begun = false;
	StringInfoData skipped;
	int removed = 0;
	int max;

	idem_fn_begin(fcinfo, &idem_cleanup_signature, "idem_cleanup()");
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", "batch"),
				errdetail("It is the number of rows to remove from each table at most."),
				errhint("Leave it out for the default."));
	max = PG_GETARG_INT32(0);
	if (max < 1 || max > IDEM_MAX_CLEANUP_BATCH)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid batch"),
				errdetail("The batch is %d; it must be between 1 and %d.", max, IDEM_MAX_CLEANUP_BATCH),
				errhint("Call %s again until it returns 0.", "idem_cleanup()"));

	if (!has_begun)
	{
		idem_sweep_forget_cursors();
		/*
		 * each session begins with a random page, so that calls from short sessions reach all pages
		 */
		cursors[IDEM_PHASE_JOBS].page = pg_prng_uint32(&pg_global_prng_state);
		has_begun = true;
	}
	initStringInfo(&skipped);
	for (int i = IDEM_FIRST_SWEEP; i <= IDEM_LAST_SWEEP; i++)
	{
		IdemSweepBatch batch = {.max = max, .cursor = cursors[i]};

		idem_sweep_run(i, &batch);
		/* rows may be left that expired earlier: they were locked, came back, or are new */
		if (!batch.more && !TIMESTAMP_IS_NOBEGIN(cursors[i].from))
		{
			batch.cursor.from = DT_NOBEGIN;
			idem_sweep_run(i, &batch);
		}
		cursors[i] = batch.cursor;
		if (!batch.more)
			cursors[i].from = DT_NOBEGIN;
		if (batch.is_subscribed)
			appendStringInfo(&skipped, "%sidem.%s", skipped.len > 0 ? ", " : "",
							 idem_sweeps[i].tables.written[0]);
		removed += batch.removed;
	}
	if (skipped.len > 0)
		ereport(NOTICE,
				errmsg("cleanup has skipped tables that a subscription writes"),
				errdetail("Not cleaned up: %s.", skipped.data),
				errhint("The publisher removes expired rows. Cleanup continues when the subscription is dropped."));
	PG_RETURN_INT32(removed);
}
