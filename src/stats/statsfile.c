/*
 * statsfile.c
 *		The file that carries the counters and histograms over a restart of the server.
 *
 * The postmaster writes the file when it stops and all other processes have
 * ended.  It reads the file when it starts, and then removes it.  So after a crash
 * the counters begin at zero (S2).  The file is used as a whole or not at all.  If
 * it cannot be read, or is damaged, the log says so.
 */
#include "postgres.h"

#include <unistd.h>

#include "pgstat.h"
#include "port/pg_crc32c.h"
#include "storage/fd.h"

#include "stats/stats.h"

#define STATS_FILE	PGSTAT_STAT_PERMANENT_DIRECTORY "/idem.stat"
#define STATS_MAGIC UINT64CONST(0x6964656d00000600) /* changes with the format of the file */

typedef struct SavedFile
{
	uint64 magic;
	int nentries;
	IdemStatsSnapshot entries[FLEXIBLE_ARRAY_MEMBER];
} SavedFile;

static bool
is_zero(const IdemStatsSnapshot *snapshot)
{
	for (int i = 0; i < IDEM_NCOUNTERS; i++)
	{
		if (snapshot->counters[i] != 0)
			return false;
	}
	return true;
}

/* Entries without counts are left out; what adds to a histogram counts, too */
static void
add_entries(SavedFile *saved, const IdemStatsSnapshot *copies, int n)
{
	for (int i = 0; i < n; i++)
	{
		if (!is_zero(&copies[i]))
			saved->entries[saved->nentries++] = copies[i];
	}
}

/*
 * The content of the file before its checksum.  Databases come first: they must
 * find room at the next start even if idem.stats_max is lower then (S2).
 */
static SavedFile *
make_content(Size *size)
{
	int ndatabases;
	int nqueues;
	IdemStatsSnapshot *databases = idem_entries_copy_counters(false, &ndatabases);
	IdemStatsSnapshot *queues = idem_entries_copy_counters(true, &nqueues);
	SavedFile *saved = palloc0(offsetof(SavedFile, entries) +
							   (ndatabases + nqueues) * sizeof(IdemStatsSnapshot));

	saved->magic = STATS_MAGIC;
	add_entries(saved, databases, ndatabases);
	add_entries(saved, queues, nqueues);
	pfree(databases);
	pfree(queues);
	*size = offsetof(SavedFile, entries) + saved->nentries * sizeof(IdemStatsSnapshot);
	return saved;
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

static bool
write_content(FILE *file)
{
	Size size;
	SavedFile *saved = make_content(&size);
	pg_crc32c crc = compute_checksum(saved, size);
	bool written = fwrite(saved, size, 1, file) == 1 && fwrite(&crc, sizeof(crc), 1, file) == 1;

	pfree(saved);
	return written;
}

/* The postmaster calls this when it stops and all other processes have ended (S2) */
void
idem_statsfile_save(void)
{
	FILE *file = AllocateFile(STATS_FILE ".tmp", PG_BINARY_W);
	bool written = file != NULL && write_content(file);

	if (file != NULL && FreeFile(file) != 0)
		written = false;
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

/* The checksum does not prove that this library has written the file */
static bool
is_valid_entry(const IdemStatsSnapshot *snapshot)
{
	return OidIsValid(snapshot->database) && snapshot->queue_len >= -1 &&
		snapshot->queue_len <= IDEM_MAX_QUEUE_LEN;
}

static bool
are_all_valid(const SavedFile *saved)
{
	for (int i = 0; i < saved->nentries; i++)
	{
		if (!is_valid_entry(&saved->entries[i]))
			return false;
	}
	return true;
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
		EQ_CRC32C(crc, compute_checksum(saved, size)) && are_all_valid(saved);
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
idem_statsfile_load(void)
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
