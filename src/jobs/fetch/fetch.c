/*
 * fetch.c
 *		SQL functions that fetch jobs: idem_fetch, idem_fetch_any.
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/pg_prng.h"
#include "utils/pg_lsn.h"

#include "jobs/fetch/fetch.h"

IDEM_FUNCTION(idem_fetch);
IDEM_FUNCTION(idem_fetch_any);

static int
get_batch_size(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "batch", "Leave it out to fetch one job.");
	if (PG_GETARG_INT32(arg) < 1 || PG_GETARG_INT32(arg) > IDEM_MAX_FETCH_BATCH)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid batch"),
				errdetail("The batch is %d; it must be between 1 and %d.", PG_GETARG_INT32(arg), IDEM_MAX_FETCH_BATCH),
				errhint("Call idem_fetch() again for more."));
	return PG_GETARG_INT32(arg);
}

static void
put_fetched(const IdemJobInfo *job, void *arg)
{
	IdemAnswer *answer = arg;

	idem_answer_int64(answer, Anum_fetch_result_job_id, job->job_id);
	idem_answer_int64(answer, Anum_fetch_result_token, job->token);
	idem_answer_int32(answer, Anum_fetch_result_attempt, job->attempt);
	idem_answer_int32(answer, Anum_fetch_result_max_attempts, job->max_attempts);
	idem_answer_text(answer, Anum_fetch_result_queue, job->queue);
	idem_answer_jsonb(answer, Anum_fetch_result_payload, job->payload);
	idem_answer_text(answer, Anum_fetch_result_key, job->key);
	idem_answer_time(answer, Anum_fetch_result_enqueued_at, job->enqueued_at);
	idem_answer_set(answer, Anum_fetch_result_lsn, PG_LSNOID, LSNGetDatum(job->lsn));
	idem_answer_jsonb(answer, Anum_fetch_result_progress, job->progress);
	idem_answer_jsonb(answer, Anum_fetch_result_headers, job->headers);
	idem_answer_jsonb(answer, Anum_fetch_result_links, job->links);
	idem_answer_put(answer);
}

/* Check the arguments about a queue */
static void
get_fetch(FunctionCallInfo fcinfo, text *queue, IdemFetch *fetch)
{
	idem_queuestore_use(queue, &fetch->queue);
	fetch->batch = get_batch_size(fcinfo, 1);
	fetch->lease = PG_ARGISNULL(2) ?
		fetch->queue.lease :
		idem_args_span(PG_GETARG_DATUM(2), "lease", IDEM_SPAN_LEASE_OR_NONE);
	fetch->worker = idem_args_worker(fcinfo, 3);
	if (fetch->lease == 0)
		idem_fetchstore_check_isolation("idem_fetch() without a lease",
										"BEGIN ISOLATION LEVEL READ COMMITTED, or pass a lease and do the work in a later transaction.");
}

/* Jobs were fetched with a lease, and the transaction is not about to commit */
static void
note_open_leases(void)
{
	if (IsTransactionBlock())
		ereport(NOTICE,
				errmsg("other sessions cannot see these leases before the transaction commits"),
				errdetail("If the transaction rolls back, the leases are lost, even if work was done under them."),
				errhint("Commit before you do the work, or fetch without a lease to do it in this transaction."));
}

Datum
idem_fetch(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable jobs;
	IdemFetch fetch;

	idem_fn_begin(fcinfo, &idem_fetch_signature, "idem_fetch()");
	idem_answer_begin(&answer, fcinfo, &idem_fetch_signature);
	get_fetch(fcinfo, idem_args_queue(fcinfo, 0), &fetch);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	(void) idem_fetchstore_fetch(&jobs, &fetch, put_fetched, &answer);
	idem_table_close(&jobs);

	if (fetch.lease > 0 && answer.nrows > 0)
		note_open_leases();
	return (Datum) 0;
}

/* The queues of a call of idem_fetch_any() */
typedef struct FetchAny
{
	IdemAnswer answer;
	IdemFetch *fetches;
	bool *is_empty; /* the queue had fewer jobs than it was asked for */
	int n;
	int first; /* the queue that is asked first */
	int left;  /* so many jobs are still wanted */
	bool has_got;
	bool has_leased;
	bool was_long; /* while it looked at a queue in vain, jobs may have come to another one */
} FetchAny;

/* Ask a queue for at most so many jobs */
static void
fetch_share(FetchAny *any, IdemTable *jobs, int i, int share)
{
	IdemFetch *fetch = &any->fetches[i];
	int64 before = any->answer.nrows;
	int got;

	fetch->batch = share;
	any->was_long |= idem_fetchstore_fetch(jobs, fetch, put_fetched, &any->answer);
	got = any->answer.nrows - before;
	any->left -= got;
	any->is_empty[i] = got < share;
	any->has_got |= got > 0;
	any->has_leased |= got > 0 && fetch->lease > 0;
}

/*
 * J15: ask all queues for an equal share.  What some of them do not have is divided in the same way
 * among the others, in further rounds.
 */
static void
fetch_from_all(FetchAny *any, IdemTable *jobs)
{
	int nqueues = any->n;

	while (any->left > 0 && nqueues > 0)
	{
		int share = Max(any->left / nqueues, 1);

		for (int i = 0; i < any->n && any->left > 0; i++)
		{
			int queue = (any->first + i) % any->n;

			CHECK_FOR_INTERRUPTS();
			if (any->is_empty[queue])
				continue;
			fetch_share(any, jobs, queue, share);
			nqueues -= any->is_empty[queue];
		}
	}
}

/* J15: each call of a session begins with another queue, so that none starves */
static int
choose_first(int n)
{
	static uint32 turn = 0;

	if (turn == 0)
		turn = pg_prng_uint32(&pg_global_prng_state);
	return turn++ % n;
}

Datum
idem_fetch_any(PG_FUNCTION_ARGS)
{
	FetchAny any = {0};
	text **queues;
	IdemTable jobs;

	idem_fn_begin(fcinfo, &idem_fetch_any_signature, "idem_fetch_any()");
	idem_answer_begin(&any.answer, fcinfo, &idem_fetch_any_signature);
	queues = idem_args_queues(fcinfo, 0, &any.n);
	any.left = get_batch_size(fcinfo, 1);
	any.fetches = palloc_array(IdemFetch, any.n);
	any.is_empty = palloc0_array(bool, any.n);
	for (int i = 0; i < any.n; i++)
		get_fetch(fcinfo, queues[i], &any.fetches[i]);
	any.first = choose_first(any.n);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	fetch_from_all(&any, &jobs);
	/* J14: as a fetch from one queue does */
	if (any.was_long && !any.has_got)
	{
		memset(any.is_empty, 0, any.n * sizeof(bool));
		fetch_from_all(&any, &jobs);
	}
	idem_table_close(&jobs);
	if (any.has_leased)
		note_open_leases();
	return (Datum) 0;
}
