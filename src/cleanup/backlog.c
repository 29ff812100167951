/*
 * backlog.c
 *		Estimate how many expired rows a sweep has left.
 *
 * The estimate comes from the statistics of the table, so it costs no scan.  The
 * number of expired rows is shown in idem.cleanup_progress.  From the number of live
 * rows the launcher sees whether cleanup keeps up (adapt_pause).
 */
#include "postgres.h"

#include "catalog/pg_statistic.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "cleanup/cleanup.h"

/*
 * The share of expired rows among those whose expires_at is not before from, by
 * the histogram of the column; 1 if there is no histogram.
 */
static double
compute_share_expired(IdemTable *table, AttrNumber expires_at, TimestampTz from)
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
idem_backlog_estimate(IdemTable *table, AttrNumber expires_at, IdemSweepBatch *batch)
{
	int64 rows =
		DatumGetInt64(DirectFunctionCall1(pg_stat_get_live_tuples,
										  ObjectIdGetDatum(RelationGetRelid(table->heap))));
	double share = compute_share_expired(table, expires_at, batch->cursor.from);

	batch->rows = rows > 0 ? rows : (int64) Max(table->heap->rd_rel->reltuples, 0);
	batch->left = (int64) (batch->rows * share);
}
