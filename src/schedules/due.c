/*
 * due.c
 *		The ticks of one schedule become jobs, and the schedule is advanced (T1).
 *
 * Both happen in the transaction of the caller.  So each tick is one job, whatever crashes and
 * however many processes try.  The key of the job names the schedule and the tick.
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/timestamp.h"

#include "schedules/schedules.h"

#define KEY_SUFFIX_LEN 40

StaticAssertDecl(IDEM_MAX_SCHEDULE_LEN + KEY_SUFFIX_LEN <= IDEM_MAX_KEY_LEN,
				 "the key of a tick is not longer than other keys");

/* The key of the job of a tick: name@2026-11-19T04:00:00Z, with microseconds if there are any */
static text *
make_key(const text *name, TimestampTz tick)
{
	struct pg_tm tm;
	fsec_t fsec;
	char suffix[KEY_SUFFIX_LEN];
	int len = VARSIZE_ANY_EXHDR(name);
	text *key;

	if (timestamp2tm(tick, NULL, &tm, &fsec, NULL, NULL) != 0)
		ereport(ERROR,
				errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				errmsg("timestamp out of range"));
	snprintf(suffix, sizeof(suffix), "@%04d-%02d-%02dT%02d:%02d:%02d", tm.tm_year, tm.tm_mon,
			 tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec);
	if (fsec != 0)
		snprintf(suffix + strlen(suffix), sizeof(suffix) - strlen(suffix), ".%06d", (int) fsec);
	strlcat(suffix, "Z", sizeof(suffix));

	key = palloc(VARHDRSZ + len + strlen(suffix));
	SET_VARSIZE(key, VARHDRSZ + len + strlen(suffix));
	memcpy(VARDATA(key), VARDATA_ANY(name), len);
	memcpy(VARDATA(key) + len, suffix, strlen(suffix));
	return key;
}

/*
 * T9: raise an error unless the owner of the schedule found may enqueue into its queue now.  The
 * message is all that the log and the views show of a tick that the worker runs.
 */
static void
check_owner(IdemTable *schedules, const IdemQueue *queue)
{
	Oid owner = idem_row_oid(schedules->found, IDEM_SCHEDULES_OWNER);
	char *name = GetUserNameFromId(owner, true);
	const char *message = NULL;

	switch (idem_queuestore_may_enqueue(owner, queue->owner))
	{
		case IDEM_MAY_ENQUEUE:
			return;
		case IDEM_ROLE_IS_GONE:
			message = "the owner of the schedule does not exist";
			break;
		case IDEM_NO_EXECUTE:
			message = "the owner of the schedule may not execute idem_enqueue()";
			break;
		case IDEM_QUEUE_OF_ANOTHER:
			message = "the owner of the schedule may not use its queue";
			break;
	}
	ereport(ERROR,
			errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			errmsg("%s", message),
			name != NULL ? errdetail("The role \"%s\" has declared the schedule last.", name) :
						   errdetail("The role %u has declared the schedule last; it was dropped.", owner),
			name != NULL ?
				errhint("Give the role its privileges back, declare the schedule again as a role that may use the queue, or remove it with idem_unschedule().") :
				errhint("Declare the schedule again as a role that may use the queue, or remove it with idem_unschedule()."));
}

/*
 * T1: what the jobs of the schedule found have in common.  The queue says for how long a job
 * absorbs duplicates of its key; a duplicate is always absorbed, and its payload is ignored.
 */
static void
make_enqueue(IdemTable *schedules, IdemEnqueue *enqueue)
{
	memset(enqueue, 0, sizeof(*enqueue));
	idem_queuestore_get(idem_value_queue(idem_row_datum(schedules->found, IDEM_SCHEDULES_QUEUE)),
						&enqueue->queue);
	check_owner(schedules, &enqueue->queue);
	enqueue->policy = enqueue->queue.policy;
	enqueue->policy.on_duplicate = IDEM_ON_DUPLICATE_SKIP;
	enqueue->policy.rerun = false;
	enqueue->nowait = true;
	enqueue->now = idem_clock_now();
	enqueue->priority = idem_row_int32(schedules->found, IDEM_SCHEDULES_PRIORITY);
}

/*
 * Enqueue a job for each tick that gets one; returns the number of the last job.  Adds to *njobs
 * how many are new: another job may absorb a tick.
 */
static int64
enqueue_jobs(IdemTable *schedules, IdemEnqueue *enqueue, const text *name, const IdemTicks *ticks,
			 int *njobs)
{
	Jsonb *payload = idem_row_jsonb(schedules->found, IDEM_SCHEDULES_PAYLOAD);
	IdemEnqueued answer = {0};
	IdemTable jobs;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	for (int i = 0; i < ticks->njobs; i++)
	{
		/* in a database with a map the job has a slot of this database (M6) */
		IdemNewJob job = {
			.job_id = idem_jobtable_next_id(idem_shard_choose_slot(NULL, NULL)),
			.key = make_key(name, ticks->jobs[i]),
			.payload = {.value = JsonbPGetDatum(payload), .isnull = payload == NULL}};

		enqueue->run_at = ticks->jobs[i];
		idem_dedup_enqueue(&jobs, enqueue, &job, &answer);
		if (answer.outcome == IDEM_OUTCOME_ENQUEUED || answer.outcome == IDEM_OUTCOME_RERUN)
			(*njobs)++;
	}
	idem_table_close(&jobs);
	return answer.job_id;
}

/*
 * If the schedule is due: ask whether its owner may enqueue (T9), also if no tick gets a job;
 * enqueue its jobs, add the number of new ones to *njobs, and advance it
 * (T1).  It never waits for another transaction that has locked the schedule, or has enqueued
 * the key of a tick and is open; for the latter it raises 55P03 (T6).
 */
IdemTicked
idem_due_tick(text *name, TimestampTz now, bool tell_launcher, int *njobs)
{
	IdemTicks ticks;
	IdemEnqueue enqueue;
	IdemRhythm rhythm;
	IdemTable schedules;
	IdemTicked ticked;
	int64 last_job = 0;

	idem_schedulestore_open(&schedules, RowExclusiveLock);
	if (idem_schedulestore_lock_due(&schedules, name, now, &ticked))
	{
		IdemMissed missed = idem_value_word(idem_row_text(schedules.found, IDEM_SCHEDULES_MISSED),
											"missed", idem_missed_words, "Declare the schedule again.");

		make_enqueue(&schedules, &enqueue);
		idem_schedulestore_rhythm(&schedules, &rhythm);
		idem_ticks_due(&rhythm, idem_row_timestamp(schedules.found, IDEM_SCHEDULES_NEXT_TICK), missed,
					   now, &ticks);
		if (ticks.njobs > 0)
			last_job = enqueue_jobs(&schedules, &enqueue, name, &ticks, njobs);
		idem_schedulestore_advance(&schedules, &ticks, last_job, tell_launcher);
		ticked = IDEM_TICKED_DONE;
	}
	idem_table_close(&schedules);
	return ticked;
}
