/*
 * cleanup.c
 *		SQL function idem_cleanup: run one batch of each sweep for a caller.
 *
 * The batches are part of the caller's transaction.  They skip rows that other
 * transactions have locked, as those of the background worker do (W1, W2).
 *
 * The backend remembers where each sweep has stopped, and the next call continues there,
 * because the index entries of the rows removed before are still there and would be read
 * again.  The place is only a hint.  A call that finds nothing more from there on begins again
 * with the oldest rows.  After a rollback the rows removed are back, so the place is forgotten.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "datatype/timestamp.h"
#include "lib/stringinfo.h"

#include "cleanup/cleanup.h"
#include "fn/fn.h"

IDEM_FUNCTION(idem_cleanup);

/* Where the next call continues */
static IdemCleanupCursor cursors[IDEM_LAST_SWEEP + 1];

/* The next call begins with the oldest rows */
static void
forget_places(void)
{
	for (int i = IDEM_FIRST_SWEEP; i <= IDEM_LAST_SWEEP; i++)
		cursors[i].from = DT_NOBEGIN;
}

/* What a prepared transaction has removed may come back, too */
static void
at_xact_event(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		forget_places();
}

static void
at_subxact_event(SubXactEvent event, SubTransactionId subid, SubTransactionId parent_subid,
				 void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
		forget_places();
}

static void
init_cursors(void)
{
	static bool is_done = false;

	if (is_done)
		return;
	RegisterXactCallback(at_xact_event, NULL);
	RegisterSubXactCallback(at_subxact_event, NULL);
	forget_places();
	/* each session begins with a random page, so that calls from short sessions reach all pages */
	cursors[IDEM_PHASE_JOBS].page = pg_prng_uint32(&pg_global_prng_state);
	is_done = true;
}

/* Run a batch of a sweep; returns the number of rows removed.  Adds a skipped table to the list. */
static int
run_sweep(IdemPhase phase, int max, StringInfo skipped)
{
	const IdemSweep *sweep = &idem_sweeps[phase];
	IdemSweepBatch batch = {.max = max, .cursor = cursors[phase]};

	idem_sweep_run(sweep, &batch);
	/* rows may be left that expired earlier: they were locked, came back, or are new */
	if (!batch.more && !TIMESTAMP_IS_NOBEGIN(cursors[phase].from))
	{
		batch.cursor.from = DT_NOBEGIN;
		idem_sweep_run(sweep, &batch);
	}
	cursors[phase] = batch.cursor;
	if (!batch.more)
		cursors[phase].from = DT_NOBEGIN;
	if (batch.is_subscribed)
		appendStringInfo(skipped, "%sidem.%s", skipped->len > 0 ? ", " : "", sweep->tables.written[0]);
	return batch.removed;
}

static int
get_batch_size(FunctionCallInfo fcinfo, int arg)
{
	int batch;

	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", "batch"),
				errdetail("It is the number of rows to remove from each table at most."),
				errhint("Leave it out for the default."));
	batch = PG_GETARG_INT32(arg);
	if (batch < 1 || batch > IDEM_MAX_CLEANUP_BATCH)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid batch"),
				errdetail("The batch is %d; it must be between 1 and %d.",
						  batch, IDEM_MAX_CLEANUP_BATCH),
				errhint("Call %s again until it returns 0.", "idem_cleanup()"));
	return batch;
}

Datum
idem_cleanup(PG_FUNCTION_ARGS)
{
	int batch;
	int removed = 0;
	StringInfoData skipped;

	idem_fn_begin(fcinfo, &idem_cleanup_signature, "idem_cleanup()");
	batch = get_batch_size(fcinfo, 0);

	init_cursors();
	initStringInfo(&skipped);
	for (int i = IDEM_FIRST_SWEEP; i <= IDEM_LAST_SWEEP; i++)
		removed += run_sweep(i, batch, &skipped);
	if (skipped.len > 0)
		ereport(NOTICE,
				errmsg("cleanup has skipped tables that a subscription writes"),
				errdetail("Not cleaned up: %s.", skipped.data),
				errhint("The publisher removes expired rows. Cleanup continues when the subscription is dropped."));
	PG_RETURN_INT32(removed);
}
