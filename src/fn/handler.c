/*
 * handler.c
 *		A handler: a function (payload jsonb) RETURNS jsonb of the user.
 *
 * It runs in the transaction and with the privileges of the caller, as if the caller had called
 * it.
 */
#include "postgres.h"

#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "funcapi.h"
#include "pgstat.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "fn/fn.h"

/* Raise the error for a handler that is not there */
void
idem_handler_refuse_missing(Oid handler)
{
	ereport(ERROR,
			errcode(ERRCODE_UNDEFINED_FUNCTION),
			errmsg("handler does not exist"),
			errdetail("There is no function with OID %u.", handler),
			errhint("Pass the name of a function (payload jsonb) RETURNS jsonb."));
}

/*
 * Raise an error unless it is a function (jsonb) RETURNS jsonb that can take this payload, and that
 * the caller may execute.
 */
void
idem_handler_check(Oid handler, bool payload_isnull)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler));
	Form_pg_proc proc;
	const char *problem = NULL;
	AclResult aclresult;

	if (!HeapTupleIsValid(tuple))
		idem_handler_refuse_missing(handler);
	proc = (Form_pg_proc) GETSTRUCT(tuple);
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
	ReleaseSysCache(tuple);

	aclresult = object_aclcheck(ProcedureRelationId, handler, GetUserId(), ACL_EXECUTE);
	if (aclresult != ACLCHECK_OK)
		aclcheck_error(aclresult, OBJECT_FUNCTION, get_func_name(handler));
	InvokeFunctionExecuteHook(handler);
}

/*
 * Run handler(payload).  The handler gets a new snapshot: the snapshot of the calling
 * statement was taken before the claim, which may have waited.
 */
Jsonb *
idem_handler_run(Oid handler, NullableDatum payload)
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

	return call->isnull ? NULL : idem_args_jsonb(result, "result");
}

/* The OID of the handler, which must not be null */
Oid
idem_handler_arg(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("handler must not be null"),
				errdetail("There is nothing to run."),
				errhint("Pass the name of a function (payload jsonb) RETURNS jsonb."));
	return PG_GETARG_OID(arg);
}
