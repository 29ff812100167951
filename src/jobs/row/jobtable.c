/*
 * jobtable.c
 *		The tables of jobs: their columns and indexes, the sequence of job numbers, and the
 *		mark of a cancel.
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "commands/sequence.h"
#include "nodes/makefuncs.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"

#include "jobs/row/job.h"

/* How many values of the sequence a session may have cached */
#define MAX_CACHED_VALUES 10000

/* The last field of the tag of a mark; any number but 0, 1 and 2 */
#define CANCEL_MARK 0x6964

static IdemTableCache jobs_cache;
static IdemTableCache keys_cache;
static IdemTableCache log_cache;

const IdemTableDef idem_jobtable_def = {IDEM_DECLARED_TABLE_jobs, .cache = &jobs_cache};
const IdemTableDef idem_jobtable_keys_def = {IDEM_DECLARED_TABLE_job_keys, .cache = &keys_cache};
const IdemTableDef idem_jobtable_log_def = {IDEM_DECLARED_TABLE_job_log, .cache = &log_cache};

void
idem_jobtable_open(IdemTable *jobs, LOCKMODE lockmode)
{
	idem_table_open(jobs, &idem_jobtable_def, lockmode);
}

void
idem_jobtable_open_keys(IdemTable *keys, LOCKMODE lockmode)
{
	idem_table_open(keys, &idem_jobtable_keys_def, lockmode);
}

void
idem_jobtable_open_log(IdemTable *log, LOCKMODE lockmode)
{
	idem_table_open(log, &idem_jobtable_log_def, lockmode);
}

static Oid
get_sequence(void)
{
	Oid sequence = get_relname_relid("jobs_job_id_seq", get_namespace_oid("idem", false));

	if (!OidIsValid(sequence))
		idem_version_mismatch("There is no sequence idem.jobs_job_id_seq.");
	return sequence;
}

/* Lock the sequence until the transaction ends; idem_jobtable_next_id() then waits for no lock */
void
idem_jobtable_lock_ids(void)
{
	LockRelationOid(get_sequence(), RowExclusiveLock);
}

/* Raise the error for a new job whose number a live job already has */
void
idem_jobtable_refuse_number(void)
{
	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("job number is already in use"),
			errdetail("The sequence idem.jobs_job_id_seq is behind the jobs."),
			errhint("Run the command that idem_doctor() returns in column \"fix\" for the check \"job numbers\"."));
}

/*
 * The next number, which carries the slot if there is or was a map (M6).  A session may have
 * cached values of the sequence from before the map (CACHE): skip them.  If there are many of
 * them, the sequence was set back.
 */
static int64
take_number(Oid sequence, int slot)
{
	int64 last_plain = idem_shard_last_plain();
	int64 value;

	for (int i = 0; i < MAX_CACHED_VALUES; i++)
	{
		CHECK_FOR_INTERRUPTS();
		value = nextval_internal(sequence, false);
		if (likely(value > last_plain))
			return idem_shard_number(value, slot);
	}
	idem_jobtable_refuse_number();
}

int64
idem_jobtable_next_id(int slot)
{
	return take_number(get_sequence(), slot);
}

/*
 * The last value that any session has taken from the sequence or has in its cache (M6); 0 if
 * there is none.  The caller has locked idem.jobs, so no session takes one meanwhile.
 */
int64
idem_jobtable_last_value(void)
{
	Relation sequence = relation_open(get_sequence(), RowExclusiveLock);
	Buffer buffer = ReadBuffer(sequence, 0);
	HeapTupleData tuple;
	ItemId item;
	Form_pg_sequence_data data;
	int64 value;

	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	item = PageGetItemId(BufferGetPage(buffer), FirstOffsetNumber);
	tuple.t_data = (HeapTupleHeader) PageGetItem(BufferGetPage(buffer), item);
	data = (Form_pg_sequence_data) GETSTRUCT(&tuple);
	value = data->is_called ? data->last_value : data->last_value - 1;
	UnlockReleaseBuffer(buffer);
	relation_close(sequence, NoLock);
	return value;
}

/*
 * M8: make the sequence go on above the value.  The caller has locked idem.jobs, so no session
 * takes a value meanwhile.  The sequence gets a new file, so that sessions forget the values
 * that they have cached; a rollback brings the old one back.
 */
void
idem_jobtable_lift_sequence(int64 above)
{
	AlterSeqStmt *stmt = makeNode(AlterSeqStmt);
	Oid user;
	int sec_context;
	Relation sequence;

	if (idem_jobtable_last_value() >= above)
		return;
	stmt->sequence = makeRangeVar("idem", "jobs_job_id_seq", -1);
	stmt->options = list_make1(
		makeDefElem("restart", (Node *) makeFloat(psprintf(INT64_FORMAT, above + 1)), -1));
	sequence = relation_open(get_sequence(), NoLock);
	GetUserIdAndSecContext(&user, &sec_context);
	SetUserIdAndSecContext(sequence->rd_rel->relowner, sec_context | SECURITY_LOCAL_USERID_CHANGE);
	relation_close(sequence, NoLock);
	(void) AlterSequence(NULL, stmt);
	SetUserIdAndSecContext(user, sec_context);
	CommandCounterIncrement();
}

/*
 * Number new jobs in the order of the array; *ord is the position of the current one, for the
 * error context.  M2: a key of another shard raises an error.
 */
void
idem_jobtable_next_ids(const text *scope, IdemNewJob *jobs, int n, int *ord)
{
	Oid sequence = get_sequence();

	for (*ord = 0; *ord < n; (*ord)++)
	{
		IdemNewJob *job = &jobs[*ord];

		job->slot = idem_shard_choose_slot(scope, job->key);
		job->job_id = take_number(sequence, job->slot);
	}
}

/*
 * The mark of a cancel: a lock on the number of the job, which a session holds while it
 * waits to cancel the job.  Meanwhile the job absorbs no more duplicates (J1), so that the
 * wait has an end.
 *
 * It is an advisory lock, because the tag of a lock on an object has no room for 64 bits beside the
 * table.  The last field of the tag keeps it apart from those that SQL can take, which have 1 or 2
 * there.
 */
static LOCKTAG
make_cancel_tag(int64 job_id)
{
	LOCKTAG tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (job_id >> 32), (uint32) job_id, CANCEL_MARK);
	return tag;
}

void
idem_jobtable_mark_cancel(int64 job_id)
{
	LOCKTAG tag = make_cancel_tag(job_id);

	(void) LockAcquire(&tag, RowExclusiveLock, false, false);
}

void
idem_jobtable_unmark_cancel(int64 job_id)
{
	LOCKTAG tag = make_cancel_tag(job_id);

	(void) LockRelease(&tag, RowExclusiveLock, false);
}

/* J1: does another transaction wait to cancel the job? */
bool
idem_jobtable_is_marked(int64 job_id)
{
	LOCKTAG tag = make_cancel_tag(job_id);

	if (LockAcquire(&tag, ShareLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return true;
	(void) LockRelease(&tag, ShareLock, false);
	return false;
}

/* H3: the processes of other sessions that wait to cancel the job; *n: how many */
int *
idem_jobtable_list_marks(int64 job_id, int *n)
{
	LOCKTAG tag = make_cancel_tag(job_id);
	int count;
	VirtualTransactionId *holders = GetLockConflicts(&tag, ShareLock, &count);
	int *pids = palloc((count + 1) * sizeof(int));

	*n = 0;
	for (int i = 0; i < count; i++)
	{
		int pid = idem_compat_vxid_pid(holders[i]);

		if (pid != 0)
			pids[(*n)++] = pid;
	}
	return pids;
}

/* Wait until no other transaction has the job marked, as long as lock_timeout allows */
void
idem_jobtable_wait_for_mark(int64 job_id)
{
	LOCKTAG tag = make_cancel_tag(job_id);

	(void) LockAcquire(&tag, ShareLock, false, false);
	(void) LockRelease(&tag, ShareLock, false);
}

/* Lookup by number in idem.jobs or idem.job_log */
IdemLookup
idem_jobtable_by_id(IdemTable *table, int64 job_id)
{
	IdemLookup lookup = {
		.index = table->pkey, .value = Int64GetDatum(job_id), .equal = F_INT8EQ};

	return lookup;
}

/*
 * The same for a number that the caller has given.  M2: a job of another shard raises an error,
 * so that a wrong shard is told from an old token.
 */
IdemLookup
idem_jobtable_by_number(IdemTable *table, int64 job_id)
{
	idem_shard_check_job(job_id);
	return idem_jobtable_by_id(table, job_id);
}

/* Lookup by the hash of the key in idem.jobs or idem.job_keys; index: one on that column */
IdemLookup
idem_jobtable_by_key(IdemTable *table, Relation index, int64 key_hash)
{
	IdemLookup lookup = {.index = index, .value = Int64GetDatum(key_hash), .equal = F_INT8EQ};

	return lookup;
}

/* The indexes that the functions need, beside the primary keys */
static const struct
{
	AttrNumber columns[4];
	int n;
	const char *missing;
	const char *hint;
} indexes[] = {
	[IDEM_INDEX_KEY] =
		{{IDEM_JOBS_KEY_HASH},
		 1,
		 "There is no index that finds the jobs of a key.",
		 "Run CREATE INDEX CONCURRENTLY ON idem.jobs (key_hash) WHERE key_hash IS NOT NULL."},
	[IDEM_INDEX_FETCH] =
		{{IDEM_JOBS_QUEUE, IDEM_JOBS_PRIORITY, IDEM_JOBS_RUN_AT, IDEM_JOBS_JOB_ID},
		 4,
		 "There is no index that orders the jobs as they are fetched.",
		 "Run CREATE INDEX CONCURRENTLY ON idem.jobs (queue, priority, run_at, job_id)."},
	[IDEM_INDEX_LOG_KEY] =
		{{IDEM_JOB_LOG_KEY_HASH, IDEM_JOB_LOG_ENDED_AT},
		 2,
		 "There is no index that finds the jobs of a key in the history.",
		 "Run CREATE INDEX CONCURRENTLY ON idem.job_log (key_hash, ended_at) WHERE key_hash IS NOT NULL."},
	[IDEM_INDEX_LOG_RETRY] = {
		{IDEM_JOB_LOG_RETRYABLE, IDEM_JOB_LOG_QUEUE, IDEM_JOB_LOG_STATE, IDEM_JOB_LOG_ENDED_AT},
		4,
		"There is no index that finds the jobs of a queue that can be retried.",
		"Run CREATE INDEX CONCURRENTLY ON idem.job_log (retryable, queue, state, ended_at) WHERE retryable IS NOT NULL."}};

/* An index of idem.jobs or idem.job_log; the one on the hash of a key is not unique (J7) */
Relation
idem_jobtable_index(IdemTable *table, IdemJobIndex which)
{
	return idem_table_find_index(table, indexes[which].columns, indexes[which].n,
								 indexes[which].missing, indexes[which].hint);
}
