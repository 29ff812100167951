/*
 * answer.c
 *		The rows that an SQL function returns.
 *
 * A function fills an IdemAnswer: it sets columns by their numbers in declared.h, each
 * with the setter of its type; a column that it does not set is null.  The descriptor of the
 * result is compared with the types in the declaration of this build, as fn.c does for
 * arguments, and cached for the session.  The columns of a composite type can change (ALTER TYPE),
 * so it is loaded and compared again after each change.
 */
#include "postgres.h"

#include "funcapi.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "fn/fn.h"

/*
 * Compare the columns of the result with the declaration and cache their descriptor.  A
 * composite type gets a new version in the type cache whenever it may have changed;
 * record has none.  The version is read first: if the type changes after that, the
 * next call loads the descriptor again.
 */
static void
load_row_desc(FunctionCallInfo fcinfo, IdemSignature *signature)
{
	Oid function = fcinfo->flinfo->fn_oid;
	TypeCacheEntry *type = lookup_type_cache(get_func_rettype(function), TYPECACHE_TUPDESC);
	uint64 version = type->tupDesc_identifier;
	MemoryContext oldcontext;
	TupleDesc desc;

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE ||
		!idem_version_desc_matches(desc, signature->columns, signature->natts))
		idem_version_mismatch("The function is declared with another result.");

	oldcontext = MemoryContextSwitchTo(TopMemoryContext);
	desc = BlessTupleDesc(CreateTupleDescCopy(desc));
	MemoryContextSwitchTo(oldcontext);
	/* the executor frees the descriptor of a set unless it counts references */
	desc->tdrefcount = 1;
	if (signature->row_desc != NULL && --signature->row_desc->tdrefcount == 0)
		FreeTupleDesc(signature->row_desc);
	signature->row_desc = desc;
	signature->row_type = type;
	signature->row_version = version;
	signature->row_function = function;
}

/* Descriptor of the rows to return; idem_fn_begin() asks for it before anything is done */
TupleDesc
idem_answer_desc(FunctionCallInfo fcinfo, IdemSignature *signature)
{
	if (signature->row_function != fcinfo->flinfo->fn_oid ||
		signature->row_type->tupDesc_identifier != signature->row_version)
		load_row_desc(fcinfo, signature);
	return signature->row_desc;
}

/*
 * Prepare to return a set: the rows go into the tuplestore of the result.  This does
 * what InitMaterializedSRF() does, without building a descriptor in each call.
 */
static void
begin_set(IdemAnswer *answer)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) answer->fcinfo->resultinfo;
	MemoryContext oldcontext;

	if (rsinfo == NULL || !IsA(rsinfo, ReturnSetInfo) ||
		(rsinfo->allowedModes & SFRM_Materialize) == 0)
		idem_version_mismatch("The function is not declared to return a set.");
	rsinfo->setDesc = idem_answer_desc(answer->fcinfo, answer->signature);
	oldcontext = MemoryContextSwitchTo(rsinfo->econtext->ecxt_per_query_memory);
	rsinfo->setResult = tuplestore_begin_heap(
		(rsinfo->allowedModes & SFRM_Materialize_Random) != 0, false, work_mem);
	MemoryContextSwitchTo(oldcontext);
	rsinfo->returnMode = SFRM_Materialize;
}

/* Begin the answer of a function: one row, or a set of rows, as it is declared */
void
idem_answer_begin(IdemAnswer *answer, FunctionCallInfo fcinfo, IdemSignature *signature)
{
	answer->fcinfo = fcinfo;
	answer->signature = signature;
	answer->nrows = 0;
	memset(answer->nulls, true, sizeof(answer->nulls));
	if (signature->returns_set)
		begin_set(answer);
}

/* A row of a type that has columns that were dropped: they are null */
static HeapTuple
form_wide_row(TupleDesc desc, const IdemAnswer *answer)
{
	Datum *values = palloc0_array(Datum, desc->natts);
	bool *nulls = palloc_array(bool, desc->natts);
	int n = 0;

	for (int i = 0; i < desc->natts; i++)
	{
		nulls[i] = true;
		if (TupleDescAttr(desc, i)->attisdropped)
			continue;
		Assert(n < answer->signature->natts);
		values[i] = answer->values[n];
		nulls[i] = answer->nulls[n++];
	}
	Assert(n == answer->signature->natts);
	return heap_form_tuple(desc, values, nulls);
}

/*
 * Compare the result again, after code of the user has run: it may have changed the type,
 * and a nested call may have replaced the descriptor.
 */
void
idem_answer_compare(IdemAnswer *answer)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) answer->fcinfo->resultinfo;

	rsinfo->setDesc = idem_answer_desc(answer->fcinfo, answer->signature);
}

/*
 * The one row to return.  Its descriptor is compared once more: meanwhile another session
 * may have changed the type, or a nested call may have replaced the descriptor.
 */
Datum
idem_answer_row(IdemAnswer *answer)
{
	TupleDesc desc = idem_answer_desc(answer->fcinfo, answer->signature);

	Assert(!answer->signature->returns_set);
	return HeapTupleGetDatum(likely(desc->natts == answer->signature->natts) ?
								 heap_form_tuple(desc, answer->values, answer->nulls) :
								 form_wide_row(desc, answer));
}

/* Add the row to the set to return, and begin another row */
void
idem_answer_put(IdemAnswer *answer)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) answer->fcinfo->resultinfo;
	TupleDesc desc = rsinfo->setDesc;

	Assert(answer->signature->returns_set);
	if (likely(desc->natts == answer->signature->natts))
		tuplestore_putvalues(rsinfo->setResult, desc, answer->values, answer->nulls);
	else
		tuplestore_puttuple(rsinfo->setResult, form_wide_row(desc, answer));
	answer->nrows++;
	memset(answer->nulls, true, sizeof(answer->nulls));
}
