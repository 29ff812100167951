/*
 * shape.c
 *		Check that a table and its indexes are as the extension has created them.
 *
 * idem writes its tables without ExecInsert() and related functions, which handle
 * triggers, rules, policies, partition bounds and expressions.  So a table that
 * has any of these is refused.  Indexes other than the primary key are checked when
 * idem_table_open_indexes() opens them, the rest in every call.
 */
#include "postgres.h"

#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "nodes/primnodes.h"

#include "table/table.h"

/* Raise the error for a table that is not as the extension has created it */
void
idem_shape_refuse(const IdemTableDef *def, const char *detail, const char *hint)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("unexpected definition of table \"idem.%s\"", def->name),
			errdetail("%s", detail),
			errhint("%s", hint));
}

static bool
has_columns(const IdemTableDef *def, TupleDesc desc)
{
	if (!idem_version_desc_matches(desc, def->types, def->natts))
		return false;
	for (int i = 0; i < desc->natts; i++)
	{
		if (def->types[i] == TEXTOID && TupleDescAttr(desc, i)->attcollation != C_COLLATION_OID)
			return false;
	}
	return true;
}

/* Refuse a table with anything that access by idem would bypass */
void
idem_shape_check(const IdemTableDef *def, Relation heap)
{
	TupleDesc desc = RelationGetDescr(heap);
	TupleConstr *constr = desc->constr;

	if (!has_columns(def, desc))
		idem_version_mismatch(psprintf("Table idem.%s has other columns.", def->name));
	if (heap->rd_rel->relkind != RELKIND_RELATION || heap->rd_rel->relam != HEAP_TABLE_AM_OID)
		idem_shape_refuse(def, "It is not an ordinary table with access method heap.",
						  "Drop and create the extension.");
	if (heap->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		idem_shape_refuse(def, "It is not logged: a crash would empty it.",
						  psprintf("Run ALTER TABLE idem.%s SET LOGGED.", def->name));
	if (heap->rd_rel->relispartition)
		idem_shape_refuse(def, "It is a partition of another table, whose bounds access by idem would bypass.",
						  psprintf("Run ALTER TABLE ... DETACH PARTITION idem.%s.", def->name));
	if (heap->rd_rel->relrowsecurity)
		idem_shape_refuse(def, "Row security is enabled, which access by idem would bypass.",
						  psprintf("Run ALTER TABLE idem.%s DISABLE ROW LEVEL SECURITY.", def->name));
	if (heap->trigdesc != NULL)
		idem_shape_refuse(def, "There is a trigger or a foreign key, which access by idem would bypass.",
						  "Drop it, and keep dependent data in a table of your own.");
	if (heap->rd_rel->relhasrules && heap->rd_rules != NULL)
		idem_shape_refuse(def, "There is a rule, which access by idem would bypass.",
						  "Drop the rule.");
	for (int i = 0; i < desc->natts; i++)
	{
		/* the server would conclude that every row stores the column, also a short row */
		if (TupleDescAttr(desc, i)->attnotnull && (def->nullable & IDEM_COLUMN(i + 1)))
			idem_shape_refuse(def, "A column that may be null has a not-null constraint.",
							  psprintf("Run ALTER TABLE idem.%s ALTER COLUMN ... DROP NOT NULL.", def->name));
	}
	if (constr != NULL && (constr->num_check > 0 || constr->has_generated_stored))
		idem_shape_refuse(def, "There is a check constraint or a generated column, which access by idem would bypass.",
						  "Drop it.");
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
idem_shape_is_on_pkey(const IdemTableDef *def, Form_pg_index form)
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
is_copy_of_pkey(IdemTable *table, Relation index)
{
	if (!idem_shape_is_on_pkey(table->def, index->rd_index))
		return false;
	for (int i = 0; i < table->def->npkey; i++)
	{
		if (index->rd_opfamily[i] != table->pkey->rd_opfamily[i] ||
			index->rd_indcollation[i] != table->pkey->rd_indcollation[i])
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

/* Refuse an index that idem would not keep up to date, or that could raise 23505 (J7) */
void
idem_shape_check_index(IdemTable *table, Relation index)
{
	const IdemTableDef *def = table->def;
	Form_pg_index form = index->rd_index;

	for (int i = 0; i < form->indnatts; i++)
	{
		if (form->indkey.values[i] == 0)
			idem_shape_refuse(def, "There is an index on an expression, which idem would not keep up to date.",
							  "Drop that index.");
	}
	if (!heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL) && !skips_nulls(index))
		idem_shape_refuse(def, "There is a partial index, which idem would not keep up to date.",
						  "Drop that index.");
	if (form->indisexclusion || (form->indisunique && !is_copy_of_pkey(table, index)))
		idem_shape_refuse(def, "There is another unique index or an exclusion constraint.",
						  "Drop it: the primary key alone decides what is unique.");
}

/* Does the index order the rows by these columns, with text in collation C? */
bool
idem_shape_is_ordered_by(Relation index, const AttrNumber *columns, int ncolumns)
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
