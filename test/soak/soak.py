"""The soak test: a randomized load with a ledger, then the checks.

	soak.py [--seed N] [--seconds N | --actions N] [--clients N] --log DIR

The environment (PGHOST and so on) says where the server is.  It has to be one of its
own: its processes are killed.  The last line is `N passed, M failed`, one for each rule.
"""

import argparse
import collections
import contextlib
import mmap
import os
import random
import signal
import struct
import sys
import time

import psycopg2

import check
import ledger
from client import Client, end_prepared

DSN = ''
TABLES = ('jobs', 'job_keys', 'job_log', 'keys', 'queues')


class Counts:
    """Actions done by each client, in memory that survives them."""

    def __init__(self, slots):
        self.memory = mmap.mmap(-1, 8 * slots)

    def get(self, slot):
        return struct.unpack_from('q', self.memory, 8 * slot)[0]

    def add(self, slot):
        struct.pack_into('q', self.memory, 8 * slot, self.get(slot) + 1)


class Soak:
    def __init__(self, options):
        self.options = options
        self.counts = Counts(options.clients + 1)
        self.pids = {}          # slot -> process
        self.generation = collections.Counter()
        self.happened = collections.Counter()
        self.connection = None
        self.stopping = mmap.mmap(-1, 1)

    # -- processes --------------------------------------------------------------

    def start(self, slot, body):
        generation = self.generation[slot]
        self.generation[slot] += 1
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            self.pids[slot] = pid
            return
        try:
            name = os.path.join(self.options.log, 'client-%d.log' % slot)
            log = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            body(slot, generation, log)
            os._exit(0)
        except BaseException as e:      # whatever it is, the parent goes on
            os.write(log, ('unexpected python %r\n' % e).encode())
            os._exit(1)

    def client(self, slot, generation, log):
        share = None
        if self.options.actions:
            share = self.options.actions // self.options.clients
        client = Client(DSN, self.options.seed, slot, generation, log)
        while not self.stopping[0] and (share is None or self.counts.get(slot) < share):
            client.act()
            self.counts.add(slot)

    def drainer(self, slot, generation, log):
        client = Client(DSN, self.options.seed, slot, generation, log, drain=True)
        while not self.stopping[0]:
            client.act()

    def maintainer(self, slot, generation, log):
        """DDL beside the load."""
        client = Client(DSN, self.options.seed, slot, generation, log)
        while not self.stopping[0]:
            if client.connection is None or client.connection.closed:
                client.connect()
            try:
                self.maintain(client)
            except psycopg2.OperationalError as e:
                if e.pgcode not in ('55P03', '40P01'):
                    client.lost('maintain', e)
            except psycopg2.Error as e:
                client.tell('maintainer', e.pgcode, str(e).replace('\n', ' '))
            time.sleep(client.random.uniform(0.05, 0.5))

    def maintain(self, client):
        table = 'idem.' + client.random.choice(TABLES)
        what = client.random.choice(('reindex', 'reindex', 'full', 'cluster', 'vacuum', 'tidy'))
        client.sql("SET lock_timeout = '1 s'")
        # what a REINDEX CONCURRENTLY leaves that was ended in the middle
        for (index,) in client.sql(
                'SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid'
                ' AND indrelid IN (SELECT unnest(ARRAY[oid, reltoastrelid]) FROM pg_class'
                ' WHERE oid = ANY (%s::regclass[]))', (['idem.' + t for t in TABLES],)):
            client.sql('DROP INDEX ' + index)
        if what == 'reindex':
            client.sql('REINDEX TABLE CONCURRENTLY ' + table)
        elif what == 'full':
            client.sql('VACUUM FULL ' + table)
        elif what == 'cluster':
            client.sql('CLUSTER %s USING %s_pkey' % (table, table[5:]))
        elif what == 'vacuum':
            client.sql('VACUUM ' + table)
        client.tell('did', what)

    @staticmethod
    def end_orphans(cursor, age):
        cursor.execute("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE 'soak %%'"
                       ' AND prepared < clock_timestamp() - %s::interval', (age,))
        for (gid,) in cursor.fetchall():
            end_prepared(cursor, gid)

    def reap(self):
        """Clients that have ended; those that were killed or failed start anew."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = next((s for s, p in self.pids.items() if p == pid), None)
            if slot is None:
                continue
            del self.pids[slot]
            if status != 0 and not self.stopping[0]:
                self.start(slot, self.maintainer if slot == 0 else self.client)

    def stop(self):
        self.stopping[0] = 1
        deadline = time.time() + 30
        while self.pids and time.time() < deadline:
            self.reap()
            time.sleep(0.02)
        self.kill()

    def kill(self):
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids.clear()

    # -- misfortune -------------------------------------------------------------

    def plan(self):
        """When what happens, as parts of the whole."""
        draw = random.Random('%s/plan' % self.options.seed)
        number = {'kill client': self.options.kills, 'terminate': self.options.kills,
                  'kill backend': self.options.crashes}
        return sorted((draw.uniform(0.05, 0.95), what) for what in number
                      for _ in range(number[what]))

    def strike(self, what, draw):
        if what == 'kill client':
            slots = [slot for slot in self.pids if slot != 0]
            if slots:
                os.kill(self.pids[draw.choice(slots)], signal.SIGKILL)
        else:
            try:
                with contextlib.closing(self.admin()) as connection, connection.cursor() as cursor:
                    cursor.execute("SELECT pid FROM pg_stat_activity"
                                   " WHERE application_name LIKE 'soak %' AND pid <> pg_backend_pid()"
                                   ' ORDER BY pid')
                    pids = [pid for (pid,) in cursor.fetchall()]
                    if not pids:
                        return
                    if what == 'terminate':
                        cursor.execute('SELECT pg_terminate_backend(%s)', (draw.choice(pids),))
                    else:
                        os.kill(draw.choice(pids), signal.SIGKILL)
            except (psycopg2.Error, ProcessLookupError):
                return
        self.happened[what] += 1

    def admin(self):
        """A connection; the server may be starting after a crash."""
        deadline = time.time() + 60
        while True:
            try:
                connection = psycopg2.connect(DSN, application_name='soak_admin')
                connection.autocommit = True
                return connection
            except psycopg2.Error:
                if time.time() > deadline:
                    raise
                time.sleep(0.05)

    # -- the whole --------------------------------------------------------------

    def progress(self, begin):
        if self.options.actions:
            share = self.options.actions // self.options.clients
            done = sum(self.counts.get(slot) for slot in range(1, self.options.clients + 1))
            return done / (share * self.options.clients)
        return (time.time() - begin) / self.options.seconds

    def tidy(self):
        """Ends prepared transactions, whose clients may be dead or wait for them."""
        try:
            if self.connection is None:
                self.connection = psycopg2.connect(DSN, application_name='soak_admin')
                self.connection.autocommit = True
            with self.connection.cursor() as cursor:
                self.end_orphans(cursor, '300 ms')
        except psycopg2.Error:
            self.connection = None

    def load(self):
        draw = random.Random('%s/strike' % self.options.seed)
        plan = self.plan()
        begin = time.time()
        self.start(0, self.maintainer)
        for slot in range(1, self.options.clients + 1):
            self.start(slot, self.client)
        deadline = begin + (600 if self.options.actions else 2 * self.options.seconds)
        while (progress := self.progress(begin)) < 1:
            if time.time() > deadline:
                raise TimeoutError('the clients do not come to an end')
            while plan and plan[0][0] <= progress:
                self.strike(plan.pop(0)[1], draw)
            self.reap()
            self.tidy()
            time.sleep(0.03)
        self.stop()

    def drain(self):
        """Workers that do not fail, until there is no job left; true if that is so."""
        with contextlib.closing(self.admin()) as connection, connection.cursor() as cursor:
            self.end_orphans(cursor, '0')
            cursor.execute('SELECT idem_resume(queue) FROM idem.queues')
        self.stopping[0] = 0
        for slot in range(1, 4):
            self.start(slot, self.drainer)
        deadline = time.time() + 60
        left = 1
        while left and time.time() < deadline:
            time.sleep(0.1)
            with contextlib.closing(self.admin()) as connection, connection.cursor() as cursor:
                cursor.execute('SELECT count(*) FROM idem.jobs')
                left = cursor.fetchone()[0]
        self.stop()

    def run(self):
        with contextlib.closing(self.admin()) as connection, connection.cursor() as cursor:
            ledger.install(cursor)
        try:
            self.load()
            self.drain()
        finally:
            self.kill()
        print('misfortune: ' + ', '.join('%s %d' % item for item in sorted(self.happened.items())))
        print('actions: %d' % sum(self.counts.get(s) for s in range(self.options.clients + 1)))
        with contextlib.closing(self.admin()) as connection:
            return check.check(connection, self.options.log)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--actions', type=int, help='a number of actions instead of a time')
    parser.add_argument('--clients', type=int, default=10)
    parser.add_argument('--kills', type=int, help='clients that are killed, and connections ended')
    parser.add_argument('--crashes', type=int, help='server processes that are killed')
    parser.add_argument('--log', required=True)
    options = parser.parse_args()
    if options.kills is None:
        options.kills = int(options.seconds)
    if options.crashes is None:
        options.crashes = max(1, int(options.seconds / 15))
    print('seed %d, %s, %d clients' % (
        options.seed, '%d actions' % options.actions if options.actions
        else '%g s' % options.seconds, options.clients))
    sys.exit(0 if Soak(options).run() else 1)


if __name__ == '__main__':
    main()
