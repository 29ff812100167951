/*
 * errors.c
 *		The list of the last errors of a job: for each failed attempt its number, the time, and
 *		the text of the error (J18).
 *
 * The list is an array of jsonb, oldest first.  It is bounded, because each failure writes
 * it anew.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datetime.h"
#include "utils/fmgrprotos.h"
#include "utils/json.h"

#include "jobs/row/job.h"

/* A long error is truncated, not refused: the job must be given back in any case */
static char *
clip_error(const text *error)
{
	int len = VARSIZE_ANY_EXHDR(error);

	if (len > IDEM_MAX_ERROR_LEN)
		len = pg_mbcliplen(VARDATA_ANY(error), len, IDEM_MAX_ERROR_LEN);
	return pnstrdup(VARDATA_ANY(error), len);
}

/* The time as the list has it.  Such strings are in the order of the times. */
static void
encode_time(char *at, TimestampTz time)
{
	int utc = 0;

	JsonEncodeDateTime(at, TimestampTzGetDatum(time), TIMESTAMPTZOID, &utc);
}

/* A list with one entry.  error NULL: the worker gave none. */
static Jsonb *
make_list(int attempt, const text *error)
{
	char at[MAXDATELEN + 1];
	StringInfoData json;

	encode_time(at, idem_clock_now());
	initStringInfo(&json);
	appendStringInfo(&json, "[{\"attempt\": %d, \"at\": \"%s\", \"error\": ", attempt, at);
	if (error == NULL)
		appendStringInfoString(&json, "null");
	else
		escape_json(&json, clip_error(error));
	appendStringInfoString(&json, "}]");
	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(json.data)));
}

/* J18: the list with an entry for this attempt; errors NULL: there is no list yet */
Jsonb *
idem_errors_add(Jsonb *errors, int attempt, const text *error)
{
	Datum list = JsonbPGetDatum(make_list(attempt, error));

	if (errors == NULL)
		return DatumGetJsonbP(list);
	list = DirectFunctionCall2(jsonb_concat, JsonbPGetDatum(errors), list);
	if (JsonContainerSize(&DatumGetJsonbP(list)->root) > IDEM_MAX_ERRORS)
		list = DirectFunctionCall2(jsonb_delete_idx, list, Int32GetDatum(0));
	return DatumGetJsonbP(list);
}

/* A string of the last entry; NULL if there is no entry, or no such string in it */
static text *
get_last_string(Jsonb *errors, const char *name)
{
	JsonbValue *entry;
	JsonbValue *value;

	if (errors == NULL || !JB_ROOT_IS_ARRAY(errors) || JB_ROOT_COUNT(errors) == 0)
		return NULL;
	entry = getIthJsonbValueFromContainer(&errors->root, JB_ROOT_COUNT(errors) - 1);
	if (entry->type != jbvBinary || !JsonContainerIsObject(entry->val.binary.data))
		return NULL;
	value = getKeyJsonValueFromContainer(entry->val.binary.data, name, strlen(name), NULL);
	if (value == NULL || value->type != jbvString)
		return NULL;
	return cstring_to_text_with_len(value->val.string.val, value->val.string.len);
}

/* The text of the last error; NULL if there is none, or if the worker gave none */
text *
idem_errors_get_last(Jsonb *errors)
{
	return get_last_string(errors, "error");
}

/* Was the last attempt that failed at this time or later? */
bool
idem_errors_has_since(Jsonb *errors, TimestampTz time)
{
	text *last = get_last_string(errors, "at");
	char at[MAXDATELEN + 1];

	encode_time(at, time);
	return last != NULL && strcmp(text_to_cstring(last), at) >= 0;
}
