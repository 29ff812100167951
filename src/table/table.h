/*
 * table.h
 *		Open, look up, read and write the tables of idem.
 *
 * A look at a table returns its row in a slot, which stays as it is until the next look at the
 * table, or until the table is closed.  A row to be written has a slot of its own.
 */
#ifndef IDEM_TABLE_H
#define IDEM_TABLE_H

#include "access/multixact.h"
#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "nodes/lockoptions.h"
#include "utils/jsonb.h"
#include "utils/uuid.h"

#include "declared.h"
#include "idem.h"

/* A set of columns has a bit for each */
#define IDEM_COLUMN(attno) (UINT64CONST(1) << (attno))

/* An index of a table that takes entries */
typedef struct IdemIndexCache
{
	Oid oid;
	struct IndexInfo *info; /* NULL: not built, or the access method keeps state in it */
	BTScanInsert search;	/* to search a btree with; NULL: not built */
} IdemIndexCache;

/*
 * What this session knows about a table.  Everything that points to memory is in
 * "context", and nothing there refers to the relation cache.  While no table is open, the
 * slots are empty.
 */
typedef struct IdemTableCache
{
	Oid relid;				/* invalid: not looked up since the table changed, or there is none */
	uint64 version;			/* number of invalidations of the table */
	uint64 unsubscribed_at; /* value of nchanges in check.c at the last check */
	bool is_listed;
	struct IdemTableCache *next;

	bool is_checked; /* the table is as expected, and all below is valid */
	bool is_open;	 /* a function of this session uses the slots */
	MemoryContext context;
	TupleTableSlot *row;   /* looks at the table read their row into it */
	TupleTableSlot **rows; /* rows[n]: to write a row that ends after n columns; NULL: not made */
	IdemIndexCache pkey;
	IdemIndexCache *indexes; /* all of them, the primary key included; NULL: not looked up */
	int nindexes;
} IdemTableCache;

/*
 * A table of the schema idem as the library expects it.  All but the last member, and the numbers
 * of the columns (IDEM_JOBS_JOB_ID), come from CREATE TABLE in src/sql, by way of declared.h.
 */
typedef struct IdemTableDef
{
	const char *name;
	const Oid *types; /* of the columns */
	int natts;
	uint64 nullable; /* columns that may be null */
	AttrNumber pkey[2];
	int npkey;
	const char *pkey_command; /* creates the primary key again */
	IdemTableCache *cache;
} IdemTableDef;

/* Why functions refuse a table */
typedef struct IdemShapeProblem
{
	const char *detail;
	const char *hint;
	const char *command; /* repairs or shows the problem; no semicolon */
} IdemShapeProblem;

/* An open table; see table.c */
typedef struct IdemTable
{
	const IdemTableDef *def;
	MemoryContext context; /* current when the table was opened */
	LOCKMODE index_lock;   /* the lock on each index that is opened */
	Relation heap;
	Relation pkey;
	Relation *indexes; /* those that take entries; opened when needed */
	int nindexes;
} IdemTable;

/* The most rows of a batch */
#define IDEM_BATCH_ROWS 1024

typedef struct IdemBatchRow
{
	int ord; /* index entries are inserted in this order */
	TupleTableSlot *slot;
} IdemBatchRow;

/*
 * Rows that are written together: first all rows, then their entries index by index.  See
 * table.c.
 */
typedef struct IdemBatch
{
	IdemTable *table;
	MemoryContext context; /* of the slots and their rows */
	Size size;			   /* of all rows, in bytes */
	int n;
	int ninserted; /* so many of them are in the table, the others are not yet */
	int nslots;
	IdemBatchRow rows[IDEM_BATCH_ROWS];
} IdemBatch;

/* How to find a row */
typedef struct IdemLookup
{
	Relation index;
	Datum value;		 /* of its first column */
	RegProcedure equal;	 /* equality of its type */
	TupleTableSlot *row; /* to read rows into; NULL: the slot of the table */
	/* Does the row have the key, and not only its hash?  NULL: no hash, so it has. */
	bool (*matches)(TupleTableSlot *row, struct IdemLookup *lookup);
	const void *key; /* for matches() */
	uint32 others;	 /* set by matches(): see keyrow.c */
} IdemLookup;

/* Where a walk begins, and where it ends */
typedef struct IdemLeafStart
{
	const Datum *values; /* of the first columns of the index */
	int n;
	bool after; /* begin behind all entries with these values, not with the first of them */
	int nequal; /* end where one of so many columns changes */
} IdemLeafStart;

/* A walk over the entries of an index; see leaf.c */
typedef struct IdemLeafWalk
{
	IdemTable *table;
	Relation index;
	Snapshot snapshot;
	int nequal;		/* number of columns that are equal in all entries of the walk */
	bool has_begun; /* the index was searched */
	bool use_marks; /* skip entries that are marked as dead, and mark them */
	int nentries;	/* entries returned so far */
	Buffer leaf;	/* pinned; invalid: the walk has ended, or has not begun */
	XLogRecPtr lsn; /* of the leaf, when it was last read */
	OffsetNumber offnum;
	int ntid;		/* number of rows of the entry at offnum that were returned */
	bool is_single; /* the entry at offnum points to one row */
	struct IndexFetchTableData *heap;
	ItemPointerData tid; /* of the row version read last */
	TupleTableSlot *row; /* that version; valid until the next look at the table */
	bool again;			 /* there may be another version for the snapshot */
	union
	{
		IndexTupleData tuple;
		char bytes[BLCKSZ / 3];
		int64 align; /* index_getattr() reads columns of eight bytes */
	} entry;		 /* the last entry; its t_tid is the place of the row */
	BTScanInsertData key;
#ifdef USE_ASSERT_CHECKING
	struct IdemLeafCheck *check; /* compares the walk with an index scan; NULL: not compared */
#endif
} IdemLeafWalk;

/* What a probe has found */
typedef enum IdemFound
{
	IDEM_FOUND_NONE,
	IDEM_FOUND_OPEN, /* a row that another open transaction has inserted */
	IDEM_FOUND_ROW	 /* a row that is committed, or that this transaction has written */
} IdemFound;

typedef struct IdemProbeResult
{
	IdemFound found;
	TupleTableSlot *row; /* unless IDEM_FOUND_NONE; valid until the next look at the table */
	int nentries;		 /* entries of the index that were looked at */
	TransactionId xwait; /* open transaction that has inserted or is changing the row, or invalid */
} IdemProbeResult;

/* Open transactions that have locked, updated or deleted a row; invalid: there is none */
typedef struct IdemLockers
{
	bool mine;				 /* this transaction is one of them */
	TransactionId shared;	 /* another one; its lock does not conflict with FOR KEY SHARE */
	TransactionId exclusive; /* another one; its lock conflicts with every other lock */
} IdemLockers;

/* An open transaction that has locked, updated or deleted a row, and how */
typedef struct IdemRowLock
{
	TransactionId xid; /* of the transaction, never of a subtransaction */
	MultiXactStatus status;
} IdemRowLock;

typedef struct IdemRowLocks
{
	int n;
	IdemRowLock *locks;
} IdemRowLocks;

#define IDEM_SHARD_ROW 1 /* id of the one row */

#define IDEM_SLOTS	 1024
#define IDEM_NO_SLOT (-1)

/* The map of slots; see shard.c */
typedef struct IdemShard
{
	bool exists;	 /* there is a row in idem.shard: numbers of new jobs carry slots */
	bool is_mapped;	 /* there is a map, or this is a worker of Citus; else every slot is ours */
	bool by_scope;	 /* the slot depends on the scope alone */
	int number;		 /* of the shard; -1: none given */
	int64 jobs_from; /* the first number that carries a slot */
	int nslots;		 /* number of slots of the map */
	int16 slots[IDEM_SLOTS];
	bool has[IDEM_SLOTS];
	bool given[IDEM_SLOTS]; /* given up by idem_shard_give(): the rows may still be here */
	bool taken[IDEM_SLOTS]; /* taken by idem_shard_take(): the rows may still be there */
} IdemShard;

/* check.c */
extern bool idem_check_is_subscribed(Oid relid);
extern bool idem_check_any_subscribed(const char *const *tables);
extern bool idem_check_knows_unsubscribed(const IdemTableDef *def);
extern void idem_check_subscription(const IdemTableDef *def, Oid relid);
pg_noreturn extern void idem_check_refuse(const IdemTableDef *def, const char *detail,
										  const char *hint);
extern void idem_check_shape(const IdemTableDef *def, Relation heap);
extern bool idem_check_is_on_pkey(const IdemTableDef *def, Form_pg_index form);
extern void idem_check_index(IdemTable *table, Relation index);
extern bool idem_check_find_problem(const IdemTableDef *def, Relation heap,
									IdemShapeProblem *problem);
extern bool idem_check_is_ordered_by(Relation index, const AttrNumber *columns, int ncolumns);
extern const char *idem_check_citus_kind(Oid relid);
extern bool idem_check_is_citus_worker(void);
extern void idem_check_citus(const IdemTableDef *def, Oid relid);

/* table.c */
extern void idem_table_forget_open(void);
extern uint64 idem_table_version(const IdemTableDef *def);
extern void idem_table_open(IdemTable *table, const IdemTableDef *def, LOCKMODE lockmode);
extern bool idem_table_open_at_commit(IdemTable *table, const IdemTableDef *def);
extern void idem_table_close(IdemTable *table);
extern void idem_table_open_indexes(IdemTable *table);
extern Relation idem_table_find_index(IdemTable *table, const AttrNumber *columns, int ncolumns,
									  const char *missing, const char *hint);
extern void idem_table_lock_toast(IdemTable *table);
extern TupleTableSlot *idem_table_row(IdemTable *table);
extern const BTScanInsertData *idem_table_search_key(IdemTable *table, Relation index);
extern void idem_table_lock_hash(IdemTable *table, int64 hash);
extern bool idem_table_try_lock_hash(IdemTable *table, int64 hash);
extern void idem_table_unlock_hash(IdemTable *table, int64 hash);
extern TM_Result idem_table_lock_row(IdemTable *table, ItemPointerData tid, LockTupleMode mode,
									 LockWaitPolicy policy, TupleTableSlot *row);
extern TupleTableSlot *idem_table_new_row(IdemTable *table);
extern TupleTableSlot *idem_table_copy_row(IdemTable *table, TupleTableSlot *row);
extern bool idem_table_insert(IdemTable *table, TupleTableSlot *new);
extern IdemBatch *idem_table_begin_batch(IdemTable *table);
extern Size idem_table_add(IdemBatch *batch, TupleTableSlot *new, int ord);
extern void idem_table_write_rows(IdemBatch *batch, AttrNumber attno);
extern bool idem_table_write_entries(IdemBatch *batch, AttrNumber attno, int *ord);
extern void idem_table_end_batch(IdemBatch *batch);
extern TM_Result idem_table_update(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new,
								   bool *has_moved);
extern void idem_table_update_locked(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new,
									 int64 hash, bool *has_moved);
extern void idem_table_update_hashed(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new,
									 int64 hash);
extern TM_Result idem_table_delete(IdemTable *table, TupleTableSlot *row, bool wait);

/* row.c */
extern bool idem_row_varlena_equals(TupleTableSlot *row, AttrNumber attno, struct varlena *value);
extern TransactionId idem_row_xmin(TupleTableSlot *row);
extern bool idem_row_is_mine(TupleTableSlot *row);
extern bool idem_row_is_locked(TupleTableSlot *row);
extern void idem_row_lockers(TupleTableSlot *row, IdemLockers *lockers);
extern void idem_row_list_locks(TupleTableSlot *row, IdemRowLocks *locks);
extern TransactionId idem_row_locker(TupleTableSlot *row);
extern bool idem_row_is_replaced_by_me(TupleTableSlot *row);
extern bool idem_row_is_changed_by_me(IdemTable *table, ItemPointer tid);
extern bool idem_row_is_later_version(TupleTableSlot *row);
extern bool idem_row_is_last_version(TupleTableSlot *row);

/* leaf.c */
extern void idem_leaf_begin(IdemLeafWalk *walk, IdemTable *table, Relation index,
							Snapshot snapshot, const IdemLeafStart *start);
extern void idem_leaf_skip(IdemLeafWalk *walk, const ItemPointerData *place);
extern bool idem_leaf_next(IdemLeafWalk *walk);
extern bool idem_leaf_fetch(IdemLeafWalk *walk);
extern bool idem_leaf_next_row(IdemLeafWalk *walk);
extern void idem_leaf_end(IdemLeafWalk *walk);

/* probe.c */
extern void idem_probe_walk(IdemLeafWalk *walk, IdemTable *table, const IdemLookup *lookup,
							Snapshot snapshot);
extern IndexScanDesc idem_probe_begin(IdemTable *table, IdemLookup *lookup, Snapshot snapshot);
extern void idem_probe_classify(const SnapshotData *dirty, TupleTableSlot *row,
								IdemProbeResult *result);
extern void idem_probe(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result);
extern void idem_probe_find_open(IdemTable *table, IdemLookup *lookup, TupleTableSlot *open);
extern bool idem_probe_shows(IdemTable *table, IdemLookup *lookup, Snapshot snapshot);
extern void idem_probe_latest(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result);
extern void idem_probe_note_absent(IdemTable *table, IdemLookup *lookup);
extern void idem_probe_existing(IdemTable *table, IdemLookup *lookup, IdemProbeResult *result);
extern void idem_probe_wait(IdemTable *table, TransactionId xid);

/* shard.c */
extern const IdemTableDef idem_shard_def;
extern void idem_shard_open(IdemTable *table, LOCKMODE lockmode);
extern TupleTableSlot *idem_shard_find(IdemTable *table);
extern void idem_shard_mark(bool *slots, Datum ranges);
extern void idem_shard_list_slots(IdemShard *shard);
extern void idem_shard_read(TupleTableSlot *row, IdemShard *shard);
extern const IdemShard *idem_shard_get(void);
extern int idem_shard_slot(const IdemShard *shard, const text *scope, const text *key);
extern const IdemShard *idem_shard_get_latest(void);
extern void idem_shard_check_key(const text *scope, const text *key);
extern void idem_shard_check_key_shown(const text *scope, const text *key, Snapshot snapshot);
extern int idem_shard_slot_of_job(const IdemShard *shard, int64 job_id);
extern bool idem_shard_has_job(const IdemShard *shard, int64 job_id);
extern void idem_shard_check_job(int64 job_id);
extern void idem_shard_check_job_shown(int64 job_id, Snapshot snapshot);
extern int idem_shard_choose_slot(const text *scope, const text *key);
extern int64 idem_shard_last_plain(void);
extern int64 idem_shard_first_number(int64 value);
extern int64 idem_shard_number(int64 value, int slot);

/*
 * Columns of a row.  slot_getattr() returns null for columns after the
 * end of a short row.  The stored value may be toasted, and it is valid as long
 * as the row is in the slot.
 */
static inline NullableDatum
idem_row_datum(TupleTableSlot *row, AttrNumber attno)
{
	NullableDatum column;

	column.value = slot_getattr(row, attno, &column.isnull);
	return column;
}

static inline bool
idem_row_isnull(TupleTableSlot *row, AttrNumber attno)
{
	return idem_row_datum(row, attno).isnull;
}

/* These return 0, false or InvalidOid for null */
#define IDEM_ROW_READER(name, type, get)                                      \
	static inline type idem_row_##name(TupleTableSlot *row, AttrNumber attno) \
	{                                                                         \
		NullableDatum column = idem_row_datum(row, attno);                    \
                                                                              \
		return column.isnull ? (type) 0 : get(column.value);                  \
	}

IDEM_ROW_READER(timestamp, TimestampTz, DatumGetTimestampTz)
IDEM_ROW_READER(int16, int, DatumGetInt16)
IDEM_ROW_READER(int32, int, DatumGetInt32)
IDEM_ROW_READER(int64, int64, DatumGetInt64)
IDEM_ROW_READER(bool, bool, DatumGetBool)
IDEM_ROW_READER(oid, Oid, DatumGetObjectId)

/* These return NULL for null, else a copy in the caller's memory context */
static inline text *
idem_row_text(TupleTableSlot *row, AttrNumber attno)
{
	NullableDatum column = idem_row_datum(row, attno);

	return column.isnull ? NULL : DatumGetTextPCopy(column.value);
}

static inline pg_uuid_t *
idem_row_uuid(TupleTableSlot *row, AttrNumber attno)
{
	NullableDatum column = idem_row_datum(row, attno);
	pg_uuid_t *uuid = NULL;

	if (!column.isnull)
	{
		uuid = palloc_object(pg_uuid_t);
		*uuid = *DatumGetUUIDP(column.value);
	}
	return uuid;
}

static inline Jsonb *
idem_row_jsonb(TupleTableSlot *row, AttrNumber attno)
{
	NullableDatum column = idem_row_datum(row, attno);

	return column.isnull ? NULL : DatumGetJsonbPCopy(column.value);
}

/* Columns of a row to be written */
static inline void
idem_row_set(TupleTableSlot *slot, AttrNumber attno, Datum value)
{
	slot->tts_values[attno - 1] = value;
	slot->tts_isnull[attno - 1] = false;
}

static inline void
idem_row_clear(TupleTableSlot *slot, AttrNumber attno)
{
	slot->tts_isnull[attno - 1] = true;
}

/* NULL stands for null */
static inline void
idem_row_set_varlena(TupleTableSlot *slot, AttrNumber attno, const void *value)
{
	if (value != NULL)
		idem_row_set(slot, attno, PointerGetDatum(value));
	else
		idem_row_clear(slot, attno);
}

/* Copy a column of a row of another table, unless it is null */
static inline void
idem_row_copy_column(TupleTableSlot *from, AttrNumber attno, TupleTableSlot *to,
					 AttrNumber to_attno)
{
	NullableDatum column = idem_row_datum(from, attno);

	if (!column.isnull)
		idem_row_set(to, to_attno, column.value);
}

#endif /* IDEM_TABLE_H */
