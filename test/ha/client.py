"""The load: clients that claim, call, lease, enqueue, and workers.

A client finds the primary in one of two ways: it asks the REST API of Patroni, or it lets libpq
try all servers (target_session_attrs=read-write).  After an error it connects again and repeats
the operation with the same key.
"""

import collections
import os
import random
import struct
import threading
import time
import traceback

import psycopg2

from cluster import NODES
from ledger import Event

SCHEMA = """
CREATE EXTENSION idem;
CREATE SCHEMA ha;
-- no constraint forbids a second row: that is the job of idem
CREATE TABLE ha.ops (op text NOT NULL, run text NOT NULL, key text);
CREATE TABLE ha.fenced (key text NOT NULL, token bigint NOT NULL, run text NOT NULL);
CREATE TABLE ha.want (enq text NOT NULL, job_id bigint NOT NULL, key text, outcome text NOT NULL,
                      xid xid8 NOT NULL DEFAULT pg_current_xact_id());
CREATE TABLE ha.runs (job_id bigint NOT NULL, token bigint NOT NULL, attempt int NOT NULL, run text NOT NULL,
                      enq text NOT NULL, key text, done boolean NOT NULL,
                      snap pg_snapshot NOT NULL DEFAULT pg_current_snapshot());
CREATE FUNCTION ha.handler(p jsonb) RETURNS jsonb LANGUAGE sql AS $$
INSERT INTO ha.ops (op, run, key) VALUES (p ->> 'op', gen_random_uuid(), p ->> 'op')
RETURNING jsonb_build_object('run', run)
$$;
CREATE TABLE ha.ticks (key text NOT NULL, job_id bigint NOT NULL, run text NOT NULL);
SELECT idem_queue_set('ha', max_attempts => 1000000, backoff => '100 ms', backoff_max => '100 ms');
SELECT idem_queue_set('ticks', max_attempts => 1000000);
CREATE TABLE ha.first_tick AS SELECT idem_schedule('tick', 'ticks', every => '1 s', missed => 'all') AS tick;
"""

LSN = 'SELECT pg_current_wal_insert_lsn() - %s' % "'0/0'"
SHARED = 8              # keys whose leases are taken again and again
LOSE = 0.01             # of all transactions lose the answer to COMMIT
RECENT = 300            # operations of which duplicates come


class Stopped(Exception):
    """The load ends, or this operation is given up."""


class Load:
    def __init__(self, cluster, ledger, seed, clients, workers, pace, mistake):
        self.cluster = cluster
        self.ledger = ledger
        self.pace = pace
        self.mistake = mistake
        self.stopped = False
        self.lock = threading.Lock()
        self.counter = 0
        self.recent = collections.deque(maxlen=RECENT)
        self.again = collections.deque()    # operations that come again at once
        self.tokens = collections.defaultdict(list)
        self.failures = []
        self.gates = {'client': threading.Event(), 'worker': threading.Event()}
        rng = random.Random(seed)
        self.threads = [Client(self, 'client', i, rng.random()) for i in range(clients)]
        self.threads += [Client(self, 'worker', i, rng.random()) for i in range(workers)]
        for thread in self.threads:
            thread.start()

    def number(self):
        with self.lock:
            self.counter += 1
            return self.counter

    def pause(self, kind, seconds=60):
        """Let the clients finish what they are doing; False if one of them does not."""
        self.gates[kind].clear()
        end = time.monotonic() + seconds
        while not all(thread.waiting for thread in self.threads if thread.kind == kind):
            if time.monotonic() > end or self.failures:
                return False
            time.sleep(0.02)
        return True

    def resume(self):
        for gate in self.gates.values():
            gate.set()

    def redeliver(self, since):
        """What was acknowledged lately comes again, as webhooks and messages do."""
        with self.ledger.lock:
            late = [event for event in self.ledger.events[-3000:]
                    if event.outcome == 'acked' and event.op and event.t1 >= since]
        self.again.extend({('lease' if event.what == 'take' else event.what, event.op): None for event in late})

    def stop(self):
        self.stopped = True
        self.resume()
        for thread in self.threads:
            thread.drop()
            thread.join(20)


class Client(threading.Thread):
    def __init__(self, load, kind, number, seed):
        super().__init__(daemon=True)
        self.load = load
        self.kind = kind
        self.who = '%s%d' % (kind[0], number)
        self.asks_patroni = number % 2 == 0
        self.random = random.Random(seed)
        self.connection = None
        self.port = self.tl = None
        self.waiting = False

    def run(self):
        try:
            while True:
                self.gate()
                self.worker() if self.kind == 'worker' else self.client()
        except Stopped:
            pass
        except Exception:
            self.load.failures.append('%s: %s' % (self.who, traceback.format_exc()))
        finally:
            self.waiting = True
            self.drop()

    def gate(self):
        gate = self.load.gates[self.kind]
        if not gate.is_set():
            self.waiting = True
            gate.wait()
            self.waiting = False
        if self.load.stopped:
            raise Stopped

    def pause(self, seconds):
        time.sleep(seconds)

    # -- connections ------------------------------------------------------------

    def drop(self):
        connection, self.connection = self.connection, None
        if connection:
            try:
                connection.close()
            except psycopg2.Error:
                pass

    def target(self):
        cluster = self.load.cluster
        nodes = self.random.sample(NODES, len(NODES))
        if self.asks_patroni:
            node = next((one for one in nodes if cluster.is_leader(one, timeout=0.3)), None)
            if node is None:
                return None
            nodes = [node]
        return {'host': ','.join(['127.0.0.1'] * len(nodes)),
                'port': ','.join(str(cluster.pg_port[node]) for node in nodes)}

    def connect(self):
        while self.connection is None:
            self.gate()
            connection = None
            try:
                target = self.target()
                if target:
                    connection = psycopg2.connect(
                        user='postgres', password=self.load.cluster.password, dbname='postgres',
                        target_session_attrs='read-write', connect_timeout=2, application_name=self.who,
                        sslmode='disable', gssencmode='disable',
                        options='-c lock_timeout=4s -c statement_timeout=10s', **target)
                    connection.autocommit = True
                    with connection.cursor() as cursor:
                        cursor.execute('SELECT inet_server_port(),'
                                       ' left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)')
                        self.port, timeline = cursor.fetchone()
                    self.tl = int(timeline, 16)
                    self.connection = connection
                    return
            except psycopg2.Error:
                if connection:
                    connection.close()
            self.pause(0.1)

    # -- one transaction --------------------------------------------------------

    def transact(self, event, body, autocommit=False):
        """Run body(cursor, event) as a transaction and write down what became of it."""
        self.connect()
        event.set(port=self.port, tl=self.tl, t0=time.monotonic())
        connection = self.connection
        committing = autocommit     # a single statement commits before it answers
        del connection.notices[:]
        try:
            connection.autocommit = autocommit
            with connection.cursor() as cursor:
                body(cursor, event)
                if not autocommit:
                    cursor.execute(LSN)
                    event.lsn0 = int(cursor.fetchone()[0])
                    committing = True
                    if self.random.random() < LOSE:
                        self.lose_answer()
                    connection.commit()
        except psycopg2.Error as error:
            return self.ended(event, self.failed(committing, autocommit), error.pgcode)
        # PostgreSQL says so if a commit was not replicated: it is no success
        outcome = 'unknown' if any('synchronous replication' in text for text in connection.notices) else 'acked'
        self.ended(event, outcome)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(LSN)
                event.lsn1 = int(cursor.fetchone()[0])
        except psycopg2.Error:
            self.drop()
        return outcome

    def lose_answer(self):
        """Send COMMIT and leave: the server commits, and this client does not know."""
        os.write(self.connection.fileno(), b'Q' + struct.pack('!I', 11) + b'COMMIT\0')
        self.connection.close()

    def failed(self, committing, autocommit):
        """What became of a transaction that got an error."""
        connection = self.connection
        outcome = 'unknown' if committing else 'aborted'
        if not connection.closed:
            try:
                connection.rollback()
                return 'refused' if autocommit or not committing else 'unknown'
            except psycopg2.Error:
                pass
        self.drop()
        return outcome

    def ended(self, event, outcome, sqlstate=None):
        self.load.ledger.add(event, outcome, sqlstate)
        return outcome

    # -- clients ----------------------------------------------------------------

    def client(self):
        load = self.load
        if self.random.random() < 0.03:
            self.drop()
        draw = self.random.random()
        if load.again:
            try:
                self.repeat(*load.again.popleft())
            except IndexError:
                pass
        elif draw < 0.35:
            op = '%d' % load.number()
            what = self.random.choice(['claim', 'claim', 'call', 'lease'])
            load.recent.append((what, what + op))
            self.repeat(what, what + op)
        elif draw < 0.55 and load.recent:
            self.repeat(*self.random.choice(load.recent))
        elif draw < 0.75:
            self.fenced_write('shared%d' % self.random.randrange(SHARED))
        elif draw < 0.80:
            self.old_token()
        else:
            self.enqueue()
        self.pause(self.random.random() * load.pace)

    def repeat(self, what, op):
        """Until the operation is done, by this client or an earlier one."""
        attempt = 0
        while not getattr(self, what)(op, attempt):
            attempt += 1
            self.gate()
            self.pause(0.05)

    def key(self, op, attempt):
        return '%s#%d' % (op, attempt) if self.load.mistake == 'newkey' and attempt else op

    def claim(self, op, attempt):
        key = self.key(op, attempt)

        def body(cursor, event):
            cursor.execute("SELECT status, result ->> 'run' FROM idem_claim(%s)", (key,))
            status, run = cursor.fetchone()
            event.answer = status
            if status == 'claimed':
                event.run = 'run%d' % self.load.number()
                cursor.execute('INSERT INTO ha.ops VALUES (%s, %s, %s)', (op, event.run, key))
                cursor.execute("SELECT idem_finish(%s, jsonb_build_object('run', %s))", (key, event.run))
            elif status == 'finished':
                event.set(run=run, replay=True)

        event = Event('claim', self.who, op=op)
        return self.transact(event, body) == 'acked' and event.answer in ('claimed', 'finished')

    def call(self, op, attempt):
        key = self.key(op, attempt)

        def body(cursor, event):
            cursor.execute("SELECT status, result ->> 'run', replayed"
                           "  FROM idem_call(%s, 'ha.handler', jsonb_build_object('op', %s))", (key, op))
            event.answer, event.run, event.replay = cursor.fetchone()
            event.replay = bool(event.replay)

        event = Event('call', self.who, op=op)
        return self.transact(event, body) == 'acked' and event.answer == 'finished'

    def take(self, key, length, op=None):
        """A lease in a transaction of its own; returns the event."""
        def body(cursor, event):
            cursor.execute("SELECT status, result ->> 'run', token, pg_current_wal_insert_lsn() - '0/0'"
                           '  FROM idem_lease(%s, %s)', (key, length))
            event.answer, run, event.token, lsn = cursor.fetchone()
            event.lsn0 = int(lsn)
            if event.answer == 'finished':
                event.set(run=run, replay=True, op=op)

        event = Event('take', self.who, key=key)
        self.transact(event, body, autocommit=True)
        return event

    def holds(self, taken):
        return taken.outcome == 'acked' and taken.answer in ('claimed', 'resumed')

    def lease(self, op, attempt):
        key = self.key(op, attempt)
        taken = self.take(key, '1 s', op)
        if taken.outcome == 'acked' and taken.answer == 'finished':
            return True
        if not self.holds(taken):
            return False
        self.outside_call()

        def body(cursor, event):
            cursor.execute('SELECT idem_fence(%s, %s)', (key, taken.token))
            cursor.execute('INSERT INTO ha.ops VALUES (%s, %s, %s)', (op, event.run, key))
            cursor.execute("SELECT idem_finish(%s, jsonb_build_object('run', %s), token => %s)",
                           (key, event.run, taken.token))

        while True:
            event = Event('lease', self.who, op=op, key=key, token=taken.token, run='run%d' % self.load.number())
            outcome = self.transact(event, body)
            if outcome in ('acked', 'refused'):
                return outcome == 'acked'
            self.gate()

    def outside_call(self):
        """Some calls take longer than the lease."""
        self.pause(1.2 if self.random.random() < 0.04 else self.random.random() * 0.02)

    def fenced_write(self, key):
        taken = self.take(key, self.random.choice(['1 s', '300 ms']))
        if not self.holds(taken):
            return
        self.load.tokens[key].append(taken.token)
        self.outside_call()
        while self.fence(key, taken.token, self.random.random() < 0.8) in ('unknown', 'aborted'):
            self.gate()

    def fence(self, key, token, release):
        def body(cursor, event):
            cursor.execute('SELECT idem_fence(%s, %s)', (key, token))
            cursor.execute('INSERT INTO ha.fenced VALUES (%s, %s, %s)', (key, token, event.run))
            if release:
                cursor.execute('SELECT idem_release(%s, %s)', (key, token))

        return self.transact(Event('fence', self.who, key=key, token=token, run='run%d' % self.load.number()), body)

    def old_token(self):
        """A worker that was suspended comes back after another one took over."""
        key = 'shared%d' % self.random.randrange(SHARED)
        old = self.load.tokens[key][-20:-1]
        if old:
            self.fence(key, self.random.choice(old), False)

    def enqueue(self):
        key = 'key%d' % self.random.randrange(6) if self.random.random() < 0.6 else None

        def body(cursor, event):
            cursor.execute("SELECT job_id, outcome FROM idem_enqueue('ha', jsonb_build_object('enq', %s), key => %s)",
                           (event.enq, key))
            event.job, event.answer = cursor.fetchone()
            cursor.execute('INSERT INTO ha.want VALUES (%s, %s, %s, %s)', (event.enq, event.job, key, event.answer))

        self.transact(Event('enqueue', self.who, enq='enq%d' % self.load.number()), body)

    # -- workers ----------------------------------------------------------------

    def worker(self):
        if self.random.random() < 0.03:
            self.drop()
        if not (self.work_tick() if self.random.random() < 0.3 else self.work_job()):
            self.wait()

    def wait(self):
        """Until a transaction that enqueues a job commits."""
        def body(cursor, event):
            cursor.execute("CALL idem_wait_any(ARRAY['ha', 'ticks'], '500 ms')")
            event.answer = cursor.fetchone()[0]

        self.transact(Event('wait', self.who), body, autocommit=True)

    def work_tick(self):
        """One tick, in one transaction; false if there is none."""
        def body(cursor, event):
            cursor.execute("SELECT job_id, token, key FROM idem_fetch('ticks')")
            row = cursor.fetchone()
            if row:
                event.job, event.token, event.answer = row
                cursor.execute('INSERT INTO ha.ticks VALUES (%s, %s, %s)', (event.answer, event.job, event.run))
                cursor.execute('SELECT idem_complete(%s, %s)', (event.job, event.token))

        event = Event('tick', self.who, run='run%d' % self.load.number())
        self.transact(event, body)
        return event.answer is not None

    def work_job(self):
        def body(cursor, event):
            cursor.execute("SELECT job_id, token, attempt, payload ->> 'enq', key, pg_current_wal_insert_lsn() - '0/0'"
                           "  FROM idem_fetch('ha', lease => '1 s', worker => %s)", (self.who,))
            row = cursor.fetchone()
            if row:
                event.job, event.token = row[:2]
                event.lsn0 = int(row[5])
                event.answer = row[2:5]

        fetched = Event('fetch', self.who)
        self.transact(fetched, body, autocommit=True)
        if fetched.outcome != 'acked' or fetched.answer is None:
            return False
        attempt, enq, key = fetched.answer
        draw = self.random.random()
        if draw < 0.05:
            self.pause(1.2)         # too late: the token is old if another worker fetched the job,
        elif attempt > 1 and draw < 0.5:
            self.pause(0.4)         # which is still at it
        while self.end_job(fetched, attempt, enq, key, draw < 0.9) in ('unknown', 'aborted'):
            self.gate()
        self.pause(self.random.random() * self.load.pace / 2)
        return True

    def end_job(self, fetched, attempt, enq, key, done):
        def body(cursor, event):
            cursor.execute('INSERT INTO ha.runs VALUES (%s, %s, %s, %s, %s, %s, %s)',
                           (fetched.job, fetched.token, attempt, event.run, enq, key, done))
            if done:
                cursor.execute('SELECT idem_complete(%s, %s)', (fetched.job, fetched.token))
            else:
                cursor.execute("SELECT idem_fail(%s, %s, 'drawn')", (fetched.job, fetched.token))

        return self.transact(Event('job', self.who, job=fetched.job, token=fetched.token, enq=enq,
                                   run='run%d' % self.load.number(), answer='done' if done else 'failed'), body)
