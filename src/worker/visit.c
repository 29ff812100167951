/*
 * visit.c
 *		The worker: visits one database, removes expired rows there, and exits.
 *
 * A visit lasts at most two seconds.  So a session that wants to drop, copy or
 * rename the database waits for at most two seconds and one batch.  PostgreSQL
 * itself waits for five seconds before such a command fails (W2).
 *
 * Each batch is a transaction of its own, with a snapshot of its own.  A pause
 * follows, which lasts for a multiple of the time of the batch.  During the
 * pause the worker has no transaction and no lock.  The worker locks a table
 * only if no other session holds or awaits a conflicting lock, so DDL goes
 * first.  It touches only members of the extension (W8).
 *
 * After an error the batch is rolled back.  Its sweep ends for this visit, and
 * the other sweeps continue.  The views show the error.  The worker reports it to
 * the launcher, which logs it (W7).
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
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "worker/worker.h"

/* Times in microseconds */
#define MAX_VISIT (2 * USECS_PER_SEC)
#define MAX_REST  (10 * USECS_PER_SEC)

/* The visit under way; times in microseconds, by the steady clock */
typedef struct Visit
{
	int64 until;
	int pause;			 /* length of a pause as a multiple of the batch before it */
	int64 rest;			 /* part of the last pause that is left when the visit ends */
	bool was_used;		 /* see IdemVisitReport */
	bool was_locked;	 /* another session had a conflicting lock on a table */
	bool was_subscribed; /* a subscription writes a table */
	bool failed;
	char error[IDEM_ERROR_TEXT_LEN]; /* the first one */
	IdemPhase next;					 /* the sweep whose turn it is */
	IdemSweepBatch batches[IDEM_LAST_SWEEP + 1];
} Visit;

/* Progress of cleanup in this database, as published */
static IdemProgress progress;

static void
publish_progress(void)
{
	idem_shmem_set_progress(MyDatabaseId, &progress);
}

/* A worker that is terminated in the middle of a sweep is not at work any more */
static void
at_exit(int code, Datum arg)
{
	idem_exchange_end_visit();
	if (progress.phase >= IDEM_FIRST_SWEEP && progress.phase <= IDEM_LAST_SWEEP)
	{
		progress.phase = IDEM_PHASE_IDLE;
		publish_progress();
	}
}

/* What the views show after a visit with this outcome */
static IdemPhase
get_final_phase(IdemVisitOutcome outcome)
{
	switch (outcome)
	{
		case IDEM_VISIT_LOCKED:
			return IDEM_PHASE_LOCKED;
		case IDEM_VISIT_SUBSCRIBED:
			return IDEM_PHASE_SUBSCRIBED;
		case IDEM_VISIT_OFF:
			return IDEM_PHASE_OFF;
		case IDEM_VISIT_NOT_INSTALLED:
			return IDEM_PHASE_NOT_INSTALLED;
		case IDEM_VISIT_FAILED:
			return IDEM_PHASE_FAILING;
		case IDEM_VISIT_LOST:
		case IDEM_VISIT_DONE:
			break;
	}
	return IDEM_PHASE_IDLE;
}

/* Publish the outcome in the progress of the database */
static void
publish_outcome(const Visit *visit, const IdemVisitReport *report, int64 backlog)
{
	IdemVisitOutcome outcome = report->outcome;

	progress.phase = get_final_phase(outcome);
	progress.backlog = outcome == IDEM_VISIT_DONE ? backlog : -1;
	progress.next = visit->next;
	if ((outcome == IDEM_VISIT_DONE || outcome == IDEM_VISIT_SUBSCRIBED) && !report->more)
		progress.finished_at = GetCurrentTimestamp();
	if (outcome == IDEM_VISIT_FAILED)
	{
		progress.error_at = GetCurrentTimestamp();
		strlcpy(progress.error, visit->error, IDEM_ERROR_TEXT_LEN);
	}
	publish_progress();
}

/* Report the outcome to the launcher, and show it in the views */
static void
report_outcome(IdemVisitOutcome outcome, const Visit *visit)
{
	IdemVisitReport report = {.connected = true,
							  .outcome = outcome,
							  .was_used = visit->was_used,
							  .rest = visit->rest};
	int64 backlog = 0;
	TimestampTz oldest = DT_NOEND;

	for (int i = IDEM_FIRST_SWEEP; i <= IDEM_LAST_SWEEP; i++)
	{
		const IdemSweepBatch *batch = &visit->batches[i];

		report.more |= batch->more;
		report.rows += batch->rows;
		backlog += batch->left;
		if (batch->more && !TIMESTAMP_NOT_FINITE(batch->cursor.from))
			oldest = Min(oldest, batch->cursor.from);
	}
	report.lag = TIMESTAMP_NOT_FINITE(oldest) ? 0 : idem_clock_now() - oldest;
	strlcpy(report.error, visit->error, IDEM_ERROR_TEXT_LEN);
	idem_exchange_set_report(&report);
	publish_outcome(visit, &report, backlog);
}

/* W8: find a table in the schema idem that is a member of the extension */
static Oid
find_member(Oid extension, const char *table)
{
	Oid schema = get_namespace_oid("idem", true);
	Oid relid = OidIsValid(schema) ? get_relname_relid(table, schema) : InvalidOid;

	return OidIsValid(relid) && getExtensionOfObject(RelationRelationId, relid) == extension ?
		relid :
		InvalidOid;
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

/* W2: lock a table without waiting; false if another session has locked it, or it does not exist */
static bool
lock_table(Visit *visit, Oid extension, const char *table, LOCKMODE mode)
{
	Oid relid = find_member(extension, table);

	if (!OidIsValid(relid))
		return false;
	if (!ConditionalLockRelationOid(relid, mode))
	{
		visit->was_locked = true;
		return false;
	}
	/* another session may have dropped it before this one got the lock */
	return find_member(extension, table) == relid;
}

/* Lock the tables of a sweep; false: skip the sweep.  Sets owner to that of the first table. */
static bool
lock_tables(Visit *visit, const IdemSweep *sweep, Oid *owner)
{
	Oid extension = get_extension_oid("idem", true);

	if (!OidIsValid(extension))
		return false;
	for (int i = 0; sweep->tables[i] != NULL; i++)
	{
		if (!lock_table(visit, extension, sweep->tables[i], RowExclusiveLock))
			return false;
	}
	if (sweep->read_table != NULL &&
		!lock_table(visit, extension, sweep->read_table, AccessShareLock))
		return false;
	*owner = get_owner(find_member(extension, sweep->tables[0]));
	return true;
}

/*
 * Run one batch of a sweep in a transaction of its own (W2), as the owner of the
 * table, in a restricted security context (W8).
 */
static void
run_batch(Visit *visit, const IdemSweep *sweep, IdemSweepBatch *batch)
{
	Oid user;
	int sec_context;
	Oid owner;

	pgstat_report_activity(STATE_RUNNING, sweep->activity);
	SetCurrentStatementStartTimestamp();
	idem_counters_buffer();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (lock_tables(visit, sweep, &owner))
	{
		GetUserIdAndSecContext(&user, &sec_context);
		SetUserIdAndSecContext(owner, sec_context | SECURITY_RESTRICTED_OPERATION);
		idem_sweep_run(sweep, batch);
		visit->was_subscribed |= batch->is_subscribed;
		SetUserIdAndSecContext(user, sec_context);
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
	idem_counters_flush(true);
	pgstat_report_stat(false);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/*
 * Begin a round, or continue the last one.  A new round begins with the oldest
 * rows, but in idem.jobs with the page where the last round stopped.
 */
static void
begin_round(bool continues, Visit *visit)
{
	bool is_known = idem_shmem_get_progress(MyDatabaseId, &progress);

	visit->next = progress.next != IDEM_PHASE_IDLE ? progress.next : IDEM_FIRST_SWEEP;
	for (int i = IDEM_FIRST_SWEEP; i <= IDEM_LAST_SWEEP; i++)
	{
		visit->batches[i].more = true;
		visit->batches[i].cursor = progress.cursors[i];
		if (!continues || !is_known)
			visit->batches[i].cursor.from = DT_NOBEGIN;
	}
	if (!continues)
	{
		progress.started_at = GetCurrentTimestamp();
		progress.removed = progress.working = 0;
	}
	publish_progress();
}

static void
publish_batch(IdemPhase phase, const IdemSweepBatch *batch, int64 took)
{
	progress.removed += batch->removed;
	progress.working += took;
	progress.cursors[phase] = batch->cursor;
	publish_progress();
}

/*
 * Pause without a transaction and without locks (W4).  If the pause is longer than
 * the rest of the visit, the launcher waits for the remainder before the next visit.
 */
static void
pause_for(Visit *visit, int64 length)
{
	static uint32 wait_event = 0;
	int64 end = idem_clock_steady() + length;

	visit->rest = Min(Max(end - visit->until, 0), MAX_REST);
	end = Min(end, visit->until);
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
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 (long) left / 1000 + 1, wait_event);
		ResetLatch(MyLatch);
	}
}

/* Run one batch of a sweep, and pause if there is more to remove */
static void
run_sweep(Visit *visit, IdemPhase phase)
{
	IdemSweepBatch *batch = &visit->batches[phase];
	int64 start = idem_clock_steady();
	int64 took;

	batch->max = idem_guc_cleanup_batch_size;
	batch->deadline = visit->until;
	batch->removed = batch->rows = batch->left = 0;
	batch->more = false;
	progress.phase = phase;
	publish_progress();
	run_batch(visit, &idem_sweeps[phase], batch);
	took = idem_clock_steady() - start;
	publish_batch(phase, batch, took);
	if (batch->more)
		pause_for(visit, took * visit->pause);
}

/* After an error: roll back, and keep the message if it is the first error of the visit */
static void
recover_from_error(Visit *visit, MemoryContext context)
{
	ErrorData *error;

	MemoryContextSwitchTo(context);
	error = CopyErrorData();
	FlushErrorState();
	AbortOutOfAnyTransaction();
	LWLockReleaseAll();
	idem_counters_flush(false);
	MemoryContextSwitchTo(context);
	pgstat_report_activity(STATE_IDLE, NULL);
	if (!visit->failed)
		idem_exchange_copy_error(visit->error, error->message);
	visit->failed = true;
	FreeErrorData(error);
}

/* Run a batch of a sweep; an error ends this sweep for the visit, and the others continue (W7) */
static void
try_sweep(Visit *visit, IdemPhase phase)
{
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		run_sweep(visit, phase);
	}
	PG_CATCH();
	{
		recover_from_error(visit, context);
		visit->batches[phase].more = false;
		visit->batches[phase].removed = 0;
		/* skip the page, so that one job that cannot be made dead does not block the rest */
		if (phase == IDEM_PHASE_JOBS)
		{
			visit->batches[phase].cursor.page++;
			publish_batch(phase, &visit->batches[phase], 0);
		}
	}
	PG_END_TRY();
}

static bool
has_more(const Visit *visit)
{
	for (int phase = IDEM_FIRST_SWEEP; phase <= IDEM_LAST_SWEEP; phase++)
	{
		if (visit->batches[phase].more)
			return true;
	}
	return false;
}

/*
 * Run the sweeps in turn, one batch each, until nothing is left or the visit ends
 * (W2).  The next visit begins with the sweep whose turn it is then, so that a table
 * with a large backlog does not delay the others.
 */
static void
run_sweeps(Visit *visit)
{
	while (has_more(visit) && idem_clock_steady() < visit->until)
	{
		IdemPhase phase = visit->next;

		visit->next = phase < IDEM_LAST_SWEEP ? phase + 1 : IDEM_FIRST_SWEEP;
		if (visit->batches[phase].more)
			try_sweep(visit, phase);
	}
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

/*
 * Clean up the database that this process is connected to (W5).  The worker clears
 * the flag "used" before it looks for the extension.  If a session uses the functions
 * after that, it sets the flag again, and the launcher sees it.
 */
static IdemVisitOutcome
clean_database(const IdemVisitRequest *request, Visit *visit)
{
	(void) idem_shmem_get_progress(MyDatabaseId, &progress);
	visit->was_used = idem_shmem_take_use();
	idem_process_take_database_settings();
	if (!extension_exists())
		return IDEM_VISIT_NOT_INSTALLED;
	/* make an entry for the database */
	(void) idem_shmem_get_slot(MyDatabaseId, NULL);
	if (!idem_guc_cleanup)
		return IDEM_VISIT_OFF;
	begin_round(request->continues, visit);
	run_sweeps(visit);
	if (visit->failed)
		return IDEM_VISIT_FAILED;
	if (visit->was_locked)
		return IDEM_VISIT_LOCKED;
	return visit->was_subscribed ? IDEM_VISIT_SUBSCRIBED : IDEM_VISIT_DONE;
}

/* Clean up the database; an error outside of a sweep is reported like one inside (W7) */
static void
try_database(const IdemVisitRequest *request)
{
	MemoryContext context = CurrentMemoryContext;
	Visit visit = {.until = idem_clock_steady() + MAX_VISIT, .pause = request->pause};
	volatile IdemVisitOutcome outcome = IDEM_VISIT_FAILED;

	PG_TRY();
	{
		outcome = clean_database(request, &visit);
	}
	PG_CATCH();
	{
		recover_from_error(&visit, context);
		memset(visit.batches, 0, sizeof(visit.batches));
		(void) idem_shmem_get_slot(MyDatabaseId, NULL);
	}
	PG_END_TRY();
	report_outcome(outcome, &visit);
}

/*
 * Main function of the worker.  It exits at once if the launcher has not asked for
 * this visit, or another worker has it: there is never more than one (W3).
 */
void
idem_visit_main(Datum arg)
{
	Oid database = DatumGetObjectId(arg);
	IdemVisitRequest request;
	IdemVisitReport connected = {.connected = true, .outcome = IDEM_VISIT_LOST};

	idem_process_begin();
	if (!idem_exchange_begin_visit(database, &request))
		return;
	before_shmem_exit(at_exit, (Datum) 0);
	BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	idem_process_limit_lock_waits();
	idem_exchange_set_report(&connected);
	try_database(&request);
}
