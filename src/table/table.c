/*
 * table.c
 *		Open a table of idem, its indexes and its locks; write its rows.
 *
 * The tables are accessed through the table and index access methods.  This
 * leaves out what ExecInsert() and related functions do for triggers, rules, policies
 * and expressions, so check.c refuses a table that has any of them.
 *
 * Relation locks are those of DML, kept until the end of the transaction: ROW
 * EXCLUSIVE on the table and its indexes for a function that writes, ACCESS SHARE for
 * one that reads.  DDL and REINDEX CONCURRENTLY wait for them as they wait for any DML.
 *
 * What a session knows about a table, and the map of slots, the settings of queues and the
 * subscriptions, counts until an invalidation of another session arrives.  The server lets
 * them arrive when it grants a lock, but not when the transaction has the lock already.  So
 * every call lets them arrive when it opens its table (M4, M7, K13).
 *
 * The SQL function, or the sweep of cleanup, opens the table that it is about
 * and passes it on.  A store opens only the other tables that it needs.
 *
 * The caller fills the row that idem_table_new_row() or idem_table_copy_row()
 * returns.  Every write is followed by CommandCounterIncrement(), so several
 * idem functions in one statement see the writes of one another.
 *
 * A batch writes many new rows in three steps:
 * - idem_table_add() adds a row that the caller has filled;
 * - idem_table_write_rows() inserts the rows added, and their entries in the indexes that
 *   begin with a given column.  The caller calls it under the locks on the hashes of the
 *   rows, so that other transactions that look for these hashes find the rows.  It passes
 *   the column of the hash: if REINDEX CONCURRENTLY builds a copy of the index, another
 *   transaction may look into either of them.
 * - idem_table_write_entries() inserts the entries in the other indexes, later and for more
 *   rows at once, in the order of "ord".  This is safe because the rows belong to this
 *   open transaction: others look for them by their hash only, and this transaction
 *   must not look for them, or change them, before.
 */
#include "postgres.h"

#include "access/heaptoast.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_publication.h"
#include "executor/executor.h"
#include "utils/datum.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "point.h"
#include "table/table.h"

/* Caches of the tables that this session has looked up */
static IdemTableCache *caches = NULL;

/*
 * Relcache callback: look the table up by name and check it again.  A function that
 * has it open goes on with what it has, like any statement: it holds a lock on the
 * table, and DDL that changes the indexes waits for that.
 */
static void
invalidate_table(Datum arg, Oid relid)
{
	for (IdemTableCache *cache = caches; cache != NULL; cache = cache->next)
	{
		if (relid == InvalidOid || relid == cache->relid)
		{
			cache->relid = InvalidOid;
			cache->version++;
		}
		if (!OidIsValid(cache->relid) || relid == cache->pkey.oid)
			cache->is_checked = false;
		for (int i = 0; i < cache->nindexes; i++)
		{
			if (relid == cache->indexes[i].oid)
				cache->is_checked = false;
		}
	}
}

/*
 * An error has left the table open: forget the slots.  The server releases the pages
 * that they have pinned.
 */
void
idem_table_forget_open(void)
{
	for (IdemTableCache *cache = caches; cache != NULL; cache = cache->next)
	{
		if (cache->is_open)
			cache->is_open = cache->is_checked = false;
	}
}

/* OID of the table, looked up by name after each change of it; invalid if there is none */
static Oid
get_relid(const IdemTableDef *def)
{
	IdemTableCache *cache = def->cache;

	if (!cache->is_listed)
	{
		if (caches == NULL)
			CacheRegisterRelcacheCallback(invalidate_table, (Datum) 0);
		cache->next = caches;
		cache->is_listed = true;
		caches = cache;
	}
	if (!OidIsValid(cache->relid))
	{
		Oid namespace = get_namespace_oid("idem", true);

		if (OidIsValid(namespace))
			cache->relid = get_relname_relid(def->name, namespace);
	}
	return cache->relid;
}

/*
 * A number that changes with each invalidation of the table.  Invalidations that other sessions
 * have sent by now count, also if this transaction has locked the table before.
 */
uint64
idem_table_version(const IdemTableDef *def)
{
	AcceptInvalidationMessages();
	return def->cache->version;
}

/* Make empty slots for rows read and written */
static void
make_slots(const IdemTableDef *def, Relation heap)
{
	IdemTableCache *cache = def->cache;
	MemoryContext oldcontext;
	TupleDesc desc;

	if (cache->context == NULL)
		cache->context =
			AllocSetContextCreate(TopMemoryContext, "idem table", ALLOCSET_SMALL_SIZES);
	MemoryContextReset(cache->context);
	memset(&cache->pkey, 0, sizeof(cache->pkey));
	cache->indexes = NULL;
	cache->nindexes = 0;
	oldcontext = MemoryContextSwitchTo(cache->context);
	desc = CreateTupleDescCopyConstr(RelationGetDescr(heap));
	cache->row = MakeSingleTupleTableSlot(desc, table_slot_callbacks(heap));
	cache->rows = palloc0_array(TupleTableSlot *, def->natts + 1);
	MemoryContextSwitchTo(oldcontext);
}

/* The slot that looks at the table read their row into: each look replaces the row of the last */
TupleTableSlot *
idem_table_row(IdemTable *table)
{
	return table->def->cache->row;
}

/* A slot to write a row that ends after its first natts columns */
static TupleTableSlot *
get_row_slot(IdemTable *table, int natts)
{
	IdemTableCache *cache = table->def->cache;

	if (unlikely(cache->rows[natts] == NULL))
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(cache->context);
		TupleDesc desc =
			CreateTupleDescTruncatedCopy(cache->row->tts_tupleDescriptor, natts);

		cache->rows[natts] = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
		MemoryContextSwitchTo(oldcontext);
	}
	return cache->rows[natts];
}

/*
 * Refuse the table if it is not as expected (M7 first); remember it if it is.  An invalidation
 * that arrives meanwhile may be about what was checked before it: then the next call checks again.
 */
static void
check_table(const IdemTableDef *def, Relation heap, LOCKMODE index_lock)
{
	IdemTableCache *cache = def->cache;
	uint64 version = cache->version;
	Relation pkey;

	idem_check_citus(def, RelationGetRelid(heap));
	idem_check_shape(def, heap);
	make_slots(def, heap);
	cache->pkey.oid = RelationGetPrimaryKeyIndex(heap, false);
	if (!OidIsValid(cache->pkey.oid))
		idem_check_refuse(def, "The primary key is missing.",
						  psprintf("Run %s.", def->pkey_command));
	/* before the index is opened, which may let invalidations arrive */
	cache->is_checked = cache->version == version;
	pkey = index_open(cache->pkey.oid, index_lock);
	if (!idem_check_is_on_pkey(def, pkey->rd_index))
	{
		cache->is_checked = false;
		idem_check_refuse(def, "The primary key is on other columns.",
						  "Drop and create the extension.");
	}
	index_close(pkey, NoLock);
}

/* Open the heap; if the table was dropped since it was last used, look it up by name again */
static Relation
open_heap(const IdemTableDef *def, LOCKMODE lockmode)
{
	Relation heap;

	do
	{
		Oid relid = get_relid(def);

		if (!OidIsValid(relid))
			idem_version_mismatch(psprintf("There is no table idem.%s.", def->name));
		heap = try_table_open(relid, lockmode);
		if (heap == NULL)
			def->cache->relid = InvalidOid;
	} while (heap == NULL);
	return heap;
}

/*
 * Open a table, and refuse it if it is not as expected.  The indexes get the lock of the caller,
 * so that a function that only reads does not wait for idem_shard_give(), nor it for the function
 * (M3, H3); to write entries, ROW EXCLUSIVE is enough.
 */
static void
open_table(IdemTable *table, const IdemTableDef *def, LOCKMODE lockmode)
{
	IdemTableCache *cache = def->cache;

	if (cache->is_open)
		elog(ERROR, "table idem.%s is already open in this session", def->name);
	memset(table, 0, sizeof(*table));
	table->def = def;
	table->context = CurrentMemoryContext;
	table->index_lock = Min(lockmode, RowExclusiveLock);
	table->heap = open_heap(def, lockmode);
	if (unlikely(!cache->is_checked))
		check_table(def, table->heap, table->index_lock);
	if (lockmode >= RowExclusiveLock)
		idem_check_subscription(def, RelationGetRelid(table->heap));
	table->pkey = index_open(cache->pkey.oid, table->index_lock);
	cache->is_open = true;
}

/*
 * The same for a call: whatever other sessions have committed counts from now on, also if this
 * transaction has the lock already (M4).
 */
void
idem_table_open(IdemTable *table, const IdemTableDef *def, LOCKMODE lockmode)
{
	AcceptInvalidationMessages();
	open_table(table, def, lockmode);
}

/* Does the access method keep no state between inserts? */
static bool
is_btree(Relation index)
{
	return index->rd_rel->relam == BTREE_AM_OID;
}

/* What index_insert() needs to know about the index; built for its first entry */
static IndexInfo *
get_index_info(IdemTable *table, int i)
{
	IdemIndexCache *index = &table->def->cache->indexes[i];

	if (index->info == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(
			is_btree(table->indexes[i]) ? table->def->cache->context : table->context);

		index->info = BuildIndexInfo(table->indexes[i]);
		MemoryContextSwitchTo(oldcontext);
	}
	return index->info;
}

/* Close a table; the locks stay until the end of the transaction */
void
idem_table_close(IdemTable *table)
{
	IdemTableCache *cache = table->def->cache;

	for (int i = 0; i < table->nindexes; i++)
	{
		IdemIndexCache *index = &cache->indexes[i];

		/* no more entries for this index in this call */
		if (index->info != NULL && !is_btree(table->indexes[i]))
		{
			index_insert_cleanup(table->indexes[i], index->info);
			index->info = NULL;
		}
		if (table->indexes[i] != table->pkey)
			index_close(table->indexes[i], NoLock);
	}
	ExecClearTuple(cache->row);
	index_close(table->pkey, NoLock);
	table_close(table->heap, NoLock);
	cache->is_open = false;
}

/*
 * List the indexes that take entries; an index under construction may not take them yet.  When
 * it does, the server also invalidates the table, so the list is made again.
 */
static void
list_indexes(IdemTable *table)
{
	IdemTableCache *cache = table->def->cache;
	List *oids = RelationGetIndexList(table->heap);
	IdemIndexCache *list =
		MemoryContextAllocZero(cache->context, list_length(oids) * sizeof(IdemIndexCache));
	int n = 0;
	ListCell *lc;

	foreach (lc, oids)
	{
		Relation index = index_open(lfirst_oid(lc), table->index_lock);

		if (index->rd_index->indisready)
		{
			idem_check_index(table, index);
			list[n++].oid = lfirst_oid(lc);
		}
		index_close(index, NoLock);
	}
	list_free(oids);
	cache->indexes = list;
	cache->nindexes = n;
}

/* Open the indexes that take entries */
void
idem_table_open_indexes(IdemTable *table)
{
	IdemTableCache *cache = table->def->cache;

	if (table->indexes != NULL)
		return;
	if (cache->indexes == NULL)
		list_indexes(table);
	table->indexes =
		MemoryContextAlloc(table->context, cache->nindexes * sizeof(Relation));
	for (int i = 0; i < cache->nindexes; i++)
	{
		bool is_pkey = cache->indexes[i].oid == cache->pkey.oid;

		table->indexes[i] =
			is_pkey ? table->pkey : index_open(cache->indexes[i].oid, table->index_lock);
		table->nindexes++;
	}
}

/*
 * Open a table, with its indexes, to update rows right before the commit, where there must be
 * neither a wait nor an error (J16).  False: that is not certain.  The transaction has used the
 * table before.  What was checked then still holds if no invalidation of the table has arrived
 * since, and the locks keep out further changes.
 */
bool
idem_table_open_at_commit(IdemTable *table, const IdemTableDef *def)
{
	IdemTableCache *cache = def->cache;
	PublicationDesc desc;
	Form_pg_class form;

	/* lock what is known, without waiting */
	if (cache->is_open || !cache->is_checked || cache->indexes == NULL ||
		!ConditionalLockRelationOid(cache->relid, RowExclusiveLock))
		return false;
	for (int i = 0; i < cache->nindexes; i++)
	{
		if (!ConditionalLockRelationOid(cache->indexes[i].oid, RowExclusiveLock))
			return false;
	}
	AcceptInvalidationMessages();
	if (!cache->is_checked || !idem_check_knows_unsubscribed(def))
		return false;
	/* all locks are held, so no invalidation arrives from here on, and nothing is checked again */
	open_table(table, def, RowExclusiveLock);
	idem_table_open_indexes(table);
	/* as CheckCmdReplicaIdentity(), without its error: does no publication refuse an update? */
	RelationBuildPublicationDesc(table->heap, &desc);
	form = table->heap->rd_rel;
	if (desc.rf_valid_for_update && desc.cols_valid_for_update &&
		(!desc.pubactions.pubupdate || OidIsValid(RelationGetReplicaIndex(table->heap)) ||
		 form->relreplident == REPLICA_IDENTITY_FULL) &&
		(!OidIsValid(form->reltoastrelid) ||
		 ConditionalLockRelationOid(form->reltoastrelid, RowExclusiveLock)))
		return true;
	idem_table_close(table);
	return false;
}

/*
 * Lock the TOAST table, before the lock on a hash: other sessions that want the hash must
 * not wait for a lock on the TOAST table, too (K5).  Rows that are small need no such lock.
 */
void
idem_table_lock_toast(IdemTable *table)
{
	if (OidIsValid(table->heap->rd_rel->reltoastrelid))
		LockRelationOid(table->heap->rd_rel->reltoastrelid, RowExclusiveLock);
}

static IdemIndexCache *
get_index_cache(IdemTable *table, Relation index)
{
	for (int i = 0; i < table->nindexes; i++)
	{
		if (table->indexes[i] == index)
			return &table->def->cache->indexes[i];
	}
	Assert(index == table->pkey);
	return &table->def->cache->pkey;
}

/* What a search of the btree needs, without the values; for the columns of its key */
const BTScanInsertData *
idem_table_search_key(IdemTable *table, Relation index)
{
	IdemIndexCache *cache = get_index_cache(table, index);

	if (cache->search == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(table->def->cache->context);
		BTScanInsert key = _bt_mkscankey(index, NULL);

		MemoryContextSwitchTo(oldcontext);
		key->keysz = IndexRelationGetNumberOfKeyAttributes(index);
		key->anynullkeys = false;
		for (int i = 0; i < key->keysz; i++)
			key->scankeys[i].sk_flags &= ~SK_ISNULL;
		cache->search = key;
	}
	return cache->search;
}

/*
 * Find the index that orders the rows by these columns; the index may omit rows
 * in which the first of them is null.
 */
Relation
idem_table_find_index(IdemTable *table, const AttrNumber *columns, int ncolumns,
					  const char *missing, const char *hint)
{
	idem_table_open_indexes(table);
	for (int i = 0; i < table->nindexes; i++)
	{
		if (idem_check_is_ordered_by(table->indexes[i], columns, ncolumns))
			return table->indexes[i];
	}
	idem_check_refuse(table->def, missing, hint);
}

/*
 * Lock the hash of a key, for a moment.  Every session waits for this lock, also one
 * that must not wait for a transaction (K5).  So the caller takes all locks that it
 * may have to wait for before this one.  Keys whose hashes have the same high 48 bits
 * share a lock, because a lock tag has no room for more bits.  A caller that locks several
 * hashes locks them in ascending order (J9): then their locks are in one order, too.
 */
void
idem_table_lock_hash(IdemTable *table, int64 hash)
{
	LockDatabaseObject(RelationGetRelid(table->heap), (uint32) (hash >> 32), (uint16) (hash >> 16),
					   ExclusiveLock);
}

/* The same without waiting; false: another session has it */
bool
idem_table_try_lock_hash(IdemTable *table, int64 hash)
{
	LOCKTAG tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, RelationGetRelid(table->heap), (uint32) (hash >> 32),
					   (uint16) (hash >> 16));
	return LockAcquire(&tag, ExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL;
}

void
idem_table_unlock_hash(IdemTable *table, int64 hash)
{
	UnlockDatabaseObject(RelationGetRelid(table->heap), (uint32) (hash >> 32),
						 (uint16) (hash >> 16), ExclusiveLock);
}

/*
 * Lock the row at this place until the end of the transaction, and read its latest version.
 * TM_WouldBlock is returned with LockWaitSkip only.  After
 * TM_Updated or TM_Deleted the caller has to look the row up again.
 */
TM_Result
idem_table_lock_row(IdemTable *table, ItemPointerData tid, LockTupleMode mode,
					LockWaitPolicy policy, TupleTableSlot *row)
{
	TM_FailureData tmfd;
	TM_Result result = table_tuple_lock(table->heap, &tid, GetActiveSnapshot(), row,
										GetCurrentCommandId(true), mode, policy, 0, &tmfd);

	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a lock in idem.%s", result, table->def->name);
	return result;
}

/* Start a row of nulls to be filled and written */
TupleTableSlot *
idem_table_new_row(IdemTable *table)
{
	int natts = table->def->natts;
	TupleTableSlot *new = get_row_slot(table, natts);

	ExecClearTuple(new);
	memset(new->tts_isnull, true, natts * sizeof(bool));
	return new;
}

/* Start a row to be written as a copy of this one, which must stay in its slot until then */
TupleTableSlot *
idem_table_copy_row(IdemTable *table, TupleTableSlot *row)
{
	TupleTableSlot *new = idem_table_new_row(table);
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
	slot = get_row_slot(table, natts);
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
	IndexInfo *info = get_index_info(table, i);
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

/*
 * Insert the row.  The caller has found that its primary key is absent.  The
 * unique index can still report a conflict: with a row of a program that
 * writes the table directly, or with an update of a key that could not be HOT
 * because its page was full.  False: the row was not inserted, look the key up again.
 */
bool
idem_table_insert(IdemTable *table, TupleTableSlot *new)
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
	{
		TM_FailureData tmfd;

		if (table_tuple_delete(table->heap, &stored->tts_tid, GetCurrentCommandId(true), 0,
							   GetActiveSnapshot(), InvalidSnapshot, false, &tmfd) != TM_Ok)
			elog(ERROR, "could not delete a row just inserted into idem.%s", table->def->name);
		CommandCounterIncrement();
	}
	new->tts_tid = stored->tts_tid;
	return unique;
}

/* Begin a batch of rows for the table; it uses memory of its own in the caller's context */
IdemBatch *
idem_table_begin_batch(IdemTable *table)
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
idem_table_add(IdemBatch *batch, TupleTableSlot *new, int ord)
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
idem_table_write_rows(IdemBatch *batch, AttrNumber attno)
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
idem_table_write_entries(IdemBatch *batch, AttrNumber attno, int *ord)
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
idem_table_end_batch(IdemBatch *batch)
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
 * Replace a row by a new version of it; waits, and returns what idem_table_lock_row() does.
 * has_moved, unless NULL: the new version has entries of its own in indexes.
 */
TM_Result
idem_table_update(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new, bool *has_moved)
{
	ItemPointerData tid = old->tts_tid;
	TupleTableSlot *stored = store_row(table, new);
	TM_FailureData tmfd;
	LockTupleMode lockmode;
	TU_UpdateIndexes which;
	TM_Result result;

	CheckCmdReplicaIdentity(table->heap, CMD_UPDATE);
	result =
		table_tuple_update(table->heap, &tid, stored, GetCurrentCommandId(true), 0,
						   GetActiveSnapshot(), InvalidSnapshot, true, &tmfd, &lockmode, &which);
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of an update of idem.%s", result, table->def->name);
	if (result == TM_Ok)
	{
		if (which != 0)
		{
			/* the link of a duplicate is written at commit, where no wait can be interrupted */
			if (INTERRUPTS_CAN_BE_PROCESSED())
				IDEM_POINT("row without entries");
			/*
			 * The key of the table is unchanged, and this transaction has replaced the old version,
			 * so there is no uniqueness to check and no transaction to wait for.
			 */
			idem_table_open_indexes(table);
			for (int i = 0; i < table->nindexes; i++)
			{
				if (idem_compat_index_needs_entry(table->indexes[i], which))
					(void) insert_index_entry(table, i, stored, UNIQUE_CHECK_NO,
											  is_key_unchanged(table, table->indexes[i]->rd_index,
															   old, stored));
			}
		}
		if (has_moved != NULL)
			*has_moved = which != 0;
		new->tts_tid = stored->tts_tid;
		CommandCounterIncrement();
	}
	return result;
}

/*
 * Update a row that this transaction has locked, under the lock on its hash: a
 * concurrent probe under that lock cannot miss the row while it moves.  The hash stays locked.
 */
void
idem_table_update_locked(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new, int64 hash,
						 bool *has_moved)
{
	Size size = MAXALIGN(SizeofHeapTupleHeader + BITMAPLEN(table->def->natts)) +
		heap_compute_data_size(new->tts_tupleDescriptor, new->tts_values, new->tts_isnull);

	idem_table_open_indexes(table);
	/* may the update store or delete something in the TOAST table? */
	if (size > TOAST_TUPLE_THRESHOLD ||
		HeapTupleHasExternal(ExecFetchSlotHeapTuple(old, false, NULL)))
		idem_table_lock_toast(table);
	idem_table_lock_hash(table, hash);
	if (idem_table_update(table, old, new, has_moved) != TM_Ok)
		elog(ERROR, "another transaction has changed a row that this transaction has locked");
}

/* The same, and unlock the hash */
void
idem_table_update_hashed(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new, int64 hash)
{
	idem_table_update_locked(table, old, new, hash, NULL);
	idem_table_unlock_hash(table, hash);
}

/*
 * Delete a row.  Results are those of idem_table_update().  Without wait the
 * result is TM_BeingModified if another transaction is changing the row (W2).
 */
TM_Result
idem_table_delete(IdemTable *table, TupleTableSlot *row, bool wait)
{
	ItemPointerData tid = row->tts_tid;
	TM_FailureData tmfd;
	TM_Result result;

	CheckCmdReplicaIdentity(table->heap, CMD_DELETE);
	result = table_tuple_delete(table->heap, &tid, GetCurrentCommandId(true), 0,
								GetActiveSnapshot(), InvalidSnapshot, wait, &tmfd);
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a delete from idem.%s", result, table->def->name);
	if (result == TM_Ok)
		CommandCounterIncrement();
	return result;
}
