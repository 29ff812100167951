/*
 * leaf.c
 *		Walk over the entries of a btree index, one at a time.
 *
 * An index scan of the server copies all matching entries of a leaf page before
 * it returns the first one.  Claims, enqueues and fetches mostly want one row, so they
 * read the leaf entry by entry.
 *
 * Between two entries the leaf stays pinned, but not locked.  The pin keeps VACUUM
 * from removing the entry, and so from reusing the place of its row, until the caller
 * has read the row.  A caller that waits for a transaction ends the walk first.
 *
 * The next entry is read from the same page if the LSN of the page has not changed:
 * every insert into a leaf, every split and every deletion changes it.  Otherwise
 * the walk searches the index for its last entry, and continues after it.
 *
 * The functions of nbtree that are called here are internal, and may change with each major
 * version.  So where assertions are enabled, each walk over equal entries is compared with an
 * index scan.
 *
 * A walk with an MVCC snapshot takes no predicate lock on the index.  A caller that
 * reads like a SELECT uses an index scan (idem_probe_begin).
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/transam.h"
#include "pgstat.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

#include "table/table.h"

#ifdef USE_ASSERT_CHECKING
#define MAX_CHECKED 64

/* The entries of the walk, as an index scan of the server has found them when it began */
typedef struct IdemLeafCheck
{
	int n;
	ItemPointerData tids[MAX_CHECKED];
	bool is_seen[MAX_CHECKED]; /* the walk has returned the entry */
} IdemLeafCheck;

/* List the entries that are equal in the columns of the walk; false if they are too many */
static bool
scan_index(IdemLeafWalk *walk, IdemLeafCheck *check)
{
	IndexScanDesc scan = index_beginscan(walk->table->heap, walk->index, SnapshotAny, NULL,
										 walk->nequal, 0, SO_NONE);
	ScanKeyData keys[INDEX_MAX_KEYS];
	ItemPointer tid;

	for (int i = 0; i < walk->nequal; i++)
		ScanKeyEntryInitialize(&keys[i], 0, i + 1, BTEqualStrategyNumber,
							   walk->index->rd_opcintype[i], walk->index->rd_indcollation[i],
							   get_opcode(get_opfamily_member(
								   walk->index->rd_opfamily[i], walk->index->rd_opcintype[i],
								   walk->index->rd_opcintype[i], BTEqualStrategyNumber)),
							   walk->key.scankeys[i].sk_argument);
	index_rescan(scan, keys, walk->nequal, NULL, 0);
	check->n = 0;
	while ((tid = index_getnext_tid(scan, ForwardScanDirection)) != NULL && check->n < MAX_CHECKED)
		check->tids[check->n++] = *tid;
	index_endscan(scan);
	return tid == NULL;
}

/* Begin to compare a walk over all entries that are equal in some columns with an index scan */
static void
begin_check(IdemLeafWalk *walk, const IdemLeafStart *start)
{
	walk->check = NULL;
	if (start->after || start->nequal < start->n)
		return;
	walk->check = palloc0_object(IdemLeafCheck);
	if (!scan_index(walk, walk->check))
	{
		pfree(walk->check);
		walk->check = NULL;
	}
}

static int
find_tid(const IdemLeafCheck *check, const ItemPointerData *tid)
{
	for (int i = 0; i < check->n; i++)
	{
		if (ItemPointerEquals((ItemPointer) &check->tids[i], (ItemPointer) tid))
			return i;
	}
	return -1;
}

/* The walk has returned an entry; it may be newer than the scan */
static void
note_entry(IdemLeafWalk *walk)
{
	int i = walk->check ? find_tid(walk->check, &walk->entry.tuple.t_tid) : -1;

	if (i >= 0)
		walk->check->is_seen[i] = true;
}

/* The walk has ended: an entry that was there before it, and still is, must not be missing */
static void
end_check(IdemLeafWalk *walk)
{
	IdemLeafCheck now;

	if (walk->check == NULL || !scan_index(walk, &now))
		return;
	for (int i = 0; i < walk->check->n; i++)
		Assert(walk->check->is_seen[i] || find_tid(&now, &walk->check->tids[i]) < 0);
}
#else
#define begin_check(walk, start) ((void) 0)
#define note_entry(walk)		 ((void) 0)
#define end_check(walk)			 ((void) 0)
#endif

void
idem_leaf_begin(IdemLeafWalk *walk, IdemTable *table, Relation index, Snapshot snapshot,
				const IdemLeafStart *start)
{
	const BTScanInsertData *key = idem_table_search_key(table, index);

	Assert(start->nequal <= start->n && start->n <= key->keysz);
	walk->table = table;
	walk->index = index;
	walk->snapshot = snapshot;
	memcpy(&walk->key, key, offsetof(BTScanInsertData, scankeys) + start->n * sizeof(ScanKeyData));
	_bt_metaversion(index, &walk->key.heapkeyspace, &walk->key.allequalimage);
	for (int i = 0; i < start->n; i++)
		walk->key.scankeys[i].sk_argument = start->values[i];
	walk->key.keysz = start->n;
	walk->key.nextkey = start->after;
	walk->nequal = start->nequal;
	walk->leaf = InvalidBuffer;
	walk->has_begun = false;
	walk->nentries = 0;
	walk->heap = NULL;
	walk->row = idem_table_row(table);
	walk->again = false;
	/* as in index scans: on a standby, a mark of the primary says nothing about our snapshots */
	walk->use_marks = !TransactionStartedDuringRecovery();
	pgstat_count_index_scan(index);
	begin_check(walk, start);
}

void
idem_leaf_end(IdemLeafWalk *walk)
{
	if (BufferIsValid(walk->leaf))
		ReleaseBuffer(walk->leaf);
	walk->leaf = InvalidBuffer;
	if (walk->heap != NULL)
		table_index_fetch_end(walk->heap);
	walk->heap = NULL;
#ifdef USE_ASSERT_CHECKING
	if (walk->check != NULL)
		pfree(walk->check);
	walk->check = NULL;
#endif
}

/* The first entry of the locked leaf that is not before the key; after it, with nextkey */
static OffsetNumber
search_leaf(IdemLeafWalk *walk, BTScanInsert key)
{
	Page page = BufferGetPage(walk->leaf);
	OffsetNumber low = P_FIRSTDATAKEY(BTPageGetOpaque(page));
	OffsetNumber high = PageGetMaxOffsetNumber(page) + 1;
	int before = key->nextkey ? 0 : 1;

	while (low < high)
	{
		OffsetNumber mid = low + (high - low) / 2;

		if (_bt_compare(walk->index, key, page, mid) >= before)
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

/* Find and lock the leaf of the key; false if the index is empty */
static bool
find_leaf(IdemLeafWalk *walk, BTScanInsert key)
{
	idem_compat_bt_search(walk->index, walk->table->heap, key, &walk->leaf);
	if (!BufferIsValid(walk->leaf))
		return false;
	walk->offnum = search_leaf(walk, key);
	walk->ntid = 0;
	return true;
}

static IndexTuple
get_tuple(IdemLeafWalk *walk)
{
	Page page = BufferGetPage(walk->leaf);

	return (IndexTuple) PageGetItem(page, PageGetItemId(page, walk->offnum));
}

/* An entry points to one row, or to several if the server has merged equal entries */
static int
count_tids(IndexTuple tuple)
{
	return BTreeTupleIsPosting(tuple) ? BTreeTupleGetNPosting(tuple) : 1;
}

static ItemPointer
get_tid(IndexTuple tuple, int i)
{
	return BTreeTupleIsPosting(tuple) ? BTreeTupleGetPostingN(tuple, i) : &tuple->t_tid;
}

/*
 * The leaf has changed: search the index for the last entry, by its columns and the
 * place of its row, and continue after it.
 */
static bool
find_again(IdemLeafWalk *walk)
{
	BTScanInsert key = _bt_mkscankey(walk->index, &walk->entry.tuple);
	bool found = find_leaf(walk, key);
	Page page;

	if (found)
	{
		page = BufferGetPage(walk->leaf);
		if (walk->offnum <= PageGetMaxOffsetNumber(page) &&
			_bt_compare(walk->index, key, page, walk->offnum) == 0)
		{
			IndexTuple tuple = get_tuple(walk);

			while (walk->ntid < count_tids(tuple) &&
				   ItemPointerCompare(get_tid(tuple, walk->ntid), &walk->entry.tuple.t_tid) <= 0)
				walk->ntid++;
		}
	}
	pfree(key);
	return found;
}

/* Lock the leaf at the position after the last entry; false if there is no leaf */
static bool
lock_position(IdemLeafWalk *walk)
{
	if (!walk->has_begun)
	{
		walk->has_begun = true;
		if (!find_leaf(walk, &walk->key))
			return false;
		walk->key.nextkey = false;
		walk->key.keysz = walk->nequal;
		return true;
	}
	if (!BufferIsValid(walk->leaf))
		return false;
	_bt_lockbuf(walk->index, walk->leaf, BT_READ);
	/* changes that are not logged leave the LSN as it is */
	if (RelationNeedsWAL(walk->index) && BufferGetLSNAtomic(walk->leaf) == walk->lsn)
		return true;
	_bt_relbuf(walk->index, walk->leaf);
	walk->leaf = InvalidBuffer;
	return find_again(walk);
}

/* Go to the next leaf; false if there is none, or if the walk ends before it */
static bool
step_right(IdemLeafWalk *walk)
{
	Page page = BufferGetPage(walk->leaf);
	BTPageOpaque opaque = BTPageGetOpaque(page);
	BlockNumber next = opaque->btpo_next;
	/* a page that was deleted has no high key, and is not the rightmost one */
	bool ends = P_RIGHTMOST(opaque) ||
		(!P_IGNORE(opaque) && _bt_compare(walk->index, &walk->key, page, P_HIKEY) < 0);

	_bt_relbuf(walk->index, walk->leaf);
	walk->leaf = InvalidBuffer;
	if (ends)
		return false;
	CHECK_FOR_INTERRUPTS();
	walk->leaf = _bt_getbuf(walk->index, next, BT_READ);
	page = BufferGetPage(walk->leaf);
	opaque = BTPageGetOpaque(page);
	/* a page that is being deleted has no entries to read */
	walk->offnum = P_IGNORE(opaque) ? PageGetMaxOffsetNumber(page) + 1 : P_FIRSTDATAKEY(opaque);
	walk->ntid = 0;
	return true;
}

/* Copy the entry, because the leaf may change once it is unlocked */
static void
copy_entry(IdemLeafWalk *walk, IndexTuple tuple)
{
	Size size = BTreeTupleIsPosting(tuple) ? BTreeTupleGetPostingOffset(tuple) :
											 IndexTupleSize(tuple);

	if (size > sizeof(walk->entry))
		elog(ERROR, "unexpected size of an index entry of idem.%s", walk->table->def->name);
	memcpy(&walk->entry, tuple, size);
	/* a copy of one of several merged entries is an entry of its own */
	walk->entry.tuple.t_info &= ~(INDEX_SIZE_MASK | INDEX_ALT_TID_MASK);
	walk->entry.tuple.t_info |= size;
	walk->entry.tuple.t_tid = *get_tid(tuple, walk->ntid);
	walk->is_single = !BTreeTupleIsPosting(tuple);
}

/* Is there a row left at the position, which is on the page? */
static bool
has_row(IdemLeafWalk *walk)
{
	ItemId item = PageGetItemId(BufferGetPage(walk->leaf), walk->offnum);

	return !(walk->use_marks && ItemIdIsDead(item)) && walk->ntid < count_tids(get_tuple(walk));
}

/* Read the next entry into walk->entry; false if there is none */
static bool
read_next(IdemLeafWalk *walk)
{
	if (!lock_position(walk))
		return false;
	while (walk->offnum > PageGetMaxOffsetNumber(BufferGetPage(walk->leaf)) || !has_row(walk))
	{
		if (walk->offnum <= PageGetMaxOffsetNumber(BufferGetPage(walk->leaf)))
		{
			walk->offnum++;
			walk->ntid = 0;
		}
		else if (!step_right(walk))
			return false;
	}
	if (_bt_compare(walk->index, &walk->key, BufferGetPage(walk->leaf), walk->offnum) != 0)
	{
		_bt_relbuf(walk->index, walk->leaf);
		walk->leaf = InvalidBuffer;
		return false;
	}
	copy_entry(walk, get_tuple(walk));
	walk->ntid++;
	walk->nentries++;
	walk->lsn = BufferGetLSNAtomic(walk->leaf);
	_bt_unlockbuf(walk->index, walk->leaf);
	return true;
}

/* Go to the next entry; false if the walk has ended.  The entry is in walk->entry. */
bool
idem_leaf_next(IdemLeafWalk *walk)
{
	bool found = read_next(walk);

	walk->again = false;
	if (found)
		note_entry(walk);
	else
		end_check(walk);
	return found;
}

/* Go on behind this place of a row, among entries that are equal to the last one */
void
idem_leaf_skip(IdemLeafWalk *walk, const ItemPointerData *place)
{
	walk->entry.tuple.t_tid = *place;
	walk->again = false;
	/* no page has this LSN, so the index is searched */
	walk->lsn = InvalidXLogRecPtr;
#ifdef USE_ASSERT_CHECKING
	/* it misses entries on purpose */
	if (walk->check != NULL)
		walk->check->n = 0;
#endif
}

/* No transaction can see the row: mark the entry, so that later walks and scans skip it */
static void
mark_dead(IdemLeafWalk *walk)
{
	Page page = BufferGetPage(walk->leaf);

	_bt_lockbuf(walk->index, walk->leaf, BT_READ);
	if (RelationNeedsWAL(walk->index) && BufferGetLSNAtomic(walk->leaf) == walk->lsn &&
		BufferBeginSetHintBits(walk->leaf))
	{
		ItemIdMarkDead(PageGetItemId(page, walk->offnum));
		BTPageGetOpaque(page)->btpo_flags |= BTP_HAS_GARBAGE;
		BufferFinishSetHintBits(walk->leaf, true, true);
	}
	_bt_unlockbuf(walk->index, walk->leaf);
}

/*
 * Read the row of the entry into walk->row; false if the snapshot
 * shows no version of it.  walk->again: there may be another version for the snapshot.
 */
bool
idem_leaf_fetch(IdemLeafWalk *walk)
{
	bool first = !walk->again;
	bool all_dead = false;
	bool found;

	if (walk->heap == NULL)
		walk->heap = table_index_fetch_begin(walk->table->heap, SO_NONE);
	if (first)
		walk->tid = walk->entry.tuple.t_tid;
	found = table_index_fetch_tuple(walk->heap, &walk->tid, walk->snapshot, walk->row,
									&walk->again, &all_dead);
	if (found)
		pgstat_count_heap_fetch(walk->index);
	else if (all_dead && first && walk->is_single && walk->use_marks)
		mark_dead(walk);
	return found;
}

/* Go to the next row version that the snapshot shows; false if the walk has ended */
bool
idem_leaf_next_row(IdemLeafWalk *walk)
{
	while (walk->again || idem_leaf_next(walk))
	{
		if (idem_leaf_fetch(walk))
			return true;
	}
	return false;
}
