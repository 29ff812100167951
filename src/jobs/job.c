/*
 * job.c
 *		SQL functions for a job by its number: idem_cancel, idem_retry, idem_job.
 *
 * They check their arguments, call the store, and form the row to return.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "jobs/jobs.h"

#define JOB_NATTS 14

static const Oid job_types[JOB_NATTS] = {
	TEXTOID, TEXTOID, TEXTOID, JSONBOID, JSONBOID, INT4OID, INT4OID,
	INT4OID, TEXTOID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID};

IDEM_FUNCTION(idem_cancel, BOOLOID, INT8OID);
IDEM_FUNCTION(idem_retry, BOOLOID, INT8OID);
IDEM_FUNCTION(idem_job, RECORDOID, INT8OID);

Datum
idem_cancel(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	int64 job_id;
	bool cancelled;

	idem_fn_begin(fcinfo, &idem_cancel_signature, "idem_cancel()");
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	cancelled = idem_jobstore_cancel(&jobs, job_id);
	idem_table_close(&jobs);
	PG_RETURN_BOOL(cancelled);
}

Datum
idem_retry(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	int64 job_id;
	bool retried;

	idem_fn_begin(fcinfo, &idem_retry_signature, "idem_retry()");
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	retried = idem_jobstore_retry(&jobs, job_id);
	idem_table_close(&jobs);
	PG_RETURN_BOOL(retried);
}

static void
put_job(ReturnSetInfo *rsinfo, const IdemJobInfo *info)
{
	Datum values[JOB_NATTS] = {0};
	bool nulls[JOB_NATTS] = {false};

	values[0] = PointerGetDatum(info->queue);
	values[1] = CStringGetTextDatum(info->state);
	values[2] = PointerGetDatum(info->key);
	values[3] = JsonbPGetDatum(info->payload);
	values[4] = JsonbPGetDatum(info->result);
	values[5] = Int32GetDatum(info->priority);
	values[6] = Int32GetDatum(info->attempt);
	values[7] = Int32GetDatum(info->max_attempts);
	values[8] = PointerGetDatum(info->worker);
	values[9] = PointerGetDatum(info->error);
	values[10] = TimestampTzGetDatum(info->enqueued_at);
	values[11] = TimestampTzGetDatum(info->run_at);
	values[12] = TimestampTzGetDatum(info->lease_until);
	values[13] = TimestampTzGetDatum(info->ended_at);
	nulls[2] = info->key == NULL;
	nulls[3] = info->payload == NULL;
	nulls[4] = info->result == NULL;
	nulls[8] = info->worker == NULL;
	nulls[9] = info->error == NULL;
	nulls[11] = info->ended_at != 0;
	nulls[12] = info->lease_until == 0;
	nulls[13] = info->ended_at == 0;
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

Datum
idem_job(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	ReturnSetInfo *rsinfo;
	IdemTable jobs;
	IdemJobInfo info;
	int64 job_id;

	idem_fn_begin(fcinfo, &idem_job_signature, NULL);
	rsinfo = idem_fn_row_set(fcinfo, job_types, JOB_NATTS, &row_desc);
	job_id = idem_args_job_id(fcinfo, 0);

	idem_jobtable_open(&jobs, AccessShareLock);
	if (idem_jobstore_get(&jobs, job_id, &info))
		put_job(rsinfo, &info);
	idem_table_close(&jobs);
	return (Datum) 0;
}
