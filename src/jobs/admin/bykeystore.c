/*
 * bykeystore.c
 *		List and cancel the jobs of a key (J19).
 *
 * Jobs whose key enqueues ignore (J8) belong to the key, too.  A job that belongs to another
 * shard (M2) was left behind, and may be live there: it is neither shown nor cancelled.
 */
#include "postgres.h"

#include "access/genam.h"
#include "lib/binaryheap.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "jobs/admin/jobadmin.h"

/* Numbers of jobs.  If only the newest ones are wanted, the heap has the oldest of them on top. */
typedef struct Numbers
{
	int n;
	int max;
	int64 *ids;
	binaryheap *newest; /* NULL: all are wanted, in ids */
} Numbers;

static void
add_number(Numbers *numbers, int64 job_id)
{
	binaryheap *newest = numbers->newest;

	if (newest != NULL)
	{
		if (newest->bh_size < newest->bh_space)
			binaryheap_add(newest, Int64GetDatum(job_id));
		else if (DatumGetInt64(binaryheap_first(newest)) < job_id)
			binaryheap_replace_first(newest, Int64GetDatum(job_id));
		return;
	}
	if (numbers->n == numbers->max)
	{
		numbers->max = Max(2 * numbers->max, 64);
		numbers->ids = numbers->ids == NULL ?
			palloc_array(int64, numbers->max) :
			repalloc_huge(numbers->ids, numbers->max * sizeof(int64));
	}
	numbers->ids[numbers->n++] = job_id;
}

/* Add the live jobs of the key that the snapshot shows, and that stand at this hash */
static void
find_live(IdemTable *jobs, const IdemJobKey *key, int64 key_hash, Snapshot snapshot,
		  Numbers *numbers)
{
	const IdemShard *shard = idem_shard_get();
	IdemLookup lookup = idem_jobtable_by_key(jobs, idem_jobtable_key_index(jobs), key_hash);
	IndexScanDesc scan = idem_probe_begin(jobs, &lookup, snapshot);

	while (index_getnext_slot(scan, ForwardScanDirection, jobs->found))
	{
		int64 job_id = idem_row_int64(jobs->found, IDEM_JOBS_JOB_ID);

		CHECK_FOR_INTERRUPTS();
		if (idem_shard_has_job(shard, job_id) &&
			idem_jobrow_has_key(jobs, IDEM_JOBS_QUEUE, key->queue, key->key, NULL))
			add_number(numbers, job_id);
	}
	index_endscan(scan);
}

/* M2, M4: refuse a key of another shard, or of one that was not here.  Then find its live jobs. */
static void
find_all_live(IdemTable *jobs, const IdemJobKey *key, Snapshot snapshot, Numbers *numbers)
{
	int64 key_hash = idem_hash_name(key->queue, key->key);

	(void) idem_shard_choose_slot(key->scope, key->key);
	idem_shard_check_key_shown(key->scope, key->key, snapshot);
	find_live(jobs, key, key_hash, snapshot, numbers);
	find_live(jobs, key, idem_jobrow_ignored_hash(key_hash), snapshot, numbers);
}

static int
compare_numbers(const void *a, const void *b)
{
	int64 ia = *(const int64 *) a;
	int64 ib = *(const int64 *) b;

	return ia < ib ? -1 : ia > ib;
}

/*
 * J19: cancel the jobs of the key that are live when the call begins, one after the other,
 * each as idem_jobstore_cancel() does.  All calls take them in the same order, so that two
 * of them do not deadlock.  Returns how many were cancelled.
 */
int
idem_bykeystore_cancel(IdemTable *jobs, const IdemJobKey *key)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	MemoryContext job_context =
		AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	Numbers numbers = {0};
	int n = 0;

	find_all_live(jobs, key, snapshot, &numbers);
	UnregisterSnapshot(snapshot);
	if (numbers.n > 0)
		qsort(numbers.ids, numbers.n, sizeof(int64), compare_numbers);
	for (int i = 0; i < numbers.n; i++)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(job_context);

		CHECK_FOR_INTERRUPTS();
		n += idem_jobstore_cancel(jobs, numbers.ids[i]);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(job_context);
	}
	return n;
}

/* The oldest job goes on top of the heap */
static int
compare_for_heap(Datum a, Datum b, void *arg)
{
	return DatumGetInt64(a) < DatumGetInt64(b) ? 1 : DatumGetInt64(a) > DatumGetInt64(b) ? -1 :
																						   0;
}

/* Pass the newest live jobs of the key to put(); returns how many there are */
static int
list_live(IdemTable *jobs, const IdemJobKey *key, int max_jobs,
		  void (*put)(const IdemJobInfo *info, void *arg), void *arg)
{
	Numbers numbers = {.newest = binaryheap_allocate(max_jobs, compare_for_heap, NULL)};
	int n;

	find_all_live(jobs, key, GetActiveSnapshot(), &numbers);
	n = numbers.newest->bh_size;
	numbers.ids = palloc_array(int64, n);
	for (int i = n - 1; i >= 0; i--)
		numbers.ids[i] = DatumGetInt64(binaryheap_remove_first(numbers.newest));
	for (int i = 0; i < n; i++)
	{
		IdemJobInfo info;

		CHECK_FOR_INTERRUPTS();
		/* the same snapshot shows it again */
		if (idem_jobstore_get(jobs, numbers.ids[i], &info))
			put(&info, arg);
	}
	return n;
}

/* Pass the jobs of the key that have ended to put(), the last one first */
static void
list_ended(const IdemJobKey *key, int max_jobs, void (*put)(const IdemJobInfo *info, void *arg),
		   void *arg)
{
	const IdemShard *shard = idem_shard_get();
	IdemQueue queue;
	IdemTable log;
	IdemLookup lookup;
	IndexScanDesc scan;

	idem_queuestore_use(key->queue, &queue);
	idem_jobtable_open_log(&log, AccessShareLock);
	lookup = idem_jobtable_by_key(&log, idem_jobtable_log_key_index(&log),
								  idem_hash_name(key->queue, key->key));
	scan = idem_probe_begin(&log, &lookup, GetActiveSnapshot());
	while (max_jobs > 0 && index_getnext_slot(scan, BackwardScanDirection, log.found))
	{
		IdemJobInfo info;

		CHECK_FOR_INTERRUPTS();
		if (!idem_shard_has_job(shard, idem_row_int64(log.found, IDEM_JOB_LOG_JOB_ID)) ||
			!idem_jobrow_has_key(&log, IDEM_JOB_LOG_QUEUE, key->queue, key->key, NULL))
			continue;
		idem_jobstore_read_log(&log, &queue, &info);
		put(&info, arg);
		max_jobs--;
	}
	index_endscan(scan);
	idem_table_close(&log);
}

/*
 * J19: pass the jobs of the key to put(), as the snapshot of the statement shows them: first
 * the live ones, newest number first, then the ended ones, last end first; at most so many.
 */
void
idem_bykeystore_list(IdemTable *jobs, const IdemJobKey *key, int max_jobs,
					 void (*put)(const IdemJobInfo *info, void *arg), void *arg)
{
	int n = list_live(jobs, key, max_jobs, put, arg);

	if (n < max_jobs)
		list_ended(key, max_jobs - n, put, arg);
}
