/*
 * enqueue.c
 *		SQL functions that enqueue jobs: idem_enqueue, idem_enqueue_many.
 *
 * They check their arguments, call the store (enqueuestore.c, bulk.c), and form the rows to return.
 * The numbers of the jobs of idem_enqueue_many() follow the order of the array.
 */
#include "postgres.h"

#include "funcapi.h"
#include "utils/timestamp.h"

#include "jobs/enqueue/enqueue.h"

/* How far the clock of a client may be ahead, in microseconds (J8) */
#define MAX_CLOCK_AHEAD (5 * USECS_PER_SEC)

/* Arguments of both functions */
enum EnqueueArg
{
	ARG_QUEUE,
	ARG_PAYLOAD,
	ARG_KEY,
	ARG_DEDUP,
	ARG_ON_DUPLICATE,
	ARG_IF_RUNNING,
	ARG_KEY_TTL,
	ARG_INCLUDE_SCHEDULED,
	ARG_DELAY,
	ARG_RUN_AT,
	ARG_PRIORITY,
	ARG_MAX_ATTEMPTS,
	ARG_SCOPE,
	ARG_HEADERS
};

IDEM_FUNCTION(idem_enqueue);
IDEM_FUNCTION(idem_enqueue_many);

/* Reject arguments that need or exclude one another */
static void
check_policy(FunctionCallInfo fcinfo, bool has_key, IdemPolicy *policy)
{
	bool has_time = !PG_ARGISNULL(ARG_DELAY) || !PG_ARGISNULL(ARG_RUN_AT);

	/* only a key identifies duplicates */
	for (int arg = ARG_DEDUP; !has_key && arg <= ARG_INCLUDE_SCHEDULED; arg++)
	{
		if (!PG_ARGISNULL(arg))
			idem_args_refuse_combination("key", "There is no key, but an argument about duplicates was passed.",
										 "Pass a key, or leave out dedup, on_duplicate, if_running, key_ttl and include_scheduled.");
	}
	if (!has_key)
		return;
	if (policy->dedup == IDEM_DEDUP_UNTIL_EXPIRED && policy->key_ttl == 0)
		idem_args_refuse_combination("dedup", "\"until_expired\" needs a key_ttl.",
									 "Pass key_ttl, or declare it with idem_queue_set().");
	if (policy->dedup != IDEM_DEDUP_UNTIL_EXPIRED && !PG_ARGISNULL(ARG_KEY_TTL))
		idem_args_refuse_combination("key_ttl", "\"key_ttl\" applies only to \"until_expired\".",
									 "Pass dedup => 'until_expired', or leave key_ttl out.");
	if (policy->dedup != IDEM_DEDUP_UNTIL_EXECUTED && !PG_ARGISNULL(ARG_IF_RUNNING))
		idem_args_refuse_combination("if_running", "\"if_running\" applies only to \"until_executed\".",
									 "Pass dedup => 'until_executed', or leave if_running out.");
	if (policy->on_duplicate == IDEM_ON_DUPLICATE_DEBOUNCE && !has_time)
		idem_args_refuse_combination("on_duplicate", "\"debounce\" needs a time to postpone the job to.",
									 "Pass delay: the job runs after that time without another duplicate.");
	if (policy->on_duplicate == IDEM_ON_DUPLICATE_DEBOUNCE && !policy->include_scheduled)
		idem_args_refuse_combination("include_scheduled", "With \"debounce\" a scheduled job holds its key.",
									 "Leave include_scheduled out.");
	/* the queue may declare rerun; it applies only to until_executed */
	policy->rerun = policy->rerun && policy->dedup == IDEM_DEDUP_UNTIL_EXECUTED;
}

/*
 * Arguments that both functions have, but for keys and payloads.  J8: a run_at at most
 * MAX_CLOCK_AHEAD ahead makes no scheduled job, because the clock of the client may be ahead.
 */
static void
get_enqueue(FunctionCallInfo fcinfo, IdemEnqueue *enqueue)
{
	IdemPolicy *policy = &enqueue->policy;

	idem_queuestore_use(idem_args_queue(fcinfo, ARG_QUEUE), &enqueue->queue);

	/* how duplicates are treated: each argument that is null leaves the setting of the queue */
	*policy = enqueue->queue.policy;
	if (!PG_ARGISNULL(ARG_DEDUP))
		policy->dedup =
			idem_queuestore_word(PG_GETARG_TEXT_PP(ARG_DEDUP), "dedup", idem_dedup_words);
	if (!PG_ARGISNULL(ARG_ON_DUPLICATE))
		policy->on_duplicate = idem_queuestore_word(PG_GETARG_TEXT_PP(ARG_ON_DUPLICATE),
													"on_duplicate", idem_on_duplicate_words);
	if (!PG_ARGISNULL(ARG_IF_RUNNING))
		policy->rerun = idem_queuestore_word(PG_GETARG_TEXT_PP(ARG_IF_RUNNING), "if_running",
											 idem_if_running_words) != 0;
	if (!PG_ARGISNULL(ARG_KEY_TTL))
		policy->key_ttl =
			idem_args_span(PG_GETARG_DATUM(ARG_KEY_TTL), "key_ttl", IDEM_SPAN_POSITIVE);
	if (!PG_ARGISNULL(ARG_INCLUDE_SCHEDULED))
		policy->include_scheduled = PG_GETARG_BOOL(ARG_INCLUDE_SCHEDULED);
	else if (policy->on_duplicate == IDEM_ON_DUPLICATE_DEBOUNCE)
		policy->include_scheduled = true;

	if (!PG_ARGISNULL(ARG_DELAY) && !PG_ARGISNULL(ARG_RUN_AT))
		idem_args_refuse_combination("delay", "Both delay and run_at were passed.",
									 "Pass delay or run_at, not both.");
	enqueue->now = enqueue->run_at = idem_clock_now();
	if (!PG_ARGISNULL(ARG_DELAY))
		enqueue->run_at += idem_args_span(PG_GETARG_DATUM(ARG_DELAY), "delay", IDEM_SPAN_NOT_NEGATIVE);
	if (!PG_ARGISNULL(ARG_RUN_AT))
		enqueue->run_at = idem_args_run_at(fcinfo, ARG_RUN_AT);
	enqueue->later =
		enqueue->run_at > enqueue->now + (PG_ARGISNULL(ARG_RUN_AT) ? 0 : MAX_CLOCK_AHEAD);

	enqueue->priority = PG_ARGISNULL(ARG_PRIORITY) ? 0 : PG_GETARG_INT32(ARG_PRIORITY);
	enqueue->max_attempts = idem_args_max_attempts(fcinfo, ARG_MAX_ATTEMPTS);
	enqueue->nowait = false;
	/* only a map needs idem.scope */
	enqueue->scope = PG_ARGISNULL(ARG_SCOPE) ? NULL : idem_args_scope(fcinfo, ARG_SCOPE);
}

static void
set_payload(IdemNewJob *job, Datum payload, bool isnull)
{
	job->payload.isnull = isnull;
	if (!isnull)
		job->payload.value = JsonbPGetDatum(idem_args_jsonb(payload, "payload"));
}

#define ENQUEUE_OFFSET(column) (Anum_enqueue_many_result_##column - Anum_enqueue_result_##column)

StaticAssertDecl(ENQUEUE_OFFSET(job_id) == ENQUEUE_OFFSET(outcome) &&
					 ENQUEUE_OFFSET(job_id) == ENQUEUE_OFFSET(result),
				 "idem.enqueue_many_result has the columns of idem.enqueue_result in their order");

/*
 * Set the columns of idem.enqueue_result.  In the rows of idem_enqueue_many() they are
 * offset columns further right.
 */
static void
set_enqueue_columns(IdemAnswer *answer, int offset, const IdemEnqueued *enqueued)
{
	idem_answer_int64(answer, offset + Anum_enqueue_result_job_id, enqueued->job_id);
	idem_answer_string(answer, offset + Anum_enqueue_result_outcome,
					   idem_enqueuestore_outcome_names[enqueued->outcome]);
	idem_answer_jsonb(answer, offset + Anum_enqueue_result_result, enqueued->result);
}

Datum
idem_enqueue(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	IdemEnqueue enqueue;
	IdemNewJob job = {0};
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_enqueue_signature, "idem_enqueue()");
	get_enqueue(fcinfo, &enqueue);
	if (!PG_ARGISNULL(ARG_KEY))
	{
		job.key = PG_GETARG_TEXT_PP(ARG_KEY);
		idem_args_check_key(job.key);
	}
	check_policy(fcinfo, job.key != NULL, &enqueue.policy);
	set_payload(&job, PG_GETARG_DATUM(ARG_PAYLOAD), PG_ARGISNULL(ARG_PAYLOAD));
	job.headers = idem_headers_get(idem_headers_defaults(), fcinfo->args[ARG_HEADERS]);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	idem_enqueuestore_enqueue(&jobs, &enqueue, &job);
	idem_table_close(&jobs);

	idem_answer_begin(&answer, fcinfo, &idem_enqueue_signature);
	set_enqueue_columns(&answer, 0, &job.answer);
	return idem_answer_row(&answer);
}

Datum
idem_enqueue_many(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemEnqueue enqueue;
	Datum *payloads;
	bool *nulls;
	int n;
	Datum *keys;
	bool *no_key;
	int nkeys;
	Datum *headers;
	bool *no_headers;
	int nheaders;
	bool has_keys;
	bool has_headers;
	Jsonb *defaults;
	IdemNewJob *news;
	IdemElement element = {.array = "headers"};
	ErrorContextCallback context = {
		.previous = error_context_stack, .callback = idem_args_say_element, .arg = &element};
	IdemTable jobs;

	idem_fn_begin(fcinfo, &idem_enqueue_many_signature, "idem_enqueue_many()");
	idem_answer_begin(&answer, fcinfo, &idem_enqueue_many_signature);
	get_enqueue(fcinfo, &enqueue);
	idem_args_required_array(fcinfo, ARG_PAYLOAD, "payloads", &payloads, &nulls, &n);
	news = MemoryContextAllocExtended(CurrentMemoryContext, n * sizeof(IdemNewJob),
									  MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
	has_keys = idem_args_array(fcinfo, ARG_KEY, "keys", &keys, &no_key, &nkeys);
	if (has_keys)
		idem_args_check_length("payloads", n, "keys", nkeys);
	for (int i = 0; has_keys && i < n; i++)
	{
		if (no_key[i])
			continue;
		news[i].key = DatumGetTextPP(keys[i]);
		idem_args_check_key(news[i].key);
	}
	check_policy(fcinfo, has_keys, &enqueue.policy);

	/* J16: without the array all jobs have the default headers */
	defaults = idem_headers_defaults();
	has_headers = idem_args_array(fcinfo, ARG_HEADERS, "headers", &headers, &no_headers, &nheaders);
	if (has_headers)
		idem_args_check_length("payloads", n, "headers", nheaders);
	if (n == 0)
		return (Datum) 0;
	error_context_stack = &context;
	for (element.ord = 0; element.ord < n; element.ord++)
	{
		NullableDatum own = {.isnull = true};

		CHECK_FOR_INTERRUPTS();
		if (has_headers)
			own = (NullableDatum){headers[element.ord], no_headers[element.ord]};
		news[element.ord].headers = idem_headers_get(defaults, own);
	}
	element.array = "payloads";
	for (element.ord = 0; element.ord < n; element.ord++)
		set_payload(&news[element.ord], payloads[element.ord], nulls[element.ord]);
	element.ord = 0;
	/* the lock on the table comes first: the numbers depend on the map (M4) */
	idem_jobtable_open(&jobs, RowExclusiveLock);
	idem_jobtable_next_ids(enqueue.scope, news, n, &element.ord);
	element.ord = 0;
	idem_bulk_enqueue(&jobs, &enqueue, news, n, &element.ord);
	idem_table_close(&jobs);
	error_context_stack = context.previous;

	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		idem_answer_int32(&answer, Anum_enqueue_many_result_ord, i + 1);
		set_enqueue_columns(&answer, ENQUEUE_OFFSET(job_id), &news[i].answer);
		idem_answer_put(&answer);
	}
	return (Datum) 0;
}
