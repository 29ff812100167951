/*
 * headers.c
 *		Headers of a job, and links to the traces of the duplicates that it has absorbed (J16).
 *
 * Headers are a JSON object that the enqueue stores beside the payload, usually the context of
 * a trace.  idem.headers has defaults for a session or a transaction.  A link is the
 * traceparent of a duplicate: tracing tools show it as a link from the run of the job to
 * the request that enqueued the duplicate.
 *
 * A duplicate with a trace leaves a link in the job that absorbs it, even if it changes nothing
 * else there.  The link is an update of the row, and other enqueues of the key wait for a
 * transaction that has updated the row.  So the backend remembers the link, and writes it right
 * before the transaction commits: then they wait for no longer than this commit lasts.
 * Until then the transaction has the row locked FOR KEY SHARE, because of the duplicate, so no
 * worker can fetch the job.
 *
 * A link is worth neither a wait nor an error of the commit.  No subtransaction can be begun at
 * that moment, so nothing may raise an error: idem_table_open_at_commit() checks beforehand, and
 * takes all locks without waiting.  The link is dropped if one of them is not free, if the table
 * may have changed, or if another open transaction has changed the row.  A transaction that is
 * prepared drops its links, too: it may stay open for long.
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_collation.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "jobs/row/job.h"

/* The first links are kept, so that a job that absorbs many duplicates is not written for each */
#define MAX_LINKS 16

/* A traceparent has 55 characters by the first version of the standard */
#define MAX_LINK_LEN 256

/* Headers that are not too large; NULL if there are none */
static Jsonb *
check_size(Datum value)
{
	Jsonb *headers = idem_args_jsonb(value, "headers");

	return JB_ROOT_COUNT(headers) > 0 ? headers : NULL;
}

/* The headers of idem.headers; NULL: there are none */
Jsonb *
idem_headers_defaults(void)
{
	if (idem_guc_headers[0] == '\0')
		return NULL;
	return check_size(DirectFunctionCall1(jsonb_in, CStringGetDatum(idem_guc_headers)));
}

/* J16: the headers of a job: those passed, and the defaults that they do not replace; or NULL */
Jsonb *
idem_headers_get(Jsonb *defaults, NullableDatum value)
{
	Jsonb *headers;

	if (value.isnull)
		return defaults;
	headers = idem_args_jsonb(value.value, "headers");
	if (!JB_ROOT_IS_OBJECT(headers))
		idem_args_refuse_value("headers", "Headers must be a JSON object.",
							   "Pass an object such as {\"traceparent\": \"00-...\"}.");
	if (defaults != NULL)
		value.value = DirectFunctionCall2(jsonb_concat, JsonbPGetDatum(defaults),
										  JsonbPGetDatum(headers));
	return check_size(value.value);
}

/* J16: the traceparent of headers; NULL if there is none that can be a link */
text *
idem_headers_get_trace(Jsonb *headers)
{
	JsonbValue *value;

	/* a row that was written by hand may have anything */
	if (headers == NULL || !JB_ROOT_IS_OBJECT(headers))
		return NULL;
	value = getKeyJsonValueFromContainer(&headers->root, "traceparent", strlen("traceparent"),
										 NULL);
	if (value == NULL || value->type != jbvString || value->val.string.len == 0 ||
		value->val.string.len > MAX_LINK_LEN)
		return NULL;
	return cstring_to_text_with_len(value->val.string.val, value->val.string.len);
}

/* A list with one link */
static Jsonb *
make_list(const text *link)
{
	StringInfoData json;

	initStringInfo(&json);
	appendStringInfoChar(&json, '[');
	escape_json(&json, text_to_cstring(link));
	appendStringInfoChar(&json, ']');
	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data)));
}

/*
 * J16: the links of a job with these headers, and one more.  NULL: the links stay as they are,
 * because the trace is that of the job, or linked already, or because the list is full.
 */
Jsonb *
idem_headers_add_link(Jsonb *links, Jsonb *own, text *link)
{
	text *own_trace = idem_headers_get_trace(own);

	if (own_trace != NULL &&
		DatumGetBool(DirectFunctionCall2Coll(texteq, C_COLLATION_OID, PointerGetDatum(own_trace),
											 PointerGetDatum(link))))
		return NULL;
	if (links == NULL)
		return make_list(link);
	if (JB_ROOT_COUNT(links) >= MAX_LINKS ||
		DatumGetBool(DirectFunctionCall2(jsonb_exists, JsonbPGetDatum(links),
										 PointerGetDatum(link))))
		return NULL;
	return DatumGetJsonbP(DirectFunctionCall2(jsonb_concat, JsonbPGetDatum(links),
											  JsonbPGetDatum(make_list(link))));
}

/* A transaction that absorbs more duplicates with traces drops the later ones */
#define MAX_NOTED 256

typedef struct NotedLink
{
	int64 job_id;
	SubTransactionId subid; /* the subtransaction to which it belongs */
	text *trace;
} NotedLink;

/* Allocated in TopTransactionContext, like the traces; NULL: none */
static NotedLink *noted = NULL;
static int nnoted = 0;

/* J16: write the link into the row of its job, unless another transaction has changed that row */
static void
write_link(IdemTable *jobs, const NotedLink *link)
{
	IdemLookup lookup = idem_jobtable_by_id(jobs, link->job_id);
	IdemProbeResult probe;
	Jsonb *links;
	IdemJob job;

	idem_probe(jobs, &lookup, &probe);
	/* this transaction itself may have fetched or ended the job since */
	if (probe.found != IDEM_FOUND_ROW || TransactionIdIsValid(probe.xwait))
		return;
	idem_job_read(&job, probe.row);
	if (job.is_leased)
		return;
	links = idem_headers_add_link(idem_row_jsonb(job.row, IDEM_JOBS_LINKS),
								  idem_row_jsonb(job.row, IDEM_JOBS_HEADERS), link->trace);
	if (links == NULL)
		return;
	/* idem_jobrow_store() takes it once more, and then it cannot have to wait */
	if (job.holds_key && !idem_table_try_lock_hash(jobs, job.key_hash))
		return;
	if (idem_table_lock_row(jobs, job.tid, LockTupleNoKeyExclusive, LockWaitSkip, job.row) == TM_Ok)
	{
		TupleTableSlot *slot = idem_table_copy_row(jobs, job.row);

		idem_row_set(slot, IDEM_JOBS_LINKS, JsonbPGetDatum(links));
		idem_jobrow_store(jobs, &job, slot,
						  idem_queueref_get(
							  DatumGetTextPP(idem_row_datum(job.row, IDEM_JOBS_QUEUE).value)),
						  IDEM_CHANGE_ABSORBED);
	}
	if (job.holds_key)
		idem_table_unlock_hash(jobs, job.key_hash);
}

/* Is there an index on the links?  It may have no room for them, which is an error. */
static bool
has_index(const IdemTable *jobs)
{
	for (int i = 0; i < jobs->nindexes; i++)
	{
		Form_pg_index form = jobs->indexes[i]->rd_index;

		for (int j = 0; j < form->indnatts; j++)
		{
			if (form->indkey.values[j] == IDEM_JOBS_LINKS)
				return true;
		}
	}
	return false;
}

/*
 * J16.  A serializable transaction does not write links: for other such transactions, which have
 * read the row, that would be a conflict, and one of them would fail.
 */
void
idem_headers_write_links(void)
{
	IdemTable jobs;

	if (nnoted == 0)
		return;
	/* the last statement may have changed the table or the row, and no command has followed */
	CommandCounterIncrement();
	if (XactReadOnly || IsolationIsSerializable())
		return;
	/* there are few, so a cancel can wait for them; here it would be an error of the commit */
	HOLD_INTERRUPTS();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (idem_table_open_at_commit(&jobs, &idem_jobtable_def))
	{
		for (int i = 0; i < nnoted && !has_index(&jobs); i++)
			write_link(&jobs, &noted[i]);
		idem_table_close(&jobs);
	}
	PopActiveSnapshot();
	RESUME_INTERRUPTS();
}

/* The transaction has ended, and its memory with it */
void
idem_headers_forget_links(void)
{
	noted = NULL;
	nnoted = 0;
}

/* The links of a subtransaction go to its parent, or are dropped */
void
idem_headers_end_sub(SubTransactionId subid, SubTransactionId parent, bool is_commit)
{
	int nkept = 0;

	for (int i = 0; i < nnoted; i++)
	{
		if (noted[i].subid == subid && !is_commit)
			continue;
		noted[nkept] = noted[i];
		if (noted[nkept].subid == subid)
			noted[nkept].subid = parent;
		nkept++;
	}
	nnoted = nkept;
}

/* J16: this job has absorbed a duplicate with these headers: leave a link if they have a trace */
void
idem_headers_note_link(int64 job_id, Jsonb *headers)
{
	text *trace = idem_headers_get_trace(headers);
	NotedLink *link;

	if (trace == NULL || nnoted == MAX_NOTED)
		return;
	for (int i = 0; i < nnoted; i++)
	{
		/* noted already, for a subtransaction that lasts at least as long as this one */
		if (noted[i].job_id == job_id && VARSIZE_ANY(noted[i].trace) == VARSIZE_ANY(trace) &&
			memcmp(noted[i].trace, trace, VARSIZE_ANY(trace)) == 0)
			return;
	}
	if (noted == NULL)
		noted = MemoryContextAlloc(TopTransactionContext, MAX_NOTED * sizeof(NotedLink));
	link = &noted[nnoted++];
	idem_fn_at_end |= IDEM_AT_END_LINKS;
	link->job_id = job_id;
	link->subid = GetCurrentSubTransactionId();
	link->trace = (text *) MemoryContextAlloc(TopTransactionContext, VARSIZE_ANY(trace));
	memcpy(link->trace, trace, VARSIZE_ANY(trace));
}
