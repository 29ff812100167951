/*
 * process.c
 *		Registration, settings and errors of both processes, launcher and worker.
 *
 * Both run as the bootstrap superuser.  Some settings could stop them, or make
 * them remove live rows.  Each process sets these before it connects, with
 * PGC_S_OVERRIDE, as autovacuum does.  The configuration file, ALTER DATABASE and
 * ALTER ROLE do not change a setting of that source (W4, W8).
 *
 * The worker uses idem.cleanup and idem.cleanup_batch_size as set for the
 * database, else for the server.  Settings of a role have no effect (W8).
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_db_role_setting.h"
#include "tcop/tcopprot.h"
#include "utils/array.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"

#include "cleanup/cleanup.h"

static emit_log_hook_type prev_emit_log_hook = NULL;

static const char *const fixed_settings[][2] = {
	/* the real clock decides which rows have expired (W8) */
	{"idem.clock_offset", "0"},
	{"search_path", ""},
	{"exit_on_error", "off"},
	{"zero_damaged_pages", "off"},
	{"statement_timeout", "0"},
	{"lock_timeout", "0"},
	{"idle_in_transaction_session_timeout", "0"},
	{"transaction_timeout", "0"},
	{"default_transaction_isolation", "read committed"},
	{"default_transaction_read_only", "off"},
	{"default_transaction_deferrable", "off"},
	/* after a crash, the worker removes the rows again */
	{"synchronous_commit", "off"}};

/* Settings that a database can have of its own */
static const char *const database_settings[] = {"idem.cleanup", "idem.cleanup_batch_size"};

/*
 * emit_log_hook of both processes.  The worker reports an error that ends it to
 * the launcher, which logs it when the failure begins (W7); so the worker does
 * not log it.  Termination by SIGTERM is not an error and is not logged (W3).
 */
static void
report_error(ErrorData *error)
{
	if (error->elevel == ERROR || error->elevel == FATAL)
	{
		bool is_error = error->sqlerrcode != ERRCODE_ADMIN_SHUTDOWN;

		error->output_to_server =
			is_error && !idem_exchange_set_visit_error(error->message, error->detail);
	}
	if (prev_emit_log_hook)
		prev_emit_log_hook(error);
}

/*
 * After an error in PG_TRY: roll back, with the identity that the transaction has taken on, and
 * return the error, in this memory context.
 */
ErrorData *
idem_process_recover(MemoryContext context)
{
	ErrorData *error;

	MemoryContextSwitchTo(context);
	error = CopyErrorData();
	FlushErrorState();
	AbortOutOfAnyTransaction();
	LWLockReleaseAll();
	MemoryContextSwitchTo(context);
	return error;
}

/* Fill the registration of a process, which starts when recovery has finished (W6) */
void
idem_process_describe(BackgroundWorker *worker, const char *name, const char *function)
{
	memset(worker, 0, sizeof(*worker));
	worker->bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker->bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker->bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker->bgw_library_name, "idem", sizeof(worker->bgw_library_name));
	strlcpy(worker->bgw_function_name, function, sizeof(worker->bgw_function_name));
	strlcpy(worker->bgw_name, name, sizeof(worker->bgw_name));
	strlcpy(worker->bgw_type, name, sizeof(worker->bgw_type));
}

/* Set signal handler, error hook and settings (W4, W8); called before the process connects */
void
idem_process_begin(void)
{
	/* it calls no SQL function */
	idem_fn_is_used = true;
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	prev_emit_log_hook = emit_log_hook;
	emit_log_hook = report_error;
	for (int i = 0; i < (int) lengthof(fixed_settings); i++)
	{
		/* older servers do not have all of them */
		if (GetConfigOption(fixed_settings[i][0], true, false) != NULL)
			SetConfigOption(fixed_settings[i][0], fixed_settings[i][1], PGC_SUSET, PGC_S_OVERRIDE);
	}
	for (int i = 0; i < (int) lengthof(database_settings); i++)
		SetConfigOption(database_settings[i],
						pstrdup(GetConfigOption(database_settings[i], false, false)), PGC_SUSET,
						PGC_S_OVERRIDE);
}

/*
 * Connect to a database, or with InvalidOid to none.  From then on, waits for locks are limited
 * to one second (W2).  The worker locks the tables of idem without waiting.  The limit is for
 * other locks, such as those on catalogs and TOAST tables.
 */
void
idem_process_connect(Oid database)
{
	BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	SetConfigOption("lock_timeout", "1s", PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * W8: apply the settings for all databases, those of ALTER ROLE ALL, and then those of ALTER
 * DATABASE for this one, which take precedence.  An invalid value has no effect; the server warns
 * about it.
 */
void
idem_process_take_database_settings(void)
{
	const Oid owners[] = {InvalidOid, MyDatabaseId};
	Relation rel = table_open(DbRoleSettingRelationId, AccessShareLock);

	for (int i = 0; i < (int) lengthof(owners); i++)
	{
		ScanKeyData keys[2];
		SysScanDesc scan;
		HeapTuple tuple;
		Datum config = (Datum) 0;
		bool isnull = true;
		Datum *elements;
		bool *nulls;
		int n = 0;

		ScanKeyInit(&keys[0], Anum_pg_db_role_setting_setdatabase, BTEqualStrategyNumber, F_OIDEQ,
					ObjectIdGetDatum(owners[i]));
		ScanKeyInit(&keys[1], Anum_pg_db_role_setting_setrole, BTEqualStrategyNumber, F_OIDEQ,
					ObjectIdGetDatum(InvalidOid));
		scan = systable_beginscan(rel, DbRoleSettingDatidRolidIndexId, true, NULL, 2, keys);
		tuple = systable_getnext(scan);
		if (HeapTupleIsValid(tuple))
			config = heap_getattr(tuple, Anum_pg_db_role_setting_setconfig, RelationGetDescr(rel),
								  &isnull);
		if (!isnull)
			deconstruct_array(DatumGetArrayTypePCopy(config), TEXTOID, -1, false, TYPALIGN_INT,
							  &elements, &nulls, &n);
		systable_endscan(scan);

		for (int j = 0; j < n; j++)
		{
			const char *setting = nulls[j] ? "" : TextDatumGetCString(elements[j]);

			for (int k = 0; k < (int) lengthof(database_settings); k++)
			{
				const char *name = database_settings[k];
				size_t len = strlen(name);

				if (pg_strncasecmp(setting, name, len) == 0 && setting[len] == '=')
					(void) set_config_option(name, setting + len + 1, PGC_SUSET, PGC_S_OVERRIDE,
											 GUC_ACTION_SET, true, DEBUG1, false);
			}
		}
	}
	table_close(rel, AccessShareLock);
}
