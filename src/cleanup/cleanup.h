/*
 * cleanup.h
 *		Cleanup and schedules: the sweeps, the background worker that runs them and the
 *		ticks, the launcher that starts the worker, and idem_cleanup().
 */
#ifndef IDEM_CLEANUP_H
#define IDEM_CLEANUP_H

#include "postmaster/bgworker.h"

#include "stats/stats.h"
#include "table/table.h"

/* T10: how long the turn of a database is while another one has a tick that is due */
#define IDEM_TURN (USECS_PER_SEC / 5)

/* Delays of the launcher after a failure, in microseconds */
#define IDEM_MIN_DELAY USECS_PER_SEC
#define IDEM_MAX_DELAY (10 * USECS_PER_MINUTE)

/* One batch of a sweep: how much to remove, and what became of it */
typedef struct IdemSweepBatch
{
	int max;				  /* rows to remove at most */
	int64 deadline;			  /* when to stop, by the steady clock; 0: never */
	IdemCleanupCursor cursor; /* where to begin; then where to continue */
	Snapshot snapshot;		  /* shows the rows to look at; set by idem_sweep_run() */
	bool is_subscribed;		  /* skipped, because a subscription writes a table */
	int removed;
	bool more;	/* stopped before the end: there may be more rows to remove */
	int64 rows; /* if so: estimated number of live rows in the table */
	int64 left; /* and of expired rows among them */
} IdemSweepBatch;

/* The tables of a batch */
typedef struct IdemBatchTables
{
	const char *written[5]; /* then NULL */
	const char *read;		/* one that the batch only reads, or NULL */
} IdemBatchTables;

/* What became of a batch */
typedef enum IdemBatchResult
{
	IDEM_BATCH_DONE,
	IDEM_BATCH_LOCKED, /* another session has locked a table */
	IDEM_BATCH_MISSING /* there is no such table */
} IdemBatchResult;

/* One kind of rows that cleanup removes */
typedef struct IdemSweep
{
	const char *activity;	/* for pg_stat_activity */
	IdemBatchTables tables; /* it sweeps the first one */
	void (*run)(IdemSweepBatch *batch);
} IdemSweep;

/* A database as the launcher sees it; times by the steady clock, in microseconds */
typedef struct IdemDatabase
{
	Oid oid; /* hash key */
	char name[NAMEDATALEN];
	int64 due;			  /* for cleanup */
	int64 not_before;	  /* no visit before this time */
	int64 tick_due;		  /* for its earliest tick; PG_INT64_MAX: none is known */
	int64 tick_retry;	  /* to try ticks again that failed or were locked; PG_INT64_MAX: none */
	int64 tick_delay;	  /* until the next try after ticks failed; 0: the last ones were fine */
	int64 ticks_locked;	  /* all rounds since then met a locked schedule; 0: the last one did not */
	IdemTickReport ticks; /* what the turns of the round under way have reported */
	int64 delay;		  /* until the next try after a failure; 0: the last visit was fine */
	int64 locked_since;	  /* all visits since then met a locked table; 0: the last one did not */
	int64 lag;			  /* how long ago the oldest row left expired */
	int64 rows;			  /* live rows in the tables that have rows left to remove */
	int pause;			  /* length of a pause as a multiple of the batch before it */
	bool continues;		  /* the last visit left rows to remove */
	bool was_lost;		  /* the worker of the last visit was terminated */
	bool has_extension;	  /* as the last visit found; true before the first one */
	bool is_listed;		  /* in the list of databases just read */
} IdemDatabase;

/* May a worker connect to a database? */
typedef enum IdemAccess
{
	IDEM_ACCESS_YES,
	IDEM_ACCESS_NOT_NOW, /* a session is dropping, copying or renaming the database */
	IDEM_ACCESS_NO
} IdemAccess;

/* backlog.c */
extern void idem_backlog_estimate(IdemTable *table, AttrNumber expires_at, IdemSweepBatch *batch);

/* sweep.c */
extern const IdemSweep idem_sweeps[IDEM_LAST_SWEEP + 1];
extern void idem_sweep_run(const IdemSweep *sweep, IdemSweepBatch *batch);

/* process.c */
extern void idem_process_describe(BackgroundWorker *worker, const char *name, const char *function);
extern void idem_process_begin(void);
extern void idem_process_limit_lock_waits(void);
extern void idem_process_take_database_settings(void);

/* batch.c */
extern IdemBatchResult idem_batch_run(const char *activity, const IdemBatchTables *tables,
									  void (*run)(void *arg), void *arg);
extern void idem_batch_recover(MemoryContext context, char *message);

/* ticks.c */
extern bool idem_ticks_others_due(void);
extern void idem_ticks_run(int64 until, const IdemVisitRequest *request, IdemTickReport *report);

/* worker.c */
extern PGDLLEXPORT void idem_worker_main(Datum arg);

/* databases.c */
extern void idem_databases_init(void);
extern void idem_databases_read(void);
extern void idem_databases_make_due(void);
extern bool idem_databases_read_ticks(void);
extern bool idem_databases_have_ticks(void);
extern int64 idem_databases_due(const IdemDatabase *database);
extern void idem_databases_postpone(IdemDatabase *database, int64 until);
extern IdemDatabase *idem_databases_first(void);
extern IdemAccess idem_databases_access(Oid oid);
extern void idem_databases_forget(Oid oid);
extern void idem_databases_end_visit(const IdemVisit *visit, bool is_outdated);

/* launcher.c */
extern void idem_launcher_register(void);
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

static inline int64
idem_cleanup_naptime(void)
{
	return idem_guc_cleanup_naptime * USECS_PER_SEC;
}

/* The delay before the next attempt: it doubles after each failure (W7) */
static inline int64
idem_cleanup_double_delay(int64 delay, int64 max)
{
	return Min(Max(2 * delay, IDEM_MIN_DELAY), max);
}

#endif /* IDEM_CLEANUP_H */
