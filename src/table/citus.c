/*
 * citus.c
 *		Find out whether Citus has distributed a table of idem (M7).
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

/* Number of the column with this name; the versions of Citus do not have the same columns */
static AttrNumber
find_column(TupleDesc desc, const char *name)
{
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute column = TupleDescAttr(desc, i);

		if (!column->attisdropped && strcmp(NameStr(column->attname), name) == 0)
			return column->attnum;
	}
	return InvalidAttrNumber;
}

/* The value of a column of type "char"; 0 if there is no such column, or it is null */
static char
get_char(HeapTuple tuple, TupleDesc desc, const char *name)
{
	AttrNumber attno = find_column(desc, name);
	bool isnull = true;
	Datum value = (Datum) 0;

	if (AttributeNumberIsValid(attno) && TupleDescAttr(desc, attno - 1)->atttypid == CHAROID)
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
	AttrNumber attno = find_column(desc, "logicalrelid");
	const char *kind = NULL;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple tuple;

	/* a version of Citus that we do not know: better an error than a second run */
	if (!AttributeNumberIsValid(attno) || TupleDescAttr(desc, attno - 1)->atttypid != REGCLASSOID)
		return "table of unknown kind";
	ScanKeyInit(&key, attno, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(relid));
	scan = systable_beginscan(catalog, InvalidOid, false, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		kind = get_kind(tuple, desc);
	systable_endscan(scan);
	return kind;
}

/* What Citus has made of the table; NULL if nothing, or if there is no Citus in this database */
const char *
idem_citus_kind(Oid relid)
{
	Oid oid = get_relname_relid("pg_dist_partition", PG_CATALOG_NAMESPACE);
	const char *kind = NULL;
	Relation catalog;

	if (likely(!OidIsValid(oid)))
		return NULL;
	catalog = try_table_open(oid, AccessShareLock);
	if (catalog == NULL)
		return NULL;
	if (catalog->rd_rel->relkind == RELKIND_RELATION)
		kind = find_kind(catalog, relid);
	table_close(catalog, AccessShareLock);
	return kind;
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
