/*
 * queuestore.c
 *		Settings of queues, and who may use them.
 *
 * Every function about jobs comes by here, for each queue that it touches: who
 * may use a queue, or change its owner, is decided in require_owner() and nowhere else.
 * Settings are read as they are committed now, whatever the snapshot of the
 * transaction shows.  Who changes them locks the table against others who do,
 * until the end of the transaction; readers do not wait.
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "jobs/jobs.h"

const char *const idem_dedup_words[] = {"until_executing", "until_executed", "until_expired", NULL};
const char *const idem_on_duplicate_words[] = {"skip", "replace", "debounce", "error", NULL};
const char *const idem_if_running_words[] = {"skip", "rerun", NULL};

static const Oid queues_types[IDEM_QUEUES_NATTS] = {
	TEXTOID, REGROLEOID, TIMESTAMPTZOID, TEXTOID, TEXTOID,
	TEXTOID, INTERVALOID, BOOLOID, INTERVALOID, INTERVALOID,
	INT4OID, INTERVALOID, INTERVALOID, INTERVALOID, INTERVALOID};

static IdemTableCache queues_cache;

static const IdemTableDef queues_def = {
	.name = "queues",
	.types = queues_types,
	.natts = IDEM_QUEUES_NATTS,
	.short_natts = IDEM_QUEUES_NATTS,
	.nullable = IDEM_COLUMNS_FROM(IDEM_QUEUES_OWNER),
	.pkey = {IDEM_QUEUES_QUEUE},
	.npkey = 1,
	.pkey_hint = "Run ALTER TABLE idem.queues ADD CONSTRAINT queues_pkey PRIMARY KEY (queue).",
	.cache = &queues_cache};

/* Which of the words about duplicates is it? */
int
idem_queuestore_word(const text *value, const char *name, const char *const *words)
{
	return idem_value_word(value, name, words, "Pass one of them, or leave it out for the default.");
}

/* Find what was declared for a queue */
static bool
find_queue(IdemTable *table, text *name)
{
	IdemLookup lookup = {.index = table->pkey, .nkeys = 1};

	ScanKeyInit(&lookup.keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(name));
	return idem_probe_latest(table, &lookup, table->found);
}

static void
get_span(IdemTable *table, AttrNumber attno, int64 *value)
{
	NullableDatum column = idem_row_datum(table, attno);

	if (!column.isnull)
		*value = idem_value_span(column.value, "interval", IDEM_SPAN_ANY);
}

static int
get_word(IdemTable *table, AttrNumber attno, const char *name, const char *const *words)
{
	text *word = idem_row_text(table, attno);

	return word == NULL ? 0 : idem_queuestore_word(word, name, words);
}

static void
read_settings(IdemTable *table, IdemQueue *queue)
{
	queue->owner = idem_row_oid(table, IDEM_QUEUES_OWNER);
	queue->paused = !idem_row_isnull(table, IDEM_QUEUES_PAUSED_AT);
	queue->policy.dedup = get_word(table, IDEM_QUEUES_DEDUP, "dedup", idem_dedup_words);
	queue->policy.on_duplicate =
		get_word(table, IDEM_QUEUES_ON_DUPLICATE, "on_duplicate", idem_on_duplicate_words);
	queue->policy.rerun = get_word(table, IDEM_QUEUES_IF_RUNNING, "if_running", idem_if_running_words) != 0;
	get_span(table, IDEM_QUEUES_KEY_TTL, &queue->policy.key_ttl);
	queue->policy.include_scheduled = idem_row_bool(table, IDEM_QUEUES_INCLUDE_SCHEDULED);
	get_span(table, IDEM_QUEUES_DEBOUNCE_MAX, &queue->debounce_max);
	get_span(table, IDEM_QUEUES_LEASE, &queue->lease);
	if (!idem_row_isnull(table, IDEM_QUEUES_MAX_ATTEMPTS))
		queue->max_attempts = idem_row_int32(table, IDEM_QUEUES_MAX_ATTEMPTS);
	get_span(table, IDEM_QUEUES_BACKOFF, &queue->backoff);
	get_span(table, IDEM_QUEUES_BACKOFF_MAX, &queue->backoff_max);
	get_span(table, IDEM_QUEUES_KEEP, &queue->keep);
	get_span(table, IDEM_QUEUES_KEEP_DEAD, &queue->keep_dead);
}

/* Settings of a queue, whoever asks */
void
idem_queuestore_get(text *name, IdemQueue *queue)
{
	IdemTable table;

	memset(queue, 0, sizeof(*queue));
	queue->name = name;
	queue->debounce_max = USECS_PER_HOUR;
	queue->max_attempts = IDEM_DEFAULT_MAX_ATTEMPTS;
	queue->backoff = 10 * USECS_PER_SEC;
	queue->backoff_max = USECS_PER_DAY;
	queue->keep_dead = 7 * USECS_PER_DAY;

	idem_table_open(&table, &queues_def, AccessShareLock);
	if (find_queue(&table, name))
		read_settings(&table, queue);
	idem_table_close(&table);
}

/* Refuse a caller without the privileges of the owner, if there is one */
static void
require_owner(Oid owner)
{
	if (OidIsValid(owner) && !has_privs_of_role(GetUserId(), owner))
		ereport(ERROR,
				errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				errmsg("queue belongs to another role"),
				errdetail("The current user does not have the privileges of the role that owns the queue."),
				errhint("Grant the role to the current user, or use another queue."));
}

/* Settings of a queue, for a caller who may use it; name must stay as long as they do */
void
idem_queuestore_use(text *name, IdemQueue *queue)
{
	idem_queuestore_get(name, queue);
	require_owner(queue->owner);
}

/* Settings of the queue that the row names, if they are not at hand already */
void
idem_queuestore_use_of_row(IdemTable *table, AttrNumber attno, IdemQueue *queue)
{
	MemoryContext oldcontext;

	if (queue->name != NULL && idem_row_varlena_equals(table, attno, queue->name))
		return;
	oldcontext = MemoryContextSwitchTo(table->context);
	idem_queuestore_use(idem_row_text(table, attno), queue);
	MemoryContextSwitchTo(oldcontext);
}

/*
 * Open the table for a change.  One transaction at a time changes it, so no caller
 * meets a row that is not committed.
 */
void
idem_queuestore_open(IdemTable *queues)
{
	idem_table_open(queues, &queues_def, ShareRowExclusiveLock);
}

/* Write the row: in the place of the one found, or as a new one */
static void
store_settings(IdemTable *table, bool exists)
{
	if (exists ? idem_write_update(table) != TM_Ok : !idem_write_insert(table))
		elog(ERROR, "could not store the settings of a queue");
}

static TupleTableSlot *
begin_change(IdemTable *table, text *name, bool exists)
{
	TupleTableSlot *slot =
		exists ? idem_write_copy_row(table, true) : idem_write_new_row(table, true);

	idem_row_set(slot, IDEM_QUEUES_QUEUE, PointerGetDatum(name));
	return slot;
}

/*
 * Change the columns that are given (by column number).  InvalidOid as owner
 * clears it.  An owned queue gets another owner, or none, only from a caller
 * that may use it: its payloads would be open to others.
 */
void
idem_queuestore_set(IdemTable *queues, text *name, const NullableDatum *columns)
{
	bool exists = find_queue(queues, name);
	Oid owner = exists ? idem_row_oid(queues, IDEM_QUEUES_OWNER) : InvalidOid;
	TupleTableSlot *slot = begin_change(queues, name, exists);

	if (!columns[IDEM_QUEUES_OWNER].isnull &&
		DatumGetObjectId(columns[IDEM_QUEUES_OWNER].value) != owner)
		require_owner(owner);
	for (AttrNumber attno = IDEM_QUEUES_OWNER; attno <= IDEM_QUEUES_NATTS; attno++)
	{
		if (!columns[attno].isnull)
			idem_row_set(slot, attno, columns[attno].value);
	}
	if (!columns[IDEM_QUEUES_OWNER].isnull &&
		!OidIsValid(DatumGetObjectId(columns[IDEM_QUEUES_OWNER].value)))
		idem_row_clear(slot, IDEM_QUEUES_OWNER);
	store_settings(queues, exists);
}

/*
 * Does the queue have a live job?  One that an open transaction has enqueued, or
 * is removing, is one.
 */
static bool
has_jobs(text *queue)
{
	IdemTable jobs;
	IdemLookup lookup = {.nkeys = 1};
	IdemProbeResult probe;

	idem_jobtable_open(&jobs, RowExclusiveLock);
	lookup.index = idem_jobtable_fetch_index(&jobs);
	ScanKeyInit(&lookup.keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, PointerGetDatum(queue));
	idem_probe_existing(&jobs, &lookup, &probe);
	idem_table_close(&jobs);
	return probe.found != IDEM_FOUND_NONE;
}

/* Is a job of the queue in the history?  Goes through all of it. */
static bool
has_history(text *queue)
{
	IdemTable log;
	IdemLookup lookup = {0};
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	IndexScanDesc scan;
	bool found = false;

	idem_jobtable_open_log(&log, AccessShareLock);
	lookup.index = log.pkey;
	scan = idem_probe_begin(&log, &lookup, snapshot);
	while (!found && index_getnext_slot(scan, ForwardScanDirection, log.found))
	{
		CHECK_FOR_INTERRUPTS();
		found = idem_row_varlena_equals(&log, IDEM_JOB_LOG_QUEUE, queue);
	}
	index_endscan(scan);
	idem_table_close(&log);
	UnregisterSnapshot(snapshot);
	return found;
}

/*
 * Forget what was declared; false if nothing was.  A queue that belongs to a
 * role is not opened by the way: others could read what its jobs have left.
 */
bool
idem_queuestore_drop(IdemTable *queues, text *name)
{
	bool exists = find_queue(queues, name);

	if (has_jobs(name))
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_IN_USE),
				errmsg("queue has jobs"),
				errdetail("Its jobs, also those of open transactions, would fall back to the defaults."),
				errhint("Let the jobs end or cancel them, or change the settings with idem_queue_set()."));
	if (exists && !idem_row_isnull(queues, IDEM_QUEUES_OWNER))
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_IN_USE),
				errmsg("queue belongs to a role"),
				errdetail("Without its settings it would be open to every role that may call the functions."),
				errhint("Open it first with idem_queue_set(queue, owner => '-'), if that is meant."));
	if (exists && idem_write_delete(queues, true) != TM_Ok)
		elog(ERROR, "could not remove the settings of a queue");
	return exists;
}

/* Pause or resume; false if it was so before */
bool
idem_queuestore_pause(IdemTable *queues, text *name, bool pause)
{
	bool exists = find_queue(queues, name);
	bool paused = exists && !idem_row_isnull(queues, IDEM_QUEUES_PAUSED_AT);

	if (pause && !exists && !has_jobs(name) && !has_history(name))
		ereport(NOTICE,
				errmsg("the queue was never used or declared"),
				errdetail("It has no settings, no jobs and no history; it is paused all the same."),
				errhint("Check the name: idem.queue_status lists the queues. idem_resume() ends the pause."));
	if (paused != pause)
	{
		TupleTableSlot *slot = begin_change(queues, name, exists);

		if (pause)
			idem_row_set(slot, IDEM_QUEUES_PAUSED_AT, TimestampTzGetDatum(idem_clock_now()));
		else
			idem_row_clear(slot, IDEM_QUEUES_PAUSED_AT);
		store_settings(queues, exists);
	}
	return paused != pause;
}
