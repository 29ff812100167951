/*
 * jobstore.c
 *		Cancel, retry and show a job by its number.
 *
 * These need no token.  Cancel and retry wait for a transaction that is changing
 * the job, as long as lock_timeout allows.
 */
#include "postgres.h"

#include "access/genam.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/row/job.h"

/*
 * Cancel a job, also if a worker has fetched it.  This waits for a transaction
 * that runs the job, and for transactions whose duplicates the job has absorbed.
 * The mark makes the job drain meanwhile (J1), so that no new duplicate prolongs
 * the wait.
 */
bool
idem_jobstore_cancel(IdemTable *jobs, int64 job_id)
{
	IdemQueue queue = {0};
	IdemEnd end = {.state = "cancelled"};
	IdemJob job;
	bool found;

	idem_jobtable_mark_cancel(job_id);
	do
	{
		found = idem_jobrow_find(jobs, job_id, &job, &queue);
		if (found)
			idem_touched_held(queue.ref, false);
	} while (found && idem_table_delete(jobs, jobs->found, true) != TM_Ok);
	idem_jobtable_unmark_cancel(job_id);
	if (!found)
		return false;
	end.at = idem_clock_now();
	(void) idem_history_write(&job, &queue, &end, NULL);
	idem_jobrow_note_end(jobs, &job, queue.ref);
	idem_counters_add_queue(queue.ref, IDEM_QUEUE_COUNTER_CANCELLED);
	return true;
}

/*
 * Insert the job found in the history into its queue again.  J7: this does not
 * check whether another job of the key exists; if there is one, both run.  J8: a
 * scheduled job that never held its key does not get it now.  J13: false if a live job has the
 * number by now.
 */
bool
idem_jobstore_insert_again(IdemTable *jobs, IdemTable *log)
{
	TimestampTz now = idem_clock_now();
	bool takes_key = idem_row_bool(log->found, IDEM_JOB_LOG_TOOK_KEY);
	text *queue = idem_row_text(log->found, IDEM_JOB_LOG_QUEUE);
	IdemQueueRef *ref = idem_queueref_get(queue);
	text *key = idem_row_text(log->found, IDEM_JOB_LOG_KEY);
	int64 key_hash = key != NULL ? idem_hash_name(queue, key) : 0;
	TupleTableSlot *slot = idem_table_new_row(jobs);
	bool inserted;

	idem_row_copy_column(log->found, IDEM_JOB_LOG_JOB_ID, slot, IDEM_JOBS_JOB_ID);
	idem_row_set(slot, IDEM_JOBS_RUN_AT, TimestampTzGetDatum(now));
	idem_row_copy_column(log->found, IDEM_JOB_LOG_ENQUEUED_AT, slot, IDEM_JOBS_ENQUEUED_AT);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_PRIORITY, slot, IDEM_JOBS_PRIORITY);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_QUEUE, slot, IDEM_JOBS_QUEUE);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_PAYLOAD, slot, IDEM_JOBS_PAYLOAD);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_MAX_ATTEMPTS, slot, IDEM_JOBS_MAX_ATTEMPTS);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_KEY_UNTIL, slot, IDEM_JOBS_KEY_UNTIL);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_HEADERS, slot, IDEM_JOBS_HEADERS);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_LINKS, slot, IDEM_JOBS_LINKS);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_ERRORS, slot, IDEM_JOBS_ERRORS);
	idem_row_copy_column(log->found, IDEM_JOB_LOG_PROGRESS, slot, IDEM_JOBS_PROGRESS);
	/* so that no earlier token matches (J11) */
	idem_row_set(slot, IDEM_JOBS_TOKEN, Int64GetDatum(idem_clock_next_token(0, now)));
	if (key != NULL)
		idem_jobrow_set_key(slot, key, key_hash, takes_key);
	if (takes_key)
	{
		/* for the places that enqueues skip; every lock that may block comes before (K5) */
		idem_table_open_indexes(jobs);
		idem_table_lock_toast(jobs);
		idem_table_lock_hash(jobs, key_hash);
	}
	inserted = idem_table_insert(jobs, slot);
	if (takes_key)
	{
		idem_jobrow_note_place(ref, key_hash, &slot->tts_tid);
		idem_table_unlock_hash(jobs, key_hash);
	}
	if (inserted)
	{
		IdemPosition position = {
			.priority = idem_row_int32(log->found, IDEM_JOB_LOG_PRIORITY),
			.run_at = now,
			.job_id = idem_row_int64(log->found, IDEM_JOB_LOG_JOB_ID)};

		idem_jobrow_note_ready(ref, &position, now, false);
	}
	return inserted;
}

/* Retry a job that is dead or cancelled; false if there is no such job in the history */
bool
idem_jobstore_retry(IdemTable *jobs, int64 job_id)
{
	IdemTable log;
	IdemLookup lookup;
	IdemQueue queue = {0};
	bool found;
	bool removed = false;

	idem_jobtable_open_log(&log, RowExclusiveLock);
	lookup = idem_jobtable_by_number(&log, job_id);
	do
	{
		IdemProbeResult probe;

		idem_probe_existing(&log, &lookup, &probe);
		found = probe.found == IDEM_FOUND_ROW;
		if (found)
		{
			idem_queuestore_use_of_row(&log, IDEM_JOB_LOG_QUEUE, &queue);
			found = idem_row_bool(log.found, IDEM_JOB_LOG_RETRYABLE);
		}
		removed = found && idem_table_delete(&log, log.found, true) == TM_Ok;
	} while (found && !removed);
	if (removed)
	{
		if (!idem_jobstore_insert_again(jobs, &log))
			ereport(ERROR,
					errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("number of the job is in use again"),
					errdetail("Another job with the number " INT64_FORMAT " is live; the job in the history is older.", job_id),
					errhint("Enqueue the payload of the older job in idem.job_log as a new job; idem_doctor() shows how to correct the sequence."));
		idem_counters_add_queue(queue.ref, IDEM_QUEUE_COUNTER_RETRIED);
	}
	idem_table_close(&log);
	return removed;
}

/* Find the row that the snapshot of the statement shows, as a SELECT does */
static bool
find_visible(IdemTable *table, int64 job_id, AttrNumber queue_attno, IdemQueue *queue)
{
	IdemLookup lookup = idem_jobtable_by_number(table, job_id);
	IndexScanDesc scan;
	bool found;

	idem_shard_check_job_shown(job_id, GetActiveSnapshot());
	scan = idem_probe_begin(table, &lookup, GetActiveSnapshot());
	found = index_getnext_slot(scan, ForwardScanDirection, table->found);
	index_endscan(scan);
	if (found)
		idem_queuestore_use_of_row(table, queue_attno, queue);
	return found;
}

static void
read_job(IdemTable *jobs, const IdemQueue *queue, IdemJobInfo *info)
{
	TupleTableSlot *row = jobs->found;
	IdemJob job;

	idem_job_read(&job, row);
	memset(info, 0, sizeof(*info));
	info->job_id = job.job_id;
	info->queue = queue->name;
	info->state = idem_jobrow_state_words[idem_jobrow_state(jobs, &job, GetActiveSnapshot(),
															idem_clock_now())];
	info->key = idem_row_text(row, IDEM_JOBS_KEY);
	info->payload = idem_row_jsonb(row, IDEM_JOBS_PAYLOAD);
	info->priority = job.priority;
	info->attempt = job.attempt;
	info->max_attempts = idem_job_max_attempts(&job, queue);
	info->worker = idem_row_text(row, IDEM_JOBS_WORKER);
	info->errors = idem_row_jsonb(row, IDEM_JOBS_ERRORS);
	info->headers = idem_row_jsonb(row, IDEM_JOBS_HEADERS);
	info->links = idem_row_jsonb(row, IDEM_JOBS_LINKS);
	info->progress = idem_row_jsonb(row, IDEM_JOBS_PROGRESS);
	info->enqueued_at = job.enqueued_at;
	info->run_at = job.run_at;
	info->started_at = idem_job_started_at(&job);
	info->lease_until = job.lease_until;
}

/* Read the row found in the history; queue: the settings of its queue */
void
idem_jobstore_read_log(IdemTable *log, const IdemQueue *queue, IdemJobInfo *info)
{
	int max_attempts = idem_row_int32(log->found, IDEM_JOB_LOG_MAX_ATTEMPTS);

	memset(info, 0, sizeof(*info));
	info->job_id = idem_row_int64(log->found, IDEM_JOB_LOG_JOB_ID);
	info->queue = queue->name;
	info->state = text_to_cstring(idem_row_text(log->found, IDEM_JOB_LOG_STATE));
	info->key = idem_row_text(log->found, IDEM_JOB_LOG_KEY);
	info->payload = idem_row_jsonb(log->found, IDEM_JOB_LOG_PAYLOAD);
	info->result = idem_row_jsonb(log->found, IDEM_JOB_LOG_RESULT);
	info->priority = idem_row_int32(log->found, IDEM_JOB_LOG_PRIORITY);
	info->attempt = idem_row_int32(log->found, IDEM_JOB_LOG_ATTEMPT);
	info->max_attempts = max_attempts != 0 ? max_attempts : queue->max_attempts;
	info->worker = idem_row_text(log->found, IDEM_JOB_LOG_WORKER);
	info->errors = idem_row_jsonb(log->found, IDEM_JOB_LOG_ERRORS);
	info->headers = idem_row_jsonb(log->found, IDEM_JOB_LOG_HEADERS);
	info->links = idem_row_jsonb(log->found, IDEM_JOB_LOG_LINKS);
	info->progress = idem_row_jsonb(log->found, IDEM_JOB_LOG_PROGRESS);
	info->started_at = idem_row_timestamp(log->found, IDEM_JOB_LOG_STARTED_AT);
	info->enqueued_at = idem_row_timestamp(log->found, IDEM_JOB_LOG_ENQUEUED_AT);
	info->ended_at = idem_row_timestamp(log->found, IDEM_JOB_LOG_ENDED_AT);
}

/* Read a job, live or in the history; false if there is none */
bool
idem_jobstore_get(IdemTable *jobs, int64 job_id, IdemJobInfo *info)
{
	IdemTable log;
	IdemQueue queue = {0};
	bool found;

	if (find_visible(jobs, job_id, IDEM_JOBS_QUEUE, &queue))
	{
		read_job(jobs, &queue, info);
		return true;
	}
	idem_jobtable_open_log(&log, AccessShareLock);
	found = find_visible(&log, job_id, IDEM_JOB_LOG_QUEUE, &queue);
	if (found)
		idem_jobstore_read_log(&log, &queue, info);
	idem_table_close(&log);
	return found;
}
