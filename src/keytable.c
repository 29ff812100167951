/*
 * keytable.c
 *		idem.keys by way of the table and index access methods.
 *
 * What ExecInsert() and its kin do for a table with triggers, rules, policies
 * and expressions is left out here.  So a table that has grown any of these
 * is refused: indexes when they need an entry, the rest in every call.
 *
 * Relation locks are those of DML (ROW EXCLUSIVE on table and indexes, kept
 * until the end of the transaction), so DDL and REINDEX CONCURRENTLY see us.
 * Every write is followed by CommandCounterIncrement(): several idem
 * functions in one statement see what the one before has done.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "nodes/execnodes.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "idem.h"

/* Invalid: not looked up yet */
static Oid keys_relid = InvalidOid;

/* The columns of a plain claim, made with the first of them after a lookup */
static TupleDesc plain_desc = NULL;

/* Types of the columns, in the order of IdemKeyColumn */
static const Oid column_types[IDEM_KEYS_NATTS] = {
	TIMESTAMPTZOID, TIMESTAMPTZOID, REGROLEOID, TEXTOID,
	TEXTOID, BYTEAOID, TIMESTAMPTZOID, JSONBOID,
	INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, INT4OID,
	INT4OID, BOOLOID, TEXTOID, JSONBOID};

pg_noreturn static void
unsupported(const char *detail, const char *hint)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("table \"%s\" is not as idem has made it", "idem.keys"),
			errdetail("%s", detail),
			errhint("%s", hint));
}

static void
check_shape(Relation heap)
{
	TupleDesc desc = RelationGetDescr(heap);
	TupleConstr *constr = desc->constr;

	/* SQL objects of 0.1.0 have no leases and need no update to go on */
	if ((!idem_args_desc_has(desc, column_types, IDEM_KEYS_NATTS) &&
		 !idem_args_desc_has(desc, column_types, IDEM_KEYS_PLAIN_NATTS)) ||
		TupleDescAttr(desc, IDEM_KEYS_KEY - 1)->attcollation != C_COLLATION_OID ||
		TupleDescAttr(desc, IDEM_KEYS_SCOPE - 1)->attcollation != C_COLLATION_OID)
		idem_args_version_mismatch("Table idem.keys has other columns.");
	if (heap->rd_rel->relkind != RELKIND_RELATION || heap->rd_rel->relam != HEAP_TABLE_AM_OID)
		unsupported("It is of another kind or has another access method.",
					"Drop and create the extension.");
	if (heap->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		unsupported("It is not logged: a crash would empty it, and every key could run again.",
					"Run ALTER TABLE idem.keys SET LOGGED.");
	if (heap->rd_rel->relrowsecurity)
		unsupported("Row security is enabled, which access by idem would bypass.",
					"Run ALTER TABLE idem.keys DISABLE ROW LEVEL SECURITY.");
	if (heap->trigdesc != NULL)
		unsupported("There is a trigger or a foreign key, which access by idem would bypass.",
					"Drop it; keep what depends on a key in a table of your own.");
	if (heap->rd_rel->relhasrules && heap->rd_rules != NULL)
		unsupported("There is a rule, which access by idem would bypass.",
					"Drop the rule.");
	for (int i = IDEM_KEYS_REQUEST; i <= desc->natts; i++)
	{
		/* the server would take it as proof that the column is stored */
		if (TupleDescAttr(desc, i - 1)->attnotnull)
			unsupported("A column that may be null has a not-null constraint.",
						"Run ALTER TABLE idem.keys ALTER COLUMN ... DROP NOT NULL.");
	}
	if (constr != NULL && (constr->num_check > 0 || constr->has_generated_stored))
		unsupported("There is a check constraint or a generated column, which access by idem would bypass.",
					"Drop it.");
}

/*
 * Which unique index may there be?  Besides the primary key only its double
 * while REINDEX CONCURRENTLY is at work: what conflicts in the one conflicts
 * in the other.
 */
static bool
is_unique_on_key(Form_pg_index form)
{
	return form->indnkeyatts == 2 &&
		form->indkey.values[0] == IDEM_KEYS_KEY &&
		form->indkey.values[1] == IDEM_KEYS_SCOPE;
}

static void
check_index(Relation index)
{
	Form_pg_index form = index->rd_index;

	for (int i = 0; i < form->indnatts; i++)
	{
		if (form->indkey.values[i] == 0)
			unsupported("There is an index on an expression, which idem would not keep up to date.",
						"Drop that index.");
	}
	if (!heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL))
		unsupported("There is a partial index, which idem would not keep up to date.",
					"Drop that index.");
	if (form->indisexclusion || (form->indisunique && !is_unique_on_key(form)))
		unsupported("There is another unique index or an exclusion constraint.",
					"Drop it: the primary key alone decides who runs.");
}

static void
forget_keys_relid(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == keys_relid)
		keys_relid = InvalidOid;
}

/* OID of idem.keys, looked up by name anew when the table has changed */
static Oid
get_keys_relid(void)
{
	static bool registered = false;

	if (!registered)
	{
		CacheRegisterRelcacheCallback(forget_keys_relid, (Datum) 0);
		registered = true;
	}
	if (!OidIsValid(keys_relid))
	{
		Oid namespace = get_namespace_oid("idem", true);

		if (plain_desc != NULL)
			FreeTupleDesc(plain_desc);
		plain_desc = NULL;
		if (OidIsValid(namespace))
			keys_relid = get_relname_relid("keys", namespace);
		if (!OidIsValid(keys_relid))
			idem_args_version_mismatch("There is no table idem.keys.");
	}
	return keys_relid;
}

void
idem_keytable_open(IdemKeyTable *table, LOCKMODE lockmode)
{
	Oid pkey;

	memset(table, 0, sizeof(*table));
	table->heap = table_open(get_keys_relid(), lockmode);
	check_shape(table->heap);
	pkey = idem_compat_primary_key(table->heap);
	if (!OidIsValid(pkey))
		unsupported("The primary key is missing.",
					"Run ALTER TABLE idem.keys ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope).");
	table->pkey = index_open(pkey, lockmode);
	if (!is_unique_on_key(table->pkey->rd_index))
		unsupported("The primary key is not on (key, scope).", "Drop and create the extension.");
	table->found = table_slot_create(table->heap, NULL);
}

/* The locks stay until the end of the transaction */
void
idem_keytable_close(IdemKeyTable *table)
{
	for (int i = 0; i < table->nindexes; i++)
	{
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

/*
 * The row of a plain claim has no columns of leases, as if they had been added
 * later.  With them the null bitmap would cost eight bytes in each row and in
 * each WAL record.
 */
static TupleDesc
row_desc(IdemKeyTable *table, bool with_lease)
{
	if (with_lease)
		return RelationGetDescr(table->heap);
	if (plain_desc == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(TopMemoryContext);

		plain_desc = CreateTupleDescTruncatedCopy(RelationGetDescr(table->heap), IDEM_KEYS_PLAIN_NATTS);
		MemoryContextSwitchTo(oldcontext);
	}
	return plain_desc;
}

/* A row of nulls to be filled and written */
TupleTableSlot *
idem_keytable_new_row(IdemKeyTable *table, bool with_lease)
{
	TupleDesc desc = row_desc(table, with_lease);

	if (table->written != NULL && table->written->tts_tupleDescriptor != desc)
	{
		ExecDropSingleTupleTableSlot(table->written);
		table->written = NULL;
	}
	if (table->written == NULL)
		table->written = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
	ExecClearTuple(table->written);
	memset(table->written->tts_isnull, true, desc->natts * sizeof(bool));
	return table->written;
}

static uint32
key_hash(const IdemKey *key)
{
	return hash_combine(hash_bytes((unsigned char *) VARDATA_ANY(key->key), VARSIZE_ANY_EXHDR(key->key)),
						hash_bytes((unsigned char *) VARDATA_ANY(key->scope), VARSIZE_ANY_EXHDR(key->scope)));
}

/*
 * One at a time puts a key into the unique index: for an insert from the look
 * that finds it absent until its entry is there, for an update that needs new
 * entries from the update on.  So who holds the lock overlooks no row.  That
 * is short, so others wait also if they want to wait for nobody; whatever may
 * take long, such as other locks, comes before.  Keys of the same hash share
 * the lock.  (INSERT ... ON CONFLICT needs no such lock, and instead a second
 * WAL record for each row.)
 */
void
idem_keytable_lock_key(IdemKeyTable *table, const IdemKey *key)
{
	LockDatabaseObject(RelationGetRelid(table->heap), key_hash(key), 0, ExclusiveLock);
}

void
idem_keytable_unlock_key(IdemKeyTable *table, const IdemKey *key)
{
	UnlockDatabaseObject(RelationGetRelid(table->heap), key_hash(key), 0, ExclusiveLock);
}

/* Scan for a key; the caller ends the scan */
IndexScanDesc
idem_keytable_scan_key(IdemKeyTable *table, const IdemKey *key, Snapshot snapshot)
{
	IndexScanDesc scan = idem_compat_index_beginscan(table->heap, table->pkey, snapshot, 2);
	ScanKeyData skeys[2];

	ScanKeyInit(&skeys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(key->key));
	ScanKeyInit(&skeys[1], 2, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(key->scope));
	index_rescan(scan, skeys, 2, NULL, 0);
	return scan;
}

/* Open the indexes that take entries; one that is just being built may not yet */
void
idem_keytable_open_indexes(IdemKeyTable *table)
{
	List *oids;
	ListCell *lc;

	if (table->indexes != NULL)
		return;
	oids = RelationGetIndexList(table->heap);
	table->indexes = palloc_array(Relation, list_length(oids));
	table->infos = palloc_array(IndexInfo *, list_length(oids));
	foreach (lc, oids)
	{
		bool is_pkey = lfirst_oid(lc) == RelationGetRelid(table->pkey);
		Relation index = is_pkey ? table->pkey : index_open(lfirst_oid(lc), RowExclusiveLock);

		if (index->rd_index->indisready)
		{
			check_index(index);
			table->indexes[table->nindexes] = index;
			table->infos[table->nindexes++] = BuildIndexInfo(index);
		}
		else
			index_close(index, NoLock);
	}
	list_free(oids);
}

/* One index entry for the row written; false if the key may be there already */
static bool
insert_index_entry(IdemKeyTable *table, int i, IndexUniqueCheck check, bool unchanged)
{
	Relation index = table->indexes[i];
	Form_pg_index form = index->rd_index;
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
	unique = index_insert(index, values, isnull, &table->written->tts_tid, table->heap,
						  form->indisunique ? check : UNIQUE_CHECK_NO, unchanged, table->infos[i]);
	return unique || !form->indisunique;
}

/* Take back a row that was just inserted */
static void
delete_written(IdemKeyTable *table)
{
	TM_FailureData tmfd;

	if (idem_compat_tuple_delete(table->heap, &table->written->tts_tid, GetCurrentCommandId(true),
								 GetActiveSnapshot(), false, &tmfd) != TM_Ok)
		elog(ERROR, "could not take back a row of idem.keys");
	CommandCounterIncrement();
}

/*
 * Insert the row.  The caller has locked the key and found it absent, so the
 * unique index has nothing to say, unless there is a row by somebody who does
 * not keep to the lock: other programs, and updates that were to be HOT and
 * found the page full.  False: look again, the key has just appeared.
 */
bool
idem_keytable_insert(IdemKeyTable *table)
{
	bool unique = true;

	idem_keytable_open_indexes(table);
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
 * Keep others from changing the row found until the end of the transaction.
 * TM_WouldBlock comes without wait only; TM_Updated and TM_Deleted mean: look
 * again.
 */
TM_Result
idem_keytable_lock(IdemKeyTable *table, bool wait)
{
	ItemPointerData tid = table->found->tts_tid;
	TM_FailureData tmfd;
	TM_Result result = table_tuple_lock(table->heap, &tid, GetActiveSnapshot(), table->found,
										GetCurrentCommandId(true), LockTupleNoKeyExclusive,
										wait ? LockWaitBlock : LockWaitSkip, 0, &tmfd);

	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a lock in idem.keys", result);
	return result;
}

/*
 * Entries of a new row version.  The key does not change and the old version
 * was ours to replace, so there is nothing to be checked, and nobody to wait
 * for.
 */
static void
insert_update_entries(IdemKeyTable *table, IdemUpdateIndexes which)
{
	idem_keytable_open_indexes(table);
	for (int i = 0; i < table->nindexes; i++)
	{
		if (idem_compat_index_needs_entry(table->indexes[i], which))
			(void) insert_index_entry(table, i, UNIQUE_CHECK_NO,
									  table->indexes[i]->rd_index->indisunique);
	}
}

/* Put the row written in the place of the one found; results as for lock, with wait */
TM_Result
idem_keytable_update(IdemKeyTable *table)
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
		elog(ERROR, "unexpected result %d of an update of idem.keys", result);
	if (result == TM_Ok)
	{
		if (which)
			insert_update_entries(table, which);
		CommandCounterIncrement();
	}
	return result;
}

/* The same for a row that is locked, where the time of expiry changes and so the indexes do */
void
idem_keytable_update_indexed(IdemKeyTable *table, const IdemKey *key)
{
	TM_Result result;

	idem_keytable_open_indexes(table);
	idem_keytable_lock_key(table, key);
	result = idem_keytable_update(table);
	idem_keytable_unlock_key(table, key);
	if (result != TM_Ok)
		elog(ERROR, "a row locked by this transaction was changed by another one");
}

/* Remove the row found; as for update, but TM_BeingModified without wait */
TM_Result
idem_keytable_delete(IdemKeyTable *table, bool wait)
{
	ItemPointerData tid = table->found->tts_tid;
	TM_FailureData tmfd;
	TM_Result result;

	CheckCmdReplicaIdentity(table->heap, CMD_DELETE);
	result = idem_compat_tuple_delete(table->heap, &tid, GetCurrentCommandId(true),
									  GetActiveSnapshot(), wait, &tmfd);
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a delete from idem.keys", result);
	if (result == TM_Ok)
		CommandCounterIncrement();
	return result;
}

/* The index that orders keys by their expiry */
Relation
idem_keytable_open_expiry_index(IdemKeyTable *table)
{
	List *oids = RelationGetIndexList(table->heap);
	ListCell *lc;

	foreach (lc, oids)
	{
		Relation index = index_open(lfirst_oid(lc), RowExclusiveLock);

		if (index->rd_index->indisvalid && index->rd_rel->relam == BTREE_AM_OID &&
			index->rd_index->indkey.values[0] == IDEM_KEYS_EXPIRES_AT &&
			index->rd_indoption[0] == 0)
		{
			check_index(index);
			list_free(oids);
			return index;
		}
		index_close(index, NoLock);
	}
	unsupported("There is no index that orders the keys by expires_at.",
				"Run CREATE INDEX CONCURRENTLY ON idem.keys (expires_at).");
}
