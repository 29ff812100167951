/*
 * shared.c
 *		The shared memory of idem, and the entries in it.
 *
 * There is shared memory only if the library is preloaded; nothing but counters
 * and the background worker depends on it.  Entries are found by a hash of
 * database and queue; those that are not in use are in a list.  Both are changed
 * under the lock, or by the postmaster before there are other processes.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#include "stats/stats.h"

IdemShared *idem_shared = NULL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

/* The entries, and behind them the buckets */
static Size
entries_size(void)
{
	return add_size(offsetof(IdemShared, entries), mul_size(idem_guc_stats_max, sizeof(IdemEntry)));
}

static Size
shared_size(void)
{
	return add_size(entries_size(), mul_size(idem_guc_stats_max, sizeof(int)));
}

static void
request_memory(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("idem", 1);
}

/* The bucket of a database or a queue.  The seed keeps callers from choosing names that share one. */
static int *
get_bucket(Oid database, const char *queue, int queue_len)
{
	uint64 hash = hash_bytes_uint32_extended(database, idem_shared->seed);

	if (queue_len >= 0)
		hash = hash_bytes_extended((const unsigned char *) queue, queue_len, hash);
	return &idem_shared->buckets[hash % idem_shared->nentries];
}

static IdemEntry *
find(Oid database, const char *queue, int queue_len)
{
	for (int i = *get_bucket(database, queue, queue_len); i >= 0; i = idem_shared->entries[i].next)
	{
		IdemEntry *entry = &idem_shared->entries[i];

		if (entry->database == database && entry->queue_len == queue_len &&
			(queue_len <= 0 || memcmp(entry->queue, queue, queue_len) == 0))
			return entry;
	}
	return NULL;
}

static void
put_on_free_list(IdemEntry *entry)
{
	entry->database = InvalidOid;
	entry->next = idem_shared->first_free;
	idem_shared->first_free = entry - idem_shared->entries;
	idem_shared->nfree++;
}

/*
 * Make an entry; NULL: there is no room.  A quarter of the entries is for
 * databases only, so that an unlimited number of queue names cannot crowd them
 * out.
 */
static IdemEntry *
make(Oid database, const char *queue, int queue_len)
{
	int *bucket = get_bucket(database, queue, queue_len);
	IdemEntry *entry;

	if (idem_shared->nfree <= (queue_len >= 0 ? idem_shared->nentries / 4 : 0))
	{
		idem_shared->is_full = true;
		return NULL;
	}
	entry = &idem_shared->entries[idem_shared->first_free];
	idem_shared->first_free = entry->next;
	idem_shared->nfree--;
	entry->queue_len = queue_len;
	if (queue_len > 0)
		memcpy(entry->queue, queue, queue_len);
	memset(&entry->progress, 0, sizeof(entry->progress));
	entry->progress.backlog = -1;
	entry->used = true;
	entry->next = *bucket;
	*bucket = entry - idem_shared->entries;
	entry->database = database;
	return entry;
}

/* Free an entry that no process uses any more.  The caller has the lock. */
void
idem_shared_free(IdemEntry *entry)
{
	int *link = get_bucket(entry->database, entry->queue, entry->queue_len);

	while (&idem_shared->entries[*link] != entry)
		link = &idem_shared->entries[*link].next;
	*link = entry->next;
	put_on_free_list(entry);
	idem_shared->is_full = false;
}

void
idem_shared_zero(IdemEntry *entry, TimestampTz now)
{
	for (int i = 0; i < IDEM_NSTRIPES; i++)
	{
		for (int j = 0; j < IDEM_NCOUNTERS; j++)
			pg_atomic_write_u64(&entry->stripes[i].values[j], 0);
	}
	entry->stats_reset = now;
}

/* Add up what was counted */
void
idem_shared_copy(IdemEntry *entry, IdemCounted *counted)
{
	memset(counted, 0, sizeof(*counted));
	counted->database = entry->database;
	counted->queue_len = entry->queue_len;
	memcpy(counted->queue, entry->queue, Max(entry->queue_len, 0));
	counted->stats_reset = entry->stats_reset;
	for (int i = 0; i < IDEM_NSTRIPES; i++)
	{
		for (int j = 0; j < IDEM_NCOUNTERS; j++)
			counted->counters[j] += pg_atomic_read_u64(&entry->stripes[i].values[j]);
	}
}

/* The reverse, when the postmaster starts; what finds no room is lost */
void
idem_shared_restore(const IdemCounted *counted)
{
	IdemEntry *entry;

	if (find(counted->database, counted->queue, counted->queue_len) != NULL)
		return;
	entry = make(counted->database, counted->queue, counted->queue_len);
	if (entry == NULL)
		return;
	idem_shared_zero(entry, counted->stats_reset);
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		pg_atomic_write_u64(&entry->stripes[0].values[i], counted->counters[i]);
}

static void
init_entry(IdemEntry *entry)
{
	for (int i = 0; i < IDEM_NSTRIPES; i++)
	{
		for (int j = 0; j < IDEM_NCOUNTERS; j++)
			pg_atomic_init_u64(&entry->stripes[i].values[j], 0);
	}
	put_on_free_list(entry);
}

static void
init_memory(void)
{
	memset(idem_shared, 0, entries_size());
	idem_shared->lock = &GetNamedLWLockTranche("idem")->lock;
	idem_shared->seed = pg_prng_uint64(&pg_global_prng_state);
	idem_shared->nentries = idem_guc_stats_max;
	idem_shared->buckets = (int *) ((char *) idem_shared + entries_size());
	idem_shared->first_free = -1;
	for (int i = idem_shared->nentries - 1; i >= 0; i--)
	{
		idem_shared->buckets[i] = -1;
		init_entry(&idem_shared->entries[i]);
	}
}

static void
save_counters(int code, Datum arg)
{
	if (code == 0 && idem_shared != NULL)
		idem_statsfile_save();
}

static void
attach_memory(void)
{
	bool found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	idem_shared = ShmemInitStruct("idem", shared_size(), &found);
	if (!found)
	{
		init_memory();
		if (!IsBinaryUpgrade)
			idem_statsfile_load();
	}
	LWLockRelease(AddinShmemInitLock);
	if (!IsUnderPostmaster && !IsBinaryUpgrade)
		on_shmem_exit(save_counters, (Datum) 0);
}

/* From _PG_init, if the library is preloaded */
void
idem_shared_init(void)
{
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_memory;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = attach_memory;
}

static const char *
queue_name(const text *queue)
{
	return queue ? VARDATA_ANY(queue) : NULL;
}

static int
queue_len(const text *queue)
{
	return queue ? (int) VARSIZE_ANY_EXHDR(queue) : -1;
}

/* The entry of a database, or of a queue in it; NULL if there is none.  The caller has the lock. */
IdemEntry *
idem_shared_find(Oid database, const text *queue)
{
	return find(database, queue_name(queue), queue_len(queue));
}

/* The same, made if there is none; NULL: there is no room */
IdemEntry *
idem_shared_entry(Oid database, const text *queue)
{
	IdemEntry *entry;
	bool is_full;

	LWLockAcquire(idem_shared->lock, LW_SHARED);
	entry = idem_shared_find(database, queue);
	is_full = idem_shared->is_full;
	LWLockRelease(idem_shared->lock);
	if (entry != NULL || (is_full && queue != NULL))
		return entry;

	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	entry = idem_shared_find(database, queue);
	if (entry == NULL)
	{
		entry = make(database, queue_name(queue), queue_len(queue));
		if (entry != NULL)
			idem_shared_zero(entry, GetCurrentTimestamp());
	}
	LWLockRelease(idem_shared->lock);
	return entry;
}
