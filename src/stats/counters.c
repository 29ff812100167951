/*
 * counters.c
 *		Count answers and times of jobs, save the counts when the server stops, and log
 *		duplicates.
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
 *
 * Histograms have the times of jobs (S5).  The bounds of the buckets are powers of two, from
 * 2^-10 s (1 ms) to 2^19 s (6 days).  A bucket counts the times up to its bound that are longer
 * than the bound before it; the last bucket has no bound.  Sessions add to a histogram without a
 * lock: a copy that is made meanwhile may have a time in its bucket that is not yet in the sum.
 *
 * The postmaster writes counters and histograms to a file when it stops and all other processes
 * have ended.  It reads the file when it starts, and then removes it, so after a crash they begin
 * at zero (S2).  The file is used as a whole or not at all; if it cannot be read, or is damaged,
 * the log says so.
 */
#include "postgres.h"

#include <unistd.h>

#include "access/xact.h"
#include "lib/stringinfo.h"
#include "pgstat.h"
#include "port/pg_bitutils.h"
#include "port/pg_crc32c.h"
#include "storage/fd.h"
#include "utils/float.h"
#include "utils/memutils.h"

#include "stats/stats.h"

StaticAssertDecl(IDEM_DATABASE_COUNTER_N <= IDEM_NCOUNTERS &&
					 IDEM_QUEUE_COUNTER_N <= IDEM_NCOUNTERS,
				 "there is room for every counter");

/* The bound of the first bucket of a histogram is a unit */
#define UNITS_PER_SEC 1024

/* Longer times, which only rows that idem has not written can have, count as this one: 285 years */
#define MAX_USECS (PG_INT64_MAX / UNITS_PER_SEC)

#define STATS_FILE	PGSTAT_STAT_PERMANENT_DIRECTORY "/idem.stat"
#define STATS_MAGIC UINT64CONST(0x6964656d00000600) /* changes with the format of the file */

typedef struct SavedFile
{
	uint64 magic;
	int nentries;
	IdemStatsSnapshot entries[FLEXIBLE_ARRAY_MEMBER];
} SavedFile;

/* What counts for a queue if the transaction commits */
typedef struct IdemPending
{
	uint32 counts[IDEM_QUEUE_COUNTER_N];
	pg_atomic_uint64 times[IDEM_NTIMES];
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
	for (int i = 0; i < IDEM_NTIMES; i++)
	{
		uint64 n = pg_atomic_read_u64(&queue->pending->times[i]);

		if (n != 0)
			pg_atomic_fetch_add_u64(&queue->entry.times[i], n);
	}
	queue->pending = NULL;
}

/* S1: add one to a counter of a queue; returns its histograms, or NULL */
static pg_atomic_uint64 *
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
		return queue->entry.times;
	}
	/* a handle that stands for several queues does not count */
	if (queue->name == NULL)
		return NULL;
	if (queue->pending == NULL)
	{
		queue->pending = MemoryContextAllocZero(TopTransactionContext, sizeof(IdemPending));
		for (int i = 0; i < IDEM_NTIMES; i++)
			pg_atomic_init_u64(&queue->pending->times[i], 0);
		if (queue->used_by == InvalidSubTransactionId)
			queue->used_by = GetCurrentSubTransactionId();
	}
	queue->pending->counts[counter]++;
	return queue->pending->times;
}

/* Add one to a counter of a queue (S1) */
void
idem_counters_add_queue(IdemQueueRef *queue, IdemQueueCounter counter)
{
	(void) add_to_queue(queue, counter);
}

/*
 * S5: add the time between the two.  If the clock was set back, it is zero.  Not inlined, so that
 * the bench sees what it costs.
 */
static pg_noinline void
add_time(pg_atomic_uint64 *histogram, TimestampTz from, TimestampTz to)
{
	/* as unsigned numbers the difference cannot overflow */
	uint64 usecs = from < to ? Min((uint64) to - (uint64) from, MAX_USECS) : 0;
	int bucket = 0;

	if (usecs > 0)
	{
		/* the time is longer than so many units, and not longer than one more */
		uint64 units = (usecs * UNITS_PER_SEC - 1) / USECS_PER_SEC;

		if (units > 0)
			bucket = Min(pg_leftmost_one_pos64(units) + 1, IDEM_HISTOGRAM_BUCKETS - 1);
	}
	pg_atomic_fetch_add_u64(&histogram[bucket], 1);
	pg_atomic_fetch_add_u64(&histogram[IDEM_HISTOGRAM_SUM], usecs);
}

/* The largest time that a bucket counts, in seconds */
double
idem_counters_bound(int bucket)
{
	if (bucket == IDEM_HISTOGRAM_BUCKETS - 1)
		return get_float8_infinity();
	return (double) (1 << bucket) / UNITS_PER_SEC;
}

/* Add one to a counter of a queue, and the time between the two to a histogram of it (S1, S5) */
void
idem_counters_add_queue_time(IdemQueueRef *queue, IdemQueueCounter counter, IdemHistogramKind kind,
							 TimestampTz from, TimestampTz to)
{
	pg_atomic_uint64 *times = add_to_queue(queue, counter);

	if (times != NULL)
		add_time(&times[kind * IDEM_HISTOGRAM_LEN], from, to);
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
	if (idem_queueref_used != NULL)
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

/*
 * With idem.log_duplicates, write one line to the server log (S4).  It does not contain the
 * statement, which may show the key, and instead of the key it has 16 hex digits of a hash (S3).
 */
void
idem_counters_log_duplicate(const char *kind, const char *outcome, const text *name_space,
							const text *key)
{
	StringInfoData id;
	uint8 digest[IDEM_SHA256_LEN];
	char hex[17];

	if (likely(!idem_guc_log_duplicates))
		return;
	/* the SHA-256 of name space, line feed and key */
	initStringInfo(&id);
	appendBinaryStringInfo(&id, VARDATA_ANY(name_space), VARSIZE_ANY_EXHDR(name_space));
	appendStringInfoChar(&id, '\n');
	appendBinaryStringInfo(&id, VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key));
	idem_sha256_hash(id.data, id.len, digest);
	pfree(id.data);
	for (int i = 0; i < 8; i++)
		sprintf(hex + 2 * i, "%02x", digest[i]);
	ereport(LOG_SERVER_ONLY,
			errcode(ERRCODE_SUCCESSFUL_COMPLETION),
			errmsg("idem duplicate: kind=%s outcome=%s key_hash=%s", kind, outcome, hex),
			errhidestmt(true),
			errhidecontext(true));
}

static pg_crc32c
compute_checksum(const SavedFile *saved, Size size)
{
	pg_crc32c crc;

	INIT_CRC32C(crc);
	COMP_CRC32C(crc, saved, size);
	FIN_CRC32C(crc);
	return crc;
}

/*
 * What is saved: entries without counts are left out; what adds to a histogram counts, too.
 * Databases come first: they must find room at the next start even if idem.stats_max is lower then
 * (S2).
 */
static SavedFile *
make_content(Size *size)
{
	IdemStatsSnapshot *copies[2];
	int n[2];
	SavedFile *saved;

	for (int of_queues = 0; of_queues < 2; of_queues++)
		copies[of_queues] = idem_entries_copy_counters(of_queues, &n[of_queues]);
	saved = palloc0(offsetof(SavedFile, entries) + (n[0] + n[1]) * sizeof(IdemStatsSnapshot));
	saved->magic = STATS_MAGIC;
	for (int of_queues = 0; of_queues < 2; of_queues++)
	{
		for (int i = 0; i < n[of_queues]; i++)
		{
			const IdemStatsSnapshot *copy = &copies[of_queues][i];
			uint64 any = 0;

			for (int j = 0; j < IDEM_NCOUNTERS; j++)
				any |= copy->counters[j];
			if (any != 0)
				saved->entries[saved->nentries++] = *copy;
		}
		pfree(copies[of_queues]);
	}
	*size = offsetof(SavedFile, entries) + saved->nentries * sizeof(IdemStatsSnapshot);
	return saved;
}

/* The postmaster calls this when it stops and all other processes have ended (S2) */
void
idem_counters_save(void)
{
	FILE *file = AllocateFile(STATS_FILE ".tmp", PG_BINARY_W);
	bool written = file != NULL;

	if (file != NULL)
	{
		Size size;
		SavedFile *saved = make_content(&size);
		pg_crc32c crc = compute_checksum(saved, size);

		written = fwrite(saved, size, 1, file) == 1 && fwrite(&crc, sizeof(crc), 1, file) == 1;
		pfree(saved);
		if (FreeFile(file) != 0)
			written = false;
	}
	if (!written)
	{
		ereport(LOG,
				errcode_for_file_access(),
				errmsg("could not write file \"%s\": %m", STATS_FILE ".tmp"),
				errdetail("The statistics of idem will begin at zero at the next start."));
		unlink(STATS_FILE ".tmp");
		return;
	}
	(void) durable_rename(STATS_FILE ".tmp", STATS_FILE, LOG);
}

/* False: the file is damaged, or could not be read */
static bool
read_content(FILE *file)
{
	SavedFile header;
	SavedFile *saved;
	Size size;
	pg_crc32c crc;
	bool is_good;

	if (fread(&header, offsetof(SavedFile, entries), 1, file) != 1 || header.magic != STATS_MAGIC ||
		header.nentries < 0 || header.nentries > IDEM_MAX_STATS)
		return false;
	size = offsetof(SavedFile, entries) + header.nentries * sizeof(IdemStatsSnapshot);
	saved = palloc(size);
	memcpy(saved, &header, offsetof(SavedFile, entries));
	is_good = fread(saved->entries, sizeof(IdemStatsSnapshot), header.nentries, file) ==
			(size_t) header.nentries &&
		fread(&crc, sizeof(crc), 1, file) == 1 && getc(file) == EOF && !ferror(file) &&
		EQ_CRC32C(crc, compute_checksum(saved, size));
	/* the checksum does not prove that this library has written the file */
	for (int i = 0; i < saved->nentries && is_good; i++)
		is_good = OidIsValid(saved->entries[i].database) && saved->entries[i].queue_len >= -1 &&
			saved->entries[i].queue_len <= IDEM_MAX_QUEUE_LEN;
	for (int i = 0; is_good && i < saved->nentries; i++)
		idem_entries_restore_counters(&saved->entries[i]);
	pfree(saved);
	return is_good;
}

static void
report_unreadable(const char *problem)
{
	ereport(LOG,
			errcode_for_file_access(),
			errmsg("could not %s file \"%s\": %m", problem, STATS_FILE),
			errdetail("The statistics of idem begin at zero."));
}

/* The postmaster calls this when it starts, before there are other processes (S2) */
void
idem_counters_load(void)
{
	FILE *file = AllocateFile(STATS_FILE, PG_BINARY_R);

	if (file == NULL)
	{
		if (errno != ENOENT)
			report_unreadable("open");
		return;
	}
	errno = 0;
	if (!read_content(file))
	{
		if (ferror(file))
			report_unreadable("read");
		else
			ereport(LOG,
					errcode(ERRCODE_DATA_CORRUPTED),
					errmsg("ignoring damaged file \"%s\"", STATS_FILE),
					errdetail("The statistics of idem begin at zero."));
	}
	FreeFile(file);
	if (unlink(STATS_FILE) != 0)
		report_unreadable("remove");
}
