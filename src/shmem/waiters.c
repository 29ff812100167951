/*
 * waiters.c
 *		The sessions that wait for a queue, a job or a key, in shared memory.
 *
 * A session has a place for each subject that it waits for.  A place stands in the list of
 * a bucket, which the hash of the subject selects.  The first place of a subject in a list
 * is the looker: its session also looks for what has no event, at a time that is noted in
 * the place.  A place that was woken is not in the list until its session puts it back.
 *
 * A7: half of the places are shared out among the processes that the server may have; a session
 * always gets its part of them.  If the half has less than one place for each process, a session
 * gets one as long as there are any.  Further places come from the other half, first come, first
 * served.  So a few sessions that wait for many queues leave room for those that wait for a few.
 *
 * The lock of a bucket protects its list and the places in it; a spinlock protects the list
 * of free places and the number of extra ones.  A process holds these locks for moments:
 * nothing under them allocates memory or raises an error.  The count of a bucket is also read
 * without the lock.  A process that ends a transaction reads it after the change of the
 * transaction is visible; a session that waits looks after it has added to the count.  Both
 * have a memory barrier in between.  So one of them sees the other (A3).
 */
#include "postgres.h"

#include "lib/ilist.h"

#include "shmem/shmem.h"

#define NBUCKETS 128

/* Latches to set per lock acquisition */
#define WAKE_AT_ONCE 32

#define TRANCHE_NAME "idem_waiters"

struct IdemPlace
{
	uint64 subject;
	dlist_node node; /* in the list of the bucket, or of free places */
	int proc;		 /* number of the process that waits */
	IdemSubjectKind kind;
	uint32 marks_before; /* marks of the bucket when its session began to look */
	bool is_extra;		 /* beyond the part of its session */
	bool is_listed;
	bool is_looking; /* its session looks, or is about to look */
	bool is_blocked; /* of the looker: there may be blocked jobs (J4) */
	int64 told_look; /* when others have told it to look, since it began to look */
	/* the session reads these without the lock */
	volatile bool is_looker;
	volatile IdemWoken woken;
	volatile int64 next_look; /* of the looker, by the steady clock */
};

typedef struct Bucket
{
	pg_atomic_uint32 count; /* places in the list */
	uint32 nmarks;			/* how often a looker was marked as blocked */
	dlist_head places;
} Bucket;

/* Each bucket has a cache line of its own */
typedef union PaddedBucket
{
	Bucket bucket;
	char pad[PG_CACHE_LINE_SIZE];
} PaddedBucket;

typedef struct Waiters
{
	LWLockPadded *locks;
	slock_t free_lock;
	dlist_head free;
	int nextra;				/* that sessions may still take beyond their parts */
	pg_atomic_uint32 nends; /* places that wait for the end of a job or key */
	uint64 secret;			/* key of the hash of subjects */
	PaddedBucket buckets[NBUCKETS];
	IdemPlace places[FLEXIBLE_ARRAY_MEMBER];
} Waiters;

static Waiters *waiters = NULL;

/* Places that this session has of its own part */
static int nmine = 0;

static Size
compute_size(void)
{
	return add_size(offsetof(Waiters, places), mul_size(idem_guc_waits_max, sizeof(IdemPlace)));
}

/* Before shared memory is allocated */
void
idem_waiters_request(void)
{
	RequestAddinShmemSpace(compute_size());
	RequestNamedLWLockTranche(TRANCHE_NAME, NBUCKETS);
}

/* Shared memory has been allocated: attach to it */
void
idem_waiters_attach(void)
{
	bool found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	waiters = ShmemInitStruct("idem waiters", compute_size(), &found);
	if (!found)
	{
		memset(waiters, 0, compute_size());
		if (!pg_strong_random(&waiters->secret, sizeof(waiters->secret)))
			ereport(ERROR,
					errcode(ERRCODE_INTERNAL_ERROR),
					errmsg("could not generate a random number"));
		waiters->locks = GetNamedLWLockTranche(TRANCHE_NAME);
		SpinLockInit(&waiters->free_lock);
		pg_atomic_init_u32(&waiters->nends, 0);
		for (int i = 0; i < NBUCKETS; i++)
		{
			pg_atomic_init_u32(&waiters->buckets[i].bucket.count, 0);
			dlist_init(&waiters->buckets[i].bucket.places);
		}
		waiters->nextra = idem_guc_waits_max - idem_guc_waits_max / 2;
		dlist_init(&waiters->free);
		for (int i = 0; i < idem_guc_waits_max; i++)
			dlist_push_tail(&waiters->free, &waiters->places[i].node);
	}
	LWLockRelease(AddinShmemInitLock);
}

/*
 * A3: subjects are hashes.  If two of them were equal, the waiters of one name would get the
 * wake-ups of the other one, and its looker would not look for it.  So the hash has a secret key:
 * no user can choose a name for that.
 */
static uint64
make_subject(IdemSubjectKind kind, const void *name, int len)
{
	if (waiters == NULL)
		return 0;
	return idem_hash_bytes(waiters->secret, (uint64) MyDatabaseId << 8 | kind, name, len);
}

uint64
idem_waiters_queue(const text *queue)
{
	return make_subject(IDEM_SUBJECT_QUEUE, VARDATA_ANY(queue), VARSIZE_ANY_EXHDR(queue));
}

uint64
idem_waiters_job(int64 job_id)
{
	return make_subject(IDEM_SUBJECT_JOB, &job_id, sizeof(job_id));
}

uint64
idem_waiters_key(int64 key_hash)
{
	return make_subject(IDEM_SUBJECT_KEY, &key_hash, sizeof(key_hash));
}

static Bucket *
lock_bucket(uint64 subject)
{
	LWLockAcquire(&waiters->locks[subject % NBUCKETS].lock, LW_EXCLUSIVE);
	return &waiters->buckets[subject % NBUCKETS].bucket;
}

static void
unlock_bucket(uint64 subject)
{
	LWLockRelease(&waiters->locks[subject % NBUCKETS].lock);
}

static void
set_latch_of(int proc)
{
	SetLatch(&GetPGProcByNumber(proc)->procLatch);
}

static IdemPlace *
get_place_of_node(dlist_node *node)
{
	return dlist_container(IdemPlace, node, node);
}

/* The first place of the subject in the list, which is the looker; or NULL */
static IdemPlace *
find_looker(Bucket *bucket, uint64 subject)
{
	dlist_iter iter;

	dlist_foreach(iter, &bucket->places)
	{
		if (get_place_of_node(iter.cur)->subject == subject)
			return get_place_of_node(iter.cur);
	}
	return NULL;
}

/*
 * Remove the place from the list.  If it is the looker, the next place of the subject becomes it.
 */
static void
remove_place(Bucket *bucket, IdemPlace *place)
{
	IdemPlace *heir;

	dlist_delete(&place->node);
	place->is_listed = false;
	pg_atomic_fetch_sub_u32(&bucket->count, 1);
	heir = place->is_looker ? find_looker(bucket, place->subject) : NULL;
	place->is_looker = false;
	if (heir == NULL)
		return;
	heir->is_looker = true;
	heir->is_blocked = place->is_blocked;
	heir->next_look = heir->told_look = place->next_look;
	set_latch_of(heir->proc);
}

/*
 * A3: begin to wait for the subject.  Returns the place of this session, or NULL if there is none.
 * The caller looks after that.
 */
IdemPlace *
idem_waiters_enlist(IdemSubjectKind kind, uint64 subject)
{
	IdemPlace *place = NULL;
	bool is_extra;

	if (waiters == NULL)
		return NULL;
	/* A7: a place of the part of this session, or an extra one if it has all of these */
	is_extra = nmine >= Max(1, idem_guc_waits_max / 2 / MaxBackends);
	SpinLockAcquire(&waiters->free_lock);
	if (!dlist_is_empty(&waiters->free) && (!is_extra || waiters->nextra > 0))
	{
		place = get_place_of_node(dlist_pop_head_node(&waiters->free));
		waiters->nextra -= is_extra;
	}
	SpinLockRelease(&waiters->free_lock);
	if (place == NULL)
		return NULL;
	nmine += !is_extra;
	place->is_extra = is_extra;
	place->subject = subject;
	place->kind = kind;
	place->proc = MyProcNumber;
	place->next_look = 0;
	place->woken = IDEM_WOKEN_NOT;
	if (kind != IDEM_SUBJECT_QUEUE)
		pg_atomic_fetch_add_u32(&waiters->nends, 1);
	(void) idem_waiters_begin_look(place);
	return place;
}

/*
 * A3: the session begins to look.  If the place was woken, put it back at the end of the list;
 * returns whether it was.  Until idem_waiters_end_look() the session may be about to see a blocked
 * job.
 */
IdemWoken
idem_waiters_begin_look(IdemPlace *mine)
{
	Bucket *bucket = lock_bucket(mine->subject);
	IdemWoken woken = IDEM_WOKEN_NOT;

	if (!mine->is_listed)
	{
		woken = mine->woken;
		mine->woken = IDEM_WOKEN_NOT;
		mine->is_looker = find_looker(bucket, mine->subject) == NULL;
		mine->is_blocked = false;
		mine->is_listed = true;
		dlist_push_tail(&bucket->places, &mine->node);
		pg_atomic_fetch_add_u32(&bucket->count, 1);
	}
	mine->is_looking = true;
	mine->marks_before = bucket->nmarks;
	mine->told_look = PG_INT64_MAX;
	unlock_bucket(mine->subject);
	pg_memory_barrier();
	return woken;
}

/*
 * Give up a place of this session.  If it was woken and the session has not looked since, another
 * one is woken in its stead (A2, A7).
 */
void
idem_waiters_leave(IdemPlace *mine)
{
	uint64 subject = mine->subject;
	Bucket *bucket = lock_bucket(subject);
	IdemWoken woken = mine->woken;

	if (mine->is_listed)
		remove_place(bucket, mine);
	unlock_bucket(subject);
	if (mine->kind != IDEM_SUBJECT_QUEUE)
		pg_atomic_fetch_sub_u32(&waiters->nends, 1);
	nmine -= !mine->is_extra;
	SpinLockAcquire(&waiters->free_lock);
	waiters->nextra += mine->is_extra;
	dlist_push_head(&waiters->free, &mine->node);
	SpinLockRelease(&waiters->free_lock);
	if (woken != IDEM_WOKEN_NOT)
		idem_waiters_wake(subject, 1, woken);
}

/*
 * When must the session look, by the steady clock?  0: now, because this place of it was woken.
 * Otherwise only the looker must.
 */
int64
idem_waiters_next_look(const IdemPlace *mine)
{
	if (mine->woken != IDEM_WOKEN_NOT)
		return 0;
	return mine->is_looker ? mine->next_look : PG_INT64_MAX;
}

/* The looker must look at this time, and there may be blocked jobs; the caller holds the lock */
static void
tell_looker(Bucket *bucket, IdemPlace *looker, int64 next_look, bool blocked)
{
	looker->told_look = Min(looker->told_look, next_look);
	if (looker->next_look > next_look)
	{
		looker->next_look = next_look;
		set_latch_of(looker->proc);
	}
	if (blocked)
	{
		looker->is_blocked = true;
		bucket->nmarks++;
	}
}

/*
 * This session has looked at everything: when something changes without an event, and whether it
 * has seen blocked jobs.  If not, and if nothing has marked the looker since it began to look,
 * there are none.  When it was told meanwhile to look, it may have looked too early for that.  A
 * look that found enough jobs before the end says nothing here; its session leaves.
 */
void
idem_waiters_end_look(IdemPlace *mine, int64 next_look, bool blocked)
{
	Bucket *bucket = lock_bucket(mine->subject);
	IdemPlace *looker = find_looker(bucket, mine->subject);

	mine->is_looking = false;
	if (looker == mine)
		looker->next_look = next_look = Min(next_look, looker->told_look);
	if (looker != NULL)
	{
		tell_looker(bucket, looker, next_look, blocked);
		if (!blocked && bucket->nmarks == mine->marks_before)
			looker->is_blocked = false;
	}
	unlock_bucket(mine->subject);
}

/*
 * A commit made a job due soon: the looker looks at that time, by the steady clock (A4).  blocked:
 * a follow-up job was committed, so the end of the job before it must wake a session that waits
 * (A2).
 */
void
idem_waiters_tell_looker(uint64 subject, int64 next_look, bool blocked)
{
	Bucket *bucket = lock_bucket(subject);
	IdemPlace *looker = find_looker(bucket, subject);

	if (looker != NULL)
		tell_looker(bucket, looker, next_look, blocked);
	unlock_bucket(subject);
}

/*
 * Does a session wait for the subject, or for another one with the same bucket?  The caller
 * has had a memory barrier since its change is visible.
 */
bool
idem_waiters_exist(uint64 subject)
{
	return waiters != NULL &&
		pg_atomic_read_u32(&waiters->buckets[subject % NBUCKETS].bucket.count) > 0;
}

/* Does a session wait for the end of any job or key?  As above. */
bool
idem_waiters_wait_for_end(void)
{
	return waiters != NULL && pg_atomic_read_u32(&waiters->nends) > 0;
}

/* Mark the place as woken, and remove it from the list; returns its process */
static int
mark_woken(Bucket *bucket, IdemPlace *place, IdemWoken why)
{
	remove_place(bucket, place);
	place->woken = why;
	return place->proc;
}

/*
 * A2: wake at most n sessions that wait for the subject, the last to come first; or all of them,
 * the first to come first.  A session that comes later, or comes back, has seen the change: at most
 * as many are woken as are in the list, so this ends.  Never throws.
 */
void
idem_waiters_wake(uint64 subject, int n, IdemWoken why)
{
	bool all = n == IDEM_WAKE_ALL;
	int nwoken;

	do
	{
		int procs[WAKE_AT_ONCE];
		Bucket *bucket;
		dlist_node *end;

		nwoken = 0;
		pg_memory_barrier();
		if (!idem_waiters_exist(subject))
			return;
		bucket = lock_bucket(subject);
		n = Min(n, (int) pg_atomic_read_u32(&bucket->count));
		end = &bucket->places.head;
		for (dlist_node *node = all ? end->next : end->prev, *next;
			 node != end && nwoken < Min(n, WAKE_AT_ONCE); node = next)
		{
			next = all ? node->next : node->prev;
			if (get_place_of_node(node)->subject == subject)
				procs[nwoken++] = mark_woken(bucket, get_place_of_node(node), why);
		}
		unlock_bucket(subject);
		for (int i = 0; i < nwoken; i++)
			set_latch_of(procs[i]);
		n -= nwoken;
	} while (n > 0 && nwoken == WAKE_AT_ONCE);
}

/*
 * A2: a job with a key has ended: if there may be blocked jobs, wake a session.  One that is
 * looking may be about to see such a job, as it was before.  Never throws.
 */
void
idem_waiters_wake_blocked(uint64 subject)
{
	Bucket *bucket = lock_bucket(subject);
	const IdemPlace *looker = find_looker(bucket, subject);
	dlist_iter iter;

	dlist_reverse_foreach(iter, &bucket->places)
	{
		IdemPlace *place = get_place_of_node(iter.cur);

		if (place->subject == subject && (looker->is_blocked || place->is_looking))
		{
			set_latch_of(mark_woken(bucket, place, IDEM_WOKEN_FOR_MORE));
			break;
		}
	}
	unlock_bucket(subject);
}

/* Wake all waiters of the server; never throws */
void
idem_waiters_wake_all(void)
{
	pg_memory_barrier();
	for (int b = 0; b < NBUCKETS; b++)
	{
		Bucket *bucket;

		if (!idem_waiters_exist(b))
			continue;
		bucket = lock_bucket(b);
		while (!dlist_is_empty(&bucket->places))
			set_latch_of(mark_woken(bucket, get_place_of_node(dlist_head_node(&bucket->places)),
									IDEM_WOKEN_FOR_MORE));
		unlock_bucket(b);
	}
}
