/*
 * claim.c
 *		SQL functions of keys: idem_claim, idem_claim_many, idem_finish,
 *		idem_finish_many, idem_release, idem_get, idem_forget, idem_key_state,
 *		idem_key_hash.
 *
 * They check their arguments, call keystore.c or leasestore.c, and form the rows
 * to return.  idem_claim_many() claims keys in the order of their bytes, whatever
 * the order in the array is.  So two calls cannot deadlock.  An error ends the whole
 * call, and the context of the error names the element of the array.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

IDEM_FUNCTION(idem_claim);
IDEM_FUNCTION(idem_finish);
IDEM_FUNCTION(idem_release);
IDEM_FUNCTION(idem_get);
IDEM_FUNCTION(idem_forget);
IDEM_FUNCTION(idem_key_state);
IDEM_FUNCTION(idem_key_hash);
IDEM_FUNCTION(idem_claim_many);
IDEM_FUNCTION(idem_finish_many);

/*
 * Set the columns of idem.claim_result.  In the rows of idem_claim_many() they are
 * offset columns further right.
 */
static void
set_claim_columns(IdemAnswer *answer, int offset, const IdemKeyInfo *info)
{
	idem_answer_bool(answer, offset + Anum_claim_result_claimed, info->status == IDEM_KEY_CLAIMED);
	idem_answer_string(answer, offset + Anum_claim_result_status,
					   idem_keyrow_status_name(info->status));
	idem_answer_jsonb(answer, offset + Anum_claim_result_result, info->result);
	if (info->status != IDEM_KEY_BUSY)
	{
		idem_answer_time(answer, offset + Anum_claim_result_created_at, info->created_at);
		idem_answer_time(answer, offset + Anum_claim_result_expires_at, info->expires_at);
	}
}

/*
 * Read the arguments of a plain claim of one key.  The key is the first argument.
 * The arguments request, ttl, wait and scope begin at requestarg, in this order.
 */
void
idem_claim_args(FunctionCallInfo fcinfo, int requestarg, IdemClaim *claim)
{
	idem_args_key(fcinfo, 0, requestarg + 3, &claim->key);
	claim->request = NULL;
	if (!PG_ARGISNULL(requestarg))
		claim->request = idem_value_fingerprint(PG_GETARG_DATUM(requestarg));
	claim->ttl = idem_args_ttl(fcinfo, requestarg + 1);
	claim->wait = idem_args_wait(fcinfo, requestarg + 2);
	claim->lease = NULL;
}

Datum
idem_claim(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemClaim claim;
	IdemKeyInfo info;
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_claim_signature, "idem_claim()");
	idem_claim_args(fcinfo, 1, &claim);

	idem_keytable_open(&table, RowExclusiveLock);
	idem_keystore_claim(&table, &claim, &info);
	idem_table_close(&table);
	if (info.status == IDEM_KEY_CLAIMED)
		idem_unfinished_note_claim(fcinfo->flinfo->fn_oid);

	idem_answer_begin(&answer, fcinfo, &idem_claim_signature);
	set_claim_columns(&answer, 0, &info);
	return idem_answer_row(&answer);
}

/* True: finished now; false: already finished with an equal result (K11, L3) */
Datum
idem_finish(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	Jsonb *result;
	int64 token;
	bool finished;

	idem_fn_begin(fcinfo, &idem_finish_signature, "idem_finish()");
	idem_args_key(fcinfo, 0, 3, &key);
	result = PG_ARGISNULL(1) ? NULL : idem_value_jsonb(PG_GETARG_DATUM(1), "result");
	token = idem_args_optional_token(fcinfo, 2);

	idem_keytable_open(&table, RowExclusiveLock);
	if (token == 0)
		finished = idem_keystore_finish(&table, &key, result);
	else
		finished = idem_leasestore_finish(&table, &key, token, result);
	idem_table_close(&table);
	PG_RETURN_BOOL(finished);
}

Datum
idem_release(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	int64 token;

	idem_fn_begin(fcinfo, &idem_release_signature, "idem_release()");
	idem_args_key(fcinfo, 0, 2, &key);
	token = idem_args_optional_token(fcinfo, 1);

	idem_keytable_open(&table, RowExclusiveLock);
	if (token == 0)
		idem_keystore_release(&table, &key);
	else
		idem_leasestore_release(&table, &key, token);
	idem_table_close(&table);
	PG_RETURN_BOOL(true);
}

Datum
idem_forget(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	bool forgotten;

	idem_fn_begin(fcinfo, &idem_forget_signature, "idem_forget()");
	idem_args_key(fcinfo, 0, 1, &key);

	idem_keytable_open(&table, RowExclusiveLock);
	forgotten = idem_keystore_forget(&table, &key);
	idem_table_close(&table);
	PG_RETURN_BOOL(forgotten);
}

/* Name of a role, or its OID if the role was dropped */
static Datum
get_role_name(Oid role)
{
	char *name = GetUserNameFromId(role, true);

	if (name == NULL)
		name = psprintf("%u", role);
	return DirectFunctionCall1(namein, CStringGetDatum(name));
}

/* Return a row; the columns of leases are null for a plain claim */
static void
put_get_row(IdemAnswer *answer, const IdemKeyInfo *info)
{
	idem_answer_string(answer, Anum_get_result_status, idem_keyrow_status_name(info->status));
	idem_answer_jsonb(answer, Anum_get_result_result, info->result);
	idem_answer_set(answer, Anum_get_result_owner, NAMEOID, get_role_name(info->owner));
	idem_answer_text(answer, Anum_get_result_worker, info->worker);
	if (info->lease_until != 0)
	{
		idem_answer_int32(answer, Anum_get_result_attempt, info->attempt);
		idem_answer_int64(answer, Anum_get_result_token, info->token);
		idem_answer_time(answer, Anum_get_result_lease_until, info->lease_until);
	}
	idem_answer_jsonb(answer, Anum_get_result_checkpoint, info->checkpoint);
	idem_answer_time(answer, Anum_get_result_created_at, info->created_at);
	idem_answer_optional_time(answer, Anum_get_result_finished_at, info->finished_at);
	idem_answer_time(answer, Anum_get_result_expires_at, info->expires_at);
	idem_answer_put(answer);
}

Datum
idem_get(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable table;
	IdemKey key;
	IdemKeyInfo info;

	idem_fn_begin(fcinfo, &idem_get_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_get_signature);
	idem_args_key(fcinfo, 0, 1, &key);

	idem_keytable_open(&table, AccessShareLock);
	if (idem_keystore_get(&table, &key, &info))
		put_get_row(&answer, &info);
	idem_table_close(&table);
	return (Datum) 0;
}

/* An element of the arrays of idem_claim_many(), and the answer for it */
typedef struct BatchItem
{
	bytea *request;
	IdemKeyInfo info;
} BatchItem;

/* Read the array of keys, and check each of them (K12) */
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
				errdetail("Without keys, duplicates cannot be recognized."),
				errhint("Pass an empty array if there is nothing to do."));

	keys = palloc_array(text *, *n);
	for (int i = 0; i < *n; i++)
	{
		if (nulls[i])
			ereport(ERROR,
					errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					errmsg("idempotency key must not be null"),
					errdetail("Element %d of the array is null.", i + 1),
					errhint("Leave out elements that have no key."));
		keys[i] = DatumGetTextPP(elems[i]);
		idem_value_check_key(keys[i]);
	}
	return keys;
}

/* Read an array of jsonb that has one element per key; false if the argument is null */
static bool
get_jsonbs(FunctionCallInfo fcinfo, int arg, const char *what, int nkeys, Datum **elems,
		   bool **nulls)
{
	int n;

	if (!idem_arrays_get(fcinfo, arg, what, elems, nulls, &n))
		return false;
	idem_arrays_check_length("keys", nkeys, what, n);
	return true;
}

static void
put_claim_rows(IdemAnswer *answer, text **keys, const BatchItem *items, int n)
{
	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		idem_answer_int32(answer, Anum_claim_many_result_ord, i + 1);
		idem_answer_text(answer, Anum_claim_many_result_key, keys[i]);
		set_claim_columns(answer, Anum_claim_many_result_claimed - Anum_claim_result_claimed,
						  &items[i].info);
		idem_answer_put(answer);
	}
}

/* Claim the keys one after the other, in the order of their bytes */
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
		idem_keystore_claim(&table, claim, &items[order[i]].info);
	}
	idem_table_close(&table);
	error_context_stack = context.previous;
}

Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemClaim claim;
	Datum *requests;
	bool *nulls;
	text **keys;
	BatchItem *items;
	int n;

	idem_fn_begin(fcinfo, &idem_claim_many_signature, "idem_claim_many()");
	idem_answer_begin(&answer, fcinfo, &idem_claim_many_signature);
	keys = get_keys(fcinfo, 0, &n);
	items = MemoryContextAllocExtended(CurrentMemoryContext, n * sizeof(BatchItem),
									   MCXT_ALLOC_HUGE | MCXT_ALLOC_ZERO);
	if (get_jsonbs(fcinfo, 1, "requests", n, &requests, &nulls))
	{
		for (int i = 0; i < n; i++)
			items[i].request = nulls[i] ? NULL : idem_value_fingerprint(requests[i]);
	}
	claim.ttl = idem_args_ttl(fcinfo, 2);
	claim.wait = idem_args_wait(fcinfo, 3);
	claim.key.scope = idem_args_scope(fcinfo, 4);
	claim.lease = NULL;

	if (n > 0)
	{
		claim_items(&claim, keys, items, n);
		idem_unfinished_note_claim(fcinfo->flinfo->fn_oid);
		put_claim_rows(&answer, keys, items, n);
	}
	return (Datum) 0;
}

/*
 * Finish all keys, or raise an error.  Returns how many keys were finished by this
 * call.  The others were already finished with an equal result (K11).
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

	idem_fn_begin(fcinfo, &idem_finish_many_signature, "idem_finish_many()");
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
								 have_results && !nulls[i] ?
									 idem_value_jsonb(results[i], "result") :
									 NULL))
			finished++;
	}
	error_context_stack = context.previous;
	idem_table_close(&table);
	PG_RETURN_INT32(finished);
}

/*
 * State of a row of idem.keys at the given time, for the view idem.key_status, whose
 * other columns are computed for the same time.  The function does not see whether a
 * row is frozen.  So a very old row, whose xmin equals the xid of this transaction
 * after a wraparound, may show as held.  This affects only the view.
 */
Datum
idem_key_state(PG_FUNCTION_ARGS)
{
	IdemKeyFacts facts = {0};

	idem_fn_begin(fcinfo, &idem_key_state_signature, NULL);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1) || PG_ARGISNULL(3))
		PG_RETURN_NULL();
	facts.now = PG_GETARG_TIMESTAMPTZ(0);
	facts.is_mine = TransactionIdIsCurrentTransactionId(DatumGetTransactionId(PG_GETARG_DATUM(1)));
	facts.is_finished = !PG_ARGISNULL(2);
	facts.expires_at = PG_GETARG_TIMESTAMPTZ(3);
	facts.is_leased = !PG_ARGISNULL(4);
	if (facts.is_leased)
		facts.lease_until = PG_GETARG_TIMESTAMPTZ(4);
	facts.park = !PG_ARGISNULL(5) && PG_GETARG_BOOL(5);
	facts.attempt = PG_ARGISNULL(6) ? 0 : PG_GETARG_INT32(6);
	facts.max_attempts = PG_ARGISNULL(7) ? 0 : PG_GETARG_INT32(7);
	PG_RETURN_TEXT_P(cstring_to_text(idem_keyrow_status_name(idem_keyrow_judge_facts(&facts))));
}

/* The hash by which a key is found in idem.keys, for operators and checks */
Datum
idem_key_hash(PG_FUNCTION_ARGS)
{
	IdemKey key;

	idem_fn_begin(fcinfo, &idem_key_hash_signature, NULL);
	idem_args_key(fcinfo, 0, 1, &key);
	PG_RETURN_INT64(idem_hash_name(key.scope, key.key));
}
