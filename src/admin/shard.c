/*
 * shard.c
 *		SQL functions of shards: idem_shard_set, idem_slot.
 *
 * idem_shard_set() changes the map, which table/shard.c reads.  It locks idem.keys and
 * idem.jobs against every function that writes, until the transaction ends.  So it waits for
 * all transactions that hold keys or jobs, prepared ones included, and finds no uncommitted
 * row of another transaction (M3).  Functions that only read do not wait.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/tableam.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "jobs/jobs.h"
#include "keys/keys.h"

IDEM_FUNCTION(idem_shard_set, VOIDOID, INT4MULTIRANGEOID, TEXTOID, INT4OID, BOOLOID);
IDEM_FUNCTION(idem_slot, INT4OID, TEXTOID, TEXTOID);

/* Slots that go away, and what is needed to find their rows */
typedef struct Leaving
{
	bool gone[IDEM_SLOTS];
	int ngone;
	const IdemShard *to; /* the new map */
	/* the map whose slots the numbers of jobs carry, or one that does not exist */
	IdemShard numbered;
	TimestampTz now;
} Leaving;

/* Does the row found leave?  If so, *slot is its slot, or IDEM_NO_SLOT if that is not known. */
typedef bool (*LeavesFunction)(IdemTable *table, const Leaving *leaving, int *slot);

static bool
does_key_leave(IdemTable *keys, const Leaving *leaving, int *slot)
{
	if (idem_keyrow_judge(keys, 0) == IDEM_KEY_GONE)
		return false;
	*slot = idem_shard_slot(leaving->to, idem_row_text(keys, IDEM_KEYS_SCOPE),
							idem_row_text(keys, IDEM_KEYS_KEY));
	return leaving->gone[*slot];
}

/*
 * Does the job with this number leave?  If the number carries no slot (M6), a key that absorbs
 * duplicates may belong to any slot.
 */
static bool
does_number_leave(int64 job_id, bool has_key, const Leaving *leaving, int *slot)
{
	*slot = idem_shard_slot_of_job(&leaving->numbered, job_id);
	return *slot == IDEM_NO_SLOT ? has_key : leaving->gone[*slot];
}

static bool
does_job_leave(IdemTable *jobs, const Leaving *leaving, int *slot)
{
	return does_number_leave(idem_row_int64(jobs, IDEM_JOBS_JOB_ID),
							 !idem_row_isnull(jobs, IDEM_JOBS_KEY_HASH), leaving, slot);
}

static bool
does_job_key_leave(IdemTable *keys, const Leaving *leaving, int *slot)
{
	return idem_row_timestamp(keys, IDEM_JOB_KEYS_EXPIRES_AT) > leaving->now &&
		does_number_leave(idem_row_int64(keys, IDEM_JOB_KEYS_JOB_ID), true, leaving, slot);
}

static bool
does_history_leave(IdemTable *log, const Leaving *leaving, int *slot)
{
	return idem_row_timestamp(log, IDEM_JOB_LOG_EXPIRES_AT) > leaving->now &&
		does_number_leave(idem_row_int64(log, IDEM_JOB_LOG_JOB_ID), false, leaving, slot);
}

pg_noreturn static void
refuse_leaving(IdemTable *table, int slot)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("slots that the map leaves out have rows"),
			slot != IDEM_NO_SLOT ? errdetail("Table idem.%s has a row of slot %d that has not expired.", table->def->name, slot) :
								   errdetail("Table idem.%s has the key of a job whose number carries no slot, so its slot is not known.", table->def->name),
			errhint("Move the rows first, or wait until they have expired. With force => true they stay behind, where no function finds them."));
}

/* M5: raise an error if a row of the table leaves.  Reads the table up to the first such row. */
static void
check_table(IdemTable *table, const Leaving *leaving, LeavesFunction does_leave)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	TableScanDesc scan = table_beginscan_strat(table->heap, snapshot, 0, NULL, true, true);
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem row", ALLOCSET_DEFAULT_SIZES);
	MemoryContext oldcontext = MemoryContextSwitchTo(context);
	int slot = IDEM_NO_SLOT;

	while (table_scan_getnextslot(scan, ForwardScanDirection, table->found))
	{
		CHECK_FOR_INTERRUPTS();
		if (does_leave(table, leaving, &slot))
			refuse_leaving(table, slot);
		MemoryContextReset(context);
	}
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(context);
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
}

/* M5: raise an error if rows of the slots that go away would stay behind */
static void
check_rows(IdemTable *keys, IdemTable *jobs, const IdemShard *from, const IdemShard *to)
{
	Leaving leaving = {.to = to, .now = idem_clock_now()};
	bool same_rule = from->by_scope == to->by_scope;
	IdemTable job_keys;
	IdemTable log;

	/* with another rule all rows have other slots */
	for (int slot = 0; slot < IDEM_SLOTS; slot++)
	{
		bool had = !from->is_mapped || !same_rule || from->has[slot];

		leaving.gone[slot] = had && to->is_mapped && !to->has[slot];
		leaving.ngone += leaving.gone[slot];
	}
	if (leaving.ngone == 0)
		return;
	if (same_rule)
		leaving.numbered = *from;
	check_table(keys, &leaving, does_key_leave);
	check_table(jobs, &leaving, does_job_leave);
	idem_jobtable_open_keys(&job_keys, AccessShareLock);
	check_table(&job_keys, &leaving, does_job_key_leave);
	idem_table_close(&job_keys);
	idem_jobtable_open_log(&log, AccessShareLock);
	check_table(&log, &leaving, does_history_leave);
	idem_table_close(&log);
}

static int64
find_highest_number(IdemTable *table)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan = idem_compat_index_beginscan(table->heap, table->pkey, snapshot, 0);
	int64 number = 0;

	index_rescan(scan, NULL, 0, NULL, 0);
	/* both tables begin with the number */
	if (index_getnext_slot(scan, BackwardScanDirection, table->found))
		number = idem_row_int64(table, 1);
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return number;
}

StaticAssertDecl((int) IDEM_JOBS_JOB_ID == 1 && (int) IDEM_JOB_LOG_JOB_ID == 1,
				 "find_highest_number() reads the first column");

/*
 * M6: the first number that carries a slot by the new rule.  All numbers from before are
 * smaller, or the sequence is behind the jobs, which raises an error.
 */
static int64
begin_numbers(IdemTable *jobs)
{
	int64 from = (idem_jobtable_last_value() + 1) * IDEM_SLOTS;
	IdemTable log;
	int64 highest;

	idem_jobtable_open_log(&log, AccessShareLock);
	highest = Max(find_highest_number(jobs), find_highest_number(&log));
	idem_table_close(&log);
	if (highest >= from)
		idem_jobtable_refuse_number();
	return from;
}

/*
 * Write the row.  The invalidation comes first, so that it applies in this session with the
 * end of the write; other sessions get it before this transaction releases its locks (M4).
 */
static void
store_map(IdemTable *table, bool exists, const IdemShard *to, NullableDatum slots)
{
	TupleTableSlot *slot = idem_write_new_row(table);

	idem_row_set(slot, IDEM_SHARD_ID, Int16GetDatum(IDEM_SHARD_ROW));
	idem_row_set(slot, IDEM_SHARD_JOBS_FROM, Int64GetDatum(to->jobs_from));
	idem_row_set(slot, IDEM_SHARD_SYSTEM_IDENTIFIER, Int64GetDatum(GetSystemIdentifier()));
	idem_row_set(slot, IDEM_SHARD_BY, CStringGetTextDatum(to->by_scope ? "scope" : "key"));
	if (!slots.isnull)
		idem_row_set(slot, IDEM_SHARD_SLOTS, slots.value);
	if (to->number >= 0)
		idem_row_set(slot, IDEM_SHARD_NUMBER, Int32GetDatum(to->number));
	CacheInvalidateRelcache(table->heap);
	if (exists ? idem_write_update(table) != TM_Ok : !idem_write_insert(table))
		elog(ERROR, "could not store the map of slots");
}

/* M3: change the map, under locks that every function that writes waits for */
static void
change_map(IdemShard *to, NullableDatum slots, bool force)
{
	IdemTable keys;
	IdemTable jobs;
	IdemTable table;
	IdemShard from = {.number = -1};

	idem_keytable_open(&keys, ShareRowExclusiveLock);
	idem_jobtable_open(&jobs, ShareRowExclusiveLock);
	idem_shard_open(&table, ShareRowExclusiveLock);
	if (idem_shard_find(&table))
		idem_shard_read(&table, &from);
	if (!force)
		check_rows(&keys, &jobs, &from, to);
	if (from.exists && from.by_scope == to->by_scope)
		to->jobs_from = from.jobs_from;
	else
		to->jobs_from = begin_numbers(&jobs);
	store_map(&table, from.exists, to, slots);
	idem_table_close(&table);
	idem_table_close(&jobs);
	idem_table_close(&keys);
}

static int
get_number(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return -1;
	if (PG_GETARG_INT32(arg) < 0)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "number"),
				errdetail("The number of the shard is %d; it must not be negative.", PG_GETARG_INT32(arg)),
				errhint("Number the shards from 0 on, or leave it out."));
	return PG_GETARG_INT32(arg);
}

Datum
idem_shard_set(PG_FUNCTION_ARGS)
{
	static const char *const words[] = {"key", "scope", NULL};
	IdemShard to = {0};

	idem_fn_begin(fcinfo, &idem_shard_set_signature, "idem_shard_set()");
	if (!PG_ARGISNULL(0))
		idem_shard_set_slots(&to, PG_GETARG_DATUM(0));
	to.by_scope = idem_value_word(PG_ARGISNULL(1) ? NULL : PG_GETARG_TEXT_PP(1), "by", words,
								  "Use \"key\" to spread single keys, \"scope\" to keep all keys of a scope together.") != 0;
	to.number = get_number(fcinfo, 2);

	change_map(&to, fcinfo->args[0], !PG_ARGISNULL(3) && PG_GETARG_BOOL(3));
	PG_RETURN_VOID();
}

/* M1: the slot of a key, by the rule of the map */
Datum
idem_slot(PG_FUNCTION_ARGS)
{
	IdemKey key;

	idem_fn_begin(fcinfo, &idem_slot_signature, NULL);
	idem_args_key(fcinfo, 0, 1, &key);
	PG_RETURN_INT32(idem_shard_slot(idem_shard_get(), key.scope, key.key));
}
