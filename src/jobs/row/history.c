/*
 * history.c
 *		What is kept of attempts and jobs that have ended: the last errors of a job (J18), the
 *		history (idem.job_log), and the keys of until_expired (idem.job_keys).
 *
 * A number can occur twice if the sequence was set back, or if logical
 * replication has copied the rows but not the sequence.  An enqueue does not check
 * for that.  When the job ends, its row replaces the older row with the same
 * number, with a WARNING.  So no single row blocks a queue (J13).
 *
 * Another transaction may be deleting the older row, or may have locked it, for
 * example an open transaction that has called idem_cleanup().  Complete, fail and
 * cancel wait for that transaction, as long as lock_timeout allows.  Fetch and
 * cleanup wait for no transaction: they skip the job.  An enqueue that makes a job
 * dead gets the id of that transaction, and waits for it after it has released
 * the lock on the hash.
 *
 * idem_fail() makes a job dead on the last attempt or on request.  A job is spent if the
 * lease of its last attempt has expired.  Fetch, enqueue and cleanup make a spent job dead
 * when they find it.  The caller has locked the job, and an error of its transaction undoes
 * the move.
 *
 * The list of errors is an array of jsonb, oldest first.  It is bounded, because each failure
 * writes it anew.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datetime.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"
#include "utils/timestamp.h"

#include "jobs/row/job.h"

/* A long error is truncated, not refused: the job must be given back in any case */
static char *
clip_error(const text *error)
{
	int len = VARSIZE_ANY_EXHDR(error);

	if (len > IDEM_MAX_ERROR_LEN)
		len = pg_mbcliplen(VARDATA_ANY(error), len, IDEM_MAX_ERROR_LEN);
	return pnstrdup(VARDATA_ANY(error), len);
}

/* The time as the list has it.  Such strings are in the order of the times. */
static void
encode_time(char *at, TimestampTz time)
{
	int utc = 0;

	JsonEncodeDateTime(at, TimestampTzGetDatum(time), TIMESTAMPTZOID, &utc);
}

/* A list with one entry.  error NULL: the worker gave none. */
static Jsonb *
make_list(int attempt, const text *error)
{
	char at[MAXDATELEN + 1];
	StringInfoData json;

	encode_time(at, idem_clock_now());
	initStringInfo(&json);
	appendStringInfo(&json, "[{\"attempt\": %d, \"at\": \"%s\", \"error\": ", attempt, at);
	if (error == NULL)
		appendStringInfoString(&json, "null");
	else
		escape_json(&json, clip_error(error));
	appendStringInfoString(&json, "}]");
	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data)));
}

/* J18: the list with an entry for this attempt; errors NULL: there is no list yet */
Jsonb *
idem_history_add_error(Jsonb *errors, int attempt, const text *error)
{
	Datum list = JsonbPGetDatum(make_list(attempt, error));

	if (errors == NULL)
		return DatumGetJsonbP(list);
	list = DirectFunctionCall2(jsonb_concat, JsonbPGetDatum(errors), list);
	if (JsonContainerSize(&DatumGetJsonbP(list)->root) > IDEM_MAX_ERRORS)
		list = DirectFunctionCall2(jsonb_delete_idx, list, Int32GetDatum(0));
	return DatumGetJsonbP(list);
}

/* A string of the last entry; NULL if there is no entry, or no such string in it */
static text *
get_last_string(Jsonb *errors, const char *name)
{
	JsonbValue *entry;
	JsonbValue *value;

	if (errors == NULL || !JB_ROOT_IS_ARRAY(errors) || JB_ROOT_COUNT(errors) == 0)
		return NULL;
	entry = getIthJsonbValueFromContainer(&errors->root, JB_ROOT_COUNT(errors) - 1);
	if (entry->type != jbvBinary || !JsonContainerIsObject(entry->val.binary.data))
		return NULL;
	value = getKeyJsonValueFromContainer(entry->val.binary.data, name, strlen(name), NULL);
	if (value == NULL || value->type != jbvString)
		return NULL;
	return cstring_to_text_with_len(value->val.string.val, value->val.string.len);
}

/* The text of the last error; NULL if there is none, or if the worker gave none */
text *
idem_history_last_error(Jsonb *errors)
{
	return get_last_string(errors, "error");
}

/* Was the last attempt that failed at this time or later? */
bool
idem_history_has_error_since(Jsonb *errors, TimestampTz time)
{
	text *last = get_last_string(errors, "at");
	char at[MAXDATELEN + 1];

	encode_time(at, time);
	return last != NULL && strcmp(text_to_cstring(last), at) >= 0;
}

/* One warning of each kind per statement: a batch may contain thousands of such jobs */
static bool
is_first_in_statement(TimestampTz *last)
{
	TimestampTz statement = GetCurrentStatementStartTimestamp();
	bool first = *last != statement;

	*last = statement;
	return first;
}

static void
warn_replaced(IdemTable *table, int64 job_id)
{
	static TimestampTz last = 0;

	if (is_first_in_statement(&last))
		ereport(WARNING,
				errmsg("a job replaced an older row with the same number"),
				errdetail("Job " INT64_FORMAT " has ended, and idem.%s had a row of an earlier job with that number.",
						  job_id, table->def->name),
				errhint("The sequence idem.jobs_job_id_seq is behind the jobs; idem_doctor() shows how to correct it."));
}

/* J13: fetch or cleanup has skipped a job without attempts left that it could not make dead */
static void
warn_skipped(int64 job_id)
{
	static int64 last_job = 0;

	if (job_id == last_job)
		return;
	last_job = job_id;
	ereport(WARNING,
			errmsg("a job without attempts left was skipped"),
			errdetail("Another transaction is changing the row that idem.job_log has of an earlier job with the number " INT64_FORMAT ".", job_id),
			errhint("The job becomes dead after that transaction has ended; idem_doctor() shows how to correct the sequence."));
}

/* J13: a job of the history was not retried, because a live job has its number */
void
idem_history_warn_in_use(int64 job_id)
{
	static TimestampTz last = 0;

	if (is_first_in_statement(&last))
		ereport(WARNING,
				errmsg("a job was not retried, because its number is in use again"),
				errdetail("Another job with the number " INT64_FORMAT " is live; the job in the history is older.",
						  job_id),
				errhint("Enqueue the payload of the older job in idem.job_log as a new job; idem_doctor() shows how to correct the sequence."));
}

/*
 * Delete the older row that has the primary key of the row written, if it still
 * exists (J13).  If another transaction is changing or has locked the older row: with
 * in_the_way NULL, wait for it; else set *in_the_way to it, and return false.
 */
static bool
make_room(IdemTable *table, IdemLookup *lookup, int64 job_id, TransactionId *in_the_way)
{
	bool wait = in_the_way == NULL;
	IdemProbeResult probe;
	TM_Result result;

	idem_probe_latest(table, lookup, &probe);
	if (probe.found == IDEM_FOUND_NONE)
		return true;
	if (probe.found == IDEM_FOUND_OPEN && wait)
	{
		idem_probe_wait(table, probe.xwait);
		return true;
	}
	if (probe.found == IDEM_FOUND_OPEN)
	{
		*in_the_way = probe.xwait;
		return false;
	}
	/* lock it first: a delete that does not wait refuses a row that this transaction has locked */
	result = idem_table_lock_row(table, probe.row->tts_tid, LockTupleExclusive,
								 wait ? LockWaitBlock : LockWaitSkip, probe.row);
	if (result == TM_Ok && idem_table_delete(table, probe.row, true) == TM_Ok)
		warn_replaced(table, job_id);
	if (result != TM_WouldBlock)
		return true;
	*in_the_way = idem_row_locker(probe.row);
	/* it may have ended since */
	return !TransactionIdIsValid(*in_the_way);
}

/*
 * Insert the row; it replaces an older one with the same primary key
 * (J13).  Returns false if make_room() does.
 */
static bool
insert_over(IdemTable *table, TupleTableSlot *new, IdemLookup *lookup, int64 job_id,
			TransactionId *in_the_way)
{
	while (!idem_table_insert(table, new))
	{
		CHECK_FOR_INTERRUPTS();
		if (!make_room(table, lookup, job_id, in_the_way))
			return false;
	}
	return true;
}

/* Fill the row of the history for the job.  Every state but "done" can be retried. */
static void
fill_log(const IdemJob *job, const IdemEnd *end, int64 keep, TupleTableSlot *slot)
{
	TupleTableSlot *row = idem_job_row(job);

	idem_row_copy_column(row, IDEM_JOBS_JOB_ID, slot, IDEM_JOB_LOG_JOB_ID);
	idem_row_set(slot, IDEM_JOB_LOG_ENDED_AT, TimestampTzGetDatum(end->at));
	idem_row_set(slot, IDEM_JOB_LOG_EXPIRES_AT, TimestampTzGetDatum(end->at + keep));
	idem_row_copy_column(row, IDEM_JOBS_ENQUEUED_AT, slot, IDEM_JOB_LOG_ENQUEUED_AT);
	idem_row_copy_column(row, IDEM_JOBS_PRIORITY, slot, IDEM_JOB_LOG_PRIORITY);
	idem_row_set(slot, IDEM_JOB_LOG_ATTEMPT,
				 Int32GetDatum(job->attempt));
	idem_row_copy_column(row, IDEM_JOBS_MAX_ATTEMPTS, slot, IDEM_JOB_LOG_MAX_ATTEMPTS);
	idem_row_copy_column(row, IDEM_JOBS_KEY_UNTIL, slot, IDEM_JOB_LOG_KEY_UNTIL);
	if (job->is_leased)
		idem_row_set(slot, IDEM_JOB_LOG_STARTED_AT,
					 TimestampTzGetDatum(idem_job_started_at(job)));
	if (job->holds_key)
		idem_row_set(slot, IDEM_JOB_LOG_TOOK_KEY, BoolGetDatum(true));
	if (job->has_key)
		idem_row_set(slot, IDEM_JOB_LOG_KEY_HASH, Int64GetDatum(job->holds_key ? job->key_hash : idem_jobrow_ignored_hash(job->key_hash)));
	if (strcmp(end->state, "done") != 0)
		idem_row_set(slot, IDEM_JOB_LOG_RETRYABLE, BoolGetDatum(true));
	idem_row_set(slot, IDEM_JOB_LOG_STATE, CStringGetTextDatum(end->state));
	idem_row_copy_column(row, IDEM_JOBS_QUEUE, slot, IDEM_JOB_LOG_QUEUE);
	idem_row_copy_column(row, IDEM_JOBS_KEY, slot, IDEM_JOB_LOG_KEY);
	idem_row_copy_column(row, IDEM_JOBS_WORKER, slot, IDEM_JOB_LOG_WORKER);
	idem_row_copy_column(row, IDEM_JOBS_PAYLOAD, slot, IDEM_JOB_LOG_PAYLOAD);
	idem_row_copy_column(row, IDEM_JOBS_HEADERS, slot, IDEM_JOB_LOG_HEADERS);
	idem_row_copy_column(row, IDEM_JOBS_LINKS, slot, IDEM_JOB_LOG_LINKS);
	if (end->errors != NULL)
		idem_row_set(slot, IDEM_JOB_LOG_ERRORS, JsonbPGetDatum(end->errors));
	else
		idem_row_copy_column(row, IDEM_JOBS_ERRORS, slot, IDEM_JOB_LOG_ERRORS);
	if (end->result != NULL)
		idem_row_set(slot, IDEM_JOB_LOG_RESULT, JsonbPGetDatum(end->result));
	idem_row_copy_column(row, IDEM_JOBS_PROGRESS, slot, IDEM_JOB_LOG_PROGRESS);
}

/*
 * Write the job, which ends now, into the history, unless its queue keeps none.
 * With in_the_way NULL, this waits for a transaction that is changing an older row
 * with the same number.  Else it does not wait: it writes nothing, sets
 * *in_the_way to that transaction, and returns false.
 */
bool
idem_history_write(const IdemJob *job, const IdemQueue *queue, const IdemEnd *end,
				   TransactionId *in_the_way)
{
	int64 keep = strcmp(end->state, "done") == 0 ? queue->keep : queue->keep_dead;
	IdemTable log;
	IdemLookup lookup;
	TupleTableSlot *slot;
	bool written;

	if (keep == 0)
		return true;
	idem_jobtable_open_log(&log, RowExclusiveLock);
	slot = idem_table_new_row(&log);
	fill_log(job, end, keep, slot);
	lookup = idem_jobtable_by_id(&log, job->job_id);
	written = insert_over(&log, slot, &lookup, job->job_id, in_the_way);
	idem_table_close(&log);
	return written;
}

/*
 * Move the job, which this transaction has locked, into the history.  in_the_way, and the
 * answer false, are those of idem_history_write(): then the job stays.
 */
bool
idem_history_move(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue, const IdemEnd *end,
				  TransactionId *in_the_way)
{
	if (!idem_history_write(job, queue, end, in_the_way))
		return false;
	if (idem_table_delete(jobs, idem_job_row(job), true) != TM_Ok)
		elog(ERROR, "another transaction has changed a job that this transaction has locked");
	idem_jobrow_note_end(jobs, job, queue->ref);
	return true;
}

/* Does a row of idem.job_keys have the number of the lookup, and not only the hash? */
static bool
has_job_id(TupleTableSlot *row, IdemLookup *lookup)
{
	return idem_row_int64(row, IDEM_JOB_KEYS_JOB_ID) == *(const int64 *) lookup->key;
}

/* J5: keep the key of a job that is done, so that it absorbs duplicates until its ttl has passed */
void
idem_history_keep_key(const IdemJob *job, const IdemEnd *end)
{
	TupleTableSlot *row = idem_job_row(job);
	IdemTable keys;
	IdemLookup lookup;
	TupleTableSlot *slot;

	if (idem_row_isnull(row, IDEM_JOBS_KEY_UNTIL) ||
		idem_row_timestamp(row, IDEM_JOBS_KEY_UNTIL) <= end->at)
		return;
	idem_jobtable_open_keys(&keys, RowExclusiveLock);
	slot = idem_table_new_row(&keys);
	idem_row_copy_column(row, IDEM_JOBS_KEY_HASH, slot, IDEM_JOB_KEYS_KEY_HASH);
	idem_row_copy_column(row, IDEM_JOBS_KEY_UNTIL, slot, IDEM_JOB_KEYS_EXPIRES_AT);
	idem_row_copy_column(row, IDEM_JOBS_JOB_ID, slot, IDEM_JOB_KEYS_JOB_ID);
	idem_row_copy_column(row, IDEM_JOBS_QUEUE, slot, IDEM_JOB_KEYS_QUEUE);
	idem_row_copy_column(row, IDEM_JOBS_KEY, slot, IDEM_JOB_KEYS_KEY);
	if (end->result != NULL)
		idem_row_set(slot, IDEM_JOB_KEYS_RESULT, JsonbPGetDatum(end->result));
	lookup = idem_jobtable_by_key(&keys, keys.pkey, job->key_hash);
	lookup.matches = has_job_id;
	lookup.key = &job->job_id;
	(void) insert_over(&keys, slot, &lookup, job->job_id, NULL);
	idem_table_close(&keys);
}

/*
 * Make the job dead; this transaction has locked it.  If in_the_way is NULL, wait for
 * a transaction that is changing an older row of its number in the history.  Else do not
 * wait: return false and that transaction in *in_the_way (see idem_history_write()).
 */
bool
idem_history_make_dead(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue, text *error,
					   TransactionId *in_the_way)
{
	IdemEnd end = {
		.state = "dead",
		.at = idem_clock_now(),
		.errors = idem_history_add_error(idem_row_jsonb(idem_job_row(job), IDEM_JOBS_ERRORS),
										 job->attempt, error)};

	if (!idem_history_move(jobs, job, queue, &end, in_the_way))
		return false;
	idem_counters_add_queue(queue->ref, IDEM_QUEUE_COUNTER_DEAD);
	return true;
}

/*
 * Make the job dead if it is spent (J2).  This transaction has locked it, and its lease,
 * if it has one, has expired.  A job without a lease waits for its retry and keeps it, even
 * if max_attempts was lowered since.
 *
 * J13: never waits for a transaction that is changing an older row of the job's number in the
 * history, but skips the job.  If in_the_way is NULL, a warning is raised; else
 * *in_the_way is that transaction.
 */
IdemDeadOutcome
idem_history_make_dead_if_spent(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue,
								TransactionId *in_the_way)
{
	TransactionId changer;

	if (!job->is_leased || !idem_job_has_no_attempts_left(job, queue))
		return IDEM_DEAD_NOT_SPENT;
	/* A2: if the job is skipped, the commit lets it go, too */
	idem_touched_held(queue->ref, true);
	if (idem_history_make_dead(jobs, job, queue, cstring_to_text("The lease of the last attempt ran out."),
							   &changer))
		return IDEM_DEAD_MADE;
	if (in_the_way != NULL)
		*in_the_way = changer;
	else
		warn_skipped(job->job_id);
	return IDEM_DEAD_SKIPPED;
}
