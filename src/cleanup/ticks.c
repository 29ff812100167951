/*
 * ticks.c
 *		The worker enqueues the jobs of the schedules that are due (T6).
 *
 * Each schedule has a transaction of its own, so that one that fails does not hold up the
 * others (T7).  Then the worker looks for the earliest tick of this database, at which the
 * launcher starts a worker again.
 *
 * A round is about the schedules that are due when it begins.  It takes several turns if they are
 * many, because a turn ends when another database has a tick that is due (T10).  Schedules that
 * were ticked are not due any more.  Those that failed or were locked are, so the next turn skips
 * as many of the first ones.  Each schedule is tried once in a round, then, and the delay of T7
 * follows.  If other sessions change schedules meanwhile, a turn may skip a wrong one.  The next
 * round finds it, which comes soon, because some have failed.
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"
#include "schedules/schedules.h"

#define ACTIVITY "idem schedules"

static const IdemBatchTables tick_tables = {{"schedules", "jobs", "job_keys", "job_log"}, "queues"};

/* The most schedules that a turn lists */
#define MAX_LISTED 1000

/* The schedules of this database during a visit */
typedef struct Ticks
{
	MemoryContext context;
	TimestampTz now;
	List *due; /* names of schedules */
	int skip;
	text *name; /* the one that is tried; or NULL */
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
	ticks->due = idem_schedulestore_list_due(&schedules, ticks->now, ticks->skip, MAX_LISTED);
	idem_table_close(&schedules);
	MemoryContextSwitchTo(oldcontext);
}

static void
tick_schedule(void *arg)
{
	Ticks *ticks = arg;
	int njobs = 0;

	ticks->ticked = idem_due_tick(ticks->name, ticks->now, false, &njobs);
}

/* T6: the earliest tick that was not due when the round began */
static void
find_next(void *arg)
{
	Ticks *ticks = arg;
	IdemTable schedules;

	if (idem_tick_is_subscribed())
		return;
	idem_schedulestore_open(&schedules, RowExclusiveLock);
	idem_entries_lower_tick(MyDatabaseId, idem_schedulestore_next(&schedules, ticks->now));
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

/* T7: run one transaction; an error of it is noted.  Returns true if the schedule is due still. */
static bool
try_batch(Ticks *ticks, void (*run)(void *arg))
{
	volatile bool is_left = true;

	PG_TRY();
	{
		ticks->ticked = IDEM_TICKED_DONE;
		is_left = idem_batch_run(ACTIVITY, &tick_tables, run, ticks) == IDEM_BATCH_LOCKED ||
			ticks->ticked == IDEM_TICKED_LOCKED;
		ticks->report->was_locked |= is_left;
	}
	PG_CATCH();
	{
		note_error(ticks);
	}
	PG_END_TRY();
	return is_left;
}

/* T10: has another database a tick that is due? */
bool
idem_ticks_others_due(void)
{
	TimestampTz now = GetCurrentTimestamp();
	bool found = false;
	int n;
	IdemDatabaseTick *ticks = idem_entries_copy_ticks(&n);

	for (int i = 0; i < n && !found; i++)
		found = ticks[i].database != MyDatabaseId && ticks[i].tick <= now;
	pfree(ticks);
	return found;
}

/*
 * Enqueue the jobs of the schedules that are due, until this time by the steady clock, or until the
 * turn ends.  What is left then is due again at once, but after other databases that are due.  The
 * caller has called idem_entries_forget_tick().
 */
void
idem_ticks_run(int64 until, const IdemVisitRequest *request, IdemTickReport *report)
{
	Ticks ticks = {
		.now = request->round != 0 ? request->round : idem_clock_now(),
		.skip = request->tick_skip,
		.report = report};
	bool more;
	int64 turn_end = idem_clock_steady() + IDEM_TURN;
	MemoryContext oldcontext = CurrentMemoryContext;
	ListCell *lc;

	ticks.context = AllocSetContextCreate(CurrentMemoryContext, "idem ticks", ALLOCSET_DEFAULT_SIZES);
	(void) try_batch(&ticks, list_due);
	more = list_length(ticks.due) == MAX_LISTED;
	foreach (lc, ticks.due)
	{
		int64 now = idem_clock_steady();

		if (now >= turn_end)
			turn_end = idem_ticks_others_due() ? now : now + IDEM_TURN;
		if (now >= Min(until, turn_end))
		{
			more = true;
			break;
		}
		ticks.name = lfirst(lc);
		if (try_batch(&ticks, tick_schedule))
			ticks.skip++;
	}
	ticks.name = NULL;
	if (more)
	{
		report->round = ticks.now;
		report->skip = ticks.skip;
		idem_entries_lower_tick(MyDatabaseId, idem_clock_now());
	}
	(void) try_batch(&ticks, find_next);
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(ticks.context);
}
