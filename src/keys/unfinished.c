/*
 * unfinished.c
 *		Report a transaction that commits without finishing its claims (K14).
 *
 * Such a claim is valid and final (K2).  But in autocommit mode it is mostly a
 * mistake: the claim commits before the work is done.
 *
 * This file counts claims in backend memory, only for the message.  The state of a
 * key is always read from its row, see keystore.c.  Each open subtransaction that
 * has claimed, finished, released or forgotten a key has a level with the number
 * of its claims minus the number of its finishes, releases and forgets.  When the
 * subtransaction commits, its number is added to that of its parent.  When it
 * aborts, its number is dropped.  This is what happens to its changes of rows, too.
 * Functions that change the number refuse to run in parallel mode.
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"

#include "keys/keys.h"

/* Claims that a subtransaction has not finished; allocated in TopTransactionContext */
typedef struct Level
{
	SubTransactionId subid;
	int64 unfinished; /* negative if the subtransaction has finished claims of its parents */
	struct Level *parent;
} Level;

/* Level of the innermost open subtransaction that has one */
static Level *current_level = NULL;

/* A plain claim adds 1; its finish, its release, or a forget before the finish adds -1 */
void
idem_unfinished_add(int change)
{
	SubTransactionId subid = GetCurrentSubTransactionId();

	if (current_level == NULL || current_level->subid != subid)
	{
		Level *level = MemoryContextAllocZero(TopTransactionContext, sizeof(Level));

		level->subid = subid;
		level->parent = current_level;
		current_level = level;
	}
	current_level->unfinished += change;
}

/* A subtransaction has ended: pass its number on to the parent, or drop it */
static void
end_level(SubTransactionId subid, SubTransactionId parent_subid, bool commit)
{
	Level *level = current_level;

	if (level == NULL || level->subid != subid)
		return;
	if (commit && (level->parent == NULL || level->parent->subid != parent_subid))
	{
		level->subid = parent_subid;
		return;
	}
	if (commit)
		level->parent->unfinished += level->unfinished;
	current_level = level->parent;
	pfree(level);
}

static void
at_subxact_event(SubXactEvent event, SubTransactionId subid, SubTransactionId parent_subid,
				 void *arg)
{
	if (event == SUBXACT_EVENT_COMMIT_SUB || event == SUBXACT_EVENT_ABORT_SUB)
		end_level(subid, parent_subid, event == SUBXACT_EVENT_COMMIT_SUB);
}

/* Raise a WARNING or an error if this transaction has claims that it has not finished (K14) */
static void
check_unfinished(void)
{
	if (idem_guc_require_finish == IDEM_REQUIRE_OFF || current_level == NULL ||
		current_level->unfinished <= 0)
		return;
	ereport(idem_guc_require_finish == IDEM_REQUIRE_ERROR ? ERROR : WARNING,
			errcode(ERRCODE_IDEM_UNFINISHED),
			errmsg("transaction has not finished all idempotency keys that it claimed"),
			errdetail_plural(INT64_FORMAT " key is not finished. After the commit it answers \"finished\" without a result, and its work does not run again.",
							 INT64_FORMAT " keys are not finished. After the commit they answer \"finished\" without a result, and their work does not run again.",
							 (unsigned long) current_level->unfinished, current_level->unfinished),
			errhint("Begin a transaction before idem_claim(), do the work in it, and call idem_finish() before the commit; or release the claim with idem_release(). The setting \"%s\" controls this check.",
					"idem.require_finish"));
}

/* Deferred triggers and cursors WITH HOLD have already run at PRE_COMMIT and PRE_PREPARE */
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
			current_level = NULL;
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
