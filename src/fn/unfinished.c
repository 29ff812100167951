/*
 * unfinished.c
 *		Report a transaction that commits with work that it has begun and not ended (K14).
 *
 * That is a plain claim that it has not finished, or a job that it has fetched without a lease and
 * not ended.  Both are valid: the claim is final (K2), and the job is free again.  But in
 * autocommit mode they are mistakes: the claim commits before the work is done, and two workers
 * run the job.
 *
 * This file counts claims and jobs in backend memory, only for the message.  The state of a key or
 * a job is always read from its row.  Each open subtransaction that has begun or ended any has a
 * level with the number of those begun minus the number of those ended.  When the subtransaction
 * commits, its numbers are added to those of its parent.  When it aborts, its numbers are dropped.
 * This is what happens to its changes of rows, too.  Functions that change a number refuse to run
 * in parallel mode.
 *
 * With "auto", the default of idem.require_finish, a claim is reported only if the client has sent
 * a SELECT that does nothing else, as a transaction of its own: idem_unfinished_note_claim().
 */
#include "postgres.h"

#include "access/transam.h"
#include "access/xact.h"
#include "catalog/pg_proc.h"
#include "nodes/nodeFuncs.h"
#include "tcop/pquery.h"
#include "tcop/tcopprot.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/syscache.h"

#include "fn/fn.h"

/* What a subtransaction has not ended; allocated in TopTransactionContext */
typedef struct Level
{
	SubTransactionId subid;
	int64 numbers[IDEM_UNFINISHED_N]; /* negative if it has ended some of its parents */
	struct Level *parent;
} Level;

/* Level of the innermost open subtransaction that has one */
static Level *current_level = NULL;

/* When the SELECT began that has claimed and does nothing else; 0: there is none */
static TimestampTz lone_select = 0;

/*
 * A plain claim, or a fetch without a lease, adds 1.  The finish or release of the claim, a forget
 * before its finish, and what ends, gives back or leases the job adds -1.
 */
void
idem_unfinished_add(IdemUnfinished kind, int change)
{
	SubTransactionId subid = GetCurrentSubTransactionId();

	if (current_level == NULL || current_level->subid != subid)
	{
		Level *level = MemoryContextAllocZero(TopTransactionContext, sizeof(Level));

		level->subid = subid;
		level->parent = current_level;
		current_level = level;
	}
	current_level->numbers[kind] += change;
}

/* A subtransaction has ended: pass its numbers on to the parent, or drop them */
void
idem_unfinished_end_sub(SubTransactionId subid, SubTransactionId parent_subid, bool commit)
{
	Level *level = current_level;

	if (level == NULL || level->subid != subid)
		return;
	if (commit && (level->parent == NULL || level->parent->subid != parent_subid))
	{
		level->subid = parent_subid;
		return;
	}
	for (int i = 0; commit && i < IDEM_UNFINISHED_N; i++)
		level->parent->numbers[i] += level->numbers[i];
	current_level = level->parent;
	pfree(level);
}

/* May a call of this function change something?  *claim is the function that claims. */
static bool
is_other_volatile(Oid function, void *claim)
{
	return function != *(Oid *) claim && func_volatile(function) == PROVOLATILE_VOLATILE;
}

static bool
calls_other(Node *node, void *claim)
{
	if (node == NULL)
		return false;
	return check_functions_in_node(node, is_other_volatile, claim) ||
		expression_tree_walker(node, calls_other, claim);
}

/*
 * May this part of the plan of a SELECT do anything but claim and read?  Expressions of other kinds
 * of nodes are conditions of scans and joins.
 */
static bool
does_more(PlanState *state, void *claim)
{
	Plan *plan = state->plan;

	if (IsA(plan, LockRows) || calls_other((Node *) plan->targetlist, claim) ||
		calls_other((Node *) plan->qual, claim))
		return true;
	if (IsA(plan, FunctionScan) && calls_other((Node *) ((FunctionScan *) plan)->functions, claim))
		return true;
	if (IsA(plan, ValuesScan) && calls_other((Node *) ((ValuesScan *) plan)->values_lists, claim))
		return true;
	return planstate_tree_walker(state, does_more, claim);
}

/*
 * K14: is the statement of the client a SELECT that calls the claiming function itself, and does
 * nothing else?  Only the portal of a SELECT that writes nothing has a query descriptor.  Portals
 * of cursors and of EXECUTE have a text of their own.  The plan lists all functions that are not
 * part of PostgreSQL, also those that the planner has inlined: if there is another one than the
 * claim, the claim may run inside that function, or the work may.
 */
static bool
is_lone_select(Oid claim)
{
	Portal portal = ActivePortal;
	uint32 hash = GetSysCacheHashValue1(PROCOID, ObjectIdGetDatum(claim));
	bool is_called = false;
	ListCell *lc;

	if (portal == NULL || portal->queryDesc == NULL || debug_query_string == NULL ||
		strcmp(portal->sourceText, debug_query_string) != 0)
		return false;
	foreach (lc, portal->queryDesc->plannedstmt->invalItems)
	{
		PlanInvalItem *item = lfirst_node(PlanInvalItem, lc);

		if (item->cacheId != PROCOID)
			continue;
		if (item->hashValue != hash)
			return false;
		is_called = true;
	}
	return is_called && !does_more(portal->queryDesc->planstate, &claim);
}

/*
 * K14: this function has claimed a key.  Note it if that is all that the transaction does, as far
 * as can be known now: it is not in a transaction block, in a string of several statements, or in
 * a pipeline after other statements.
 */
void
idem_unfinished_note_claim(Oid claim)
{
	if (idem_guc_require_finish == IDEM_REQUIRE_AUTO && !IsTransactionBlock() &&
		!IsSubTransaction() && (MyXactFlags & XACT_FLAGS_PIPELINING) == 0 && is_lone_select(claim))
		lone_select = GetCurrentStatementStartTimestamp();
}

/*
 * K14: report what this transaction has not ended, before it commits or is prepared; deferred
 * triggers and cursors WITH HOLD have already run.  May raise an error.
 */
void
idem_unfinished_check(void)
{
	int elevel = idem_guc_require_finish == IDEM_REQUIRE_ERROR ? ERROR : WARNING;
	int64 nkeys;
	int64 njobs;

	if (idem_guc_require_finish == IDEM_REQUIRE_OFF || current_level == NULL)
		return;
	nkeys = current_level->numbers[IDEM_UNFINISHED_KEYS];
	njobs = current_level->numbers[IDEM_UNFINISHED_JOBS];

	/*
	 * each message of the client, such as the next statement of a pipeline, has a start of its own
	 */
	if (nkeys > 0 &&
		(idem_guc_require_finish != IDEM_REQUIRE_AUTO ||
		 lone_select == GetCurrentStatementStartTimestamp()))
		ereport(elevel,
				errcode(ERRCODE_IDEM_UNFINISHED),
				errmsg("transaction has not finished all idempotency keys that it claimed"),
				errdetail_plural(INT64_FORMAT " key is not finished. After the commit it answers \"finished\" without a result, and its work does not run again.",
								 INT64_FORMAT " keys are not finished. After the commit they answer \"finished\" without a result, and their work does not run again.",
								 (unsigned long) nkeys, nkeys),
				errhint("Begin a transaction before idem_claim(), do the work in it, and call idem_finish() before the commit; or release the claim with idem_release(). The setting \"%s\" controls this check.",
						"idem.require_finish"));
	if (njobs > 0)
		ereport(elevel,
				errcode(ERRCODE_IDEM_UNFINISHED),
				errmsg("transaction has not ended all jobs that it fetched without a lease"),
				errdetail_plural(INT64_FORMAT " job has not ended. After the commit the next fetch gets it again, even if its work is done or still goes on.",
								 INT64_FORMAT " jobs have not ended. After the commit the next fetches get them again, even if their work is done or still goes on.",
								 (unsigned long) njobs, njobs),
				errhint("Begin a transaction before idem_fetch(), do the work in it, and call idem_complete() or idem_fail() before the commit; or pass a lease. The setting \"%s\" controls this check.",
						"idem.require_finish"));
}

/* The transaction has ended, and its memory with it */
void
idem_unfinished_forget(void)
{
	current_level = NULL;
	lone_select = 0;
}
