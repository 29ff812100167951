/*
 * idem.h
 *		What the files of idem share; externs grouped by the file that defines them.
 *
 * Calls go down only: SQL functions (claim.c, batch.c, call.c, admin.c) check
 * their arguments (args.c) and call the store (keystore.c), which reaches the
 * table through keytable.c.
 */
#ifndef IDEM_H
#define IDEM_H

#include "access/tupdesc.h"
#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "nodes/execnodes.h"
#include "utils/jsonb.h"

#include "compat.h"
#include "errors.h"

#define IDEM_VERSION "0.1.0"

#define IDEM_MAX_KEY_LEN	   1024
#define IDEM_MAX_SCOPE_LEN	   255
#define IDEM_MAX_CLEANUP_BATCH 1000000

/* Columns of idem.keys */
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
	IDEM_KEYS_NATTS = IDEM_KEYS_RESULT
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

/* What a claim asks for */
typedef struct IdemClaim
{
	IdemKey key;
	bytea *request; /* SHA-256 of the request, or NULL */
	int64 ttl;		/* in microseconds */
	IdemWait wait;
} IdemClaim;

typedef enum IdemStatus
{
	IDEM_CLAIMED,  /* the caller is to do the work */
	IDEM_HELD,	   /* this transaction has claimed it before */
	IDEM_FINISHED, /* somebody has done the work */
	IDEM_BUSY	   /* another transaction is at it */
} IdemStatus;

/*
 * The answer to a claim or a look at a key.  Pointers are palloc'd in the
 * caller's context; nothing but the status is set for IDEM_BUSY.
 */
typedef struct IdemRow
{
	IdemStatus status;
	Oid owner;
	TimestampTz created_at;
	TimestampTz expires_at;
	TimestampTz finished_at; /* 0 if idem_finish() was not called */
	Jsonb *result;			 /* NULL if there is none */
} IdemRow;

/* The row that an SQL function returns, as it is declared */
typedef struct IdemRowDesc
{
	Oid function;
	TupleDesc desc;
} IdemRowDesc;

/* idem.keys, open; see keytable.c */
typedef struct IdemKeyTable
{
	Relation heap;
	Relation pkey;			 /* the arbiter */
	TupleTableSlot *found;	 /* the row found last */
	TupleTableSlot *written; /* the row to be written, made with the first */
	Relation *indexes;		 /* those that take entries, opened with the first write */
	struct IndexInfo **infos;
	int nindexes;
} IdemKeyTable;

/* guc.c */
extern int idem_guc_ttl;
extern char *idem_guc_scope;
extern char *idem_guc_owner;
extern int idem_guc_max_result_size;
extern int idem_guc_clock_offset;
extern void idem_guc_init(void);

/* args.c */
extern void idem_args_begin(FunctionCallInfo fcinfo, int nargs, const char *write_command);
extern void idem_args_key(FunctionCallInfo fcinfo, int keyarg, int scopearg, IdemKey *key);
extern text *idem_args_scope(FunctionCallInfo fcinfo, int arg);
extern void idem_args_check_key(const text *key);
extern int64 idem_args_ttl(FunctionCallInfo fcinfo, int arg);
extern IdemWait idem_args_wait(FunctionCallInfo fcinfo, int arg);
extern void idem_args_reject_token(FunctionCallInfo fcinfo, int arg);
extern Jsonb *idem_args_result(Datum value);
extern bytea *idem_args_fingerprint(Datum request);
extern void idem_args_claim(FunctionCallInfo fcinfo, int requestarg, IdemClaim *claim);
extern bool idem_args_desc_has(TupleDesc desc, const Oid *types, int natts);
extern TupleDesc idem_args_row_desc(FunctionCallInfo fcinfo, const Oid *types, int natts, IdemRowDesc *cache);
extern ReturnSetInfo *idem_args_row_set(FunctionCallInfo fcinfo, const Oid *types, int natts);
pg_noreturn extern void idem_args_version_mismatch(const char *found);

/* keytable.c */
extern void idem_keytable_open(IdemKeyTable *table, LOCKMODE lockmode);
extern void idem_keytable_close(IdemKeyTable *table);
extern TupleTableSlot *idem_keytable_new_row(IdemKeyTable *table);
extern bool idem_keytable_insert(IdemKeyTable *table);
extern TM_Result idem_keytable_update(IdemKeyTable *table, ItemPointer tid, bool wait);
extern TM_Result idem_keytable_delete(IdemKeyTable *table, ItemPointer tid, bool wait);
extern IndexScanDesc idem_keytable_scan_key(IdemKeyTable *table, const IdemKey *key, Snapshot snapshot);
extern Relation idem_keytable_open_expiry_index(IdemKeyTable *table);

/* keystore.c */
extern TimestampTz idem_keystore_now(void);
extern const char *idem_keystore_state_name(TransactionId xmin, bool finished, TimestampTz expires_at);
extern void idem_keystore_claim(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row);
extern void idem_keystore_finish(IdemKeyTable *table, const IdemKey *key, Jsonb *result);
extern void idem_keystore_release(IdemKeyTable *table, const IdemKey *key);
extern bool idem_keystore_forget(IdemKeyTable *table, const IdemKey *key);
extern bool idem_keystore_get(IdemKeyTable *table, const IdemKey *key, IdemRow *row);
extern int idem_keystore_cleanup(IdemKeyTable *table, int batch);

/* claim.c */
extern const char *idem_claim_status_name(IdemStatus status);
extern void idem_claim_row_values(const IdemRow *row, Datum *values, bool *nulls);

#endif /* IDEM_H */
