/*
 * counters.c
 *		Count answers and times of jobs, and log duplicates.
 *
 * Each answer is counted once, when it is given (S1).  The answer to a claim that is
 * rolled back later stays counted, as pg_stat_all_tables counts rows of an INSERT
 * that was rolled back.  A backend looks up where to count for its database and for each
 * queue once.  From then on counting is an addition to an atomic variable.
 *
 * Queues get their entries from transactions that commit, so that calls that are rolled back
 * cannot fill the shared memory (S2).  What a transaction counts for a queue without an entry is
 * pending until then.  When it commits, it makes the entry.  An entry may give way to that of
 * another queue, so a transaction pins the entries that it uses until its end.
 *
 * The background worker repeats work that has failed.  So all its counts are pending until its
 * transaction has committed.
 */
#include "postgres.h"

#include "access/xact.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "utils/memutils.h"

#include "stats/stats.h"

StaticAssertDecl(IDEM_DATABASE_COUNTER_N <= IDEM_NCOUNTERS &&
					 IDEM_QUEUE_COUNTER_N <= IDEM_NCOUNTERS,
				 "there is a place for every counter");

/* What counts for a queue if the transaction commits */
typedef struct IdemPending
{
	uint32 counts[IDEM_QUEUE_COUNTER_N];
	IdemHistogram histograms[IDEM_HISTOGRAM_N];
} IdemPending;

static bool is_buffering = false;
static uint32 buffered[IDEM_DATABASE_COUNTER_N];

/* Where this backend counts for its database */
static const IdemEntryRef *
get_database_entry(void)
{
	static bool is_known = false;
	static IdemEntryRef entry;

	if (!is_known)
	{
		entry = idem_entries_get_database();
		is_known = true;
	}
	return &entry;
}

/* Let the launcher know that this database has the extension, if it assumes otherwise (W5) */
void
idem_counters_note_use(void)
{
	const IdemEntryRef *entry = get_database_entry();

	if (entry->used != NULL && unlikely(!*entry->used))
		*entry->used = true;
}

static void
add_to_database(IdemDatabaseCounter counter, int n)
{
	const IdemEntryRef *entry = get_database_entry();

	idem_counters_note_use();
	if (entry->counters != NULL)
		pg_atomic_fetch_add_u64(&entry->counters->values[counter], n);
}

/* Add one to a counter of this database (S1) */
void
idem_counters_add(IdemDatabaseCounter counter)
{
	if (unlikely(is_buffering))
		buffered[counter]++;
	else
		add_to_database(counter, 1);
}

/* Add what is pending for the queue to its entry, which is pinned */
static void
add_pending(IdemQueueRef *queue)
{
	for (int i = 0; i < IDEM_QUEUE_COUNTER_N; i++)
	{
		if (queue->pending->counts[i] != 0)
			pg_atomic_fetch_add_u64(&queue->entry.counters->values[i], queue->pending->counts[i]);
	}
	idem_histogram_merge(queue->entry.histograms, queue->pending->histograms);
	queue->pending = NULL;
}

/* S1: add one to a counter of a queue; returns its histograms, or NULL */
static IdemHistogram *
add_to_queue(IdemQueueRef *queue, IdemQueueCounter counter)
{
	if (!idem_entries_exist())
		return NULL;
	idem_counters_note_use();
	if (likely(idem_queueref_pin(queue) && !is_buffering))
	{
		/* another transaction has made the entry since */
		if (unlikely(queue->pending != NULL))
			add_pending(queue);
		pg_atomic_fetch_add_u64(&queue->entry.counters->values[counter], 1);
		return queue->entry.histograms;
	}
	/* a handle that stands for several queues does not count */
	if (queue->name == NULL)
		return NULL;
	if (queue->pending == NULL)
	{
		queue->pending = MemoryContextAllocZero(TopTransactionContext, sizeof(IdemPending));
		idem_histogram_init(queue->pending->histograms);
		if (queue->used_by == InvalidSubTransactionId)
			queue->used_by = GetCurrentSubTransactionId();
	}
	queue->pending->counts[counter]++;
	return queue->pending->histograms;
}

/* Add one to a counter of a queue (S1) */
void
idem_counters_add_queue(IdemQueueRef *queue, IdemQueueCounter counter)
{
	(void) add_to_queue(queue, counter);
}

/* Add one to a counter of a queue, and the time between the two to a histogram of it (S1, S5) */
void
idem_counters_add_queue_time(IdemQueueRef *queue, IdemQueueCounter counter, IdemHistogramKind kind,
							 TimestampTz from, TimestampTz to)
{
	IdemHistogram *histograms = add_to_queue(queue, counter);

	if (histograms != NULL)
		idem_histogram_add(&histograms[kind], from, to);
}

/* The counts of the transaction that has begun are pending until it commits */
void
idem_counters_buffer(void)
{
	is_buffering = true;
}

/*
 * S1, S2: the transaction has committed: make the entries of the queues that it has used, and
 * count what is pending.  A transaction that has counted nothing for a queue takes no entry from
 * another one.  If there was no room for one queue, do not look for the next ones.  Never throws.
 */
static void
count_pending(void)
{
	IdemMakeEntry failed = IDEM_MAKE_NEVER;

	for (IdemQueueRef *queue = idem_queueref_used; queue != NULL; queue = queue->next)
	{
		IdemMakeEntry make = queue->pending != NULL ? IDEM_MAKE_ROOM : IDEM_MAKE_IF_FREE;

		if (!queue->is_pinned && queue->used_by != InvalidSubTransactionId && make > failed &&
			!idem_queueref_make_entry(queue, make))
			failed = make;
		if (queue->is_pinned && queue->pending != NULL)
			add_pending(queue);
	}
	for (int i = 0; i < IDEM_DATABASE_COUNTER_N; i++)
	{
		if (buffered[i] != 0)
			add_to_database(i, buffered[i]);
	}
}

/*
 * The transaction has ended, and unpins the entries that it has used.  A prepared transaction
 * counts when it is prepared (S1): its memory ends then.  Never throws.
 */
void
idem_counters_end_transaction(bool counts)
{
	if (counts)
		count_pending();
	idem_queueref_unpin_all();
	is_buffering = false;
	memset(buffered, 0, sizeof(buffered));
}

/*
 * S1: a subtransaction was rolled back: what it has counted does not count for the queues that it
 * was the first to use.  Subtransactions that began later were part of it.
 */
void
idem_counters_abort_sub(SubTransactionId subid)
{
	for (IdemQueueRef *queue = idem_queueref_used; queue != NULL; queue = queue->next)
	{
		if (queue->used_by >= subid)
		{
			queue->used_by = InvalidSubTransactionId;
			queue->pending = NULL;
		}
	}
}

/* Instead of the key (S3): 16 hex digits of the SHA-256 of name space, line feed and key */
static void
format_key_hash(const text *name_space, const text *key, char *hex)
{
	uint8 digest[IDEM_SHA256_LEN];
	StringInfoData id;

	initStringInfo(&id);
	appendBinaryStringInfo(&id, VARDATA_ANY(name_space), VARSIZE_ANY_EXHDR(name_space));
	appendStringInfoChar(&id, '\n');
	appendBinaryStringInfo(&id, VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key));
	idem_sha256_hash(id.data, id.len, digest);
	pfree(id.data);
	for (int i = 0; i < 8; i++)
		sprintf(hex + 2 * i, "%02x", digest[i]);
}

/*
 * With idem.log_duplicates, write one line to the server log, with a hash of the key
 * (S4).  The line does not contain the statement, which may show the key (S3).
 */
void
idem_counters_log_duplicate(const char *kind, const char *outcome, const text *name_space,
							const text *key)
{
	char hex[17];

	if (likely(!idem_guc_log_duplicates))
		return;
	format_key_hash(name_space, key, hex);
	ereport(LOG_SERVER_ONLY,
			errcode(ERRCODE_SUCCESSFUL_COMPLETION),
			errmsg("idem duplicate: kind=%s outcome=%s key_hash=%s", kind, outcome, hex),
			errhidestmt(true),
			errhidecontext(true));
}
