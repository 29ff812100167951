/*
 * schedulestore.c
 *		The rows of idem.schedules: declare, remove, pause, find what is due; and the ticks of
 *		a schedule become jobs.
 *
 * A role that may use the queue of a schedule may change the schedule; the functions here
 * check that, but for those about ticks, which run for the administrator and the worker.  The
 * role that declares a schedule becomes its owner, and no other change makes a role the owner.
 * Each tick asks whether the owner may enqueue (T9).
 *
 * A schedule is found by its latest committed row, also if the snapshot of the transaction
 * is older.  A session that changes a schedule waits for another one that does.  A tick does
 * not wait: it skips a row that is locked (T6).
 *
 * The launcher sleeps until the earliest tick of any database.  A commit that makes a tick
 * earlier tells it (idem_entries_lower_tick()).
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "schedules/schedules.h"

#define KEY_SUFFIX_LEN 40

/* For a row that was not written by the functions here */
#define REPAIR_HINT "Declare the schedule again."

StaticAssertDecl(IDEM_MAX_SCHEDULE_LEN + KEY_SUFFIX_LEN <= IDEM_MAX_KEY_LEN,
				 "the key of a tick is not longer than other keys");

static IdemTableCache schedules_cache;

const IdemTableDef idem_schedulestore_def = {
	IDEM_DECLARED_TABLE_schedules, .cache = &schedules_cache};

/* The earliest tick that this transaction has written; DT_NOEND: none */
static TimestampTz earliest = DT_NOEND;

/* T6: the transaction has ended; if it has committed, other sessions see its ticks */
void
idem_schedulestore_end_transaction(bool is_commit)
{
	if (is_commit && earliest != DT_NOEND)
		idem_entries_lower_tick(MyDatabaseId, earliest);
	earliest = DT_NOEND;
}

/* This transaction writes a tick; a rollback to a savepoint leaves the note (harmless) */
static void
note_tick(TimestampTz tick)
{
	/* the end of the transaction cannot make an entry in shared memory */
	(void) idem_entries_get_database();
	earliest = Min(earliest, tick);
	idem_fn_at_end |= IDEM_AT_END_TICK;
}

/* T6: does a subscription write the schedules or the jobs?  Then the publisher ticks. */
bool
idem_schedulestore_is_subscribed(void)
{
	static const char *const tables[] = {"schedules", "jobs", NULL};

	return idem_check_any_subscribed(tables);
}

/*
 * Find the schedule and lock its row, which waits.  Raises an error unless the current user may
 * change it (T8), or if it must exist and does not.  NULL: there is none.
 */
static TupleTableSlot *
lock_schedule(IdemTable *schedules, text *name, bool must_exist)
{
	IdemLookup lookup = {
		.index = schedules->pkey, .value = PointerGetDatum(name), .equal = F_TEXTEQ};
	IdemProbeResult probe;
	IdemQueue queue = {0};

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		idem_probe_existing(schedules, &lookup, &probe);
		if (probe.found == IDEM_FOUND_NONE && must_exist)
			ereport(ERROR,
					errcode(ERRCODE_UNDEFINED_OBJECT),
					errmsg("schedule does not exist"),
					errdetail("No schedule has this name."),
					errhint("The view idem.schedule_status lists the schedules."));
		if (probe.found == IDEM_FOUND_NONE)
			return NULL;
		if (probe.found == IDEM_FOUND_OPEN)
			idem_probe_wait(schedules, probe.xwait);
		else if (idem_table_lock_row(schedules, probe.row->tts_tid, LockTupleExclusive,
									 LockWaitBlock, probe.row) == TM_Ok)
			break;
	}
	idem_queuestore_use_of_row(schedules, probe.row, IDEM_SCHEDULES_QUEUE, &queue);
	return probe.row;
}

/* A time, or the special value that stands for null */
static TimestampTz
get_time(TupleTableSlot *row, AttrNumber attno, TimestampTz otherwise)
{
	return idem_row_isnull(row, attno) ? otherwise : idem_row_timestamp(row, attno);
}

/* A time, with which a special value stands for null */
static void
set_time(TupleTableSlot *row, AttrNumber attno, TimestampTz time)
{
	if (TIMESTAMP_NOT_FINITE(time))
		idem_row_clear(row, attno);
	else
		idem_row_set(row, attno, TimestampTzGetDatum(time));
}

/* When the schedule ticks */
static void
read_rhythm(TupleTableSlot *row, IdemRhythm *rhythm)
{
	NullableDatum every = idem_row_datum(row, IDEM_SCHEDULES_EVERY);

	memset(rhythm, 0, sizeof(*rhythm));
	rhythm->cron = idem_row_text(row, IDEM_SCHEDULES_CRON);
	if (every.isnull == (rhythm->cron == NULL))
		idem_args_refuse_value("cron", "Either cron or every must be null.", REPAIR_HINT);
	if (!every.isnull)
		rhythm->every = idem_args_span(every.value, "every", IDEM_SPAN_EVERY);
	rhythm->time_zone = idem_row_text(row, IDEM_SCHEDULES_TIME_ZONE);
	rhythm->starts_at = get_time(row, IDEM_SCHEDULES_STARTS_AT, DT_NOBEGIN);
	rhythm->ends_at = get_time(row, IDEM_SCHEDULES_ENDS_AT, DT_NOEND);
	if (!every.isnull && TIMESTAMP_NOT_FINITE(rhythm->starts_at))
		idem_args_refuse_value("starts_at", "An interval must have a finite start.", REPAIR_HINT);
	if (TIMESTAMP_IS_NOBEGIN(get_time(row, IDEM_SCHEDULES_NEXT_TICK, DT_NOEND)))
		idem_args_refuse_value("next_tick", "The time must be finite.", REPAIR_HINT);
}

/*
 * T5: do the ticks of the row go on with the new declaration, because cron or every, the time zone
 * and the start are the same?  An interval without a start keeps the start that it has.  This
 * raises no error, so that a declaration repairs a row that is invalid.
 */
static bool
keeps_ticks(TupleTableSlot *row, const IdemSchedule *schedule, IdemRhythm *new)
{
	NullableDatum every = idem_row_datum(row, IDEM_SCHEDULES_EVERY);
	TimestampTz starts_at = get_time(row, IDEM_SCHEDULES_STARTS_AT, DT_NOBEGIN);

	if (every.isnull != (new->cron != NULL) ||
		idem_row_isnull(row, IDEM_SCHEDULES_CRON) != (new->cron == NULL) ||
		!idem_row_varlena_equals(row, IDEM_SCHEDULES_TIME_ZONE, new->time_zone))
		return false;
	if (new->cron != NULL)
		return idem_row_varlena_equals(row, IDEM_SCHEDULES_CRON, new->cron) &&
			starts_at == new->starts_at;
	if (!DatumGetBool(DirectFunctionCall2(interval_eq, every.value, schedule->every)) ||
		TIMESTAMP_NOT_FINITE(starts_at))
		return false;
	if (TIMESTAMP_IS_NOBEGIN(new->starts_at))
		new->starts_at = starts_at;
	return starts_at == new->starts_at;
}

/* T5: the next tick after a declaration; DT_NOEND: none.  row: the schedule as it is, or NULL. */
static TimestampTz
choose_next(TupleTableSlot *row, const IdemSchedule *schedule, IdemRhythm *rhythm)
{
	TimestampTz now = idem_clock_now();

	if (row != NULL && keeps_ticks(row, schedule, rhythm))
	{
		TimestampTz next = get_time(row, IDEM_SCHEDULES_NEXT_TICK, DT_NOEND);

		if (!TIMESTAMP_NOT_FINITE(next))
			return next <= rhythm->ends_at ? next : DT_NOEND;
	}
	/* T2: without a start an interval starts now, and its first tick is one interval later */
	if (rhythm->cron == NULL && TIMESTAMP_IS_NOBEGIN(rhythm->starts_at))
		rhythm->starts_at = now - now % USECS_PER_SEC;
	return idem_ticks_first(rhythm, now);
}

/*
 * T10: insert a schedule, unless there are too many.  One lock for all names, for a moment, lets
 * one transaction at a time count and insert, so that the limit is exact.
 */
static bool
insert_schedule(IdemTable *schedules, TupleTableSlot *row)
{
	SnapshotData dirty;
	TupleTableSlot *other = idem_table_row(schedules);
	IndexScanDesc scan;
	int n = 0;
	bool inserted;

	idem_table_open_indexes(schedules);
	idem_table_lock_toast(schedules);
	idem_table_lock_hash(schedules, 0);

	/*
	 * Those that another open transaction inserts or removes count, as if the one commits and the
	 * other one rolls back.  An open update counts once.
	 */
	InitDirtySnapshot(dirty);
	scan = index_beginscan(schedules->heap, schedules->pkey, &dirty, NULL, 0, 0, SO_NONE);
	index_rescan(scan, NULL, 0, NULL, 0);
	while (index_getnext_slot(scan, ForwardScanDirection, other))
	{
		CHECK_FOR_INTERRUPTS();
		if (!TransactionIdIsValid(dirty.xmax) || idem_row_is_last_version(other))
			n++;
	}
	index_endscan(scan);
	if (n >= IDEM_MAX_SCHEDULES)
		ereport(ERROR,
				errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				errmsg("too many schedules"),
				errdetail("This database has %d schedules, and may not have more.", IDEM_MAX_SCHEDULES),
				errhint("Remove schedules with idem_unschedule(), or let one schedule do the work of many."));

	inserted = idem_table_insert(schedules, row);
	idem_table_unlock_hash(schedules, 0);
	return inserted;
}

/* Replace a row that this transaction has locked by a copy that was changed, with its next tick */
static void
update_schedule(IdemTable *schedules, TupleTableSlot *old, TupleTableSlot *new, TimestampTz next)
{
	set_time(new, IDEM_SCHEDULES_NEXT_TICK, next);
	if (idem_table_update(schedules, old, new, NULL) != TM_Ok)
		elog(ERROR, "could not change a schedule that this transaction has locked");
}

/*
 * T5, T9: declare a schedule, or change it.  Returns its next tick, or DT_NOEND if there is none.
 * The caller has checked the privileges on the new queue.  If another open transaction inserts
 * the same name, the insert reports it, and the next look waits for that transaction.
 */
TimestampTz
idem_schedulestore_set(IdemTable *schedules, const IdemSchedule *schedule)
{
	for (;;)
	{
		IdemRhythm rhythm = schedule->rhythm;
		TupleTableSlot *old = lock_schedule(schedules, schedule->name, false);
		TimestampTz next = choose_next(old, schedule, &rhythm);
		TupleTableSlot *row;

		if (old != NULL && !idem_row_isnull(old, IDEM_SCHEDULES_PAUSED_AT))
			next = DT_NOEND;
		row = old != NULL ? idem_table_copy_row(schedules, old) : idem_table_new_row(schedules);
		idem_row_set(row, IDEM_SCHEDULES_NAME, PointerGetDatum(schedule->name));
		idem_row_set(row, IDEM_SCHEDULES_QUEUE, PointerGetDatum(schedule->queue));
		idem_row_set(row, IDEM_SCHEDULES_OWNER, ObjectIdGetDatum(schedule->owner));
		idem_row_set_varlena(row, IDEM_SCHEDULES_CRON, rhythm.cron);
		if (rhythm.cron == NULL)
			idem_row_set(row, IDEM_SCHEDULES_EVERY, schedule->every);
		else
			idem_row_clear(row, IDEM_SCHEDULES_EVERY);
		idem_row_set(row, IDEM_SCHEDULES_TIME_ZONE, PointerGetDatum(rhythm.time_zone));
		idem_row_set(row, IDEM_SCHEDULES_MISSED, PointerGetDatum(schedule->missed));
		idem_row_set(row, IDEM_SCHEDULES_PRIORITY, Int32GetDatum(schedule->priority));
		idem_row_set_varlena(row, IDEM_SCHEDULES_PAYLOAD, schedule->payload);
		set_time(row, IDEM_SCHEDULES_STARTS_AT, rhythm.starts_at);
		set_time(row, IDEM_SCHEDULES_ENDS_AT, rhythm.ends_at);
		if (old != NULL)
			update_schedule(schedules, old, row, next);
		else
		{
			idem_row_set(row, IDEM_SCHEDULES_MISSED_TICKS, Int64GetDatum(0));
			set_time(row, IDEM_SCHEDULES_NEXT_TICK, next);
			if (!insert_schedule(schedules, row))
				continue;
		}
		note_tick(next);
		return next;
	}
}

/* Remove a schedule; false: there is none */
bool
idem_schedulestore_drop(IdemTable *schedules, text *name)
{
	TupleTableSlot *row = lock_schedule(schedules, name, false);

	if (row == NULL)
		return false;
	if (idem_table_delete(schedules, row, true) != TM_Ok)
		elog(ERROR, "could not remove a schedule that this transaction has locked");
	return true;
}

/* T5: pause a schedule; false: it was paused before */
bool
idem_schedulestore_pause(IdemTable *schedules, text *name)
{
	TupleTableSlot *old = lock_schedule(schedules, name, true);
	TupleTableSlot *new;

	if (!idem_row_isnull(old, IDEM_SCHEDULES_PAUSED_AT))
		return false;
	new = idem_table_copy_row(schedules, old);
	set_time(new, IDEM_SCHEDULES_PAUSED_AT, idem_clock_now());
	update_schedule(schedules, old, new, DT_NOEND);
	return true;
}

/*
 * T5: resume a schedule with the first tick from now on.  T6: that also helps a schedule whose
 * next tick is too late, because the clock was ahead.  False: this changes nothing.
 */
bool
idem_schedulestore_resume(IdemTable *schedules, text *name)
{
	TupleTableSlot *old = lock_schedule(schedules, name, true);
	TupleTableSlot *new;
	IdemRhythm rhythm;
	TimestampTz next;

	read_rhythm(old, &rhythm);
	next = idem_ticks_first(&rhythm, idem_clock_now());
	if (idem_row_isnull(old, IDEM_SCHEDULES_PAUSED_AT) &&
		get_time(old, IDEM_SCHEDULES_NEXT_TICK, DT_NOBEGIN) <= next)
		return false;
	new = idem_table_copy_row(schedules, old);
	idem_row_clear(new, IDEM_SCHEDULES_PAUSED_AT);
	update_schedule(schedules, old, new, next);
	note_tick(next);
	return true;
}

/* Begin a scan of the schedules in the order of their next ticks; one bound of two is given */
static IndexScanDesc
begin_ticks(IdemTable *schedules, Snapshot snapshot, StrategyNumber strategy, RegProcedure op,
			TimestampTz bound)
{
	static const AttrNumber columns[] = {IDEM_SCHEDULES_NEXT_TICK};
	Relation index =
		idem_table_find_index(schedules, columns, lengthof(columns),
							  "There is no index that orders the schedules by their next ticks.",
							  "Run CREATE INDEX ON idem.schedules (next_tick) WHERE next_tick IS NOT NULL.");
	IndexScanDesc scan = index_beginscan(schedules->heap, index, snapshot, NULL, 1, 0, SO_NONE);
	ScanKeyData key;

	ScanKeyInit(&key, 1, strategy, op, TimestampTzGetDatum(bound));
	index_rescan(scan, &key, 1, NULL, 0);
	return scan;
}

/* Names of the schedules that are due, by their ticks: at most max, behind the first */
List *
idem_schedulestore_list_due(IdemTable *schedules, TimestampTz now, int skip, int max)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan = begin_ticks(schedules, snapshot, BTLessEqualStrategyNumber,
									 F_TIMESTAMPTZ_LE, now);
	TupleTableSlot *row = idem_table_row(schedules);
	List *names = NIL;

	while (list_length(names) < max &&
		   index_getnext_slot(scan, ForwardScanDirection, row))
	{
		CHECK_FOR_INTERRUPTS();
		if (skip-- > 0)
			continue;
		names = lappend(names, idem_row_text(row, IDEM_SCHEDULES_NAME));
	}
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return names;
}

/*
 * How many schedules of the queue have ticks to come, but owners that may not enqueue into it if
 * the queue has this owner (T9)?  Every schedule is read.
 */
int64
idem_schedulestore_count_refused(IdemTable *schedules, text *queue, Oid owner)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan =
		index_beginscan(schedules->heap, schedules->pkey, snapshot, NULL, 0, 0, SO_NONE);
	TupleTableSlot *row = idem_table_row(schedules);
	int64 n = 0;

	index_rescan(scan, NULL, 0, NULL, 0);
	while (index_getnext_slot(scan, ForwardScanDirection, row))
	{
		CHECK_FOR_INTERRUPTS();
		if (idem_row_varlena_equals(row, IDEM_SCHEDULES_QUEUE, queue) &&
			!idem_row_isnull(row, IDEM_SCHEDULES_NEXT_TICK) &&
			idem_queuestore_may_enqueue(idem_row_oid(row, IDEM_SCHEDULES_OWNER), owner) !=
				IDEM_MAY_ENQUEUE)
			n++;
	}
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return n;
}

/* The earliest tick after this time, of all schedules; DT_NOEND: there is none */
TimestampTz
idem_schedulestore_next(IdemTable *schedules, TimestampTz after)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan = begin_ticks(schedules, snapshot, BTGreaterStrategyNumber,
									 F_TIMESTAMPTZ_GT, after);
	TupleTableSlot *row = idem_table_row(schedules);
	TimestampTz next = DT_NOEND;

	if (index_getnext_slot(scan, ForwardScanDirection, row))
		next = idem_row_timestamp(row, IDEM_SCHEDULES_NEXT_TICK);
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return next;
}

/* The key of the job of a tick: name@2026-11-19T04:00:00Z, with microseconds if there are any */
static text *
make_key(const text *name, TimestampTz tick)
{
	struct pg_tm tm;
	fsec_t fsec;
	StringInfoData key;

	if (timestamp2tm(tick, NULL, &tm, &fsec, NULL, NULL) != 0)
		ereport(ERROR,
				errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				errmsg("timestamp out of range"));
	initStringInfo(&key);
	appendBinaryStringInfo(&key, VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name));
	appendStringInfo(&key, "@%04d-%02d-%02dT%02d:%02d:%02d", tm.tm_year, tm.tm_mon, tm.tm_mday,
					 tm.tm_hour, tm.tm_min, tm.tm_sec);
	if (fsec != 0)
		appendStringInfo(&key, ".%06d", (int) fsec);
	appendStringInfoChar(&key, 'Z');
	return cstring_to_text_with_len(key.data, key.len);
}

/*
 * T9: raise an error unless the owner of the schedule may enqueue into its queue now.  The
 * message is all that the log and the views show of a tick that the worker runs.
 */
static void
check_owner(Oid owner, const IdemQueue *queue)
{
	static const char *const messages[] = {
		[IDEM_ROLE_IS_GONE] = "the owner of the schedule does not exist",
		[IDEM_NO_EXECUTE] = "the owner of the schedule may not execute idem_enqueue()",
		[IDEM_QUEUE_OF_ANOTHER] = "the owner of the schedule may not use its queue"};
	IdemMayEnqueue may = idem_queuestore_may_enqueue(owner, queue->owner);
	char *name = GetUserNameFromId(owner, true);

	if (may == IDEM_MAY_ENQUEUE)
		return;
	ereport(ERROR,
			errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			errmsg("%s", messages[may]),
			name != NULL ? errdetail("The role \"%s\" has declared the schedule last.", name) :
						   errdetail("The role %u has declared the schedule last; it was dropped.", owner),
			name != NULL ?
				errhint("Give the role its privileges back, declare the schedule again as a role that may use the queue, or remove it with idem_unschedule().") :
				errhint("Declare the schedule again as a role that may use the queue, or remove it with idem_unschedule()."));
}

/*
 * If the schedule is due: ask whether its owner may enqueue (T9), also if no tick gets a job;
 * enqueue a job for each tick that gets one, and advance the schedule (T1).  Both happen in the
 * transaction of the caller.  So each tick is one job, whatever crashes and however many processes
 * try.  Adds to *njobs how many jobs are new: another job may absorb a tick.
 *
 * It never waits for another transaction that has locked the schedule, or has enqueued the key of
 * a tick and is open; for the latter it raises 55P03 (T6).  The launcher is told of the next tick
 * unless the caller, the worker, looks for it later (T10).
 */
IdemTicked
idem_schedulestore_tick(text *name, TimestampTz now, bool tell_launcher, int *njobs)
{
	IdemTable schedules;
	IdemTable jobs;
	IdemLookup lookup = {.value = PointerGetDatum(name), .equal = F_TEXTEQ};
	IdemProbeResult probe;
	TM_Result locked = TM_Deleted;
	TupleTableSlot *row;
	TupleTableSlot *new;
	IdemMissed missed;
	IdemEnqueue enqueue = {0};
	int64 last_job = 0;
	IdemRhythm rhythm;
	IdemTicks ticks;
	Jsonb *payload;

	/* lock the row of the schedule that is due, without waiting */
	idem_table_open(&schedules, &idem_schedulestore_def, RowExclusiveLock);
	lookup.index = schedules.pkey;
	idem_probe_latest(&schedules, &lookup, &probe);
	row = probe.row;
	if (probe.found == IDEM_FOUND_ROW)
		locked = idem_table_lock_row(&schedules, row->tts_tid, LockTupleNoKeyExclusive,
									 LockWaitSkip, row);
	if (locked != TM_Ok || get_time(row, IDEM_SCHEDULES_NEXT_TICK, DT_NOEND) > now)
	{
		idem_table_close(&schedules);
		return locked == TM_WouldBlock ? IDEM_TICKED_LOCKED : IDEM_TICKED_LATER;
	}

	/*
	 * What its jobs have in common.  The queue says for how long a job absorbs duplicates of its
	 * key; a duplicate is always absorbed, and its payload is ignored.
	 */
	missed = idem_args_word(idem_row_text(row, IDEM_SCHEDULES_MISSED), "missed",
							idem_missed_words, REPAIR_HINT);
	idem_queuestore_get(idem_args_queue_name(idem_row_datum(row, IDEM_SCHEDULES_QUEUE)),
						&enqueue.queue);
	check_owner(idem_row_oid(row, IDEM_SCHEDULES_OWNER), &enqueue.queue);
	enqueue.policy = enqueue.queue.policy;
	enqueue.policy.on_duplicate = IDEM_ON_DUPLICATE_SKIP;
	enqueue.policy.rerun = false;
	enqueue.nowait = true;
	enqueue.now = idem_clock_now();
	enqueue.priority = idem_row_int32(row, IDEM_SCHEDULES_PRIORITY);
	payload = idem_row_jsonb(row, IDEM_SCHEDULES_PAYLOAD);

	read_rhythm(row, &rhythm);
	idem_ticks_due(&rhythm, idem_row_timestamp(row, IDEM_SCHEDULES_NEXT_TICK), missed, now, &ticks);
	if (ticks.njobs > 0)
		idem_jobtable_open(&jobs, RowExclusiveLock);
	for (int i = 0; i < ticks.njobs; i++)
	{
		/* in a database with a map the job has a slot of this database (M6) */
		IdemNewJob job = {
			.job_id = idem_jobtable_next_id(idem_shard_choose_slot(NULL, NULL)),
			.key = make_key(name, ticks.jobs[i]),
			.payload = {.value = JsonbPGetDatum(payload), .isnull = payload == NULL}};

		enqueue.run_at = ticks.jobs[i];
		idem_enqueuestore_enqueue(&jobs, &enqueue, &job);
		if (job.answer.outcome == IDEM_OUTCOME_ENQUEUED || job.answer.outcome == IDEM_OUTCOME_RERUN)
			(*njobs)++;
		last_job = job.answer.job_id;
	}
	if (ticks.njobs > 0)
		idem_table_close(&jobs);

	new = idem_table_copy_row(&schedules, row);
	idem_row_set(new, IDEM_SCHEDULES_MISSED_TICKS,
				 Int64GetDatum(idem_row_int64(row, IDEM_SCHEDULES_MISSED_TICKS) + ticks.n -
							   ticks.njobs));
	if (ticks.njobs > 0)
	{
		idem_row_set(new, IDEM_SCHEDULES_LAST_TICK,
					 TimestampTzGetDatum(ticks.jobs[ticks.njobs - 1]));
		idem_row_set(new, IDEM_SCHEDULES_LAST_JOB, Int64GetDatum(last_job));
	}
	update_schedule(&schedules, row, new, ticks.next);
	if (tell_launcher)
		note_tick(ticks.next);
	idem_table_close(&schedules);
	return IDEM_TICKED_DONE;
}
