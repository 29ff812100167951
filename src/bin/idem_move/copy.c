/*
 * copy.c
 *		Copy the rows of a batch of slots, and let the target take the slots (M8).
 *
 * Two transactions are open at the same time.  That of the source holds idem.shard in mode SHARE,
 * so that no session takes the slots back, until that of the target has committed or not.  The
 * target gets rows and slots at once, or neither.
 *
 * Each row goes through this program as a line of COPY, which it does not look into.  Both
 * connections use the encoding of the two databases, so nothing is converted.  Before the target
 * commits, its rows are read back and compared with what the source has sent.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "idem_move.h"

/*
 * What was sent, or read back: the number of lines, and the sum of their hashes.  The sum does
 * not depend on the order.  The hash is SipHash-2-4 with 128 bits and a random key, so a row that
 * was changed, lost or doubled makes another sum but by chance.
 */
typedef struct Digest
{
	uint64_t lines;
	uint64_t low;
	uint64_t high;
} Digest;

static uint64_t hash_key[2];

static inline uint64_t
rotate_left(uint64_t word, int bits)
{
	return (word << bits) | (word >> (64 - bits));
}

static inline void
sip_rounds(uint64_t *v, int rounds)
{
	while (rounds-- > 0)
	{
		v[0] += v[1];
		v[2] += v[3];
		v[1] = rotate_left(v[1], 13) ^ v[0];
		v[3] = rotate_left(v[3], 16) ^ v[2];
		v[0] = rotate_left(v[0], 32);
		v[2] += v[1];
		v[0] += v[3];
		v[1] = rotate_left(v[1], 17) ^ v[2];
		v[3] = rotate_left(v[3], 21) ^ v[0];
		v[2] = rotate_left(v[2], 32);
	}
}

static void
add_line(Digest *digest, const char *line, size_t length)
{
	uint64_t v[4] = {
		hash_key[0] ^ UINT64_C(0x736f6d6570736575),
		hash_key[1] ^ UINT64_C(0x646f72616e646f6d) ^ 0xee,
		hash_key[0] ^ UINT64_C(0x6c7967656e657261), hash_key[1] ^ UINT64_C(0x7465646279746573)};
	uint64_t last = (uint64_t) length << 56;
	size_t whole = length / 8 * 8;

	for (size_t i = 0; i < whole; i += 8)
	{
		uint64_t word;

		/* both sums are made on this machine, so the order of bytes does not matter */
		memcpy(&word, line + i, sizeof(word));
		v[3] ^= word;
		sip_rounds(v, 2);
		v[0] ^= word;
	}
	for (size_t i = whole; i < length; i++)
		last |= (uint64_t) (unsigned char) line[i] << (8 * (i - whole));
	v[3] ^= last;
	sip_rounds(v, 2);
	v[0] ^= last;
	v[2] ^= 0xee;
	sip_rounds(v, 4);
	digest->low += v[0] ^ v[1] ^ v[2] ^ v[3];
	v[1] ^= 0xdd;
	sip_rounds(v, 4);
	digest->high += v[0] ^ v[1] ^ v[2] ^ v[3];
	digest->lines++;
}

static bool
is_same_digest(const Digest *a, const Digest *b)
{
	return a->lines == b->lines && a->low == b->low && a->high == b->high;
}

static void
start_copy(Server *server, const char *sql, ExecStatusType expected)
{
	PGresult *result;

	common_check_signals();
	result = PQexec(server->conn, sql);
	if (PQresultStatus(result) != expected)
	{
		common_note_error(server, result);
		common_raise(server);
	}
	PQclear(result);
}

/* The end of a COPY: its result, and that there is no other one */
static void
finish_copy(Server *server)
{
	PGresult *result;

	while ((result = PQgetResult(server->conn)) != NULL)
	{
		if (PQresultStatus(result) != PGRES_COMMAND_OK)
		{
			common_note_error(server, result);
			common_raise(server);
		}
		PQclear(result);
	}
}

/* The next line, or 0 at the end; free it with PQfreemem() */
static int
next_line(Server *server, char **line)
{
	int length = PQgetCopyData(server->conn, line, 0);

	common_check_signals();
	if (length < -1)
	{
		common_note_error(server, NULL);
		common_raise(server);
	}
	if (length > 0)
		return length;
	finish_copy(server);
	return 0;
}

/*
 * Send what the command "out" reads in the source to the command "in" of the target.  The number of
 * lines, and with a digest their sum.
 */
static uint64_t
stream_rows(Move *move, const char *out, const char *in, uint64_t before, Digest *sent)
{
	Server *target = &move->target.server;
	uint64_t lines = 0;
	char *line;
	int length;

	start_copy(&move->source.server, out, PGRES_COPY_OUT);
	start_copy(target, in, PGRES_COPY_IN);
	while ((length = next_line(&move->source.server, &line)) > 0)
	{
		if (sent != NULL)
			add_line(sent, line, (size_t) length);
		if (PQputCopyData(target->conn, line, length) != 1)
		{
			common_note_error(target, NULL);
			common_raise(target);
		}
		PQfreemem(line);
		lines++;
		common_progress(sent == NULL ? "looking" : "copying", move->done, move->all, before + lines);
	}
	if (PQputCopyEnd(target->conn, NULL) != 1)
	{
		common_note_error(target, NULL);
		common_raise(target);
	}
	finish_copy(target);
	return lines;
}

/* The rows of a table; the target's are read back and compared. */
static uint64_t
copy_rows(Move *move, const char *name, const char *shown, const char *columns, const char *from,
		  const char *to, uint64_t before)
{
	Server *target = &move->target.server;
	char *out = common_format("COPY (SELECT %s FROM %s WHERE %s) TO STDOUT", columns, name, from);
	char *in = common_format("COPY %s (%s) FROM STDIN", name, columns);
	char *back = common_format("COPY (SELECT %s FROM %s WHERE %s) TO STDOUT", columns, name, to);
	Digest sent = {0};
	Digest found = {0};
	char *line;
	int length;

	stream_rows(move, out, in, before, &sent);
	start_copy(target, back, PGRES_COPY_OUT);
	while ((length = next_line(target, &line)) > 0)
	{
		add_line(&found, line, (size_t) length);
		PQfreemem(line);
		common_progress("comparing", move->done, move->all, before + found.lines);
	}
	if (!is_same_digest(&sent, &found))
		common_die("table %s: the target has other rows than the source has sent (%llu and %llu rows); nothing was taken: the source still has them all",
				   shown, (unsigned long long) found.lines, (unsigned long long) sent.lines);
	free(out);
	free(in);
	free(back);
	return sent.lines;
}

/*
 * Has the table of the user in the target rows that have the same values in these columns as rows
 * of these slots in the source?  In transactions of both, after guard_lock(); that of the target is
 * rolled back later.
 */
bool
copy_has_duplicates(Move *move, const UserTable *table, const Slots *slots, const char *columns)
{
	Server *target = &move->target.server;
	const char *name = table->qualified;
	char *condition = maps_user_condition(table, slots);
	char *create = common_format("CREATE TEMPORARY TABLE idem_move_rows AS SELECT %s FROM %s WHERE false",
								 columns, name);
	char *out = common_format("COPY (SELECT %s FROM %s WHERE %s) TO STDOUT", columns, name, condition);
	char *look = common_format("SELECT EXISTS (SELECT FROM %s JOIN pg_temp.idem_move_rows USING (%s))", name,
							   columns);
	bool has_duplicates;

	common_run(target, create, 0);
	stream_rows(move, out, "COPY pg_temp.idem_move_rows FROM STDIN", 0, NULL);
	has_duplicates = common_is_true(target, look, 0);
	common_run(target, "DROP TABLE pg_temp.idem_move_rows", 0);
	free(condition);
	free(create);
	free(out);
	free(look);
	return has_duplicates;
}

/* Does the source have no slot left after these? */
bool
copy_is_last(const Move *move, const Slots *slots)
{
	Slots left = maps_minus(&move->source.slots, slots);

	return maps_is_empty(&left);
}

/* All rows of the slots; rows[] gets their numbers, first those of the tables of idem. */
static void
copy_tables(Move *move, const Slots *slots, uint64_t *rows)
{
	uint64_t sum = 0;

	for (int table = 0; table < NTABLES; table++)
	{
		char *columns = guard_columns(&move->source.server, maps_tables[table]);
		char *from = maps_condition(&move->source, table, slots);
		char *to = maps_condition(&move->target, table, slots);

		rows[table] =
			copy_rows(move, maps_tables[table], maps_tables[table], columns, from, to, sum);
		sum += rows[table];
		free(columns);
		free(from);
		free(to);
	}
	for (int i = 0; i < move->ntables; i++)
	{
		const UserTable *table = &move->tables[i];
		char *condition = maps_user_condition(table, slots);

		rows[NTABLES + i] =
			copy_rows(move, table->qualified, table->shown, table->columns, condition, condition,
					  sum);
		sum += rows[NTABLES + i];
		free(condition);
	}
}

/* The schedules go with the last slots: a database without slots cannot number their jobs. */
static uint64_t
copy_schedules(Move *move)
{
	char *columns = guard_columns(&move->source.server, "idem.schedules");
	PGresult *names = common_query(&move->source.server, "SELECT array_agg(name) FROM idem.schedules", 0);
	char *mine;
	uint64_t count;

	if (PQgetisnull(names, 0, 0))
		return 0;
	/* the target may have others */
	mine = common_format("name = ANY (%s)",
						 common_quote_value(&move->target.server, PQgetvalue(names, 0, 0)));
	if (common_is_true(&move->target.server, "SELECT EXISTS (SELECT FROM idem.schedules WHERE name = ANY ($1))", 1, PQgetvalue(names, 0, 0)))
		common_die("source and target have schedules with the same name; drop one of the two with idem_unschedule()");
	count = copy_rows(move, "idem.schedules", "idem.schedules", columns, "true", mine, 0);
	PQclear(names);
	free(columns);
	free(mine);
	return count;
}

/*
 * M8: copy a batch that the source has given up, and let the target take it, unless it has it
 * already.  "above" is what idem_shard_give() has returned.  Errors are raised; both transactions
 * are open then.
 */
void
copy_batch(Move *move, const Slots *slots, const char *above, uint64_t *rows)
{
	Server *source = &move->source.server;
	Server *target = &move->target.server;
	char *ranges = maps_format(slots);
	char *version;

	if (hash_key[0] == 0 && getrandom(hash_key, sizeof(hash_key), 0) != (ssize_t) sizeof(hash_key))
		common_die("could not make a random key");

	/* --abort changes the row, and so keeps a take that began before it from committing */
	version = common_value(target, "SELECT xmin FROM idem.shard", 0);

	/* REPEATABLE READ: a job is in idem.jobs or in idem.job_log */
	common_run(source, "BEGIN ISOLATION LEVEL REPEATABLE READ", 0);
	common_run(source, "LOCK TABLE idem.shard IN SHARE MODE", 0);
	/* no session changes a schedule that is about to move */
	if (move->schedules && copy_is_last(move, slots))
		common_run(source, "LOCK TABLE idem.schedules IN SHARE MODE", 0);
	guard_lock(move, source);
	maps_lock(&move->source, "SHARE");
	if (!common_is_true(source, "SELECT given @> $1::int4multirange AND receiver::text = $2 FROM idem.shard", 2, ranges, move->target.id))
		common_die("the source has not given up %s for this target any more; run this again", ranges);
	for (int table = TABLE_JOBS; table < NTABLES; table++)
	{
		char *condition = maps_condition(&move->source, table, slots);
		char *sql = common_format("SELECT EXISTS (SELECT FROM %s WHERE %s AND job_id < %lld)", maps_tables[table],
								  condition, (long long) move->target.jobs_from);

		if (common_is_true(source, sql, 0))
			common_die("a job in %s has a number that carries no slot in the target; run this again with --abort", maps_tables[table]);
		free(condition);
		free(sql);
	}

	common_run(target, "BEGIN ISOLATION LEVEL READ COMMITTED", 0);
	maps_lock(&move->target, "SHARE ROW EXCLUSIVE");
	guard_lock(move, target);
	if (!common_is_true(target, "SELECT slots @> $1::int4multirange FROM idem.shard", 1, ranges))
	{
		if (common_is_true(target, "SELECT (slots + COALESCE(given, '{}')) && $1::int4multirange OR xmin <> $2::xid FROM idem.shard", 2, ranges, version))
			common_die("the map of the target has changed meanwhile, or has some of these slots; run this again");
		copy_tables(move, slots, rows);
		if (move->schedules && copy_is_last(move, slots))
			rows[NTABLES + move->ntables] = copy_schedules(move);
		common_run(target, "SELECT pg_catalog.idem_shard_take($1::int4multirange, $2::bigint, $3::uuid)", 3, ranges, above, move->source.id);
	}
	common_run(target, "COMMIT", 0);
	common_run(source, "COMMIT", 0);
	common_end_progress();
	free(ranges);
	free(version);
}
