/*
 * fn.c
 *		Declaration and result of an SQL function.
 *
 * Every SQL function calls idem_fn_begin() first.  idem_fn_begin(), idem_fn_row_desc()
 * and idem_fn_row_set() compare the declaration of the function with what the C code
 * expects.  So a library and SQL objects of different versions, or a function that
 * a superuser has declared with other types, lead to an error and not to a crash.
 *
 * A declaration is compared once per session and function: its types cannot
 * change without a change of its OID.
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "fn/fn.h"

static bool
is_declared_as(Oid function, const Oid *types)
{
	Oid *args;
	int nargs;

	if (get_func_signature(function, &args, &nargs) != types[0])
		return false;
	/* ends at the first zero if there are more arguments than types */
	for (int i = 0; i < nargs; i++)
	{
		if (args[i] != types[i + 1])
			return false;
	}
	return types[nargs + 1] == InvalidOid;
}

/*
 * Begin an SQL function.  write_command is the name of a function that writes:
 * it is refused in a read-only transaction and on a standby (K13).  NULL: the
 * function only reads.
 */
void
idem_fn_begin(FunctionCallInfo fcinfo, IdemSignature *signature, const char *write_command)
{
	Oid function = fcinfo->flinfo->fn_oid;

	if (signature->function != function)
	{
		if (!is_declared_as(function, signature->types))
			idem_version_mismatch("The function is declared with other types.");
		signature->function = function;
	}
	if (write_command != NULL)
	{
		PreventCommandIfReadOnly(write_command);
		PreventCommandIfParallelMode(write_command);
	}
}

/* Descriptor of the row to return */
TupleDesc
idem_fn_row_desc(FunctionCallInfo fcinfo, const Oid *types, int natts, IdemRowDesc *cache)
{
	if (cache->function != fcinfo->flinfo->fn_oid)
	{
		MemoryContext oldcontext;
		TupleDesc desc;

		if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE ||
			!idem_version_desc_matches(desc, types, natts))
			idem_version_mismatch("The function is declared with another result.");

		oldcontext = MemoryContextSwitchTo(TopMemoryContext);
		desc = BlessTupleDesc(CreateTupleDescCopy(desc));
		MemoryContextSwitchTo(oldcontext);
		if (cache->desc != NULL)
			FreeTupleDesc(cache->desc);
		cache->desc = desc;
		cache->function = fcinfo->flinfo->fn_oid;
	}
	return cache->desc;
}

/* Prepare to return a set: the rows go into the tuplestore of the result */
ReturnSetInfo *
idem_fn_row_set(FunctionCallInfo fcinfo, const Oid *types, int natts)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	if (!idem_version_desc_matches(rsinfo->setDesc, types, natts))
		idem_version_mismatch("The function is declared with another result.");
	return rsinfo;
}
