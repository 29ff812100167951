/*
 * bulk.c
 *		Enqueue many jobs in one call.
 *
 * The jobs are enqueued in the order of the hashes of their keys, which is also the order
 * of the locks on the hashes.  So two calls that have keys in common cannot deadlock (J9):
 * neither over these locks nor because one waits for the transaction of the other.
 *
 * Most keys are new.  A run of new keys is written together: for each key in turn, lock
 * its hash and look for jobs of the key; at the first key that is not new, or when the
 * run is long enough, insert the rows and their entries in the index on the hash, and
 * unlock all hashes.  The key that ended the run is then enqueued alone (enqueuestore.c), which
 * may wait.  At that time all jobs before it in the order are enqueued, and none after it.
 *
 * The entries in the other indexes follow later (table.c), in the order of the job
 * numbers, so that they go to the right end of the index.  They are inserted before a
 * job is enqueued alone, because that may change a job of the batch.
 */
#include "postgres.h"

#include "catalog/pg_collation.h"
#include "storage/lock.h"
#include "utils/memutils.h"
#include "utils/varlena.h"

#include "jobs/enqueue/enqueue.h"

/*
 * Limits of a run.  Its locks are in the shared lock table, which has room for
 * max_locks_per_transaction locks (64 by default) of each session; and other sessions may
 * wait for them.
 */
#define MAX_RUN_JOBS 32
#define MAX_RUN_SIZE (64 * 1024)

/* The most bytes of rows that wait for their index entries */
#define MAX_BATCH_SIZE (1024 * 1024)

/* A call of idem_enqueue_many() */
typedef struct Bulk
{
	IdemTable *jobs;
	Relation index; /* on the hash; NULL if no job holds its key */
	const IdemEnqueue *enqueue;
	IdemNewJob *news; /* in the order of the array */
	int *ord;		  /* position of the current job in the array, for the error context */
	IdemBatch *batch;
} Bulk;

/* Jobs that hold no key come first; equal hashes are compared by key, equal keys by position */
static int
compare_jobs(const void *a, const void *b)
{
	const IdemNewJob *ja = *(IdemNewJob *const *) a;
	const IdemNewJob *jb = *(IdemNewJob *const *) b;
	int cmp = 0;

	if (ja->holds_key != jb->holds_key)
		return ja->holds_key ? 1 : -1;
	if (ja->holds_key && ja->key_hash != jb->key_hash)
		return ja->key_hash < jb->key_hash ? -1 : 1;
	if (ja->holds_key)
		cmp = varstr_cmp(VARDATA_ANY(ja->key), VARSIZE_ANY_EXHDR(ja->key), VARDATA_ANY(jb->key),
						 VARSIZE_ANY_EXHDR(jb->key), C_COLLATION_OID);
	if (cmp == 0)
		cmp = ja < jb ? -1 : 1;
	return cmp;
}

/*
 * Insert a run of new jobs; returns their number, 0 if the key of the first is not new.  J9: no
 * transaction waits for another one while it holds locks on hashes.
 */
static int
insert_run(Bulk *bulk, IdemNewJob **run, int max)
{
	const IdemEnqueue *enqueue = bulk->enqueue;
	bool with_keys = bulk->index != NULL && enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED;
	IdemTable keys;
	Size size = 0;
	int n;

	max = Min(max, Min(MAX_RUN_JOBS, max_locks_per_xact / 2));
	max = Min(max, IDEM_BATCH_ROWS - bulk->batch->n);
	if (with_keys)
		idem_jobtable_open_keys(&keys, AccessShareLock);
	/* the hashes of the new keys stay locked, in ascending order */
	for (n = 0; n < max && size < MAX_RUN_SIZE; n++)
	{
		IdemNewJob *job = run[n];

		CHECK_FOR_INTERRUPTS();
		*bulk->ord = job - bulk->news;
		if (job->holds_key)
		{
			/* the scan does not find the jobs of the run, which have not been written yet */
			if (n > 0 && run[n - 1]->holds_key && run[n - 1]->key_hash == job->key_hash)
				break;
			idem_table_lock_hash(bulk->jobs, job->key_hash);
			if (!idem_enqueuestore_is_absent(bulk->jobs, bulk->index, with_keys ? &keys : NULL,
											 enqueue, job))
			{
				idem_table_unlock_hash(bulk->jobs, job->key_hash);
				break;
			}
		}
		size += idem_table_add(bulk->batch, idem_enqueuestore_form_row(bulk->jobs, enqueue, job, 0),
							   *bulk->ord);
		job->answer.job_id = job->job_id;
	}
	idem_table_write_rows(bulk->batch, IDEM_JOBS_KEY_HASH);
	for (int i = 0; i < n; i++)
	{
		const IdemBatchRow *row = &bulk->batch->rows[bulk->batch->n - n + i];

		if (!run[i]->holds_key)
			continue;
		idem_jobrow_note_place(enqueue->queue.ref, run[i]->key_hash, &row->slot->tts_tid);
		idem_table_unlock_hash(bulk->jobs, run[i]->key_hash);
	}
	if (with_keys)
		idem_table_close(&keys);
	return n;
}

/* Insert the index entries of the batch that are missing; note (J14) and count its jobs */
static void
finish_batch(Bulk *bulk)
{
	const IdemEnqueue *enqueue = bulk->enqueue;
	int n = bulk->batch->n;
	int ords[IDEM_BATCH_ROWS];

	for (int i = 0; i < n; i++)
		ords[i] = bulk->batch->rows[i].ord;
	if (!idem_table_write_entries(bulk->batch, IDEM_JOBS_KEY_HASH, bulk->ord))
		idem_jobtable_refuse_number();
	for (int i = 0; i < n; i++)
	{
		idem_jobrow_note_ready(enqueue->queue.ref,
							   &(IdemPosition){.priority = enqueue->priority,
											   .run_at = enqueue->run_at,
											   .job_id = bulk->news[ords[i]].job_id},
							   enqueue->run_at, false);
		idem_counters_add_queue(enqueue->queue.ref, IDEM_QUEUE_COUNTER_ENQUEUED);
	}
}

/*
 * Enqueue the jobs, which have their numbers, in the order of their hashes (J9).  An error
 * context of the caller shows the position *ord.
 */
void
idem_bulk_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, IdemNewJob *news, int n, int *ord)
{
	Bulk bulk = {.jobs = jobs, .enqueue = enqueue, .news = news, .ord = ord};
	IdemNewJob **order = MemoryContextAllocExtended(CurrentMemoryContext, n * sizeof(IdemNewJob *),
													MCXT_ALLOC_HUGE);
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem enqueue", ALLOCSET_DEFAULT_SIZES);
	MemoryContext oldcontext;
	bool expect_new = true; /* the last job was new, so the next one may begin a run */
	int done = 0;

	/* acquire every lock that may block before the locks on the hashes */
	idem_table_open_indexes(jobs);
	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		order[i] = &news[i];
		idem_enqueuestore_set_key(enqueue, &news[i]);
		/* also without a key: its row may be written under the locks on the hashes of others */
		idem_enqueuestore_lock_toast(jobs, &news[i]);
		if (news[i].holds_key && bulk.index == NULL)
			bulk.index = idem_jobtable_index(jobs, IDEM_INDEX_KEY);
	}
	qsort(order, n, sizeof(IdemNewJob *), compare_jobs);
	bulk.batch = idem_table_begin_batch(jobs);
	oldcontext = MemoryContextSwitchTo(context);
	while (done < n)
	{
		IdemNewJob *job = order[done];
		int run = 0;

		if (bulk.batch->n == IDEM_BATCH_ROWS || bulk.batch->size >= MAX_BATCH_SIZE)
			finish_batch(&bulk);
		if (expect_new)
			run = insert_run(&bulk, &order[done], n - done);
		done += Max(run, 1);
		if (run == 0)
		{
			/* the key is probably not new, and the enqueue may change a job of the batch */
			finish_batch(&bulk);
			*ord = job - news;
			idem_enqueuestore_enqueue(jobs, enqueue, job);
			expect_new = job->answer.outcome == IDEM_OUTCOME_ENQUEUED;
			job->answer.result = idem_args_copy_jsonb(job->answer.result, oldcontext);
		}
		MemoryContextReset(context);
	}
	finish_batch(&bulk);
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(context);
	idem_table_end_batch(bulk.batch);
}
