/*
 * row.c
 *		A row that was read: its columns, and which transactions hold it.
 *
 * Getters and setters of columns are inline functions in table.h.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/multixact.h"
#include "access/subtrans.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "storage/bufmgr.h"
#include "storage/procarray.h"

#include "table/table.h"

bool
idem_row_varlena_equals(TupleTableSlot *row, AttrNumber attno, struct varlena *value)
{
	NullableDatum stored = idem_row_datum(row, attno);
	struct varlena *other = stored.isnull ? NULL : PG_DETOAST_DATUM_PACKED(stored.value);

	return !stored.isnull &&
		VARSIZE_ANY_EXHDR(other) == VARSIZE_ANY_EXHDR(value) &&
		memcmp(VARDATA_ANY(other), VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value)) == 0;
}

static HeapTupleHeader
get_header(TupleTableSlot *row)
{
	return ExecFetchSlotHeapTuple(row, false, NULL)->t_data;
}

/*
 * A frozen row keeps its xmin, which may equal the xid of this transaction after a
 * wraparound.  So a frozen row does not count.
 */
static bool
is_inserted_by_me(HeapTupleHeader tuple)
{
	return !HeapTupleHeaderXminFrozen(tuple) &&
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetRawXmin(tuple));
}

/* The transaction that has inserted this version of the row; FrozenTransactionId: long ago */
TransactionId
idem_row_xmin(TupleTableSlot *row)
{
	return HeapTupleHeaderGetXmin(get_header(row));
}

/* Has this transaction inserted this version of the row (K1)? */
bool
idem_row_is_mine(TupleTableSlot *row)
{
	return is_inserted_by_me(get_header(row));
}

/* Does the row have an xmax, of a transaction that is open or not? */
bool
idem_row_is_locked(TupleTableSlot *row)
{
	return !(get_header(row)->t_infomask & HEAP_XMAX_INVALID);
}

/* What xmax does to the row, if it is a single transaction and not a multixact */
static MultiXactStatus
get_single_status(uint16 infomask, uint16 infomask2)
{
	bool keys = (infomask2 & HEAP_KEYS_UPDATED) != 0;

	if (!HEAP_XMAX_IS_LOCKED_ONLY(infomask))
		return keys ? MultiXactStatusUpdate : MultiXactStatusNoKeyUpdate;
	if (HEAP_XMAX_IS_EXCL_LOCKED(infomask))
		return keys ? MultiXactStatusForUpdate : MultiXactStatusForNoKeyUpdate;
	return HEAP_XMAX_IS_SHR_LOCKED(infomask) ? MultiXactStatusForShare : MultiXactStatusForKeyShare;
}

static void
note_locker(IdemLockers *lockers, TransactionId xid, MultiXactStatus status)
{
	if (TransactionIdIsCurrentTransactionId(xid))
		lockers->mine = true;
	else if (!TransactionIdIsInProgress(xid))
		return;
	else if (status == MultiXactStatusForUpdate || status == MultiXactStatusUpdate)
		lockers->exclusive = xid;
	else
		lockers->shared = xid;
}

/* The xmax of a row, with the bits that say what it means */
typedef struct Xmax
{
	TransactionId xid;
	uint16 infomask;
	uint16 infomask2;
} Xmax;

/* Read the xmax of the row; false if it has none that matters */
static bool
read_xmax(TupleTableSlot *row, Xmax *xmax)
{
	HeapTupleHeader tuple = get_header(row);
	Buffer buffer = ((BufferHeapTupleTableSlot *) row)->buffer;

	/* other backends may change these together, so read them together */
	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	xmax->xid = HeapTupleHeaderGetRawXmax(tuple);
	xmax->infomask = tuple->t_infomask;
	xmax->infomask2 = tuple->t_infomask2;
	LockBuffer(buffer, BUFFER_LOCK_UNLOCK);
	return !(xmax->infomask & HEAP_XMAX_INVALID) && !HEAP_LOCKED_UPGRADED(xmax->infomask);
}

/* Which open transactions have locked, updated or deleted the row? */
void
idem_row_lockers(TupleTableSlot *row, IdemLockers *lockers)
{
	Xmax xmax;
	MultiXactMember *members;
	int n;

	memset(lockers, 0, sizeof(*lockers));
	if (!read_xmax(row, &xmax))
		return;
	if (!(xmax.infomask & HEAP_XMAX_IS_MULTI))
	{
		note_locker(lockers, xmax.xid, get_single_status(xmax.infomask, xmax.infomask2));
		return;
	}
	n = GetMultiXactIdMembers(xmax.xid, &members, false, HEAP_XMAX_IS_LOCKED_ONLY(xmax.infomask));
	for (int i = 0; i < n; i++)
		note_locker(lockers, members[i].xid, members[i].status);
	if (n > 0)
		pfree(members);
}

/*
 * Add a transaction that has locked or changed a row to the list, if it is open.  A
 * subtransaction stands for its transaction.  The strongest of several locks of a
 * transaction counts.
 */
static void
add_lock(IdemRowLocks *locks, TransactionId xid, MultiXactStatus status)
{
	if (TransactionIdIsCurrentTransactionId(xid))
		xid = GetTopTransactionId();
	else if (TransactionIdIsInProgress(xid))
		xid = SubTransGetTopmostTransaction(xid);
	else
		return;
	for (int i = 0; i < locks->n; i++)
	{
		if (TransactionIdEquals(locks->locks[i].xid, xid))
		{
			locks->locks[i].status = Max(locks->locks[i].status, status);
			return;
		}
	}
	locks->locks[locks->n].xid = xid;
	locks->locks[locks->n++].status = status;
}

/*
 * Read the members of a multixact.  On a standby the server takes one that only locks for
 * one that has ended, because no backend there is a member: ask for its members as if it did
 * more.  Then one that has been removed is an error, so such ones are left out.
 */
static int
read_members(const Xmax *xmax, MultiXactMember **members)
{
	bool only_locks = HEAP_XMAX_IS_LOCKED_ONLY(xmax->infomask);
	MultiXactId oldest;
	MultiXactId next;

	if (only_locks && RecoveryInProgress())
	{
		ReadMultiXactIdRange(&oldest, &next);
		if (MultiXactIdPrecedes(xmax->xid, oldest))
			return 0;
		only_locks = false;
	}
	return GetMultiXactIdMembers(xmax->xid, members, false, only_locks);
}

/* Every open transaction that has locked, updated or deleted the row (H3) */
void
idem_row_list_locks(TupleTableSlot *row, IdemRowLocks *locks)
{
	Xmax xmax;
	MultiXactMember *members;
	int n;

	locks->n = 0;
	if (!read_xmax(row, &xmax))
		return;
	if (!(xmax.infomask & HEAP_XMAX_IS_MULTI))
	{
		locks->locks = palloc(sizeof(IdemRowLock));
		add_lock(locks, xmax.xid, get_single_status(xmax.infomask, xmax.infomask2));
		return;
	}
	n = read_members(&xmax, &members);
	locks->locks = palloc(Max(n, 1) * sizeof(IdemRowLock));
	for (int i = 0; i < n; i++)
		add_lock(locks, members[i].xid, members[i].status);
	if (n > 0)
		pfree(members);
}

/* An open transaction, other than this one, that has locked or changed the row; or invalid */
TransactionId
idem_row_locker(TupleTableSlot *row)
{
	IdemLockers lockers;

	idem_row_lockers(row, &lockers);
	return TransactionIdIsValid(lockers.exclusive) ? lockers.exclusive : lockers.shared;
}

static bool
is_replaced_by_me(HeapTupleHeader tuple)
{
	return !(tuple->t_infomask & HEAP_XMAX_INVALID) &&
		!HEAP_XMAX_IS_LOCKED_ONLY(tuple->t_infomask) &&
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetUpdateXid(tuple));
}

/* Has this transaction deleted or updated the row? */
bool
idem_row_is_replaced_by_me(TupleTableSlot *row)
{
	return is_replaced_by_me(get_header(row));
}

/*
 * Has this transaction inserted, updated or deleted a version of the row at this place?  The
 * caller keeps VACUUM from the entry of the index that points there.
 */
bool
idem_row_is_changed_by_me(IdemTable *table, ItemPointer tid)
{
	OffsetNumber offset = ItemPointerGetOffsetNumber(tid);
	bool changed = false;
	Buffer buffer;
	Page page;

	if (!TransactionIdIsValid(GetTopTransactionIdIfAny()))
		return false;
	buffer = ReadBuffer(table->heap, ItemPointerGetBlockNumber(tid));
	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	page = BufferGetPage(buffer);
	/* the versions that one entry of an index points to are on one page */
	while (!changed && offset <= PageGetMaxOffsetNumber(page))
	{
		ItemId item = PageGetItemId(page, offset);
		HeapTupleHeader tuple;

		if (ItemIdIsRedirected(item))
		{
			offset = ItemIdGetRedirect(item);
			continue;
		}
		if (!ItemIdIsNormal(item))
			break;
		tuple = (HeapTupleHeader) PageGetItem(page, item);
		changed = is_inserted_by_me(tuple) || is_replaced_by_me(tuple);
		if (!HeapTupleHeaderIsHotUpdated(tuple))
			break;
		offset = ItemPointerGetOffsetNumber(&tuple->t_ctid);
	}
	UnlockReleaseBuffer(buffer);
	return changed;
}

/* Has an update created this version of the row? */
bool
idem_row_is_later_version(TupleTableSlot *row)
{
	return (get_header(row)->t_infomask & HEAP_UPDATED) != 0;
}

/* Is there no later version?  Then xmax is deleting or locking the row, not updating it. */
bool
idem_row_is_last_version(TupleTableSlot *row)
{
	HeapTupleHeader tuple = get_header(row);

	return ItemPointerEquals(&tuple->t_ctid, &row->tts_tid);
}
