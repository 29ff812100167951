/*
 * job.h
 *		What a job is: the tables of jobs, their rows, and the settings of queues.
 */
#ifndef IDEM_JOBS_JOB_H
#define IDEM_JOBS_JOB_H

#include "fn/fn.h"
#include "stats/stats.h"
#include "table/table.h"
#include "wake/wake.h"

#define IDEM_MAX_FETCH_BATCH 10000
#define IDEM_MAX_ERROR_LEN	 8192
#define IDEM_MAX_ERRORS		 10

/* How often a job may be fetched if neither the job nor its queue has a limit of its own */
#define IDEM_DEFAULT_MAX_ATTEMPTS 25

/* Until when a job absorbs duplicates of its key; in the order of idem_dedup_words */
typedef enum IdemDedup
{
	IDEM_DEDUP_UNTIL_EXECUTING,
	IDEM_DEDUP_UNTIL_EXECUTED,
	IDEM_DEDUP_UNTIL_EXPIRED
} IdemDedup;

/* What a duplicate does to the job that absorbs it; in the order of idem_on_duplicate_words */
typedef enum IdemOnDuplicate
{
	IDEM_ON_DUPLICATE_SKIP,
	IDEM_ON_DUPLICATE_REPLACE,
	IDEM_ON_DUPLICATE_DEBOUNCE,
	IDEM_ON_DUPLICATE_ERROR
} IdemOnDuplicate;

/* How the jobs of a key are deduplicated, as the queue declares or the enqueue asks */
typedef struct IdemPolicy
{
	IdemDedup dedup;
	IdemOnDuplicate on_duplicate;
	bool rerun;				/* until_executed: run once more after the current run */
	int64 key_ttl;			/* until_expired; 0: none given */
	bool include_scheduled; /* scheduled jobs hold and respect the key, too */
} IdemPolicy;

/* May a role enqueue into a queue? */
typedef enum IdemMayEnqueue
{
	IDEM_MAY_ENQUEUE,
	IDEM_ROLE_IS_GONE,
	IDEM_NO_EXECUTE,	  /* on idem_enqueue() */
	IDEM_QUEUE_OF_ANOTHER /* the role lacks the privileges of the owner of the queue */
} IdemMayEnqueue;

/* Settings of a queue, with the default for each one not declared; times in microseconds */
typedef struct IdemQueue
{
	text *name;
	IdemQueueRef *ref; /* its counters, skip ranges and waiters; until the transaction ends */
	Oid owner;		   /* invalid: any role may use the queue */
	bool paused;
	IdemPolicy policy;
	int64 debounce_max;
	int64 lease; /* 0: none, a fetch holds its jobs until its transaction ends */
	int max_attempts;
	int64 backoff;
	int64 backoff_max;
	int64 keep;
	int64 keep_dead;
} IdemQueue;

/* Other keys with the same hash as the key of an enqueue */
typedef struct IdemSameHash
{
	int n;
	text *queues[IDEM_MAX_SAME_HASH];
	text *keys[IDEM_MAX_SAME_HASH];
} IdemSameHash;

/* What all jobs of one call of idem_enqueue() or idem_enqueue_many() have in common */
typedef struct IdemEnqueue
{
	IdemQueue queue;
	IdemPolicy policy;
	TimestampTz now;
	TimestampTz run_at;
	bool later;	 /* scheduled: it ignores its key unless include_scheduled is set (J8) */
	bool nowait; /* raise an error instead of waiting for another transaction (T6) */
	int priority;
	int max_attempts; /* 0: the setting of the queue */
	text *scope;	  /* for the slots of the keys; NULL: idem.scope */
} IdemEnqueue;

typedef enum IdemOutcome
{
	IDEM_OUTCOME_ENQUEUED,
	IDEM_OUTCOME_ABSORBED,
	IDEM_OUTCOME_REPLACED,
	IDEM_OUTCOME_POSTPONED,
	IDEM_OUTCOME_RERUN,
	IDEM_OUTCOME_DONE
} IdemOutcome;

/* The answer to an enqueue */
typedef struct IdemEnqueued
{
	int64 job_id;
	IdemOutcome outcome;
	Jsonb *result; /* result of the job, with IDEM_OUTCOME_DONE only; or NULL */
} IdemEnqueued;

/* One job to enqueue */
typedef struct IdemNewJob
{
	int64 job_id; /* 0: take the next number of the sequence */
	int slot;	  /* to be carried by the number, or IDEM_NO_SLOT */
	text *key;	  /* NULL: none */
	NullableDatum payload;
	Jsonb *headers; /* NULL: none */
	bool holds_key; /* set by the enqueue, as all below */
	int64 key_hash; /* 0: there is no key */
	IdemEnqueued answer;
} IdemNewJob;

/*
 * A live job, decoded from its row: what the protocols ask of each row that they meet.  The other
 * columns are read on request, from idem_job_row(): so a walk does not pay for them in the rows
 * that it skips.
 */
typedef struct IdemJob
{
	TupleTableSlot *row;
	ItemPointerData tid; /* of this version of the row */
	int64 job_id;
	TimestampTz run_at;
	TimestampTz enqueued_at;
	bool has_key;
	bool holds_key; /* J8: enqueues of its key find it */
	int64 key_hash; /* as in the row, see idem_jobrow_ignored_hash(); 0 without a key */
	int priority;
	int max_attempts; /* 0: the setting of its queue */
	int64 after_job;  /* J4: the job that it follows; 0: none */
	int attempt;
	int64 token; /* of the last fetch or retry; 0: no worker has fetched it yet */
	/*
	 * Does a worker have the job?  The worker may complete it even after the lease has expired,
	 * until another worker fetches the job or it is made dead (J11).
	 */
	bool is_leased;
	TimestampTz leased_at;	 /* of a lease; 0: none */
	TimestampTz lease_until; /* 0: no worker has the job */
} IdemJob;

/* What an update of a job means to fetches (J14) and to sessions that wait (A2) */
typedef enum IdemChange
{
	IDEM_CHANGE_LEASED,		/* a worker has it, for as long as before or longer */
	IDEM_CHANGE_READY,		/* it waits, or its lease ends earlier than before */
	IDEM_CHANGE_GIVEN_BACK, /* its worker has given it back: it waits again */
	IDEM_CHANGE_ABSORBED	/* it waited and waits, and has absorbed a duplicate */
} IdemChange;

/* May a fetch take a job?  If not, what keeps it from that. */
typedef enum IdemFetchable
{
	IDEM_FETCHABLE,
	IDEM_FETCHABLE_ELSEWHERE, /* M2: it belongs to another shard, and may run there */
	IDEM_FETCHABLE_OPEN,	  /* another open transaction has inserted or is changing it */
	IDEM_FETCHABLE_LATER,	  /* it is scheduled, or waits for its retry */
	IDEM_FETCHABLE_LEASED,	  /* a worker has it, or this transaction has fetched it */
	IDEM_FETCHABLE_BLOCKED,	  /* J4: the job that it follows still exists */
	IDEM_FETCHABLE_UNSETTLED  /* the same, but an open transaction is changing that job */
} IdemFetchable;

/* State of a live job; in the order of idem_jobrow_state_words */
typedef enum IdemJobState
{
	IDEM_JOB_WAITING,
	IDEM_JOB_SCHEDULED,
	IDEM_JOB_BLOCKED,
	IDEM_JOB_RUNNING,
	IDEM_JOB_EXPIRED
} IdemJobState;

/* How a job ends */
typedef struct IdemEnd
{
	const char *state; /* "done", "dead" or "cancelled" */
	TimestampTz at;
	Jsonb *result; /* NULL: none */
	Jsonb *errors; /* NULL: those that the job has */
} IdemEnd;

/* Answer of idem_history_make_dead_if_spent() */
typedef enum IdemDeadOutcome
{
	IDEM_DEAD_NOT_SPENT, /* the job can run again: nothing was done */
	IDEM_DEAD_MADE,		 /* the job is dead */
	IDEM_DEAD_SKIPPED	 /* another transaction is changing an older row of its number */
} IdemDeadOutcome;

/* A key of jobs */
typedef struct IdemJobKey
{
	text *queue;
	text *key;
	text *scope; /* for the slot of the key */
} IdemJobKey;

/*
 * A job, live or in the history, for those who keep it: copies in the memory context of the caller.
 * NULL and 0 stand for what is not there.
 */
typedef struct IdemJobInfo
{
	/* set by idem_jobrow_copy() */
	int64 job_id;
	text *queue; /* the name in the settings of the queue: no copy */
	text *key;
	Jsonb *payload;
	int priority;
	int attempt;
	int max_attempts; /* of the job, or of its queue if the job has none */
	TimestampTz enqueued_at;
	Jsonb *headers;
	Jsonb *links;
	Jsonb *progress;

	/* what idem_job() returns besides */
	const char *state;
	Jsonb *result;
	text *worker;
	Jsonb *errors;
	TimestampTz run_at; /* of a live job only */
	TimestampTz started_at;
	TimestampTz lease_until;
	TimestampTz ended_at;

	/* what a fetch returns besides */
	int64 token;
	TimestampTz due_since; /* S5 */
	XLogRecPtr lsn;		   /* WAL position that a replica waits for (J10) */
} IdemJobInfo;

/* Indexes of idem.jobs and idem.job_log; see idem_jobtable_index() */
typedef enum IdemJobIndex
{
	IDEM_INDEX_KEY,
	IDEM_INDEX_FETCH,
	IDEM_INDEX_LOG_KEY,
	IDEM_INDEX_LOG_RETRY
} IdemJobIndex;

/* jobtable.c */
extern const IdemTableDef idem_jobtable_def;
extern const IdemTableDef idem_jobtable_keys_def;
extern const IdemTableDef idem_jobtable_log_def;
extern void idem_jobtable_open(IdemTable *jobs, LOCKMODE lockmode);
extern void idem_jobtable_open_keys(IdemTable *keys, LOCKMODE lockmode);
extern void idem_jobtable_open_log(IdemTable *log, LOCKMODE lockmode);
extern void idem_jobtable_lock_ids(void);
pg_noreturn extern void idem_jobtable_refuse_number(void);
extern int64 idem_jobtable_next_id(int slot);
extern int64 idem_jobtable_last_value(void);
extern void idem_jobtable_lift_sequence(int64 above);
extern void idem_jobtable_next_ids(const text *scope, IdemNewJob *jobs, int n, int *ord);
extern void idem_jobtable_mark_cancel(int64 job_id);
extern void idem_jobtable_unmark_cancel(int64 job_id);
extern bool idem_jobtable_is_marked(int64 job_id);
extern int *idem_jobtable_list_marks(int64 job_id, int *n);
extern void idem_jobtable_wait_for_mark(int64 job_id);
extern IdemLookup idem_jobtable_by_id(IdemTable *table, int64 job_id);
extern IdemLookup idem_jobtable_by_number(IdemTable *table, int64 job_id);
extern IdemLookup idem_jobtable_by_key(IdemTable *table, Relation index, int64 key_hash);
extern Relation idem_jobtable_index(IdemTable *table, IdemJobIndex which);

/* jobrow.c */
extern bool idem_jobrow_has_key(TupleTableSlot *row, AttrNumber queue_attno, text *queue, text *key,
								IdemSameHash *others);
extern void idem_jobrow_set_key(TupleTableSlot *slot, text *key, int64 key_hash, bool holds_key);
extern int64 idem_jobrow_ignored_hash(int64 key_hash);
extern bool idem_jobrow_waits_for_other(IdemTable *jobs, const IdemJob *job);
extern IdemFetchable idem_jobrow_is_fetchable(IdemTable *jobs, const IdemJob *job,
											  const SnapshotData *dirty, const IdemShard *shard,
											  TimestampTz now, bool exactly);
extern const char *const idem_jobrow_state_words[];
extern IdemJobState idem_jobrow_state(IdemTable *jobs, const IdemJob *job, Snapshot snapshot,
									  TimestampTz now);
extern void idem_jobrow_note_place(IdemQueueRef *ref, int64 key_hash, ItemPointer place);
extern void idem_jobrow_store(IdemTable *jobs, const IdemJob *job, TupleTableSlot *new,
							  IdemQueueRef *ref, IdemChange change);
extern bool idem_jobrow_find(IdemTable *jobs, int64 job_id, IdemJob *job, IdemQueue *queue);
extern void idem_jobrow_copy(const IdemJob *job, const IdemQueue *queue, IdemJobInfo *info);

/* queuestore.c */
extern const IdemTableDef idem_queuestore_def;
extern const char *const idem_dedup_words[];
extern const char *const idem_on_duplicate_words[];
extern const char *const idem_if_running_words[];
extern int idem_queuestore_word(const text *value, const char *name, const char *const *words);
extern void idem_queuestore_get(text *name, IdemQueue *queue);
extern void idem_queuestore_use(text *name, IdemQueue *queue);
extern void idem_queuestore_use_of_row(IdemTable *table, TupleTableSlot *row, AttrNumber attno,
									   IdemQueue *queue);
extern IdemMayEnqueue idem_queuestore_may_enqueue(Oid role, Oid owner);
extern int idem_queuestore_count_jobs(text *queue, int max);
extern void idem_queuestore_open(IdemTable *queues);
extern bool idem_queuestore_set(IdemTable *queues, text *name, const NullableDatum *columns);
extern bool idem_queuestore_drop(IdemTable *queues, text *name);
extern bool idem_queuestore_pause(IdemTable *queues, text *name, bool pause);
extern TimestampTz idem_queuestore_paused_at(text *name);

extern void idem_jobrow_note_ready(IdemQueueRef *ref, const IdemPosition *position, TimestampTz due,
								   bool follows);
extern void idem_jobrow_note_unfetched(const IdemJob *job);
extern void idem_jobrow_note_copied(const IdemJob *job);
extern void idem_jobrow_note_end(IdemTable *jobs, const IdemJob *job, IdemQueueRef *ref);

/* history.c */
extern Jsonb *idem_history_add_error(Jsonb *errors, int attempt, const text *error);
extern text *idem_history_last_error(Jsonb *errors);
extern bool idem_history_has_error_since(Jsonb *errors, TimestampTz time);

extern bool idem_history_write(const IdemJob *job, const IdemQueue *queue, const IdemEnd *end,
							   TransactionId *in_the_way);
extern bool idem_history_move(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue,
							  const IdemEnd *end, TransactionId *in_the_way);
extern void idem_history_keep_key(const IdemJob *job, const IdemEnd *end);
extern bool idem_history_insert_again(IdemTable *jobs, TupleTableSlot *ended);
extern void idem_history_warn_in_use(int64 job_id);

extern bool idem_history_make_dead(IdemTable *jobs, const IdemJob *job, const IdemQueue *queue,
								   text *error, TransactionId *in_the_way);
extern IdemDeadOutcome idem_history_make_dead_if_spent(IdemTable *jobs, const IdemJob *job,
													   const IdemQueue *queue,
													   TransactionId *in_the_way);

/* jobstore.c */
extern bool idem_jobstore_cancel(IdemTable *jobs, int64 job_id);
extern bool idem_jobstore_retry(IdemTable *jobs, int64 job_id);
extern bool idem_jobstore_get(IdemTable *jobs, int64 job_id, IdemJobInfo *info);
extern int idem_jobstore_cancel_by_key(IdemTable *jobs, const IdemJobKey *key);
extern void idem_jobstore_list_by_key(IdemTable *jobs, const IdemJobKey *key, int max_jobs,
									  void (*put)(const IdemJobInfo *info, void *arg), void *arg);

/* headers.c */
extern Jsonb *idem_headers_defaults(void);
extern Jsonb *idem_headers_get(Jsonb *defaults, NullableDatum value);
extern text *idem_headers_get_trace(Jsonb *headers);
extern Jsonb *idem_headers_add_link(Jsonb *links, Jsonb *own, text *link);

extern void idem_headers_note_link(int64 job_id, Jsonb *headers);
extern void idem_headers_write_links(void);
extern void idem_headers_end_sub(SubTransactionId subid, SubTransactionId parent, bool is_commit);
extern void idem_headers_forget_links(void);

/* Decode the job in the row.  Columns after lease_until, and the long ones, are read on request. */
static inline void
idem_job_read(IdemJob *job, TupleTableSlot *row)
{
	const Datum *values = row->tts_values - 1;
	const bool *nulls = row->tts_isnull - 1;

	/* of a short row the columns that it lacks are null */
	slot_getsomeattrs(row, IDEM_JOBS_LEASE_UNTIL);
	job->row = row;
	job->tid = row->tts_tid;
	job->job_id = DatumGetInt64(values[IDEM_JOBS_JOB_ID]);
	job->run_at = DatumGetTimestampTz(values[IDEM_JOBS_RUN_AT]);
	job->enqueued_at = DatumGetTimestampTz(values[IDEM_JOBS_ENQUEUED_AT]);
	job->has_key = !nulls[IDEM_JOBS_KEY_HASH];
	job->holds_key = job->has_key && nulls[IDEM_JOBS_IGNORES_KEY];
	job->key_hash = job->has_key ? DatumGetInt64(values[IDEM_JOBS_KEY_HASH]) : 0;
	job->priority = DatumGetInt32(values[IDEM_JOBS_PRIORITY]);
	job->max_attempts =
		nulls[IDEM_JOBS_MAX_ATTEMPTS] ? 0 : DatumGetInt32(values[IDEM_JOBS_MAX_ATTEMPTS]);
	job->after_job = nulls[IDEM_JOBS_AFTER_JOB] ? 0 : DatumGetInt64(values[IDEM_JOBS_AFTER_JOB]);
	job->attempt = nulls[IDEM_JOBS_ATTEMPT] ? 0 : DatumGetInt32(values[IDEM_JOBS_ATTEMPT]);
	job->token = nulls[IDEM_JOBS_TOKEN] ? 0 : DatumGetInt64(values[IDEM_JOBS_TOKEN]);
	job->is_leased = !nulls[IDEM_JOBS_LEASE_UNTIL];
	job->leased_at =
		nulls[IDEM_JOBS_LEASED_AT] ? 0 : DatumGetTimestampTz(values[IDEM_JOBS_LEASED_AT]);
	job->lease_until =
		job->is_leased ? DatumGetTimestampTz(values[IDEM_JOBS_LEASE_UNTIL]) : 0;
}

/* The row of the job, for columns that are not decoded */
static inline TupleTableSlot *
idem_job_row(const IdemJob *job)
{
	/* the slot was not used for another row since */
	Assert(ItemPointerEquals(unconstify(ItemPointerData *, &job->tid), &job->row->tts_tid));
	return job->row;
}

/* Where a fetch meets the job */
static inline IdemPosition
idem_job_position(const IdemJob *job)
{
	return (IdemPosition){.priority = job->priority, .run_at = job->run_at, .job_id = job->job_id};
}

/* Has this transaction written this version of the row? */
static inline bool
idem_job_is_mine(const IdemJob *job)
{
	return idem_row_is_mine(idem_job_row(job));
}

/* Has this transaction fetched the job without a lease, and not leased it since? */
static inline bool
idem_job_was_fetched_here(const IdemJob *job)
{
	return job->is_leased && job->leased_at == 0 && idem_job_is_mine(job);
}

static inline int
idem_job_max_attempts(const IdemJob *job, const IdemQueue *queue)
{
	return job->max_attempts != 0 ? job->max_attempts : queue->max_attempts;
}

/* Was the last fetch of the job for its last attempt? */
static inline bool
idem_job_has_no_attempts_left(const IdemJob *job, const IdemQueue *queue)
{
	return job->attempt >= idem_job_max_attempts(job, queue);
}

/*
 * S5: when the worker that has the job fetched it; 0: no worker has it.  The fetch has made
 * the token from the clock, so the row needs no column for this.  The time is wrong, and may be in
 * the future, if the clock was set back before the fetch.
 */
static inline TimestampTz
idem_job_started_at(const IdemJob *job)
{
	return job->is_leased ? idem_clock_token_time(job->token) : 0;
}

/*
 * S5: since when the job, which can be fetched, has been due.  A follow-up job was
 * blocked for a part of this time; when the job that it follows ended is not known here.
 */
static inline TimestampTz
idem_job_due_since(const IdemJob *job)
{
	return job->is_leased ? job->lease_until : Max(job->run_at, job->enqueued_at);
}

#endif /* IDEM_JOBS_JOB_H */
