/*
 * ticks.c
 *		The worker enqueues the jobs of the schedules that are due (T6).
 *
 * Each schedule has a transaction of its own, so that one that fails does not hold up the
 * others (T7).  Then the worker looks for the earliest tick of this database, at which the
 * launcher starts a worker again.
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "schedules/schedules.h"
#include "worker/worker.h"

#define ACTIVITY "idem schedules"

static const IdemBatchTables tick_tables = {{"schedules", "jobs", "job_keys", "job_log"}, "queues"};

/* The schedules of this database during a visit */
typedef struct Ticks
{
	MemoryContext context;
	TimestampTz now;
	List *due;	/* names of schedules */
	text *name; /* the one whose turn it is; or NULL */
	IdemTicked ticked;
	IdemTickReport *report;
} Ticks;

static void
list_due(void *arg)
{
	Ticks *ticks = arg;
	MemoryContext oldcontext;
	IdemTable schedules;

	if (idem_tick_is_subscribed())
		return;
	oldcontext = MemoryContextSwitchTo(ticks->context);
	idem_schedulestore_open(&schedules, RowExclusiveLock);
	ticks->due = idem_schedulestore_list_due(&schedules, ticks->now);
	idem_table_close(&schedules);
	MemoryContextSwitchTo(oldcontext);
}

static void
tick_schedule(void *arg)
{
	Ticks *ticks = arg;
	int njobs = 0;

	ticks->ticked = idem_due_tick(ticks->name, ticks->now, &njobs);
}

/* T6: the earliest tick that was not due when the visit began */
static void
find_next(void *arg)
{
	Ticks *ticks = arg;
	IdemTable schedules;

	if (idem_tick_is_subscribed())
		return;
	idem_schedulestore_open(&schedules, RowExclusiveLock);
	idem_shmem_lower_tick(MyDatabaseId, idem_schedulestore_next(&schedules, ticks->now));
	idem_table_close(&schedules);
}

/*
 * Note an error of a transaction.  If something is locked, or another transaction has enqueued
 * the key of a tick, that is no failure yet (T6).
 */
static void
note_error(Ticks *ticks)
{
	IdemTickReport *report = ticks->report;
	bool is_locked = geterrcode() == ERRCODE_LOCK_NOT_AVAILABLE;
	char error[IDEM_ERROR_TEXT_LEN] = "";

	idem_batch_recover(ticks->context, error);
	if (is_locked)
		report->was_locked = true;
	else if (!report->failed)
	{
		report->failed = true;
		idem_exchange_copy_error(report->error,
								 ticks->name == NULL ?
									 error :
									 psprintf("%s (schedule \"%s\")", error,
											  text_to_cstring(ticks->name)));
	}
}

/* T7: run one transaction; an error of it is noted, and the others go on */
static void
try_batch(Ticks *ticks, void (*run)(void *arg))
{
	PG_TRY();
	{
		ticks->ticked = IDEM_TICKED_DONE;
		if (idem_batch_run(ACTIVITY, &tick_tables, run, ticks) == IDEM_BATCH_LOCKED ||
			ticks->ticked == IDEM_TICKED_LOCKED)
			ticks->report->was_locked = true;
	}
	PG_CATCH();
	{
		note_error(ticks);
	}
	PG_END_TRY();
}

/*
 * Enqueue the jobs of the schedules that are due, until this time by the steady clock.  What is
 * left then is due again at once.  The caller has called idem_shmem_forget_tick().
 */
void
idem_ticks_run(int64 until, IdemTickReport *report)
{
	Ticks ticks = {.now = idem_clock_now(), .report = report};
	MemoryContext oldcontext = CurrentMemoryContext;
	ListCell *lc;

	ticks.context = AllocSetContextCreate(CurrentMemoryContext, "idem ticks", ALLOCSET_DEFAULT_SIZES);
	try_batch(&ticks, list_due);
	foreach (lc, ticks.due)
	{
		if (idem_clock_steady() >= until)
		{
			idem_shmem_lower_tick(MyDatabaseId, ticks.now);
			break;
		}
		ticks.name = lfirst(lc);
		try_batch(&ticks, tick_schedule);
	}
	ticks.name = NULL;
	try_batch(&ticks, find_next);
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(ticks.context);
}
