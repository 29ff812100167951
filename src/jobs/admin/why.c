/*
 * why.c
 *		SQL function that tells why a job does not run: idem_why.
 *
 * It checks its argument, calls the store (whystore.c), and forms the rows.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "jobs/admin/jobadmin.h"

#define WHY_NATTS 5

static const Oid why_types[WHY_NATTS] = {TEXTOID, TEXTOID, TIMESTAMPTZOID, INT4OID, TEXTOID};

IDEM_FUNCTION(idem_why, RECORDOID, INT8OID);

static void
put_reason(const IdemWhy *why, void *arg)
{
	ReturnSetInfo *rsinfo = arg;
	Datum values[WHY_NATTS] = {0};
	bool nulls[WHY_NATTS] = {false};

	values[0] = CStringGetTextDatum(why->reason);
	values[1] = CStringGetTextDatum(idem_show_text(why->detail));
	values[2] = TimestampTzGetDatum(why->since);
	values[3] = Int32GetDatum(why->pid);
	nulls[2] = why->since == 0;
	nulls[3] = why->pid == 0;
	nulls[4] = why->fix == NULL;
	if (why->fix != NULL)
		values[4] = CStringGetTextDatum(why->fix);
	idem_fn_put_row(rsinfo, values, nulls, lengthof(values));
}

Datum
idem_why(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	ReturnSetInfo *rsinfo;
	IdemTable jobs;
	int64 job_id;

	idem_fn_begin(fcinfo, &idem_why_signature, NULL);
	rsinfo = idem_fn_row_set(fcinfo, why_types, WHY_NATTS, &row_desc);
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, AccessShareLock);
	idem_whystore_explain(&jobs, job_id, put_reason, rsinfo);
	idem_table_close(&jobs);
	return (Datum) 0;
}
