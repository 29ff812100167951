/*
 * wait.c
 *		Procedures that wait for jobs: idem_wait, idem_wait_any, idem_wait_job.
 *
 * They check their arguments and say how to look; src/wake/sleep.c has the loop.  A look
 * checks the privileges anew, because it runs in a transaction of its own.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"

#include "jobs/fetch/fetch.h"

#define WAIT_NATTS	   1
#define WAIT_ANY_NATTS 2
#define WAIT_JOB_NATTS 2

static const Oid wait_types[WAIT_NATTS] = {BOOLOID};
static const Oid wait_any_types[WAIT_ANY_NATTS] = {BOOLOID, TEXTOID};
static const Oid wait_job_types[WAIT_JOB_NATTS] = {TEXTOID, JSONBOID};

IDEM_FUNCTION(idem_wait, RECORDOID, TEXTOID, INTERVALOID, BOOLOID);
IDEM_FUNCTION(idem_wait_any, RECORDOID, TEXTARRAYOID, INTERVALOID, BOOLOID, TEXTOID);
IDEM_FUNCTION(idem_wait_job, RECORDOID, INT8OID, INTERVALOID, TEXTOID, JSONBOID);

/* A wait for the end of a job, and what the last look has found */
typedef struct JobWait
{
	int64 job_id;
	MemoryContext context; /* of the result */
	char state[16];
	Jsonb *result;
} JobWait;

/* A2: can a job of the queue be fetched?  The table is opened as for a fetch (K13). */
static void
look_at_queue(int i, IdemLook *look, void *arg)
{
	text **queues = arg;
	IdemQueue queue;
	IdemTable jobs;

	idem_queuestore_use(queues[i], &queue);
	idem_jobtable_open(&jobs, RowExclusiveLock);
	idem_fetchstore_look(&jobs, &queue, look);
	idem_table_close(&jobs);
}

/* Wait for a job of one of the queues; the number of the queue, or -1 after the timeout */
int
idem_wait_for_queues(const char *command, text **queues, int n, int64 timeout)
{
	uint64 *subjects = palloc_array(uint64, n);
	IdemSleep sleep = {
		.command = command,
		.kind = IDEM_SUBJECT_QUEUE,
		.n = n,
		.subjects = subjects,
		.timeout = timeout,
		.look = look_at_queue,
		.arg = queues};

	for (int i = 0; i < n; i++)
		subjects[i] = idem_waiters_queue(queues[i]);
	return idem_sleep_wait(&sleep);
}

/* A8: ready is no claim on a job.  On a standby, where no job can be fetched, this is an error. */
Datum
idem_wait(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	text *queue;
	int64 timeout;
	Datum values[WAIT_NATTS];
	bool nulls[WAIT_NATTS] = {false};

	idem_fn_begin(fcinfo, &idem_wait_signature, "idem_wait()");
	(void) idem_fn_row_desc(fcinfo, wait_types, WAIT_NATTS, &row_desc);
	idem_sleep_check(fcinfo, "idem_wait()");
	queue = idem_args_queue(fcinfo, 0);
	timeout = idem_args_timeout(fcinfo, 1);

	values[0] = BoolGetDatum(idem_wait_for_queues("idem_wait()", &queue, 1, timeout) >= 0);
	PG_RETURN_DATUM(HeapTupleGetDatum(idem_fn_form_row(
		idem_fn_row_desc(fcinfo, wait_types, WAIT_NATTS, &row_desc), values, nulls,
		lengthof(values))));
}

Datum
idem_wait_any(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	text **queues;
	int n;
	int64 timeout;
	int answer;
	Datum values[WAIT_ANY_NATTS] = {0};
	bool nulls[WAIT_ANY_NATTS] = {false};

	idem_fn_begin(fcinfo, &idem_wait_any_signature, "idem_wait_any()");
	(void) idem_fn_row_desc(fcinfo, wait_any_types, WAIT_ANY_NATTS, &row_desc);
	idem_sleep_check(fcinfo, "idem_wait_any()");
	queues = idem_arrays_queues(fcinfo, 0, &n);
	timeout = idem_args_timeout(fcinfo, 1);

	answer = idem_wait_for_queues("idem_wait_any()", queues, n, timeout);
	values[0] = BoolGetDatum(answer >= 0);
	if (answer >= 0)
		values[1] = PointerGetDatum(queues[answer]);
	nulls[1] = answer < 0;
	PG_RETURN_DATUM(HeapTupleGetDatum(idem_fn_form_row(
		idem_fn_row_desc(fcinfo, wait_any_types, WAIT_ANY_NATTS, &row_desc), values, nulls,
		lengthof(values))));
}

/* A5: has the job ended?  The state of a job that is not there any more is "gone". */
static void
look_at_job(int i, IdemLook *look, void *arg)
{
	JobWait *wait = arg;
	IdemJobInfo info = {.state = "gone"};
	IdemTable jobs;
	bool exists;

	idem_jobtable_open(&jobs, AccessShareLock);
	exists = idem_jobstore_get(&jobs, wait->job_id, &info);
	idem_table_close(&jobs);
	strlcpy(wait->state, info.state, sizeof(wait->state));
	wait->result = idem_value_copy_jsonb(info.result, wait->context);
	look->found = exists && info.ended_at == 0 ? 0 : 1;
}

Datum
idem_wait_job(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	JobWait wait = {.context = CurrentMemoryContext};
	uint64 subject;
	IdemSleep sleep = {
		.command = "idem_wait_job()",
		.kind = IDEM_SUBJECT_JOB,
		.n = 1,
		.subjects = &subject,
		.look = look_at_job,
		.arg = &wait};
	Datum values[WAIT_JOB_NATTS];
	bool nulls[WAIT_JOB_NATTS] = {false};

	idem_fn_begin(fcinfo, &idem_wait_job_signature, NULL);
	(void) idem_fn_row_desc(fcinfo, wait_job_types, WAIT_JOB_NATTS, &row_desc);
	idem_sleep_check(fcinfo, "idem_wait_job()");
	wait.job_id = idem_args_job_id(fcinfo, 0);
	subject = idem_waiters_job(wait.job_id);
	sleep.timeout = idem_args_timeout(fcinfo, 1);

	(void) idem_sleep_wait(&sleep);
	values[0] = CStringGetTextDatum(wait.state);
	values[1] = JsonbPGetDatum(wait.result);
	nulls[1] = wait.result == NULL;
	PG_RETURN_DATUM(HeapTupleGetDatum(idem_fn_form_row(
		idem_fn_row_desc(fcinfo, wait_job_types, WAIT_JOB_NATTS, &row_desc), values, nulls,
		lengthof(values))));
}
