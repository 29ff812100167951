/*
 * map.c
 *		SQL functions of shards: idem_shard_set, idem_shard_give, idem_shard_take, idem_shard_id,
 *		idem_slot.
 *
 * The first three change the map, which table/shard.c reads.  They lock idem.keys and
 * idem.jobs against every function that writes, until the transaction ends.  So they wait for
 * all transactions that hold keys or jobs, prepared ones included, and find no uncommitted
 * row of another transaction (M3).  Functions that only read do not wait.
 */
#include "postgres.h"

#include "access/xlog.h"
#include "commands/dbcommands.h"
#include "utils/fmgrprotos.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/multirangetypes.h"
#include "utils/snapmgr.h"

#include "jobs/row/job.h"
#include "keys/keys.h"

IDEM_FUNCTION(idem_shard_set);
IDEM_FUNCTION(idem_shard_give);
IDEM_FUNCTION(idem_shard_take);
IDEM_FUNCTION(idem_shard_id);
IDEM_FUNCTION(idem_slot);

/*
 * The identity of a database (M8).  The id goes wherever the row of idem.shard goes; the other
 * two are where idem_shard_set() has stored it, so that a copy does not pass for the original.
 */
typedef struct Identity
{
	int64 system_identifier;
	Oid database_oid;
	pg_uuid_t id;
} Identity;

/* A change of the map: the tables that it has locked, and the row from before */
typedef struct Change
{
	IdemTable keys;
	IdemTable jobs;
	IdemTable table;
	IdemShard from;
	Identity identity;	 /* if from.exists */
	pg_uuid_t *receiver; /* of the slots that were given up, or NULL */
	pg_uuid_t *sender;	 /* of the slots that were taken, or NULL */
} Change;

/* Slots whose rows must not stay behind, and what is needed to find these rows */
typedef struct Leaving
{
	bool gone[IDEM_SLOTS];
	bool is_move;		 /* the rows will be moved */
	const IdemShard *to; /* the new map */
	/* the map whose slots the numbers of jobs carry, or one that does not exist */
	IdemShard numbered;
	TimestampTz now;
} Leaving;

/*
 * Does the row leave?  If so, *slot is its slot, or IDEM_NO_SLOT if that is not known:
 * the number of a job may carry none (M6), and a key that absorbs duplicates may then belong to
 * any slot.
 */
static bool
does_row_leave(IdemTable *table, TupleTableSlot *row, const Leaving *leaving, int *slot)
{
	int64 job_id;
	bool has_key;

	if (table->def == &idem_keyrow_def)
	{
		IdemKeyRow key;

		idem_keyrow_read(row, 0, &key);
		if (key.status == IDEM_KEY_GONE)
			return false;
		*slot = idem_shard_slot(leaving->to, idem_row_text(row, IDEM_KEYS_SCOPE),
								idem_row_text(row, IDEM_KEYS_KEY));
		return leaving->gone[*slot];
	}
	if (table->def == &idem_jobtable_def)
	{
		job_id = idem_row_int64(row, IDEM_JOBS_JOB_ID);
		has_key = !idem_row_isnull(row, IDEM_JOBS_KEY_HASH);
	}
	else if (table->def == &idem_jobtable_keys_def)
	{
		if (idem_row_timestamp(row, IDEM_JOB_KEYS_EXPIRES_AT) <= leaving->now)
			return false;
		job_id = idem_row_int64(row, IDEM_JOB_KEYS_JOB_ID);
		has_key = true;
	}
	else
	{
		Assert(table->def == &idem_jobtable_log_def);
		if (idem_row_timestamp(row, IDEM_JOB_LOG_EXPIRES_AT) <= leaving->now)
			return false;
		job_id = idem_row_int64(row, IDEM_JOB_LOG_JOB_ID);
		has_key = false;
	}
	*slot = idem_shard_slot_of_job(&leaving->numbered, job_id);
	return *slot == IDEM_NO_SLOT ? has_key : leaving->gone[*slot];
}

/* M5: raise an error if a row of the table leaves.  Reads the table up to the first such row. */
static void
check_table(IdemTable *table, const Leaving *leaving)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	TableScanDesc scan = table_beginscan_strat(table->heap, snapshot, 0, NULL, true, true);
	MemoryContext context =
		AllocSetContextCreate(CurrentMemoryContext, "idem row", ALLOCSET_DEFAULT_SIZES);
	MemoryContext oldcontext = MemoryContextSwitchTo(context);
	TupleTableSlot *row = idem_table_row(table);
	int slot = IDEM_NO_SLOT;

	while (table_scan_getnextslot(scan, ForwardScanDirection, row))
	{
		CHECK_FOR_INTERRUPTS();
		if (does_row_leave(table, row, leaving, &slot))
			ereport(ERROR,
					errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("slots that the map leaves out have rows"),
					slot != IDEM_NO_SLOT ? errdetail("Table idem.%s has a row of slot %d that has not expired.", table->def->name, slot) :
										   errdetail("Table idem.%s has the key of a job whose number carries no slot, so its slot is not known.", table->def->name),
					leaving->is_move ? errhint("Wait until the jobs with a key from before the map have ended, and their keys have expired.") :
									   errhint("Move the rows first, or wait until they have expired. With force => true they stay behind, where no function finds them."));
		MemoryContextReset(context);
	}
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(context);
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
}

static void
check_job_keys(const Leaving *leaving)
{
	IdemTable job_keys;

	idem_jobtable_open_keys(&job_keys, AccessShareLock);
	check_table(&job_keys, leaving);
	idem_table_close(&job_keys);
}

/* M5: raise an error if rows of the slots that go away would stay behind */
static void
check_rows(Change *change, const IdemShard *to)
{
	const IdemShard *from = &change->from;
	Leaving leaving = {.to = to, .now = idem_clock_now()};
	bool same_rule = from->by_scope == to->by_scope;
	int ngone = 0;
	IdemTable log;

	/* with another rule all rows have other slots */
	for (int slot = 0; slot < IDEM_SLOTS; slot++)
	{
		bool had = !from->is_mapped || !same_rule || from->has[slot];

		leaving.gone[slot] = had && to->is_mapped && !to->has[slot];
		ngone += leaving.gone[slot];
	}
	if (ngone == 0)
		return;
	if (same_rule)
		leaving.numbered = *from;
	check_table(&change->keys, &leaving);
	check_table(&change->jobs, &leaving);
	check_job_keys(&leaving);
	idem_jobtable_open_log(&log, AccessShareLock);
	check_table(&log, &leaving);
	idem_table_close(&log);
}

/*
 * M6: the first number that no job has yet, if numbers carry slots.  Raises an error if the
 * sequence of job numbers has values before those in use.
 */
static int64
next_number(Change *change)
{
	int64 next = idem_shard_first_number(idem_jobtable_last_value() + 1);
	IdemTable log;
	IdemTable *tables[] = {&change->jobs, &log};

	idem_jobtable_open_log(&log, AccessShareLock);
	for (int i = 0; i < (int) lengthof(tables); i++)
	{
		IdemTable *table = tables[i];
		Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
		IndexScanDesc scan =
			index_beginscan(table->heap, table->pkey, snapshot, NULL, 0, 0, SO_NONE);
		TupleTableSlot *row = idem_table_row(table);

		index_rescan(scan, NULL, 0, NULL, 0);
		if (index_getnext_slot(scan, BackwardScanDirection, row) &&
			idem_row_int64(row, IDEM_JOBS_JOB_ID) >= next)
			idem_jobtable_refuse_number();
		index_endscan(scan);
		UnregisterSnapshot(snapshot);
	}
	idem_table_close(&log);
	return next;
}

StaticAssertDecl((int) IDEM_JOBS_JOB_ID == (int) IDEM_JOB_LOG_JOB_ID,
				 "next_number() reads the same column of both tables");

/*
 * M6: raise an error if the key of a job that is done has a number that would seem to carry a slot:
 * a move would leave the key behind, and a duplicate would run elsewhere.  No index has the numbers
 * in order, so every row is read.
 */
static void
check_numbers_of_keys(int64 next)
{
	IdemTable keys;
	TimestampTz now = idem_clock_now();
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	TableScanDesc scan;
	TupleTableSlot *row;

	idem_jobtable_open_keys(&keys, AccessShareLock);
	scan = table_beginscan_strat(keys.heap, snapshot, 0, NULL, true, true);
	row = idem_table_row(&keys);
	while (table_scan_getnextslot(scan, ForwardScanDirection, row))
	{
		CHECK_FOR_INTERRUPTS();
		if (idem_row_int64(row, IDEM_JOB_KEYS_JOB_ID) >= next &&
			idem_row_timestamp(row, IDEM_JOB_KEYS_EXPIRES_AT) > now)
			idem_jobtable_refuse_number();
	}
	table_endscan(scan);
	idem_table_close(&keys);
	UnregisterSnapshot(snapshot);
}

static Datum
make_ranges(const bool *slots)
{
	TypeCacheEntry *type = lookup_type_cache(INT4MULTIRANGEOID, TYPECACHE_MULTIRANGE_INFO);
	RangeType **ranges = palloc_array(RangeType *, IDEM_SLOTS);
	int n = 0;

	for (int slot = 0; slot < IDEM_SLOTS; slot++)
	{
		RangeBound lower = {.val = Int32GetDatum(slot), .inclusive = true, .lower = true};
		RangeBound upper = {.inclusive = false};

		if (!slots[slot])
			continue;
		while (slot < IDEM_SLOTS && slots[slot])
			slot++;
		upper.val = Int32GetDatum(slot);
		ranges[n++] = make_range(type->rngtype, &lower, &upper, false, NULL);
	}
	return MultirangeTypePGetDatum(make_multirange(INT4MULTIRANGEOID, type->rngtype, n, ranges));
}

static bool
has_any(const bool *slots)
{
	return memchr(slots, true, IDEM_SLOTS) != NULL;
}

static bool
is_same_id(const pg_uuid_t *a, const pg_uuid_t *b)
{
	return memcmp(a->data, b->data, UUID_LEN) == 0;
}

static void
read_identity(IdemTable *table, Identity *identity)
{
	identity->system_identifier =
		idem_row_int64(idem_table_row(table), IDEM_SHARD_SYSTEM_IDENTIFIER);
	identity->database_oid = idem_row_oid(idem_table_row(table), IDEM_SHARD_DATABASE_OID);
	identity->id = *idem_row_uuid(idem_table_row(table), IDEM_SHARD_DATABASE_ID);
}

/*
 * M8: was the row stored in another database?  Then a template, a dump, a copy of the server or
 * pg_upgrade has brought it here.
 */
static bool
is_copy(const Identity *identity)
{
	return identity->system_identifier != (int64) GetSystemIdentifier() ||
		identity->database_oid != MyDatabaseId;
}

pg_noreturn static void
refuse_copy(const Identity *identity)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("the map of slots was stored in another database"),
			errdetail("It was stored in database %u of the server with system identifier %lld; this is database %u of server %lld.",
					  identity->database_oid, (long long) identity->system_identifier, MyDatabaseId,
					  (long long) GetSystemIdentifier()),
			errhint("If this database replaces that one for good, as after pg_upgrade, run SELECT pg_catalog.idem_shard_set(slots, by, number, keep_id => database_id) FROM idem.shard. If it is a copy, give it slots of its own with pg_catalog.idem_shard_set()."));
}

/* Slots that are on their way, and the other database; nulls if there are none */
static void
set_moving(TupleTableSlot *row, AttrNumber attno, const bool *slots, AttrNumber other_attno,
		   const pg_uuid_t *other)
{
	if (!has_any(slots))
		return;
	idem_row_set(row, attno, make_ranges(slots));
	idem_row_set(row, other_attno, UUIDPGetDatum(other));
}

/*
 * M3: lock the tables against every function that writes, and read the map.  The map is locked
 * first: while this waits for another change, or for a session that copies rows (M8), no
 * function waits for it.
 */
static void
begin_change(Change *change)
{
	TupleTableSlot *row;

	change->from = (IdemShard){.number = -1};
	idem_shard_open(&change->table, ShareRowExclusiveLock);
	idem_keyrow_open(&change->keys, ShareRowExclusiveLock);
	idem_jobtable_open(&change->jobs, ShareRowExclusiveLock);
	change->receiver = change->sender = NULL;
	row = idem_shard_find(&change->table);
	if (row == NULL)
		return;
	idem_shard_read(row, &change->from);
	read_identity(&change->table, &change->identity);
	change->receiver = idem_row_uuid(row, IDEM_SHARD_RECEIVER);
	change->sender = idem_row_uuid(row, IDEM_SHARD_SENDER);
}

/*
 * M4: write the row.  The invalidation comes first, so that it applies in this session with the
 * end of the write; other sessions get it before this transaction releases its locks.
 */
static void
end_change(Change *change, const IdemShard *to)
{
	IdemTable *table = &change->table;
	TupleTableSlot *slot = idem_table_new_row(table);

	idem_row_set(slot, IDEM_SHARD_ID, Int16GetDatum(IDEM_SHARD_ROW));
	idem_row_set(slot, IDEM_SHARD_JOBS_FROM, Int64GetDatum(to->jobs_from));
	idem_row_set(slot, IDEM_SHARD_SYSTEM_IDENTIFIER, Int64GetDatum(GetSystemIdentifier()));
	idem_row_set(slot, IDEM_SHARD_DATABASE_OID, ObjectIdGetDatum(MyDatabaseId));
	idem_row_set(slot, IDEM_SHARD_DATABASE_ID, UUIDPGetDatum(&change->identity.id));
	idem_row_set(slot, IDEM_SHARD_BY, CStringGetTextDatum(to->by_scope ? "scope" : "key"));
	if (to->is_mapped)
		idem_row_set(slot, IDEM_SHARD_SLOTS, make_ranges(to->has));
	if (to->number >= 0)
		idem_row_set(slot, IDEM_SHARD_NUMBER, Int32GetDatum(to->number));
	set_moving(slot, IDEM_SHARD_GIVEN, to->given, IDEM_SHARD_RECEIVER, change->receiver);
	set_moving(slot, IDEM_SHARD_TAKEN, to->taken, IDEM_SHARD_SENDER, change->sender);
	CacheInvalidateRelcache(table->heap);
	if (change->from.exists ? idem_table_update(table, idem_table_row(table), slot, NULL) != TM_Ok :
							  !idem_table_insert(table, slot))
		elog(ERROR, "could not store the map of slots");
	idem_table_close(&change->jobs);
	idem_table_close(&change->keys);
	idem_table_close(&change->table);
}

pg_noreturn static void
refuse_back(int slot, const char *hint)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("slots that were given up may have arrived in another database"),
			errdetail("Slot %d was given up for the database whose id is in column \"receiver\" of idem.shard.", slot),
			errhint("%s", hint));
}

pg_noreturn static void
refuse_taken(int slot)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("slots have not arrived completely"),
			errdetail("The database that had slot %d before may still have its rows.", slot),
			errhint("Finish that move first: run idem_move with the same databases until it says \"moved\"."));
}

/*
 * M8: the id that the row gets.  The caller passes keep_id to say that this database replaces the
 * one that has stored the row; otherwise a copy gets an id of its own, and takes no part in a
 * move.
 */
static void
choose_id(Change *change, const pg_uuid_t *keep_id, bool force)
{
	Identity *identity = &change->identity;
	char *original;

	if (keep_id == NULL)
	{
		if (change->from.exists && !is_copy(identity))
			return;
		if (has_any(change->from.given) || has_any(change->from.taken))
		{
			if (!force)
				refuse_copy(identity);
			memset(change->from.given, 0, sizeof(change->from.given));
			memset(change->from.taken, 0, sizeof(change->from.taken));
		}
		identity->id = *DatumGetUUIDP(DirectFunctionCall1(gen_random_uuid, (Datum) 0));
		return;
	}
	if (!change->from.exists || !is_same_id(&identity->id, keep_id))
		idem_args_refuse_value("keep_id", "It is not the id in table idem.shard.",
							   "Pass column \"database_id\" of idem.shard if this database replaces the one that has stored it, or leave it out.");
	if (is_copy(identity) && identity->system_identifier == (int64) GetSystemIdentifier() &&
		(original = get_database_name(identity->database_oid)) != NULL)
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("the database that has this id still exists"),
				errdetail("It is database \"%s\" of this server.", original),
				errhint("Leave \"keep_id\" out: this database then gets an id of its own."));
}

/*
 * M8: store a map.  A move must not be forgotten, nor its slots be taken back, because the other
 * database may have taken them, or may still have their rows.
 */
Datum
idem_shard_set(PG_FUNCTION_ARGS)
{
	static const char *const words[] = {"key", "scope", NULL};
	IdemShard to = {.is_mapped = !PG_ARGISNULL(0)};
	bool force = !PG_ARGISNULL(3) && PG_GETARG_BOOL(3);
	Change change;
	bool same_rule;

	idem_fn_begin(fcinfo, &idem_shard_set_signature, "idem_shard_set()");
	if (to.is_mapped)
		idem_shard_mark(to.has, PG_GETARG_DATUM(0));
	to.by_scope = idem_args_word(PG_ARGISNULL(1) ? NULL : PG_GETARG_TEXT_PP(1), "by", words,
								 "Use \"key\" to spread single keys, \"scope\" to keep all keys of a scope together.") != 0;
	to.number = PG_ARGISNULL(2) ? -1 : PG_GETARG_INT32(2);
	if (to.number < 0 && !PG_ARGISNULL(2))
		idem_args_refuse_value("number", psprintf("The number of the shard is %d; it must not be negative.", to.number),
							   "Number the shards from 0 on, or leave it out.");

	begin_change(&change);
	same_rule = change.from.exists && change.from.by_scope == to.by_scope;
	choose_id(&change, PG_ARGISNULL(4) ? NULL : PG_GETARG_UUID_P(4), force);
	for (int slot = 0; slot < IDEM_SLOTS && !force; slot++)
	{
		bool stays = same_rule && to.is_mapped;

		if (change.from.given[slot] && (!stays || to.has[slot]))
			refuse_back(slot, "Run idem_move with the same databases: with --abort it takes back what has not arrived, without it finishes the move.");
		if (change.from.taken[slot] && (!stays || !to.has[slot]))
			refuse_taken(slot);
	}
	if (!force)
		check_rows(&change, &to);
	to.jobs_from = same_rule ? change.from.jobs_from : next_number(&change);
	if (!same_rule)
		check_numbers_of_keys(to.jobs_from);
	for (int slot = 0; slot < IDEM_SLOTS && same_rule && to.is_mapped; slot++)
	{
		to.given[slot] = change.from.given[slot] && !to.has[slot];
		to.taken[slot] = change.from.taken[slot] && to.has[slot];
	}
	end_change(&change, &to);
	PG_RETURN_VOID();
}

/* The slots to give or take; a map is needed, because without it job numbers carry no slots */
static void
begin_move(FunctionCallInfo fcinfo, Change *change, bool *slots)
{
	idem_args_require(fcinfo, 0, "slots", "Pass ranges of slots such as '{[0,256)}'.");
	idem_shard_mark(slots, PG_GETARG_DATUM(0));
	begin_change(change);
	if (change->from.exists && is_copy(&change->identity))
		refuse_copy(&change->identity);
	if (!change->from.is_mapped)
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("this database has no map of slots"),
				errdetail("Slots can move only between databases with maps."),
				errhint("Run SELECT pg_catalog.idem_shard_set('{[0,1024)}') if it has all keys, or pg_catalog.idem_shard_set('{}') if it is new and has none."));
}

/* M8: slots do not move from a database to itself */
static void
check_is_other(const Change *change, const pg_uuid_t *other, const char *name)
{
	if (is_same_id(&change->identity.id, other))
		idem_args_refuse_value(name, "It is the id of this database.",
							   "Pass what pg_catalog.idem_shard_id() returns in the other database.");
}

/*
 * M8: slots are on their way to or from one other database at a time.  A third one could
 * otherwise take what the second one has taken already.
 */
static void
check_other(const bool *moving, const pg_uuid_t *before, const pg_uuid_t *now, const char *column)
{
	if (!has_any(moving) || (before != NULL && is_same_id(before, now)))
		return;
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("slots are moving to or from another database"),
			errdetail("Column \"%s\" of idem.shard has the id of that database.", column),
			errhint("Finish that move first: run idem_move with the same databases until it says \"moved\"."));
}

/* M8: give up slots whose rows another database will copy */
Datum
idem_shard_give(PG_FUNCTION_ARGS)
{
	bool slots[IDEM_SLOTS] = {0};
	Change change;
	IdemShard to;
	pg_uuid_t *receiver;
	Leaving leaving = {.is_move = true, .to = &to};

	idem_fn_begin(fcinfo, &idem_shard_give_signature, "idem_shard_give()");
	idem_args_require(fcinfo, 1, "receiver", "Pass what pg_catalog.idem_shard_id() returns in the database that will take the slots.");
	receiver = PG_GETARG_UUID_P(1);
	begin_move(fcinfo, &change, slots);
	check_is_other(&change, receiver, "receiver");
	check_other(change.from.given, change.receiver, receiver, "receiver");
	change.receiver = receiver;
	to = change.from;
	for (int slot = 0; slot < IDEM_SLOTS; slot++)
	{
		if (!slots[slot])
			continue;
		/* the database that had it before may have rows of it left */
		if (to.taken[slot])
			refuse_taken(slot);
		if (!to.has[slot] && !to.given[slot])
			ereport(ERROR,
					errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("slots do not belong to this database"),
					errdetail("The map does not have slot %d, and this database has not given it up.", slot),
					errhint("Call the database that has the slot."));
		to.has[slot] = false;
		to.given[slot] = true;
	}

	/*
	 * A job with a key may be one of these slots although its number does not tell: it would
	 * stay behind, and duplicates of it would run elsewhere.
	 */
	leaving.numbered = change.from;
	leaving.now = idem_clock_now();
	check_table(&change.jobs, &leaving);
	check_job_keys(&leaving);
	end_change(&change, &to);
	PG_RETURN_INT64(idem_jobtable_last_value());
}

/*
 * J14: announce the jobs of the slots.  COPY has written them, so fetches and enqueues of
 * the last second may have decided to skip their places.
 */
static void
note_jobs(IdemTable *jobs, const IdemShard *shard, const bool *slots)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	TableScanDesc scan = table_beginscan_strat(jobs->heap, snapshot, 0, NULL, true, true);

	TupleTableSlot *row = idem_table_row(jobs);

	while (table_scan_getnextslot(scan, ForwardScanDirection, row))
	{
		int slot = idem_shard_slot_of_job(shard, idem_row_int64(row, IDEM_JOBS_JOB_ID));

		CHECK_FOR_INTERRUPTS();
		if (slot != IDEM_NO_SLOT && slots[slot])
		{
			IdemJob job;

			idem_job_read(&job, row);
			idem_jobrow_note_copied(&job);
		}
	}
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
}

/*
 * M8: take slots whose rows were copied.  Values of the sequence up to the given one were used
 * by the database that had the slots: they are not used for new jobs of these slots again (M6).
 */
Datum
idem_shard_take(PG_FUNCTION_ARGS)
{
	bool slots[IDEM_SLOTS] = {0};
	Change change;
	IdemShard to;
	int64 above;
	pg_uuid_t *sender = PG_ARGISNULL(2) ? NULL : PG_GETARG_UUID_P(2);

	idem_fn_begin(fcinfo, &idem_shard_take_signature, "idem_shard_take()");
	idem_args_require(fcinfo, 1, "above", "Pass what idem_shard_give() has returned.");
	above = PG_GETARG_INT64(1);
	if (above < 0 || above >= PG_INT64_MAX / IDEM_SLOTS)
		idem_args_refuse_value("above", psprintf("The value is %lld, which no sequence of job numbers can reach.", (long long) above),
							   "Pass what idem_shard_give() has returned.");
	begin_move(fcinfo, &change, slots);
	if (sender != NULL)
		check_is_other(&change, sender, "sender");
	to = change.from;
	/* slots that were given up are taken back: the caller names the database that may have them */
	for (int slot = 0; slot < IDEM_SLOTS; slot++)
	{
		if (!slots[slot] || !to.given[slot])
			continue;
		if (sender == NULL || change.receiver == NULL || !is_same_id(sender, change.receiver))
			refuse_back(slot, "Run idem_move --abort, which keeps that database from taking the slots. If you are sure that it has not taken them and never will, pass its id as \"sender\".");
		to.given[slot] = false;
		to.has[slot] = true;
	}
	/* the others come from another database, which may still have their rows */
	for (int slot = 0; slot < IDEM_SLOTS; slot++)
	{
		if (!slots[slot] || to.has[slot])
			continue;
		idem_args_require(fcinfo, 2, "sender", "Pass what pg_catalog.idem_shard_id() returns in the database that had the slots.");
		check_other(change.from.taken, change.sender, sender, "sender");
		to.taken[slot] = to.has[slot] = true;
	}
	if (memcmp(to.taken, change.from.taken, sizeof(to.taken)) != 0)
		change.sender = sender;
	idem_jobtable_lift_sequence(above);
	(void) next_number(&change);
	note_jobs(&change.jobs, &to, slots);
	end_change(&change, &to);
	PG_RETURN_VOID();
}

/* M8: the id of this database, by the row as it is now */
Datum
idem_shard_id(PG_FUNCTION_ARGS)
{
	IdemTable table;
	Identity *identity = palloc_object(Identity);

	idem_fn_begin(fcinfo, &idem_shard_id_signature, NULL);
	idem_shard_open(&table, AccessShareLock);
	if (idem_shard_find(&table) == NULL)
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("this database has no id"),
				errdetail("pg_catalog.idem_shard_set() gives it one, and was never called here."),
				errhint("Run SELECT pg_catalog.idem_shard_set('{[0,1024)}') if it has all keys, or pg_catalog.idem_shard_set('{}') if it is new and has none."));
	read_identity(&table, identity);
	idem_table_close(&table);
	if (is_copy(identity))
		refuse_copy(identity);
	PG_RETURN_UUID_P(&identity->id);
}

/* M1: the slot of a key, by the rule of the map */
Datum
idem_slot(PG_FUNCTION_ARGS)
{
	IdemKey key;

	idem_fn_begin(fcinfo, &idem_slot_signature, NULL);
	idem_args_key(fcinfo, 0, 1, &key);
	PG_RETURN_INT32(idem_shard_slot(idem_shard_get_latest(), key.scope, key.key));
}
