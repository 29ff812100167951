/*
 * content.c
 *		Compare the content of a table before and after a run (V3).
 *
 * Two snapshots differ only in their command id: one shows the table before the run, the other
 * one after it.  Both are made after the run, so what other sessions have committed is the same
 * in both.  The row versions that only one of the two shows were removed or added by
 * the run.  If the values of the removed and the added versions are the same, in any order, the
 * content is unchanged.
 *
 * Values are compared by their bytes, after decompression.  The table is read in one scan, with
 * the privileges of the caller; of unchanged rows only the header is read.
 */
#include "postgres.h"

#include <math.h>

#include "access/detoast.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/date.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/numeric.h"
#include "utils/rls.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

#include "testing/testing.h"

/* The comparison of one table */
typedef struct Comparison
{
	IdemTableChange *change;
	Relation rel;
	TupleTableSlot *slot;
	Snapshot before; /* NULL: all rows count as added */
	Snapshot after;
	MemoryContext row_context; /* reset after each row */
} Comparison;

bool
idem_content_equals(const IdemSum *a, const IdemSum *b)
{
	return memcmp(a, b, sizeof(IdemSum)) == 0;
}

static void
add_to_sum(IdemSum *sum, const uint8 *digest)
{
	IdemSum value;

	StaticAssertStmt(sizeof(value) == IDEM_SHA256_LEN, "a sum has the size of a digest");
	memcpy(&value, digest, sizeof(value));
	for (size_t i = 0; i < lengthof(sum->words); i++)
		sum->words[i] += value.words[i];
}

/* Digest of a value, by its bytes */
static void
digest_value(Form_pg_attribute att, Datum value, uint8 *digest)
{
	if (att->attbyval)
		idem_sha256_hash(&value, sizeof(value), digest);
	else if (att->attlen == -1)
	{
		struct varlena *plain = PG_DETOAST_DATUM_PACKED(value);

		idem_sha256_hash(VARDATA_ANY(plain), VARSIZE_ANY_EXHDR(plain), digest);
	}
	else if (att->attlen == -2)
		idem_sha256_hash(DatumGetCString(value), strlen(DatumGetCString(value)), digest);
	else
		idem_sha256_hash(DatumGetPointer(value), att->attlen, digest);
}

/*
 * Is the time computed from the other one?  That is, do they differ by whole seconds after the
 * other one was rounded for the column?  A column that does not keep microseconds has the same
 * fraction of a second by chance too often: there the difference must be whole days.
 */
static bool
is_computed_from(int64 time, int64 from, int32 typmod)
{
	int64 unit = 1;
	int64 period;

	for (int i = MAX_TIMESTAMP_PRECISION; typmod >= 0 && i > typmod; i--)
		unit *= 10;
	period = unit == 1 ? USECS_PER_SEC : USECS_PER_DAY;
	from = (from + unit / 2) / unit * unit;
	return time == from || (from % period != 0 && (time - from) % period == 0);
}

/*
 * Is this number of microseconds computed from now() or statement_timestamp(), in the time zone
 * of the session or in UTC?  Other times have the same fraction of a second only by chance.
 */
static bool
is_from_now(int64 time, int32 typmod)
{
	const TimestampTz times[] = {
		GetCurrentTransactionStartTimestamp(), GetCurrentStatementStartTimestamp()};

	for (size_t i = 0; i < lengthof(times); i++)
	{
		Datum local = DirectFunctionCall1(timestamptz_timestamp, TimestampTzGetDatum(times[i]));

		if (is_computed_from(time, times[i], typmod) ||
			is_computed_from(time, DatumGetTimestamp(local), typmod))
			return true;
	}
	return false;
}

/* now() and statement_timestamp() in microseconds since 1970 */
static int64
unix_time(TimestampTz time)
{
	return time +
		(int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY * USECS_PER_SEC;
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

	if (is_epoch_of(number, unix_time(GetCurrentTransactionStartTimestamp())) ||
		is_epoch_of(number, unix_time(GetCurrentStatementStartTimestamp())))
		found |= IDEM_MOMENT_NOW;
	if (FullTransactionIdIsValid(xid) && number == (double) U64FromFullTransactionId(xid))
		found |= IDEM_MOMENT_XID;
	return found;
}

/* Has the text the seconds of this time in it, with milliseconds, as ":07.123"? */
static bool
has_seconds_of(const char *text, int length, TimestampTz time)
{
	int64 millis = unix_time(time) / 1000;

	/* cut off, and rounded */
	for (int i = 0; i < 2; i++, millis = (unix_time(time) + 500) / 1000)
	{
		char seconds[16];
		int n = snprintf(seconds, sizeof(seconds), ":%02d.%03d", (int) (millis / 1000 % 60),
						 (int) (millis % 1000));

		/* PostgreSQL writes no zeros at the end */
		while (seconds[n - 1] == '0' && n > 5)
			n--;
		if (memmem(text, length, seconds, n) != NULL)
			return true;
	}
	return false;
}

static int
look_at_text(const char *text, int length)
{
	return has_seconds_of(text, length, GetCurrentTransactionStartTimestamp()) ||
			has_seconds_of(text, length, GetCurrentStatementStartTimestamp()) ?
		IDEM_MOMENT_NOW :
		0;
}

static double
numeric_to_double(Numeric number)
{
	return DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(number)));
}

/* V4: which of IdemMoment are in the strings and numbers of the value */
int
idem_content_look_at_jsonb(Jsonb *value)
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
			found |= look_at_number(numeric_to_double(v.val.numeric));
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
		case INT4OID:
			return look_at_number(DatumGetInt32(value));
		case INT8OID:
			return look_at_number((double) DatumGetInt64(value));
		case FLOAT8OID:
			return look_at_number(DatumGetFloat8(value));
		case NUMERICOID:
			return look_at_number(numeric_to_double(DatumGetNumeric(value)));
		case XIDOID:
			return TransactionIdEquals(DatumGetTransactionId(value),
									   GetTopTransactionIdIfAny()) ?
				IDEM_MOMENT_XID :
				0;
		case XID8OID:
			return FullTransactionIdEquals(DatumGetFullTransactionId(value),
										   GetTopFullTransactionIdIfAny()) ?
				IDEM_MOMENT_XID :
				0;
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case JSONOID:
		{
			text *plain = DatumGetTextPP(value);

			return look_at_text(VARDATA_ANY(plain), VARSIZE_ANY_EXHDR(plain));
		}
		case JSONBOID:
			return idem_content_look_at_jsonb(DatumGetJsonbP(value));
	}
	return is_now ? IDEM_MOMENT_NOW : 0;
}

/* Add the row in the slot to the rows that were added or removed */
static void
add_row(Comparison *comparison, bool added)
{
	IdemTableChange *change = comparison->change;
	TupleDesc desc = RelationGetDescr(comparison->rel);
	MemoryContext oldcontext = MemoryContextSwitchTo(comparison->row_context);
	/* of each column: is it not null, and its digest */
	uint8 *row = palloc0((Size) change->natts * (1 + IDEM_SHA256_LEN));
	uint8 digest[IDEM_SHA256_LEN];

	slot_getallattrs(comparison->slot);
	for (int i = 0; i < change->natts; i++)
	{
		IdemColumnChange *column = &change->columns[i];
		uint8 *at = row + (Size) i * (1 + IDEM_SHA256_LEN);

		if (column->is_ignored || comparison->slot->tts_isnull[i])
			continue;
		at[0] = 1;
		digest_value(TupleDescAttr(desc, i), comparison->slot->tts_values[i], at + 1);
		add_to_sum(added ? &column->added : &column->removed, at + 1);
		if (added)
			column->moments |= look_at_value(column, comparison->slot->tts_values[i]);
	}
	idem_sha256_hash(row, (Size) change->natts * (1 + IDEM_SHA256_LEN), digest);
	add_to_sum(added ? &change->added : &change->removed, digest);
	if (added)
		change->nadded++;
	else
		change->nremoved++;
	MemoryContextSwitchTo(oldcontext);
	MemoryContextReset(comparison->row_context);
}

/*
 * Has this transaction neither inserted, updated nor deleted the row version?  If in doubt: no.
 * No lock on the page is needed, because no other transaction resets what this one has set.
 */
static bool
is_untouched(TupleTableSlot *slot)
{
	HeapTupleHeader header = ExecFetchSlotHeapTuple(slot, false, NULL)->t_data;

	return (header->t_infomask & HEAP_XMAX_INVALID) != 0 &&
		!TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(header));
}

/* Look at all row versions */
static void
scan_table(Comparison *comparison)
{
	Relation rel = comparison->rel;
	TupleTableSlot *slot = comparison->slot = table_slot_create(rel, NULL);
	TableScanDesc scan = idem_compat_beginscan(rel, SnapshotAny);

	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		bool before = false;
		bool after;

		CHECK_FOR_INTERRUPTS();
		if (comparison->before != NULL)
		{
			if (is_untouched(slot))
				continue;
			before = table_tuple_satisfies_snapshot(rel, slot, comparison->before);
		}
		after = table_tuple_satisfies_snapshot(rel, slot, comparison->after);
		if (before != after)
			add_row(comparison, after);
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
}

static bool
is_table_of_idem(Relation rel)
{
	return RelationGetNamespace(rel) == get_namespace_oid("idem", true);
}

/* May the caller read all columns of the table? */
static bool
may_read(Relation rel)
{
	Oid relid = RelationGetRelid(rel);

	return object_aclcheck(NamespaceRelationId, RelationGetNamespace(rel), GetUserId(),
						   ACL_USAGE) == ACLCHECK_OK &&
		(pg_class_aclcheck(relid, GetUserId(), ACL_SELECT) == ACLCHECK_OK ||
		 pg_attribute_aclcheck_all(relid, GetUserId(), ACL_SELECT, ACLMASK_ALL) == ACLCHECK_OK);
}

/*
 * Why the content cannot be compared; NULL if it can (V3).  The privileges of the caller count,
 * except for the tables of idem: there only a change in rows that the caller's own functions
 * have written shows, and applications have no privilege on these tables.
 */
static const char *
find_obstacle(Relation rel, int64 max_size)
{
	int64 size;

	if (rel->rd_rel->relam != HEAP_TABLE_AM_OID)
		return "Its access method is not heap.";
	if (!is_table_of_idem(rel))
	{
		if (!may_read(rel))
			return "The caller lacks the privilege to read it.";
		if (check_enable_rls(RelationGetRelid(rel), InvalidOid, true) == RLS_ENABLED)
			return "Row security applies to the caller.";
	}
	size = (int64) RelationGetNumberOfBlocks(rel) * BLCKSZ;
	if (size > max_size)
		return psprintf("It has " INT64_FORMAT " bytes, and max_table_size is " INT64_FORMAT ".",
						size, max_size);
	return NULL;
}

/*
 * Prepare the columns.  In the tables of idem, times, job numbers and tokens are not compared:
 * they are different in each run, and mean no other effect.
 */
static void
begin_columns(IdemTableChange *change, Relation rel)
{
	TupleDesc desc = RelationGetDescr(rel);
	bool of_idem = is_table_of_idem(rel);

	change->natts = desc->natts;
	change->columns = palloc0_array(IdemColumnChange, desc->natts);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		IdemColumnChange *column = &change->columns[i];

		column->name = att->attname;
		column->is_ignored = att->attisdropped ||
			(of_idem && (att->atttypid == TIMESTAMPTZOID || att->atttypid == INT8OID));
		if (column->is_ignored)
			continue;
		column->typmod = att->atttypmod;
		column->type = getBaseTypeAndTypmod(att->atttypid, &column->typmod);
	}
}

/*
 * Find out how the run between these two command ids has changed the content of the table (V3).
 * Of a table that was rewritten or created, read the whole content.  A table whose main file is
 * larger than max_size is not read.
 */
void
idem_content_compare(IdemTableChange *change, CommandId before, CommandId after,
					 int64 max_size)
{
	Comparison comparison = {.change = change};

	/* the handler may have written in a subtransaction that it has rolled back with its locks */
	comparison.rel = try_table_open(change->relid, AccessShareLock);
	if (comparison.rel == NULL)
	{
		change->not_compared = "Another session has dropped it.";
		return;
	}
	change->is_transient = comparison.rel->rd_rel->relpersistence == RELPERSISTENCE_TEMP;
	change->is_history = is_table_of_idem(comparison.rel) &&
		strcmp(RelationGetRelationName(comparison.rel), "job_log") == 0;
	change->not_compared = find_obstacle(comparison.rel, max_size);
	if (change->not_compared == NULL)
	{
		begin_columns(change, comparison.rel);
		comparison.row_context =
			AllocSetContextCreate(CurrentMemoryContext, "idem row", ALLOCSET_DEFAULT_SIZES);
		comparison.after = RegisterSnapshot(GetLatestSnapshot());
		comparison.after->curcid = after;
		PushCopiedSnapshot(comparison.after);
		if (change->kind == IDEM_CHANGE_ROWS)
		{
			comparison.before = GetActiveSnapshot();
			comparison.before->curcid = before;
		}
		scan_table(&comparison);
		PopActiveSnapshot();
		UnregisterSnapshot(comparison.after);
		MemoryContextDelete(comparison.row_context);
	}
	table_close(comparison.rel, AccessShareLock);
}

/*
 * The table was rewritten by this run and by the earlier one: what it had after the earlier
 * one was removed.  The columns are the same unless one of the runs has altered the table.
 */
void
idem_content_replace_removed(IdemTableChange *change, const IdemTableChange *earlier)
{
	if (earlier->natts != change->natts)
	{
		change->not_compared = "The run has altered its columns.";
		return;
	}
	change->nremoved = earlier->nadded;
	change->removed = earlier->added;
	for (int i = 0; i < change->natts; i++)
		change->columns[i].removed = earlier->columns[i].added;
}
