/*
 * call.c
 *		idem_call: claim a key, run a function, finish the key.
 *
 * The handler runs in the transaction and with the privileges of the caller, as if
 * the caller had called it.  An error of the handler is passed on to the caller.  It
 * rolls back the claim together with the changes of the handler (K1).
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "keys/keys.h"

#define CALL_NATTS 3

static const Oid call_types[CALL_NATTS] = {TEXTOID, JSONBOID, BOOLOID};

IDEM_FUNCTION(idem_call, RECORDOID, TEXTOID, REGPROCOID, JSONBOID, INTERVALOID, INTERVALOID,
			  TEXTOID);

/* Raise an error unless it is a function (jsonb) RETURNS jsonb that can take this payload */
static void
check_handler_signature(Form_pg_proc proc, bool payload_isnull)
{
	const char *problem = NULL;

	if (proc->prokind != PROKIND_FUNCTION)
		problem = "It is not a plain function.";
	else if (proc->pronargs != 1 || proc->proargtypes.values[0] != JSONBOID)
		problem = "It does not take one argument of type jsonb.";
	else if (proc->proretset)
		problem = "It returns a set.";
	else if (proc->prorettype != JSONBOID)
		problem = "It does not return jsonb.";

	if (problem != NULL)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("function \"%s\" cannot be a handler", NameStr(proc->proname)),
				errdetail("%s", problem),
				errhint("A handler is a function (payload jsonb) RETURNS jsonb."));
	if (proc->proisstrict && payload_isnull)
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("payload must not be null for function \"%s\"", NameStr(proc->proname)),
				errdetail("The function is strict: it would not run, and yet the key would be finished."),
				errhint("Pass a payload, or declare the function CALLED ON NULL INPUT."));
}

pg_noreturn static void
refuse_missing_handler(Oid handler)
{
	ereport(ERROR,
			errcode(ERRCODE_UNDEFINED_FUNCTION),
			errmsg("handler does not exist"),
			errdetail("There is no function with OID %u.", handler),
			errhint("Pass the name of a function (payload jsonb) RETURNS jsonb."));
}

/* Raise an error unless the caller may execute the handler with this payload */
void
idem_call_check_handler(Oid handler, bool payload_isnull)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler));
	AclResult aclresult;

	if (!HeapTupleIsValid(tuple))
		refuse_missing_handler(handler);
	check_handler_signature((Form_pg_proc) GETSTRUCT(tuple), payload_isnull);
	ReleaseSysCache(tuple);

	aclresult = object_aclcheck(ProcedureRelationId, handler, GetUserId(), ACL_EXECUTE);
	if (aclresult != ACLCHECK_OK)
		aclcheck_error(aclresult, OBJECT_FUNCTION, get_func_name(handler));
	InvokeFunctionExecuteHook(handler);
}

/*
 * SHA-256 of schema and name of the handler.  A null byte separates the two, because
 * a name cannot contain one.
 */
static void
digest_handler(Oid handler, uint8 *digest)
{
	char *name = get_func_name(handler);
	char *schema = get_namespace_name_or_temp(get_func_namespace(handler));
	StringInfoData id;

	/* another session has dropped the function meanwhile */
	if (name == NULL || schema == NULL)
		refuse_missing_handler(handler);
	initStringInfo(&id);
	appendStringInfoString(&id, schema);
	appendStringInfoChar(&id, '\0');
	appendStringInfoString(&id, name);
	idem_sha256_hash(id.data, id.len, digest);
}

/*
 * The digests to store for the request (K7), see keys.h.  The handler is identified
 * by its name, not by its OID, which changes when the function is dropped and
 * created or the database is restored.
 */
static bytea *
make_request(Oid handler, bytea *payload)
{
	uint8 digest[IDEM_SHA256_LEN];
	int payload_len = payload ? VARSIZE_ANY_EXHDR(payload) : 0;
	bytea *request = palloc(VARHDRSZ + IDEM_HANDLER_LEN + payload_len);

	digest_handler(handler, digest);
	SET_VARSIZE(request, VARHDRSZ + IDEM_HANDLER_LEN + payload_len);
	memcpy(VARDATA(request), digest, IDEM_HANDLER_LEN);
	if (payload != NULL)
		memcpy(VARDATA(request) + IDEM_HANDLER_LEN, VARDATA_ANY(payload), payload_len);
	return request;
}

/*
 * Run handler(payload).  The handler gets a new snapshot: the snapshot of the calling
 * statement was taken before the claim, which may have waited.
 */
Jsonb *
idem_call_run_handler(Oid handler, NullableDatum payload)
{
	LOCAL_FCINFO(call, 1);
	FmgrInfo flinfo;
	PgStat_FunctionCallUsage usage;
	Datum result;

	fmgr_info(handler, &flinfo);
	InitFunctionCallInfoData(*call, &flinfo, 1, InvalidOid, NULL, NULL);
	call->args[0] = payload;

	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_init_function_usage(call, &usage);
	result = FunctionCallInvoke(call);
	pgstat_end_function_usage(&usage, true);
	PopActiveSnapshot();

	return call->isnull ? NULL : idem_value_jsonb(result, "result");
}

/* The OID of the handler, which must not be null */
Oid
idem_call_handler_arg(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("handler must not be null"),
				errdetail("There is nothing to run."),
				errhint("Pass the name of a function (payload jsonb) RETURNS jsonb."));
	return PG_GETARG_OID(arg);
}

/*
 * Claim the key, and run the handler if that succeeds.  The request of the claim is the
 * digest of the payload, or NULL.  Returns true if the result in *info is that of an
 * earlier call (V6).
 */
bool
idem_call_once(Oid handler, NullableDatum payload, IdemClaim *claim, IdemKeyInfo *info)
{
	IdemTable table;

	claim->request = make_request(handler, claim->request);
	idem_keytable_open(&table, RowExclusiveLock);
	idem_keystore_claim(&table, claim, info);
	idem_table_close(&table);
	if (info->status != IDEM_KEY_CLAIMED)
		return info->status == IDEM_KEY_FINISHED;

	/* the claim may have waited, and another session may have replaced the function */
	idem_call_check_handler(handler, payload.isnull);
	/* the handler may run for long, so the table is closed and no page is pinned */
	info->result = idem_call_run_handler(handler, payload);

	idem_keytable_open(&table, RowExclusiveLock);
	(void) idem_keystore_finish(&table, &claim->key, info->result);
	idem_table_close(&table);
	info->status = IDEM_KEY_FINISHED;
	return false;
}

Datum
idem_call(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	Oid handler;
	IdemClaim claim;
	IdemKeyInfo info;
	bool replayed;
	TupleDesc desc;
	Datum values[CALL_NATTS];
	bool nulls[CALL_NATTS] = {false};

	idem_fn_begin(fcinfo, &idem_call_signature, "idem_call()");
	(void) idem_fn_row_desc(fcinfo, call_types, CALL_NATTS, &row_desc);
	handler = idem_call_handler_arg(fcinfo, 1);
	idem_call_check_handler(handler, PG_ARGISNULL(2));
	idem_claim_args(fcinfo, 2, &claim);
	replayed = idem_call_once(handler, fcinfo->args[2], &claim, &info);

	desc = idem_fn_row_desc(fcinfo, call_types, CALL_NATTS, &row_desc);
	values[0] = CStringGetTextDatum(idem_keyrow_status_name(info.status));
	values[1] = JsonbPGetDatum(info.result);
	nulls[1] = info.result == NULL;
	values[2] = BoolGetDatum(replayed);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(desc, values, nulls)));
}
