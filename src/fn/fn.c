/*
 * fn.c
 *		The declaration of an SQL function.
 *
 * Every SQL function calls idem_fn_begin() first.  It compares the declaration of the
 * function in the catalog with that of this build.  So a library and SQL objects of
 * different versions, or a function that a superuser has declared with other types,
 * lead to an error and not to a crash.  Once per session and function is enough: types cannot
 * change without a change of the function's OID.
 */
#include "postgres.h"

#include "utils/lsyscache.h"

#include "fn/fn.h"

/* Has this session called a function, or is it a process of idem?  See xact.c. */
bool idem_fn_is_used = false;

/* Set of IdemAtEnd */
uint32 idem_fn_at_end = 0;

/*
 * Begin an SQL function.  write_command is the name of a function that writes:
 * it is refused in a read-only transaction and on a standby (K13).  NULL: the
 * function only reads.  A result that does not match is refused here, before anything
 * is done.
 */
void
idem_fn_begin(FunctionCallInfo fcinfo, IdemSignature *signature, const char *write_command)
{
	Oid function = fcinfo->flinfo->fn_oid;

	idem_fn_is_used = true;
	if (signature->function != function)
	{
		Oid *args;
		int nargs;
		Oid result = get_func_signature(function, &args, &nargs);

		/* a row may be a record or have a type of its own: answer.c compares its columns */
		if ((signature->result != RECORDOID && result != signature->result) ||
			nargs != signature->nargs ||
			memcmp(args, signature->args, nargs * sizeof(Oid)) != 0)
			idem_version_mismatch("The function is declared with other types.");
		signature->function = function;
	}
	if (write_command != NULL)
	{
		PreventCommandIfReadOnly(write_command);
		PreventCommandIfParallelMode(write_command);
	}
	if (signature->natts > 0)
		(void) idem_answer_desc(fcinfo, signature);
}
