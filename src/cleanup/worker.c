/*
 * worker.c
 *		The worker: visits one database, enqueues the jobs of its schedules, removes expired
 *		rows, and exits.
 *
 * A visit lasts at most two seconds.  So a session that wants to drop, copy or
 * rename the database waits for at most two seconds and one batch.  PostgreSQL
 * itself waits for five seconds before such a command fails (W2).
 *
 * Each batch is a transaction of its own (batch.c).  A pause follows, which lasts for
 * a multiple of the time of the batch.  During the pause the worker has no
 * transaction and no lock.
 *
 * After an error the batch is rolled back.  Its sweep ends for this visit, and
 * the other sweeps continue.  The views show the error.  The worker reports it to
 * the launcher, which logs it (W7).
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"

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
	IdemTickReport ticks;
} Visit;

/* Progress of cleanup in this database, as published */
static IdemProgress progress;

static void
publish_progress(void)
{
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
		case IDEM_VISIT_TICKED:
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
	if (outcome != IDEM_VISIT_TICKED)
		publish_outcome(visit, &report, backlog);
}

/* A batch of a sweep, to run in a transaction */
typedef struct SweepRun
{
	const IdemSweep *sweep;
	IdemSweepBatch *batch;
} SweepRun;

static void
run_sweep_batch(void *arg)
{
	SweepRun *run = arg;

	idem_sweep_run(run->sweep, run->batch);
}

/* Run one batch of a sweep in a transaction of its own (W2) */
static void
run_batch(Visit *visit, const IdemSweep *sweep, IdemSweepBatch *batch)
{
	SweepRun run = {sweep, batch};

	if (idem_batch_run(sweep->activity, &sweep->tables, run_sweep_batch, &run) == IDEM_BATCH_LOCKED)
		visit->was_locked = true;
	visit->was_subscribed |= batch->is_subscribed;
}

/*
 * Begin a round, or continue the last one.  A new round begins with the oldest
 * rows, but in idem.jobs with the page where the last round stopped.
 */
static void
begin_round(bool continues, Visit *visit)
{
	bool is_known = idem_entries_get_progress(MyDatabaseId, &progress);

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
		idem_batch_recover(context, visit->error);
		visit->failed = true;
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
 * T6: end the visit before the next tick of any database, because there is only one worker.  If
 * one of another database is due already, end the visit soon, but not at once: that database may
 * be one that cannot be visited (T10).
 */
static void
end_before_tick(Visit *visit)
{
	TimestampTz now = GetCurrentTimestamp();
	int n;
	IdemDatabaseTick *ticks = idem_entries_copy_ticks(&n);

	for (int i = 0; i < n; i++)
	{
		if (ticks[i].tick > now)
			visit->until = Min(visit->until, idem_clock_steady() + (ticks[i].tick - now));
	}
	pfree(ticks);
	if (idem_ticks_others_due())
		visit->until = Min(visit->until, idem_clock_steady() + IDEM_TURN);
}

/*
 * Tick and clean up the database that this process is connected to (W5, T6).  The worker clears
 * the flag "used" before it looks for the extension.  If a session uses the functions
 * after that, it sets the flag again, and the launcher sees it.
 */
static IdemVisitOutcome
clean_database(const IdemVisitRequest *request, Visit *visit)
{
	(void) idem_entries_get_progress(MyDatabaseId, &progress);
	visit->was_used = idem_entries_take_use();
	idem_entries_forget_tick();
	idem_process_take_database_settings();
	if (!extension_exists())
		return IDEM_VISIT_NOT_INSTALLED;
	/* make an entry for the database */
	(void) idem_entries_get_database();
	/* if there are more ticks than fit into a visit, neither they nor cleanup starve (T6) */
	idem_ticks_run(visit->until - (request->cleans ? MAX_VISIT / 2 : 0), request, &visit->ticks);
	if (!request->cleans)
		return IDEM_VISIT_TICKED;
	if (!idem_guc_cleanup)
		return IDEM_VISIT_OFF;
	end_before_tick(visit);
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
		idem_batch_recover(context, visit.error);
		visit.ticks.failed = true;
		strlcpy(visit.ticks.error, visit.error, IDEM_ERROR_TEXT_LEN);
		memset(visit.batches, 0, sizeof(visit.batches));
		(void) idem_entries_get_database();
	}
	PG_END_TRY();
	report_outcome(outcome, &visit);
}

/*
 * Main function of the worker.  It exits at once if the launcher has not asked for
 * this visit, or another worker has it: there is never more than one (W3).
 */
void
idem_worker_main(Datum arg)
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
