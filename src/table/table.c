/*
 * table.c
 *		Our tables by way of the table and index access methods.
 *
 * What ExecInsert() and its kin do for a table with triggers, rules, policies
 * and expressions is left out here.  So a table that has grown any of these
 * is refused (shape.c).
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
#include "catalog/pg_index.h"
#include "catalog/pg_statistic.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "idem.h"

/* The tables that were looked up in this session, see get_relid() */
static IdemTableDef *known_tables = NULL;

static void
forget_relid(Datum arg, Oid relid)
{
	for (IdemTableDef *def = known_tables; def != NULL; def = def->next)
	{
		if (relid == InvalidOid || relid == def->relid)
			def->relid = InvalidOid;
	}
}

static void
remember_table(IdemTableDef *def)
{
	if (known_tables == NULL)
		CacheRegisterRelcacheCallback(forget_relid, (Datum) 0);
	def->next = known_tables;
	def->is_known = true;
	known_tables = def;
}

/* OID of the table, looked up by name anew when it has changed; invalid if there is none */
static Oid
get_relid(IdemTableDef *def)
{
	if (!def->is_known)
		remember_table(def);
	if (!OidIsValid(def->relid))
	{
		Oid namespace = get_namespace_oid("idem", true);

		if (def->short_desc != NULL)
			FreeTupleDesc(def->short_desc);
		def->short_desc = NULL;
		if (OidIsValid(namespace))
			def->relid = get_relname_relid(def->name, namespace);
	}
	return def->relid;
}

void
idem_table_open(IdemTable *table, IdemTableDef *def, LOCKMODE lockmode)
{
	Oid relid = get_relid(def);
	Oid pkey;

	if (!OidIsValid(relid))
		idem_args_version_mismatch(psprintf("There is no table idem.%s.", def->name));
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
		idem_shape_refuse(def, "The primary key is on other columns.", "Drop and create the extension.");
	table->found = table_slot_create(table->heap, NULL);
}

/* The locks stay until the end of the transaction */
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

/*
 * A short row has no columns from some point on, as if they had been added
 * later.  With them the null bitmap would cost eight bytes in each row and in
 * each WAL record.
 */
static TupleDesc
row_desc(IdemTable *table, bool full)
{
	IdemTableDef *def = table->def;

	if (full)
		return RelationGetDescr(table->heap);
	if (def->short_desc == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(TopMemoryContext);

		def->short_desc = CreateTupleDescTruncatedCopy(RelationGetDescr(table->heap), def->short_natts);
		MemoryContextSwitchTo(oldcontext);
	}
	return def->short_desc;
}

/* A row of nulls to be filled and written */
TupleTableSlot *
idem_table_new_row(IdemTable *table, bool full)
{
	TupleDesc desc = row_desc(table, full);

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

/*
 * A lock on a hash of what rows are told apart by.  It is held for a moment,
 * so others wait for it also if they want to wait for nobody; whatever may
 * take long, such as other locks, comes before.  What has the same 48 lowest
 * bits shares the lock: a lock tag has no room for more.
 */
void
idem_table_lock_hash(IdemTable *table, int64 hash)
{
	LockDatabaseObject(RelationGetRelid(table->heap), (uint32) hash, (uint16) (hash >> 32), ExclusiveLock);
}

void
idem_table_unlock_hash(IdemTable *table, int64 hash)
{
	UnlockDatabaseObject(RelationGetRelid(table->heap), (uint32) hash, (uint16) (hash >> 32), ExclusiveLock);
}

/* Open the indexes that take entries; one that is just being built may not yet */
void
idem_table_open_indexes(IdemTable *table)
{
	MemoryContext oldcontext;
	List *oids;
	ListCell *lc;

	if (table->indexes != NULL)
		return;
	/* nobody who locks the TOAST table shall make us wait in the middle of a write */
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
 * The index that orders the rows by these columns; it may leave out those with
 * null in the first one.
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

/* What an insert into the index needs to know, made with the first one */
static IndexInfo *
index_info(IdemTable *table, int i)
{
	if (table->infos[i] == NULL)
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(table->context);

		table->infos[i] = BuildIndexInfo(table->indexes[i]);
		MemoryContextSwitchTo(oldcontext);
	}
	return table->infos[i];
}

/* One index entry for the row written; false if the key may be there already */
static bool
insert_index_entry(IdemTable *table, int i, IndexUniqueCheck check, bool unchanged)
{
	Relation index = table->indexes[i];
	Form_pg_index form = index->rd_index;
	IndexInfo *info = index_info(table, i);
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
	if (isnull[0] && info->ii_Predicate != NIL)
		return true;
	unique = index_insert(index, values, isnull, &table->written->tts_tid, table->heap,
						  form->indisunique ? check : UNIQUE_CHECK_NO, unchanged, info);
	return unique || !form->indisunique;
}

/* Take back a row that was just inserted */
static void
delete_written(IdemTable *table)
{
	TM_FailureData tmfd;

	if (idem_compat_tuple_delete(table->heap, &table->written->tts_tid, GetCurrentCommandId(true),
								 GetActiveSnapshot(), false, &tmfd) != TM_Ok)
		elog(ERROR, "could not take back a row of idem.%s", table->def->name);
	CommandCounterIncrement();
}

/*
 * Insert the row.  The caller knows that its primary key is absent, so the
 * unique index has nothing to say, unless there is a row by somebody who does
 * not keep to the rules: other programs, and for keys updates that were to be
 * HOT and found the page full.  False: look again, it has just appeared.
 */
bool
idem_table_insert(IdemTable *table)
{
	bool unique = true;

	idem_table_open_indexes(table);
	/* it is stored already if the caller has made room and tries again */
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
 * Keep others from changing the row at this place until the end of the
 * transaction; it is the one found then.  TM_WouldBlock comes with
 * LockWaitSkip only; TM_Updated and TM_Deleted mean: look again.
 */
TM_Result
idem_table_lock(IdemTable *table, ItemPointerData tid, LockTupleMode mode, LockWaitPolicy policy)
{
	TM_FailureData tmfd;
	TM_Result result = table_tuple_lock(table->heap, &tid, GetActiveSnapshot(), table->found,
										GetCurrentCommandId(true), mode, policy, 0, &tmfd);

	if (result == TM_Invisible || result == TM_SelfModified)
		elog(ERROR, "unexpected result %d of a lock in idem.%s", result, table->def->name);
	return result;
}

/*
 * Entries of a new row version.  The key does not change and the old version
 * was ours to replace, so there is nothing to be checked, and nobody to wait
 * for.
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

/* Put the row written in the place of the one found; results as for lock, with waiting */
TM_Result
idem_table_update(IdemTable *table)
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

/* The same for a row that is locked, while nobody looks at rows of this hash to insert one */
void
idem_table_update_hashed(IdemTable *table, int64 hash)
{
	TM_Result result;

	idem_table_open_indexes(table);
	idem_table_lock_hash(table, hash);
	result = idem_table_update(table);
	idem_table_unlock_hash(table, hash);
	if (result != TM_Ok)
		elog(ERROR, "a row locked by this transaction was changed by another one");
}

/* Remove the row found; as for update, but TM_BeingModified without wait */
TM_Result
idem_table_delete(IdemTable *table, bool wait)
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

/* May cleanup remove another row?  If not, there may be more to remove. */
bool
idem_table_may_go_on(IdemCleanup *cleanup)
{
	CHECK_FOR_INTERRUPTS();
	cleanup->more = cleanup->removed >= cleanup->batch ||
		(cleanup->deadline != 0 && idem_clock_steady() >= cleanup->deadline);
	return !cleanup->more;
}

static IndexScanDesc
begin_expired(IdemTable *table, Relation index, Snapshot snapshot, TimestampTz from)
{
	IndexScanDesc scan = idem_compat_index_beginscan(table->heap, index, snapshot, 2);
	ScanKeyData keys[2];

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE, TimestampTzGetDatum(from));
	ScanKeyInit(&keys[1], 1, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE, TimestampTzGetDatum(idem_clock_now()));
	index_rescan(scan, keys, 2, NULL, 0);
	return scan;
}

/* What share of the rows from there on has expired, by the histogram of the column?  All, if there is none. */
static double
share_expired(IdemTable *table, AttrNumber expires_at, TimestampTz from)
{
	TimestampTz now = idem_clock_now();
	HeapTuple stats = SearchSysCache3(STATRELATTINH, ObjectIdGetDatum(RelationGetRelid(table->heap)),
									  Int16GetDatum(expires_at), BoolGetDatum(false));
	AttStatsSlot histogram;
	int n = 0;
	int expired = 0;

	if (!HeapTupleIsValid(stats))
		return 1;
	if (get_attstatsslot(&histogram, stats, STATISTIC_KIND_HISTOGRAM, InvalidOid, ATTSTATSSLOT_VALUES))
	{
		for (int i = 0; i < histogram.nvalues; i++)
		{
			TimestampTz bound = DatumGetTimestampTz(histogram.values[i]);

			n += bound >= from;
			expired += bound >= from && bound <= now;
		}
		free_attstatsslot(&histogram);
	}
	ReleaseSysCache(stats);
	return n > 0 ? (double) expired / n : 1;
}

/* About how many rows are there, and how many of them have expired since then? */
static void
estimate_left(IdemTable *table, AttrNumber expires_at, IdemCleanup *cleanup)
{
	int64 rows = DatumGetInt64(DirectFunctionCall1(pg_stat_get_live_tuples,
												   ObjectIdGetDatum(RelationGetRelid(table->heap))));

	cleanup->rows = rows > 0 ? rows : (int64) Max(table->heap->rd_rel->reltuples, 0);
	cleanup->left = (int64) (cleanup->rows * share_expired(table, expires_at, cleanup->place.from));
}

/*
 * Remove rows whose time in this column has passed, oldest first; remove() says
 * whether it has removed the row found.  A row that somebody else has locked,
 * replaced or removed is left alone.
 */
void
idem_table_cleanup(IdemTable *table, AttrNumber expires_at, bool (*remove)(IdemTable *), IdemCleanup *cleanup)
{
	Relation index = idem_table_find_index(table, &expires_at, 1,
										   "There is no index that orders the rows by expires_at.",
										   psprintf("Run CREATE INDEX CONCURRENTLY ON idem.%s (expires_at).", table->def->name));
	IndexScanDesc scan = begin_expired(table, index, cleanup->snapshot, cleanup->place.from);

	while (idem_table_may_go_on(cleanup) && index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		cleanup->place.from = idem_row_timestamp(table, expires_at);
		if (remove(table))
			cleanup->removed++;
	}
	index_endscan(scan);
	if (cleanup->more)
		estimate_left(table, expires_at, cleanup);
}
