/*
 * holder.c
 *		SQL function that tells who holds a key: idem_holder.
 *
 * It reads the latest state of the key, takes no lock and waits for no transaction, and works
 * on a standby.  A key is held by an open transaction that has claimed it, or changes its
 * row; by a lease; and by an open transaction that has fenced the lease (H3).
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "keys/keys.h"

IDEM_FUNCTION(idem_holder);

/* The version of the row of the key that another open transaction has inserted */
typedef struct OpenVersion
{
	TransactionId xid; /* invalid: there is none */
	Oid owner;
	bool is_leased;
	bool is_later; /* it replaces a committed version */
} OpenVersion;

/* H3: the role that owns the key may ask, and those that may read idem.key_status */
static void
check_owner(Oid owner)
{
	if (!idem_holders_may_read("key_status"))
		idem_keyrow_check_owner(owner);
}

static void
put_row(IdemAnswer *answer, const char *kind, const IdemHolder *holder, IdemTable *lease,
		const char *detail, const char *fix)
{
	idem_answer_string(answer, Anum_holder_result_kind, kind);
	if (holder != NULL)
	{
		if (holder->pid != 0)
			idem_answer_int32(answer, Anum_holder_result_pid, holder->pid);
		idem_answer_string(answer, Anum_holder_result_application_name, holder->application_name);
		idem_answer_optional_time(answer, Anum_holder_result_since, holder->since);
	}
	if (lease != NULL)
	{
		idem_answer_time(answer, Anum_holder_result_since,
						 idem_row_timestamp(lease->found, IDEM_KEYS_LEASED_AT));
		if (!idem_row_isnull(lease->found, IDEM_KEYS_WORKER))
			idem_answer_text(answer, Anum_holder_result_worker,
							 idem_row_text(lease->found, IDEM_KEYS_WORKER));
		idem_answer_time(answer, Anum_holder_result_lease_until,
						 idem_row_timestamp(lease->found, IDEM_KEYS_LEASE_UNTIL));
	}
	idem_answer_string(answer, Anum_holder_result_detail, idem_show_text(detail));
	idem_answer_string(answer, Anum_holder_result_fix, fix);
	idem_answer_put(answer);
}

/* H3: an open transaction */
static void
put_transaction(IdemAnswer *answer, const char *kind, const IdemHolder *holder, const char *what)
{
	put_row(answer, kind, holder, NULL, psprintf("%s %s", what, idem_holders_describe(holder)),
			idem_holders_fix(holder));
}

/* Keep what matters of the row found, which this transaction has written */
static void
read_version(IdemTable *table, TransactionId xid, OpenVersion *version)
{
	version->xid = xid;
	version->owner = idem_row_oid(table->found, IDEM_KEYS_OWNER);
	version->is_leased = !idem_row_isnull(table->found, IDEM_KEYS_LEASE_UNTIL);
	version->is_later = idem_row_is_later_version(table->found);
}

/* Find the version of the key that is not committed, and what it says */
static void
find_open(IdemTable *table, IdemLookup *lookup, OpenVersion *open)
{
	SnapshotData dirty;
	IdemLeafWalk walk;

	memset(open, 0, sizeof(*open));
	InitDirtySnapshot(dirty);
	idem_probe_walk(&walk, table, lookup, &dirty);
	while (!TransactionIdIsValid(open->xid) && idem_leaf_next_row(&walk))
	{
		if (!TransactionIdIsValid(dirty.xmin) || !lookup->matches(table->found, lookup))
			continue;
		read_version(table, dirty.xmin, open);
	}
	idem_leaf_end(&walk);
}

static const char *
describe_version(const OpenVersion *open)
{
	if (!open->is_leased)
		return "An open transaction has claimed the key.";
	return open->is_later ? "An open transaction has taken, renewed or finished the lease." :
							"An open transaction has leased the key.";
}

/* A command that ends the lease of the row found, for the role that owns it and for operators */
static char *
make_lease_fix(IdemTable *table, const IdemKey *key, IdemKeyStatus state)
{
	char *name = idem_show_literal(text_to_cstring(key->key));
	char *scope = idem_show_literal(text_to_cstring(key->scope));

	if (!has_privs_of_role(GetUserId(), idem_row_oid(table->found, IDEM_KEYS_OWNER)))
		return psprintf("SELECT pg_catalog.idem_forget(%s, scope => %s);", name, scope);
	if (state != IDEM_KEY_EXHAUSTED)
		return psprintf("SELECT pg_catalog.idem_release(%s, " INT64_FORMAT ", scope => %s);", name,
						idem_row_int64(table->found, IDEM_KEYS_TOKEN), scope);
	/* the lease of this command is an attempt, too */
	return psprintf("SELECT pg_catalog.idem_release(%s, (pg_catalog.idem_lease(%s, '1 s', max_attempts => %d, scope => %s)).token, scope => %s);",
					name, name, idem_row_int32(table->found, IDEM_KEYS_ATTEMPT) + 4, scope, scope);
}

/* The row found has a lease that is not finished */
static void
put_lease(IdemAnswer *answer, IdemTable *table, const IdemKey *key, IdemKeyStatus state)
{
	char *fix = make_lease_fix(table, key, state);

	if (state == IDEM_KEY_LIVE)
		put_row(answer, "lease", NULL, table, "A worker has a lease of the key.", fix);
	else if (state == IDEM_KEY_PARKED)
		put_row(answer, "lease", NULL, table, "The lease has expired, and the key is parked: an operator must decide whether the work happened.", fix);
	else if (state == IDEM_KEY_EXHAUSTED)
		put_row(answer, "lease", NULL, table, "The lease of the last attempt has expired.", fix);
}

/* What a transaction does that has this lock on the row of the key */
static void
put_lock(IdemAnswer *answer, IdemTable *table, const IdemRowLock *lock, const OpenVersion *open)
{
	IdemHolder holder;

	if (!idem_holders_find(lock->xid, &holder))
		return;
	if (lock->status != MultiXactStatusUpdate && lock->status != MultiXactStatusNoKeyUpdate)
		put_transaction(answer, "fence", &holder, "An open transaction has locked the key, as a fence does.");
	else if (TransactionIdIsValid(open->xid))
		put_transaction(answer, "claim", &holder, describe_version(open));
	else
		put_transaction(answer, "claim", &holder, "An open transaction is removing the key.");
}

/* The row found is committed, or this transaction has written it */
static void
put_holders(IdemAnswer *answer, IdemTable *table, const IdemKey *key, const OpenVersion *open)
{
	IdemKeyRow row;
	IdemKeyStatus state;
	bool mine = idem_row_is_mine(table->found);
	OpenVersion version;
	IdemRowLocks locks;
	IdemHolder holder;

	idem_keyrow_read(table->found, 0, &row);
	state = row.status;
	if (TransactionIdIsValid(open->xid))
		check_owner(open->owner);
	else if (state != IDEM_KEY_GONE)
		check_owner(idem_row_oid(table->found, IDEM_KEYS_OWNER));
	if (mine && idem_holders_find(GetTopTransactionId(), &holder))
	{
		read_version(table, GetTopTransactionId(), &version);
		put_transaction(answer, "claim", &holder, describe_version(&version));
	}
	idem_row_list_locks(table->found, &locks);
	for (int i = 0; i < locks.n; i++)
	{
		if (!mine || !TransactionIdEquals(locks.locks[i].xid, GetTopTransactionIdIfAny()))
			put_lock(answer, table, &locks.locks[i], open);
	}
	if (state == IDEM_KEY_LIVE || state == IDEM_KEY_PARKED || state == IDEM_KEY_EXHAUSTED)
		put_lease(answer, table, key, state);
}

/* Find out who holds the key; returns false if a transaction has ended meanwhile */
static bool
look_at_key(IdemAnswer *answer, IdemTable *table, const IdemKey *key)
{
	IdemLookup lookup = idem_keyrow_lookup(table, key);
	IdemProbeResult probe;
	OpenVersion open;
	IdemHolder holder;

	find_open(table, &lookup, &open);
	idem_probe_latest(table, &lookup, &probe);
	if (probe.found == IDEM_FOUND_ROW)
		put_holders(answer, table, key, &open);
	else if (probe.found == IDEM_FOUND_OPEN)
	{
		if (!TransactionIdIsValid(open.xid))
			return false;
		check_owner(open.owner);
		if (!idem_holders_find(open.xid, &holder))
			return false;
		put_transaction(answer, "claim", &holder, describe_version(&open));
	}
	else
	{
		/* M4: the row may have gone with its slot meanwhile */
		(void) idem_shard_get_latest();
		idem_shard_check_key(key->scope, key->key);
	}
	return true;
}

Datum
idem_holder(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable table;
	IdemKey key;

	idem_fn_begin(fcinfo, &idem_holder_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_holder_signature);
	idem_args_key(fcinfo, 0, 1, &key);

	idem_keyrow_open(&table, AccessShareLock);
	idem_holders_refresh();
	while (!look_at_key(&answer, &table, &key))
		CHECK_FOR_INTERRUPTS();
	idem_table_close(&table);
	return (Datum) 0;
}
