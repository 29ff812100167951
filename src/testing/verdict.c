/*
 * verdict.c
 *		The verdicts of idem_verify() about tables, in words.
 *
 * ok: what was compared is equal.  fail: a second run has another effect, or an error.
 * warn: something was not compared, or looks equal only here; a person decides.
 */
#include "postgres.h"

#include "access/table.h"
#include "lib/stringinfo.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/optimizer.h"
#include "rewrite/rewriteHandler.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"

#include "fn/fn.h"
#include "testing/testing.h"

/* Where the values of a column come from that differ after an interruption */
typedef enum Source
{
	SOURCE_SEQUENCE,
	SOURCE_VOLATILE, /* a volatile default, such as gen_random_uuid() */
	SOURCE_HANDLER,	 /* the handler, or a trigger */
	NSOURCES
} Source;

void
idem_verdict_add(List **verdicts, const char *check, const char *verdict, const char *object,
				 const char *detail)
{
	IdemVerdict *row = palloc_object(IdemVerdict);

	row->check = check;
	row->verdict = verdict;
	row->object = object;
	row->detail = detail;
	*verdicts = lappend(*verdicts, row);
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

/* What the statistics have counted */
static void
append_counts(StringInfo out, const IdemTableChange *change)
{
	if (change->kind == IDEM_CHANGE_REWRITTEN)
	{
		appendStringInfoString(out, "Truncated or rewritten.");
		return;
	}
	appendStringInfoString(out, "Inserted ");
	append_rows(out, change->inserted);
	appendStringInfo(out, ", updated " INT64_FORMAT ", deleted " INT64_FORMAT ".",
					 change->updated, change->deleted);
}

/* Names of the columns in which other values were added than removed */
static char *
list_changed_columns(const IdemTableChange *change)
{
	StringInfoData names;

	initStringInfo(&names);
	for (int i = 0; i < change->natts; i++)
	{
		const IdemColumnChange *column = &change->columns[i];

		if (!idem_content_equals(&column->added, &column->removed))
			append_name(&names, NameStr(column->name));
	}
	return names.data;
}

/* V4: append what both runs have in common only because they are in one transaction */
static void
append_moment(StringInfo out, const char *moment, const char *place)
{
	bool again = strstr(out->data, "but both runs") != NULL;

	appendStringInfo(out, again ? ". They also have the same %s. It is in %s" : ", but both runs have the same %s. It is in %s", moment, place);
}

/* V4: append the columns that have the moment; false if there are none */
static bool
append_moment_columns(StringInfo out, const IdemTableChange *change, IdemMoment moment,
					  const char *name)
{
	StringInfoData names;

	initStringInfo(&names);
	for (int i = 0; i < change->natts; i++)
	{
		if ((change->columns[i].moments & moment) != 0)
			append_name(&names, NameStr(change->columns[i].name));
	}
	if (names.len > 0)
		append_moment(out, name, names.data);
	return names.len > 0;
}

/* How the content has changed: more rows, fewer rows, or other values */
static void
append_difference(StringInfo out, const IdemTableChange *change)
{
	int64 more = change->nadded - change->nremoved;

	appendStringInfoString(out, " The content changed: ");
	if (more != 0)
	{
		append_rows(out, more > 0 ? more : -more);
		appendStringInfoString(out, more > 0 ? " more." : " fewer.");
	}
	else
	{
		char *columns = list_changed_columns(change);

		/* each column has the same values as before, but in other rows */
		appendStringInfo(out, columns[0] != '\0' ? "other values in %s." : "the same values in other rows.", columns);
	}
}

/* The verdict about a table that the second run has written (V3, V4) */
static void
judge_rows(List **verdicts, const IdemTableChange *change)
{
	StringInfoData detail;
	const char *verdict = "ok";

	initStringInfo(&detail);
	append_counts(&detail, change);
	if (change->not_compared != NULL)
	{
		verdict = "warn";
		appendStringInfo(&detail, " The content was not compared. %s", change->not_compared);
	}
	else if (change->nadded != change->nremoved ||
			 !idem_content_equals(&change->added, &change->removed))
	{
		verdict = "fail";
		append_difference(&detail, change);
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
		if (append_moment_columns(&detail, change, IDEM_MOMENT_NOW, "now()"))
			verdict = "warn";
		if (append_moment_columns(&detail, change, IDEM_MOMENT_XID, "transaction id"))
			verdict = "warn";
		appendStringInfoChar(&detail, '.');
	}
	idem_verdict_add(verdicts, "second run", verdict, change->name, detail.data);
}

/* The verdict about the results of both runs (V4) */
void
idem_verdict_result(List **verdicts, bool same, int moments)
{
	StringInfoData detail;

	initStringInfo(&detail);
	appendStringInfoString(&detail, same ? "Both runs returned the same result" : "The second run returned another result");
	if (same && (moments & IDEM_MOMENT_NOW) != 0)
		append_moment(&detail, "now()", "the result");
	if (same && (moments & IDEM_MOMENT_XID) != 0)
		append_moment(&detail, "transaction id", "the result");
	appendStringInfoChar(&detail, '.');
	idem_verdict_add(verdicts, "result", !same ? "fail" : moments != 0 ? "warn" :
																		 "ok",
					 NULL,
					 detail.data);
}

/* A second run has done what no real one does: from this verdict on, no failure is certain */
void
idem_verdict_soften(List *verdicts, int from)
{
	for (int i = from; i < list_length(verdicts); i++)
	{
		IdemVerdict *verdict = list_nth(verdicts, i);

		if (strcmp(verdict->verdict, "fail") == 0)
			verdict->verdict = "warn";
	}
}

/*
 * DDL is not compared.  TRUNCATE writes pg_class only; that alone is no DDL, and the table has a
 * verdict of its own.
 */
static void
judge_catalogs(List **verdicts, List *changes)
{
	bool rewritten = false;
	StringInfoData names;
	int n = 0;
	ListCell *lc;

	initStringInfo(&names);
	foreach (lc, changes)
	{
		const IdemTableChange *change = lfirst(lc);

		rewritten |= change->kind == IDEM_CHANGE_REWRITTEN;
		if (change->kind != IDEM_CHANGE_CATALOG)
			continue;
		appendStringInfo(&names, "%s%s", n++ > 0 ? ", " : "", change->name);
	}
	if (n == 0 || (n == 1 && rewritten && strcmp(names.data, "pg_catalog.pg_class") == 0))
		return;
	idem_verdict_add(verdicts, "second run", "warn", NULL,
					 psprintf("System catalogs were written, and not compared: %s.", names.data));
}

/* The verdicts about the tables that the second run has written */
void
idem_verdict_second_run(List **verdicts, List *changes)
{
	ListCell *lc;

	if (changes == NIL)
		idem_verdict_add(verdicts, "second run", "ok", NULL, "The second run wrote no rows.");
	foreach (lc, changes)
	{
		const IdemTableChange *change = lfirst(lc);

		if (change->kind == IDEM_CHANGE_CREATED || change->kind == IDEM_CHANGE_DROPPED)
			idem_verdict_add(verdicts, "second run", "warn", change->name,
							 change->kind == IDEM_CHANGE_CREATED ?
								 "The second run created this table. Its content was not compared." :
								 "The second run dropped this table.");
		else if (change->kind != IDEM_CHANGE_CATALOG)
			judge_rows(verdicts, change);
	}
	judge_catalogs(verdicts, changes);
}

/*
 * The verdicts about tables that deferred triggers of the second run write (V3).  Both lists are
 * what deferred triggers have written: those of the first run, and those of both runs together.
 */
void
idem_verdict_deferred(List **verdicts, List *first, List *both)
{
	ListCell *lc;

	foreach (lc, both)
	{
		const IdemTableChange *b = lfirst(lc);
		const IdemTableChange *a = idem_written_find(first, b->relid);

		if (a == NULL || a->kind != b->kind || a->inserted != b->inserted ||
			a->updated != b->updated || a->deleted != b->deleted)
			idem_verdict_add(verdicts, "second run", "warn", b->name,
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

static Source
find_source(Relation rel, AttrNumber attno)
{
	Node *value = build_column_default(rel, attno);

	if (has_nextval(value, NULL))
		return SOURCE_SEQUENCE;
	return contain_volatile_functions(value) ? SOURCE_VOLATILE : SOURCE_HANDLER;
}

/* Names of the columns in which the two runs have written different values, by source */
static void
list_different_columns(const IdemTableChange *a, const IdemTableChange *b, StringInfoData *names)
{
	Relation rel = try_table_open(a->relid, AccessShareLock);

	for (int i = 0; i < NSOURCES; i++)
		initStringInfo(&names[i]);
	/* the handler may alter the table */
	for (int i = 0; i < Min(a->natts, b->natts); i++)
	{
		const IdemColumnChange *x = &a->columns[i];
		const IdemColumnChange *y = &b->columns[i];

		if (!idem_content_equals(&x->added, &y->added) ||
			!idem_content_equals(&x->removed, &y->removed))
			append_name(&names[rel != NULL ? find_source(rel, i + 1) : SOURCE_HANDLER],
						NameStr(x->name));
	}
	if (rel != NULL)
		table_close(rel, AccessShareLock);
}

/* The same number of rows, but other values */
static void
judge_values(List **verdicts, const IdemTableChange *a, const IdemTableChange *b)
{
	static const char *const reasons[NSOURCES] = {
		[SOURCE_SEQUENCE] = " Values of %s come from a sequence, and sequences are not rolled back.",
		[SOURCE_VOLATILE] = " The default of %s is volatile.",
		[SOURCE_HANDLER] = " Values of %s are computed: check that they are only random, a time, or taken from a sequence."};
	StringInfoData names[NSOURCES];
	StringInfoData detail;

	initStringInfo(&detail);
	appendStringInfoString(&detail, "The run after the interruption wrote other values.");
	list_different_columns(a, b, names);
	for (int i = 0; i < NSOURCES; i++)
	{
		if (names[i].len > 0)
			appendStringInfo(&detail, reasons[i], names[i].data);
	}
	idem_verdict_add(verdicts, "interrupted", "warn", a->name, detail.data);
}

/* V5: add a verdict if the two runs have changed the table differently; one may be NULL */
static void
judge_interrupted(List **verdicts, const IdemTableChange *a, const IdemTableChange *b)
{
	static const IdemTableChange none = {0};
	const char *name = a != NULL ? a->name : b->name;

	if (a == NULL)
		a = &none;
	if (b == NULL)
		b = &none;
	if (a->not_compared != NULL || b->not_compared != NULL)
		idem_verdict_add(verdicts, "interrupted", "warn", name,
						 psprintf("The content was not compared. %s",
								  a->not_compared != NULL ? a->not_compared : b->not_compared));
	else if (a->nadded != b->nadded || a->nremoved != b->nremoved)
		idem_verdict_add(verdicts, "interrupted", "fail", name,
						 psprintf("A run adds %lld and removes %lld row versions; after the interruption it adds %lld and removes %lld.",
								  (long long) a->nadded, (long long) a->nremoved,
								  (long long) b->nadded, (long long) b->nremoved));
	else if (!idem_content_equals(&a->added, &b->added) ||
			 !idem_content_equals(&a->removed, &b->removed))
		judge_values(verdicts, a, b);
}

static bool
is_compared(const IdemTableChange *change)
{
	return change->kind == IDEM_CHANGE_ROWS || change->kind == IDEM_CHANGE_REWRITTEN;
}

/*
 * The verdicts about a run that comes after an interrupted one: has it changed the same
 * as a run alone (V5)?
 */
void
idem_verdict_interrupted(List **verdicts, List *alone, List *again, bool same_result)
{
	int n = list_length(*verdicts);
	ListCell *lc;

	foreach (lc, alone)
	{
		const IdemTableChange *change = lfirst(lc);

		if (is_compared(change))
			judge_interrupted(verdicts, change, idem_written_find(again, change->relid));
	}
	foreach (lc, again)
	{
		const IdemTableChange *change = lfirst(lc);

		if (is_compared(change) && idem_written_find(alone, change->relid) == NULL)
			judge_interrupted(verdicts, NULL, change);
	}
	if (!same_result)
		idem_verdict_add(verdicts, "interrupted", "warn", NULL,
						 "The run after the interruption returned another result.");
	if (list_length(*verdicts) == n)
		idem_verdict_add(verdicts, "interrupted", "ok", NULL,
						 "A run that is rolled back and repeated does the same as one run.");
}
