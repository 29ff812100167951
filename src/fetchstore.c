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
 * Entries of jobs that have ended stay in the index while somebody holds an
 * old snapshot.  Who had to pass over many of them remembers for a second where
 * the first job was (struct Place) and begins there.  That is only a guess about
 * where to begin; whether a job is due is read off its row.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs.h"

/* From how many entries passed over on it is worth while to remember the place */
#define MANY_ENTRIES 64

/* Where the first job of a priority was found, of queues with this hash */
typedef struct Place
{
	uint32 queue_hash;
	int priority;
	TimestampTz run_at;
	TimestampTz good_until; /* by the clock of the machine */
} Place;

static Place places[16];

/* An entry of the index */
typedef struct Entry
{
	int priority;
	TimestampTz run_at;
} Entry;

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
	bool use_place;
	bool at_place; /* the scan began at the place */
	bool jumped;   /* some entries were left out */
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

/* Begin at the entries of the queue that fit these conditions, besides that on the queue */
static void
begin_scan(Fetch *fetch, StrategyNumber strategy, int priority, TimestampTz run_at, int nconditions)
{
	ScanKeyData keys[3];

	end_scan(fetch);
	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(fetch->args->queue.name));
	ScanKeyInit(&keys[1], 2, strategy, strategy == BTEqualStrategyNumber ? F_INT4EQ : F_INT4GT,
				Int32GetDatum(priority));
	ScanKeyInit(&keys[2], 3, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE, TimestampTzGetDatum(run_at));
	fetch->scan = idem_compat_index_beginscan(fetch->jobs->heap, fetch->index, &fetch->dirty, 1 + nconditions);
	fetch->scan->xs_want_itup = true;
	index_rescan(fetch->scan, keys, 1 + nconditions, NULL, 0);
}

static void
go_to_start(Fetch *fetch)
{
	begin_scan(fetch, BTGreaterStrategyNumber, 0, 0, 0);
}

static void
go_beyond(Fetch *fetch, int priority)
{
	begin_scan(fetch, BTGreaterStrategyNumber, priority, 0, 1);
}

static void
go_to_place(Fetch *fetch)
{
	begin_scan(fetch, BTEqualStrategyNumber, fetch->place->priority, fetch->place->run_at, 2);
}

static bool
next_entry(Fetch *fetch, Entry *entry)
{
	IndexScanDesc scan = fetch->scan;
	bool isnull;

	CHECK_FOR_INTERRUPTS();
	if (index_getnext_tid(scan, ForwardScanDirection) == NULL)
		return false;
	entry->priority = DatumGetInt32(index_getattr(scan->xs_itup, 2, scan->xs_itupdesc, &isnull));
	entry->run_at = DatumGetTimestampTz(index_getattr(scan->xs_itup, 3, scan->xs_itupdesc, &isnull));
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
	const IdemQueue *queue = &fetch->args->queue;

	if (!is_due(fetch) ||
		idem_table_lock(jobs, jobs->found->tts_tid, LockTupleExclusive, LockWaitSkip) != TM_Ok)
		return false;
	job->attempt = idem_row_int32(jobs, IDEM_JOBS_ATTEMPT) + 1;
	if (job->attempt > idem_jobrow_max_attempts(jobs, queue))
	{
		idem_jobstore_bury(jobs, queue, cstring_to_text("The lease of the last attempt ran out."));
		return false;
	}
	job->job_id = idem_row_int64(jobs, IDEM_JOBS_JOB_ID);
	job->token = idem_clock_next_token(idem_row_int64(jobs, IDEM_JOBS_TOKEN), fetch->now);
	job->payload = idem_row_jsonb(jobs, IDEM_JOBS_PAYLOAD);
	job->key = idem_row_text(jobs, IDEM_JOBS_KEY);
	job->enqueued_at = idem_row_timestamp(jobs, IDEM_JOBS_ENQUEUED_AT);
	/* whoever has had the job absorb a duplicate has committed before this */
	job->lsn = GetXLogInsertRecPtr();
	update_job(fetch, job);
	return true;
}

/*
 * Jump over entries that are not worth a look: one for later ends its priority,
 * and what is known to lie before the first job is left out.
 */
static bool
jump(Fetch *fetch, const Entry *entry)
{
	if (entry->run_at > fetch->now)
	{
		fetch->at_place = false;
		go_beyond(fetch, entry->priority);
		return true;
	}
	if (fetch->use_place && !fetch->at_place &&
		entry->priority == fetch->place->priority && entry->run_at < fetch->place->run_at)
	{
		fetch->at_place = fetch->jumped = true;
		go_to_place(fetch);
		return true;
	}
	return false;
}

/*
 * The job was found behind many entries: remember where.  A place that was
 * found from another one is as good as that was, and not for longer.
 */
static void
remember_place(Fetch *fetch, const Entry *entry)
{
	fetch->place->priority = entry->priority;
	fetch->place->run_at = entry->run_at;
	if (!fetch->at_place)
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
		put(&job, arg);
	MemoryContextSwitchTo(oldcontext);
	MemoryContextReset(fetch->job_context);
	return taken;
}

/* Go along the index until there are enough jobs */
static void
scan_queue(Fetch *fetch, void (*put)(const IdemFetched *job, void *arg), void *arg)
{
	Entry last = {0};
	int passed = 0;

	fetch->at_place = fetch->jumped = false;
	go_to_start(fetch);
	while (fetch->found < fetch->args->batch)
	{
		Entry entry;

		if (!next_entry(fetch, &entry))
		{
			if (!fetch->at_place)
				break;
			fetch->at_place = false;
			go_beyond(fetch, fetch->place->priority);
			continue;
		}
		if (jump(fetch, &entry))
			continue;
		if (entry.priority != last.priority)
			passed = 0;
		last = entry;
		if (!fetch_job(fetch, put, arg))
			passed++;
		else
		{
			fetch->found++;
			if (passed > MANY_ENTRIES)
				remember_place(fetch, &entry);
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
	fetch.place = find_place(args->queue.name);
	fetch.use_place = GetCurrentTimestamp() < fetch.place->good_until;
	fetch.job_context = AllocSetContextCreate(CurrentMemoryContext, "idem fetch", ALLOCSET_DEFAULT_SIZES);

	scan_queue(&fetch, put, arg);
	if (fetch.found < args->batch && fetch.jumped)
	{
		/* before the place may be more than there was */
		fetch.use_place = false;
		scan_queue(&fetch, put, arg);
	}
	MemoryContextDelete(fetch.job_context);
}
