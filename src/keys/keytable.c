/*
 * keytable.c
 *		The definition of table idem.keys, how to look a key up, and which hash to lock.
 */
#include "postgres.h"

#include "access/stratnum.h"
#include "catalog/pg_type.h"
#include "utils/fmgroids.h"

#include "keys/keys.h"

/* Types of the columns, in the order of IdemKeyColumn */
static const Oid column_types[IDEM_KEYS_NATTS] = {
	TIMESTAMPTZOID, TIMESTAMPTZOID, REGROLEOID, TEXTOID,
	TEXTOID, BYTEAOID, TIMESTAMPTZOID, JSONBOID,
	INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, INT4OID,
	INT4OID, BOOLOID, TEXTOID, JSONBOID,
	TIMESTAMPTZOID, TIMESTAMPTZOID};

static IdemTableCache keys_cache;

static const IdemTableDef keys_def = {
	.name = "keys",
	.types = column_types,
	.natts = IDEM_KEYS_NATTS,
	.short_natts = IDEM_KEYS_PLAIN_NATTS,
	.nullable = IDEM_COLUMNS_FROM(IDEM_KEYS_REQUEST),
	.pkey = {IDEM_KEYS_KEY, IDEM_KEYS_SCOPE},
	.npkey = 2,
	.pkey_hint = "Run ALTER TABLE idem.keys ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope).",
	.cache = &keys_cache};

void
idem_keytable_open(IdemTable *table, LOCKMODE lockmode)
{
	idem_table_open(table, &keys_def, lockmode);
}

/*
 * The hash to lock while an entry for the key is added to the unique index (K3).
 * An insert holds the lock from the probe that finds the key absent until the entry
 * exists.  An update that needs new entries holds it while it updates.  So a backend
 * that holds the lock misses no row.  INSERT ... ON CONFLICT needs no such lock,
 * but it writes a second WAL record for each row.
 */
int64
idem_keytable_hash(const IdemKey *key)
{
	return idem_hash_name(key->scope, key->key);
}

IdemLookup
idem_keytable_lookup(IdemTable *table, const IdemKey *key)
{
	IdemLookup lookup = {.index = table->pkey, .nkeys = 2};

	ScanKeyInit(&lookup.keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(key->key));
	ScanKeyInit(&lookup.keys[1], 2, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(key->scope));
	return lookup;
}
