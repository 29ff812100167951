/*
 * call.c
 *		idem_call: claim a key, run a function, finish the key.
 *
 * The handler runs in the transaction and with the privileges of the caller, as if
 * the caller had called it.  An error of the handler is passed on to the caller.  It
 * rolls back the claim together with the changes of the handler (K1).
 */
#include "postgres.h"

#include "funcapi.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "keys/keys.h"

IDEM_FUNCTION(idem_call);

/* The digest of the handler called last; invalid: none, or a function or schema has changed */
static Oid digest_of = InvalidOid;
static uint8 handler_digest[IDEM_SHA256_LEN];
static bool is_digest_valid;

static void
forget_digest(Datum arg, int cacheid, uint32 hashvalue)
{
	is_digest_valid = false;
}

/*
 * SHA-256 of schema and name of the handler.  A null byte separates the two, because a name cannot
 * contain one.  An invalidation that arrives while the names are read counts, too.
 */
static const uint8 *
digest_handler(Oid handler)
{
	static bool is_registered = false;
	char *name;
	char *schema;
	StringInfoData id;

	if (handler == digest_of && is_digest_valid)
		return handler_digest;
	if (!is_registered)
	{
		CacheRegisterSyscacheCallback(PROCOID, forget_digest, (Datum) 0);
		CacheRegisterSyscacheCallback(NAMESPACEOID, forget_digest, (Datum) 0);
		is_registered = true;
	}
	digest_of = InvalidOid;
	is_digest_valid = true;
	name = get_func_name(handler);
	schema = get_namespace_name_or_temp(get_func_namespace(handler));
	/* another session has dropped the function meanwhile */
	if (name == NULL || schema == NULL)
		idem_handler_refuse_missing(handler);
	initStringInfo(&id);
	appendStringInfoString(&id, schema);
	appendStringInfoChar(&id, '\0');
	appendStringInfoString(&id, name);
	idem_sha256_hash(id.data, id.len, handler_digest);
	digest_of = handler;
	return handler_digest;
}

/*
 * Claim the key, and run the handler if that succeeds.  The request of the claim is the
 * digest of the payload, or NULL; what is stored begins with a digest of the handler (K7), see
 * keys.h.  The handler is identified by its name, not by its OID, which changes when the function
 * is dropped and created or the database is restored.  Returns true if the result in *info is
 * that of an earlier call (V6).
 */
bool
idem_call_once(Oid handler, NullableDatum payload, IdemClaim *claim, IdemKeyRow *info)
{
	IdemTable table;
	int payload_len = claim->request ? VARSIZE_ANY_EXHDR(claim->request) : 0;
	bytea *request = palloc(VARHDRSZ + IDEM_HANDLER_LEN + payload_len);

	SET_VARSIZE(request, VARHDRSZ + IDEM_HANDLER_LEN + payload_len);
	memcpy(VARDATA(request), digest_handler(handler), IDEM_HANDLER_LEN);
	if (payload_len > 0)
		memcpy(VARDATA(request) + IDEM_HANDLER_LEN, VARDATA_ANY(claim->request), payload_len);
	claim->request = request;
	idem_keyrow_open(&table, RowExclusiveLock);
	idem_keystore_claim(&table, claim, info);
	idem_table_close(&table);
	if (info->status != IDEM_KEY_CLAIMED)
		return info->status == IDEM_KEY_FINISHED;

	/* the claim may have waited, and another session may have replaced the function */
	idem_handler_check(handler, payload.isnull);
	/* the handler may run for long, so the table is closed and no page is pinned */
	info->result = idem_handler_run(handler, payload);

	idem_keyrow_open(&table, RowExclusiveLock);
	(void) idem_keystore_finish(&table, &claim->key, info->result);
	idem_table_close(&table);
	info->status = IDEM_KEY_FINISHED;
	return false;
}

Datum
idem_call(PG_FUNCTION_ARGS)
{
	Oid handler;
	IdemClaim claim;
	IdemKeyRow info;
	bool replayed;
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_call_signature, "idem_call()");
	handler = idem_handler_arg(fcinfo, 1);
	idem_handler_check(handler, PG_ARGISNULL(2));
	idem_claim_args(fcinfo, 2, &claim);
	replayed = idem_call_once(handler, fcinfo->args[2], &claim, &info);

	idem_answer_begin(&answer, fcinfo, &idem_call_signature);
	idem_answer_string(&answer, Anum_call_result_status, idem_keyrow_status_name(info.status));
	idem_answer_jsonb(&answer, Anum_call_result_result, info.result);
	idem_answer_bool(&answer, Anum_call_result_replayed, replayed);
	return idem_answer_row(&answer);
}
