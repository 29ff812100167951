/*
 * job.c
 *		SQL functions for a job by its number: idem_cancel, idem_retry, idem_job; and by its
 *		key: idem_cancel_by_key, idem_job_by_key.
 *
 * They check their arguments, call the store, and form the row to return.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "jobs/admin/jobadmin.h"

#define JOB_NATTS 20

/* The most jobs of a key that one call shows */
#define MAX_JOBS 10000

static const Oid job_types[JOB_NATTS] = {
	INT8OID, TEXTOID, TEXTOID, TEXTOID, JSONBOID, JSONBOID, INT4OID,
	INT4OID, INT4OID, TEXTOID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID, TIMESTAMPTZOID,
	TIMESTAMPTZOID, TIMESTAMPTZOID, JSONBOID, JSONBOID, JSONBOID, JSONBOID};

IDEM_FUNCTION(idem_cancel, BOOLOID, INT8OID);
IDEM_FUNCTION(idem_retry, BOOLOID, INT8OID);
IDEM_FUNCTION(idem_job, RECORDOID, INT8OID);
IDEM_FUNCTION(idem_cancel_by_key, INT4OID, TEXTOID, TEXTOID, TEXTOID);
IDEM_FUNCTION(idem_job_by_key, RECORDOID, TEXTOID, TEXTOID, INT4OID, TEXTOID);

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

/* A column of a row to return, null if there is no value */
static void
set_jsonb(Datum *value, bool *isnull, Jsonb *jsonb)
{
	*value = JsonbPGetDatum(jsonb);
	*isnull = jsonb == NULL;
}

static void
set_text(Datum *value, bool *isnull, text *text)
{
	*value = PointerGetDatum(text);
	*isnull = text == NULL;
}

static void
set_time(Datum *value, bool *isnull, TimestampTz time)
{
	*value = TimestampTzGetDatum(time);
	*isnull = time == 0;
}

static void
put_job(const IdemJobInfo *info, void *arg)
{
	ReturnSetInfo *rsinfo = arg;
	Datum values[JOB_NATTS] = {0};
	bool nulls[JOB_NATTS] = {false};

	values[0] = Int64GetDatum(info->job_id);
	values[1] = PointerGetDatum(info->queue);
	values[2] = CStringGetTextDatum(info->state);
	set_text(&values[3], &nulls[3], info->key);
	set_jsonb(&values[4], &nulls[4], info->payload);
	set_jsonb(&values[5], &nulls[5], info->result);
	values[6] = Int32GetDatum(info->priority);
	values[7] = Int32GetDatum(info->attempt);
	values[8] = Int32GetDatum(info->max_attempts);
	set_text(&values[9], &nulls[9], info->worker);
	set_text(&values[10], &nulls[10], idem_errors_get_last(info->errors));
	values[11] = TimestampTzGetDatum(info->enqueued_at);
	values[12] = TimestampTzGetDatum(info->run_at);
	nulls[12] = info->ended_at != 0;
	set_time(&values[13], &nulls[13], info->started_at);
	set_time(&values[14], &nulls[14], info->lease_until);
	set_time(&values[15], &nulls[15], info->ended_at);
	set_jsonb(&values[16], &nulls[16], info->headers);
	set_jsonb(&values[17], &nulls[17], info->links);
	set_jsonb(&values[18], &nulls[18], info->errors);
	set_jsonb(&values[19], &nulls[19], info->progress);
	idem_fn_put_row(rsinfo, values, nulls, lengthof(values));
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
		put_job(&info, rsinfo);
	idem_table_close(&jobs);
	return (Datum) 0;
}

/* The key in the first two arguments, of a queue that the caller may use */
static IdemJobKey
get_job_key(FunctionCallInfo fcinfo, int scopearg)
{
	IdemKey key;
	IdemQueue settings;
	text *queue = idem_args_queue(fcinfo, 0);

	idem_args_key(fcinfo, 1, scopearg, &key);
	idem_queuestore_use(queue, &settings);
	return (IdemJobKey){.queue = queue, .key = key.key, .scope = key.scope};
}

Datum
idem_cancel_by_key(PG_FUNCTION_ARGS)
{
	IdemTable jobs;
	IdemJobKey key;
	int cancelled;

	idem_fn_begin(fcinfo, &idem_cancel_by_key_signature, "idem_cancel_by_key()");
	key = get_job_key(fcinfo, 2);

	idem_jobtable_open(&jobs, RowExclusiveLock);
	cancelled = idem_bykeystore_cancel(&jobs, &key);
	idem_table_close(&jobs);
	PG_RETURN_INT32(cancelled);
}

Datum
idem_job_by_key(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	ReturnSetInfo *rsinfo;
	IdemTable jobs;
	IdemJobKey key;
	int max_jobs;

	idem_fn_begin(fcinfo, &idem_job_by_key_signature, NULL);
	rsinfo = idem_fn_row_set(fcinfo, job_types, JOB_NATTS, &row_desc);
	key = get_job_key(fcinfo, 3);
	max_jobs = idem_args_max_jobs(fcinfo, 2, MAX_JOBS);

	idem_jobtable_open(&jobs, AccessShareLock);
	idem_bykeystore_list(&jobs, &key, max_jobs, put_job, rsinfo);
	idem_table_close(&jobs);
	return (Datum) 0;
}
