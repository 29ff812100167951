/*
 * keys.h
 *		Keys, claims and leases.
 *
 * The SQL functions (claim.c, lease.c, call.c) check their arguments and call a
 * store.  keystore.c claims and leases keys, and finishes and releases a key that
 * the transaction holds.  leasestore.c changes a lease for a caller that has its
 * token.  Both read rows with keyrow.c and open the table with keytable.c.
 */
#ifndef IDEM_KEYS_H
#define IDEM_KEYS_H

#include "fn/fn.h"
#include "stats/stats.h"
#include "table/table.h"
#include "wake/wake.h"

/*
 * The column "request" stores a digest of the request (K7).  idem_call() stores a
 * digest of the name of its handler, followed by the digest of the payload unless
 * the payload is null.  So the length says which of the two digests are stored.  Without
 * a request it is empty, not null: a null would cost each row a null bitmap.
 */
#define IDEM_DIGEST_LEN	 IDEM_SHA256_LEN
#define IDEM_HANDLER_LEN 16

/*
 * Columns of idem.keys.  The columns from the token on belong to leases.
 */
enum IdemKeyColumn
{
	IDEM_KEYS_CREATED_AT = 1,
	IDEM_KEYS_EXPIRES_AT,
	IDEM_KEYS_KEY_HASH,
	IDEM_KEYS_OWNER,
	IDEM_KEYS_NTH,
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
	IDEM_KEYS_NATTS = IDEM_KEYS_PRIOR_EXPIRES_AT
};

/* Arguments of a lease, which is a claim that outlives its transaction */
typedef struct IdemLease
{
	int64 length;	  /* in microseconds */
	text *worker;	  /* name of the caller, or NULL */
	int max_attempts; /* 0: no limit; if the row has a limit too, the higher one counts */
	bool park;		  /* when the lease has expired, leave the key to an operator */
} IdemLease;

/* Arguments of a claim */
typedef struct IdemClaim
{
	IdemKey key;
	bytea *request; /* digest of the request, or NULL */
	int64 ttl;		/* in microseconds */
	IdemWait wait;
	const IdemLease *lease; /* NULL: a plain claim */
} IdemClaim;

/* The answer to a claim, and the state of a row as idem_keyrow_judge() returns it */
typedef enum IdemKeyStatus
{
	/* answers only */
	IDEM_KEY_CLAIMED, /* the caller has the key now and does the work */
	IDEM_KEY_RESUMED, /* the worker already holds the live lease of the key */
	IDEM_KEY_BUSY,	  /* another transaction holds the key, or the key has a live lease */
	/* both */
	IDEM_KEY_HELD,		/* this transaction has claimed the key before */
	IDEM_KEY_FINISHED,	/* the work is done */
	IDEM_KEY_PARKED,	/* the lease has expired, and an operator decides */
	IDEM_KEY_EXHAUSTED, /* the lease of the last attempt has expired */
	/* states only */
	IDEM_KEY_LIVE,	  /* leased, and the lease has not expired */
	IDEM_KEY_EXPIRED, /* the lease has expired: the next claim gets the key */
	IDEM_KEY_GONE	  /* the key is past its ttl: it counts as absent */
} IdemKeyStatus;

/* The facts that the state of a key depends on */
typedef struct IdemKeyFacts
{
	TimestampTz now; /* by the clock of idem */
	bool is_mine;	 /* this transaction has written the row */
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
 * The answer to idem_keystore_claim() or idem_keystore_get().  Pointers are
 * palloc'd in the caller's context.  Only the status is set if another open
 * transaction holds the key.
 */
typedef struct IdemKeyInfo
{
	IdemKeyStatus status;
	Oid owner;
	TimestampTz created_at;
	TimestampTz expires_at;
	TimestampTz finished_at; /* 0 if idem_finish() was not called */
	Jsonb *result;			 /* NULL if the row has none */
	int64 token;			 /* the last one of the key; 0 if the key was never leased */
	TimestampTz lease_until; /* 0: not a lease, and no member below is set */
	int attempt;
	int max_attempts; /* 0: no limit */
	text *worker;	  /* NULL if the worker gave no name */
	Jsonb *checkpoint;
} IdemKeyInfo;

/* keytable.c */
extern const IdemTableDef idem_keytable_def;
extern void idem_keytable_open(IdemTable *table, LOCKMODE lockmode);
extern bool idem_keytable_has_key(TupleTableSlot *row, const IdemKey *key);
extern IdemLookup idem_keytable_lookup(IdemTable *table, const IdemKey *key);
extern int64 idem_keytable_hash(const IdemLookup *lookup);
extern void idem_keytable_note_end(const IdemKey *key);
extern void idem_keytable_update(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new);
extern int idem_keytable_free_nth(const IdemLookup *lookup);

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
extern TupleTableSlot *idem_keyrow_copy_finished(IdemTable *table, Jsonb *result, TimestampTz now);

/* keyhint.c */
extern void idem_keyhint_set(ItemPointerData tid);
extern bool idem_keyhint_find(IdemTable *table, const IdemKey *key, IdemProbeResult *probe);

/* keystore.c */
extern void idem_keystore_claim(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info);
extern bool idem_keystore_finish(IdemTable *table, const IdemKey *key, Jsonb *result);
extern void idem_keystore_release(IdemTable *table, const IdemKey *key);
extern uint64 idem_keystore_held_answers(void);
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

/* call.c */
extern bool idem_call_once(Oid handler, NullableDatum payload, IdemClaim *claim,
						   IdemKeyInfo *info);

#endif /* IDEM_KEYS_H */
