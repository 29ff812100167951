/*
 * wait.c
 *		Procedures that wait for jobs: idem_wait, idem_wait_any, idem_wait_job.
 *
 * They check their arguments and say how to look; src/wake/sleep.c has the loop.  A look
 * checks the privileges anew, because it runs in a transaction of its own.
 */
#include "postgres.h"

#include "funcapi.h"

#include "jobs/fetch/fetch.h"

IDEM_FUNCTION(idem_wait);
IDEM_FUNCTION(idem_wait_any);
IDEM_FUNCTION(idem_wait_job);

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
	text *queue;
	int64 timeout;
	bool ready;
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_wait_signature, "idem_wait()");
	idem_sleep_check(fcinfo, "idem_wait()");
	queue = idem_args_queue(fcinfo, 0);
	timeout = idem_args_timeout(fcinfo, 1);

	ready = idem_wait_for_queues("idem_wait()", &queue, 1, timeout) >= 0;
	idem_answer_begin(&answer, fcinfo, &idem_wait_signature);
	idem_answer_bool(&answer, Anum_idem_wait_ready, ready);
	return idem_answer_row(&answer);
}

Datum
idem_wait_any(PG_FUNCTION_ARGS)
{
	text **queues;
	int n;
	int64 timeout;
	int queue;
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_wait_any_signature, "idem_wait_any()");
	idem_sleep_check(fcinfo, "idem_wait_any()");
	queues = idem_args_queues(fcinfo, 0, &n);
	timeout = idem_args_timeout(fcinfo, 1);

	queue = idem_wait_for_queues("idem_wait_any()", queues, n, timeout);
	idem_answer_begin(&answer, fcinfo, &idem_wait_any_signature);
	idem_answer_bool(&answer, Anum_idem_wait_any_ready, queue >= 0);
	if (queue >= 0)
		idem_answer_text(&answer, Anum_idem_wait_any_queue, queues[queue]);
	return idem_answer_row(&answer);
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
	wait->result = idem_args_copy_jsonb(info.result, wait->context);
	look->found = exists && info.ended_at == 0 ? 0 : 1;
}

Datum
idem_wait_job(PG_FUNCTION_ARGS)
{
	JobWait wait = {.context = CurrentMemoryContext};
	uint64 subject;
	IdemSleep sleep = {
		.command = "idem_wait_job()",
		.kind = IDEM_SUBJECT_JOB,
		.n = 1,
		.subjects = &subject,
		.look = look_at_job,
		.arg = &wait};
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_wait_job_signature, NULL);
	idem_sleep_check(fcinfo, "idem_wait_job()");
	wait.job_id = idem_args_job_id(fcinfo, 0);
	subject = idem_waiters_job(wait.job_id);
	sleep.timeout = idem_args_timeout(fcinfo, 1);

	(void) idem_sleep_wait(&sleep);
	idem_answer_begin(&answer, fcinfo, &idem_wait_job_signature);
	idem_answer_string(&answer, Anum_idem_wait_job_state, wait.state);
	idem_answer_jsonb(&answer, Anum_idem_wait_job_result, wait.result);
	return idem_answer_row(&answer);
}
