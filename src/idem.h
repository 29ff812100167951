/*
 * idem.h
 *		What the files of idem share; externs grouped by the file that defines them.
 *
 * Calls go down only: SQL functions (claim.c, lease.c, batch.c, call.c,
 * admin.c) check their arguments (args.c) and call the store (leasestore.c for
 * what is done with a token, keystore.c for the rest), which reads a row
 * through keyrow.c and reaches the table through keytable.c.
 */
#ifndef IDEM_H
#define IDEM_H

#include "access/skey.h"
#include "access/tupdesc.h"
#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "nodes/execnodes.h"
#include "nodes/lockoptions.h"
#include "utils/jsonb.h"

#include "compat.h"
#include "errors.h"

#define IDEM_VERSION "0.5.0"

#define IDEM_MAX_KEY_LEN	   1024
#define IDEM_MAX_SCOPE_LEN	   255
#define IDEM_MAX_WORKER_LEN	   255
#define IDEM_MAX_QUEUE_LEN	   255
#define IDEM_MAX_SAME_HASH	   32
#define IDEM_MAX_CLEANUP_BATCH 1000000
#define IDEM_MAX_ARGS		   16
#define IDEM_MAX_STATS		   100000

/* For so long, in milliseconds, a job that is due may be kept from starting by duplicates that keep coming */
#define IDEM_DRAIN_AFTER 1000

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

/* A key and the name space it lives in */
typedef struct IdemKey
{
	text *key;
	text *scope;
} IdemKey;

/* How long to wait for another transaction that holds the key */
typedef struct IdemWait
{
	bool forever;	   /* as long as lock_timeout allows */
	TimestampTz until; /* else: till then */
} IdemWait;

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
typedef enum IdemStatus
{
	/* answers only */
	IDEM_CLAIMED, /* the caller is to do the work */
	IDEM_RESUMED, /* the caller has a lease already, and still has it */
	IDEM_BUSY,	  /* another transaction, or the holder of a lease, is at it */
	/* both */
	IDEM_HELD,		/* this transaction has claimed it before */
	IDEM_FINISHED,	/* somebody has done the work */
	IDEM_PARKED,	/* a lease ran out, and an operator is to decide */
	IDEM_EXHAUSTED, /* a lease ran out, and there were enough attempts */
	/* states only */
	IDEM_LIVE,	  /* leased */
	IDEM_EXPIRED, /* a lease ran out: the next claim gets the key */
	IDEM_GONE	  /* past its ttl: counts as absent */
} IdemStatus;

/*
 * The answer to a claim or a look at a key.  Pointers are palloc'd in the
 * caller's context.  Nothing but the status is set if another transaction is
 * in the way.
 */
typedef struct IdemRow
{
	IdemStatus status;
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
} IdemRow;

/* What a look at a key has found; the row itself is in the slot of the table */
typedef enum IdemFound
{
	IDEM_FOUND_NONE,
	IDEM_FOUND_OPEN, /* a row made by another transaction, still open */
	IDEM_FOUND_ROW	 /* one that is committed, or made by this transaction */
} IdemFound;

typedef struct IdemProbe
{
	IdemFound found;
	TransactionId xwait; /* whose end would change the picture, or invalid */
} IdemProbe;

/* How an SQL function is to be declared: types of the result and of the arguments, then zeros */
typedef struct IdemSignature
{
	Oid types[IDEM_MAX_ARGS + 2];
	Oid function; /* one that is known to be declared so */
} IdemSignature;

/* IDEM_FUNCTION(name, type of the result, types of the arguments): an SQL function */
#define IDEM_FUNCTION(name, ...)                     \
	extern PGDLLEXPORT Datum name(PG_FUNCTION_ARGS); \
	PG_FUNCTION_INFO_V1(name);                       \
	static IdemSignature name##_signature = {.types = {__VA_ARGS__}}

/* The row that an SQL function returns, as it is declared */
typedef struct IdemRowDesc
{
	Oid function;
	TupleDesc desc;
} IdemRowDesc;

/* Which element of an array is being worked on, for idem_arrays_say_element() */
typedef struct IdemElement
{
	const char *array;
	int ord; /* from 0 */
} IdemElement;

/* Sets of columns, as bits */
#define IDEM_COLUMN(attno)		 (UINT64CONST(1) << (attno))
#define IDEM_COLUMNS_FROM(attno) (~(IDEM_COLUMN(attno) - 1))

/* A table of ours in the schema idem; what was found out about it stands last */
typedef struct IdemTableDef
{
	const char *name;
	const Oid *types; /* of the columns */
	int natts;
	int short_natts; /* rows may end here, if all that follows is null */
	uint64 nullable; /* columns that may be null */
	AttrNumber pkey[2];
	int npkey;
	const char *pkey_hint; /* how to make it anew */

	Oid relid; /* invalid: not looked up yet, or not there */
	TupleDesc short_desc;
	uint64 unsubscribed_at; /* see idem_subscription_refuse() */
	bool is_known;
	struct IdemTableDef *next;
} IdemTableDef;

/* One of them, open; see table.c */
typedef struct IdemTable
{
	IdemTableDef *def;
	MemoryContext context; /* in which it was opened */
	Relation heap;
	Relation pkey;
	TupleTableSlot *found;	 /* the row found last */
	TupleTableSlot *written; /* the row to be written last */
	Relation *indexes;		 /* those that take entries, opened when they are needed */
	struct IndexInfo **infos;
	int nindexes;
} IdemTable;

/* Where cleanup goes on */
typedef struct IdemPlace
{
	TimestampTz from; /* rows that expired before are not looked at */
	uint32 page;	  /* of idem.jobs, which has no order to go by */
} IdemPlace;

/* How much to clean up, and how far that got */
typedef struct IdemCleanup
{
	int batch;		/* rows to remove at most */
	int64 deadline; /* when to leave off, by the steady clock; 0: never */
	IdemPlace place;
	Snapshot snapshot;	/* set by idem_phase_run(): which rows to look at */
	bool is_subscribed; /* skipped: a subscription writes a table */
	int removed;
	bool more;	/* left off before the end */
	int64 rows; /* if so: number of live rows */
	int64 left; /* and of those that have expired, both estimated */
} IdemCleanup;

/* What is counted for a database: answers to claims, as in IdemStatus, and more */
typedef enum IdemStat
{
	IDEM_STAT_CLAIMS,
	IDEM_STAT_RESUMED,
	IDEM_STAT_BUSY,
	IDEM_STAT_HELD,
	IDEM_STAT_REPLAYS,
	IDEM_STAT_PARKED,
	IDEM_STAT_EXHAUSTED,
	IDEM_STAT_MISMATCHES,
	IDEM_STAT_TAKEOVERS,
	IDEM_STAT_STALE_TOKENS,
	IDEM_STAT_EXPIRED_KEYS,
	IDEM_STAT_ABANDONED_LEASES, /* of these the leases that were not finished */
	IDEM_STAT_EXPIRED_JOB_KEYS,
	IDEM_STAT_EXPIRED_JOB_HISTORY,
	IDEM_STAT_N
} IdemStat;

/* Open transactions that have locked, replaced or removed a row; invalid: there is none */
typedef struct IdemLockers
{
	bool mine;				 /* this transaction is one of them */
	TransactionId shared;	 /* another one, beside which others may have it FOR KEY SHARE */
	TransactionId exclusive; /* another one, beside which nobody may have it */
} IdemLockers;

/* How to find a row */
typedef struct IdemLookup
{
	Relation index;
	ScanKeyData keys[2];
	int nkeys;
} IdemLookup;

/* Values of idem.require_finish */
typedef enum IdemRequire
{
	IDEM_REQUIRE_OFF,
	IDEM_REQUIRE_WARNING,
	IDEM_REQUIRE_ERROR
} IdemRequire;

/* guc.c */
extern int idem_guc_ttl;
extern char *idem_guc_scope;
extern char *idem_guc_owner;
extern int idem_guc_max_result_size;
extern int idem_guc_clock_offset;
extern bool idem_guc_cleanup;
extern int idem_guc_cleanup_naptime;
extern int idem_guc_cleanup_batch_size;
extern bool idem_guc_log_duplicates;
extern int idem_guc_require_finish;
extern int idem_guc_stats_max;
extern int idem_guc_drain_after;
extern void idem_guc_init(void);

/* args.c */
extern void idem_args_begin(FunctionCallInfo fcinfo, IdemSignature *signature, const char *write_command);
extern void idem_args_key(FunctionCallInfo fcinfo, int keyarg, int scopearg, IdemKey *key);
extern text *idem_args_scope(FunctionCallInfo fcinfo, int arg);
extern void idem_args_check_key(const text *key);
extern int64 idem_args_ttl(FunctionCallInfo fcinfo, int arg);
extern IdemWait idem_args_wait(FunctionCallInfo fcinfo, int arg);
extern int64 idem_args_lease(FunctionCallInfo fcinfo, int arg);
extern int64 idem_args_lease_or_none(Datum interval, const char *name);
extern int64 idem_args_longer_than_zero(Datum interval, const char *name);
extern int64 idem_args_zero_or_longer(Datum interval, const char *name);
extern int64 idem_args_span(Datum interval);
extern int idem_args_word(text *value, const char *what, const char *const *words);
extern text *idem_args_queue(FunctionCallInfo fcinfo, int arg);
extern text *idem_args_worker(FunctionCallInfo fcinfo, int arg);
extern int idem_args_max_attempts(FunctionCallInfo fcinfo, int arg);
extern void idem_args_check_token(int64 token);
extern int64 idem_args_token(FunctionCallInfo fcinfo, int arg);
extern int64 idem_args_optional_token(FunctionCallInfo fcinfo, int arg);
extern Jsonb *idem_args_jsonb(Datum value, const char *what);
extern bytea *idem_args_fingerprint(Datum request);
extern void idem_args_claim(FunctionCallInfo fcinfo, int requestarg, IdemClaim *claim);
extern bool idem_args_desc_has(TupleDesc desc, const Oid *types, int natts);
extern TupleDesc idem_args_row_desc(FunctionCallInfo fcinfo, const Oid *types, int natts, IdemRowDesc *cache);
extern ReturnSetInfo *idem_args_row_set(FunctionCallInfo fcinfo, const Oid *types, int natts);
pg_noreturn extern void idem_args_version_mismatch(const char *found);

/* hash.c */
extern int64 idem_hash_name(const text *name_space, const text *name);

/* arrays.c */
extern bool idem_arrays_get(FunctionCallInfo fcinfo, int arg, const char *what, Datum **elems, bool **nulls, int *n);
extern void idem_arrays_require(FunctionCallInfo fcinfo, int arg, const char *what, Datum **elems, bool **nulls, int *n);
extern void idem_arrays_check_length(const char *what, int n, const char *other, int nother);
extern int *idem_arrays_order(text **keys, int n);
extern void idem_arrays_say_element(void *arg);

/* clock.c */
extern TimestampTz idem_clock_now(void);
extern int64 idem_clock_steady(void);
extern int64 idem_clock_next_token(int64 last, TimestampTz now);

/* unfinished.c */
extern void idem_unfinished_add(int change);
extern void idem_unfinished_init(void);

/* stats.c */
extern void idem_stats_count(IdemStat counter);
extern void idem_stats_count_claim(const IdemClaim *claim, IdemStatus status);

/* shape.c */
pg_noreturn extern void idem_shape_refuse(const IdemTableDef *def, const char *detail, const char *hint);
extern void idem_shape_check(const IdemTableDef *def, Relation heap);
extern bool idem_shape_is_on_pkey(const IdemTableDef *def, Form_pg_index form);
extern void idem_shape_check_index(IdemTable *table, Relation index);
extern bool idem_shape_is_ordered_by(Relation index, const AttrNumber *columns, int ncolumns);

/* table.c */
extern void idem_table_open(IdemTable *table, IdemTableDef *def, LOCKMODE lockmode);
extern void idem_table_close(IdemTable *table);
extern TupleTableSlot *idem_table_new_row(IdemTable *table, bool full);
extern void idem_table_lock_hash(IdemTable *table, int64 hash);
extern void idem_table_unlock_hash(IdemTable *table, int64 hash);
extern void idem_table_open_indexes(IdemTable *table);
extern Relation idem_table_find_index(IdemTable *table, const AttrNumber *columns, int ncolumns, const char *missing, const char *hint);
extern bool idem_table_insert(IdemTable *table);
extern TM_Result idem_table_lock(IdemTable *table, ItemPointerData tid, LockTupleMode mode, LockWaitPolicy policy);
extern TM_Result idem_table_update(IdemTable *table);
extern void idem_table_update_hashed(IdemTable *table, int64 hash);
extern TM_Result idem_table_delete(IdemTable *table, bool wait);
extern bool idem_table_may_go_on(IdemCleanup *cleanup);
extern void idem_table_cleanup(IdemTable *table, AttrNumber expires_at, bool (*remove)(IdemTable *), IdemCleanup *cleanup);

/* subscription.c */
extern bool idem_subscription_writes(Oid relid);
extern void idem_subscription_refuse(IdemTableDef *def, Oid relid);

/* row.c */
extern bool idem_row_isnull(IdemTable *table, AttrNumber attno);
extern TimestampTz idem_row_timestamp(IdemTable *table, AttrNumber attno);
extern int idem_row_int32(IdemTable *table, AttrNumber attno);
extern int64 idem_row_int64(IdemTable *table, AttrNumber attno);
extern bool idem_row_bool(IdemTable *table, AttrNumber attno);
extern Oid idem_row_oid(IdemTable *table, AttrNumber attno);
extern text *idem_row_text(IdemTable *table, AttrNumber attno);
extern Jsonb *idem_row_jsonb(IdemTable *table, AttrNumber attno);
extern NullableDatum idem_row_datum(IdemTable *table, AttrNumber attno);
extern bool idem_row_varlena_equals(IdemTable *table, AttrNumber attno, struct varlena *value);
extern int64 idem_row_age(IdemTable *table, AttrNumber since);
extern bool idem_row_is_mine(IdemTable *table);
extern bool idem_row_is_locked(IdemTable *table);
extern void idem_row_lockers(IdemTable *table, IdemLockers *lockers);
extern TransactionId idem_row_locker(IdemTable *table);
extern bool idem_row_is_replaced_by_me(IdemTable *table);
extern bool idem_row_is_later_version(IdemTable *table);
extern bool idem_row_is_last_version(IdemTable *table);
extern void idem_row_set(TupleTableSlot *slot, AttrNumber attno, Datum value);
extern void idem_row_set_varlena(TupleTableSlot *slot, AttrNumber attno, const void *value);
extern void idem_row_copy_column(IdemTable *from, AttrNumber attno, TupleTableSlot *to, AttrNumber to_attno);
extern void idem_row_clear(TupleTableSlot *slot, AttrNumber attno);
extern TupleTableSlot *idem_row_copy(IdemTable *table, bool full);

/* probe.c */
extern IndexScanDesc idem_probe_begin(IdemTable *table, IdemLookup *lookup, Snapshot snapshot);
extern void idem_probe_classify(const SnapshotData *dirty, IdemProbe *probe);
extern void idem_probe(IdemTable *table, IdemLookup *lookup, IdemProbe *probe);
extern bool idem_probe_latest(IdemTable *table, IdemLookup *lookup, TupleTableSlot *slot);
extern void idem_probe_existing(IdemTable *table, IdemLookup *lookup, IdemProbe *probe);
extern void idem_probe_wait(IdemTable *table, TransactionId xid);

/* keytable.c */
extern void idem_keytable_open(IdemTable *table, LOCKMODE lockmode);
extern void idem_keytable_lock_key(IdemTable *table, const IdemKey *key);
extern void idem_keytable_unlock_key(IdemTable *table, const IdemKey *key);
extern void idem_keytable_update_indexed(IdemTable *table, const IdemKey *key);
extern IdemLookup idem_keytable_lookup(IdemTable *table, const IdemKey *key);

/* keyrow.c */
extern bool idem_keyrow_is(IdemTable *table, const IdemKey *key);
extern bool idem_keyrow_is_leased(IdemTable *table);
extern bool idem_keyrow_has_worker(IdemTable *table, text *worker);
extern IdemStatus idem_keyrow_judge(IdemTable *table, int max_attempts);
extern const char *idem_keyrow_state_name(TransactionId xmin, bool finished, TimestampTz expires_at);
extern const char *idem_keyrow_status_name(IdemStatus status);
extern void idem_keyrow_read(IdemTable *table, IdemStatus status, IdemRow *row);
extern Oid idem_keyrow_current_owner(void);
extern void idem_keyrow_check_owner(Oid owner);
extern void idem_keyrow_check_request(IdemTable *table, bytea *request);
extern void idem_keyrow_check_serializable(IdemTable *table);
extern void idem_keyrow_check_absent(IdemTable *table, IdemLookup *lookup);
extern bool idem_keyrow_check_finished(IdemTable *table, Jsonb *result);
extern void idem_keyrow_reject_finished(IdemTable *table, const char *hint);
extern TupleTableSlot *idem_keyrow_copy(IdemTable *table);
extern TupleTableSlot *idem_keyrow_copy_finished(IdemTable *table, Jsonb *result, TimestampTz now);

/* keystore.c */
extern bool idem_keystore_find_last(IdemTable *table, const IdemKey *key, IdemProbe *probe);
extern void idem_keystore_claim(IdemTable *table, const IdemClaim *claim, IdemRow *row);
extern bool idem_keystore_finish(IdemTable *table, const IdemKey *key, Jsonb *result);
extern void idem_keystore_release(IdemTable *table, const IdemKey *key);
extern bool idem_keystore_forget(IdemTable *table, const IdemKey *key);
extern bool idem_keystore_get(IdemTable *table, const IdemKey *key, IdemRow *row);
extern void idem_keystore_cleanup(IdemCleanup *cleanup);

/* leasestore.c */
extern bool idem_leasestore_finish(IdemTable *table, const IdemKey *key, int64 token, Jsonb *result);
extern void idem_leasestore_release(IdemTable *table, const IdemKey *key, int64 token);
extern TimestampTz idem_leasestore_renew(IdemTable *table, const IdemKey *key, int64 token, int64 length);
extern TimestampTz idem_leasestore_checkpoint(IdemTable *table, const IdemKey *key, int64 token, Jsonb *data);
extern void idem_leasestore_fence(IdemTable *table, const IdemKey *key, int64 token);

/* claim.c */
extern void idem_claim_row_values(const IdemRow *row, Datum *values, bool *nulls);

#endif /* IDEM_H */
