/*
 * citus.c
 *		Find out whether Citus has distributed a table of idem, and whether this is a worker (M7).
 *
 * Citus keeps the rows of such a table in shards, which are other tables, perhaps on other
 * nodes.  It redirects SQL commands to them, but idem accesses its tables below SQL.  So idem
 * would use the table that is left on this node, which is empty: every key would be new, and
 * each node would run the work again.  Only the coordinator puts a trigger on the table; on the
 * other nodes the row of pg_dist_partition is the only sign.
 *
 * table.c calls this when it checks the table, so an ordinary call costs nothing.  Citus
 * invalidates the table in the relation cache when it changes the row.
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"

#include "table/table.h"

/* Values of pg_dist_partition, the same in all versions of Citus */
#define PARTMETHOD_NONE 'n'
#define REPMODEL_2PC	't'

/* Number of the column; the versions of Citus do not have the same columns */
static AttrNumber
find_column(TupleDesc desc, const char *name, Oid type)
{
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute column = TupleDescAttr(desc, i);

		if (!column->attisdropped && column->atttypid == type &&
			strcmp(NameStr(column->attname), name) == 0)
			return column->attnum;
	}
	return InvalidAttrNumber;
}

/* The value of a column of type "char"; 0 if there is no such column, or it is null */
static char
get_char(HeapTuple tuple, TupleDesc desc, const char *name)
{
	AttrNumber attno = find_column(desc, name, CHAROID);
	bool isnull = true;
	Datum value = (Datum) 0;

	if (AttributeNumberIsValid(attno))
		value = heap_getattr(tuple, attno, desc, &isnull);
	return isnull ? 0 : DatumGetChar(value);
}

static const char *
get_kind(HeapTuple tuple, TupleDesc desc)
{
	if (get_char(tuple, desc, "partmethod") != PARTMETHOD_NONE)
		return "distributed table";
	if (get_char(tuple, desc, "repmodel") == REPMODEL_2PC)
		return "reference table";
	return "local or single-shard table";
}

/* Look the table up in the rows of pg_dist_partition that are committed by now */
static const char *
find_kind(Relation catalog, Oid relid)
{
	TupleDesc desc = RelationGetDescr(catalog);
	AttrNumber attno = find_column(desc, "logicalrelid", REGCLASSOID);
	const char *kind = NULL;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple tuple;

	/* a version of Citus that we do not know: better an error than a second run */
	if (!AttributeNumberIsValid(attno))
		return "table of unknown kind";
	ScanKeyInit(&key, attno, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(relid));
	scan = systable_beginscan(catalog, InvalidOid, false, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		kind = get_kind(tuple, desc);
	systable_endscan(scan);
	return kind;
}

/* Open a table of Citus; NULL if there is none.  A table of that name elsewhere is not of Citus. */
static Relation
open_catalog(const char *name)
{
	Oid relid = get_relname_relid(name, PG_CATALOG_NAMESPACE);

	if (likely(!OidIsValid(relid)) || get_rel_relkind(relid) != RELKIND_RELATION)
		return NULL;
	return try_table_open(relid, AccessShareLock);
}

/* What Citus has made of the table; NULL if nothing, or if there is no Citus in this database */
const char *
idem_citus_kind(Oid relid)
{
	Relation catalog = open_catalog("pg_dist_partition");
	const char *kind;

	if (catalog == NULL)
		return NULL;
	kind = find_kind(catalog, relid);
	table_close(catalog, AccessShareLock);
	return kind;
}

/* M7: is this database a worker of Citus?  The coordinator is group 0, as is a database alone. */
bool
idem_citus_is_worker(void)
{
	Relation catalog = open_catalog("pg_dist_local_group");
	bool is_worker = false;
	AttrNumber attno;
	SysScanDesc scan;
	HeapTuple tuple;

	if (catalog == NULL)
		return false;
	attno = find_column(RelationGetDescr(catalog), "groupid", INT4OID);
	scan = systable_beginscan(catalog, InvalidOid, false, NULL, 0, NULL);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple) && AttributeNumberIsValid(attno))
	{
		bool isnull;
		Datum group = heap_getattr(tuple, attno, RelationGetDescr(catalog), &isnull);

		is_worker = !isnull && DatumGetInt32(group) > 0;
	}
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return is_worker;
}

/* M7: raise an error if Citus has distributed the table */
void
idem_citus_refuse(const IdemTableDef *def, Oid relid)
{
	const char *kind = idem_citus_kind(relid);

	if (likely(kind == NULL))
		return;
	idem_shape_refuse(def,
					  psprintf("Citus has made it a %s: access by idem would bypass its shards.", kind),
					  "Leave its triggers alone. On the coordinator, run the fix that idem_doctor() shows for the check \"citus\".");
}
