/*
 * idem.c
 *		Module magic and initialisation.
 */
#include "postgres.h"

#include "idem.h"

PG_MODULE_MAGIC_EXT(.name = "idem", .version = IDEM_VERSION);

/* 16 and newer declare it in fmgr.h */
extern PGDLLEXPORT void _PG_init(void);

void
_PG_init(void)
{
	idem_guc_init();
}
