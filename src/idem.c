/*
 * idem.c
 *		Module magic and initialisation.
 */
#include "postgres.h"

#include "miscadmin.h"

#include "stats/stats.h"

PG_MODULE_MAGIC_EXT(.name = "idem", .version = IDEM_VERSION);

/* 16 and newer declare it in fmgr.h */
extern PGDLLEXPORT void _PG_init(void);

void
_PG_init(void)
{
	idem_guc_init();
	idem_unfinished_init();
	if (!process_shared_preload_libraries_in_progress)
		return;
	idem_shared_init();
	/* pg_upgrade wants the server for itself */
	if (!IsBinaryUpgrade)
		idem_launcher_register();
}
