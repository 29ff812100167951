/*
 * probe.c
 *		Look a row up by its key: the latest state, not that of the snapshot.
 *
 * A dirty snapshot also shows rows that are not committed.  It may miss a row that
 * another transaction is updating at this moment.  A caller that must not miss an
 * existing row uses idem_probe_latest() or idem_probe_existing(), or holds the lock on the
 * hash of the key.
 */
#include "postgres.h"

#include "access/stratnum.h"
#include "access/xact.h"
#include "utils/snapmgr.h"

#include "table/table.h"

/* Begin a scan of the rows that match; the caller ends it */
IndexScanDesc
idem_probe_begin(IdemTable *table, IdemLookup *lookup, Snapshot snapshot)
{
	IndexScanDesc scan = index_beginscan(table->heap, lookup->index, snapshot, NULL, 1, 0, SO_NONE);
	ScanKeyData key;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, lookup->equal, lookup->value);
	index_rescan(scan, &key, 1, NULL, 0);
	return scan;
}

/* Begin a walk over the rows that match; the caller ends it */
void
idem_probe_walk(IdemLeafWalk *walk, IdemTable *table, const IdemLookup *lookup, Snapshot snapshot)
{
	idem_leaf_begin(walk, table, lookup->index, snapshot,
					&(IdemLeafStart){.values = &lookup->value, .n = 1, .nequal = 1});
	if (lookup->row != NULL)
		walk->row = lookup->row;
}

static bool
has_looked_up_key(TupleTableSlot *row, IdemLookup *lookup)
{
	return lookup->matches == NULL || lookup->matches(row, lookup);
}

/* Classify a row returned by a dirty snapshot */
void
idem_probe_classify(const SnapshotData *dirty, TupleTableSlot *row, IdemProbeResult *result)
{
	result->row = row;
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
 * Look the row up.  After an uncommitted row the walk goes on: its transaction
 * may have deleted a committed row of the same key.
 */
void
idem_probe(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result)
{
	SnapshotData dirty;
	IdemLeafWalk walk;

	InitDirtySnapshot(dirty);
	memset(result, 0, sizeof(*result));
	lookup->others = 0;
	idem_probe_walk(&walk, table, lookup, &dirty);
	while (result->found != IDEM_FOUND_ROW && idem_leaf_next_row(&walk))
	{
		if (has_looked_up_key(walk.row, lookup))
			idem_probe_classify(&dirty, walk.row, result);
	}
	result->nentries = walk.nentries;
	idem_leaf_end(&walk);
}

/*
 * Does the snapshot show a row?  Without one that this
 * transaction has replaced or deleted in the same command.
 */
bool
idem_probe_shows(IdemTable *table, IdemLookup *lookup, Snapshot snapshot)
{
	IdemLeafWalk walk;
	bool found;

	idem_probe_walk(&walk, table, lookup, snapshot);
	do
	{
		found = idem_leaf_next_row(&walk);
	} while (found && !has_looked_up_key(walk.row, lookup));
	idem_leaf_end(&walk);
	return found && !idem_row_is_replaced_by_me(walk.row);
}

/*
 * Copy the version that another open transaction has inserted, if there is one, else clear the slot
 */
void
idem_probe_find_open(IdemTable *table, IdemLookup *lookup, TupleTableSlot *open)
{
	SnapshotData dirty;
	IdemLeafWalk walk;

	ExecClearTuple(open);
	InitDirtySnapshot(dirty);
	idem_probe_walk(&walk, table, lookup, &dirty);
	while (TTS_EMPTY(open) && idem_leaf_next_row(&walk))
	{
		if (TransactionIdIsValid(dirty.xmin) && has_looked_up_key(walk.row, lookup))
			ExecCopySlot(open, walk.row);
	}
	idem_leaf_end(&walk);
}

/*
 * Look the row up and do not miss it.  If a snapshot taken now shows a row that the probe has
 * missed, because of an update at that moment, probe again.
 */
void
idem_probe_latest(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result)
{
	bool was_missed = true;

	while (was_missed)
	{
		CHECK_FOR_INTERRUPTS();
		idem_probe(table, lookup, result);
		was_missed = result->found != IDEM_FOUND_ROW;
		if (was_missed)
		{
			Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());

			was_missed = idem_probe_shows(table, lookup, snapshot);
			UnregisterSnapshot(snapshot);
		}
	}
}

/*
 * Under SERIALIZABLE, an answer that there is no row is a read (K10).  An index scan with the
 * snapshot tells SSI so: it locks the page of the index where the row would be, and a row that
 * the caller counts as absent.
 */
void
idem_probe_note_absent(IdemTable *table, IdemLookup *lookup)
{
	IndexScanDesc scan;

	if (!IsolationIsSerializable())
		return;
	scan = idem_probe_begin(table, lookup, GetTransactionSnapshot());
	while (index_getnext_slot(scan, ForwardScanDirection, idem_table_row(table)))
		CHECK_FOR_INTERRUPTS();
	index_endscan(scan);
}

/* The same for a caller that inserts no such row: that there is none is its answer */
void
idem_probe_existing(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result)
{
	idem_probe_latest(table, lookup, result);
	if (result->found == IDEM_FOUND_NONE)
		idem_probe_note_absent(table, lookup);
}

/* Wait for the end of a transaction, as long as lock_timeout allows (K5, J6) */
void
idem_probe_wait(IdemTable *table, TransactionId xid)
{
	/* a pin on the page would make VACUUM wait as long as we do */
	ExecClearTuple(idem_table_row(table));
	XactLockTableWait(xid, NULL, NULL, XLTW_None);
}
