/*
 * claim.c
 *		SQL functions for one key: idem_claim, idem_finish, idem_release,
 *		idem_get, idem_forget.
 *
 * They check their arguments, call the store, and form the row to return.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "idem.h"

#define CLAIM_NATTS 5
#define GET_NATTS	11

static const Oid claim_types[CLAIM_NATTS] = {
	BOOLOID, TEXTOID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID};
static const Oid get_types[GET_NATTS] = {
	TEXTOID, JSONBOID, NAMEOID, TEXTOID, INT4OID, INT8OID,
	JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID};

IDEM_FUNCTION(idem_claim, RECORDOID, TEXTOID, JSONBOID, INTERVALOID, INTERVALOID, TEXTOID);
IDEM_FUNCTION(idem_finish, BOOLOID, TEXTOID, JSONBOID, INT8OID, TEXTOID);
IDEM_FUNCTION(idem_release, BOOLOID, TEXTOID, INT8OID, TEXTOID);
IDEM_FUNCTION(idem_get, RECORDOID, TEXTOID, TEXTOID);
IDEM_FUNCTION(idem_forget, BOOLOID, TEXTOID, TEXTOID);

/* claimed, status, result, created_at, expires_at */
void
idem_claim_row_values(const IdemRow *row, Datum *values, bool *nulls)
{
	values[0] = BoolGetDatum(row->status == IDEM_CLAIMED);
	values[1] = CStringGetTextDatum(idem_keyrow_status_name(row->status));
	values[2] = JsonbPGetDatum(row->result);
	values[3] = TimestampTzGetDatum(row->created_at);
	values[4] = TimestampTzGetDatum(row->expires_at);

	nulls[0] = nulls[1] = false;
	nulls[2] = row->result == NULL;
	nulls[3] = nulls[4] = row->status == IDEM_BUSY;
}

Datum
idem_claim(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	IdemTable table;
	IdemClaim claim;
	IdemRow row;
	TupleDesc desc;
	Datum values[CLAIM_NATTS];
	bool nulls[CLAIM_NATTS];

	idem_args_begin(fcinfo, &idem_claim_signature, "idem_claim()");
	desc = idem_args_row_desc(fcinfo, claim_types, CLAIM_NATTS, &row_desc);
	idem_args_claim(fcinfo, 1, &claim);

	idem_keytable_open(&table, RowExclusiveLock);
	idem_keystore_claim(&table, &claim, &row);
	idem_table_close(&table);

	idem_claim_row_values(&row, values, nulls);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(desc, values, nulls)));
}

/* True: finished now, false: it was so already, with an equal result (K11, L3) */
Datum
idem_finish(PG_FUNCTION_ARGS)
{
	IdemTable table;
	IdemKey key;
	Jsonb *result;
	int64 token;
	bool finished;

	idem_args_begin(fcinfo, &idem_finish_signature, "idem_finish()");
	idem_args_key(fcinfo, 0, 3, &key);
	result = PG_ARGISNULL(1) ? NULL : idem_args_jsonb(PG_GETARG_DATUM(1), "result");
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

	idem_args_begin(fcinfo, &idem_release_signature, "idem_release()");
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

	idem_args_begin(fcinfo, &idem_forget_signature, "idem_forget()");
	idem_args_key(fcinfo, 0, 1, &key);

	idem_keytable_open(&table, RowExclusiveLock);
	forgotten = idem_keystore_forget(&table, &key);
	idem_table_close(&table);
	PG_RETURN_BOOL(forgotten);
}

/* Name of a role, or its OID if it was dropped */
static Datum
role_name(Oid role)
{
	char *name = GetUserNameFromId(role, true);

	if (name == NULL)
		name = psprintf("%u", role);
	return DirectFunctionCall1(namein, CStringGetDatum(name));
}

/* Columns that belong to leases are null for a plain claim */
static void
put_get_row(ReturnSetInfo *rsinfo, const IdemRow *row)
{
	Datum values[GET_NATTS] = {0};
	bool nulls[GET_NATTS];

	memset(nulls, true, sizeof(nulls));
#define SET(i, datum) (values[i] = (datum), nulls[i] = false)
	SET(0, CStringGetTextDatum(idem_keyrow_status_name(row->status)));
	if (row->result != NULL)
		SET(1, JsonbPGetDatum(row->result));
	SET(2, role_name(row->owner));
	if (row->worker != NULL)
		SET(3, PointerGetDatum(row->worker));
	if (row->lease_until != 0)
	{
		SET(4, Int32GetDatum(row->attempt));
		SET(5, Int64GetDatum(row->token));
		SET(9, TimestampTzGetDatum(row->lease_until));
	}
	if (row->checkpoint != NULL)
		SET(6, JsonbPGetDatum(row->checkpoint));
	SET(7, TimestampTzGetDatum(row->created_at));
	if (row->finished_at != 0)
		SET(8, TimestampTzGetDatum(row->finished_at));
	SET(10, TimestampTzGetDatum(row->expires_at));
#undef SET
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

Datum
idem_get(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo;
	IdemTable table;
	IdemKey key;
	IdemRow row;

	idem_args_begin(fcinfo, &idem_get_signature, NULL);
	rsinfo = idem_args_row_set(fcinfo, get_types, GET_NATTS);
	idem_args_key(fcinfo, 0, 1, &key);

	idem_keytable_open(&table, AccessShareLock);
	if (idem_keystore_get(&table, &key, &row))
		put_get_row(rsinfo, &row);
	idem_table_close(&table);
	return (Datum) 0;
}
