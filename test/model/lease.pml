/*
 * lease.pml: the protocol of leases, one key, for the model checker Spin
 *
 * Sessions lease, claim, finish, renew, release, fence and clean up one key.
 * They may die, fall asleep or lose an answer at any step, a standby that
 * missed the last commits may be promoted, and the clock may show anything.
 * Checked: the properties P1 to P6 at the places named CHECK.  README.md
 * beside this file says what they mean, what is left out, and how to run it.
 *
 * Options, as -DNAME to spin:
 *	SESSIONS=n, CLOCK=n	size of the model
 *	ONLY=n			check property n alone
 *	LIVE			the small configuration for P4, see the end
 *	a mutant		one rule left out; grep MUTANT for their names
 */

#ifndef SESSIONS
#define SESSIONS	2
#endif
#ifndef CLOCK
#define CLOCK		5	/* it shows 1 to CLOCK */
#endif
#ifndef TOKENS
#define TOKENS		CLOCK	/* highest token; the model ends where they run out */
#endif
#ifndef ATTEMPTS
#define ATTEMPTS	3	/* max_attempts of every lease */
#endif
#define LEASE		1	/* lengths in steps of the clock */
#define TTL		1

/*
 * Properties.  The names are there to be seen in the message of a failed
 * assertion; their value is always 0.
 */
hidden byte P1_one_finish_per_life;
hidden byte P2_tokens_only_grow;
hidden byte P3_finished_until_ttl;
hidden byte P5_live_or_parked_is_left_alone;
hidden byte P6_fence_holds;

#ifndef ONLY
#define ONLY		0
#endif
#define CHECK(n, name, cond)	assert((ONLY && ONLY != n) || (cond) || name)

/* STALE: whatever it was, the row is not the version any more that was probed. */
mtype = { NEW, TAKEOVER, CLAIM, FINISH, RENEW, RELEASE, FENCE, CLEAN, STALE };

/* The latest committed version of the row.  All zero: there is none. */
typedef Row {
	byte	tok;		/* no row has token 0 */
	byte	until;		/* lease_until; expires_at is always TTL later */
	bool	fin;
	bool	park;
	byte	attempt;
	byte	worker;		/* session + 1 */
	/* ghosts: what happened, for the properties only */
	byte	finishes;	/* accepted in this life of the key */
	byte	floor;		/* no lower token may be accepted */
};

typedef Session {
	byte	tok;		/* the token it believes to hold, 0: none */
	mtype	op;		/* transaction under way, 0: none */
	byte	c;		/* its reading of the clock */
};

Row	row;
Row	standby;		/* what the standby has, once it has lost touch */
bool	cut;			/* it has */
byte	lock;			/* session + 1 whose open transaction has changed or locked the row */
Session	s[SESSIONS];

/* Ghosts. */
byte	high;			/* highest token ever committed */
byte	lost;			/* the same, if the row that had it was lost or removed; else 0 */
byte	fencer;			/* session + 1 between its fence and the end of its transaction */

#define ME		s[_pid]

/* (2) Judge by the clock.  Exactly one of these holds. */
#define THERE		(row.tok > 0)
#define EXPIRES		(row.until + TTL)
#define OVER(c)		(THERE && !row.fin && c >= row.until)
#define LIVE_LEASE(c)	(THERE && !row.fin && c < row.until)
#ifdef PARKED_EXPIRES			/* MUTANT, P5: a parked key goes by its ttl */
#define PARKED(c)	(OVER(c) && row.park && c < EXPIRES)
#else
#define PARKED(c)	(OVER(c) && row.park)
#endif
#define GONE(c)		(THERE && c >= EXPIRES && !PARKED(c))
#define FREE(c)		(!THERE || GONE(c))
#ifdef LEASE_BEFORE_FINISH		/* MUTANT, P3: the lease is looked at before the finish */
#define FINISHED(c)	(THERE && row.fin && c < row.until)
#define EXPIRED(c)	(THERE && c >= row.until && c < EXPIRES && !row.park)
#else
#define FINISHED(c)	(THERE && row.fin && c < EXPIRES)
#ifdef EXPIRED_IS_BUSY			/* MUTANT, P4: nobody may take over */
#define EXPIRED(c)	(false)
#else
#define EXPIRED(c)	(OVER(c) && c < EXPIRES && !row.park && row.attempt < ATTEMPTS)
#endif
#endif

/* What finish, renew, release and fence ask for.  After the lease ran out too. */
#ifdef FINISH_WITHOUT_TOKEN_CHECK	/* MUTANT, P2 */
#define HOLDS(o, c)	(THERE && !row.fin && !GONE(c) && ME.tok > 0 && (ME.tok == row.tok || o == FINISH))
#else
#define HOLDS(o, c)	(THERE && !row.fin && !GONE(c) && ME.tok == row.tok)
#endif

/*
 * A new token, by the same rule for leases, plain claims and releases.
 *
 * The one assumption about clocks: where a row was removed, or set back by a
 * failover, the clock that makes the next token is past the last token of what
 * was lost.  As long as the row is there with its last token, the clock may
 * jump anywhere.
 */
#define ASSUMED(c)	(c > lost || (THERE && row.tok >= lost))

#ifdef TOKEN_FROM_SEQUENCE		/* MUTANT, P2: a failover sets it back */
byte	seq, standby_seq;
#define NEXT(c)		(seq + 1)
#else
#ifdef TOKEN_FROM_CLOCK_ONLY		/* MUTANT, P2: the clock jumps back */
#define NEXT(c)		(c)
#else
#define NEXT(c)		(c > row.tok -> c : row.tok + 1)
#endif
#endif
#define CAN_MAKE(c)	(ASSUMED(c) && NEXT(c) <= TOKENS)

inline make_token(t)
{
	t = NEXT(ME.c);
#ifdef TOKEN_FROM_SEQUENCE
	seq = t
#endif
}

/*
 * The clock may jump at any time, so every reading is a new one.  What steps
 * a clock would make in between does not matter.
 */
#ifdef LIVE
byte	now = 1;
#define read_clock(c)	c = now
#else
#define read_clock(c)	select(c : 1 .. CLOCK)
#endif

inline new_token()
{
	row.floor = t; high = (t > high -> t : high); lost = 0
}

inline forget_row()
{
	row.tok = 0; row.until = 0; row.fin = false; row.park = false;
	row.attempt = 0; row.worker = 0; row.finishes = 0; row.floor = 0
}

inline copy_row(to, from)
{
	to.tok = from.tok; to.until = from.until; to.fin = from.fin; to.park = from.park;
	to.attempt = from.attempt; to.worker = from.worker;
	to.finishes = from.finishes; to.floor = from.floor
}

/* (1) done, (2) says that the row has to be changed or locked. */
inline begin(o, clk)
{
	ME.op = o; ME.c = clk;
	printf("session %d: probes at %d, means to do %e\n", _pid, clk, o)
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

#ifdef TAKEOVER_WITHOUT_RECHECK		/* MUTANT, P3 and P5 */
#define WITHOUT_RECHECK(o)	(o == TAKEOVER && THERE)
#else
#ifdef FINISH_WITHOUT_RECHECK		/* MUTANT, P1 */
#define WITHOUT_RECHECK(o)	(o == FINISH && THERE)
#else
#define WITHOUT_RECHECK(o)	(false)
#endif
#endif

/* A new version is committed: whoever has probed the old one has to look again. */
inline new_version()
{
	for (i : 0 .. SESSIONS - 1) {
		if
		:: i != _pid && s[i].op != 0 && !WITHOUT_RECHECK(s[i].op) ->
			s[i].op = STALE; s[i].c = 0
		:: else
		fi
	}
	i = 0
}

/* What holds for whoever ends the lease of somebody else, or removes the row. */
inline check_left_alone()
{
	CHECK(5, P5_live_or_parked_is_left_alone, !(THERE && !row.fin && (ME.c < row.until || row.park)));
	CHECK(3, P3_finished_until_ttl, !(THERE && row.fin && ME.c < EXPIRES));
	CHECK(6, P6_fence_holds, fencer == 0 || fencer == _pid + 1)
}

inline check_accepted()
{
	CHECK(2, P2_tokens_only_grow, ME.tok >= row.floor)
}

inline count_finish()
{
	row.finishes++;
	CHECK(1, P1_one_finish_per_life, row.finishes <= 1)
}

/* Nobody looks at these of a finished row. */
inline finish_row()
{
	row.fin = true; row.park = false; row.attempt = 0; row.worker = 0
}

/* What a client that repeats its finish after a lost answer gets to hear. */
#define FINISHED_BY_ME(c)	(FINISHED(c) && ME.tok == row.tok)

inline probe()
{
	read_clock(c);
	if
	/* lease: absent or past its ttl, expired, or told what it is */
	:: FREE(c) && CAN_MAKE(c) -> begin(NEW, c)
	:: EXPIRED(c) && CAN_MAKE(c) -> begin(TAKEOVER, c)
	:: LIVE_LEASE(c) && row.worker == _pid + 1 && ME.tok != row.tok ->
		ME.tok = row.tok;
		printf("session %d: lease resumed, token %d\n", _pid, ME.tok)
	/* told that it is parked: an operator looks up the token and decides */
	:: PARKED(c) && ME.tok != row.tok ->
		ME.tok = row.tok;
		printf("session %d: is the operator, token %d\n", _pid, ME.tok)
	/* claim without a lease: done in this very transaction */
	:: (FREE(c) || EXPIRED(c)) && CAN_MAKE(c) -> begin(CLAIM, c)
	/* with a token */
	:: HOLDS(FINISH, c) -> begin(FINISH, c)
	:: FINISHED_BY_ME(c) -> check_accepted()
	:: HOLDS(RENEW, c) -> begin(RENEW, c)
	:: HOLDS(RELEASE, c) && CAN_MAKE(c) -> begin(RELEASE, c)
	:: HOLDS(FENCE, c) -> begin(FENCE, c)
	/* cleaner */
	:: GONE(c) -> begin(CLEAN, c)
#ifdef CLEANER_REMOVES_LIVE_LEASE	/* MUTANT, P5 */
	:: THERE && !row.fin -> begin(CLEAN, c)
#endif
	/* busy, finished, exhausted, ID003: nothing changes */
	:: else
	fi;
	c = 0
}

/* (3) Lock the version that was probed, or start again. */
inline lock_version()
{
	if
	:: ME.op != STALE ->
#ifdef FENCE_WITHOUT_LOCK		/* MUTANT, P6: fence only looks */
		if
		:: ME.op == FENCE
		:: else -> lock = _pid + 1
		fi;
#else
		lock = _pid + 1;
#endif
		if
		:: ME.op == FENCE -> check_accepted(); fencer = _pid + 1; ME.c = 0
		:: else
		fi;
		printf("session %d: %e, has the row\n", _pid, ME.op)
	:: else ->
		printf("session %d: the row has changed, starts again\n", _pid);
		end_transaction()
	fi
}

/* A life of the key ends where its row is gone by ttl. */
inline begin_life()
{
	if
	:: FREE(ME.c) -> forget_row()
	:: else
	fi
}

inline commit_lease()
{
	check_left_alone();
	make_token(t);
	CHECK(2, P2_tokens_only_grow, t > high);
	begin_life();
	new_token();
	row.tok = t; row.until = ME.c + LEASE; row.fin = false; row.attempt++; row.worker = _pid + 1;
	if
	:: row.park = false
	:: row.park = true
	fi;
	printf("session %d: leases, token %d, until %d, attempt %d, park %d\n",
		_pid, t, row.until, row.attempt, row.park);
	if
	:: ME.tok = t
	:: printf("session %d: the answer is lost\n", _pid)
	fi
}

inline commit_claim()
{
	check_left_alone();
	make_token(t);
	begin_life();
	count_finish();
	new_token();
	finish_row();
	row.until = ME.c;
#ifdef CLAIM_KEEPS_TOKEN		/* MUTANT, P2 */
	row.tok = (row.tok > 0 -> row.tok : t);
#else
	row.tok = t;
#endif
	printf("session %d: claims and finishes, token %d that nobody has\n", _pid, row.tok)
}

inline commit_finish()
{
	check_accepted();
	/* The outside has not seen the call of a later holder, unless that one was lost. */
	CHECK(2, P2_tokens_only_grow, high <= ME.tok || high <= lost);
	count_finish();
	finish_row();
#ifndef FINISH_KEEPS_EXPIRY		/* MUTANT, P3: the result of a parked key may be gone at once */
	if
	:: ME.c >= EXPIRES -> row.until = ME.c
	:: else
	fi;
#endif
	CHECK(3, P3_finished_until_ttl, ME.c < EXPIRES);
	printf("session %d: finishes with token %d\n", _pid, ME.tok)
}

inline commit_release()
{
	CHECK(6, P6_fence_holds, fencer == 0 || fencer == _pid + 1);
	check_accepted();
	make_token(t);
	new_token();
	row.until = ME.c; row.park = false; row.worker = 0;
#ifndef RELEASE_KEEPS_TOKEN		/* MUTANT, P2: whoever has released can still finish */
	row.tok = t;
#endif
	printf("session %d: releases token %d, the row has %d\n", _pid, ME.tok, row.tok)
}

inline commit_clean()
{
	check_left_alone();
	printf("session %d: cleans up the row with token %d\n", _pid, row.tok);
	lost = high;
	forget_row()
}

/* (4) */
inline commit()
{
	if
	:: ME.op == NEW || ME.op == TAKEOVER -> commit_lease(); new_version()
	:: ME.op == CLAIM -> commit_claim(); new_version()
	:: ME.op == FINISH -> commit_finish(); new_version()
	:: ME.op == RENEW ->
		check_accepted();
		row.until = ME.c + LEASE;
		printf("session %d: renews token %d until %d\n", _pid, ME.tok, row.until);
		new_version()
	:: ME.op == RELEASE -> commit_release(); new_version()
	:: ME.op == FENCE -> printf("session %d: ends its fenced transaction\n", _pid)
	:: ME.op == CLEAN -> commit_clean(); new_version()
	fi;
	t = 0;
	end_transaction()
}

#define HAS_ROW		(lock == _pid + 1 || fencer == _pid + 1)

#ifndef LIVE

/*
 * Client, operator and cleaner in one: whatever it did before, a session may
 * do anything next.  A session that does nothing for long is a zombie.
 */
active [SESSIONS] proctype session()
{
	byte c, t, i;

end:	do
	:: atomic { ME.op == 0 -> probe() }
	:: atomic { ME.op != 0 && !HAS_ROW && lock == 0 -> lock_version() }
	:: atomic { HAS_ROW -> commit() }
	/* the finish in the fenced transaction */
	:: atomic { ME.op == FENCE && lock == _pid + 1 ->
		read_clock(c);
		if
		:: HOLDS(FINISH, c) -> ME.op = FINISH; ME.c = c
		:: else
		fi;
		c = 0
	   }
	/* rolls back: an error, or the end of the client */
	:: atomic { ME.op != 0 ->
		printf("session %d: %e, rolled back\n", _pid, ME.op);
		end_transaction()
	   }
	:: atomic { ME.op == 0 && ME.tok > 0 ->
		printf("session %d: dies, token %d forgotten\n", _pid, ME.tok);
		ME.tok = 0
	   }
	od
}

/*
 * The standby has everything until it loses touch.  Promoted, it has what it
 * had then, and no transaction of the old primary.
 */
active proctype failover()
{
	byte i;

end:	do
	:: atomic { !cut ->
		copy_row(standby, row);
#ifdef TOKEN_FROM_SEQUENCE
		standby_seq = seq;
#endif
		cut = true;
		printf("standby: gets nothing from here on\n")
	   }
	:: atomic { cut ->
		if
		:: high > standby.tok -> lost = high
		:: else
		fi;
		copy_row(row, standby);
#ifdef TOKEN_FROM_SEQUENCE
		seq = standby_seq;
		standby_seq = 0;
#endif
		standby.tok = 0; standby.until = 0; standby.fin = false; standby.park = false;
		standby.attempt = 0; standby.worker = 0; standby.finishes = 0; standby.floor = 0;
		cut = false; lock = 0; fencer = 0;
		for (i : 0 .. SESSIONS - 1) {
			s[i].op = 0; s[i].c = 0
		}
		i = 0;
		printf("standby: promoted, the row has token %d\n", row.tok)
	   }
	od
}

#endif
