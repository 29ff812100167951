/*
 * verify.c
 *		SQL function idem_verify: what happens if a handler runs twice?
 *
 * The handler runs in subtransactions that are rolled back (V1): alone, twice, called twice.
 * Each run has a subtransaction of its own inside: its error is one of the findings.
 *
 * Verdicts: ok; fail: a second run has another effect, or an error; warn: a person decides.
 *
 * Which tables has a run written (V3)?  The statistics of the transaction count the rows that it
 * has inserted, updated and deleted, per table.  A mark holds these counts, and the file of each
 * table.  What differs between the marks before and after a run, the run has changed.  Partitions
 * are tables of their own here; TOAST tables belong to theirs.  Other sessions create, truncate and
 * drop tables meanwhile: the row of pg_class tells which transaction has created or truncated a
 * table, and only the transaction that has dropped it holds the lock on it.
 *
 * Has their content changed?  Two snapshots, both made after the run, differ only in their command
 * id: one shows the table before the run, the other one after it.  The run has removed or added the
 * row versions that only one of them shows.  If the values of both are the same, in any order, the
 * content is unchanged.  A query could not do this, because it has one snapshot.  Values are
 * compared by their bytes, after decompression, in one scan with the privileges of the caller.
 */
#include "postgres.h"

#include <math.h>

#include "access/detoast.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_namespace.h"
#include "commands/trigger.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/optimizer.h"
#include "rewrite/rewriteHandler.h"
#include "utils/date.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/numeric.h"
#include "utils/rls.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

#include "jobs/hold/hold.h"
#include "keys/keys.h"

IDEM_FUNCTION(idem_verify);

/*
 * Sum of the SHA-256 of many values, 64 bits at a time.  The order of the values does not
 * matter, and equal sums mean equal values.
 */
typedef struct Sum
{
	uint64 words[IDEM_SHA256_LEN / sizeof(uint64)];
} Sum;

/* What is the same for all runs of one transaction, and another one in a real second run (V4) */
typedef enum Moment
{
	MOMENT_NOW = 1, /* now() or statement_timestamp() */
	MOMENT_XID = 2	/* the transaction id */
} Moment;

static const struct
{
	Moment moment;
	const char *name;
} moments[] = {{MOMENT_NOW, "now()"}, {MOMENT_XID, "transaction id"}};

/* What a run has done to one column */
typedef struct ColumnChange
{
	NameData name;
	Oid type; /* of a domain: its base type */
	int32 typmod;
	bool is_ignored; /* dropped, or not compared */
	int moments;	 /* which of Moment are in a row that was added */
	Sum added;
	Sum removed;
} ColumnChange;

/* How a run has changed a table */
typedef enum ChangeKind
{
	CHANGE_ROWS,	  /* it has inserted, updated or deleted rows */
	CHANGE_REWRITTEN, /* it has replaced the file of the table, as TRUNCATE does */
	CHANGE_CREATED,
	CHANGE_DROPPED,
	CHANGE_CATALOG /* it has written this system catalog */
} ChangeKind;

/*
 * What a run has done to one table.  Of a table that was rewritten or created only the content
 * after the run is known: all its rows count as added.
 */
typedef struct TableChange
{
	ChangeKind kind;
	Oid relid;
	const char *name;
	int64 inserted; /* as the statistics of the transaction count */
	int64 updated;
	int64 deleted;
	bool is_transient;		  /* a temporary table */
	bool is_history;		  /* idem.job_log */
	const char *not_compared; /* why the content was not compared; NULL: it was */
	int64 nadded;			  /* row versions */
	int64 nremoved;
	Sum added;
	Sum removed;
	int natts;
	ColumnChange *columns;
} TableChange;

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

/* A row of the result */
typedef struct Verdict
{
	const char *check;
	const char *verdict;
	const char *object; /* NULL: none */
	const char *detail;
} Verdict;

/* A run of the handler */
typedef struct Run
{
	ErrorData *error; /* NULL: none */
	Jsonb *result;	  /* NULL: null */
	List *changes;	  /* of TableChange */
} Run;

/* A call of idem_verify() */
typedef struct Verify
{
	Oid handler;
	NullableDatum payload;
	int64 max_table_size;
	List *verdicts;
	Run alone;
	/* of the run that is being done */
	Run *run;
	IdemClaim *claim; /* NULL: call the handler; else call idem_call() with it */
	bool replayed;
	HTAB *marks;	/* after the last run of the subtransaction; NULL: this is the first one */
	List *deferred; /* what deferred triggers have written: of TableChange, without content */
} Verify;

/* Where the values of a column come from that differ after an interruption */
typedef enum Source
{
	SOURCE_SEQUENCE,
	SOURCE_VOLATILE, /* a volatile default, such as gen_random_uuid() */
	SOURCE_HANDLER,	 /* the handler, or a trigger */
	NSOURCES
} Source;

/* Mark all tables and materialized views of the database */
static HTAB *
mark_tables(void)
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
		mark->inserted =
			DatumGetInt64(DirectFunctionCall1(pg_stat_get_xact_tuples_inserted, relid));
		mark->updated = DatumGetInt64(DirectFunctionCall1(pg_stat_get_xact_tuples_updated, relid));
		mark->deleted = DatumGetInt64(DirectFunctionCall1(pg_stat_get_xact_tuples_deleted, relid));
	}
	systable_endscan(scan);
	table_close(classes, AccessShareLock);
	return marks;
}

static List *
add_change(List *changes, ChangeKind kind, const Mark *before, const Mark *after)
{
	TableChange *change = palloc_object(TableChange);

	*change = (TableChange){.kind = after->is_catalog ? CHANGE_CATALOG : kind,
							.relid = after->relid,
							.name = after->name,
							.inserted = after->inserted - before->inserted,
							.updated = after->updated - before->updated,
							.deleted = after->deleted - before->deleted};
	return lappend(changes, change);
}

static int
compare_names(const ListCell *a, const ListCell *b)
{
	return strcmp(((const TableChange *) lfirst(a))->name,
				  ((const TableChange *) lfirst(b))->name);
}

/* V3: what has changed between two marks, a list of TableChange by name, without content */
static List *
list_changes(HTAB *before, HTAB *after)
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
			changes = add_change(changes, CHANGE_CREATED, old, mark);
		else if (mark->is_mine && old->relfilenode != mark->relfilenode)
			changes = add_change(changes, CHANGE_REWRITTEN, old, mark);
		else if (old->inserted != mark->inserted || old->updated != mark->updated ||
				 old->deleted != mark->deleted)
			changes = add_change(changes, CHANGE_ROWS, old, mark);
	}
	hash_seq_init(&status, before);
	while ((mark = hash_seq_search(&status)) != NULL)
	{
		LOCKTAG tag;

		/* the transaction that has dropped the table holds its lock until it ends */
		SET_LOCKTAG_RELATION(tag, MyDatabaseId, mark->relid);
		if (hash_search(after, &mark->relid, HASH_FIND, NULL) == NULL &&
			LockHeldByMe(&tag, AccessExclusiveLock, false))
			changes = add_change(changes, CHANGE_DROPPED, mark, mark);
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

/*
 * Is this number of microseconds computed from now() or statement_timestamp(), in the time zone
 * of the session or in UTC?  That is, do they differ by whole seconds after the moment was rounded
 * for the column?  Other times have the same fraction of a second only by chance.  A column that
 * does not keep microseconds has it by chance too often: there the difference must be whole days.
 */
static int
look_at_time(int64 time, int32 typmod)
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
			from = DatumGetTimestamp(
				DirectFunctionCall1(timestamptz_timestamp, TimestampTzGetDatum(from)));
		from = (from + unit / 2) / unit * unit;
		if (time == from || (from % period != 0 && (time - from) % period == 0))
			return MOMENT_NOW;
	}
	return 0;
}

/*
 * Is the number one of seconds, milliseconds or microseconds since 1970, computed from this moment?
 * A whole number of seconds has no fraction by which to know it, so it must be equal.
 */
static bool
is_epoch_of(double number, TimestampTz moment)
{
	int64 time = moment +
		(int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY * USECS_PER_SEC;
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

	if (is_epoch_of(number, get_moment(0)) || is_epoch_of(number, get_moment(1)))
		found |= MOMENT_NOW;
	if (FullTransactionIdIsValid(xid) && number == (double) U64FromFullTransactionId(xid))
		found |= MOMENT_XID;
	return found;
}

/* Has the text the seconds of a moment in it, with milliseconds, as ":07.123"? */
static int
look_at_text(const char *text, int length)
{
	for (int i = 0; i < 4; i++)
	{
		/* cut off, and rounded */
		int64 millis = (get_moment(i / 2) + (i % 2 == 0 ? 0 : 500)) / 1000;
		char seconds[16];
		int n = snprintf(seconds, sizeof(seconds), ":%02d.%03d", (int) (millis / 1000 % 60),
						 (int) (millis % 1000));

		/* PostgreSQL writes no zeros at the end */
		while (seconds[n - 1] == '0' && n > 5)
			n--;
		if (memmem(text, length, seconds, n) != NULL)
			return MOMENT_NOW;
	}
	return 0;
}

/* V4: which of Moment are in the strings and numbers of the value */
static int
look_at_jsonb(Jsonb *value)
{
	JsonbIterator *it = value != NULL ? JsonbIteratorInit(&value->root) : NULL;
	JsonbValue v;
	JsonbIteratorToken token;
	int found = 0;

	while (it != NULL && (token = JsonbIteratorNext(&it, &v, false)) != WJB_DONE)
	{
		if (token != WJB_ELEM && token != WJB_VALUE)
			continue;
		if (v.type == jbvString)
			found |= look_at_text(v.val.string.val, v.val.string.len);
		else if (v.type == jbvNumeric)
			found |= look_at_number(DatumGetFloat8(
				DirectFunctionCall1(numeric_float8_no_overflow, NumericGetDatum(v.val.numeric))));
	}
	return found;
}

/*
 * Which of Moment are in the value?  Both runs have the same now() and transaction id (V4).
 */
static int
look_at_value(const ColumnChange *column, Datum value)
{
	bool is_mine;

	switch (column->type)
	{
		case TIMESTAMPTZOID:
		case TIMESTAMPOID:
		case TIMEOID:
			return look_at_time(DatumGetInt64(value), column->typmod);
		case TIMETZOID:
			return look_at_time(DatumGetTimeTzADTP(value)->time, column->typmod);
		case DATEOID:
			return DatumGetDateADT(value) == GetSQLCurrentDate() ? MOMENT_NOW : 0;
		case XIDOID:
			is_mine = TransactionIdEquals(DatumGetTransactionId(value), GetTopTransactionIdIfAny());
			return is_mine ? MOMENT_XID : 0;
		case XID8OID:
			is_mine = FullTransactionIdEquals(DatumGetFullTransactionId(value),
											  GetTopFullTransactionIdIfAny());
			return is_mine ? MOMENT_XID : 0;
		case INT4OID:
			return look_at_number(DatumGetInt32(value));
		case INT8OID:
			return look_at_number((double) DatumGetInt64(value));
		case FLOAT8OID:
			return look_at_number(DatumGetFloat8(value));
		case NUMERICOID:
			return look_at_number(
				DatumGetFloat8(DirectFunctionCall1(numeric_float8_no_overflow, value)));
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case JSONOID:
		{
			text *plain = DatumGetTextPP(value);

			return look_at_text(VARDATA_ANY(plain), VARSIZE_ANY_EXHDR(plain));
		}
		case JSONBOID:
			return look_at_jsonb(DatumGetJsonbP(value));
	}
	return 0;
}

/* Add the digest of some bytes to a sum, and copy it, if that is wanted */
static void
add_to_sum(Sum *sum, const void *bytes, Size len, uint8 *copy)
{
	Sum value;

	StaticAssertStmt(sizeof(value) == IDEM_SHA256_LEN, "a sum has the size of a digest");
	idem_sha256_hash(bytes, len, (uint8 *) &value);
	for (size_t i = 0; i < lengthof(sum->words); i++)
		sum->words[i] += value.words[i];
	if (copy != NULL)
		memcpy(copy, &value, sizeof(value));
}

/* Add a row to the rows that were added or removed */
static void
add_row(TableChange *change, TupleTableSlot *row, bool added)
{
	TupleDesc desc = row->tts_tupleDescriptor;
	/* of each column: is it not null, and its digest */
	Size size = (Size) change->natts * (1 + IDEM_SHA256_LEN);
	uint8 *digests = palloc0(size);

	slot_getallattrs(row);
	for (int i = 0; i < change->natts; i++)
	{
		ColumnChange *column = &change->columns[i];
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

/* V3: how has the run between these two command ids changed the content of the table? */
static void
compare_content(TableChange *change, CommandId before, CommandId after, int64 max_size)
{
	/* the handler may have written in a subtransaction that it has rolled back with its locks */
	Relation rel = try_table_open(change->relid, AccessShareLock);
	TupleDesc desc;
	Snapshot snapshot;
	Snapshot snapshot_before = NULL;
	TupleTableSlot *row;
	TableScanDesc scan;
	MemoryContext context;
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
	change->columns = palloc0_array(ColumnChange, desc->natts);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		ColumnChange *column = &change->columns[i];

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
	if (change->kind == CHANGE_ROWS)
	{
		snapshot_before = GetActiveSnapshot();
		snapshot_before->curcid = before;
	}

	/*
	 * Look at all row versions of the table.  Those that this transaction has neither inserted,
	 * updated nor deleted are skipped early, unless all rows count as added.  If in doubt, a
	 * version is looked at.  Its header is read without a lock on the page, because no other
	 * transaction resets what this one has set.
	 */
	row = table_slot_create(rel, NULL);
	scan = table_beginscan(rel, SnapshotAny, 0, NULL, SO_NONE);
	context = AllocSetContextCreate(CurrentMemoryContext, "idem row", ALLOCSET_DEFAULT_SIZES);
	while (table_scan_getnextslot(scan, ForwardScanDirection, row))
	{
		bool was_there = false;
		bool is_there;

		CHECK_FOR_INTERRUPTS();
		if (snapshot_before != NULL)
		{
			HeapTupleHeader header = ExecFetchSlotHeapTuple(row, false, NULL)->t_data;

			if ((header->t_infomask & HEAP_XMAX_INVALID) != 0 &&
				!TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(header)))
				continue;
			was_there = table_tuple_satisfies_snapshot(rel, row, snapshot_before);
		}
		is_there = table_tuple_satisfies_snapshot(rel, row, snapshot);
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
	PopActiveSnapshot();
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
}

static void
add_verdict(Verify *verify, const char *check, const char *verdict, const char *object,
			const char *detail)
{
	Verdict *row = palloc_object(Verdict);

	*row = (Verdict){check, verdict, object, detail};
	verify->verdicts = lappend(verify->verdicts, row);
}

static void
add_error(Verify *verify, const char *check, const ErrorData *error)
{
	add_verdict(verify, check, "fail", NULL, idem_subxact_describe(error));
}

/* Equal as jsonb compares (K11) */
static bool
are_equal(Jsonb *a, Jsonb *b)
{
	return a == NULL || b == NULL ? a == b : compareJsonbContainers(&a->root, &b->root) == 0;
}

static bool
sums_equal(const Sum *a, const Sum *b)
{
	return memcmp(a, b, sizeof(Sum)) == 0;
}

/* The change of this table; of a table that was not changed, no rows */
static const TableChange *
find_change(List *changes, Oid relid)
{
	static const TableChange none = {0};
	ListCell *lc;

	foreach (lc, changes)
	{
		if (((TableChange *) lfirst(lc))->relid == relid)
			return lfirst(lc);
	}
	return &none;
}

static void
call_handler(void *arg)
{
	Verify *verify = arg;
	Jsonb *result;

	if (verify->claim != NULL)
	{
		IdemKeyRow info;

		verify->replayed =
			idem_call_once(verify->handler, verify->payload, verify->claim, &info);
		result = info.result;
	}
	else
		result = idem_handler_run(verify->handler, verify->payload);
	/* the memory of the handler may not outlive the subtransaction */
	verify->run->result = idem_args_copy_jsonb(result, CurrentMemoryContext);
	CommandCounterIncrement();
}

/* J22: there is no job, but a handler of jobs may want one */
static void
run_handler(void *arg)
{
	IdemJobInfo job = {
		.queue = cstring_to_text("idem_verify"),
		.attempt = 1,
		.max_attempts = IDEM_DEFAULT_MAX_ATTEMPTS};

	idem_work_as_current(&job, call_handler, arg);
}

/* Run the handler once, and find out what it has done */
static void
do_run(Verify *verify, Run *run)
{
	HTAB *before;
	CommandId before_cid;
	int nest_level;
	ListCell *lc;

	CommandCounterIncrement();
	before = verify->marks != NULL ? verify->marks : mark_tables();
	before_cid = GetCurrentCommandId(false);
	verify->run = run;
	/* what a run has set with SET or SET LOCAL is not set in a second one, in another session */
	nest_level = NewGUCNestLevel();
	run->error = idem_subxact_try(run_handler, verify, true);
	AtEOXact_GUC(false, nest_level);
	verify->marks = mark_tables();
	if (run->error != NULL)
		return;
	run->changes = list_changes(before, verify->marks);
	/* of a call of idem_call() it is enough to know whether there are any */
	foreach (lc, verify->claim == NULL ? run->changes : NIL)
	{
		TableChange *change = lfirst(lc);

		if (change->kind != CHANGE_DROPPED && change->kind != CHANGE_CATALOG)
			compare_content(change, before_cid, GetCurrentCommandId(false),
							verify->max_table_size);
	}
}

static void
fire_deferred(void *arg)
{
	Verify *verify = arg;
	ConstraintsSetStmt *all_immediate = makeNode(ConstraintsSetStmt);

	AfterTriggerSetState(all_immediate);
	verify->deferred = list_changes(verify->marks, mark_tables());
}

/*
 * Fire the triggers and check the constraints that are deferred until the commit.  Returns the
 * error of one of them, or NULL; then verify->deferred is what they have written.  The
 * subtransaction is rolled back at once: only then the server restores the mode of the
 * constraints, and the next run begins as the first one did.  Counters are not rolled back, so
 * there are new marks.
 */
static ErrorData *
check_deferred(Verify *verify)
{
	ErrorData *error = idem_subxact_try(fire_deferred, verify, false);

	verify->marks = mark_tables();
	return error;
}

/* The first run; it is rolled back (V1), so it is interrupted, too */
static void
run_alone(void *arg)
{
	Verify *verify = arg;

	verify->marks = NULL;
	do_run(verify, &verify->alone);
	if (verify->alone.error == NULL)
		verify->alone.error = check_deferred(verify);
	if (verify->alone.error != NULL)
		add_error(verify, "first run", verify->alone.error);
	else
		add_verdict(verify, "first run", "ok", NULL, "The handler ran without an error.");
}

static void
append_name(StringInfo names, const char *name)
{
	appendStringInfo(names, "%s%s", names->len > 0 ? ", " : "", idem_show_name(name));
}

static void
append_rows(StringInfo out, int64 n)
{
	appendStringInfo(out, INT64_FORMAT " %s", n, n == 1 ? "row" : "rows");
}

/* V4: append what both runs have in common only because they are in one transaction */
static void
append_moment(StringInfo out, const char *moment, const char *place)
{
	bool again = strstr(out->data, "but both runs") != NULL;

	appendStringInfo(out, again ? ". They also have the same %s. It is in %s" : ", but both runs have the same %s. It is in %s", moment, place);
}

/*
 * The verdict about a table that the second run has written (V3, V4).  earlier: what the first run
 * has done to it.
 */
static void
judge_rows(Verify *verify, TableChange *change, const TableChange *earlier)
{
	StringInfoData detail;
	StringInfoData names;
	const char *verdict = "ok";

	initStringInfo(&detail);
	initStringInfo(&names);
	if (change->kind == CHANGE_REWRITTEN)
	{
		appendStringInfoString(&detail, "Truncated or rewritten.");
		/*
		 * The content before is known if the first run has rewritten or created the table, too:
		 * what it had after the first run was removed.
		 */
		change->nremoved = earlier->nadded;
		change->removed = earlier->added;
		if (change->not_compared == NULL &&
			(earlier->kind == CHANGE_ROWS || earlier->not_compared != NULL))
			change->not_compared = "Its content before is gone.";
		else if (change->not_compared == NULL && earlier->natts != change->natts)
			change->not_compared = "The run has altered its columns.";
		for (int i = 0; change->not_compared == NULL && i < change->natts; i++)
			change->columns[i].removed = earlier->columns[i].added;
	}
	else
	{
		appendStringInfoString(&detail, "Inserted ");
		append_rows(&detail, change->inserted);
		appendStringInfo(&detail, ", updated " INT64_FORMAT ", deleted " INT64_FORMAT ".",
						 change->updated, change->deleted);
	}
	if (change->not_compared != NULL)
	{
		verdict = "warn";
		appendStringInfo(&detail, " The content was not compared. %s", change->not_compared);
	}
	else if (change->nadded != change->nremoved || !sums_equal(&change->added, &change->removed))
	{
		int64 more = change->nadded - change->nremoved;

		verdict = "fail";
		appendStringInfoString(&detail, " The content changed: ");
		for (int i = 0; i < change->natts; i++)
		{
			if (!sums_equal(&change->columns[i].added, &change->columns[i].removed))
				append_name(&names, NameStr(change->columns[i].name));
		}
		if (more != 0)
		{
			append_rows(&detail, more > 0 ? more : -more);
			appendStringInfoString(&detail, more > 0 ? " more." : " fewer.");
		}
		else if (names.len > 0)
			appendStringInfo(&detail, "other values in %s.", names.data);
		else
			/* each column has the same values as before, but in other rows */
			appendStringInfoString(&detail, "the same values in other rows.");
		/* of these two a real second run has no other effect that lasts */
		if (change->is_transient || change->is_history)
		{
			verdict = "warn";
			appendStringInfoString(&detail, change->is_transient ? " It is a temporary table: a second run in another session or transaction may find it empty." : " These are jobs that have ended, for example because the second run has cancelled the job of the first one and enqueued another.");
		}
	}
	else
	{
		appendStringInfoString(&detail, " The content is unchanged");
		for (size_t m = 0; m < lengthof(moments); m++)
		{
			resetStringInfo(&names);
			for (int i = 0; i < change->natts; i++)
			{
				if ((change->columns[i].moments & moments[m].moment) != 0)
					append_name(&names, NameStr(change->columns[i].name));
			}
			if (names.len == 0)
				continue;
			verdict = "warn";
			append_moment(&detail, moments[m].name, names.data);
		}
		appendStringInfoChar(&detail, '.');
	}
	add_verdict(verify, "second run", verdict, change->name, detail.data);
}

static void
judge_second_run(Verify *verify, Run *first, Run *second)
{
	/* what the triggers that the first run has deferred have written */
	List *deferred = verify->deferred;
	ErrorData *error = check_deferred(verify);
	bool same = are_equal(first->result, second->result);
	int found = look_at_jsonb(second->result);
	bool rewritten = false;
	StringInfoData detail;
	StringInfoData catalogs;
	int ncatalogs = 0;
	ListCell *lc;

	/* the results of both runs (V4) */
	initStringInfo(&detail);
	appendStringInfoString(&detail, same ? "Both runs returned the same result" : "The second run returned another result");
	for (size_t m = 0; same && m < lengthof(moments); m++)
	{
		if ((found & moments[m].moment) != 0)
			append_moment(&detail, moments[m].name, "the result");
	}
	appendStringInfoChar(&detail, '.');
	add_verdict(verify, "result", !same ? "fail" : found != 0 ? "warn" :
																"ok",
				NULL, detail.data);

	/* the tables that the second run has written (V3) */
	if (second->changes == NIL)
		add_verdict(verify, "second run", "ok", NULL, "The second run wrote no rows.");
	initStringInfo(&catalogs);
	foreach (lc, second->changes)
	{
		TableChange *change = lfirst(lc);

		switch (change->kind)
		{
			case CHANGE_CREATED:
				add_verdict(verify, "second run", "warn", change->name,
							"The second run created this table. Its content was not compared.");
				break;
			case CHANGE_DROPPED:
				add_verdict(verify, "second run", "warn", change->name,
							"The second run dropped this table.");
				break;
			case CHANGE_CATALOG:
				appendStringInfo(&catalogs, "%s%s", ncatalogs++ > 0 ? ", " : "", change->name);
				break;
			case CHANGE_REWRITTEN:
			case CHANGE_ROWS:
				rewritten |= change->kind == CHANGE_REWRITTEN;
				judge_rows(verify, change, find_change(first->changes, change->relid));
				break;
		}
	}
	/*
	 * TRUNCATE writes pg_class only; that alone is no DDL, and the table has a verdict of its own
	 */
	if (ncatalogs > 1 ||
		(ncatalogs == 1 && !(rewritten && strcmp(catalogs.data, "pg_catalog.pg_class") == 0)))
		add_verdict(verify, "second run", "warn", NULL,
					psprintf("System catalogs were written, and not compared: %s.", catalogs.data));

	/* the tables that deferred triggers write: those of the first run, and those of both (V3) */
	if (error != NULL)
	{
		add_error(verify, "second run", error);
		return;
	}
	foreach (lc, verify->deferred)
	{
		const TableChange *both = lfirst(lc);
		const TableChange *one = find_change(deferred, both->relid);

		if (one->kind != both->kind || one->inserted != both->inserted ||
			one->updated != both->updated || one->deleted != both->deleted)
			add_verdict(verify, "second run", "warn", both->name,
						"Triggers that are deferred until the commit write this table. What they write was not compared.");
	}
}

static bool
has_nextval(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (IsA(node, NextValueExpr) ||
		(IsA(node, FuncExpr) && ((FuncExpr *) node)->funcid == F_NEXTVAL))
		return true;
	return expression_tree_walker(node, has_nextval, context);
}

/* The two runs have changed the same number of rows, but written other values: say where from */
static const char *
describe_values(const TableChange *a, const TableChange *b)
{
	static const char *const reasons[NSOURCES] = {
		[SOURCE_SEQUENCE] = " Values of %s come from a sequence, and sequences are not rolled back.",
		[SOURCE_VOLATILE] = " The default of %s is volatile.",
		[SOURCE_HANDLER] = " Values of %s are computed: check that they are only random, a time, or taken from a sequence."};
	Relation rel = try_table_open(a->relid, AccessShareLock);
	StringInfoData names[NSOURCES];
	StringInfoData detail;

	for (int i = 0; i < NSOURCES; i++)
		initStringInfo(&names[i]);
	/* the handler may alter the table */
	for (int i = 0; i < Min(a->natts, b->natts); i++)
	{
		const ColumnChange *x = &a->columns[i];
		const ColumnChange *y = &b->columns[i];
		Source source = SOURCE_HANDLER;

		if (sums_equal(&x->added, &y->added) && sums_equal(&x->removed, &y->removed))
			continue;
		if (rel != NULL)
		{
			Node *value = build_column_default(rel, i + 1);

			if (has_nextval(value, NULL))
				source = SOURCE_SEQUENCE;
			else if (contain_volatile_functions(value))
				source = SOURCE_VOLATILE;
		}
		append_name(&names[source], NameStr(x->name));
	}
	if (rel != NULL)
		table_close(rel, AccessShareLock);

	initStringInfo(&detail);
	appendStringInfoString(&detail, "The run after the interruption wrote other values.");
	for (int i = 0; i < NSOURCES; i++)
	{
		if (names[i].len > 0)
			appendStringInfo(&detail, reasons[i], names[i].data);
	}
	return detail.data;
}

/*
 * V5: a verdict about a table that a run alone, and one after the interruption, have changed
 * differently
 */
static void
judge_interrupted(Verify *verify, const TableChange *a, const TableChange *b)
{
	const TableChange *written = OidIsValid(a->relid) ? a : b;

	if (written->kind != CHANGE_ROWS && written->kind != CHANGE_REWRITTEN)
		return;
	if (a->not_compared != NULL || b->not_compared != NULL)
		add_verdict(verify, "interrupted", "warn", written->name,
					psprintf("The content was not compared. %s",
							 a->not_compared != NULL ? a->not_compared : b->not_compared));
	else if (a->nadded != b->nadded || a->nremoved != b->nremoved)
		add_verdict(verify, "interrupted", "fail", written->name,
					psprintf("A run adds " INT64_FORMAT " and removes " INT64_FORMAT " row versions; after the interruption it adds " INT64_FORMAT " and removes " INT64_FORMAT ".",
							 a->nadded, a->nremoved, b->nadded, b->nremoved));
	else if (!sums_equal(&a->added, &b->added) || !sums_equal(&a->removed, &b->removed))
		add_verdict(verify, "interrupted", "warn", written->name, describe_values(a, b));
}

/*
 * A run after the interrupted one, and the second run after that; rolled back (V1).  Has the run
 * after the interruption changed the same as a run alone (V5)?
 */
static void
run_twice(void *arg)
{
	Verify *verify = arg;
	Run first = {0};
	Run second = {0};
	uint64 held_answers;
	int n;
	ListCell *lc;

	verify->marks = NULL;
	do_run(verify, &first);
	if (first.error == NULL)
		first.error = check_deferred(verify);
	if (first.error != NULL)
	{
		add_error(verify, "interrupted", first.error);
		return;
	}

	held_answers = idem_keystore_held_answers();
	n = list_length(verify->verdicts);
	do_run(verify, &second);
	if (second.error != NULL)
		add_error(verify, "second run", second.error);
	else
		judge_second_run(verify, &first, &second);
	if (idem_keystore_held_answers() != held_answers)
	{
		/* the second run has done what no real one does: no failure is certain */
		for (int i = n; i < list_length(verify->verdicts); i++)
		{
			Verdict *verdict = list_nth(verify->verdicts, i);

			if (strcmp(verdict->verdict, "fail") == 0)
				verdict->verdict = "warn";
		}
		add_verdict(verify, "second run", "warn", NULL,
					"The second run claimed a key that the first run had claimed and not finished, and got \"held\". A real second run gets \"finished\" without a result. Finish the key in the handler.");
	}

	n = list_length(verify->verdicts);
	foreach (lc, verify->alone.changes)
	{
		const TableChange *change = lfirst(lc);

		judge_interrupted(verify, change, find_change(first.changes, change->relid));
	}
	foreach (lc, first.changes)
	{
		const TableChange *change = lfirst(lc);
		const TableChange *alone = find_change(verify->alone.changes, change->relid);

		if (!OidIsValid(alone->relid))
			judge_interrupted(verify, alone, change);
	}
	if (!are_equal(verify->alone.result, first.result))
		add_verdict(verify, "interrupted", "warn", NULL,
					"The run after the interruption returned another result.");
	if (list_length(verify->verdicts) == n)
		add_verdict(verify, "interrupted", "ok", NULL,
					"A run that is rolled back and repeated does the same as one run.");
}

/* Two calls of idem_call() with one key (V6); rolled back (V1) */
static void
call_twice(void *arg)
{
	Verify *verify = arg;
	Run runs[2] = {0};
	/* a key that no session uses */
	Datum uuid = DirectFunctionCall1(gen_random_uuid, (Datum) 0);
	char *key = psprintf("idem_verify:%s", DatumGetCString(DirectFunctionCall1(uuid_out, uuid)));
	const char *problem = NULL;

	verify->marks = NULL;
	for (size_t i = 0; i < lengthof(runs); i++)
	{
		IdemClaim claim = {
			.key = {.key = cstring_to_text(key), .scope = cstring_to_text("")},
			.ttl = idem_guc_ttl * USECS_PER_SEC,
			.wait = {.forever = true}};

		if (!verify->payload.isnull)
			claim.request = idem_args_fingerprint(verify->payload.value);
		verify->claim = &claim;
		do_run(verify, &runs[i]);
		verify->claim = NULL;
		if (runs[i].error != NULL)
		{
			add_error(verify, "idem_call", runs[i].error);
			return;
		}
	}
	if (!verify->replayed)
		problem = "The second call ran the handler again.";
	else if (!are_equal(runs[0].result, runs[1].result))
		problem = "The second call returned another result.";
	else if (runs[1].changes != NIL)
		problem = "The second call wrote rows.";
	add_verdict(verify, "idem_call", problem == NULL ? "ok" : "fail", NULL,
				problem == NULL ? "The second call returned the stored result, and wrote nothing." :
								  problem);
}

Datum
idem_verify(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	Verify verify = {0};
	int nest_level;
	ListCell *lc;

	idem_fn_begin(fcinfo, &idem_verify_signature, "idem_verify()");
	idem_answer_begin(&answer, fcinfo, &idem_verify_signature);
	verify.handler = idem_handler_arg(fcinfo, 0);
	verify.payload = fcinfo->args[1];
	idem_args_require(fcinfo, 2, "max_table_size", "Leave it out for the default of 256 MB.");
	verify.max_table_size = PG_GETARG_INT64(2);
	if (verify.max_table_size < 0)
		idem_args_refuse_value("max_table_size", "It is a number of bytes; it must be zero or more.",
							   "Leave it out for the default of 256 MB.");
	idem_handler_check(verify.handler, verify.payload.isnull);

	/* the marks need the statistics of the transaction */
	nest_level = NewGUCNestLevel();
	(void) set_config_option("track_counts", "on", PGC_SUSET, PGC_S_SESSION, GUC_ACTION_SAVE, true,
							 0, false);
	idem_subxact_undo(run_alone, &verify);
	if (verify.alone.error == NULL)
	{
		idem_subxact_undo(run_twice, &verify);
		idem_subxact_undo(call_twice, &verify);
	}
	AtEOXact_GUC(true, nest_level);
	idem_answer_compare(&answer);
	foreach (lc, verify.verdicts)
	{
		const Verdict *verdict = lfirst(lc);

		idem_answer_string(&answer, Anum_verify_result_check, verdict->check);
		idem_answer_string(&answer, Anum_verify_result_verdict, verdict->verdict);
		idem_answer_string(&answer, Anum_verify_result_object, verdict->object);
		idem_answer_string(&answer, Anum_verify_result_detail, verdict->detail);
		idem_answer_put(&answer);
	}
	return (Datum) 0;
}
