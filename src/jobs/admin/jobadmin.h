/*
 * jobadmin.h
 *		Look at jobs and change them from outside: by number, by key, many at once; why one does not run.
 */
#ifndef IDEM_JOBS_JOBADMIN_H
#define IDEM_JOBS_JOBADMIN_H

#include "jobs/enqueue/enqueue.h"
#include "jobs/hold/hold.h"

/* A key of jobs */
typedef struct IdemJobKey
{
	text *queue;
	text *key;
	text *scope; /* for the slot of the key */
} IdemJobKey;

/* What a bulk call does with each of its jobs */
typedef enum IdemManyKind
{
	IDEM_MANY_CANCEL,
	IDEM_MANY_FAIL,
	IDEM_MANY_SNOOZE,
	IDEM_MANY_RESCHEDULE
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

/* A reason why a job does not run (H3) */
typedef struct IdemWhy
{
	const char *reason;
	char *detail;
	TimestampTz since; /* 0: not known, or not shown */
	int pid;		   /* 0: no process is in the way, or it is not shown */
	char *fix;		   /* NULL: there is no command for it */
} IdemWhy;

/* The version of a job that is not committed */
typedef struct IdemOpenJob
{
	TransactionId xid; /* invalid: there is none */
	int64 token;	   /* of the last fetch; 0: no worker has fetched the job yet */
	bool is_leased;
	bool is_retried; /* the job was in the history */
	int attempt;
	NullableDatum links;
	NullableDatum payload;
} IdemOpenJob;

/* whychange.c */
extern void idem_whychange_find_open(IdemTable *jobs, IdemLookup *lookup, IdemOpenJob *open);
extern const char *idem_whychange_describe_lock(IdemTable *jobs, MultiXactStatus status,
												const IdemOpenJob *open);
extern const char *idem_whychange_describe_new(const IdemOpenJob *open);
extern const char *idem_whychange_describe_mine(IdemTable *jobs, IdemLookup *lookup);

/* bykeystore.c */
extern int idem_bykeystore_cancel(IdemTable *jobs, const IdemJobKey *key);
extern void idem_bykeystore_list(IdemTable *jobs, const IdemJobKey *key, int max_jobs,
								 void (*put)(const IdemJobInfo *info, void *arg), void *arg);

/* manystore.c */
extern int idem_manystore_change(IdemTable *jobs, const IdemMany *many);

/* retrystore.c */
extern int idem_retrystore_retry(IdemTable *jobs, const IdemMany *many);

/* whystore.c */
extern void idem_whystore_explain(IdemTable *jobs, int64 job_id,
								  void (*put)(const IdemWhy *why, void *arg), void *arg);

#endif /* IDEM_JOBS_JOBADMIN_H */
