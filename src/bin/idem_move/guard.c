/*
 * guard.c
 *		Tables of the user are locked, and refused if code of another role could run.
 *
 * The program is a superuser.  The owner of a table can add a trigger, a check constraint, an
 * expression in an index and much else that runs with the privileges of the role that reads or
 * writes the table.  SET ROLE does not help: such code can RESET ROLE.  So each transaction that
 * touches a table of the user begins with guard_lock(): lock first, then look, so that nothing can
 * be added between the look and the use.
 *
 * SHARE UPDATE EXCLUSIVE conflicts with every command that adds such code to a table, and with
 * none that reads or writes its rows.  A schema can be renamed although its tables are locked, so
 * that another table has the name: a lock on the row of the schema prevents that.
 *
 * Which code is meant: all that belongs to a role that is no superuser, and every expression in a
 * table of such a role, because built-in functions can read and write files for a superuser.
 */
#include <stdlib.h>
#include <string.h>

#include "idem_move.h"

/*
 * What could run while the tables $1, or partitions of them, are read or written.  Column defaults
 * are missing, because a value is given for every column (guard_lock() sees to that).  Row security
 * policies do not apply to superusers; the table is refused nevertheless, because its owner expects
 * them to.
 */
static const char code_query[] =
	"WITH RECURSIVE super AS (SELECT oid FROM pg_roles WHERE rolsuper),\n"
	"rel (oid) AS (\n"
	"	SELECT unnest($1::oid[]) UNION SELECT i.inhrelid FROM rel AS r JOIN pg_inherits AS i ON i.inhparent = r.oid),\n"
	"class AS (SELECT c.*, NOT c.relowner IN (SELECT oid FROM super) AS is_foreign FROM rel JOIN pg_class AS c ON c.oid = rel.oid),\n"
	"type (oid) AS (\n"
	"	SELECT a.atttypid FROM rel AS r JOIN pg_attribute AS a ON a.attrelid = r.oid WHERE a.attnum > 0 AND NOT a.attisdropped\n"
	"	UNION\n"
	"	SELECT part.oid FROM type AS y JOIN pg_type AS t ON t.oid = y.oid CROSS JOIN LATERAL (\n"
	"		SELECT t.typelem UNION ALL SELECT t.typbasetype\n"
	"		UNION ALL SELECT r.rngsubtype FROM pg_range AS r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)\n"
	"		UNION ALL SELECT a.atttypid FROM pg_attribute AS a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS part (oid)\n"
	"	 WHERE part.oid <> 0),\n"
	/* functions and operators of roles that are no superusers */
	"function (oid) AS (SELECT p.oid FROM pg_proc AS p WHERE NOT p.proowner IN (SELECT oid FROM super)),\n"
	"operator (oid) AS (SELECT o.oid FROM pg_operator AS o WHERE o.oprcode IN (SELECT oid FROM function)),\n"
	"code (classid, objid, is_foreign, what) AS (\n"
	"	SELECT 'pg_rewrite'::regclass, w.oid, c.is_foreign, format('rule %I', w.rulename)\n"
	"	  FROM class AS c JOIN pg_rewrite AS w ON w.ev_class = c.oid\n"
	"	UNION ALL\n"
	"	SELECT 'pg_trigger'::regclass, t.oid, c.is_foreign, format('trigger %I, which is enabled ALWAYS or REPLICA', t.tgname)\n"
	"	  FROM class AS c JOIN pg_trigger AS t ON t.tgrelid = c.oid WHERE t.tgenabled IN ('A', 'R')\n"
	"	UNION ALL\n"
	/* others do not fire, but the functions of idem refuse such a table, half way */
	"	SELECT 'pg_trigger'::regclass, t.oid, true, format('trigger %I on idem.%I', t.tgname, c.relname)\n"
	"	  FROM class AS c JOIN pg_trigger AS t ON t.tgrelid = c.oid\n"
	"	 WHERE t.tgenabled NOT IN ('A', 'R') AND c.relnamespace = 'idem'::regnamespace\n"
	"	UNION ALL\n"
	"	SELECT 'pg_constraint'::regclass, k.oid, c.is_foreign, format('check constraint %I', k.conname)\n"
	"	  FROM class AS c JOIN pg_constraint AS k ON k.conrelid = c.oid WHERE k.contype = 'c'\n"
	"	UNION ALL\n"
	"	SELECT 'pg_attrdef'::regclass, d.oid, c.is_foreign, format('generated column %I', a.attname)\n"
	"	  FROM class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attgenerated <> ''\n"
	"	  JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum\n"
	"	UNION ALL\n"
	"	SELECT 'pg_class'::regclass, i.indexrelid, c.is_foreign, format('expression or predicate of index %s', i.indexrelid::regclass)\n"
	"	  FROM class AS c JOIN pg_index AS i ON i.indrelid = c.oid WHERE i.indexprs IS NOT NULL OR i.indpred IS NOT NULL\n"
	"	UNION ALL\n"
	"	SELECT 'pg_statistic_ext'::regclass, s.oid, c.is_foreign, format('expression of statistics %I', s.stxname)\n"
	"	  FROM class AS c JOIN pg_statistic_ext AS s ON s.stxrelid = c.oid WHERE s.stxexprs IS NOT NULL\n"
	"	UNION ALL\n"
	"	SELECT 'pg_class'::regclass, c.oid, c.is_foreign, 'expression of the partition key'\n"
	"	  FROM class AS c JOIN pg_partitioned_table AS p ON p.partrelid = c.oid WHERE p.partexprs IS NOT NULL\n"
	"	UNION ALL\n"
	"	SELECT 'pg_class'::regclass, c.oid, c.is_foreign, 'row security' FROM class AS c WHERE c.relrowsecurity),\n"
	"found (what) AS (\n"
	"	SELECT c.what FROM code AS c\n"
	"	 WHERE c.is_foreign OR EXISTS (\n"
	"		SELECT FROM pg_depend AS d WHERE d.classid = c.classid AND d.objid = c.objid\n"
	"		   AND (d.refclassid = 'pg_proc'::regclass AND d.refobjid IN (SELECT oid FROM function)\n"
	"				OR d.refclassid = 'pg_operator'::regclass AND d.refobjid IN (SELECT oid FROM operator)))\n"
	"	UNION ALL\n"
	/* also without a constraint: its owner could add one, or a cast, at any time */
	"	SELECT format('type %s', t.oid::regtype) FROM type AS y JOIN pg_type AS t ON t.oid = y.oid\n"
	"	 WHERE NOT t.typowner IN (SELECT oid FROM super)\n"
	"		OR EXISTS (SELECT FROM function AS f WHERE f.oid IN (t.typinput, t.typoutput, t.typmodin, t.typsubscript))\n"
	"		OR EXISTS (SELECT FROM pg_range AS r JOIN function AS f ON f.oid IN (r.rngcanonical, r.rngsubdiff) WHERE t.oid IN (r.rngtypid, r.rngmultitypid))\n"
	"		OR EXISTS (SELECT FROM pg_cast AS c JOIN function AS f ON f.oid = c.castfunc WHERE c.castsource = t.oid)\n"
	"		OR EXISTS (SELECT FROM pg_constraint AS k JOIN pg_depend AS d ON d.classid = 'pg_constraint'::regclass AND d.objid = k.oid\n"
	"					 JOIN function AS f ON d.refclassid = 'pg_proc'::regclass AND d.refobjid = f.oid WHERE k.contypid = t.oid)\n"
	"	UNION ALL\n"
	"	SELECT format('operator class %I of index %s', o.opcname, i.indexrelid::regclass)\n"
	"	  FROM rel AS r JOIN pg_index AS i ON i.indrelid = r.oid JOIN pg_opclass AS o ON o.oid = ANY (i.indclass)\n"
	"	 WHERE EXISTS (SELECT FROM pg_amproc AS p JOIN function AS f ON f.oid = p.amproc WHERE p.amprocfamily = o.opcfamily)\n"
	"		OR EXISTS (SELECT FROM pg_amop AS p JOIN operator AS f ON f.oid = p.amopopr WHERE p.amopfamily = o.opcfamily))\n"
	"SELECT string_agg(DISTINCT what, ', ') FROM found";

/* Kinds of relations whose rows cannot move, of superusers as well */
static const char kind_query[] =
	"SELECT CASE WHEN c.relkind NOT IN ('r', 'p') THEN 'is not a table'\n"
	"			WHEN c.relkind = 'r' AND c.relhassubclass AND EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhparent = c.oid)\n"
	"			THEN 'has tables that inherit from it; name these instead'\n"
	"			WHEN c.relkind = 'p' AND EXISTS (SELECT FROM pg_partition_tree(c.oid) AS p JOIN pg_class AS l ON l.oid = p.relid WHERE l.relkind NOT IN ('r', 'p'))\n"
	"			THEN 'has a partition that is not a table'\n"
	"			WHEN c.relpersistence = 't' THEN 'is temporary'\n"
	"			WHEN $2::boolean AND EXISTS (SELECT FROM pg_class AS l WHERE l.relpersistence = 'u' AND (l.oid = c.oid OR l.oid IN (SELECT p.relid FROM pg_partition_tree(c.oid) AS p)))\n"
	"			THEN 'is unlogged: a crash would empty it, when the source has its rows no more' END\n"
	"  FROM pg_class AS c WHERE c.oid = $1::oid";

static void
refuse_code(Server *server, const char *shown, const char *oids)
{
	char *code = common_value(server, code_query, 1, oids);

	if (code == NULL)
		return;
	common_warn("%s: table %s could run code of a role that is no superuser: %s", server->name, shown, code);
	common_die("with --trust-owners this code runs with your privileges, which are those of a superuser");
}

/* The name must mean the table that this transaction has locked. */
static char *
locked_oid(Server *server, const UserTable *table)
{
	char *oid;

	common_run(server, "SELECT FROM pg_namespace WHERE nspname = $1 FOR SHARE", 1, table->schema);
	oid = common_value(server, "SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
							   " JOIN pg_locks AS l ON l.relation = c.oid AND l.locktype = 'relation' AND l.granted"
							   "  AND l.pid = pg_backend_pid() AND l.mode = 'ShareUpdateExclusiveLock'"
							   "  AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())"
							   " WHERE n.nspname = $1 AND c.relname = $2",
					   2, table->schema, table->name);
	if (oid == NULL)
		common_die("%s: table %s was renamed meanwhile; run this again", server->name, table->shown);
	return oid;
}

/* The columns of a table that have values of their own, quoted, in alphabetical order */
char *
guard_columns(Server *server, const char *qualified)
{
	return common_value(server, "SELECT string_agg('\"' || replace(a.attname, '\"', '\"\"') || '\"', ', ' ORDER BY a.attname COLLATE \"C\")"
								" FROM pg_attribute AS a WHERE a.attrelid = $1::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''",
						1, qualified);
}

/*
 * M8: lock the tables of the user until the transaction ends, and refuse those that could run code
 * of another role.  Call this as the first thing in a transaction, or after other LOCK commands:
 * under REPEATABLE READ the snapshot must not be older than the locks.
 */
void
guard_lock(const Move *move, Server *server)
{
	for (int i = 0; i < move->ntables; i++)
	{
		char *sql = common_format("LOCK TABLE %s IN SHARE UPDATE EXCLUSIVE MODE", move->tables[i].qualified);

		common_run(server, sql, 0);
		free(sql);
	}
	for (int i = 0; i < move->ntables; i++)
	{
		const UserTable *table = &move->tables[i];
		char *oid = locked_oid(server, table);
		const char *is_target = server == &move->target.server ? "t" : "f";
		char *kind = common_value(server, kind_query, 2, oid, is_target);
		char *columns;

		if (kind != NULL)
			common_die("%s: %s %s", server->name, table->shown, kind);
		/* a column that is not copied would get its default, which is code as well */
		columns = guard_columns(server, table->qualified);
		if (columns == NULL || strcmp(columns, table->columns) != 0)
			common_die("%s: the columns of table %s have changed meanwhile; run this again", server->name, table->shown);
		if (!move->trust_owners)
			refuse_code(server, table->shown, common_format("{%s}", oid));
		free(columns);
		free(oid);
	}
	/*
	 * A superuser owns these, but can have granted TRIGGER on them, or have added something.  What
	 * is added from now on does not fire, see connect_to().
	 */
	if (!move->trust_owners)
		refuse_code(server, "of idem", common_value(server, "SELECT array_agg(c.oid) FROM pg_class AS c WHERE c.relnamespace = 'idem'::regnamespace AND c.relkind = 'r'", 0));
}

/* Has the table rows of these slots?  After guard_lock(), in its transaction */
bool
guard_has_rows(Server *server, const UserTable *table, const Slots *slots)
{
	char *condition = maps_user_condition(table, slots);
	char *sql = common_format("SELECT EXISTS (SELECT FROM %s WHERE %s)", table->qualified, condition);
	bool has_rows = common_is_true(server, sql, 0);

	free(condition);
	free(sql);
	return has_rows;
}
