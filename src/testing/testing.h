/*
 * testing.h
 *		For tests of applications: run a handler in a subtransaction, and find out what
 *		it has changed.
 *
 * verify.c, drain.c and reset.c have the SQL functions.  written.c finds the tables that a run
 * has written, content.c compares their content, and verdict.c puts what was found into words.
 */
#ifndef IDEM_TESTING_H
#define IDEM_TESTING_H

#include "nodes/pg_list.h"
#include "utils/hsearch.h"
#include "utils/jsonb.h"

#include "idem.h"

/*
 * Sum of the SHA-256 of many values, 64 bits at a time.  The order of the values does not
 * matter, and equal sums mean equal values.
 */
typedef struct IdemSum
{
	uint64 words[IDEM_SHA256_LEN / sizeof(uint64)];
} IdemSum;

/* What is the same for all runs of one transaction, and another one in a real second run (V4) */
typedef enum IdemMoment
{
	IDEM_MOMENT_NOW = 1, /* now() or statement_timestamp() */
	IDEM_MOMENT_XID = 2	 /* the transaction id */
} IdemMoment;

/* What a run has done to one column */
typedef struct IdemColumnChange
{
	NameData name;
	Oid type; /* of a domain: its base type */
	int32 typmod;
	bool is_ignored; /* dropped, or not compared */
	int moments;	 /* which of IdemMoment are in a row that was added */
	IdemSum added;
	IdemSum removed;
} IdemColumnChange;

/* How a run has changed a table */
typedef enum IdemChangeKind
{
	IDEM_CHANGE_ROWS,	   /* it has inserted, updated or deleted rows */
	IDEM_CHANGE_REWRITTEN, /* it has replaced the file of the table, as TRUNCATE does */
	IDEM_CHANGE_CREATED,
	IDEM_CHANGE_DROPPED,
	IDEM_CHANGE_CATALOG /* it has written this system catalog */
} IdemChangeKind;

/*
 * What a run has done to one table.  Of a table that was rewritten or created only the content
 * after the run is known: all its rows count as added.
 */
typedef struct IdemTableChange
{
	IdemChangeKind kind;
	Oid relid;
	const char *name;
	int64 inserted; /* as the statistics of the transaction count */
	int64 updated;
	int64 deleted;
	bool is_transient;		  /* a temporary table */
	bool is_history;		  /* idem.job_log */
	const char *not_compared; /* why the content was not compared; NULL: it was */
	int64 nadded;			  /* row versions */
	int64 nremoved;
	IdemSum added;
	IdemSum removed;
	int natts;
	IdemColumnChange *columns;
} IdemTableChange;

/* A row of the result of idem_verify() */
typedef struct IdemVerdict
{
	const char *check;
	const char *verdict;
	const char *object; /* NULL: none */
	const char *detail;
} IdemVerdict;

/* content.c */
extern void idem_content_compare(IdemTableChange *change, CommandId before, CommandId after,
								 int64 max_size);
extern void idem_content_replace_removed(IdemTableChange *change, const IdemTableChange *earlier);
extern int idem_content_look_at_jsonb(Jsonb *value);
extern bool idem_content_equals(const IdemSum *a, const IdemSum *b);

/* written.c */
extern HTAB *idem_written_mark(void);
extern List *idem_written_between(HTAB *before, HTAB *after);
extern IdemTableChange *idem_written_find(List *changes, Oid relid);

/* verdict.c */
extern void idem_verdict_add(List **verdicts, const char *check, const char *verdict,
							 const char *object, const char *detail);
extern void idem_verdict_result(List **verdicts, bool same, int moments);
extern void idem_verdict_soften(List *verdicts, int from);
extern void idem_verdict_second_run(List **verdicts, List *changes);
extern void idem_verdict_deferred(List **verdicts, List *first, List *both);
extern void idem_verdict_interrupted(List **verdicts, List *alone, List *again, bool same_result);

#endif /* IDEM_TESTING_H */
