/*
 * clock.c
 *		The clock by which keys, leases and jobs go, and the tokens made of it.
 */
#include "postgres.h"

#include "portability/instr_time.h"
#include "utils/datetime.h"
#include "utils/timestamp.h"

#include "idem.h"

#define USECS_FROM_1970_TO_2000 \
	((int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY)

/* Never the start of the transaction */
TimestampTz
idem_clock_now(void)
{
	return GetCurrentTimestamp() + idem_guc_clock_offset * USECS_PER_SEC;
}

/* Microseconds by a clock that never goes back, for how long something takes */
int64
idem_clock_steady(void)
{
	instr_time now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

/*
 * The token of the next lease: higher than the last one of the key or job,
 * wherever the clock stands; and the time, so that it is higher than those of
 * rows that were lost or removed, too.
 */
int64
idem_clock_next_token(int64 last, TimestampTz now)
{
	return Max(last + 1, now + USECS_FROM_1970_TO_2000);
}
