/*
 * testing.h
 *		For idem_verify(): what a run of a handler has changed.
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

/* changes.c */
extern HTAB *idem_changes_mark(void);
extern List *idem_changes_between(HTAB *before, HTAB *after);
extern void idem_changes_compare(IdemTableChange *change, CommandId before, CommandId after,
								 int64 max_size);
extern int idem_changes_look_at_jsonb(Jsonb *value);

#endif /* IDEM_TESTING_H */
