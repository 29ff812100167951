/*
 * args.c
 *		Arguments of SQL functions: checks of values, arguments that several functions have
 *		in common, and arrays.
 *
 * No SQL function is STRICT, so the functions here check each argument for null (K12).
 * Elements of arrays and columns of idem.queues are checked in the same way.
 */
#include "postgres.h"

#include "access/detoast.h"
#include "lib/stringinfo.h"
#include "utils/array.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

#include "fn/fn.h"

/* The longest time to live or to wait: a hundred years of twelve months of 30 days */
#define MAX_SPAN  (INT64CONST(100) * MONTHS_PER_YEAR * DAYS_PER_MONTH * USECS_PER_DAY)
#define MAX_LEASE (30 * USECS_PER_DAY)

#define SPAN_HINT  "Pass a finite interval such as '90 s', or leave it out."
#define EVERY_HINT "Pass an interval such as '10 minutes'. A worker that loops needs no schedule."
#define LEASE_HINT "Pass the longest time that the work needs, such as '90 s', and renew the lease if it takes longer."

static const struct
{
	int64 min;
	int64 max;
	const char *range;
	const char *hint;
} span_ranges[] = {
	[IDEM_SPAN_NOT_NEGATIVE] = {0, MAX_SPAN, "zero or longer and at most 100 years", SPAN_HINT},
	[IDEM_SPAN_POSITIVE] = {1, MAX_SPAN, "longer than zero and at most 100 years", SPAN_HINT},
	[IDEM_SPAN_LEASE] = {1, MAX_LEASE, "longer than zero and at most 30 days", LEASE_HINT},
	[IDEM_SPAN_LEASE_OR_NONE] = {0, MAX_LEASE, "zero or longer and at most 30 days", LEASE_HINT},
	[IDEM_SPAN_EVERY] = {USECS_PER_SEC, MAX_SPAN, "one second or longer and at most 100 years", EVERY_HINT},
};

/*
 * An interval in microseconds.  A month counts as 30 days and a day as 24 hours,
 * so that an interval means the same in every time zone.
 */
int64
idem_args_span(Datum interval, const char *name, IdemSpan kind)
{
	const Interval *value = DatumGetIntervalP(interval);
	double estimate = (double) value->month * DAYS_PER_MONTH * USECS_PER_DAY +
		(double) value->day * USECS_PER_DAY + (double) value->time;

	/* the estimate keeps the exact sum from overflowing */
	if (!INTERVAL_NOT_FINITE(value) && estimate > -1.0e18 && estimate < 1.0e18)
	{
		int64 span = ((int64) value->month * DAYS_PER_MONTH + value->day) * USECS_PER_DAY +
			value->time;

		if (span >= span_ranges[kind].min && span <= span_ranges[kind].max)
			return span;
	}

	ereport(ERROR,
			errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid value of \"%s\"", name),
			errdetail("The interval must be %s.", span_ranges[kind].range),
			errhint("%s", span_ranges[kind].hint));
}

/* Position of the value in a list of words that ends with NULL; a NULL value is an error */
int
idem_args_word(const text *value, const char *name, const char *const *words, const char *hint)
{
	char *word = value != NULL ? text_to_cstring(value) : NULL;
	StringInfoData list;

	initStringInfo(&list);
	for (int i = 0; words[i] != NULL; i++)
	{
		if (word != NULL && strcmp(word, words[i]) == 0)
			return i;
		if (i > 0)
			appendStringInfoString(&list, words[i + 1] == NULL ? " and " : ", ");
		appendStringInfo(&list, "\"%s\"", words[i]);
	}
	ereport(ERROR,
			word == NULL ? errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED) :
						   errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid value of \"%s\"", name),
			errdetail("Valid values are %s.", list.data),
			errhint("%s", hint));
}

/* Raise an error unless the text has between min and max bytes (K12); noun: what it is, in short */
static inline void
check_length(const text *value, int min, int max, const char *what, const char *noun,
			 const char *hint)
{
	int len = VARSIZE_ANY_EXHDR(value);

	if (unlikely(len < min || len > max))
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of %s", what),
				min > 0 ? errdetail("The %s has %d bytes; it must have between %d and %d.", noun, len, min, max) :
						  errdetail("The %s has %d bytes; it must have at most %d.", noun, len, max),
				errhint("%s", hint));
}

/* Check the length of a key (K12) */
void
idem_args_check_key(const text *key)
{
	check_length(key, 1, IDEM_MAX_KEY_LEN, "idempotency key", "key",
				 VARSIZE_ANY_EXHDR(key) < 1 ?
					 "Derive the key from what makes the operation unique, for example the id of the order." :
					 "Hash longer keys before the call.");
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

/* Detoast a value to be stored; idem.max_result_size limits its size (K12) */
Jsonb *
idem_args_jsonb(Datum value, const char *name)
{
	Size size = toast_raw_datum_size(value) - VARHDRSZ;

	if (size > (Size) idem_guc_max_result_size)
		ereport(ERROR,
				errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				errmsg("value of \"%s\" is too large", name),
				errdetail("It has %zu bytes; \"%s\" allows %d.",
						  size, "idem.max_result_size", idem_guc_max_result_size),
				errhint("Store the data in a table of your own and only its id here, or raise the setting."));
	return DatumGetJsonbP(value);
}

/* SHA-256 of the text form of jsonb, which has one order of keys and one spacing (K7) */
bytea *
idem_args_fingerprint(Datum request)
{
	Jsonb *json = DatumGetJsonbP(request);
	char *str = JsonbToCString(NULL, &json->root, VARSIZE(json));
	bytea *digest = palloc(VARHDRSZ + IDEM_SHA256_LEN);

	SET_VARSIZE(digest, VARHDRSZ + IDEM_SHA256_LEN);
	idem_sha256_hash(str, strlen(str), (uint8 *) VARDATA(digest));
	return digest;
}

/* The name of a queue */
text *
idem_args_queue_name(NullableDatum value)
{
	text *queue;

	if (value.isnull)
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("queue name must not be null"),
				errdetail("Every job belongs to a queue."),
				errhint("Pass a short name for the kind of work, for example 'mail'."));
	queue = DatumGetTextPP(value.value);
	check_length(queue, 1, IDEM_MAX_QUEUE_LEN, "queue name", "name",
				 "Use a short name for the kind of work, for example 'mail'.");
	return queue;
}

/* A copy in this memory context; NULL for NULL */
Jsonb *
idem_args_copy_jsonb(Jsonb *value, MemoryContext context)
{
	MemoryContext oldcontext = MemoryContextSwitchTo(context);
	Jsonb *copy = value == NULL ? NULL : DatumGetJsonbPCopy(JsonbPGetDatum(value));

	MemoryContextSwitchTo(oldcontext);
	return copy;
}

/* The argument, else idem.scope (K12) */
text *
idem_args_scope(FunctionCallInfo fcinfo, int arg)
{
	text *scope;

	if (PG_ARGISNULL(arg))
		return cstring_to_text(idem_guc_scope);

	scope = PG_GETARG_TEXT_PP(arg);
	check_length(scope, 0, IDEM_MAX_SCOPE_LEN, "scope", "scope",
				 "Use a short name for the service or tenant.");
	return scope;
}

/* A key and its scope (K12) */
void
idem_args_key(FunctionCallInfo fcinfo, int keyarg, int scopearg, IdemKey *key)
{
	if (PG_ARGISNULL(keyarg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("idempotency key must not be null"),
				errdetail("Without a key, duplicates cannot be recognized."),
				errhint("Derive the key from what makes the operation unique, for example the id of the order."));
	key->key = PG_GETARG_TEXT_PP(keyarg);
	idem_args_check_key(key->key);
	key->scope = idem_args_scope(fcinfo, scopearg);
}

/* The argument, else idem.ttl; in microseconds */
int64
idem_args_ttl(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return idem_guc_ttl * USECS_PER_SEC;
	return idem_args_span(PG_GETARG_DATUM(arg), "ttl", IDEM_SPAN_POSITIVE);
}

/* Null: wait as long as lock_timeout allows; else until a time (K5) */
IdemWait
idem_args_wait(FunctionCallInfo fcinfo, int arg)
{
	IdemWait wait = {.forever = true};

	if (!PG_ARGISNULL(arg))
	{
		wait.forever = false;
		wait.until = GetCurrentTimestamp() +
			idem_args_span(PG_GETARG_DATUM(arg), "wait", IDEM_SPAN_NOT_NEGATIVE);
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
				errdetail("Without an end, no other worker could take over from a worker that has died."),
				errhint("Pass the longest time that the work needs, such as '90 s'."));
	return idem_args_span(PG_GETARG_DATUM(arg), "lease", IDEM_SPAN_LEASE);
}

text *
idem_args_queue(FunctionCallInfo fcinfo, int arg)
{
	return idem_args_queue_name(fcinfo->args[arg]);
}

/* How long a procedure waits, in microseconds (A7) */
int64
idem_args_timeout(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "timeout", "Leave it out to wait for at most 30 seconds.");
	return idem_args_span(PG_GETARG_DATUM(arg), "timeout", IDEM_SPAN_NOT_NEGATIVE);
}

/* NULL if the argument is null */
text *
idem_args_worker(FunctionCallInfo fcinfo, int arg)
{
	text *worker;

	if (PG_ARGISNULL(arg))
		return NULL;
	worker = PG_GETARG_TEXT_PP(arg);
	check_length(worker, 1, IDEM_MAX_WORKER_LEN, "worker name", "name",
				 "Use a name that only one process has at a time, for example host name and process id, or leave it out.");
	return worker;
}

/* 0 if the argument is null */
int
idem_args_max_attempts(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return 0;
	if (PG_GETARG_INT32(arg) < 1)
		idem_args_refuse_value("max_attempts",
							   psprintf("The number is %d; it must be at least 1.", PG_GETARG_INT32(arg)),
							   "Leave it out for the default.");
	return PG_GETARG_INT32(arg);
}

/* 0 if the argument is null, as for a key that was claimed without a lease */
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

/* Raise an error if the argument is null */
void
idem_args_require(FunctionCallInfo fcinfo, int arg, const char *name, const char *hint)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", name),
				errdetail("The function requires this argument."),
				errhint("%s", hint));
}

int64
idem_args_job_id(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "job_id",
					  "Pass the number that idem_enqueue() or idem_fetch() has returned.");
	return PG_GETARG_INT64(arg);
}

/* Raise the error for a value that an argument, or a column, must not have */
void
idem_args_refuse_value(const char *name, const char *detail, const char *hint)
{
	ereport(ERROR,
			errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid value of \"%s\"", name),
			errdetail("%s", detail),
			errhint("%s", hint));
}

/* Raise the error for arguments that need or exclude one another; arg: one of them */
void
idem_args_refuse_combination(const char *arg, const char *detail, const char *hint)
{
	ereport(ERROR,
			errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid combination of arguments with \"%s\"", arg),
			errdetail("%s", detail),
			errhint("%s", hint));
}

/* How many jobs one call processes at most */
int
idem_args_max_jobs(FunctionCallInfo fcinfo, int arg, int limit)
{
	idem_args_require(fcinfo, arg, "max_jobs", "Leave it out for the default.");
	if (PG_GETARG_INT32(arg) < 1 || PG_GETARG_INT32(arg) > limit)
		idem_args_refuse_value("max_jobs",
							   psprintf("The number is %d; it must be between 1 and %d.", PG_GETARG_INT32(arg), limit),
							   "Leave it out for the default.");
	return PG_GETARG_INT32(arg);
}

/* When a job is due; the argument is not null */
TimestampTz
idem_args_run_at(FunctionCallInfo fcinfo, int arg)
{
	TimestampTz run_at = PG_GETARG_TIMESTAMPTZ(arg);

	if (TIMESTAMP_NOT_FINITE(run_at))
		idem_args_refuse_value("run_at", "The time must be finite.",
							   "Leave it out, or pass now() for a job that is due at once.");
	return run_at;
}

/* Read the elements of an array; false if the argument is null */
bool
idem_args_array(FunctionCallInfo fcinfo, int arg, const char *name, Datum **elems, bool **nulls,
				int *n)
{
	ArrayType *array;
	int16 typlen;
	bool typbyval;
	char typalign;

	*n = 0;
	if (PG_ARGISNULL(arg))
		return false;
	array = PG_GETARG_ARRAYTYPE_P(arg);
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("array \"%s\" must have one dimension", name),
				errdetail("It has %d dimensions.", ARR_NDIM(array)),
				errhint("Flatten the array."));
	get_typlenbyvalalign(ARR_ELEMTYPE(array), &typlen, &typbyval, &typalign);
	deconstruct_array(array, ARR_ELEMTYPE(array), typlen, typbyval, typalign, elems, nulls, n);
	return true;
}

/*
 * Read the elements of an array, or raise an error if it is null.  If the caller passes
 * no place for nulls, an element that is null is an error, too.
 */
void
idem_args_required_array(FunctionCallInfo fcinfo, int arg, const char *name, Datum **elems,
						 bool **nulls, int *n)
{
	bool *isnull;

	if (!idem_args_array(fcinfo, arg, name, elems, nulls ? nulls : &isnull, n))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("array \"%s\" must not be null", name),
				errdetail("Without it there is nothing to do."),
				errhint("Pass an empty array if there is nothing to do."));
	for (int i = 0; i < *n && nulls == NULL; i++)
	{
		if (isnull[i])
			ereport(ERROR,
					errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("array \"%s\" must not contain nulls", name),
					errdetail("Element %d of the array is null.", i + 1),
					errhint("Leave out elements without a value, in all arrays of the call."));
	}
}

void
idem_args_check_length(const char *name, int n, const char *other, int nother)
{
	if (n != nother)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("arrays \"%s\" and \"%s\" differ in length", name, other),
				errdetail("Their lengths are %d and %d.", n, nother),
				errhint("Pass the same number of elements in both arrays."));
}

/* The names of queues; at least one */
text **
idem_args_queues(FunctionCallInfo fcinfo, int arg, int *n)
{
	Datum *elems;
	bool *nulls;
	text **queues;

	if (!idem_args_array(fcinfo, arg, "queues", &elems, &nulls, n))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("array \"%s\" must not be null", "queues"),
				errdetail("Every job belongs to a queue."),
				errhint("Name the queues that this worker serves."));
	if (*n < 1 || *n > IDEM_MAX_QUEUES)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid number of queues"),
				errdetail("The array has %d queues; it must have between 1 and %d.", *n, IDEM_MAX_QUEUES),
				errhint("Name the queues that this worker serves."));
	queues = palloc_array(text *, *n);
	for (int i = 0; i < *n; i++)
	{
		NullableDatum name = {.value = elems[i], .isnull = nulls[i]};

		queues[i] = idem_args_queue_name(name);
	}
	return queues;
}

static int
compare_keys(const void *a, const void *b, void *arg)
{
	text **keys = arg;
	int ia = *(const int *) a;
	int ib = *(const int *) b;
	int la = keys[ia] ? (int) VARSIZE_ANY_EXHDR(keys[ia]) : 0;
	int lb = keys[ib] ? (int) VARSIZE_ANY_EXHDR(keys[ib]) : 0;
	int cmp =
		la > 0 && lb > 0 ? memcmp(VARDATA_ANY(keys[ia]), VARDATA_ANY(keys[ib]), Min(la, lb)) : 0;

	if (cmp == 0)
		cmp = la - lb;
	return cmp != 0 ? cmp : ia - ib;
}

/*
 * Order in which to process keys: by their bytes; equal keys, and missing ones
 * (NULL), by their position.  Two calls that follow this order cannot deadlock.
 */
int *
idem_args_order(text **keys, int n)
{
	int *order = MemoryContextAllocExtended(CurrentMemoryContext, n * sizeof(int), MCXT_ALLOC_HUGE);

	for (int i = 0; i < n; i++)
		order[i] = i;
	qsort_arg(order, n, sizeof(int), compare_keys, keys);
	return order;
}

/* Error context callback: names the position of the element, never its value */
void
idem_args_say_element(void *arg)
{
	const IdemElement *element = arg;

	errcontext("element %d of array \"%s\"", element->ord + 1, element->array);
}
