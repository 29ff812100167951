/*
 * views.c
 *		SQL functions behind the views of statistics: counters, histograms, the
 *		progress of cleanup, the launcher.
 *
 * They show no key, request, result or payload (S3).  If the library is not
 * preloaded, they return no rows, or a row that says so.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/backend_status.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "fn/fn.h"
#include "stats/stats.h"

#define CLEANUP_NATTS 9
#define WORKER_NATTS  18
#define LATENCY_NATTS 11

static const char *const phase_names[] = {
	"idle", "keys", "job keys", "job history", "jobs", "off", "failing", "not installed", "locked", "subscribed"};
static const char *const state_names[] = {
	"stopped", "sleeping", "working", "waiting for a free slot", "failing"};
static const char *const kind_names[] = {"wait", "run"};

StaticAssertDecl(lengthof(phase_names) == IDEM_PHASE_SUBSCRIBED + 1, "every phase has a name");
StaticAssertDecl(lengthof(state_names) == IDEM_LAUNCHER_FAILING + 1, "every state has a name");
StaticAssertDecl(lengthof(kind_names) == IDEM_HISTOGRAM_N, "every histogram has a name");

static const Oid cleanup_types[CLEANUP_NATTS] = {
	OIDOID, TEXTOID, INT8OID, FLOAT8OID, INT8OID, TIMESTAMPTZOID,
	TIMESTAMPTZOID, TEXTOID, TIMESTAMPTZOID};
static const Oid worker_types[WORKER_NATTS] = {
	BOOLOID, TEXTOID, TEXTOID, INT4OID, TIMESTAMPTZOID, INT8OID,
	TIMESTAMPTZOID, OIDOID, INT4OID, INT4OID, TIMESTAMPTZOID, TIMESTAMPTZOID, FLOAT8OID,
	INT8OID, BOOLOID, FLOAT8OID, TEXTOID, TIMESTAMPTZOID};
static const Oid latency_types[LATENCY_NATTS] = {
	OIDOID, TEXTOID, TEXTOID, INT8OID, FLOAT8OID, FLOAT8OID, FLOAT8OID, FLOAT8OID,
	FLOAT8ARRAYOID, INT8ARRAYOID, TIMESTAMPTZOID};

IDEM_FUNCTION(idem_version, TEXTOID);
IDEM_FUNCTION(idem_clock, TIMESTAMPTZOID);
IDEM_FUNCTION(idem_stat_databases, RECORDOID);
IDEM_FUNCTION(idem_stat_queues, RECORDOID);
IDEM_FUNCTION(idem_stat_latency, RECORDOID);
IDEM_FUNCTION(idem_stat_cleanup, RECORDOID);
IDEM_FUNCTION(idem_stat_worker, RECORDOID);
IDEM_FUNCTION(idem_stats_reset, VOIDOID);

/*
 * idem_doctor() calls this one before any other function of the library.  So
 * every version of the library must have it, with this signature.
 */
Datum
idem_version(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_version_signature, NULL);
	PG_RETURN_TEXT_P(cstring_to_text(IDEM_VERSION));
}

Datum
idem_clock(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_clock_signature, NULL);
	PG_RETURN_TIMESTAMPTZ(idem_clock_now());
}

/* A row to return, filled from the left */
typedef struct Row
{
	ReturnSetInfo *rsinfo;
	int n;
	Datum values[IDEM_NCOUNTERS + 3];
	bool nulls[IDEM_NCOUNTERS + 3];
} Row;

static void
add_column(Row *row, Datum value, bool isnull)
{
	row->values[row->n] = value;
	row->nulls[row->n++] = isnull;
}

static void
add_time(Row *row, TimestampTz time)
{
	add_column(row, TimestampTzGetDatum(time), time == 0);
}

/* The encoding of a database; -1 if it was dropped */
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

/* Convert text of another database to the encoding of this one; NULL if that is not possible */
static char *
convert_text(Oid database, const char *value, int len)
{
	int from = get_encoding(database);
	int to = GetDatabaseEncoding();
	Oid proc;
	int size = len * MAX_CONVERSION_GROWTH + 1;
	char *converted;

	if (from == to || from < 0)
		return pg_verify_mbstr(to, value, len, true) ? pnstrdup(value, len) : NULL;
	if (from == PG_SQL_ASCII || to == PG_SQL_ASCII ||
		!OidIsValid(proc = FindDefaultConversionProc(from, to)))
		return NULL;
	converted = palloc(size);
	if (pg_do_encoding_conversion_buf(proc, from, to, (unsigned char *) unconstify(char *, value),
									  len, (unsigned char *) converted, size, true) < len)
		return NULL;
	return converted;
}

/* Write bytes that are not ASCII as \xNN, and a backslash as two: different names stay different */
static char *
escape_text(const char *value, int len)
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

/* Add text from a database that may have another encoding: converted, else escaped (S3) */
static void
add_text(Row *row, Oid database, const char *value, int len)
{
	char *text = is_ascii(value, len) ? pnstrdup(value, len) : convert_text(database, value, len);

	add_column(row, CStringGetTextDatum(text != NULL ? text : escape_text(value, len)), false);
}

static void
put_row(Row *row)
{
	idem_fn_put_row(row->rsinfo, row->values, row->nulls, row->n);
	row->n = 0;
}

/* Return one row per database or queue: database, queue, the counters, time of the reset */
static Datum
put_counters(FunctionCallInfo fcinfo, IdemSignature *signature, bool of_queues)
{
	static IdemRowDesc row_descs[2];
	Oid types[IDEM_NCOUNTERS + 3];
	Row row = {0};
	int ncounters = of_queues ? IDEM_QUEUE_COUNTER_N : IDEM_DATABASE_COUNTER_N;
	int natts = 0;
	int n;
	IdemStatsSnapshot *copies;

	types[natts++] = OIDOID;
	if (of_queues)
		types[natts++] = TEXTOID;
	for (int i = 0; i < ncounters; i++)
		types[natts++] = INT8OID;
	types[natts++] = TIMESTAMPTZOID;

	idem_fn_begin(fcinfo, signature, NULL);
	row.rsinfo = idem_fn_row_set(fcinfo, types, natts, &row_descs[of_queues]);
	if (!idem_entries_exist())
		return (Datum) 0;
	/* make an entry, so that this database has a row even before the first count */
	(void) idem_entries_get_database();
	copies = idem_entries_copy_counters(of_queues, &n);
	for (int i = 0; i < n; i++)
	{
		const IdemStatsSnapshot *snapshot = &copies[i];

		add_column(&row, ObjectIdGetDatum(snapshot->database), false);
		if (of_queues)
			add_text(&row, snapshot->database, snapshot->queue, snapshot->queue_len);
		for (int j = 0; j < ncounters; j++)
			add_column(&row, Int64GetDatum((int64) snapshot->counters[j]), false);
		add_time(&row, snapshot->stats_reset);
		put_row(&row);
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

/* The bounds of all buckets, as an array */
static Datum
make_bounds(void)
{
	Datum bounds[IDEM_HISTOGRAM_BUCKETS];

	for (int i = 0; i < IDEM_HISTOGRAM_BUCKETS; i++)
		bounds[i] = Float8GetDatum(idem_histogram_bound(i));
	return PointerGetDatum(construct_array(bounds, IDEM_HISTOGRAM_BUCKETS, FLOAT8OID,
										   sizeof(float8), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
}

/* How many times there are up to each bound, as an array */
static Datum
make_counts(const IdemHistogramCopy *histogram)
{
	Datum counts[IDEM_HISTOGRAM_BUCKETS];
	int64 count = 0;

	for (int i = 0; i < IDEM_HISTOGRAM_BUCKETS; i++)
	{
		count += histogram->counts[i];
		counts[i] = Int64GetDatum(count);
	}
	return PointerGetDatum(construct_array(counts, IDEM_HISTOGRAM_BUCKETS, INT8OID, sizeof(int64),
										   FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
}

static void
add_quantile(Row *row, const IdemHistogramCopy *histogram, double part)
{
	bool is_empty = idem_histogram_count(histogram) == 0;

	add_column(row, is_empty ? (Datum) 0 : Float8GetDatum(idem_histogram_quantile(histogram, part)),
			   is_empty);
}

static void
put_latency(Row *row, const IdemStatsSnapshot *snapshot, IdemHistogramKind kind, Datum bounds)
{
	const IdemHistogramCopy *histogram = &snapshot->histograms[kind];

	add_column(row, ObjectIdGetDatum(snapshot->database), false);
	add_text(row, snapshot->database, snapshot->queue, snapshot->queue_len);
	add_column(row, CStringGetTextDatum(kind_names[kind]), false);
	add_column(row, Int64GetDatum((int64) idem_histogram_count(histogram)), false);
	add_column(row, Float8GetDatum(histogram->usecs / 1e6), false);
	add_quantile(row, histogram, 0.5);
	add_quantile(row, histogram, 0.9);
	add_quantile(row, histogram, 0.99);
	add_column(row, bounds, false);
	add_column(row, make_counts(histogram), false);
	add_time(row, snapshot->stats_reset);
	put_row(row);
}

/* S5: two rows per queue, one for each histogram */
Datum
idem_stat_latency(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	Row row = {0};
	Datum bounds = make_bounds();
	int n;
	IdemStatsSnapshot *copies;

	idem_fn_begin(fcinfo, &idem_stat_latency_signature, NULL);
	row.rsinfo = idem_fn_row_set(fcinfo, latency_types, LATENCY_NATTS, &row_desc);
	if (!idem_entries_exist())
		return (Datum) 0;
	copies = idem_entries_copy_counters(true, &n);
	for (int i = 0; i < n; i++)
	{
		for (IdemHistogramKind kind = 0; kind < IDEM_HISTOGRAM_N; kind++)
			put_latency(&row, &copies[i], kind, bounds);
	}
	pfree(copies);
	return (Datum) 0;
}

static void
put_progress(Row *row, Oid database, const IdemProgress *progress)
{
	add_column(row, ObjectIdGetDatum(database), false);
	add_column(row, CStringGetTextDatum(phase_names[progress->phase]), false);
	add_column(row, Int64GetDatum(progress->removed), false);
	add_column(row, Float8GetDatum(progress->removed * 1e6 / Max(progress->working, 1)),
			   progress->working == 0);
	add_column(row, Int64GetDatum(progress->backlog), progress->backlog < 0);
	add_time(row, progress->started_at);
	add_time(row, progress->finished_at);
	if (progress->error_at != 0)
		add_text(row, database, progress->error, strlen(progress->error));
	else
		add_column(row, (Datum) 0, true);
	add_time(row, progress->error_at);
	put_row(row);
}

Datum
idem_stat_cleanup(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	Row row = {0};
	int n;
	IdemDatabaseProgress *copies;

	idem_fn_begin(fcinfo, &idem_stat_cleanup_signature, NULL);
	row.rsinfo = idem_fn_row_set(fcinfo, cleanup_types, CLEANUP_NATTS, &row_desc);
	if (!idem_entries_exist())
		return (Datum) 0;
	/* make an entry, so that this database has a row and the worker visits it (W5) */
	idem_counters_note_use();
	copies = idem_entries_copy_progress(&n);
	for (int i = 0; i < n; i++)
		put_progress(&row, copies[i].database, &copies[i].progress);
	pfree(copies);
	return (Datum) 0;
}

/* Number of running background workers, of all extensions and of the server */
static int
count_workers(void)
{
	int used = 0;

	for (int i = 1; i <= pgstat_fetch_stat_numbackends(); i++)
		used += pgstat_get_local_beentry_by_index(i)->backendStatus.st_backendType == B_BG_WORKER;
	return used;
}

Datum
idem_stat_worker(PG_FUNCTION_ARGS)
{
	static IdemRowDesc row_desc;
	Row row = {0};
	IdemLauncher launcher = {0};
	IdemVisit visit = {0};
	bool preloaded = idem_entries_exist();

	idem_fn_begin(fcinfo, &idem_stat_worker_signature, NULL);
	row.rsinfo = idem_fn_row_set(fcinfo, worker_types, WORKER_NATTS, &row_desc);
	if (preloaded)
		idem_exchange_get_status(&launcher, &visit);
	add_column(&row, BoolGetDatum(preloaded), false);
	add_column(&row, CStringGetTextDatum(IDEM_VERSION), false);
	add_column(&row, CStringGetTextDatum(state_names[launcher.state]), false);
	add_column(&row, Int32GetDatum(launcher.pid), launcher.pid == 0);
	add_time(&row, launcher.started_at);
	add_column(&row, Int64GetDatum(launcher.visits), !preloaded);
	add_time(&row, launcher.last_visit_at);
	add_column(&row, ObjectIdGetDatum(visit.request.database), visit.pid == 0);
	add_column(&row, Int32GetDatum(visit.pid), visit.pid == 0);
	add_column(&row, Int32GetDatum(count_workers()), false);
	add_time(&row, launcher.no_slot_since);
	add_time(&row, launcher.clock_back_at);
	add_column(&row, Float8GetDatum(launcher.clock_back_by / 1e6), launcher.clock_back_at == 0);
	add_column(&row, Int64GetDatum(launcher.memory), launcher.pid == 0);
	add_column(&row, BoolGetDatum(preloaded && idem_entries_is_full()), !preloaded);
	add_column(&row, Float8GetDatum(Max(idem_clock_steady() - launcher.awake_at, 0) / 1e6),
			   launcher.pid == 0);
	if (launcher.error_at != 0)
		add_text(&row, InvalidOid, launcher.error, strlen(launcher.error));
	else
		add_column(&row, (Datum) 0, true);
	add_time(&row, launcher.error_at);
	put_row(&row);
	return (Datum) 0;
}

/* Reset the counters and histograms of this database and its queues to zero */
Datum
idem_stats_reset(PG_FUNCTION_ARGS)
{
	idem_fn_begin(fcinfo, &idem_stats_reset_signature, NULL);
	if (!idem_entries_exist())
		ereport(ERROR,
				errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				errmsg("statistics of idem are not available"),
				errdetail("The library was not loaded when the server was started."),
				errhint("Add \"idem\" to \"%s\" and restart the server.", "shared_preload_libraries"));
	idem_entries_reset_counters();
	PG_RETURN_VOID();
}
