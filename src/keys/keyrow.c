/*
 * keyrow.c
 *		The table idem.keys: how a key is found in it, what its row means, and the
 *		checks before the row is used.
 *
 * A key is found by a 64-bit hash of scope and key: the index is less than half as
 * large as one on the text, and a search compares integers.  Different keys can have
 * the same hash, so the text of the row is compared, too.  "nth" distinguishes
 * such keys in the primary key: it is 0 for the first key of a hash, and for another key of
 * the same hash the least number that no such key has.
 *
 * The state of a key follows from its row, from the transaction that wrote the row
 * and from the clock.  In C this is the only file that decides it.  The view
 * idem.key_status calls idem_key_state(), which calls this file.  Three checks in
 * health.sql repeat some of the rules.  Functions here take no locks.  The checks raise
 * an error if the caller must not use the key, or must not use it like this.
 */
#include "postgres.h"

#include "access/xact.h"
#include "port/pg_bitutils.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

static IdemTableCache keys_cache;

const IdemTableDef idem_keyrow_def = {IDEM_DECLARED_TABLE_keys, .cache = &keys_cache};

void
idem_keyrow_open(IdemTable *table, LOCKMODE lockmode)
{
	idem_table_open(table, &idem_keyrow_def, lockmode);
}

/* Does the row have the key? */
bool
idem_keyrow_has_key(TupleTableSlot *row, const IdemKey *key)
{
	return idem_row_varlena_equals(row, IDEM_KEYS_KEY, key->key) &&
		idem_row_varlena_equals(row, IDEM_KEYS_SCOPE, key->scope);
}

/* The same for a lookup.  If the row has another key of the same hash, note its nth. */
static bool
matches_key(TupleTableSlot *row, IdemLookup *lookup)
{
	int nth;

	if (idem_keyrow_has_key(row, lookup->key))
		return true;
	nth = idem_row_int16(row, IDEM_KEYS_NTH);
	if (nth >= 0 && nth < IDEM_MAX_SAME_HASH)
		lookup->others |= (uint32) 1 << nth;
	return false;
}

/* Look up a key of this database; M2: a key of another shard raises an error */
IdemLookup
idem_keyrow_lookup(IdemTable *table, const IdemKey *key)
{
	IdemLookup lookup = {.index = table->pkey,
						 .value = Int64GetDatum(idem_hash_name(key->scope, key->key)),
						 .equal = F_INT8EQ,
						 .matches = matches_key,
						 .key = key};

	idem_shard_check_key(key->scope, key->key);
	return lookup;
}

/* The least nth that no other key of the same hash has; the lookup has not found the key */
int
idem_keyrow_free_nth(const IdemLookup *lookup)
{
	if (lookup->others == PG_UINT32_MAX)
		ereport(ERROR,
				errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				errmsg("too many idempotency keys have the same hash"),
				errdetail("%d other keys have the same hash as this key.", IDEM_MAX_SAME_HASH),
				errhint("Use another key, or wait until keys with the same %s have expired.", "key_hash"));
	return pg_rightmost_one_pos32(~lookup->others);
}

StaticAssertDecl(IDEM_MAX_SAME_HASH == 32, "IdemLookup.others has a bit for each of them");

/*
 * The state of a key, from the other members of its row.  limit is the limit of attempts of the
 * caller, or 0: the higher one of this limit and the limit in the row counts.
 *
 * K2: a committed plain claim is finished, whether idem_finish() was called or not.
 * K6: a plain claim of this transaction is held, or finished after idem_finish().
 * K9: past its ttl a key counts as absent, but not while the transaction that
 * made a plain claim is open.
 * L1: a lease is live until lease_until.  Then it is parked, exhausted or free to be
 * taken over.
 * L7: a row without a deadline is a plain claim, never an expired lease.  An expired lease never
 * becomes finished by itself.  A parked lease has no ttl.
 */
IdemKeyStatus
idem_keyrow_judge(const IdemKeyRow *key, int limit, TimestampTz now)
{
	bool is_leased = key->lease_until != 0;
	bool is_finished = key->finished_at != 0;
	int max_attempts = Max(key->max_attempts, limit);

	if (!is_leased && key->is_mine)
		return is_finished ? IDEM_KEY_FINISHED : IDEM_KEY_HELD;
	if (is_leased && !is_finished)
	{
		if (key->lease_until > now)
			return IDEM_KEY_LIVE;
		if (key->park)
			return IDEM_KEY_PARKED;
	}
	if (key->expires_at <= now)
		return IDEM_KEY_GONE;
	if (is_finished || !is_leased)
		return IDEM_KEY_FINISHED;
	if (max_attempts != 0 && key->attempt >= max_attempts)
		return IDEM_KEY_EXHAUSTED;
	return IDEM_KEY_EXPIRED;
}

/*
 * Read a row that is committed or was written by this transaction, and the state of its key;
 * limit as for idem_keyrow_judge()
 */
void
idem_keyrow_read(TupleTableSlot *row, int limit, IdemKeyRow *key)
{
	memset(key, 0, sizeof(*key));
	key->row = row;
	key->is_mine = idem_row_is_mine(row);
	key->owner = idem_row_oid(row, IDEM_KEYS_OWNER);
	key->created_at = idem_row_timestamp(row, IDEM_KEYS_CREATED_AT);
	key->expires_at = idem_row_timestamp(row, IDEM_KEYS_EXPIRES_AT);
	key->finished_at = idem_row_timestamp(row, IDEM_KEYS_FINISHED_AT);
	key->token = idem_row_int64(row, IDEM_KEYS_TOKEN);
	key->lease_until = idem_row_timestamp(row, IDEM_KEYS_LEASE_UNTIL);
	if (key->lease_until != 0)
	{
		key->attempt = idem_row_int32(row, IDEM_KEYS_ATTEMPT);
		key->max_attempts = idem_row_int32(row, IDEM_KEYS_MAX_ATTEMPTS);
		key->park = idem_row_bool(row, IDEM_KEYS_PARK);
	}
	key->status = idem_keyrow_judge(key, limit, idem_clock_now());
}

/*
 * Copy the values of the answer out of the row; a result of JSON null differs from no result (K2)
 */
void
idem_keyrow_copy_values(IdemKeyRow *key)
{
	key->result = idem_row_jsonb(key->row, IDEM_KEYS_RESULT);
	if (key->lease_until != 0)
	{
		key->worker = idem_row_text(key->row, IDEM_KEYS_WORKER);
		key->checkpoint = idem_row_jsonb(key->row, IDEM_KEYS_CHECKPOINT);
	}
}

/*
 * Name of an answer or a state.  The key of an expired lease and a key past its ttl
 * have the same name: the next claim gets either of them.
 */
const char *
idem_keyrow_status_name(IdemKeyStatus status)
{
	switch (status)
	{
		case IDEM_KEY_CLAIMED:
			return "claimed";
		case IDEM_KEY_RESUMED:
			return "resumed";
		case IDEM_KEY_BUSY:
			return "busy";
		case IDEM_KEY_HELD:
			return "held";
		case IDEM_KEY_FINISHED:
			return "finished";
		case IDEM_KEY_PARKED:
			return "parked";
		case IDEM_KEY_EXHAUSTED:
			return "exhausted";
		case IDEM_KEY_LIVE:
			return "live";
		case IDEM_KEY_EXPIRED:
		case IDEM_KEY_GONE:
			return "expired";
	}
	pg_unreachable();
}

/* The role that owns the keys that this session claims: idem.owner, else the current user */
Oid
idem_keyrow_current_owner(void)
{
	Oid owner;

	if (idem_guc_owner[0] == '\0')
		return GetUserId();
	owner = get_role_oid(idem_guc_owner, true);
	if (!OidIsValid(owner))
		ereport(ERROR,
				errcode(ERRCODE_UNDEFINED_OBJECT),
				errmsg("role \"%s\" does not exist", idem_guc_owner),
				errdetail("The setting \"%s\" names this role.", "idem.owner"),
				errhint("Create the role, or reset \"%s\".", "idem.owner"));
	if (!member_can_set_role(GetUserId(), owner))
		ereport(ERROR,
				errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("permission denied to own keys as role \"%s\"", idem_guc_owner),
				errdetail("The current user cannot act as the role that \"%s\" names.", "idem.owner"),
				errhint("Grant the role to the current user, or reset \"%s\".", "idem.owner"));
	return owner;
}

/* A role without the privileges of the owner gets neither the result nor a second run */
void
idem_keyrow_check_owner(Oid owner)
{
	if (owner == idem_keyrow_current_owner() || has_privs_of_role(GetUserId(), owner))
		return;
	ereport(ERROR,
			errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			errmsg("idempotency key belongs to another role"),
			errdetail("The current user does not have the privileges of the role that claimed the key."),
			errhint("Use a scope of your own, share keys through a common role named in \"%s\", or SET ROLE to the owner.", "idem.owner"));
}

/* The digests in the column "request", see keys.h; NULL: it does not contain this one */
typedef struct RequestParts
{
	const char *handler;
	const char *payload;
} RequestParts;

static RequestParts
get_request_parts(bytea *request)
{
	Size len = VARSIZE_ANY_EXHDR(request);
	const char *data = VARDATA_ANY(request);
	RequestParts parts = {0};

	if (len == IDEM_HANDLER_LEN || len == IDEM_HANDLER_LEN + IDEM_DIGEST_LEN)
		parts.handler = data;
	if (len == IDEM_DIGEST_LEN || len == IDEM_HANDLER_LEN + IDEM_DIGEST_LEN)
		parts.payload = data + len - IDEM_DIGEST_LEN;
	return parts;
}

/*
 * Raise an error if the key was claimed with another request (K7).  Claims and leases have no
 * handler, so handlers are compared only if both have one.  A null payload of idem_call() differs
 * from every other payload.
 */
void
idem_keyrow_check_request(const IdemKeyRow *key, bytea *request)
{
	RequestParts given;
	RequestParts stored;
	bool handler_differs;

	if (request == NULL)
		return;
	given = get_request_parts(request);
	stored = get_request_parts(DatumGetByteaPP(idem_row_datum(key->row, IDEM_KEYS_REQUEST).value));
	if (stored.handler == NULL && stored.payload == NULL)
		return;
	handler_differs = given.handler != NULL && stored.handler != NULL &&
		memcmp(given.handler, stored.handler, IDEM_HANDLER_LEN) != 0;
	if (!handler_differs &&
		(given.payload == NULL || stored.payload == NULL ?
			 given.payload == stored.payload :
			 memcmp(given.payload, stored.payload, IDEM_DIGEST_LEN) == 0))
		return;
	idem_counters_add(IDEM_DATABASE_COUNTER_MISMATCHES);
	if (handler_differs)
		ereport(ERROR,
				errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
				errmsg("idempotency key was used with another handler"),
				errdetail("The key was first claimed " INT64_FORMAT " s ago; idem_call() has used it with another function.",
						  idem_clock_age(key->created_at)),
				errhint("Use different keys for different handlers. A function that was renamed or moved to another schema counts as another handler."));
	ereport(ERROR,
			errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
			errmsg("idempotency key was used with another request"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago; its request differs from this one.",
					  idem_clock_age(key->created_at)),
			errhint("Use a new key for a new request, and send the same request when you retry."));
}

pg_noreturn static void
raise_serialization_failure(const char *detail)
{
	ereport(ERROR,
			errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			errmsg("could not serialize access due to a concurrent change of an idempotency key"),
			errdetail("%s", detail),
			errhint("Retry the transaction."));
}

/*
 * K10: the answer is the latest committed state.  So under SERIALIZABLE the
 * snapshot of the transaction must show the row, as with ON CONFLICT.
 * Fetching the row with that snapshot also reports the read to SSI.  SSI
 * then detects a conflict with an open transaction that is changing the row.
 */
void
idem_keyrow_check_serializable(IdemTable *table, TupleTableSlot *row)
{
	ItemPointerData tid = row->tts_tid;

	if (IsolationIsSerializable() &&
		!table_tuple_fetch_row_version(table->heap, &tid, GetTransactionSnapshot(), row))
		raise_serialization_failure("The key was changed after this transaction took its snapshot.");
}

/*
 * K10: under SERIALIZABLE, a key that is absent now must not be visible to the
 * snapshot of the transaction, unless it is past its ttl.  The transaction that
 * removed it may have changed other rows as well, and this transaction does not
 * see these changes.
 *
 * The walk returns all row versions of the key, and each is tested with the
 * snapshot.  An index scan with the snapshot itself would make SSI lock a page of the
 * index, and claims of different keys would conflict.
 */
void
idem_keyrow_check_absent(IdemTable *table, IdemLookup *lookup)
{
	IdemLeafWalk walk;
	IdemKeyRow key;
	bool shown = false;

	if (!IsolationIsSerializable())
		return;
	idem_probe_walk(&walk, table, lookup, SnapshotAny);
	while (!shown && idem_leaf_next_row(&walk))
	{
		if (!table_tuple_satisfies_snapshot(table->heap, walk.row, GetTransactionSnapshot()) ||
			!lookup->matches(walk.row, lookup))
			continue;
		idem_keyrow_read(walk.row, 0, &key);
		shown = key.status != IDEM_KEY_GONE;
	}
	idem_leaf_end(&walk);
	if (shown)
		raise_serialization_failure("The key was removed after this transaction took its snapshot.");
}
