/*
 * lease.c
 *		SQL functions of leases: idem_lease, idem_renew, idem_checkpoint,
 *		idem_fence.  idem_finish() and idem_release() are in claim.c.
 *
 * They check their arguments, call keystore.c or leasestore.c, and form the row to
 * return.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

IDEM_FUNCTION(idem_lease);
IDEM_FUNCTION(idem_renew);
IDEM_FUNCTION(idem_checkpoint);
IDEM_FUNCTION(idem_fence);

/* The argument on_expiry: is the key parked when the lease has expired? */
static bool
get_park(FunctionCallInfo fcinfo, int arg)
{
	static const char *const words[] = {"retry", "park", NULL};

	return idem_value_word(PG_ARGISNULL(arg) ? NULL : PG_GETARG_TEXT_PP(arg), "on_expiry", words,
						   "Use \"retry\" if the work may run again, \"park\" if an operator must decide first.") != 0;
}

Datum
idem_lease(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemLease lease;
	IdemClaim claim;
	IdemKeyInfo info;
	bool granted;
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_lease_signature, "idem_lease()");
	idem_args_key(fcinfo, 0, 8, &claim.key);
	lease.length = idem_args_lease(fcinfo, 1);
	claim.request = PG_ARGISNULL(2) ? NULL : idem_value_fingerprint(PG_GETARG_DATUM(2));
	claim.ttl = idem_args_ttl(fcinfo, 3);
	lease.worker = idem_args_worker(fcinfo, 4);
	lease.max_attempts = idem_args_max_attempts(fcinfo, 5);
	lease.park = get_park(fcinfo, 6);
	claim.wait = idem_args_wait(fcinfo, 7);
	claim.lease = &lease;

	idem_keytable_open(&table, RowExclusiveLock);
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

	idem_keytable_open(&table, RowExclusiveLock);
	until = idem_leasestore_renew(&table, &key, token, length);
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
	data = idem_value_jsonb(PG_GETARG_DATUM(2), "data");

	idem_keytable_open(&table, RowExclusiveLock);
	until = idem_leasestore_checkpoint(&table, &key, token, data);
	idem_table_close(&table);
	PG_RETURN_TIMESTAMPTZ(until);
}

Datum
idem_fence(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	int64 token;

	idem_fn_begin(fcinfo, &idem_fence_signature, "idem_fence()");
	idem_args_key(fcinfo, 0, 2, &key);
	token = idem_args_token(fcinfo, 1);

	idem_keytable_open(&table, RowExclusiveLock);
	idem_leasestore_fence(&table, &key, token);
	idem_table_close(&table);
	PG_RETURN_BOOL(true);
}
