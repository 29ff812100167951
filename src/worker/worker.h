/*
 * worker.h
 *		Cleanup: the sweeps, the background worker that runs them, the launcher
 *		that starts the worker, and idem_cleanup().
 */
#ifndef IDEM_WORKER_H
#define IDEM_WORKER_H

#include "postmaster/bgworker.h"

#include "stats/stats.h"
#include "table/table.h"

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

/* One kind of rows that cleanup removes */
typedef struct IdemSweep
{
	const char *activity;	/* for pg_stat_activity */
	const char *tables[4];	/* those that it writes, then NULL; it sweeps the first one */
	const char *read_table; /* one that it only reads, or NULL */
	void (*run)(IdemSweepBatch *batch);
} IdemSweep;

/* A database as the launcher sees it; times by the steady clock, in microseconds */
typedef struct IdemDatabase
{
	Oid oid; /* hash key */
	char name[NAMEDATALEN];
	int64 due;
	int64 delay;		/* until the next try after a failure; 0: the last visit was fine */
	int64 locked_since; /* all visits since then met a locked table; 0: the last one did not */
	int64 lag;			/* how long ago the oldest row left expired */
	int64 rows;			/* live rows in the tables that have rows left to remove */
	int pause;			/* length of a pause as a multiple of the batch before it */
	bool continues;		/* the last visit left rows to remove */
	bool was_lost;		/* the worker of the last visit was terminated */
	bool has_extension; /* as the last visit found; true before the first one */
	bool is_listed;		/* in the list of databases just read */
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

/* visit.c */
extern PGDLLEXPORT void idem_visit_main(Datum arg);

/* schedule.c */
extern void idem_schedule_init(void);
extern void idem_schedule_read_databases(void);
extern void idem_schedule_make_due(void);
extern IdemDatabase *idem_schedule_first(void);
extern IdemAccess idem_schedule_access(Oid oid);
extern void idem_schedule_forget(Oid oid);
extern void idem_schedule_end_visit(const IdemVisit *visit, bool is_outdated);

/* launcher.c */
extern void idem_launcher_register(void);
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

static inline int64
idem_worker_naptime(void)
{
	return idem_guc_cleanup_naptime * USECS_PER_SEC;
}

/* The delay before the next attempt: it doubles after each failure (W7) */
static inline int64
idem_worker_double_delay(int64 delay, int64 max)
{
	return Min(Max(2 * delay, IDEM_MIN_DELAY), max);
}

#endif /* IDEM_WORKER_H */
