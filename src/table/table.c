/*
 * table.c
 *		Open a table of idem, its indexes and its locks.
 *
 * The tables are accessed through the table and index access methods.  This
 * leaves out what ExecInsert() and related functions do for triggers, rules, policies
 * and expressions, so shape.c refuses a table that has any of them.
 *
 * Relation locks are those of DML: ROW EXCLUSIVE on the table and its indexes,
 * kept until the end of the transaction.  DDL and REINDEX CONCURRENTLY wait for
 * them as they wait for any DML.
 *
 * The SQL function, or the sweep of cleanup, opens the table that it is about
 * and passes it on.  A store opens only the other tables that it needs.
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

#include "table/table.h"

/* Caches of the tables that this session has looked up */
static IdemTableCache *caches = NULL;

/* Relcache callback: look the table up by name again */
static void
invalidate_relid(Datum arg, Oid relid)
{
	for (IdemTableCache *cache = caches; cache != NULL; cache = cache->next)
	{
		if (relid == InvalidOid || relid == cache->relid)
			cache->relid = InvalidOid;
	}
}

static void
list_cache(IdemTableCache *cache)
{
	if (caches == NULL)
		CacheRegisterRelcacheCallback(invalidate_relid, (Datum) 0);
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

		if (cache->short_desc != NULL)
			FreeTupleDesc(cache->short_desc);
		cache->short_desc = NULL;
		if (OidIsValid(namespace))
			cache->relid = get_relname_relid(def->name, namespace);
	}
	return cache->relid;
}

/* Open a table, and refuse it if it is not as expected */
void
idem_table_open(IdemTable *table, const IdemTableDef *def, LOCKMODE lockmode)
{
	Oid relid = get_relid(def);
	Oid pkey;

	if (!OidIsValid(relid))
		idem_version_mismatch(psprintf("There is no table idem.%s.", def->name));
	memset(table, 0, sizeof(*table));
	table->def = def;
	table->context = CurrentMemoryContext;
	table->heap = table_open(relid, lockmode);
	idem_shape_check(def, table->heap);
	if (lockmode >= RowExclusiveLock)
		idem_subscription_refuse(def, relid);
	pkey = idem_compat_primary_key(table->heap);
	if (!OidIsValid(pkey))
		idem_shape_refuse(def, "The primary key is missing.", def->pkey_hint);
	table->pkey = index_open(pkey, lockmode);
	if (!idem_shape_is_on_pkey(def, table->pkey->rd_index))
		idem_shape_refuse(def, "The primary key is on other columns.",
						  "Drop and create the extension.");
	table->found = table_slot_create(table->heap, NULL);
}

/* Close a table; the locks stay until the end of the transaction */
void
idem_table_close(IdemTable *table)
{
	for (int i = 0; i < table->nindexes; i++)
	{
		if (table->infos[i] != NULL)
			idem_compat_index_insert_cleanup(table->indexes[i], table->infos[i]);
		if (table->indexes[i] != table->pkey)
			index_close(table->indexes[i], NoLock);
	}
	if (table->written != NULL)
		ExecDropSingleTupleTableSlot(table->written);
	ExecDropSingleTupleTableSlot(table->found);
	index_close(table->pkey, NoLock);
	table_close(table->heap, NoLock);
}

/* Open the indexes that take entries; an index under construction may not take them yet */
void
idem_table_open_indexes(IdemTable *table)
{
	MemoryContext oldcontext;
	List *oids;
	ListCell *lc;

	if (table->indexes != NULL)
		return;
	/* K5: wait for a lock of another session on the TOAST table now, not under a hash lock */
	if (OidIsValid(table->heap->rd_rel->reltoastrelid))
		LockRelationOid(table->heap->rd_rel->reltoastrelid, RowExclusiveLock);
	oldcontext = MemoryContextSwitchTo(table->context);
	oids = RelationGetIndexList(table->heap);
	table->indexes = palloc_array(Relation, list_length(oids));
	table->infos = palloc0_array(IndexInfo *, list_length(oids));
	foreach (lc, oids)
	{
		bool is_pkey = lfirst_oid(lc) == RelationGetRelid(table->pkey);
		Relation index = is_pkey ? table->pkey : index_open(lfirst_oid(lc), RowExclusiveLock);

		if (index->rd_index->indisready)
		{
			idem_shape_check_index(table, index);
			table->indexes[table->nindexes++] = index;
		}
		else
			index_close(index, NoLock);
	}
	list_free(oids);
	MemoryContextSwitchTo(oldcontext);
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
		if (idem_shape_is_ordered_by(table->indexes[i], columns, ncolumns))
			return table->indexes[i];
	}
	idem_shape_refuse(table->def, missing, hint);
}

/*
 * Lock the hash of a key, for a moment.  Every session waits for this lock, also one
 * that must not wait for a transaction (K5).  So the caller takes all locks that it
 * may have to wait for before this one.  Keys whose hashes have the same low 48 bits
 * share a lock, because a lock tag has no room for more bits.
 */
void
idem_table_lock_hash(IdemTable *table, int64 hash)
{
	LockDatabaseObject(RelationGetRelid(table->heap), (uint32) hash, (uint16) (hash >> 32),
					   ExclusiveLock);
}

void
idem_table_unlock_hash(IdemTable *table, int64 hash)
{
	UnlockDatabaseObject(RelationGetRelid(table->heap), (uint32) hash, (uint16) (hash >> 32),
						 ExclusiveLock);
}

/*
 * Lock the row at this place until the end of the transaction and make it the
 * row found.  TM_WouldBlock is returned with LockWaitSkip only.  After
 * TM_Updated or TM_Deleted the caller has to look the row up again.
 */
TM_Result
idem_table_lock_row(IdemTable *table, ItemPointerData tid, LockTupleMode mode,
					LockWaitPolicy policy)
{
	TM_FailureData tmfd;
	TM_Result result = table_tuple_lock(table->heap, &tid, GetActiveSnapshot(), table->found,
										GetCurrentCommandId(true), mode, policy, 0, &tmfd);

	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a lock in idem.%s", result, table->def->name);
	return result;
}
