/*
 * sequences.c
 *		Set the sequences of the subscriber to the values of the publisher.
 *
 * Logical replication does not carry them.  Only names and numbers go from one server to the
 * other, as values.  From 18 on a function reads a sequence by its OID.  Before, it is read by
 * name, as a table is, and its owner could put a view with a function in its place: so the
 * transaction expands no views.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "idem_cutover.h"

typedef struct Sequence
{
	char *schema;
	char *name;
	char *oid;
	bool has_cycle;
	bool is_descending;
	bool is_of_jobs; /* the numbers of jobs */
	int64_t last_value;
	bool is_called;
} Sequence;

typedef struct Sequences
{
	Sequence *list;
	int count;
} Sequences;

static int
compare_names(const void *left, const void *right)
{
	const Sequence *a = left;
	const Sequence *b = right;
	int result = strcmp(a->schema, b->schema);

	return result != 0 ? result : strcmp(a->name, b->name);
}

static bool
is_set(const PGresult *result, int row, const char *column)
{
	const char *value = common_field(result, row, column);

	return value != NULL && value[0] == 't';
}

static void
read_values(Server *server, Sequence *sequence)
{
	PGresult *result;
	const char *last_value = NULL;

	if (PQserverVersion(server->conn) >= 180000)
		result = common_query(
			server, "SELECT d.last_value, d.is_called FROM pg_get_sequence_data($1::oid::regclass) AS d",
			1, sequence->oid);
	else
	{
		char *schema = common_quote_name(server, sequence->schema);
		char *name = common_quote_name(server, sequence->name);
		char *sql = common_format("SELECT s.last_value, s.is_called FROM %s.%s AS s", schema, name);

		result = common_query(server, sql, 0);
		free(sql);
		free(name);
		free(schema);
	}
	if (PQntuples(result) == 1)
		last_value = common_field(result, 0, "last_value");
	if (last_value == NULL)
		common_die("%s: could not read sequence %s.%s", server->name, sequence->schema, sequence->name);
	sequence->last_value = strtoll(last_value, NULL, 10);
	sequence->is_called = is_set(result, 0, "is_called");
	PQclear(result);
}

/* All sequences, sorted by name */
static Sequences
read_sequences(Server *server)
{
	bool by_name = PQserverVersion(server->conn) < 180000;
	Sequences all;
	PGresult *result;

	common_run(server, "BEGIN", 0);
	if (by_name)
		common_set(server, "restrict_nonsystem_relation_kind", "view, foreign-table", true);
	result = common_query(
		server,
		"SELECT c.oid, n.nspname, c.relname, s.seqcycle, s.seqincrement < 0 AS is_descending,"
		"       n.nspname = 'idem' AND c.relname = 'jobs_job_id_seq' AS is_of_jobs"
		"  FROM pg_sequence AS s"
		"  JOIN pg_class AS c ON c.oid = s.seqrelid"
		"  JOIN pg_namespace AS n ON n.oid = c.relnamespace"
		" WHERE c.relpersistence <> 't'",
		0);
	all.count = PQntuples(result);
	all.list = common_alloc(((size_t) all.count + 1) * sizeof(Sequence));
	for (int i = 0; i < all.count; i++)
	{
		all.list[i] = (Sequence){
			.schema = common_copy(common_field(result, i, "nspname")),
			.name = common_copy(common_field(result, i, "relname")),
			.oid = common_copy(common_field(result, i, "oid")),
			.has_cycle = is_set(result, i, "seqcycle"),
			.is_descending = is_set(result, i, "is_descending"),
			.is_of_jobs = is_set(result, i, "is_of_jobs"),
		};
		read_values(server, &all.list[i]);
	}
	PQclear(result);
	common_run(server, "COMMIT", 0);
	qsort(all.list, (size_t) all.count, sizeof(Sequence), compare_names);
	return all;
}

static void
free_sequences(Sequences *all)
{
	for (int i = 0; i < all->count; i++)
	{
		free(all->list[i].schema);
		free(all->list[i].name);
		free(all->list[i].oid);
	}
	free(all->list);
}

/* Does the sequence have to be set to the value? */
static bool
is_behind(const Sequence *sequence, const Sequence *value)
{
	if (sequence->last_value == value->last_value)
		return sequence->is_called ? value->has_cycle && !value->is_called : value->is_called;
	if (value->has_cycle)
		return true;
	return value->is_descending ? sequence->last_value > value->last_value :
								  sequence->last_value < value->last_value;
}

/*
 * Set what is behind on the subscriber, that of the jobs with the margin.  Returns how many were
 * set, and in count how many there are.
 */
static int
set_sequences(Cutover *cutover, int *count)
{
	Sequences there = read_sequences(&cutover->publisher);
	Sequences here = read_sequences(&cutover->subscriber);
	bool has_jobs = false;
	int n = 0;

	for (int i = 0; i < there.count; i++)
	{
		Sequence *value = &there.list[i];
		const Sequence *sequence =
			bsearch(value, here.list, (size_t) here.count, sizeof(Sequence), compare_names);
		char *number;

		if (sequence == NULL)
			common_die("the subscriber lacks sequence %s.%s", value->schema, value->name);
		if (value->is_of_jobs)
		{
			if (__builtin_add_overflow(value->last_value, cutover->margin, &value->last_value))
				common_die("the margin is too large");
			value->is_called = true;
			has_jobs = true;
		}
		if (!is_behind(sequence, value))
			continue;
		number = common_format("%" PRId64, value->last_value);
		common_run(&cutover->subscriber, "SELECT setval($1::oid::regclass, $2::bigint, $3::boolean)",
				   3, sequence->oid, number, value->is_called ? "t" : "f");
		free(number);
		n++;
	}
	if (!has_jobs)
		common_die("the publisher lacks the sequence of the job numbers");
	*count = there.count;
	free_sequences(&there);
	free_sequences(&here);
	return n;
}

/* Set the sequences of the subscriber, and look whether they are. */
void
sequences_copy(Cutover *cutover, int *count)
{
	if (set_sequences(cutover, count) > 0 && set_sequences(cutover, count) > 0)
		common_die("could not set the sequences of the subscriber");
}
