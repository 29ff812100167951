/*
 * leasestore.c
 *		What the holder of a lease does with its token: finish, release, renew,
 *		checkpoint, fence.  How a lease is taken is in keystore.c.
 *
 * The token is compared with the one in the row, on the row version that is
 * then changed or locked: if somebody else has changed it meanwhile, it is
 * looked up and compared again.  That is all there is to fencing.  The name of
 * the worker proves nothing here, and neither does the time: who has the last
 * token has the key, also after the lease ran out, until somebody takes over.
 *
 * Who waits for whom: all of these wait for a transaction that is changing the
 * row or has fenced it, as long as lock_timeout allows.  A token that is not
 * the last one is refused at once; it will never be the last one again.
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

/* Says what was found instead of a lease under this token */
pg_noreturn static void
refuse_stale_token(IdemTable *table, bool exists)
{
	idem_counters_add(IDEM_DATABASE_COUNTER_STALE_TOKENS);
	if (!exists)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_STALE_TOKEN),
				errmsg("stale fencing token"),
				errdetail("There is no such key in this scope, or not any more."),
				errhint("Stop this work, and roll back what belongs to it. Call idem_lease() to begin anew."));
	if (!idem_keyrow_is_leased(table))
		ereport(ERROR,
				errcode(ERRCODE_IDEM_STALE_TOKEN),
				errmsg("stale fencing token"),
				errdetail("The key was claimed without a lease."),
				errhint("Leave the token out for a key that was claimed with idem_claim(). If it was leased before: stop this work, somebody else has done it."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_STALE_TOKEN),
			errmsg("stale fencing token"),
			errdetail("The key was leased again " INT64_FORMAT " s ago, as attempt %d.",
					  idem_row_age(table, IDEM_KEYS_LEASED_AT),
					  idem_row_int32(table, IDEM_KEYS_ATTEMPT)),
			errhint("Stop this work, and roll back what belongs to it: somebody took over, or the lease was given up."));
}

static bool
has_token(IdemTable *table, int64 token)
{
	return idem_keyrow_is_leased(table) && idem_row_int64(table, IDEM_KEYS_TOKEN) == token;
}

/* Find the row that is leased under this token, when nobody is changing it */
static void
find_lease(IdemTable *table, const IdemKey *key, int64 token)
{
	IdemLookup lookup = idem_keytable_lookup(table, key);
	IdemProbeResult probe;
	bool guessed = idem_keyhint_find(table, key, &probe) && has_token(table, token);

	for (;;)
	{
		bool exists;

		if (!guessed)
			idem_probe_existing(table, &lookup, &probe);
		guessed = false;
		exists = probe.found == IDEM_FOUND_ROW && idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;
		if (exists)
			idem_keyrow_check_owner(idem_row_oid(table, IDEM_KEYS_OWNER));
		if (!exists || !has_token(table, token))
			refuse_stale_token(table, exists);
		if (!TransactionIdIsValid(probe.xwait))
			break;
		idem_probe_wait(table, probe.xwait);
	}
	idem_keyrow_check_serializable(table);
}

/* Lock the row found; false if it was changed meanwhile, or the wait took too long */
static bool
lock_found(IdemTable *table)
{
	return idem_table_lock_row(table, table->found->tts_tid, LockTupleNoKeyExclusive,
							   LockWaitBlock) == TM_Ok &&
		idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;
}

/* Find the lease for what changes it or relies on it: not finished, and locked */
static void
lock_lease(IdemTable *table, const IdemKey *key, int64 token)
{
	do
	{
		find_lease(table, key, token);
		idem_keyrow_reject_finished(table, "The work is done: read its result with idem_get().");
	} while (!lock_found(table));
}

/* How long the key is kept after its lease has run out, or after a late finish */
static int64
row_ttl(IdemTable *table)
{
	return idem_row_timestamp(table, IDEM_KEYS_EXPIRES_AT) -
		idem_row_timestamp(table, IDEM_KEYS_LEASE_UNTIL);
}

/* Let the lease run from now on; returns its end */
static TimestampTz
set_lease(IdemTable *table, TupleTableSlot *slot, int64 length)
{
	TimestampTz now = idem_clock_now();
	TimestampTz until = now + length;

	idem_row_set(slot, IDEM_KEYS_LEASED_AT, TimestampTzGetDatum(now));
	idem_row_set(slot, IDEM_KEYS_LEASE_UNTIL, TimestampTzGetDatum(until));
	idem_row_set(slot, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(until + row_ttl(table)));
	return until;
}

static bool
is_late(IdemTable *table, TimestampTz now)
{
	return idem_row_timestamp(table, IDEM_KEYS_LEASE_UNTIL) < now;
}

/*
 * Store the result in the row found; false if it has to be looked up again.
 * An update would wait for a fence, and then it would not be now any more; so
 * where there may be one, lock first.
 */
static bool
finish_found(IdemTable *table, const IdemKey *key, Jsonb *result)
{
	TimestampTz now = idem_clock_now();
	bool lock = is_late(table, now) || idem_row_is_locked(table);
	TupleTableSlot *slot;

	if (lock)
	{
		if (!lock_found(table))
			return false;
		now = idem_clock_now();
	}
	slot = idem_keyrow_copy_finished(table, result, now);
	if (!is_late(table, now))
		return idem_write_update(table) == TM_Ok;
	idem_row_set(slot, IDEM_KEYS_EXPIRES_AT, TimestampTzGetDatum(now + row_ttl(table)));
	idem_write_update_hashed(table, idem_keytable_hash(key));
	return true;
}

/*
 * Store the result; false if the key is finished already, with this token and
 * an equal result.  In time that touches no indexed column, as without a
 * lease; after the lease ran out the result is kept for the ttl from now on.
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
	return true;
}

/*
 * Give the lease up: the next claim gets the key at once.  The row gets a token
 * that nobody has, so the old one is stale.  To release a parked key is to say
 * that the work did not happen, so the attempt does not count either.
 */
void
idem_leasestore_release(IdemTable *table, const IdemKey *key, int64 token)
{
	TupleTableSlot *slot;
	TimestampTz until;

	lock_lease(table, key, token);
	slot = idem_keyrow_copy(table);
	if (idem_keyrow_judge(table, 0) == IDEM_KEY_PARKED)
		idem_row_set(slot, IDEM_KEYS_ATTEMPT,
					 Int32GetDatum(idem_row_int32(table, IDEM_KEYS_ATTEMPT) - 1));
	until = set_lease(table, slot, 0);
	idem_row_set(slot, IDEM_KEYS_TOKEN, Int64GetDatum(idem_clock_next_token(token, until)));
	idem_row_set(slot, IDEM_KEYS_PARK, BoolGetDatum(false));
	idem_row_clear(slot, IDEM_KEYS_WORKER);
	idem_write_update_hashed(table, idem_keytable_hash(key));
}

TimestampTz
idem_leasestore_renew(IdemTable *table, const IdemKey *key, int64 token, int64 length)
{
	TimestampTz until;

	lock_lease(table, key, token);
	until = set_lease(table, idem_keyrow_copy(table), length);
	idem_write_update_hashed(table, idem_keytable_hash(key));
	return until;
}

/* Store a recovery point, and let the lease run anew for as long as it was */
TimestampTz
idem_leasestore_checkpoint(IdemTable *table, const IdemKey *key, int64 token, Jsonb *data)
{
	TupleTableSlot *slot;
	TimestampTz until;

	lock_lease(table, key, token);
	slot = idem_keyrow_copy(table);
	until = set_lease(table, slot,
					  idem_row_timestamp(table, IDEM_KEYS_LEASE_UNTIL) -
						  idem_row_timestamp(table, IDEM_KEYS_LEASED_AT));
	idem_row_set(slot, IDEM_KEYS_CHECKPOINT, JsonbPGetDatum(data));
	idem_write_update_hashed(table, idem_keytable_hash(key));
	return until;
}

/*
 * Check the token for a transaction that relies on it.  The lock on the row
 * keeps any takeover waiting until that transaction ends, and a second one
 * with the same token, too.
 */
void
idem_leasestore_fence(IdemTable *table, const IdemKey *key, int64 token)
{
	lock_lease(table, key, token);
}
