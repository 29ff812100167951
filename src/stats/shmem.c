/*
 * shmem.c
 *		The entries of databases and queues in shared memory: counters, histograms, the
 *		progress of cleanup, and the skip ranges of queues (skips.c).
 *
 * There is shared memory only if the library is preloaded.  Only the counters and
 * the background worker depend on it; fetch is slower without it.
 *
 * The entries are in a hash table of the server.  Everything but the counters, the
 * histograms, the flag "used" and the skip ranges is read and written under one LWLock.  A
 * process holds the lock for moments and never while it waits.  The postmaster takes no lock,
 * because it is alone when it loads and saves the counters.
 *
 * Counters and histograms are added to without the lock.  A backend looks its entry up once,
 * and an entry stays in its place as long as its database exists.  They are
 * atomic variables.  There are several sets of counters per entry, each in cache
 * lines of its own, so that two backends rarely write the same line.  There is one set of
 * histograms: eight would take 4 kB.  A job adds to it only four times.
 *
 * During a visit only the worker writes the progress of cleanup in its database.
 * After the visit the launcher does, if the worker has not reported.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/hsearch.h"
#include "utils/timestamp.h"

#include "stats/stats.h"

#define NSTRIPES 8

/* Length of the queue name in the entry of a database itself */
#define NO_QUEUE (-1)

/* A database, or a queue in it; unused bytes are zero, and there is no padding */
typedef struct EntryKey
{
	Oid database;
	int queue_len;
	char queue[IDEM_MAX_QUEUE_LEN + 1];
} EntryKey;

StaticAssertDecl(sizeof(EntryKey) == sizeof(Oid) + sizeof(int) + IDEM_MAX_QUEUE_LEN + 1,
				 "a key of the hash table has no padding");

typedef struct StatsEntry
{
	EntryKey key;

	/*
	 * Of a database: has a backend used the functions since the worker last looked
	 * for the extension?  Backends set it without the lock.
	 */
	volatile bool used;
	TimestampTz stats_reset;
	IdemProgress progress;						/* of a database */
	TimestampTz next_tick;						/* of a database, the earliest; DT_NOEND: none */
	IdemSkips skips;							/* of a queue */
	IdemHistogram histograms[IDEM_HISTOGRAM_N]; /* of a queue */
	char stripes[NSTRIPES * sizeof(IdemCounters) + PG_CACHE_LINE_SIZE];
} StatsEntry;

StaticAssertDecl(sizeof(StatsEntry) <= 4096, "a queue takes at most 4 kB of shared memory (S5)");

typedef struct Shared
{
	LWLock *lock;
	bool is_full;				 /* a queue or database got no entry */
	uint64 seed;				 /* of the hash of entries */
	pg_atomic_uint32 nforgotten; /* databases whose entries were removed */
} Shared;

static Shared *shared = NULL;
static HTAB *entries = NULL;

static void
lock_shared(LWLockMode mode)
{
	if (IsUnderPostmaster)
		LWLockAcquire(shared->lock, mode);
}

static void
unlock_shared(void)
{
	if (IsUnderPostmaster)
		LWLockRelease(shared->lock);
}

/* The seed keeps callers from choosing names of queues that share a bucket */
static uint32
hash_entry_key(const void *key, Size keysize)
{
	const EntryKey *entry = key;
	uint64 hash = hash_bytes_uint32_extended(entry->database, shared->seed);

	if (entry->queue_len > 0)
		hash = hash_bytes_extended((const unsigned char *) entry->queue, entry->queue_len, hash);
	return (uint32) hash;
}

/* Before shared memory is allocated */
void
idem_shmem_request(void)
{
	RequestAddinShmemSpace(MAXALIGN(sizeof(Shared)));
	RequestAddinShmemSpace(hash_estimate_size(idem_guc_stats_max, sizeof(StatsEntry)));
	RequestAddinShmemSpace(idem_exchange_size());
	RequestNamedLWLockTranche("idem", 2);
}

/* Shared memory has been allocated: attach to it; true if this process created it */
bool
idem_shmem_attach(void)
{
	HASHCTL ctl = {
		.keysize = sizeof(EntryKey), .entrysize = sizeof(StatsEntry), .hash = hash_entry_key};
	LWLockPadded *locks;
	bool found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	locks = GetNamedLWLockTranche("idem");
	idem_exchange_attach(&locks[1].lock);
	shared = ShmemInitStruct("idem", sizeof(Shared), &found);
	if (!found)
	{
		memset(shared, 0, sizeof(*shared));
		shared->lock = &locks[0].lock;
		shared->seed = pg_prng_uint64(&pg_global_prng_state);
		pg_atomic_init_u32(&shared->nforgotten, 0);
	}
	entries = idem_compat_shmem_hash("idem entries", idem_guc_stats_max, &ctl,
									 HASH_ELEM | HASH_FUNCTION);
	LWLockRelease(AddinShmemInitLock);
	return !found;
}

/* Is the library preloaded? */
bool
idem_shmem_exists(void)
{
	return shared != NULL;
}

/* The sets of counters of an entry, aligned to cache lines */
static IdemCounters *
get_stripes(StatsEntry *entry)
{
	return (IdemCounters *) TYPEALIGN(PG_CACHE_LINE_SIZE, entry->stripes);
}

/* queue: NULL for the database itself */
static EntryKey
make_key(Oid database, const char *queue, int queue_len)
{
	EntryKey key;

	memset(&key, 0, sizeof(key));
	key.database = database;
	key.queue_len = queue_len;
	if (queue_len > 0)
		memcpy(key.queue, queue, queue_len);
	return key;
}

static StatsEntry *
find_entry(const EntryKey *key)
{
	return hash_search(entries, key, HASH_FIND, NULL);
}

static StatsEntry *
find_database(Oid database)
{
	EntryKey key = make_key(database, NULL, NO_QUEUE);

	return find_entry(&key);
}

/*
 * Make an entry; NULL: there is no room.  A quarter of the entries is reserved for
 * databases, so that an unlimited number of queue names cannot crowd them out (S2).
 */
static StatsEntry *
make_entry(const EntryKey *key, TimestampTz stats_reset)
{
	int reserved = key->queue_len == NO_QUEUE ? 0 : idem_guc_stats_max / 4;
	StatsEntry *entry;

	if (hash_get_num_entries(entries) >= idem_guc_stats_max - reserved)
	{
		shared->is_full = true;
		return NULL;
	}
	entry = hash_search(entries, key, HASH_ENTER, NULL);
	for (int i = 0; i < NSTRIPES; i++)
	{
		for (int j = 0; j < IDEM_NCOUNTERS; j++)
			pg_atomic_init_u64(&get_stripes(entry)[i].values[j], 0);
	}
	memset(&entry->progress, 0, sizeof(entry->progress));
	entry->progress.backlog = -1;
	entry->next_tick = DT_NOEND;
	idem_skips_init(&entry->skips);
	idem_histogram_init(entry->histograms);
	entry->used = true;
	entry->stats_reset = stats_reset;
	return entry;
}

/* Did a queue or database get no entry? */
bool
idem_shmem_is_full(void)
{
	bool is_full;

	lock_shared(LW_SHARED);
	is_full = shared->is_full;
	unlock_shared();
	return is_full;
}

/* How often there was room again for queues that had got no entry */
uint32
idem_shmem_nforgotten(void)
{
	return shared != NULL ? pg_atomic_read_u32(&shared->nforgotten) : 0;
}

/* Find an entry, or make it; NULL: there is no room */
static StatsEntry *
get_entry(const EntryKey *key)
{
	StatsEntry *entry;
	bool is_full;

	lock_shared(LW_SHARED);
	entry = find_entry(key);
	is_full = shared->is_full;
	unlock_shared();
	if (entry != NULL || (is_full && key->queue_len != NO_QUEUE))
		return entry;

	lock_shared(LW_EXCLUSIVE);
	entry = find_entry(key);
	if (entry == NULL)
		entry = make_entry(key, GetCurrentTimestamp());
	unlock_shared();
	return entry;
}

/* Where this backend counts for a database (queue NULL) or a queue in it */
IdemCounterSlot
idem_shmem_get_slot(Oid database, const text *queue)
{
	IdemCounterSlot slot = {0};
	EntryKey key;
	StatsEntry *entry;

	/* a row that was not enqueued by idem may have a longer name, for which an entry has no room */
	if (shared == NULL || (queue != NULL && VARSIZE_ANY_EXHDR(queue) > IDEM_MAX_QUEUE_LEN))
		return slot;
	if (queue != NULL)
		key = make_key(database, VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue));
	else
		key = make_key(database, NULL, NO_QUEUE);
	entry = get_entry(&key);
	if (entry != NULL)
	{
		slot.counters = &get_stripes(entry)[idem_compat_proc_number() % NSTRIPES];
		slot.used = &entry->used;
		slot.skips = &entry->skips;
		slot.histograms = entry->histograms;
	}
	return slot;
}

/*
 * The worker begins to look for the extension: clear the flag "used" of this
 * database, and return what it was.  A backend that uses the functions of an
 * extension created after the look sets the flag again (W5).
 */
bool
idem_shmem_take_use(void)
{
	StatsEntry *entry;
	bool used = false;

	lock_shared(LW_EXCLUSIVE);
	entry = find_database(MyDatabaseId);
	if (entry != NULL)
	{
		used = entry->used;
		entry->used = false;
	}
	unlock_shared();
	return used;
}

/* Has a backend used the functions there since the worker last looked for the extension? */
bool
idem_shmem_is_used(Oid database)
{
	StatsEntry *entry;
	bool used;

	lock_shared(LW_SHARED);
	entry = find_database(database);
	used = entry != NULL && entry->used;
	unlock_shared();
	return used;
}

static void
copy_entry(StatsEntry *entry, IdemStatsSnapshot *snapshot)
{
	memset(snapshot, 0, sizeof(*snapshot));
	snapshot->database = entry->key.database;
	snapshot->queue_len = entry->key.queue_len;
	memcpy(snapshot->queue, entry->key.queue, Max(entry->key.queue_len, 0));
	snapshot->stats_reset = entry->stats_reset;
	for (int i = 0; i < NSTRIPES; i++)
	{
		for (int j = 0; j < IDEM_NCOUNTERS; j++)
			snapshot->counters[j] += pg_atomic_read_u64(&get_stripes(entry)[i].values[j]);
	}
	idem_histogram_copy(entry->histograms, snapshot->histograms);
}

/*
 * The entries of databases, or of queues; the caller holds the lock.
 *
 * After an immediate shutdown the postmaster reads a hash table that a backend may
 * have left in the middle of a change.  A scan can then return entries that are not
 * in use.  So this never returns more entries than the table counts.
 */
static StatsEntry **
list_entries(bool of_queues, int *n)
{
	int max = hash_get_num_entries(entries);
	StatsEntry **list = palloc_array(StatsEntry *, Max(max, 1));
	HASH_SEQ_STATUS seq;
	StatsEntry *entry;

	*n = 0;
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (*n == max)
		{
			hash_seq_term(&seq);
			break;
		}
		if (OidIsValid(entry->key.database) && (entry->key.queue_len != NO_QUEUE) == of_queues)
			list[(*n)++] = entry;
	}
	return list;
}

/* Copies of the counters and histograms of all databases, or of all queues */
IdemStatsSnapshot *
idem_shmem_copy_counters(bool of_queues, int *n)
{
	StatsEntry **list;
	IdemStatsSnapshot *copies;

	lock_shared(LW_SHARED);
	list = list_entries(of_queues, n);
	copies = palloc_extended(mul_size(Max(*n, 1), sizeof(IdemStatsSnapshot)), MCXT_ALLOC_HUGE);
	for (int i = 0; i < *n; i++)
		copy_entry(list[i], &copies[i]);
	unlock_shared();
	pfree(list);
	return copies;
}

/* Continue to count from a saved copy (S2); the copy is dropped if there is no room for it */
void
idem_shmem_restore_counters(const IdemStatsSnapshot *snapshot)
{
	EntryKey key = make_key(snapshot->database, snapshot->queue, snapshot->queue_len);
	StatsEntry *entry;

	if (find_entry(&key) != NULL)
		return;
	entry = make_entry(&key, snapshot->stats_reset);
	if (entry == NULL)
		return;
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		pg_atomic_write_u64(&get_stripes(entry)[0].values[i], snapshot->counters[i]);
	idem_histogram_set(entry->histograms, snapshot->histograms);
}

static void
reset_entry(StatsEntry *entry, TimestampTz now)
{
	for (int i = 0; i < NSTRIPES; i++)
	{
		for (int j = 0; j < IDEM_NCOUNTERS; j++)
			pg_atomic_write_u64(&get_stripes(entry)[i].values[j], 0);
	}
	idem_histogram_set(entry->histograms, NULL);
	entry->stats_reset = now;
}

/* Reset the counters and histograms of this database and its queues to zero */
void
idem_shmem_reset_counters(void)
{
	TimestampTz now = GetCurrentTimestamp();
	HASH_SEQ_STATUS seq;
	StatsEntry *entry;

	lock_shared(LW_EXCLUSIVE);
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (entry->key.database == MyDatabaseId)
			reset_entry(entry, now);
	}
	unlock_shared();
}

/* OIDs of the databases that have entries, each once */
List *
idem_shmem_list_databases(void)
{
	List *databases = NIL;
	HASH_SEQ_STATUS seq;
	StatsEntry *entry;

	lock_shared(LW_SHARED);
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		/* mostly queues of the same few databases */
		if (databases == NIL || llast_oid(databases) != entry->key.database)
			databases = lappend_oid(databases, entry->key.database);
	}
	unlock_shared();
	list_sort(databases, list_oid_cmp);
	list_deduplicate_oid(databases);
	return databases;
}

/* Remove the entries of a database that was dropped: no backend can count there any more */
void
idem_shmem_forget_database(Oid database)
{
	HASH_SEQ_STATUS seq;
	StatsEntry *entry;

	lock_shared(LW_EXCLUSIVE);
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (entry->key.database == database)
			(void) hash_search(entries, &entry->key, HASH_REMOVE, NULL);
	}
	shared->is_full = false;
	pg_atomic_fetch_add_u32(&shared->nforgotten, 1);
	unlock_shared();
}

/* Copies of the progress of cleanup in all databases */
IdemDatabaseProgress *
idem_shmem_copy_progress(int *n)
{
	StatsEntry **list;
	IdemDatabaseProgress *copies;

	lock_shared(LW_SHARED);
	list = list_entries(false, n);
	copies = palloc_array(IdemDatabaseProgress, Max(*n, 1));
	for (int i = 0; i < *n; i++)
	{
		copies[i].database = list[i]->key.database;
		copies[i].progress = list[i]->progress;
	}
	unlock_shared();
	pfree(list);
	return copies;
}

/* Progress of cleanup in a database; false if the database has no entry */
bool
idem_shmem_get_progress(Oid database, IdemProgress *progress)
{
	StatsEntry *entry;

	memset(progress, 0, sizeof(*progress));
	progress->backlog = -1;
	lock_shared(LW_SHARED);
	entry = find_database(database);
	if (entry != NULL)
		*progress = entry->progress;
	unlock_shared();
	return entry != NULL;
}

/* Publish the progress of cleanup in a database, if it has an entry */
void
idem_shmem_set_progress(Oid database, const IdemProgress *progress)
{
	StatsEntry *entry;

	lock_shared(LW_EXCLUSIVE);
	entry = find_database(database);
	if (entry != NULL)
		entry->progress = *progress;
	unlock_shared();
}

/* Show the failure of a worker that has not reported, from the launcher */
void
idem_shmem_set_failure(Oid database, const char *error)
{
	EntryKey key = make_key(database, NULL, NO_QUEUE);
	StatsEntry *entry = get_entry(&key);

	if (entry == NULL)
		return;
	lock_shared(LW_EXCLUSIVE);
	entry->progress.phase = IDEM_PHASE_FAILING;
	entry->progress.error_at = GetCurrentTimestamp();
	strlcpy(entry->progress.error, error, IDEM_ERROR_TEXT_LEN);
	unlock_shared();
}

/*
 * T6: the worker begins to look for the earliest tick of this database.  It looks after that, and
 * passes what it finds to idem_shmem_lower_tick().  A session passes its ticks after they are
 * visible.  So a tick is either seen by the look, or it comes after this.
 */
void
idem_shmem_forget_tick(void)
{
	StatsEntry *entry;

	lock_shared(LW_EXCLUSIVE);
	entry = find_database(MyDatabaseId);
	if (entry != NULL)
		entry->next_tick = DT_NOEND;
	unlock_shared();
}

/*
 * T6: the database ticks at this time, or now if that is past: databases take turns in the order in
 * which they became due, not in that of their oldest ticks (T10).  If that is earlier than what was
 * known, tell the launcher.  Never throws.
 */
void
idem_shmem_lower_tick(Oid database, TimestampTz tick)
{
	StatsEntry *entry;
	bool is_earlier;

	if (shared == NULL)
		return;
	tick = Max(tick, GetCurrentTimestamp());
	lock_shared(LW_EXCLUSIVE);
	entry = find_database(database);
	is_earlier = entry != NULL && tick < entry->next_tick;
	if (is_earlier)
		entry->next_tick = tick;
	unlock_shared();
	if (is_earlier)
		idem_exchange_wake_launcher();
}

/* The databases that have ticks, and the earliest tick of each */
IdemDatabaseTick *
idem_shmem_copy_ticks(int *n)
{
	StatsEntry **list;
	IdemDatabaseTick *ticks;
	int nentries;

	*n = 0;
	lock_shared(LW_SHARED);
	list = list_entries(false, &nentries);
	ticks = palloc_array(IdemDatabaseTick, Max(nentries, 1));
	for (int i = 0; i < nentries; i++)
	{
		if (list[i]->next_tick == DT_NOEND)
			continue;
		ticks[*n].database = list[i]->key.database;
		ticks[(*n)++].tick = list[i]->next_tick;
	}
	unlock_shared();
	pfree(list);
	return ticks;
}
