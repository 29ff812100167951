/*
 * privileges.c
 *		Privileges on the members of the extension: idem_grant, idem_revoke,
 *		idem_close_members.
 *
 * idem_grant() and idem_revoke() grant and revoke the set of privileges that an
 * application, an administrator or a monitoring role needs: by one GRANT statement per
 * kind of object.  These statements run in the transaction of the caller, with the
 * privileges of the caller.  An error in one of them rolls back the whole call.
 *
 * idem_close_members() is for the install script and for update scripts, after they have
 * created objects and before they grant any privilege.  Objects that CREATE EXTENSION
 * creates can have privileges from the start: functions and types are open to PUBLIC,
 * and ALTER DEFAULT PRIVILEGES of the role that runs the command may add others.
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_class.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "commands/extension.h"
#include "nodes/makefuncs.h"
#include "nodes/parsenodes.h"
#include "tcop/utility.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "fn/fn.h"
#include "stats/stats.h"

IDEM_FUNCTION(idem_grant);
IDEM_FUNCTION(idem_revoke);
IDEM_FUNCTION(idem_close_members);

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

/*
 * Does the object have privileges of its own?  Row types of tables, array types
 * and multirange types use those of another object.  From PostgreSQL 17 on they
 * are members of the extension, too.
 */
static bool
has_privileges(const ObjectAddress *object)
{
	Form_pg_type type;
	HeapTuple tuple;
	bool result;

	if (object->classId != TypeRelationId)
		return object->classId == RelationRelationId || object->classId == NamespaceRelationId ||
			object->classId == ProcedureRelationId;
	tuple = SearchSysCache1(TYPEOID, ObjectIdGetDatum(object->objectId));
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for type %u", object->objectId);
	type = (Form_pg_type) GETSTRUCT(tuple);
	result = !IsTrueArrayType(type) && type->typtype != TYPTYPE_MULTIRANGE &&
		(!OidIsValid(type->typrelid) || get_rel_relkind(type->typrelid) == RELKIND_COMPOSITE_TYPE);
	ReleaseSysCache(tuple);
	return result;
}

/* Revoke all privileges of PUBLIC and of every role but the owner */
static void
close_object(const ObjectAddress *object)
{
	int cache = get_object_catcache_oid(object->classId);
	HeapTuple tuple;
	Oid owner;
	Datum acl;
	bool is_default; /* the object has the default privileges of its kind */
	Oid *roles;
	int nroles = 0;

	if (!has_privileges(object))
		return;
	tuple = SearchSysCache1(cache, ObjectIdGetDatum(object->objectId));
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for member %u of class %u", object->objectId, object->classId);
	owner = DatumGetObjectId(
		SysCacheGetAttr(cache, tuple, get_object_attnum_owner(object->classId), &is_default));
	acl = SysCacheGetAttr(cache, tuple, get_object_attnum_acl(object->classId), &is_default);
	if (!is_default)
		nroles = aclmembers(DatumGetAclP(acl), &roles);
	ReleaseSysCache(tuple);

	/* by default only the owner has privileges on tables and schemas */
	if (is_default &&
		(object->classId == RelationRelationId || object->classId == NamespaceRelationId))
		return;
	RemoveRoleFromObjectACL(ACL_ID_PUBLIC, object->classId, object->objectId);
	CommandCounterIncrement();
	for (int i = 0; i < nroles; i++)
	{
		if (roles[i] == owner)
			continue;
		RemoveRoleFromObjectACL(roles[i], object->classId, object->objectId);
		CommandCounterIncrement();
	}
}

/*
 * Only objects that became members in this transaction are closed.  So an update keeps what
 * idem_grant() has granted on older members, and a call outside of a script changes nothing.
 */
Datum
idem_close_members(PG_FUNCTION_ARGS)
{
	Relation depend;
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple tuple;
	List *members = NIL;
	ListCell *lc;

	idem_fn_begin(fcinfo, &idem_close_members_signature, "idem_close_members()");
	depend = table_open(DependRelationId, AccessShareLock);
	ScanKeyInit(&keys[0], Anum_pg_depend_refclassid, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(ExtensionRelationId));
	ScanKeyInit(&keys[1], Anum_pg_depend_refobjid, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(get_extension_oid("idem", false)));
	scan = systable_beginscan(depend, DependReferenceIndexId, true, NULL, 2, keys);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_depend form = (Form_pg_depend) GETSTRUCT(tuple);

		if (form->deptype == DEPENDENCY_EXTENSION &&
			TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data)))
		{
			ObjectAddress *member = palloc_object(ObjectAddress);

			ObjectAddressSet(*member, form->classid, form->objid);
			members = lappend(members, member);
		}
	}
	systable_endscan(scan);
	table_close(depend, AccessShareLock);

	foreach (lc, members)
		close_object(lfirst(lc));
	/* W5: the worker must visit this database, even if it found no extension here before */
	idem_counters_note_use();
	PG_RETURN_VOID();
}
