/*
 * table.c
 *		Open a table of idem, its indexes and its locks.
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
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_publication.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "table/table.h"

/* Caches of the tables that this session has looked up */
static IdemTableCache *caches = NULL;

static bool
has_index(const IdemTableCache *cache, Oid oid)
{
	for (int i = 0; i < cache->nindexes; i++)
	{
		if (cache->indexes[i].oid == oid)
			return true;
	}
	return cache->pkey.oid == oid;
}

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
		if (!OidIsValid(cache->relid) || has_index(cache, relid))
			cache->is_checked = false;
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

static void
list_cache(IdemTableCache *cache)
{
	if (caches == NULL)
		CacheRegisterRelcacheCallback(invalidate_table, (Datum) 0);
	cache->next = caches;
	cache->is_listed = true;
	caches = cache;
}

/* OID of the table, looked up by name after each change of it; invalid if there is none */
static Oid
get_relid(const IdemTableDef *def)
{
	IdemTableCache *cache = def->cache;

	if (!cache->is_listed)
		list_cache(cache);
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
	cache->found = MakeSingleTupleTableSlot(desc, table_slot_callbacks(heap));
	cache->rows = palloc0_array(TupleTableSlot *, def->natts + 1);
	MemoryContextSwitchTo(oldcontext);
}

/* The slot that looks at the table read their row into: each look replaces the row of the last */
TupleTableSlot *
idem_table_row(IdemTable *table)
{
	return table->found;
}

/* A slot to write a row that ends after its first natts columns */
TupleTableSlot *
idem_table_row_slot(IdemTable *table, int natts)
{
	IdemTableCache *cache = table->def->cache;

	if (unlikely(cache->rows[natts] == NULL))
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(cache->context);
		TupleDesc desc =
			CreateTupleDescTruncatedCopy(cache->found->tts_tupleDescriptor, natts);

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
	cache->pkey.oid = idem_compat_primary_key(heap);
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
	table->found = cache->found;
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
IndexInfo *
idem_table_index_info(IdemTable *table, int i)
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

/* No more entries for this index in this call */
static void
end_inserts(IdemTable *table, int i)
{
	IdemIndexCache *index = &table->def->cache->indexes[i];

	if (index->info == NULL || is_btree(table->indexes[i]))
		return;
	idem_compat_index_insert_cleanup(table->indexes[i], index->info);
	index->info = NULL;
}

/* Close a table; the locks stay until the end of the transaction */
void
idem_table_close(IdemTable *table)
{
	IdemTableCache *cache = table->def->cache;

	for (int i = 0; i < table->nindexes; i++)
	{
		end_inserts(table, i);
		if (table->indexes[i] != table->pkey)
			index_close(table->indexes[i], NoLock);
	}
	ExecClearTuple(table->found);
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

/* Lock the table and the indexes that are known, without waiting; false: a lock is not free */
static bool
try_lock(const IdemTableCache *cache)
{
	if (!ConditionalLockRelationOid(cache->relid, RowExclusiveLock))
		return false;
	for (int i = 0; i < cache->nindexes; i++)
	{
		if (!ConditionalLockRelationOid(cache->indexes[i].oid, RowExclusiveLock))
			return false;
	}
	return true;
}

/* CheckCmdReplicaIdentity() without the error: does no publication of updates refuse an update? */
static bool
may_update(Relation heap)
{
	PublicationDesc desc;

	RelationBuildPublicationDesc(heap, &desc);
	return desc.rf_valid_for_update && desc.cols_valid_for_update &&
		(!desc.pubactions.pubupdate || OidIsValid(RelationGetReplicaIndex(heap)) ||
		 heap->rd_rel->relreplident == REPLICA_IDENTITY_FULL);
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
	Oid toast;

	if (cache->is_open || !cache->is_checked || cache->indexes == NULL || !try_lock(cache))
		return false;
	AcceptInvalidationMessages();
	if (!cache->is_checked || !idem_check_knows_unsubscribed(def))
		return false;
	/* all locks are held, so no invalidation arrives from here on, and nothing is checked again */
	open_table(table, def, RowExclusiveLock);
	idem_table_open_indexes(table);
	toast = table->heap->rd_rel->reltoastrelid;
	if (may_update(table->heap) &&
		(!OidIsValid(toast) || ConditionalLockRelationOid(toast, RowExclusiveLock)))
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
