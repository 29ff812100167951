/*
 * value.c
 *		Checks of single values: arguments, elements of arrays, and columns of
 *		idem.queues.
 */
#include "postgres.h"

#include "access/detoast.h"
#include "lib/stringinfo.h"
#include "utils/builtins.h"
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
idem_value_span(Datum interval, const char *name, IdemSpan kind)
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
idem_value_word(const text *value, const char *name, const char *const *words, const char *hint)
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

/* Check the length of a key (K12) */
void
idem_value_check_key(const text *key)
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

void
idem_value_check_token(int64 token)
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
idem_value_jsonb(Datum value, const char *name)
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
idem_value_fingerprint(Datum request)
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
idem_value_queue(NullableDatum value)
{
	text *queue;
	int len;

	if (value.isnull)
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("queue name must not be null"),
				errdetail("Every job belongs to a queue."),
				errhint("Pass a short name for the kind of work, for example 'mail'."));
	queue = DatumGetTextPP(value.value);
	len = VARSIZE_ANY_EXHDR(queue);
	if (len < 1 || len > IDEM_MAX_QUEUE_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of queue name"),
				errdetail("The name has %d bytes; it must have between 1 and %d.", len, IDEM_MAX_QUEUE_LEN),
				errhint("Use a short name for the kind of work, for example 'mail'."));
	return queue;
}

/* A copy in this memory context; NULL for NULL */
Jsonb *
idem_value_copy_jsonb(Jsonb *value, MemoryContext context)
{
	MemoryContext oldcontext = MemoryContextSwitchTo(context);
	Jsonb *copy = value == NULL ? NULL : DatumGetJsonbPCopy(JsonbPGetDatum(value));

	MemoryContextSwitchTo(oldcontext);
	return copy;
}
