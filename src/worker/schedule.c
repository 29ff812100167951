/*
 * schedule.c
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

#include "worker/worker.h"

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

void
idem_schedule_init(void)
{
	HASHCTL ctl = {.keysize = sizeof(Oid), .entrysize = sizeof(IdemDatabase)};

	databases = hash_create("idem databases", 64, &ctl, HASH_ELEM | HASH_BLOBS);
	started_at = idem_clock_steady();
}

void
idem_schedule_forget(Oid oid)
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

/* May a worker go there? */
static bool
is_for_us(Form_pg_database form)
{
	return !form->datistemplate && form->datallowconn &&
		form->datconnlimit != DATCONNLIMIT_INVALID_DB;
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
		database->has_extension = true;
	}
	memcpy(database->name, NameStr(form->datname), NAMEDATALEN);
	database->is_listed = true;
	if (!database->has_extension && idem_shmem_is_used(database->oid))
	{
		database->has_extension = true;
		database->due = 0;
	}
}

static void
read_list(void)
{
	List *gone;
	Relation rel;
	TableScanDesc scan;
	HeapTuple tuple;
	ListCell *lc;

	begin_transaction();
	/* listed before the databases are read, so that none of them is a newer one */
	gone = idem_shmem_list_databases();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		list_database(form);
		gone = list_delete_oid(gone, form->oid);
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	foreach (lc, gone)
		idem_shmem_forget_database(lfirst_oid(lc));
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
idem_schedule_read_databases(void)
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
			idem_schedule_forget(database->oid);
	}
	if (is_first_list)
		spread_first_visits();
	is_first_list = false;
}

/* A reload: every database is due, those that are not in the list yet, too */
void
idem_schedule_make_due(void)
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
idem_schedule_first(void)
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

/* May a worker connect to the database?  Asked just before, so that none is sent to where it would
 * have to wait. */
IdemAccess
idem_schedule_access(Oid oid)
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

		ScanKeyInit(&key, Anum_pg_database_oid, BTEqualStrategyNumber, F_OIDEQ,
					ObjectIdGetDatum(oid));
		scan = systable_beginscan(rel, DatabaseOidIndexId, criticalSharedRelcachesBuilt, NULL, 1,
								  &key);
		tuple = systable_getnext(scan);
		if (HeapTupleIsValid(tuple) && is_for_us((Form_pg_database) GETSTRUCT(tuple)))
			access = IDEM_ACCESS_YES;
		systable_endscan(scan);
		table_close(rel, AccessShareLock);
	}
	CommitTransactionCommand();
	return access;
}

/* Show the failure of a worker that has not reported */
static void
show_failure(Oid oid, const char *error)
{
	IdemProgress progress;

	(void) idem_shmem_get_slot(oid, NULL);
	(void) idem_shmem_get_progress(oid, &progress);
	progress.phase = IDEM_PHASE_FAILING;
	progress.error_at = GetCurrentTimestamp();
	strlcpy(progress.error, error, IDEM_ERROR_TEXT_LEN);
	idem_shmem_set_progress(oid, &progress);
}

/* Cleanup has failed there: log it if it worked before, and wait longer after each failure (W7) */
static void
note_failure(IdemDatabase *database, const char *error)
{
	if (database->delay == 0)
		ereport(LOG,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("idem cleanup failed in database \"%s\": %s", database->name, error),
				errdetail("The launcher tries again after ten minutes at most. The failure is not logged again until cleanup has worked."));
	database->delay = idem_schedule_double_delay(database->delay, IDEM_MAX_DELAY);
}

static void
note_lost(IdemDatabase *database, const IdemVisit *visit)
{
	const char *error = visit->report.error;

	if (error[0] == '\0')
		error = visit->report.connected ? "the worker was terminated" : "the worker could not connect";
	show_failure(database->oid, error);
	note_failure(database, error);
}

static void
note_success(IdemDatabase *database, int64 due)
{
	if (database->delay != 0)
		ereport(LOG,
				errcode(ERRCODE_SUCCESSFUL_COMPLETION),
				errmsg("idem cleanup works again in database \"%s\"", database->name));
	database->delay = 0;
	database->due = due;
}

/* Do the pauses have to be shorter, because more comes than goes? */
static void
adapt_pause(IdemDatabase *database, const IdemVisitReport *report)
{
	if (!report->more)
		database->pause = USUAL_PAUSE;
	else if (database->continues && report->lag > database->lag && report->rows >= database->rows)
		database->pause = Max(database->pause / 2, LEAST_PAUSE);
	database->continues = report->more;
	database->lag = report->lag;
	database->rows = report->rows;
}

/* When to visit the database again, after a run */
static void
schedule_next_visit(IdemDatabase *database, const IdemVisit *visit)
{
	const IdemVisitReport *report = &visit->report;
	int64 now = idem_clock_steady();
	int64 naptime = idem_schedule_naptime();

	adapt_pause(database, report);
	if (report->outcome != IDEM_VISIT_LOCKED)
		database->locked_since = 0;
	switch (report->outcome)
	{
		case IDEM_VISIT_LOST:
			note_lost(database, visit);
			database->due = now + database->delay;
			break;
		case IDEM_VISIT_FAILED:
			note_failure(database, report->error);
			database->due = now + database->delay;
			break;
		case IDEM_VISIT_DONE:
		case IDEM_VISIT_SUBSCRIBED:
			note_success(database, now + naptime);
			break;
		case IDEM_VISIT_LOCKED:
			if (database->locked_since == 0)
				database->locked_since = now;
			if (now - database->locked_since > LONG_LOCKED)
				note_failure(database, "a table is locked");
			database->due = now + Min(naptime, LOCKED_DELAY);
			break;
		case IDEM_VISIT_OFF:
			note_success(database, now + Max(naptime, IDEM_MAX_DELAY));
			break;
		case IDEM_VISIT_NOT_INSTALLED:
			/* what was used may be about to be committed */
			database->has_extension = false;
			note_success(database,
						 now + (report->was_used ? naptime : Max(naptime, IDEM_MAX_DELAY)));
			break;
	}
	if (report->more)
		database->due = now + report->rest;
}

/*
 * Was the worker terminated by a session that wants to drop, copy or rename the
 * database, or anyway for the first time?  That is no failure.
 */
static bool
is_excused(IdemDatabase *database, const IdemVisit *visit)
{
	IdemAccess access = idem_schedule_access(database->oid);

	if (access == IDEM_ACCESS_NO)
	{
		idem_schedule_forget(database->oid);
		return true;
	}
	if (access == IDEM_ACCESS_YES &&
		(!visit->report.connected || visit->report.error[0] != '\0' || database->was_lost))
		return false;
	database->was_lost = access == IDEM_ACCESS_YES;
	database->due = idem_clock_steady() + IDEM_MIN_DELAY;
	return true;
}

/* The worker has ended.  is_outdated: there was a reload since the visit began. */
void
idem_schedule_end_visit(const IdemVisit *visit, bool is_outdated)
{
	IdemDatabase *database = hash_search(databases, &visit->request.database, HASH_FIND, NULL);
	bool is_lost = visit->report.outcome == IDEM_VISIT_LOST;

	if (database == NULL || (is_lost && is_excused(database, visit)))
		return;
	database->was_lost = is_lost;
	schedule_next_visit(database, visit);
	if (is_outdated)
		database->due = idem_clock_steady();
}
