/*
 * whystore.c
 *		Why a job does not run (H3): what its row, its queue, other jobs and open transactions
 *		have to do with it.
 *
 * This reads the latest state, not that of the snapshot, takes no lock and waits for no
 * transaction, so the answer is a picture of one moment.  It works on a standby.  A job that
 * belongs to another shard, or is not there, has a reason, too: nothing here is an error but
 * the lack of a privilege.
 */
#include "postgres.h"

#include "access/xlog.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/admin/jobadmin.h"

/* A count of the jobs that come first reads at most this many entries of the index */
#define MAX_ENTRIES 10000

/* So much of an error is shown, in bytes */
#define MAX_ERROR_SHOWN 200

/* What was looked at before the answer "ready" */
#define LOOKED_AT \
	"Looked at: its row, its queue, the jobs before it, open transactions, locks on the table, subscriptions."

/* The explanation of a job */
typedef struct Explanation
{
	IdemTable *jobs;
	int64 job_id;
	TimestampTz now;
	IdemQueue queue;
	int n;		/* number of reasons so far */
	bool ready; /* the row says that a fetch may take the job */
	void (*put)(const IdemWhy *why, void *arg);
	void *arg;
} Explanation;

static void
add_reason(Explanation *why, const char *reason, TimestampTz since, char *detail, char *fix)
{
	IdemWhy row = {.reason = reason, .detail = detail, .since = since, .fix = fix};

	why->put(&row, why->arg);
	why->n++;
}

/* H3: an open transaction, or the session that waits to cancel the job, is in the way */
static void
add_holder(Explanation *why, const IdemHolder *holder, const char *what, char *fix)
{
	IdemWhy row = {
		.reason = "held",
		.detail = psprintf("%s %s", what, idem_holders_describe(holder)),
		.since = holder->since,
		.pid = holder->pid,
		.fix = fix};

	why->put(&row, why->arg);
	why->n++;
}

/*
 * H3: settings of the queue that the row found names.  A caller that may not use the queue
 * needs the privilege to read idem.job_status, which shows as much.
 */
static void
use_queue(Explanation *why, IdemTable *table, AttrNumber attno)
{
	if (!idem_holders_may_read("job_status"))
		idem_queuestore_use_of_row(table, attno, &why->queue);
	else
		idem_queuestore_get(idem_row_text(table->found, attno), &why->queue);
}

/* How long until the time, or since then, in words */
static char *
format_span(int64 usecs)
{
	return psprintf(INT64_FORMAT " s", (int64) (Max(usecs, 0) + USECS_PER_SEC - 1) / USECS_PER_SEC);
}

static char *
format_error(IdemTable *table, AttrNumber attno)
{
	text *error = idem_history_last_error(idem_row_jsonb(table->found, attno));
	int len;

	if (error == NULL)
		return pstrdup("It gave no error.");
	len = pg_mbcliplen(VARDATA_ANY(error), VARSIZE_ANY_EXHDR(error), MAX_ERROR_SHOWN);
	return psprintf("Error: %.*s", len, VARDATA_ANY(error));
}

static char *
format_worker(IdemTable *table, AttrNumber attno)
{
	text *worker = idem_row_text(table->found, attno);

	return worker == NULL ? pstrdup("A worker without a name") :
							psprintf("Worker %s", text_to_cstring(worker));
}

/* When a worker, or the function that gave the job back, last had the job found */
static TimestampTz
get_touched_at(IdemTable *jobs)
{
	if (idem_row_isnull(jobs->found, IDEM_JOBS_TOKEN))
		return idem_row_timestamp(jobs->found, IDEM_JOBS_ENQUEUED_AT);
	return idem_clock_token_time(idem_row_int64(jobs->found, IDEM_JOBS_TOKEN));
}

static void
explain_pause(Explanation *why)
{
	char *queue;

	if (!why->queue.paused)
		return;
	queue = idem_show_literal(text_to_cstring(why->queue.name));
	add_reason(why, "paused", idem_queuestore_paused_at(why->queue.name),
			   pstrdup("The queue is paused."),
			   psprintf("SELECT pg_catalog.idem_resume(%s);", queue));
}

/* When a worker last asked for jobs of the queue, in words */
static char *
describe_workers(Explanation *why)
{
	IdemQueueRef *ref = idem_queueref_get(why->queue.name);
	TimestampTz last = idem_skips_last_fetch(idem_queueref_skips(ref));
	const char *waiting = idem_waiters_exist(idem_waiters_queue(why->queue.name)) ?
		" A session waits for the queue." :
		"";

	if (!ref->is_pinned || RecoveryInProgress())
		return psprintf("It is not known when a worker last fetched from the queue.%s", waiting);
	if (last == 0)
		return psprintf("No fetch from the queue is known since the server was started.%s",
						waiting);
	return psprintf("The last fetch from the queue was %s ago.%s", format_span(why->now - last),
					waiting);
}

/* How the last attempt of the job found went, whose worker has not said how it ended */
static char *
describe_attempt(IdemTable *jobs)
{
	char *worker = format_worker(jobs, IDEM_JOBS_WORKER);

	/* a fetch without a lease sets both to the same time */
	if (idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL) == get_touched_at(jobs))
		return psprintf("%s fetched the job without a lease, and its transaction has committed without idem_complete() or idem_fail(), perhaps in autocommit.", worker);
	return psprintf("%s had the job, and its lease has expired.", worker);
}

/* The job found has a lease, which may have expired */
static void
explain_lease(Explanation *why)
{
	IdemTable *jobs = why->jobs;
	TimestampTz lease_until = idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL);
	char *worker = format_worker(jobs, IDEM_JOBS_WORKER);

	if (lease_until > why->now)
		add_reason(why, "leased", get_touched_at(jobs),
				   psprintf("%s has it, at attempt %d of %d. The lease expires in %s, unless it is renewed.",
							worker, idem_row_int32(jobs->found, IDEM_JOBS_ATTEMPT),
							idem_jobrow_max_attempts(jobs, &why->queue),
							format_span(lease_until - why->now)),
				   NULL);
	else if (idem_row_is_mine(jobs->found))
		return;
	else if (idem_jobrow_has_no_attempts_left(jobs, &why->queue))
		add_reason(why, "spent", lease_until,
				   psprintf("%s It was the last attempt. The next fetch or cleanup makes the job dead.",
							describe_attempt(jobs)),
				   pstrdup("SELECT pg_catalog.idem_cleanup();"));
	else
	{
		add_reason(why, "expired", lease_until,
				   psprintf("%s The next fetch gets the job. %s", describe_attempt(jobs),
							describe_workers(why)),
				   NULL);
		why->ready = true;
	}
}

/*
 * The job found is not due yet.  It waits for its retry if it was touched last when an attempt
 * failed; a snooze or a reschedule came after that.
 */
static void
explain_delay(Explanation *why, TimestampTz run_at)
{
	IdemTable *jobs = why->jobs;
	int attempt = idem_row_int32(jobs->found, IDEM_JOBS_ATTEMPT);
	TimestampTz touched_at = get_touched_at(jobs);
	char *span = format_span(run_at - why->now);

	if (!idem_history_has_error_since(idem_row_jsonb(jobs->found, IDEM_JOBS_ERRORS), touched_at))
		add_reason(why, "later", touched_at,
				   idem_row_isnull(jobs->found, IDEM_JOBS_TOKEN) ?
					   psprintf("It is due in %s.", span) :
					   psprintf("It is due in %s: it was snoozed or rescheduled, after %d of %d attempts.",
								span, attempt, idem_jobrow_max_attempts(jobs, &why->queue)),
				   NULL);
	else
		add_reason(why, "retry", touched_at,
				   psprintf("It is due again in %s, after attempt %d of %d. %s", span, attempt,
							idem_jobrow_max_attempts(jobs, &why->queue),
							format_error(jobs, IDEM_JOBS_ERRORS)),
				   NULL);
}

/* The job found waits for a worker, for its time, or for another job (J4) */
static void
explain_wait(Explanation *why)
{
	IdemTable *jobs = why->jobs;
	int64 after_job = idem_row_int64(jobs->found, IDEM_JOBS_AFTER_JOB);
	TimestampTz run_at = idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT);
	int n = why->n;
	IdemJob found = idem_job_found(jobs);

	if (idem_jobrow_waits_for_other(jobs, &found))
		add_reason(why, "blocked", idem_row_timestamp(jobs->found, IDEM_JOBS_ENQUEUED_AT),
				   psprintf("Job " INT64_FORMAT " must end first.", after_job),
				   psprintf("SELECT * FROM pg_catalog.idem_why(" INT64_FORMAT ");", after_job));
	if (run_at > why->now)
		explain_delay(why, run_at);
	why->ready = why->n == n;
}

/* H3: open transactions that have locked or changed the job found, or have written it */
static void
explain_locks(Explanation *why, const IdemOpenJob *open)
{
	IdemTable *jobs = why->jobs;
	IdemLookup lookup = idem_jobtable_by_id(jobs, why->job_id);
	TransactionId mine = idem_row_is_mine(jobs->found) ? GetTopTransactionId() : InvalidTransactionId;
	IdemRowLocks locks;
	IdemHolder holder;

	idem_row_list_locks(jobs->found, &locks);
	for (int i = 0; i < locks.n; i++)
	{
		IdemRowLock *lock = &locks.locks[i];

		if (!TransactionIdEquals(lock->xid, mine) && idem_holders_find(lock->xid, &holder))
			add_holder(why, &holder, idem_whychange_describe_lock(jobs, lock->status, open),
					   idem_holders_fix(&holder));
	}
	/* last, because another version may be the row found then */
	if (TransactionIdIsValid(mine) && idem_holders_find(mine, &holder))
		add_holder(why, &holder, idem_whychange_describe_mine(jobs, &lookup),
				   idem_holders_fix(&holder));
}

/* A command that ends the wait of the session; NULL: the caller cannot see the session */
static char *
make_cancel_fix(const IdemHolder *holder)
{
	return holder->pid == 0 ?
		NULL :
		psprintf("SELECT pg_catalog.pg_cancel_backend(%d);", holder->pid);
}

/* H3: sessions that wait to cancel the job; meanwhile it absorbs no more duplicates (J1) */
static void
explain_cancels(Explanation *why)
{
	int n;
	int *pids = idem_jobtable_list_marks(why->job_id, &n);

	for (int i = 0; i < n; i++)
	{
		IdemHolder holder;

		if (!idem_holders_find_process(pids[i], &holder))
			continue;
		add_holder(why, &holder, "A session waits to cancel the job.", make_cancel_fix(&holder));
	}
}

/*
 * The job has no committed version: the open transaction has enqueued it, or retries it.  To end
 * that transaction would undo what it has done for the job, so only its commit helps.
 */
static void
explain_open(Explanation *why, const IdemOpenJob *open)
{
	IdemHolder holder;

	use_queue(why, why->jobs, IDEM_JOBS_QUEUE);
	if (idem_holders_find(open->xid, &holder))
		add_holder(why, &holder, idem_whychange_describe_new(open),
				   holder.kind == IDEM_HOLDER_PREPARED ?
					   psprintf("COMMIT PREPARED %s;", idem_show_literal(holder.gid)) :
					   NULL);
}

/* Does a fetch need a lock on this relation: the table of jobs, or one of its indexes? */
static bool
is_locked_by_fetch(IdemTable *jobs, List *indexes, const LOCKTAG *tag)
{
	return tag->locktag_type == LOCKTAG_RELATION && tag->locktag_field1 == MyDatabaseId &&
		(tag->locktag_field2 == RelationGetRelid(jobs->heap) ||
		 list_member_oid(indexes, tag->locktag_field2));
}

/* Lock modes that conflict with that of a fetch */
static LOCKMASK
conflicting_modes(void)
{
	LOCKMASK mask = 0;

	for (LOCKMODE mode = 1; mode <= MaxLockMode; mode++)
	{
		if (DoLockModesConflict(mode, RowExclusiveLock))
			mask |= LOCKBIT_ON(mode);
	}
	return mask;
}

/*
 * H3: every fetch waits for a lock on the table that conflicts with its own, and behind a session
 * that waits for one.
 */
static void
explain_table_locks(Explanation *why)
{
	List *indexes;
	LockData *data;

	/* those of a standby keep no fetch of the primary from its work */
	if (RecoveryInProgress())
		return;
	indexes = RelationGetIndexList(why->jobs->heap);
	data = GetLockStatusData();
	for (int i = 0; i < data->nelements; i++)
	{
		const LockInstanceData *lock = &data->locks[i];
		bool holds = (lock->holdMask & conflicting_modes()) != 0;
		bool waits = (LOCKBIT_ON(lock->waitLockMode) & conflicting_modes()) != 0;
		IdemHolder holder;

		if ((!holds && !waits) || !is_locked_by_fetch(why->jobs, indexes, &lock->locktag))
			continue;
		if (idem_holders_find_lock(lock, &holder))
			add_holder(why, &holder,
					   holds ? "An open transaction has locked the table idem.jobs or an index of it, and every fetch waits for it." :
							   "A session waits to lock the table idem.jobs or an index of it, and every fetch waits behind it.",
					   holds ? idem_holders_fix(&holder) : make_cancel_fix(&holder));
	}
	list_free(indexes);
}

/* H3, K13: functions that write jobs raise an error as long as a subscription writes the table */
static void
explain_subscription(Explanation *why)
{
	if (idem_subscription_writes(RelationGetRelid(why->jobs->heap)))
		add_reason(why, "subscribed", 0,
				   pstrdup("A subscription of this database writes the table idem.jobs, so a fetch raises an error."),
				   pstrdup("SELECT h.detail, h.fix FROM pg_catalog.idem_doctor() AS h WHERE h.status OPERATOR(pg_catalog.<>) 'ok';"));
}

/* Could a fetch take the job found now? */
static bool
is_fetchable(IdemTable *jobs, const SnapshotData *dirty, const IdemShard *shard, TimestampTz now)
{
	IdemJob job = idem_job_found(jobs);
	IdemLockers lockers;

	if (TransactionIdIsValid(dirty->xmin) || TransactionIdIsValid(dirty->xmax) ||
		!idem_shard_has_job(shard, idem_row_int64(jobs->found, IDEM_JOBS_JOB_ID)))
		return false;
	if (idem_jobrow_is_leased(jobs) ?
			idem_row_is_mine(jobs->found) || idem_row_timestamp(jobs->found, IDEM_JOBS_LEASE_UNTIL) > now :
			idem_jobrow_waits_for_other(jobs, &job))
		return false;
	idem_row_lockers(jobs->found, &lockers);
	return !TransactionIdIsValid(lockers.shared) && !TransactionIdIsValid(lockers.exclusive);
}

static IdemPosition
get_position(IdemLeafWalk *walk)
{
	IndexTuple tuple = &walk->entry.tuple;
	TupleDesc desc = RelationGetDescr(walk->index);
	IdemPosition position;
	bool isnull;

	position.priority = DatumGetInt32(index_getattr(tuple, 2, desc, &isnull));
	position.run_at = DatumGetTimestampTz(index_getattr(tuple, 3, desc, &isnull));
	position.job_id = DatumGetInt64(index_getattr(tuple, 4, desc, &isnull));
	return position;
}

/*
 * Count the jobs of the queue that a fetch would take before this position.  The walk reads a
 * limited number of entries; *is_least: there may be more jobs.
 */
static int
count_before(Explanation *why, const IdemPosition *end, bool *is_least)
{
	IdemTable *jobs = why->jobs;
	const IdemShard *shard = idem_shard_get();
	Datum queue = PointerGetDatum(why->queue.name);
	SnapshotData dirty;
	IdemLeafWalk walk;
	int n = 0;

	InitDirtySnapshot(dirty);
	idem_leaf_begin(&walk, jobs, idem_jobtable_fetch_index(jobs), &dirty, &(IdemLeafStart){.values = &queue, .n = 1, .nequal = 1});
	while (walk.nentries < MAX_ENTRIES && idem_leaf_next(&walk))
	{
		IdemPosition position = get_position(&walk);

		CHECK_FOR_INTERRUPTS();
		if (idem_skips_compare(&position, end) >= 0)
			break;
		if (position.run_at <= why->now && idem_leaf_fetch(&walk) &&
			is_fetchable(jobs, &dirty, shard, why->now))
			n++;
	}
	*is_least = walk.nentries >= MAX_ENTRIES;
	idem_leaf_end(&walk);
	return n;
}

/* Only other jobs may be in the way */
static void
explain_order(Explanation *why, const IdemPosition *position, bool has_expired)
{
	bool is_least;
	int n = count_before(why, position, &is_least);

	if (n > 0)
		add_reason(why, "behind", position->run_at,
				   psprintf("Jobs of the queue that can be fetched before it: %s%d. %s",
							is_least ? "at least " : "", n, describe_workers(why)),
				   NULL);
	else if (!has_expired)
		add_reason(why, "ready", position->run_at,
				   psprintf("%s %s",
							is_least ?
								"Many jobs come before it, but none was found that can be fetched. " LOOKED_AT :
								"The next fetch gets it. " LOOKED_AT,
							describe_workers(why)),
				   NULL);
}

/* The job found has a committed version, or this transaction has written it */
static void
explain_row(Explanation *why, const IdemOpenJob *open)
{
	IdemTable *jobs = why->jobs;
	IdemPosition position = {
		.priority = idem_row_int32(jobs->found, IDEM_JOBS_PRIORITY),
		.run_at = idem_row_timestamp(jobs->found, IDEM_JOBS_RUN_AT),
		.job_id = why->job_id};
	bool is_leased = idem_jobrow_is_leased(jobs);
	bool is_subscribed;
	int n;

	use_queue(why, jobs, IDEM_JOBS_QUEUE);
	explain_subscription(why);
	is_subscribed = why->n > 0;
	explain_pause(why);
	if (is_leased)
		explain_lease(why);
	else
		explain_wait(why);
	n = why->n;
	explain_locks(why, open);
	explain_cancels(why);
	explain_table_locks(why);
	if (why->ready && why->n == n && !why->queue.paused && !is_subscribed)
		explain_order(why, &position, is_leased);
}

/* The job has ended, and its queue keeps it; false: there is no such row */
static bool
explain_end(Explanation *why)
{
	IdemTable log;
	IdemLookup lookup;
	IdemProbeResult probe;
	char *state;
	char *detail;
	char *fix = NULL;

	idem_jobtable_open_log(&log, AccessShareLock);
	lookup = idem_jobtable_by_id(&log, why->job_id);
	idem_probe_latest(&log, &lookup, &probe);
	if (probe.found == IDEM_FOUND_ROW)
	{
		use_queue(why, &log, IDEM_JOB_LOG_QUEUE);
		state = text_to_cstring(idem_row_text(log.found, IDEM_JOB_LOG_STATE));
		detail = psprintf("It has ended. Attempts: %d.", idem_row_int32(log.found, IDEM_JOB_LOG_ATTEMPT));
		if (strcmp(state, "done") != 0)
			fix = psprintf("SELECT pg_catalog.idem_retry(" INT64_FORMAT ");", why->job_id);
		if (strcmp(state, "dead") == 0)
			detail = psprintf("%s %s", detail, format_error(&log, IDEM_JOB_LOG_ERRORS));
		add_reason(why, state, idem_row_timestamp(log.found, IDEM_JOB_LOG_ENDED_AT), detail, fix);
	}
	idem_table_close(&log);
	return probe.found == IDEM_FOUND_ROW;
}

/* M2: the job belongs to another database */
static void
explain_shard(Explanation *why)
{
	const IdemShard *shard = idem_shard_get();
	int slot = idem_shard_slot_of_job(shard, why->job_id);

	add_reason(why, "other_shard", 0,
			   shard->number >= 0 ?
				   psprintf("Its slot is %d, which shard %d does not have.", slot, shard->number) :
				   psprintf("Its slot is %d, which this database does not have.", slot),
			   NULL);
}

/*
 * Is the job in neither table?  One snapshot for both: a retry or a cancel may move the job
 * from one to the other between two looks.
 */
static bool
is_gone(IdemTable *jobs, IdemLookup *lookup)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	bool found = idem_probe_shows(jobs, lookup, snapshot);
	IdemTable log;

	if (!found)
	{
		IdemLookup log_lookup;

		idem_jobtable_open_log(&log, AccessShareLock);
		log_lookup = idem_jobtable_by_id(&log, DatumGetInt64(lookup->value));
		found = idem_probe_shows(&log, &log_lookup, snapshot);
		idem_table_close(&log);
	}
	UnregisterSnapshot(snapshot);
	return !found;
}

/*
 * H3: pass each reason to put(), what an operator has set first.  There is always one, also if
 * the job has ended or is not there.  The caller has opened idem.jobs.
 */
void
idem_whystore_explain(IdemTable *jobs, int64 job_id, void (*put)(const IdemWhy *why, void *arg),
					  void *arg)
{
	Explanation why = {
		.jobs = jobs, .job_id = job_id, .now = idem_clock_now(), .put = put, .arg = arg};
	IdemLookup lookup = idem_jobtable_by_id(jobs, job_id);
	IdemProbeResult probe;
	IdemOpenJob open;

	if (!idem_shard_has_job(idem_shard_get(), job_id))
	{
		explain_shard(&why);
		return;
	}
	idem_holders_refresh();
	do
	{
		CHECK_FOR_INTERRUPTS();
		idem_whychange_find_open(jobs, &lookup, &open);
		idem_probe_latest(jobs, &lookup, &probe);
		if (probe.found == IDEM_FOUND_ROW)
			explain_row(&why, &open);
		else if (probe.found == IDEM_FOUND_OPEN)
		{
			idem_whychange_find_open(jobs, &lookup, &open);
			if (TransactionIdIsValid(open.xid))
				explain_open(&why, &open);
		}
		else if (!explain_end(&why) && is_gone(jobs, &lookup))
		{
			/* M4: it may have gone with its slot meanwhile */
			if (!idem_shard_has_job(idem_shard_get_latest(), job_id))
				explain_shard(&why);
			else
				add_reason(&why, "gone", 0,
						   pstrdup("There is no such job: it is done and was not kept, was removed from the history, or was never enqueued."),
						   NULL);
		}
		/* no reason: the transaction in the way has ended meanwhile, or the job was moved */
	} while (why.n == 0);
}
