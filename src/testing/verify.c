/*
 * verify.c
 *		SQL function idem_verify: what happens if a handler runs twice?
 *
 * The handler runs in subtransactions that are rolled back (V1):
 *
 *	run_alone	one run, then rolled back: it is also the run that is interrupted
 *	run_twice	a run after the interrupted one, and a second run: which tables has the
 *				second run written, and has their content changed?
 *	call_twice	two calls of idem_call() with one key: the second one must not run the handler
 *
 * Each run has a subtransaction of its own inside.  So the error of a run is one of the
 * findings, and TRUNCATE in a run leaves the table of the run before as it was.
 *
 * Verdicts: ok: what was compared is equal.  fail: a second run has another effect, or an error.
 * warn: something was not compared, or looks equal only here; a person decides.
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "lib/stringinfo.h"
#include "nodes/nodeFuncs.h"
#include "nodes/parsenodes.h"
#include "optimizer/optimizer.h"
#include "rewrite/rewriteHandler.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/rel.h"

#include "jobs/fetch/fetch.h"
#include "jobs/hold/hold.h"
#include "jobs/row/job.h"
#include "keys/keys.h"
#include "testing/testing.h"

IDEM_FUNCTION(idem_verify);

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
	List *changes;	  /* of IdemTableChange */
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
} Verify;

/* Where the values of a column come from that differ after an interruption */
typedef enum Source
{
	SOURCE_SEQUENCE,
	SOURCE_VOLATILE, /* a volatile default, such as gen_random_uuid() */
	SOURCE_HANDLER,	 /* the handler, or a trigger */
	NSOURCES
} Source;

static void
add_verdict(Verify *verify, const char *check, const char *verdict, const char *object,
			const char *detail)
{
	Verdict *row = palloc_object(Verdict);

	row->check = check;
	row->verdict = verdict;
	row->object = object;
	row->detail = detail;
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
	if (a == NULL || b == NULL)
		return a == b;
	return compareJsonbContainers(&a->root, &b->root) == 0;
}

static bool
sums_equal(const IdemSum *a, const IdemSum *b)
{
	return memcmp(a, b, sizeof(IdemSum)) == 0;
}

/* The change of this table, or NULL */
static IdemTableChange *
find_change(List *changes, Oid relid)
{
	ListCell *lc;

	foreach (lc, changes)
	{
		if (((IdemTableChange *) lfirst(lc))->relid == relid)
			return lfirst(lc);
	}
	return NULL;
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
	IdemFetched job = {
		.queue = cstring_to_text("idem_verify"),
		.attempt = 1,
		.max_attempts = IDEM_DEFAULT_MAX_ATTEMPTS};

	idem_work_as_current(&job, call_handler, arg);
}

/*
 * Run the handler once, and find out what it has done.  *marks are those of the run before, NULL
 * if this is the first one of a scenario; they become those of now.
 */
static void
do_run(Verify *verify, Run *run, HTAB **marks)
{
	HTAB *before;
	CommandId before_cid;
	int nest_level;
	ListCell *lc;

	CommandCounterIncrement();
	before = *marks != NULL ? *marks : idem_changes_mark();
	before_cid = GetCurrentCommandId(false);
	verify->run = run;
	/* what a run has set with SET or SET LOCAL is not set in a second one, in another session */
	nest_level = NewGUCNestLevel();
	run->error = idem_subxact_try(run_handler, verify, true);
	AtEOXact_GUC(false, nest_level);
	*marks = idem_changes_mark();
	if (run->error != NULL)
		return;
	run->changes = idem_changes_between(before, *marks);
	if (verify->claim != NULL)
		return;
	foreach (lc, run->changes)
	{
		IdemTableChange *change = lfirst(lc);

		if (change->kind != IDEM_CHANGE_DROPPED && change->kind != IDEM_CHANGE_CATALOG)
			idem_changes_compare(change, before_cid, GetCurrentCommandId(false),
								 verify->max_table_size);
	}
}

/* What the triggers that are deferred until the commit have written */
typedef struct Deferred
{
	HTAB *before;
	List *changes; /* of IdemTableChange, without content */
} Deferred;

static void
fire_deferred(void *arg)
{
	Deferred *deferred = arg;
	ConstraintsSetStmt *all_immediate = makeNode(ConstraintsSetStmt);

	AfterTriggerSetState(all_immediate);
	deferred->changes = idem_changes_between(deferred->before, idem_changes_mark());
}

/*
 * Fire the triggers and check the constraints that are deferred until the commit.  Returns the
 * error of one of them, or NULL; then *changes is what they have written.  The subtransaction is
 * rolled back at once: only then the server restores the mode of the constraints, and the next
 * run begins as the first one did.  *marks are those of the run before, and become those of now:
 * counters are not rolled back.
 */
static ErrorData *
check_deferred(HTAB **marks, List **changes)
{
	Deferred deferred = {.before = *marks};
	ErrorData *error = idem_subxact_try(fire_deferred, &deferred, false);

	*marks = idem_changes_mark();
	*changes = deferred.changes;
	return error;
}

/* The first run; it is rolled back (V1), so it is interrupted, too */
static void
run_alone(void *arg)
{
	Verify *verify = arg;
	HTAB *marks = NULL;
	List *deferred;

	do_run(verify, &verify->alone, &marks);
	if (verify->alone.error == NULL)
		verify->alone.error = check_deferred(&marks, &deferred);
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

/* How the content has changed: more rows, fewer rows, or other values */
static void
append_difference(StringInfo out, const IdemTableChange *change)
{
	int64 more = change->nadded - change->nremoved;
	StringInfoData names;

	appendStringInfoString(out, " The content changed: ");
	if (more != 0)
	{
		append_rows(out, more > 0 ? more : -more);
		appendStringInfoString(out, more > 0 ? " more." : " fewer.");
		return;
	}
	initStringInfo(&names);
	for (int i = 0; i < change->natts; i++)
	{
		if (!sums_equal(&change->columns[i].added, &change->columns[i].removed))
			append_name(&names, NameStr(change->columns[i].name));
	}
	if (names.len > 0)
		appendStringInfo(out, "other values in %s.", names.data);
	else
		/* each column has the same values as before, but in other rows */
		appendStringInfoString(out, "the same values in other rows.");
}

/* The verdict about a table that the second run has written (V3, V4) */
static void
judge_rows(Verify *verify, const IdemTableChange *change)
{
	static const struct
	{
		IdemMoment moment;
		const char *name;
	} moments[] = {{IDEM_MOMENT_NOW, "now()"}, {IDEM_MOMENT_XID, "transaction id"}};
	StringInfoData detail;
	const char *verdict = "ok";

	initStringInfo(&detail);
	if (change->kind == IDEM_CHANGE_REWRITTEN)
		appendStringInfoString(&detail, "Truncated or rewritten.");
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
		for (size_t m = 0; m < lengthof(moments); m++)
		{
			StringInfoData names;

			initStringInfo(&names);
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

/* The verdicts about the tables that the second run has written */
static void
judge_tables(Verify *verify, List *changes)
{
	bool rewritten = false;
	StringInfoData catalogs;
	int ncatalogs = 0;
	ListCell *lc;

	if (changes == NIL)
		add_verdict(verify, "second run", "ok", NULL, "The second run wrote no rows.");
	initStringInfo(&catalogs);
	foreach (lc, changes)
	{
		const IdemTableChange *change = lfirst(lc);

		switch (change->kind)
		{
			case IDEM_CHANGE_CREATED:
				add_verdict(verify, "second run", "warn", change->name,
							"The second run created this table. Its content was not compared.");
				break;
			case IDEM_CHANGE_DROPPED:
				add_verdict(verify, "second run", "warn", change->name,
							"The second run dropped this table.");
				break;
			case IDEM_CHANGE_CATALOG:
				appendStringInfo(&catalogs, "%s%s", ncatalogs++ > 0 ? ", " : "", change->name);
				break;
			case IDEM_CHANGE_REWRITTEN:
				rewritten = true;
				judge_rows(verify, change);
				break;
			case IDEM_CHANGE_ROWS:
				judge_rows(verify, change);
				break;
		}
	}
	/* TRUNCATE writes pg_class only; that alone is no DDL, and the table has a verdict of its own */
	if (ncatalogs > 1 ||
		(ncatalogs == 1 && !(rewritten && strcmp(catalogs.data, "pg_catalog.pg_class") == 0)))
		add_verdict(verify, "second run", "warn", NULL,
					psprintf("System catalogs were written, and not compared: %s.", catalogs.data));
}

/* deferred: what the triggers that the first run has deferred have written */
static void
judge_second_run(Verify *verify, Run *first, Run *second, HTAB *marks, List *deferred)
{
	List *deferred_now;
	ErrorData *error = check_deferred(&marks, &deferred_now);
	bool same = are_equal(first->result, second->result);
	int moments = idem_changes_look_at_jsonb(second->result);
	StringInfoData detail;
	ListCell *lc;

	/* the results of both runs (V4) */
	initStringInfo(&detail);
	appendStringInfoString(&detail, same ? "Both runs returned the same result" : "The second run returned another result");
	if (same && (moments & IDEM_MOMENT_NOW) != 0)
		append_moment(&detail, "now()", "the result");
	if (same && (moments & IDEM_MOMENT_XID) != 0)
		append_moment(&detail, "transaction id", "the result");
	appendStringInfoChar(&detail, '.');
	add_verdict(verify, "result", !same ? "fail" : moments != 0 ? "warn" :
																  "ok",
				NULL, detail.data);

	/*
	 * The tables.  If the second run has rewritten one, its content before is known if the first run
	 * has rewritten or created it, too: what it had after the first run was removed.
	 */
	foreach (lc, second->changes)
	{
		IdemTableChange *change = lfirst(lc);
		IdemTableChange *earlier = find_change(first->changes, change->relid);

		if (change->kind != IDEM_CHANGE_REWRITTEN || change->not_compared != NULL)
			continue;
		if (earlier == NULL || earlier->kind == IDEM_CHANGE_ROWS || earlier->not_compared != NULL)
			change->not_compared = "Its content before is gone.";
		else if (earlier->natts != change->natts)
			change->not_compared = "The run has altered its columns.";
		else
		{
			change->nremoved = earlier->nadded;
			change->removed = earlier->added;
			for (int i = 0; i < change->natts; i++)
				change->columns[i].removed = earlier->columns[i].added;
		}
	}
	judge_tables(verify, second->changes);

	/* the tables that deferred triggers write: those of the first run, and those of both (V3) */
	if (error != NULL)
	{
		add_error(verify, "second run", error);
		return;
	}
	foreach (lc, deferred_now)
	{
		const IdemTableChange *both = lfirst(lc);
		const IdemTableChange *one = find_change(deferred, both->relid);

		if (one == NULL || one->kind != both->kind || one->inserted != both->inserted ||
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
describe_values(const IdemTableChange *a, const IdemTableChange *b)
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
		const IdemColumnChange *x = &a->columns[i];
		const IdemColumnChange *y = &b->columns[i];
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
 * V5: a table that a run alone, or one after the interruption, has written: add a verdict if the two
 * have changed it differently.  One of them may be NULL.
 */
static void
judge_interrupted(Verify *verify, const IdemTableChange *a, const IdemTableChange *b)
{
	static const IdemTableChange none = {0};
	const IdemTableChange *written = a != NULL ? a : b;

	if (written->kind != IDEM_CHANGE_ROWS && written->kind != IDEM_CHANGE_REWRITTEN)
		return;
	if (a == NULL)
		a = &none;
	if (b == NULL)
		b = &none;
	if (a->not_compared != NULL || b->not_compared != NULL)
		add_verdict(verify, "interrupted", "warn", written->name,
					psprintf("The content was not compared. %s",
							 a->not_compared != NULL ? a->not_compared : b->not_compared));
	else if (a->nadded != b->nadded || a->nremoved != b->nremoved)
		add_verdict(verify, "interrupted", "fail", written->name,
					psprintf("A run adds %lld and removes %lld row versions; after the interruption it adds %lld and removes %lld.",
							 (long long) a->nadded, (long long) a->nremoved,
							 (long long) b->nadded, (long long) b->nremoved));
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
	HTAB *marks = NULL;
	List *deferred;
	uint64 held_answers;
	int n;
	ListCell *lc;

	do_run(verify, &first, &marks);
	if (first.error == NULL)
		first.error = check_deferred(&marks, &deferred);
	if (first.error != NULL)
	{
		add_error(verify, "interrupted", first.error);
		return;
	}

	held_answers = idem_keystore_held_answers();
	n = list_length(verify->verdicts);
	do_run(verify, &second, &marks);
	if (second.error != NULL)
		add_error(verify, "second run", second.error);
	else
		judge_second_run(verify, &first, &second, marks, deferred);
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
		const IdemTableChange *change = lfirst(lc);

		judge_interrupted(verify, change, find_change(first.changes, change->relid));
	}
	foreach (lc, first.changes)
	{
		const IdemTableChange *change = lfirst(lc);

		if (find_change(verify->alone.changes, change->relid) == NULL)
			judge_interrupted(verify, NULL, change);
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
	HTAB *marks = NULL;
	uint8 bytes[16];
	StringInfoData key;
	const char *problem = NULL;

	/* a key that no session uses */
	if (!pg_strong_random(bytes, sizeof(bytes)))
		ereport(ERROR,
				errcode(ERRCODE_INTERNAL_ERROR),
				errmsg("could not generate random values"));
	initStringInfo(&key);
	appendStringInfoString(&key, "idem_verify:");
	for (size_t i = 0; i < sizeof(bytes); i++)
		appendStringInfo(&key, "%02x", bytes[i]);

	for (size_t i = 0; i < lengthof(runs); i++)
	{
		IdemClaim claim = {
			.key = {.key = cstring_to_text(key.data), .scope = cstring_to_text("")},
			.ttl = idem_guc_ttl * USECS_PER_SEC,
			.wait = {.forever = true}};

		if (!verify->payload.isnull)
			claim.request = idem_args_fingerprint(verify->payload.value);
		verify->claim = &claim;
		do_run(verify, &runs[i], &marks);
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
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "max_table_size"),
				errdetail("It is a number of bytes; it must be zero or more."),
				errhint("Leave it out for the default of 256 MB."));
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
