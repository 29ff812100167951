"""A load on a router with PL/Proxy, for 117_plproxy.pl.

python3 router_load.py SEED CLIENTS KEYS DSN: until SIGTERM, or the end of the process that has
started it.  Each client is a thread with a connection to the router.  It repeats a call that was
refused (ID006: the slot is moving) or that has lost its connection, as an application does: with
the same key.

Handlers write what ran into shop.ledger of their shard.  Standard output: what was acknowledged,
one line each: `call KEY`, `lease KEY TOKEN`, `job NUMBER` (enqueued), `done NUMBER`; `lost` for each
lost connection; at the end `unexpected TEXT` and `refused COUNT`.
"""

import os
import random
import signal
import sys
import threading
import time

import psycopg2

SEED, CLIENTS, KEYS = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
DSN = sys.argv[4]
# a slot that moves, a map that changes, a shard that restarts
REPEAT = {'ID006', '55P03', '40P01', '08001', '08006', '57P03'}
GIVE_UP = 60

stop = threading.Event()
output = threading.Lock()


class Client(threading.Thread):
    def __init__(self, number):
        super().__init__()
        self.random = random.Random('%d/%d' % (SEED, number))
        self.worker = 'worker %d' % number
        self.refused = 0
        self.unexpected = []
        self.connection = psycopg2.connect(DSN, application_name='load')
        self.connection.autocommit = True

    def tell(self, *words):
        with output:
            print(*words, flush=True)

    def once(self, sql, params):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall()

    def repeat(self, sql, params):
        """The rows, or None if the work was another's."""
        until = time.monotonic() + GIVE_UP
        while time.monotonic() < until:
            try:
                return self.once(sql, params)
            except psycopg2.Error as e:
                if e.pgcode in ('ID003', 'ID004'):
                    return None
                if e.pgcode not in REPEAT:
                    self.unexpected.append('%s %s' % (e.pgcode, str(e).replace('\n', ' ')))
                    return None
                self.refused += e.pgcode == 'ID006'
                if e.pgcode in ('08001', '08006'):
                    self.tell('lost')
            time.sleep(self.random.random() / 100)
        self.unexpected.append('refused for too long: ' + sql)
        return None

    def charge(self, key):
        return self.repeat("SELECT status FROM idem_router.idem_call(%s, 'shop.charge', jsonb_build_object('key', %s))",
                           (key, key))

    def call(self):
        key = 'call %d' % self.random.randrange(KEYS)
        if self.charge(key) == [('finished',)]:
            self.tell('call', key)

    def lease(self):
        key = 'lease %d' % self.random.randrange(KEYS)
        got = self.repeat("SELECT token FROM idem_router.idem_lease(%s, '5 s', worker => %s)", (key, self.worker))
        if got and got[0][0] is not None and self.repeat(
                'SELECT idem_router.idem_finish(%s, to_jsonb(%s::bigint), %s)', (key, got[0][0], got[0][0])):
            self.tell('lease', key, got[0][0])

    def enqueue(self):
        got = self.repeat("SELECT job_id FROM idem_router.idem_enqueue('load', key => %s)",
                          ('job %d' % self.random.randrange(KEYS),))
        if got:
            self.tell('job', got[0][0])

    def work(self):
        """Fetches a few jobs; returns whether there were any."""
        try:
            jobs = self.once("SELECT job_id, token FROM idem_router.idem_fetch('load', 3, '1 min', %s)", (self.worker,))
        except psycopg2.Error as e:
            if e.pgcode not in REPEAT:
                self.unexpected.append('%s %s' % (e.pgcode, str(e).replace('\n', ' ')))
            return True
        for job_id, token in jobs:
            self.charge('done %d' % job_id)
            if self.repeat('SELECT idem_router.idem_complete(%s, %s)', (job_id, token)):
                self.tell('done', job_id)
        return bool(jobs)

    def run(self):
        while not stop.is_set():
            self.random.choice((self.call, self.call, self.lease, self.enqueue, self.work))()


parent = os.getppid()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
clients = [Client(n) for n in range(CLIENTS)]
for client in clients:
    client.start()
while not stop.wait(1) and os.getppid() == parent:
    pass
stop.set()
for client in clients:
    client.join()
for client in clients:
    for text in client.unexpected:
        print('unexpected', text)
print('refused', sum(client.refused for client in clients))
