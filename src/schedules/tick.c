/*
 * tick.c
 *		SQL function idem_tick: enqueue the jobs of all schedules that are due.
 *
 * Each schedule is ticked in a subtransaction, so that one that fails does not hold up the
 * others (T7).  The background worker does the same in transactions (src/cleanup/ticks.c).
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "schedules/schedules.h"

IDEM_FUNCTION(idem_tick);

/* The tick of one schedule, to run in a subtransaction */
typedef struct Tick
{
	text *name;
	TimestampTz now;
	int njobs;
} Tick;

/* T6: does a subscription write the schedules or the jobs?  Then the publisher ticks. */
bool
idem_tick_is_subscribed(void)
{
	static const char *const tables[] = {"schedules", "jobs", NULL};

	return idem_subscription_writes_any(tables);
}

static List *
list_due(TimestampTz now)
{
	IdemTable schedules;
	List *names;

	idem_schedulestore_open(&schedules, RowExclusiveLock);
	names = idem_schedulestore_list_due(&schedules, now, 0, INT_MAX);
	idem_table_close(&schedules);
	return names;
}

static void
run_tick(void *arg)
{
	Tick *tick = arg;

	(void) idem_due_tick(tick->name, tick->now, true, &tick->njobs);
}

/* T7: tick one schedule; an error of its own becomes a warning.  Returns the number of jobs. */
static int
try_tick(text *name, TimestampTz now)
{
	Tick tick = {.name = name, .now = now};
	ErrorData *error = idem_subxact_try(run_tick, &tick, true);

	if (error == NULL)
		return tick.njobs;
	ereport(WARNING,
			errcode(error->sqlerrcode),
			errmsg("schedule \"%s\" failed: %s", text_to_cstring(name), error->message),
			errdetail("%s", error->detail != NULL ? error->detail : "The other schedules are not affected."),
			errhint("%s", error->hint != NULL ? error->hint : "Repair the cause, or declare the schedule again with idem_schedule()."));
	return 0;
}

Datum
idem_tick(PG_FUNCTION_ARGS)
{
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem tick", ALLOCSET_DEFAULT_SIZES);
	TimestampTz now = idem_clock_now();
	int njobs = 0;
	ListCell *lc;

	idem_fn_begin(fcinfo, &idem_tick_signature, "idem_tick()");
	if (idem_tick_is_subscribed())
	{
		ereport(NOTICE,
				errmsg("no schedule ticks, because a subscription writes the schedules or the jobs"),
				errdetail("The publisher enqueues the jobs of the schedules."),
				errhint("Schedules tick here when the subscription is dropped."));
		PG_RETURN_INT32(0);
	}
	foreach (lc, list_due(now))
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(context);

		CHECK_FOR_INTERRUPTS();
		njobs += try_tick(lfirst(lc), now);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(context);
	}
	PG_RETURN_INT32(njobs);
}
