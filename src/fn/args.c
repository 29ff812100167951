/*
 * args.c
 *		Arguments and result descriptors of the SQL functions.
 *
 * Every function calls idem_args_begin() first.  It and idem_args_row_desc()
 * or idem_args_row_set() compare the types of the arguments and of the result
 * with what the C code expects, so that a library and SQL objects of different
 * versions, or a function declared anew by a superuser, give an error and not a
 * crash.
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_extension.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "idem.h"

/* The longest time to live or to wait: a hundred years of twelve months of 30 days */
#define MAX_INTERVAL (INT64CONST(100) * MONTHS_PER_YEAR * DAYS_PER_MONTH * USECS_PER_DAY)
#define MAX_LEASE	 (30 * USECS_PER_DAY)

/* The version that the catalog knows of, or NULL if the extension is gone */
static char *
installed_version(void)
{
	Relation rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData skey;
	SysScanDesc scan;
	HeapTuple tuple;
	char *version = NULL;

	ScanKeyInit(&skey, Anum_pg_extension_extname, BTEqualStrategyNumber,
				F_NAMEEQ, CStringGetDatum("idem"));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, NULL, 1, &skey);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool isnull;
		Datum value = heap_getattr(tuple, Anum_pg_extension_extversion,
								   RelationGetDescr(rel), &isnull);

		if (!isnull)
			version = TextDatumGetCString(value);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return version;
}

/* found is a sentence that says what was found */
void
idem_args_version_mismatch(const char *found)
{
	char *version = installed_version();
	bool same = version != NULL && strcmp(version, IDEM_VERSION) == 0;

	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("library and SQL objects of idem do not match"),
			errdetail("%s The library has version %s, the SQL objects have version %s.",
					  found, IDEM_VERSION, version ? version : "unknown"),
			same ? errhint("Undo the change, or drop and create the extension.") :
				   errhint("Install the library of the newer version, run ALTER EXTENSION idem UPDATE, and reconnect."));
}

static bool
is_declared_as(Oid function, const Oid *types)
{
	Oid *args;
	int nargs;

	if (get_func_signature(function, &args, &nargs) != types[0])
		return false;
	/* ends at the first zero, if there are more arguments than types */
	for (int i = 0; i < nargs; i++)
	{
		if (args[i] != types[i + 1])
			return false;
	}
	return types[nargs + 1] == InvalidOid;
}

/*
 * First thing in every SQL function.  write_command is the name of a
 * function that writes, which read-only transactions and standbys refuse.  What
 * was found out about a function holds for the whole session: its types cannot
 * change but with its OID.
 */
void
idem_args_begin(FunctionCallInfo fcinfo, IdemSignature *signature, const char *write_command)
{
	Oid function = fcinfo->flinfo->fn_oid;

	if (signature->function != function)
	{
		if (!is_declared_as(function, signature->types))
			idem_args_version_mismatch("The function is declared with other types.");
		signature->function = function;
	}
	if (write_command != NULL)
	{
		PreventCommandIfReadOnly(write_command);
		PreventCommandIfParallelMode(write_command);
	}
}

void
idem_args_check_key(const text *key)
{
	int len = VARSIZE_ANY_EXHDR(key);

	if (len < 1 || len > IDEM_MAX_KEY_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of idempotency key"),
				errdetail("The key has %d bytes; it must have between 1 and %d.",
						  len, IDEM_MAX_KEY_LEN),
				len < 1 ?
					errhint("Derive the key from what makes the operation unique, for example the id of the order.") :
					errhint("Hash longer keys before the call."));
}

text *
idem_args_scope(FunctionCallInfo fcinfo, int arg)
{
	text *scope;

	if (PG_ARGISNULL(arg))
		return cstring_to_text(idem_guc_scope);

	scope = PG_GETARG_TEXT_PP(arg);
	if (VARSIZE_ANY_EXHDR(scope) > IDEM_MAX_SCOPE_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of scope"),
				errdetail("The scope has %d bytes; it must have at most %d.",
						  (int) VARSIZE_ANY_EXHDR(scope), IDEM_MAX_SCOPE_LEN),
				errhint("Use a short name of the service or tenant."));
	return scope;
}

void
idem_args_key(FunctionCallInfo fcinfo, int keyarg, int scopearg, IdemKey *key)
{
	if (PG_ARGISNULL(keyarg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("idempotency key must not be null"),
				errdetail("Without a key there is nothing to tell a duplicate by."),
				errhint("Derive the key from what makes the operation unique, for example the id of the order."));
	key->key = PG_GETARG_TEXT_PP(keyarg);
	idem_args_check_key(key->key);
	key->scope = idem_args_scope(fcinfo, scopearg);
}

/* What an argument of type interval may be */
typedef struct IntervalRange
{
	const char *name;
	int64 least;
	int64 most;
	const char *detail;
	const char *hint;
} IntervalRange;

static const IntervalRange ttl_range = {
	"ttl", 1, MAX_INTERVAL,
	"The interval must be longer than zero and at most 100 years.",
	"Pass a finite interval such as '90 s', or leave it out."};
static const IntervalRange wait_range = {
	"wait", 0, MAX_INTERVAL,
	"The interval must be zero or longer and at most 100 years.",
	"Pass a finite interval such as '90 s', or leave it out."};
static const IntervalRange lease_range = {
	"lease", 1, MAX_LEASE,
	"The interval must be longer than zero and at most 30 days.",
	"Pass a time that the work needs at most, such as '90 s', and renew the lease where it takes longer."};

/*
 * An interval as a span of time: a month counts as 30 days, a day as 24
 * hours, so that it means the same in every time zone.
 */
static int64
interval_span(const Interval *interval, const IntervalRange *range)
{
	double estimate = (double) interval->month * DAYS_PER_MONTH * USECS_PER_DAY +
		(double) interval->day * USECS_PER_DAY + (double) interval->time;

	/* the estimate keeps the exact sum from overflowing */
	if (!INTERVAL_NOT_FINITE(interval) && estimate > -1.0e18 && estimate < 1.0e18)
	{
		int64 span = ((int64) interval->month * DAYS_PER_MONTH + interval->day) * USECS_PER_DAY +
			interval->time;

		if (span >= range->least && span <= range->most)
			return span;
	}

	ereport(ERROR,
			errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid value of \"%s\"", range->name),
			errdetail("%s", range->detail),
			errhint("%s", range->hint));
}

int64
idem_args_longer_than_zero(Datum interval, const char *name)
{
	IntervalRange range = ttl_range;

	range.name = name;
	return interval_span(DatumGetIntervalP(interval), &range);
}

int64
idem_args_zero_or_longer(Datum interval, const char *name)
{
	IntervalRange range = wait_range;

	range.name = name;
	return interval_span(DatumGetIntervalP(interval), &range);
}

/* One that was checked before */
int64
idem_args_span(Datum interval)
{
	return idem_args_zero_or_longer(interval, "interval");
}

int64
idem_args_ttl(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return idem_guc_ttl * USECS_PER_SEC;
	return interval_span(PG_GETARG_INTERVAL_P(arg), &ttl_range);
}

IdemWait
idem_args_wait(FunctionCallInfo fcinfo, int arg)
{
	IdemWait wait = {.forever = true};

	if (!PG_ARGISNULL(arg))
	{
		wait.forever = false;
		wait.until = GetCurrentTimestamp() +
			interval_span(PG_GETARG_INTERVAL_P(arg), &wait_range);
	}
	return wait;
}

int64
idem_args_lease(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", "lease"),
				errdetail("Without an end nobody could take over from a worker that has died."),
				errhint("Pass a time that the work needs at most, such as '90 s'."));
	return interval_span(PG_GETARG_INTERVAL_P(arg), &lease_range);
}

/* The lease of a job; zero is none: for the transaction only */
int64
idem_args_lease_or_none(Datum interval, const char *name)
{
	IntervalRange range = lease_range;

	range.name = name;
	range.least = 0;
	range.detail = "The interval must be zero or longer and at most 30 days.";
	return interval_span(DatumGetIntervalP(interval), &range);
}

text *
idem_args_queue(FunctionCallInfo fcinfo, int arg)
{
	text *queue;
	int len;

	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("name of the queue must not be null"),
				errdetail("Jobs live in queues."),
				errhint("Pass a short name of the kind of work, for example 'mail'."));
	queue = PG_GETARG_TEXT_PP(arg);
	len = VARSIZE_ANY_EXHDR(queue);
	if (len < 1 || len > IDEM_MAX_QUEUE_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of the name of a queue"),
				errdetail("The name has %d bytes; it must have between 1 and %d.", len, IDEM_MAX_QUEUE_LEN),
				errhint("Use a short name of the kind of work, for example 'mail'."));
	return queue;
}

text *
idem_args_worker(FunctionCallInfo fcinfo, int arg)
{
	text *worker;
	int len;

	if (PG_ARGISNULL(arg))
		return NULL;
	worker = PG_GETARG_TEXT_PP(arg);
	len = VARSIZE_ANY_EXHDR(worker);
	if (len < 1 || len > IDEM_MAX_WORKER_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of worker name"),
				errdetail("The name has %d bytes; it must have between 1 and %d.", len, IDEM_MAX_WORKER_LEN),
				errhint("Use a name that only one process has at a time, for example host name and process id, or leave it out."));
	return worker;
}

/* 0 if none was given */
int
idem_args_max_attempts(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return 0;
	if (PG_GETARG_INT32(arg) < 1)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "max_attempts"),
				errdetail("The number is %d; it must be at least 1.", PG_GETARG_INT32(arg)),
				errhint("Leave it out for the default."));
	return PG_GETARG_INT32(arg);
}

/* Which one of the words it is */
int
idem_args_word(text *value, const char *what, const char *const *words)
{
	char *word = text_to_cstring(value);
	StringInfoData list;

	initStringInfo(&list);
	for (int i = 0; words[i] != NULL; i++)
	{
		if (strcmp(word, words[i]) == 0)
			return i;
		appendStringInfo(&list, "%s\"%s\"", i == 0 ? "" : words[i + 1] == NULL ? " and " :
																				 ", ",
						 words[i]);
	}
	ereport(ERROR,
			errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid value of \"%s\"", what),
			errdetail("The values are %s.", list.data),
			errhint("Pass one of them, or leave it out for the default."));
}

void
idem_args_check_token(int64 token)
{
	if (token <= 0)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid fencing token"),
				errdetail("A token is a positive number."),
				errhint("Pass the token that idem_lease() or idem_fetch() has returned."));
}

/* 0 if none was given, as for a key that was claimed without a lease */
int64
idem_args_optional_token(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return 0;
	idem_args_check_token(PG_GETARG_INT64(arg));
	return PG_GETARG_INT64(arg);
}

int64
idem_args_token(FunctionCallInfo fcinfo, int arg)
{
	int64 token = idem_args_optional_token(fcinfo, arg);

	if (token == 0)
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("fencing token must not be null"),
				errdetail("The token proves that the caller still has the lease."),
				errhint("Pass the token that idem_lease() or idem_fetch() has returned."));
	return token;
}

/* A value to be stored, in memory and of a size that is allowed */
Jsonb *
idem_args_jsonb(Datum value, const char *what)
{
	Size size = toast_raw_datum_size(value) - VARHDRSZ;

	if (size > (Size) idem_guc_max_result_size)
		ereport(ERROR,
				errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				errmsg("value of \"%s\" is too large", what),
				errdetail("It has %zu bytes; \"%s\" allows %d.",
						  size, "idem.max_result_size", idem_guc_max_result_size),
				errhint("Store the data in a table of your own and only its id here, or raise the setting."));
	return DatumGetJsonbP(value);
}

/* SHA-256 of the text form of jsonb, in which order and white space are settled */
bytea *
idem_args_fingerprint(Datum request)
{
	Jsonb *json = DatumGetJsonbP(request);
	char *str = JsonbToCString(NULL, &json->root, VARSIZE(json));

	return DatumGetByteaPP(DirectFunctionCall1(sha256_bytea,
											   PointerGetDatum(cstring_to_text(str))));
}

/*
 * Arguments of a plain claim of one key: the key first; request, ttl, wait and
 * scope in a row.
 */
void
idem_args_claim(FunctionCallInfo fcinfo, int requestarg, IdemClaim *claim)
{
	idem_args_key(fcinfo, 0, requestarg + 3, &claim->key);
	claim->request = PG_ARGISNULL(requestarg) ? NULL :
												idem_args_fingerprint(PG_GETARG_DATUM(requestarg));
	claim->ttl = idem_args_ttl(fcinfo, requestarg + 1);
	claim->wait = idem_args_wait(fcinfo, requestarg + 2);
	claim->lease = NULL;
}

bool
idem_args_desc_has(TupleDesc desc, const Oid *types, int natts)
{
	if (desc->natts != natts)
		return false;
	for (int i = 0; i < natts; i++)
	{
		if (TupleDescAttr(desc, i)->atttypid != types[i])
			return false;
	}
	return true;
}

/*
 * Descriptor of the row to return.  What was found out about a function holds
 * for the whole session: its result cannot change but with its OID.
 */
TupleDesc
idem_args_row_desc(FunctionCallInfo fcinfo, const Oid *types, int natts, IdemRowDesc *cache)
{
	if (cache->function != fcinfo->flinfo->fn_oid)
	{
		MemoryContext oldcontext;
		TupleDesc desc;

		if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE ||
			!idem_args_desc_has(desc, types, natts))
			idem_args_version_mismatch("The function is declared with another result.");

		oldcontext = MemoryContextSwitchTo(TopMemoryContext);
		desc = BlessTupleDesc(CreateTupleDescCopy(desc));
		MemoryContextSwitchTo(oldcontext);
		if (cache->desc != NULL)
			FreeTupleDesc(cache->desc);
		cache->desc = desc;
		cache->function = fcinfo->flinfo->fn_oid;
	}
	return cache->desc;
}

/* The same for a function that returns a set: where its rows go */
ReturnSetInfo *
idem_args_row_set(FunctionCallInfo fcinfo, const Oid *types, int natts)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	if (!idem_args_desc_has(rsinfo->setDesc, types, natts))
		idem_args_version_mismatch("The function is declared with another result.");
	return rsinfo;
}
