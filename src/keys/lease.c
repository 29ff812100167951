/*
 * lease.c
 *		SQL functions for work that leaves the database: idem_lease, idem_renew,
 *		idem_checkpoint, idem_fence.  A lease is finished and given up with
 *		idem_finish() and idem_release(), see claim.c.
 *
 * They check their arguments, call the store, and form the row to return.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "idem.h"

#define LEASE_NATTS 8

static const Oid lease_types[LEASE_NATTS] = {
	BOOLOID, TEXTOID, JSONBOID, INT8OID, INT4OID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID};

IDEM_FUNCTION(idem_lease, RECORDOID, TEXTOID, INTERVALOID, JSONBOID, INTERVALOID, TEXTOID, INT4OID,
			  TEXTOID, INTERVALOID, TEXTOID);
IDEM_FUNCTION(idem_renew, TIMESTAMPTZOID, TEXTOID, INT8OID, INTERVALOID, TEXTOID);
IDEM_FUNCTION(idem_checkpoint, TIMESTAMPTZOID, TEXTOID, INT8OID, JSONBOID, TEXTOID);
IDEM_FUNCTION(idem_fence, BOOLOID, TEXTOID, INT8OID, TEXTOID);

/* Is the key to be parked when the lease has run out? */
static bool
get_on_expiry(FunctionCallInfo fcinfo, int arg)
{
	char *value = PG_ARGISNULL(arg) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(arg));

	if (value != NULL && strcmp(value, "retry") == 0)
		return false;
	if (value != NULL && strcmp(value, "park") == 0)
		return true;
	ereport(ERROR,
			errcode(value == NULL ? ERRCODE_NULL_VALUE_NOT_ALLOWED : ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid value of \"%s\"", "on_expiry"),
			errdetail("The values are \"retry\" and \"park\"."),
			errhint("Use \"retry\" if the work may be done once more, \"park\" if an operator has to look first."));
}

/* claimed, status, result, token, attempt, checkpoint, lease_until, expires_at */
static Datum
form_lease_row(TupleDesc desc, const IdemRow *row)
{
	bool granted = row->status == IDEM_CLAIMED || row->status == IDEM_RESUMED;
	Datum values[LEASE_NATTS] = {0};
	bool nulls[LEASE_NATTS];

	values[0] = BoolGetDatum(granted);
	values[1] = CStringGetTextDatum(idem_keyrow_status_name(row->status));
	values[2] = JsonbPGetDatum(row->result);
	values[3] = Int64GetDatum(row->token);
	values[4] = Int32GetDatum(row->attempt);
	values[5] = JsonbPGetDatum(row->checkpoint);
	values[6] = TimestampTzGetDatum(row->lease_until);
	values[7] = TimestampTzGetDatum(row->expires_at);

	nulls[0] = nulls[1] = false;
	nulls[2] = row->result == NULL;
	nulls[3] = !granted; /* a token is for its holder */
	nulls[4] = row->lease_until == 0;
	nulls[5] = !granted || row->checkpoint == NULL;
	nulls[6] = row->lease_until == 0;
	nulls[7] = row->expires_at == 0;
	return HeapTupleGetDatum(heap_form_tuple(desc, values, nulls));
}

Datum
idem_lease(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	IdemTable table;
	IdemLease lease;
	IdemClaim claim;
	IdemRow row;
	TupleDesc desc;

	idem_args_begin(fcinfo, &idem_lease_signature, "idem_lease()");
	desc = idem_args_row_desc(fcinfo, lease_types, LEASE_NATTS, &row_desc);
	idem_args_key(fcinfo, 0, 8, &claim.key);
	lease.length = idem_args_lease(fcinfo, 1);
	claim.request = PG_ARGISNULL(2) ? NULL : idem_args_fingerprint(PG_GETARG_DATUM(2));
	claim.ttl = idem_args_ttl(fcinfo, 3);
	lease.worker = idem_args_worker(fcinfo, 4);
	lease.max_attempts = idem_args_max_attempts(fcinfo, 5);
	lease.park = get_on_expiry(fcinfo, 6);
	claim.wait = idem_args_wait(fcinfo, 7);
	claim.lease = &lease;

	idem_keytable_open(&table, RowExclusiveLock);
	idem_keystore_claim(&table, &claim, &row);
	idem_table_close(&table);

	if (row.status == IDEM_CLAIMED && IsTransactionBlock())
		ereport(NOTICE,
				errmsg("others cannot see this lease before the transaction commits"),
				errdetail("A rollback takes the lease away, whatever was done on the strength of it."),
				errhint("Commit before you call the outside world."));
	PG_RETURN_DATUM(form_lease_row(desc, &row));
}

Datum
idem_renew(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	int64 token;
	int64 length;
	TimestampTz until;

	idem_args_begin(fcinfo, &idem_renew_signature, "idem_renew()");
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

	idem_args_begin(fcinfo, &idem_checkpoint_signature, "idem_checkpoint()");
	idem_args_key(fcinfo, 0, 3, &key);
	token = idem_args_token(fcinfo, 1);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("checkpoint must not be null"),
				errdetail("It is what the next attempt goes on from."),
				errhint("Pass a JSON value that names the last step done, or use idem_renew() to keep the lease only."));
	data = idem_args_jsonb(PG_GETARG_DATUM(2), "data");

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

	idem_args_begin(fcinfo, &idem_fence_signature, "idem_fence()");
	idem_args_key(fcinfo, 0, 2, &key);
	token = idem_args_token(fcinfo, 1);

	idem_keytable_open(&table, RowExclusiveLock);
	idem_leasestore_fence(&table, &key, token);
	idem_table_close(&table);
	PG_RETURN_BOOL(true);
}
