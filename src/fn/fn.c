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
 * change without a change of its OID.  The columns of a composite type can change
 * (ALTER TYPE), so they are compared again after each change.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"
#include "utils/typcache.h"

#include "fn/fn.h"

static bool
is_declared_as(Oid function, const Oid *types)
{
	Oid *args;
	int nargs;
	Oid result = get_func_signature(function, &args, &nargs);

	/* a row may be a record or have a type of its own: load_row_desc() checks it */
	if (types[0] != RECORDOID && result != types[0])
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

/*
 * Compare the columns of the result with types and cache their descriptor.  A
 * composite type gets a new version in the type cache whenever it may have changed;
 * record has none.  The version is read first: if the type changes after that, the
 * next call loads the descriptor again.
 */
static void
load_row_desc(FunctionCallInfo fcinfo, const Oid *types, int natts, IdemRowDesc *cache)
{
	Oid function = fcinfo->flinfo->fn_oid;
	TypeCacheEntry *type = lookup_type_cache(get_func_rettype(function), TYPECACHE_TUPDESC);
	uint64 version = type->tupDesc_identifier;
	MemoryContext oldcontext;
	TupleDesc desc;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE ||
		!idem_version_desc_matches(desc, types, natts))
		idem_version_mismatch("The function is declared with another result.");

	oldcontext = MemoryContextSwitchTo(TopMemoryContext);
	desc = BlessTupleDesc(CreateTupleDescCopy(desc));
	MemoryContextSwitchTo(oldcontext);
	/* the executor frees the descriptor of a set unless it counts references */
	desc->tdrefcount = 1;
	if (cache->desc != NULL && --cache->desc->tdrefcount == 0)
		FreeTupleDesc(cache->desc);
	cache->desc = desc;
	cache->type = type;
	cache->version = version;
	cache->function = function;
}

/*
 * Descriptor of the row to return.  A function that returns one row calls this twice:
 * at its start, to refuse a result that does not match before it does anything, and
 * when it forms the row, because meanwhile another session may have changed the type,
 * or a nested call may have replaced the cached descriptor.
 */
TupleDesc
idem_fn_row_desc(FunctionCallInfo fcinfo, const Oid *types, int natts, IdemRowDesc *cache)
{
	if (cache->function != fcinfo->flinfo->fn_oid ||
		cache->type->tupDesc_identifier != cache->version)
		load_row_desc(fcinfo, types, natts, cache);
	return cache->desc;
}

/*
 * Prepare to return a set: the rows go into the tuplestore of the result.  This does
 * what InitMaterializedSRF() does, without building a descriptor in each call.
 */
ReturnSetInfo *
idem_fn_row_set(FunctionCallInfo fcinfo, const Oid *types, int natts, IdemRowDesc *cache)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	MemoryContext oldcontext;

	if (rsinfo == NULL || !IsA(rsinfo, ReturnSetInfo) ||
		(rsinfo->allowedModes & SFRM_Materialize) == 0)
		idem_version_mismatch("The function is not declared to return a set.");
	rsinfo->setDesc = idem_fn_row_desc(fcinfo, types, natts, cache);
	oldcontext = MemoryContextSwitchTo(rsinfo->econtext->ecxt_per_query_memory);
	rsinfo->setResult = tuplestore_begin_heap(
		(rsinfo->allowedModes & SFRM_Materialize_Random) != 0, false, work_mem);
	MemoryContextSwitchTo(oldcontext);
	rsinfo->returnMode = SFRM_Materialize;
	return rsinfo;
}

/* A row of a type that has columns that were dropped: they are null */
HeapTuple
idem_fn_form_wide_row(TupleDesc desc, Datum *values, bool *nulls, int natts)
{
	Datum *all_values = palloc0_array(Datum, desc->natts);
	bool *all_nulls = palloc_array(bool, desc->natts);
	int n = 0;

	for (int i = 0; i < desc->natts; i++)
	{
		all_nulls[i] = true;
		if (TupleDescAttr(desc, i)->attisdropped)
			continue;
		Assert(n < natts);
		all_values[i] = values[n];
		all_nulls[i] = nulls[n++];
	}
	Assert(n == natts);
	return heap_form_tuple(desc, all_values, all_nulls);
}
