/*
 * why.c
 *		Facts about a job that does not run (H3): its row, its queue, the jobs before it, and who
 *		is in the way.
 *
 * idem_why() puts them into words, in SQL (src/sql/why.sql).  This reads the latest state, not that
 * of the snapshot, takes no lock and waits for no transaction, so the answer is a picture of one
 * moment.  It works on a standby.  That a job belongs to another shard, or is not there, is a fact,
 * too: nothing here is an error but a bad argument and the lack of a privilege.
 */
#include "postgres.h"

#include "access/twophase.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "pgstat.h"
#include "storage/lock.h"
#include "utils/datum.h"
#include "utils/snapmgr.h"

#include "jobs/admin/jobadmin.h"

/* A count of the jobs that come first reads at most this many entries of the index */
#define MAX_ENTRIES 10000

/* So much of an error is shown, in bytes */
#define MAX_ERROR_SHOWN 200

/* Lock modes that conflict with that of a fetch, ROW EXCLUSIVE */
#define MODES_AGAINST_FETCH                                      \
	(LOCKBIT_ON(ShareLock) | LOCKBIT_ON(ShareRowExclusiveLock) | \
	 LOCKBIT_ON(ExclusiveLock) | LOCKBIT_ON(AccessExclusiveLock))

IDEM_FUNCTION(idem_job_facts);

typedef struct Why
{
	IdemAnswer answer;
	IdemTable *jobs;
	int64 job_id;
	IdemLookup lookup;
	TupleTableSlot *open; /* the version that an open transaction has written; or empty */
	TimestampTz now;
	IdemQueue queue;
} Why;

/*
 * H3: settings of the queue that the row names.  A caller that may not use the queue needs the
 * privilege to read idem.job_status, which shows as much.
 */
static void
use_queue(Why *why, IdemTable *table, TupleTableSlot *row, AttrNumber attno)
{
	if (!idem_holders_may_read("job_status"))
		idem_queuestore_use_of_row(table, row, attno, &why->queue);
	else
		idem_queuestore_get(idem_row_text(row, attno), &why->queue);
}

/* Do both versions have the same value in this column?  One in TOAST keeps its place. */
static bool
has_same(TupleTableSlot *a, TupleTableSlot *b, AttrNumber attno)
{
	NullableDatum x = idem_row_datum(a, attno);
	NullableDatum y = idem_row_datum(b, attno);
	Form_pg_attribute column = TupleDescAttr(a->tts_tupleDescriptor, attno - 1);

	return x.isnull == y.isnull &&
		(x.isnull || datumIsEqual(x.value, y.value, column->attbyval, column->attlen));
}

/* What a transaction does that has inserted a job; only one of the history begins with a token */
static const char *
name_insert(TupleTableSlot *row)
{
	return idem_row_isnull(row, IDEM_JOBS_TOKEN) || idem_row_is_later_version(row) ? "enqueued" :
																					 "retried";
}

/*
 * H3: what a transaction does that has replaced a version of the job by a new one, or has deleted
 * it.  A duplicate writes the waiting job that absorbs it if it brings a link (J16), a payload, or
 * an earlier time or a more urgent priority (J8).
 */
static const char *
name_change(TupleTableSlot *old, TupleTableSlot *new)
{
	if (TTS_EMPTY(new))
		return idem_row_is_last_version(old) ? "ends" : "changed or ended";
	if (!idem_row_isnull(new, IDEM_JOBS_LEASE_UNTIL))
		return has_same(old, new, IDEM_JOBS_TOKEN) ? "renewed" : "fetched";
	/* a reschedule gives the job another token, too, but no other attempt */
	if (!idem_row_isnull(old, IDEM_JOBS_LEASE_UNTIL) ||
		(!has_same(old, new, IDEM_JOBS_TOKEN) && !has_same(old, new, IDEM_JOBS_ATTEMPT)))
		return "gave back";
	return has_same(old, new, IDEM_JOBS_LINKS) && has_same(old, new, IDEM_JOBS_PAYLOAD) ? "moved" :
																						  "added";
}

/*
 * H3: open transactions that have locked or changed the row, or have written it.  The row is not
 * valid afterwards.
 */
static void
put_row_holders(Why *why, TupleTableSlot *row)
{
	IdemTable *jobs = why->jobs;
	TransactionId mine =
		idem_row_is_mine(row) ? GetTopTransactionId() : InvalidTransactionId;
	IdemRowLocks locks;

	idem_row_list_locks(row, &locks);
	for (int i = 0; i < locks.n; i++)
	{
		const IdemRowLock *lock = &locks.locks[i];
		const char *does = "locked";

		if (TransactionIdEquals(lock->xid, mine))
			continue;
		if (lock->status == MultiXactStatusForKeyShare)
			does = "added";
		else if (ISUPDATE_from_mxstatus(lock->status))
			does = name_change(row, why->open);
		idem_holders_put(&why->answer, "held", does, lock->xid, 0);
	}
	if (TransactionIdIsValid(mine))
	{
		const char *does = name_insert(row);
		IdemLeafWalk walk;

		/* the job was there before if this transaction has replaced a version of another one */
		ExecCopySlot(why->open, row);
		idem_probe_walk(&walk, jobs, &why->lookup, SnapshotAny);
		while (idem_row_is_later_version(why->open) && idem_leaf_next_row(&walk))
		{
			if (idem_row_is_mine(walk.row) || !idem_row_is_replaced_by_me(walk.row))
				continue;
			does = name_change(walk.row, why->open);
			break;
		}
		idem_leaf_end(&walk);
		idem_holders_put(&why->answer, "held", does, mine, 0);
	}
}

/*
 * H3: every fetch waits for a lock on the table that conflicts with its own, and behind a session
 * that waits for one.
 */
static void
put_table_holders(Why *why)
{
	List *relations =
		lappend_oid(RelationGetIndexList(why->jobs->heap), RelationGetRelid(why->jobs->heap));
	LockData *data = GetLockStatusData();

	for (int i = 0; i < data->nelements; i++)
	{
		const LockInstanceData *lock = &data->locks[i];
		const LOCKTAG *tag = &lock->locktag;
		bool holds = (lock->holdMask & MODES_AGAINST_FETCH) != 0;
		TransactionId xid = InvalidTransactionId;

		if ((!holds && !(LOCKBIT_ON(lock->waitLockMode) & MODES_AGAINST_FETCH)) ||
			tag->locktag_type != LOCKTAG_RELATION || tag->locktag_field1 != MyDatabaseId ||
			!list_member_oid(relations, tag->locktag_field2))
			continue;
		/*
		 * a prepared transaction has no process; after a restart of the server it has no virtual id
		 */
		if (lock->pid == 0)
		{
			VirtualTransactionId vxid = idem_compat_lock_vxid(lock);
			bool have_more = false;

			xid = VirtualTransactionIdIsValid(vxid) ? TwoPhaseGetXidByVirtualXID(vxid, &have_more) :
													  vxid.localTransactionId;
		}
		idem_holders_put(&why->answer, "held", holds ? "locked table" : "waits for table", xid,
						 lock->pid);
	}
}

/* When a worker last asked for jobs of the queue, and whether a session waits for it */
static void
set_fetches(Why *why)
{
	IdemQueueRef *ref = why->queue.ref;
	TimestampTz last = idem_skips_last_fetch(idem_queueref_skips(ref));

	if (ref->is_pinned && !RecoveryInProgress())
		idem_answer_time(&why->answer, Anum_idem_job_facts_last_fetch,
						 last != 0 ? last : DT_NOBEGIN);
	idem_answer_bool(&why->answer, Anum_idem_job_facts_has_waiter,
					 idem_waiters_exist(idem_waiters_queue(why->queue.name)));
}

/* Nothing is in the way of the job: count the jobs that a fetch would take before it */
static void
put_count(Why *why, const IdemJob *end_job)
{
	IdemPosition end = idem_job_position(end_job);
	IdemAnswer *fact = &why->answer;
	Datum queue = PointerGetDatum(why->queue.name);
	SnapshotData dirty;
	IdemLeafWalk walk;
	int n = 0;

	InitDirtySnapshot(dirty);
	idem_leaf_begin(&walk, why->jobs, idem_jobtable_index(why->jobs, IDEM_INDEX_FETCH), &dirty,
					&(IdemLeafStart){.values = &queue, .n = 1, .nequal = 1});
	while (walk.nentries < MAX_ENTRIES && idem_leaf_next(&walk))
	{
		TupleDesc desc = RelationGetDescr(walk.index);
		IdemPosition position;
		IdemLockers lockers;
		IdemJob job;
		bool isnull;

		CHECK_FOR_INTERRUPTS();
		position.priority = DatumGetInt32(index_getattr(&walk.entry.tuple, 2, desc, &isnull));
		position.run_at = DatumGetTimestampTz(index_getattr(&walk.entry.tuple, 3, desc, &isnull));
		position.job_id = DatumGetInt64(index_getattr(&walk.entry.tuple, 4, desc, &isnull));
		if (idem_skips_compare(&position, &end) >= 0)
			break;
		if (position.run_at > why->now || !idem_leaf_fetch(&walk))
			continue;
		idem_job_read(&job, walk.row);
		if (idem_jobrow_is_fetchable(why->jobs, &job, &dirty, idem_shard_get(), why->now, false) !=
			IDEM_FETCHABLE)
			continue;
		idem_row_lockers(job.row, &lockers);
		if (!TransactionIdIsValid(lockers.shared) && !TransactionIdIsValid(lockers.exclusive))
			n++;
	}
	idem_answer_string(fact, Anum_idem_job_facts_fact, "free");
	idem_answer_time(fact, Anum_idem_job_facts_since, end.run_at);
	idem_answer_time(fact, Anum_idem_job_facts_now, why->now);
	idem_answer_int32(fact, Anum_idem_job_facts_ahead, n);
	idem_answer_bool(fact, Anum_idem_job_facts_is_least, walk.nentries >= MAX_ENTRIES);
	set_fetches(why);
	idem_answer_put(fact);
	idem_leaf_end(&walk);
}

/* The text of the last error, if the worker gave one */
static void
set_error(IdemAnswer *fact, Jsonb *errors)
{
	text *error = idem_history_last_error(errors);

	if (error != NULL)
		idem_answer_text(fact, Anum_idem_job_facts_error,
						 cstring_to_text_with_len(VARDATA_ANY(error),
												  pg_mbcliplen(VARDATA_ANY(error),
															   VARSIZE_ANY_EXHDR(error),
															   MAX_ERROR_SHOWN)));
}

/* The row is a committed version, or this transaction has written it */
static void
put_job(Why *why, TupleTableSlot *row)
{
	IdemAnswer *fact = &why->answer;
	IdemTable *jobs = why->jobs;
	IdemJob job;
	IdemJobState state;
	Snapshot snapshot;
	Jsonb *errors = idem_row_jsonb(row, IDEM_JOBS_ERRORS);
	TimestampTz token_at;
	int npids;
	int *pids;
	bool is_due;

	idem_job_read(&job, row);
	token_at = job.token != 0 ? idem_clock_token_time(job.token) : 0;
	use_queue(why, jobs, row, IDEM_JOBS_QUEUE);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	state = idem_jobrow_state(jobs, &job, snapshot, why->now);
	UnregisterSnapshot(snapshot);
	is_due = state == IDEM_JOB_WAITING ||
		(state == IDEM_JOB_EXPIRED && !idem_job_is_mine(&job) &&
		 !idem_job_has_no_attempts_left(&job, &why->queue));

	/* K13: functions that write jobs raise an error as long as a subscription writes the table */
	if (idem_check_is_subscribed(RelationGetRelid(jobs->heap)))
	{
		idem_answer_string(fact, Anum_idem_job_facts_fact, "subscribed");
		idem_answer_put(fact);
	}
	if (why->queue.paused)
	{
		idem_answer_string(fact, Anum_idem_job_facts_fact, "paused");
		idem_answer_text(fact, Anum_idem_job_facts_name, why->queue.name);
		idem_answer_optional_time(fact, Anum_idem_job_facts_since,
								  idem_queuestore_paused_at(why->queue.name));
		idem_answer_put(fact);
	}

	idem_answer_string(fact, Anum_idem_job_facts_fact, "job");
	idem_answer_string(fact, Anum_idem_job_facts_state, idem_jobrow_state_words[state]);
	idem_answer_bool(fact, Anum_idem_job_facts_is_mine, idem_job_is_mine(&job));
	idem_answer_int32(fact, Anum_idem_job_facts_attempt, job.attempt);
	idem_answer_int32(fact, Anum_idem_job_facts_max_attempts,
					  idem_job_max_attempts(&job, &why->queue));
	idem_answer_text(fact, Anum_idem_job_facts_worker, idem_row_text(row, IDEM_JOBS_WORKER));
	idem_answer_time(fact, Anum_idem_job_facts_enqueued_at, job.enqueued_at);
	idem_answer_optional_time(fact, Anum_idem_job_facts_token_at, token_at);
	idem_answer_time(fact, Anum_idem_job_facts_run_at, job.run_at);
	idem_answer_optional_time(fact, Anum_idem_job_facts_lease_until, job.lease_until);
	idem_answer_time(fact, Anum_idem_job_facts_now, why->now);
	idem_answer_int64(fact, Anum_idem_job_facts_after_job, job.after_job);
	idem_answer_bool(fact, Anum_idem_job_facts_has_failed,
					 idem_history_has_error_since(errors,
												  token_at != 0 ? token_at : job.enqueued_at));
	set_error(fact, errors);
	if (is_due && state == IDEM_JOB_EXPIRED)
		set_fetches(why);
	idem_answer_put(fact);

	put_row_holders(why, row);
	/* sessions that wait to cancel the job; meanwhile it absorbs no more duplicates (J1) */
	pids = idem_jobtable_list_marks(why->job_id, &npids);
	for (int i = 0; i < npids; i++)
		idem_holders_put(fact, "held", "cancels", InvalidTransactionId, pids[i]);
	/* locks of a standby keep no fetch of the primary from its work */
	if (!RecoveryInProgress())
		put_table_holders(why);
	/* the jobs before it matter only if nothing else is in the way */
	if (is_due && fact->nrows == 1)
		put_count(why, &job);
}

/* The job is not here: M2, it belongs to another database, or there is none */
static void
put_absence(Why *why, const IdemShard *shard)
{
	IdemAnswer *fact = &why->answer;

	if (idem_shard_has_job(shard, why->job_id))
		idem_answer_string(fact, Anum_idem_job_facts_fact, "gone");
	else
	{
		idem_answer_string(fact, Anum_idem_job_facts_fact, "other_shard");
		idem_answer_int32(fact, Anum_idem_job_facts_slot,
						  idem_shard_slot_of_job(shard, why->job_id));
		if (shard->number >= 0)
			idem_answer_int32(fact, Anum_idem_job_facts_shard, shard->number);
	}
	idem_answer_put(fact);
}

/* The job is not live: it has ended, and its queue keeps it, or it is not here */
static void
put_end(Why *why)
{
	IdemAnswer *fact = &why->answer;
	IdemTable log;
	IdemLookup lookup;
	IdemProbeResult probe;
	Snapshot snapshot;

	idem_jobtable_open_log(&log, AccessShareLock);
	lookup = idem_jobtable_by_id(&log, why->job_id);
	idem_probe_latest(&log, &lookup, &probe);
	if (probe.found == IDEM_FOUND_ROW)
	{
		use_queue(why, &log, probe.row, IDEM_JOB_LOG_QUEUE);
		idem_answer_string(fact, Anum_idem_job_facts_fact, "ended");
		idem_answer_text(fact, Anum_idem_job_facts_state,
						 idem_row_text(probe.row, IDEM_JOB_LOG_STATE));
		idem_answer_time(fact, Anum_idem_job_facts_since,
						 idem_row_timestamp(probe.row, IDEM_JOB_LOG_ENDED_AT));
		idem_answer_int32(fact, Anum_idem_job_facts_attempt,
						  idem_row_int32(probe.row, IDEM_JOB_LOG_ATTEMPT));
		set_error(fact, idem_row_jsonb(probe.row, IDEM_JOB_LOG_ERRORS));
		idem_answer_put(fact);
	}
	else
	{
		/* one snapshot for both tables: a retry or a cancel may move the job between two looks */
		snapshot = RegisterSnapshot(GetLatestSnapshot());
		if (!idem_probe_shows(why->jobs, &why->lookup, snapshot) &&
			!idem_probe_shows(&log, &lookup, snapshot))
			/* M4: it may have gone with its slot */
			put_absence(why, idem_shard_get_latest());
		UnregisterSnapshot(snapshot);
	}
	idem_table_close(&log);
}

/*
 * H3: the facts about a job, what an operator has set first.  There is always one, even if the job
 * has ended or is not there.
 */
Datum
idem_job_facts(PG_FUNCTION_ARGS)
{
	Why why = {.now = idem_clock_now()};
	IdemTable jobs;

	idem_fn_begin(fcinfo, &idem_job_facts_signature, NULL);
	idem_answer_begin(&why.answer, fcinfo, &idem_job_facts_signature);
	why.job_id = idem_args_job_id(fcinfo, 0);
	why.jobs = &jobs;
	idem_jobtable_open(&jobs, AccessShareLock);
	why.lookup = idem_jobtable_by_id(&jobs, why.job_id);

	why.open = table_slot_create(jobs.heap, NULL);

	if (!idem_shard_has_job(idem_shard_get(), why.job_id))
		put_absence(&why, idem_shard_get());
	/* the server keeps its list of processes until the transaction ends: read it anew */
	pgstat_clear_backend_activity_snapshot();
	/* no fact: the transaction in the way has ended meanwhile, or the job has moved */
	while (why.answer.nrows == 0)
	{
		IdemProbeResult probe;

		CHECK_FOR_INTERRUPTS();
		idem_probe_find_open(&jobs, &why.lookup, why.open);
		idem_probe_latest(&jobs, &why.lookup, &probe);
		if (probe.found == IDEM_FOUND_ROW)
			put_job(&why, probe.row);
		else if (probe.found == IDEM_FOUND_NONE)
			put_end(&why);
		else
		{
			idem_probe_find_open(&jobs, &why.lookup, why.open);
			if (TTS_EMPTY(why.open))
				continue;
			use_queue(&why, &jobs, why.open, IDEM_JOBS_QUEUE);
			idem_holders_put(&why.answer, "new", name_insert(why.open), idem_row_xmin(why.open), 0);
		}
	}
	ExecDropSingleTupleTableSlot(why.open);
	idem_table_close(&jobs);
	return (Datum) 0;
}
