/*
 * fetchstore.c
 *		The protocol of fetch: which jobs are due, and how a transaction takes them.
 *
 * Fetch scans the index on (queue, priority, run_at, job_id) with a dirty
 * snapshot, which shows changes later than the snapshot of the transaction.
 * Fetch waits for no transaction: it skips a job that another transaction has
 * inserted, is changing or has locked.  Before it updates a job that is due, it
 * locks the row FOR UPDATE, because an UPDATE alone does not conflict with the KEY
 * SHARE lock of a transaction whose duplicate the job has absorbed (J2, dedup.c).
 *
 * Entries of jobs that have ended stay in the index until VACUUM, and longer
 * while a transaction holds an old snapshot.  A backend that skipped many entries
 * of a priority keeps the position that it reached as a hint for one second, by
 * the steady clock, and starts there.  A hint inherits the expiry of the hint that
 * the fetch started from, so a backend scans the whole queue every second.
 * A hint says only where to start; the row of a job says whether it is due.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/xlog.h"
#include "common/hashfn.h"
#include "executor/instrument.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

/*
 * Keep a hint after skipping this many entries or pages.  The index scan itself
 * skips entries that are known to be dead; these count only as pages.
 */
#define MANY_ENTRIES 64
#define MANY_PAGES	 16

/* How long a hint is used, in microseconds */
#define HINT_LIFETIME USECS_PER_SEC

/* An entry of the index */
typedef struct IndexEntry
{
	int priority;
	TimestampTz run_at;
	int64 job_id;
} IndexEntry;

/* Parts of a queue, in the order in which a fetch scans them; the first three for each hint */
typedef enum Part
{
	PART_BEFORE_HINT, /* priorities less than that of the hint */
	PART_AT_HINT,	  /* its priority and its run_at, from its job_id on */
	PART_AFTER_HINT,  /* its priority, later run_at */
	PART_REST		  /* all other priorities, when there are no more hints */
} Part;

/* Less than every priority */
#define ANY_PRIORITY ((int64) PG_INT32_MIN - 1)

/* A fetch under way */
typedef struct Fetch
{
	IdemTable *jobs;
	const IdemFetch *args;
	Relation index;
	SnapshotData dirty;
	IndexScanDesc scan; /* NULL: there is none */
	TimestampTz now;
	int64 started; /* by the steady clock */
	uint64 queue_hash;
	bool use_hints;
	IdemFetchHint hint; /* that of the current part, unless it is PART_REST */
	Part part;
	int64 priority;		/* of the last entry */
	int64 nskipped;		/* entries skipped in this priority since the last job taken */
	IndexEntry skipped; /* the last one of these */
	int64 npages;		/* pages of the index read meanwhile */
	int64 npages_last;	/* those of them read for the last entry */
	int found;
	MemoryContext job_context; /* reset after each job */
} Fetch;

/* The hint of the queue with the least priority that is greater than above, or NULL */
static const IdemFetchHint *
find_hint(const Fetch *fetch, int64 above)
{
	return fetch->use_hints ? idem_fetchhint_find(fetch->queue_hash, above, fetch->started) : NULL;
}

/*
 * Keep the entry as a hint if the fetch skipped many entries or pages before it.
 * It is the entry of a job that was taken, or the last one skipped in a priority.
 * If the scan started from a hint, always keep the new one, with the same expiry.
 */
static void
keep_hint(const Fetch *fetch, const IndexEntry *entry)
{
	bool from_hint = fetch->part == PART_AT_HINT || fetch->part == PART_AFTER_HINT;
	IdemFetchHint hint = {
		.queue_hash = fetch->queue_hash,
		.priority = entry->priority,
		.run_at = entry->run_at,
		.job_id = entry->job_id,
		.good_until = from_hint ? fetch->hint.good_until : fetch->started + HINT_LIFETIME};

	if (from_hint || fetch->nskipped > MANY_ENTRIES || fetch->npages > MANY_PAGES)
		idem_fetchhint_set(&hint);
}

static void
end_scan(Fetch *fetch)
{
	if (fetch->scan != NULL)
		index_endscan(fetch->scan);
	fetch->scan = NULL;
}

/* Begin to scan a part of the queue: its jobs with a priority greater than above */
static void
begin_part(Fetch *fetch, Part part, int64 above)
{
	const IdemFetchHint *hint = &fetch->hint;
	ScanKeyData keys[4];
	int n = 0;

	end_scan(fetch);
	fetch->part = part;
	ScanKeyInit(&keys[n++], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(fetch->args->queue.name));
	if (above != ANY_PRIORITY)
		ScanKeyInit(&keys[n++], 2, BTGreaterStrategyNumber, F_INT4GT, Int32GetDatum((int) above));
	if (part == PART_BEFORE_HINT)
		ScanKeyInit(&keys[n++], 2, BTLessStrategyNumber, F_INT4LT, Int32GetDatum(hint->priority));
	if (part == PART_AT_HINT || part == PART_AFTER_HINT)
		ScanKeyInit(&keys[n++], 2, BTEqualStrategyNumber, F_INT4EQ, Int32GetDatum(hint->priority));
	if (part == PART_AT_HINT)
	{
		ScanKeyInit(&keys[n++], 3, BTEqualStrategyNumber, F_TIMESTAMPTZ_EQ,
					TimestampTzGetDatum(hint->run_at));
		ScanKeyInit(&keys[n++], 4, BTGreaterEqualStrategyNumber, F_INT8GE,
					Int64GetDatum(hint->job_id));
	}
	if (part == PART_AFTER_HINT)
		ScanKeyInit(&keys[n++], 3, BTGreaterStrategyNumber, F_TIMESTAMPTZ_GT,
					TimestampTzGetDatum(hint->run_at));
	fetch->scan = idem_compat_index_beginscan(fetch->jobs->heap, fetch->index, &fetch->dirty, n);
	fetch->scan->xs_want_itup = true;
	index_rescan(fetch->scan, keys, n, NULL, 0);
}

/* Begin to scan the priorities greater than above, up to the next hint if there is one */
static void
begin_next_priorities(Fetch *fetch, int64 above)
{
	const IdemFetchHint *hint = find_hint(fetch, above);

	if (hint != NULL)
		fetch->hint = *hint;
	begin_part(fetch, hint != NULL ? PART_BEFORE_HINT : PART_REST, above);
}

/* Begin to scan the part after the current one; false if that was the last one */
static bool
begin_next_part(Fetch *fetch)
{
	switch (fetch->part)
	{
		case PART_BEFORE_HINT:
			begin_part(fetch, PART_AT_HINT, ANY_PRIORITY);
			return true;
		case PART_AT_HINT:
			begin_part(fetch, PART_AFTER_HINT, ANY_PRIORITY);
			return true;
		case PART_AFTER_HINT:
			begin_next_priorities(fetch, fetch->hint.priority);
			return true;
		case PART_REST:
			return false;
	}
	pg_unreachable();
}

/* The fetch has seen all jobs of a priority that are due: keep a hint if it skipped many entries */
static void
leave_priority(Fetch *fetch)
{
	if (fetch->nskipped > 0)
		keep_hint(fetch, &fetch->skipped);
	fetch->nskipped = fetch->npages = 0;
}

static int64
count_pages_read(void)
{
	return pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read;
}

static bool
get_next_entry(Fetch *fetch, IndexEntry *entry)
{
	IndexScanDesc scan = fetch->scan;
	int64 before = count_pages_read();
	bool found;
	bool isnull;

	CHECK_FOR_INTERRUPTS();
	found = index_getnext_tid(scan, ForwardScanDirection) != NULL;
	fetch->npages_last = count_pages_read() - before;
	fetch->npages += fetch->npages_last;
	if (!found)
		return false;
	entry->priority = DatumGetInt32(index_getattr(scan->xs_itup, 2, scan->xs_itupdesc, &isnull));
	entry->run_at =
		DatumGetTimestampTz(index_getattr(scan->xs_itup, 3, scan->xs_itupdesc, &isnull));
	entry->job_id = DatumGetInt64(index_getattr(scan->xs_itup, 4, scan->xs_itupdesc, &isnull));
	return true;
}

/*
 * May the job found be taken?  The transaction that has fetched it does not take
 * it again, even if the lease has expired.
 */
static bool
is_due(Fetch *fetch)
{
	IdemTable *jobs = fetch->jobs;

	if (TransactionIdIsValid(fetch->dirty.xmin) || TransactionIdIsValid(fetch->dirty.xmax))
		return false;
	if (idem_row_timestamp(jobs, IDEM_JOBS_RUN_AT) > fetch->now)
		return false;
	if (idem_jobrow_is_leased(jobs))
		return idem_row_timestamp(jobs, IDEM_JOBS_LEASE_UNTIL) <= fetch->now &&
			!idem_row_is_mine(jobs);
	return !idem_jobrow_waits_for_other(jobs);
}

static void
update_job(Fetch *fetch, IdemFetched *job)
{
	IdemTable *jobs = fetch->jobs;
	TupleTableSlot *slot = idem_jobrow_copy(jobs, true);

	idem_row_set(slot, IDEM_JOBS_ATTEMPT, Int32GetDatum(job->attempt));
	idem_row_set(slot, IDEM_JOBS_TOKEN, Int64GetDatum(job->token));
	idem_row_set(slot, IDEM_JOBS_LEASE_UNTIL, TimestampTzGetDatum(fetch->now + fetch->args->lease));
	idem_row_set_varlena(slot, IDEM_JOBS_WORKER, fetch->args->worker);
	idem_jobrow_store(jobs);
}

/*
 * Take the job found, if it is due and no other transaction has locked it.  The
 * lock FOR UPDATE is granted only after all absorbed enqueues have ended (J2), so
 * the WAL position of the fetch is later than their commits (J10).
 */
static bool
take_job(Fetch *fetch, IdemFetched *job)
{
	IdemTable *jobs = fetch->jobs;

	if (!is_due(fetch) ||
		idem_table_lock_row(jobs, jobs->found->tts_tid, LockTupleExclusive, LockWaitSkip) != TM_Ok)
		return false;
	if (idem_dead_make_if_spent(jobs, &fetch->args->queue, NULL) != IDEM_DEAD_NOT_SPENT)
		return false;
	job->attempt = idem_row_int32(jobs, IDEM_JOBS_ATTEMPT) + 1;
	job->job_id = idem_row_int64(jobs, IDEM_JOBS_JOB_ID);
	job->token = idem_clock_next_token(idem_row_int64(jobs, IDEM_JOBS_TOKEN), fetch->now);
	job->max_attempts = idem_jobrow_max_attempts(jobs, &fetch->args->queue);
	job->queue = fetch->args->queue.name;
	job->payload = idem_row_jsonb(jobs, IDEM_JOBS_PAYLOAD);
	job->key = idem_row_text(jobs, IDEM_JOBS_KEY);
	job->enqueued_at = idem_row_timestamp(jobs, IDEM_JOBS_ENQUEUED_AT);
	update_job(fetch, job);
	/* J10: later than the commits of the absorbed enqueues */
	job->lsn = XactLastRecEnd;
	return true;
}

/* Take the job of the current entry if it is due, and pass it to put() */
static bool
fetch_job(Fetch *fetch, void (*put)(const IdemFetched *job, void *arg), void *arg)
{
	MemoryContext oldcontext;
	IdemFetched job;
	bool taken;

	if (!index_fetch_heap(fetch->scan, fetch->jobs->found))
		return false;
	oldcontext = MemoryContextSwitchTo(fetch->job_context);
	taken = take_job(fetch, &job);
	if (taken)
	{
		put(&job, arg);
		idem_counters_add_queue(fetch->args->queue.name, IDEM_QUEUE_COUNTER_FETCHED);
	}
	MemoryContextSwitchTo(oldcontext);
	MemoryContextReset(fetch->job_context);
	return taken;
}

/* The scan has reached an entry with another priority than the last one */
static void
enter_priority(Fetch *fetch, int priority)
{
	if (fetch->part == PART_BEFORE_HINT || fetch->part == PART_REST)
	{
		leave_priority(fetch);
		/* the pages read for this entry may have held dead entries of its own priority */
		fetch->npages = fetch->npages_last;
	}
	fetch->priority = priority;
}

/* Scan the index until the batch is full.  An entry with a future run_at ends its priority. */
static void
scan_queue(Fetch *fetch, void (*put)(const IdemFetched *job, void *arg), void *arg)
{
	fetch->priority = ANY_PRIORITY;
	fetch->nskipped = fetch->npages = 0;
	begin_next_priorities(fetch, ANY_PRIORITY);
	while (fetch->found < fetch->args->batch)
	{
		IndexEntry entry;

		if (!get_next_entry(fetch, &entry))
		{
			/* the part after this one has the same priority */
			if (fetch->part != PART_AT_HINT)
				leave_priority(fetch);
			if (!begin_next_part(fetch))
				break;
			continue;
		}
		if (entry.priority != fetch->priority)
			enter_priority(fetch, entry.priority);
		if (entry.run_at > fetch->now)
		{
			leave_priority(fetch);
			begin_next_priorities(fetch, entry.priority);
		}
		else if (fetch_job(fetch, put, arg))
		{
			fetch->found++;
			keep_hint(fetch, &entry);
			fetch->nskipped = fetch->npages = 0;
		}
		else
		{
			fetch->nskipped++;
			fetch->skipped = entry;
		}
	}
	end_scan(fetch);
}

/*
 * Fetch jobs that are due, in the order of the index, at most a batch, and pass
 * each one to put().  A paused queue has none.
 */
void
idem_fetchstore_fetch(IdemTable *jobs, const IdemFetch *args,
					  void (*put)(const IdemFetched *job, void *arg), void *arg)
{
	Fetch fetch = {.jobs = jobs, .args = args};

	if (args->queue.paused)
		return;
	InitDirtySnapshot(fetch.dirty);
	fetch.index = idem_jobtable_fetch_index(jobs);
	fetch.now = idem_clock_now();
	fetch.started = idem_clock_steady();
	fetch.queue_hash = hash_bytes_extended((const unsigned char *) VARDATA_ANY(args->queue.name),
										   VARSIZE_ANY_EXHDR(args->queue.name), 0);
	fetch.job_context = AllocSetContextCreate(CurrentMemoryContext, "idem fetch", ALLOCSET_DEFAULT_SIZES);

	fetch.use_hints = true;
	fetch.use_hints = find_hint(&fetch, ANY_PRIORITY) != NULL;
	scan_queue(&fetch, put, arg);
	/* jobs may have been added before the hints: scan the whole queue */
	if (fetch.use_hints && fetch.found < args->batch)
	{
		fetch.use_hints = false;
		scan_queue(&fetch, put, arg);
	}
	MemoryContextDelete(fetch.job_context);

	/*
	 * J10: a worker may wait until a replica has replayed the position that fetch
	 * returned.  Without a lease this transaction commits only after the work, so
	 * let the WAL writer flush the position soon.
	 */
	if (args->lease == 0 && fetch.found > 0)
		XLogSetAsyncXactLSN(XactLastRecEnd);
}
