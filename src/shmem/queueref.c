/*
 * queueref.c
 *		What this backend knows about each queue: the handle of a queue (IdemQueueRef).
 *
 * A function that works on a queue looks its name up once, with idem_queueref_get(), and passes
 * the handle on.  The handle leads to the settings of the queue (which src/jobs keeps there), to
 * its counters (stats/counters.c) and skip ranges, to what the open transaction has touched
 * (wake/touched.c), and to the subject of those who wait.
 *
 * A handle is valid until the transaction ends: then a backend that knows too many queues forgets
 * all of them.  A procedure that has ended a transaction looks its queue up again.  A call of
 * idem_queue_drop(), an invalidation or the rollback of a subtransaction does not change handles.
 *
 * The entry of the queue in shared memory is another matter (S2).  It may come and go: queues get
 * entries from transactions that commit, a reset of the statistics removes the entries that no
 * transaction uses, and any entry may give way to that of another queue.  So a transaction pins
 * an entry before it uses it, and the pin lasts until the transaction ends.  A queue without an
 * entry may get one from another transaction at any time.  That is why a handle is not pinned
 * when it is looked up, but each time that it is used, until there is an entry.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "utils/memutils.h"

#include "shmem/shmem.h"

typedef struct QueueName
{
	text *name; /* hash key */
	char status;
	IdemQueueRef *ref;
} QueueName;

static bool
is_same_name(const text *a, const text *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

#define SH_PREFIX		queuenames
#define SH_ELEMENT_TYPE QueueName
#define SH_KEY_TYPE		text *
#define SH_KEY			name
#define SH_HASH_KEY(tb, key) \
	hash_bytes((const unsigned char *) VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key))
#define SH_EQUAL(tb, a, b) is_same_name(a, b)
#define SH_SCOPE		   static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

/*
 * A backend that knows this many queues at the end of a transaction forgets them and looks them up
 * again.  Within a transaction it remembers twice as many, and all that have entries.
 */
#define MAX_REFS 1024

static queuenames_hash *queue_names = NULL;
static MemoryContext ref_context = NULL; /* of queue_names, and of handles, names and skips */
static IdemQueueRef nameless;			 /* of the queues for which there is no handle */

/* The handles that the open transaction has used */
IdemQueueRef *idem_queueref_used = NULL;

/* Is there no handle for another queue that has no entry? */
static bool
is_beyond(const text *name)
{
	IdemEntryRef entry;

	if (likely(queue_names->members < 2 * MAX_REFS))
		return false;
	entry = idem_entries_pin_queue(name, IDEM_MAKE_NEVER);
	if (entry.counters == NULL)
		return true;
	idem_entries_unpin(&entry);
	return false;
}

/*
 * The handle of a queue, declared or not.  The open transaction may have used it, or not yet.  A
 * transaction that names very many queues gets the same handle, without a name, for the last of
 * them.
 */
IdemQueueRef *
idem_queueref_get(const text *name)
{
	QueueName *known;
	IdemQueueRef *ref;
	bool found;

	if (unlikely(queue_names == NULL))
	{
		if (ref_context == NULL)
			ref_context = AllocSetContextCreate(TopMemoryContext, "idem queues", ALLOCSET_SMALL_SIZES);
		queue_names = queuenames_create(ref_context, 16, NULL);
	}
	known = queuenames_lookup(queue_names, unconstify(text *, name));
	if (likely(known != NULL))
		return known->ref;
	if (is_beyond(name))
		return &nameless;
	ref = MemoryContextAllocZero(ref_context, sizeof(IdemQueueRef));
	ref->name =
		memcpy(MemoryContextAlloc(ref_context, VARSIZE_ANY(name)), name, VARSIZE_ANY(name));
	ref->subject = idem_waiters_queue(name);
	known = queuenames_insert(queue_names, ref->name, &found);
	known->ref = ref;
	return ref;
}

/* The open transaction uses the handle, which has a name */
void
idem_queueref_use(IdemQueueRef *ref)
{
	if (ref->is_used)
		return;
	ref->is_used = true;
	ref->next = idem_queueref_used;
	idem_queueref_used = ref;
}

/*
 * S2: pin the entry of the queue, if it has one; returns whether it has.
 *
 * J14: a writer calls this after it has written a job.  If it finds no entry, the entry that
 * another transaction makes later is empty, and a walker of it sees the job.
 */
bool
idem_queueref_pin(IdemQueueRef *ref)
{
	if (likely(ref->is_pinned))
		return true;
	if (ref->name == NULL || !idem_entries_exist())
		return false;
	idem_queueref_use(ref);
	if (ref->used_by == InvalidSubTransactionId)
		ref->used_by = GetCurrentSubTransactionId();
	if (ref->entry.counters == NULL || !idem_entries_pin(&ref->entry))
	{
		uint64 nmade;

		pg_memory_barrier();
		/* read this first: an entry that is made after the lookup changes it */
		nmade = idem_entries_nmade();
		if (ref->entry.counters == NULL && ref->nmade == nmade)
			return false;
		ref->nmade = nmade;
		ref->entry = idem_entries_pin_queue(ref->name, IDEM_MAKE_NEVER);
		if (ref->entry.counters == NULL)
			return false;
	}
	ref->is_pinned = true;
	ref->own_are_old = true;
	return true;
}

/*
 * S2: make the entry of the queue and pin it; false: there is no room.  It knows of the fetches so
 * far (H3).  Never throws.
 */
bool
idem_queueref_make_entry(IdemQueueRef *ref, IdemMakeEntry make)
{
	ref->entry = idem_entries_pin_queue(ref->name, make);
	if (ref->entry.counters == NULL)
		return false;
	if (ref->own_skips != NULL && !ref->own_are_old)
	{
		TimestampTz fetched_at = idem_skips_last_fetch(ref->own_skips);

		if (fetched_at > idem_skips_last_fetch(ref->entry.skips))
			idem_skips_note_fetch(ref->entry.skips, fetched_at);
	}
	ref->is_pinned = true;
	ref->own_are_old = true;
	return true;
}

/*
 * The skip ranges of the queue (J14), in its entry, which is pinned then.  If it has no entry, this
 * backend has ranges of its own, which other backends do not see.
 */
IdemSkips *
idem_queueref_skips(IdemQueueRef *ref)
{
	if (idem_queueref_pin(ref))
		return ref->entry.skips;
	if (ref->own_skips == NULL)
	{
		ref->own_skips = MemoryContextAlloc(ref == &nameless ? TopMemoryContext : ref_context,
											sizeof(IdemSkips));
		ref->own_are_old = true;
	}
	/* without a handle of its own each call may be about another queue */
	if (ref->own_are_old || ref == &nameless)
		idem_skips_init(ref->own_skips);
	ref->own_are_old = false;
	return ref->own_skips;
}

/* S2: the transaction has ended: nothing that its handles lead to is used any more */
void
idem_queueref_unpin_all(void)
{
	for (IdemQueueRef *ref = idem_queueref_used; ref != NULL; ref = ref->next)
	{
		if (ref->is_pinned)
			idem_entries_unpin(&ref->entry);
		ref->is_pinned = false;
		ref->used_by = InvalidSubTransactionId;
		ref->pending = NULL;
	}
}

/* The transaction has ended and woken those who wait: its handles end */
void
idem_queueref_forget_all(void)
{
	for (IdemQueueRef *ref = idem_queueref_used; ref != NULL; ref = ref->next)
		ref->is_used = ref->is_touched = false;
	idem_queueref_used = NULL;
	if (queue_names != NULL && queue_names->members >= MAX_REFS)
	{
		queue_names = NULL;
		MemoryContextReset(ref_context);
	}
}
