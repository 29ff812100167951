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
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "nodes/execnodes.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

#include "idem.h"

/* Invalid: not looked up yet */
static Oid keys_relid = InvalidOid;

/* Types of the columns, in the order of IdemKeyColumn */
static const Oid column_types[IDEM_KEYS_NATTS] = {
	TIMESTAMPTZOID, TIMESTAMPTZOID, REGROLEOID, TEXTOID,
	TEXTOID, BYTEAOID, TIMESTAMPTZOID, JSONBOID};

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

	if (!idem_args_desc_has(desc, column_types, IDEM_KEYS_NATTS))
		idem_args_version_mismatch("Table idem.keys has other columns.");
	if (heap->rd_rel->relkind != RELKIND_RELATION || heap->rd_rel->relam != HEAP_TABLE_AM_OID)
		unsupported("It is of another kind or has another access method.",
					"Drop and create the extension.");
	if (heap->rd_rel->relrowsecurity)
		unsupported("Row security is enabled, which access by idem would bypass.",
					"Run ALTER TABLE idem.keys DISABLE ROW LEVEL SECURITY.");
	if (heap->trigdesc != NULL)
		unsupported("There is a trigger or a foreign key, which access by idem would bypass.",
					"Drop it; keep what depends on a key in a table of your own.");
	if (heap->rd_rel->relhasrules && heap->rd_rules != NULL)
		unsupported("There is a rule, which access by idem would bypass.",
					"Drop the rule.");
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

/* OID of idem.keys, looked up anew when the table has changed */
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

	table->lockmode = lockmode;
	table->heap = table_open(get_keys_relid(), lockmode);
	check_shape(table->heap);
	pkey = idem_compat_primary_key(table->heap);
	if (!OidIsValid(pkey))
		unsupported("The primary key is missing.",
					"Run ALTER TABLE idem.keys ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope).");
	table->pkey = index_open(pkey, lockmode);
	if (!is_unique_on_key(table->pkey->rd_index))
		unsupported("The primary key is not on (key, scope).", "Drop and create the extension.");
	table->slot = table_slot_create(table->heap, NULL);
}

/* The locks stay until the end of the transaction */
void
idem_keytable_close(IdemKeyTable *table)
{
	ExecDropSingleTupleTableSlot(table->slot);
	index_close(table->pkey, NoLock);
	table_close(table->heap, NoLock);
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

/* One index entry; false if the key may be there already */
static bool
insert_index_entry(IdemKeyTable *table, Relation index, TupleTableSlot *row, IndexUniqueCheck check)
{
	Form_pg_index form = index->rd_index;
	IndexInfo *info;
	Datum values[INDEX_MAX_KEYS];
	bool isnull[INDEX_MAX_KEYS];
	bool unique;

	check_index(index);
	for (int i = 0; i < form->indnatts; i++)
		values[i] = slot_getattr(row, form->indkey.values[i], &isnull[i]);

	info = BuildIndexInfo(index);
	unique = index_insert(index, values, isnull, &row->tts_tid, table->heap,
						  form->indisunique ? check : UNIQUE_CHECK_NO, false, info);
	idem_compat_index_insert_cleanup(index, info);
	pfree(info);
	return unique || !form->indisunique;
}

/*
 * Entries of a new row version in the indexes that need one.  With
 * UNIQUE_CHECK_PARTIAL a conflict ends it and gives false.
 */
static bool
insert_index_entries(IdemKeyTable *table, TupleTableSlot *row, IndexUniqueCheck check,
					 const IdemUpdateIndexes *which)
{
	List *indexes = RelationGetIndexList(table->heap);
	ListCell *lc;
	bool unique = true;

	foreach (lc, indexes)
	{
		bool is_pkey = lfirst_oid(lc) == RelationGetRelid(table->pkey);
		Relation index = is_pkey ? table->pkey : index_open(lfirst_oid(lc), RowExclusiveLock);

		/* one that is just being built may not be ready for entries yet */
		if (index->rd_index->indisready &&
			(which == NULL || idem_compat_index_needs_entry(index, *which)))
			unique = insert_index_entry(table, index, row, check);
		if (!is_pkey)
			index_close(index, NoLock);
		if (!unique)
			break;
	}
	list_free(indexes);
	return unique;
}

/*
 * Insert a row unless its key is there, as INSERT ... ON CONFLICT does: the
 * unique index is the arbiter, and of two that come at the same time one is
 * told so without an error.  False: look again, the key has just appeared.
 */
bool
idem_keytable_insert(IdemKeyTable *table, TupleTableSlot *row)
{
	TransactionId xid = GetCurrentTransactionId();
	uint32 token = SpeculativeInsertionLockAcquire(xid);
	bool unique;

	table_tuple_insert_speculative(table->heap, row, GetCurrentCommandId(true), 0, NULL, token);
	unique = insert_index_entries(table, row, UNIQUE_CHECK_PARTIAL, NULL);
	table_tuple_complete_speculative(table->heap, row, token, unique);
	SpeculativeInsertionLockRelease(xid);
	CommandCounterIncrement();
	return unique;
}

/* Lock the row at tid for an update, unless somebody else has locked it */
static TM_Result
lock_without_wait(IdemKeyTable *table, ItemPointer tid)
{
	TM_FailureData tmfd;

	return table_tuple_lock(table->heap, tid, GetActiveSnapshot(), table->slot,
							GetCurrentCommandId(true), LockTupleNoKeyExclusive,
							LockWaitSkip, 0, &tmfd);
}

/*
 * Put a new version in the place of the row at tid.  TM_WouldBlock comes
 * without wait only; TM_Updated and TM_Deleted mean: look again.
 */
TM_Result
idem_keytable_update(IdemKeyTable *table, ItemPointer tid, TupleTableSlot *row, bool wait)
{
	TM_FailureData tmfd;
	LockTupleMode lockmode;
	IdemUpdateIndexes which;
	TM_Result result = TM_Ok;

	CheckCmdReplicaIdentity(table->heap, CMD_UPDATE);
	/* the update itself knows only how to wait */
	if (!wait)
		result = lock_without_wait(table, tid);
	if (result == TM_Ok)
		result = idem_compat_tuple_update(table->heap, tid, row, GetCurrentCommandId(true),
										  GetActiveSnapshot(), &tmfd, &lockmode, &which);
	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of an update of idem.keys", result);
	if (result == TM_Ok)
	{
		if (which)
			(void) insert_index_entries(table, row, UNIQUE_CHECK_YES, &which);
		CommandCounterIncrement();
	}
	return result;
}

/* Remove the row at tid; as for update, but TM_BeingModified without wait */
TM_Result
idem_keytable_delete(IdemKeyTable *table, ItemPointer tid, bool wait)
{
	TM_FailureData tmfd;
	TM_Result result;

	CheckCmdReplicaIdentity(table->heap, CMD_DELETE);
	result = idem_compat_tuple_delete(table->heap, tid, GetCurrentCommandId(true),
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
	List *indexes = RelationGetIndexList(table->heap);
	ListCell *lc;

	foreach (lc, indexes)
	{
		Relation index = index_open(lfirst_oid(lc), table->lockmode);

		if (index->rd_index->indisvalid && index->rd_rel->relam == BTREE_AM_OID &&
			index->rd_index->indkey.values[0] == IDEM_KEYS_EXPIRES_AT)
		{
			list_free(indexes);
			return index;
		}
		index_close(index, NoLock);
	}
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("table \"%s\" is not as idem has made it", "idem.keys"),
			errdetail("It has no index on \"%s\".", "expires_at"),
			errhint("Run CREATE INDEX CONCURRENTLY ON idem.keys (expires_at)."));
}
