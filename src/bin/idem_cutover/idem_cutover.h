/*
 * idem_cutover.h
 *		What the files of the program share.
 */
#ifndef IDEM_CUTOVER_H
#define IDEM_CUTOVER_H

#include "common.h"

/* Exit statuses beside EXIT_STOPPED and EXIT_USAGE */
enum
{
	EXIT_READ_ONLY = 3, /* the publisher is read-only, and nothing is lost */
	EXIT_DROPPED = 4,	/* the subscription may be gone */
};

typedef struct Cutover
{
	/* arguments */
	const char *publisher_conninfo;
	const char *subscriber_conninfo;
	const char *subscription;
	bool check; /* only look */
	bool abort;
	bool partial;
	int64_t until;
	int64_t timeout;
	int64_t margin;

	Server publisher;
	Server subscriber;
	int status;	  /* with which the program ends if something fails */
	int problems; /* that the checks have found */

	/* the subscription; the slot is null if there is none, or if step 5 has taken it away */
	bool is_enabled;
	char *slot;
	char *publications; /* as an array of text */
	char *origin;

	char *since;	  /* sessions of the publisher from before may write */
	char *lsn;		  /* the subscriber has to receive all up to here */
	bool is_detached; /* step 5 has taken the slot away from the subscription */
	bool has_left;	  /* changes that the subscriber lacks are in the slot */
} Cutover;

/* checks.c */
extern void checks_run(Cutover *cutover);

/* sequences.c */
extern void sequences_copy(Cutover *cutover, int *count);

#endif
