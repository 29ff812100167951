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
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "lib/stringinfo.h"
#include "nodes/parsenodes.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/tuplestore.h"

#include "jobs/fetch/fetch.h"
#include "jobs/hold/hold.h"
#include "jobs/row/job.h"
#include "keys/keys.h"
#include "testing/testing.h"

IDEM_FUNCTION(idem_verify);

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
	List *verdicts; /* of IdemVerdict */
	Run alone;
	/* of the run that is being done */
	Run *run;
	IdemClaim *claim; /* NULL: call the handler; else call idem_call() with it */
	bool replayed;
} Verify;

/* Equal as jsonb compares (K11) */
static bool
are_equal(Jsonb *a, Jsonb *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return compareJsonbContainers(&a->root, &b->root) == 0;
}

/* The memory of the handler may not outlive the subtransaction */
static Jsonb *
copy_jsonb(const Jsonb *value)
{
	Jsonb *copy;

	if (value == NULL)
		return NULL;
	copy = palloc(VARSIZE(value));
	memcpy(copy, value, VARSIZE(value));
	return copy;
}

static void
call_handler(void *arg)
{
	Verify *verify = arg;
	Jsonb *result;

	if (verify->claim != NULL)
	{
		IdemKeyInfo info;

		verify->replayed =
			idem_call_once(verify->handler, verify->payload, verify->claim, &info);
		result = info.result;
	}
	else
		result = idem_handler_run(verify->handler, verify->payload);
	verify->run->result = copy_jsonb(result);
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

	idem_run_as_current(&job, call_handler, arg);
}

/* Find out what the run has done to the content of the tables */
static void
compare_content(Verify *verify, List *changes, CommandId before, CommandId after)
{
	ListCell *lc;

	foreach (lc, changes)
	{
		IdemTableChange *change = lfirst(lc);

		if (change->kind != IDEM_CHANGE_DROPPED && change->kind != IDEM_CHANGE_CATALOG)
			idem_content_compare(change, before, after, verify->max_table_size);
	}
}

/*
 * Run the handler once, and find out what it has done.  The first run of a scenario gets no
 * marks.
 */
static void
do_run(Verify *verify, Run *run, HTAB **marks)
{
	HTAB *before;
	CommandId before_cid;
	int nest_level;

	CommandCounterIncrement();
	before = *marks != NULL ? *marks : idem_written_mark();
	before_cid = GetCurrentCommandId(false);
	verify->run = run;
	/* what a run has set with SET or SET LOCAL is not set in a second one, in another session */
	nest_level = NewGUCNestLevel();
	run->error = idem_subxact_try(run_handler, verify, true);
	AtEOXact_GUC(false, nest_level);
	*marks = idem_written_mark();
	if (run->error != NULL)
		return;
	run->changes = idem_written_between(before, *marks);
	if (verify->claim == NULL)
		compare_content(verify, run->changes, before_cid, GetCurrentCommandId(false));
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
	deferred->changes = idem_written_between(deferred->before, idem_written_mark());
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

	*marks = idem_written_mark();
	*changes = deferred.changes;
	return error;
}

static void
add_error(Verify *verify, const char *check, const ErrorData *error)
{
	idem_verdict_add(&verify->verdicts, check, "fail", NULL, idem_subxact_describe(error));
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
		idem_verdict_add(&verify->verdicts, "first run", "ok", NULL,
						 "The handler ran without an error.");
}

/*
 * A table that the second run has rewritten, and the first one has rewritten or created: the
 * content after the first run is known.
 */
static void
join_rewritten(List *changes, List *earlier)
{
	ListCell *lc;

	foreach (lc, changes)
	{
		IdemTableChange *change = lfirst(lc);
		IdemTableChange *first = idem_written_find(earlier, change->relid);

		if (change->kind != IDEM_CHANGE_REWRITTEN || change->not_compared != NULL)
			continue;
		if (first == NULL || first->kind == IDEM_CHANGE_ROWS || first->not_compared != NULL)
			change->not_compared = "Its content before is gone.";
		else
			idem_content_replace_removed(change, first);
	}
}

/* deferred: what the triggers that the first run has deferred have written */
static void
judge_second_run(Verify *verify, Run *first, Run *second, HTAB *marks, List *deferred)
{
	List *deferred_now;
	ErrorData *error = check_deferred(&marks, &deferred_now);

	idem_verdict_result(&verify->verdicts, are_equal(first->result, second->result),
						idem_content_look_at_jsonb(second->result));
	join_rewritten(second->changes, first->changes);
	idem_verdict_second_run(&verify->verdicts, second->changes);
	if (error != NULL)
		add_error(verify, "second run", error);
	else
		idem_verdict_deferred(&verify->verdicts, deferred, deferred_now);
}

/* A run after the interrupted one, and the second run after that; rolled back (V1) */
static void
run_twice(void *arg)
{
	Verify *verify = arg;
	Run first = {0};
	Run second = {0};
	HTAB *marks = NULL;
	List *deferred;
	uint64 held_answers;
	int nverdicts;

	do_run(verify, &first, &marks);
	if (first.error == NULL)
		first.error = check_deferred(&marks, &deferred);
	if (first.error != NULL)
	{
		add_error(verify, "interrupted", first.error);
		return;
	}
	held_answers = idem_keystore_held_answers();
	nverdicts = list_length(verify->verdicts);
	do_run(verify, &second, &marks);
	if (second.error != NULL)
		add_error(verify, "second run", second.error);
	else
		judge_second_run(verify, &first, &second, marks, deferred);
	if (idem_keystore_held_answers() != held_answers)
	{
		idem_verdict_soften(verify->verdicts, nverdicts);
		idem_verdict_add(&verify->verdicts, "second run", "warn", NULL,
						 "The second run claimed a key that the first run had claimed and not finished, and got \"held\". A real second run gets \"finished\" without a result. Finish the key in the handler.");
	}
	idem_verdict_interrupted(&verify->verdicts, verify->alone.changes, first.changes,
							 are_equal(verify->alone.result, first.result));
}

/* A key that no session uses */
static text *
make_key(void)
{
	uint8 bytes[16];
	StringInfoData key;

	if (!pg_strong_random(bytes, sizeof(bytes)))
		ereport(ERROR,
				errcode(ERRCODE_INTERNAL_ERROR),
				errmsg("could not generate random values"));
	initStringInfo(&key);
	appendStringInfoString(&key, "idem_verify:");
	for (size_t i = 0; i < sizeof(bytes); i++)
		appendStringInfo(&key, "%02x", bytes[i]);
	return cstring_to_text_with_len(key.data, key.len);
}

/* One call of idem_call() with this key */
static void
do_call(Verify *verify, text *key, Run *run, HTAB **marks)
{
	IdemClaim claim = {
		.key = {.key = key, .scope = cstring_to_text("")},
		.ttl = idem_guc_ttl * USECS_PER_SEC,
		.wait = {.forever = true}};

	if (!verify->payload.isnull)
		claim.request = idem_value_fingerprint(verify->payload.value);
	verify->claim = &claim;
	do_run(verify, run, marks);
	verify->claim = NULL;
}

/* Why the second call of idem_call() was not a plain replay (V6); NULL: it was */
static const char *
find_call_problem(Verify *verify, const Run *first, const Run *second)
{
	if (!verify->replayed)
		return "The second call ran the handler again.";
	if (!are_equal(first->result, second->result))
		return "The second call returned another result.";
	if (second->changes != NIL)
		return "The second call wrote rows.";
	return NULL;
}

/* Two calls of idem_call() with one key (V6); rolled back (V1) */
static void
call_twice(void *arg)
{
	Verify *verify = arg;
	Run first = {0};
	Run second = {0};
	HTAB *marks = NULL;
	text *key = make_key();

	do_call(verify, key, &first, &marks);
	if (first.error == NULL)
		do_call(verify, key, &second, &marks);
	if (first.error != NULL || second.error != NULL)
		add_error(verify, "idem_call", first.error != NULL ? first.error : second.error);
	else
	{
		const char *problem = find_call_problem(verify, &first, &second);

		idem_verdict_add(&verify->verdicts, "idem_call", problem == NULL ? "ok" : "fail", NULL,
						 problem == NULL ?
							 "The second call returned the stored result, and wrote nothing." :
							 problem);
	}
}

static int64
get_max_table_size(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "max_table_size", "Leave it out for the default of 256 MB.");
	if (PG_GETARG_INT64(arg) < 0)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "max_table_size"),
				errdetail("It is a number of bytes; it must be zero or more."),
				errhint("Leave it out for the default of 256 MB."));
	return PG_GETARG_INT64(arg);
}

static void
put_verdicts(IdemAnswer *answer, List *verdicts)
{
	ListCell *lc;

	foreach (lc, verdicts)
	{
		const IdemVerdict *verdict = lfirst(lc);

		idem_answer_string(answer, Anum_verify_result_check, verdict->check);
		idem_answer_string(answer, Anum_verify_result_verdict, verdict->verdict);
		idem_answer_string(answer, Anum_verify_result_object, verdict->object);
		idem_answer_string(answer, Anum_verify_result_detail, verdict->detail);
		idem_answer_put(answer);
	}
}

Datum
idem_verify(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	Verify verify = {0};
	int nest_level;

	idem_fn_begin(fcinfo, &idem_verify_signature, "idem_verify()");
	idem_answer_begin(&answer, fcinfo, &idem_verify_signature);
	verify.handler = idem_handler_arg(fcinfo, 0);
	verify.payload = fcinfo->args[1];
	verify.max_table_size = get_max_table_size(fcinfo, 2);
	idem_handler_check(verify.handler, verify.payload.isnull);

	/* written.c needs the statistics of the transaction */
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
	put_verdicts(&answer, verify.verdicts);
	return (Datum) 0;
}
