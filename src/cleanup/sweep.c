/*
 * sweep.c
 *		What cleanup removes, in which order, and how far: for the background
 *		worker and for idem_cleanup().
 *
 * A sweep removes one kind of rows (W1), in batches.  It waits for no transaction
 * and skips a row that another transaction has locked, updated or deleted (W2).
 * The caller keeps the cursor, which says where the next batch continues.
 *
 * An error of a sweep is an error of the caller's transaction.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/tableam.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"
#include "jobs/row/job.h"
#include "keys/keys.h"

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

static IndexScanDesc
begin_expired(IdemTable *table, Relation index, Snapshot snapshot, TimestampTz from)
{
	IndexScanDesc scan = idem_compat_index_beginscan(table->heap, index, snapshot, 2);
	ScanKeyData keys[2];

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(from));
	ScanKeyInit(&keys[1], 1, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE,
				TimestampTzGetDatum(idem_clock_now()));
	index_rescan(scan, keys, 2, NULL, 0);
	return scan;
}

/*
 * Remove rows whose expires_at has passed, oldest first (W1).  remove() returns
 * whether it has deleted the row found.
 */
static void
sweep_expired(IdemTable *table, AttrNumber expires_at, bool (*remove)(IdemTable *),
			  IdemSweepBatch *batch)
{
	const char *hint = psprintf("Run CREATE INDEX CONCURRENTLY ON idem.%s (expires_at).",
								table->def->name);
	Relation index = idem_table_find_index(table, &expires_at, 1,
										   "There is no index that orders the rows by expires_at.",
										   hint);
	IndexScanDesc scan = begin_expired(table, index, batch->snapshot, batch->cursor.from);

	while (may_continue(batch) && index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		batch->cursor.from = idem_row_timestamp(table->found, expires_at);
		if (remove(table))
			batch->removed++;
	}
	index_endscan(scan);
	if (batch->more)
		idem_backlog_estimate(table, expires_at, batch);
}

/*
 * Delete the row found if its key has expired (W1).  A key that is parked (L7), or
 * that this transaction holds, stays.
 */
static bool
remove_key(IdemTable *table)
{
	bool abandoned = idem_keyrow_is_leased(table) && idem_row_isnull(table->found, IDEM_KEYS_FINISHED_AT);

	if (idem_keyrow_judge(table, 0) != IDEM_KEY_GONE || idem_write_delete(table, table->found, false) != TM_Ok)
		return false;
	idem_counters_add(IDEM_DATABASE_COUNTER_EXPIRED_KEYS);
	if (abandoned)
		idem_counters_add(IDEM_DATABASE_COUNTER_ABANDONED_LEASES);
	return true;
}

/* Keys past their ttl */
static void
sweep_keys(IdemSweepBatch *batch)
{
	IdemTable keys;

	idem_keytable_open(&keys, RowExclusiveLock);
	sweep_expired(&keys, IDEM_KEYS_EXPIRES_AT, remove_key, batch);
	idem_table_close(&keys);
}

static bool
remove_job_key(IdemTable *keys)
{
	if (idem_write_delete(keys, keys->found, false) != TM_Ok)
		return false;
	idem_counters_add(IDEM_DATABASE_COUNTER_EXPIRED_JOB_KEYS);
	return true;
}

/* Keys of jobs that are done, past their ttl: they no longer absorb duplicates */
static void
sweep_job_keys(IdemSweepBatch *batch)
{
	IdemTable keys;

	idem_jobtable_open_keys(&keys, RowExclusiveLock);
	sweep_expired(&keys, IDEM_JOB_KEYS_EXPIRES_AT, remove_job_key, batch);
	idem_table_close(&keys);
}

static bool
remove_log(IdemTable *log)
{
	if (idem_write_delete(log, log->found, false) != TM_Ok)
		return false;
	idem_counters_add(IDEM_DATABASE_COUNTER_EXPIRED_JOB_HISTORY);
	return true;
}

/* History of jobs that has expired */
static void
sweep_job_history(IdemSweepBatch *batch)
{
	IdemTable log;

	idem_jobtable_open_log(&log, RowExclusiveLock);
	sweep_expired(&log, IDEM_JOB_LOG_EXPIRES_AT, remove_log, batch);
	idem_table_close(&log);
}

static bool
lease_has_expired(IdemTable *jobs, TimestampTz now)
{
	return idem_jobrow_is_leased(jobs) && idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL) <= now;
}

/* Make the job found dead if the lease of its last attempt has expired (W1); never waits (W2) */
static bool
make_dead_if_expired(IdemTable *jobs, IdemQueue *queue, TimestampTz now)
{
	if (!lease_has_expired(jobs, now) || idem_row_is_mine(jobs->found))
		return false;
	if (queue->name == NULL || !idem_row_varlena_equals(jobs->found, IDEM_JOBS_QUEUE, queue->name))
		idem_queuestore_get(idem_row_text(jobs->found, IDEM_JOBS_QUEUE), queue);
	if (!idem_jobrow_has_no_attempts_left(jobs, queue))
		return false;
	return idem_table_lock_row(jobs, jobs->found->tts_tid, LockTupleExclusive, LockWaitSkip, jobs->found) ==
		TM_Ok &&
		idem_dead_make_if_spent(jobs, queue, NULL) == IDEM_DEAD_MADE;
}

/* Make spent jobs dead on the pages from begin to before end, as long as the batch may continue */
static void
sweep_pages(IdemTable *jobs, BlockNumber begin, BlockNumber end, IdemQueue *queue,
			IdemSweepBatch *batch)
{
	TimestampTz now = idem_clock_now();
	ItemPointerData mintid;
	ItemPointerData maxtid;
	TableScanDesc scan;

	ItemPointerSet(&mintid, begin, 1);
	ItemPointerSet(&maxtid, end - 1, MaxOffsetNumber);
	scan = idem_compat_beginscan_tidrange(jobs->heap, batch->snapshot, &mintid, &maxtid);
	while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, jobs->found))
	{
		batch->cursor.page = ItemPointerGetBlockNumber(&jobs->found->tts_tid);
		if (!may_continue(batch))
			break;
		if (make_dead_if_expired(jobs, queue, now))
			batch->removed++;
	}
	if (!batch->more)
		batch->cursor.page = end;
	table_endscan(scan);
}

/*
 * Spent jobs: the lease of their last attempt has expired.  They become dead.
 * Fetch makes spent jobs dead, too; this sweep is for queues from which no worker
 * fetches.  An index on these jobs would make every fetch slower, so the sweep
 * searches the table.  A batch searches at most MAX_PAGES_TO_SEARCH pages, and the
 * next one continues behind them.
 */
static void
sweep_spent_jobs(IdemSweepBatch *batch)
{
	IdemTable jobs;
	IdemQueue queue = {0};
	BlockNumber nblocks;
	BlockNumber begin;
	BlockNumber npages;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	nblocks = RelationGetNumberOfBlocks(jobs.heap);
	begin = nblocks > 0 ? batch->cursor.page % nblocks : 0;
	npages = Min(nblocks, MAX_PAGES_TO_SEARCH);
	if (npages > 0)
		sweep_pages(&jobs, begin, Min(begin + npages, nblocks), &queue, batch);
	/* continue at the beginning of the table */
	if (!batch->more && begin + npages > nblocks)
		sweep_pages(&jobs, 0, begin + npages - nblocks, &queue, batch);
	idem_table_close(&jobs);
}

/* What is removed, in this order (W1) */
const IdemSweep idem_sweeps[IDEM_LAST_SWEEP + 1] = {
	[IDEM_PHASE_KEYS] = {"idem cleanup: keys", {{"keys"}, NULL}, sweep_keys},
	[IDEM_PHASE_JOB_KEYS] = {"idem cleanup: keys of jobs", {{"job_keys"}, NULL}, sweep_job_keys},
	[IDEM_PHASE_JOB_HISTORY] = {"idem cleanup: history of jobs", {{"job_log"}, NULL}, sweep_job_history},
	[IDEM_PHASE_JOBS] = {"idem cleanup: jobs without attempts", {{"jobs", "job_log"}, "queues"}, sweep_spent_jobs},
};

/*
 * Run one batch of a sweep, or none if a subscription writes one of its tables
 * (W1).  The snapshot is taken before the check for subscriptions.  So if the check
 * finds none, the snapshot shows no row that a subscription has written, even if
 * a session creates a subscription while the batch runs.
 */
void
idem_sweep_run(const IdemSweep *sweep, IdemSweepBatch *batch)
{
	batch->snapshot = RegisterSnapshot(GetLatestSnapshot());
	batch->is_subscribed = idem_subscription_writes_any(sweep->tables.written);
	if (!batch->is_subscribed)
		sweep->run(batch);
	UnregisterSnapshot(batch->snapshot);
	batch->snapshot = NULL;
}
