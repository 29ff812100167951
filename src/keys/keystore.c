/*
 * keystore.c
 *		The protocol of idempotency keys: claim and lease, finish, release, forget,
 *		get.  leasestore.c has the operations with the token of a lease.
 *
 * A claim is a row that is inserted at once, in the caller's transaction.  The
 * state of a key is read from its row (keyrow.c):
 *
 * - A plain claim whose xmin belongs to the current transaction, or to one of its
 *   subtransactions, is held by this transaction.
 * - A row that another open transaction has inserted is open.
 * - A committed plain claim is finished until expires_at.  Then it counts as absent.
 * - A lease is valid from its commit on, until it is finished, released or taken
 *   over.
 *
 * Backend memory contains no state of a key.  It contains two hints, the place of
 * the row of the last claim (keyhint.c) and last_was_new, and a number for a
 * warning (unfinished.c).  So rollback, savepoints and PREPARE need no code here (K1).
 *
 * Which transaction waits for which:
 *
 * - A claim that meets an open row waits for the transaction that inserted it, and
 *   then looks the key up again.  It waits with XactLockTableWait(), so the server
 *   detects deadlocks and lock_timeout applies.
 * - A claim that takes over a row waits for a transaction that is changing the row
 *   or has locked it.
 * - A backend that adds an entry to the unique index waits, for a moment, for other
 *   backends that add entries of the same hash (idem_keytable_hash).
 * - A claim does not wait for a finished key or a live lease: the answer is known.
 * - Cleanup (sweep.c) waits for no transaction.
 *
 * Rows are looked up with a dirty snapshot (probe.c), which may miss a row that
 * another transaction is updating at this moment.  The claim then locks the hash and
 * probes again.  Only an update that does not hold this lock, a finish that is not
 * HOT, can be missed once more.  The probe has then met the index entry of the
 * old row version, so before it inserts a key whose hash has entries, the claim also
 * looks at a new MVCC snapshot.  The unique index alone would not be enough: for a key
 * whose nth is not 0, the new row could get another nth.
 */
#include "postgres.h"

#include "access/heaptoast.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

/* A hint for probe_or_insert(): was the key of this backend's last claim absent? */
static bool last_was_new = true;

/* Sleep for up to 5 ms of a bounded wait; false if its time is over (K5) */
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
 * Wait for the open transaction that the probe met (K4).  False: that transaction
 * has not ended within the time that the caller wants to wait (K5).
 *
 * The lock manager can end a wait only with an error, which would abort the
 * caller's transaction.  So a bounded wait polls.
 */
static bool
wait_for_other(IdemTable *table, const IdemProbeResult *probe, const IdemWait *wait)
{
	if (wait->forever)
	{
		idem_probe_wait(table, probe->xwait);
		return true;
	}
	/* a pin on the page would make VACUUM wait as long as we do */
	ExecClearTuple(table->found);
	while (!idem_compat_xact_has_ended(probe->xwait))
	{
		if (!pause_until(wait->until))
			return false;
	}
	return true;
}

/* Begin a new life of a key that is absent, or past its ttl */
static void
begin_life(int64 last_token, Oid owner, TimestampTz now, IdemKeyInfo *info)
{
	memset(info, 0, sizeof(*info));
	info->owner = owner;
	info->created_at = now;
	info->token = last_token;
}

/* Grant the key to the claim; a lease gets the next token and one more attempt (L1, L2) */
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

/* Set the columns of a lease */
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
 * Set the columns of a claim, in an empty row or in a copy of the row that it
 * replaces.  If a plain claim takes over a lease, it clears only the deadline.  The
 * last token stays, so that the next token is higher.  The other columns of the
 * lease stay in case the claim is released (see restore_lease).
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

/* Start a row for a new life of a key, which has no request yet */
static TupleTableSlot *
start_row(IdemTable *table)
{
	TupleTableSlot *slot = idem_write_new_row(table);
	bytea *no_request = palloc(VARHDRSZ);

	SET_VARSIZE(no_request, VARHDRSZ);
	idem_row_set(slot, IDEM_KEYS_REQUEST, PointerGetDatum(no_request));
	return slot;
}

/* Set the primary key */
static void
fill_pkey(TupleTableSlot *slot, int64 key_hash, int nth)
{
	idem_row_set(slot, IDEM_KEYS_KEY_HASH, Int64GetDatum(key_hash));
	idem_row_set(slot, IDEM_KEYS_NTH, Int16GetDatum(nth));
}

/* Keep the two times of a lease that a plain claim overwrites, for restore_lease() (L8) */
static void
keep_lease_times(IdemTable *table, TupleTableSlot *slot)
{
	idem_row_set(slot, IDEM_KEYS_PRIOR_LEASE_UNTIL,
				 TimestampTzGetDatum(idem_row_timestamp(table->found, IDEM_KEYS_LEASE_UNTIL)));
	idem_row_set(slot, IDEM_KEYS_PRIOR_EXPIRES_AT,
				 TimestampTzGetDatum(idem_row_timestamp(table->found, IDEM_KEYS_EXPIRES_AT)));
}

/*
 * Start a row with the lease that a plain claim has taken over, as it was before
 * (L8).  Its last length (L5) and its ttl follow from leased_at, lease_until and
 * expires_at: the first is unchanged in the row, the others are restored.  Its token
 * is valid again (L3).
 */
static TupleTableSlot *
restore_lease(IdemTable *table)
{
	TupleTableSlot *slot = idem_write_copy_row(table, table->found);

	idem_row_set(slot, IDEM_KEYS_LEASE_UNTIL,
				 TimestampTzGetDatum(idem_row_timestamp(table->found, IDEM_KEYS_PRIOR_LEASE_UNTIL)));
	idem_row_set(slot, IDEM_KEYS_EXPIRES_AT,
				 TimestampTzGetDatum(idem_row_timestamp(table->found, IDEM_KEYS_PRIOR_EXPIRES_AT)));
	idem_row_clear(slot, IDEM_KEYS_PRIOR_LEASE_UNTIL);
	idem_row_clear(slot, IDEM_KEYS_PRIOR_EXPIRES_AT);
	return slot;
}

StaticAssertDecl(IDEM_MAX_KEY_LEN + IDEM_MAX_SCOPE_LEN + IDEM_MAX_WORKER_LEN + IDEM_HANDLER_LEN +
						 IDEM_DIGEST_LEN + 256 <
					 TOAST_TUPLE_THRESHOLD,
				 "the row of a new key is not toasted, so its insert needs no lock on the TOAST table");

/*
 * Claim a key that is absent, by a row of the caller's transaction (K1).  False if
 * the unique index reports that the key exists.
 */
static bool
insert_claim(IdemTable *table, const IdemClaim *claim, const IdemLookup *lookup, Oid owner,
			 IdemKeyInfo *info)
{
	TimestampTz now = idem_clock_now();
	TupleTableSlot *slot;

	begin_life(0, owner, now, info);
	grant_key(claim, now, info);
	slot = start_row(table);
	fill_pkey(slot, idem_keytable_hash(lookup), idem_keytable_free_nth(lookup));
	fill_claim(slot, claim, now, info);
	if (!idem_write_insert(table, slot))
		return false;
	idem_keyhint_set(slot->tts_tid);
	return true;
}

static int
get_max_attempts(const IdemClaim *claim)
{
	return claim->lease ? claim->lease->max_attempts : 0;
}

/*
 * Claim a key that is past its ttl (K9) or whose lease has expired (L1, L8), by
 * updating its row.  The row is locked first.  So the ttl and the lease begin after
 * the wait, and the state is judged again: another claim may have been first (K3).
 * A transaction that has fenced the lease holds a lock that conflicts with this one,
 * so the takeover waits for the end of that transaction (L4).  TM_WouldBlock: another
 * transaction has locked the row, and the caller wants no unbounded wait (K5).  Other
 * results than TM_Ok: look the key up again.
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
								 claim->wait.forever ? LockWaitBlock : LockWaitSkip, table->found);
	if (result != TM_Ok)
		return result;
	state = idem_keyrow_judge(table, get_max_attempts(claim));
	if (state != IDEM_KEY_GONE && state != IDEM_KEY_EXPIRED)
		return TM_Updated;

	now = idem_clock_now();
	idem_keyrow_read(table, state, info);
	expires_at = info->expires_at;
	if (state == IDEM_KEY_GONE)
		begin_life(info->token, idem_keyrow_current_owner(), now, info);
	grant_key(claim, now, info);
	slot = state == IDEM_KEY_GONE ? start_row(table) : idem_write_copy_row(table, table->found);
	if (state == IDEM_KEY_EXPIRED && claim->lease == NULL)
	{
		keep_lease_times(table, slot);
		/* keep the key for at least as long as the holder of the lease has asked for */
		info->expires_at = Max(info->expires_at, expires_at);
	}
	fill_pkey(slot, idem_row_int64(table->found, IDEM_KEYS_KEY_HASH),
			  idem_row_int16(table->found, IDEM_KEYS_NTH));
	fill_claim(slot, claim, now, info);
	idem_keytable_update(table, table->found, slot);
	idem_keyhint_set(slot->tts_tid);
	if (state == IDEM_KEY_EXPIRED)
		idem_counters_add(IDEM_DATABASE_COUNTER_TAKEOVERS);
	return TM_Ok;
}

static bool
has_worker(IdemTable *table, text *worker)
{
	return worker != NULL && idem_row_varlena_equals(table->found, IDEM_KEYS_WORKER, worker);
}

/* The answer to a claim that does not get the key: a live lease is busy (L1, L8) */
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
 * Answer a claim from the row found, without writing anything (K8).  Raises an error
 * if the caller must not use the key, or used another request.  Returns false if the
 * key may be claimed.
 */
static bool
answer_from_row(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info)
{
	IdemKeyStatus state = idem_keyrow_judge(table, get_max_attempts(claim));

	if (state == IDEM_KEY_GONE)
		return false;
	idem_keyrow_check_owner(idem_row_oid(table->found, IDEM_KEYS_OWNER));
	idem_keyrow_check_request(table, claim->request);
	if (state == IDEM_KEY_EXPIRED)
		return false;
	idem_keyrow_check_serializable(table);
	idem_keyrow_read(table, choose_answer(table, claim, state), info);
	return true;
}

/*
 * Look the key up, and claim it if it is absent; true if it was claimed.  Inserting
 * needs the lock on the hash and a probe under it, so that one of several claimers
 * inserts the key (K3).  If the key is probably new, take the lock at once, which
 * saves a probe.
 */
static bool
probe_or_insert(IdemTable *table, const IdemClaim *claim, IdemProbeResult *probe, IdemKeyInfo *info)
{
	IdemLookup lookup = idem_keytable_lookup(table, &claim->key);
	int64 hash = idem_keytable_hash(&lookup);
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

	idem_table_lock_hash(table, hash);
	idem_probe(table, &lookup, probe);
	/* the probe may have missed a row that was not HOT updated without the lock on the hash */
	if (probe->found == IDEM_FOUND_NONE && probe->nentries > 0)
		idem_probe_latest(table, &lookup, probe);
	last_was_new = probe->found == IDEM_FOUND_NONE;
	if (last_was_new)
	{
		idem_keyrow_check_absent(table, &lookup);
		inserted = insert_claim(table, claim, &lookup, owner, info);
	}
	idem_table_unlock_hash(table, hash);
	return inserted;
}

/*
 * Each iteration looks the key up, and then answers, claims the key, or waits for the
 * transaction that holds or changes it and looks again (K4).
 */
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
			return;
		/* another transaction has locked the row without changing it */
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

/* How many claims of this session have got "held" */
static uint64 held_answers;

uint64
idem_keystore_held_answers(void)
{
	return held_answers;
}

/* Count the answer to a claim, and log it if the claim is a duplicate (S1, S4) */
static void
count_claim(const IdemClaim *claim, IdemKeyStatus status)
{
	idem_counters_add((IdemDatabaseCounter) status);
	if (status == IDEM_KEY_HELD)
		held_answers++;
	if (status == IDEM_KEY_FINISHED || status == IDEM_KEY_BUSY || status == IDEM_KEY_PARKED ||
		status == IDEM_KEY_EXHAUSTED)
		idem_counters_log_duplicate(claim->lease ? "lease" : "claim", idem_keyrow_status_name(status),
									claim->key.scope, claim->key.key);
}

/* Claim or lease the key; info has the answer, also if the caller does not get the key */
void
idem_keystore_claim(IdemTable *table, const IdemClaim *claim, IdemKeyInfo *info)
{
	claim_key(table, claim, info);
	if (info->status == IDEM_KEY_CLAIMED && claim->lease == NULL)
		idem_unfinished_add(IDEM_UNFINISHED_KEYS, 1);
	count_claim(claim, info->status);
}

/* Raise the error for a key that this transaction does not hold (K11) */
pg_noreturn static void
refuse_not_held(IdemTable *table, const IdemProbeResult *probe)
{
	bool exists = probe->found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;

	if (exists && idem_keyrow_is_leased(table))
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was leased " INT64_FORMAT " s ago, as attempt %d.",
						  idem_row_age(table->found, IDEM_KEYS_LEASED_AT),
						  idem_row_int32(table->found, IDEM_KEYS_ATTEMPT)),
				errhint("Pass the token that idem_lease() has returned."));
	if (exists)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was first claimed " INT64_FORMAT " s ago, and the transaction that claimed it has committed.",
						  idem_row_age(table->found, IDEM_KEYS_CREATED_AT)),
				errhint("Begin a transaction before idem_claim(): in autocommit mode the claim commits at once. An operator can remove the key with idem_forget()."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_NOT_HELD),
			errmsg("idempotency key is not held by this transaction"),
			probe->found == IDEM_FOUND_OPEN ? errdetail("Another transaction has claimed the key and is still open.") :
											  errdetail("There is no such key in this scope."),
			errhint("Call idem_claim() first, in the same transaction and with the same scope, and continue only if it answered \"claimed\"."));
}

static bool
is_held(IdemTable *table)
{
	return !idem_keyrow_is_leased(table) && idem_row_is_mine(table->found);
}

/* Find a key that this transaction holds, or raise an error; never waits (K11) */
static void
find_held_key(IdemTable *table, const IdemKey *key)
{
	IdemLookup lookup;
	IdemProbeResult probe;

	if (idem_keyhint_find(table, key, &probe) && is_held(table))
	{
		idem_keyrow_check_owner(idem_row_oid(table->found, IDEM_KEYS_OWNER));
		return;
	}
	lookup = idem_keytable_lookup(table, key);
	idem_probe(table, &lookup, &probe);
	if (probe.found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_KEY_GONE)
		idem_keyrow_check_owner(idem_row_oid(table->found, IDEM_KEYS_OWNER));
	if (probe.found != IDEM_FOUND_ROW || !is_held(table))
		refuse_not_held(table, &probe);
}

/*
 * Store the result; false if the key is already finished with an equal result (K11).
 * Changes no indexed column, so this is a HOT update if the page has room.
 */
bool
idem_keystore_finish(IdemTable *table, const IdemKey *key, Jsonb *result)
{
	find_held_key(table, key);
	if (idem_keyrow_check_finished(table, result))
		return false;
	if (idem_write_update(table, table->found,
						  idem_keyrow_copy_finished(table, result, idem_clock_now()), NULL) != TM_Ok)
		elog(ERROR, "another transaction has changed a key that this transaction holds");
	idem_unfinished_add(IDEM_UNFINISHED_KEYS, -1);
	return true;
}

/*
 * Release a claim, as if the key had not been claimed (K1).  If the claim took over a
 * lease, the lease is restored (L8).
 */
void
idem_keystore_release(IdemTable *table, const IdemKey *key)
{
	find_held_key(table, key);
	idem_keyrow_reject_finished(table, "Roll back to undo the work together with its key.");
	if (!idem_row_isnull(table->found, IDEM_KEYS_PRIOR_LEASE_UNTIL))
	{
		idem_keytable_update(table, table->found, restore_lease(table));
	}
	else if (idem_write_delete(table, table->found, true) != TM_Ok)
		elog(ERROR, "another transaction has changed a key that this transaction holds");
	idem_unfinished_add(IDEM_UNFINISHED_KEYS, -1);
}

/*
 * Remove a key of any owner: the privilege needed is EXECUTE on idem_forget().  Waits
 * for a transaction that has claimed the key or is changing its row.  False if the
 * key is absent.
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
			/* K9: an expired row that cleanup has not removed is no row */
			if (probe.found == IDEM_FOUND_ROW)
				idem_probe_note_absent(table, &lookup);
			return false;
		}
		else
		{
			idem_keyrow_check_serializable(table);
			if (idem_write_delete(table, table->found, true) != TM_Ok)
				continue;
			idem_keytable_note_end(key);
			if (state == IDEM_KEY_HELD)
				idem_unfinished_add(IDEM_UNFINISHED_KEYS, -1);
			return true;
		}
	}
}

/*
 * Read a key with the snapshot of the statement, like a SELECT; false if the key is
 * absent.  Under REPEATABLE READ the snapshot can show two rows: one that another
 * transaction has removed since, and one that this transaction has inserted.  The
 * second one counts.
 */
bool
idem_keystore_get(IdemTable *table, const IdemKey *key, IdemKeyInfo *info)
{
	IdemLookup lookup = idem_keytable_lookup(table, key);
	IndexScanDesc scan;
	bool found = false;
	bool mine = false;

	idem_shard_check_key_shown(key->scope, key->key, GetActiveSnapshot());
	scan = idem_probe_begin(table, &lookup, GetActiveSnapshot());
	while (!mine && index_getnext_slot(scan, ForwardScanDirection, table->found))
	{
		IdemKeyStatus state = idem_keyrow_judge(table, 0);

		if (!idem_keytable_has_key(table->found, key))
			continue;
		mine = idem_row_is_mine(table->found);
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
