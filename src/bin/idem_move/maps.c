/*
 * maps.c
 *		Sets of slots, and the row of idem.shard.
 *
 * Slots are numbers of this program: what it sends to a server or to the command of --switch is
 * made from these, never from text that it has read.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "idem_move.h"

const char *const maps_tables[NTABLES] = {"idem.keys", "idem.jobs", "idem.job_keys", "idem.job_log"};

static const char *
skip_spaces(const char *text)
{
	while (isspace((unsigned char) *text))
		text++;
	return text;
}

/* A bound of a range, and what follows it; a bound that is left out is the default. */
static const char *
parse_bound(const char *text, long missing, long *bound)
{
	char *end;

	text = skip_spaces(text);
	*bound = missing;
	if (!isdigit((unsigned char) *text))
		return text;
	*bound = strtol(text, &end, 10);
	return skip_spaces(end);
}

/* Ranges of slots as PostgreSQL writes them: {[0,256),[512,600)}.  False if they are not valid. */
bool
maps_parse(const char *text, Slots *slots)
{
	*slots = (Slots){0};
	text = skip_spaces(text);
	if (*text++ != '{')
		return false;
	text = skip_spaces(text);
	while (*text != '}')
	{
		long lower;
		long upper;
		char open = *text++;

		if (open != '[' && open != '(')
			return false;
		text = parse_bound(text, open == '[' ? 0 : -1, &lower);
		if (*text++ != ',')
			return false;
		text = parse_bound(text, NSLOTS, &upper);
		if (*text != ']' && *text != ')')
			return false;
		lower += open == '(';
		upper += *text == ']';
		for (long slot = lower; slot < upper && slot < NSLOTS; slot++)
			slots->has[slot] = true;
		text = skip_spaces(text + 1);
		if (*text == ',')
			text = skip_spaces(text + 1);
		else if (*text != '}')
			return false;
	}
	return *skip_spaces(text + 1) == '\0';
}

char *
maps_format(const Slots *slots)
{
	char *text = common_copy("{");

	for (int slot = 0; slot < NSLOTS; slot++)
	{
		int first = slot;
		char *longer;

		if (!slots->has[slot])
			continue;
		while (slot < NSLOTS && slots->has[slot])
			slot++;
		longer = common_format("%s%s[%d,%d)", text, text[1] == '\0' ? "" : ",", first, slot);
		free(text);
		text = longer;
	}
	return common_format("%s}", text);
}

int
maps_count(const Slots *slots)
{
	int count = 0;

	for (int slot = 0; slot < NSLOTS; slot++)
		count += slots->has[slot];
	return count;
}

Slots
maps_and(const Slots *a, const Slots *b)
{
	Slots result;

	for (int slot = 0; slot < NSLOTS; slot++)
		result.has[slot] = a->has[slot] && b->has[slot];
	return result;
}

Slots
maps_or(const Slots *a, const Slots *b)
{
	Slots result;

	for (int slot = 0; slot < NSLOTS; slot++)
		result.has[slot] = a->has[slot] || b->has[slot];
	return result;
}

Slots
maps_minus(const Slots *a, const Slots *b)
{
	Slots result;

	for (int slot = 0; slot < NSLOTS; slot++)
		result.has[slot] = a->has[slot] && !b->has[slot];
	return result;
}

/* The first so many of these slots */
Slots
maps_first(const Slots *slots, int count)
{
	Slots result = {0};

	for (int slot = 0; slot < NSLOTS && count > 0; slot++)
	{
		result.has[slot] = slots->has[slot];
		count -= slots->has[slot];
	}
	return result;
}

bool
maps_is_empty(const Slots *slots)
{
	return maps_count(slots) == 0;
}

/* Do both name the same database?  NULL names none. */
bool
maps_is_id(const char *a, const char *b)
{
	return a != NULL && b != NULL && strcmp(a, b) == 0;
}

static void
read_slots(const Database *database, const char *bits, Slots *slots)
{
	*slots = (Slots){0};
	if (bits == NULL)
		return;
	if (strlen(bits) != NSLOTS)
		common_die("%s: the map is not valid", database->server.name);
	for (int slot = 0; slot < NSLOTS; slot++)
		slots->has[slot] = bits[slot] == '1';
}

#define BITS(column)                                                                       \
	"(SELECT string_agg(CASE WHEN p." column " @> s THEN '1' ELSE '0' END, '' ORDER BY s)" \
	" FROM generate_series(0, 1023) AS s) AS " column

static void
replace_text(char **text, const char *value)
{
	free(*text);
	*text = common_copy(value);
}

/* M8: read the map.  A database without one, and a copy of another database, is refused. */
void
maps_read(Database *database)
{
	Server *server = &database->server;
	PGresult *result = common_query(server, "SELECT p.jobs_from, p.by, p.number, p.receiver, p.sender, p.xmin,"
											" pg_catalog.idem_shard_id() AS id," BITS("slots") "," BITS("given") "," BITS("taken") " FROM idem.shard AS p WHERE p.slots IS NOT NULL",
									0);

	if (PQntuples(result) != 1)
		common_die("the %s has no map; run there: SELECT pg_catalog.idem_shard_set('%s', number => %d)%s",
				   server->name, strcmp(server->name, "source") == 0 ? "{[0,1024)}" : "{}",
				   strcmp(server->name, "source") == 0 ? 0 : 1,
				   strcmp(server->name, "source") == 0 ? "" : ", if it is new");
	replace_text(&database->id, common_field(result, 0, "id"));
	replace_text(&database->by, common_field(result, 0, "by"));
	replace_text(&database->number, common_field(result, 0, "number"));
	replace_text(&database->receiver, common_field(result, 0, "receiver"));
	replace_text(&database->sender, common_field(result, 0, "sender"));
	replace_text(&database->version, common_field(result, 0, "xmin"));
	database->jobs_from = strtoll(common_field(result, 0, "jobs_from"), NULL, 10);
	read_slots(database, common_field(result, 0, "slots"), &database->slots);
	read_slots(database, common_field(result, 0, "given"), &database->given);
	read_slots(database, common_field(result, 0, "taken"), &database->taken);
	PQclear(result);
}

/* Lock the map, and see that this is still the database that was looked at (M8). */
void
maps_lock(Database *database, const char *mode)
{
	char *sql = common_format("LOCK TABLE idem.shard IN %s MODE", mode);
	char *id;

	common_run(&database->server, sql, 0);
	id = common_value(&database->server, "SELECT pg_catalog.idem_shard_id()", 0);
	if (!maps_is_id(id, database->id))
		common_die("the %s is another database than before", database->server.name);
	free(id);
	free(sql);
}

/*
 * An SQL condition for the rows of these slots in a table of idem.  Job numbers below jobs_from
 * of the database carry no slot.  COPY takes no parameters, so the ranges are in the text.
 */
char *
maps_condition(const Database *database, int table, const Slots *slots)
{
	char *ranges = maps_format(slots);
	char *condition;

	if (table != TABLE_KEYS)
		condition = common_format("job_id >= %lld AND (job_id & 1023)::integer <@ '%s'::int4multirange",
								  (long long) database->jobs_from, ranges);
	else if (strcmp(database->by, "key") == 0)
		condition = common_format("(key_hash & 1023)::integer <@ '%s'::int4multirange", ranges);
	else
		condition = common_format("pg_catalog.idem_slot('x', scope) <@ '%s'::int4multirange", ranges);
	free(ranges);
	return condition;
}

/* The same for a table of the user */
char *
maps_user_condition(const UserTable *table, const Slots *slots)
{
	char *ranges = maps_format(slots);
	char *condition = common_format("(%s)::integer <@ '%s'::int4multirange", table->slot, ranges);

	free(ranges);
	return condition;
}
