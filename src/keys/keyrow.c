/*
 * keyrow.c
 *		A row of idem.keys: what it means, and who may have it.
 *
 * What a key is like is judged here and nowhere else, off the row, its transaction and
 * the clock.  Only the views for people say the same once more, in SQL.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "keys/keys.h"

/* A row without a deadline is a plain claim, never a lease that ran out */
bool
idem_keyrow_is_leased(IdemTable *table)
{
	return !idem_row_isnull(table, IDEM_KEYS_LEASE_UNTIL);
}

/*
 * The state of a key that is committed or claimed by this transaction.  This is
 * the only place that decides it.
 *
 * A plain claim does not expire while the transaction that made it is open (K9).
 * A lease does not expire before its end, and not at all while it is parked (L1, L7).
 */
IdemKeyStatus
idem_keyrow_judge_facts(const IdemKeyFacts *facts)
{
	TimestampTz now;

	if (!facts->is_leased && facts->is_mine)
		return facts->is_finished ? IDEM_KEY_FINISHED : IDEM_KEY_HELD;

	now = idem_clock_now();
	if (facts->is_leased && !facts->is_finished)
	{
		if (facts->lease_until > now)
			return IDEM_KEY_LIVE;
		if (facts->park)
			return IDEM_KEY_PARKED;
	}
	if (facts->expires_at <= now)
		return IDEM_KEY_GONE;
	/* K2: a committed plain claim is finished, whether idem_finish() was called or not */
	if (facts->is_finished || !facts->is_leased)
		return IDEM_KEY_FINISHED;
	if (facts->max_attempts != 0 && facts->attempt >= facts->max_attempts)
		return IDEM_KEY_EXHAUSTED;
	return IDEM_KEY_EXPIRED;
}

/*
 * The state of the row found.  max_attempts is the limit of the caller, or 0; the
 * higher one of that and the limit in the row counts.
 */
IdemKeyStatus
idem_keyrow_judge(IdemTable *table, int max_attempts)
{
	IdemKeyFacts facts = {
		.is_mine = idem_row_is_mine(table),
		.is_finished = !idem_row_isnull(table, IDEM_KEYS_FINISHED_AT),
		.is_leased = idem_keyrow_is_leased(table),
		.expires_at = idem_row_timestamp(table, IDEM_KEYS_EXPIRES_AT),
		.max_attempts = max_attempts};

	if (facts.is_leased)
	{
		facts.lease_until = idem_row_timestamp(table, IDEM_KEYS_LEASE_UNTIL);
		facts.park = idem_row_bool(table, IDEM_KEYS_PARK);
		facts.attempt = idem_row_int32(table, IDEM_KEYS_ATTEMPT);
		facts.max_attempts = Max(max_attempts, idem_row_int32(table, IDEM_KEYS_MAX_ATTEMPTS));
	}
	return idem_keyrow_judge_facts(&facts);
}

/* The word for an answer or a state */
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

void
idem_keyrow_read(IdemTable *table, IdemKeyStatus status, IdemKeyInfo *info)
{
	memset(info, 0, sizeof(*info));
	info->status = status;
	info->owner = idem_row_oid(table, IDEM_KEYS_OWNER);
	info->created_at = idem_row_timestamp(table, IDEM_KEYS_CREATED_AT);
	info->expires_at = idem_row_timestamp(table, IDEM_KEYS_EXPIRES_AT);
	info->finished_at = idem_row_timestamp(table, IDEM_KEYS_FINISHED_AT);
	info->result = idem_row_jsonb(table, IDEM_KEYS_RESULT);
	info->token = idem_row_int64(table, IDEM_KEYS_TOKEN);
	info->lease_until = idem_row_timestamp(table, IDEM_KEYS_LEASE_UNTIL);
	if (info->lease_until == 0)
		return;
	info->attempt = idem_row_int32(table, IDEM_KEYS_ATTEMPT);
	info->max_attempts = idem_row_int32(table, IDEM_KEYS_MAX_ATTEMPTS);
	info->worker = idem_row_text(table, IDEM_KEYS_WORKER);
	info->checkpoint = idem_row_jsonb(table, IDEM_KEYS_CHECKPOINT);
}

/* The role that this session claims keys for */
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

/* The digests of handler and payload in what is stored of a request; NULL: there is none */
typedef struct RequestParts
{
	const char *handler;
	const char *payload;
} RequestParts;

static RequestParts
get_parts(bytea *request)
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

/* A null payload of idem_call() is one, too */
static bool
payload_differs(const RequestParts *a, const RequestParts *b)
{
	if (a->payload == NULL || b->payload == NULL)
		return a->payload != b->payload;
	return memcmp(a->payload, b->payload, IDEM_DIGEST_LEN) != 0;
}

/* Claims and leases have no handler */
static bool
handler_differs(const RequestParts *a, const RequestParts *b)
{
	return a->handler != NULL && b->handler != NULL &&
		memcmp(a->handler, b->handler, IDEM_HANDLER_LEN) != 0;
}

/* A key stands for one request (K7): with another one it is a mistake of the caller */
void
idem_keyrow_check_request(IdemTable *table, bytea *request)
{
	RequestParts given;
	RequestParts stored;

	if (request == NULL || idem_row_isnull(table, IDEM_KEYS_REQUEST))
		return;
	given = get_parts(request);
	stored = get_parts(DatumGetByteaPP(idem_row_datum(table, IDEM_KEYS_REQUEST).value));
	if (handler_differs(&given, &stored))
	{
		idem_counters_add(IDEM_DATABASE_COUNTER_MISMATCHES);
		ereport(ERROR,
				errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
				errmsg("idempotency key was used with another handler"),
				errdetail("The key was first claimed " INT64_FORMAT " s ago; idem_call() has used it for another function than this one.",
						  idem_row_age(table, IDEM_KEYS_CREATED_AT)),
				errhint("Use keys of their own for each handler. A function that was renamed or moved to another schema is another handler."));
	}
	if (!payload_differs(&given, &stored))
		return;
	idem_counters_add(IDEM_DATABASE_COUNTER_MISMATCHES);
	ereport(ERROR,
			errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
			errmsg("idempotency key was used with another request"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago; its request differs from this one.",
					  idem_row_age(table, IDEM_KEYS_CREATED_AT)),
			errhint("Use a new key for a new request, and send the same request when you retry."));
}

pg_noreturn static void
changed_since_snapshot(const char *detail)
{
	ereport(ERROR,
			errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			errmsg("could not serialize access due to a concurrent change of an idempotency key"),
			errdetail("%s", detail),
			errhint("Retry the transaction."));
}

/*
 * SERIALIZABLE (K10): the answer is the latest committed state.  So the row
 * found has to be one that the snapshot of the transaction shows too, as ON
 * CONFLICT has it.  Fetching it through that snapshot tells SSI that it was
 * read, and of a conflict with an open transaction that is changing it.
 */
void
idem_keyrow_check_serializable(IdemTable *table)
{
	ItemPointerData tid = table->found->tts_tid;

	if (IsolationIsSerializable() &&
		!table_tuple_fetch_row_version(table->heap, &tid, GetTransactionSnapshot(), table->found))
		changed_since_snapshot("The key was changed after this transaction took its snapshot.");
}

/*
 * The same for a key that is absent now: the snapshot must not show it, unless
 * past its ttl.  Whoever has removed it may have changed other rows as well, of
 * which this transaction sees nothing.
 *
 * All row versions of the key are looked at, without the snapshot: a scan with
 * it would lock a page of the index, and claims of different keys would conflict.
 */
void
idem_keyrow_check_absent(IdemTable *table, IdemLookup *lookup)
{
	IndexScanDesc scan;
	bool shown = false;

	if (!IsolationIsSerializable())
		return;
	scan = idem_probe_begin(table, lookup, SnapshotAny);
	while (!shown && index_getnext_slot(scan, ForwardScanDirection, table->found))
		shown =
			table_tuple_satisfies_snapshot(table->heap, table->found, GetTransactionSnapshot()) &&
			idem_keyrow_judge(table, 0) != IDEM_KEY_GONE;
	index_endscan(scan);
	if (shown)
		changed_since_snapshot("The key was removed after this transaction took its snapshot.");
}

static bool
result_equals(IdemTable *table, Jsonb *result)
{
	NullableDatum stored = idem_row_datum(table, IDEM_KEYS_RESULT);

	if (stored.isnull || result == NULL)
		return stored.isnull && result == NULL;
	return compareJsonbContainers(&DatumGetJsonbP(stored.value)->root, &result->root) == 0;
}

/* Is the row finished?  Then with this result, or it is an error. */
bool
idem_keyrow_check_finished(IdemTable *table, Jsonb *result)
{
	if (idem_row_isnull(table, IDEM_KEYS_FINISHED_AT))
		return false;
	if (result_equals(table, result))
		return true;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished with another result"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_row_age(table, IDEM_KEYS_CREATED_AT),
					  idem_row_age(table, IDEM_KEYS_FINISHED_AT)),
			errhint("Finish a key once, or again with an equal result."));
}

/* For what can only be done before the finish */
void
idem_keyrow_reject_finished(IdemTable *table, const char *hint)
{
	if (idem_row_isnull(table, IDEM_KEYS_FINISHED_AT))
		return;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished"),
			errdetail("The key was first claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_row_age(table, IDEM_KEYS_CREATED_AT),
					  idem_row_age(table, IDEM_KEYS_FINISHED_AT)),
			errhint("%s", hint));
}

/* The row to be written: what was found, to be changed before it is stored */
TupleTableSlot *
idem_keyrow_copy(IdemTable *table)
{
	return idem_write_copy_row(table, !idem_row_isnull(table, IDEM_KEYS_TOKEN));
}

/* The same with the columns that a finish sets */
TupleTableSlot *
idem_keyrow_copy_finished(IdemTable *table, Jsonb *result, TimestampTz now)
{
	TupleTableSlot *slot = idem_keyrow_copy(table);

	idem_row_set(slot, IDEM_KEYS_FINISHED_AT, TimestampTzGetDatum(now));
	if (result != NULL)
		idem_row_set(slot, IDEM_KEYS_RESULT, JsonbPGetDatum(result));
	return slot;
}
