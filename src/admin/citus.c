/*
 * citus.c
 *		SQL function idem_citus_table(), for idem_doctor().
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"

#include "fn/fn.h"
#include "table/table.h"

IDEM_FUNCTION(idem_citus_table);

/* What Citus has made of a table (M7); null if nothing, also for a null argument */
Datum
idem_citus_table(PG_FUNCTION_ARGS)
{
	const char *kind = NULL;

	idem_fn_begin(fcinfo, &idem_citus_table_signature, NULL);
	if (!PG_ARGISNULL(0))
		kind = idem_check_citus_kind(PG_GETARG_OID(0));
	if (kind == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(kind));
}
