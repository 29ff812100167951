/*
 * common.c
 *		What the programs idem_move and idem_cutover share; common.h says more.
 *
 * Trust: the caller trusts the arguments, the environment and the superusers of both servers.
 * Nothing else is trusted: the owner of a database can set settings for it, create functions and
 * operators in schemas of its search_path, and name objects as he likes.  So common_connect()
 * begins with SET commands, which look nothing up, and all later queries find nothing but what is
 * in pg_catalog or has a schema.
 *
 * Signals: the handler asks the servers to cancel what they are doing for this program.  The
 * query then fails, and the program ends as it does after any error.  The second signal ends the
 * program at once.
 */
#include <errno.h>
#include <locale.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#define MAX_SERVERS 4
#define MAX_PARAMS	16

static const char *program = "idem";
/* Says how to go on, and returns the exit status; NULL: EXIT_STOPPED */
static int (*end_function)(void) = NULL;

static volatile sig_atomic_t last_signal = 0;
/* For the handler: what is to be canceled */
static PGcancel *volatile cancels[MAX_SERVERS];

/* Where an error goes on that only asks to try again; NULL: nowhere */
static sigjmp_buf *retry = NULL;

static bool progress_shown = false;

/*
 * Messages
 */

/* The length of the UTF-8 character at the text if a terminal may get it, otherwise 0 */
static int
printable_length(const unsigned char *text)
{
	int length = 1;
	unsigned int code = text[0];

	if (code >= 0xc2 && code <= 0xf4)
	{
		length = code < 0xe0 ? 2 : code < 0xf0 ? 3 :
												 4;
		code &= 0x7fU >> length;
	}
	else if (code >= 0x80)
		return 0;
	for (int i = 1; i < length; i++)
	{
		if ((text[i] & 0xc0) != 0x80)
			return 0;
		code = code << 6 | (text[i] & 0x3f);
	}
	/* control characters of 7 and 8 bits; characters that draw nothing or turn the direction */
	if (code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c ||
		(code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
		(code >= 0x2060 && code <= 0x2069) || code == 0xfeff)
		return 0;
	return length;
}

/* Print a line.  Bytes that could do something to a terminal are printed as \xNN. */
static void print_line(FILE *stream, const char *prefix, const char *format, va_list args)
	PRINTF_ARGS(3, 0);
static void print_error(const char *format, va_list args) PRINTF_ARGS(1, 0);

static void
print_line(FILE *stream, const char *prefix, const char *format, va_list args)
{
	char *text = NULL;

	common_end_progress();
	if (vasprintf(&text, format, args) < 0)
		abort();
	fputs(prefix, stream);
	for (const unsigned char *c = (const unsigned char *) text; *c != '\0';)
	{
		int length = printable_length(c);

		if (length > 0)
			fwrite(c, 1, (size_t) length, stream);
		else
			fprintf(stream, "\\x%02x", *c);
		c += length > 0 ? length : 1;
	}
	fputc('\n', stream);
	fflush(stream);
	free(text);
}

static void
print_error(const char *format, va_list args)
{
	char *prefix = common_format("%s: ", program);

	print_line(stderr, prefix, format, args);
	free(prefix);
}

void
common_print(FILE *stream, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	print_line(stream, "", format, args);
	va_end(args);
}

void
common_warn(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	print_error(format, args);
	va_end(args);
}

static void finish_program(void) NORETURN;

/* The end after an error that has been printed */
static void
finish_program(void)
{
	exit(end_function == NULL ? EXIT_STOPPED : end_function());
}

void
common_die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	print_error(format, args);
	va_end(args);
	finish_program();
}

void
common_wrong_use(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	print_error(format, args);
	va_end(args);
	common_print(stderr, "Try \"%s --help\".", program);
	exit(EXIT_USAGE);
}

void
common_print_version(void)
{
	printf("%s (idem) %s\n", program, IDEM_VERSION);
}

/*
 * Text
 */

static void out_of_memory(void) NORETURN;

static void
out_of_memory(void)
{
	fputs("out of memory\n", stderr);
	finish_program();
}

/* Memory that is zero */
void *
common_alloc(size_t size)
{
	void *memory = calloc(1, size);

	if (memory == NULL)
		out_of_memory();
	return memory;
}

char *
common_copy(const char *text)
{
	char *copy = text == NULL ? NULL : strdup(text);

	if (copy == NULL && text != NULL)
		out_of_memory();
	return copy;
}

char *
common_format(const char *format, ...)
{
	va_list args;
	char *text = NULL;

	va_start(args, format);
	if (vasprintf(&text, format, args) < 0)
		out_of_memory();
	va_end(args);
	return text;
}

/* Is the text a whole number between the two? */
bool
common_number(const char *text, int64_t min, int64_t max, int64_t *number)
{
	char *end;
	long long value;

	if (text[0] < '0' || text[0] > '9')
		return false;
	errno = 0;
	value = strtoll(text, &end, 10);
	if (*end != '\0' || errno != 0 || value < min || value > max)
		return false;
	*number = value;
	return true;
}

/*
 * Signals, time, progress
 */

static void
note_signal(int signal)
{
	int saved_errno = errno;

	last_signal = signal;
	for (int i = 0; i < MAX_SERVERS; i++)
	{
		char error[256];

		if (cancels[i] != NULL)
			PQcancel(cancels[i], error, sizeof(error));
	}
	errno = saved_errno;
}

/* Call this between steps: a signal that has come ends the program here. */
void
common_check_signals(void)
{
	if (last_signal != 0)
		common_die("stopped by signal %d (%s)", (int) last_signal, strsignal(last_signal));
}

void
common_sleep(int milliseconds)
{
	struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};

	common_check_signals();
	nanosleep(&time, NULL);
	common_check_signals();
}

/* Seconds, from any point on */
double
common_now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double) time.tv_sec + (double) time.tv_nsec / 1e9;
}

/*
 * Show how far a long step is: as a bar on a terminal, otherwise as a line every ten seconds.
 * Of "all" slots, "done" have been moved; this step has handled so many rows.
 */
void
common_progress(const char *what, int done, int all, uint64_t rows)
{
	static const char *current = NULL;
	static double began;
	static double said;
	static uint64_t first;
	double now = common_now();
	bool is_terminal = isatty(STDERR_FILENO);
	char bar[21];

	if (current != what || rows < first)
	{
		current = what;
		began = said = now;
		first = rows;
	}
	if (now - said < (is_terminal ? 0.2 : 10.0))
		return;
	said = now;
	memset(bar, ' ', sizeof(bar));
	bar[sizeof(bar) - 1] = '\0';
	if (all > 0)
		memset(bar, '#', (sizeof(bar) - 1) * (size_t) done / (size_t) all);
	if (is_terminal)
		fprintf(stderr, "\r\033[K[%s] ", bar);
	fprintf(stderr, "%d of %d slots, %s: %llu rows, %.0f rows/s", done, all, what,
			(unsigned long long) rows, (double) (rows - first) / (now - began));
	if (!is_terminal)
		fputc('\n', stderr);
	fflush(stderr);
	progress_shown = is_terminal;
}

/* The next line does not follow the bar. */
void
common_end_progress(void)
{
	if (progress_shown)
		fputs("\r\033[K", stderr);
	progress_shown = false;
}

/*
 * Call this first.  The function "end" is called after an error was printed; it says how to go on,
 * and returns the exit status.
 */
void
common_begin(const char *name, int (*end)(void))
{
	struct sigaction action = {.sa_handler = note_signal, .sa_flags = (int) SA_RESETHAND};

	program = name;
	end_function = end;
	/* messages of libpq; numbers are printed as in C */
	setlocale(LC_MESSAGES, "");
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGHUP, &action, NULL);
}

/*
 * Queries
 */

/* Remember the error of the result, or of the connection. */
void
common_note_error(Server *server, const PGresult *result)
{
	const char *sqlstate = result == NULL ? NULL : PQresultErrorField(result, PG_DIAG_SQLSTATE);
	const char *primary = result == NULL ? NULL :
										   PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
	const char *detail = result == NULL ? NULL : PQresultErrorField(result, PG_DIAG_MESSAGE_DETAIL);
	const char *hint = result == NULL ? NULL : PQresultErrorField(result, PG_DIAG_MESSAGE_HINT);

	free(server->message);
	free(server->detail);
	server->detail = NULL;
	/* 08006: connection failure */
	snprintf(server->sqlstate, sizeof(server->sqlstate), "%s", sqlstate == NULL ? "08006" : sqlstate);
	if (primary == NULL)
	{
		size_t length;

		/* libpq writes several lines */
		server->message = common_copy(PQerrorMessage(server->conn));
		for (char *c = server->message; *c != '\0'; c++)
		{
			if (*c == '\n' || *c == '\t')
				*c = ' ';
		}
		length = strlen(server->message);
		while (length > 0 && server->message[length - 1] == ' ')
			server->message[--length] = '\0';
		return;
	}
	server->message = common_format("%s (SQLSTATE %s)", primary, server->sqlstate);
	if (detail != NULL || hint != NULL)
		server->detail = common_format("%s%s%s%s%s", detail == NULL ? "" : "Detail: ",
									   detail == NULL ? "" : detail,
									   detail != NULL && hint != NULL ? " " : "",
									   hint == NULL ? "" : "Hint: ", hint == NULL ? "" : hint);
}

/*
 * Another session has held a lock for too long, or was in the way: nothing has changed, and the
 * same work can succeed later.
 */
static bool
is_transient(const char *sqlstate)
{
	return strcmp(sqlstate, "55P03") == 0 || strcmp(sqlstate, "40P01") == 0 ||
		strcmp(sqlstate, "40001") == 0;
}

/* Raise the error that was noted: back to common_try(), or the end of the program. */
void
common_raise(Server *server)
{
	common_warn("%s: %s", server->name, server->message == NULL ? "unknown error" : server->message);
	if (server->detail != NULL)
		common_warn("%s: %s", server->name, server->detail);
	common_check_signals();
	if (retry != NULL && is_transient(server->sqlstate))
		siglongjmp(*retry, 1);
	finish_program();
}

static PGresult *
send_query(Server *server, const char *sql, int nparams, va_list args)
{
	const char *values[MAX_PARAMS];
	PGresult *result;

	if (nparams > MAX_PARAMS)
		abort();
	common_check_signals();
	for (int i = 0; i < nparams; i++)
		values[i] = va_arg(args, const char *);
	result = PQexecParams(server->conn, sql, nparams, NULL, values, NULL, NULL, 0);
	server->sqlstate[0] = '\0';
	if (PQresultStatus(result) == PGRES_TUPLES_OK || PQresultStatus(result) == PGRES_COMMAND_OK)
		return result;
	common_note_error(server, result);
	PQclear(result);
	return NULL;
}

/*
 * The result of the query, or NULL after an error, which server->sqlstate and server->message
 * tell.  Nothing is printed.
 */
PGresult *
common_attempt(Server *server, const char *sql, int nparams, ...)
{
	va_list args;
	PGresult *result;

	va_start(args, nparams);
	result = send_query(server, sql, nparams, args);
	va_end(args);
	common_check_signals();
	return result;
}

static PGresult *
must_query(Server *server, const char *sql, int nparams, va_list args)
{
	PGresult *result = send_query(server, sql, nparams, args);

	if (result == NULL)
		common_raise(server);
	return result;
}

/* The result of the query; an error is raised. */
PGresult *
common_query(Server *server, const char *sql, int nparams, ...)
{
	va_list args;
	PGresult *result;

	va_start(args, nparams);
	result = must_query(server, sql, nparams, args);
	va_end(args);
	return result;
}

/* A command, or a query whose result does not matter */
void
common_run(Server *server, const char *sql, int nparams, ...)
{
	va_list args;

	va_start(args, nparams);
	PQclear(must_query(server, sql, nparams, args));
	va_end(args);
}

static char *
only_value(Server *server, PGresult *result)
{
	char *value = NULL;

	if (PQnfields(result) != 1 || PQntuples(result) > 1)
		common_die("%s: a query returned %d rows of %d columns instead of one value", server->name,
				   PQntuples(result), PQnfields(result));
	if (PQntuples(result) == 1 && !PQgetisnull(result, 0, 0))
		value = common_copy(PQgetvalue(result, 0, 0));
	PQclear(result);
	return value;
}

/* The one value of the query; NULL if it is null or there is no row */
char *
common_value(Server *server, const char *sql, int nparams, ...)
{
	va_list args;
	PGresult *result;

	va_start(args, nparams);
	result = must_query(server, sql, nparams, args);
	va_end(args);
	return only_value(server, result);
}

bool
common_is_true(Server *server, const char *sql, int nparams, ...)
{
	va_list args;
	char *value;
	bool is_true;

	va_start(args, nparams);
	value = only_value(server, must_query(server, sql, nparams, args));
	va_end(args);
	is_true = value != NULL && strcmp(value, "t") == 0;
	free(value);
	return is_true;
}

/* A field of the result, or NULL if it is null.  It lives as long as the result. */
const char *
common_field(const PGresult *result, int row, const char *column)
{
	int number = PQfnumber(result, column);

	if (number < 0 || row >= PQntuples(result))
		common_die("a result lacks column \"%s\" or row %d", column, row);
	return PQgetisnull(result, row, number) ? NULL : PQgetvalue(result, row, number);
}

/* End a COPY that an error has left under way. */
static void
end_copy(Server *server)
{
	while (PQtransactionStatus(server->conn) == PQTRANS_ACTIVE)
	{
		PGresult *result = PQgetResult(server->conn);
		char *line = NULL;

		if (PQresultStatus(result) == PGRES_COPY_IN)
			PQputCopyEnd(server->conn, "another attempt");
		while (PQresultStatus(result) == PGRES_COPY_OUT &&
			   PQgetCopyData(server->conn, &line, 0) > 0)
			PQfreemem(line);
		PQclear(result);
	}
}

/*
 * Do the work, again and again if an error says that this can help.  Before each new attempt the
 * transactions of these servers are rolled back.  False if so many attempts have not helped.
 */
bool
common_try(void (*work)(void *), void *argument, Server *const *servers, int nservers,
		   int attempts)
{
	volatile int attempt = 1;
	sigjmp_buf buffer;

	for (;;)
	{
		if (sigsetjmp(buffer, 1) == 0)
		{
			retry = &buffer;
			work(argument);
			retry = NULL;
			return true;
		}
		retry = NULL;
		for (int i = 0; i < nservers; i++)
		{
			end_copy(servers[i]);
			if (PQtransactionStatus(servers[i]->conn) != PQTRANS_IDLE)
				common_run(servers[i], "ROLLBACK", 0);
		}
		if (attempt == attempts)
			return false;
		common_print(stdout, "%s: trying again (%d of %d)", program, attempt, attempts - 1);
		attempt++;
		common_sleep(1000);
	}
}

/*
 * Connections
 */

/*
 * Fixed for each session, whatever ALTER ROLE, ALTER DATABASE and postgresql.conf say.  All of
 * them change how values are written and read, how long a query takes, or which code runs.
 * The first ones are set first: until then nothing is looked up by name.
 */
static const Setting prelude[] = {
	{"search_path", "pg_catalog, pg_temp"},
	{"role", "none"},
	{"session_replication_role", "origin"},
	{"exit_on_error", "off"},
	{"client_min_messages", "warning"},
	{"array_nulls", "on"},
	{"bytea_output", "hex"},
	{"check_function_bodies", "on"},
	{"datestyle", "ISO, MDY"},
	{"default_transaction_deferrable", "off"},
	{"default_transaction_isolation", "read committed"},
	{"default_transaction_read_only", "off"},
	{"extra_float_digits", "3"},
	{"idle_in_transaction_session_timeout", "0"},
	{"idle_session_timeout", "0"},
	{"intervalstyle", "postgres"},
	{"jit", "off"},
	{"lc_monetary", "C"},
	{"lc_numeric", "C"},
	{"lc_time", "C"},
	{"lock_timeout", "0"},
	{"quote_all_identifiers", "off"},
	{"row_security", "off"},
	{"standard_conforming_strings", "on"},
	{"statement_timeout", "0"},
	{"synchronous_commit", "on"},
	{"timezone", "UTC"},
	{"transform_null_equals", "off"},
	{"xmlbinary", "base64"},
	{"xmloption", "content"},
	/* not in every version */
	{"transaction_timeout", "0"},
	{"restrict_nonsystem_relation_kind", "foreign-table"},
	{NULL, NULL}};

/*
 * Change a setting, for the session or the transaction, and see that it has changed.  A setting
 * that the server does not know is an error.
 */
void
common_set(Server *server, const char *name, const char *value, bool local)
{
	char *now = common_value(server, "SELECT pg_catalog.set_config($1, $2, $3)", 3, name, value, local ? "t" : "f");

	if (now == NULL)
		common_die("%s: could not set %s", server->name, name);
	free(now);
}

/*
 * Units and spellings differ ("5s" and "5000ms"), so this is for the values of prelude only.  What
 * is as it should be is not set: some of them are for superusers.
 */
static void
set_all(Server *server, const Setting *settings)
{
	for (const Setting *setting = settings; setting->name != NULL; setting++)
	{
		for (int i = 0;; i++)
		{
			/* null: the server does not have it */
			char *now = common_value(server, "SELECT pg_catalog.current_setting($1, true)", 1, setting->name);
			bool is_right = now == NULL || strcmp(now, setting->value) == 0;

			if (!is_right && i > 0)
				common_die("%s: setting %s is \"%s\" instead of \"%s\"", server->name, setting->name, now,
						   setting->value);
			free(now);
			if (is_right)
				break;
			common_set(server, setting->name, setting->value, false);
		}
	}
}

/* Secrets of libpq; every user of the machine sees the arguments of a program. */
static const char *const secrets[] = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key", NULL};

static void
check_conninfo(const char *name, const char *conninfo)
{
	char *error = NULL;
	PQconninfoOption *options;

	/* libpq takes anything else for the name of a database */
	if (strchr(conninfo, '=') == NULL && strncmp(conninfo, "postgresql://", 13) != 0 &&
		strncmp(conninfo, "postgres://", 11) != 0)
		return;
	options = PQconninfoParse(conninfo, &error);
	/* the message would quote a part of the string, which may be a password */
	if (options == NULL)
		common_wrong_use("the connection string of the %s is not valid", name);
	for (PQconninfoOption *option = options; option->keyword != NULL; option++)
	{
		for (int i = 0; secrets[i] != NULL; i++)
		{
			if (option->val == NULL || strcmp(option->keyword, secrets[i]) != 0)
				continue;
			common_warn("the connection string of the %s has a value of \"%s\", which every user of this machine can see", name, option->keyword);
			common_wrong_use("use the file .pgpass, passfile=..., a service file (service=..., PGSERVICE) or PGPASSWORD");
		}
	}
	PQconninfoFree(options);
}

static void
print_notice(void *arg, const PGresult *result)
{
	const Server *server = arg;
	const char *message = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);

	if (message != NULL)
		common_warn("%s: %s", server->name, message);
}

/*
 * Connect, and make a session of which nothing is left to chance: the settings above, those of the
 * program, and the encoding of the database for all that is sent and received.
 */
void
common_connect(Server *server, const char *name, const char *conninfo, const Setting *settings)
{
	/* what comes later wins, so the caller can choose another name in the string */
	const char *const keywords[] = {"application_name", "dbname", NULL};
	const char *const values[] = {program, conninfo, NULL};
	int place = 0;
	char *pid;

	check_conninfo(name, conninfo);
	common_check_signals();
	*server = (Server){.name = name};
	server->conn = PQconnectdbParams(keywords, values, 1);
	if (PQstatus(server->conn) != CONNECTION_OK)
	{
		common_note_error(server, NULL);
		if (PQconnectionNeedsPassword(server->conn))
			common_warn("%s: the server asks for a password: use the file .pgpass, a service file or PGPASSWORD", name);
		common_raise(server);
	}
	PQsetNoticeReceiver(server->conn, print_notice, server);
	while (cancels[place] != NULL)
	{
		if (++place == MAX_SERVERS)
			abort();
	}
	cancels[place] = server->cancel = PQgetCancel(server->conn);
	/* a timeout of the database can be so short that even this takes several attempts */
	for (int i = 0; i < 100; i++)
	{
		PQclear(common_attempt(server, "SET statement_timeout = 0", 0));
		/* 57014: query canceled */
		if (strcmp(server->sqlstate, "57014") != 0)
			break;
	}
	/* before anything is looked up by name */
	common_run(server, "SET search_path = pg_catalog, pg_temp", 0);
	/* so that queries of a transaction pooler do not end in many sessions */
	pid = common_value(server, "SELECT pg_catalog.pg_backend_pid()", 0);
	if (pid == NULL || atoi(pid) != PQbackendPID(server->conn))
		common_die("%s: the connection goes through a pooler; connect to the server itself", name);
	free(pid);
	set_all(server, prelude);
	if (PQparameterStatus(server->conn, "server_encoding") == NULL ||
		PQsetClientEncoding(server->conn, PQparameterStatus(server->conn, "server_encoding")) != 0)
		common_die("%s: could not set the encoding of the connection", name);
	for (; settings != NULL && settings->name != NULL; settings++)
		common_set(server, settings->name, settings->value, false);
}

void
common_disconnect(Server *server)
{
	PGcancel *cancel = server->cancel;

	for (int i = 0; i < MAX_SERVERS; i++)
	{
		if (cancel != NULL && cancels[i] == cancel)
			cancels[i] = NULL;
	}
	PQfreeCancel(cancel);
	PQfinish(server->conn);
	server->cancel = NULL;
	server->conn = NULL;
}

static char *
own_text(Server *server, char *quoted)
{
	char *copy;

	if (quoted == NULL)
		common_die("%s: could not quote a name: %s", server->name, PQerrorMessage(server->conn));
	copy = common_copy(quoted);
	PQfreemem(quoted);
	return copy;
}

/* A name as SQL identifier */
char *
common_quote_name(Server *server, const char *name)
{
	return own_text(server, PQescapeIdentifier(server->conn, name, strlen(name)));
}

/* A value as SQL literal, for commands that take no parameters */
char *
common_quote_value(Server *server, const char *value)
{
	return own_text(server, PQescapeLiteral(server->conn, value, strlen(value)));
}
