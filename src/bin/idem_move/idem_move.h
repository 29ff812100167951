/*
 * idem_move.h
 *		The parts of idem_move, in their order: maps, guard, copy, check, idem_move.
 *
 * "Source" is the database that has the slots, "target" the one that will have them.
 */
#ifndef IDEM_MOVE_H
#define IDEM_MOVE_H

#include "common.h"

#define NSLOTS 1024

typedef struct Slots
{
	bool has[NSLOTS];
} Slots;

/* One of the two databases, with its row of idem.shard as read by maps_read() */
typedef struct Database
{
	Server server;
	char *id;		   /* what idem_shard_id() returns */
	char *by;		   /* what slots are computed from: key or scope */
	char *number;	   /* of the shard, or NULL */
	int64_t jobs_from; /* the first job number that carries a slot */
	Slots slots;	   /* that it has */
	Slots given;	   /* that it has given up, and whose rows it still has */
	char *receiver;	   /* id of the database for which they were given up, or NULL */
	Slots taken;	   /* that it has taken from a database that may still have their rows */
	char *sender;	   /* id of that database, or NULL */
	char *version;	   /* of the row: every change makes a new one */
} Database;

/* A table of the user, from --table */
typedef struct UserTable
{
	char *schema;
	char *name;
	char *qualified; /* schema and name, quoted */
	char *shown;	 /* the same, for messages */
	char *slot;		 /* an expression of the caller */
	char *columns;	 /* that are copied, quoted */
} UserTable;

typedef enum Mode
{
	MODE_MOVE,
	MODE_CHECK,
	MODE_ABORT,
} Mode;

typedef struct Move
{
	Database source;
	Database target;
	Slots wanted;
	Mode mode;
	int batch;
	int done; /* slots that have moved, of */
	int all;
	const char *lock_timeout;
	const char *switch_command;
	const char *stop_after;
	bool standby_wait;
	bool trust_owners;
	bool schedules;
	UserTable *tables;
	int ntables;
} Move;

/* The tables of idem whose rows move */
typedef enum IdemTableKind
{
	TABLE_KEYS,
	TABLE_JOBS,
	TABLE_JOB_KEYS,
	TABLE_JOB_LOG,
	NTABLES,
} IdemTableKind;

/* maps.c */
extern const char *const maps_tables[NTABLES];
extern bool maps_parse(const char *text, Slots *slots);
extern char *maps_format(const Slots *slots);
extern int maps_count(const Slots *slots);
extern Slots maps_and(const Slots *a, const Slots *b);
extern Slots maps_or(const Slots *a, const Slots *b);
extern Slots maps_minus(const Slots *a, const Slots *b);
extern Slots maps_first(const Slots *slots, int count);
extern bool maps_is_empty(const Slots *slots);
extern bool maps_is_id(const char *a, const char *b);
extern void maps_read(Database *database);
extern void maps_lock(Database *database, const char *mode);
extern char *maps_condition(const Database *database, int table, const Slots *slots);
extern char *maps_user_condition(const UserTable *table, const Slots *slots);

/* guard.c */
extern char *guard_columns(Server *server, const char *qualified);
extern void guard_lock(const Move *move, Server *server);
extern bool guard_has_rows(Server *server, const UserTable *table, const Slots *slots);

/* copy.c */
extern void copy_batch(Move *move, const Slots *slots, const char *above, uint64_t *rows);
extern bool copy_has_duplicates(Move *move, const UserTable *table, const Slots *slots,
								const char *columns);
extern bool copy_is_last(const Move *move, const Slots *slots);

/* precheck.c */
extern void precheck_server(Server *server);
extern void precheck_alone(const Move *move, Database *database);
extern void precheck_databases(Move *move);
extern void precheck_tables(Move *move);
extern void precheck_everything(Move *move, const Slots *todo);
extern void precheck_copy_queues(Move *move);

#endif
