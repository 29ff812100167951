/*
 * fn.h
 *		The declaration, the arguments and the answer of an SQL function.
 */
#ifndef IDEM_FN_H
#define IDEM_FN_H

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "nodes/execnodes.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/tuplestore.h"
#include "utils/typcache.h"

#include "declared.h"
#include "idem.h"

/* The most queues that one call waits for or fetches from */
#define IDEM_MAX_QUEUES 1000

/*
 * The declaration of an SQL function: from declared.h, which the build makes of src/sql.
 * RECORDOID stands for a row: a composite type, or OUT columns.  The rest is a cache.
 */
typedef struct IdemSignature
{
	Oid result;
	Oid args[IDEM_MAX_ARGS];
	int nargs;
	Oid columns[IDEM_MAX_COLUMNS]; /* of a row */
	int natts;
	bool returns_set;

	Oid function;			  /* it has this declaration; invalid: not compared yet */
	Oid row_function;		  /* function whose rows have row_desc */
	TypeCacheEntry *row_type; /* type of the row */
	uint64 row_version;		  /* row_desc is right as long as row_type has this version */
	TupleDesc row_desc;
} IdemSignature;

/* IDEM_FUNCTION(name): an SQL function, declared in src/sql */
#define IDEM_FUNCTION(name)                          \
	extern PGDLLEXPORT Datum name(PG_FUNCTION_ARGS); \
	PG_FUNCTION_INFO_V1(name);                       \
	static IdemSignature name##_signature = {IDEM_DECLARED_##name}

/* The answer of an SQL function: the row that is being filled */
typedef struct IdemAnswer
{
	FunctionCallInfo fcinfo;
	IdemSignature *signature;
	int64 nrows; /* rows of the set so far */
	Datum values[IDEM_MAX_COLUMNS];
	bool nulls[IDEM_MAX_COLUMNS];
} IdemAnswer;

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

/* The element of an array that is being processed, for idem_args_say_element() */
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

/* What the end of the open transaction has to see to, besides what it always does; see xact.c */
enum IdemAtEnd
{
	IDEM_AT_END_LINKS = 0x01, /* write links to traces */
	IDEM_AT_END_WALK = 0x02,  /* forget a walk over a queue, and the owner of ranges */
	IDEM_AT_END_TICK = 0x04,  /* tell the launcher of a tick */
	IDEM_AT_END_JOB = 0x08,	  /* forget the job that idem_work() runs */
	IDEM_AT_END_WAKE = 0x10	  /* wake sessions that wait for a job or a key */
};

/* fn.c */
extern bool idem_fn_is_used;
extern uint32 idem_fn_at_end;
extern void idem_fn_begin(FunctionCallInfo fcinfo, IdemSignature *signature,
						  const char *write_command);

/* answer.c */
extern TupleDesc idem_answer_desc(FunctionCallInfo fcinfo, IdemSignature *signature);
extern void idem_answer_begin(IdemAnswer *answer, FunctionCallInfo fcinfo,
							  IdemSignature *signature);
extern Datum idem_answer_row(IdemAnswer *answer);
extern void idem_answer_put(IdemAnswer *answer);
extern void idem_answer_compare(IdemAnswer *answer);

/*
 * Set a column of the row: attno as Anum_claim_result_status, and the type that it is declared with
 */
static inline void
idem_answer_set(IdemAnswer *answer, int attno, Oid type PG_USED_FOR_ASSERTS_ONLY, Datum value)
{
	Assert(attno > 0 && attno <= answer->signature->natts);
	Assert(answer->signature->columns[attno - 1] == type);
	answer->values[attno - 1] = value;
	answer->nulls[attno - 1] = false;
}

#define IDEM_ANSWER_SETTER(name, type, oid, get_datum)                \
	static inline void                                                \
		idem_answer_##name(IdemAnswer *answer, int attno, type value) \
	{                                                                 \
		idem_answer_set(answer, attno, oid, get_datum(value));        \
	}

IDEM_ANSWER_SETTER(bool, bool, BOOLOID, BoolGetDatum)
IDEM_ANSWER_SETTER(int32, int32, INT4OID, Int32GetDatum)
IDEM_ANSWER_SETTER(int64, int64, INT8OID, Int64GetDatum)
IDEM_ANSWER_SETTER(float8, double, FLOAT8OID, Float8GetDatum)
IDEM_ANSWER_SETTER(time, TimestampTz, TIMESTAMPTZOID, TimestampTzGetDatum)

/* These leave the column null for NULL, and for a time of 0 */
#define IDEM_ANSWER_OPTIONAL_SETTER(name, type, oid, get_datum)       \
	static inline void                                                \
		idem_answer_##name(IdemAnswer *answer, int attno, type value) \
	{                                                                 \
		if (value != 0)                                               \
			idem_answer_set(answer, attno, oid, get_datum(value));    \
	}

IDEM_ANSWER_OPTIONAL_SETTER(optional_time, TimestampTz, TIMESTAMPTZOID, TimestampTzGetDatum)
IDEM_ANSWER_OPTIONAL_SETTER(text, const text *, TEXTOID, PointerGetDatum)
IDEM_ANSWER_OPTIONAL_SETTER(string, const char *, TEXTOID, CStringGetTextDatum)
IDEM_ANSWER_OPTIONAL_SETTER(jsonb, const Jsonb *, JSONBOID, PointerGetDatum)

/* args.c */
extern int64 idem_args_span(Datum interval, const char *name, IdemSpan kind);
extern int idem_args_word(const text *value, const char *name, const char *const *words,
						  const char *hint);
extern void idem_args_check_key(const text *key);
extern void idem_args_check_token(int64 token);
extern Jsonb *idem_args_jsonb(Datum value, const char *name);
extern bytea *idem_args_fingerprint(Datum request);
extern text *idem_args_queue_name(NullableDatum value);
extern Jsonb *idem_args_copy_jsonb(Jsonb *value, MemoryContext context);
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
pg_noreturn extern void idem_args_refuse_value(const char *name, const char *detail,
											   const char *hint);
pg_noreturn extern void idem_args_refuse_combination(const char *arg, const char *detail,
													 const char *hint);
extern TimestampTz idem_args_run_at(FunctionCallInfo fcinfo, int arg);
extern int idem_args_max_jobs(FunctionCallInfo fcinfo, int arg, int limit);
extern bool idem_args_array(FunctionCallInfo fcinfo, int arg, const char *name,
							Datum **elems, bool **nulls, int *n);
extern void idem_args_required_array(FunctionCallInfo fcinfo, int arg, const char *name,
									 Datum **elems, bool **nulls, int *n);
extern void idem_args_check_length(const char *name, int n, const char *other, int nother);
extern text **idem_args_queues(FunctionCallInfo fcinfo, int arg, int *n);
extern int *idem_args_order(text **keys, int n);
extern void idem_args_say_element(void *arg);

/* subxact.c */
extern bool idem_subxact_is_intervention(const ErrorData *error);
extern bool idem_subxact_is_of_server(const ErrorData *error);
extern ErrorData *idem_subxact_catch(void (*run)(void *arg), void *arg);
extern ErrorData *idem_subxact_try(void (*run)(void *arg), void *arg, bool keep);
extern void idem_subxact_undo(void (*run)(void *arg), void *arg);
extern char *idem_subxact_describe(const ErrorData *error);

/* show.c */
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
extern void idem_unfinished_add(IdemUnfinished kind, int change);
extern void idem_unfinished_note_claim(Oid claim);
extern void idem_unfinished_check(void);
extern void idem_unfinished_end_sub(SubTransactionId subid, SubTransactionId parent_subid,
									bool commit);
extern void idem_unfinished_forget(void);

#endif /* IDEM_FN_H */
