/*
 * fetch.h
 *		Fetch jobs, look at them, wait for them.
 */
#ifndef IDEM_JOBS_FETCH_H
#define IDEM_JOBS_FETCH_H

#include "jobs/row/job.h"

/* Arguments of a fetch */
typedef struct IdemFetch
{
	IdemQueue queue;
	int batch;
	int64 lease;  /* 0: none, the transaction holds the jobs until it ends */
	text *worker; /* name of the worker, or NULL */
} IdemFetch;

/* fetchstore.c */
extern void idem_fetchstore_forget(void);
extern void idem_fetchstore_check_isolation(const char *command, const char *hint);
extern void idem_fetchstore_fetch_one(IdemTable *jobs, const IdemFetch *args, int64 job_id,
									  void (*put)(const IdemJobInfo *job, void *arg), void *arg);
extern bool idem_fetchstore_fetch(IdemTable *jobs, const IdemFetch *args,
								  void (*put)(const IdemJobInfo *job, void *arg), void *arg);
extern void idem_fetchstore_look(IdemTable *jobs, const IdemQueue *queue, IdemLook *look);

/* wait.c */
extern int idem_wait_for_queues(const char *command, text **queues, int n, int64 timeout);

#endif /* IDEM_JOBS_FETCH_H */
