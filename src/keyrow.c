/*
 * keyrow.c
 *		A row of idem.keys: what it says, what it means, who may have it.
 *
 * The row read is always the one in the slot "found" of the table.  What a key
 * is like is judged here and nowhere else, off the row, its transaction and
 * the clock.  Only the views for people say the same once more, in SQL.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/predicate.h"
#include "utils/datetime.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "idem.h"

#define USECS_FROM_1970_TO_2000 \
	((int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY)

/* The clock by which keys and leases expire; never the start of the transaction */
TimestampTz
idem_keyrow_now(void)
{
	return GetCurrentTimestamp() + idem_guc_clock_offset * USECS_PER_SEC;
}

/*
 * The token of the next lease: higher than the last one of the key, wherever
 * the clock stands; and the time, so that it is higher than those of rows that
 * were lost or removed, too.
 */
int64
idem_keyrow_next_token(int64 last, TimestampTz now)
{
	return Max(last + 1, now + USECS_FROM_1970_TO_2000);
}

/* A table from before leases has not all columns */
static Datum
get_column(IdemKeyTable *table, AttrNumber attno, bool *isnull)
{
	*isnull = attno > RelationGetDescr(table->heap)->natts;
	return *isnull ? (Datum) 0 : slot_getattr(table->found, attno, isnull);
}

bool
idem_keyrow_isnull(IdemKeyTable *table, AttrNumber attno)
{
	bool isnull;

	(void) get_column(table, attno, &isnull);
	return isnull;
}

/* 0 stands for null in these three */
TimestampTz
idem_keyrow_timestamp(IdemKeyTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? 0 : DatumGetTimestampTz(value);
}

int
idem_keyrow_int32(IdemKeyTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? 0 : DatumGetInt32(value);
}

int64
idem_keyrow_token(IdemKeyTable *table)
{
	bool isnull;
	Datum value = get_column(table, IDEM_KEYS_TOKEN, &isnull);

	return isnull ? 0 : DatumGetInt64(value);
}

/* SHA-256 of the request, or NULL */
static bytea *
row_request(IdemKeyTable *table)
{
	bool isnull;
	Datum value = get_column(table, IDEM_KEYS_REQUEST, &isnull);

	return isnull ? NULL : DatumGetByteaPP(value);
}

/* Seconds since the time in that column */
int64
idem_keyrow_age(IdemKeyTable *table, AttrNumber since)
{
	int64 age = idem_keyrow_now() - idem_keyrow_timestamp(table, since);

	return Max(age, 0) / USECS_PER_SEC;
}

static bool
varlena_equal(struct varlena *a, struct varlena *b)
{
	return VARSIZE_ANY_EXHDR(a) == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), VARSIZE_ANY_EXHDR(a)) == 0;
}

static bool
text_equals(IdemKeyTable *table, AttrNumber attno, text *value)
{
	bool isnull;
	Datum stored = get_column(table, attno, &isnull);

	return !isnull && varlena_equal(DatumGetTextPP(stored), value);
}

/* Is it the row of this key? */
bool
idem_keyrow_is(IdemKeyTable *table, const IdemKey *key)
{
	return text_equals(table, IDEM_KEYS_KEY, key->key) &&
		text_equals(table, IDEM_KEYS_SCOPE, key->scope);
}

/*
 * Was the row made by this transaction?  One that is frozen was not, although
 * it keeps its xmin, which may be in use again.
 */
bool
idem_keyrow_is_mine(IdemKeyTable *table)
{
	HeapTupleHeader tuple = ExecFetchSlotHeapTuple(table->found, false, NULL)->t_data;

	return !HeapTupleHeaderXminFrozen(tuple) &&
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetRawXmin(tuple));
}

/* Has somebody locked the row, or had it locked? */
bool
idem_keyrow_is_locked(IdemKeyTable *table)
{
	return !(ExecFetchSlotHeapTuple(table->found, false, NULL)->t_data->t_infomask & HEAP_XMAX_INVALID);
}

/* Has this transaction removed the row, or put another version in its place? */
bool
idem_keyrow_is_replaced_by_me(IdemKeyTable *table)
{
	HeapTupleHeader tuple = ExecFetchSlotHeapTuple(table->found, false, NULL)->t_data;

	return !(tuple->t_infomask & HEAP_XMAX_INVALID) &&
		!HEAP_XMAX_IS_LOCKED_ONLY(tuple->t_infomask) &&
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetUpdateXid(tuple));
}

/* A row without a deadline is a plain claim, never a lease that ran out */
bool
idem_keyrow_is_leased(IdemKeyTable *table)
{
	return !idem_keyrow_isnull(table, IDEM_KEYS_LEASE_UNTIL);
}

bool
idem_keyrow_has_worker(IdemKeyTable *table, text *worker)
{
	return worker != NULL && text_equals(table, IDEM_KEYS_WORKER, worker);
}

static bool
is_parked_on_expiry(IdemKeyTable *table)
{
	bool isnull;
	Datum value = get_column(table, IDEM_KEYS_PARK, &isnull);

	return !isnull && DatumGetBool(value);
}

/*
 * State of a row that is committed or made by this transaction; max_attempts
 * is the limit of the caller, or 0.  The higher one of that and the row's counts.
 *
 * A plain claim does not expire under the transaction that holds it.  A lease
 * does not expire before it has run out, and not at all while it is parked.
 */
IdemStatus
idem_keyrow_judge(IdemKeyTable *table, int max_attempts)
{
	bool finished = !idem_keyrow_isnull(table, IDEM_KEYS_FINISHED_AT);
	bool leased = idem_keyrow_is_leased(table);
	TimestampTz now;

	if (!leased && idem_keyrow_is_mine(table))
		return finished ? IDEM_FINISHED : IDEM_HELD;

	now = idem_keyrow_now();
	if (leased && !finished)
	{
		if (idem_keyrow_timestamp(table, IDEM_KEYS_LEASE_UNTIL) > now)
			return IDEM_LIVE;
		if (is_parked_on_expiry(table))
			return IDEM_PARKED;
	}
	if (idem_keyrow_timestamp(table, IDEM_KEYS_EXPIRES_AT) <= now)
		return IDEM_GONE;
	/* a committed plain claim is finished, whether idem_finish() was called or not */
	if (finished || !leased)
		return IDEM_FINISHED;

	max_attempts = Max(max_attempts, idem_keyrow_int32(table, IDEM_KEYS_MAX_ATTEMPTS));
	if (max_attempts != 0 && idem_keyrow_int32(table, IDEM_KEYS_ATTEMPT) >= max_attempts)
		return IDEM_EXHAUSTED;
	return IDEM_EXPIRED;
}

/* The same for people, for a row that is not a lease, or a finished one */
const char *
idem_keyrow_state_name(TransactionId xmin, bool finished, TimestampTz expires_at)
{
	if (TransactionIdIsCurrentTransactionId(xmin))
		return finished ? "finished" : "held";
	return expires_at <= idem_keyrow_now() ? "expired" : "finished";
}

Oid
idem_keyrow_owner(IdemKeyTable *table)
{
	bool isnull;

	return DatumGetObjectId(get_column(table, IDEM_KEYS_OWNER, &isnull));
}

static Jsonb *
row_jsonb(IdemKeyTable *table, AttrNumber attno)
{
	bool isnull;
	Datum value = get_column(table, attno, &isnull);

	return isnull ? NULL : DatumGetJsonbPCopy(value);
}

static text *
row_worker(IdemKeyTable *table)
{
	bool isnull;
	Datum value = get_column(table, IDEM_KEYS_WORKER, &isnull);

	return isnull ? NULL : DatumGetTextPCopy(value);
}

void
idem_keyrow_read(IdemKeyTable *table, IdemStatus status, IdemRow *row)
{
	memset(row, 0, sizeof(*row));
	row->status = status;
	row->owner = idem_keyrow_owner(table);
	row->created_at = idem_keyrow_timestamp(table, IDEM_KEYS_CREATED_AT);
	row->expires_at = idem_keyrow_timestamp(table, IDEM_KEYS_EXPIRES_AT);
	row->finished_at = idem_keyrow_timestamp(table, IDEM_KEYS_FINISHED_AT);
	row->result = row_jsonb(table, IDEM_KEYS_RESULT);
	row->token = idem_keyrow_token(table);
	row->lease_until = idem_keyrow_timestamp(table, IDEM_KEYS_LEASE_UNTIL);
	if (row->lease_until == 0)
		return;
	row->attempt = idem_keyrow_int32(table, IDEM_KEYS_ATTEMPT);
	row->max_attempts = idem_keyrow_int32(table, IDEM_KEYS_MAX_ATTEMPTS);
	row->worker = row_worker(table);
	row->checkpoint = row_jsonb(table, IDEM_KEYS_CHECKPOINT);
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

/* A key stands for one request: with another one it is a mistake of the caller */
void
idem_keyrow_check_request(IdemKeyTable *table, bytea *request)
{
	bytea *stored = row_request(table);

	if (request == NULL || stored == NULL || varlena_equal(request, stored))
		return;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_REQUEST_MISMATCH),
			errmsg("idempotency key was used with another request"),
			errdetail("The key was claimed " INT64_FORMAT " s ago with a request that differs from this one.",
					  idem_keyrow_age(table, IDEM_KEYS_CREATED_AT)),
			errhint("Use a new key for a new request, and send the same request when you retry."));
}

/*
 * SERIALIZABLE: the answer is the latest committed state.  So the row found
 * has to be one that the snapshot of the transaction shows too, as ON CONFLICT
 * has it; and SSI is told that it was read.
 */
void
idem_keyrow_check_serializable(IdemKeyTable *table)
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

static bool
result_equals(IdemKeyTable *table, Jsonb *result)
{
	bool isnull;
	Datum stored = get_column(table, IDEM_KEYS_RESULT, &isnull);

	if (isnull || result == NULL)
		return isnull && result == NULL;
	return compareJsonbContainers(&DatumGetJsonbP(stored)->root, &result->root) == 0;
}

/* Is the row finished?  Then with this result, or it is an error. */
bool
idem_keyrow_check_finished(IdemKeyTable *table, Jsonb *result)
{
	if (idem_keyrow_isnull(table, IDEM_KEYS_FINISHED_AT))
		return false;
	if (result_equals(table, result))
		return true;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished with another result"),
			errdetail("The key was claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_keyrow_age(table, IDEM_KEYS_CREATED_AT),
					  idem_keyrow_age(table, IDEM_KEYS_FINISHED_AT)),
			errhint("Finish a key once, or again with an equal result."));
}

/* For what can only be done before the finish */
void
idem_keyrow_reject_finished(IdemKeyTable *table, const char *hint)
{
	if (idem_keyrow_isnull(table, IDEM_KEYS_FINISHED_AT))
		return;
	ereport(ERROR,
			errcode(ERRCODE_IDEM_ALREADY_FINISHED),
			errmsg("idempotency key is already finished"),
			errdetail("The key was claimed " INT64_FORMAT " s ago and finished " INT64_FORMAT " s ago.",
					  idem_keyrow_age(table, IDEM_KEYS_CREATED_AT),
					  idem_keyrow_age(table, IDEM_KEYS_FINISHED_AT)),
			errhint("%s", hint));
}

void
idem_keyrow_set(TupleTableSlot *slot, AttrNumber attno, Datum value)
{
	slot->tts_values[attno - 1] = value;
	slot->tts_isnull[attno - 1] = false;
}

void
idem_keyrow_clear(TupleTableSlot *slot, AttrNumber attno)
{
	slot->tts_isnull[attno - 1] = true;
}

/* The row to be written: what was found, to be changed before it is stored */
TupleTableSlot *
idem_keyrow_copy(IdemKeyTable *table)
{
	bool with_lease = !idem_keyrow_isnull(table, IDEM_KEYS_TOKEN);
	int natts = with_lease ? IDEM_KEYS_NATTS : IDEM_KEYS_PLAIN_NATTS;
	TupleTableSlot *slot = idem_keytable_new_row(table, with_lease);

	slot_getallattrs(table->found);
	memcpy(slot->tts_values, table->found->tts_values, natts * sizeof(Datum));
	memcpy(slot->tts_isnull, table->found->tts_isnull, natts * sizeof(bool));
	return slot;
}

/* The same with the columns that a finish sets */
TupleTableSlot *
idem_keyrow_copy_finished(IdemKeyTable *table, Jsonb *result, TimestampTz now)
{
	TupleTableSlot *slot = idem_keyrow_copy(table);

	idem_keyrow_set(slot, IDEM_KEYS_FINISHED_AT, TimestampTzGetDatum(now));
	if (result != NULL)
		idem_keyrow_set(slot, IDEM_KEYS_RESULT, JsonbPGetDatum(result));
	return slot;
}
