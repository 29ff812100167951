/*
 * phase.c
 *		The phases of cleanup, for the worker and for idem_cleanup().
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

#include "stats/stats.h"

const IdemPhaseDef idem_phases[IDEM_NPHASES] = {
	[IDEM_PHASE_KEYS] = {"idem cleanup: keys", {"keys"}, NULL, idem_keystore_cleanup},
	[IDEM_PHASE_JOB_KEYS] = {"idem cleanup: keys of jobs", {"job_keys"}, NULL, idem_joblog_cleanup_keys},
	[IDEM_PHASE_JOB_HISTORY] = {"idem cleanup: history of jobs", {"job_log"}, NULL, idem_joblog_cleanup_log},
	[IDEM_PHASE_JOBS] = {"idem cleanup: jobs without attempts", {"jobs", "job_log"}, "queues", idem_jobstore_cleanup_jobs},
};

/* Does a subscription write a table that the phase would write? */
static bool
is_subscribed(const IdemPhaseDef *phase)
{
	Oid schema = get_namespace_oid("idem", true);

	for (int i = 0; OidIsValid(schema) && phase->tables[i] != NULL; i++)
	{
		Oid relid = get_relname_relid(phase->tables[i], schema);

		if (OidIsValid(relid) && idem_subscription_writes(relid))
			return true;
	}
	return false;
}

/*
 * One batch of a phase, or none if a subscription writes one of its tables
 * (W1).  The snapshot is taken first: if there is no subscription afterwards,
 * the snapshot shows no row that one has brought, also if one is created while
 * the batch is under way.
 */
void
idem_phase_run(const IdemPhaseDef *phase, IdemCleanup *cleanup)
{
	cleanup->snapshot = RegisterSnapshot(GetLatestSnapshot());
	cleanup->is_subscribed = is_subscribed(phase);
	if (!cleanup->is_subscribed)
		phase->clean(cleanup);
	UnregisterSnapshot(cleanup->snapshot);
	cleanup->snapshot = NULL;
}
