/*
 * keystore.c
 *		The protocol of idempotency keys: claim, finish, release, forget, get,
 *		cleanup.  Every access to idem.keys passes through here.
 *
 * A claim is a row, inserted at once, in the caller's transaction.  Its state
 * is read off the row and nothing else: a row whose xmin belongs to the
 * current transaction (or a subtransaction of it) is held by it; a row of
 * another open transaction is open; a committed row is live until expires_at
 * and then counts as absent.  There is no state in backend memory but
 * a hint about the place of a row, so rollback, savepoints and PREPARE TRANSACTION need no code here.
 *
 * Who waits for whom: a claimer that meets an open row waits for the
 * transaction that made it (XactLockTableWait, so core finds deadlocks and
 * lock_timeout holds) and then looks again; likewise one that wants to take
 * over an expired row which another transaction is just replacing or removing.
 * Nobody waits for a live row: its answer is there.  Cleanup waits for nobody.
 *
 * Rows are looked up with a dirty snapshot, which also shows what is not
 * committed.  It may miss a row that is being updated right now.  A claim then
 * tries to insert and is told better by the unique index; for the others it is
 * as if they had come a moment earlier.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/latch.h"
#include "storage/predicate.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "idem.h"

/* What a look at a key has found */
typedef enum Found
{
	FOUND_NONE,
	FOUND_MINE,	   /* made by this transaction */
	FOUND_LIVE,	   /* committed and not expired */
	FOUND_EXPIRED, /* committed and expired */
	FOUND_OPEN	   /* made by another transaction, still open */
} Found;

/* The row itself is in the slot of the table */
typedef struct Probe
{
	Found found;
	TransactionId xwait; /* whose end would change the picture, or invalid */
	uint32 spectoken;	 /* not 0: that one is only about to insert it */
} Probe;

/* Where the last claim of this backend went; see find_last_claim() */
static ItemPointerData last_claim;

/* The clock by which keys expire; never the start of the transaction */
TimestampTz
idem_keystore_now(void)
{
	return GetCurrentTimestamp() + idem_guc_clock_offset * USECS_PER_SEC;
}

static TimestampTz
row_timestamp(IdemKeyTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = slot_getattr(table->found, attno, &isnull);

	return isnull ? 0 : DatumGetTimestampTz(value);
}

static bool
row_is_null(IdemKeyTable *table, AttrNumber attno)
{
	bool isnull;

	(void) slot_getattr(table->found, attno, &isnull);
	return isnull;
}

/*
 * Was the row made by this transaction?  One that is frozen was not, although
 * it keeps its xmin, which may be in use again.
 */
static bool
row_is_mine(IdemKeyTable *table)
{
	HeapTupleHeader tuple = ExecFetchSlotHeapTuple(table->found, false, NULL)->t_data;

	return !HeapTupleHeaderXminFrozen(tuple) &&
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetRawXmin(tuple));
}

static bool
row_is_expired(IdemKeyTable *table)
{
	return row_timestamp(table, IDEM_KEYS_EXPIRES_AT) <= idem_keystore_now();
}

/*
 * State of a committed row, or one of this transaction, for people.  A claim
 * does not expire under the transaction that holds it.
 */
const char *
idem_keystore_state_name(TransactionId xmin, bool finished, TimestampTz expires_at)
{
	if (TransactionIdIsCurrentTransactionId(xmin))
		return finished ? "finished" : "held";
	return expires_at <= idem_keystore_now() ? "expired" : "finished";
}

static void
classify_row(IdemKeyTable *table, const SnapshotData *dirty, Probe *probe)
{
	probe->spectoken = 0;
	if (TransactionIdIsValid(dirty->xmin))
	{
		probe->found = FOUND_OPEN;
		probe->xwait = dirty->xmin;
		probe->spectoken = dirty->speculativeToken;
	}
	else if (row_is_mine(table))
	{
		probe->found = FOUND_MINE;
		probe->xwait = InvalidTransactionId;
	}
	else
	{
		probe->found = row_is_expired(table) ? FOUND_EXPIRED : FOUND_LIVE;
		probe->xwait = dirty->xmax;
	}
}

/*
 * Look at a key.  An open row is not the last word: beside it may be the
 * committed one that its transaction has removed.
 */
static void
probe_key(IdemKeyTable *table, const IdemKey *key, Probe *probe)
{
	SnapshotData dirty;
	IndexScanDesc scan;

	InitDirtySnapshot(dirty);
	memset(probe, 0, sizeof(*probe));
	probe->found = FOUND_NONE;
	scan = idem_keytable_scan_key(table, key, &dirty);
	while (index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		classify_row(table, &dirty, probe);
		if (probe->found != FOUND_OPEN)
			break;
	}
	index_endscan(scan);
}

/* Let a moment of a bounded wait pass; false if there is none left */
static bool
pause_until(TimestampTz until)
{
	static uint32 wait_event = 0;
	long left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);

	if (left <= 0)
		return false;
	if (wait_event == 0)
		wait_event = idem_compat_wait_event("IdemClaim");
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 Min(left, 5), wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	return true;
}

/*
 * Wait for the transaction in the way.  False: it is still there after the
 * time that the caller wanted to wait.
 *
 * The lock manager can only end a wait with an error, which would cost the
 * caller the transaction.  So a bounded wait asks again and again.
 */
static bool
wait_for_other(IdemKeyTable *table, const Probe *probe, const IdemWait *wait)
{
	/* VACUUM shall not wait for the page as long as we do */
	ExecClearTuple(table->found);

	if (probe->spectoken != 0)
	{
		/* between insert and verdict nobody takes locks: never long */
		SpeculativeInsertionWait(probe->xwait, probe->spectoken);
		return true;
	}
	if (wait->forever)
	{
		XactLockTableWait(probe->xwait, NULL, NULL, XLTW_None);
		return true;
	}
	while (!idem_compat_xact_has_ended(probe->xwait))
	{
		if (!pause_until(wait->until))
			return false;
	}
	return true;
}

/* The role that this session claims keys for */
static Oid
current_owner(void)
{
	Oid owner;

	if (idem_guc_owner[0] == '\0')
		return GetUserId();
	owner = get_role_oid(idem_guc_owner, true);
	if (!OidIsValid(owner))
		ereport(ERROR,
				errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("role \"%s\" does not exist", idem_guc_owner),
				errdetail("The setting \"%s\" names it.", "idem.owner"),
				errhint("Create the role, or reset \"%s\".", "idem.owner"));
	if (!member_can_set_role(GetUserId(), owner))
		ereport(ERROR,
				errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("permission denied to own keys as role \"%s\"", idem_guc_owner),
				errdetail("The current user cannot act as the role that \"%s\" names.", "idem.owner"),
				errhint("Grant the role to the current user, or reset \"%s\".", "idem.owner"));
	return owner;
}

/* Neither the stored result nor a second run for strangers */
static void
check_owner(Oid owner)
{
	if (owner == current_owner() || has_privs_of_role(GetUserId(), owner))
		return;
	ereport(ERROR,
			errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			errmsg("idempotency key belongs to another role"),
			errdetail("The current user has not the privileges of the role that claimed the key."),
			errhint("Use a scope of your own, or share keys through a common role named in \"%s\".", "idem.owner"));
}

static Oid
row_owner(IdemKeyTable *table)
{
	bool isnull;

	return DatumGetObjectId(slot_getattr(table->found, IDEM_KEYS_OWNER, &isnull));
}

static int64
row_age(IdemKeyTable *table)
{
	int64 age = idem_keystore_now() - row_timestamp(table, IDEM_KEYS_CREATED_AT);

	return Max(age, 0) / USECS_PER_SEC;
}

static bool
varlena_equal(struct varlena *a, struct varlena *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

/* A key stands for one request: with another one it is a mistake of the caller */
static void
check_request(IdemKeyTable *table, bytea *request)
{
	bool isnull;
	Datum stored = slot_getattr(table->found, IDEM_KEYS_REQUEST, &isnull);

	if (request == NULL || isnull || varlena_equal(request, DatumGetByteaPP(stored)))
		return;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
			errmsg("idempotency key was used with another request"),
			errdetail("The key was claimed " INT64_FORMAT " s ago with a request that differs from this one.",
					  row_age(table)),
			errhint("Use a new key for a new request, and send the same request when you retry."));
}

/*
 * SERIALIZABLE: the answer is the latest committed state.  So the row found
 * has to be one that the snapshot of the transaction shows too, as ON CONFLICT
 * has it; and SSI is told that it was read.
 */
static void
check_serializable(IdemKeyTable *table)
{
	Snapshot snapshot;

	if (!IsolationIsSerializable())
		return;
	snapshot = GetTransactionSnapshot();
	if (!table_tuple_satisfies_snapshot(table->heap, table->found, snapshot))
		ereport(ERROR,
				errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				errmsg("could not serialize access due to a concurrent change of an idempotency key"),
				errdetail("The key was changed after this transaction took its snapshot."),
				errhint("Retry the transaction."));
	PredicateLockTID(table->heap, &table->found->tts_tid, snapshot,
					 HeapTupleHeaderGetXmin(ExecFetchSlotHeapTuple(table->found, false, NULL)->t_data));
}

static void
fill_row(IdemKeyTable *table, IdemStatus status, IdemRow *row)
{
	bool isnull;
	Datum value;

	row->status = status;
	row->owner = row_owner(table);
	row->created_at = row_timestamp(table, IDEM_KEYS_CREATED_AT);
	row->expires_at = row_timestamp(table, IDEM_KEYS_EXPIRES_AT);
	row->finished_at = row_timestamp(table, IDEM_KEYS_FINISHED_AT);
	value = slot_getattr(table->found, IDEM_KEYS_RESULT, &isnull);
	row->result = isnull ? NULL : DatumGetJsonbPCopy(value);
}

/* Status of a row of this transaction */
static IdemStatus
mine_status(IdemKeyTable *table)
{
	return row_is_null(table, IDEM_KEYS_FINISHED_AT) ? IDEM_HELD : IDEM_FINISHED;
}

static void
set_column(TupleTableSlot *slot, AttrNumber attno, Datum value)
{
	slot->tts_values[attno - 1] = value;
	slot->tts_isnull[attno - 1] = false;
}

/* Make the row of a new claim */
static void
make_claim(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row)
{
	TupleTableSlot *slot = idem_keytable_new_row(table);

	memset(row, 0, sizeof(*row));
	row->status = IDEM_CLAIMED;
	row->owner = current_owner();
	row->created_at = idem_keystore_now();
	row->expires_at = row->created_at + claim->ttl;

	memset(slot->tts_isnull, true, IDEM_KEYS_NATTS * sizeof(bool));
	set_column(slot, IDEM_KEYS_CREATED_AT, TimestampTzGetDatum(row->created_at));
	set_column(slot, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(row->expires_at));
	set_column(slot, IDEM_KEYS_OWNER, ObjectIdGetDatum(row->owner));
	set_column(slot, IDEM_KEYS_KEY, PointerGetDatum(claim->key.key));
	set_column(slot, IDEM_KEYS_SCOPE, PointerGetDatum(claim->key.scope));
	if (claim->request != NULL)
		set_column(slot, IDEM_KEYS_REQUEST, PointerGetDatum(claim->request));
	ExecStoreVirtualTuple(slot);
}

/* Claim a key that is absent; false if it has just appeared */
static bool
insert_claim(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row)
{
	make_claim(table, claim, row);
	if (!idem_keytable_insert(table))
		return false;
	last_claim = table->written->tts_tid;
	return true;
}

/* Claim a key whose row has expired, by replacing that row */
static TM_Result
take_over(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row)
{
	ItemPointerData tid = table->found->tts_tid;

	check_serializable(table);
	make_claim(table, claim, row);
	return idem_keytable_update(table, &tid, claim->wait.forever);
}

/* Answer from the row found, if this caller may have it for this request */
static void
replay(IdemKeyTable *table, bytea *request, IdemStatus status, IdemRow *row)
{
	check_owner(row_owner(table));
	check_request(table, request);
	check_serializable(table);
	fill_row(table, status, row);
}

/*
 * Claim the key for this transaction, or say why not.  Each round looks at
 * the key and either answers or waits for what is in the way.
 */
void
idem_keystore_claim(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row)
{
	for (;;)
	{
		Probe probe;
		bool ended = true;

		CHECK_FOR_INTERRUPTS();
		probe_key(table, &claim->key, &probe);

		if (probe.found == FOUND_MINE || probe.found == FOUND_LIVE)
		{
			/* a committed claim is finished, whether idem_finish() was called or not */
			replay(table, claim->request,
				   probe.found == FOUND_MINE ? mine_status(table) : IDEM_FINISHED, row);
			return;
		}

		if (TransactionIdIsValid(probe.xwait))
			ended = wait_for_other(table, &probe, &claim->wait);
		else if (probe.found == FOUND_NONE)
		{
			if (insert_claim(table, claim, row))
				return;
		}
		else
		{
			TM_Result result = take_over(table, claim, row);

			if (result == TM_Ok)
				return;
			/* somebody has locked the row without changing it */
			if (result == TM_WouldBlock)
			{
				ExecClearTuple(table->found);
				ended = pause_until(claim->wait.until);
			}
		}

		if (!ended)
		{
			memset(row, 0, sizeof(*row));
			row->status = IDEM_BUSY;
			return;
		}
	}
}

/* Says what was found instead of a key held by this transaction */
pg_noreturn static void
not_held(IdemKeyTable *table, Found found)
{
	if (found == FOUND_LIVE)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was claimed " INT64_FORMAT " s ago by a transaction that has committed.",
						  row_age(table)),
				errhint("Begin a transaction before idem_claim(): in autocommit mode the claim commits at once. An operator can remove the key with idem_forget()."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_NOT_HELD),
			errmsg("idempotency key is not held by this transaction"),
			found == FOUND_OPEN ? errdetail("Another transaction has claimed the key and is still open.") :
								  errdetail("There is no such key in this scope."),
			errhint("Call idem_claim() first, in the same transaction, and go on only if it answered \"claimed\"."));
}

static bool
row_text_equals(IdemKeyTable *table, AttrNumber attno, text *value)
{
	bool isnull;

	return varlena_equal(DatumGetTextPP(slot_getattr(table->found, attno, &isnull)), value);
}

/*
 * Is the row of this key where the last claim of this backend went?  That
 * saves the way through the index.  Only a guess about the place: whether
 * the row is the one and held by this transaction is read off the row.
 */
static bool
find_last_claim(IdemKeyTable *table, const IdemKey *key)
{
	return ItemPointerIsValid(&last_claim) &&
		ItemPointerGetBlockNumber(&last_claim) < RelationGetNumberOfBlocks(table->heap) &&
		table_tuple_fetch_row_version(table->heap, &last_claim, SnapshotSelf, table->found) &&
		row_is_mine(table) &&
		row_text_equals(table, IDEM_KEYS_KEY, key->key) &&
		row_text_equals(table, IDEM_KEYS_SCOPE, key->scope);
}

/* Find a key that this transaction holds */
static void
probe_held_key(IdemKeyTable *table, const IdemKey *key)
{
	Probe probe;

	if (find_last_claim(table, key))
	{
		check_owner(row_owner(table));
		return;
	}
	ItemPointerSetInvalid(&last_claim); /* do not guess again for each key of a batch */
	probe_key(table, key, &probe);
	if (probe.found == FOUND_MINE || probe.found == FOUND_LIVE)
		check_owner(row_owner(table));
	if (probe.found != FOUND_MINE)
		not_held(table, probe.found);
}

static bool
row_result_equals(IdemKeyTable *table, Jsonb *result)
{
	bool isnull;
	Datum stored = slot_getattr(table->found, IDEM_KEYS_RESULT, &isnull);

	if (isnull || result == NULL)
		return isnull && result == NULL;
	return compareJsonbContainers(&DatumGetJsonbP(stored)->root, &result->root) == 0;
}

/* Make a copy of the row found, with the columns that a finish sets */
static void
make_finished(IdemKeyTable *table, Jsonb *result)
{
	TupleTableSlot *slot = idem_keytable_new_row(table);

	slot_getallattrs(table->found);
	memcpy(slot->tts_values, table->found->tts_values, IDEM_KEYS_NATTS * sizeof(Datum));
	memcpy(slot->tts_isnull, table->found->tts_isnull, IDEM_KEYS_NATTS * sizeof(bool));
	set_column(slot, IDEM_KEYS_FINISHED_AT, TimestampTzGetDatum(idem_keystore_now()));
	if (result != NULL)
		set_column(slot, IDEM_KEYS_RESULT, JsonbPGetDatum(result));
	ExecStoreVirtualTuple(slot);
}

/*
 * Store the result.  Touches no indexed column, so it is a HOT update where
 * the page has room.
 */
void
idem_keystore_finish(IdemKeyTable *table, const IdemKey *key, Jsonb *result)
{
	probe_held_key(table, key);
	if (mine_status(table) == IDEM_FINISHED)
	{
		if (row_result_equals(table, result))
			return;
		ereport(ERROR,
				errcode(ERRCODE_IDEM_ALREADY_FINISHED),
				errmsg("idempotency key is already finished with another result"),
				errdetail("The key was claimed " INT64_FORMAT " s ago and finished by this transaction.",
						  row_age(table)),
				errhint("Finish a key once, or again with an equal result."));
	}
	make_finished(table, result);
	if (idem_keytable_update(table, &table->found->tts_tid, true) != TM_Ok)
		elog(ERROR, "a key held by this transaction was changed by another one");
}

/* Give up a claim, as if the key had never been claimed */
void
idem_keystore_release(IdemKeyTable *table, const IdemKey *key)
{
	probe_held_key(table, key);
	if (mine_status(table) == IDEM_FINISHED)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_ALREADY_FINISHED),
				errmsg("idempotency key is already finished"),
				errdetail("The key was claimed " INT64_FORMAT " s ago and finished by this transaction.",
						  row_age(table)),
				errhint("Roll back to undo the work together with its key."));
	if (idem_keytable_delete(table, &table->found->tts_tid, true) != TM_Ok)
		elog(ERROR, "a key held by this transaction was changed by another one");
}

/*
 * Remove a key, whoever owns it; EXECUTE on idem_forget() is the privilege.
 * Waits for a transaction that has claimed or is changing it.
 */
bool
idem_keystore_forget(IdemKeyTable *table, const IdemKey *key)
{
	static const IdemWait forever = {.forever = true};

	for (;;)
	{
		Probe probe;

		CHECK_FOR_INTERRUPTS();
		probe_key(table, key, &probe);
		if (TransactionIdIsValid(probe.xwait))
			(void) wait_for_other(table, &probe, &forever);
		else if (probe.found == FOUND_NONE || probe.found == FOUND_EXPIRED)
			return false;
		else
		{
			check_serializable(table);
			if (idem_keytable_delete(table, &table->found->tts_tid, true) == TM_Ok)
				return true;
		}
	}
}

/*
 * What the statement's snapshot shows of a key, like a SELECT.  Under
 * REPEATABLE READ that can be two rows: one that others have removed since the
 * snapshot, and the one of this transaction, which counts.
 */
bool
idem_keystore_get(IdemKeyTable *table, const IdemKey *key, IdemRow *row)
{
	IndexScanDesc scan = idem_keytable_scan_key(table, key, GetActiveSnapshot());
	bool found = false;
	bool mine = false;

	while (!mine && index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		mine = row_is_mine(table);
		if (!mine && row_is_expired(table))
			continue;
		found = true;
		fill_row(table, mine ? mine_status(table) : IDEM_FINISHED, row);
	}
	index_endscan(scan);
	if (found)
		check_owner(row->owner);
	return found;
}

/*
 * Remove expired keys, oldest first, at most batch of them.  A row that
 * somebody else has locked, replaced or removed is left alone, and so is one
 * that this transaction holds.
 */
int
idem_keystore_cleanup(IdemKeyTable *table, int batch)
{
	Relation index = idem_keytable_open_expiry_index(table);
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan = idem_compat_index_beginscan(table->heap, index, snapshot, 1);
	ScanKeyData skey;
	int removed = 0;

	ScanKeyInit(&skey, 1, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE,
				TimestampTzGetDatum(idem_keystore_now()));
	index_rescan(scan, &skey, 1, NULL, 0);
	while (removed < batch && index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		CHECK_FOR_INTERRUPTS();
		if (!row_is_mine(table) &&
			idem_keytable_delete(table, &table->found->tts_tid, false) == TM_Ok)
			removed++;
	}
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	index_close(index, NoLock);
	return removed;
}
