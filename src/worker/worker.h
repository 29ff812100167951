/*
 * worker.h
 *		Cleanup: what is swept, the background worker that does it, and the
 *		launcher that decides when.
 */
#ifndef IDEM_WORKER_H
#define IDEM_WORKER_H

#include "postmaster/bgworker.h"

#include "stats/stats.h"
#include "table/table.h"

/* Delays of the launcher in microseconds */
#define IDEM_MIN_DELAY USECS_PER_SEC
#define IDEM_MAX_DELAY (10 * USECS_PER_MINUTE)

/* One batch of a sweep: how much to remove, and how far that got */
typedef struct IdemCleanup
{
	int batch;		/* rows to remove at most */
	int64 deadline; /* when to stop, by the steady clock; 0: never */
	IdemCleanupCursor cursor;
	Snapshot snapshot;	/* which rows to look at; set by idem_sweep_run() */
	bool is_subscribed; /* skipped, because a subscription writes a table */
	int removed;
	bool more;	/* stopped before the end */
	int64 rows; /* if so: estimated number of live rows */
	int64 left; /* and of those that have expired */
} IdemCleanup;

/* One kind of rows that cleanup removes */
typedef struct IdemSweep
{
	const char *activity;  /* for pg_stat_activity */
	const char *tables[4]; /* that it writes; the first one is the one that it sweeps */
	const char *read_table;
	void (*run)(IdemCleanup *cleanup);
} IdemSweep;

/* A database as the launcher sees it; times by the steady clock, in microseconds */
typedef struct IdemDatabase
{
	Oid oid; /* hash key */
	char name[NAMEDATALEN];
	int64 due;
	int64 delay;		/* until the next try after a failure; 0: the last visit was fine */
	int64 locked_since; /* all visits since then have met a lock; 0: the last one has not */
	int64 lag;			/* age past expiry of the oldest row left */
	int64 rows;			/* live ones, in the tables that have rows left to remove */
	int pause;
	bool continues;		/* the last visit has left rows to remove */
	bool was_lost;		/* the worker of the last visit was terminated */
	bool has_extension; /* as far as the last visit has seen */
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
extern void idem_backlog_estimate(IdemTable *table, AttrNumber expires_at, IdemCleanup *cleanup);

/* sweep.c */
extern const IdemSweep idem_sweeps[IDEM_LAST_SWEEP + 1];
extern void idem_sweep_run(const IdemSweep *sweep, IdemCleanup *cleanup);

/* process.c */
extern void idem_process_describe(BackgroundWorker *worker, const char *name, const char *function);
extern void idem_process_begin(void);
extern void idem_process_limit_lock_waits(void);
extern void idem_process_take_database_settings(void);

/* visit.c */
extern PGDLLEXPORT void idem_cleanup_main(Datum arg);

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
idem_schedule_naptime(void)
{
	return idem_guc_cleanup_naptime * USECS_PER_SEC;
}

/* The delay before the next try: doubles after each failure */
static inline int64
idem_schedule_double_delay(int64 delay, int64 max)
{
	return Min(Max(2 * delay, IDEM_MIN_DELAY), max);
}

#endif /* IDEM_WORKER_H */
