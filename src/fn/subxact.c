/*
 * subxact.c
 *		Run code in a subtransaction, as an EXCEPTION block of PL/pgSQL does.
 *
 * An error never leaves a subtransaction of this file open: the caller may itself run in the
 * EXCEPTION block of a function, which ends its own subtransaction and no other.
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "fn/fn.h"

/*
 * V2, J21: a cancel, a timeout of the statement; or a shutdown, which the code itself has raised or
 * has got from another server: that of this backend is FATAL, and no handler catches it.
 */
bool
idem_subxact_is_intervention(const ErrorData *error)
{
	return ERRCODE_TO_CATEGORY(error->sqlerrcode) == ERRCODE_OPERATOR_INTERVENTION;
}

/* V2: lack of memory or disk space, an I/O error, damaged data */
bool
idem_subxact_is_of_server(const ErrorData *error)
{
	switch (ERRCODE_TO_CATEGORY(error->sqlerrcode))
	{
		case ERRCODE_INSUFFICIENT_RESOURCES:
		case ERRCODE_SYSTEM_ERROR:
			return true;
		default:
			return error->sqlerrcode == ERRCODE_DATA_CORRUPTED ||
				error->sqlerrcode == ERRCODE_INDEX_CORRUPTED;
	}
}

/*
 * V2, T7: is it an error of the code that runs?  The others concern the session or the server;
 * and after a serialization failure or a deadlock the whole transaction has to be repeated.
 */
static bool
is_of_code(const ErrorData *error)
{
	return !idem_subxact_is_intervention(error) && !idem_subxact_is_of_server(error) &&
		ERRCODE_TO_CATEGORY(error->sqlerrcode) != ERRCODE_TRANSACTION_ROLLBACK;
}

/* Run in a subtransaction; keep: commit it if there is no error.  Returns the error, or NULL. */
static ErrorData *
run_in_subxact(void (*run)(void *arg), void *arg, bool keep)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	ErrorData *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		run(arg);
		if (keep)
			ReleaseCurrentSubTransaction();
		else
			RollbackAndReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return error;
}

/*
 * Run in a subtransaction, which is rolled back if the code raises an error, or if it is not to
 * be kept.  Returns the error, or NULL.  Errors of others are raised again (V2).
 */
ErrorData *
idem_subxact_try(void (*run)(void *arg), void *arg, bool keep)
{
	ErrorData *error = run_in_subxact(run, arg, keep);

	if (error != NULL && !is_of_code(error))
		ReThrowError(error);
	return error;
}

/* J21: the same, and keep it; returns the error, whatever it is */
ErrorData *
idem_subxact_catch(void (*run)(void *arg), void *arg)
{
	return run_in_subxact(run, arg, true);
}

/* Run in a subtransaction, and roll it back (V1).  Every error is raised again. */
void
idem_subxact_undo(void (*run)(void *arg), void *arg)
{
	ErrorData *error = run_in_subxact(run, arg, false);

	if (error != NULL)
		ReThrowError(error);
}

/* SQLSTATE and message */
char *
idem_subxact_describe(const ErrorData *error)
{
	return psprintf("%s: %s", unpack_sql_state(error->sqlerrcode),
					error->message != NULL ? error->message : "missing error text");
}
