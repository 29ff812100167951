/*
 * common.h
 *		What the programs idem_move and idem_cutover share: connections, queries, messages,
 *		signals, progress.
 *
 * The programs use libpq and the C library only.  postgres_fe.h is not included: it replaces
 * printf() with a function of libpgport, which a server need not have installed.
 *
 * Messages contain names and errors that roles other than the caller have chosen.  So no text
 * reaches a terminal but through common_print() and its callers, which escape control
 * characters, and end a line only at their own end.
 *
 * The programs are short: memory of results and texts is freed where a loop uses it, and
 * otherwise when the program ends.
 */
#ifndef IDEM_COMMON_H
#define IDEM_COMMON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "libpq-fe.h"

#define PRINTF_ARGS(text, first) __attribute__((format(printf, text, first)))
#define NORETURN				 __attribute__((noreturn))

enum
{
	EXIT_STOPPED = 1, /* the program has not done what it should */
	EXIT_USAGE = 2,	  /* wrong arguments */
};

/* A connection to one of the two databases */
typedef struct Server
{
	const char *name; /* for messages: "source" */
	PGconn *conn;
	PGcancel *cancel;
	char sqlstate[6]; /* of the last error, or empty */
	char *message;	  /* of the last error: severity, SQLSTATE, text; NULL if there was none */
	char *detail;	  /* detail and hint of it; NULL if there are none */
} Server;

/* A setting of a session that a program needs beside those that common_connect() makes */
typedef struct Setting
{
	const char *name;
	const char *value;
} Setting;

/* messages */
extern void common_begin(const char *program, int (*end)(void));
extern void common_print(FILE *stream, const char *format, ...) PRINTF_ARGS(2, 3);
extern void common_warn(const char *format, ...) PRINTF_ARGS(1, 2);
extern void common_die(const char *format, ...) PRINTF_ARGS(1, 2) NORETURN;
extern void common_wrong_use(const char *format, ...) PRINTF_ARGS(1, 2) NORETURN;
extern void common_print_version(void);

/* text */
extern void *common_alloc(size_t size);
extern char *common_copy(const char *text);
extern char *common_format(const char *format, ...) PRINTF_ARGS(1, 2);
extern bool common_number(const char *text, int64_t min, int64_t max, int64_t *number);

/* connections */
extern void common_connect(Server *server, const char *name, const char *conninfo,
						   const Setting *settings);
extern void common_set(Server *server, const char *name, const char *value, bool local);
extern void common_disconnect(Server *server);
extern char *common_quote_name(Server *server, const char *name);
extern char *common_quote_value(Server *server, const char *value);

/* queries; the values of the parameters follow their number, as const char * */
extern PGresult *common_attempt(Server *server, const char *sql, int nparams, ...);
extern PGresult *common_query(Server *server, const char *sql, int nparams, ...);
extern void common_run(Server *server, const char *sql, int nparams, ...);
extern char *common_value(Server *server, const char *sql, int nparams, ...);
extern bool common_is_true(Server *server, const char *sql, int nparams, ...);
extern const char *common_field(const PGresult *result, int row, const char *column);
extern void common_note_error(Server *server, const PGresult *result);
extern void common_raise(Server *server) NORETURN;
extern bool common_try(void (*work)(void *), void *argument, Server *const *servers, int nservers,
					   int attempts);

/* signals, time, progress */
extern void common_check_signals(void);
extern void common_sleep(int milliseconds);
extern double common_now(void);
extern void common_progress(const char *what, int done, int all, uint64_t rows);
extern void common_end_progress(void);

#endif
