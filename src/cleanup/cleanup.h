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

/* The tables of a transaction of the worker */
typedef struct IdemTables
{
	const char *written[5]; /* then NULL */
	const char *read;		/* one that it only reads, or NULL */
} IdemTables;

/* One kind of rows that cleanup removes */
typedef struct IdemSweep
{
	const char *activity; /* for pg_stat_activity */
	IdemTables tables;	  /* it sweeps the first one */
	/* of rows that expire in the order of a column; else NULL */
	void (*open)(IdemTable *table, LOCKMODE lockmode);
	AttrNumber expires_at;
	IdemDatabaseCounter counter;
} IdemSweep;

/* sweep.c */
extern const IdemSweep idem_sweeps[IDEM_LAST_SWEEP + 1];
extern void idem_sweep_run(IdemPhase phase, IdemSweepBatch *batch);
extern void idem_sweep_forget_cursors(void);

/* process.c */
extern void idem_process_describe(BackgroundWorker *worker, const char *name, const char *function);
extern ErrorData *idem_process_recover(MemoryContext context);
extern void idem_process_begin(void);
extern void idem_process_connect(Oid database);
extern void idem_process_take_database_settings(void);

/* worker.c */
extern PGDLLEXPORT void idem_worker_main(Datum arg);

/* launcher.c */
extern void idem_launcher_register(void);
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

#endif /* IDEM_CLEANUP_H */
