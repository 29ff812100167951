/*
 * monitor.c
 *		What shared memory holds, for the views: counters, the progress of
 *		cleanup, the launcher.
 *
 * Without a preloaded library there is nothing to be seen but that.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/backend_status.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "stats/stats.h"

#define CLEANUP_NATTS 9
#define WORKER_NATTS  18

static const char *const phase_names[] = {
	"idle", "keys", "job keys", "job history", "jobs", "off", "failing", "not installed", "locked", "subscribed"};
static const char *const state_names[] = {
	"stopped", "sleeping", "working", "waiting for a free slot", "failing"};

static const Oid cleanup_types[CLEANUP_NATTS] = {
	OIDOID, TEXTOID, INT8OID, FLOAT8OID, INT8OID, TIMESTAMPTZOID,
	TIMESTAMPTZOID, TEXTOID, TIMESTAMPTZOID};
static const Oid worker_types[WORKER_NATTS] = {
	BOOLOID, TEXTOID, TEXTOID, INT4OID, TIMESTAMPTZOID, INT8OID,
	TIMESTAMPTZOID, OIDOID, INT4OID, INT4OID, TIMESTAMPTZOID, TIMESTAMPTZOID, FLOAT8OID,
	INT8OID, BOOLOID, FLOAT8OID, TEXTOID, TIMESTAMPTZOID};

IDEM_FUNCTION(idem_version, TEXTOID);
IDEM_FUNCTION(idem_stat_databases, RECORDOID);
IDEM_FUNCTION(idem_stat_queues, RECORDOID);
IDEM_FUNCTION(idem_stat_cleanup, RECORDOID);
IDEM_FUNCTION(idem_stat_worker, RECORDOID);
IDEM_FUNCTION(idem_stats_reset, VOIDOID);

/*
 * The doctor asks for this one before anything else, so every version of the
 * library has it, with this signature.
 */
Datum
idem_version(PG_FUNCTION_ARGS)
{
	idem_args_begin(fcinfo, &idem_version_signature, NULL);
	PG_RETURN_TEXT_P(cstring_to_text(IDEM_VERSION));
}

/* A row to be returned, filled from the left */
typedef struct Row
{
	ReturnSetInfo *rsinfo;
	int n;
	Datum values[IDEM_NCOUNTERS + 3];
	bool nulls[IDEM_NCOUNTERS + 3];
} Row;

static void
add(Row *row, Datum value, bool isnull)
{
	row->values[row->n] = value;
	row->nulls[row->n++] = isnull;
}

static void
add_time(Row *row, TimestampTz time)
{
	add(row, TimestampTzGetDatum(time), time == 0);
}

/* The encoding of a database; -1 if that is gone */
static int
get_encoding(Oid database)
{
	HeapTuple tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(database));
	int encoding = -1;

	if (HeapTupleIsValid(tuple))
	{
		encoding = ((Form_pg_database) GETSTRUCT(tuple))->encoding;
		ReleaseSysCache(tuple);
	}
	return encoding;
}

/* Convert a name of another database to the encoding of this one; NULL if that is not possible */
static char *
convert(Oid database, const char *value, int len)
{
	int from = get_encoding(database);
	int to = GetDatabaseEncoding();
	Oid proc;
	int size = len * MAX_CONVERSION_GROWTH + 1;
	char *converted;

	if (from == to || from < 0)
		return pg_verify_mbstr(to, value, len, true) ? pnstrdup(value, len) : NULL;
	if (from == PG_SQL_ASCII || to == PG_SQL_ASCII || !OidIsValid(proc = FindDefaultConversionProc(from, to)))
		return NULL;
	converted = palloc(size);
	if (pg_do_encoding_conversion_buf(proc, from, to, (unsigned char *) unconstify(char *, value), len,
									  (unsigned char *) converted, size, true) < len)
		return NULL;
	return converted;
}

/* Bytes that are not ASCII as \xNN, and a backslash as two, so that different names stay different */
static char *
escape(const char *value, int len)
{
	StringInfoData text;

	initStringInfo(&text);
	for (int i = 0; i < len; i++)
	{
		if (IS_HIGHBIT_SET(value[i]))
			appendStringInfo(&text, "\\x%02x", (unsigned char) value[i]);
		else if (value[i] == '\\')
			appendStringInfoString(&text, "\\\\");
		else
			appendStringInfoChar(&text, value[i]);
	}
	return text.data;
}

static bool
is_ascii(const char *value, int len)
{
	for (int i = 0; i < len; i++)
	{
		if (IS_HIGHBIT_SET(value[i]))
			return false;
	}
	return true;
}

/* Text that was written in a database, which may have another encoding */
static void
add_text(Row *row, Oid database, const char *value, int len)
{
	char *text = is_ascii(value, len) ? pnstrdup(value, len) : convert(database, value, len);

	add(row, CStringGetTextDatum(text != NULL ? text : escape(value, len)), false);
}

static void
put(Row *row)
{
	tuplestore_putvalues(row->rsinfo->setResult, row->rsinfo->setDesc, row->values, row->nulls);
	row->n = 0;
}

/* A copy of an entry */
typedef struct Copy
{
	IdemCounted counted;
	IdemProgress progress;
} Copy;

/* Copies of the entries of databases, or of queues, that are in use */
static Copy *
copy_entries(bool of_queues, int *n)
{
	Copy *copies;
	int nused = 0;

	*n = 0;
	LWLockAcquire(idem_shared->lock, LW_SHARED);
	for (int i = 0; i < idem_shared->nentries; i++)
		nused += OidIsValid(idem_shared->entries[i].database);
	copies = palloc_extended(mul_size(nused, sizeof(Copy)), MCXT_ALLOC_HUGE);
	for (int i = 0; i < idem_shared->nentries; i++)
	{
		IdemEntry *entry = &idem_shared->entries[i];

		if (!OidIsValid(entry->database) || (entry->queue_len >= 0) != of_queues)
			continue;
		idem_shared_copy(entry, &copies[*n].counted);
		copies[(*n)++].progress = entry->progress;
	}
	LWLockRelease(idem_shared->lock);
	return copies;
}

/* Counters of databases or queues: whose they are, the counters, since when */
static Datum
put_counters(FunctionCallInfo fcinfo, IdemSignature *signature, bool of_queues)
{
	Oid types[IDEM_NCOUNTERS + 3];
	Row row = {0};
	int ncounters = of_queues ? IDEM_QUEUE_STAT_N : IDEM_STAT_N;
	int natts = 0;
	int n;
	Copy *copies;

	types[natts++] = OIDOID;
	if (of_queues)
		types[natts++] = TEXTOID;
	for (int i = 0; i < ncounters; i++)
		types[natts++] = INT8OID;
	types[natts++] = TIMESTAMPTZOID;

	idem_args_begin(fcinfo, signature, NULL);
	row.rsinfo = idem_args_row_set(fcinfo, types, natts);
	if (idem_shared == NULL)
		return (Datum) 0;
	/* this database has a row, if nothing was counted yet, too */
	(void) idem_shared_entry(MyDatabaseId, NULL);
	copies = copy_entries(of_queues, &n);
	for (int i = 0; i < n; i++)
	{
		const IdemCounted *counted = &copies[i].counted;

		add(&row, ObjectIdGetDatum(counted->database), false);
		if (of_queues)
			add_text(&row, counted->database, counted->queue, counted->queue_len);
		for (int j = 0; j < ncounters; j++)
			add(&row, Int64GetDatum((int64) counted->counters[j]), false);
		add_time(&row, counted->stats_reset);
		put(&row);
	}
	pfree(copies);
	return (Datum) 0;
}

Datum
idem_stat_databases(PG_FUNCTION_ARGS)
{
	return put_counters(fcinfo, &idem_stat_databases_signature, false);
}

Datum
idem_stat_queues(PG_FUNCTION_ARGS)
{
	return put_counters(fcinfo, &idem_stat_queues_signature, true);
}

static void
put_progress(Row *row, Oid database, const IdemProgress *progress)
{
	add(row, ObjectIdGetDatum(database), false);
	add(row, CStringGetTextDatum(phase_names[progress->phase]), false);
	add(row, Int64GetDatum(progress->removed), false);
	add(row, Float8GetDatum(progress->removed * 1e6 / Max(progress->working, 1)), progress->working == 0);
	add(row, Int64GetDatum(progress->backlog), progress->backlog < 0);
	add_time(row, progress->started_at);
	add_time(row, progress->finished_at);
	if (progress->error_at != 0)
		add_text(row, database, progress->error, strlen(progress->error));
	else
		add(row, (Datum) 0, true);
	add_time(row, progress->error_at);
	put(row);
}

Datum
idem_stat_cleanup(PG_FUNCTION_ARGS)
{
	Row row = {0};
	int n;
	Copy *copies;

	idem_args_begin(fcinfo, &idem_stat_cleanup_signature, NULL);
	row.rsinfo = idem_args_row_set(fcinfo, cleanup_types, CLEANUP_NATTS);
	if (idem_shared == NULL)
		return (Datum) 0;
	/* this database has a row, if the worker has not been here yet, too; and the worker is to come */
	idem_stats_note_use();
	copies = copy_entries(false, &n);
	for (int i = 0; i < n; i++)
		put_progress(&row, copies[i].counted.database, &copies[i].progress);
	pfree(copies);
	return (Datum) 0;
}

/* How many background workers are there, of all kinds? */
static int
count_slots(void)
{
	int used = 0;

	for (int i = 1; i <= pgstat_fetch_stat_numbackends(); i++)
		used += pgstat_get_local_beentry_by_index(i)->backendStatus.st_backendType == B_BG_WORKER;
	return used;
}

Datum
idem_stat_worker(PG_FUNCTION_ARGS)
{
	Row row = {0};
	IdemLauncher launcher = {0};
	IdemRun run = {0};
	bool is_full = false;

	idem_args_begin(fcinfo, &idem_stat_worker_signature, NULL);
	row.rsinfo = idem_args_row_set(fcinfo, worker_types, WORKER_NATTS);
	if (idem_shared != NULL)
	{
		LWLockAcquire(idem_shared->lock, LW_SHARED);
		launcher = idem_shared->launcher;
		run = idem_shared->run;
		is_full = idem_shared->is_full;
		LWLockRelease(idem_shared->lock);
	}
	add(&row, BoolGetDatum(idem_shared != NULL), false);
	add(&row, CStringGetTextDatum(IDEM_VERSION), false);
	add(&row, CStringGetTextDatum(state_names[launcher.state]), false);
	add(&row, Int32GetDatum(launcher.pid), launcher.pid == 0);
	add_time(&row, launcher.started_at);
	add(&row, Int64GetDatum(launcher.runs), idem_shared == NULL);
	add_time(&row, launcher.last_run_at);
	add(&row, ObjectIdGetDatum(run.database), run.pid == 0);
	add(&row, Int32GetDatum(run.pid), run.pid == 0);
	add(&row, Int32GetDatum(count_slots()), false);
	add_time(&row, launcher.no_slot_since);
	add_time(&row, launcher.clock_back_at);
	add(&row, Float8GetDatum(launcher.clock_back_by / 1e6), launcher.clock_back_at == 0);
	add(&row, Int64GetDatum(launcher.memory), launcher.pid == 0);
	add(&row, BoolGetDatum(is_full), idem_shared == NULL);
	add(&row, Float8GetDatum(Max(idem_clock_steady() - launcher.awake_at, 0) / 1e6), launcher.pid == 0);
	if (launcher.error_at != 0)
		add_text(&row, InvalidOid, launcher.error, strlen(launcher.error));
	else
		add(&row, (Datum) 0, true);
	add_time(&row, launcher.error_at);
	put(&row);
	return (Datum) 0;
}

/* Counting in this database and its queues begins anew */
Datum
idem_stats_reset(PG_FUNCTION_ARGS)
{
	TimestampTz now = GetCurrentTimestamp();

	idem_args_begin(fcinfo, &idem_stats_reset_signature, NULL);
	if (idem_shared == NULL)
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("there are no statistics"),
				errdetail("The library was not loaded when the server was started."),
				errhint("Add \"idem\" to \"%s\" and restart the server.", "shared_preload_libraries"));
	LWLockAcquire(idem_shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < idem_shared->nentries; i++)
	{
		if (idem_shared->entries[i].database == MyDatabaseId)
			idem_shared_zero(&idem_shared->entries[i], now);
	}
	LWLockRelease(idem_shared->lock);
	PG_RETURN_VOID();
}
