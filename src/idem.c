/*
 * idem.c
 *		Module magic, initialisation and hooks.
 */
#include "postgres.h"

#include "cleanup/cleanup.h"
#include "keys/keys.h"
#include "stats/stats.h"
#include "wake/wake.h"

PG_MODULE_MAGIC_EXT(.name = "idem", .version = IDEM_VERSION);

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

/* 16 and newer declare it in fmgr.h */
extern PGDLLEXPORT void _PG_init(void);

static void
request_shmem(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	idem_entries_request();
	idem_waiters_request();
}

/* Save the counters when the postmaster stops, but not after a crash (S2) */
static void
save_counters(int code, Datum arg)
{
	if (code == 0 && idem_entries_exist())
		idem_counters_save();
}

static void
attach_shmem(void)
{
	bool is_new;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	is_new = idem_entries_attach();
	idem_waiters_attach();
	if (is_new && !IsBinaryUpgrade)
		idem_counters_load();
	if (!IsUnderPostmaster && !IsBinaryUpgrade)
		on_shmem_exit(save_counters, (Datum) 0);
}

/*
 * Shared memory and the launcher need shared_preload_libraries (W6).  Without it
 * everything else works.
 */
void
_PG_init(void)
{
	idem_guc_init();
	idem_xact_init();
	if (!process_shared_preload_libraries_in_progress)
		return;
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shmem;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = attach_shmem;
	/* W6: no launcher during pg_upgrade */
	if (!IsBinaryUpgrade)
		idem_launcher_register();
}
