/*
 * doctor.c
 *		SQL functions for idem_doctor(): idem_stat_tables, idem_citus_table.
 *
 * They apply the checks of table/check.c, and raise no error for what they find.
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/namespace.h"
#include "utils/lsyscache.h"

#include "keys/keys.h"
#include "schedules/schedules.h"

IDEM_FUNCTION(idem_stat_tables);
IDEM_FUNCTION(idem_citus_table);

static const IdemTableDef *const defs[] = {
	&idem_keyrow_def, &idem_jobtable_def, &idem_jobtable_keys_def, &idem_jobtable_log_def,
	&idem_queuestore_def, &idem_schedulestore_def, &idem_shard_def};

/* One row per table with the first problem that was found: name, detail, command */
Datum
idem_stat_tables(PG_FUNCTION_ARGS)
{
	Oid namespace = get_namespace_oid("idem", true);
	IdemAnswer answer;

	idem_fn_begin(fcinfo, &idem_stat_tables_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_stat_tables_signature);
	for (int i = 0; i < (int) lengthof(defs); i++)
	{
		Oid relid =
			OidIsValid(namespace) ? get_relname_relid(defs[i]->name, namespace) : InvalidOid;
		Relation heap = OidIsValid(relid) ? try_table_open(relid, AccessShareLock) : NULL;
		IdemShapeProblem problem = {
			.detail = "There is no such table.",
			.command = "SELECT pg_catalog.pg_describe_object(d.classid, d.objid, 0) FROM pg_catalog.pg_depend AS d JOIN pg_catalog.pg_extension AS e ON e.oid OPERATOR(pg_catalog.=) d.refobjid WHERE e.extname OPERATOR(pg_catalog.=) 'idem' AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass ORDER BY 1"};
		bool found = heap == NULL || idem_check_find_problem(defs[i], heap, &problem);

		if (heap != NULL)
			table_close(heap, AccessShareLock);
		if (!found)
			continue;
		idem_answer_string(&answer, Anum_idem_stat_tables_name, defs[i]->name);
		idem_answer_string(&answer, Anum_idem_stat_tables_detail, problem.detail);
		idem_answer_string(&answer, Anum_idem_stat_tables_fix, psprintf("%s;", problem.command));
		idem_answer_put(&answer);
	}
	return (Datum) 0;
}

/* What Citus has made of a table (M7); null if nothing, also for a null argument */
Datum
idem_citus_table(PG_FUNCTION_ARGS)
{
	const char *kind = NULL;

	idem_fn_begin(fcinfo, &idem_citus_table_signature, NULL);
	if (!PG_ARGISNULL(0))
		kind = idem_check_citus_kind(PG_GETARG_OID(0));
	if (kind == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(kind));
}
