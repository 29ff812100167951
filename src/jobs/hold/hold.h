/*
 * hold.h
 *		What the worker that holds a job does with it; the worker in the database.
 */
#ifndef IDEM_JOBS_HOLD_H
#define IDEM_JOBS_HOLD_H

#include "jobs/fetch/fetch.h"

/* How long the worker had a job when it ended its attempt (S5) */
typedef struct IdemRunTime
{
	TimestampTz from;
	TimestampTz to;
} IdemRunTime;

/* A job that a handler runs in this transaction (V7, J21) */
typedef struct IdemRun
{
	Oid handler;
	MemoryContext context; /* of what the members below point to */
	bool nowait;		   /* a fail waits for no transaction */
	bool is_fetched;
	IdemJobInfo fetched;
	Jsonb *result;
	bool counts_later; /* the caller counts the end of the attempt, when it has committed */
	IdemRunTime time;  /* if so; set by complete and fail */
} IdemRun;

/* Does the caller, with its token, hold the job? */
typedef enum IdemHold
{
	IDEM_HOLD_OK,
	IDEM_HOLD_NONE, /* no: no worker has fetched the job */
	IDEM_HOLD_STALE /* no: the job was fetched again or given back, or has ended */
} IdemHold;

/* How an attempt has failed */
typedef struct IdemFailure
{
	text *error;	/* NULL: none was given */
	int64 retry_in; /* negative: as the queue declares */
	bool dead;		/* the job becomes dead, even if it has attempts left */
	bool nowait;	/* do not wait for a transaction that keeps it from becoming dead */
} IdemFailure;

/* holdstore.c */
extern IdemHold idem_holdstore_complete(IdemTable *jobs, int64 job_id, int64 token, Jsonb *result,
										IdemQueue *queue, IdemRunTime *run_time);
extern IdemHold idem_holdstore_judge(const IdemJob *job, int64 token);
extern bool idem_holdstore_fail_found(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue,
									  const IdemFailure *failure, bool *is_dead,
									  IdemRunTime *run_time);
extern IdemHold idem_holdstore_fail(IdemTable *jobs, int64 job_id, int64 token,
									const IdemFailure *failure, bool *is_dead,
									IdemRunTime *run_time);
extern TimestampTz idem_holdstore_snooze_found(IdemTable *jobs, const IdemJob *job,
											   const IdemQueue *queue, int64 delay,
											   IdemRunTime *run_time);
extern IdemHold idem_holdstore_snooze(IdemTable *jobs, int64 job_id, int64 token, int64 delay,
									  TimestampTz *run_at);
extern IdemHold idem_holdstore_heartbeat(IdemTable *jobs, int64 job_id, int64 token, int64 lease,
										 IdemQueue *queue, TimestampTz *lease_until);
extern IdemHold idem_holdstore_progress(IdemTable *jobs, int64 job_id, int64 token, Jsonb *data,
										int64 lease, TimestampTz *lease_until);
pg_noreturn extern void idem_holdstore_refuse(IdemHold hold, int64 job_id);

/* hold.c */
extern IdemFailure idem_hold_get_failure(FunctionCallInfo fcinfo, int arg);

/* work.c */
extern bool idem_work_fetch(IdemRun *run, text *queue);
extern void idem_work_as_current(const IdemJobInfo *job, void (*run)(void *arg), void *arg);
extern void idem_work_complete(void *arg);
extern bool idem_work_fail(IdemRun *run, const ErrorData *error);
extern bool idem_work_fail_later(IdemRun *run, text *queue, const ErrorData *error);

extern void idem_work_forget_job(void);

#endif /* IDEM_JOBS_HOLD_H */
