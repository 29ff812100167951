/*
 * privileges.c
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

enum
{
	SET_APP,
	SET_ADMIN,
	SET_MONITOR
};

static const char *const set_names[] = {
	[SET_APP] = "app", [SET_ADMIN] = "admin", [SET_MONITOR] = "monitor", NULL};

/* What idem_grant() can grant, and in which sets: from the lines "-- set:" of src/sql */
static const struct
{
	ObjectType type;
	const char *schema;
	const char *name;
	int sets; /* all are in SET_ADMIN, too */
} members[] = {IDEM_GRANTED};

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
	int set;
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
	set = idem_args_word(PG_GETARG_TEXT_PP(1), "set", set_names,
						 "Use \"app\" for applications, \"admin\" for operators, \"monitor\" for monitoring.");

	for (int i = 0; i < (int) lengthof(members); i++)
	{
		char *schema = pstrdup(members[i].schema);
		char *name = pstrdup(members[i].name);

		if (set != SET_ADMIN && (members[i].sets & (1 << set)) == 0)
			continue;
		if (members[i].type == OBJECT_ROUTINE)
		{
			ObjectWithArgs *function = makeNode(ObjectWithArgs);

			function->objname = list_make2(makeString(schema), makeString(name));
			function->args_unspecified = true;
			functions = lappend(functions, function);
		}
		else
			relations = lappend(relations, makeRangeVar(schema, name, -1));
	}

	/*
	 * No role gets USAGE on idem_internal: views and functions have the OIDs of what they use
	 * there, so that their callers need only EXECUTE and SELECT.
	 */
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
