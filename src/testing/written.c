/*
 * written.c
 *		Which tables has a run written?
 *
 * The statistics of the transaction count the rows that it has inserted, updated and deleted, per
 * table.  A mark holds these counts, and the file of each table.  What differs between the
 * mark before a run and the mark after it, the run has changed.  Partitions are tables of
 * their own here.  Changes of TOAST tables belong to the tables that they are of.
 *
 * Other sessions create, truncate and drop tables meanwhile.  That is no change of the run (V3):
 * the row of pg_class tells which transaction has created or truncated a table, and only the
 * transaction that has dropped it holds the lock on it.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/catalog.h"
#include "catalog/pg_class.h"
#include "catalog/pg_namespace.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"

#include "testing/testing.h"

/* What a mark holds of one table */
typedef struct Mark
{
	Oid relid;
	Oid relfilenode;
	bool is_catalog;
	bool is_mine; /* this transaction has written the row of pg_class */
	char *name;
	int64 inserted;
	int64 updated;
	int64 deleted;
} Mark;

static int64
get_count(PGFunction function, Oid relid)
{
	return DatumGetInt64(DirectFunctionCall1(function, ObjectIdGetDatum(relid)));
}

static void
mark_table(HTAB *marks, HeapTuple tuple)
{
	Form_pg_class form = (Form_pg_class) GETSTRUCT(tuple);
	bool found;
	Mark *mark = hash_search(marks, &form->oid, HASH_ENTER, &found);

	mark->relfilenode = form->relfilenode;
	mark->is_catalog = form->relnamespace == PG_CATALOG_NAMESPACE;
	mark->is_mine = TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data));
	mark->name = quote_qualified_identifier(get_namespace_name_or_temp(form->relnamespace),
											NameStr(form->relname));
	mark->inserted = get_count(pg_stat_get_xact_tuples_inserted, form->oid);
	mark->updated = get_count(pg_stat_get_xact_tuples_updated, form->oid);
	mark->deleted = get_count(pg_stat_get_xact_tuples_deleted, form->oid);
}

/* Mark all tables and materialized views of the database */
HTAB *
idem_written_mark(void)
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

		CHECK_FOR_INTERRUPTS();
		if (form->relkind == RELKIND_RELATION || form->relkind == RELKIND_MATVIEW)
			mark_table(marks, tuple);
	}
	systable_endscan(scan);
	table_close(classes, AccessShareLock);
	return marks;
}

static List *
add_change(List *changes, IdemChangeKind kind, const Mark *before, const Mark *after)
{
	const Mark *mark = after != NULL ? after : before;
	IdemTableChange *change = palloc0_object(IdemTableChange);

	change->kind = mark->is_catalog ? IDEM_CHANGE_CATALOG : kind;
	change->relid = mark->relid;
	change->name = mark->name;
	if (after != NULL)
	{
		change->inserted = after->inserted - before->inserted;
		change->updated = after->updated - before->updated;
		change->deleted = after->deleted - before->deleted;
	}
	return lappend(changes, change);
}

static bool
has_counted(const Mark *before, const Mark *after)
{
	return before->inserted != after->inserted || before->updated != after->updated ||
		before->deleted != after->deleted;
}

/* Has this transaction dropped the table?  Then it holds the lock until its end. */
static bool
has_dropped(const Mark *mark)
{
	LOCKTAG tag;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, mark->relid);
	return idem_compat_holds_lock(&tag, AccessExclusiveLock);
}

static int
compare_names(const ListCell *a, const ListCell *b)
{
	return strcmp(((const IdemTableChange *) lfirst(a))->name,
				  ((const IdemTableChange *) lfirst(b))->name);
}

/* V3: what has changed between two marks, a list of IdemTableChange by name, without content */
List *
idem_written_between(HTAB *before, HTAB *after)
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
		else if (has_counted(old, mark))
			changes = add_change(changes, IDEM_CHANGE_ROWS, old, mark);
	}
	hash_seq_init(&status, before);
	while ((mark = hash_seq_search(&status)) != NULL)
	{
		if (hash_search(after, &mark->relid, HASH_FIND, NULL) == NULL && has_dropped(mark))
			changes = add_change(changes, IDEM_CHANGE_DROPPED, mark, NULL);
	}
	list_sort(changes, compare_names);
	return changes;
}

/* The change of this table, or NULL */
IdemTableChange *
idem_written_find(List *changes, Oid relid)
{
	ListCell *lc;

	foreach (lc, changes)
	{
		if (((IdemTableChange *) lfirst(lc))->relid == relid)
			return lfirst(lc);
	}
	return NULL;
}
