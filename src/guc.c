/*
 * guc.c
 *		Every setting of idem.
 */
#include "postgres.h"

#include <limits.h>

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

	if (**newval == '\0')
		return true;
	if (*first == '{')
	{
		JsonLexContext *lex = makeJsonLexContextCstringLen(NULL, *newval, strlen(*newval),
														   GetDatabaseEncoding(), true);

		if (pg_parse_json(lex, &nullSemAction) == JSON_SUCCESS)
			return true;
	}
	GUC_check_errdetail("Headers must be a JSON object, without \\u0000.");
	GUC_check_errhint("Set an object such as {\"traceparent\": \"00-...\"}, or an empty string for none.");
	return false;
}

static const struct IntSetting
{
	const char *name, *short_desc, *long_desc;
	GucContext context;
	int flags;
	int *variable;
	int boot;
	int min;
	int max;
} int_settings[] = {
	{"idem.ttl",
	 "Sets the default time to live of keys.",
	 "A key past its time to live counts as absent, and its work may run again.",
	 PGC_USERSET, GUC_UNIT_S, &idem_guc_ttl, 24 * 60 * 60, 1, INT_MAX},
	{"idem.max_result_size",
	 "Sets the maximum size of a stored result, checkpoint or payload.",
	 NULL,
	 PGC_USERSET, GUC_UNIT_BYTE, &idem_guc_max_result_size, 1024 * 1024, 0, MaxAllocSize},
	{"idem.cleanup_naptime",
	 "Sets the time between two rounds of cleanup in a database.",
	 NULL,
	 PGC_SIGHUP, GUC_UNIT_S, &idem_guc_cleanup_naptime, 60, 1, 24 * 60 * 60},
	{"idem.cleanup_batch_size",
	 "Sets the maximum number of rows that cleanup removes in one transaction.",
	 NULL,
	 PGC_SUSET, 0, &idem_guc_cleanup_batch_size, 1000, 1, 100000},
	{"idem.stats_max",
	 "Sets the maximum number of databases and queues that have statistics.",
	 NULL,
	 PGC_POSTMASTER, 0, &idem_guc_stats_max, 1000, 100, IDEM_MAX_STATS},
	{"idem.waits_max",
	 "Sets the maximum number of queues, jobs and keys that sessions wait for at the same time.",
	 "A session that waits for several queues counts once for each of them.",
	 PGC_POSTMASTER, 0, &idem_guc_waits_max, 4096, 16, IDEM_MAX_WAITS},
	{"idem.drain_after",
	 "Sets how long a job that is due absorbs duplicates while other transactions keep it from starting.",
	 "A job that has been due for longer, and that the transaction of a duplicate has locked, absorbs no more duplicates until that transaction has ended.",
	 PGC_SUSET, GUC_UNIT_MS, &idem_guc_drain_after, 1000, 0, 24 * 60 * 60 * 1000},
	{"idem.look_after",
	 "Sets how often one of the sessions that wait for the same queue, job or key looks for what cannot wake it.",
	 "Examples are COMMIT PREPARED, and rows that logical replication writes.",
	 PGC_SUSET, GUC_UNIT_MS, &idem_guc_look_after, 1000, 10, 60 * 60 * 1000},
	{"idem.clock_offset",
	 "Sets the time to add to the clock that keys expire by.",
	 "This is for tests of expiry that do not sleep.",
	 PGC_SUSET, GUC_UNIT_S | GUC_NOT_IN_SAMPLE, &idem_guc_clock_offset, 0, INT_MIN, INT_MAX}};

void
idem_guc_init(void)
{
	for (int i = 0; i < (int) lengthof(int_settings); i++)
	{
		const struct IntSetting *setting = &int_settings[i];
		GucContext context = setting->context;

		/* the size of shared memory is fixed only in a server that preloads the library */
		if (context == PGC_POSTMASTER && !process_shared_preload_libraries_in_progress)
			context = PGC_SIGHUP;
		DefineCustomIntVariable(setting->name, setting->short_desc, setting->long_desc,
								setting->variable, setting->boot,
								setting->min, setting->max, context,
								setting->flags, NULL, NULL, NULL);
	}
	DefineCustomBoolVariable("idem.cleanup",
							 "Enables cleanup by the background worker.",
							 "Can be set for a database. Such a change takes effect at the next visit of the worker. A reload makes the worker visit at once.",
							 &idem_guc_cleanup, true, PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("idem.log_duplicates",
							 "Logs each duplicate.",
							 "The message contains a hash of the key, never the key.",
							 &idem_guc_log_duplicates, false, PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("idem.allow_reset",
							 "Allows idem_reset() to roles that are not superusers.",
							 "This is for test databases: idem_reset() removes all keys and jobs.",
							 &idem_guc_allow_reset, false, PGC_SUSET, GUC_NOT_IN_SAMPLE, NULL, NULL,
							 NULL);
	DefineCustomStringVariable("idem.scope",
							   "Sets the default scope of keys.",
							   "A key is unique within its scope.",
							   &idem_guc_scope, "", PGC_USERSET, 0, check_scope, NULL, NULL);
	DefineCustomStringVariable("idem.owner",
							   "Sets the role that owns new keys.",
							   "An empty string means the current user. The current user must be able to act as the role. Services that share keys name a common role here.",
							   &idem_guc_owner, "", PGC_USERSET, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("idem.headers",
							   "Sets default headers of new jobs, a JSON object.",
							   "Headers that a call passes are added, and replace defaults of the same name.",
							   &idem_guc_headers, "", PGC_USERSET, 0, check_headers, NULL, NULL);
	DefineCustomEnumVariable(
		"idem.require_finish",
		"Sets what happens when a transaction commits with a claim that it has not finished, or a job that it has fetched without a lease and not ended.",
		"In autocommit mode both commit before the work is done. With \"auto\" a claim raises a warning only if it is the only work of its transaction.",
		&idem_guc_require_finish, IDEM_REQUIRE_AUTO, require_finish_values, PGC_USERSET, 0, NULL,
		NULL, NULL);
	MarkGUCPrefixReserved("idem");
}
