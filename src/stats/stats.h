/*
 * stats.h
 *		Count, show the counters, and say who holds what.
 */
#ifndef IDEM_STATS_H
#define IDEM_STATS_H

#include "storage/lock.h"

#include "shmem/shmem.h"

/* What an open transaction belongs to */
typedef enum IdemHolderKind
{
	IDEM_HOLDER_MINE,	  /* this transaction */
	IDEM_HOLDER_PROCESS,  /* a process of this server, which the caller may see */
	IDEM_HOLDER_HIDDEN,	  /* one that the caller may not see */
	IDEM_HOLDER_PREPARED, /* a prepared transaction */
	IDEM_HOLDER_PRIMARY	  /* this is a standby: a process or prepared transaction of its primary */
} IdemHolderKind;

/* Who holds a row, as far as the caller may know; see holders.c */
typedef struct IdemHolder
{
	IdemHolderKind kind;
	int pid;				/* 0: none, or not shown */
	char *application_name; /* NULL: none, or not shown */
	char *gid;				/* of a prepared transaction */
	TimestampTz since;		/* when the transaction began or was prepared; 0: not shown */
} IdemHolder;

/* statsfile.c */
extern void idem_statsfile_save(void);
extern void idem_statsfile_load(void);

/* counters.c */
extern void idem_counters_note_use(void);
extern void idem_counters_add(IdemDatabaseCounter counter);
extern void idem_counters_add_queue(IdemQueueRef *queue, IdemQueueCounter counter);
extern void idem_counters_add_queue_time(IdemQueueRef *queue, IdemQueueCounter counter,
										 IdemHistogramKind kind, TimestampTz from,
										 TimestampTz to);
extern void idem_counters_buffer(void);
extern void idem_counters_end_transaction(bool counts);
extern void idem_counters_abort_sub(SubTransactionId subid);
extern void idem_counters_log_duplicate(const char *kind, const char *outcome,
										const text *name_space, const text *key);

/* holders.c */
extern void idem_holders_refresh(void);
extern bool idem_holders_find(TransactionId xid, IdemHolder *holder);
extern bool idem_holders_find_process(int pid, IdemHolder *holder);
extern bool idem_holders_find_lock(const LockInstanceData *lock, IdemHolder *holder);
extern char *idem_holders_describe(const IdemHolder *holder);
extern char *idem_holders_fix(const IdemHolder *holder);
extern bool idem_holders_may_read(const char *view);

#endif /* IDEM_STATS_H */
