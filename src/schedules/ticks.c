/*
 * ticks.c
 *		Which ticks of a schedule are due, and which of them get a job.
 *
 * A tick is an instant (T2).  Those of a cron expression come from cron.c.  Those of an
 * interval are starts_at + n * every, so they do not drift.
 */
#include "postgres.h"

#include "common/int.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "schedules/schedules.h"

/* The latest tick that is due is missed after this time (T4) */
#define MAX_LATE (5 * USECS_PER_MINUTE)

const char *const idem_missed_words[] = {"skip", "once", "all", NULL};

/* The time zone; an error if the server does not know it */
pg_tz *
idem_ticks_zone(const text *name)
{
	char *zone_name = text_to_cstring(name);
	bool is_short = strlen(zone_name) <= TZ_STRLEN_MAX;
	pg_tz *zone = is_short ? pg_tzset(zone_name) : NULL;

	if (zone == NULL || !pg_tz_acceptable(zone))
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "time_zone"),
				is_short ? errdetail("The server does not know the time zone \"%s\".", zone_name) :
						   errdetail("The server does not know a time zone with such a long name."),
				errhint("The view pg_timezone_names lists the names, for example \"Europe/Berlin\"."));
	return zone;
}

/* T2: starts_at + n * every; DT_NOEND if that is later than any timestamp */
static TimestampTz
get_nth(const IdemRhythm *rhythm, int64 n)
{
	int64 offset;
	TimestampTz tick;

	if (pg_mul_s64_overflow(n, rhythm->every, &offset) ||
		pg_add_s64_overflow(rhythm->starts_at, offset, &tick) || !IS_VALID_TIMESTAMP(tick))
		return DT_NOEND;
	return tick;
}

/* How many ticks of an interval there are from starts_at to this time, inclusive */
static int64
count_ticks(const IdemRhythm *rhythm, TimestampTz until)
{
	return until < rhythm->starts_at ? 0 : (until - rhythm->starts_at) / rhythm->every + 1;
}

/* A walk over the ticks of a schedule after a time, in ascending order */
typedef struct Walk
{
	const IdemRhythm *rhythm;
	int64 n; /* of an interval: number of the next tick */
	IdemCron cron;
	IdemCronWalk cron_walk;
} Walk;

static void
begin_walk(Walk *walk, const IdemRhythm *rhythm, TimestampTz after)
{
	walk->rhythm = rhythm;
	if (rhythm->cron == NULL)
	{
		walk->n = count_ticks(rhythm, after);
		return;
	}
	if (!TIMESTAMP_IS_NOBEGIN(rhythm->starts_at))
		after = Max(after, rhythm->starts_at - 1);
	idem_cron_parse(rhythm->cron, &walk->cron);
	idem_cron_begin(&walk->cron_walk, &walk->cron, idem_ticks_zone(rhythm->time_zone), after);
}

/* The next tick; DT_NOEND: there is none */
static TimestampTz
walk_next(Walk *walk)
{
	TimestampTz tick = DT_NOEND;

	if (walk->rhythm->cron == NULL)
		tick = get_nth(walk->rhythm, walk->n++);
	else if (!idem_cron_next(&walk->cron_walk, &tick))
		tick = DT_NOEND;
	return tick <= walk->rhythm->ends_at ? tick : DT_NOEND;
}

/* The first tick after this time; DT_NOEND: there is none */
TimestampTz
idem_ticks_first(const IdemRhythm *rhythm, TimestampTz after)
{
	Walk walk;

	begin_walk(&walk, rhythm, after);
	return walk_next(&walk);
}

/* T4: how many of the ticks that are due get a job, if the latest one is this */
static int
count_jobs(const IdemTicks *ticks, IdemMissed missed, TimestampTz latest, TimestampTz now)
{
	switch (missed)
	{
		case IDEM_MISSED_SKIP:
			return now - latest <= MAX_LATE ? 1 : 0;
		case IDEM_MISSED_ONCE:
			return 1;
		case IDEM_MISSED_ALL:
			return Min(ticks->n, IDEM_MAX_MISSED);
	}
	pg_unreachable();
}

/* Put the newest ticks, which are in a ring, to the beginning of the array in ascending order */
static void
unroll_ring(IdemTicks *ticks)
{
	TimestampTz newest[IDEM_MAX_MISSED];

	for (int i = 0; i < ticks->njobs; i++)
		newest[i] = ticks->jobs[(ticks->n - ticks->njobs + i) % IDEM_MAX_MISSED];
	memcpy(ticks->jobs, newest, ticks->njobs * sizeof(TimestampTz));
}

/*
 * The ticks that are due.  The first one is "next", as the row of the schedule says, even if
 * the rules of its time zone have changed since then.
 */
void
idem_ticks_due(const IdemRhythm *rhythm, TimestampTz next, IdemMissed missed, TimestampTz now,
			   IdemTicks *ticks)
{
	TimestampTz latest = next;
	Walk walk;

	begin_walk(&walk, rhythm, next);
	ticks->n = 0;
	/* only the newest ticks of an interval matter, and the others can be counted */
	if (rhythm->cron == NULL)
	{
		int64 last = count_ticks(rhythm, Min(now, rhythm->ends_at));

		ticks->n = Max(last - walk.n + 1 - IDEM_MAX_MISSED, 0);
		walk.n += ticks->n;
		if (ticks->n > 0)
			next = get_nth(rhythm, walk.n - 1);
	}
	for (; next <= now; next = walk_next(&walk))
	{
		CHECK_FOR_INTERRUPTS();
		latest = next;
		ticks->jobs[ticks->n++ % IDEM_MAX_MISSED] = next;
	}
	ticks->next = next;
	ticks->njobs = count_jobs(ticks, missed, latest, now);
	unroll_ring(ticks);
}
