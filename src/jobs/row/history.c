/*
 * history.c
 *		What is kept of attempts and jobs that have ended: the last errors of a job (J18), the
 *		history (idem.job_log), and the keys of until_expired (idem.job_keys).  A retry brings a
 *		job of the history back.
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
#include "utils/datetime.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"
#include "utils/timestamp.h"

#include "jobs/row/job.h"

/* The time as the list has it.  Such strings are in the order of the times. */
static void
encode_time(char *at, TimestampTz time)
{
	int utc = 0;

	JsonEncodeDateTime(at, TimestampTzGetDatum(time), TIMESTAMPTZOID, &utc);
}

/*
 * J18: the list with an entry for this attempt.  errors NULL: no list yet; error NULL: none was
 * given.
 */
Jsonb *
idem_history_add_error(Jsonb *errors, int attempt, const text *error)
{
	char at[MAXDATELEN + 1];
	StringInfoData json;
	Datum list;

	encode_time(at, idem_clock_now());
	initStringInfo(&json);
	appendStringInfo(&json, "[{\"attempt\": %d, \"at\": \"%s\", \"error\": ", attempt, at);
	if (error == NULL)
		appendStringInfoString(&json, "null");
	else
	{
		int len = VARSIZE_ANY_EXHDR(error);

		/* a long error is truncated, not refused: the job must be given back in any case */
		if (len > IDEM_MAX_ERROR_LEN)
			len = pg_mbcliplen(VARDATA_ANY(error), len, IDEM_MAX_ERROR_LEN);
		escape_json(&json, pnstrdup(VARDATA_ANY(error), len));
	}
	appendStringInfoString(&json, "}]");
	list = DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data));
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
 * Insert the row of a job that has ended.  It replaces an older row with the same primary key
 * (J13). If another transaction is changing or has locked the older row: with in_the_way NULL, wait
 * for it; else set *in_the_way to it, and return false.
 */
static bool
insert_over(IdemTable *table, TupleTableSlot *new, IdemLookup *lookup, int64 job_id,
			TransactionId *in_the_way)
{
	static TimestampTz last_warning = 0;

	while (!idem_table_insert(table, new))
	{
		IdemProbeResult probe;
		TM_Result result;

		CHECK_FOR_INTERRUPTS();
		idem_probe_latest(table, lookup, &probe);
		if (probe.found == IDEM_FOUND_NONE)
			continue;
		if (probe.found == IDEM_FOUND_OPEN && in_the_way == NULL)
		{
			idem_probe_wait(table, probe.xwait);
			continue;
		}
		if (probe.found == IDEM_FOUND_OPEN)
		{
			*in_the_way = probe.xwait;
			return false;
		}
		/*
		 * lock it first: a delete that does not wait refuses a row that this transaction has locked
		 */
		result = idem_table_lock_row(table, probe.row->tts_tid, LockTupleExclusive,
									 in_the_way == NULL ? LockWaitBlock : LockWaitSkip, probe.row);
		if (result == TM_Ok && idem_table_delete(table, probe.row, true) == TM_Ok &&
			is_first_in_statement(&last_warning))
			ereport(WARNING,
					errmsg("a job replaced an older row with the same number"),
					errdetail("Job " INT64_FORMAT " has ended, and idem.%s had a row of an earlier job with that number.",
							  job_id, table->def->name),
					errhint("The sequence idem.jobs_job_id_seq is behind the jobs; idem_doctor() shows how to correct it."));
		if (result == TM_WouldBlock)
		{
			*in_the_way = idem_row_locker(probe.row);
			/* it may have ended since */
			if (TransactionIdIsValid(*in_the_way))
				return false;
		}
	}
	return true;
}

/* Columns of one table that become columns of another one as they are */
typedef struct ColumnPair
{
	AttrNumber from;
	AttrNumber to;
} ColumnPair;

#define KEPT(column)                              \
	{                                             \
		IDEM_JOBS_##column, IDEM_JOB_LOG_##column \
	}

/* What the history keeps of a job, and what a retry brings back */
static const ColumnPair kept_columns[] = {KEPT(JOB_ID), KEPT(ENQUEUED_AT), KEPT(PRIORITY),
										  KEPT(MAX_ATTEMPTS), KEPT(KEY_UNTIL), KEPT(QUEUE),
										  KEPT(KEY), KEPT(PAYLOAD), KEPT(HEADERS),
										  KEPT(LINKS), KEPT(ERRORS), KEPT(PROGRESS)};

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
	bool is_done = strcmp(end->state, "done") == 0;
	int64 keep = is_done ? queue->keep : queue->keep_dead;
	TupleTableSlot *row = idem_job_row(job);
	IdemTable log;
	IdemLookup lookup;
	TupleTableSlot *new;
	bool written;

	if (keep == 0)
		return true;
	idem_jobtable_open_log(&log, RowExclusiveLock);
	new = idem_table_new_row(&log);
	for (int i = 0; i < (int) lengthof(kept_columns); i++)
		idem_row_copy_column(row, kept_columns[i].from, new, kept_columns[i].to);
	idem_row_copy_column(row, IDEM_JOBS_WORKER, new, IDEM_JOB_LOG_WORKER);
	idem_row_set(new, IDEM_JOB_LOG_ATTEMPT, Int32GetDatum(job->attempt));
	idem_row_set(new, IDEM_JOB_LOG_ENDED_AT, TimestampTzGetDatum(end->at));
	idem_row_set(new, IDEM_JOB_LOG_EXPIRES_AT, TimestampTzGetDatum(end->at + keep));
	idem_row_set(new, IDEM_JOB_LOG_STATE, CStringGetTextDatum(end->state));
	if (job->is_leased)
		idem_row_set(new, IDEM_JOB_LOG_STARTED_AT, TimestampTzGetDatum(idem_job_started_at(job)));
	if (job->holds_key)
		idem_row_set(new, IDEM_JOB_LOG_TOOK_KEY, BoolGetDatum(true));
	if (job->has_key)
		idem_row_set(new, IDEM_JOB_LOG_KEY_HASH,
					 Int64GetDatum(job->holds_key ? job->key_hash :
													idem_jobrow_ignored_hash(job->key_hash)));
	if (!is_done)
		idem_row_set(new, IDEM_JOB_LOG_RETRYABLE, BoolGetDatum(true));
	if (end->errors != NULL)
		idem_row_set(new, IDEM_JOB_LOG_ERRORS, JsonbPGetDatum(end->errors));
	if (end->result != NULL)
		idem_row_set(new, IDEM_JOB_LOG_RESULT, JsonbPGetDatum(end->result));
	lookup = idem_jobtable_by_id(&log, job->job_id);
	written = insert_over(&log, new, &lookup, job->job_id, in_the_way);
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
	static const ColumnPair columns[] = {
		{IDEM_JOBS_KEY_HASH, IDEM_JOB_KEYS_KEY_HASH},
		{IDEM_JOBS_KEY_UNTIL, IDEM_JOB_KEYS_EXPIRES_AT},
		{IDEM_JOBS_JOB_ID, IDEM_JOB_KEYS_JOB_ID},
		{IDEM_JOBS_QUEUE, IDEM_JOB_KEYS_QUEUE},
		{IDEM_JOBS_KEY, IDEM_JOB_KEYS_KEY}};
	TupleTableSlot *row = idem_job_row(job);
	IdemTable keys;
	IdemLookup lookup;
	TupleTableSlot *new;

	if (idem_row_isnull(row, IDEM_JOBS_KEY_UNTIL) ||
		idem_row_timestamp(row, IDEM_JOBS_KEY_UNTIL) <= end->at)
		return;
	idem_jobtable_open_keys(&keys, RowExclusiveLock);
	new = idem_table_new_row(&keys);
	for (int i = 0; i < (int) lengthof(columns); i++)
		idem_row_copy_column(row, columns[i].from, new, columns[i].to);
	if (end->result != NULL)
		idem_row_set(new, IDEM_JOB_KEYS_RESULT, JsonbPGetDatum(end->result));
	lookup = idem_jobtable_by_key(&keys, keys.pkey, job->key_hash);
	lookup.matches = has_job_id;
	lookup.key = &job->job_id;
	(void) insert_over(&keys, new, &lookup, job->job_id, NULL);
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
	static int64 last_skipped = 0;
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
	else if (job->job_id != last_skipped)
	{
		last_skipped = job->job_id;
		ereport(WARNING,
				errmsg("a job without attempts left was skipped"),
				errdetail("Another transaction is changing the row that idem.job_log has of an earlier job with the number " INT64_FORMAT ".", job->job_id),
				errhint("The job becomes dead after that transaction has ended; idem_doctor() shows how to correct the sequence."));
	}
	return IDEM_DEAD_SKIPPED;
}

/*
 * Insert a job of the history, which has ended, into its queue again.  J7: this does not
 * check whether another job of the key exists; if there is one, both run.  J8: a
 * scheduled job that never held its key does not get it now.  J13: false if a live job has the
 * number by now.
 */
bool
idem_history_insert_again(IdemTable *jobs, TupleTableSlot *ended)
{
	TimestampTz now = idem_clock_now();
	bool takes_key = idem_row_bool(ended, IDEM_JOB_LOG_TOOK_KEY);
	text *queue = idem_row_text(ended, IDEM_JOB_LOG_QUEUE);
	IdemQueueRef *ref = idem_queueref_get(queue);
	text *key = idem_row_text(ended, IDEM_JOB_LOG_KEY);
	int64 key_hash = key != NULL ? idem_hash_name(queue, key) : 0;
	IdemPosition position = {
		.priority = idem_row_int32(ended, IDEM_JOB_LOG_PRIORITY),
		.run_at = now,
		.job_id = idem_row_int64(ended, IDEM_JOB_LOG_JOB_ID)};
	TupleTableSlot *new = idem_table_new_row(jobs);
	bool inserted;

	for (int i = 0; i < (int) lengthof(kept_columns); i++)
		idem_row_copy_column(ended, kept_columns[i].to, new, kept_columns[i].from);
	idem_row_set(new, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(now));
	/* so that no earlier token matches (J11) */
	idem_row_set(new, IDEM_JOBS_TOKEN, Int64GetDatum(idem_clock_next_token(0, now)));
	if (key != NULL)
		idem_jobrow_set_key(new, key, key_hash, takes_key);
	if (takes_key)
	{
		/* for the places that enqueues skip; every lock that may block comes before (K5) */
		idem_table_open_indexes(jobs);
		idem_table_lock_toast(jobs);
		idem_table_lock_hash(jobs, key_hash);
	}
	inserted = idem_table_insert(jobs, new);
	if (takes_key)
	{
		idem_jobrow_note_place(ref, key_hash, &new->tts_tid);
		idem_table_unlock_hash(jobs, key_hash);
	}
	if (inserted)
		idem_jobrow_note_ready(ref, &position, now, false);
	return inserted;
}
