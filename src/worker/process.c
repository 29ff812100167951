/*
 * process.c
 *		What launcher and worker have in common: their settings, and what becomes
 *		of errors that end them.
 *
 * Both run as the bootstrap superuser.  Settings that could be in their way, or
 * let them remove what is live, are set before they connect with a source that
 * neither the configuration file nor ALTER DATABASE nor ALTER ROLE overrides,
 * as in autovacuum.  idem.cleanup and idem.cleanup_batch_size are those of the
 * database, else those of the server; a setting of the role has no effect (W8).
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_db_role_setting.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "tcop/tcopprot.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"

#include "worker/worker.h"

static emit_log_hook_type prev_emit_log_hook = NULL;

static const char *const fixed_settings[][2] = {
	/* what has expired is judged by the real clock */
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
	/* a removal that is lost in a crash is done again */
	{"synchronous_commit", "off"}};

/* What may differ from database to database */
static const char *const database_settings[] = {"idem.cleanup", "idem.cleanup_batch_size"};

static void
override_setting(const char *name, const char *value)
{
	SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * An error that ends the worker is not logged here: the launcher is told, and
 * logs it once (W7).  The end by SIGTERM is no error, of the launcher either.
 */
static void
keep_error(ErrorData *error)
{
	if (error->elevel == ERROR || error->elevel == FATAL)
	{
		bool is_error = error->sqlerrcode != ERRCODE_ADMIN_SHUTDOWN;

		error->output_to_server =
			is_error && !idem_shmem_set_visit_error(error->message, error->detail);
	}
	if (prev_emit_log_hook)
		prev_emit_log_hook(error);
}

/* What the launcher and the worker register with have in common */
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

/* Before connecting */
void
idem_process_begin(void)
{
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	prev_emit_log_hook = emit_log_hook;
	emit_log_hook = keep_error;
	for (int i = 0; i < (int) lengthof(fixed_settings); i++)
	{
		/* older servers do not know all of them */
		if (GetConfigOption(fixed_settings[i][0], true, false) != NULL)
			override_setting(fixed_settings[i][0], fixed_settings[i][1]);
	}
	for (int i = 0; i < (int) lengthof(database_settings); i++)
		override_setting(database_settings[i],
						 pstrdup(GetConfigOption(database_settings[i], false, false)));
}

/*
 * After connecting.  Our tables are locked without waiting; this is for other
 * locks, such as those on catalogs and TOAST tables.
 */
void
idem_process_limit_lock_waits(void)
{
	override_setting("lock_timeout", "1s");
}

/* What ALTER DATABASE (or, without a database, ALTER ROLE ALL) has set; NULL: nothing */
static ArrayType *
read_settings(Relation rel, Oid database)
{
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple tuple;
	ArrayType *settings = NULL;

	ScanKeyInit(&keys[0], Anum_pg_db_role_setting_setdatabase, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(database));
	ScanKeyInit(&keys[1], Anum_pg_db_role_setting_setrole, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(InvalidOid));
	scan = systable_beginscan(rel, DbRoleSettingDatidRolidIndexId, true, NULL, 2, keys);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool isnull;
		Datum value =
			heap_getattr(tuple, Anum_pg_db_role_setting_setconfig, RelationGetDescr(rel), &isnull);

		if (!isnull)
			settings = DatumGetArrayTypePCopy(value);
	}
	systable_endscan(scan);
	return settings;
}

/* One setting, "name=value".  A value that is not valid has no effect; the server itself warns of it. */
static void
apply_setting(const char *setting)
{
	for (int i = 0; i < (int) lengthof(database_settings); i++)
	{
		const char *name = database_settings[i];
		size_t len = strlen(name);

		if (pg_strncasecmp(setting, name, len) == 0 && setting[len] == '=')
			(void) set_config_option(name, setting + len + 1, PGC_SUSET, PGC_S_OVERRIDE,
									 GUC_ACTION_SET, true, DEBUG1, false);
	}
}

static void
apply_settings(ArrayType *settings)
{
	Datum *elements;
	bool *nulls;
	int n;

	if (settings == NULL)
		return;
	deconstruct_array(settings, TEXTOID, -1, false, TYPALIGN_INT, &elements, &nulls, &n);
	for (int i = 0; i < n; i++)
	{
		if (!nulls[i])
			apply_setting(TextDatumGetCString(elements[i]));
	}
}

/* Take the settings that may differ from database to database; what is set there counts more */
void
idem_process_take_database_settings(void)
{
	Relation rel;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	rel = table_open(DbRoleSettingRelationId, AccessShareLock);
	apply_settings(read_settings(rel, InvalidOid));
	apply_settings(read_settings(rel, MyDatabaseId));
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
}
