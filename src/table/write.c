/*
 * write.c
 *		Write rows of the tables of idem: insert, update, delete.
 *
 * The caller fills the row that idem_write_new_row() or idem_write_copy_row()
 * returns.  Every write is followed by CommandCounterIncrement(), so several
 * idem functions in one statement see the writes of one another.
 *
 * A batch writes many new rows in three steps:
 * - idem_write_add() adds the row that the caller has filled;
 * - idem_write_rows() inserts the rows added, and their entries in the indexes that
 *   begin with a given column.  The caller calls it under the locks on the hashes of the
 *   rows, so that other transactions that look for these hashes find the rows.  It passes
 *   the column of the hash: if REINDEX CONCURRENTLY builds a copy of the index, another
 *   transaction may look into either of them.
 * - idem_write_other_entries() inserts the entries in the other indexes, later and for more
 *   rows at once, in the order of "ord".  This is safe because the rows belong to this
 *   open transaction: others look for them by their hash only, and this transaction
 *   must not look for them, or change them, before.
 */
#include "postgres.h"

#include "access/heaptoast.h"
#include "access/htup_details.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/datum.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "point.h"
#include "table/table.h"

/* Start a row of nulls to be filled and written */
TupleTableSlot *
idem_write_new_row(IdemTable *table)
{
	int natts = table->def->natts;
	TupleTableSlot *new = idem_table_row_slot(table, natts);

	ExecClearTuple(new);
	memset(new->tts_isnull, true, natts * sizeof(bool));
	return new;
}

/* Start a row to be written as a copy of this one, which must stay in its slot until then */
TupleTableSlot *
idem_write_copy_row(IdemTable *table, TupleTableSlot *row)
{
	TupleTableSlot *new = idem_write_new_row(table);
	int natts = table->def->natts;

	slot_getallattrs(row);
	memcpy(new->tts_values, row->tts_values, natts * sizeof(Datum));
	memcpy(new->tts_isnull, row->tts_isnull, natts * sizeof(bool));
	return new;
}

/*
 * The slot for the row that the caller has filled.  The row ends after its last column
 * that is not null, as if the others had been added to the table later.  A row without
 * nulls before that column needs no null bitmap, which saves eight bytes in the row
 * and in its WAL record.
 */
static TupleTableSlot *
trim_row(IdemTable *table, TupleTableSlot *filled)
{
	int natts = table->def->natts;
	TupleTableSlot *slot;

	while (natts > 1 && filled->tts_isnull[natts - 1])
		natts--;
	slot = idem_table_row_slot(table, natts);
	if (slot != filled)
	{
		ExecClearTuple(slot);
		memcpy(slot->tts_values, filled->tts_values, natts * sizeof(Datum));
		memcpy(slot->tts_isnull, filled->tts_isnull, natts * sizeof(bool));
	}
	return slot;
}

/* The row to be written is filled: store it, in the slot that is returned */
static TupleTableSlot *
store_row(IdemTable *table, TupleTableSlot *filled)
{
	TupleTableSlot *stored = trim_row(table, filled);

	/* after a conflict of an insert, the caller may come back with the same row */
	if (TTS_EMPTY(stored))
		ExecStoreVirtualTuple(stored);
	return stored;
}

/* A column of a row to be written; a short row ends before some columns, which are null */
static NullableDatum
get_column(TupleTableSlot *slot, AttrNumber attno)
{
	NullableDatum column = {.isnull = true};

	if (attno <= slot->tts_tupleDescriptor->natts)
		column.value = slot_getattr(slot, attno, &column.isnull);
	return column;
}

/* Insert the entry of a row into one index; false if the key may exist already */
static bool
insert_index_entry(IdemTable *table, int i, TupleTableSlot *slot, IndexUniqueCheck check,
				   bool unchanged)
{
	Relation index = table->indexes[i];
	Form_pg_index form = index->rd_index;
	IndexInfo *info = idem_table_index_info(table, i);
	Datum values[INDEX_MAX_KEYS];
	bool isnull[INDEX_MAX_KEYS];
	bool unique;

	for (int j = 0; j < form->indnatts; j++)
	{
		NullableDatum column = get_column(slot, form->indkey.values[j]);

		values[j] = column.value;
		isnull[j] = column.isnull;
	}
	/* the index omits rows whose first column is null, see skips_nulls() */
	if (isnull[0] && info->ii_Predicate != NIL)
		return true;
	unique = index_insert(index, values, isnull, &slot->tts_tid, table->heap,
						  form->indisunique ? check : UNIQUE_CHECK_NO, unchanged, info);
	return unique || !form->indisunique;
}

/* Delete the row that was just inserted */
static void
delete_inserted(IdemTable *table, TupleTableSlot *stored)
{
	TM_FailureData tmfd;

	if (idem_compat_tuple_delete(table->heap, &stored->tts_tid, GetCurrentCommandId(true),
								 GetActiveSnapshot(), false, &tmfd) != TM_Ok)
		elog(ERROR, "could not delete a row just inserted into idem.%s", table->def->name);
	CommandCounterIncrement();
}

/*
 * Insert the row.  The caller has found that its primary key is absent.  The
 * unique index can still report a conflict: with a row of a program that
 * writes the table directly, or with an update of a key that could not be HOT
 * because its page was full.  False: the row was not inserted, look the key up again.
 */
bool
idem_write_insert(IdemTable *table, TupleTableSlot *new)
{
	TupleTableSlot *stored;
	bool unique = true;

	idem_table_open_indexes(table);
	stored = store_row(table, new);
	table_tuple_insert(table->heap, stored, GetCurrentCommandId(true), 0, NULL);
	IDEM_POINT("row without entries");
	for (int i = 0; i < table->nindexes && unique; i++)
		unique = insert_index_entry(table, i, stored, UNIQUE_CHECK_PARTIAL, false);
	CommandCounterIncrement();
	if (!unique)
		delete_inserted(table, stored);
	new->tts_tid = stored->tts_tid;
	return unique;
}

/* Begin a batch of rows for the table; it uses memory of its own in the caller's context */
IdemBatch *
idem_write_begin_batch(IdemTable *table)
{
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem batch", ALLOCSET_DEFAULT_SIZES);
	IdemBatch *batch = MemoryContextAlloc(context, sizeof(IdemBatch));

	memset(batch, 0, offsetof(IdemBatch, rows));
	batch->table = table;
	batch->context = context;
	return batch;
}

/* Add a row to the batch, which has room; returns the size of the row */
Size
idem_write_add(IdemBatch *batch, TupleTableSlot *new, int ord)
{
	TupleTableSlot *trimmed = trim_row(batch->table, new);
	MemoryContext oldcontext = MemoryContextSwitchTo(batch->context);
	IdemBatchRow *row = &batch->rows[batch->n];
	HeapTuple tuple =
		heap_form_tuple(trimmed->tts_tupleDescriptor, trimmed->tts_values, trimmed->tts_isnull);

	Assert(batch->n < IDEM_BATCH_ROWS);
	if (batch->n == batch->nslots)
	{
		row->slot = MakeSingleTupleTableSlot(
			idem_table_row(batch->table)->tts_tupleDescriptor, &TTSOpsHeapTuple);
		batch->nslots++;
	}
	MemoryContextSwitchTo(oldcontext);
	row->ord = ord;
	ExecStoreHeapTuple(tuple, row->slot, true);
	batch->n++;
	batch->size += tuple->t_len;
	return tuple->t_len;
}

static bool
begins_with(Relation index, AttrNumber attno)
{
	return index->rd_index->indkey.values[0] == attno;
}

/*
 * Insert the rows added since the last call, and their entries in the indexes that begin
 * with this column.  Leaks memory into the current context.
 */
void
idem_write_rows(IdemBatch *batch, AttrNumber attno)
{
	IdemTable *table = batch->table;
	int n = batch->n - batch->ninserted;
	IdemBatchRow *rows = &batch->rows[batch->ninserted];
	TupleTableSlot **slots;

	if (n == 0)
		return;
	slots = palloc_array(TupleTableSlot *, n);
	for (int i = 0; i < n; i++)
		slots[i] = rows[i].slot;
	idem_table_open_indexes(table);
	table_multi_insert(table->heap, slots, n, GetCurrentCommandId(true), 0, NULL);
	IDEM_POINT("row without entries");
	for (int i = 0; i < table->nindexes; i++)
	{
		for (int j = 0; j < n && begins_with(table->indexes[i], attno); j++)
			(void) insert_index_entry(table, i, slots[j], UNIQUE_CHECK_NO, false);
	}
	batch->ninserted = batch->n;
}

static int
compare_ords(const void *a, const void *b)
{
	int ord_a = ((const IdemBatchRow *) a)->ord;
	int ord_b = ((const IdemBatchRow *) b)->ord;

	return ord_a < ord_b ? -1 : ord_a > ord_b;
}

/*
 * Insert the entries of all rows in the indexes that do not begin with this column.  False:
 * the primary key of the row with this ord may exist already, and the caller raises an
 * error.  Else the batch is empty now.
 */
bool
idem_write_other_entries(IdemBatch *batch, AttrNumber attno, int *ord)
{
	IdemTable *table = batch->table;

	if (batch->n == 0)
		return true;
	Assert(batch->ninserted == batch->n);
	qsort(batch->rows, batch->n, sizeof(IdemBatchRow), compare_ords);
	for (int i = 0; i < table->nindexes; i++)
	{
		for (int j = 0; j < batch->n && !begins_with(table->indexes[i], attno); j++)
		{
			CHECK_FOR_INTERRUPTS();
			*ord = batch->rows[j].ord;
			if (!insert_index_entry(table, i, batch->rows[j].slot, UNIQUE_CHECK_PARTIAL, false))
				return false;
		}
	}
	for (int j = 0; j < batch->n; j++)
		ExecClearTuple(batch->rows[j].slot);
	CommandCounterIncrement();
	batch->n = batch->ninserted = 0;
	batch->size = 0;
	return true;
}

void
idem_write_end_batch(IdemBatch *batch)
{
	Assert(batch->n == 0);
	for (int i = 0; i < batch->nslots; i++)
		ExecDropSingleTupleTableSlot(batch->rows[i].slot);
	MemoryContextDelete(batch->context);
}

/*
 * Does the new version of a row have the same key in the index as the old one?  If so, the index
 * has entries of older versions with that key, and may remove those of dead versions before it
 * splits a page.
 */
static bool
is_key_unchanged(IdemTable *table, Form_pg_index form, TupleTableSlot *old_row,
				 TupleTableSlot *new_row)
{
	for (int i = 0; i < form->indnkeyatts; i++)
	{
		AttrNumber attno = form->indkey.values[i];
		Form_pg_attribute att = TupleDescAttr(RelationGetDescr(table->heap), attno - 1);
		NullableDatum old = idem_row_datum(old_row, attno);
		NullableDatum new = get_column(new_row, attno);

		if (old.isnull != new.isnull ||
			(!old.isnull && !datumIsEqual(old.value, new.value, att->attbyval, att->attlen)))
			return false;
	}
	return true;
}

/*
 * Insert the index entries of a new row version.  The key is unchanged and this
 * transaction has replaced the old version, so there is no uniqueness to check
 * and no transaction to wait for.
 */
static void
insert_update_entries(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new,
					  IdemUpdateIndexes which)
{
	idem_table_open_indexes(table);
	for (int i = 0; i < table->nindexes; i++)
	{
		if (idem_compat_index_needs_entry(table->indexes[i], which))
			(void) insert_index_entry(table, i, new, UNIQUE_CHECK_NO,
									  is_key_unchanged(table, table->indexes[i]->rd_index, old, new));
	}
}

/*
 * Replace a row by a new version of it; waits, and returns what idem_table_lock_row() does.
 * has_moved, unless NULL: the new version has entries of its own in indexes.
 */
TM_Result
idem_write_update(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new, bool *has_moved)
{
	ItemPointerData tid = old->tts_tid;
	TupleTableSlot *stored = store_row(table, new);
	TM_FailureData tmfd;
	LockTupleMode lockmode;
	IdemUpdateIndexes which;
	TM_Result result;

	CheckCmdReplicaIdentity(table->heap, CMD_UPDATE);
	result = idem_compat_tuple_update(table->heap, &tid, stored, GetCurrentCommandId(true),
									  GetActiveSnapshot(), &tmfd, &lockmode, &which);
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of an update of idem.%s", result, table->def->name);
	if (result == TM_Ok)
	{
		if (which != 0)
		{
			/* the link of a duplicate is written at commit, where no wait can be interrupted */
			if (INTERRUPTS_CAN_BE_PROCESSED())
				IDEM_POINT("row without entries");
			insert_update_entries(table, old, stored, which);
		}
		if (has_moved != NULL)
			*has_moved = which != 0;
		new->tts_tid = stored->tts_tid;
		CommandCounterIncrement();
	}
	return result;
}

/* May the update store or delete something in the TOAST table? */
static bool
needs_toast(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new)
{
	HeapTuple tuple = ExecFetchSlotHeapTuple(old, false, NULL);
	Size size = MAXALIGN(SizeofHeapTupleHeader + BITMAPLEN(table->def->natts));

	size += heap_compute_data_size(new->tts_tupleDescriptor, new->tts_values, new->tts_isnull);
	return HeapTupleHasExternal(tuple) || size > TOAST_TUPLE_THRESHOLD;
}

/*
 * Update a row that this transaction has locked, under the lock on its hash: a
 * concurrent probe under that lock cannot miss the row while it moves.  The hash stays locked.
 */
void
idem_write_update_locked(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new, int64 hash,
						 bool *has_moved)
{
	idem_table_open_indexes(table);
	if (needs_toast(table, old, new))
		idem_table_lock_toast(table);
	idem_table_lock_hash(table, hash);
	if (idem_write_update(table, old, new, has_moved) != TM_Ok)
		elog(ERROR, "another transaction has changed a row that this transaction has locked");
}

/* The same, and unlock the hash */
void
idem_write_update_hashed(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new, int64 hash)
{
	idem_write_update_locked(table, old, new, hash, NULL);
	idem_table_unlock_hash(table, hash);
}

/*
 * Delete a row.  Results are those of idem_write_update().  Without wait the
 * result is TM_BeingModified if another transaction is changing the row (W2).
 */
TM_Result
idem_write_delete(IdemTable *table, TupleTableSlot *row, bool wait)
{
	ItemPointerData tid = row->tts_tid;
	TM_FailureData tmfd;
	TM_Result result;

	CheckCmdReplicaIdentity(table->heap, CMD_DELETE);
	result = idem_compat_tuple_delete(table->heap, &tid, GetCurrentCommandId(true),
									  GetActiveSnapshot(), wait, &tmfd);
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a delete from idem.%s", result, table->def->name);
	if (result == TM_Ok)
		CommandCounterIncrement();
	return result;
}
