# What the Makefiles of the programs share.  PGXS builds one PROGRAM per Makefile.

PG_CPPFLAGS = -I$(srcdir) -I$(srcdir)/.. -I$(libpq_srcdir) -DIDEM_VERSION='"$(IDEM_VERSION)"'
PG_LIBS = $(libpq)
IDEM_VERSION = $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" $(srcdir)/../../../idem.control)

ifdef WERROR
PG_CFLAGS += -Wall -Wextra -Werror -Wno-unused-parameter
endif

# PGXS links programs with all libraries of the server, and with libpgcommon and libpgport.  The
# files that this needs are in packages that nobody has to install for an extension.
override LIBS =

# no bitcode of a program
override with_llvm = no

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# Each program has an object of its own: two makes may run at the same time.
common.o: $(srcdir)/../common.c
	$(CC) $(CFLAGS) $(CPPFLAGS) -c -o $@ $<

$(OBJS): $(wildcard $(srcdir)/*.h $(srcdir)/../*.h) $(srcdir)/../../../idem.control
