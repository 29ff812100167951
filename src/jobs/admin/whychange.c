/*
 * whychange.c
 *		What an open transaction does to a job, in words, for idem_why (H3).
 *
 * The version of the row that the transaction has written is compared with the one that it
 * has replaced.  Nothing is locked, so the words describe one moment.
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/datum.h"
#include "utils/snapmgr.h"

#include "jobs/admin/jobadmin.h"

#define ABSORBED "An open transaction has enqueued a duplicate, which the job has absorbed."
#define ENQUEUED "An open transaction has enqueued the job, which can be fetched after the commit."
#define RETRIED	 "An open transaction retries the job, which has ended and can be fetched after the commit."

static int64
get_token(IdemTable *jobs)
{
	return idem_row_isnull(jobs->found, IDEM_JOBS_TOKEN) ? 0 : idem_row_int64(jobs->found, IDEM_JOBS_TOKEN);
}

static NullableDatum
copy_column(IdemTable *jobs, AttrNumber attno)
{
	NullableDatum column = idem_row_datum(jobs->found, attno);

	if (!column.isnull)
		column.value = datumCopy(column.value, false, -1);
	return column;
}

/* Keep what matters of the row found, which this transaction has written */
static void
copy_version(IdemTable *jobs, TransactionId xid, IdemOpenJob *version)
{
	version->xid = xid;
	version->token = get_token(jobs);
	version->is_leased = idem_jobrow_is_leased(jobs);
	/* only a job of the history begins with a token */
	version->is_retried = version->token != 0 && !idem_row_is_later_version(jobs->found);
	version->attempt = idem_row_int32(jobs->found, IDEM_JOBS_ATTEMPT);
	version->links = copy_column(jobs, IDEM_JOBS_LINKS);
	version->payload = copy_column(jobs, IDEM_JOBS_PAYLOAD);
}

/* Find a version of the job that another transaction has not committed */
void
idem_whychange_find_open(IdemTable *jobs, IdemLookup *lookup, IdemOpenJob *open)
{
	SnapshotData dirty;
	IdemLeafWalk walk;

	memset(open, 0, sizeof(*open));
	InitDirtySnapshot(dirty);
	idem_probe_walk(&walk, jobs, lookup, &dirty);
	while (!TransactionIdIsValid(open->xid) && idem_leaf_next_row(&walk))
	{
		if (TransactionIdIsValid(dirty.xmin))
			copy_version(jobs, dirty.xmin, open);
	}
	idem_leaf_end(&walk);
}

/* Make the version that this transaction has replaced the row found; false: there is none */
static bool
find_replaced(IdemTable *jobs, IdemLookup *lookup)
{
	IdemLeafWalk walk;
	bool found;

	idem_probe_walk(&walk, jobs, lookup, SnapshotAny);
	do
	{
		found = idem_leaf_next_row(&walk);
	} while (found && (idem_row_is_mine(jobs->found) || !idem_row_is_replaced_by_me(jobs->found)));
	idem_leaf_end(&walk);
	return found;
}

/* Does this column of the row found have another value?  One in TOAST keeps its place. */
static bool
differs_from(IdemTable *jobs, AttrNumber attno, const NullableDatum *value)
{
	NullableDatum column = idem_row_datum(jobs->found, attno);

	return column.isnull != value->isnull ||
		(!column.isnull && !datumIsEqual(column.value, value->value, false, -1));
}

/*
 * H3: what a transaction does that has updated or deleted the row found.  A duplicate writes
 * the waiting job that absorbs it if it brings a link (J16), a payload, or an earlier time or a
 * more urgent priority (J8).
 */
static const char *
describe_change(IdemTable *jobs, const IdemOpenJob *open)
{
	bool is_fetched = open->token != get_token(jobs);

	if (!TransactionIdIsValid(open->xid))
		return idem_row_is_last_version(jobs->found) ?
			"An open transaction is ending the job." :
			"An open transaction has changed or ended the job.";
	if (open->is_leased)
		return is_fetched ? "An open transaction has fetched the job." :
							"An open transaction has renewed the lease of the job.";
	/* a reschedule gives the job another token, too, but no other attempt */
	if (idem_jobrow_is_leased(jobs) ||
		(is_fetched && open->attempt != idem_row_int32(jobs->found, IDEM_JOBS_ATTEMPT)))
		return "An open transaction has given the job back, so that it runs again.";
	if (differs_from(jobs, IDEM_JOBS_LINKS, &open->links) ||
		differs_from(jobs, IDEM_JOBS_PAYLOAD, &open->payload))
		return ABSORBED;
	return "An open transaction has changed the time or the priority of the job.";
}

/* What a transaction does that has this lock on the row found */
const char *
idem_whychange_describe_lock(IdemTable *jobs, MultiXactStatus status, const IdemOpenJob *open)
{
	switch (status)
	{
		case MultiXactStatusForKeyShare:
			return ABSORBED;
		case MultiXactStatusNoKeyUpdate:
		case MultiXactStatusUpdate:
			return describe_change(jobs, open);
		default:
			return "An open transaction has locked the job.";
	}
}

/* What a transaction does that has written a job of which there is no committed version */
const char *
idem_whychange_describe_new(const IdemOpenJob *open)
{
	return open->is_retried ? RETRIED : ENQUEUED;
}

/*
 * What the current transaction does, which has written the row found.  Another version may be
 * the row found then.
 */
const char *
idem_whychange_describe_mine(IdemTable *jobs, IdemLookup *lookup)
{
	IdemOpenJob mine;

	copy_version(jobs, GetTopTransactionId(), &mine);
	if (idem_row_is_later_version(jobs->found) && find_replaced(jobs, lookup))
		return describe_change(jobs, &mine);
	return idem_whychange_describe_new(&mine);
}
