/*
 * many.c
 *		SQL functions that change many jobs (J20): idem_cancel_many, idem_retry_many,
 *		idem_fail_many, idem_snooze_many, idem_reschedule_many.
 *
 * They check their arguments, call the store, and return how many jobs were changed.  Each has
 * two forms: the jobs are given by their numbers, or by queue and state.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/timestamp.h"

#include "jobs/admin/jobadmin.h"

/* The most jobs that a call by queue changes */
#define MAX_JOBS 100000

IDEM_FUNCTION(idem_cancel_many);
IDEM_FUNCTION(idem_retry_many);
IDEM_FUNCTION(idem_fail_many);
IDEM_FUNCTION(idem_snooze_many);
IDEM_FUNCTION(idem_reschedule_many);

/* Positions of the arguments that say which jobs; the numbers are the first argument */
typedef struct Positions
{
	int tokens; /* 0: the function has no such argument */
	int queue;
	int state;
	int worker; /* 0: the function has no such argument */
	int max_jobs;
} Positions;

/* The states of the jobs that a function changes: some of idem_jobrow_state_words, in that order */
typedef struct States
{
	IdemJobState first;
	int n;
} States;

static const States live_states = {IDEM_JOB_WAITING, IDEM_JOB_EXPIRED - IDEM_JOB_WAITING + 1};
static const States waiting_states = {IDEM_JOB_WAITING, IDEM_JOB_BLOCKED - IDEM_JOB_WAITING + 1};
static const States leased_states = {IDEM_JOB_RUNNING, IDEM_JOB_EXPIRED - IDEM_JOB_RUNNING + 1};

static const char *const ended_words[] = {"dead", "cancelled", NULL};

/* The numbers of the jobs, and their tokens; nothing else may say which jobs */
static void
get_numbers(FunctionCallInfo fcinfo, const Positions *pos, IdemMany *many)
{
	int ntokens;

	if (!PG_ARGISNULL(pos->queue))
		idem_args_refuse_combination("ids", "Both ids and a queue were passed.",
									 "Pass the numbers of the jobs, or the queue whose jobs to change.");
	if (!PG_ARGISNULL(pos->state) || (pos->worker != 0 && !PG_ARGISNULL(pos->worker)))
		idem_args_refuse_combination("ids", "The numbers alone say which jobs.",
									 "Leave out what selects jobs of a queue: \"state\" and \"worker\".");
	idem_args_required_array(fcinfo, 0, "ids", &many->ids, NULL, &many->n);
	if (pos->tokens == 0)
		return;
	idem_args_require(fcinfo, pos->tokens, "tokens",
					  "Pass the tokens that idem_fetch() has returned, or a queue instead of ids and tokens.");
	idem_args_required_array(fcinfo, pos->tokens, "tokens", &many->tokens, NULL, &ntokens);
	idem_args_check_length("ids", many->n, "tokens", ntokens);
	for (int i = 0; i < ntokens; i++)
		idem_args_check_token(DatumGetInt64(many->tokens[i]));
}

/* The set of states, as bits; NULL: all of them */
static uint32
get_states(FunctionCallInfo fcinfo, int arg, const States *states)
{
	const char *words[IDEM_JOB_EXPIRED + 2] = {NULL};
	int state;

	if (PG_ARGISNULL(arg))
		return ((1 << states->n) - 1) << states->first;
	for (int i = 0; i < states->n; i++)
		words[i] = idem_jobrow_state_words[states->first + i];
	state = idem_args_word(PG_GETARG_TEXT_PP(arg), "state", words, "Leave it out for all of them.");
	return 1 << (states->first + state);
}

/* The arguments that say which jobs, but for the states of a queue */
static void
get_many(FunctionCallInfo fcinfo, const Positions *pos, IdemMany *many)
{
	many->n = -1;
	many->max_jobs = idem_args_max_jobs(fcinfo, pos->max_jobs, MAX_JOBS);
	if (!PG_ARGISNULL(0))
	{
		get_numbers(fcinfo, pos, many);
		return;
	}
	if (PG_ARGISNULL(pos->queue))
		idem_args_refuse_combination("ids", "Neither ids nor a queue was passed, or they are null.",
									 "Pass the numbers of the jobs, or the queue whose jobs to change. If there may be no numbers, pass coalesce(array_agg(...), '{}').");
	if (pos->tokens != 0 && !PG_ARGISNULL(pos->tokens))
		idem_args_refuse_combination("tokens", "Tokens were passed without ids.",
									 "Pass the numbers of the jobs with their tokens, or a queue without tokens.");
	many->queue = idem_args_queue(fcinfo, pos->queue);
	if (pos->worker != 0)
		many->worker = idem_args_worker(fcinfo, pos->worker);
}

static int
change_jobs(const IdemMany *many)
{
	IdemTable jobs;
	int n;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	n = idem_manystore_change(&jobs, many);
	idem_table_close(&jobs);
	return n;
}

Datum
idem_cancel_many(PG_FUNCTION_ARGS)
{
	static const Positions pos = {.queue = 1, .state = 2, .max_jobs = 3};
	IdemMany many = {.kind = IDEM_MANY_CANCEL};

	idem_fn_begin(fcinfo, &idem_cancel_many_signature, "idem_cancel_many()");
	get_many(fcinfo, &pos, &many);
	many.states = get_states(fcinfo, pos.state, &live_states);
	PG_RETURN_INT32(change_jobs(&many));
}

Datum
idem_retry_many(PG_FUNCTION_ARGS)
{
	static const Positions pos = {.queue = 1, .state = 2, .max_jobs = 3};
	IdemMany many = {.kind = IDEM_MANY_RETRY, .state = ended_words[0]};

	idem_fn_begin(fcinfo, &idem_retry_many_signature, "idem_retry_many()");
	get_many(fcinfo, &pos, &many);
	if (!PG_ARGISNULL(pos.state))
		many.state = ended_words[idem_args_word(PG_GETARG_TEXT_PP(pos.state), "state", ended_words,
												"Leave it out for dead jobs.")];
	PG_RETURN_INT32(change_jobs(&many));
}

Datum
idem_fail_many(PG_FUNCTION_ARGS)
{
	static const Positions pos = {.tokens = 1, .queue = 5, .state = 6, .worker = 7, .max_jobs = 8};
	IdemMany many = {.kind = IDEM_MANY_FAIL};

	idem_fn_begin(fcinfo, &idem_fail_many_signature, "idem_fail_many()");
	get_many(fcinfo, &pos, &many);
	many.states = get_states(fcinfo, pos.state, &leased_states);
	many.fail = idem_hold_get_failure(fcinfo, 2);
	many.fail.nowait = true;
	PG_RETURN_INT32(change_jobs(&many));
}

Datum
idem_snooze_many(PG_FUNCTION_ARGS)
{
	static const Positions pos = {.tokens = 1, .queue = 3, .state = 4, .worker = 5, .max_jobs = 6};
	IdemMany many = {.kind = IDEM_MANY_SNOOZE};

	idem_fn_begin(fcinfo, &idem_snooze_many_signature, "idem_snooze_many()");
	get_many(fcinfo, &pos, &many);
	many.states = get_states(fcinfo, pos.state, &leased_states);
	idem_args_require(fcinfo, 2, "delay", "Pass the time after which the jobs are due again, such as '90 s'.");
	many.delay = idem_args_span(PG_GETARG_DATUM(2), "delay", IDEM_SPAN_NOT_NEGATIVE);
	PG_RETURN_INT32(change_jobs(&many));
}

/* The new time and the new priority; at least one of them */
static void
get_schedule(FunctionCallInfo fcinfo, IdemMany *many)
{
	many->has_run_at = !PG_ARGISNULL(1);
	many->has_priority = !PG_ARGISNULL(2);
	if (!many->has_run_at && !many->has_priority)
		idem_args_refuse_combination("run_at", "Neither run_at nor a priority was passed.",
									 "Pass what to change. run_at => now() lets the jobs run now.");
	if (many->has_run_at)
		many->run_at = idem_args_run_at(fcinfo, 1);
	if (many->has_priority)
		many->priority = PG_GETARG_INT32(2);
}

Datum
idem_reschedule_many(PG_FUNCTION_ARGS)
{
	static const Positions pos = {.queue = 3, .state = 4, .max_jobs = 5};
	IdemMany many = {.kind = IDEM_MANY_RESCHEDULE};

	idem_fn_begin(fcinfo, &idem_reschedule_many_signature, "idem_reschedule_many()");
	get_many(fcinfo, &pos, &many);
	many.states = get_states(fcinfo, pos.state, &waiting_states);
	get_schedule(fcinfo, &many);
	PG_RETURN_INT32(change_jobs(&many));
}
