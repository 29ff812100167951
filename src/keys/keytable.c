/*
 * keytable.c
 *		The definition of table idem.keys, and how to find a key in it.
 *
 * A key is found by a 64-bit hash of scope and key: the index is less than half as
 * large as one on the text, and a search compares integers.  Different keys can have
 * the same hash, so the text of the row is compared, too.  "nth" distinguishes
 * such keys in the primary key: it is 0 for the first key of a hash, and for another key of
 * the same hash the least number that no such key has.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "port/pg_bitutils.h"
#include "utils/fmgroids.h"

#include "keys/keys.h"

/* Types of the columns, in the order of IdemKeyColumn */
static const Oid column_types[IDEM_KEYS_NATTS] = {
	TIMESTAMPTZOID, TIMESTAMPTZOID, INT8OID, REGROLEOID,
	INT2OID, TEXTOID, TEXTOID, BYTEAOID,
	TIMESTAMPTZOID, JSONBOID,
	INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, INT4OID,
	INT4OID, BOOLOID, TEXTOID, JSONBOID,
	TIMESTAMPTZOID, TIMESTAMPTZOID};

static IdemTableCache keys_cache;

const IdemTableDef idem_keytable_def = {
	.name = "keys",
	.types = column_types,
	.natts = IDEM_KEYS_NATTS,
	.nullable = IDEM_COLUMNS_FROM(IDEM_KEYS_FINISHED_AT),
	.pkey = {IDEM_KEYS_KEY_HASH, IDEM_KEYS_NTH},
	.npkey = 2,
	.pkey_command = "ALTER TABLE idem.keys ADD CONSTRAINT keys_pkey PRIMARY KEY (key_hash, nth)",
	.cache = &keys_cache};

void
idem_keytable_open(IdemTable *table, LOCKMODE lockmode)
{
	idem_table_open(table, &idem_keytable_def, lockmode);
}

/* Does the row found have the key? */
bool
idem_keytable_has_key(TupleTableSlot *row, const IdemKey *key)
{
	return idem_row_varlena_equals(row, IDEM_KEYS_KEY, key->key) &&
		idem_row_varlena_equals(row, IDEM_KEYS_SCOPE, key->scope);
}

/* The same for a lookup.  If the row has another key of the same hash, note its nth. */
static bool
matches_key(TupleTableSlot *row, IdemLookup *lookup)
{
	int nth;

	if (idem_keytable_has_key(row, lookup->key))
		return true;
	nth = idem_row_int16(row, IDEM_KEYS_NTH);
	if (nth >= 0 && nth < IDEM_MAX_SAME_HASH)
		lookup->others |= (uint32) 1 << nth;
	return false;
}

/* Look up a key of this database; M2: a key of another shard raises an error */
IdemLookup
idem_keytable_lookup(IdemTable *table, const IdemKey *key)
{
	IdemLookup lookup = {.index = table->pkey,
						 .value = Int64GetDatum(idem_hash_name(key->scope, key->key)),
						 .equal = F_INT8EQ,
						 .matches = matches_key,
						 .key = key};

	idem_shard_check_key(key->scope, key->key);
	return lookup;
}

/*
 * The hash of the key, to be locked while an entry for the key is added to the unique
 * index (K3).  An insert holds the lock from the probe that finds the key absent until
 * the entry exists.  An update that needs new entries holds it while it updates.  So
 * a backend that holds the lock misses no row.  INSERT ... ON CONFLICT needs no such
 * lock, but it writes a second WAL record for each row.
 */
int64
idem_keytable_hash(const IdemLookup *lookup)
{
	return DatumGetInt64(lookup->value);
}

/* Update a row that this transaction has locked, under the lock on its hash */
void
idem_keytable_update(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new)
{
	idem_write_update_hashed(table, old, new, idem_row_int64(old, IDEM_KEYS_KEY_HASH));
}

/* The least nth that no other key of the same hash has; the lookup has not found the key */
int
idem_keytable_free_nth(const IdemLookup *lookup)
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

/* A6: this transaction has ended the lease of the key, or has made it shorter */
void
idem_keytable_note_end(const IdemKey *key)
{
	idem_touched_end(idem_waiters_key(idem_hash_name(key->scope, key->key)));
}
