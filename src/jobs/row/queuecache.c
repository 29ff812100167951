/*
 * queuecache.c
 *		Cache of this backend: settings of queues, declared or not.
 *
 * queuestore.c sets and uses the entries.  An entry counts as long as the backend has received
 * no invalidation of idem.queues since it read the settings.  A session that writes the table
 * without the functions of idem (a restore, an apply worker, an UPDATE by hand) sends no
 * invalidation, so an entry also expires after one second.
 *
 * The owner of a queue is part of its settings.  Whether the current user has the privileges
 * of the owner is never cached.
 */
#include "postgres.h"

#include "datatype/timestamp.h"

#include "jobs/row/job.h"

/* How long an entry is used, in microseconds */
#define MAX_AGE USECS_PER_SEC

typedef struct CachedQueue
{
	int64 good_until; /* expiry by the steady clock; 0: the slot is free */
	uint64 version;	  /* of idem.queues, before the settings were read */
	int name_len;
	char name[IDEM_MAX_QUEUE_LEN];
	IdemQueue queue; /* without its name */
} CachedQueue;

static CachedQueue entries[64];

/* The entry of the queue, or NULL */
static CachedQueue *
find_entry(const text *name)
{
	int len = VARSIZE_ANY_EXHDR(name);

	for (int i = 0; i < (int) lengthof(entries); i++)
	{
		if (entries[i].good_until != 0 && entries[i].name_len == len &&
			memcmp(entries[i].name, VARDATA_ANY(name), len) == 0)
			return &entries[i];
	}
	return NULL;
}

/* Get the settings of the queue; false: read them from the table */
bool
idem_queuecache_find(text *name, uint64 version, IdemQueue *queue)
{
	const CachedQueue *entry = find_entry(name);

	if (entry == NULL || entry->version != version || entry->good_until <= idem_clock_steady())
		return false;
	*queue = entry->queue;
	queue->name = name;
	return true;
}

/* The slot for a queue: the slot that it has, else the one that expires first */
static CachedQueue *
choose_slot(const text *name)
{
	CachedQueue *slot = find_entry(name);

	if (slot != NULL)
		return slot;
	slot = &entries[0];
	for (int i = 1; i < (int) lengthof(entries); i++)
	{
		if (entries[i].good_until < slot->good_until)
			slot = &entries[i];
	}
	return slot;
}

/*
 * Cache settings.  The version is that of idem.queues before the snapshot that shows them was
 * taken: if an invalidation has arrived since then, the entry is out of date at once.
 */
void
idem_queuecache_set(const IdemQueue *queue, uint64 version)
{
	int len = VARSIZE_ANY_EXHDR(queue->name);
	CachedQueue *entry;

	/* a row that was not enqueued by idem may have a longer name */
	if (len > IDEM_MAX_QUEUE_LEN)
		return;
	entry = choose_slot(queue->name);
	entry->good_until = idem_clock_steady() + MAX_AGE;
	entry->version = version;
	entry->name_len = len;
	memcpy(entry->name, VARDATA_ANY(queue->name), len);
	entry->queue = *queue;
	entry->queue.name = NULL;
}
