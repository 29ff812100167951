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

/* A job that was fetched */
typedef struct IdemFetched
{
	int64 job_id;
	int64 token;
	int attempt;
	int max_attempts; /* of the job, or of its queue if the job has none */
	text *queue;
	Jsonb *payload;
	text *key;
	TimestampTz enqueued_at;
	TimestampTz due_since; /* S5 */
	XLogRecPtr lsn;		   /* WAL position that a replica waits for (J10) */
	Jsonb *progress;
	Jsonb *headers;
	Jsonb *links;
} IdemFetched;

/* Why and until when a fetch skips an entry of the index */
typedef struct IdemSkip
{
	TimestampTz until; /* DT_NOEND: as long as no transaction changes it */
	bool is_mine;	   /* this transaction has changed the row and is still open */
	bool is_blocked;   /* a follow-up job that is blocked */
} IdemSkip;

/* The walk of a fetch over the index, and what it has skipped; see fetchskip.c */
typedef struct IdemFetchWalk
{
	IdemQueueRef *queue;
	IdemSkips *skips;
	bool is_shared; /* the ranges are in shared memory, where writers note changes */
	TimestampTz now;
	int64 began; /* by the steady clock, as steady, the last time it was read */
	int64 steady;
	uint64 id; /* number of this fetch as the walker of the queue; 0: it does not collect */
	bool may_register;
	bool looks_again;		/* it ignores ranges that are due for another look */
	bool ignores_ranges;	/* it ignores all of them */
	bool announced_blocked; /* called idem_skips_announce_blocked() as the walker */
	bool has_jumped;
	bool jumped_blocked; /* a range that it has jumped over has blocked jobs */
	TimestampTz until;	 /* the earliest time of these ranges; DT_NOEND: none has one */
	IdemSkipRange run;	 /* skipped since the last job taken or held, or the last publishing */
	IdemSkipView view;
} IdemFetchWalk;

/* fetchskip.c */
extern void idem_fetchskip_forget(void);
extern void idem_fetchskip_begin(IdemFetchWalk *walk, const text *queue, TimestampTz now);
extern bool idem_fetchskip_was_long(const IdemFetchWalk *walk);
extern void idem_fetchskip_begin_anew(IdemFetchWalk *walk);
extern bool idem_fetchskip_goes_back(IdemFetchWalk *walk);
extern bool idem_fetchskip_collects(const IdemFetchWalk *walk);
extern void idem_fetchskip_announce_blocked(IdemFetchWalk *walk);
extern const IdemSkipRange *idem_fetchskip_find(const IdemFetchWalk *walk,
												const IdemPosition *position);
extern IdemPosition idem_fetchskip_jump(IdemFetchWalk *walk, const IdemPosition *from);
extern void idem_fetchskip_add(IdemFetchWalk *walk, const IdemPosition *upto,
							   const IdemSkip *skip);
extern void idem_fetchskip_add_pages(IdemFetchWalk *walk, int64 npages);
extern void idem_fetchskip_stop(IdemFetchWalk *walk, const IdemPosition *position);
extern void idem_fetchskip_end(IdemFetchWalk *walk, bool at_end, bool is_far);

/* fetchstore.c */
extern void idem_fetchstore_check_isolation(const char *command, const char *hint);
extern void idem_fetchstore_fetch_one(IdemTable *jobs, const IdemFetch *args, int64 job_id,
									  void (*put)(const IdemFetched *job, void *arg), void *arg);
extern bool idem_fetchstore_fetch(IdemTable *jobs, const IdemFetch *args,
								  void (*put)(const IdemFetched *job, void *arg), void *arg);
extern void idem_fetchstore_look(IdemTable *jobs, const IdemQueue *queue, IdemLook *look);

/* wait.c */
extern int idem_wait_for_queues(const char *command, text **queues, int n, int64 timeout);

#endif /* IDEM_JOBS_FETCH_H */
