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
#include "common/hashfn.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "utils/memutils.h"

#include "stats/stats.h"

StaticAssertDecl(IDEM_DATABASE_COUNTER_N <= IDEM_NCOUNTERS &&
					 IDEM_QUEUE_COUNTER_N <= IDEM_NCOUNTERS,
				 "there is a place for every counter");

/* What counts for a queue if the transaction commits */
typedef struct Pending
{
	uint32 counts[IDEM_QUEUE_COUNTER_N];
	IdemHistogram histograms[IDEM_HISTOGRAM_N];
} Pending;

/* Where this backend counts for a queue, and what fetches skip there */
typedef struct QueueSlot
{
	text *queue;
	IdemCounterSlot entry; /* no counters: there was none; it may have given way unless pinned */
	uint64 nmade;		   /* idem_entries_nmade() when the entry was last looked for; 0: never */
	IdemSkips *own_skips;  /* of this backend, while there is no entry; NULL: none yet */
	bool own_are_old;	   /* others have noted their changes elsewhere since */

	/* For this transaction: */
	struct QueueSlot *next; /* in "in_use" */
	bool is_in_use;
	bool is_pinned;			  /* the entry cannot give way */
	SubTransactionId used_by; /* the first that used it and was not rolled back; 0: none */
	Pending *pending;		  /* in TopTransactionContext; NULL: nothing */
} QueueSlot;

typedef struct QueueName
{
	text *queue; /* hash key */
	char status;
	QueueSlot *slot;
} QueueName;

static bool
is_same_queue(const text *a, const text *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

#define SH_PREFIX		queueslots
#define SH_ELEMENT_TYPE QueueName
#define SH_KEY_TYPE		text *
#define SH_KEY			queue
#define SH_HASH_KEY(tb, key) \
	hash_bytes((const unsigned char *) VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key))
#define SH_EQUAL(tb, a, b) is_same_queue(a, b)
#define SH_SCOPE		   static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

/*
 * A backend that knows this many queues at the end of a transaction forgets them and looks them up
 * again.  Within a transaction it remembers twice as many, and all that have entries.
 */
#define MAX_QUEUE_SLOTS 1024

static queueslots_hash *queue_slots = NULL;
static MemoryContext queue_context = NULL; /* of queue_slots, and of slots, names and skips */
static QueueSlot *in_use = NULL;		   /* by this transaction */
static QueueSlot nameless;				   /* of the queues for which there is no slot */

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
		slot = idem_entries_get_database();
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

/* Create an empty table of queues */
static void
create_queue_slots(void)
{
	if (queue_context == NULL)
		queue_context = AllocSetContextCreate(TopMemoryContext, "idem queue counters",
											  ALLOCSET_SMALL_SIZES);
	queue_slots = queueslots_create(queue_context, 16, NULL);
}

/* Is there no slot for another queue that has no entry? */
static bool
is_beyond(const text *queue)
{
	IdemCounterSlot entry;

	if (likely(queue_slots->members < 2 * MAX_QUEUE_SLOTS))
		return false;
	entry = idem_entries_pin_queue(queue, IDEM_MAKE_NEVER);
	if (entry.counters == NULL)
		return true;
	idem_entries_unpin(&entry);
	return false;
}

/* The slot of the queue, which this transaction may not have used yet */
static QueueSlot *
get_queue_slot(const text *queue)
{
	QueueName *name;
	QueueSlot *slot;
	bool found;

	if (unlikely(queue_slots == NULL))
		create_queue_slots();
	name = queueslots_lookup(queue_slots, unconstify(text *, queue));
	if (likely(name != NULL))
		return name->slot;
	if (is_beyond(queue))
		return &nameless;
	slot = MemoryContextAllocZero(queue_context, sizeof(QueueSlot));
	slot->queue =
		memcpy(MemoryContextAlloc(queue_context, VARSIZE_ANY(queue)), queue, VARSIZE_ANY(queue));
	name = queueslots_insert(queue_slots, slot->queue, &found);
	name->slot = slot;
	return slot;
}

/* Add what is pending for the queue to its entry, which is pinned */
static void
add_pending(QueueSlot *slot)
{
	for (int i = 0; i < IDEM_QUEUE_COUNTER_N; i++)
	{
		if (slot->pending->counts[i] != 0)
			pg_atomic_fetch_add_u64(&slot->entry.counters->values[i], slot->pending->counts[i]);
	}
	idem_histogram_merge(slot->entry.histograms, slot->pending->histograms);
	slot->pending = NULL;
}

/* The slot has an entry, which is pinned */
static void
note_pinned(QueueSlot *slot)
{
	slot->is_pinned = true;
	slot->own_are_old = true;
	if (slot->pending != NULL && !is_buffering)
		add_pending(slot);
}

/*
 * S2: pin the entry of the queue, if it has one.
 *
 * J14: a writer calls this after it has written a job.  If it finds no entry, the entry that
 * another transaction makes later is empty, and a walker of it sees the job.
 */
static void
pin_entry(QueueSlot *slot)
{
	uint64 nmade;

	if (slot->entry.counters == NULL || !idem_entries_pin(&slot->entry))
	{
		pg_memory_barrier();
		/* read this first: an entry that is made after the lookup changes it */
		nmade = idem_entries_nmade();
		if (slot->entry.counters == NULL && slot->nmade == nmade)
			return;
		slot->nmade = nmade;
		slot->entry = idem_entries_pin_queue(slot->queue, IDEM_MAKE_NEVER);
		if (slot->entry.counters == NULL)
			return;
	}
	note_pinned(slot);
}

/* The slot of a queue that this transaction uses, with its entry pinned if there is one */
static QueueSlot *
use_queue(const text *queue)
{
	QueueSlot *slot = get_queue_slot(queue);

	if (likely(slot->is_pinned) || slot == &nameless || !idem_entries_exist())
		return slot;
	if (!slot->is_in_use)
	{
		slot->is_in_use = true;
		slot->next = in_use;
		in_use = slot;
	}
	if (slot->used_by == InvalidSubTransactionId)
		slot->used_by = GetCurrentSubTransactionId();
	pin_entry(slot);
	return slot;
}

/*
 * The skip ranges of a queue (J14).  If it has no entry in shared memory, this backend has its
 * own, which other backends do not see.
 */
IdemSkips *
idem_counters_get_skips(const text *queue, bool *is_shared)
{
	QueueSlot *slot = use_queue(queue);

	*is_shared = slot->is_pinned;
	if (slot->is_pinned)
		return slot->entry.skips;
	if (slot->own_skips == NULL)
	{
		slot->own_skips = MemoryContextAlloc(slot == &nameless ? TopMemoryContext : queue_context,
											 sizeof(IdemSkips));
		slot->own_are_old = true;
	}
	/* without a slot each call may be about another queue */
	if (slot->own_are_old || slot == &nameless)
		idem_skips_init(slot->own_skips);
	slot->own_are_old = false;
	return slot->own_skips;
}

/* What is pending for the queue; NULL: it is not counted */
static Pending *
get_pending(QueueSlot *slot)
{
	if (slot->pending == NULL && slot != &nameless)
	{
		slot->pending = MemoryContextAllocZero(TopTransactionContext, sizeof(Pending));
		idem_histogram_init(slot->pending->histograms);
		if (slot->used_by == InvalidSubTransactionId)
			slot->used_by = GetCurrentSubTransactionId();
	}
	return slot->pending;
}

/* S1: add one to a counter of a queue; returns its histograms, or NULL */
static IdemHistogram *
add_to_queue(const text *queue, IdemQueueCounter counter)
{
	QueueSlot *slot;
	Pending *pending;

	if (!idem_entries_exist())
		return NULL;
	idem_counters_note_use();
	slot = use_queue(queue);
	if (likely(slot->is_pinned && !is_buffering))
	{
		pg_atomic_fetch_add_u64(&slot->entry.counters->values[counter], 1);
		return slot->entry.histograms;
	}
	pending = get_pending(slot);
	if (pending == NULL)
		return NULL;
	pending->counts[counter]++;
	return pending->histograms;
}

/* Add one to a counter of a queue (S1) */
void
idem_counters_add_queue(const text *queue, IdemQueueCounter counter)
{
	(void) add_to_queue(queue, counter);
}

/* Add one to a counter of a queue, and the time between the two to a histogram of it (S1, S5) */
void
idem_counters_add_queue_time(const text *queue, IdemQueueCounter counter, IdemHistogramKind kind,
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

/* The slot has an entry from now on, which is pinned.  It knows of the fetches so far (H3). */
static void
note_made(QueueSlot *slot)
{
	if (slot->own_skips != NULL && !slot->own_are_old)
	{
		TimestampTz fetched_at = idem_skips_last_fetch(slot->own_skips);

		if (fetched_at > idem_skips_last_fetch(slot->entry.skips))
			idem_skips_note_fetch(slot->entry.skips, fetched_at);
	}
	slot->is_pinned = true;
	slot->own_are_old = true;
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

	for (QueueSlot *slot = in_use; slot != NULL; slot = slot->next)
	{
		IdemMakeEntry make = slot->pending != NULL ? IDEM_MAKE_ROOM : IDEM_MAKE_IF_FREE;

		if (!slot->is_pinned && slot->used_by != InvalidSubTransactionId && make > failed)
		{
			slot->entry = idem_entries_pin_queue(slot->queue, make);
			if (slot->entry.counters != NULL)
				note_made(slot);
			else
				failed = make;
		}
		if (slot->is_pinned && slot->pending != NULL)
			add_pending(slot);
	}
	for (int i = 0; i < IDEM_DATABASE_COUNTER_N; i++)
	{
		if (buffered[i] != 0)
			add_to_database(i, buffered[i]);
	}
}

/* The transaction has ended */
static void
forget_transaction(void)
{
	for (QueueSlot *slot = in_use; slot != NULL; slot = slot->next)
	{
		if (slot->is_pinned)
			idem_entries_unpin(&slot->entry);
		slot->is_pinned = slot->is_in_use = false;
		slot->used_by = InvalidSubTransactionId;
		slot->pending = NULL;
	}
	in_use = NULL;
	is_buffering = false;
	memset(buffered, 0, sizeof(buffered));
	if (queue_slots != NULL && queue_slots->members >= MAX_QUEUE_SLOTS)
	{
		queue_slots = NULL;
		MemoryContextReset(queue_context);
	}
}

/* A prepared transaction counts when it is prepared (S1): its memory ends then */
static void
at_xact_event(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_PREPARE:
			count_pending();
			forget_transaction();
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PARALLEL_ABORT:
			forget_transaction();
			break;
		default:
			break;
	}
}

/*
 * S1: a subtransaction was rolled back: what it has counted does not count for the queues that it
 * was the first to use.  Subtransactions that began later were part of it.
 */
static void
at_subxact_event(SubXactEvent event, SubTransactionId subid, SubTransactionId parent_subid,
				 void *arg)
{
	if (event != SUBXACT_EVENT_ABORT_SUB)
		return;
	for (QueueSlot *slot = in_use; slot != NULL; slot = slot->next)
	{
		if (slot->used_by >= subid)
		{
			slot->used_by = InvalidSubTransactionId;
			slot->pending = NULL;
		}
	}
}

void
idem_counters_init(void)
{
	RegisterXactCallback(at_xact_event, NULL);
	RegisterSubXactCallback(at_subxact_event, NULL);
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
