/*
 * fetchhint.c
 *		Cache of this backend: positions in the index at which a fetch starts.
 *
 * fetchstore.c sets and uses the hints.  A hint says only where to start in the
 * index; the row of a job says whether it is due.  Any queue may use any slot, and
 * the hint that expires first is replaced.  So fetches from a few other queues do
 * not remove the hints of a queue.
 */
#include "postgres.h"

#include "jobs/jobs.h"

static IdemFetchHint hints[64];

/*
 * The hint of the queue with the least priority that is greater than above, or
 * NULL.  now is the time by the steady clock.
 */
const IdemFetchHint *
idem_fetchhint_find(uint64 queue_hash, int64 above, int64 now)
{
	const IdemFetchHint *found = NULL;

	for (int i = 0; i < (int) lengthof(hints); i++)
	{
		if (hints[i].good_until > now && hints[i].queue_hash == queue_hash &&
			hints[i].priority > above && (found == NULL || hints[i].priority < found->priority))
			found = &hints[i];
	}
	return found;
}

/* The slot for a priority of a queue: the slot that it has, else the one that expires first */
static IdemFetchHint *
choose_slot(uint64 queue_hash, int priority)
{
	IdemFetchHint *slot = &hints[0];

	for (int i = 0; i < (int) lengthof(hints); i++)
	{
		if (hints[i].queue_hash == queue_hash && hints[i].priority == priority &&
			hints[i].good_until != 0)
			return &hints[i];
		if (hints[i].good_until < slot->good_until)
			slot = &hints[i];
	}
	return slot;
}

void
idem_fetchhint_set(const IdemFetchHint *hint)
{
	*choose_slot(hint->queue_hash, hint->priority) = *hint;
}
