/*
 * enqueue.h
 *		Enqueue jobs, one or many.
 */
#ifndef IDEM_JOBS_ENQUEUE_H
#define IDEM_JOBS_ENQUEUE_H

#include "jobs/row/job.h"

typedef enum IdemOutcome
{
	IDEM_OUTCOME_ENQUEUED,
	IDEM_OUTCOME_ABSORBED,
	IDEM_OUTCOME_REPLACED,
	IDEM_OUTCOME_POSTPONED,
	IDEM_OUTCOME_RERUN,
	IDEM_OUTCOME_DONE
} IdemOutcome;

/* The answer to an enqueue */
typedef struct IdemEnqueued
{
	int64 job_id;
	IdemOutcome outcome;
	Jsonb *result; /* result of the job, with IDEM_OUTCOME_DONE only; or NULL */
} IdemEnqueued;

/* A small set of job numbers */
typedef struct IdemIdSet
{
	int n;
	int64 *ids;
} IdemIdSet;

/* The enqueue of one job with a key */
typedef struct IdemKeyedEnqueue
{
	const IdemEnqueue *enqueue;
	const IdemNewJob *job;
	int64 key_hash;
	IdemTable *keys;	  /* idem.job_keys for until_expired, else NULL */
	IdemSameHash *others; /* keys with the same hash, seen by the last scan */
	/* jobs that looked waiting, but another transaction held them; cleared after each wait */
	IdemIdSet unlockable;
	bool log_is_locked; /* idem.job_log is locked, so this enqueue can make a job dead */
} IdemKeyedEnqueue;

/*
 * The kind of job of the key that decides about the enqueue.  If the key has jobs of
 * several kinds, the first of these kinds in this order decides (for one exception see
 * sum_up()).
 */
typedef enum IdemKeyScanFound
{
	IDEM_KEY_SCAN_NONE,
	IDEM_KEY_SCAN_WAITING,	/* a waiting job that may absorb the duplicate */
	IDEM_KEY_SCAN_OPEN,		/* a job that another open transaction has inserted */
	IDEM_KEY_SCAN_DRAINING, /* a waiting job that drains: it absorbs no more duplicates */
	IDEM_KEY_SCAN_SPENT,	/* a job without attempts left whose lease has expired */
	IDEM_KEY_SCAN_RUNNING	/* a job that a worker has fetched; see choose_running() */
} IdemKeyScanFound;

/* Result of scanning all jobs of a key */
typedef struct IdemKeyScan
{
	IdemKeyScanFound found;
	int64 job_id;
	ItemPointerData tid;
	TransactionId in_the_way; /* transaction that must end before we can decide, or invalid */
	bool is_being_cancelled;  /* a session waits to cancel the draining job: wait for the cancel */
	TM_Result lock_result;	  /* of locking the waiting job; set if in_the_way is invalid */
} IdemKeyScan;

/* A walk over the jobs of a key, and the most entries of ended jobs that it has passed */
typedef struct IdemKeyWalk
{
	IdemTable *jobs;
	IdemLeafWalk leaf;
	IdemSkips *skips; /* NULL: the places are not shared, so none are used */
	int64 began;	  /* by the steady clock */
	bool has_known;
	IdemKeySkip known; /* what earlier enqueues have passed */
	IdemKeySkip run;   /* since the last row that has not ended */
	IdemKeySkip most;
} IdemKeyWalk;

/* keywalk.c */
extern void idem_keywalk_begin(IdemKeyWalk *walk, IdemTable *jobs, Relation index,
							   const IdemKeyedEnqueue *keyed, SnapshotData *dirty);
extern bool idem_keywalk_next(IdemKeyWalk *walk);
extern void idem_keywalk_end(IdemKeyWalk *walk);

/* keyscan.c */
extern bool idem_keyscan_add_id(IdemIdSet *set, int64 id);
extern void idem_keyscan_note_absorbed(int64 job_id);
extern void idem_keyscan(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed,
						 IdemKeyScan *scan);

/* enqueuestore.c */
extern const char *idem_enqueuestore_outcome_name(IdemOutcome outcome);
extern TupleTableSlot *idem_enqueuestore_fill_row(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
												  int64 key_hash, bool takes_key, int64 after_job);
extern bool idem_enqueuestore_is_absent(IdemTable *jobs, Relation index, IdemKeyedEnqueue *keyed);
extern void idem_enqueuestore_lock_toast(IdemTable *jobs, const IdemNewJob *job);
extern bool idem_enqueuestore_takes_key(const IdemEnqueue *enqueue, const text *key);
extern void idem_enqueuestore_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *job,
									  IdemEnqueued *answer);

/* bulk.c */
extern void idem_bulk_enqueue(IdemTable *jobs, const IdemEnqueue *enqueue, const IdemNewJob *news,
							  IdemEnqueued *answers, int n, int *ord);

#endif /* IDEM_JOBS_ENQUEUE_H */
