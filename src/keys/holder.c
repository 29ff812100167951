/*
 * holder.c
 *		Facts about who holds a key (H3): an open transaction that has claimed it, or changes its
 *		row; a lease; an open transaction that has fenced the lease.
 *
 * idem_holder() puts them into words, in SQL (src/sql/why.sql).  This reads the latest state of the
 * key, takes no lock and waits for no transaction, and works on a standby.
 */
#include "postgres.h"

#include "access/xact.h"
#include "pgstat.h"

#include "keys/keys.h"

IDEM_FUNCTION(idem_key_facts);

/* H3: the role that owns the key may ask, and those that may read idem.key_status */
static void
check_owner(TupleTableSlot *row)
{
	if (!idem_holders_may_read("key_status"))
		idem_keyrow_check_owner(idem_row_oid(row, IDEM_KEYS_OWNER));
}

/* What a transaction does that has written this version of the row */
static const char *
name_version(TupleTableSlot *row)
{
	if (idem_row_isnull(row, IDEM_KEYS_LEASE_UNTIL))
		return "claimed";
	return idem_row_is_later_version(row) ? "changed lease" : "leased";
}

/*
 * The row is committed, or this transaction has written it.  Another open transaction may have
 * written another version.
 */
static void
put_holders(IdemAnswer *fact, TupleTableSlot *row, TupleTableSlot *open, const IdemKey *name)
{
	TransactionId mine = InvalidTransactionId;
	IdemKeyRow key;
	IdemRowLocks locks;

	idem_keyrow_read(row, 0, &key);
	idem_keyrow_copy_values(&key);
	if (!TTS_EMPTY(open))
		check_owner(open);
	else if (key.status != IDEM_KEY_GONE)
		check_owner(row);
	if (key.is_mine)
	{
		mine = GetTopTransactionId();
		idem_holders_put(fact, "claim", name_version(row), mine, 0);
	}
	idem_row_list_locks(row, &locks);
	for (int i = 0; i < locks.n; i++)
	{
		const IdemRowLock *lock = &locks.locks[i];

		if (TransactionIdEquals(lock->xid, mine))
			continue;
		if (!ISUPDATE_from_mxstatus(lock->status))
			idem_holders_put(fact, "fence", "locked", lock->xid, 0);
		else
			idem_holders_put(fact, "claim", TTS_EMPTY(open) ? "removes" : name_version(open),
							 lock->xid, 0);
	}
	if (key.status != IDEM_KEY_LIVE && key.status != IDEM_KEY_PARKED &&
		key.status != IDEM_KEY_EXHAUSTED)
		return;
	idem_answer_string(fact, Anum_idem_key_facts_fact, "lease");
	idem_answer_string(fact, Anum_idem_key_facts_does, idem_keyrow_status_name(key.status));
	idem_answer_time(fact, Anum_idem_key_facts_since, idem_row_timestamp(row, IDEM_KEYS_LEASED_AT));
	idem_answer_text(fact, Anum_idem_key_facts_worker, key.worker);
	idem_answer_time(fact, Anum_idem_key_facts_lease_until, key.lease_until);
	idem_answer_text(fact, Anum_idem_key_facts_in_scope, name->scope);
	idem_answer_int64(fact, Anum_idem_key_facts_token, key.token);
	idem_answer_int32(fact, Anum_idem_key_facts_attempt, key.attempt);
	idem_answer_bool(fact, Anum_idem_key_facts_is_owner,
					 has_privs_of_role(GetUserId(), key.owner));
	idem_answer_put(fact);
}

/* Find out who holds the key; returns false if a transaction has ended meanwhile */
static bool
look_at_key(IdemAnswer *fact, IdemTable *table, TupleTableSlot *open, const IdemKey *key)
{
	IdemLookup lookup = idem_keyrow_lookup(table, key);
	IdemProbeResult probe;

	idem_probe_find_open(table, &lookup, open);
	idem_probe_latest(table, &lookup, &probe);
	if (probe.found == IDEM_FOUND_NONE)
	{
		/* M4: the row may have gone with its slot meanwhile */
		(void) idem_shard_get_latest();
		idem_shard_check_key(key->scope, key->key);
		return true;
	}
	if (probe.found == IDEM_FOUND_ROW)
	{
		put_holders(fact, probe.row, open, key);
		return true;
	}
	if (TTS_EMPTY(open))
		return false;
	check_owner(open);
	return idem_holders_put(fact, "claim", name_version(open), idem_row_xmin(open), 0);
}

/* H3: the facts about who holds a key; none if the next claim gets it, or its stored result */
Datum
idem_key_facts(PG_FUNCTION_ARGS)
{
	IdemAnswer fact;
	IdemTable table;
	IdemKey key;
	TupleTableSlot *open;

	idem_fn_begin(fcinfo, &idem_key_facts_signature, NULL);
	idem_answer_begin(&fact, fcinfo, &idem_key_facts_signature);
	idem_args_key(fcinfo, 0, 1, &key);

	idem_keyrow_open(&table, AccessShareLock);
	open = table_slot_create(table.heap, NULL);
	/* the server keeps its list of processes until the transaction ends: read it anew */
	pgstat_clear_backend_activity_snapshot();
	while (!look_at_key(&fact, &table, open, &key))
		CHECK_FOR_INTERRUPTS();
	ExecDropSingleTupleTableSlot(open);
	idem_table_close(&table);
	return (Datum) 0;
}
