/*
 * shared.c
 *		The shared memory of idem, and the file that carries the counters over a
 *		restart.
 *
 * There is shared memory only if the library is preloaded; nothing but counters
 * and the background worker depends on it.  The file is written by the
 * postmaster when it is told to end and removed when it is read, so after a
 * crash counting begins anew.
 */
#include "postgres.h"

#include <unistd.h>

#include "miscadmin.h"
#include "pgstat.h"
#include "port/pg_crc32c.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#include "shared.h"

#define STATS_FILE	PGSTAT_STAT_PERMANENT_DIRECTORY "/idem.stat"
#define STATS_MAGIC UINT64CONST(0x6964656d00000400) /* changes with the format of the file */

typedef struct SavedFile
{
	uint64 magic;
	int nentries;
	IdemCounted entries[FLEXIBLE_ARRAY_MEMBER];
} SavedFile;

IdemShared *idem_shared = NULL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

static Size
shared_size(void)
{
	return add_size(offsetof(IdemShared, entries), mul_size(idem_guc_stats_max, sizeof(IdemEntry)));
}

static void
request_memory(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("idem", 1);
}

static void
set_entry(IdemEntry *entry, Oid database, const char *queue, int queue_len)
{
	memset(&entry->progress, 0, sizeof(entry->progress));
	entry->progress.backlog = -1;
	entry->queue_len = queue_len;
	if (queue_len > 0)
		memcpy(entry->queue, queue, queue_len);
	entry->database = database;
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

static bool
is_zero(const IdemCounted *counted)
{
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
	{
		if (counted->counters[i] != 0)
			return false;
	}
	return true;
}

/* What the file holds is followed by a checksum of it.  What is zero is not worth an entry any more. */
static SavedFile *
make_file(Size *size)
{
	SavedFile *saved = palloc0(offsetof(SavedFile, entries) + idem_shared->nentries * sizeof(IdemCounted) + sizeof(pg_crc32c));

	saved->magic = STATS_MAGIC;
	for (int i = 0; i < idem_shared->nentries; i++)
	{
		IdemEntry *entry = &idem_shared->entries[i];

		if (!OidIsValid(entry->database))
			continue;
		idem_shared_copy(entry, &saved->entries[saved->nentries]);
		saved->nentries += !is_zero(&saved->entries[saved->nentries]);
	}
	*size = offsetof(SavedFile, entries) + saved->nentries * sizeof(IdemCounted);
	return saved;
}

static pg_crc32c
checksum(const SavedFile *saved, Size size)
{
	pg_crc32c crc;

	INIT_CRC32C(crc);
	COMP_CRC32C(crc, saved, size);
	FIN_CRC32C(crc);
	return crc;
}

static bool
write_file(FILE *file)
{
	Size size;
	SavedFile *saved = make_file(&size);
	pg_crc32c crc = checksum(saved, size);
	bool written = fwrite(saved, size, 1, file) == 1 && fwrite(&crc, sizeof(crc), 1, file) == 1;

	pfree(saved);
	return written;
}

/* At the end of the postmaster: all others are gone */
static void
save_counters(int code, Datum arg)
{
	FILE *file;
	bool written;

	if (code != 0 || idem_shared == NULL)
		return;
	file = AllocateFile(STATS_FILE ".tmp", PG_BINARY_W);
	written = file != NULL && write_file(file);
	if (file != NULL && FreeFile(file) != 0)
		written = false;
	if (!written)
	{
		ereport(LOG,
				errcode_for_file_access(),
				errmsg("could not write file \"%s\": %m", STATS_FILE ".tmp"),
				errdetail("The statistics of idem begin anew with the next start."));
		unlink(STATS_FILE ".tmp");
		return;
	}
	(void) durable_rename(STATS_FILE ".tmp", STATS_FILE, LOG);
}

static void
load_entry(IdemEntry *entry, const IdemCounted *saved)
{
	set_entry(entry, saved->database, saved->queue, saved->queue_len);
	entry->stats_reset = saved->stats_reset;
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
		pg_atomic_write_u64(&entry->stripes[0].values[i], saved->counters[i]);
}

/* All of the file, or nothing of it */
static bool
read_file(FILE *file)
{
	SavedFile header;
	SavedFile *saved;
	Size size;
	pg_crc32c crc;
	bool is_good;

	if (fread(&header, offsetof(SavedFile, entries), 1, file) != 1 || header.magic != STATS_MAGIC ||
		header.nentries < 0 || header.nentries > IDEM_MAX_STATS)
		return false;
	size = offsetof(SavedFile, entries) + header.nentries * sizeof(IdemCounted);
	saved = palloc(size);
	memcpy(saved, &header, offsetof(SavedFile, entries));
	is_good = fread(saved->entries, sizeof(IdemCounted), header.nentries, file) == (size_t) header.nentries &&
		fread(&crc, sizeof(crc), 1, file) == 1 && EQ_CRC32C(crc, checksum(saved, size));
	for (int i = 0; i < Min(header.nentries, idem_shared->nentries) && is_good; i++)
		load_entry(&idem_shared->entries[i], &saved->entries[i]);
	pfree(saved);
	return is_good;
}

static void
load_counters(void)
{
	FILE *file = AllocateFile(STATS_FILE, PG_BINARY_R);

	if (file == NULL)
		return;
	if (!read_file(file))
		ereport(LOG,
				errcode(ERRCODE_DATA_CORRUPTED),
				errmsg("ignoring damaged file \"%s\"", STATS_FILE),
				errdetail("The statistics of idem begin anew."));
	FreeFile(file);
	unlink(STATS_FILE);
}

static void
init_memory(void)
{
	idem_shared->lock = &GetNamedLWLockTranche("idem")->lock;
	memset(&idem_shared->launcher, 0, sizeof(idem_shared->launcher));
	memset(&idem_shared->run, 0, sizeof(idem_shared->run));
	idem_shared->is_full = false;
	idem_shared->nentries = idem_guc_stats_max;
	for (int i = 0; i < idem_shared->nentries; i++)
	{
		IdemEntry *entry = &idem_shared->entries[i];

		set_entry(entry, InvalidOid, NULL, -1);
		for (int j = 0; j < IDEM_NSTRIPES; j++)
		{
			for (int k = 0; k < IDEM_NCOUNTERS; k++)
				pg_atomic_init_u64(&entry->stripes[j].values[k], 0);
		}
	}
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
			load_counters();
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

/* The entry of a database, or of a queue in it; NULL if there is none.  The caller has the lock. */
IdemEntry *
idem_shared_find(Oid database, const text *queue)
{
	int len = queue ? (int) VARSIZE_ANY_EXHDR(queue) : -1;

	for (int i = 0; i < idem_shared->nentries; i++)
	{
		IdemEntry *entry = &idem_shared->entries[i];

		if (entry->database == database && entry->queue_len == len &&
			(len <= 0 || memcmp(entry->queue, VARDATA_ANY(queue), len) == 0))
			return entry;
	}
	return NULL;
}

/*
 * A free entry.  One in four is for databases, so that an application with queues
 * without number does not hide the others.
 */
static IdemEntry *
find_free(bool for_queue)
{
	int nfree = 0;
	IdemEntry *found = NULL;

	for (int i = 0; i < idem_shared->nentries; i++)
	{
		if (OidIsValid(idem_shared->entries[i].database))
			continue;
		nfree++;
		found = found ? found : &idem_shared->entries[i];
	}
	return !for_queue || nfree > idem_shared->nentries / 4 ? found : NULL;
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
	if (entry == NULL && (entry = find_free(queue != NULL)) != NULL)
	{
		idem_shared_zero(entry, GetCurrentTimestamp());
		set_entry(entry, database, queue ? VARDATA_ANY(queue) : NULL, queue ? (int) VARSIZE_ANY_EXHDR(queue) : -1);
	}
	if (entry == NULL)
		idem_shared->is_full = true;
	LWLockRelease(idem_shared->lock);
	return entry;
}
