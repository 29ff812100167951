/*
 * write.c
 *		Write rows of the tables of idem: insert, update, delete.
 *
 * The caller fills the row that idem_write_new_row() or idem_write_copy_row()
 * returns.  Every write is followed by CommandCounterIncrement(), so several
 * idem functions in one statement see the writes of one another.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "table/table.h"

/*
 * Descriptor of a row to be written.  A short row ends after short_natts
 * columns, as if the others had been added to the table later.  This saves
 * eight bytes of null bitmap in each row and each WAL record.
 */
static TupleDesc
get_row_desc(IdemTable *table, bool full)
{
	IdemTableCache *cache = table->def->cache;

	if (full)
		return RelationGetDescr(table->heap);
	if (cache->short_desc == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(TopMemoryContext);

		cache->short_desc = CreateTupleDescTruncatedCopy(RelationGetDescr(table->heap),
														 table->def->short_natts);
		MemoryContextSwitchTo(oldcontext);
	}
	return cache->short_desc;
}

/* Start a row of nulls to be filled and written */
TupleTableSlot *
idem_write_new_row(IdemTable *table, bool full)
{
	TupleDesc desc = get_row_desc(table, full);

	if (table->written != NULL && table->written->tts_tupleDescriptor != desc)
	{
		ExecDropSingleTupleTableSlot(table->written);
		table->written = NULL;
	}
	if (table->written == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(table->context);

		table->written = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
		MemoryContextSwitchTo(oldcontext);
	}
	ExecClearTuple(table->written);
	memset(table->written->tts_isnull, true, desc->natts * sizeof(bool));
	return table->written;
}

/* Start a row to be written as a copy of the row found */
TupleTableSlot *
idem_write_copy_row(IdemTable *table, bool full)
{
	TupleTableSlot *slot = idem_write_new_row(table, full);
	int natts = slot->tts_tupleDescriptor->natts;

	slot_getallattrs(table->found);
	memcpy(slot->tts_values, table->found->tts_values, natts * sizeof(Datum));
	memcpy(slot->tts_isnull, table->found->tts_isnull, natts * sizeof(bool));
	return slot;
}

/* What index_insert() needs to know about the index; built for its first entry */
static IndexInfo *
get_index_info(IdemTable *table, int i)
{
	if (table->infos[i] == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(table->context);

		table->infos[i] = BuildIndexInfo(table->indexes[i]);
		MemoryContextSwitchTo(oldcontext);
	}
	return table->infos[i];
}

/* Insert the entry of the row written into one index; false if the key may exist already */
static bool
insert_index_entry(IdemTable *table, int i, IndexUniqueCheck check, bool unchanged)
{
	Relation index = table->indexes[i];
	Form_pg_index form = index->rd_index;
	IndexInfo *info = get_index_info(table, i);
	Datum values[INDEX_MAX_KEYS] = {0};
	bool isnull[INDEX_MAX_KEYS];
	bool unique;

	for (int j = 0; j < form->indnatts; j++)
	{
		AttrNumber attno = form->indkey.values[j];

		isnull[j] = attno > table->written->tts_tupleDescriptor->natts;
		if (!isnull[j])
			values[j] = slot_getattr(table->written, attno, &isnull[j]);
	}
	/* the index omits rows whose first column is null, see skips_nulls() */
	if (isnull[0] && info->ii_Predicate != NIL)
		return true;
	unique = index_insert(index, values, isnull, &table->written->tts_tid, table->heap,
						  form->indisunique ? check : UNIQUE_CHECK_NO, unchanged, info);
	return unique || !form->indisunique;
}

/* Delete the row that was just inserted */
static void
delete_written(IdemTable *table)
{
	TM_FailureData tmfd;

	if (idem_compat_tuple_delete(table->heap, &table->written->tts_tid, GetCurrentCommandId(true),
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
idem_write_insert(IdemTable *table)
{
	bool unique = true;

	idem_table_open_indexes(table);
	/* after a conflict the caller tries again with the row that is stored already */
	if (TTS_EMPTY(table->written))
		ExecStoreVirtualTuple(table->written);
	table_tuple_insert(table->heap, table->written, GetCurrentCommandId(true), 0, NULL);
	for (int i = 0; i < table->nindexes && unique; i++)
		unique = insert_index_entry(table, i, UNIQUE_CHECK_PARTIAL, false);
	CommandCounterIncrement();
	if (!unique)
		delete_written(table);
	return unique;
}

/*
 * Insert the index entries of a new row version.  The key is unchanged and this
 * transaction has replaced the old version, so there is no uniqueness to check
 * and no transaction to wait for.
 */
static void
insert_update_entries(IdemTable *table, IdemUpdateIndexes which)
{
	idem_table_open_indexes(table);
	for (int i = 0; i < table->nindexes; i++)
	{
		if (idem_compat_index_needs_entry(table->indexes[i], which))
			(void) insert_index_entry(table, i, UNIQUE_CHECK_NO,
									  table->indexes[i]->rd_index->indisunique);
	}
}

/* Replace the row found by the row written; waits, and returns what idem_table_lock_row() does */
TM_Result
idem_write_update(IdemTable *table)
{
	ItemPointerData tid = table->found->tts_tid;
	TM_FailureData tmfd;
	LockTupleMode lockmode;
	IdemUpdateIndexes which;
	TM_Result result;

	ExecStoreVirtualTuple(table->written);
	CheckCmdReplicaIdentity(table->heap, CMD_UPDATE);
	result = idem_compat_tuple_update(table->heap, &tid, table->written, GetCurrentCommandId(true),
									  GetActiveSnapshot(), &tmfd, &lockmode, &which);
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of an update of idem.%s", result, table->def->name);
	if (result == TM_Ok)
	{
		if (which)
			insert_update_entries(table, which);
		CommandCounterIncrement();
	}
	return result;
}

/*
 * Update a row that this transaction has locked, under the lock on its hash: a
 * concurrent probe under that lock cannot miss the row while it moves.
 */
void
idem_write_update_hashed(IdemTable *table, int64 hash)
{
	TM_Result result;

	idem_table_open_indexes(table);
	idem_table_lock_hash(table, hash);
	result = idem_write_update(table);
	idem_table_unlock_hash(table, hash);
	if (result != TM_Ok)
		elog(ERROR, "another transaction has changed a row that this transaction has locked");
}

/*
 * Delete the row found.  Results are those of idem_write_update().  Without wait the
 * result is TM_BeingModified if another transaction is changing the row (W2).
 */
TM_Result
idem_write_delete(IdemTable *table, bool wait)
{
	ItemPointerData tid = table->found->tts_tid;
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
