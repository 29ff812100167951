/*
 * reset.c
 *		SQL function idem_reset: remove all keys, jobs and history, for test databases.
 *
 * The caller must be a superuser, or the setting idem.allow_reset must be on (V8).
 *
 * The tables are locked so that no other transaction can write them or lock rows in them.  If
 * another open transaction has done so before, and does not end within a second, the function
 * raises an error (V9).  The second is for cleanup, autovacuum, and transactions that are just
 * ending.  The rows are deleted, not truncated: a rollback brings them back, sessions that only
 * read are not disturbed, and few rows are deleted faster than new files are made.
 *
 * Fetches need no note about this (J14).  The rows are gone for them as after idem_complete().
 * No follow-up job becomes free, because all jobs are removed and no session can add one.  A
 * rollback need not wake sessions that wait for a queue: a look waits for the lock on idem.jobs.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "commands/dbcommands.h"
#include "lib/stringinfo.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/row/job.h"
#include "keys/keys.h"

IDEM_FUNCTION(idem_reset);

/* How long to wait for other transactions, in microseconds */
#define MAX_WAIT USECS_PER_SEC

/* The tables, in the order in which they are locked */
static const struct
{
	const char *name;
	void (*open)(IdemTable *table, LOCKMODE lockmode);
} tables[] = {
	{"keys", idem_keyrow_open},
	{"jobs", idem_jobtable_open},
	{"job_keys", idem_jobtable_open_keys},
	{"job_log", idem_jobtable_open_log}};

/* Raise the error for a table that other transactions use, and name their processes (V9) */
pg_noreturn static void
refuse_used_table(const char *name, Oid relid)
{
	LOCKTAG tag;
	int n;
	VirtualTransactionId *holders;
	StringInfoData pids;

	SET_LOCKTAG_RELATION(tag, MyDatabaseId, relid);
	holders = GetLockConflicts(&tag, ExclusiveLock, &n);
	initStringInfo(&pids);
	for (int i = 0; i < n; i++)
	{
		int pid = idem_compat_vxid_pid(holders[i]);

		/* a prepared transaction has no process */
		if (pid != 0)
			appendStringInfo(&pids, "%s%d", pids.len > 0 ? ", " : "", pid);
	}
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_IN_USE),
			errmsg("table \"idem.%s\" is used by another transaction", name),
			pids.len > 0 ?
				errdetail("Open transactions of these processes use it: %s.", pids.data) :
				errdetail("A prepared transaction uses it, or a transaction that has just ended."),
			errhint("End the transaction, or wait for it, and call idem_reset() again. pg_stat_activity shows what the process does."));
}

/*
 * Delete all rows, which no other transaction holds (V9); returns their number.  A row may be a job
 * (A5) or a key (A6) whose end sessions wait for.
 */
static int64
empty_table(void (*open)(IdemTable *table, LOCKMODE lockmode))
{
	IdemTable table;
	TupleTableSlot *row;
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	TableScanDesc scan;
	int64 removed = 0;

	open(&table, RowExclusiveLock);
	row = idem_table_row(&table);
	scan = table_beginscan(table.heap, snapshot, 0, NULL, SO_NONE);
	while (table_scan_getnextslot(scan, ForwardScanDirection, row))
	{
		CHECK_FOR_INTERRUPTS();
		if (open == idem_keyrow_open)
		{
			IdemKeyRow key;

			idem_keyrow_read(row, 0, &key);
			if (key.status == IDEM_KEY_HELD)
				idem_unfinished_add(IDEM_UNFINISHED_KEYS, -1);
			idem_touched_end(idem_waiters_key(idem_row_int64(row, IDEM_KEYS_KEY_HASH)));
		}
		else if (open == idem_jobtable_open)
		{
			IdemJob job;

			idem_job_read(&job, row);
			idem_touched_end(idem_waiters_job(job.job_id));
			idem_jobrow_note_unfetched(&job);
		}
		/* only this transaction can have locked the row; for that there is no wait */
		if (idem_table_delete(&table, row, true) != TM_Ok)
			elog(ERROR, "could not delete a row of idem.%s", table.def->name);
		removed++;
	}
	table_endscan(scan);
	idem_table_close(&table);
	UnregisterSnapshot(snapshot);
	return removed;
}

/* Remove everything, if the caller may (V8), and when no other transaction uses the tables (V9) */
Datum
idem_reset(PG_FUNCTION_ARGS)
{
	static uint32 wait_event = 0;
	TimestampTz until = GetCurrentTimestamp() + MAX_WAIT;
	Oid schema;
	int64 removed = 0;

	idem_fn_begin(fcinfo, &idem_reset_signature, "idem_reset()");
	if (!superuser() && !idem_guc_allow_reset)
		ereport(ERROR,
				errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("idem_reset() is not allowed in this database"),
				errdetail("It removes all keys and jobs, so that work of the past can run again. The setting \"%s\" is off.",
						  "idem.allow_reset"),
				errhint("In a test database, a superuser can run ALTER DATABASE %s SET idem.allow_reset = on. It takes effect for new sessions.",
						idem_show_name(get_database_name(MyDatabaseId))));

	/*
	 * this polls, because sessions would queue behind a wait in the lock manager, and an error
	 * would end it
	 */
	if (wait_event == 0)
		wait_event = WaitEventExtensionNew("IdemReset");
	schema = get_namespace_oid("idem", false);
	for (size_t i = 0; i < lengthof(tables); i++)
	{
		Oid relid = get_relname_relid(tables[i].name, schema);

		if (!OidIsValid(relid))
			idem_version_mismatch(psprintf("There is no table idem.%s.", tables[i].name));
		while (!ConditionalLockRelationOid(relid, ExclusiveLock))
		{
			if (GetCurrentTimestamp() >= until)
				refuse_used_table(tables[i].name, relid);
			(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 5,
							 wait_event);
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
	}
	for (size_t i = 0; i < lengthof(tables); i++)
		removed += empty_table(tables[i].open);
	PG_RETURN_INT64(removed);
}
