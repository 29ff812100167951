/*
 * idem_cutover.c
 *		Make the subscriber of a logical replication the new primary.
 *
 * The state is on the two servers, not in this program: every step looks at what it finds there
 * and can be repeated, so the program can be killed at any point and started again.  "Step 5" in
 * doc/replication.md has a table of what a run leaves behind.
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

/* Of two runs the later one takes over: the advisory lock of its two sessions, "idem", "cuto" */
#define LOCK_KEYS "1768187245, 1668641903"

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

void
idem_cutover_stop(void)
{
	exit(end_program());
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
		idem_cutover_stop();
	common_print(stdout, "step 6   idem_doctor() reports no failure on the new primary");
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

static void
refuse_missing(Cutover *cutover)
{
	common_warn("there is no subscription %s in the database of --subscriber", cutover->subscription);
	if (cutover->status == EXIT_DROPPED)
		common_print(stderr, "If it was dropped, the subscriber is the primary, and its changes are not on the publisher.");
	else
		common_print(stderr, "Check the arguments. No cutover to this database was begun.");
	idem_cutover_stop();
}

/*
 * An earlier run has taken the slot away from the subscription, and has not dropped it: put the
 * slot back.
 */
static void
resume_detached(Cutover *cutover, const char *slot, const char *lsn)
{
	cutover->is_detached = true;
	if (!drop_exists_slot(cutover, slot))
	{
		/* the slot is dropped last, so the subscription had been gone */
		cutover->status = EXIT_DROPPED;
		common_warn("subscription %s is disabled, and its slot %s is gone from the publisher", cutover->subscription, slot);
		common_print(stderr, "Either the slot was dropped by hand, or an earlier run has dropped the subscription, and this subscriber is a");
		common_print(stderr, "standby that was promoted before it got that. Then drop the subscription by hand, and run again.");
		idem_cutover_stop();
	}
	free(cutover->slot);
	cutover->slot = common_copy(slot);
	drop_put_back(cutover, lsn);
	common_print(stdout, "note     an earlier run has stopped in step 5; the subscription was put back");
}

static void
let_clients_write(Cutover *cutover)
{
	Server *server = &cutover->publisher;
	char *database = common_value(server, "SELECT current_database()", 0);

	drop_remove_mark(cutover);
	steps_run_named(server, "ALTER DATABASE ", database, " RESET default_transaction_read_only");
	free(database);
	/* sessions that began meanwhile would stay read-only */
	cutover->since = common_value(server, "SELECT clock_timestamp()", 0);
	steps_wait_until(cutover, "sessions of the publisher do not end", steps_have_sessions_ended);
	common_print(stdout, "Clients can write on the publisher again. Sessions that were read-only have been ended.");
}

/* Without its subscription the subscriber may have changes that the publisher lacks. */
static void
abort_cutover(Cutover *cutover)
{
	bool was_read_only = steps_is_read_only(cutover);
	char *slot;
	char *lsn;

	if (was_read_only)
		cutover->status = EXIT_READ_ONLY;
	drop_refuse_foreign_mark(cutover);
	if (cutover->subscriber.conn == NULL)
	{
		if (drop_read_mark(cutover) != NULL)
			common_die("the subscriber cannot be reached, and an earlier run may have dropped its subscription");
		if (was_read_only)
			common_print(stdout, "note     the subscriber cannot be reached; no run of this program has begun to drop its subscription");
	}
	else
	{
		take_over(cutover, &cutover->subscriber);
		slot = drop_marked_slot(cutover, &lsn);
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
	if (!steps_is_read_only(cutover))
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
	if (steps_is_read_only(cutover))
		cutover->status = EXIT_READ_ONLY;
	drop_refuse_foreign_mark(cutover);
	slot = drop_marked_slot(cutover, &lsn);
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
		steps_wait_until(cutover, "the subscription does not start", drop_is_slot_in_use);
	}
	checks_run(cutover);
	if (cutover->problems > 0)
	{
		common_warn("%d things are missing for the cutover", cutover->problems);
		common_print(stderr, "Run idem_cutover --check after you have changed that.");
		idem_cutover_stop();
	}
	/* no client has to wait for a subscriber that is far behind */
	cutover->lsn = common_value(&cutover->publisher, "SELECT pg_current_wal_lsn()", 0);
	text = common_format("the subscriber does not keep up, it has not received everything up to %s", cutover->lsn);
	steps_wait_until(cutover, text, steps_has_received);
	free(text);

	steps_set_read_only(cutover);
	stop_after(cutover, 1);

	steps_note_position(cutover);
	common_print(stdout, "step 2   everything that clients have written is before %s", cutover->lsn);
	stop_after(cutover, 2);

	steps_compare_tables(cutover);
	stop_after(cutover, 3);

	sequences_copy(cutover, &count);
	common_print(stdout, "step 4   %d sequences of the subscriber are at least at the values of the publisher", count);
	stop_after(cutover, 4);

	drop_end_subscription(cutover);
	end_cutover(cutover, cutover->slot);
}

static void
check_only(Cutover *cutover)
{
	char *lsn;
	char *slot = drop_marked_slot(cutover, &lsn);

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
