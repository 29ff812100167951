/*
 * subscription.c
 *		Is one of our tables written by a subscription of this database?
 *
 * The publisher decides what becomes of such rows.  If the subscriber removed
 * an expired one, it would drop the update by which the publisher has the key
 * taken over, and the key would run again after the cutover.  So cleanup skips
 * such a table (W1), and functions that write it are refused, as on a standby
 * (K13).  A disabled subscription counts as well: it may be enabled again, and
 * go on where it was.
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/pg_subscription_rel.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "idem.h"

/* Counts changes of pg_subscription_rel that this backend has heard of */
static uint64 nchanges = 0;

/*
 * As of now, whatever this backend has heard of: a row that a subscription has
 * brought is in no snapshot that was taken before this returned false.
 */
bool
idem_subscription_writes(Oid relid)
{
	Relation rel = table_open(SubscriptionRelRelationId, AccessShareLock);
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	ScanKeyData key;
	SysScanDesc scan;
	bool found;

	ScanKeyInit(&key, Anum_pg_subscription_rel_srrelid, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(relid));
	scan = systable_beginscan(rel, SubscriptionRelSrrelidSrsubidIndexId, true, snapshot, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return found;
}

static void
note_change(Datum arg, SysCacheIdentifier cacheid, uint32 hashvalue)
{
	nchanges++;
}

/*
 * Raise an error if a subscription writes the table; looks again only if
 * pg_subscription_rel has changed (K13).  The caller has the table open: def->relid
 * may be invalid again, if opening it has shown that the table has changed.
 */
void
idem_subscription_refuse(IdemTableDef *def, Oid relid)
{
	uint64 now = nchanges;

	if (now == 0)
	{
		CacheRegisterSyscacheCallback(SUBSCRIPTIONRELMAP, note_change, (Datum) 0);
		now = nchanges = 1;
	}
	if (def->unsubscribed_at == now)
		return;
	if (idem_subscription_writes(relid))
		ereport(ERROR,
				errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				errmsg("table \"idem.%s\" is written by a subscription", def->name),
				errdetail("Until the cutover its rows are the publisher's."),
				errhint("Use the publisher, or drop the subscription when the publisher takes no more writes."));
	def->unsubscribed_at = now;
}
