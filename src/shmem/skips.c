/*
 * skips.c
 *		Skip ranges of a queue: parts of the index that no fetch needs to look at.  And key
 *		skips: rows of a key that have ended, which no enqueue of the key needs to look at.
 *
 * doc/jobs-protocol.md has the protocol.  The ranges lie in shared memory, in the entry of
 * the queue, or in the memory of a backend if there is no such entry.  This file knows
 * positions and times, but no tables: src/jobs/fetch/fetchstore.c collects the ranges, and
 * src/jobs/row/jobrow.c notes what changes in them.
 *
 * A spinlock protects all but the flags, which are also read without it.  A process
 * holds the lock for moments: nothing under it allocates memory or raises an error.
 * The ranges are sorted, and no two of them overlap.
 *
 * Key skips (J14): entries of jobs that have ended stay in the index on the hash of the key until
 * VACUUM, and longer while a transaction holds an old snapshot.  An enqueue that has passed many of
 * them publishes from which TID to which one all of them were of rows that have ended: those stay
 * ended.  A transaction that inserts an entry of the hash there drops this again.  A backend that
 * reads, publishes or drops the key skip of a hash holds the lock on the hash; the spinlock only
 * protects against backends that do the same for another hash.
 */
#include "postgres.h"

#include "shmem/shmem.h"

/* Bits of IdemSkips.flags */
#define HAS_RANGES	0x01
#define HAS_WALKER	0x02
#define HAS_BLOCKED 0x04 /* a range contains blocked jobs, or the walker may have passed some */

/* A range of less weight is published only if it makes another one longer */
#define MIN_WEIGHT 8

/*
 * In microseconds.  The ranges of a queue live LIFE_FACTOR times as long as it took to look at all
 * of their entries, between these limits (J14).  So fetches spend at most about a twentieth of
 * the time of one CPU on looking again, and a walk always ends before what it has seen is out of
 * date.
 */
#define LIFE_FACTOR 25
#define MIN_LIFE	USECS_PER_SEC
#define MAX_LIFE	(60 * USECS_PER_SEC)

/* One fetch looks again at a range after this part of its life */
#define LOOK_AGAIN_AFTER(life) ((life) / 4 * 3)

/* The time of the last fetch is noted only if it is older than this, in microseconds */
#define FETCH_PRECISION (USECS_PER_SEC / 10)

const IdemPosition idem_first_position = {PG_INT32_MIN, PG_INT64_MIN, PG_INT64_MIN};
const IdemPosition idem_last_position = {PG_INT32_MAX, PG_INT64_MAX, PG_INT64_MAX};

int
idem_skips_compare(const IdemPosition *a, const IdemPosition *b)
{
	if (a->priority != b->priority)
		return a->priority < b->priority ? -1 : 1;
	if (a->run_at != b->run_at)
		return a->run_at < b->run_at ? -1 : 1;
	if (a->job_id != b->job_id)
		return a->job_id < b->job_id ? -1 : 1;
	return 0;
}

/* The position before the given one; job numbers are not negative */
IdemPosition
idem_skips_before(const IdemPosition *position)
{
	IdemPosition before = *position;

	if (before.job_id > PG_INT64_MIN)
		before.job_id--;
	return before;
}

/* Is the position in the range? */
bool
idem_skips_contains(const IdemSkipRange *range, const IdemPosition *position)
{
	return idem_skips_compare(&range->after, position) < 0 &&
		idem_skips_compare(position, &range->upto) <= 0;
}

/* J14: how long a look that has taken so long is good for; all in microseconds */
static int64
compute_life(int64 cost)
{
	return Min(Max(cost * LIFE_FACTOR, MIN_LIFE), MAX_LIFE);
}

/* Was it at least so long ago, by the steady clock?  A time in the future counts as old. */
static bool
is_older(int64 since, int64 steady, int64 age)
{
	return steady - since >= age || steady < since;
}

void
idem_skips_init(IdemSkips *skips)
{
	memset(skips, 0, sizeof(*skips));
	skips->patience = MIN_LIFE;
	SpinLockInit(&skips->lock);
	pg_atomic_init_u32(&skips->flags, 0);
	pg_atomic_init_u64(&skips->fetched_at, 0);
	pg_atomic_init_u32(&skips->nkeys, 0);
}

/* A fetch was made at this time.  Most fetches write nothing, so that they share the line. */
void
idem_skips_note_fetch(IdemSkips *skips, TimestampTz now)
{
	TimestampTz last = (TimestampTz) pg_atomic_read_u64(&skips->fetched_at);

	if (now - last >= FETCH_PRECISION || now < last)
		pg_atomic_write_u64(&skips->fetched_at, (uint64) now);
}

/* About when the last fetch was made; 0: none is known (H3) */
TimestampTz
idem_skips_last_fetch(IdemSkips *skips)
{
	return (TimestampTz) pg_atomic_read_u64(&skips->fetched_at);
}

/*
 * J14: how long the ranges of the queue live.  The cost of all of them counts, not that of each
 * one: twelve ranges that come due one after the other cost no more than one.
 */
static int64
get_life(const IdemSkips *skips)
{
	int64 cost = 0;

	for (int i = 0; i < skips->n; i++)
		cost += skips->ranges[i].cost;
	return compute_life(cost);
}

static void
remove_range(IdemSkips *skips, int i)
{
	skips->n--;
	memmove(&skips->ranges[i], &skips->ranges[i + 1],
			(skips->n - i) * sizeof(skips->ranges[0]));
}

/* Does b begin where a ends? */
static bool
is_followed_by(const IdemSkipRange *a, const IdemSkipRange *b)
{
	return idem_skips_compare(&a->upto, &b->after) == 0;
}

/* Extend range a by range b, which begins where a ends, or ends where a begins */
static void
merge_ranges(IdemSkipRange *a, const IdemSkipRange *b)
{
	if (is_followed_by(a, b))
		a->upto = b->upto;
	else
		a->after = b->after;
	a->until = Min(a->until, b->until);
	a->looked_at = Min(a->looked_at, b->looked_at);
	a->weight = Min((int64) a->weight + b->weight, PG_INT32_MAX);
	a->cost = Min((int64) a->cost + b->cost, PG_INT32_MAX);
	a->has_blocked |= b->has_blocked;
}

/*
 * Insert a range that overlaps with no other one.  If there is no room, merge two ranges of which
 * one begins where the other ends, even if only one of them ends at a time; or else remove the
 * lightest range, unless the new one is not heavier.
 */
static void
insert_range(IdemSkips *skips, const IdemSkipRange *range)
{
	IdemSkipRange *ranges = skips->ranges;
	int i;

	if (skips->n == IDEM_MAX_SKIPS)
	{
		int64 pair_weight = PG_INT64_MAX;
		int pair = -1;
		int lightest = 0;

		for (i = 0; i < skips->n; i++)
		{
			if (ranges[i].weight < ranges[lightest].weight)
				lightest = i;
			if (i + 1 < skips->n && is_followed_by(&ranges[i], &ranges[i + 1]) &&
				ranges[i].owner == ranges[i + 1].owner &&
				(int64) ranges[i].weight + ranges[i + 1].weight < pair_weight)
			{
				pair = i;
				pair_weight = (int64) ranges[i].weight + ranges[i + 1].weight;
			}
		}
		if (pair < 0 && ranges[lightest].weight >= range->weight)
			return;
		if (pair >= 0)
			merge_ranges(&ranges[pair], &ranges[pair + 1]);
		remove_range(skips, pair >= 0 ? pair + 1 : lightest);
	}
	for (i = skips->n; i > 0 && idem_skips_compare(&range->after, &ranges[i - 1].after) < 0; i--)
		ranges[i] = ranges[i - 1];
	ranges[i] = *range;
	skips->n++;
}

/*
 * Remove a part from the ranges: what lies behind "after", up to and including "upto".  A range
 * that reaches the end of the queue also loses everything behind the part: new jobs are
 * added there one after another, and each of them would split off another range.
 */
static void
remove_part(IdemSkips *skips, const IdemPosition *after, const IdemPosition *upto)
{
	for (int i = skips->n - 1; i >= 0; i--)
	{
		IdemSkipRange *range = &skips->ranges[i];
		IdemSkipRange rest = *range;
		bool has_left = idem_skips_compare(&range->after, after) < 0;
		bool has_right = idem_skips_compare(upto, &range->upto) < 0 &&
			idem_skips_compare(&range->upto, &idem_last_position) < 0;

		if (idem_skips_compare(&range->upto, after) <= 0 ||
			idem_skips_compare(upto, &range->after) <= 0)
			continue;
		rest.after = *upto;
		if (has_left && has_right)
		{
			rest.weight = range->weight /= 2;
			rest.cost = range->cost /= 2;
			range->upto = *after;
			insert_range(skips, &rest);
			return;
		}
		if (has_left)
			range->upto = *after;
		else if (has_right)
			*range = rest;
		else
			remove_range(skips, i);
	}
}

/*
 * Add a range that overlaps with no other one.  Adjacent ranges become part of it, but not if only
 * one of them ends at a time, or if one of them is due for another look.
 */
static void
add_range(IdemSkips *skips, const IdemSkipRange *range, int64 steady)
{
	IdemSkipRange new = *range;
	int64 again = LOOK_AGAIN_AFTER(get_life(skips));
	bool merged = false;

	for (int i = skips->n - 1; i >= 0; i--)
	{
		IdemSkipRange *other = &skips->ranges[i];

		if ((is_followed_by(other, &new) || is_followed_by(&new, other)) &&
			other->owner == new.owner &&
			(other->until == DT_NOEND) == (new.until == DT_NOEND) &&
			!is_older(other->looked_at, steady, again) &&
			!is_older(new.looked_at, steady, again))
		{
			merge_ranges(&new, other);
			remove_range(skips, i);
			merged = true;
		}
	}
	if (merged || new.weight >= MIN_WEIGHT)
		insert_range(skips, &new);
}

/* Set the flags, which other processes read without the lock */
static void
set_flags(IdemSkips *skips)
{
	uint32 flags = 0;

	if (skips->n > 0)
		flags |= HAS_RANGES;
	if (skips->walker != 0)
		flags |= HAS_WALKER;
	if (skips->walker != 0 && skips->walker_blocked)
		flags |= HAS_BLOCKED;
	for (int i = 0; i < skips->n; i++)
	{
		if (skips->ranges[i].has_blocked)
			flags |= HAS_BLOCKED;
	}
	pg_atomic_write_u32(&skips->flags, flags);
}

/*
 * Copy the ranges that a fetch of this owner may use, and drop those that are out of date.
 * now is the clock of the fetch, steady the monotonic clock.  view->is_overdue: a range is
 * due for another look.  fresh: leave such ranges out.
 */
void
idem_skips_read(IdemSkips *skips, TimestampTz now, int64 steady, uint64 owner, bool fresh,
				IdemSkipView *view)
{
	int64 life;

	view->n = 0;
	view->is_overdue = false;
	if (pg_atomic_read_u32(&skips->flags) == 0)
		return;
	SpinLockAcquire(&skips->lock);
	life = get_life(skips);
	for (int i = skips->n - 1; i >= 0; i--)
	{
		if (is_older(skips->ranges[i].looked_at, steady, life) || skips->ranges[i].until <= now)
			remove_range(skips, i);
	}
	for (int i = 0; i < skips->n; i++)
	{
		bool is_overdue = is_older(skips->ranges[i].looked_at, steady, LOOK_AGAIN_AFTER(life));

		if (skips->ranges[i].owner != 0 && skips->ranges[i].owner != owner)
			continue;
		view->is_overdue |= is_overdue;
		if (!is_overdue || !fresh)
			view->ranges[view->n++] = skips->ranges[i];
	}
	set_flags(skips);
	SpinLockRelease(&skips->lock);
}

/*
 * Become the walker of the part behind this position.  Returns the number of the walker, or 0
 * if there is another walker.  A walker that shows no sign is replaced.  It may only be slow
 * (the disk, a lock), so each walker after it has twice the time.
 */
uint64
idem_skips_register(IdemSkips *skips, const IdemPosition *after, int64 steady)
{
	uint64 id = 0;

	SpinLockAcquire(&skips->lock);
	if (skips->walker == 0 || is_older(skips->walker_seen_at, steady, skips->patience))
	{
		if (skips->walker != 0)
			skips->patience = Min(2 * skips->patience, MAX_LIFE);
		id = skips->walker = ++skips->nwalkers;
		skips->walker_seen_at = steady;
		skips->walker_after = *after;
		skips->walker_has_limit = false;
		skips->walker_blocked = false;
		set_flags(skips);
	}
	SpinLockRelease(&skips->lock);
	/* the walker looks at the index only after writers can see that there is a walker */
	pg_memory_barrier();
	return id;
}

/* The walker is about to look at a follow-up job */
void
idem_skips_announce_blocked(IdemSkips *skips, uint64 id)
{
	SpinLockAcquire(&skips->lock);
	if (skips->walker == id)
	{
		skips->walker_blocked = true;
		set_flags(skips);
	}
	SpinLockRelease(&skips->lock);
	pg_memory_barrier();
}

/* Has a writer noted a change at this position or before it, in the part not yet published? */
static bool
is_at_limit(const IdemSkips *skips, const IdemPosition *position)
{
	return skips->walker_has_limit && idem_skips_compare(&skips->walker_limit, position) <= 0;
}

/*
 * J14: publish what the walker has skipped, up to the first change that a writer has noted
 * meanwhile.  If another backend has become the walker, publish nothing.  The walker continues
 * behind next; is_held: no range may contain that position itself.  Returns false if the
 * caller is no longer the walker.
 */
bool
idem_skips_publish(IdemSkips *skips, uint64 id, const IdemSkipRange *seen, const IdemPosition *next,
				   bool is_held, int64 steady)
{
	IdemSkipRange range = *seen;
	bool goes_on;

	SpinLockAcquire(&skips->lock);
	goes_on = skips->walker == id;
	if (goes_on)
	{
		if (is_at_limit(skips, &range.upto))
			range.upto = idem_skips_before(&skips->walker_limit);
		if (idem_skips_compare(&range.after, &range.upto) < 0)
		{
			remove_part(skips, &range.after, &range.upto);
			add_range(skips, &range, steady);
		}
		if (is_held)
		{
			IdemPosition before = idem_skips_before(next);

			remove_part(skips, &before, next);
		}
		goes_on = !is_at_limit(skips, next);
		skips->walker = goes_on ? id : 0;
		skips->walker_after = *next;
		skips->walker_seen_at = steady;
		set_flags(skips);
	}
	SpinLockRelease(&skips->lock);
	return goes_on;
}

/* The walk has ended, or has failed */
void
idem_skips_release(IdemSkips *skips, uint64 id)
{
	SpinLockAcquire(&skips->lock);
	if (skips->walker == id)
	{
		skips->walker = 0;
		skips->patience = MIN_LIFE;
	}
	set_flags(skips);
	SpinLockRelease(&skips->lock);
}

/*
 * J14: the job at this position can be fetched from the time due on.  The caller has written the
 * job already; now is its clock.
 */
void
idem_skips_note(IdemSkips *skips, const IdemPosition *position, TimestampTz due, TimestampTz now)
{
	IdemPosition before = idem_skips_before(position);

	/* the walker sets its flag and then reads the index; a writer does the reverse */
	pg_memory_barrier();
	if (likely(pg_atomic_read_u32(&skips->flags) == 0))
		return;
	SpinLockAcquire(&skips->lock);
	for (int i = 0; i < skips->n; i++)
	{
		IdemSkipRange *range = &skips->ranges[i];

		if (!idem_skips_contains(range, position) || range->until <= due)
			continue;
		/* if the range does not live as long as that, it is enough to shorten its time */
		if (due - now > get_life(skips))
			range->until = due;
		else
			remove_part(skips, &before, position);
		break;
	}
	if (skips->walker != 0 && idem_skips_compare(&skips->walker_after, position) < 0 &&
		!is_at_limit(skips, position))
	{
		skips->walker_has_limit = true;
		skips->walker_limit = *position;
	}
	set_flags(skips);
	SpinLockRelease(&skips->lock);
}

/* Has a range passed blocked jobs, or may the walker be doing so? */
bool
idem_skips_has_blocked(IdemSkips *skips)
{
	pg_memory_barrier();
	return (pg_atomic_read_u32(&skips->flags) & HAS_BLOCKED) != 0;
}

/* Any blocked job may be free now: drop ranges that contain one, and a walker that passed one */
void
idem_skips_drop_blocked(IdemSkips *skips)
{
	SpinLockAcquire(&skips->lock);
	for (int i = skips->n - 1; i >= 0; i--)
	{
		if (skips->ranges[i].has_blocked)
			remove_range(skips, i);
	}
	if (skips->walker_blocked)
		skips->walker = 0;
	set_flags(skips);
	SpinLockRelease(&skips->lock);
}

/* The key skip of the hash, or NULL; the caller holds the spinlock */
static IdemKeySkip *
find_key_skip(IdemSkips *skips, int64 key_hash)
{
	for (int i = 0; i < IDEM_MAX_KEY_SKIPS; i++)
	{
		if (skips->keys[i].n > 0 && skips->keys[i].key_hash == key_hash)
			return &skips->keys[i];
	}
	return NULL;
}

/* Key skips are used for as long as ranges are (J14): rows may bypass the library */
static bool
is_key_skip_old(const IdemKeySkip *skip, int64 steady)
{
	return is_older(skip->looked_at, steady, compute_life(skip->cost));
}

/* Get the rows that an enqueue of the hash skips; false: none.  storage: of the table. */
bool
idem_skips_key_get(IdemSkips *skips, int64 key_hash, Oid storage, int64 steady, IdemKeySkip *skip)
{
	const IdemKeySkip *found;
	bool is_good;

	if (likely(pg_atomic_read_u32(&skips->nkeys) == 0))
		return false;
	SpinLockAcquire(&skips->lock);
	found = find_key_skip(skips, key_hash);
	is_good = found != NULL && found->storage == storage && !is_key_skip_old(found, steady);
	if (is_good)
		*skip = *found;
	SpinLockRelease(&skips->lock);
	return is_good;
}

/* Publish a key skip; that of another hash gives way if it is old or has fewer entries */
void
idem_skips_key_publish(IdemSkips *skips, const IdemKeySkip *skip, int64 steady)
{
	IdemKeySkip *target;
	IdemKeySkip *smaller = NULL;

	SpinLockAcquire(&skips->lock);
	target = find_key_skip(skips, skip->key_hash);
	for (int i = 0; i < IDEM_MAX_KEY_SKIPS && target == NULL; i++)
	{
		if (skips->keys[i].n == 0 || is_key_skip_old(&skips->keys[i], steady))
			target = &skips->keys[i];
		else if (smaller == NULL && skips->keys[i].n < skip->n)
			smaller = &skips->keys[i];
	}
	if (target == NULL)
		target = smaller;
	if (target != NULL)
		*target = *skip;
	pg_atomic_write_u32(&skips->nkeys, 1);
	SpinLockRelease(&skips->lock);
}

/* J14: an entry of the hash has come, of the row with this TID */
void
idem_skips_key_note(IdemSkips *skips, int64 key_hash, ItemPointer tid)
{
	IdemKeySkip *skip;

	if (likely(pg_atomic_read_u32(&skips->nkeys) == 0))
		return;
	SpinLockAcquire(&skips->lock);
	skip = find_key_skip(skips, key_hash);
	if (skip != NULL && idem_skips_key_contains(skip, tid))
		skip->n = 0;
	SpinLockRelease(&skips->lock);
}

bool
idem_skips_key_contains(const IdemKeySkip *skip, ItemPointer tid)
{
	ItemPointerData first = skip->first;
	ItemPointerData last = skip->last;

	return ItemPointerCompare(&first, tid) <= 0 && ItemPointerCompare(tid, &last) <= 0;
}
