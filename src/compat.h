/*
 * compat.h
 *		Server API differences from PostgreSQL 15 to 19.
 *
 * This is the only file that tests PG_VERSION_NUM.  Callers are written for the
 * newest API.  This file supplies what an older server lacks.
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

/* 17: the caller can pass the context of the JSON parser */
static inline bool
idem_compat_is_json(char *json)
{
	JsonLexContext *lex;

#if PG_VERSION_NUM >= 170000
	lex = makeJsonLexContextCstringLen(NULL, json, strlen(json), GetDatabaseEncoding(), true);
#else
	lex = makeJsonLexContextCstringLen(json, strlen(json), GetDatabaseEncoding(), true);
#endif
	return pg_parse_json(lex, &nullSemAction) == JSON_SUCCESS;
}

/* 18: name and version in the magic block */
#if PG_VERSION_NUM < 180000
#define PG_MODULE_MAGIC_EXT(...) PG_MODULE_MAGIC
#endif

/* 16: modules are compiled with -fvisibility=hidden, which our Makefile adds for all */
#if PG_VERSION_NUM < 160000
#undef PGDLLEXPORT
#define PGDLLEXPORT __attribute__((visibility("default")))
#endif

/* 18: pg_noreturn, which stands first in a declaration */
#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#endif

/* 19: a comment does not tell the compiler that a case falls through */
#if PG_VERSION_NUM < 190000
#if __has_attribute(fallthrough)
#define pg_fallthrough __attribute__((fallthrough))
#else
#define pg_fallthrough
#endif
#endif

/* 19: the number of a catalog cache has a type of its own */
#if PG_VERSION_NUM < 190000
typedef int SysCacheIdentifier;
#endif

/* 17: interval has infinities */
#if PG_VERSION_NUM < 170000
#define INTERVAL_NOT_FINITE(i) false
#endif

/* 16: one function for the privileges of any kind of object */
#if PG_VERSION_NUM < 160000
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
static inline AclResult
object_aclcheck(Oid classid, Oid objectid, Oid roleid, AclMode mode)
{
	if (classid == NamespaceRelationId)
		return pg_namespace_aclcheck(objectid, roleid, mode);
	Assert(classid == ProcedureRelationId);
	return pg_proc_aclcheck(objectid, roleid, mode);
}
#endif

/* 16: a member of a role may lack the privilege to SET ROLE to it */
#if PG_VERSION_NUM < 160000
#define member_can_set_role(member, role) is_member_of_role(member, role)
#endif

/* 18: a descriptor with the first columns of another one */
#if PG_VERSION_NUM < 180000
static inline TupleDesc
CreateTupleDescTruncatedCopy(TupleDesc tupdesc, int natts)
{
	TupleDesc desc = CreateTemplateTupleDesc(natts);

	for (AttrNumber i = 1; i <= natts; i++)
		TupleDescCopyEntry(desc, i, tupdesc, i);
	return desc;
}
#endif

/* 18: an argument says whether a deferrable primary key counts */
static inline Oid
idem_compat_primary_key(Relation rel)
{
#if PG_VERSION_NUM >= 180000
	return RelationGetPrimaryKeyIndex(rel, false);
#else
	return RelationGetPrimaryKeyIndex(rel);
#endif
}

/* 16: an argument for errors that are not raised */
static inline RangeType *
idem_compat_make_range(TypeCacheEntry *type, RangeBound *lower, RangeBound *upper)
{
#if PG_VERSION_NUM >= 160000
	return make_range(type, lower, upper, false, NULL);
#else
	return make_range(type, lower, upper, false);
#endif
}

/* 18: instrumentation; 19: flags */
static inline IndexScanDesc
idem_compat_index_beginscan(Relation heap, Relation index, Snapshot snapshot, int nkeys)
{
#if PG_VERSION_NUM >= 190000
	return index_beginscan(heap, index, snapshot, NULL, nkeys, 0, SO_NONE);
#elif PG_VERSION_NUM >= 180000
	return index_beginscan(heap, index, snapshot, NULL, nkeys, 0);
#else
	return index_beginscan(heap, index, snapshot, nkeys, 0);
#endif
}

/* 16: the table; 17: no snapshot; 19: an argument asks for the stack */
static inline void
idem_compat_bt_search(Relation index, Relation heap, BTScanInsert key, Buffer *leaf)
{
#if PG_VERSION_NUM >= 190000
	(void) _bt_search(index, heap, key, leaf, BT_READ, false);
#elif PG_VERSION_NUM >= 170000
	_bt_freestack(_bt_search(index, heap, key, leaf, BT_READ));
#elif PG_VERSION_NUM >= 160000
	_bt_freestack(_bt_search(index, heap, key, leaf, BT_READ, NULL));
#else
	(void) heap;
	_bt_freestack(_bt_search(index, key, leaf, BT_READ, NULL));
#endif
}

/* 19: a process that sets hints has the page for itself meanwhile; before, they may be lost */
static inline bool
idem_compat_begin_hint(Buffer buffer)
{
#if PG_VERSION_NUM >= 190000
	return BufferBeginSetHintBits(buffer);
#else
	return BufferIsValid(buffer);
#endif
}

static inline void
idem_compat_finish_hint(Buffer buffer)
{
#if PG_VERSION_NUM >= 190000
	BufferFinishSetHintBits(buffer, true, true);
#else
	MarkBufferDirtyHint(buffer, true);
#endif
}

/* 19: flags */
static inline struct IndexFetchTableData *
idem_compat_index_fetch_begin(Relation heap)
{
#if PG_VERSION_NUM >= 190000
	return table_index_fetch_begin(heap, SO_NONE);
#else
	return table_index_fetch_begin(heap);
#endif
}

/* 17: the access method keeps state between inserts, which the caller releases */
static inline void
idem_compat_index_insert_cleanup(Relation index, struct IndexInfo *info)
{
#if PG_VERSION_NUM >= 170000
	index_insert_cleanup(index, info);
#else
	(void) index;
	(void) info;
#endif
}

/*
 * 16: an update says which indexes need an entry; before 16 all or none do.  In
 * both cases zero means a HOT update: no index needs an entry.
 */
#if PG_VERSION_NUM >= 160000
typedef TU_UpdateIndexes IdemUpdateIndexes;

static inline bool
idem_compat_index_needs_entry(Relation index, IdemUpdateIndexes which)
{
	return which == TU_All ||
		(which == TU_Summarizing && index->rd_indam->amsummarizing);
}
#else
typedef bool IdemUpdateIndexes;

static inline bool
idem_compat_index_needs_entry(Relation index, IdemUpdateIndexes which)
{
	(void) index;
	return which;
}
#endif

/* 19: options after the command id */
static inline TM_Result
idem_compat_tuple_update(Relation rel, ItemPointer tid, TupleTableSlot *slot, CommandId cid,
						 Snapshot snapshot, TM_FailureData *tmfd,
						 LockTupleMode *lockmode, IdemUpdateIndexes *which)
{
#if PG_VERSION_NUM >= 190000
	return table_tuple_update(rel, tid, slot, cid, 0, snapshot, InvalidSnapshot,
							  true, tmfd, lockmode, which);
#else
	return table_tuple_update(rel, tid, slot, cid, snapshot, InvalidSnapshot,
							  true, tmfd, lockmode, which);
#endif
}

/* 19: options after the command id, changingPart is one of them */
static inline TM_Result
idem_compat_tuple_delete(Relation rel, ItemPointer tid, CommandId cid,
						 Snapshot snapshot, bool wait, TM_FailureData *tmfd)
{
#if PG_VERSION_NUM >= 190000
	return table_tuple_delete(rel, tid, cid, 0, snapshot, InvalidSnapshot, wait, tmfd);
#else
	return table_tuple_delete(rel, tid, cid, snapshot, InvalidSnapshot, wait, tmfd, false);
#endif
}

/* 19: flags */
static inline TableScanDesc
idem_compat_beginscan(Relation rel, Snapshot snapshot)
{
#if PG_VERSION_NUM >= 190000
	return table_beginscan(rel, snapshot, 0, NULL, SO_NONE);
#else
	return table_beginscan(rel, snapshot, 0, NULL);
#endif
}

/* 19: flags */
static inline TableScanDesc
idem_compat_beginscan_tidrange(Relation rel, Snapshot snapshot, ItemPointer mintid,
							   ItemPointer maxtid)
{
#if PG_VERSION_NUM >= 190000
	return table_beginscan_tidrange(rel, snapshot, mintid, maxtid, SO_NONE);
#else
	return table_beginscan_tidrange(rel, snapshot, mintid, maxtid);
#endif
}

/* 17: MyProcNumber replaces MyBackendId */
static inline uint32
idem_compat_proc_number(void)
{
#if PG_VERSION_NUM >= 170000
	return (uint32) MyProcNumber;
#else
	return (uint32) MyBackendId;
#endif
}

/* 17: MyProcNumber replaces the number in MyProc; the index of the process in ProcGlobal */
static inline int
idem_compat_my_proc_number(void)
{
#if PG_VERSION_NUM >= 170000
	return MyProcNumber;
#else
	return MyProc->pgprocno;
#endif
}

/*
 * The process that runs a transaction; 0: the transaction is prepared, or has ended.  17: the
 * number of a process replaces that of a backend.
 */
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

/* 17: one field for the two */
static inline VirtualTransactionId
idem_compat_lock_vxid(const LockInstanceData *lock)
{
#if PG_VERSION_NUM >= 170000
	return lock->vxid;
#else
	return (VirtualTransactionId){.backendId = lock->backend, .localTransactionId = lock->lxid};
#endif
}

/* 17: stronger locks can count, too */
static inline bool
idem_compat_holds_lock(const LOCKTAG *tag, LOCKMODE lockmode)
{
#if PG_VERSION_NUM >= 170000
	return LockHeldByMe(tag, lockmode, false);
#else
	return LockHeldByMe(tag, lockmode);
#endif
}

/* 16: the function was renamed */
#if PG_VERSION_NUM < 160000
#define pgstat_get_local_beentry_by_index(i) pgstat_fetch_stat_local_beentry(i)
#endif

/* 19: a worker that commands such as DROP DATABASE may terminate */
#if PG_VERSION_NUM < 190000
#define BGWORKER_INTERRUPTIBLE 0
#endif

/* 15.4: a database that is being dropped, or whose drop was interrupted */
#ifndef ERRCODE_TRANSACTION_TIMEOUT /* 17 */
#define ERRCODE_TRANSACTION_TIMEOUT MAKE_SQLSTATE('2', '5', 'P', '0', '4')
#endif

#ifndef XACT_FLAGS_PIPELINING /* 15.10 */
#define XACT_FLAGS_PIPELINING 0
#endif

#ifndef DATCONNLIMIT_INVALID_DB
#define DATCONNLIMIT_INVALID_DB (-2)
#endif

/* 18: an argument asks for a log message if the lock is not available */
static inline bool
idem_compat_xact_has_ended(TransactionId xid)
{
#if PG_VERSION_NUM >= 180000
	return ConditionalXactLockTableWait(xid, false);
#else
	return ConditionalXactLockTableWait(xid);
#endif
}

/* 17: extensions can name their wait events */
static inline uint32
idem_compat_wait_event(const char *name)
{
#if PG_VERSION_NUM >= 170000
	return WaitEventExtensionNew(name);
#else
	(void) name;
	return PG_WAIT_EXTENSION;
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
