/*
 * holders.c
 *		Which process or prepared transaction an open transaction belongs to (H3).
 *
 * Rows and lock tables name transactions and processes.  The statistics of the server say
 * which process runs a transaction, the list of prepared transactions gives the others.  A
 * caller without the privileges that pg_stat_activity demands learns that there is a holder,
 * but not which one.  On a standby the holder is a transaction of the primary, so no process
 * is found.
 */
#include "postgres.h"

#include "access/subtrans.h"
#include "access/twophase.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "storage/procarray.h"
#include "utils/acl.h"
#include "utils/backend_status.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

#include "fn/fn.h"
#include "stats/stats.h"

/*
 * Read the list of processes anew.  The server keeps a copy of it until the transaction ends,
 * where later transactions are missing.
 */
void
idem_holders_refresh(void)
{
	pgstat_clear_backend_activity_snapshot();
}

/* May the current user see what this role's sessions do?  As in pg_stat_activity. */
static bool
may_see_session(Oid role)
{
	return has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS) ||
		has_privs_of_role(GetUserId(), role);
}

/* H3: fill in what the caller may see of the process */
static void
read_process(const PgBackendStatus *process, IdemHolder *holder)
{
	if (!may_see_session(process->st_userid))
	{
		holder->kind = IDEM_HOLDER_HIDDEN;
		return;
	}
	holder->kind = IDEM_HOLDER_PROCESS;
	holder->pid = process->st_procpid;
	holder->since = process->st_xact_start_timestamp;
	if (process->st_appname != NULL && process->st_appname[0] != '\0')
		holder->application_name = pstrdup(process->st_appname);
}

/* Find the process that runs the transaction, or that has this number; false if there is none */
static bool
find_process(TransactionId xid, int pid, IdemHolder *holder)
{
	for (int i = 1; i <= pgstat_fetch_stat_numbackends(); i++)
	{
		LocalPgBackendStatus *local = pgstat_get_local_beentry_by_index(i);

		if (TransactionIdIsValid(xid) ? !TransactionIdEquals(local->backend_xid, xid) :
										local->backendStatus.st_procpid != pid)
			continue;
		read_process(&local->backendStatus, holder);
		return true;
	}
	return false;
}

/* Find the prepared transaction; false if there is none.  Every role may see these. */
static bool
find_prepared(TransactionId xid, IdemHolder *holder)
{
	MemoryContext context = CurrentMemoryContext;
	Oid types[] = {XIDOID};
	Datum values[] = {TransactionIdGetDatum(xid)};
	bool found;

	/* every role may call the function, unless an administrator has changed that */
	if (object_aclcheck(ProcedureRelationId, F_PG_PREPARED_XACT, GetUserId(), ACL_EXECUTE) !=
		ACLCHECK_OK)
		return false;
	SPI_connect();
	if (SPI_execute_with_args("SELECT p.gid, p.prepared FROM pg_catalog.pg_prepared_xact() AS p"
							  " WHERE p.transaction OPERATOR(pg_catalog.=) $1",
							  lengthof(types), types, values, NULL, true, 1) != SPI_OK_SELECT)
		elog(ERROR, "could not read the prepared transactions");
	found = SPI_processed > 0;
	if (found)
	{
		HeapTuple row = SPI_tuptable->vals[0];
		TupleDesc desc = SPI_tuptable->tupdesc;
		bool isnull;

		holder->kind = IDEM_HOLDER_PREPARED;
		holder->gid = MemoryContextStrdup(context, SPI_getvalue(row, desc, 1));
		holder->since = DatumGetTimestampTz(SPI_getbinval(row, desc, 2, &isnull));
	}
	SPI_finish();
	return found;
}

/* H3: this transaction as a holder */
static void
read_mine(IdemHolder *holder)
{
	holder->kind = IDEM_HOLDER_MINE;
	holder->pid = MyProcPid;
	holder->since = GetCurrentTransactionStartTimestamp();
	holder->application_name = application_name[0] != '\0' ? application_name : NULL;
}

/* H3: the holder that is this open (sub)transaction, or runs it; false if it has ended */
bool
idem_holders_find(TransactionId xid, IdemHolder *holder)
{
	memset(holder, 0, sizeof(*holder));
	if (TransactionIdIsCurrentTransactionId(xid))
	{
		read_mine(holder);
		return true;
	}
	if (!TransactionIdIsInProgress(xid))
		return false;
	if (RecoveryInProgress())
	{
		holder->kind = IDEM_HOLDER_PRIMARY;
		return true;
	}
	xid = SubTransGetTopmostTransaction(xid);
	if (find_process(xid, 0, holder) || find_prepared(xid, holder))
		return true;
	if (!TransactionIdIsInProgress(xid))
		return false;
	/* it began after the list of processes was read */
	idem_holders_refresh();
	if (!find_process(xid, 0, holder) && !find_prepared(xid, holder))
		holder->kind = IDEM_HOLDER_HIDDEN;
	return true;
}

/* H3: the holder that is this process; false if it has ended meanwhile */
bool
idem_holders_find_process(int pid, IdemHolder *holder)
{
	memset(holder, 0, sizeof(*holder));
	if (pid == MyProcPid)
	{
		read_mine(holder);
		return true;
	}
	return find_process(InvalidTransactionId, pid, holder);
}

/* H3: the holder that has this lock or waits for it; false if it has ended meanwhile */
bool
idem_holders_find_lock(const LockInstanceData *lock, IdemHolder *holder)
{
	VirtualTransactionId vxid = idem_compat_lock_vxid(lock);
	bool have_more = false;

	if (lock->pid != 0)
		return idem_holders_find_process(lock->pid, holder);
	/* a prepared transaction has no process; after a restart of the server it has no virtual id */
	return idem_holders_find(VirtualTransactionIdIsValid(vxid) ?
								 TwoPhaseGetXidByVirtualXID(vxid, &have_more) :
								 vxid.localTransactionId,
							 holder);
}

/* The holder in words, to follow a sentence about what it does */
char *
idem_holders_describe(const IdemHolder *holder)
{
	switch (holder->kind)
	{
		case IDEM_HOLDER_MINE:
			return pstrdup("It is this transaction.");
		case IDEM_HOLDER_PROCESS:
			return holder->application_name == NULL ?
				pstrdup("Its session has no application_name.") :
				psprintf("Its application_name is %s.", holder->application_name);
		case IDEM_HOLDER_PREPARED:
			return psprintf("It is the prepared transaction %s.", holder->gid);
		case IDEM_HOLDER_PRIMARY:
			return pstrdup("It runs on the primary.");
		case IDEM_HOLDER_HIDDEN:
			return pstrdup("Members of pg_read_all_stats can see its session.");
	}
	pg_unreachable();
}

/* A command that ends the transaction; NULL: the caller cannot end it from here */
char *
idem_holders_fix(const IdemHolder *holder)
{
	switch (holder->kind)
	{
		case IDEM_HOLDER_MINE:
			return pstrdup("COMMIT;");
		case IDEM_HOLDER_PROCESS:
			return psprintf("SELECT pg_catalog.pg_terminate_backend(%d);", holder->pid);
		case IDEM_HOLDER_PREPARED:
			return psprintf("ROLLBACK PREPARED %s;", idem_show_literal(holder->gid));
		case IDEM_HOLDER_PRIMARY:
		case IDEM_HOLDER_HIDDEN:
			return NULL;
	}
	pg_unreachable();
}

/* H3: may the current user read this view of the schema idem, as administrators do? */
bool
idem_holders_may_read(const char *view)
{
	Oid relid = get_relname_relid(view, get_namespace_oid("idem", false));

	return OidIsValid(relid) &&
		pg_class_aclcheck(relid, GetUserId(), ACL_SELECT) == ACLCHECK_OK;
}
