/*
 * keys.h
 *		Keys, claims and leases.
 *
 * SQL functions (claim.c, lease.c, call.c) check their arguments and call a
 * store: keystore.c for claims and for what a transaction does with a key that
 * it holds, leasestore.c for what the holder of a lease does with its token.
 * The stores read a row through keyrow.c and reach the table through keytable.c.
 */
#ifndef IDEM_KEYS_H
#define IDEM_KEYS_H

#include "fn/fn.h"
#include "stats/stats.h"
#include "table/table.h"

/*
 * What is stored of a request (K7): its digest.  idem_call() puts a digest of
 * the name of its handler before that of the payload, and leaves that out if
 * the payload is null.  So the length tells which of the two are there.
 */
#define IDEM_DIGEST_LEN	 32
#define IDEM_HANDLER_LEN 16

/*
 * Columns of idem.keys.  Those from the token on belong to leases: the row of a
 * plain claim ends before them, like one from before they were added.
 */
enum IdemKeyColumn
{
	IDEM_KEYS_CREATED_AT = 1,
	IDEM_KEYS_EXPIRES_AT,
	IDEM_KEYS_OWNER,
	IDEM_KEYS_KEY,
	IDEM_KEYS_SCOPE,
	IDEM_KEYS_REQUEST,
	IDEM_KEYS_FINISHED_AT,
	IDEM_KEYS_RESULT,
	IDEM_KEYS_TOKEN,
	IDEM_KEYS_LEASED_AT,
	IDEM_KEYS_LEASE_UNTIL,
	IDEM_KEYS_ATTEMPT,
	IDEM_KEYS_MAX_ATTEMPTS,
	IDEM_KEYS_PARK,
	IDEM_KEYS_WORKER,
	IDEM_KEYS_CHECKPOINT,
	IDEM_KEYS_PRIOR_LEASE_UNTIL,
	IDEM_KEYS_PRIOR_EXPIRES_AT,
	IDEM_KEYS_PLAIN_NATTS = IDEM_KEYS_RESULT,
	IDEM_KEYS_NATTS = IDEM_KEYS_PRIOR_EXPIRES_AT
};

/* What a claim that outlives its transaction asks for */
typedef struct IdemLease
{
	int64 length;	  /* in microseconds */
	text *worker;	  /* name of the caller, or NULL */
	int max_attempts; /* 0: as the row says, or no limit; the higher one counts */
	bool park;		  /* when it has run out, leave the key to an operator */
} IdemLease;

/* What a claim asks for */
typedef struct IdemClaim
{
	IdemKey key;
	bytea *request; /* digest of the request, or NULL */
	int64 ttl;		/* in microseconds */
	IdemWait wait;
	const IdemLease *lease; /* NULL: a plain claim */
} IdemClaim;

/* The answer to a claim, and the state of a row as idem_keyrow_judge() has it */
typedef enum IdemKeyStatus
{
	/* answers only */
	IDEM_KEY_CLAIMED, /* the caller is to do the work */
	IDEM_KEY_RESUMED, /* the caller has a lease already, and still has it */
	IDEM_KEY_BUSY,	  /* another transaction, or the holder of a lease, is at it */
	/* both */
	IDEM_KEY_HELD,		/* this transaction has claimed it before */
	IDEM_KEY_FINISHED,	/* somebody has done the work */
	IDEM_KEY_PARKED,	/* a lease ran out, and an operator is to decide */
	IDEM_KEY_EXHAUSTED, /* a lease ran out, and there were enough attempts */
	/* states only */
	IDEM_KEY_LIVE,	  /* leased */
	IDEM_KEY_EXPIRED, /* a lease ran out: the next claim gets the key */
	IDEM_KEY_GONE	  /* past its ttl: counts as absent */
} IdemKeyStatus;

/* What the state of a key depends on, besides the clock */
typedef struct IdemKeyFacts
{
	bool is_mine; /* this transaction has written the row */
	bool is_finished;
	bool is_leased;
	TimestampTz expires_at;
	/* of a lease */
	TimestampTz lease_until;
	bool park;
	int attempt;
	int max_attempts; /* 0: no limit */
} IdemKeyFacts;

/*
 * The answer to a claim or a look at a key.  Pointers are palloc'd in the
 * caller's context.  Nothing but the status is set if another transaction is
 * in the way.
 */
typedef struct IdemKeyInfo
{
	IdemKeyStatus status;
	Oid owner;
	TimestampTz created_at;
	TimestampTz expires_at;
	TimestampTz finished_at; /* 0 if idem_finish() was not called */
	Jsonb *result;			 /* NULL if there is none */
	int64 token;			 /* the last one of the key, 0 if it never had a lease */
	TimestampTz lease_until; /* 0: not a lease, and nothing below is set */
	int attempt;
	int max_attempts; /* 0: no limit */
	text *worker;	  /* NULL if it gave no name */
	Jsonb *checkpoint;
} IdemKeyInfo;

/* keytable.c */
extern void idem_keytable_open(IdemTable *table, LOCKMODE lockmode);
extern int64 idem_keytable_hash(const IdemKey *key);
extern IdemLookup idem_keytable_lookup(IdemTable *table, const IdemKey *key);

/* keyrow.c */
extern bool idem_keyrow_is_leased(IdemTable *table);
extern IdemKeyStatus idem_keyrow_judge_facts(const IdemKeyFacts *facts);
extern IdemKeyStatus idem_keyrow_judge(IdemTable *table, int max_attempts);
extern const char *idem_keyrow_status_name(IdemKeyStatus status);
extern void idem_keyrow_read(IdemTable *table, IdemKeyStatus status, IdemKeyInfo *info);
extern Oid idem_keyrow_current_owner(void);
extern void idem_keyrow_check_owner(Oid owner);
extern void idem_keyrow_check_request(IdemTable *table, bytea *request);
extern void idem_keyrow_check_serializable(IdemTable *table);
extern void idem_keyrow_check_absent(IdemTable *table, IdemLookup *lookup);
extern bool idem_keyrow_check_finished(IdemTable *table, Jsonb *result);
extern void idem_keyrow_reject_finished(IdemTable *table, const char *hint);
extern TupleTableSlot *idem_keyrow_copy(IdemTable *table);
extern TupleTableSlot *idem_keyrow_copy_finished(IdemTable *table, Jsonb *result, TimestampTz now);

/* keyhint.c */
extern void idem_keyhint_set(ItemPointerData tid);
extern bool idem_keyhint_find(IdemTable *table, const IdemKey *key, IdemProbeResult *probe);

/* keystore.c */
extern void idem_keystore_claim(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info);
extern bool idem_keystore_finish(IdemTable *table, const IdemKey *key, Jsonb *result);
extern void idem_keystore_release(IdemTable *table, const IdemKey *key);
extern bool idem_keystore_forget(IdemTable *table, const IdemKey *key);
extern bool idem_keystore_get(IdemTable *table, const IdemKey *key, IdemKeyInfo *info);

/* leasestore.c */
extern bool idem_leasestore_finish(IdemTable *table, const IdemKey *key, int64 token,
								   Jsonb *result);
extern void idem_leasestore_release(IdemTable *table, const IdemKey *key, int64 token);
extern TimestampTz idem_leasestore_renew(IdemTable *table, const IdemKey *key, int64 token,
										 int64 length);
extern TimestampTz idem_leasestore_checkpoint(IdemTable *table, const IdemKey *key, int64 token,
											  Jsonb *data);
extern void idem_leasestore_fence(IdemTable *table, const IdemKey *key, int64 token);

/* claim.c */
extern void idem_claim_args(FunctionCallInfo fcinfo, int requestarg, IdemClaim *claim);

/* unfinished.c */
extern void idem_unfinished_init(void);
extern void idem_unfinished_add(int change);

#endif /* IDEM_KEYS_H */
