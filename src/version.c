/*
 * version.c
 *		Check that the library and the SQL objects of a database match.
 *
 * The library and the SQL objects of a database can have different versions,
 * and a superuser can change the objects.  Code that relies on the shape of an
 * object compares it with what the library expects and calls
 * idem_version_mismatch() if they differ.  The user gets an error, not a crash.
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "catalog/pg_extension.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"

#include "idem.h"

/*
 * Does the descriptor have columns of these types, in this order, and no others?  Columns that were
 * dropped stay in a descriptor; they do not count.
 */
bool
idem_version_desc_matches(TupleDesc desc, const Oid *types, int natts)
{
	int n = 0;

	for (int i = 0; i < desc->natts; i++)
	{
		if (TupleDescAttr(desc, i)->attisdropped)
			continue;
		if (n == natts || TupleDescAttr(desc, i)->atttypid != types[n])
			return false;
		n++;
	}
	return n == natts;
}

/* Version of the extension in the catalog, or NULL if the extension was dropped */
static char *
get_installed_version(void)
{
	Relation rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyData skey;
	SysScanDesc scan;
	HeapTuple tuple;
	char *version = NULL;

	ScanKeyInit(&skey, Anum_pg_extension_extname, BTEqualStrategyNumber,
				F_NAMEEQ, CStringGetDatum("idem"));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, NULL, 1, &skey);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool isnull;
		Datum value = heap_getattr(tuple, Anum_pg_extension_extversion,
								   RelationGetDescr(rel), &isnull);

		if (!isnull)
			version = TextDatumGetCString(value);
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return version;
}

/* Is the version of the SQL objects that of the library? */
bool
idem_version_is_equal(void)
{
	char *version = get_installed_version();

	return version != NULL && strcmp(version, IDEM_VERSION) == 0;
}

/* Raise the error; "found" is a sentence about the object that does not match */
void
idem_version_mismatch(const char *found)
{
	char *version = get_installed_version();

	ereport(ERROR,
			errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			errmsg("library and SQL objects of idem do not match"),
			errdetail("%s The library has version %s, the SQL objects have version %s.",
					  found, IDEM_VERSION, version ? version : "unknown"),
			idem_version_is_equal() ? errhint("Undo the change, or drop and create the extension.") :
									  errhint("Install the library of the newer version, run ALTER EXTENSION idem UPDATE, and reconnect."));
}
