/*
 * histogram.c
 *		Histograms of the times of jobs (S5).
 *
 * The bounds of the buckets are powers of two, from 2^-10 s (1 ms) to 2^19 s (6 days).  A bucket
 * counts the times up to its bound that are longer than the bound before it; the last bucket has
 * no bound.
 *
 * Sessions add to a histogram without a lock.  A copy that is made meanwhile may have a time in
 * its bucket that is not yet in the sum.
 */
#include "postgres.h"

#include "port/pg_bitutils.h"
#include "utils/float.h"
#include "utils/timestamp.h"

#include "shmem/shmem.h"

/* The bound of the first bucket is a unit */
#define UNITS_PER_SEC 1024

/* Longer times, which only rows that idem has not written can have, count as this one: 285 years */
#define MAX_USECS (PG_INT64_MAX / UNITS_PER_SEC)

/* The largest time that a bucket counts, in seconds */
double
idem_histogram_bound(int bucket)
{
	if (bucket == IDEM_HISTOGRAM_BUCKETS - 1)
		return get_float8_infinity();
	return (double) (1 << bucket) / UNITS_PER_SEC;
}

/* The first bucket whose bound is not below this time */
static int
find_bucket(uint64 usecs)
{
	uint64 units; /* the time is longer than so many, and not longer than one more */

	if (usecs == 0)
		return 0;
	units = (usecs * UNITS_PER_SEC - 1) / USECS_PER_SEC;
	if (units == 0)
		return 0;
	return Min(pg_leftmost_one_pos64(units) + 1, IDEM_HISTOGRAM_BUCKETS - 1);
}

/* S5: add the time between the two.  If the clock was set back, it is zero. */
void
idem_histogram_add(IdemHistogram *histogram, TimestampTz from, TimestampTz to)
{
	/* as unsigned numbers the difference cannot overflow */
	uint64 usecs = from < to ? Min((uint64) to - (uint64) from, MAX_USECS) : 0;

	pg_atomic_fetch_add_u64(&histogram->counts[find_bucket(usecs)], 1);
	pg_atomic_fetch_add_u64(&histogram->usecs, usecs);
}

/* The four functions below are for all histograms of a queue.  Before other processes see them: */
void
idem_histogram_init(IdemHistogram *histograms)
{
	for (int i = 0; i < IDEM_HISTOGRAM_N; i++)
	{
		for (int j = 0; j < IDEM_HISTOGRAM_BUCKETS; j++)
			pg_atomic_init_u64(&histograms[i].counts[j], 0);
		pg_atomic_init_u64(&histograms[i].usecs, 0);
	}
}

/* Add the times of the others */
void
idem_histogram_merge(IdemHistogram *histograms, IdemHistogram *added)
{
	for (int i = 0; i < IDEM_HISTOGRAM_N; i++)
	{
		for (int j = 0; j < IDEM_HISTOGRAM_BUCKETS; j++)
		{
			uint64 n = pg_atomic_read_u64(&added[i].counts[j]);

			if (n != 0)
				pg_atomic_fetch_add_u64(&histograms[i].counts[j], n);
		}
		pg_atomic_fetch_add_u64(&histograms[i].usecs, pg_atomic_read_u64(&added[i].usecs));
	}
}

void
idem_histogram_copy(IdemHistogram *histograms, IdemHistogramCopy *copies)
{
	for (int i = 0; i < IDEM_HISTOGRAM_N; i++)
	{
		for (int j = 0; j < IDEM_HISTOGRAM_BUCKETS; j++)
			copies[i].counts[j] = pg_atomic_read_u64(&histograms[i].counts[j]);
		copies[i].usecs = pg_atomic_read_u64(&histograms[i].usecs);
	}
}

/* Continue from copies; NULL: from zero */
void
idem_histogram_set(IdemHistogram *histograms, const IdemHistogramCopy *copies)
{
	for (int i = 0; i < IDEM_HISTOGRAM_N; i++)
	{
		for (int j = 0; j < IDEM_HISTOGRAM_BUCKETS; j++)
			pg_atomic_write_u64(&histograms[i].counts[j], copies != NULL ? copies[i].counts[j] : 0);
		pg_atomic_write_u64(&histograms[i].usecs, copies != NULL ? copies[i].usecs : 0);
	}
}

uint64
idem_histogram_count(const IdemHistogramCopy *copy)
{
	uint64 count = 0;

	for (int i = 0; i < IDEM_HISTOGRAM_BUCKETS; i++)
		count += copy->counts[i];
	return count;
}

/*
 * S5: estimate the time, in seconds, that this part of all times does not exceed, as
 * histogram_quantile() of Prometheus does: the times of a bucket are spread evenly over it, and
 * for the last bucket the answer is the bound before it.  The copy must not be empty.
 */
double
idem_histogram_quantile(const IdemHistogramCopy *copy, double part)
{
	double rank = part * idem_histogram_count(copy);
	double lower = 0;
	uint64 below = 0;

	for (int i = 0; i < IDEM_HISTOGRAM_BUCKETS - 1; i++)
	{
		double upper = idem_histogram_bound(i);

		if (copy->counts[i] != 0 && below + copy->counts[i] >= rank)
			return lower + (upper - lower) * (rank - below) / copy->counts[i];
		below += copy->counts[i];
		lower = upper;
	}
	return lower;
}
