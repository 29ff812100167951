/*
 * launcher.c
 *		The resident process: takes the database that is due (databases.c) and
 *		starts a worker there (worker.c), one at a time.
 *
 * The launcher is connected to no database, and has a transaction open only while
 * it reads pg_database (W4).  The postmaster restarts it five seconds after it has
 * ended (W3).  On a standby the postmaster starts it at the promotion (W6).
 *
 * An error of the launcher itself, such as a timeout for a lock on pg_database, does
 * not end it.  The launcher logs such a failure when it begins and when it is over,
 * not in between, and idem_doctor() shows it.  The launcher pauses for one second,
 * then two, four, and so on up to ten minutes (W7).
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"

/* Times in microseconds */
#define CONNECT_TIMEOUT (10 * USECS_PER_SEC)
#define CLOCK_TOLERANCE USECS_PER_SEC
#define CLOCK_CHECK		(10 * USECS_PER_SEC)
#define MAX_SLEEP		USECS_PER_DAY

/* State of the launcher, as published */
static IdemLauncher launcher;

static int64 next_list; /* when to read the list of databases next */

/* The worker of the visit under way; NULL: none */
static BackgroundWorkerHandle *worker_handle = NULL;
static int64 visit_started;
static bool visit_is_outdated; /* there was a reload since it started */

/* No free slot for a worker: when to try again, and the last delay; 0: a slot was free */
static int64 slot_due = 0;
static int64 slot_delay = 0;

/* Pause after an error of the launcher itself; 0: the last turn was fine */
static int64 error_delay = 0;

static void
publish_state(IdemLauncherState state)
{
	launcher.state = state;
	launcher.memory = MemoryContextMemAllocated(TopMemoryContext, true);
	idem_exchange_set_launcher(&launcher);
}

/* For idem_doctor(): a launcher that does not wake up at this time is stuck */
static void
publish_awake_at(int64 time)
{
	launcher.awake_at = time;
	idem_exchange_set_launcher(&launcher);
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

/* W7: no slot is free.  Log it if one was free before, and try again later. */
static void
note_no_slot(void)
{
	if (slot_delay == 0)
	{
		ereport(LOG,
				errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				errmsg("no background worker slot is free for idem cleanup"),
				errdetail("Cleanup continues as soon as a slot is free."),
				errhint("Consider increasing \"%s\".", "max_worker_processes"));
		launcher.no_slot_since = GetCurrentTimestamp();
	}
	slot_delay =
		idem_cleanup_double_delay(slot_delay, Min(idem_cleanup_naptime(), IDEM_MAX_DELAY));
	slot_due = idem_clock_steady() + slot_delay;
	publish_state(IDEM_LAUNCHER_NO_SLOT);
}

/* W7: a slot is free.  Log it if none was free before. */
static void
note_slot(void)
{
	if (slot_delay == 0)
		return;
	ereport(LOG,
			errcode(ERRCODE_SUCCESSFUL_COMPLETION),
			errmsg("a background worker slot is free again for idem cleanup"));
	slot_delay = slot_due = 0;
	launcher.no_slot_since = 0;
}

static void
start_worker(const IdemDatabase *database)
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
		note_no_slot();
		return;
	}
	note_slot();
	visit_started = idem_clock_steady();
	visit_is_outdated = false;
	publish_state(IDEM_LAUNCHER_WORKING);
}

/*
 * Visit the database that has been due for the longest time (W5).  Returns false if
 * none is due; *next_due is the time when one will be.
 */
static bool
visit_next(int64 now, int64 *next_due)
{
	IdemDatabase *first = idem_databases_first();

	*next_due = first ? Max(idem_databases_due(first), slot_due) : PG_INT64_MAX;
	if (*next_due > now)
		return false;
	switch (idem_databases_access(first->oid))
	{
		case IDEM_ACCESS_YES:
			start_worker(first);
			break;
		case IDEM_ACCESS_NOT_NOW:
			idem_databases_postpone(first, now + IDEM_MIN_DELAY);
			break;
		case IDEM_ACCESS_NO:
			idem_databases_forget(first->oid);
			break;
	}
	return true;
}

/* The worker has ended */
static void
end_visit(const IdemVisit *visit)
{
	pfree(worker_handle);
	worker_handle = NULL;
	launcher.visits++;
	launcher.last_visit_at = GetCurrentTimestamp();
	idem_exchange_set_launcher(&launcher);
	idem_databases_end_visit(visit, visit_is_outdated);
}

/*
 * Check whether the worker has ended, and terminate it if it cannot connect.
 * Returns when to check again at the latest; 0: the worker has ended.
 */
static int64
watch_worker(int64 now)
{
	IdemVisit visit;
	pid_t pid;
	bool has_ended = GetBackgroundWorkerPid(worker_handle, &pid) == BGWH_STOPPED;

	idem_exchange_get_visit(&visit);
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

/* Is a worker of an earlier launcher still running?  There is never more than one (W3). */
static bool
is_old_worker_running(void)
{
	IdemVisit visit;

	idem_exchange_get_visit(&visit);
	return visit.pid != 0;
}

/* Do what is due; returns when to wake up for the next turn */
static int64
do_what_is_due(void)
{
	int64 now = idem_clock_steady();
	int64 next_due;

	if (worker_handle != NULL)
		return watch_worker(now);
	if (is_old_worker_running())
		return now + USECS_PER_SEC / 10;
	if (!idem_databases_read_ticks() || now >= next_list)
	{
		idem_databases_read();
		next_list = now + idem_cleanup_naptime();
	}
	if (visit_next(now, &next_due))
		return 0;
	if (slot_delay == 0)
		publish_state(IDEM_LAUNCHER_SLEEPING);
	/* T6: when a tick is due depends on the wall clock, which may be set meanwhile */
	if (idem_databases_have_ticks())
		next_due = Min(next_due, now + CLOCK_CHECK);
	return Min(next_due, next_list);
}

/* W7: an error of the launcher itself.  Log it if it worked before, show the error, and pause. */
static int64
note_error(const ErrorData *error)
{
	if (error_delay == 0)
		ereport(LOG,
				errcode(error->sqlerrcode),
				errmsg("idem launcher failed: %s", error->message),
				errdetail("It tries again after ten minutes at most. The failure is not logged again until the launcher has worked."));
	error_delay = idem_cleanup_double_delay(error_delay, IDEM_MAX_DELAY);
	launcher.error_at = GetCurrentTimestamp();
	idem_exchange_copy_error(launcher.error, error->message);
	publish_state(IDEM_LAUNCHER_FAILING);
	return idem_clock_steady() + error_delay;
}

/* Do what is due; after an error, try again later (W7).  Returns when to wake up. */
static int64
try_what_is_due(void)
{
	MemoryContext context = CurrentMemoryContext;
	int64 wakeup;

	PG_TRY();
	{
		wakeup = do_what_is_due();
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
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		AbortOutOfAnyTransaction();
		LWLockReleaseAll();
		MemoryContextSwitchTo(context);
		wakeup = note_error(error);
		FreeErrorData(error);
	}
	PG_END_TRY();
	return wakeup;
}

static void
reload_settings(void)
{
	ProcessConfigFile(PGC_SIGHUP);
	next_list = slot_due = 0;
	visit_is_outdated = true;
	idem_databases_make_due();
}

static void
at_exit(int code, Datum arg)
{
	launcher.pid = 0;
	publish_state(IDEM_LAUNCHER_STOPPED);
}

static void
init_launcher(void)
{
	idem_databases_init();
	launcher.pid = MyProcPid;
	launcher.proc = idem_compat_my_proc_number();
	launcher.started_at = GetCurrentTimestamp();
	launcher.awake_at = idem_clock_steady();
	publish_state(IDEM_LAUNCHER_STOPPED);
	before_shmem_exit(at_exit, (Datum) 0);
}

/* Sleep until the time to wake up, or until a signal sets the latch */
static void
sleep_until(int64 wakeup, uint32 wait_event)
{
	int64 now = idem_clock_steady();

	if (wakeup <= now)
		return;
	wakeup = Min(wakeup, now + MAX_SLEEP);
	publish_awake_at(wakeup);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 (long) ((wakeup - now) / 1000 + 1), wait_event);
	ResetLatch(MyLatch);
	publish_awake_at(idem_clock_steady());
}

/*
 * Main function of the launcher.  It connects to no database, and holds nothing
 * while it sleeps (W4).  It ends with status 1, so that the postmaster starts it
 * again (W3).
 */
void
idem_launcher_main(Datum arg)
{
	uint32 wait_event;
	int64 wakeup = 0;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	idem_process_begin();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	idem_process_limit_lock_waits();
	wait_event = idem_compat_wait_event("IdemLauncherMain");
	init_launcher();

	for (;;)
	{
		/* after SIGTERM; with status 0 the postmaster would not start it again */
		if (ProcDiePending)
			proc_exit(1);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			reload_settings();
		}
		watch_clock();
		wakeup = try_what_is_due();
		sleep_until(wakeup, wait_event);
	}
}

/*
 * Register the launcher; called by _PG_init() if the library is preloaded (W6).  The
 * postmaster restarts it after five seconds (W3).
 */
void
idem_launcher_register(void)
{
	BackgroundWorker worker;

	idem_process_describe(&worker, "idem launcher", "idem_launcher_main");
	worker.bgw_restart_time = 5;
	RegisterBackgroundWorker(&worker);
}
