/*
 * fetchskip.c
 *		What a fetch skips: it jumps over skip ranges, and collects new ones (J14).
 *
 * fetchstore.c looks at the entries of the index and says what each of them means.  This
 * file keeps the run: what the fetch has skipped since the last job that it took, or that
 * an open transaction holds.  At first only the weight of the run is counted.  If it
 * becomes too heavy, the fetch registers as the walker of the queue and looks at the run
 * again, from its beginning.  Only what a walker has seen can become a range, because
 * writers note what they change while there is a walker.  doc/jobs-protocol.md has
 * the protocol.
 *
 * A fetch that fails is released as the walker when its transaction or subtransaction is rolled
 * back.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/pg_prng.h"
#include "datatype/timestamp.h"

#include "jobs/fetch/fetch.h"

/* Begin to collect after skipping this much.  A jump counts for its search in the index. */
#define MANY_SKIPPED 8
#define JUMP_WEIGHT	 2

/* Publish a range after this many entries, so that few changes fall into the unpublished part */
#define PUBLISH_AFTER 64

/* A walk of more microseconds is long: enqueues of other sessions have come meanwhile */
#define LONG_WALK 1000

/*
 * Identifies this transaction, as long as none of its subtransactions has been rolled
 * back.  0: not needed yet.
 */
static uint64 owner = 0;

/* The fetch under way is this walker of the queue, whose entry is pinned; 0: it is none */
static IdemQueueRef *walked = NULL;
static uint64 walker = 0;

/*
 * The transaction has ended, or a subtransaction was rolled back.  A fetch that has failed there
 * collects no more; another one can begin at once.
 */
void
idem_fetchskip_forget(void)
{
	owner = 0;
	if (walker == 0)
		return;
	Assert(walked->is_pinned);
	idem_skips_release(walked->entry.skips, walker);
	walker = 0;
}

/*
 * The owner of ranges that only this transaction may use.  They outlive it, so the number is
 * random: the server may give the process id to another backend.
 */
static uint64
get_owner(void)
{
	if (owner == 0)
		owner = pg_prng_uint64(&pg_global_prng_state) | 1;
	return owner;
}

/* Begin an empty run behind this position */
static void
begin_run(IdemFetchWalk *walk, const IdemPosition *after)
{
	memset(&walk->run, 0, sizeof(walk->run));
	walk->run.after = walk->run.upto = *after;
	walk->run.until = DT_NOEND;
	walk->run.looked_at = walk->steady;
}

/* Try to become the walker, and begin the run anew */
static bool
register_walker(IdemFetchWalk *walk)
{
	IdemPosition after = walk->run.after;

	walk->steady = idem_clock_steady();
	walk->id = idem_skips_register(walk->skips, &after, walk->steady);
	if (walk->id == 0)
		return false;
	if (walk->is_shared)
	{
		walked = walk->queue;
		walker = walk->id;
	}
	walk->announced_blocked = false;
	begin_run(walk, &after);
	return true;
}

/*
 * Begin the walk of a fetch at the beginning of the queue.  now is its clock.  If a range
 * is due for another look, this fetch looks at it, unless there is another walker.
 */
void
idem_fetchskip_begin(IdemFetchWalk *walk, const text *queue, TimestampTz now)
{
	memset(walk, 0, offsetof(IdemFetchWalk, view));
	walk->queue = idem_queueref_get(queue);
	walk->skips = idem_queueref_skips(walk->queue);
	walk->is_shared = walk->queue->is_pinned;
	walk->now = now;
	walk->until = DT_NOEND;
	walk->began = walk->steady = idem_clock_steady();
	walk->may_register = true;
	begin_run(walk, &idem_first_position);
	/* no other fetch can be the walker, so it was one that has failed */
	if (unlikely(!walk->is_shared && walk->skips->walker != 0))
		idem_skips_release(walk->skips, walk->skips->walker);
	idem_skips_read(walk->skips, now, walk->steady, owner, false, &walk->view);
	if (walk->view.is_overdue && register_walker(walk))
	{
		walk->looks_again = true;
		idem_skips_read(walk->skips, now, walk->steady, owner, true, &walk->view);
	}
}

/* Has the walk taken so long that what it has not found may have come meanwhile? */
bool
idem_fetchskip_was_long(const IdemFetchWalk *walk)
{
	return idem_clock_steady() - walk->began > LONG_WALK;
}

/* Begin another walk of the same fetch, which uses no ranges and looks at everything */
void
idem_fetchskip_begin_anew(IdemFetchWalk *walk)
{
	walk->ignores_ranges = true;
	walk->view.n = 0;
	begin_run(walk, &idem_first_position);
	(void) register_walker(walk);
}

/* The fetch is not the walker, or no longer */
static void
end_walker(IdemFetchWalk *walk)
{
	walk->id = 0;
	walker = 0;
}

/*
 * Publish the run; the walker continues behind next.  is_held: no range may contain that position.
 * Returns false if the fetch is no longer the walker.
 */
static bool
publish_seen(IdemFetchWalk *walk, const IdemPosition *next, bool is_held)
{
	walk->steady = idem_clock_steady();
	walk->run.cost = Min(Max(walk->steady - walk->run.looked_at, 0), PG_INT32_MAX);
	return idem_skips_publish(walk->skips, walk->id, &walk->run, next, is_held,
							  walk->steady);
}

/* Publish the run, and begin the next one */
static void
publish_run(IdemFetchWalk *walk, const IdemPosition *next, bool is_held)
{
	if (!publish_seen(walk, next, is_held))
	{
		/* another fetch is the walker, or a writer has noted a change before this position */
		end_walker(walk);
		walk->may_register = true;
	}
	begin_run(walk, next);
}

/*
 * Has this fetch skipped so much that it should collect?  If so, it is the walker now and
 * goes back to the beginning of the run.
 */
bool
idem_fetchskip_goes_back(IdemFetchWalk *walk)
{
	if (likely(walk->run.weight < MANY_SKIPPED) || walk->id != 0 || !walk->may_register)
		return false;
	walk->may_register = false;
	if (!register_walker(walk))
		return false;
	if (!walk->ignores_ranges)
		idem_skips_read(walk->skips, walk->now, walk->steady, owner, walk->looks_again,
						&walk->view);
	return true;
}

/* Does the fetch collect, so that it has to know exactly why it skips an entry? */
bool
idem_fetchskip_collects(const IdemFetchWalk *walk)
{
	return walk->id != 0;
}

/* The walker is about to look at a follow-up job */
void
idem_fetchskip_announce_blocked(IdemFetchWalk *walk)
{
	if (!walk->announced_blocked)
		idem_skips_announce_blocked(walk->skips, walk->id);
	walk->announced_blocked = true;
}

/* The range that contains the position, or NULL */
const IdemSkipRange *
idem_fetchskip_find(const IdemFetchWalk *walk, const IdemPosition *position)
{
	for (int i = 0; i < walk->view.n; i++)
	{
		if (idem_skips_contains(&walk->view.ranges[i], position))
			return &walk->view.ranges[i];
	}
	return NULL;
}

/* J14: where the fetch continues behind this position: behind all ranges that begin there */
IdemPosition
idem_fetchskip_jump(IdemFetchWalk *walk, const IdemPosition *from)
{
	IdemPosition to = *from;

	for (int i = 0; i < walk->view.n; i++)
	{
		const IdemSkipRange *range = &walk->view.ranges[i];

		if (idem_skips_compare(&range->after, &to) <= 0 &&
			idem_skips_compare(&to, &range->upto) < 0)
		{
			to = range->upto;
			walk->until = Min(walk->until, range->until);
			walk->jumped_blocked |= range->has_blocked;
		}
	}
	if (idem_skips_compare(from, &to) == 0)
		return to;
	walk->has_jumped = true;
	if (walk->id != 0)
	{
		/* there is no entry between the last one that was skipped and the range */
		walk->run.upto = *from;
		publish_run(walk, &to, false);
	}
	walk->run.weight += JUMP_WEIGHT;
	return to;
}

/*
 * J14: the fetch skips the entries up to this position: their jobs cannot be fetched before the
 * time skip->until.
 *
 * A job whose row has moved has several entries at one position.  All of them must have been
 * seen before a range with the position is published, and if one of them belongs to this
 * transaction, the position does.  So a run is published before the next position is added,
 * not after the last one.
 */
void
idem_fetchskip_add(IdemFetchWalk *walk, const IdemPosition *upto, const IdemSkip *skip)
{
	bool is_empty = idem_skips_compare(&walk->run.after, &walk->run.upto) >= 0;
	bool is_same = idem_skips_compare(&walk->run.upto, upto) == 0;
	uint64 its_owner;

	walk->run.weight++;
	if (walk->id == 0)
		return;
	its_owner = skip->is_mine ? get_owner() : 0;
	if (is_same && its_owner == 0)
		its_owner = walk->run.owner;
	if (!is_empty &&
		(walk->run.owner != its_owner || (walk->run.weight > PUBLISH_AFTER && !is_same)))
	{
		IdemPosition next = is_same ? idem_skips_before(upto) : walk->run.upto;

		walk->run.upto = next;
		publish_run(walk, &next, false);
		walk->run.weight = 1;
	}
	walk->run.upto = *upto;
	walk->run.until = Min(walk->run.until, skip->until);
	walk->run.owner = its_owner;
	walk->run.has_blocked |= skip->is_blocked;
}

/* The fetch has read pages of the index that had only dead entries */
void
idem_fetchskip_add_pages(IdemFetchWalk *walk, int64 npages)
{
	walk->run.weight += (int) Min(npages, PG_INT16_MAX);
}

/*
 * J14: the fetch has taken the job at this position, or an open transaction holds it.  The run
 * ends before it.
 */
void
idem_fetchskip_stop(IdemFetchWalk *walk, const IdemPosition *position)
{
	if (walk->id != 0)
	{
		walk->run.upto = idem_skips_before(position);
		publish_run(walk, position, true);
	}
	else
		begin_run(walk, position);
}

/* The walk ends; at_end: there are no more entries, after many pages of dead ones if is_far */
void
idem_fetchskip_end(IdemFetchWalk *walk, bool at_end, bool is_far)
{
	if (walk->id == 0)
		return;
	if (at_end)
	{
		if (is_far)
			walk->run.upto = idem_last_position;
		(void) publish_seen(walk, &walk->run.upto, false);
	}
	idem_skips_release(walk->skips, walk->id);
	end_walker(walk);
}
