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
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "idem.h"

#define CLAIM_MANY_NATTS 7

static const Oid claim_many_types[CLAIM_MANY_NATTS] = {
	INT4OID, TEXTOID, BOOLOID, TEXTOID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID};

IDEM_FUNCTION(idem_claim_many, RECORDOID, TEXTARRAYOID, JSONBARRAYOID, INTERVALOID, INTERVALOID, TEXTOID);
IDEM_FUNCTION(idem_finish_many, INT4OID, TEXTARRAYOID, JSONBARRAYOID, TEXTOID);

/* An element of the array of keys */
typedef struct BatchItem
{
	bytea *request;
	IdemRow row;
} BatchItem;

/* The keys, checked */
static text **
get_keys(FunctionCallInfo fcinfo, int arg, int *n)
{
	Datum *elems;
	bool *nulls;
	text **keys;

	if (!idem_arrays_get(fcinfo, arg, "keys", &elems, &nulls, n))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("array of idempotency keys must not be null"),
				errdetail("Without keys there is nothing to tell duplicates by."),
				errhint("Pass an empty array if there is nothing to do."));

	keys = palloc_array(text *, *n);
	for (int i = 0; i < *n; i++)
	{
		if (nulls[i])
			ereport(ERROR,
					errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("idempotency key must not be null"),
					errdetail("Element %d of the array is null.", i + 1),
					errhint("Leave out what has no key."));
		keys[i] = DatumGetTextPP(elems[i]);
		idem_args_check_key(keys[i]);
	}
	return keys;
}

/* An array of jsonb beside the keys; false if it was not given */
static bool
get_jsonbs(FunctionCallInfo fcinfo, int arg, const char *what, int nkeys, Datum **elems, bool **nulls)
{
	int n;

	if (!idem_arrays_get(fcinfo, arg, what, elems, nulls, &n))
		return false;
	idem_arrays_check_length("keys", nkeys, what, n);
	return true;
}

static void
put_rows(ReturnSetInfo *rsinfo, text **keys, const BatchItem *items, int n)
{
	for (int i = 0; i < n; i++)
	{
		Datum values[CLAIM_MANY_NATTS];
		bool nulls[CLAIM_MANY_NATTS] = {false};

		CHECK_FOR_INTERRUPTS();
		values[0] = Int32GetDatum(i + 1);
		values[1] = PointerGetDatum(keys[i]);
		idem_claim_row_values(&items[i].row, &values[2], &nulls[2]);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
}

/* One claim after the other, in the order of the keys */
static void
claim_items(IdemClaim *claim, text **keys, BatchItem *items, int n)
{
	IdemTable table;
	int *order = idem_arrays_order(keys, n);
	IdemElement element = {.array = "keys"};
	ErrorContextCallback context = {
		.previous = error_context_stack, .callback = idem_arrays_say_element, .arg = &element};

	error_context_stack = &context;
	idem_keytable_open(&table, RowExclusiveLock);
	for (int i = 0; i < n; i++)
	{
		element.ord = order[i];
		claim->key.key = keys[order[i]];
		claim->request = items[order[i]].request;
		idem_keystore_claim(&table, claim, &items[order[i]].row);
	}
	idem_table_close(&table);
	error_context_stack = context.previous;
}

Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo;
	IdemClaim claim;
	Datum *requests;
	bool *nulls;
	text **keys;
	BatchItem *items;
	int n;

	idem_args_begin(fcinfo, &idem_claim_many_signature, "idem_claim_many()");
	rsinfo = idem_args_row_set(fcinfo, claim_many_types, CLAIM_MANY_NATTS);
	keys = get_keys(fcinfo, 0, &n);
	items = MemoryContextAllocExtended(CurrentMemoryContext, n * sizeof(BatchItem),
									   MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
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
		claim_items(&claim, keys, items, n);
		put_rows(rsinfo, keys, items, n);
	}
	return (Datum) 0;
}

/*
 * All or none: an error takes the whole statement with it.  Returns how many
 * were finished now; the others were so already, with an equal result (K11).
 */
Datum
idem_finish_many(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	Datum *results;
	bool *nulls;
	bool have_results;
	text **keys;
	int n;
	int finished = 0;
	IdemElement element = {.array = "keys"};
	ErrorContextCallback context = {
		.previous = error_context_stack, .callback = idem_arrays_say_element, .arg = &element};

	idem_args_begin(fcinfo, &idem_finish_many_signature, "idem_finish_many()");
	keys = get_keys(fcinfo, 0, &n);
	have_results = get_jsonbs(fcinfo, 1, "results", n, &results, &nulls);
	key.scope = idem_args_scope(fcinfo, 2);
	if (n == 0)
		PG_RETURN_INT32(0);

	idem_keytable_open(&table, RowExclusiveLock);
	error_context_stack = &context;
	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		element.ord = i;
		key.key = keys[i];
		if (idem_keystore_finish(&table, &key,
								 have_results && !nulls[i] ? idem_args_jsonb(results[i], "result") : NULL))
			finished++;
	}
	error_context_stack = context.previous;
	idem_table_close(&table);
	PG_RETURN_INT32(finished);
}
