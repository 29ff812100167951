/*
 * schedulestore.c
 *		The rows of idem.schedules: declare, remove, pause, find what is due, advance.
 *
 * A role that may use the queue of a schedule may change the schedule; the functions here
 * check that, but for those about ticks, which run for the administrator and the worker.  The
 * role that declares a schedule becomes its owner, and no other change makes a role the owner.
 * due.c asks at each tick whether the owner may enqueue (T9).
 *
 * A schedule is found by its latest committed row, also if the snapshot of the transaction
 * is older.  A session that changes a schedule waits for another one that does.  A tick does
 * not wait: it skips a row that is locked (T6).
 *
 * The launcher sleeps until the earliest tick of any database.  A commit that makes a tick
 * earlier tells it (idem_entries_lower_tick()).
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/stratnum.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "schedules/schedules.h"

static const Oid schedules_types[IDEM_SCHEDULES_NATTS] = {
	TEXTOID, TEXTOID, REGROLEOID, TEXTOID, INTERVALOID, TEXTOID,
	TEXTOID, INT4OID, INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID,
	INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID, JSONBOID};

static IdemTableCache schedules_cache;

const IdemTableDef idem_schedulestore_def = {
	.name = "schedules",
	.types = schedules_types,
	.natts = IDEM_SCHEDULES_NATTS,
	.nullable = IDEM_COLUMN(IDEM_SCHEDULES_CRON) | IDEM_COLUMN(IDEM_SCHEDULES_EVERY) |
		IDEM_COLUMNS_FROM(IDEM_SCHEDULES_NEXT_TICK),
	.pkey = {IDEM_SCHEDULES_NAME},
	.npkey = 1,
	.pkey_command = "ALTER TABLE idem.schedules ADD CONSTRAINT schedules_pkey PRIMARY KEY (name)",
	.cache = &schedules_cache};

/* The earliest tick that this transaction has written; DT_NOEND: none */
static TimestampTz earliest = DT_NOEND;

/* T6: the transaction has committed, and other sessions see its ticks: tell the launcher */
static void
at_xact_event(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_COMMIT && earliest != DT_NOEND)
		idem_entries_lower_tick(MyDatabaseId, earliest);
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		earliest = DT_NOEND;
}

/* This transaction writes a tick; a rollback to a savepoint leaves the note (harmless) */
static void
note_tick(TimestampTz tick)
{
	static bool is_registered = false;

	if (!is_registered)
		RegisterXactCallback(at_xact_event, NULL);
	is_registered = true;
	/* the callback cannot make an entry in shared memory */
	(void) idem_entries_get_database();
	earliest = Min(earliest, tick);
}

void
idem_schedulestore_open(IdemTable *schedules, LOCKMODE lockmode)
{
	idem_table_open(schedules, &idem_schedulestore_def, lockmode);
}

static IdemLookup
make_lookup(IdemTable *schedules, text *name)
{
	IdemLookup lookup = {
		.index = schedules->pkey, .value = PointerGetDatum(name), .equal = F_TEXTEQ};

	return lookup;
}

/* Find the schedule and lock its row, which waits; false: there is none */
static bool
lock_schedule(IdemTable *schedules, text *name)
{
	IdemLookup lookup = make_lookup(schedules, name);
	IdemProbeResult probe;

	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		idem_probe_existing(schedules, &lookup, &probe);
		if (probe.found == IDEM_FOUND_NONE)
			return false;
		if (probe.found == IDEM_FOUND_OPEN)
			idem_probe_wait(schedules, probe.xwait);
		else if (idem_table_lock_row(schedules, schedules->found->tts_tid, LockTupleExclusive,
									 LockWaitBlock, schedules->found) == TM_Ok)
			return true;
	}
}

/* May the current user change the schedule whose row was found?  Raises an error if not (T8). */
static void
check_privileges(IdemTable *schedules)
{
	IdemQueue queue = {0};

	idem_queuestore_use_of_row(schedules, IDEM_SCHEDULES_QUEUE, &queue);
}

/* A time, or the special value that stands for null */
static TimestampTz
get_time(IdemTable *schedules, AttrNumber attno, TimestampTz otherwise)
{
	return idem_row_isnull(schedules->found, attno) ? otherwise : idem_row_timestamp(schedules->found, attno);
}

/* The row was not written by the functions here */
pg_noreturn static void
reject_row(const char *column, const char *detail)
{
	ereport(ERROR,
			errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid value of \"%s\"", column),
			errdetail("%s", detail),
			errhint("Declare the schedule again."));
}

/* When the schedule ticks whose row was found */
void
idem_schedulestore_rhythm(IdemTable *schedules, IdemRhythm *rhythm)
{
	NullableDatum every = idem_row_datum(schedules->found, IDEM_SCHEDULES_EVERY);

	memset(rhythm, 0, sizeof(*rhythm));
	rhythm->cron = idem_row_text(schedules->found, IDEM_SCHEDULES_CRON);
	if (every.isnull == (rhythm->cron == NULL))
		reject_row("cron", "Either cron or every must be null.");
	if (!every.isnull)
		rhythm->every = idem_value_span(every.value, "every", IDEM_SPAN_EVERY);
	rhythm->time_zone = idem_row_text(schedules->found, IDEM_SCHEDULES_TIME_ZONE);
	rhythm->starts_at = get_time(schedules, IDEM_SCHEDULES_STARTS_AT, DT_NOBEGIN);
	rhythm->ends_at = get_time(schedules, IDEM_SCHEDULES_ENDS_AT, DT_NOEND);
	if (!every.isnull && TIMESTAMP_NOT_FINITE(rhythm->starts_at))
		reject_row("starts_at", "An interval must have a finite start.");
	if (TIMESTAMP_IS_NOBEGIN(get_time(schedules, IDEM_SCHEDULES_NEXT_TICK, DT_NOEND)))
		reject_row("next_tick", "The time must be finite.");
}

static bool
is_same_text(const text *a, const text *b)
{
	if (a == NULL || b == NULL)
		return a == b;
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

/* Does the row found have the same cron or every as the declaration? */
static bool
is_same_timing(IdemTable *schedules, const IdemSchedule *schedule)
{
	NullableDatum every = idem_row_datum(schedules->found, IDEM_SCHEDULES_EVERY);
	text *cron = idem_row_text(schedules->found, IDEM_SCHEDULES_CRON);

	if (schedule->rhythm.cron != NULL)
		return every.isnull && is_same_text(cron, schedule->rhythm.cron);
	return cron == NULL && !every.isnull &&
		DatumGetBool(DirectFunctionCall2(interval_eq, every.value, schedule->every));
}

/*
 * T5: do the ticks go on as before?  An interval without a start keeps the start that it has.
 * This raises no error, so that a declaration repairs a row that is invalid.
 */
static bool
keeps_ticks(IdemTable *schedules, const IdemSchedule *schedule, IdemRhythm *new)
{
	TimestampTz starts_at = get_time(schedules, IDEM_SCHEDULES_STARTS_AT, DT_NOBEGIN);

	if (!is_same_timing(schedules, schedule) ||
		!is_same_text(idem_row_text(schedules->found, IDEM_SCHEDULES_TIME_ZONE), new->time_zone))
		return false;
	if (new->cron == NULL && TIMESTAMP_NOT_FINITE(starts_at))
		return false;
	if (new->cron == NULL && TIMESTAMP_IS_NOBEGIN(new->starts_at))
		new->starts_at = starts_at;
	return starts_at == new->starts_at;
}

/* T5: the next tick after a declaration; DT_NOEND: none */
static TimestampTz
choose_next(IdemTable *schedules, const IdemSchedule *schedule, bool exists, IdemRhythm *rhythm)
{
	TimestampTz now = idem_clock_now();

	if (exists && keeps_ticks(schedules, schedule, rhythm))
	{
		TimestampTz next = get_time(schedules, IDEM_SCHEDULES_NEXT_TICK, DT_NOEND);

		if (!TIMESTAMP_NOT_FINITE(next))
			return next <= rhythm->ends_at ? next : DT_NOEND;
	}
	/* T2: without a start an interval starts now, and its first tick is one interval later */
	if (rhythm->cron == NULL && TIMESTAMP_IS_NOBEGIN(rhythm->starts_at))
		rhythm->starts_at = now - now % USECS_PER_SEC;
	return idem_ticks_first(rhythm, now);
}

/* A time, with which a special value stands for null */
static void
set_time(TupleTableSlot *slot, AttrNumber attno, TimestampTz time)
{
	if (TIMESTAMP_NOT_FINITE(time))
		idem_row_clear(slot, attno);
	else
		idem_row_set(slot, attno, TimestampTzGetDatum(time));
}

static void
fill_row(TupleTableSlot *slot, const IdemSchedule *schedule, const IdemRhythm *rhythm)
{
	idem_row_set(slot, IDEM_SCHEDULES_NAME, PointerGetDatum(schedule->name));
	idem_row_set(slot, IDEM_SCHEDULES_QUEUE, PointerGetDatum(schedule->queue));
	idem_row_set(slot, IDEM_SCHEDULES_OWNER, ObjectIdGetDatum(schedule->owner));
	idem_row_set_varlena(slot, IDEM_SCHEDULES_CRON, rhythm->cron);
	if (rhythm->cron == NULL)
		idem_row_set(slot, IDEM_SCHEDULES_EVERY, schedule->every);
	else
		idem_row_clear(slot, IDEM_SCHEDULES_EVERY);
	idem_row_set(slot, IDEM_SCHEDULES_TIME_ZONE, PointerGetDatum(rhythm->time_zone));
	idem_row_set(slot, IDEM_SCHEDULES_MISSED, PointerGetDatum(schedule->missed));
	idem_row_set(slot, IDEM_SCHEDULES_PRIORITY, Int32GetDatum(schedule->priority));
	idem_row_set_varlena(slot, IDEM_SCHEDULES_PAYLOAD, schedule->payload);
	set_time(slot, IDEM_SCHEDULES_STARTS_AT, rhythm->starts_at);
	set_time(slot, IDEM_SCHEDULES_ENDS_AT, rhythm->ends_at);
}

/*
 * The number of schedules, with those that another open transaction inserts or removes, as if the
 * one commits and the other one rolls back.  An open update counts once.
 */
static int64
count_schedules(IdemTable *schedules)
{
	SnapshotData dirty;
	IndexScanDesc scan;
	int64 n = 0;

	InitDirtySnapshot(dirty);
	scan = idem_compat_index_beginscan(schedules->heap, schedules->pkey, &dirty, 0);
	index_rescan(scan, NULL, 0, NULL, 0);
	while (index_getnext_slot(scan, ForwardScanDirection, schedules->found))
	{
		CHECK_FOR_INTERRUPTS();
		if (!TransactionIdIsValid(dirty.xmax) || idem_row_is_last_version(schedules->found))
			n++;
	}
	index_endscan(scan);
	return n;
}

/*
 * T10: insert a schedule, unless there are too many.  One lock for all names, for a moment, lets
 * one transaction at a time count and insert, so that the limit is exact.
 */
static bool
insert_schedule(IdemTable *schedules, TupleTableSlot *slot)
{
	bool inserted;

	idem_table_open_indexes(schedules);
	idem_table_lock_toast(schedules);
	idem_table_lock_hash(schedules, 0);
	if (count_schedules(schedules) >= IDEM_MAX_SCHEDULES)
		ereport(ERROR,
				errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				errmsg("too many schedules"),
				errdetail("This database has %d schedules, and may not have more.", IDEM_MAX_SCHEDULES),
				errhint("Remove schedules with idem_unschedule(), or let one schedule do the work of many."));
	inserted = idem_write_insert(schedules, slot);
	idem_table_unlock_hash(schedules, 0);
	return inserted;
}

/* Write the row with its next tick; false: try again */
static bool
write_schedule(IdemTable *schedules, bool exists, TupleTableSlot *slot, TimestampTz next)
{
	set_time(slot, IDEM_SCHEDULES_NEXT_TICK, next);
	return exists ? idem_write_update(schedules, schedules->found, slot, NULL) == TM_Ok :
					insert_schedule(schedules, slot);
}

/* The same, and tell the launcher of the next tick */
static bool
store_schedule(IdemTable *schedules, bool exists, TupleTableSlot *slot, TimestampTz next)
{
	if (!write_schedule(schedules, exists, slot, next))
		return false;
	note_tick(next);
	return true;
}

/* Insert or update the schedule, whose row was found if it exists; false: look it up again */
static bool
declare_schedule(IdemTable *schedules, const IdemSchedule *schedule, bool exists,
				 TimestampTz *next)
{
	IdemRhythm rhythm = schedule->rhythm;
	bool is_paused = exists && !idem_row_isnull(schedules->found, IDEM_SCHEDULES_PAUSED_AT);
	TupleTableSlot *slot;

	*next = choose_next(schedules, schedule, exists, &rhythm);
	if (is_paused)
		*next = DT_NOEND;
	slot = exists ? idem_write_copy_row(schedules, schedules->found) : idem_write_new_row(schedules);
	fill_row(slot, schedule, &rhythm);
	if (!exists)
		idem_row_set(slot, IDEM_SCHEDULES_MISSED_TICKS, Int64GetDatum(0));
	return store_schedule(schedules, exists, slot, *next);
}

/*
 * T5, T9: declare a schedule, or change it.  Returns its next tick, or DT_NOEND if there is none.
 * The caller has checked the privileges on the new queue.  If another open transaction inserts
 * the same name, the insert reports it, and the next look waits for that transaction.
 */
TimestampTz
idem_schedulestore_set(IdemTable *schedules, const IdemSchedule *schedule)
{
	TimestampTz next;
	bool exists;
	bool is_stored;

	do
	{
		CHECK_FOR_INTERRUPTS();
		exists = lock_schedule(schedules, schedule->name);
		if (exists)
			check_privileges(schedules);
		is_stored = declare_schedule(schedules, schedule, exists, &next);
	} while (!is_stored);
	return next;
}

/* Remove a schedule; false: there is none */
bool
idem_schedulestore_drop(IdemTable *schedules, text *name)
{
	if (!lock_schedule(schedules, name))
		return false;
	check_privileges(schedules);
	if (idem_write_delete(schedules, schedules->found, true) != TM_Ok)
		elog(ERROR, "could not remove a schedule that this transaction has locked");
	return true;
}

/* Find and lock a schedule that must exist, and check the privileges */
static void
require_schedule(IdemTable *schedules, text *name)
{
	if (!lock_schedule(schedules, name))
		ereport(ERROR,
				errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("schedule does not exist"),
				errdetail("No schedule has this name."),
				errhint("The view idem.schedule_status lists the schedules."));
	check_privileges(schedules);
}

/* T5: pause a schedule; false: it was paused before */
bool
idem_schedulestore_pause(IdemTable *schedules, text *name)
{
	TupleTableSlot *slot;

	require_schedule(schedules, name);
	if (!idem_row_isnull(schedules->found, IDEM_SCHEDULES_PAUSED_AT))
		return false;
	slot = idem_write_copy_row(schedules, schedules->found);
	set_time(slot, IDEM_SCHEDULES_PAUSED_AT, idem_clock_now());
	if (!store_schedule(schedules, true, slot, DT_NOEND))
		elog(ERROR, "could not change a schedule that this transaction has locked");
	return true;
}

/*
 * T5: resume a schedule with the first tick from now on.  T6: that also helps a schedule whose
 * next tick is too late, because the clock was ahead.  False: this changes nothing.
 */
bool
idem_schedulestore_resume(IdemTable *schedules, text *name)
{
	TupleTableSlot *slot;
	IdemRhythm rhythm;
	TimestampTz next;

	require_schedule(schedules, name);
	idem_schedulestore_rhythm(schedules, &rhythm);
	next = idem_ticks_first(&rhythm, idem_clock_now());
	if (idem_row_isnull(schedules->found, IDEM_SCHEDULES_PAUSED_AT) &&
		(idem_row_isnull(schedules->found, IDEM_SCHEDULES_NEXT_TICK) ||
		 idem_row_timestamp(schedules->found, IDEM_SCHEDULES_NEXT_TICK) <= next))
		return false;
	slot = idem_write_copy_row(schedules, schedules->found);
	idem_row_clear(slot, IDEM_SCHEDULES_PAUSED_AT);
	if (!store_schedule(schedules, true, slot, next))
		elog(ERROR, "could not change a schedule that this transaction has locked");
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
	IndexScanDesc scan = idem_compat_index_beginscan(schedules->heap, index, snapshot, 1);
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
	List *names = NIL;

	while (list_length(names) < max &&
		   index_getnext_slot(scan, ForwardScanDirection, schedules->found))
	{
		CHECK_FOR_INTERRUPTS();
		if (skip-- > 0)
			continue;
		names = lappend(names, idem_row_text(schedules->found, IDEM_SCHEDULES_NAME));
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
		idem_compat_index_beginscan(schedules->heap, schedules->pkey, snapshot, 0);
	int64 n = 0;

	index_rescan(scan, NULL, 0, NULL, 0);
	while (index_getnext_slot(scan, ForwardScanDirection, schedules->found))
	{
		CHECK_FOR_INTERRUPTS();
		if (idem_row_varlena_equals(schedules->found, IDEM_SCHEDULES_QUEUE, queue) &&
			!idem_row_isnull(schedules->found, IDEM_SCHEDULES_NEXT_TICK) &&
			idem_queuestore_may_enqueue(idem_row_oid(schedules->found, IDEM_SCHEDULES_OWNER), owner) !=
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
	TimestampTz next = DT_NOEND;

	if (index_getnext_slot(scan, ForwardScanDirection, schedules->found))
		next = idem_row_timestamp(schedules->found, IDEM_SCHEDULES_NEXT_TICK);
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return next;
}

/*
 * Lock the row of a schedule that is due, without waiting (T6).  Returns false if another
 * transaction has locked it, or if it is not due any more.
 */
bool
idem_schedulestore_lock_due(IdemTable *schedules, text *name, TimestampTz now,
							IdemTicked *ticked)
{
	IdemLookup lookup = make_lookup(schedules, name);
	IdemProbeResult probe;
	TM_Result result;

	*ticked = IDEM_TICKED_LATER;
	idem_probe_latest(schedules, &lookup, &probe);
	if (probe.found != IDEM_FOUND_ROW)
		return false;
	result = idem_table_lock_row(schedules, schedules->found->tts_tid, LockTupleNoKeyExclusive,
								 LockWaitSkip, schedules->found);
	if (result == TM_WouldBlock)
		*ticked = IDEM_TICKED_LOCKED;
	return result == TM_Ok && !idem_row_isnull(schedules->found, IDEM_SCHEDULES_NEXT_TICK) &&
		idem_row_timestamp(schedules->found, IDEM_SCHEDULES_NEXT_TICK) <= now;
}

/*
 * T1: advance the schedule whose row was found and locked; its last job, if it has one.  The
 * launcher is told of the next tick unless the caller, the worker, looks for it later (T10).
 */
void
idem_schedulestore_advance(IdemTable *schedules, const IdemTicks *ticks, int64 last_job,
						   bool tell_launcher)
{
	TupleTableSlot *slot = idem_write_copy_row(schedules, schedules->found);
	int64 missed = idem_row_int64(schedules->found, IDEM_SCHEDULES_MISSED_TICKS);

	idem_row_set(slot, IDEM_SCHEDULES_MISSED_TICKS,
				 Int64GetDatum(missed + ticks->n - ticks->njobs));
	if (ticks->njobs > 0)
	{
		idem_row_set(slot, IDEM_SCHEDULES_LAST_TICK,
					 TimestampTzGetDatum(ticks->jobs[ticks->njobs - 1]));
		idem_row_set(slot, IDEM_SCHEDULES_LAST_JOB, Int64GetDatum(last_job));
	}
	if (!(tell_launcher ? store_schedule : write_schedule)(schedules, true, slot, ticks->next))
		elog(ERROR, "could not advance a schedule that this transaction has locked");
}
