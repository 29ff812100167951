/*
 * keystore.c
 *		The protocol of idempotency keys: claim and lease, finish, release,
 *		forget, get, cleanup.  What is done with the token of a lease is in
 *		leasestore.c.
 *
 * A claim is a row, inserted at once, in the caller's transaction.  What it
 * means is read off the row (keyrow.c) and nothing else: a plain claim whose
 * xmin belongs to the current transaction (or a subtransaction of it) is held
 * by it; a row of another open transaction is open; a committed plain claim is
 * finished until expires_at and then counts as absent; a lease counts from its
 * commit on, until it is finished, given up or taken over.  There is no state
 * in backend memory but a hint about the place of a row, so rollback,
 * savepoints and PREPARE TRANSACTION need no code here.
 *
 * Who waits for whom: a claimer that meets an open row waits for the
 * transaction that made it (XactLockTableWait, so core finds deadlocks and
 * lock_timeout holds) and then looks again; likewise one that wants to take
 * over a row which another transaction is just changing or has locked.  Who
 * is about to put a key into the unique index waits a moment for others who
 * are (idem_keytable_lock_key).
 * Nobody waits for a finished key or a live lease: the answer is there.
 * Cleanup waits for nobody.
 *
 * Rows are looked up with a dirty snapshot, which also shows what is not
 * committed.  It may miss a row that is being updated right now.  A claim then
 * tries to insert and is told better by the unique index; who needs the row
 * that is there uses idem_keystore_probe_existing().
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/latch.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "idem.h"

/* Where the last claim of this backend went; see idem_keystore_find_last() */
static ItemPointerData last_claim;

/* Was the last key that this backend wanted to claim a new one? */
static bool last_was_new = true;

static void
classify_row(const SnapshotData *dirty, IdemProbe *probe)
{
	if (TransactionIdIsValid(dirty->xmin))
	{
		probe->found = IDEM_FOUND_OPEN;
		probe->xwait = dirty->xmin;
	}
	else
	{
		probe->found = IDEM_FOUND_ROW;
		probe->xwait = dirty->xmax;
	}
}

/*
 * Look at a key.  An open row is not the last word: beside it may be the
 * committed one that its transaction has removed.
 */
static void
probe_key(IdemKeyTable *table, const IdemKey *key, IdemProbe *probe)
{
	SnapshotData dirty;
	IndexScanDesc scan;

	InitDirtySnapshot(dirty);
	memset(probe, 0, sizeof(*probe));
	scan = idem_keytable_scan_key(table, key, &dirty);
	while (probe->found != IDEM_FOUND_ROW &&
		   index_getnext_slot(scan, ForwardScanDirection, table->found))
		classify_row(&dirty, probe);
	index_endscan(scan);
}

/* Does a snapshot taken now show a row of this key? */
static bool
has_committed_row(IdemKeyTable *table, const IdemKey *key)
{
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan = idem_keytable_scan_key(table, key, snapshot);
	bool found = index_getnext_slot(scan, ForwardScanDirection, table->found) &&
		!idem_keyrow_is_replaced_by_me(table);

	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return found;
}

/*
 * Look at a key that is thought to exist: what was missed because it was just
 * being updated is looked for again.
 */
void
idem_keystore_probe_existing(IdemKeyTable *table, const IdemKey *key, IdemProbe *probe)
{
	do
	{
		CHECK_FOR_INTERRUPTS();
		probe_key(table, key, probe);
	} while (probe->found != IDEM_FOUND_ROW && has_committed_row(table, key));
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
wait_for_other(IdemKeyTable *table, const IdemProbe *probe, const IdemWait *wait)
{
	/* VACUUM shall not wait for the page as long as we do */
	ExecClearTuple(table->found);

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

/* The same for who waits as long as lock_timeout allows */
void
idem_keystore_wait(IdemKeyTable *table, const IdemProbe *probe)
{
	static const IdemWait forever = {.forever = true};

	(void) wait_for_other(table, probe, &forever);
}

/* What a claim makes of a key that is absent, or past its ttl */
static void
begin_life(int64 last_token, Oid owner, TimestampTz now, IdemRow *row)
{
	memset(row, 0, sizeof(*row));
	row->owner = owner;
	row->created_at = now;
	row->token = last_token;
}

/* Let the claim have the key, from now on */
static void
grant(const IdemClaim *claim, TimestampTz now, IdemRow *row)
{
	const IdemLease *lease = claim->lease;

	row->status = IDEM_CLAIMED;
	row->lease_until = lease ? now + lease->length : 0;
	row->expires_at = (lease ? row->lease_until : now) + claim->ttl;
	if (lease != NULL)
	{
		row->token = idem_keyrow_next_token(row->token, now);
		row->attempt++;
		row->max_attempts = Max(row->max_attempts, lease->max_attempts);
	}
}

static void
fill_lease(TupleTableSlot *slot, const IdemLease *lease, TimestampTz now, const IdemRow *row)
{
	idem_keyrow_set(slot, IDEM_KEYS_LEASED_AT, TimestampTzGetDatum(now));
	idem_keyrow_set(slot, IDEM_KEYS_LEASE_UNTIL, TimestampTzGetDatum(row->lease_until));
	idem_keyrow_set(slot, IDEM_KEYS_ATTEMPT, Int32GetDatum(row->attempt));
	if (row->max_attempts != 0)
		idem_keyrow_set(slot, IDEM_KEYS_MAX_ATTEMPTS, Int32GetDatum(row->max_attempts));
	idem_keyrow_set(slot, IDEM_KEYS_PARK, BoolGetDatum(lease->park));
	if (lease->worker != NULL)
		idem_keyrow_set(slot, IDEM_KEYS_WORKER, PointerGetDatum(lease->worker));
	else
		idem_keyrow_clear(slot, IDEM_KEYS_WORKER);
}

/*
 * Make the row of a claim, from nothing or from the row that it replaces.  A
 * plain claim only takes the deadline off what was a lease: the last token
 * stays, so that tokens go on growing, and the rest in case it is released.
 */
static void
fill_claim(TupleTableSlot *slot, const IdemClaim *claim, TimestampTz now, const IdemRow *row)
{
	idem_keyrow_set(slot, IDEM_KEYS_CREATED_AT, TimestampTzGetDatum(row->created_at));
	idem_keyrow_set(slot, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(row->expires_at));
	idem_keyrow_set(slot, IDEM_KEYS_OWNER, ObjectIdGetDatum(row->owner));
	idem_keyrow_set(slot, IDEM_KEYS_KEY, PointerGetDatum(claim->key.key));
	idem_keyrow_set(slot, IDEM_KEYS_SCOPE, PointerGetDatum(claim->key.scope));
	if (claim->request != NULL)
		idem_keyrow_set(slot, IDEM_KEYS_REQUEST, PointerGetDatum(claim->request));
	if (row->token == 0)
		return;
	idem_keyrow_set(slot, IDEM_KEYS_TOKEN, Int64GetDatum(row->token));
	if (claim->lease != NULL)
		fill_lease(slot, claim->lease, now, row);
	else
		idem_keyrow_clear(slot, IDEM_KEYS_LEASE_UNTIL);
}

/* Claim a key that is absent; false if it has just appeared */
static bool
insert_claim(IdemKeyTable *table, const IdemClaim *claim, Oid owner, IdemRow *row)
{
	TimestampTz now = idem_keyrow_now();

	begin_life(0, owner, now, row);
	grant(claim, now, row);
	fill_claim(idem_keytable_new_row(table, row->token != 0), claim, now, row);
	return idem_keytable_insert(table);
}

static int
attempts_allowed(const IdemClaim *claim)
{
	return claim->lease ? claim->lease->max_attempts : 0;
}

/*
 * Claim a key whose row is past its ttl or whose lease has run out, by
 * replacing that row.  The lock comes first: the time of the claim starts when
 * the wait is over, and whether the key is to be had is judged once more.
 */
static TM_Result
take_over(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row)
{
	TupleTableSlot *slot;
	TM_Result result;
	IdemStatus state;
	TimestampTz now;
	TimestampTz expires_at;

	idem_keyrow_check_serializable(table);
	result = idem_keytable_lock(table, claim->wait.forever);
	if (result != TM_Ok)
		return result;
	state = idem_keyrow_judge(table, attempts_allowed(claim));
	if (state != IDEM_GONE && state != IDEM_EXPIRED)
		return TM_Updated;

	now = idem_keyrow_now();
	idem_keyrow_read(table, state, row);
	expires_at = row->expires_at;
	if (state == IDEM_GONE)
		begin_life(row->token, idem_keyrow_current_owner(), now, row);
	grant(claim, now, row);
	/* a plain claim may be released, and then the lease has not lost of its time */
	if (state == IDEM_EXPIRED && claim->lease == NULL)
		row->expires_at = Max(row->expires_at, expires_at);
	slot = state == IDEM_GONE ? idem_keytable_new_row(table, row->token != 0) : idem_keyrow_copy(table);
	fill_claim(slot, claim, now, row);
	idem_keytable_update_indexed(table, &claim->key);
	return TM_Ok;
}

/* What to tell a claimer about a row that it cannot have */
static IdemStatus
answer_status(IdemKeyTable *table, const IdemClaim *claim, IdemStatus state)
{
	if (state == IDEM_LIVE)
		return claim->lease && idem_keyrow_has_worker(table, claim->lease->worker) ?
			IDEM_RESUMED :
			IDEM_BUSY;
	if (state == IDEM_HELD && claim->lease)
		return IDEM_BUSY;
	return state;
}

/*
 * Answer from the row found, if this caller may have it for this request.
 * False: the key is to be had.
 */
static bool
answer(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row)
{
	IdemStatus state = idem_keyrow_judge(table, attempts_allowed(claim));

	if (state == IDEM_GONE)
		return false;
	idem_keyrow_check_owner(idem_keyrow_owner(table));
	idem_keyrow_check_request(table, claim->request);
	if (state == IDEM_EXPIRED)
		return false;
	idem_keyrow_check_serializable(table);
	idem_keyrow_read(table, answer_status(table, claim, state), row);
	return true;
}

/*
 * Look at the key, and claim it if it is absent.  To insert it takes a lock
 * under which it is looked at; so if it is thought to be new, lock first.
 */
static bool
probe_or_insert(IdemKeyTable *table, const IdemClaim *claim, IdemProbe *probe, IdemRow *row)
{
	bool inserted;
	Oid owner;

	if (!last_was_new)
	{
		probe_key(table, &claim->key, probe);
		if (probe->found != IDEM_FOUND_NONE)
			return false;
	}
	owner = idem_keyrow_current_owner();
	idem_keytable_open_indexes(table);

	idem_keytable_lock_key(table, &claim->key);
	probe_key(table, &claim->key, probe);
	last_was_new = probe->found == IDEM_FOUND_NONE;
	inserted = last_was_new && insert_claim(table, claim, owner, row);
	idem_keytable_unlock_key(table, &claim->key);
	return inserted;
}

/*
 * Claim the key for this transaction, or lease it, or say why not.  Each round
 * looks at the key and either answers or waits for what is in the way.
 */
void
idem_keystore_claim(IdemKeyTable *table, const IdemClaim *claim, IdemRow *row)
{
	for (;;)
	{
		IdemProbe probe;
		TM_Result result = TM_Updated;
		bool ended = true;

		CHECK_FOR_INTERRUPTS();
		if (probe_or_insert(table, claim, &probe, row))
			result = TM_Ok;
		else if (probe.found == IDEM_FOUND_ROW && answer(table, claim, row))
			return;
		else if (TransactionIdIsValid(probe.xwait))
			ended = wait_for_other(table, &probe, &claim->wait);
		else if (probe.found == IDEM_FOUND_ROW)
			result = take_over(table, claim, row);

		if (result == TM_Ok)
		{
			last_claim = table->written->tts_tid;
			return;
		}
		/* somebody has locked the row without changing it */
		if (result == TM_WouldBlock)
		{
			ExecClearTuple(table->found);
			ended = pause_until(claim->wait.until);
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
not_held(IdemKeyTable *table, const IdemProbe *probe)
{
	bool exists = probe->found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_GONE;

	if (exists && idem_keyrow_is_leased(table))
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was leased " INT64_FORMAT " s ago, as attempt %d.",
						  idem_keyrow_age(table, IDEM_KEYS_LEASED_AT),
						  idem_keyrow_int32(table, IDEM_KEYS_ATTEMPT)),
				errhint("Pass the token that idem_lease() has returned."));
	if (exists)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was claimed " INT64_FORMAT " s ago by a transaction that has committed.",
						  idem_keyrow_age(table, IDEM_KEYS_CREATED_AT)),
				errhint("Begin a transaction before idem_claim(): in autocommit mode the claim commits at once. An operator can remove the key with idem_forget()."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_NOT_HELD),
			errmsg("idempotency key is not held by this transaction"),
			probe->found == IDEM_FOUND_OPEN ? errdetail("Another transaction has claimed the key and is still open.") :
											  errdetail("There is no such key in this scope."),
			errhint("Call idem_claim() first, in the same transaction, and go on only if it answered \"claimed\"."));
}

/*
 * Is the row of this key where the last claim of this backend went?  That
 * saves the way through the index.  Only a guess about the place: whether
 * the row is the one, and what it means, is read off the row.
 */
bool
idem_keystore_find_last(IdemKeyTable *table, const IdemKey *key, IdemProbe *probe)
{
	SnapshotData dirty;

	InitDirtySnapshot(dirty);
	memset(probe, 0, sizeof(*probe));
	if (ItemPointerIsValid(&last_claim) &&
		ItemPointerGetBlockNumber(&last_claim) < RelationGetNumberOfBlocks(table->heap) &&
		table_tuple_fetch_row_version(table->heap, &last_claim, &dirty, table->found) &&
		idem_keyrow_is(table, key))
		classify_row(&dirty, probe);
	if (probe->found != IDEM_FOUND_ROW)
		ItemPointerSetInvalid(&last_claim); /* do not guess again for each key of a batch */
	return probe->found == IDEM_FOUND_ROW;
}

static bool
is_held(IdemKeyTable *table)
{
	return !idem_keyrow_is_leased(table) && idem_keyrow_is_mine(table);
}

/* Find a key that this transaction holds */
static void
find_held_key(IdemKeyTable *table, const IdemKey *key)
{
	IdemProbe probe;

	if (idem_keystore_find_last(table, key, &probe) && is_held(table))
	{
		idem_keyrow_check_owner(idem_keyrow_owner(table));
		return;
	}
	probe_key(table, key, &probe);
	if (probe.found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_GONE)
		idem_keyrow_check_owner(idem_keyrow_owner(table));
	if (probe.found != IDEM_FOUND_ROW || !is_held(table))
		not_held(table, &probe);
}

/*
 * Store the result.  Touches no indexed column, so it is a HOT update where
 * the page has room.
 */
void
idem_keystore_finish(IdemKeyTable *table, const IdemKey *key, Jsonb *result)
{
	find_held_key(table, key);
	if (idem_keyrow_check_finished(table, result))
		return;
	(void) idem_keyrow_copy_finished(table, result, idem_keyrow_now());
	if (idem_keytable_update(table) != TM_Ok)
		elog(ERROR, "a key held by this transaction was changed by another one");
}

/*
 * Give up a claim, as if the key had never been claimed.  If it was taken over
 * from a lease, the key is left as that was: run out.
 */
void
idem_keystore_release(IdemKeyTable *table, const IdemKey *key)
{
	TM_Result result;

	find_held_key(table, key);
	idem_keyrow_reject_finished(table, "Roll back to undo the work together with its key.");
	if (idem_keyrow_isnull(table, IDEM_KEYS_LEASED_AT))
		result = idem_keytable_delete(table, true);
	else
	{
		idem_keyrow_set(idem_keyrow_copy(table), IDEM_KEYS_LEASE_UNTIL, TimestampTzGetDatum(idem_keyrow_now()));
		result = idem_keytable_update(table);
	}
	if (result != TM_Ok)
		elog(ERROR, "a key held by this transaction was changed by another one");
}

/*
 * Remove a key, whoever owns it; EXECUTE on idem_forget() is the privilege.
 * Waits for a transaction that has claimed or is changing it.
 */
bool
idem_keystore_forget(IdemKeyTable *table, const IdemKey *key)
{
	for (;;)
	{
		IdemProbe probe;

		idem_keystore_probe_existing(table, key, &probe);
		if (TransactionIdIsValid(probe.xwait))
			idem_keystore_wait(table, &probe);
		else if (probe.found == IDEM_FOUND_NONE || idem_keyrow_judge(table, 0) == IDEM_GONE)
			return false;
		else
		{
			idem_keyrow_check_serializable(table);
			if (idem_keytable_delete(table, true) == TM_Ok)
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
		IdemStatus state = idem_keyrow_judge(table, 0);

		mine = idem_keyrow_is_mine(table);
		if (state == IDEM_GONE)
			continue;
		found = true;
		idem_keyrow_read(table, state, row);
	}
	index_endscan(scan);
	if (found)
		idem_keyrow_check_owner(row->owner);
	return found;
}

/*
 * Remove keys past their ttl, oldest first, at most batch of them.  A row that
 * somebody else has locked, replaced or removed is left alone, and so is one
 * that this transaction holds or that is parked.
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
				TimestampTzGetDatum(idem_keyrow_now()));
	index_rescan(scan, &skey, 1, NULL, 0);
	while (removed < batch && index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		CHECK_FOR_INTERRUPTS();
		if (idem_keyrow_judge(table, 0) == IDEM_GONE && idem_keytable_delete(table, false) == TM_Ok)
			removed++;
	}
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	index_close(index, NoLock);
	return removed;
}
