/*
 * databases.c
 *		The launcher's list of databases: which one is visited when.
 *
 * When a database is due is kept by a clock that never goes back.  A database
 * is visited once per naptime.  Where there is more to remove than one run of
 * the worker can do the next run follows at once, behind other databases that
 * are due.  Where the extension is not installed or cleanup is off the next
 * visit is ten minutes later; a backend that uses the functions makes a database
 * without the extension due when the list is read next.  What fails is tried
 * again after one second, then two, four, and so on up to ten minutes.  A
 * reload makes every database due.
 *
 * Shared memory does not survive a crash.  If a visit caused the crash, the
 * launcher after it does not know that.  So the first visits of every launcher
 * begin after a second and are spread over five: a server that crashes again and
 * again is not kept from everything else (W3).
 *
 * Failures are logged here, when they begin and when they are over, and not in
 * between (W7).
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "worker/schedule.h"

#define LOCKED_DELAY (10 * USECS_PER_SEC)
#define LONG_LOCKED	 USECS_PER_MINUTE

/* The first visits: from when on, and until when, since the start of the launcher */
#define FIRST_VISIT USECS_PER_SEC
#define LAST_VISIT	(5 * USECS_PER_SEC)

/* Pauses of a worker as a multiple of batch time; the least if it does not keep up */
#define USUAL_PAUSE 7
#define LEAST_PAUSE 1

static HTAB *databases;
static int64 started_at;
static bool is_first_list = true;

int64
idem_databases_naptime(void)
{
	return idem_guc_cleanup_naptime * USECS_PER_SEC;
}

int64
idem_databases_longer(int64 delay, int64 max)
{
	return Min(Max(2 * delay, IDEM_MIN_DELAY), max);
}

void
idem_databases_init(void)
{
	HASHCTL ctl = {.keysize = sizeof(Oid), .entrysize = sizeof(IdemDatabase)};

	databases = hash_create("idem databases", 64, &ctl, HASH_ELEM | HASH_BLOBS);
	started_at = idem_clock_steady();
}

void
idem_databases_forget(Oid oid)
{
	(void) hash_search(databases, &oid, HASH_REMOVE, NULL);
}

static void
begin_transaction(void)
{
	/* else it would seem to have begun with the launcher */
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();
}

/* Has a backend used the functions there since the worker last looked for the extension? */
static bool
is_used(Oid oid)
{
	IdemEntry *entry;
	bool used;

	LWLockAcquire(idem_shared->lock, LW_SHARED);
	entry = idem_shared_find(oid, NULL);
	used = entry != NULL && entry->used;
	LWLockRelease(idem_shared->lock);
	return used;
}

/* May a worker go there? */
static bool
is_for_us(Form_pg_database form)
{
	return !form->datistemplate && form->datallowconn && form->datconnlimit != DATCONNLIMIT_INVALID_DB;
}

static void
list_database(Form_pg_database form)
{
	IdemDatabase *database;
	bool found;

	if (!is_for_us(form))
		return;
	database = hash_search(databases, &form->oid, HASH_ENTER, &found);
	if (!found)
	{
		memset((char *) database + sizeof(Oid), 0, sizeof(IdemDatabase) - sizeof(Oid));
		database->pause = USUAL_PAUSE;
	}
	memcpy(database->name, NameStr(form->datname), NAMEDATALEN);
	database->is_listed = true;
	if (database->is_without && is_used(database->oid))
	{
		database->is_without = false;
		database->due = 0;
	}
}

/* Databases of the entries in shared memory, by their place */
static Oid *
list_entries(void)
{
	Oid *oids = palloc_array(Oid, idem_shared->nentries);

	LWLockAcquire(idem_shared->lock, LW_SHARED);
	for (int i = 0; i < idem_shared->nentries; i++)
		oids[i] = idem_shared->entries[i].database;
	LWLockRelease(idem_shared->lock);
	return oids;
}

static void
strike_out(Oid *oids, Oid database)
{
	for (int i = 0; i < idem_shared->nentries; i++)
	{
		if (oids[i] == database)
			oids[i] = InvalidOid;
	}
}

/*
 * Free entries of databases that are gone; no backend can be counting there any
 * more.  The entries were listed before the databases, so none of them is of a
 * newer one.
 */
static void
free_entries(const Oid *gone)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < idem_shared->nentries; i++)
	{
		if (OidIsValid(gone[i]))
			idem_shared_free(&idem_shared->entries[i]);
	}
	LWLockRelease(idem_shared->lock);
}

static void
read_list(void)
{
	Relation rel;
	TableScanDesc scan;
	HeapTuple tuple;
	Oid *gone;

	begin_transaction();
	gone = list_entries();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		list_database(form);
		strike_out(gone, form->oid);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	free_entries(gone);
	CommitTransactionCommand();
}

static void
spread_first_visits(void)
{
	int64 n = hash_get_num_entries(databases);
	int64 i = 0;
	HASH_SEQ_STATUS seq;
	IdemDatabase *database;

	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->due = started_at + FIRST_VISIT + i++ * (LAST_VISIT - FIRST_VISIT) / n;
}

/* Read the list of databases, and forget those that are not to be visited any more */
void
idem_databases_read(void)
{
	HASH_SEQ_STATUS seq;
	IdemDatabase *database;

	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->is_listed = false;
	read_list();
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		if (!database->is_listed)
			idem_databases_forget(database->oid);
	}
	if (is_first_list)
		spread_first_visits();
	is_first_list = false;
}

/* A reload: every database is due, those that are not in the list yet, too */
void
idem_databases_make_due(void)
{
	HASH_SEQ_STATUS seq;
	IdemDatabase *database;
	int64 now = idem_clock_steady();

	is_first_list = false;
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->due = Min(database->due, now);
}

/* The database that is due first, or NULL */
IdemDatabase *
idem_databases_first(void)
{
	HASH_SEQ_STATUS seq;
	IdemDatabase *database;
	IdemDatabase *first = NULL;

	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		if (first == NULL || database->due < first->due)
			first = database;
	}
	return first;
}

/* May a worker connect to the database?  Asked just before, so that none is sent to where it would have to wait. */
IdemAccess
idem_databases_access(Oid oid)
{
	IdemAccess access = IDEM_ACCESS_NO;
	LOCKTAG tag;

	begin_transaction();
	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, oid, 0);
	if (LockAcquire(&tag, RowExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		access = IDEM_ACCESS_NOT_NOW;
	else
	{
		Relation rel = table_open(DatabaseRelationId, AccessShareLock);
		SysScanDesc scan;
		ScanKeyData key;
		HeapTuple tuple;

		ScanKeyInit(&key, Anum_pg_database_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(oid));
		scan = systable_beginscan(rel, DatabaseOidIndexId, criticalSharedRelcachesBuilt, NULL, 1, &key);
		tuple = systable_getnext(scan);
		if (HeapTupleIsValid(tuple) && is_for_us((Form_pg_database) GETSTRUCT(tuple)))
			access = IDEM_ACCESS_YES;
		systable_endscan(scan);
		table_close(rel, AccessShareLock);
	}
	CommitTransactionCommand();
	return access;
}

/* A worker that did not come to report: its error, for people */
static void
show_failure(Oid oid, const char *error)
{
	IdemEntry *entry = idem_shared_entry(oid, NULL);

	if (entry == NULL)
		return;
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	entry->progress.phase = IDEM_PHASE_FAILING;
	entry->progress.error_at = GetCurrentTimestamp();
	strlcpy(entry->progress.error, error, IDEM_ERROR_TEXT_LEN);
	LWLockRelease(idem_shared->lock);
}

/* Cleanup failed there: log it if that is new, and try again later */
static void
note_failure(IdemDatabase *database, const char *error)
{
	if (database->delay == 0)
		ereport(LOG,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("cleanup of idem fails in database \"%s\": %s", database->name, error),
				errdetail("It is tried again by itself, up to ten minutes later. This is not logged again before it works."));
	database->delay = idem_databases_longer(database->delay, IDEM_MAX_DELAY);
	database->due = idem_clock_steady() + database->delay;
}

static void
note_lost(IdemDatabase *database, const IdemRun *run)
{
	const char *error = run->error;

	if (error[0] == '\0')
		error = run->connected ? "the worker was ended" : "the worker could not connect";
	show_failure(database->oid, error);
	note_failure(database, error);
}

static void
note_success(IdemDatabase *database, int64 due)
{
	if (database->delay != 0)
		ereport(LOG,
				errcode(ERRCODE_SUCCESSFUL_COMPLETION),
				errmsg("cleanup of idem works again in database \"%s\"", database->name));
	database->delay = 0;
	database->due = due;
}

/* Do the pauses have to be shorter, because more comes than goes? */
static void
adapt_pause(IdemDatabase *database, const IdemRun *run)
{
	if (!run->more)
		database->pause = USUAL_PAUSE;
	else if (database->goes_on && run->lag > database->lag && run->rows >= database->rows)
		database->pause = Max(database->pause / 2, LEAST_PAUSE);
	database->goes_on = run->more;
	database->lag = run->lag;
	database->rows = run->rows;
}

/* When to visit the database again, after a run */
static void
judge_run(IdemDatabase *database, const IdemRun *run)
{
	int64 now = idem_clock_steady();
	int64 naptime = idem_databases_naptime();

	adapt_pause(database, run);
	if (run->outcome != IDEM_RUN_LOCKED)
		database->locked_since = 0;
	switch (run->outcome)
	{
		case IDEM_RUN_LOST:
			note_lost(database, run);
			break;
		case IDEM_RUN_FAILED:
			note_failure(database, run->error);
			break;
		case IDEM_RUN_DONE:
		case IDEM_RUN_SUBSCRIBED:
			note_success(database, now + naptime);
			break;
		case IDEM_RUN_LOCKED:
			if (database->locked_since == 0)
				database->locked_since = now;
			if (now - database->locked_since > LONG_LOCKED)
				note_failure(database, "a table is locked");
			database->due = now + Min(naptime, LOCKED_DELAY);
			break;
		case IDEM_RUN_OFF:
			note_success(database, now + Max(naptime, IDEM_MAX_DELAY));
			break;
		case IDEM_RUN_NOT_THERE:
			/* what was used may be about to be committed */
			database->is_without = true;
			note_success(database, now + (run->was_used ? naptime : Max(naptime, IDEM_MAX_DELAY)));
			break;
	}
	if (run->more)
		database->due = now + run->rest;
}

/*
 * Was the worker terminated by a session that wants to drop, copy or rename the
 * database, or anyway for the first time?  That is no failure.
 */
static bool
is_excused(IdemDatabase *database, const IdemRun *run)
{
	IdemAccess access = idem_databases_access(database->oid);

	if (access == IDEM_ACCESS_NO)
	{
		idem_databases_forget(database->oid);
		return true;
	}
	if (access == IDEM_ACCESS_YES && (!run->connected || run->error[0] != '\0' || database->was_lost))
		return false;
	database->was_lost = access == IDEM_ACCESS_YES;
	database->due = idem_clock_steady() + IDEM_MIN_DELAY;
	return true;
}

/* The worker has ended.  Outdated: there was a reload since it began. */
void
idem_databases_end_run(const IdemRun *run, bool is_outdated)
{
	IdemDatabase *database = hash_search(databases, &run->database, HASH_FIND, NULL);

	if (database == NULL || (run->outcome == IDEM_RUN_LOST && is_excused(database, run)))
		return;
	database->was_lost = run->outcome == IDEM_RUN_LOST;
	judge_run(database, run);
	if (is_outdated)
		database->due = idem_clock_steady();
}
