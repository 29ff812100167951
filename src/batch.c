/*
 * batch.c
 *		SQL functions for many keys: idem_claim_many, idem_finish_many.
 *
 * Keys are claimed in the order of their bytes, whatever the order of the
 * array, so two batches cannot wait for each other in a circle.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "idem.h"

#define CLAIM_MANY_NATTS 7

static const Oid claim_many_types[CLAIM_MANY_NATTS] = {
	INT4OID, TEXTOID, BOOLOID, TEXTOID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID};

PG_FUNCTION_INFO_V1(idem_claim_many);
PG_FUNCTION_INFO_V1(idem_finish_many);

/* An element of the array of keys */
typedef struct BatchItem
{
	int ord; /* from 0 */
	text *key;
	bytea *request;
	IdemRow row;
} BatchItem;

/* Errors about a key tell which one, without naming it */
static void
say_element(void *arg)
{
	errcontext("element %d of array \"%s\"", *(int *) arg + 1, "keys");
}

static void
deconstruct(ArrayType *array, const char *what, Datum **elems, bool **nulls, int *n)
{
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("array \"%s\" must have one dimension", what),
				errdetail("It has %d dimensions.", ARR_NDIM(array)),
				errhint("Flatten the array."));
	deconstruct_array(array, ARR_ELEMTYPE(array), -1, false, TYPALIGN_INT, elems, nulls, n);
}

/* The keys, checked; NULL if there is none */
static BatchItem *
get_keys(FunctionCallInfo fcinfo, int arg, int *n)
{
	Datum *elems;
	bool *nulls;
	BatchItem *items;

	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("array of idempotency keys must not be null"),
				errdetail("Without keys there is nothing to tell duplicates by."),
				errhint("Pass an empty array if there is nothing to do."));
	deconstruct(PG_GETARG_ARRAYTYPE_P(arg), "keys", &elems, &nulls, n);
	if (*n == 0)
		return NULL;

	items = MemoryContextAllocExtended(CurrentMemoryContext, *n * sizeof(BatchItem),
									   MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
	for (int i = 0; i < *n; i++)
	{
		if (nulls[i])
			ereport(ERROR,
					errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("idempotency key must not be null"),
					errdetail("Element %d of the array is null.", i + 1),
					errhint("Leave out what has no key."));
		items[i].ord = i;
		items[i].key = DatumGetTextPP(elems[i]);
		idem_args_check_key(items[i].key);
	}
	return items;
}

/* An array of jsonb beside the keys; false if it was not given */
static bool
get_jsonbs(FunctionCallInfo fcinfo, int arg, const char *what, int nkeys, Datum **elems, bool **nulls)
{
	int n;

	if (PG_ARGISNULL(arg))
		return false;
	deconstruct(PG_GETARG_ARRAYTYPE_P(arg), what, elems, nulls, &n);
	if (n != nkeys)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("arrays \"%s\" and \"%s\" differ in length", "keys", what),
				errdetail("Their lengths are %d and %d.", nkeys, n),
				errhint("Pass one element for each key; it may be null."));
	return true;
}

static int
compare_items(const void *a, const void *b)
{
	const BatchItem *ia = a;
	const BatchItem *ib = b;
	int la = VARSIZE_ANY_EXHDR(ia->key);
	int lb = VARSIZE_ANY_EXHDR(ib->key);
	int cmp = memcmp(VARDATA_ANY(ia->key), VARDATA_ANY(ib->key), Min(la, lb));

	if (cmp == 0)
		cmp = la - lb;
	return cmp != 0 ? cmp : ia->ord - ib->ord;
}

static int
compare_ords(const void *a, const void *b)
{
	return ((const BatchItem *) a)->ord - ((const BatchItem *) b)->ord;
}

static void
put_rows(ReturnSetInfo *rsinfo, const BatchItem *items, int n)
{
	for (int i = 0; i < n; i++)
	{
		Datum values[CLAIM_MANY_NATTS];
		bool nulls[CLAIM_MANY_NATTS] = {false};

		CHECK_FOR_INTERRUPTS();
		values[0] = Int32GetDatum(items[i].ord + 1);
		values[1] = PointerGetDatum(items[i].key);
		idem_claim_row_values(&items[i].row, &values[2], &nulls[2]);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
}

/* One claim after the other, in the order of the keys */
static void
claim_items(IdemClaim *claim, BatchItem *items, int n)
{
	IdemTable table;
	int ord = 0;
	ErrorContextCallback context = {
		.previous = error_context_stack, .callback = say_element, .arg = &ord};

	error_context_stack = &context;
	qsort(items, n, sizeof(BatchItem), compare_items);
	idem_keytable_open(&table, RowExclusiveLock);
	for (int i = 0; i < n; i++)
	{
		ord = items[i].ord;
		claim->key.key = items[i].key;
		claim->request = items[i].request;
		idem_keystore_claim(&table, claim, &items[i].row);
	}
	idem_table_close(&table);
	error_context_stack = context.previous;
	qsort(items, n, sizeof(BatchItem), compare_ords);
}

Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo;
	IdemClaim claim;
	Datum *requests;
	bool *nulls;
	BatchItem *items;
	int n;

	idem_args_begin(fcinfo, 5, "idem_claim_many()");
	rsinfo = idem_args_row_set(fcinfo, claim_many_types, CLAIM_MANY_NATTS);
	items = get_keys(fcinfo, 0, &n);
	if (get_jsonbs(fcinfo, 1, "requests", n, &requests, &nulls))
	{
		for (int i = 0; i < n; i++)
			items[i].request = nulls[i] ? NULL : idem_args_fingerprint(requests[i]);
	}
	claim.ttl = idem_args_ttl(fcinfo, 2);
	claim.wait = idem_args_wait(fcinfo, 3);
	claim.key.scope = idem_args_scope(fcinfo, 4);
	claim.lease = NULL;

	if (n > 0)
	{
		claim_items(&claim, items, n);
		put_rows(rsinfo, items, n);
	}
	return (Datum) 0;
}

/* All or none: an error takes the whole statement with it */
Datum
idem_finish_many(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	Datum *results;
	bool *nulls;
	bool have_results;
	BatchItem *items;
	int n;
	int i = 0;
	ErrorContextCallback context = {
		.previous = error_context_stack, .callback = say_element, .arg = &i};

	idem_args_begin(fcinfo, 3, "idem_finish_many()");
	items = get_keys(fcinfo, 0, &n);
	have_results = get_jsonbs(fcinfo, 1, "results", n, &results, &nulls);
	key.scope = idem_args_scope(fcinfo, 2);
	if (n == 0)
		PG_RETURN_VOID();

	idem_keytable_open(&table, RowExclusiveLock);
	error_context_stack = &context;
	for (i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		key.key = items[i].key;
		idem_keystore_finish(&table, &key,
							 have_results && !nulls[i] ? idem_args_jsonb(results[i], "result") : NULL);
	}
	error_context_stack = context.previous;
	idem_table_close(&table);
	PG_RETURN_VOID();
}
