/*
 * unfinished.c
 *		Tells a transaction that commits with keys which it claimed and never
 *		finished (rule K14).
 *
 * Such a claim is legal and final (K2).  But in autocommit mode it is mostly a
 * mistake: the claim commits before the work is done.
 *
 * Here is a number only, for a message.  What became of a key is read off its
 * row and nothing else, see keystore.c.  Each open subtransaction that has
 * claimed, finished or given up a key has a net number of claims that wait for
 * their finish.  It goes to its parent at commit and is dropped at abort, as
 * the changes to the rows are.  Functions that change the number cannot run in
 * parallel workers.
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"

#include "keys/keys.h"

/* Lives in TopTransactionContext */
typedef struct Level
{
	SubTransactionId subid;
	int64 unfinished; /* negative if it has finished claims of its parents */
	struct Level *parent;
} Level;

/* Of the innermost open subtransaction that has a number */
static Level *top = NULL;

/* A plain claim: +1; its finish, its release, or idem_forget() before the finish: -1 */
void
idem_unfinished_add(int change)
{
	SubTransactionId subid = GetCurrentSubTransactionId();

	if (top == NULL || top->subid != subid)
	{
		Level *level = MemoryContextAllocZero(TopTransactionContext, sizeof(Level));

		level->subid = subid;
		level->parent = top;
		top = level;
	}
	top->unfinished += change;
}

static void
end_level(SubTransactionId subid, SubTransactionId parent_subid, bool commit)
{
	Level *level = top;

	if (level == NULL || level->subid != subid)
		return;
	if (commit && (level->parent == NULL || level->parent->subid != parent_subid))
	{
		level->subid = parent_subid;
		return;
	}
	if (commit)
		level->parent->unfinished += level->unfinished;
	top = level->parent;
	pfree(level);
}

static void
at_subxact_event(SubXactEvent event, SubTransactionId subid, SubTransactionId parent_subid,
				 void *arg)
{
	if (event == SUBXACT_EVENT_COMMIT_SUB || event == SUBXACT_EVENT_ABORT_SUB)
		end_level(subid, parent_subid, event == SUBXACT_EVENT_COMMIT_SUB);
}

/* K14 */
static void
check_unfinished(void)
{
	if (idem_guc_require_finish == IDEM_REQUIRE_OFF || top == NULL || top->unfinished <= 0)
		return;
	ereport(idem_guc_require_finish == IDEM_REQUIRE_ERROR ? ERROR : WARNING,
			errcode(ERRCODE_IDEM_UNFINISHED),
			errmsg("transaction has not finished all idempotency keys that it claimed"),
			errdetail_plural(INT64_FORMAT " key is not finished. Committed like this it answers \"finished\" without a result, and its work does not run again.",
							 INT64_FORMAT " keys are not finished. Committed like this they answer \"finished\" without a result, and their work does not run again.",
							 (unsigned long) top->unfinished, top->unfinished),
			errhint("Begin a transaction before idem_claim(), do the work in it, and call idem_finish() before the commit; or give the claim up with idem_release(). The setting is \"%s\".",
					"idem.require_finish"));
}

/* Deferred triggers and cursors WITH HOLD have run before the first two */
static void
at_xact_event(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			check_unfinished();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
		case XACT_EVENT_ABORT:
			top = NULL;
			break;
		default:
			break;
	}
}

void
idem_unfinished_init(void)
{
	RegisterXactCallback(at_xact_event, NULL);
	RegisterSubXactCallback(at_subxact_event, NULL);
}
