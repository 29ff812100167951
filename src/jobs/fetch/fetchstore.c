/*
 * fetchstore.c
 *		The protocol of fetch: which jobs are due, and how a transaction takes them.
 *
 * Fetch walks over the index on (queue, priority, run_at, job_id) with a dirty
 * snapshot, which shows changes later than the snapshot of the transaction.
 * Fetch waits for no transaction: it skips a job that another transaction has
 * inserted, is changing or has locked.  Before it updates a job that is due, it
 * locks the row FOR UPDATE, because an UPDATE alone does not conflict with the KEY
 * SHARE lock of a transaction whose duplicate the job has absorbed (J2, enqueuestore.c).
 *
 * Entries of jobs that have ended stay in the index until VACUUM, and longer
 * while a transaction holds an old snapshot.  These, and jobs that are leased, blocked or
 * scheduled, are skipped.  Fetches share what they skip (J14).  The
 * first half of this file keeps the run: what the fetch has skipped since the last job that it
 * took, or that an open transaction holds.  At first only the weight of the run is counted.  If it
 * becomes too heavy, the fetch registers as the walker of the queue and looks at the run
 * again, from its beginning.  Only what a walker has seen can become a range, because
 * writers note what they change while there is a walker.  doc/jobs-protocol.md has
 * the protocol.  A fetch that fails is released as the walker when its transaction or
 * subtransaction is rolled back.
 *
 * A walk can take long.  So the clock is read again when a job is taken, and before a job counts
 * as not due; and a long walk that has found nothing is repeated (J14).
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "common/pg_prng.h"
#include "executor/instrument.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/fetch/fetch.h"

/* Why and until when a fetch skips an entry of the index */
typedef struct Skip
{
	TimestampTz until; /* DT_NOEND: as long as no transaction changes it */
	bool is_mine;	   /* this transaction has changed the row and is still open */
	bool is_blocked;   /* a follow-up job that is blocked */
} Skip;

/* The walk of a fetch over the index, and what it has skipped */
typedef struct Walk
{
	IdemQueueRef *queue;
	IdemSkips *skips;
	bool is_shared; /* the ranges are in shared memory, where writers note changes */
	TimestampTz now;
	int64 began; /* by the steady clock, as steady, the last time it was read */
	int64 steady;
	uint64 id; /* number of this fetch as the walker of the queue; 0: it does not collect */
	bool may_register;
	bool looks_again;		/* it ignores ranges that are due for another look */
	bool ignores_ranges;	/* it ignores all of them */
	bool announced_blocked; /* called idem_skips_announce_blocked() as the walker */
	bool has_jumped;
	bool jumped_blocked; /* a range that it has jumped over has blocked jobs */
	TimestampTz until;	 /* the earliest time of these ranges; DT_NOEND: none has one */
	IdemSkipRange run;	 /* skipped since the last job taken or held, or the last publishing */
	IdemSkipView view;
} Walk;

/* Begin to collect after skipping this much.  A jump counts for its search in the index. */
#define MANY_SKIPPED 8
#define JUMP_WEIGHT	 2

/* Publish a range after this many entries, so that few changes fall into the unpublished part */
#define PUBLISH_AFTER 64

/* A walk of more microseconds is long: enqueues of other sessions have come meanwhile */
#define LONG_WALK 1000

/*
 * Identifies this transaction, as long as none of its subtransactions has been rolled
 * back.  0: not needed yet.
 */
static uint64 owner = 0;

/* The fetch under way is this walker of the queue, whose entry is pinned; 0: it is none */
static IdemQueueRef *walked = NULL;
static uint64 walker = 0;

/*
 * The transaction has ended, or a subtransaction was rolled back.  A fetch that has failed there
 * collects no more; another one can begin at once.
 */
void
idem_fetchstore_forget(void)
{
	owner = 0;
	if (walker == 0)
		return;
	Assert(walked->is_pinned);
	idem_skips_release(walked->entry.skips, walker);
	walker = 0;
}

/*
 * The owner of ranges that only this transaction may use.  They outlive it, so the number is
 * random: the server may give the process id to another backend.
 */
static uint64
get_owner(void)
{
	if (owner == 0)
	{
		owner = pg_prng_uint64(&pg_global_prng_state) | 1;
		idem_fn_at_end |= IDEM_AT_END_WALK;
	}
	return owner;
}

/* Begin an empty run behind this position */
static void
begin_run(Walk *walk, const IdemPosition *after)
{
	memset(&walk->run, 0, sizeof(walk->run));
	walk->run.after = walk->run.upto = *after;
	walk->run.until = DT_NOEND;
	walk->run.looked_at = walk->steady;
}

/* Try to become the walker, and begin the run anew */
static bool
register_walker(Walk *walk)
{
	IdemPosition after = walk->run.after;

	walk->steady = idem_clock_steady();
	walk->id = idem_skips_register(walk->skips, &after, walk->steady);
	if (walk->id == 0)
		return false;
	if (walk->is_shared)
	{
		walked = walk->queue;
		walker = walk->id;
		idem_fn_at_end |= IDEM_AT_END_WALK;
	}
	walk->announced_blocked = false;
	begin_run(walk, &after);
	return true;
}

/*
 * Begin the walk of a fetch at the beginning of the queue.  now is its clock.  If a range
 * is due for another look, this fetch looks at it, unless there is another walker.
 */
static void
begin_walk(Walk *walk, IdemQueueRef *ref, TimestampTz now)
{
	memset(walk, 0, offsetof(Walk, view));
	walk->queue = ref;
	walk->skips = idem_queueref_skips(walk->queue);
	walk->is_shared = walk->queue->is_pinned;
	walk->now = now;
	walk->until = DT_NOEND;
	walk->began = walk->steady = idem_clock_steady();
	walk->may_register = true;
	begin_run(walk, &idem_first_position);
	/* no other fetch can be the walker, so it was one that has failed */
	if (unlikely(!walk->is_shared && walk->skips->walker != 0))
		idem_skips_release(walk->skips, walk->skips->walker);
	idem_skips_read(walk->skips, now, walk->steady, owner, false, &walk->view);
	if (walk->view.is_overdue && register_walker(walk))
	{
		walk->looks_again = true;
		idem_skips_read(walk->skips, now, walk->steady, owner, true, &walk->view);
	}
}

/* The fetch is not the walker, or no longer */
static void
end_walker(Walk *walk)
{
	walk->id = 0;
	walker = 0;
}

/*
 * Publish the run; the walker continues behind next.  is_held: no range may contain that position.
 * Returns false if the fetch is no longer the walker.
 */
static bool
publish_seen(Walk *walk, const IdemPosition *next, bool is_held)
{
	walk->steady = idem_clock_steady();
	walk->run.cost = Min(Max(walk->steady - walk->run.looked_at, 0), PG_INT32_MAX);
	return idem_skips_publish(walk->skips, walk->id, &walk->run, next, is_held,
							  walk->steady);
}

/* Publish the run, and begin the next one */
static void
publish_run(Walk *walk, const IdemPosition *next, bool is_held)
{
	if (!publish_seen(walk, next, is_held))
	{
		/* another fetch is the walker, or a writer has noted a change before this position */
		end_walker(walk);
		walk->may_register = true;
	}
	begin_run(walk, next);
}

/*
 * Has this fetch skipped so much that it should collect?  If so, it is the walker now and
 * goes back to the beginning of the run.
 */
static bool
goes_back(Walk *walk)
{
	if (likely(walk->run.weight < MANY_SKIPPED) || walk->id != 0 || !walk->may_register)
		return false;
	walk->may_register = false;
	if (!register_walker(walk))
		return false;
	if (!walk->ignores_ranges)
		idem_skips_read(walk->skips, walk->now, walk->steady, owner, walk->looks_again,
						&walk->view);
	return true;
}

/* The range that contains the position, or NULL */
static const IdemSkipRange *
find_range(const Walk *walk, const IdemPosition *position)
{
	for (int i = 0; i < walk->view.n; i++)
	{
		if (idem_skips_contains(&walk->view.ranges[i], position))
			return &walk->view.ranges[i];
	}
	return NULL;
}

/* J14: where the fetch continues behind this position: behind all ranges that begin there */
static IdemPosition
jump_over(Walk *walk, const IdemPosition *from)
{
	IdemPosition to = *from;

	for (int i = 0; i < walk->view.n; i++)
	{
		const IdemSkipRange *range = &walk->view.ranges[i];

		if (idem_skips_compare(&range->after, &to) <= 0 &&
			idem_skips_compare(&to, &range->upto) < 0)
		{
			to = range->upto;
			walk->until = Min(walk->until, range->until);
			walk->jumped_blocked |= range->has_blocked;
		}
	}
	if (idem_skips_compare(from, &to) == 0)
		return to;
	walk->has_jumped = true;
	if (walk->id != 0)
	{
		/* there is no entry between the last one that was skipped and the range */
		walk->run.upto = *from;
		publish_run(walk, &to, false);
	}
	walk->run.weight += JUMP_WEIGHT;
	return to;
}

/*
 * J14: the fetch skips the entries up to this position: their jobs cannot be fetched before the
 * time skip->until.
 *
 * A job whose row has moved has several entries at one position.  All of them must have been
 * seen before a range with the position is published, and if one of them belongs to this
 * transaction, the position does.  So a run is published before the next position is added,
 * not after the last one.
 */
static void
add_skipped(Walk *walk, const IdemPosition *upto, const Skip *skip)
{
	bool is_empty = idem_skips_compare(&walk->run.after, &walk->run.upto) >= 0;
	bool is_same = idem_skips_compare(&walk->run.upto, upto) == 0;
	uint64 its_owner;

	walk->run.weight++;
	if (walk->id == 0)
		return;
	its_owner = skip->is_mine ? get_owner() : 0;
	if (is_same && its_owner == 0)
		its_owner = walk->run.owner;
	if (!is_empty &&
		(walk->run.owner != its_owner || (walk->run.weight > PUBLISH_AFTER && !is_same)))
	{
		IdemPosition next = is_same ? idem_skips_before(upto) : walk->run.upto;

		walk->run.upto = next;
		publish_run(walk, &next, false);
		walk->run.weight = 1;
	}
	walk->run.upto = *upto;
	walk->run.until = Min(walk->run.until, skip->until);
	walk->run.owner = its_owner;
	walk->run.has_blocked |= skip->is_blocked;
}

/*
 * J14: the fetch has taken the job at this position, or an open transaction holds it.  The run
 * ends before it.
 */
static void
end_run(Walk *walk, const IdemPosition *position)
{
	if (walk->id != 0)
	{
		walk->run.upto = idem_skips_before(position);
		publish_run(walk, position, true);
	}
	else
		begin_run(walk, position);
}

/* The walk ends; at_end: there are no more entries, after many pages of dead ones if is_far */
static void
end_walk(Walk *walk, bool at_end, bool is_far)
{
	if (walk->id == 0)
		return;
	if (at_end)
	{
		if (is_far)
			walk->run.upto = idem_last_position;
		(void) publish_seen(walk, &walk->run.upto, false);
	}
	idem_skips_release(walk->skips, walk->id);
	end_walker(walk);
}

/* A search in the index reads at most this many pages; more of them had only dead entries */
#define PAGES_OF_SEARCH 4

/* What becomes of the job of an entry */
typedef enum Outcome
{
	OUTCOME_TAKEN,
	OUTCOME_SKIPPED, /* it cannot be fetched, whatever open transactions do */
	OUTCOME_HELD	 /* it may become free when an open transaction ends */
} Outcome;

/* A fetch under way */
typedef struct Fetch
{
	IdemTable *jobs;
	const IdemFetch *args;
	const IdemShard *shard;
	IdemLook *look;									/* only look (A2): take nothing; else NULL */
	void (*put)(const IdemJobInfo *job, void *arg); /* gets each job that is taken */
	void *arg;
	Relation index;
	SnapshotData dirty;
	IdemLeafWalk leaf;
	TimestampTz now;
	Walk walk;
	int64 npages; /* pages of the index read for the last entry */
	int found;
	bool is_counted;		   /* it was fetched before, in a transaction that has failed (S1) */
	MemoryContext job_context; /* reset after each job */
} Fetch;

/* By the steady clock: until then, looks pass over jobs without attempts left (J13) */
static int64 pass_spent_until = 0;

/*
 * Read the clock again.  If it was set back, the old time stays: a lease that ended before the job
 * was due would be hidden by skip ranges.
 */
static void
advance_clock(Fetch *fetch)
{
	fetch->now = Max(fetch->now, idem_clock_now());
}

/* J14: has the time come?  The jobs enqueued since the clock was last read are due. */
static bool
has_come(Fetch *fetch, TimestampTz time)
{
	if (likely(time <= fetch->now))
		return true;
	advance_clock(fetch);
	return time <= fetch->now;
}

/* Continue behind this position, and behind the ranges that begin there */
static void
continue_after(Fetch *fetch, const IdemPosition *after)
{
	IdemPosition position = jump_over(&fetch->walk, after);
	bool at_begin = idem_skips_compare(&position, &idem_first_position) == 0;
	Datum values[] = {
		PointerGetDatum(fetch->args->queue.name), Int32GetDatum(position.priority),
		TimestampTzGetDatum(position.run_at), Int64GetDatum(position.job_id)};
	IdemLeafStart start = {
		.values = values, .n = at_begin ? 1 : lengthof(values), .after = !at_begin, .nequal = 1};

	idem_leaf_end(&fetch->leaf);
	idem_leaf_begin(&fetch->leaf, fetch->jobs, fetch->index, &fetch->dirty, &start);
}

/* Go to the next entry of the index; false if there is none */
static bool
get_next_entry(Fetch *fetch, IdemPosition *entry)
{
	IndexTuple tuple = &fetch->leaf.entry.tuple;
	TupleDesc desc = RelationGetDescr(fetch->index);
	int64 before = pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read;
	bool found;
	bool isnull;

	CHECK_FOR_INTERRUPTS();
	found = idem_leaf_next(&fetch->leaf);
	fetch->npages = pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read - before;
	if (fetch->npages > PAGES_OF_SEARCH)
		fetch->walk.run.weight += (int) Min(fetch->npages - PAGES_OF_SEARCH, PG_INT16_MAX);
	if (!found)
		return false;
	entry->priority = DatumGetInt32(index_getattr(tuple, 2, desc, &isnull));
	entry->run_at = DatumGetTimestampTz(index_getattr(tuple, 3, desc, &isnull));
	entry->job_id = DatumGetInt64(index_getattr(tuple, 4, desc, &isnull));
	return true;
}

/*
 * May the job be taken?  If not, *outcome says why, and *skip until when.  M2: a job of another
 * shard is not part of a skip range, because its slot can come back.
 */
static bool
is_due(Fetch *fetch, const IdemJob *job, Outcome *outcome, Skip *skip)
{
	Walk *walk = &fetch->walk;
	bool collects = walk->id != 0;

	skip->is_mine = idem_job_is_mine(job);
	if (collects && job->after_job != 0 && !job->is_leased && !walk->announced_blocked)
	{
		idem_skips_announce_blocked(walk->skips, walk->id);
		walk->announced_blocked = true;
	}
	*outcome = OUTCOME_HELD;
	switch (idem_jobrow_is_fetchable(fetch->jobs, job, &fetch->dirty, fetch->shard, fetch->now,
									 collects))
	{
		case IDEM_FETCHABLE:
			return true;
		case IDEM_FETCHABLE_ELSEWHERE:
		case IDEM_FETCHABLE_OPEN:
		case IDEM_FETCHABLE_LATER:
			break;
		case IDEM_FETCHABLE_LEASED:
			*outcome = OUTCOME_SKIPPED;
			if (!skip->is_mine)
				skip->until = job->lease_until;
			break;
		case IDEM_FETCHABLE_BLOCKED:
			*outcome = OUTCOME_SKIPPED;
			skip->is_blocked = true;
			break;
		case IDEM_FETCHABLE_UNSETTLED:
			skip->is_blocked = true;
			break;
	}
	if (skip->is_blocked && fetch->look != NULL)
		fetch->look->blocked = true;
	return false;
}

/*
 * Take the job, which is due, if no other transaction has locked it (J2, J10, J14).  J18: if
 * another worker had it, that one has not said how its attempt ended.
 */
static bool
take_job(Fetch *fetch, const IdemJob *job, IdemJobInfo *fetched)
{
	const IdemFetch *args = fetch->args;
	TupleTableSlot *row = idem_job_row(job);
	TimestampTz until;
	TupleTableSlot *new;

	/*
	 * The lock FOR UPDATE is granted only after all absorbed enqueues have ended (J2), so the WAL
	 * position of the fetch is later than their commits (J10).
	 */
	if (idem_table_lock_row(fetch->jobs, job->tid, LockTupleExclusive, LockWaitSkip, row) != TM_Ok)
		return false;
	idem_touched_held(args->queue.ref, false);

	/*
	 * J13: a job without attempts left becomes dead.  If that has to wait, the looks of this
	 * backend pass over such jobs for a while: a worker that waits and fetches would poll without
	 * a pause.
	 */
	switch (idem_history_make_dead_if_spent(fetch->jobs, job, &args->queue, NULL))
	{
		case IDEM_DEAD_NOT_SPENT:
			break;
		case IDEM_DEAD_SKIPPED:
			pass_spent_until = idem_clock_steady() + idem_guc_look_after * INT64CONST(1000);
			return false;
		default:
			return false;
	}

	/* J14: the lease begins now, not when the walk began. */
	advance_clock(fetch);
	until = fetch->now + args->lease;
	idem_jobrow_copy(job, &args->queue, fetched);
	fetched->attempt++;
	fetched->token = idem_clock_next_token(job->token, fetch->now);
	fetched->due_since = idem_job_due_since(job);

	new = idem_table_copy_row(fetch->jobs, row);
	if (job->is_leased)
		idem_row_set(new, IDEM_JOBS_ERRORS,
					 JsonbPGetDatum(idem_history_add_error(idem_row_jsonb(row, IDEM_JOBS_ERRORS),
														   job->attempt,
														   cstring_to_text("The worker has not said how this attempt ended."))));
	idem_row_set(new, IDEM_JOBS_ATTEMPT, Int32GetDatum(fetched->attempt));
	idem_row_set(new, IDEM_JOBS_TOKEN, Int64GetDatum(fetched->token));
	idem_row_set(new, IDEM_JOBS_LEASE_UNTIL, TimestampTzGetDatum(until));
	if (args->lease > 0)
		idem_row_set(new, IDEM_JOBS_LEASED_AT, TimestampTzGetDatum(fetch->now));
	else
		idem_row_clear(new, IDEM_JOBS_LEASED_AT);
	idem_row_set_varlena(new, IDEM_JOBS_WORKER, args->worker);
	idem_jobrow_store(fetch->jobs, job, new, args->queue.ref, IDEM_CHANGE_LEASED);
	idem_touched_fetched(args->queue.ref, args->lease, until);
	if (args->lease == 0)
		idem_unfinished_add(IDEM_UNFINISHED_JOBS, 1);
	/* J10: later than the commits of the absorbed enqueues */
	fetched->lsn = XactLastRecEnd;
	return true;
}

/* Take the job, which is due, and pass it to put(); or only look whether that is possible */
static Outcome
take_or_look(Fetch *fetch, const IdemJob *job)
{
	IdemJobInfo fetched;

	if (fetch->look != NULL)
	{
		IdemLockers lockers;

		if (job->is_leased && idem_clock_steady() < pass_spent_until &&
			idem_job_has_no_attempts_left(job, &fetch->args->queue))
			return OUTCOME_HELD;
		idem_row_lockers(idem_job_row(job), &lockers);
		return TransactionIdIsValid(lockers.shared) || TransactionIdIsValid(lockers.exclusive) ?
			OUTCOME_HELD :
			OUTCOME_TAKEN;
	}
	if (!take_job(fetch, job, &fetched))
		return OUTCOME_HELD;
	fetch->put(&fetched, fetch->arg);
	if (!fetch->is_counted)
		idem_counters_add_queue_time(fetch->args->queue.ref, IDEM_QUEUE_COUNTER_FETCHED,
									 IDEM_HISTOGRAM_WAIT, fetched.due_since, fetch->now);
	return OUTCOME_TAKEN;
}

/* A4: something that this look skips can be fetched from this time on */
static void
note_due(Fetch *fetch, TimestampTz due)
{
	if (fetch->look != NULL)
		fetch->look->due = Min(fetch->look->due, due);
}

/* Take or skip the job of the current entry */
static void
visit_entry(Fetch *fetch, const IdemPosition *entry)
{
	Skip skip = {.until = DT_NOEND};
	Outcome outcome = OUTCOME_SKIPPED;

	if (idem_leaf_fetch(&fetch->leaf))
	{
		MemoryContext oldcontext = MemoryContextSwitchTo(fetch->job_context);
		IdemJob job;

		idem_job_read(&job, fetch->leaf.row);
		if (is_due(fetch, &job, &outcome, &skip))
			outcome = take_or_look(fetch, &job);
		MemoryContextSwitchTo(oldcontext);
		MemoryContextReset(fetch->job_context);
	}
	else
		/* the job has ended, or was never committed; or this transaction has ended it */
		skip.is_mine = fetch->walk.id != 0 &&
			idem_row_is_changed_by_me(fetch->jobs, &fetch->leaf.entry.tuple.t_tid);

	if (outcome == OUTCOME_SKIPPED)
	{
		note_due(fetch, skip.until);
		add_skipped(&fetch->walk, entry, &skip);
		return;
	}
	fetch->found += outcome == OUTCOME_TAKEN;
	end_run(&fetch->walk, entry);
}

/* Scan the index until the batch is full */
static void
scan_queue(Fetch *fetch)
{
	Walk *walk = &fetch->walk;
	bool at_end = false;

	continue_after(fetch, &idem_first_position);
	while (fetch->found < fetch->args->batch && !at_end)
	{
		const IdemSkipRange *range;
		IdemPosition entry;

		at_end = !get_next_entry(fetch, &entry);
		if (goes_back(walk))
		{
			IdemPosition after = walk->run.after;

			at_end = false;
			continue_after(fetch, &after);
		}
		else if (at_end)
			break;
		else if ((range = find_range(walk, &entry)) != NULL)
			continue_after(fetch, &range->after);
		else if (!has_come(fetch, entry.run_at))
		{
			/* a future run_at ends its priority, whatever the state of its row is */
			Skip skip = {.until = entry.run_at};
			IdemPosition end = idem_last_position;

			end.priority = entry.priority;
			note_due(fetch, entry.run_at);
			add_skipped(walk, &end, &skip);
			continue_after(fetch, &end);
		}
		else
			visit_entry(fetch, &entry);
	}
	end_walk(walk, at_end, fetch->npages > PAGES_OF_SEARCH);
	idem_leaf_end(&fetch->leaf);
}

/* Scan a queue once, from its beginning */
static void
scan_once(Fetch *fetch)
{
	Walk *walk = &fetch->walk;

	fetch->now = idem_clock_now();
	begin_walk(walk, fetch->args->queue.ref, fetch->now);
	scan_queue(fetch);
	/* without shared memory other sessions cannot note their jobs: look at the whole queue */
	if (walk->has_jumped && !walk->is_shared && fetch->found < fetch->args->batch)
	{
		walk->ignores_ranges = true;
		walk->view.n = 0;
		begin_run(walk, &idem_first_position);
		(void) register_walker(walk);
		scan_queue(fetch);
	}
}

/*
 * Scan a queue that is not paused, from its beginning.  J14: while a long walk has looked at one
 * part of the queue, jobs may have come to the parts before it.  So if it has found none, it is
 * repeated, once, and jumps over what it has skipped.  Without shared memory it could not jump.
 * Returns whether it was repeated.
 */
static bool
scan_from_start(Fetch *fetch)
{
	bool is_repeated;

	InitDirtySnapshot(fetch->dirty);
	fetch->shard = idem_shard_get();
	fetch->index = idem_jobtable_index(fetch->jobs, IDEM_INDEX_FETCH);
	fetch->job_context = AllocSetContextCreate(CurrentMemoryContext, "idem fetch", ALLOCSET_DEFAULT_SIZES);

	scan_once(fetch);
	is_repeated = fetch->found == 0 && fetch->walk.is_shared &&
		idem_clock_steady() - fetch->walk.began > LONG_WALK;
	if (is_repeated)
	{
		if (fetch->look != NULL)
		{
			fetch->look->due = DT_NOEND;
			fetch->look->blocked = false;
		}
		scan_once(fetch);
	}
	MemoryContextDelete(fetch->job_context);
	return is_repeated;
}

/*
 * J2: a fetch without a lease is refused in REPEATABLE READ and SERIALIZABLE.
 * There the transaction has one snapshot, taken before the fetch has locked the
 * job.  The work would not see the changes of an enqueue that the job absorbed
 * after that snapshot.
 */
void
idem_fetchstore_check_isolation(const char *command, const char *hint)
{
	if (IsolationUsesXactSnapshot())
		ereport(ERROR,
				errcode(ERRCODE_INVALID_TRANSACTION_STATE),
				errmsg("%s needs isolation level READ COMMITTED", command),
				errdetail("The snapshot of this transaction may be older than the changes that its jobs must see."),
				errhint("%s", hint));
}

/*
 * Fetch jobs that are due, in the order of the index, at most a batch, and pass
 * each one to put().  A paused queue has none.  The WAL position that put() gets is flushed
 * soon (J10).  Returns true if the walk was long and has found none: meanwhile jobs may have come
 * to other queues.
 */
bool
idem_fetchstore_fetch(IdemTable *jobs, const IdemFetch *args,
					  void (*put)(const IdemJobInfo *job, void *arg), void *arg)
{
	Fetch fetch = {.jobs = jobs, .args = args, .put = put, .arg = arg};
	bool was_long;

	if (args->queue.paused)
		return false;
	was_long = scan_from_start(&fetch);
	idem_skips_note_fetch(fetch.walk.skips, fetch.now);

	/*
	 * J10: a worker may wait until a replica has replayed the position that fetch
	 * returned.  Without a lease this transaction commits only after the work, so
	 * let the WAL writer flush the position soon.
	 */
	if (args->lease == 0 && fetch.found > 0)
		XLogSetAsyncXactLSN(XactLastRecEnd);
	return was_long;
}

/*
 * J21: fetch this job again if it can be fetched now, whatever its place in the queue is, and
 * whether or not the queue is paused.  The first fetch, which was rolled back, is counted already.
 */
void
idem_fetchstore_fetch_one(IdemTable *jobs, const IdemFetch *args, int64 job_id,
						  void (*put)(const IdemJobInfo *job, void *arg), void *arg)
{
	Fetch fetch = {
		.jobs = jobs,
		.args = args,
		.put = put,
		.arg = arg,
		.shard = idem_shard_get(),
		.now = idem_clock_now(),
		.is_counted = true};
	IdemLookup lookup = idem_jobtable_by_id(jobs, job_id);
	Skip skip = {.until = DT_NOEND};
	IdemProbeResult probe;
	Outcome outcome;
	IdemJob job;

	idem_probe_latest(jobs, &lookup, &probe);
	if (probe.found != IDEM_FOUND_ROW)
		return;
	idem_job_read(&job, probe.row);
	fetch.dirty.xmax = probe.xwait;
	if (is_due(&fetch, &job, &outcome, &skip))
		(void) take_or_look(&fetch, &job);
}

/*
 * A2, A4: how many jobs could a fetch take now, up to look->limit?  It skips what a fetch skips,
 * and takes nothing.  It counts a job that a fetch would make dead.
 */
void
idem_fetchstore_look(IdemTable *jobs, const IdemQueue *queue, IdemLook *look)
{
	IdemFetch args = {.queue = *queue, .batch = look->limit};
	Fetch fetch = {.jobs = jobs, .args = &args, .look = look};

	if (queue->paused)
		return;
	(void) scan_from_start(&fetch);
	/* A4: what the ranges over which it has jumped have to say */
	look->due = Min(look->due, fetch.walk.until);
	look->blocked |= fetch.walk.jumped_blocked;
	look->found = fetch.found;
}
