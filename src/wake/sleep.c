/*
 * sleep.c
 *		The loop of a session that waits: look, sleep without a transaction, look again.
 *
 * A procedure that CALL runs at top level ends its transaction before each sleep, and
 * begins another one before it looks (A1).  Inside another procedure or a DO block a
 * transaction must stay open, so the procedure commits, and sleeps in the transaction that
 * PostgreSQL begins then, without a snapshot or a lock.
 *
 * An error can be raised only inside a transaction.  So a session that sleeps without one
 * begins one before it serves an interrupt.
 *
 * A session without a place in shared memory (waiters.c) looks ten times per second.  If
 * it ends while it waits, a callback gives up its places.
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/async.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/sinval.h"
#include "utils/memutils.h"
#include "utils/ps_status.h"
#include "utils/snapmgr.h"

#include "fn/fn.h"
#include "wake/wake.h"

/* A session that cannot be woken looks this often */
#define LOOK_ALONE_AFTER (USECS_PER_SEC / 10)

/* A single sleep lasts at most this many milliseconds */
#define MAX_SLEEP (60 * 60 * 1000)

/* One of the subjects that the session waits for */
typedef struct Subject
{
	int place;		 /* -1: none, so the session cannot be woken */
	int64 next_look; /* without a place: when to look, by the steady clock */
	int limit;		 /* of the look that is due; 0: none is due */
	IdemWoken woken; /* it was woken for this subject, and has not looked since */
} Subject;

typedef struct Sleeper
{
	const IdemSleep *args;
	bool is_nested;
	int64 until; /* by the steady clock */
	MemoryContext context;
	MemoryContext look_context;
	Subject *subjects;
} Sleeper;

/* The wait under way; NULL: none */
static Sleeper *sleeper = NULL;

/* 0: this backend has not waited yet */
static uint32 wait_event = 0;

/* A1: refuse a call that cannot end the transaction */
void
idem_sleep_check(FunctionCallInfo fcinfo, const char *command)
{
	CallContext *call = (CallContext *) fcinfo->context;

	if (call == NULL || !IsA(call, CallContext) || call->atomic || IsSubTransaction())
		ereport(ERROR,
				errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				errmsg("%s cannot run inside a transaction block", command),
				errdetail("It ends its transaction before it waits. So it cannot run in a function either, nor in a block with an EXCEPTION clause."),
				errhint("Run CALL %s by itself, outside of BEGIN ... COMMIT.", command));
	if (!SPI_inside_nonatomic_context())
		PreventInTransactionBlock(true, command);
}

/* Give up all places; other sessions get the wake-ups that this one has no answer for (A2) */
static void
leave_places(void)
{
	const IdemSleep *args = sleeper->args;
	Subject *subjects = sleeper->subjects;

	sleeper = NULL;
	for (int i = 0; i < args->n; i++)
	{
		if (subjects[i].place >= 0)
			idem_waiters_leave(subjects[i].place, true);
		if (subjects[i].woken != IDEM_WOKEN_NOT)
			idem_waiters_wake(args->subjects[i], 1, subjects[i].woken);
	}
}

/* The session ends while it waits */
static void
leave_at_exit(int code, Datum arg)
{
	if (sleeper != NULL)
		leave_places();
}

/* A7: all places are taken, so this session looks by itself; say so once */
static void
warn_no_place(void)
{
	static bool warned = false;

	if (!idem_entries_exist() || warned)
		return;
	warned = true;
	ereport(WARNING,
			errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			errmsg("too many sessions wait for queues, jobs or keys"),
			errdetail("This session cannot be woken, so it looks ten times per second."),
			errhint("Consider increasing \"%s\".", "idem.waits_max"));
}

/* A3: take a place for each subject, before the first look */
static void
take_places(void)
{
	const IdemSleep *args = sleeper->args;
	bool has_all = true;

	for (int i = 0; i < args->n; i++)
	{
		Subject *subject = &sleeper->subjects[i];

		subject->place = idem_waiters_enlist(args->kind, args->subjects[i]);
		subject->limit = 1;
		has_all &= subject->place >= 0;
	}
	if (!has_all)
		warn_no_place();
}

/* When to look again without an event (A4); now and the result are by the steady clock */
static int64
compute_next_look(const IdemLook *look, int64 now, int64 interval)
{
	if (look->due == DT_NOEND)
		return now + interval;
	return now + Min(Max(look->due - idem_clock_now(), 0), interval);
}

/* Wake others for what the look has found beyond the answer of this session (A2) */
static void
wake_others(int i, const IdemLook *look)
{
	uint64 subject = sleeper->args->subjects[i];
	bool may_be_more = look->found == IDEM_MAX_LOOK;

	if (look->limit == 1)
		return;
	if (sleeper->args->kind != IDEM_SUBJECT_QUEUE)
		idem_waiters_wake(subject, IDEM_WAKE_ALL, IDEM_WOKEN_FOR_ONE);
	else if (look->found > 1)
		idem_waiters_wake(subject, look->found - 1,
						  may_be_more ? IDEM_WOKEN_FOR_MORE : IDEM_WOKEN_FOR_ONE);
}

/* Look at one subject; returns whether there is what this session waits for */
static bool
look_at(int i)
{
	const IdemSleep *args = sleeper->args;
	Subject *subject = &sleeper->subjects[i];
	IdemLook look = {.limit = subject->limit, .due = DT_NOEND};
	int64 interval = idem_guc_look_after * INT64CONST(1000);
	int64 now = idem_clock_steady();

	MemoryContextSwitchTo(sleeper->look_context);
	PushActiveSnapshot(GetLatestSnapshot());
	args->look(i, &look, args->arg);
	PopActiveSnapshot();
	MemoryContextSwitchTo(sleeper->context);
	MemoryContextReset(sleeper->look_context);

	subject->limit = 0;
	subject->woken = IDEM_WOKEN_NOT;
	if (subject->place >= 0 && look.found < look.limit)
		idem_waiters_end_look(subject->place, compute_next_look(&look, now, interval),
							  look.blocked);
	subject->next_look = compute_next_look(&look, now, LOOK_ALONE_AFTER);
	if (look.found > 0)
		wake_others(i, &look);
	return look.found > 0;
}

/* Look at the subjects that must be looked at; the number of one that has an answer, or -1 */
static int
look_around(void)
{
	for (int i = 0; i < sleeper->args->n; i++)
	{
		if (sleeper->subjects[i].limit > 0 && look_at(i))
			return i;
	}
	return -1;
}

/* When must the session look at the subject; 0: now */
static int64
get_next_look(const Subject *subject)
{
	return subject->place < 0 ? subject->next_look : idem_waiters_next_look(subject->place);
}

/* Sleep, at most until the time, or until the latch is set or the client is gone */
static void
sleep_once(int64 until)
{
	long timeout = (long) Min((until - idem_clock_steady()) / 1000 + 1, MAX_SLEEP);

	if (timeout > 0 && idem_compat_wait_for_client_or_latch(timeout, wait_event))
	{
		ClientConnectionLost = true;
		InterruptPending = true;
	}
	ResetLatch(MyLatch);
}

/*
 * Process invalidation messages and notifications, as an idle session does.  That may have waited
 * for something else, and then it has reset the latch; so the caller looks around again before it
 * sleeps (A3).  Returns false if there is nothing to process.
 */
static bool
serve_messages(void)
{
	if (catchupInterruptPending)
		ProcessCatchupInterrupt();
	else if (notifyInterruptPending && !sleeper->is_nested)
	{
		ProcessNotifyInterrupt(true);
		/* it has said that this session is idle */
		set_ps_display("CALL");
	}
	else
		return false;
	return true;
}

/* A1: sleep until the session must look at a subject, the time is over, or there is an interrupt */
static void
sleep_until_woken(void)
{
	for (;;)
	{
		int64 wakeup = sleeper->until;

		for (int i = 0; i < sleeper->args->n; i++)
			wakeup = Min(wakeup, get_next_look(&sleeper->subjects[i]));
		if (wakeup <= idem_clock_steady() || InterruptPending)
			return;
		if (!serve_messages())
			sleep_once(wakeup);
	}
}

/*
 * Which subjects must be looked at?  Their places are put back into the lists first (A3).  The last
 * time, all of them.
 */
static void
mark_subjects(bool is_last)
{
	int64 now = idem_clock_steady();

	for (int i = 0; i < sleeper->args->n; i++)
	{
		Subject *subject = &sleeper->subjects[i];
		bool is_due = get_next_look(subject) <= now;

		if (!is_due && !is_last)
			continue;
		if (subject->place >= 0)
			subject->woken = idem_waiters_begin_look(subject->place);
		subject->limit = subject->place >= 0 && is_due && subject->woken != IDEM_WOKEN_FOR_ONE ?
			IDEM_MAX_LOOK :
			1;
	}
}

/*
 * Look and sleep in turns; the number of the subject that has an answer, or -1 after the timeout.
 * A5, A8: the session gives up only after a look that has begun when the time was over.
 */
static int
wait_in_turns(void)
{
	bool is_last;
	int answer;

	/* whether the caller's transaction commits must not depend on what the look finds */
	if (sleeper->is_nested)
	{
		idem_procxact_end(sleeper->is_nested);
		idem_procxact_begin(sleeper->is_nested, sleeper->context);
	}
	take_places();
	is_last = idem_clock_steady() >= sleeper->until;
	while ((answer = look_around()) < 0 && !is_last)
	{
		idem_procxact_end(sleeper->is_nested);
		sleep_until_woken();
		idem_procxact_begin(sleeper->is_nested, sleeper->context);
		is_last = idem_clock_steady() >= sleeper->until;
		mark_subjects(is_last);
	}
	return answer;
}

/*
 * Wait until a look finds something, or the timeout has passed.  Returns the number of the
 * subject, or -1.  The caller has called idem_sleep_check(); afterwards it is in another
 * transaction, but in the same memory context.
 */
int
idem_sleep_wait(const IdemSleep *args)
{
	Sleeper mine = {
		.args = args,
		.is_nested = SPI_inside_nonatomic_context(),
		.until = idem_clock_steady() + args->timeout,
		.context = CurrentMemoryContext,
		.subjects = palloc0_array(Subject, args->n)};
	volatile int answer = -1;

	mine.look_context =
		AllocSetContextCreate(CurrentMemoryContext, "idem look", ALLOCSET_DEFAULT_SIZES);
	for (int i = 0; i < args->n; i++)
		mine.subjects[i].place = -1;
	if (wait_event == 0)
	{
		/* this may raise an error, so not while it sleeps without a transaction */
		wait_event = WaitEventExtensionNew("IdemWait");
		before_shmem_exit(leave_at_exit, (Datum) 0);
	}
	sleeper = &mine;
	PG_TRY();
	{
		answer = wait_in_turns();
	}
	PG_FINALLY();
	{
		if (sleeper != NULL)
			leave_places();
	}
	PG_END_TRY();
	MemoryContextDelete(mine.look_context);
	return answer;
}
