/*
 * checks.c
 *		Everything that can be found out before the first change.
 *
 * A check is a query that returns what is wrong, as one column of names; no row is good.
 * --partial accepts what concerns tables other than those of idem.
 */
#include <stdlib.h>
#include <string.h>

#include "idem_cutover.h"

/* The first column of a result */
typedef struct Names
{
	char **list;
	int count;
} Names;

/* A check that --partial accepts, or not */
typedef enum Strictness
{
	STRICT,
	ACCEPTED
} Strictness;

#define SETTINGS                                                            \
	"pg_db_role_setting AS s LEFT JOIN pg_roles AS r ON r.oid = s.setrole," \
	" unnest(s.setconfig) AS c (setting) WHERE s.setdatabase IN (0, " THIS_DATABASE ")"

static int
compare_texts(const void *left, const void *right)
{
	return strcmp(*(char *const *) left, *(char *const *) right);
}

/* False after an error, which is in server->message */
static bool
ask_names(Server *server, Names *names, const char *sql, int nparams, const char *first,
		  const char *second)
{
	PGresult *result = common_attempt(server, sql, nparams, first, second);

	*names = (Names){NULL, 0};
	if (result == NULL)
		return false;
	names->count = PQntuples(result);
	names->list = common_alloc(((size_t) names->count + 1) * sizeof(char *));
	for (int i = 0; i < names->count; i++)
		names->list[i] = common_copy(PQgetvalue(result, i, 0));
	PQclear(result);
	return true;
}

/* Keep only names that are not in the other list; sorts both */
static void
remove_names(Names *names, Names *other)
{
	int kept = 0;

	qsort(names->list, (size_t) names->count, sizeof(char *), compare_texts);
	qsort(other->list, (size_t) other->count, sizeof(char *), compare_texts);
	for (int i = 0; i < names->count; i++)
	{
		if (other->count == 0 ||
			bsearch(&names->list[i], other->list, (size_t) other->count, sizeof(char *),
					compare_texts) == NULL)
			names->list[kept++] = names->list[i];
	}
	names->count = kept;
}

static char *
join_names(const Names *names)
{
	char *text = common_copy(names->list[0]);

	for (int i = 1; i < names->count; i++)
	{
		char *longer = common_format("%s, %s", text, names->list[i]);

		free(text);
		text = longer;
	}
	return text;
}

static void
print_ok(const Cutover *cutover, const char *what)
{
	if (cutover->check)
		common_print(stdout, "ok       %s", what);
}

static void
print_missing(Cutover *cutover, const char *what, const char *detail)
{
	common_print(stdout, "MISSING  %s: %s", what, detail);
	cutover->problems++;
}

static void
print_names(Cutover *cutover, const char *what, Strictness strictness, const Names *names)
{
	char *text;

	if (names->count == 0)
	{
		print_ok(cutover, what);
		return;
	}
	text = join_names(names);
	if (cutover->partial && strictness == ACCEPTED)
		common_print(stdout, "note     %s, accepted: %s", what, text);
	else
		print_missing(cutover, what, text);
	free(text);
}

static void
print_failed(Cutover *cutover, const char *what, const Server *server)
{
	char *detail = common_format("could not be checked: %s", server->message);

	print_missing(cutover, what, detail);
	free(detail);
}

/* The query finds nothing; its parameters, one or two, or null */
static void
expect_none(Cutover *cutover, Server *server, const char *what, Strictness strictness,
			const char *sql, const char *first, const char *second)
{
	Names names;

	if (ask_names(server, &names, sql, second != NULL ? 2 : first != NULL ? 1 :
																			0,
				  first, second))
		print_names(cutover, what, strictness, &names);
	else
		print_failed(cutover, what, server);
}

/* What the first server has and the second one has not; false after an error, which is reported */
static bool
compare_servers(Cutover *cutover, Names *names, const char *what, const char *sql)
{
	Names other;

	if (!ask_names(&cutover->publisher, names, sql, 0, NULL, NULL))
		print_failed(cutover, what, &cutover->publisher);
	else if (!ask_names(&cutover->subscriber, &other, sql, 0, NULL, NULL))
		print_failed(cutover, what, &cutover->subscriber);
	else
	{
		remove_names(names, &other);
		return true;
	}
	return false;
}

static void
expect_same(Cutover *cutover, const char *what, const char *sql)
{
	Names names;

	if (compare_servers(cutover, &names, what, sql))
		print_names(cutover, what, STRICT, &names);
}

/* The name of the server, and what is expected of it */
static const char *
label_check(const Server *server, const char *what)
{
	return common_format("%s: %s", server->name, what);
}

/*
 * A primary with idem, and the privileges that the steps need there.  False if the other checks
 * could not be made.
 */
static bool
check_server(Cutover *cutover, Server *server, const char *privileges, const char *parameter)
{
	int before = cutover->problems;
	char *what = common_format("%s is a primary", server->name);

	expect_none(cutover, server, what, STRICT, "SELECT 'it is a standby' WHERE pg_is_in_recovery()", NULL, NULL);
	free(what);
	what = common_format("%s has idem", server->name);
	expect_none(cutover, server, what, STRICT,
				"SELECT 'it is not installed in this database'"
				" WHERE NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'idem')",
				NULL, NULL);
	free(what);
	if (cutover->problems != before)
		return false;
	what = common_format(
		"SELECT p.what"
		"  FROM (SELECT r.rolsuper AS super, r.rolreplication AS replication"
		"          FROM pg_roles AS r WHERE r.rolname = current_user) AS s,"
		"       LATERAL (%s"
		"        UNION ALL"
		"        SELECT 'membership in pg_monitor' WHERE NOT pg_has_role('pg_monitor', 'USAGE')"
		"        UNION ALL"
		"        SELECT 'USAGE on schema idem' WHERE NOT has_schema_privilege('idem', 'USAGE')"
		"        UNION ALL"
		"        SELECT 'SELECT on idem.' || c.relname FROM pg_class AS c, pg_namespace AS n"
		"         WHERE n.nspname = 'idem' AND c.relnamespace = n.oid AND c.relkind = 'r'"
		"           AND NOT has_table_privilege(c.oid, 'SELECT')"
		"        UNION ALL"
		"        SELECT 'SELECT on all sequences' FROM pg_sequence AS q"
		"        HAVING NOT bool_and(has_sequence_privilege(q.seqrelid, 'SELECT'))) AS p (what)"
		" WHERE NOT s.super",
		privileges);
	expect_none(cutover, server, label_check(server, "privileges"), STRICT, what, parameter, NULL);
	free(what);
	if (cutover->problems != before)
		return false;
	expect_none(cutover, server, label_check(server, "library and objects of idem have one version"), STRICT,
				"SELECT h.detail FROM idem_doctor() AS h WHERE h.\"check\" = 'version' AND h.status <> 'ok'",
				NULL, NULL);
	/* sequences.c */
	if (PQserverVersion(server->conn) < 180000)
		expect_none(cutover, server, label_check(server, "the minor version can keep views from being read (15.8, 16.4 or newer)"), STRICT,
					"SELECT current_setting('server_version')"
					" WHERE NOT EXISTS (SELECT FROM pg_settings WHERE name = 'restrict_nonsystem_relation_kind')",
					NULL, NULL);
	return true;
}

static bool
check_publisher(Cutover *cutover)
{
	Server *server = &cutover->publisher;

	if (!check_server(cutover, server,
					  "SELECT 'membership in pg_signal_backend' WHERE NOT pg_has_role('pg_signal_backend', 'USAGE')"
					  " UNION ALL"
					  " SELECT 'REPLICATION' WHERE NOT s.replication"
					  " UNION ALL"
					  " SELECT 'owner of the database' FROM pg_database AS d"
					  "  WHERE d.datname = current_database() AND NOT pg_has_role(d.datdba, 'USAGE')"
					  " UNION ALL"
					  " SELECT 'UPDATE on idem.' || c.relname FROM pg_class AS c, pg_namespace AS n"
					  "  WHERE n.nspname = 'idem' AND c.relnamespace = n.oid AND c.relkind = 'r'"
					  "    AND NOT has_table_privilege(c.oid, 'UPDATE, DELETE, TRUNCATE')",
					  NULL))
		return false;
	expect_none(cutover, server, "publisher: no prepared transactions", STRICT,
				"SELECT gid FROM pg_prepared_xacts WHERE database = current_database()", NULL, NULL);
	expect_none(cutover, server, "publisher: no role has its own default_transaction_read_only", STRICT,
				"SELECT r.rolname FROM " SETTINGS
				" AND s.setrole <> 0 AND c.setting ~* '^default_transaction_read_only='",
				NULL, NULL);
	expect_none(cutover, server, "publisher: no other role has made the schema idem_cutover", STRICT,
				"SELECT 'it belongs to ' || r.rolname FROM pg_namespace AS n JOIN pg_roles AS r ON r.oid = n.nspowner"
				" WHERE n.nspname = 'idem_cutover' AND NOT r.rolsuper AND r.rolname <> current_user",
				NULL, NULL);
	expect_none(cutover, server, "publisher: no subscription writes there", ACCEPTED,
				"SELECT subname FROM pg_subscription WHERE subdbid = " THIS_DATABASE, NULL, NULL);
	expect_none(cutover, server, "publisher: no large objects, which are not replicated", ACCEPTED,
				"SELECT count(*) || ' large objects' FROM pg_largeobject_metadata HAVING count(*) > 0",
				NULL, NULL);
	return true;
}

/* Tables of the publications that the subscription does not know */
static void
check_subscribed(Cutover *cutover)
{
	const char *what = "subscriber: every table of the publication is subscribed (ALTER SUBSCRIPTION ... REFRESH PUBLICATION)";
	Names names;
	Names other;

	if (!ask_names(&cutover->publisher, &names,
				   "SELECT DISTINCT format('%I.%I', p.schemaname, p.tablename)"
				   "  FROM pg_publication_tables AS p WHERE p.pubname = ANY ($1::text[])",
				   1, cutover->publications, NULL))
		print_failed(cutover, what, &cutover->publisher);
	else if (!ask_names(&cutover->subscriber, &other,
						"SELECT format('%I.%I', n.nspname, c.relname)"
						"  FROM pg_subscription_rel AS x"
						"  JOIN pg_subscription AS s ON s.oid = x.srsubid"
						"  JOIN pg_class AS c ON c.oid = x.srrelid"
						"  JOIN pg_namespace AS n ON n.oid = c.relnamespace"
						" WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE,
						1, cutover->subscription, NULL))
		print_failed(cutover, what, &cutover->subscriber);
	else
	{
		remove_names(&names, &other);
		print_names(cutover, what, STRICT, &names);
	}
}

static bool
check_subscriber(Cutover *cutover)
{
	Server *server = &cutover->subscriber;
	const char *name = cutover->subscription;
	char *what;
	char *cleanup;

	if (!check_server(cutover, server,
					  "SELECT 'owner of the subscription' FROM pg_subscription AS s"
					  " WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE
					  "   AND NOT pg_has_role(s.subowner, 'USAGE')"
					  " UNION ALL"
					  " SELECT 'EXECUTE on pg_reload_conf()' WHERE NOT has_function_privilege('pg_reload_conf()', 'EXECUTE')"
					  " UNION ALL"
					  " SELECT 'UPDATE on all sequences' FROM pg_sequence AS q"
					  " HAVING NOT bool_and(has_sequence_privilege(q.seqrelid, 'UPDATE'))",
					  name))
		return false;
	what = common_format("subscription %s is enabled and not binary", name);
	expect_none(cutover, server, what, STRICT,
				"SELECT 'it is ' || CASE WHEN NOT s.subenabled THEN 'disabled'"
				"                        ELSE 'binary: owners arrive as numbers, which are other roles' END"
				"  FROM pg_subscription AS s"
				" WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE " AND (NOT s.subenabled OR s.subbinary)",
				name, NULL);
	free(what);
	expect_none(cutover, server, "subscriber: no other subscription", ACCEPTED,
				"SELECT subname FROM pg_subscription WHERE subname <> $1 AND subdbid = " THIS_DATABASE,
				name, NULL);
	expect_none(cutover, server, "subscriber: no other subscription writes the tables of idem", STRICT,
				"SELECT DISTINCT s.subname FROM pg_subscription_rel AS x"
				"  JOIN pg_subscription AS s ON s.oid = x.srsubid"
				" WHERE s.subname <> $1"
				"   AND x.srrelid IN (SELECT c.oid FROM pg_class AS c WHERE c.relnamespace = 'idem'::regnamespace)",
				name, NULL);
	expect_none(cutover, server, "subscriber: the initial copy has ended", STRICT,
				"SELECT x.srrelid::regclass FROM pg_subscription_rel AS x"
				"  JOIN pg_subscription AS s ON s.oid = x.srsubid"
				" WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE " AND x.srsubstate <> 'r' LIMIT 20",
				name, NULL);
	check_subscribed(cutover);
	expect_none(cutover, server, "subscriber: no table of the subscription is unlogged, which a crash would empty", ACCEPTED,
				"SELECT c.oid::regclass FROM pg_subscription_rel AS x"
				"  JOIN pg_subscription AS s ON s.oid = x.srsubid"
				"  JOIN pg_class AS c ON c.oid = x.srrelid OR c.oid IN (SELECT p.relid FROM pg_partition_tree(x.srrelid) AS p)"
				" WHERE s.subname = $1 AND s.subdbid = " THIS_DATABASE " AND c.relpersistence = 'u'",
				name, NULL);
	expect_none(cutover, server, "subscriber: idem is in shared_preload_libraries", STRICT,
				"SELECT 'there is no worker' FROM idem_doctor() AS h WHERE h.\"check\" = 'preload' AND h.status <> 'ok'",
				NULL, NULL);
	expect_none(cutover, server, "subscriber: idem_doctor() reports no failure", STRICT,
				"SELECT h.\"check\" || ': ' || h.detail FROM idem_doctor() AS h"
				" WHERE h.status = 'fail' AND h.\"check\" <> 'version'",
				NULL, NULL);
	cleanup = common_value(server, "SELECT current_setting('idem.cleanup', true)", 0);
	if (cleanup != NULL && strcmp(cleanup, "off") == 0)
		common_print(stdout, "note     subscriber: idem.cleanup is off; set it on again after the cutover");
	free(cleanup);
	return true;
}

#define OF_IDEM		"c.relnamespace = 'idem'::regnamespace"
#define NOT_OF_IDEM "c.relnamespace <> 'idem'::regnamespace"

/* A partition is replicated if it or a table above it is. */
#define UNPUBLISHED(which)                                                               \
	"SELECT c.oid::regclass FROM pg_class AS c"                                          \
	" WHERE c.relkind = 'r' AND c.relpersistence <> 't' AND c.oid >= 16384 AND " which   \
	"   AND c.relnamespace <> 'information_schema'::regnamespace"                        \
	"   AND NOT EXISTS ("                                                                \
	"        SELECT FROM pg_publication_tables AS p"                                     \
	"          JOIN pg_namespace AS n ON n.nspname = p.schemaname"                       \
	"          JOIN pg_class AS t ON t.relnamespace = n.oid AND t.relname = p.tablename" \
	"         WHERE p.pubname = ANY ($1::text[])"                                        \
	"           AND (t.oid = c.oid OR t.oid IN (SELECT relid FROM pg_partition_ancestors(c.oid))))"

#define RESTRICTED(which)                                                                     \
	"SELECT c.oid::regclass FROM pg_publication_rel AS r"                                     \
	"  JOIN pg_publication AS p ON p.oid = r.prpubid"                                         \
	"  JOIN pg_class AS c ON c.oid = r.prrelid"                                               \
	" WHERE p.pubname = ANY ($1::text[]) AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)" \
	"   AND " which

static void
check_publications(Cutover *cutover)
{
	Server *server = &cutover->publisher;
	const char *names = cutover->publications;

	expect_none(cutover, server, "publisher: the publications exist", STRICT,
				"SELECT u.name FROM unnest($1::text[]) AS u (name)"
				" WHERE NOT EXISTS (SELECT FROM pg_publication WHERE pubname = u.name)",
				names, NULL);
	expect_none(cutover, server, "publisher: the publications contain all operations", STRICT,
				"SELECT p.pubname FROM pg_publication AS p WHERE p.pubname = ANY ($1::text[])"
				"   AND NOT (p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate)",
				names, NULL);
	expect_none(cutover, server, "publisher: all tables of idem are replicated", STRICT,
				UNPUBLISHED(OF_IDEM), names, NULL);
	expect_none(cutover, server, "publisher: no row filters and no column lists on tables of idem", STRICT,
				RESTRICTED(OF_IDEM), names, NULL);
	expect_none(cutover, server, "publisher: all other tables are replicated", ACCEPTED,
				UNPUBLISHED(NOT_OF_IDEM), names, NULL);
	expect_none(cutover, server, "publisher: no row filters and no column lists on other tables", ACCEPTED,
				RESTRICTED(NOT_OF_IDEM), names, NULL);
}

/* What the two servers must have in common */
static void
check_both(Cutover *cutover)
{
	const char *what = "roles that the subscriber does not have";
	Names names;

	expect_same(cutover, "both servers have the same version of idem; only the publisher has",
				"SELECT extversion FROM pg_extension WHERE extname = 'idem'");
	expect_same(cutover, "the subscriber has all sequences of the publisher",
				"SELECT format('%I.%I', n.nspname, c.relname)"
				"  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
				" WHERE c.relkind = 'S' AND c.relpersistence <> 't'");
	expect_same(cutover, "the subscriber has the settings idem.owner and idem.scope of the publisher",
				"SELECT COALESCE(r.rolname || ' ', '') || c.setting FROM " SETTINGS
				" AND c.setting ~* '^idem\\.(owner|scope)='");
	if (compare_servers(cutover, &names, what, "SELECT quote_ident(rolname) FROM pg_roles WHERE rolname !~ '^pg_'") &&
		names.count > 0)
	{
		char *text = join_names(&names);

		common_print(stdout, "note     %s: %s", what, text);
		free(text);
	}
}

static void
check_slot(Cutover *cutover)
{
	char *what = common_format("publisher: the slot of subscription %s is in use", cutover->subscription);
	const char *slot = cutover->slot == NULL ? "" : cutover->slot;

	/* an apply worker that has just restarted */
	for (int i = 0; i < 10; i++)
	{
		if (common_is_true(&cutover->publisher,
						   "SELECT count(*) > 0 FROM pg_replication_slots"
						   " WHERE slot_name = $1 AND database = current_database() AND active",
						   1, slot))
			break;
		common_sleep(200);
	}
	expect_none(cutover, &cutover->publisher, what, STRICT,
				"SELECT 'there is no active slot ' || $1::text || ' of this database: is this the publisher, and does the apply worker of the subscriber run?'"
				" WHERE NOT EXISTS ("
				"        SELECT FROM pg_replication_slots"
				"         WHERE slot_name = $1::text AND database = current_database() AND active)",
				slot, NULL);
	free(what);
}

/* Count in cutover->problems what is missing for the cutover, and print it. */
void
checks_run(Cutover *cutover)
{
	bool are_usable;

	cutover->problems = 0;
	are_usable = check_publisher(cutover);
	are_usable = check_subscriber(cutover) && are_usable;
	if (!are_usable)
		return;
	check_publications(cutover);
	check_both(cutover);
	check_slot(cutover);
}
