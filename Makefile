# idem: idempotency keys inside the caller's own transaction
#
# make, make install, make installcheck: as with every PGXS extension;
# PG_CONFIG=... chooses the server.  make help lists the rest.

EXTENSION = idem
MODULE_big = idem
DATA_built = idem--0.5.0.sql
# for users to run with psql -f
DATA = src/scripts/idem_plproxy.sql
OBJS = \
	src/guc.o \
	src/clock.o \
	src/hash.o \
	src/sha256.o \
	src/version.o \
	src/shmem/exchange.o \
	src/shmem/skips.o \
	src/shmem/entries.o \
	src/shmem/waiters.o \
	src/shmem/queueref.o \
	src/table/check.o \
	src/table/table.o \
	src/table/row.o \
	src/table/leaf.o \
	src/table/probe.o \
	src/table/shard.o \
	src/fn/answer.o \
	src/fn/fn.o \
	src/fn/args.o \
	src/fn/show.o \
	src/fn/subxact.o \
	src/fn/handler.o \
	src/fn/procxact.o \
	src/fn/unfinished.o \
	src/stats/counters.o \
	src/stats/views.o \
	src/stats/holders.o \
	src/wake/touched.o \
	src/wake/sleep.o \
	src/keys/keyrow.o \
	src/keys/keystore.o \
	src/keys/claim.o \
	src/keys/call.o \
	src/keys/holder.o \
	src/jobs/row/jobtable.o \
	src/jobs/row/queuestore.o \
	src/jobs/row/jobrow.o \
	src/jobs/row/history.o \
	src/jobs/row/headers.o \
	src/jobs/row/jobstore.o \
	src/jobs/enqueue/enqueuestore.o \
	src/jobs/enqueue/bulk.o \
	src/jobs/enqueue/enqueue.o \
	src/jobs/fetch/fetchstore.o \
	src/jobs/fetch/fetch.o \
	src/jobs/fetch/wait.o \
	src/jobs/hold/holdstore.o \
	src/jobs/hold/hold.o \
	src/jobs/hold/work.o \
	src/jobs/admin/manystore.o \
	src/jobs/admin/job.o \
	src/jobs/admin/why.o \
	src/schedules/ticks.o \
	src/schedules/schedulestore.o \
	src/schedules/schedule.o \
	src/testing/verify.o \
	src/testing/drain.o \
	src/testing/reset.o \
	src/cleanup/sweep.o \
	src/cleanup/process.o \
	src/cleanup/worker.o \
	src/cleanup/launcher.o \
	src/admin/privileges.o \
	src/admin/queue.o \
	src/admin/doctor.o \
	src/admin/map.o \
	src/xact.o \
	src/idem.o
# The install script, in this order: what a part uses comes before it.
SQL_PARTS = \
	src/sql/schema.sql \
	src/sql/keys.sql \
	src/sql/keys_functions.sql \
	src/sql/keys_views.sql \
	src/sql/jobs.sql \
	src/sql/jobs_functions.sql \
	src/sql/jobs_views.sql \
	src/sql/schedules.sql \
	src/sql/schedules_functions.sql \
	src/sql/shard.sql \
	src/sql/stats.sql \
	src/sql/testing.sql \
	src/sql/admin.sql \
	src/sql/health.sql \
	src/sql/why.sql \
	src/sql/report_views.sql \
	src/sql/report.sql \
	src/sql/close.sql
# Programs for operators, installed beside psql: folders of src/bin, each with its Makefile.
PROGRAMS = idem_cutover idem_move

PGFILEDESC = "idem - idempotency keys inside the caller's own transaction"

# Every suite brings up a private server, also in installcheck.
REGRESS = \
	setup \
	install \
	claim \
	finish \
	release \
	get \
	call \
	many \
	expiry \
	key_hash \
	request \
	errors \
	shape \
	altered \
	privileges \
	comments \
	result_types \
	settings \
	require_finish \
	lease \
	lease_expiry \
	lease_plain \
	lease_status \
	toast \
	job_enqueue \
	job_scheduled \
	job_fetch \
	job_fetch_any \
	job_headers \
	job_progress \
	job_skip \
	job_end \
	job_by_key \
	job_many \
	job_bulk_change \
	job_bulk_errors \
	job_errors \
	job_queue \
	job_history \
	job_numbers \
	job_status \
	job_privileges \
	job_edges \
	job_hash \
	stats \
	latency \
	subscription \
	shard \
	shard_move \
	citus \
	doctor \
	verify \
	drain \
	reset \
	report \
	schedule \
	schedule_tick \
	schedule_missed \
	schedule_errors \
	schedule_cron \
	schedule_privileges \
	schedule_owner \
	why \
	wait \
	work
# make check-fast has a server
REGRESS_SERVER = --temp-instance=tmp_check_regress --temp-config=$(srcdir)/test/temp.conf
REGRESS_OPTS = $(REGRESS_SERVER) \
	--no-locale --encoding=UTF8 --load-extension=idem

ISOLATION = \
	claim \
	nowait \
	bounded-wait \
	many-waiters \
	savepoint \
	release \
	not-held \
	request \
	owner \
	call \
	handler \
	pin \
	claim-many \
	prepare \
	forget \
	takeover \
	cleanup \
	cleanup-batch \
	cleanup-jobs \
	clock \
	insert-race \
	toast-lock \
	index-build \
	repeatable-read \
	serializable \
	deadlock \
	lock-timeout \
	cancel \
	lease-takeover \
	lease-finish \
	lease-fence \
	lease-fence-ttl \
	lease-renew \
	lease-release \
	lease-checkpoint \
	lease-plain \
	lease-forget \
	lease-cleanup \
	lease-serializable \
	lease-open \
	lease-prepare \
	lease-deadlock \
	lease-resume \
	lease-pin \
	lease-token \
	lease-race \
	lease-order \
	job-enqueue \
	job-absorb \
	job-late \
	job-links \
	job-running \
	job-executed \
	job-rerun \
	job-retry \
	job-takeover \
	job-cancel \
	job-by-key \
	job-many \
	job-bulk \
	job-fetch \
	job-skip \
	job-skip-chain \
	job-skip-race \
	job-skip-moved \
	job-toast-lock \
	job-ended-key \
	job-prepare \
	job-pause \
	job-queue \
	job-queue-cache \
	job-owner \
	job-replace \
	job-expired \
	job-expired-lease \
	job-spent \
	job-drain \
	job-isolation \
	job-pin \
	job-number \
	schedule \
	schedule-tick \
	schedule-owner \
	schedule-limit \
	schedule-prepare \
	schedule-snapshot \
	wait \
	wait-back \
	wait-many \
	wait-count \
	wait-race \
	wait-end \
	work \
	why \
	holder \
	verify \
	reset \
	subscription \
	shard-set \
	shard-move \
	shard-read
# These need a library with points (src/point.h).
ISOLATION_POINTS = \
	hash-lock \
	job-bulk-lock
ISOLATION_SERVER = --temp-instance=tmp_check_iso --temp-config=$(srcdir)/test/temp.conf
ISOLATION_OPTS = \
	--inputdir=$(srcdir)/test/isolation \
	$(ISOLATION_SERVER) \
	--no-locale --encoding=UTF8

# Files of test/t: what make test runs, and what only make test-long runs.
TAP = \
	001_meta \
	002_source \
	010_crash \
	020_standby \
	030_dump \
	040_bulk \
	045_hash \
	052_recreate \
	055_row_locks \
	057_leaf_walk \
	060_pooling \
	061_autocommit \
	070_install \
	080_versions \
	085_frozen \
	090_lease_crash \
	094_lease_restore \
	096_lost_answer \
	106_job_links \
	107_job_stream \
	108_job_skip \
	110_job_bulk \
	111_job_many \
	115_shard \
	118_citus \
	120_job_replica \
	121_replica_reads \
	130_job_dump \
	140_job_crash \
	141_wait_hostile \
	142_wait \
	144_wait_limits \
	145_wait_race \
	146_wait_standby \
	147_wait_pooling \
	148_why \
	149_work \
	150_worker \
	154_worker_settings \
	156_worker_failures \
	157_schedule_worker \
	158_schedule_trouble \
	160_worker_signals \
	161_schedule_year \
	162_clock_steps \
	164_schedule_turns \
	170_worker_standby \
	180_stats \
	181_stats_room \
	190_monitoring \
	195_hostile \
	200_manual \
	210_report
TAP_LONG = \
	050_load \
	092_lease_failover \
	093_failover_ledger \
	098_renew_load \
	100_job_load \
	105_job_soak \
	114_move_fuzz \
	116_shard_move \
	117_plproxy \
	119_move_hostile \
	122_pgpool \
	123_move_checks \
	124_cutover_hostile \
	125_blue_green \
	126_cutover \
	127_createsubscriber \
	128_shard_split \
	129_cutover_race \
	143_wait_load \
	152_worker_trouble \
	159_schedule_failover \
	163_schedule_flood \
	165_worker_databases \
	166_worker_slots \
	175_worker_pg_upgrade \
	185_worker_memory

TAP_TESTS = 1
PROVE_TESTS = $(patsubst %,test/t/%.pl,$(TAP) $(TAP_LONG))

EXTRA_CLEAN = tmp_check_regress $(OBJS:.o=.d) src/declared.h src/declared.new

# Other libraries in the server do not see our symbols; 16 and newer do that for
# all modules.
PG_CFLAGS += -fvisibility=hidden -MMD -MP
# src of the build directory has declared.h.
PG_CPPFLAGS += -I$(srcdir)/src -Isrc

# WERROR=1 is for our own builds.  Parameters go unused in the server's own
# headers and in our callbacks, whose signatures are given.
ifdef WERROR
PG_CFLAGS += -Wall -Wextra -Werror -Wno-unused-parameter
endif

# POINTS=1 is for the specs of ISOLATION_POINTS only.
ifdef POINTS
PG_CPPFLAGS += -DIDEM_POINTS
endif

# What needs no PostgreSQL yet comes before looking for one: these scripts
# install what is missing and then call make again.
all:

.PHONY: all help test test-long check-fast check-fast-stop forget-fast coverage demo demo-stop examples drivers bench soak ha model report-picture format format-check shellcheck

# If PG_CONFIG was not given, the scripts find one.
ifneq ($(filter command environment%,$(origin PG_CONFIG)),)
export PG_CONFIG
endif

help:
	@echo 'make                build the extension'
	@echo 'make install        install it into the server that pg_config belongs to'
	@echo 'make installcheck   run the tests against what was installed, on private servers'
	@echo 'make test           build and run the tests in a temporary directory; some of them with'
	@echo '                    SUITES="regress isolation tap bench", REGRESS="claim lease",'
	@echo '                    ISOLATION="claim", TESTS="test/t/010_crash.pl", BENCH="pair"'
	@echo 'make test-long      the rest of them: long loads, failovers, moves, pg_upgrade'
	@echo 'make check-fast     test in a directory that stays, and build there only what has changed;'
	@echo '                    T="claim 115" runs the files of these names; check-fast-stop ends the'
	@echo '                    servers that stay up, clean removes all of it'
	@echo 'make coverage       show which test runs how much of which C file (gcov); T="claim 115"'
	@echo 'make demo           see it work, on a throw-away server (KEEP=1 leaves it running)'
	@echo 'make demo-stop      remove what make demo KEEP=1 has left'
	@echo 'make examples       run the programs of examples/ with pgbouncer through one suite;'
	@echo '                    LANGS="python node" for some, SCENARIOS="fifty_at_once"'
	@echo 'make drivers        try what doc/drivers.md says about each driver; DRIVERS="knex jdbc"'
	@echo 'make bench          measure it against SQL written by hand, and other queues, and write'
	@echo '                    doc/bench; BENCH="counts pair" for some lines; QUICK=1 with small'
	@echo '                    sizes, writes nothing (BENCH_OUT=DIRECTORY: there)'
	@echo 'make soak           a random load with a ledger, for a minute (SOAK_SECONDS, SOAK_SEED,'
	@echo '                    SOAK_CLIENTS), and look whether every promise was kept'
	@echo 'make ha             failovers with Patroni and etcd under load, checked against a ledger'
	@echo '                    (HA_ROUNDS, HA_SEED, HA_MODE="async sync", HA_FAULTS="kill frozen")'
	@echo 'make report-picture fill a server with a day of a shop, render idem_report() in Chromium'
	@echo '                    and write doc/report.png (REPORT_OUT=DIRECTORY: all pictures, there)'
	@echo 'make model          check the models of leases and of waking (Spin)'
	@echo 'make format         format the C files; format-check only checks them'
	@echo 'make shellcheck     check the shell scripts'
	@echo 'make clean          remove what was built'
	@echo
	@echo 'PG_CONFIG=/path/to/pg_config chooses the server. test, demo, examples, bench,'
	@echo 'soak, ha, report-picture and model install missing Debian packages (as root or with sudo).'

test:
	@bash test/run

test-long:
	@SUITES=long bash test/run

check-fast:
	@bash test/run fast $(T)

check-fast-stop:
	@bash test/run stop

coverage:
	@bash test/run coverage $(T)

# with make clean
forget-fast:
	@bash test/run forget

demo:
	@KEEP='$(KEEP)' bash test/demo/run

demo-stop:
	@bash test/demo/stop

examples:
	@LANGS='$(LANGS)' SCENARIOS='$(SCENARIOS)' bash test/examples/run

drivers:
	@DRIVERS='$(DRIVERS)' bash test/drivers/run

bench:
	@bash test/bench/run $(BENCH)

soak:
	@bash test/soak/run

ha:
	@bash test/ha/run

report-picture:
	@bash test/report/run

model:
	@bash test/model/run

# The value of a variable, for test/run.
list-%:
	@echo $($*)

CLANG_FORMAT ?= clang-format
C_FILES = $(filter-out src/declared.h,$(wildcard src/*.[ch] src/*/*.[ch] src/*/*/*.[ch]))
SHELL_SCRIPTS = .ci/run $(wildcard examples/*/start test/run test/setup test/*.sh test/*/run test/*/stop test/*/*.sh)

format:
	$(CLANG_FORMAT) -i $(C_FILES)

format-check:
	$(CLANG_FORMAT) --dry-run -Werror $(C_FILES)
	@awk -f test/long_lines.awk $(C_FILES)

shellcheck:
	shellcheck -x $(SHELL_SCRIPTS)

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs 2>/dev/null)

ifneq ($(wildcard $(PGXS)),)

# A server built with LLVM wants bitcode from clang.  That is for inlining by
# JIT only, so do without it where there is no clang.
CLANG_OF_SERVER := $(shell sed -n 's/^CLANG *= *//p' $(dir $(PGXS))../Makefile.global)
ifeq ($(shell command -v "$(CLANG_OF_SERVER)" 2>/dev/null),)
override with_llvm = no
endif

include $(PGXS)

# The Makefile is a prerequisite because it has the order of the parts.
$(DATA_built): $(addprefix $(srcdir)/,$(SQL_PARTS) Makefile)
	cat $(addprefix $(srcdir)/,$(SQL_PARTS)) >$@

# PGXS builds one program per Makefile.
define PROGRAM_GOAL
.PHONY: $(1)-$(2)
$(1): $(1)-$(2)
$(1)-$(2):
	@$$(MKDIR_P) src/bin/$(2)
	$$(MAKE) -C src/bin/$(2) $(if $(VPATH),-f $(abspath $(srcdir))/src/bin/$(2)/Makefile VPATH=$(abspath $(srcdir))/src/bin/$(2)) \
		PG_CONFIG='$(PG_CONFIG)' $(1)
endef
$(foreach goal,all install uninstall clean,$(foreach program,$(PROGRAMS),$(eval $(call PROGRAM_GOAL,$(goal),$(program)))))
$(foreach program,$(PROGRAMS),$(eval install-$(program): all-$(program)))

clean: forget-fast

# initdb says it only in its log
installcheck: not-as-root
.PHONY: not-as-root
not-as-root:
	@if [ "$$(id -u)" = 0 ]; then \
		echo 'PostgreSQL refuses to run as root: run "make installcheck" as another user with' >&2; \
		echo 'write permission here, or "make test".' >&2; exit 1; fi

# for a build outside of the source tree
.PHONY: object-folders
object-folders:
	@$(MKDIR_P) $(sort $(dir $(OBJS)))
$(OBJS) src/declared.new: | object-folders

# What the C code must know of the SQL declarations.  The header keeps its time if nothing in
# it changes, so that an edit of a view or a comment compiles no C file.
$(OBJS): | src/declared.h
src/declared.h: src/declared.new
	@cmp -s $< $@ || cp $< $@
src/declared.new: $(addprefix $(srcdir)/,src/sql/declare.awk $(SQL_PARTS) Makefile)
	awk -f $(srcdir)/src/sql/declare.awk $(addprefix $(srcdir)/,$(SQL_PARTS)) >$@

# The compiler writes down which headers a file includes.  Where it has not yet, and for bitcode,
# any header may be one of them.
HEADERS = src/declared.h $(filter-out $(srcdir)/src/bin/%,$(wildcard $(srcdir)/src/*.h $(srcdir)/src/*/*.h $(srcdir)/src/*/*/*.h))
DEPENDENCIES = $(wildcard $(OBJS:.o=.d))
$(filter-out $(DEPENDENCIES:.d=.o),$(OBJS)) $(OBJS:.o=.bc): $(HEADERS)
include $(DEPENDENCIES)

else

.PHONY: install uninstall installcheck clean
all install uninstall installcheck clean:
	@echo 'No PostgreSQL development files found by "$(PG_CONFIG)".' >&2
	@echo 'Install them (Debian: postgresql-server-dev-NN) or pass PG_CONFIG=/path/to/pg_config.' >&2
	@echo '"make test" and "make demo" install what they need.' >&2
	@exit 1

endif
