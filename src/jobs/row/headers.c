/*
 * headers.c
 *		Headers of a job, and links to the traces of the duplicates that it has absorbed (J16).
 *
 * Headers are a JSON object that the enqueue stores beside the payload, usually the context of
 * a trace.  idem.headers has defaults for a session or a transaction.  A link is the
 * traceparent of a duplicate: tracing tools show it as a link from the run of the job to
 * the request that enqueued the duplicate.
 */
#include "postgres.h"

#include "catalog/pg_collation.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"

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
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "headers"),
				errdetail("Headers must be a JSON object."),
				errhint("Pass an object such as {\"traceparent\": \"00-...\"}."));
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
