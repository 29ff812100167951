/*
 * args.c
 *		Arguments that several SQL functions have in common.
 *
 * No SQL function is STRICT, so the functions here check each argument for null
 * (K12).
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "fn/fn.h"

/* The argument, else idem.scope (K12) */
text *
idem_args_scope(FunctionCallInfo fcinfo, int arg)
{
	text *scope;

	if (PG_ARGISNULL(arg))
		return cstring_to_text(idem_guc_scope);

	scope = PG_GETARG_TEXT_PP(arg);
	if (VARSIZE_ANY_EXHDR(scope) > IDEM_MAX_SCOPE_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of scope"),
				errdetail("The scope has %d bytes; it must have at most %d.",
						  (int) VARSIZE_ANY_EXHDR(scope), IDEM_MAX_SCOPE_LEN),
				errhint("Use a short name for the service or tenant."));
	return scope;
}

/* A key and its scope (K12) */
void
idem_args_key(FunctionCallInfo fcinfo, int keyarg, int scopearg, IdemKey *key)
{
	if (PG_ARGISNULL(keyarg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("idempotency key must not be null"),
				errdetail("Without a key, duplicates cannot be recognized."),
				errhint("Derive the key from what makes the operation unique, for example the id of the order."));
	key->key = PG_GETARG_TEXT_PP(keyarg);
	idem_value_check_key(key->key);
	key->scope = idem_args_scope(fcinfo, scopearg);
}

/* The argument, else idem.ttl; in microseconds */
int64
idem_args_ttl(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return idem_guc_ttl * USECS_PER_SEC;
	return idem_value_span(PG_GETARG_DATUM(arg), "ttl", IDEM_SPAN_POSITIVE);
}

/* Null: wait as long as lock_timeout allows; else until a time (K5) */
IdemWait
idem_args_wait(FunctionCallInfo fcinfo, int arg)
{
	IdemWait wait = {.forever = true};

	if (!PG_ARGISNULL(arg))
	{
		wait.forever = false;
		wait.until = GetCurrentTimestamp() +
			idem_value_span(PG_GETARG_DATUM(arg), "wait", IDEM_SPAN_NOT_NEGATIVE);
	}
	return wait;
}

int64
idem_args_lease(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", "lease"),
				errdetail("Without an end, no other worker could take over from a worker that has died."),
				errhint("Pass the longest time that the work needs, such as '90 s'."));
	return idem_value_span(PG_GETARG_DATUM(arg), "lease", IDEM_SPAN_LEASE);
}

text *
idem_args_queue(FunctionCallInfo fcinfo, int arg)
{
	return idem_value_queue(fcinfo->args[arg]);
}

/* How long a procedure waits, in microseconds (A7) */
int64
idem_args_timeout(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "timeout", "Leave it out to wait for at most 30 seconds.");
	return idem_value_span(PG_GETARG_DATUM(arg), "timeout", IDEM_SPAN_NOT_NEGATIVE);
}

/* NULL if the argument is null */
text *
idem_args_worker(FunctionCallInfo fcinfo, int arg)
{
	text *worker;
	int len;

	if (PG_ARGISNULL(arg))
		return NULL;
	worker = PG_GETARG_TEXT_PP(arg);
	len = VARSIZE_ANY_EXHDR(worker);
	if (len < 1 || len > IDEM_MAX_WORKER_LEN)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid length of worker name"),
				errdetail("The name has %d bytes; it must have between 1 and %d.", len, IDEM_MAX_WORKER_LEN),
				errhint("Use a name that only one process has at a time, for example host name and process id, or leave it out."));
	return worker;
}

/* 0 if the argument is null */
int
idem_args_max_attempts(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return 0;
	if (PG_GETARG_INT32(arg) < 1)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "max_attempts"),
				errdetail("The number is %d; it must be at least 1.", PG_GETARG_INT32(arg)),
				errhint("Leave it out for the default."));
	return PG_GETARG_INT32(arg);
}

/* 0 if the argument is null, as for a key that was claimed without a lease */
int64
idem_args_optional_token(FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return 0;
	idem_value_check_token(PG_GETARG_INT64(arg));
	return PG_GETARG_INT64(arg);
}

int64
idem_args_token(FunctionCallInfo fcinfo, int arg)
{
	int64 token = idem_args_optional_token(fcinfo, arg);

	if (token == 0)
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("fencing token must not be null"),
				errdetail("The token proves that the caller still has the lease."),
				errhint("Pass the token that idem_lease() or idem_fetch() has returned."));
	return token;
}

/* Raise an error if the argument is null */
void
idem_args_require(FunctionCallInfo fcinfo, int arg, const char *name, const char *hint)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				errmsg("\"%s\" must not be null", name),
				errdetail("The function requires this argument."),
				errhint("%s", hint));
}

int64
idem_args_job_id(FunctionCallInfo fcinfo, int arg)
{
	idem_args_require(fcinfo, arg, "job_id",
					  "Pass the number that idem_enqueue() or idem_fetch() has returned.");
	return PG_GETARG_INT64(arg);
}

/* Raise the error for arguments that need or exclude one another; arg: one of them */
void
idem_args_refuse_combination(const char *arg, const char *detail, const char *hint)
{
	ereport(ERROR,
			errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			errmsg("invalid combination of arguments with \"%s\"", arg),
			errdetail("%s", detail),
			errhint("%s", hint));
}

/* How many jobs one call processes at most */
int
idem_args_max_jobs(FunctionCallInfo fcinfo, int arg, int limit)
{
	idem_args_require(fcinfo, arg, "max_jobs", "Leave it out for the default.");
	if (PG_GETARG_INT32(arg) < 1 || PG_GETARG_INT32(arg) > limit)
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "max_jobs"),
				errdetail("The number is %d; it must be between 1 and %d.", PG_GETARG_INT32(arg), limit),
				errhint("Leave it out for the default."));
	return PG_GETARG_INT32(arg);
}

/* When a job is due; the argument is not null */
TimestampTz
idem_args_run_at(FunctionCallInfo fcinfo, int arg)
{
	TimestampTz run_at = PG_GETARG_TIMESTAMPTZ(arg);

	if (TIMESTAMP_NOT_FINITE(run_at))
		ereport(ERROR,
				errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				errmsg("invalid value of \"%s\"", "run_at"),
				errdetail("The time must be finite."),
				errhint("Leave it out, or pass now() for a job that is due at once."));
	return run_at;
}
