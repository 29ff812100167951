/*
 * grant.c
 *		idem_grant, idem_revoke: grant or revoke the set of privileges that an
 *		application, an administrator or a monitoring role needs.
 *
 * A set is granted by one GRANT statement per kind of object.  These statements
 * run in the transaction of the caller, with the privileges of the caller.  An
 * error in one of them rolls back the whole call.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "nodes/makefuncs.h"
#include "nodes/parsenodes.h"
#include "tcop/utility.h"
#include "utils/builtins.h"

#include "fn/fn.h"

IDEM_FUNCTION(idem_grant);
IDEM_FUNCTION(idem_revoke);

/* A set: functions and procedures in pg_catalog to execute, relations of schema idem to read */
typedef struct PrivilegeSet
{
	const char *functions[128];
	const char *relations[32];
} PrivilegeSet;

#define APP_FUNCTIONS                                                                         \
	"idem_claim", "idem_finish", "idem_release", "idem_get",                                  \
		"idem_call", "idem_claim_many", "idem_finish_many",                                   \
		"idem_lease", "idem_renew", "idem_checkpoint", "idem_fence",                          \
		"idem_enqueue", "idem_enqueue_many", "idem_fetch", "idem_fetch_any", "idem_complete", \
		"idem_complete_many", "idem_fail", "idem_heartbeat", "idem_progress", "idem_snooze",  \
		"idem_cancel", "idem_retry", "idem_job", "idem_job_by_key", "idem_cancel_by_key",     \
		"idem_cancel_many", "idem_retry_many", "idem_fail_many", "idem_snooze_many",          \
		"idem_reschedule_many", "idem_verify", "idem_drain",                                  \
		"idem_wait", "idem_wait_any", "idem_wait_job", "idem_wait_key", "idem_work",          \
		"idem_current_job",                                                                   \
		"idem_schedule", "idem_unschedule", "idem_schedule_pause",                            \
		"idem_schedule_resume", "idem_why", "idem_holder"
#define VIEW_FUNCTIONS                                                                            \
	"idem_clock", "idem_key_state", "idem_doctor", "idem_checks", "idem_version",                 \
		"idem_stat_databases", "idem_stat_queues", "idem_stat_latency", "idem_stat_cleanup",      \
		"idem_stat_worker", "idem_slot", "idem_checks_local", "idem_citus_table", "idem_visible", \
		"idem_visible_literal", "idem_visible_name", "idem_stat_tables"
#define REPORT_FUNCTIONS                                                                  \
	"idem_report", "idem_report_html", "idem_report_number", "idem_report_cells",         \
		"idem_report_age", "idem_report_table", "idem_report_chart", "idem_report_style", \
		"idem_report_overview", "idem_report_health", "idem_report_trends",               \
		"idem_report_queues", "idem_report_running", "idem_report_dead",                  \
		"idem_report_decisions", "idem_report_duplicates", "idem_report_keys",            \
		"idem_report_why", "idem_report_lease"
#define MONITOR_RELATIONS                                                     \
	"key_summary", "queue_status", "schedule_status", "stats", "queue_stats", \
		"queue_latency", "queue_latency_buckets",                             \
		"cleanup_progress", "worker_status",                                  \
		"workers", "checks", "checks_citus", "health", "report_jobs", "report_waiting", "report_dead", "report_leases", "report_scopes", "report_hours"

enum
{
	SET_APP,
	SET_ADMIN,
	SET_MONITOR,
	NSETS
};

static const char *const set_names[NSETS + 1] = {
	[SET_APP] = "app", [SET_ADMIN] = "admin", [SET_MONITOR] = "monitor"};

static const PrivilegeSet privilege_sets[NSETS] = {
	[SET_APP] = {{APP_FUNCTIONS, "idem_slot"}, {NULL}},
	[SET_ADMIN] = {{APP_FUNCTIONS, VIEW_FUNCTIONS, REPORT_FUNCTIONS, "idem_key_hash", "idem_forget", "idem_cleanup",
					"idem_queue_set", "idem_queue_drop", "idem_pause", "idem_resume", "idem_tick", "idem_stats_reset", "idem_reset",
					"idem_shard_set", "idem_shard_give", "idem_shard_take", "idem_shard_id"},
				   {MONITOR_RELATIONS, "key_status", "lease_status", "job_status", "queues", "schedules", "shard"}},
	[SET_MONITOR] = {{VIEW_FUNCTIONS, REPORT_FUNCTIONS}, {MONITOR_RELATIONS}},
};

static const PrivilegeSet *
find_privilege_set(const text *name)
{
	int i = idem_value_word(name, "set", set_names,
							"Use \"app\" for applications, \"admin\" for operators, \"monitor\" for monitoring.");

	return &privilege_sets[i];
}

/*
 * Run one GRANT or REVOKE; does nothing if there are no objects.  The statement is
 * built as a parse tree, so no SQL text is made from data.  It goes through
 * ProcessUtility() like any other, which checks privileges and calls auditing
 * extensions and event triggers.
 */
static void
run_grant(bool is_grant, ObjectType objtype, List *objects, const char *privilege, char *role)
{
	GrantStmt *stmt = makeNode(GrantStmt);
	AccessPriv *priv = makeNode(AccessPriv);
	RoleSpec *grantee = makeNode(RoleSpec);
	PlannedStmt *pstmt = makeNode(PlannedStmt);

	if (objects == NIL)
		return;

	priv->priv_name = pstrdup(privilege);
	grantee->roletype = ROLESPEC_CSTRING;
	grantee->rolename = role;
	grantee->location = -1;

	stmt->is_grant = is_grant;
	stmt->targtype = ACL_TARGET_OBJECT;
	stmt->objtype = objtype;
	stmt->objects = objects;
	stmt->privileges = list_make1(priv);
	stmt->grantees = list_make1(grantee);
	stmt->behavior = DROP_RESTRICT;

	pstmt->commandType = CMD_UTILITY;
	pstmt->canSetTag = false;
	pstmt->utilityStmt = (Node *) stmt;
	pstmt->stmt_location = -1;

	ProcessUtility(pstmt, is_grant ? "GRANT by idem_grant()" : "REVOKE by idem_revoke()",
				   false, PROCESS_UTILITY_QUERY, NULL, NULL, None_Receiver, NULL);
	CommandCounterIncrement();
}

static void
change_privileges(FunctionCallInfo fcinfo, bool is_grant)
{
	const PrivilegeSet *set;
	char *role;
	List *functions = NIL;
	List *relations = NIL;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("role and set must not be null"),
				errdetail("Both arguments are required."),
				errhint("For example: SELECT pg_catalog.idem_grant('my_app', 'app')."));
	role = text_to_cstring(PG_GETARG_TEXT_PP(0));
	set = find_privilege_set(PG_GETARG_TEXT_PP(1));

	for (int i = 0; set->functions[i] != NULL; i++)
	{
		ObjectWithArgs *function = makeNode(ObjectWithArgs);

		function->objname = list_make2(makeString("pg_catalog"), makeString(pstrdup(set->functions[i])));
		function->args_unspecified = true;
		functions = lappend(functions, function);
	}
	for (int i = 0; set->relations[i] != NULL; i++)
		relations = lappend(relations, makeRangeVar("idem", pstrdup(set->relations[i]), -1));

	run_grant(is_grant, OBJECT_ROUTINE, functions, "execute", role);
	if (relations != NIL)
		run_grant(is_grant, OBJECT_SCHEMA, list_make1(makeString("idem")), "usage", role);
	run_grant(is_grant, OBJECT_TABLE, relations, "select", role);
}

Datum
idem_grant(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_grant_signature, "idem_grant()");
	change_privileges(fcinfo, true);
	PG_RETURN_VOID();
}

Datum
idem_revoke(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_revoke_signature, "idem_revoke()");
	change_privileges(fcinfo, false);
	PG_RETURN_VOID();
}
