/*
 * check.c
 *		Refuse a table that the functions of idem must not use as it is.
 *
 * A table that was altered.  idem writes its tables without ExecInsert() and related
 * functions, which handle triggers, rules, policies, partition bounds and expressions.  So a
 * table that has any of these is refused.  Indexes other than the primary key are checked when
 * idem_table_open_indexes() opens them, the rest in every call.
 *
 * A table that Citus has distributed (M7).  Citus keeps the rows of such a table in shards, which
 * are other tables, perhaps on other nodes.  It redirects SQL commands to them, but idem accesses
 * its tables below SQL.  So idem would use the table that is left on this node, which is empty:
 * every key would be new, and each node would run the work again.  Only the coordinator puts a
 * trigger on the table; on the other nodes the row of pg_dist_partition is the only sign.  Citus
 * invalidates the table in the relation cache when it changes that row.
 *
 * A table that a subscription of this database writes: its rows belong to the publisher.  If
 * the subscriber deleted an expired key, its apply worker would find no row for the update by
 * which a claim on the publisher takes the key over, and the work of the key would run again
 * after the cutover.  So cleanup skips such a table (W1), and functions that write it are
 * refused, as on a standby (K13).  A disabled subscription counts as well: it can be enabled
 * and continue where it stopped.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/partition.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_index.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_subscription_rel.h"
#include "catalog/pg_type.h"
#include "nodes/primnodes.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "table/table.h"

/* Raise the error for a table that is not as the extension has created it */
void
idem_check_refuse(const IdemTableDef *def, const char *detail, const char *hint)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("unexpected definition of table \"idem.%s\"", def->name),
			errdetail("%s", detail),
			errhint("%s", hint));
}

/* The command repairs or shows the problem; the hint says what to do if it only shows it */
static bool
set_problem(IdemShapeProblem *problem, const char *detail, const char *hint, const char *command)
{
	problem->detail = detail;
	problem->hint = hint != NULL ? hint : psprintf("Run %s.", command);
	problem->command = command;
	return true;
}

/* A command that shows the columns of the table */
static const char *
show_columns(const IdemTableDef *def)
{
	return psprintf("SELECT attnum, attname, pg_catalog.format_type(atttypid, atttypmod) FROM pg_catalog.pg_attribute WHERE attrelid OPERATOR(pg_catalog.=) 'idem.%s'::pg_catalog.regclass AND attnum OPERATOR(pg_catalog.>) 0 ORDER BY attnum",
					def->name);
}

static char *
get_qualified_name(Oid relid)
{
	return quote_qualified_identifier(get_namespace_name(get_rel_namespace(relid)),
									  get_rel_name(relid));
}

/* Are the first columns those of the definition, at their places? */
static bool
begins_as_defined(const IdemTableDef *def, TupleDesc desc)
{
	if (desc->natts < def->natts)
		return false;
	for (int i = 0; i < def->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (att->attisdropped || att->atttypid != def->types[i] ||
			(att->atttypid == TEXTOID && att->attcollation != C_COLLATION_OID))
			return false;
	}
	return true;
}

/*
 * Are there columns that idem has not created?  A column that was added and dropped stays in the
 * descriptor.  The rows that idem writes end before it, and no function reads it, so it needs no
 * further care as long as it is behind all columns of the definition.  (A version of idem that
 * adds a column to a table has to place it behind such a column.)
 */
static bool
find_columns(const IdemTableDef *def, TupleDesc desc, IdemShapeProblem *problem)
{
	if (!begins_as_defined(def, desc))
		return set_problem(problem, "A column was dropped, moved, or has another type or collation.",
						   "Save its rows, drop and create the extension, and insert them again.",
						   show_columns(def));
	for (int i = def->natts; i < desc->natts; i++)
	{
		const char *name = NameStr(TupleDescAttr(desc, i)->attname);

		if (!TupleDescAttr(desc, i)->attisdropped)
			return set_problem(problem,
							   psprintf("It has the column \"%s\", which idem has not created.", name), NULL,
							   psprintf("ALTER TABLE idem.%s DROP COLUMN %s", def->name, quote_identifier(name)));
	}
	return false;
}

/* A trigger of a user, or one that the server has made for a foreign key */
static const char *
get_drop_trigger(const IdemTableDef *def, const Trigger *trigger)
{
	HeapTuple tuple = SearchSysCache1(CONSTROID, ObjectIdGetDatum(trigger->tgconstraint));
	Form_pg_constraint form;
	const char *command;

	if (!trigger->tgisinternal || !HeapTupleIsValid(tuple))
	{
		if (HeapTupleIsValid(tuple))
			ReleaseSysCache(tuple);
		return psprintf("DROP TRIGGER %s ON idem.%s", quote_identifier(trigger->tgname), def->name);
	}
	form = (Form_pg_constraint) GETSTRUCT(tuple);
	command = psprintf("ALTER TABLE %s DROP CONSTRAINT %s", get_qualified_name(form->conrelid),
					   quote_identifier(NameStr(form->conname)));
	ReleaseSysCache(tuple);
	return command;
}

/* Find what access by idem would bypass, but not in indexes */
static bool
find_bypassed(const IdemTableDef *def, Relation heap, IdemShapeProblem *problem)
{
	TupleConstr *constr = RelationGetDescr(heap)->constr;

	if (heap->rd_rel->relkind != RELKIND_RELATION || heap->rd_rel->relam != HEAP_TABLE_AM_OID)
		return set_problem(problem, "It is not an ordinary table with access method heap.",
						   "Drop and create the extension.", show_columns(def));
	if (heap->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		return set_problem(problem, "It is not logged: a crash would empty it.", NULL,
						   psprintf("ALTER TABLE idem.%s SET LOGGED", def->name));
	if (heap->rd_rel->relispartition)
		return set_problem(
			problem,
			"It is a partition of another table, whose bounds access by idem would bypass.", NULL,
			psprintf("ALTER TABLE %s DETACH PARTITION idem.%s",
					 get_qualified_name(get_partition_parent(RelationGetRelid(heap), true)),
					 def->name));
	if (heap->rd_rel->relrowsecurity)
		return set_problem(problem, "Row security is enabled, which access by idem would bypass.", NULL,
						   psprintf("ALTER TABLE idem.%s DISABLE ROW LEVEL SECURITY", def->name));
	if (heap->trigdesc != NULL)
		return set_problem(problem,
						   "There is a trigger or a foreign key, which access by idem would bypass.",
						   psprintf("Run %s, and keep dependent data in a table of your own.",
									get_drop_trigger(def, &heap->trigdesc->triggers[0])),
						   get_drop_trigger(def, &heap->trigdesc->triggers[0]));
	if (heap->rd_rel->relhasrules && heap->rd_rules != NULL)
		return set_problem(problem, "There is a rule, which access by idem would bypass.",
						   "Drop the rule.",
						   psprintf("SELECT rulename, definition FROM pg_catalog.pg_rules WHERE schemaname OPERATOR(pg_catalog.=) 'idem' AND tablename OPERATOR(pg_catalog.=) '%s'",
									def->name));
	if (constr != NULL && constr->num_check > 0)
		return set_problem(problem, "There is a check constraint, which access by idem would bypass.",
						   NULL,
						   psprintf("ALTER TABLE idem.%s DROP CONSTRAINT %s", def->name,
									quote_identifier(constr->check[0].ccname)));
	return false;
}

/* Find a not-null constraint: the server would conclude that a short row stores the column, too */
static bool
find_not_null(const IdemTableDef *def, TupleDesc desc, IdemShapeProblem *problem)
{
	for (int i = 0; i < def->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (att->attnotnull && (def->nullable & IDEM_COLUMN(i + 1)))
			return set_problem(problem, "A column that may be null has a not-null constraint.", NULL,
							   psprintf("ALTER TABLE idem.%s ALTER COLUMN %s DROP NOT NULL", def->name,
										quote_identifier(NameStr(att->attname))));
	}
	return false;
}

/* Refuse a table with anything that access by idem would bypass */
void
idem_check_shape(const IdemTableDef *def, Relation heap)
{
	TupleDesc desc = RelationGetDescr(heap);
	IdemShapeProblem problem;

	/* with another version of the SQL objects, the columns may be right */
	if (find_columns(def, desc, &problem) && !idem_version_is_equal())
		idem_version_mismatch(psprintf("Table idem.%s has other columns.", def->name));
	if (find_columns(def, desc, &problem) || find_bypassed(def, heap, &problem) ||
		find_not_null(def, desc, &problem))
		idem_check_refuse(def, problem.detail, problem.hint);
}

static bool
begins_with(Form_pg_index form, const AttrNumber *columns, int ncolumns)
{
	if (form->indnkeyatts < ncolumns)
		return false;
	for (int i = 0; i < ncolumns; i++)
	{
		if (form->indkey.values[i] != columns[i])
			return false;
	}
	return true;
}

/* Is it an index on the columns of the primary key and no others? */
bool
idem_check_is_on_pkey(const IdemTableDef *def, Form_pg_index form)
{
	return form->indnkeyatts == def->npkey && begins_with(form, def->pkey, def->npkey);
}

/*
 * Is the index the copy of the primary key that REINDEX CONCURRENTLY builds?
 * No other unique index may exist.  An index that treats different keys as equal
 * would refuse a key that the primary key does not contain, and the caller would
 * look the key up and insert it again without end.
 */
static bool
is_copy_of_pkey(const IdemTableDef *def, Relation pkey, Relation index)
{
	if (!idem_check_is_on_pkey(def, index->rd_index))
		return false;
	for (int i = 0; i < def->npkey; i++)
	{
		if (index->rd_opfamily[i] != pkey->rd_opfamily[i] ||
			index->rd_indcollation[i] != pkey->rd_indcollation[i])
			return false;
	}
	return true;
}

/* Does the index hold all rows whose first column is not null, and only these? */
static bool
skips_nulls(Relation index)
{
	List *predicate = RelationGetIndexPredicate(index);
	NullTest *test = predicate != NIL ? linitial(predicate) : NULL;

	return list_length(predicate) == 1 && IsA(test, NullTest) &&
		test->nulltesttype == IS_NOT_NULL && IsA(test->arg, Var) &&
		((Var *) test->arg)->varattno == index->rd_index->indkey.values[0];
}

static const char *
get_drop_index(const IdemTableDef *def, Relation index)
{
	const char *name = quote_identifier(RelationGetRelationName(index));

	return OidIsValid(get_index_constraint(RelationGetRelid(index))) ?
		psprintf("ALTER TABLE idem.%s DROP CONSTRAINT %s", def->name, name) :
		psprintf("DROP INDEX idem.%s", name);
}

/* Find out if idem would not keep the index up to date, or if it could raise 23505 (J7) */
static bool
find_index_problem(const IdemTableDef *def, Relation pkey, Relation index,
				   IdemShapeProblem *problem)
{
	Form_pg_index form = index->rd_index;

	for (int i = 0; i < form->indnatts; i++)
	{
		if (form->indkey.values[i] == 0)
			return set_problem(problem, "There is an index on an expression, which idem would not keep up to date.",
							   NULL, get_drop_index(def, index));
	}
	if (!heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL) && !skips_nulls(index))
		return set_problem(problem, "There is a partial index, which idem would not keep up to date.",
						   NULL, get_drop_index(def, index));
	if (form->indisexclusion || (form->indisunique && !is_copy_of_pkey(def, pkey, index)))
		return set_problem(problem, "There is another unique index or an exclusion constraint.",
						   psprintf("Run %s: the primary key alone decides what is unique.",
									get_drop_index(def, index)),
						   get_drop_index(def, index));
	return false;
}

/* Refuse such an index */
void
idem_check_index(IdemTable *table, Relation index)
{
	IdemShapeProblem problem;

	if (find_index_problem(table->def, table->pkey, index, &problem))
		idem_check_refuse(table->def, problem.detail, problem.hint);
}

static bool
find_problem_of_indexes(const IdemTableDef *def, Relation heap, IdemShapeProblem *problem)
{
	Oid pkey_oid = RelationGetPrimaryKeyIndex(heap, false);
	Relation pkey;
	bool found = false;
	ListCell *lc;

	if (!OidIsValid(pkey_oid))
		return set_problem(problem, "The primary key is missing.", NULL, def->pkey_command);
	pkey = index_open(pkey_oid, AccessShareLock);
	if (!idem_check_is_on_pkey(def, pkey->rd_index))
		found = set_problem(problem, "The primary key is on other columns.",
							"Drop and create the extension.", show_columns(def));
	foreach (lc, RelationGetIndexList(heap))
	{
		Relation index = index_open(lfirst_oid(lc), AccessShareLock);

		found = found ||
			(index->rd_index->indisready && find_index_problem(def, pkey, index, problem));
		index_close(index, AccessShareLock);
	}
	index_close(pkey, AccessShareLock);
	return found;
}

/* For idem_doctor(): find out why functions refuse the table; false: they do not */
bool
idem_check_find_problem(const IdemTableDef *def, Relation heap, IdemShapeProblem *problem)
{
	TupleDesc desc = RelationGetDescr(heap);

	return find_columns(def, desc, problem) || find_bypassed(def, heap, problem) ||
		find_not_null(def, desc, problem) || find_problem_of_indexes(def, heap, problem);
}

/* Does the index order the rows by these columns, with text in collation C? */
bool
idem_check_is_ordered_by(Relation index, const AttrNumber *columns, int ncolumns)
{
	if (!index->rd_index->indisvalid || index->rd_rel->relam != BTREE_AM_OID ||
		!begins_with(index->rd_index, columns, ncolumns))
		return false;
	for (int i = 0; i < ncolumns; i++)
	{
		if (index->rd_indoption[i] != 0 ||
			(OidIsValid(index->rd_indcollation[i]) && index->rd_indcollation[i] != C_COLLATION_OID))
			return false;
	}
	return true;
}

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
	{
		kind = "local or single-shard table";
		if (get_char(tuple, desc, "repmodel") == REPMODEL_2PC)
			kind = "reference table";
		if (get_char(tuple, desc, "partmethod") != PARTMETHOD_NONE)
			kind = "distributed table";
	}
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
idem_check_citus_kind(Oid relid)
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
idem_check_is_citus_worker(void)
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
idem_check_citus(const IdemTableDef *def, Oid relid)
{
	const char *kind = idem_check_citus_kind(relid);

	if (likely(kind == NULL))
		return;
	idem_check_refuse(def,
					  psprintf("Citus has made it a %s: access by idem would bypass its shards.", kind),
					  "Leave its triggers alone. On the coordinator, run the fix that idem_doctor() shows for the check \"citus\".");
}

/* Number of invalidations of pg_subscription_rel that this backend has received */
static uint64 nchanges = 0;

/*
 * Does a subscription write the table?  Reads the latest committed rows of
 * pg_subscription_rel, even if an invalidation has not arrived yet.
 * If this returns false, no snapshot taken before the call shows a row that a
 * subscription has written.
 */
bool
idem_check_is_subscribed(Oid relid)
{
	Relation rel = table_open(SubscriptionRelRelationId, AccessShareLock);
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	ScanKeyData key;
	SysScanDesc scan;
	bool found;

	ScanKeyInit(&key, Anum_pg_subscription_rel_srrelid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(rel, SubscriptionRelSrrelidSrsubidIndexId, true, snapshot, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	return found;
}

/* W1, T6: does a subscription write one of these tables of idem?  The names end with NULL. */
bool
idem_check_any_subscribed(const char *const *tables)
{
	Oid schema = get_namespace_oid("idem", true);

	for (int i = 0; OidIsValid(schema) && tables[i] != NULL; i++)
	{
		Oid relid = get_relname_relid(tables[i], schema);

		if (OidIsValid(relid) && idem_check_is_subscribed(relid))
			return true;
	}
	return false;
}

static void
count_change(Datum arg, SysCacheIdentifier cacheid, uint32 hashvalue)
{
	nchanges++;
}

/* Is it known that no subscription writes the table? */
bool
idem_check_knows_unsubscribed(const IdemTableDef *def)
{
	return nchanges != 0 && def->cache->unsubscribed_at == nchanges;
}

/*
 * Raise an error if a subscription writes the table (K13).  Reads the catalog again
 * only if pg_subscription_rel has changed since the last check.  The caller has opened
 * the table and passes its OID, because an invalidation may have cleared the OID in
 * the cache.
 */
void
idem_check_subscription(const IdemTableDef *def, Oid relid)
{
	uint64 seen = nchanges;

	if (seen == 0)
	{
		CacheRegisterSyscacheCallback(SUBSCRIPTIONRELMAP, count_change, (Datum) 0);
		seen = nchanges = 1;
	}
	if (def->cache->unsubscribed_at == seen)
		return;
	if (idem_check_is_subscribed(relid))
		ereport(ERROR,
				errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				errmsg("table \"idem.%s\" is written by a subscription", def->name),
				errdetail("Until the cutover its rows belong to the publisher."),
				errhint("Use the publisher, or drop the subscription when the publisher takes no more writes."));
	def->cache->unsubscribed_at = seen;
}
