/*
 * worker.c
 *		The worker: visits one database, enqueues the jobs of its schedules, removes expired
 *		rows, and exits.
 *
 * A visit lasts at most two seconds.  So a session that wants to drop, copy or rename the
 * database waits for at most two seconds and one batch.  PostgreSQL itself waits for five
 * seconds before such a command fails (W2).
 *
 * Each schedule that is due, and each batch of a sweep, is a transaction of its own.  After
 * an error it is rolled back.  The other schedules and the other sweeps continue.  The worker
 * reports the error to the launcher, which logs it (W7), and the views show it.
 *
 * A round of ticks is about the schedules that are due when it begins.  It takes several turns
 * if they are many, because a turn ends when another database has a tick that is due (T10).
 * Schedules that were ticked are not due any more.  Those that failed or were locked are, so the
 * next turn skips as many of the first ones.  Each schedule is tried once in a round, then, and
 * the delay of T7 follows.  If other sessions change schedules meanwhile, a turn may skip a wrong
 * one.  The next round finds it, which comes soon, because some have failed.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "commands/extension.h"
#include "pgstat.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"
#include "schedules/schedules.h"

/* Times in microseconds */
#define MAX_VISIT (2 * USECS_PER_SEC)
#define MAX_REST  (10 * USECS_PER_SEC)

/* T10: how long the turn of a database is while another one has a tick that is due */
#define TURN (USECS_PER_SEC / 5)

/* The most schedules that a turn lists */
#define MAX_LISTED 1000

static const IdemTables tick_tables = {{"schedules", "jobs", "job_keys", "job_log"}, "queues"};

/* The visit under way; times in microseconds, by the steady clock */
typedef struct Visit
{
	const IdemVisitRequest *request;
	int64 until;
	int64 rest;			 /* part of the last pause that is left when the visit ends */
	bool was_used;		 /* see IdemVisitReport */
	bool was_locked;	 /* another session had a conflicting lock on a table */
	bool was_subscribed; /* a subscription writes a table */
	bool failed;
	char error[IDEM_ERROR_TEXT_LEN]; /* the first one */
	IdemPhase next;					 /* the sweep whose turn it is */
	IdemSweepBatch batches[IDEM_LAST_SWEEP + 1];
	IdemTickReport ticks;
	MemoryContext tick_context;
	TimestampTz round; /* when the round of ticks began */
	List *due;		   /* names of the schedules that are due */
	text *name;		   /* the one that is tried */
} Visit;

/* What a transaction of the worker does with schedules */
typedef enum TickStep
{
	STEP_LIST, /* list those that are due */
	STEP_TICK, /* enqueue the jobs of one */
	STEP_NEXT  /* note the earliest tick that was not due when the round began (T6) */
} TickStep;

/* The tables of a transaction when it begins */
typedef enum TableState
{
	TABLES_READY,
	TABLES_LOCKED, /* another session has locked one */
	TABLES_MISSING /* there is no such table */
} TableState;

/* Progress of cleanup in this database, as published */
static IdemProgress progress;

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

/*
 * W2: lock a table only if no other session holds or awaits a conflicting lock, so DDL goes
 * first
 */
static TableState
lock_table(Oid extension, const char *table, LOCKMODE mode)
{
	Oid relid = find_member(extension, table);

	if (!OidIsValid(relid))
		return TABLES_MISSING;
	if (!ConditionalLockRelationOid(relid, mode))
		return TABLES_LOCKED;
	/* another session may have dropped it before this one got the lock */
	return find_member(extension, table) == relid ? TABLES_READY : TABLES_MISSING;
}

/*
 * Begin a transaction, with a snapshot, and lock its tables unless one of them is locked or
 * missing (W2).  The worker touches only members of the extension, as their owner, in a
 * restricted security context (W8).
 */
static TableState
begin_transaction(const char *activity, const IdemTables *tables)
{
	TableState state = TABLES_READY;
	Oid extension;

	pgstat_report_activity(STATE_RUNNING, activity);
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	idem_counters_buffer();
	PushActiveSnapshot(GetTransactionSnapshot());

	extension = get_extension_oid("idem", true);
	if (!OidIsValid(extension))
		return TABLES_MISSING;
	for (int i = 0; state == TABLES_READY && tables->written[i] != NULL; i++)
		state = lock_table(extension, tables->written[i], RowExclusiveLock);
	if (state == TABLES_READY && tables->read != NULL)
		state = lock_table(extension, tables->read, AccessShareLock);
	if (state == TABLES_READY)
	{
		Oid relid = find_member(extension, tables->written[0]);
		HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));

		if (!HeapTupleIsValid(tuple))
			elog(ERROR, "cache lookup failed for relation %u", relid);
		SetUserIdAndSecContext(((Form_pg_class) GETSTRUCT(tuple))->relowner,
							   SECURITY_RESTRICTED_OPERATION);
		ReleaseSysCache(tuple);
	}
	return state;
}

static void
commit_transaction(void)
{
	SetUserIdAndSecContext(GetSessionUserId(), 0);
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_stat(false);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/*
 * After an error: roll back, and copy the message to a buffer of IDEM_ERROR_TEXT_LEN bytes,
 * unless it has one already
 */
static void
recover_from_error(MemoryContext context, char *message)
{
	ErrorData *error = idem_process_recover(context);

	pgstat_report_activity(STATE_IDLE, NULL);
	if (message[0] == '\0')
		idem_exchange_copy_error(message, error->message);
	FreeErrorData(error);
}

/*
 * T7: take one step in a transaction; an error of it is noted.  If something is locked, or another
 * transaction has enqueued the key of a tick, that is no failure yet (T6).  Returns true if the
 * schedule is due still.
 */
static bool
try_step(Visit *visit, TickStep step)
{
	IdemTickReport *report = &visit->ticks;
	volatile bool is_left = true;

	PG_TRY();
	{
		TableState state = begin_transaction("idem schedules", &tick_tables);
		IdemTicked ticked = IDEM_TICKED_DONE;
		int njobs = 0;

		if (state == TABLES_READY && step == STEP_TICK)
			ticked = idem_schedulestore_tick(visit->name, visit->round, false, &njobs);
		else if (state == TABLES_READY && !idem_schedulestore_is_subscribed())
		{
			MemoryContext oldcontext = MemoryContextSwitchTo(visit->tick_context);
			IdemTable schedules;

			idem_table_open(&schedules, &idem_schedulestore_def, RowExclusiveLock);
			if (step == STEP_LIST)
				visit->due = idem_schedulestore_list_due(&schedules, visit->round,
														 visit->request->tick_skip, MAX_LISTED);
			else
				idem_entries_lower_tick(MyDatabaseId,
										idem_schedulestore_next(&schedules, visit->round));
			idem_table_close(&schedules);
			MemoryContextSwitchTo(oldcontext);
		}
		commit_transaction();
		is_left = state == TABLES_LOCKED || ticked == IDEM_TICKED_LOCKED;
		report->was_locked |= is_left;
	}
	PG_CATCH();
	{
		bool is_locked = geterrcode() == ERRCODE_LOCK_NOT_AVAILABLE;
		char error[IDEM_ERROR_TEXT_LEN] = "";

		recover_from_error(visit->tick_context, error);
		if (is_locked)
			report->was_locked = true;
		else if (!report->failed)
		{
			report->failed = true;
			idem_exchange_copy_error(report->error,
									 step != STEP_TICK ?
										 error :
										 psprintf("%s (schedule \"%s\")", error,
												  text_to_cstring(visit->name)));
		}
	}
	PG_END_TRY();
	return is_left;
}

/* T10: has another database a tick that is due?  Sets *next to the first one that is not. */
static bool
others_are_due(TimestampTz *next)
{
	TimestampTz now = GetCurrentTimestamp();
	bool found = false;
	int n;
	IdemDatabaseInfo *infos = idem_entries_copy_databases(&n);

	*next = DT_NOEND;
	for (int i = 0; i < n; i++)
	{
		if (infos[i].next_tick > now)
			*next = Min(*next, infos[i].next_tick);
		else if (infos[i].database != MyDatabaseId)
			found = true;
	}
	pfree(infos);
	return found;
}

/*
 * Enqueue the jobs of the schedules that are due (T6), until this time by the steady clock, or
 * until the turn ends (T10).  What is left then is due again at once, but after other databases
 * that are due.  Then look for the earliest tick of this database, at which the launcher starts
 * a worker again.  The caller has called idem_entries_begin_visit().
 */
static void
run_ticks(Visit *visit, int64 until)
{
	MemoryContext oldcontext = CurrentMemoryContext;
	int skip = visit->request->tick_skip;
	int64 turn_end = idem_clock_steady() + TURN;
	TimestampTz next;
	bool more;
	ListCell *lc;

	visit->tick_context = AllocSetContextCreate(oldcontext, "idem ticks", ALLOCSET_DEFAULT_SIZES);
	visit->round = visit->request->round != 0 ? visit->request->round : idem_clock_now();
	(void) try_step(visit, STEP_LIST);
	more = list_length(visit->due) == MAX_LISTED;
	foreach (lc, visit->due)
	{
		int64 now = idem_clock_steady();

		if (now >= turn_end)
			turn_end = others_are_due(&next) ? now : now + TURN;
		if (now >= Min(until, turn_end))
		{
			more = true;
			break;
		}
		visit->name = lfirst(lc);
		if (try_step(visit, STEP_TICK))
			skip++;
	}
	if (more)
	{
		visit->ticks.round = visit->round;
		visit->ticks.skip = skip;
		idem_entries_lower_tick(MyDatabaseId, idem_clock_now());
	}
	(void) try_step(visit, STEP_NEXT);
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(visit->tick_context);
}

/*
 * Pause without a transaction and without locks (W4).  If the pause is longer than the rest of
 * the visit, the launcher waits for the remainder before the next visit.
 */
static void
pause_for(Visit *visit, int64 length)
{
	static uint32 wait_event = 0;
	int64 end = idem_clock_steady() + length;

	visit->rest = Min(Max(end - visit->until, 0), MAX_REST);
	end = Min(end, visit->until);
	if (wait_event == 0)
		wait_event = WaitEventExtensionNew("IdemCleanupPause");
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

/*
 * Run one batch of a sweep in a transaction of its own (W2), and pause if there is more to remove:
 * for a multiple of the time of the batch.  An error ends this sweep for the visit, and the others
 * continue (W7).
 */
static void
run_batch(Visit *visit, IdemPhase phase)
{
	MemoryContext context = CurrentMemoryContext;
	IdemSweepBatch *batch = &visit->batches[phase];
	int64 start = idem_clock_steady();

	batch->max = idem_guc_cleanup_batch_size;
	batch->deadline = visit->until;
	batch->removed = batch->rows = batch->left = 0;
	batch->more = false;
	progress.phase = phase;
	idem_entries_set_progress(MyDatabaseId, &progress);
	PG_TRY();
	{
		TableState state =
			begin_transaction(idem_sweeps[phase].activity, &idem_sweeps[phase].tables);
		int64 took;

		if (state == TABLES_READY)
			idem_sweep_run(phase, batch);
		commit_transaction();
		visit->was_locked |= state == TABLES_LOCKED;
		visit->was_subscribed |= batch->is_subscribed;
		took = idem_clock_steady() - start;
		progress.removed += batch->removed;
		progress.working += took;
		progress.cursors[phase] = batch->cursor;
		idem_entries_set_progress(MyDatabaseId, &progress);
		if (batch->more)
			pause_for(visit, took * visit->request->pause);
	}
	PG_CATCH();
	{
		recover_from_error(context, visit->error);
		visit->failed = true;
		batch->more = false;
		/* skip the page, so that one job that cannot be made dead does not block the rest */
		if (phase == IDEM_PHASE_JOBS)
		{
			batch->cursor.page++;
			progress.cursors[phase] = batch->cursor;
			idem_entries_set_progress(MyDatabaseId, &progress);
		}
	}
	PG_END_TRY();
}

/*
 * Begin a round of cleanup, or continue the last one, and run the sweeps in turn, one batch each,
 * until nothing is left or the visit ends (W2).  The next visit begins with the sweep whose turn
 * it is then, so that a table with a large backlog does not delay the others.
 */
static void
run_sweeps(Visit *visit)
{
	bool is_known = idem_entries_get_progress(MyDatabaseId, &progress);
	bool continues = visit->request->continues;
	int nleft = IDEM_LAST_SWEEP - IDEM_FIRST_SWEEP + 1;

	/* a new round begins with the oldest rows, but in idem.jobs where the last round stopped */
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
	idem_entries_set_progress(MyDatabaseId, &progress);

	while (nleft > 0 && idem_clock_steady() < visit->until)
	{
		IdemPhase phase = visit->next;

		visit->next = phase < IDEM_LAST_SWEEP ? phase + 1 : IDEM_FIRST_SWEEP;
		if (!visit->batches[phase].more)
			continue;
		run_batch(visit, phase);
		if (!visit->batches[phase].more)
			nleft--;
	}
}

/*
 * Tick and clean up the database that this process is connected to (W5, T6).  The worker clears
 * the flag "used" before it looks for the extension.  If a session uses the functions
 * after that, it sets the flag again, and the launcher sees it.
 */
static IdemVisitOutcome
visit_database(Visit *visit)
{
	bool cleans = visit->request->cleans;
	bool exists;
	bool is_due;
	TimestampTz next;

	(void) idem_entries_get_progress(MyDatabaseId, &progress);
	visit->was_used = idem_entries_begin_visit();
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	idem_process_take_database_settings();
	exists = OidIsValid(get_extension_oid("idem", true));
	CommitTransactionCommand();
	if (!exists)
		return IDEM_VISIT_NOT_INSTALLED;
	/* make an entry for the database */
	(void) idem_entries_get_database();
	/* if there are more ticks than fit into a visit, neither they nor cleanup starve (T6) */
	run_ticks(visit, visit->until - (cleans ? MAX_VISIT / 2 : 0));
	if (!cleans)
		return IDEM_VISIT_TICKED;
	if (!idem_guc_cleanup)
		return IDEM_VISIT_OFF;

	/*
	 * T6: end the visit before the next tick of any database, because there is only one worker.
	 * If one of another database is due already, end the visit soon, but not at once: that
	 * database may be one that cannot be visited (T10).
	 */
	is_due = others_are_due(&next);
	if (next != DT_NOEND)
		visit->until = Min(visit->until, idem_clock_steady() + (next - GetCurrentTimestamp()));
	if (is_due)
		visit->until = Min(visit->until, idem_clock_steady() + TURN);

	run_sweeps(visit);
	if (visit->failed)
		return IDEM_VISIT_FAILED;
	if (visit->was_locked)
		return IDEM_VISIT_LOCKED;
	return visit->was_subscribed ? IDEM_VISIT_SUBSCRIBED : IDEM_VISIT_DONE;
}

/* Report the outcome to the launcher, and show it in the views */
static void
report_outcome(IdemVisitOutcome outcome, const Visit *visit)
{
	static const IdemPhase phases[] = {
		[IDEM_VISIT_DONE] = IDEM_PHASE_IDLE,
		[IDEM_VISIT_LOCKED] = IDEM_PHASE_LOCKED,
		[IDEM_VISIT_SUBSCRIBED] = IDEM_PHASE_SUBSCRIBED,
		[IDEM_VISIT_OFF] = IDEM_PHASE_OFF,
		[IDEM_VISIT_NOT_INSTALLED] = IDEM_PHASE_NOT_INSTALLED,
		[IDEM_VISIT_FAILED] = IDEM_PHASE_FAILING};
	IdemVisitReport report = {.connected = true,
							  .outcome = outcome,
							  .was_used = visit->was_used,
							  .rest = visit->rest,
							  .ticks = visit->ticks};
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
	if (outcome == IDEM_VISIT_TICKED)
		return;

	progress.phase = phases[outcome];
	progress.backlog = outcome == IDEM_VISIT_DONE ? backlog : -1;
	progress.next = visit->next;
	if ((outcome == IDEM_VISIT_DONE || outcome == IDEM_VISIT_SUBSCRIBED) && !report.more)
		progress.finished_at = GetCurrentTimestamp();
	if (outcome == IDEM_VISIT_FAILED)
	{
		progress.error_at = GetCurrentTimestamp();
		strlcpy(progress.error, visit->error, IDEM_ERROR_TEXT_LEN);
	}
	idem_entries_set_progress(MyDatabaseId, &progress);
}

/* A worker that is terminated in the middle of a sweep is not at work any more */
static void
at_exit(int code, Datum arg)
{
	idem_exchange_end_visit();
	if (progress.phase >= IDEM_FIRST_SWEEP && progress.phase <= IDEM_LAST_SWEEP)
	{
		progress.phase = IDEM_PHASE_IDLE;
		idem_entries_set_progress(MyDatabaseId, &progress);
	}
}

/*
 * Main function of the worker.  It exits at once if the launcher has not asked for this visit, or
 * another worker has it: there is never more than one (W3).  An error outside of a sweep is
 * reported like one inside (W7).
 */
void
idem_worker_main(Datum arg)
{
	Oid database = DatumGetObjectId(arg);
	IdemVisitRequest request;
	IdemVisitReport connected = {.connected = true, .outcome = IDEM_VISIT_LOST};
	Visit visit = {.request = &request};
	volatile IdemVisitOutcome outcome = IDEM_VISIT_FAILED;
	MemoryContext context;

	idem_process_begin();
	if (!idem_exchange_begin_visit(database, &request))
		return;
	before_shmem_exit(at_exit, (Datum) 0);
	idem_process_connect(database);
	idem_exchange_set_report(&connected);

	context = CurrentMemoryContext;
	visit.until = idem_clock_steady() + MAX_VISIT;
	PG_TRY();
	{
		outcome = visit_database(&visit);
	}
	PG_CATCH();
	{
		recover_from_error(context, visit.error);
		visit.ticks.failed = true;
		strlcpy(visit.ticks.error, visit.error, IDEM_ERROR_TEXT_LEN);
		memset(visit.batches, 0, sizeof(visit.batches));
		(void) idem_entries_get_database();
	}
	PG_END_TRY();
	report_outcome(outcome, &visit);
}
