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
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/namespace.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_proc.h"
#include "executor/spi.h"
#include "utils/backend_status.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

#include "fn/fn.h"
#include "stats/stats.h"

/*
 * Say which process runs the transaction, or has this number; false if there is none.  H3: the
 * caller may see what it may see in pg_stat_activity.
 */
static bool
set_process(IdemAnswer *fact, TransactionId xid, int pid)
{
	for (int i = 1; i <= pgstat_fetch_stat_numbackends(); i++)
	{
		LocalPgBackendStatus *local = pgstat_get_local_beentry_by_index(i);
		const PgBackendStatus *process = &local->backendStatus;

		if (TransactionIdIsValid(xid) ? !TransactionIdEquals(local->backend_xid, xid) :
										process->st_procpid != pid)
			continue;
		if (!has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS) &&
			!has_privs_of_role(GetUserId(), process->st_userid))
		{
			idem_answer_string(fact, Anum_idem_job_facts_holder, "hidden");
			return true;
		}
		idem_answer_string(fact, Anum_idem_job_facts_holder, "process");
		idem_answer_int32(fact, Anum_idem_job_facts_pid, process->st_procpid);
		idem_answer_optional_time(fact, Anum_idem_job_facts_since,
								  process->st_xact_start_timestamp);
		if (process->st_appname != NULL && process->st_appname[0] != '\0')
			idem_answer_string(fact, Anum_idem_job_facts_name, process->st_appname);
		return true;
	}
	return false;
}

/* The same for a prepared transaction.  Every role may see these. */
static bool
set_prepared(IdemAnswer *fact, TransactionId xid)
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
		char *gid = SPI_getvalue(row, desc, 1);
		MemoryContext spi_context = MemoryContextSwitchTo(context);

		idem_answer_string(fact, Anum_idem_job_facts_holder, "prepared");
		idem_answer_string(fact, Anum_idem_job_facts_name, gid);
		idem_answer_time(fact, Anum_idem_job_facts_since,
						 DatumGetTimestampTz(SPI_getbinval(row, desc, 2, &isnull)));
		MemoryContextSwitchTo(spi_context);
	}
	SPI_finish();
	return found;
}

/* Both functions that return facts begin with these columns */
StaticAssertDecl(Anum_idem_key_facts_fact == Anum_idem_job_facts_fact &&
					 Anum_idem_key_facts_does == Anum_idem_job_facts_does &&
					 Anum_idem_key_facts_since == Anum_idem_job_facts_since &&
					 Anum_idem_key_facts_pid == Anum_idem_job_facts_pid &&
					 Anum_idem_key_facts_holder == Anum_idem_job_facts_holder &&
					 Anum_idem_key_facts_name == Anum_idem_job_facts_name,
				 "columns of holders differ");

/*
 * H3: return a fact about who holds a row, or keeps others from it: this open (sub)transaction, or
 * without one this process.  False, and no fact, if it has ended.
 */
bool
idem_holders_put(IdemAnswer *answer, const char *fact, const char *does, TransactionId xid, int pid)
{
	bool has_xid = TransactionIdIsValid(xid);

	if (has_xid ? TransactionIdIsCurrentTransactionId(xid) : pid == MyProcPid)
	{
		idem_answer_string(answer, Anum_idem_job_facts_holder, "mine");
		idem_answer_int32(answer, Anum_idem_job_facts_pid, MyProcPid);
		idem_answer_time(answer, Anum_idem_job_facts_since, GetCurrentTransactionStartTimestamp());
		if (application_name[0] != '\0')
			idem_answer_string(answer, Anum_idem_job_facts_name, application_name);
	}
	else if (!has_xid)
	{
		if (!set_process(answer, xid, pid))
			return false;
	}
	else if (!TransactionIdIsInProgress(xid))
		return false;
	else if (RecoveryInProgress())
		idem_answer_string(answer, Anum_idem_job_facts_holder, "primary");
	else
	{
		xid = SubTransGetTopmostTransaction(xid);
		if (!set_process(answer, xid, 0) && !set_prepared(answer, xid))
		{
			if (!TransactionIdIsInProgress(xid))
				return false;
			/* it began after the list of processes was read */
			pgstat_clear_backend_activity_snapshot();
			if (!set_process(answer, xid, 0) && !set_prepared(answer, xid))
				idem_answer_string(answer, Anum_idem_job_facts_holder, "hidden");
		}
	}
	idem_answer_string(answer, Anum_idem_job_facts_fact, fact);
	idem_answer_string(answer, Anum_idem_job_facts_does, does);
	idem_answer_put(answer);
	return true;
}

/* H3: may the current user read this view of the schema idem, as administrators do? */
bool
idem_holders_may_read(const char *view)
{
	Oid relid = get_relname_relid(view, get_namespace_oid("idem", false));

	return OidIsValid(relid) &&
		pg_class_aclcheck(relid, GetUserId(), ACL_SELECT) == ACLCHECK_OK;
}
