/*
 * statsfile.c
 *		The file that carries the counters over a stop and start of the server.
 *
 * The postmaster writes it when it ends and all other processes are gone, reads
 * it when it starts, and then removes it; so after a crash counting begins anew
 * (S2).  The file is taken as a whole or not at all.  A file that cannot be
 * read, or has been damaged, is reported in the log.
 */
#include "postgres.h"

#include <unistd.h>

#include "pgstat.h"
#include "port/pg_crc32c.h"
#include "storage/fd.h"
#include "storage/shmem.h"

#include "stats/stats.h"

#define STATS_FILE	PGSTAT_STAT_PERMANENT_DIRECTORY "/idem.stat"
#define STATS_MAGIC UINT64CONST(0x6964656d00000400) /* changes with the format of the file */

typedef struct SavedFile
{
	uint64 magic;
	int nentries;
	IdemCounted entries[FLEXIBLE_ARRAY_MEMBER];
} SavedFile;

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

/* The content of the file, which a checksum of it follows.  Entries without counts are left out. */
static SavedFile *
make_content(Size *size)
{
	Size space = add_size(offsetof(SavedFile, entries), mul_size(idem_shared->nentries, sizeof(IdemCounted)));
	SavedFile *saved = palloc0(space);

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
write_content(FILE *file)
{
	Size size;
	SavedFile *saved = make_content(&size);
	pg_crc32c crc = checksum(saved, size);
	bool written = fwrite(saved, size, 1, file) == 1 && fwrite(&crc, sizeof(crc), 1, file) == 1;

	pfree(saved);
	return written;
}

/* At the end of the postmaster: all other processes are gone */
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
				errdetail("The statistics of idem begin anew with the next start."));
		unlink(STATS_FILE ".tmp");
		return;
	}
	(void) durable_rename(STATS_FILE ".tmp", STATS_FILE, LOG);
}

/* A checksum does not prove that this library has written the entry */
static bool
is_valid(const IdemCounted *counted)
{
	return OidIsValid(counted->database) && counted->queue_len >= -1 && counted->queue_len <= IDEM_MAX_QUEUE_LEN;
}

static bool
are_valid(const SavedFile *saved)
{
	for (int i = 0; i < saved->nentries; i++)
	{
		if (!is_valid(&saved->entries[i]))
			return false;
	}
	return true;
}

/* Databases first: queues leave a part of the entries to them, which may be fewer than they were */
static void
restore(const SavedFile *saved)
{
	for (int i = 0; i < saved->nentries; i++)
	{
		if (saved->entries[i].queue_len < 0)
			idem_shared_restore(&saved->entries[i]);
	}
	for (int i = 0; i < saved->nentries; i++)
	{
		if (saved->entries[i].queue_len >= 0)
			idem_shared_restore(&saved->entries[i]);
	}
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
	size = offsetof(SavedFile, entries) + header.nentries * sizeof(IdemCounted);
	saved = palloc(size);
	memcpy(saved, &header, offsetof(SavedFile, entries));
	is_good = fread(saved->entries, sizeof(IdemCounted), header.nentries, file) == (size_t) header.nentries &&
		fread(&crc, sizeof(crc), 1, file) == 1 && getc(file) == EOF && !ferror(file) &&
		EQ_CRC32C(crc, checksum(saved, size)) && are_valid(saved);
	if (is_good)
		restore(saved);
	pfree(saved);
	return is_good;
}

static void
report_unreadable(const char *problem)
{
	ereport(LOG,
			errcode_for_file_access(),
			errmsg("could not %s file \"%s\": %m", problem, STATS_FILE),
			errdetail("The statistics of idem begin anew."));
}

/* At the start of the postmaster: there are no other processes yet */
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
					errdetail("The statistics of idem begin anew."));
	}
	FreeFile(file);
	if (unlink(STATS_FILE) != 0)
		report_unreadable("remove");
}
