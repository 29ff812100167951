/*
 * idem.h
 *		Version, limits, settings, clock and hashes, for every file of idem.
 *
 * Every folder of C files but admin has one header.  A header includes only headers of
 * lower layers, and this one is the lowest: see README.md in this directory.
 */
#ifndef IDEM_H
#define IDEM_H

#include "access/tupdesc.h"
#include "datatype/timestamp.h"
#include "fmgr.h"

#include "compat.h"
#include "errors.h"

#define IDEM_VERSION "0.5.0"

#define IDEM_MAX_KEY_LEN	   1024
#define IDEM_MAX_SCOPE_LEN	   255
#define IDEM_MAX_WORKER_LEN	   255
#define IDEM_MAX_QUEUE_LEN	   255
#define IDEM_MAX_CLEANUP_BATCH 1000000
#define IDEM_MAX_STATS		   100000
#define IDEM_MAX_WAITS		   1000000
#define IDEM_MAX_SAME_HASH	   32
#define IDEM_SHA256_LEN		   32

/* Values of idem.require_finish */
typedef enum IdemRequire
{
	IDEM_REQUIRE_OFF,
	IDEM_REQUIRE_AUTO,
	IDEM_REQUIRE_WARNING,
	IDEM_REQUIRE_ERROR
} IdemRequire;

/* guc.c */
extern int idem_guc_ttl;
extern char *idem_guc_scope;
extern char *idem_guc_headers;
extern char *idem_guc_owner;
extern int idem_guc_max_result_size;
extern int idem_guc_clock_offset;
extern bool idem_guc_allow_reset;
extern bool idem_guc_cleanup;
extern int idem_guc_cleanup_naptime;
extern int idem_guc_cleanup_batch_size;
extern bool idem_guc_log_duplicates;
extern int idem_guc_require_finish;
extern int idem_guc_stats_max;
extern int idem_guc_waits_max;
extern int idem_guc_look_after;
extern int idem_guc_drain_after;
extern void idem_guc_init(void);

/* clock.c */
extern TimestampTz idem_clock_now(void);
extern int64 idem_clock_age(TimestampTz since);
extern int64 idem_clock_steady(void);
extern int64 idem_clock_next_token(int64 last, TimestampTz now);
extern TimestampTz idem_clock_token_time(int64 token);

/* hash.c */
extern int64 idem_hash_name(const text *name_space, const text *name);
extern uint64 idem_hash_bytes(uint64 key_0, uint64 key_1, const void *bytes, Size len);

/* sha256.c */
extern void idem_sha256_hash(const void *data, size_t len, uint8 *digest);

/* version.c */
extern bool idem_version_desc_matches(TupleDesc desc, const Oid *types, int natts);
extern bool idem_version_is_equal(void);
pg_noreturn extern void idem_version_mismatch(const char *found);

/* xact.c, which lies above all folders */
extern void idem_xact_init(void);

#endif /* IDEM_H */
