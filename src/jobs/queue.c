/*
 * queue.c
 *		SQL functions for queues: idem_queue_set, idem_queue_drop, idem_pause,
 *		idem_resume.  EXECUTE on them is the privilege;
 *		an owned queue changes its owner only with the privileges of that one.
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"

#include "jobs/jobs.h"

IDEM_FUNCTION(idem_queue_set, VOIDOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, INTERVALOID, BOOLOID,
			  INTERVALOID, INTERVALOID, INT4OID, INTERVALOID, INTERVALOID, INTERVALOID, INTERVALOID, REGROLEOID);
IDEM_FUNCTION(idem_queue_drop, BOOLOID, TEXTOID);
IDEM_FUNCTION(idem_pause, BOOLOID, TEXTOID);
IDEM_FUNCTION(idem_resume, BOOLOID, TEXTOID);

/* Arguments of idem_queue_set() after the name, and the columns that they go to */
static const struct
{
	AttrNumber column;
	const char *name;
	const char *const *words;			/* what it may be, or */
	int64 (*span)(Datum, const char *); /* how its length is checked */
} settings[] = {
	{IDEM_QUEUES_DEDUP, "dedup", idem_dedup_words, NULL},
	{IDEM_QUEUES_ON_DUPLICATE, "on_duplicate", idem_on_duplicate_words, NULL},
	{IDEM_QUEUES_IF_RUNNING, "if_running", idem_if_running_words, NULL},
	{IDEM_QUEUES_KEY_TTL, "key_ttl", NULL, idem_args_longer_than_zero},
	{IDEM_QUEUES_INCLUDE_SCHEDULED, "include_scheduled", NULL, NULL},
	{IDEM_QUEUES_DEBOUNCE_MAX, "debounce_max", NULL, idem_args_longer_than_zero},
	{IDEM_QUEUES_LEASE, "lease", NULL, idem_args_lease_or_none},
	{IDEM_QUEUES_MAX_ATTEMPTS, "max_attempts", NULL, NULL},
	{IDEM_QUEUES_BACKOFF, "backoff", NULL, idem_args_longer_than_zero},
	{IDEM_QUEUES_BACKOFF_MAX, "backoff_max", NULL, idem_args_longer_than_zero},
	{IDEM_QUEUES_KEEP, "keep", NULL, idem_args_zero_or_longer},
	{IDEM_QUEUES_KEEP_DEAD, "keep_dead", NULL, idem_args_zero_or_longer},
	{IDEM_QUEUES_OWNER, "owner", NULL, NULL},
};

Datum
idem_queue_set(PG_FUNCTION_ARGS)
{
	NullableDatum columns[IDEM_QUEUES_NATTS + 1];
	text *queue;

	idem_args_begin(fcinfo, &idem_queue_set_signature, "idem_queue_set()");
	queue = idem_args_queue(fcinfo, 0);
	for (int i = 0; i <= IDEM_QUEUES_NATTS; i++)
		columns[i].isnull = true;
	for (int i = 0; i < (int) lengthof(settings); i++)
	{
		NullableDatum value = fcinfo->args[i + 1];

		if (!value.isnull && settings[i].words != NULL)
			(void) idem_args_word(DatumGetTextPP(value.value), settings[i].name, settings[i].words);
		if (!value.isnull && settings[i].span != NULL)
			(void) settings[i].span(value.value, settings[i].name);
		columns[settings[i].column] = value;
	}
	(void) idem_args_max_attempts(fcinfo, 8);

	idem_queuestore_set(queue, columns);
	PG_RETURN_VOID();
}

Datum
idem_queue_drop(PG_FUNCTION_ARGS)
{
	text *queue;

	idem_args_begin(fcinfo, &idem_queue_drop_signature, "idem_queue_drop()");
	queue = idem_args_queue(fcinfo, 0);
	PG_RETURN_BOOL(idem_queuestore_drop(queue));
}

Datum
idem_pause(PG_FUNCTION_ARGS)
{
	idem_args_begin(fcinfo, &idem_pause_signature, "idem_pause()");
	PG_RETURN_BOOL(idem_queuestore_pause(idem_args_queue(fcinfo, 0), true));
}

Datum
idem_resume(PG_FUNCTION_ARGS)
{
	idem_args_begin(fcinfo, &idem_resume_signature, "idem_resume()");
	PG_RETURN_BOOL(idem_queuestore_pause(idem_args_queue(fcinfo, 0), false));
}
