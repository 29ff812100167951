/*
 * changes.c
 *		Which tables has a run of a handler written, and how has their content changed (V3)?
 *
 * The statistics of the transaction count the rows that it has inserted, updated and deleted, per
 * table.  A mark holds these counts, and the file of each table.  What differs between the
 * mark before a run and the mark after it, the run has changed.  Partitions are tables of
 * their own here.  Changes of TOAST tables belong to the tables that they are of.
 *
 * Other sessions create, truncate and drop tables meanwhile.  That is no change of the run:
 * the row of pg_class tells which transaction has created or truncated a table, and only the
 * transaction that has dropped it holds the lock on it.
 *
 * To compare the content of a table there are two snapshots that differ only in their command id:
 * one shows the table before the run, the other one after it.  Both are made after the run, so
 * what other sessions have committed is the same in both.  The row versions that only one of the
 * two shows were removed or added by the run.  If the values of the removed and the added versions
 * are the same, in any order, the content is unchanged.  A query could not do this, because it
 * has one snapshot.
 *
 * Values are compared by their bytes, after decompression.  The table is read in one scan, with
 * the privileges of the caller; of unchanged rows only the header is read.
 */
#include "postgres.h"

#include <math.h>

#include "access/detoast.h"
#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/numeric.h"
#include "utils/rls.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

#include "testing/testing.h"

/* What a mark holds of one table */
typedef struct Mark
{
	Oid relid; /* hash key */
	Oid relfilenode;
	bool is_catalog;
	bool is_mine; /* this transaction has written the row of pg_class */
	char *name;
	int64 inserted;
	int64 updated;
	int64 deleted;
} Mark;

/* Mark all tables and materialized views of the database */
HTAB *
idem_changes_mark(void)
{
	HASHCTL ctl = {
		.keysize = sizeof(Oid), .entrysize = sizeof(Mark), .hcxt = CurrentMemoryContext};
	HTAB *marks = hash_create("idem tables", 512, &ctl, HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	Relation classes = table_open(RelationRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(classes, InvalidOid, false, NULL, 0, NULL);
	HeapTuple tuple;

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_class form = (Form_pg_class) GETSTRUCT(tuple);
		Datum relid = ObjectIdGetDatum(form->oid);
		Mark *mark;

		CHECK_FOR_INTERRUPTS();
		if (form->relkind != RELKIND_RELATION && form->relkind != RELKIND_MATVIEW)
			continue;
		mark = hash_search(marks, &form->oid, HASH_ENTER, NULL);
		mark->relfilenode = form->relfilenode;
		mark->is_catalog = form->relnamespace == PG_CATALOG_NAMESPACE;
		mark->is_mine = TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data));
		mark->name = quote_qualified_identifier(get_namespace_name_or_temp(form->relnamespace),
												NameStr(form->relname));
		mark->inserted = DatumGetInt64(DirectFunctionCall1(pg_stat_get_xact_tuples_inserted, relid));
		mark->updated = DatumGetInt64(DirectFunctionCall1(pg_stat_get_xact_tuples_updated, relid));
		mark->deleted = DatumGetInt64(DirectFunctionCall1(pg_stat_get_xact_tuples_deleted, relid));
	}
	systable_endscan(scan);
	table_close(classes, AccessShareLock);
	return marks;
}

static List *
add_change(List *changes, IdemChangeKind kind, const Mark *before, const Mark *after)
{
	IdemTableChange *change = palloc0_object(IdemTableChange);

	change->kind = after->is_catalog ? IDEM_CHANGE_CATALOG : kind;
	change->relid = after->relid;
	change->name = after->name;
	change->inserted = after->inserted - before->inserted;
	change->updated = after->updated - before->updated;
	change->deleted = after->deleted - before->deleted;
	return lappend(changes, change);
}

static int
compare_names(const ListCell *a, const ListCell *b)
{
	return strcmp(((const IdemTableChange *) lfirst(a))->name,
				  ((const IdemTableChange *) lfirst(b))->name);
}

/* V3: what has changed between two marks, a list of IdemTableChange by name, without content */
List *
idem_changes_between(HTAB *before, HTAB *after)
{
	static const Mark none = {0};
	List *changes = NIL;
	HASH_SEQ_STATUS status;
	Mark *mark;

	hash_seq_init(&status, after);
	while ((mark = hash_seq_search(&status)) != NULL)
	{
		const Mark *found = hash_search(before, &mark->relid, HASH_FIND, NULL);
		const Mark *old = found != NULL ? found : &none;

		if (mark->is_mine && found == NULL)
			changes = add_change(changes, IDEM_CHANGE_CREATED, old, mark);
		else if (mark->is_mine && old->relfilenode != mark->relfilenode)
			changes = add_change(changes, IDEM_CHANGE_REWRITTEN, old, mark);
		else if (old->inserted != mark->inserted || old->updated != mark->updated ||
				 old->deleted != mark->deleted)
			changes = add_change(changes, IDEM_CHANGE_ROWS, old, mark);
	}
	hash_seq_init(&status, before);
	while ((mark = hash_seq_search(&status)) != NULL)
	{
		LOCKTAG tag;

		/* who has dropped the table holds the lock on it until the end of the transaction */
		SET_LOCKTAG_RELATION(tag, MyDatabaseId, mark->relid);
		if (hash_search(after, &mark->relid, HASH_FIND, NULL) == NULL &&
			LockHeldByMe(&tag, AccessExclusiveLock, false))
			changes = add_change(changes, IDEM_CHANGE_DROPPED, mark, mark);
	}
	list_sort(changes, compare_names);
	return changes;
}

/* now() or statement_timestamp() */
static TimestampTz
get_moment(int i)
{
	return i == 0 ? GetCurrentTransactionStartTimestamp() : GetCurrentStatementStartTimestamp();
}

/* The same in microseconds since 1970 */
static int64
get_unix_moment(int i)
{
	return get_moment(i) +
		(int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY * USECS_PER_SEC;
}

/*
 * Is this number of microseconds computed from now() or statement_timestamp(), in the time zone
 * of the session or in UTC?  That is, do they differ by whole seconds after the moment was rounded
 * for the column?  Other times have the same fraction of a second only by chance.  A column that
 * does not keep microseconds has it by chance too often: there the difference must be whole days.
 */
static bool
is_from_now(int64 time, int32 typmod)
{
	int64 unit = 1;
	int64 period;

	for (int i = MAX_TIMESTAMP_PRECISION; typmod >= 0 && i > typmod; i--)
		unit *= 10;
	period = unit == 1 ? USECS_PER_SEC : USECS_PER_DAY;
	for (int i = 0; i < 4; i++)
	{
		int64 from = get_moment(i / 2);

		if (i % 2 == 1)
			from = DatumGetTimestamp(DirectFunctionCall1(timestamptz_timestamp, TimestampTzGetDatum(from)));
		from = (from + unit / 2) / unit * unit;
		if (time == from || (from % period != 0 && (time - from) % period == 0))
			return true;
	}
	return false;
}

/*
 * Is the number one of seconds, milliseconds or microseconds since 1970, computed from this time?
 * A whole number of seconds has no fraction by which to know it, so it must be equal.
 */
static bool
is_epoch_of(double number, int64 time)
{
	double seconds = (double) time / USECS_PER_SEC;
	double millis = (double) time / 1000;

	if (fabs(number - seconds) < 1)
		return number == floor(seconds) || number == rint(seconds) ||
			fabs(number - seconds) < 0.000001;
	/* within ten years: other numbers are no times */
	if (fabs(number - millis) < 10.0 * DAYS_PER_YEAR * SECS_PER_DAY * 1000)
		return fmod(number - floor(millis), 1000) == 0 || fmod(number - rint(millis), 1000) == 0 ||
			fabs(remainder(number - millis, 1000)) < 0.001;
	if (fabs(number - (double) time) < 10.0 * DAYS_PER_YEAR * SECS_PER_DAY * USECS_PER_SEC)
		return fmod(number - (double) time, USECS_PER_SEC) == 0;
	return false;
}

static int
look_at_number(double number)
{
	FullTransactionId xid = GetTopFullTransactionIdIfAny();
	int found = 0;

	if (is_epoch_of(number, get_unix_moment(0)) || is_epoch_of(number, get_unix_moment(1)))
		found |= IDEM_MOMENT_NOW;
	if (FullTransactionIdIsValid(xid) && number == (double) U64FromFullTransactionId(xid))
		found |= IDEM_MOMENT_XID;
	return found;
}

static int
look_at_numeric(Numeric number)
{
	return look_at_number(DatumGetFloat8(
		DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(number))));
}

/* Has the text the seconds of a moment in it, with milliseconds, as ":07.123"? */
static int
look_at_text(const char *text, int length)
{
	for (int i = 0; i < 4; i++)
	{
		/* cut off, and rounded */
		int64 millis = (get_unix_moment(i / 2) + (i % 2 == 0 ? 0 : 500)) / 1000;
		char seconds[16];
		int n = snprintf(seconds, sizeof(seconds), ":%02d.%03d", (int) (millis / 1000 % 60),
						 (int) (millis % 1000));

		/* PostgreSQL writes no zeros at the end */
		while (seconds[n - 1] == '0' && n > 5)
			n--;
		if (memmem(text, length, seconds, n) != NULL)
			return IDEM_MOMENT_NOW;
	}
	return 0;
}

/* V4: which of IdemMoment are in the strings and numbers of the value */
int
idem_changes_look_at_jsonb(Jsonb *value)
{
	JsonbIterator *it;
	JsonbValue v;
	JsonbIteratorToken token;
	int found = 0;

	if (value == NULL)
		return 0;
	it = JsonbIteratorInit(&value->root);
	while ((token = JsonbIteratorNext(&it, &v, false)) != WJB_DONE)
	{
		if (token != WJB_ELEM && token != WJB_VALUE)
			continue;
		if (v.type == jbvString)
			found |= look_at_text(v.val.string.val, v.val.string.len);
		else if (v.type == jbvNumeric)
			found |= look_at_numeric(v.val.numeric);
	}
	return found;
}

/*
 * Which of IdemMoment are in the value?  Both runs have the same now() and the same transaction
 * id, so what they write looks equal (V4).
 */
static int
look_at_value(const IdemColumnChange *column, Datum value)
{
	bool is_now = false;
	bool is_xid = false;

	switch (column->type)
	{
		case TIMESTAMPTZOID:
		case TIMESTAMPOID:
			is_now = is_from_now(DatumGetTimestampTz(value), column->typmod);
			break;
		case TIMEOID:
			is_now = is_from_now(DatumGetTimeADT(value), column->typmod);
			break;
		case TIMETZOID:
			is_now = is_from_now(DatumGetTimeTzADTP(value)->time, column->typmod);
			break;
		case DATEOID:
			is_now = DatumGetDateADT(value) == GetSQLCurrentDate();
			break;
		case XIDOID:
			is_xid = TransactionIdEquals(DatumGetTransactionId(value), GetTopTransactionIdIfAny());
			break;
		case XID8OID:
			is_xid = FullTransactionIdEquals(DatumGetFullTransactionId(value),
											 GetTopFullTransactionIdIfAny());
			break;
		case INT4OID:
			return look_at_number(DatumGetInt32(value));
		case INT8OID:
			return look_at_number((double) DatumGetInt64(value));
		case FLOAT8OID:
			return look_at_number(DatumGetFloat8(value));
		case NUMERICOID:
			return look_at_numeric(DatumGetNumeric(value));
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case JSONOID:
		{
			text *plain = DatumGetTextPP(value);

			return look_at_text(VARDATA_ANY(plain), VARSIZE_ANY_EXHDR(plain));
		}
		case JSONBOID:
			return idem_changes_look_at_jsonb(DatumGetJsonbP(value));
	}
	return (is_now ? IDEM_MOMENT_NOW : 0) | (is_xid ? IDEM_MOMENT_XID : 0);
}

/* Add the digest of some bytes to a sum, and copy it, if that is wanted */
static void
add_to_sum(IdemSum *sum, const void *bytes, Size len, uint8 *copy)
{
	IdemSum value;

	StaticAssertStmt(sizeof(value) == IDEM_SHA256_LEN, "a sum has the size of a digest");
	idem_sha256_hash(bytes, len, (uint8 *) &value);
	for (size_t i = 0; i < lengthof(sum->words); i++)
		sum->words[i] += value.words[i];
	if (copy != NULL)
		memcpy(copy, &value, sizeof(value));
}

/* Add a row to the rows that were added or removed */
static void
add_row(IdemTableChange *change, TupleTableSlot *row, bool added)
{
	TupleDesc desc = row->tts_tupleDescriptor;
	/* of each column: is it not null, and its digest */
	Size size = (Size) change->natts * (1 + IDEM_SHA256_LEN);
	uint8 *digests = palloc0(size);

	slot_getallattrs(row);
	for (int i = 0; i < change->natts; i++)
	{
		IdemColumnChange *column = &change->columns[i];
		Form_pg_attribute att = TupleDescAttr(desc, i);
		Datum value = row->tts_values[i];
		uint8 *digest = digests + (Size) i * (1 + IDEM_SHA256_LEN);
		const void *bytes = DatumGetPointer(value);
		Size len = att->attlen;

		if (column->is_ignored || row->tts_isnull[i])
			continue;
		if (att->attbyval)
		{
			bytes = &value;
			len = sizeof(value);
		}
		else if (att->attlen == -1)
		{
			struct varlena *plain = PG_DETOAST_DATUM_PACKED(value);

			bytes = VARDATA_ANY(plain);
			len = VARSIZE_ANY_EXHDR(plain);
		}
		else if (att->attlen == -2)
			len = strlen(bytes);
		*digest = 1;
		add_to_sum(added ? &column->added : &column->removed, bytes, len, digest + 1);
		if (added)
			column->moments |= look_at_value(column, value);
	}
	add_to_sum(added ? &change->added : &change->removed, digests, size, NULL);
	if (added)
		change->nadded++;
	else
		change->nremoved++;
}

/*
 * Look at all row versions of the table.  Those that this transaction has neither inserted, updated
 * nor deleted are skipped early, unless all rows count as added (before is NULL).  If in doubt, a
 * version is looked at.  Its header is read without a lock on the page, because no other
 * transaction resets what this one has set.
 */
static void
scan_table(IdemTableChange *change, Relation rel, Snapshot before, Snapshot after)
{
	TupleTableSlot *row = table_slot_create(rel, NULL);
	TableScanDesc scan = table_beginscan(rel, SnapshotAny, 0, NULL, SO_NONE);
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem row", ALLOCSET_DEFAULT_SIZES);

	while (table_scan_getnextslot(scan, ForwardScanDirection, row))
	{
		bool was_there = false;
		bool is_there;

		CHECK_FOR_INTERRUPTS();
		if (before != NULL)
		{
			HeapTupleHeader header = ExecFetchSlotHeapTuple(row, false, NULL)->t_data;

			if ((header->t_infomask & HEAP_XMAX_INVALID) != 0 &&
				!TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(header)))
				continue;
			was_there = table_tuple_satisfies_snapshot(rel, row, before);
		}
		is_there = table_tuple_satisfies_snapshot(rel, row, after);
		if (was_there != is_there)
		{
			MemoryContext oldcontext = MemoryContextSwitchTo(context);

			add_row(change, row, is_there);
			MemoryContextSwitchTo(oldcontext);
			MemoryContextReset(context);
		}
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(row);
	MemoryContextDelete(context);
}

/*
 * Why the content cannot be compared; NULL if it can (V3).  The caller must be able to read all
 * columns, except in the tables of idem: there only a change in rows that the caller's own
 * functions have written shows, and applications have no privilege on these tables.
 */
static const char *
find_obstacle(Relation rel, bool of_idem, int64 max_size)
{
	Oid relid = RelationGetRelid(rel);
	int64 size;

	if (rel->rd_rel->relam != HEAP_TABLE_AM_OID)
		return "Its access method is not heap.";
	if (!of_idem)
	{
		if (object_aclcheck(NamespaceRelationId, RelationGetNamespace(rel), GetUserId(),
							ACL_USAGE) != ACLCHECK_OK ||
			(pg_class_aclcheck(relid, GetUserId(), ACL_SELECT) != ACLCHECK_OK &&
			 pg_attribute_aclcheck_all(relid, GetUserId(), ACL_SELECT, ACLMASK_ALL) != ACLCHECK_OK))
			return "The caller lacks the privilege to read it.";
		if (check_enable_rls(relid, InvalidOid, true) == RLS_ENABLED)
			return "Row security applies to the caller.";
	}
	size = (int64) RelationGetNumberOfBlocks(rel) * BLCKSZ;
	if (size > max_size)
		return psprintf("It has " INT64_FORMAT " bytes, and max_table_size is " INT64_FORMAT ".",
						size, max_size);
	return NULL;
}

/*
 * Find out how the run between these two command ids has changed the content of the table (V3).
 * Of a table that was rewritten or created, read the whole content.  A table whose main file is
 * larger than max_size is not read.
 */
void
idem_changes_compare(IdemTableChange *change, CommandId before, CommandId after, int64 max_size)
{
	/* the handler may have written in a subtransaction that it has rolled back with its locks */
	Relation rel = try_table_open(change->relid, AccessShareLock);
	TupleDesc desc;
	Snapshot snapshot;
	Snapshot snapshot_before = NULL;
	bool of_idem;

	if (rel == NULL)
	{
		change->not_compared = "Another session has dropped it.";
		return;
	}
	of_idem = RelationGetNamespace(rel) == get_namespace_oid("idem", true);
	change->is_transient = rel->rd_rel->relpersistence == RELPERSISTENCE_TEMP;
	change->is_history = of_idem && strcmp(RelationGetRelationName(rel), "job_log") == 0;
	change->not_compared = find_obstacle(rel, of_idem, max_size);
	if (change->not_compared != NULL)
	{
		table_close(rel, AccessShareLock);
		return;
	}

	desc = RelationGetDescr(rel);
	change->natts = desc->natts;
	change->columns = palloc0_array(IdemColumnChange, desc->natts);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		IdemColumnChange *column = &change->columns[i];

		column->name = att->attname;
		/* in the tables of idem these are different in each run, and mean no other effect */
		column->is_ignored = att->attisdropped ||
			(of_idem && (att->atttypid == TIMESTAMPTZOID || att->atttypid == INT8OID));
		column->typmod = att->atttypmod;
		if (!column->is_ignored)
			column->type = getBaseTypeAndTypmod(att->atttypid, &column->typmod);
	}

	snapshot = RegisterSnapshot(GetLatestSnapshot());
	snapshot->curcid = after;
	PushCopiedSnapshot(snapshot);
	if (change->kind == IDEM_CHANGE_ROWS)
	{
		snapshot_before = GetActiveSnapshot();
		snapshot_before->curcid = before;
	}
	scan_table(change, rel, snapshot_before, snapshot);
	PopActiveSnapshot();
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
}
