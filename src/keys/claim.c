/*
 * claim.c
 *		SQL functions of keys and leases.
 *
 * They check their arguments, call keystore.c, and form the rows to return.  idem_wait_key()
 * says how to look; src/wake/sleep.c has the loop.  idem_claim_many() claims keys in the
 * order of their bytes, whatever the order in the array is.  So two calls cannot deadlock.
 * An error ends the whole call, and the context of the error names the element of the array.
 */
#include "postgres.h"

#include "access/xact.h"
#include "funcapi.h"
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
IDEM_FUNCTION(idem_lease);
IDEM_FUNCTION(idem_renew);
IDEM_FUNCTION(idem_checkpoint);
IDEM_FUNCTION(idem_fence);
IDEM_FUNCTION(idem_wait_key);

#define CLAIM_OFFSET(column) (Anum_claim_many_result_##column - Anum_claim_result_##column)

StaticAssertDecl(CLAIM_OFFSET(claimed) == CLAIM_OFFSET(status) &&
					 CLAIM_OFFSET(claimed) == CLAIM_OFFSET(result) &&
					 CLAIM_OFFSET(claimed) == CLAIM_OFFSET(created_at) &&
					 CLAIM_OFFSET(claimed) == CLAIM_OFFSET(expires_at),
				 "idem.claim_many_result has the columns of idem.claim_result in their order");

/*
 * Set the columns of idem.claim_result.  In the rows of idem_claim_many() they are
 * offset columns further right.
 */
static void
set_claim_columns(IdemAnswer *answer, int offset, const IdemKeyRow *info)
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
		claim->request = idem_args_fingerprint(PG_GETARG_DATUM(requestarg));
	claim->ttl = idem_args_ttl(fcinfo, requestarg + 1);
	claim->wait = idem_args_wait(fcinfo, requestarg + 2);
	claim->lease = NULL;
}

Datum
idem_claim(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemClaim claim;
	IdemKeyRow info;
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_claim_signature, "idem_claim()");
	idem_claim_args(fcinfo, 1, &claim);

	idem_keyrow_open(&table, RowExclusiveLock);
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
	result = PG_ARGISNULL(1) ? NULL : idem_args_jsonb(PG_GETARG_DATUM(1), "result");
	token = idem_args_optional_token(fcinfo, 2);

	idem_keyrow_open(&table, RowExclusiveLock);
	finished = token == 0 ? idem_keystore_finish(&table, &key, result) :
							idem_keystore_finish_lease(&table, &key, token, result);
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

	idem_keyrow_open(&table, RowExclusiveLock);
	if (token == 0)
		idem_keystore_release(&table, &key);
	else
		idem_keystore_release_lease(&table, &key, token);
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

	idem_keyrow_open(&table, RowExclusiveLock);
	forgotten = idem_keystore_forget(&table, &key);
	idem_table_close(&table);
	PG_RETURN_BOOL(forgotten);
}

/* One row, or none; the columns of leases are null for a plain claim */
Datum
idem_get(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable table;
	IdemKey key;
	IdemKeyRow info;

	idem_fn_begin(fcinfo, &idem_get_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_get_signature);
	idem_args_key(fcinfo, 0, 1, &key);

	idem_keyrow_open(&table, AccessShareLock);
	if (idem_keystore_get(&table, &key, &info))
	{
		char *owner = GetUserNameFromId(info.owner, true);

		/* the role may have been dropped */
		if (owner == NULL)
			owner = psprintf("%u", info.owner);
		idem_answer_string(&answer, Anum_get_result_status, idem_keyrow_status_name(info.status));
		idem_answer_jsonb(&answer, Anum_get_result_result, info.result);
		idem_answer_set(&answer, Anum_get_result_owner, NAMEOID,
						DirectFunctionCall1(namein, CStringGetDatum(owner)));
		idem_answer_text(&answer, Anum_get_result_worker, info.worker);
		if (info.lease_until != 0)
		{
			idem_answer_int32(&answer, Anum_get_result_attempt, info.attempt);
			idem_answer_int64(&answer, Anum_get_result_token, info.token);
			idem_answer_time(&answer, Anum_get_result_lease_until, info.lease_until);
		}
		idem_answer_jsonb(&answer, Anum_get_result_checkpoint, info.checkpoint);
		idem_answer_time(&answer, Anum_get_result_created_at, info.created_at);
		idem_answer_optional_time(&answer, Anum_get_result_finished_at, info.finished_at);
		idem_answer_time(&answer, Anum_get_result_expires_at, info.expires_at);
		idem_answer_put(&answer);
	}
	idem_table_close(&table);
	return (Datum) 0;
}

/* Read the array of keys, and check each of them (K12) */
static text **
get_keys(FunctionCallInfo fcinfo, int arg, int *n)
{
	Datum *elems;
	bool *nulls;
	text **keys;

	if (!idem_args_array(fcinfo, arg, "keys", &elems, &nulls, n))
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
		idem_args_check_key(keys[i]);
	}
	return keys;
}

/* Read an array of jsonb that has one element per key; false if the argument is null */
static bool
get_jsonbs(FunctionCallInfo fcinfo, int arg, const char *what, int nkeys, Datum **elems,
		   bool **nulls)
{
	int n;

	if (!idem_args_array(fcinfo, arg, what, elems, nulls, &n))
		return false;
	idem_args_check_length("keys", nkeys, what, n);
	return true;
}

/* Claim the keys one after the other, in the order of their bytes */
Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemAnswer answer;
	IdemClaim claim = {.lease = NULL};
	Datum *requests;
	bool *nulls;
	bool have_requests;
	text **keys;
	int *order;
	IdemKeyRow *rows;
	int n;
	IdemElement element = {.array = "keys"};
	ErrorContextCallback context = {
		.previous = error_context_stack, .callback = idem_args_say_element, .arg = &element};

	idem_fn_begin(fcinfo, &idem_claim_many_signature, "idem_claim_many()");
	idem_answer_begin(&answer, fcinfo, &idem_claim_many_signature);
	keys = get_keys(fcinfo, 0, &n);
	have_requests = get_jsonbs(fcinfo, 1, "requests", n, &requests, &nulls);
	claim.ttl = idem_args_ttl(fcinfo, 2);
	claim.wait = idem_args_wait(fcinfo, 3);
	claim.key.scope = idem_args_scope(fcinfo, 4);
	if (n == 0)
		return (Datum) 0;

	order = idem_args_order(keys, n);
	rows =
		MemoryContextAllocExtended(CurrentMemoryContext, n * sizeof(IdemKeyRow), MCXT_ALLOC_HUGE);
	error_context_stack = &context;
	idem_keyrow_open(&table, RowExclusiveLock);
	for (int i = 0; i < n; i++)
	{
		int ord = order[i];

		element.ord = ord;
		claim.key.key = keys[ord];
		claim.request = have_requests && !nulls[ord] ? idem_args_fingerprint(requests[ord]) : NULL;
		idem_keystore_claim(&table, &claim, &rows[ord]);
	}
	idem_table_close(&table);
	error_context_stack = context.previous;
	idem_unfinished_note_claim(fcinfo->flinfo->fn_oid);

	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		idem_answer_int32(&answer, Anum_claim_many_result_ord, i + 1);
		idem_answer_text(&answer, Anum_claim_many_result_key, keys[i]);
		set_claim_columns(&answer, CLAIM_OFFSET(claimed), &rows[i]);
		idem_answer_put(&answer);
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
		.previous = error_context_stack, .callback = idem_args_say_element, .arg = &element};

	idem_fn_begin(fcinfo, &idem_finish_many_signature, "idem_finish_many()");
	keys = get_keys(fcinfo, 0, &n);
	have_results = get_jsonbs(fcinfo, 1, "results", n, &results, &nulls);
	key.scope = idem_args_scope(fcinfo, 2);
	if (n == 0)
		PG_RETURN_INT32(0);

	idem_keyrow_open(&table, RowExclusiveLock);
	error_context_stack = &context;
	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		element.ord = i;
		key.key = keys[i];
		if (idem_keystore_finish(&table, &key,
								 have_results && !nulls[i] ?
									 idem_args_jsonb(results[i], "result") :
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
	IdemKeyRow key = {0};
	IdemKeyStatus status;

	idem_fn_begin(fcinfo, &idem_key_state_signature, NULL);
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1) || PG_ARGISNULL(3))
		PG_RETURN_NULL();
	key.is_mine = TransactionIdIsCurrentTransactionId(DatumGetTransactionId(PG_GETARG_DATUM(1)));
	key.finished_at = PG_ARGISNULL(2) ? 0 : PG_GETARG_TIMESTAMPTZ(2);
	key.expires_at = PG_GETARG_TIMESTAMPTZ(3);
	key.lease_until = PG_ARGISNULL(4) ? 0 : PG_GETARG_TIMESTAMPTZ(4);
	key.park = !PG_ARGISNULL(5) && PG_GETARG_BOOL(5);
	key.attempt = PG_ARGISNULL(6) ? 0 : PG_GETARG_INT32(6);
	key.max_attempts = PG_ARGISNULL(7) ? 0 : PG_GETARG_INT32(7);
	status = idem_keyrow_judge(&key, 0, PG_GETARG_TIMESTAMPTZ(0));
	PG_RETURN_TEXT_P(cstring_to_text(idem_keyrow_status_name(status)));
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

Datum
idem_lease(PG_FUNCTION_ARGS)
{
	static const char *const on_expiry[] = {"retry", "park", NULL};
	IdemTable table;
	IdemLease lease;
	IdemClaim claim;
	IdemKeyRow info;
	bool granted;
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_lease_signature, "idem_lease()");
	idem_args_key(fcinfo, 0, 8, &claim.key);
	lease.length = idem_args_lease(fcinfo, 1);
	claim.request = PG_ARGISNULL(2) ? NULL : idem_args_fingerprint(PG_GETARG_DATUM(2));
	claim.ttl = idem_args_ttl(fcinfo, 3);
	lease.worker = idem_args_worker(fcinfo, 4);
	lease.max_attempts = idem_args_max_attempts(fcinfo, 5);
	lease.park = idem_args_word(PG_ARGISNULL(6) ? NULL : PG_GETARG_TEXT_PP(6), "on_expiry", on_expiry,
								"Use \"retry\" if the work may run again, \"park\" if an operator must decide first.") != 0;
	claim.wait = idem_args_wait(fcinfo, 7);
	claim.lease = &lease;

	idem_keyrow_open(&table, RowExclusiveLock);
	idem_keystore_claim(&table, &claim, &info);
	idem_table_close(&table);

	if (info.status == IDEM_KEY_CLAIMED && IsTransactionBlock())
		ereport(NOTICE,
				errmsg("other sessions cannot see this lease before the transaction commits"),
				errdetail("If the transaction rolls back, the lease is lost, even if work was done under it."),
				errhint("Commit before you call an external service."));

	granted = info.status == IDEM_KEY_CLAIMED || info.status == IDEM_KEY_RESUMED;
	idem_answer_begin(&answer, fcinfo, &idem_lease_signature);
	idem_answer_bool(&answer, Anum_lease_result_claimed, granted);
	idem_answer_string(&answer, Anum_lease_result_status, idem_keyrow_status_name(info.status));
	idem_answer_jsonb(&answer, Anum_lease_result_result, info.result);
	if (granted)
	{
		/* only the holder gets the token */
		idem_answer_int64(&answer, Anum_lease_result_token, info.token);
		idem_answer_jsonb(&answer, Anum_lease_result_checkpoint, info.checkpoint);
	}
	if (info.lease_until != 0)
	{
		idem_answer_int32(&answer, Anum_lease_result_attempt, info.attempt);
		idem_answer_time(&answer, Anum_lease_result_lease_until, info.lease_until);
	}
	idem_answer_optional_time(&answer, Anum_lease_result_expires_at, info.expires_at);
	return idem_answer_row(&answer);
}

Datum
idem_renew(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	int64 token;
	int64 length;
	TimestampTz until;

	idem_fn_begin(fcinfo, &idem_renew_signature, "idem_renew()");
	idem_args_key(fcinfo, 0, 3, &key);
	token = idem_args_token(fcinfo, 1);
	length = idem_args_lease(fcinfo, 2);

	idem_keyrow_open(&table, RowExclusiveLock);
	until = idem_keystore_renew(&table, &key, token, length);
	idem_table_close(&table);
	PG_RETURN_TIMESTAMPTZ(until);
}

Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	int64 token;
	Jsonb *data;
	TimestampTz until;

	idem_fn_begin(fcinfo, &idem_checkpoint_signature, "idem_checkpoint()");
	idem_args_key(fcinfo, 0, 3, &key);
	token = idem_args_token(fcinfo, 1);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("checkpoint must not be null"),
				errdetail("The next attempt continues from the checkpoint."),
				errhint("Pass a JSON value that names the last step done, or use idem_renew() to extend only the lease."));
	data = idem_args_jsonb(PG_GETARG_DATUM(2), "data");

	idem_keyrow_open(&table, RowExclusiveLock);
	until = idem_keystore_checkpoint(&table, &key, token, data);
	idem_table_close(&table);
	PG_RETURN_TIMESTAMPTZ(until);
}

Datum
idem_fence(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	IdemKeyRow row;
	int64 token;

	idem_fn_begin(fcinfo, &idem_fence_signature, "idem_fence()");
	idem_args_key(fcinfo, 0, 2, &key);
	token = idem_args_token(fcinfo, 1);

	idem_keyrow_open(&table, RowExclusiveLock);
	idem_keystore_fence(&table, &key, token, &row);
	idem_table_close(&table);
	PG_RETURN_BOOL(true);
}

/* A wait for a key, and what the last look has found */
typedef struct KeyWait
{
	IdemKey key;
	MemoryContext context; /* of the result */
	const char *status;	   /* not allocated */
	Jsonb *result;
} KeyWait;

/* A6: does the key have no live lease any more?  Like idem_get(), this sees committed rows. */
static void
look_at_key(int i, IdemLook *look, void *arg)
{
	KeyWait *wait = arg;
	IdemKeyRow info = {0};
	IdemTable table;
	bool exists;

	idem_keyrow_open(&table, AccessShareLock);
	exists = idem_keystore_get(&table, &wait->key, &info);
	idem_table_close(&table);
	wait->status = exists ? idem_keyrow_status_name(info.status) : "absent";
	wait->result = idem_args_copy_jsonb(info.result, wait->context);
	look->found = info.status == IDEM_KEY_LIVE ? 0 : 1;
	if (info.status == IDEM_KEY_LIVE)
		look->due = info.lease_until;
}

Datum
idem_wait_key(PG_FUNCTION_ARGS)
{
	KeyWait wait = {.context = CurrentMemoryContext};
	uint64 subject;
	IdemSleep sleep = {
		.command = "idem_wait_key()",
		.kind = IDEM_SUBJECT_KEY,
		.n = 1,
		.subjects = &subject,
		.look = look_at_key,
		.arg = &wait};
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_wait_key_signature, NULL);
	idem_sleep_check(fcinfo, "idem_wait_key()");
	idem_args_key(fcinfo, 0, 2, &wait.key);
	wait.key.key = (text *) PG_DETOAST_DATUM_COPY(PointerGetDatum(wait.key.key));
	wait.key.scope = (text *) PG_DETOAST_DATUM_COPY(PointerGetDatum(wait.key.scope));
	subject = idem_waiters_key(idem_hash_name(wait.key.scope, wait.key.key));
	sleep.timeout = idem_args_timeout(fcinfo, 1);

	(void) idem_sleep_wait(&sleep);
	idem_answer_begin(&answer, fcinfo, &idem_wait_key_signature);
	idem_answer_string(&answer, Anum_idem_wait_key_status, wait.status);
	idem_answer_jsonb(&answer, Anum_idem_wait_key_result, wait.result);
	return idem_answer_row(&answer);
}
