/*
 * idem_move.c
 *		Move slots of keys and jobs, with their rows, from one database to another (M8).
 *
 * doc/shards-protocol.md, "Moving slots", says why the steps are in this order, and what is there
 * if the program stops after each of them.  Nothing is remembered outside of the two databases: a
 * run looks at both maps and goes on from there.
 *
 * The program uses one session in each database.  A step that changes something is a function for
 * common_try(): if another session has held a lock for too long, it starts anew.
 */
#include <getopt.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "idem_move.h"

static Move move = {
	.batch = 64, .lock_timeout = "5s", .stop_after = "", .standby_wait = true};
/* Has this run begun to change something? */
static bool has_begun = false;

static void
print_help(void)
{
	fputs(
		"idem_move moves slots of keys and jobs, with their rows, from one database to another.\n"
		"\n"
		"Usage:\n"
		"  idem_move --from CONNECTION --to CONNECTION --slots RANGES [OPTION]...\n"
		"\n"
		"  --from CONNECTION    the database that has the slots, for example 'host=db1 dbname=shop'\n"
		"  --to CONNECTION      the database that will have them; it needs a map, '{}' if it is new\n"
		"  --slots RANGES       for example '{[0,256)}' or '{[7,8),[100,120)}'\n"
		"\n"
		"What to do (default: move the slots):\n"
		"  --check              only look whether the slots can move; nothing changes\n"
		"  --abort              take slots back that were given up and have not arrived\n"
		"\n"
		"What moves:\n"
		"  --table NAME:SLOT    also move rows of this table, for example\n"
		"                       'shop.orders:pg_catalog.idem_slot(order_key)'. SLOT is an SQL\n"
		"                       expression for the slot of a row. Qualify all names. Repeat the\n"
		"                       option for more tables, referenced tables first. Name the same\n"
		"                       tables in every run.\n"
		"  --trust-owners       accept tables whose owners could run code with your privileges:\n"
		"                       triggers, check constraints, expressions and the like of roles\n"
		"                       that are no superusers\n"
		"  --schedules          when the source gives up its last slots, move its schedules, too\n"
		"\n"
		"How:\n"
		"  --batch NUMBER       slots that move at a time (default 64); the keys of one batch cannot\n"
		"                       be used while it is copied\n"
		"  --switch COMMAND     run this shell command after each batch has arrived; IDEM_SLOTS has\n"
		"                       its slots. It tells the router. It can run more than once for a batch.\n"
		"  --lock-timeout TIME  how long to wait for open transactions, and to keep the others\n"
		"                       waiting, before trying again (default 5s)\n"
		"  --no-standby-wait    do not wait until all standbys have received each step\n"
		"  --stop-after STEP    give, take or switch: stop there, in the first batch, with exit status 1\n"
		"  --help, --version\n"
		"\n"
		"If it stops, for whatever reason, run the same command again: it goes on where it stopped.\n"
		"Meanwhile no database accepts the keys of the batch, or one does, never two. Ctrl-C stops it\n"
		"cleanly.\n"
		"\n"
		"Both connections must be those of superusers, to the primaries, not through a pooler. A\n"
		"password must not be in CONNECTION, because every user of the machine sees it there: use the\n"
		"file .pgpass, a service file (service=NAME), or PGPASSWORD.\n"
		"\n"
		"Exit status: 0 everything has moved, or can move; 1 it has stopped; 2 wrong use.\n",
		stdout);
}

/* After an error: the exit status, and how to go on */
static int
end_program(void)
{
	if (has_begun && move.mode == MODE_MOVE)
		common_warn("run the same command again: it goes on where it has stopped");
	return EXIT_STOPPED;
}

#define say(...) common_print(stdout, "idem_move: " __VA_ARGS__)

/*
 * Standbys
 */

/*
 * Standbys, and physical replication slots, that have not written what is there at the position $1
 */
static const char standby_query[] =
	"SELECT string_agg(s.name, ', ' ORDER BY s.name)\n"
	"  FROM (SELECT 'standby ' || r.application_name\n"
	"		  FROM pg_stat_replication AS r\n"
	"		 WHERE r.state <> 'backup' AND (r.flush_lsn IS NULL OR r.flush_lsn < $1::pg_lsn)\n"
	"		   AND NOT EXISTS (SELECT FROM pg_replication_slots AS l WHERE l.active_pid = r.pid AND l.slot_type = 'logical')\n"
	"		UNION\n"
	"		SELECT 'slot ' || l.slot_name\n"
	"		  FROM pg_replication_slots AS l\n"
	"		 WHERE l.slot_type = 'physical' AND NOT l.temporary AND (l.restart_lsn < $1::pg_lsn OR NOT l.active)\n"
	"		UNION\n"
	"		SELECT 'a synchronous standby'\n"
	"		 WHERE current_setting('synchronous_standby_names') <> ''\n"
	"		   AND NOT EXISTS (SELECT FROM pg_stat_replication AS r WHERE r.sync_state IN ('sync', 'quorum'))) AS s (name)";

static const char connected_query[] =
	"SELECT DISTINCT r.application_name FROM pg_stat_replication AS r\n"
	" WHERE r.state <> 'backup'\n"
	"   AND NOT EXISTS (SELECT FROM pg_replication_slots AS l WHERE l.active_pid = r.pid AND l.slot_type = 'logical')";

/* M8: returns once every standby that is connected, or has a slot, has written what is there now */
static void
wait_for_standbys(Database *database)
{
	Server *server = &database->server;
	char *lsn;
	char *behind;
	PGresult *before;
	PGresult *now;
	bool said = false;

	if (!move.standby_wait)
		return;
	lsn = common_value(server, "SELECT pg_current_wal_flush_lsn()", 0);
	before = common_query(server, connected_query, 0);
	while ((behind = common_value(server, standby_query, 1, lsn)) != NULL)
	{
		if (!said)
			say("waiting until standbys have received this: %s", behind);
		said = true;
		free(behind);
		common_sleep(200);
	}
	/* one that has left without it could be promoted without it */
	now = common_query(server, connected_query, 0);
	for (int row = 0; row < PQntuples(before); row++)
	{
		bool is_there = false;

		for (int other = 0; other < PQntuples(now); other++)
			is_there |= strcmp(PQgetvalue(before, row, 0), PQgetvalue(now, other, 0)) == 0;
		if (!is_there)
			common_die("a standby has disconnected (%s); run this again when it is back, or with --no-standby-wait if it will never be promoted", PQgetvalue(before, row, 0));
	}
	PQclear(before);
	PQclear(now);
	free(lsn);
}

/*
 * Steps
 */

/* The arguments and the answer of a step */
typedef struct Step
{
	const Slots *slots;
	Database *database; /* that the step changes */
	Database *other;
	const char *sender; /* for confirm_slots() */
	char *above;		/* of give_slots() */
	uint64_t rows[64];	/* of copy_slots() */
} Step;

static bool
try_step(void (*work)(void *), Step *step)
{
	Server *const servers[] = {&move.source.server, &move.target.server};

	has_begun = true;
	return common_try(work, step, servers, 2, move.mode == MODE_ABORT ? 1 : 10);
}

/* Step 1 of the protocol */
static void
give_slots(void *argument)
{
	Step *step = argument;

	step->above = common_value(&step->database->server, "SELECT pg_catalog.idem_shard_give($1::int4multirange, $2::uuid)", 2,
							   maps_format(step->slots), step->other->id);
}

/* Steps 3 and 4 */
static void
copy_slots(void *argument)
{
	Step *step = argument;

	copy_batch(&move, step->slots, step->above, step->rows);
}

/*
 * The schedules of a database without slots were copied with its last ones: those that the other
 * database has do not come back to life here when slots come back.
 */
static void
purge_schedules(Step *step)
{
	Server *server = &step->database->server;
	char *names;
	char *purged;

	if (!common_is_true(server, "SELECT isempty(slots) FROM idem.shard", 0))
		return;
	names = common_value(&step->other->server, "SELECT array_agg(name) FROM idem.schedules", 0);
	if (names == NULL)
		return;
	purged = common_value(server, "WITH d AS (DELETE FROM idem.schedules WHERE name = ANY ($1) RETURNING name) SELECT string_agg(name, ', ' ORDER BY name) FROM d", 1, names);
	if (purged != NULL)
		say("schedules that have moved are deleted in the %s: %s", server->name, purged);
}

static void
delete_rows(Server *server, const char *table, char *condition)
{
	char *sql = common_format("DELETE FROM %s WHERE %s", table, condition);

	common_run(server, sql, 0);
	free(sql);
	free(condition);
}

/*
 * Step 7, also for rows of an earlier move: delete what a database has left of slots that it has
 * given up.  Under its lock the other database is asked whether it has the slots: then these rows
 * are not the only ones.
 */
static void
purge_slots(void *argument)
{
	Step *step = argument;
	Server *server = &step->database->server;
	char *ranges = maps_format(step->slots);

	common_run(server, "BEGIN ISOLATION LEVEL READ COMMITTED", 0);
	maps_lock(step->database, "SHARE ROW EXCLUSIVE");
	guard_lock(&move, server);
	if (!common_is_true(&step->other->server, "SELECT slots @> $1::int4multirange AND pg_catalog.idem_shard_id()::text = $2 FROM idem.shard", 2, ranges, step->other->id) ||
		!common_is_true(server, "SELECT given @> $1::int4multirange AND receiver::text = $2 FROM idem.shard", 2, ranges, step->other->id))
		common_die("the %s has not given up %s for the other database, or that one does not have them: nothing is deleted", server->name, ranges);
	for (int i = move.ntables - 1; i >= 0; i--)
		delete_rows(server, move.tables[i].qualified,
					maps_user_condition(&move.tables[i], step->slots));
	for (int table = 0; table < NTABLES; table++)
		delete_rows(server, maps_tables[table], maps_condition(step->database, table, step->slots));
	purge_schedules(step);
	common_run(server, "UPDATE idem.shard SET given = NULLIF(given - $1::int4multirange, '{}'),"
					   " receiver = CASE WHEN given <@ $1::int4multirange THEN NULL ELSE receiver END",
			   1, ranges);
	common_run(server, "COMMIT", 0);
}

/*
 * Step 8: the database that had the slots has no rows left, nor have its standbys, so this one may
 * give them to others.
 */
static void
confirm_slots(void *argument)
{
	Step *step = argument;
	Server *server = &step->database->server;

	common_run(server, "BEGIN ISOLATION LEVEL READ COMMITTED", 0);
	maps_lock(step->database, "SHARE ROW EXCLUSIVE");
	common_run(server, "UPDATE idem.shard SET taken = NULLIF(taken - $1::int4multirange, '{}'),"
					   " sender = CASE WHEN taken <@ $1::int4multirange THEN NULL ELSE sender END"
					   " WHERE sender = $2::uuid",
			   2, maps_format(step->slots), step->other->id);
	common_run(server, "COMMIT", 0);
}

/*
 * The target must not take the slots later: a transaction that copies them may be under way, also
 * without this program.  It has remembered the version of the row that this replaces.
 */
static void
take_back(void *argument)
{
	Step *step = argument;
	Server *source = &move.source.server;
	Server *target = &move.target.server;
	char *ranges = maps_format(step->slots);

	common_run(source, "BEGIN ISOLATION LEVEL READ COMMITTED", 0);
	maps_lock(&move.source, "SHARE ROW EXCLUSIVE");
	common_run(target, "BEGIN ISOLATION LEVEL READ COMMITTED", 0);
	maps_lock(&move.target, "SHARE ROW EXCLUSIVE");
	if (common_is_true(target, "SELECT (slots + COALESCE(given, '{}')) && $1::int4multirange FROM idem.shard", 1, ranges))
		common_die("the target has slots of %s; run this again without --abort, or move them back", ranges);
	common_run(target, "UPDATE idem.shard SET id = id", 0);
	common_run(target, "COMMIT", 0);
	common_run(source, "SELECT pg_catalog.idem_shard_take($1::int4multirange, 0, $2::uuid)", 2, ranges, move.target.id);
	common_run(source, "COMMIT", 0);
}

static void
stop_here(const char *step)
{
	if (strcmp(move.stop_after, step) != 0)
		return;
	say("stopped after step \"%s\"; run the command again without --stop-after", step);
	exit(EXIT_STOPPED);
}

/* Run the command of --switch, which is the caller's; IDEM_SLOTS is made from numbers. */
static void
switch_router(const char *ranges)
{
	int status;

	if (move.switch_command == NULL)
		return;
	if (setenv("IDEM_SLOTS", ranges, 1) != 0)
		common_die("out of memory");
	fflush(NULL);
	status = system(move.switch_command);
	if (WIFSIGNALED(status) && (WTERMSIG(status) == SIGINT || WTERMSIG(status) == SIGQUIT))
		common_die("the command of --switch was stopped");
	common_check_signals();
	if (status != 0)
		common_die("the command of --switch failed; correct it and run this again");
}

/*
 * Rows of the tables of the user are about to be deleted.  A table that was not named when they
 * were copied has none in the other database.
 */
static void
check_copied(const Slots *slots, Database *database, Database *other)
{
	common_run(&database->server, "BEGIN", 0);
	guard_lock(&move, &database->server);
	common_run(&other->server, "BEGIN", 0);
	guard_lock(&move, &other->server);
	for (int i = 0; i < move.ntables; i++)
	{
		const UserTable *table = &move.tables[i];

		if (guard_has_rows(&database->server, table, slots) &&
			!guard_has_rows(&other->server, table, slots))
			common_die("table %s would lose its rows of %s, which the other database does not have: it was not named when they moved. Name the same tables in every run; move the slots back without this table, and forward with it", table->shown, maps_format(slots));
	}
	common_run(&other->server, "ROLLBACK", 0);
	common_run(&database->server, "ROLLBACK", 0);
}

/* Slots that have arrived before this run: has a table that is named now stayed in the source? */
static void
check_left(const Slots *slots)
{
	common_run(&move.source.server, "BEGIN", 0);
	guard_lock(&move, &move.source.server);
	for (int i = 0; i < move.ntables; i++)
	{
		if (guard_has_rows(&move.source.server, &move.tables[i], slots))
			common_die("table %s still has rows of %s in the source, although the slots have moved: it was not named in an earlier run. Copy these rows by hand", move.tables[i].shown, maps_format(slots));
	}
	common_run(&move.source.server, "ROLLBACK", 0);
}

/* After the target has the slots */
static void
finish_batch(const Slots *slots)
{
	Step purge = {.slots = slots, .database = &move.source, .other = &move.target};
	Step confirm = {.slots = slots, .database = &move.target, .other = &move.source};
	char *ranges = maps_format(slots);

	wait_for_standbys(&move.target);
	switch_router(ranges);
	stop_here("switch");
	check_copied(slots, &move.source, &move.target);
	if (!try_step(purge_slots, &purge))
		common_die("could not delete the rows of the source");
	wait_for_standbys(&move.source);
	if (!try_step(confirm_slots, &confirm))
		common_die("could not note this in the target");
	say("%s: deleted in the source", ranges);
	free(ranges);
}

static void
move_batch(const Slots *slots)
{
	Step step = {.slots = slots, .database = &move.source, .other = &move.target};
	char *ranges = maps_format(slots);

	if (!try_step(give_slots, &step))
		common_die("could not give up %s; the source has the slots", ranges);
	say("%s: given up by the source", ranges);
	move.source.slots = maps_minus(&move.source.slots, slots);
	wait_for_standbys(&move.source);
	stop_here("give");
	if (!try_step(copy_slots, &step))
		common_die("could not copy %s; run this again, or with --abort", ranges);
	say("%s: taken by the target, %llu keys, %llu jobs", ranges,
		(unsigned long long) step.rows[TABLE_KEYS], (unsigned long long) step.rows[TABLE_JOBS]);
	move.done += maps_count(slots);
	stop_here("take");
	finish_batch(slots);
	free(ranges);
}

/*
 * What to do, from the two maps
 */

/* Slots that were given up come back, unless the target has them. */
static void
abort_move(const Slots *pending)
{
	Step step = {.slots = pending};
	char *ranges = maps_format(pending);

	if (maps_is_empty(pending))
		common_die("nothing to take back: the source has given up none of these slots, or the target has them already (then run without --abort, or move them back)");
	if (!maps_is_id(move.source.receiver, move.target.id))
		common_die("the source has given up %s for another database (%s); name that one with --to", ranges, move.source.receiver);
	if (!try_step(take_back, &step))
		common_die("the target has slots of %s or is taking them, or does not answer; run this again", ranges);
	say("%s: taken back by the source", ranges);
}

/* Rows of an earlier move of the slots in the other direction: the source has newer ones. */
static void
purge_stale(const Slots *stale, const Slots *confused)
{
	Step step = {.slots = stale, .database = &move.target, .other = &move.source};

	if (move.mode == MODE_CHECK)
		common_die("the target still has rows of %s from an earlier move; a move deletes them first", maps_format(stale));
	if (!maps_is_empty(confused))
		common_die("both databases have given up %s; run --abort for the one that had them last", maps_format(confused));
	check_copied(stale, &move.target, &move.source);
	if (!try_step(purge_slots, &step))
		common_die("could not delete old rows of the target");
	say("%s: rows of an earlier move are deleted in the target", maps_format(stale));
}

static void
confirm_step(const Slots *slots, Database *database, Database *other)
{
	Step step = {.slots = slots, .database = database, .other = other};

	wait_for_standbys(other);
	if (!try_step(confirm_slots, &step))
		common_die("could not note in the %s that the %s has no rows left", database->server.name, other->server.name);
}

static void
move_slots(void)
{
	Database *source = &move.source;
	Database *target = &move.target;
	const Slots todo = maps_minus(&move.wanted, &target->slots);
	const Slots arrived = maps_and(&move.wanted, &target->slots);
	const Slots pending = maps_and(&todo, &source->given);
	const Slots unpurged = maps_and(&arrived, &source->given);
	Slots unconfirmed = maps_and(&move.wanted, &target->taken);
	const Slots others = maps_minus(&target->taken, &unpurged);
	const Slots stale = maps_and(&todo, &target->given);
	const Slots confused = maps_and(&stale, &source->given);
	const Slots unfinished = maps_and(&todo, &source->taken);
	Slots missing = maps_minus(&todo, &source->slots);
	Slots left = todo;

	missing = maps_minus(&missing, &source->given);
	unconfirmed = maps_minus(&unconfirmed, &source->given);
	if (move.mode == MODE_ABORT)
	{
		abort_move(&pending);
		return;
	}
	if (!maps_is_empty(&pending) && !maps_is_id(source->receiver, target->id))
		common_die("the source has given up %s for another database (%s), which may have taken them; finish that move first, or --abort it", maps_format(&pending), source->receiver);
	if (!maps_is_empty(&others) && !maps_is_empty(&todo) && !maps_is_id(target->sender, source->id))
		common_die("the target has taken %s from another database (%s), which may still have their rows; finish that move first", maps_format(&others), target->sender);
	if (!maps_is_empty(&unfinished) && !maps_is_id(source->sender, target->id))
		common_die("the source has taken %s from another database (%s), which may still have their rows; finish that move first", maps_format(&unfinished), source->sender);
	if (!maps_is_empty(&missing))
		common_die("the source has neither %s nor given it up; is --from the right one?", maps_format(&missing));
	precheck_tables(&move);
	if (!maps_is_empty(&stale))
		purge_stale(&stale, &confused);
	if (move.mode == MODE_MOVE && !maps_is_empty(&unfinished))
		confirm_step(&unfinished, source, target);
	if (!maps_is_empty(&todo))
		precheck_everything(&move, &todo);
	if (move.mode == MODE_CHECK)
	{
		if (maps_is_empty(&todo))
			say("nothing to move: the target has %s; is --from the right one?", maps_format(&arrived));
		else
			say("%s can move; of these, %s is given up already, and no database accepts it", maps_format(&todo), maps_format(&pending));
		return;
	}
	precheck_copy_queues(&move);
	if (!maps_is_empty(&unpurged))
		finish_batch(&unpurged);
	if (!maps_is_empty(&arrived))
		check_left(&arrived);
	if (!maps_is_empty(&unconfirmed))
	{
		if (!maps_is_id(target->sender, source->id))
			common_die("the target has taken %s from another database (%s); finish that move first", maps_format(&unconfirmed), target->sender);
		confirm_step(&unconfirmed, target, source);
	}
	move.all = maps_count(&todo);
	while (!maps_is_empty(&left))
	{
		const Slots batch = maps_first(&left, move.batch);

		move_batch(&batch);
		left = maps_minus(&left, &batch);
	}
	say("%s: moved", maps_format(&move.wanted));
}

/*
 * Arguments
 */

static void
add_table(const char *argument)
{
	const char *colon = strchr(argument, ':');

	if (colon == NULL || colon == argument || colon[1] == '\0')
		common_wrong_use("--table takes NAME:SLOT");
	if (move.ntables == 50)
		common_wrong_use("--table can be there 50 times");
	if (move.tables == NULL)
		move.tables = common_alloc(50 * sizeof(UserTable));
	move.tables[move.ntables].qualified = common_format("%.*s", (int) (colon - argument), argument);
	move.tables[move.ntables].slot = common_copy(colon + 1);
	move.ntables++;
}

static void
read_arguments(int argc, char **argv, const char **from, const char **to)
{
	enum
	{
		FROM,
		TO,
		SLOTS,
		TABLE,
		BATCH,
		SWITCH,
		LOCK_TIMEOUT,
		NO_STANDBY_WAIT,
		STOP_AFTER,
		CHECK,
		ABORT,
		TRUST_OWNERS,
		SCHEDULES,
		VERSION,
	};
	static const struct option options[] = {
		{"from", required_argument, NULL, FROM},
		{"to", required_argument, NULL, TO},
		{"slots", required_argument, NULL, SLOTS},
		{"table", required_argument, NULL, TABLE},
		{"batch", required_argument, NULL, BATCH},
		{"switch", required_argument, NULL, SWITCH},
		{"lock-timeout", required_argument, NULL, LOCK_TIMEOUT},
		{"no-standby-wait", no_argument, NULL, NO_STANDBY_WAIT},
		{"stop-after", required_argument, NULL, STOP_AFTER},
		{"check", no_argument, NULL, CHECK},
		{"abort", no_argument, NULL, ABORT},
		{"trust-owners", no_argument, NULL, TRUST_OWNERS},
		{"schedules", no_argument, NULL, SCHEDULES},
		{"version", no_argument, NULL, VERSION},
		{"help", no_argument, NULL, 'h'},
		{NULL, 0, NULL, 0}};
	const char *slots = NULL;
	int64_t batch;
	int option;

	while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1)
	{
		switch (option)
		{
			case FROM:
				*from = optarg;
				break;
			case TO:
				*to = optarg;
				break;
			case SLOTS:
				slots = optarg;
				break;
			case TABLE:
				add_table(optarg);
				break;
			case BATCH:
				if (!common_number(optarg, 1, NSLOTS, &batch))
					common_wrong_use("--batch takes a number of slots, 1 to %d", NSLOTS);
				move.batch = (int) batch;
				break;
			case SWITCH:
				move.switch_command = optarg;
				break;
			case LOCK_TIMEOUT:
				move.lock_timeout = optarg;
				break;
			case NO_STANDBY_WAIT:
				move.standby_wait = false;
				break;
			case STOP_AFTER:
				move.stop_after = optarg;
				break;
			case CHECK:
			case ABORT:
				if (move.mode != MODE_MOVE)
					common_wrong_use("--check and --abort exclude one another");
				move.mode = option == CHECK ? MODE_CHECK : MODE_ABORT;
				break;
			case TRUST_OWNERS:
				move.trust_owners = true;
				break;
			case SCHEDULES:
				move.schedules = true;
				break;
			case VERSION:
				common_print_version();
				exit(0);
			case 'h':
				print_help();
				exit(0);
			default:
				/* getopt_long() has said why */
				exit(EXIT_USAGE);
		}
	}
	if (optind < argc)
		common_wrong_use("unknown argument %s", argv[optind]);
	if (*from == NULL)
		common_wrong_use("--from is missing");
	if (*to == NULL)
		common_wrong_use("--to is missing");
	if (slots == NULL)
		common_wrong_use("--slots is missing");
	if (!maps_parse(slots, &move.wanted))
		common_wrong_use("--slots takes ranges such as '{[0,256)}'");
	if (maps_is_empty(&move.wanted))
		common_wrong_use("there are no such slots: they are 0 to %d", NSLOTS - 1);
	if (strcmp(move.stop_after, "") != 0 && strcmp(move.stop_after, "give") != 0 &&
		strcmp(move.stop_after, "take") != 0 && strcmp(move.stop_after, "switch") != 0)
		common_wrong_use("--stop-after takes give, take or switch");
}

static void
connect_to(Database *database, const char *name, const char *conninfo)
{
	common_connect(&database->server, name, conninfo, NULL);
	/* this program reads tables and system views; a table cannot turn into something else */
	if (common_is_true(&database->server, "SELECT true FROM pg_settings WHERE name = 'restrict_nonsystem_relation_kind'", 0))
		common_set(&database->server, "restrict_nonsystem_relation_kind", "view, foreign-table", false);
	/* the server notices within a second that this program was killed; not every platform can */
	PQclear(common_attempt(&database->server, "SELECT set_config('client_connection_check_interval', '1s', false)", 0));
	precheck_server(&database->server);
	/*
	 * A row that moves is not new: triggers have seen it in the source.  This concerns the tables
	 * of idem as well, on which a role can have TRIGGER.
	 */
	common_set(&database->server, "session_replication_role", "replica", false);
	maps_read(database);
}

int
main(int argc, char **argv)
{
	const char *from = NULL;
	const char *to = NULL;

	common_begin("idem_move", end_program);
	read_arguments(argc, argv, &from, &to);
	connect_to(&move.source, "source", from);
	connect_to(&move.target, "target", to);
	precheck_databases(&move);
	precheck_alone(&move, &move.source);
	precheck_alone(&move, &move.target);
	/* another run may have changed them until now */
	maps_read(&move.source);
	maps_read(&move.target);
	move_slots();
	common_end_progress();
	common_disconnect(&move.source.server);
	common_disconnect(&move.target.server);
	return 0;
}
