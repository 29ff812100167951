/*
 * steps.c
 *		Steps 1 to 3: the publisher becomes read-only, and the subscriber receives everything.
 *
 * No step trusts an earlier run: each looks at what is there.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "idem_cutover.h"

/* A command with a name in it, which takes no parameters */
void
steps_run_named(Server *server, const char *before, const char *name, const char *after)
{
	char *quoted = common_quote_name(server, name);
	char *sql = common_format("%s%s%s", before, quoted, after);

	common_run(server, sql, 0);
	free(sql);
	free(quoted);
}

/* False if the time is over; a line now and then says what the program waits for. */
bool
steps_wait_quietly(Cutover *cutover, const char *what, Condition is_met, char **state)
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

void
steps_wait_until(Cutover *cutover, const char *what, Condition is_met)
{
	char *state;

	if (!steps_wait_quietly(cutover, what, is_met, &state))
		common_die("gave up after %" PRId64 " s: %s%s%s", cutover->timeout, what,
				   state == NULL ? "" : ": ", state == NULL ? "" : state);
	free(state);
}

bool
steps_is_read_only(Cutover *cutover)
{
	return common_is_true(
		&cutover->publisher,
		"SELECT count(*) > 0 FROM pg_db_role_setting AS s, unnest(s.setconfig) AS c (setting)"
		" WHERE s.setrole = 0 AND c.setting = 'default_transaction_read_only=on' AND s.setdatabase = " THIS_DATABASE,
		0);
}

/*
 * End the sessions of the publisher that may write: those that began before the database became
 * read-only, and those that have a transaction id, because they have said READ WRITE.  Walsenders
 * that stream read only.  Returns how many there were.
 */
int
steps_end_sessions(Cutover *cutover)
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

bool
steps_have_sessions_ended(Cutover *cutover, char **state)
{
	int n = steps_end_sessions(cutover);

	*state = common_format("%d sessions", n);
	return n == 0;
}

/* The prepared transactions of the database, or NULL */
char *
steps_list_prepared(Server *server)
{
	return common_value(server,
						"SELECT string_agg(gid, ', ' ORDER BY gid) FROM pg_prepared_xacts"
						" WHERE database = current_database()",
						0);
}

static void
refuse_prepared(Cutover *cutover)
{
	char *gids = steps_list_prepared(&cutover->publisher);

	if (gids == NULL)
		return;
	common_warn("there are prepared transactions on the publisher: %s", gids);
	common_print(stderr, "Commit them or roll them back, in a session after SET default_transaction_read_only = off.");
	idem_cutover_stop();
}

bool
steps_has_received(Cutover *cutover, char **state)
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

void
steps_set_read_only(Cutover *cutover)
{
	Server *server = &cutover->publisher;
	char *database = common_value(server, "SELECT current_database()", 0);

	steps_run_named(server, "ALTER DATABASE ", database, " SET default_transaction_read_only = on");
	cutover->status = EXIT_READ_ONLY;
	free(database);
	if (!steps_is_read_only(cutover))
		common_die("the publisher is not read-only; was the database renamed?");
	cutover->since = common_value(server, "SELECT clock_timestamp()", 0);
	steps_wait_until(cutover, "sessions of the publisher do not end", steps_have_sessions_ended);
	refuse_prepared(cutover);
	common_print(stdout, "step 1   the publisher is read-only, and sessions from before have ended");
}

/* The commit of the message flushes the WAL before it, also that of asynchronous commits. */
void
steps_flush_wal(Cutover *cutover)
{
	common_run(&cutover->publisher, "SELECT pg_logical_emit_message(true, 'idem_cutover', '')", 0);
}

/*
 * The order matters.  A transaction of this database that writes has an id.  Either its session is
 * found and ended, or it has ended before the message, and lsn is behind its commit, or it begins
 * later; the last look finds that.
 */
void
steps_note_position(Cutover *cutover)
{
	steps_wait_until(cutover, "sessions of the publisher do not end", steps_have_sessions_ended);
	refuse_prepared(cutover);
	steps_flush_wal(cutover);
	free(cutover->lsn);
	cutover->lsn = common_value(&cutover->publisher, "SELECT pg_current_wal_flush_lsn()", 0);
}

void
steps_receive_all(Cutover *cutover)
{
	char *what = common_format("the subscriber has not received everything up to %s", cutover->lsn);

	steps_wait_until(cutover, what, steps_has_received);
	free(what);
}

/* What both have to have: numbers of rows, and the map of slots */
static char *
summarize_tables(Server *server)
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
void
steps_compare_tables(Cutover *cutover)
{
	double began = common_now();
	char *prepared;

	for (;;)
	{
		char *here;
		char *there;
		bool are_equal;

		steps_receive_all(cutover);
		here = summarize_tables(&cutover->publisher);
		there = summarize_tables(&cutover->subscriber);
		are_equal = strcmp(here, there) == 0;
		if (are_equal)
			common_print(stdout, "step 3   the subscriber has received it: %s", here);
		else if (common_now() - began >= (double) cutover->timeout)
		{
			common_warn("the tables of idem differ, although the subscriber has received everything");
			common_print(stderr, "publisher:  %s", here);
			common_print(stderr, "subscriber: %s", there);
			common_print(stderr, "If the worker of the publisher is removing many rows: set idem.cleanup = off there, for the database.");
			idem_cutover_stop();
		}
		free(here);
		free(there);
		if (are_equal)
			break;
		common_sleep(100);
		steps_note_position(cutover);
	}
	prepared = steps_list_prepared(&cutover->subscriber);
	if (prepared != NULL)
		common_die("there are prepared transactions on the subscriber: %s", prepared);
}
