/*
 * procxact.c
 *		The transactions of a procedure, which it ends and begins itself.
 *
 * A procedure that CALL runs at top level can be without a transaction for a while (A1).  Inside
 * another procedure or a DO block a transaction must stay open: there the procedure commits, and
 * PostgreSQL begins the next transaction at once.
 *
 * The caller has checked that its transaction may be ended (idem_sleep_check).
 */
#include "postgres.h"

#include "access/xact.h"
#include "executor/spi.h"
#include "pgstat.h"
#include "utils/memutils.h"
#include "utils/portal.h"

#include "fn/fn.h"

/* Commit, and begin another transaction in a context in which its now() is the present */
static void
commit_and_begin(void)
{
	SPI_connect_ext(SPI_OPT_NONATOMIC);
	SPI_commit();
	SPI_finish();
}

/* End the transaction; at top level the session has none afterwards */
void
idem_procxact_end(bool is_nested)
{
	if (is_nested)
	{
		commit_and_begin();
		return;
	}
	ForgetPortalSnapshots();
	CommitTransactionCommand();
	/* autovacuum learns of dead rows here, and not only at the end of a long CALL */
	(void) pgstat_report_stat(false);
}

/* Begin a transaction after idem_procxact_end() */
void
idem_procxact_begin(bool is_nested, MemoryContext context)
{
	if (!is_nested)
	{
		StartTransactionCommand();
		/* else xact_start in pg_stat_activity would be the start of the CALL */
		pgstat_report_xact_timestamp(GetCurrentTimestamp());
	}
	MemoryContextSwitchTo(context);
	CHECK_FOR_INTERRUPTS();
}

/* J21: end the transaction, and begin another one whose now() is the present */
void
idem_procxact_restart(bool is_nested)
{
	MemoryContext context = CurrentMemoryContext;

	if (!is_nested)
	{
		idem_procxact_end(false);
		idem_procxact_begin(false, context);
	}
	commit_and_begin();
	CHECK_FOR_INTERRUPTS();
}

/*
 * J21: commit, and begin another transaction, also after an error of the commit, which has rolled
 * the transaction back.  Returns that error, or NULL.
 */
ErrorData *
idem_procxact_commit(void)
{
	MemoryContext context = CurrentMemoryContext;
	ErrorData *volatile error = NULL;

	SPI_connect_ext(SPI_OPT_NONATOMIC);
	PG_TRY();
	{
		SPI_commit();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		/* the rollback has failed, too */
		if (!IsTransactionState())
			ReThrowError(error);
	}
	PG_END_TRY();
	SPI_finish();
	return error;
}
