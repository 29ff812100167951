/*
 * precheck.c
 *		Whether slots can move: everything that could make a move fail half way is looked at
 *		before any slot is given up.
 */
#include <stdlib.h>
#include <string.h>

#include "idem_move.h"

/* What the names of the columns mean to check_queues() and precheck_copy_queues() */
static const char queue_query[] =
	"SELECT q.queue, r.rolname AS owner, q.owner IS NOT NULL AND r.oid IS NULL AS is_orphan, q.paused_at IS NOT NULL AS is_paused,"
	" q.dedup, q.on_duplicate, q.if_running, q.key_ttl, q.include_scheduled, q.debounce_max, q.lease, q.max_attempts,"
	" q.backoff, q.backoff_max, q.keep, q.keep_dead, q.owner AS quoted_owner"
	"  FROM idem.queues AS q LEFT JOIN pg_roles AS r ON r.oid = q.owner::oid ORDER BY q.queue";

/* What each of the two databases must be */
void
precheck_server(Server *server)
{

	if (!common_is_true(server, "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'idem')", 0))
		common_die("the %s does not have the extension idem; run there: CREATE EXTENSION idem", server->name);
	if (!common_is_true(server, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user", 0))
		common_die("both connections must be those of superusers; that of the %s is not", server->name);
	if (common_is_true(server, "SELECT pg_is_in_recovery()", 0))
		common_die("the %s is a standby, which cannot move slots; connect to its primary", server->name);
}

/*
 * M8: keep a second idem_move away, so that neither sees half of what the other does.  The lock
 * ends with the session.  A server notices within a second that the program was killed.
 */
void
precheck_alone(const Move *move, Database *database)
{
	Server *server = &database->server;
	PGresult *result;

	result = common_attempt(server, "SELECT set_config('lock_timeout', '5s', false), pg_advisory_lock(7594306392080346998)", 0);
	if (result == NULL && strcmp(server->sqlstate, "55P03") == 0)
	{
		char *pid = common_value(server, "SELECT string_agg(l.pid::text, ', ') FROM pg_locks AS l WHERE l.locktype = 'advisory' AND l.granted"
										 " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
										 " AND l.objsubid = 1 AND (l.classid::bigint << 32) + l.objid::bigint = 7594306392080346998",
								 0);

		common_die("another idem_move is at work in the %s (server process %s); wait until it has ended", server->name, pid == NULL ? "unknown" : pid);
	}
	if (result == NULL)
		common_raise(server);
	PQclear(result);
	result = common_attempt(server, "SELECT set_config('lock_timeout', $1, false)", 1, move->lock_timeout);
	if (result == NULL)
		common_wrong_use("--lock-timeout takes a time such as 5s: %s", server->message);
	PQclear(result);
}

static void
check_same(Move *move, const char *what, const char *sql)
{
	char *here = common_value(&move->source.server, sql, 0);
	char *there = common_value(&move->target.server, sql, 0);

	if (strcmp(here, there) != 0)
		common_die("the source has %s %s; the target has %s", what, here, there);
	free(here);
	free(there);
}

/* Facts of the two databases, after maps_read() */
void
precheck_databases(Move *move)
{
	Database *source = &move->source;
	Database *target = &move->target;
	Slots both = maps_and(&source->slots, &target->slots);
	char *encoding = common_value(&source->server, "SELECT getdatabaseencoding()", 0);

	if (maps_is_id(source->id, target->id))
		common_die("source and target are the same database, or one is a copy of the other's server");
	check_same(move, "version", "SELECT pg_catalog.idem_version()");
	check_same(move, "encoding", "SELECT getdatabaseencoding()");
	/* idem_slot() in an expression of --table uses it */
	check_same(move, "idem.scope", "SELECT COALESCE(current_setting('idem.scope', true), '')");
	if (strcmp(source->by, target->by) != 0)
		common_die("the source has a map by %s; the target has a map by %s", source->by, target->by);
	if (source->number != NULL && target->number == NULL)
		common_die("the source is shard %s, and the target has no number: is it a router? Else set one with idem_shard_set()", source->number);
	if (source->number != NULL && strcmp(source->number, target->number) == 0)
		common_die("both databases are shard %s; give the target another number with idem_shard_set()", source->number);
	if (!maps_is_empty(&both))
		common_die("both databases have the slots %s: keys may have been used twice", maps_format(&both));
	for (int i = 0; i < 2; i++)
	{
		Server *server = i == 0 ? &source->server : &target->server;

		if (common_is_true(server, "SELECT EXISTS (SELECT FROM pg_subscription_rel AS s JOIN pg_class AS c ON c.oid = s.srrelid"
								   " WHERE c.relnamespace = 'idem'::regnamespace)",
						   0))
			common_die("a subscription writes the tables of idem in the %s; drop it first", server->name);
	}
	/* the arguments are in the encoding of the terminal, and are sent as they are */
	for (int i = 0; i < move->ntables; i++)
	{
		const char *argument = common_format("%s:%s", move->tables[i].qualified, move->tables[i].slot);

		for (const char *c = argument; *c != '\0'; c++)
		{
			if ((unsigned char) *c >= 0x80 && strcmp(encoding, "UTF8") != 0 &&
				strcmp(encoding, "SQL_ASCII") != 0)
				common_die("--table can have ASCII characters only, because the databases have the encoding %s", encoding);
		}
	}
	free(encoding);
}

/* What the values of the columns look like; enumerated types have their labels in both */
static const char columns_query[] =
	"SELECT string_agg(concat_ws(' ', quote_ident(a.attname), format_type(a.atttypid, a.atttypmod),"
	" (SELECT array_agg(e.enumlabel ORDER BY e.enumlabel) FROM pg_enum AS e WHERE e.enumtypid = a.atttypid)), ', ' ORDER BY a.attname COLLATE \"C\")"
	" FROM pg_attribute AS a WHERE a.attrelid = $1::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''";

/* The text of a composite value means what the order of its fields says. */
static const char types_query[] =
	"WITH RECURSIVE type (oid) AS (\n"
	"	SELECT a.atttypid FROM pg_attribute AS a WHERE a.attrelid = $1::regclass AND a.attnum > 0 AND NOT a.attisdropped\n"
	"	UNION\n"
	"	SELECT part.oid FROM type AS y JOIN pg_type AS t ON t.oid = y.oid CROSS JOIN LATERAL (\n"
	"		SELECT t.typelem UNION ALL SELECT t.typbasetype\n"
	"		UNION ALL SELECT r.rngsubtype FROM pg_range AS r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)\n"
	"		UNION ALL SELECT a.atttypid FROM pg_attribute AS a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS part (oid)\n"
	"	 WHERE part.oid <> 0)\n"
	"SELECT COALESCE(string_agg(c.text, ', ' ORDER BY c.text COLLATE \"C\"), 'none') FROM (\n"
	"	SELECT format('%s (%s)', t.oid::regtype, string_agg(concat_ws(' ', quote_ident(a.attname), format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum))\n"
	"	  FROM type AS y JOIN pg_type AS t ON t.oid = y.oid JOIN pg_attribute AS a ON a.attrelid = t.typrelid\n"
	"	 WHERE a.attnum > 0 AND NOT a.attisdropped GROUP BY t.oid) AS c (text)";

static void
compare_tables(Move *move, const UserTable *table, const char *what, const char *sql)
{
	char *here = common_value(&move->source.server, sql, 1, table->qualified);
	char *there = common_value(&move->target.server, sql, 1, table->qualified);

	if (here == NULL || there == NULL)
		common_die("table %s has no columns", table->shown);
	if (strcmp(here, there) != 0)
		common_die("table %s has the %s (%s) in the source, and (%s) in the target", table->shown, what, here, there);
	free(here);
	free(there);
}

static void
resolve_table(Move *move, UserTable *table)
{
	table->schema = common_value(&move->source.server, "SELECT (parse_ident($1))[1]", 1, table->qualified);
	table->name = common_value(&move->source.server, "SELECT (parse_ident($1))[2]", 1, table->qualified);
	if (table->name == NULL || common_is_true(&move->source.server, "SELECT cardinality(parse_ident($1)) > 2", 1, table->qualified))
		common_die("--table %s: name the schema and the table, as in shop.orders", table->qualified);
	table->qualified = common_format("%s.%s", common_quote_name(&move->source.server, table->schema),
									 common_quote_name(&move->source.server, table->name));
	table->shown = common_format("%s.%s", table->schema, table->name);
	compare_tables(move, table, "columns", columns_query);
	compare_tables(move, table, "composite types", types_query);
	table->columns = guard_columns(&move->source.server, table->qualified);
}

/* The commands of a move, for no rows: are they valid, and allowed? */
static void
try_commands(Server *server, const UserTable *table)
{
	const char *name = table->qualified;
	const char *columns = table->columns;
	char *commands[] = {
		common_format("SELECT %s FROM %s WHERE false AND (%s)::integer = 0", columns, name, table->slot),
		/* a table of a publication may lack a replica identity */
		common_format("DELETE FROM %s WHERE false", name),
		common_format("INSERT INTO %s (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM %s WHERE false", name,
					  columns, columns, name)};

	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
	{
		common_run(server, commands[i], 0);
		free(commands[i]);
	}
}

/* Rows that belong to no slot stay in the source; the caller should know before anything moves. */
static void
tell_rows_without_slot(Move *move, const UserTable *table)
{
	char *sql = common_format("SELECT count(*) FILTER (WHERE s.slot IS NULL) AS is_null, count(*) FILTER (WHERE s.slot NOT BETWEEN 0 AND 1023) AS is_other"
							  " FROM (SELECT (%s)::integer AS slot FROM %s) AS s",
							  table->slot, table->qualified);
	PGresult *result = common_query(&move->source.server, sql, 0);

	if (strcmp(common_field(result, 0, "is_null"), "0") != 0)
		common_print(stdout, "idem_move: table %s has %s rows whose slot is null: they stay in the source", table->shown, common_field(result, 0, "is_null"));
	if (strcmp(common_field(result, 0, "is_other"), "0") != 0)
		common_print(stdout, "idem_move: table %s has %s rows whose slot is not between 0 and 1023: they stay in the source", table->shown, common_field(result, 0, "is_other"));
	PQclear(result);
	free(sql);
}

/* Do the tables of --table exist on both sides, and will each command of the move be accepted? */
void
precheck_tables(Move *move)
{
	Server *servers[] = {&move->source.server, &move->target.server};

	for (int i = 0; i < move->ntables; i++)
		resolve_table(move, &move->tables[i]);
	for (int s = 0; s < 2; s++)
	{
		common_run(servers[s], "BEGIN", 0);
		guard_lock(move, servers[s]);
		for (int i = 0; i < move->ntables; i++)
			try_commands(servers[s], &move->tables[i]);
		common_run(servers[s], "ROLLBACK", 0);
	}
}

static void
append_name(char **list, const char *name)
{
	char *longer = *list == NULL ? common_copy(name) : common_format("%s %s", *list, name);

	free(*list);
	*list = longer;
}

/* Names in the first result that the second query, with one as its parameter, does not find */
static char *
missing_names(PGresult *names, Server *server, const char *sql)
{
	char *missing = NULL;

	for (int row = 0; row < PQntuples(names); row++)
	{
		const char *name = PQgetvalue(names, row, 0);

		if (!common_is_true(server, sql, 1, name))
			append_name(&missing, name);
	}
	PQclear(names);
	return missing;
}

/* Owners are copied by name, so the target must have the roles. */
static void
check_roles(Move *move, const Slots *todo)
{
	Server *source = &move->source.server;
	char *condition = maps_condition(&move->source, TABLE_KEYS, todo);
	char *dropped = common_format("SELECT EXISTS (SELECT FROM idem.keys AS k WHERE NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = k.owner::oid) AND %s)", condition);
	char *owners = common_format("SELECT r.rolname FROM pg_roles AS r WHERE r.oid IN (SELECT k.owner::oid FROM idem.keys AS k WHERE %s)"
								 " OR r.oid IN (SELECT q.owner::oid FROM idem.queues AS q)",
								 condition);
	char *missing;

	if (common_is_true(source, dropped, 0))
		common_die("keys of these slots belong to a role that was dropped; remove them with idem_forget()");
	missing = missing_names(common_query(source, owners, 0), &move->target.server,
							"SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)");
	if (missing != NULL)
		common_die("the target lacks roles that own keys: %s", missing);
	free(condition);
	free(dropped);
	free(owners);
}

static int
find_queue(const PGresult *queues, const char *name)
{
	for (int row = 0; row < PQntuples(queues); row++)
	{
		if (strcmp(PQgetvalue(queues, row, 0), name) == 0)
			return row;
	}
	return -1;
}

/* Declarations that the target lacks are copied; others must be the same. */
static void
check_queues(Move *move)
{
	PGresult *here = common_query(&move->source.server, queue_query, 0);
	PGresult *there = common_query(&move->target.server, queue_query, 0);
	char *different = NULL;

	for (int row = 0; row < PQntuples(here); row++)
	{
		const char *name = PQgetvalue(here, row, 0);
		int other = find_queue(there, name);
		bool is_same = true;

		if (strcmp(common_field(here, row, "is_orphan"), "t") == 0)
			common_die("queue %s of the source belongs to a role that was dropped; declare it again with idem_queue_set()", name);
		if (other < 0)
			continue;
		for (int column = 0; column < PQnfields(here); column++)
			is_same &= PQgetisnull(here, row, column) == PQgetisnull(there, other, column) &&
				strcmp(PQgetvalue(here, row, column), PQgetvalue(there, other, column)) == 0;
		if (!is_same)
			append_name(&different, name);
	}
	if (different != NULL)
		common_die("queues are declared with other settings in the target: %s", different);
	PQclear(here);
	PQclear(there);
}

void
precheck_copy_queues(Move *move)
{
	PGresult *here = common_query(&move->source.server, queue_query, 0);
	PGresult *there = common_query(&move->target.server, queue_query, 0);

	for (int row = 0; row < PQntuples(here); row++)
	{
		const char *name = PQgetvalue(here, row, 0);

		if (find_queue(there, name) >= 0)
			continue;
		common_run(&move->target.server, "BEGIN", 0);
		common_run(&move->target.server, "SELECT pg_catalog.idem_queue_set($1, dedup => $2, on_duplicate => $3, if_running => $4, key_ttl => $5, include_scheduled => $6,"
										 " debounce_max => $7, lease => $8, max_attempts => $9, backoff => $10, backoff_max => $11, keep => $12, keep_dead => $13, owner => $14)",
				   14, name, common_field(here, row, "dedup"), common_field(here, row, "on_duplicate"),
				   common_field(here, row, "if_running"), common_field(here, row, "key_ttl"),
				   common_field(here, row, "include_scheduled"), common_field(here, row, "debounce_max"),
				   common_field(here, row, "lease"), common_field(here, row, "max_attempts"),
				   common_field(here, row, "backoff"), common_field(here, row, "backoff_max"),
				   common_field(here, row, "keep"), common_field(here, row, "keep_dead"),
				   common_field(here, row, "quoted_owner"));
		if (strcmp(common_field(here, row, "is_paused"), "t") == 0)
			common_run(&move->target.server, "SELECT pg_catalog.idem_pause($1)", 1, name);
		common_run(&move->target.server, "COMMIT", 0);
	}
	PQclear(here);
	PQclear(there);
}

/*
 * M6: idem_shard_take() refuses numbers that later jobs could get.  It lifts the sequence of the
 * target to that of the source.
 */
static void
check_sequences(Move *move)
{
	Server *servers[] = {&move->source.server, &move->target.server};
	int64_t last = 0;
	int64_t highest = 0;

	for (int s = 0; s < 2; s++)
	{
		PGresult *result = common_query(servers[s], "SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS last,"
													" GREATEST((SELECT max(job_id) FROM idem.jobs), (SELECT max(job_id) FROM idem.job_log), 0) AS highest"
													" FROM idem.jobs_job_id_seq",
										0);
		int64_t value = strtoll(common_field(result, 0, "last"), NULL, 10);
		int64_t number = strtoll(common_field(result, 0, "highest"), NULL, 10);

		last = value > last ? value : last;
		highest = number > highest ? number : highest;
		PQclear(result);
	}
	if (highest >= (last + 1) * NSLOTS)
		common_die("a job has number %lld, which the sequences of job numbers have not reached; run idem_doctor() in both databases", (long long) highest);
}

/* Rows that could not move, or would be in the way */
static void
check_rows(Move *move, const Slots *todo)
{
	Server *source = &move->source.server;
	Server *target = &move->target.server;
	char *first_number = common_format("%lld", (long long) move->source.jobs_from);
	char *next_number = common_value(source, "SELECT (CASE WHEN is_called THEN last_value + 1 ELSE last_value END) * 1024 FROM idem.jobs_job_id_seq", 0);

	if (strtoll(next_number, NULL, 10) < move->target.jobs_from)
		common_die("new jobs of the source get numbers from %s on, and numbers of the target carry slots only from %lld on; lift the sequence idem.jobs_job_id_seq of the source first", next_number, (long long) move->target.jobs_from);
	if (common_is_true(source, "SELECT EXISTS (SELECT FROM idem.jobs WHERE key_hash IS NOT NULL AND job_id < $1::bigint)"
							   " OR EXISTS (SELECT FROM idem.job_keys WHERE job_id < $1::bigint AND expires_at > pg_catalog.idem_clock())",
					   1, first_number))
		common_die("the source has jobs with a key from before its map, whose slots are not known; wait until they have ended and their keys have expired");
	for (int table = 0; table < NTABLES; table++)
	{
		char *condition = maps_condition(&move->target, table, todo);
		char *sql = common_format("SELECT EXISTS (SELECT FROM %s WHERE %s)", maps_tables[table], condition);
		char *lowest;

		if (common_is_true(target, sql, 0))
			common_die("%s of the target has rows of slots that the target does not have; see idem_doctor() there", maps_tables[table]);
		free(condition);
		free(sql);
		if (table == TABLE_KEYS)
			continue;
		condition = maps_condition(&move->source, table, todo);
		sql = common_format("SELECT min(job_id) FROM %s WHERE %s AND job_id < %lld", maps_tables[table], condition, (long long) move->target.jobs_from);
		lowest = common_value(source, sql, 0);
		if (lowest != NULL)
			common_die("%s has job %s, and numbers of the target carry slots only from %lld on; wait until such jobs have ended", maps_tables[table], lowest, (long long) move->target.jobs_from);
		free(condition);
		free(sql);
	}
	free(first_number);
	free(next_number);
	check_sequences(move);
}

/* A database without slots cannot number the jobs of its schedules: they would stop. */
static void
check_schedules(Move *move, const Slots *todo)
{
	PGresult *names;
	char *list;

	/* copies that an earlier move has not deleted yet: with slots they would tick in both */
	if (maps_is_empty(&move->target.slots) && !maps_is_empty(&move->target.given) &&
		common_is_true(&move->target.server, "SELECT EXISTS (SELECT FROM idem.schedules)", 0))
		common_die("the target has given up its last slots, and still has schedules; finish that move first: run it again for %s",
				   maps_format(&move->target.given));
	if (!copy_is_last(move, todo))
		return;
	if (!move->schedules)
	{
		list = common_value(&move->source.server, "SELECT string_agg(name, ', ' ORDER BY name) FROM idem.schedules", 0);
		if (list != NULL)
			common_die("the source would have schedules and no slots, so they would stop: %s; move them with --schedules, or drop them with idem_unschedule()", list);
		return;
	}
	names = common_query(&move->source.server, "SELECT name FROM idem.schedules ORDER BY name", 0);
	list = missing_names(names, &move->target.server,
						 "SELECT NOT EXISTS (SELECT FROM idem.schedules WHERE name = $1)");
	if (list != NULL)
		common_die("source and target have schedules with the same name: %s; drop one of the two with idem_unschedule()", list);
	/* as text: a role as COPY writes it, which is its number if it was dropped */
	names = common_query(&move->source.server, "SELECT DISTINCT to_jsonb(s) ->> 'owner' FROM idem.schedules AS s"
											   " WHERE to_jsonb(s) ->> 'owner' IS NOT NULL",
						 0);
	list = missing_names(names, &move->target.server,
						 "SELECT EXISTS (SELECT FROM pg_roles WHERE quote_ident(rolname) = $1)");
	if (list != NULL)
		common_die("the target lacks roles that own schedules: %s", list);
}

/*
 * Rows of the target that would make the copy fail: those of the slots, and those with the same
 * values in a unique index.  Indexes on expressions, and those with a predicate, are left out.
 */
static void
check_in_the_way(Move *move, const UserTable *table, const Slots *todo)
{
	Server *target = &move->target.server;
	char *sql = common_format("SELECT EXISTS (SELECT FROM %s)", table->qualified);
	PGresult *indexes;

	if (guard_has_rows(target, table, todo))
		common_die("table %s of the target has rows of the slots that are to move: they are in the way", table->shown);
	if (!common_is_true(target, sql, 0))
		return;
	indexes = common_query(target, "SELECT i.indexrelid::regclass AS name, string_agg('\"' || replace(a.attname, '\"', '\"\"') || '\"', ', ' ORDER BY k.n) AS columns"
								   " FROM pg_index AS i CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)"
								   " JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum"
								   " WHERE i.indrelid = $1::regclass AND i.indisunique AND k.n <= i.indnkeyatts AND i.indexprs IS NULL AND i.indpred IS NULL"
								   " GROUP BY i.indexrelid",
						   1, table->qualified);
	for (int row = 0; row < PQntuples(indexes); row++)
	{
		if (copy_has_duplicates(move, table, todo, common_field(indexes, row, "columns")))
			common_die("table %s of the target has rows with the same %s as rows that are to move (index %s): they are in the way", table->shown,
					   common_field(indexes, row, "columns"), common_field(indexes, row, "name"));
	}
	PQclear(indexes);
	free(sql);
}

static void
check_user_rows(Move *move, const Slots *todo)
{
	common_run(&move->target.server, "BEGIN", 0);
	guard_lock(move, &move->target.server);
	common_run(&move->source.server, "BEGIN", 0);
	guard_lock(move, &move->source.server);
	for (int i = 0; i < move->ntables; i++)
	{
		tell_rows_without_slot(move, &move->tables[i]);
		check_in_the_way(move, &move->tables[i], todo);
	}
	common_end_progress();
	common_run(&move->target.server, "ROLLBACK", 0);
	common_run(&move->source.server, "ROLLBACK", 0);
}

/* Everything that concerns the slots that are still to move */
void
precheck_everything(Move *move, const Slots *todo)
{
	check_roles(move, todo);
	check_queues(move);
	check_schedules(move, todo);
	check_rows(move, todo);
	check_user_rows(move, todo);
}
