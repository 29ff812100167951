/*
 * keys.h
 *		Keys, claims and leases.
 *
 * The SQL functions (claim.c, call.c) check their arguments and call keystore.c,
 * which has the protocol.  keyrow.c has the table, and what its rows mean.
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

/* The answer to a claim, and the state of a row as idem_keyrow_judge() finds it */
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

/*
 * A row of idem.keys: what every operation on a key needs of it.  Other columns are read from
 * the slot when they are needed.  It is also the answer of idem_keystore_claim() and
 * idem_keystore_get(); only the status is set if another open transaction holds the key.
 */
typedef struct IdemKeyRow
{
	TupleTableSlot *row; /* valid until the next look at the table, or its end */
	IdemKeyStatus status;
	bool is_mine; /* this transaction has written the row */
	Oid owner;
	TimestampTz created_at;
	TimestampTz expires_at;
	TimestampTz finished_at; /* 0 if idem_finish() was not called */
	int64 token;			 /* the last one of the key; 0 if the key was never leased */
	TimestampTz lease_until; /* 0: not a lease, and no member from here to max_attempts is set */
	bool park;
	int attempt;
	int max_attempts; /* 0: no limit */

	/* copies in the context of the caller, set by idem_keyrow_copy_values() */
	Jsonb *result;	   /* NULL if the row has none */
	text *worker;	   /* of a lease; NULL if the worker gave no name */
	Jsonb *checkpoint; /* of a lease */
} IdemKeyRow;

/* keyrow.c */
extern const IdemTableDef idem_keyrow_def;
extern void idem_keyrow_open(IdemTable *table, LOCKMODE lockmode);
extern bool idem_keyrow_has_key(TupleTableSlot *row, const IdemKey *key);
extern IdemLookup idem_keyrow_lookup(IdemTable *table, const IdemKey *key);
extern int idem_keyrow_free_nth(const IdemLookup *lookup);
extern IdemKeyStatus idem_keyrow_judge(const IdemKeyRow *key, int limit, TimestampTz now);
extern void idem_keyrow_read(TupleTableSlot *row, int limit, IdemKeyRow *key);
extern void idem_keyrow_copy_values(IdemKeyRow *key);
extern const char *idem_keyrow_status_name(IdemKeyStatus status);
extern Oid idem_keyrow_current_owner(void);
extern void idem_keyrow_check_owner(Oid owner);
extern void idem_keyrow_check_request(const IdemKeyRow *key, bytea *request);
extern void idem_keyrow_check_serializable(IdemTable *table, TupleTableSlot *row);
extern void idem_keyrow_check_absent(IdemTable *table, IdemLookup *lookup);

/* keystore.c */
extern void idem_keystore_claim(IdemTable *table, const IdemClaim *claim, IdemKeyRow *key);
extern uint64 idem_keystore_held_answers(void);
extern bool idem_keystore_finish(IdemTable *table, const IdemKey *name, Jsonb *result);
extern void idem_keystore_release(IdemTable *table, const IdemKey *name);
extern bool idem_keystore_forget(IdemTable *table, const IdemKey *name);
extern bool idem_keystore_get(IdemTable *table, const IdemKey *name, IdemKeyRow *key);
extern void idem_keystore_fence(IdemTable *table, const IdemKey *name, int64 token,
								IdemKeyRow *key);
extern bool idem_keystore_finish_lease(IdemTable *table, const IdemKey *name, int64 token,
									   Jsonb *result);
extern void idem_keystore_release_lease(IdemTable *table, const IdemKey *name, int64 token);
extern TimestampTz idem_keystore_renew(IdemTable *table, const IdemKey *name, int64 token,
									   int64 length);
extern TimestampTz idem_keystore_checkpoint(IdemTable *table, const IdemKey *name, int64 token,
											Jsonb *data);

/* claim.c */
extern void idem_claim_args(FunctionCallInfo fcinfo, int requestarg, IdemClaim *claim);

/* call.c */
extern bool idem_call_once(Oid handler, NullableDatum payload, IdemClaim *claim,
						   IdemKeyRow *answer);

#endif /* IDEM_KEYS_H */
