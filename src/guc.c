/*
 * guc.c
 *		Every setting of idem.
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#include "idem.h"

int idem_guc_ttl;
char *idem_guc_scope;
char *idem_guc_owner;
int idem_guc_max_result_size;
char *idem_guc_headers;
bool idem_guc_cleanup = true;
int idem_guc_cleanup_naptime = 60;
int idem_guc_cleanup_batch_size = 1000;
bool idem_guc_log_duplicates = false;
int idem_guc_require_finish = IDEM_REQUIRE_AUTO;
int idem_guc_stats_max = 1000;
int idem_guc_waits_max = 4096;
int idem_guc_look_after = 1000;
int idem_guc_drain_after;
int idem_guc_clock_offset;
bool idem_guc_allow_reset = false;

static const struct config_enum_entry require_finish_values[] = {
	{"off", IDEM_REQUIRE_OFF, false},
	{"auto", IDEM_REQUIRE_AUTO, false},
	{"warning", IDEM_REQUIRE_WARNING, false},
	{"error", IDEM_REQUIRE_ERROR, false},
	{NULL, 0, false}};

/* Check the length of idem.scope (K12) */
static bool
check_scope(char **newval, void **extra, GucSource source)
{
	if (strlen(*newval) > IDEM_MAX_SCOPE_LEN)
	{
		GUC_check_errdetail("A scope must have at most %d bytes.", IDEM_MAX_SCOPE_LEN);
		GUC_check_errhint("Use a short name for the service or tenant.");
		return false;
	}
	return true;
}

/* Check that idem.headers is empty or a JSON object (J16) */
static bool
check_headers(char **newval, void **extra, GucSource source)
{
	const char *first = *newval + strspn(*newval, " \t\r\n");

	if (**newval == '\0' || (*first == '{' && idem_compat_is_json(*newval)))
		return true;
	GUC_check_errdetail("Headers must be a JSON object, without \\u0000.");
	GUC_check_errhint("Set an object such as {\"traceparent\": \"00-...\"}, or an empty string for none.");
	return false;
}

/* Defaults and limits of arguments */
static void
define_key_settings(void)
{
	DefineCustomIntVariable("idem.ttl",
							"Sets the default time to live of keys.",
							"A key past its time to live counts as absent, and its work may run again.",
							&idem_guc_ttl,
							24 * 60 * 60,
							1,
							INT_MAX,
							PGC_USERSET,
							GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomStringVariable("idem.scope",
							   "Sets the default scope of keys.",
							   "A key is unique within its scope.",
							   &idem_guc_scope,
							   "",
							   PGC_USERSET,
							   0,
							   check_scope, NULL, NULL);

	DefineCustomStringVariable("idem.owner",
							   "Sets the role that owns new keys.",
							   "An empty string means the current user. The current user must be able to act as the role. Services that share keys name a common role here.",
							   &idem_guc_owner,
							   "",
							   PGC_USERSET,
							   0,
							   NULL, NULL, NULL);

	DefineCustomIntVariable("idem.max_result_size",
							"Sets the maximum size of a stored result, checkpoint or payload.",
							NULL,
							&idem_guc_max_result_size,
							1024 * 1024,
							0,
							MaxAllocSize,
							PGC_USERSET,
							GUC_UNIT_BYTE,
							NULL, NULL, NULL);
}

static void
define_job_settings(void)
{
	DefineCustomStringVariable("idem.headers",
							   "Sets default headers of new jobs, a JSON object.",
							   "Headers that a call passes are added, and replace defaults of the same name.",
							   &idem_guc_headers,
							   "",
							   PGC_USERSET,
							   0,
							   check_headers, NULL, NULL);
}

/* The background worker */
static void
define_cleanup_settings(void)
{
	DefineCustomBoolVariable("idem.cleanup",
							 "Enables cleanup by the background worker.",
							 "Can be set for a database. Such a change takes effect at the next visit of the worker. A reload makes the worker visit at once.",
							 &idem_guc_cleanup,
							 true,
							 PGC_SUSET,
							 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("idem.cleanup_naptime",
							"Sets the time between two rounds of cleanup in a database.",
							NULL,
							&idem_guc_cleanup_naptime,
							60,
							1,
							24 * 60 * 60,
							PGC_SIGHUP,
							GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idem.cleanup_batch_size",
							"Sets the maximum number of rows that cleanup removes in one transaction.",
							NULL,
							&idem_guc_cleanup_batch_size,
							1000,
							1,
							100000,
							PGC_SUSET,
							0,
							NULL, NULL, NULL);
}

/* Statistics and log */
static void
define_stats_settings(void)
{
	GucContext shmem_context =
		process_shared_preload_libraries_in_progress ? PGC_POSTMASTER : PGC_SIGHUP;

	/* determines the size of shared memory, so it is fixed in a server that preloads the library */
	DefineCustomIntVariable("idem.stats_max",
							"Sets the maximum number of databases and queues that have statistics.",
							NULL,
							&idem_guc_stats_max,
							1000,
							100,
							IDEM_MAX_STATS,
							shmem_context,
							0,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idem.waits_max",
							"Sets the maximum number of queues, jobs and keys that sessions wait for at the same time.",
							"A session that waits for several queues counts once for each of them.",
							&idem_guc_waits_max,
							4096,
							16,
							IDEM_MAX_WAITS,
							shmem_context,
							0,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("idem.log_duplicates",
							 "Logs each duplicate.",
							 "The message contains a hash of the key, never the key.",
							 &idem_guc_log_duplicates,
							 false,
							 PGC_SUSET,
							 0,
							 NULL, NULL, NULL);
}

/* Details of the rules of keys, jobs and waiting: K14, J1, A4 */
static void
define_protocol_settings(void)
{
	DefineCustomEnumVariable("idem.require_finish",
							 "Sets what happens when a transaction commits with a claim that it has not finished, or a job that it has fetched without a lease and not ended.",
							 "In autocommit mode both commit before the work is done. With \"auto\" a claim raises a warning only if it is the only work of its transaction.",
							 &idem_guc_require_finish,
							 IDEM_REQUIRE_AUTO,
							 require_finish_values,
							 PGC_USERSET,
							 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("idem.drain_after",
							"Sets how long a job that is due absorbs duplicates while other transactions keep it from starting.",
							"A job that has been due for longer, and that the transaction of a duplicate has locked, absorbs no more duplicates until that transaction has ended.",
							&idem_guc_drain_after,
							1000,
							0,
							24 * 60 * 60 * 1000,
							PGC_SUSET,
							GUC_UNIT_MS,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idem.look_after",
							"Sets how often one of the sessions that wait for the same queue, job or key looks for what cannot wake it.",
							"Examples are COMMIT PREPARED, and rows that logical replication writes.",
							&idem_guc_look_after,
							1000,
							10,
							60 * 60 * 1000,
							PGC_SUSET,
							GUC_UNIT_MS,
							NULL, NULL, NULL);
}

/* Settings for tests: K9, V8 */
static void
define_test_settings(void)
{
	DefineCustomIntVariable("idem.clock_offset",
							"Sets the time to add to the clock that keys expire by.",
							"This is for tests of expiry that do not sleep.",
							&idem_guc_clock_offset,
							0,
							INT_MIN,
							INT_MAX,
							PGC_SUSET,
							GUC_UNIT_S | GUC_NOT_IN_SAMPLE,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("idem.allow_reset",
							 "Allows idem_reset() to roles that are not superusers.",
							 "This is for test databases: idem_reset() removes all keys and jobs.",
							 &idem_guc_allow_reset,
							 false,
							 PGC_SUSET,
							 GUC_NOT_IN_SAMPLE,
							 NULL, NULL, NULL);
}

void
idem_guc_init(void)
{
	define_key_settings();
	define_job_settings();
	define_cleanup_settings();
	define_stats_settings();
	define_protocol_settings();
	define_test_settings();
	MarkGUCPrefixReserved("idem");
}
