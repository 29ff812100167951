/*
 * row.c
 *		A row that was read: its columns, and which transactions hold it.
 *
 * Getters and setters of columns are inline functions in table.h.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/subtrans.h"
#include "access/xact.h"
#include "access/xlog.h"

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

/*
 * List the transactions that have locked, updated or deleted the row, open or not; returns their
 * number.  *members is the single one, or is palloc'd.
 */
static int
read_members(TupleTableSlot *row, MultiXactMember *single, MultiXactMember **members)
{
	HeapTupleHeader tuple = get_header(row);
	Buffer buffer = ((BufferHeapTupleTableSlot *) row)->buffer;
	TransactionId xmax;
	uint16 infomask;
	bool only_locks;

	/* other backends may change these together, so read them together */
	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	xmax = HeapTupleHeaderGetRawXmax(tuple);
	infomask = tuple->t_infomask;
	single->status = get_single_status(infomask, tuple->t_infomask2);
	LockBuffer(buffer, BUFFER_LOCK_UNLOCK);
	if ((infomask & HEAP_XMAX_INVALID) || HEAP_LOCKED_UPGRADED(infomask))
		return 0;
	if (!(infomask & HEAP_XMAX_IS_MULTI))
	{
		single->xid = xmax;
		*members = single;
		return 1;
	}

	/*
	 * On a standby the server takes a multixact that only locks for one that has ended, because no
	 * backend there is a member: ask for its members as if it did more.  Then one that has been
	 * removed is an error, so such ones are left out.
	 */
	only_locks = HEAP_XMAX_IS_LOCKED_ONLY(infomask);
	if (only_locks && RecoveryInProgress())
	{
		MultiXactId oldest;
		MultiXactId next;

		ReadMultiXactIdRange(&oldest, &next);
		if (MultiXactIdPrecedes(xmax, oldest))
			return 0;
		only_locks = false;
	}
	return GetMultiXactIdMembers(xmax, members, false, only_locks);
}

/* Which open transactions have locked, updated or deleted the row? */
void
idem_row_lockers(TupleTableSlot *row, IdemLockers *lockers)
{
	MultiXactMember single;
	MultiXactMember *members;
	int n = read_members(row, &single, &members);

	memset(lockers, 0, sizeof(*lockers));
	for (int i = 0; i < n; i++)
	{
		TransactionId xid = members[i].xid;
		MultiXactStatus status = members[i].status;

		if (TransactionIdIsCurrentTransactionId(xid))
			lockers->mine = true;
		else if (!TransactionIdIsInProgress(xid))
			continue;
		else if (status == MultiXactStatusForUpdate || status == MultiXactStatusUpdate)
			lockers->exclusive = xid;
		else
			lockers->shared = xid;
	}
	if (n > 0 && members != &single)
		pfree(members);
}

/*
 * Every open transaction that has locked, updated or deleted the row (H3).  A subtransaction
 * stands for its transaction.  The strongest of several locks of a transaction counts.
 */
void
idem_row_list_locks(TupleTableSlot *row, IdemRowLocks *locks)
{
	MultiXactMember single;
	MultiXactMember *members;
	int n = read_members(row, &single, &members);

	locks->n = 0;
	locks->locks = palloc(Max(n, 1) * sizeof(IdemRowLock));
	for (int i = 0; i < n; i++)
	{
		TransactionId xid = members[i].xid;
		int j = 0;

		if (TransactionIdIsCurrentTransactionId(xid))
			xid = GetTopTransactionId();
		else if (TransactionIdIsInProgress(xid))
			xid = SubTransGetTopmostTransaction(xid);
		else
			continue;
		while (j < locks->n && !TransactionIdEquals(locks->locks[j].xid, xid))
			j++;
		if (j == locks->n)
			locks->locks[locks->n++] = (IdemRowLock){.xid = xid, .status = members[i].status};
		else
			locks->locks[j].status = Max(locks->locks[j].status, members[i].status);
	}
	if (n > 0 && members != &single)
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
