/*
 * jobadmin.h
 *		Look at jobs and change them from outside: by number, by key, many at once.
 */
#ifndef IDEM_JOBS_JOBADMIN_H
#define IDEM_JOBS_JOBADMIN_H

#include "jobs/enqueue/enqueue.h"
#include "jobs/hold/hold.h"

/* What a bulk call does with each of its jobs */
typedef enum IdemManyKind
{
	IDEM_MANY_CANCEL,
	IDEM_MANY_FAIL,
	IDEM_MANY_SNOOZE,
	IDEM_MANY_RESCHEDULE,
	IDEM_MANY_RETRY
} IdemManyKind;

/* A bulk call (J20): its jobs are given by their numbers, or by queue and state */
typedef struct IdemMany
{
	IdemManyKind kind;
	int n; /* numbers; -1: by queue and state */
	Datum *ids;
	Datum *tokens; /* of the numbers; NULL: the call needs none */
	text *queue;
	uint32 states;	   /* set of states of live jobs, as bits */
	const char *state; /* of ended jobs, for a retry by queue */
	text *worker;	   /* only jobs of this worker; NULL: of all */
	int max_jobs;	   /* by queue: so many at most */
	IdemFailure fail;  /* fail */
	int64 delay;	   /* snooze */
	bool has_run_at;   /* reschedule */
	bool has_priority; /* reschedule */
	TimestampTz run_at;
	int priority;
} IdemMany;

/* manystore.c */
extern int idem_manystore_change(IdemTable *jobs, const IdemMany *many);

#endif /* IDEM_JOBS_JOBADMIN_H */
