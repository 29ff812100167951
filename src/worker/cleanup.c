/*
 * cleanup.c
 *		SQL function idem_cleanup: run one batch of each sweep for a caller.
 *
 * The batches are part of the caller's transaction.  They skip rows that other
 * transactions have locked, as those of the background worker do (W1, W2).
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "lib/stringinfo.h"

#include "fn/fn.h"
#include "worker/worker.h"

IDEM_FUNCTION(idem_cleanup, INT4OID, INT4OID);

/* Run a batch of a sweep; returns the number of rows removed.  Adds a skipped table to the list. */
static int
run_sweep(const IdemSweep *sweep, int max, StringInfo skipped)
{
	/* each session begins with a random page, so that calls from short sessions reach all pages */
	static uint32 page = 0;
	static bool is_first = true;
	IdemSweepBatch batch = {.max = max, .cursor.from = DT_NOBEGIN};

	if (is_first)
		page = pg_prng_uint32(&pg_global_prng_state);
	is_first = false;
	batch.cursor.page = page;
	idem_sweep_run(sweep, &batch);
	page = batch.cursor.page;
	if (batch.is_subscribed)
		appendStringInfo(skipped, "%sidem.%s", skipped->len > 0 ? ", " : "", sweep->tables[0]);
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

	initStringInfo(&skipped);
	for (int i = IDEM_FIRST_SWEEP; i <= IDEM_LAST_SWEEP; i++)
		removed += run_sweep(&idem_sweeps[i], batch, &skipped);
	if (skipped.len > 0)
		ereport(NOTICE,
				errmsg("cleanup has skipped tables that a subscription writes"),
				errdetail("Not cleaned up: %s.", skipped.data),
				errhint("The publisher removes expired rows. Cleanup continues when the subscription is dropped."));
	PG_RETURN_INT32(removed);
}
