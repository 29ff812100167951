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

/* In queries */
#define THIS_DATABASE "(SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())"

/* A condition is asked again and again; what it sets as state tells how far it is. */
typedef bool (*Condition)(Cutover *cutover, char **state);

/* idem_cutover.c */
extern void idem_cutover_stop(void) NORETURN;

/* checks.c */
extern void checks_run(Cutover *cutover);

/* steps.c */
extern void steps_run_named(Server *server, const char *before, const char *name,
							const char *after);
extern bool steps_wait_quietly(Cutover *cutover, const char *what, Condition is_met,
							   char **state);
extern void steps_wait_until(Cutover *cutover, const char *what, Condition is_met);
extern bool steps_is_read_only(Cutover *cutover);
extern int steps_end_sessions(Cutover *cutover);
extern bool steps_have_sessions_ended(Cutover *cutover, char **state);
extern char *steps_list_prepared(Server *server);
extern bool steps_has_received(Cutover *cutover, char **state);
extern void steps_set_read_only(Cutover *cutover);
extern void steps_flush_wal(Cutover *cutover);
extern void steps_note_position(Cutover *cutover);
extern void steps_receive_all(Cutover *cutover);
extern void steps_compare_tables(Cutover *cutover);

/* sequences.c */
extern void sequences_copy(Cutover *cutover, int *count);

/* drop.c */
extern char *drop_read_mark(Cutover *cutover);
extern void drop_refuse_foreign_mark(Cutover *cutover);
extern char *drop_marked_slot(Cutover *cutover, char **lsn);
extern void drop_remove_mark(Cutover *cutover);
extern bool drop_exists_slot(Cutover *cutover, const char *slot);
extern bool drop_is_slot_in_use(Cutover *cutover, char **state);
extern void drop_put_back(Cutover *cutover, const char *lsn);
extern void drop_slot(Cutover *cutover, const char *slot, const char *publications);
extern void drop_end_subscription(Cutover *cutover);

#endif
