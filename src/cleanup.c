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
 * An error ends the run.  It is kept for people to see, and the launcher is told;
 * what the batch had removed is rolled back.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "commands/extension.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "shared.h"

#define MAX_RUN (2 * USECS_PER_SEC)

/* A phase of cleanup: the tables that it locks, the first of which it cleans */
typedef struct Phase
{
	const char *activity;
	const char *tables[4];
	void (*clean)(IdemCleanup *cleanup);
} Phase;

static const Phase phases[IDEM_NPHASES] = {
	[IDEM_PHASE_KEYS] = {"idem cleanup: keys", {"keys"}, idem_keystore_cleanup},
	[IDEM_PHASE_JOB_KEYS] = {"idem cleanup: keys of jobs", {"job_keys"}, idem_jobstore_cleanup_keys},
	[IDEM_PHASE_JOB_HISTORY] = {"idem cleanup: history of jobs", {"job_log"}, idem_jobstore_cleanup_log},
	[IDEM_PHASE_JOBS] = {"idem cleanup: jobs without attempts", {"jobs", "job_log", "queues"}, idem_jobstore_cleanup_jobs},
};

static IdemEntry *entry = NULL; /* where to report; NULL: nowhere */

/* The run under way */
typedef struct Run
{
	TimestampTz until;
	int pause;		 /* times as long as the work */
	int64 rest;		 /* of a pause, that does not fit into the run */
	bool was_locked; /* somebody had a lock on a table */
	bool more[IDEM_NPHASES];
	TimestampTz from[IDEM_NPHASES];
	int64 left[IDEM_NPHASES];
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

static void
note_outcome(IdemOutcomeOfRun outcome, int64 backlog, const char *error)
{
	IdemProgress *progress = &entry->progress;

	progress->phase = IDEM_PHASE_IDLE;
	progress->backlog = backlog;
	if (outcome == IDEM_RUN_DONE)
		progress->finished_at = GetCurrentTimestamp();
	if (outcome == IDEM_RUN_OFF)
		progress->phase = IDEM_PHASE_OFF;
	if (outcome == IDEM_RUN_NOT_THERE)
		progress->phase = IDEM_PHASE_NOT_THERE;
	if (outcome == IDEM_RUN_FAILED)
	{
		progress->phase = IDEM_PHASE_FAILING;
		progress->error_at = GetCurrentTimestamp();
		strlcpy(progress->error, error, IDEM_ERROR_TEXT_LEN);
	}
}

/* What has become of the run, for the launcher and for people */
static void
report(IdemOutcomeOfRun outcome, int64 backlog, int64 rest, const char *error)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->run.outcome = outcome;
	idem_shared->run.backlog = backlog;
	idem_shared->run.rest = rest;
	strlcpy(idem_shared->run.error, error, IDEM_ERROR_TEXT_LEN);
	if (entry != NULL)
		note_outcome(outcome, backlog, error);
	LWLockRelease(idem_shared->lock);
}

/* Settings of the database or the role shall not be in the way, as in autovacuum */
static void
set_options(void)
{
	SetConfigOption("search_path", "", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("statement_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("idle_in_transaction_session_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_isolation", "read committed", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_read_only", "off", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_deferrable", "off", PGC_SUSET, PGC_S_OVERRIDE);
	/* a removal that is lost in a crash is done again */
	SetConfigOption("synchronous_commit", "off", PGC_SUSET, PGC_S_OVERRIDE);
	/* the tables are locked without waiting; this is for what else there may be, such as their TOAST tables */
	SetConfigOption("lock_timeout", "1s", PGC_SUSET, PGC_S_OVERRIDE);
	if (GetConfigOption("transaction_timeout", true, false) != NULL)
		SetConfigOption("transaction_timeout", "0", PGC_SUSET, PGC_S_OVERRIDE);
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

/* Lock the tables of a phase without waiting; false if there is nothing to be done.  owner: that of the first one. */
static bool
lock_tables(Run *run, const Phase *phase, Oid *owner)
{
	Oid extension = get_extension_oid("idem", true);

	if (!OidIsValid(extension))
		return false;
	for (int i = 0; phase->tables[i] != NULL; i++)
	{
		Oid relid = find_member(extension, phase->tables[i]);

		if (!OidIsValid(relid))
			return false;
		if (!ConditionalLockRelationOid(relid, RowExclusiveLock))
		{
			run->was_locked = true;
			return false;
		}
		/* it may have been dropped before we had the lock */
		if (find_member(extension, phase->tables[i]) != relid)
			return false;
	}
	*owner = get_owner(find_member(extension, phase->tables[0]));
	return true;
}

/* One batch of a phase, in a transaction of its own */
static void
clean_batch(Run *run, const Phase *phase, IdemCleanup *cleanup)
{
	Oid user;
	int sec_context;
	Oid owner;

	pgstat_report_activity(STATE_RUNNING, phase->activity);
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (lock_tables(run, phase, &owner))
	{
		GetUserIdAndSecContext(&user, &sec_context);
		SetUserIdAndSecContext(owner, sec_context | SECURITY_RESTRICTED_OPERATION);
		phase->clean(cleanup);
		SetUserIdAndSecContext(user, sec_context);
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_stat(false);
	pgstat_report_activity(STATE_IDLE, NULL);
}

static void
begin_round(bool goes_on, Run *run)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < IDEM_NPHASES; i++)
		run->from[i] = goes_on && entry != NULL ? entry->progress.from[i] : DT_NOBEGIN;
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
	entry->progress.from[phase] = cleanup->from;
	LWLockRelease(idem_shared->lock);
}

/* Let others work; what would go beyond the end of the run is left to the launcher */
static void
pause_for(Run *run, int64 length)
{
	static uint32 wait_event = 0;
	TimestampTz end = GetCurrentTimestamp() + length;

	run->rest = Max(end - run->until, 0);
	end = Min(end, run->until);
	if (wait_event == 0)
		wait_event = idem_compat_wait_event("IdemCleanupPause");
	for (;;)
	{
		long left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), end);

		CHECK_FOR_INTERRUPTS();
		if (left <= 0)
			break;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, left, wait_event);
		ResetLatch(MyLatch);
	}
}

/* One batch of a phase, and the pause after it if there is more */
static void
clean_phase(Run *run, IdemPhase phase)
{
	IdemCleanup cleanup = {
		.batch = idem_guc_cleanup_batch_size,
		.deadline = run->until,
		.from = run->from[phase]};
	TimestampTz start = GetCurrentTimestamp();
	int64 took;

	note_phase(phase);
	clean_batch(run, &phases[phase], &cleanup);
	took = GetCurrentTimestamp() - start;
	note_batch(phase, &cleanup, took);
	run->more[phase] = cleanup.more;
	run->from[phase] = cleanup.from;
	run->left[phase] = cleanup.left;
	if (cleanup.more)
		pause_for(run, took * run->pause);
}

/* Clean up in turns, so that no table has to wait for another one; how many rows are left, as far as we know? */
static int64
clean_all(Run *run, bool *more)
{
	int64 left = 0;

	for (int phase = IDEM_PHASE_KEYS; phase < IDEM_NPHASES; phase++)
		run->more[phase] = true;
	do
	{
		*more = false;
		for (int phase = IDEM_PHASE_KEYS; phase < IDEM_NPHASES; phase++)
		{
			if (run->more[phase] && GetCurrentTimestamp() < run->until)
				clean_phase(run, phase);
			*more |= run->more[phase];
		}
	} while (*more && GetCurrentTimestamp() < run->until);
	for (int phase = IDEM_PHASE_KEYS; phase < IDEM_NPHASES; phase++)
		left += run->left[phase];
	return left;
}

/* The entry of a database without the extension, which had it once */
static void
find_entry(void)
{
	LWLockAcquire(idem_shared->lock, LW_SHARED);
	entry = idem_shared_find(MyDatabaseId, NULL);
	LWLockRelease(idem_shared->lock);
}

static bool
extension_exists(void)
{
	bool exists;

	StartTransactionCommand();
	exists = OidIsValid(get_extension_oid("idem", true));
	CommitTransactionCommand();
	return exists;
}

static void
clean_database(const IdemRun *order)
{
	Run run = {.until = GetCurrentTimestamp() + MAX_RUN, .pause = order->pause};
	bool more;
	int64 left;

	if (!extension_exists())
	{
		find_entry();
		report(IDEM_RUN_NOT_THERE, -1, 0, "");
		return;
	}
	entry = idem_shared_entry(MyDatabaseId, NULL);
	if (!idem_guc_cleanup)
	{
		report(IDEM_RUN_OFF, -1, 0, "");
		return;
	}
	begin_round(order->goes_on, &run);
	left = clean_all(&run, &more);
	report(more ? IDEM_RUN_MORE : run.was_locked ? IDEM_RUN_LOCKED :
												   IDEM_RUN_DONE,
		   left, run.rest, "");
}

void
idem_cleanup_main(Datum arg)
{
	MemoryContext context = CurrentMemoryContext;
	Oid database = DatumGetObjectId(arg);
	IdemRun order;

	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	if (!enter(database, &order))
		return;
	BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	note_connected();
	set_options();

	PG_TRY();
	{
		clean_database(&order);
	}
	PG_CATCH();
	{
		ErrorData *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		report(IDEM_RUN_FAILED, -1, 0, error->message);
	}
	PG_END_TRY();
}
