"""A load on two databases that share the slots, for 116_shard_move.pl.

python3 move_load.py SEED CLIENTS KEYS DSN DSN: until it reads a line.  Each client is a
thread with a connection to each database.  It sends a call to the database that it believes
to have the slot, and to the other one after ID006.  So the clients are the router, and their
map is always a little old.

Everything that ran is a row of table ran, written in the transaction that idem protects.  The
rows stay in the database in which they were written.  Standard output: what was acknowledged,
one line each: `key NAME`, `lease NAME TOKEN`, `job NUMBER`, and at the end `refused COUNT`.
"""

import random
import sys
import threading
import time

import psycopg2

SEED, CLIENTS, KEYS = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
DSNS = sys.argv[4:6]
# lock_timeout while the map changes, a deadlock with it, a lost connection
AGAIN = {'55P03', '40P01', None}

stop = threading.Event()
output = threading.Lock()


class Client(threading.Thread):
    def __init__(self, number):
        super().__init__()
        self.random = random.Random('%d/%d' % (SEED, number))
        self.name = 'client %d' % number
        self.connections = [None, None]
        self.guess = 0
        self.refused = 0
        self.unexpected = []

    def tell(self, *words):
        with output:
            print(*words, flush=True)

    def cursor(self, side):
        if self.connections[side] is None or self.connections[side].closed:
            self.connections[side] = psycopg2.connect(DSNS[side], application_name='load')
        return self.connections[side].cursor()

    def forget(self, side):
        connection = self.connections[side]
        try:
            connection.rollback()
        except psycopg2.Error:
            connection.close()

    def routed(self, work):
        """Do the work in the database that accepts it; True if it was acknowledged."""
        for _ in range(20000):
            side = self.guess
            try:
                work(self.cursor(side))
                self.connections[side].commit()
                return True
            except psycopg2.Error as e:
                if self.connections[side] is not None:
                    self.forget(side)
                if e.pgcode == 'ID006':
                    self.refused += 1
                    self.guess = 1 - side
                elif e.pgcode == 'ID003' or e.pgcode == 'ID004':
                    return False
                elif e.pgcode not in AGAIN and not e.pgcode.startswith(('57P', '08')):
                    self.unexpected.append('%s %s' % (e.pgcode, str(e).split('\n')[0]))
                    return False
            time.sleep(self.random.random() / 200)
        self.unexpected.append('refused by both for too long')
        return False

    def key(self):
        name = 'k%d' % self.random.randrange(KEYS)

        def work(cursor):
            cursor.execute("SELECT status FROM idem_claim(%s)", (name,))
            if cursor.fetchone()[0] == 'claimed':
                cursor.execute("INSERT INTO ran (kind, name) VALUES ('key', %s)", (name,))
                cursor.execute("INSERT INTO orders (order_key, note) VALUES (%s, 'new')", (name,))
                cursor.execute("SELECT idem_finish(%s, '1')", (name,))
        if self.routed(work):
            self.tell('key', name)

    def lease(self):
        name = 'l%d' % self.random.randrange(KEYS)
        got = []

        def take(cursor):
            got.clear()
            cursor.execute("SELECT status, token FROM idem_lease(%s, '1 min', worker => %s)", (name, self.name))
            got.extend(cursor.fetchone())

        def finish(cursor):
            cursor.execute("SELECT idem_fence(%s, %s)", (name, got[1]))
            cursor.execute("INSERT INTO ran (kind, name) VALUES ('lease', %s)", (name,))
            cursor.execute("SELECT idem_finish(%s, '2', token => %s)", (name, got[1]))
        if self.routed(take) and got[0] in ('claimed', 'resumed') and self.routed(finish):
            self.tell('lease', name, got[1])

    def enqueue(self):
        name = 'j%d' % self.random.randrange(KEYS)
        got = []

        def work(cursor):
            got.clear()
            cursor.execute("SELECT job_id FROM idem_enqueue('load', key => %s)", (name,))
            got.extend(cursor.fetchone())
        if self.routed(work):
            self.tell('job', got[0])

    def run(self):
        while not stop.is_set():
            self.random.choice((self.key, self.lease, self.enqueue, self.job, self.job))()

    def job(self, side=None):
        """Fetch from one database; the job may have moved when it is completed."""
        side = self.random.randrange(2) if side is None else side
        try:
            cursor = self.cursor(side)
            cursor.execute("SELECT job_id, token FROM idem_fetch('load', batch => 3, lease => '1 min')")
            jobs = cursor.fetchall()
            self.connections[side].commit()
        except psycopg2.Error:
            if self.connections[side] is not None:
                self.forget(side)
            return True
        for job_id, token in jobs:
            def complete(cursor):
                cursor.execute("INSERT INTO ran (kind, name) VALUES ('job', %s)", (str(job_id),))
                cursor.execute("SELECT idem_complete(%s, %s)", (job_id, token))
            self.routed(complete)
        return bool(jobs)


clients = [Client(i) for i in range(CLIENTS)]
for client in clients:
    client.start()
sys.stdin.readline()
stop.set()
for client in clients:
    client.join()
# what is left; leases that a lost connection has left do not run out here
for side in (0, 1):
    while clients[0].job(side):
        pass
for client in clients:
    for text in client.unexpected:
        print('unexpected', text)
print('refused', sum(client.refused for client in clients))
