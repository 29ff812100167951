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

IDEM_FUNCTION(idem_wait_key);

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
