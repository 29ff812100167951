/*
 * clock.c
 *		The clock that keys, leases and jobs expire by, and the tokens derived from it.
 */
#include "postgres.h"

#include <time.h>

#include "utils/timestamp.h"

#include "idem.h"

#define USECS_FROM_1970_TO_2000 \
	((int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY)

/* The current time, shifted by idem.clock_offset; never the start of the transaction (K9) */
TimestampTz
idem_clock_now(void)
{
	return GetCurrentTimestamp() + idem_guc_clock_offset * USECS_PER_SEC;
}

/* Number of seconds since then, for messages */
int64
idem_clock_age(TimestampTz since)
{
	return Max(idem_clock_now() - since, 0) / USECS_PER_SEC;
}

/*
 * Microseconds of a clock that is never set back, to measure how long something takes.  It is
 * the same in all processes; instr_time is not, because a session can choose its source
 * (timing_clock_source).
 */
int64
idem_clock_steady(void)
{
	struct timespec now;

	(void) clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * USECS_PER_SEC + now.tv_nsec / 1000;
}

/*
 * The token of the next lease (L2).  It is higher than the last token of the key or
 * job, even if the clock was set back.  It is at least the current time in
 * microseconds, so it is also higher than tokens in rows that were removed, or
 * lost in a failover.
 */
int64
idem_clock_next_token(int64 last, TimestampTz now)
{
	return Max(last + 1, now + USECS_FROM_1970_TO_2000);
}

/* The time at which a token was made, unless the clock was set back before (H3) */
TimestampTz
idem_clock_token_time(int64 token)
{
	return token - USECS_FROM_1970_TO_2000;
}
