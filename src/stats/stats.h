/*
 * stats.h
 *		Count, show the counters, and say who holds what.
 */
#ifndef IDEM_STATS_H
#define IDEM_STATS_H

#include "fn/fn.h"
#include "shmem/shmem.h"

/* counters.c */
extern void idem_counters_note_use(void);
extern void idem_counters_add(IdemDatabaseCounter counter);
extern void idem_counters_add_queue(IdemQueueRef *queue, IdemQueueCounter counter);
extern void idem_counters_add_queue_time(IdemQueueRef *queue, IdemQueueCounter counter,
										 IdemHistogramKind kind, TimestampTz from,
										 TimestampTz to);
extern double idem_counters_bound(int bucket);
extern void idem_counters_buffer(void);
extern void idem_counters_end_transaction(bool counts);
extern void idem_counters_abort_sub(SubTransactionId subid);
extern void idem_counters_save(void);
extern void idem_counters_load(void);
extern void idem_counters_log_duplicate(const char *kind, const char *outcome,
										const text *name_space, const text *key);

/* holders.c */
extern bool idem_holders_put(IdemAnswer *answer, const char *fact, const char *does,
							 TransactionId xid, int pid);
extern bool idem_holders_may_read(const char *view);

#endif /* IDEM_STATS_H */
