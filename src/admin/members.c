/*
 * members.c
 *		idem_close_members: revoke every privilege on new members of the extension
 *		from all roles but their owner.
 *
 * Objects that CREATE EXTENSION creates can have privileges from the start:
 * functions and types are open to PUBLIC, and ALTER DEFAULT PRIVILEGES of the
 * role that runs the command may add others.  The install script calls
 * idem_close_members() after it has created all objects and before it grants
 * any privilege.  Update scripts do this, too.
 *
 * Only objects that became members in this transaction are changed.  So an
 * update keeps what idem_grant() has granted on older members, and a call outside
 * of a script changes nothing.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_class.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "fn/fn.h"
#include "stats/stats.h"

IDEM_FUNCTION(idem_close_members);

/* Objects that became members of the extension in this transaction */
static List *
list_new_members(void)
{
	Relation depend = table_open(DependRelationId, AccessShareLock);
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple tuple;
	List *members = NIL;

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
			ObjectAddress *member = palloc(sizeof(ObjectAddress));

			ObjectAddressSet(*member, form->classid, form->objid);
			members = lappend(members, member);
		}
	}
	systable_endscan(scan);
	table_close(depend, AccessShareLock);
	return members;
}

/* Copy the ACL of an object; NULL: the object has the default privileges of its kind */
static Acl *
get_acl(const ObjectAddress *object, Oid *owner)
{
	int cache = get_object_catcache_oid(object->classId);
	HeapTuple tuple = SearchSysCache1(cache, ObjectIdGetDatum(object->objectId));
	Datum value;
	Acl *acl;
	bool isnull;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for member %u of class %u", object->objectId, object->classId);
	*owner = DatumGetObjectId(
		SysCacheGetAttr(cache, tuple, get_object_attnum_owner(object->classId), &isnull));
	value = SysCacheGetAttr(cache, tuple, get_object_attnum_acl(object->classId), &isnull);
	acl = isnull ? NULL : DatumGetAclPCopy(value);
	ReleaseSysCache(tuple);
	return acl;
}

static void
revoke_all(const ObjectAddress *object, Oid role)
{
	RemoveRoleFromObjectACL(role, object->classId, object->objectId);
	CommandCounterIncrement();
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
	Oid owner;
	Acl *acl;
	Oid *roles;
	int nroles;

	if (!has_privileges(object))
		return;
	acl = get_acl(object, &owner);
	/* by default only the owner has privileges on tables and schemas */
	if (acl == NULL &&
		(object->classId == RelationRelationId || object->classId == NamespaceRelationId))
		return;
	revoke_all(object, ACL_ID_PUBLIC);
	nroles = acl == NULL ? 0 : aclmembers(acl, &roles);
	for (int i = 0; i < nroles; i++)
	{
		if (roles[i] != owner)
			revoke_all(object, roles[i]);
	}
}

Datum
idem_close_members(PG_FUNCTION_ARGS)
{
	ListCell *lc;

	idem_fn_begin(fcinfo, &idem_close_members_signature, "idem_close_members()");
	foreach (lc, list_new_members())
		close_object(lfirst(lc));
	/* W5: the worker must visit this database, even if it found no extension here before */
	idem_counters_note_use();
	PG_RETURN_VOID();
}
