/*
 * keyhint.c
 *		Hint of this backend: the place of the row that its last claim wrote.
 *
 * A finish mostly follows the claim of the same key.  So finish and release look for
 * the row at that place first, which saves a scan of the index.  The place is only a hint: a
 * row of another key, or no row, may be there by now.  So the key in the row is
 * compared, and the state of the key is read from the row as always.
 */
#include "postgres.h"

#include "storage/bufmgr.h"
#include "utils/snapmgr.h"

#include "keys/keys.h"

static ItemPointerData last_claim;

void
idem_keyhint_set(ItemPointerData tid)
{
	last_claim = tid;
}

/*
 * Look for the row of this key at the remembered place.  If this returns true, the
 * row is the row found.  If not, the place is forgotten.  M2: a key of another shard raises
 * an error; its slot may have gone since the claim.
 */
bool
idem_keyhint_find(IdemTable *table, const IdemKey *key, IdemProbeResult *probe)
{
	SnapshotData dirty;

	idem_shard_check_key(key->scope, key->key);
	InitDirtySnapshot(dirty);
	memset(probe, 0, sizeof(*probe));
	if (ItemPointerIsValid(&last_claim) &&
		ItemPointerGetBlockNumber(&last_claim) < RelationGetNumberOfBlocks(table->heap) &&
		table_tuple_fetch_row_version(table->heap, &last_claim, &dirty, table->found) &&
		idem_keytable_has_key(table->found, key))
	{
		idem_probe_classify(&dirty, probe);
		probe->row = table->found;
	}
	/* do not try a wrong place again for each key of a batch */
	if (probe->found != IDEM_FOUND_ROW)
		ItemPointerSetInvalid(&last_claim);
	return probe->found == IDEM_FOUND_ROW;
}
