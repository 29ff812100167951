/*
 * drop.c
 *		Step 5: the subscription goes, and nothing that was committed on the publisher is lost.
 *
 * Three facts are not in the catalogs by themselves while this step takes the slot away from the
 * subscription and drops it: which slot it was, how far the subscriber had received it, and that
 * it was this program.  They are in the mark, the comment on an empty schema of the publisher.  A
 * comment is not replicated, only the owner of the schema can change it, and to read it runs no
 * code.
 *
 * The tables of idem are locked on the publisher from before the last look until the slot is
 * gone: meanwhile neither a client nor the worker of idem changes a key or a job there.  A client
 * can change other tables.  The slot shows that, in the last look and once more after the
 * subscription is gone, and is dropped only if there is nothing in it.
 *
 * "Step 5" in doc/replication.md has the order of all this, and what a run leaves behind.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "idem_cutover.h"

/* Rounds while clients write on the publisher */
#define MAX_ROUNDS 5

/* Between the slot and the position in the mark */
#define MARK_POSITION ", received up to "

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

/*
 * The mark says which slot is dropped, and from which position on the subscriber receives changes.
 * So it has to be that of a role that could do all this itself: the owner of the database cannot,
 * and may have made the schema before.
 */
#define IS_TRUSTED "(r.rolsuper OR r.rolname = current_user)"

/* The comment on the schema, if a role has made it that is trusted; otherwise NULL */
char *
drop_read_mark(Cutover *cutover)
{
	return common_value(
		&cutover->publisher,
		"SELECT obj_description(n.oid, 'pg_namespace')"
		"  FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner"
		" WHERE n.nspname = 'idem_cutover' AND " IS_TRUSTED,
		0);
}

/* Another role has made the schema: it may have run this program, or be up to something. */
void
drop_refuse_foreign_mark(Cutover *cutover)
{
	char *owner = common_value(
		&cutover->publisher,
		"SELECT r.rolname FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner"
		" WHERE n.nspname = 'idem_cutover' AND NOT " IS_TRUSTED,
		0);

	if (owner == NULL)
		return;
	common_warn("the schema idem_cutover of the publisher belongs to role %s, so what it says of an earlier run is not believed", owner);
	common_print(stderr, "If that role has run idem_cutover, go on as that role. Otherwise drop the schema.");
	idem_cutover_stop();
}

/*
 * The slot that the mark names, or NULL if there is no mark of this subscription.  lsn is set to
 * the position up to which the subscriber has received everything.
 */
char *
drop_marked_slot(Cutover *cutover, char **lsn)
{
	char *mark = drop_read_mark(cutover);
	char *prefix = mark_prefix(cutover);
	size_t length = strlen(prefix);
	char *slot = NULL;

	*lsn = NULL;
	if (mark != NULL && strncmp(mark, prefix, length) == 0)
	{
		const char *name = mark + length;
		size_t name_length = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_");
		const char *position = name + name_length;

		/* anything else is none of ours */
		if (name_length > 0 && strncmp(position, MARK_POSITION, strlen(MARK_POSITION)) == 0)
		{
			position += strlen(MARK_POSITION);
			if (position[strspn(position, "0123456789ABCDEF/")] == '\0')
			{
				slot = common_format("%.*s", (int) name_length, name);
				*lsn = common_copy(position);
			}
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
	char *slot;
	char *lsn;

	common_run(server, "BEGIN", 0);
	if (!common_is_true(server, "SELECT count(*) > 0 FROM pg_namespace WHERE nspname = 'idem_cutover'", 0))
		common_run(server, "CREATE SCHEMA idem_cutover", 0);
	common_run(server, comment, 0);
	common_run(server, "COMMIT", 0);

	/* another role may just have made the schema */
	slot = drop_marked_slot(cutover, &lsn);
	if (slot == NULL || strcmp(slot, cutover->slot) != 0)
		common_die("could not leave a mark on the publisher: another role has just made the schema idem_cutover there");
	free(slot);
	free(lsn);
	free(comment);
	free(quoted);
	free(mark);
	free(prefix);
}

void
drop_remove_mark(Cutover *cutover)
{
	Server *server = &cutover->publisher;

	if (drop_read_mark(cutover) == NULL)
		return;
	common_run(server, "COMMENT ON SCHEMA idem_cutover IS NULL", 0);
	/* it stays if there is something in it, which is none of ours */
	PQclear(common_attempt(server, "DROP SCHEMA idem_cutover", 0));
}

bool
drop_exists_slot(Cutover *cutover, const char *slot)
{
	return common_is_true(&cutover->publisher,
						  "SELECT count(*) > 0 FROM pg_replication_slots"
						  " WHERE slot_name = $1 AND database = current_database() AND plugin = 'pgoutput'",
						  1, slot);
}

bool
drop_is_slot_in_use(Cutover *cutover, char **state)
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
	return !drop_is_slot_in_use(cutover, state);
}

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
		/* one that has written holds the lock; steps_note_position() waits for its end */
		steps_note_position(cutover);
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

/* Take the slot away from the subscription; one transaction, so that a run finds both or none. */
static void
detach_slot(Cutover *cutover)
{
	Server *server = &cutover->subscriber;

	common_run(server, "BEGIN", 0);
	steps_run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " DISABLE");
	steps_run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " SET (slot_name = NONE)");
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
void
drop_put_back(Cutover *cutover, const char *lsn)
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
	steps_run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, options);
	steps_run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " ENABLE");
	common_run(server, "COMMIT", 0);
	cutover->is_detached = false;
	cutover->is_enabled = true;
	free(options);
	free(slot);
}

/*
 * Are there changes in the slot that the subscriber has not confirmed?  publications is an array,
 * or null for all of the database.  Call steps_flush_wal() first.
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
	char *prepared = steps_list_prepared(&cutover->publisher);
	PGresult *result;
	bool has_changes;

	*again = false;
	if (!steps_is_read_only(cutover))
		return common_copy("the publisher is not read-only any more");
	if (prepared != NULL)
		return common_format("a client has prepared a transaction on the publisher: %s", prepared);
	*again = true;
	if (steps_end_sessions(cutover) > 0)
		return common_copy("a client writes on the publisher although it is read-only");
	steps_flush_wal(cutover);
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
void
drop_slot(Cutover *cutover, const char *slot, const char *publications)
{
	double began = common_now();

	/* ends who still writes; what has committed is in the slot */
	steps_end_sessions(cutover);
	steps_flush_wal(cutover);
	while (drop_exists_slot(cutover, slot))
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
		if (strcmp(cutover->publisher.sqlstate, "55006") != 0 &&
			strcmp(cutover->publisher.sqlstate, "42704") != 0)
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
	steps_note_position(cutover);
	steps_receive_all(cutover);
	sequences_copy(cutover, &count);
	leave_mark(cutover);
	detach_slot(cutover);

	if (!steps_wait_quietly(cutover, "the slot is still in use", is_slot_free, &state))
		found = common_format("gave up after %" PRId64 " s: slot %s is still in use", cutover->timeout, cutover->slot);
	else
	{
		/*
		 * Take the lock on the subscription, so that the program waits for it before the last
		 * look and not after it.  DROP cannot be rolled back in full, see drop_put_back().
		 */
		common_run(server, "BEGIN", 0);
		steps_run_named(server, "ALTER SUBSCRIPTION ", cutover->subscription, " DISABLE");
		found = look_again(cutover, again);
		if (found == NULL)
			found = commit_drop(cutover);
	}
	if (found != NULL)
	{
		common_disconnect(&locker);
		if (PQtransactionStatus(server->conn) != PQTRANS_IDLE)
			common_run(server, "ROLLBACK", 0);
		drop_put_back(cutover, cutover->lsn);
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

void
drop_end_subscription(Cutover *cutover)
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
			idem_cutover_stop();
		}
		common_print(stdout, "note     %s; the subscription was put back, once more", found);
		free(found);
	}
	common_print(stdout, "step 5   subscription %s is gone: clients write on the subscriber", cutover->subscription);
}
