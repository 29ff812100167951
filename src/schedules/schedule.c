/*
 * schedule.c
 *		SQL functions for schedules: idem_schedule, idem_unschedule, idem_schedule_pause,
 *		idem_schedule_resume, idem_tick.
 *
 * They check their arguments and call the store (schedulestore.c).  idem_tick() enqueues the jobs
 * of all schedules that are due.  It ticks each schedule in a subtransaction, so that one that
 * fails does not hold up the others (T7).  The background worker does the same in transactions
 * (cleanup/worker.c).
 */
#include "postgres.h"

#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "schedules/schedules.h"

/* Arguments of idem_schedule() */
enum ScheduleArg
{
	ARG_NAME,
	ARG_QUEUE,
	ARG_CRON,
	ARG_EVERY,
	ARG_PAYLOAD,
	ARG_TIME_ZONE,
	ARG_MISSED,
	ARG_PRIORITY,
	ARG_STARTS_AT,
	ARG_ENDS_AT
};

IDEM_FUNCTION(idem_schedule);
IDEM_FUNCTION(idem_unschedule);
IDEM_FUNCTION(idem_schedule_pause);
IDEM_FUNCTION(idem_schedule_resume);
IDEM_FUNCTION(idem_tick);

#define NAME_HINT "Pass a short name for what is to be done, for example 'nightly-report'."

/* The name of the schedule (T8) */
static text *
get_name(FunctionCallInfo fcinfo)
{
	text *name;
	int len;

	idem_args_require(fcinfo, ARG_NAME, "name", NAME_HINT);
	name = PG_GETARG_TEXT_PP(ARG_NAME);
	len = VARSIZE_ANY_EXHDR(name);
	if (len < 1 || len > IDEM_MAX_SCHEDULE_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of schedule name"),
				errdetail("The name has %d bytes; it must have between 1 and %d.", len, IDEM_MAX_SCHEDULE_LEN),
				errhint(NAME_HINT));
	return name;
}

/* The argument, or the default if it is null */
static text *
get_text(FunctionCallInfo fcinfo, int arg, const char *otherwise)
{
	return PG_ARGISNULL(arg) ? cstring_to_text(otherwise) : PG_GETARG_TEXT_PP(arg);
}

/* A time, which must be finite, or the default if the argument is null */
static TimestampTz
get_time(FunctionCallInfo fcinfo, int arg, const char *name, TimestampTz otherwise)
{
	TimestampTz time;

	if (PG_ARGISNULL(arg))
		return otherwise;
	time = PG_GETARG_TIMESTAMPTZ(arg);
	if (TIMESTAMP_NOT_FINITE(time))
		idem_args_refuse_value(name, "The time must be finite.", "Leave it out for a schedule without this limit.");
	return time;
}

/*
 * When the schedule ticks (T2).  T8: refuse an expression that matches no day at all, such as the
 * 31st of February, or none between its start and its end.  An end in the past is right: a program
 * may declare its schedule at each start, also after the last tick.
 */
static void
get_rhythm(FunctionCallInfo fcinfo, IdemRhythm *rhythm)
{
	IdemRhythm unlimited;

	memset(rhythm, 0, sizeof(*rhythm));
	if (PG_ARGISNULL(ARG_CRON) == PG_ARGISNULL(ARG_EVERY))
		idem_args_refuse_combination("cron",
									 PG_ARGISNULL(ARG_CRON) ? "Neither cron nor every was passed." :
															  "Both cron and every were passed.",
									 "Pass cron => '0 4 * * *' or every => '10 minutes'.");
	rhythm->cron = PG_ARGISNULL(ARG_CRON) ? NULL : PG_GETARG_TEXT_PP(ARG_CRON);
	rhythm->time_zone = get_text(fcinfo, ARG_TIME_ZONE, "UTC");
	rhythm->starts_at = get_time(fcinfo, ARG_STARTS_AT, "starts_at", DT_NOBEGIN);
	rhythm->ends_at = get_time(fcinfo, ARG_ENDS_AT, "ends_at", DT_NOEND);
	if (rhythm->ends_at < rhythm->starts_at)
		idem_args_refuse_value("ends_at", "The end is before the start.", "Pass a later time, or leave it out.");
	idem_ticks_check(rhythm);

	if (rhythm->cron == NULL)
	{
		Interval *every = PG_GETARG_INTERVAL_P(ARG_EVERY);

		/* a day is 24 hours; months differ in length */
		if (!INTERVAL_NOT_FINITE(every) && every->month != 0)
			idem_args_refuse_value("every", "Months and years differ in length.",
								   "Pass cron, for example '0 0 1 * *' for the first day of each month, or an interval of days.");
		rhythm->every = idem_args_span(PG_GETARG_DATUM(ARG_EVERY), "every", IDEM_SPAN_EVERY);
		if (VARSIZE_ANY_EXHDR(rhythm->time_zone) != 3 ||
			memcmp(VARDATA_ANY(rhythm->time_zone), "UTC", 3) != 0)
			idem_args_refuse_value("time_zone", "An interval has no time zone, because a day is 24 hours.",
								   "Leave it out, or pass cron.");
		return;
	}
	unlimited = *rhythm;
	unlimited.ends_at = DT_NOEND;
	if (idem_ticks_first(&unlimited, idem_clock_now()) == DT_NOEND)
		idem_args_refuse_value("cron", "The fields \"day\" and \"month\" match no day.",
							   "Check the day of the month: February has at most 29 days.");
	if (!TIMESTAMP_IS_NOBEGIN(rhythm->starts_at) &&
		idem_ticks_first(rhythm, rhythm->starts_at - 1) == DT_NOEND)
		idem_args_refuse_value("ends_at", "There is no tick between the start and the end.",
							   "Pass a later time, or leave it out.");
}

/* T9: a role that may not enqueue may not declare a schedule, because each tick of it would fail */
Datum
idem_schedule(PG_FUNCTION_ARGS)
{
	IdemSchedule schedule = {0};
	IdemQueue queue;
	IdemTable schedules;
	TimestampTz next;

	idem_fn_begin(fcinfo, &idem_schedule_signature, "idem_schedule()");
	schedule.name = get_name(fcinfo);
	schedule.queue = idem_args_queue(fcinfo, ARG_QUEUE);
	idem_queuestore_use(schedule.queue, &queue);
	schedule.owner = GetUserId();
	if (idem_queuestore_may_enqueue(schedule.owner, queue.owner) != IDEM_MAY_ENQUEUE)
		ereport(ERROR,
				errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("permission denied for function %s", "idem_enqueue"),
				errdetail("A tick enqueues a job with the privileges of the role that has declared the schedule."),
				errhint("Grant the role EXECUTE on the function, for example with idem_grant()."));
	get_rhythm(fcinfo, &schedule.rhythm);
	schedule.every = PG_GETARG_DATUM(ARG_EVERY);
	schedule.missed = get_text(fcinfo, ARG_MISSED, "once");
	(void) idem_args_word(schedule.missed, "missed", idem_missed_words,
						  "Leave it out for \"once\".");
	schedule.priority = PG_ARGISNULL(ARG_PRIORITY) ? 0 : PG_GETARG_INT32(ARG_PRIORITY);
	if (!PG_ARGISNULL(ARG_PAYLOAD))
		schedule.payload = idem_args_jsonb(PG_GETARG_DATUM(ARG_PAYLOAD), "payload");

	idem_table_open(&schedules, &idem_schedulestore_def, RowExclusiveLock);
	next = idem_schedulestore_set(&schedules, &schedule);
	idem_table_close(&schedules);
	if (next == DT_NOEND)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(next);
}

/* Call a function of the store about the schedule that the first argument names */
static bool
change_schedule(FunctionCallInfo fcinfo, bool (*change)(IdemTable *schedules, text *name))
{
	text *name = get_name(fcinfo);
	IdemTable schedules;
	bool changed;

	idem_table_open(&schedules, &idem_schedulestore_def, RowExclusiveLock);
	changed = change(&schedules, name);
	idem_table_close(&schedules);
	return changed;
}

Datum
idem_unschedule(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_unschedule_signature, "idem_unschedule()");
	PG_RETURN_BOOL(change_schedule(fcinfo, idem_schedulestore_drop));
}

Datum
idem_schedule_pause(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_schedule_pause_signature, "idem_schedule_pause()");
	PG_RETURN_BOOL(change_schedule(fcinfo, idem_schedulestore_pause));
}

Datum
idem_schedule_resume(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_schedule_resume_signature, "idem_schedule_resume()");
	PG_RETURN_BOOL(change_schedule(fcinfo, idem_schedulestore_resume));
}

/* The tick of one schedule, to run in a subtransaction */
typedef struct Tick
{
	text *name;
	TimestampTz now;
	int njobs; /* of all schedules so far */
} Tick;

static void
run_tick(void *arg)
{
	Tick *tick = arg;

	(void) idem_schedulestore_tick(tick->name, tick->now, true, &tick->njobs);
}

/* T7: tick the schedules that are due, one after the other; an error of one becomes a warning */
Datum
idem_tick(PG_FUNCTION_ARGS)
{
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem tick", ALLOCSET_DEFAULT_SIZES);
	Tick tick = {.now = idem_clock_now()};
	IdemTable schedules;
	List *due;
	ListCell *lc;

	idem_fn_begin(fcinfo, &idem_tick_signature, "idem_tick()");
	if (idem_schedulestore_is_subscribed())
	{
		ereport(NOTICE,
				errmsg("no schedule ticks, because a subscription writes the schedules or the jobs"),
				errdetail("The publisher enqueues the jobs of the schedules."),
				errhint("Schedules tick here when the subscription is dropped."));
		PG_RETURN_INT32(0);
	}
	idem_table_open(&schedules, &idem_schedulestore_def, RowExclusiveLock);
	due = idem_schedulestore_list_due(&schedules, tick.now, 0, INT_MAX);
	idem_table_close(&schedules);
	foreach (lc, due)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(context);
		int njobs = tick.njobs;
		ErrorData *error;

		CHECK_FOR_INTERRUPTS();
		tick.name = lfirst(lc);
		error = idem_subxact_try(run_tick, &tick, true);
		if (error != NULL)
		{
			/* its jobs are rolled back */
			tick.njobs = njobs;
			ereport(WARNING,
					errcode(error->sqlerrcode),
					errmsg("schedule \"%s\" failed: %s", text_to_cstring(tick.name), error->message),
					errdetail("%s", error->detail != NULL ? error->detail : "The other schedules are not affected."),
					errhint("%s", error->hint != NULL ? error->hint : "Repair the cause, or declare the schedule again with idem_schedule()."));
		}
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(context);
	}
	PG_RETURN_INT32(tick.njobs);
}
