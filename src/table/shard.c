/*
 * shard.c
 *		The map of slots: which keys and jobs belong to this database.
 *
 * The map is the one row of idem.shard.  This backend caches it until it receives an
 * invalidation of the table.  admin/map.c changes the map under locks on idem.keys and
 * idem.jobs that conflict with those of every function that writes.  So a caller that has
 * opened one of the two tables for writing goes by the map that counts until its transaction
 * ends (M3, M4).
 *
 * A caller that only reads does not wait for a change, so its map and its rows may be of two
 * times.  The map must not be older than the rows: a slot that has gone takes its rows away in
 * a later transaction, and "no row" would be a wrong answer.  So the map is read after the
 * snapshot was taken, or once more if there is no row.  Nor must the map be newer: a slot comes
 * together with its rows, which an older snapshot does not show.  So a caller with a snapshot of
 * its own goes by the map that the snapshot shows, too (idem_shard_check_key_shown()).
 *
 * Without a row there is no map, and a caller pays for a comparison of two integers.
 */
#include "postgres.h"

#include "access/transam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/int.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/multirangetypes.h"
#include "utils/snapmgr.h"
#include "utils/typcache.h"

#include "table/table.h"

static IdemTableCache shard_cache;

const IdemTableDef idem_shard_def = {IDEM_DECLARED_TABLE_shard, .cache = &shard_cache};

/* The map, as of this version of the table; see idem_shard_get() */
static IdemShard current;
static uint64 current_version = PG_UINT64_MAX;
static TransactionId current_xmin; /* of its row; FrozenTransactionId if there is none */

void
idem_shard_open(IdemTable *table, LOCKMODE lockmode)
{
	idem_table_open(table, &idem_shard_def, lockmode);
}

/* The row that the snapshot shows; NULL if there is none */
static TupleTableSlot *
find_row(IdemTable *table, Snapshot snapshot)
{
	IdemLookup lookup = {
		.index = table->pkey, .value = Int16GetDatum(IDEM_SHARD_ROW), .equal = F_INT2EQ};
	IndexScanDesc scan = idem_probe_begin(table, &lookup, snapshot);
	TupleTableSlot *row = idem_table_row(table);
	bool found = index_getnext_slot(scan, ForwardScanDirection, row);

	index_endscan(scan);
	return found ? row : NULL;
}

/*
 * The row; NULL if there is none.  A catalog snapshot is taken now, whatever the
 * snapshot of the transaction is, also in a parallel query.
 */
TupleTableSlot *
idem_shard_find(IdemTable *table)
{
	Snapshot snapshot = RegisterSnapshot(GetCatalogSnapshot(RelationGetRelid(table->heap)));
	TupleTableSlot *row = find_row(table, snapshot);

	UnregisterSnapshot(snapshot);
	return row;
}

static void
mark_range(bool *slots, TypeCacheEntry *type, RangeType *range)
{
	RangeBound lower;
	RangeBound upper;
	bool empty;

	range_deserialize(type, range, &lower, &upper, &empty);
	if (lower.infinite || upper.infinite || DatumGetInt32(lower.val) < 0 ||
		DatumGetInt32(upper.val) > IDEM_SLOTS)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "slots"),
				errdetail("A slot is a number from 0 to %d.", IDEM_SLOTS - 1),
				errhint("Pass ranges of slots such as '{[0,256)}', '{}' for a router, or NULL for no map."));
	/* the upper bound of a range of integers is exclusive */
	for (int slot = DatumGetInt32(lower.val); slot < DatumGetInt32(upper.val); slot++)
		slots[slot] = true;
}

/* Set the elements of slots that are in the ranges; an error if a bound is not a slot (M1) */
void
idem_shard_mark(bool *slots, Datum ranges)
{
	TypeCacheEntry *type = lookup_type_cache(INT4MULTIRANGEOID, TYPECACHE_MULTIRANGE_INFO);
	RangeType **elements;
	int n;

	multirange_deserialize(type->rngtype, DatumGetMultirangeTypeP(ranges), &n, &elements);
	for (int i = 0; i < n; i++)
		mark_range(slots, type->rngtype, elements[i]);
}

/* List the slots of a map, so that jobs without a key take them in turn */
void
idem_shard_list_slots(IdemShard *shard)
{
	shard->nslots = 0;
	for (int slot = 0; slot < IDEM_SLOTS; slot++)
	{
		if (shard->has[slot])
			shard->slots[shard->nslots++] = slot;
	}
}

static void
mark_column(bool *slots, TupleTableSlot *row, AttrNumber attno)
{
	NullableDatum ranges = idem_row_datum(row, attno);

	if (!ranges.isnull)
		idem_shard_mark(slots, ranges.value);
}

/*
 * The map in the row, or that of a database that never had one, with NULL for the row.  Then a
 * worker of Citus counts as one without slots: when Citus adds a worker, it creates the extension
 * there, and moves shards to it whose keys stay behind (M7).
 */
void
idem_shard_read(TupleTableSlot *row, IdemShard *shard)
{
	NullableDatum slots;

	memset(shard, 0, sizeof(*shard));
	shard->number = -1;
	if (row == NULL)
	{
		shard->is_mapped = idem_check_is_citus_worker();
		return;
	}
	slots = idem_row_datum(row, IDEM_SHARD_SLOTS);
	shard->exists = true;
	shard->is_mapped = !slots.isnull;
	shard->jobs_from = idem_row_int64(row, IDEM_SHARD_JOBS_FROM);
	shard->by_scope = strcmp(text_to_cstring(idem_row_text(row, IDEM_SHARD_BY)), "scope") == 0;
	if (!idem_row_isnull(row, IDEM_SHARD_NUMBER))
		shard->number = idem_row_int32(row, IDEM_SHARD_NUMBER);
	mark_column(shard->has, row, IDEM_SHARD_SLOTS);
	mark_column(shard->given, row, IDEM_SHARD_GIVEN);
	mark_column(shard->taken, row, IDEM_SHARD_TAKEN);
	idem_shard_list_slots(shard);
}

/*
 * Read the map.  The version of the table is that after it was opened, before the snapshot:
 * if an invalidation arrives later, the map is read again (M4).
 */
static void
read_map(void)
{
	IdemShard shard;
	IdemTable table;
	TupleTableSlot *row;
	TransactionId xmin;
	uint64 version;

	idem_shard_open(&table, AccessShareLock);
	version = shard_cache.version;
	row = idem_shard_find(&table);
	idem_shard_read(row, &shard);
	xmin = row != NULL ? idem_row_xmin(row) : FrozenTransactionId;
	idem_table_close(&table);
	current = shard;
	current_version = version;
	current_xmin = xmin;
}

/*
 * M4: the map that counts for a caller that has opened idem.keys or idem.jobs.  The server has
 * processed the invalidations of other sessions when it granted the lock.
 */
const IdemShard *
idem_shard_get(void)
{
	if (unlikely(current_version != shard_cache.version))
		read_map();
	return &current;
}

/* M4: the same for a caller that has opened no table, or has read rows since it has opened one */
const IdemShard *
idem_shard_get_latest(void)
{
	AcceptInvalidationMessages();
	return idem_shard_get();
}

/*
 * M4: read the map that the snapshot shows into *shard; false if it is the current one, as it
 * nearly always is.  A row of this transaction counts as shown.  The cached xmin may be so old
 * that it seems to be one of the future, so the row decides.
 */
static bool
read_older_map(Snapshot snapshot, IdemShard *shard)
{
	IdemTable table;

	if (likely(!XidInMVCCSnapshot(current_xmin, snapshot)) ||
		TransactionIdIsCurrentTransactionId(current_xmin))
		return false;
	idem_shard_open(&table, AccessShareLock);
	idem_shard_read(find_row(&table, snapshot), shard);
	idem_table_close(&table);
	return true;
}

/* Raise the error for a slot whose rows the snapshot does not show (M4) */
pg_noreturn static void
refuse_snapshot(int slot)
{
	ereport(ERROR,
			errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			errmsg("could not serialize access due to a concurrent move of slots"),
			errdetail("Slot %d has arrived after the snapshot was taken, so the snapshot does not show its rows.", slot),
			errhint("Retry the transaction."));
}

/* M1: the slot of a key, or of all keys of the scope */
int
idem_shard_slot(const IdemShard *shard, const text *scope, const text *key)
{
	if (shard->by_scope)
		key = cstring_to_text("");
	return (uint64) idem_hash_name(scope, key) % IDEM_SLOTS;
}

/* Raise the error for a slot that this database does not have (M2); it names no key */
pg_noreturn static void
refuse_slot(const IdemShard *shard, const char *message, int slot)
{
	ereport(ERROR,
			errcode(ERRCODE_IDEM_OTHER_SHARD),
			errmsg("%s", message),
			shard->number >= 0 ? errdetail("Its slot is %d, which shard %d does not have.", slot, shard->number) :
								 errdetail("Its slot is %d, which this database does not have.", slot),
			shard->exists ? errhint("Call the database that has the slot; idem_slot() computes it. If the slot has just moved, the map of the router is old.") :
							errhint("A worker of Citus needs a map: call idem_shard_set()."));
}

/* M2: raise an error if the key belongs to another shard */
void
idem_shard_check_key(const text *scope, const text *key)
{
	const IdemShard *shard = idem_shard_get();
	int slot;

	if (likely(!shard->is_mapped))
		return;
	slot = idem_shard_slot(shard, scope, key);
	if (!shard->has[slot])
		refuse_slot(shard, "idempotency key belongs to another shard", slot);
}

/* M4: for a reader that has checked the key: an error if its slot came after the snapshot */
void
idem_shard_check_key_shown(const text *scope, const text *key, Snapshot snapshot)
{
	IdemShard older;
	int slot;

	if (likely(!read_older_map(snapshot, &older)) || !older.is_mapped)
		return;
	slot = idem_shard_slot(&older, scope, key);
	if (!older.has[slot])
		refuse_snapshot(slot);
}

/* The slot in the number of a job, or IDEM_NO_SLOT for a number from before the map (M6) */
int
idem_shard_slot_of_job(const IdemShard *shard, int64 job_id)
{
	return shard->exists && job_id >= shard->jobs_from ? job_id % IDEM_SLOTS : IDEM_NO_SLOT;
}

/* Does the job belong to this database? */
bool
idem_shard_has_job(const IdemShard *shard, int64 job_id)
{
	int slot;

	if (likely(!shard->is_mapped))
		return true;
	slot = idem_shard_slot_of_job(shard, job_id);
	return slot == IDEM_NO_SLOT || shard->has[slot];
}

/* M2: raise an error if the job belongs to another shard */
void
idem_shard_check_job(int64 job_id)
{
	const IdemShard *shard = idem_shard_get();

	if (unlikely(!idem_shard_has_job(shard, job_id)))
		refuse_slot(shard, "job belongs to another shard", idem_shard_slot_of_job(shard, job_id));
}

/* M4: for a reader that has checked the job: an error if its slot came after the snapshot */
void
idem_shard_check_job_shown(int64 job_id, Snapshot snapshot)
{
	IdemShard older;

	if (unlikely(read_older_map(snapshot, &older)) && !idem_shard_has_job(&older, job_id))
		refuse_snapshot(idem_shard_slot_of_job(&older, job_id));
}

/*
 * The slot for the number of a new job: that of its key, or IDEM_NO_SLOT (M6).  Raises an
 * error if another shard has the slot (M2).  scope NULL: idem.scope.
 */
int
idem_shard_choose_slot(const text *scope, const text *key)
{
	const IdemShard *shard = idem_shard_get();
	int slot;

	if (likely(!shard->exists && !shard->is_mapped))
		return IDEM_NO_SLOT;
	if (shard->is_mapped && shard->nslots == 0 && key == NULL)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_OTHER_SHARD),
				errmsg("job belongs to another shard"),
				errdetail("A job without a key gets a slot of its database, and this database has none."),
				errhint("Enqueue the job in a database that has slots."));
	if (key == NULL)
		return IDEM_NO_SLOT;
	slot = idem_shard_slot(shard, scope != NULL ? scope : cstring_to_text(idem_guc_scope), key);
	if (shard->is_mapped && !shard->has[slot])
		refuse_slot(shard, "key of the job belongs to another shard", slot);
	return slot;
}

/* The largest value of the sequence that was used before numbers carried slots */
int64
idem_shard_last_plain(void)
{
	const IdemShard *shard = idem_shard_get();

	return shard->exists ? shard->jobs_from / IDEM_SLOTS - 1 : -1;
}

/* The first of the numbers that carry slots and are made from this value of the sequence (M6) */
int64
idem_shard_first_number(int64 value)
{
	int64 number;

	if (pg_mul_s64_overflow(value, IDEM_SLOTS, &number))
		ereport(ERROR,
				errcode(ERRCODE_SEQUENCE_GENERATOR_LIMIT_EXCEEDED),
				errmsg("job numbers are used up"),
				errdetail("The value of the sequence is multiplied by %d, because job numbers carry a slot.", IDEM_SLOTS),
				errhint("Set the sequence idem.jobs_job_id_seq to a smaller value that is past all jobs."));
	return number;
}

/*
 * The number of a job from a value of the sequence (M6).  A job without a key gets a slot of
 * this database; the slots take turns.
 */
int64
idem_shard_number(int64 value, int slot)
{
	const IdemShard *shard = idem_shard_get();

	if (likely(!shard->exists))
		return value;
	if (slot == IDEM_NO_SLOT)
		slot = shard->is_mapped ? shard->slots[value % shard->nslots] : value % IDEM_SLOTS;
	return idem_shard_first_number(value) + slot;
}
