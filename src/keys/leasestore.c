/*
 * leasestore.c
 *		Operations with the token of a lease: finish, release, renew, checkpoint,
 *		fence.  keystore.c grants leases.
 *
 * Each operation compares the token of the caller with the token in the row.  It
 * then locks or updates exactly this row version.  If another transaction has
 * changed the row meanwhile, the row is looked up and compared again.  Only the
 * token counts (L3), not the name of the worker and not the time: a caller with the
 * last token holds the key, even after the lease has expired, until another claim
 * takes over.
 *
 * Each operation waits for a transaction that is changing the row or has fenced
 * it, as long as lock_timeout allows.  A token that is not the last one raises
 * ID003 without a wait, because it will never be the last one again.  After an
 * error the row is unchanged.
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "keys/keys.h"

/* Raise the error for a token that is not the last one; "exists": there is a row of the key (L3) */
pg_noreturn static void
refuse_stale_token(IdemTable *table, bool exists)
{
	idem_counters_add(IDEM_DATABASE_COUNTER_STALE_TOKENS);
	if (!exists)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_STALE_TOKEN),
				errmsg("stale fencing token"),
				errdetail("There is no such key in this scope: it never existed, has expired or was removed."),
				errhint("Stop this work, and roll back what belongs to it. Call idem_lease() to start again."));
	if (!idem_keyrow_is_leased(table))
		ereport(ERROR,
				errcode(ERRCODE_IDEM_STALE_TOKEN),
				errmsg("stale fencing token"),
				errdetail("The key was claimed without a lease."),
				errhint("Omit the token for a key that was claimed with idem_claim(). If you leased the key before, stop this work: a plain claim has taken over the lease."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_STALE_TOKEN),
			errmsg("stale fencing token"),
			errdetail("The key has another token, set " INT64_FORMAT " s ago, at attempt %d.",
					  idem_row_age(table->found, IDEM_KEYS_LEASED_AT),
					  idem_row_int32(table->found, IDEM_KEYS_ATTEMPT)),
			errhint("Stop this work, and roll back what belongs to it: another worker has taken over, or the lease was released."));
}

static bool
has_token(IdemTable *table, int64 token)
{
	return idem_keyrow_is_leased(table) && idem_row_int64(table->found, IDEM_KEYS_TOKEN) == token;
}

/*
 * Find the row that is leased under this token, or raise an error (L3).  Waits for a
 * transaction that is changing the row.
 */
static void
find_lease(IdemTable *table, const IdemKey *key, int64 token)
{
	IdemLookup lookup;
	IdemProbeResult probe;
	bool guessed = idem_keyhint_find(table, key, &probe) && has_token(table, token);

	for (;;)
	{
		bool exists;

		if (!guessed)
		{
			lookup = idem_keytable_lookup(table, key);
			idem_probe_existing(table, &lookup, &probe);
		}
		guessed = false;
		exists = probe.found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;
		if (exists)
			idem_keyrow_check_owner(idem_row_oid(table->found, IDEM_KEYS_OWNER));
		if (!exists || !has_token(table, token))
			refuse_stale_token(table, exists);
		if (!TransactionIdIsValid(probe.xwait))
			break;
		idem_probe_wait(table, probe.xwait);
	}
	idem_keyrow_check_serializable(table);
}

/* Lock the row found; false if it was changed, or its ttl passed, during the wait (L4) */
static bool
lock_row_found(IdemTable *table)
{
	return idem_table_lock_row(table, table->found->tts_tid, LockTupleNoKeyExclusive,
							   LockWaitBlock, table->found) == TM_Ok &&
		idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;
}

/* Find the row of a lease that is not finished, and lock it, or raise an error (L3) */
static void
lock_lease(IdemTable *table, const IdemKey *key, int64 token)
{
	do
	{
		find_lease(table, key, token);
		idem_keyrow_reject_finished(table, "The work is done: read its result with idem_get().");
	} while (!lock_row_found(table));
}

/* How long the key is kept after its lease has expired, or after a late finish */
static int64
compute_ttl(IdemTable *table)
{
	return idem_row_timestamp(table->found, IDEM_KEYS_EXPIRES_AT) -
		idem_row_timestamp(table->found, IDEM_KEYS_LEASE_UNTIL);
}

/* Restart the lease with this length from now on; returns its end (L5, L6) */
static TimestampTz
restart_lease(IdemTable *table, TupleTableSlot *slot, int64 length)
{
	TimestampTz now = idem_clock_now();
	TimestampTz until = now + length;

	idem_row_set(slot, IDEM_KEYS_LEASED_AT, TimestampTzGetDatum(now));
	idem_row_set(slot, IDEM_KEYS_LEASE_UNTIL, TimestampTzGetDatum(until));
	idem_row_set(slot, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(until + compute_ttl(table)));
	return until;
}

/* Has the lease expired? */
static bool
has_expired(IdemTable *table, TimestampTz now)
{
	return idem_row_timestamp(table->found, IDEM_KEYS_LEASE_UNTIL) < now;
}

/*
 * Store the result in the row found; false if the row must be looked up again.
 * If another transaction may have fenced the row, this function locks the row
 * first and reads the clock after the wait.  Otherwise the update would wait, and
 * would write a time from before the wait.
 */
static bool
finish_found(IdemTable *table, const IdemKey *key, Jsonb *result)
{
	TimestampTz now = idem_clock_now();
	bool lock = has_expired(table, now) || idem_row_is_locked(table->found);
	TupleTableSlot *slot;

	if (lock)
	{
		if (!lock_row_found(table))
			return false;
		now = idem_clock_now();
	}
	slot = idem_keyrow_copy_finished(table, result, now);
	if (!has_expired(table, now))
		return idem_write_update(table, table->found, slot, NULL) == TM_Ok;
	idem_row_set(slot, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(now + compute_ttl(table)));
	idem_keytable_update(table, table->found, slot);
	return true;
}

/*
 * Store the result; false if the key is already finished, with this token and an
 * equal result (L3).  A finish before the lease has expired changes no indexed
 * column, so it can be a HOT update.  A later finish keeps the result for the ttl
 * from now on.
 */
bool
idem_leasestore_finish(IdemTable *table, const IdemKey *key, int64 token, Jsonb *result)
{
	do
	{
		find_lease(table, key, token);
		if (idem_keyrow_check_finished(table, result))
			return false;
	} while (!finish_found(table, key, result));
	idem_keytable_note_end(key);
	return true;
}

/*
 * Release the lease: the next claim gets the key at once.  The row gets a new token
 * that no caller has, so the old token is stale (L3).  Releasing a parked
 * key means that the work did not happen, so the attempt does not count (L1).
 */
void
idem_leasestore_release(IdemTable *table, const IdemKey *key, int64 token)
{
	TupleTableSlot *slot;
	TimestampTz until;

	lock_lease(table, key, token);
	slot = idem_write_copy_row(table, table->found);
	if (idem_keyrow_judge(table, 0) == IDEM_KEY_PARKED)
		idem_row_set(slot, IDEM_KEYS_ATTEMPT,
					 Int32GetDatum(idem_row_int32(table->found, IDEM_KEYS_ATTEMPT) - 1));
	until = restart_lease(table, slot, 0);
	idem_row_set(slot, IDEM_KEYS_TOKEN, Int64GetDatum(idem_clock_next_token(token, until)));
	idem_row_set(slot, IDEM_KEYS_PARK, BoolGetDatum(false));
	idem_row_clear(slot, IDEM_KEYS_WORKER);
	idem_keytable_update(table, table->found, slot);
	idem_keytable_note_end(key);
}

/* Restart the lease with this length from now on; returns its end (L6) */
TimestampTz
idem_leasestore_renew(IdemTable *table, const IdemKey *key, int64 token, int64 length)
{
	TupleTableSlot *slot;
	TimestampTz before;
	TimestampTz until;

	lock_lease(table, key, token);
	before = idem_row_timestamp(table->found, IDEM_KEYS_LEASE_UNTIL);
	slot = idem_write_copy_row(table, table->found);
	until = restart_lease(table, slot, length);
	idem_keytable_update(table, table->found, slot);
	/* who waits sleeps until the time before */
	if (until < before)
		idem_keytable_note_end(key);
	return until;
}

/* Store a recovery point, and restart the lease with its last length; returns its end (L5) */
TimestampTz
idem_leasestore_checkpoint(IdemTable *table, const IdemKey *key, int64 token, Jsonb *data)
{
	TupleTableSlot *slot;
	TimestampTz until;

	lock_lease(table, key, token);
	slot = idem_write_copy_row(table, table->found);
	until = restart_lease(table, slot,
						  idem_row_timestamp(table->found, IDEM_KEYS_LEASE_UNTIL) -
							  idem_row_timestamp(table->found, IDEM_KEYS_LEASED_AT));
	idem_row_set(slot, IDEM_KEYS_CHECKPOINT, JsonbPGetDatum(data));
	idem_keytable_update(table, table->found, slot);
	return until;
}

/*
 * Check the token, and lock the row until the transaction of the caller ends (L4).
 * A takeover waits for this lock, and so does any other transaction that uses the
 * same token.
 */
void
idem_leasestore_fence(IdemTable *table, const IdemKey *key, int64 token)
{
	lock_lease(table, key, token);
}
