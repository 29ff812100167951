/*
 * batch.c
 *		One transaction of the worker.
 *
 * It has a snapshot of its own.  It locks its tables only if no other session holds or
 * awaits a conflicting lock, so DDL goes first (W2).  It touches only members of the
 * extension, as their owner, in a restricted security context (W8).
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "storage/lmgr.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "cleanup/cleanup.h"

/* W8: find a table in the schema idem that is a member of the extension */
static Oid
find_member(Oid extension, const char *table)
{
	Oid schema = get_namespace_oid("idem", true);
	Oid relid = OidIsValid(schema) ? get_relname_relid(table, schema) : InvalidOid;

	return OidIsValid(relid) && getExtensionOfObject(RelationRelationId, relid) == extension ?
		relid :
		InvalidOid;
}

static Oid
get_owner(Oid relid)
{
	HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid owner;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for relation %u", relid);
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);
	return owner;
}

/* W2: lock a table without waiting */
static IdemBatchResult
lock_table(Oid extension, const char *table, LOCKMODE mode)
{
	Oid relid = find_member(extension, table);

	if (!OidIsValid(relid))
		return IDEM_BATCH_MISSING;
	if (!ConditionalLockRelationOid(relid, mode))
		return IDEM_BATCH_LOCKED;
	/* another session may have dropped it before this one got the lock */
	return find_member(extension, table) == relid ? IDEM_BATCH_DONE : IDEM_BATCH_MISSING;
}

/* Lock the tables of a batch.  Sets owner to that of the first one. */
static IdemBatchResult
lock_tables(const IdemBatchTables *tables, Oid *owner)
{
	Oid extension = get_extension_oid("idem", true);
	IdemBatchResult result = OidIsValid(extension) ? IDEM_BATCH_DONE : IDEM_BATCH_MISSING;

	for (int i = 0; result == IDEM_BATCH_DONE && tables->written[i] != NULL; i++)
		result = lock_table(extension, tables->written[i], RowExclusiveLock);
	if (result == IDEM_BATCH_DONE && tables->read != NULL)
		result = lock_table(extension, tables->read, AccessShareLock);
	if (result == IDEM_BATCH_DONE)
		*owner = get_owner(find_member(extension, tables->written[0]));
	return result;
}

/* Run a batch in a transaction, unless one of its tables is locked or missing (W2, W8) */
IdemBatchResult
idem_batch_run(const char *activity, const IdemBatchTables *tables, void (*run)(void *arg),
			   void *arg)
{
	IdemBatchResult result;
	Oid user;
	int sec_context;
	Oid owner;

	pgstat_report_activity(STATE_RUNNING, activity);
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	idem_counters_buffer();
	PushActiveSnapshot(GetTransactionSnapshot());
	result = lock_tables(tables, &owner);
	if (result == IDEM_BATCH_DONE)
	{
		GetUserIdAndSecContext(&user, &sec_context);
		SetUserIdAndSecContext(owner, sec_context | SECURITY_RESTRICTED_OPERATION);
		run(arg);
		SetUserIdAndSecContext(user, sec_context);
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_stat(false);
	pgstat_report_activity(STATE_IDLE, NULL);
	return result;
}

/*
 * After an error: roll back, and copy the message to a buffer of IDEM_ERROR_TEXT_LEN bytes,
 * unless it has one already.
 */
void
idem_batch_recover(MemoryContext context, char *message)
{
	ErrorData *error;

	MemoryContextSwitchTo(context);
	error = CopyErrorData();
	FlushErrorState();
	AbortOutOfAnyTransaction();
	LWLockReleaseAll();
	MemoryContextSwitchTo(context);
	pgstat_report_activity(STATE_IDLE, NULL);
	if (message[0] == '\0')
		idem_exchange_copy_error(message, error->message);
	FreeErrorData(error);
}
