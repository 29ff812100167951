/*
 * cleanup.c
 *		The worker that cleans up a database: comes, works for two seconds at
 *		most, and leaves.
 *
 * So whoever wants to drop, copy or rename the database has to wait for two
 * seconds at most, and one batch; PostgreSQL itself waits for five.
 *
 * Each batch is a transaction of its own, with a snapshot of its own.  Between
 * two of them is a pause, a multiple of the time that the batch took, in which
 * nothing is held.  Tables are locked only if nobody has a lock in the way or waits
 * for one: whoever wants to change them goes first.  Tables that are not
 * members of the extension are none of ours.
 *
 * After an error the batch is rolled back, and the table is left alone for the
 * rest of the run; the others go on.  The error is kept for people to see, and the
 * launcher is told.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "stats/stats.h"

#define MAX_RUN	 (2 * USECS_PER_SEC)
#define MAX_REST (10 * USECS_PER_SEC)

static IdemEntry *entry = NULL; /* where to report; NULL: nowhere */

/* The run under way; times in microseconds, by the steady clock */
typedef struct Run
{
	int64 until;
	int pause;			 /* times as long as the work */
	int64 rest;			 /* of a pause, that does not fit into the run */
	bool was_locked;	 /* somebody had a lock on a table */
	bool was_subscribed; /* a subscription writes a table */
	bool failed;
	char error[IDEM_ERROR_TEXT_LEN]; /* the first one */
	IdemPhase next;					 /* the phase whose turn it is */
	IdemCleanup phases[IDEM_NPHASES];
} Run;

static void
leave(int code, Datum arg)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	if (idem_shared->run.pid == MyProcPid)
		idem_shared->run.pid = 0;
	if (entry != NULL && entry->progress.phase < IDEM_NPHASES)
		entry->progress.phase = IDEM_PHASE_IDLE;
	LWLockRelease(idem_shared->lock);
}

/* Become the worker; false if there is another one, of a launcher that has ended since */
static bool
enter(Oid database, IdemRun *run)
{
	bool is_free;

	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	is_free = idem_shared->run.pid == 0 && idem_shared->run.database == database;
	if (is_free)
		idem_shared->run.pid = MyProcPid;
	*run = idem_shared->run;
	LWLockRelease(idem_shared->lock);
	if (is_free)
		before_shmem_exit(leave, (Datum) 0);
	return is_free;
}

static void
note_connected(void)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->run.connected = true;
	LWLockRelease(idem_shared->lock);
}

/* For people */
static void
note_outcome(IdemRunOutcome outcome, const Run *run, bool more, int64 backlog)
{
	IdemProgress *progress = &entry->progress;

	progress->phase = IDEM_PHASE_IDLE;
	progress->backlog = backlog;
	progress->next = run->next;
	if ((outcome == IDEM_RUN_DONE || outcome == IDEM_RUN_SUBSCRIBED) && !more)
		progress->finished_at = GetCurrentTimestamp();
	if (outcome == IDEM_RUN_LOCKED)
		progress->phase = IDEM_PHASE_LOCKED;
	if (outcome == IDEM_RUN_SUBSCRIBED)
		progress->phase = IDEM_PHASE_SUBSCRIBED;
	if (outcome == IDEM_RUN_OFF)
		progress->phase = IDEM_PHASE_OFF;
	if (outcome == IDEM_RUN_NOT_THERE)
		progress->phase = IDEM_PHASE_NOT_THERE;
	if (outcome == IDEM_RUN_FAILED)
	{
		progress->phase = IDEM_PHASE_FAILING;
		progress->error_at = GetCurrentTimestamp();
		strlcpy(progress->error, run->error, IDEM_ERROR_TEXT_LEN);
	}
}

/* What has become of the run, for the launcher and for people */
static void
report(IdemRunOutcome outcome, const Run *run)
{
	bool more = false;
	int64 backlog = 0;
	int64 rows = 0;
	TimestampTz oldest = DT_NOEND;

	for (int i = IDEM_PHASE_KEYS; i < IDEM_NPHASES; i++)
	{
		more |= run->phases[i].more;
		backlog += run->phases[i].left;
		rows += run->phases[i].rows;
		if (run->phases[i].more && !TIMESTAMP_NOT_FINITE(run->phases[i].place.from))
			oldest = Min(oldest, run->phases[i].place.from);
	}
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->run.outcome = outcome;
	idem_shared->run.more = more;
	idem_shared->run.rest = run->rest;
	idem_shared->run.rows = rows;
	idem_shared->run.lag = TIMESTAMP_NOT_FINITE(oldest) ? 0 : idem_clock_now() - oldest;
	strlcpy(idem_shared->run.error, run->error, IDEM_ERROR_TEXT_LEN);
	if (entry != NULL)
		note_outcome(outcome, run, more, outcome == IDEM_RUN_DONE ? backlog : -1);
	LWLockRelease(idem_shared->lock);
}

static Oid
find_member(Oid extension, const char *table)
{
	Oid schema = get_namespace_oid("idem", true);
	Oid relid = OidIsValid(schema) ? get_relname_relid(table, schema) : InvalidOid;

	return OidIsValid(relid) && getExtensionOfObject(RelationRelationId, relid) == extension ? relid : InvalidOid;
}

static Oid
get_owner(Oid relid)
{
	HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid owner;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for relation %u", relid);
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);
	return owner;
}

/* Lock a table without waiting; false if that is not possible, or it is not there */
static bool
lock_table(Run *run, Oid extension, const char *table, LOCKMODE mode)
{
	Oid relid = find_member(extension, table);

	if (!OidIsValid(relid))
		return false;
	if (!ConditionalLockRelationOid(relid, mode))
	{
		run->was_locked = true;
		return false;
	}
	/* it may have been dropped before we had the lock */
	return find_member(extension, table) == relid;
}

/* Lock the tables of a phase; false if there is nothing to be done.  owner: that of the first one. */
static bool
lock_tables(Run *run, const IdemPhaseDef *phase, Oid *owner)
{
	Oid extension = get_extension_oid("idem", true);

	if (!OidIsValid(extension))
		return false;
	for (int i = 0; phase->tables[i] != NULL; i++)
	{
		if (!lock_table(run, extension, phase->tables[i], RowExclusiveLock))
			return false;
	}
	if (phase->read_table != NULL && !lock_table(run, extension, phase->read_table, AccessShareLock))
		return false;
	*owner = get_owner(find_member(extension, phase->tables[0]));
	return true;
}

/* One batch of a phase, in a transaction of its own */
static void
clean_batch(Run *run, const IdemPhaseDef *phase, IdemCleanup *cleanup)
{
	Oid user;
	int sec_context;
	Oid owner;

	pgstat_report_activity(STATE_RUNNING, phase->activity);
	SetCurrentStatementStartTimestamp();
	idem_stats_hold();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (lock_tables(run, phase, &owner))
	{
		GetUserIdAndSecContext(&user, &sec_context);
		SetUserIdAndSecContext(owner, sec_context | SECURITY_RESTRICTED_OPERATION);
		idem_phase_run(phase, cleanup);
		run->was_subscribed |= cleanup->is_subscribed;
		SetUserIdAndSecContext(user, sec_context);
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
	idem_stats_let_go(true);
	pgstat_report_stat(false);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/* A new round begins with the oldest rows; of idem.jobs it goes on where the last one left off */
static void
begin_round(bool goes_on, Run *run)
{
	IdemPlace nowhere = {.from = DT_NOBEGIN};

	run->next = IDEM_PHASE_KEYS;
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	if (entry != NULL && entry->progress.next != IDEM_PHASE_IDLE)
		run->next = entry->progress.next;
	for (int i = IDEM_PHASE_KEYS; i < IDEM_NPHASES; i++)
	{
		run->phases[i].more = true;
		run->phases[i].place = entry != NULL ? entry->progress.places[i] : nowhere;
		if (!goes_on)
			run->phases[i].place.from = DT_NOBEGIN;
	}
	if (!goes_on && entry != NULL)
	{
		entry->progress.started_at = GetCurrentTimestamp();
		entry->progress.removed = entry->progress.working = 0;
	}
	LWLockRelease(idem_shared->lock);
}

static void
note_phase(IdemPhase phase)
{
	if (entry == NULL)
		return;
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	entry->progress.phase = phase;
	LWLockRelease(idem_shared->lock);
}

static void
note_batch(IdemPhase phase, const IdemCleanup *cleanup, int64 took)
{
	if (entry == NULL)
		return;
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	entry->progress.removed += cleanup->removed;
	entry->progress.working += took;
	entry->progress.places[phase] = cleanup->place;
	LWLockRelease(idem_shared->lock);
}

/* Let others work; what would go beyond the end of the run is left to the launcher */
static void
pause_for(Run *run, int64 length)
{
	static uint32 wait_event = 0;
	int64 end = idem_clock_steady() + length;

	run->rest = Min(Max(end - run->until, 0), MAX_REST);
	end = Min(end, run->until);
	if (wait_event == 0)
		wait_event = idem_compat_wait_event("IdemCleanupPause");
	for (;;)
	{
		int64 left = end - idem_clock_steady();

		if (ProcDiePending)
			proc_exit(1);
		CHECK_FOR_INTERRUPTS();
		if (left <= 0)
			break;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, (long) left / 1000 + 1, wait_event);
		ResetLatch(MyLatch);
	}
}

/* One batch of a phase, and the pause after it if there is more */
static void
clean_phase(Run *run, IdemPhase phase)
{
	IdemCleanup *cleanup = &run->phases[phase];
	int64 start = idem_clock_steady();
	int64 took;

	cleanup->batch = idem_guc_cleanup_batch_size;
	cleanup->deadline = run->until;
	cleanup->removed = cleanup->rows = cleanup->left = 0;
	cleanup->more = false;
	note_phase(phase);
	clean_batch(run, &idem_phases[phase], cleanup);
	took = idem_clock_steady() - start;
	note_batch(phase, cleanup, took);
	if (cleanup->more)
		pause_for(run, took * run->pause);
}

/* After an error: roll back, and keep the message of the first one */
static void
recover(Run *run, MemoryContext context)
{
	ErrorData *error;

	MemoryContextSwitchTo(context);
	error = CopyErrorData();
	FlushErrorState();
	AbortOutOfAnyTransaction();
	LWLockReleaseAll();
	idem_stats_let_go(false);
	MemoryContextSwitchTo(context);
	pgstat_report_activity(STATE_IDLE, NULL);
	if (!run->failed)
		idem_worker_copy_error(run->error, error->message);
	run->failed = true;
	FreeErrorData(error);
}

/* The same; after an error the phase is over for this run, and the others go on */
static void
try_phase(Run *run, IdemPhase phase)
{
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		clean_phase(run, phase);
	}
	PG_CATCH();
	{
		recover(run, context);
		run->phases[phase].more = false;
		run->phases[phase].removed = 0;
		/* skip the page so that one undeletable job does not block the rest */
		if (phase == IDEM_PHASE_JOBS)
		{
			run->phases[phase].place.page++;
			note_batch(phase, &run->phases[phase], 0);
		}
	}
	PG_END_TRY();
}

static bool
is_something_left(const Run *run)
{
	for (int phase = IDEM_PHASE_KEYS; phase < IDEM_NPHASES; phase++)
	{
		if (run->phases[phase].more)
			return true;
	}
	return false;
}

/* Clean up in turns, also from run to run, so that no table has to wait for another one */
static void
clean_all(Run *run)
{
	while (is_something_left(run) && idem_clock_steady() < run->until)
	{
		IdemPhase phase = run->next;

		run->next = phase + 1 < IDEM_NPHASES ? phase + 1 : IDEM_PHASE_KEYS;
		if (run->phases[phase].more)
			try_phase(run, phase);
	}
}

/*
 * Begin to look for the extension.  A use of its functions that comes later, of
 * one that is created after the look, is seen by the launcher (W5).
 */
static void
expect_use(void)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	entry = idem_shared_find(MyDatabaseId, NULL);
	if (entry != NULL)
	{
		idem_shared->run.was_used = entry->used;
		entry->used = false;
	}
	LWLockRelease(idem_shared->lock);
}

static bool
extension_exists(void)
{
	bool exists;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	exists = OidIsValid(get_extension_oid("idem", true));
	CommitTransactionCommand();
	return exists;
}

static IdemRunOutcome
clean_database(const IdemRun *order, Run *run)
{
	expect_use();
	idem_worker_take_database_settings();
	if (!extension_exists())
		return IDEM_RUN_NOT_THERE;
	entry = idem_shared_entry(MyDatabaseId, NULL);
	if (!idem_guc_cleanup)
		return IDEM_RUN_OFF;
	begin_round(order->goes_on, run);
	clean_all(run);
	if (run->failed)
		return IDEM_RUN_FAILED;
	if (run->was_locked)
		return IDEM_RUN_LOCKED;
	return run->was_subscribed ? IDEM_RUN_SUBSCRIBED : IDEM_RUN_DONE;
}

/* The same; an error outside of a phase is reported as one inside is (W7) */
static void
try_database(const IdemRun *order)
{
	MemoryContext context = CurrentMemoryContext;
	Run run = {.until = idem_clock_steady() + MAX_RUN, .pause = order->pause};
	volatile IdemRunOutcome outcome = IDEM_RUN_FAILED;

	PG_TRY();
	{
		outcome = clean_database(order, &run);
	}
	PG_CATCH();
	{
		recover(&run, context);
		memset(run.phases, 0, sizeof(run.phases));
		if (entry == NULL)
			entry = idem_shared_entry(MyDatabaseId, NULL);
	}
	PG_END_TRY();
	report(outcome, &run);
}

void
idem_cleanup_main(Datum arg)
{
	Oid database = DatumGetObjectId(arg);
	IdemRun order;

	idem_worker_begin();
	if (!enter(database, &order))
		return;
	BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	idem_worker_limit_lock_waits();
	note_connected();
	try_database(&order);
}
