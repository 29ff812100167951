/*
 * entries.c
 *		The entries of databases and queues in shared memory: counters, histograms, the
 *		progress of cleanup, and the skip ranges of queues (skips.c).
 *
 * There is shared memory only if the library is preloaded.  Only the counters and
 * the background worker depend on it; fetch is slower without it.
 *
 * The entries are an array, with a hash table over it.  Everything but the counters, the
 * histograms, the pins, the flag "used" and the skip ranges is written under one LWLock.  A
 * process holds the lock for moments and never while it waits.  The postmaster takes no lock,
 * because it is alone when it loads and saves the counters.
 *
 * Counters and histograms are atomic variables, added to without the lock.  There are several sets
 * of counters per entry, each in cache lines of its own, so that two backends rarely write the same
 * line.  There is one set of histograms: eight would take 4 kB.  A job adds to it only four times.
 *
 * The entry of a database stays until the database is dropped.  The entry of a queue may give way
 * to another queue, unless a transaction has pinned it.  A backend remembers where the entry of a
 * queue is, and its version.  It pins the entry, then compares the version, and uses the
 * entry only if that has not changed.  A backend that removes an entry changes the version, then
 * looks at the pins.  So one of the two sees the other.  The pins and the version of a place are
 * never reset: a backend may pin a place for a moment that has another entry now.
 * doc/worker-protocol.md has the protocol.
 *
 * During a visit only the worker writes the progress of cleanup in its database.
 * After the visit the launcher does, if the worker has not reported.
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "common/pg_prng.h"
#include "lib/ilist.h"
#include "utils/timestamp.h"

#include "shmem/shmem.h"

#define NSTRIPES 8

/* Length of the queue name in the entry of a database itself */
#define NO_QUEUE (-1)

/* The database may have this many queues per free entry; see make_queue() */
#define QUEUES_PER_FREE 3

/* Look at this many entries at most for one that gives way */
#define MAX_LOOKS 2000

/* A database, or a queue in it; unused bytes are zero, and there is no padding */
typedef struct EntryKey
{
	Oid database; /* InvalidOid: the entry is free */
	int queue_len;
	char queue[IDEM_MAX_QUEUE_LEN + 1];
} EntryKey;

StaticAssertDecl(sizeof(EntryKey) == sizeof(Oid) + sizeof(int) + IDEM_MAX_QUEUE_LEN + 1,
				 "keys can be compared with memcmp()");

typedef struct StatsEntry
{
	EntryKey key;
	struct StatsEntry *next;  /* in the same bucket */
	dlist_node node;		  /* in Shared.free, Shared.databases, or "queues" of the database */
	pg_atomic_uint64 version; /* of a queue: changes when it gives way */

	/*
	 * Of a database: has a backend used the functions since the worker last looked
	 * for the extension?  Of a queue: has a transaction used it since it was last asked to give
	 * way?  Backends set it without the lock.
	 */
	volatile bool used;
	int nqueues;	   /* of a database: length of the next one */
	dlist_head queues; /* of a database: the first one gives way first */
	TimestampTz stats_reset;
	IdemProgress progress;				 /* of a database */
	TimestampTz next_tick;				 /* of a database, the earliest; DT_NOEND: none */
	IdemSkips skips;					 /* of a queue */
	pg_atomic_uint64 times[IDEM_NTIMES]; /* histograms of a queue */
	char stripes[NSTRIPES * sizeof(IdemCounters) + PG_CACHE_LINE_SIZE];
} StatsEntry;

StaticAssertDecl(sizeof(StatsEntry) + sizeof(StatsEntry *) <= 4096,
				 "a queue takes at most 4 kB of shared memory (S5)");

typedef struct Shared
{
	LWLock *lock;
	bool is_full;			/* a queue got no entry, or one gave way */
	uint64 seed;			/* of the hash of entries */
	pg_atomic_uint64 nmade; /* entries of queues made so far; not 0 */
	int nentries;			/* in use */
	dlist_head free;
	dlist_head databases;
} Shared;

static Shared *shared = NULL;
static StatsEntry *entries = NULL;	/* idem.stats_max of them */
static StatsEntry **buckets = NULL; /* as many */

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

/* Where the key is in the hash table.  The seed keeps callers from choosing names that collide. */
static StatsEntry **
get_bucket(const EntryKey *key)
{
	uint64 hash = hash_bytes_uint32_extended(key->database, shared->seed);

	if (key->queue_len > 0)
		hash = hash_bytes_extended((const unsigned char *) key->queue, key->queue_len, hash);
	return &buckets[hash % idem_guc_stats_max];
}

/* The sets of counters of an entry, aligned to cache lines */
static IdemCounters *
get_stripes(StatsEntry *entry)
{
	return (IdemCounters *) TYPEALIGN(PG_CACHE_LINE_SIZE, entry->stripes);
}

/* Before shared memory is allocated */
void
idem_entries_request(void)
{
	RequestAddinShmemSpace(CACHELINEALIGN(sizeof(Shared)));
	RequestAddinShmemSpace(CACHELINEALIGN(mul_size(idem_guc_stats_max, sizeof(StatsEntry))));
	RequestAddinShmemSpace(CACHELINEALIGN(mul_size(idem_guc_stats_max, sizeof(StatsEntry *))));
	RequestAddinShmemSpace(idem_exchange_size());
	RequestNamedLWLockTranche("idem", 2);
}

/* Shared memory has been allocated: attach to it; true if this process created it */
bool
idem_entries_attach(void)
{
	LWLockPadded *locks;
	bool found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	locks = GetNamedLWLockTranche("idem");
	idem_exchange_attach(&locks[1].lock);
	entries = ShmemInitStruct("idem entries", mul_size(idem_guc_stats_max, sizeof(StatsEntry)),
							  &found);
	buckets = ShmemInitStruct("idem entry buckets",
							  mul_size(idem_guc_stats_max, sizeof(StatsEntry *)), &found);
	shared = ShmemInitStruct("idem", sizeof(Shared), &found);
	if (!found)
	{
		memset(shared, 0, sizeof(*shared));
		memset(entries, 0, mul_size(idem_guc_stats_max, sizeof(StatsEntry)));
		memset(buckets, 0, mul_size(idem_guc_stats_max, sizeof(StatsEntry *)));
		shared->lock = &locks[0].lock;
		shared->seed = pg_prng_uint64(&pg_global_prng_state);
		pg_atomic_init_u64(&shared->nmade, 1);
		dlist_init(&shared->free);
		dlist_init(&shared->databases);
		for (int i = 0; i < idem_guc_stats_max; i++)
		{
			pg_atomic_init_u64(&entries[i].version, 0);
			for (int j = 0; j < NSTRIPES; j++)
			{
				pg_atomic_init_u64(&get_stripes(&entries[i])[j].pins, 0);
				for (int k = 0; k < IDEM_NCOUNTERS; k++)
					pg_atomic_init_u64(&get_stripes(&entries[i])[j].values[k], 0);
			}
			for (int j = 0; j < IDEM_NTIMES; j++)
				pg_atomic_init_u64(&entries[i].times[j], 0);
			dlist_push_tail(&shared->free, &entries[i].node);
		}
	}
	LWLockRelease(AddinShmemInitLock);
	return !found;
}

/* Is the library preloaded? */
bool
idem_entries_exist(void)
{
	return shared != NULL;
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
	StatsEntry *entry = *get_bucket(key);

	while (entry != NULL && memcmp(&entry->key, key, sizeof(EntryKey)) != 0)
		entry = entry->next;
	return entry;
}

static StatsEntry *
find_database(Oid database)
{
	EntryKey key = make_key(database, NULL, NO_QUEUE);

	return find_entry(&key);
}

static StatsEntry *
get_entry_of_node(dlist_node *node)
{
	return dlist_container(StatsEntry, node, node);
}

/* Free an entry that no transaction uses; of a database: without the entries of its queues */
static void
remove_entry(StatsEntry *entry)
{
	StatsEntry **link = get_bucket(&entry->key);

	if (entry->key.queue_len != NO_QUEUE)
		find_database(entry->key.database)->nqueues--;
	while (*link != entry)
		link = &(*link)->next;
	*link = entry->next;
	dlist_delete(&entry->node);
	memset(&entry->key, 0, sizeof(entry->key));
	dlist_push_head(&shared->free, &entry->node);
	shared->nentries--;
}

/* S2: remove the entry of a queue, unless a transaction uses it */
static bool
remove_unpinned(StatsEntry *entry)
{
	/* from now on no other backend can pin it: see idem_entries_pin() */
	pg_atomic_fetch_add_u64(&entry->version, 1);
	for (int i = 0; i < NSTRIPES; i++)
	{
		if (pg_atomic_read_u64(&get_stripes(entry)[i].pins) != 0)
		{
			pg_atomic_fetch_sub_u64(&entry->version, 1);
			return false;
		}
	}
	remove_entry(entry);
	return true;
}

/*
 * S2: remove the entry of a queue of the database that no transaction has used since this
 * function last came across it, or at least none uses now.  Returns false if it has found none.
 */
static bool
give_way(StatsEntry *database)
{
	int nlooks = Min(2 * database->nqueues, MAX_LOOKS);

	while (nlooks-- > 0)
	{
		StatsEntry *entry = get_entry_of_node(dlist_pop_head_node(&database->queues));

		dlist_push_tail(&database->queues, &entry->node);
		if (entry->used)
			entry->used = false;
		else if (remove_unpinned(entry))
			return true;
	}
	return false;
}

/* The counters and histograms begin at zero, also while other processes add to them */
static void
zero_entry(StatsEntry *entry)
{
	for (int i = 0; i < NSTRIPES; i++)
	{
		for (int j = 0; j < IDEM_NCOUNTERS; j++)
			pg_atomic_write_u64(&get_stripes(entry)[i].values[j], 0);
	}
	for (int i = 0; i < IDEM_NTIMES; i++)
		pg_atomic_write_u64(&entry->times[i], 0);
}

/* Put an entry that is free into use; NULL: there is none */
static StatsEntry *
take_entry(const EntryKey *key, TimestampTz stats_reset)
{
	StatsEntry **bucket = get_bucket(key);
	StatsEntry *entry;

	if (dlist_is_empty(&shared->free))
	{
		shared->is_full = true;
		return NULL;
	}
	entry = get_entry_of_node(dlist_pop_head_node(&shared->free));
	zero_entry(entry);
	memset(&entry->progress, 0, sizeof(entry->progress));
	entry->progress.backlog = -1;
	entry->next_tick = DT_NOEND;
	idem_skips_init(&entry->skips);
	entry->nqueues = 0;
	dlist_init(&entry->queues);
	entry->stats_reset = stats_reset;
	entry->key = *key;
	entry->next = *bucket;
	*bucket = entry;
	shared->nentries++;
	return entry;
}

/* Find the entry of a database, or make it; NULL: there is no room */
static StatsEntry *
make_database(Oid database, TimestampTz stats_reset)
{
	EntryKey key = make_key(database, NULL, NO_QUEUE);
	StatsEntry *entry = find_entry(&key);

	if (entry != NULL)
		return entry;
	entry = take_entry(&key, stats_reset);
	if (entry == NULL)
		return NULL;
	entry->used = true;
	dlist_push_tail(&shared->databases, &entry->node);
	return entry;
}

/*
 * S2: make the entry of a queue; NULL: there is no room.  may_displace: another one may give way.
 */
static StatsEntry *
make_queue(const EntryKey *key, TimestampTz stats_reset, bool may_displace)
{
	StatsEntry *database = make_database(key->database, stats_reset);
	StatsEntry *entry;
	int nfree;

	if (database == NULL)
		return NULL;

	/*
	 * A quarter of the entries is reserved for databases.  The more queues a database has, the
	 * more of the rest must be free.  So no database takes the last entries from those that come
	 * after it, even if its sessions use all that it has.  What was saved comes back as long as
	 * there is room.
	 */
	nfree = idem_guc_stats_max - idem_guc_stats_max / 4 - shared->nentries;
	if (nfree <= 0 || (IsUnderPostmaster && database->nqueues >= QUEUES_PER_FREE * nfree))
	{
		StatsEntry *fullest = database;
		dlist_iter iter;

		if (!may_displace)
			return NULL;
		/* a queue of the database that has most gives way, or else one of its own */
		shared->is_full = true;
		dlist_foreach(iter, &shared->databases)
		{
			StatsEntry *other = get_entry_of_node(iter.cur);

			if (other->nqueues > fullest->nqueues)
				fullest = other;
		}
		if (!give_way(fullest) && (fullest == database || !give_way(database)))
			return NULL;
	}
	entry = take_entry(key, stats_reset);
	if (entry == NULL)
		return NULL;
	entry->used = IsUnderPostmaster;
	database->nqueues++;
	dlist_push_tail(&database->queues, &entry->node);
	pg_atomic_fetch_add_u64(&shared->nmade, 1);
	return entry;
}

/* Did a queue or database get no entry, or did one give way? */
bool
idem_entries_is_full(void)
{
	bool is_full;

	lock_shared(LW_SHARED);
	is_full = shared->is_full;
	unlock_shared();
	return is_full;
}

/* Grows when queues get entries.  Never 0. */
uint64
idem_entries_nmade(void)
{
	return pg_atomic_read_u64(&shared->nmade);
}

/* Find the entry of a database, or make it; NULL: there is no room */
static StatsEntry *
get_database(Oid database)
{
	StatsEntry *entry;

	lock_shared(LW_SHARED);
	entry = find_database(database);
	unlock_shared();
	if (entry != NULL)
		return entry;

	lock_shared(LW_EXCLUSIVE);
	entry = make_database(database, GetCurrentTimestamp());
	unlock_shared();
	return entry;
}

static IdemEntryRef
make_ref(StatsEntry *entry)
{
	IdemEntryRef ref = {0};

	if (entry != NULL)
	{
		ref.counters = &get_stripes(entry)[(uint32) MyProcNumber % NSTRIPES];
		ref.used = &entry->used;
		ref.version = &entry->version;
		ref.seen_version = pg_atomic_read_u64(&entry->version);
		ref.skips = &entry->skips;
		ref.times = entry->times;
	}
	return ref;
}

/* Where this backend counts for its database, which gets an entry if there is room */
IdemEntryRef
idem_entries_get_database(void)
{
	return make_ref(shared != NULL ? get_database(MyDatabaseId) : NULL);
}

/*
 * S2: pin the entry of a queue, as it was when it was looked up.  Returns false if it may have
 * given way since.  A pin takes no lock and costs two additions to a cache line that mostly this
 * backend writes.
 */
bool
idem_entries_pin(const IdemEntryRef *ref)
{
	/* a full barrier: remove_unpinned() does the reverse */
	pg_atomic_fetch_add_u64(&ref->counters->pins, 1);
	if (unlikely(pg_atomic_read_u64(ref->version) != ref->seen_version))
	{
		idem_entries_unpin(ref);
		return false;
	}
	if (!*ref->used)
		*ref->used = true;
	return true;
}

void
idem_entries_unpin(const IdemEntryRef *ref)
{
	pg_atomic_fetch_sub_u64(&ref->counters->pins, 1);
}

/* Where this backend counts for a queue: its entry is pinned.  Never throws. */
IdemEntryRef
idem_entries_pin_queue(const text *queue, IdemMakeEntry make)
{
	IdemEntryRef ref;
	EntryKey key;
	StatsEntry *entry;

	/* a row that was not enqueued by idem may have a longer name, for which an entry has no room */
	if (shared == NULL || VARSIZE_ANY_EXHDR(queue) > IDEM_MAX_QUEUE_LEN)
		return make_ref(NULL);
	key = make_key(MyDatabaseId, VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue));
	lock_shared(make == IDEM_MAKE_NEVER ? LW_SHARED : LW_EXCLUSIVE);
	entry = find_entry(&key);
	if (entry == NULL && make != IDEM_MAKE_NEVER)
		entry = make_queue(&key, GetCurrentTimestamp(), make == IDEM_MAKE_ROOM);
	ref = make_ref(entry);
	/* it cannot give way under the lock */
	if (entry != NULL && !idem_entries_pin(&ref))
		Assert(false);
	unlock_shared();
	return ref;
}

/*
 * The worker begins a visit to its database.  Returns whether a backend has used the functions
 * since the last visit; one that uses the functions of an extension created after the worker has
 * looked for it is noted again (W5).
 *
 * T6: the earliest tick is unknown.  The worker looks for it after that, and passes what it finds
 * to idem_entries_lower_tick().  A session passes its ticks after they are visible.  So a tick is
 * either seen by the look, or it comes after this.
 */
bool
idem_entries_begin_visit(void)
{
	StatsEntry *entry;
	bool used = false;

	lock_shared(LW_EXCLUSIVE);
	entry = find_database(MyDatabaseId);
	if (entry != NULL)
	{
		used = entry->used;
		entry->used = false;
		entry->next_tick = DT_NOEND;
	}
	unlock_shared();
	return used;
}

/* Has a backend used the functions there since the worker last looked for the extension? */
bool
idem_entries_is_used(Oid database)
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
	for (int i = 0; i < IDEM_NTIMES; i++)
		snapshot->times[i] = pg_atomic_read_u64(&entry->times[i]);
}

/*
 * The entries of databases, or of queues; the caller holds the lock.
 *
 * After an immediate shutdown the postmaster reads what a backend may have left in the middle of
 * a change.  So this uses neither the lists nor the hash table.
 */
static StatsEntry **
list_entries(bool of_queues, int *n)
{
	StatsEntry **list = palloc_array(StatsEntry *, idem_guc_stats_max);

	*n = 0;
	for (int i = 0; i < idem_guc_stats_max; i++)
	{
		const EntryKey *key = &entries[i].key;

		if (OidIsValid(key->database) && (key->queue_len != NO_QUEUE) == of_queues)
			list[(*n)++] = &entries[i];
	}
	return list;
}

/* Copies of the counters and histograms of all databases, or of all queues */
IdemStatsSnapshot *
idem_entries_copy_counters(bool of_queues, int *n)
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
idem_entries_restore_counters(const IdemStatsSnapshot *snapshot)
{
	EntryKey key = make_key(snapshot->database, snapshot->queue, snapshot->queue_len);
	StatsEntry *entry;

	if (snapshot->queue_len == NO_QUEUE)
		entry = make_database(snapshot->database, snapshot->stats_reset);
	else
		entry = make_queue(&key, snapshot->stats_reset, true);
	if (entry == NULL)
		return;
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		pg_atomic_write_u64(&get_stripes(entry)[0].values[i], snapshot->counters[i]);
	for (int i = 0; i < IDEM_NTIMES; i++)
		pg_atomic_write_u64(&entry->times[i], snapshot->times[i]);
}

/*
 * S2: reset the counters and histograms of this database and its queues to zero.  Queues that no
 * transaction uses lose their entries.
 */
void
idem_entries_reset_counters(void)
{
	TimestampTz now = GetCurrentTimestamp();
	StatsEntry *database;
	dlist_mutable_iter iter;

	lock_shared(LW_EXCLUSIVE);
	database = find_database(MyDatabaseId);
	if (database != NULL)
	{
		zero_entry(database);
		database->stats_reset = now;
		dlist_foreach_modify(iter, &database->queues)
		{
			StatsEntry *entry = get_entry_of_node(iter.cur);

			if (remove_unpinned(entry))
				continue;
			zero_entry(entry);
			entry->stats_reset = now;
		}
	}
	shared->is_full = false;
	unlock_shared();
}

/* Remove the entries of a database that was dropped: no backend can count there any more */
void
idem_entries_forget_database(Oid oid)
{
	StatsEntry *database;

	lock_shared(LW_EXCLUSIVE);
	database = find_database(oid);
	if (database != NULL)
	{
		while (!dlist_is_empty(&database->queues))
		{
			StatsEntry *entry = get_entry_of_node(dlist_head_node(&database->queues));

			pg_atomic_fetch_add_u64(&entry->version, 1);
			remove_entry(entry);
		}
		remove_entry(database);
	}
	shared->is_full = false;
	unlock_shared();
}

/* The databases that have entries, each once: the progress of cleanup and the earliest ticks */
IdemDatabaseInfo *
idem_entries_copy_databases(int *n)
{
	StatsEntry **list;
	IdemDatabaseInfo *copies;

	lock_shared(LW_SHARED);
	list = list_entries(false, n);
	copies = palloc_array(IdemDatabaseInfo, Max(*n, 1));
	for (int i = 0; i < *n; i++)
	{
		copies[i].database = list[i]->key.database;
		copies[i].next_tick = list[i]->next_tick;
		copies[i].progress = list[i]->progress;
	}
	unlock_shared();
	pfree(list);
	return copies;
}

/* Progress of cleanup in a database; false if the database has no entry */
bool
idem_entries_get_progress(Oid database, IdemProgress *progress)
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
idem_entries_set_progress(Oid database, const IdemProgress *progress)
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
idem_entries_set_failure(Oid database, const char *error)
{
	StatsEntry *entry = get_database(database);

	if (entry == NULL)
		return;
	lock_shared(LW_EXCLUSIVE);
	entry->progress.phase = IDEM_PHASE_FAILING;
	entry->progress.error_at = GetCurrentTimestamp();
	strlcpy(entry->progress.error, error, IDEM_ERROR_TEXT_LEN);
	unlock_shared();
}

/*
 * T6: the database ticks at this time, or now if that is past: databases take turns in the order in
 * which they became due, not in that of their oldest ticks (T10).  If that is earlier than what was
 * known, tell the launcher.  Never throws.
 */
void
idem_entries_lower_tick(Oid database, TimestampTz tick)
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
