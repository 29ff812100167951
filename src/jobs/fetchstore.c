/*
 * fetchstore.c
 *		The protocol of fetch: which jobs are due, and how one gets hold of them.
 *
 * Goes along the index on (queue, priority, run_at, job_id) with a dirty
 * snapshot, so past the one of the transaction.  What another transaction is
 * changing, has locked or has not committed is passed over: fetch waits for
 * nobody.  What is due is locked FOR UPDATE before it is updated, because an
 * UPDATE alone does not conflict with the lock of who has the job absorb a
 * duplicate (dedup.c).
 *
 * Entries of jobs that have ended stay in the index until VACUUM, and longer
 * while a transaction holds an old snapshot.  A backend that skipped many entries of
 * a priority caches the position that it got to (struct IdemFetchHint) for one second, by
 * a clock that nobody can set, and starts there.  A position reached from a cached
 * one expires with that: each second there is a look at the whole queue.  The
 * cache only tells where to start; whether a job is due is read off its row.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "executor/instrument.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

/*
 * Cache the position after skipping this many entries or pages.  Entries that are
 * known to be dead are not even seen; they show as pages.
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

/* Parts of a queue, in the order in which they are gone through; the first three for each place */
typedef enum Part
{
	PART_BEFORE_HINT, /* priorities before that of the place */
	PART_AT_HINT,	  /* what is due at the same time, from there on */
	PART_AFTER_HINT,  /* what is due later, in its priority */
	PART_REST		  /* when there is no place any more: all */
} Part;

/* Not a priority, but before all of them */
#define ANY_PRIORITY ((int64) PG_INT32_MIN - 1)

/* A fetch under way */
typedef struct Fetch
{
	IdemTable *jobs;
	const IdemFetch *args;
	Relation index;
	SnapshotData dirty;
	IndexScanDesc scan; /* NULL: at the end */
	TimestampTz now;
	int64 started; /* by the steady clock */
	uint64 queue_hash;
	bool use_hints;
	IdemFetchHint hint; /* where the present part lies */
	Part part;
	int64 priority;		/* of the last entry */
	IndexEntry skipped; /* the last one, if there was one in this priority since the last job */
	int64 nskipped;		/* entries skipped in this priority since the last job */
	int64 npages;		/* pages of the index read meanwhile */
	int64 npages_last;	/* of these by the last step */
	int found;
	MemoryContext job_context; /* for what one job needs */
} Fetch;

/* The first hint of the queue in a priority above this one, or NULL */
static const IdemFetchHint *
find_hint(const Fetch *fetch, int64 above)
{
	return fetch->use_hints ? idem_fetchhint_find(fetch->queue_hash, above, fetch->started) : NULL;
}

/*
 * Start here next time, if it was worth while: the entry of a job that was taken,
 * or the last one of a priority in which there was none.  Whoever began at a place
 * hands on when that expires.
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

/* Go to the jobs of a part of the queue, and there to those of a priority above this one */
static void
go_to(Fetch *fetch, Part part, int64 above)
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

/* Go on with the priorities above this one, up to the next place if there is one */
static void
go_above(Fetch *fetch, int64 above)
{
	const IdemFetchHint *hint = find_hint(fetch, above);

	if (hint != NULL)
		fetch->hint = *hint;
	go_to(fetch, hint != NULL ? PART_BEFORE_HINT : PART_REST, above);
}

/* Go on where the present part ends; false if it was the last one */
static bool
go_to_next_part(Fetch *fetch)
{
	switch (fetch->part)
	{
		case PART_BEFORE_HINT:
			go_to(fetch, PART_AT_HINT, ANY_PRIORITY);
			return true;
		case PART_AT_HINT:
			go_to(fetch, PART_AFTER_HINT, ANY_PRIORITY);
			return true;
		case PART_AFTER_HINT:
			go_above(fetch, fetch->hint.priority);
			return true;
		case PART_REST:
			return false;
	}
	pg_unreachable();
}

/* A priority ends here, or what is due in it does */
static void
leave_priority(Fetch *fetch)
{
	if (fetch->nskipped > 0)
		keep_hint(fetch, &fetch->skipped);
	fetch->nskipped = fetch->npages = 0;
}

static int64
pages_read(void)
{
	return pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read;
}

static bool
next_entry(Fetch *fetch, IndexEntry *entry)
{
	IndexScanDesc scan = fetch->scan;
	int64 before = pages_read();
	bool found;
	bool isnull;

	CHECK_FOR_INTERRUPTS();
	found = index_getnext_tid(scan, ForwardScanDirection) != NULL;
	fetch->npages_last = pages_read() - before;
	fetch->npages += fetch->npages_last;
	if (!found)
		return false;
	entry->priority = DatumGetInt32(index_getattr(scan->xs_itup, 2, scan->xs_itupdesc, &isnull));
	entry->run_at =
		DatumGetTimestampTz(index_getattr(scan->xs_itup, 3, scan->xs_itupdesc, &isnull));
	entry->job_id = DatumGetInt64(index_getattr(scan->xs_itup, 4, scan->xs_itupdesc, &isnull));
	return true;
}

/* Is the job found to be had?  Not if this transaction has fetched it already. */
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

/* Get hold of the job found, if it is to be had */
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
	/* whoever has had the job absorb a duplicate has committed before we locked it */
	job->lsn = XactLastRecEnd;
	return true;
}

/* Look at the job of an entry, take it if it is due, and hand it on */
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

/* Come to an entry of another priority than the last one */
static void
enter_priority(Fetch *fetch, int priority)
{
	if (fetch->part == PART_BEFORE_HINT || fetch->part == PART_REST)
	{
		leave_priority(fetch);
		/* entries before it in its priority may have been dead */
		fetch->npages = fetch->npages_last;
	}
	fetch->priority = priority;
}

/*
 * Go along the index until there are enough jobs.  An entry for later ends its
 * priority.
 */
static void
scan_queue(Fetch *fetch, void (*put)(const IdemFetched *job, void *arg), void *arg)
{
	fetch->priority = ANY_PRIORITY;
	fetch->nskipped = fetch->npages = 0;
	go_above(fetch, ANY_PRIORITY);
	while (fetch->found < fetch->args->batch)
	{
		IndexEntry entry;

		if (!next_entry(fetch, &entry))
		{
			/* what is due at the time of the place and after it is one priority */
			if (fetch->part != PART_AT_HINT)
				leave_priority(fetch);
			if (!go_to_next_part(fetch))
				break;
			continue;
		}
		if (entry.priority != fetch->priority)
			enter_priority(fetch, entry.priority);
		if (entry.run_at > fetch->now)
		{
			leave_priority(fetch);
			go_above(fetch, entry.priority);
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

/* Fetch jobs that are due, in their order, at most a batch, and hand each one on */
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
	/* before the places may be more than there was */
	if (fetch.use_hints && fetch.found < args->batch)
	{
		fetch.use_hints = false;
		scan_queue(&fetch, put, arg);
	}
	MemoryContextDelete(fetch.job_context);

	/*
	 * A replica may be waiting for the position that was handed out, and without
	 * a lease it is a while until we commit: let it be written soon.
	 */
	if (args->lease == 0 && fetch.found > 0)
		XLogSetAsyncXactLSN(XactLastRecEnd);
}
