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
#include "nodes/parsenodes.h"
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
	IdemPlace *place; /* NULL: none, so the session cannot be woken */
	int64 next_look;  /* without a place: when to look, by the steady clock */
	int limit;		  /* of the look that is due; 0: none is due */
	IdemWoken woken;  /* it was woken for this subject, and has not looked since */
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

/*
 * Give up all places; other sessions get the wake-ups that this one has no answer for (A2).  Also
 * called when the session exits, which it may do while it waits.
 */
static void
leave_places(int code, Datum arg)
{
	Sleeper *mine = sleeper;

	sleeper = NULL;
	for (int i = 0; mine != NULL && i < mine->args->n; i++)
	{
		if (mine->subjects[i].place != NULL)
			idem_waiters_leave(mine->subjects[i].place);
		if (mine->subjects[i].woken != IDEM_WOKEN_NOT)
			idem_waiters_wake(mine->args->subjects[i], 1, mine->subjects[i].woken);
	}
}

/*
 * A3: take a place for each subject, before the first look.  A7: if all places are taken, this
 * session looks by itself.
 */
static void
take_places(void)
{
	static bool warned = false;
	bool has_all = true;

	for (int i = 0; i < sleeper->args->n; i++)
	{
		Subject *subject = &sleeper->subjects[i];

		subject->place = idem_waiters_enlist(sleeper->args->kind, sleeper->args->subjects[i]);
		subject->limit = 1;
		has_all &= subject->place != NULL;
	}
	/* say so once */
	if (has_all || warned || !idem_entries_exist())
		return;
	warned = true;
	ereport(WARNING,
			errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
			errmsg("too many sessions wait for queues, jobs or keys"),
			errdetail("This session cannot be woken, so it looks ten times per second."),
			errhint("Consider increasing \"%s\".", "idem.waits_max"));
}

/* When to look again without an event (A4); now and the result are by the steady clock */
static int64
compute_next_look(const IdemLook *look, int64 now, int64 interval)
{
	if (look->due == DT_NOEND)
		return now + interval;
	return now + Min(Max(look->due - idem_clock_now(), 0), interval);
}

/*
 * Look at one subject; returns whether there is what this session waits for.  A2: what the look has
 * found beyond that is for other sessions.
 */
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
	if (subject->place != NULL && look.found < look.limit)
		idem_waiters_end_look(subject->place, compute_next_look(&look, now, interval),
							  look.blocked);
	subject->next_look = compute_next_look(&look, now, LOOK_ALONE_AFTER);
	if (look.found > 0 && look.limit > 1 && args->kind != IDEM_SUBJECT_QUEUE)
		idem_waiters_wake(args->subjects[i], IDEM_WAKE_ALL, IDEM_WOKEN_FOR_ONE);
	else if (look.found > 1)
		idem_waiters_wake(args->subjects[i], look.found - 1,
						  look.found == IDEM_MAX_LOOK ? IDEM_WOKEN_FOR_MORE : IDEM_WOKEN_FOR_ONE);
	return look.found > 0;
}

/* When must the session look at the subject; 0: now */
static int64
get_next_look(const Subject *subject)
{
	return subject->place == NULL ? subject->next_look : idem_waiters_next_look(subject->place);
}

/* A1: sleep until the session must look at a subject, the time is over, or there is an interrupt */
static void
sleep_until_woken(void)
{
	for (;;)
	{
		int64 now;
		int64 wakeup = sleeper->until;

		for (int i = 0; i < sleeper->args->n; i++)
			wakeup = Min(wakeup, get_next_look(&sleeper->subjects[i]));
		now = idem_clock_steady();
		if (wakeup <= now || InterruptPending)
			return;

		/*
		 * Process invalidation messages and notifications, as an idle session does.  That may have
		 * waited for something else, and then it has reset the latch; so look around again before
		 * the next sleep (A3).
		 */
		if (catchupInterruptPending)
			ProcessCatchupInterrupt();
		else if (notifyInterruptPending && !sleeper->is_nested)
		{
			ProcessNotifyInterrupt(true);
			/* it has said that this session is idle */
			set_ps_display("CALL");
		}
		else
		{
			if (idem_compat_wait_for_client_or_latch(
					(long) Min((wakeup - now) / 1000 + 1, MAX_SLEEP), wait_event))
			{
				ClientConnectionLost = true;
				InterruptPending = true;
			}
			ResetLatch(MyLatch);
		}
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
		if (subject->place != NULL)
			subject->woken = idem_waiters_begin_look(subject->place);
		subject->limit = subject->place != NULL && is_due && subject->woken != IDEM_WOKEN_FOR_ONE ?
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

	/* whether the caller's transaction commits must not depend on what the look finds */
	if (sleeper->is_nested)
	{
		idem_procxact_end(sleeper->is_nested);
		idem_procxact_begin(sleeper->is_nested, sleeper->context);
	}
	take_places();
	is_last = idem_clock_steady() >= sleeper->until;
	for (;;)
	{
		for (int i = 0; i < sleeper->args->n; i++)
		{
			if (sleeper->subjects[i].limit > 0 && look_at(i))
				return i;
		}
		if (is_last)
			return -1;
		idem_procxact_end(sleeper->is_nested);
		sleep_until_woken();
		idem_procxact_begin(sleeper->is_nested, sleeper->context);
		is_last = idem_clock_steady() >= sleeper->until;
		mark_subjects(is_last);
	}
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
	if (wait_event == 0)
	{
		/* this may raise an error, so not while it sleeps without a transaction */
		wait_event = WaitEventExtensionNew("IdemWait");
		before_shmem_exit(leave_places, (Datum) 0);
	}
	sleeper = &mine;
	PG_TRY();
	{
		answer = wait_in_turns();
	}
	PG_FINALLY();
	{
		leave_places(0, (Datum) 0);
	}
	PG_END_TRY();
	MemoryContextDelete(mine.look_context);
	return answer;
}
