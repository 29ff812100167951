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
 * while somebody holds an old snapshot.  Who had to pass over many of them
 * remembers for a second where the first job was (struct Place) and begins
 * there.  That is only a guess about where to begin; whether a job is due is read
 * off its row.
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

#include "jobs.h"

/*
 * From how many entries passed over, or pages read, on it is worth while to
 * remember the place.  Entries that are known to be dead are not even seen; they
 * show as pages.
 */
#define MANY_ENTRIES 64
#define MANY_PAGES	 16

/* Where the first job of a priority was found, of queues with this hash */
typedef struct Place
{
	uint32 queue_hash;
	int priority;
	TimestampTz run_at;
	int64 job_id;
	TimestampTz good_until; /* by the clock of the machine */
} Place;

static Place places[16];

/* An entry of the index */
typedef struct Entry
{
	int priority;
	TimestampTz run_at;
	int64 job_id;
} Entry;

/* Parts of a queue, in the order in which they are gone through */
typedef enum Part
{
	BEFORE_PLACE, /* priorities before that of the place */
	AT_PLACE,	  /* what is due at the same time, from there on */
	AFTER_PLACE,  /* what is due later, in its priority */
	THE_REST	  /* without a place: all */
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
	Place *place;
	Part part;
	int64 passed; /* entries passed over since the last job */
	int64 pages;  /* pages of the index read since */
	int found;
	MemoryContext job_context; /* for what one job needs */
} Fetch;

static Place *
find_place(const text *queue)
{
	uint32 hash = hash_bytes((const unsigned char *) VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue));
	Place *place = &places[hash % lengthof(places)];

	if (place->queue_hash != hash)
	{
		memset(place, 0, sizeof(*place));
		place->queue_hash = hash;
	}
	return place;
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
	const Place *place = fetch->place;
	ScanKeyData keys[4];
	int n = 0;

	end_scan(fetch);
	fetch->part = part;
	ScanKeyInit(&keys[n++], 1, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(fetch->args->queue.name));
	if (above != ANY_PRIORITY)
		ScanKeyInit(&keys[n++], 2, BTGreaterStrategyNumber, F_INT4GT, Int32GetDatum((int) above));
	if (part == BEFORE_PLACE)
		ScanKeyInit(&keys[n++], 2, BTLessStrategyNumber, F_INT4LT, Int32GetDatum(place->priority));
	if (part == AT_PLACE || part == AFTER_PLACE)
		ScanKeyInit(&keys[n++], 2, BTEqualStrategyNumber, F_INT4EQ, Int32GetDatum(place->priority));
	if (part == AT_PLACE)
	{
		ScanKeyInit(&keys[n++], 3, BTEqualStrategyNumber, F_TIMESTAMPTZ_EQ, TimestampTzGetDatum(place->run_at));
		ScanKeyInit(&keys[n++], 4, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(place->job_id));
	}
	if (part == AFTER_PLACE)
		ScanKeyInit(&keys[n++], 3, BTGreaterStrategyNumber, F_TIMESTAMPTZ_GT, TimestampTzGetDatum(place->run_at));
	fetch->scan = idem_compat_index_beginscan(fetch->jobs->heap, fetch->index, &fetch->dirty, n);
	fetch->scan->xs_want_itup = true;
	index_rescan(fetch->scan, keys, n, NULL, 0);
}

/* Go on where the present part ends; false if it was the last one */
static bool
go_to_next_part(Fetch *fetch)
{
	switch (fetch->part)
	{
		case BEFORE_PLACE:
			go_to(fetch, AT_PLACE, ANY_PRIORITY);
			return true;
		case AT_PLACE:
			go_to(fetch, AFTER_PLACE, ANY_PRIORITY);
			return true;
		case AFTER_PLACE:
			go_to(fetch, THE_REST, fetch->place->priority);
			return true;
		case THE_REST:
			return false;
	}
	pg_unreachable();
}

static int64
pages_read(void)
{
	return pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read;
}

static bool
next_entry(Fetch *fetch, Entry *entry)
{
	IndexScanDesc scan = fetch->scan;
	int64 before = pages_read();
	bool found;
	bool isnull;

	CHECK_FOR_INTERRUPTS();
	found = index_getnext_tid(scan, ForwardScanDirection) != NULL;
	fetch->pages += pages_read() - before;
	if (!found)
		return false;
	entry->priority = DatumGetInt32(index_getattr(scan->xs_itup, 2, scan->xs_itupdesc, &isnull));
	entry->run_at = DatumGetTimestampTz(index_getattr(scan->xs_itup, 3, scan->xs_itupdesc, &isnull));
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
		return idem_row_timestamp(jobs, IDEM_JOBS_LEASE_UNTIL) <= fetch->now && !idem_row_is_mine(jobs);
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
		idem_table_lock(jobs, jobs->found->tts_tid, LockTupleExclusive, LockWaitSkip) != TM_Ok)
		return false;
	if (idem_jobstore_bury_spent(jobs, &fetch->args->queue, NULL) != IDEM_NOT_SPENT)
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

/*
 * If the job was found behind many entries, remember where.  A place that was
 * found from another one is as good as that was, and not for longer.
 */
static void
remember_place(Fetch *fetch, const Entry *entry)
{
	bool from_place = fetch->part == AT_PLACE || fetch->part == AFTER_PLACE;

	if (!from_place && fetch->passed <= MANY_ENTRIES && fetch->pages <= MANY_PAGES)
		return;
	fetch->place->priority = entry->priority;
	fetch->place->run_at = entry->run_at;
	fetch->place->job_id = entry->job_id;
	if (!from_place)
		fetch->place->good_until = GetCurrentTimestamp() + USECS_PER_SEC;
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
		idem_stats_count_queue(fetch->args->queue.name, IDEM_QUEUE_STAT_FETCHED);
	}
	MemoryContextSwitchTo(oldcontext);
	MemoryContextReset(fetch->job_context);
	return taken;
}

/*
 * Go along the index until there are enough jobs.  An entry for later ends its
 * priority.
 */
static void
scan_queue(Fetch *fetch, void (*put)(const IdemFetched *job, void *arg), void *arg)
{
	int priority = 0;

	while (fetch->found < fetch->args->batch)
	{
		Entry entry;

		if (!next_entry(fetch, &entry))
		{
			if (!go_to_next_part(fetch))
				break;
			continue;
		}
		if (entry.run_at > fetch->now)
		{
			go_to(fetch, fetch->part == BEFORE_PLACE ? BEFORE_PLACE : THE_REST, entry.priority);
			continue;
		}
		if (entry.priority != priority)
			fetch->passed = fetch->pages = 0;
		priority = entry.priority;
		if (!fetch_job(fetch, put, arg))
		{
			fetch->passed++;
			continue;
		}
		fetch->found++;
		remember_place(fetch, &entry);
		fetch->passed = fetch->pages = 0;
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
	fetch.place = find_place(args->queue.name);
	fetch.job_context = AllocSetContextCreate(CurrentMemoryContext, "idem fetch", ALLOCSET_DEFAULT_SIZES);

	if (GetCurrentTimestamp() < fetch.place->good_until)
	{
		go_to(&fetch, BEFORE_PLACE, ANY_PRIORITY);
		scan_queue(&fetch, put, arg);
	}
	/* before the place may be more than there was */
	if (fetch.found < args->batch)
	{
		go_to(&fetch, THE_REST, ANY_PRIORITY);
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
