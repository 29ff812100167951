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
 * unlock all hashes.  No transaction waits for another one while it holds these locks.  The
 * key that ended the run is then enqueued alone (enqueuestore.c), which may wait.  At that time
 * all jobs before it in the order are enqueued, and none after it.
 *
 * The entries in the other indexes follow later (write.c), in the order of the job
 * numbers, so that they go to the right end of the index.  They are inserted before a
 * job is enqueued alone, because that may change a job of the batch.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/memutils.h"

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

/* A job in the order in which the jobs are enqueued */
typedef struct Element
{
	bool takes_key;
	int64 key_hash; /* 0 if it takes no key */
	const text *key;
	int ord; /* position in the array */
} Element;

/* A call of idem_enqueue_many() */
typedef struct Bulk
{
	IdemTable *jobs;
	Relation index; /* on the hash; NULL if no job takes its key */
	const IdemEnqueue *enqueue;
	const IdemNewJob *news;
	IdemEnqueued *answers;
	Element *elements;
	int n;
	int *ord; /* position of the current job, for the error context */
	IdemBatch *batch;
	bool expect_new; /* the last job was new, so the next one may begin a run */
} Bulk;

/* Equal hashes are compared by key, equal keys by position; jobs without a key come first */
static int
compare_elements(const void *a, const void *b)
{
	const Element *ea = a;
	const Element *eb = b;
	int cmp = 0;

	if (ea->takes_key != eb->takes_key)
		return ea->takes_key ? 1 : -1;
	if (ea->key_hash != eb->key_hash)
		return ea->key_hash < eb->key_hash ? -1 : 1;
	if (ea->takes_key)
	{
		int la = VARSIZE_ANY_EXHDR(ea->key);
		int lb = VARSIZE_ANY_EXHDR(eb->key);

		cmp = memcmp(VARDATA_ANY(ea->key), VARDATA_ANY(eb->key), Min(la, lb));
		if (cmp == 0)
			cmp = la - lb;
	}
	return cmp != 0 ? cmp : ea->ord - eb->ord;
}

/* J9: the order in which the jobs are enqueued.  Locks the TOAST table if a row may need it. */
static void
order_jobs(Bulk *bulk)
{
	bulk->elements = MemoryContextAllocExtended(
		CurrentMemoryContext, bulk->n * sizeof(Element), MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
	for (int i = 0; i < bulk->n; i++)
	{
		Element *element = &bulk->elements[i];

		CHECK_FOR_INTERRUPTS();
		element->ord = i;
		element->key = bulk->news[i].key;
		element->takes_key = idem_enqueuestore_takes_key(bulk->enqueue, element->key);
		/* also without a key: its row may be written under the locks on the hashes of others */
		idem_enqueuestore_lock_toast(bulk->jobs, &bulk->news[i]);
		if (!element->takes_key)
			continue;
		element->key_hash = idem_hash_name(bulk->enqueue->queue.name, element->key);
		if (bulk->index == NULL)
			bulk->index = idem_jobtable_key_index(bulk->jobs);
	}
	qsort(bulk->elements, bulk->n, sizeof(Element), compare_elements);
}

/* Is the key new?  If it is, its hash stays locked. */
static bool
lock_if_new(Bulk *bulk, const Element *element, IdemTable *keys)
{
	IdemSameHash others;
	IdemKeyedEnqueue keyed = {
		.enqueue = bulk->enqueue,
		.job = &bulk->news[element->ord],
		.key_hash = element->key_hash,
		.keys = keys,
		.others = &others};

	idem_table_lock_hash(bulk->jobs, element->key_hash);
	if (idem_enqueuestore_is_absent(bulk->jobs, bulk->index, &keyed))
		return true;
	idem_table_unlock_hash(bulk->jobs, element->key_hash);
	return false;
}

/*
 * Add new jobs to the batch, as long as their keys are new; returns their number.  The
 * hashes of their keys stay locked, in ascending order (J9).  A key that is not new ends the
 * run, and so does a hash that the run has already: the lookup does not find jobs of the run.
 */
static int
gather_run(Bulk *bulk, const Element *run, int max, IdemTable *keys)
{
	Size size = 0;
	int n;

	for (n = 0; n < max && size < MAX_RUN_SIZE; n++)
	{
		TupleTableSlot *row;

		CHECK_FOR_INTERRUPTS();
		*bulk->ord = run[n].ord;
		if (run[n].takes_key)
		{
			if (n > 0 && run[n - 1].takes_key && run[n - 1].key_hash == run[n].key_hash)
				break;
			if (!lock_if_new(bulk, &run[n], keys))
				break;
		}
		row = idem_enqueuestore_fill_row(bulk->jobs, bulk->enqueue, &bulk->news[run[n].ord],
										 run[n].key_hash, run[n].takes_key, 0);
		size += idem_write_add(bulk->batch, row, run[n].ord);
		bulk->answers[run[n].ord] = (IdemEnqueued){.job_id = bulk->news[run[n].ord].job_id};
	}
	return n;
}

/*
 * Insert a run of new jobs; returns their number, 0 if the key of the first is not new.  J9: no
 * transaction waits for another one while it holds locks on hashes.
 */
static int
insert_run(Bulk *bulk, const Element *run, int max)
{
	bool with_keys =
		bulk->index != NULL && bulk->enqueue->policy.dedup == IDEM_DEDUP_UNTIL_EXPIRED;
	IdemTable keys;
	int n;

	max = Min(max, Min(MAX_RUN_JOBS, max_locks_per_xact / 2));
	max = Min(max, IDEM_BATCH_ROWS - bulk->batch->n);
	if (with_keys)
		idem_jobtable_open_keys(&keys, AccessShareLock);
	n = gather_run(bulk, run, max, with_keys ? &keys : NULL);
	idem_write_rows(bulk->batch, IDEM_JOBS_KEY_HASH);
	for (int i = 0; i < n; i++)
	{
		const IdemBatchRow *row = &bulk->batch->rows[bulk->batch->n - n + i];

		if (!run[i].takes_key)
			continue;
		idem_jobrow_note_place(bulk->enqueue->queue.name, run[i].key_hash, &row->slot->tts_tid);
		idem_table_unlock_hash(bulk->jobs, run[i].key_hash);
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
	if (!idem_write_other_entries(bulk->batch, IDEM_JOBS_KEY_HASH, bulk->ord))
		idem_jobtable_refuse_number();
	for (int i = 0; i < n; i++)
	{
		idem_jobrow_note_new(enqueue, bulk->news[ords[i]].job_id);
		idem_counters_add_queue(idem_queueref_get(enqueue->queue.name), IDEM_QUEUE_COUNTER_ENQUEUED);
	}
}

/* Enqueue one job, whose key is probably not new */
static void
enqueue_alone(Bulk *bulk, const Element *element, MemoryContext result_context)
{
	IdemEnqueued *answer = &bulk->answers[element->ord];

	finish_batch(bulk);
	*bulk->ord = element->ord;
	idem_enqueuestore_enqueue(bulk->jobs, bulk->enqueue, &bulk->news[element->ord], answer);
	bulk->expect_new = answer->outcome == IDEM_OUTCOME_ENQUEUED;
	if (answer->result != NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(result_context);

		answer->result = DatumGetJsonbPCopy(JsonbPGetDatum(answer->result));
		MemoryContextSwitchTo(oldcontext);
	}
}

/*
 * Enqueue the jobs, which have their numbers (J9).  An error context of the caller shows
 * the position *ord.
 */
void
idem_bulk_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *news,
				  IdemEnqueued *answers, int n, int *ord)
{
	Bulk bulk = {
		.jobs = jobs,
		.enqueue = enqueue,
		.news = news,
		.answers = answers,
		.n = n,
		.ord = ord,
		.expect_new = true};
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem enqueue", ALLOCSET_DEFAULT_SIZES);
	MemoryContext oldcontext;
	int done = 0;

	/* acquire every lock that may block before the locks on the hashes */
	idem_table_open_indexes(jobs);
	order_jobs(&bulk);
	bulk.batch = idem_write_begin_batch(jobs);
	oldcontext = MemoryContextSwitchTo(context);
	while (done < n)
	{
		int run = 0;

		if (bulk.batch->n == IDEM_BATCH_ROWS || bulk.batch->size >= MAX_BATCH_SIZE)
			finish_batch(&bulk);
		if (bulk.expect_new)
			run = insert_run(&bulk, &bulk.elements[done], n - done);
		if (run == 0)
			enqueue_alone(&bulk, &bulk.elements[done], oldcontext);
		done += Max(run, 1);
		MemoryContextReset(context);
	}
	finish_batch(&bulk);
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(context);
	idem_write_end_batch(bulk.batch);
}
