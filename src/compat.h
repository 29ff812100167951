/*
 * compat.h
 *		Server API differences from PostgreSQL 15 to 19.
 *
 * This is the only file that tests PG_VERSION_NUM.  Callers are written for the newest API, and
 * this file supplies what an older server lacks.  When the oldest server is given up, its block
 * goes.
 */
#ifndef IDEM_COMPAT_H
#define IDEM_COMPAT_H

#include "access/amapi.h"
#include "access/genam.h"
#include "access/nbtree.h"
#include "access/tableam.h"
#include "catalog/pg_database.h"
#include "common/jsonapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/shmem.h"
#include "utils/acl.h"
#include "utils/hsearch.h"
#include "utils/rangetypes.h"
#include "utils/rel.h"
#include "utils/relcache.h"

#if PG_VERSION_NUM < 150001
#error "idem needs PostgreSQL 15.1 or newer"
#endif

#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif
#if PG_VERSION_NUM < 170000
#include "storage/sinvaladt.h"
#endif
#include "utils/wait_event.h"
#if PG_VERSION_NUM >= 180000
#include "storage/waiteventset.h"
#endif
#if PG_VERSION_NUM >= 190000
#include "utils/tuplestore.h"
#endif

/*
 * What servers lack.  Where an argument is new, a macro of the same name leaves it out.
 */
#if PG_VERSION_NUM < 160000
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"

/* our Makefile compiles with -fvisibility=hidden on every server */
#undef PGDLLEXPORT
#define PGDLLEXPORT __attribute__((visibility("default")))

/* one function for the privileges of any kind of object */
static inline AclResult
object_aclcheck(Oid classid, Oid objectid, Oid roleid, AclMode mode)
{
	if (classid == NamespaceRelationId)
		return pg_namespace_aclcheck(objectid, roleid, mode);
	Assert(classid == ProcedureRelationId);
	return pg_proc_aclcheck(objectid, roleid, mode);
}

/* a member of a role may lack the privilege to SET ROLE to it */
#define member_can_set_role(member, role)				 is_member_of_role(member, role)
#define pgstat_get_local_beentry_by_index(i)			 pgstat_fetch_stat_local_beentry(i)
#define make_range(type, lower, upper, empty, escontext) make_range(type, lower, upper, empty)
/* an update says which indexes need an entry; false, as TU_None: none, it is a HOT update */
#define TU_UpdateIndexes bool
#endif

#if PG_VERSION_NUM < 170000
#define INTERVAL_NOT_FINITE(i)					false
#define MyProcNumber							(MyProc->pgprocno)
#define WaitEventExtensionNew(name)				PG_WAIT_EXTENSION
#define LockHeldByMe(tag, lockmode, orstronger) LockHeldByMe(tag, lockmode)
#define makeJsonLexContextCstringLen(lex, json, len, encoding, need_escapes) \
	makeJsonLexContextCstringLen(json, len, encoding, need_escapes)
/* the access method keeps no state between inserts */
#define index_insert_cleanup(index, info) ((void) 0)
#endif

#if PG_VERSION_NUM < 180000
#define PG_MODULE_MAGIC_EXT(...) PG_MODULE_MAGIC
/* stands first in a declaration */
#define pg_noreturn									   pg_attribute_noreturn()
#define RelationGetPrimaryKeyIndex(rel, deferrable_ok) RelationGetPrimaryKeyIndex(rel)
#define ConditionalXactLockTableWait(xid, log_failure) ConditionalXactLockTableWait(xid)
#define index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys, flags) \
	index_beginscan(heap, index, snapshot, nkeys, norderbys)

/* a descriptor with the first columns of another one */
static inline TupleDesc
CreateTupleDescTruncatedCopy(TupleDesc tupdesc, int natts)
{
	TupleDesc desc = CreateTemplateTupleDesc(natts);

	for (AttrNumber i = 1; i <= natts; i++)
		TupleDescCopyEntry(desc, i, tupdesc, i);
	return desc;
}
#elif PG_VERSION_NUM < 190000
#define index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys, flags) \
	index_beginscan(heap, index, snapshot, instrument, nkeys, norderbys)
#endif

#if PG_VERSION_NUM < 190000
/* a comment does not tell the compiler that a case falls through */
#if __has_attribute(fallthrough)
#define pg_fallthrough __attribute__((fallthrough))
#else
#define pg_fallthrough
#endif

/* a worker that commands such as DROP DATABASE may terminate */
#define BGWORKER_INTERRUPTIBLE 0
/* the number of a catalog cache has a type of its own */
#define SysCacheIdentifier int
#define table_beginscan(rel, snapshot, nkeys, keys, flags) \
	table_beginscan(rel, snapshot, nkeys, keys)
#define table_beginscan_tidrange(rel, snapshot, mintid, maxtid, flags) \
	table_beginscan_tidrange(rel, snapshot, mintid, maxtid)
#define table_index_fetch_begin(rel, flags) table_index_fetch_begin(rel)
#define table_tuple_update(rel, tid, slot, cid, options, snapshot, crosscheck, wait, tmfd, \
						   lockmode, which)                                                \
	table_tuple_update(rel, tid, slot, cid, snapshot, crosscheck, wait, tmfd, lockmode, which)
/* changingPart is one of the options */
#define table_tuple_delete(rel, tid, cid, options, snapshot, crosscheck, wait, tmfd) \
	table_tuple_delete(rel, tid, cid, snapshot, crosscheck, wait, tmfd, false)
/* a process that sets hints has the page for itself meanwhile; before, they may be lost */
#define BufferBeginSetHintBits(buffer)					 true
#define BufferFinishSetHintBits(buffer, dirty, standard) MarkBufferDirtyHint(buffer, standard)
#endif

/* Versions from minor releases */
#ifndef ERRCODE_TRANSACTION_TIMEOUT /* 17 */
#define ERRCODE_TRANSACTION_TIMEOUT MAKE_SQLSTATE('2', '5', 'P', '0', '4')
#endif
#ifndef XACT_FLAGS_PIPELINING /* 15.10 */
#define XACT_FLAGS_PIPELINING 0
#endif
#ifndef DATCONNLIMIT_INVALID_DB /* 15.4: a database whose drop has begun */
#define DATCONNLIMIT_INVALID_DB (-2)
#endif

/* Find the leaf.  16: the table; 17: no snapshot; 19: the stack is not returned unless asked for */
#if PG_VERSION_NUM >= 190000
#define idem_compat_bt_search(index, heap, key, leaf) \
	((void) _bt_search(index, heap, key, leaf, BT_READ, false))
#elif PG_VERSION_NUM >= 170000
#define idem_compat_bt_search(index, heap, key, leaf) \
	_bt_freestack(_bt_search(index, heap, key, leaf, BT_READ))
#elif PG_VERSION_NUM >= 160000
#define idem_compat_bt_search(index, heap, key, leaf) \
	_bt_freestack(_bt_search(index, heap, key, leaf, BT_READ, NULL))
#else
#define idem_compat_bt_search(index, heap, key, leaf) \
	_bt_freestack(_bt_search(index, key, leaf, BT_READ, NULL))
#endif

/* Does the index need an entry for the new version of a row? */
static inline bool
idem_compat_index_needs_entry(Relation index, TU_UpdateIndexes which)
{
#if PG_VERSION_NUM >= 160000
	return which == TU_All || (which == TU_Summarizing && index->rd_indam->amsummarizing);
#else
	return which;
#endif
}

/* The process that runs a transaction; 0: the transaction is prepared, or has ended */
static inline int
idem_compat_vxid_pid(VirtualTransactionId vxid)
{
#if PG_VERSION_NUM >= 170000
	PGPROC *proc = ProcNumberGetProc(vxid.procNumber);

	return proc != NULL && proc->vxid.lxid == vxid.localTransactionId ? proc->pid : 0;
#else
	PGPROC *proc = BackendIdGetProc(vxid.backendId);

	return proc != NULL && proc->lxid == vxid.localTransactionId ? proc->pid : 0;
#endif
}

/* The virtual transaction that holds a lock, or waits for it */
static inline VirtualTransactionId
idem_compat_lock_vxid(const LockInstanceData *lock)
{
#if PG_VERSION_NUM >= 170000
	return lock->vxid;
#else
	return (VirtualTransactionId){.backendId = lock->backend, .localTransactionId = lock->lxid};
#endif
}

/*
 * Wait for the latch of this process, or until its client has closed the connection; true if it
 * has.  libpq/libpq.h, which declares FeBeWaitSet, needs headers of GSSAPI on some systems.
 */
static inline bool
idem_compat_wait_for_client_or_latch(long timeout, uint32 wait_event)
{
	extern PGDLLIMPORT WaitEventSet *FeBeWaitSet;
	WaitEvent event;

	if (MyProcPort == NULL || FeBeWaitSet == NULL || !WaitEventSetCanReportClosed())
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, timeout,
						 wait_event);
		return false;
	}
	/* the socket is at position 0, as in libpq/libpq.h */
	ModifyWaitEvent(FeBeWaitSet, 0, WL_SOCKET_CLOSED, NULL);
	if (WaitEventSetWait(FeBeWaitSet, timeout, &event, 1, wait_event) == 0)
		return false;
	if (event.events & WL_POSTMASTER_DEATH)
		proc_exit(1);
	return (event.events & WL_SOCKET_CLOSED) != 0;
}

#endif /* IDEM_COMPAT_H */
