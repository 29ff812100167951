/*
 * probe.c
 *		Look a row up by its key: the latest state, not that of the snapshot.
 *
 * A dirty snapshot also shows rows that are not committed.  It may miss a row that
 * another transaction is updating at this moment.  A caller that must not miss an
 * existing row uses idem_probe_existing(), or holds the lock on the hash of the key.
 */
#include "postgres.h"

#include "access/genam.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"

#include "table/table.h"

/* Begin a scan of the rows that match; the caller ends it */
IndexScanDesc
idem_probe_begin(IdemTable *table, IdemLookup *lookup, Snapshot snapshot)
{
	IndexScanDesc scan =
		idem_compat_index_beginscan(table->heap, lookup->index, snapshot, lookup->nkeys);

	index_rescan(scan, lookup->keys, lookup->nkeys, NULL, 0);
	return scan;
}

/* Classify a row returned by a dirty snapshot */
void
idem_probe_classify(const SnapshotData *dirty, IdemProbeResult *result)
{
	if (TransactionIdIsValid(dirty->xmin))
	{
		result->found = IDEM_FOUND_OPEN;
		result->xwait = dirty->xmin;
	}
	else
	{
		result->found = IDEM_FOUND_ROW;
		result->xwait = dirty->xmax;
	}
}

/*
 * Look the row up.  After an uncommitted row the scan goes on: its transaction
 * may have deleted a committed row of the same key.
 */
void
idem_probe(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result)
{
	SnapshotData dirty;
	IndexScanDesc scan;

	InitDirtySnapshot(dirty);
	memset(result, 0, sizeof(*result));
	scan = idem_probe_begin(table, lookup, &dirty);
	while (result->found != IDEM_FOUND_ROW &&
		   index_getnext_slot(scan, ForwardScanDirection, table->found))
		idem_probe_classify(&dirty, result);
	index_endscan(scan);
}

/* Does a snapshot taken now show a row?  The first one is in the slot. */
bool
idem_probe_latest(IdemTable *table, IdemLookup *lookup, TupleTableSlot *slot)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan = idem_probe_begin(table, lookup, snapshot);
	bool found = index_getnext_slot(scan, ForwardScanDirection, slot);

	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return found;
}

/*
 * Look up a row that probably exists.  If a snapshot taken now shows a row that
 * the probe has missed, because of an update at that moment, probe again.
 */
void
idem_probe_existing(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result)
{
	do
	{
		CHECK_FOR_INTERRUPTS();
		idem_probe(table, lookup, result);
	} while (result->found != IDEM_FOUND_ROW &&
			 idem_probe_latest(table, lookup, table->found) && !idem_row_is_replaced_by_me(table));
}

/* Wait for the end of a transaction, as long as lock_timeout allows (K5, J6) */
void
idem_probe_wait(IdemTable *table, TransactionId xid)
{
	/* a pin on the page would make VACUUM wait as long as we do */
	ExecClearTuple(table->found);
	XactLockTableWait(xid, NULL, NULL, XLTW_None);
}
