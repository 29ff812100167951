/*
 * queue.c
 *		SQL functions for queues: idem_queue_set, idem_queue_drop, idem_pause, idem_resume.
 *
 * They check their arguments and call the store (jobs/queuestore.c).  EXECUTE is the only
 * privilege that they need, with one exception: only a caller with the privileges of the
 * owner of a queue can change or remove that owner.  The file is in this folder because
 * idem_queue_set() also reads the schedules of the queue.
 */
#include "postgres.h"

#include "schedules/schedules.h"

/* idem_queue_set() counts at most this many jobs */
#define MAX_COUNTED 10000

IDEM_FUNCTION(idem_queue_set);
IDEM_FUNCTION(idem_queue_drop);
IDEM_FUNCTION(idem_pause);
IDEM_FUNCTION(idem_resume);

/* Arguments of idem_queue_set() after the name of the queue, and their columns in idem.queues */
static const struct
{
	AttrNumber column;
	const char *name;
	const char *const *words; /* the valid values of a word, else NULL */
	int span;				  /* IdemSpan of an interval, else -1 */
} queue_settings[] = {
	{IDEM_QUEUES_DEDUP, "dedup", idem_dedup_words, -1},
	{IDEM_QUEUES_ON_DUPLICATE, "on_duplicate", idem_on_duplicate_words, -1},
	{IDEM_QUEUES_IF_RUNNING, "if_running", idem_if_running_words, -1},
	{IDEM_QUEUES_KEY_TTL, "key_ttl", NULL, IDEM_SPAN_POSITIVE},
	{IDEM_QUEUES_INCLUDE_SCHEDULED, "include_scheduled", NULL, -1},
	{IDEM_QUEUES_DEBOUNCE_MAX, "debounce_max", NULL, IDEM_SPAN_POSITIVE},
	{IDEM_QUEUES_LEASE, "lease", NULL, IDEM_SPAN_LEASE_OR_NONE},
	{IDEM_QUEUES_MAX_ATTEMPTS, "max_attempts", NULL, -1},
	{IDEM_QUEUES_BACKOFF, "backoff", NULL, IDEM_SPAN_POSITIVE},
	{IDEM_QUEUES_BACKOFF_MAX, "backoff_max", NULL, IDEM_SPAN_POSITIVE},
	{IDEM_QUEUES_KEEP, "keep", NULL, IDEM_SPAN_NOT_NEGATIVE},
	{IDEM_QUEUES_KEEP_DEAD, "keep_dead", NULL, IDEM_SPAN_NOT_NEGATIVE},
	{IDEM_QUEUES_OWNER, "owner", NULL, -1},
};

/*
 * T9: warn of what other roles have left in a queue that has just got this owner: schedules, which
 * do not tick any more, and jobs, which the workers of the owner will run.
 */
static void
warn_of_others(text *queue, Oid owner)
{
	IdemTable schedules;
	int64 nschedules;
	int njobs = idem_queuestore_count_jobs(queue, MAX_COUNTED);

	idem_table_open(&schedules, &idem_schedulestore_def, AccessShareLock);
	nschedules = idem_schedulestore_count_refused(&schedules, queue, owner);
	idem_table_close(&schedules);
	if (nschedules > 0)
		ereport(WARNING,
				errcode(ERRCODE_WARNING),
				errmsg_plural("%lld schedule of the queue does not tick any more",
							  "%lld schedules of the queue do not tick any more",
							  (unsigned long) nschedules, (long long) nschedules),
				errdetail("Roles that have declared schedules may not enqueue into the queue of the new owner."),
				errhint("Declare such a schedule again as a role that may, or remove it with idem_unschedule(). idem.schedule_status shows the owners."));
	if (njobs > 0)
		ereport(WARNING,
				errcode(ERRCODE_WARNING),
				njobs < MAX_COUNTED ?
					errmsg_plural("%d job of the queue was enqueued before the change of its owner",
								  "%d jobs of the queue were enqueued before the change of its owner", njobs, njobs) :
					errmsg("at least %d jobs of the queue were enqueued before the change of its owner", njobs),
				errdetail("Other roles may have enqueued them. The workers of the new owner will run them."),
				errhint("idem.job_status lists the jobs. If you do not trust these roles, cancel jobs with idem_cancel_many()."));
}

Datum
idem_queue_set(PG_FUNCTION_ARGS)
{
	NullableDatum columns[IDEM_QUEUES_NATTS + 1];
	IdemTable queues;
	text *queue;
	bool has_new_owner;

	idem_fn_begin(fcinfo, &idem_queue_set_signature, "idem_queue_set()");
	queue = idem_args_queue(fcinfo, 0);
	for (int i = 0; i <= IDEM_QUEUES_NATTS; i++)
		columns[i].isnull = true;
	for (int i = 0; i < (int) lengthof(queue_settings); i++)
	{
		NullableDatum value = fcinfo->args[i + 1];

		if (!value.isnull && queue_settings[i].words != NULL)
			(void) idem_queuestore_word(DatumGetTextPP(value.value), queue_settings[i].name,
										queue_settings[i].words);
		if (!value.isnull && queue_settings[i].span >= 0)
			(void) idem_args_span(value.value, queue_settings[i].name, queue_settings[i].span);
		columns[queue_settings[i].column] = value;
	}
	(void) idem_args_max_attempts(fcinfo, 8);

	idem_queuestore_open(&queues);
	has_new_owner = idem_queuestore_set(&queues, queue, columns);
	idem_table_close(&queues);
	if (has_new_owner)
		warn_of_others(queue, DatumGetObjectId(columns[IDEM_QUEUES_OWNER].value));
	PG_RETURN_VOID();
}

Datum
idem_queue_drop(PG_FUNCTION_ARGS)
{
	IdemTable queues;
	text *queue;
	bool dropped;

	idem_fn_begin(fcinfo, &idem_queue_drop_signature, "idem_queue_drop()");
	queue = idem_args_queue(fcinfo, 0);

	idem_queuestore_open(&queues);
	dropped = idem_queuestore_drop(&queues, queue);
	idem_table_close(&queues);
	PG_RETURN_BOOL(dropped);
}

static Datum
set_pause(FunctionCallInfo fcinfo, bool pause)
{
	text *queue = idem_args_queue(fcinfo, 0);
	IdemTable queues;
	bool changed;

	idem_queuestore_open(&queues);
	changed = idem_queuestore_pause(&queues, queue, pause);
	idem_table_close(&queues);
	PG_RETURN_BOOL(changed);
}

Datum
idem_pause(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_pause_signature, "idem_pause()");
	return set_pause(fcinfo, true);
}

Datum
idem_resume(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_resume_signature, "idem_resume()");
	return set_pause(fcinfo, false);
}
