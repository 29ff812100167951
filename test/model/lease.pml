/*
 * lease.pml: the protocol of leases on one key, for the model checker Spin
 *
 * Sessions lease, claim, finish, renew, release, fence and clean up one key.
 * They may die, fall asleep or lose an answer at any step, a standby that
 * missed the last commits may be promoted, and the clock may show anything.
 * README.md beside this file says what the properties P1 to P6 mean, what is
 * left out, and how to run it.
 *
 * Every operation is a transaction in four steps, and anything may happen
 * between two of them:
 *	(1) probe the latest committed version of the row
 *	(2) judge it by the clock, in one step with (1)
 *	(3) lock the version that was probed, or start again if it has changed
 *	(4) change it and commit, or roll back
 *
 * Options, as -DNAME to spin:
 *	SESSIONS=n, CLOCK=n, TOKENS=n, ATTEMPTS=n, NO_FAILOVER
 *			size of the model
 *	LIVE		the small model for P4, at the end
 *	ONLY=n		check property n alone
 *	a mutant	leaves out one rule; look for MUTANT
 */

#ifndef SESSIONS
#define SESSIONS	2
#endif
#ifndef CLOCK
#define CLOCK		4	/* it shows 1 to CLOCK */
#endif
#ifndef TOKENS
#ifdef LIVE
#define TOKENS		250
#else
#define TOKENS		CLOCK	/* the highest; the model ends where they run out */
#endif
#endif
#ifndef ATTEMPTS
#define ATTEMPTS	3	/* max_attempts of every lease */
#endif
#define LEASE_TIME	1	/* in steps of the clock */
#define TTL		1

/* Always 0: the names are for the message of an assertion that fails. */
bool P1_one_finish_per_life;
bool P2_tokens_only_grow;
bool P3_finished_until_ttl;
bool P4_one_verdict_for_every_row;
bool P5_live_or_parked_left_alone;
bool P6_fence_holds;

#ifndef ONLY
#define ONLY		0
#endif
#define CHECK(n, name, cond)	assert((ONLY && ONLY != n) || (cond) || name)

/* STALE: whatever it was, the row is no longer the version that was probed. */
mtype = { LEASE, CLAIM, FINISH, RENEW, RELEASE, FENCE, CLEAN, STALE };

/* A committed version of the row. */
typedef Row {
	bool	there;
	bool	plain;		/* claimed without a lease: its commit was the finish */
	byte	tok;		/* the last token of the key, 0: it never had one */
	byte	lease_until;	/* expires_at is always TTL later */
	bool	fin;
	bool	park;
	byte	attempt;
	byte	worker;		/* session + 1 */
	/* ghosts, for the properties only: no rule of the protocol looks at them */
	byte	finishes;	/* accepted in this life of the key */
	byte	floor;		/* a lower token must not be accepted */
};

typedef Session {
	byte	tok;		/* the token that it believes to hold, 0: none */
	mtype	op;		/* its transaction, 0: none */
	byte	c;		/* what the clock showed in step 2, where that is used again */
};

Row	row;			/* the latest version */
Row	standby;		/* what the standby has, once it has lost touch */
bool	cut;			/* it has */
byte	lock;			/* session + 1 whose open transaction has locked or changed the row */
Session	s[SESSIONS];

/* Ghosts, too. */
byte	high;			/* highest token that a committed lease has handed out */
byte	lost;			/* the same, where the row that had it is lost or removed; else 0 */
byte	fencer;			/* session + 1 from its fence to the end of its transaction */

#define ME		s[_pid]
#define HAS_ROW		(ME.op != 0 && (lock == _pid + 1 || fencer == _pid + 1))

/*
 * The clock may jump at any time, so each read of it returns any value, and what it
 * showed in between does not matter.
 */
#ifdef LIVE
byte	now = 1;
#define look_at_clock()	c = now
#else
#define look_at_clock()	select(c : 1 .. CLOCK)
#endif

/* Misfortune has a bound where the end is looked for, see LIVE below. */
#ifdef LIVE
#ifndef CRASHES
#define CRASHES		3
#endif
byte	crashes;
#define BAD_LUCK	(crashes < CRASHES && now < CLOCK)
#define LOSE_ANSWER	BAD_LUCK -> crashes++
#else
#define LOSE_ANSWER	true
#endif

/*
 * The judge: exactly one of FREE, LIVE_LEASE, FINISHED, PARKED, EXHAUSTED and
 * EXPIRED.
 */
#define EXPIRES		(row.lease_until + TTL)
#define OVER		(row.there && !row.fin && c >= row.lease_until)
#ifdef PARKED_EXPIRES			/* MUTANT P5: a parked key goes by its ttl */
#define PARKED		(OVER && row.park && c < EXPIRES)
#else
#define PARKED		(OVER && row.park)
#endif
#define GONE		(row.there && c >= EXPIRES && !PARKED)
#define FREE		(!row.there || GONE)
#define LIVE_LEASE	(row.there && !row.fin && c < row.lease_until)
#define FINISHED	(row.there && row.fin && !GONE)
#define EXHAUSTED	(OVER && !PARKED && !GONE && row.attempt >= ATTEMPTS)
#if defined(EXPIRED_IS_BUSY)		/* MUTANT P4: no session takes over */
#define EXPIRED		(false)
#elif defined(LEASE_BEFORE_FINISH)	/* MUTANT P3: looks at the lease before the finish */
#define EXPIRED		(row.there && c >= row.lease_until && !PARKED && !GONE && row.attempt < ATTEMPTS)
#else
#define EXPIRED		(OVER && !PARKED && !GONE && row.attempt < ATTEMPTS)
#endif
#define CLAIMABLE	(FREE || EXPIRED)

/* What a token has to be for finish, renew, release and fence, also after the lease ran out. */
#define LEASED_BY_ME	(row.there && !row.plain && ME.tok > 0 && ME.tok == row.tok && !GONE)
#define HOLDS		(LEASED_BY_ME && !row.fin)
#ifdef FINISH_WITHOUT_TOKEN_CHECK	/* MUTANT P2 */
#define CAN_FINISH	(row.there && !row.plain && ME.tok > 0 && !GONE && !row.fin)
#else
#define CAN_FINISH	HOLDS
#endif

/*
 * The assumption about clocks.  Where the row was removed, or set back by a
 * failover, last + 1 protects nothing: the clock that makes the next token has
 * to be past the tokens that what is lost has handed out.  As long as the row
 * is there with its last token, the clock may show anything.
 */
#ifdef CLOCK_BEHIND			/* MUTANT P2: without the assumption */
#define ASSUMED		(true)
#else
#define ASSUMED		(c > lost || (row.there && row.tok >= lost))
#endif

#if defined(TOKEN_FROM_SEQUENCE)	/* MUTANT P2: a failover sets it back */
byte	seq, standby_seq;
#define NEXT		(seq + 1)
#elif defined(TOKEN_FROM_CLOCK_ONLY)	/* MUTANT P2: the clock jumps back */
#define NEXT		(c)
#else
#define NEXT		(c > row.tok -> c : row.tok + 1)
#endif
#define CAN_MAKE	(ASSUMED && NEXT <= TOKENS)

inline make_token()
{
	t = NEXT;
#ifdef TOKEN_FROM_SEQUENCE
	seq = t;
#endif
	row.floor = t;
	lost = 0		/* the row has a higher one now */
}

inline copy_row(to, from)
{
	to.there = from.there; to.plain = from.plain; to.tok = from.tok;
	to.lease_until = from.lease_until; to.fin = from.fin; to.park = from.park;
	to.attempt = from.attempt; to.worker = from.worker;
	to.finishes = from.finishes; to.floor = from.floor
}

inline remove(r)
{
	r.there = false; r.plain = false; r.tok = 0;
	r.lease_until = 0; r.fin = false; r.park = false;
	r.attempt = 0; r.worker = 0;
	r.finishes = 0; r.floor = 0
}

/* Clears the fields of a finished row that no session reads, to have fewer states. */
inline finish_row()
{
	row.finishes++;
	CHECK(1, P1_one_finish_per_life, row.finishes <= 1);
	row.fin = true; row.park = false; row.attempt = 0; row.worker = 0
}

/* Before a session ends a lease without its token, or removes the row. */
inline check_left_alone()
{
	CHECK(3, P3_finished_until_ttl, !(row.there && row.fin && c < EXPIRES));
	CHECK(5, P5_live_or_parked_left_alone, !(row.there && !row.fin && (c < row.lease_until || row.park)));
	CHECK(6, P6_fence_holds, fencer == 0 || fencer == _pid + 1)
}

/*
 * For a session whose token is accepted.  The outside refuses a token lower
 * than the highest it has seen.  That is `high` at worst, when every holder
 * calls at once; so it would not refuse this one, unless a failover lost the
 * higher ones.
 */
inline check_accepted()
{
	CHECK(2, P2_tokens_only_grow, ME.tok >= row.floor);
	CHECK(2, P2_tokens_only_grow, ME.tok >= high || lost >= high)
}

inline begin(o)
{
	ME.op = o;
	printf("session %d: probes, clock %d, wants to %e\n", _pid, c, o)
}

inline end_transaction()
{
	if
	:: lock == _pid + 1 -> lock = 0
	:: else
	fi;
	if
	:: fencer == _pid + 1 -> fencer = 0
	:: else
	fi;
	ME.op = 0; ME.c = 0
}

/* Steps 1 and 2. */
inline probe()
{
	look_at_clock();
	CHECK(4, P4_one_verdict_for_every_row,
		FREE + LIVE_LEASE + FINISHED + PARKED + EXHAUSTED + EXPIRED == 1);
	if
	:: CLAIMABLE -> begin(LEASE);
#ifdef TAKEOVER_WITHOUT_RECHECK
		ME.c = (row.there -> c : 0)	/* an insert fails all the same */
#endif
	:: CLAIMABLE -> begin(CLAIM)
	/* the lease of this worker, which did not get the answer */
	:: LIVE_LEASE && row.worker == _pid + 1 && ME.tok != row.tok ->
		ME.tok = row.tok;
		printf("session %d: resumes, clock %d, token %d\n", _pid, c, ME.tok)
	/* an operator looks up the token, to finish or release */
	:: PARKED && ME.tok != row.tok ->
		ME.tok = row.tok;
		printf("session %d: acts as operator, clock %d, token %d\n", _pid, c, ME.tok)
	:: CAN_FINISH -> begin(FINISH)
	/* a repeated finish: nothing to do, and it is accepted */
	:: LEASED_BY_ME && row.fin -> check_accepted()
	:: HOLDS -> begin(RENEW)
	:: HOLDS -> begin(RELEASE)
	:: HOLDS -> begin(FENCE)
	:: GONE -> begin(CLEAN); ME.c = c
#ifdef CLEANER_REMOVES_LIVE_LEASE	/* MUTANT P5 */
	:: LIVE_LEASE -> begin(CLEAN); ME.c = c
#endif
	/* busy, finished, parked, exhausted, ID003: nothing changes */
	:: else
	fi;
	c = 0
}

/* Step 3. */
inline lock_version()
{
	if
	:: ME.op == STALE ->
		printf("session %d: the row has changed, starts again\n", _pid);
		end_transaction()
	:: ME.op == FENCE ->
#ifndef FENCE_WITHOUT_LOCK		/* MUTANT P6: it only looks */
		lock = _pid + 1;
#endif
		check_accepted();
		fencer = _pid + 1;
		printf("session %d: fences, token %d\n", _pid, ME.tok)
	:: else ->
		lock = _pid + 1;
		printf("session %d: locks the row to %e\n", _pid, ME.op)
	fi
}

#if defined(TAKEOVER_WITHOUT_RECHECK)	/* MUTANT P1, P3, P5 */
#define RECHECKS(x)	(!(x.op == LEASE && x.c > 0 && row.there))
#elif defined(FINISH_WITHOUT_RECHECK)	/* MUTANT P1 */
#define RECHECKS(x)	(!(x.op == FINISH && row.there))
#elif defined(CLEANER_WITHOUT_RECHECK)	/* MUTANT P5 */
#define RECHECKS(x)	(!(x.op == CLEAN && row.there))
#else
#define RECHECKS(x)	(true)
#endif

/* A session that has probed the version before this one has to start again. */
inline new_version()
{
	for (i : 0 .. SESSIONS - 1) {
		if
		:: i != _pid && s[i].op != 0 && RECHECKS(s[i]) -> s[i].op = STALE; s[i].c = 0
		:: else
		fi
	}
	i = 0
}

/* The wait for the lock may have been long: judge once more. */
inline judge_again()
{
	look_at_clock();
	ok = CLAIMABLE;
#ifdef TAKEOVER_WITHOUT_RECHECK
	if
	:: ME.c > 0 -> c = ME.c; ok = true
	:: else
	fi;
#endif
	new_life = FREE
}

inline commit_lease()
{
	check_left_alone();
	if
	:: CAN_MAKE ->
		make_token();
		CHECK(2, P2_tokens_only_grow, t > high);
		high = t;
		row.finishes = (new_life -> 0 : row.finishes);
		row.attempt = (new_life -> 1 : row.attempt + 1);
		row.there = true; row.plain = false; row.fin = false;
		row.tok = t; row.lease_until = c + LEASE_TIME; row.worker = _pid + 1;
		if
		:: row.park = false
		:: row.park = true
		fi;
		printf("session %d: leases, clock %d, token %d, until %d, attempt %d, park %d\n",
			_pid, c, t, row.lease_until, row.attempt, row.park);
		new_version();
		if
		:: ME.tok = t
		:: LOSE_ANSWER; printf("session %d: does not get the answer\n", _pid)
		fi
	:: else
	fi
}

/*
 * The last token stays, for tokens to go on growing, but it is no lease any
 * more: a finish of the last holder must not be accepted.
 */
inline commit_claim()
{
	check_left_alone();
	row.there = true; row.lease_until = c;
	row.finishes = (new_life -> 0 : row.finishes);
	finish_row();
#ifndef CLAIM_LEAVES_LEASE		/* MUTANT P2 */
	row.plain = true;
#endif
	row.floor = 255;
	printf("session %d: claims, clock %d, the last token was %d\n", _pid, c, row.tok);
	new_version()
}

/* A claim that its own transaction releases leaves the lease as it was. */
inline commit_claim_released()
{
	if
	:: new_life -> remove(row); lost = high
	:: else
	fi;
	printf("session %d: claims and gives it up\n", _pid);
	new_version()
}

inline commit_finish()
{
	check_accepted();
	look_at_clock();
	finish_row();
#ifndef FINISH_KEEPS_EXPIRY		/* MUTANT P3: the ttl of a parked key may be over already */
	row.lease_until = (c > row.lease_until -> c : row.lease_until);
#endif
	CHECK(3, P3_finished_until_ttl, c < EXPIRES);
	printf("session %d: finishes, clock %d, token %d\n", _pid, c, ME.tok);
	new_version()
}

inline commit_renew()
{
	check_accepted();
	look_at_clock();
	row.lease_until = c + LEASE_TIME;
	printf("session %d: renews, clock %d, token %d, until %d\n", _pid, c, ME.tok, row.lease_until);
	new_version()
}

/* To release a parked key is to say that the attempt did not happen. */
inline commit_release()
{
	check_accepted();
	CHECK(6, P6_fence_holds, fencer == 0 || fencer == _pid + 1);
	look_at_clock();
	if
	:: CAN_MAKE ->
		row.attempt = (PARKED -> row.attempt - 1 : row.attempt);
		make_token();
#ifndef RELEASE_KEEPS_TOKEN		/* MUTANT P2: a session that has released can still finish */
		row.tok = t;
#endif
		row.lease_until = c; row.park = false; row.worker = 0;
		printf("session %d: releases, clock %d, token %d, the row has %d\n", _pid, c, ME.tok, row.tok);
		new_version()
	:: else
	fi
}

inline commit_clean()
{
	c = ME.c;
	check_left_alone();
	remove(row); lost = high;
	printf("session %d: cleans up, clock %d\n", _pid, c);
	new_version()
}

/* Step 4. */
inline commit()
{
	if
	:: ME.op == LEASE -> judge_again();
		if
		:: ok -> commit_lease()
		:: else
		fi
	:: ME.op == CLAIM -> judge_again();
		if
		:: ok -> commit_claim()
		:: ok -> commit_claim_released()
		:: else
		fi
	:: ME.op == FINISH -> commit_finish()
	:: ME.op == RENEW -> commit_renew()
	:: ME.op == RELEASE -> commit_release()
	:: ME.op == CLEAN -> commit_clean()
	:: ME.op == FENCE -> printf("session %d: ends its fenced transaction\n", _pid)
	fi;
	end_transaction();
	c = 0; t = 0; ok = false; new_life = false
}

#ifndef LIVE

/*
 * Client, operator and cleaner in one: whatever a session did before, it may
 * do anything next, or nothing for as long as it likes and then go on with its
 * old token.
 */
active [SESSIONS] proctype session()
{
	byte c, t, i;
	bool ok, new_life;

end:	do
	:: atomic { ME.op == 0 -> probe() }
	:: atomic { ME.op != 0 && !HAS_ROW && lock == 0 -> lock_version() }
	:: atomic { HAS_ROW -> commit() }
	/* more in the fenced transaction */
	:: atomic { ME.op == FENCE && lock == _pid + 1 ->
		look_at_clock();
		if
		:: CAN_FINISH -> begin(FINISH)
		:: HOLDS -> begin(RENEW)
		:: HOLDS -> begin(RELEASE)
		:: else
		fi;
		c = 0
	   }
	:: atomic { ME.op != 0 ->
		printf("session %d: rolls back %e\n", _pid, ME.op);
		end_transaction()
	   }
	:: atomic { ME.op == 0 && ME.tok > 0 ->
		printf("session %d: dies, forgets token %d\n", _pid, ME.tok);
		ME.tok = 0
	   }
	od
}

#ifndef NO_FAILOVER

/*
 * The standby has everything until it loses touch.  Promoted, it has what it
 * had then, and no transaction of the old primary.
 */
active proctype failover()
{
	byte i;

end:	do
	:: atomic { !cut ->
		cut = true;
		copy_row(standby, row);
#ifdef TOKEN_FROM_SEQUENCE
		standby_seq = seq;
#endif
		printf("standby: loses touch, its row has token %d\n", row.tok)
	   }
	:: atomic { cut ->
		cut = false;
		copy_row(row, standby);
		remove(standby);
		lost = (high > row.tok -> high : lost);
#ifdef TOKEN_FROM_SEQUENCE
		seq = standby_seq;
		standby_seq = 0;
#endif
		lock = 0; fencer = 0;
		for (i : 0 .. SESSIONS - 1) {
			s[i].op = 0; s[i].c = 0
		}
		i = 0;
		printf("standby: is promoted, the row has token %d\n", row.tok)
	   }
	od
}

#endif

#else		/* LIVE */

/*
 * P4 as a promise about time: if workers keep asking and the clock goes on,
 * the key gets finished (or parked or exhausted), and every worker that is
 * alive gets that answer.  That needs a clock that only goes forwards, and a bound on
 * misfortune: CRASHES times a worker dies, loses an answer or is rolled back,
 * none of it when the clock is at its end, so that the last lease can run out,
 * and one worker at least is never gone for good.
 */
byte	working = SESSIONS;

#define SETTLED	(row.there && (row.fin || (now >= row.lease_until && (row.park || row.attempt >= ATTEMPTS))))

ltl P4_finished_or_taken_over { <> [] (SETTLED && working == 0) }

active [SESSIONS] proctype worker_session()
{
	byte c, t, i;
	bool ok, new_life;

	do
	:: atomic { ME.op == 0 ->
		look_at_clock();
		if
		:: ME.tok > 0 && HOLDS -> begin(FINISH)
		:: ME.tok > 0 && !HOLDS ->
			printf("session %d: drops token %d\n", _pid, ME.tok);
			ME.tok = 0
		:: ME.tok == 0 && CLAIMABLE -> begin(LEASE)
		:: ME.tok == 0 && LIVE_LEASE && row.worker == _pid + 1 ->
			ME.tok = row.tok;
			printf("session %d: resumes, clock %d, token %d\n", _pid, c, ME.tok)
		:: ME.tok == 0 && (FINISHED || PARKED || EXHAUSTED) ->
			printf("session %d: gets a final answer\n", _pid);
			working--; c = 0;
			break
		:: else		/* busy: asks again */
		fi;
		c = 0
	   }
	:: atomic { ME.op != 0 && !HAS_ROW && lock == 0 -> lock_version() }
	:: atomic { HAS_ROW -> commit() }
	:: atomic { BAD_LUCK ->
		printf("session %d: dies\n", _pid);
		crashes++;
#ifdef CRASH_KEEPS_LOCK			/* MUTANT P4: a lock that outlives its transaction */
		lock = (lock == _pid + 1 -> SESSIONS + 1 : lock);
#endif
		end_transaction();
		ME.tok = 0;
		if
		:: true		/* begins anew, under the same name */
		:: working > 1 -> working--; break
		fi
	   }
	od
}

active proctype clock()
{
	do
	:: atomic { now < CLOCK && !SETTLED -> now++; printf("clock: %d\n", now) }
	:: else		/* goes on, for a deadlock to be seen as a cycle */
	od
}

#endif
