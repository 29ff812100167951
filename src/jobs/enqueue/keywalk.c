/*
 * keywalk.c
 *		Walk over the jobs of a key for an enqueue, past those that have ended.
 *
 * Index entries of jobs that have ended stay until VACUUM, and longer while a transaction holds
 * an old snapshot.  A walk that has passed many of them publishes their places, and later
 * walks jump over these (J14): shmem/keyskips.c.
 */
#include "postgres.h"

#include "utils/snapmgr.h"

#include "jobs/enqueue/enqueue.h"

/* Publish only so many entries, and only if so many are new */
#define MANY_ENDED 32

/* Begin to walk over the jobs of the key; the caller holds the lock on its hash */
void
idem_keywalk_begin(IdemKeyWalk *walk, IdemTable *jobs, Relation index,
				   const IdemKeyedEnqueue *keyed, SnapshotData *dirty)
{
	IdemLookup lookup = idem_jobtable_by_key(jobs, index, keyed->key_hash);
	IdemQueueRef *ref = idem_queueref_get(keyed->enqueue->queue.name);

	walk->jobs = jobs;
	walk->skips = idem_queueref_pin(ref) ? ref->entry.skips : NULL;
	memset(&walk->run, 0, sizeof(walk->run));
	walk->run.key_hash = keyed->key_hash;
	walk->run.storage = jobs->heap->rd_rel->relfilenode;
	walk->most = walk->run;
	walk->began = idem_clock_steady();
	walk->has_known = walk->skips != NULL &&
		idem_keyskips_get(walk->skips, keyed->key_hash, walk->run.storage, walk->began,
						  &walk->known);
	InitDirtySnapshot(*dirty);
	idem_probe_walk(&walk->leaf, jobs, &lookup, dirty);
}

/* The walk has passed entries of ended jobs, from one place to another */
static void
add_ended(IdemKeyWalk *walk, const ItemPointerData *first, const ItemPointerData *last, int n,
		  int64 looked_at)
{
	IdemKeySkip *run = &walk->run;

	if (run->n == 0)
	{
		run->first = *first;
		run->looked_at = looked_at;
	}
	run->last = *last;
	run->n += Min(n, PG_INT32_MAX - run->n);
	run->looked_at = Min(run->looked_at, looked_at);
	if (run->n > walk->most.n)
		walk->most = *run;
}

/* Read the row of the entry; false if it has ended.  A rollback may bring back what is mine. */
static bool
read_row(IdemKeyWalk *walk)
{
	ItemPointer place = &walk->leaf.entry.tuple.t_tid;
	bool first = !walk->leaf.again;
	bool found = idem_leaf_fetch(&walk->leaf);

	if (found || walk->skips == NULL)
		walk->run.n = 0;
	else if (first && idem_row_is_changed_by_me(walk->jobs, place))
		walk->run.n = 0;
	else if (first)
		add_ended(walk, place, place, 1, walk->began);
	return found;
}

/* Go to the next row version that is not ended; false: there is none */
bool
idem_keywalk_next(IdemKeyWalk *walk)
{
	while (walk->leaf.again || idem_leaf_next(&walk->leaf))
	{
		const IdemKeySkip *known = &walk->known;

		if (!walk->leaf.again && walk->has_known &&
			idem_keyskips_contains(known, &walk->leaf.entry.tuple.t_tid))
		{
			add_ended(walk, &known->first, &known->last, known->n, known->looked_at);
			idem_leaf_skip(&walk->leaf, &known->last);
		}
		else if (read_row(walk))
			return true;
	}
	return false;
}

/* J14: publish the places of many ended jobs */
void
idem_keywalk_end(IdemKeyWalk *walk)
{
	int64 cost = walk->has_known ? walk->known.cost : 0;

	idem_leaf_end(&walk->leaf);
	if (walk->most.n < (walk->has_known ? walk->known.n : 0) + MANY_ENDED)
		return;
	cost += Max(idem_clock_steady() - walk->began, 0);
	walk->most.cost = Min(cost, PG_INT32_MAX);
	idem_keyskips_publish(walk->skips, &walk->most, walk->began);
}
