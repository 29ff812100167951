/*
 * row.c
 *		A row of one of our tables: its columns, and whose it is.
 *
 * The row read is always the one in the slot "found" of the table, the row
 * written the one in the slot "written".
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/multixact.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "storage/bufmgr.h"
#include "storage/procarray.h"
#include "utils/timestamp.h"

#include "idem.h"

/* A short row has not all columns: slot_getattr() gives null for them */
static Datum
get_column(IdemTable *table, AttrNumber attno, bool *isnull)
{
	return slot_getattr(table->found, attno, isnull);
}

bool
idem_row_isnull(IdemTable *table, AttrNumber attno)
{
	bool isnull;

	(void) get_column(table, attno, &isnull);
	return isnull;
}

/* 0 stands for null in these */
TimestampTz
idem_row_timestamp(IdemTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? 0 : DatumGetTimestampTz(value);
}

int
idem_row_int32(IdemTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? 0 : DatumGetInt32(value);
}

int64
idem_row_int64(IdemTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? 0 : DatumGetInt64(value);
}

bool
idem_row_bool(IdemTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return !isnull && DatumGetBool(value);
}

Oid
idem_row_oid(IdemTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? InvalidOid : DatumGetObjectId(value);
}

/* NULL stands for null in these; they are copies in the caller's context */
text *
idem_row_text(IdemTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? NULL : DatumGetTextPCopy(value);
}

Jsonb *
idem_row_jsonb(IdemTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? NULL : DatumGetJsonbPCopy(value);
}

/* As it is stored, so it may be elsewhere; to be used before the row goes */
NullableDatum
idem_row_datum(IdemTable *table, AttrNumber attno)
{
	NullableDatum column;

	column.value = get_column(table, attno, &column.isnull);
	return column;
}

bool
idem_row_varlena_equals(IdemTable *table, AttrNumber attno, struct varlena *value)
{
	bool isnull;
	Datum stored = get_column(table, attno, &isnull);
	struct varlena *other = isnull ? NULL : PG_DETOAST_DATUM_PACKED(stored);

	return !isnull &&
		VARSIZE_ANY_EXHDR(other) == VARSIZE_ANY_EXHDR(value) &&
		memcmp(VARDATA_ANY(other), VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value)) == 0;
}

/* Seconds since the time in that column */
int64
idem_row_age(IdemTable *table, AttrNumber since)
{
	int64 age = idem_clock_now() - idem_row_timestamp(table, since);

	return Max(age, 0) / USECS_PER_SEC;
}

static HeapTupleHeader
row_header(IdemTable *table)
{
	return ExecFetchSlotHeapTuple(table->found, false, NULL)->t_data;
}

/*
 * Was the row made by this transaction?  One that is frozen was not, although
 * it keeps its xmin, which may be in use again.
 */
bool
idem_row_is_mine(IdemTable *table)
{
	HeapTupleHeader tuple = row_header(table);

	return !HeapTupleHeaderXminFrozen(tuple) &&
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetRawXmin(tuple));
}

/* Has somebody locked the row, or had it locked? */
bool
idem_row_is_locked(IdemTable *table)
{
	return !(row_header(table)->t_infomask & HEAP_XMAX_INVALID);
}

/* What a transaction does to the row that is its xmax alone */
static MultiXactStatus
single_status(uint16 infomask, uint16 infomask2)
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

/* Who has locked, replaced or removed the row found, and is open? */
void
idem_row_lockers(IdemTable *table, IdemLockers *lockers)
{
	HeapTupleHeader tuple = row_header(table);
	Buffer buffer = ((BufferHeapTupleTableSlot *) table->found)->buffer;
	TransactionId xmax;
	uint16 infomask;
	uint16 infomask2;
	MultiXactMember *members;
	int n;

	memset(lockers, 0, sizeof(*lockers));
	/* others may be changing these, and they belong together */
	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	xmax = HeapTupleHeaderGetRawXmax(tuple);
	infomask = tuple->t_infomask;
	infomask2 = tuple->t_infomask2;
	LockBuffer(buffer, BUFFER_LOCK_UNLOCK);

	if ((infomask & HEAP_XMAX_INVALID) || HEAP_LOCKED_UPGRADED(infomask))
		return;
	if (!(infomask & HEAP_XMAX_IS_MULTI))
	{
		note_locker(lockers, xmax, single_status(infomask, infomask2));
		return;
	}
	n = GetMultiXactIdMembers(xmax, &members, false, HEAP_XMAX_IS_LOCKED_ONLY(infomask));
	for (int i = 0; i < n; i++)
		note_locker(lockers, members[i].xid, members[i].status);
	if (n > 0)
		pfree(members);
}

/* Any one of them but this transaction; invalid: none */
TransactionId
idem_row_locker(IdemTable *table)
{
	IdemLockers lockers;

	idem_row_lockers(table, &lockers);
	return TransactionIdIsValid(lockers.exclusive) ? lockers.exclusive : lockers.shared;
}

/* Has this transaction removed the row, or put another version in its place? */
bool
idem_row_is_replaced_by_me(IdemTable *table)
{
	HeapTupleHeader tuple = row_header(table);

	return !(tuple->t_infomask & HEAP_XMAX_INVALID) &&
		!HEAP_XMAX_IS_LOCKED_ONLY(tuple->t_infomask) &&
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetUpdateXid(tuple));
}

/* Is it a later version of a row, and not the one that was inserted? */
bool
idem_row_is_later_version(IdemTable *table)
{
	return (row_header(table)->t_infomask & HEAP_UPDATED) != 0;
}

/* Is there no later version?  Then whoever is at the row is removing or only locking it. */
bool
idem_row_is_last_version(IdemTable *table)
{
	HeapTupleHeader tuple = row_header(table);

	return ItemPointerEquals(&tuple->t_ctid, &table->found->tts_tid);
}

void
idem_row_set(TupleTableSlot *slot, AttrNumber attno, Datum value)
{
	slot->tts_values[attno - 1] = value;
	slot->tts_isnull[attno - 1] = false;
}

void
idem_row_clear(TupleTableSlot *slot, AttrNumber attno)
{
	slot->tts_isnull[attno - 1] = true;
}

/* The same for what may be missing */
void
idem_row_set_varlena(TupleTableSlot *slot, AttrNumber attno, const void *value)
{
	if (value != NULL)
		idem_row_set(slot, attno, PointerGetDatum(value));
	else
		idem_row_clear(slot, attno);
}

/* Take over a column of the row found in a table, unless it is null */
void
idem_row_copy_column(IdemTable *from, AttrNumber attno, TupleTableSlot *to, AttrNumber to_attno)
{
	NullableDatum column = idem_row_datum(from, attno);

	if (!column.isnull)
		idem_row_set(to, to_attno, column.value);
}

/* The row to be written: what was found, to be changed before it is stored */
TupleTableSlot *
idem_row_copy(IdemTable *table, bool full)
{
	TupleTableSlot *slot = idem_table_new_row(table, full);
	int natts = slot->tts_tupleDescriptor->natts;

	slot_getallattrs(table->found);
	memcpy(slot->tts_values, table->found->tts_values, natts * sizeof(Datum));
	memcpy(slot->tts_isnull, table->found->tts_isnull, natts * sizeof(bool));
	return slot;
}
