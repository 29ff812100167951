/*
 * views.c
 *		SQL functions behind the views of statistics: counters, histograms, the
 *		progress of cleanup, the launcher.
 *
 * They show no key, request, result or payload (S3).  If the library is not
 * preloaded, they return no rows, or a row that says so.
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "lib/stringinfo.h"
#include "utils/array.h"
#include "utils/backend_status.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "fn/fn.h"
#include "stats/stats.h"

static const char *const phase_names[] = {
	"idle", "keys", "job keys", "job history", "jobs", "off", "failing", "not installed", "locked", "subscribed"};
static const char *const state_names[] = {
	"stopped", "sleeping", "working", "waiting for a free slot", "failing"};
static const char *const kind_names[] = {"wait", "run"};

StaticAssertDecl(lengthof(phase_names) == IDEM_PHASE_SUBSCRIBED + 1, "every phase has a name");
StaticAssertDecl(lengthof(state_names) == IDEM_LAUNCHER_FAILING + 1, "every state has a name");
StaticAssertDecl(lengthof(kind_names) == IDEM_HISTOGRAM_N, "every histogram has a name");

IDEM_FUNCTION(idem_version);
IDEM_FUNCTION(idem_clock);
IDEM_FUNCTION(idem_stat_databases);
IDEM_FUNCTION(idem_stat_queues);
IDEM_FUNCTION(idem_stat_latency);
IDEM_FUNCTION(idem_stat_cleanup);
IDEM_FUNCTION(idem_stat_worker);
IDEM_FUNCTION(idem_stats_reset);

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

/* Convert text of another database to the encoding of this one; NULL if that is not possible */
static char *
convert_text(Oid database, const char *value, int len)
{
	HeapTuple tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(database));
	int to = GetDatabaseEncoding();
	int from = to;
	int size = len * MAX_CONVERSION_GROWTH + 1;
	Oid proc;
	char *converted;

	/* unless the database was dropped */
	if (HeapTupleIsValid(tuple))
	{
		from = ((Form_pg_database) GETSTRUCT(tuple))->encoding;
		ReleaseSysCache(tuple);
	}
	if (from == to)
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

/*
 * Set a column to text of a database that may have another encoding: converted, else escaped (S3)
 */
static void
set_text(IdemAnswer *answer, int attno, Oid database, const char *value, int len)
{
	StringInfoData escaped;
	char *text;
	int nascii = 0;

	while (nascii < len && !IS_HIGHBIT_SET(value[nascii]))
		nascii++;
	text = nascii == len ? pnstrdup(value, len) : convert_text(database, value, len);
	if (text == NULL)
	{
		/*
		 * bytes that are not ASCII as \xNN, and a backslash as two: different names stay different
		 */
		initStringInfo(&escaped);
		for (int i = 0; i < len; i++)
		{
			if (IS_HIGHBIT_SET(value[i]))
				appendStringInfo(&escaped, "\\x%02x", (unsigned char) value[i]);
			else if (value[i] == '\\')
				appendStringInfoString(&escaped, "\\\\");
			else
				appendStringInfoChar(&escaped, value[i]);
		}
		text = escaped.data;
	}
	idem_answer_string(answer, attno, text);
}

/* Whose counters they are, the counters in the order of their enum, and when they were reset */
StaticAssertDecl(Natts_idem_stat_databases == 2 + IDEM_DATABASE_COUNTER_N,
				 "idem_stat_databases has a column for each counter");
StaticAssertDecl(Natts_idem_stat_queues == 3 + IDEM_QUEUE_COUNTER_N,
				 "idem_stat_queues has a column for each counter");

/* Rows of databases, or of queues; none if the library is not preloaded */
static Datum
show_counters(FunctionCallInfo fcinfo, IdemSignature *signature, bool of_queues)
{
	IdemAnswer answer;
	int n;
	IdemStatsSnapshot *copies;

	idem_fn_begin(fcinfo, signature, NULL);
	idem_answer_begin(&answer, fcinfo, signature);
	if (!idem_entries_exist())
		return (Datum) 0;
	/* make an entry, so that this database has a row even before the first count */
	(void) idem_entries_get_database();
	copies = idem_entries_copy_counters(of_queues, &n);
	for (int i = 0; i < n; i++)
	{
		int attno = 1;

		idem_answer_set(&answer, attno++, OIDOID, ObjectIdGetDatum(copies[i].database));
		if (of_queues)
			set_text(&answer, attno++, copies[i].database, copies[i].queue, copies[i].queue_len);
		for (int j = 0; attno < signature->natts; j++)
			idem_answer_int64(&answer, attno++, (int64) copies[i].counters[j]);
		idem_answer_optional_time(&answer, attno, copies[i].stats_reset);
		idem_answer_put(&answer);
	}
	pfree(copies);
	return (Datum) 0;
}

Datum
idem_stat_databases(PG_FUNCTION_ARGS)
{
	return show_counters(fcinfo, &idem_stat_databases_signature, false);
}

Datum
idem_stat_queues(PG_FUNCTION_ARGS)
{
	return show_counters(fcinfo, &idem_stat_queues_signature, true);
}

/*
 * S5: estimate the time, in seconds, that "rank" of the times do not exceed, as
 * histogram_quantile() of Prometheus does: the times of a bucket are spread evenly over it, and
 * for the last bucket the answer is the bound before it.  The histogram must not be empty.
 */
static double
estimate_quantile(const uint64 *histogram, double rank)
{
	double lower = 0;
	uint64 below = 0;

	for (int i = 0; i < IDEM_HISTOGRAM_BUCKETS - 1; i++)
	{
		double upper = idem_counters_bound(i);

		if (histogram[i] != 0 && below + histogram[i] >= rank)
			return lower + (upper - lower) * (rank - below) / histogram[i];
		below += histogram[i];
		lower = upper;
	}
	return lower;
}

static Datum
make_array(Datum *buckets, Oid type)
{
	return PointerGetDatum(construct_array(buckets, IDEM_HISTOGRAM_BUCKETS, type, sizeof(int64),
										   FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
}

static void
put_latency(IdemAnswer *answer, const IdemStatsSnapshot *snapshot, IdemHistogramKind kind)
{
	static const double parts[] = {0.5, 0.9, 0.99};
	const uint64 *histogram = &snapshot->times[kind * IDEM_HISTOGRAM_LEN];
	Datum bounds[IDEM_HISTOGRAM_BUCKETS];
	Datum counts[IDEM_HISTOGRAM_BUCKETS];
	int64 count = 0;

	/* how many times there are up to each bound */
	for (int i = 0; i < IDEM_HISTOGRAM_BUCKETS; i++)
	{
		count += histogram[i];
		counts[i] = Int64GetDatum(count);
		bounds[i] = Float8GetDatum(idem_counters_bound(i));
	}
	idem_answer_set(answer, Anum_idem_stat_latency_datid, OIDOID,
					ObjectIdGetDatum(snapshot->database));
	set_text(answer, Anum_idem_stat_latency_queue, snapshot->database, snapshot->queue,
			 snapshot->queue_len);
	idem_answer_string(answer, Anum_idem_stat_latency_kind, kind_names[kind]);
	idem_answer_int64(answer, Anum_idem_stat_latency_count, count);
	idem_answer_float8(answer, Anum_idem_stat_latency_total_seconds,
					   histogram[IDEM_HISTOGRAM_SUM] / 1e6);
	for (int i = 0; i < (int) lengthof(parts) && count > 0; i++)
		idem_answer_float8(answer, Anum_idem_stat_latency_p50_seconds + i,
						   estimate_quantile(histogram, parts[i] * count));
	idem_answer_set(answer, Anum_idem_stat_latency_bounds, FLOAT8ARRAYOID,
					make_array(bounds, FLOAT8OID));
	idem_answer_set(answer, Anum_idem_stat_latency_counts, INT8ARRAYOID,
					make_array(counts, INT8OID));
	idem_answer_optional_time(answer, Anum_idem_stat_latency_stats_reset, snapshot->stats_reset);
	idem_answer_put(answer);
}

StaticAssertDecl(Anum_idem_stat_latency_p99_seconds == Anum_idem_stat_latency_p50_seconds + 2,
				 "the columns of quantiles follow each other");

/* S5: two rows per queue, one for each histogram */
Datum
idem_stat_latency(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	int n;
	IdemStatsSnapshot *copies;

	idem_fn_begin(fcinfo, &idem_stat_latency_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_stat_latency_signature);
	if (!idem_entries_exist())
		return (Datum) 0;
	copies = idem_entries_copy_counters(true, &n);
	for (int i = 0; i < n; i++)
	{
		for (IdemHistogramKind kind = 0; kind < IDEM_HISTOGRAM_N; kind++)
			put_latency(&answer, &copies[i], kind);
	}
	pfree(copies);
	return (Datum) 0;
}

Datum
idem_stat_cleanup(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	int n;
	IdemDatabaseInfo *copies;

	idem_fn_begin(fcinfo, &idem_stat_cleanup_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_stat_cleanup_signature);
	if (!idem_entries_exist())
		return (Datum) 0;
	/* make an entry, so that this database has a row and the worker visits it (W5) */
	idem_counters_note_use();
	copies = idem_entries_copy_databases(&n);
	for (int i = 0; i < n; i++)
	{
		const IdemProgress *progress = &copies[i].progress;

		idem_answer_set(&answer, Anum_idem_stat_cleanup_datid, OIDOID,
						ObjectIdGetDatum(copies[i].database));
		idem_answer_string(&answer, Anum_idem_stat_cleanup_phase, phase_names[progress->phase]);
		idem_answer_int64(&answer, Anum_idem_stat_cleanup_removed, progress->removed);
		if (progress->working != 0)
			idem_answer_float8(&answer, Anum_idem_stat_cleanup_rows_per_second,
							   progress->removed * 1e6 / Max(progress->working, 1));
		if (progress->backlog >= 0)
			idem_answer_int64(&answer, Anum_idem_stat_cleanup_backlog, progress->backlog);
		idem_answer_optional_time(&answer, Anum_idem_stat_cleanup_started_at, progress->started_at);
		idem_answer_optional_time(&answer, Anum_idem_stat_cleanup_last_finished_at,
								  progress->finished_at);
		if (progress->error_at != 0)
			set_text(&answer, Anum_idem_stat_cleanup_last_error, copies[i].database,
					 progress->error, strlen(progress->error));
		idem_answer_optional_time(&answer, Anum_idem_stat_cleanup_last_error_at,
								  progress->error_at);
		idem_answer_put(&answer);
	}
	pfree(copies);
	return (Datum) 0;
}

Datum
idem_stat_worker(PG_FUNCTION_ARGS)
{
	IdemAnswer answer;
	IdemLauncher launcher = {0};
	IdemVisit visit = {0};
	bool preloaded = idem_entries_exist();
	int used_slots = 0;

	idem_fn_begin(fcinfo, &idem_stat_worker_signature, NULL);
	idem_answer_begin(&answer, fcinfo, &idem_stat_worker_signature);
	idem_answer_bool(&answer, Anum_idem_stat_worker_preloaded, preloaded);
	idem_answer_string(&answer, Anum_idem_stat_worker_library_version, IDEM_VERSION);
	if (preloaded)
	{
		idem_exchange_get(&launcher, &visit);
		idem_answer_int64(&answer, Anum_idem_stat_worker_runs, launcher.visits);
		idem_answer_bool(&answer, Anum_idem_stat_worker_stats_full, idem_entries_is_full());
	}
	idem_answer_string(&answer, Anum_idem_stat_worker_state, state_names[launcher.state]);
	if (launcher.pid != 0)
	{
		idem_answer_int32(&answer, Anum_idem_stat_worker_launcher_pid, launcher.pid);
		idem_answer_int64(&answer, Anum_idem_stat_worker_memory_bytes, launcher.memory);
		idem_answer_float8(&answer, Anum_idem_stat_worker_overdue_seconds,
						   Max(idem_clock_steady() - launcher.awake_at, 0) / 1e6);
	}
	idem_answer_optional_time(&answer, Anum_idem_stat_worker_started_at, launcher.started_at);
	idem_answer_optional_time(&answer, Anum_idem_stat_worker_last_run_at, launcher.last_visit_at);
	if (visit.pid != 0)
	{
		idem_answer_set(&answer, Anum_idem_stat_worker_datid, OIDOID,
						ObjectIdGetDatum(visit.request.database));
		idem_answer_int32(&answer, Anum_idem_stat_worker_worker_pid, visit.pid);
	}
	/* running background workers, of all extensions and of the server */
	for (int i = 1; i <= pgstat_fetch_stat_numbackends(); i++)
		used_slots +=
			pgstat_get_local_beentry_by_index(i)->backendStatus.st_backendType == B_BG_WORKER;
	idem_answer_int32(&answer, Anum_idem_stat_worker_used_slots, used_slots);
	idem_answer_optional_time(&answer, Anum_idem_stat_worker_no_slot_since, launcher.no_slot_since);
	if (launcher.clock_back_at != 0)
	{
		idem_answer_time(&answer, Anum_idem_stat_worker_clock_back_at, launcher.clock_back_at);
		idem_answer_float8(&answer, Anum_idem_stat_worker_clock_back_seconds,
						   launcher.clock_back_by / 1e6);
	}
	if (launcher.error_at != 0)
		set_text(&answer, Anum_idem_stat_worker_last_error, InvalidOid, launcher.error,
				 strlen(launcher.error));
	idem_answer_optional_time(&answer, Anum_idem_stat_worker_last_error_at, launcher.error_at);
	idem_answer_put(&answer);
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
