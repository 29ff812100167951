/*
 * launcher.c
 *		The resident process: keeps a list of databases, takes the one that is due, and starts a
 *		worker there (worker.c), one at a time.
 *
 * The launcher is connected to no database, and has a transaction open only while it reads
 * pg_database (W4).  The postmaster restarts it five seconds after it has ended (W3).  On a
 * standby the postmaster starts it at the promotion (W6).
 *
 * Each database has a due time for cleanup (W5), and one for its earliest tick, which sessions
 * and the worker note in shared memory (T6).  A visit for a tick does not clean up, unless that is
 * due, too.  schedule_cleanup() and schedule_ticks() alone say when a database is visited again;
 * doc/worker-protocol.md has the drawing.  All times are by the steady clock, in microseconds.
 *
 * A failure is logged when it begins and when it is over, not in between (W7): of cleanup or of
 * the schedules in a database, a missing slot for a worker, and an error of the launcher itself,
 * such as a timeout for a lock on pg_database.  Such an error does not end the launcher, and
 * idem_doctor() shows it.  After each failure the delay doubles.
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/table.h"
#include "access/xact.h"
#include "postmaster/interrupt.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"

#define CONNECT_TIMEOUT (10 * USECS_PER_SEC)
#define CLOCK_TOLERANCE USECS_PER_SEC
#define CLOCK_CHECK		(10 * USECS_PER_SEC)
#define MAX_SLEEP		USECS_PER_DAY

#define NAPTIME (idem_guc_cleanup_naptime * USECS_PER_SEC)

/* Delays after failures */
#define MIN_DELAY	   USECS_PER_SEC
#define MAX_DELAY	   (10 * USECS_PER_MINUTE)
#define MAX_TICK_DELAY USECS_PER_MINUTE

/* Delays until something that was locked is tried again; and how long that is no failure yet */
#define LOCKED_DELAY	  (10 * USECS_PER_SEC)
#define TICK_LOCKED_DELAY USECS_PER_SEC
#define MAX_LOCKED		  USECS_PER_MINUTE

/* The first visits begin between these two times after the start of the launcher */
#define FIRST_VISIT USECS_PER_SEC
#define LAST_VISIT	(5 * USECS_PER_SEC)

/* Pause of the worker as a multiple of batch time; LEAST_PAUSE if it does not keep up */
#define USUAL_PAUSE 7
#define LEAST_PAUSE 1

/* What may fail in a database, and be locked by another session */
typedef struct Trouble
{
	int64 delay;		/* until the next try after a failure; 0: the last one was fine */
	int64 locked_since; /* all tries since then met a lock; 0: the last one did not */
} Trouble;

typedef struct Database
{
	Oid oid; /* hash key */
	char name[NAMEDATALEN];
	int64 due;		  /* for cleanup */
	int64 not_before; /* no visit before this time */
	int64 tick_due;	  /* for its earliest tick; PG_INT64_MAX: none is known */
	int64 tick_retry; /* to try ticks again that failed or were locked; PG_INT64_MAX: none */
	Trouble cleanup;
	Trouble schedules;
	IdemTickReport ticks; /* what the turns of the round under way have reported */
	int64 lag;			  /* how long ago the oldest row left expired */
	int64 rows;			  /* live rows in the tables that have rows left to remove */
	int pause;			  /* length of a pause as a multiple of the batch before it */
	bool continues;		  /* the last visit left rows to remove */
	bool was_lost;		  /* the worker of the last visit was terminated */
	bool has_extension;	  /* as the last visit found; true before the first one */
	bool is_listed;		  /* in the list of databases just read */
} Database;

/* May a worker connect to a database? */
typedef enum Access
{
	ACCESS_YES,
	ACCESS_NOT_NOW, /* a session is dropping, copying or renaming the database */
	ACCESS_NO
} Access;

static HTAB *databases;
static int64 started_at;
static bool is_first_list = true;
static int64 next_list;			/* when to read the list of databases next */
static bool have_ticks = false; /* when the ticks were last read */

/* State of the launcher, as published */
static IdemLauncher launcher;

/* The worker of the visit under way; NULL: none */
static BackgroundWorkerHandle *worker_handle = NULL;
static int64 visit_started;
static bool visit_is_outdated; /* there was a reload since it started */

/* No free slot for a worker: when to try again, and the last delay; 0: a slot was free */
static int64 slot_due = 0;
static int64 slot_delay = 0;

/* Pause after an error of the launcher itself; 0: the last turn was fine */
static int64 error_delay = 0;

/* The delay before the next attempt: it doubles after each failure (W7) */
static int64
double_delay(int64 delay, int64 max)
{
	return Min(Max(2 * delay, MIN_DELAY), max);
}

static void
publish_state(IdemLauncherState state)
{
	launcher.state = state;
	launcher.memory = MemoryContextMemAllocated(TopMemoryContext, true);
	idem_exchange_set_launcher(&launcher);
}

/* When the database must be visited, for whatever reason */
static int64
get_due(const Database *database)
{
	int64 due = Min(database->due, Min(database->tick_due, database->tick_retry));

	return Max(due, database->not_before);
}

/* The database cannot be visited now: visit it at this time, and not before */
static void
postpone_visit(Database *database, int64 until)
{
	database->due = database->tick_retry = database->not_before = until;
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
 * Read the list of databases from pg_database, and forget those that no longer exist or may no
 * longer be visited (W5).
 *
 * Shared memory does not survive a crash, so the launcher does not know whether a visit has
 * caused it.  Therefore the first visits after every start of the launcher begin after one second
 * and are spread over the first five seconds.  A visit that crashes the server does not crash it
 * again at once (W3).
 */
static void
read_databases(void)
{
	List *gone = NIL;
	int nentries;
	IdemDatabaseInfo *infos;
	Relation rel;
	TableScanDesc scan;
	HeapTuple tuple;
	HASH_SEQ_STATUS seq;
	Database *database;
	int64 n;
	int64 i = 0;
	ListCell *lc;

	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->is_listed = false;

	begin_transaction();
	/* copied before pg_database is read: a database created meanwhile is not among them */
	infos = idem_entries_copy_databases(&nentries);
	for (int j = 0; j < nentries; j++)
		gone = lappend_oid(gone, infos[j].database);
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);
		bool found;

		gone = list_delete_oid(gone, form->oid);
		if (!may_be_visited(form))
			continue;
		database = hash_search(databases, &form->oid, HASH_ENTER, &found);
		if (!found)
			*database = (Database){.oid = form->oid,
								   .pause = USUAL_PAUSE,
								   .has_extension = true,
								   .tick_due = PG_INT64_MAX,
								   .tick_retry = PG_INT64_MAX};
		memcpy(database->name, NameStr(form->datname), NAMEDATALEN);
		database->is_listed = true;
		/* one without the extension becomes due if a session has used the functions there */
		if (!database->has_extension && idem_entries_is_used(database->oid))
		{
			database->has_extension = true;
			database->due = 0;
		}
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	foreach (lc, gone)
		idem_entries_forget_database(lfirst_oid(lc));
	CommitTransactionCommand();

	/* the first list has no database that is not listed */
	n = hash_get_num_entries(databases);
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		if (!database->is_listed)
			(void) hash_search(databases, &database->oid, HASH_REMOVE, NULL);
		else if (is_first_list)
			database->due = started_at + FIRST_VISIT + i++ * (LAST_VISIT - FIRST_VISIT) / n;
	}
	is_first_list = false;
}

/*
 * T6: read the earliest tick of each database from shared memory.  Returns false if a database
 * that has one is not in the list.  The time is computed anew at each turn, because the clock may
 * have been set.
 */
static bool
read_ticks(void)
{
	HASH_SEQ_STATUS seq;
	Database *database;
	int64 steady = idem_clock_steady();
	TimestampTz now = GetCurrentTimestamp();
	bool has_all = true;
	int n;
	IdemDatabaseInfo *infos = idem_entries_copy_databases(&n);

	have_ticks = false;
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->tick_due = PG_INT64_MAX;
	for (int i = 0; i < n; i++)
	{
		if (infos[i].next_tick == DT_NOEND)
			continue;
		have_ticks = true;
		database = hash_search(databases, &infos[i].database, HASH_FIND, NULL);
		has_all &= database != NULL;
		if (database != NULL && infos[i].next_tick - now < USECS_PER_DAY)
			database->tick_due = steady + (infos[i].next_tick - now);
	}
	pfree(infos);
	return has_all;
}

/*
 * May a worker connect to the database?  Asked just before a visit.  A session that drops, copies
 * or renames the database holds a lock that conflicts with the one taken here, without waiting; a
 * worker sent there would wait for it (W2).
 */
static Access
check_access(Oid oid)
{
	Access access = ACCESS_NO;
	LOCKTAG tag;

	begin_transaction();
	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, oid, 0);
	if (LockAcquire(&tag, RowExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		access = ACCESS_NOT_NOW;
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
			access = ACCESS_YES;
		systable_endscan(scan);
		table_close(rel, AccessShareLock);
	}
	CommitTransactionCommand();
	return access;
}

/* W7, T7: log a failure if it has just begun, and double the delay until the next try */
static void
note_failure(Database *database, Trouble *trouble, const char *error)
{
	bool is_cleanup = trouble == &database->cleanup;

	if (trouble->delay == 0)
		ereport(LOG,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				is_cleanup ?
					errmsg("idem cleanup failed in database \"%s\": %s", database->name, error) :
					errmsg("idem schedules failed in database \"%s\": %s", database->name, error),
				is_cleanup ?
					errdetail("The launcher tries again after ten minutes at most. The failure is not logged again until cleanup has worked.") :
					errdetail("The launcher tries again after one minute at most. The failure is not logged again until all schedules have worked."));
	trouble->delay = double_delay(trouble->delay, is_cleanup ? MAX_DELAY : MAX_TICK_DELAY);
}

/* W7, T7: log the end of a failure, if there was one */
static void
note_success(Database *database, Trouble *trouble)
{
	if (trouble->delay != 0)
		ereport(LOG,
				errcode(ERRCODE_SUCCESSFUL_COMPLETION),
				trouble == &database->cleanup ?
					errmsg("idem cleanup works again in database \"%s\"", database->name) :
					errmsg("idem schedules work again in database \"%s\"", database->name));
	trouble->delay = 0;
}

/* Note whether a try met a lock; returns true if all have done so for too long */
static bool
note_locked(Trouble *trouble, bool was_locked, int64 now)
{
	if (!was_locked)
		trouble->locked_since = 0;
	else if (trouble->locked_since == 0)
		trouble->locked_since = now;
	return was_locked && now - trouble->locked_since > MAX_LOCKED;
}

/*
 * W5, W7: a visit that was to clean up has ended: note a failure or its end, and set when cleanup
 * is due again.  The delay that grows with each failure does not apply to a locked table: it is
 * tried every LOCKED_DELAY, or every naptime if that is shorter.
 */
static void
schedule_cleanup(Database *database, const IdemVisitReport *report, int64 now)
{
	int64 naptime = NAPTIME;
	int64 long_nap = Max(naptime, MAX_DELAY);
	bool locked_for_long =
		note_locked(&database->cleanup, report->outcome == IDEM_VISIT_LOCKED, now);
	const char *error = report->error;

	if (error[0] == '\0')
		error = report->connected ? "the worker was terminated" : "the worker could not connect";
	/* the other failures were published by the worker */
	if (report->outcome == IDEM_VISIT_LOST)
		idem_entries_set_failure(database->oid, error);
	switch (report->outcome)
	{
		case IDEM_VISIT_TICKED:
			break;
		case IDEM_VISIT_LOST:
		case IDEM_VISIT_FAILED:
			note_failure(database, &database->cleanup, error);
			database->due = now + database->cleanup.delay;
			break;
		case IDEM_VISIT_LOCKED:
			if (locked_for_long)
				note_failure(database, &database->cleanup, "a table is locked");
			database->due = now + Min(naptime, LOCKED_DELAY);
			break;
		case IDEM_VISIT_DONE:
		case IDEM_VISIT_SUBSCRIBED:
			note_success(database, &database->cleanup);
			database->due = now + naptime;
			break;
		case IDEM_VISIT_OFF:
			note_success(database, &database->cleanup);
			database->due = now + long_nap;
			break;
		case IDEM_VISIT_NOT_INSTALLED:
			note_success(database, &database->cleanup);
			database->has_extension = false;
			/* if the functions were used, CREATE EXTENSION may be about to commit */
			database->due = now + (report->was_used ? naptime : long_nap);
			break;
	}
	/* after other databases that are due */
	if (report->more)
		database->due = now + report->rest;

	/*
	 * shorten the pauses while the worker does not keep up: the lag grows, the rows do not get
	 * fewer
	 */
	if (!report->more)
		database->pause = USUAL_PAUSE;
	else if (database->continues && report->lag > database->lag && report->rows >= database->rows)
		database->pause = Max(database->pause / 2, LEAST_PAUSE);
	database->continues = report->more;
	database->lag = report->lag;
	database->rows = report->rows;
}

/*
 * T10: a turn of the schedules has ended.  If the round has ended with it, note a failure or its
 * end, and set when those that failed or were locked are tried again (T6, T7).
 */
static void
schedule_ticks(Database *database, const IdemTickReport *report, int64 now)
{
	IdemTickReport *round = &database->ticks;
	bool locked_for_long;

	if (report->failed && !round->failed)
		memcpy(round->error, report->error, sizeof(round->error));
	round->failed |= report->failed;
	round->was_locked |= report->was_locked;
	round->round = report->round;
	round->skip = report->skip;
	if (round->round != 0)
	{
		/* at once, but after databases that have been due for longer */
		database->tick_retry = now;
		return;
	}

	locked_for_long = note_locked(&database->schedules, round->was_locked, now);
	database->tick_retry = PG_INT64_MAX;
	if (round->failed || locked_for_long)
	{
		note_failure(database, &database->schedules,
					 round->failed ? round->error : "a schedule or a table is locked");
		database->tick_retry = now + database->schedules.delay;
	}
	else
	{
		note_success(database, &database->schedules);
		if (round->was_locked)
			database->tick_retry = now + TICK_LOCKED_DELAY;
	}
	memset(round, 0, sizeof(*round));
}

/* The worker has ended: decide when the database is visited again */
static void
end_visit(const IdemVisit *visit)
{
	Database *database = hash_search(databases, &visit->request.database, HASH_FIND, NULL);
	const IdemVisitReport *report = &visit->report;
	int64 now = idem_clock_steady();

	pfree(worker_handle);
	worker_handle = NULL;
	launcher.visits++;
	launcher.last_visit_at = GetCurrentTimestamp();
	idem_exchange_set_launcher(&launcher);
	if (database == NULL)
		return;

	if (report->outcome == IDEM_VISIT_LOST)
	{
		/*
		 * The worker has ended without a report.  That is no failure if the database may no longer
		 * be visited, if a session is dropping, copying or renaming it, or if the worker was
		 * connected and was terminated for the first time (W7).
		 */
		Access access = check_access(database->oid);
		bool is_failure = !report->connected || report->error[0] != '\0' || database->was_lost;

		if (access == ACCESS_NO)
			(void) hash_search(databases, &database->oid, HASH_REMOVE, NULL);
		else if (access == ACCESS_NOT_NOW || !is_failure)
		{
			database->was_lost = access == ACCESS_YES;
			postpone_visit(database, now + MIN_DELAY);
		}
		if (access != ACCESS_YES || !is_failure)
			return;
	}
	database->was_lost = report->outcome == IDEM_VISIT_LOST;
	if (report->outcome != IDEM_VISIT_TICKED)
		schedule_cleanup(database, report, now);
	/* a lost worker has not reported its ticks: run those that it has left with the next visit */
	if (database->was_lost)
		postpone_visit(database, database->due);
	else
		schedule_ticks(database, &report->ticks, now);
	if (visit_is_outdated)
		database->due = now;
}

/*
 * Start a worker in the database.  W7: if no slot is free, try again later.  A failure is logged
 * if a slot was free before, and its end if none was.
 */
static void
start_worker(const Database *database)
{
	BackgroundWorker worker;
	IdemVisitRequest request = {
		.database = database->oid,
		.cleans = database->due <= idem_clock_steady(),
		.continues = database->continues,
		.pause = database->pause,
		.round = database->ticks.round,
		.tick_skip = database->ticks.skip};

	idem_process_describe(&worker, "idem cleanup", "idem_worker_main");
	worker.bgw_flags |= BGWORKER_INTERRUPTIBLE;
	worker.bgw_main_arg = ObjectIdGetDatum(database->oid);
	worker.bgw_notify_pid = MyProcPid;

	idem_exchange_request_visit(&request);
	if (!RegisterDynamicBackgroundWorker(&worker, &worker_handle))
	{
		worker_handle = NULL;
		if (slot_delay == 0)
		{
			ereport(LOG,
					errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					errmsg("no background worker slot is free for idem cleanup"),
					errdetail("Cleanup continues as soon as a slot is free."),
					errhint("Consider increasing \"%s\".", "max_worker_processes"));
			launcher.no_slot_since = GetCurrentTimestamp();
		}
		slot_delay = double_delay(slot_delay, Min(NAPTIME, MAX_DELAY));
		slot_due = idem_clock_steady() + slot_delay;
		publish_state(IDEM_LAUNCHER_NO_SLOT);
		return;
	}
	if (slot_delay != 0)
		ereport(LOG,
				errcode(ERRCODE_SUCCESSFUL_COMPLETION),
				errmsg("a background worker slot is free again for idem cleanup"));
	slot_delay = slot_due = 0;
	launcher.no_slot_since = 0;
	visit_started = idem_clock_steady();
	visit_is_outdated = false;
	publish_state(IDEM_LAUNCHER_WORKING);
}

/*
 * Do what is due; returns when to wake up for the next turn, 0: at once.  There is never more than
 * one worker (W3).  The database that has been due for the longest time is visited first, so that
 * none starves (W5).
 */
static int64
take_turn(void)
{
	int64 now = idem_clock_steady();
	int64 next_due;
	IdemVisit visit;
	pid_t pid;
	HASH_SEQ_STATUS seq;
	Database *database;
	Database *first = NULL;

	/* wait for the end of the worker */
	if (worker_handle != NULL)
	{
		bool has_ended = GetBackgroundWorkerPid(worker_handle, &pid) == BGWH_STOPPED;

		idem_exchange_get(NULL, &visit);
		if (has_ended)
		{
			end_visit(&visit);
			return 0;
		}
		/* a session that copies the database keeps the worker from connecting, perhaps for hours */
		if (now - visit_started > CONNECT_TIMEOUT && !visit.report.connected)
			TerminateBackgroundWorker(worker_handle);
		return now + USECS_PER_SEC;
	}
	/* the worker of an earlier launcher may still run */
	idem_exchange_get(NULL, &visit);
	if (visit.pid != 0)
		return now + USECS_PER_SEC / 10;

	if (!read_ticks() || now >= next_list)
	{
		read_databases();
		next_list = now + NAPTIME;
	}
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		if (first == NULL || get_due(database) < get_due(first))
			first = database;
	}
	next_due = first ? Max(get_due(first), slot_due) : PG_INT64_MAX;
	if (next_due <= now)
	{
		switch (check_access(first->oid))
		{
			case ACCESS_YES:
				start_worker(first);
				break;
			case ACCESS_NOT_NOW:
				postpone_visit(first, now + MIN_DELAY);
				break;
			case ACCESS_NO:
				(void) hash_search(databases, &first->oid, HASH_REMOVE, NULL);
				break;
		}
		return 0;
	}
	if (slot_delay == 0)
		publish_state(IDEM_LAUNCHER_SLEEPING);
	/* T6: when a tick is due depends on the wall clock, which may be set meanwhile */
	if (have_ticks)
		next_due = Min(next_due, now + CLOCK_CHECK);
	return Min(next_due, next_list);
}

/* Take a turn; after an error of the launcher itself, try again later (W7).  Returns when. */
static int64
try_turn(void)
{
	MemoryContext context = CurrentMemoryContext;
	int64 wakeup;

	PG_TRY();
	{
		wakeup = take_turn();
		if (error_delay != 0)
			ereport(LOG,
					errcode(ERRCODE_SUCCESSFUL_COMPLETION),
					errmsg("idem launcher works again"));
		error_delay = 0;
	}
	PG_CATCH();
	{
		ErrorData *error;

		/* pg_cancel_backend() ends the launcher, and the postmaster starts it again (W3) */
		if (geterrcode() == ERRCODE_QUERY_CANCELED)
			PG_RE_THROW();
		error = idem_process_recover(context);
		if (error_delay == 0)
			ereport(LOG,
					errcode(error->sqlerrcode),
					errmsg("idem launcher failed: %s", error->message),
					errdetail("It tries again after ten minutes at most. The failure is not logged again until the launcher has worked."));
		error_delay = double_delay(error_delay, MAX_DELAY);
		launcher.error_at = GetCurrentTimestamp();
		idem_exchange_copy_error(launcher.error, error->message);
		publish_state(IDEM_LAUNCHER_FAILING);
		FreeErrorData(error);
		wakeup = idem_clock_steady() + error_delay;
	}
	PG_END_TRY();
	return wakeup;
}

/* For idem_doctor(): find out if the clock was set back, because tokens and expiry depend on it */
static void
watch_clock(void)
{
	static int64 last_ahead = 0;
	static bool is_first = true;
	TimestampTz wall = GetCurrentTimestamp();
	int64 ahead = wall - idem_clock_steady();

	if (!is_first && last_ahead - ahead > CLOCK_TOLERANCE)
	{
		launcher.clock_back_at = wall;
		launcher.clock_back_by = last_ahead - ahead;
		idem_exchange_set_launcher(&launcher);
	}
	last_ahead = ahead;
	is_first = false;
}

static void
at_exit(int code, Datum arg)
{
	launcher.pid = 0;
	publish_state(IDEM_LAUNCHER_STOPPED);
}

/* Main function of the launcher (W4).  It ends with status 1, so that it is started again (W3). */
void
idem_launcher_main(Datum arg)
{
	HASHCTL ctl = {.keysize = sizeof(Oid), .entrysize = sizeof(Database)};
	uint32 wait_event;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	idem_process_begin();
	idem_process_connect(InvalidOid);
	wait_event = WaitEventExtensionNew("IdemLauncherMain");
	databases = hash_create("idem databases", 64, &ctl, HASH_ELEM | HASH_BLOBS);
	started_at = idem_clock_steady();
	launcher.pid = MyProcPid;
	launcher.proc = MyProcNumber;
	launcher.started_at = GetCurrentTimestamp();
	launcher.awake_at = started_at;
	publish_state(IDEM_LAUNCHER_STOPPED);
	before_shmem_exit(at_exit, (Datum) 0);

	for (;;)
	{
		int64 wakeup;
		int64 now;

		/* after SIGTERM; with status 0 the postmaster would not start it again */
		if (ProcDiePending)
			proc_exit(1);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			HASH_SEQ_STATUS seq;
			Database *database;

			/*
			 * W5: a reload makes every database due, including those that are not in the list yet
			 */
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			next_list = slot_due = 0;
			visit_is_outdated = true;
			is_first_list = false;
			hash_seq_init(&seq, databases);
			while ((database = hash_seq_search(&seq)) != NULL)
			{
				database->due = Min(database->due, idem_clock_steady());
				database->not_before = 0;
			}
		}
		watch_clock();
		wakeup = try_turn();
		now = idem_clock_steady();
		if (wakeup <= now)
			continue;

		/* for idem_doctor(): a launcher that does not wake up at the time published is stuck */
		launcher.awake_at = Min(wakeup, now + MAX_SLEEP);
		idem_exchange_set_launcher(&launcher);
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 (long) ((launcher.awake_at - now) / 1000 + 1), wait_event);
		ResetLatch(MyLatch);
		launcher.awake_at = idem_clock_steady();
		idem_exchange_set_launcher(&launcher);
	}
}

/* Called by _PG_init() if the library is preloaded (W3, W6) */
void
idem_launcher_register(void)
{
	BackgroundWorker worker;

	idem_process_describe(&worker, "idem launcher", "idem_launcher_main");
	worker.bgw_restart_time = 5;
	RegisterBackgroundWorker(&worker);
}
