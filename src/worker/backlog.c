/*
 * backlog.c
 *		Estimate how many expired rows a sweep has left.
 *
 * The estimate comes from the statistics of the table, so it costs no scan.
 * idem.cleanup_progress shows it.  The number of live rows, which is estimated here,
 * too, helps the launcher to decide whether the worker keeps up (schedule.c).
 */
#include "postgres.h"

#include "catalog/pg_statistic.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "worker/worker.h"

/*
 * The share of expired rows among those whose expires_at is not before from, by
 * the histogram of the column; 1 if there is no histogram.
 */
static double
get_share_expired(IdemTable *table, AttrNumber expires_at, TimestampTz from)
{
	TimestampTz now = idem_clock_now();
	HeapTuple stats =
		SearchSysCache3(STATRELATTINH, ObjectIdGetDatum(RelationGetRelid(table->heap)),
						Int16GetDatum(expires_at), BoolGetDatum(false));
	AttStatsSlot histogram;
	int n = 0;
	int expired = 0;

	if (!HeapTupleIsValid(stats))
		return 1;
	if (get_attstatsslot(&histogram, stats, STATISTIC_KIND_HISTOGRAM, InvalidOid,
						 ATTSTATSSLOT_VALUES))
	{
		for (int i = 0; i < histogram.nvalues; i++)
		{
			TimestampTz bound = DatumGetTimestampTz(histogram.values[i]);

			n += bound >= from;
			expired += bound >= from && bound <= now;
		}
		free_attstatsslot(&histogram);
	}
	ReleaseSysCache(stats);
	return n > 0 ? (double) expired / n : 1;
}

/* Estimate the number of live rows, and of expired rows from the cursor on */
void
idem_backlog_estimate(IdemTable *table, AttrNumber expires_at, IdemCleanup *cleanup)
{
	int64 rows =
		DatumGetInt64(DirectFunctionCall1(pg_stat_get_live_tuples,
										  ObjectIdGetDatum(RelationGetRelid(table->heap))));
	double share = get_share_expired(table, expires_at, cleanup->cursor.from);

	cleanup->rows = rows > 0 ? rows : (int64) Max(table->heap->rd_rel->reltuples, 0);
	cleanup->left = (int64) (cleanup->rows * share);
}
