/*
 * point.h
 *		Points at which a test stops a backend, to bring the steps of a race into an order.
 *
 * At IDEM_POINT("name") a backend waits as long as another session holds the advisory lock of this
 * name: SELECT pg_advisory_lock(hashtext('name')).  A cancel ends the wait.  Points are compiled in
 * with POINTS=1 only: make test builds such a library for the specs of ISOLATION_POINTS.
 *
 * A point must not be where the backend cannot be interrupted: in a critical section, or while it
 * holds an LWLock or a lock on a buffer.  A spinlock cannot be checked for.
 */
#ifndef IDEM_POINT_H
#define IDEM_POINT_H

#ifdef IDEM_POINTS

#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/lock.h"

static inline void
idem_point_wait(const char *name)
{
	int64 key = (int32) hash_bytes((const unsigned char *) name, strlen(name));
	LOCKTAG tag;

	Assert(InterruptHoldoffCount == 0 && CritSectionCount == 0);
	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (key >> 32), (uint32) key, 1);
	(void) LockAcquire(&tag, ShareLock, false, false);
	LockRelease(&tag, ShareLock, false);
}

#define IDEM_POINT(name) idem_point_wait(name)
#else
#define IDEM_POINT(name) ((void) 0)
#endif

#endif
