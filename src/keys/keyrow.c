/*
 * keyrow.c
 *		A row of idem.keys: the state of its key, and the checks before it is used.
 *
 * The state of a key follows from its row, from the transaction that wrote the row
 * and from the clock.  In C this is the only file that decides it.  The view
 * idem.key_status calls idem_key_state(), which calls this file.  Three checks in
 * health.sql repeat some of the rules.  Functions here read the row found and take no
 * locks.  The checks here raise an error if the caller must not use the key, or must
 * not use it like this.
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

/* A row without a deadline is a plain claim, never an expired lease (L7) */
bool
idem_keyrow_is_leased(IdemTable *table)
{
	return !idem_row_isnull(table->found, IDEM_KEYS_LEASE_UNTIL);
}

/*
 * The state of a key whose row is committed or was written by this transaction.
 *
 * K2: a committed plain claim is finished, whether idem_finish() was called or not.
 * K6: a plain claim of this transaction is held, or finished after idem_finish().
 * K9: past its ttl a key counts as absent, but not while the transaction that
 * made a plain claim is open.
 * L1: a lease is live until lease_until.  Then it is parked, exhausted or free to be
 * taken over.
 * L7: an expired lease never becomes finished by itself.  A parked lease has no ttl.
 */
IdemKeyStatus
idem_keyrow_judge_facts(const IdemKeyFacts *facts)
{
	if (!facts->is_leased && facts->is_mine)
		return facts->is_finished ? IDEM_KEY_FINISHED : IDEM_KEY_HELD;
	if (facts->is_leased && !facts->is_finished)
	{
		if (facts->lease_until > facts->now)
			return IDEM_KEY_LIVE;
		if (facts->park)
			return IDEM_KEY_PARKED;
	}
	if (facts->expires_at <= facts->now)
		return IDEM_KEY_GONE;
	if (facts->is_finished || !facts->is_leased)
		return IDEM_KEY_FINISHED;
	if (facts->max_attempts != 0 && facts->attempt >= facts->max_attempts)
		return IDEM_KEY_EXHAUSTED;
	return IDEM_KEY_EXPIRED;
}

/*
 * The state of the row found.  max_attempts is the limit of the caller, or 0.  The
 * higher one of this limit and the limit in the row counts.
 */
IdemKeyStatus
idem_keyrow_judge(IdemTable *table, int max_attempts)
{
	IdemKeyFacts facts = {
		.now = idem_clock_now(),
		.is_mine = idem_row_is_mine(table->found),
		.is_finished = !idem_row_isnull(table->found, IDEM_KEYS_FINISHED_AT),
		.is_leased = idem_keyrow_is_leased(table),
		.expires_at = idem_row_timestamp(table->found, IDEM_KEYS_EXPIRES_AT),
		.max_attempts = max_attempts};

	if (facts.is_leased)
	{
		facts.lease_until = idem_row_timestamp(table->found, IDEM_KEYS_LEASE_UNTIL);
		facts.park = idem_row_bool(table->found, IDEM_KEYS_PARK);
		facts.attempt = idem_row_int32(table->found, IDEM_KEYS_ATTEMPT);
		facts.max_attempts = Max(max_attempts, idem_row_int32(table->found, IDEM_KEYS_MAX_ATTEMPTS));
	}
	return idem_keyrow_judge_facts(&facts);
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

/* Copy the row found; a result of JSON null differs from no result (K2) */
void
idem_keyrow_read(IdemTable *table, IdemKeyStatus status, IdemKeyInfo *info)
{
	memset(info, 0, sizeof(*info));
	info->status = status;
	info->owner = idem_row_oid(table->found, IDEM_KEYS_OWNER);
	info->created_at = idem_row_timestamp(table->found, IDEM_KEYS_CREATED_AT);
	info->expires_at = idem_row_timestamp(table->found, IDEM_KEYS_EXPIRES_AT);
	info->finished_at = idem_row_timestamp(table->found, IDEM_KEYS_FINISHED_AT);
	info->result = idem_row_jsonb(table->found, IDEM_KEYS_RESULT);
	info->token = idem_row_int64(table->found, IDEM_KEYS_TOKEN);
	info->lease_until = idem_row_timestamp(table->found, IDEM_KEYS_LEASE_UNTIL);
	if (info->lease_until == 0)
		return;
	info->attempt = idem_row_int32(table->found, IDEM_KEYS_ATTEMPT);
	info->max_attempts = idem_row_int32(table->found, IDEM_KEYS_MAX_ATTEMPTS);
	info->worker = idem_row_text(table->found, IDEM_KEYS_WORKER);
	info->checkpoint = idem_row_jsonb(table->found, IDEM_KEYS_CHECKPOINT);
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

/* A null payload of idem_call() differs from every other payload */
static bool
payload_differs(const RequestParts *a, const RequestParts *b)
{
	if (a->payload == NULL || b->payload == NULL)
		return a->payload != b->payload;
	return memcmp(a->payload, b->payload, IDEM_DIGEST_LEN) != 0;
}

/* Claims and leases have no handler, so handlers are compared only if both have one */
static bool
handler_differs(const RequestParts *a, const RequestParts *b)
{
	return a->handler != NULL && b->handler != NULL &&
		memcmp(a->handler, b->handler, IDEM_HANDLER_LEN) != 0;
}

/* Raise an error if the key was claimed with another request (K7) */
void
idem_keyrow_check_request(IdemTable *table, bytea *request)
{
	RequestParts given;
	RequestParts stored;

	if (request == NULL)
		return;
	given = get_request_parts(request);
	stored = get_request_parts(DatumGetByteaPP(idem_row_datum(table->found, IDEM_KEYS_REQUEST).value));
	if (stored.handler == NULL && stored.payload == NULL)
		return;
	if (handler_differs(&given, &stored))
	{
		idem_counters_add(IDEM_DATABASE_COUNTER_MISMATCHES);
		ereport(ERROR,
				errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
				errmsg("idempotency key was used with another handler"),
				errdetail("The key was first claimed " INT64_FORMAT " s ago; idem_call() has used it with another function.",
						  idem_row_age(table->found, IDEM_KEYS_CREATED_AT)),
				errhint("Use different keys for different handlers. A function that was renamed or moved to another schema counts as another handler."));
	}
	if (!payload_differs(&given, &stored))
		return;
	idem_counters_add(IDEM_DATABASE_COUNTER_MISMATCHES);
	ereport(ERROR,
			errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
			errmsg("idempotency key was used with another request"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago; its request differs from this one.",
					  idem_row_age(table->found, IDEM_KEYS_CREATED_AT)),
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
 * snapshot of the transaction must show the row found, as with ON CONFLICT.
 * Fetching the row with that snapshot also reports the read to SSI.  SSI
 * then detects a conflict with an open transaction that is changing the row.
 */
void
idem_keyrow_check_serializable(IdemTable *table)
{
	ItemPointerData tid = table->found->tts_tid;

	if (IsolationIsSerializable() &&
		!table_tuple_fetch_row_version(table->heap, &tid, GetTransactionSnapshot(), table->found))
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
	bool shown = false;

	if (!IsolationIsSerializable())
		return;
	idem_probe_walk(&walk, table, lookup, SnapshotAny);
	while (!shown && idem_leaf_next_row(&walk))
		shown =
			table_tuple_satisfies_snapshot(table->heap, table->found, GetTransactionSnapshot()) &&
			lookup->matches(walk.row, lookup) && idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;
	idem_leaf_end(&walk);
	if (shown)
		raise_serialization_failure("The key was removed after this transaction took its snapshot.");
}

static bool
result_equals(IdemTable *table, Jsonb *result)
{
	NullableDatum stored = idem_row_datum(table->found, IDEM_KEYS_RESULT);

	if (stored.isnull || result == NULL)
		return stored.isnull && result == NULL;
	return compareJsonbContainers(&DatumGetJsonbP(stored.value)->root, &result->root) == 0;
}

/* Is the row finished?  If it is, with another result, raise an error (K11, L3). */
bool
idem_keyrow_check_finished(IdemTable *table, Jsonb *result)
{
	if (idem_row_isnull(table->found, IDEM_KEYS_FINISHED_AT))
		return false;
	if (result_equals(table, result))
		return true;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished with another result"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_row_age(table->found, IDEM_KEYS_CREATED_AT),
					  idem_row_age(table->found, IDEM_KEYS_FINISHED_AT)),
			errhint("Finish a key once, or again with an equal result."));
}

/* Raise an error if the row is finished: the caller cannot change it any more (K11, L3) */
void
idem_keyrow_reject_finished(IdemTable *table, const char *hint)
{
	if (idem_row_isnull(table->found, IDEM_KEYS_FINISHED_AT))
		return;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_row_age(table->found, IDEM_KEYS_CREATED_AT),
					  idem_row_age(table->found, IDEM_KEYS_FINISHED_AT)),
			errhint("%s", hint));
}

/* Start a row to be written as a copy of the row found, and set the columns of a finish */
TupleTableSlot *
idem_keyrow_copy_finished(IdemTable *table, Jsonb *result, TimestampTz now)
{
	TupleTableSlot *slot = idem_write_copy_row(table, table->found);

	idem_row_set(slot, IDEM_KEYS_FINISHED_AT, TimestampTzGetDatum(now));
	if (result != NULL)
		idem_row_set(slot, IDEM_KEYS_RESULT, JsonbPGetDatum(result));
	return slot;
}
