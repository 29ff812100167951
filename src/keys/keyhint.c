/*
 * keyhint.c
 *		Where the last claim of this backend has written its row.
 *
 * A finish mostly follows the claim of the same key, so the row is tried at that
 * place first, which saves the descent of the index.  This is a hint only: the
 * key is compared on the row, and what the row means is read off the row.
 */
#include "postgres.h"

#include "executor/executor.h"
#include "storage/bufmgr.h"
#include "utils/snapmgr.h"

#include "keys/keys.h"

static ItemPointerData last_claim;

void
idem_keyhint_set(ItemPointerData tid)
{
	last_claim = tid;
}

/* Is it the row of this key? */
static bool
is_row_of_key(IdemTable *table, const IdemKey *key)
{
	return idem_row_varlena_equals(table, IDEM_KEYS_KEY, key->key) &&
		idem_row_varlena_equals(table, IDEM_KEYS_SCOPE, key->scope);
}

/* Is the row of this key at the remembered place?  Then it is the row found. */
bool
idem_keyhint_find(IdemTable *table, const IdemKey *key, IdemProbeResult *probe)
{
	SnapshotData dirty;

	InitDirtySnapshot(dirty);
	memset(probe, 0, sizeof(*probe));
	if (ItemPointerIsValid(&last_claim) &&
		ItemPointerGetBlockNumber(&last_claim) < RelationGetNumberOfBlocks(table->heap) &&
		table_tuple_fetch_row_version(table->heap, &last_claim, &dirty, table->found) &&
		is_row_of_key(table, key))
		idem_probe_classify(&dirty, probe);
	/* do not try the same place again for each key of a batch */
	if (probe->found != IDEM_FOUND_ROW)
		ItemPointerSetInvalid(&last_claim);
	return probe->found == IDEM_FOUND_ROW;
}
