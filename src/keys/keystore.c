/*
 * keystore.c
 *		The protocol of idempotency keys: claim and lease; finish, release, forget, get;
 *		what the holder of a lease does with its token.
 *
 * A claim is a row that is inserted at once, in the caller's transaction.  The state of a key is
 * read from its row (keyrow.c).  doc/protocol.md has the states, and says which transaction waits
 * for which.  Backend memory contains no state of a key, only two hints, last_claim and
 * last_was_new, and a number for a warning (unfinished.c).  So rollback, savepoints and PREPARE
 * need no code here (K1).
 *
 * Rows are looked up with a dirty snapshot (probe.c), which may miss a row that
 * another transaction is updating at this moment.  The claim then locks the hash and
 * probes again.  Only an update that does not hold this lock, a finish that is not
 * HOT, can be missed once more.  The probe has then met the index entry of the
 * old row version, so before it inserts a key whose hash has entries, the claim also
 * looks at a new MVCC snapshot.  The unique index alone would not be enough: for a key
 * whose nth is not 0, the new row could get another nth.
 *
 * An operation with a token compares it with the token in the row.  It then locks or
 * updates exactly this row version.  If another transaction has changed the row
 * meanwhile, the row is looked up and compared again.  Only the token counts (L3), not the
 * name of the worker and not the time: a caller with the last token holds the key, even after
 * the lease has expired, until another claim takes over.  Such an operation waits for a
 * transaction that is changing the row or has fenced it, as long as lock_timeout allows.  A
 * token that is not the last one raises ID003 without a wait, because it will never be the
 * last one again.  After an error the row is unchanged.
 */
#include "postgres.h"

#include "access/heaptoast.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

/* A hint for probe_or_insert(): was the key of this backend's last claim absent? */
static bool last_was_new = true;

/*
 * The place of the row that the last claim of this backend wrote.  A finish mostly follows the
 * claim of the same key, so finish and release look there first, which saves a scan of the
 * index.  It is only a hint: a row of another key, or no row, may be there by now.
 */
static ItemPointerData last_claim;

/* How many claims of this session have got "held" */
static uint64 held_answers;

/* Sleep for up to 5 ms of a bounded wait; false if its time is over (K5) */
static bool
pause_until(TimestampTz until)
{
	static uint32 wait_event = 0;
	long left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);

	if (left <= 0)
		return false;
	if (wait_event == 0)
		wait_event = WaitEventExtensionNew("IdemClaim");
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
	ExecClearTuple(probe->row);
	while (!ConditionalXactLockTableWait(probe->xwait, false))
	{
		if (!pause_until(wait->until))
			return false;
	}
	return true;
}

/* Begin a new life of a key that is absent, or past its ttl; its tokens go on */
static void
begin_life(int64 last_token, Oid owner, TimestampTz now, IdemKeyRow *key)
{
	memset(key, 0, sizeof(*key));
	key->owner = owner;
	key->created_at = now;
	key->token = last_token;
}

/* Grant the key to the claim; a lease gets the next token and one more attempt (L1, L2) */
static void
grant_key(const IdemClaim *claim, TimestampTz now, IdemKeyRow *key)
{
	const IdemLease *lease = claim->lease;

	key->status = IDEM_KEY_CLAIMED;
	key->lease_until = lease ? now + lease->length : 0;
	key->expires_at = (lease ? key->lease_until : now) + claim->ttl;
	if (lease != NULL)
	{
		key->token = idem_clock_next_token(key->token, now);
		key->attempt++;
		key->max_attempts = Max(key->max_attempts, lease->max_attempts);
	}
}

/*
 * Set the columns of a claim, in an empty row or in a copy of the row that it replaces.  If a
 * plain claim takes over a lease, it clears only the deadline.  The last token stays, so that the
 * next token is higher.  The other columns of the lease stay in case the claim is released
 * (idem_keystore_release).
 */
static void
fill_claim(TupleTableSlot *new, const IdemClaim *claim, TimestampTz now, const IdemKeyRow *key)
{
	const IdemLease *lease = claim->lease;

	idem_row_set(new, IDEM_KEYS_CREATED_AT, TimestampTzGetDatum(key->created_at));
	idem_row_set(new, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(key->expires_at));
	idem_row_set(new, IDEM_KEYS_OWNER, ObjectIdGetDatum(key->owner));
	idem_row_set(new, IDEM_KEYS_KEY, PointerGetDatum(claim->key.key));
	idem_row_set(new, IDEM_KEYS_SCOPE, PointerGetDatum(claim->key.scope));
	if (claim->request != NULL)
		idem_row_set(new, IDEM_KEYS_REQUEST, PointerGetDatum(claim->request));
	if (key->token == 0)
		return;
	idem_row_set(new, IDEM_KEYS_TOKEN, Int64GetDatum(key->token));
	if (lease == NULL)
	{
		idem_row_clear(new, IDEM_KEYS_LEASE_UNTIL);
		return;
	}
	idem_row_set(new, IDEM_KEYS_LEASED_AT, TimestampTzGetDatum(now));
	idem_row_set(new, IDEM_KEYS_LEASE_UNTIL, TimestampTzGetDatum(key->lease_until));
	idem_row_set(new, IDEM_KEYS_ATTEMPT, Int32GetDatum(key->attempt));
	if (key->max_attempts != 0)
		idem_row_set(new, IDEM_KEYS_MAX_ATTEMPTS, Int32GetDatum(key->max_attempts));
	idem_row_set(new, IDEM_KEYS_PARK, BoolGetDatum(lease->park));
	idem_row_set_varlena(new, IDEM_KEYS_WORKER, lease->worker);
}

/* Start a row for a new life of a key, which has no request yet */
static TupleTableSlot *
start_row(IdemTable *table, int64 key_hash, int nth)
{
	TupleTableSlot *new = idem_table_new_row(table);
	bytea *no_request = palloc(VARHDRSZ);

	SET_VARSIZE(no_request, VARHDRSZ);
	idem_row_set(new, IDEM_KEYS_KEY_HASH, Int64GetDatum(key_hash));
	idem_row_set(new, IDEM_KEYS_NTH, Int16GetDatum(nth));
	idem_row_set(new, IDEM_KEYS_REQUEST, PointerGetDatum(no_request));
	return new;
}

/* Update a row that this transaction has locked, under the lock on its hash (K3) */
static void
update_locked(IdemTable *table, TupleTableSlot *row, TupleTableSlot *new)
{
	idem_table_update_hashed(table, row, new, idem_row_int64(row, IDEM_KEYS_KEY_HASH));
}

StaticAssertDecl(IDEM_MAX_KEY_LEN + IDEM_MAX_SCOPE_LEN + IDEM_MAX_WORKER_LEN + IDEM_HANDLER_LEN +
						 IDEM_DIGEST_LEN + 256 <
					 TOAST_TUPLE_THRESHOLD,
				 "the row of a new key is not toasted, so its insert needs no lock on the TOAST table");

/*
 * Claim a key that is past its ttl (K9) or whose lease has expired (L1, L4, L8), by
 * updating its row, so that one of several claimers gets it (K3).  TM_WouldBlock: another
 * transaction has locked the row, and the caller wants no unbounded wait (K5).  Other results than
 * TM_Ok: look the key up again.
 */
static TM_Result
take_over(IdemTable *table, TupleTableSlot *row, const IdemClaim *claim, IdemKeyRow *key)
{
	TupleTableSlot *new;
	TM_Result result;
	IdemKeyStatus state;
	TimestampTz now;

	/*
	 * Lock the row first, so that the ttl and the lease begin after the wait.  A transaction that
	 * has fenced the lease holds a lock that conflicts with this one, so the takeover waits for
	 * the end of that transaction (L4).
	 */
	idem_keyrow_check_serializable(table, row);
	result = idem_table_lock_row(table, row->tts_tid, LockTupleNoKeyExclusive,
								 claim->wait.forever ? LockWaitBlock : LockWaitSkip, row);
	if (result != TM_Ok)
		return result;

	/* Judge the state again: another claim may have been first (K3). */
	idem_keyrow_read(row, claim->lease ? claim->lease->max_attempts : 0, key);
	state = key->status;
	if (state != IDEM_KEY_GONE && state != IDEM_KEY_EXPIRED)
		return TM_Updated;

	now = idem_clock_now();
	if (state == IDEM_KEY_GONE)
	{
		begin_life(key->token, idem_keyrow_current_owner(), now, key);
		new = start_row(table, idem_row_int64(row, IDEM_KEYS_KEY_HASH),
						idem_row_int16(row, IDEM_KEYS_NTH));
		grant_key(claim, now, key);
	}
	else
	{
		IdemKeyRow lease = *key;

		idem_keyrow_copy_values(key);
		new = idem_table_copy_row(table, row);
		grant_key(claim, now, key);
		if (claim->lease == NULL)
		{
			/* for a release, keep the two times of the lease that a plain claim overwrites (L8) */
			idem_row_set(new, IDEM_KEYS_PRIOR_LEASE_UNTIL, TimestampTzGetDatum(lease.lease_until));
			idem_row_set(new, IDEM_KEYS_PRIOR_EXPIRES_AT, TimestampTzGetDatum(lease.expires_at));
			/* keep the key for at least as long as the holder of the lease has asked for */
			key->expires_at = Max(key->expires_at, lease.expires_at);
		}
	}
	fill_claim(new, claim, now, key);
	update_locked(table, row, new);
	last_claim = new->tts_tid;
	if (state == IDEM_KEY_EXPIRED)
		idem_counters_add(IDEM_DATABASE_COUNTER_TAKEOVERS);
	return TM_Ok;
}

/*
 * Answer a claim from the row, without writing anything (K8); a live lease is busy (L1, L8). Raises
 * an error if the caller must not use the key, or used another request.  Returns false if the key
 * may be claimed.
 */
static bool
answer_from_row(IdemTable *table, TupleTableSlot *row, const IdemClaim *claim, IdemKeyRow *key)
{
	const IdemLease *lease = claim->lease;

	idem_keyrow_read(row, lease ? lease->max_attempts : 0, key);
	if (key->status == IDEM_KEY_GONE)
		return false;
	idem_keyrow_check_owner(key->owner);
	idem_keyrow_check_request(key, claim->request);
	if (key->status == IDEM_KEY_EXPIRED)
		return false;
	idem_keyrow_check_serializable(table, row);
	idem_keyrow_copy_values(key);
	/* the worker of a live lease may go on */
	if (key->status == IDEM_KEY_LIVE)
		key->status = lease != NULL && lease->worker != NULL &&
				idem_row_varlena_equals(row, IDEM_KEYS_WORKER, lease->worker) ?
			IDEM_KEY_RESUMED :
			IDEM_KEY_BUSY;
	else if (key->status == IDEM_KEY_HELD && lease != NULL)
		key->status = IDEM_KEY_BUSY;
	return true;
}

/*
 * Look the key up, and claim it by a row of the caller's transaction if it is absent (K1); true if
 * it was claimed.  One of several claimers inserts the key (K3).
 */
static bool
probe_or_insert(IdemTable *table, const IdemClaim *claim, IdemProbeResult *probe, IdemKeyRow *key)
{
	IdemLookup lookup = idem_keyrow_lookup(table, &claim->key);
	int64 hash = DatumGetInt64(lookup.value);
	bool inserted = false;
	Oid owner;

	/* If the key is probably new, take the lock at once, which saves a probe. */
	if (!last_was_new)
	{
		idem_probe(table, &lookup, probe);
		if (probe->found != IDEM_FOUND_NONE)
			return false;
	}
	/* Whatever may wait or raise an error comes before the lock, for which all others wait (K5). */
	owner = idem_keyrow_current_owner();
	idem_table_open_indexes(table);

	/*
	 * The insert holds the lock on the hash from the probe that finds the key absent until the
	 * entry exists, so that one of several claimers inserts the key (K3).  An update that needs
	 * new entries holds it while it updates.  So a backend that holds the lock misses no row.
	 * INSERT ... ON CONFLICT needs no such lock, but it writes a second WAL record for each row.
	 */
	idem_table_lock_hash(table, hash);
	idem_probe(table, &lookup, probe);
	/* the probe may have missed a row that was not HOT updated without the lock on the hash */
	if (probe->found == IDEM_FOUND_NONE && probe->nentries > 0)
		idem_probe_latest(table, &lookup, probe);
	last_was_new = probe->found == IDEM_FOUND_NONE;
	if (last_was_new)
	{
		TupleTableSlot *new;
		TimestampTz now;

		idem_keyrow_check_absent(table, &lookup);
		now = idem_clock_now();
		begin_life(0, owner, now, key);
		grant_key(claim, now, key);
		new = start_row(table, hash, idem_keyrow_free_nth(&lookup));
		fill_claim(new, claim, now, key);
		/* not if the unique index reports that the key exists */
		inserted = idem_table_insert(table, new);
		if (inserted)
			last_claim = new->tts_tid;
	}
	idem_table_unlock_hash(table, hash);
	return inserted;
}

/*
 * Each iteration looks the key up, and then answers, claims the key, or waits for the
 * transaction that holds or changes it and looks again (K4).
 */
static void
claim_key(IdemTable *table, const IdemClaim *claim, IdemKeyRow *key)
{
	for (;;)
	{
		IdemProbeResult probe;
		TM_Result result = TM_Updated;
		bool ended = true;

		CHECK_FOR_INTERRUPTS();
		if (probe_or_insert(table, claim, &probe, key))
			result = TM_Ok;
		else if (probe.found == IDEM_FOUND_ROW && answer_from_row(table, probe.row, claim, key))
			return;
		else if (TransactionIdIsValid(probe.xwait))
			ended = wait_for_other(table, &probe, &claim->wait);
		else if (probe.found == IDEM_FOUND_ROW)
			result = take_over(table, probe.row, claim, key);

		if (result == TM_Ok)
			return;
		/* another transaction has locked the row without changing it */
		if (result == TM_WouldBlock)
		{
			ExecClearTuple(probe.row);
			ended = pause_until(claim->wait.until);
		}
		if (!ended)
		{
			memset(key, 0, sizeof(*key));
			key->status = IDEM_KEY_BUSY;
			return;
		}
	}
}

StaticAssertDecl((int) IDEM_DATABASE_COUNTER_CLAIMS == (int) IDEM_KEY_CLAIMED &&
					 (int) IDEM_DATABASE_COUNTER_BUSY == (int) IDEM_KEY_BUSY &&
					 (int) IDEM_DATABASE_COUNTER_REPLAYS == (int) IDEM_KEY_FINISHED &&
					 (int) IDEM_DATABASE_COUNTER_EXHAUSTED == (int) IDEM_KEY_EXHAUSTED,
				 "the counter of an answer has the number of the answer");

/* Claim or lease the key; *key has the answer, also if the caller does not get the key */
void
idem_keystore_claim(IdemTable *table, const IdemClaim *claim, IdemKeyRow *key)
{
	IdemKeyStatus status;

	claim_key(table, claim, key);
	status = key->status;
	if (status == IDEM_KEY_CLAIMED && claim->lease == NULL)
		idem_unfinished_add(IDEM_UNFINISHED_KEYS, 1);
	/* count the answer, and log a duplicate (S1, S4) */
	idem_counters_add((IdemDatabaseCounter) status);
	if (status == IDEM_KEY_HELD)
		held_answers++;
	if (status == IDEM_KEY_FINISHED || status == IDEM_KEY_BUSY || status == IDEM_KEY_PARKED ||
		status == IDEM_KEY_EXHAUSTED)
		idem_counters_log_duplicate(claim->lease ? "lease" : "claim", idem_keyrow_status_name(status),
									claim->key.scope, claim->key.key);
}

uint64
idem_keystore_held_answers(void)
{
	return held_answers;
}

/*
 * Look for the row of this key at the place of the last claim.  M2: a key of another shard raises
 * an error; its slot may have gone since the claim.
 */
static bool
find_last_claim(IdemTable *table, const IdemKey *key, IdemProbeResult *probe)
{
	TupleTableSlot *row = idem_table_row(table);
	SnapshotData dirty;

	idem_shard_check_key(key->scope, key->key);
	InitDirtySnapshot(dirty);
	memset(probe, 0, sizeof(*probe));
	if (ItemPointerIsValid(&last_claim) &&
		ItemPointerGetBlockNumber(&last_claim) < RelationGetNumberOfBlocks(table->heap) &&
		table_tuple_fetch_row_version(table->heap, &last_claim, &dirty, row) &&
		idem_keyrow_has_key(row, key))
		idem_probe_classify(&dirty, row, probe);
	/* do not try a wrong place again for each key of a batch */
	if (probe->found != IDEM_FOUND_ROW)
		ItemPointerSetInvalid(&last_claim);
	return probe->found == IDEM_FOUND_ROW;
}

/* Read the row that a probe has found; false if there is none, or its key is past its ttl */
static bool
read_probed(const IdemProbeResult *probe, IdemKeyRow *key)
{
	if (probe->found != IDEM_FOUND_ROW)
		return false;
	idem_keyrow_read(probe->row, 0, key);
	return key->status != IDEM_KEY_GONE;
}

/*
 * Find a key that this transaction holds by a plain claim, or raise an error; never waits (K11)
 */
static void
find_held_key(IdemTable *table, const IdemKey *name, IdemKeyRow *key)
{
	IdemLookup lookup;
	IdemProbeResult probe;
	bool exists = false;

	if (find_last_claim(table, name, &probe))
	{
		idem_keyrow_read(probe.row, 0, key);
		exists = key->lease_until == 0 && key->is_mine;
	}
	if (!exists)
	{
		lookup = idem_keyrow_lookup(table, name);
		idem_probe(table, &lookup, &probe);
		exists = read_probed(&probe, key);
	}
	if (exists)
		idem_keyrow_check_owner(key->owner);
	if (probe.found == IDEM_FOUND_ROW && key->lease_until == 0 && key->is_mine)
		return;
	if (exists && key->lease_until != 0)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was leased " INT64_FORMAT " s ago, as attempt %d.",
						  idem_clock_age(idem_row_timestamp(key->row, IDEM_KEYS_LEASED_AT)),
						  key->attempt),
				errhint("Pass the token that idem_lease() has returned."));
	if (exists)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_NOT_HELD),
				errmsg("idempotency key is not held by this transaction"),
				errdetail("The key was first claimed " INT64_FORMAT " s ago, and the transaction that claimed it has committed.",
						  idem_clock_age(key->created_at)),
				errhint("Begin a transaction before idem_claim(): in autocommit mode the claim commits at once. An operator can remove the key with idem_forget()."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_NOT_HELD),
			errmsg("idempotency key is not held by this transaction"),
			probe.found == IDEM_FOUND_OPEN ? errdetail("Another transaction has claimed the key and is still open.") :
											 errdetail("There is no such key in this scope."),
			errhint("Call idem_claim() first, in the same transaction and with the same scope, and continue only if it answered \"claimed\"."));
}

/* Is the key finished?  If it is, with another result, raise an error (K11, L3). */
static bool
check_finished(const IdemKeyRow *key, Jsonb *result)
{
	NullableDatum stored;

	if (key->finished_at == 0)
		return false;
	stored = idem_row_datum(key->row, IDEM_KEYS_RESULT);
	if (stored.isnull || result == NULL ?
			stored.isnull && result == NULL :
			compareJsonbContainers(&DatumGetJsonbP(stored.value)->root, &result->root) == 0)
		return true;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished with another result"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_clock_age(key->created_at), idem_clock_age(key->finished_at)),
			errhint("Finish a key once, or again with an equal result."));
}

/* Raise an error if the key is finished: the caller cannot change it any more (K11, L3) */
static void
reject_finished(const IdemKeyRow *key, const char *hint)
{
	if (key->finished_at == 0)
		return;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_clock_age(key->created_at), idem_clock_age(key->finished_at)),
			errhint("%s", hint));
}

/* Start a row with the columns of a finish */
static TupleTableSlot *
start_finished(IdemTable *table, TupleTableSlot *row, Jsonb *result, TimestampTz now)
{
	TupleTableSlot *new = idem_table_copy_row(table, row);

	idem_row_set(new, IDEM_KEYS_FINISHED_AT, TimestampTzGetDatum(now));
	if (result != NULL)
		idem_row_set(new, IDEM_KEYS_RESULT, JsonbPGetDatum(result));
	return new;
}

/*
 * Store the result; false if the key is already finished with an equal result (K11).
 * Changes no indexed column, so this is a HOT update if the page has room.
 */
bool
idem_keystore_finish(IdemTable *table, const IdemKey *name, Jsonb *result)
{
	IdemKeyRow key;

	find_held_key(table, name, &key);
	if (check_finished(&key, result))
		return false;
	if (idem_table_update(table, key.row, start_finished(table, key.row, result, idem_clock_now()),
						  NULL) != TM_Ok)
		elog(ERROR, "another transaction has changed a key that this transaction holds");
	idem_unfinished_add(IDEM_UNFINISHED_KEYS, -1);
	return true;
}

/*
 * Release a claim, as if the key had not been claimed (K1).  If the claim took over a lease, the
 * lease is restored as it was before (L8).  Its last length (L5) and its ttl follow from
 * leased_at, lease_until and expires_at: the first is unchanged in the row, the others are
 * restored.  Its token is valid again (L3).
 */
void
idem_keystore_release(IdemTable *table, const IdemKey *name)
{
	IdemKeyRow key;

	find_held_key(table, name, &key);
	reject_finished(&key, "Roll back to undo the work together with its key.");
	if (!idem_row_isnull(key.row, IDEM_KEYS_PRIOR_LEASE_UNTIL))
	{
		TupleTableSlot *new = idem_table_copy_row(table, key.row);

		idem_row_copy_column(key.row, IDEM_KEYS_PRIOR_LEASE_UNTIL, new, IDEM_KEYS_LEASE_UNTIL);
		idem_row_copy_column(key.row, IDEM_KEYS_PRIOR_EXPIRES_AT, new, IDEM_KEYS_EXPIRES_AT);
		idem_row_clear(new, IDEM_KEYS_PRIOR_LEASE_UNTIL);
		idem_row_clear(new, IDEM_KEYS_PRIOR_EXPIRES_AT);
		update_locked(table, key.row, new);
	}
	else if (idem_table_delete(table, key.row, true) != TM_Ok)
		elog(ERROR, "another transaction has changed a key that this transaction holds");
	idem_unfinished_add(IDEM_UNFINISHED_KEYS, -1);
}

/* A6: this transaction has ended the lease of the key, or has made it shorter */
static void
note_end(const IdemKey *name)
{
	idem_touched_end(idem_waiters_key(idem_hash_name(name->scope, name->key)));
}

/*
 * Remove a key of any owner: the privilege needed is EXECUTE on idem_forget().  Waits
 * for a transaction that has claimed the key or is changing its row.  False if the
 * key is absent.
 */
bool
idem_keystore_forget(IdemTable *table, const IdemKey *name)
{
	IdemLookup lookup = idem_keyrow_lookup(table, name);

	for (;;)
	{
		IdemProbeResult probe;
		IdemKeyRow key;
		bool exists;

		idem_probe_existing(table, &lookup, &probe);
		exists = read_probed(&probe, &key);
		if (TransactionIdIsValid(probe.xwait))
			idem_probe_wait(table, probe.xwait);
		else if (!exists)
		{
			idem_keyrow_check_absent(table, &lookup);
			/* K9: an expired row that cleanup has not removed is no row */
			if (probe.found == IDEM_FOUND_ROW)
				idem_probe_note_absent(table, &lookup);
			return false;
		}
		else
		{
			idem_keyrow_check_serializable(table, key.row);
			if (idem_table_delete(table, key.row, true) != TM_Ok)
				continue;
			note_end(name);
			if (key.status == IDEM_KEY_HELD)
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
idem_keystore_get(IdemTable *table, const IdemKey *name, IdemKeyRow *key)
{
	IdemLookup lookup = idem_keyrow_lookup(table, name);
	TupleTableSlot *row = idem_table_row(table);
	IndexScanDesc scan;
	bool found = false;
	bool mine = false;

	idem_shard_check_key_shown(name->scope, name->key, GetActiveSnapshot());
	scan = idem_probe_begin(table, &lookup, GetActiveSnapshot());
	while (!mine && index_getnext_slot(scan, ForwardScanDirection, row))
	{
		IdemKeyRow shown;

		if (!idem_keyrow_has_key(row, name))
			continue;
		idem_keyrow_read(row, 0, &shown);
		mine = shown.is_mine;
		if (shown.status == IDEM_KEY_GONE)
			continue;
		found = true;
		idem_keyrow_copy_values(&shown);
		*key = shown;
	}
	index_endscan(scan);
	if (found)
		idem_keyrow_check_owner(key->owner);
	return found;
}

static bool
has_token(const IdemKeyRow *key, int64 token)
{
	return key->lease_until != 0 && key->token == token;
}

/* Raise the error for a token that is not the last one; NULL: there is no row of the key (L3) */
pg_noreturn static void
refuse_stale_token(const IdemKeyRow *key)
{
	idem_counters_add(IDEM_DATABASE_COUNTER_STALE_TOKENS);
	if (key == NULL)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_STALE_TOKEN),
				errmsg("stale fencing token"),
				errdetail("There is no such key in this scope: it never existed, has expired or was removed."),
				errhint("Stop this work, and roll back what belongs to it. Call idem_lease() to start again."));
	if (key->lease_until == 0)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_STALE_TOKEN),
				errmsg("stale fencing token"),
				errdetail("The key was claimed without a lease."),
				errhint("Omit the token for a key that was claimed with idem_claim(). If you leased the key before, stop this work: a plain claim has taken over the lease."));
	ereport(
		ERROR, errcode(ERRCODE_IDEM_STALE_TOKEN), errmsg("stale fencing token"),
		errdetail("The key has another token, set " INT64_FORMAT " s ago, at attempt %d.",
				  idem_clock_age(idem_row_timestamp(key->row, IDEM_KEYS_LEASED_AT)), key->attempt),
		errhint(
			"Stop this work, and roll back what belongs to it: another worker has taken over, or the lease was released."));
}

/*
 * Find the row that is leased under this token, or raise an error (L3).  Waits for a
 * transaction that is changing the row.
 */
static void
find_lease(IdemTable *table, const IdemKey *name, int64 token, IdemKeyRow *key)
{
	IdemLookup lookup;
	IdemProbeResult probe;
	bool guessed = false;

	if (find_last_claim(table, name, &probe))
	{
		idem_keyrow_read(probe.row, 0, key);
		guessed = has_token(key, token);
	}
	for (;;)
	{
		bool exists = guessed && key->status != IDEM_KEY_GONE;

		if (!guessed)
		{
			lookup = idem_keyrow_lookup(table, name);
			idem_probe_existing(table, &lookup, &probe);
			exists = read_probed(&probe, key);
		}
		guessed = false;
		if (exists)
			idem_keyrow_check_owner(key->owner);
		if (!exists || !has_token(key, token))
			refuse_stale_token(exists ? key : NULL);
		if (!TransactionIdIsValid(probe.xwait))
			break;
		idem_probe_wait(table, probe.xwait);
	}
	idem_keyrow_check_serializable(table, key->row);
}

/* Lock the row; false if it was changed, or its ttl passed, during the wait (L4) */
static bool
lock_row(IdemTable *table, IdemKeyRow *key)
{
	if (idem_table_lock_row(table, key->row->tts_tid, LockTupleNoKeyExclusive, LockWaitBlock,
							key->row) != TM_Ok)
		return false;
	idem_keyrow_read(key->row, 0, key);
	return key->status != IDEM_KEY_GONE;
}

/*
 * Find the row of a lease that is not finished, and lock it until the transaction of the caller
 * ends, or raise an error (L3, L4).  A takeover waits for this lock, and so does any other
 * transaction that uses the same token.
 */
void
idem_keystore_fence(IdemTable *table, const IdemKey *name, int64 token, IdemKeyRow *key)
{
	do
	{
		find_lease(table, name, token, key);
		reject_finished(key, "The work is done: read its result with idem_get().");
	} while (!lock_row(table, key));
}

/* How long the key is kept after its lease has expired, or after a late finish */
static int64
compute_ttl(const IdemKeyRow *key)
{
	return key->expires_at - key->lease_until;
}

/* Restart the lease with this length from now on; returns its end (L5, L6) */
static TimestampTz
restart_lease(const IdemKeyRow *key, TupleTableSlot *new, int64 length)
{
	TimestampTz now = idem_clock_now();
	TimestampTz until = now + length;

	idem_row_set(new, IDEM_KEYS_LEASED_AT, TimestampTzGetDatum(now));
	idem_row_set(new, IDEM_KEYS_LEASE_UNTIL, TimestampTzGetDatum(until));
	idem_row_set(new, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(until + compute_ttl(key)));
	return until;
}

/*
 * Store the result of a lease; false if the key is already finished, with this token and an
 * equal result (L3).  A finish before the lease has expired changes no indexed
 * column, so it can be a HOT update.  A later finish keeps the result for the ttl
 * from now on.
 */
bool
idem_keystore_finish_lease(IdemTable *table, const IdemKey *name, int64 token, Jsonb *result)
{
	bool done = false;

	while (!done)
	{
		IdemKeyRow key;
		TimestampTz now;
		TupleTableSlot *new;

		find_lease(table, name, token, &key);
		if (check_finished(&key, result))
			return false;

		/*
		 * If another transaction may have fenced the row, lock the row first, and read the clock
		 * after the wait.  Otherwise the update would wait, and would write a time from before
		 * the wait.
		 */
		now = idem_clock_now();
		if (key.lease_until < now || idem_row_is_locked(key.row))
		{
			if (!lock_row(table, &key))
				continue;
			now = idem_clock_now();
		}
		new = start_finished(table, key.row, result, now);
		if (key.lease_until >= now)
			done = idem_table_update(table, key.row, new, NULL) == TM_Ok;
		else
		{
			idem_row_set(new, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(now + compute_ttl(&key)));
			update_locked(table, key.row, new);
			done = true;
		}
	}
	note_end(name);
	return true;
}

/*
 * Release the lease: the next claim gets the key at once.  The row gets a new token
 * that no caller has, so the old token is stale (L3).  Releasing a parked
 * key means that the work did not happen, so the attempt does not count (L1).
 */
void
idem_keystore_release_lease(IdemTable *table, const IdemKey *name, int64 token)
{
	IdemKeyRow key;
	TupleTableSlot *new;
	TimestampTz until;

	idem_keystore_fence(table, name, token, &key);
	new = idem_table_copy_row(table, key.row);
	if (key.status == IDEM_KEY_PARKED)
		idem_row_set(new, IDEM_KEYS_ATTEMPT, Int32GetDatum(key.attempt - 1));
	until = restart_lease(&key, new, 0);
	idem_row_set(new, IDEM_KEYS_TOKEN, Int64GetDatum(idem_clock_next_token(token, until)));
	idem_row_set(new, IDEM_KEYS_PARK, BoolGetDatum(false));
	idem_row_clear(new, IDEM_KEYS_WORKER);
	update_locked(table, key.row, new);
	note_end(name);
}

/* Restart the lease with this length from now on; returns its end (L6) */
TimestampTz
idem_keystore_renew(IdemTable *table, const IdemKey *name, int64 token, int64 length)
{
	IdemKeyRow key;
	TupleTableSlot *new;
	TimestampTz until;

	idem_keystore_fence(table, name, token, &key);
	new = idem_table_copy_row(table, key.row);
	until = restart_lease(&key, new, length);
	update_locked(table, key.row, new);
	/* a session that waits for the key sleeps until the time before */
	if (until < key.lease_until)
		note_end(name);
	return until;
}

/* Store a recovery point, and restart the lease with its last length; returns its end (L5) */
TimestampTz
idem_keystore_checkpoint(IdemTable *table, const IdemKey *name, int64 token, Jsonb *data)
{
	IdemKeyRow key;
	TupleTableSlot *new;
	TimestampTz until;

	idem_keystore_fence(table, name, token, &key);
	new = idem_table_copy_row(table, key.row);
	until = restart_lease(&key, new,
						  key.lease_until - idem_row_timestamp(key.row, IDEM_KEYS_LEASED_AT));
	idem_row_set(new, IDEM_KEYS_CHECKPOINT, JsonbPGetDatum(data));
	update_locked(table, key.row, new);
	return until;
}
