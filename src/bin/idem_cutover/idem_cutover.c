/*
 * idem_cutover.c
 *		Make the subscriber of a logical replication the new primary.
 *
 * The state is on the two servers, not in this program: every step looks at what it finds there
 * and can be repeated, so the program can be killed at any point and started again.  "What a run
 * leaves behind" in doc/replication.md has the table.
 *
 * Three facts are not in the catalogs by themselves while step 5 takes the slot away from the
 * subscription and drops it: which slot it was, how far the subscriber had received it, and that
 * it was this program.  They are in the mark, the comment on an empty schema of the publisher.  A
 * comment is not replicated, only the owner of the schema can change it, and to read it runs no
 * code.
 *
 * Each run but --check first ends the sessions of an earlier one, on both servers.  The session
 * of a program that was killed can still wait for a lock, and would do its command later.
 *
 * The owner of a database can neither run code in our sessions nor choose a command: see the
 * settings in common_connect() and sequences.c.  Text goes from one server to the other as the
 * value of a parameter or as a quoted name.
 */
#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "idem_cutover.h"

/* Attempts of step 5 while clients write on the publisher */
#define MAX_ROUNDS 5

/* Of two runs the later one takes over: the advisory lock of its two sessions, "idem", "cuto" */
#define LOCK_KEYS "1768187245, 1668641903"

/* Between the slot and the position in the mark */
#define MARK_POSITION ", received up to "

#define THIS_DATABASE "(SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())"

/* The program has one; here for the function that is called at the end. */
static Cutover the_cutover = {.until = 6, .timeout = 60, .margin = 1000000, .status = EXIT_STOPPED};

static void
print_usage(void)
{
	fputs(
		"idem_cutover makes the subscriber of a logical replication the new primary, without losing\n"
		"a row and without a second run of any key or job of idem.\n"
		"\n"
		"Usage:\n"
		"  idem_cutover --publisher CONNSTR --subscriber CONNSTR --subscription NAME [OPTION]...\n"
		"\n"
		"  --publisher CONNSTR     the database that clients write now, for example 'host=blue dbname=shop'\n"
		"  --subscriber CONNSTR    the database with the subscription, which takes its place\n"
		"  --subscription NAME     the subscription\n"
		"\n"
		"What to do (default: the cutover):\n"
		"  --check                 look, change nothing, and say what is missing for the cutover\n"
		"  --until STEP            do the steps up to STEP (1 to 6) and stop; run again to go on\n"
		"  --abort                 before the subscription is gone: let clients write on the publisher again\n"
		"\n"
		"Options:\n"
		"  --timeout SECONDS       how long each step may wait (default 60)\n"
		"  --margin NUMBER         how far job numbers jump (default 1000000)\n"
		"  --partial               accept tables that are not replicated or only in part, large objects,\n"
		"                          and other subscriptions of the database; those of idem must be complete\n"
		"  --help, --version\n"
		"\n",
		stdout);
	fputs(
		"Steps:\n"
		"  1  publisher: set default_transaction_read_only for the database, end its sessions\n"
		"  2  publisher: note the WAL position\n"
		"  3  wait until the subscriber has received everything, compare the tables of idem\n"
		"  4  subscriber: set all sequences; that of the job numbers gets the margin\n"
		"  5  disable the subscription and take its slot away, look at the publisher once more, drop the\n"
		"     subscription, then the slot. If a client has written meanwhile, the subscription is put\n"
		"     back and steps 2 to 5 are done again, at most 5 times. Once the subscription is gone,\n"
		"     clients write on the subscriber, and there is no way back\n"
		"  6  subscriber: reload, so that cleanup goes on, and ask idem_doctor()\n"
		"\n"
		"From step 1 to step 5 no client can write. You can stop or kill the program at any point and run\n"
		"it again with the same arguments: it goes on where it was. If another run is still there, the\n"
		"new one ends it.\n"
		"\n",
		stdout);
	fputs(
		"Connections must reach the servers directly, without a pooler. Passwords come from .pgpass, a\n"
		"service file or PGPASSWORD. Privileges (superusers have all of it):\n"
		"  publisher    owner of the database; REPLICATION; pg_monitor, pg_signal_backend (and no superuser\n"
		"               among the clients); USAGE on schema idem, SELECT and UPDATE on its tables; SELECT on\n"
		"               all sequences\n"
		"  subscriber   owner of the subscription; pg_monitor; USAGE on schema idem, SELECT on its tables;\n"
		"               SELECT and UPDATE on all sequences; EXECUTE on pg_reload_conf()\n"
		"\n"
		"Exit status:\n"
		"  0  done; with --check: nothing is missing\n"
		"  1  something is missing; this run has changed nothing\n"
		"  2  wrong arguments\n"
		"  3  stopped after step 1 began and before the subscription was dropped: the publisher is read-only,\n"
		"     nothing is lost. Run again, or use --abort\n"
		"  4  stopped later: the subscription may be gone. Run again; clients must not write on the publisher\n",
		stdout);
}

static void
print_how_to_go_on(FILE *stream, const Cutover *cutover)
{
	switch (cutover->status)
	{
		case EXIT_READ_ONLY:
			common_print(stream, "The publisher is read-only, and the subscription is there%s: nothing is lost.",
						 cutover->is_detached ? ", but disabled and without its slot" : "");
			common_print(stream, "Run idem_cutover again to go on, or idem_cutover --abort to let clients write on the publisher.");
			break;
		case EXIT_DROPPED:
			common_print(stream, "The subscription may be gone. Clients must not write on the publisher from here on.");
			common_print(stream, "Run idem_cutover again with the same arguments to go on.");
			break;
		default:
			break;
	}
}

/* After an error has been printed: how to go on, and the exit status */
static int
end_program(void)
{
	print_how_to_go_on(stderr, &the_cutover);
	return the_cutover.status;
}

static void stop_program(void) NORETURN;

static void
stop_program(void)
{
	exit(end_program());
}

static void
print_step(int step, const char *text)
{
	common_print(stdout, "step %d   %s", step, text);
}

static void
stop_after(const Cutover *cutover, int step)
{
	if (cutover->until != step)
		return;
	common_print(stdout, "stopped after step %d, as asked", step);
	print_how_to_go_on(stdout, cutover);
	exit(EXIT_SUCCESS);
}

/* A command with a name in it, which takes no parameters */
static void
run_named(Server *server, const char *before, const char *name, const char *after)
{
	char *quoted = common_quote_name(server, name);
	char *sql = common_format("%s%s%s", before, quoted, after);

	common_run(server, sql, 0);
	free(sql);
	free(quoted);
}

/*
 * Waiting
 */

/* A condition is asked again and again; what it sets as state tells how far it is. */
typedef bool (*Condition)(Cutover *cutover, char **state);

/* False if the time is over; a line now and then says what the program waits for. */
static bool
wait_quietly(Cutover *cutover, const char *what, Condition is_met, char **state)
{
	double began = common_now();
	double said = began;

	*state = NULL;
	while (!is_met(cutover, state))
	{
		double now = common_now();

		if (now - began >= (double) cutover->timeout)
			return false;
		if (now - said >= 5.0)
		{
			common_print(stderr, "waiting since %.0f s: %s%s%s", now - began, what,
						 *state == NULL ? "" : ": ", *state == NULL ? "" : *state);
			said = now;
		}
		free(*state);
		*state = NULL;
		common_sleep(100);
	}
	return true;
}

static void
wait_until(Cutover *cutover, const char *what, Condition is_met)
{
	char *state;

	if (!wait_quietly(cutover, what, is_met, &state))
		common_die("gave up after %" PRId64 " s: %s%s%s", cutover->timeout, what,
				   state == NULL ? "" : ": ", state == NULL ? "" : state);
	free(state);
}

/*
 * What is on the servers
 */

/* Find the subscription, with its slot and publications; false if there is none. */
static bool
find_subscription(Cutover *cutover)
{
	Server *server = &cutover->subscriber;
	PGresult *result = common_query(
		server,
		PQserverVersion(server->conn) >= 160000 ?
			"SELECT s.subenabled, s.subslotname, s.subpublications::text AS publications, s.suborigin AS origin"
			"  FROM pg_subscription AS s WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE :
			"SELECT s.subenabled, s.subslotname, s.subpublications::text AS publications, 'any' AS origin"
			"  FROM pg_subscription AS s WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE,
		1, cutover->subscription);
	bool is_there = PQntuples(result) == 1;

	if (is_there)
	{
		cutover->is_enabled = common_field(result, 0, "subenabled")[0] == 't';
		cutover->slot = common_copy(common_field(result, 0, "subslotname"));
		cutover->publications = common_copy(common_field(result, 0, "publications"));
		cutover->origin = common_copy(common_field(result, 0, "origin"));
	}
	PQclear(result);
	return is_there;
}

static bool
is_read_only(Cutover *cutover)
{
	return common_is_true(
		&cutover->publisher,
		"SELECT count(*) > 0 FROM pg_db_role_setting AS s, unnest(s.setconfig) AS c (setting)"
		" WHERE s.setrole = 0 AND c.setting = 'default_transaction_read_only=on' AND s.setdatabase = " THIS_DATABASE,
		0);
}

/* The mark up to the name of the slot: this subscription of this subscriber */
static char *
mark_prefix(Cutover *cutover)
{
	char *identity = common_value(
		&cutover->subscriber, "SELECT c.system_identifier || '/' || " THIS_DATABASE " FROM pg_control_system() AS c", 0);
	char *prefix = common_format("idem_cutover of subscription %s in database %s: slot ",
								 cutover->subscription, identity);

	free(identity);
	return prefix;
}

/* The comment on the schema, if a role has made it that may run the steps; otherwise NULL */
static char *
read_mark(Cutover *cutover)
{
	return common_value(
		&cutover->publisher,
		"SELECT obj_description(n.oid, 'pg_namespace')"
		"  FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner"
		" WHERE n.nspname = 'idem_cutover'"
		"   AND (r.rolsuper OR r.rolname = current_user"
		"        OR r.oid = (SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database()))",
		0);
}

/*
 * The slot that the mark names, or NULL if there is no mark of this subscription.  lsn is set to
 * the position up to which the subscriber has received everything.
 */
static char *
marked_slot(Cutover *cutover, char **lsn)
{
	char *mark = read_mark(cutover);
	char *prefix = mark_prefix(cutover);
	size_t length = strlen(prefix);
	char *slot = NULL;

	*lsn = NULL;
	if (mark != NULL && strncmp(mark, prefix, length) == 0)
	{
		const char *name = mark + length;
		size_t name_length = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_");
		const char *position = name + name_length + strlen(MARK_POSITION);

		/* anything else is none of ours */
		if (name_length > 0 && strncmp(name + name_length, MARK_POSITION, strlen(MARK_POSITION)) == 0 &&
			position[strspn(position, "0123456789ABCDEF/")] == '\0')
		{
			slot = common_format("%.*s", (int) name_length, name);
			*lsn = common_copy(position);
		}
	}
	free(prefix);
	free(mark);
	return slot;
}

/*
 * Leave the mark before the subscription changes.  If the program is killed then, the mark tells
 * the next run which slot the subscription had, and that it was this program that dropped it.
 */
static void
leave_mark(Cutover *cutover)
{
	Server *server = &cutover->publisher;
	char *prefix = mark_prefix(cutover);
	char *mark = common_format("%s%s" MARK_POSITION "%s", prefix, cutover->slot, cutover->lsn);
	char *quoted = common_quote_value(server, mark);
	char *comment = common_format("COMMENT ON SCHEMA idem_cutover IS %s", quoted);

	common_run(server, "BEGIN", 0);
	if (!common_is_true(server, "SELECT count(*) > 0 FROM pg_namespace WHERE nspname = 'idem_cutover'", 0))
		common_run(server, "CREATE SCHEMA idem_cutover", 0);
	common_run(server, comment, 0);
	common_run(server, "COMMIT", 0);
	free(comment);
	free(quoted);
	free(mark);
	free(prefix);
}

static void
remove_mark(Cutover *cutover)
{
	Server *server = &cutover->publisher;

	if (read_mark(cutover) == NULL)
		return;
	common_run(server, "COMMENT ON SCHEMA idem_cutover IS NULL", 0);
	/* it stays if there is something in it, which is none of ours */
	PQclear(common_attempt(server, "DROP SCHEMA idem_cutover", 0));
}

static bool
exists_slot(Cutover *cutover, const char *slot)
{
	return common_is_true(&cutover->publisher,
						  "SELECT count(*) > 0 FROM pg_replication_slots"
						  " WHERE slot_name = $1 AND database = current_database() AND plugin = 'pgoutput'",
						  1, slot);
}

static bool
is_slot_in_use(Cutover *cutover, char **state)
{
	(void) state;
	return common_is_true(&cutover->publisher,
						  "SELECT count(*) > 0 FROM pg_replication_slots"
						  " WHERE slot_name = $1 AND database = current_database() AND active",
						  1, cutover->slot);
}

static bool
is_slot_free(Cutover *cutover, char **state)
{
	return !is_slot_in_use(cutover, state);
}

/* Take the lock of this program, from an earlier run if it must be. */
static void
take_over(Cutover *cutover, Server *server)
{
	double began = common_now();

	while (!common_is_true(server, "SELECT pg_try_advisory_lock(" LOCK_KEYS ")", 0))
	{
		if (common_now() - began >= (double) cutover->timeout)
			common_die("%s: the session of an earlier run does not end", server->name);
		common_run(server,
				   "SELECT pg_terminate_backend(l.pid) FROM pg_locks AS l"
				   " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2"
				   "   AND (l.classid, l.objid) = (" LOCK_KEYS ") AND l.database = " THIS_DATABASE,
				   0);
		common_sleep(100);
	}
}

/*
 * End the sessions of the publisher that may write: those that began before the database became
 * read-only, and those that have a transaction id, because they have said READ WRITE.  Walsenders
 * that stream read only.  Returns how many there were.
 */
static int
end_sessions(Cutover *cutover)
{
	char *count = common_value(
		&cutover->publisher,
		"SELECT count(pg_terminate_backend(a.pid))"
		"  FROM pg_stat_activity AS a"
		" WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()"
		"   AND (a.backend_type IS NULL OR a.backend_type !~ '^(autovacuum|idem )')"
		"   AND (a.backend_xid IS NOT NULL"
		"        OR a.backend_start < $1::timestamptz"
		"           AND a.pid NOT IN (SELECT r.active_pid FROM pg_replication_slots AS r WHERE r.active_pid IS NOT NULL))",
		1, cutover->since);
	int n = atoi(count);

	free(count);
	return n;
}

static bool
have_sessions_ended(Cutover *cutover, char **state)
{
	int n = end_sessions(cutover);

	*state = common_format("%d sessions", n);
	return n == 0;
}

/* The prepared transactions of the database, or NULL */
static char *
list_prepared(Server *server)
{
	return common_value(server,
						"SELECT string_agg(gid, ', ' ORDER BY gid) FROM pg_prepared_xacts"
						" WHERE database = current_database()",
						0);
}

static void
refuse_prepared(Cutover *cutover)
{
	char *gids = list_prepared(&cutover->publisher);

	if (gids == NULL)
		return;
	common_warn("there are prepared transactions on the publisher: %s", gids);
	common_print(stderr, "Commit them or roll them back, in a session after SET default_transaction_read_only = off.");
	stop_program();
}

static bool
has_received(Cutover *cutover, char **state)
{
	PGresult *result = common_query(
		&cutover->publisher,
		"SELECT s.confirmed_flush_lsn >= $1::pg_lsn AS is_there,"
		"       pg_size_pretty(pg_wal_lsn_diff($1::pg_lsn, s.confirmed_flush_lsn)) || ' of WAL are left' AS state"
		"  FROM pg_replication_slots AS s WHERE s.slot_name = $2 AND s.database = current_database()",
		2, cutover->lsn, cutover->slot);
	bool is_there = false;

	if (PQntuples(result) == 0)
		*state = common_format("slot %s is gone", cutover->slot);
	else
	{
		const char *answer = common_field(result, 0, "is_there");

		is_there = answer != NULL && answer[0] == 't';
		*state = common_copy(common_field(result, 0, "state"));
	}
	PQclear(result);
	return is_there;
}

/*
 * The steps
 */

static void
set_read_only(Cutover *cutover)
{
	Server *server = &cutover->publisher;
	char *database = common_value(server, "SELECT current_database()", 0);

	run_named(server, "ALTER DATABASE ", database, " SET default_transaction_read_only = on");
	cutover->status = EXIT_READ_ONLY;
	free(database);
	if (!is_read_only(cutover))
		common_die("the publisher is not read-only; was the database renamed?");
	cutover->since = common_value(server, "SELECT clock_timestamp()", 0);
	wait_until(cutover, "sessions of the publisher do not end", have_sessions_ended);
	refuse_prepared(cutover);
	print_step(1, "the publisher is read-only, and sessions from before have ended");
}

/* The commit of the message flushes the WAL before it, also of commits that did not wait for that. */
static void
flush_wal(Cutover *cutover)
{
	common_run(&cutover->publisher, "SELECT pg_logical_emit_message(true, 'idem_cutover', '')", 0);
}

/*
 * The order matters.  A transaction of this database that writes has an id.  Either its session is
 * found and ended, or it has ended before the message, and lsn is behind its commit, or it begins
 * later; the last look finds that.
 */
static void
note_position(Cutover *cutover)
{
	wait_until(cutover, "sessions of the publisher do not end", have_sessions_ended);
	refuse_prepared(cutover);
	flush_wal(cutover);
	free(cutover->lsn);
	cutover->lsn = common_value(&cutover->publisher, "SELECT pg_current_wal_flush_lsn()", 0);
}

static void
receive_all(Cutover *cutover)
{
	char *what = common_format("the subscriber has not received everything up to %s", cutover->lsn);

	wait_until(cutover, what, has_received);
	free(what);
}

/* What both have to have: numbers of rows, and the map of slots */
static char *
summarize(Server *server)
{
	return common_value(
		server,
		"SELECT string_agg(t.name || ' ' || t.rows, ', ' ORDER BY t.name) || ', map ' ||"
		"       COALESCE((SELECT concat_ws(' ', s.jobs_from, s.by, s.slots, s.number, s.given) FROM idem.shard AS s), 'none')"
		"  FROM (SELECT 'keys', count(*) FROM idem.keys"
		"        UNION ALL SELECT 'jobs', count(*) FROM idem.jobs"
		"        UNION ALL SELECT 'job_keys', count(*) FROM idem.job_keys"
		"        UNION ALL SELECT 'job_log', count(*) FROM idem.job_log"
		"        UNION ALL SELECT 'queues', count(*) FROM idem.queues"
		"        UNION ALL SELECT 'schedules', count(*) FROM idem.schedules) AS t (name, rows)",
		0);
}

/*
 * The worker of the publisher may remove rows that have expired; then the numbers differ until the
 * removals have arrived.
 */
static void
compare_tables(Cutover *cutover)
{
	double began = common_now();
	char *prepared;

	for (;;)
	{
		char *here;
		char *there;
		bool are_equal;

		receive_all(cutover);
		here = summarize(&cutover->publisher);
		there = summarize(&cutover->subscriber);
		are_equal = strcmp(here, there) == 0;
		if (are_equal)
			common_print(stdout, "step 3   the subscriber has received it: %s", here);
		else if (common_now() - began >= (double) cutover->timeout)
		{
			common_warn("the tables of idem differ, although the subscriber has received everything");
			common_print(stderr, "publisher:  %s", here);
			common_print(stderr, "subscriber: %s", there);
			common_print(stderr, "If the worker of the publisher is removing many rows: set idem.cleanup = off there, for the database.");
			stop_program();
		}
		free(here);
		free(there);
		if (are_equal)
			break;
		common_sleep(100);
		note_position(cutover);
	}
	prepared = list_prepared(&cutover->subscriber);
	if (prepared != NULL)
		common_die("there are prepared transactions on the subscriber: %s", prepared);
}

/*
 * Step 5
 *
 * The tables of idem are locked on the publisher from before the last look until the slot is
 * gone: meanwhile neither a client nor the worker of idem changes a key or a job there.  A client
 * can change other tables.  The slot shows that, in the last look and once more after the
 * subscription is gone, and is dropped only if there is nothing in it.
 */

/* Lock the tables of idem in a session of their own; false after an error that may pass. */
static bool
try_lock(Cutover *cutover, Server *locker)
{
	PGresult *tables;
	bool is_locked = true;

	common_run(locker, "BEGIN", 0);
	tables = common_query(locker,
						  "SELECT c.relname FROM pg_class AS c"
						  " WHERE c.relnamespace = 'idem'::regnamespace AND c.relkind = 'r' ORDER BY c.relname",
						  0);
	for (int i = 0; is_locked && i < PQntuples(tables); i++)
	{
		char *name = common_quote_name(locker, PQgetvalue(tables, i, 0));
		char *sql = common_format("LOCK TABLE idem.%s IN SHARE MODE", name);
		PGresult *result = common_attempt(locker, sql, 0);

		is_locked = result != NULL;
		PQclear(result);
		free(sql);
		free(name);
	}
	PQclear(tables);
	if (!is_locked)
	{
		if (strcmp(locker->sqlstate, "55P03") != 0 && strcmp(locker->sqlstate, "40P01") != 0)
			common_raise(locker);
		common_run(locker, "ROLLBACK", 0);
		/* one that has written holds the lock; note_position() waits for its end */
		note_position(cutover);
	}
	return is_locked;
}

static void
lock_tables(Cutover *cutover, Server *locker)
{
	/* autovacuum gives way after deadlock_timeout */
	static const Setting settings[] = {{"lock_timeout", "3s"}, {"synchronous_commit", "local"}, {NULL, NULL}};
	double began = common_now();

	common_connect(locker, "publisher", cutover->publisher_conninfo, settings);
	while (!try_lock(cutover, locker))
	{
		if (common_now() - began >= (double) cutover->timeout)
			common_die("gave up after %" PRId64 " s: a session holds a lock on a table of idem on the publisher", cutover->timeout);
	}
}

/* Take the slot away from the subscription; in one transaction, so that a run finds both or neither. */
static void
detach_slot(Cutover *cutover)
{
	Server *server = &cutover->subscriber;

	common_run(server, "BEGIN", 0);
	run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " DISABLE");
	run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " SET (slot_name = NONE)");
	cutover->is_detached = true;
	common_run(server, "COMMIT", 0);
}

/*
 * Undo detach_slot(), also that of an earlier run.  The subscriber has received everything up to
 * lsn.
 *
 * If DROP SUBSCRIPTION has not committed, the server has forgotten nevertheless how far it has
 * received: that is not undone.  The slot knows it, but if the publisher crashes, it goes back to
 * its last checkpoint, and what comes again would be applied again.
 */
static void
put_back(Cutover *cutover, const char *lsn)
{
	Server *server = &cutover->subscriber;
	char *slot = common_quote_value(server, cutover->slot);
	char *options = common_format(" SET (slot_name = %s)", slot);

	if (common_is_true(server, "SELECT has_function_privilege('pg_replication_origin_progress(text, boolean)', 'EXECUTE')"
					   "   AND has_function_privilege('pg_replication_origin_advance(text, pg_lsn)', 'EXECUTE')",
					   0))
		common_run(server,
				   "SELECT pg_replication_origin_advance(o.name, $2::pg_lsn)"
				   "  FROM pg_subscription AS s, LATERAL (SELECT 'pg_' || s.oid) AS o (name)"
				   " WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE
				   "   AND COALESCE(pg_replication_origin_progress(o.name, true), '0/0') < $2::pg_lsn",
				   2, cutover->subscription, lsn);
	common_run(server, "BEGIN", 0);
	run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, options);
	run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " ENABLE");
	common_run(server, "COMMIT", 0);
	cutover->is_detached = false;
	cutover->is_enabled = true;
	free(options);
	free(slot);
}

/*
 * Are there changes in the slot that the subscriber has not confirmed?  publications is an array,
 * or null for all of the database.  Call flush_wal() first.
 */
static PGresult *
peek_slot(Cutover *cutover, const char *slot, const char *publications)
{
	bool filters_origin = cutover->origin != NULL && strcmp(cutover->origin, "none") == 0 &&
		PQserverVersion(cutover->publisher.conn) >= 160000;

	return common_attempt(
		&cutover->publisher,
		"SELECT count(*) > 0 AS has_changes"
		"  FROM pg_logical_slot_peek_binary_changes("
		"           $1::name, NULL, 1, VARIADIC ARRAY["
		"               'proto_version', '1',"
		"               'publication_names',"
		"               COALESCE((SELECT string_agg(quote_ident(p.name), ',')"
		"                           FROM unnest(COALESCE($2::text[], ARRAY(SELECT pubname::text FROM pg_publication))) AS p (name)),"
		"                        'idem_cutover')]"
		"           || CASE WHEN $3::boolean THEN ARRAY['origin', 'none'] ELSE ARRAY[]::text[] END)",
		3, slot, publications, filters_origin ? "t" : "f");
}

/*
 * The last look.  NULL if nothing was written on the publisher that the subscriber lacks;
 * otherwise what was found.  again is set if another round can help.
 */
static char *
look_again(Cutover *cutover, bool *again)
{
	char *prepared = list_prepared(&cutover->publisher);
	PGresult *result;
	bool has_changes;

	*again = false;
	if (!is_read_only(cutover))
		return common_copy("the publisher is not read-only any more");
	if (prepared != NULL)
		return common_format("a client has prepared a transaction on the publisher: %s", prepared);
	*again = true;
	if (end_sessions(cutover) > 0)
		return common_copy("a client writes on the publisher although it is read-only");
	flush_wal(cutover);
	result = peek_slot(cutover, cutover->slot, cutover->publications);
	if (result == NULL)
	{
		*again = false;
		return common_format("could not read slot %s: %s", cutover->slot, cutover->publisher.message);
	}
	has_changes = common_field(result, 0, "has_changes")[0] == 't';
	PQclear(result);
	return has_changes ? common_copy("a client has written on the publisher although it is read-only") : NULL;
}

/*
 * The subscription is gone: drop the slot on the publisher, unless there is something in it.
 * publications as in peek_slot().
 */
static void
drop_slot(Cutover *cutover, const char *slot, const char *publications)
{
	double began = common_now();

	/* ends who still writes; what has committed is in the slot */
	end_sessions(cutover);
	flush_wal(cutover);
	while (exists_slot(cutover, slot))
	{
		PGresult *result = peek_slot(cutover, slot, publications);

		if (result != NULL)
		{
			cutover->has_left = common_field(result, 0, "has_changes")[0] == 't';
			PQclear(result);
			if (cutover->has_left)
			{
				common_print(stdout, "note     slot %s stays on the publisher: it has changes that the subscriber lacks", slot);
				return;
			}
			result = common_attempt(&cutover->publisher, "SELECT pg_drop_replication_slot($1::name)", 1, slot);
			PQclear(result);
			if (result != NULL)
				return;
		}
		/* 55006: in use; 42704: gone */
		if (strcmp(cutover->publisher.sqlstate, "55006") != 0 && strcmp(cutover->publisher.sqlstate, "42704") != 0)
			common_raise(&cutover->publisher);
		if (common_now() - began >= (double) cutover->timeout)
			common_die("gave up after %" PRId64 " s: slot %s of the publisher is in use", cutover->timeout, slot);
		common_sleep(100);
	}
}

/*
 * The point of no return, after the last look: both commands are sent at once.  NULL if the
 * subscription is gone; otherwise what keeps it.
 */
static char *
commit_drop(Cutover *cutover)
{
	Server *server = &cutover->subscriber;
	char *name = common_quote_name(server, cutover->subscription);
	char *sql = common_format("DROP SUBSCRIPTION %s; COMMIT", name);
	PGresult *result;
	bool is_done;

	cutover->status = EXIT_DROPPED;
	result = PQexec(server->conn, sql);
	is_done = PQresultStatus(result) == PGRES_COMMAND_OK;
	if (!is_done)
	{
		common_note_error(server, result);
		if (PQstatus(server->conn) != CONNECTION_OK)
			common_raise(server);
		/* the server has said that nothing was committed */
		cutover->status = EXIT_READ_ONLY;
		common_check_signals();
	}
	PQclear(result);
	free(sql);
	free(name);
	return is_done ? NULL : common_format("could not drop the subscription: %s", server->message);
}

/*
 * One round: NULL if the subscription is gone.  Otherwise what keeps it, which is there as it was.
 * again is set if another round can help.
 */
static char *
drop_subscription(Cutover *cutover, bool *again)
{
	Server *server = &cutover->subscriber;
	Server locker;
	char *found = NULL;
	char *state = NULL;
	int count;

	*again = false;
	lock_tables(cutover, &locker);
	note_position(cutover);
	receive_all(cutover);
	sequences_copy(cutover, &count);
	leave_mark(cutover);
	detach_slot(cutover);

	if (!wait_quietly(cutover, "the slot is still in use", is_slot_free, &state))
		found = common_format("gave up after %" PRId64 " s: slot %s is still in use", cutover->timeout, cutover->slot);
	else
	{
		/*
		 * Take the lock on the subscription, so that the program waits for it before the last
		 * look and not after it.  DROP cannot be rolled back in full, see put_back().
		 */
		common_run(server, "BEGIN", 0);
		run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " DISABLE");
		found = look_again(cutover, again);
		if (found == NULL)
			found = commit_drop(cutover);
	}
	if (found != NULL)
	{
		common_disconnect(&locker);
		if (PQtransactionStatus(server->conn) != PQTRANS_IDLE)
			common_run(server, "ROLLBACK", 0);
		put_back(cutover, cutover->lsn);
	}
	else
	{
		cutover->is_detached = false;
		drop_slot(cutover, cutover->slot, cutover->publications);
		common_disconnect(&locker);
	}
	free(state);
	return found;
}

static void
end_subscription(Cutover *cutover)
{
	for (int round = 1;; round++)
	{
		bool again;
		char *found = drop_subscription(cutover, &again);

		if (found == NULL)
			break;
		if (!again || round == MAX_ROUNDS)
		{
			common_warn("%s", found);
			if (again)
				common_print(stderr, "Clients say READ WRITE. Keep them out: REVOKE CONNECT, pg_hba.conf, or a pooler that is paused.");
			common_print(stderr, "The subscription was put back.");
			stop_program();
		}
		common_print(stdout, "note     %s; the subscription was put back, once more", found);
		free(found);
	}
	common_print(stdout, "step 5   subscription %s is gone: clients write on the subscriber", cutover->subscription);
}

static void
begin_work(Cutover *cutover)
{
	Server *server = &cutover->subscriber;
	PGresult *result;
	int failures = 0;

	cutover->status = EXIT_DROPPED;
	common_run(server, "SELECT pg_reload_conf()", 0);
	result = common_query(server,
						  "SELECT h.status, h.\"check\" AS name, h.detail, COALESCE('; fix: ' || h.fix, '') AS fix"
						  "  FROM idem_doctor() AS h WHERE h.status IN ('fail', 'warn')",
						  0);
	for (int i = 0; i < PQntuples(result); i++)
	{
		const char *name = common_field(result, i, "name");
		const char *detail = common_field(result, i, "detail");

		if (strcmp(common_field(result, i, "status"), "fail") != 0)
			common_print(stdout, "note     idem_doctor(): %s: %s", name, detail);
		else
		{
			common_warn("idem_doctor() reports a failure on the new primary: %s: %s%s", name, detail,
						common_field(result, i, "fix"));
			failures++;
		}
	}
	PQclear(result);
	if (failures > 0)
		stop_program();
	print_step(6, "idem_doctor() reports no failure on the new primary");
}

/* After step 5.  The new primary works, also if the publisher has changes that it lacks. */
static void
end_cutover(Cutover *cutover, const char *slot)
{
	if (!cutover->has_left)
		stop_after(cutover, 5);
	begin_work(cutover);
	if (!cutover->has_left)
		return;
	common_warn("the publisher was written after the last look, by clients that say READ WRITE or by cleanup; the subscriber lacks that");
	common_print(stderr, "Keep such clients out. The changes are in the slot, in the form that a subscription gets. On the publisher:");
	common_print(stderr, "  SELECT lsn, xid, data FROM pg_logical_slot_peek_binary_changes('%s', NULL, NULL, 'proto_version', '1', 'publication_names', '...');", slot);
	common_print(stderr, "Then SELECT pg_drop_replication_slot('%s'), and run idem_cutover again.", slot);
	common_print(stderr, "The subscriber is the primary, and clients can use it.");
	exit(EXIT_DROPPED);
}

/*
 * What the caller asked for
 */

static void
refuse_missing(Cutover *cutover)
{
	common_warn("there is no subscription %s in the database of --subscriber", cutover->subscription);
	if (cutover->status == EXIT_DROPPED)
		common_print(stderr, "If it was dropped, the subscriber is the primary, and its changes are not on the publisher.");
	else
		common_print(stderr, "Check the arguments. No cutover to this database was begun.");
	stop_program();
}

/*
 * An earlier run has taken the slot away from the subscription, and has not dropped it: put the
 * slot back.
 */
static void
resume_detached(Cutover *cutover, const char *slot, const char *lsn)
{
	cutover->is_detached = true;
	if (!exists_slot(cutover, slot))
	{
		/* the slot is dropped last, so the subscription had been gone */
		cutover->status = EXIT_DROPPED;
		common_warn("subscription %s is disabled, and its slot %s is gone from the publisher", cutover->subscription, slot);
		common_print(stderr, "Either the slot was dropped by hand, or an earlier run has dropped the subscription, and this subscriber is a");
		common_print(stderr, "standby that was promoted before it got that. Then drop the subscription by hand, and run again.");
		stop_program();
	}
	free(cutover->slot);
	cutover->slot = common_copy(slot);
	put_back(cutover, lsn);
	common_print(stdout, "note     an earlier run has stopped in step 5; the subscription was put back");
}

static void
let_clients_write(Cutover *cutover)
{
	Server *server = &cutover->publisher;
	char *database = common_value(server, "SELECT current_database()", 0);

	remove_mark(cutover);
	run_named(server, "ALTER DATABASE ", database, " RESET default_transaction_read_only");
	free(database);
	/* sessions that began meanwhile would stay read-only */
	cutover->since = common_value(server, "SELECT clock_timestamp()", 0);
	wait_until(cutover, "sessions of the publisher do not end", have_sessions_ended);
	common_print(stdout, "Clients can write on the publisher again. Sessions that were read-only have been ended.");
}

/* Without its subscription the subscriber may have changes that the publisher lacks. */
static void
abort_cutover(Cutover *cutover)
{
	bool was_read_only = is_read_only(cutover);
	char *slot;
	char *lsn;

	if (was_read_only)
		cutover->status = EXIT_READ_ONLY;
	if (cutover->subscriber.conn == NULL)
	{
		if (read_mark(cutover) != NULL)
			common_die("the subscriber cannot be reached, and an earlier run may have dropped its subscription");
		if (was_read_only)
			common_print(stdout, "note     the subscriber cannot be reached; no run of this program has begun to drop its subscription");
	}
	else
	{
		take_over(cutover, &cutover->subscriber);
		slot = marked_slot(cutover, &lsn);
		if (!find_subscription(cutover))
		{
			if (was_read_only || slot != NULL)
			{
				cutover->status = EXIT_DROPPED;
				refuse_missing(cutover);
			}
		}
		else if (slot != NULL && !cutover->is_enabled)
			resume_detached(cutover, slot, lsn);
		free(slot);
	}
	if (was_read_only)
		let_clients_write(cutover);
	else
		common_print(stdout, "The publisher is not read-only: nothing to do.");
}

/* There is no subscription: has an earlier run dropped it? */
static void
finish_cutover(Cutover *cutover, char *slot)
{
	if (slot == NULL)
		refuse_missing(cutover);
	cutover->status = EXIT_DROPPED;
	if (!is_read_only(cutover))
		common_die("subscription %s was dropped by an earlier run, but the publisher is not read-only any more", cutover->subscription);
	cutover->since = common_value(&cutover->publisher, "SELECT clock_timestamp()", 0);
	drop_slot(cutover, slot, NULL);
	common_print(stdout, "step 5   subscription %s was dropped by an earlier run", cutover->subscription);
	end_cutover(cutover, slot);
}

static void
make_cutover(Cutover *cutover)
{
	char *slot;
	char *lsn;
	char *text;
	int count;

	take_over(cutover, &cutover->subscriber);
	if (is_read_only(cutover))
		cutover->status = EXIT_READ_ONLY;
	slot = marked_slot(cutover, &lsn);
	if (!find_subscription(cutover))
	{
		if (slot == NULL)
			cutover->status = EXIT_STOPPED;
		finish_cutover(cutover, slot);
		return;
	}
	if (cutover->status == EXIT_READ_ONLY)
		common_print(stdout, "The publisher is read-only already: going on.");
	if (slot != NULL && !cutover->is_enabled && cutover->slot == NULL)
	{
		resume_detached(cutover, slot, lsn);
		wait_until(cutover, "the subscription does not start", is_slot_in_use);
	}
	checks_run(cutover);
	if (cutover->problems > 0)
	{
		common_warn("%d things are missing for the cutover", cutover->problems);
		common_print(stderr, "Run idem_cutover --check after you have changed that.");
		stop_program();
	}
	/* no client has to wait for a subscriber that is far behind */
	cutover->lsn = common_value(&cutover->publisher, "SELECT pg_current_wal_lsn()", 0);
	text = common_format("the subscriber does not keep up, it has not received everything up to %s", cutover->lsn);
	wait_until(cutover, text, has_received);
	free(text);

	set_read_only(cutover);
	stop_after(cutover, 1);

	note_position(cutover);
	common_print(stdout, "step 2   everything that clients have written is before %s", cutover->lsn);
	stop_after(cutover, 2);

	compare_tables(cutover);
	stop_after(cutover, 3);

	sequences_copy(cutover, &count);
	common_print(stdout, "step 4   %d sequences of the subscriber are at least at the values of the publisher", count);
	stop_after(cutover, 4);

	end_subscription(cutover);
	end_cutover(cutover, cutover->slot);
}

static void
check_only(Cutover *cutover)
{
	char *lsn;
	char *slot = marked_slot(cutover, &lsn);

	if (!find_subscription(cutover))
	{
		common_print(stdout, "MISSING  there is no subscription %s in the database of --subscriber%s", cutover->subscription,
					 slot == NULL ? "" : "; an earlier run has dropped it: run idem_cutover again");
		cutover->problems++;
	}
	else
	{
		if (slot != NULL && !cutover->is_enabled)
			common_print(stdout, "note     an earlier run has stopped in step 5: run idem_cutover again, or idem_cutover --abort");
		checks_run(cutover);
	}
	if (cutover->problems > 0)
		common_die("%d things are missing for the cutover", cutover->problems);
	common_print(stdout, "Nothing is missing for the cutover.");
}

/*
 * Connect to both.  --abort needs the publisher only, and a publisher that is lost needs no
 * cutover any more.
 */
static void
connect_servers(Cutover *cutover)
{
	char *lock_timeout = common_format("%" PRId64 "s", cutover->timeout);
	const Setting settings[] = {{"lock_timeout", lock_timeout}, {"synchronous_commit", "local"}, {NULL, NULL}};
	bool has_subscriber = !cutover->abort || PQping(cutover->subscriber_conninfo) == PQPING_OK;

	if (has_subscriber)
	{
		common_connect(&cutover->subscriber, "subscriber", cutover->subscriber_conninfo, settings);
		/* names go from one to the other */
		PQsetClientEncoding(cutover->subscriber.conn, "UTF8");
		if (PQping(cutover->publisher_conninfo) != PQPING_OK && !find_subscription(cutover))
		{
			common_print(stderr, "There is no subscription %s in the database of --subscriber. If an earlier run has dropped it, the", cutover->subscription);
			common_print(stderr, "subscriber is the primary, and only the slot on the publisher is left. If the publisher is lost, the cutover is done.");
		}
	}
	common_connect(&cutover->publisher, "publisher", cutover->publisher_conninfo, settings);
	PQsetClientEncoding(cutover->publisher.conn, "UTF8");
	free(lock_timeout);
}

static int64_t
read_number(const char *option, const char *text, int64_t min, int64_t max)
{
	int64_t number = 0;

	if (!common_number(text, min, max, &number))
		common_wrong_use("--%s needs a number from %" PRId64 " to %" PRId64, option, min, max);
	return number;
}

static void
read_arguments(Cutover *cutover, int argc, char **argv)
{
	static const struct option options[] = {
		{"publisher", required_argument, NULL, 'p'},
		{"subscriber", required_argument, NULL, 's'},
		{"subscription", required_argument, NULL, 'n'},
		{"until", required_argument, NULL, 'u'},
		{"timeout", required_argument, NULL, 't'},
		{"margin", required_argument, NULL, 'm'},
		{"check", no_argument, NULL, 'c'},
		{"abort", no_argument, NULL, 'a'},
		{"partial", no_argument, NULL, 'l'},
		{"help", no_argument, NULL, 'h'},
		{"version", no_argument, NULL, 'v'},
		{NULL, 0, NULL, 0},
	};
	int option;

	opterr = 0;
	while ((option = getopt_long(argc, argv, ":h", options, NULL)) != -1)
	{
		switch (option)
		{
			case 'p':
				cutover->publisher_conninfo = optarg;
				break;
			case 's':
				cutover->subscriber_conninfo = optarg;
				break;
			case 'n':
				cutover->subscription = optarg;
				break;
			case 'u':
				cutover->until = read_number("until", optarg, 1, 6);
				break;
			case 't':
				cutover->timeout = read_number("timeout", optarg, 1, 999999);
				break;
			case 'm':
				cutover->margin = read_number("margin", optarg, 0, INT64_C(999999999999999));
				break;
			case 'c':
				cutover->check = true;
				break;
			case 'a':
				cutover->abort = true;
				break;
			case 'l':
				cutover->partial = true;
				break;
			case 'h':
				print_usage();
				exit(EXIT_SUCCESS);
			case 'v':
				common_print_version();
				exit(EXIT_SUCCESS);
			case ':':
				common_wrong_use("%s needs a value", argv[optind - 1]);
			default:
				common_wrong_use("unknown argument %s", argv[optind - 1]);
		}
	}
	if (optind < argc)
		common_wrong_use("unknown argument %s", argv[optind]);
	if (cutover->publisher_conninfo == NULL)
		common_wrong_use("--publisher is missing");
	if (cutover->subscriber_conninfo == NULL)
		common_wrong_use("--subscriber is missing");
	if (cutover->subscription == NULL)
		common_wrong_use("--subscription is missing");
	if (cutover->check && cutover->abort)
		common_wrong_use("--check and --abort exclude each other");
}

int
main(int argc, char **argv)
{
	Cutover *cutover = &the_cutover;

	common_begin("idem_cutover", end_program);
	read_arguments(cutover, argc, argv);
	setenv("PGCONNECT_TIMEOUT", "15", 0);
	connect_servers(cutover);
	if (cutover->check)
		check_only(cutover);
	else
	{
		take_over(cutover, &cutover->publisher);
		if (cutover->abort)
			abort_cutover(cutover);
		else
		{
			make_cutover(cutover);
			common_print(stdout, "The subscriber is the primary now. Do not let clients write on the old server.");
		}
	}
	return EXIT_SUCCESS;
}
