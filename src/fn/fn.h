/*
 * fn.h
 *		The declaration, the arguments and the result of an SQL function.
 */
#ifndef IDEM_FN_H
#define IDEM_FN_H

#include "access/htup_details.h"
#include "nodes/execnodes.h"
#include "utils/jsonb.h"
#include "utils/tuplestore.h"
#include "utils/typcache.h"

#include "idem.h"

#define IDEM_MAX_ARGS 16

/* The most queues that one call waits for or fetches from */
#define IDEM_MAX_QUEUES 1000

/*
 * A declaration: type of the result, types of the arguments, then zeros.  RECORDOID
 * stands for a row: OUT columns, or a composite type.
 */
typedef struct IdemSignature
{
	Oid types[IDEM_MAX_ARGS + 2];
	Oid function; /* function whose declaration has these types; invalid: not compared yet */
} IdemSignature;

/* IDEM_FUNCTION(name, type of the result, types of the arguments): an SQL function */
#define IDEM_FUNCTION(name, ...)                     \
	extern PGDLLEXPORT Datum name(PG_FUNCTION_ARGS); \
	PG_FUNCTION_INFO_V1(name);                       \
	static IdemSignature name##_signature = {.types = {__VA_ARGS__}}

/* Descriptor of the rows that an SQL function returns, cached for the session */
typedef struct IdemRowDesc
{
	Oid function;
	TypeCacheEntry *type; /* type of the row */
	uint64 version;		  /* the descriptor is right as long as type has this version */
	TupleDesc desc;
} IdemRowDesc;

/* A key and the scope in which it is unique */
typedef struct IdemKey
{
	text *key;
	text *scope;
} IdemKey;

/* How long to wait for another transaction that holds the key */
typedef struct IdemWait
{
	bool forever;	   /* as long as lock_timeout allows */
	TimestampTz until; /* else until this time */
} IdemWait;

/* Range of an argument of type interval */
typedef enum IdemSpan
{
	IDEM_SPAN_NOT_NEGATIVE,	 /* zero or longer */
	IDEM_SPAN_POSITIVE,		 /* longer than zero */
	IDEM_SPAN_LEASE,		 /* longer than zero, at most 30 days */
	IDEM_SPAN_LEASE_OR_NONE, /* zero or longer, at most 30 days */
	IDEM_SPAN_EVERY			 /* at least one second (T2) */
} IdemSpan;

/* The element of an array that is being processed, for idem_arrays_say_element() */
typedef struct IdemElement
{
	const char *array;
	int ord; /* from 0 */
} IdemElement;

/* What a transaction has begun, and should end before it commits (K14) */
typedef enum IdemUnfinished
{
	IDEM_UNFINISHED_KEYS, /* plain claims */
	IDEM_UNFINISHED_JOBS, /* jobs fetched without a lease */
	IDEM_UNFINISHED_N
} IdemUnfinished;

/* fn.c */
extern void idem_fn_begin(FunctionCallInfo fcinfo, IdemSignature *signature,
						  const char *write_command);
extern TupleDesc idem_fn_row_desc(FunctionCallInfo fcinfo, const Oid *types, int natts,
								  IdemRowDesc *cache);
extern ReturnSetInfo *idem_fn_row_set(FunctionCallInfo fcinfo, const Oid *types, int natts,
									  IdemRowDesc *cache);

extern HeapTuple idem_fn_form_wide_row(TupleDesc desc, Datum *values, bool *nulls, int natts);

/* The row to return; natts columns, without those of the type that were dropped */
static inline HeapTuple
idem_fn_form_row(TupleDesc desc, Datum *values, bool *nulls, int natts)
{
	if (likely(desc->natts == natts))
		return heap_form_tuple(desc, values, nulls);
	return idem_fn_form_wide_row(desc, values, nulls, natts);
}

/* Add a row to the set to return */
static inline void
idem_fn_put_row(ReturnSetInfo *rsinfo, Datum *values, bool *nulls, int natts)
{
	if (likely(rsinfo->setDesc->natts == natts))
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	else
		tuplestore_puttuple(rsinfo->setResult,
							idem_fn_form_wide_row(rsinfo->setDesc, values, nulls, natts));
}

/* value.c */
extern int64 idem_value_span(Datum interval, const char *name, IdemSpan kind);
extern int idem_value_word(const text *value, const char *name, const char *const *words,
						   const char *hint);
extern void idem_value_check_key(const text *key);
extern void idem_value_check_token(int64 token);
extern Jsonb *idem_value_jsonb(Datum value, const char *name);
extern bytea *idem_value_fingerprint(Datum request);
extern text *idem_value_queue(NullableDatum value);
extern Jsonb *idem_value_copy_jsonb(Jsonb *value, MemoryContext context);

/* args.c */
extern text *idem_args_scope(FunctionCallInfo fcinfo, int arg);
extern void idem_args_key(FunctionCallInfo fcinfo, int keyarg, int scopearg, IdemKey *key);
extern int64 idem_args_ttl(FunctionCallInfo fcinfo, int arg);
extern IdemWait idem_args_wait(FunctionCallInfo fcinfo, int arg);
extern int64 idem_args_lease(FunctionCallInfo fcinfo, int arg);
extern text *idem_args_queue(FunctionCallInfo fcinfo, int arg);
extern int64 idem_args_timeout(FunctionCallInfo fcinfo, int arg);
extern text *idem_args_worker(FunctionCallInfo fcinfo, int arg);
extern int idem_args_max_attempts(FunctionCallInfo fcinfo, int arg);
extern int64 idem_args_optional_token(FunctionCallInfo fcinfo, int arg);
extern int64 idem_args_token(FunctionCallInfo fcinfo, int arg);
extern void idem_args_require(FunctionCallInfo fcinfo, int arg, const char *name, const char *hint);
extern int64 idem_args_job_id(FunctionCallInfo fcinfo, int arg);
pg_noreturn extern void idem_args_refuse_combination(const char *arg, const char *detail,
													 const char *hint);
extern TimestampTz idem_args_run_at(FunctionCallInfo fcinfo, int arg);
extern int idem_args_max_jobs(FunctionCallInfo fcinfo, int arg, int limit);

/* subxact.c */
extern bool idem_subxact_is_intervention(const ErrorData *error);
extern bool idem_subxact_is_of_server(const ErrorData *error);
extern ErrorData *idem_subxact_catch(void (*run)(void *arg), void *arg);
extern ErrorData *idem_subxact_try(void (*run)(void *arg), void *arg, bool keep);
extern void idem_subxact_undo(void (*run)(void *arg), void *arg);
extern char *idem_subxact_describe(const ErrorData *error);

/* show.c */
extern char *idem_show_text(const char *text);
extern char *idem_show_literal(const char *text);
extern char *idem_show_name(const char *name);

/* handler.c */
pg_noreturn extern void idem_handler_refuse_missing(Oid handler);
extern void idem_handler_check(Oid handler, bool payload_isnull);
extern Jsonb *idem_handler_run(Oid handler, NullableDatum payload);
extern Oid idem_handler_arg(FunctionCallInfo fcinfo, int arg);

/* procxact.c */
extern void idem_procxact_end(bool is_nested);
extern void idem_procxact_begin(bool is_nested, MemoryContext context);
extern void idem_procxact_restart(bool is_nested);
extern ErrorData *idem_procxact_commit(void);

/* unfinished.c */
extern void idem_unfinished_init(void);
extern void idem_unfinished_add(IdemUnfinished kind, int change);
extern void idem_unfinished_note_claim(Oid claim);

/* arrays.c */
extern bool idem_arrays_get(FunctionCallInfo fcinfo, int arg, const char *name,
							Datum **elems, bool **nulls, int *n);
extern void idem_arrays_require(FunctionCallInfo fcinfo, int arg, const char *name,
								Datum **elems, bool **nulls, int *n);
extern void idem_arrays_check_length(const char *name, int n, const char *other, int nother);
extern text **idem_arrays_queues(FunctionCallInfo fcinfo, int arg, int *n);
extern int *idem_arrays_order(text **keys, int n);
extern void idem_arrays_say_element(void *arg);

#endif /* IDEM_FN_H */
