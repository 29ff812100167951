/*
 * shmem.h
 *		State that processes share if the library is preloaded: counters, histograms,
 *		the progress of cleanup, requests of the launcher and reports of the worker, what
 *		fetches skip, and which sessions wait.
 *
 * The other folders read and write the shared memory through the functions below.  Only counters
 * and histograms are added to directly, where an IdemEntryRef points.
 */
#ifndef IDEM_SHMEM_H
#define IDEM_SHMEM_H

#include "port/atomics.h"
#include "storage/itemptr.h"
#include "storage/lwlock.h"
#include "storage/spin.h"

#include "idem.h"

#define IDEM_NCOUNTERS		15 /* with the pins, two cache lines */
#define IDEM_ERROR_TEXT_LEN 256

/* Counters of a database; first the answers to claims, in the order of IdemKeyStatus */
typedef enum IdemDatabaseCounter
{
	IDEM_DATABASE_COUNTER_CLAIMS,
	IDEM_DATABASE_COUNTER_RESUMED,
	IDEM_DATABASE_COUNTER_BUSY,
	IDEM_DATABASE_COUNTER_HELD,
	IDEM_DATABASE_COUNTER_REPLAYS,
	IDEM_DATABASE_COUNTER_PARKED,
	IDEM_DATABASE_COUNTER_EXHAUSTED,
	IDEM_DATABASE_COUNTER_MISMATCHES,
	IDEM_DATABASE_COUNTER_TAKEOVERS,
	IDEM_DATABASE_COUNTER_STALE_TOKENS,
	IDEM_DATABASE_COUNTER_EXPIRED_KEYS,
	IDEM_DATABASE_COUNTER_ABANDONED_LEASES, /* of the expired keys, those leased and not finished */
	IDEM_DATABASE_COUNTER_EXPIRED_JOB_KEYS,
	IDEM_DATABASE_COUNTER_EXPIRED_JOB_HISTORY,
	IDEM_DATABASE_COUNTER_N
} IdemDatabaseCounter;

/* Counters of a queue; first the outcomes of enqueues, in the order of IdemOutcome */
typedef enum IdemQueueCounter
{
	IDEM_QUEUE_COUNTER_ENQUEUED,
	IDEM_QUEUE_COUNTER_ABSORBED,
	IDEM_QUEUE_COUNTER_REPLACED,
	IDEM_QUEUE_COUNTER_POSTPONED,
	IDEM_QUEUE_COUNTER_RERUN,
	IDEM_QUEUE_COUNTER_DONE,
	IDEM_QUEUE_COUNTER_REFUSED,
	IDEM_QUEUE_COUNTER_FETCHED,
	IDEM_QUEUE_COUNTER_COMPLETED,
	IDEM_QUEUE_COUNTER_FAILED,
	IDEM_QUEUE_COUNTER_DEAD,
	IDEM_QUEUE_COUNTER_SNOOZED,
	IDEM_QUEUE_COUNTER_CANCELLED,
	IDEM_QUEUE_COUNTER_RETRIED,
	IDEM_QUEUE_COUNTER_RESCHEDULED,
	IDEM_QUEUE_COUNTER_N
} IdemQueueCounter;

/* A position in the index of fetch: the order in which the jobs of a queue are fetched */
typedef struct IdemPosition
{
	int priority;
	TimestampTz run_at;
	int64 job_id;
} IdemPosition;

/* By a clock that shows less than until, no job in the range can be fetched; see skips.c */
typedef struct IdemSkipRange
{
	IdemPosition after; /* the range begins behind this position */
	IdemPosition upto;	/* and ends with this one */
	TimestampTz until;	/* DT_NOEND: time changes nothing */
	int64 looked_at;	/* by the steady clock: when the walker began to look at it */
	uint64 owner;		/* the only transaction that may use the range; 0: all may */
	int weight;			/* what it saves: about the number of entries in it */
	int cost;			/* microseconds that looking at its entries took */
	bool has_blocked;	/* it contains follow-up jobs that are blocked */
} IdemSkipRange;

#define IDEM_MAX_SKIPS 12

/* From the first TID to the last, all entries of the hash are of ended jobs; see skips.c */
typedef struct IdemKeySkip
{
	int64 key_hash;
	Oid storage; /* of the table: after a rewrite the rows have other TIDs */
	ItemPointerData first;
	ItemPointerData last;
	int n;			 /* about the number of entries; 0: unused */
	int cost;		 /* microseconds that looking at them took */
	int64 looked_at; /* by the steady clock: when the look at them began */
} IdemKeySkip;

#define IDEM_MAX_KEY_SKIPS 4

/* The skip ranges of a queue, and the walker: the fetch that collects them */
typedef struct IdemSkips
{
	slock_t lock;
	pg_atomic_uint32 flags; /* bits HAS_..., see skips.c; read without the lock */
	int n;
	bool walker_has_limit;
	bool walker_blocked;	   /* the walker may have passed blocked jobs */
	uint64 walker;			   /* number of the walker; 0: none */
	uint64 nwalkers;		   /* number of the last walker */
	int64 walker_seen_at;	   /* by the steady clock */
	int64 patience;			   /* microseconds without a sign of the walker until it is replaced */
	IdemPosition walker_after; /* the walker has published up to this position */
	IdemPosition walker_limit; /* first change behind it that a writer has noted meanwhile */
	IdemSkipRange ranges[IDEM_MAX_SKIPS];
	pg_atomic_uint64 fetched_at; /* about when the last fetch of the queue was; 0: none yet (H3) */
	pg_atomic_uint32 nkeys;		 /* not 0: keys is in use */
	IdemKeySkip keys[IDEM_MAX_KEY_SKIPS];
} IdemSkips;

/* Copies of the ranges that a fetch uses */
typedef struct IdemSkipView
{
	int n;
	bool is_overdue; /* one of them is due for another look */
	IdemSkipRange ranges[IDEM_MAX_SKIPS];
} IdemSkipView;

/* One set of counters: two cache lines */
typedef struct IdemCounters
{
	pg_atomic_uint64 values[IDEM_NCOUNTERS];
	pg_atomic_uint64 pins; /* of a queue: transactions that use the entry (S2) */
} IdemCounters;

/* What histograms of a queue there are, in the order of kind_names in views.c */
typedef enum IdemHistogramKind
{
	IDEM_HISTOGRAM_WAIT, /* from when the job was due to its fetch */
	IDEM_HISTOGRAM_RUN,	 /* from the fetch until the worker has completed, failed or snoozed it */
	IDEM_HISTOGRAM_N
} IdemHistogramKind;

#define IDEM_HISTOGRAM_BUCKETS 31

/* A histogram, see stats/counters.c: the times in each bucket, and their sum in microseconds */
#define IDEM_HISTOGRAM_SUM IDEM_HISTOGRAM_BUCKETS
#define IDEM_HISTOGRAM_LEN (IDEM_HISTOGRAM_BUCKETS + 1)

/* The histograms of a queue, one after the other */
#define IDEM_NTIMES (IDEM_HISTOGRAM_N * IDEM_HISTOGRAM_LEN)

/* The entry of a database or a queue, for this backend, which adds to it without a lock */
typedef struct IdemEntryRef
{
	IdemCounters *counters;	   /* NULL: there is no room, or no shared memory */
	pg_atomic_uint64 *times;   /* histograms of a queue; NULL as above */
	volatile bool *used;	   /* set when it is used (W5, S2); may be NULL */
	IdemSkips *skips;		   /* of a queue; NULL as above */
	pg_atomic_uint64 *version; /* of a queue: changes when its entry gives way */
	uint64 seen_version;	   /* what it was when the entry was looked up */
} IdemEntryRef;

/* What to do if a queue has no entry */
typedef enum IdemMakeEntry
{
	IDEM_MAKE_NEVER,   /* nothing */
	IDEM_MAKE_IF_FREE, /* make it if the database may take a free one */
	IDEM_MAKE_ROOM	   /* or if another queue can give way (S2) */
} IdemMakeEntry;

/* Counters and histograms of a database or a queue, copied */
typedef struct IdemStatsSnapshot
{
	Oid database;
	int queue_len; /* -1: counters of the database itself */
	char queue[IDEM_MAX_QUEUE_LEN];
	TimestampTz stats_reset;
	uint64 counters[IDEM_NCOUNTERS];
	uint64 times[IDEM_NTIMES]; /* of a queue */
} IdemStatsSnapshot;

/* What cleanup is doing in a database; the order is that of phase_names in views.c */
typedef enum IdemPhase
{
	IDEM_PHASE_IDLE,
	/* the sweeps, in the order of idem_sweeps in sweep.c */
	IDEM_PHASE_KEYS,
	IDEM_PHASE_JOB_KEYS,
	IDEM_PHASE_JOB_HISTORY,
	IDEM_PHASE_JOBS,
	/* the reasons why cleanup does nothing */
	IDEM_PHASE_OFF,
	IDEM_PHASE_FAILING,
	IDEM_PHASE_NOT_INSTALLED,
	IDEM_PHASE_LOCKED,
	IDEM_PHASE_SUBSCRIBED
} IdemPhase;

#define IDEM_FIRST_SWEEP IDEM_PHASE_KEYS
#define IDEM_LAST_SWEEP	 IDEM_PHASE_JOBS

/* Where a sweep continues */
typedef struct IdemCleanupCursor
{
	TimestampTz from; /* rows that expired before this time are skipped */
	uint32 page;	  /* of idem.jobs, whose rows have no order of expiry */
} IdemCleanupCursor;

/*
 * Progress of cleanup in a database.  A round lasts until there is nothing left
 * to remove.  It may take several visits of the worker.
 */
typedef struct IdemProgress
{
	IdemPhase phase;
	TimestampTz started_at;	 /* of the round; 0: there was none */
	TimestampTz finished_at; /* of the last complete round; 0: there was none */
	int64 removed;			 /* rows, in this round */
	int64 working;			 /* microseconds of work in this round, without pauses */
	int64 backlog;			 /* estimate of the rows left; -1: unknown */
	IdemPhase next;			 /* the sweep that the next visit begins with */
	IdemCleanupCursor cursors[IDEM_LAST_SWEEP + 1];
	TimestampTz error_at; /* of the last error; 0: there was none */
	char error[IDEM_ERROR_TEXT_LEN];
} IdemProgress;

/* What is known of a database, copied */
typedef struct IdemDatabaseInfo
{
	Oid database;
	TimestampTz next_tick; /* the earliest; DT_NOEND: none */
	IdemProgress progress;
} IdemDatabaseInfo;

/* How a visit of the worker ended */
typedef enum IdemVisitOutcome
{
	IDEM_VISIT_LOST, /* no report: the worker could not connect, or was terminated */
	IDEM_VISIT_DONE,
	IDEM_VISIT_TICKED,		  /* for schedules only: cleanup was not due */
	IDEM_VISIT_LOCKED,		  /* another session has locked a table */
	IDEM_VISIT_SUBSCRIBED,	  /* done, but a subscription writes a table */
	IDEM_VISIT_OFF,			  /* idem.cleanup is off in the database */
	IDEM_VISIT_NOT_INSTALLED, /* the database does not have the extension */
	IDEM_VISIT_FAILED		  /* an error */
} IdemVisitOutcome;

/* From the launcher to the worker */
typedef struct IdemVisitRequest
{
	Oid database;
	bool cleans;	   /* cleanup is due; false: only schedules */
	bool continues;	   /* the last visit has left rows to remove */
	int pause;		   /* length of a pause as a multiple of the batch before it */
	TimestampTz round; /* of ticks, to be continued: when it began; 0: begin one */
	int tick_skip;	   /* skip as many schedules that are due: this round has tried them */
} IdemVisitRequest;

/* What became of the schedules of a database during a visit (T6, T7) */
typedef struct IdemTickReport
{
	bool was_locked; /* another session has locked a schedule or a table */
	bool failed;
	TimestampTz round;				 /* it began then; 0: it has ended */
	int skip;						 /* schedules that have failed or were locked in it */
	char error[IDEM_ERROR_TEXT_LEN]; /* the first one */
} IdemTickReport;

/* From the worker to the launcher */
typedef struct IdemVisitReport
{
	bool connected;
	IdemVisitOutcome outcome;
	bool was_used; /* the functions were used since the worker last looked for the extension */
	bool more;	   /* there are rows left to remove, also after a failure */
	int64 rest;	   /* if more: microseconds until the next visit */
	int64 lag;	   /* if more: microseconds since the next row to be removed expired */
	int64 rows;	   /* if more: number of live rows in the tables concerned */
	char error[IDEM_ERROR_TEXT_LEN];
	IdemTickReport ticks;
} IdemVisitReport;

/* The visit under way, or the last one */
typedef struct IdemVisit
{
	pid_t pid; /* of the worker; 0: it has not started, or has ended */
	IdemVisitRequest request;
	IdemVisitReport report;
} IdemVisit;

/* What the launcher is doing; the order is that of state_names in views.c */
typedef enum IdemLauncherState
{
	IDEM_LAUNCHER_STOPPED,
	IDEM_LAUNCHER_SLEEPING,
	IDEM_LAUNCHER_WORKING,
	IDEM_LAUNCHER_NO_SLOT,
	IDEM_LAUNCHER_FAILING
} IdemLauncherState;

typedef struct IdemLauncher
{
	pid_t pid; /* 0: none */
	int proc;  /* number of the process, to set its latch */
	IdemLauncherState state;
	TimestampTz started_at;
	TimestampTz no_slot_since; /* 0: the last registration found a worker slot */
	TimestampTz clock_back_at; /* when the clock was last set back; 0: never */
	int64 clock_back_by;	   /* microseconds */
	int64 visits;
	TimestampTz last_visit_at;
	int64 memory;		  /* bytes */
	int64 awake_at;		  /* steady clock: latest time to wake up; while awake: since when */
	TimestampTz error_at; /* of the last error of the launcher itself; 0: none */
	char error[IDEM_ERROR_TEXT_LEN];
} IdemLauncher;

/* Wake all who wait for a subject */
#define IDEM_WAKE_ALL PG_INT32_MAX

/* What a session can wait for */
typedef enum IdemSubjectKind
{
	IDEM_SUBJECT_QUEUE,
	IDEM_SUBJECT_JOB,
	IDEM_SUBJECT_KEY
} IdemSubjectKind;

/* Has a waiter been woken, and why? */
typedef enum IdemWoken
{
	IDEM_WOKEN_NOT,
	IDEM_WOKEN_FOR_ONE, /* one job is ready */
	IDEM_WOKEN_FOR_MORE /* several may be: it wakes one more waiter for each further job */
} IdemWoken;

/* The place of a session that waits for a subject; see waiters.c */
typedef struct IdemPlace IdemPlace;

/*
 * What the open transaction has done that concerns those who wait for a queue; see wake/touched.c
 */
typedef struct IdemTouched
{
	int njobs;				 /* new ones that are ready if the transaction commits */
	TimestampTz later;		 /* when the next one becomes ready; or DT_NOEND */
	int nfetched;			 /* fetched without a lease by this transaction, and not ended yet */
	bool leases;			 /* it has leased jobs, too: nfetched may be too high then */
	SubTransactionId holder; /* the last one that has locked or changed jobs; or 0 */
	bool undone;			 /* it was rolled back: nfetched may be too low */
	bool lets_go;			 /* its commit lets go jobs that it has locked */
	bool follows;			 /* it has enqueued a follow-up job (J4) */
	bool ended_key;			 /* it has ended a job with a key, so follow-up jobs may be free */
} IdemTouched;

/*
 * The handle of a queue: what this backend knows about it, and what the open transaction has done
 * with it.  It is valid until the transaction ends; see queueref.c.  Other folders read only the
 * first part.
 */
typedef struct IdemQueueRef
{
	text *name;		/* NULL: this handle stands for several queues; it must not keep settings */
	uint64 subject; /* of those who wait for the queue */
	/* Of src/jobs; NULL: none are known.  Allocated in GetMemoryChunkContext() of the handle. */
	struct IdemQueueSettings *settings;

	/* The entry in shared memory: */
	IdemEntryRef entry;	  /* no counters: there was none; it may have given way unless pinned */
	uint64 nmade;		  /* idem_entries_nmade() when the entry was last looked for; 0: never */
	IdemSkips *own_skips; /* of this backend, while there is no entry; NULL: none yet */
	bool own_are_old;	  /* others have noted their changes elsewhere since */

	/* For the open transaction: */
	struct IdemQueueRef *next; /* in idem_queueref_used */
	bool is_used;
	bool is_pinned;				 /* the entry cannot give way */
	SubTransactionId used_by;	 /* the first that used it and was not rolled back; 0: none */
	struct IdemPending *pending; /* in TopTransactionContext; NULL: nothing; stats/counters.c */
	bool is_touched;			 /* the next one has a content */
	IdemTouched touched;
} IdemQueueRef;

/* exchange.c */
extern Size idem_exchange_size(void);
extern void idem_exchange_attach(LWLock *lock);
extern void idem_exchange_set_launcher(const IdemLauncher *launcher);
extern void idem_exchange_wake_launcher(void);
extern void idem_exchange_get(IdemLauncher *launcher, IdemVisit *visit);
extern void idem_exchange_request_visit(const IdemVisitRequest *request);
extern bool idem_exchange_begin_visit(Oid database, IdemVisitRequest *request);
extern void idem_exchange_set_report(const IdemVisitReport *report);
extern bool idem_exchange_set_visit_error(const char *message, const char *detail);
extern void idem_exchange_end_visit(void);
extern void idem_exchange_copy_error(char *text, const char *message);

/* skips.c */
extern const IdemPosition idem_first_position;
extern const IdemPosition idem_last_position;
extern int idem_skips_compare(const IdemPosition *a, const IdemPosition *b);
extern IdemPosition idem_skips_before(const IdemPosition *position);
extern bool idem_skips_contains(const IdemSkipRange *range, const IdemPosition *position);
extern void idem_skips_init(IdemSkips *skips);
extern void idem_skips_note_fetch(IdemSkips *skips, TimestampTz now);
extern TimestampTz idem_skips_last_fetch(IdemSkips *skips);
extern void idem_skips_read(IdemSkips *skips, TimestampTz now, int64 steady, uint64 owner,
							bool fresh, IdemSkipView *view);
extern uint64 idem_skips_register(IdemSkips *skips, const IdemPosition *after, int64 steady);
extern void idem_skips_announce_blocked(IdemSkips *skips, uint64 id);
extern bool idem_skips_publish(IdemSkips *skips, uint64 id, const IdemSkipRange *seen,
							   const IdemPosition *next, bool is_held, int64 steady);
extern void idem_skips_release(IdemSkips *skips, uint64 id);
extern void idem_skips_note(IdemSkips *skips, const IdemPosition *position, TimestampTz due,
							TimestampTz now);
extern bool idem_skips_has_blocked(IdemSkips *skips);
extern void idem_skips_drop_blocked(IdemSkips *skips);
extern bool idem_skips_key_get(IdemSkips *skips, int64 key_hash, Oid storage, int64 steady,
							   IdemKeySkip *skip);
extern void idem_skips_key_publish(IdemSkips *skips, const IdemKeySkip *skip, int64 steady);
extern void idem_skips_key_note(IdemSkips *skips, int64 key_hash, ItemPointer place);
extern bool idem_skips_key_contains(const IdemKeySkip *skip, ItemPointer place);

/* entries.c */
extern void idem_entries_request(void);
extern bool idem_entries_attach(void);
extern bool idem_entries_exist(void);
extern bool idem_entries_is_full(void);
extern uint64 idem_entries_nmade(void);
extern IdemEntryRef idem_entries_get_database(void);
extern bool idem_entries_pin(const IdemEntryRef *ref);
extern void idem_entries_unpin(const IdemEntryRef *ref);
extern IdemEntryRef idem_entries_pin_queue(const text *queue, IdemMakeEntry make);
extern bool idem_entries_begin_visit(void);
extern bool idem_entries_is_used(Oid database);
extern IdemStatsSnapshot *idem_entries_copy_counters(bool of_queues, int *n);
extern void idem_entries_restore_counters(const IdemStatsSnapshot *snapshot);
extern void idem_entries_reset_counters(void);
extern IdemDatabaseInfo *idem_entries_copy_databases(int *n);
extern void idem_entries_forget_database(Oid database);
extern bool idem_entries_get_progress(Oid database, IdemProgress *progress);
extern void idem_entries_set_progress(Oid database, const IdemProgress *progress);
extern void idem_entries_set_failure(Oid database, const char *error);
extern void idem_entries_lower_tick(Oid database, TimestampTz tick);

/* waiters.c */
extern void idem_waiters_request(void);
extern void idem_waiters_attach(void);
extern uint64 idem_waiters_queue(const text *queue);
extern uint64 idem_waiters_job(int64 job_id);
extern uint64 idem_waiters_key(int64 key_hash);
extern IdemPlace *idem_waiters_enlist(IdemSubjectKind kind, uint64 subject);
extern IdemWoken idem_waiters_begin_look(IdemPlace *mine);
extern void idem_waiters_end_look(IdemPlace *mine, int64 next_look, bool blocked);
extern void idem_waiters_leave(IdemPlace *mine);
extern int64 idem_waiters_next_look(const IdemPlace *mine);
extern void idem_waiters_tell_looker(uint64 subject, int64 next_look, bool blocked);
extern bool idem_waiters_exist(uint64 subject);
extern bool idem_waiters_wait_for_end(void);
extern void idem_waiters_wake(uint64 subject, int n, IdemWoken why);
extern void idem_waiters_wake_blocked(uint64 subject);
extern void idem_waiters_wake_all(void);

/* queueref.c */
extern IdemQueueRef *idem_queueref_used;
extern IdemQueueRef *idem_queueref_get(const text *name);
extern void idem_queueref_use(IdemQueueRef *ref);
extern bool idem_queueref_pin(IdemQueueRef *ref);
extern bool idem_queueref_make_entry(IdemQueueRef *ref, IdemMakeEntry make);
extern IdemSkips *idem_queueref_skips(IdemQueueRef *ref);
extern void idem_queueref_unpin_all(void);
extern void idem_queueref_forget_all(void);

#endif /* IDEM_SHMEM_H */
