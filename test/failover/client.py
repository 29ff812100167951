"""A client of the failover test: works on keys and jobs, and writes down what was acknowledged.

	client.py ROLE NUMBER CONNSTR LOG STOP

Roles: keys (idem_claim and idem_call), leases, producer, worker, leased_worker.  CONNSTR names
several servers and has target_session_attrs=read-write.  A client that loses its connection
connects again and repeats what it was doing, with the same key, as an application has to.  It ends
when the file STOP exists.

A line of LOG is written after the commit was acknowledged: words, separated by tabs.

	what kind key at token from until

what:	run	the work was done, by the transaction at
		seen	the server said that transaction at has done the work before
		grant	the lease of a key or a job, with its token
		enqueue	a job was enqueued, or a job that waits has absorbed it
		refused	the server refused a token (ID002, ID003 or ID004 in the place of at)
at:		timeline and transaction id; kind: what the table of that row has
from, until: the client sent its first statement and got the acknowledgement, in seconds
Other lines: lost (a connection), unexpected (an error that no application should see).
"""

import os
import random
import sys
import time

import psycopg2

STALE = {'ID002', 'ID003', 'ID004'}
QUEUE_OF_CHANGES = 'stream'
PAUSE = 0.005
THINK = 0.002


class Client:
    def __init__(self, role, number, dsn, log, stop):
        self.act = getattr(self, role)
        self.name = '%s %s' % (role, number)
        self.dsn = dsn
        self.stop = stop
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.random = random.Random(self.name)
        self.connection = None
        self.n = 0
        self.last = []          # keys whose work this client knows to be done
        self.again = []         # those to ask about once more, after a lost connection
        self.since = 0

    # -- plumbing ---------------------------------------------------------------

    def tell(self, *words):
        os.write(self.log, ('\t'.join(map(str, words)) + '\n').encode())

    def ack(self, what, kind, key, at, token=0):
        """To be called only when the server has confirmed the commit."""
        self.tell(what, kind, key, at, token or 0, '%.6f' % self.since, '%.6f' % time.monotonic())

    def is_stopped(self):
        return os.path.exists(self.stop)

    def connect(self):
        self.connection = psycopg2.connect(self.dsn, application_name=self.name)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()

    def sql(self, text, *params):
        self.cursor.execute(text, params)
        return self.cursor.fetchone() if self.cursor.description else None

    def begin(self):
        self.sql('BEGIN')

    def commit(self):
        self.sql('COMMIT')
        if self.cursor.statusmessage != 'COMMIT':
            raise RuntimeError('COMMIT gave ' + self.cursor.statusmessage)

    def rollback(self):
        try:
            self.sql('ROLLBACK')
        except psycopg2.Error:
            self.lose()

    def until_done(self, work, *args):
        """Do work, and after a lost connection again, until there is an answer."""
        while not self.is_stopped():
            try:
                if self.connection is None:
                    self.connect()
                self.since = time.monotonic()
                return work(*args)
            except psycopg2.Error as e:
                if e.pgcode in STALE:
                    self.tell('refused', self.name, '-', e.pgcode)
                    self.rollback()
                    return None
                if e.pgcode and not e.pgcode.startswith(('57P', '08')):
                    self.tell('unexpected', self.name, e.pgcode, str(e).replace('\n', ' '))
                    sys.exit(1)
                self.lose()
                time.sleep(PAUSE)           # there may be no server yet
        return None

    def lose(self):
        if self.connection is None:
            return
        self.tell('lost', self.name)
        try:
            self.connection.close()
        except psycopg2.Error:
            pass
        self.connection = None
        self.again = list(self.last)

    def remember(self, *key):
        self.last = self.last[-9:] + [key]

    def next_key(self):
        """Mostly a key that other clients of this role use about now, too."""
        if self.again:
            return self.again.pop()
        self.n += 1
        return self.random.choice(self.kinds), str(max(1, self.n + self.random.randint(-10, 10)))

    def run(self):
        while not self.is_stopped():
            self.act()
            time.sleep(THINK)

    # -- keys ---------------------------------------------------------------

    kinds = ('claim', 'call')

    def keys(self):
        kind, key = self.next_key()
        self.until_done(getattr(self, kind), key)
        self.remember(kind, key)

    def claim(self, key):
        name = 'claim ' + key
        self.begin()
        claimed, result = self.sql('SELECT claimed, result FROM idem_claim(%s, to_jsonb(%s::text))', name, name)
        if claimed:
            result, = self.sql("SELECT effect('claim', %s)", key)
            self.sql('SELECT idem_finish(%s, to_jsonb(%s::text))', name, result)
        self.commit()
        self.ack('run' if claimed else 'seen', 'claim', key, result)

    def call(self, key):
        result, replayed = self.sql(
            "SELECT result, replayed FROM idem_call(%s, 'handler', jsonb_build_object('key', %s::text))",
            'call ' + key, key)
        self.ack('seen' if replayed else 'run', 'call', key, result)

    # -- leases ---------------------------------------------------------------

    def leases(self):
        self.kinds = ('lease',)
        key = self.next_key()[1]
        token = self.until_done(self.lease, key)
        if token and self.random.random() < 0.7:
            if self.random.random() < 0.3:
                self.until_done(self.renew, key, token)
            self.until_done(self.finish, key, token)
        self.remember('lease', key)

    def lease(self, key):
        name = 'lease ' + key
        self.begin()
        claimed, status, token, result = self.sql(
            "SELECT claimed, status, token, result FROM idem_lease(%s, '200 ms')", name)
        if claimed:
            at, = self.sql("INSERT INTO grants SELECT 'lease', %s, here(), %s RETURNING at", key, token)
        self.commit()
        if claimed:
            self.ack('grant', 'lease', key, at, token)
            return token
        if status == 'finished':
            self.ack('seen', 'lease', key, result)
        return None

    def renew(self, key, token):
        self.sql("SELECT idem_renew(%s, %s, '1 s')", 'lease ' + key, token)

    def finish(self, key, token):
        name = 'lease ' + key
        self.begin()
        self.sql('SELECT idem_fence(%s, %s)', name, token)
        at, = self.sql("SELECT effect('lease', %s, %s)", key, token)
        self.sql('SELECT idem_finish(%s, to_jsonb(%s::text), token => %s)', name, at, token)
        self.commit()
        self.ack('run', 'lease', key, at, token)

    # -- jobs ---------------------------------------------------------------

    def producer(self):
        self.kinds = ('once', QUEUE_OF_CHANGES)
        kind, key = self.next_key()
        if kind == 'once':
            self.until_done(self.enqueue_once, key)
            self.remember(kind, key)
        else:
            self.until_done(self.enqueue_change, str(self.random.randint(1, 20)))
        # If the queue kept growing, the workers would need long to empty it at the end.
        while not self.is_stopped() and self.until_done(self.is_full):
            time.sleep(PAUSE)

    def is_full(self):
        return self.sql("SELECT count(*) > 50 FROM idem.jobs")[0]

    def enqueue_once(self, key):
        """An order: a second enqueue of its key must have no effect, for a day."""
        self.begin()
        outcome, result = self.sql("SELECT outcome, result FROM idem_enqueue('once', key => %s)", key)
        at, = self.sql("INSERT INTO enqueues SELECT 'once', %s, here() RETURNING at", key)
        self.commit()
        self.ack('enqueue', 'once', key, at)
        if outcome == 'done':
            self.ack('seen', 'once', key, result)

    def enqueue_change(self, key):
        """A change that the next job of its key has to see; jobs that wait absorb others."""
        self.begin()
        at, = self.sql('INSERT INTO changes SELECT %s, here(), NULL RETURNING at', key)
        self.sql('SELECT idem_enqueue(%s, key => %s)', QUEUE_OF_CHANGES, key)
        self.commit()
        self.ack('enqueue', QUEUE_OF_CHANGES, key, at)

    def work(self, queue, job, token, key):
        at, = self.sql('SELECT here()')
        # first the job: another worker that has it has it locked, and waits for the key next
        self.sql('SELECT idem_complete(%s, %s, to_jsonb(%s::text))', job, token, at)
        if queue == QUEUE_OF_CHANGES:
            # two jobs of a key may run at the same time, and must not meet in the rows
            self.sql('SELECT pg_advisory_xact_lock(%s)', int(key))
            self.sql('UPDATE changes SET job_id = %s WHERE key = %s AND job_id IS NULL', job, key)
            key = '%s, job %s' % (key, job)
        self.sql('SELECT effect(%s, %s, %s)', queue, key, token)
        self.commit()
        self.ack('run', queue, key, at, token)

    def worker(self):
        queue = self.random.choice(('once', QUEUE_OF_CHANGES))
        if not self.until_done(self.fetch_and_work, queue):
            time.sleep(PAUSE)

    def fetch_and_work(self, queue):
        self.begin()
        job = self.sql('SELECT job_id, token, key FROM idem_fetch(%s, 1)', queue)
        if job:
            self.work(queue, *job)
        else:
            self.commit()
        return job

    def leased_worker(self):
        queue = self.random.choice(('once', QUEUE_OF_CHANGES))
        job = self.until_done(self.fetch, queue)
        if job is None:
            time.sleep(PAUSE)
        elif self.random.random() < 0.9:
            self.until_done(self.complete, queue, *job)

    def fetch(self, queue):
        self.begin()
        job = self.sql("SELECT job_id, token, key FROM idem_fetch(%s, 1, '200 ms')", queue)
        if job:
            at, = self.sql("INSERT INTO grants SELECT 'job', %s, here(), %s RETURNING at", *job[:2])
        self.commit()
        if job:
            self.ack('grant', 'job', job[0], at, job[1])
        return job

    def complete(self, queue, job, token, key):
        self.begin()
        self.work(queue, job, token, key)


Client(*sys.argv[1:]).run()
