/*
 * enqueue.h
 *		Enqueue jobs, one or many.
 */
#ifndef IDEM_JOBS_ENQUEUE_H
#define IDEM_JOBS_ENQUEUE_H

#include "jobs/row/job.h"

/* enqueuestore.c */
extern const char *const idem_enqueuestore_outcome_names[];
extern void idem_enqueuestore_set_key(const IdemEnqueue *enqueue, IdemNewJob *job);
extern TupleTableSlot *idem_enqueuestore_form_row(IdemTable *jobs, const IdemEnqueue *enqueue,
												  const IdemNewJob *job, int64 after_job);
extern void idem_enqueuestore_lock_toast(IdemTable *jobs, const IdemNewJob *job);
extern bool idem_enqueuestore_is_absent(IdemTable *jobs, Relation index, IdemTable *keys,
										const IdemEnqueue *enqueue, IdemNewJob *job);
extern void idem_enqueuestore_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, IdemNewJob *job);

/* bulk.c */
extern void idem_bulk_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, IdemNewJob *news, int n,
							  int *ord);

#endif /* IDEM_JOBS_ENQUEUE_H */
