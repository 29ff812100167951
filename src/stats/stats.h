/*
 * shared.h
 *		What the processes of a server that preloads idem share: counters, the
 *		progress of cleanup, and what launcher and worker tell each other.
 *
 * Everything but the counters is read and written under the lock, which is
 * held for moments and never while waiting for anything.  Counters are added
 * to without it: a process finds its entry once, and an entry stays in its
 * place for as long as its database exists, so for as long as anybody counts.
 * What two processes may add to at once is an atomic variable, and there are
 * several of each so that they mostly do not meet.
 */
#ifndef IDEM_SHARED_H
#define IDEM_SHARED_H

#include "port/atomics.h"
#include "storage/lwlock.h"

#include "idem.h"
#include "jobs/jobs.h"

#define IDEM_NCOUNTERS		16
#define IDEM_NSTRIPES		8
#define IDEM_ERROR_TEXT_LEN 256

/* One set of counters, of a database (IdemStat) or a queue (IdemQueueStat): two cache lines */
typedef struct IdemCounters
{
	pg_atomic_uint64 values[IDEM_NCOUNTERS];
} IdemCounters;

/* What cleanup is doing; the order is that of phase_names in monitor.c */
typedef enum IdemPhase
{
	IDEM_PHASE_IDLE,
	IDEM_PHASE_KEYS,
	IDEM_PHASE_JOB_KEYS,
	IDEM_PHASE_JOB_HISTORY,
	IDEM_PHASE_JOBS,
	IDEM_PHASE_OFF,
	IDEM_PHASE_FAILING,
	IDEM_PHASE_NOT_THERE,
	IDEM_PHASE_LOCKED,
	IDEM_PHASE_SUBSCRIBED
} IdemPhase;

#define IDEM_NPHASES (IDEM_PHASE_JOBS + 1)

/* A phase of cleanup: the tables that it writes, the first of which it cleans, and one that it only reads */
typedef struct IdemPhaseDef
{
	const char *activity;
	const char *tables[4];
	const char *read_table;
	void (*clean)(IdemCleanup *cleanup);
} IdemPhaseDef;

/*
 * Cleanup of a database.  A round lasts until there is nothing left to remove,
 * and takes as many runs of the worker as that takes.
 */
typedef struct IdemProgress
{
	IdemPhase phase;
	TimestampTz started_at;			/* of the round; 0: there was none */
	TimestampTz finished_at;		/* of the last round that came to its end; 0: none has */
	int64 removed;					/* in this round */
	int64 working;					/* microseconds spent on that, without pauses */
	int64 backlog;					/* estimate of what is left; -1: not known */
	IdemPlace places[IDEM_NPHASES]; /* where the next run goes on, by phase */
	IdemPhase next;					/* with which phase it begins */
	TimestampTz error_at;			/* of the last error; 0: there was none */
	char error[IDEM_ERROR_TEXT_LEN];
} IdemProgress;

/* A database, or a queue in one */
typedef struct IdemEntry
{
	Oid database;  /* invalid: free */
	int queue_len; /* -1: of the database itself */
	char queue[IDEM_MAX_QUEUE_LEN];
	int next; /* entry in the same bucket, or free one; -1: none */

	/*
	 * Of the database itself: has a backend used the functions since the worker
	 * last looked for the extension?  Backends set it without the lock.
	 */
	volatile bool used;
	TimestampTz stats_reset;
	IdemProgress progress; /* of the database itself */
	IdemCounters stripes[IDEM_NSTRIPES] pg_attribute_aligned(PG_CACHE_LINE_SIZE);
} IdemEntry;

/* What was counted in an entry, out of shared memory */
typedef struct IdemCounted
{
	Oid database;
	int queue_len; /* -1: of the database itself */
	char queue[IDEM_MAX_QUEUE_LEN];
	TimestampTz stats_reset;
	uint64 counters[IDEM_NCOUNTERS];
} IdemCounted;

/* What has become of a run of the worker */
typedef enum IdemRunOutcome
{
	IDEM_RUN_LOST,		 /* never reported: could not connect, or was terminated */
	IDEM_RUN_DONE,		 /* all went well */
	IDEM_RUN_LOCKED,	 /* somebody has locked a table */
	IDEM_RUN_SUBSCRIBED, /* all went well, but a subscription writes a table */
	IDEM_RUN_OFF,		 /* idem.cleanup is off there */
	IDEM_RUN_NOT_THERE,	 /* the extension is not installed there */
	IDEM_RUN_FAILED		 /* an error */
} IdemRunOutcome;

/* The worker, of which there is one at a time */
typedef struct IdemRun
{
	pid_t pid; /* 0: none, or not there yet */
	Oid database;
	bool goes_on; /* the last run there has left more */
	int pause;	  /* times as long as the work shall the pauses be */
	bool connected;
	bool was_used; /* a backend used the functions since the last look for the extension */
	IdemRunOutcome outcome;
	bool more;	/* there is more to remove, also if something has failed */
	int64 rest; /* if so: microseconds until the next run */
	int64 lag;	/* and for how long the next row to be removed has been expired */
	int64 rows; /* and the number of live rows there */
	char error[IDEM_ERROR_TEXT_LEN];
} IdemRun;

/* What the launcher is doing; the order is that of state_names in monitor.c */
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
	IdemLauncherState state;
	TimestampTz started_at;
	TimestampTz no_slot_since; /* 0: there is one, as far as we know */
	TimestampTz clock_back_at; /* when the clock last went back, 0: it has not */
	int64 clock_back_by;	   /* microseconds */
	int64 runs;
	TimestampTz last_run_at;
	int64 memory;		  /* bytes */
	int64 awake_at;		  /* when it wakes up at the latest, by the steady clock; while awake: since when */
	TimestampTz error_at; /* of its last own error, not one of a database; 0: none */
	char error[IDEM_ERROR_TEXT_LEN];
} IdemLauncher;

typedef struct IdemShared
{
	LWLock *lock;
	IdemLauncher launcher;
	IdemRun run;
	bool is_full;	/* a queue or database got no entry */
	uint64 seed;	/* of the hash of entries */
	int *buckets;	/* as many as there are entries: the first entry of each; -1: none */
	int first_free; /* -1: none */
	int nfree;
	int nentries;
	IdemEntry entries[FLEXIBLE_ARRAY_MEMBER];
} IdemShared;

/* shared.c */
extern IdemShared *idem_shared; /* NULL: idem is not preloaded */
extern void idem_shared_init(void);
extern IdemEntry *idem_shared_entry(Oid database, const text *queue);
extern IdemEntry *idem_shared_find(Oid database, const text *queue);
extern void idem_shared_free(IdemEntry *entry);
extern void idem_shared_zero(IdemEntry *entry, TimestampTz now);
extern void idem_shared_copy(IdemEntry *entry, IdemCounted *counted);
extern void idem_shared_restore(const IdemCounted *counted);

/* statsfile.c */
extern void idem_statsfile_save(void);
extern void idem_statsfile_load(void);

/* stats.c */
extern void idem_stats_note_use(void);
extern void idem_stats_hold(void);
extern void idem_stats_let_go(bool committed);

/* phase.c */
extern const IdemPhaseDef idem_phases[IDEM_NPHASES];
extern void idem_phase_run(const IdemPhaseDef *phase, IdemCleanup *cleanup);

/* worker.c */
extern void idem_worker_begin(void);
extern void idem_worker_limit_lock_waits(void);
extern void idem_worker_take_database_settings(void);
extern void idem_worker_copy_error(char *text, const char *message);

/* cleanup.c */
extern PGDLLEXPORT void idem_cleanup_main(Datum arg);

/* launcher.c */
extern void idem_launcher_register(void);
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

#endif /* IDEM_SHARED_H */
