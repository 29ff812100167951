/*
 * launcher.h
 *		The databases that the launcher visits.  Private to launcher.c and
 *		databases.c; only the launcher has the list.
 */
#ifndef IDEM_LAUNCHER_H
#define IDEM_LAUNCHER_H

#include "stats/stats.h"

/* Times in microseconds, by the steady clock */
#define IDEM_MIN_DELAY USECS_PER_SEC
#define IDEM_MAX_DELAY (10 * USECS_PER_MINUTE)

/* A database to be visited */
typedef struct IdemDatabase
{
	Oid oid; /* hash key */
	char name[NAMEDATALEN];
	int64 due;
	int64 delay;		/* until it is tried again; 0: the last run was fine */
	int64 locked_since; /* all runs have met a lock since then; 0: the last one has not */
	int64 lag;			/* age past expiry of the oldest row left */
	int64 rows;			/* live ones, in the tables where there was more */
	int pause;
	bool goes_on;	 /* the last run has left more */
	bool was_lost;	 /* and was terminated */
	bool is_without; /* the extension was not there */
	bool is_listed;	 /* in the list of databases just read */
} IdemDatabase;

typedef enum IdemAccess
{
	IDEM_ACCESS_YES,
	IDEM_ACCESS_NOT_NOW, /* a session is about to drop, copy or rename it */
	IDEM_ACCESS_NO
} IdemAccess;

/* databases.c */
extern int64 idem_databases_naptime(void);
extern int64 idem_databases_longer(int64 delay, int64 max);
extern void idem_databases_init(void);
extern void idem_databases_read(void);
extern void idem_databases_make_due(void);
extern IdemDatabase *idem_databases_first(void);
extern IdemAccess idem_databases_access(Oid oid);
extern void idem_databases_forget(Oid oid);
extern void idem_databases_end_run(const IdemRun *run, bool is_outdated);

#endif /* IDEM_LAUNCHER_H */
