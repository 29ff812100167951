/*
 * keyskips.c
 *		Places of ended jobs of a key, which no enqueue of the key needs to look at (J14).
 *
 * Entries of jobs that have ended stay in the index on the hash of the key until VACUUM, and
 * longer while a transaction holds an old snapshot.  An enqueue that has passed many of
 * them publishes from which place in the table to which one all of them were of rows that
 * have ended: those stay ended.  A transaction that inserts an entry of the hash there
 * drops this again.  doc/jobs-protocol.md has the protocol.
 *
 * A backend that reads, publishes or drops the places of a hash holds the lock on the hash.  The
 * spinlock only protects against backends that do the same for another hash.
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "shmem/shmem.h"

/* The places of the hash, or NULL; the caller holds the spinlock */
static IdemKeySkip *
find_skip(IdemSkips *skips, int64 key_hash)
{
	for (int i = 0; i < IDEM_MAX_KEY_SKIPS; i++)
	{
		if (skips->keys[i].n > 0 && skips->keys[i].key_hash == key_hash)
			return &skips->keys[i];
	}
	return NULL;
}

/* Places are used for as long as ranges are (J14): rows may bypass the library */
static bool
is_old(const IdemKeySkip *skip, int64 steady)
{
	return steady - skip->looked_at >= idem_skips_life(skip->cost) || steady < skip->looked_at;
}

/* Get the places that an enqueue of the hash skips; false: none.  storage: of the table. */
bool
idem_keyskips_get(IdemSkips *skips, int64 key_hash, Oid storage, int64 steady, IdemKeySkip *skip)
{
	const IdemKeySkip *found;
	bool is_good;

	if (likely(pg_atomic_read_u32(&skips->nkeys) == 0))
		return false;
	SpinLockAcquire(&skips->lock);
	found = find_skip(skips, key_hash);
	is_good = found != NULL && found->storage == storage && !is_old(found, steady);
	if (is_good)
		*skip = *found;
	SpinLockRelease(&skips->lock);
	return is_good;
}

/* Publish places; those of another hash give way if they are old or fewer */
void
idem_keyskips_publish(IdemSkips *skips, const IdemKeySkip *skip, int64 steady)
{
	IdemKeySkip *slot;

	SpinLockAcquire(&skips->lock);
	slot = find_skip(skips, skip->key_hash);
	for (int i = 0; i < IDEM_MAX_KEY_SKIPS && slot == NULL; i++)
	{
		if (skips->keys[i].n == 0 || is_old(&skips->keys[i], steady))
			slot = &skips->keys[i];
	}
	for (int i = 0; i < IDEM_MAX_KEY_SKIPS && slot == NULL; i++)
	{
		if (skips->keys[i].n < skip->n)
			slot = &skips->keys[i];
	}
	if (slot != NULL)
		*slot = *skip;
	pg_atomic_write_u32(&skips->nkeys, 1);
	SpinLockRelease(&skips->lock);
}

/* J14: an entry of the hash has come, at this place */
void
idem_keyskips_note(IdemSkips *skips, int64 key_hash, ItemPointer place)
{
	IdemKeySkip *skip;

	if (likely(pg_atomic_read_u32(&skips->nkeys) == 0))
		return;
	SpinLockAcquire(&skips->lock);
	skip = find_skip(skips, key_hash);
	if (skip != NULL && idem_keyskips_contains(skip, place))
		skip->n = 0;
	SpinLockRelease(&skips->lock);
}

bool
idem_keyskips_contains(const IdemKeySkip *skip, ItemPointer place)
{
	ItemPointerData first = skip->first;
	ItemPointerData last = skip->last;

	return ItemPointerCompare(&first, place) <= 0 && ItemPointerCompare(place, &last) <= 0;
}
