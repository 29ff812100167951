/*
 * jobstore.c
 *		Cancel, retry and show a job by its number; cancel and show the jobs of a key (J19).
 *
 * These need no token.  Cancel and retry wait for a transaction that is changing
 * the job, as long as lock_timeout allows.
 */
#include "postgres.h"

#include "lib/binaryheap.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/row/job.h"

/*
 * Cancel a job, also if a worker has fetched it.  This waits for a transaction
 * that runs the job, and for transactions whose duplicates the job has absorbed.
 * The mark makes the job drain meanwhile (J1), so that no new duplicate prolongs
 * the wait.
 */
bool
idem_jobstore_cancel(IdemTable *jobs, int64 job_id)
{
	IdemQueue queue = {0};
	IdemEnd end = {.state = "cancelled"};
	IdemJob job;
	bool found;

	idem_jobtable_mark_cancel(job_id);
	do
	{
		found = idem_jobrow_find(jobs, job_id, &job, &queue);
		if (found)
			idem_touched_held(queue.ref, false);
	} while (found && idem_table_delete(jobs, job.row, true) != TM_Ok);
	idem_jobtable_unmark_cancel(job_id);
	if (!found)
		return false;
	end.at = idem_clock_now();
	(void) idem_history_write(&job, &queue, &end, NULL);
	idem_jobrow_note_end(jobs, &job, queue.ref);
	idem_counters_add_queue(queue.ref, IDEM_QUEUE_COUNTER_CANCELLED);
	return true;
}

/* Retry a job that is dead or cancelled; false if there is no such job in the history */
bool
idem_jobstore_retry(IdemTable *jobs, int64 job_id)
{
	IdemTable log;
	IdemLookup lookup;
	IdemQueue queue = {0};
	IdemProbeResult probe;
	bool found;
	bool removed = false;

	idem_jobtable_open_log(&log, RowExclusiveLock);
	lookup = idem_jobtable_by_number(&log, job_id);
	do
	{
		idem_probe_existing(&log, &lookup, &probe);
		found = probe.found == IDEM_FOUND_ROW;
		if (found)
		{
			idem_queuestore_use_of_row(&log, probe.row, IDEM_JOB_LOG_QUEUE, &queue);
			found = idem_row_bool(probe.row, IDEM_JOB_LOG_RETRYABLE);
		}
		removed = found && idem_table_delete(&log, probe.row, true) == TM_Ok;
	} while (found && !removed);
	if (removed)
	{
		if (!idem_history_insert_again(jobs, probe.row))
			ereport(ERROR,
					errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("number of the job is in use again"),
					errdetail("Another job with the number " INT64_FORMAT " is live; the job in the history is older.", job_id),
					errhint("Enqueue the payload of the older job in idem.job_log as a new job; idem_doctor() shows how to correct the sequence."));
		idem_counters_add_queue(queue.ref, IDEM_QUEUE_COUNTER_RETRIED);
	}
	idem_table_close(&log);
	return removed;
}

/* The row that the snapshot of the statement shows, as a SELECT does; or NULL */
static TupleTableSlot *
find_visible(IdemTable *table, int64 job_id, AttrNumber queue_attno, IdemQueue *queue)
{
	IdemLookup lookup = idem_jobtable_by_number(table, job_id);
	TupleTableSlot *row = idem_table_row(table);
	IndexScanDesc scan;
	bool exists;

	idem_shard_check_job_shown(job_id, GetActiveSnapshot());
	scan = idem_probe_begin(table, &lookup, GetActiveSnapshot());
	exists = index_getnext_slot(scan, ForwardScanDirection, row);
	index_endscan(scan);
	if (!exists)
		return NULL;
	idem_queuestore_use_of_row(table, row, queue_attno, queue);
	return row;
}

/* Read a row of the history; queue: the settings of its queue */
static void
read_log(TupleTableSlot *row, const IdemQueue *queue, IdemJobInfo *info)
{
	int max_attempts = idem_row_int32(row, IDEM_JOB_LOG_MAX_ATTEMPTS);

	*info = (IdemJobInfo){0};
	info->job_id = idem_row_int64(row, IDEM_JOB_LOG_JOB_ID);
	info->queue = queue->name;
	info->state = text_to_cstring(idem_row_text(row, IDEM_JOB_LOG_STATE));
	info->key = idem_row_text(row, IDEM_JOB_LOG_KEY);
	info->payload = idem_row_jsonb(row, IDEM_JOB_LOG_PAYLOAD);
	info->result = idem_row_jsonb(row, IDEM_JOB_LOG_RESULT);
	info->priority = idem_row_int32(row, IDEM_JOB_LOG_PRIORITY);
	info->attempt = idem_row_int32(row, IDEM_JOB_LOG_ATTEMPT);
	info->max_attempts = max_attempts != 0 ? max_attempts : queue->max_attempts;
	info->worker = idem_row_text(row, IDEM_JOB_LOG_WORKER);
	info->errors = idem_row_jsonb(row, IDEM_JOB_LOG_ERRORS);
	info->headers = idem_row_jsonb(row, IDEM_JOB_LOG_HEADERS);
	info->links = idem_row_jsonb(row, IDEM_JOB_LOG_LINKS);
	info->progress = idem_row_jsonb(row, IDEM_JOB_LOG_PROGRESS);
	info->started_at = idem_row_timestamp(row, IDEM_JOB_LOG_STARTED_AT);
	info->enqueued_at = idem_row_timestamp(row, IDEM_JOB_LOG_ENQUEUED_AT);
	info->ended_at = idem_row_timestamp(row, IDEM_JOB_LOG_ENDED_AT);
}

/* Read a job, live or in the history; false if there is none */
bool
idem_jobstore_get(IdemTable *jobs, int64 job_id, IdemJobInfo *info)
{
	IdemTable log;
	IdemQueue queue = {0};
	TupleTableSlot *row = find_visible(jobs, job_id, IDEM_JOBS_QUEUE, &queue);

	if (row != NULL)
	{
		IdemJob job;
		IdemJobState state;

		idem_job_read(&job, row);
		idem_jobrow_copy(&job, &queue, info);
		state = idem_jobrow_state(jobs, &job, GetActiveSnapshot(), idem_clock_now());
		info->state = idem_jobrow_state_words[state];
		info->worker = idem_row_text(row, IDEM_JOBS_WORKER);
		info->errors = idem_row_jsonb(row, IDEM_JOBS_ERRORS);
		info->run_at = job.run_at;
		info->started_at = idem_job_started_at(&job);
		info->lease_until = job.lease_until;
		return true;
	}
	idem_jobtable_open_log(&log, AccessShareLock);
	row = find_visible(&log, job_id, IDEM_JOB_LOG_QUEUE, &queue);
	if (row != NULL)
		read_log(row, &queue, info);
	idem_table_close(&log);
	return row != NULL;
}

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

/*
 * Add the live jobs of the key that the snapshot shows.  Jobs that ignore their key belong to it,
 * too: they are found at the complement of the hash (J8).  A job that belongs to another shard was
 * left behind, and may be live there: it is neither shown nor cancelled (M2).  A key of another
 * shard, or of one that was not here, is refused (M2, M4).
 */
static void
find_live(IdemTable *jobs, const IdemJobKey *key, Snapshot snapshot, Numbers *numbers)
{
	const IdemShard *shard;
	int64 key_hash = idem_hash_name(key->queue, key->key);
	int64 hashes[] = {key_hash, idem_jobrow_ignored_hash(key_hash)};

	(void) idem_shard_choose_slot(key->scope, key->key);
	idem_shard_check_key_shown(key->scope, key->key, snapshot);
	shard = idem_shard_get();
	for (int i = 0; i < (int) lengthof(hashes); i++)
	{
		IdemLookup lookup =
			idem_jobtable_by_key(jobs, idem_jobtable_index(jobs, IDEM_INDEX_KEY), hashes[i]);
		IndexScanDesc scan = idem_probe_begin(jobs, &lookup, snapshot);
		TupleTableSlot *row = idem_table_row(jobs);

		while (index_getnext_slot(scan, ForwardScanDirection, row))
		{
			int64 job_id = idem_row_int64(row, IDEM_JOBS_JOB_ID);

			CHECK_FOR_INTERRUPTS();
			if (idem_shard_has_job(shard, job_id) &&
				idem_jobrow_has_key(row, IDEM_JOBS_QUEUE, key->queue, key->key, NULL))
				add_number(numbers, job_id);
		}
		index_endscan(scan);
	}
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
idem_jobstore_cancel_by_key(IdemTable *jobs, const IdemJobKey *key)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	MemoryContext job_context =
		AllocSetContextCreate(CurrentMemoryContext, "idem job", ALLOCSET_DEFAULT_SIZES);
	Numbers numbers = {0};
	int n = 0;

	find_live(jobs, key, snapshot, &numbers);
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
	int64 ids[] = {DatumGetInt64(a), DatumGetInt64(b)};

	return compare_numbers(&ids[1], &ids[0]);
}

/*
 * J19: pass the jobs of the key to put(), as the snapshot of the statement shows them: first
 * the live ones, newest number first, then the ended ones, last end first; at most so many.
 */
void
idem_jobstore_list_by_key(IdemTable *jobs, const IdemJobKey *key, int max_jobs,
						  void (*put)(const IdemJobInfo *info, void *arg), void *arg)
{
	Numbers numbers = {.newest = binaryheap_allocate(max_jobs, compare_for_heap, NULL)};
	const IdemShard *shard;
	IdemJobInfo info;
	IdemQueue queue;
	IdemTable log;
	IdemLookup lookup;
	IndexScanDesc scan;
	TupleTableSlot *row;

	find_live(jobs, key, GetActiveSnapshot(), &numbers);
	numbers.n = numbers.newest->bh_size;
	numbers.ids = palloc_array(int64, numbers.n);
	for (int i = numbers.n - 1; i >= 0; i--)
		numbers.ids[i] = DatumGetInt64(binaryheap_remove_first(numbers.newest));
	for (int i = 0; i < numbers.n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		/* the same snapshot shows it again */
		if (idem_jobstore_get(jobs, numbers.ids[i], &info))
			put(&info, arg);
	}
	max_jobs -= numbers.n;
	if (max_jobs == 0)
		return;

	shard = idem_shard_get();
	idem_queuestore_use(key->queue, &queue);
	idem_jobtable_open_log(&log, AccessShareLock);
	lookup = idem_jobtable_by_key(&log, idem_jobtable_index(&log, IDEM_INDEX_LOG_KEY),
								  idem_hash_name(key->queue, key->key));
	scan = idem_probe_begin(&log, &lookup, GetActiveSnapshot());
	row = idem_table_row(&log);
	while (max_jobs > 0 && index_getnext_slot(scan, BackwardScanDirection, row))
	{
		CHECK_FOR_INTERRUPTS();
		if (!idem_shard_has_job(shard, idem_row_int64(row, IDEM_JOB_LOG_JOB_ID)) ||
			!idem_jobrow_has_key(row, IDEM_JOB_LOG_QUEUE, key->queue, key->key, NULL))
			continue;
		read_log(row, &queue, &info);
		put(&info, arg);
		max_jobs--;
	}
	index_endscan(scan);
	idem_table_close(&log);
}
