/*
 * schedules.h
 *		Schedules: when they tick, and their rows.
 */
#ifndef IDEM_SCHEDULES_H
#define IDEM_SCHEDULES_H

#include "nodes/pg_list.h"

#include "jobs/admin/jobadmin.h"
#include "jobs/enqueue/enqueue.h"
#include "jobs/fetch/fetch.h"
#include "jobs/hold/hold.h"
#include "jobs/row/job.h"

#define IDEM_MAX_SCHEDULE_LEN 255

/* The most schedules of a database (T10) */
#define IDEM_MAX_SCHEDULES 10000

/* With missed => 'all': so many of the newest ticks get a job */
#define IDEM_MAX_MISSED 1000

/* What becomes of ticks that were missed; in the order of idem_missed_words (T4) */
typedef enum IdemMissed
{
	IDEM_MISSED_SKIP,
	IDEM_MISSED_ONCE,
	IDEM_MISSED_ALL
} IdemMissed;

/* When a schedule ticks */
typedef struct IdemRhythm
{
	text *cron;	 /* NULL: every counts */
	int64 every; /* in microseconds */
	text *time_zone;
	TimestampTz starts_at; /* DT_NOBEGIN: none */
	TimestampTz ends_at;   /* DT_NOEND: none */
} IdemRhythm;

/* What idem_schedule() declares */
typedef struct IdemSchedule
{
	text *name;
	text *queue;
	Oid owner;
	IdemRhythm rhythm;
	Datum every; /* as given, if rhythm.cron is NULL */
	text *missed;
	int priority;
	Jsonb *payload; /* or NULL */
} IdemSchedule;

/* The ticks of a schedule that are due */
typedef struct IdemTicks
{
	int64 n;		  /* how many */
	int njobs;		  /* how many of them get a job (T4) */
	TimestampTz next; /* the first tick that is not due; DT_NOEND: none */
	TimestampTz jobs[IDEM_MAX_MISSED];
} IdemTicks;

/* What became of a schedule that was due */
typedef enum IdemTicked
{
	IDEM_TICKED_DONE,
	IDEM_TICKED_LATER, /* it is not due any more: another transaction was faster */
	IDEM_TICKED_LOCKED /* another transaction has locked it */
} IdemTicked;

/* ticks.c */
extern const char *const idem_missed_words[];
extern void idem_ticks_check(const IdemRhythm *rhythm);
extern TimestampTz idem_ticks_first(const IdemRhythm *rhythm, TimestampTz after);
extern void idem_ticks_due(const IdemRhythm *rhythm, TimestampTz next, IdemMissed missed,
						   TimestampTz now, IdemTicks *ticks);

/* schedulestore.c */
extern void idem_schedulestore_end_transaction(bool is_commit);
extern const IdemTableDef idem_schedulestore_def;
extern bool idem_schedulestore_is_subscribed(void);
extern TimestampTz idem_schedulestore_set(IdemTable *schedules, const IdemSchedule *schedule);
extern bool idem_schedulestore_drop(IdemTable *schedules, text *name);
extern bool idem_schedulestore_pause(IdemTable *schedules, text *name);
extern bool idem_schedulestore_resume(IdemTable *schedules, text *name);
extern List *idem_schedulestore_list_due(IdemTable *schedules, TimestampTz now, int skip, int max);
extern int64 idem_schedulestore_count_refused(IdemTable *schedules, text *queue, Oid owner);
extern TimestampTz idem_schedulestore_next(IdemTable *schedules, TimestampTz after);
extern IdemTicked idem_schedulestore_tick(text *name, TimestampTz now, bool tell_launcher,
										  int *njobs);

#endif /* IDEM_SCHEDULES_H */
