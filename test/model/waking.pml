/*
 * waking.pml: the protocol of waking for one queue, for the model checker Spin
 *
 * Sessions wait for jobs of one queue, transactions let jobs go, and a client
 * fetches when its wait has answered true.  A waiter may be terminated, and a
 * client may die, at any step.  doc/waking-protocol.md is the page, src/wake/ is
 * the code; names here are names there.  README.md beside this file says what
 * the properties P1 to P7 mean, what is left out, and how to run it.
 *
 * What a process does under the lock of the bucket is one step.  One step each
 * are also the read of the count, the end of a transaction, which is when others
 * see what it has done, its invalidation messages, and the look at one job: a
 * look is not a snapshot.  Steps of different processes come in every order.
 *
 * Without a memory barrier a process can read before others see what it has
 * written.  WAKE_BEFORE_VISIBLE, LOOK_BEFORE_ENLIST and LOOK_BEFORE_RELIST do so.
 *
 * Options, as -DNAME to spin:
 *	ENQUEUE, FETCH, LEASE, LATER, FOLLOW, RESUME, PREPARE
 *			what the transactions may do
 *	STOCK		there are jobs when the model begins
 *	EACH		one of them enqueues, one completes, one enqueues a follow-up job
 *	WAITERS=n, JOBS=n, TRANSACTIONS=n, KILLS=n, DEATHS=n, RECALLS=n, TIMEOUTS=n, CLOCK=n, TICKS=n, MAX_LOOK=n
 *			size of the model
 *	ONLY=n		check property n alone
 *	a mutant	leaves out one rule; look for MUTANT
 */

#ifndef WAITERS
#define WAITERS		2
#endif
#ifndef JOBS
#define JOBS		2
#endif
#ifndef TRANSACTIONS
#define TRANSACTIONS	2
#endif
#ifndef KILLS
#define KILLS		1	/* so many waiters are terminated, at most */
#endif
#ifndef RECALLS
#define RECALLS		0	/* so many clients call again, at most */
#endif
#ifndef DEATHS
#define DEATHS		0	/* so many clients die before they fetch, at most */
#endif
#ifndef TIMEOUTS
#define TIMEOUTS	0	/* the time of so many waits is over at any moment, at most */
#endif
#ifndef CLOCK
#define CLOCK		0	/* the clock goes on to this when nothing else happens */
#endif
#ifndef TICKS
#define TICKS		0	/* so many of its steps may also come at any time */
#endif
#ifndef MAX_LOOK
#define MAX_LOOK	64	/* a look counts at most this many jobs */
#endif
#define LOOK_AFTER	2	/* in steps of the clock */
#define DUE_AFTER	1
#define NEVER		100

/* Always 0: the names are for the message of an assertion that fails. */
bool P1_no_wakeup_is_missed;
bool P2_one_wakeup_for_each_job;
bool P3_first_in_list_is_looker;
bool P4_looker_knows_what_is_due;
bool P5_looker_finds_the_rest;
/* P6, all come to rest: no cycle at all, see README.md */
bool P7_gives_up_without_a_job;

#ifndef ONLY
#define ONLY		0
#endif
#define CHECK(n, name, cond)	assert((ONLY && ONLY != n) || (cond) || name)

/* Has a place been woken, and for how many jobs? */
mtype = { ONE, MORE };
#define NOT		0

/* A job that waits, as committed; else there is room for another one. */
typedef Job {
#ifdef STOCK
	bool	waits = true;
#else
	bool	waits;
#endif
	bool	held;		/* an open transaction has inserted, changed or locked it */
	byte	due;
}

#ifdef FOLLOW
bool	runs = true;		/* another job, which job 0 follows */
bool	runs_held;		/* an open transaction completes it */
#define FIRST		1	/* of those that follow no other job */
#define BLOCKED(i)	(i == 0 && runs)
#else
#define FIRST		0
#define BLOCKED(i)	(false)
#endif
#define FREE(i)		(job[i].waits && !job[i].held && !BLOCKED(i))
#define FETCHABLE(i)	(FREE(i) && job[i].due <= now && !paused)

typedef Place {
	bool	listed;
	bool	looker;
	bool	blocked;	/* of the looker: there may be blocked jobs */
	mtype	woken;
	byte	next_look;	/* of the looker */
	bool	looking;	/* its session looks, or is about to look */
	/* since it began to look, */
	bool	marked;		/* a looker was marked as blocked: the count of marks is another one */
	byte	told_look;	/* others have told it to look at this time */
}

Job	job[JOBS];
Place	place[WAITERS];
byte	list[WAITERS];		/* the first to come is the first */
byte	nlisted;		/* the count of the bucket */
bool	latch[WAITERS];
byte	ncalled, nbegun;	/* waiters and transactions begin in order: they are all the same */
byte	now;
#ifdef RESUME
bool	paused = true;		/* the queue, as committed */
bool	cached_pause = true;	/* the same in the caches of the sessions */
#else
#define paused		false
#define cached_pause	false
#endif

/* Ghosts, for the properties only: no rule of the protocol looks at them. */
bool	waits[WAITERS];		/* from the first step of a call to its last one */
byte	excused;		/* so many jobs only the looker can find */
byte	excused_until;
byte	kills, deaths, recalls;
#if TIMEOUTS > 0
byte	timeouts;
byte	there[WAITERS];		/* a bit for each job that could be fetched when its time was over, and since */
byte	w;
#define gone_again(i)	for (w : 0 .. WAITERS - 1) { there[w] = there[w] & (255 - (1 << i)) }; w = 0
#else
#define gone_again(i)	skip
#endif

/* Within one step; 0 between two of them. */
byte	x, y, z;
#define tidy()	x = 0; y = 0; z = 0

#define ME		place[_pid]
#define LOOKER		place[list[0]]

/*
 * The list
 */

inline check_looker()
{
	for (x : 0 .. WAITERS - 1) {
		CHECK(3, P3_first_in_list_is_looker, place[x].looker == (nlisted > 0 && list[0] == x))
	}
}

inline add_place(v)
{
	list[nlisted] = v;
	nlisted++;
	place[v].listed = true;
	place[v].looker = (nlisted == 1);
	check_looker()
}

/* The looker leaves the list: the next place becomes the looker. */
inline pass_duties(v)
{
	if
	:: place[v].looker && nlisted > 0 ->
#ifndef LOOKER_NOT_HANDED_ON		/* MUTANT P3, P5 */
		LOOKER.looker = true;
		LOOKER.next_look = place[v].next_look;
		LOOKER.told_look = place[v].next_look;
#ifndef MARK_NOT_HANDED_ON		/* MUTANT P1 */
		LOOKER.blocked = place[v].blocked;
#endif
#ifndef HEIR_NOT_TOLD			/* MUTANT P5: it sleeps on */
		latch[list[0]] = true
#endif
#else
		skip
#endif
	:: else
	fi;
	place[v].looker = false;
	place[v].blocked = false
}

inline remove_place(v)
{
	x = 0;
	do
	:: list[x] != v -> x++
	:: else -> break
	od;
	do
	:: x + 1 < nlisted -> list[x] = list[x + 1]; x++
	:: else -> break
	od;
	nlisted--;
	list[nlisted] = 0;
	place[v].listed = false;
	pass_duties(v);
	check_looker()
}

inline mark_woken(v, why)
{
	remove_place(v);
	place[v].woken = why;
	printf("process %d: wakes waiter %d for %e\n", _pid, v, why)
}

/*
 * To wake m waiters: read the count, mark the last to come, set their latches.
 * Here this takes two steps: a latch that is set some time after the mark only makes
 * its session look at the mark once more.  The caller may wake `promised`, no more.
 */
inline wake(m, why, promised)
{
	if
	:: nlisted == 0
	:: d_step { nlisted > 0 ->
		y = 0;
#ifdef WAKE_ALL				/* MUTANT P2 */
		do
		:: nlisted > 0 ->
#else
		do
		:: nlisted > 0 && y < (m) ->
#endif
			z = list[nlisted - 1];
			mark_woken(z, why);
			latch[z] = true;
			y++
		:: else -> break
		od;
		CHECK(2, P2_one_wakeup_for_each_job, y <= (promised));
		tidy()
	   }
	fi
}

inline mark_blocked()
{
	LOOKER.blocked = true;
	for (x : 0 .. WAITERS - 1) {
		place[x].marked = place[x].marked || place[x].looking
	}
}

/* A follow-up job was committed. */
inline note_blocked()
{
	d_step {
		if
		:: nlisted > 0 -> mark_blocked()
		:: else
		fi;
		tidy()
	}
}

#ifdef MARK_AFTER_LOOK			/* MUTANT P1: a look says nothing before its end */
#define MAY_SEE_BLOCKED(v)	(LOOKER.blocked)
#else
#define MAY_SEE_BLOCKED(v)	(LOOKER.blocked || place[v].looking)
#endif

/*
 * A job with a key has ended: if there may be blocked jobs, wake a session.  One
 * that is looking may be about to see such a job, as it was before.
 */
inline wake_blocked()
{
	d_step {
		y = nlisted;
		do
		:: y > 0 && !MAY_SEE_BLOCKED(list[y - 1]) -> y--
		:: else -> break
		od;
		if
		:: y > 0 ->
			z = list[y - 1];
			mark_woken(z, MORE);
			latch[z] = true
		:: else
		fi;
		tidy()
	}
}

inline lower_next_look(t)
{
	if
	:: nlisted > 0 ->
		LOOKER.told_look = (t < LOOKER.told_look -> t : LOOKER.told_look);
		if
		:: LOOKER.next_look > t ->
			LOOKER.next_look = t;
			latch[list[0]] = true
		:: else
		fi
	:: else
	fi
}

/* The end of a transaction cannot wake, or a client cannot fetch. */
inline excuse(m)
{
	excused = excused + m;
	excused_until = now + LOOK_AFTER
}

/*
 * A session that waits, and its client
 */

/* Before each look: the place is in the list again, if it was woken. */
inline begin_look()
{
	d_step {
		has_looked = false;
		if
		:: !ME.listed ->
			owed = ME.woken;
			add_place(_pid);
			ME.woken = NOT
		:: else
		fi;
#ifdef FOLLOW
		ME.looking = true;
		ME.marked = false;
#endif
#ifndef TOLD_NOT_CLEARED		/* MUTANT P6 */
		ME.told_look = NEVER;
#endif
		tidy()
	}
}

inline look_at_job()
{
	if
	:: i < JOBS -> saw_blocked = saw_blocked || (BLOCKED(i) && job[i].waits && !job[i].held)
	:: else
	fi;
	if
	:: i == JOBS
	:: i < JOBS && FREE(i) && job[i].due <= looked_at -> found++
	:: i < JOBS && FREE(i) && job[i].due > looked_at -> next = (job[i].due < next -> job[i].due : next)
	:: else
	fi;
	i = (i < JOBS -> i + 1 : JOBS)
}

/* It has looked at all jobs: when to look again without an event, and whether one is blocked. */
inline end_look()
{
	next = (next < looked_at + LOOK_AFTER -> next : looked_at + LOOK_AFTER);
	ME.looking = false;
	if
#ifdef LOOK_FORGETS_TIME		/* MUTANT P4 */
	:: ME.looker -> ME.next_look = next
#else
	:: ME.looker -> ME.next_look = (next < ME.told_look -> next : ME.told_look)
#endif
	:: else -> lower_next_look(next)
	fi;
	if
	:: nlisted > 0 && saw_blocked -> mark_blocked()
#ifdef LOOK_FORGETS_MARK		/* MUTANT P1 */
	:: nlisted > 0 && !saw_blocked -> LOOKER.blocked = false
#else
	:: nlisted > 0 && !saw_blocked && !ME.marked -> LOOKER.blocked = false
#endif
	:: else
	fi;
	ME.marked = false;
#ifndef TOLD_NOT_CLEARED
	ME.told_look = 0
#endif
}

/* A look that has found enough before the end says nothing more. */
inline has_looked_at_jobs()
{
	d_step {
		if
		:: found < limit -> end_look()
		:: else
		fi;
#ifndef HAND_ON_ALWAYS			/* MUTANT P2: also the wake-up that it has used */
		owed = NOT;
#endif
		has_looked = true;
		i = 0; next = 0; looked_at = 0; saw_blocked = false;
		printf("waiter %d: has looked, found %d\n", _pid, found);
		tidy()
	}
}

#ifdef REST_TAKEN_FOR_ALL		/* MUTANT P1: there may be more than a look counts */
#define KIND_OF_REST	ONE
#else
#define KIND_OF_REST	(found == MAX_LOOK -> MORE : ONE)
#endif

inline look_at_queue()
{
	looked_at = now;
	next = NEVER;
	i = (cached_pause -> JOBS : 0)
}

inline leave_place()
{
	d_step {
		if
		:: ME.listed -> remove_place(_pid)
		:: else
		fi;
#ifndef WAKEUP_NOT_HANDED_ON		/* MUTANT P1: woken, and has not put its place back */
		more = ME.woken;
#endif
#ifdef LOOK_NOT_HANDED_ON		/* MUTANT P1: woken, and has not ended its look */
		owed = NOT;
#endif
		ME.woken = NOT; ME.next_look = 0; ME.told_look = 0; ME.looking = false; ME.marked = false;
		latch[_pid] = false;
		waits[_pid] = false;
		limit = 0; until = 0;
		printf("waiter %d: leaves, has found %d\n", _pid, found);
		tidy()
	}
}

inline client_fetches()
{
	found = 0;
	x = 0;
	do
	:: x < JOBS && !FETCHABLE(x) -> x++
	:: else -> break
	od;
	if
	:: x < JOBS ->
		gone_again(x);
		job[x].waits = false;
		job[x].due = 0;
		printf("client %d: fetches job %d\n", _pid, x)
	:: else ->
		printf("client %d: finds no job\n", _pid)
	fi;
	tidy()
}

#if TIMEOUTS > 0
/* Its time is over: one more look, whether it is due or not. */
inline time_is_over()
{
	d_step {
		timeouts++;
		is_last = true;
		for (x : 0 .. JOBS - 1) {
			there[_pid] = there[_pid] | (FETCHABLE(x) -> 1 << x : 0)
		};
		printf("waiter %d: its time is over\n", _pid);
		tidy()
	}
}

inline give_up()
{
	CHECK(7, P7_gives_up_without_a_job, there[_pid] == 0);
	printf("waiter %d: gives up\n", _pid)
}
#endif

#define SEES_WAKEUP	(ME.woken != NOT || (ME.looker && ME.next_look <= now))

active [WAITERS] proctype waiter()
{
	mtype owed = NOT;	/* it was woken for this, and has not looked since */
	mtype more = NOT;	/* woken for this after that */
	byte limit, found, i, next, looked_at, until;
	bool saw_blocked, has_looked;
#if TIMEOUTS > 0
	bool is_last;
#else
#define is_last		false
#endif
#if defined(LOOK_BEFORE_ENLIST) || defined(LOOK_BEFORE_RELIST)
	bool late;
#endif

	atomic {
		ncalled == _pid -> ncalled++;
		if
		:: goto call
		:: goto gone
		fi
	};

call:	atomic {
		waits[_pid] = true;
		limit = 1;
		printf("waiter %d: calls\n", _pid);
#ifdef TOLD_NOT_CLEARED
		ME.told_look = NEVER;
#endif
#ifdef LOOK_BEFORE_ENLIST		/* MUTANT P1 */
		late = true;
#else
		begin_look();
#endif
		goto look
	};

awake:	atomic {
		latch[_pid] = false;
#ifdef LOOK_BEFORE_RELIST		/* MUTANT P1 */
		late = true;
		limit = (ME.woken == ONE -> 1 : MAX_LOOK)
#else
		/* a last look that is not due is for its own answer only */
		limit = (SEES_WAKEUP -> MAX_LOOK : 1);
		begin_look();
		limit = (owed == ONE -> 1 : limit)
#endif
	};

look:	if
	:: d_step { i == 0 -> look_at_queue(); look_at_job() }
	:: d_step { i > 0 && i < JOBS && found < limit -> look_at_job() }
	:: atomic { i == JOBS || found == limit ->
#if defined(LOOK_BEFORE_ENLIST) || defined(LOOK_BEFORE_RELIST)
		if
		:: late -> late = false; begin_look()
		:: else
		fi;
#endif
		has_looked_at_jobs();
		if
		:: found == 0 && !is_last -> goto sleep
#if TIMEOUTS > 0
		:: found == 0 && is_last -> give_up(); goto leave
#endif
		:: found == 1 || limit == 1 -> goto leave
		:: else -> goto rest
		fi
	   }
#if KILLS > 0
	:: atomic { i == 0 && kills < KILLS -> kills++; printf("waiter %d: is terminated\n", _pid); goto leave }
#endif
	fi;
	goto look;

rest:
#ifndef REST_NOT_WOKEN			/* MUTANT P1: of several jobs that it has found */
	wake(found - 1, KIND_OF_REST, found - 1);
#else
	skip;
#endif

leave:	atomic {
		leave_place();
		if
		:: more != NOT -> goto hand_on
		:: more == NOT && owed != NOT -> goto hand_on_owed
		:: else -> goto left
		fi
	};
hand_on:
	wake(1, more, 1);
	more = NOT;
hand_on_owed:
	if
	:: owed != NOT -> wake(1, owed, (has_looked -> 0 : 1))
	:: else
	fi;
left:	atomic {
		owed = NOT; has_looked = false;
#if TIMEOUTS > 0
		is_last = false; there[_pid] = 0;
#endif
		if
		:: found > 0 -> goto client
		:: else -> goto gone
		fi
	};

sleep:	atomic {
		if
		:: SEES_WAKEUP -> goto awake
		:: else -> until = (ME.looker -> ME.next_look : NEVER)
		fi
	};
#ifdef LATCH_RESET_AFTER_CHECK		/* MUTANT P1 */
	latch[_pid] = false;
#endif
end_asleep:
	if
	:: d_step { latch[_pid] || now >= until -> until = 0; latch[_pid] = false };
		goto sleep
#if TIMEOUTS > 0
#ifdef NO_LAST_LOOK			/* MUTANT P7 */
	:: atomic { timeouts < TIMEOUTS -> time_is_over(); give_up(); goto leave }
#else
	:: atomic { timeouts < TIMEOUTS -> time_is_over(); latch[_pid] = false; goto awake }
#endif
#endif
#if KILLS > 0
	:: atomic { kills < KILLS -> kills++; printf("waiter %d: is terminated\n", _pid); goto leave }
#endif
	fi;

	/* The answer was true: the client fetches a job and works, and may call again. */
client:	if
	:: d_step { true -> client_fetches() };
		if
		:: atomic { recalls < RECALLS -> recalls++; goto call }
		:: skip
		fi
	:: d_step { deaths < DEATHS -> found = 0; deaths++; excuse(1); printf("client %d: dies\n", _pid) }
	fi;
gone:	skip
}

#if KILLS > 0
/* From now on no waiter is terminated. */
active proctype peace()
{
end_peace:
	atomic { kills < KILLS -> kills = KILLS }
}
#define PROCESSES_BEFORE	(WAITERS + 1)
#else
#define PROCESSES_BEFORE	WAITERS
#endif

/*
 * A transaction.  It changes jobs and then ends: others see that, and after that
 * it wakes waiters.
 */

inline hold(i)
{
	gone_again(i);
	job[i].held = true;
	mine = mine | (1 << i)
}

/* Enqueues m jobs, or as many as the model has room for. */
inline insert(m)
{
	for (x : FIRST .. JOBS - 1) {
		if
		:: n < m && !job[x].waits && !job[x].held -> hold(x); n++
		:: else
		fi
	};
	to_wait = true;
	printf("transaction %d: enqueues %d\n", _pid, n);
	tidy()
}

/* Fetches m jobs, or as many as there are. */
inline fetch(m)
{
	y = 0;
	for (x : 0 .. JOBS - 1) {
		if
		:: y < m && FETCHABLE(x) -> hold(x); y++
		:: else
		fi
	};
	holds = (y > 0);
	printf("transaction %d: fetches %d\n", _pid, y);
	tidy()
}

inline count_fetchable(v)
{
	v = 0;
	for (x : 0 .. JOBS - 1) {
		v = v + (FETCHABLE(x) -> 1 : 0)
	}
}

inline end_transaction()
{
	d_step {
		count_fetchable(y);
		for (x : 0 .. JOBS - 1) {
			if
			:: mine & (1 << x) ->
				job[x].held = false;
				if
				:: commits ->
					job[x].waits = to_wait;
					job[x].due = (later < NEVER -> later : job[x].due)
				:: else
				fi
			:: else
			fi
		};
#ifdef RESUME
		paused = paused && !(commits && resumes);
#endif
#ifdef FOLLOW
		runs = runs && !(commits && ended_key);
		runs_held = runs_held && !ended_key;
#endif
#ifdef PREPARE
		count_fetchable(z);
		if
		:: prepared && z > y -> excuse(z - y)
		:: prepared && z == y && commits && later < NEVER -> excuse(1)
		:: else
		fi;
#endif
		mine = 0; to_wait = false;
		if
		:: commits -> printf("transaction %d: commits\n", _pid)
		:: else -> printf("transaction %d: rolls back\n", _pid)
		fi;
		tidy()
	}
}

/*
 * What a transaction does in this model needs only one of these.  A commit that
 * lets jobs go wakes one waiter, which also counts those that it has enqueued.
 */
inline wake_at_end()
{
	if
	:: prepared
#ifdef ONE_WAKE_FOR_TWO			/* MUTANT P1 */
	:: !prepared && commits && n > 0 && !lets_go -> wake(1, ONE, n)
#else
	:: !prepared && commits && n > 0 && !lets_go -> wake(n, ONE, n)
#endif
#ifndef GIVE_BACK_DOES_NOT_WAKE		/* MUTANT P1 */
	:: !prepared && commits && lets_go -> wake(1, MORE, 1)
#endif
#ifndef LATER_NOT_TOLD			/* MUTANT P4 */
	:: d_step { !prepared && commits && later < NEVER -> lower_next_look(later) }
#endif
	:: !prepared && commits && ended_key -> wake_blocked()
#ifndef ROLLBACK_DOES_NOT_WAKE		/* MUTANT P1 */
	:: !prepared && !commits && holds -> wake(1, MORE, 1)
#endif
	:: else
	fi
}

inline forget()
{
	d_step {
		n = 0; later = 0; holds = false; lets_go = false; follows = false; ended_key = false; resumes = false;
		prepared = false; commits = false
	}
}

#ifdef EACH
#define TURN(k)		(_pid - PROCESSES_BEFORE == k)
#else
#define TURN(k)		true
#endif

active [TRANSACTIONS] proctype transaction()
{
	byte mine;		/* a bit for each job that it has changed */
	byte n, later = NEVER;	/* if it commits, so many are ready, and one becomes ready later */
	bool to_wait;		/* and its jobs wait; else they have ended */
	bool holds, lets_go, follows, ended_key, resumes, prepared, commits;

	atomic {
#ifndef EACH
		nbegun == _pid - PROCESSES_BEFORE -> nbegun++;
#endif
		if
#ifdef ENQUEUE
		:: d_step { TURN(0) -> insert(1) }
		:: d_step { TURN(0) -> insert(JOBS) }
#endif
#ifdef FETCH
		/* without a lease, and completed */
		:: d_step { fetch(1) }
		:: d_step { fetch(JOBS) }
		/* without a lease, and not completed; or a duplicate, which the job has absorbed */
		:: d_step { fetch(1); to_wait = true; lets_go = holds }
		:: d_step { fetch(JOBS); to_wait = true; lets_go = holds }
#ifdef ENQUEUE
		/* the same, and it enqueues another one */
		:: d_step { fetch(1); insert(1); lets_go = holds }
#endif
#endif
#ifdef LEASE
		/* with a lease; or given back with a delay */
		:: d_step { fetch(1); to_wait = true; later = (holds -> now + DUE_AFTER : NEVER) }
#endif
#ifdef LATER
		:: d_step { insert(1); later = (n > 0 -> now + DUE_AFTER : NEVER); n = 0 }
#endif
#ifdef FOLLOW
		:: d_step { TURN(1) && runs && !runs_held ->
			runs_held = true; holds = true; ended_key = true;
			printf("transaction %d: completes\n", _pid)
		   }
		:: d_step { TURN(2) && runs && !runs_held && !job[0].waits && !job[0].held ->
			hold(0); to_wait = true; n = 1; follows = true;
			printf("transaction %d: enqueues the follow-up job\n", _pid)
		   }
#endif
#ifdef RESUME
		:: d_step { paused ->
			holds = true; lets_go = true; resumes = true;
			printf("transaction %d: resumes the queue\n", _pid)
		   }
#endif
		:: skip
		fi;
#ifdef NOTE_AFTER_LOCK			/* MUTANT P1: an error may come in between */
		if
		:: holds = false; goto ends
		:: skip
		fi;
#endif
		if
		:: commits = true
		:: skip
		fi;
#ifdef PREPARE
		if
		:: prepared = true
		:: skip
		fi;
#endif
		ends: skip
	};
#if defined(WAKE_BEFORE_VISIBLE)	/* MUTANT P1 */
	wake_at_end();
	end_transaction();
#elif defined(WAKE_BEFORE_INVALIDATION)	/* MUTANT P1 */
	end_transaction();
	wake_at_end();
	cached_pause = paused
#else
	end_transaction();
#ifdef RESUME
	cached_pause = cached_pause && !(commits && resumes);
#endif
#ifdef FOLLOW
	if
	:: !(commits && follows) || prepared
	:: commits && follows && !prepared && nlisted == 0 -> n = 0
#ifndef FOLLOW_UP_NOT_MARKED		/* MUTANT P1 */
	:: commits && follows && !prepared && nlisted > 0 -> note_blocked()
#else
	:: commits && follows && !prepared && nlisted > 0
#endif
	fi;
#endif
	atomic {
		wake_at_end();
		forget()
	}
#endif
}

/*
 * The clock, and the properties.  They are looked at when no process can do
 * anything: all transactions have ended, all clients have fetched, and the
 * waiters that are left sleep.
 */

inline check_quiet()
{
	count_fetchable(y);
	z = 0;
	for (x : 0 .. WAITERS - 1) {
		z = z + waits[x]
	};
	if
	:: now >= excused_until ->
		CHECK(5, P5_looker_finds_the_rest, excused == 0 || y == 0 || z == 0);
		excused = 0
	:: else
	fi;
	CHECK(1, P1_no_wakeup_is_missed, y <= excused || z == 0);
	CHECK(1, P1_no_wakeup_is_missed, z == nlisted);
	if
	:: nlisted > 0 ->
		CHECK(5, P5_looker_finds_the_rest, LOOKER.looker && LOOKER.next_look <= now + LOOK_AFTER);
		for (x : 0 .. JOBS - 1) {
			CHECK(4, P4_looker_knows_what_is_due,
				now < excused_until || !FREE(x) || job[x].due <= now || paused || LOOKER.next_look <= job[x].due)
		}
	:: else
	fi;
	tidy()
}

active proctype clock()
{
#if TICKS > 0
	do
	:: d_step { now < TICKS -> now++; printf("clock: %d\n", now) }
	:: break
	od;
#endif
	do
	:: atomic { timeout ->
		d_step { check_quiet() };
#if CLOCK > 0
		if
		:: now < CLOCK -> now++; printf("clock: %d\n", now)
		:: else -> break
		fi
#else
		break
#endif
	   }
	od
}
