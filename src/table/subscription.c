/*
 * subscription.c
 *		Find out whether a subscription of this database writes a table of idem.
 *
 * The rows of such a table belong to the publisher.  If the subscriber deleted
 * an expired key, its apply worker would find no row for the update by which a
 * claim on the publisher takes the key over, and the work of the key would run
 * again after the cutover.  So cleanup skips such a table (W1), and functions that write it
 * are refused, as on a standby (K13).  A disabled subscription counts as well:
 * it can be enabled and continue where it stopped.
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_subscription_rel.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "table/table.h"

/* Number of invalidations of pg_subscription_rel that this backend has received */
static uint64 nchanges = 0;

/*
 * Does a subscription write the table?  Reads the latest committed rows of
 * pg_subscription_rel, even if an invalidation has not arrived yet.
 * If this returns false, no snapshot taken before the call shows a row that a
 * subscription has written.
 */
bool
idem_subscription_writes(Oid relid)
{
	Relation rel = table_open(SubscriptionRelRelationId, AccessShareLock);
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	ScanKeyData key;
	SysScanDesc scan;
	bool found;

	ScanKeyInit(&key, Anum_pg_subscription_rel_srrelid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(rel, SubscriptionRelSrrelidSrsubidIndexId, true, snapshot, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return found;
}

/* W1, T6: does a subscription write one of these tables of idem?  The names end with NULL. */
bool
idem_subscription_writes_any(const char *const *tables)
{
	Oid schema = get_namespace_oid("idem", true);

	for (int i = 0; OidIsValid(schema) && tables[i] != NULL; i++)
	{
		Oid relid = get_relname_relid(tables[i], schema);

		if (OidIsValid(relid) && idem_subscription_writes(relid))
			return true;
	}
	return false;
}

static void
count_change(Datum arg, SysCacheIdentifier cacheid, uint32 hashvalue)
{
	nchanges++;
}

/* Is it known that no subscription writes the table? */
bool
idem_subscription_is_checked(const IdemTableDef *def)
{
	return nchanges != 0 && def->cache->unsubscribed_at == nchanges;
}

/*
 * Raise an error if a subscription writes the table (K13).  Reads the catalog again
 * only if pg_subscription_rel has changed since the last check.  The caller has opened
 * the table and passes its OID, because an invalidation may have cleared the OID in
 * the cache.
 */
void
idem_subscription_refuse(const IdemTableDef *def, Oid relid)
{
	uint64 seen = nchanges;

	if (seen == 0)
	{
		CacheRegisterSyscacheCallback(SUBSCRIPTIONRELMAP, count_change, (Datum) 0);
		seen = nchanges = 1;
	}
	if (def->cache->unsubscribed_at == seen)
		return;
	if (idem_subscription_writes(relid))
		ereport(ERROR,
				errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				errmsg("table \"idem.%s\" is written by a subscription", def->name),
				errdetail("Until the cutover its rows belong to the publisher."),
				errhint("Use the publisher, or drop the subscription when the publisher takes no more writes."));
	def->cache->unsubscribed_at = seen;
}
