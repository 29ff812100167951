# declare.awk: what the C code must know of the SQL declarations, as a header.
#
#	awk -f declare.awk PART.sql ... >declared.h
#
# The parts of the install script are the one description of each SQL function and of each
# table.  From them come, for the tables:
#
#	IDEM_JOBS_JOB_ID, IDEM_JOBS_NATTS
#		numbers of the columns, and how many there are
#	IDEM_DECLARED_TABLE_jobs
#		initializer of its IdemTableDef: types of the columns, those that may be null, and
#		the primary key
#
# for the functions of the library:
#
#	Anum_claim_result_status, Natts_claim_result
#		the columns of a row: named after its type, or after the function if that
#		has OUT or INOUT arguments
#	IDEM_DECLARED_idem_claim
#		initializer of its IdemSignature: types of result, arguments and columns
#
# and for idem_grant():
#
#	IDEM_GRANTED
#		the functions, views and tables with the sets of privileges they belong to
#
# The line before CREATE FUNCTION, PROCEDURE, VIEW or TABLE says which sets these are:
# "-- set: app", "-- set: monitor, app", or "-- set: none".  The parts write one argument
# or column per line, or all of them on one line.

function fail(what)
{
	print FILENAME ":" FNR ": " what >"/dev/stderr"
	failed = 1
	exit 1
}

function oid_of(type)
{
	if (!(type in oids))
		fail("declare.awk does not know type \"" type "\"")
	return oids[type]
}

# Split a list of columns or arguments at its commas into items[1..]; a type can have none
function split_list(list, items)
{
	gsub(/[ \t\n]+/, " ", list)
	gsub(/^ | $/, "", list)
	return list == "" ? 0 : split(list, items, / *, */)
}

# Add a column to a row: "name type"
function add_column(row, item,    name)
{
	name = item
	sub(/ .*/, "", name)
	sub(/^[^ ]* /, "", item)
	sub(/ DEFAULT .*/, "", item)
	gsub(/"/, "", name)
	header = header "#define Anum_" row "_" name " " ++natts[row] "\n"
	columns[row] = columns[row] (columns[row] == "" ? "" : ", ") oid_of(item)
}

function end_row(row)
{
	header = header "#define Natts_" row " " natts[row] "\n\n"
	if (natts[row] > max_columns)
		max_columns = natts[row]
}

# CREATE TYPE idem.claim_result AS (claimed boolean, ...)
function declare_type(text,    row, n, i, items)
{
	row = text
	sub(/^CREATE TYPE [a-z_]*\./, "", row)
	sub(/ .*/, "", row)
	sub(/^[^(]*\(/, "", text)
	sub(/\);.*/, "", text)
	n = split_list(text, items)
	for (i = 1; i <= n; i++)
		add_column(row, items[i])
	end_row(row)
}

# CREATE FUNCTION pg_catalog.idem_claim(key text, ...) RETURNS ... AS 'MODULE_PATHNAME', 'idem_claim'
function declare_function(text,    name, result, args, row, nargs, types, n, i, items, item, is_out)
{
	name = text
	sub(/^.*'MODULE_PATHNAME', *'/, "", name)
	sub(/'.*/, "", name)
	result = text ~ /^CREATE PROCEDURE/ ? "record" : text
	sub(/^.*\nRETURNS /, "", result)
	sub(/\n.*/, "", result)
	args = text
	sub(/^[^(]*\(/, "", args)
	sub(/\)\n(RETURNS|LANGUAGE) .*/, "", args)

	nargs = 0
	row = result ~ /^(SETOF )?record$/ ? name : ""
	n = split_list(args, items)
	for (i = 1; i <= n; i++)
	{
		item = items[i]
		is_out = sub(/^(OUT|INOUT) /, "", item)
		if (is_out)
			add_column(row, item)
		if (is_out && items[i] ~ /^OUT /)
			continue
		sub(/^[^ ]* /, "", item)
		sub(/ DEFAULT .*/, "", item)
		types = types (nargs++ ? ", " : "") oid_of(item)
	}
	if (nargs > max_args)
		max_args = nargs
	if (row != "")
		end_row(row)

	signature = "#define IDEM_DECLARED_" name " \\\n\t"
	if (nargs > 0)
		signature = signature ".nargs = " nargs ", .args = {" types "}, "
	if (sub(/^SETOF /, "", result))
		signature = signature ".returns_set = true, "
	if (sub(/^idem\./, "", result))
	{
		row = result
		if (!(row in natts))
			fail("the type idem." row " must be created before its function")
	}
	if (row != "")
		signature = signature ".natts = " natts[row] ", .columns = {" columns[row] "}, "
	header = header signature ".result = " (row == "" ? oid_of(result) : "RECORDOID") "\n\n"
}

# CREATE TABLE idem.jobs (job_id bigint NOT NULL, ..., CONSTRAINT jobs_pkey PRIMARY KEY (job_id))
function declare_table(text,    lines, n, i, table, prefix, name, types, nullable, key, nkey, items, keys)
{
	n = split(text, lines, "\n")
	table = lines[1]
	sub(/^CREATE TABLE idem\./, "", table)
	sub(/ .*/, "", table)
	prefix = "IDEM_" toupper(table) "_"
	for (i = 2; i <= n && lines[i] !~ /^\tCONSTRAINT /; i++)
	{
		sub(/^\t/, "", lines[i])
		sub(/,$/, "", lines[i])
		name = prefix toupper(substr(lines[i], 1, index(lines[i], " ") - 1))
		header = header "#define " name " " (i - 1) "\n"
		if (!sub(/ NOT NULL/, "", lines[i]))
			nullable = nullable (nullable == "" ? "" : " | ") "IDEM_COLUMN(" name ")"
		sub(/^[^ ]* /, "", lines[i])
		sub(/ DEFAULT .*/, "", lines[i])
		sub(/ COLLATE .*/, "", lines[i])
		types = types (types == "" ? "" : ", ") oid_of(lines[i])
	}
	header = header "#define " prefix "NATTS " (i - 2) "\n\n"
	key = lines[i]
	sub(/^\t/, "", key)
	if (key !~ /^CONSTRAINT [a-z_]* PRIMARY KEY \([a-z_, ]*\)$/)
		fail("table idem." table " must end with its primary key")
	name = key
	sub(/^[^(]*\(/, "", name)
	sub(/\)$/, "", name)
	nkey = split_list(name, items)
	for (i = 1; i <= nkey; i++)
		keys = keys (i > 1 ? ", " : "") prefix toupper(items[i])
	header = header "#define IDEM_DECLARED_TABLE_" table " \\\n\t.name = \"" table "\", .natts = " prefix "NATTS, " \
		".types = (const Oid[]){" types "}, .nullable = " nullable ", .pkey = {" keys "}, .npkey = " nkey ", " \
		".pkey_command = \"ALTER TABLE idem." table " ADD " key "\"\n\n"
}

# "-- set: app, monitor" above "CREATE VIEW idem.stats AS": a line of IDEM_GRANTED
function declare_member(line,    words, name, n, i, items, sets)
{
	if (set_line !~ /^-- set: /)
		fail("the line before must name the sets: -- set: app, monitor, admin or none")
	split(line, words, " ")
	sub(/\(.*/, "", words[3])
	split(words[3], name, ".")
	n = split_list(substr(set_line, 9), items)
	for (i = 1; i <= n; i++)
	{
		if (items[i] == "none" && n == 1)
			return
		if (items[i] !~ /^(app|monitor|admin)$/)
			fail("there is no set \"" items[i] "\"")
		sets = sets (sets == "" ? "" : " | ") "1 << SET_" toupper(items[i])
	}
	granted = granted " \\\n\t{" (words[2] ~ /^(FUNCTION|PROCEDURE)$/ ? "OBJECT_ROUTINE" : "OBJECT_TABLE") \
		", \"" name[1] "\", \"" name[2] "\", " sets "},"
}

BEGIN {
	n = split("bigint INT8 boolean BOOL bytea BYTEA integer INT4 interval INTERVAL jsonb JSONB name NAME oid OID " \
			  "pg_lsn PG_LSN regproc REGPROC regrole REGROLE smallint INT2 text TEXT uuid UUID void VOID xid XID " \
			  "int4multirange INT4MULTIRANGE", words, " ")
	for (i = 1; i < n; i += 2)
		oids[words[i]] = words[i + 1] "OID"
	oids["double precision"] = "FLOAT8OID"
	oids["timestamp with time zone"] = "TIMESTAMPTZOID"
	n = split("bigint INT8 jsonb JSONB text TEXT", words, " ")
	for (i = 1; i < n; i += 2)
		oids[words[i] "[]"] = words[i + 1] "ARRAYOID"
	oids["double precision[]"] = "FLOAT8ARRAYOID"
}

/^CREATE (TYPE|TABLE|FUNCTION|PROCEDURE) / {
	statement = ""
	is_open = 1
}

/^CREATE (FUNCTION|PROCEDURE|VIEW|TABLE) / {
	declare_member($0)
}

{
	set_line = $0
}

is_open {
	statement = statement $0 "\n"
	if ($0 ~ /;$/)
	{
		is_open = 0
		if (statement ~ /^CREATE TYPE /)
			declare_type(statement)
		else if (statement ~ /^CREATE TABLE /)
			declare_table(statement)
		else if (statement ~ /\nAS 'MODULE_PATHNAME'/)
			declare_function(statement)
	}
}

END {
	if (failed)
		exit 1
	print "/* Made by src/sql/declare.awk from the parts of the install script: change these. */"
	print "#ifndef IDEM_DECLARED_H"
	print "#define IDEM_DECLARED_H\n"
	print "#define IDEM_MAX_ARGS " max_args
	print "#define IDEM_MAX_COLUMNS " max_columns "\n"
	printf "%s", header
	print "#define IDEM_GRANTED" granted "\n"
	print "#endif /* IDEM_DECLARED_H */"
}
