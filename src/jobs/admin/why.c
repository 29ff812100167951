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

IDEM_FUNCTION(idem_why);

static void
put_reason(const IdemWhy *why, void *arg)
{
	IdemAnswer *answer = arg;

	idem_answer_string(answer, Anum_why_result_reason, why->reason);
	idem_answer_string(answer, Anum_why_result_detail, idem_show_text(why->detail));
	idem_answer_optional_time(answer, Anum_why_result_since, why->since);
	if (why->pid != 0)
		idem_answer_int32(answer, Anum_why_result_pid, why->pid);
	idem_answer_string(answer, Anum_why_result_fix, why->fix);
	idem_answer_put(answer);
}

Datum
idem_why(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemTable jobs;
	int64 job_id;

	idem_fn_begin(fcinfo, &idem_why_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_why_signature);
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, AccessShareLock);
	idem_whystore_explain(&jobs, job_id, put_reason, &answer);
	idem_table_close(&jobs);
	return (Datum) 0;
}
