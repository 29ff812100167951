/*
 * wake.h
 *		Wake sessions that wait for a queue, a job or a key when a transaction commits.
 *
 * shmem/waiters.c has the waiting sessions in shared memory.  touched.c remembers what a
 * transaction has changed, and wakes waiters when it ends.  sleep.c is the loop of a
 * session that waits.  doc/waking-protocol.md has the protocol.
 */
#ifndef IDEM_WAKE_H
#define IDEM_WAKE_H

#include "datatype/timestamp.h"
#include "fmgr.h"

#include "shmem/shmem.h"

/* A look counts at most this many jobs */
#define IDEM_MAX_LOOK 64

/* What a look at a subject has found */
typedef struct IdemLook
{
	int limit;		 /* count at most this many */
	int found;		 /* jobs that can be fetched; for a job or a key: 1 if it has ended */
	TimestampTz due; /* when the next job becomes due, or the lease expires; or DT_NOEND */
	bool blocked;	 /* there are blocked follow-up jobs (J4) */
} IdemLook;

/* A session that waits */
typedef struct IdemSleep
{
	const char *command; /* for error messages */
	IdemSubjectKind kind;
	int n;
	const uint64 *subjects;
	int64 timeout; /* in microseconds */
	void (*look)(int i, IdemLook *look, void *arg);
	void *arg;
} IdemSleep;

/* touched.c */
extern void idem_touched_job(IdemQueueRef *queue, TimestampTz due, bool follows);
extern void idem_touched_due(IdemQueueRef *queue, TimestampTz due);
extern void idem_touched_held(IdemQueueRef *queue, bool lets_go);
extern void idem_touched_fetched(IdemQueueRef *queue, int64 lease, TimestampTz lease_until);
extern void idem_touched_done(IdemQueueRef *queue, bool has_key, bool was_fetched);
extern void idem_touched_end(uint64 subject);
extern void idem_touched_end_transaction(bool is_commit, bool is_abort);
extern void idem_touched_abort_sub(SubTransactionId subid);
extern void idem_touched_wake(bool is_commit, bool is_top_level);

/* sleep.c */
extern void idem_sleep_check(FunctionCallInfo fcinfo, const char *command);
extern int idem_sleep_wait(const IdemSleep *args);

#endif /* IDEM_WAKE_H */
