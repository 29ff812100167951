/*
 * launcher.c
 *		The resident process: decides which database is cleaned up when, and
 *		starts a worker there (cleanup.c), one at a time.
 *
 * It is connected to no database and has a transaction open only while it reads
 * the list of databases.  It comes back five seconds after it was ended, and
 * starts on a standby when that is promoted.
 *
 * When a database is due is kept by a clock that never goes back.  A database
 * is visited once per naptime.  Where there is more to remove than one run of
 * the worker can do the next run follows at once, behind other databases that
 * are due.  Where the extension is not installed or cleanup is off the next
 * visit is ten minutes later, but if somebody uses the functions there (it has an
 * entry in shared memory then) it counts as installed.  What fails is tried again
 * after one second, then two, four, and so on up to ten minutes.  A reload makes
 * every database due.
 *
 * What goes wrong is logged here, when it begins and when it is over, and not
 * in between.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "tcop/tcopprot.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "shared.h"

/* Times in microseconds */
#define MIN_DELAY		USECS_PER_SEC
#define MAX_DELAY		(10 * USECS_PER_MINUTE)
#define CONNECT_TIMEOUT (10 * USECS_PER_SEC)
#define CLOCK_TOLERANCE USECS_PER_SEC
#define LOCKED_DELAY	(10 * USECS_PER_SEC)
#define LONG_LOCKED		USECS_PER_MINUTE

/* How much longer than the work the pauses of a worker are, and at least if it does not keep up */
#define USUAL_PAUSE 7
#define LEAST_PAUSE 1

/* A database to be visited */
typedef struct Database
{
	Oid oid; /* hash key */
	char name[NAMEDATALEN];
	int64 due;
	int64 delay;		/* until it is tried again; 0: the last run was fine */
	int64 locked_since; /* all runs have met a lock since then; 0: the last one has not */
	int64 lag;			/* for how long what was to be removed next had been expired */
	int64 rows;			/* live ones, in the tables where there was more */
	int pause;
	bool goes_on;	 /* the last run has left more */
	bool was_lost;	 /* and was ended by somebody */
	bool is_without; /* the extension was not there, and nobody had used it */
	bool is_listed;	 /* in the list of databases just read */
} Database;

static HTAB *databases;
static int64 next_list; /* when to read the list of databases */

/* The run under way; NULL: none */
static BackgroundWorkerHandle *running = NULL;
static Oid running_in;
static int64 running_since;
static bool run_is_outdated; /* there was a reload since */

/* No free slot for a worker: when to try again, and the delay after that */
static int64 slot_due = 0;
static int64 slot_delay = 0;

static int64
naptime(void)
{
	return idem_guc_cleanup_naptime * USECS_PER_SEC;
}

static void
set_state(IdemLauncherState state)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->launcher.state = state;
	idem_shared->launcher.memory = MemoryContextMemAllocated(TopMemoryContext, true);
	LWLockRelease(idem_shared->lock);
}

/* For idem_doctor(): tokens and expiry rely on the clock */
static void
watch_clock(void)
{
	static int64 last_ahead = 0;
	static bool is_first = true;
	TimestampTz wall = GetCurrentTimestamp();
	int64 ahead = wall - idem_clock_steady();

	if (!is_first && last_ahead - ahead > CLOCK_TOLERANCE)
	{
		LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
		idem_shared->launcher.clock_back_at = wall;
		idem_shared->launcher.clock_back_by = last_ahead - ahead;
		LWLockRelease(idem_shared->lock);
	}
	last_ahead = ahead;
	is_first = false;
}

/* Does somebody use the functions there? */
static bool
has_entry(Oid database)
{
	bool found;

	LWLockAcquire(idem_shared->lock, LW_SHARED);
	found = idem_shared_find(database, NULL) != NULL;
	LWLockRelease(idem_shared->lock);
	return found;
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
	Database *database;
	bool found;

	if (!is_for_us(form))
		return;
	database = hash_search(databases, &form->oid, HASH_ENTER, &found);
	if (!found)
	{
		memset((char *) database + sizeof(Oid), 0, sizeof(Database) - sizeof(Oid));
		database->pause = USUAL_PAUSE;
	}
	memcpy(database->name, NameStr(form->datname), NAMEDATALEN);
	database->is_listed = true;
	if (database->is_without && has_entry(database->oid))
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
 * Free entries of databases that are gone; nobody can be counting there any
 * more.  The entries were listed before the databases, so none of them is of a
 * newer one.
 */
static void
free_entries(const Oid *gone)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < idem_shared->nentries; i++)
	{
		if (!OidIsValid(gone[i]))
			continue;
		idem_shared->entries[i].database = InvalidOid;
		idem_shared->is_full = false;
	}
	LWLockRelease(idem_shared->lock);
}

static void
read_databases(void)
{
	Relation rel;
	TableScanDesc scan;
	HeapTuple tuple;
	Oid *gone;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
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

/* Read the list of databases, and forget those that are not to be visited any more */
static void
refresh_databases(void)
{
	HASH_SEQ_STATUS seq;
	Database *database;

	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->is_listed = false;
	read_databases();
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		if (!database->is_listed)
			(void) hash_search(databases, &database->oid, HASH_REMOVE, NULL);
	}
}

typedef enum Access
{
	ACCESS_YES,
	ACCESS_NOT_NOW, /* somebody is about to drop, copy or rename it */
	ACCESS_NO
} Access;

/* May a worker connect to the database?  Asked just before, so that none is sent to where it would have to wait. */
static Access
get_access(Oid database)
{
	Access access = ACCESS_NO;
	LOCKTAG tag;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, database, 0);
	if (LockAcquire(&tag, RowExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		access = ACCESS_NOT_NOW;
	else
	{
		Relation rel = table_open(DatabaseRelationId, AccessShareLock);
		SysScanDesc scan;
		ScanKeyData key;
		HeapTuple tuple;

		ScanKeyInit(&key, Anum_pg_database_oid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(database));
		scan = systable_beginscan(rel, DatabaseOidIndexId, criticalSharedRelcachesBuilt, NULL, 1, &key);
		tuple = systable_getnext(scan);
		if (HeapTupleIsValid(tuple) && is_for_us((Form_pg_database) GETSTRUCT(tuple)))
			access = ACCESS_YES;
		systable_endscan(scan);
		table_close(rel, AccessShareLock);
	}
	CommitTransactionCommand();
	return access;
}

static int64
longer(int64 delay, int64 max)
{
	return Min(Max(2 * delay, MIN_DELAY), max);
}

/* No slot is free: log that once, and try again later */
static void
wait_for_slot(void)
{
	if (slot_delay == 0)
	{
		ereport(LOG,
				errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				errmsg("no background worker slot is free for the cleanup of idem"),
				errdetail("Cleanup goes on by itself as soon as there is one."),
				errhint("Consider increasing \"%s\".", "max_worker_processes"));
		LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
		idem_shared->launcher.no_slot_since = GetCurrentTimestamp();
		LWLockRelease(idem_shared->lock);
	}
	slot_delay = longer(slot_delay, Min(naptime(), MAX_DELAY));
	slot_due = idem_clock_steady() + slot_delay;
	set_state(IDEM_LAUNCHER_NO_SLOT);
}

static void
slot_is_there(void)
{
	if (slot_delay == 0)
		return;
	ereport(LOG,
			errcode(ERRCODE_SUCCESSFUL_COMPLETION),
			errmsg("a background worker slot is free again for the cleanup of idem"));
	slot_delay = slot_due = 0;
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->launcher.no_slot_since = 0;
	LWLockRelease(idem_shared->lock);
}

static void
describe_run(const Database *database)
{
	IdemRun *run = &idem_shared->run;

	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	memset(run, 0, sizeof(*run));
	run->database = database->oid;
	run->goes_on = database->goes_on;
	run->pause = database->pause;
	run->outcome = IDEM_RUN_LOST;
	LWLockRelease(idem_shared->lock);
}

static void
start_worker(const Database *database)
{
	BackgroundWorker worker;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION | BGWORKER_INTERRUPTIBLE;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "idem", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "idem_cleanup_main", sizeof(worker.bgw_function_name));
	strlcpy(worker.bgw_name, "idem cleanup", sizeof(worker.bgw_name));
	strlcpy(worker.bgw_type, "idem cleanup", sizeof(worker.bgw_type));
	worker.bgw_main_arg = ObjectIdGetDatum(database->oid);
	worker.bgw_notify_pid = MyProcPid;

	describe_run(database);
	if (!RegisterDynamicBackgroundWorker(&worker, &running))
	{
		running = NULL;
		wait_for_slot();
		return;
	}
	slot_is_there();
	running_in = database->oid;
	running_since = idem_clock_steady();
	run_is_outdated = false;
	set_state(IDEM_LAUNCHER_WORKING);
}

/* Visit the database that is due for the longest time; false if none is */
static bool
visit_next(int64 now, int64 *next_due)
{
	HASH_SEQ_STATUS seq;
	Database *database;
	Database *first = NULL;

	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
	{
		if (first == NULL || database->due < first->due)
			first = database;
	}
	*next_due = first ? Max(first->due, slot_due) : PG_INT64_MAX;
	if (*next_due > now)
		return false;
	switch (get_access(first->oid))
	{
		case ACCESS_YES:
			start_worker(first);
			break;
		case ACCESS_NOT_NOW:
			first->due = now + MIN_DELAY;
			break;
		case ACCESS_NO:
			(void) hash_search(databases, &first->oid, HASH_REMOVE, NULL);
			break;
	}
	return true;
}

/* Cleanup failed there: log it if that is new, and try again later */
static void
note_failure(Database *database, const char *error)
{
	if (database->delay == 0)
		ereport(LOG,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("cleanup of idem fails in database \"%s\": %s", database->name, error),
				errdetail("It is tried again by itself, up to ten minutes later. This is not logged again before it works."));
	database->delay = longer(database->delay, MAX_DELAY);
	database->due = idem_clock_steady() + database->delay;
}

static void
note_success(Database *database, int64 due)
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
adapt_pause(Database *database, const IdemRun *run)
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
judge_run(Database *database, const IdemRun *run)
{
	int64 now = idem_clock_steady();

	adapt_pause(database, run);
	if (run->outcome != IDEM_RUN_LOCKED)
		database->locked_since = 0;
	switch (run->outcome)
	{
		case IDEM_RUN_LOST:
			note_failure(database, run->connected ? "the worker was ended" : "the worker could not connect");
			break;
		case IDEM_RUN_FAILED:
			note_failure(database, run->error);
			break;
		case IDEM_RUN_DONE:
		case IDEM_RUN_SUBSCRIBED:
			note_success(database, now + naptime());
			break;
		case IDEM_RUN_LOCKED:
			if (database->locked_since == 0)
				database->locked_since = now;
			if (now - database->locked_since > LONG_LOCKED)
				note_failure(database, "a table is locked");
			database->due = now + Min(naptime(), LOCKED_DELAY);
			break;
		case IDEM_RUN_NOT_THERE:
		case IDEM_RUN_OFF:
			/* an entry that is there already says nothing */
			database->is_without = run->outcome == IDEM_RUN_NOT_THERE && !has_entry(database->oid);
			note_success(database, now + Max(naptime(), MAX_DELAY));
			break;
	}
	if (run->more)
		database->due = now + run->rest;
}

/*
 * Was the worker ended by who wants to drop, copy or rename the database, or
 * anyway for the first time?  That is no failure.
 */
static bool
is_excused(Database *database, const IdemRun *run)
{
	Access access = get_access(database->oid);

	if (access == ACCESS_NO)
	{
		(void) hash_search(databases, &database->oid, HASH_REMOVE, NULL);
		return true;
	}
	if (access == ACCESS_YES && (!run->connected || database->was_lost))
		return false;
	database->was_lost = access == ACCESS_YES;
	database->due = idem_clock_steady() + MIN_DELAY;
	return true;
}

/* The worker has ended */
static void
end_run(void)
{
	Database *database = hash_search(databases, &running_in, HASH_FIND, NULL);
	IdemRun run;

	pfree(running);
	running = NULL;
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	run = idem_shared->run;
	idem_shared->launcher.runs++;
	idem_shared->launcher.last_run_at = GetCurrentTimestamp();
	LWLockRelease(idem_shared->lock);
	if (database == NULL || (run.outcome == IDEM_RUN_LOST && is_excused(database, &run)))
		return;
	database->was_lost = run.outcome == IDEM_RUN_LOST;
	judge_run(database, &run);
	if (run_is_outdated)
		database->due = idem_clock_steady();
}

static bool
is_connected(void)
{
	bool connected;

	LWLockAcquire(idem_shared->lock, LW_SHARED);
	connected = idem_shared->run.connected;
	LWLockRelease(idem_shared->lock);
	return connected;
}

/* Look after the worker.  Until when at most, if nothing happens?  0: it has ended. */
static int64
watch_worker(int64 now)
{
	pid_t pid;

	if (GetBackgroundWorkerPid(running, &pid) == BGWH_STOPPED)
	{
		end_run();
		return 0;
	}
	/* a copy of the database may be under way, which can take hours */
	if (now - running_since > CONNECT_TIMEOUT && !is_connected())
		TerminateBackgroundWorker(running);
	return now + USECS_PER_SEC;
}

/* Is a worker of a launcher before this one still there? */
static bool
is_left_over(void)
{
	bool found;

	LWLockAcquire(idem_shared->lock, LW_SHARED);
	found = idem_shared->run.pid != 0;
	LWLockRelease(idem_shared->lock);
	return found;
}

/* Do what is due; returns when to come again */
static int64
do_what_is_due(void)
{
	int64 now = idem_clock_steady();
	int64 next_due;

	if (running != NULL)
		return watch_worker(now);
	if (is_left_over())
		return now + USECS_PER_SEC / 10;
	if (now >= next_list)
	{
		refresh_databases();
		next_list = now + naptime();
	}
	if (visit_next(now, &next_due))
		return 0;
	if (slot_delay == 0)
		set_state(IDEM_LAUNCHER_SLEEPING);
	return Min(next_due, next_list);
}

/* A reload: every database is due */
static void
reload(void)
{
	HASH_SEQ_STATUS seq;
	Database *database;
	int64 now = idem_clock_steady();

	ProcessConfigFile(PGC_SIGHUP);
	next_list = slot_due = 0;
	run_is_outdated = true;
	hash_seq_init(&seq, databases);
	while ((database = hash_seq_search(&seq)) != NULL)
		database->due = Min(database->due, now);
}

static void
say_goodbye(int code, Datum arg)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->launcher.pid = 0;
	idem_shared->launcher.state = IDEM_LAUNCHER_STOPPED;
	LWLockRelease(idem_shared->lock);
}

static void
begin(void)
{
	HASHCTL ctl = {.keysize = sizeof(Oid), .entrysize = sizeof(Database)};

	databases = hash_create("idem databases", 64, &ctl, HASH_ELEM | HASH_BLOBS);
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	memset(&idem_shared->launcher, 0, sizeof(idem_shared->launcher));
	idem_shared->launcher.pid = MyProcPid;
	idem_shared->launcher.started_at = GetCurrentTimestamp();
	LWLockRelease(idem_shared->lock);
	before_shmem_exit(say_goodbye, (Datum) 0);
}

void
idem_launcher_main(Datum arg)
{
	uint32 wait_event;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	wait_event = idem_compat_wait_event("IdemLauncherMain");
	begin();

	for (;;)
	{
		int64 wakeup;
		int64 delay;

		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			reload();
		}
		watch_clock();
		wakeup = do_what_is_due();
		delay = wakeup == 0 ? 0 : (wakeup - idem_clock_steady()) / 1000 + 1;
		if (delay <= 0)
			continue;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, (long) Min(delay, 24 * 60 * 60 * 1000), wait_event);
		ResetLatch(MyLatch);
	}
}

/* From _PG_init, if the library is preloaded */
void
idem_launcher_register(void)
{
	BackgroundWorker worker;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 5;
	strlcpy(worker.bgw_library_name, "idem", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "idem_launcher_main", sizeof(worker.bgw_function_name));
	strlcpy(worker.bgw_name, "idem launcher", sizeof(worker.bgw_name));
	strlcpy(worker.bgw_type, "idem launcher", sizeof(worker.bgw_type));
	RegisterBackgroundWorker(&worker);
}
