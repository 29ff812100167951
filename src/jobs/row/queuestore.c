/*
 * queuestore.c
 *		Settings of queues, and which roles may use a queue.
 *
 * Every function about jobs gets the settings of each queue that it uses from here.
 * Only has_privileges() decides whether a role may use a queue or change its owner.
 *
 * A caller gets the latest committed settings, also if the snapshot of its transaction is
 * older.  A transaction that changes settings locks the table against other such
 * transactions until it ends.  Readers do not wait for it.
 *
 * Settings are cached, declared or not, as long as the backend has received no invalidation of
 * idem.queues since it read them.  A transaction that changes settings invalidates the
 * table.  The server sends the invalidation to the other sessions at commit.  In this session
 * it applies at once, and again if the transaction or the subtransaction rolls back.
 * A session that writes the table without the functions of idem (a restore, an apply worker, an
 * UPDATE by hand) sends no invalidation, so settings also expire after one second.
 *
 * The owner of a queue is part of its settings.  Whether the current user has the privileges
 * of the owner is never cached.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_proc.h"
#include "nodes/value.h"
#include "parser/parse_func.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "jobs/row/job.h"

const char *const idem_dedup_words[] = {"until_executing", "until_executed", "until_expired", NULL};
const char *const idem_on_duplicate_words[] = {"skip", "replace", "debounce", "error", NULL};
const char *const idem_if_running_words[] = {"skip", "rerun", NULL};

static IdemTableCache queues_cache;

const IdemTableDef idem_queuestore_def = {IDEM_DECLARED_TABLE_queues, .cache = &queues_cache};

/* The position of the value in a list of words about duplicates; an error if it is not there */
int
idem_queuestore_word(const text *value, const char *name, const char *const *words)
{
	return idem_args_word(value, name, words, "Pass one of them, or leave it out for the default.");
}

/*
 * The row with the settings of a queue; NULL if none were declared.  An index scan reports the
 * read to SSI, also if there are none.
 */
static TupleTableSlot *
find_queue(IdemTable *table, text *name)
{
	IdemLookup lookup = {
		.index = table->pkey, .value = PointerGetDatum(name), .equal = F_TEXTEQ};
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan = idem_probe_begin(table, &lookup, snapshot);
	TupleTableSlot *row = idem_table_row(table);
	bool exists = index_getnext_slot(scan, ForwardScanDirection, row);

	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	return exists ? row : NULL;
}

static void
get_span(TupleTableSlot *row, AttrNumber attno, int64 *value)
{
	NullableDatum column = idem_row_datum(row, attno);

	if (!column.isnull)
		*value = idem_args_span(column.value, "interval", IDEM_SPAN_NOT_NEGATIVE);
}

static int
get_word(TupleTableSlot *row, AttrNumber attno, const char *name, const char *const *words)
{
	text *word = idem_row_text(row, attno);

	return word == NULL ? 0 : idem_queuestore_word(word, name, words);
}

/* Read the settings of a queue, with the default for each one not declared */
static void
read_queue(text *name, IdemQueue *queue)
{
	IdemTable table;
	TupleTableSlot *row;

	memset(queue, 0, sizeof(*queue));
	queue->name = name;
	queue->debounce_max = USECS_PER_HOUR;
	queue->max_attempts = IDEM_DEFAULT_MAX_ATTEMPTS;
	queue->backoff = 10 * USECS_PER_SEC;
	queue->backoff_max = USECS_PER_DAY;
	queue->keep_dead = 7 * USECS_PER_DAY;

	idem_table_open(&table, &idem_queuestore_def, AccessShareLock);
	row = find_queue(&table, name);
	if (row != NULL)
	{
		queue->owner = idem_row_oid(row, IDEM_QUEUES_OWNER);
		queue->paused = !idem_row_isnull(row, IDEM_QUEUES_PAUSED_AT);
		queue->policy.dedup = get_word(row, IDEM_QUEUES_DEDUP, "dedup", idem_dedup_words);
		queue->policy.on_duplicate =
			get_word(row, IDEM_QUEUES_ON_DUPLICATE, "on_duplicate", idem_on_duplicate_words);
		queue->policy.rerun =
			get_word(row, IDEM_QUEUES_IF_RUNNING, "if_running", idem_if_running_words) != 0;
		get_span(row, IDEM_QUEUES_KEY_TTL, &queue->policy.key_ttl);
		queue->policy.include_scheduled = idem_row_bool(row, IDEM_QUEUES_INCLUDE_SCHEDULED);
		get_span(row, IDEM_QUEUES_DEBOUNCE_MAX, &queue->debounce_max);
		get_span(row, IDEM_QUEUES_LEASE, &queue->lease);
		if (!idem_row_isnull(row, IDEM_QUEUES_MAX_ATTEMPTS))
			queue->max_attempts = idem_row_int32(row, IDEM_QUEUES_MAX_ATTEMPTS);
		get_span(row, IDEM_QUEUES_BACKOFF, &queue->backoff);
		get_span(row, IDEM_QUEUES_BACKOFF_MAX, &queue->backoff_max);
		get_span(row, IDEM_QUEUES_KEEP, &queue->keep);
		get_span(row, IDEM_QUEUES_KEEP_DEAD, &queue->keep_dead);
	}
	idem_table_close(&table);
}

/* How long settings are used, in microseconds */
#define MAX_AGE USECS_PER_SEC

struct IdemQueueSettings
{
	int64 good_until; /* by the steady clock */
	uint64 version;	  /* of idem.queues, before the settings were read */
	IdemQueue queue;  /* without its name */
};

/*
 * Settings of a queue, without a check of privileges.  SERIALIZABLE reads the table, because
 * its conflict checks need to know about the read.  The version is that of idem.queues before the
 * snapshot that shows the settings is taken: if an invalidation arrives after that, they are out
 * of date at once.
 */
void
idem_queuestore_get(text *name, IdemQueue *queue)
{
	IdemQueueRef *ref = idem_queueref_get(name);
	struct IdemQueueSettings *known = ref->settings;
	uint64 version = idem_table_version(&idem_queuestore_def);

	if (known != NULL && known->version == version && !IsolationIsSerializable() &&
		known->good_until > idem_clock_steady())
	{
		*queue = known->queue;
		queue->name = name;
		return;
	}
	read_queue(name, queue);
	queue->ref = ref;
	/* a handle without a name stands for several queues */
	if (ref->name == NULL)
		return;
	if (known == NULL)
		known = ref->settings =
			MemoryContextAlloc(GetMemoryChunkContext(ref), sizeof(struct IdemQueueSettings));
	known->good_until = idem_clock_steady() + MAX_AGE;
	known->version = version;
	known->queue = *queue;
	known->queue.name = NULL;
}

/* May the role use a queue of this owner?  InvalidOid: every role may. */
static bool
has_privileges(Oid role, Oid owner)
{
	return !OidIsValid(owner) || has_privs_of_role(role, owner);
}

/*
 * T9: may the role enqueue, by a call of idem_enqueue(), into a queue of this owner?  A role that
 * was dropped may not, even if PUBLIC may execute the function.
 */
IdemMayEnqueue
idem_queuestore_may_enqueue(Oid role, Oid owner)
{
	static const Oid any_types[] = {InvalidOid};
	Oid function;

	if (!SearchSysCacheExists1(AUTHOID, ObjectIdGetDatum(role)))
		return IDEM_ROLE_IS_GONE;
	function = LookupFuncName(list_make2(makeString("pg_catalog"), makeString("idem_enqueue")), -1,
							  any_types, true);
	if (!OidIsValid(function) ||
		object_aclcheck(ProcedureRelationId, function, role, ACL_EXECUTE) != ACLCHECK_OK)
		return IDEM_NO_EXECUTE;
	return has_privileges(role, owner) ? IDEM_MAY_ENQUEUE : IDEM_QUEUE_OF_ANOTHER;
}

/* Raise an error if the queue has an owner and the current user lacks its privileges */
static void
require_owner(Oid owner, const text *name)
{
	if (!has_privileges(GetUserId(), owner))
		ereport(ERROR,
				errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("queue belongs to another role"),
				name == NULL ?
					errdetail("The current user does not have the privileges of the role that owns the queue.") :
					errdetail("The current user does not have the privileges of the role that owns queue \"%s\".",
							  text_to_cstring(name)),
				errhint("Grant the role to the current user, or use another queue."));
}

/*
 * Settings of a queue, after a check that the current user may use it.  The settings point to
 * name, so it must live as long as they do.
 */
void
idem_queuestore_use(text *name, IdemQueue *queue)
{
	idem_queuestore_get(name, queue);
	require_owner(queue->owner, name);
}

/*
 * Settings of the queue that the row names in this column, after a check that the
 * current user may use it.  If *queue has them already, nothing is read.  A caller without
 * settings sets queue->name to NULL.
 */
void
idem_queuestore_use_of_row(IdemTable *table, TupleTableSlot *row, AttrNumber attno,
						   IdemQueue *queue)
{
	MemoryContext oldcontext;

	if (queue->name != NULL && idem_row_varlena_equals(row, attno, queue->name))
		return;
	oldcontext = MemoryContextSwitchTo(table->context);
	idem_queuestore_get(idem_row_text(row, attno), queue);
	/* a caller that guesses the number of a job does not learn the name of its queue */
	require_owner(queue->owner, NULL);
	MemoryContextSwitchTo(oldcontext);
}

/*
 * Open the table to change settings.  The lock lets one transaction at a time do so, so the
 * caller finds no uncommitted row of another transaction.
 */
void
idem_queuestore_open(IdemTable *queues)
{
	idem_table_open(queues, &idem_queuestore_def, ShareRowExclusiveLock);
}

/*
 * Write the row; old is the one to update, NULL: there is none yet.  The invalidation
 * comes first, so that it applies in this session with the end of the write.
 */
static void
store_settings(IdemTable *table, TupleTableSlot *old, TupleTableSlot *new)
{
	CacheInvalidateRelcache(table->heap);
	if (old != NULL ? idem_table_update(table, old, new, NULL) != TM_Ok :
					  !idem_table_insert(table, new))
		elog(ERROR, "could not store the settings of a queue");
}

/* The row to write: a copy of the old one, or a new one */
static TupleTableSlot *
begin_change(IdemTable *table, text *name, TupleTableSlot *old)
{
	TupleTableSlot *slot =
		old != NULL ? idem_table_copy_row(table, old) : idem_table_new_row(table);

	idem_row_set(slot, IDEM_QUEUES_QUEUE, PointerGetDatum(name));
	return slot;
}

/*
 * Change the settings that are not null in columns, an array indexed by column number.
 * InvalidOid as owner clears it.  Only a caller that may use an owned queue can change or
 * clear its owner, because other roles could then read its payloads.  Returns true if the queue
 * now has another owner than before, and not none.
 */
bool
idem_queuestore_set(IdemTable *queues, text *name, const NullableDatum *columns)
{
	TupleTableSlot *old = find_queue(queues, name);
	Oid owner = old != NULL ? idem_row_oid(old, IDEM_QUEUES_OWNER) : InvalidOid;
	TupleTableSlot *slot = begin_change(queues, name, old);
	Oid new_owner = columns[IDEM_QUEUES_OWNER].isnull ?
		owner :
		DatumGetObjectId(columns[IDEM_QUEUES_OWNER].value);

	if (new_owner != owner)
	{
		require_owner(owner, name);
		idem_row_set(slot, IDEM_QUEUES_OWNED_AT, TimestampTzGetDatum(idem_clock_now()));
	}
	for (AttrNumber attno = IDEM_QUEUES_OWNER; attno <= IDEM_QUEUES_NATTS; attno++)
	{
		if (!columns[attno].isnull)
			idem_row_set(slot, attno, columns[attno].value);
	}
	if (!OidIsValid(new_owner))
	{
		idem_row_clear(slot, IDEM_QUEUES_OWNER);
		idem_row_clear(slot, IDEM_QUEUES_OWNED_AT);
	}
	store_settings(queues, old, slot);
	return new_owner != owner && OidIsValid(new_owner);
}

/* The number of live jobs of the queue that are committed or of this transaction, at most max */
int
idem_queuestore_count_jobs(text *queue, int max)
{
	IdemTable jobs;
	IdemLookup lookup = {.value = PointerGetDatum(queue), .equal = F_TEXTEQ};
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan;
	int n = 0;

	idem_jobtable_open(&jobs, AccessShareLock);
	lookup.index = idem_jobtable_index(&jobs, IDEM_INDEX_FETCH);
	scan = idem_probe_begin(&jobs, &lookup, snapshot);
	while (n < max && index_getnext_slot(scan, ForwardScanDirection, idem_table_row(&jobs)))
	{
		CHECK_FOR_INTERRUPTS();
		n++;
	}
	index_endscan(scan);
	idem_table_close(&jobs);
	UnregisterSnapshot(snapshot);
	return n;
}

/* Does the queue have a live job?  Jobs that an open transaction enqueues or removes count. */
static bool
has_jobs(text *queue)
{
	IdemTable jobs;
	IdemLookup lookup = {.value = PointerGetDatum(queue), .equal = F_TEXTEQ};
	IdemProbeResult probe;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	lookup.index = idem_jobtable_index(&jobs, IDEM_INDEX_FETCH);
	idem_probe_existing(&jobs, &lookup, &probe);
	idem_table_close(&jobs);
	return probe.found != IDEM_FOUND_NONE;
}

/* Does the history have a job of the queue?  This scans the whole history. */
static bool
has_history(text *queue)
{
	IdemTable log;
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan;
	TupleTableSlot *row;
	bool found = false;

	idem_jobtable_open_log(&log, AccessShareLock);
	scan = index_beginscan(log.heap, log.pkey, snapshot, NULL, 0, 0, SO_NONE);
	index_rescan(scan, NULL, 0, NULL, 0);
	row = idem_table_row(&log);
	while (!found && index_getnext_slot(scan, ForwardScanDirection, row))
	{
		CHECK_FOR_INTERRUPTS();
		found = idem_row_varlena_equals(row, IDEM_JOB_LOG_QUEUE, queue);
	}
	index_endscan(scan);
	idem_table_close(&log);
	UnregisterSnapshot(snapshot);
	return found;
}

/*
 * Remove the declared settings; returns false if there are none.  Refuse to drop an owned
 * queue: its history would become readable to all.
 */
bool
idem_queuestore_drop(IdemTable *queues, text *name)
{
	TupleTableSlot *row = find_queue(queues, name);

	if (has_jobs(name))
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_IN_USE),
				errmsg("queue has jobs"),
				errdetail("Its jobs, also those of open transactions, would fall back to the defaults."),
				errhint("Let the jobs end or cancel them, or change the settings with idem_queue_set()."));
	if (row != NULL && !idem_row_isnull(row, IDEM_QUEUES_OWNER))
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_IN_USE),
				errmsg("queue belongs to a role"),
				errdetail("Without its settings it would be open to every role that may call the functions."),
				errhint("If that is intended, remove the owner first with idem_queue_set(queue, owner => '-')."));
	if (row != NULL)
	{
		CacheInvalidateRelcache(queues->heap);
		if (idem_table_delete(queues, row, true) != TM_Ok)
			elog(ERROR, "could not remove the settings of a queue");
	}
	return row != NULL;
}

/* Pause or resume the queue; returns false if that changes nothing.  A2: resume wakes waiters. */
bool
idem_queuestore_pause(IdemTable *queues, text *name, bool pause)
{
	TupleTableSlot *old = find_queue(queues, name);
	bool paused = old != NULL && !idem_row_isnull(old, IDEM_QUEUES_PAUSED_AT);

	if (pause && old == NULL && !has_jobs(name) && !has_history(name))
		ereport(NOTICE,
				errmsg("the queue was never used or declared"),
				errdetail("It has no settings, no jobs and no history; it is now paused."),
				errhint("Check the name: idem.queue_status lists the queues. idem_resume() ends the pause."));
	if (paused != pause)
	{
		TupleTableSlot *slot = begin_change(queues, name, old);

		if (pause)
			idem_row_set(slot, IDEM_QUEUES_PAUSED_AT, TimestampTzGetDatum(idem_clock_now()));
		else
		{
			idem_row_clear(slot, IDEM_QUEUES_PAUSED_AT);
			idem_touched_held(idem_queueref_get(name), true);
		}
		store_settings(queues, old, slot);
	}
	return paused != pause;
}

/* When the queue was paused; 0: it is not paused (H3) */
TimestampTz
idem_queuestore_paused_at(text *name)
{
	IdemTable table;
	TupleTableSlot *row;
	TimestampTz paused_at = 0;

	idem_table_open(&table, &idem_queuestore_def, AccessShareLock);
	row = find_queue(&table, name);
	if (row != NULL)
		paused_at = idem_row_timestamp(row, IDEM_QUEUES_PAUSED_AT);
	idem_table_close(&table);
	return paused_at;
}
