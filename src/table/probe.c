/*
 * probe.c
 *		Look a row up by its key, past the snapshot of the transaction.
 *
 * Rows are looked up with a dirty snapshot, which also shows what is not
 * committed.  It may miss a row that is being updated right now; who needs the
 * row that is there uses idem_probe_existing().
 */
#include "postgres.h"

#include "access/relscan.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"

#include "idem.h"

/* The caller ends the scan */
IndexScanDesc
idem_probe_begin(IdemTable *table, IdemLookup *lookup, Snapshot snapshot)
{
	IndexScanDesc scan = idem_compat_index_beginscan(table->heap, lookup->index, snapshot, lookup->nkeys);

	index_rescan(scan, lookup->keys, lookup->nkeys, NULL, 0);
	return scan;
}

/* What is to be thought of a row that a dirty snapshot has shown */
void
idem_probe_classify(const SnapshotData *dirty, IdemProbe *probe)
{
	if (TransactionIdIsValid(dirty->xmin))
	{
		probe->found = IDEM_FOUND_OPEN;
		probe->xwait = dirty->xmin;
	}
	else
	{
		probe->found = IDEM_FOUND_ROW;
		probe->xwait = dirty->xmax;
	}
}

/*
 * Look at the row.  An open one is not the last word: beside it may be the
 * committed one that its transaction has removed.
 */
void
idem_probe(IdemTable *table, IdemLookup *lookup, IdemProbe *probe)
{
	SnapshotData dirty;
	IndexScanDesc scan;

	InitDirtySnapshot(dirty);
	memset(probe, 0, sizeof(*probe));
	scan = idem_probe_begin(table, lookup, &dirty);
	while (probe->found != IDEM_FOUND_ROW &&
		   index_getnext_slot(scan, ForwardScanDirection, table->found))
		idem_probe_classify(&dirty, probe);
	index_endscan(scan);
}

/* Is there a row in a snapshot taken now?  The first one is in the slot. */
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
 * Look at a row that is thought to exist: what was missed because it was just
 * being updated is looked for again.
 */
void
idem_probe_existing(IdemTable *table, IdemLookup *lookup, IdemProbe *probe)
{
	do
	{
		CHECK_FOR_INTERRUPTS();
		idem_probe(table, lookup, probe);
	} while (probe->found != IDEM_FOUND_ROW &&
			 idem_probe_latest(table, lookup, table->found) && !idem_row_is_replaced_by_me(table));
}

/* Wait for a transaction in the way, as long as lock_timeout allows */
void
idem_probe_wait(IdemTable *table, TransactionId xid)
{
	/* VACUUM shall not wait for the page as long as we do */
	ExecClearTuple(table->found);
	XactLockTableWait(xid, NULL, NULL, XLTW_None);
}
