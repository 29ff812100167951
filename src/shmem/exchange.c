/*
 * exchange.c
 *		Requests of the launcher, reports of the worker, and what the views show of
 *		them.
 *
 * All of it is in shared memory, under a lock of its own.  A process holds the lock for
 * moments and never while it waits.  Only the launcher writes its own state and the
 * request of a visit, only the worker of the visit writes the report.  Each of them
 * keeps a copy and publishes it as a whole.  A process asks without the lock whether
 * it is the worker, because no other process writes its pid.
 */
#include "postgres.h"

#include "shmem/shmem.h"

typedef struct Exchange
{
	LWLock *lock;
	IdemLauncher launcher;
	IdemVisit visit;
} Exchange;

static Exchange *exchange = NULL;

/* Size of the shared memory that this file needs */
Size
idem_exchange_size(void)
{
	return MAXALIGN(sizeof(Exchange));
}

/* Attach to the shared memory; the caller holds AddinShmemInitLock */
void
idem_exchange_attach(LWLock *lock)
{
	bool found;

	exchange = ShmemInitStruct("idem exchange", sizeof(Exchange), &found);
	if (!found)
	{
		memset(exchange, 0, sizeof(*exchange));
		exchange->lock = lock;
	}
}

/* The visit, and the launcher at the same moment unless NULL */
void
idem_exchange_get(IdemLauncher *launcher, IdemVisit *visit)
{
	LWLockAcquire(exchange->lock, LW_SHARED);
	if (launcher != NULL)
		*launcher = exchange->launcher;
	*visit = exchange->visit;
	LWLockRelease(exchange->lock);
}

void
idem_exchange_set_launcher(const IdemLauncher *launcher)
{
	LWLockAcquire(exchange->lock, LW_EXCLUSIVE);
	exchange->launcher = *launcher;
	LWLockRelease(exchange->lock);
}

/* If the launcher has just ended, the latch belongs to no process, or to one that looks in vain */
void
idem_exchange_wake_launcher(void)
{
	pid_t pid;
	int proc;

	LWLockAcquire(exchange->lock, LW_SHARED);
	pid = exchange->launcher.pid;
	proc = exchange->launcher.proc;
	LWLockRelease(exchange->lock);
	if (pid != 0)
		SetLatch(&GetPGProcByNumber(proc)->procLatch);
}

/* The launcher calls this before it starts the worker */
void
idem_exchange_request_visit(const IdemVisitRequest *request)
{
	LWLockAcquire(exchange->lock, LW_EXCLUSIVE);
	memset(&exchange->visit, 0, sizeof(exchange->visit));
	exchange->visit.request = *request;
	exchange->visit.report.outcome = IDEM_VISIT_LOST;
	LWLockRelease(exchange->lock);
}

/* Become the worker (W3); false if the worker of an earlier launcher still runs */
bool
idem_exchange_begin_visit(Oid database, IdemVisitRequest *request)
{
	IdemVisit *visit = &exchange->visit;
	bool is_free;

	LWLockAcquire(exchange->lock, LW_EXCLUSIVE);
	is_free = visit->pid == 0 && visit->request.database == database;
	if (is_free)
		visit->pid = MyProcPid;
	*request = visit->request;
	LWLockRelease(exchange->lock);
	return is_free;
}

void
idem_exchange_set_report(const IdemVisitReport *report)
{
	LWLockAcquire(exchange->lock, LW_EXCLUSIVE);
	exchange->visit.report = *report;
	LWLockRelease(exchange->lock);
}

/*
 * Is this process the worker of the visit?  If so, and if there is a message,
 * report the error that ends the process.  Why a process could not connect is often
 * in the detail.  May be called at any moment, also while this process holds the
 * lock; then nothing is reported.
 */
bool
idem_exchange_set_visit_error(const char *message, const char *detail)
{
	IdemVisitReport *report = &exchange->visit.report;
	char text[2 * IDEM_ERROR_TEXT_LEN];

	if (exchange->visit.pid != MyProcPid)
		return false;
	if (message == NULL || LWLockHeldByMe(exchange->lock))
		return true;
	if (!report->connected && detail != NULL)
		snprintf(text, sizeof(text), "%s: %s", message, detail);
	else
		strlcpy(text, message, sizeof(text));
	LWLockAcquire(exchange->lock, LW_EXCLUSIVE);
	idem_exchange_copy_error(report->error, text);
	LWLockRelease(exchange->lock);
	return true;
}

/* The worker calls this when it exits, normally or after an error */
void
idem_exchange_end_visit(void)
{
	LWLockAcquire(exchange->lock, LW_EXCLUSIVE);
	if (exchange->visit.pid == MyProcPid)
		exchange->visit.pid = 0;
	LWLockRelease(exchange->lock);
}

/* Copy a message to a buffer of IDEM_ERROR_TEXT_LEN bytes, clipped at a character */
void
idem_exchange_copy_error(char *text, const char *message)
{
	int len = pg_mbcliplen(message, strlen(message), IDEM_ERROR_TEXT_LEN - 1);

	strlcpy(text, message, len + 1);
}
