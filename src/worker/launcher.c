/*
 * launcher.c
 *		The resident process: takes the database that is due (databases.c) and
 *		starts a worker there (cleanup.c), one at a time.
 *
 * It is connected to no database and has a transaction open only while it reads
 * pg_database.  The postmaster starts it again five seconds after it was ended,
 * and on a standby when that is promoted.
 *
 * An error of its own, such as a lock on pg_database, does not end it.  The
 * error is logged when it begins and when it is over, shown by idem_doctor(),
 * and followed by a pause of one second, then two, four, and so on up to ten
 * minutes (W7).
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "worker/schedule.h"

/* Times in microseconds */
#define CONNECT_TIMEOUT (10 * USECS_PER_SEC)
#define CLOCK_TOLERANCE USECS_PER_SEC
#define MAX_SLEEP		USECS_PER_DAY

static int64 next_list; /* when to read the list of databases */

/* The run under way; NULL: none */
static BackgroundWorkerHandle *running = NULL;
static int64 running_since;
static bool run_is_outdated; /* there was a reload since */

/* No free slot for a worker: when to try again, and the delay after that */
static int64 slot_due = 0;
static int64 slot_delay = 0;

/* Errors of the launcher itself: how long the pause is; 0: the last turn was fine */
static int64 error_delay = 0;

static void
set_state(IdemLauncherState state)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->launcher.state = state;
	idem_shared->launcher.memory = MemoryContextMemAllocated(TopMemoryContext, true);
	LWLockRelease(idem_shared->lock);
}

/* For idem_doctor(): a launcher that does not wake up is stuck */
static void
note_awake_at(int64 time)
{
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	idem_shared->launcher.awake_at = time;
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
	slot_delay = idem_databases_longer(slot_delay, Min(idem_databases_naptime(), IDEM_MAX_DELAY));
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
describe_run(const IdemDatabase *database)
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
start_worker(const IdemDatabase *database)
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
	running_since = idem_clock_steady();
	run_is_outdated = false;
	set_state(IDEM_LAUNCHER_WORKING);
}

/* Visit the database that is due for the longest time; false if none is */
static bool
visit_next(int64 now, int64 *next_due)
{
	IdemDatabase *first = idem_databases_first();

	*next_due = first ? Max(first->due, slot_due) : PG_INT64_MAX;
	if (*next_due > now)
		return false;
	switch (idem_databases_access(first->oid))
	{
		case IDEM_ACCESS_YES:
			start_worker(first);
			break;
		case IDEM_ACCESS_NOT_NOW:
			first->due = now + IDEM_MIN_DELAY;
			break;
		case IDEM_ACCESS_NO:
			idem_databases_forget(first->oid);
			break;
	}
	return true;
}

/* The worker has ended */
static void
end_run(void)
{
	IdemRun run;

	pfree(running);
	running = NULL;
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	run = idem_shared->run;
	idem_shared->launcher.runs++;
	idem_shared->launcher.last_run_at = GetCurrentTimestamp();
	LWLockRelease(idem_shared->lock);
	idem_databases_end_run(&run, run_is_outdated);
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
		idem_databases_read();
		next_list = now + idem_databases_naptime();
	}
	if (visit_next(now, &next_due))
		return 0;
	if (slot_delay == 0)
		set_state(IDEM_LAUNCHER_SLEEPING);
	return Min(next_due, next_list);
}

/* An error of the launcher itself: log it if that is new, show it, and pause */
static int64
note_error(const ErrorData *error)
{
	IdemLauncher *launcher = &idem_shared->launcher;

	if (error_delay == 0)
		ereport(LOG,
				errcode(error->sqlerrcode),
				errmsg("the launcher of idem fails: %s", error->message),
				errdetail("It goes on by itself, up to ten minutes later. This is not logged again before it works."));
	error_delay = idem_databases_longer(error_delay, IDEM_MAX_DELAY);
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	launcher->state = IDEM_LAUNCHER_FAILING;
	launcher->error_at = GetCurrentTimestamp();
	idem_worker_copy_error(launcher->error, error->message);
	LWLockRelease(idem_shared->lock);
	return idem_clock_steady() + error_delay;
}

/* Do what is due; after an error, come again later */
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
					errmsg("the launcher of idem works again"));
		error_delay = 0;
	}
	PG_CATCH();
	{
		ErrorData *error;

		/* pg_cancel_backend() ends it, and it comes back */
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
reload(void)
{
	ProcessConfigFile(PGC_SIGHUP);
	next_list = slot_due = 0;
	run_is_outdated = true;
	idem_databases_make_due();
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
	idem_databases_init();
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	memset(&idem_shared->launcher, 0, sizeof(idem_shared->launcher));
	idem_shared->launcher.pid = MyProcPid;
	idem_shared->launcher.started_at = GetCurrentTimestamp();
	idem_shared->launcher.awake_at = idem_clock_steady();
	LWLockRelease(idem_shared->lock);
	before_shmem_exit(say_goodbye, (Datum) 0);
}

/* Sleep until then, or until there is a signal */
static void
sleep_until(int64 wakeup, uint32 wait_event)
{
	int64 now = idem_clock_steady();

	if (wakeup <= now)
		return;
	wakeup = Min(wakeup, now + MAX_SLEEP);
	note_awake_at(wakeup);
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, (long) ((wakeup - now) / 1000 + 1), wait_event);
	ResetLatch(MyLatch);
	note_awake_at(idem_clock_steady());
}

void
idem_launcher_main(Datum arg)
{
	uint32 wait_event;
	int64 wakeup = 0;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	idem_worker_begin();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	idem_worker_limit_lock_waits();
	wait_event = idem_compat_wait_event("IdemLauncherMain");
	begin();

	for (;;)
	{
		/* a normal end; status 1, so that the postmaster starts it again if the server goes on */
		if (ProcDiePending)
			proc_exit(1);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			reload();
		}
		watch_clock();
		wakeup = try_what_is_due();
		sleep_until(wakeup, wait_event);
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
