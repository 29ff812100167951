/*
 * stats.c
 *		Counting, and the log of duplicates.
 *
 * What is counted are answers: a claim that is rolled back later has been
 * counted, like the rows that a rolled back INSERT leaves behind.  Where the
 * entry of the database or of a queue is each process finds out once; from then
 * on counting is adding to a variable that is mostly its own (shared.h).
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "common/hashfn.h"
#include "common/sha2.h"
#include "miscadmin.h"
#include "utils/memutils.h"

#include "stats/stats.h"

StaticAssertDecl((int) IDEM_STAT_CLAIMS == (int) IDEM_CLAIMED &&
					 (int) IDEM_STAT_BUSY == (int) IDEM_BUSY &&
					 (int) IDEM_STAT_REPLAYS == (int) IDEM_FINISHED &&
					 (int) IDEM_STAT_EXHAUSTED == (int) IDEM_EXHAUSTED,
				 "answers to claims are counted by their number");
StaticAssertDecl((int) IDEM_QUEUE_STAT_ENQUEUED == (int) IDEM_ENQUEUED &&
					 (int) IDEM_QUEUE_STAT_DONE == (int) IDEM_DONE,
				 "outcomes of enqueues are counted by their number");
StaticAssertDecl(IDEM_STAT_N <= IDEM_NCOUNTERS && IDEM_QUEUE_STAT_N <= IDEM_NCOUNTERS,
				 "there is a place for every counter");

/* Where this process counts for a queue; NULL: there is no room */
typedef struct KnownQueue
{
	struct KnownQueue *next;
	uint32 hash;
	IdemCounters *counters;
	uint32 held[IDEM_QUEUE_STAT_N];
	int len;
	char name[FLEXIBLE_ARRAY_MEMBER];
} KnownQueue;

/* So many at most; then they are forgotten, and found again when they are needed */
#define MAX_KNOWN_QUEUES 1024

static KnownQueue *known_queues[256];
static int nknown_queues = 0;

/* Is what is counted held back until it is known whether it was committed? */
static bool is_held = false;
static uint32 held[IDEM_STAT_N];

static IdemCounters *
my_stripe(IdemEntry *entry)
{
	return entry ? &entry->stripes[idem_compat_proc_number() % IDEM_NSTRIPES] : NULL;
}

/* The entry of this database; NULL: there is no room */
static IdemEntry *
my_entry(void)
{
	static bool is_known = false;
	static IdemEntry *entry = NULL;

	if (!is_known)
	{
		entry = idem_shared_entry(MyDatabaseId, NULL);
		is_known = true;
	}
	return entry;
}

/* Let the launcher know that there is an extension here (W5), if it thinks that there is none */
void
idem_stats_note_use(void)
{
	IdemEntry *entry = idem_shared != NULL ? my_entry() : NULL;

	if (entry != NULL && unlikely(!entry->used))
		entry->used = true;
}

static void
add_up(IdemStat counter, int n)
{
	IdemCounters *counters;

	if (idem_shared == NULL)
		return;
	idem_stats_note_use();
	counters = my_stripe(my_entry());
	if (counters != NULL)
		pg_atomic_fetch_add_u64(&counters->values[counter], n);
}

void
idem_stats_count(IdemStat counter)
{
	if (unlikely(is_held))
		held[counter]++;
	else
		add_up(counter, 1);
}

static void
forget_queues(void)
{
	for (int i = 0; i < (int) lengthof(known_queues); i++)
	{
		while (known_queues[i] != NULL)
		{
			KnownQueue *known = known_queues[i];

			known_queues[i] = known->next;
			pfree(known);
		}
	}
	nknown_queues = 0;
}

static KnownQueue *
get_known_queue(const text *queue)
{
	int len = VARSIZE_ANY_EXHDR(queue);
	uint32 hash = hash_bytes((const unsigned char *) VARDATA_ANY(queue), len);
	KnownQueue **bucket = &known_queues[hash % lengthof(known_queues)];
	KnownQueue *known;

	for (known = *bucket; known != NULL; known = known->next)
	{
		if (known->hash == hash && known->len == len && memcmp(known->name, VARDATA_ANY(queue), len) == 0)
			return known;
	}
	if (nknown_queues >= MAX_KNOWN_QUEUES && !is_held)
		forget_queues();
	nknown_queues++;
	known = MemoryContextAllocZero(TopMemoryContext, offsetof(KnownQueue, name) + len);
	known->hash = hash;
	known->counters = my_stripe(idem_shared_entry(MyDatabaseId, queue));
	known->len = len;
	memcpy(known->name, VARDATA_ANY(queue), len);
	known->next = *bucket;
	*bucket = known;
	return known;
}

void
idem_stats_count_queue(const text *queue, IdemQueueStat counter)
{
	KnownQueue *known;

	if (idem_shared == NULL)
		return;
	idem_stats_note_use();
	known = get_known_queue(queue);
	if (unlikely(is_held))
		known->held[counter]++;
	else if (known->counters != NULL)
		pg_atomic_fetch_add_u64(&known->counters->values[counter], 1);
}

/*
 * The worker tries again and again what has failed, so what it counts is held
 * back until it has committed, or not.
 */
void
idem_stats_hold(void)
{
	is_held = true;
}

static void
let_go_of_queue(KnownQueue *known, bool committed)
{
	for (int i = 0; i < IDEM_QUEUE_STAT_N; i++)
	{
		if (committed && known->held[i] != 0 && known->counters != NULL)
			pg_atomic_fetch_add_u64(&known->counters->values[i], known->held[i]);
		known->held[i] = 0;
	}
}

void
idem_stats_let_go(bool committed)
{
	is_held = false;
	for (int i = 0; i < IDEM_STAT_N; i++)
	{
		if (committed && held[i] != 0)
			add_up(i, held[i]);
		held[i] = 0;
	}
	for (int i = 0; i < (int) lengthof(known_queues); i++)
	{
		for (KnownQueue *known = known_queues[i]; known != NULL; known = known->next)
			let_go_of_queue(known, committed);
	}
}

/* The first 16 digits of the SHA-256 of what stands before the key, a line feed, and the key */
static void
hash_key(const text *name_space, const text *key, char *hex)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);
	uint8 digest[PG_SHA256_DIGEST_LENGTH];

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (uint8 *) VARDATA_ANY(name_space), VARSIZE_ANY_EXHDR(name_space)) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) "\n", 1) < 0 ||
		pg_cryptohash_update(ctx, (uint8 *) VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key)) < 0 ||
		pg_cryptohash_final(ctx, digest, sizeof(digest)) < 0)
		elog(ERROR, "could not compute a hash of a key: %s", pg_cryptohash_error(ctx));
	pg_cryptohash_free(ctx);
	for (int i = 0; i < 8; i++)
		sprintf(hex + 2 * i, "%02x", digest[i]);
}

/* One line in the log, without the statement, which may show the key */
static void
log_duplicate(const char *kind, const char *outcome, const text *name_space, const text *key)
{
	char hex[17];

	hash_key(name_space, key, hex);
	ereport(LOG_SERVER_ONLY,
			errcode(ERRCODE_SUCCESSFUL_COMPLETION),
			errmsg("idem duplicate: kind=%s outcome=%s key_hash=%s", kind, outcome, hex),
			errhidestmt(true),
			errhidecontext(true));
}

/* Count the answer to a claim */
void
idem_stats_count_claim(const IdemClaim *claim, IdemStatus status)
{
	idem_stats_count((IdemStat) status);
	if (unlikely(idem_guc_log_duplicates) &&
		(status == IDEM_FINISHED || status == IDEM_BUSY || status == IDEM_PARKED || status == IDEM_EXHAUSTED))
		log_duplicate(claim->lease ? "lease" : "claim", idem_keyrow_status_name(status), claim->key.scope, claim->key.key);
}

/* Count the outcome of an enqueue */
void
idem_stats_count_enqueue(const text *queue, const text *key, IdemOutcome outcome)
{
	idem_stats_count_queue(queue, (IdemQueueStat) outcome);
	if (unlikely(idem_guc_log_duplicates) && outcome != IDEM_ENQUEUED)
		log_duplicate("enqueue", idem_dedup_outcome_name(outcome), queue, key);
}

/* Count a duplicate that is refused with an error */
void
idem_stats_count_refused(const text *queue, const text *key)
{
	idem_stats_count_queue(queue, IDEM_QUEUE_STAT_REFUSED);
	if (unlikely(idem_guc_log_duplicates))
		log_duplicate("enqueue", "refused", queue, key);
}
