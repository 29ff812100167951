/*
 * counters.c
 *		Count answers and times of jobs, and log duplicates.
 *
 * Each answer is counted once, when it is given (S1).  The answer to a claim that is
 * rolled back later stays counted, as pg_stat_all_tables counts rows of an INSERT
 * that was rolled back.  A backend looks up where to count for its database and for each
 * queue once.  From then on counting is an addition to an atomic variable.
 *
 * The background worker repeats work that has failed.  So its counts are buffered
 * until its transaction has ended, and dropped if the transaction was rolled back.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "utils/memutils.h"

#include "stats/stats.h"

StaticAssertDecl(IDEM_DATABASE_COUNTER_N <= IDEM_NCOUNTERS &&
					 IDEM_QUEUE_COUNTER_N <= IDEM_NCOUNTERS,
				 "there is a place for every counter");

/* Where this backend counts for a queue, and what fetches skip there */
typedef struct QueueSlot
{
	text *queue; /* hash key */
	char status;
	IdemCounters *counters;	   /* NULL: there is no room */
	IdemHistogram *histograms; /* NULL as above */
	IdemSkips *skips;		   /* shared if there is room, else of this backend; NULL: none yet */
	uint32 nforgotten;		   /* value of idem_shmem_nforgotten() when there was no room */
	uint32 buffered[IDEM_QUEUE_COUNTER_N];
} QueueSlot;

static bool
is_same_queue(const text *a, const text *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

#define SH_PREFIX		queueslots
#define SH_ELEMENT_TYPE QueueSlot
#define SH_KEY_TYPE		text *
#define SH_KEY			queue
#define SH_HASH_KEY(tb, key) \
	hash_bytes((const unsigned char *) VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key))
#define SH_EQUAL(tb, a, b) is_same_queue(a, b)
#define SH_SCOPE		   static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

/* A backend that has counted for this many queues forgets them and looks them up again */
#define MAX_QUEUE_SLOTS 1024

static queueslots_hash *queue_slots = NULL;
static MemoryContext queue_context = NULL; /* of queue_slots and the names in it */

static bool is_buffering = false;
static uint32 buffered[IDEM_DATABASE_COUNTER_N];

/* Where this backend counts for its database */
static const IdemCounterSlot *
get_database_slot(void)
{
	static bool is_known = false;
	static IdemCounterSlot slot;

	if (!is_known)
	{
		slot = idem_shmem_get_slot(MyDatabaseId, NULL);
		is_known = true;
	}
	return &slot;
}

/* Let the launcher know that this database has the extension, if it assumes otherwise (W5) */
void
idem_counters_note_use(void)
{
	const IdemCounterSlot *slot = get_database_slot();

	if (slot->used != NULL && unlikely(!*slot->used))
		*slot->used = true;
}

static void
add_to_database(IdemDatabaseCounter counter, int n)
{
	const IdemCounterSlot *slot = get_database_slot();

	idem_counters_note_use();
	if (slot->counters != NULL)
		pg_atomic_fetch_add_u64(&slot->counters->values[counter], n);
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

/* Create an empty table of queues, and free the old one */
static void
create_queue_slots(void)
{
	/* an error below must not leave a pointer to memory that was freed */
	queue_slots = NULL;
	if (queue_context == NULL)
		queue_context = AllocSetContextCreate(TopMemoryContext, "idem queue counters",
											  ALLOCSET_SMALL_SIZES);
	MemoryContextReset(queue_context);
	queue_slots = queueslots_create(queue_context, 16, NULL);
}

/* Look up the entry of the queue in shared memory, where others may have made room since */
static void
look_up_entry(QueueSlot *slot)
{
	IdemCounterSlot entry;

	/* read this first: an entry that is made after the lookup changes it */
	slot->nforgotten = idem_shmem_nforgotten();
	entry = idem_shmem_get_slot(MyDatabaseId, slot->queue);
	slot->counters = entry.counters;
	slot->histograms = entry.histograms;
	if (entry.skips != NULL)
		slot->skips = entry.skips;
}

static QueueSlot *
get_queue_slot(const text *queue)
{
	QueueSlot *slot = NULL;
	bool found;

	if (queue_slots != NULL)
		slot = queueslots_lookup(queue_slots, unconstify(text *, queue));
	if (slot != NULL)
		return slot;

	if (queue_slots == NULL || (queue_slots->members >= MAX_QUEUE_SLOTS && !is_buffering))
		create_queue_slots();
	queue =
		memcpy(MemoryContextAlloc(queue_context, VARSIZE_ANY(queue)), queue, VARSIZE_ANY(queue));
	slot = queueslots_insert(queue_slots, unconstify(text *, queue), &found);
	slot->counters = NULL;
	slot->histograms = NULL;
	slot->skips = NULL;
	slot->nforgotten = 0;
	memset(slot->buffered, 0, sizeof(slot->buffered));
	look_up_entry(slot);
	return slot;
}

/*
 * The skip ranges of a queue (J14).  If there is no room for them in shared memory, this
 * backend has its own, which other backends do not see.
 */
IdemSkips *
idem_counters_get_skips(const text *queue, bool *is_shared)
{
	QueueSlot *slot = get_queue_slot(queue);

	if (slot->counters == NULL)
	{
		pg_memory_barrier();
		if (slot->nforgotten != idem_shmem_nforgotten())
			look_up_entry(slot);
	}
	if (slot->skips == NULL)
	{
		slot->skips = MemoryContextAlloc(queue_context, sizeof(IdemSkips));
		idem_skips_init(slot->skips);
	}
	*is_shared = slot->counters != NULL;
	return slot->skips;
}

/* Add one to a counter of a queue; returns where this backend counts for it, or NULL */
static QueueSlot *
add_to_queue(const text *queue, IdemQueueCounter counter)
{
	QueueSlot *slot;

	if (!idem_shmem_exists())
		return NULL;
	idem_counters_note_use();
	slot = get_queue_slot(queue);
	if (unlikely(is_buffering))
		slot->buffered[counter]++;
	else if (slot->counters != NULL)
		pg_atomic_fetch_add_u64(&slot->counters->values[counter], 1);
	return slot;
}

/* Add one to a counter of a queue (S1) */
void
idem_counters_add_queue(const text *queue, IdemQueueCounter counter)
{
	(void) add_to_queue(queue, counter);
}

/*
 * Add one to a counter of a queue, and the time between the two to a histogram of it (S1, S5).
 * The background worker fetches no jobs and ends no attempts, so times are not buffered.
 */
void
idem_counters_add_queue_time(const text *queue, IdemQueueCounter counter, IdemHistogramKind kind,
							 TimestampTz from, TimestampTz to)
{
	QueueSlot *slot = add_to_queue(queue, counter);

	if (slot != NULL && slot->histograms != NULL)
		idem_histogram_add(&slot->histograms[kind], from, to);
}

/* Buffer all counts until idem_counters_flush() */
void
idem_counters_buffer(void)
{
	is_buffering = true;
}

static void
flush_queue(QueueSlot *slot, bool committed)
{
	for (int i = 0; i < IDEM_QUEUE_COUNTER_N; i++)
	{
		if (committed && slot->buffered[i] != 0 && slot->counters != NULL)
			pg_atomic_fetch_add_u64(&slot->counters->values[i], slot->buffered[i]);
		slot->buffered[i] = 0;
	}
}

/* The transaction has ended: add the buffered counts, or drop them (S1) */
void
idem_counters_flush(bool committed)
{
	queueslots_iterator iterator;
	QueueSlot *slot;

	is_buffering = false;
	for (int i = 0; i < IDEM_DATABASE_COUNTER_N; i++)
	{
		if (committed && buffered[i] != 0)
			add_to_database(i, buffered[i]);
		buffered[i] = 0;
	}
	if (queue_slots == NULL)
		return;
	queueslots_start_iterate(queue_slots, &iterator);
	while ((slot = queueslots_iterate(queue_slots, &iterator)) != NULL)
		flush_queue(slot, committed);
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
