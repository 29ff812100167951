/*
 * wake.h
 *		Wake sessions that wait for a queue, a job or a key when a transaction commits.
 *
 * waiters.c has the waiting sessions in shared memory.  touched.c remembers what a
 * transaction has changed, and wakes waiters when it ends.  sleep.c is the loop of a
 * session that waits.  doc/waking-protocol.md has the protocol.
 */
#ifndef IDEM_WAKE_H
#define IDEM_WAKE_H

#include "datatype/timestamp.h"
#include "fmgr.h"

#include "idem.h"

/* A look counts at most this many jobs */
#define IDEM_MAX_LOOK 64

/* Wake all who wait for a subject */
#define IDEM_WAKE_ALL PG_INT32_MAX

/* What a session can wait for */
typedef enum IdemSubjectKind
{
	IDEM_SUBJECT_QUEUE,
	IDEM_SUBJECT_JOB,
	IDEM_SUBJECT_KEY
} IdemSubjectKind;

/* Has a waiter been woken, and why? */
typedef enum IdemWoken
{
	IDEM_WOKEN_NOT,
	IDEM_WOKEN_FOR_ONE, /* one job is ready */
	IDEM_WOKEN_FOR_MORE /* several may be: it wakes one more waiter for each further job */
} IdemWoken;

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

/* waiters.c */
extern void idem_waiters_request(void);
extern void idem_waiters_attach(void);
extern bool idem_waiters_are_shared(void);
extern uint64 idem_waiters_queue(const text *queue);
extern uint64 idem_waiters_job(int64 job_id);
extern uint64 idem_waiters_key(int64 key_hash);
extern int idem_waiters_enlist(IdemSubjectKind kind, uint64 subject);
extern IdemWoken idem_waiters_begin_look(int place);
extern void idem_waiters_end_look(int place, int64 next_look, bool blocked);
extern void idem_waiters_leave(int place, bool hand_on);
extern IdemWoken idem_waiters_woken(int place);
extern int64 idem_waiters_next_look(int place);
extern void idem_waiters_note_blocked(uint64 subject);
extern bool idem_waiters_exist(uint64 subject);
extern bool idem_waiters_wait_for_end(void);
extern void idem_waiters_wake(uint64 subject, int n, IdemWoken why);
extern void idem_waiters_wake_blocked(uint64 subject);
extern void idem_waiters_wake_all(void);
extern void idem_waiters_lower_next_look(uint64 subject, int64 next_look);

/* touched.c */
extern void idem_touched_init(void);
extern void idem_touched_job(const text *name, TimestampTz due, bool follows);
extern void idem_touched_due(const text *name, TimestampTz due);
extern void idem_touched_held(const text *name, bool lets_go);
extern void idem_touched_fetched(const text *name, int64 lease, TimestampTz lease_until);
extern void idem_touched_done(const text *name, bool has_key, bool was_fetched);
extern void idem_touched_end(uint64 subject);

/* sleep.c */
extern void idem_sleep_check(FunctionCallInfo fcinfo, const char *command);
extern int idem_sleep_wait(const IdemSleep *args);

#endif /* IDEM_WAKE_H */
