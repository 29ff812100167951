/*
 * waitkey.c
 *		Procedure that waits for the end of leased work: idem_wait_key.
 *
 * It checks its arguments and says how to look; src/wake/sleep.c has the loop.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"

#include "keys/keys.h"

#define WAIT_KEY_NATTS 2

static const Oid wait_key_types[WAIT_KEY_NATTS] = {TEXTOID, JSONBOID};

IDEM_FUNCTION(idem_wait_key, RECORDOID, TEXTOID, INTERVALOID, TEXTOID, TEXTOID, JSONBOID);

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
	IdemKeyInfo info = {0};
	IdemTable table;
	bool exists;

	idem_keytable_open(&table, AccessShareLock);
	exists = idem_keystore_get(&table, &wait->key, &info);
	idem_table_close(&table);
	wait->status = exists ? idem_keyrow_status_name(info.status) : "absent";
	wait->result = idem_value_copy_jsonb(info.result, wait->context);
	look->found = info.status == IDEM_KEY_LIVE ? 0 : 1;
	if (info.status == IDEM_KEY_LIVE)
		look->due = info.lease_until;
}

Datum
idem_wait_key(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	KeyWait wait = {.context = CurrentMemoryContext};
	uint64 subject;
	IdemSleep sleep = {
		.command = "idem_wait_key()",
		.kind = IDEM_SUBJECT_KEY,
		.n = 1,
		.subjects = &subject,
		.look = look_at_key,
		.arg = &wait};
	Datum values[WAIT_KEY_NATTS];
	bool nulls[WAIT_KEY_NATTS] = {false};

	idem_fn_begin(fcinfo, &idem_wait_key_signature, NULL);
	(void) idem_fn_row_desc(fcinfo, wait_key_types, WAIT_KEY_NATTS, &row_desc);
	idem_sleep_check(fcinfo, "idem_wait_key()");
	idem_args_key(fcinfo, 0, 2, &wait.key);
	wait.key.key = (text *) PG_DETOAST_DATUM_COPY(PointerGetDatum(wait.key.key));
	wait.key.scope = (text *) PG_DETOAST_DATUM_COPY(PointerGetDatum(wait.key.scope));
	subject = idem_waiters_key(idem_hash_name(wait.key.scope, wait.key.key));
	sleep.timeout = idem_args_timeout(fcinfo, 1);

	(void) idem_sleep_wait(&sleep);
	values[0] = CStringGetTextDatum(wait.status);
	values[1] = JsonbPGetDatum(wait.result);
	nulls[1] = wait.result == NULL;
	PG_RETURN_DATUM(HeapTupleGetDatum(idem_fn_form_row(
		idem_fn_row_desc(fcinfo, wait_key_types, WAIT_KEY_NATTS, &row_desc), values, nulls,
		lengthof(values))));
}
