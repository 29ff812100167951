/*
 * ticks.c
 *		When a schedule ticks, which of its ticks are due, and which of them get a job.
 *
 * A tick is an instant (T2).  The ticks of an interval are starts_at + n * every, so they do not
 * drift.  Those of a cron expression are the local times that match, and T3 says when these run.
 *
 * A walk goes through the segments of a time zone: the periods in which its offset from
 * UTC is constant.  Within a segment a local time is the instant plus a constant, and bit
 * scans find the next local time that matches.  Where a segment begins, the clock skips
 * local times, or shows some of them for the second time.  This matters only to an
 * expression with fixed hours.  "done" is the highest local time that the clock has passed:
 * a segment that begins later skips the times from "done" on, and a segment that begins
 * earlier repeats the times before "done".
 */
#include "postgres.h"

#include "common/int.h"
#include "pgtime.h"
#include "port/pg_bitutils.h"
#include "utils/datetime.h"
#include "utils/timestamp.h"

#include "schedules/schedules.h"

/* The latest tick that is due is missed after this time (T4) */
#define MAX_LATE (5 * USECS_PER_MINUTE)

#define MAX_CRON_LEN 255

#define WHITESPACE " \t\n\r\f\v"

#define UNIX_EPOCH ((int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY)

/* The range of timestamptz, in seconds since 1970: from the first instant to behind the last */
#define MIN_INSTANT (MIN_TIMESTAMP / USECS_PER_SEC + UNIX_EPOCH)
#define END_INSTANT (END_TIMESTAMP / USECS_PER_SEC + UNIX_EPOCH)

/*
 * A walk begins this long before its first tick, so that "done" is right there: no two
 * offsets of a zone differ by more, even if a POSIX specification has the largest ones.
 */
#define LOOK_BACK ((int64) 14 * SECS_PER_DAY)

/*
 * An expression without a tick in this time has none at all.  29 February falls on the same
 * weekday after 28 years, or after 40 if a year such as 2100 is between.
 */
#define HORIZON ((int64) 41 * 366 * SECS_PER_DAY)

enum CronField
{
	FIELD_MINUTE,
	FIELD_HOUR,
	FIELD_DAY,
	FIELD_MONTH,
	FIELD_WEEKDAY,
	NFIELDS
};

static const char *const month_names[] = {"jan", "feb", "mar", "apr", "may", "jun", "jul",
										  "aug", "sep", "oct", "nov", "dec", NULL};
static const char *const weekday_names[] = {"sun", "mon", "tue", "wed", "thu", "fri", "sat", NULL};

static const struct
{
	const char *name;
	int min;
	int max;
	int star_max;			  /* the highest value of "*" */
	const char *const *names; /* the first one stands for min */
	const char *values;
} fields[NFIELDS] = {
	[FIELD_MINUTE] = {"minute", 0, 59, 59, NULL, "numbers between 0 and 59"},
	[FIELD_HOUR] = {"hour", 0, 23, 23, NULL, "numbers between 0 and 23"},
	[FIELD_DAY] = {"day", 1, 31, 31, NULL, "numbers between 1 and 31"},
	[FIELD_MONTH] = {"month", 1, 12, 12, month_names, "numbers between 1 and 12, or names from \"jan\" to \"dec\""},
	[FIELD_WEEKDAY] = {"weekday", 0, 7, 6, weekday_names, "numbers between 0 and 7, or names from \"sun\" to \"sat\""},
};

static const struct
{
	const char *name;
	const char *fields;
} shorthands[] = {
	{"@yearly", "0 0 1 1 *"},
	{"@annually", "0 0 1 1 *"},
	{"@monthly", "0 0 1 * *"},
	{"@weekly", "0 0 * * 0"},
	{"@daily", "0 0 * * *"},
	{"@midnight", "0 0 * * *"},
	{"@hourly", "0 * * * *"},
};

/* A cron expression (T2) */
typedef struct Cron
{
	uint64 bits[NFIELDS]; /* bit n: the field may be n; days and months from 1, 0 is Sunday */
	bool either_day;	  /* the day of the month or the weekday is enough: both are restricted */
	bool every_hour;	  /* all 24 hours: by elapsed time (T3) */
} Cron;

/* A field that is being read */
typedef struct CronText
{
	enum CronField field;
	const char *text; /* the whole field */
	const char *pos;
} CronText;

/*
 * A walk over the ticks of a schedule after a time, in ascending order.  All times are in seconds
 * since 1970: instants in UTC, and local times as the clock of the zone shows them.  A segment
 * is a period in which the zone has one offset from UTC.
 */
typedef struct Walk
{
	const IdemRhythm *rhythm;
	int64 n; /* of an interval: number of the next tick; the rest is about cron */
	Cron cron;
	pg_tz *zone;
	int64 first;		 /* instant: no tick before */
	int64 last;			 /* instant: the last tick; at the beginning, first */
	int64 segment_start; /* instant */
	int64 segment_end;	 /* instant: the next segment begins */
	int64 offset;		 /* local time minus UTC in the segment */
	int64 next;			 /* local: no tick in the segment before */
	int64 done;			 /* local: every earlier time has run, if it matches */
	int day;			 /* local: a day that matches, in days since 1970 */
	bool has_gap_tick;	 /* segment_start is a tick, for times that the clock skips */
} Walk;

const char *const idem_missed_words[] = {"skip", "once", "all", NULL};

pg_noreturn static void
reject_field(const CronText *text, const char *reason, const char *hint)
{
	idem_args_refuse_value("cron", psprintf("The field \"%s\" is \"%s\"; %s.", fields[text->field].name, text->text, reason),
						   hint);
}

/*
 * Say which values the field has, and what to write instead of signs that only other schedulers
 * have
 */
pg_noreturn static void
reject_value(const CronText *text)
{
	const char *hint = "Write numbers, ranges such as 1-5, lists such as 1,15 or steps such as */10; months and weekdays also have names of three letters.";

	if (strchr(text->text, '?') != NULL)
		hint = "Write \"*\" for a day or a weekday without restriction.";
	/* fri#3, or L, LW, L-3, 15W, 5L */
	else if (strchr(text->text, '#') != NULL ||
			 (strpbrk(text->text, "LlWw") != NULL &&
			  text->text[strspn(text->text, "0123456789,-LlWw")] == '\0'))
		hint = "There is no sign for the last day, the nearest working day or the nth weekday: write all days that are possible, such as 28-31, and let the job check the date.";
	reject_field(text, psprintf("its values must be %s", fields[text->field].values), hint);
}

/* A number; values that are too high are cut off.  Returns -1 if there are no digits. */
static int
read_number(CronText *text)
{
	int number = 0;

	if (!isdigit((unsigned char) *text->pos))
		return -1;
	for (; isdigit((unsigned char) *text->pos); text->pos++)
		number = Min(number * 10 + (*text->pos - '0'), 1000);
	return number;
}

/* A number or a name, within the range of the field */
static int
read_value(CronText *text)
{
	const char *const *names = fields[text->field].names;
	int value = read_number(text);

	if (value >= fields[text->field].min && value <= fields[text->field].max)
		return value;
	for (int i = 0; value < 0 && names != NULL && names[i] != NULL; i++)
	{
		if (pg_strncasecmp(text->pos, names[i], strlen(names[i])) == 0)
		{
			text->pos += strlen(names[i]);
			return fields[text->field].min + i;
		}
	}
	reject_value(text);
}

/* An element of a list, as bits: a value, a range, or a range with a step */
static uint64
read_element(CronText *text)
{
	int min = fields[text->field].min;
	int max = fields[text->field].star_max;
	bool is_range = true;
	int start = min;
	int end = max;
	int step = 1;
	uint64 bits = 0;

	if (*text->pos == ',' || *text->pos == '\0')
		reject_field(text, "an element of its list is empty", "Write a value before and after each comma.");
	if (*text->pos == '*')
		text->pos++;
	else
	{
		start = end = read_value(text);
		is_range = *text->pos == '-';
		if (is_range)
		{
			bool is_name;

			text->pos++;
			is_name = isalpha((unsigned char) *text->pos);
			end = read_value(text);
			/* "sun" is the last day of the week here, so that fri-sun is possible */
			if (text->field == FIELD_WEEKDAY && is_name && end == 0 && start > 0)
				end = 7;
			if (end < start)
				reject_field(text, "a range must not end before it begins",
							 "Write two ranges, such as 22-23,0-4 for the hours from 22 to 4; Sunday is 0 or 7.");
		}
	}
	if (*text->pos == '/')
	{
		if (!is_range)
			reject_field(text, "a step must follow \"*\" or a range",
						 psprintf("Write \"*/2\", or a range such as \"%d-%d/2\".", min, max));
		text->pos++;
		step = read_number(text);
		if (step < 1 || step > max - min + 1)
			reject_field(text, psprintf("its steps must be numbers between 1 and %d", max - min + 1),
						 "A step begins anew with the first value of its range; for other intervals pass \"every\" instead of \"cron\".");
	}
	if (*text->pos != ',' && *text->pos != '\0')
		reject_value(text);
	for (int value = start; value <= end; value += step)
		bits |= UINT64CONST(1) << value;
	return bits;
}

/* Split at white space; returns the number of fields, of which the first five are stored */
static int
split_fields(char *str, char **texts)
{
	char *rest = NULL;
	char *text;
	int n = 0;

	for (; (text = strtok_r(str, WHITESPACE, &rest)) != NULL; str = NULL)
	{
		if (n < NFIELDS)
			texts[n] = text;
		n++;
	}
	return n;
}

/* Read an expression (T2, T8) */
static void
parse_cron(const text *expression, Cron *cron)
{
	int len = VARSIZE_ANY_EXHDR(expression);
	char *texts[NFIELDS];
	int nfields;
	const char *hint;

	if (len > MAX_CRON_LEN)
		idem_args_refuse_value("cron", psprintf("The expression has %d bytes; it must have at most %d.", len, MAX_CRON_LEN),
							   "Write ranges and steps instead of long lists.");
	nfields = split_fields(text_to_cstring(expression), texts);

	/* a shorthand, which must be alone, stands for five fields */
	if (nfields > 0 && *texts[0] == '@')
	{
		const char *shorthand = texts[0];
		const char *full = NULL;

		for (int i = 0; nfields == 1 && i < (int) lengthof(shorthands); i++)
		{
			if (pg_strcasecmp(shorthand, shorthands[i].name) == 0)
				full = shorthands[i].fields;
		}
		hint = "Write one of these, or five fields: minute, hour, day, month and weekday.";
		if (pg_strcasecmp(shorthand, "@every") == 0)
			hint = "Pass an interval as \"every\" instead of \"cron\", such as every => '5 minutes'.";
		else if (pg_strcasecmp(shorthand, "@reboot") == 0)
			hint = "A schedule does not know when a server or a program starts: call idem_enqueue() at that time.";
		if (full == NULL)
			idem_args_refuse_value("cron", psprintf("The expression begins with \"%s\"; it must be one of @yearly, @annually, @monthly, @weekly, @daily, @midnight and @hourly, and nothing else.", shorthand),
								   hint);
		nfields = split_fields(pstrdup(full), texts);
	}
	if (nfields != NFIELDS)
	{
		hint = "Write minute, hour, day, month and weekday, or a shorthand such as @daily.";
		if (nfields > 0 && strchr(texts[0], '=') != NULL)
			hint = "Pass the time zone as \"time_zone\".";
		else if (nfields > NFIELDS)
			hint = "Write minute, hour, day, month and weekday. Seconds and years are not possible; for a short interval pass \"every\" instead of \"cron\".";
		idem_args_refuse_value("cron", psprintf("The number of fields is %d; it must be %d.", nfields, NFIELDS), hint);
	}

	for (int i = 0; i < NFIELDS; i++)
	{
		CronText text = {i, texts[i], texts[i]};

		cron->bits[i] = read_element(&text);
		while (*text.pos == ',')
		{
			text.pos++;
			cron->bits[i] |= read_element(&text);
		}
	}
	/* 7 is Sunday, too */
	cron->bits[FIELD_WEEKDAY] = (cron->bits[FIELD_WEEKDAY] | cron->bits[FIELD_WEEKDAY] >> 7) & 0x7f;
	cron->either_day = *texts[FIELD_DAY] != '*' && *texts[FIELD_WEEKDAY] != '*';
	cron->every_hour = cron->bits[FIELD_HOUR] == (1 << HOURS_PER_DAY) - 1;
}

/* The time zone; an error if the server does not know it */
static pg_tz *
find_zone(const text *name)
{
	char *zone_name = text_to_cstring(name);
	bool is_short = strlen(zone_name) <= TZ_STRLEN_MAX;
	pg_tz *zone = is_short ? pg_tzset(zone_name) : NULL;

	if (zone == NULL || !pg_tz_acceptable(zone))
		idem_args_refuse_value("time_zone",
							   is_short ? psprintf("The server does not know the time zone \"%s\".", zone_name) :
										  "The server does not know a time zone with such a long name.",
							   "The view pg_timezone_names lists the names, for example \"Europe/Berlin\".");
	return zone;
}

/* Raise an error for an unknown time zone or an invalid expression (T8) */
void
idem_ticks_check(const IdemRhythm *rhythm)
{
	Cron cron;

	(void) find_zone(rhythm->time_zone);
	if (rhythm->cron != NULL)
		parse_cron(rhythm->cron, &cron);
}

static inline int64
divide_down(int64 dividend, int64 divisor)
{
	return dividend >= 0 ? dividend / divisor : -((divisor - 1 - dividend) / divisor);
}

/* The first day that matches from "day" to "last_day", in days since 1970 */
static bool
find_day(const Cron *cron, int day, int last_day, int *found)
{
	int year;
	int month;
	int mday;

	j2date(day + UNIX_EPOCH_JDATE, &year, &month, &mday);
	while (day <= last_day)
	{
		int ndays = day_tab[isleap(year)][month - 1];

		if (cron->bits[FIELD_MONTH] & (1 << month))
		{
			/*
			 * the days of the month that match, as bits from 1: the weekdays of the first seven
			 * days, and then of five weeks
			 */
			int first_weekday = j2day(day - (mday - 1) + UNIX_EPOCH_JDATE);
			uint64 week =
				((cron->bits[FIELD_WEEKDAY] | cron->bits[FIELD_WEEKDAY] << 7) >> first_weekday) &
				0x7f;
			uint64 weekdays = (week | week << 7 | week << 14 | week << 21 | week << 28) << 1;
			uint64 days = cron->either_day ? cron->bits[FIELD_DAY] | weekdays :
											 cron->bits[FIELD_DAY] & weekdays;

			days = (days & ((UINT64CONST(2) << ndays) - 2)) >> mday;
			if (days != 0)
			{
				*found = day + pg_rightmost_one_pos64(days);
				return *found <= last_day;
			}
		}
		day += ndays - (mday - 1);
		mday = 1;
		if (++month > MONTHS_PER_YEAR)
		{
			month = 1;
			year++;
		}
	}
	return false;
}

/* The first minute of a day that matches, not before "minute"; -1 if there is none */
static int
find_minute(const Cron *cron, int minute)
{
	int hour = minute / MINS_PER_HOUR;
	uint64 minutes = cron->bits[FIELD_MINUTE] >> (minute % MINS_PER_HOUR);
	uint64 later_hours = cron->bits[FIELD_HOUR] >> (hour + 1);

	if ((cron->bits[FIELD_HOUR] & (1 << hour)) && minutes != 0)
		return minute + pg_rightmost_one_pos64(minutes);
	if (later_hours == 0)
		return -1;
	hour += 1 + pg_rightmost_one_pos64(later_hours);
	return hour * MINS_PER_HOUR + pg_rightmost_one_pos64(cron->bits[FIELD_MINUTE]);
}

/* The first local time that matches, from "start" until before "end" */
static bool
find_local(Walk *walk, int64 start, int64 end, int64 *local)
{
	int64 start_minute = divide_down(start + SECS_PER_MINUTE - 1, SECS_PER_MINUTE);
	int day = (int) divide_down(start_minute, MINS_PER_HOUR * HOURS_PER_DAY);
	int minute = (int) (start_minute - (int64) day * MINS_PER_HOUR * HOURS_PER_DAY);

	for (; start < end; day++, minute = 0)
	{
		if (day != walk->day)
		{
			int found;

			if (!find_day(&walk->cron, day, (int) divide_down(end - 1, SECS_PER_DAY), &found))
				return false;
			if (found != day)
				minute = 0;
			walk->day = day = found;
		}
		minute = find_minute(&walk->cron, minute);
		if (minute >= 0)
		{
			*local = (int64) day * SECS_PER_DAY + minute * SECS_PER_MINUTE;
			return *local < end;
		}
	}
	return false;
}

/* T3: go to the segment that begins where this one ends */
static void
enter_segment(Walk *walk)
{
	pg_time_t start = walk->segment_end;
	pg_time_t instant = start;
	pg_time_t boundary;
	long int before_offset;
	long int after_offset;
	int before_isdst;
	int after_isdst;
	int64 skipped;
	int64 local;
	int result = pg_next_dst_boundary(&instant, &before_offset, &before_isdst, &boundary,
									  &after_offset, &after_isdst, walk->zone);

	/*
	 * If the rules of a zone have no end, its table covers 400 years, and the server
	 * extrapolates from it.  For the very last entry of the table it does not, but for one
	 * second later it does.
	 */
	if (result == 0)
	{
		instant++;
		result = pg_next_dst_boundary(&instant, &before_offset, &before_isdst, &boundary,
									  &after_offset, &after_isdst, walk->zone);
	}
	if (result < 0)
		elog(ERROR, "could not find the next boundary of time zone \"%s\"",
			 pg_get_timezone_name(walk->zone));

	walk->segment_start = start;
	walk->segment_end = result == 0 ? END_INSTANT : boundary;
	walk->offset = pg_localtime(&start, walk->zone)->tm_gmtoff;
	walk->next = Max(start, walk->first) + walk->offset;
	if (walk->cron.every_hour)
		return;

	local = start + walk->offset;
	if (start >= walk->first && find_local(walk, walk->done, local, &skipped))
	{
		walk->has_gap_tick = true;
		/* one tick, even if the segment begins with a time that matches */
		walk->next = local + 1;
	}
	walk->next = Max(walk->next, walk->done);
	walk->done = Max(walk->done, walk->segment_end + walk->offset);
}

/* How many ticks of an interval there are from starts_at to this time, inclusive */
static int64
count_ticks(const IdemRhythm *rhythm, TimestampTz until)
{
	return until < rhythm->starts_at ? 0 : (until - rhythm->starts_at) / rhythm->every + 1;
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

/* Begin a walk over the ticks later than "after", which need not be finite */
static void
begin_walk(Walk *walk, const IdemRhythm *rhythm, TimestampTz after)
{
	memset(walk, 0, sizeof(*walk));
	walk->rhythm = rhythm;
	if (rhythm->cron == NULL)
	{
		walk->n = count_ticks(rhythm, after);
		return;
	}
	if (!TIMESTAMP_IS_NOBEGIN(rhythm->starts_at))
		after = Max(after, rhythm->starts_at - 1);
	parse_cron(rhythm->cron, &walk->cron);
	walk->zone = find_zone(rhythm->time_zone);
	if (after < MIN_TIMESTAMP)
		walk->first = MIN_INSTANT;
	else if (after >= END_TIMESTAMP)
		walk->first = END_INSTANT;
	else
		walk->first = divide_down(after, USECS_PER_SEC) + 1 + UNIX_EPOCH;
	walk->last = walk->first;
	walk->done = PG_INT64_MIN;
	walk->day = PG_INT32_MIN;
	walk->segment_end = walk->first - LOOK_BACK;
	enter_segment(walk);
}

/* The next tick; DT_NOEND: there is none, and none will come */
static TimestampTz
walk_next(Walk *walk)
{
	int64 horizon = Min(walk->last + HORIZON, END_INSTANT);
	TimestampTz tick;
	int64 local;

	CHECK_FOR_INTERRUPTS();
	if (walk->rhythm->cron == NULL)
		tick = get_nth(walk->rhythm, walk->n++);
	else
	{
		while (
			!walk->has_gap_tick &&
			!find_local(walk, walk->next, Min(walk->segment_end, horizon) + walk->offset, &local))
		{
			if (walk->segment_end >= horizon)
				return DT_NOEND;
			CHECK_FOR_INTERRUPTS();
			enter_segment(walk);
		}
		if (walk->has_gap_tick)
			walk->last = walk->segment_start;
		else
		{
			walk->next = local + 1;
			walk->last = local - walk->offset;
		}
		walk->has_gap_tick = false;
		tick = (walk->last - UNIX_EPOCH) * USECS_PER_SEC;
	}
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

/*
 * The ticks that are due, and which of them get a job (T4).  The first one is "next", as the row
 * of the schedule says, even if the rules of its time zone have changed since then.
 */
void
idem_ticks_due(const IdemRhythm *rhythm, TimestampTz next, IdemMissed missed, TimestampTz now,
			   IdemTicks *ticks)
{
	TimestampTz newest[IDEM_MAX_MISSED]; /* a ring */
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
		latest = next;
		newest[ticks->n++ % IDEM_MAX_MISSED] = next;
	}
	ticks->next = next;
	if (missed == IDEM_MISSED_ALL)
		ticks->njobs = Min(ticks->n, IDEM_MAX_MISSED);
	else
		ticks->njobs = missed == IDEM_MISSED_ONCE || now - latest <= MAX_LATE ? 1 : 0;
	for (int i = 0; i < ticks->njobs; i++)
		ticks->jobs[i] = newest[(ticks->n - ticks->njobs + i) % IDEM_MAX_MISSED];
}
