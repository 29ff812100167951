/*
 * databases.c
 *		The launcher's list of databases, and when each of them is visited.
 *
 * Each database has a due time, by the steady clock (W5):
 * - A database is visited once per naptime.
 * - If a visit leaves rows to remove, the next one follows at once, or after the
 *   rest of the last pause, and after other databases that are due.
 * - If the extension is not installed or cleanup is off, the next visit is ten
 *   minutes later, or a naptime later if that is longer.  A session that uses the
 *   functions in a database without the extension makes the database due when the
 *   launcher reads the list of databases next.
 * - After a failure the next visit is one second later, then two, four, and so
 *   on up to ten minutes (W7).
 * - A reload makes every database due.
 *
 * A database is also visited at its earliest tick, which sessions and the worker note in
 * shared memory (T6).  Such a visit does not clean up, unless that is due, too.  If ticks fail or
 * are locked, the database is visited again after a delay (T7).
 *
 * Shared memory does not survive a crash, so the launcher does not know whether a
 * visit has caused it.  Therefore the first visits after every start of the
 * launcher begin after one second and are spread over the first five seconds.  A
 * visit that crashes the server does not crash it again at once (W3).
 *
 * The launcher logs a failure of a database here, when it begins and when it is
 * over, not in between (W7).
 *
 * The functions that read pg_database do so in a transaction of their own, which
 * is committed before they return (W4).  The launcher handles their errors.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/snapmgr.h"

#include "cleanup/cleanup.h"

/*
 * After a visit that met a locked table: delay until the next one, and how long
 * the lock may last before it is a failure
 */
#define LOCKED_DELAY (10 * USECS_PER_SEC)
#define MAX_LOCKED	 USECS_PER_MINUTE

/* T6: delay until a schedule that was locked is tried again; T7: the longest one after a failure */
#define TICK_LOCKED_DELAY USECS_PER_SEC
#define MAX_TICK_DELAY	  USECS_PER_MINUTE

/* The first visits begin between these two times after the start of the launcher */
#define FIRST_VISIT USECS_PER_SEC
#define LAST_VISIT	(5 * USECS_PER_SEC)

/* Pause of the worker as a multiple of batch time; LEAST_PAUSE if it does not keep up */
#define USUAL_PAUSE 7
#define LEAST_PAUSE 1

static HTAB *databases;
static int64 started_at;
static bool is_first_list = true;
static bool have_ticks = false; /* when the ticks were last read */

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

/* The caller commits before it returns: while the launcher sleeps, it holds nothing (W4) */
static void
begin_transaction(void)
{
	/* else xact_start in pg_stat_activity would be the start of the launcher */
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	(void) GetTransactionSnapshot();
}

/* Not a template, allows connections, and no interrupted DROP DATABASE has left it invalid (W5) */
static bool
may_be_visited(Form_pg_database form)
{
	return !form->datistemplate && form->datallowconn &&
		form->datconnlimit != DATCONNLIMIT_INVALID_DB;
}

/*
 * Put a database into the list, or update its entry.  W5: a database without the
 * extension becomes due if a session has used the functions there.
 */
static void
list_database(Form_pg_database form)
{
	IdemDatabase *database;
	bool found;

	if (!may_be_visited(form))
		return;
	database = hash_search(databases, &form->oid, HASH_ENTER, &found);
	if (!found)
	{
		memset((char *) database + sizeof(Oid), 0, sizeof(IdemDatabase) - sizeof(Oid));
		database->pause = USUAL_PAUSE;
		database->has_extension = true;
		database->tick_due = database->tick_retry = PG_INT64_MAX;
	}
	memcpy(database->name, NameStr(form->datname), NAMEDATALEN);
	database->is_listed = true;
	if (!database->has_extension && idem_entries_is_used(database->oid))
	{
		database->has_extension = true;
		database->due = 0;
	}
}

/* Read pg_database; remove databases that no longer exist from shared memory */
static void
read_list(void)
{
	List *gone;
	Relation rel;
	TableScanDesc scan;
	HeapTuple tuple;
	ListCell *lc;

	begin_transaction();
	/* copied before pg_database is read: a database created meanwhile is not among them */
	gone = idem_entries_list_databases();
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
		idem_entries_forget_database(lfirst_oid(lc));
	CommitTransactionCommand();
}

/* W3: a visit that crashes the server must not crash it again at once */
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

/* Read the list of databases, and remove those that may no longer be visited */
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

/* W5: a reload makes every database due, including those that are not in the list yet */
void
idem_databases_make_due(void)
{
	HASH_SEQ_STATUS seq;
	IdemDatabase *database;
	int64 now = idem_clock_steady();

	is_first_list = false;
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		database->due = Min(database->due, now);
		database->not_before = 0;
	}
}

/*
 * T6: read the earliest tick of each database from shared memory.  Returns false if a database
 * that has one is not in the list.  The time is computed anew at each turn, because the clock may
 * have been set.
 */
bool
idem_databases_read_ticks(void)
{
	HASH_SEQ_STATUS seq;
	IdemDatabase *database;
	int64 steady = idem_clock_steady();
	TimestampTz now = GetCurrentTimestamp();
	bool has_all = true;
	int n;
	IdemDatabaseTick *ticks = idem_entries_copy_ticks(&n);

	have_ticks = n > 0;
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->tick_due = PG_INT64_MAX;
	for (int i = 0; i < n; i++)
	{
		database = hash_search(databases, &ticks[i].database, HASH_FIND, NULL);
		has_all &= database != NULL;
		if (database != NULL && ticks[i].tick - now < USECS_PER_DAY)
			database->tick_due = steady + (ticks[i].tick - now);
	}
	pfree(ticks);
	return has_all;
}

/* Does any database have a tick to come? */
bool
idem_databases_have_ticks(void)
{
	return have_ticks;
}

/* When the database must be visited, for whatever reason */
int64
idem_databases_due(const IdemDatabase *database)
{
	int64 due = Min(database->due, Min(database->tick_due, database->tick_retry));

	return Max(due, database->not_before);
}

/* The database cannot be visited now: visit it at this time, and not before */
void
idem_databases_postpone(IdemDatabase *database, int64 until)
{
	database->due = database->tick_retry = database->not_before = until;
}

/* W5: the database that is due first, so that none starves; NULL if there is no database */
IdemDatabase *
idem_databases_first(void)
{
	HASH_SEQ_STATUS seq;
	IdemDatabase *database;
	IdemDatabase *first = NULL;

	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		if (first == NULL || idem_databases_due(database) < idem_databases_due(first))
			first = database;
	}
	return first;
}

/*
 * May a worker connect to the database?  Asked just before a visit.  A session
 * that drops, copies or renames the database holds a lock that conflicts with the
 * one taken here, without waiting; a worker sent there would wait for it (W2).
 */
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

		ScanKeyInit(&key, Anum_pg_database_oid, BTEqualStrategyNumber, F_OIDEQ,
					ObjectIdGetDatum(oid));
		scan = systable_beginscan(rel, DatabaseOidIndexId, criticalSharedRelcachesBuilt, NULL, 1,
								  &key);
		tuple = systable_getnext(scan);
		if (HeapTupleIsValid(tuple) && may_be_visited((Form_pg_database) GETSTRUCT(tuple)))
			access = IDEM_ACCESS_YES;
		systable_endscan(scan);
		table_close(rel, AccessShareLock);
	}
	CommitTransactionCommand();
	return access;
}

/* W7: log a failure if it has just begun, and double the delay until the next visit */
static void
note_failure(IdemDatabase *database, const char *error)
{
	if (database->delay == 0)
		ereport(LOG,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("idem cleanup failed in database \"%s\": %s", database->name, error),
				errdetail("The launcher tries again after ten minutes at most. The failure is not logged again until cleanup has worked."));
	database->delay = idem_cleanup_double_delay(database->delay, IDEM_MAX_DELAY);
}

/* W7: the worker has ended without a report */
static void
note_lost(IdemDatabase *database, const IdemVisit *visit)
{
	const char *error = visit->report.error;

	if (error[0] == '\0')
		error = visit->report.connected ? "the worker was terminated" : "the worker could not connect";
	idem_entries_set_failure(database->oid, error);
	note_failure(database, error);
}

/* W7: log the end of a failure, if there was one.  due is the time of the next visit. */
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

/* Shorten the pauses while the worker does not keep up: the lag grows, the rows do not get fewer */
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

/* T7: log a failure of schedules if it has just begun, and double the delay until the next try */
static void
note_tick_failure(IdemDatabase *database, const char *error)
{
	if (database->tick_delay == 0)
		ereport(LOG,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("idem schedules failed in database \"%s\": %s", database->name, error),
				errdetail("The launcher tries again after one minute at most. The failure is not logged again until all schedules have worked."));
	database->tick_delay = idem_cleanup_double_delay(database->tick_delay, MAX_TICK_DELAY);
	database->tick_retry = idem_clock_steady() + database->tick_delay;
}

/* T7: log the end of a failure, if there was one */
static void
note_tick_success(IdemDatabase *database)
{
	if (database->tick_delay != 0)
		ereport(LOG,
				errcode(ERRCODE_SUCCESSFUL_COMPLETION),
				errmsg("idem schedules work again in database \"%s\"", database->name));
	database->tick_delay = 0;
}

/* Schedule the next try of ticks that failed or were locked in the round (T6, T7) */
static void
schedule_tick_retry(IdemDatabase *database)
{
	const IdemTickReport *round = &database->ticks;
	int64 now = idem_clock_steady();

	database->tick_retry = PG_INT64_MAX;
	if (!round->was_locked)
		database->ticks_locked = 0;
	else if (database->ticks_locked == 0)
		database->ticks_locked = now;
	if (round->failed)
		note_tick_failure(database, round->error);
	else if (round->was_locked && now - database->ticks_locked > MAX_LOCKED)
		note_tick_failure(database, "a schedule or a table is locked");
	else
	{
		note_tick_success(database);
		if (round->was_locked)
			database->tick_retry = now + TICK_LOCKED_DELAY;
	}
}

/* T10: a turn has ended, and perhaps the round */
static void
end_turn(IdemDatabase *database, const IdemTickReport *report)
{
	IdemTickReport *round = &database->ticks;

	if (report->failed && !round->failed)
		memcpy(round->error, report->error, sizeof(round->error));
	round->failed |= report->failed;
	round->was_locked |= report->was_locked;
	round->round = report->round;
	round->skip = report->skip;
	if (round->round != 0)
	{
		/* at once, but after databases that have been due for longer */
		database->tick_retry = idem_clock_steady();
		return;
	}
	schedule_tick_retry(database);
	memset(round, 0, sizeof(*round));
}

/*
 * Set when the database is due again (W5), and note a failure or its end (W7).
 * The delay that grows with each failure does not apply to a locked table: it is
 * tried every LOCKED_DELAY, or every naptime if that is shorter.
 */
static void
schedule_next_visit(IdemDatabase *database, const IdemVisit *visit)
{
	const IdemVisitReport *report = &visit->report;
	int64 now = idem_clock_steady();
	int64 naptime = idem_cleanup_naptime();

	if (report->outcome == IDEM_VISIT_TICKED)
		return;
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
		case IDEM_VISIT_TICKED:
			break;
		case IDEM_VISIT_DONE:
		case IDEM_VISIT_SUBSCRIBED:
			note_success(database, now + naptime);
			break;
		case IDEM_VISIT_LOCKED:
			if (database->locked_since == 0)
				database->locked_since = now;
			if (now - database->locked_since > MAX_LOCKED)
				note_failure(database, "a table is locked");
			database->due = now + Min(naptime, LOCKED_DELAY);
			break;
		case IDEM_VISIT_OFF:
			note_success(database, now + Max(naptime, IDEM_MAX_DELAY));
			break;
		case IDEM_VISIT_NOT_INSTALLED:
			/* if the functions were used, CREATE EXTENSION may be about to commit */
			database->has_extension = false;
			note_success(database,
						 now + (report->was_used ? naptime : Max(naptime, IDEM_MAX_DELAY)));
			break;
	}
	if (report->more)
		database->due = now + report->rest;
}

/*
 * The worker has ended without a report.  That is no failure if the database may
 * no longer be visited, if a session is dropping, copying or renaming it, or if
 * the worker was connected and was terminated for the first time (W7).
 */
static bool
is_excused(IdemDatabase *database, const IdemVisit *visit)
{
	IdemAccess access = idem_databases_access(database->oid);

	if (access == IDEM_ACCESS_NO)
	{
		idem_databases_forget(database->oid);
		return true;
	}
	if (access == IDEM_ACCESS_YES &&
		(!visit->report.connected || visit->report.error[0] != '\0' || database->was_lost))
		return false;
	database->was_lost = access == IDEM_ACCESS_YES;
	idem_databases_postpone(database, idem_clock_steady() + IDEM_MIN_DELAY);
	return true;
}

/* Schedule the next visit after the worker has ended.  is_outdated: a reload during the visit. */
void
idem_databases_end_visit(const IdemVisit *visit, bool is_outdated)
{
	IdemDatabase *database = hash_search(databases, &visit->request.database, HASH_FIND, NULL);
	bool is_lost = visit->report.outcome == IDEM_VISIT_LOST;

	if (database == NULL || (is_lost && is_excused(database, visit)))
		return;
	database->was_lost = is_lost;
	schedule_next_visit(database, visit);
	/* the worker has not reported its ticks: run those that it has left with the next visit */
	if (is_lost)
		idem_databases_postpone(database, database->due);
	else
		end_turn(database, &visit->report.ticks);
	if (is_outdated)
		database->due = idem_clock_steady();
}
