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
 * in backend memory but a hint about the place of a row, and a number for a
 * warning (unfinished.c), so rollback, savepoints and PREPARE TRANSACTION need
 * no code here.
 *
 * Who waits for whom: a claimer that meets an open row waits for the
 * transaction that made it (XactLockTableWait, so core finds deadlocks and
 * lock_timeout holds) and then looks again; likewise one that wants to take
 * over a row which another transaction is just changing or has locked.  Who
 * is about to put a key into the unique index waits a moment for others who
 * are (idem_keytable_hash).
 * Nobody waits for a finished key or a live lease: the answer is there.
 * Cleanup waits for nobody.
 *
 * Rows are looked up with a dirty snapshot (probe.c), which may miss a row that
 * is being updated right now.  A claim then tries to insert and is told better
 * by the unique index.
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

#include "keys/keys.h"

/* Was the last key that this backend wanted to claim a new one? */
static bool last_was_new = true;

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
wait_for_other(IdemTable *table, const IdemProbeResult *probe, const IdemWait *wait)
{
	if (wait->forever)
	{
		idem_probe_wait(table, probe->xwait);
		return true;
	}
	/* VACUUM shall not wait for the page as long as we do */
	ExecClearTuple(table->found);
	while (!idem_compat_xact_has_ended(probe->xwait))
	{
		if (!pause_until(wait->until))
			return false;
	}
	return true;
}

/* What a claim makes of a key that is absent, or past its ttl */
static void
begin_life(int64 last_token, Oid owner, TimestampTz now, IdemKeyInfo *info)
{
	memset(info, 0, sizeof(*info));
	info->owner = owner;
	info->created_at = now;
	info->token = last_token;
}

/* Let the claim have the key, from now on */
static void
grant_key(const IdemClaim *claim, TimestampTz now, IdemKeyInfo *info)
{
	const IdemLease *lease = claim->lease;

	info->status = IDEM_KEY_CLAIMED;
	info->lease_until = lease ? now + lease->length : 0;
	info->expires_at = (lease ? info->lease_until : now) + claim->ttl;
	if (lease != NULL)
	{
		info->token = idem_clock_next_token(info->token, now);
		info->attempt++;
		info->max_attempts = Max(info->max_attempts, lease->max_attempts);
	}
}

static void
fill_lease(TupleTableSlot *slot, const IdemLease *lease, TimestampTz now, const IdemKeyInfo *info)
{
	idem_row_set(slot, IDEM_KEYS_LEASED_AT, TimestampTzGetDatum(now));
	idem_row_set(slot, IDEM_KEYS_LEASE_UNTIL, TimestampTzGetDatum(info->lease_until));
	idem_row_set(slot, IDEM_KEYS_ATTEMPT, Int32GetDatum(info->attempt));
	if (info->max_attempts != 0)
		idem_row_set(slot, IDEM_KEYS_MAX_ATTEMPTS, Int32GetDatum(info->max_attempts));
	idem_row_set(slot, IDEM_KEYS_PARK, BoolGetDatum(lease->park));
	if (lease->worker != NULL)
		idem_row_set(slot, IDEM_KEYS_WORKER, PointerGetDatum(lease->worker));
	else
		idem_row_clear(slot, IDEM_KEYS_WORKER);
}

/*
 * Make the row of a claim, from nothing or from the row that it replaces.  A
 * plain claim only takes the deadline off what was a lease: the last token
 * stays, so that tokens go on growing, and the rest in case it is released
 * (see restore_lease).
 */
static void
fill_claim(TupleTableSlot *slot, const IdemClaim *claim, TimestampTz now, const IdemKeyInfo *info)
{
	idem_row_set(slot, IDEM_KEYS_CREATED_AT, TimestampTzGetDatum(info->created_at));
	idem_row_set(slot, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(info->expires_at));
	idem_row_set(slot, IDEM_KEYS_OWNER, ObjectIdGetDatum(info->owner));
	idem_row_set(slot, IDEM_KEYS_KEY, PointerGetDatum(claim->key.key));
	idem_row_set(slot, IDEM_KEYS_SCOPE, PointerGetDatum(claim->key.scope));
	if (claim->request != NULL)
		idem_row_set(slot, IDEM_KEYS_REQUEST, PointerGetDatum(claim->request));
	if (info->token == 0)
		return;
	idem_row_set(slot, IDEM_KEYS_TOKEN, Int64GetDatum(info->token));
	if (claim->lease != NULL)
		fill_lease(slot, claim->lease, now, info);
	else
		idem_row_clear(slot, IDEM_KEYS_LEASE_UNTIL);
}

/* A plain claim has moved the end of the lease and its expiry: keep both in the row */
static void
keep_lease(IdemTable *table, TupleTableSlot *slot)
{
	idem_row_set(slot, IDEM_KEYS_PRIOR_LEASE_UNTIL,
				 TimestampTzGetDatum(idem_row_timestamp(table, IDEM_KEYS_LEASE_UNTIL)));
	idem_row_set(slot, IDEM_KEYS_PRIOR_EXPIRES_AT,
				 TimestampTzGetDatum(idem_row_timestamp(table, IDEM_KEYS_EXPIRES_AT)));
}

/*
 * Make the row of the lease that a plain claim has taken over, as it was (L3,
 * L5): how long it ran and how long the key is kept after it follow from
 * leased_at, lease_until and expires_at together.
 */
static void
restore_lease(IdemTable *table)
{
	TupleTableSlot *slot = idem_keyrow_copy(table);

	idem_row_set(slot, IDEM_KEYS_LEASE_UNTIL,
				 TimestampTzGetDatum(idem_row_timestamp(table, IDEM_KEYS_PRIOR_LEASE_UNTIL)));
	idem_row_set(slot, IDEM_KEYS_EXPIRES_AT,
				 TimestampTzGetDatum(idem_row_timestamp(table, IDEM_KEYS_PRIOR_EXPIRES_AT)));
	idem_row_clear(slot, IDEM_KEYS_PRIOR_LEASE_UNTIL);
	idem_row_clear(slot, IDEM_KEYS_PRIOR_EXPIRES_AT);
}

/* Claim a key that is absent; false if it has just appeared */
static bool
insert_claim(IdemTable *table, const IdemClaim *claim, Oid owner, IdemKeyInfo *info)
{
	TimestampTz now = idem_clock_now();

	begin_life(0, owner, now, info);
	grant_key(claim, now, info);
	fill_claim(idem_write_new_row(table, info->token != 0), claim, now, info);
	return idem_write_insert(table);
}

static int
attempts_allowed(const IdemClaim *claim)
{
	return claim->lease ? claim->lease->max_attempts : 0;
}

/*
 * Claim a key whose row is past its ttl or whose lease has run out, by
 * replacing that info.  The lock comes first: the time of the claim starts when
 * the wait is over, and whether the key is to be had is judged once more.
 */
static TM_Result
take_over(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info)
{
	TupleTableSlot *slot;
	TM_Result result;
	IdemKeyStatus state;
	TimestampTz now;
	TimestampTz expires_at;

	idem_keyrow_check_serializable(table);
	result = idem_table_lock_row(table, table->found->tts_tid, LockTupleNoKeyExclusive,
								 claim->wait.forever ? LockWaitBlock : LockWaitSkip);
	if (result != TM_Ok)
		return result;
	state = idem_keyrow_judge(table, attempts_allowed(claim));
	if (state != IDEM_KEY_GONE && state != IDEM_KEY_EXPIRED)
		return TM_Updated;

	now = idem_clock_now();
	idem_keyrow_read(table, state, info);
	expires_at = info->expires_at;
	if (state == IDEM_KEY_GONE)
		begin_life(info->token, idem_keyrow_current_owner(), now, info);
	grant_key(claim, now, info);
	slot = state == IDEM_KEY_GONE ? idem_write_new_row(table, info->token != 0) :
									idem_keyrow_copy(table);
	if (state == IDEM_KEY_EXPIRED && claim->lease == NULL)
	{
		keep_lease(table, slot);
		/* the key is kept for at least as long as the caller of the lease has asked for */
		info->expires_at = Max(info->expires_at, expires_at);
	}
	fill_claim(slot, claim, now, info);
	idem_write_update_hashed(table, idem_keytable_hash(&claim->key));
	if (state == IDEM_KEY_EXPIRED)
		idem_counters_add(IDEM_DATABASE_COUNTER_TAKEOVERS);
	return TM_Ok;
}

static bool
has_worker(IdemTable *table, text *worker)
{
	return worker != NULL && idem_row_varlena_equals(table, IDEM_KEYS_WORKER, worker);
}

/* What to tell a claimer about a row that it cannot have */
static IdemKeyStatus
choose_answer(IdemTable *table, const IdemClaim *claim, IdemKeyStatus state)
{
	if (state == IDEM_KEY_LIVE)
		return claim->lease && has_worker(table, claim->lease->worker) ?
			IDEM_KEY_RESUMED :
			IDEM_KEY_BUSY;
	if (state == IDEM_KEY_HELD && claim->lease)
		return IDEM_KEY_BUSY;
	return state;
}

/*
 * Answer from the row found, if this caller may have it for this request.
 * False: the key is to be had.
 */
static bool
answer_from_row(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info)
{
	IdemKeyStatus state = idem_keyrow_judge(table, attempts_allowed(claim));

	if (state == IDEM_KEY_GONE)
		return false;
	idem_keyrow_check_owner(idem_row_oid(table, IDEM_KEYS_OWNER));
	idem_keyrow_check_request(table, claim->request);
	if (state == IDEM_KEY_EXPIRED)
		return false;
	idem_keyrow_check_serializable(table);
	idem_keyrow_read(table, choose_answer(table, claim, state), info);
	return true;
}

/*
 * Look at the key, and claim it if it is absent.  To insert it takes a lock
 * under which it is looked at; so if it is thought to be new, lock first.
 */
static bool
probe_or_insert(IdemTable *table, const IdemClaim *claim, IdemProbeResult *probe, IdemKeyInfo *info)
{
	IdemLookup lookup = idem_keytable_lookup(table, &claim->key);
	int64 hash;
	bool inserted = false;
	Oid owner;

	if (!last_was_new)
	{
		idem_probe(table, &lookup, probe);
		if (probe->found != IDEM_FOUND_NONE)
			return false;
	}
	owner = idem_keyrow_current_owner();
	idem_table_open_indexes(table);

	hash = idem_keytable_hash(&claim->key);
	idem_table_lock_hash(table, hash);
	idem_probe(table, &lookup, probe);
	last_was_new = probe->found == IDEM_FOUND_NONE;
	if (last_was_new)
	{
		idem_keyrow_check_absent(table, &lookup);
		inserted = insert_claim(table, claim, owner, info);
	}
	idem_table_unlock_hash(table, hash);
	return inserted;
}

/* Each round looks at the key and either answers or waits for what is in the way */
static void
claim_key(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info)
{
	for (;;)
	{
		IdemProbeResult probe;
		TM_Result result = TM_Updated;
		bool ended = true;

		CHECK_FOR_INTERRUPTS();
		if (probe_or_insert(table, claim, &probe, info))
			result = TM_Ok;
		else if (probe.found == IDEM_FOUND_ROW && answer_from_row(table, claim, info))
			return;
		else if (TransactionIdIsValid(probe.xwait))
			ended = wait_for_other(table, &probe, &claim->wait);
		else if (probe.found == IDEM_FOUND_ROW)
			result = take_over(table, claim, info);

		if (result == TM_Ok)
		{
			idem_keyhint_set(table->written->tts_tid);
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
			memset(info, 0, sizeof(*info));
			info->status = IDEM_KEY_BUSY;
			return;
		}
	}
}

StaticAssertDecl((int) IDEM_DATABASE_COUNTER_CLAIMS == (int) IDEM_KEY_CLAIMED &&
					 (int) IDEM_DATABASE_COUNTER_BUSY == (int) IDEM_KEY_BUSY &&
					 (int) IDEM_DATABASE_COUNTER_REPLAYS == (int) IDEM_KEY_FINISHED &&
					 (int) IDEM_DATABASE_COUNTER_EXHAUSTED == (int) IDEM_KEY_EXHAUSTED,
				 "the counter of an answer has the number of the answer");

/* Count the answer to a claim, and log it if it tells a duplicate (S1, S4) */
static void
count_claim(const IdemClaim *claim, IdemKeyStatus status)
{
	idem_counters_add((IdemDatabaseCounter) status);
	if (status == IDEM_KEY_FINISHED || status == IDEM_KEY_BUSY || status == IDEM_KEY_PARKED ||
		status == IDEM_KEY_EXHAUSTED)
		idem_counters_log_duplicate(claim->lease ? "lease" : "claim", idem_keyrow_status_name(status),
									claim->key.scope, claim->key.key);
}

/* Claim the key for this transaction, or lease it, or say why not */
void
idem_keystore_claim(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info)
{
	claim_key(table, claim, info);
	if (info->status == IDEM_KEY_CLAIMED && claim->lease == NULL)
		idem_unfinished_add(1);
	count_claim(claim, info->status);
}

/* Says what was found instead of a key held by this transaction */
pg_noreturn static void
refuse_not_held(IdemTable *table, const IdemProbeResult *probe)
{
	bool exists = probe->found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;

	if (exists && idem_keyrow_is_leased(table))
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was leased " INT64_FORMAT " s ago, as attempt %d.",
						  idem_row_age(table, IDEM_KEYS_LEASED_AT),
						  idem_row_int32(table, IDEM_KEYS_ATTEMPT)),
				errhint("Pass the token that idem_lease() has returned."));
	if (exists)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was first claimed " INT64_FORMAT " s ago, and the transaction that claimed it has committed.",
						  idem_row_age(table, IDEM_KEYS_CREATED_AT)),
				errhint("Begin a transaction before idem_claim(): in autocommit mode the claim commits at once. An operator can remove the key with idem_forget()."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_NOT_HELD),
			errmsg("idempotency key is not held by this transaction"),
			probe->found == IDEM_FOUND_OPEN ? errdetail("Another transaction has claimed the key and is still open.") :
											  errdetail("There is no such key in this scope."),
			errhint("Call idem_claim() first, in the same transaction and with the same scope, and go on only if it answered \"claimed\"."));
}

static bool
is_held(IdemTable *table)
{
	return !idem_keyrow_is_leased(table) && idem_row_is_mine(table);
}

/* Find a key that this transaction holds */
static void
find_held_key(IdemTable *table, const IdemKey *key)
{
	IdemLookup lookup = idem_keytable_lookup(table, key);
	IdemProbeResult probe;

	if (idem_keyhint_find(table, key, &probe) && is_held(table))
	{
		idem_keyrow_check_owner(idem_row_oid(table, IDEM_KEYS_OWNER));
		return;
	}
	idem_probe(table, &lookup, &probe);
	if (probe.found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_KEY_GONE)
		idem_keyrow_check_owner(idem_row_oid(table, IDEM_KEYS_OWNER));
	if (probe.found != IDEM_FOUND_ROW || !is_held(table))
		refuse_not_held(table, &probe);
}

/*
 * Store the result; false if the key is finished already, with an equal one.
 * Touches no indexed column, so it is a HOT update where the page has room.
 */
bool
idem_keystore_finish(IdemTable *table, const IdemKey *key, Jsonb *result)
{
	find_held_key(table, key);
	if (idem_keyrow_check_finished(table, result))
		return false;
	(void) idem_keyrow_copy_finished(table, result, idem_clock_now());
	if (idem_write_update(table) != TM_Ok)
		elog(ERROR, "a key held by this transaction was changed by another one");
	idem_unfinished_add(-1);
	return true;
}

/*
 * Give up a claim, as if the key had never been claimed.  If it took over a
 * lease, that is there again as it was.
 */
void
idem_keystore_release(IdemTable *table, const IdemKey *key)
{
	find_held_key(table, key);
	idem_keyrow_reject_finished(table, "Roll back to undo the work together with its key.");
	if (!idem_row_isnull(table, IDEM_KEYS_PRIOR_LEASE_UNTIL))
	{
		restore_lease(table);
		idem_write_update_hashed(table, idem_keytable_hash(key));
	}
	else if (idem_write_delete(table, true) != TM_Ok)
		elog(ERROR, "a key held by this transaction was changed by another one");
	idem_unfinished_add(-1);
}

/*
 * Remove a key, whoever owns it; EXECUTE on idem_forget() is the privilege.
 * Waits for a transaction that has claimed or is changing it.
 */
bool
idem_keystore_forget(IdemTable *table, const IdemKey *key)
{
	IdemLookup lookup = idem_keytable_lookup(table, key);

	for (;;)
	{
		IdemProbeResult probe;
		IdemKeyStatus state = IDEM_KEY_GONE;

		idem_probe_existing(table, &lookup, &probe);
		if (probe.found == IDEM_FOUND_ROW)
			state = idem_keyrow_judge(table, 0);
		if (TransactionIdIsValid(probe.xwait))
			idem_probe_wait(table, probe.xwait);
		else if (state == IDEM_KEY_GONE)
		{
			idem_keyrow_check_absent(table, &lookup);
			return false;
		}
		else
		{
			idem_keyrow_check_serializable(table);
			if (idem_write_delete(table, true) != TM_Ok)
				continue;
			if (state == IDEM_KEY_HELD)
				idem_unfinished_add(-1);
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
idem_keystore_get(IdemTable *table, const IdemKey *key, IdemKeyInfo *info)
{
	IdemLookup lookup = idem_keytable_lookup(table, key);
	IndexScanDesc scan = idem_probe_begin(table, &lookup, GetActiveSnapshot());
	bool found = false;
	bool mine = false;

	while (!mine && index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		IdemKeyStatus state = idem_keyrow_judge(table, 0);

		mine = idem_row_is_mine(table);
		if (state == IDEM_KEY_GONE)
			continue;
		found = true;
		idem_keyrow_read(table, state, info);
	}
	index_endscan(scan);
	if (found)
		idem_keyrow_check_owner(info->owner);
	return found;
}
