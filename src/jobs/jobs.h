/*
 * jobs.h
 *		Types and functions that the files about jobs share.
 *
 * Calls go down only:
 *
 *	SQL functions	queue.c, enqueue.c, work.c, job.c, many.c: check the arguments, call a
 *					store, form the rows to return
 *					wait.c, loop.c: procedures; run.c: one job of loop.c and idem_drain()
 *	stores			bulk.c (enqueue of many jobs), above dedup.c (enqueue), which scans
 *					the jobs of a key in keyscan.c;
 *					fetchstore.c (fetch), which shares what it skips in fetchskip.c;
 *					workstore.c (complete, fail, snooze, heartbeat), which finds the job
 *					through jobstore.c (cancel, retry, the state of a job);
 *					bykeystore.c (jobs of a key), manystore.c, retrystore.c (bulk calls)
 *	shared by these	dead.c (make a job dead), joblog.c (history, kept keys),
 *					errors.c (the last errors of a job), headers.c (headers and links),
 *					change.c (note that a job can be fetched),
 *					queuestore.c (settings and owners of queues), which caches settings
 *					in queuecache.c,
 *					jobrow.c (what a row of idem.jobs means)
 *	tables			jobtable.c
 */
#ifndef IDEM_JOBS_H
#define IDEM_JOBS_H

#include "fn/fn.h"
#include "jobs/columns.h"
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
	Oid owner; /* invalid: any role may use the queue */
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

/* One job to enqueue */
typedef struct IdemNewJob
{
	int64 job_id; /* 0: take the next number of the sequence */
	int slot;	  /* to be carried by the number, or IDEM_NO_SLOT */
	text *key;	  /* NULL: none */
	NullableDatum payload;
	Jsonb *headers; /* NULL: none */
} IdemNewJob;

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

/* A small set of job numbers */
typedef struct IdemIdSet
{
	int n;
	int64 *ids;
} IdemIdSet;

/* The enqueue of one job with a key */
typedef struct IdemKeyedEnqueue
{
	const IdemEnqueue *enqueue;
	const IdemNewJob *job;
	int64 key_hash;
	IdemTable *keys;	  /* idem.job_keys for until_expired, else NULL */
	IdemSameHash *others; /* keys with the same hash, seen by the last scan */
	/* jobs that looked waiting, but another transaction held them; cleared after each wait */
	IdemIdSet unlockable;
	bool log_is_locked; /* idem.job_log is locked, so this enqueue can make a job dead */
} IdemKeyedEnqueue;

/*
 * The kind of job of the key that decides about the enqueue.  If the key has jobs of
 * several kinds, the first of these kinds in this order decides (for one exception see
 * sum_up()).
 */
typedef enum IdemKeyScanFound
{
	IDEM_KEY_SCAN_NONE,
	IDEM_KEY_SCAN_WAITING,	/* a waiting job that may absorb the duplicate */
	IDEM_KEY_SCAN_OPEN,		/* a job that another open transaction has inserted */
	IDEM_KEY_SCAN_DRAINING, /* a waiting job that drains: it absorbs no more duplicates */
	IDEM_KEY_SCAN_SPENT,	/* a job without attempts left whose lease has expired */
	IDEM_KEY_SCAN_RUNNING	/* a job that a worker has fetched; see choose_running() */
} IdemKeyScanFound;

/* Result of scanning all jobs of a key */
typedef struct IdemKeyScan
{
	IdemKeyScanFound found;
	int64 job_id;
	ItemPointerData tid;
	TransactionId in_the_way; /* transaction that must end before we can decide, or invalid */
	bool is_being_cancelled;  /* a session waits to cancel the draining job: wait for the cancel */
	TM_Result lock_result;	  /* of locking the waiting job; set if in_the_way is invalid */
} IdemKeyScan;

/* A walk over the jobs of a key, and the most entries of ended jobs that it has passed */
typedef struct IdemKeyWalk
{
	IdemTable *jobs;
	IdemLeafWalk leaf;
	IdemSkips *skips; /* NULL: the places are not shared, so none are used */
	int64 began;	  /* by the steady clock */
	bool has_known;
	IdemKeySkip known; /* what earlier enqueues have passed */
	IdemKeySkip run;   /* since the last row that has not ended */
	IdemKeySkip most;
} IdemKeyWalk;

/* Arguments of a fetch */
typedef struct IdemFetch
{
	IdemQueue queue;
	int batch;
	int64 lease;  /* 0: none, the transaction holds the jobs until it ends */
	text *worker; /* name of the worker, or NULL */
} IdemFetch;

/* A job that was fetched */
typedef struct IdemFetched
{
	int64 job_id;
	int64 token;
	int attempt;
	int max_attempts; /* of the job, or of its queue if the job has none */
	text *queue;
	Jsonb *payload;
	text *key;
	TimestampTz enqueued_at;
	TimestampTz due_since; /* S5 */
	XLogRecPtr lsn;		   /* WAL position that a replica waits for (J10) */
	Jsonb *progress;
	Jsonb *headers;
	Jsonb *links;
} IdemFetched;

/* How long the worker had a job when it ended its attempt (S5) */
typedef struct IdemRunTime
{
	TimestampTz from;
	TimestampTz to;
} IdemRunTime;

/* A job that a handler runs in this transaction (V7, J21) */
typedef struct IdemRun
{
	Oid handler;
	MemoryContext context; /* of what the members below point to */
	bool nowait;		   /* a fail waits for no transaction */
	bool is_fetched;
	IdemFetched fetched;
	Jsonb *result;
	bool counts_later; /* the caller counts the end of the attempt, when it has committed */
	IdemRunTime time;  /* if so; set by complete and fail */
} IdemRun;

/* Why and until when a fetch skips an entry of the index */
typedef struct IdemSkip
{
	TimestampTz until; /* DT_NOEND: as long as no transaction changes it */
	bool is_mine;	   /* this transaction has changed the row and is still open */
	bool is_blocked;   /* a follow-up job that is blocked */
} IdemSkip;

/* The walk of a fetch over the index, and what it has skipped; see fetchskip.c */
typedef struct IdemFetchWalk
{
	IdemSkips *skips;
	bool is_shared; /* the ranges are in shared memory, where writers note changes */
	TimestampTz now;
	int64 began; /* by the steady clock, as steady, the last time it was read */
	int64 steady;
	uint64 id; /* number of this fetch as the walker of the queue; 0: it does not collect */
	bool may_register;
	bool looks_again;		/* it ignores ranges that are due for another look */
	bool ignores_ranges;	/* it ignores all of them */
	bool announced_blocked; /* called idem_skips_announce_blocked() as the walker */
	bool has_jumped;
	bool jumped_blocked; /* a range that it has jumped over has blocked jobs */
	TimestampTz until;	 /* the earliest time of these ranges; DT_NOEND: none has one */
	IdemSkipRange run;	 /* skipped since the last job taken or held, or the last publishing */
	IdemSkipView view;
} IdemFetchWalk;

/* Is a follow-up job blocked by the job that it follows (J4)? */
typedef enum IdemBlocked
{
	IDEM_BLOCKED_NOT,
	IDEM_BLOCKED_FOR_NOW, /* yes, but an open transaction may change that */
	IDEM_BLOCKED		  /* yes, and no open transaction is changing the other job */
} IdemBlocked;

/* State of a live job; in the order of idem_jobrow_state_words */
typedef enum IdemJobState
{
	IDEM_JOB_WAITING,
	IDEM_JOB_SCHEDULED,
	IDEM_JOB_BLOCKED,
	IDEM_JOB_RUNNING,
	IDEM_JOB_EXPIRED
} IdemJobState;

/* Does the caller, with its token, hold the job? */
typedef enum IdemHold
{
	IDEM_HOLD_OK,
	IDEM_HOLD_NONE, /* no: no worker has fetched the job */
	IDEM_HOLD_STALE /* no: the job was fetched again or given back, or has ended */
} IdemHold;

/* How an attempt has failed */
typedef struct IdemFailure
{
	text *error;	/* NULL: none was given */
	int64 retry_in; /* negative: as the queue declares */
	bool dead;		/* the job becomes dead, even if it has attempts left */
} IdemFailure;

/* A key of jobs */
typedef struct IdemJobKey
{
	text *queue;
	text *key;
	text *scope; /* for the slot of the key */
} IdemJobKey;

/* What a bulk call does with each of its jobs */
typedef enum IdemManyKind
{
	IDEM_MANY_CANCEL,
	IDEM_MANY_FAIL,
	IDEM_MANY_SNOOZE,
	IDEM_MANY_RESCHEDULE
} IdemManyKind;

/* A bulk call (J20): its jobs are given by their numbers, or by queue and state */
typedef struct IdemMany
{
	IdemManyKind kind;
	int n; /* numbers; -1: by queue and state */
	Datum *ids;
	Datum *tokens; /* of the numbers; NULL: the call needs none */
	text *queue;
	uint32 states;	   /* set of states of live jobs, as bits */
	const char *state; /* of ended jobs, for a retry by queue */
	text *worker;	   /* only jobs of this worker; NULL: of all */
	int max_jobs;	   /* by queue: so many at most */
	IdemFailure fail;  /* fail */
	int64 delay;	   /* snooze */
	bool has_run_at;   /* reschedule */
	bool has_priority; /* reschedule */
	TimestampTz run_at;
	int priority;
} IdemMany;

/* Answer of idem_dead_make_if_spent() */
typedef enum IdemDeadOutcome
{
	IDEM_DEAD_NOT_SPENT, /* the job can run again: nothing was done */
	IDEM_DEAD_MADE,		 /* the job is dead */
	IDEM_DEAD_SKIPPED	 /* another transaction is changing an older row of its number */
} IdemDeadOutcome;

/* What idem_job() returns about a job, live or in the history */
typedef struct IdemJobInfo
{
	int64 job_id;
	text *queue;
	const char *state;
	text *key;
	Jsonb *payload;
	Jsonb *result;
	int priority;
	int attempt;
	int max_attempts;
	text *worker;
	Jsonb *errors;
	Jsonb *headers;
	Jsonb *links;
	Jsonb *progress;
	TimestampTz enqueued_at;
	TimestampTz run_at;		 /* of a live job only */
	TimestampTz started_at;	 /* 0: none */
	TimestampTz lease_until; /* 0: none */
	TimestampTz ended_at;	 /* 0: none */
} IdemJobInfo;

/* A reason why a job does not run (H3) */
typedef struct IdemWhy
{
	const char *reason;
	char *detail;
	TimestampTz since; /* 0: not known, or not shown */
	int pid;		   /* 0: no process is in the way, or it is not shown */
	char *fix;		   /* NULL: there is no command for it */
} IdemWhy;

/* The version of a job that is not committed */
typedef struct IdemOpenJob
{
	TransactionId xid; /* invalid: there is none */
	int64 token;	   /* of the last fetch; 0: no worker has fetched the job yet */
	bool is_leased;
	bool is_retried; /* the job was in the history */
	int attempt;
	NullableDatum links;
	NullableDatum payload;
} IdemOpenJob;

/* jobtable.c */
extern const IdemTableDef idem_jobtable_def;
extern const IdemTableDef idem_jobtable_keys_def;
extern const IdemTableDef idem_jobtable_log_def;
extern void idem_jobtable_open(IdemTable *jobs, LOCKMODE lockmode);
extern bool idem_jobtable_open_at_commit(IdemTable *jobs);
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
extern Relation idem_jobtable_key_index(IdemTable *jobs);
extern Relation idem_jobtable_log_key_index(IdemTable *log);
extern Relation idem_jobtable_retry_index(IdemTable *log);
extern Relation idem_jobtable_fetch_index(IdemTable *jobs);

/* jobrow.c */
extern bool idem_jobrow_has_key(IdemTable *table, AttrNumber queue_attno, text *queue, text *key,
								IdemSameHash *others);
extern void idem_jobrow_set_key(TupleTableSlot *slot, text *key, int64 key_hash, bool holds_key);
extern int64 idem_jobrow_ignored_hash(int64 key_hash);
extern bool idem_jobrow_holds_key(IdemTable *jobs);
extern int64 idem_jobrow_key_hash(IdemTable *jobs);
extern bool idem_jobrow_is_leased(IdemTable *jobs);
extern int64 idem_jobrow_lease(IdemTable *jobs);
extern bool idem_jobrow_was_fetched_here(IdemTable *jobs);
extern TimestampTz idem_jobrow_started_at(IdemTable *jobs);
extern TimestampTz idem_jobrow_due_since(IdemTable *jobs);
extern int idem_jobrow_max_attempts(IdemTable *jobs, const IdemQueue *queue);
extern bool idem_jobrow_has_no_attempts_left(IdemTable *jobs, const IdemQueue *queue);
extern bool idem_jobrow_waits_for_other(IdemTable *jobs);
extern IdemBlocked idem_jobrow_is_blocked(IdemTable *jobs);
extern const char *const idem_jobrow_state_words[];
extern IdemJobState idem_jobrow_state(IdemTable *jobs, Snapshot snapshot, TimestampTz now);
extern const char *idem_jobrow_state_name(IdemTable *jobs);
extern void idem_jobrow_note_place(const text *queue, int64 key_hash, ItemPointer place);
extern void idem_jobrow_store(IdemTable *jobs);

/* queuecache.c */
extern bool idem_queuecache_find(text *name, uint64 version, IdemQueue *queue);
extern void idem_queuecache_set(const IdemQueue *queue, uint64 version);

/* queuestore.c */
extern const IdemTableDef idem_queuestore_def;
extern const char *const idem_dedup_words[];
extern const char *const idem_on_duplicate_words[];
extern const char *const idem_if_running_words[];
extern int idem_queuestore_word(const text *value, const char *name, const char *const *words);
extern void idem_queuestore_get(text *name, IdemQueue *queue);
extern void idem_queuestore_use(text *name, IdemQueue *queue);
extern void idem_queuestore_use_of_row(IdemTable *table, AttrNumber attno, IdemQueue *queue);
extern IdemMayEnqueue idem_queuestore_may_enqueue(Oid role, Oid owner);
extern int idem_queuestore_count_jobs(text *queue, int max);
extern void idem_queuestore_open(IdemTable *queues);
extern bool idem_queuestore_set(IdemTable *queues, text *name, const NullableDatum *columns);
extern bool idem_queuestore_drop(IdemTable *queues, text *name);
extern bool idem_queuestore_pause(IdemTable *queues, text *name, bool pause);
extern TimestampTz idem_queuestore_paused_at(text *name);

/* change.c */
extern void idem_change_note_job(IdemTable *jobs);
extern void idem_change_note_move(IdemTable *jobs);
extern void idem_change_note_unfetched(IdemTable *jobs);
extern void idem_change_note_given_back(IdemTable *jobs);
extern void idem_change_note_absorbed(IdemTable *jobs);
extern void idem_change_note_new(const IdemEnqueue *enqueue, int64 job_id);
extern void idem_change_note_found(IdemTable *jobs);
extern void idem_change_note_end(IdemTable *jobs, const text *queue);

/* errors.c */
extern Jsonb *idem_errors_add(Jsonb *errors, int attempt, const text *error);
extern text *idem_errors_get_last(Jsonb *errors);
extern bool idem_errors_has_since(Jsonb *errors, TimestampTz time);

/* joblog.c */
extern bool idem_joblog_write(IdemTable *jobs, const char *state, TimestampTz now, int64 keep,
							  Jsonb *result, Jsonb *errors, TransactionId *in_the_way);
extern bool idem_joblog_move(IdemTable *jobs, const IdemQueue *queue, const char *state,
							 Jsonb *errors, TransactionId *in_the_way);
extern void idem_joblog_keep_key(IdemTable *jobs, TimestampTz now, Jsonb *result);
extern void idem_joblog_warn_skipped(int64 job_id);
extern void idem_joblog_warn_in_use(int64 job_id);

/* dead.c */
extern bool idem_dead_make(IdemTable *jobs, const IdemQueue *queue, text *error,
						   TransactionId *in_the_way);
extern IdemDeadOutcome idem_dead_make_if_spent(IdemTable *jobs, const IdemQueue *queue,
											   TransactionId *in_the_way);

/* jobstore.c */
extern bool idem_jobstore_find(IdemTable *jobs, int64 job_id, IdemQueue *queue);
extern bool idem_jobstore_cancel(IdemTable *jobs, int64 job_id);
extern bool idem_jobstore_insert_again(IdemTable *jobs, IdemTable *log);
extern bool idem_jobstore_retry(IdemTable *jobs, int64 job_id);
extern void idem_jobstore_read_log(IdemTable *log, const IdemQueue *queue, IdemJobInfo *info);
extern bool idem_jobstore_get(IdemTable *jobs, int64 job_id, IdemJobInfo *info);

/* headers.c */
extern Jsonb *idem_headers_defaults(void);
extern Jsonb *idem_headers_get(Jsonb *defaults, NullableDatum value);
extern text *idem_headers_get_trace(Jsonb *headers);
extern Jsonb *idem_headers_add_link(Jsonb *links, Jsonb *own, text *link);

/* links.c */
extern void idem_links_note(int64 job_id, Jsonb *headers);

/* workstore.c */
extern IdemHold idem_workstore_complete(IdemTable *jobs, int64 job_id, int64 token, Jsonb *result,
										IdemQueue *queue, IdemRunTime *run_time);
extern IdemHold idem_workstore_judge(IdemTable *jobs, bool exists, int64 token);
extern bool idem_workstore_fail_found(IdemTable *jobs, const IdemQueue *queue,
									  const IdemFailure *failure, TransactionId *in_the_way,
									  bool *is_dead, IdemRunTime *run_time);
extern IdemHold idem_workstore_fail(IdemTable *jobs, int64 job_id, int64 token,
									const IdemFailure *failure, TransactionId *in_the_way,
									bool *is_dead, IdemRunTime *run_time);
extern TimestampTz idem_workstore_snooze_found(IdemTable *jobs, const IdemQueue *queue, int64 delay,
											   IdemRunTime *run_time);
extern IdemHold idem_workstore_snooze(IdemTable *jobs, int64 job_id, int64 token, int64 delay,
									  TimestampTz *run_at);
extern IdemHold idem_workstore_heartbeat(IdemTable *jobs, int64 job_id, int64 token, int64 lease,
										 IdemQueue *queue, TimestampTz *lease_until);
extern IdemHold idem_workstore_progress(IdemTable *jobs, int64 job_id, int64 token, Jsonb *data,
										int64 lease, TimestampTz *lease_until);
pg_noreturn extern void idem_workstore_refuse(IdemHold hold, int64 job_id);

/* fetchskip.c */
extern void idem_fetchskip_begin(IdemFetchWalk *walk, const text *queue, TimestampTz now);
extern bool idem_fetchskip_was_long(const IdemFetchWalk *walk);
extern void idem_fetchskip_begin_anew(IdemFetchWalk *walk);
extern bool idem_fetchskip_goes_back(IdemFetchWalk *walk);
extern bool idem_fetchskip_collects(const IdemFetchWalk *walk);
extern void idem_fetchskip_announce_blocked(IdemFetchWalk *walk);
extern const IdemSkipRange *idem_fetchskip_find(const IdemFetchWalk *walk,
												const IdemPosition *position);
extern IdemPosition idem_fetchskip_jump(IdemFetchWalk *walk, const IdemPosition *from);
extern void idem_fetchskip_add(IdemFetchWalk *walk, const IdemPosition *upto,
							   const IdemSkip *skip);
extern void idem_fetchskip_add_pages(IdemFetchWalk *walk, int64 npages);
extern void idem_fetchskip_stop(IdemFetchWalk *walk, const IdemPosition *position);
extern void idem_fetchskip_end(IdemFetchWalk *walk, bool at_end, bool is_far);

/* fetchstore.c */
extern void idem_fetchstore_check_isolation(const char *command, const char *hint);
extern void idem_fetchstore_fetch_one(IdemTable *jobs, const IdemFetch *args, int64 job_id,
									  void (*put)(const IdemFetched *job, void *arg), void *arg);
extern bool idem_fetchstore_fetch(IdemTable *jobs, const IdemFetch *args,
								  void (*put)(const IdemFetched *job, void *arg), void *arg);
extern void idem_fetchstore_look(IdemTable *jobs, const IdemQueue *queue, IdemLook *look);

/* whychange.c */
extern void idem_whychange_find_open(IdemTable *jobs, IdemLookup *lookup, IdemOpenJob *open);
extern const char *idem_whychange_describe_lock(IdemTable *jobs, MultiXactStatus status,
												const IdemOpenJob *open);
extern const char *idem_whychange_describe_new(const IdemOpenJob *open);
extern const char *idem_whychange_describe_mine(IdemTable *jobs, IdemLookup *lookup);

/* run.c */
extern bool idem_run_fetch(IdemRun *run, text *queue);
extern void idem_run_as_current(const IdemFetched *job, void (*run)(void *arg), void *arg);
extern void idem_run_complete(void *arg);
extern bool idem_run_fail(IdemRun *run, const ErrorData *error);
extern bool idem_run_fail_later(IdemRun *run, text *queue, const ErrorData *error);

/* wait.c */
extern int idem_wait_for_queues(const char *command, text **queues, int n, int64 timeout);

/* bykeystore.c */
extern int idem_bykeystore_cancel(IdemTable *jobs, const IdemJobKey *key);
extern void idem_bykeystore_list(IdemTable *jobs, const IdemJobKey *key, int max_jobs,
								 void (*put)(const IdemJobInfo *info, void *arg), void *arg);

/* manystore.c */
extern int idem_manystore_change(IdemTable *jobs, const IdemMany *many);

/* retrystore.c */
extern int idem_retrystore_retry(IdemTable *jobs, const IdemMany *many);

/* whystore.c */
extern void idem_whystore_explain(IdemTable *jobs, int64 job_id,
								  void (*put)(const IdemWhy *why, void *arg), void *arg);

/* keywalk.c */
extern void idem_keywalk_begin(IdemKeyWalk *walk, IdemTable *jobs, Relation index,
							   const IdemKeyedEnqueue *keyed, SnapshotData *dirty);
extern bool idem_keywalk_next(IdemKeyWalk *walk);
extern void idem_keywalk_end(IdemKeyWalk *walk);

/* keyscan.c */
extern bool idem_keyscan_add_id(IdemIdSet *set, int64 id);
extern void idem_keyscan_note_absorbed(int64 job_id);
extern void idem_keyscan(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed,
						 IdemKeyScan *scan);

/* dedup.c */
extern const char *idem_dedup_outcome_name(IdemOutcome outcome);
extern void idem_dedup_fill_row(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
								int64 key_hash, bool takes_key, int64 after_job);
extern bool idem_dedup_is_absent(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed);
extern void idem_dedup_lock_toast(IdemTable *jobs, const IdemNewJob *job);
extern bool idem_dedup_takes_key(const IdemEnqueue *enqueue, const text *key);
extern void idem_dedup_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
							   IdemEnqueued *answer);

/* bulk.c */
extern void idem_bulk_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *news,
							  IdemEnqueued *answers, int n, int *ord);

/* work.c */
extern IdemFailure idem_work_get_failure(FunctionCallInfo fcinfo, int arg);

#endif /* IDEM_JOBS_H */
